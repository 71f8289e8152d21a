"""What an audit saw of one row: how far it is from what the referee computed, and what explains that.

A referee computes the same row from the model's own bytes, in the arithmetic that the node claims. Values
only: who compared, and how flips were explained, is the shell's. What cannot be judged fails closed: a row
that is missing, short, constant or not finite is `foreign`, and one for which the referee itself has no good
answer says nothing of anybody, which also means that it clears nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvasir_proto.ids import NodeId

Outcome: TypeAlias = Literal["same", "flipped", "foreign", "void"]
"""Within the gate of a row; outside, and explained by rounded values that fell the other way; outside, and
not explained; nothing to be said."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One audited row of `node_id`.

    `request_digest` names the row that was asked, whoever was asked for it. `residual` is the relative L2
    between answer and referee, infinite where it has none, and `gate` the largest that two kernels may have
    where nothing flipped; `slope` is the factor of the one over the other. `flip_chance` is how often an
    honest kernel of this class may have a flip.
    """

    node_id: NodeId
    layer: int
    expert: int
    request_digest: bytes
    outcome: Outcome
    residual: float
    gate: float
    slope: float
    flip_chance: float

    @property
    def excess(self) -> float:
        """The residual in units of the gate, 1 at most: what one row can say of a drift."""
        if not math.isfinite(self.residual) or not self.gate > 0:
            return 1.0
        return min(1.0, self.residual / self.gate)


def outcome_of(
    residual: float, gate: float, *, is_referee_sound: bool, is_answer_whole: bool, is_explained: bool
) -> Outcome:
    """Name what a comparison has found.

    `is_answer_whole`: as many values as asked, all finite, not all alike where the referee's differ.
    `is_explained`: flips, each of which could have happened, account for all of the residual.
    """
    if not is_referee_sound or not gate > 0:
        return "void"
    if not is_answer_whole or not residual >= 0 or math.isinf(residual):
        return "foreign"
    if residual <= gate:
        return "same"
    return "flipped" if is_explained else "foreign"
