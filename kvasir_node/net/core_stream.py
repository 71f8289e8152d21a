"""The cores' messages between two nodes: one stream that lives as long as there is something to say.

Keeps a bounded queue for each node, opens a stream when the first message waits, writes from one task a node
and reads every stream that is up, whoever opened it. It works on any `ports.Host`, so the twin in memory runs
this very code; it knows no message, and what is not sent soon it drops, because cores repeat what matters.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import structlog
import trio

from kvasir_node.backoff import retry_delay_s
from kvasir_node.net.dialler import Dialler
from kvasir_node.net.token_bucket import TokenBucket
from kvasir_node.ports import CORE_PROTOCOL, ConnectionLost, ControlStream, CoreEvent, CoreMessage, Host
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError, TransportUnavailable
from kvasir_proto.ids import NodeId
from kvasir_proto.limits import SWARM_FRAME_SIZE_MAX

GOODBYE: Final = b""
"""An empty frame: whoever sends it closes a stream it has no use for, and nothing is wrong."""
_STREAMS_A_NODE_MAX: Final = 2
"""Both nodes may open one at the same moment. Of more, the oldest goes: its other end forgot it."""
_RETRY_FIRST_S: Final = 1.0
_RETRY_MAX_S: Final = 30.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CoreStreamOptions:
    """How much is kept for others, and taken from them."""

    frame_size_max: int = SWARM_FRAME_SIZE_MAX
    """Bytes of one message. At most the host's limit."""
    queue_messages_max: int = 128
    queue_bytes_max: int = 4 << 20
    """For each node, waiting to be written. More of either makes the oldest go."""
    streams_max: int = 32
    """Nodes with an open stream before the one used longest ago is closed. A member talks with a view of 16
    and 7 electors at most; the rest is room for those that are just being probed.
    """
    idle_min_s: float = 5.0
    """A stream used more recently than this is not closed to make room."""
    messages_per_s_max: float = 200.0
    burst_max: float = 400.0
    """How fast one node is read. A member that probes, answers and votes says a dozen a second."""
    events_max: int = 256
    """Events that may wait for `receive`; then readers wait, and with them those who talk."""


@dataclass(slots=True)
class _Line:
    """All there is about one node."""

    queue: deque[bytes] = field(default_factory=deque)
    queued_bytes: int = 0
    streams: list[ControlStream] = field(default_factory=list)
    written: ControlStream | None = None
    """The one of them that messages are written to."""
    heard: list[ControlStream] = field(default_factory=list)
    """Those of them that something came on."""
    is_writing: bool = False
    used_at_s: float = 0.0
    failures_in_a_row: int = 0
    not_before_s: float = 0.0

    def note_heard(self, stream: ControlStream) -> None:
        """Something came on this stream; where things come on two, it is answered where it came.

        A node writes to one stream, so two that speak are two processes with one identity, a copied home:
        each is to hear what it is answered, and so of the other.
        """
        self.heard = [each for each in self.streams if each in self.heard or each is stream]
        if self.written in self.heard:
            self.written = stream


@dataclass(slots=True)
class CoreStreamCounts:
    """What happened so far; `CoreStreams.statistics` gives a copy."""

    sent: int = 0
    received: int = 0
    dropped_full: int = 0
    dropped_unreachable: int = 0
    streams_opened: int = 0
    streams_accepted: int = 0
    refused: int = 0
    """Streams ended because of what came on them."""


