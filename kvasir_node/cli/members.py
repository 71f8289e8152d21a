"""The command `peers`: every member on one line, and the ways to it below."""

from __future__ import annotations

import json
from typing import Any, Final

import click
import trio

from kvasir_node.cli.output import json_option, print_json, print_line, printable
from kvasir_node.cli.session import CommandSession
from kvasir_node.cli.status import quantity, reason_of, word_of
from kvasir_node.control import request_status

_KEYS: Final = (
    *("node_id", "state", "condition", "reason", "verdict", "path", "rtt_ms", "last_seen_s", "addresses"),
)


@click.command("peers")
@json_option
@click.pass_obj
def members(session: CommandSession, as_json: bool) -> None:
    """List the members that this node knows: id, state, path, round trip, addresses.

    The path is direct when the member answers this node itself, indirect when only others reach it.
    """
    session.configure()
    document = json.loads(trio.run(request_status, session.locations))
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "node_id": document["node_id"],
                "addresses": document["addresses"],
                "members": [{key: each[key] for key in _KEYS} for each in document["members"]],
            }
        )
        return
    _print("this node", "-", None, document)
    for each in document["members"]:
        _print(word_of(each), each["path"], each["rtt_ms"], each)
        if word_of(each) in ("unfit", "quarantined"):
            print_line(f"  {reason_of(each)}", indent=2)


def _print(word: str, path: str, rtt_ms: float | None, said: dict[str, Any]) -> None:
    """A line of 80 columns at most, and each address on one of its own."""
    click.echo(f"{said['node_id']} {printable(word):11} {path:8} {quantity(rtt_ms, 'ms')}")
    for address in said["addresses"]:
        click.echo(f"  {printable(address).partition('/p2p/')[0]}")
