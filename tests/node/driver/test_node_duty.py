"""Whole nodes on a mock clock: real duties and real cores together, until text comes out and keeps coming."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock

from kvasir_node.driver.manifest_exchange import ManifestPieces
from kvasir_node.model.model_url import ModelUrl
from kvasir_node.model.store import StoredModel
from kvasir_proto.admission import Revocation, sign_revocation
from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.codec import encode
from kvasir_proto.election.configuration import make_recovery
from kvasir_proto.election.knowledge import StoredElectorates
from kvasir_proto.errors import (
    ConfigurationInvalid,
    KvasirError,
    ModelUnusable,
    NotReady,
    RemoteProtocolError,
)
from kvasir_proto.ids import public_key_of
from kvasir_proto.instants import seconds
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.membership.events import ClockSuspected
from kvasir_proto.messages.election import Evidence
from kvasir_proto.messages.engine import EngineFault, MeasureExperts, SessionEnded, TokenEmitted
from kvasir_proto.messages.local import GenerateRequest
from kvasir_proto.placement.plan import Plan
from kvasir_proto.sampling import Sampling
from kvasir_proto.signing import sign_message
from tests.node.driver.node_world import NodeWorld, TwinNode
from tests.node.driver.twins import TwinEngine, until
from tests.proto.declared import example_of
from tests.proto.small_swarm import RECOVERY_KEY


@contextlib.asynccontextmanager
async def open_nodes(model: StoredModel, directory: Path, **rules: Any) -> AsyncIterator[NodeWorld]:
    async with trio.open_nursery() as nursery:
        world = NodeWorld(nursery, model, directory, **rules)
        yield world
        assert not world.failures, world.failures
        nursery.cancel_scope.cancel()


async def generate(node: TwinNode) -> SessionEnded:
    async def ignore(_token: TokenEmitted) -> None:
        await trio.lowlevel.checkpoint()

    return await node.duty.backbone.generate(GenerateRequest("hello", (), 3, Sampling()), ignore)


async def test_nodes_elect_a_backbone_and_serve(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        world.start(0, 1, 2, 3)
        started = trio.current_time()
        await until(world.is_ready)
        assert trio.current_time() - started < 20
        assert world.backbone is not None
        assert (await generate(world.backbone)).reason == "length"


def own_record(node: TwinNode) -> CapabilityRecord:
    core = node.duty._core
    assert core is not None
    record = core.record_of(node.node_id)
    assert record is not None
    return record


def plan_of(node: TwinNode) -> Plan:
    assert node.duty._core is not None
    plan = node.duty._core.view().plan
    assert plan is not None
    return plan


async def test_a_node_stands_for_experts_once_its_engine_has_said_how_fast_it_is(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        (node,) = world.start(0)
        before = []
        node.engines.before_start = lambda _engine: before.append(own_record(node).ranks)
        await until(lambda: len(before) == 2)
        assert before[0] == (), "nothing is known of its kernel"
        await until(lambda: own_record(node).ranks == ("backbone", "output", "bulk"))
        await until(lambda: own_record(node).decode_token_ns == 9_000_000)
        said = own_record(node)
        assert said.expert_row_ns == 5000
        assert said.headroom_bytes == said.memory_bytes - 1
        engine = next(each for each in node.engines.all if each.role == "worker")
        node.engines.before_start = lambda each: setattr(each, "expert_row_ns", 7000)
        engine.die()
        await until(lambda: own_record(node).expert_row_ns == 7000)  # another engine, another measurement


async def test_an_engine_that_cannot_measure_itself_serves_all_the_same(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        fault = EngineFault(None, "not_measured", "no memory", 1)
        for node in world.start(0, 1):
            node.engines.before_start = lambda each: each.refusals.update({MeasureExperts: fault})
        await until(world.is_ready)
        assert [own_record(each).expert_row_ns for each in world.nodes] == [0, 0]


async def test_a_member_ten_times_slower_is_never_given_experts_and_an_equal_one_is(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone = await ready_nodes(world, 4)
        (slow,) = world.start(4)
        slow.engines.before_start = lambda each: setattr(each, "expert_row_ns", 50_000)
        await until(lambda: slow.life is not None and slow.duty._core is not None)
        await until(lambda: own_record(slow).expert_row_ns == 50_000)
        for _ in range(60):
            await trio.sleep(1.0)
            assert not len(plan_of(backbone).shard_of(slow.node_id))
        assert slow.duty.state() == ("ready", "the plan needs nothing of it")
        (equal,) = world.start(5)
        await until(lambda: len(plan_of(backbone).shard_of(equal.node_id)) > 0)


async def ready_nodes(world: NodeWorld, n_nodes: int, n_electors: int | None = None) -> TwinNode:
    """So many nodes that serve, with all the electors they can have; the backbone among them."""
    world.start(*range(n_nodes))
    await until(world.is_ready)
    await until(lambda: len(electorate_of(world)) == (n_electors or n_nodes))
    await until(world.is_ready)
    assert world.backbone is not None
    return world.backbone


def electorate_of(world: NodeWorld) -> tuple[bytes, ...]:
    core = world.nodes[0].duty._core
    assert core is not None
    return core.view().electorate.members


async def start_session(world: NodeWorld, node: TwinNode) -> list[Any]:
    """A session that gives one token and then nothing, and what becomes of it."""
    engine = backbone_engine(node)
    engine.n_tokens_emitted_max = 1
    outcome: list[Any] = []

    async def run() -> None:
        try:
            outcome.append(await generate(node))
        except KvasirError as error:
            outcome.append(error)

    world.nursery.start_soon(run)
    await until(lambda: bool(engine.sessions))
    return outcome


def backbone_engine(node: TwinNode) -> TwinEngine:
    return [each for each in node.engines.all if each.role == "backbone"][-1]


async def test_when_the_backbone_dies_a_standby_serves_within_seconds(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        first = await ready_nodes(world, 4)
        engines = sum(len(each.engines.all) for each in world.nodes)
        died = trio.current_time()
        await first.crash()
        await until(lambda: world.backbone is not None)
        second = world.backbone
        assert second is not None
        assert second is not first
        await until(lambda: second.duty.backbone.state()[0] in ("ready", "degraded"))
        took = trio.current_time() - died
        assert (await generate(second)).reason == "length"
        assert took < 10.0, took
        assert sum(len(each.engines.all) for each in world.nodes) == engines, "nothing had to be started"
        first.start()
        await until(world.is_ready)
        assert world.backbone is second, "who comes back takes nothing away"


async def test_a_backbone_that_leaves_is_followed_at_once(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        first = await ready_nodes(world, 4)
        outcome = await start_session(world, first)
        left = trio.current_time()
        await first.leave()
        assert "no longer the backbone" in str(outcome[0])
        await until(lambda: world.backbone is not None)
        second = world.backbone
        assert second is not None
        await until(lambda: second.duty.backbone.state()[0] in ("ready", "degraded"))
        took = trio.current_time() - left
        assert took < 5.0, took
        assert (await generate(second)).reason == "length"


async def test_a_backbone_without_a_quorum_stops_before_another_begins(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        first = await ready_nodes(world, 4)
        outcome = await start_session(world, first)
        for each in world.nodes:
            if each is not first:
                world.network.cut(first.node_id, each.node_id)
        await until(lambda: not first.reigns)
        assert sum(each.reigns for each in world.nodes) == 0, "one ends before the other begins"
        await until(lambda: bool(outcome))
        assert "no longer the backbone" in str(outcome[0])
        await until(lambda: world.backbone is not None)
        second = world.backbone
        assert second is not None
        assert second is not first
        await until(lambda: second.duty.backbone.state()[0] in ("ready", "degraded"))
        assert (await generate(second)).reason == "length"
        for each in world.nodes:
            world.network.mend(first.node_id, each.node_id)
        await until(world.is_ready)
        assert world.backbone is second


async def test_a_holder_that_dies_costs_no_session_and_comes_back(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone = await ready_nodes(world, 4)
        outcome = await start_session(world, backbone)
        holder = next(each for each in world.nodes if each is not backbone)
        engine = backbone_engine(backbone)
        died = trio.current_time()
        await holder.crash()
        await until(lambda: holder.node_id not in engine.connected)
        assert trio.current_time() - died < 10.0
        await trio.sleep(30.0)
        assert outcome == []
        assert backbone.duty.backbone.state()[0] in ("ready", "degraded")
        holder.start()
        await until(world.is_ready)
        await until(lambda: holder.node_id in engine.connected)
        assert outcome == []


async def test_a_restart_faster_than_any_suspicion_is_noticed(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone = await ready_nodes(world, 4)
        holder = next(each for each in world.nodes if each is not backbone)
        engine = backbone_engine(backbone)
        before = engine.connected[holder.node_id].certificate
        await holder.crash()
        holder.start()
        await until(
            lambda: (
                holder.node_id in engine.connected and engine.connected[holder.node_id].certificate != before
            )
        )
        await until(world.is_ready)


async def test_a_newcomer_is_taken_in_under_a_session(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone = await ready_nodes(world, 4)
        outcome = await start_session(world, backbone)
        (newcomer,) = world.start(9)
        engine = backbone_engine(backbone)
        await until(lambda: newcomer.node_id in engine.connected)
        for _ in range(100):
            await trio.sleep(0.2)
            assert backbone.duty.backbone.state()[0] in ("ready", "degraded")
        assert outcome == []
        await until(world.is_ready)


async def test_a_manifest_that_was_worth_nothing_is_followed_by_another_members(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    honest = model.manifest
    lie = replace(honest, header_sha256=bytes(32))
    assert lie.digest() == honest.digest()
    taken: list[ModelManifest] = []
    async with open_nodes(model, tmp_path) as world:
        await ready_nodes(world, 4)
        members = world.nodes[1:4]
        members[0].duty._pieces = ManifestPieces(lie)
        members[1].duty._pieces = None
        addresses = tuple(each.host.addresses()[0] for each in members)
        newcomer = TwinNode(world, 9, bootstrap=addresses)

        async def take(manifest: ModelManifest, told: Sequence[str]) -> None:
            await trio.lowlevel.checkpoint()
            assert told == (), "nobody asked for addresses"
            taken.append(manifest)
            if manifest != honest:
                raise ModelUnusable("its header is another")
            newcomer.has_model = True

        newcomer.has_model = False
        newcomer.take_manifest = take
        world.nodes.append(newcomer)
        newcomer.start()
        await until(world.is_ready)
    assert taken == [lie, honest]


@pytest.mark.parametrize("tell", [True, False])
async def test_a_newcomer_that_follows_addresses_is_told_those_that_members_tell(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, tell: bool
) -> None:
    url = "https://models.example/tiny.gguf"
    taken: list[Sequence[str]] = []
    async with open_nodes(replace(model, source=ModelUrl(url)), tmp_path) as world:
        founder = TwinNode(world, 0, tell_addresses=tell)
        world.nodes.append(founder)
        founder.start()
        newcomer = TwinNode(world, 9, follow_addresses=True)

        async def take(manifest: ModelManifest, told: Sequence[str]) -> None:
            await trio.lowlevel.checkpoint()
            taken.append(told)
            newcomer.has_model = True

        newcomer.has_model = False
        newcomer.take_manifest = take
        world.nodes.append(newcomer)
        newcomer.start()
        await until(lambda: taken)
    assert taken == [(url,) if tell else ()]


async def test_engines_that_die_are_replaced_and_everything_serves_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone = await ready_nodes(world, 4)
        holder = next(each for each in world.nodes if each is not backbone)
        for node, role in [(backbone, "backbone"), (holder, "worker"), (backbone, "worker")]:
            engine = next(each for each in node.engines.all if each.role == role and each.is_alive)
            count = len(node.engines.all)
            engine.die()
            await until(lambda node=node, count=count: len(node.engines.all) > count)  # type: ignore[misc]
            await until(world.is_ready)
            assert world.backbone is backbone, "an engine is not the node"
            assert (await generate(backbone)).reason == "length"


async def test_a_backbone_whose_engine_keeps_dying_leaves_the_lease_to_a_standby(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        first = await ready_nodes(world, 3)
        for n_engines in (1, 2, 3):
            engine, died = backbone_engine(first), trio.current_time()
            engine.die()
            await until(lambda engine=engine: backbone_engine(first) is not engine)  # type: ignore[misc]
            if n_engines < 3:
                await until(world.is_ready)
                assert world.backbone is first, "an engine may die"
        await until(lambda: world.backbone is not None and world.backbone is not first)
        assert trio.current_time() - died < 10.0
        await until(lambda: world.backbone.duty.backbone.state()[0] == "ready")  # type: ignore[union-attr]
        state, reason = first.duty.state()
        assert (state, "died 3 times within 10 min" in reason) == ("degraded", True)
        await trio.sleep(620)
        assert first.duty.state()[0] == "ready", "its engine has been well since"


async def test_a_quorum_lost_for_good_is_replaced_by_the_recovery_key(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        await ready_nodes(world, 4)
        last, *others = sorted(world.nodes, key=lambda each: -each.number)
        for each in others:
            await each.crash()
        await trio.sleep(60)
        assert world.backbone is None, "one of four electors elects nobody"
        assert last.duty.state()[0] in ("electing", "isolated")
        with pytest.raises(RemoteProtocolError, match="recovery key"):
            await last.duty.recover(make_recovery(last.key, world.swarm.digest, 1, "open", [last.node_id]))
        link = make_recovery(RECOVERY_KEY, world.swarm.digest, 1, "open", [last.node_id])
        assert await last.duty.recover(link) == 1
        with pytest.raises(RemoteProtocolError, match="known already"):
            await last.duty.recover(link)
        await until(lambda: world.backbone is last)
        assert b"recovered" in last.slots["electorate"], "it is on disk"
        for each in others:
            each.start()
        await until(world.is_ready)
        core = others[0].duty._core
        assert core is not None
        await until(lambda: core.view().electorate.epoch == 1)
        fence = core.view().fence
        assert fence is not None
        assert fence[:2] > (1, 0)


async def test_who_is_not_the_backbone_refuses_a_session_and_says_where_to_ask(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        await ready_nodes(world, 3)
        assert world.backbone is not None
        other = next(each for each in world.nodes if each is not world.backbone)
        await until(lambda: other.duty.state()[0] == "ready")
        where = f"sessions run on {world.backbone.node_id}: call 'kvasir-node generate' there"
        with pytest.raises(NotReady, match=where):
            await generate(other)


async def test_whom_the_founder_revokes_is_out_everywhere_and_on_disk_first(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        await ready_nodes(world, 4)
        founder, second, _, out = world.nodes
        revocation = Revocation(1, "node", public_key_of(out.node_id))
        forged = sign_message(second.key, world.swarm.digest, revocation)
        with pytest.raises(RemoteProtocolError, match="founder"):
            await second.duty.revoke(forged)
        signed = sign_revocation(founder.key, world.swarm, revocation)
        await founder.duty.revoke(signed)
        assert signed in founder.slots["admission"], "it is on disk"
        core = second.duty._core
        assert core is not None
        await until(lambda: core.record_of(out.node_id) is None)
        await until(lambda: out.duty.state() == ("revoked", "the founder has revoked this node's membership"))


async def test_a_slot_that_the_core_refuses_ends_the_start_and_is_named(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    """It ended `run` with 1, and nothing said which file it was."""
    async with trio.open_nursery() as nursery:
        world = NodeWorld(nursery, model, tmp_path)
        node = TwinNode(world, 0)
        node.slots["electorate"] = encode(StoredElectorates(True, (), (example_of(Evidence),)))
        node.start()
        await until(lambda: bool(world.failures))
        (error,) = world.failures
        assert isinstance(error, ConfigurationInvalid)
        assert "slot-electorate is damaged" in str(error)
        nursery.cancel_scope.cancel()


async def test_a_wrong_clock_is_in_the_log(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        (node,) = world.start(0)
        await until(lambda: node.duty._network is not None)
        with capture_logs() as logs:
            node.duty._take_event(ClockSuspected(seconds(-600)))
            node.duty._take_event(ClockSuspected(None))
        said = [(each["event"], each["offset_s"]) for each in logs if each["event"] == "clock_suspected"]
        assert said == [("clock_suspected", -600), ("clock_suspected", None)]


async def test_what_nobody_else_may_serve_the_backbone_serves_itself_and_says_so(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        world.start(0)
        for imprecise in world.start(1, 2):
            imprecise.engines.before_start = lambda each: each.arithmetic.update(accumulation="F16")
        founder = world.nodes[0]
        await until(lambda: founder.reigns and founder.duty.state()[0] == "degraded")
        await until(lambda: founder.duty.backbone.report()["own"]["n_experts"] == model.manifest.n_expert)
        assert founder.duty.state()[1] == (
            "the backbone serves 8 experts itself: no worker may serve the output layers"
        )
        assert (await generate(founder)).reason == "length"
        own = backbone_engine(founder).own
        assert own is not None
        assert ShardSet.decode(own.shard).layers == model.manifest.moe_layers[-1:]
        backbone_engine(founder).die()
        await until(lambda: founder.duty.state()[0] != "degraded")
        await until(lambda: founder.duty.state()[0] == "degraded")
        assert founder.duty.backbone.report()["own"]["n_experts"] == 8
