"""A lease on clocks that disagree: what the backbone may use, what an elector has promised.

The backbone counts 0.9 of a lease from before it asked, the elector 1.1 of it from after it granted, each on
its own clock. So with clocks a tenth fast or slow, every elector of the quorum is still bound when the lease
ends. Refuses to know who may have a lease.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after


@dataclass(frozen=True, slots=True)
class Promise:
    """No vote and no pre-vote to anybody but `backbone` before `until`, on the elector's own clock."""

    epoch: int
    term: int
    backbone: NodeId
    until: Instant

    def binds_against(self, candidate: NodeId, now: Instant) -> bool:
        """Whether it forbids a vote for this candidate now."""
        return candidate != self.backbone and now < self.until


def promised_until(granted: Instant, lease: Duration) -> Instant:
    """How long an elector that granted at that instant is bound; also how long it waits after a restart."""
    return after(granted, Duration(-(-lease * 11 // 10)))


def usable_until(asked: Instant, lease: Duration) -> Instant:
    """How long a backbone that asked at that instant, and was answered by a quorum, may use its lease."""
    return after(asked, Duration(lease * 9 // 10))
