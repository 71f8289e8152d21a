"""Twins of what a duty needs, in memory: engines that answer as told, and the world they are in.

An engine twin is the supervisor's real `Engine` on a stream in memory, with a script at the other end that
speaks the real messages; so what a duty says to an engine passes the real codec. A data connection between
two twins exists when its token was expected and its certificates are those of the two engines.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final, cast

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from trio.testing import memory_stream_pair

from kvasir_node.engine.certificate import EngineKey
from kvasir_node.model.store import StoredModel
from kvasir_node.supervisor import Engine
from kvasir_proto.capability import BATCH_CLASSES, KernelClass
from kvasir_proto.certificate import bind_engine
from kvasir_proto.codec import decode, encode
from kvasir_proto.framing import FrameReader, frame
from kvasir_proto.ids import NodeId, SessionId, SwarmDigest, node_id_of
from kvasir_proto.instants import Instant, WallTime
from kvasir_proto.limits import Role
from kvasir_proto.manifest import ShardSet
from kvasir_proto.measured_kernel import PROBE_VERSION, KeptMeasurement, MeasuredClass, MeasuredKernel
from kvasir_proto.messages.engine import (
    ENGINE,
    AnswersTimed,
    CancelSession,
    CertificationAdvanced,
    CertifyKernel,
    ChallengeHolder,
    ConnectHolder,
    DiallerExpected,
    EngineFault,
    EngineMessage,
    EngineStatistics,
    EvaluateLogits,
    ExpectDialler,
    ExpertsMeasured,
    Generate,
    HolderChallenged,
    HolderConnected,
    HolderLost,
    KernelCertified,
    Listen,
    Listening,
    LoadOwnShard,
    LoadShard,
    LoadTrunk,
    LogitsEvaluated,
    MeasureExperts,
    OwnShardLoaded,
    QueryStatistics,
    RecomputeRows,
    RemoveHolder,
    RowsRecomputed,
    SessionEnded,
    SessionOpened,
    SetFence,
    SetLease,
    ShardLoaded,
    Shutdown,
    TokenEmitted,
    TrunkLoaded,
)
from tests.node.driver.memory_network import MemoryNetwork

PROGRAMS: Final = (bytes([5]) * 32,)
"""What a trunk asks for, by digest."""

WALL_TIME_AT_START: Final = 1_800_000_000_000_000_000
ENGINE_START_S: Final = 1.0
"""What the start of an engine takes, in the world of the twins."""

PATIENCE_S: Final = 300.0
"""Simulated seconds; a condition that is not met by then never will be."""


def node_key(number: int) -> Ed25519PrivateKey:
    """The same key for the same number."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"node {number}".encode()).digest())


def node_of(key: Ed25519PrivateKey) -> NodeId:
    """The node id of a key."""
    return node_id_of(key.public_key().public_bytes_raw())


def now() -> Instant:
    """Trio's clock as the duties want it."""
    return Instant(round(trio.current_time() * 1e9))


def wall_time() -> WallTime:
    """A calendar that follows trio's clock."""
    return WallTime(WALL_TIME_AT_START + now())


async def until(condition: Callable[[], Any]) -> None:
    """Let simulated time pass until ``condition`` holds."""
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - a mock clock waits for nothing
            await trio.sleep(0.05)


def measured_kernel(asked: CertifyKernel, **changes: Any) -> MeasuredKernel:
    """What a kernel in F32 that is in every tolerance measures of itself."""
    accumulation = changes.pop("accumulation", "F32")
    is_short = accumulation != "F32"
    kernel = KernelClass(("f32",), BATCH_CLASSES, "F32", accumulation, True, True)
    rel_l2, gate = (1e-2, None) if is_short else (1e-7, 2e-6)
    values: dict[str, Any] = {
        "backend": asked.kernel,
        "device": asked.device,
        "kernel_build": asked.kernel_build,
        "model_digest": bytes(32),
        "probe_version": PROBE_VERSION,
        "seed": asked.seed,
        "classes": (MeasuredClass(kernel, rel_l2, gate, not is_short),),
        "not_probed": (),
        "unfit": ("backbone", "output") if is_short else (),
        "figures": bytes(32),
    }
    return MeasuredKernel(**values | changes)


