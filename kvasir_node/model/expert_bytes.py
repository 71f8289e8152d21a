"""Reads single experts out of a model file, believing nothing that the manifest's digests do not confirm.

Decides which byte range is read for an expert, and that it is used only with the right digest: a worker never
computes with other weights than its swarm's. It reads that range and no more, so a worker's memory is its
shard's. Where the file came from is not its concern.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from kvasir_proto.errors import LocalProtocolError, ModelUnusable
from kvasir_proto.manifest import ModelManifest


class ExpertSource:
    """Experts' bytes of one model file, verified as they are read.

    A context manager. Threads may share one.
    """

    def __init__(self, path: Path, manifest: ModelManifest) -> None:
        self._path = path
        self._manifest = manifest
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelUnusable(f"{path} cannot be read: {error.strerror or error}") from error
        size_bytes = os.fstat(self._handle).st_size
        if size_bytes != manifest.file_size_bytes:
            self.close()
            raise ModelUnusable(
                f"{path} has {size_bytes} bytes, the model {manifest.file_size_bytes}: it is another file"
            )

    def read(self, tensor_name: str, expert: int) -> bytes:
        """The bytes of one expert's slice of a tensor.

        Raises `ModelUnusable` when they do not have the manifest's digest, `LocalProtocolError` for a
        tensor or expert that the model does not have.
        """
        if self._handle < 0:
            raise LocalProtocolError("the expert source is closed")
        tensor = self._manifest.tensor(tensor_name)
        offset, size_bytes = tensor.expert_range(expert)
        data = self._read_range(offset, size_bytes)
        if hashlib.sha256(data).digest() != tensor.expert_sha256(expert):
            raise ModelUnusable(
                f"{self._path} is damaged: expert {expert} of {tensor_name} has not the manifest's digest"
            )
        return data

    def _read_range(self, offset: int, size_bytes: int) -> bytes:
        pieces = []
        while size_bytes:
            try:
                piece = os.pread(self._handle, size_bytes, offset)
            except OSError as error:
                raise ModelUnusable(f"{self._path} cannot be read: {error.strerror or error}") from error
            if not piece:
                raise ModelUnusable(f"{self._path} is cut short at byte {offset}")
            pieces.append(piece)
            offset += len(piece)
            size_bytes -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the file; no read is possible afterwards."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
