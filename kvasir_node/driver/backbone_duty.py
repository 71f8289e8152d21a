"""This node as backbone: an engine with the trunk, and, while its core holds a lease, holders and sessions.

The core decides who is the backbone, until when, and who holds what; this duty makes it so. It tells the
engine the lease, connects the holders of the core's plan, holds what the plan gives this node itself, and
puts clients' sessions through. A reign lasts from the first `LeaseHeld` until the lease is lost for good:
nothing is sampled after it, nor while the lease has lapsed and may come back. Before it a standby has
everything ready that needs no lease.
Which expert runs where, who is alive and who may vote is not known here; rows never pass here.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.driver.conversation import ask
from kvasir_node.driver.expert_fetching import ExpertFetching
from kvasir_node.driver.holder_connections import NO_SHARE, HolderConnection, HolderConnections, Share
from kvasir_node.driver.last_error import LastError
from kvasir_node.engine.certificate import verify_engine_certificate
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import EnginePort, EngineStarter, ExpertKeeper, Host, SwarmCore, engine_report
from kvasir_node.supervisor import LOAD_TIMEOUT_S, keep_running, load_trunk, watch_engine
from kvasir_node.telemetry import get_logger
from kvasir_proto.accusations import Accuse
from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.election.requests import LeaseHeld, LeaseLost, TermFollowed, TermVoided
from kvasir_proto.errors import (
    Busy,
    EngineFailed,
    KvasirError,
    NoRoomOnDisk,
    NotReady,
    ProtocolError,
    RemoteProtocolError,
)
from kvasir_proto.ids import NodeId, SessionId, node_id_of
from kvasir_proto.instants import Duration, Instant, WallTime, between, in_seconds, seconds
from kvasir_proto.limits import AuditVerdict, as_sentence
from kvasir_proto.membership.events import MemberChanged
from kvasir_proto.messages.engine import (
    AnswersTimed,
    CancelSession,
    ConnectHolder,
    EngineMessage,
    EvaluateLogits,
    Generate,
    HolderConnected,
    HolderEvidenced,
    HolderJudged,
    HolderLost,
    LoadOwnShard,
    LoadTrunk,
    LogitsEvaluated,
    OwnShardLoaded,
    RemoveHolder,
    SessionEnded,
    SessionOpened,
    SetLease,
    TokenEmitted,
    TrunkLoaded,
)
from kvasir_proto.messages.local import USAGE_ERROR, EvaluateReply, EvaluateRequest, GenerateRequest
from kvasir_proto.messages.swarm import DataGrant, DataRequest
from kvasir_proto.node_core import (
    AnswersSeen,
    BackboneEngineDied,
    FoundOut,
    HolderFailed,
    HolderReady,
    HolderRefused,
    NodeEvent,
    PlanReceived,
    ShardLoaded,
    ShardLost,
    ShardRefused,
)
from kvasir_proto.placement.plan import Plan
from kvasir_proto.records import RecordChanged
from kvasir_proto.sampling import SamplingOptions
from kvasir_proto.swarm_manifest import FoundedSwarm
from kvasir_proto.verdicts_in_force import VerdictInForce

log = get_logger()

CONNECT_TIMEOUT_S: Final = 30.0
CANCEL_TIMEOUT_S: Final = 5.0
"""How long a session that was cancelled may take to end; then it is forgotten."""

RELEASE_TIMEOUT_S: Final = 2.0
"""How long the engine may take to say that it has heard the end of its lease; then it is killed."""

ENGINE_KEPT_S: Final = 60.0
"""How long an engine that is no standby outlives a reign: a lease is often won back."""

COVERAGE_PATIENCE: Final = seconds(10)
"""How long a session waits where the last holder of an expert has died under it. The next one is there within
two seconds on a LAN; where it must be fetched over the internet nobody would wait so long for a token."""

OWN_RETRY_S: Final = 30.0
"""Pause before experts that this node could not load are tried again."""

FAILURES_SHOWN_MAX: Final = 4
"""Holders whose trouble the state's reason names."""

SESSIONS_MAX: Final = 72
"""Sessions that run or wait; the engine refuses before, with the time to come again."""

JUDGED_MAX: Final = 256
"""Verdicts of the engine's audit that are shown; the oldest go first."""
SESSION_TIMEOUT_MS: Final = 3_600_000


@dataclass(frozen=True, slots=True)
class BackboneSettings:
    """What the configuration says about this duty.

    `memory_bytes` is offered for experts that the plan gives this node itself. A `standby` keeps an engine
    with the trunk loaded also while another node is the backbone. `n_sessions` decode together and share the
    context's cells.
    """

    n_ctx: int
    n_ubatch: int
    n_threads: int
    device: str
    memory_bytes: int
    standby: bool
    n_sessions: int = 8


@dataclass(slots=True)
class _Session:
    tokens: trio.MemorySendChannel[TokenEmitted]
    note_opened: Callable[[], None]
    outcome: SessionEnded | None = None
    end_of_reign: str = ""
    """Why the reign ended while it ran."""


