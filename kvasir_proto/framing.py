"""Where one message ends and the next begins: a length before each body.

A frame is the length of its body as four bytes, most significant first, and the body. The reader is given
bytes as they happen to arrive and gives back whole bodies, so it works on any stream and any split of it. It
never holds more than one frame's limit plus what it was last fed, and it does not know what a body means.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError

HEADER_SIZE: Final = 4
"""Bytes before each body."""


def frame(body: bytes, limit: int) -> bytes:
    """The body with its length in front. Raises `LocalProtocolError` for a body over `limit` bytes."""
    if len(body) > limit:
        raise LocalProtocolError(f"a frame of {len(body)} bytes is over the limit of {limit}")
    return len(body).to_bytes(HEADER_SIZE, "big") + body


class FrameReader:
    """Cuts a stream of bytes into the bodies of its frames.

    `limit` is the largest body accepted, in bytes. After one `RemoteProtocolError` the stream has no frame
    boundaries any more, so every later call raises the same error.
    """

    def __init__(self, limit: int) -> None:
        if not 0 < limit < 1 << (8 * HEADER_SIZE):
            raise ValueError(f"a frame cannot have a limit of {limit} bytes")
        self._limit = limit
        self._buffer = bytearray()
        self._failure: RemoteProtocolError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[bytes]:
        """Take the next bytes of the stream; iterate the result for the bodies that are now complete.

        The iterator raises `RemoteProtocolError` (`oversize`) when it comes to a frame that announces more
        than the limit; the good frames before it are given first. Bodies left in the iterator are not lost:
        the next `feed` gives them.
        """
        if self._failure is not None:
            raise self._failure
        self._buffer += data
        return self._complete_bodies()

    def finish(self) -> None:
        """Say that the stream ended. Raises `RemoteProtocolError` (`truncated`) if that cut a frame."""
        if self._failure is not None:
            raise self._failure
        if self._buffer:
            raise RemoteProtocolError(
                f"the stream ended within a frame, after {len(self._buffer)} of its bytes", "truncated"
            )

    def _complete_bodies(self) -> Iterator[bytes]:
        while len(self._buffer) >= HEADER_SIZE:
            size = int.from_bytes(self._buffer[:HEADER_SIZE], "big")
            if size > self._limit:
                self._buffer.clear()
                self._failure = RemoteProtocolError(
                    f"a frame announces {size} bytes and the limit is {self._limit}", "oversize"
                )
                raise self._failure
            end = HEADER_SIZE + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[HEADER_SIZE:end])
            del self._buffer[:end]
            yield body
