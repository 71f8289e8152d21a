"""`ping`: how long a round trip to a member takes, asked of the running daemon.

The daemon measures on a control stream, so what is shown is what the swarm's own messages would find: not
the network's echo, but the other daemon answering.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

import click
import trio

from kvasir_node.cli.output import json_option, print_json
from kvasir_node.cli.parameters import NumberRange
from kvasir_node.cli.session import CommandSession
from kvasir_node.cli.status import short_id
from kvasir_node.control import request_ping, request_status
from kvasir_node.locations import Locations
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_proto.errors import TransportUnavailable, UsageError
from kvasir_proto.ids import NodeId, is_node_id
from kvasir_proto.limits import as_sentence

AT_ONCE_MAX: Final = 16
"""Members asked at one time: the daemon serves other commands meanwhile."""


@dataclass
class _Tally:
    """What became of the pings to one member."""

    sent: int = 0
    times_ms: list[float] = field(default_factory=list)
    last_reason: str = ""


@click.command()
@click.argument("node")
@click.option("--count", type=click.IntRange(1, 1_000_000), default=3, show_default=True)
@click.option(
    "--interval", type=NumberRange(0, 3600), default=1.0, show_default=True, help="Seconds between."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(0.01, 60),
    default=5.0,
    show_default=True,
    help="Seconds to wait.",
)
@json_option
@click.pass_context
def ping(ctx: click.Context, node: str, count: int, interval: float, timeout_s: float, as_json: bool) -> None:
    """Measure the round trip to a member: NODE is its id, the unique end of one, or all.

    Exit status 1 when some member answered nothing.
    """
    session: CommandSession = ctx.obj
    session.configure()
    document = json.loads(trio.run(request_status, session.locations))
    targets = targets_of(node, document)
    tallies: dict[NodeId, _Tally] = defaultdict(_Tally)
    # What was measured until Ctrl-C is what was asked for.
    with contextlib.suppress(KeyboardInterrupt):
        trio.run(_ping_all, session.locations, targets, count, interval, timeout_s, tallies, as_json)
    reports = [_report(each, tallies[each]) for each in targets]
    if as_json:
        print_json({"schema_version": 1, "members": reports})
    else:
        _print_summary(reports)
    ctx.exit(0 if all(each["answered"] for each in reports) else 1)


def targets_of(node: str, document: dict[str, Any]) -> list[NodeId]:
    """Whom a word means: `all` living members, one with this id, or the one whose id ends so.

    Raises `UsageError`.
    """
    ids = [NodeId(each["node_id"]) for each in document["members"]]
    if node == "all":
        alive = [
            NodeId(each["node_id"]) for each in document["members"] if each["state"] in ("alive", "suspect")
        ]
        if not alive:
            raise UsageError("no other member is there to be asked")
        return alive
    if node == document["node_id"]:
        raise UsageError("that is this node itself")
    if is_node_id(node):
        return [NodeId(node)]
    wanted = node.lstrip("…")
    found = [each for each in ids if wanted and each.endswith(wanted)]
    if not found:
        raise UsageError(f"no member's id ends with {wanted!r}: 'kvasir-node peers' lists them")
    if len(found) > 1:
        raise UsageError(f"{len(found)} members' ids end with {wanted!r}: say more of it")
    return found


async def _ping_all(
    locations: Locations,
    targets: list[NodeId],
    count: int,
    interval_s: float,
    timeout_s: float,
    tallies: dict[NodeId, _Tally],
    is_quiet: bool,
) -> None:
    limit = trio.CapacityLimiter(AT_ONCE_MAX)

    async def ping_one(node_id: NodeId, number: int) -> None:
        tally = tallies[node_id]
        async with limit:
            tally.sent += 1
            try:
                round_trip = await request_ping(locations, node_id, timeout_s)
            except TransportUnavailable as error:
                tally.last_reason = as_sentence(str(error))
                line = f"no answer from {short_id(node_id)}: number={number}: {tally.last_reason}"
            else:
                tally.times_ms.append(round_trip / 1e6)
                line = f"answer from {short_id(node_id)}: number={number} time={round_trip / 1e6:.2f} ms"
        if not is_quiet:
            click.echo(line)

    for number in range(1, count + 1):
        async with open_unwrapping_nursery() as nursery:
            for node_id in targets:
                nursery.start_soon(ping_one, node_id, number)
        if number < count:
            await trio.sleep(interval_s)


def _report(node_id: NodeId, tally: _Tally) -> dict[str, Any]:
    times = tally.times_ms
    return {
        "node_id": node_id,
        "sent": tally.sent,
        "answered": len(times),
        "min_ms": round(min(times), 3) if times else None,
        "mean_ms": round(sum(times) / len(times), 3) if times else None,
        "max_ms": round(max(times), 3) if times else None,
        "times_ms": [round(each, 3) for each in times],
        "last_reason": tally.last_reason,
    }


def _print_summary(reports: list[dict[str, Any]]) -> None:
    click.echo()
    for each in reports:
        sent, answered = each["sent"], each["answered"]
        lost = 100 * (sent - answered) / sent if sent else 0
        line = f"{short_id(each['node_id'])}: {sent} sent, {answered} answered, {lost:.0f} % lost"
        if answered:
            line += f"; min/mean/max {each['min_ms']:.2f}/{each['mean_ms']:.2f}/{each['max_ms']:.2f} ms"
        click.echo(line)
