"""Who answers later than the others: only what several windows say of one node, and not for ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvasir_proto.answer_times import (
    HOLDERS_MAX,
    SLOW_FOR,
    SLOW_FOR_MAX,
    WINDOW_CURRENT,
    AnswerTimes,
    SlowHolder,
)
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Duration, Instant, after, seconds

FIRST, SECOND, THIRD = (node_id_of(bytes([number]) * 32) for number in (1, 2, 3))
MICROSECOND = 1_000
EVERY = seconds(10)


def fed(rounds: Sequence[dict[NodeId, int]], times: AnswerTimes | None = None, start: int = 0) -> AnswerTimes:
    """One window of each node every ten seconds, in microseconds."""
    times = times if times is not None else AnswerTimes()
    for number, each in enumerate(rounds):
        for node_id, mean in sorted(each.items()):
            times.note(node_id, Duration(mean * MICROSECOND), Instant(start + (number + 1) * EVERY))
    return times


@pytest.mark.parametrize(
    "rounds, slow",
    [
        ([{FIRST: 9_000, SECOND: 800, THIRD: 1_000}] * 3, {FIRST: 11}),
        ([{FIRST: 9_000, SECOND: 800, THIRD: 1_000}] * 2, {}),  # too few windows
        ([{FIRST: 9_000, SECOND: 8_000, THIRD: 8_500}] * 9, {}),  # all alike
        ([{FIRST: 2_300, SECOND: 800, THIRD: 1_000}] * 9, {}),  # busy machines differ so much
        ([{FIRST: 9_000, SECOND: 800}, {FIRST: 9_000, SECOND: 4_000}, {FIRST: 9_000, SECOND: 800}], {}),
        ([{FIRST: 900, SECOND: 80, THIRD: 100}] * 9, {}),  # nobody waits long for it
        ([{FIRST: 9_000}] * 9, {}),  # nobody to compare it with
        ([{FIRST: 9_000, SECOND: 800}] * 3, {FIRST: 11}),
        ([{FIRST: 9_000, SECOND: 800}, {FIRST: 900, SECOND: 800}] * 5, {}),  # never three in a row
        ([{FIRST: 9_000, SECOND: 800}, {FIRST: 5_000, SECOND: 800}, {FIRST: 9_000, SECOND: 800}], {FIRST: 6}),
    ],
)
def test_slow_is_who_answers_late_in_several_windows(
    rounds: Sequence[dict[NodeId, int]], slow: dict[NodeId, int]
) -> None:
    times = fed(rounds)
    assert {each.node_id: each.times for each in times.rows()} == slow
    assert all(times.times(each) == slow.get(each, 1) for each in (FIRST, SECOND, THIRD))


def test_windows_of_long_ago_are_no_comparison() -> None:
    times = fed([{SECOND: 800}])
    late = fed([{FIRST: 9_000}] * 9, times, start=2 * WINDOW_CURRENT)
    assert late.rows() == ()


def test_a_slow_one_is_tried_again_and_then_waits_longer_and_a_good_day_forgets_it() -> None:
    slow_round = {FIRST: 9_000, SECOND: 800}
    times = fed([slow_round] * 3)
    now = Instant(3 * EVERY)
    for doubled in (1, 2, 4):
        until = after(now, Duration(SLOW_FOR * doubled))
        assert times.rows() == (SlowHolder(FIRST, 11, until),)
        assert times.next_end() == until
        assert not times.let_go(Instant(until - 1))
        assert times.let_go(until)
        assert (times.rows(), times.next_end(), times.times(FIRST)) == ((), None, 1)
        fed([slow_round] * 3, times, start=until)
        now = Instant(until + 3 * EVERY)
    end = times.next_end()
    assert end is not None
    times.let_go(end)
    later = Instant(end + SLOW_FOR_MAX)
    fed([slow_round] * 3, times, start=later)
    assert times.next_end() == later + 3 * EVERY + SLOW_FOR


def test_it_never_waits_longer_than_a_day() -> None:
    times, now, lasted = AnswerTimes(), Instant(0), []
    for _ in range(40):
        fed([{FIRST: 9_000, SECOND: 800}] * 3, times, start=now)
        (slow,) = times.rows()
        lasted.append(slow.until - now - 3 * EVERY)
        now = slow.until
        times.let_go(now)
    assert (lasted[0], lasted[-1], max(lasted)) == (SLOW_FOR, SLOW_FOR_MAX, SLOW_FOR_MAX)


def test_the_table_is_bounded() -> None:
    times = AnswerTimes()
    for number in range(HOLDERS_MAX + 5):
        times.note(node_id_of(number.to_bytes(32, "big")), Duration(1), Instant(number))
    assert len(times._rows) == HOLDERS_MAX
