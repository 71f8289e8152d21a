"""Moments and durations add up in whole nanoseconds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.instants import Duration, Instant, after, between, in_seconds, milliseconds, seconds

moments = st.integers(0, 2**62).map(Instant)
durations = st.integers(-(2**62), 2**62).map(Duration)


@given(moments, durations)
def test_after_and_between_are_inverse(moment: Instant, duration: Duration) -> None:
    assert between(moment, after(moment, duration)) == duration


def test_units() -> None:
    assert milliseconds(1500) == 1_500_000_000
    assert seconds(2) == milliseconds(2000)
    assert in_seconds(milliseconds(1500)) == 1.5
