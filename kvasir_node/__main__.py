"""Where every command begins: the `kvasir-node` script and `python -m kvasir_node`.

It imports next to nothing, so that Ctrl-C, SIGTERM or SIGHUP while the rest is imported, which takes some
tenths of a second, is a sentence and a status as it is later.
"""

import contextlib
import os
import sys

from kvasir_node.command_word import is_daemon
from kvasir_node.stop_signals import ToldToStop, raised_when_told

_STOPPED = 1
"""As `docs/reference/exit-status.md` says; a daemon that is told to stop is told what it waits for: 0."""


def main() -> int:
    """Run one command; its exit status."""
    try:
        with raised_when_told():
            from kvasir_node.cli import main as run_command

            return run_command()
    except KeyboardInterrupt:
        return 0 if is_daemon(sys.argv[1:]) else _say_stopped("interrupted")
    except ToldToStop as told:
        return 0 if is_daemon(sys.argv[1:]) else _say_stopped(str(told))


def _say_stopped(how: str) -> int:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # the status says it too
            os.write(sys.stderr.fileno(), f"kvasir-node: {how}\n".encode())
    return _STOPPED


if __name__ == "__main__":
    raise SystemExit(main())
