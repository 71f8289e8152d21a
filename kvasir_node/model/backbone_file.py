"""Writes the file that a backbone's llama.cpp opens: the model without its routed experts.

Decides how little of an expert tensor may be left so that llama.cpp still accepts the header: the hook never
looks at it, and the loader checks dimensions only. So expert matrices are declared in the smallest type whose
blocks divide their rows, and their bytes are holes. The real types are in the manifest. What the trunk
contains is copied bit for bit and checked against the manifest; nothing here knows an architecture.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self, TypeVar

from kvasir_node.model.byte_ranges import InOrder, LocalFile
from kvasir_node.model.expert_files import PARTIAL_SUFFIX
from kvasir_node.model.gguf_format import GgufFile, GgufTensor, metadata_sha256
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.gguf_writer import copy_tensor, lay_out, new_file, verified_pieces
from kvasir_node.model.model_bytes import ModelBytes
from kvasir_node.model.model_manifest import differing_field, moved_manifest
from kvasir_node.model.model_url import Location
from kvasir_node.model.own_files import unwritable
from kvasir_proto.errors import ModelUnusable, SourceFailed
from kvasir_proto.manifest import ManifestTensor, ModelManifest, is_expert_name
from kvasir_proto.tensor_types import TENSOR_TYPES, TensorType

GAP_BYTES_MAX: Final = 64 << 10
"""Bytes between two tensors that cost less to read and throw away than another request does."""

_Tensor = TypeVar("_Tensor", GgufTensor, ManifestTensor)

_NO_MATRIX: Final = frozenset({"i8", "i16", "i32", "i64", "f64"})
_SMALLEST_FIRST: Final = sorted(
    (each for each in TENSOR_TYPES.values() if each.name not in _NO_MATRIX),
    key=lambda each: (each.block_size_bytes / each.block_elements, each.id),
)
"""The types that ggml multiplies matrices of, so that plain llama.cpp could open the file too."""


def write_backbone_file(
    source: Location,
    manifest: ModelManifest,
    destination: Path,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write the backbone file of the model at `source`; it appears whole or not at all.

    Metadata and the trunk's tensors are carried through unchanged. `on_bytes` is told the size of each
    piece copied. Raises `ModelUnusable` when the source is not the manifest's model, or cannot be written.
    """
    write_model_file(source, manifest, destination, _is_trunk, on_bytes)


