"""A worker's duty in the control process: find the backbone, hold the shard it plans, let its engine serve.

It joins over any bootstrap address that answers, believes a backbone only on its term proof, persists the
fence before its engine hears of it, and keeps an engine with the planned shard running. Rows go from engine
to engine and never pass here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node import __version__
from kvasir_node.driver.backbone_duty import engine_report, model_report
from kvasir_node.driver.conversation import ask, hear, refuse, tell
from kvasir_node.engine.certificate import verify_engine_certificate
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import ControlStream, EnginePort, EngineStarter, FenceStore, Host
from kvasir_node.supervisor import LOAD_TIMEOUT_S, STEADY_AFTER, keep_running
from kvasir_node.telemetry import get_logger
from kvasir_proto import PROTOCOL_VERSION
from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.errors import (
    EngineFailed,
    KvasirError,
    ModelUnusable,
    RemoteProtocolError,
    TransportUnavailable,
)
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Instant, WallTime, after, between, seconds
from kvasir_proto.limits import as_sentence
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    DiallerExpected,
    ExpectDialler,
    Listen,
    Listening,
    LoadShard,
    SetFence,
    ShardLoaded,
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
    Refusal,
    Welcome,
)
from kvasir_proto.placement.plan import open_plan
from kvasir_proto.signing import sign_message
from kvasir_proto.swarm_manifest import FoundedSwarm, open_swarm_manifest
from kvasir_proto.term_proof import ProvenTerm, founding_electorate, verify_term_proof

log = get_logger()

ENGINE_TIMEOUT_S: Final = 30.0
TOKEN_LIFETIME_NS: Final = 10_000_000_000
RECORD_LIFETIME: Final = seconds(3600)
JOIN_DELAY_MAX_S: Final = 15.0
ACCUMULATION: Final = "UNKNOWN"
"""What a node may say of its accumulation before anything measured it (DESIGN section 1)."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What the configuration says about this duty."""

    bootstrap: tuple[str, ...]
    data_host: str
    data_port: int
    n_threads: int
    memory_bytes: int
    device: str


@dataclass(frozen=True, slots=True)
class _Assignment:
    revision: int
    shard: ShardSet


