"""Which command a command line names, before anything is there that could parse it.

A daemon that is told to stop is told what it waits for, and ends with 0, also in its first moments; any other
command was stopped. It knows no command but that one, and imports nothing.
"""

from collections.abc import Sequence

_TAKE_A_VALUE = ("--home", "--log-level", "--log-format")


def is_daemon(arguments: Sequence[str]) -> bool:
    """Whether these arguments run the daemon."""
    return _command(arguments) == "run"


def _command(arguments: Sequence[str]) -> str:
    """The command that these arguments name: the first that is no flag and no flag's value."""
    remaining = iter(arguments)
    for each in remaining:
        if not each.startswith("-"):
            return each
        if each in _TAKE_A_VALUE:
            next(remaining, "")
    return ""
