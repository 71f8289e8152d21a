"""`stop`: end the daemon of this home in good order."""

from __future__ import annotations

import click
import trio

from kvasir_node.cli.session import CommandSession
from kvasir_node.control import request_stop


@click.command()
@click.option("--timeout", "timeout_s", type=float, default=30.0, show_default=True, help="Seconds to wait.")
@click.pass_obj
def stop(session: CommandSession, timeout_s: float) -> None:
    """Stop the running daemon in good order and wait until it has stopped."""
    session.configure()
    trio.run(request_stop, session.locations.control_socket, timeout_s)
