"""Twins of everything a duty needs, in memory: engines that answer as told, fences, and whole nodes.

An engine twin is the supervisor's real `Engine` on a stream in memory, with a script at the other end that
speaks the real messages; so what a duty says to an engine passes the real codec. A data connection between
two twins exists when its token was expected and its certificates are those of the two engines.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, cast

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from trio.testing import memory_stream_pair

from kvasir_node.driver.backbone_duty import BackboneDuty, BackboneSettings
from kvasir_node.driver.worker_duty import WorkerDuty, WorkerSettings
from kvasir_node.engine.certificate import EngineKey
from kvasir_node.model.store import StoredModel
from kvasir_node.supervisor import Engine
from kvasir_node.swarm_files import Founding, SavedPlan, SwarmFiles
from kvasir_proto.certificate import bind_engine
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import KvasirError, ModelUnusable
from kvasir_proto.framing import FrameReader, frame
from kvasir_proto.ids import NodeId, SessionId, SwarmDigest, node_id_of
from kvasir_proto.instants import Instant, WallTime
from kvasir_proto.limits import Role
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    ENGINE,
    CancelSession,
    ConnectHolder,
    DiallerExpected,
    EngineFault,
    EngineMessage,
    EngineStatistics,
    EvaluateLogits,
    ExpectDialler,
    Generate,
    HolderConnected,
    HolderLost,
    Listen,
    Listening,
    LoadShard,
    LoadTrunk,
    LogitsEvaluated,
    QueryStatistics,
    RemoveHolder,
    SessionEnded,
    SetFence,
    SetLease,
    ShardLoaded,
    Shutdown,
    TokenEmitted,
    TrunkLoaded,
)
from kvasir_proto.placement.plan import open_plan
from kvasir_proto.swarm_manifest import FoundedSwarm, open_swarm_manifest
from tests.node.driver.memory_network import MemoryHost, MemoryNetwork

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


async def wait_state(node: TwinFounder | TwinWorker, state: str) -> None:
    """Let simulated time pass until the node's word for how it is, is this one."""
    await until(lambda: node.state == state)


async def wait_engines(node: TwinNode, count: int) -> None:
    """Let simulated time pass until the node has started this many engines in all."""
    await until(lambda: len(node.engines.all) == count)


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
        self.connected: dict[NodeId, ConnectHolder] = {}
        """Whom a backbone is connected to."""
        self.expected: dict[bytes, ExpectDialler] = {}
        self.address = ("", 0)
        self._sessions: dict[SessionId, Generate] = {}
        self._stream = theirs
        self.engine = Engine(role, cast(Any, self.process), cast(Any, ours))
        self.engine.certificate = certificate
        self.engine.backend = "twin"

    def count(self, kind: type[Any]) -> int:
        """How many messages of this type control has sent."""
        return sum(isinstance(each, kind) for each in self.received)

    async def say(self, message: EngineMessage) -> None:
        """Say something to control."""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self._stream.send_all(frame(encode(message), ENGINE.size_bytes_max))

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
            case LoadShard():
                shard = ShardSet.decode(message.shard)
                await self.say(ShardLoaded(message.request, 1000, shard.digest()))
            case ExpectDialler():
                self.expected[message.token] = message
                await self.say(DiallerExpected(message.token))
            case LoadTrunk():
                await self.say(TrunkLoaded(message.request, 4, 96, message.n_ctx, True, 1))
            case ConnectHolder():
                await self._connect(message)
            case RemoveHolder():
                self.connected.pop(message.node_id, None)
            case Generate():
                await self._generate(message)
            case CancelSession():
                if message.session in self._sessions:
                    await self.end_session(message.session, "cancelled")
            case EvaluateLogits():
                await self.say(LogitsEvaluated(message.request, len(message.token_ids), 1, 0, (), ()))
            case SetFence() | SetLease():
                pass
            case _:
                raise AssertionError(f"the {self.role} twin was sent {message.kind}")

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
        for position in range(min(message.n_tokens, self.n_tokens_emitted_max)):
            await self.say(TokenEmitted(message.session, position, position + 10, b"x", 0, 1))
        if message.n_tokens <= self.n_tokens_emitted_max:
            await self.end_session(message.session, "length")

    async def end_session(self, session: SessionId, reason: Any, code: str = "", detail: str = "") -> None:
        """Say that a session is over."""
        message = self._sessions.pop(session)
        await self.say(SessionEnded(session, reason, code, detail, 1, message.n_tokens, 1, 1, 2, 3))

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
        self._world.nursery.start_soon(twin.run)
        nursery.start_soon(twin.engine._run)
        return twin.engine


