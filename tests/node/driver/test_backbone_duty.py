"""The backbone's duty among twins on a mock clock: who serves, who does not, and what becomes of sessions."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvasir_node import __version__
from kvasir_node.driver.backbone_duty import LEASE_NS, LEASE_RENEWAL_S, SESSIONS_WAITING_MAX
from kvasir_node.driver.conversation import ask, hear, tell
from kvasir_node.driver.roster import FORGOTTEN_AFTER, LOST_AFTER
from kvasir_node.model.store import StoredModel
from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.codec import encode
from kvasir_proto.errors import (
    ConfigurationInvalid,
    DiskFull,
    EngineFailed,
    IncompatibleVersion,
    KvasirError,
    ModelAborted,
    ModelUnusable,
    NotReady,
    RemoteProtocolError,
    UsageError,
)
from kvasir_proto.instants import WallTime, after, seconds
from kvasir_proto.messages.engine import (
    CancelSession,
    ConnectHolder,
    EngineFault,
    EvaluateLogits,
    Generate,
    HolderConnected,
    LoadShard,
    LoadTrunk,
    QueryStatistics,
    RemoveHolder,
    SessionEnded,
    SetLease,
    Shutdown,
    TokenEmitted,
)
from kvasir_proto.messages.local import EvaluateRequest, GenerateRequest
from kvasir_proto.messages.swarm import (
    Heartbeat,
    HeartbeatReply,
    Hello,
    Join,
    Joined,
    Leave,
    Refusal,
    Welcome,
)
from kvasir_proto.placement.plan import open_plan
from kvasir_proto.sampling import Sampling
from kvasir_proto.signing import sign_message
from tests.node.driver.memory_network import MemoryHost, MemoryStream
from tests.node.driver.twins import (
    TwinEngine,
    TwinFounder,
    TwinWorker,
    World,
    node_key,
    node_of,
    open_world,
    until,
    wait_engines,
    wait_state,
    wall_time,
)

REPORT_KEYS = {
    *("epoch", "term", "backbone", "ranks", "swarm", "model", "plan", "members", "engine", "sessions"),
    *("compact_activations", "partial_sums"),
    *("rows_retried_total", "last_error", "last_error_at", "last_error_recovered"),
}
MEMBER_KEYS = {
    *("node_id", "state", "reason", "backend", "device", "accumulation", "memory_bytes"),
    *("ranks", "shard_bytes", "shards"),
    "last_seen_s",
}


def text(n_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest("hello", (), n_tokens, Sampling())


async def ignore(_token: TokenEmitted) -> None:
    await trio.lowlevel.checkpoint()


async def ready_swarm(world: World, n_workers: int, **settings: Any) -> tuple[TwinFounder, list[TwinWorker]]:
    founder = world.found(workers_min=n_workers, **settings)
    workers = [world.join(each + 1, founder) for each in range(n_workers)]
    await until(lambda: founder.state == "ready")
    return founder, workers


# -- coming up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_workers", [1, 2, 3, 5])
async def test_workers_join_are_given_a_plan_and_serve_it(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, n_workers: int
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, n_workers)
        plan = open_plan(founder.disk.plan or b"", founder.founding.swarm.digest, founder.node_id)
        assert (plan.epoch, plan.term, plan.revision) == (0, 1, 1)
        assert plan.coverage().holders_min == max(1, min(2, n_workers - 1))
        connected = founder.engines.last.connected
        assert set(connected) == {each.node_id for each in workers}
        for worker in workers:
            await wait_state(worker, "ready")
            assert founder.member(worker)["state"] == "serving"
            assert connected[worker.node_id].shard == plan.shard_of(worker.node_id).encode()
            assert connected[worker.node_id].primary == plan.primary_shard_of(worker.node_id).encode()
            loaded = [each for each in worker.engines.last.received if isinstance(each, LoadShard)]
            assert [each.shard for each in loaded] == [plan.shard_of(worker.node_id).encode()]


async def test_below_the_wanted_number_of_workers_there_is_no_plan(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found(workers_min=3)
        workers = [world.join(each, founder) for each in (1, 2)]
        await until(lambda: founder.duty.state() == ("joining", "2 of 3 workers have joined"))
        await trio.sleep(60.0)
        assert founder.revision == 0
        assert all(each.engines.last.count(LoadShard) == 0 for each in workers)
        world.join(3, founder)
        await until(lambda: founder.state == "ready")
        assert founder.revision == 1


async def test_no_worker_is_waited_for_and_none_comes(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found(workers_min=0)
        await trio.sleep(30.0)
        assert founder.state == "joining"
        world.join(1, founder)
        await until(lambda: founder.state == "ready")


async def test_the_report_is_complete_in_every_state(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found(workers_min=2)
        seen: dict[str, None] = {}

        def check() -> bool:
            report = founder.duty.report()
            assert set(report) == REPORT_KEYS
            assert all(set(each) == MEMBER_KEYS for each in report["members"])
            state, reason = founder.duty.state()
            assert state == "ready" or reason
            seen[state] = None
            return state == "ready"

        check()
        world.join(1, founder)
        await until(lambda: check() or "joining" in seen)
        second = world.join(2, founder)
        await until(check)
        await second.crash()
        await until(lambda: check() is False)
        assert list(seen) == ["starting", "joining", "ready"]


@pytest.mark.parametrize("rule", ["compact_activations", "partial_sums"])
async def test_the_engine_is_told_what_the_swarm_was_founded_with(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, rule: str
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found(rules={rule: True})
        await until(lambda: bool(founder.engines.all) and founder.engines.last.count(LoadTrunk) == 1)
        (trunk,) = (each for each in founder.engines.last.received if isinstance(each, LoadTrunk))
        told = {"compact_activations": trunk.compact_activations, "partial_sums": trunk.partial_sums}
        assert [name for name, is_on in told.items() if is_on] == [rule]


async def test_a_model_that_cannot_be_loaded_ends_the_node(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        world = World(nursery, model, tmp_path)
        founder = world.found()
        fault = EngineFault(None, "model_unusable", "the file is damaged", ModelUnusable.exit_code)
        founder.engines.before_start = lambda engine: engine.refusals.update({LoadTrunk: fault})
        await until(lambda: founder.has_ended)
        assert isinstance(founder.failure, ModelUnusable)
        assert not founder.engines.last.is_alive


async def test_the_backbone_file_is_asked_for_before_each_engine(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    damage = ModelUnusable("backbone.gguf is damaged")
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        founder.backbone_file_error = damage
        n_engine = len(founder.engines.all)
        founder.engines.last.die()
        await until(lambda: str(damage) in founder.duty.report()["last_error"])
        assert len(founder.engines.all) == n_engine, "no engine is started on a damaged file"
        founder.backbone_file_error = None
        await until(lambda: founder.state == "ready")
        assert len(founder.engines.all) == n_engine + 1

    async with trio.open_nursery() as nursery:
        founder = World(nursery, model, tmp_path / "second").found()
        founder.backbone_file_error = damage
        await until(lambda: founder.has_ended)
        assert founder.failure is damage


async def test_a_full_disk_at_the_start_ends_the_node(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        world = World(nursery, model, tmp_path)
        founder = world.found()
        founder.disk.generation_error = DiskFull("engine-generation: No space left on device")
        await until(lambda: founder.has_ended)
        assert isinstance(founder.failure, DiskFull)
        assert founder.failure.exit_code == 1


@pytest.mark.parametrize("kind", [DiskFull, ConfigurationInvalid])
async def test_a_plan_that_cannot_be_saved_is_not_announced_and_tried_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, kind: type[KvasirError]
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found()
        founder.save_error = kind("plan cannot be written")
        first = world.join(1, founder)
        await until(lambda: founder.duty.state() == ("joining", "plan cannot be written"))
        await trio.sleep(60.0)
        assert (founder.revision, first.engines.last.count(LoadShard)) == (0, 0)
        assert founder.duty.report()["last_error_recovered"] is False
        founder.save_error = None
        await until(lambda: founder.state == "ready")
        assert (founder.revision, founder.duty.report()["last_error_recovered"]) == (1, True)


async def test_while_the_next_plan_cannot_be_saved_the_one_before_is_served(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        founder.save_error = DiskFull("plan cannot be written")
        connections = founder.engines.last.count(ConnectHolder)
        newcomer = world.join(9, founder)
        await until(lambda: founder.duty.report()["last_error"] == "plan cannot be written")
        await trio.sleep(60.0)
        assert founder.duty.report()["last_error_recovered"] is False
        assert (founder.state, founder.revision, len(founder.engines.all)) == ("ready", 1, 1)
        assert founder.engines.last.count(ConnectHolder) == connections, "its holders are left in peace"
        assert (await founder.duty.generate(text(), ignore)).reason == "length"
        founder.save_error = None
        await until(lambda: founder.revision == 2 and founder.state == "ready")
        assert set(founder.engines.last.connected) == {each.node_id for each in [*workers, newcomer]}
        assert founder.duty.report()["last_error_recovered"] is True


async def test_a_worker_that_cannot_load_is_named_with_its_reason_and_then_left_out(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found(workers_min=2)
        good, bad = world.join(1, founder), world.join(2, founder)
        bad.model_error = ModelUnusable("its source is damaged")
        started = trio.current_time()
        await until(lambda: f"{bad.node_id}: " in founder.duty.state()[1])
        assert "its source is damaged" in founder.duty.state()[1]
        assert "16 of 32 experts" in founder.duty.state()[1]
        await until(lambda: founder.state == "ready")
        assert trio.current_time() - started < 20.0
        assert set(founder.engines.last.connected) == {good.node_id}
        assert founder.member(bad)["shards"] == 0


async def test_an_engine_of_another_build_ends_the_node(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        world = World(nursery, model, tmp_path)
        founder = world.found()
        founder.engines.failure = IncompatibleVersion("another ggml")
        await until(lambda: founder.has_ended)
        assert isinstance(founder.failure, IncompatibleVersion)


# -- members come and go ---------------------------------------------------------------------------


async def test_a_worker_that_falls_silent_is_taken_out_and_served_again_when_it_returns(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 3)
        lost = workers[1]
        crashed = trio.current_time()
        await lost.crash()
        await until(lambda: founder.member(lost)["state"] == "lost")
        assert trio.current_time() - crashed < LOST_AFTER / 1e9 + 2.5
        await until(lambda: lost.node_id not in founder.engines.last.connected)
        assert founder.duty.state() == ("degraded", "some expert has 1 of 2 planned holders")
        lost.start()
        await until(lambda: founder.state == "ready")
        assert founder.revision == 1, "the plan is kept: nothing moves for one that comes back"
        assert lost.node_id in founder.engines.last.connected


async def test_without_another_holder_a_lost_worker_leaves_a_gap_that_is_said(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        await workers[0].crash()
        await until(lambda: founder.state == "joining")
        assert founder.duty.state()[1] == "16 of 32 experts have a holder"
        with pytest.raises(NotReady, match="16 of 32 experts"):
            await founder.duty.generate(text(), ignore)


async def test_a_restart_faster_than_the_silence_is_noticed(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        connections = founder.engines.last.count(ConnectHolder)
        await workers[0].crash()
        workers[0].start()
        await until(lambda: founder.engines.last.count(ConnectHolder) > connections)
        await until(lambda: founder.state == "ready")
        assert founder.revision == 1


async def test_the_experts_of_a_worker_that_stays_away_go_to_others(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        crashed = trio.current_time()
        await workers[0].crash()
        await until(lambda: founder.revision == 2)
        assert trio.current_time() - crashed > FORGOTTEN_AFTER / 1e9
        await until(lambda: founder.state == "ready")
        assert set(founder.engines.last.connected) == {workers[1].node_id}
        workers[0].start()
        await until(lambda: founder.revision == 3 and founder.state == "ready")
        assert set(founder.engines.last.connected) == {each.node_id for each in workers}


async def test_redundancy_is_restored_where_enough_workers_are_left(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 4)
        await workers[0].crash()
        await until(lambda: founder.revision == 2 and founder.state == "ready")
        assert founder.duty.report()["plan"]["holders_min"] == 2


async def test_nothing_is_kept_of_strangers_that_came_and_went(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 1)
        for number in range(3):
            stranger = world.join(10 + number, founder)
            await until(lambda: founder.state == "ready" and len(founder.engines.last.connected) == 2)
            await stranger.stop()
            await until(lambda: founder.state == "ready" and len(founder.engines.last.connected) == 1)
        assert set(founder.duty._holder_events) == {workers[0].node_id}


async def test_nothing_moves_when_moving_would_not_help(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    """Of three workers two are left: a plan for two holds each expert once, as they do already."""
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 3)
        await workers[0].crash()
        await trio.sleep(120.0)
        assert (founder.revision, founder.state) == (1, "degraded")


async def test_a_worker_that_leaves_is_gone_at_once(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        started = trio.current_time()
        await workers[0].stop()
        member = founder.member(workers[0])
        assert (member["state"], member["reason"]) == ("left", "the node stops")
        assert (member["shards"], member["ranks"]) == (0, []), "what it held is held by nobody"
        assert trio.current_time() - started < 1.0
        await until(lambda: founder.revision == 2 and founder.state == "ready")
        assert workers[0].node_id not in founder.engines.last.connected
        assert trio.current_time() - started < 10.0, "nobody waits for one that left on purpose"


async def test_a_newcomer_is_taken_in(autojump_clock: MockClock, model: StoredModel, tmp_path: Path) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        newcomer = world.join(9, founder)
        await until(lambda: founder.revision == 2 and founder.state == "ready")
        assert set(founder.engines.last.connected) == {each.node_id for each in [*workers, newcomer]}


async def test_a_worker_whose_engine_dies_while_idle_serves_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    """The data connection is gone and no session is there to notice: the worker's word has to do."""
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        connections = founder.engines.last.count(ConnectHolder)
        workers[0].engines.last.die()
        await until(lambda: founder.state != "ready")
        assert founder.engines.last.count(RemoveHolder) == 1
        await until(lambda: founder.state == "ready" and workers[0].state == "ready")
        assert founder.engines.last.count(ConnectHolder) == connections + 1
        assert founder.engines.last.connected[workers[0].node_id].certificate == (
            workers[0].engines.last.certificate
        )


