"""The holder's duty among twins on a mock clock: what it holds, what it tells its core, whom it lets dial."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from cryptography.hazmat.primitives.serialization import Encoding
from trio.testing import MockClock

from kvasir_node.driver.holder_duty import (
    ENGINE_PATIENCE,
    FOLLOW_TIMEOUT_S,
    LOAD_DELAY_FIRST_S,
    LOAD_DELAY_MAX_S,
    TOKEN_LIFETIME_NS,
    HolderDuty,
    HolderSettings,
)
from kvasir_node.driver.kernel_certifier import KernelCertifier
from kvasir_node.engine.certificate import EngineKey
from kvasir_node.kernel_in_use import KernelInUse
from kvasir_node.model.store import StoredModel
from kvasir_node.ports import ExpertKeeper, SwarmCore
from kvasir_node.supervisor import LOAD_TIMEOUT_S, WATCH_INTERVAL_S, WATCH_TIMEOUT_S
from kvasir_proto.certificate import bind_engine
from kvasir_proto.effects import Now, Send
from kvasir_proto.election.requests import TermFollowed, TermVoided
from kvasir_proto.errors import (
    DiskFull,
    EngineFailed,
    KvasirError,
    ModelUnusable,
    PortInUse,
    RemoteProtocolError,
)
from kvasir_proto.limits import Role
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages import engine as said
from kvasir_proto.messages.engine import (
    EngineFault,
    ExpectDialler,
    Listen,
    LoadShard,
    QueryStatistics,
    SetFence,
)
from kvasir_proto.messages.plan import PlanAccept, PlanOffer, PlanRefusal
from kvasir_proto.messages.swarm import DataGrant, DataRequest
from kvasir_proto.node_core import LAN, NodeCore, PlanReceived, ShardLoaded, ShardLost, ShardRefused
from kvasir_proto.placement.inventory import ModelShape
from kvasir_proto.placement.plan import Plan, make_plan
from kvasir_proto.signing import sign_message
from kvasir_proto.term_proof import ProvenTerm, cast_vote, founding_electorate, make_term_proof
from tests.node.driver.memory_core import MemoryCore
from tests.node.driver.twins import (
    MemoryMeasurements,
    TwinEngine,
    TwinEngines,
    World,
    node_key,
    node_of,
    now,
    until,
    wall_time,
)
from tests.proto.small_swarm import capability, found

BACKBONE, HOLDER, OTHER, LIAR = range(4)
TWIN_MEMORY_BYTES = 1000
"""What an engine twin says that its shard takes."""


def node(number: int) -> Any:
    return node_of(node_key(number))


def term_of(number: int, backbone: int = BACKBONE, epoch: int = 0) -> ProvenTerm:
    return ProvenTerm(epoch, number, node(backbone))


class Holder:
    """A holder's duty with its core, its engines and what it finds on its disk."""

    def __init__(
        self, world: World, core: Any = None, experts: ExpertKeeper | None = None, **settings: Any
    ) -> None:
        self.world = world
        self.swarm = found(node_key(BACKBONE), electorate="pinned")
        self.host = world.network.host(node(HOLDER))
        self.core: Any = core or MemoryCore(node(HOLDER), self.swarm)
        self.engines = TwinEngines(world, node_key(HOLDER), lambda: self.swarm.digest)
        self.generation = 0
        self.generation_error: KvasirError | None = None
        self.speeds: list[int] = []
        """What its engines said of their speed, one after the other."""
        defaults = {"data_host": "127.0.0.1", "data_port": 0, "n_threads": 1, "memory_bytes": 1 << 30}
        self.settings = HolderSettings(**{**defaults, **settings})
        self.certifier = KernelCertifier(
            kernels=(KernelInUse("ggml-cpu", "auto", "twin", "build"),),
            n_threads=1,
            model=world.model,
            store=MemoryMeasurements(),
            wall_time=wall_time,
            is_held_back=lambda: None,
            note_certified=lambda: None,
        )
        self.duty = HolderDuty(
            swarm=self.swarm,
            model=world.model,
            core=cast(SwarmCore, self.core),
            host=self.host,
            start_engine=self.engines,
            next_generation=self.next_generation,
            settings=self.settings,
            certifier=self.certifier,
            certificate=lambda: b"a certificate",
            note_speed=self.speeds.append,
            now=now,
            wall_time=wall_time,
            experts=experts,
        )
        self.core.hear = self.duty.take_event

    def next_generation(self) -> int:
        if self.generation_error is not None:
            raise self.generation_error
        self.generation += 1
        return self.generation

    @property
    def state(self) -> str:
        return self.duty.state()[0]

    @property
    def engine(self) -> TwinEngine:
        return self.engines.last

    def plan(self, *others: int, **changes: Any) -> Plan:
        """A plan for this node and these others."""
        manifest = self.world.model.manifest
        nodes = [node(each) for each in (HOLDER, *others)]
        numbers = {"epoch": 0, "term": 1, "revision": 1, "holders": 1} | changes
        return make_plan(manifest.moe_layers, manifest.n_expert, nodes, **numbers)

    def plan_without(self, revision: int, term: int = 1) -> Plan:
        """A plan in which this node holds nothing."""
        manifest = self.world.model.manifest
        nodes = [node(OTHER)]
        return make_plan(manifest.moe_layers, manifest.n_expert, nodes, epoch=0, term=term, revision=revision)

    def loads(self, engine: TwinEngine | None = None) -> list[ShardSet]:
        """What an engine was told to hold, in order."""
        received = (engine or self.engine).received
        return [ShardSet.decode(each.shard) for each in received if isinstance(each, LoadShard)]

    def fences(self, engine: TwinEngine | None = None) -> list[tuple[int, int]]:
        """The fences an engine was told, in order."""
        received = (engine or self.engine).received
        return [(each.epoch, each.term) for each in received if isinstance(each, SetFence)]

    async def finish_load(self) -> None:
        """Let an engine that ignores `LoadShard` answer the last one it heard."""
        request = [each for each in self.engine.received if isinstance(each, LoadShard)][-1]
        digest = ShardSet.decode(request.shard).digest()
        await self.engine.say(said.ShardLoaded(request.request, TWIN_MEMORY_BYTES, digest))

    def proof(self, number: int = 1, backbone: int = BACKBONE, voter: int = BACKBONE) -> bytes:
        """A proof that makes a node backbone of that term, by the vote of another."""
        electorate = founding_electorate(node_key(voter).public_key().public_bytes_raw())
        term = term_of(number, backbone)
        return make_term_proof(
            electorate, term, [cast_vote(node_key(voter), self.swarm.digest, electorate, term)]
        )

    def certificate(self, number: int = BACKBONE, role: Role = "backbone") -> bytes:
        """The certificate of some node's engine."""
        key = EngineKey.generate()
        binding = bind_engine(node_key(number), self.swarm.digest, key.public_der, role, 1)
        return key.certificate(binding).public_bytes(Encoding.DER)

    def request(self, **changes: Any) -> DataRequest:
        """What the backbone of term 1 asks."""
        fields = {"engine_certificate": self.certificate(), "role": "backbone", "proof": self.proof()}
        return DataRequest(**fields | changes)


