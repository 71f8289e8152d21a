"""How far apart the logits of two runs are, in the statistics of llama-perplexity's ``--kl-divergence``.

Logits are read from .npy files in slices, so memory stays bounded for any number of positions; all sums are
float64. "Base" is the reference, as llama-perplexity calls it. Of a window all positions count, or those
that llama-perplexity scores. The module judges nothing and runs no model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from kvasir_node.measure.intervals import (
    Interval,
    blocks_of,
    bootstrap_interval,
    mean_error,
    share_interval,
)
from kvasir_proto.errors import EngineFailed

Logits = npt.NDArray[np.float32]
"""[positions, vocabulary]."""

BORDERLINE_MARGIN: Final = 1e-4
"""Base logits closer than this at the top: which token comes first says little there."""

Scored: TypeAlias = Literal["all", "second-half"]
"""Which positions of a window count. The second half is llama-perplexity's choice: from the middle to the
last that has a token behind it.
"""

KLD_PERCENTS: Final = (99.9, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)
DELTA_P_PERCENTS: Final = (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)
"""Those that llama-perplexity prints, beside what has a name of its own."""

_SLICE_VALUES_MAX: Final = 1 << 20
"""Logits that are compared at a time; each takes some 50 bytes on the way."""


@dataclass(frozen=True, slots=True)
class LogitsComparison:
    """The statistics of one comparison. Those of the next token need two positions; None with fewer.

    A KLD is in nats a position; `delta_p` is the change of the probability of the token that follows, as a
    fraction of one (llama-perplexity prints per cent). What ends in `_error` is what llama-perplexity prints
    behind a plus-minus, one standard error of independent positions; what ends in `_95` an interval, by
    resampling windows, of which positions are not independent. Percentiles are by the per cent that
    llama-perplexity prints. `ln_ppl_correlation` is that of both runs' logarithms of probabilities.
    """

    positions: int
    max_abs_delta: float
    rms_delta: float
    first_difference: int | None
    top1_agreement: float
    top1_agreement_error: float
    top1_95: Interval
    borderline_positions: int
    mean_kld: float
    mean_kld_error: float
    mean_kld_95: Interval
    maximum_kld: float
    kld_99: float
    median_kld: float
    minimum_kld: float
    kld_percentiles: Mapping[str, float]
    base_perplexity: float | None = None
    base_perplexity_error: float | None = None
    run_perplexity: float | None = None
    run_perplexity_error: float | None = None
    ln_ppl_correlation: float | None = None
    mean_ln_ppl_ratio: float | None = None
    mean_ln_ppl_ratio_error: float | None = None
    perplexity_change: float | None = None
    perplexity_change_95: Interval | None = None
    perplexity_ratio_error: float | None = None
    perplexity_difference: float | None = None
    perplexity_difference_error: float | None = None
    mean_delta_p: float | None = None
    mean_delta_p_error: float | None = None
    rms_delta_p: float | None = None
    rms_delta_p_error: float | None = None
    maximum_delta_p: float | None = None
    median_delta_p: float | None = None
    minimum_delta_p: float | None = None
    delta_p_percentiles: Mapping[str, float] | None = None


@dataclass(slots=True)
class _Collected:
    """Per-position results of the slices so far."""

    max_abs_delta: list[npt.NDArray[np.float64]]
    square_sum: list[npt.NDArray[np.float64]]
    same_top: list[npt.NDArray[np.bool_]]
    borderline: list[npt.NDArray[np.bool_]]
    kld: list[npt.NDArray[np.float64]]
    base_log_p: list[npt.NDArray[np.float64]]
    run_log_p: list[npt.NDArray[np.float64]]


def open_logits(path: Path) -> Logits:
    """The logits in a .npy file, mapped rather than read. Raises `EngineFailed` for anything else."""
    try:
        logits = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise EngineFailed(f"{path.name} does not hold logits: {error}") from error
    if logits.dtype != np.float32 or logits.ndim != 2 or 0 in logits.shape:
        raise EngineFailed(f"{path.name} does not hold logits: {logits.dtype} of shape {logits.shape}")
    result: Logits = logits
    return result


def most_by_chance(n: int, share: float, chance: float) -> int:
    """The least k such that of `n` independent events of probability `share` more than k happen with
    probability `chance` at most.

    For 0 <= share < 1 and 0 < chance < 1. A count above it says that the true share is larger.
    """
    probability = (1.0 - share) ** n
    k, at_most_k = 0, probability
    while 1.0 - at_most_k > chance and k < n:
        k += 1
        probability *= (n - k + 1) / k * share / (1.0 - share)
        at_most_k += probability
    return k


def largest_delta(base_path: Path, run_path: Path) -> float:
    """The largest absolute difference between two files of logits. Raises as `compare_logits`."""
    base, run = _pair(open_logits(base_path), open_logits(run_path))
    return max(
        float(np.max(_deltas(base[rows], run[rows], np.arange(rows.start, rows.stop))))
        for rows in _slices(base)
    )


def compare_logits(
    base: Logits,
    run: Logits,
    token_ids: Sequence[int],
    windows: Sequence[int] | None = None,
    scored: Scored = "all",
) -> LogitsComparison:
    """Compare `run` with `base`, position by position; `token_ids` are the tokens that were fed.

    `windows` are the lengths of the texts that were fed one after the other, each to an empty context; by
    default it was one. `perplexity_change` is run over base, less one. Raises `EngineFailed` when the shapes
    differ, when no position counts, or when a logit of one is a NaN or an infinity that the other run does
    not have in the same place.
    """
    base, run = _pair(base, run)
    windows = (len(base),) if windows is None else windows
    following = _following(token_ids, windows)
    counts = _counting(windows, scored)
    n_vocab, positions = base.shape[1], int(counts.sum())
    if not positions:
        raise EngineFailed("no window is long enough to have a second half")
    collected = _Collected([], [], [], [], [], [], [])
    for rows in _slices(base):
        kept = np.flatnonzero(counts[rows]) + rows.start
        if not len(kept):
            continue
        ours, theirs = base[kept], run[kept]
        deltas = _deltas(ours, theirs, kept)
        base_log = _log_softmax(ours)
        run_log = _log_softmax(theirs)
        collected.max_abs_delta.append(np.max(deltas, axis=1))
        collected.square_sum.append(np.sum(deltas * deltas, axis=1))
        collected.same_top.append(np.argmax(ours, axis=1) == np.argmax(theirs, axis=1))
        collected.borderline.append(_margins(ours) < BORDERLINE_MARGIN)
        collected.kld.append(_kullback_leibler(base_log, run_log))
        has_next = following[kept] >= 0
        index = (np.flatnonzero(has_next), following[kept][has_next])
        collected.base_log_p.append(base_log[index])
        collected.run_log_p.append(run_log[index])
    largest = np.concatenate(collected.max_abs_delta)
    same_top = np.concatenate(collected.same_top)
    kld = np.concatenate(collected.kld)
    different = np.flatnonzero(largest)
    blocks = blocks_of([int(counts[each].sum()) for each in _window_slices(windows)])
    return LogitsComparison(
        positions=positions,
        max_abs_delta=float(np.max(largest)),
        rms_delta=float(np.sqrt(np.sum(np.concatenate(collected.square_sum)) / (positions * n_vocab))),
        first_difference=int(np.flatnonzero(counts)[different[0]]) if len(different) else None,
        top1_agreement=float(np.mean(same_top)),
        borderline_positions=int(np.sum(np.concatenate(collected.borderline))),
        mean_kld=float(np.mean(kld)),
        maximum_kld=float(np.max(kld)),
        kld_99=float(np.quantile(kld, 0.99)),
        median_kld=float(np.median(kld)),
        minimum_kld=float(np.min(kld)),
        top1_95=share_interval(int(same_top.sum()), positions),
        mean_kld_error=mean_error(kld),
        mean_kld_95=bootstrap_interval(lambda sums: sums[:, 0] / sums[:, 1], kld[:, None], blocks),
        top1_agreement_error=mean_error(same_top.astype(np.float64)),
        kld_percentiles=_percentiles(kld, KLD_PERCENTS),
        **_of_next_tokens(
            np.concatenate(collected.base_log_p),
            np.concatenate(collected.run_log_p),
            following[counts] >= 0,
            blocks,
        ),
    )


def _window_slices(windows: Sequence[int]) -> list[slice]:
    ends = np.cumsum(windows).tolist()
    return [slice(end - length, end) for end, length in zip(ends, windows, strict=True)]


def _counting(windows: Sequence[int], scored: Scored) -> npt.NDArray[np.bool_]:
    """Which positions count."""
    counts = np.full(sum(windows), scored == "all")
    if scored == "second-half":
        for each, length in zip(_window_slices(windows), windows, strict=True):
            counts[each.start + length // 2 : each.stop - 1] = True
    return counts


def _following(token_ids: Sequence[int], windows: Sequence[int]) -> npt.NDArray[np.int64]:
    """The token that follows each position in its window, -1 at the window's end."""
    if sum(windows) != len(token_ids):
        raise EngineFailed(f"windows of {sum(windows)} positions in all for {len(token_ids)} tokens")
    following = np.append(np.asarray(token_ids[1:], np.int64), -1)
    following[np.cumsum(windows) - 1] = -1
    return following


