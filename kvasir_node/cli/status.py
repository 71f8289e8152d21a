"""`status`: what people look at every day; also while a node joins, and when the daemon is down."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import click
import trio

from kvasir_node.cli.output import (
    Cell,
    json_option,
    print_fields,
    print_json,
    print_line,
    print_table,
    printable,
)
from kvasir_node.cli.remembered import remembered
from kvasir_node.cli.session import CommandSession
from kvasir_node.cli.standard_streams import OutputUnwritable, abandon_output
from kvasir_node.control import request_status
from kvasir_node.locations import Locations
from kvasir_proto.errors import DaemonUnreachable, EngineFailed, NotRunning

WATCH_INTERVAL_S: Final = 2.0
_SHORT_ID: Final = 8
_MISSING_SHOWN: Final = 3
_WELL: Final = ("ready", "serving", "alive")
_STYLES: Final = {
    **dict.fromkeys(_WELL, "green"),
    **dict.fromkeys(
        ("starting", "certifying", "joining", "electing", "loading", "degraded", "stopping"), "yellow"
    ),
    **dict.fromkeys(("suspect", "slow", "indirect", "clock", "left"), "yellow"),
    **dict.fromkeys(
        ("isolated", "conflicted", "revoked", "dead", "unreachable", "refused", "quarantined", "unfit"), "red"
    ),
    "not running": "red",
}
_SHORT_RANKS: Final = {"backbone": "bb", "output": "out", "bulk": "bulk"}


def short_id(node_id: str) -> str:
    """The last characters of a node id: the first ones are alike for all."""
    return f"…{node_id[-_SHORT_ID:]}"


def rows_in_words(compact_activations: bool, partial_sums: bool) -> str:
    """In which form a swarm's rows travel, by the rules it was founded with."""
    sent = "compact activations out" if compact_activations else "plain activations out"
    return f"{sent}, partial sums back (not exact)" if partial_sums else f"{sent}, plain rows back"


class _Answer(NamedTuple):
    """A daemon's status document, or what can be said without it, and the exit status for that."""

    document: dict[str, Any]
    is_from_daemon: bool
    exit_code: int


@click.command()
@json_option
@click.option("--check", is_flag=True, help="One line; status 0 only when ready or degraded.")
@click.option("--watch", is_flag=True, help="Show it again every 2 seconds until Ctrl-C.")
@click.pass_context
def status(ctx: click.Context, as_json: bool, check: bool, watch: bool) -> None:
    """Show what the daemon and its swarm are doing. Exit status 3 when it is not running."""
    session: CommandSession = ctx.obj
    session.configure()
    if check and watch:
        raise click.UsageError("--check looks once: leave out --watch")
    if watch:
        _watch(session.locations, as_json)
        return
    answer = _ask(session.locations)
    if check:
        # The exit status is the answer: a line that cannot be written does not change it.
        try:
            _print_check(answer.document, as_json)
        except OutputUnwritable:
            abandon_output()
        is_well = answer.document["state"] in ("ready", "degraded")
        ctx.exit(answer.exit_code if not answer.is_from_daemon else 0 if is_well else 1)
    _show(answer, as_json)
    ctx.exit(answer.exit_code)


def _ask(locations: Locations) -> _Answer:
    try:
        return _Answer(json.loads(trio.run(request_status, locations)), True, 0)
    except (NotRunning, DaemonUnreachable, EngineFailed) as error:
        # It fails also where a daemon holds the socket and does not answer: stopped, or busy beyond measure.
        word = "not running" if isinstance(error, NotRunning) else "unreachable"
        document = {"schema_version": 1, "state": word, "reason": str(error), **remembered(locations)}
        return _Answer(document, False, error.exit_code)


def _print_check(document: dict[str, Any], as_json: bool) -> None:
    word, reason = document["state"], document["reason"]
    if as_json:
        print_json({"schema_version": 1, "state": word, "reason": reason})
    else:
        click.echo(f"{word}: {printable(reason)}" if reason else word)