class MemoryFences:
    """A fence store whose writes can be looked at."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []
        self.on_save: Callable[[int, int], None] = lambda _epoch, _term: None

    def load(self) -> tuple[int, int]:
        """See `ports.FenceStore`."""
        return self.saved[-1] if self.saved else (0, 0)

    def save(self, epoch: int, term: int) -> None:
        """See `ports.FenceStore`."""
        assert (epoch, term) >= self.load()
        self.on_save(epoch, term)
        self.saved.append((epoch, term))


@dataclass
class Disk:
    """What a node finds again after a crash."""

    fences: MemoryFences = field(default_factory=MemoryFences)
    manifest: bytes | None = None
    plan: bytes | None = None
    generation: int = 0
    generation_error: KvasirError | None = None
    """Raised instead of counting."""

    def next_generation(self) -> int:
        """One more."""
        if self.generation_error is not None:
            raise self.generation_error
        self.generation += 1
        return self.generation


class _Life:
    """A node's tasks, which end together."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.error: BaseException | None = None


class TwinNode:
    """What a founder and a worker have in common: a key, a disk, a place in the network, a life."""

    def __init__(self, world: World, key: Ed25519PrivateKey) -> None:
        self.world = world
        self.key = key
        self.node_id = node_of(key)
        self.host: MemoryHost = world.network.host(self.node_id)
        self.disk = Disk()
        self._life = _Life()
        self.engines = TwinEngines(world, key, self._swarm_digest)

    def _swarm_digest(self) -> SwarmDigest:
        raise NotImplementedError

    def _make_duty(self) -> Any:
        raise NotImplementedError

    def start(self) -> None:
        """Begin a life with what is on the disk."""
        self._life = _Life()
        self.duty = self._make_duty()
        self.world.network.serve(self.node_id, self.duty.serve_stream)
        self.world.nursery.start_soon(self._live, self._life)

    async def _live(self, life: _Life) -> None:
        try:
            with life.scope:
                await self.duty.run()
        except Exception as error:
            life.error = error
        finally:
            life.ended.set()

    async def crash(self) -> None:
        """End as if killed: nobody is told, streams and engines just end."""
        self.world.network.drop(self.node_id)
        for engine in self.engines.all:
            engine.die()
        self._life.scope.cancel()
        await self._life.ended.wait()

    async def stop(self) -> None:
        """End in good order, as `app.Node` does it."""
        if isinstance(self.duty, WorkerDuty):
            await self.duty.leave()
        self._life.scope.cancel()
        await self._life.ended.wait()
        self.world.network.drop(self.node_id)

    @property
    def failure(self) -> BaseException | None:
        """What ended the node's life, if something did."""
        return self._life.error

    @property
    def has_ended(self) -> bool:
        """Whether its life is over."""
        return self._life.ended.is_set()


class TwinFounder(TwinNode):
    """A backbone."""

    duty: BackboneDuty

    def __init__(self, world: World, founding: Founding, key: Ed25519PrivateKey, **settings: Any) -> None:
        super().__init__(world, key)
        self.founding = founding
        self.backbone_file_error: ModelUnusable | None = None
        self.save_error: KvasirError | None = None
        """Raised instead of saving a plan."""
        self.settings = BackboneSettings(
            **{
                "workers_min": 1,
                "holders": None,
                "n_ctx": 64,
                "n_ubatch": 32,
                "n_threads": 1,
                "device": "none",
            }
            | settings
        )

    def _swarm_digest(self) -> SwarmDigest:
        return self.founding.swarm.digest

    def _save_plan(self, signed: bytes) -> None:
        if self.save_error is not None:
            raise self.save_error
        self.disk.plan = signed

    def _saved_plan(self) -> SavedPlan | None:
        signed = self.disk.plan
        if signed is None:
            return None
        return SavedPlan(open_plan(signed, self.founding.swarm.digest, self.node_id), signed)

    async def _find_backbone_file(self) -> Path:
        if self.backbone_file_error is not None:
            raise self.backbone_file_error
        return self.world.model.backbone_path

    def _make_duty(self) -> BackboneDuty:
        return BackboneDuty(
            node_key=self.key,
            founding=self.founding,
            model=self.world.model,
            find_backbone_file=self._find_backbone_file,
            host=self.host,
            start_engine=self.engines,
            next_generation=self.disk.next_generation,
            settings=self.settings,
            saved_plan=self._saved_plan(),
            save_plan=self._save_plan,
            now=now,
            wall_time=wall_time,
        )

    @property
    def state(self) -> str:
        """The duty's word for how it is."""
        return self.duty.state()[0]

    def member(self, worker: TwinNode) -> dict[str, Any]:
        """A member's line in the status report."""
        return next(each for each in self.duty.report()["members"] if each["node_id"] == worker.node_id)

    @property
    def revision(self) -> int:
        """The revision of the plan in force."""
        return int(self.duty.report()["plan"]["revision"])


