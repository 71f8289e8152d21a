"""Gossip among the members of one swarm, by libp2p's gossipsub, with what it gets wrong kept here.

libp2p 0.8.1's version ends the whole node when one task of it fails on what a stranger sent, dials whom a
stranger names, forgets nothing for minutes and reads a byte at a time. Messages are anonymous on the wire and
known by their content: what is spread is signed by its author already, so libp2p's second signature would
cost a tenth of a millisecond at each member and say nothing new. Whether data is valid `Accept` says.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog
import trio
from libp2p.peer.id import ID
from libp2p.pubsub import gossipsub, mcache, pubsub
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.rpc_queue import RpcQueue
from libp2p.tools.timed_cache.first_seen_cache import FirstSeenCache

from kvasir_node.backoff import retry_delay_s
from kvasir_node.net.buffered_stream import BufferedStream
from kvasir_node.net.host import Libp2pHost
from kvasir_node.net.token_bucket import TokenBucket
from kvasir_node.ports import GOSSIP_TOPICS, Accept, Gossiped, GossipTopic
from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest

_QUEUE_MESSAGES_MAX: Final = 512
_FORWARDERS_MAX: Final = 1024
_REMEMBERED_S: Final = 120
_REMEMBERED_MAX: Final = 1 << 17
"""Messages; more than that in two minutes is a flood, and then some are taken for new again."""
_NAMED_MAX: Final = 64
"""Messages asked for, or given, at one request."""
_PENDING_MAX: Final = 16
"""Messages kept for a node that has not said yet what it listens to."""
_RESTART_S: Final = 1.0
_OPENING_S: Final = 10.0
"""How long the opening of a stream to a connected node may take."""
_OPEN_AGAIN_MAX_S: Final = 16.0
"""The longest pause before a connected node that took no stream is asked again: a stranger, or one that still
waits for its model.
"""

log = structlog.get_logger(__name__)


class _LongerQueue(RpcQueue):
    """Messages waiting for one node. libp2p's 32 lose most of a burst of 50."""

    def __init__(self) -> None:
        super().__init__(max_size=_QUEUE_MESSAGES_MAX)


# Each message would carry the sender's signed addresses, checked twice: a tenth of what it costs. Addresses
# are in records, and found by the DHT.
for _module in (pubsub, gossipsub):
    _module.env_to_send_in_RPC = lambda _host: (b"", False)
    _module.maybe_consume_signed_record = lambda _message, _host, _libp2p_id: True
pubsub.RpcQueue = _LongerQueue


def _content_id(message: Any) -> bytes:
    name = message.topicIDs[0].encode() if message.topicIDs else b""
    return hashlib.sha256(name + b"\0" + message.data).digest()


# Its cache of recent messages takes no other name for a message than author and number, which ours have not.
mcache.default_msg_id_fn = _content_id
logging.getLogger("libp2p.pubsub").setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class GossipOptions:
    """How much is taken from others and kept for them."""

    message_size_max: int = 64 << 10
    """Bytes of one message."""
    messages_per_s_max: float = 100.0
    burst_max: float = 500.0
    """How many new messages one forwarder may bring, its own and those it passes on. A swarm of 2,000 that
    starts at once brings each member 2,000 records by six forwarders.
    """
    received_max: int = 2048
    """Messages that may wait for `receive`; then new ones are dropped."""
    publish_max: int = 64
    """Messages of our own that may wait to be spread."""
    degree: int = 6
    degree_low: int = 4
    degree_high: int = 12
    heartbeat_interval_s: float = 1.0
    """How often the mesh is looked after and what was missed is offered."""


@dataclass(slots=True)
class GossipCounts:
    """What happened so far."""

    published: int = 0
    received: int = 0
    refused: int = 0
    """By `Accept`, or because they were no messages of ours."""
    over_rate: int = 0
    dropped_full: int = 0
    failures: int = 0
    """Tasks of libp2p's that failed on what they were sent."""
    said_before: int = 0
    """Messages of our own that equal one of the last two minutes, and so went to nobody."""


