"""`--join`: what a person was handed to get into a swarm, an invite or the address of a member.

Both are judged before anything is written, so that a text that was copied in half is a wrong call and not a
daemon that asks nobody for ever. `-` reads it from standard input: what stands on a command line can be read
by every user of the machine, and an invite is a secret until it is used.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import click

from kvasir_node.cli.parameters import NonEmptyText
from kvasir_node.config import is_address
from kvasir_node.swarm_files import SwarmFiles
from kvasir_proto.admission import INVITE, INVITE_PREFIX, parse_invite
from kvasir_proto.capability import has_expired
from kvasir_proto.errors import RemoteProtocolError, UsageError
from kvasir_proto.instants import WallTime

join_option: Final = click.option(
    "--join",
    type=NonEmptyText(),
    metavar="INVITE|ADDRESS",
    help="The swarm to enter: an invite, or a member's address; - reads it from standard input.",
)


@dataclass(frozen=True, slots=True)
class Entrance:
    """A way into a swarm: the text of an invite that was parsed, or the address of a member; or neither."""

    invite: str = ""
    address: str = ""


def entrance_of(text: str | None) -> Entrance:
    """What ``--join`` was given. Raises `UsageError` for an invite or address that nobody could use."""
    if text is None:
        return Entrance()
    if text == "-":
        text = sys.stdin.read(4 * INVITE.size_bytes_max)
    text = text.strip()
    if text.startswith("/"):
        if not is_address(text):
            raise UsageError(
                f"--join: {text} is no address of a member, such as /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW..."
            )
        return Entrance(address=text)
    if not text.startswith(INVITE_PREFIX.partition("-")[0]):
        raise UsageError(
            f"--join takes an invite, which begins with {INVITE_PREFIX}, or the address of a member such as "
            "/ip4/192.0.2.7/tcp/4001/p2p/12D3KooW..."
        )
    try:
        invite = parse_invite(text)
    except RemoteProtocolError as error:
        raise UsageError(f"--join: {error.reason}") from None
    if has_expired(invite.expires, WallTime(time.time_ns())):
        expired = datetime.fromtimestamp(invite.expires // 1_000_000_000, UTC).isoformat()
        raise UsageError(f"--join: the invite expired at {expired}: ask for another one")
    return Entrance(invite=text)


def remember_entrance(files: SwarmFiles, entrance: Entrance) -> None:
    """Keep it for the daemon. Raises `ConfigurationInvalid` where this home belongs to another swarm."""
    if entrance.invite:
        files.save_invite(entrance.invite)
    if entrance.address:
        files.save_bootstrap((entrance.address,))
