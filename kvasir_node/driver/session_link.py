"""One session's messages between a gateway and a backbone, whole and typed, on whatever carries bytes.

Between two nodes that is a stream of the network; where a node is gateway and backbone in one, a pair of
queues takes its place, so that both ends are the same code as everywhere. Bounds are those of what carries
it: a reader that does not read holds up its sender, and after a while ends the link.
"""

from __future__ import annotations

from typing import Final

import trio

from kvasir_node.ports import ControlStream
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import TransportUnavailable
from kvasir_proto.messages.session import SESSION, SessionMessage

QUEUE_MESSAGES_MAX: Final = 16
SEND_TIMEOUT_S: Final = 10.0


class SessionLink:
    """One end. What is received was checked field by field; what does not fit raises as `decode` does."""

    def __init__(self, stream: ControlStream) -> None:
        self._stream = stream

    async def send(self, message: SessionMessage) -> None:
        """Queue a message; may wait while the queue is full.

        Raises `TransportUnavailable` at the end, or when nobody takes it, and `LocalProtocolError` for what
        the protocol does not allow.
        """
        await self._stream.send(encode(message))

    async def receive(self, timeout_s: float) -> SessionMessage:
        """The next message. Raises `TransportUnavailable` at the end, or after ``timeout_s``."""
        return decode(await self._stream.receive(timeout_s), SESSION)

    async def close(self) -> None:
        """End the link; never waits for the other side."""
        await self._stream.close()


class _Queues:
    """One end of a link that never leaves this process; see `ports.ControlStream`."""

    def __init__(
        self, outgoing: trio.MemorySendChannel[bytes], incoming: trio.MemoryReceiveChannel[bytes]
    ) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    async def send(self, body: bytes) -> None:
        try:
            with trio.fail_after(SEND_TIMEOUT_S):
                await self._outgoing.send(body)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise TransportUnavailable("the session's other end has gone") from None
        except trio.TooSlowError:
            await self.close()
            raise TransportUnavailable("the session's other end takes nothing any more") from None

    async def receive(self, timeout_s: float) -> bytes:
        try:
            with trio.fail_after(timeout_s):
                return await self._incoming.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise TransportUnavailable("the session's other end has gone") from None
        except trio.TooSlowError:
            raise TransportUnavailable(f"the session's other end was silent for {timeout_s:g} s") from None

    async def close(self) -> None:
        self._outgoing.close()
        self._incoming.close()
        await trio.lowlevel.checkpoint()


def link_within() -> tuple[SessionLink, SessionLink]:
    """The two ends of a link between a gateway and a backbone that are one node."""
    there_in, there_out = trio.open_memory_channel[bytes](QUEUE_MESSAGES_MAX)
    back_in, back_out = trio.open_memory_channel[bytes](QUEUE_MESSAGES_MAX)
    return SessionLink(_Queues(there_in, back_out)), SessionLink(_Queues(back_in, there_out))
