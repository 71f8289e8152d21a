"""`invite`: let one more node into the swarm."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Final

import click
import trio

from kvasir_node.cli.output import json_option, note, print_json
from kvasir_node.cli.parameters import DurationText, RankList
from kvasir_node.cli.session import CommandSession
from kvasir_node.control import request_invite
from kvasir_proto.admission import parse_invite
from kvasir_proto.errors import UsageError
from kvasir_proto.instants import Duration, in_seconds, seconds
from kvasir_proto.limits import Rank

LIFETIME_MAX: Final[Duration] = seconds(30 * 24 * 3600)


@click.command()
@click.option(
    "--ranks",
    type=RankList(),
    default="backbone,output,bulk",
    show_default=True,
    help="What the invited node may do in the swarm.",
)
@click.option(
    "--expires",
    "lifetime",
    type=DurationText(),
    default="1h",
    show_default=True,
    help="How long it can be used: 90s, 30m, 1h, 7d; at most 30 days.",
)
@json_option
@click.pass_obj
def invite(session: CommandSession, ranks: tuple[Rank, ...], lifetime: Duration, as_json: bool) -> None:
    """Make an invite, which admits one node once. Hand it on privately: whoever has it can join.

    The running daemon makes it, which must be an elector's or the founder's. The other node joins with
    'kvasir-node init --join INVITE', or 'kvasir-node run --join INVITE'.
    """
    session.configure()
    if lifetime > LIFETIME_MAX:
        raise UsageError("--expires: an invite is good for 30 days at most")
    text = trio.run(request_invite, session.locations, ranks, lifetime)
    made = parse_invite(text)
    expires = datetime.fromtimestamp(made.expires // 1_000_000_000, UTC).isoformat()
    if as_json:
        print_json(
            {
                "schema_version": 1,
                "invite": text,
                "swarm": made.swarm.hex(),
                "issuer": made.issuer,
                "ranks": list(made.ranks),
                "expires_at": expires,
                "expires_in_s": in_seconds(lifetime),
                "addresses": list(made.addresses),
            }
        )
        return
    click.echo(text)
    if sys.stdout.isatty():
        note("")
    note(f"It admits one node, as {', '.join(made.ranks)}, until {expires}. On that node:")
    note("  kvasir-node init --join INVITE")
    if all("/127." in each or "/::1/" in each for each in made.addresses):
        note("It leads to this machine only: set listen.host to an address that other machines reach.")
