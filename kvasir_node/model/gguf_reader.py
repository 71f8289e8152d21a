"""Reads a GGUF header that nobody vouches for.

Decides whether a file is a GGUF file we can use, and says in one sentence, naming the field, why it is not.
Apart from llama.cpp because that reader trusts its input: only files that passed here and were written again
by Kvasir are ever opened by it. Every count, length, type and offset is checked before it is used, and no
more than the header is read. Which files make a split model is `gguf_split`'s part. It knows nothing of
experts; `model_manifest` judges those.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NoReturn

from kvasir_node.model.byte_ranges import ByteRanges, opened
from kvasir_node.model.gguf_format import (
    ALIGNMENT_DEFAULT,
    ALIGNMENT_KEY,
    MAGIC,
    SCALAR_FORMATS,
    GgufFile,
    GgufTensor,
    MetadataEntry,
    ValueType,
    aligned,
)
from kvasir_node.model.gguf_split import joined, other_parts
from kvasir_node.model.model_url import Location
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.manifest import (
    DIMENSION_MAX,
    DIMENSIONS_MAX,
    FILE_SIZE_BYTES_MAX,
    TENSOR_NAME,
    TENSORS_MAX,
    tensor_size_bytes,
)
from kvasir_proto.tensor_types import TENSOR_TYPES

HEADER_SIZE_BYTES_MAX: Final = 64 << 20
"""The largest header we read, of all parts together; vocabularies of 260,000 tokens with their merges take
about 16 MiB.
"""

METADATA_ENTRIES_MAX: Final = 16384
"""Of all parts together."""

KEY_LENGTH_MAX: Final = 1024
TEXT_LENGTH_MAX: Final = 16 << 20
ARRAY_LENGTH_MAX: Final = 4 << 20
ALIGNMENT_MAX: Final = 65536

_KEY: Final = re.compile(r"[!-~]+", re.ASCII)
_READ_SIZE_BYTES: Final = 256 << 10
"""At once; over HTTP what is read behind the header comes twice."""


def read_gguf(path: Location) -> GgufFile:
    """The header of the model at `path`, validated in full: one file, or the first part of a split model.

    Raises `SourceFailed` when a file cannot be read, `ModelUnusable` when it is not GGUF of version 2 or 3 in
    little-endian order, when any part of a header is out of bounds or contradicts the file's size, or when
    the parts of a split model contradict each other.
    """
    room = _Room(HEADER_SIZE_BYTES_MAX, TENSORS_MAX, METADATA_ENTRIES_MAX)
    with memory_for(path):
        first = _read_part(path, room)
        parts = [first]
        for other in other_parts(first):
            room = room.without(parts[-1])
            parts.append(_read_part(other, room))
        return joined(parts)


@contextlib.contextmanager
def memory_for(path: Location) -> Iterator[None]:
    """Where memory runs out inside, the model at `path` is what it was too large for: `ModelUnusable`."""
    try:
        yield
    except MemoryError as error:
        raise ModelUnusable(f"{path} cannot be used: there is not enough memory to read it") from error


@dataclass(frozen=True, slots=True)
class _Room:
    """How much of a model's headers may still come, whatever parts it comes in."""

    header_bytes: int
    tensors: int
    entries: int

    def without(self, part: GgufFile) -> _Room:
        return _Room(
            self.header_bytes - part.data_offset,
            self.tensors - len(part.tensors),
            self.entries - len(part.metadata),
        )


def _read_part(path: Location, room: _Room) -> GgufFile:
    """The header of one file, which may be a part without any tensor."""
    with contextlib.closing(opened(path)) as source:
        return _Header(path, source, room).read()