async def test_dials_to_a_member_that_is_lost_stop(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 3)
        await workers[0].crash()
        await until(lambda: founder.member(workers[0])["state"] == "lost")
        await trio.sleep(15.0)
        dialled = len(founder.host.dialled)
        await trio.sleep(600.0)
        assert len(founder.host.dialled) == dialled


# -- faulty, slow and hostile members --------------------------------------------------------------


@pytest.mark.parametrize("code", ["non_finite", "shape_invalid", "malformed", "unexpected_reply"])
async def test_a_worker_that_computes_wrongly_is_quarantined_for_good(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, code: str
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 3)
        faulty = workers[0]
        connections = founder.engines.last.count(ConnectHolder)
        await founder.engines.last.lose_holder(faulty.node_id, code, "row 3 is not finite")
        await until(lambda: founder.member(faulty)["state"] == "quarantined")
        assert founder.member(faulty)["reason"] == f"{code}: row 3 is not finite"
        assert founder.duty.report()["last_error"].endswith("row 3 is not finite")
        await trio.sleep(120.0)
        await faulty.crash()
        faulty.start()
        await until(lambda: "quarantined" in faulty.duty.state()[1])
        await trio.sleep(120.0)
        assert founder.engines.last.count(ConnectHolder) == connections, "it is never connected again"
        assert founder.state == "degraded"


