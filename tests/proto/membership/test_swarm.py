"""Whole swarms of cores: deaths are found, the living are not buried, tables become one again."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from kvasir_proto.ids import NodeId
from kvasir_proto.membership.events import ClockSuspected, MemberChanged
from tests.proto.membership.simulation import (
    MILLISECOND,
    NODE_IDS,
    SECOND,
    Swarm,
    notices,
)


def whole(seed: int, count: int, **faults: float) -> tuple[Swarm, list[NodeId]]:
    swarm = Swarm(seed)
    for name, value in faults.items():
        setattr(swarm, name, value)
    names = swarm.start_all(count)
    swarm.run(2 * SECOND)
    swarm.run_until(swarm.is_whole, 20 * SECOND)
    return swarm, names


def falsely_dead_s(swarm: Swarm, but: set[NodeId] = frozenset()) -> float:  # type: ignore[assignment]
    """The longest time anybody called a member dead, in seconds, those in `but` left out."""
    since: dict[tuple[NodeId, NodeId], int] = {}
    longest = 0
    for when, where, event in swarm.told(MemberChanged):
        if where in but or event.node_id in but:
            continue
        if event.state == "dead":
            since.setdefault((where, event.node_id), when)
        elif event.state == "alive" and (where, event.node_id) in since:
            longest = max(longest, when - since.pop((where, event.node_id)))
    return max([longest, *(swarm.now - when for when in since.values())]) / SECOND


def buried_by(swarm: Swarm, victim: NodeId) -> bool:
    return all(swarm.state(victim, node.name) in ("dead", "unknown") for node in swarm.live())


# --- deaths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken, limit_s", [(True, 2.0), (False, 5.0)], ids=["connection-broken", "stopped"])
def test_death_of_one_of_six_is_known_to_all(broken: bool, limit_s: float) -> None:
    for seed in range(10):
        swarm, names = whole(seed, 6)
        swarm.run(3 * SECOND + seed * 97 * MILLISECOND)
        swarm.hears_of_broken_connections = broken
        swarm.kill(names[3])
        taken = swarm.run_until(lambda: buried_by(swarm, names[3]), 10 * SECOND, 10 * MILLISECOND)  # noqa: B023
        assert taken <= limit_s
        assert swarm.is_whole()


@pytest.mark.parametrize("count", [2, 3])
def test_death_in_the_smallest_swarms(count: int) -> None:
    swarm, names = whole(1, count)
    swarm.kill(names[1])
    assert swarm.run_until(lambda: buried_by(swarm, names[1]), 10 * SECOND, 10 * MILLISECOND) <= 5


def test_a_node_stopped_for_a_minute_rejoins_by_itself_and_buries_nobody() -> None:
    swarm, names = whole(2, 6)
    swarm.pause(names[2])
    swarm.run(60 * SECOND)
    assert {swarm.state(names[2], name) for name in names if name != names[2]} == {"dead"}
    swarm.resume(names[2])
    assert swarm.run_until(swarm.is_whole, 5 * SECOND, 10 * MILLISECOND) <= 1
    assert notices(swarm, "node_paused") == [names[2]]
    swarm.run(20 * SECOND)
    assert swarm.is_whole()
    assert falsely_dead_s(swarm, {names[2]}) == 0


def test_a_restart_is_higher_and_soon_known() -> None:
    swarm, names = whole(3, 6)
    before = swarm.nodes[names[4]]
    incarnation = before.core.incarnation
    swarm.kill(names[4])
    swarm.run(SECOND // 2)
    again = swarm.start(names[4], (names[0], names[1]), stored=before.stored)
    assert again.core.incarnation > incarnation
    assert swarm.run_until(swarm.is_whole, 5 * SECOND, 50 * MILLISECOND) <= 2
    swarm.run(10 * SECOND)
    assert swarm.is_whole()
    assert "conflicted" not in [each.condition for each in swarm.nodes[names[0]].core.members()]


def test_one_that_leaves_is_left_everywhere_and_stays_so() -> None:
    swarm, names = whole(4, 20)
    swarm.leave(names[7])
    swarm.run_until(
        lambda: all(swarm.state(names[7], node.name) == "left" for node in swarm.live()), 5 * SECOND
    )
    swarm.run(30 * SECOND)
    assert not [event for _, _, event in swarm.told(MemberChanged) if event.state in ("suspect", "dead")]


# --- fifty nodes and a bad network --------------------------------------------------------------------------


def test_a_fifth_of_all_messages_lost_buries_nobody_for_long() -> None:
    swarm, _ = whole(5, 50)
    swarm.loss, swarm.duplicates = 0.2, 0.1
    swarm.delay_ns = (MILLISECOND, 40 * MILLISECOND)
    swarm.run(60 * SECOND)
    assert falsely_dead_s(swarm) <= 10
    swarm.loss = 0.0
    assert swarm.run_until(swarm.is_whole, 30 * SECOND) <= 20


def test_deaths_are_found_under_loss() -> None:
    swarm, names = whole(6, 50)
    swarm.loss = 0.2
    victims = names[10:15]
    for name in victims:
        swarm.kill(name)
    taken = swarm.run_until(lambda: all(buried_by(swarm, name) for name in victims), 60 * SECOND)
    assert taken <= 25
    assert falsely_dead_s(swarm, set(victims)) <= 10


def test_a_one_way_path_is_named_and_nobody_dies_of_it() -> None:
    swarm, names = whole(7, 10)
    swarm.link = lambda sender, to: (sender, to) != (names[3], names[4])
    swarm.run(60 * SECOND)
    assert not [event for _, _, event in swarm.told(MemberChanged) if event.state == "dead"]
    # Of the two only the ping one way and only the ack the other way are lost: both see no direct answer.
    for one, other in ((names[3], names[4]), (names[4], names[3])):
        member = swarm.nodes[one].core.member(other)
        assert member is not None
        assert (member.state, member.path, member.condition) == ("alive", "indirect", "indirect")
        assert "path" in member.reason
    swarm.link = lambda sender, to: True
    swarm.run(20 * SECOND)
    member = swarm.nodes[names[3]].core.member(names[4])
    assert member is not None
    assert (member.path, member.condition) == ("direct", "well")


@pytest.mark.parametrize("cut_s", [30, 700])
def test_halves_of_a_swarm_find_each_other_again(cut_s: int) -> None:
    """Also when each half has forgotten the other: the seeds are tried for ever."""
    swarm, names = whole(8, 20)
    half = set(names[:1] + names[11:])  # a seed on either side
    swarm.link = lambda sender, to: (sender in half) == (to in half)
    swarm.run(cut_s * SECOND)
    assert {swarm.nodes[name].core.live_count for name in names} == {10}
    swarm.link = lambda sender, to: True
    assert swarm.run_until(swarm.is_whole, 60 * SECOND) <= 30


def test_wrong_clocks_are_named_on_both_sides_and_change_nothing_else() -> None:
    swarm = Swarm(9)
    names = NODE_IDS[:8]
    for index, name in enumerate(names):
        skew = {2: 600 * SECOND, 5: -600 * SECOND}.get(index, 0)
        swarm.start(name, tuple(names[:2]), skew=skew)
    swarm.run(30 * SECOND)
    wrong = {names[2], names[5]}
    assert swarm.is_whole()
    assert {where for _, where, _ in swarm.told(ClockSuspected)} == wrong
    for name in set(names) - wrong:
        members = swarm.nodes[name].core.members()
        assert {each.node_id for each in members if each.condition == "clock_wrong"} == wrong


def test_a_copied_home_is_noticed_by_others() -> None:
    """The copies themselves go by what was signed: `tests/node/driver/test_core_driver.py`."""
    swarm, names = whole(10, 6)
    original = swarm.nodes[names[3]]
    copy = NODE_IDS[50]  # where the simulation keeps the copy; its core says that it is names[3]
    node = swarm.start(names[3], (names[0], names[1]), stored=None)
    swarm.nodes[copy], swarm.nodes[names[3]] = node, original
    turns = [0]

    def to_one_of_them(sender: NodeId, to: NodeId) -> bool:
        """Connections to the id end at either process, now this, now that one."""
        if to == names[3]:
            turns[0] += 1
            swarm.nodes[names[3]] = (original, node)[turns[0] // 5 % 2]
        return True

    swarm.link = to_one_of_them
    swarm.run(40 * SECOND)
    conflicted = {
        where
        for _, where, event in swarm.told(MemberChanged)
        if event.node_id == names[3] and event.condition == "conflicted"
    }
    assert len(conflicted) == 5


@pytest.mark.parametrize("seed", range(3))
def test_churn_with_every_fault_and_then_one_table(seed: int) -> None:
    swarm, names = whole(seed, 50)
    swarm.loss, swarm.duplicates = 0.05, 0.05
    draw = random.Random(seed)
    touched: set[NodeId] = set()
    for _ in range(20):
        name = draw.choice(names)
        node = swarm.nodes[name]
        touched.add(name)
        if node.dead:
            swarm.start(name, tuple(names[:2]), stored=node.stored, skew=draw.randint(-600, 600) * SECOND)
        elif node.paused:
            swarm.resume(name)
        else:
            draw.choice([swarm.kill, swarm.pause, swarm.leave])(name)
        swarm.run(draw.randrange(3 * SECOND))
    assert falsely_dead_s(swarm, touched) <= 3
    swarm.loss = swarm.duplicates = 0.0
    for node in swarm.live():
        if node.paused:
            swarm.resume(node.name)
    assert swarm.run_until(swarm.is_whole, 60 * SECOND) <= 30


# --- what it costs ------------------------------------------------------------------------------------------


def test_a_quiet_swarm_costs_a_node_the_same_whatever_its_size() -> None:
    rates = {}
    for count in (30, 120):
        swarm, _ = whole(11, count)
        swarm.run(60 * SECOND)
        messages, size = swarm.messages, swarm.bytes
        swarm.run(20 * SECOND)
        rates[count] = ((swarm.messages - messages) / count / 20, (swarm.bytes - size) / count / 20)
    assert rates[120][0] <= rates[30][0] * 1.1 <= 3
    assert rates[120][1] <= rates[30][1] * 1.1 <= 500


def test_same_seed_same_swarm() -> None:
    def story() -> list[object]:
        swarm, names = whole(12, 12, loss=0.1)
        swarm.kill(names[3])
        swarm.run(20 * SECOND)
        return [swarm.events, swarm.messages, swarm.bytes]

    assert story() == story()


def test_everybody_learns_of_a_newcomer_soon() -> None:
    swarm, names = whole(13, 120)
    swarm.start(NODE_IDS[500], (names[0], names[1]))
    known: dict[int, int] = defaultdict(int)
    for step in range(40):
        swarm.run(SECOND // 4)
        known[step] = sum(swarm.state(NODE_IDS[500], name) == "alive" for name in names)
    assert known[20] >= 119  # 99 % within 5 s
    assert swarm.is_whole()