def _percentiles(values: npt.NDArray[np.float64], percents: Sequence[float]) -> dict[str, float]:
    found = np.quantile(values, np.asarray(percents) / 100)
    return {f"{percent}": float(value) for percent, value in zip(percents, found, strict=True)}


def _of_next_tokens(
    base_log_p: npt.NDArray[np.float64],
    run_log_p: npt.NDArray[np.float64],
    has_next: npt.NDArray[np.bool_],
    blocks: Sequence[slice],
) -> dict[str, Any]:
    """The statistics of the tokens that follow, by their names."""
    if len(base_log_p) == 0:
        return {}
    delta_p = np.exp(run_log_p) - np.exp(base_log_p)
    ratio = base_log_p - run_log_p
    columns = np.zeros((len(has_next), 2))
    columns[has_next, 0] = ratio
    columns[:, 1] = has_next
    base_perplexity, run_perplexity = (float(np.exp(-np.mean(each))) for each in (base_log_p, run_log_p))
    base_error, run_error, ratio_error = map(mean_error, (base_log_p, run_log_p, ratio))
    # The covariance of two means, from the variance of their difference.
    covariance = (base_error**2 + run_error**2 - ratio_error**2) / 2
    difference_variance = (run_perplexity * run_error) ** 2 + (base_perplexity * base_error) ** 2
    difference_variance -= 2 * run_perplexity * base_perplexity * covariance
    rms_delta_p = float(np.sqrt(np.mean(delta_p * delta_p)))
    return {
        "base_perplexity": base_perplexity,
        "base_perplexity_error": base_perplexity * base_error,
        "run_perplexity": run_perplexity,
        "run_perplexity_error": run_perplexity * run_error,
        "ln_ppl_correlation": covariance / (base_error * run_error) if base_error and run_error else None,
        "mean_ln_ppl_ratio": float(np.mean(ratio)),
        "mean_ln_ppl_ratio_error": ratio_error,
        "perplexity_change": float(np.expm1(np.mean(ratio))),
        "perplexity_change_95": bootstrap_interval(
            lambda sums: np.expm1(sums[:, 0] / np.maximum(sums[:, 1], 1)), columns, blocks
        ),
        "perplexity_ratio_error": float(np.exp(np.mean(ratio))) * ratio_error,
        "perplexity_difference": run_perplexity - base_perplexity,
        "perplexity_difference_error": math.sqrt(max(0.0, difference_variance)),
        "mean_delta_p": float(np.mean(delta_p)),
        "mean_delta_p_error": mean_error(delta_p),
        "rms_delta_p": rms_delta_p,
        "rms_delta_p_error": mean_error(delta_p * delta_p) / (2 * rms_delta_p) if rms_delta_p else 0.0,
        "maximum_delta_p": float(np.max(delta_p)),
        "median_delta_p": float(np.median(delta_p)),
        "minimum_delta_p": float(np.min(delta_p)),
        "delta_p_percentiles": _percentiles(delta_p, DELTA_P_PERCENTS),
    }


