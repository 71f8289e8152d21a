"""How sure a figure is: intervals at 95 % for shares, means, and anything a resampling can answer.

Decides which method belongs to what: Wilson's for a share, the normal approximation for a mean of independent
values, a bootstrap over blocks where neighbours are alike, as the positions of one text are. Apart from the
statistics because they say what a figure is, and this how much to believe it. It refuses to know logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

Z_95: Final = 1.959963984540054
RESAMPLES: Final = 1000
BLOCKS_MIN: Final = 8
_SEED: Final = 95


@dataclass(frozen=True, slots=True)
class Interval:
    """From `low` to `high`, with 95 %."""

    low: float
    high: float


def share_interval(count: int, total: int) -> Interval:
    """Of a share `count / total`, by Wilson's score; all of it where nothing was counted."""
    if total == 0:
        return Interval(0.0, 1.0)
    share, z = count / total, Z_95
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    low = 0.0 if count == 0 else max(0.0, middle - half)
    high = 1.0 if count == total else min(1.0, middle + half)
    return Interval(low, high)


def mean_error(values: Float64Array) -> float:
    """The standard error of a mean, as llama-perplexity prints it behind a plus-minus; 0 with one value."""
    n = len(values)
    return math.sqrt(float(np.var(values)) / (n - 1)) if n > 1 else 0.0


def mean_interval(values: Float64Array) -> Interval:
    """Of a mean of independent values, by the normal approximation."""
    mean, half = float(np.mean(values)), Z_95 * mean_error(values)
    return Interval(mean - half, mean + half)


def blocks_of(lengths: Sequence[int], block: int = 64) -> tuple[slice, ...]:
    """Neighbouring positions that go together in a resampling: windows of these lengths, cut where they are
    fewer than `BLOCKS_MIN`.
    """
    blocks, start = [], 0
    cut = len(lengths) < BLOCKS_MIN
    for length in lengths:
        step = min(block, max(1, length // BLOCKS_MIN)) if cut else length
        blocks += [
            slice(start + begin, start + min(length, begin + step))
            for begin in range(0, length, max(1, step))
        ]
        start += length
    return tuple(blocks)


def bootstrap_interval(
    statistic: Callable[[Float64Array], Float64Array],
    values: Float64Array,
    blocks: Sequence[slice],
    resamples: int = RESAMPLES,
) -> Interval:
    """Of a function of sums: `values` [positions, columns] are added up in blocks, blocks are drawn again and
    again, and `statistic` makes of sums [resamples, columns + 1], the last the number of positions, one
    figure each. The same draws for the same blocks.
    """
    sums = np.array([np.append(values[each].sum(axis=0), each.stop - each.start) for each in blocks])
    draws = np.random.default_rng(_SEED).integers(0, len(sums), (resamples, len(sums)))
    figures = statistic(sums[draws].sum(axis=1))
    low, high = np.quantile(figures, (0.025, 0.975))
    return Interval(float(low), float(high))