class WorkerDuty:
    """This node as a worker. `run` until cancelled; `leave` before that to go in good order."""

    def __init__(
        self,
        *,
        node_key: Ed25519PrivateKey,
        swarm: FoundedSwarm | None,
        remember_swarm: Callable[[bytes], None],
        find_model: Callable[[bytes], StoredModel],
        fences: FenceStore,
        host: Host,
        start_engine: EngineStarter,
        next_generation: Callable[[], int],
        settings: WorkerSettings,
        now: Callable[[], Instant],
        wall_time: Callable[[], WallTime],
    ) -> None:
        """``swarm`` is the one this home joined before; ``find_model`` raises `ModelUnusable`."""
        self._node_key = node_key
        self._swarm = swarm
        self._remember_swarm = remember_swarm
        self._find_model = find_model
        self._fences = fences
        self._host = host
        self._start_engine = start_engine
        self._next_generation = next_generation
        self._settings = settings
        self._now = now
        self._wall_time = wall_time
        self._term: ProvenTerm | None = None
        self._model: StoredModel | None = None
        self._engine: EnginePort | None = None
        self._listening: Listening | None = None
        self._assignment: _Assignment | None = None
        self._loaded: _Assignment | None = None
        self._load_lock = trio.Lock()
        self._sequence = 0
        self._contact = "looking for the backbone"
        self._is_member = False
        self._last_error = ""
        self._swarm_known = trio.Event()

    # -- what is going on --------------------------------------------------------------------------

    def state(self) -> tuple[str, str]:
        """One word and its reason: starting, joining, loading, ready or isolated."""
        if not self._is_member:
            return ("isolated" if self._term else "joining"), self._contact
        if self._engine is None:
            return "starting", self._last_error or "the worker engine is starting"
        if self._assignment is None:
            return "joining", "no plan yet"
        if self._loaded != self._assignment:
            return "loading", f"loading {len(self._assignment.shard)} experts"
        return "ready", ""

    def report(self) -> dict[str, Any]:
        """This duty's part of the status document."""
        shard = self._loaded.shard if self._loaded else ShardSet()
        return {
            "epoch": self._term.epoch if self._term else 0,
            "term": self._term.term if self._term else 0,
            "backbone": self._term.backbone if self._term else None,
            "ranks": ["output", "bulk"] if len(shard) else [],
            "swarm": self._swarm.digest.hex() if self._swarm else None,
            "model": model_report(self._model) if self._model else None,
            "plan": {"revision": self._assignment.revision if self._assignment else 0},
            "shards": [list(each) for each in shard.ranges],
            "n_experts_held": len(shard),
            "members": [],
            "engine": engine_report(self._engine),
            "data_address": f"{self._listening.host}:{self._listening.port}" if self._listening else None,
            "last_error": self._last_error,
        }

    async def engine_statistics(self) -> str:
        """The engine's counters as JSON. Raises `EngineFailed` when there is no engine."""
        if self._engine is None:
            raise EngineFailed("the worker engine is not running")
        return await self._engine.statistics_json()

    # -- from the backbone -------------------------------------------------------------------------

    async def serve_stream(self, node_id: NodeId, stream: ControlStream) -> None:
        """Answer the backbone on a stream it opened, until it closes it."""
        try:
            while True:
                message = await hear(stream, ENGINE_TIMEOUT_S)
                match message:
                    case PlanOffer():
                        await tell(stream, await self._take_plan(node_id, message))
                    case DataRequest():
                        await tell(stream, await self._grant_data(node_id, message))
                    case _:
                        raise RemoteProtocolError(f"{message.kind} is not for a worker", "unexpected_message")
        except RemoteProtocolError as error:
            log.warning("request_refused", node=node_id, code=error.code, reason=str(error))
            await refuse(stream, error)
        except KvasirError as error:
            if isinstance(error, TransportUnavailable):
                return  # the backbone has said all it had to say
            self._last_error = str(error)
            log.error("request_failed", node=node_id, reason=str(error))
            code = "model_unusable" if isinstance(error, ModelUnusable) else "engine_failed"
            await tell(stream, Refusal(code, as_sentence(str(error))))

    def _check_proof(self, node_id: NodeId, proof: bytes) -> ProvenTerm:
        """The proven term, if it makes ``node_id`` backbone and is not behind our fence."""
        swarm = self._swarm
        if swarm is None:
            raise RemoteProtocolError("no swarm is known here yet", "not_a_member")
        electorate = founding_electorate(swarm.manifest.founder_public_key)
        term = verify_term_proof(proof, swarm.digest, electorate)
        if term.backbone != node_id:
            raise RemoteProtocolError("the proof makes another node backbone", "not_backbone")
        if (term.epoch, term.term) < self._fences.load():
            raise RemoteProtocolError(f"({term.epoch}, {term.term}) is behind the fence", "stale_term")
        return term

    async def _follow(self, term: ProvenTerm) -> None:
        """Persist the fence, then tell the engine: in that order, or a crash could forget it."""
        if (term.epoch, term.term) > self._fences.load():
            self._fences.save(term.epoch, term.term)
        if self._term != term:
            self._term = term
            log.info("term_followed", epoch=term.epoch, term=term.term, backbone=term.backbone)
        if self._engine is not None:
            await self._engine.send(SetFence(term.epoch, term.term))

    async def _take_plan(self, node_id: NodeId, offer: PlanOffer) -> PlanAccept:
        term = self._check_proof(node_id, offer.proof)
        assert self._swarm is not None
        plan = open_plan(offer.plan, self._swarm.digest, term.backbone)
        if (plan.epoch, plan.term) != (term.epoch, term.term):
            raise RemoteProtocolError("the plan is of another term than its proof", "stale_term")
        await self._follow(term)
        assignment = _Assignment(plan.revision, plan.shard_of(self._host.node_id))
        if not len(assignment.shard):
            raise RemoteProtocolError("the plan gives nothing to this node", "empty_shard")
        async with self._load_lock:
            current = self._assignment
            if current is not None and assignment.revision < current.revision:
                raise RemoteProtocolError(f"plan {current.revision} is newer", "stale_plan")
            self._assignment = assignment
            loaded = await self._load(assignment)
        return PlanAccept(
            assignment.revision,
            assignment.shard.digest(),
            loaded,
            self._engine.backend if self._engine else "-",
        )

    async def _load(self, assignment: _Assignment) -> int:
        """Have the engine hold this shard; the bytes it takes. The caller holds the lock."""
        engine = self._engine
        if engine is None:
            raise RemoteProtocolError("the worker engine is starting", "engine_starting")
        model = self._usable_model()
        need = model.manifest.shard_size_bytes(assignment.shard)
        if need > self._settings.memory_bytes:
            raise RemoteProtocolError(
                f"the shard needs {need >> 20} MiB and {self._settings.memory_bytes >> 20} MiB are offered",
                "no_memory",
            )
        if self._loaded is not None and self._loaded.shard == assignment.shard:
            self._loaded = assignment
            return need
        self._loaded = None
        request = LoadShard(
            engine.next_request(),
            str(model.manifest_path),
            str(model.source_path),
            assignment.shard.encode(),
            self._settings.n_threads,
        )
        reply = await engine.exchange(request, ShardLoaded, LOAD_TIMEOUT_S)
        self._loaded = assignment
        log.info("shard_loaded", revision=assignment.revision, experts=len(assignment.shard))
        return reply.memory_bytes

    def _usable_model(self) -> StoredModel:
        if self._model is None:
            assert self._swarm is not None
            self._model = self._find_model(self._swarm.manifest.model_digest)
        return self._model

    async def _grant_data(self, node_id: NodeId, request: DataRequest) -> DataGrant:
        term = self._check_proof(node_id, request.proof)
        assert self._swarm is not None
        if request.role != "backbone":
            raise RemoteProtocolError("only a backbone dials a worker", "wrong_role")
        verify_engine_certificate(request.engine_certificate, self._swarm.digest, node_id, "backbone")
        await self._follow(term)
        engine, listening = self._engine, self._listening
        if engine is None or listening is None or self._loaded is None:
            raise RemoteProtocolError("the worker engine is starting", "engine_starting")
        token = secrets.token_bytes(16)
        expect = ExpectDialler(
            token, request.engine_certificate, "backbone", node_id, self._now() + TOKEN_LIFETIME_NS
        )
        await engine.exchange(
            expect, DiallerExpected, ENGINE_TIMEOUT_S, where=lambda each: each.token == token
        )
        return DataGrant(
            listening.host, listening.port, token, engine.certificate, TOKEN_LIFETIME_NS // 1_000_000
        )

    # -- tasks -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Stay a member and keep an engine running, until cancelled."""
        if self._swarm is not None:
            self._swarm_known.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stay_member)
            await self._swarm_known.wait()
            await keep_running(self._run_engine, self._now, self._note_engine_failure)

    def _note_engine_failure(self, error: KvasirError) -> None:
        self._last_error = str(error)
        log.error("engine_failed", role="worker", reason=str(error))

    async def _run_engine(self) -> NoReturn:
        """One engine's life: started, listening, given its shard again, until it ends."""
        async with open_unwrapping_nursery() as nursery:
            engine = await self._start_engine(nursery, "worker", self._next_generation())
            try:
                listen = Listen(self._settings.data_host, self._settings.data_port)
                self._listening = await engine.exchange(listen, Listening, ENGINE_TIMEOUT_S)
                self._engine = engine
                if self._term is not None:
                    await engine.send(SetFence(self._term.epoch, self._term.term))
                async with self._load_lock:
                    if self._assignment is not None:
                        await self._load(self._assignment)
                async for event in engine.events:
                    log.warning("engine_message_unexpected", kind=event.kind)
                reason = await engine.wait_ended()
                raise EngineFailed(f"the worker engine ended: {reason}")
            finally:
                self._engine = self._listening = self._loaded = None
                await engine.close()
                nursery.cancel_scope.cancel()

    async def _stay_member(self) -> None:
        """Join, send heartbeats, and join again whenever the conversation breaks off."""
        failures = 0
        while True:
            for address in self._settings.bootstrap:
                started = self._now()
                try:
                    await self._be_member(address)
                except (TransportUnavailable, RemoteProtocolError) as error:
                    self._contact = f"{address}: {error}"
                    log.warning("backbone_unreachable", address=address, reason=str(error))
                if between(started, self._now()) > STEADY_AFTER:
                    failures = 0
            failures += 1
            await trio.sleep(min(0.25 * 2.0**failures, JOIN_DELAY_MAX_S))

    async def _be_member(self, address: str) -> None:
        """One membership, from hello to the end of the stream, which is always an exception."""
        node_id = await self._host.connect(address)
        stream = await self._host.open_stream(node_id)
        try:
            welcome = await ask(stream, Hello((PROTOCOL_VERSION,), __version__), Welcome)
            self._enter(welcome)
            term = self._check_proof(node_id, welcome.proof)
            await self._follow(term)
            joined = await ask(stream, Join(self._record()), Joined)
            self._is_member, self._contact = True, f"member by {address}"
            self._swarm_known.set()
            log.info("swarm_joined", backbone=node_id, address=address)
            sequence = 0
            try:
                while True:
                    await trio.sleep(joined.heartbeat_interval_ms / 1000)
                    sequence += 1
                    state, reason = self.state()
                    await ask(stream, Heartbeat(sequence, state, as_sentence(reason)), HeartbeatReply)
            except trio.Cancelled:
                with trio.CancelScope(shield=True), trio.move_on_after(1.0):
                    await tell(stream, Leave("the node stops"))
                raise
        finally:
            self._is_member = False
            await stream.close()

    def _enter(self, welcome: Welcome) -> None:
        """Take the swarm's manifest, or check that it is still the one this home belongs to."""
        if self._swarm is not None:
            open_swarm_manifest(welcome.swarm_manifest, self._swarm.digest)
            return
        self._swarm = open_swarm_manifest(welcome.swarm_manifest)
        self._remember_swarm(welcome.swarm_manifest)
        log.info("swarm_entered", swarm=self._swarm.digest.hex(), model=self._swarm.manifest.model_name)

    def _record(self) -> bytes:
        """A fresh signed capability record. Its sequence is wall time, so it grows over restarts too."""
        assert self._swarm is not None
        self._sequence = max(self._sequence + 1, self._wall_time())
        record = CapabilityRecord(
            node_id=self._host.node_id,
            sequence=self._sequence,
            expires=after(self._wall_time(), RECORD_LIFETIME),
            addresses=self._host.addresses(),
            versions=(PROTOCOL_VERSION,),
            node_version=__version__,
            backend="ggml-cpu",
            device=self._settings.device,
            accumulation=ACCUMULATION,
            memory_bytes=self._settings.memory_bytes,
            state="joined",
            reason="",
        )
        return sign_message(self._node_key, self._swarm.digest, record)