class MemoryMeasurements:
    """A `MeasurementStore` in memory."""

    def __init__(self) -> None:
        self.kept: dict[bytes, KeptMeasurement] = {}

    async def load(self, key: bytes) -> KeptMeasurement | None:
        """See `MeasurementStore`."""
        await trio.lowlevel.checkpoint()
        return self.kept.get(key)

    async def save(self, key: bytes, kept: KeptMeasurement) -> None:
        """See `MeasurementStore`."""
        await trio.lowlevel.checkpoint()
        self.kept[key] = kept


class Life:
    """A duty's tasks, which end together."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def live(self, run: Callable[[], Awaitable[Any]]) -> None:
        """Run it; what it raises is kept."""
        try:
            with self._scope:
                await run()
        except Exception as error:
            self.error = error
        finally:
            self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether it is over."""
        return self._ended.is_set()

    async def end(self) -> None:
        """Cancel it, and wait for its end."""
        self._scope.cancel()
        await self._ended.wait()


class _TwinProcess:
    """What the supervisor expects of a process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.on_kill: Callable[[], None] = lambda: None
        self._ended = trio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        self.end(-9)
        self.on_kill()

    def end(self, status: int) -> None:
        if self.returncode is None:
            self.returncode = status
            self._ended.set()


class TwinEngine:
    """One engine process that does as it is told; see ``refusals``, ``ignored`` and the methods."""

    def __init__(self, world: World, node_id: NodeId, role: Role, certificate: bytes, pid: int) -> None:
        ours, theirs = memory_stream_pair()
        self.world = world
        self.node_id = node_id
        self.role = role
        self.certificate = certificate
        self.process = _TwinProcess(pid)
        self.process.on_kill = self._close_stream
        self.received: list[EngineMessage] = []
        self.refusals: dict[type[Any], EngineFault] = {}
        """Message types that are answered with this fault; the request number is filled in."""
        self.ignored: set[type[Any]] = set()
        """Message types that get no answer."""
        self.n_tokens_emitted_max = 1 << 30
        """A session stops there and waits to be cancelled, or for the engine to end."""
        self.token_s = 0.0
        """How long each token of a session takes."""
        self.connected: dict[NodeId, ConnectHolder] = {}
        """Whom a backbone is connected to."""
        self.expected: dict[bytes, ExpectDialler] = {}
        self.leases: list[SetLease] = []
        """Every lease that a backbone was told."""
        self.own: LoadOwnShard | None = None
        """What a backbone holds itself."""
        self.address = ("", 0)
        self.expert_row_ns = 5000
        """What a worker's measurement of itself gives."""
        self.answers_to_recomputations: tuple[Any, str] = ("quarantined", "3 of 3 rows")
        self.answers_to_challenges: tuple[Any, str] = ("verified", "256 rows of 2 experts")
        """What an auditor makes of a worker's answers, and why."""
        self.arithmetic: dict[str, Any] = {}
        """What a worker measures of its kernel, where that is not the best."""
        self._sessions: dict[SessionId, Generate] = {}
        self._stream = theirs
        self._saying = trio.Lock()
        self.engine = Engine(role, cast(Any, self.process), cast(Any, ours))
        self.engine.certificate = certificate
        self.engine.backend = "twin"

    def count(self, kind: type[Any]) -> int:
        """How many messages of this type control has sent."""
        return sum(isinstance(each, kind) for each in self.received)

    async def say(self, message: EngineMessage) -> None:
        """Say something to control."""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            if self._saying.locked():  # only then does it take a turn of the scheduler
                await self._saying.acquire()
            else:
                self._saying.acquire_nowait()
            try:
                await self._stream.send_all(frame(encode(message), ENGINE.size_bytes_max))
            finally:
                self._saying.release()

    async def say_raw(self, data: bytes) -> None:
        """Say what is no message."""
        await self._stream.send_all(data)

    def die(self, status: int = -9) -> None:
        """End at once, as a killed process does."""
        self.process.end(status)
        self._close_stream()

    def _close_stream(self) -> None:
        self._stream.send_stream.close()
        self._stream.receive_stream.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self.process.returncode is None

    async def lose_holder(self, node_id: NodeId, code: str, reason: str = "told to") -> None:
        """A backbone says that it has given a holder up."""
        self.connected.pop(node_id, None)
        await self.say(HolderLost(node_id, code, reason))

    async def time_answers(self, node_id: NodeId, mean_ns: int) -> None:
        """A backbone says how long a holder takes for its small answers."""
        await self.say(AnswersTimed(node_id, mean_ns))

    async def run(self) -> None:
        """Answer control until the end."""
        reader = FrameReader(ENGINE.size_bytes_max)
        try:
            while data := await self._stream.receive_some(65536):
                for body in reader.feed(data):
                    message = decode(body, ENGINE)
                    self.received.append(message)
                    if isinstance(message, Shutdown) and Shutdown not in self.ignored:
                        self.die(0)
                        return
                    await self._answer(message)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            self.die(0)

    async def _answer(self, message: EngineMessage) -> None:
        fault = self.refusals.get(type(message))
        if type(message) in self.ignored:
            return
        if fault is not None:
            request = getattr(message, "request", None)
            await self.say(EngineFault(request, fault.code, fault.detail, fault.exit_code))
            return
        match message:
            case QueryStatistics():
                await self.say(EngineStatistics(message.request, '{"experts_missing_total": 0, "rows": 3}'))
            case Listen():
                self.address = (message.host, message.port or 5000 + self.process.pid)
                await self.say(Listening(*self.address))
            case MeasureExperts():
                await self.say(ExpertsMeasured(message.request, self.expert_row_ns))
            case CertifyKernel():
                await self.say(CertificationAdvanced(message.request, 1, 2, "F32 sums of F32 rows"))
                model = {"model_digest": self.world.model.manifest.digest()}
                measured = measured_kernel(message, **model | self.arithmetic)
                await self.say(KernelCertified(message.request, measured, ""))
            case ChallengeHolder():
                await self.say(self._challenge(message))
            case RecomputeRows():
                await self.say(self._recompute(message))
            case LoadShard():
                shard = ShardSet.decode(message.shard)
                await self.say(ShardLoaded(message.request, 1000, shard.digest()))
            case ExpectDialler():
                self.expected[message.token] = message
                await self.say(DiallerExpected(message.token))
            case LoadTrunk():
                await self.say(
                    TrunkLoaded(message.request, 4, 96, message.n_ctx, True, 1, 9_000_000, PROGRAMS)
                )
            case ConnectHolder():
                await self._connect(message)
            case LoadOwnShard():
                self.own = message
                shard = ShardSet.decode(message.shard)
                await self.say(OwnShardLoaded(message.request, 500, shard.digest()))
            case RemoveHolder():
                self.connected.pop(message.node_id, None)
                if self.own is not None and self.own.node_id == message.node_id:
                    self.own = None
            case Generate():
                await self._generate(message)
            case CancelSession():
                if message.session in self._sessions:
                    await self.end_session(message.session, "cancelled")
            case EvaluateLogits():
                await self.say(LogitsEvaluated(message.request, len(message.token_ids), 1, 0, (), ()))
            case SetLease():
                self.leases.append(message)
            case SetFence():
                pass
            case _:
                raise AssertionError(f"the {self.role} twin was sent {message.kind}")

    def _recompute(self, message: RecomputeRows) -> RowsRecomputed:
        outcome, reason = self.answers_to_recomputations
        return RowsRecomputed(message.request, outcome, reason, 3)

    def _challenge(self, message: ChallengeHolder) -> HolderChallenged:
        there = self.world.engine_at(message.host, message.port)
        expected = there.expected.pop(message.token, None) if there is not None else None
        answers: tuple[Any, str] = ("inconclusive", "the handshake failed")
        if there is not None and expected is not None and expected.certificate == self.certificate:
            answers = there.answers_to_challenges
        outcome, reason = answers
        return HolderChallenged(message.request, outcome, reason, 256, 0, bytes(32))

    async def _connect(self, message: ConnectHolder) -> None:
        there = self.world.engine_at(message.host, message.port)
        if there is None or there.node_id != message.node_id:
            await self.say(HolderLost(message.node_id, "unreachable", "nobody listens there"))
            return
        expected = there.expected.pop(message.token, None)
        certificates_fit = message.certificate == there.certificate and (
            expected is not None and expected.certificate == self.certificate
        )
        if not certificates_fit:
            await self.say(HolderLost(message.node_id, "unreachable", "the handshake failed"))
            return
        self.connected[message.node_id] = message
        await self.say(HolderConnected(message.node_id))

    async def _generate(self, message: Generate) -> None:
        self._sessions[message.session] = message
        if self.token_s:
            await self.say(SessionOpened(message.session))
            self.world.nursery.start_soon(self._emit_all, message)
        else:
            await self._emit_all(message)

    async def _emit_all(self, message: Generate) -> None:
        first = len(message.token_ids)
        for position in range(first, first + min(message.n_tokens, self.n_tokens_emitted_max)):
            if self.token_s:
                await trio.sleep(self.token_s)
            if message.session not in self._sessions or not self.is_alive:
                return
            await self.emit(message.session, position)
        if message.n_tokens <= self.n_tokens_emitted_max:
            await self.end_session(message.session, "length")

    async def emit(self, session: SessionId, position: int) -> None:
        """Say a token, under the lease that was told last."""
        lease = self.leases[-1]
        await self.say(TokenEmitted(session, position, position + 10, b"x", lease.epoch, lease.term))

    async def end_session(
        self, session: SessionId, reason: Any, code: str = "", detail: str = "", retry_after_ns: int = 0
    ) -> None:
        """Say that a session is over."""
        n_tokens = self._sessions.pop(session).n_tokens
        await self.say(SessionEnded(session, reason, code, detail, 1, n_tokens, 1, 1, 2, 3, retry_after_ns))

    @property
    def sessions(self) -> list[SessionId]:
        """Sessions that run."""
        return list(self._sessions)