class _Header:
    """The header under examination: what has been read of it, and how far we are."""

    def __init__(self, path: Location, source: ByteRanges, room: _Room) -> None:
        self._path = path
        self._source = source
        self._size_bytes = source.size_bytes
        self._room = room
        self._buffer = bytearray()
        self._position = 0

    def read(self) -> GgufFile:
        version, n_tensor, n_entry = self._read_counts()
        metadata: dict[str, MetadataEntry] = {}
        for index in range(n_entry):
            entry = self._read_entry(index)
            if entry.key in metadata:
                self._refuse(f"the metadata key {entry.key!r} occurs twice")
            metadata[entry.key] = entry
        alignment = self._alignment_of(metadata)
        infos = [self._read_tensor_info(index) for index in range(n_tensor)]
        data_offset = aligned(self._position, alignment)
        if not infos:  # nothing follows that would need padding
            data_offset = min(data_offset, self._size_bytes)
        self._take(data_offset - self._position, "the padding after the tensor list")
        tensors = tuple(
            GgufTensor(each.name, each.type, each.shape, data_offset + each.offset, each.size_bytes)
            for each in infos
        )
        self._check_layout(tensors, alignment, data_offset)
        return GgufFile(
            path=self._path,
            paths=(self._path,),
            version=version,
            alignment=alignment,
            metadata=MappingProxyType(metadata),
            tensors=tensors,
            data_offset=data_offset,
            size_bytes=self._size_bytes,
            header_sha256=hashlib.sha256(memoryview(self._buffer)[:data_offset]).digest(),
        )

    def _read_counts(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of metadata entries."""
        if self._size_bytes < 4 or bytes(self._take(4, "the magic number")) != MAGIC:
            raise ModelUnusable(f"{self._path} is not a GGUF file: it does not begin with 'GGUF'")
        if self._size_bytes > FILE_SIZE_BYTES_MAX:
            self._refuse("the file is larger than any model")
        version = self._number("I", "the version")
        if version & 0xFFFF == 0:
            self._refuse("it is in big-endian order; only little-endian files can be used")
        if version not in (2, 3):
            self._refuse(f"version {version} is not known; versions 2 and 3 are")
        n_tensor = self._number("Q", "the number of tensors")
        n_entry = self._number("Q", "the number of metadata entries")
        for what, count, limit, left in (
            ("tensors", n_tensor, TENSORS_MAX, self._room.tensors),
            ("metadata entries", n_entry, METADATA_ENTRIES_MAX, self._room.entries),
        ):
            if count > limit:
                self._refuse(f"the number of {what}, {count}, exceeds {limit}")
            if count > left:
                self._refuse(f"the number of {what} of this part and those before exceeds {limit}")
        return version, n_tensor, n_entry

    def _read_entry(self, index: int) -> MetadataEntry:
        key = self._name(KEY_LENGTH_MAX, f"metadata key {index}")
        if _KEY.fullmatch(key) is None:
            self._refuse(f"metadata key {index} is not made of printable characters")
        what = f"the value of {key!r}"
        value_type = self._value_type(what)
        begin = self._position
        element_type = None
        count = 1
        if value_type is ValueType.ARRAY:
            element_type = self._value_type(f"an element of {key!r}")
            count = self._number("Q", f"the length of {key!r}")
            if element_type is ValueType.ARRAY:
                self._refuse(f"{what} is an array of arrays")
            if count > ARRAY_LENGTH_MAX:
                self._refuse(f"the length of {key!r}, {count}, exceeds {ARRAY_LENGTH_MAX}")
        kind = value_type if element_type is None else element_type
        letter = SCALAR_FORMATS.get(kind)
        if letter is None:
            self._pass_texts(count, what)
        else:
            begin_data = self._position
            self._advance(begin_data + count * struct.calcsize(letter), what)
            if kind is ValueType.BOOL and self._buffer[begin_data : self._position].translate(None, b"\0\1"):
                self._refuse(f"{what} is neither true nor false")
        raw = bytes(memoryview(self._buffer)[begin : self._position])
        return MetadataEntry(key, value_type, raw, element_type, count)

    def _pass_texts(self, count: int, what: str) -> None:
        """Go on behind `count` texts. A vocabulary has a million of them, so nothing is copied here."""
        buffer, position = self._buffer, self._position
        for _ in range(count):
            if position + 8 > len(buffer):
                self._advance(position + 8, f"the length of {what}")
            length = int.from_bytes(buffer[position : position + 8], "little")
            if length > TEXT_LENGTH_MAX:
                self._refuse(f"the length of {what}, {length}, exceeds {TEXT_LENGTH_MAX}")
            position += 8 + length
            if position > len(buffer):
                self._advance(position, what)
        self._advance(position, what)

    def _value_type(self, what: str) -> ValueType:
        number = self._number("I", f"the type of {what}")
        if number > max(ValueType):
            self._refuse(f"{what} has type {number}, which GGUF does not have")
        return ValueType(number)

    def _alignment_of(self, metadata: dict[str, MetadataEntry]) -> int:
        entry = metadata.get(ALIGNMENT_KEY)
        if entry is None:
            return ALIGNMENT_DEFAULT
        if entry.type is not ValueType.UINT32:
            self._refuse(f"{ALIGNMENT_KEY} is not an unsigned 32-bit number")
        alignment = int(entry.scalars()[0])
        if not 8 <= alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
            self._refuse(f"{ALIGNMENT_KEY} is {alignment}, not a power of two in 8..{ALIGNMENT_MAX}")
        return alignment

    def _read_tensor_info(self, index: int) -> GgufTensor:
        """One tensor, its offset still counted from where the data begin."""
        name = self._name(64, f"the name of tensor {index}")
        if TENSOR_NAME.fullmatch(name) is None:
            self._refuse(f"the name of tensor {index} is not 1 to 63 printable characters")
        n_dimension = self._number("I", f"the number of dimensions of {name}")
        if not 1 <= n_dimension <= DIMENSIONS_MAX:
            self._refuse(f"the number of dimensions of {name}, {n_dimension}, is not in 1..{DIMENSIONS_MAX}")
        shape = tuple(self._number("Q", f"a dimension of {name}") for _ in range(n_dimension))
        for dimension in shape:
            if not 1 <= dimension <= DIMENSION_MAX:
                self._refuse(f"a dimension of {name}, {dimension}, is not in 1..{DIMENSION_MAX}")
        type_id = self._number("I", f"the type of {name}")
        tensor_type = TENSOR_TYPES.get(type_id)
        if tensor_type is None:
            self._refuse(f"{name} has type {type_id}, which is not known")
        if shape[0] % tensor_type.block_elements:
            self._refuse(
                f"the rows of {name} have {shape[0]} values, not a whole number of {tensor_type.name} blocks"
            )
        offset = self._number("Q", f"the offset of {name}")
        return GgufTensor(name, tensor_type, shape, offset, tensor_size_bytes(tensor_type, shape))

    def _check_layout(self, tensors: tuple[GgufTensor, ...], alignment: int, data_offset: int) -> None:
        """Tensors must lie apart from each other, aligned, inside the file, each under its own name."""
        names = {each.name for each in tensors}
        if len(names) != len(tensors):
            self._refuse("two tensors have one name")
        end, before = data_offset, ""
        for tensor in sorted(tensors, key=lambda each: each.offset):
            if (tensor.offset - data_offset) % alignment:
                self._refuse(f"the offset of {tensor.name} is not a multiple of {alignment}")
            if tensor.offset + tensor.size_bytes > self._size_bytes:
                self._refuse(
                    f"it is cut short or lies about its sizes: {tensor.name} ends at byte "
                    f"{tensor.offset + tensor.size_bytes}, the file at {self._size_bytes}"
                )
            if tensor.offset < end:
                self._refuse(f"{tensor.name} overlaps {before}")
            # ggml's own reader takes no other layout; a gap means that some size before it is a lie.
            if before and tensor.offset >= end + alignment:
                self._refuse(f"it lies about its sizes: there is a gap between {before} and {tensor.name}")
            end, before = tensor.offset + tensor.size_bytes, tensor.name

    def _name(self, length_max: int, what: str) -> str:
        data = self._take(self._length(length_max, what), what)
        return data.decode("ascii", "replace")

    def _length(self, length_max: int, what: str) -> int:
        length = self._number("Q", f"the length of {what}")
        if length > length_max:
            self._refuse(f"the length of {what}, {length}, exceeds {length_max}")
        return length

    def _number(self, letter: str, what: str) -> int:
        data = self._take(struct.calcsize(letter), what)
        return int.from_bytes(data, "little")

    def _take(self, size_bytes: int, what: str) -> bytes:
        """The next `size_bytes` of the header."""
        begin = self._position
        self._advance(begin + size_bytes, what)
        return bytes(memoryview(self._buffer)[begin : self._position])

    def _advance(self, end: int, what: str) -> None:
        """Go on to byte `end`, reading the file up to there when that has not been done yet."""
        if end > self._size_bytes:
            self._refuse(f"it is cut short or lies about its sizes: {what} reaches past the end of the file")
        if end > self._room.header_bytes:
            self._refuse(f"{what} makes the header larger than {self._room.header_bytes} bytes")
        have = len(self._buffer)
        if have < end:
            wanted = min(max(_READ_SIZE_BYTES, end - have), self._size_bytes - have)
            for piece in self._source.pieces(have, wanted):
                self._buffer += piece
        self._position = end

    def _refuse(self, reason: str) -> NoReturn:
        raise ModelUnusable(f"{self._path} cannot be used: {reason}")