def _watch(locations: Locations, as_json: bool) -> None:
    """Show it until Ctrl-C; a daemon that ends, starts or is busy is no reason to stop looking."""
    is_first = True
    try:
        while True:
            answer = _ask(locations)
            if as_json:
                click.echo(json.dumps(answer.document))
            else:
                if sys.stdout.isatty():
                    click.clear()
                elif not is_first:
                    click.echo()
                _show(answer, as_json=False)
            is_first = False
            time.sleep(WATCH_INTERVAL_S)
    except KeyboardInterrupt:
        return


def _show(answer: _Answer, as_json: bool) -> None:
    if as_json:
        print_json(answer.document)
    elif answer.is_from_daemon:
        print_fields(_fields(answer.document))
        print_members(answer.document)
    else:
        print_fields(_remembered_fields(answer.document))


def _state_field(document: dict[str, Any]) -> Cell:
    word, reason = document["state"], document["reason"]
    return Cell(f"{word} ({reason})" if reason else word, _STYLES.get(word, ""))


def _remembered_fields(document: dict[str, Any]) -> Iterator[tuple[str, Cell | str]]:
    yield "state", _state_field(document)
    yield "node", document["node_id"] or "none: this home has no identity yet"
    if document["swarm"]:
        yield "swarm", f"{document['swarm'][:12]}, model {document['model_name']}"
    else:
        yield "swarm", "none: this home has founded or joined no swarm"
    if document["backbone"]:
        whose = "this node" if document["backbone"] == document["node_id"] else short_id(document["backbone"])
        yield "backbone", f"last known: {whose}, epoch {document['epoch']}, term {document['term']}"
    if document["damaged"]:
        yield "damaged", document["damaged"]


def _fields(document: dict[str, Any]) -> Iterator[tuple[str, Cell | str]]:
    yield "state", _state_field(document)
    electorate = document["electorate"]
    is_elector = electorate is not None and document["node_id"] in electorate["members"]
    yield "node", document["node_id"] + (", elector" if is_elector else "")
    if document["swarm"]:
        rules = [f"certificates {document['certificates']}"]
        rules += ["by invitation"] if document["admission"] == "invite" else []
        yield "swarm", ", ".join([document["swarm"][:12], *rules])
    if document["backbone"]:
        is_own = document["backbone"] == document["node_id"]
        whose = "this node" if is_own else short_id(document["backbone"])
        lease = f", lease {document['lease_s']:.1f} s" if document["lease_s"] is not None else ""
        votes = f", {document['votes']} votes" if document["votes"] else ""
        yield "backbone", f"{whose}, epoch {document['epoch']}, term {document['term']}{votes}{lease}"
    if electorate:
        n_electors = len(electorate["members"])
        electors = f"{n_electors} electors" if n_electors > 1 else "1 elector"
        yield "electors", f"{electors}, quorum {electorate['quorum']}, {electorate['rule']}"
    model = document["model"]
    if model:
        shape = f"{model['n_layer']} layers, {model['n_expert']} experts, {model['n_expert_used']} used"
        yield "model", f"{model['name']} ({model['arch']}, {shape})"
    if document["compact_activations"] is not None:
        yield "rows", rows_in_words(document["compact_activations"], document["partial_sums"])
    yield from _plan_fields(document["plan"])
    if document["clock_offset_s"]:
        ahead = "behind" if document["clock_offset_s"] > 0 else "ahead of"
        yield (
            "clock",
            Cell(f"{abs(document['clock_offset_s']):.0f} s {ahead} most members: set it right", "yellow"),
        )
    for address in document["addresses"]:
        yield "address", address.partition("/p2p/")[0]
    gateway = document["gateway"]
    if gateway["is_answering"]:
        yield "gateway", gateway["address"] + ("/v1, with a token" if gateway["needs_token"] else "/v1")
    elif gateway["is_enabled"]:
        yield "gateway", Cell(f"none: {gateway['reason']}", "yellow")
    if document["last_error"]:
        over = ", recovered" if document["last_error_recovered"] else ""
        yield "error", f"{document['last_error']} ({document['last_error_at']}{over})"


