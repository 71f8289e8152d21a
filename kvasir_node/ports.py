"""The ports: what a duty may expect of the world, and the guarantees behind each call.

Duties see these and no adapter. `app` gives them the real ones, tests give them twins in memory, and both
answer to the guarantees written here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import trio

from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.errors import EngineFailed
from kvasir_proto.expert_sources import ExpertRun, WantedExpert
from kvasir_proto.ids import NodeId, SwarmDigest
from kvasir_proto.limits import Role
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import EngineMessage
from kvasir_proto.node_core import NodeCommand, NodeView
from kvasir_proto.term_proof import ProvenTerm

ReplyT = TypeVar("ReplyT")

CONTROL_PROTOCOL: Final = "/kvasir/control/1.0.0"
"""Streams of one conversation each: a worker and its backbone, a request and its answer."""
CORE_PROTOCOL: Final = "/kvasir/core/1"
"""The stream that carries the cores' messages between two nodes, for as long as they have any."""
SESSION_PROTOCOL: Final = "/kvasir/session/1"
"""Streams of one session each, from a gateway's node to the backbone."""
EXPERTS_PROTOCOL: Final = "/kvasir/experts/1"
"""Streams on which one member gives another the bytes of experts."""


class ControlStream(Protocol):
    """A stream of whole messages to one authenticated node.

    Messages arrive whole, in order and at most once, or the stream ends. The other end's node id was proved
    by the transport before the stream was handed over.
    """

    async def send(self, body: bytes) -> None:
        """Queue a message; may wait while the queue is full. Raises `TransportUnavailable` at the end."""

    async def receive(self, timeout_s: float) -> bytes:
        """The next message. Raises `TransportUnavailable` at the end, or when ``timeout_s`` passes."""

    async def close(self) -> None:
        """End the stream; never waits for the other side."""


class Connector(Protocol):
    """This node's place in the network, as whoever dials sees it."""

    @property
    def node_id(self) -> NodeId:
        """Our own id."""

    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses at which others reach us, our id included; never a wildcard."""

    def is_connected(self, node_id: NodeId) -> bool:
        """Whether there is a connection to that node that is not known to be dead."""

    async def connect(self, address: str | Sequence[str]) -> NodeId:
        """Be connected to the node at this multiaddress, or at one of these, which all end in its id.

        Returns only when the other end has proved that id. Raises `TransportUnavailable` within a bounded
        time otherwise.
        """


class Host(Connector, Protocol):
    """This node's place in the network."""

    async def open_stream(self, node_id: NodeId, protocol: str = CONTROL_PROTOCOL) -> ControlStream:
        """A fresh stream to a node we have an address of. Raises `TransportUnavailable` in bounded time."""

    def set_stream_handler(
        self,
        handler: Callable[[NodeId, Any], Awaitable[None]],
        protocol: str = CONTROL_PROTOCOL,
        *,
        streams_per_node_max: int | None = None,
    ) -> None:
        """Serve the streams of one protocol that others open; each ends when ``handler`` returns or raises.

        Its first argument is the proved id of the node, its second a `ControlStream` on which the first
        message is there to be received. One node may have ``streams_per_node_max`` of them open, beside those
        that it may have of all other protocols together; None: they count among these.
        """


@dataclass(frozen=True, slots=True)
class CoreMessage:
    """A node said this."""

    sender: NodeId
    body: bytes


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The way to that node broke, or could not be opened just now. A hint: it may be there all the same."""

    node_id: NodeId
    reason: str


CoreEvent: TypeAlias = CoreMessage | ConnectionLost


class CoreStreams(Protocol):
    """Messages of the cores between this node and any other: best effort, whole, at most once.

    The sender's id is proved by the transport. Messages to one node arrive in the order they were sent, as
    far as they arrive, while one stream to it holds. A stream is opened when there is something to say, stays
    while it is used, and carries both directions. What cannot be sent soon is dropped, not kept: cores repeat
    what matters.
    """

    def send(self, node_id: NodeId, body: bytes) -> bool:
        """Queue a message, never waiting; whether nothing had to be dropped for it.

        When the node's queue is full its oldest message goes. Raises `LocalProtocolError` for a body that is
        empty or over the frame limit.
        """

    async def receive(self) -> CoreEvent:
        """The next message or loss, waiting as long as it takes. One event at a time for each caller.

        Of several nodes that talk at once each gets its turn, and one that talks faster than the limit is
        read more slowly.
        """


GossipTopic: TypeAlias = Literal["records", "terms"]
GOSSIP_TOPICS: Final[tuple[GossipTopic, ...]] = ("records", "terms")


class Gossiped(NamedTuple):
    """What came by gossip. `forwarder` handed it to us; who says it stands, signed, in `data`."""

    topic: GossipTopic
    data: bytes
    forwarder: NodeId


Accept: TypeAlias = Callable[[bytes], bool]
"""Whether data may be spread further: valid, and signed by whom it says.

