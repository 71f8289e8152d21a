"""Whether this node's backbone engine keeps running, and what follows when it does not.

A backbone whose engine dies again and again serves nobody and keeps its lease all the same: its control
process renews it. So deaths are counted. `DEATHS_MAX` of them within `DEATHS_WITHIN` make a node unsteady: if
it is the backbone and another candidate lives it steps down, once, and from then on it stands behind all
others until its engine has not died for `STEADY_AFTER`. It still stands: a swarm whose only candidate is
unsteady has an unsteady backbone, and one whose prompts kill every engine does not pass them round for ever.
What an engine is, and how to start another one, is not known here.
"""

from __future__ import annotations

from typing import Final

from kvasir_proto.instants import Duration, Instant, after, between, seconds

DEATHS_MAX: Final = 3
DEATHS_WITHIN: Final[Duration] = seconds(600)
"""Three within ten minutes: long enough that a trunk which takes minutes to load can die as often."""
STEADY_AFTER: Final[Duration] = seconds(600)
"""So long after its last death an engine is taken for well again."""


class Steadiness:
    """The deaths of one node's backbone engine that still count."""

    def __init__(self) -> None:
        self._deaths: list[Instant] = []
        self._last_reason = ""
        self.is_steady = True

    def note_death(self, reason: str, now: Instant) -> bool:
        """The engine has ended. Says whether that made the node unsteady."""
        self._deaths = [each for each in self._deaths if between(each, now) < DEATHS_WITHIN]
        self._deaths = [*self._deaths, now][-DEATHS_MAX:]
        self._last_reason = reason
        if not self.is_steady or len(self._deaths) < DEATHS_MAX:
            return False
        self.is_steady = False
        return True

    def tick(self, now: Instant) -> bool:
        """Says whether the engine has now been well for long enough."""
        due = self.next_deadline()
        if due is None or now < due:
            return False
        self._deaths, self.is_steady = [], True
        return True

    def next_deadline(self) -> Instant | None:
        """When an unsteady node is steady again if nothing more happens; None for a steady one."""
        return None if self.is_steady else after(self._deaths[-1], STEADY_AFTER)

    @property
    def reason(self) -> str:
        """In words, for an unsteady node; empty for a steady one."""
        if self.is_steady:
            return ""
        return (
            f"its backbone engine died {DEATHS_MAX} times within {DEATHS_WITHIN // seconds(60)} min: it "
            f"stands behind all other candidates until none has died for {STEADY_AFTER // seconds(60)} min "
            f"(the last time: {self._last_reason})"
        )
