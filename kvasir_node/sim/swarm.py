"""The event queue, and the nodes on it: starting, stepping, crashing, pausing and restarting real cores.

One heap of (real time, sequence, what to call, arguments). Every message is encoded when it is sent and
decoded when it arrives; every `Persist` of a drain is durable before what the same drain says leaves, and
what later drains say waits behind it, as behind a driver that writes one thing after another. Timers are
the core's own `next_deadline`, by the node's own clock. Which faults happen when is decided elsewhere
(`faults.py`), and so is what must hold (`checkers.py`): this module tells the witness what happened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from random import Random
from typing import Any, Final, Protocol, TextIO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.sim.clocks import NodeClock
from kvasir_node.sim.mesh import MEASURED, Mesh, MeshOptions
from kvasir_node.sim.network import QUIET, Network, NetworkOptions
from kvasir_node.sim.store import NodeStore
from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import FetchRecord, Notice, Now, Persist, Publish, Send, Slot
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Duration, Instant, milliseconds, seconds
from kvasir_proto.messages import Family, Message

_FSYNC_MIN: Final = milliseconds(1)
_FSYNC_MAX: Final = milliseconds(8)
_FSYNC_SLOW_MAX: Final = milliseconds(400)

_DECODED_MAX: Final = 1024
"""Messages that are remembered by their bytes: what is said to many, or comes twice, is decoded once. They
are frozen, and decoding is a function of the bytes alone."""

HELD_MAX: Final = 512
"""Messages that wait for a paused process in its sockets' buffers; what is over is lost."""


class Core(Protocol):
    """The five verbs of `NodeCore`, and what reaches it beside messages."""

    def receive(self, message: Any, sender: NodeId, now: Now) -> None:
        """A message has arrived."""

    def receive_published(self, topic: Any, data: bytes, forwarder: NodeId, now: Now) -> None:
        """Gossip has arrived."""

    def receive_record(self, data: bytes, now: Now) -> None:
        """What `FetchRecord` asked for has arrived."""

    def command(self, request: Any, now: Now) -> None:
        """The driver or a person asks for something."""

    def tick(self, now: Now) -> None:
        """A deadline has come."""

    def next_deadline(self) -> Instant | None:
        """When to `tick` next."""

    def drain(self) -> Sequence[Any]:
        """The effects and events since the last drain."""

    def view(self) -> Any:
        """What the node shows of itself."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """One node of a simulation: its number, its key and the key's name. The first is the founder."""

    index: int
    private_key: Ed25519PrivateKey
    node_id: NodeId


class CoreKit(Protocol):
    """How to start and address one kind of core: the real one, or a small one in a test."""

    @property
    def family(self) -> Family[Any]:
        """The messages between cores."""

    def start(self, identity: NodeIdentity, stored: Mapping[Slot, bytes], entropy: Random, now: Now) -> Core:
        """A node's core, from what the node has stored."""

    def seed(self, node_ids: tuple[NodeId, ...]) -> object | None:
        """The request that tells a core whom to try first; None if there is no such request."""

    def leave(self, reason: str) -> object | None:
        """The request to leave in good order."""

    def connection_lost(self, node_id: NodeId) -> object | None:
        """The request that tells a core that a connection ended."""

    def react(self, swarm: Swarm, node: SimNode, event: object) -> None:
        """Do what the node's driver and engine do when the core says this."""


@dataclass(frozen=True, slots=True)
class Crashed:
    """The process is gone; `power_loss` took its machine as well."""

    power_loss: bool


@dataclass(frozen=True, slots=True)
class Started:
    """A core runs, for the first time or again."""

    restarted: bool


@dataclass(frozen=True, slots=True)
class Durable:
    """These bytes are on the node's disk now."""

    slot: Slot
    data: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """The core raised something: no input may make it."""

    what: str


@dataclass(frozen=True, slots=True)
class Overflowed:
    """A drain, or a timer that does not move, is over its bound."""

    what: str


class Witness(Protocol):
    """Who is told what happened: a core's own events, what it sends, and the five things above."""

    def saw(self, real: int, node: SimNode, event: object) -> None:
        """Something happened at this node at this real time."""


