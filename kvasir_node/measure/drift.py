"""Level "layer-boundary drift": how the distance between two runs' hidden states grows from layer to layer.

Decides what is compared behind each layer, apart for tokens whose routers agreed so far: where an expert was
exchanged, the distance is no rounding any more. It fits both laws that are thought of, errors that add up as
the root of the layers and as the layers themselves, and says how well each fits. It refuses to know where
hidden states come from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.traces import Traces
from kvasir_proto.errors import EngineFailed

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerDrift:
    """Behind one layer: over all positions, and over those in which no router of it or before disagreed.

    `rms` is that of the base's hidden state. `undisturbed` of `positions` agree; their figure is None where
    there is none.
    """

    layer: int
    positions: int
    rms: float
    max_abs: float
    rel_l2: float
    cosine: float
    undisturbed: int
    undisturbed_rel_l2: float | None


@dataclass(frozen=True, slots=True)
class GrowthFit:
    """A law of growth, error = factor x (layers passed) ^ exponent, and what it leaves unexplained: the root
    mean square of log ratios, in factors of e.
    """

    exponent: float
    factor: float
    residual: float


@dataclass(frozen=True, slots=True)
class DriftComparison:
    """Every layer, and the laws: the best exponent, the root, and one to one. None without any drift."""

    layers: tuple[LayerDrift, ...]
    best: GrowthFit | None
    as_root: GrowthFit | None
    as_layers: GrowthFit | None


def compare_hidden(base: Traces, run: Traces) -> DriftComparison:
    """Compare hidden states layer by layer. Raises `EngineFailed` when the shapes differ."""
    if base.layers != run.layers or base.hidden.shape != run.hidden.shape:
        raise EngineFailed("the hidden states of two different models or texts cannot be compared")
    n_positions = base.hidden.shape[1]
    agreed = np.ones(n_positions, np.bool_)
    routers = dict(zip(base.moe_layers, zip(base.experts, run.experts, strict=True), strict=True))
    layers = []
    for index, layer in enumerate(base.layers):
        if layer in routers:
            ours, theirs = (np.sort(each, axis=1) for each in routers[layer])
            agreed &= (ours == theirs).all(axis=1)
        layers.append(_layer_drift(layer, base.hidden[index], run.hidden[index], agreed))
    errors = [each.undisturbed_rel_l2 or 0.0 for each in layers]
    return DriftComparison(
        tuple(layers), fit_growth(errors), fit_growth(errors, 0.5), fit_growth(errors, 1.0)
    )


def fit_growth(errors: Sequence[float], exponent: float | None = None) -> GrowthFit | None:
    """Fit a power of the number of layers passed, by least squares of logarithms; with ``exponent`` only the
    factor. None with fewer than two errors above zero.
    """
    passed = np.array([index + 1 for index, error in enumerate(errors) if error > 0], np.float64)
    if len(passed) < 2:
        return None
    x = np.log(passed)
    y = np.log(np.array([error for error in errors if error > 0]))
    if exponent is None:
        centred = x - x.mean()
        exponent = float((centred * y).sum() / (centred * centred).sum())
    factor = float(np.mean(y - exponent * x))
    residual = float(np.sqrt(np.mean((y - exponent * x - factor) ** 2)))
    return GrowthFit(exponent, math.exp(factor), residual)


def _layer_drift(
    layer: int,
    base: npt.NDArray[np.float32],
    run: npt.NDArray[np.float32],
    agreed: npt.NDArray[np.bool_],
) -> LayerDrift:
    a, b = base.astype(np.float64), run.astype(np.float64)
    size, other = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    difference = b - a
    kept = float(np.linalg.norm(a[agreed]))
    return LayerDrift(
        layer=layer,
        positions=len(a),
        rms=size / math.sqrt(a.size),
        max_abs=float(np.abs(difference).max()),
        rel_l2=float(np.linalg.norm(difference)) / size if size else 0.0,
        cosine=float((a * b).sum()) / (size * other) if size and other else 0.0,
        undisturbed=int(agreed.sum()),
        undisturbed_rel_l2=float(np.linalg.norm(difference[agreed])) / kept if kept else None,
    )
