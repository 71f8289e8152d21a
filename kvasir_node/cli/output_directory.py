"""The directory that a command's results go to, tried before anything is measured for minutes."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvasir_proto.errors import UsageError


def prepare_output(directory: Path, files: Sequence[str] = (), *, is_new: bool = False) -> None:
    """Make a directory in which `files` can be written, with nothing in it where it `is_new`.

    Raises `UsageError` with what speaks against it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        is_empty = not any(directory.iterdir())
    except OSError as error:
        raise UsageError(f"{directory} cannot take the results: {error.strerror}") from None
    if is_new and not is_empty:
        raise UsageError(f"{directory} is not empty")
    for name in files:
        if (directory / name).is_dir():
            raise UsageError(f"{directory / name} is a directory")
