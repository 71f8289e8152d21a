"""Reads single experts out of a model file, believing nothing that the manifest's digests do not confirm.

Decides which byte range is read for an expert, and that it is used only with the right digest: a worker never
computes with other weights than its swarm's. It reads that range and no more, so a worker's memory is its
shard's. Where the file came from is not its concern.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import TracebackType
from typing import Self

from kvasir_node.model.model_bytes import ModelBytes
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.manifest import ModelManifest


class ExpertSource:
    """Experts' bytes of one model file, verified as they are read.

    A context manager. Threads may share one.
    """

    def __init__(self, path: Path, manifest: ModelManifest) -> None:
        self._manifest = manifest
        self._bytes = ModelBytes(path, manifest.file_size_bytes)

    def read(self, tensor_name: str, expert: int) -> bytes:
        """The bytes of one expert's slice of a tensor.

        Raises `ModelUnusable` when they do not have the manifest's digest, `LocalProtocolError` for a
        tensor or expert that the model does not have, or when the source is closed.
        """
        tensor = self._manifest.tensor(tensor_name)
        offset, size_bytes = tensor.expert_range(expert)
        data = self._bytes.read(offset, size_bytes)
        if hashlib.sha256(data).digest() != tensor.expert_sha256(expert):
            raise ModelUnusable(
                f"{self._bytes.name} is damaged: expert {expert} of {tensor_name} has not the manifest's "
                "digest"
            )
        return data

    def close(self) -> None:
        """Close the model; no read is possible afterwards."""
        self._bytes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
