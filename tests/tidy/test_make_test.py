"""`make test`: all tests in two processes, or one plain run with ARGS; what fails is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.tidy.repository import ROOT

ALL: Final = "--numprocesses 2 --dist loadfile --no-loadscope-reorder"

PYTHON: Final = """#!/bin/sh
# Notes what it is called with, and ends as it is told to.
cd "${0%/*}"
echo "$@" >> called
exit "$(cat status)"
"""


@pytest.mark.parametrize("status", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "arguments, called",
    [
        ("", ALL),
        (" ", ALL),
        ("tests/proto -x", "tests/proto -x"),
        ("-k 'this or that'", "-k this or that"),
    ],
)
def test_pytest_is_called_once_and_its_failure_is_told(
    arguments: str, called: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o700)
    (tmp_path / "status").write_text(str(status))
    command = ["make", "test", "--old-file=.venv/.native-stamp", f"BIN={tmp_path}", f"ARGS={arguments}"]
    # Nothing of the `make` that runs this test.
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert (tmp_path / "called").read_text() == f"-m pytest {called}\n", done.stderr
    assert (done.returncode == 0) is (status == 0)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [[], ["--numprocesses", "1"]], ids=["plain", "another process"])
def test_fresh_examples_reach_every_process_of_tests(processes: list[str]) -> None:
    """Each reads for itself what was asked for: who starts the others must leave it there for them."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        *processes,
        "-p",
        "no:cacheprovider",
        "tests/tidy/fresh_examples.py",
    ]
    environment = os.environ | {"KVASIR_TEST_FRESH": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
