"""Why two backends differ: for each reason one small example that is run wherever a report is made.

Decides which reasons are told apart, and shows each alone, in numpy, on one product of rows with weights of
production width. The figures of a report are those of the machine it was made on, and the code that made them
stands beside them. Apart from the levels, which measure that backends differ and not why. It judges nothing.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_node.kernels.accumulators import BF16, F16, F32, Accumulator
from kvasir_node.kernels.activation_formats import as_f16, as_q8_0, as_q8_k
from kvasir_node.measure.operations import figures_of

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
Figures = tuple[tuple[str, float], ...]

WIDTH: Final = 3072
_ROWS: Final = 16
_OUT: Final = 32
_SEED: Final = 5


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason, what was measured of it here, and the code that did."""

    name: str
    explanation: str
    figures: Figures
    code: str


def rows_and_weights() -> tuple[Float32Array, Float32Array]:
    """Rows [16, 3072] and weights [32, 3072] whose products have a size of one."""
    draws = np.random.default_rng(_SEED)
    rows = draws.standard_normal((_ROWS, WIDTH)).astype(np.float32)
    weights = (draws.standard_normal((_OUT, WIDTH)) / math.sqrt(WIDTH)).astype(np.float32)
    return rows, weights


def distance(found: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    """Relative L2."""
    return figures_of(found, expected)[2]


def reduction_order() -> Figures:
    """The same F32 products, added up in four orders."""
    rows, weights = rows_and_weights()
    exact = rows.astype(np.float64) @ weights.T.astype(np.float64)
    products = rows[:, None, :] * weights[None, :, :]
    one_by_one = np.add.accumulate(products, axis=2)[:, :, -1]
    lanes = np.add.accumulate(products.reshape(_ROWS, _OUT, -1, 16), axis=2)[:, :, -1]
    in_lanes = np.add.accumulate(lanes, axis=2)[:, :, -1]
    backwards = np.add.accumulate(products[:, :, ::-1], axis=2)[:, :, -1]
    return (
        ("one by one", distance(one_by_one, exact)),
        ("in 16 lanes", distance(in_lanes, exact)),
        ("as a tree (numpy)", distance(products.sum(axis=2), exact)),
        ("forwards beside backwards", distance(backwards, one_by_one)),
    )


def fused_multiply_add() -> Figures:
    """A product that is rounded before it is added, and one that is not."""
    rows, weights = rows_and_weights()
    exact = rows.astype(np.float64) @ weights.T.astype(np.float64)
    apart = np.zeros((_ROWS, _OUT), np.float32)
    fused = np.zeros((_ROWS, _OUT), np.float32)
    for column in range(WIDTH):
        row, weight = rows[:, column, None], weights[None, :, column]
        apart += row * weight
        product = row.astype(np.float64) * weight.astype(np.float64)  # exact: 48 bits
        fused = (fused.astype(np.float64) + product).astype(np.float32)
    return (
        ("rounded, then added", distance(apart, exact)),
        ("fused", distance(fused, exact)),
        ("one beside the other", distance(fused, apart)),
    )


def accumulation() -> Figures:
    """What sums are kept in. A cosine does not show it."""
    rows, weights = rows_and_weights()
    exact = rows.astype(np.float64) @ weights.T.astype(np.float64)
    halves = Accumulator(F16, lanes=16).add_up(rows, weights)
    figures = [
        ("F32, 16 lanes", distance(Accumulator(F32, lanes=16).add_up(rows, weights), exact)),
        ("F16, 16 lanes", distance(halves, exact)),
        (
            "F16 in blocks of 256, F32 across",
            distance(Accumulator(F16, 16, block=256).add_up(rows, weights), exact),
        ),
        ("BF16, 16 lanes", distance(Accumulator(BF16, lanes=16).add_up(rows, weights), exact)),
        ("F16: one less the cosine", 1 - figures_of(halves, exact)[4]),
    ]
    return tuple(figures)


def transcendental_functions() -> Figures:
    """The gate of an expert, x / (1 + exp(-x)), with three exponentials."""
    x = np.linspace(-12, 12, 20001, dtype=np.float32)
    exact = x / (1 + np.exp(-x.astype(np.float64)))
    library = x / (1 + np.exp(-x))
    powers = x / (1 + np.exp2(-x * np.float32(1.4426950408889634)))
    table_x = as_f16(x).astype(np.float32)
    table = as_f16((table_x / (1 + np.exp(-table_x))).astype(np.float32))
    different = np.count_nonzero(library != powers) / len(x)
    return (
        ("the library's exp in F32", distance(library, exact)),
        ("as a power of two in F32", distance(powers, exact)),
        ("out of a table of F16 numbers", distance(table, exact)),
        ("share of values that differ in F32", different),
    )


def dequantisation_path() -> Figures:
    """Weights and rows of eight bits: expanded first, or multiplied as they are."""
    rows, weights = rows_and_weights()
    held = as_q8_0(weights)
    exact = rows.astype(np.float64) @ held.T
    return (
        ("expanded to F32, rows as they are", distance(rows @ held.T.astype(np.float32), exact)),
        (
            "expanded to F16, rows as they are",
            distance(as_f16(rows) @ as_f16(held.astype(np.float32)).T, exact),
        ),
        ("rows rounded to Q8_0", distance(as_q8_0(rows) @ held.T, exact)),
        ("rows rounded to Q8_K", distance(as_q8_k(rows) @ held.T, exact)),
        ("Q8_0 rows beside Q8_K rows", distance(as_q8_k(rows) @ held.T, as_q8_0(rows) @ held.T)),
    )


def flips() -> Figures:
    """One last bit of a hidden value, and what rounding to eight bits makes of it."""
    draws = np.random.default_rng(_SEED)
    hidden = draws.standard_normal((256, 1024)).astype(np.float32)
    nudged = np.where(draws.random(hidden.shape) < 0.5, np.nextafter(hidden, np.float32(9)), hidden)
    rounded, nudged_rounded = as_q8_0(hidden), as_q8_0(nudged)
    flipped = (np.abs(rounded - nudged_rounded) > np.abs(rounded) * 1e-3).any(axis=1)
    return (
        ("before rounding", distance(nudged, hidden)),
        ("after rounding to Q8_0", distance(nudged_rounded, rounded)),
        ("share of rows with a flip", float(flipped.mean())),
    )


def nondeterminism() -> Figures:
    """Blocks added in whatever order they are ready, and a row whose batch decides how it is added up."""
    rows, weights = rows_and_weights()
    draws = np.random.default_rng(_SEED)
    blocks = (rows[:, None, :] * weights[None, :, :]).reshape(_ROWS, _OUT, 48, 64).sum(axis=3)
    results = [np.add.accumulate(blocks[:, :, draws.permutation(48)], axis=2)[:, :, -1] for _ in range(16)]
    alone = np.concatenate([row[None] @ weights.T for row in rows])
    together = rows @ weights.T
    return (
        ("different results in 16 runs", float(len({each.tobytes() for each in results}))),
        ("two of the runs", distance(results[1], results[0])),
        ("numpy: a row alone beside the same row in a batch", distance(together, alone)),
    )


_EXAMPLES: Final[tuple[tuple[str, Callable[[], Figures]], ...]] = (
    ("Reduction order", reduction_order),
    ("Fused multiply-add", fused_multiply_add),
    ("Accumulation", accumulation),
    ("Transcendental functions", transcendental_functions),
    ("Dequantisation path", dequantisation_path),
    ("Flips", flips),
    ("Nondeterminism", nondeterminism),
)

_EXPLANATIONS: Final = {
    "Reduction order": """
        Adding in F32 rounds after every step, so the order decides the last bits. No order is the
        right one.""",
    "Fused multiply-add": """
        One instruction rounds once where two round twice. Compilers choose, and so do instruction
        sets.""",
    "Accumulation": """
        A sum that is kept in F16 or BF16 loses what comes late. It is thousands of times what an
        order does, and still a cosine of 0.99999.""",
    "Transcendental functions": """
        An exponential has no cheap exact result to be rounded to, so every library has its own
        last bit, and some have tables.""",
    "Dequantisation path": """
        The largest of all: some backends round the rows to eight bits before they multiply, in
        blocks of 32 or of 256, and some do not. It explains published cosines between 0.9998 and
        0.9999.""",
    "Flips": """
        Where rows are rounded on the way, a last bit decides which way a value falls that lies
        between two steps, and a step is hundreds of thousands of last bits.""",
    "Nondeterminism": """
        Where blocks are added as they become ready, one machine differs from itself. Where the
        batch decides the order, a row depends on its neighbours.""",
}


def measure_causes() -> tuple[Cause, ...]:
    """Run every example; a second or two in all."""
    return tuple(
        Cause(name, " ".join(_EXPLANATIONS[name].split()), example(), inspect.getsource(example))
        for name, example in _EXAMPLES
    )
