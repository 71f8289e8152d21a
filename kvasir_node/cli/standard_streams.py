"""Standard streams that are closed, full or too narrow for a letter.

A shell can start a command without any of the three (`>&-`). Python has None in their place then, and the
first file or socket that is opened would become the stream of every child. So each is opened here: input is
empty, output cannot be written, errors go nowhere. What fails in writing output says that it is the output:
the system's own sentence could mean any file.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, Final

from kvasir_proto.errors import KvasirError

_MODES: Final = (os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)
"""How the null device stands in for each stream: output is open for reading, so that writing fails."""


class OutputUnwritable(KvasirError):
    """What a command prints cannot be written: the disk is full, or standard output is closed."""


class _Output(io.FileIO):
    """Standard output; a reader that went away is left to click, which ends quietly then."""

    def write(self, data: Any, /) -> Any:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            raise OutputUnwritable(f"standard output cannot be written: {error.strerror or error}") from None


def open_standard_streams() -> None:
    """See to it that all three streams are there, and that no letter can fail them."""
    for descriptor, mode in enumerate(_MODES):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest that is free, which is this one: those below are open.
            os.set_inheritable(os.open(os.devnull, mode), True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - it lives as long as we do
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        encoding = "utf-8" if sys.stdout is None else sys.stdout.encoding
        output = _Output(1, "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(output), encoding, "replace", line_buffering=output.isatty()
        )
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale that lacks a letter is no reason to fail


def abandon_output() -> None:
    """Write no more: Python would try again at the end, and complain in its own words."""
    sys.stdout = io.StringIO()
