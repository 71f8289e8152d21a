"""A pull's journal: lines that are whole count, up to the first that is not, and only of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir_node.model.pull_journal import JOURNAL, PullJournal

IDENTITY = ("https://a.example/m.gguf", "ab" * 32, "1000", '"one"')
PARTS = [("blk.0.ffn_up_exps.weight", 0), ("blk.0.ffn_up_exps.weight", 1), ("output.weight", 0)]


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def write(directory: Path) -> Path:
    journal = PullJournal(directory, IDENTITY)
    assert not journal.has_begun
    for number, part in enumerate(PARTS):
        journal.note(*part, digest(number))
    journal.close()
    return directory / JOURNAL


def known(directory: Path, identity: tuple[str, ...] = IDENTITY) -> list[bytes | None]:
    journal = PullJournal(directory, identity)
    return [journal.digest_of(*part) for part in PARTS]


def test_what_was_noted_is_known_to_the_next_one_which_goes_on_behind_it(tmp_path: Path) -> None:
    write(tmp_path)
    assert known(tmp_path) == [digest(0), digest(1), digest(2)]
    journal = PullJournal(tmp_path, IDENTITY)
    assert journal.has_begun
    journal.note("more", 7, digest(9))
    journal.close()
    assert known(tmp_path) == [digest(0), digest(1), digest(2)]
    assert PullJournal(tmp_path, IDENTITY).digest_of("more", 7) == digest(9)


@pytest.mark.parametrize("place", range(len(IDENTITY)))
def test_nothing_counts_of_other_bytes_and_it_goes_with_the_first_note(tmp_path: Path, place: int) -> None:
    write(tmp_path)
    other = (*IDENTITY[:place], "another", *IDENTITY[place + 1 :])
    assert known(tmp_path, other) == [None, None, None]
    journal = PullJournal(tmp_path, other)
    journal.note(*PARTS[1], digest(5))
    journal.close()
    assert known(tmp_path, other) == [None, digest(5), None]
    assert known(tmp_path) == [None, None, None]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[:-1],
        lambda line: line[:-9],
        lambda line: bytes(len(line)),
        lambda line: line[:20] + (b"0" if line[20:21] != b"0" else b"1") + line[21:],
        lambda line: line.replace(b" 1 ", b" 3 "),
        lambda line: b"\xff" + line[1:],
        lambda line: b"\n",
        lambda line: b"",
    ],
)
def test_a_line_that_is_not_whole_ends_what_counts_and_is_written_over(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = write(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = damage(lines[2])
    path.write_bytes(b"".join([*lines[:2], damaged, lines[3]]))
    is_gone = damaged == b""
    assert known(tmp_path) == [digest(0), None, digest(2) if is_gone else None]
    journal = PullJournal(tmp_path, IDENTITY)
    journal.note(*PARTS[1], digest(1))
    journal.close()
    assert known(tmp_path)[:2] == [digest(0), digest(1)]


def test_a_journal_that_is_no_journal_is_none(tmp_path: Path) -> None:
    for data in (b"", b"\0" * 100, b"words\n"):
        (tmp_path / JOURNAL).write_bytes(data)
        assert known(tmp_path) == [None, None, None]
