"""A libp2p stream that carries whole messages, and that may be cancelled anywhere.

Two tasks of the host own the libp2p stream: one writes what was queued, one reads and cuts frames. Those
who use a stream only touch bounded queues, because libp2p's own calls must not be cancelled: a write
cancelled midway breaks every stream of the connection, a read cancelled while it acknowledges loses the
bytes it took. A queue that stays full, an end that stays silent and a stream that broke all come out as
`TransportUnavailable`.
"""

from __future__ import annotations

from typing import Any, Final

import structlog
import trio
from libp2p.network.stream.exceptions import StreamEOF

from kvasir_proto.errors import RemoteProtocolError, TransportUnavailable
from kvasir_proto.framing import FrameReader, frame
from kvasir_proto.ids import NodeId

QUEUE_FRAMES_MAX: Final = 16
"""Messages that may wait in each direction. A sender waits, then; a reader that does not read slows the
other.
"""
SEND_TIMEOUT_S: Final = 10.0
"""How long a message may wait for a place in the queue before the stream is taken for broken."""
LINGER_S: Final = 5.0
"""How long, after we closed our side, the other side has to close its own before the stream is reset."""
_READ_SIZE: Final = 1 << 16
_CLEANUP_S: Final = 6.0

log = structlog.get_logger(__name__)


class Libp2pControlStream:
    """A stream of whole messages to one authenticated node; `ports.ControlStream` states the guarantees."""

    def __init__(self, stream: Any, node_id: NodeId, frame_size_max: int) -> None:
        self.node_id: Final = node_id
        """The node at the other end; libp2p checked that it has the key."""
        self._stream = stream
        self._frame_size_max = frame_size_max
        self._to_write, self._written = trio.open_memory_channel[bytes](QUEUE_FRAMES_MAX)
        self._arrived, self._to_receive = trio.open_memory_channel[bytes](QUEUE_FRAMES_MAX)
        self._first: bytes | None = None
        self._end: Exception = TransportUnavailable("the stream has ended")
        self._scope = trio.CancelScope()
        self._closing = False
        self._all_sent = False
        self._all_received = False
        self._finished = trio.Event()

    async def send(self, body: bytes) -> None:
        """Queue one message.

        Returns when it is queued, not when it has arrived. Raises `LocalProtocolError` if it is too large,
        and `TransportUnavailable` if the stream has ended or the other side takes nothing any more.
        """
        data = frame(body, self._frame_size_max)
        try:
            with trio.fail_after(SEND_TIMEOUT_S):
                await self._to_write.send(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self._unavailable() from None
        except trio.TooSlowError:
            self._abort(TransportUnavailable("the other side does not take what is sent to it"))
            raise self._unavailable() from None

    async def receive(self, timeout_s: float) -> bytes:
        """The next message.

        Raises `TransportUnavailable` when none came within `timeout_s` (the stream goes on: it may be asked
        again), or when the stream has ended; `RemoteProtocolError` when what came is no frame.
        """
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            with trio.fail_after(timeout_s):
                return await self._to_receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            if isinstance(self._end, RemoteProtocolError):
                raise RemoteProtocolError(self._end.reason, self._end.code) from None
            raise self._unavailable() from None
        except trio.TooSlowError:
            raise TransportUnavailable(f"node {self.node_id} sent nothing for {timeout_s:g} s") from None

    async def close(self) -> None:
        """End the stream: what is queued is still sent, nothing more is taken. Never waits for the other
        side.
        """
        if not self._closing:
            self._closing = True
            self._end = TransportUnavailable("the stream was closed on this side")
            self._to_write.close()
            self._to_receive.close()
        await trio.lowlevel.checkpoint()

    async def wait_first(self, timeout_s: float) -> None:
        """Wait until there is something to `receive`, which still gives it. Raises as `receive` does."""
        self._first = await self.receive(timeout_s)

    async def wait_finished(self) -> None:
        """Wait until libp2p's stream is gone, which is at most `LINGER_S` and a write's patience after
        `close`.
        """
        await self._finished.wait()

    async def abort(self) -> None:
        """Break the stream off; what is queued is lost, and the other side sees a reset."""
        self._abort(TransportUnavailable("the stream was broken off on this side"))
        await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Own the libp2p stream until it ends. The host starts this, once, in a task that nobody else
        cancels.
        """
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._read)
                    await self._write()
                    nursery.cancel_scope.deadline = trio.current_time() + LINGER_S
        finally:
            self._closing = True
            self._to_write.close()
            self._written.close()
            self._arrived.close()
            await self._let_go()
            self._finished.set()

    def _unavailable(self) -> TransportUnavailable:
        # A fresh exception each time: one object raised in several tasks would collect all their tracebacks.
        return TransportUnavailable(f"{self._end} (node {self.node_id})")

    def _abort(self, reason: Exception) -> None:
        if not self._closing:
            self._closing = True
            self._end = reason
        self._scope.cancel()

    async def _write(self) -> None:
        """Write what was queued, in order, until the queue is closed; then tell the other side it was all."""
        try:
            async for data in self._written:
                await self._stream.write(data)
            await self._stream.close_write()
            self._all_sent = True
        except Exception as error:  # libp2p raises a dozen types for a stream that is gone
            self._abort(TransportUnavailable(f"the stream broke: {type(error).__name__} {error}".rstrip()))
            await trio.lowlevel.checkpoint()

    async def _read(self) -> None:
        """Give each whole frame to the receiver until the other side ends or breaks the stream."""
        reader = FrameReader(self._frame_size_max)
        try:
            while True:
                data = await self._stream.read(_READ_SIZE)
                if not data:
                    raise StreamEOF
                for body in reader.feed(data):
                    await self._hand_over(body)
        except StreamEOF:
            try:
                reader.finish()
                self._arrived.close()
                self._all_received = True
            except RemoteProtocolError as error:
                self._abort(error)
        except RemoteProtocolError as error:
            self._abort(error)
        except Exception as error:  # as above
            self._abort(TransportUnavailable(f"the stream broke: {type(error).__name__} {error}".rstrip()))

    async def _hand_over(self, body: bytes) -> None:
        try:
            await self._arrived.send(body)
        except trio.BrokenResourceError:
            # We closed our side: the rest is read only to learn when the other side has closed its own.
            await trio.lowlevel.checkpoint()

    async def _let_go(self) -> None:
        """Give libp2p's stream back: it keeps half-closed streams, and a place among 256, until told."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLEANUP_S):
            try:
                if self._all_sent and self._all_received:
                    await self._stream.close()
                else:
                    await self._stream.reset()
            except Exception as error:  # the connection is gone, and the stream with it
                log.debug("stream_cleanup_failed", reason=f"{type(error).__name__}: {error}")
