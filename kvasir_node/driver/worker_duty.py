"""A worker's duty in the control process: find the backbone, hold the shard it plans, let its engine serve.

It joins over any bootstrap address that answers, believes a backbone only on its term proof, persists the
fence before its engine hears of it, and keeps an engine with the planned shard running. Rows go from engine
to engine and never pass here.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node import __version__
from kvasir_node.backoff import retry_delay_s
from kvasir_node.driver.conversation import ask, hear, refuse, tell
from kvasir_node.driver.last_error import LastError
from kvasir_node.engine.certificate import verify_engine_certificate
from kvasir_node.model.report import model_report
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import ControlStream, EnginePort, EngineStarter, FenceStore, Host, engine_report
from kvasir_node.supervisor import LOAD_TIMEOUT_S, STEADY_AFTER, keep_running, watch_engine
from kvasir_node.telemetry import get_logger
from kvasir_proto import PROTOCOL_VERSION
from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.errors import (
    ConfigurationInvalid,
    DiskFull,
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
    PlanSuperseded,
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
JOIN_DELAY_FIRST_S: Final = 0.5
JOIN_DELAY_MAX_S: Final = 15.0
LEAVE_TIMEOUT_S: Final = 2.0
"""How long a node that stops waits for the backbone to have heard that it leaves."""

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
    version: tuple[int, int, int]
    """(epoch, term, revision) of the plan."""
    shard: ShardSet
    signed_plan: bytes

    def supersedes(self, other: _Assignment) -> bool:
        """Whether it is of a newer plan, or of another one with the same version, which nobody may make."""
        if other.version == self.version:
            return other.signed_plan != self.signed_plan
        return other.version < self.version


class WorkerDuty:
    """This node as a worker. `run` until cancelled; `leave` before that to go in good order."""

    def __init__(
        self,
        *,
        node_key: Ed25519PrivateKey,
        swarm: FoundedSwarm | None,
        remember_swarm: Callable[[bytes], None],
        find_model: Callable[[bytes], Awaitable[StoredModel]],
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
        self._last_error = LastError(wall_time)
        self._swarm_known = trio.Event()
        self._news = trio.Event()
        self._engine_up = trio.Event()
        self._leaving = trio.Event()
        self._left = trio.Event()

    # -- what is going on --------------------------------------------------------------------------

    def state(self) -> tuple[str, str]:
        """One word and its reason: starting, joining, loading, ready or isolated."""
        if not self._is_member:
            return ("isolated" if self._term else "joining"), self._contact
        if self._engine is None:
            return "starting", self._last_error.unrecovered or "the worker engine is starting"
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
            "compact_activations": self._swarm.manifest.compact_activations if self._swarm else None,
            "partial_sums": self._swarm.manifest.partial_sums if self._swarm else None,
            "model": model_report(self._model) if self._model else None,
            "plan": {"revision": self._assignment.version[2] if self._assignment else 0},
            "shards": [list(each) for each in shard.ranges],
            "n_experts_held": len(shard),
            "members": [],
            "engine": engine_report(self._engine),
            "data_address": f"{self._listening.host}:{self._listening.port}" if self._listening else None,
            **self._last_error.report(),
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
            self._last_error.note(str(error))
            log.error("request_failed", node=node_id, reason=str(error))
            code = "model_unusable" if isinstance(error, ModelUnusable) else "engine_failed"
            await tell(stream, Refusal(code, as_sentence(str(error))))

    def _check_proof(self, swarm: FoundedSwarm | None, node_id: NodeId, proof: bytes) -> ProvenTerm:
        """The proven term, if it makes ``node_id`` backbone of ``swarm`` and is not behind our fence."""
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

    async def _take_plan(self, node_id: NodeId, offer: PlanOffer) -> PlanAccept | PlanSuperseded:
        term = self._check_proof(self._swarm, node_id, offer.proof)
        assert self._swarm is not None
        plan = open_plan(offer.plan, self._swarm.digest, term.backbone)
        if (plan.epoch, plan.term) != (term.epoch, term.term):
            raise RemoteProtocolError("the plan is of another term than its proof", "stale_term")
        await self._follow(term)
        version = (plan.epoch, plan.term, plan.revision)
        assignment = _Assignment(version, plan.shard_of(self._host.node_id), offer.plan)
        if not len(assignment.shard):
            raise RemoteProtocolError("the plan gives nothing to this node", "empty_shard")
        async with self._load_lock:
            current = self._assignment
            if current is not None and current.supersedes(assignment):
                log.warning("plan_superseded", revision=plan.revision, newer=current.version[2])
                return PlanSuperseded(current.signed_plan)
            model = await self._usable_model()
            need = self._check_fits(model, assignment.shard)
            self._assignment = assignment
            engine = await self._wait_engine()
            await self._load(engine, model, assignment)
            return PlanAccept(plan.revision, assignment.shard.digest(), need)

    def _check_fits(self, model: StoredModel, shard: ShardSet) -> int:
        """The bytes of a shard, if it is of this model and there is room for it."""
        manifest = model.manifest
        for layer, _, end in shard.ranges:
            if layer not in manifest.moe_layers or end > manifest.n_expert:
                raise RemoteProtocolError(f"the model has no such experts in layer {layer}", "wrong_shard")
        need = manifest.shard_size_bytes(shard)
        if need > self._settings.memory_bytes:
            raise RemoteProtocolError(
                f"the shard needs {need >> 20} MiB and {self._settings.memory_bytes >> 20} MiB are offered",
                "no_memory",
            )
        return need

    async def _wait_engine(self) -> EnginePort:
        """The running engine; waits for one that is starting."""
        with trio.move_on_after(ENGINE_TIMEOUT_S):
            while self._engine is None:
                await self._engine_up.wait()
            return self._engine
        raise RemoteProtocolError(self._why_no_engine(), "engine_starting")

    def _why_no_engine(self) -> str:
        reason = self._last_error.unrecovered
        return as_sentence("the worker engine is starting" + (f": {reason}" if reason else ""))

    async def _load(self, engine: EnginePort, model: StoredModel, assignment: _Assignment) -> None:
        """Have the engine hold this shard. The caller holds the lock."""
        if self._loaded is not None and self._loaded.shard == assignment.shard:
            self._loaded = assignment
            return
        self._loaded = None
        request = LoadShard(
            engine.next_request(),
            str(model.manifest_path),
            str(model.source_path),
            assignment.shard.encode(),
            self._settings.n_threads,
        )
        await engine.exchange(request, ShardLoaded, LOAD_TIMEOUT_S)
        if engine is self._engine:
            self._loaded = assignment
        log.info("shard_loaded", revision=assignment.version[2], experts=len(assignment.shard))

    async def _usable_model(self) -> StoredModel:
        if self._model is None:
            assert self._swarm is not None
            self._model = await self._find_model(self._swarm.manifest.model_digest)
        return self._model

    async def _grant_data(self, node_id: NodeId, request: DataRequest) -> DataGrant:
        term = self._check_proof(self._swarm, node_id, request.proof)
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
            self._reachable_host(listening.host),
            listening.port,
            token,
            engine.certificate,
        )

    def _reachable_host(self, host: str) -> str:
        """Where others reach an engine that listens at ``host``: a wildcard means nothing to them."""
        if not ipaddress.ip_address(host).is_unspecified:
            return host
        hosts = [address.split("/")[2] for address in self._host.addresses()]
        return hosts[0] if hosts else host

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
        self._last_error.note(str(error))
        log.error("engine_failed", role="worker", reason=str(error))

    async def _run_engine(self) -> NoReturn:
        """One engine's life: started, listening, given its shard again, until it ends."""
        async with open_unwrapping_nursery() as nursery:
            engine = await self._start_engine(nursery, "worker", self._next_generation())
            try:
                listen = Listen(self._settings.data_host, self._settings.data_port)
                self._listening = await engine.exchange(listen, Listening, ENGINE_TIMEOUT_S)
                if self._term is not None:
                    await engine.send(SetFence(self._term.epoch, self._term.term))
                self._engine = engine
                self._engine_up.set()
                nursery.start_soon(self._load_again, engine)
                nursery.start_soon(watch_engine, engine, self._load_lock)
                async for event in engine.events:
                    log.warning("engine_message_unexpected", kind=event.kind)
                reason = await engine.wait_ended()
                raise EngineFailed(f"the worker engine ended: {reason}")
            finally:
                self._engine = self._listening = self._loaded = None
                self._engine_up = trio.Event()
                self._news.set()
                await engine.close()
                nursery.cancel_scope.cancel()

    async def _load_again(self, engine: EnginePort) -> None:
        """Give a new engine the shard that the one before it had."""
        async with self._load_lock:
            if self._assignment is None:
                return
            try:
                await self._load(engine, await self._usable_model(), self._assignment)
            except KvasirError as error:
                # The engine is not to blame: the backbone offers its plan again, and each offer tries again.
                self._last_error.note(str(error))
                log.error("shard_not_loaded", reason=str(error))

    async def _stay_member(self) -> None:
        """Join, send heartbeats, and join again whenever the conversation breaks off."""
        failures = 0
        while True:
            for address in self._settings.bootstrap:
                started = self._now()
                try:
                    await self._be_member(address)
                    return  # left on purpose
                except (KvasirError, RemoteProtocolError) as error:
                    self._contact = f"{address}: {error}"
                    if isinstance(error, (DiskFull, ConfigurationInvalid)):
                        self._last_error.note(str(error))  # the backbone was reached: the trouble is our own
                    log.warning("backbone_unreachable", address=address, reason=str(error))
                    if self._leaving.is_set():
                        self._left.set()
                        return
                if between(started, self._now()) > STEADY_AFTER:
                    failures = 0
            failures += 1
            await trio.sleep(retry_delay_s(failures, JOIN_DELAY_FIRST_S, JOIN_DELAY_MAX_S))

    async def _be_member(self, address: str) -> None:
        """One membership, from hello to the end of the stream, which is an exception unless we leave."""
        node_id = await self._host.connect(address)
        stream = await self._host.open_stream(node_id)
        try:
            welcome = await ask(stream, Hello((PROTOCOL_VERSION,), __version__), Welcome)
            await self._enter(node_id, welcome)
            joined = await ask(stream, Join(self._record()), Joined)
            self._is_member, self._contact = True, f"member by {address}"
            self._swarm_known.set()
            log.info("swarm_joined", backbone=node_id, address=address)
            sequence = 0
            while not self._leaving.is_set():
                with trio.move_on_after(joined.heartbeat_interval_ms / 1000):
                    await self._news.wait()
                self._news = trio.Event()
                sequence += 1
                state, reason = self.state()
                if state == "ready":
                    self._last_error.note_ready()
                await ask(stream, Heartbeat(sequence, state, as_sentence(reason)), HeartbeatReply)
            await self._say_goodbye(stream)
        finally:
            self._is_member = False
            await stream.close()

    async def leave(self) -> None:
        """Leave the swarm, so that the backbone need not wait for a silence; returns in bounded time."""
        self._leaving.set()
        self._news.set()
        if self._is_member:
            with trio.move_on_after(LEAVE_TIMEOUT_S):
                await self._left.wait()

    async def _say_goodbye(self, stream: ControlStream) -> None:
        """Returns when the backbone has heard it: it ends the stream then."""
        try:
            await tell(stream, Leave("the node stops"))
            await stream.receive(LEAVE_TIMEOUT_S)
        except TransportUnavailable:
            pass
        finally:
            self._left.set()

    async def _enter(self, node_id: NodeId, welcome: Welcome) -> None:
        """Follow the backbone of the swarm this home belongs to; a home that belongs to none enters this one.

        Nothing is remembered before the term proof has been checked.
        """
        if welcome.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(f"it wants to speak version {welcome.version}", "incompatible_version")
        known = self._swarm
        swarm = open_swarm_manifest(welcome.swarm_manifest, known.digest if known else None)
        term = self._check_proof(swarm, node_id, welcome.proof)
        if known is None:
            self._remember_swarm(welcome.swarm_manifest)
            self._swarm = swarm
            log.info("swarm_entered", swarm=swarm.digest.hex(), model=swarm.manifest.model_name)
        await self._follow(term)

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