class TwinWorker(TwinNode):
    """A worker."""

    duty: WorkerDuty

    def __init__(
        self, world: World, key: Ed25519PrivateKey, bootstrap: tuple[str, ...], **settings: Any
    ) -> None:
        super().__init__(world, key)
        defaults: dict[str, Any] = {
            "data_host": "127.0.0.1",
            "data_port": 0,
            "n_threads": 1,
            "memory_bytes": 1 << 30,
            "device": "twin",
        }
        self.settings = WorkerSettings(**{"bootstrap": bootstrap} | defaults | settings)
        self.model_error: ModelUnusable | None = None

    def _swarm(self) -> FoundedSwarm | None:
        return None if self.disk.manifest is None else open_swarm_manifest(self.disk.manifest)

    def _swarm_digest(self) -> SwarmDigest:
        swarm = self._swarm()
        assert swarm is not None
        return swarm.digest

    def _remember(self, manifest: bytes) -> None:
        self.disk.manifest = manifest

    async def _find_model(self, digest: bytes) -> StoredModel:
        await trio.lowlevel.checkpoint()
        if self.model_error is not None:
            raise self.model_error
        assert digest == self.world.model.manifest.digest()
        return self.world.model

    def _make_duty(self) -> WorkerDuty:
        return WorkerDuty(
            node_key=self.key,
            swarm=self._swarm(),
            remember_swarm=self._remember,
            find_model=self._find_model,
            fences=self.disk.fences,
            host=self.host,
            start_engine=self.engines,
            next_generation=self.disk.next_generation,
            settings=self.settings,
            now=now,
            wall_time=wall_time,
        )

    @property
    def state(self) -> str:
        """The duty's word for how it is."""
        return self.duty.state()[0]


class HasHost(Protocol):
    """A node that can be joined through."""

    host: MemoryHost


class World:
    """A network and the nodes in it; `open_world` makes one."""

    def __init__(self, nursery: trio.Nursery, model: StoredModel, directory: Path) -> None:
        self.nursery = nursery
        self.model = model
        self.network = MemoryNetwork(nursery)
        self._directory = directory
        self._nodes: list[TwinNode] = []
        self._pids = itertools.count(1)

    def next_pid(self) -> int:
        """A process id nobody had."""
        return next(self._pids)

    def found(
        self, number: int = 0, *, rules: Mapping[str, Any] | None = None, **settings: Any
    ) -> TwinFounder:
        """A founder that lives; ``settings`` as in `BackboneSettings`, ``rules`` as in `SwarmFiles.found`."""
        key = node_key(number)
        files = SwarmFiles(self._directory / f"founder-{number}")
        founding = files.found(key, self.model.manifest.digest(), self.model.name, **(rules or {}))
        founder = TwinFounder(self, founding, key, **settings)
        self._nodes.append(founder)
        founder.start()
        return founder

    def join(self, number: int, *founders: HasHost, start: bool = True, **settings: Any) -> TwinWorker:
        """A worker that joins through these nodes; ``settings`` as in `WorkerSettings`."""
        bootstrap = tuple(each.host.addresses()[0] for each in founders)
        worker = TwinWorker(self, node_key(number), bootstrap, **settings)
        self._nodes.append(worker)
        if start:
            worker.start()
        return worker

    def engine_at(self, host: str, port: int) -> TwinEngine | None:
        """The worker engine that listens there."""
        for node in self._nodes:
            for engine in node.engines.all:
                if engine.is_alive and engine.address == (host, port):
                    return engine
        return None


@contextlib.asynccontextmanager
async def open_world(model: StoredModel, directory: Path) -> AsyncIterator[World]:
    """A world that ends with the block, and in which no node may have failed unnoticed."""
    async with trio.open_nursery() as nursery:
        world = World(nursery, model, directory)
        yield world
        failures = [each.failure for each in world._nodes if each.failure is not None]
        assert not failures, failures
        nursery.cancel_scope.cancel()
