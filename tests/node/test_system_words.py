"""No number of the system in what a person reads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvasir_node.system_words import in_words
from tests.node.cli.invocation import call


@pytest.mark.parametrize(
    "error, words",
    [
        (OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH)), "No route to host"),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/x"), "/x: No such file or directory"),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), b"/x"), "/x: No such file or directory"),
        (TimeoutError("the worker did not answer in time"), "the worker did not answer in time"),
        (BrokenPipeError(), "BrokenPipeError"),
        (ValueError("no number"), "no number"),
    ],
)
def test_an_error_is_told_in_words(error: Exception, words: str) -> None:
    assert in_words(error) == words


@pytest.mark.loopback
@pytest.mark.parametrize("flags", [("--trace",), ("--seeds", "1..1", "--results")])
def test_a_file_that_a_command_cannot_write_is_named_in_words(tmp_path: Path, flags: tuple[str, ...]) -> None:
    file = tmp_path / "nowhere" / "file"
    outcome = call("sim", "--nodes", "3", "--seconds", "1", *flags, str(file), home=tmp_path)
    assert outcome.status == 1
    assert outcome.sentence == f"{file}: No such file or directory"
