"""A libp2p stream that is read in large pieces, for those of libp2p's services that read byte by byte.

Each read of a yamux stream sends a window update, an encrypted frame of its own, and libp2p reads the length
before each message a byte at a time: that was a fifth of the cost of a gossip message.
"""

from __future__ import annotations

from typing import Any, Final

from libp2p.network.stream.exceptions import StreamEOF

_READ_SIZE: Final = 1 << 16


class BufferedStream:
    """Everything but reading goes to the stream itself.

    With ``end_is_empty`` the end of the stream is an empty read, not libp2p's exception: its DHT takes the
    exception for a failure, resets the stream and logs a warning, for every stream that was simply closed.
    """

    def __init__(self, stream: Any, *, end_is_empty: bool) -> None:
        self._stream = stream
        self._end_is_empty = end_is_empty
        self._buffer = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, size: int) -> bytes:
        """At least one byte and at most `size`, or, at the end, none."""
        if not self._buffer:
            try:
                self._buffer += await self._stream.read(max(size, _READ_SIZE))
            except StreamEOF:
                if not self._end_is_empty:
                    raise
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data
