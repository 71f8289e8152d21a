"""The backbone's duty among twins on a mock clock: when it reigns, who serves, what becomes of sessions."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.driver.backbone_duty import (
    ENGINE_KEPT_S,
    JUDGED_MAX,
    OWN_RETRY_S,
    RELEASE_TIMEOUT_S,
    SESSIONS_MAX,
)
from kvasir_node.driver.holder_connections import QUARANTINE_FIRST
from kvasir_node.model.store import StoredModel
from kvasir_proto.accusations import Accuse
from kvasir_proto.election.requests import LeaseHeld, LeaseLost, TermFollowed, TermVoided
from kvasir_proto.errors import (
    DiskFull,
    EngineFailed,
    IncompatibleVersion,
    ModelAborted,
    ModelUnusable,
    NotReady,
    RemoteProtocolError,
    UsageError,
)
from kvasir_proto.ids import SessionId, node_id_of
from kvasir_proto.instants import after, in_seconds, milliseconds, seconds
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    CancelSession,
    ConnectHolder,
    EngineFault,
    EngineMessage,
    EvaluateLogits,
    Generate,
    HolderConnected,
    HolderEvidenced,
    HolderJudged,
    LoadOwnShard,
    LoadTrunk,
    QueryStatistics,
    RemoveHolder,
    SessionEnded,
    SessionOpened,
    SetLease,
    Shutdown,
    TokenEmitted,
)
from kvasir_proto.messages.local import EvaluateRequest, GenerateRequest
from kvasir_proto.node_core import (
    AnswersSeen,
    FoundOut,
    HolderFailed,
    HolderReady,
    PlanReceived,
    ShardLoaded,
    ShardLost,
    ShardRefused,
)
from kvasir_proto.sampling import Sampling, SamplingOptions
from tests.node.driver.backbone_world import (
    LEASE,
    RENEWAL_S,
    TwinBackbone,
    serving_backbone,
)
from tests.node.driver.twins import TwinEngine, World, node_key, node_of, now, open_world, until

REPORT_KEYS = {
    *("is_backbone", "lease_left_s", "plan", "holders", "own", "engine", "sessions", "rows_retried_total"),
    *("audit", "fetch", "last_error", "last_error_at", "last_error_recovered"),
}
HOLDER_KEYS = {
    *("node_id", "state", "reason", "n_experts", "n_experts_connected", "shard_bytes", "failures"),
}
SOON_S = 0.3
"""Far less than anything here waits for on purpose, more than a message takes."""


def text(n_tokens: int = 3) -> GenerateRequest:
    return GenerateRequest("hello", (), n_tokens, Sampling())


def logits() -> EvaluateRequest:
    return EvaluateRequest((1, 2), (2,), "/nowhere.npy")


async def ignore(_token: TokenEmitted) -> None:
    await trio.lowlevel.checkpoint()


async def start_session(
    world: World,
    backbone: TwinBackbone,
    n_tokens: int = 5,
    emit: Callable[[TokenEmitted], Awaitable[None]] = ignore,
) -> list[SessionEnded | BaseException]:
    """A session that runs until the test ends it; what became of it is put in the list."""
    outcome: list[SessionEnded | BaseException] = []

    async def run() -> None:
        try:
            outcome.append(await backbone.duty.generate(text(n_tokens), emit))
        except Exception as error:
            outcome.append(error)

    before = backbone.engine.count(Generate)
    world.nursery.start_soon(run)
    await until(lambda: backbone.engine.count(Generate) > before)
    return outcome


def pause_sessions(backbone: TwinBackbone) -> TwinEngine:
    """From now on sessions give one token and then nothing."""
    backbone.engine.n_tokens_emitted_max = 1
    return backbone.engine


def of_kind(engine: TwinEngine, *kinds: type[Any]) -> list[EngineMessage]:
    """What an engine was told of these kinds, in order."""
    return [each for each in engine.received if isinstance(each, kinds)]


# -- coming up -------------------------------------------------------------------------------------


async def test_a_standby_is_loaded_before_any_lease_and_serves_with_the_first(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        holders = backbone.add_holders(2)
        for each in holders:
            each.load_s = 0.0  # they held the same under the backbone before
        await until(lambda: backbone.state == "standby")
        await trio.sleep(60.0)
        assert [type(each) for each in backbone.engine.received if not isinstance(each, QueryStatistics)] == [
            LoadTrunk
        ], "a standby knows no lease and no holder"
        started = trio.current_time()
        backbone.elect()
        backbone.issue(backbone.make(*holders))
        await until(lambda: backbone.state == "ready")
        assert trio.current_time() - started < 0.5
        assert len(backbone.engines.all) == 1
        assert (await backbone.duty.generate(text(), ignore)).reason == "length"


async def test_without_standby_there_is_an_engine_only_while_it_is_needed(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world, standby=False)
        holders = backbone.add_holders(1)
        await trio.sleep(60.0)
        assert backbone.duty.state() == ("idle", "it holds no lease")
        assert backbone.engines.all == []
        backbone.elect()
        backbone.issue(backbone.make(*holders))
        assert backbone.state == "starting"
        await until(lambda: backbone.state == "ready")
        backbone.lose()
        await trio.sleep(ENGINE_KEPT_S - 5.0)
        backbone.elect(2)
        backbone.issue(backbone.make(*holders))
        await until(lambda: backbone.state == "ready")
        await trio.sleep(2 * ENGINE_KEPT_S)
        assert len(backbone.engines.all) == 1, "a lease that is won back finds the engine there"
        backbone.lose()
        await trio.sleep(ENGINE_KEPT_S - 5.0)
        assert len([each for each in backbone.engines.all if each.is_alive]) == 1
        await trio.sleep(10.0)
        assert [each for each in backbone.engines.all if each.is_alive] == []
        assert backbone.state == "idle"
        backbone.elect(3)
        backbone.issue(backbone.make(*holders))
        await until(lambda: backbone.state == "ready")
        assert len(backbone.engines.all) == 2


@pytest.mark.parametrize("n_holders", [1, 2, 3, 5])
async def test_the_holders_of_the_plan_are_connected_for_what_it_gives_them(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, n_holders: int
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, n_holders)
        plan = backbone.plan
        assert plan is not None
        connected = backbone.engine.connected
        assert set(connected) == {each.node_id for each in holders}
        for holder in holders:
            assert backbone.line(holder)["state"] == "serving"
            assert connected[holder.node_id].shard == plan.shard_of(holder.node_id).encode()
            assert connected[holder.node_id].primary == plan.primary_shard_of(holder.node_id).encode()
        assert not backbone.core.commanded(HolderFailed)
        assert backbone.duty.report()["plan"]["coverage"] == 1.0


async def test_the_report_is_complete_in_every_state(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        holders = backbone.add_holders(3)
        seen: dict[str, None] = {}

        def check(state: str) -> bool:
            report = backbone.duty.report()
            assert set(report) == REPORT_KEYS
            assert all(set(each) == HOLDER_KEYS for each in report["holders"])
            assert backbone.state == "ready" or backbone.reason
            assert report["is_backbone"] == (report["lease_left_s"] is not None)
            seen[backbone.state] = None
            return backbone.state == state

        check("starting")
        await until(lambda: check("standby"))
        backbone.elect()
        check("joining")
        backbone.issue(backbone.make(*holders))
        await until(lambda: check("ready"))
        backbone.see(holders[0], "dead")
        await until(lambda: check("degraded"))
        backbone.lose("its lease ran out")
        check("standby")
        assert backbone.reason == "its lease ran out"
        assert list(seen) == ["starting", "standby", "joining", "ready", "degraded"]


@pytest.mark.parametrize("rule", ["compact_activations", "partial_sums"])
async def test_the_engine_is_told_what_the_swarm_was_founded_with(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, rule: str
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world, rules={rule: True})
        await until(lambda: backbone.state == "standby")
        (trunk,) = (each for each in backbone.engine.received if isinstance(each, LoadTrunk))
        told = {"compact_activations": trunk.compact_activations, "partial_sums": trunk.partial_sums}
        assert [name for name, is_on in told.items() if is_on] == [rule]


POINTLESS = {
    "the model cannot be loaded": ModelUnusable,
    "the backbone file is damaged": ModelUnusable,
    "the disk is full": DiskFull,
    "another build": IncompatibleVersion,
}


def spoil(backbone: TwinBackbone, case: str) -> None:
    fault = EngineFault(None, "model_unusable", case, ModelUnusable.exit_code)
    if case == "the model cannot be loaded":
        backbone.engines.before_start = lambda engine: engine.refusals.update({LoadTrunk: fault})
    elif case == "the backbone file is damaged":
        backbone.backbone_file_error = ModelUnusable(case)
    elif case == "the disk is full":
        backbone.generation_error = DiskFull(case)
    else:
        backbone.engines.failure = IncompatibleVersion(case)


def mend(backbone: TwinBackbone) -> None:
    backbone.engines.before_start = lambda _engine: None
    backbone.backbone_file_error = backbone.generation_error = backbone.engines.failure = None


@pytest.mark.parametrize("case", POINTLESS)
async def test_what_makes_a_first_start_pointless_ends_a_standby(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, case: str
) -> None:
    async with trio.open_nursery() as nursery:
        backbone = TwinBackbone(World(nursery, model, tmp_path))
        spoil(backbone, case)
        await until(lambda: backbone.life.has_ended)
        assert isinstance(backbone.life.error, POINTLESS[case])
        assert case in str(backbone.life.error)
        assert not any(each.is_alive for each in backbone.engines.all)


@pytest.mark.parametrize("case", POINTLESS)
async def test_the_same_trouble_is_waited_out_where_the_engine_starts_later(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, case: str
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world, standby=False)
        holders = backbone.add_holders(1)
        spoil(backbone, case)
        backbone.elect()
        backbone.issue(backbone.make(*holders))
        await until(lambda: backbone.reason == case)
        assert backbone.state == "starting"
        await trio.sleep(60.0)
        mend(backbone)
        await until(lambda: backbone.state == "ready")


async def test_the_backbone_file_is_asked_for_before_each_engine(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    damage = ModelUnusable("backbone.gguf is damaged")
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        backbone.backbone_file_error = damage
        n_engine = len(backbone.engines.all)
        backbone.engine.die()
        await until(lambda: str(damage) in backbone.duty.report()["last_error"])
        assert len(backbone.engines.all) == n_engine, "no engine is started on a damaged file"
        backbone.backbone_file_error = None
        await until(lambda: backbone.state == "ready")
        assert len(backbone.engines.all) == n_engine + 1


# -- the lease -------------------------------------------------------------------------------------


async def test_every_lease_reaches_the_engine_in_time_and_as_it_is(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        granted: list[int] = []
        late: list[float] = []
        take_event = backbone.duty.take_event

        def watch(event: Any) -> None:
            if isinstance(event, LeaseHeld):
                granted.append(event.until)
            take_event(event)

        backbone.duty.take_event = watch  # type: ignore[method-assign]
        before = len(backbone.engine.leases)
        for _ in range(50):
            await trio.sleep(RENEWAL_S)
            late.append(now() + LEASE - backbone.engine.leases[-1].lease_end_boottime_ns)
        told = [each.lease_end_boottime_ns for each in backbone.engine.leases[before:]]
        assert told == granted[: len(told)], "nothing is added to what was granted, and nothing kept back"
        assert len(told) >= 49
        assert max(late) <= (RENEWAL_S + 0.01) * 1e9
        assert {(each.epoch, each.term) for each in backbone.engine.leases} == {(0, 1)}


async def test_of_leases_that_wait_for_a_slow_engine_the_newest_is_told(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        duty = backbone.duty
        for step in range(5):
            duty.take_event(LeaseHeld(0, 1, after(now(), milliseconds(100 * step))))
        before = len(backbone.engine.leases)
        await trio.sleep(0.01)
        assert len(backbone.engine.leases) == before + 1
        assert backbone.engine.leases[-1].lease_end_boottime_ns >= now() + 390_000_000


ENDS: dict[str, tuple[Callable[[TwinBackbone], None], str]] = {
    "lease over": (lambda backbone: backbone.lose("lease over"), "lease over"),
    "term void": (
        lambda backbone: backbone.duty.take_event(TermVoided(0, 1)),
        "there is evidence of a lie in (0, 1)",
    ),
    "another": (
        lambda backbone: backbone.depose(2),
        f"{node_of(node_key(99))} is the backbone of (0, 2)",
    ),
}


@pytest.mark.parametrize("how", ENDS)
async def test_the_end_of_a_reign_ends_sampling_holders_and_sessions(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, how: str
) -> None:
    end, reason = ENDS[how]
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 3)
        engine = pause_sessions(backbone)
        outcome = await start_session(world, backbone)
        (session,) = engine.sessions
        heard = len(engine.received)
        ended = trio.current_time()
        end(backbone)
        backbone.lose = lambda *_: None  # type: ignore[method-assign]
        backbone._renewing.cancel()
        await until(lambda: bool(outcome))
        assert trio.current_time() - ended < SOON_S
        assert isinstance(outcome[0], NotReady)
        assert str(outcome[0]) == f"this node is no longer the backbone: {reason}"
        assert (backbone.state, backbone.reason) == ("standby", reason)
        await engine.emit(session, 1)
        await trio.sleep(60.0)
        told = [each for each in engine.received[heard:] if not isinstance(each, QueryStatistics)]
        assert told[0] == SetLease(0, 1, 0), "sampling ends before anything else"
        assert {type(each) for each in told[1:]} == {RemoveHolder, CancelSession}
        removed = {each.node_id for each in told if isinstance(each, RemoveHolder)}
        assert removed == {each.node_id for each in holders} | {backbone.node_id}
        assert engine.connected == {}
        assert not backbone.core.commanded(HolderFailed), "no holder has failed"
        with pytest.raises(NotReady, match="this node is not the backbone"):
            await backbone.duty.generate(text(), ignore)


async def test_logits_of_a_reign_that_ended_meanwhile_are_refused_with_the_reason(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = backbone.engine
        engine.ignored.add(EvaluateLogits)
        errors: list[Exception] = []

        async def evaluate() -> None:
            try:
                await backbone.duty.evaluate(logits())
            except NotReady as error:
                errors.append(error)

        world.nursery.start_soon(evaluate)
        await until(lambda: engine.count(EvaluateLogits) == 1)
        backbone.lose("no quorum")
        (request,) = (each for each in engine.received if isinstance(each, EvaluateLogits))
        await engine.say(EngineFault(request.request, "no_holder_left", "no holder is left", 1))
        await until(lambda: bool(errors))
        assert str(errors[0]) == "this node is no longer the backbone: no quorum"


@pytest.mark.parametrize(
    "event",
    [LeaseLost(0, 7, "of another term", False), TermVoided(0, 7), "an older term", "its own term again"],
)
async def test_what_is_said_of_other_terms_ends_nothing(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, event: Any
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        holders = backbone.add_holders(1)
        backbone.elect(5)
        backbone.issue(backbone.make(*holders))
        await until(lambda: backbone.state == "ready")
        before = backbone.engine.count(ConnectHolder)
        if event == "an older term":
            proven, proof = backbone.prove(4, node_of(node_key(99)))
        else:
            proven, proof = backbone.prove(5)
        if isinstance(event, str):
            event = TermFollowed(proven, proof)
        backbone.duty.take_event(event)
        await trio.sleep(10.0)
        assert backbone.state == "ready"
        assert backbone.engine.count(ConnectHolder) == before


async def test_a_lease_won_back_in_the_same_term_begins_anew(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 2)
        backbone.lose()
        await trio.sleep(1.0)
        backbone.elect(1)
        await trio.sleep(1.0)
        assert backbone.duty.state() == ("joining", "no plan yet"), "the core issues its plan anew"
        started = trio.current_time()
        backbone.issue(backbone.make(*holders))
        await until(lambda: backbone.state == "ready")
        assert trio.current_time() - started < SOON_S, "they hold their shards still"
        assert set(backbone.engine.connected) == {each.node_id for each in holders}
        assert (await backbone.duty.generate(text(), ignore)).reason == "length"


@pytest.mark.parametrize("returns", [True, False])
async def test_a_lease_that_lapses_for_a_moment_ends_nothing(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, returns: bool
) -> None:
    """Else one late renewal on a busy machine makes so much work that the next one is late too."""
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 2)
        pause_sessions(backbone)
        outcome = await start_session(world, backbone)
        before = backbone.engine.count(ConnectHolder)
        backbone.lose("lease over", may_return=True)
        await trio.sleep(1.0)
        lease = backbone.engine.leases[-1]
        assert (lease.term, lease.lease_end_boottime_ns) == (1, 0), "the engine samples nothing"
        assert backbone.duty.state() == ("joining", "lease over; it may be granted again")
        report = backbone.duty.report()
        assert (report["is_backbone"], report["lease_left_s"]) == (False, None)
        with pytest.raises(NotReady, match="it may be granted again"):
            await backbone.duty.generate(text(), ignore)
        assert not outcome
        assert set(backbone.engine.connected) == {each.node_id for each in holders}
        if returns:
            backbone.elect(1)
            await until(lambda: backbone.state == "ready")
            await until(lambda: backbone.engine.leases[-1].lease_end_boottime_ns > 0)
            assert backbone.engine.count(ConnectHolder) == before
            backbone.issue(backbone.make(*holders))
            await trio.sleep(10.0)
            assert backbone.state == "ready"
            assert not outcome, "the session goes on"
        else:
            backbone.lose("no quorum")
            await until(lambda: bool(outcome))
            assert str(outcome[0]) == "this node is no longer the backbone: no quorum"
            await until(lambda: not backbone.engine.connected)


async def test_a_lease_of_a_later_term_takes_the_place_of_the_one_before(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 2)
        pause_sessions(backbone)
        outcome = await start_session(world, backbone)
        backbone.elect(2)
        await until(lambda: bool(outcome))
        assert str(outcome[0]) == "this node is no longer the backbone: a lease of (0, 2) took its place"
        backbone.issue(backbone.make(*holders))
        await until(lambda: backbone.state == "ready")
        opened = [each for each in backbone.engine.received if isinstance(each, ConnectHolder)]
        assert {each.proof for each in opened[-2:]} == {backbone.prove(2)[1]}
        assert (backbone.engine.leases[-1].epoch, backbone.engine.leases[-1].term) == (0, 2)


async def test_a_connection_that_is_made_after_the_reign_is_let_go(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        await until(lambda: backbone.state == "standby")
        engine = backbone.engine
        engine.ignored.add(ConnectHolder)
        backbone.elect()
        backbone.issue(backbone.make(holder))
        await until(lambda: engine.count(ConnectHolder) == 1)
        backbone.lose()
        await trio.sleep(0.1)
        before = engine.count(RemoveHolder)
        await engine.say(HolderConnected(holder.node_id))
        await until(lambda: engine.count(RemoveHolder) == before + 1)
        assert of_kind(engine, RemoveHolder)[-1].node_id == holder.node_id  # type: ignore[union-attr]


async def test_without_its_proof_nobody_is_dialled(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        backbone.elect(has_proof=False)
        backbone.issue(backbone.make(holder))
        await trio.sleep(30.0)
        assert holder.grants == 0
        backbone.elect()
        await until(lambda: backbone.state == "ready")


# -- going in good order ---------------------------------------------------------------------------


async def test_release_returns_when_the_engine_knows_and_no_lease_of_the_term_counts_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 2)
        pause_sessions(backbone)
        outcome = await start_session(world, backbone)
        await backbone.duty.release()
        assert backbone.engine.leases[-1] == SetLease(0, 1, 0)
        assert str(outcome[0]) == "this node is no longer the backbone: it gives the lease back"
        heard = len(backbone.engine.leases)
        await trio.sleep(10.0)  # renewals that were under way go on
        assert len(backbone.engine.leases) == heard
        assert backbone.state == "standby"
        backbone.elect(2)
        backbone.issue(backbone.make(*holders))
        await until(lambda: backbone.state == "ready")


async def test_an_engine_that_does_not_confirm_the_end_of_its_lease_is_killed(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = backbone.engine
        engine.ignored.add(QueryStatistics)
        started = trio.current_time()
        await backbone.duty.release()
        assert not engine.is_alive
        assert trio.current_time() - started < RELEASE_TIMEOUT_S + 1.0


async def test_release_before_the_first_lease_keeps_it_from_being_taken_up(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        await backbone.duty.release()
        await until(lambda: backbone.state == "standby")
        term, _ = backbone.prove(1)
        backbone.core.change(fence=term)
        await backbone.duty.release()
        backbone.elect(1)
        await trio.sleep(5.0)
        assert backbone.state == "standby"
        assert all(each.lease_end_boottime_ns == 0 for each in backbone.engine.leases)


async def test_stopping_takes_the_engine_along(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        started = trio.current_time()
        backbone.engine.ignored.add(Shutdown)
        await backbone.life.end()
        assert not backbone.engine.is_alive
        assert trio.current_time() - started < 15.0


# -- plans -----------------------------------------------------------------------------------------


async def test_only_a_newer_plan_of_its_own_term_is_followed(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 2)
        older = backbone.plan
        assert older is not None
        (newcomer,) = backbone.add_holders(1, 9)
        newer = backbone.issue(backbone.make(*holders, newcomer))
        await until(lambda: backbone.state == "ready")
        heard = backbone.engine.count(ConnectHolder)
        backbone.duty.take_event(PlanReceived(older, b""))
        changes: list[dict[str, Any]] = [{"term": 2}, {"epoch": 1}, {"term": 0}]
        for foreign in changes:
            plan = replace(backbone.make(newcomer), **foreign)
            backbone.duty.take_event(PlanReceived(plan, b""))
        await trio.sleep(30.0)
        assert backbone.duty.report()["plan"]["revision"] == newer.revision
        assert backbone.engine.count(ConnectHolder) == heard
        assert backbone.state == "ready"


async def test_a_word_about_an_older_plan_connects_nobody(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 1)
        older = backbone.plan
        assert older is not None
        (newcomer,) = backbone.add_holders(1, 9)
        newcomer.is_up = False  # it does not answer
        backbone.issue(backbone.make(*holders, newcomer))
        backbone.duty.take_event(HolderReady(newcomer.node_id, older, 1))
        await trio.sleep(30.0)
        assert newcomer.grants == 0


async def test_whose_share_stays_the_same_is_left_in_peace(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 3)
        grants = [each.grants for each in holders]
        for _ in range(3):
            backbone.issue(backbone.make(*holders))
            assert backbone.state == "ready", "not a moment lies between"
            await trio.sleep(5.0)
        assert [each.grants for each in holders] == grants
        assert backbone.engine.count(RemoveHolder) == 0


async def test_what_the_plan_before_still_serves_is_not_called_lost(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    """It said that some expert has 0 of its planned holders, while each was held."""
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        first, second, third = backbone.add_holders(3)
        backbone.elect()
        backbone.issue(backbone.make_of(*[(first,)] * 4, *[(second,)] * 4))
        await until(lambda: backbone.state == "ready")
        third.load_s = 20.0
        backbone.issue(backbone.make_of(*[(first,)] * 4, *[(third,)] * 4))
        await trio.sleep(10.0)
        assert backbone.state == "degraded"
        assert backbone.reason.startswith("every expert has a holder, some only by the plan before")
        await until(lambda: backbone.state == "ready")


async def test_a_plan_that_changes_under_a_session_adds_before_it_drops(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        first, second, third = backbone.add_holders(3)
        backbone.elect()
        backbone.issue(backbone.make_of(*[(first,)] * 4, *[(second,)] * 4))
        await until(lambda: backbone.state == "ready")
        engine = pause_sessions(backbone)
        outcome = await start_session(world, backbone)
        everything = backbone.plan
        assert everything is not None
        n_pairs = everything.coverage().n_pairs
        third.load_s = 20.0
        backbone.issue(backbone.make_of(*[(first,)] * 4, *[(third,)] * 4))
        for _ in range(300):
            await trio.sleep(0.1)
            held = [ShardSet.decode(each.shard) for each in engine.connected.values()]
            covered = ShardSet.from_ranges(part for shard in held for part in shard.ranges)
            assert len(covered) == n_pairs, "whoever is let go of, every expert has a holder"
        assert set(engine.connected) == {first.node_id, third.node_id}
        assert outcome == [], "the session runs still"
        kinds = [type(each) for each in of_kind(engine, ConnectHolder, RemoveHolder)]
        assert kinds == [ConnectHolder, ConnectHolder, ConnectHolder, RemoveHolder]
        await engine.end_session(engine.sessions[0], "length")
        await until(lambda: bool(outcome))
        assert isinstance(outcome[0], SessionEnded)


async def test_another_primary_part_is_asked_for_without_a_pause(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        first, second = backbone.add_holders(2)
        backbone.elect()
        backbone.issue(backbone.make_of(*[(first, second)] * 8))
        await until(lambda: backbone.state == "ready")
        plan = backbone.issue(backbone.make_of(*[(second, first)] * 8))
        for _ in range(50):
            await trio.sleep(0.02)
            assert backbone.state == "ready"
            assert len(backbone.engine.connected) == 2
        for holder in (first, second):
            primary = plan.primary_shard_of(holder.node_id).encode()
            assert backbone.engine.connected[holder.node_id].primary == primary
        assert backbone.engine.count(RemoveHolder) == 0


async def test_a_holder_that_got_more_is_connected_for_it_once_it_has_it(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        first, second = backbone.add_holders(2)
        backbone.elect()
        backbone.issue(backbone.make_of(*[(first,)] * 4, *[(second,)] * 4))
        await until(lambda: backbone.state == "ready")
        first.load_s = 10.0
        plan = backbone.issue(backbone.make_of(*[(first,)] * 4, *[(second, first)] * 4))
        await trio.sleep(5.0)
        assert backbone.state == "degraded"
        assert (await backbone.duty.generate(text(), ignore)).reason == "length"
        await until(lambda: backbone.state == "ready")
        assert backbone.engine.connected[first.node_id].shard == plan.shard_of(first.node_id).encode()


async def test_nothing_is_kept_of_holders_that_came_and_went(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 1)
        for number in range(3):
            (stranger,) = backbone.add_holders(1, 10 + number)
            backbone.issue(backbone.make(*holders, stranger))
            await until(lambda: backbone.state == "ready")
            backbone.issue(backbone.make(*holders))
            await until(lambda: backbone.state == "ready" and len(backbone.engine.connected) == 1)
        assert [each["node_id"] for each in backbone.duty.report()["holders"]] == [holders[0].node_id]


# -- members come and go ---------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["dead", "left"])
async def test_a_member_that_is_gone_is_asked_for_nothing_at_once(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, state: Any
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 3)
        gone = trio.current_time()
        backbone.see(holders[0], state)
        await until(lambda: holders[0].node_id not in backbone.engine.connected)
        assert trio.current_time() - gone < SOON_S
        assert backbone.line(holders[0])["state"] == "unreachable"
        assert backbone.failed(holders[0]) == 1
        assert backbone.state == "degraded"
        assert backbone.reason.startswith("some expert has 1 of 2 planned holders; ")
        assert holders[0].node_id in backbone.reason
        assert (await backbone.duty.generate(text(), ignore)).reason == "length"


async def test_a_suspect_is_asked_still(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 1)
        backbone.see(holders[0], "suspect")
        await trio.sleep(10.0)
        assert backbone.state == "ready"
        assert holders[0].node_id in backbone.engine.connected


async def test_a_member_that_comes_back_serves_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 3)
        backbone.see(holders[0], "dead")
        await until(lambda: backbone.state == "degraded")
        await trio.sleep(60.0)
        assert not backbone.host.dialled[3:], "nobody dials the dead"
        holders[0].is_up = True
        world.network.serve(holders[0].node_id, holders[0]._serve)
        back = trio.current_time()
        backbone.see(holders[0], "alive")
        await until(lambda: backbone.state == "ready")
        assert trio.current_time() - back < 1.0


async def test_without_another_holder_a_lost_one_leaves_a_gap_that_is_said(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 2)
        backbone.see(holders[0], "dead")
        await until(lambda: backbone.state == "joining")
        assert backbone.reason == f"16 of 32 experts have a holder; {holders[0].node_id}: it is dead"
        with pytest.raises(NotReady, match="the swarm is joining: 16 of 32 experts"):
            await backbone.duty.generate(text(), ignore)


async def test_a_record_that_takes_its_shard_back_ends_the_connection(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    """Its engine died while no session ran: nobody notices on the data connection."""
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 3)
        holder = holders[0]
        holder.publish(None)  # said before it had loaded, and late
        await trio.sleep(1.0)
        assert holder.node_id in backbone.engine.connected
        holder.publish(backbone.plan)
        await trio.sleep(1.0)
        assert backbone.engine.count(RemoveHolder) == 0
        holder.is_up = False
        holder.publish(None, reason="the worker engine is starting")
        await until(lambda: holder.node_id not in backbone.engine.connected)
        assert backbone.duty.report()["last_error"] == (
            f"{holder.node_id} lost: gone: the worker engine is starting"
        )
        holder.is_up = True
        backbone.offer(holder.node_id)
        await until(lambda: backbone.state == "ready")
        assert backbone.duty.report()["last_error_recovered"] is True


async def test_a_record_that_was_there_before_the_connection_counts_too(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        backbone.elect()
        plan = backbone.make(holder)
        holder.publish(plan)
        backbone.issue(plan)
        await until(lambda: backbone.state == "ready")
        holder.publish(None)
        await until(lambda: backbone.engine.count(RemoveHolder) == 1)


async def test_a_holder_with_another_engine_is_connected_to_that_one(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 2)
        holders[0].restart_engine()
        backbone.offer(holders[0].node_id)
        await until(lambda: holders[0].node_id in backbone.engine.connected)
        connection = backbone.engine.connected[holders[0].node_id]
        assert connection.certificate == holders[0].engine.certificate
        assert backbone.state == "ready"


# -- faulty, slow and hostile holders --------------------------------------------------------------


@pytest.mark.parametrize("code", ["non_finite", "shape_invalid", "malformed", "unexpected_reply"])
async def test_a_holder_that_computes_wrongly_is_quarantined_and_the_core_plans_without_it(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, code: str
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 3)
        faulty = holders[0]
        grants = faulty.grants
        await backbone.engine.lose_holder(faulty.node_id, code, "row 3 is not finite")
        await until(lambda: backbone.line(faulty)["state"] == "quarantined")
        assert backbone.line(faulty)["reason"] == f"{code}: row 3 is not finite"
        assert backbone.duty.report()["last_error"].endswith("row 3 is not finite")
        assert not backbone.failed(faulty), "it is not asked again"
        (told,) = (each.verdict for each in backbone.core.commanded(FoundOut))
        assert (told.node_id, told.word, told.claim) == (faulty.node_id, "quarantined", None)
        assert told.reason == f"{code}: row 3 is not finite"
        assert QUARANTINE_FIRST - seconds(1) < told.until - now() <= QUARANTINE_FIRST
        await trio.sleep(120.0)
        backbone.issue(backbone.make(*holders))
        await trio.sleep(60.0)
        backbone.see(faulty, "dead")
        backbone.lose()
        backbone.elect(2)
        backbone.issue(backbone.make(*holders))
        await trio.sleep(60.0)
        assert faulty.grants == grants, "it is not connected before its time is over"
        assert backbone.line(faulty)["state"] == "quarantined"
        assert backbone.state == "degraded"
        await trio.sleep(in_seconds(QUARANTINE_FIRST))
        faulty.is_up = True
        backbone.issue(backbone.make(*holders))
        await until(lambda: backbone.failed(faulty))  # it is tried again, and the network to it is cut
        assert backbone.line(faulty)["state"] == "unreachable"


async def test_the_core_is_told_how_late_holders_answer(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 2)
        await backbone.engine.time_answers(holders[0].node_id, 3_000_000)
        await until(lambda: bool(backbone.core.commanded(AnswersSeen)))
        assert backbone.core.commanded(AnswersSeen) == [AnswersSeen(holders[0].node_id, milliseconds(3))]


CLAIMED = bytes([7]) * 32
"""What the rows of a holder were given under, which is not what its record shows."""


async def test_what_the_audit_finds_is_shown_and_placement_hears_of_it(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 3)
        first, second, _ = (each.node_id for each in holders)
        (load,) = of_kind(backbone.engine, LoadTrunk)
        assert isinstance(load, LoadTrunk)
        assert load.audit_path == str(model.source_path)
        await backbone.engine.say(HolderJudged(first, "unfit", "3 of 9 rows", 9, 3, 70, CLAIMED))
        await until(lambda: bool(backbone.core.commanded(FoundOut)))
        (told,) = (each.verdict for each in backbone.core.commanded(FoundOut))
        assert told[:3] == (first, "unfit", "3 of 9 rows")
        assert (told.until <= now(), told.claim) == (True, CLAIMED)
        assert backbone.line(holders[0])["state"] == "serving", "placement decides what it serves"
        await backbone.engine.say(HolderJudged(second, "quarantined", "zeros", 3, 3, 3, CLAIMED))
        await backbone.engine.lose_holder(second, "quarantined", "zeros")
        await until(lambda: backbone.line(holders[1])["state"] == "quarantined")
        _, told = (each.verdict for each in backbone.core.commanded(FoundOut))
        assert told[:3] == (second, "quarantined", "quarantined: zeros")
        assert (told.until > now(), told.claim) == (True, CLAIMED), "whatever it shows by now"
        assert backbone.core.records[second].claim_digest() != CLAIMED
        await backbone.engine.say(HolderEvidenced(second, b"earlier", b"evidence"))
        await backbone.engine.say(HolderEvidenced(holders[2].node_id, CLAIMED, b"of nobody who was judged"))
        await until(lambda: bool(backbone.core.commanded(Accuse)))
        accused = Accuse(second, b"earlier", "quarantined", "zeros", 3, b"evidence")
        assert backbone.core.commanded(Accuse) == [accused]
        shown = {each["node_id"]: each for each in backbone.duty.report()["audit"]}
        assert shown[first] == {
            "node_id": first,
            "verdict": "unfit",
            "reason": "3 of 9 rows",
            "rows": 9,
            "foreign": 3,
            "rows_asked": 70,
        }
        assert shown[second]["verdict"] == "quarantined"
        for number in range(JUDGED_MAX):
            other = node_id_of(number.to_bytes(32, "big"))
            await backbone.engine.say(HolderJudged(other, "quarantined", "", 1, 1, 1, b""))
        await until(lambda: first not in {each["node_id"] for each in backbone.duty.report()["audit"]})
        assert len(backbone.duty.report()["audit"]) == JUDGED_MAX


async def test_a_holder_is_audited_by_what_its_record_claims(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        (asked,) = of_kind(backbone.engine, ConnectHolder)
        assert isinstance(asked, ConnectHolder)
        assert (asked.adds_in_f32, asked.activation, asked.claim_digest) == (True, "", b"")


async def test_a_fault_found_while_connecting_quarantines_too(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        await until(lambda: backbone.state == "standby")
        backbone.engine.ignored.add(ConnectHolder)
        backbone.elect()
        backbone.issue(backbone.make(holder))
        await until(lambda: backbone.engine.count(ConnectHolder) == 1)
        await backbone.engine.lose_holder(holder.node_id, "malformed", "not an answer")
        await until(lambda: backbone.line(holder)["state"] == "quarantined")
        await trio.sleep(120.0)
        assert backbone.engine.count(ConnectHolder) == 1


async def test_a_slow_holder_is_connected_again_with_growing_delays(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 3)
        slow = holders[0]
        delays = []
        for count in range(1, 7):
            lost = trio.current_time()
            await backbone.engine.lose_holder(slow.node_id, "late", "no reply")
            await until(lambda: backbone.line(slow)["state"] != "serving")
            assert backbone.state == "degraded"
            assert backbone.failed(slow) == count
            await until(lambda: backbone.line(slow)["state"] == "serving")
            delays.append(trio.current_time() - lost)
        assert delays == sorted(delays)
        assert delays[0] < 2.0
        assert 8.0 < delays[-1] < 20.0
        assert len(backbone.host.dialled) == 3, "the connection between the nodes is there still"
        await trio.sleep(120.0)
        lost = trio.current_time()
        await backbone.engine.lose_holder(slow.node_id, "late", "no reply")
        await until(lambda: backbone.line(slow)["state"] != "serving")
        await until(lambda: backbone.line(slow)["state"] == "serving")
        assert trio.current_time() - lost < 2.0, "what was steady for long is trusted again"


async def test_a_holder_that_cannot_be_reached_is_tried_again_and_the_others_serve(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 3)
        world.network.cut(backbone.node_id, holders[0].node_id)
        await backbone.engine.lose_holder(holders[0].node_id, "closed", "gone")
        await trio.sleep(120.0)
        assert backbone.line(holders[0])["state"] == "unreachable"
        assert backbone.state == "degraded"
        assert 5 < backbone.failed(holders[0]) < 12
        world.network.mend(backbone.node_id, holders[0].node_id)
        await until(lambda: backbone.state == "ready")


@pytest.mark.parametrize("code", ["engine_starting", "malformed", "stale_term"])
async def test_a_refused_request_for_data_is_made_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, code: str
) -> None:
    """Whatever word it refuses with: only what the engine sees on the data connection is proof of a fault."""
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        holder.grant_error = RemoteProtocolError("not now", code)
        backbone.elect()
        backbone.issue(backbone.make(holder))
        await until(lambda: backbone.line(holder)["state"] == "unreachable")
        assert "not now" in backbone.reason
        await trio.sleep(60.0)
        holder.grant_error = None
        await until(lambda: backbone.state == "ready")


async def test_an_offer_that_is_refused_is_named_with_its_reason(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        good, bad = backbone.add_holders(2)
        bad.refusal = ("model_unusable", "its source is damaged")
        backbone.elect()
        backbone.issue(backbone.make(good, bad))
        await until(lambda: backbone.line(good)["state"] == "serving")
        assert backbone.duty.state() == (
            "joining",
            f"16 of 32 experts have a holder; {bad.node_id}: model_unusable: its source is damaged",
        )
        assert backbone.line(bad)["state"] == "refused"
        backbone.issue(backbone.make(good))
        await until(lambda: backbone.state == "ready")
        assert bad.grants == 0


async def test_an_engine_that_another_node_vouches_for_is_not_dialled(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        holder.pose_as(77)
        backbone.elect()
        backbone.issue(backbone.make(holder))
        await until(lambda: backbone.failed(holder) == 3)
        assert holder.grants == 3
        assert backbone.engine.count(ConnectHolder) == 0


ADDRESS_OF_ANOTHER = f"/ip4/10.0.0.1/tcp/4001/p2p/{node_of(node_key(55))}"


async def test_addresses_of_another_node_are_not_dialled(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        holder.publish(None, addresses=(ADDRESS_OF_ANOTHER, *holder.host.addresses()))
        backbone.elect()
        backbone.issue(backbone.make(holder))
        await until(lambda: backbone.state == "ready")
        assert backbone.host.dialled == list(holder.host.addresses())


async def test_a_late_answer_about_an_older_connection_does_no_harm(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 2)
        stranger = node_of(node_key(99))
        await backbone.engine.say(HolderConnected(holders[0].node_id))
        await backbone.engine.say(HolderConnected(stranger))
        await backbone.engine.lose_holder(stranger, "late")
        await trio.sleep(30.0)
        assert backbone.state == "ready"
        removed = [each for each in backbone.engine.received if isinstance(each, RemoveHolder)]
        assert [each.node_id for each in removed] == [stranger]
        assert not backbone.core.commanded(HolderFailed)


async def test_a_connection_that_cannot_be_renewed_is_not_trusted_any_more(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, (holder, _) = await serving_backbone(world, 2)
        holder.grant_error = RemoteProtocolError("the worker engine is starting", "engine_starting")
        backbone.offer(holder.node_id)
        await until(lambda: backbone.line(holder)["state"] == "unreachable")
        await until(lambda: holder.node_id not in backbone.engine.connected)
        holder.grant_error = None
        await until(lambda: backbone.state == "ready")


async def test_a_removal_that_the_engine_has_not_heard_yet_does_not_hit_a_newer_connection(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        backbone.elect()
        backbone.issue(backbone.make(backbone, holder, holders=1))
        await until(lambda: backbone.state == "ready")
        gate = hold_up_leases(backbone)
        backbone.renew()
        await trio.sleep(0.01)
        backbone.lose()
        backbone.elect(2)
        backbone.issue(backbone.make(backbone, holder, holders=1))
        await until(lambda: backbone.state == "ready")
        gate.set()
        await trio.sleep(5.0)
        assert holder.node_id in backbone.engine.connected
        assert backbone.engine.own is not None


def hold_up_leases(backbone: TwinBackbone) -> trio.Event:
    """Until the event is set the engine takes no lease, nor what waits behind it, but what others send."""
    gate = trio.Event()
    engine = backbone.engine.engine
    send = engine.send

    async def wait_and_send(message: EngineMessage) -> None:
        if isinstance(message, SetLease):
            await gate.wait()
        await send(message)

    engine.send = wait_and_send  # type: ignore[method-assign]
    return gate


async def test_who_dies_while_being_connected_is_not_asked_behind_our_back(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        await until(lambda: backbone.state == "standby")
        backbone.engine.ignored.add(ConnectHolder)
        backbone.elect()
        backbone.issue(backbone.make(holder))
        await until(lambda: backbone.engine.count(ConnectHolder) == 1)
        backbone.see(holder, "dead")
        await trio.sleep(0.1)
        before = backbone.engine.count(RemoveHolder)
        await backbone.engine.say(HolderConnected(holder.node_id))
        await until(lambda: backbone.engine.count(RemoveHolder) == before + 1)
        assert backbone.line(holder)["state"] == "unreachable"


# -- this node's own experts -----------------------------------------------------------------------


def own_loads(backbone: TwinBackbone) -> list[LoadOwnShard]:
    return [each for each in backbone.engine.received if isinstance(each, LoadOwnShard)]


async def test_experts_that_the_plan_gives_this_node_are_loaded_and_served(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        backbone.elect()
        plan = backbone.issue(backbone.make(backbone, holder, holders=1))
        await until(lambda: backbone.state == "ready")
        (load,) = own_loads(backbone)
        assert load.node_id == backbone.node_id
        assert load.source_path == str(model.source_path)
        assert load.shard == plan.shard_of(backbone.node_id).encode()
        assert load.primary == plan.primary_shard_of(backbone.node_id).encode()
        assert backbone.core.commanded(ShardLoaded) == [ShardLoaded(0, 1, 1, 500)]
        assert backbone.duty.report()["own"] == {"n_experts": 16, "shard_bytes": 500}
        assert set(backbone.engine.connected) == {holder.node_id}, "it does not dial itself"
        assert (await backbone.duty.generate(text(), ignore)).reason == "length"


async def test_a_backbone_may_hold_everything_itself(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        backbone.elect()
        backbone.issue(replace(backbone.make(backbone), degraded="no worker may serve the output layers"))
        await until(lambda: backbone.state == "degraded")
        assert backbone.reason == "no worker may serve the output layers"
        assert backbone.duty.report()["own"]["n_experts"] == 32
        assert (await backbone.duty.generate(text(), ignore)).reason == "length"


async def test_own_experts_follow_the_plan_and_are_not_loaded_twice(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        backbone.elect()
        backbone.issue(backbone.make_of(*[(backbone,)] * 4, *[(holder,)] * 4))
        await until(lambda: backbone.state == "ready")
        backbone.issue(backbone.make_of(*[(backbone,)] * 4, *[(holder,)] * 4))
        await trio.sleep(1.0)
        assert len(own_loads(backbone)) == 1
        backbone.issue(backbone.make_of(*[(holder, backbone)] * 4, *[(holder,)] * 4))
        await trio.sleep(1.0)
        assert [len(ShardSet.decode(each.primary)) for each in own_loads(backbone)] == [16, 0]
        backbone.issue(backbone.make(holder))
        await until(lambda: backbone.engine.own is None)
        await until(lambda: backbone.state == "ready")
        told = backbone.core.commanded(ShardLoaded)
        assert [(each.revision, each.memory_bytes) for each in told] == [(1, 500), (2, 500), (3, 500), (4, 0)]


async def test_experts_for_which_there_is_no_room_are_refused_with_need_and_have(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world, memory_bytes=1000)
        backbone.elect()
        plan = backbone.issue(backbone.make(backbone))
        await until(lambda: bool(backbone.core.commanded(ShardRefused)))
        (refused,) = backbone.core.commanded(ShardRefused)
        need = model.manifest.shard_size_bytes(plan.shard_of(backbone.node_id))
        assert (refused.code, refused.need_bytes, refused.have_bytes) == ("no_memory", need, 1000)
        assert (refused.epoch, refused.term, refused.revision) == (0, 1, 1)
        await trio.sleep(2 * OWN_RETRY_S)
        assert own_loads(backbone) == [], "it is not even tried"
        assert len(backbone.core.commanded(ShardRefused)) == 1
        assert backbone.state == "joining"


async def test_experts_that_cannot_be_loaded_are_refused_and_tried_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        fault = EngineFault(None, "model_unusable", "the file is damaged", ModelUnusable.exit_code)
        backbone.engines.before_start = lambda engine: engine.refusals.update({LoadOwnShard: fault})
        backbone.elect()
        backbone.issue(backbone.make(backbone))
        await until(lambda: bool(backbone.core.commanded(ShardRefused)))
        (refused,) = backbone.core.commanded(ShardRefused)
        assert (refused.code, refused.reason) == ("model_unusable", "the file is damaged")
        assert backbone.duty.report()["last_error"] == "the file is damaged"
        backbone.engine.refusals.clear()
        await trio.sleep(OWN_RETRY_S - 5.0)
        assert backbone.state == "joining"
        await until(lambda: backbone.state == "ready")
        assert len(backbone.engines.all) == 1, "the engine is not to blame"


async def test_the_end_of_the_engine_loses_the_own_experts_and_the_next_one_loads_them(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        backbone.elect()
        backbone.issue(backbone.make(backbone))
        await until(lambda: backbone.state == "ready")
        backbone.engine.die()
        await until(
            lambda: backbone.core.commanded(ShardLost) == [ShardLost("the backbone engine has ended")]
        )
        await until(lambda: backbone.state == "ready")
        assert len(own_loads(backbone)) == 1
        assert len(backbone.core.commanded(ShardLoaded)) == 2


async def test_with_the_reign_the_own_experts_go(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        await until(lambda: backbone.state == "standby")
        engine = backbone.engine
        engine.ignored.add(LoadOwnShard)
        backbone.elect()
        backbone.issue(backbone.make(backbone))
        await until(lambda: engine.count(LoadOwnShard) == 1)
        backbone.lose()  # while it is being loaded
        await trio.sleep(1.0)
        assert of_kind(engine, LoadOwnShard, RemoveHolder)[-1] == RemoveHolder(
            backbone.node_id, "this node is no longer the backbone: no quorum"
        )
        assert backbone.core.commanded(ShardLoaded) == []


# -- sessions --------------------------------------------------------------------------------------


async def test_a_session_gives_its_tokens_in_order_and_its_outcome(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 2)
        tokens: list[TokenEmitted] = []

        async def keep(token: TokenEmitted) -> None:
            tokens.append(token)
            await trio.lowlevel.checkpoint()

        outcome = await backbone.duty.generate(text(5), keep)
        assert [each.position for each in tokens] == list(range(5))
        assert (outcome.reason, outcome.n_generated) == ("length", 5)
        assert backbone.duty.report()["sessions"] == 0
        assert backbone.duty.report()["rows_retried_total"] == 2


async def test_a_swarm_that_is_not_ready_generates_nothing(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        for ready, sentence in [
            ("starting", "this node is not the backbone: the backbone engine is loading"),
            ("standby", "this node is not the backbone: it holds no lease"),
        ]:
            await until(lambda ready=ready: backbone.state == ready)  # type: ignore[misc]
            for request in (backbone.duty.generate(text(), ignore), backbone.duty.evaluate(logits())):
                with pytest.raises(NotReady) as caught:
                    await request
                assert str(caught.value) == sentence
        backbone.elect()
        with pytest.raises(NotReady, match="the swarm is joining: no plan yet"):
            await backbone.duty.generate(text(), ignore)


async def test_logits_are_evaluated(autojump_clock: MockClock, model: StoredModel, tmp_path: Path) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        assert (await backbone.duty.evaluate(logits())).positions == 2


async def test_a_client_that_goes_away_cancels_its_session(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)
        with trio.move_on_after(5.0):
            await backbone.duty.generate(text(5), ignore)
        await until(lambda: not engine.sessions)
        assert engine.count(CancelSession) == 1
        assert backbone.duty.report()["sessions"] == 0
        engine.n_tokens_emitted_max = 100
        assert (await backbone.duty.generate(text(), ignore)).reason == "length"


async def test_a_client_that_fails_cancels_its_session(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)

        async def fail(_token: TokenEmitted) -> None:
            raise EngineFailed("the client is broken")

        with pytest.raises(EngineFailed, match="client is broken"):
            await backbone.duty.generate(text(5), fail)
        await until(lambda: engine.count(CancelSession) == 1)


async def test_a_client_that_does_not_read_holds_up_nobody(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 3)

        async def never(_token: TokenEmitted) -> None:
            await trio.sleep_forever()

        outcome = await start_session(world, backbone, 3000, never)
        await backbone.engine.lose_holder(holders[0].node_id, "late")
        await until(lambda: backbone.line(holders[0])["state"] != "serving")
        assert (await backbone.duty.generate(text(2000), ignore)).n_generated == 2000
        assert outcome == []
        engine = backbone.engine
        sent = engine.count(CancelSession)
        backbone.lose()
        await until(lambda: engine.count(CancelSession) == sent + 1)


async def test_a_slow_client_hears_of_the_end_of_the_reign_and_of_nothing_after_it(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)
        read: list[int] = []

        async def slowly(token: TokenEmitted) -> None:
            read.append(token.position)
            await trio.sleep(10.0)

        outcome = await start_session(world, backbone, 5, slowly)
        (session,) = engine.sessions
        engine.ignored.add(CancelSession)
        backbone.lose()
        await engine.emit(session, 1)
        await engine.end_session(session, "cancelled")
        await until(lambda: bool(outcome))
        assert str(outcome[0]) == "this node is no longer the backbone: no quorum"
        assert read == [0]
        assert len(backbone.engines.all) == 1


async def test_sessions_are_bounded(autojump_clock: MockClock, model: StoredModel, tmp_path: Path) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)
        outcomes = [await start_session(world, backbone) for _ in range(SESSIONS_MAX)]
        with pytest.raises(NotReady, match="72 sessions are waiting"):
            await backbone.duty.generate(text(), ignore)
        await engine.end_session(engine.sessions[0], "end_of_text")
        await until(lambda: any(outcomes))
        await start_session(world, backbone)


async def test_a_session_that_is_to_come_later_is_no_error_of_the_node(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)
        for code, retry_after_ns, error in (("queue_full", 5, ""), ("no_holder_left", 0, "a sentence")):
            outcome = await start_session(world, backbone)
            (session,) = engine.sessions
            await engine.end_session(session, "failed", code, "a sentence", retry_after_ns)
            await until(lambda outcome=outcome: bool(outcome))  # type: ignore[misc]
            assert backbone.duty.report()["last_error"] == error


async def test_a_reign_that_is_not_ready_is_waited_for_until_it_is_or_is_over(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        await until(lambda: backbone.state == "standby")
        backbone.elect(1)
        over = []

        async def wait(version: tuple[int, int]) -> None:
            await backbone.duty.wait_ready(version)
            over.append((version, backbone.state))

        for version in ((0, 1), (0, 2)):
            world.nursery.start_soon(wait, version)
        await trio.sleep(3.0)
        assert over == [((0, 2), "joining")], "it is not of that term"
        backbone.issue(backbone.make(holder))
        await until(lambda: len(over) == 2)
        assert over[1][0] == (0, 1)
        assert over[1][1] in ("ready", "degraded")
        assert trio.current_time() < 60.0
        holder.restart_engine()
        world.nursery.start_soon(wait, (0, 1))
        backbone.lose()
        await until(lambda: len(over) == 3)


async def test_whoever_opens_a_session_hears_when_it_has_its_place(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)
        has_place = trio.Event()
        wanted = Generate(SessionId(bytes(16)), "text", (), 5, SamplingOptions(), 1000)
        world.nursery.start_soon(backbone.duty.run_session, wanted, ignore, has_place.set)
        await until(lambda: bool(engine.sessions))
        await engine.say(SessionOpened(SessionId(bytes(range(16)))))  # one that nobody knows any more
        assert not has_place.is_set()
        await engine.say(SessionOpened(wanted.session))
        await has_place.wait()
        await engine.end_session(wanted.session, "end_of_text")


async def test_the_death_of_the_engine_fails_its_sessions_and_everything_comes_back(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, holders = await serving_backbone(world, 2)
        engine = pause_sessions(backbone)
        outcomes = [await start_session(world, backbone) for _ in range(2)]
        engine.die()
        await until(lambda: all(outcomes))
        for outcome in outcomes:
            assert isinstance(outcome[0], EngineFailed)
            assert str(outcome[0]) == "the backbone engine ended during the session: killed by SIGKILL"
        assert backbone.state == "starting"
        assert "killed by SIGKILL" in backbone.duty.report()["last_error"]
        assert backbone.duty.report()["last_error_recovered"] is False
        assert backbone.duty.report()["last_error_at"].startswith("2027-01-15T08:00:")
        with pytest.raises(NotReady, match="starting"):
            await backbone.duty.generate(text(), ignore)
        await until(lambda: backbone.state == "ready")
        assert backbone.duty.report()["last_error_recovered"] is True
        assert backbone.engine is not engine
        assert set(backbone.engine.connected) == {each.node_id for each in holders}
        assert not backbone.core.commanded(HolderFailed), "they hold what they held, and are asked nothing"
        first = next(each for each in backbone.engine.received if not isinstance(each, LoadTrunk))
        assert isinstance(first, SetLease), "no holder is dialled without a lease"
        assert (await backbone.duty.generate(text(), ignore)).reason == "length"


async def test_an_engine_that_does_not_answer_any_more_is_killed_and_its_sessions_fail(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 2)
        engine = pause_sessions(backbone)
        outcomes = [await start_session(world, backbone)]
        engine.ignored.add(QueryStatistics)
        await until(lambda: all(outcomes))
        assert isinstance(outcomes[0][0], EngineFailed)
        assert not engine.is_alive
        await until(lambda: backbone.state == "ready")
        assert (await backbone.duty.generate(text(), ignore)).reason == "length"


async def test_an_engine_that_dies_at_work_is_blamed_and_not_those_it_worked_for(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone = TwinBackbone(world)
        (holder,) = backbone.add_holders(1)
        await until(lambda: backbone.state == "standby")
        engine = backbone.engine
        engine.ignored |= {ConnectHolder, LoadOwnShard}
        backbone.elect()
        backbone.issue(backbone.make(backbone, holder, holders=1))
        await until(lambda: engine.count(ConnectHolder) == 1 and engine.count(LoadOwnShard) == 1)
        engine.die()
        await until(lambda: backbone.state == "ready")
        assert not backbone.core.commanded(HolderFailed)
        assert not backbone.core.commanded(ShardRefused)
        assert not backbone.core.commanded(ShardLost), "it held nothing yet"


async def test_nothing_more_is_asked_of_an_engine_that_is_being_ended(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, (holder,) = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)
        engine.ignored.add(Shutdown)

        async def never(_token: TokenEmitted) -> None:
            await trio.sleep_forever()

        await start_session(world, backbone, 5, never)
        for position in range(20):
            await engine.emit(engine.sessions[0], position)
        await until(lambda: backbone.state == "starting")
        heard = len(engine.received)
        backbone.duty.take_event(HolderReady(holder.node_id, backbone.plan, 1))  # type: ignore[arg-type]
        backbone.renew()
        await until(lambda: backbone.engine is not engine)
        assert {type(each) for each in engine.received[heard:]} <= {Shutdown, QueryStatistics}
        assert holder.granted_to.count(engine.certificate) == 1
        await until(lambda: backbone.state == "ready")


async def test_an_engine_that_keeps_dying_is_restarted_ever_more_slowly(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        starts = []
        for number in range(2, 9):
            backbone.engine.die()
            await until(lambda number=number: len(backbone.engines.all) == number)  # type: ignore[misc]
            starts.append(trio.current_time())
            await until(lambda: backbone.state in ("joining", "ready"))
        delays = [later - earlier for earlier, later in itertools.pairwise(starts)]
        assert delays == sorted(delays)
        assert 30.0 < delays[-1] < 70.0


async def test_an_engine_that_breaks_the_protocol_is_replaced(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = backbone.engine
        await engine.say_raw(b"\x00\x00\x00\x02xx")
        await until(lambda: backbone.engine is not engine)
        assert not engine.is_alive
        assert "broke the protocol" in backbone.duty.report()["last_error"]
        await until(lambda: backbone.state == "ready")


async def test_an_engine_that_emits_more_than_was_asked_for_is_replaced(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)

        async def never(_token: TokenEmitted) -> None:
            await trio.sleep_forever()

        await start_session(world, backbone, 5, never)
        for position in range(20):
            await engine.emit(engine.sessions[0], position)
        await until(lambda: backbone.engine is not engine)
        assert "more tokens than were asked for" in backbone.duty.report()["last_error"]


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
        backbone, _ = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)
        outcome = await start_session(world, backbone)
        if said:
            await engine.say(EngineFault(None, "model_aborted", said, 7))
        engine.die(-6)
        await until(lambda: bool(outcome))
        assert isinstance(outcome[0], ModelAborted)
        assert str(outcome[0]) == f"the backbone engine ended during the session: {reason}"
        assert reason in backbone.duty.report()["last_error"]
        await until(lambda: backbone.state == "ready")
        assert (await backbone.duty.generate(text(), ignore)).reason == "length"


async def test_a_session_that_fails_says_why(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)
        outcome = await start_session(world, backbone)
        await engine.end_session(engine.sessions[0], "failed", "no_holder_left", "no holder is left")
        await until(lambda: bool(outcome))
        assert isinstance(outcome[0], SessionEnded)
        assert (outcome[0].reason, outcome[0].code) == ("failed", "no_holder_left")
        assert backbone.duty.report()["last_error"] == "no holder is left"


async def test_what_a_client_did_wrong_is_no_error_of_the_node(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_world(model, tmp_path) as world:
        backbone, _ = await serving_backbone(world, 1)
        engine = pause_sessions(backbone)
        outcome = await start_session(world, backbone)
        await engine.end_session(engine.sessions[0], "failed", UsageError("").code, "the prompt is empty")
        await until(lambda: bool(outcome))
        assert isinstance(outcome[0], SessionEnded)
        assert outcome[0].detail == "the prompt is empty"
        assert backbone.duty.report()["last_error"] == ""
        assert backbone.duty.report()["last_error_at"] is None
