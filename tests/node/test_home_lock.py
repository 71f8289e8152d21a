"""One daemon per home, whatever happens to the last one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_node.home_lock import HomeLock, holder_of, is_locked
from kvasir_proto.errors import AlreadyRunning, ConfigurationInvalid

HOLDS = """
import pathlib, sys
from kvasir_node.home_lock import HomeLock
with HomeLock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with HomeLock(path):
        with pytest.raises(AlreadyRunning, match=str(os.getpid())) as refusal:
            HomeLock(path).__enter__()
        assert refusal.value.exit_code == 4
        assert holder_of(path) == os.getpid()


def test_the_lock_can_be_taken_again_after_it_was_let_go(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    for _ in range(2):
        with HomeLock(path):
            pass
    assert path.exists(), "removing the file would let two daemons each lock one of that name"


def test_two_homes_do_not_hinder_each_other(tmp_path: Path) -> None:
    with HomeLock(tmp_path / "a"), HomeLock(tmp_path / "b"):
        pass


def test_another_process_is_refused_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(AlreadyRunning, match=f"process {holder.pid}"):
            HomeLock(path).__enter__()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        with HomeLock(path):
            assert holder_of(path) == os.getpid()


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with HomeLock(path):
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
    try:
        with HomeLock(path):
            pass
    finally:
        child.communicate()


def test_a_file_that_cannot_be_opened_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match="cannot open the lock"):
        HomeLock(tmp_path / "missing" / "lock").__enter__()


@pytest.mark.parametrize("content", [b"", b"not a number", b"\xff\xfe", "٣".encode()])
def test_nonsense_in_the_file_names_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lock").write_bytes(content)
    assert holder_of(tmp_path / "lock") is None
    assert holder_of(tmp_path / "none") is None


def test_looking_at_a_lock_takes_and_makes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not is_locked(path)
    assert not path.exists()
    with HomeLock(path):
        assert is_locked(path)
        assert holder_of(path) == os.getpid()
    assert not is_locked(path)
    with HomeLock(path):
        pass