class CoreStreams:
    """See `ports.CoreStreams`. Between construction and `run` messages wait in their queues."""

    def __init__(self, host: Host, dialler: Dialler, options: CoreStreamOptions | None = None) -> None:
        self._host = host
        self._dialler = dialler
        self._options = CoreStreamOptions() if options is None else options
        self._lines: dict[NodeId, _Line] = {}
        self._counts = CoreStreamCounts()
        self._arriving, self._arrived = trio.open_memory_channel[CoreEvent](self._options.events_max)
        self._nursery: trio.Nursery | None = None

    def send(self, node_id: NodeId, body: bytes) -> bool:
        """See `ports.CoreStreams`."""
        assert node_id != self._host.node_id, "a node does not talk to itself"
        options = self._options
        if not 0 < len(body) <= options.frame_size_max:
            raise LocalProtocolError(
                f"a core message has 1 to {options.frame_size_max} bytes, not {len(body)}"
            )
        line = self._lines.setdefault(node_id, _Line())
        line.queue.append(body)
        line.queued_bytes += len(body)
        whole = True
        while len(line.queue) > options.queue_messages_max or line.queued_bytes > options.queue_bytes_max:
            line.queued_bytes -= len(line.queue.popleft())
            self._counts.dropped_full += 1
            whole = False
        self._start_writing(node_id, line)
        return whole

    async def receive(self) -> CoreEvent:
        """See `ports.CoreStreams`."""
        return await self._arrived.receive()

    def connected_nodes(self) -> tuple[NodeId, ...]:
        """The nodes with an open stream, in the order of their names."""
        return tuple(sorted(node_id for node_id, line in self._lines.items() if line.streams))

    def statistics(self) -> CoreStreamCounts:
        """Counts since the start."""
        counts = self._counts
        return CoreStreamCounts(*(getattr(counts, name) for name in CoreStreamCounts.__slots__))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Carry messages until cancelled. Started once."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._host.set_stream_handler(self._serve, CORE_PROTOCOL)
            for node_id, line in list(self._lines.items()):
                self._start_writing(node_id, line)
            task_status.started()
            await trio.sleep_forever()

    def _start_writing(self, node_id: NodeId, line: _Line) -> None:
        if self._nursery is not None and line.queue and not line.is_writing:
            line.is_writing = True
            self._nursery.start_soon(self._write, node_id, line)

    async def _write(self, node_id: NodeId, line: _Line) -> None:
        """Write what waits for one node; ends when nothing does."""
        try:
            while line.queue:
                try:
                    stream = await self._stream_to_write(node_id, line)
                except TransportUnavailable as error:
                    self._counts.dropped_unreachable += len(line.queue)
                    line.queue.clear()
                    line.queued_bytes = 0
                    await self._arriving.send(ConnectionLost(node_id, str(error)))
                    continue
                if not line.queue:  # all of it was dropped meanwhile
                    break
                body = line.queue.popleft()
                line.queued_bytes -= len(body)
                line.used_at_s = trio.current_time()
                try:
                    await stream.send(body)
                    self._counts.sent += 1
                except TransportUnavailable as error:
                    self._counts.dropped_unreachable += 1
                    await stream.close()
                    await self._lose(node_id, line, stream, str(error))
        finally:
            line.is_writing = False
            self._forget_unused()

    async def _stream_to_write(self, node_id: NodeId, line: _Line) -> ControlStream:
        """The same as last time while it is up: two streams of one node keep no order between them."""
        if line.written is None or line.written not in line.streams:
            line.written = line.streams[-1] if line.streams else await self._open(node_id, line)
        return line.written

    async def _open(self, node_id: NodeId, line: _Line) -> ControlStream:
        """A fresh stream. Raises `TransportUnavailable`, at once when the last ones came to nothing."""
        await self._dialler.reach(node_id)
        if line.streams:  # the other side was quicker
            return line.streams[-1]
        if trio.current_time() < line.not_before_s:
            raise TransportUnavailable(f"streams to node {node_id} keep failing")
        try:
            stream = await self._host.open_stream(node_id, CORE_PROTOCOL)
        except TransportUnavailable:
            self._postpone(line)
            raise
        self._counts.streams_opened += 1
        self._add(line, stream)
        self._tasks.start_soon(self._read_opened, node_id, line, stream)
        return stream

    async def _serve(self, node_id: NodeId, stream: ControlStream) -> None:
        """Read a stream the other node opened; its end is the end of this call."""
        self._counts.streams_accepted += 1
        line = self._lines.setdefault(node_id, _Line())
        self._add(line, stream)
        await self._read(node_id, line, stream)

    async def _read_opened(self, node_id: NodeId, line: _Line, stream: ControlStream) -> None:
        try:
            await self._read(node_id, line, stream)
        except RemoteProtocolError as error:
            log.warning("stream_refused", node=node_id, code=error.code, reason=error.reason)
        finally:
            await stream.close()

    async def _read(self, node_id: NodeId, line: _Line, stream: ControlStream) -> None:
        """Hand on what comes until the stream ends; then say so, unless the other side took its leave."""
        bucket = TokenBucket(self._options.messages_per_s_max, self._options.burst_max, trio.current_time())
        try:
            while stream in line.streams:
                body = await stream.receive(math.inf)
                if body == GOODBYE:
                    line.streams = [each for each in line.streams if each is not stream]
                    break
                if len(body) > self._options.frame_size_max:
                    raise RemoteProtocolError(f"a core message of {len(body)} bytes", "oversize")
                line.used_at_s = trio.current_time()
                line.failures_in_a_row = 0
                line.note_heard(stream)
                self._counts.received += 1
                while (wait_s := bucket.take(trio.current_time())) > 0.0:  # noqa: ASYNC110 - a rate
                    await trio.sleep(wait_s)
                await self._arriving.send(CoreMessage(node_id, body))
        except TransportUnavailable as error:
            await self._lose(node_id, line, stream, str(error))
        except RemoteProtocolError as error:
            self._counts.refused += 1
            await self._lose(node_id, line, stream, error.reason)
            raise
        finally:
            line.streams = [each for each in line.streams if each is not stream]
            self._forget_unused()

    async def _lose(self, node_id: NodeId, line: _Line, stream: ControlStream, reason: str) -> None:
        """A stream broke. Whoever notices first, its writer or its reader, says so."""
        if stream not in line.streams:
            return
        line.streams.remove(stream)
        if not line.streams:
            self._postpone(line)
            await self._arriving.send(ConnectionLost(node_id, reason))

    def _postpone(self, line: _Line) -> None:
        """Leave a node alone whose streams fail one after another; the first may be tried again at once."""
        line.failures_in_a_row += 1
        if line.failures_in_a_row > 1:
            line.not_before_s = trio.current_time() + retry_delay_s(
                line.failures_in_a_row - 1, _RETRY_FIRST_S, _RETRY_MAX_S
            )

    def _add(self, line: _Line, stream: ControlStream) -> None:
        """Take a stream into use, and make room: surplus ones of this node, then those of the least used."""
        now_s = line.used_at_s = trio.current_time()
        line.streams.append(stream)
        while len(line.streams) > _STREAMS_A_NODE_MAX:
            self._tasks.start_soon(self._take_leave, line.streams.pop(0))
        in_use = sorted((each.used_at_s, node_id) for node_id, each in self._lines.items() if each.streams)
        for used_at_s, node_id in in_use[: max(0, len(in_use) - self._options.streams_max)]:
            idle = self._lines[node_id]
            if now_s - used_at_s >= self._options.idle_min_s and not idle.queue:
                while idle.streams:
                    self._tasks.start_soon(self._take_leave, idle.streams.pop(0))

    async def _take_leave(self, stream: ControlStream) -> None:
        try:
            await stream.send(GOODBYE)
        except TransportUnavailable as error:
            log.debug("stream_ended_before_leave", reason=str(error))
        await stream.close()

    def _forget_unused(self) -> None:
        """Drop what is empty. What failed is remembered until it may be tried again, so that it is not
        sooner.
        """
        now_s = trio.current_time()
        for node_id, line in list(self._lines.items()):
            if not (line.streams or line.queue or line.is_writing) and line.not_before_s <= now_s:
                del self._lines[node_id]

    @property
    def _tasks(self) -> trio.Nursery:
        assert self._nursery is not None, "streams are carried by `run`"
        return self._nursery