Called once for each distinct message, in the middle of the network's work: memoise what costs; it must not
raise.
"""


class Gossip(Protocol):
    """Spreads small messages to every member that listens: best effort, each at most once, in no order.

    Equal data on one topic is one message for two minutes, whoever says it again. What `Accept` refuses is
    neither handed on nor received. A forwarder that sends more than the limit is not listened to for the
    rest of that moment. We do not receive our own.
    """

    def publish(self, topic: GossipTopic, data: bytes) -> bool:
        """Spread this, never waiting; False when too much was waiting already and this was dropped.

        Raises `LocalProtocolError` for data that is empty, over the size limit or refused by our own
        `Accept`.
        """

    async def receive(self) -> Gossiped:
        """The next message of any topic, waiting as long as it takes."""


class Claim(NamedTuple):
    """What a record says of itself once its signature holds: whose it is, and how new.

    Of two records of one node that with the higher `order` is the newer.
    """

    node_id: NodeId
    order: int


JudgeRecord: TypeAlias = Callable[[bytes], Claim | None]
"""None for what is no valid, unexpired record of this swarm. Memoise what costs; it must not raise."""


class RecordStore(Protocol):
    """Keeps each node's newest record where others find it: best effort, spread over the members.

    What is stored for a node is a record `JudgeRecord` says is that node's; a newer one replaces an older
    one and never the other way.
    """

    async def put(self, data: bytes) -> None:
        """Store a record under the node it is of, here and at the members nearest to its key.

        Until a newer one is put it is stored again now and then, so that it follows the members as they come
        and go. Returns when that was tried, within a bounded time. Raises `LocalProtocolError` for data that
        `JudgeRecord` refuses, that is too large, or that is older than what is stored here.
        """

    async def get(self, node_id: NodeId, timeout_s: float) -> bytes | None:
        """The newest record of that node that any of the members nearest to its key has, or we have.

        Others are asked each time. None when there is none, or none that is still valid; after ``timeout_s``
        what we have ourselves is the answer.
        """


class SwarmNetwork(Protocol):
    """Everything between the nodes of one swarm, running. See the ports it is made of."""

    @property
    def streams(self) -> CoreStreams:
        """Messages of the cores."""

    @property
    def gossip(self) -> Gossip:
        """What is said to everybody."""

    @property
    def record_store(self) -> RecordStore:
        """Where records are found."""

    def candidates(self) -> tuple[NodeId, ...]:
        """Nodes that discovery knows of: told, remembered from last time, heard on this LAN."""

    async def wait_candidates(self) -> None:
        """Wait until there may be others than `candidates` gave last."""

    def note_record(self, node_id: NodeId, addresses: Sequence[str]) -> None:
        """A member's signed record says where it is; it is remembered for next time."""

    def note_gone(self, node_id: NodeId) -> None:
        """A member is gone for good."""

    async def reach(self, node_id: NodeId) -> None:
        """Be connected to this node. Raises `TransportUnavailable` in bounded time."""

    async def flush(self) -> None:
        """Wait, for a bounded time, until what was said has left."""


class NetworkStarter(Protocol):
    """Starts what is between the nodes of a swarm."""

    async def __call__(self, nursery: trio.Nursery, swarm: SwarmDigest) -> SwarmNetwork:
        """The running network, which lives at most as long as ``nursery``."""