class TwinEngines:
    """Starts engine twins for one node; remembers all it ever started."""

    def __init__(self, world: World, key: Ed25519PrivateKey, swarm_digest: Callable[[], SwarmDigest]) -> None:
        self._world = world
        self._key = key
        self._swarm_digest = swarm_digest
        self.all: list[TwinEngine] = []
        self.before_start: Callable[[TwinEngine], None] = lambda _engine: None
        """Called with each new engine before it hears anything."""
        self.failure: Exception | None = None
        """Raised by the next starts instead of starting anything."""

    @property
    def last(self) -> TwinEngine:
        """The engine started last."""
        return self.all[-1]

    async def __call__(self, nursery: trio.Nursery, role: Role, generation: int) -> Engine:
        await trio.sleep(ENGINE_START_S)
        if self.failure is not None:
            raise self.failure
        engine_key = EngineKey.generate()
        binding = bind_engine(self._key, self._swarm_digest(), engine_key.public_der, role, generation)
        certificate = engine_key.certificate(binding).public_bytes(Encoding.DER)
        twin = TwinEngine(self._world, node_of(self._key), role, certificate, self._world.next_pid())
        self.before_start(twin)
        self.all.append(twin)
        self._world.engines.append(twin)
        self._world.nursery.start_soon(twin.run)
        nursery.start_soon(twin.engine._run)
        return twin.engine