class GossipMesh:
    """See `ports.Gossip`. Made once for a host, which must be running; `run` carries the messages."""

    def __init__(
        self,
        host: Libp2pHost,
        swarm: SwarmDigest,
        accept: Mapping[GossipTopic, Accept],
        options: GossipOptions | None = None,
    ) -> None:
        self._host = host
        self._options = GossipOptions() if options is None else options
        self._accept = dict(accept)
        self._names = {topic: f"/kvasir/{swarm.hex()[:16]}/{topic}" for topic in GOSSIP_TOPICS}
        self._topics = {name: topic for topic, name in self._names.items()}
        self._counts = GossipCounts()
        self._arriving, self._arrived = trio.open_memory_channel[Gossiped](self._options.received_max)
        self._to_publish: deque[tuple[GossipTopic, bytes]] = deque()
        self._wakeup = trio.Event()
        self._forwarders: OrderedDict[NodeId, TokenBucket] = OrderedDict()
        self._router = _Router(self._options)
        self._pubsub: _Pubsub | None = None

    def publish(self, topic: GossipTopic, data: bytes) -> bool:
        """See `ports.Gossip`."""
        if not 0 < len(data) <= self._options.message_size_max:
            raise LocalProtocolError(
                f"gossip has 1 to {self._options.message_size_max} bytes, not {len(data)}"
            )
        if not self._accept[topic](data):
            raise LocalProtocolError(f"our own message on {topic} is not valid")
        if len(self._to_publish) >= self._options.publish_max:
            self._counts.dropped_full += 1
            return False
        self._to_publish.append((topic, data))
        self._wakeup.set()
        return True

    async def receive(self) -> Gossiped:
        """See `ports.Gossip`."""
        return await self._arrived.receive()

    def statistics(self) -> GossipCounts:
        """Counts since the start."""
        return GossipCounts(*(getattr(self._counts, name) for name in GossipCounts.__slots__))

    def neighbours(self, topic: GossipTopic) -> tuple[NodeId, ...]:
        """The nodes that messages of this topic are passed on to."""
        mesh = self._router.mesh.get(self._names[topic], ())
        return tuple(sorted(NodeId(str(each)) for each in mesh))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part in the mesh until cancelled. Started once."""
        async with trio.open_nursery() as nursery:
            tasks = _Tasks(nursery, self._counts)
            service = self._pubsub = _Pubsub(self._host.libp2p, self._router, self)
            service._manager = self._router._manager = tasks
            nursery.start_soon(service.run)
            nursery.start_soon(self._router.run)
            await service.wait_until_ready()
            nursery.start_soon(service.keep_streams, self._options.heartbeat_interval_s)
            try:
                for name in self._names.values():
                    await service.subscribe(name)
                task_status.started()
                await self._publish_what_waits(service)
            finally:
                tasks.is_running = False
                service.seen_messages._stop_event.set()  # its thread; waiting for it would block
                nursery.cancel_scope.cancel()

    async def _publish_what_waits(self, service: _Pubsub) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup = trio.Event()
            while self._to_publish:
                topic, data = self._to_publish.popleft()
                message = rpc_pb2.Message(data=data, topicIDs=[self._names[topic]])
                try:
                    if service.has_seen(message):
                        self._counts.said_before += 1
                        log.warning("gossip_said_before", topic=topic)
                        continue
                    await service.push_msg(service.my_id, message)
                    self._counts.published += 1
                except Exception as error:  # whatever a stranger made its tables look like
                    self._counts.failures += 1
                    log.warning("gossip_publish_failed", reason=f"{type(error).__name__}: {error}")

    def admit(self, forwarder: NodeId, message: Any) -> bool:
        """Whether a message of another node may be looked at any further, before anything costly."""
        if (
            len(message.topicIDs) != 1
            or message.topicIDs[0] not in self._topics
            or not 0 < len(message.data) <= self._options.message_size_max
            or message.from_id
            or message.seqno
            or message.signature
            or message.key
        ):
            self._counts.refused += 1
            return False
        now_s = trio.current_time()
        bucket = self._forwarders.pop(forwarder, None)
        if bucket is None:
            bucket = TokenBucket(self._options.messages_per_s_max, self._options.burst_max, now_s)
        self._forwarders[forwarder] = bucket
        while len(self._forwarders) > _FORWARDERS_MAX:
            self._forwarders.popitem(last=False)
        if bucket.take(now_s) > 0.0:
            self._counts.over_rate += 1
            return False
        return True

    def is_valid(self, message: Any) -> bool:
        """What the topic's `Accept` says."""
        valid = self._accept[self._topics[message.topicIDs[0]]](bytes(message.data))
        if not valid:
            self._counts.refused += 1
        return valid

    def hand_on(self, forwarder: NodeId, message: Any) -> None:
        """Give a valid message, seen for the first time, to whoever receives."""
        topic = self._topics[message.topicIDs[0]]
        try:
            self._arriving.send_nowait(Gossiped(topic, bytes(message.data), forwarder))
            self._counts.received += 1
        except trio.WouldBlock:
            self._counts.dropped_full += 1


