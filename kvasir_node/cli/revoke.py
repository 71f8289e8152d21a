"""`revoke`: the founder's word that a node, an invite, or all that an elector vouched for, is out."""

from __future__ import annotations

import time

import click
import trio

from kvasir_node.cli.output import json_option, print_json
from kvasir_node.cli.session import CommandSession
from kvasir_node.control import request_revocation
from kvasir_node.net.identity import load_identity
from kvasir_node.swarm_files import SwarmFiles
from kvasir_proto.admission import Revocation, invite_key, parse_invite, sign_revocation
from kvasir_proto.errors import ConfigurationInvalid, LocalProtocolError, RemoteProtocolError, UsageError
from kvasir_proto.ids import NodeId, is_node_id, public_key_of
from kvasir_proto.swarm_manifest import FoundedSwarm


@click.command()
@click.option("--node", metavar="NODE_ID", help="This node: what it says counts nowhere any more.")
@click.option(
    "--invite", "invite_text", metavar="INVITE", help="Whoever this invite admitted, or would admit."
)
@click.option("--issuer", metavar="NODE_ID", help="All that this elector admitted.")
@json_option
@click.pass_obj
def revoke(
    session: CommandSession, node: str | None, invite_text: str | None, issuer: str | None, as_json: bool
) -> None:
    """Put a node out of the swarm. Nothing takes it back: it could only come again as another one.

    Only the founder's key revokes: call it in the founder's home, with its daemon running. Members that are
    there hear of it at once, others before they trust anybody again. A swarm has room for 1024 revocations.
    """
    session.configure()
    if sum(each is not None for each in (node, invite_text, issuer)) != 1:
        raise UsageError("give one of --node, --invite and --issuer")
    identity = load_identity(session.locations.identity_file)
    known = SwarmFiles(session.locations.state).load_swarm()
    if identity is None or known is None:
        raise ConfigurationInvalid("this home belongs to no swarm")
    if invite_text is not None:
        revocation = Revocation(time.time_ns(), "invite", _invite(invite_text, known.swarm))
    elif node is not None:
        revocation = Revocation(time.time_ns(), "node", _other(node, "--node", identity.node_id))
    else:
        revocation = Revocation(time.time_ns(), "issuer", _other(str(issuer), "--issuer", identity.node_id))
    if revocation.of != "node" and known.swarm.manifest.admission == "open":
        raise UsageError("this swarm admits whoever comes: only --node puts anybody out")
    try:
        signed = sign_revocation(identity.private_key, known.swarm, revocation)
    except LocalProtocolError as error:
        raise ConfigurationInvalid(f"{error.reason}, and this home did not found its swarm") from error
    trio.run(request_revocation, session.locations, signed)
    if as_json:
        print_json({"schema_version": 1, "of": revocation.of, "key": revocation.key.hex()})
    else:
        click.echo(f"Revoked, for good: the {revocation.of} {node or issuer or 'of that text'}")


def _other(text: str, flag: str, own: NodeId) -> bytes:
    """The public key of another node. Raises `UsageError`."""
    if not is_node_id(text):
        raise UsageError(f"{flag}: '{text}' is no node id")
    if text == own:
        raise UsageError(
            f"{flag}: that is the founder's own node, without which nobody could revoke anything"
        )
    return public_key_of(text)


def _invite(text: str, swarm: FoundedSwarm) -> bytes:
    """The public key of an invite. Raises `UsageError`."""
    try:
        invite = parse_invite(text)
    except RemoteProtocolError as error:
        raise UsageError(f"--invite: {error.reason}") from error
    if invite.swarm != swarm.digest:
        raise UsageError("--invite: it is an invite to another swarm")
    return invite_key(invite.secret).public_key().public_bytes_raw()
