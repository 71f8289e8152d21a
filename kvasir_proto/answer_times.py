"""How much later than the others a holder really answers, whatever it says of its own speed.

A node measures its speed when it starts and says it in its record; a machine that grows hot, is given other
work, or lies, answers later than that. So the backbone's engine tells the mean time of each holder's small
answers, window by window, and here they are compared with one another: what troubles all alike, a busy
backbone or a slow network, troubles nobody's comparison. A holder is slow once the best of several windows in
a row is far behind the worst of the others', and counts as so much slower for a while; then it is tried
again, and the next time is longer. Placement sees the factor only. It is this node's opinion alone, forgotten
with the process, and it reads no clock.
"""

from __future__ import annotations

from statistics import median_low
from typing import Final, NamedTuple

from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, between, milliseconds, seconds

WINDOWS: Final = 3
"""Windows in a row by which a holder is judged. An engine closes one every ten seconds or more."""
SLOWER_BY_MIN: Final = 3
"""So many times the others', its best window beside their worst. On a busy machine equals differ by less."""
LATER_BY_MIN: Final[Duration] = milliseconds(1)
"""And so much later: a layer that waits for less than that waits for nobody."""
WINDOW_CURRENT: Final[Duration] = seconds(60)
"""A window is compared with those of others that are no older than this."""
SLOW_FOR: Final[Duration] = seconds(600)
"""How long a slow holder counts as slow the first time; twice as long each time after that ..."""
SLOW_FOR_MAX: Final[Duration] = seconds(86_400)
"""... up to a day. Not being slow for so long forgets how often it was."""
HOLDERS_MAX: Final = 1024
"""Holders whose times are kept; beyond, the one heard of longest ago is forgotten."""


class SlowHolder(NamedTuple):
    """A holder that answers `times` as late as the others, and until when it counts as that slow."""

    node_id: NodeId
    times: int
    until: Instant


class _Window(NamedTuple):
    mean: Duration
    closed: Instant


class _Row:
    __slots__ = ("n_times_slow", "slow", "well_since", "windows")

    def __init__(self) -> None:
        self.windows: list[_Window] = []
        self.slow: SlowHolder | None = None
        self.n_times_slow = 0
        self.well_since: Instant | None = None
        """When it was last given another chance."""


class AnswerTimes:
    """The holders' newest windows and who is slow by them; `HOLDERS_MAX` at most."""

    def __init__(self) -> None:
        self._rows: dict[NodeId, _Row] = {}

    def note(self, node_id: NodeId, mean: Duration, now: Instant) -> SlowHolder | None:
        """Take one window in. Returns what the holder is now if this window made it slow, else None."""
        row = self._rows.pop(node_id, None) or _Row()
        self._rows[node_id] = row
        while len(self._rows) > HOLDERS_MAX:
            del self._rows[next(iter(self._rows))]
        row.windows = [*row.windows, _Window(mean, now)][-WINDOWS:]
        others = [
            max(window.mean for window in each.windows)
            for other, each in self._rows.items()
            if other != node_id
            and each.slow is None
            and each.windows
            and between(each.windows[-1].closed, now) <= WINDOW_CURRENT
        ]
        if row.slow is not None or len(row.windows) < WINDOWS or not others:
            return None
        usual = max(1, median_low(others))
        best = min(each.mean for each in row.windows)
        if best < SLOWER_BY_MIN * usual or best - usual < LATER_BY_MIN:
            return None
        if row.well_since is not None and between(row.well_since, now) > SLOW_FOR_MAX:
            row.n_times_slow = 0
        lasts = min(SLOW_FOR << row.n_times_slow, SLOW_FOR_MAX)
        row.n_times_slow = min(row.n_times_slow + 1, SLOW_FOR_MAX.bit_length())
        row.slow = SlowHolder(node_id, best // usual, after(now, Duration(lasts)))
        return row.slow

    def times(self, node_id: NodeId) -> int:
        """How many times as late as others this node answers; 1 for one that is not slow."""
        row = self._rows.get(node_id)
        return row.slow.times if row is not None and row.slow is not None else 1

    def let_go(self, now: Instant) -> bool:
        """Give those whose time is over another chance; whether there were any."""
        over = [row for row in self._rows.values() if row.slow is not None and row.slow.until <= now]
        for row in over:
            row.slow, row.windows, row.well_since = None, [], now
        return bool(over)

    def next_end(self) -> Instant | None:
        """When `let_go` has something to do next."""
        return min((row.slow.until for row in self._rows.values() if row.slow is not None), default=None)

    def rows(self) -> tuple[SlowHolder, ...]:
        """Those that are slow, in order of their ids."""
        return tuple(sorted(row.slow for row in self._rows.values() if row.slow is not None))
