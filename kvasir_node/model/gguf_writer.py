"""Writes GGUF files so that they are either whole or not there.

Decides where tensors lie (in order, aligned, no gap: what llama.cpp insists on) and how a file appears:
under a temporary name, flushed to the disk, then renamed. Bytes are copied in small pieces and hashed on the
way, so a file never takes memory and never carries bytes that differ from the manifest. What is written, and
which tensors stay holes, is for the callers to say.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from kvasir_node.durable_file import durable_file
from kvasir_node.model.byte_ranges import Pieces
from kvasir_node.model.gguf_format import GgufTensor, MetadataEntry, aligned, encode_header
from kvasir_node.model.own_files import unwritable
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.manifest import ManifestTensor, tensor_size_bytes
from kvasir_proto.tensor_types import TensorType


def lay_out(
    metadata: Sequence[MetadataEntry],
    tensors: Sequence[tuple[str, TensorType, tuple[int, ...]]],
    alignment: int,
) -> tuple[bytes, tuple[GgufTensor, ...], int]:
    """(header, tensors with their offsets, size of the file) for tensors of these names, types and shapes."""
    placed: list[GgufTensor] = []
    offset = 0
    for name, tensor_type, shape in tensors:
        size_bytes = tensor_size_bytes(tensor_type, shape)
        placed.append(GgufTensor(name, tensor_type, shape, offset, size_bytes))
        offset = aligned(offset + size_bytes, alignment)
    # A header's length does not depend on the offsets in it, so the first try tells where data begin.
    data_offset = len(encode_header(metadata, placed, alignment, 0))
    final = tuple(
        GgufTensor(each.name, each.type, each.shape, each.offset + data_offset, each.size_bytes)
        for each in placed
    )
    return encode_header(metadata, final, alignment, data_offset), final, offset + data_offset


@contextlib.contextmanager
def new_file(destination: Path) -> Iterator[BinaryIO]:
    """A file to write that takes the name `destination` when the block ends well, and is gone otherwise.

    Raises `ModelUnusable` when the file system refuses, for instance because it is full.
    """
    try:
        with durable_file(destination) as file:
            yield file
    except OSError as error:
        raise unwritable(destination, error) from error


def copy_tensor(
    source: Pieces,
    tensor: ManifestTensor,
    destination: BinaryIO,
    offset: int,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Copy one tensor from the model file to `offset`, checking every digest on the way.

    `on_bytes` is told the size of each piece. Raises `ModelUnusable` when the source has other bytes than
    the manifest says; the destination is then not to be used.
    """
    destination.seek(offset)
    for piece in verified_pieces(source, tensor):
        destination.write(piece)
        if on_bytes is not None:
            on_bytes(len(piece))


def verified_pieces(source: Pieces, tensor: ManifestTensor) -> Iterator[bytes]:
    """The bytes of one tensor in pieces, checked against its digests.

    Raises `ModelUnusable` after the last piece of a part whose digest is not the manifest's.
    """
    for digest, offset, size_bytes in _digested_parts(tensor):
        hasher = hashlib.sha256()
        for piece in source.pieces(offset, size_bytes):
            hasher.update(piece)
            yield piece
        if hasher.digest() != digest:
            raise ModelUnusable(f"{source.name} is damaged: {tensor.name} has not the manifest's digest")


def _digested_parts(tensor: ManifestTensor) -> Iterator[tuple[bytes, int, int]]:
    """(digest, offset, size in bytes) of each part of a tensor that has a digest of its own."""
    if not tensor.is_expert:
        yield tensor.sha256, tensor.offset, tensor.size_bytes
        return
    for expert in range(tensor.shape[-1]):
        offset, size_bytes = tensor.expert_range(expert)
        yield tensor.expert_sha256(expert), offset, size_bytes
