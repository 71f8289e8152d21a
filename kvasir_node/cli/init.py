"""`init`: a home with an identity, and with --found a swarm of its own."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvasir_node.cli.entrance import entrance_of, join_option, remember_entrance
from kvasir_node.cli.output import json_option, note, print_json, progress_on_stderr
from kvasir_node.cli.parameters import NonEmptyText
from kvasir_node.cli.session import CommandSession
from kvasir_node.cli.status import rows_in_words
from kvasir_proto.admission import parse_invite
from kvasir_proto.errors import UsageError

if TYPE_CHECKING:
    from kvasir_proto.swarm_manifest import AdmissionRule, CertificateRule, ElectorateRule


def _mode_of(directory: Path) -> int | None:
    """Who may do what there; None when there is nothing yet, or nobody may look."""
    try:
        return stat.S_IMODE(directory.stat().st_mode)
    except OSError:
        return None


@click.command()
@click.option("--found", is_flag=True, help="Found a swarm: this node becomes its first backbone.")
@join_option
@click.option(
    "--model",
    type=NonEmptyText(),
    help="The swarm's model: a GGUF file (of several the first), an address, a name or a digest; or demo.",
)
@click.option(
    "--compact-activations",
    is_flag=True,
    help="For the swarm to found: send activations in Q8_0 where the weights round them so anyway.",
)
@click.option(
    "--partial-sums",
    is_flag=True,
    help="For the swarm to found: let workers add up their weighted rows, not in the last layers. Not exact.",
)
@click.option(
    "--admission",
    type=click.Choice(("open", "invite")),
    help="For the swarm to found: whether anybody may join it, or who was invited. Default: open.",
)
@click.option(
    "--electorate",
    type=click.Choice(("pinned", "open")),
    help="For the swarm to found: electors are those you name, or others too. Default: open.",
)
@click.option(
    "--certificates",
    type=click.Choice(("claimed", "verified")),
    help="For the swarm to found: whose word makes a node fit for output layers, its own or auditors'. "
    "Default: claimed.",
)
@json_option
@click.pass_obj
def init(
    session: CommandSession,
    found: bool,
    join: str | None,
    model: str | None,
    compact_activations: bool,
    partial_sums: bool,
    admission: AdmissionRule | None,
    electorate: ElectorateRule | None,
    certificates: CertificateRule | None,
    as_json: bool,
) -> None:
    """Make this home's identity; found a swarm with --found, or enter one with --join.

    Can be called again, and keeps the identity that exists. A home stays in its swarm: --found, and --join
    with another swarm's invite, end with exit status 6 where this home founded or entered a swarm already.
    """
    if model is not None and not found:
        raise UsageError("--model is the model of a swarm to found: add --found")
    rules = {
        "--compact-activations": compact_activations,
        "--partial-sums": partial_sums,
        "--admission": admission is not None,
        "--electorate": electorate is not None,
        "--certificates": certificates is not None,
    }
    for flag, is_set in rules.items():
        if is_set and not found:
            raise UsageError(f"{flag} is a rule of a swarm to found: add --found")
    if found and join is not None:
        raise UsageError("--found makes a swarm, --join enters one: give either")
    entrance = entrance_of(join)
    configuration = session.configure(
        model=model, swarm_bootstrap=[entrance.address] if entrance.address else None
    )
    # libp2p takes half a second to import: only now, when it is sure that the arguments are good.
    from kvasir_node import app
    from kvasir_node.backbone.trial import try_backbone_file

    mode_before = _mode_of(session.locations.data)
    home = app.open_home(session.locations, configuration)
    mode = _mode_of(session.locations.data)
    if mode_before not in (None, mode):
        note(f"{session.locations.data} had mode {mode_before:o} and has {mode:o} now: it is for you alone")
    document: dict[str, object] = {
        "schema_version": 1,
        "node_id": home.identity.node_id,
        "home": str(session.locations.data),
    }
    if found:
        # Before a large model is read for nothing.
        home.swarm_files.check_unfounded()
        with progress_on_stderr("reading the model") as progress:
            stored = app.resolve_model(home, configuration.model, progress, try_backbone_file)
        founding = app.found_swarm(
            home,
            stored,
            compact_activations=compact_activations,
            partial_sums=partial_sums,
            admission=admission or "open",
            electorate=electorate or "open",
            certificates=certificates or "claimed",
        )
        document |= {
            "swarm": founding.swarm.digest.hex(),
            "model": stored.name,
            "model_digest": stored.digest,
            "compact_activations": compact_activations,
            "partial_sums": partial_sums,
            "recovery_key_file": str(home.swarm_files.recovery_key_file),
        }
    if join is not None:
        remember_entrance(home.swarm_files, entrance)
        document["joins"] = parse_invite(entrance.invite).swarm.hex() if entrance.invite else None
    if as_json:
        print_json(document)
        return
    command = (
        "kvasir-node" if session.home is None else f"kvasir-node --home {shlex.quote(str(session.home))}"
    )
    click.echo(f"node      {home.identity.node_id}")
    click.echo(f"home      {session.locations.data}")
    if found:
        click.echo(f"swarm     {document['swarm']}")
        click.echo(f"model     {document['model']}  {str(document['model_digest'])[:12]}")
        click.echo(f"rows      {rows_in_words(compact_activations, partial_sums)}")
        click.echo(f"\nMove the recovery key off this node and keep it safe: {document['recovery_key_file']}")
    elif join is not None:
        if entrance.invite:
            click.echo(f"swarm     {document['joins']}")
        click.echo(f"\nEnter the swarm with: {command} run")
    elif home.swarm_files.is_founder(home.identity.private_key):
        click.echo(f"\nThis node founded a swarm. Start it with: {command} run")
    elif home.swarm_files.load_swarm() is not None:
        click.echo(f"\nThis node belongs to a swarm. Start it with: {command} run")
    else:
        click.echo(f"\nEnter a swarm with: {command} init --join INVITE, or --join ADDRESS")
