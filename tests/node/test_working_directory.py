"""Directories of one command's own: gone with the command, or with the next one when it was killed."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_node.working_directory import working_directory
from kvasir_proto.errors import DiskFull

# Makes a directory with something in it, says its name, and waits to be killed.
SCRIPT = """
import sys
from pathlib import Path
from kvasir_node.working_directory import working_directory

with working_directory(Path(sys.argv[1]), "demo") as directory:
    (directory / "home").mkdir()
    (directory / "home" / "file").write_bytes(bytes(1000))
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_a_directory_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    with working_directory(tmp_path, "measure") as directory:
        assert directory.name.startswith("measure-")
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        (directory / "file").write_text("")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_command_left_is_removed_by_the_next_and_what_is_in_use_is_not(tmp_path: Path) -> None:
    mine = [tmp_path / "models", tmp_path / "measure-of-mine", tmp_path / "layer-1.gguf"]
    for each in mine:
        each.mkdir()
    owner = subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        try:
            assert owner.stdout is not None
            left = Path(owner.stdout.readline().decode().strip())
            with working_directory(tmp_path, "measure"), working_directory(tmp_path, "demo"):
                assert len(list(tmp_path.iterdir())) == len(mine) + 3
            assert (left / "home" / "file").exists(), "its owner lives"
        finally:
            owner.kill()
    assert left.exists()
    with working_directory(tmp_path, "measure") as directory:
        assert sorted(tmp_path.iterdir()) == sorted([*mine, directory])


def test_nothing_is_left_where_there_is_no_room_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_room)
    with pytest.raises(DiskFull), working_directory(tmp_path, "demo"):
        pass
    assert list(tmp_path.iterdir()) == []
