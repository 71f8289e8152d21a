"""Whether a node's rows come nearer and nearer to the gate: the alarm before a row is outside it.

A CUSUM of how much of the gate each row used, where nothing flipped: it grows by what is over `ALLOWED` and
never falls below nothing. For rows that use at most `HONEST_MEAN` of it on average, and none more than all,
the chance that it reaches `ALARM` within a lifetime is at most n exp(-theta ALARM), with theta the positive
root of 1 - m + m exp(theta) = exp(theta k). A machine that grows warm and adds with less and less care is
found by this; one that is wrong from one row to the next by `sequential`.
"""

from __future__ import annotations

import math
from typing import Final

from kvasir_proto.audit.finding import Finding
from kvasir_proto.audit.sequential import LIFETIME_ROWS

ERROR_MAX: Final = 2e-4
"""Chance that an honest node is ever called drifting within a lifetime."""
HONEST_MEAN: Final = 0.25
"""Of the gate: the most that an honest kernel's rows use on average. Recorded ones use a tenth and less."""
ALLOWED: Final = 0.5
_THETA: Final = 2.197
ALARM: Final = math.log(LIFETIME_ROWS / ERROR_MAX) / _THETA
"""9: 18 rows that use all of the gate, or 87 that use six tenths of it."""


class DriftAlarm:
    """One node's sum."""

    def __init__(self) -> None:
        self.level = 0.0

    @property
    def is_raised(self) -> bool:
        """Whether an honest node would hardly ever come to this."""
        return self.level >= ALARM

    def add(self, finding: Finding) -> None:
        """Take in one row. Where values flipped the residual is theirs, and where nothing is known there is
        none.
        """
        if finding.outcome in ("same", "foreign"):
            self.level = max(0.0, self.level + finding.excess - ALLOWED)
