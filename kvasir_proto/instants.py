"""Time as whole nanoseconds, in three types that do not mix.

Timers use `Instant`; validity of signed records uses `WallTime`, because only that means something on another
machine; the difference of two of one kind is a `Duration`. Integers, because float seconds drift in the last
digit and make two drivers of one core disagree (STYLE B6). Nothing here reads a clock: the driver does.
"""

from __future__ import annotations

from typing import NewType, TypeVar

Instant = NewType("Instant", int)
"""Nanoseconds on this machine's clock that never goes back (`CLOCK_BOOTTIME`: it counts suspend)."""
WallTime = NewType("WallTime", int)
"""Nanoseconds since 1970-01-01 UTC, by a clock that may be wrong."""
Duration = NewType("Duration", int)
"""Nanoseconds between two moments of one clock; may be negative."""

_Moment = TypeVar("_Moment", Instant, WallTime)


def milliseconds(count: int) -> Duration:
    """A duration of this many milliseconds."""
    return Duration(count * 1_000_000)


def seconds(count: int) -> Duration:
    """A duration of this many whole seconds."""
    return Duration(count * 1_000_000_000)


def in_seconds(duration: Duration) -> float:
    """The duration as float seconds: for people and for `trio`, never to reckon with."""
    return duration / 1e9


def after(moment: _Moment, duration: Duration) -> _Moment:
    """The moment on the same clock that is `duration` later."""
    return moment + duration  # type: ignore[return-value]  # a call of `cast` costs as much as the sum


def sooner(one: Instant | None, other: Instant | None) -> Instant | None:
    """The earlier of two moments at which something is due; None stands for never."""
    if one is None:
        return other
    return one if other is None or one <= other else other


def between(earlier: _Moment, later: _Moment) -> Duration:
    """How long it is from `earlier` to `later` on their clock; negative if they are in the other order."""
    return Duration(later - earlier)
