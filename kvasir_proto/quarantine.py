"""Whom this node, as backbone, plans without: who is in quarantine, why, and until when.

A table apart from placement, which sees only that such a node is as good as gone, and apart from whoever
found the fault, which only says it. It is this node's opinion alone: nobody else hears of it, it moves no
vote, and it is forgotten with the process. It reads no clock.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Instant

QUARANTINED_MAX: Final = 1024
"""Nodes in quarantine at one time; beyond, the one whose time is over soonest is let go."""


class Quarantined(NamedTuple):
    """A node that gets no experts until then, and why."""

    node_id: NodeId
    until: Instant
    reason: str


class QuarantineTable:
    """Nodes by id, `QUARANTINED_MAX` at most."""

    def __init__(self) -> None:
        self._rows: dict[NodeId, Quarantined] = {}

    def __contains__(self, node_id: NodeId) -> bool:
        return node_id in self._rows

    def add(self, quarantined: Quarantined) -> None:
        """Put a node there. One that is there already stays for the longer of both times."""
        before = self._rows.get(quarantined.node_id)
        if before is not None and before.until > quarantined.until:
            return
        self._rows[quarantined.node_id] = quarantined
        while len(self._rows) > QUARANTINED_MAX:
            del self._rows[min(self._rows.values(), key=lambda each: (each.until, each.node_id)).node_id]

    def let_go(self, now: Instant) -> bool:
        """Forget those whose time is over; whether there were any."""
        over = [each.node_id for each in self._rows.values() if each.until <= now]
        for node_id in over:
            del self._rows[node_id]
        return bool(over)

    def next_end(self) -> Instant | None:
        """When `let_go` has something to do next."""
        return min(each.until for each in self._rows.values()) if self._rows else None

    def rows(self) -> tuple[Quarantined, ...]:
        """All of them, in order of their ids."""
        return tuple(sorted(self._rows.values()))
