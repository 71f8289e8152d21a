"""Shares against trying every subset of nodes, and a slow member never makes a layer slower."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.placement.cost import WHOLE, layer_ns, shares_of
from kvasir_proto.placement.inventory import Speed

speeds = st.builds(Speed, st.integers(0, 50_000), st.integers(1_000, 50_000))
caps = st.sampled_from([WHOLE, WHOLE, WHOLE // 2, WHOLE // 3, 0])


def _ends_at(subset: list[tuple[Speed, int]], rows: int) -> float:
    """When a layer can end that these nodes share as well as can be, in real numbers."""
    if sum(cap for _, cap in subset) < WHOLE:
        return float("inf")
    low, high = 0.0, max(each.rtt_ns + each.row_ns * rows for each, _ in subset) * 2.0
    for _ in range(60):
        middle = (low + high) / 2
        done = sum(
            min(cap / WHOLE, max(0.0, middle - each.rtt_ns) / each.row_ns / rows) for each, cap in subset
        )
        low, high = (low, middle) if done >= 1 else (middle, high)
    return max(high, *(each.one_row_ns for each, _ in subset))


@given(
    st.lists(st.tuples(speeds, caps), min_size=1, max_size=5),
    st.integers(1, 40),
)
def test_shares_are_as_fast_as_the_best_subset(nodes: list[tuple[Speed, int]], rows: int) -> None:
    shares = shares_of([each for each, _ in nodes], [cap for _, cap in nodes], rows, 32)
    assert all(0 <= share <= cap for share, (_, cap) in zip(shares, nodes, strict=True))
    if sum(cap for _, cap in nodes) <= WHOLE:
        assert list(shares) == [cap for _, cap in nodes]
        return
    assert WHOLE - len(nodes) <= sum(shares) <= WHOLE
    subsets = chain.from_iterable(combinations(nodes, n) for n in range(1, len(nodes) + 1))
    best = min(_ends_at(list(each), rows) for each in subsets)
    used = [(i, share) for i, share in enumerate(shares) if share]
    assert layer_ns([each for each, _ in nodes], used, rows) <= best * 33 / 32 + 2


@given(st.lists(speeds, min_size=1, max_size=6), st.integers(1, 40), st.integers(0, 50_000))
def test_a_member_ten_times_slower_makes_no_layer_slower(fast: list[Speed], rows: int, rtt_ns: int) -> None:
    slow = Speed(rtt_ns, 10 * max(each.row_ns for each in fast))
    times = []
    for nodes in (fast, [*fast, slow]):
        shares = shares_of(nodes, [WHOLE] * len(nodes), rows, 32)
        times.append(layer_ns(nodes, [(i, share) for i, share in enumerate(shares) if share], rows))
    assert times[1] <= times[0] * 33 / 32 + 2


@pytest.mark.parametrize(
    "nodes, rows, n_used",
    [
        ([Speed(0, 100)] * 6, 8, 6),
        ([Speed(0, 100)] * 6 + [Speed(0, 1000)], 8, 6),
        ([Speed(0, 100)] * 6 + [Speed(0, 1000)], 4096, 7),
        ([Speed(100, 100), Speed(10_000, 100)], 8, 1),
        ([Speed(10_000, 100), Speed(10_000, 200)], 8, 2),
    ],
    ids=["equals", "slow_alone", "slow_beside_many_rows", "far", "far_all"],
)
def test_who_is_used(nodes: list[Speed], rows: int, n_used: int) -> None:
    shares = shares_of(nodes, [WHOLE] * len(nodes), rows, 32)
    assert sum(share > 0 for share in shares) == n_used


def test_memory_comes_before_speed() -> None:
    shares = shares_of([Speed(0, 100), Speed(0, 10_000)], [WHOLE // 2, WHOLE], 8, 32)
    assert shares[0] == WHOLE // 2
    assert WHOLE // 2 - 2 <= shares[1] <= WHOLE // 2
