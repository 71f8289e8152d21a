"""`make test`: two parts that are all tests, or one plain run with ARGS; what fails anywhere is told."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.tidy.repository import ROOT

APART: Final = "tests/loopback"
FIRST: Final = f"-m pytest --numprocesses 2 --dist loadfile --ignore {APART}"
SECOND: Final = f"-m pytest {APART}"

PYTHON: Final = """#!/bin/sh
# Notes what it is called with, and ends as the next of the statuses says.
cd "${0%/*}"
echo "$@" >> called
read -r status < statuses
sed -i 1d statuses
exit "$status"
"""


@pytest.mark.parametrize(
    "arguments, statuses, called, is_good",
    [
        ("", "00", [FIRST, SECOND], True),
        ("", "10", [FIRST, SECOND], False),
        ("", "01", [FIRST, SECOND], False),
        ("", "11", [FIRST, SECOND], False),
        ("", "2", [FIRST], False),  # interrupted: nobody wants the rest
        ("", "3", [FIRST], False),
        ("", "5", [FIRST], False),
        ("", "05", [FIRST, SECOND], False),
        (" ", "00", [FIRST, SECOND], True),
        ("tests/proto -x", "0", ["-m pytest tests/proto -x"], True),
        ("-k 'this or that'", "1", ["-m pytest -k this or that"], False),
        ("-k nothing", "5", ["-m pytest -k nothing"], False),
    ],
)
def test_each_part_runs_and_what_fails_is_told(
    arguments: str, statuses: str, called: list[str], is_good: bool, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o700)
    (tmp_path / "statuses").write_text("".join(f"{each}\n" for each in statuses))
    command = ["make", "test", "--old-file=.venv/.native-stamp", f"BIN={tmp_path}", f"ARGS={arguments}"]
    # Nothing of the `make` that runs this test.
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert (tmp_path / "called").read_text().splitlines() == called, done.stderr
    assert (done.returncode == 0) is is_good


def test_the_second_part_is_there() -> None:
    assert list((ROOT / APART).glob("test_*.py"))
