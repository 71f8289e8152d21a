"""What follows for a node that was found out: fit for `bulk` only, or for nothing.

Short sums, such as F16 behind a claim of F32, are a matter of tolerance: they cost quality where it adds up,
and nothing elsewhere. Wrong weights, wrong factors and rows that are not finite are not. What tells them
apart is how far the foreign rows are off, and whether they are off in a direction: errors of sums have none.
A verdict is its maker's opinion of a node as it was certified then; only another certificate ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from kvasir_proto.audit.finding import Finding
from kvasir_proto.ids import NodeId
from kvasir_proto.limits import AuditVerdict

SHORT_SUMS_MAX: Final = 0.03
"""Relative L2 of the worst rows of short sums, with room: 0.013 was measured of F16 sums."""
_DIRECTION_MIN: Final = 0.5
"""Of the residual: a row that is a multiple of what it should be has all of it in the slope, noise a root of
its width."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an audit says of a node with these certificates, and why, in words. Of `n_rows` rows that were
    looked at `n_foreign` were explained by nothing.
    """

    node_id: NodeId
    word: AuditVerdict
    reason: str
    n_rows: int
    n_foreign: int
    certificate: bytes = b""


def word_of(foreign: Sequence[Finding]) -> AuditVerdict:
    """What some rows that nothing explains make of a node; all of none are a drift, which is short sums."""
    if any(not each.residual <= SHORT_SUMS_MAX for each in foreign):
        return "quarantined"
    directions = [abs(each.slope - 1) / each.residual for each in foreign if each.residual > 0]
    return "quarantined" if directions and median(directions) >= _DIRECTION_MIN else "unfit"


def is_wrong_for_short_sums(finding: Finding) -> bool:
    """Whether even a node that is known to add in less than F32 has no excuse for this row."""
    return finding.outcome == "foreign" and not finding.residual <= SHORT_SUMS_MAX
