"""Both phases of a run on toy cores, what a run says of itself, and many runs in a row."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvasir_node.cli import sim as command
from kvasir_node.sim.byzantine import Twin
from kvasir_node.sim.checkers import Checker, FencesNeverFall, NothingRaises, OneBackboneATerm
from kvasir_node.sim.faults import FAULTS
from kvasir_node.sim.joins import JoinTimes
from kvasir_node.sim.node_cores import NodeCoreKit
from kvasir_node.sim.report import document_of, replay_command
from kvasir_node.sim.results import code_digest
from kvasir_node.sim.simulation import FORMED_FROM, Simulation, SimulationOptions
from kvasir_node.sim.swarm import Adversary, NodeIdentity, SimNode, Swarm, key_of
from kvasir_proto.election.states import Role
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import seconds
from kvasir_proto.membership.events import MemberChanged
from tests.node.cli.invocation import call
from tests.node.sim.test_checkers import ForgetfulCore, FragileCore
from tests.node.sim.toy_core import ToyCore, ToyKit


class JudgedToyKit(ToyKit):
    """A swarm of toys is one when everybody who runs follows the founder."""

    def checkers(self) -> tuple[Sequence[Checker], Callable[[], int]]:
        terms = OneBackboneATerm()
        return [terms, FencesNeverFall(), NothingRaises()], lambda: terms.backbones_max

    def bears_departure(self, core: Sequence[SimNode], node_id: NodeId) -> bool:
        return True

    def lacking(self, core: Sequence[SimNode], long_gone: Set[NodeId] = frozenset()) -> str | None:
        for node in core:
            if node.core is None or node.core.view().fence is None:
                return f"node {node.index} has no backbone"
        return None

    def make_liar(self, node_id: NodeId, randomness: Random) -> Adversary:
        return Twin()

    def form(self, swarm: Swarm, nodes: Sequence[SimNode]) -> None:
        for node in nodes:
            swarm.start(node, (nodes[0].node_id,) if node.index else ())

    def member_seen(self, event: object) -> NodeId | None:
        return event.node_id if isinstance(event, MemberChanged) else None

    def detections(self, notices: dict[str, int]) -> dict[str, int]:
        return {}


class DeafCore(ToyCore):
    """Never follows."""

    def receive(self, message: Any, sender: NodeId, now: Any) -> None:
        pass


def run(core: type[ToyCore] = ToyCore, **options: Any) -> Any:
    chosen = SimulationOptions(**{"nodes": 6, "seconds": 60, "seed": 4, "faults": FAULTS, **options})
    trace = io.StringIO()
    outcome = Simulation(chosen, JudgedToyKit(core), trace).run()
    return outcome, trace.getvalue()


def test_a_right_core_comes_through_everything() -> None:
    outcome, log = run(seconds=120)
    assert outcome.is_good
    assert outcome.convergence_s is not None
    assert set(outcome.faults_happened) >= {"crash", "partition", "pause"}
    assert outcome.refused_by_codec > 0
    assert run(seconds=120) == (outcome, log)


def test_a_core_that_forgets_is_unsafe_and_one_that_never_follows_does_not_converge() -> None:
    outcome, _ = run(ForgetfulCore, seconds=120)
    assert not outcome.is_good
    assert outcome.violations[0].checker == "FencesNeverFall"
    outcome, log = run(DeafCore)
    assert not outcome.is_good
    assert outcome.lacking == "node 1 has no backbone"
    assert outcome.convergence_s is None
    assert "healed" in log
    assert outcome.simulated_s == pytest.approx(90, abs=3)


def test_a_core_that_raises_is_a_violation_in_the_report() -> None:
    options = SimulationOptions(6, 200, 4, ("crash",))
    outcome = Simulation(options, JudgedToyKit(FragileCore)).run()
    document = document_of(options, "crash", outcome, wall_s=1.0)
    assert document["safety_violations"][0]["checker"] == "NothingRaises"
    assert document["safety_violations"][0]["at_s"] > 0
    assert document["replay"] == "kvasir-node sim --nodes 6 --seconds 200 --seed 4 --faults crash --json"
    json.dumps(document)


def test_large_quiet_swarms_begin_formed_and_say_so() -> None:
    small, large = (SimulationOptions(count, 10, 1, ()) for count in (FORMED_FROM - 1, FORMED_FROM))
    assert not small.is_formed
    assert large.is_formed
    outcome = Simulation(large, JudgedToyKit()).run()
    document = document_of(large, "none", outcome, 1.0)
    assert document["begins"].startswith("with a formed swarm")
    assert document["joins"] == 10
    assert "--lying-electors 3" in replay_command(SimulationOptions(7, 1, 1, (), lying_electors=3), "none")


def test_a_join_is_known_when_99_of_100_know_it() -> None:
    def node(number: int) -> SimNode:
        key = key_of(1, number)
        identity = NodeIdentity(number, key, node_id_of(key.public_key().public_bytes_raw()))
        return SimNode(identity, clock=None, entropy=Random(1))  # type: ignore[arg-type]  # not looked at

    times = JoinTimes(lambda: 101)
    newcomer = node(0)
    times.known(0, node(1), newcomer.node_id)
    times.joins(seconds(10), newcomer)
    for number in range(98):
        times.known(seconds(11), node(1 + number), newcomer.node_id)
        times.known(seconds(11), node(1), newcomer.node_id)
    assert times.p99_s() is None
    times.known(seconds(13), node(99), newcomer.node_id)
    assert times.p99_s() == 3.0
    times.joins(seconds(20), node(200))
    assert times.p99_s() is None


def test_an_electorate_loses_no_quorum_for_good_and_keeps_nobody_who_left_long_ago() -> None:
    """Who loses a quorum for good needs `recover`: a run shows nothing then. All else has to be mended."""
    options = SimulationOptions(nodes=10, seconds=20, seed=1, faults=("byzantine",))
    kit = NodeCoreKit(options)
    simulation = Simulation(options, kit)
    simulation.run()
    core = simulation.schedule.core()
    views = [node.core.view() for node in core if node.core is not None]
    (electorate,) = (view.electorate for view in views if view.role is Role.BACKBONE)
    electors = [node_id_of(each) for each in electorate.members]
    assert len(electors) == 7
    one, two, three, *_ = sorted(electors)
    assert all(kit.bears_departure(core, node.node_id) for node in core)
    rest = [node for node in core if node.node_id not in (one, two)]
    assert not kit.bears_departure(rest, three)
    outsider = next(node.node_id for node in core if node.node_id not in electors)
    assert kit.bears_departure(rest, outsider)
    assert kit.lacking(core) is None
    assert kit.lacking(core, frozenset({outsider})) is None
    assert kit.lacking(core, frozenset({one})) == "1 electors that are long gone have not been replaced"


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def toys(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_toys(options: SimulationOptions, faults: str, trace: Any = None) -> dict[str, Any]:
        core = DeafCore if options.seed == 3 else ToyCore
        outcome = Simulation(options, JudgedToyKit(core), trace).run()
        return document_of(options, faults, outcome, 0.5)

    monkeypatch.setattr(command, "_run", run_toys)


@pytest.mark.usefixtures("toys")
def test_one_run_prints_its_document_and_writes_its_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    arguments = ("--nodes", "4", "--seconds", "20", "--faults", "loss,crash")
    outcome = call("sim", *arguments, "--seed", "1", "--json", "--trace", str(trace), home=tmp_path)
    assert outcome.status == 0
    assert outcome.document["converged"] is True
    assert outcome.document["safety_violations"] == []
    assert "n0 started" in trace.read_text()
    failed = call("sim", *arguments, "--seed", "3", home=tmp_path)
    assert failed.status == 1
    assert "--seed 3 --faults loss,crash" in failed.out


@pytest.mark.usefixtures("toys")
def test_many_runs_go_on_where_they_were(tmp_path: Path) -> None:
    results = tmp_path / "results"
    arguments = (
        "sim",
        "--nodes",
        "4",
        "--seconds",
        "20",
        "--faults",
        "none",
        "--results",
        str(results),
        "--json",
    )
    first = call(*arguments, "--seeds", "1..2", home=tmp_path)
    assert (first.status, first.document["runs"], first.document["failed"]) == (0, 2, [])
    lines = results.read_text().splitlines()
    second = call(*arguments, "--seeds", "1..4", home=tmp_path)
    assert second.status == 1
    assert [each["seed"] for each in second.document["failed"]] == [3]
    assert results.read_text().splitlines()[:3] == lines
    assert len(results.read_text().splitlines()) == 5
    assert "seed 3 failed: not one swarm 30 s after healing" in second.err
    results.write_text(results.read_text()[:-5])  # it was ended in the middle of a line
    third = call(*arguments, "--seeds", "1..4", home=tmp_path)
    assert "3 of 4 runs are in" in third.err
    assert third.document["failed"] == second.document["failed"]
    assert len(results.read_text().splitlines()) == 5


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    "spoil, named",
    [
        (lambda text: "{}\n" + text, "schema_version is None there and 1 here"),
        (lambda text: text.replace('"nodes":4', '"nodes":5'), "nodes is 5 there and 4 here"),
        (lambda text: text.replace('"faults":[]', '"faults":["loss"]'), "faults is"),
        (lambda text: text.replace(code_digest(), "0" * 16), "code is 0000000000000000 there"),
        (lambda text: text + "[]\n", "line 3 of"),
    ],
)
def test_a_results_file_of_other_runs_is_refused_by_name_and_left_as_it_is(
    spoil: Callable[[str], str], named: str, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    arguments = ("sim", "--nodes", "4", "--seconds", "20", "--faults", "none", "--results", str(results))
    assert call(*arguments, "--seeds", "1..1", home=tmp_path).status == 0
    results.write_text(spoil(results.read_text()))
    before = results.read_text()
    refused = call(*arguments, "--seeds", "1..2", home=tmp_path)
    assert (refused.status, named in refused.err) == (2, True)
    assert results.read_text() == before


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--seeds", "4..2"),
        ("--seeds", "all"),
        ("--seeds", "1..2", "--seed", "1"),
        ("--results", "file"),
        ("--faults", "weather"),
        ("--nodes", "1"),
    ],
)
def test_wrong_calls_are_usage_errors(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert call("sim", *arguments, home=tmp_path).status == 2
