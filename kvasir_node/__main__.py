"""Where every command begins: the `kvasir-node` script and `python -m kvasir_node`.

It imports next to nothing, so that Ctrl-C, SIGTERM or SIGHUP while the rest is imported, which takes some
tenths of a second, is a sentence and a status as it is later. It parses no more than which command it is.
"""

import contextlib
import os
import sys

from kvasir_node.stop_signals import ToldToStop, raised_when_told

_STOPPED = 1
"""As `docs/reference/exit-status.md` says; a daemon that is told to stop is told what it waits for: 0."""

_TAKE_A_VALUE = ("--home", "--log-level", "--log-format")


def main() -> int:
    """Run one command; its exit status."""
    try:
        with raised_when_told():
            from kvasir_node.cli import main as run_command

            return run_command()
    except KeyboardInterrupt:
        return _say_stopped("interrupted")
    except ToldToStop as told:
        return 0 if _command(sys.argv[1:]) == "run" else _say_stopped(str(told))


def _say_stopped(how: str) -> int:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # the status says it too
            os.write(sys.stderr.fileno(), f"kvasir-node: {how}\n".encode())
    return _STOPPED


def _command(arguments: list[str]) -> str:
    """The command that these arguments name: the first that is no flag and no flag's value."""
    remaining = iter(arguments)
    for each in remaining:
        if not each.startswith("-"):
            return each
        if each in _TAKE_A_VALUE:
            next(remaining, "")
    return ""


if __name__ == "__main__":
    raise SystemExit(main())
