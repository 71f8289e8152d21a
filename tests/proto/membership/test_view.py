"""The view is the brute-force choice, bounded, stable, and leaves nobody unwatched."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_proto.ids import NodeId
from kvasir_proto.membership.view import View, pair_weight, ring_position
from tests.proto.membership.simulation import NODE_IDS

ME = NODE_IDS[0]


def slow_view(node_id: NodeId, others: set[NodeId], size: int) -> set[NodeId]:
    own = ring_position(node_id)
    on_ring = sorted(others, key=lambda each: (ring_position(each) - own) % 2**64)
    chosen = set(on_ring[: size // 2])
    for each in sorted(others, key=lambda each: (pair_weight(own, ring_position(each)), each)):
        if len(chosen) < size:
            chosen.add(each)
    return chosen


def view_of(node_id: NodeId, others: list[NodeId], size: int = 12) -> View:
    view = View(node_id, size)
    for other in others:
        view.add(other)
    return view


@given(st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=80), st.integers(2, 14))
def test_view_is_its_brute_force_twin_through_any_history(history: list[tuple[int, bool]], size: int) -> None:
    view, others = View(ME, size), set[NodeId]()
    for index, comes in history:
        node_id = NODE_IDS[index]
        if comes and node_id not in others:
            others.add(node_id)
            view.add(node_id)
        elif not comes and node_id in others:
            others.remove(node_id)
            view.remove(node_id)
        assert view.members == tuple(sorted(slow_view(ME, others, size)))


@settings(max_examples=10)
@given(st.permutations(NODE_IDS[1:40]))
def test_order_of_arrival_does_not_matter(others: list[NodeId]) -> None:
    assert view_of(ME, others).members == view_of(ME, NODE_IDS[1:40]).members


@settings(max_examples=20)
@given(st.sets(st.integers(1, 80)), st.sets(st.integers(81, 160)))
def test_many_at_once_are_the_same_as_one_after_another(first: set[int], then: set[int]) -> None:
    view = view_of(ME, [NODE_IDS[each] for each in sorted(first)])
    view.add_all(NODE_IDS[each] for each in sorted(then))
    assert view.members == view_of(ME, [NODE_IDS[each] for each in sorted(first | then)]).members
    for each in sorted(first | then)[: len(first)]:
        view.remove(NODE_IDS[each])
    left = [NODE_IDS[each] for each in sorted(first | then)[len(first) :]]
    assert view.members == tuple(sorted(slow_view(ME, set(left), 12)))


@pytest.mark.parametrize("count", [2, 7, 13])
def test_everybody_watches_everybody_in_a_small_swarm(count: int) -> None:
    names = NODE_IDS[:count]
    for name in names:
        assert set(view_of(name, [each for each in names if each != name]).members) == set(names) - {name}


def test_nobody_is_unwatched_and_one_that_goes_moves_few_views() -> None:
    names = NODE_IDS[:200]
    views = {name: view_of(name, [each for each in names if each != name]) for name in names}
    watched = Counter(each for view in views.values() for each in view.members)
    assert min(watched[name] for name in names) >= 6
    assert max(watched.values()) <= 6 + 24

    before = {name: views[name].members for name in names}
    gone = names[77]
    for name in names:
        if name != gone:
            views[name].remove(gone)
            changed = set(views[name].members) - set(before[name])
            assert len(changed) == (gone in before[name])


def test_the_random_half_serves_both_ends() -> None:
    names = NODE_IDS[:200]
    views = {name: set(view_of(name, [each for each in names if each != name]).members) for name in names}
    pairs = [(one, other) for one in names for other in views[one]]
    mutual = sum(one in views[other] for one, other in pairs)
    assert mutual / len(pairs) > 0.3
