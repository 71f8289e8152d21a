"""How long a layer takes, and from that which places to use and how much of a layer each should be asked for.

A layer waits for its slowest holder: t = max over holders of (RTT + rows x time of a row), and nobody is
asked for less than one row. So a place is worth using only if its one row is back before the others are done.
Places in the order of their one-row time: the more of them, the later the last one's single row and the
sooner the rest of the work is done; the best number of places is where the two meet. There the level T is
known, and a place's share is what it can do until T. docs/explanation/placement.md argues it at length.
Integers throughout, so that every node reckons alike. It knows no experts, only speeds and room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvasir_proto.placement.inventory import Speed

WHOLE: Final = 1 << 20
"""One layer's traffic; shares are parts of it."""


def shares_of(
    speeds: Sequence[Speed], caps: Sequence[int], rows: int, slower_by_at_most: int
) -> tuple[int, ...]:
    """Each place's share of a layer's traffic, in parts of `WHOLE`; 0 where a place is better left out.

    `caps` is the largest share that a place has memory for. Where all caps together are less than `WHOLE`,
    each place's share is its cap: covering comes before speed. Otherwise they add up to `WHOLE`, or, by
    rounding, to a little less.
    """
    if sum(caps) <= WHOLE:
        return tuple(caps)
    order = sorted(
        (index for index in range(len(speeds)) if caps[index]), key=lambda i: (speeds[i].one_row_ns, i)
    )
    level = _Level([speeds[i] for i in order], [caps[i] for i in order], rows)
    n_used = level.n_best(slower_by_at_most)
    ends_at = max(level.speeds[n_used - 1].one_row_ns, level.filled_at(n_used) or 0)
    able = level.able_by(ends_at, n_used)
    in_all = sum(able)
    shares = [0] * len(speeds)
    for index, part in zip(order, able, strict=False):
        shares[index] = part * WHOLE // in_all
    return tuple(shares)


def layer_ns(speeds: Sequence[Speed], shares: Iterable[tuple[int, int]], rows: int) -> int:
    """How long one layer takes whose traffic is split so: (place, part of `WHOLE`), parts above 0 only."""
    return max((busy_ns(speeds[place], part, rows) for place, part in shares), default=0)


def busy_ns(speed: Speed, part: int, rows: int) -> int:
    """When a place that is asked for this part of a layer has answered."""
    return speed.rtt_ns + max(speed.row_ns, rows * part * speed.row_ns // WHOLE)


class _Level:
    """Water is poured over the first places of an order until they hold it all; its level is a time."""

    def __init__(self, speeds: Sequence[Speed], caps: Sequence[int], rows: int) -> None:
        self.speeds = speeds
        self.caps = caps
        self.rows = rows
        self._filled: dict[int, int | None] = {}

    def able_by(self, time_ns: int, n: int) -> list[int]:
        """What each of the first `n` places can have done by then, in parts of `WHOLE`, within its cap."""
        return [
            min(cap, max(0, time_ns - speed.rtt_ns) * WHOLE // (speed.row_ns * self.rows))
            for speed, cap in zip(self.speeds[:n], self.caps[:n], strict=True)
        ]

    def filled_at(self, n: int) -> int | None:
        """The first moment at which the first `n` places can have done everything; None if they never can."""
        if n not in self._filled:
            self._filled[n] = self._search(n)
        return self._filled[n]

    def _search(self, n: int) -> int | None:
        if sum(self.caps[:n]) < WHOLE:
            return None
        early, late = 0, max(each.rtt_ns + each.row_ns * self.rows for each in self.speeds[:n])
        while early < late:
            middle = (early + late) // 2
            if sum(self.able_by(middle, n)) >= WHOLE:
                late = middle
            else:
                early = middle + 1
        return early

    def n_best(self, slower_by_at_most: int) -> int:
        """How many of the first places to use: where the layer ends soonest, and all that hardly delay it."""
        last = len(self.speeds)
        low, high = 1, last
        while low < high:
            middle = (low + high) // 2
            filled = self.filled_at(middle)
            if filled is not None and self.speeds[middle - 1].one_row_ns >= filled:
                high = middle
            else:
                low = middle + 1
        best = min(self._ends_at(n) for n in (max(1, low - 1), low) if self.filled_at(n) is not None)
        bar = best + best // slower_by_at_most
        n_used = low
        if self.speeds[low - 1].one_row_ns > bar:
            n_used = low - 1
        while n_used < last and self.speeds[n_used].one_row_ns <= bar:
            n_used += 1
        return n_used

    def _ends_at(self, n: int) -> int:
        return max(self.speeds[n - 1].one_row_ns, self.filled_at(n) or 0)