def _plan_fields(plan: dict[str, Any]) -> Iterator[tuple[str, Cell | str]]:
    coverage, missing = plan["coverage"], plan["coverage"]["missing"]
    if not plan["revision"]:
        return
    held = f"{coverage['n_pairs_held']} of {coverage['n_pairs']} experts held"
    if coverage["by_backbone"]:
        held += f", {coverage['by_backbone']} by the backbone alone"
    version = f"term {plan['term']}, revision {plan['revision']}"
    if not plan["is_in_force"]:
        yield (
            "plan",
            Cell(f"{version} is the last this node was told of, and not in force any more", "yellow"),
        )
        return
    yield "plan", f"{version}, {held}, at least {plan['holders_min']} holder(s)"
    if plan["degraded"]:
        yield "degraded", Cell(plan["degraded"], "yellow")
    for each in missing[:_MISSING_SHOWN]:
        experts = f"layer {each['layer']}, experts {each['first']} to {each['end'] - 1}"
        yield "missing", Cell(f"{experts}: {each['reason']}", "red")
    if len(missing) > _MISSING_SHOWN:
        yield "missing", Cell(f"and {len(missing) - _MISSING_SHOWN} more ranges: see --json", "red")


def word_of(member: dict[str, Any]) -> str:
    """What is most worth knowing of a member, in one word."""
    if member["state"] != "alive":
        return str(member["state"])
    if member["condition"] in ("conflicted", "clock_wrong"):
        return str(member["condition"]).partition("_")[0]
    if member["quarantined_s"] is not None:
        return "quarantined"
    if member["verdict"] is not None and member["ranks"]:
        return str(member["verdict"]["word"])
    if member["audit"] is not None and member["ranks"]:
        return str(member["audit"]["verdict"])
    if member["holder_state"]:
        return str(member["holder_state"])
    if member["condition"] != "well":
        return str(member["condition"])
    return str(member["said_state"] or "alive")


def _ranks_in_short(ranks: list[str]) -> str:
    if len(ranks) == len(_SHORT_RANKS):
        return "all"
    return ranks[0] if len(ranks) == 1 else "+".join(_SHORT_RANKS[each] for each in ranks) or "-"


def quantity(value: float | None, unit: str) -> str:
    """A number as short as it may be; "-" where there is none."""
    if value is None:
        return "-"
    return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"


def print_members(document: dict[str, Any]) -> None:
    """A table of this node and all members, at most 80 columns wide, and below it why some are not well."""
    own = document["state"]
    rows = [
        _member_row("this node", own, document, document["n_experts_held"], ("-", "-", "-")),
        *(
            _member_row(
                short_id(each["node_id"]),
                word_of(each),
                each,
                each["shards"],
                (quantity(each["rtt_ms"], "ms"), each["path"], quantity(each["last_seen_s"], "s")),
            )
            for each in document["members"]
        ),
    ]
    click.echo()
    print_table(
        ("MEMBER", "STATE", "BACKEND", "ACCUM", "CERT", "RANKS", "SHARD", "RTT", "PATH", "SEEN"),
        rows,
        width_max=80,
        folded=("STATE", "BACKEND"),
    )
    reasons = [
        (each, reason)
        for each in document["members"]
        if word_of(each) not in _WELL and (reason := reason_of(each))
    ]
    if reasons:
        click.echo()
    for each, reason in reasons:
        print_line(f"{short_id(each['node_id'])}  {word_of(each)}: {reason}", indent=11)


def reason_of(member: dict[str, Any]) -> str:
    """Why `word_of` says what it says of a member; may be empty."""
    word, verdict = word_of(member), member["verdict"]
    if word == "unfit":
        reason = str((verdict or member["audit"])["reason"])
        return reason + _whose(verdict) if verdict is not None else reason
    if word != "quarantined" or verdict is None:
        return str(member["reason"])
    if verdict["ends"] == "with its time":
        return f"{member['reason']}; planned without for another {member['quarantined_s'] / 60:.0f} min"
    return f"{member['reason']}{_whose(verdict)}; planned without until it is certified anew"


def _whose(verdict: dict[str, Any]) -> str:
    return f"; {verdict['electors']} electors recomputed its rows" if verdict["electors"] else ""


def _member_row(
    name: str, word: str, said: dict[str, Any], shard: int, link: tuple[str, str, str]
) -> tuple[object, ...]:
    return (
        name,
        Cell(word, _STYLES.get(word, "")),
        said["backend"] or "-",
        said["accumulation"],
        said["certificate"],
        _ranks_in_short(said["ranks"]),
        shard,
        *link,
    )
