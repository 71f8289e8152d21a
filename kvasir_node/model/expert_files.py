"""The experts of one model that a home has fetched: a file for each tensor's slice of each expert.

Decides how they lie in the model's directory and which are there. A slice that is complete has its name, one
that is not has `.partial` behind it, and whoever fetches it goes on there. None is flushed by itself and none
is believed: who reads one compares it with its digest (`expert_bytes`), who finds one damaged removes it.
Where slices come from is `expert_fetch`'s part, which may go when there is no room is `expert_cache`'s.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from kvasir_node.model.byte_ranges import LocalFile
from kvasir_node.model.own_files import private, unwritable
from kvasir_proto.manifest import EXPERT_TENSOR, ManifestTensor, ModelManifest, ShardSet

EXPERTS_DIRECTORY: Final = "experts"
"""What the directory of a model's fetched experts is called."""
PARTIAL_SUFFIX: Final = ".partial"


class Slice(NamedTuple):
    """One expert's part of one tensor."""

    tensor: ManifestTensor
    expert: int

    @property
    def offset(self) -> int:
        """Where it begins in the model file."""
        return self.tensor.expert_range(self.expert)[0]

    @property
    def size_bytes(self) -> int:
        """How many bytes it has."""
        return self.tensor.expert_size_bytes

    @property
    def sha256(self) -> bytes:
        """The digest of its bytes."""
        return self.tensor.expert_sha256(self.expert)

    def __str__(self) -> str:
        return f"expert {self.expert} of {self.tensor.name}"


class ExpertFiles:
    """The slices below one directory, which is made when the first is written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path_of(self, tensor_name: str, expert: int) -> Path:
        """Where a slice is, or would be."""
        match = EXPERT_TENSOR.fullmatch(tensor_name)
        assert match is not None, "only routed experts' tensors are cut"
        return self.directory / match[1] / match[2] / str(expert)

    def has(self, each: Slice) -> bool:
        """Whether a slice is here, by its size: its bytes are not read."""
        path = self.path_of(each.tensor.name, each.expert)
        try:
            return path.stat().st_size == each.size_bytes
        except OSError:
            return False

    def missing(self, manifest: ModelManifest, shard: ShardSet) -> list[Slice]:
        """The slices of a shard that are not here, in the order of their bytes in the model file."""
        return [each for each in slices_of(manifest, shard) if not self.has(each)]

    def damaged(self, manifest: ModelManifest, shard: ShardSet) -> list[Slice]:
        """The slices of a shard that are here with other bytes than the manifest's; reads every byte."""
        here = (each for each in slices_of(manifest, shard) if self.has(each))
        return [each for each in here if not self._is_right(each)]

    def remove(self, each: Slice) -> None:
        """Remove a slice, and what there is of it."""
        path = self.path_of(each.tensor.name, each.expert)
        path.unlink(missing_ok=True)
        partial_of(path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def writing(self, tensor_name: str, expert: int) -> Iterator[BinaryIO]:
        """A file for the bytes of one slice, from the first; it counts when the block ends well.

        Raises `ModelUnusable` when the file system refuses.
        """
        path = self.path_of(tensor_name, expert)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(partial_of(path), "wb", opener=private) as file:
                yield file
            partial_of(path).replace(path)
        except OSError as error:
            raise unwritable(path, error) from error

    def _is_right(self, each: Slice) -> bool:
        hasher = hashlib.sha256()
        with contextlib.closing(LocalFile(self.path_of(each.tensor.name, each.expert))) as file:
            for piece in file.pieces(0, each.size_bytes):
                hasher.update(piece)
        return hasher.digest() == each.sha256


def slices_of(manifest: ModelManifest, shard: ShardSet) -> list[Slice]:
    """Every slice of a shard, in the order of their bytes in the model file."""
    slices = [
        Slice(tensor, expert)
        for layer in shard.layers
        for tensor in manifest.expert_tensors(layer)
        for expert in shard.experts_of(layer)
    ]
    return sorted(slices, key=lambda each: each.offset)


def partial_of(path: Path) -> Path:
    """Where what there is of a slice lies until it is complete."""
    return path.with_name(path.name + PARTIAL_SUFFIX)
