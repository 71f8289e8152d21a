"""What of a model's experts is on this disk, as bytes for others.

Decides which bytes are given for a range of a tensor's experts: those of the user's file, or of the experts
that were fetched, up to the first that is not here. They are not compared with digests: whoever gets them
does that, and one reading is cheaper than two. Who may have them, and how fast, is not its concern.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from kvasir_node.model.byte_ranges import LocalFile
from kvasir_node.model.expert_files import ExpertFiles
from kvasir_node.model.model_bytes import ModelBytes
from kvasir_proto.errors import LocalProtocolError, SourceFailed
from kvasir_proto.manifest import ManifestTensor, ModelManifest


class ExpertShelf:
    """Experts of one model in ``path``: its file, or the directory of those that were fetched.

    Nothing is kept open between two readings. Threads may share one.
    """

    def __init__(self, path: Path, manifest: ModelManifest) -> None:
        self._path = path
        self._manifest = manifest

    def read(self, tensor_name: str, first: int, end: int, offset: int, size_bytes_max: int) -> bytes:
        """Bytes of experts ``first`` to ``end`` of a tensor from byte ``offset`` on, as many as are here.

        At most ``size_bytes_max``; empty where the first of them is not here. Raises `LocalProtocolError` for
        what the model does not have.
        """
        tensor = self._manifest.tensor(tensor_name)
        begin, _ = tensor.expert_range(first)
        last_begin, size_bytes = tensor.expert_range(end - 1)
        left = last_begin + size_bytes - begin - offset
        if first >= end or left <= 0:
            raise LocalProtocolError(f"{tensor_name} has no byte {offset} of experts {first} to {end}")
        left = min(left, size_bytes_max)
        try:
            if self._path.is_dir():
                return self._read_files(tensor, first, offset, left)
            with ModelBytes(self._path, self._manifest.file_size_bytes) as model:
                return model.read(begin + offset, left)
        except SourceFailed:
            return b""

    def _read_files(self, tensor: ManifestTensor, first: int, offset: int, left: int) -> bytes:
        files = ExpertFiles(self._path)
        pieces: list[bytes] = []
        size_bytes = tensor.expert_size_bytes
        while left:
            expert, begin = first + offset // size_bytes, offset % size_bytes
            part_bytes = min(left, size_bytes - begin)
            try:
                with contextlib.closing(LocalFile(files.path_of(tensor.name, expert))) as file:
                    pieces += file.pieces(begin, part_bytes)
            except SourceFailed:
                break
            offset += part_bytes
            left -= part_bytes
        return b"".join(pieces)
