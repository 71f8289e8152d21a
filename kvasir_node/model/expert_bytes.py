"""Reads single experts of a model, believing nothing that the manifest's digests do not confirm.

Decides which bytes are read for an expert, from the model's file or from the directory of those that were
fetched, and that they are used only with the right digest: a worker never computes with other weights than
its swarm's. It reads them and no more, so a worker's memory is its shard's. Where they came from is not its
concern.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from types import TracebackType
from typing import Self

from kvasir_node.model.byte_ranges import LocalFile
from kvasir_node.model.expert_files import ExpertFiles
from kvasir_node.model.model_bytes import ModelBytes
from kvasir_proto.errors import LocalProtocolError, ModelUnusable
from kvasir_proto.manifest import ModelManifest


class ExpertSource:
    """Experts' bytes of one model, verified as they are read: `path` is its file, or its fetched experts.

    A context manager. Threads may share one.
    """

    def __init__(self, path: Path, manifest: ModelManifest) -> None:
        self._manifest = manifest
        self._name = str(path)
        self._files = ExpertFiles(path) if path.is_dir() else None
        self._bytes = None if self._files else ModelBytes(path, manifest.file_size_bytes)

    def read(self, tensor_name: str, expert: int) -> bytes:
        """The bytes of one expert's slice of a tensor.

        Raises `ModelUnusable` when they do not have the manifest's digest, `LocalProtocolError` for a
        tensor or expert that the model does not have, or when the source is closed.
        """
        tensor = self._manifest.tensor(tensor_name)
        offset, size_bytes = tensor.expert_range(expert)
        if self._files is not None:
            data = _read(self._files.path_of(tensor_name, expert), size_bytes)
        elif self._bytes is not None:
            data = self._bytes.read(offset, size_bytes)
        else:
            raise LocalProtocolError("the model's bytes are closed")
        if hashlib.sha256(data).digest() != tensor.expert_sha256(expert):
            raise ModelUnusable(
                f"{self._name} is damaged: expert {expert} of {tensor_name} has not the manifest's digest"
            )
        return data

    def close(self) -> None:
        """Close the model; no read is possible afterwards."""
        if self._bytes is not None:
            self._bytes.close()
        self._files = self._bytes = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _read(path: Path, size_bytes: int) -> bytes:
    with contextlib.closing(LocalFile(path)) as file:
        return b"".join(file.pieces(0, size_bytes))
