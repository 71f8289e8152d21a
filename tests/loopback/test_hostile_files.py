"""Every broken file through the command that takes models in, in one process with little memory.

The tables of broken headers and parts are those of the readers' own tests; here they meet the whole command:
exit status 7, one sentence with the file's name, no signal, and no more memory than an honest file takes.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.model.test_gguf_reader import BROKEN_FILES
from tests.node.model.test_gguf_split import BROKEN, two_parts, write_parts

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

MEMORY_BYTES_MAX = 64 << 20
"""Resident memory that all refusals together may add to the process: none of the files has 10 KiB."""

# Takes the files in one after another; prints what came of each, and how much memory all of it took.
SCRIPT = """
import contextlib, io, json, resource, sys
from kvasir_node.cli import main

def add(path):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = main(["--home", sys.argv[1], "models", "add", path])
    return [status, said.getvalue()]

paths = json.load(sys.stdin)
first = add(paths[0])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
outcomes = [first, *map(add, paths[1:])]
print(json.dumps([outcomes, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)]))
"""


def take_in(home: Path, paths: list[Path]) -> tuple[list[tuple[int, str]], int]:
    """(exit status, what was said) for each file, and the bytes of memory that the refusals took."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(home)],
        input=json.dumps([str(path) for path in paths]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    outcomes, memory_bytes = json.loads(ended.stdout)
    return [(status, said) for status, said in outcomes], memory_bytes


def test_every_broken_file_ends_the_command_with_7_and_a_sentence(tmp_path: Path) -> None:
    paths = []
    for index, (data, _) in enumerate(BROKEN_FILES.values()):
        paths.append(tmp_path / f"broken-{index}.gguf")
        paths[-1].write_bytes(data)
    for index, (change, _) in enumerate(BROKEN.values()):
        directory = tmp_path / f"parts-{index}"
        directory.mkdir()
        parts = two_parts()
        change(parts)
        paths.append(write_parts(directory, parts))
    # A whole model, cut at each sixteenth of it: in the header, in the vocabulary, in a tensor.
    whole = make_qwen3moe(tmp_path / "whole.gguf", ModelShape(n_layer=1, tokenizer=True)).read_bytes()
    for sixteenth in range(16):
        paths.append(tmp_path / f"cut-{sixteenth}.gguf")
        paths[-1].write_bytes(whole[: len(whole) * sixteenth // 16])
    outcomes, memory_bytes = take_in(tmp_path / "home", paths)
    assert len(outcomes) == len(paths) >= 90
    for path, (status, said) in zip(paths, outcomes, strict=True):
        assert status == 7, f"{path.name}: {said}"
        assert said.startswith("kvasir-node: "), said
        assert path.parent.name in said, said
        assert said.count("\n") == 1, said
    assert memory_bytes <= MEMORY_BYTES_MAX


def test_a_header_of_nothing_but_sizes_takes_memory_for_what_is_there(tmp_path: Path) -> None:
    """Holes in the file make it large for nothing; only the header's limit is ever read of it."""
    path = tmp_path / "holes.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1, 1))
        file.write(struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 10, 4 << 20))
        file.truncate(1 << 40)
    small = tmp_path / "small.gguf"
    small.write_bytes(b"GGML")
    ((_, _), (status, said)), memory_bytes = take_in(tmp_path / "home", [small, path])
    assert status == 7
    assert "the name of tensor 0 is not 1 to 63 printable characters" in said
    assert memory_bytes <= 3 * (32 << 20)
