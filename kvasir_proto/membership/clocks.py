"""Whose wall clock is wrong, from the offsets to a few members.

Nobody has the true time, so most decide: with at least three members measured, the median of their offsets is
how far our own clock is off, and a member far from that median has a wrong clock. With fewer, a large
difference is shown at the member and nobody is judged. It knows no messages; offsets are given to it.
"""

from __future__ import annotations

from typing import Final

from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration

OFFSETS_MAX: Final = 64
"""Members whose offset is kept; the one heard from longest ago goes first."""
_JUDGES: Final = 3


class Clocks:
    """Offsets of members' wall clocks to ours: positive if theirs is ahead."""

    def __init__(self, offset_max: Duration) -> None:
        self._offset_max = offset_max
        self._offsets: dict[NodeId, Duration] = {}

    def observe(self, node_id: NodeId, offset: Duration) -> None:
        """A member's offset was measured."""
        self._offsets.pop(node_id, None)
        if len(self._offsets) >= OFFSETS_MAX:
            del self._offsets[next(iter(self._offsets))]
        self._offsets[node_id] = offset

    def forget(self, node_id: NodeId) -> None:
        """The member is gone, and no judge any more."""
        self._offsets.pop(node_id, None)

    def own_offset(self) -> Duration | None:
        """How far everybody else's clock is ahead of ours, if it is too far; None if ours is right enough."""
        if len(self._offsets) < _JUDGES:
            return None
        median = self._median()
        return median if abs(median) > self._offset_max else None

    def wrong(self) -> frozenset[NodeId]:
        """The members whose clock is too far from most clocks, or from ours where most is nobody."""
        middle = self._median() if len(self._offsets) >= _JUDGES else Duration(0)
        if abs(middle) <= self._offset_max:
            middle = Duration(0)  # ours is right: be measured by it, which does not jump
        return frozenset(
            node_id for node_id, offset in self._offsets.items() if abs(offset - middle) > self._offset_max
        )

    def measured(self) -> tuple[NodeId, ...]:
        """The members whose offset is kept, sorted."""
        return tuple(sorted(self._offsets))

    def offset_of(self, node_id: NodeId) -> Duration | None:
        """What was last measured."""
        return self._offsets.get(node_id)

    def _median(self) -> Duration:
        """The middle one; of two in the middle the one nearer to ours, in doubt for us."""
        ordered = sorted(self._offsets.values())
        return min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)
