"""Files of a home that are something else: nobody waits for them, and nobody reads them to the end."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from kvasir_node.small_file import read_small_file
from tests.node.cli.invocation import TIMEOUT_S, call_process
from tests.tidy.repository import python_files, tree_of

WHAT_WAITS = pytest.mark.parametrize("what", ["pipe", "zero", "directory"])
READ_WHOLE = {"read_text", "read_bytes"}
READ_BY_OTHERS = {
    # The kernel's own, what belongs to the package or computes for it, and logs that `demo` wrote itself.
    "kvasir_node/certification/kernel_build.py",
    "kvasir_node/engine/processor_limit.py",
    "kvasir_node/gateway/dashboard.py",
    "kvasir_node/kernels/opencl_queue.py",
    "kvasir_node/tokenizer/tokenizer_child.py",
    "kvasir_node/demo.py",
}


def put(what: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(path, 0o600)
    elif what == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


def test_a_file_is_read_up_to_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_small_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_small_file(path, 4)


@WHAT_WAITS
def test_what_is_no_file_is_an_error_at_once(tmp_path: Path, what: str) -> None:
    put(what, tmp_path / "file")
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        read_small_file(tmp_path / "file", 100)


@WHAT_WAITS
@pytest.mark.parametrize("name", ["kvasir.toml", "state/slot-fence", "state/swarm-manifest", "lock"])
def test_status_waits_for_no_file_of_its_home(tmp_path: Path, what: str, name: str) -> None:
    put(what, tmp_path / name)
    outcome = call_process("status", "--check", home=tmp_path)
    assert outcome.status == (6 if name == "kvasir.toml" else 3), (outcome, TIMEOUT_S)


@pytest.mark.parametrize("name", ["models/.lock", "state/swarm-manifest", "identity.pem", "kvasir.toml"])
def test_founding_waits_for_no_pipe_of_its_home(tmp_path: Path, name: str) -> None:
    put("pipe", tmp_path / name)
    outcome = call_process("init", "--found", home=tmp_path)
    assert outcome.status == (7 if name == "models/.lock" else 6), outcome
    assert name in outcome.sentence or "models cannot be used" in outcome.sentence


def test_whole_files_are_read_in_one_place() -> None:
    for path in python_files("kvasir_node"):
        if path in READ_BY_OTHERS or path.startswith(("kvasir_node/bench/", "kvasir_node/sim/")):
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert node.func.attr not in READ_WHOLE, f"{path}:{node.lineno}: use read_small_file"
