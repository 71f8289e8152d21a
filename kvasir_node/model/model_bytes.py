"""The bytes of a model, whether they lie in one file or in the parts of a split one.

Decides which files are opened for a model of a known size, and gives any range of it. All of Kvasir counts
offsets through the parts as if they were one file; here alone they are several. What the bytes mean, and
whether they are the right ones, is for the callers to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from kvasir_node.model.byte_ranges import ByteRanges, opened
from kvasir_node.model.gguf_split import part_locations
from kvasir_node.model.model_url import Location
from kvasir_proto.errors import LocalProtocolError, SourceFailed


class ModelBytes:
    """Any range of a model of `size_bytes` bytes: the file at `location`, or that one and its other parts.

    A context manager. Threads may share one. Raises `SourceFailed` when a file cannot be read, or when
    neither the file nor its parts together have that size.
    """

    def __init__(self, location: Location, size_bytes: int) -> None:
        self.name = str(location)
        self.size_bytes = size_bytes
        self._parts: list[tuple[int, int, ByteRanges]] = []
        try:
            found = self._open(location, 0)
            if found != size_bytes:
                for other in part_locations(location):
                    if other != location:
                        found += self._open(other, found)
            if found != size_bytes:
                raise SourceFailed(
                    f"{location} has {found} bytes, the model {size_bytes}: it is another file"
                )
        except SourceFailed:
            self.close()
            raise

    @property
    def versions(self) -> tuple[str, ...]:
        """What tells its files from others at the same place (see `ByteRanges.version`), in order."""
        return tuple(part.version for _, _, part in self._parts)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """The bytes of one range, whole."""
        return b"".join(self.pieces(offset, size_bytes))

    def pieces(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        """The bytes of one range, in pieces of bounded size (see `ByteRanges`)."""
        if not self._parts:
            raise LocalProtocolError("the model's bytes are closed")
        for begin, end, part in self._parts:
            if begin <= offset < end:
                here = min(size_bytes, end - offset)
                yield from part.pieces(offset - begin, here)
                offset += here
                size_bytes -= here
        if size_bytes:
            raise SourceFailed(f"{self.name} is cut short: it ends {size_bytes} bytes too early")

    def close(self) -> None:
        """Close the files; no read is possible afterwards. Idempotent."""
        for _, _, part in self._parts:
            part.close()
        self._parts = []

    def _open(self, location: Location, begin: int) -> int:
        """Open one part that begins at `begin`; its size."""
        part = opened(location)
        self._parts.append((begin, begin + part.size_bytes, part))
        return part.size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
