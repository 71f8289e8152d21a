"""`python -m tests.hostile_figures`: what the largest headers cost, what llama.cpp says of each architecture.

Prints the figures that `docs/reference/measurements.md` records under "Hostile files". Each header is as
large as the reader takes, of one kind of thing only, and is read and added in a process of its own, so that
its peak of memory is its own. It judges nothing.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvasir_node.backbone.trial import try_backbone_file
from kvasir_node.model import gguf_reader
from kvasir_node.model.backbone_file import write_backbone_file
from kvasir_node.model.gguf_format import (
    GgufFile,
    GgufTensor,
    MetadataEntry,
    ValueType,
    aligned,
    encode_header,
)
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.model.store import ModelStore
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.manifest import TENSORS_MAX
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME
from tests.architecture_models import ARCHITECTURES, make_architecture
from tests.model_makers import ModelShape, make_qwen3moe
from tests.plain_llama import silence

_ROOM: Final = gguf_reader.HEADER_SIZE_BYTES_MAX - (1 << 20)
_PIECE: Final = 4 << 20
_NAME_LENGTH: Final = 63


def _texts(key: str, size_bytes: int) -> MetadataEntry:
    """An entry of so many bytes of empty texts."""
    count = size_bytes // 8
    raw = struct.pack("<IQ", ValueType.STRING, count) + bytes(8 * count)
    return MetadataEntry(key, ValueType.ARRAY, raw, ValueType.STRING, count)


def _numbers(key: str, size_bytes: int) -> MetadataEntry:
    count = size_bytes // 8
    raw = struct.pack("<IQ", ValueType.UINT64, count) + bytes(8 * count)
    return MetadataEntry(key, ValueType.ARRAY, raw, ValueType.UINT64, count)


def _text(key: str, size_bytes: int) -> MetadataEntry:
    return MetadataEntry(key, ValueType.STRING, struct.pack("<Q", size_bytes) + b"x" * size_bytes)


def write_largest_headers(directory: Path) -> Iterator[Path]:
    """Models of one layer whose headers are as large as the reader takes, each of another thing."""
    small = make_qwen3moe(directory / "small.gguf", ModelShape(n_layer=1))
    header = read_gguf(small)
    data = small.read_bytes()[header.data_offset :]
    n_piece = _ROOM // _PIECE
    n_key = gguf_reader.METADATA_ENTRIES_MAX - len(header.metadata)
    key_room = _ROOM // n_key - gguf_reader.KEY_LENGTH_MAX - 64
    n_tensor = TENSORS_MAX - len(header.tensors)
    tensor_room = _ROOM - n_tensor * (_NAME_LENGTH + 56)
    kinds: dict[str, tuple[list[MetadataEntry], int]] = {
        "empty texts": ([_texts(f"k{index}", _PIECE) for index in range(n_piece)], 0),
        "long texts": ([_text(f"k{index}", _PIECE) for index in range(n_piece)], 0),
        "numbers": ([_numbers(f"k{index}", _PIECE) for index in range(n_piece)], 0),
        "keys": (
            [
                _texts(f"{index:05}".ljust(gguf_reader.KEY_LENGTH_MAX, "k"), key_room)
                for index in range(n_key)
            ],
            0,
        ),
        "tensors": ([_texts(f"k{index}", _PIECE) for index in range(tensor_room // _PIECE)], n_tensor),
    }
    for name, (entries, n_more) in kinds.items():
        path = directory / f"{name.replace(' ', '-')}.gguf"
        _write(path, header, entries, data, n_more)
        yield path


def _write(path: Path, header: GgufFile, entries: list[MetadataEntry], data: bytes, n_more: int) -> None:
    """The model of `header` with more entries, and more tensors of one value each."""
    end = header.data_offset + aligned(len(data), header.alignment)
    more = [
        GgufTensor(
            f"{index:05}".ljust(_NAME_LENGTH, "t"),
            TENSOR_TYPES_BY_NAME["f32"],
            (1, 1, 1, 1),
            end + header.alignment * index,
            4,
        )
        for index in range(n_more)
    ]
    written = encode_header(
        [*header.metadata.values(), *entries],
        [*header.tensors, *more],
        header.alignment,
        header.data_offset,
    )
    with path.open("wb") as file:
        file.write(written + data)
        file.truncate(len(written) + aligned(len(data), header.alignment) + header.alignment * n_more)


def _cost(what: str, path: Path) -> str:
    """In a process of its own: read the file, or add it to a store; seconds and peak of memory."""
    started = time.monotonic()
    try:
        if what == "read":
            read_gguf(path)
        else:
            ModelStore(path.with_suffix("")).add(path)
        outcome = "taken"
    except ModelUnusable as error:
        outcome = f"refused: {error}"
    # Not ru_maxrss, which begins with what the parent had.
    peak_kib = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))[0]
    return f"{outcome}, {time.monotonic() - started:.1f} s, peak {int(peak_kib) >> 10} MiB"


def _judge_architectures(directory: Path) -> None:
    silence()
    taken, refused, times = 0, [], []
    for model in ARCHITECTURES:
        path = make_architecture(directory / "model.gguf", model)
        backbone = directory / "backbone.gguf"
        write_backbone_file(path, build_manifest(path), backbone)
        started = time.monotonic()
        try:
            try_backbone_file(backbone)
            taken += 1
        except ModelUnusable as error:
            refused.append(f"{model.name}: {error}")
        times.append(time.monotonic() - started)
        backbone.unlink()
    _say(f"llama.cpp takes {taken} of {len(times)}, in {min(times):.1f} to {max(times):.1f} s each")
    for each in refused:
        _say(f"  refused {each}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print every figure."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for path in write_largest_headers(directory):
            for what in ("read", "add"):
                command = [sys.executable, "-m", "tests.hostile_figures", what, str(path)]
                said = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode().strip()
                _say(f"{path.stem}: {what}: {said}")
            path.unlink()
        _judge_architectures(directory)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _say(_cost(sys.argv[1], Path(sys.argv[2])))
    else:
        main()
