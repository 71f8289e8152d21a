"""Level "decision agreement": whether two runs' routers took the same experts, and how close it was.

Decides what counts as the same (the set, not its order), what a margin is (how far the last expert that was
taken is ahead of the first that was not, in the router's probabilities), and which tokens are borderline. It
refuses to know where the choices come from, and judges nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.traces import Traces
from kvasir_node.measure.intervals import Interval, share_interval
from kvasir_proto.errors import EngineFailed

Float64Array = npt.NDArray[np.float64]

BORDERLINE_MARGIN: Final = 1e-4
"""Probabilities closer than this: which expert is taken is decided by the last bits."""


@dataclass(frozen=True, slots=True)
class RouterAgreement:
    """One layer's router: `disagreeing` of `positions` took another set, `experts_changed` experts in all.

    `borderline` positions have a margin under 1e-4 in the base, `borderline_disagreeing` of them disagree;
    `largest_margin` is the widest over which a choice still fell the other way.
    """

    layer: int
    positions: int
    disagreeing: int
    experts_changed: int
    borderline: int
    borderline_disagreeing: int
    median_margin: float
    largest_margin: float


@dataclass(frozen=True, slots=True)
class DecisionComparison:
    """All routers. `tokens_disagreeing` are positions that took another set in any layer,
    `tokens_borderline` those that have a margin under 1e-4 in any layer of the base.
    """

    layers: tuple[RouterAgreement, ...]
    positions: int
    decisions: int
    decisions_disagreeing: int
    disagreement: float
    disagreement_95: Interval
    tokens_disagreeing: int
    tokens_borderline: int
    first_disagreement: int | None


def compare_choices(base: Traces, run: Traces) -> DecisionComparison:
    """Compare the experts that were taken. Raises `EngineFailed` when the shapes differ."""
    if base.moe_layers != run.moe_layers or base.experts.shape != run.experts.shape:
        raise EngineFailed("the choices of two different models or texts cannot be compared")
    n_positions = base.experts.shape[1]
    any_differs = np.zeros(n_positions, np.bool_)
    any_borderline = np.zeros(n_positions, np.bool_)
    layers = []
    for layer, router, ours, theirs in zip(
        base.moe_layers, base.router, base.experts, run.experts, strict=True
    ):
        changed = changed_experts(ours, theirs)
        margins = router_margins(router, ours.shape[1])
        differs, borderline = changed > 0, margins < BORDERLINE_MARGIN
        any_differs |= differs
        any_borderline |= borderline
        layers.append(
            RouterAgreement(
                layer=layer,
                positions=n_positions,
                disagreeing=int(differs.sum()),
                experts_changed=int(changed.sum()),
                borderline=int(borderline.sum()),
                borderline_disagreeing=int((borderline & differs).sum()),
                median_margin=float(np.median(margins)),
                largest_margin=float(margins[differs].max()) if differs.any() else 0.0,
            )
        )
    decisions = n_positions * len(layers)
    disagreeing = sum(each.disagreeing for each in layers)
    first = np.flatnonzero(any_differs)
    return DecisionComparison(
        layers=tuple(layers),
        positions=n_positions,
        decisions=decisions,
        decisions_disagreeing=disagreeing,
        disagreement=disagreeing / decisions if decisions else 0.0,
        disagreement_95=share_interval(disagreeing, decisions),
        tokens_disagreeing=int(any_differs.sum()),
        tokens_borderline=int(any_borderline.sum()),
        first_disagreement=int(first[0]) if len(first) else None,
    )


def changed_experts(ours: npt.NDArray[np.int32], theirs: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """How many of each position's experts the other did not take: both [positions, used]."""
    found = (ours[:, :, None] == theirs[:, None, :]).any(axis=2)
    changed: npt.NDArray[np.int64] = (~found).sum(axis=1)
    return changed


def router_margins(logits: npt.NDArray[np.float32], n_used: int) -> Float64Array:
    """How far the last of `n_used` experts is ahead of the next one, by softmax over all: [positions].

    `logits` is [positions, experts]; infinite where every expert is used.
    """
    if n_used >= logits.shape[1]:
        return np.full(len(logits), np.inf)
    wide = logits.astype(np.float64)
    shifted = np.exp(wide - wide.max(axis=1, keepdims=True))
    ordered = -np.sort(-shifted / shifted.sum(axis=1, keepdims=True), axis=1)
    margins: Float64Array = ordered[:, n_used - 1] - ordered[:, n_used]
    return margins