class _Router(GossipSub):
    def __init__(self, options: GossipOptions) -> None:
        super().__init__(
            # Later versions tell every neighbour of every message that they need not send it: for small
            # messages that costs what it saves.
            [PROTOCOL_ID_V11],
            options.degree,
            options.degree_low,
            options.degree_high,
            heartbeat_interval=options.heartbeat_interval_s,
            # We count for ourselves, before a message is checked; libp2p does after it was handed on.
            spam_protection_enabled=False,
            # Both would trade nodes of the mesh by their IP addresses, of which a LAN has one kind.
            adaptive_gossip_enabled=False,
            eclipse_protection_enabled=False,
            max_pending_messages_per_peer=_PENDING_MAX,
        )

    async def heartbeat(self) -> None:
        """Look after the mesh. libp2p's ends at the first surprise, and with it everything."""
        while True:
            try:
                await super().heartbeat()
            except Exception as error:  # whatever a stranger made its tables look like
                log.warning("gossip_heartbeat_failed", reason=f"{type(error).__name__}: {error}")
            await trio.sleep(_RESTART_S)

    async def _do_px(self, px_peers: list[Any]) -> None:
        """Dial nobody because a stranger said so."""
        await trio.lowlevel.checkpoint()

    async def handle_ihave(self, ihave_msg: Any, sender_peer_id: ID) -> None:
        """Ask for what was missed, a bounded number at a time."""
        del ihave_msg.messageIDs[_NAMED_MAX:]
        await super().handle_ihave(ihave_msg, sender_peer_id)

    async def handle_iwant(self, iwant_msg: Any, sender_peer_id: ID) -> None:
        """Answer with each message once. libp2p answers as often as it is named: a small request, a large
        answer.
        """
        wanted = list(dict.fromkeys(iwant_msg.messageIDs))[:_NAMED_MAX]
        del iwant_msg.messageIDs[:]
        iwant_msg.messageIDs.extend(wanted)
        await super().handle_iwant(iwant_msg, sender_peer_id)

    def _check_equivocation(self, _message: Any) -> bool:
        """Messages have no numbers to be used twice; equal content is the same message."""
        return True


