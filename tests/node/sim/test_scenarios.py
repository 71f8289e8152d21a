"""Scenario transcripts: what a few nodes do in a named situation, word for word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvasir_node.sim.node_cores import NodeCoreKit
from kvasir_node.sim.simulation import SimulationOptions
from kvasir_node.sim.swarm import Swarm
from kvasir_proto.ids import NodeId
from kvasir_proto.node_core import NodeView
from kvasir_proto.placement.plan import Plan
from tests.node.sim.scenario import Scenario
from tests.node.sim.test_simulation import JudgedToyKit

TOY = """\
# Toys follow the founder, also those that were not there when the swarm began.

add-nodes 3
stabilize
----
one swarm after 0.75 s

crash 0 power-loss
drop 1 0 here
advance 2s
----
ok

restart 0
partition 0
show-view 0 1
----
n0 follows n0 and knows 1
n1 follows n0 and knows 1

join
deliver 1 0 here
advance 1s
show-view 0
----
n0 follows n0 and knows 3

crash 2
add-nodes 1
partition 3
stabilize
----
not one swarm: node 3 has no backbone
"""


class ShownToyKit(JudgedToyKit):
    def show_view(self, swarm: Swarm, view: Any) -> str:
        backbone = "nobody" if view.fence is None else f"n{swarm.node_of(view.fence.backbone).index}"
        return f"follows {backbone} and knows {len(view.known)}"

    def show_plan(self, swarm: Swarm) -> Iterator[str]:
        yield from ()


def test_a_scenario_runs_its_commands_and_shows_what_came_of_them() -> None:
    assert Scenario(ShownToyKit, lambda _: False).run(TOY) == TOY


def test_a_scenario_that_goes_another_way_reads_differently() -> None:
    assert Scenario(ShownToyKit, lambda _: False).run(TOY.replace("stabilize", "advance 1ms", 1)) != TOY
    events = Scenario(ShownToyKit, lambda line: line.startswith("crashed")).run(TOY)
    assert "n0 crashed power_loss" in events


@pytest.mark.parametrize("line", ["fly 1", "advance soon"])
def test_a_command_there_is_not_is_refused(line: str) -> None:
    with pytest.raises(AssertionError):
        Scenario(ShownToyKit, lambda _: False).run(f"add-nodes 2\n----\nok\n\n{line}\n----\nok\n")


# --- the daemon's own core ----------------------------------------------------------------------------------

FOLDER = Path(__file__).resolve().parents[2] / "scenarios"
SHOWN = re.compile(
    "crashed|restarted|paused|resumed|leaves|term_won|lease_lost|term_followed|identity_conflicted|"
    "clock_suspected|member_changed .*(state=(dead|left)|clock_wrong|conflicted)"
)
NODE_ID = re.compile(r"12D3KooW\w{44}")


class ShownKit(NodeCoreKit):
    """What nodes show, in few words."""

    def show_view(self, swarm: Swarm, view: NodeView) -> str:
        fence = view.fence
        term = "no term" if fence is None else f"({fence.epoch}, {fence.term}) of {fence.backbone}"
        states = Counter(each.state for each in view.members)
        members = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        votes = f"{view.role.name.lower()}, {len(view.electorate.members)} electors"
        said = f"{view.state}, {term}, {votes}; {members}"
        return named(swarm, f"{said}{': ' if view.reason else ''}{view.reason}")

    def show_plan(self, swarm: Swarm) -> Iterator[str]:
        views = [node.core.view() for node in swarm.nodes if node.core is not None]
        plan = max((view.plan for view in views if view.plan is not None), key=version_of)
        yield f"revision {plan.revision} of ({plan.epoch}, {plan.term})"
        for node_id in plan.nodes:
            shard = plan.shard_of(node_id)
            layers = sorted({layer for layer, _, _ in shard.ranges})
            yield named(swarm, f"{node_id} holds {len(shard)} experts of layers {layers}")


def version_of(plan: Plan) -> tuple[int, int, int]:
    return (plan.epoch, plan.term, plan.revision)


def named(swarm: Swarm, text: str) -> str:
    """The text with each node by its number."""
    return NODE_ID.sub(lambda found: f"n{swarm.node_of(NodeId(found[0])).index}", text)


def scenarios() -> list[Path]:
    return sorted(FOLDER.glob("*.txt"))


@pytest.mark.parametrize("path", scenarios(), ids=lambda path: path.stem)
def test_the_scenario_reads_as_it_did(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text("utf-8")
    options = SimulationOptions(nodes=0, seconds=0, seed=1, faults=())
    now = Scenario(lambda: ShownKit(options), lambda line: SHOWN.search(line) is not None).run(written)
    if request.config.getoption("--regenerate-scenarios"):
        path.write_text(now, "utf-8")
    else:
        assert now == written


def test_there_are_scenarios() -> None:
    assert len(scenarios()) >= 6
