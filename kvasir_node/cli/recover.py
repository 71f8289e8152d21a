"""`recover`: a new epoch, when the quorum of electors is lost for good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.cli.output import json_option, note, print_json
from kvasir_node.cli.parameters import NonEmptyPath
from kvasir_node.cli.session import CommandSession
from kvasir_node.control import request_recovery, request_status
from kvasir_node.swarm_files import SwarmFiles
from kvasir_proto.election.configuration import make_recovery
from kvasir_proto.errors import ConfigurationInvalid, NotReady, UsageError
from kvasir_proto.ids import NodeId, is_node_id
from kvasir_proto.limits import ELECTORS_MAX
from kvasir_proto.swarm_manifest import FoundedSwarm

_KEY_SIZE: Final = 32


@click.command()
@click.option(
    "--key",
    "key_file",
    type=NonEmptyPath(path_type=Path),
    help="The file with the recovery key that 'init --found' wrote. Default: where it wrote it in this home.",
)
@click.option(
    "--elector",
    "electors",
    multiple=True,
    metavar="NODE_ID",
    help="An elector of the new epoch; may be repeated, up to 7. Default: this node alone.",
)
@click.option("--force", is_flag=True, help="Do it although a backbone serves this swarm.")
@json_option
@click.pass_obj
def recover(
    session: CommandSession, key_file: Path | None, electors: tuple[str, ...], force: bool, as_json: bool
) -> None:
    """Begin a new epoch with new electors, when too few of the old ones are left to elect a backbone.

    The running daemon takes the new electorate and spreads it; others follow as they hear of it. The old
    electors must be gone for good: while a quorum of them still runs where this node cannot see it, there can
    be two backbones until both sides meet.
    """
    session.configure()
    files = SwarmFiles(session.locations.state)
    known = files.load_swarm()
    if known is None:
        raise ConfigurationInvalid("this home belongs to no swarm")
    members = _electors(electors)
    key = _load_key(key_file or files.recovery_key_file, known.swarm)
    document: dict[str, Any] = json.loads(trio.run(request_status, session.locations))
    if _is_served(document) and not force:
        raise NotReady(
            f"nothing is lost: {document['backbone']} is the backbone of epoch {document['epoch']}, term "
            f"{document['term']} (--force begins a new epoch all the same)"
        )
    epoch = document["electorate"]["epoch"] + 1
    members = members or (document["node_id"],)
    link = make_recovery(key, known.swarm.digest, epoch, known.swarm.manifest.electorate, members)
    reached = trio.run(request_recovery, session.locations, link)
    if as_json:
        print_json({"schema_version": 1, "epoch": reached, "electors": sorted(members)})
        return
    click.echo(f"epoch {reached} begins, with {len(members)} elector{'s' if len(members) > 1 else ''}:")
    for member in sorted(members):
        click.echo(f"  {member}")
    note("It has a backbone when these have elected one: see 'kvasir-node status'.")


def _electors(named: tuple[str, ...]) -> tuple[NodeId, ...]:
    unique = tuple(dict.fromkeys(named))
    for each in unique:
        if not is_node_id(each):
            raise UsageError(f"--elector: '{each}' is no node id")
    if len(unique) > ELECTORS_MAX:
        raise UsageError(f"--elector: an electorate has {ELECTORS_MAX} members at most")
    return tuple(NodeId(each) for each in unique)


def _load_key(path: Path, swarm: FoundedSwarm) -> Ed25519PrivateKey:
    """The recovery key of this swarm. Raises `ConfigurationInvalid` where the file holds something else."""
    try:
        with path.open("rb") as file:
            data = file.read(_KEY_SIZE + 1)
    except OSError as error:
        raise ConfigurationInvalid(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) != _KEY_SIZE:
        raise ConfigurationInvalid(f"{path} holds no recovery key: it is not {_KEY_SIZE} bytes long")
    key = Ed25519PrivateKey.from_private_bytes(data)
    if key.public_key().public_bytes_raw() != swarm.manifest.recovery_public_key:
        raise ConfigurationInvalid(f"{path} holds the recovery key of another swarm")
    return key


def _is_served(document: dict[str, Any]) -> bool:
    """Whether this node has, or follows, a backbone that is there."""
    if document["electorate"] is None:
        raise NotReady(f"the daemon has not entered its swarm yet: {document['reason']}")
    return document["state"] in ("ready", "degraded", "loading", "standby")