@dataclass(slots=True, eq=False)
class _Reign:
    """This node as backbone of one term, as long as it holds the lease."""

    epoch: int
    term: int
    until: Instant
    plan: Plan | None = None
    suspended: str = ""
    """Why it holds none just now, while that may come back."""

    @property
    def version(self) -> tuple[int, int]:
        return self.epoch, self.term


class _NotHeld(Exception):
    """Experts that the plan gives this node cannot be held; what the core is told."""

    def __init__(self, code: str, reason: str, need_bytes: int = 0, have_bytes: int = 0) -> None:
        super().__init__(reason)
        self.code = code
        self.need_bytes = need_bytes
        self.have_bytes = have_bytes


class BackboneDuty:
    """This node as backbone and standby. `run` until cancelled; everything else from the same trio thread."""

    def __init__(
        self,
        *,
        node_key: Ed25519PrivateKey,
        swarm: FoundedSwarm,
        model: StoredModel,
        find_backbone_file: Callable[[], Awaitable[Path]],
        core: SwarmCore,
        host: Host,
        start_engine: EngineStarter,
        next_generation: Callable[[], int],
        settings: BackboneSettings,
        note_trunk: Callable[[TrunkLoaded], None],
        now: Callable[[], Instant],
        wall_time: Callable[[], WallTime],
        experts: ExpertKeeper | None = None,
        audited: ExpertKeeper | None = None,
    ) -> None:
        """``experts`` has this node's own on the disk, ``audited`` all; None: the model's file is here.

        ``find_backbone_file`` gives the model's backbone file, verified; each engine asks for it.

        ``note_trunk`` hears of each trunk that was loaded: how fast it is, and what it takes.
        """
        self._node_id = node_id_of(node_key.public_key().public_bytes_raw())
        self._swarm = swarm
        self._model = model
        self._find_backbone_file = find_backbone_file
        self._core = core
        self._host = host
        self._start_engine = start_engine
        self._next_generation = next_generation
        self._settings = settings
        self._note_trunk = note_trunk
        self._now = now
        self._reign: _Reign | None = None
        self._reign_scope: trio.CancelScope | None = None
        self._end_of_reign = ""
        """Why the last reign ended; empty before the first and while one lasts."""
        self._released = (0, 0)
        """No lease of this (epoch, term) or an earlier one is taken up again."""
        self._proof: tuple[tuple[int, int], bytes] = ((0, 0), b"")
        """The newest term that this node is backbone of, and the proof that it is."""
        self._holders = HolderConnections()
        self._fetching = ExpertFetching(experts, now)
        self._audited = audited
        self._own = NO_SHARE
        """What the engine holds itself."""
        self._own_memory_bytes = 0
        self._engine: EnginePort | None = None
        self._trunk: TrunkLoaded | None = None
        self._to_tell: dict[tuple[str, bytes | str], EngineMessage] = {}
        """What the engine has still to hear, by what it is about: of each only the newest."""
        self._told = trio.Event()
        self._sessions: dict[SessionId, _Session] = {}
        self._evaluations = 0
        self._judged: dict[NodeId, HolderJudged] = {}
        """What the engine's audit last said of holders."""
        self._changed = trio.Event()
        self._last_error = LastError(wall_time)
        self._rows_retried_total = 0

    # -- from the core -----------------------------------------------------------------------------

    def take_event(self, event: NodeEvent) -> None:
        """Hear what this node's core says; never waits."""
        match event:
            case LeaseHeld():
                if not self._take_lease(event):
                    return
            case LeaseLost(epoch, term, reason, may_return):
                if may_return:
                    self._suspend_reign_of((epoch, term), reason)
                else:
                    self._end_reign_of((epoch, term), reason)
            case TermVoided(epoch, term):
                self._end_reign_of((epoch, term), f"there is evidence of a lie in ({epoch}, {term})")
            case TermFollowed(term, proof):
                if term.backbone == self._node_id:
                    self._proof = (term[:2], proof)
                elif self._reign is not None and term[:2] > self._reign.version:
                    reason = f"{term.backbone} is the backbone of ({term.epoch}, {term.term})"
                    self._end_reign_of(self._reign.version, reason)
            case PlanReceived(plan, _):
                self._take_plan(plan)
            case HolderReady(node_id, plan, memory_bytes):
                if self._reign is not None and plan == self._reign.plan:
                    self._holders.note_ready(node_id, memory_bytes)
            case HolderRefused(node_id, code, reason):
                self._holders.note_refused(node_id, code, reason)
                log.warning("holder_refused", node=node_id, code=code, reason=reason)
            case MemberChanged():
                self._take_member(event)
            case RecordChanged(node_id, record, _):
                if record is not None and self._holders.note_record(node_id, record.held is not None):
                    self._lose_member(node_id, record.reason or "it has lost its shard")
            case _:
                return
        self._note_change()

    def _take_lease(self, lease: LeaseHeld) -> bool:
        """Have the engine hear until when it may sample; whether a reign began with it."""
        version = (lease.epoch, lease.term)
        if version <= self._released:
            return False
        if self._reign is not None and self._reign.version != version:
            self._end_reign_of(
                self._reign.version, f"a lease of ({lease.epoch}, {lease.term}) took its place"
            )
        begins = self._reign is None or bool(self._reign.suspended)
        if self._reign is None:
            self._reign = _Reign(lease.epoch, lease.term, lease.until)
            self._end_of_reign = ""
            log.info("reign_began", epoch=lease.epoch, term=lease.term)
        self._reign.until, self._reign.suspended = lease.until, ""
        self._tell_lease(self._reign)
        return begins

    def _tell_lease(self, reign: _Reign) -> None:
        self._tell(("lease", ""), SetLease(reign.epoch, reign.term, reign.until))

    def _suspend_reign_of(self, version: tuple[int, int], reason: str) -> None:
        """Nothing is sampled while the lease may come back; holders stay connected and sessions wait.

        On a busy machine a lease is late now and then. Connecting everybody anew takes the time that the next
        renewal needs, so that one lapse would bring on the next.
        """
        reign = self._reign
        if reign is None or reign.version != version:
            return
        log.info("reign_suspended", epoch=reign.epoch, term=reign.term, reason=reason)
        reign.suspended = reason
        self._tell(("lease", ""), SetLease(reign.epoch, reign.term, 0))

    def _end_reign_of(self, version: tuple[int, int], reason: str) -> None:
        """End the reign of this (epoch, term), if it is the one that lasts."""
        reign = self._reign
        if reign is None or reign.version != version:
            return
        log.warning("reign_ended", epoch=reign.epoch, term=reign.term, reason=reason)
        self._reign, self._end_of_reign = None, reason
        self._tell(("lease", ""), SetLease(reign.epoch, reign.term, 0))
        sentence = as_sentence(f"this node is no longer the backbone: {reason}")
        for row in self._holders:
            # Also who is being connected just now: the engine may be further than we know.
            self._tell_removal(row.node_id, sentence)
        self._holders.clear()
        self._tell_removal(self._node_id, sentence)
        self._own, self._own_memory_bytes = NO_SHARE, 0
        for session_id, session in self._sessions.items():
            session.end_of_reign = sentence
            session.tokens.close()
            self._tell(("session", session_id), CancelSession(session_id))
        if self._reign_scope is not None:
            self._reign_scope.cancel()

    def _take_plan(self, plan: Plan) -> None:
        reign = self._reign
        if reign is None or (plan.epoch, plan.term) != reign.version:
            return  # another backbone's: that is the holder's duty
        if reign.plan is not None and plan.revision <= reign.plan.revision:
            return
        reign.plan = plan
        self._holders.follow(plan, self._node_id, self._now())
        log.info("plan_followed", revision=plan.revision, holders=len(plan.nodes))

    def _take_member(self, event: MemberChanged) -> None:
        row = self._holders.get(event.node_id)
        if row is None:
            return
        if event.state in ("dead", "left"):
            self._lose_member(event.node_id, f"it {'has left' if event.state == 'left' else 'is dead'}")
        elif event.state == "alive" and not row.is_ready and row.connected is None:
            self._core.command(HolderFailed(event.node_id, "it is back"))

    def _lose_member(self, node_id: NodeId, reason: str) -> None:
        """It has gone, or its engine: nothing more is asked of it until it says again that it serves."""
        was_connected = self._holders.get(node_id)
        if was_connected is None or not self._holders.note_gone(node_id, reason):
            return
        self._tell_removal(node_id, reason)
        self._note_holder_lost(node_id, "gone", reason)
        self._core.command(HolderFailed(node_id, reason))

    # -- to the engine -----------------------------------------------------------------------------

    def _tell(self, about: tuple[str, bytes | str], message: EngineMessage) -> None:
        """Have the engine hear this soon, instead of what it has not heard yet about the same."""
        if self._engine is not None:
            self._to_tell[about] = message
            self._told.set()

    def _tell_removal(self, node_id: NodeId, reason: str) -> None:
        self._tell(("holder", node_id), RemoveHolder(node_id, as_sentence(reason)))

    async def _deliver(self, engine: EnginePort) -> None:
        while True:
            while self._to_tell:
                about = next(iter(self._to_tell))
                await engine.send(self._to_tell.pop(about))
            self._told = trio.Event()
            await self._told.wait()

    # -- from clients ------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, emit: Callable[[TokenEmitted], Awaitable[None]]
    ) -> SessionEnded:
        """Run one session for a local client; as `run_session`."""
        wanted = Generate(
            SessionId(secrets.token_bytes(16)),
            request.prompt,
            request.token_ids,
            request.n_tokens,
            SamplingOptions(request.sampling),
            SESSION_TIMEOUT_MS,
        )
        return await self.run_session(wanted, emit, lambda: None)

    async def run_session(
        self,
        wanted: Generate,
        emit: Callable[[TokenEmitted], Awaitable[None]],
        note_opened: Callable[[], None],
    ) -> SessionEnded:
        """Run one session; ``emit`` gets each token. If cancelled, the session is cancelled too.

        ``note_opened`` is called when it has its place, maybe in a queue. Raises `NotReady` when some expert
        has no holder, and when this node is not the backbone or ceases to be it meanwhile; `Busy` when too
        many sessions wait.
        """
        engine = self._ready_engine()
        if len(self._sessions) >= SESSIONS_MAX:
            raise Busy(f"{SESSIONS_MAX} sessions are waiting already")
        session_id = wanted.session
        # Room for all of them: a client that reads slowly must not hold up what the engine says to others.
        tokens_in, tokens_out = trio.open_memory_channel[TokenEmitted](wanted.n_tokens)
        session = _Session(tokens_in, note_opened)
        self._sessions[session_id] = session
        try:
            await engine.send(wanted)
            async for token in tokens_out:
                await emit(token)
            if session.end_of_reign and session.outcome is None:
                raise NotReady(session.end_of_reign)
        except BaseException:
            # The session counts as running until the engine has ended it.
            with contextlib.suppress(EngineFailed), trio.CancelScope(shield=True):
                with trio.move_on_after(CANCEL_TIMEOUT_S):
                    if not session.end_of_reign:  # else it is told already, behind the end of the lease
                        await engine.send(CancelSession(session_id))
                    async for _ in tokens_out:
                        pass
            raise
        finally:
            del self._sessions[session_id]
            self._note_change()
        if session.outcome is None:
            reason = f": {await engine.wait_ended()}" if engine.has_ended else ""
            raise engine.end_error(f"the backbone engine ended during the session{reason}")
        self._rows_retried_total += session.outcome.rows_retried
        is_refused = session.outcome.code == USAGE_ERROR or bool(session.outcome.retry_after_ns)
        if session.outcome.reason == "failed" and not is_refused:
            self._note_error(session.outcome.detail)
        return session.outcome

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Write the swarm's logits for these tokens to a file. Raises `NotReady` like `generate`."""
        engine = self._ready_engine()
        reign = self._reign
        self._evaluations += 1
        try:
            reply = await engine.exchange(
                EvaluateLogits(
                    engine.next_request(),
                    request.token_ids,
                    request.chunk_sizes,
                    request.output_path,
                    request.traces_path,
                    request.n_ubatch,
                ),
                LogitsEvaluated,
                SESSION_TIMEOUT_MS / 1000,
            )
        except KvasirError as error:
            if self._reign is not reign:
                raise NotReady(f"this node is no longer the backbone: {self._end_of_reign}") from error
            raise
        finally:
            self._evaluations -= 1
            self._note_change()
        self._rows_retried_total += reply.rows_retried
        return EvaluateReply(reply.positions, reply.hook_calls, reply.rows_retried)

    @property
    def reign_version(self) -> tuple[int, int] | None:
        """The (epoch, term) of the reign that lasts; None while this node is not the backbone."""
        return self._reign.version if self._reign is not None else None

    async def wait_ready(self, version: tuple[int, int]) -> None:
        """Wait until sessions can run, or the reign of this (epoch, term) is over."""
        while self.reign_version == version and self.state()[0] not in ("ready", "degraded"):
            await self._wait_change()

    def _ready_engine(self) -> EnginePort:
        state, reason = self.state()
        if self._reign is None:
            raise NotReady(f"this node is not the backbone: {reason}{self._who_serves()}")
        if state not in ("ready", "degraded") or self._engine is None:
            raise NotReady(f"the swarm is {state}: {reason}")
        return self._engine

    # -- what is going on --------------------------------------------------------------------------

    def state(self) -> tuple[str, str]:
        """One word and its reason: idle, starting, standby, joining, degraded or ready.

        The first three are a node's that holds no lease, or whose engine is not there yet.
        """
        reign = self._reign
        if reign is None and not self._settings.standby and self._engine is None:
            return "idle", self._why_no_reign()
        if self._engine is None or self._trunk is None:
            return "starting", self._last_error.unrecovered or "the backbone engine is loading"
        if reign is None:
            return "standby", self._why_no_reign()
        if reign.suspended:
            return "joining", f"{reign.suspended}; it may be granted again"
        plan = reign.plan
        if plan is None:
            return "joining", "no plan yet"
        n_pairs = plan.coverage().n_pairs
        n_held = len(self._holders.held(self._own.shard))
        if n_held < n_pairs:
            held = f"{n_held} of {n_pairs} experts have a holder"
            return "joining", "; ".join([held, *self._failures()])
        coverage = self._holders.coverage(plan, self._node_id, self._own.shard)
        planned = plan.coverage().holders_min
        if coverage.holders_min < planned:
            fewer = f"some expert has {coverage.holders_min} of {planned} planned holders"
            if not coverage.holders_min:  # and yet all are held: nothing is lost
                fewer = "every expert has a holder, some only by the plan before: the new ones are loading"
            return "degraded", "; ".join([fewer, *self._failures()])
        return ("degraded", plan.degraded) if plan.degraded else ("ready", "")

    def _who_serves(self) -> str:
        fence = self._core.view().fence
        if fence is None or fence.backbone == self._node_id:
            return ""
        return (
            f"; sessions run on {fence.backbone}: call 'kvasir-node generate' there, with that node's --home"
        )

    def _why_no_reign(self) -> str:
        return self._end_of_reign or "it holds no lease"

    def _failures(self) -> list[str]:
        """Which holders of the plan could not be brought to serving, and why; some of them."""
        failed = [
            f"{row.node_id}: {row.reason}"
            for row in self._holders
            if row.state in ("refused", "unreachable", "quarantined") and row.reason
        ]
        more = len(failed) - FAILURES_SHOWN_MAX
        return [*failed[:FAILURES_SHOWN_MAX], *([f"and {more} more"] if more > 0 else [])]

    def report(self) -> dict[str, Any]:
        """This duty's part of the status document.

        `plan` is the one in force here, and how much of it is connected; `holders` those it names beside this
        node. What is known of members, terms and the electorate is the core's to tell.
        """
        reign = self._reign
        holds_lease = reign is not None and not reign.suspended
        left_s = round(in_seconds(between(self._now(), reign.until)), 3) if reign and holds_lease else None
        plan = reign.plan if reign is not None else None
        coverage = self._holders.coverage(plan, self._node_id, self._own.shard) if plan is not None else None
        return {
            "is_backbone": holds_lease,
            "fetch": self._fetching.report(),
            "lease_left_s": left_s,
            "plan": {
                "revision": plan.revision if plan else 0,
                "coverage": coverage.n_pairs_held / coverage.n_pairs if coverage else 0.0,
                "holders_min": coverage.holders_min if coverage else 0,
            },
            "holders": [
                {
                    "node_id": row.node_id,
                    "state": row.state,
                    "reason": row.reason,
                    "n_experts": len(row.wanted.shard),
                    "n_experts_connected": len(row.connected.shard) if row.connected else 0,
                    "shard_bytes": row.memory_bytes,
                    "failures": row.failures,
                }
                for row in self._holders
            ],
            "audit": [
                {
                    "node_id": each.node_id,
                    "verdict": each.verdict,
                    "reason": each.reason,
                    "rows": each.n_rows,
                    "foreign": each.n_foreign,
                    "rows_asked": each.n_rows_asked,
                }
                for each in self._judged.values()
            ],
            "own": {"n_experts": len(self._own.shard), "shard_bytes": self._own_memory_bytes},
            "engine": engine_report(self._engine),
            "sessions": len(self._sessions),
            "rows_retried_total": self._rows_retried_total,
            **self._last_error.report(),
        }

    async def engine_statistics(self) -> str:
        """The engine's counters as JSON. Raises `EngineFailed` when there is no engine."""
        if self._engine is None:
            raise EngineFailed("the backbone engine is not running")
        return await self._engine.statistics_json()

    # -- going in good order -----------------------------------------------------------------------

    async def release(self, reason: str = "it gives the lease back") -> None:
        """Sample nothing more in this term, whatever lease is held: due before `Leave` and `StepDown`.

        Returns, in bounded time, when the engine has heard it or is dead: another node may then be elected at
        once. Sessions end with the reason.
        """
        fence = self._core.view().fence
        reign = self._reign
        self._released = max(
            self._released, fence[:2] if fence is not None else (0, 0), reign.version if reign else (0, 0)
        )
        if reign is not None:
            self._end_reign_of(reign.version, reason)
            self._note_change()
        engine = self._engine
        if engine is None or engine.has_ended:
            return
        is_heard = False
        with trio.move_on_after(RELEASE_TIMEOUT_S, shield=True), contextlib.suppress(EngineFailed):
            # In the order they are sent: who answers the second has heard the first.
            await engine.send(SetLease(*self._released, 0))
            await engine.statistics_json(RELEASE_TIMEOUT_S)
            is_heard = True
        if not is_heard and not engine.has_ended:
            engine.kill("this node killed it: it did not confirm the end of its lease")
            with trio.move_on_after(RELEASE_TIMEOUT_S, shield=True):
                await engine.wait_ended()

    # -- tasks -------------------------------------------------------------------------------------

    async def run(self) -> NoReturn:
        """Keep an engine while one is needed, and the plan served, until cancelled.

        Raises what `keep_running` does for a standby; on another node the same trouble is waited out.
        """
        standby = self._settings.standby
        while True:
            while not standby and self._reign is None:
                await self._wait_change()
            async with open_unwrapping_nursery() as nursery:
                if not standby:
                    nursery.start_soon(self._watch_need, nursery.cancel_scope)
                await keep_running(
                    self._run_engine, self._now, self._note_engine_failure, is_first_raised=standby
                )

    async def _watch_need(self, scope: trio.CancelScope) -> None:
        """End the engine some time after it was needed last."""
        while True:
            while self._reign is not None:
                await self._wait_change()
            with trio.move_on_after(ENGINE_KEPT_S):
                while self._reign is None:
                    await self._wait_change()
            if self._reign is None:
                scope.cancel()
                return

    def _note_engine_failure(self, error: KvasirError) -> None:
        self._note_error(str(error))
        log.error("engine_failed", role="backbone", reason=str(error))
        self._core.command(BackboneEngineDied(as_sentence(str(error))))

    async def _run_engine(self) -> NoReturn:
        """One engine's life; raises when it is over."""
        backbone_path = await self._find_backbone_file()
        async with open_unwrapping_nursery() as nursery:
            engine = await self._start_engine(nursery, "backbone", self._next_generation())
            try:
                n_ctx = self._model.context_length(self._settings.n_ctx)
                request = LoadTrunk(
                    request=engine.next_request(),
                    backbone_path=str(backbone_path),
                    manifest_path=str(self._model.manifest_path),
                    n_ctx=n_ctx,
                    n_ubatch=min(self._settings.n_ubatch, n_ctx),
                    threads=self._settings.n_threads,
                    hooked=True,
                    kv_type="f16",
                    compact_activations=self._swarm.manifest.compact_activations,
                    partial_sums=self._swarm.manifest.partial_sums,
                    coverage_patience_ns=COVERAGE_PATIENCE,
                    device=self._settings.device,
                    rpc=None,
                    audit_path=await self._audit_path(),
                    sessions=self._settings.n_sessions,
                )
                self._trunk = await load_trunk(engine, request)
                self._note_trunk(self._trunk)
                self._engine = engine
                if self._reign is not None:
                    self._tell_lease(self._reign)
                nursery.start_soon(self._deliver, engine)
                nursery.start_soon(watch_engine, engine, trio.Lock())
                nursery.start_soon(self._serve_reigns, engine)
                self._note_change()
                await self._handle_events(engine)
                reason = await engine.wait_ended()
                raise EngineFailed(f"the backbone engine ended: {reason}")
            finally:
                self._forget_engine()
                await engine.close()
                nursery.cancel_scope.cancel()

    def _forget_engine(self) -> None:
        self._engine = self._trunk = None
        self._to_tell.clear()
        for session in self._sessions.values():
            session.tokens.close()
        self._holders.disconnect_all("the backbone engine has ended")
        if self._own != NO_SHARE:
            self._own, self._own_memory_bytes = NO_SHARE, 0
            self._core.command(ShardLost("the backbone engine has ended"))

    async def _handle_events(self, engine: EnginePort) -> None:
        async for event in engine.events:
            match event:
                case TokenEmitted():
                    self._pass_on(event)
                case SessionOpened():
                    session = self._sessions.get(event.session)
                    if session is not None:
                        session.note_opened()
                case SessionEnded():
                    session = self._sessions.get(event.session)
                    if session is not None and not session.end_of_reign:
                        session.outcome = event
                        session.tokens.close()
                case HolderJudged():
                    self._take_verdict(event)
                case HolderEvidenced():
                    self._accuse(event)
                case HolderLost():
                    self._lose_connection(event.node_id, event.code, event.reason, is_engines_word=True)
                case AnswersTimed():
                    self._core.command(AnswersSeen(event.node_id, Duration(event.mean_ns)))
                case HolderConnected():
                    # Whoever asked for it waits no more: it is not to be asked for rows behind our back.
                    row = self._holders.get(event.node_id)
                    if row is None or row.connected is None:
                        self._tell_removal(event.node_id, "nobody waits for this connection any more")
                case _:
                    log.warning("engine_message_unexpected", kind=event.kind)

    async def _audit_path(self) -> str | None:
        """Where the whole model is, by which rows are audited; None where this node has only a part of it."""
        source = self._model.source_path
        is_whole = source.exists() if self._audited is None else await self._audited.keep_whole_model()
        return str(source) if is_whole else None

    def _take_verdict(self, judged: HolderJudged) -> None:
        """The engine's audit has found a holder out. One that is quarantined is lost besides."""
        self._judged.pop(judged.node_id, None)
        self._judged[judged.node_id] = judged
        if len(self._judged) > JUDGED_MAX:
            del self._judged[next(iter(self._judged))]
        log.warning(
            "holder_judged",
            node=judged.node_id,
            verdict=judged.verdict,
            reason=judged.reason,
            n_rows=judged.n_rows,
            n_foreign=judged.n_foreign,
        )
        if judged.verdict == "unfit":
            self._tell_found_out(judged.node_id, "unfit", judged.reason, self._now(), judged.claim_digest)
        self._note_change()

    def _tell_found_out(
        self, node_id: NodeId, word: AuditVerdict, reason: str, until: Instant, claim: bytes | None
    ) -> None:
        """Have the core plan by what was found. What was found of rows is of the node with the `claim` that
        they were given under, whatever it shows by now; None: it is not of rows.
        """
        self._core.command(FoundOut(VerdictInForce(node_id, word, as_sentence(reason), until, claim)))

    def _accuse(self, shown: HolderEvidenced) -> None:
        """What the engine's audit has found of a holder can be shown: have others look into it."""
        judged = self._judged.get(shown.node_id)
        if judged is None:
            return
        self._core.command(
            Accuse(
                node_id=shown.node_id,
                claim_digest=shown.claim_digest,
                word=judged.verdict,
                reason=judged.reason,
                n_rows=judged.n_foreign,
                evidence=shown.evidence,
            )
        )

    def _pass_on(self, token: TokenEmitted) -> None:
        session = self._sessions.get(token.session)
        if session is None or session.end_of_reign:
            return  # its client has gone, or its term
        try:
            session.tokens.send_nowait(token)
        except trio.WouldBlock:
            raise EngineFailed("the backbone engine emitted more tokens than were asked for") from None

    # -- a reign -----------------------------------------------------------------------------------

    async def _serve_reigns(self, engine: EnginePort) -> None:
        """Serve one reign after another on this engine."""
        while engine is self._engine:
            reign = self._reign
            if reign is None:
                await self._wait_change()
                continue
            try:
                async with open_unwrapping_nursery() as nursery:
                    self._reign_scope = nursery.cancel_scope
                    nursery.start_soon(self._keep_own_shard, engine, reign)
                    nursery.start_soon(self._keep_holders, engine, reign, nursery)
            finally:
                self._reign_scope = None

    async def _keep_holders(self, engine: EnginePort, reign: _Reign, nursery: trio.Nursery) -> None:
        """Connect whoever is ready, and let go of whoever is superfluous: first the one, then the other."""
        while engine is self._engine:
            now, due_at = self._now(), None
            if reign.plan is not None and self._proof[0] == reign.version:
                for row in self._holders.due(now):
                    attempt = self._holders.begin(row, now)
                    nursery.start_soon(self._try_holder, engine, reign, row, attempt)
                for node_id in self._holders.superfluous(reign.plan, self._node_id, self._own.shard):
                    self._holders.forget(node_id)
                    self._tell_removal(node_id, "the plan names it no more")
                    log.info("holder_let_go", node=node_id, revision=reign.plan.revision)
                due_at = self._holders.next_due()
            wait_s = max(0.0, in_seconds(between(self._now(), due_at))) if due_at is not None else None
            with trio.move_on_after(wait_s) if wait_s is not None else contextlib.nullcontext():
                await self._wait_change()

    async def _try_holder(
        self, engine: EnginePort, reign: _Reign, row: HolderConnection, attempt: int
    ) -> None:
        try:
            await self._connect_holder(engine, reign, row, attempt)
        finally:
            self._holders.end(row, attempt)

    async def _connect_holder(
        self, engine: EnginePort, reign: _Reign, row: HolderConnection, attempt: int
    ) -> None:
        """One attempt to have the engine ask this holder for what the plan gives it."""
        share, plan = row.wanted, reign.plan
        assert plan is not None
        try:
            lost = await self._dial(engine, row.node_id, share)
        except (RemoteProtocolError, KvasirError) as error:
            if engine.has_ended or not self._holders.is_current(row, attempt):
                return
            log.warning("holder_not_connected", node=row.node_id, reason=str(error))
            # An older connection is not trusted either: its holder is in trouble, or has another engine.
            self._tell_removal(row.node_id, str(error))
            self._lose_connection(row.node_id, error.code, str(error), is_engines_word=False)
            return
        if not self._holders.is_current(row, attempt):
            if lost is None and (self._holders.get(row.node_id) is not row or row.connected is None):
                self._tell_removal(row.node_id, "something happened to it while it was being connected")
            return
        if lost is not None:
            self._lose_connection(row.node_id, lost.code, lost.reason, is_engines_word=True)
            return
        record = self._core.record_of(row.node_id)
        self._holders.note_connected(row, share, has_shown_shard=_shows(record, plan))
        log.info("holder_connected", node=row.node_id, revision=plan.revision, experts=len(share.shard))
        self._note_change()

    async def _dial(self, engine: EnginePort, node_id: NodeId, share: Share) -> HolderLost | None:
        """Ask a holder for its engine's address and have ours connect to it; why that failed, if it did.

        Raises `TransportUnavailable` and `RemoteProtocolError` where the holder cannot be asked or refuses.
        """
        proof = self._proof[1]
        if not self._host.is_connected(node_id):
            record = self._core.record_of(node_id)
            addresses = [
                each for each in (record.addresses if record else ()) if each.endswith(f"/{node_id}")
            ]
            if addresses:
                await self._host.connect(addresses)
        stream = await self._host.open_stream(node_id)
        try:
            grant = await ask(
                stream, DataRequest(engine.certificate, "backbone", proof), DataGrant, CONNECT_TIMEOUT_S
            )
        finally:
            await stream.close()
        verify_engine_certificate(grant.engine_certificate, self._swarm.digest, node_id, "worker")
        record = self._core.record_of(node_id)
        request = ConnectHolder(
            node_id=node_id,
            host=grant.host,
            port=grant.port,
            token=grant.token,
            certificate=grant.engine_certificate,
            shard=share.shard.encode(),
            primary=share.primary.encode(),
            proof=proof,
            adds_in_f32=record is None or record.adds_in_f32,
            activation=record.activation_format if record is not None else "",
            claim_digest=record.claim_digest() if record is not None else b"",
        )
        self._to_tell.pop(("holder", node_id), None)  # a removal that this connection would not survive
        reply = await engine.exchange(
            request,
            (HolderConnected, HolderLost),
            CONNECT_TIMEOUT_S,
            where=lambda each: each.node_id == node_id,
        )
        return reply if isinstance(reply, HolderLost) else None

    def _lose_connection(self, node_id: NodeId, code: str, reason: str, *, is_engines_word: bool) -> None:
        """A connection broke, or could not be made: the core offers the plan again, or plans without it."""
        is_known = self._holders.note_lost(
            node_id, code, reason, self._now(), is_engines_word=is_engines_word
        )
        if not is_known:
            return
        self._note_holder_lost(node_id, code, reason)
        fault = self._holders.fault_of(node_id)
        if fault is None:
            self._core.command(HolderFailed(node_id, as_sentence(f"{code}: {reason}")))
            return
        log.warning("holder_quarantined", node=node_id, reason=fault.reason, n_faults=fault.n_faults)
        judged = self._judged.get(node_id) if code == "quarantined" else None
        claim = judged.claim_digest if judged is not None else None
        self._tell_found_out(node_id, "quarantined", fault.reason, fault.until, claim)

    # -- this node's own experts -------------------------------------------------------------------

    async def _keep_own_shard(self, engine: EnginePort, reign: _Reign) -> None:
        """Hold what the plan gives this node itself, plan after plan, and tell the core of each."""
        while True:
            plan = reign.plan
            if plan is None:
                await self._wait_change()
                continue
            version = (plan.epoch, plan.term, plan.revision)
            retry_s: float | None = None
            try:
                memory_bytes = await self._hold(engine, plan)
            except _NotHeld as error:
                if engine.has_ended:
                    return  # the next one is told
                log.error("own_shard_refused", revision=plan.revision, code=error.code, reason=str(error))
                self._note_error(str(error))
                self._core.command(
                    ShardRefused(*version, error.code, str(error), error.need_bytes, error.have_bytes)
                )
                retry_s = None if error.need_bytes else OWN_RETRY_S
            else:
                self._core.command(ShardLoaded(*version, memory_bytes))
            self._note_change()
            with trio.move_on_after(retry_s) if retry_s is not None else contextlib.nullcontext():
                while reign.plan is plan:
                    await self._wait_change()

    async def _hold(self, engine: EnginePort, plan: Plan) -> int:
        """Have the engine hold what this plan gives this node; its bytes. Raises `_NotHeld`."""
        share = Share.of(plan, self._node_id)
        if share == self._own:
            return self._own_memory_bytes
        if not len(share.shard):
            self._own, self._own_memory_bytes = NO_SHARE, 0
            self._tell_removal(self._node_id, "the plan gives it nothing")
            return 0
        need, have = self._model.manifest.shard_size_bytes(share.shard), self._settings.memory_bytes
        if need > have:
            reason = f"its own shard needs {need >> 20} MiB and {have >> 20} MiB are offered"
            raise _NotHeld("no_memory", reason, need, have)
        try:
            # What a newer plan wants is mostly the same; the end of the reign ends it.
            await self._fetching.have(share.shard, lambda: True, trio.sleep_forever)
        except NoRoomOnDisk as error:
            raise _NotHeld(error.code, as_sentence(str(error)), error.need_bytes, error.have_bytes) from error
        except KvasirError as error:
            raise _NotHeld(error.code, as_sentence(str(error))) from error
        request = LoadOwnShard(
            engine.next_request(),
            self._node_id,
            str(self._model.source_path),
            share.shard.encode(),
            share.primary.encode(),
            self._settings.n_threads,
        )
        self._to_tell.pop(("holder", self._node_id), None)  # a removal that these would not survive
        try:
            loaded = await engine.exchange(request, OwnShardLoaded, LOAD_TIMEOUT_S)
        except (KvasirError, ProtocolError) as error:
            code = error.code if isinstance(error, KvasirError | RemoteProtocolError) else "shard_unusable"
            raise _NotHeld(code, as_sentence(str(error))) from error
        self._own, self._own_memory_bytes = share, loaded.memory_bytes
        log.info("own_shard_loaded", revision=plan.revision, experts=len(share.shard))
        return loaded.memory_bytes

    # -- events ------------------------------------------------------------------------------------

    def _note_holder_lost(self, node_id: NodeId, code: str, reason: str) -> None:
        log.warning("holder_lost", node=node_id, code=code, reason=reason)
        self._note_error(f"{node_id} lost: {code}: {reason}")

    def _note_error(self, text: str) -> None:
        self._last_error.note(text)
        self._note_change()

    def _note_change(self) -> None:
        if self.state()[0] in ("ready", "standby"):
            self._last_error.note_ready()
        self._changed.set()
        self._changed = trio.Event()

    async def _wait_change(self) -> None:
        await self._changed.wait()


def _shows(record: CapabilityRecord | None, plan: Plan) -> bool:
    """Whether a holder's record says that it holds its shard of this very plan."""
    held = record.held if record is not None else None
    if held is None:
        return False
    return (held.epoch, held.term, held.revision) == (plan.epoch, plan.term, plan.revision)
