"""Who is asked for which experts: everything once, of those who say they have it, and nobody for ever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_proto.expert_sources import (
    ASKED_AT_ONCE_MAX,
    NOT_HELD_MAX,
    OTHERS_MAX,
    PASSED_OVER_MAX,
    PATIENCE_MAX,
    RUN_SIZE_BYTES_MAX,
    ExpertRun,
    ExpertSources,
    Fault,
    PassedOver,
    WantedExpert,
    rest_of,
)
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Instant, after, seconds
from kvasir_proto.manifest import ShardSet

NOW = Instant(10**12)
OWN = NodeId("own")
A, B, C = (NodeId(each) for each in "ABC")
SIZE = 1000
SUFFIXES = ("ffn_down_exps.weight", "ffn_up_exps.weight")


def wanted(*ranges: tuple[int, int, int], size_bytes: int = SIZE) -> list[WantedExpert]:
    return [
        WantedExpert(f"blk.{layer}.{suffix}", layer, expert, size_bytes)
        for layer, first, end in ranges
        for suffix in SUFFIXES
        for expert in range(first, end)
    ]


def numbers(run: ExpertRun) -> list[int]:
    return [each.expert for each in run.experts]


@given(st.randoms(use_true_random=False), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_what_somebody_holds_comes_once_whoever_fails(draws: random.Random, n_holder: int) -> None:
    """Holders refuse, break off, lie and have less than they say; one at least is honest in all."""
    names = [NodeId(f"node{each}") for each in range(n_holder)]
    want = wanted((0, 0, 40), (3, 5, 30), size_bytes=draws.choice((1, SIZE, RUN_SIZE_BYTES_MAX // 3)))
    whole = ShardSet(((0, 0, 64), (3, 0, 64)))
    holders = dict.fromkeys(names, whole)
    honest = names[-1]
    sources = ExpertSources(want, OWN, PassedOver())
    busy: dict[NodeId, ExpertRun] = {}
    come: list[tuple[str, int]] = []
    now = NOW
    for _ in range(10_000):
        while (task := sources.next_run(holders, (), now)) is not None:
            node_id, run = task
            assert node_id not in busy
            assert len({each.tensor for each in run.experts}) == 1
            assert numbers(run) == list(range(numbers(run)[0], numbers(run)[-1] + 1))
            assert len(run.experts) == 1 or run.size_bytes <= RUN_SIZE_BYTES_MAX
            assert not any(each.begun_bytes for each in run.experts[1:])
            busy[node_id] = run
        assert len(busy) <= ASKED_AT_ONCE_MAX
        if not busy and not sources.n_left:
            break
        now = after(now, seconds(1))
        if not busy:
            continue
        node_id = draws.choice(sorted(busy))
        run = busy.pop(node_id)
        left_bytes = run.size_bytes - run.experts[0].begun_bytes
        came = left_bytes if node_id == honest else draws.randrange(left_bytes + 1)
        left = rest_of(run, came)
        not_held = node_id != honest and bool(left) and draws.random() < 0.3
        if left and not not_held:
            sources_fault(sources, node_id, draws, now)
        come += [(each.tensor, each.expert) for each in run.experts if each.expert not in lefts(left)]
        sources.take_back(node_id, left, not_held=not_held)
    assert sorted(come) == sorted((each.tensor, each.expert) for each in want)


def sources_fault(sources: ExpertSources, node_id: NodeId, draws: random.Random, now: Instant) -> None:
    faults: tuple[Fault, ...] = ("busy", "failed", "damaged")
    sources._passed_over.note_fault(node_id, draws.choice(faults), now)


def lefts(left: tuple[WantedExpert, ...]) -> set[int]:
    return {each.expert for each in left}


def test_who_says_it_holds_is_asked_and_the_others_only_for_what_nobody_gives() -> None:
    sources = ExpertSources(wanted((0, 0, 8)), OWN, PassedOver())
    holders = {A: ShardSet(((0, 0, 3),)), B: ShardSet(((0, 3, 5),))}
    asked: dict[NodeId, list[int]] = {}
    for _ in range(4):
        for _ in range(2):
            task = sources.next_run(holders, (C,), NOW)
            assert task is not None
            asked.setdefault(task[0], []).extend(numbers(task[1]))
            if C in asked:
                break
        for node_id in holders:
            sources.take_back(node_id, ())
        if C in asked:
            break
    assert asked[A] == [0, 1, 2, 0, 1, 2]
    assert asked[B] == [3, 4, 3, 4]
    assert asked[C] == [5, 6, 7]


def test_while_a_holder_is_busy_nobody_else_is_asked_for_what_it_may_give_next() -> None:
    sources = ExpertSources(wanted((0, 0, 8), size_bytes=RUN_SIZE_BYTES_MAX), OWN, PassedOver())
    holders = {A: ShardSet(((0, 0, 8),))}
    first = sources.next_run(holders, (C,), NOW)
    assert first is not None
    assert first[0] == A
    assert sources.next_run(holders, (C,), NOW) is None


def test_several_are_asked_at_once_and_each_once() -> None:
    names = [NodeId(f"n{each}") for each in range(9)]
    sources = ExpertSources(wanted((0, 0, 64), size_bytes=RUN_SIZE_BYTES_MAX), OWN, PassedOver())
    whole = ShardSet(((0, 0, 64),))
    asked = [sources.next_run(dict.fromkeys(names, whole), (), NOW) for _ in range(ASKED_AT_ONCE_MAX + 1)]
    assert asked[-1] is None
    assert len({each[0] for each in asked if each is not None}) == ASKED_AT_ONCE_MAX


def test_nodes_that_begin_at_once_do_not_all_ask_the_same_one() -> None:
    names = [NodeId(f"n{each}") for each in range(8)]
    whole = ShardSet(((0, 0, 64),))
    firsts = set()
    for each in range(30):
        sources = ExpertSources(wanted((0, 0, 4)), NodeId(f"own{each}"), PassedOver())
        task = sources.next_run(dict.fromkeys(names, whole), (), NOW)
        assert task is not None
        firsts.add(task[0])
    assert len(firsts) > 4


def test_who_has_not_what_it_says_is_asked_for_something_else_and_in_the_end_for_nothing() -> None:
    sources = ExpertSources(wanted((0, 0, 64), size_bytes=RUN_SIZE_BYTES_MAX), OWN, PassedOver())
    whole = {A: ShardSet(((0, 0, 64),))}
    asked = []
    while (task := sources.next_run(whole, (), NOW)) is not None:
        asked.append((task[1].experts[0].tensor, numbers(task[1])[0]))
        sources.take_back(A, task[1].experts, not_held=True)
    assert len(asked) == len(set(asked)) == NOT_HELD_MAX


def test_not_the_whole_swarm_is_asked_for_what_nobody_says_it_has() -> None:
    sources = ExpertSources(wanted((0, 0, 1)), OWN, PassedOver())
    others = [NodeId(f"n{each:03}") for each in range(200)]
    asked = set()
    while (task := sources.next_run({}, [OWN, *others], NOW)) is not None:
        asked.add(task[0])
        sources.take_back(task[0], task[1].experts, not_held=True)
    assert asked == set(others[:OTHERS_MAX])


def test_a_node_never_asks_itself() -> None:
    sources = ExpertSources(wanted((0, 0, 1)), OWN, PassedOver())
    assert sources.next_run({OWN: ShardSet(((0, 0, 1),))}, (OWN,), NOW) is None


def test_an_expert_that_was_begun_is_the_first_of_its_run() -> None:
    want = [
        WantedExpert("blk.0.ffn_up_exps.weight", 0, each, SIZE, 7 if each == 2 else 0) for each in range(4)
    ]
    sources = ExpertSources(want, OWN, PassedOver())
    holders = {A: ShardSet(((0, 0, 9),)), B: ShardSet(((0, 0, 9),))}
    runs = [sources.next_run(holders, (), NOW) for _ in range(2)]
    assert [numbers(each[1]) for each in runs if each is not None] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "begun, came, left",
    [
        (0, 0, [(1, 0), (2, 0), (3, 0)]),
        (4, 0, [(1, 4), (2, 0), (3, 0)]),
        (4, 6, [(2, 0), (3, 0)]),
        (4, 7, [(2, 1), (3, 0)]),
        (0, 29, [(3, 9)]),
        (4, 26, []),
    ],
)
def test_what_is_left_of_a_run_begins_at_the_byte(begun: int, came: int, left: list[tuple[int, int]]) -> None:
    run = ExpertRun(tuple(WantedExpert("t", 0, each, 10, begun if each == 1 else 0) for each in (1, 2, 3)))
    assert [(each.expert, each.begun_bytes) for each in rest_of(run, came)] == left


@pytest.mark.parametrize(
    "fault, first_s, second_s", [("busy", 3, 3), ("failed", 15, 30), ("damaged", 600, 1200)]
)
def test_who_fails_is_passed_over_for_a_while_and_longer_the_next_time(
    fault: Fault, first_s: int, second_s: int
) -> None:
    memory, now = PassedOver(), NOW
    for patience_s in (first_s, second_s):
        memory.note_fault(A, fault, now)
        assert memory.is_passed_over(A, after(now, seconds(patience_s - 1)))
        now = after(now, seconds(patience_s))
        assert not memory.is_passed_over(A, now)
    assert not memory.is_passed_over(B, NOW)
    for _ in range(50):
        memory.note_fault(A, "damaged", now)
    assert not memory.is_passed_over(A, after(now, PATIENCE_MAX))
    memory.note_given(A)
    memory.note_fault(A, fault, now)
    assert not memory.is_passed_over(A, after(now, seconds(first_s)))


def test_a_busy_moment_does_not_shorten_what_was_earned_before() -> None:
    memory = PassedOver()
    memory.note_fault(A, "damaged", NOW)
    memory.note_fault(A, "busy", NOW)
    assert memory.is_passed_over(A, after(NOW, seconds(599)))


def test_as_many_as_there_is_room_for_are_remembered_and_the_soonest_forgotten() -> None:
    memory = PassedOver()
    memory.note_fault(A, "failed", NOW)
    memory.note_fault(B, "damaged", NOW)
    for each in range(PASSED_OVER_MAX - 1):
        memory.note_fault(NodeId(f"n{each}"), "damaged", NOW)
    assert not memory.is_passed_over(A, NOW)
    assert memory.is_passed_over(B, NOW)
