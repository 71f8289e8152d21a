"""Our statistics are llama-perplexity's: its formulas everywhere, the program itself where it is at hand.

`KVASIR_LLAMA_PERPLEXITY` names the program; docs/how-to/compare-backends.md says how it is built.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from kvasir_node.measure.statistics import Logits, Scored, compare_logits
from kvasir_node.model.store import DEMO_MODEL, ModelStore
from kvasir_proto.errors import EngineFailed
from tests.llama_perplexity import (
    Statistic,
    compare_with_program,
    our_statistics,
    parse,
    stored_base,
    their_statistics,
)

PROGRAM: Final = os.environ.get("KVASIR_LLAMA_PERPLEXITY", "")

OUTPUT: Final = """
[1]21.9,[2]24.1
====== Perplexity statistics ======
Mean PPL(Q)                   :  25.876000 ±   1.114000
Cor(ln(PPL(Q)), ln(PPL(base))):  99.99%
Mean ln(PPL(Q)/PPL(base))     :  -0.000369 ±   0.000320

====== KL divergence statistics ======
99.9%   KLD:   0.012777
Median  KLD:   0.000072

====== Token probability statistics ======
Mean    Δp:  0.003 ± 0.005 %
 5.0%   Δp: -0.360%
Same top p: 99.314 ± 0.129 %
"""


def two_runs(seed: int, positions: int, n_vocab: int) -> tuple[Logits, Logits, list[int]]:
    draws = np.random.default_rng(seed)
    base = (draws.standard_normal((positions, n_vocab)) * 4).astype(np.float32)
    run = (base + draws.standard_normal((positions, n_vocab)) * 0.1).astype(np.float32)
    return base, run, draws.integers(0, n_vocab, positions).tolist()


def scored_rows(windows: list[int]) -> list[int]:
    """The positions that llama-perplexity scores, from `first = n_ctx / 2` to `n_ctx - 1 - first` of them."""
    rows, start = [], 0
    for length in windows:
        first = length // 2
        rows += [start + first + index for index in range(length - 1 - first)]
        start += length
    return rows


def test_what_it_prints_is_read() -> None:
    assert parse(OUTPUT) == {
        "Mean PPL(Q)": Statistic(25.876, 1.114),
        "Cor(ln(PPL(Q)), ln(PPL(base)))": Statistic(99.99 / 100),
        "Mean ln(PPL(Q)/PPL(base))": Statistic(-0.000369, 0.00032),
        "99.9% KLD": Statistic(0.012777),
        "Median KLD": Statistic(0.000072),
        "Mean Δp": Statistic(0.003 / 100, 0.005 / 100),
        "5.0% Δp": Statistic(-0.360 / 100),
        "Same top p": Statistic(99.314 / 100, 0.129 / 100),
    }


@pytest.mark.parametrize("windows", [[300], [64, 64, 64], [65, 33, 200]])
def test_of_the_second_half_all_statistics_are_its_own(windows: list[int]) -> None:
    base, run, tokens = two_runs(len(windows), sum(windows), 101)
    rows = scored_rows(windows)
    shifted = base - base.max(axis=1, keepdims=True)
    log_p = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))[rows]
    theirs = their_statistics(log_p, run[rows], np.array([tokens[row + 1] for row in rows]))
    found = compare_logits(base, run, tokens, windows, "second-half")
    ours = our_statistics(found)
    assert found.positions == len(rows)
    assert theirs.keys() - ours.keys() == {"25.0% KLD", "75.0% KLD"}
    for name, each in ours.items():
        assert each.value == pytest.approx(theirs[name].value, rel=2e-4, abs=2e-6), name
        expected = theirs[name].error
        assert each.error == (None if expected is None else pytest.approx(expected, rel=2e-3, abs=2e-6)), name


def test_a_window_of_two_has_no_second_half() -> None:
    base, run, tokens = two_runs(3, 4, 5)
    with pytest.raises(EngineFailed, match="second half"):
        compare_logits(base, run, tokens, [2, 2], "second-half")


@pytest.mark.parametrize("scored, first", [("all", 3), ("second-half", 12)])
def test_positions_keep_their_numbers_and_only_those_that_count_are_looked_at(
    scored: Scored, first: int
) -> None:
    base, _, tokens = two_runs(4, 16, 5)
    run = base.copy()
    run[3, 2] += np.float32(1)  # first half of the first window of eight
    run[12:15, 2] += np.float32(1)
    found = compare_logits(base, run, tokens, [8, 8], scored)
    assert found.first_difference == first
    assert found.positions == (16 if scored == "all" else 6)


def test_a_stored_base_is_read_back_to_half_a_step() -> None:
    logits, _, _ = two_runs(5, 50, 400)
    numbers, steps, log_p = stored_base(logits)
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    near = shifted > -16
    assert np.abs(np.where(near, log_p - exact, 0)).max(axis=1) == pytest.approx(steps / 2, rel=0.1)
    assert (numbers.max(axis=1) == 65535).all()


@pytest.mark.skipif(not PROGRAM, reason="KVASIR_LLAMA_PERPLEXITY names no llama-perplexity")
def test_the_program_says_the_same_within_what_it_stores(tmp_path: Path) -> None:
    model = ModelStore(tmp_path / "models").add(DEMO_MODEL)
    found = compare_with_program(Path(PROGRAM).resolve(), model, tmp_path, n_windows=8)
    assert len(found.steps) == 8 * 255
    assert found.comparison.mean_kld > 1e-5, "the two runs are really different ones"
    assert found.same_stored > 0.99, "its base run is ours"
    assert found.printed.keys() == found.ours.keys()
    step, perplexity = found.steps.max(), found.comparison.base_perplexity or 0.0
    # A stored number is off by half a step at most, this way or that: of means little of it is left.
    left_of_step = 2 * step / math.sqrt(len(found.steps))
    worth = {
        "Mean PPL(base)": perplexity * left_of_step,
        "Mean PPL(Q)-PPL(base)": perplexity * left_of_step,
        "Same top p": found.tied / len(found.steps),
        "Cor(ln(PPL(Q)), ln(PPL(base)))": left_of_step,
    }
    for name, printed in found.printed.items():
        is_percent = name.endswith("p")
        digit = 1e-4 if name.startswith("Cor") else 1e-5 if is_percent else 1e-6
        stored, ours = found.stored[name], found.ours[name]
        assert stored.value == pytest.approx(printed.value, abs=digit), f"{name}: its formulas, its store"
        far = worth.get(name, left_of_step if name.startswith(("Mean", "RMS")) else step)
        assert ours.value == pytest.approx(printed.value, abs=far + digit), f"{name}: whole logits"
        if printed.error is not None:
            assert ours.error == pytest.approx(printed.error, rel=0.01, abs=digit), name
