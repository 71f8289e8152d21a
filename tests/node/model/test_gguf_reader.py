"""The reader believes nothing: every way a header can be wrong gives one sentence that names the field."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.model import gguf_reader
from kvasir_node.model.gguf_format import GgufFile, ValueType
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_proto.errors import ModelUnusable
from tests.model_makers import ModelShape, make_qwen3moe


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, value_type: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", value_type) + value


def tensor(
    name: bytes = b"a", shape: tuple[int, ...] = (8,), type_id: int = 0, offset: int = 0, n: int | None = None
) -> bytes:
    n_dimension = len(shape) if n is None else n
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", n_dimension, *shape, type_id, offset)


def container(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (tensor(),),
    n_entry: int | None = None,
    n_tensor: int | None = None,
    data: int = 64,
    alignment: int = 32,
) -> bytes:
    """A file with these parts; the counts and the size of the data may lie."""
    header = magic + struct.pack(
        "<IQQ",
        version,
        len(tensors) if n_tensor is None else n_tensor,
        len(entries) if n_entry is None else n_entry,
    )
    header += b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % alignment + data)


HUGE = 1 << 62

BROKEN_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "does not begin with 'GGUF'"),
    "three bytes": (b"GGU", "does not begin with 'GGUF'"),
    "another format": (container(magic=b"GGML"), "does not begin with 'GGUF'"),
    "nothing after the magic": (b"GGUF", "cut short .*the version"),
    "version 1": (container(version=1), "version 1 is not known"),
    "version 4": (container(version=4), "version 4 is not known"),
    "big endian": (container(version=3 << 24), "big-endian"),
    "nothing after the version": (b"GGUF\3\0\0\0", "cut short .*the number of tensors"),
    "no tensors": (container(tensors=()), "the number of tensors, 0, "),
    "huge number of tensors": (container(n_tensor=HUGE), "the number of tensors, 4611686018427387904, "),
    "more tensors than there are": (container(n_tensor=2, data=0), "tensor 1"),
    "huge number of entries": (
        container(n_entry=HUGE),
        "the number of metadata entries, 4611686018427387904",
    ),
    "more entries than there are": (container(n_entry=9), "metadata key"),
    "huge key": (
        container(entries=(struct.pack("<Q", HUGE),)),
        "the length of metadata key 0, 4611686018427387904, exceeds",
    ),
    "long key": (container(entries=(entry(b"k" * 1025, 0, b"\0"),)), "the length of metadata key 0, 1025"),
    "empty key": (container(entries=(entry(b"", 0, b"\0"),)), "metadata key 0 is not made of printable"),
    "key with a zero": (
        container(entries=(entry(b"a\0b", 0, b"\0"),)),
        "metadata key 0 is not made of print",
    ),
    "key that is not ascii": (
        container(entries=(entry("ä".encode(), 0, b"\0"),)),
        "metadata key 0 is not made",
    ),
    "one key twice": (
        container(entries=(entry(b"k", 0, b"\0"), entry(b"k", 0, b"\0"))),
        "metadata key 'k' occurs twice",
    ),
    "unknown value type": (container(entries=(entry(b"k", 13, b"\0"),)), "the value of 'k' has type 13"),
    "bool that is neither": (container(entries=(entry(b"k", 7, b"\2"),)), "'k' is neither true nor false"),
    "bools of which one is neither": (
        container(entries=(entry(b"k", 9, struct.pack("<IQ", 7, 3) + b"\0\1\2"),)),
        "'k' is neither true nor false",
    ),
    "huge text": (
        container(entries=(entry(b"k", 8, struct.pack("<Q", HUGE)),)),
        "the length of the value of 'k', 4611686018427387904, exceeds",
    ),
    "text past the end": (
        container(entries=(entry(b"k", 8, struct.pack("<Q", 9999)),)),
        "cut short .*the value of 'k'",
    ),
    "huge array": (
        container(entries=(entry(b"k", 9, struct.pack("<IQ", 4, HUGE)),)),
        "the length of 'k', 4611686018427387904, exceeds",
    ),
    "array past the end": (
        container(entries=(entry(b"k", 9, struct.pack("<IQ", 4, 9999)),)),
        "cut short .*the value of 'k'",
    ),
    "array of texts past the end": (
        container(entries=(entry(b"k", 9, struct.pack("<IQ", 8, 4_000_000)),)),
        "the value of 'k'",
    ),
    "array of arrays": (
        container(entries=(entry(b"k", 9, struct.pack("<IQ", 9, 1)),)),
        "the value of 'k' is an array of arrays",
    ),
    "array of unknown type": (
        container(entries=(entry(b"k", 9, struct.pack("<IQ", 99, 1)),)),
        "an element of 'k' has type 99",
    ),
    "alignment of another type": (
        container(entries=(entry(b"general.alignment", 10, struct.pack("<Q", 32)),)),
        "general.alignment is not an unsigned 32-bit number",
    ),
    **{
        f"alignment {value}": (
            container(entries=(entry(b"general.alignment", 4, struct.pack("<I", value)),)),
            f"general.alignment is {value}, not a power of two",
        )
        for value in (0, 1, 48, 1 << 31)
    },
    "huge tensor name": (container(tensors=(struct.pack("<Q", HUGE),)), "the length of the name of tensor 0"),
    "tensor name of 64": (container(tensors=(tensor(b"n" * 64),)), "the name of tensor 0 is not 1 to 63"),
    "empty tensor name": (container(tensors=(tensor(b""),)), "the name of tensor 0 is not 1 to 63"),
    "tensor name with a zero": (container(tensors=(tensor(b"a\0"),)), "the name of tensor 0 is not 1 to 63"),
    "one tensor name twice": (
        container(tensors=(tensor(), tensor(offset=32))),
        "two tensors have one name",
    ),
    "no dimension": (container(tensors=(tensor(shape=()),)), "number of dimensions of a, 0"),
    "five dimensions": (container(tensors=(tensor(shape=(8,) * 5),)), "number of dimensions of a, 5"),
    "huge number of dimensions": (
        container(tensors=(tensor(n=0xFFFFFFFF),)),
        "number of dimensions of a, 4294967295",
    ),
    "dimension zero": (container(tensors=(tensor(shape=(8, 0)),)), "a dimension of a, 0"),
    "dimension huge": (
        container(tensors=(tensor(shape=(8, HUGE)),)),
        "a dimension of a, 4611686018427387904",
    ),
    "dimensions that overflow": (
        container(tensors=(tensor(shape=(1 << 31, 1 << 31, 1 << 31, 4)),)),
        "lies about its sizes: a ends at byte",
    ),
    "unknown tensor type": (container(tensors=(tensor(type_id=99),)), "a has type 99"),
    "removed tensor type": (container(tensors=(tensor(type_id=31),)), "a has type 31"),
    "activation type": (container(tensors=(tensor(shape=(32,), type_id=9),)), "a has type 9"),
    "half a block": (container(tensors=(tensor(shape=(48,), type_id=8),)), "the rows of a have 48 values"),
    "offset that is not aligned": (
        container(tensors=(tensor(offset=16),)),
        "the offset of a is not a multiple of 32",
    ),
    "offset past the end": (container(tensors=(tensor(offset=1 << 40),)), "lies about its sizes: a ends at"),
    "offset that overflows": (
        container(tensors=(tensor(offset=(1 << 64) - 32),)),
        "lies about its sizes: a ends at",
    ),
    "data cut short": (container(data=31), "cut short or lies about its sizes: a ends at byte"),
    "no data at all": (container(data=0)[:-3], "padding after the tensor list"),
    "overlap": (
        container(tensors=(tensor(b"a", (16,)), tensor(b"b", (8,), offset=32))),
        "b overlaps a",
    ),
    "same place": (container(tensors=(tensor(b"a"), tensor(b"b"))), "b overlaps a"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_broken_file_is_refused_by_a_sentence_that_names_the_field(case: str, tmp_path: Path) -> None:
    data, sentence = BROKEN_FILES[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelUnusable, match=sentence) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 7


def test_every_prefix_of_a_file_is_cut_short(tmp_path: Path) -> None:
    whole = container(
        entries=(entry(b"k", 8, text(b"value")), entry(b"n", 9, struct.pack("<IQ2H", 2, 2, 1, 2))), data=32
    )
    path = tmp_path / "cut.gguf"
    for length in range(4, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelUnusable, match="cut short"):
            read_gguf(path)
    path.write_bytes(whole)
    assert read_gguf(path).size_bytes == len(whole)


def test_what_is_not_a_readable_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, sentence in ((pipe, "regular file"), (tmp_path, "regular file"), (tmp_path / "no", "No such")):
        with pytest.raises(ModelUnusable, match=sentence):
            read_gguf(path)


def test_a_header_larger_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_reader, "HEADER_SIZE_BYTES_MAX", 100)
    path = tmp_path / "large.gguf"
    path.write_bytes(container(entries=(entry(b"k", 8, text(b"x" * 100)),)))
    with pytest.raises(ModelUnusable, match="the value of 'k' makes the header larger than 100 bytes"):
        read_gguf(path)


def test_every_value_type_is_read_as_it_was_written(tmp_path: Path) -> None:
    values: dict[str, tuple[int, str, Any]] = {
        "u8": (0, "B", 255),
        "i8": (1, "b", -128),
        "u16": (2, "H", 65535),
        "i16": (3, "h", -32768),
        "u32": (4, "I", 2**32 - 1),
        "i32": (5, "i", -(2**31)),
        "f32": (6, "f", 0.5),
        "bool": (7, "?", True),
        "u64": (10, "Q", 2**64 - 1),
        "i64": (11, "q", -(2**63)),
        "f64": (12, "d", 0.1),
    }
    entries = [
        entry(key.encode(), kind, struct.pack("<" + f, value)) for key, (kind, f, value) in values.items()
    ]
    entries.append(entry(b"text", 8, text("ä\0b".encode())))
    entries.append(entry(b"bytes", 8, text(b"\xff\xfe")))
    entries.append(entry(b"texts", 9, struct.pack("<IQ", 8, 2) + text(b"a") + text(b"")))
    entries.append(entry(b"numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)))
    entries.append(entry(b"nothing", 9, struct.pack("<IQ", 5, 0)))
    path = tmp_path / "values.gguf"
    path.write_bytes(container(entries=tuple(entries)))

    metadata = read_gguf(path).metadata
    for key, (kind, _, value) in values.items():
        assert (metadata[key].type, metadata[key].scalars()) == (ValueType(kind), (value,))
    assert metadata["text"].text() == "ä\0b"
    assert metadata["bytes"].raw == text(b"\xff\xfe")
    assert (metadata["texts"].count, metadata["texts"].element_type) == (2, ValueType.STRING)
    assert metadata["numbers"].scalars() == (1, -2, 3)
    assert metadata["nothing"].scalars() == ()
    for key, read in (("bytes", "text"), ("numbers", "text"), ("text", "scalars"), ("texts", "scalars")):
        with pytest.raises(ValueError, match=r"."):
            getattr(metadata[key], read)()


def test_version_2_and_another_alignment_are_read(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    alignment = entry(b"general.alignment", 4, struct.pack("<I", 128))
    path.write_bytes(container(version=2, entries=(alignment,), alignment=128))
    header = read_gguf(path)
    assert (header.version, header.alignment, header.data_offset % 128) == (2, 128, 0)


def test_a_real_file_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = make_qwen3moe(tmp_path / "model.gguf", ModelShape(tokenizer=True))
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert [(each.name, each.type.id, each.shape, each.offset, each.size_bytes) for each in ours.tensors] == [
        (each.name, each.tensor_type.value, tuple(map(int, each.shape)), each.data_offset, each.n_bytes)
        for each in theirs.tensors
    ]
    fields = {key: field for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert list(ours.metadata) == list(fields)
    assert ours.data_offset == theirs.data_offset
    assert ours.header_sha256 == hashlib.sha256(path.read_bytes()[: ours.data_offset]).digest()
    scores = ours.metadata["tokenizer.ggml.token_type"]
    assert np.array_equal(scores.scalars(), fields["tokenizer.ggml.token_type"].contents())


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("fuzz") / "model.gguf"
    return make_qwen3moe(path, ModelShape(n_layer=1, n_embd=32, n_expert=2, tokenizer=True)).read_bytes()


@pytest.fixture(scope="module")
def read_bytes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bytes], GgufFile]:
    path = tmp_path_factory.mktemp("fuzz") / "damaged.gguf"

    def read(data: bytes) -> GgufFile:
        path.write_bytes(data)
        return read_gguf(path)

    return read


@given(st.integers(min_value=0, max_value=1 << 20), st.binary(min_size=1, max_size=9))
def test_a_damaged_header_is_refused_or_still_consistent(
    whole_file: bytes, read_bytes: Callable[[bytes], GgufFile], position: int, patch: bytes
) -> None:
    position %= 9000  # the header, with its vocabulary, and a little more
    with contextlib.suppress(ModelUnusable):
        header = read_bytes(whole_file[:position] + patch + whole_file[position + len(patch) :])
        assert all(each.offset + each.size_bytes <= header.size_bytes for each in header.tensors)


def test_where_memory_runs_out_the_model_is_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(container(data=32))

    def run_out(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(gguf_reader, "_read_part", run_out)
    with pytest.raises(
        ModelUnusable, match=r"large\.gguf cannot be used: there is not enough memory to read it$"
    ):
        read_gguf(path)
