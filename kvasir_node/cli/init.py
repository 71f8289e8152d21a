"""`init`: a home with an identity, and with --found a swarm of its own."""

from __future__ import annotations

import click

from kvasir_node.cli.output import json_option, print_json, progress_on_stderr
from kvasir_node.cli.session import CommandSession
from kvasir_proto.errors import UsageError


@click.command()
@click.option("--found", is_flag=True, help="Found a swarm: this node becomes its backbone.")
@click.option(
    "--model",
    help="The swarm's model: a GGUF file (of several the first), a name or a digest. Default: the demo's.",
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
@json_option
@click.pass_obj
def init(
    session: CommandSession,
    found: bool,
    model: str | None,
    compact_activations: bool,
    partial_sums: bool,
    as_json: bool,
) -> None:
    """Make this home's identity, and found a swarm with --found.

    Can be called again: an identity that exists is kept, a swarm that exists is not founded twice.
    """
    from kvasir_node import app
    from kvasir_node.backbone.trial import try_backbone_file

    if model is not None and not found:
        raise UsageError("--model is the model of a swarm to found: add --found")
    if compact_activations and not found:
        raise UsageError("--compact-activations is a rule of a swarm to found: add --found")
    if partial_sums and not found:
        raise UsageError("--partial-sums is a rule of a swarm to found: add --found")
    configuration = session.configure(model=model)
    home = app.open_home(session.locations, configuration)
    document: dict[str, object] = {
        "schema_version": 1,
        "node_id": home.identity.node_id,
        "home": str(session.locations.data),
    }
    if found:
        # Before a large model is read for nothing.
        home.swarm_files.check_unfounded(home.identity.private_key)
        with progress_on_stderr("reading the model") as progress:
            stored = app.resolve_model(home, configuration.model, progress, try_backbone_file)
        founding = app.found_swarm(
            home, stored, compact_activations=compact_activations, partial_sums=partial_sums
        )
        document |= {
            "swarm": founding.swarm.digest.hex(),
            "model": stored.name,
            "model_digest": stored.digest,
            "recovery_key_file": str(home.swarm_files.recovery_key_file),
        }
    if as_json:
        print_json(document)
        return
    click.echo(f"node      {home.identity.node_id}")
    click.echo(f"home      {session.locations.data}")
    if found:
        click.echo(f"swarm     {document['swarm']}")
        click.echo(f"model     {document['model']}  {str(document['model_digest'])[:12]}")
        click.echo(f"\nMove the recovery key off this node and keep it safe: {document['recovery_key_file']}")
    else:
        click.echo("\nJoin a swarm with: kvasir-node run --bootstrap ADDRESS")
