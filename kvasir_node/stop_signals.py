"""SIGTERM and SIGHUP as an exception, wherever a command is when they come.

Without this they end the process on the spot until trio listens for them: half-written files of gigabytes
stay behind, and the status is not the documented one. A signal that the caller has the process ignore, as
`nohup` does, stays ignored. While trio runs a command that does not listen for them, which has nothing to
remove, they end the process as always: an exception in the middle of trio's own work would break it. What
the status is, and what there is to remove, is not known here. It imports next to nothing.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

STOPPING = (signal.SIGTERM, signal.SIGHUP)


class ToldToStop(BaseException):
    """This process was sent `number`. As `KeyboardInterrupt`, it is nobody's to catch but the last."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number = number


class _Heard:
    """What has come so far."""

    def __init__(self) -> None:
        self.is_held = False
        self.was_raised = False
        self.waiting: list[int] = []


_heard = _Heard()


def heard_signals() -> tuple[signal.Signals, ...]:
    """The stopping signals that are not ignored."""
    return tuple(each for each in STOPPING if signal.getsignal(each) is not signal.SIG_IGN)


@contextlib.contextmanager
def raised_when_told() -> Iterator[None]:
    """Raise `ToldToStop` in the block when such a signal comes; to be used in the main thread.

    A SIGHUP after another is passed over: a terminal that closes, or a service manager, sends it beside one.
    After the block they are ignored: the status is decided, and Python only has to end.
    """
    _heard.was_raised = False
    heard = heard_signals()
    for each in heard:
        signal.signal(each, _take)
    try:
        yield
    finally:
        for each in heard:
            signal.signal(each, signal.SIG_IGN)


@contextlib.contextmanager
def held_back() -> Iterator[list[int]]:
    """Within the block such a signal raises nothing and waits in the list that is given.

    For the moment between `trio.run` and its own receiver: who opens that one looks here first.
    """
    _heard.is_held, _heard.waiting = True, []
    try:
        yield _heard.waiting
    finally:
        _heard.is_held = False


def _take(number: int, _frame: object) -> None:
    if _heard.is_held:
        _heard.waiting.append(number)
        return
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    if _heard.was_raised and number == signal.SIGHUP:
        return
    _heard.was_raised = True
    raise ToldToStop(signal.Signals(number))
