"""The parts of a GGUF file as values: metadata entries, tensors, and the header they make.

Decides how a header's bytes correspond to values, in one place for the reader and the writer. A metadata
value is kept as the bytes it had in the file once they have been validated: its encoding is unique, so it is
carried through unchanged to the last bit (a NaN's payload, text that is not UTF-8). It opens no file.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvasir_node.model.model_url import Location
from kvasir_proto.tensor_types import TensorType

MAGIC: Final = b"GGUF"
VERSION_WRITTEN: Final = 3
ALIGNMENT_KEY: Final = "general.alignment"
ALIGNMENT_DEFAULT: Final = 32


class ValueType(enum.IntEnum):
    """The types a metadata value can have, with GGUF's numbers."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


SCALAR_FORMATS: Final[Mapping[ValueType, str]] = MappingProxyType(
    {
        ValueType.UINT8: "B",
        ValueType.INT8: "b",
        ValueType.UINT16: "H",
        ValueType.INT16: "h",
        ValueType.UINT32: "I",
        ValueType.INT32: "i",
        ValueType.FLOAT32: "f",
        ValueType.BOOL: "?",
        ValueType.UINT64: "Q",
        ValueType.INT64: "q",
        ValueType.FLOAT64: "d",
    }
)
"""The `struct` letter of every type of fixed size."""

INTEGER_TYPES: Final = frozenset(
    {
        ValueType.UINT8,
        ValueType.INT8,
        ValueType.UINT16,
        ValueType.INT16,
        ValueType.UINT32,
        ValueType.INT32,
        ValueType.UINT64,
        ValueType.INT64,
    }
)


@dataclass(frozen=True, slots=True)
class MetadataEntry:
    """One key with its value. `raw` is the value's bytes in the file, after the type number.

    For an array, `element_type` and `count` describe it (`raw` begins with both); otherwise `element_type`
    is None and `count` is 1.
    """

    key: str
    type: ValueType
    raw: bytes
    element_type: ValueType | None = None
    count: int = 1

    def scalars(self) -> tuple[int | float, ...]:
        """The numbers of a scalar or of an array of scalars; ValueError for text."""
        kind = self.element_type if self.element_type is not None else self.type
        letter = SCALAR_FORMATS.get(kind)
        if letter is None:
            raise ValueError(f"{self.key} is not made of numbers")
        begin = 0 if self.element_type is None else 12
        return struct.unpack_from(f"<{self.count}{letter}", self.raw, begin)

    def text(self) -> str:
        """The text of a string value; ValueError when it is not one, or not UTF-8."""
        if self.type is not ValueType.STRING:
            raise ValueError(f"{self.key} is not a text")
        return self.raw[8:].decode()


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` in ggml's order (fastest first), `offset` absolute in the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """A validated header. Tensors are in the file's order; `data_offset` is where their bytes begin.

    Of a split model it is the first part's, with the tensors of all parts: their offsets and `size_bytes`
    count through the files at `paths`, one after the other.
    """

    path: Location
    paths: tuple[Location, ...]
    version: int
    alignment: int
    metadata: Mapping[str, MetadataEntry]
    tensors: tuple[GgufTensor, ...]
    data_offset: int
    size_bytes: int
    header_sha256: bytes


def integer_entry(key: str, value: int, value_type: ValueType = ValueType.UINT32) -> MetadataEntry:
    """An entry holding one integer."""
    return MetadataEntry(key, value_type, struct.pack(f"<{SCALAR_FORMATS[value_type]}", value))


def float_entry(key: str, value: float) -> MetadataEntry:
    """An entry holding one FLOAT32."""
    return MetadataEntry(key, ValueType.FLOAT32, struct.pack("<f", value))


def text_entry(key: str, value: str) -> MetadataEntry:
    """An entry holding one text."""
    return MetadataEntry(key, ValueType.STRING, encode_text(value))


def encode_text(value: str) -> bytes:
    """A GGUF string: its length, then its bytes."""
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def encode_header(
    metadata: Sequence[MetadataEntry], tensors: Sequence[GgufTensor], alignment: int, data_offset: int
) -> bytes:
    """The first `data_offset` bytes of a file whose tensors lie at their (absolute) offsets."""
    parts = [struct.pack("<4sIQQ", MAGIC, VERSION_WRITTEN, len(tensors), len(metadata))]
    for entry in metadata:
        parts += (encode_text(entry.key), struct.pack("<I", entry.type), entry.raw)
    for tensor in tensors:
        n_dimension = len(tensor.shape)
        parts += (
            encode_text(tensor.name),
            struct.pack(f"<I{n_dimension}Q", n_dimension, *tensor.shape),
            struct.pack("<IQ", tensor.type.id, tensor.offset - data_offset),
        )
    size_bytes = sum(map(len, parts))
    parts.append(bytes(aligned(size_bytes, alignment) - size_bytes))
    return b"".join(parts)  # once: a vocabulary makes it as large as some models


def aligned(offset: int, alignment: int) -> int:
    """The first multiple of `alignment` at or after `offset`."""
    return -(-offset // alignment) * alignment


def metadata_sha256(
    metadata: Mapping[str, MetadataEntry], prefix: str = "", without: str | None = None
) -> bytes:
    """Digest of every entry whose key begins with `prefix`, sorted by key: key length, key, type, value.

    Entries whose key begins with `without` are left out.
    """
    hasher = hashlib.sha256()
    for key in sorted(metadata):
        if key.startswith(prefix) and (without is None or not key.startswith(without)):
            entry = metadata[key]
            hasher.update(encode_text(key) + struct.pack("<I", entry.type))
            hasher.update(entry.raw)
    return hasher.digest()
