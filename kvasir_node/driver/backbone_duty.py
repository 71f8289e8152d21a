"""The backbone's duty in the control process: members in, plan out, holders connected, sessions run.

It owns the roster, issues signed plans under its term proof, hands every holder's address and certificate to
the backbone engine, renews the engine's lease, and puts clients' sessions through. Which expert runs where is
the plan's decision (`kvasir_proto.placement`); rows never pass here.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.backoff import retry_delay_s
from kvasir_node.driver.conversation import ask, hear, refuse, tell
from kvasir_node.driver.last_error import LastError
from kvasir_node.driver.roster import HEARTBEAT_INTERVAL_MS, Roster
from kvasir_node.engine.certificate import verify_engine_certificate
from kvasir_node.model.report import model_report
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import ControlStream, EnginePort, EngineStarter, Host, engine_report
from kvasir_node.supervisor import LOAD_TIMEOUT_S, STEADY_AFTER, keep_running, load_trunk, watch_engine
from kvasir_node.swarm_files import Founding, SavedPlan
from kvasir_node.telemetry import get_logger
from kvasir_proto import PROTOCOL_VERSION
from kvasir_proto.capability import open_record
from kvasir_proto.errors import (
    ConfigurationInvalid,
    DiskFull,
    EngineFailed,
    KvasirError,
    NotReady,
    RemoteProtocolError,
    TransportUnavailable,
)
from kvasir_proto.ids import NodeId, SessionId
from kvasir_proto.instants import Duration, Instant, WallTime, after, between
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    CancelSession,
    ConnectHolder,
    EvaluateLogits,
    Generate,
    HolderConnected,
    HolderLost,
    LoadTrunk,
    LogitsEvaluated,
    RemoveHolder,
    SessionEnded,
    SetLease,
    TokenEmitted,
    TrunkLoaded,
)
from kvasir_proto.messages.local import USAGE_ERROR, EvaluateReply, EvaluateRequest, GenerateRequest
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
from kvasir_proto.placement.plan import Plan, make_plan, open_plan
from kvasir_proto.signing import sign_message

log = get_logger()

CONNECT_TIMEOUT_S: Final = 30.0
LEASE_NS: Final = 1_500_000_000
"""LAN preset. The engine is told nine tenths of it: it stops before anybody could elect another."""

LEASE_RENEWAL_S: Final = 0.4
CANCEL_TIMEOUT_S: Final = 5.0
"""How long a session that was cancelled may take to end; then it is forgotten."""

OFFERS_REFUSED_MAX: Final = 4
"""Offers that a member may refuse or fail in a row; then plans do without it for a while."""

SESSIONS_WAITING_MAX: Final = 8
SESSION_TIMEOUT_MS: Final = 3_600_000
_MEMBER_SILENCE_S: Final = 10.0
_RETRY_DELAY_FIRST_S: Final = 1.0
_RETRY_DELAY_MAX_S: Final = 15.0
_ADDRESS: Final = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/[^/]+/tcp/[0-9]{1,5}/p2p/(?P<node>[^/]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class BackboneSettings:
    """What the configuration says about this duty."""

    workers_min: int
    holders: int | None
    n_ctx: int
    n_ubatch: int
    n_threads: int
    device: str


@dataclass(slots=True)
class _Session:
    tokens: trio.MemorySendChannel[TokenEmitted]
    outcome: SessionEnded | None = None


class BackboneDuty:
    """This node as backbone of the term that ``founding`` proves. `run` until cancelled."""

    def __init__(
        self,
        *,
        node_key: Ed25519PrivateKey,
        founding: Founding,
        model: StoredModel,
        find_backbone_file: Callable[[], Awaitable[Path]],
        host: Host,
        start_engine: EngineStarter,
        next_generation: Callable[[], int],
        settings: BackboneSettings,
        saved_plan: SavedPlan | None,
        save_plan: Callable[[bytes], None],
        now: Callable[[], Instant],
        wall_time: Callable[[], WallTime],
    ) -> None:
        """``find_backbone_file`` gives the model's backbone file, verified; it is asked before each engine.

        ``saved_plan`` is what ``save_plan`` was last given in this home.

        It is gone on with: its workers still hold their shards, and no revision is used twice.
        """
        self._node_key = node_key
        self._founding = founding
        self._model = model
        self._find_backbone_file = find_backbone_file
        self._host = host
        self._start_engine = start_engine
        self._next_generation = next_generation
        self._settings = settings
        self._now = now
        self._wall_time = wall_time
        self._roster = Roster(now())
        self._plan = saved_plan.plan if saved_plan else None
        self._signed_plan = saved_plan.signed if saved_plan else b""
        self._save_plan = save_plan
        self._revision_max = self._plan.revision if self._plan else 0
        """The newest revision that this node is known to have issued."""
        self._is_plan_superseded = False
        self._plan_failures = 0
        """Plans in a row that could not be saved."""
        self._next_plan_at = now()
        self._engine: EnginePort | None = None
        self._trunk: TrunkLoaded | None = None
        self._sessions: dict[SessionId, _Session] = {}
        self._evaluations = 0
        self._conversations: dict[NodeId, ControlStream] = {}
        """The stream on which each member joined last: only its end says something about the member."""
        self._holder_events: dict[NodeId, trio.Event] = {}
        """For each node of the plan that is served: set when something happened to it."""
        self._changed = trio.Event()
        self._last_error = LastError(wall_time)
        self._rows_retried_total = 0

    # -- from other nodes --------------------------------------------------------------------------

    async def serve_stream(self, node_id: NodeId, stream: ControlStream) -> None:
        """Answer a node that opened a control stream; returns when the conversation is over."""
        joined = False
        try:
            hello = await hear(stream)
            if not isinstance(hello, Hello):
                raise RemoteProtocolError("a conversation starts with hello", "unexpected_message")
            if PROTOCOL_VERSION not in hello.versions:
                raise RemoteProtocolError(
                    f"this swarm speaks version {PROTOCOL_VERSION}, you {list(hello.versions)}",
                    "incompatible_version",
                )
            founding = self._founding
            await tell(stream, Welcome(PROTOCOL_VERSION, founding.signed_manifest, founding.proof))
            while True:
                message = await hear(stream, _MEMBER_SILENCE_S)
                match message:
                    case Join():
                        self._join(node_id, message)
                        self._conversations[node_id] = stream
                        joined = True
                        await tell(
                            stream, Joined(founding.term.epoch, founding.term.term, HEARTBEAT_INTERVAL_MS)
                        )
                    case Heartbeat():
                        await self._take_heartbeat(node_id, message)
                        await tell(stream, HeartbeatReply(founding.term.epoch, founding.term.term))
                    case Leave():
                        await self._let_leave(node_id, message.reason)
                        return
                    case _:
                        raise RemoteProtocolError(
                            f"{message.kind} is not for a backbone", "unexpected_message"
                        )
        except RemoteProtocolError as error:
            log.info("conversation_refused", node=node_id, code=error.code, reason=str(error))
            await refuse(stream, error)
        except TransportUnavailable as error:
            if joined and self._conversations.get(node_id) is stream:
                # At once, not when heartbeats have been missed: the plan's task tries to reach it again.
                log.info("member_silent", node=node_id, reason=str(error))
                self._roster.set_state(node_id, "unreachable", f"its control stream ended: {error}")
                self._wake_holder(node_id)
                self._note_change()
        finally:
            if self._conversations.get(node_id) is stream:
                del self._conversations[node_id]

    def _join(self, node_id: NodeId, message: Join) -> None:
        record = open_record(message.record, self._founding.swarm.digest, self._wall_time())
        if record.node_id != node_id:
            raise RemoteProtocolError("a node joins with its own record", "wrong_node")
        for address in record.addresses:
            match = _ADDRESS.fullmatch(address)
            if match is None or match["node"] != node_id:
                raise RemoteProtocolError("its record has an address that is not its own", "wrong_address")
        self._roster.join(record, self._now())
        log.info("member_joined", node=node_id, backend=record.backend)
        self._wake_holder(node_id)
        self._note_change()

    async def _take_heartbeat(self, node_id: NodeId, message: Heartbeat) -> None:
        member = self._roster.heartbeat(node_id, self._now())
        if message.state == "starting" and member.state == "serving":
            # Its engine has ended, and the connection with it, which nobody notices while no session runs.
            self._roster.set_state(node_id, "unreachable", message.reason)
            self._note_holder_lost(node_id, "starting", message.reason)
            await self._remove_holder(node_id, message.reason)
            self._note_change()

    async def _let_leave(self, node_id: NodeId, reason: str) -> None:
        self._roster.leave(node_id, reason)
        log.info("member_left", node=node_id, reason=reason)
        await self._remove_holder(node_id, "it left")
        self._note_change()

    # -- from clients ------------------------------------------------------------------------------

    async def generate(
        self, request: GenerateRequest, emit: Callable[[TokenEmitted], Awaitable[None]]
    ) -> SessionEnded:
        """Run one session; ``emit`` gets each token. If cancelled, the session is cancelled too.

        Raises `NotReady` when some expert has no holder, or too many sessions wait.
        """
        engine = self._ready_engine()
        if len(self._sessions) >= SESSIONS_WAITING_MAX:
            raise NotReady(f"{SESSIONS_WAITING_MAX} sessions are waiting already")
        session_id = SessionId(secrets.token_bytes(16))
        # Room for all of them: a client that reads slowly must not hold up what the engine says to others.
        tokens_in, tokens_out = trio.open_memory_channel[TokenEmitted](request.n_tokens)
        session = _Session(tokens_in)
        self._sessions[session_id] = session
        try:
            await engine.send(
                Generate(
                    session_id,
                    request.prompt,
                    request.token_ids,
                    request.n_tokens,
                    request.sampling,
                    SESSION_TIMEOUT_MS,
                )
            )
            async for token in tokens_out:
                await emit(token)
        except BaseException:
            # The session counts as running, so that no plan changes under it, until the engine has ended it.
            with contextlib.suppress(EngineFailed), trio.CancelScope(shield=True):
                with trio.move_on_after(CANCEL_TIMEOUT_S):
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
        if session.outcome.reason == "failed" and session.outcome.code != USAGE_ERROR:
            self._note_error(session.outcome.detail)
        return session.outcome

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Write the swarm's logits for these tokens to a file. Raises `NotReady` like `generate`."""
        engine = self._ready_engine()
        self._evaluations += 1
        try:
            reply = await engine.exchange(
                EvaluateLogits(
                    engine.next_request(), request.token_ids, request.chunk_sizes, request.output_path
                ),
                LogitsEvaluated,
                SESSION_TIMEOUT_MS / 1000,
            )
        finally:
            self._evaluations -= 1
            self._note_change()
        self._rows_retried_total += reply.rows_retried
        return EvaluateReply(reply.positions, reply.hook_calls, reply.rows_retried)

    def _ready_engine(self) -> EnginePort:
        state, reason = self.state()
        if state not in ("ready", "degraded") or self._engine is None:
            raise NotReady(f"the swarm is {state}: {reason}")
        return self._engine

    # -- what is going on --------------------------------------------------------------------------

    def state(self) -> tuple[str, str]:
        """One word and its reason: starting, joining, ready or degraded."""
        if self._engine is None or self._trunk is None:
            return "starting", self._last_error.unrecovered or "the backbone engine is loading"
        if self._plan is None:
            have, need = len(self._roster.active(self._now())), self._settings.workers_min
            if self._plan_failures and have >= need:
                return "joining", self._last_error.unrecovered
            return "joining", f"{have} of {need} workers have joined"
        coverage = self._plan.coverage(self._roster.serving())
        if coverage.n_pairs_held < coverage.n_pairs:
            held = f"{coverage.n_pairs_held} of {coverage.n_pairs} experts have a holder"
            return "joining", "; ".join([held, *self._failures_of_planned(self._plan)])
        planned = self._plan.coverage().holders_min
        if coverage.holders_min < planned:
            return "degraded", f"some expert has {coverage.holders_min} of {planned} planned holders"
        return "ready", ""

    def _failures_of_planned(self, plan: Plan) -> list[str]:
        """Which members of the plan could not be brought to serving, and why."""
        return [
            f"{member.node_id}: {member.failure}"
            for member in self._roster
            if member.failure and member.node_id in plan.nodes
        ]

    def report(self) -> dict[str, Any]:
        """This duty's part of the status document."""
        term = self._founding.term
        plan = self._plan
        coverage = plan.coverage(self._roster.serving()) if plan else None
        now = self._now()
        # What the plan gives to a member that is gone for good is held by nobody.
        shards = {
            member.node_id: ShardSet()
            if plan is None or self._roster.is_forgotten(member.node_id, now)
            else plan.shard_of(member.node_id)
            for member in self._roster
        }
        return {
            "epoch": term.epoch,
            "term": term.term,
            "backbone": term.backbone,
            "ranks": ["backbone"],
            "swarm": self._founding.swarm.digest.hex(),
            "compact_activations": self._founding.swarm.manifest.compact_activations,
            "partial_sums": self._founding.swarm.manifest.partial_sums,
            "model": model_report(self._model),
            "plan": {
                "revision": plan.revision if plan else 0,
                "coverage": coverage.n_pairs_held / coverage.n_pairs if coverage else 0.0,
                "holders_min": coverage.holders_min if coverage else 0,
            },
            "members": [
                {
                    "node_id": member.node_id,
                    "state": member.state,
                    "reason": member.reason,
                    "backend": member.record.backend,
                    "device": member.record.device,
                    "accumulation": member.record.accumulation,
                    "memory_bytes": member.record.memory_bytes,
                    "ranks": ["output", "bulk"] if len(shards[member.node_id]) else [],
                    "shard_bytes": member.shard_bytes,
                    "shards": len(shards[member.node_id]),
                    "last_seen_s": round((now - member.last_seen) / 1e9, 3),
                }
                for member in self._roster
            ],
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

    # -- tasks -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running and the plan served, until cancelled. Raises what `keep_running` does."""
        async with open_unwrapping_nursery() as nursery:
            nursery.start_soon(self._watch_members)
            await keep_running(self._run_engine, self._now, self._note_engine_failure)

    def _note_engine_failure(self, error: KvasirError) -> None:
        self._note_error(str(error))
        log.error("engine_failed", role="backbone", reason=str(error))

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
                    compact_activations=self._founding.swarm.manifest.compact_activations,
                    partial_sums=self._founding.swarm.manifest.partial_sums,
                    device=self._settings.device,
                    rpc=None,
                )
                self._trunk = await load_trunk(engine, request)
                self._engine = engine
                nursery.start_soon(self._renew_lease, engine)
                nursery.start_soon(watch_engine, engine, trio.Lock())
                nursery.start_soon(self._serve_plan, engine)
                self._note_change()
                await self._handle_events(engine)
                reason = await engine.wait_ended()
                raise EngineFailed(f"the backbone engine ended: {reason}")
            finally:
                self._engine = self._trunk = None
                for session in self._sessions.values():
                    session.tokens.close()
                for member in self._roster.serving():
                    self._roster.set_state(member, "joined")
                await engine.close()
                nursery.cancel_scope.cancel()

    async def _renew_lease(self, engine: EnginePort) -> None:
        """A founder is its own electorate: as long as this process runs, it grants itself the next lease."""
        term = self._founding.term
        while True:
            await engine.send(SetLease(term.epoch, term.term, self._now() + LEASE_NS * 9 // 10))
            await trio.sleep(LEASE_RENEWAL_S)

    async def _handle_events(self, engine: EnginePort) -> None:
        async for event in engine.events:
            match event:
                case TokenEmitted():
                    self._pass_on(event)
                case SessionEnded():
                    session = self._sessions.get(event.session)
                    if session is not None:
                        session.outcome = event
                        session.tokens.close()
                case HolderLost():
                    self._roster.holder_lost(event.node_id, event.code, event.reason)
                    self._note_holder_lost(event.node_id, event.code, event.reason)
                    self._wake_holder(event.node_id)
                case _:
                    log.warning("engine_message_unexpected", kind=event.kind)

    def _pass_on(self, token: TokenEmitted) -> None:
        session = self._sessions.get(token.session)
        if session is None:
            return  # its client has gone
        try:
            session.tokens.send_nowait(token)
        except trio.WouldBlock:
            raise EngineFailed("the backbone engine emitted more tokens than were asked for") from None

    async def _watch_members(self) -> None:
        while True:
            await trio.sleep(1.0)
            for node_id in self._roster.expire(self._now()):
                log.warning("member_lost", node=node_id, reason="no heartbeat")
                await self._remove_holder(node_id, "no heartbeat")
                self._note_change()
            if self._is_plan_due():
                self._note_change()

    async def _remove_holder(self, node_id: NodeId, reason: str) -> None:
        self._wake_holder(node_id)
        if self._engine is not None:
            with contextlib.suppress(EngineFailed):  # an engine that ended dispatches nothing anyway
                await self._engine.send(RemoveHolder(node_id, reason))

    # -- plans -------------------------------------------------------------------------------------

    async def _serve_plan(self, engine: EnginePort) -> None:
        """Issue a plan when one is due, and keep its holders connected until the next one."""
        while self._plan is None and not self._issue_due_plan():
            await self._wait_change()
        while True:
            plan = self._plan
            assert plan is not None
            async with open_unwrapping_nursery() as nursery:
                self._holder_events = {node_id: trio.Event() for node_id in plan.nodes}
                for node_id in plan.nodes:
                    nursery.start_soon(self._keep_holder, engine, plan, node_id)
                while not self._issue_due_plan():
                    await self._wait_change()
                nursery.cancel_scope.cancel()

    def _is_plan_due(self) -> bool:
        """Whether a plan is needed, and there are the workers to make it for, and it may be tried now."""
        if self._now() < self._next_plan_at or not (self._plan is None or self._is_plan_outdated()):
            return False
        workers_min = max(1, self._settings.workers_min) if self._plan is None else 1
        return len(self._roster.active(self._now())) >= workers_min

    def _issue_due_plan(self) -> bool:
        """Issue a plan if one is due; whether it was.

        One that cannot be saved is not issued, for nobody may hear of a plan that could be forgotten: the one
        before stays in force and is served, and the next attempt comes after a delay.
        """
        if not self._is_plan_due():
            return False
        try:
            self._issue_plan()
        except (DiskFull, ConfigurationInvalid) as error:
            self._plan_failures += 1
            delay_s = retry_delay_s(self._plan_failures, _RETRY_DELAY_FIRST_S, _RETRY_DELAY_MAX_S)
            self._next_plan_at = after(self._now(), Duration(round(delay_s * 1e9)))
            log.error("plan_not_saved", reason=str(error), retry_s=delay_s)
            self._note_error(str(error))
            return False
        self._plan_failures = 0
        return True

    def _is_plan_outdated(self) -> bool:
        """Whether the members have changed in a way that needs a new plan now.

        Never while a session runs, nor while a member of the plan may still come back, but always when a
        worker has shown a newer one that was lost here. Then a newcomer is
        taken in, and members that are gone for good cost a new plan when the workers that are left would
        hold each expert more often under it.
        """
        plan = self._plan
        if plan is None or self._sessions or self._evaluations:
            return False
        if self._is_plan_superseded:
            return True
        active = self._roster.active(self._now())
        remaining = [each for each in plan.nodes if not self._roster.is_forgotten(each, self._now())]
        if not active or any(node_id not in active for node_id in remaining):
            return False
        if any(node_id not in plan.nodes for node_id in active):
            return True
        possible = self._settings.holders or max(1, min(2, len(active) - 1))
        return plan.coverage(remaining).holders_min < min(possible, len(active))

    def _issue_plan(self) -> None:
        term = self._founding.term
        manifest = self._model.manifest
        workers = self._roster.active(self._now())
        holders = self._settings.holders
        plan = make_plan(
            manifest.moe_layers,
            manifest.n_expert,
            workers,
            epoch=term.epoch,
            term=term.term,
            revision=self._revision_max + 1,
            holders=min(holders, len(workers)) if holders is not None else None,
        )
        signed_plan = sign_message(self._node_key, self._founding.swarm.digest, plan)
        self._save_plan(signed_plan)
        self._plan, self._signed_plan, self._revision_max = plan, signed_plan, plan.revision
        self._is_plan_superseded = False
        for node_id in workers:
            # At once: no session may start on shards that are about to be replaced.
            self._roster.set_state(node_id, "loading", "it gets a new plan")
        log.info("plan_issued", revision=plan.revision, workers=len(workers))

    def _go_on_above(self, signed_plan: bytes, offered: Plan) -> RemoteProtocolError:
        """A worker holds a newer plan of ours, which was lost here: the next one comes after it.

        Returns what the worker is refused with meanwhile. Raises `RemoteProtocolError` for a plan that this
        node did not sign in its term, or that is older than the one offered, or the same.
        """
        founding = self._founding
        plan = open_plan(signed_plan, founding.swarm.digest, founding.term.backbone)
        same_term = (plan.epoch, plan.term) == (offered.epoch, offered.term)
        if not same_term or plan.revision < offered.revision or plan == offered:
            raise RemoteProtocolError("the plan it holds does not supersede this one", "wrong_plan")
        if offered == self._plan:
            log.warning("plan_was_lost", revision=plan.revision, offered=offered.revision)
            self._revision_max = max(self._revision_max, plan.revision)
            self._is_plan_superseded = True
            self._note_change()
        return RemoteProtocolError(f"it holds another plan, of revision {plan.revision}", "stale_plan")

    async def _keep_holder(self, engine: EnginePort, plan: Plan, node_id: NodeId) -> None:
        """Bring one member to serving, and back to it whenever its connection is lost."""
        failures = refusals = 0
        while True:
            member = self._roster.get(node_id)
            if member is None or not member.is_active:
                failures = refusals = 0
                await self._wait_holder(node_id)
                continue
            started = self._now()
            try:
                await self._connect_holder(engine, plan, node_id)
                refusals = 0
                await self._wait_holder(node_id)
            except (RemoteProtocolError, KvasirError) as error:
                if engine.has_ended:
                    return
                self._roster.set_state(node_id, "unreachable", str(error))
                member.failure = str(error)
                log.warning("holder_not_connected", node=node_id, reason=str(error))
                if not (isinstance(error, RemoteProtocolError) and error.code == "stale_plan"):
                    refusals += 1
                if refusals == OFFERS_REFUSED_MAX:
                    log.warning("member_unfit", node=node_id, reason=str(error))
                    self._roster.note_unfit(node_id, self._now())
            failures = 1 if between(started, self._now()) > STEADY_AFTER else failures + 1
            if member.state == "unreachable":
                self._note_change()
                with trio.move_on_after(retry_delay_s(failures, _RETRY_DELAY_FIRST_S, _RETRY_DELAY_MAX_S)):
                    await self._wait_holder(node_id)

    async def _connect_holder(self, engine: EnginePort, plan: Plan, node_id: NodeId) -> None:
        swarm_digest, proof = self._founding.swarm.digest, self._founding.proof
        shard = plan.shard_of(node_id)
        self._roster.set_state(node_id, "loading", "it loads its shard")
        member = self._roster.get(node_id)
        if member is not None and member.record.addresses:
            # Checked when it joined: each of them ends in its own id, which the host makes it prove.
            await self._host.connect(member.record.addresses)
        stream = await self._host.open_stream(node_id)
        try:
            accept = await ask(
                stream, PlanOffer(self._signed_plan, proof), (PlanAccept, PlanSuperseded), LOAD_TIMEOUT_S
            )
            if isinstance(accept, PlanSuperseded):
                raise self._go_on_above(accept.plan, plan)
            assert isinstance(accept, PlanAccept)
            if member is not None:
                member.shard_bytes = accept.memory_bytes
            if accept.shard_digest != shard.digest() or accept.revision != plan.revision:
                raise RemoteProtocolError("it accepted another shard than was offered", "wrong_shard")
            grant = await ask(
                stream, DataRequest(engine.certificate, "backbone", proof), DataGrant, CONNECT_TIMEOUT_S
            )
        finally:
            await stream.close()
        verify_engine_certificate(grant.engine_certificate, swarm_digest, node_id, "worker")
        request = ConnectHolder(
            node_id=node_id,
            host=grant.host,
            port=grant.port,
            token=grant.token,
            certificate=grant.engine_certificate,
            shard=shard.encode(),
            primary=plan.primary_shard_of(node_id).encode(),
            proof=proof,
        )
        self._holder_events[node_id] = trio.Event()
        reply = await engine.exchange(
            request,
            (HolderConnected, HolderLost),
            CONNECT_TIMEOUT_S,
            where=lambda each: each.node_id == node_id,
        )
        if isinstance(reply, HolderLost):
            self._roster.holder_lost(node_id, reply.code, reply.reason)
            raise RemoteProtocolError(reply.reason, reply.code)
        if self._holder_events[node_id].is_set() or plan is not self._plan:
            return  # it was lost again, joined anew, or got another plan, before this task had its turn
        self._roster.set_state(node_id, "serving")
        if member is not None:
            member.failure = ""
        log.info("holder_connected", node=node_id, revision=plan.revision, experts=len(shard))
        self._note_change()

    # -- events ------------------------------------------------------------------------------------

    def _note_holder_lost(self, node_id: NodeId, code: str, reason: str) -> None:
        log.warning("holder_lost", node=node_id, code=code, reason=reason)
        self._note_error(f"{node_id} lost: {code}: {reason}")

    def _note_error(self, text: str) -> None:
        self._last_error.note(text)
        self._note_change()

    def _note_change(self) -> None:
        if self.state()[0] == "ready" and not self._plan_failures:
            self._last_error.note_ready()
        self._changed.set()
        self._changed = trio.Event()

    async def _wait_change(self) -> None:
        await self._changed.wait()

    def _wake_holder(self, node_id: NodeId) -> None:
        if node_id in self._holder_events:
            self._holder_events[node_id].set()

    async def _wait_holder(self, node_id: NodeId) -> None:
        """Wait until something happened to this member's connection or membership."""
        await self._holder_events[node_id].wait()
        self._holder_events[node_id] = trio.Event()
