"""Whom an auditor challenges next, and when again: one node at a time, with patience.

A challenge costs both sides up to a second of computing, so they never overlap, are spread over time, and are
not repeated before they have to be. A node that could not be challenged is tried again after longer and
longer; one that was found unfit not before it has another certificate. Apart from the book of verdicts,
which only says who needs one. It reads no clock and refuses to know rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, milliseconds, seconds

if TYPE_CHECKING:
    from random import Random

SPACING: Final[Duration] = milliseconds(500)
"""Between the end of one challenge and the next."""
SPREAD: Final[Duration] = seconds(2)
"""Auditors that see the same node at the same time wait for so long at most, each another while."""
CHALLENGE_TIMEOUT: Final[Duration] = seconds(120)
"""After which whoever was to challenge is taken to have forgotten it."""
RETRY_FIRST: Final[Duration] = seconds(5)
RETRY_MAX: Final[Duration] = seconds(3600)
"""A node that could not be challenged is tried again after 5, 10, 20 and so on to 3,600 seconds."""
PATIENCES_MAX: Final = 4096
"""Nodes whose failures are remembered; the one that is tried again soonest is forgotten first."""


@dataclass(slots=True)
class _Patience:
    """How often in a row a node could not be challenged, and when it is tried again."""

    failures: int
    until: Instant


class Challenges:
    """See the module."""

    def __init__(self, entropy: Random) -> None:
        self._entropy = entropy
        self._patience: dict[NodeId, _Patience] = {}
        self._waiting: dict[NodeId, Instant] = {}
        """Nodes that need a challenge, and when that is due."""
        self._current: tuple[NodeId, Instant] | None = None
        self._free_at = Instant(0)

    @property
    def current(self) -> NodeId | None:
        """The node that is being challenged."""
        return self._current[0] if self._current is not None else None

    def need(self, node_ids: Sequence[NodeId], now: Instant) -> None:
        """These need a challenge now, and nobody else. Who could not be challenged still needs one."""
        wanted = frozenset(node_ids)
        for gone in [each for each in self._waiting if each not in wanted]:
            del self._waiting[gone]
        for each in node_ids:
            if each not in self._waiting:
                spread = Duration(self._entropy.randrange(SPREAD))
                patience = self._patience.get(each)
                due = after(now, spread)
                self._waiting[each] = due if patience is None else max(due, patience.until)

    def next_due(self, now: Instant) -> NodeId | None:
        """The node to challenge now, which is then being challenged; None if there is none."""
        if self._current is not None and self._current[1] <= now:
            self.note_failed(self._current[0], now)
        if self._current is not None or now < self._free_at:
            return None
        due = [(at, node_id) for node_id, at in self._waiting.items() if at <= now]
        if not due:
            return None
        _, node_id = min(due)
        del self._waiting[node_id]
        self._current = (node_id, after(now, CHALLENGE_TIMEOUT))
        return node_id

    def note_done(self, node_id: NodeId, now: Instant) -> None:
        """It was challenged, whatever came of it."""
        self._patience.pop(node_id, None)
        self._end(node_id, now)

    def note_failed(self, node_id: NodeId, now: Instant) -> None:
        """It could not be challenged, or nothing can be said of what it answered."""
        before = self._patience.pop(node_id, None)
        failures = before.failures + 1 if before is not None else 1
        pause = min(RETRY_MAX, RETRY_FIRST << min(failures - 1, 16))
        until = after(now, Duration(pause))
        self._patience[node_id] = _Patience(failures, until)
        self._waiting[node_id] = until
        while len(self._patience) > PATIENCES_MAX:
            del self._patience[min(self._patience, key=lambda each: (self._patience[each].until, each))]
        self._end(node_id, now)

    def next_deadline(self) -> Instant | None:
        """When to call `next_due` next."""
        if self._current is not None:
            return self._current[1]
        if not self._waiting:
            return None
        return max(self._free_at, min(self._waiting.values()))

    def _end(self, node_id: NodeId, now: Instant) -> None:
        if self.current == node_id:
            self._current = None
            self._free_at = after(now, SPACING)