class Adversary(Protocol):
    """What a byzantine node does with what its core would say."""

    def outgoing(self, swarm: Swarm, node: SimNode, to: NodeId, message: Message) -> None:
        """Send something, or nothing, or more, instead of this."""

    def publishes(self, swarm: Swarm, node: SimNode, topic: str, data: bytes) -> None:
        """Publish something, or nothing, or more, instead of this."""


@dataclass(slots=True, eq=False)
class SimNode:
    """One simulated machine with its process."""

    identity: NodeIdentity
    clock: NodeClock
    entropy: Random
    store: NodeStore = field(default_factory=NodeStore)
    core: Core | None = None
    adversary: Adversary | None = None
    left_at: int | None = None
    is_paused: bool = False
    loses_while_paused: bool = False
    generation: int = 0
    starts: int = 0
    timer_at: int | None = None
    output_free_at: int = 0
    outputs_waiting: int = 0
    """Drains that wait for the disk: what later ones say waits behind them, also through a pause."""
    spins: int = 0
    ticked_at: int = -1 << 62
    held: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    messages_sent: int = 0
    bytes_sent: int = 0
    charges: int = 0
    """Messages of this node that a codec refused."""
    index: int = field(init=False)
    """Its number."""
    node_id: NodeId = field(init=False)
    """Its name."""

    def __post_init__(self) -> None:
        self.index = self.identity.index
        self.node_id = self.identity.node_id

    @property
    def is_honest(self) -> bool:
        """Whether its core's events may be held to the invariants."""
        return self.adversary is None

    @property
    def has_left(self) -> bool:
        """Whether it left in good order, for good."""
        return self.left_at is not None

    @property
    def is_up(self) -> bool:
        """Whether its process exists, paused or not."""
        return self.core is not None


@dataclass(frozen=True, slots=True)
class SwarmOptions:
    """What a simulation is made of, beside its faults. `drain_max` bounds the effects of one step."""

    seed: int
    network: NetworkOptions = QUIET
    mesh: MeshOptions = MEASURED
    fsync_min: Duration = _FSYNC_MIN
    fsync_max: Duration = _FSYNC_MAX
    fsync_slow: float = 0.0
    fsync_slow_max: Duration = _FSYNC_SLOW_MAX
    drain_max: int = 4096
    spins_max: int = 64


def key_of(seed: int, what: int | str) -> Ed25519PrivateKey:
    """A key that depends on nothing but the seed and what it is for."""
    return Ed25519PrivateKey.from_private_bytes(
        hashlib.sha256(f"kvasir-sim/{seed}/key/{what}".encode()).digest()
    )


class _Ignored:
    def saw(self, real: int, node: SimNode, event: object) -> None:
        """Nobody looks."""