class SwarmCore(Protocol):
    """What duties may ask of this node's core. Never waits; what follows comes as events to `take_event`."""

    def command(self, request: NodeCommand) -> None:
        """Tell the core what this node wants, or what its engine says.

        Raises `LocalProtocolError` or `RemoteProtocolError` as `NodeCore.command` does.
        """

    def check_proof(self, proof: bytes, source: NodeId) -> ProvenTerm:
        """The term that a proof shows, which ``source`` brought along.

        Raises `RemoteProtocolError`: a bad proof, one of an older term (`stale_term`) or under an electorate
        that is not known yet (`unknown_electorate`, which is then asked for: it may be good a moment later).
        """

    def view(self) -> NodeView:
        """What this node believes now."""

    def record_of(self, node_id: NodeId) -> CapabilityRecord | None:
        """What a node says of itself, if a record of it counts here."""

    @property
    def auditors(self) -> frozenset[NodeId]:
        """Whose verdicts on others count in this swarm; nobody's where members are taken at their word."""

    @property
    def proof(self) -> bytes:
        """The proof of the term that is followed, or b""."""


class EnginePort(Protocol):
    """A running engine process, from start to end. `supervisor.Engine` says more."""

    pid: int
    backend: str
    certificate: bytes
    events: trio.MemoryReceiveChannel[EngineMessage]

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""

    def next_request(self) -> int:
        """A request number never used before on this engine."""

    async def send(self, message: EngineMessage) -> None:
        """Send; `EngineFailed` when it is gone."""

    async def exchange(
        self,
        message: EngineMessage | None,
        reply_type: type[ReplyT] | tuple[type[ReplyT], ...],
        timeout_s: float,
        *,
        where: Callable[[Any], bool] = ...,
    ) -> ReplyT:
        """Send and wait for the matching reply; raises the engine's fault, or `EngineFailed`."""

    async def statistics_json(self, timeout_s: float = ...) -> str:
        """Its counters as one JSON object; raises like `exchange`."""

    def kill(self, reason: str) -> None:
        """End it at once; ``reason`` is why, for `wait_ended`."""

    async def wait_ended(self) -> str:
        """Wait for its end; the reason."""

    def end_error(self, sentence: str) -> EngineFailed:
        """The error that tells of its end: `ModelAborted` where llama.cpp gave up on the model."""

    async def close(self) -> None:
        """End it within a bounded time."""


class EngineStarter(Protocol):
    """Starts engines for this node."""

    async def __call__(self, nursery: trio.Nursery, role: Role, generation: int) -> EnginePort:
        """A started, introduced engine that lives at most as long as ``nursery``."""


class ExpertKeeper(Protocol):
    """Has experts of this node's model on its disk."""

    async def keep(
        self, shard: ShardSet, progress: Callable[[int, int], None], *, is_damaged: bool = False
    ) -> None:
        """Have these experts on the disk, and see that they stay until others are asked for.

        Where something ``is_damaged``, what is there is compared with its digests before. ``progress`` is
        told (bytes done, bytes in all), in another thread. Raises `NoRoomOnDisk`, or `ModelUnusable` where no
        source gives them; may be cancelled, and then goes on where it was the next time.
        """

    async def keep_whole_model(self) -> bool:
        """Whether every expert is on the disk; where they were fetched, they stay then."""

    def came_from(self) -> Mapping[str, int]:
        """Bytes that the newest `keep` has fetched, by who gave them: `node ID`, or an address."""


TakeExperts: TypeAlias = Callable[[ExpertRun, int, bytes, str], Awaitable[tuple[WantedExpert, ...]]]
"""Takes in bytes of a run from a byte of its first expert on, given by whom; those that are damaged."""


class ExpertMembers(Protocol):
    """The other members as a source of experts."""

    async def fetch(
        self, wanted: Sequence[WantedExpert], take: TakeExperts, *, is_patient: bool = True
    ) -> None:
        """Have what they give of these taken in; returns, in bounded time after the last byte, when nobody
        is left to be asked. Who has somebody else to ask after them ``is_patient`` with nobody slow. Raises
        what ``take`` raises.
        """


class ExpertsHere(Protocol):
    """The bytes of experts that are on this node's disk."""

    async def read(self, tensor_name: str, first: int, end: int, offset: int, size_bytes_max: int) -> bytes:
        """Bytes of experts ``first`` to ``end`` of a tensor from byte ``offset`` on, as many as are here.

        Empty where the first of them is not here. Raises `LocalProtocolError` for what the model has not.
        """


def engine_report(engine: EnginePort | None) -> dict[str, Any] | None:
    """What a status report says about an engine process; None where none runs."""
    return None if engine is None else {"pid": engine.pid, "backend": engine.backend}
