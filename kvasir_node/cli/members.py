"""The command `peers`: every member on one line, with the way to it."""

from __future__ import annotations

import json
from typing import Any, Final

import click
import trio

from kvasir_node.cli.output import json_option, print_json, printable
from kvasir_node.cli.session import CommandSession
from kvasir_node.cli.status import word_of
from kvasir_node.control import request_status

_KEYS: Final = ("node_id", "state", "condition", "reason", "path", "rtt_ms", "last_seen_s", "addresses")


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
    click.echo(_line(document["node_id"], "this node", "-", None, document["addresses"]))
    for each in document["members"]:
        click.echo(_line(each["node_id"], word_of(each), each["path"], each["rtt_ms"], each["addresses"]))


def _line(node_id: str, word: str, path: str, rtt_ms: float | None, addresses: list[Any]) -> str:
    rtt = f"{rtt_ms:.2f} ms" if rtt_ms is not None else "-"
    where = " ".join(printable(each).partition("/p2p/")[0] for each in addresses) or "-"
    return f"{node_id}  {printable(word):10}  {path:8}  {rtt:>9}  {where}"
