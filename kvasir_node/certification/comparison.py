"""How far apart two kernels' rows are, and whether classes that should agree do.

Decides what is measured of two answers to the same rows: relative L2 over all of them, a regression beside
it, and, where rows are rounded on the way, whether what single rows differ by are hidden values that were
rounded the other way, and nothing else. Gates come from `kvasir_proto.tolerance`. Apart from certifying
because audits compare rows by the same rules. It refuses to know kernels and where rows come from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvasir_node.kernels.activation_formats import ACTIVATION_ROUNDINGS
from kvasir_proto.tolerance import POOLED_ROWS_MIN, flips_max, regression_gate, row_gate

Rows = npt.NDArray[Any]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

_BLOCKS: Final = {"Q8_0": 32, "Q8_K": 256}
_NEAR_A_STEP: Final = 1e-5
"""How far a block's step may be from the middle between two F16 numbers and still fall either way, relative
to it."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers to the same rows. `slope` and `bias` are those of the one over the other, the bias in units
    of the root mean square. `reason` says why it has not passed; without a gate nothing can pass.
    """

    n_rows: int
    rel_l2: float
    max_abs: float
    slope: float
    bias: float
    gate: float | None
    reason: str

    @property
    def passed(self) -> bool:
        """Whether they are equivalent by the gate."""
        return not self.reason


def compare(found: Rows, expected: Rows, gate: float | None) -> Comparison:
    """Judge `found` by `expected`, both [rows, width], pooled over all rows."""
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    with np.errstate(all="ignore"):
        difference = found - expected
        size = float(np.linalg.norm(expected))
        rms = size / math.sqrt(expected.size)
        rel_l2 = float(np.linalg.norm(difference)) / size if size else math.inf
        centred = expected - expected.mean()
        slope = float((centred * (found - found.mean())).sum() / (centred * centred).sum())
        bias = float(difference.mean() / rms)
        max_abs = float(np.abs(difference).max())
    finite = math.isfinite(rel_l2)
    rel_l2, slope, bias = (each if finite else math.inf for each in (rel_l2, slope, bias))
    reason = ""
    if not finite:
        reason = "some values are not finite"
    elif gate is None:
        reason = "there is no gate for these classes"
    elif len(found) < POOLED_ROWS_MIN:
        reason = f"{len(found)} rows are too few to be pooled"
    elif rel_l2 > gate:
        reason = f"relative L2 {rel_l2:.1e} is over the gate"
    elif abs(slope - 1) > regression_gate(gate):
        reason = f"values are {slope:.6f} times what they should be"
    elif abs(bias) > regression_gate(gate):
        reason = f"values are off by {bias:.1e} of their size"
    return Comparison(len(found), rel_l2, max_abs, slope, bias, gate, reason)


@dataclass(frozen=True, slots=True)
class FlipCount:
    """Of rows that are rounded on the way: how many agree, differ by flips, or differ by something else."""

    activation: str
    same: int
    flipped: int
    foreign: int
    n_ff: int

    @property
    def is_honest(self) -> bool:
        """Whether all that is found is what two kernels of one class may differ by."""
        n_row = self.same + self.flipped
        return not self.foreign and self.flipped <= flips_max(self.activation, n_row, self.n_ff)


def count_flips(
    found: Rows, expected: Rows, hidden: Float32Array, activation: str, down: Float64Array
) -> FlipCount:
    """Judge each row by itself: `found` and `expected` [rows, n_embd] of one expert.

    `hidden` [rows, n_ff] is what the reference had before the last product, `activation` ("F16", "BF16",
    "Q8_0" or "Q8_K") the format it is rounded to there, `down` [n_embd, n_ff] the last weight's numbers. A
    flip is accepted only of a value, or of a block's step, that was nearly between two, and only if flips
    explain all that differs.
    """
    n_embd, n_ff = down.shape
    gate = row_gate(n_embd, n_ff)
    same = flipped = foreign = 0
    for row, right, inner in zip(found.astype(np.float64), expected.astype(np.float64), hidden, strict=True):
        limit = gate * float(np.linalg.norm(right))
        residual = row - right
        if np.linalg.norm(residual) <= limit:
            same += 1
        elif is_of_flips(residual, limit, possible_flips(inner, activation, down)):
            flipped += 1
        else:
            foreign += 1
    return FlipCount(activation, same, flipped, foreign, n_ff)


def is_of_flips(residual: Float64Array, limit: float, directions: Float64Array) -> bool:
    """Whether a residual is, up to `limit`, a sum of flips that could have happened, each up or down."""
    if not np.isfinite(residual).all():
        return False
    factors = np.linalg.lstsq(directions, residual, rcond=None)[0]
    whole = np.clip(np.rint(factors), -1, 1)
    return bool(np.linalg.norm(residual - directions @ whole) <= limit)


def possible_flips(hidden: Float32Array, activation: str, down: Float64Array) -> Float64Array:
    """What each flip of a `hidden` row [n_ff] that could happen would add to the output, up to its sign:
    [n_embd, flips]. `activation` and `down` as in `count_flips`.
    """
    # Sums in another order move a value by so much of its own size, and where terms cancel of the others'.
    rms = math.sqrt(float(np.mean(hidden.astype(np.float64) ** 2)))
    errors = row_gate(*down.shape) * (np.abs(hidden) + rms)
    if activation in ("F16", "BF16"):
        bits = 11 if activation == "F16" else 8
        exponents = np.frexp(hidden.astype(np.float64))[1] - bits
        gaps = np.exp2(np.maximum(exponents, -24) if activation == "F16" else exponents)
        near = _is_near_a_tie(hidden / gaps, errors / gaps)
        return np.asarray(down[:, near] * gaps[near])
    width = _BLOCKS[activation]
    blocks = hidden.reshape(-1, width)
    steps, quants = _steps_of(blocks, activation)
    with np.errstate(all="ignore"):
        near = _is_near_a_tie(quants, errors.reshape(-1, width) / steps[:, None]).reshape(-1)
    flips: Float64Array = down[:, near] * np.repeat(steps, width)[near]
    if activation != "Q8_0":
        return flips
    # The step itself is kept as F16: it may fall the other way too, and then takes its whole block with it.
    exact = np.abs(blocks).max(axis=1).astype(np.float64) / 127
    gaps = np.spacing(steps.astype(np.float16)).astype(np.float64)
    is_near = np.abs(np.abs(exact - steps) - gaps / 2) < _NEAR_A_STEP * exact
    values = np.rint(quants) * gaps[:, None]
    moved = [
        (down[:, index * width : (index + 1) * width] @ values[index])[:, None]
        for index in np.flatnonzero(is_near).tolist()
    ]
    return np.concatenate([flips, *moved], axis=1)


def _is_near_a_tie(values: Float64Array, errors: Float64Array) -> npt.NDArray[np.bool_]:
    """Whether numbers are nearly between two whole ones, all in units of what they are rounded to."""
    return np.abs(values - np.floor(values) - 0.5) < errors


def _steps_of(blocks: Float32Array, activation: str) -> tuple[Float64Array, Float64Array]:
    """Each block's step as it is kept, and its values in steps before they are rounded, [blocks, width]."""
    largest = np.abs(blocks).max(axis=1, keepdims=True).astype(np.float64)
    inverse = np.divide(127.0, largest, out=np.zeros_like(largest), where=largest > 0)
    steps = largest[:, 0] / 127
    if activation == "Q8_0":
        steps = ACTIVATION_ROUNDINGS["f16"](steps.astype(np.float32))
    return steps, blocks.astype(np.float64) * inverse
