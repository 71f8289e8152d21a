"""When the deaths of an engine make its node unsteady, and when it is steady again."""

from __future__ import annotations

import pytest

from kvasir_proto.instants import Instant, after, seconds
from kvasir_proto.steadiness import DEATHS_MAX, DEATHS_WITHIN, STEADY_AFTER, Steadiness


def at(second: float) -> Instant:
    return Instant(1_000_000_000_000 + int(second * 1e9))


@pytest.mark.parametrize(
    "deaths_s, becomes_unsteady",
    [
        ([], []),
        ([0, 1], [False, False]),
        ([0, 1, 2], [False, False, True]),
        ([0, 1, 2, 3, 4], [False, False, True, False, False]),
        ([0, 1, 600], [False, False, False]),
        ([0, 1, 599.999], [False, False, True]),
        ([0, 500, 700, 1000], [False, False, False, True]),
    ],
)
def test_three_deaths_within_ten_minutes_make_a_node_unsteady_once(
    deaths_s: list[float], becomes_unsteady: list[bool]
) -> None:
    assert (3, seconds(600), seconds(600)) == (DEATHS_MAX, DEATHS_WITHIN, STEADY_AFTER)
    steadiness = Steadiness()
    assert [steadiness.note_death("killed", at(each)) for each in deaths_s] == becomes_unsteady
    assert steadiness.is_steady is not any(becomes_unsteady)
    assert bool(steadiness.reason) is any(becomes_unsteady)


def test_it_is_steady_again_ten_minutes_after_the_last_death_and_counts_anew() -> None:
    steadiness = Steadiness()
    assert steadiness.next_deadline() is None
    for second in (0, 1, 2, 100):
        steadiness.note_death(f"death at {second}", at(second))
    assert "death at 100" in steadiness.reason
    due = steadiness.next_deadline()
    assert due == after(at(100), STEADY_AFTER)
    told = [(steadiness.tick(when), steadiness.is_steady) for when in (Instant(due - 1), due)]
    assert told == [(False, False), (True, True)]
    assert steadiness.next_deadline() is None
    assert not steadiness.tick(due)
    assert not steadiness.note_death("killed", due), "old deaths are forgotten"
