"""Writes the file that a backbone's llama.cpp opens: the model without its routed experts.

Decides how little of an expert tensor may be left so that llama.cpp still accepts the header: the hook never
looks at it, and the loader checks dimensions only. So expert matrices are declared in the smallest type whose
blocks divide their rows, and their bytes are holes. The real types are in the manifest. What the trunk
contains is copied bit for bit and checked against the manifest; nothing here knows an architecture.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvasir_node.model.gguf_format import metadata_sha256
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.gguf_writer import copy_tensor, lay_out, new_file, verified_pieces
from kvasir_node.model.model_bytes import ModelBytes
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.manifest import ManifestTensor, ModelManifest, is_expert_name
from kvasir_proto.tensor_types import TENSOR_TYPES, TensorType

_NO_MATRIX: Final = frozenset({"i8", "i16", "i32", "i64", "f64"})
_SMALLEST_FIRST: Final = sorted(
    (each for each in TENSOR_TYPES.values() if each.name not in _NO_MATRIX),
    key=lambda each: (each.block_size_bytes / each.block_elements, each.id),
)
"""The types that ggml multiplies matrices of, so that plain llama.cpp could open the file too."""


def write_backbone_file(
    source: Path, manifest: ModelManifest, destination: Path, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Write the backbone file of the model at `source`; it appears whole or not at all.

    Metadata and the trunk's tensors are carried through unchanged. `on_bytes` is told the size of each
    piece copied. Raises `ModelUnusable` when the source is not the manifest's model, or cannot be written.
    """
    write_model_file(source, manifest, destination, lambda tensor: not tensor.is_expert, on_bytes)


def write_model_file(
    source: Path,
    manifest: ModelManifest,
    destination: Path,
    keep: Callable[[ManifestTensor], bool],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write the model again from validated values, with holes for the tensors that `keep` does not want."""
    gguf = read_gguf(source)
    if gguf.header_sha256 != manifest.header_sha256 or gguf.size_bytes != manifest.file_size_bytes:
        raise ModelUnusable(f"{source} is not the model of the manifest any more: its header or size differs")
    header, placed, size_bytes = lay_out(
        tuple(gguf.metadata.values()),
        _tensors_written(manifest, keep),
        gguf.alignment,
    )
    with ModelBytes(source, manifest.file_size_bytes) as model, new_file(destination) as output:
        output.write(header)
        for tensor, place in zip(manifest.tensors, placed, strict=True):
            if keep(tensor):
                copy_tensor(model, tensor, output, place.offset, on_bytes)
        output.truncate(size_bytes)


def hole_type(tensor: ManifestTensor) -> TensorType:
    """The type a hole is declared in: for a matrix the smallest one whose blocks divide its rows.

    Biases and scales are a thousandth of the matrices and keep their type.
    """
    if not tensor.name.endswith(".weight"):
        return tensor.type
    return next(each for each in _SMALLEST_FIRST if tensor.shape[0] % each.block_elements == 0)


def backbone_tensors(manifest: ModelManifest) -> list[tuple[str, TensorType, tuple[int, ...]]]:
    """(name, type, shape) of each tensor of a backbone file, in order."""
    return _tensors_written(manifest, lambda tensor: not tensor.is_expert)


def _tensors_written(
    manifest: ModelManifest, keep: Callable[[ManifestTensor], bool]
) -> list[tuple[str, TensorType, tuple[int, ...]]]:
    """(name, type, shape) of each tensor of a written file, in order."""
    return [
        (each.name, each.type if keep(each) else hole_type(each), each.shape) for each in manifest.tensors
    ]


def verify_backbone_file(
    path: Path, manifest: ModelManifest, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Check that `path` is the whole backbone file of the manifest, reading every byte of the trunk.

    `on_bytes` is told the size of each piece read. Raises `ModelUnusable` otherwise.
    """
    verify_model_file(path, manifest, lambda tensor: not tensor.is_expert, on_bytes)


def verify_model_file(
    path: Path,
    manifest: ModelManifest,
    keep: Callable[[ManifestTensor], bool],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Check that `path` is what `write_model_file` writes, reading every byte of the tensors it keeps."""
    gguf = read_gguf(path)
    if metadata_sha256(gguf.metadata) != manifest.metadata_sha256:
        raise ModelUnusable(f"{path} is damaged: its metadata are not the manifest's")
    expected = _tensors_written(manifest, keep)
    _, placed, size_bytes = lay_out(tuple(gguf.metadata.values()), expected, gguf.alignment)
    if gguf.tensors != placed or gguf.size_bytes != size_bytes:
        raise ModelUnusable(f"{path} is damaged: it is not laid out as the manifest says")
    with ModelBytes(path, size_bytes) as written:
        for tensor, place in zip(manifest.tensors, placed, strict=True):
            if keep(tensor):
                for piece in verified_pieces(written, replace(tensor, offset=place.offset)):
                    if on_bytes is not None:
                        on_bytes(len(piece))


def expert_bytes_of(path: Path) -> int:
    """Bytes of routed experts' tensors that the disk really stores for the file at `path`.

    Whole blocks inside the tensors are counted; a block shared with a neighbour is the neighbour's. On a
    file system without holes this is nearly the tensors' size. Raises `ModelUnusable` for a bad file.
    """
    gguf = read_gguf(path)
    stored = 0
    with path.open("rb") as file:
        handle = file.fileno()
        block_bytes = os.fstat(handle).st_blksize
        for tensor in gguf.tensors:
            if is_expert_name(tensor.name):
                begin = -(-tensor.offset // block_bytes) * block_bytes
                end = (tensor.offset + tensor.size_bytes) // block_bytes * block_bytes
                stored += _stored_bytes(handle, begin, end)
    return stored


def _stored_bytes(handle: int, begin: int, end: int) -> int:
    """How many bytes of the range are data rather than holes."""
    stored = 0
    while begin < end:
        try:
            data = os.lseek(handle, begin, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        if data >= end:
            break
        begin = min(end, os.lseek(handle, data, os.SEEK_HOLE))
        stored += begin - data
    return stored
