"""Self-doubt: a node that misses answers suspects its own machine before it accuses others.

After Lifeguard's local health: a small score that rises with what points at ourselves (probes where not even
the helpers answer, having been suspected, having been paused) and falls with each probe that goes well. It
stretches this node's own time-outs and nothing else, and nobody else hears of it.
"""

from __future__ import annotations

from kvasir_proto.instants import Duration


class Health:
    """A score from 0 (well) to `score_max`."""

    def __init__(self, score_max: int) -> None:
        self._score_max = score_max
        self.score = 0

    def worsen(self, by: int = 1) -> None:
        """Something points at ourselves."""
        self.score = min(self._score_max, self.score + by)

    def improve(self) -> None:
        """A probe went well."""
        self.score = max(0, self.score - 1)

    def stretch(self, timeout: Duration) -> Duration:
        """The time-out as long as our doubt in ourselves makes it."""
        return Duration(timeout * (self.score + 1))
