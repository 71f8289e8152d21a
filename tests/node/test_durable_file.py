"""Files appear whole or not at all, and only their owner can read them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from kvasir_node.durable_file import PARTIAL_PREFIX, durable_file


def rests(directory: Path) -> list[str]:
    return [each.name for each in directory.iterdir() if each.name.startswith(PARTIAL_PREFIX)]


def test_the_file_appears_at_the_end_with_all_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with durable_file(path) as file:
        file.write(b"whole")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not rests(tmp_path)


def test_a_failure_on_the_way_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(TypeError), durable_file(path) as file:
        file.write("not bytes")  # type: ignore[call-overload]
    assert path.read_bytes() == b"old"
    assert not rests(tmp_path)


def test_the_disk_has_it_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is often noticed only when it is flushed: the old file must still be there then."""
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvasir_node.durable_file.os.fsync", full)
    with pytest.raises(OSError, match="No space"), durable_file(path) as file:
        file.write(b"new")
    assert path.read_bytes() == b"old"
    assert not rests(tmp_path)


def test_file_and_directory_are_both_flushed_in_that_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    flushed: list[tuple[bool, bool]] = []

    def note(descriptor: int) -> None:
        flushed.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), path.exists()))

    monkeypatch.setattr("kvasir_node.durable_file.os.fsync", note)
    with durable_file(path) as file:
        file.write(b"x")
    assert flushed == [(False, False), (True, True)]


def test_the_first_of_two_writers_wins_where_that_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with durable_file(path, keep_existing=True) as late:
        with durable_file(path, keep_existing=True) as early:
            early.write(b"early")
        late.write(b"late")
    assert path.read_bytes() == b"early"
    assert not rests(tmp_path)