@contextlib.asynccontextmanager
async def open_holder(model: StoredModel, directory: Path, **settings: Any) -> AsyncIterator[Holder]:
    """A holder whose engine runs, and which follows term 1."""
    async with trio.open_nursery() as nursery:
        holder = Holder(World(nursery, model, directory), **settings)
        holder.core.follow(term_of(1))
        nursery.start_soon(holder.duty.run)
        await until(lambda: holder.state == "joining")
        yield holder
        nursery.cancel_scope.cancel()


async def code_of(holder: Holder, request: DataRequest, number: int = BACKBONE) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        await holder.duty.grant_data(node(number), request)
    return caught.value.code


def hang(engine: TwinEngine) -> None:
    engine.ignored.add(LoadShard)


# -- plans -----------------------------------------------------------------------------------------


async def test_a_plan_is_loaded_under_the_fence_and_then_told(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        plan = holder.plan()
        holder.core.hand(plan)
        assert holder.duty.state() == ("loading", "loading 32 experts")
        assert holder.core.commands == []
        await until(lambda: holder.state == "ready")
        assert holder.core.commands == [ShardLoaded(0, 1, 1, TWIN_MEMORY_BYTES)]
        assert holder.loads() == [plan.shard_of(node(HOLDER))]
        kinds = [type(each) for each in holder.engine.received]
        assert kinds.index(SetFence) < kinds.index(LoadShard)
        assert holder.fences() == [(0, 1)]
        report = holder.duty.report()
        assert (report["n_experts_held"], report["shard_memory_bytes"]) == (32, TWIN_MEMORY_BYTES)
        assert report["shards"] == [[layer, 0, 8] for layer in range(4)]


async def test_a_plan_that_comes_with_its_term_is_loaded_under_the_new_fence(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        engine: Any = holder.engine.engine
        send, slow = engine.send, [5.0]

        async def send_slowly(message: Any) -> None:
            if isinstance(message, SetFence) and slow:
                await trio.sleep(slow.pop())  # whoever tells the engine first may be slow
            await send(message)

        engine.send = send_slowly
        holder.core.follow(term_of(2))
        holder.core.hand(holder.plan(term=2))
        await until(lambda: holder.state == "ready")
        received = holder.engine.received
        loaded = [isinstance(each, LoadShard) for each in received].index(True)
        assert received.index(SetFence(0, 2)) < loaded


async def test_a_plan_with_the_same_shard_is_answered_at_once(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.core.hand(holder.plan(revision=5))
        await until(lambda: holder.state == "ready")
        holder.core.commands.clear()
        holder.core.hand(holder.plan(revision=6))
        assert holder.core.commands == [ShardLoaded(0, 1, 6, TWIN_MEMORY_BYTES)]
        holder.core.follow(term_of(2))
        holder.core.hand(holder.plan(term=2, revision=1))  # revisions begin again in a new term
        assert holder.core.commands[1:] == [ShardLoaded(0, 2, 1, TWIN_MEMORY_BYTES)]
        assert holder.state == "ready"
        await trio.sleep(100.0)
        assert len(holder.loads()) == 1
        assert len(holder.core.commands) == 2


async def test_of_plans_in_quick_succession_only_the_last_is_loaded_and_told(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        plans = [holder.plan(*range(2, 2 + number), revision=number) for number in (1, 2, 3)]
        for each in plans:
            holder.core.hand(each)
        await until(lambda: holder.state == "ready")
        await trio.sleep(10.0)
        assert holder.loads() == [plans[2].shard_of(node(HOLDER))]
        assert holder.core.commands == [ShardLoaded(0, 1, 3, TWIN_MEMORY_BYTES)]


async def test_a_plan_that_was_overtaken_while_it_loaded_is_not_told(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        plans = [holder.plan(*range(2, 2 + number), revision=number) for number in (1, 2, 3)]
        hang(holder.engine)
        holder.core.hand(plans[0])
        await until(holder.loads)
        holder.core.hand(plans[1])
        holder.core.hand(plans[2])
        await trio.sleep(100.0)
        assert len(holder.loads()) == 1, "an engine loads one shard at a time"
        await holder.finish_load()
        await until(lambda: len(holder.loads()) == 2)
        assert holder.core.commands == []
        assert holder.state == "loading"
        await holder.finish_load()
        await until(lambda: holder.state == "ready")
        assert holder.loads() == [each.shard_of(node(HOLDER)) for each in (plans[0], plans[2])]
        assert holder.core.commands == [ShardLoaded(0, 1, 3, TWIN_MEMORY_BYTES)]


async def test_a_plan_that_wants_what_is_being_loaded_costs_no_second_load(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        hang(holder.engine)
        holder.core.hand(holder.plan(revision=1))
        await until(holder.loads)
        holder.core.hand(holder.plan(revision=2))
        await holder.finish_load()
        await until(lambda: holder.state == "ready")
        await trio.sleep(10.0)
        assert len(holder.loads()) == 1
        assert holder.core.commands == [ShardLoaded(0, 1, 2, TWIN_MEMORY_BYTES)]


async def test_a_plan_without_this_node_needs_no_engine(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        holder = Holder(World(nursery, model, tmp_path))
        holder.core.follow(term_of(1))
        holder.core.hand(holder.plan_without(4))
        assert holder.core.commands == [ShardLoaded(0, 1, 4, 0)]


async def test_what_no_plan_wants_any_more_is_given_up_before_it_is_told(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "ready")
        holder.core.commands.clear()
        hang(holder.engine)
        holder.core.hand(holder.plan_without(2))
        await until(lambda: len(holder.loads()) == 2)
        assert holder.duty.state() == ("loading", "giving up what it held")
        assert holder.core.commands == []
        assert holder.loads()[1] == ShardSet()
        request = [each for each in holder.engine.received if isinstance(each, LoadShard)][-1]
        await holder.engine.say(said.ShardLoaded(request.request, 0, ShardSet().digest()))
        await until(lambda: holder.state == "ready")
        assert holder.core.commands == [ShardLoaded(0, 1, 2, 0)]
        assert await code_of(holder, holder.request()) == "no_shard"
        holder.engine.die()
        await until(lambda: len(holder.engines.all) == 2 and holder.state == "ready")
        assert holder.core.commanded(ShardLost) == [], "nothing was held"


async def test_its_own_plan_is_the_backbone_engines_affair(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "ready")
        holder.core.commands.clear()
        holder.core.follow(term_of(2, HOLDER))
        holder.core.hand(holder.plan(term=2))
        assert [type(each) for each in holder.core.commands] == [ShardLost]
        await until(lambda: holder.state == "ready")
        assert holder.loads()[1:] == [ShardSet()], "its memory is free again"
        holder.core.hand(holder.plan(term=2, revision=2))
        holder.engine.die()
        await until(lambda: len(holder.engines.all) == 2)
        await trio.sleep(100.0)
        assert len(holder.core.commands) == 1
        assert holder.loads() == []
        # A plan that is not of its own term counts for it again.
        holder.core.hand(holder.plan(term=3))
        await until(lambda: holder.core.commands[1:] == [ShardLoaded(0, 3, 1, TWIN_MEMORY_BYTES)])


async def test_what_it_cannot_give_up_as_backbone_is_tried_again_and_not_told(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "ready")
        holder.engine.refusals[LoadShard] = EngineFault(None, "engine_failed", "no", 1)
        holder.core.follow(term_of(2, HOLDER))
        holder.core.hand(holder.plan(term=2))
        await until(lambda: len(holder.loads()) == 4)
        assert [type(each) for each in holder.core.commands] == [ShardLoaded, ShardLost]
        holder.engine.refusals.clear()
        await until(lambda: holder.state == "ready")
        assert len(holder.core.commands) == 2


# -- refusals --------------------------------------------------------------------------------------


async def test_a_shard_that_does_not_fit_is_refused_at_once_with_need_and_have(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    whole = model.manifest.shard_size_bytes(model.manifest.whole_shard())
    async with open_holder(model, tmp_path, memory_bytes=whole - 1) as holder:
        holder.core.hand(holder.plan())
        refused = holder.core.commands
        reason = f"the shard needs {whole >> 20} MiB and {whole - 1 >> 20} MiB are offered"
        assert refused == [ShardRefused(0, 1, 1, "no_memory", reason, whole, whole - 1)]
        assert holder.duty.state() == ("degraded", refused[0].reason)
        holder.engine.die()
        await until(lambda: len(holder.engines.all) == 2 and holder.state == "degraded")
        await trio.sleep(300.0)
        assert len(holder.core.commands) == 1, "waiting makes no room"
        assert holder.loads() == []
        holder.core.hand(holder.plan(OTHER, revision=2))
        await until(lambda: holder.state == "ready")
        # What is held stays, until a plan comes that fits.
        holder.core.hand(holder.plan(revision=3))
        assert holder.state == "degraded"
        await trio.sleep(10.0)
        assert len(holder.loads()) == 1
        assert holder.duty.report()["n_experts_held"] == 16


async def test_a_shard_that_just_fits_is_taken(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    whole = model.manifest.shard_size_bytes(model.manifest.whole_shard())
    async with open_holder(model, tmp_path, memory_bytes=whole) as holder:
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "ready")


@pytest.mark.parametrize("layers, n_expert", [([0, 1], 64), ([0, 77], 8)])
async def test_a_shard_that_is_not_of_the_model_is_refused(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, layers: list[int], n_expert: int
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.core.hand(make_plan(layers, n_expert, [node(HOLDER)], epoch=0, term=1, revision=1))
        assert [each.code for each in holder.core.commanded(ShardRefused)] == ["wrong_shard"]
        await trio.sleep(300.0)
        assert holder.loads() == []
        assert len(holder.core.commands) == 1


async def test_a_shard_that_its_engine_cannot_load_is_refused_and_tried_again_with_patience(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        fault = EngineFault(None, "model_unusable", "the file is damaged", ModelUnusable.exit_code)
        holder.engine.refusals[LoadShard] = fault
        started = trio.current_time()
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "degraded")
        refusal = ShardRefused(0, 1, 1, "model_unusable", "the file is damaged")
        assert holder.core.commands == [refusal]
        assert holder.duty.state() == ("degraded", "the file is damaged")
        assert holder.duty.report()["last_error"] == "the file is damaged"
        assert await code_of(holder, holder.request()) == "shard_loading"
        await until(lambda: len(holder.loads()) == 4)
        assert trio.current_time() - started == pytest.approx(LOAD_DELAY_FIRST_S * 7, abs=1.0)
        await trio.sleep(1000.0)
        tries = len(holder.loads())
        await trio.sleep(10 * LOAD_DELAY_MAX_S)
        assert len(holder.loads()) - tries == 10
        assert holder.core.commands == [refusal], "the core repeats it; here it is told once"
        assert len(holder.engines.all) == 1, "the engine is not to blame"
        holder.engine.refusals.clear()
        await until(lambda: holder.state == "ready")
        assert holder.core.commands == [refusal, ShardLoaded(0, 1, 1, TWIN_MEMORY_BYTES)]
        assert holder.duty.report()["last_error_recovered"] is True


async def test_a_new_plan_does_not_wait_for_the_one_that_failed(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.engine.refusals[LoadShard] = EngineFault(None, "shard_unusable", "no", 1)
        holder.core.hand(holder.plan())
        await trio.sleep(1000.0)
        holder.engine.refusals.clear()
        handed = trio.current_time()
        holder.core.hand(holder.plan(revision=2))
        assert holder.state == "loading", "what was said of another plan is not said of this one"
        await until(lambda: holder.state == "ready")
        assert trio.current_time() - handed < 1.0
        assert holder.core.commands[-1] == ShardLoaded(0, 1, 2, TWIN_MEMORY_BYTES)


async def test_a_failure_of_a_plan_that_was_overtaken_is_not_told(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        hang(holder.engine)
        holder.core.hand(holder.plan())
        await until(holder.loads)
        holder.core.hand(holder.plan(OTHER, revision=2))
        request = [each for each in holder.engine.received if isinstance(each, LoadShard)][-1]
        holder.engine.ignored.clear()
        await holder.engine.say(EngineFault(request.request, "shard_unusable", "no", 1))
        await until(lambda: holder.state == "ready")
        assert holder.core.commands == [ShardLoaded(0, 1, 2, TWIN_MEMORY_BYTES)]


async def test_a_load_that_is_never_answered_is_refused_in_the_end(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        engine = holder.engine
        engine.ignored |= {LoadShard, QueryStatistics}
        holder.core.hand(holder.plan())
        await trio.sleep(LOAD_TIMEOUT_S - 10.0)
        assert engine.is_alive, "an engine that loads for long is not taken for dead"
        assert holder.core.commands == []
        assert LOAD_TIMEOUT_S > WATCH_INTERVAL_S + WATCH_TIMEOUT_S
        await until(lambda: holder.core.commands)
        assert holder.core.commands[0].code == "engine_failed"
        assert "no answer in 900 s" in holder.core.commands[0].reason


# -- its engine ------------------------------------------------------------------------------------


async def test_an_engine_that_dies_is_told_and_replaced_with_its_fence_and_shard(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        plan = holder.plan()
        holder.core.hand(plan)
        await until(lambda: holder.state == "ready")
        first = holder.engine
        died = trio.current_time()
        first.die()
        await until(lambda: holder.core.commanded(ShardLost))
        assert trio.current_time() - died < 0.2
        assert "killed by SIGKILL" in holder.core.commanded(ShardLost)[0].reason
        assert holder.state == "starting"
        assert "killed by SIGKILL" in holder.duty.state()[1]
        assert holder.duty.report()["n_experts_held"] == 0
        await until(lambda: holder.state == "ready")
        assert holder.engine is not first
        kinds = [type(each) for each in holder.engine.received]
        assert kinds.index(SetFence) < kinds.index(LoadShard)
        assert holder.loads() == [plan.shard_of(node(HOLDER))]
        assert holder.generation == 2
        loaded = ShardLoaded(0, 1, 1, TWIN_MEMORY_BYTES)
        assert [each for each in holder.core.commands if not isinstance(each, ShardLost)] == [loaded] * 2
        assert len(holder.core.commanded(ShardLost)) == 1


async def test_an_engine_that_dies_while_it_loads_is_refused_and_the_next_one_loads(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.core.hand(holder.plan(OTHER))
        await until(lambda: holder.state == "ready")
        holder.core.commands.clear()
        hang(holder.engine)
        holder.core.hand(holder.plan(revision=2))
        await until(lambda: len(holder.loads()) == 2)
        holder.engine.die()
        await until(lambda: holder.state == "ready")
        kinds = sorted(type(each).__name__ for each in holder.core.commands[:-1])
        assert kinds == ["ShardLost", "ShardRefused"], "what it held before is lost too"
        assert holder.core.commanded(ShardRefused)[0].code == "engine_failed"
        assert holder.core.commands[-1] == ShardLoaded(0, 1, 2, TWIN_MEMORY_BYTES)
        assert holder.loads() == [holder.plan().shard_of(node(HOLDER))]


async def test_an_answer_that_is_heard_after_the_engines_end_is_not_believed(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        first: Any = holder.engine
        exchange = first.engine.exchange

        async def exchange_late(message: Any, *arguments: Any, **options: Any) -> Any:
            reply = await exchange(message, *arguments, **options)
            if isinstance(message, LoadShard):
                await trio.sleep(10.0)
            return reply

        first.engine.exchange = exchange_late
        holder.core.hand(holder.plan())
        await until(holder.loads)
        first.die()
        await until(lambda: len(holder.engines.all) == 2 and holder.state == "ready")
        assert len(holder.loads()) == 1, "the second engine holds it"
        assert holder.core.commands == [ShardLoaded(0, 1, 1, TWIN_MEMORY_BYTES)]


async def test_an_engine_that_ends_before_it_was_told_to_load_refuses_nothing(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        mute = holder.engine
        mute.ignored.add(QueryStatistics)
        await until(lambda: mute.count(QueryStatistics))
        holder.core.hand(holder.plan())
        await trio.sleep(10.0)
        assert holder.loads() == [], "it is waited for"
        mute.die()
        await until(lambda: holder.state == "ready")
        assert holder.engine is not mute
        assert holder.core.commands == [ShardLoaded(0, 1, 1, TWIN_MEMORY_BYTES)], "no plan was refused"


async def test_a_plan_waits_for_an_engine_that_starts(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.engine.die()
        await until(lambda: holder.state == "starting")
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "ready")
        assert holder.core.commands == [ShardLoaded(0, 1, 1, TWIN_MEMORY_BYTES)]
        assert len(holder.loads()) == 1


async def test_the_backbone_hears_why_there_is_no_engine(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "ready")
        holder.core.commands.clear()
        holder.generation_error = DiskFull("engine-generation: No space left on device")
        holder.engine.die()
        died = trio.current_time()
        await until(lambda: holder.core.commanded(ShardRefused))
        assert trio.current_time() - died == pytest.approx(ENGINE_PATIENCE / 1e9, abs=1.0)
        refusal = holder.core.commanded(ShardRefused)[0]
        assert (refusal.code, refusal.revision) == ("engine_starting", 1)
        assert "No space left" in refusal.reason
        assert "No space left" in holder.duty.state()[1]
        assert await code_of(holder, holder.request()) == "engine_starting"
        await trio.sleep(1000.0)
        assert [type(each) for each in holder.core.commands] == [ShardLost, ShardRefused]
        holder.generation_error = EngineFailed("no more processes")
        await until(lambda: len(holder.core.commands) == 3)
        assert "no more processes" in holder.core.commands[2].reason, "another reason is news"
        holder.core.hand(holder.plan_without(2))
        assert holder.duty.report()["last_error_recovered"] is False, "an empty shard mends no engine"
        holder.core.hand(holder.plan(revision=3))
        holder.generation_error = None
        await until(lambda: holder.state == "ready")
        loaded = [ShardLoaded(0, 1, 2, 0), ShardLoaded(0, 1, 3, TWIN_MEMORY_BYTES)]
        assert holder.core.commanded(ShardLoaded)[-2:] == loaded
        assert holder.duty.report()["last_error_recovered"] is True


async def test_an_engine_that_does_not_answer_any_more_is_killed_and_another_takes_its_place(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "ready")
        first = holder.engine
        mute_since = trio.current_time()
        first.ignored.add(QueryStatistics)
        await until(lambda: not first.is_alive)
        assert WATCH_TIMEOUT_S <= trio.current_time() - mute_since <= WATCH_INTERVAL_S + WATCH_TIMEOUT_S + 1
        await until(lambda: "this node killed it" in str(holder.duty.report()["last_error"]))
        assert "mute for 30 s" in holder.duty.report()["last_error"]
        await until(lambda: holder.state == "ready")
        assert len(holder.loads()) == 1


async def test_an_engine_that_ends_again_and_again_is_started_with_patience(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.engines.before_start = lambda engine: engine.refusals.update(
            {Listen: EngineFault(None, "address_unusable", "no such address", 1)}
        )
        holder.engine.die()
        await trio.sleep(600.0)
        assert 8 <= len(holder.engines.all) <= 18
        assert holder.state == "starting"


async def test_an_engine_that_dies_just_when_a_term_is_followed_costs_nothing_more(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        for number in range(2, 7):
            holder.engine.die()
            holder.core.follow(term_of(number))
            await until(lambda: holder.state == "starting")
            await until(lambda: holder.state == "joining")
            assert holder.fences() == [(0, number)]


async def test_a_data_port_that_is_taken_ends_the_node_when_it_starts(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    fault = EngineFault(None, "port_in_use", "port 7 is taken", PortInUse.exit_code)
    async with trio.open_nursery() as nursery:
        holder = Holder(World(nursery, model, tmp_path))
        holder.engines.before_start = lambda engine: engine.refusals.update({Listen: fault})
        with pytest.raises(PortInUse):
            await holder.duty.run()


async def test_its_engine_has_counters_while_there_is_one(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        assert '"rows": 3' in await holder.duty.engine_statistics()
        assert holder.duty.report()["engine"] == {"pid": holder.engine.process.pid, "backend": "twin"}
        assert holder.duty.report()["data_address"].startswith("127.0.0.1:")
        holder.engine.die()
        await until(lambda: holder.state == "starting")
        assert (holder.duty.report()["engine"], holder.duty.report()["data_address"]) == (None, None)
        with pytest.raises(EngineFailed, match="not running"):
            await holder.duty.engine_statistics()


# -- the fence -------------------------------------------------------------------------------------


async def test_the_engine_hears_each_term_once_and_only_what_was_told(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        holder.core.follow(term_of(1))  # the same term with a newer proof
        await trio.sleep(1.0)
        assert holder.fences() == [(0, 1)]
        holder.core.change(fence=term_of(4))  # known to the core, not on its disk yet
        await trio.sleep(100.0)
        assert holder.fences() == [(0, 1)]
        holder.core.hear(TermFollowed(term_of(4), b""))
        await until(lambda: holder.fences() == [(0, 1), (0, 4)])
        holder.engine.die()
        await until(lambda: len(holder.engines.all) == 2 and holder.state == "joining")
        assert holder.fences() == [(0, 4)]


async def test_a_fence_from_before_a_restart_is_told_before_anything_else(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        swarm = found(node_key(BACKBONE), electorate="pinned")
        core = MemoryCore(node(HOLDER), swarm, fence=term_of(7))
        holder = Holder(World(nursery, model, tmp_path), core)
        nursery.start_soon(holder.duty.run)
        await until(lambda: holder.state == "joining")
        assert holder.fences() == [(0, 7)]
        nursery.cancel_scope.cancel()


async def test_an_engine_is_told_no_fence_before_there_is_one(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        holder = Holder(World(nursery, model, tmp_path))
        nursery.start_soon(holder.duty.run)
        await until(lambda: holder.state == "joining")
        assert holder.fences() == []
        holder.core.follow(term_of(1))
        await until(lambda: holder.fences() == [(0, 1)])
        nursery.cancel_scope.cancel()


# -- data connections ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def open_serving(model: StoredModel, directory: Path, **settings: Any) -> AsyncIterator[Holder]:
    """A holder that serves its plan."""
    async with open_holder(model, directory, **settings) as holder:
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "ready")
        yield holder


async def test_the_backbones_engine_is_expected_with_a_token_of_its_own(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_serving(model, tmp_path) as holder:
        request = holder.request()
        grants = [await holder.duty.grant_data(node(BACKBONE), request) for _ in range(2)]
        host, port = holder.engine.address
        expected = [each for each in holder.engine.received if isinstance(each, ExpectDialler)]
        for grant, each in zip(grants, expected, strict=True):
            assert grant == DataGrant(host, port, each.token, holder.engine.certificate)
            assert (each.certificate, each.node_id) == (request.engine_certificate, node(BACKBONE))
            assert each.role == "backbone"
            assert 0 < each.expires_boottime_ns - now() <= TOKEN_LIFETIME_NS
        assert len({each.token for each in grants}) == 2


def _behind_the_fence(holder: Holder) -> DataRequest:
    holder.core.follow(term_of(2))
    return holder.request()


REFUSED_REQUESTS: dict[str, tuple[Callable[[Holder], DataRequest], str]] = {
    "no proof": (lambda h: h.request(proof=b"x"), "malformed"),
    "a proof by another electorate": (lambda h: h.request(proof=h.proof(voter=LIAR)), "unknown_electorate"),
    "the proof of another backbone": (lambda h: h.request(proof=h.proof(2, OTHER)), "not_backbone"),
    "a proof behind the fence": (_behind_the_fence, "stale_term"),
    "no certificate": (lambda h: h.request(engine_certificate=b"x"), "malformed"),
    "the certificate of another node": (
        lambda h: h.request(engine_certificate=h.certificate(OTHER)),
        "wrong_node",
    ),
    "the certificate of a worker engine": (
        lambda h: h.request(engine_certificate=h.certificate(role="worker")),
        "wrong_role",
    ),
    "a worker of nobody who audits": (lambda h: h.request(role="worker"), "not_an_auditor"),
}


@pytest.mark.parametrize("name", REFUSED_REQUESTS)
async def test_nobody_else_is_expected(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, name: str
) -> None:
    make_request, code = REFUSED_REQUESTS[name]
    async with open_serving(model, tmp_path) as holder:
        assert await code_of(holder, make_request(holder)) == code
        assert holder.engine.count(ExpectDialler) == 0


async def test_an_auditors_worker_is_expected_and_shown_the_certificate(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_serving(model, tmp_path) as holder:
        holder.core.auditors = frozenset({node(OTHER)})
        request = holder.request(role="worker", engine_certificate=holder.certificate(OTHER, role="worker"))
        grant = await holder.duty.grant_data(node(OTHER), request)
        assert grant.tolerance_certificate == b"a certificate"
        (expected,) = (each for each in holder.engine.received if isinstance(each, ExpectDialler))
        assert (expected.role, expected.node_id) == ("worker", node(OTHER))
        assert (await holder.duty.grant_data(node(BACKBONE), holder.request())).tolerance_certificate == b""
        as_backbone = holder.request(role="worker", engine_certificate=holder.certificate(OTHER))
        with pytest.raises(RemoteProtocolError) as refused:
            await holder.duty.grant_data(node(OTHER), as_backbone)
        assert refused.value.code == "wrong_role"


async def test_a_backbone_of_which_the_node_hears_only_now_waits_for_the_disk_and_the_fence(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_serving(model, tmp_path) as holder:
        holder.core.is_disk_full = True
        started = trio.current_time()
        request = holder.request(proof=holder.proof(2))
        assert await code_of(holder, request) == "term_not_followed"
        assert trio.current_time() - started == pytest.approx(FOLLOW_TIMEOUT_S)
        assert holder.fences() == [(0, 1)]
        assert holder.engine.count(ExpectDialler) == 0
        granted: list[DataGrant] = []

        async def ask() -> None:
            granted.append(await holder.duty.grant_data(node(BACKBONE), request))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(1.0)
            assert granted == []
            holder.core.follow(term_of(2))
        kinds = [each for each in holder.engine.received if isinstance(each, SetFence | ExpectDialler)]
        assert kinds[-2] == SetFence(0, 2)
        assert isinstance(kinds[-1], ExpectDialler)
        assert len(granted) == 1


async def test_a_backbone_that_shows_a_new_term_dials_only_under_its_fence(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_serving(model, tmp_path) as holder:
        await holder.duty.grant_data(node(BACKBONE), holder.request(proof=holder.proof(2)))
        received = holder.engine.received
        expected = [isinstance(each, ExpectDialler) for each in received].index(True)
        assert received.index(SetFence(0, 2)) < expected


async def test_a_backbone_that_is_overtaken_while_it_waits_is_refused(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_serving(model, tmp_path) as holder:
        holder.core.is_disk_full = True
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                assert await code_of(holder, holder.request(proof=holder.proof(2))) == "stale_term"

            nursery.start_soon(ask)
            await trio.sleep(1.0)
            holder.core.follow(term_of(3, OTHER))


async def test_a_term_in_which_somebody_lied_gets_no_connection(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_serving(model, tmp_path) as holder:
        # Two proofs of one term: the second one is not that of the term which is followed.
        other = holder.request(proof=holder.proof(1, OTHER), engine_certificate=holder.certificate(OTHER))
        assert await code_of(holder, other, OTHER) == "stale_term"
        holder.core.hear(TermVoided(0, 1))
        assert await code_of(holder, holder.request()) == "void_term"
        assert holder.engine.count(ExpectDialler) == 0
        holder.core.follow(term_of(2))
        await holder.duty.grant_data(node(BACKBONE), holder.request(proof=holder.proof(2)))


async def test_no_connection_is_granted_while_there_is_nothing_to_serve(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_holder(model, tmp_path) as holder:
        assert await code_of(holder, holder.request()) == "no_shard"
        hang(holder.engine)
        holder.core.hand(holder.plan())
        await until(holder.loads)
        assert await code_of(holder, holder.request()) == "shard_loading"
        holder.engine.die()
        await until(lambda: holder.state == "starting")
        assert await code_of(holder, holder.request()) == "engine_starting"


async def test_an_engine_that_does_not_answer_costs_the_request_and_no_more(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_serving(model, tmp_path) as holder:
        holder.engine.ignored.add(ExpectDialler)
        with pytest.raises(EngineFailed, match="no answer"):
            await holder.duty.grant_data(node(BACKBONE), holder.request())
        holder.engine.ignored.clear()
        await holder.duty.grant_data(node(BACKBONE), holder.request())


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
async def test_an_address_that_means_nothing_to_others_is_not_granted(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, wildcard: str
) -> None:
    async with open_serving(model, tmp_path, data_host=wildcard) as holder:
        grant = await holder.duty.grant_data(node(BACKBONE), holder.request())
        assert grant.host == holder.host.addresses()[0].split("/")[2]
        assert holder.engine.address[0] == wildcard


# -- with a real core ------------------------------------------------------------------------------


class RealCore:
    """A real node core of one node, whose backbone the test speaks for. What it sends is kept."""

    def __init__(self, model: StoredModel) -> None:
        self.hear: Callable[[Any], None] = lambda _event: None
        self.sent: list[Any] = []
        self.core = NodeCore(
            private_key=node_key(HOLDER),
            swarm=found(node_key(BACKBONE), electorate="pinned"),
            capability=capability(node(HOLDER)),
            model=ModelShape.of(model.manifest),
            options=LAN,
            stored={},
            entropy=random.Random(1),
            now=self.clocks(),
        )

    @staticmethod
    def clocks() -> Now:
        return Now(now(), wall_time())

    def command(self, request: Any) -> None:
        self.core.command(request, self.clocks())
        self._collect()

    def check_proof(self, proof: bytes, source: Any) -> ProvenTerm:
        try:
            return self.core.check_proof(proof, source, self.clocks())
        finally:
            self._collect()

    def view(self) -> Any:
        return self.core.view()

    def record_of(self, node_id: Any) -> Any:
        return self.core.record_of(node_id)

    def receive(self, message: Any) -> None:
        self.core.receive(message, node(BACKBONE), self.clocks())
        self._collect()

    def answers(self) -> list[Any]:
        """What the backbone was told of its plans since the last call."""
        answers = [each for each in self.sent if isinstance(each, PlanAccept | PlanRefusal)]
        self.sent.clear()
        return answers

    def _collect(self) -> None:
        while effects := self.core.drain():
            for each in effects:
                if isinstance(each, Send):
                    self.sent.append(each.message)
                elif isinstance(each, TermFollowed | TermVoided | PlanReceived):
                    self.hear(each)


async def test_a_real_core_answers_offers_with_what_the_duty_tells_it(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        whole = model.manifest.shard_size_bytes(model.manifest.whole_shard())
        core = RealCore(model)
        holder = Holder(World(nursery, model, tmp_path), core, memory_bytes=whole - 1)
        nursery.start_soon(holder.duty.run)
        await until(lambda: holder.state == "joining")

        def offer(plan: Plan) -> None:
            signed = sign_message(node_key(BACKBONE), holder.swarm.digest, plan)
            core.receive(PlanOffer(signed, holder.proof(plan.term)))

        offer(holder.plan())
        answer = core.answers()[0]
        assert (type(answer), answer.need_bytes, answer.have_bytes) == (PlanRefusal, whole, whole - 1)
        offer(holder.plan())
        assert core.answers() == [answer], "the core repeats it"

        plan = holder.plan(OTHER, revision=2)
        shard = plan.shard_of(node(HOLDER))
        offer(plan)
        assert core.answers() == []
        await until(lambda: holder.state == "ready")
        accept = PlanAccept(0, 1, 2, shard.digest(), TWIN_MEMORY_BYTES)
        assert core.answers() == [accept]
        assert core.view().is_serving_plan
        await holder.duty.grant_data(node(BACKBONE), holder.request())

        holder.engine.die()
        await until(lambda: holder.state == "starting")
        assert not core.view().is_serving_plan
        offer(plan)
        assert core.answers() == [], "nothing to say yet"
        await until(lambda: holder.state == "ready")
        assert core.answers() == [accept]

        offer(holder.plan(OTHER, term=2, revision=1))
        assert core.answers() == [PlanAccept(0, 2, 1, shard.digest(), TWIN_MEMORY_BYTES)]
        # Of two that tell an engine its fence at once both may say it.
        await until(lambda: list(dict.fromkeys(holder.fences())) == [(0, 1), (0, 2)])
        assert len(holder.loads()) == 1

        offer(holder.plan_without(2, term=2))
        assert not core.view().is_serving_plan
        await until(lambda: core.view().is_serving_plan)
        assert holder.loads()[-1] == ShardSet()
        assert {type(each) for each in core.answers()} == {PlanAccept}
        nursery.cancel_scope.cancel()
