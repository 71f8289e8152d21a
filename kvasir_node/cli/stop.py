"""`stop`: end the daemon of this home in good order."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

import click
import trio

from kvasir_node.cli.parameters import NumberRange
from kvasir_node.cli.session import CommandSession
from kvasir_node.control import request_stop
from kvasir_node.home_lock import holder_of, is_locked
from kvasir_node.locations import Locations
from kvasir_proto.errors import EngineFailed

_POLL_S: Final = 0.01


@click.command()
@click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(0, 3600),
    default=30.0,
    show_default=True,
    help="Seconds to wait.",
)
@click.pass_obj
def stop(session: CommandSession, timeout_s: float) -> None:
    """Stop the running daemon in good order and wait until it has stopped."""
    session.configure()
    trio.run(_stop, session.locations, timeout_s)


async def _stop(locations: Locations, timeout_s: float) -> None:
    try:
        with trio.fail_after(timeout_s), _process_of(locations) as process:
            await request_stop(locations, timeout_s)
            # It serves nobody any more; what is left takes milliseconds, after which another may start.
            while is_locked(locations.lock_file):  # noqa: ASYNC110 - a file lock cannot be waited for
                await trio.sleep(_POLL_S)
            if process is not None:
                await trio.lowlevel.wait_readable(process)
    except trio.TooSlowError:
        raise EngineFailed(f"the daemon did not stop within {timeout_s:g} s") from None


@contextlib.contextmanager
def _process_of(locations: Locations) -> Iterator[int | None]:
    """A descriptor of the daemon's process, readable once it has ended; None where it cannot be had.

    Opened while the process lives, so that it never means another one that got the same number.
    """
    pid = holder_of(locations.lock_file) if is_locked(locations.lock_file) else None
    descriptor = None
    if pid is not None:
        with contextlib.suppress(OSError):  # gone by now, or a kernel without such descriptors
            descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)
