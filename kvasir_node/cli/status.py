"""`status`: what people look at every day; also when the daemon is down."""

from __future__ import annotations

import json
from typing import Any, Final

import click
import trio

from kvasir_node.cli.output import json_option, print_json, print_table, printable
from kvasir_node.cli.session import CommandSession
from kvasir_node.control import request_status
from kvasir_proto.errors import DaemonUnreachable, NotRunning

_SHORT_ID: Final = 8


def short_id(node_id: str) -> str:
    """The last characters of a node id: the first ones are alike for all."""
    return f"…{node_id[-_SHORT_ID:]}"


def rows_in_words(compact_activations: bool, partial_sums: bool) -> str:
    """In which form a swarm's rows travel, by the rules it was founded with."""
    sent = "compact activations out" if compact_activations else "plain activations out"
    return f"{sent}, partial sums back (not exact)" if partial_sums else f"{sent}, plain rows back"


@click.command()
@json_option
@click.option("--check", is_flag=True, help="Print nothing; status 0 only when ready or degraded.")
@click.pass_context
def status(ctx: click.Context, as_json: bool, check: bool) -> None:
    """Show what the daemon and its swarm are doing. Exit status 3 when it is not running."""
    session: CommandSession = ctx.obj
    session.configure()
    try:
        document = json.loads(trio.run(request_status, session.locations))
    except (NotRunning, DaemonUnreachable) as error:
        if not check:
            state = "not running" if isinstance(error, NotRunning) else "unreachable"
            if as_json:
                print_json({"schema_version": 1, "state": state, "reason": str(error)})
            else:
                click.echo(f"{state}: {error}")
        ctx.exit(error.exit_code)
    if check:
        ctx.exit(0 if document["state"] in ("ready", "degraded") else 1)
    if as_json:
        print_json(document)
        return
    _print_status(document)


def _print_status(document: dict[str, Any]) -> None:
    reason = f" ({printable(document['reason'])})" if document["reason"] else ""
    click.echo(f"state     {document['state']}{reason}")
    click.echo(f"node      {document['node_id']}")
    if document.get("backbone"):
        whose = "this node" if document["backbone"] == document["node_id"] else document["backbone"]
        click.echo(f"backbone  {whose}, epoch {document['epoch']}, term {document['term']}")
    model = document.get("model")
    if model:
        click.echo(
            f"model     {model['name']} ({model['arch']}, {model['n_layer']} layers, "
            f"{model['n_expert']} experts, {model['n_expert_used']} used)"
        )
    if document.get("compact_activations") is not None:
        click.echo(f"rows      {rows_in_words(document['compact_activations'], document['partial_sums'])}")
    plan = document.get("plan", {})
    if "coverage" in plan:
        click.echo(
            f"plan      revision {plan['revision']}, {plan['coverage']:.0%} of experts covered, "
            f"at least {plan['holders_min']} holder(s) each"
        )
    elif "n_experts_held" in document:
        click.echo(f"plan      revision {plan.get('revision', 0)}, {document['n_experts_held']} experts held")
    for address in document["addresses"]:
        click.echo(f"address   {address}")
    if document.get("last_error"):
        over = ", recovered" if document["last_error_recovered"] else ""
        click.echo(f"error     {printable(document['last_error'])} ({document['last_error_at']}{over})")
    if document.get("members"):
        click.echo()
        print_table(
            ("MEMBER", "STATE", "BACKEND", "ACCUM", "EXPERTS", "SEEN", "REASON"),
            [
                (
                    short_id(member["node_id"]),
                    member["state"],
                    member["backend"],
                    member["accumulation"],
                    member["shards"],
                    f"{member['last_seen_s']:.0f} s",
                    member["reason"],
                )
                for member in document["members"]
            ],
        )
