"""A node as holder: its engine holds the shard that the newest plan gives it, and serves the term's backbone.

Which plan counts and who is the backbone, the core has decided before; this brings the engine there and tells
the core how far it got. What cannot be held is refused with its reason, and tried again with patience where
time may help. The engine knows the fence before it loads or expects anybody. Rows go from engine to engine
and never pass here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import trio

from kvasir_node.backoff import retry_delay_s
from kvasir_node.driver.expert_fetching import ExpertFetching
from kvasir_node.driver.kernel_certifier import KernelCertifier
from kvasir_node.driver.last_error import LastError
from kvasir_node.engine.certificate import verify_engine_certificate
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import EnginePort, EngineStarter, ExpertKeeper, Host, SwarmCore, engine_report
from kvasir_node.supervisor import LOAD_TIMEOUT_S, keep_running, watch_engine
from kvasir_node.telemetry import get_logger
from kvasir_proto.election.requests import TermFollowed, TermVoided
from kvasir_proto.errors import EngineFailed, KvasirError, NoRoomOnDisk, RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, WallTime, between, in_seconds, seconds
from kvasir_proto.limits import Kernel, as_sentence
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    CertificationAdvanced,
    DiallerExpected,
    ExpectDialler,
    ExpertsMeasured,
    Listen,
    Listening,
    LoadShard,
    MeasureExperts,
    SetFence,
)
from kvasir_proto.messages.engine import ShardLoaded as LoadedByEngine
from kvasir_proto.messages.swarm import DataGrant, DataRequest
from kvasir_proto.node_core import NodeEvent, PlanReceived, ShardLoaded, ShardLost, ShardRefused
from kvasir_proto.placement.plan import Plan
from kvasir_proto.swarm_manifest import FoundedSwarm
from kvasir_proto.term_proof import ProvenTerm

log = get_logger()

ENGINE_TIMEOUT_S: Final = 30.0
"""For an engine's answer to what needs no work."""
ENGINE_PATIENCE: Final[Duration] = seconds(30)
"""How long a plan waits for an engine that starts, before the backbone hears why it is not served."""
FOLLOW_TIMEOUT_S: Final = 5.0
"""How long a request for data waits until its term is on our disk."""
TOKEN_LIFETIME_NS: Final = 10_000_000_000
LOAD_DELAY_FIRST_S: Final = 2.0
LOAD_DELAY_MAX_S: Final = 60.0
"""A shard that could not be loaded is tried again after 2, 4, 8 and so on to 60 seconds."""


@dataclass(frozen=True, slots=True)
class HolderSettings:
    """What the configuration says about this duty, and what its engine computes with."""

    data_host: str
    data_port: int
    n_threads: int
    memory_bytes: int
    kernel: Kernel = "ggml-cpu"
    kernel_device: str = "auto"


@dataclass(frozen=True, slots=True)
class _Assignment:
    """What the newest plan wants held."""

    version: tuple[int, int, int]
    """(epoch, term, revision) of the plan."""
    shard: ShardSet
    is_own: bool
    """The plan was issued by this node: its backbone engine serves what the plan gives to it."""
    flaw: ShardRefused | None
    """Why this shard can never be held here, if it cannot."""


@dataclass(frozen=True, slots=True)
class _Held:
    """What the engine holds."""

    shard: ShardSet
    memory_bytes: int


_NOTHING: Final = _Held(ShardSet(), 0)


