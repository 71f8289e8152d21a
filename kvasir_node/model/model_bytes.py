"""The bytes of a model, whether they lie in one file or in the parts of a split one.

Decides which files are opened for a model of a known size, and gives any range of it. All of Kvasir counts
offsets through the parts as if they were one file; here alone they are several. What the bytes mean, and
whether they are the right ones, is for the callers to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvasir_node.model.gguf_split import part_paths
from kvasir_proto.errors import LocalProtocolError, ModelUnusable

PIECE_SIZE_BYTES: Final = 1 << 20
"""How much is in memory at once where a range is read in pieces."""


class ModelBytes:
    """Random access to a model of `size_bytes` bytes: the file at `path`, or that one and its other parts.

    A context manager. Threads may share one. Raises `ModelUnusable` when a file cannot be read, or when
    neither the file nor its parts together have that size.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self._parts: list[tuple[int, int, Path, int]] = []
        try:
            found = self._open(path, 0)
            if found != size_bytes:
                for other in part_paths(path):
                    if other != path:
                        found += self._open(other, found)
        except OSError as error:
            self.close()
            raise ModelUnusable(f"{error.filename} cannot be read: {error.strerror or error}") from error
        if found != size_bytes:
            self.close()
            raise ModelUnusable(f"{path} has {found} bytes, the model {size_bytes}: it is another file")

    def read(self, offset: int, size_bytes: int) -> bytes:
        """The bytes of one range, whole."""
        pieces = list(self._ranges(offset, size_bytes, size_bytes))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pieces(self, offset: int, size_bytes: int) -> Iterator[bytes]:
        """The bytes of one range, `PIECE_SIZE_BYTES` at a time."""
        return self._ranges(offset, size_bytes, PIECE_SIZE_BYTES)

    def close(self) -> None:
        """Close the files; no read is possible afterwards. Idempotent."""
        for _, _, _, handle in self._parts:
            os.close(handle)
        self._parts = []

    def _open(self, path: Path, begin: int) -> int:
        """Open one part that begins at `begin`; its size."""
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
        size_bytes = os.fstat(handle).st_size
        self._parts.append((begin, begin + size_bytes, path, handle))
        return size_bytes

    def _ranges(self, offset: int, size_bytes: int, piece_bytes_max: int) -> Iterator[bytes]:
        if not self._parts:
            raise LocalProtocolError("the model's bytes are closed")
        for begin, end, path, handle in self._parts:
            while size_bytes and begin <= offset < end:
                wanted = min(size_bytes, piece_bytes_max, end - offset)
                try:
                    piece = os.pread(handle, wanted, offset - begin)
                except OSError as error:
                    raise ModelUnusable(f"{path} cannot be read: {error.strerror or error}") from error
                if not piece:
                    raise ModelUnusable(f"{path} is cut short at byte {offset - begin}")
                yield piece
                offset += len(piece)
                size_bytes -= len(piece)
        if size_bytes:
            raise ModelUnusable(f"{self.path} is cut short: it ends {size_bytes} bytes too early")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
