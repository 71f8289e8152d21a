"""How much one node may ask of us in a moment: so many at once, and so many a second after that.

It reads no clock and forgets nobody: whoever keeps one for each node bounds how many it keeps.
"""

from __future__ import annotations


class TokenBucket:
    """Room for `burst` at once, refilled at `per_s`. Times are seconds on any clock that does not go back."""

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._room = burst
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take one. 0 when there was room; otherwise nothing is taken, and this is how long until there is.

        Never less than a millisecond: a shorter sleep may end at the very instant it began.
        """
        self._room = min(self._burst, self._room + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._room >= 1.0:
            self._room -= 1.0
            return 0.0
        return max(0.001, (1.0 - self._room) / self._per_s)
