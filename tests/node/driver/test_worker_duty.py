"""The worker's duty among twins on a mock clock: whom it believes, what it holds, and what it survives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvasir_node import __version__
from kvasir_node.driver.conversation import ask, hear, tell
from kvasir_node.driver.worker_duty import JOIN_DELAY_MAX_S
from kvasir_node.model.store import StoredModel
from kvasir_node.supervisor import WATCH_INTERVAL_S, WATCH_TIMEOUT_S
from kvasir_node.swarm_files import Founding, SwarmFiles
from kvasir_proto.codec import encode
from kvasir_proto.errors import (
    ConfigurationInvalid,
    DiskFull,
    EngineFailed,
    ModelUnusable,
    PortInUse,
    RemoteProtocolError,
    TransportUnavailable,
)
from kvasir_proto.ids import NodeId
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    EngineFault,
    ExpectDialler,
    Listen,
    LoadShard,
    QueryStatistics,
    SetFence,
)
from kvasir_proto.messages.swarm import (
    DataGrant,
    DataRequest,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Join,
    Joined,
    Leave,
    PlanAccept,
    PlanOffer,
    PlanSuperseded,
    Welcome,
)
from kvasir_proto.placement.plan import Plan, make_plan
from kvasir_proto.signing import sign_message
from kvasir_proto.term_proof import ProvenTerm, cast_vote, founding_electorate, make_term_proof
from tests.node.driver.memory_network import MemoryHost, MemoryStream
from tests.node.driver.twins import TwinWorker, World, node_key, node_of, open_world, until

REPORT_KEYS = {
    *("epoch", "term", "backbone", "ranks", "swarm", "model", "plan", "shards", "n_experts_held", "members"),
    *("compact_activations", "partial_sums"),
    *("engine", "data_address", "last_error", "last_error_at", "last_error_recovered"),
}


class Backbone:
    """A backbone that the test speaks for: it welcomes, takes heartbeats, and offers what it is told to."""

    def __init__(self, world: World, directory: Path, number: int = 0) -> None:
        self.world = world
        self.key = node_key(number)
        self.node_id = node_of(self.key)
        manifest = world.model.manifest
        files = SwarmFiles(directory / f"backbone-{number}")
        self.founding: Founding = files.found(self.key, manifest.digest(), world.model.name)
        self.host: MemoryHost = world.network.host(self.node_id)
        self.welcome = Welcome(1, self.founding.signed_manifest, self.founding.proof)
        self.heard: list[Any] = []
        self.is_silent = False
        world.network.serve(self.node_id, self.serve)

    async def serve(self, _node_id: NodeId, stream: MemoryStream) -> None:
        """Answer as a backbone does."""
        while True:
            message = await hear(stream, 100.0)
            self.heard.append(message)
            if self.is_silent:
                continue
            match message:
                case Hello():
                    await tell(stream, self.welcome)
                case Join():
                    await tell(stream, Joined(0, 1, 1000))
                case Heartbeat():
                    await tell(stream, HeartbeatReply(0, 1))
                case Leave():
                    return

    def heartbeats(self) -> list[str]:
        """The states that were told."""
        return [each.state for each in self.heard if isinstance(each, Heartbeat)]

    def plan(self, *workers: TwinWorker | Backbone, **changes: Any) -> Plan:
        """A plan for these workers."""
        manifest = self.world.model.manifest
        numbers = {"epoch": 0, "term": 1, "revision": 1} | changes
        return make_plan(
            manifest.moe_layers, manifest.n_expert, [each.node_id for each in workers], **numbers
        )

    def sign(self, plan: Plan, number: int = 0) -> bytes:
        """The plan, signed by the node of that number."""
        return sign_message(node_key(number), self.founding.swarm.digest, plan)

    def proof(self, epoch: int = 0, term: int = 1, number: int = 0, voter: int = 0) -> bytes:
        """A proof that makes a node backbone of that term, by the vote of another."""
        electorate = founding_electorate(node_key(voter).public_key().public_bytes_raw())
        proven = ProvenTerm(epoch, term, node_of(node_key(number)))
        vote = cast_vote(node_key(voter), self.founding.swarm.digest, electorate, proven)
        return make_term_proof(electorate, proven, [vote])

    async def ask(self, worker: TwinWorker, message: Any, reply_type: type[Any]) -> Any:
        """One question to a worker on a stream of its own."""
        stream = await self.host.open_stream(worker.node_id)
        try:
            return await ask(stream, message, reply_type, 60.0)
        finally:
            await stream.close()

    async def offer(self, worker: TwinWorker, plan: Plan, proof: bytes | None = None) -> PlanAccept:
        """Offer a plan with the founding proof, or another one."""
        reply = await self.ask(worker, PlanOffer(self.sign(plan), proof or self.founding.proof), PlanAccept)
        assert isinstance(reply, PlanAccept)
        return reply


async def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        await call()
    return caught.value.code


async def member(world: World, tmp_path: Path, **settings: Any) -> tuple[Backbone, TwinWorker]:
    """A worker that has joined and whose engine runs."""
    backbone = Backbone(world, tmp_path)
    worker = world.join(1, backbone, **settings)
    await until(lambda: worker.state == "joining" and worker.duty.state()[1] == "no plan yet")
    return backbone, worker


# -- joining ---------------------------------------------------------------------------------------


async def test_it_joins_holds_what_the_plan_says_and_grants_data(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        assert worker.disk.manifest == backbone.founding.signed_manifest
        plan = backbone.plan(worker)
        accept = await backbone.offer(worker, plan)
        shard = plan.shard_of(worker.node_id)
        assert (accept.revision, accept.shard_digest) == (1, shard.digest())
        assert accept.memory_bytes == model.manifest.shard_size_bytes(shard)
        assert worker.state == "ready"
        report = worker.duty.report()
        assert report["n_experts_held"] == 32
        assert report["ranks"] == ["output", "bulk"]
        engine = worker.engines.last
        founder = world.found(7)  # an engine whose certificate is real, of another node
        await until(lambda: founder.engines.all)
        foreign = DataRequest(founder.engines.last.certificate, "backbone", backbone.founding.proof)
        assert await code_of(lambda: backbone.ask(worker, foreign, DataGrant)) in (
            "wrong_node",
            "bad_signature",
        )
        assert engine.count(ExpectDialler) == 0


async def test_the_report_is_complete_in_every_state(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found(workers_min=1)
        worker = world.join(1, founder)
        seen: dict[str, None] = {}

        def check(wanted: str) -> bool:
            assert set(worker.duty.report()) == REPORT_KEYS
            state, reason = worker.duty.state()
            assert state == "ready" or reason
            seen[state] = None
            return state == wanted

        await until(lambda: check("ready"))
        await founder.crash()
        await until(lambda: check("isolated"))
        founder.start()
        await until(lambda: check("ready"))
        worker.engines.last.die()
        await until(lambda: check("starting"))
        await until(lambda: check("ready"))
        assert {"joining", "starting", "ready", "isolated"} <= set(seen)


async def test_with_only_a_dead_bootstrap_it_stays_up_and_says_so(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = Backbone(world, tmp_path)
        world.network.drop(backbone.node_id)
        worker = world.join(1, backbone)
        await trio.sleep(200.0)
        state, reason = worker.duty.state()
        assert state == "joining"
        assert "cannot reach" in reason
        assert backbone.host.addresses()[0] in reason
        attempts = len(worker.host.dialled)
        await trio.sleep(250.0)
        assert 8 <= len(worker.host.dialled) - attempts <= 11, "every 15 s, and 10 s for each dial"
        world.network.serve(backbone.node_id, backbone.serve)
        started = trio.current_time()
        await until(lambda: worker.duty.state()[1] == "no plan yet")
        assert trio.current_time() - started < JOIN_DELAY_MAX_S + 15.0


async def test_a_night_without_the_backbone_is_survived(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        world.network.drop(backbone.node_id)
        await trio.sleep(12 * 3600.0)
        assert worker.state == "isolated"
        world.network.serve(backbone.node_id, backbone.serve)
        await until(lambda: worker.state == "joining")


async def test_any_bootstrap_address_that_answers_will_do(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        dead = Backbone(world, tmp_path, 5)
        world.network.drop(dead.node_id)
        backbone = Backbone(world, tmp_path)
        worker = world.join(1, dead, backbone)
        await until(lambda: worker.duty.state()[1] == "no plan yet")


async def test_a_backbone_that_does_not_answer_is_given_up_at_a_deadline(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = Backbone(world, tmp_path)
        backbone.is_silent = True
        worker = world.join(1, backbone)
        await until(lambda: "nothing came for 10 s" in worker.duty.state()[1])
        backbone.is_silent = False
        await until(lambda: worker.duty.state()[1] == "no plan yet")


async def test_a_backbone_that_falls_silent_isolates_it_until_it_answers_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        backbone.is_silent = True
        silent = trio.current_time()
        await until(lambda: worker.state == "isolated")
        assert trio.current_time() - silent < 12.0
        backbone.is_silent = False
        await until(lambda: worker.state == "joining")


async def test_the_swarm_of_its_home_is_the_only_one_it_enters(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        await worker.crash()
        other = Backbone(world, tmp_path, 5)
        backbone.welcome = other.welcome
        worker.start()
        await until(lambda: "another swarm" in worker.duty.state()[1])
        assert worker.disk.manifest == backbone.founding.signed_manifest
        assert worker.duty.report()["backbone"] is None


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda each: {"proof": each.proof(voter=9)}, "electorate"),
        (lambda each: {"proof": each.proof(number=9)}, "another node backbone"),
        (lambda each: {"proof": b"x"}, ""),
        (lambda each: {"swarm_manifest": b"x"}, ""),
        (lambda each: {"swarm_manifest": each.founding.signed_manifest[:-1]}, ""),
        (lambda each: {"version": 2}, "version 2"),
    ],
)
async def test_a_welcome_that_proves_nothing_is_not_believed_nor_remembered(
    autojump_clock: MockClock,
    model: StoredModel,
    tmp_path: Path,
    change: Callable[[Backbone], dict[str, Any]],
    said: str,
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = Backbone(world, tmp_path)
        honest = backbone.welcome
        backbone.welcome = replace(honest, **change(backbone))
        worker = world.join(1, backbone)
        await until(lambda: len([each for each in backbone.heard if isinstance(each, Hello)]) >= 2)
        assert worker.state == "joining"
        assert said in worker.duty.state()[1]
        assert worker.disk.manifest is None
        assert worker.disk.fences.saved == []
        assert not worker.engines.all
        backbone.welcome = honest
        await until(lambda: worker.duty.state()[1] == "no plan yet")


# -- the fence -------------------------------------------------------------------------------------


async def test_the_fence_is_on_the_disk_before_the_engine_hears_of_it(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        assert worker.disk.fences.saved == [(0, 1)]
        heard_at_save: list[list[tuple[int, int]]] = []

        def heard() -> list[tuple[int, int]]:
            fences = [each for each in worker.engines.last.received if isinstance(each, SetFence)]
            return [(each.epoch, each.term) for each in fences]

        worker.disk.fences.on_save = lambda _epoch, _term: heard_at_save.append(heard())
        plan = backbone.plan(worker, term=4)
        await backbone.offer(worker, plan, backbone.proof(term=4))
        assert worker.disk.fences.saved == [(0, 1), (0, 4)]
        assert all((0, 4) not in each for each in heard_at_save)
        assert (0, 4) in heard()
        assert worker.duty.report()["term"] == 4


async def test_a_fence_that_cannot_be_saved_is_not_told_to_the_engine(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)

        def full(_epoch: int, _term: int) -> None:
            raise EngineFailed("the disk is full")

        worker.disk.fences.on_save = full
        offer = PlanOffer(backbone.sign(backbone.plan(worker, term=4)), backbone.proof(term=4))
        assert await code_of(lambda: backbone.ask(worker, offer, PlanAccept)) == "engine_failed"
        assert all(each.term < 4 for each in worker.engines.last.received if isinstance(each, SetFence))
        assert worker.duty.report()["last_error"] == "the disk is full"
        assert not worker.has_ended


async def test_a_disk_that_is_full_when_a_backbone_is_first_followed_is_said_and_waited_out(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = Backbone(world, tmp_path)
        worker = world.join(1, backbone, start=False)

        def full(_epoch: int, _term: int) -> None:
            raise ConfigurationInvalid("fence.json cannot be written: No space left on device")

        worker.disk.fences.on_save = full
        worker.start()
        await until(lambda: "No space left" in worker.duty.state()[1])
        assert not worker.has_ended
        worker.disk.fences.on_save = lambda _epoch, _term: None
        await until(lambda: worker.duty.state()[1] == "no plan yet")


REFUSED_OFFERS: dict[str, tuple[Callable[[Backbone, TwinWorker], PlanOffer], str]] = {
    "a proof by another electorate": (
        lambda b, w: PlanOffer(b.sign(b.plan(w)), b.proof(voter=9)),
        "unknown_electorate",
    ),
    "the proof of another backbone": (
        lambda b, w: PlanOffer(b.sign(b.plan(w), 9), b.proof(number=9)),
        "not_backbone",
    ),
    "no proof": (lambda b, w: PlanOffer(b.sign(b.plan(w)), b"x"), "malformed"),
    "a plan of another term": (
        lambda b, w: PlanOffer(b.sign(b.plan(w, term=2)), b.founding.proof),
        "stale_term",
    ),
    "a plan of another epoch": (
        lambda b, w: PlanOffer(b.sign(b.plan(w, epoch=1)), b.founding.proof),
        "stale_term",
    ),
    "a plan signed by another node": (
        lambda b, w: PlanOffer(b.sign(b.plan(w), 9), b.founding.proof),
        "wrong_node",
    ),
    "no plan": (lambda b, w: PlanOffer(b"x", b.founding.proof), "malformed"),
    "a plan without this node": (
        lambda b, w: PlanOffer(b.sign(replace(b.plan(w), nodes=(node_of(node_key(9)),))), b.founding.proof),
        "empty_shard",
    ),
    "experts the model does not have": (
        lambda b, w: PlanOffer(
            b.sign(make_plan([0, 1], 64, [w.node_id], epoch=0, term=1, revision=1)), b.founding.proof
        ),
        "wrong_shard",
    ),
    "layers the model does not have": (
        lambda b, w: PlanOffer(
            b.sign(make_plan([0, 77], 8, [w.node_id], epoch=0, term=1, revision=1)), b.founding.proof
        ),
        "wrong_shard",
    ),
}


@pytest.mark.parametrize("name", REFUSED_OFFERS)
async def test_an_offer_that_is_not_the_backbones_word_is_refused(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, name: str
) -> None:
    make_offer, code = REFUSED_OFFERS[name]
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        offer = make_offer(backbone, worker)
        assert await code_of(lambda: backbone.ask(worker, offer, PlanAccept)) == code
        assert worker.disk.fences.saved == [(0, 1)], "the fence has not moved"
        assert worker.engines.last.count(LoadShard) == 0
        await backbone.offer(worker, backbone.plan(worker))
        assert worker.state == "ready"


async def test_a_backbone_behind_the_fence_is_refused(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        worker.disk.fences.save(0, 3)
        offer = PlanOffer(backbone.sign(backbone.plan(worker)), backbone.founding.proof)
        assert await code_of(lambda: backbone.ask(worker, offer, PlanAccept)) == "stale_term"
        data = DataRequest(b"x", "backbone", backbone.founding.proof)
        assert await code_of(lambda: backbone.ask(worker, data, DataGrant)) == "stale_term"
        await worker.crash()
        worker.start()
        await until(lambda: "behind the fence" in worker.duty.state()[1])
        assert worker.disk.fences.saved == [(0, 1), (0, 3)]


async def test_only_a_backbones_own_engine_is_granted_data(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        proof = backbone.founding.proof
        own = worker.engines.last.certificate
        for request, code in [
            (DataRequest(b"x", "backbone", proof), "malformed"),
            (DataRequest(own, "worker", proof), "wrong_role"),
            (DataRequest(own, "backbone", proof), "wrong_node"),
            (DataRequest(own, "backbone", backbone.proof(voter=9)), "unknown_electorate"),
        ]:
            assert await code_of(partial(backbone.ask, worker, request, DataGrant)) == code
        assert worker.engines.last.count(ExpectDialler) == 0


@pytest.mark.parametrize("message", [Leave("x"), Joined(0, 1, 1), Hello((1,), __version__)])
async def test_what_is_not_for_a_worker_is_refused(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, message: Any
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        assert await code_of(lambda: backbone.ask(worker, message, PlanAccept)) == "unexpected_message"


@pytest.mark.parametrize("body", [b"", b"\xc1", encode(Leave("x"))[:-1]])
async def test_nonsense_is_refused(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, body: bytes
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        stream = await backbone.host.open_stream(worker.node_id)
        await stream.send(body)
        answer: Any = await hear(stream)
        assert answer.code == "malformed"


async def test_before_it_is_a_member_it_follows_nobody(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = Backbone(world, tmp_path)
        backbone.is_silent = True
        worker = world.join(1, backbone)
        offer = PlanOffer(backbone.sign(backbone.plan(worker)), backbone.founding.proof)
        assert await code_of(lambda: backbone.ask(worker, offer, PlanAccept)) == "not_a_member"


# -- shards ----------------------------------------------------------------------------------------


async def test_a_shard_that_does_not_fit_is_refused_with_need_and_have(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    whole = model.manifest.shard_size_bytes(model.manifest.whole_shard())
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path, memory_bytes=whole - 1)
        with pytest.raises(RemoteProtocolError, match=r"needs \d+ MiB and \d+ MiB are offered") as caught:
            await backbone.offer(worker, backbone.plan(worker))
        assert caught.value.code == "no_memory"
        worker.engines.last.die()
        await until(lambda: len(worker.engines.all) == 2 and worker.state == "joining")
        two = backbone.plan(worker, world.join(2, backbone, start=False), revision=2)
        await backbone.offer(worker, two)
        assert worker.state == "ready"


async def test_a_shard_that_just_fits_is_taken(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    whole = model.manifest.shard_size_bytes(model.manifest.whole_shard())
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path, memory_bytes=whole)
        await backbone.offer(worker, backbone.plan(worker))
        assert worker.state == "ready"


async def test_an_older_plan_is_answered_with_the_newer_and_the_same_one_costs_nothing(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        await backbone.offer(worker, backbone.plan(worker, revision=5))
        await backbone.offer(worker, backbone.plan(worker, revision=5))
        await backbone.offer(worker, backbone.plan(worker, revision=6))
        assert worker.engines.last.count(LoadShard) == 1
        assert worker.duty.report()["plan"] == {"revision": 6}
        older = PlanOffer(backbone.sign(backbone.plan(worker, revision=5)), backbone.founding.proof)
        answer = await backbone.ask(worker, older, PlanSuperseded)
        assert answer == PlanSuperseded(backbone.sign(backbone.plan(worker, revision=6)))
        # Nor is another one with the same number believed.
        other = PlanOffer(backbone.sign(backbone.plan(worker, backbone, revision=6)), backbone.founding.proof)
        assert await backbone.ask(worker, other, PlanSuperseded) == answer
        assert worker.duty.report()["plan"] == {"revision": 6}


async def test_revisions_begin_again_in_a_new_term(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        await backbone.offer(worker, backbone.plan(worker, revision=5))
        await backbone.offer(worker, backbone.plan(worker, term=2, revision=1), backbone.proof(term=2))
        assert worker.duty.report()["plan"] == {"revision": 1}


async def test_a_model_that_is_missing_is_said_and_found_once_it_is_there(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        worker.model_error = ModelUnusable("the swarm's model is not here")
        offer = PlanOffer(backbone.sign(backbone.plan(worker)), backbone.founding.proof)
        assert await code_of(lambda: backbone.ask(worker, offer, PlanAccept)) == "model_unusable"
        assert worker.duty.report()["last_error"] == "the swarm's model is not here"
        assert worker.duty.report()["last_error_recovered"] is False
        assert worker.state == "joining"
        worker.model_error = None
        await backbone.ask(worker, offer, PlanAccept)
        assert worker.state == "ready"


async def test_a_shard_that_its_engine_cannot_load_is_said_and_can_be_tried_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        fault = EngineFault(None, "model_unusable", "the file is damaged", ModelUnusable.exit_code)
        worker.engines.last.refusals[LoadShard] = fault
        offer = PlanOffer(backbone.sign(backbone.plan(worker)), backbone.founding.proof)
        assert await code_of(lambda: backbone.ask(worker, offer, PlanAccept)) == "model_unusable"
        assert worker.state == "loading"
        assert len(worker.engines.all) == 1, "the engine is not to blame"
        worker.engines.last.refusals.clear()
        await backbone.ask(worker, offer, PlanAccept)
        assert worker.state == "ready"


# -- its engine ------------------------------------------------------------------------------------


async def test_an_engine_that_dies_is_restarted_with_its_shard_and_fence_and_the_backbone_is_told(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        plan = backbone.plan(worker)
        await backbone.offer(worker, plan)
        first = worker.engines.last
        told = len(backbone.heartbeats())
        died = trio.current_time()
        first.die()
        await until(lambda: len(backbone.heartbeats()) > told)
        assert trio.current_time() - died < 0.2, "at once, not at the next heartbeat"
        assert backbone.heartbeats()[told] == "starting"
        assert "killed by SIGKILL" in worker.duty.state()[1]
        await until(lambda: worker.state == "ready")
        second = worker.engines.last
        assert second is not first
        kinds = [type(each) for each in second.received]
        assert kinds.index(SetFence) < kinds.index(LoadShard)
        loads = [each for each in second.received if isinstance(each, LoadShard)]
        assert [ShardSet.decode(each.shard) for each in loads] == [plan.shard_of(worker.node_id)]
        assert worker.disk.generation == 2


async def test_an_engine_that_does_not_answer_any_more_is_killed_and_another_takes_its_place(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        await backbone.offer(worker, backbone.plan(worker))
        first = worker.engines.last
        mute_since = trio.current_time()
        first.ignored.add(QueryStatistics)
        await until(lambda: not first.is_alive)
        assert WATCH_TIMEOUT_S <= trio.current_time() - mute_since <= WATCH_INTERVAL_S + WATCH_TIMEOUT_S + 1
        await until(lambda: "this node killed it" in str(worker.duty.report()["last_error"]))
        assert "mute for 30 s" in worker.duty.report()["last_error"]
        await until(lambda: worker.state == "ready")
        assert worker.engines.last.count(LoadShard) == 1


async def test_an_engine_waits_for_room_on_the_disk_and_the_backbone_hears_why(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        plan = backbone.plan(worker)
        await backbone.offer(worker, plan)
        worker.disk.generation_error = DiskFull("engine-generation: No space left on device")
        worker.engines.last.die()
        await until(lambda: "No space left" in worker.duty.state()[1])
        offer = PlanOffer(backbone.sign(plan), backbone.founding.proof)
        with pytest.raises(RemoteProtocolError, match="No space left") as caught:
            await backbone.ask(worker, offer, PlanAccept)
        assert caught.value.code == "engine_starting"
        assert not worker.has_ended
        worker.disk.generation_error = None
        await until(lambda: worker.state == "ready")


async def test_a_fence_that_cannot_be_saved_is_not_followed_and_tried_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    def refuse(_epoch: int, _term: int) -> None:
        raise DiskFull("fence.json cannot be written: No space left on device")

    async with open_world(model, tmp_path) as world:
        backbone = Backbone(world, tmp_path)
        worker = world.join(1, backbone, start=False)
        worker.disk.fences.on_save = refuse
        worker.start()
        await until(lambda: "No space left" in str(worker.duty.report()["last_error"]))
        await trio.sleep(60.0)
        assert (worker.has_ended, worker.duty.report()["term"]) == (False, 0)
        worker.disk.fences.on_save = lambda _epoch, _term: None
        await until(lambda: worker.duty.report()["term"] == 1)


async def test_an_engine_that_loads_for_long_is_not_taken_for_dead(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        engine = worker.engines.last
        engine.ignored |= {LoadShard, QueryStatistics}
        offer = PlanOffer(backbone.sign(backbone.plan(worker)), backbone.founding.proof)
        asked = trio.current_time()
        with contextlib.suppress(TransportUnavailable):
            await backbone.ask(worker, offer, PlanAccept)
        assert trio.current_time() - asked > WATCH_INTERVAL_S + WATCH_TIMEOUT_S
        assert engine.is_alive


async def test_an_offer_waits_for_the_engine_instead_of_being_refused(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        worker.engines.last.die()
        await until(lambda: worker.state == "starting")
        await backbone.offer(worker, backbone.plan(worker))
        assert worker.state == "ready"
        assert worker.engines.last.count(LoadShard) == 1


async def test_an_offer_does_not_wait_for_ever(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        worker.engines.failure = EngineFailed("no more processes")
        worker.engines.last.die()
        await until(lambda: worker.state == "starting")
        offer = PlanOffer(backbone.sign(backbone.plan(worker)), backbone.founding.proof)
        assert await code_of(lambda: backbone.ask(worker, offer, PlanAccept)) == "engine_starting"
        await until(lambda: worker.duty.report()["last_error"] == "no more processes")
        worker.engines.failure = None
        await until(lambda: worker.state != "starting")


async def test_an_engine_that_dies_just_when_the_backbone_is_followed_costs_nothing_more(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    """The fence is told to an engine that has just ended: the membership is tried again, the node lives."""
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        for _ in range(5):
            world.network.cut(backbone.node_id, worker.node_id)
            worker.engines.last.die()
            world.network.mend(backbone.node_id, worker.node_id)
            await until(lambda: worker.state == "joining" and worker.duty.state()[1] == "no plan yet")
        assert not worker.has_ended


async def test_a_data_port_that_is_taken_ends_the_node_when_it_starts(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    fault = EngineFault(None, "port_in_use", "port 7 is taken", PortInUse.exit_code)
    async with trio.open_nursery() as nursery:
        world = World(nursery, model, tmp_path)
        worker = world.join(1, Backbone(world, tmp_path))
        worker.engines.before_start = lambda engine: engine.refusals.update({Listen: fault})
        await until(lambda: worker.has_ended)
        nursery.cancel_scope.cancel()
    leaves = worker.failure
    while isinstance(leaves, ExceptionGroup):
        leaves = leaves.exceptions[0]
    assert isinstance(leaves, PortInUse)


async def test_an_address_that_means_nothing_to_others_is_not_granted(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found()
        worker = world.join(1, founder, data_host="0.0.0.0", start=False)
        fixed = worker.host.addresses()[0].split("/")[2]
        worker.start()
        await until(lambda: worker.engines.all and worker.engines.last.count(ExpectDialler))
        address = worker.engines.last.address
        worker.engines.last.address = (fixed, address[1])
        await until(lambda: founder.state == "ready")
        assert founder.engines.last.connected[worker.node_id].host == fixed


# -- leaving ---------------------------------------------------------------------------------------


async def test_leaving_is_heard_before_the_node_ends(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        started = trio.current_time()
        await worker.stop()
        assert trio.current_time() - started < 1.0
        assert backbone.heard[-1] == Leave("the node stops")
        assert not worker.engines.last.is_alive


async def test_leaving_a_backbone_that_does_not_answer_takes_bounded_time(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        backbone.is_silent = True
        started = trio.current_time()
        await worker.stop()
        assert trio.current_time() - started < 5.0


async def test_leaving_a_backbone_that_is_gone_takes_no_time(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, worker = await member(world, tmp_path)
        world.network.drop(backbone.node_id)
        started = trio.current_time()
        await worker.stop()
        assert trio.current_time() - started < 0.1


async def test_leaving_before_anything_was_joined_takes_no_time(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = Backbone(world, tmp_path)
        world.network.drop(backbone.node_id)
        worker = world.join(1, backbone)
        await trio.sleep(3.0)
        started = trio.current_time()
        await worker.stop()
        assert trio.current_time() - started < 0.1