def _pair(base: Logits, run: Logits) -> tuple[Logits, Logits]:
    if base.shape != run.shape:
        raise EngineFailed(f"logits of shapes {base.shape} and {run.shape} cannot be compared")
    return base, run


def _slices(logits: Logits) -> Iterator[slice]:
    positions, n_vocab = logits.shape
    step = max(1, _SLICE_VALUES_MAX // n_vocab)
    for begin in range(0, positions, step):
        yield slice(begin, min(positions, begin + step))


def _deltas(base: Logits, run: Logits, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Absolute differences of the rows of these positions. Minus infinity is a logit that a model may mask a
    token with, if both runs do.
    """
    finite = np.isfinite(base) & np.isfinite(run)
    masked = np.isneginf(base) & np.isneginf(run)
    unusable = np.flatnonzero(~np.all(finite | masked, axis=1))
    if len(unusable):
        raise EngineFailed(f"the logits of position {positions[unusable[0]]} are not finite")
    deltas = np.zeros(base.shape, dtype=np.float64)
    np.subtract(base, run, out=deltas, where=finite, dtype=np.float64)
    return np.abs(deltas)


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - np.max(logits, axis=1, keepdims=True)
    result: npt.NDArray[np.float64] = shifted - np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))
    return result


def _kullback_leibler(
    base_log: npt.NDArray[np.float64], run_log: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """sum p_base (ln p_base - ln p_run) of each row; a token that both runs mask adds nothing."""
    possible = np.isfinite(base_log)
    difference = np.subtract(base_log, run_log, out=np.zeros_like(base_log), where=possible)
    result: npt.NDArray[np.float64] = np.sum(np.exp(base_log) * difference, axis=1)
    return result


def _margins(logits: Logits) -> npt.NDArray[np.float64]:
    """How far the first token is ahead of the second; infinite where there is one token only."""
    if logits.shape[1] < 2:
        return np.full(len(logits), np.inf)
    top = np.partition(logits, -2, axis=1)[:, -2:].astype(np.float64)
    result: npt.NDArray[np.float64] = top[:, 1] - top[:, 0]
    return result