def write_model_file(
    source: Location,
    manifest: ModelManifest,
    destination: Path,
    keep: Callable[[ManifestTensor], bool],
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write the model again from validated values, with holes for the tensors that `keep` does not want."""
    gguf = read_gguf(source)
    if moved_manifest(manifest, gguf) != manifest:
        raise ModelUnusable(f"{source} is not the file of the manifest any more: its header or size differs")
    header, placed, size_bytes = lay_out(
        tuple(gguf.metadata.values()),
        _written(manifest.tensors, keep),
        gguf.alignment,
    )
    kept = [each for each in zip(manifest.tensors, placed, strict=True) if keep(each[0])]
    with ModelBytes(source, manifest.file_size_bytes) as model, new_file(destination) as output:
        output.write(header)
        for run in _runs(kept):
            begin, last = run[0][0].offset, run[-1][0]
            in_order = InOrder(model, begin, last.offset + last.size_bytes)
            for tensor, place in run:
                copy_tensor(in_order, tensor, output, place.offset, on_bytes)
        output.truncate(size_bytes)


class BackboneCopy:
    """The backbone file of a model whose manifest is being made from the same bytes, written as they pass.

    A context manager. It appears at `destination` with `finish`; until then what there is of it lies in a
    file beside it, which another one goes on with. Raises `ModelUnusable` when it cannot be written.
    """

    def __init__(self, gguf: GgufFile, destination: Path) -> None:
        self._destination = destination
        self._partial = destination.with_name(destination.name + PARTIAL_SUFFIX)
        self._header, placed, self._size_bytes = lay_out(
            tuple(gguf.metadata.values()), _written(gguf.tensors, _is_trunk), gguf.alignment
        )
        self._offsets = {each.name: each.offset for each in placed}
        try:
            handle = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._file = open(handle, "r+b")  # noqa: SIM115 - closed at the end of the block
        except OSError as error:
            raise unwritable(self._partial, error) from error

    @contextlib.contextmanager
    def copy_of(self, tensor: GgufTensor, part: int) -> Iterator[BinaryIO | None]:
        """See `model_manifest.CopyOf`."""
        try:
            if _is_trunk(tensor):
                self._file.seek(self._offsets[tensor.name])
            yield self._file if _is_trunk(tensor) else None
            self._file.flush()
        except OSError as error:
            raise unwritable(self._partial, error) from error

    def is_here(self, tensor: GgufTensor, sha256: bytes) -> bool:
        """Whether the bytes of this tensor of the trunk are in the file; reads them."""
        return has_digest(self._partial, self._offsets[tensor.name], tensor.size_bytes, sha256)

    def finish(self) -> None:
        """All of the trunk has come."""
        try:
            self._file.seek(0)
            self._file.write(self._header)
            self._file.truncate(self._size_bytes)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._partial.replace(self._destination)
        except OSError as error:
            raise unwritable(self._partial, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def has_digest(path: Path, offset: int, size_bytes: int, sha256: bytes) -> bool:
    """Whether these bytes of a file of our own are there and have this digest."""
    hasher = hashlib.sha256()
    try:
        with contextlib.closing(LocalFile(path)) as file:
            for piece in file.pieces(offset, size_bytes):
                hasher.update(piece)
    except SourceFailed:
        return False
    return hasher.digest() == sha256


def _is_trunk(tensor: GgufTensor | ManifestTensor) -> bool:
    return not is_expert_name(tensor.name)


def _runs(
    kept: Sequence[tuple[ManifestTensor, GgufTensor]],
) -> Iterator[list[tuple[ManifestTensor, GgufTensor]]]:
    """The tensors in runs that lie close together in the model, each worth one request."""
    run: list[tuple[ManifestTensor, GgufTensor]] = []
    end = 0
    for each in sorted(kept, key=lambda pair: pair[0].offset):
        if run and each[0].offset > end + GAP_BYTES_MAX:
            yield run
            run = []
        run.append(each)
        end = each[0].offset + each[0].size_bytes
    if run:
        yield run


def hole_type(tensor: GgufTensor | ManifestTensor) -> TensorType:
    """The type a hole is declared in: for a matrix the smallest one whose blocks divide its rows.

    Biases and scales are a thousandth of the matrices and keep their type.
    """
    if not tensor.name.endswith(".weight"):
        return tensor.type
    return next(each for each in _SMALLEST_FIRST if tensor.shape[0] % each.block_elements == 0)


def backbone_tensors(manifest: ModelManifest) -> list[tuple[str, TensorType, tuple[int, ...]]]:
    """(name, type, shape) of each tensor of a backbone file, in order."""
    return _written(manifest.tensors, _is_trunk)


def _written(
    tensors: Sequence[_Tensor], keep: Callable[[_Tensor], bool]
) -> list[tuple[str, TensorType, tuple[int, ...]]]:
    """(name, type, shape) of each tensor of a written file, in order."""
    return [(each.name, each.type if keep(each) else hole_type(each), each.shape) for each in tensors]


def verify_backbone_file(
    path: Path, manifest: ModelManifest, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Check that `path` is the whole backbone file of the manifest, reading every byte of the trunk.

    `on_bytes` is told the size of each piece read. Raises `ModelUnusable` otherwise.
    """
    verify_model_file(path, manifest, _is_trunk, on_bytes)


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
    expected = _written(manifest.tensors, keep)
    _, placed, size_bytes = lay_out(tuple(gguf.metadata.values()), expected, gguf.alignment)
    if gguf.tensors != placed or gguf.size_bytes != size_bytes:
        raise ModelUnusable(f"{path} is damaged: it is not laid out as the manifest says")
    if (differing := differing_field(gguf, manifest)) is not None:
        raise ModelUnusable(f"{path} is damaged: its {differing} is not the manifest's")
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
