"""`stop`: end the daemon of this home in good order."""

from __future__ import annotations

from typing import Final

import click
import trio

from kvasir_node.cli.session import CommandSession
from kvasir_node.control import request_stop
from kvasir_node.home_lock import is_locked
from kvasir_node.locations import Locations
from kvasir_proto.errors import EngineFailed

_POLL_S: Final = 0.01


@click.command()
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0, 3600),
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
    deadline = trio.current_time() + timeout_s
    await request_stop(locations, timeout_s)
    # It serves nobody any more; what is left takes milliseconds, after which another daemon may start.
    while is_locked(locations.lock_file):
        if trio.current_time() > deadline:
            raise EngineFailed(f"the daemon did not stop within {timeout_s:g} s")
        await trio.sleep(_POLL_S)