class World:
    """A network and the engines in it; `open_world` makes one."""

    def __init__(self, nursery: trio.Nursery, model: StoredModel, directory: Path) -> None:
        self.nursery = nursery
        self.model = model
        self.directory = directory
        self.network = MemoryNetwork(nursery)
        self.engines: list[TwinEngine] = []
        self._lives: list[Life] = []
        self._pids = itertools.count(1)

    def next_pid(self) -> int:
        """A process id nobody had."""
        return next(self._pids)

    def live(self, run: Callable[[], Awaitable[Any]]) -> Life:
        """Have a duty run until its life ends."""
        life = Life()
        self._lives.append(life)
        self.nursery.start_soon(life.live, run)
        return life

    @property
    def failures(self) -> list[BaseException]:
        """What ended lives, where something did."""
        return [each.error for each in self._lives if each.error is not None]

    def engine_at(self, host: str, port: int) -> TwinEngine | None:
        """The worker engine that listens there."""
        for engine in self.engines:
            if engine.is_alive and engine.address == (host, port):
                return engine
        return None


@contextlib.asynccontextmanager
async def open_world(model: StoredModel, directory: Path) -> AsyncIterator[World]:
    """A world that ends with the block, and in which no node may have failed unnoticed."""
    async with trio.open_nursery() as nursery:
        world = World(nursery, model, directory)
        yield world
        assert not world.failures, world.failures
        nursery.cancel_scope.cancel()
