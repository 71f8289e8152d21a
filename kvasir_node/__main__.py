"""Where every command begins: the `kvasir-node` script and `python -m kvasir_node`.

It imports next to nothing, so that Ctrl-C while the rest is imported, which takes some tenths of a second,
is a sentence as it is later. It decides nothing and parses nothing.
"""

import os
import sys

_INTERRUPTED = 1
"""As `docs/reference/exit-status.md` says."""


def main() -> int:
    """Run one command; its exit status."""
    try:
        from kvasir_node.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), b"kvasir-node: interrupted\n")
        return _INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
