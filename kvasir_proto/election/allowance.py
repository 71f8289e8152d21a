"""How many costly messages a sender may cause in a second: what floods costs the one who floods.

A bucket for each sender that fills with time. Electors have their own places, so that strangers, of whom
there may be any number under any names, share what is left and cannot push an elector out.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Instant, between, seconds

BURST: Final = 32
PER_SECOND: Final = 16
_STRANGERS: Final = ""
"""The one bucket that everybody shares who is no elector; four times as large."""


class Allowance:
    """Buckets by sender. At most one for each elector, and one for everybody else."""

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[int, Instant]] = {}

    def take(self, sender: NodeId, electors: Set[NodeId], now: Instant) -> bool:
        """Whether one more message of this sender may be worked on now."""
        name, factor = (str(sender), 1) if sender in electors else (_STRANGERS, 4)
        size = BURST * factor * seconds(1)
        level, since = self._buckets.get(name, (size, now))
        level = min(size, level + between(since, now) * PER_SECOND * factor)
        has_some = level >= seconds(1)
        self._buckets[name] = (level - seconds(1) if has_some else level, now)
        if len(self._buckets) > len(electors) + 1:
            self._buckets = {
                each: bucket
                for each, bucket in self._buckets.items()
                if each == _STRANGERS or each in electors
            }
        return has_some
