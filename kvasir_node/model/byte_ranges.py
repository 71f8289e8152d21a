"""The port through which all bytes of model files come, wherever the files are.

A source has a size and gives any range of it in pieces; it promises to end: with the bytes, or with
`SourceFailed` when it has not got them or is too slow. It promises nothing about what the bytes are: whoever
takes them compares them with digests. `opened` knows which source a location means; the parts of a split
model are joined above, in `model_bytes`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

from kvasir_node.model.model_url import Location, ModelUrl
from kvasir_proto.errors import LocalProtocolError, SourceFailed

PIECE_SIZE_BYTES: Final = 1 << 20
"""How much is in memory at once where a range is read in pieces."""


class Pieces(Protocol):
    """What ranges of bytes can be had from."""

    @property
    def name(self) -> str:
        """What a sentence calls it."""

    def pieces(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        """The bytes of one range, in pieces of at most `PIECE_SIZE_BYTES`, none empty.

        Raises `SourceFailed` when they do not all come; what has come until then is right as far as it knows.
        """


class ByteRanges(Pieces, Protocol):
    """The bytes of one file. Threads may share one."""

    @property
    def size_bytes(self) -> int:
        """How many bytes it has, as it said when it was opened."""

    @property
    def version(self) -> str:
        """Tells these bytes from others at the same place; empty where nothing does."""

    def close(self) -> None:
        """Let go of what it holds; no range can be had afterwards. Idempotent."""


class LocalFile:
    """A file of this machine, as a source. Raises `SourceFailed` when it cannot be read."""

    version = ""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._handle = -1
        try:
            # A pipe would wait for somebody to write into it.
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            status = os.fstat(self._handle)
        except OSError as error:
            raise self._unreadable(error) from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise SourceFailed(f"{path} is not a regular file")
        self.size_bytes = status.st_size

    def pieces(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        """The bytes of one range (see `ByteRanges`)."""
        while size_bytes:
            if self._handle < 0:
                raise LocalProtocolError("the model's bytes are closed")
            try:
                piece = os.pread(self._handle, min(size_bytes, PIECE_SIZE_BYTES), offset)
            except OSError as error:
                raise self._unreadable(error) from error
            if not piece:
                raise SourceFailed(f"{self.name} is cut short at byte {offset}")
            yield piece
            offset += len(piece)
            size_bytes -= len(piece)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def _unreadable(self, error: OSError) -> SourceFailed:
        return SourceFailed(f"{self.name} cannot be read: {error.strerror or error}")


def opened(location: Location) -> ByteRanges:
    """The source at `location`. Raises `SourceFailed`."""
    if isinstance(location, ModelUrl):
        from kvasir_node.model.http_file import HttpFile  # most commands never speak HTTP

        return HttpFile(location)
    return LocalFile(location)


class InOrder:
    """Ranges of a source that are asked for in ascending order and come as one: one request, not thousands.

    `begin` and `end` bound what will be asked for; what lies between two ranges is read and thrown away.
    """

    def __init__(self, source: Pieces, begin: int, end: int) -> None:
        self.name = source.name
        self._coming = source.pieces(begin, end - begin)
        self._position = begin
        self._rest = b""

    def pieces(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        """The bytes of the next range. Raises as the source does."""
        if offset < self._position:
            raise LocalProtocolError(f"byte {offset} was passed already")
        for _ in self._next(offset - self._position):
            pass
        yield from self._next(size_bytes)

    def _next(self, size_bytes: int) -> Iterator[bytes]:
        while size_bytes:
            piece = self._rest or next(self._coming, b"")
            if not piece:
                raise LocalProtocolError("more is asked for than was said")
            self._rest = piece[size_bytes:]
            piece = piece[:size_bytes]
            size_bytes -= len(piece)
            self._position += len(piece)
            yield piece