class HolderDuty:
    """This node as holder. `run` until cancelled; `take_event` hears everything the core tells."""

    def __init__(
        self,
        *,
        swarm: FoundedSwarm,
        model: StoredModel,
        core: SwarmCore,
        host: Host,
        start_engine: EngineStarter,
        next_generation: Callable[[], int],
        settings: HolderSettings,
        certifier: KernelCertifier,
        certificate: Callable[[], bytes],
        note_speed: Callable[[int], None],
        now: Callable[[], Instant],
        wall_time: Callable[[], WallTime],
        experts: ExpertKeeper | None = None,
    ) -> None:
        """``experts`` has them on the disk before the engine loads them; None: the model's file is here.

        ``certifier`` has an engine measure its arithmetic, if need be, before more is asked of it.

        ``certificate`` is what auditors are shown, empty while there is none.
        ``note_speed`` hears of each engine that can serve: nanoseconds of a row through an expert.

        0 where the engine could not find out.
        """
        self._swarm = swarm
        self._model = model
        self._core = core
        self._host = host
        self._start_engine = start_engine
        self._next_generation = next_generation
        self._settings = settings
        self._certifier = certifier
        self._certificate = certificate
        self._note_speed = note_speed
        self._now = now
        self._term = core.view().fence
        self._voided: tuple[int, int] | None = None
        self._assignment: _Assignment | None = None
        self._refusal: ShardRefused | None = None
        """What the core was told last of this assignment, if that was a refusal."""
        self._failures = 0
        self._held: _Held | None = _NOTHING
        """None while the engine loads, or failed to: what it holds then is not known."""
        self._has_told_loaded = False
        """Whether the core believes that experts are held here."""
        self._engine: EnginePort | None = None
        self._listening: Listening | None = None
        self._fenced: tuple[EnginePort, int, int] | None = None
        """The fence that was told last, and to which engine."""
        self._fetching = ExpertFetching(experts, now)
        self._load_lock = trio.Lock()
        self._down_since = now()
        self._last_error = LastError(wall_time)
        self._changed = trio.Event()

    # -- what is going on --------------------------------------------------------------------------

    def state(self) -> tuple[str, str]:
        """One word and its reason: starting, joining, loading, degraded or ready."""
        assignment = self._assignment
        if self._engine is None:
            return "starting", self._why_no_engine()
        if assignment is None:
            return "joining", "no plan yet"
        if self._refusal is not None:
            return "degraded", self._refusal.reason
        if not self._is_outstanding:
            return "ready", ""
        if len(assignment.shard):
            return "loading", self._fetching.text() or f"loading {len(assignment.shard)} experts"
        return "loading", "giving up what it held"

    def report(self) -> dict[str, Any]:
        """This duty's part of the status document."""
        held = self._held or _NOTHING
        return {
            "shards": [list(each) for each in held.shard.ranges],
            "n_experts_held": len(held.shard),
            "shard_memory_bytes": held.memory_bytes,
            "fetch": self._fetching.report(),
            "engine": engine_report(self._engine),
            "data_address": f"{self._listening.host}:{self._listening.port}" if self._listening else None,
            **self._last_error.report(),
        }

    @property
    def engine(self) -> EnginePort | None:
        """The worker engine, while it is ready."""
        return self._engine

    async def engine_statistics(self) -> str:
        """The engine's counters as JSON. Raises `EngineFailed` when there is no engine."""
        if self._engine is None:
            raise EngineFailed("the worker engine is not running")
        return await self._engine.statistics_json()

    # -- from the core -----------------------------------------------------------------------------

    def take_event(self, event: NodeEvent) -> None:
        """Note what the core tells; never waits."""
        match event:
            case TermFollowed(term, _):
                self._term = term
                self._note_change()
            case TermVoided(epoch, number):
                self._voided = (epoch, number)
            case PlanReceived(plan, _):
                self._take_plan(plan)
            case _:
                pass

    def _take_plan(self, plan: Plan) -> None:
        """Follow this plan from now on. What can be said at once is: that it is served, or never can be."""
        version = (plan.epoch, plan.term, plan.revision)
        is_own = self._term == ProvenTerm(plan.epoch, plan.term, self._host.node_id)
        shard = ShardSet() if is_own else plan.shard_of(self._host.node_id)
        self._assignment = _Assignment(version, shard, is_own, self._flaw_of(version, shard))
        self._refusal, self._failures = None, 0
        if is_own:
            self._tell_lost("this node is the backbone now, and its backbone engine serves what it holds")
        if self._assignment.flaw is not None:
            self._refuse(self._assignment.flaw)
        self._tell_if_held()
        self._note_change()

    def _flaw_of(self, version: tuple[int, int, int], shard: ShardSet) -> ShardRefused | None:
        """Why this shard can never be held here: it is not of this model, or there is no room for it."""
        manifest = self._model.manifest
        for layer, _, end in shard.ranges:
            if layer not in manifest.moe_layers or end > manifest.n_expert:
                reason = f"the model has no such experts in layer {layer}"
                return ShardRefused(*version, "wrong_shard", reason)
        need, have = manifest.shard_size_bytes(shard), self._settings.memory_bytes
        if need <= have:
            return None
        reason = f"the shard needs {need >> 20} MiB and {have >> 20} MiB are offered"
        return ShardRefused(*version, "no_memory", reason, need, have)

    @property
    def _is_outstanding(self) -> bool:
        """Whether the engine is to be brought to hold something else than it does."""
        assignment = self._assignment
        if assignment is None or assignment.flaw is not None:
            return False
        return self._held is None or self._held.shard != assignment.shard

    # -- to the core -------------------------------------------------------------------------------

    def _tell_if_held(self) -> None:
        """Tell the core that its plan is served, where it is."""
        assignment, held = self._assignment, self._held
        if assignment is None or assignment.flaw is not None or held is None or self._is_outstanding:
            return
        self._refusal, self._failures = None, 0
        if self._engine is not None:
            self._last_error.note_ready()
        if not assignment.is_own:
            self._has_told_loaded = len(held.shard) > 0
            self._core.command(ShardLoaded(*assignment.version, held.memory_bytes))

    def _refuse(self, refusal: ShardRefused) -> None:
        """Tell the core why its plan is not served, unless it was told just that."""
        if refusal != self._refusal:
            self._refusal = refusal
            log.warning("shard_refused", revision=refusal.revision, code=refusal.code, reason=refusal.reason)
            self._core.command(refusal)

    def _tell_lost(self, reason: str) -> None:
        if self._has_told_loaded:
            self._has_told_loaded = False
            self._core.command(ShardLost(as_sentence(reason)))

    def _note_change(self) -> None:
        """Wake whoever waits for a plan, a term or an engine."""
        self._changed.set()
        self._changed = trio.Event()

    # -- from the backbone -------------------------------------------------------------------------

    async def grant_data(self, node_id: NodeId, request: DataRequest) -> DataGrant:
        """Have our engine expect a connection of that node's engine.

        The node is the term's backbone, or an auditor, whose worker engine dials.

        Raises `RemoteProtocolError` for what is not acceptable or not possible now, `EngineFailed` when the
        engine ends or is mute meanwhile.
        """
        term = self._core.check_proof(request.proof, node_id)
        if request.role == "worker":
            if node_id not in self._core.auditors:
                raise RemoteProtocolError("only an auditor's worker dials a holder", "not_an_auditor")
        elif term.backbone != node_id:
            raise RemoteProtocolError("the proof makes another node backbone", "not_backbone")
        verify_engine_certificate(request.engine_certificate, self._swarm.digest, node_id, request.role)
        await self._wait_followed(term)
        engine, listening = self._engine, self._listening
        if engine is None or listening is None:
            raise RemoteProtocolError(self._why_no_engine(), "engine_starting")
        if self._held is None:
            raise RemoteProtocolError("the engine loads its shard", "shard_loading")
        if not len(self._held.shard):
            raise RemoteProtocolError("no experts are held here", "no_shard")
        await self._set_fence(engine)
        token = secrets.token_bytes(16)
        own = self._core.record_of(self._host.node_id)
        expect = ExpectDialler(
            token,
            request.engine_certificate,
            request.role,
            node_id,
            self._now() + TOKEN_LIFETIME_NS,
            own.claim_digest() if own is not None else b"",
        )
        await engine.exchange(
            expect, DiallerExpected, ENGINE_TIMEOUT_S, where=lambda each: each.token == token
        )
        return DataGrant(
            self._reachable_host(listening.host),
            listening.port,
            token,
            engine.certificate,
            self._certificate() if request.role == "worker" else b"",
        )

    async def _wait_followed(self, term: ProvenTerm) -> None:
        """Wait until this term is on our disk: the core tells it only then."""
        with trio.move_on_after(FOLLOW_TIMEOUT_S):
            while self._fence < term[:2]:
                await self._changed.wait()
        if self._fence < term[:2]:
            raise RemoteProtocolError("the term is not on this node's disk yet", "term_not_followed")
        if self._term != term:
            raise RemoteProtocolError("another term is followed by now", "stale_term")
        if self._voided == term[:2]:
            raise RemoteProtocolError("there is evidence of a lie in this term", "void_term")

    @property
    def _fence(self) -> tuple[int, int]:
        return (0, 0) if self._term is None else (self._term.epoch, self._term.term)

    def _reachable_host(self, host: str) -> str:
        """Where others reach an engine that listens at ``host``: a wildcard means nothing to them."""
        if not ipaddress.ip_address(host).is_unspecified:
            return host
        hosts = [address.split("/")[2] for address in self._host.addresses()]
        return hosts[0] if hosts else host

    # -- tasks -------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep an engine running, and in it what the newest plan says, until cancelled."""
        async with open_unwrapping_nursery() as nursery:
            nursery.start_soon(self._keep_holding)
            await keep_running(self._run_engine, self._now, self._note_engine_failure)

    def _note_engine_failure(self, error: KvasirError) -> None:
        self._last_error.note(str(error))
        log.error("engine_failed", role="worker", reason=str(error))
        self._note_change()

    def _why_no_engine(self) -> str:
        reason = self._last_error.unrecovered
        return as_sentence("the worker engine is starting" + (f": {reason}" if reason else ""))

    async def _run_engine(self) -> NoReturn:
        """One engine's life: started, listening, told of each term, until it ends."""
        async with open_unwrapping_nursery() as nursery:
            engine = await self._start_engine(nursery, "worker", self._next_generation())
            try:
                listen = Listen(self._settings.data_host, self._settings.data_port)
                self._listening = await engine.exchange(listen, Listening, ENGINE_TIMEOUT_S)
                nursery.start_soon(self._hear_engine, engine)
                await self._certifier.certify(engine)
                self._note_speed(await self._measure(engine))
                self._engine = engine
                self._note_change()
                nursery.start_soon(self._keep_fenced, engine)
                nursery.start_soon(watch_engine, engine, self._load_lock)
                nursery.start_soon(self._certifier.keep_certified, engine)
                ended = EngineFailed(f"the worker engine ended: {await engine.wait_ended()}")
                self._tell_lost(str(ended))
                raise ended
            finally:
                self._engine = self._listening = None
                self._held = _NOTHING
                self._down_since = self._now()
                await engine.close()
                nursery.cancel_scope.cancel()

    async def _hear_engine(self, engine: EnginePort) -> None:
        async for event in engine.events:
            if isinstance(event, CertificationAdvanced):
                self._certifier.note_advance(event)
            else:
                log.warning("engine_message_unexpected", kind=event.kind)

    async def _measure(self, engine: EnginePort) -> int:
        """How long the engine takes for a row through an expert, by its own measurement."""
        settings = self._settings
        request = MeasureExperts(
            engine.next_request(),
            str(self._model.manifest_path),
            settings.n_threads,
            settings.kernel,
            settings.kernel_device,
        )
        try:
            measured = await engine.exchange(request, ExpertsMeasured, ENGINE_TIMEOUT_S)
        except KvasirError as error:
            if engine.has_ended:
                raise
            log.warning("experts_not_measured", reason=str(error))
            return 0
        log.info("experts_measured", row_ns=measured.expert_row_ns)
        return measured.expert_row_ns

    async def _set_fence(self, engine: EnginePort) -> None:
        """Tell this engine the term that is followed, if it has not heard of it yet.

        Of two that do so at once both may say it: whoever returns from here knows that it was said.
        """
        wanted = (engine, *self._fence)
        if self._term is not None and self._fenced != wanted:
            await engine.send(SetFence(self._term.epoch, self._term.term))
            self._fenced = wanted

    async def _wait_change(self) -> None:
        await self._changed.wait()

    async def _keep_fenced(self, engine: EnginePort) -> None:
        with contextlib.suppress(EngineFailed):  # whoever reads what it says notices its end
            while True:
                changed = self._changed
                await self._set_fence(engine)
                await changed.wait()

    async def _keep_holding(self) -> NoReturn:
        """Bring the engine to hold what the newest plan says, after each change and each failure."""
        while True:
            changed = self._changed
            delay_s = await self._try_holding()
            with trio.move_on_after(delay_s):
                await changed.wait()

    async def _try_holding(self) -> float:
        """Load what is outstanding, if anything is; in how many seconds to try again if nothing changes."""
        assignment, engine = self._assignment, self._engine
        if assignment is None or not self._is_outstanding:
            return math.inf
        if engine is None:
            return self._wait_for_engine(assignment)
        try:
            await self._load(engine, assignment)
        except KvasirError as error:
            return self._note_failed_load(assignment, error)
        self._tell_if_held()
        return math.inf

    def _wait_for_engine(self, assignment: _Assignment) -> float:
        waited = between(self._down_since, self._now())
        if waited < ENGINE_PATIENCE:
            return in_seconds(Duration(ENGINE_PATIENCE - waited))
        self._refuse(ShardRefused(*assignment.version, "engine_starting", self._why_no_engine()))
        return math.inf

    async def _load(self, engine: EnginePort, assignment: _Assignment) -> None:
        """Have the engine hold this shard. Its answer counts only while it runs.

        Until its experts are on the disk the engine serves what it holds.
        """
        is_wanted = await self._fetching.have(
            assignment.shard,
            lambda: self._assignment is not None and self._assignment.shard == assignment.shard,
            self._wait_change,
            is_damaged=self._failures > 0,
        )
        if not is_wanted:
            return
        async with self._load_lock:
            if engine.has_ended:
                return  # it ended while we waited our turn
            await self._set_fence(engine)
            self._held = None
            request = LoadShard(
                engine.next_request(),
                str(self._model.manifest_path),
                str(self._model.source_path),
                assignment.shard.encode(),
                self._settings.n_threads,
                self._settings.kernel,
                self._settings.kernel_device,
            )
            loaded = await engine.exchange(request, LoadedByEngine, LOAD_TIMEOUT_S)
        if engine is self._engine:
            self._held = _Held(assignment.shard, loaded.memory_bytes)
            log.info("shard_loaded", revision=assignment.version[2], experts=len(assignment.shard))

    def _note_failed_load(self, assignment: _Assignment, error: KvasirError) -> float:
        self._last_error.note(str(error))
        log.error("shard_not_loaded", revision=assignment.version[2], reason=str(error))
        if assignment is self._assignment:
            self._failures += 1
            if not assignment.is_own:  # the core asks nothing of us then
                room = (error.need_bytes, error.have_bytes) if isinstance(error, NoRoomOnDisk) else (0, 0)
                self._refuse(ShardRefused(*assignment.version, error.code, as_sentence(str(error)), *room))
        return retry_delay_s(self._failures, LOAD_DELAY_FIRST_S, LOAD_DELAY_MAX_S)