async def test_a_fault_found_while_connecting_quarantines_too(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found()
        founder.engines.before_start = lambda engine: engine.ignored.add(ConnectHolder)
        worker = world.join(1, founder)
        await until(lambda: founder.engines.all and founder.engines.last.count(ConnectHolder) == 1)
        await founder.engines.last.lose_holder(worker.node_id, "malformed", "not an answer")
        await until(lambda: founder.member(worker)["state"] == "quarantined")
        await trio.sleep(120.0)
        assert founder.engines.last.count(ConnectHolder) == 1


async def test_a_slow_worker_is_connected_again_with_growing_delays(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 3)
        slow = workers[0]
        delays = []
        for _ in range(6):
            lost = trio.current_time()
            await founder.engines.last.lose_holder(slow.node_id, "late", "no reply")
            await until(lambda: founder.member(slow)["state"] == "unreachable")
            assert founder.state == "degraded"
            await until(lambda: founder.member(slow)["state"] == "serving")
            delays.append(trio.current_time() - lost)
        assert delays == sorted(delays)
        assert delays[0] < 2.0
        assert 8.0 < delays[-1] < 20.0
        await trio.sleep(120.0)
        lost = trio.current_time()
        await founder.engines.last.lose_holder(slow.node_id, "late", "no reply")
        await until(lambda: founder.member(slow)["state"] == "unreachable")
        await until(lambda: founder.member(slow)["state"] == "serving")
        assert trio.current_time() - lost < 2.0, "what was steady for long is trusted again"


async def test_a_worker_that_cannot_be_connected_is_tried_again_and_the_others_serve(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 3)
        world.network.cut(founder.node_id, workers[0].node_id)
        await founder.engines.last.lose_holder(workers[0].node_id, "closed", "gone")
        await until(lambda: founder.member(workers[0])["state"] in ("unreachable", "lost"))
        assert founder.state == "degraded"
        world.network.mend(founder.node_id, workers[0].node_id)
        await until(lambda: founder.state == "ready")


async def test_a_worker_that_cannot_load_its_shard_is_asked_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found()
        worker = world.join(1, founder)
        fault = EngineFault(None, "model_unusable", "the file is damaged", ModelUnusable.exit_code)
        worker.engines.before_start = lambda engine: engine.refusals.update({LoadShard: fault})
        await trio.sleep(600.0)
        assert 30 < worker.engines.last.count(LoadShard) < 60
        await until(lambda: founder.member(worker)["reason"] == "the file is damaged")
        worker.engines.last.refusals.clear()
        await wait_state(founder, "ready")


async def converse(world: World, founder: TwinFounder, number: int = 50) -> tuple[MemoryHost, MemoryStream]:
    """A node of the test's own that says what it likes, after hello."""
    host = world.network.host(node_of(node_key(number)))
    stream = await host.open_stream(founder.node_id)
    welcome = await ask(stream, Hello((1,), __version__), Welcome)
    assert (welcome.swarm_manifest, welcome.proof) == (
        founder.founding.signed_manifest,
        founder.founding.proof,
    )
    return host, stream


def record(founder: TwinFounder, host: MemoryHost, number: int = 50, **changes: Any) -> bytes:
    """A signed record of that node's."""
    plain = CapabilityRecord(
        node_id=host.node_id,
        sequence=1,
        expires=after(wall_time(), seconds(60)),
        addresses=host.addresses(),
        versions=(1,),
        node_version="0",
        backend="twin",
        device="twin",
        accumulation="UNKNOWN",
        memory_bytes=1,
        state="joined",
        reason="",
    )
    return sign_message(node_key(number), founder.founding.swarm.digest, replace(plain, **changes))


async def refused(stream: MemoryStream, message: Any) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        await ask(stream, message, Joined)
    return caught.value.code


ADDRESS_OF_ANOTHER = f"/ip4/10.0.0.1/tcp/4001/p2p/{node_of(node_key(0))}"


@pytest.mark.parametrize(
    "change, code",
    [
        ({"addresses": ("nonsense",)}, "wrong_address"),
        ({"addresses": ("/ip4/10.0.0.1/tcp/4001",)}, "wrong_address"),
        ({"addresses": (ADDRESS_OF_ANOTHER,)}, "wrong_address"),
        ({"addresses": ("/ip4/10.0.0.1/udp/53/p2p/" + node_of(node_key(50)),)}, "wrong_address"),
        ({"expires": WallTime(1)}, "expired"),
        ({"node_id": node_of(node_key(51))}, "wrong_node"),
    ],
)
async def test_a_record_that_lies_is_refused_and_costs_nobody_else(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        host, stream = await converse(world, founder)
        assert await refused(stream, Join(record(founder, host, **change))) == code
        await trio.sleep(60.0)
        assert founder.state == "ready"
        assert {each["node_id"] for each in founder.duty.report()["members"]} == {
            each.node_id for each in workers
        }
        assert len(founder.engines.all) == 1


async def test_the_record_of_another_node_is_not_taken(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        honest, _ = await converse(world, founder, 50)
        _, stream = await converse(world, founder, 51)
        assert await refused(stream, Join(record(founder, honest, 50))) == "wrong_node"


async def test_an_old_record_is_not_taken_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found(workers_min=9)
        await until(lambda: founder.state == "joining")
        host, stream = await converse(world, founder)
        join = Join(record(founder, host))
        assert await ask(stream, join, Joined) == Joined(0, 1, 1000)
        assert await refused(stream, join) == "stale_record"


@pytest.mark.parametrize(
    "body, code",
    [
        (b"", "malformed"),
        (b"\xc1", "malformed"),
        (encode(Joined(0, 1, 1)), "unexpected_message"),
        (encode(Heartbeat(1, "ready", "")), "unknown_member"),
        (encode(Join(b"x")), "malformed"),
    ],
)
async def test_nonsense_is_refused_with_a_code(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, body: bytes, code: str
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        _, stream = await converse(world, founder)
        await stream.send(body)
        answer = await hear(stream)
        assert isinstance(answer, Refusal)
        assert answer.code == code
        await trio.sleep(10.0)
        assert founder.state == "ready"


@pytest.mark.parametrize(
    "opening, code",
    [(Hello((2, 7), "9"), "incompatible_version"), (Leave("bye"), "unexpected_message")],
)
async def test_a_conversation_starts_with_a_version_both_speak(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, opening: Any, code: str
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        stream = await world.network.host(node_of(node_key(50))).open_stream(founder.node_id)
        await tell(stream, opening)
        answer = await hear(stream)
        assert isinstance(answer, Refusal)
        assert answer.code == code


async def test_a_member_that_goes_silent_on_its_stream_may_speak_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    """A stopped process goes on after it was given up: it is told to join again, and may."""
    async with open_world(model, tmp_path) as world:
        founder = world.found(workers_min=9)
        await until(lambda: founder.state == "joining")
        host, stream = await converse(world, founder)
        await ask(stream, Join(record(founder, host)), Joined)
        await ask(stream, Heartbeat(1, "ready", ""), HeartbeatReply)
        await trio.sleep(LOST_AFTER / 1e9 + 2.0)
        with pytest.raises(RemoteProtocolError) as caught:
            await ask(stream, Heartbeat(2, "ready", ""), HeartbeatReply)
        assert caught.value.code == "unknown_member"
        _, stream = await converse(world, founder)
        await ask(stream, Join(record(founder, host, sequence=2)), Joined)
        assert founder.duty.report()["members"][0]["state"] == "joined"


# -- sessions --------------------------------------------------------------------------------------


async def test_a_session_gives_its_tokens_in_order_and_its_outcome(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 2)
        tokens: list[TokenEmitted] = []

        async def keep(token: TokenEmitted) -> None:
            tokens.append(token)
            await trio.lowlevel.checkpoint()

        outcome = await founder.duty.generate(text(5), keep)
        assert [each.position for each in tokens] == list(range(5))
        assert (outcome.reason, outcome.n_generated) == ("length", 5)
        assert founder.duty.report()["sessions"] == 0
        assert founder.duty.report()["rows_retried_total"] == 2


async def test_a_worker_or_a_swarm_that_is_not_ready_generates_nothing(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder = world.found()
        for request in (founder.duty.generate(text(), ignore), founder.duty.evaluate(logits())):
            with pytest.raises(NotReady, match="the swarm is starting"):
                await request
        await until(lambda: founder.state == "joining")
        with pytest.raises(NotReady, match="0 of 1 workers"):
            await founder.duty.generate(text(), ignore)


def logits() -> EvaluateRequest:
    return EvaluateRequest((1, 2), (2,), "/nowhere.npy")


async def test_logits_are_evaluated(autojump_clock: MockClock, model: StoredModel, tmp_path: Path) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        assert (await founder.duty.evaluate(logits())).positions == 2


async def start_session(
    world: World,
    founder: TwinFounder,
    n_tokens: int = 5,
    emit: Callable[[TokenEmitted], Awaitable[None]] = ignore,
) -> list[SessionEnded | BaseException]:
    """A session that runs until the test ends it; what became of it is put in the list."""
    outcome: list[SessionEnded | BaseException] = []

    async def run() -> None:
        try:
            outcome.append(await founder.duty.generate(text(n_tokens), emit))
        except Exception as error:
            outcome.append(error)

    before = founder.engines.last.count(Generate)
    world.nursery.start_soon(run)
    await until(lambda: founder.engines.last.count(Generate) > before)
    return outcome


def pause_sessions(founder: TwinFounder) -> TwinEngine:
    """From now on sessions give one token and then nothing."""
    founder.engines.last.n_tokens_emitted_max = 1
    return founder.engines.last


async def test_a_client_that_goes_away_cancels_its_session(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        engine = pause_sessions(founder)
        with trio.move_on_after(5.0):
            await founder.duty.generate(text(5), ignore)
        await until(lambda: not engine.sessions)
        assert engine.count(CancelSession) == 1
        assert founder.duty.report()["sessions"] == 0
        engine.n_tokens_emitted_max = 100
        assert (await founder.duty.generate(text(), ignore)).reason == "length"


async def test_a_client_that_fails_cancels_its_session(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        engine = pause_sessions(founder)

        async def fail(_token: TokenEmitted) -> None:
            raise EngineFailed("the client is broken")

        with pytest.raises(EngineFailed, match="client is broken"):
            await founder.duty.generate(text(5), fail)
        await until(lambda: engine.count(CancelSession) == 1)


async def test_a_client_that_does_not_read_holds_up_nobody(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 3)

        async def never(_token: TokenEmitted) -> None:
            await trio.sleep_forever()

        outcome = await start_session(world, founder, 3000, never)
        await founder.engines.last.lose_holder(workers[0].node_id, "late")
        await until(lambda: founder.member(workers[0])["state"] == "unreachable")
        assert (await founder.duty.generate(text(2000), ignore)).n_generated == 2000
        assert outcome == []


async def test_sessions_are_bounded(autojump_clock: MockClock, model: StoredModel, tmp_path: Path) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        engine = pause_sessions(founder)
        outcomes = [await start_session(world, founder) for _ in range(SESSIONS_WAITING_MAX)]
        with pytest.raises(NotReady, match="8 sessions are waiting"):
            await founder.duty.generate(text(), ignore)
        await engine.end_session(engine.sessions[0], "end_of_text")
        await until(lambda: any(outcomes))
        await start_session(world, founder)


async def test_the_death_of_the_engine_fails_its_sessions_and_everything_comes_back(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        engine = pause_sessions(founder)
        outcomes = [await start_session(world, founder) for _ in range(2)]
        engine.die()
        await until(lambda: all(outcomes))
        for outcome in outcomes:
            assert isinstance(outcome[0], EngineFailed)
            assert str(outcome[0]) == "the backbone engine ended during the session: killed by SIGKILL"
        assert founder.state == "starting"
        assert "killed by SIGKILL" in founder.duty.report()["last_error"]
        assert founder.duty.report()["last_error_recovered"] is False
        assert founder.duty.report()["last_error_at"].startswith("2027-01-15T08:00:")
        with pytest.raises(NotReady, match="starting"):
            await founder.duty.generate(text(), ignore)
        await until(lambda: founder.state == "ready")
        assert founder.duty.report()["last_error_recovered"] is True
        assert founder.engines.last is not engine
        assert set(founder.engines.last.connected) == {each.node_id for each in workers}
        assert founder.revision == 1
        assert all(each.engines.last.count(LoadShard) == 1 for each in workers), "shards stay where they are"
        assert (await founder.duty.generate(text(), ignore)).reason == "length"


async def test_an_engine_that_does_not_answer_any_more_is_killed_and_its_sessions_fail(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 2)
        engine = pause_sessions(founder)
        outcomes = [await start_session(world, founder)]
        engine.ignored.add(QueryStatistics)
        await until(lambda: all(outcomes))
        assert isinstance(outcomes[0][0], EngineFailed)
        assert not engine.is_alive
        await until(lambda: founder.state == "ready")
        assert (await founder.duty.generate(text(), ignore)).reason == "length"


async def test_an_engine_that_keeps_dying_is_restarted_ever_more_slowly(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        starts = []
        for number in range(2, 9):
            founder.engines.last.die()
            await wait_engines(founder, number)
            starts.append(trio.current_time())
            await until(lambda: founder.state in ("joining", "ready"))
        delays = [later - earlier for earlier, later in itertools.pairwise(starts)]
        assert delays == sorted(delays)
        assert 30.0 < delays[-1] < 70.0


async def test_an_engine_that_breaks_the_protocol_is_replaced(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        engine = founder.engines.last
        await engine.say_raw(b"\x00\x00\x00\x02xx")
        await until(lambda: founder.engines.last is not engine)
        assert not engine.is_alive
        assert "broke the protocol" in founder.duty.report()["last_error"]
        await until(lambda: founder.state == "ready")


async def test_an_engine_that_emits_more_than_was_asked_for_is_replaced(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        engine = pause_sessions(founder)

        async def never(_token: TokenEmitted) -> None:
            await trio.sleep_forever()

        await start_session(world, founder, 5, never)
        for position in range(20):
            await engine.say(TokenEmitted(engine.sessions[0], position, 1, b"x", 0, 1))
        await until(lambda: founder.engines.last is not engine)
        assert "more tokens than were asked for" in founder.duty.report()["last_error"]


ABORTS = {
    "without a word": ("", "killed by SIGABRT"),
    "with ggml's words": ("llama.cpp gave up on the model: eps", "llama.cpp gave up on the model: eps"),
}


@pytest.mark.parametrize("case", ABORTS)
async def test_an_abort_on_the_model_is_told_as_that_and_the_node_lives_on(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, case: str
) -> None:
    said, reason = ABORTS[case]
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        engine = pause_sessions(founder)
        outcome = await start_session(world, founder)
        if said:
            await engine.say(EngineFault(None, "model_aborted", said, 7))
        engine.die(-6)
        await until(lambda: outcome)
        assert isinstance(outcome[0], ModelAborted)
        assert str(outcome[0]) == f"the backbone engine ended during the session: {reason}"
        assert reason in founder.duty.report()["last_error"]
        await until(lambda: founder.state == "ready")
        assert (await founder.duty.generate(text(), ignore)).reason == "length"


async def test_the_end_of_an_idle_workers_engine_is_the_last_error(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, (worker, _) = await ready_swarm(world, 2)
        await founder.engines.last.lose_holder(worker.node_id, "late", "older trouble")
        await until(lambda: founder.duty.report()["last_error_recovered"] is True)
        worker.engines.last.die()
        await until(lambda: "older trouble" not in founder.duty.report()["last_error"])
        assert founder.duty.report()["last_error"].startswith(f"{worker.node_id} lost: starting: ")
        await until(lambda: founder.duty.report()["last_error_recovered"] is True)


async def test_a_session_that_fails_says_why(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        engine = pause_sessions(founder)
        outcome = await start_session(world, founder)
        await engine.end_session(engine.sessions[0], "failed", "no_holder_left", "no holder is left")
        await until(lambda: outcome)
        assert isinstance(outcome[0], SessionEnded)
        assert (outcome[0].reason, outcome[0].code) == ("failed", "no_holder_left")
        assert founder.duty.report()["last_error"] == "no holder is left"


async def test_what_a_client_did_wrong_is_no_error_of_the_node(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        engine = pause_sessions(founder)
        outcome = await start_session(world, founder)
        await engine.end_session(engine.sessions[0], "failed", UsageError("").code, "the prompt is empty")
        await until(lambda: outcome)
        assert isinstance(outcome[0], SessionEnded)
        assert outcome[0].detail == "the prompt is empty"
        assert founder.duty.report()["last_error"] == ""
        assert founder.duty.report()["last_error_at"] is None


async def test_nothing_is_planned_anew_while_a_session_runs(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 3)
        engine = pause_sessions(founder)
        await start_session(world, founder)
        newcomer = world.join(9, founder)
        await workers[0].stop()
        await trio.sleep(120.0)
        assert founder.revision == 1
        assert founder.member(newcomer)["state"] == "joined"
        await engine.end_session(engine.sessions[0], "length")
        await until(lambda: founder.revision == 2 and founder.state == "ready")


async def test_nothing_is_planned_anew_while_logits_are_evaluated(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 2)
        founder.engines.last.ignored.add(EvaluateLogits)
        with trio.move_on_after(60.0):
            world.join(9, founder)
            await founder.duty.evaluate(logits())
        assert founder.revision == 1
        await until(lambda: founder.revision == 2 and founder.state == "ready")


async def test_no_session_starts_on_shards_that_are_about_to_be_replaced(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        for worker in workers:
            worker.engines.last.ignored.add(LoadShard)
        world.join(9, founder)
        for _ in range(10_000):  # tick by tick: not a moment may lie between
            if founder.revision == 2:
                break
            await trio.lowlevel.checkpoint()
        assert founder.revision == 2
        with pytest.raises(NotReady, match="0 of 32 experts"):
            await founder.duty.generate(text(), ignore)


async def test_a_late_answer_about_an_older_connection_does_no_harm(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        await founder.engines.last.say(HolderConnected(workers[0].node_id))
        await founder.engines.last.say(HolderConnected(node_of(node_key(99))))
        await founder.engines.last.lose_holder(node_of(node_key(99)), "late")
        await trio.sleep(30.0)
        assert founder.state == "ready"


# -- lease and restarts ----------------------------------------------------------------------------


async def test_the_lease_is_renewed_long_before_it_ends(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        await trio.sleep(20.0)
        ends = [
            each.lease_end_boottime_ns for each in founder.engines.last.received if isinstance(each, SetLease)
        ]
        assert len(ends) > 20.0 / LEASE_RENEWAL_S
        gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]
        assert max(gaps) < LEASE_NS / 3
        ahead_ns = ends[-1] - round(trio.current_time() * 1e9)
        assert 0 < ahead_ns <= LEASE_NS * 9 // 10


async def test_a_founder_that_restarts_adopts_its_plan(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        workers.append(world.join(9, founder))
        await until(lambda: founder.revision == 2 and founder.state == "ready")
        loads = [each.engines.last.count(LoadShard) for each in workers]
        await founder.crash()
        await until(lambda: all(each.state == "isolated" for each in workers))
        founder.start()
        assert founder.duty.state()[0] == "starting"
        await until(lambda: founder.state == "ready")
        assert founder.revision == 2, "the workers would refuse an older revision"
        assert [each.engines.last.count(LoadShard) for each in workers] == loads
        assert all(each.state == "ready" for each in workers)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_founder_that_has_lost_its_plan_goes_on_above_what_its_workers_hold(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, is_lost: bool
) -> None:
    """Where an older plan was put back, the next revision may even be one that was used before."""
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        older = None if is_lost else founder.disk.plan
        workers.append(world.join(9, founder))
        await until(lambda: founder.revision == 2 and founder.state == "ready")
        workers.append(world.join(8, founder))
        await until(lambda: founder.revision == 3 and founder.state == "ready")
        await workers.pop().stop()
        await until(lambda: founder.revision == 4 and founder.state == "ready")
        await founder.crash()
        founder.disk.plan = older
        founder.start()
        await until(lambda: founder.state == "ready" and len(founder.engines.last.connected) == 3)
        assert founder.revision > 4
        assert all(each.duty.report()["plan"]["revision"] == founder.revision for each in workers)


async def test_only_a_newer_plan_of_its_own_term_and_key_moves_a_backbone(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        offered = open_plan(founder.disk.plan or b"", founder.founding.swarm.digest, founder.node_id)
        for signer, claimed, code in [
            (node_key(77), replace(offered, revision=9), "wrong_node"),
            (founder.key, replace(offered, term=2, revision=9), "wrong_plan"),
            (founder.key, offered, "wrong_plan"),
            (founder.key, replace(offered, revision=0), "wrong_plan"),
        ]:
            signed = sign_message(signer, founder.founding.swarm.digest, claimed)
            with pytest.raises(RemoteProtocolError) as caught:
                founder.duty._go_on_above(signed, offered)
            assert caught.value.code == code
        await trio.sleep(60.0)
        assert founder.revision == 1


async def test_after_a_restart_who_does_not_come_back_is_replaced(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 2)
        await founder.crash()
        await workers[0].crash()
        founder.start()
        newcomer = world.join(9, founder)
        await until(lambda: founder.revision == 2 and founder.state == "ready")
        assert set(founder.engines.last.connected) == {workers[1].node_id, newcomer.node_id}


async def test_stopping_takes_the_engine_along(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 1)
        started = trio.current_time()
        founder.engines.last.ignored.add(Shutdown)
        await founder.stop()
        assert not founder.engines.last.is_alive
        assert trio.current_time() - started < 15.0


async def test_a_member_that_refuses_every_offer_is_left_out_for_a_while(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, _ = await ready_swarm(world, 3)
        useless = world.join(9, founder, start=False)
        fault = EngineFault(None, "engine_failed", "the disk is full", 1)
        useless.engines.before_start = lambda engine: engine.refusals.update({LoadShard: fault})
        useless.start()
        await until(lambda: founder.revision == 2)
        assert founder.member(useless)["shards"] > 0
        await until(lambda: founder.revision == 3 and founder.state == "ready")
        assert founder.member(useless)["shards"] == 0
        assert (await founder.duty.generate(text(), ignore)).reason == "length"


async def test_the_end_of_a_members_stream_shows_at_once(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        founder, workers = await ready_swarm(world, 3)
        crashed = trio.current_time()
        await workers[0].crash()
        await until(lambda: founder.state == "degraded")
        assert trio.current_time() - crashed < 1.0