class _Pubsub(Pubsub):
    def __init__(self, libp2p_host: Any, router: _Router, mesh: GossipMesh) -> None:
        self._mesh = mesh
        self._read: dict[ID, list[Any]] = {}
        self._opening: set[ID] = set()
        self._refusals: dict[ID, tuple[int, float]] = {}
        """How often in a row a connected node took no stream, and when it is asked again."""
        super().__init__(
            libp2p_host,
            router,
            strict_signing=False,
            msg_id_constructor=_content_id,
            seen_ttl=_REMEMBERED_S,
            max_subscriptions_per_rpc=16,
            max_subscriptions_per_peer=len(GOSSIP_TOPICS),
            # An answer to what was missed may hold several messages.
            max_inbound_rpc_size=max(1 << 20, 4 * mesh._options.message_size_max),
            allowed_topics=frozenset(mesh._topics),
        )
        # libp2p's remembers a message anew at each look, so that one repeated by somebody never ages.
        self.seen_messages._stop_event.set()
        self.seen_messages: Any = FirstSeenCache(_REMEMBERED_S)

    async def continuously_read_stream(self, stream: Any) -> None:
        """Read one node's messages, in large pieces."""
        streams = self._read.setdefault(stream.muxed_conn.peer_id, [])
        streams.append(stream)
        try:
            await super().continuously_read_stream(BufferedStream(stream, end_is_empty=False))
        finally:
            streams.remove(stream)
            if not streams:
                self._read.pop(stream.muxed_conn.peer_id, None)

    async def stream_handler(self, stream: Any) -> None:
        """Read what a node says to us, and speak to it from now on if we could not before."""
        libp2p_id = stream.muxed_conn.peer_id
        self._refusals.pop(libp2p_id, None)
        if libp2p_id not in self.peers:
            self.manager.run_task(self._handle_new_peer_with_retry, libp2p_id)
        await super().stream_handler(stream)

    async def keep_streams(self, interval_s: float) -> None:
        """See to it that there is a stream to each connected node that takes part, for as long as it does.

        libp2p tries once, when a node is connected, which may be before that node takes part. And it keeps
        the stream of a connection that was replaced, and so never says what we listen to.
        """
        while True:
            for libp2p_id, stream in list(self.peers.items()):
                if stream.muxed_conn.is_closed:
                    self._handle_dead_peer(libp2p_id)
            connected = [ID.from_base58(each) for each in self._mesh._host.connected_nodes()]
            for gone in self._refusals.keys() - set(connected):
                del self._refusals[gone]
            for libp2p_id in connected:
                _, again_s = self._refusals.get(libp2p_id, (0, 0.0))
                if libp2p_id not in self.peers and again_s <= trio.current_time():
                    self.manager.run_task(self._handle_new_peer_with_retry, libp2p_id)
            await trio.sleep(interval_s)

    async def _handle_new_peer_with_retry(self, peer_id: ID, _timeout: float | None = None) -> None:
        """Try once to open a stream to a connected node; `keep_streams` tries again, whatever went wrong."""
        if peer_id in self.peers or peer_id in self._opening or not self._peer_is_connected(peer_id):
            return
        self._opening.add(peer_id)
        try:
            with trio.fail_after(_OPENING_S):
                await self._handle_new_peer(peer_id)
            self._refusals.pop(peer_id, None)
        except Exception as error:  # libp2p raises many types here, none documented
            failures = self._refusals.get(peer_id, (0, 0.0))[0] + 1
            pause_s = retry_delay_s(failures, self._mesh._options.heartbeat_interval_s, _OPEN_AGAIN_MAX_S)
            self._refusals[peer_id] = failures, trio.current_time() + pause_s
            reason = f"{type(error).__name__}: {error}"
            log.debug("gossip_stream_refused", node=str(peer_id), failures=failures, reason=reason)
        finally:
            self._opening.discard(peer_id)

    def has_seen(self, message: Any) -> bool:
        """Whether an equal message was seen in the last two minutes."""
        return bool(self._is_msg_seen(message))

    async def push_msg(self, msg_forwarder: ID, msg: Any) -> None:
        """Check a message and pass it on. All of libp2p's steps that concern us, in an order that costs less.

        Without a wait from the first look to the mark, so that two copies are never both the first.
        """
        ours = msg_forwarder == self.my_id
        forwarder = NodeId(str(msg_forwarder))
        if self._is_msg_seen(msg) or (not ours and not self._mesh.admit(forwarder, msg)):
            return
        self._mark_msg_seen(msg)
        if not ours:
            if not self._mesh.is_valid(msg):
                return
            self._mesh.hand_on(forwarder, msg)
        await self.router.publish(msg_forwarder, msg)

    def _mark_msg_seen(self, msg: Any) -> None:
        if self.seen_messages.length() >= _REMEMBERED_MAX:
            self.seen_messages.cache.clear()
        super()._mark_msg_seen(msg)

    def _handle_dead_peer(self, peer_id: ID) -> None:
        """Forget a node whose stream ended; but what it said since, on a stream that lives, stays.

        What fails here would end the task that watches over all nodes.
        """
        lives = any(not stream.muxed_conn.is_closed for stream in self._read.get(peer_id, ()))
        listens = [topic for topic, nodes in self.peer_topics.items() if lives and peer_id in nodes]
        try:
            super()._handle_dead_peer(peer_id)
            for topic in listens:
                self.peer_topics.setdefault(topic, set()).add(peer_id)
            if listens:
                self._peer_subscription_count[peer_id] = len(listens)
        except Exception as error:
            log.warning("gossip_forget_failed", reason=f"{type(error).__name__}: {error}")

    def notify_subscriptions(self, _message: Any) -> None:
        """Nothing: messages are handed on in `push_msg`."""


class _Tasks:
    """Runs libp2p's tasks. In its own way one that fails ends all, and ten times a second it looks whether it
    still runs.
    """

    def __init__(self, nursery: trio.Nursery, counts: GossipCounts) -> None:
        self._nursery = nursery
        self._counts = counts
        self.is_running = True

    def run_task(self, task: Callable[..., Awaitable[Any]], *arguments: Any, **_names: Any) -> None:
        self._nursery.start_soon(self._run, task, arguments)

    def run_daemon_task(self, task: Callable[..., Awaitable[Any]], *arguments: Any, **_names: Any) -> None:
        self._nursery.start_soon(self._run, task, arguments)

    async def wait_finished(self) -> None:
        await trio.sleep_forever()

    async def _run(self, task: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        try:
            await task(*arguments)
        except Exception as error:  # whatever a stranger sent
            self._counts.failures += 1
            log.info("gossip_task_failed", reason=f"{type(error).__name__}: {error}")
