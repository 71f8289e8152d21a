"""A command's own work, until it is done or somebody asks the command to stop.

Decides which signals mean that: those that would otherwise end the process on the spot and leave behind what
it was about to remove. A signal that the caller has the process ignore, as `nohup` does, stays ignored. What
the work is, and what it leaves behind, is not known here.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.stop_signals import heard_signals, held_back
from kvasir_proto.errors import KvasirError

ResultT = TypeVar("ResultT")


def run_in_foreground(work: Callable[..., Awaitable[ResultT]], *arguments: object) -> ResultT:
    """Run ``work`` under trio and return its result; what it raises is raised.

    SIGTERM and SIGHUP cancel it; when it has ended, `KvasirError` says which it was. Ctrl-C is trio's own.
    """
    with held_back() as early:
        return trio.run(_until_told, work, arguments, early)


async def _until_told(
    work: Callable[..., Awaitable[ResultT]], arguments: tuple[object, ...], early: list[int]
) -> ResultT:
    results: list[ResultT] = []
    told = signal.SIGTERM
    with trio.open_signal_receiver(*heard_signals()) as signals:
        if early:
            raise KvasirError(f"stopped by {signal.Signals(early[0]).name}")
        async with open_unwrapping_nursery() as nursery:

            async def do() -> None:
                results.append(await work(*arguments))
                nursery.cancel_scope.cancel()

            nursery.start_soon(do)
            async for number in signals:
                told = signal.Signals(number)
                nursery.cancel_scope.cancel()
    if not results:
        raise KvasirError(f"stopped by {told.name}")
    return results[0]