class Swarm:
    """Nodes on one event queue. Times are real nanoseconds since the simulation began."""

    def __init__(
        self,
        options: SwarmOptions,
        kit: CoreKit,
        witness: Witness | None = None,
        trace: TextIO | None = None,
    ) -> None:
        self.options = options
        self.kit = kit
        self.now = 0
        self.nodes: list[SimNode] = []
        self.up_count = 0
        self.messages = 0
        self.bytes = 0
        self.corrupted_count = 0
        self.refused_by_codec = 0
        self.refused_by_core = 0
        self.refused_by_transport = 0
        self.notices: dict[str, int] = {}
        self.sent_by_kind: dict[str, int] = {}
        self.network = Network(options.network, self.randomness("network"))
        self.mesh = Mesh(
            options.mesh, self.network, self.randomness("mesh"), self.schedule, self._deliver_published
        )
        self._witness: Witness = witness or _Ignored()
        self._trace = trace
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0
        self._index_of: dict[NodeId, int] = {}
        self._twin_of: dict[int, int] = {}
        self._disk = self.randomness("disk")
        self._bytes_random = self.randomness("bytes")
        self._last_encoded: tuple[Message | None, bytes] = (None, b"")
        self._decode = lru_cache(maxsize=_DECODED_MAX)(partial(decode, family=kit.family))

    def randomness(self, what: str) -> Random:
        """A source of its own for each use, so that one more draw here changes nothing there."""
        return Random(f"kvasir-sim/{self.options.seed}/{what}")  # noqa: S311  # to be drawn again, not to be secret

    # --- the queue ------------------------------------------------------------------------------------------

    def schedule(self, at: int, call: Callable[..., None], arguments: tuple[Any, ...] = ()) -> None:
        """Call `call(real time, *arguments)` at that time, in the order of scheduling among equals."""
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, call, arguments))

    def run_until(self, end: int) -> None:
        """Let everything happen that happens until then."""
        heap = self._heap
        pop = heapq.heappop
        while heap and heap[0][0] <= end:
            at, _, call, arguments = pop(heap)
            self.now = at
            call(at, *arguments)
        self.now = end

    # --- nodes ----------------------------------------------------------------------------------------------

    def add_node(self, clock: NodeClock | None = None, twin_of: int | None = None) -> SimNode:
        """One machine more, without a process. A twin has another node's key, and half of its callers."""
        index = len(self.nodes)
        if twin_of is None:
            private_key = key_of(self.options.seed, index)
            node_id = node_id_of(private_key.public_key().public_bytes_raw())
            self._index_of[node_id] = index
        else:
            private_key = self.nodes[twin_of].identity.private_key
            node_id = self.nodes[twin_of].node_id
            self._twin_of[twin_of] = index
        node = SimNode(
            identity=NodeIdentity(index, private_key, node_id),
            clock=clock or NodeClock(),
            entropy=self.randomness(f"node/{index}"),
        )
        self.nodes.append(node)
        self.network.add_node()
        self.mesh.add_node()
        return node

    def node_of(self, node_id: NodeId) -> SimNode:
        """The machine with this name; of twins the first."""
        return self.nodes[self._index_of[node_id]]

    def tell_witness(self, node: SimNode, event: object) -> None:
        """Something that happened before the run began, and that whoever judges it has to know."""
        self._witness.saw(self.now, node, event)

    def start(self, node: SimNode, seeds: tuple[NodeId, ...] = ()) -> None:
        """Start the node's process, from what its disk has, and tell it whom to try first."""
        assert node.core is None
        self.up_count += 1
        node.generation += 1
        node.starts += 1
        node.timer_at = None
        node.output_free_at = self.now
        node.outputs_waiting = 0
        now = node.clock.now(self.now)
        node.core = self.kit.start(node.identity, node.store.stored(), node.entropy, now)
        self.log(node, "started" if node.starts == 1 else "restarted")
        self.mesh.connect(node.index, self.now)
        self._witness.saw(self.now, node, Started(node.starts > 1))
        request = self.kit.seed(seeds) if seeds else None
        if request is not None:
            self._step(node, node.core.command, request)
        else:
            self._act(node)

    def crash(self, node: SimNode, *, power_loss: bool = False) -> None:
        """The process is gone; writes under way may be lost. Its neighbours notice that connections ended."""
        assert node.core is not None
        self.log(node, "crashed", "power_loss" if power_loss else "")
        node.core = None
        self.up_count -= 1
        node.generation += 1
        node.is_paused = False
        node.held.clear()
        node.store.crash(self.now, self._disk)
        neighbours = self.mesh.neighbours_of(node.index)
        self.mesh.disconnect(node.index, self.now)
        if power_loss:
            node.clock.boot(self.now)
        else:
            for other in neighbours:
                if not self.network.is_cut(node.index, other):
                    at = self.now + self.network.delay()
                    self.schedule(at, self._tell_lost, (self.nodes[other], node.node_id))
        self._witness.saw(self.now, node, Crashed(power_loss))

    def pause(self, node: SimNode, *, loses: bool) -> None:
        """The process stops as it stands. What arrives waits (a stopped process), or is lost (suspend)."""
        assert node.core is not None
        self.log(node, "paused")
        node.is_paused = True
        node.loses_while_paused = loses

    def resume(self, node: SimNode) -> None:
        """The process goes on, and finds everything that waited."""
        if not node.is_paused:
            return
        self.log(node, "resumed")
        node.is_paused = False
        held, node.held = node.held, []
        for call, arguments in held:
            call(self.now, *arguments)

    def leave(self, node: SimNode, reason: str) -> None:
        """The node leaves in good order; its process ends a second later."""
        request = self.kit.leave(reason)
        node.left_at = self.now
        if node.core is None:
            return
        self.log(node, "leaves")
        if request is not None:
            self._step(node, node.core.command, request)
        self.schedule(self.now + seconds(1), self._end, (node, node.generation))

    def command(self, node: SimNode, request: object) -> None:
        """Hand a request to the node's core."""
        if node.core is not None:
            self._step(node, node.core.command, request)

    def command_later(self, node: SimNode, delay: Duration, request: object) -> None:
        """The same after a while, if the same process is there then."""
        self.schedule(self.now + delay, self._command_then, (node, node.generation, request))

    def _command_then(self, _: int, node: SimNode, generation: int, request: object) -> None:
        if node.core is None or node.generation != generation:
            return
        if node.is_paused:
            node.held.append((self._command_then, (node, generation, request)))
            return
        self._step(node, node.core.command, request)

    def _end(self, _: int, node: SimNode, generation: int) -> None:
        if node.core is not None and node.generation == generation:
            self.crash(node)

    def _tell_lost(self, _: int, node: SimNode, gone: NodeId) -> None:
        request = self.kit.connection_lost(gone)
        if request is None or node.core is None:
            return
        if node.is_paused:
            self._hold(node, self._tell_lost, (node, gone))
            return
        self._step(node, node.core.command, request)

    # --- stepping a core ------------------------------------------------------------------------------------

    def _step(self, node: SimNode, verb: Callable[..., None], *arguments: object) -> None:
        """Call one verb of the node's core, with both of its clocks, and do what it asks."""
        try:
            verb(*arguments, node.clock.now(self.now))
        except Exception as error:  # a bug of the core is what we are here to find
            self._raised(node, error)
            return
        self._act(node)

    def _raised(self, node: SimNode, error: Exception) -> None:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
        self._witness.saw(self.now, node, Raised(f"{type(error).__name__} at {place}: {error}"))
        self.crash(node)

    def _act(self, node: SimNode) -> None:
        assert node.core is not None
        effects = node.core.drain()
        if effects:
            if len(effects) > self.options.drain_max:
                self._witness.saw(self.now, node, Overflowed(f"{len(effects)} effects of one step"))
            free_at = max(self.now, node.output_free_at)
            for effect in effects:
                if type(effect) is Persist:
                    free_at += self._fsync_duration()
                    node.store.write(effect.slot, effect.data, free_at)
            if free_at > self.now or node.outputs_waiting:
                node.outputs_waiting += 1
                node.output_free_at = free_at
                self.schedule(free_at, self._flush, (node, node.generation, effects))
            else:
                self._carry_out(node, effects)
        if node.core is not None:
            self._arm(node)

    def _fsync_duration(self) -> int:
        options = self.options
        duration = options.fsync_min + int(self._disk.random() * (options.fsync_max - options.fsync_min))
        if options.fsync_slow and self._disk.random() < options.fsync_slow:
            duration += int(self._disk.random() * options.fsync_slow_max)
        return duration

    def _flush(self, _: int, node: SimNode, generation: int, effects: Sequence[Any]) -> None:
        if node.generation != generation:
            return
        if node.is_paused:
            node.held.append((self._flush, (node, generation, effects)))
            return
        node.store.complete(self.now)
        node.outputs_waiting -= 1
        self._carry_out(node, effects)

    def _carry_out(self, node: SimNode, effects: Sequence[Any]) -> None:
        for effect in effects:
            kind = type(effect)
            if kind is Send:
                self._witness.saw(self.now, node, effect.message)
                if node.adversary is None:
                    self.send(node, effect.to, effect.message)
                else:
                    node.adversary.outgoing(self, node, effect.to, effect.message)
            elif kind is Persist:
                self._witness.saw(self.now, node, Durable(effect.slot, effect.data))
            elif kind is Publish:
                if node.adversary is None:
                    self.publish(node, effect.topic, effect.data)
                else:
                    node.adversary.publishes(self, node, effect.topic, effect.data)
            elif kind is FetchRecord:
                self._fetch(node, effect)
            elif kind is Notice:
                self.notices[effect.event] = self.notices.get(effect.event, 0) + 1
                if self._trace is not None:
                    fields = (f"{key}={self._said(value)}" for key, value in effect.fields)
                    self.log(node, effect.event, " ".join(fields))
                self._witness.saw(self.now, node, effect)
            else:
                if self._trace is not None:
                    self._log_event(node, effect)
                self._witness.saw(self.now, node, effect)
                self.kit.react(self, node, effect)

    def _arm(self, node: SimNode) -> None:
        assert node.core is not None
        deadline = node.core.next_deadline()
        if deadline is None:
            return
        at = node.clock.real_of(deadline)
        if at <= self.now:
            at = self.now if node.spins < self.options.spins_max else self.now + milliseconds(1)
        if node.timer_at is None or at < node.timer_at:
            node.timer_at = at
            self.schedule(at, self._wake, (node, node.generation))

    def _wake(self, real: int, node: SimNode, generation: int) -> None:
        if node.generation != generation or node.timer_at != real or node.core is None:
            return
        if node.is_paused:
            node.held.append((self._wake_late, (node, generation)))
            return
        node.timer_at = None
        deadline = node.core.next_deadline()
        if deadline is not None and deadline <= node.clock.instant(real):
            self._count_spin(node)
            self._step(node, node.core.tick)
        else:
            self._arm(node)

    def _count_spin(self, node: SimNode) -> None:
        """A tick that comes with the one before means that it left the deadline where it was."""
        is_late = self.now - node.ticked_at <= milliseconds(1)
        node.ticked_at = self.now
        node.spins = node.spins + 1 if is_late else 0
        if node.spins == self.options.spins_max:
            self._witness.saw(self.now, node, Overflowed("a deadline that does not move"))

    def _wake_late(self, real: int, node: SimNode, generation: int) -> None:
        if node.generation == generation:
            node.timer_at = real
            self._wake(real, node, generation)

    # --- messages -------------------------------------------------------------------------------------------

    def send(self, node: SimNode, to: NodeId, message: Message) -> None:
        """Encode a message and give it to the network."""
        self.sent_by_kind[message.kind] = self.sent_by_kind.get(message.kind, 0) + 1
        last_message, data = self._last_encoded
        if message is not last_message:
            data = encode(message)
            self._last_encoded = (message, data)
        index = self._index_of.get(to)
        if (
            index is None
            or not self.network.filters
            or self.network.passes_filters(node.index, index, message)
        ):
            self.send_bytes(node, to, data)

    def send_bytes(self, node: SimNode, to: NodeId, data: bytes) -> None:
        """Give bytes to the network, whatever they are."""
        self.messages += 1
        self.bytes += len(data)
        node.messages_sent += 1
        node.bytes_sent += len(data)
        index = self._index_of.get(to)
        if index is None:
            return
        if self._twin_of and index in self._twin_of and node.index % 2:
            index = self._twin_of[index]
        for arrival in self.network.route(self.now, node.index, index):
            self.schedule(arrival.at, self._arrive, (self.nodes[index], node, data, arrival.corrupted))

    def _arrive(self, _: int, node: SimNode, sender: SimNode, data: bytes, corrupted: bool) -> None:
        self.network.arrived(sender.index, node.index)
        if node.core is None:
            return
        if node.is_paused:
            if node.loses_while_paused:
                return
            self._hold(node, self._receive, (node, sender, data, corrupted))
            return
        self._receive(self.now, node, sender, data, corrupted)

    def _hold(self, node: SimNode, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if len(node.held) < HELD_MAX:
            node.held.append((call, arguments))

    def _receive(self, _: int, node: SimNode, sender: SimNode, data: bytes, corrupted: bool) -> None:
        if node.core is None:
            return
        if corrupted:
            data = self._flip_bytes(data)
        try:
            message = self._decode(data)
        except RemoteProtocolError as error:
            sender.charges += 1
            self.refused_by_codec += 1
            if self._trace is not None:
                self.log(node, "refused", f"from={sender.index} {error.code}")
            return
        except Exception as error:  # arbitrary bytes give a message or a RemoteProtocolError
            self._raised(node, error)
            return
        if corrupted:
            # Still a message: Noise or TLS has seen to it that none such gets here.
            self.refused_by_transport += 1
            return
        if self._trace is not None:
            self.log(node, message.kind, f"from={sender.index}")
        self._judge(node, sender, node.core.receive, message, sender.node_id)

    def _judge(self, node: SimNode, sender: SimNode, verb: Callable[..., None], *arguments: object) -> None:
        """As `_step`, for what somebody said: what the core refuses costs the sender."""
        try:
            verb(*arguments, node.clock.now(self.now))
        except RemoteProtocolError as error:
            sender.charges += 1
            self.refused_by_core += 1
            if self._trace is not None:
                self.log(node, "refused", f"from={sender.index} {error.code}")
        except Exception as error:  # a bug of the core is what we are here to find
            self._raised(node, error)
            return
        self._act(node)

    def _flip_bytes(self, data: bytes) -> bytes:
        self.corrupted_count += 1
        changed = bytearray(data)
        for _ in range(self._bytes_random.randint(1, 4)):
            changed[self._bytes_random.randrange(len(changed))] ^= 1 << self._bytes_random.randrange(8)
        return bytes(changed)

    # --- what is published and fetched ----------------------------------------------------------------------

    def publish(self, node: SimNode, topic: str, data: bytes) -> None:
        """Give bytes to the mesh."""
        if self._trace is not None:
            self.log(node, "publishes", f"{topic} {len(data)} bytes")
        self.mesh.publish(self.now, node.index, node.node_id, topic, data)

    def _deliver_published(self, index: int, forwarder: int, topic: str, data: bytes) -> None:
        node, sender = self.nodes[index], self.nodes[forwarder]
        if node.core is None:
            return
        if node.is_paused:
            if not node.loses_while_paused:
                self._hold(node, self._receive_published, (node, sender, topic, data))
            return
        self._receive_published(self.now, node, sender, topic, data)

    def _receive_published(self, _: int, node: SimNode, sender: SimNode, topic: str, data: bytes) -> None:
        if node.core is not None:
            self._judge(node, sender, node.core.receive_published, topic, data, sender.node_id)

    def _fetch(self, node: SimNode, effect: FetchRecord) -> None:
        """Ask the member that named the digest; the DHT's holders are as far away."""
        source = self._index_of.get(effect.from_node)
        self.messages += 2
        if source is None or not self._answers(node.index, source):
            return
        data = self.mesh.find(effect.node_id, effect.digest)
        if data is not None:
            self.bytes += len(data)
            self.nodes[source].bytes_sent += len(data)
            at = self.now + self.network.delay() + self.network.delay()
            self.schedule(at, self._receive_record, (node, node.generation, data))

    def _answers(self, asker: int, source: int) -> bool:
        other = self.nodes[source]
        return (
            other.core is not None
            and not other.is_paused
            and not self.network.is_cut(asker, source)
            and not self.network.is_cut(source, asker)
        )

    def _receive_record(self, _: int, node: SimNode, generation: int, data: bytes) -> None:
        if node.generation != generation or node.core is None:
            return
        if node.is_paused:
            self._hold(node, self._receive_record, (node, generation, data))
            return
        self._step(node, node.core.receive_record, data)

    # --- the log --------------------------------------------------------------------------------------------

    def log(self, node: SimNode | None, event: str, fields: str = "") -> None:
        """One line of the event log, if there is one."""
        if self._trace is not None:
            who = "-" if node is None else f"n{node.index}"
            self._trace.write(f"{self.now / 1e9:.6f} {who} {event}{' ' if fields else ''}{fields}\n")

    def _log_event(self, node: SimNode, event: Any) -> None:
        name = type(event).__name__
        words = "".join(f"_{each.lower()}" if each.isupper() else each for each in name).lstrip("_")
        fields = (
            f"{each.name}={self._said(getattr(event, each.name))}" for each in dataclasses.fields(event)
        )
        self.log(node, words, " ".join(fields))

    def _said(self, value: object) -> str:
        """A value of an event in a few characters: nodes by number, bytes by length."""
        if isinstance(value, bytes):
            return f"{len(value)}B"
        if isinstance(value, str):
            index = self._index_of.get(NodeId(value))
            return value if index is None else f"n{index}"
        if isinstance(value, tuple):
            return f"({','.join(map(self._said, value))})"
        return type(value).__name__ if dataclasses.is_dataclass(value) else str(value)
