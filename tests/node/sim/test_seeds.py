"""Whole runs on the daemon's own core: a few of every kind, and each seed that ever failed by name."""

from __future__ import annotations

import pytest

from kvasir_node.sim.faults import FAULTS
from kvasir_node.sim.node_cores import NodeCoreKit
from kvasir_node.sim.report import replay_command
from kvasir_node.sim.simulation import FORMED_FROM, Outcome, Simulation, SimulationOptions
from kvasir_proto.election.states import Role
from kvasir_proto.instants import seconds

pytestmark = pytest.mark.slow

HONEST_FAULTS = tuple(name for name in FAULTS if name != "byzantine")


def run(nodes: int, duration_s: int, seed: int, faults: tuple[str, ...]) -> Outcome:
    options = SimulationOptions(nodes, duration_s, seed, faults)
    outcome = Simulation(options, NodeCoreKit(options)).run()
    command = replay_command(options, ",".join(faults) or "none")
    assert outcome.violations == (), command
    assert outcome.lacking is None, command
    return outcome


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("faults", [(), HONEST_FAULTS, FAULTS], ids=["none", "honest", "all"])
def test_a_swarm_is_safe_and_becomes_one_again(faults: tuple[str, ...], seed: int) -> None:
    outcome = run(9, 40, seed, faults)
    assert outcome.backbones_per_term_max == 1
    assert outcome.messages > 1000


@pytest.mark.parametrize("liars", [1, 2])
def test_electors_that_vote_twice_within_the_bound_harm_nobody(liars: int) -> None:
    options = SimulationOptions(9, 60, 1, (), lying_electors=liars)
    outcome = Simulation(options, NodeCoreKit(options)).run()
    assert outcome.violations == ()
    assert outcome.lacking is None
    assert outcome.detections


def test_newcomers_of_a_formed_swarm_learn_the_electorates_that_were_made_before_the_run() -> None:
    options = SimulationOptions(FORMED_FROM, 3, 7, ())
    simulation = Simulation(options, NodeCoreKit(options))
    simulation._begin()
    simulation.swarm.run_until(seconds(3))
    assert simulation.checkers.violations == []
    newcomers = [each.core for each in simulation.swarm.nodes[FORMED_FROM:] if each.core is not None]
    assert any(core.view().electorate.version for core in newcomers)


def test_both_of_two_nodes_with_one_identity_and_all_others_say_so() -> None:
    """A home copied whole and started beside the first: each keeps its promises, both together would not."""
    options = SimulationOptions(7, 40, 1, (), lying_electors=1)
    simulation = Simulation(options, NodeCoreKit(options))
    simulation._begin()
    simulation.swarm.run_until(seconds(40))  # before it is healed, which stops the twins
    assert simulation.checkers.violations == []
    assert simulation.swarm.notices["identity_conflicted"] == 2
    copied = simulation.swarm.nodes[1]
    twins = [each for each in simulation.swarm.nodes if each.node_id == copied.node_id]
    assert len(twins) == 2
    for each in twins:
        assert each.core is not None
        view = each.core.view()
        assert view.state == "conflicted"
        assert "identity" in view.reason or "another process" in view.reason
        assert view.role is Role.FOLLOWER
    seen = [
        member.condition
        for each in simulation.swarm.nodes
        if each not in twins and each.core is not None
        for member in each.core.view().members
        if member.node_id == copied.node_id
    ]
    assert len(seen) == 6
    assert set(seen) == {"conflicted"}


def test_more_of_them_are_found_out() -> None:
    options = SimulationOptions(9, 60, 1, (), lying_electors=4)
    assert options.is_beyond_bound
    assert Simulation(options, NodeCoreKit(options)).run().detections


def test_a_holder_that_restarts_before_anybody_misses_it_is_offered_its_plan_again() -> None:
    run(12, 120, 141, FAULTS)


@pytest.mark.parametrize("seed", [2, 23])
def test_a_holder_that_was_thought_dead_for_a_moment_is_asked_again_what_it_serves(seed: int) -> None:
    """It had answered the offer and was not offered the plan again: its experts had no holder for ever."""
    run(12, 120, seed, FAULTS)


def test_a_holder_that_answers_before_its_record_is_here_is_asked_again_what_it_serves() -> None:
    """The backbone had just restarted: it heard that the node serves its shard before it knew the node."""
    run(12, 120, 199, FAULTS)
