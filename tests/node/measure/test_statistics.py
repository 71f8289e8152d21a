"""The statistics of logits: nothing for equal ones, a slow twin's numbers for others, nonsense refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.measure import statistics
from kvasir_node.measure.statistics import Logits, compare_logits, largest_delta, most_by_chance, open_logits
from kvasir_proto.errors import EngineFailed


def random_logits(seed: int, positions: int, n_vocab: int, spread: float = 3.0) -> Logits:
    draws = np.random.Generator(np.random.PCG64(seed))
    return (draws.standard_normal((positions, n_vocab)) * spread).astype(np.float32)


def softmax(row: list[float]) -> list[float]:
    largest = max(row)
    powers = [math.exp(value - largest) for value in row]
    return [power / math.fsum(powers) for power in powers]


def kld_of(base: list[float], run: list[float]) -> float:
    return math.fsum(p * math.log(p / q) for p, q in zip(softmax(base), softmax(run), strict=True))


def test_equal_logits_differ_in_nothing() -> None:
    logits = random_logits(1, 9, 17)
    result = compare_logits(logits, logits.copy(), range(9))
    assert result.positions == 9
    assert result.first_difference is None
    assert result.top1_agreement == 1.0
    assert (result.max_abs_delta, result.rms_delta) == (0.0, 0.0)
    assert (result.mean_kld, result.maximum_kld, result.kld_99) == (0.0, 0.0, 0.0)
    assert (result.median_kld, result.minimum_kld) == (0.0, 0.0)
    assert (result.mean_ln_ppl_ratio, result.mean_delta_p, result.rms_delta_p) == (0.0, 0.0, 0.0)


@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(2, 20))
def test_a_slow_twin_gets_the_same_numbers(seed: int, positions: int, n_vocab: int) -> None:
    base = random_logits(seed, positions, n_vocab)
    run = (base + random_logits(seed + 1, positions, n_vocab, spread=0.2)).astype(np.float32)
    tokens = [position % n_vocab for position in range(positions)]
    result = compare_logits(base, run, tokens)
    rows = list(zip(base.astype(float).tolist(), run.astype(float).tolist(), strict=True))
    klds = [kld_of(left, right) for left, right in rows]
    deltas = [abs(a - b) for left, right in rows for a, b in zip(left, right, strict=True)]
    change = [
        softmax(right)[token] - softmax(left)[token]
        for (left, right), token in zip(rows[:-1], tokens[1:], strict=True)
    ]
    assert result.max_abs_delta == max(deltas)
    assert result.rms_delta == pytest.approx(math.sqrt(math.fsum(d * d for d in deltas) / len(deltas)))
    assert result.mean_kld == pytest.approx(math.fsum(klds) / positions, abs=1e-12)
    assert result.maximum_kld == pytest.approx(max(klds), abs=1e-12)
    assert result.minimum_kld == pytest.approx(min(klds), abs=1e-12)
    assert result.mean_delta_p == pytest.approx(math.fsum(change) / len(change), abs=1e-12)
    same = sum(left.index(max(left)) == right.index(max(right)) for left, right in rows)
    assert result.top1_agreement == same / positions


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    base, run = random_logits(1, 13, 7), random_logits(2, 13, 7)
    tokens = [position % 7 for position in range(13)]
    whole = compare_logits(base, run, tokens)
    for values in (1, 7, 15, 50):
        monkeypatch.setattr(statistics, "_SLICE_VALUES_MAX", values)
        assert compare_logits(base, run, tokens) == whole


def test_the_first_difference_and_borderline_positions_are_told() -> None:
    base = np.array([[0, 1, 2], [5, 5.00005, 0], [3, 2, 1]], dtype=np.float32)
    run = base.copy()
    run[2] = [1, 2, 3]
    result = compare_logits(base, run, [0, 1, 2])
    assert result.first_difference == 2
    assert result.borderline_positions == 1
    assert result.top1_agreement == pytest.approx(2 / 3)


def test_one_position_has_no_next_token() -> None:
    logits = random_logits(3, 1, 5)
    result = compare_logits(logits, logits, [4])
    assert (result.mean_ln_ppl_ratio, result.mean_delta_p, result.rms_delta_p) == (None, None, None)
    assert result.mean_kld == 0.0


def test_a_vocabulary_of_one_has_no_margin() -> None:
    logits = np.zeros((2, 1), dtype=np.float32)
    assert compare_logits(logits, logits, [0, 0]).borderline_positions == 0


def test_a_token_that_both_runs_mask_adds_nothing() -> None:
    base = np.array([[0, 1, -np.inf]], dtype=np.float32)
    run = np.array([[0, 1.5, -np.inf]], dtype=np.float32)
    result = compare_logits(base, run, [0])
    assert result.max_abs_delta == 0.5
    assert result.mean_kld == pytest.approx(kld_of([0, 1], [0, 1.5]))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_a_logit_that_is_not_finite_is_no_number_to_compare(value: float, side: int) -> None:
    pair = [random_logits(1, 4, 6), random_logits(1, 4, 6)]
    pair[side][2, 3] = value
    with pytest.raises(EngineFailed, match="position 2 are not finite"):
        compare_logits(pair[0], pair[1], range(4))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(EngineFailed, match="shapes"):
        compare_logits(random_logits(1, 4, 6), random_logits(1, 4, 5), range(4))


def test_files_are_compared_without_reading_them_whole(tmp_path: Path) -> None:
    base, run = random_logits(1, 4, 6), random_logits(1, 4, 6)
    run[3, 1] += np.float32(0.5)
    np.save(tmp_path / "base.npy", base)
    np.save(tmp_path / "run.npy", run)
    assert isinstance(open_logits(tmp_path / "base.npy"), np.memmap)
    assert largest_delta(tmp_path / "base.npy", tmp_path / "run.npy") == pytest.approx(0.5, abs=1e-6)
    assert largest_delta(tmp_path / "base.npy", tmp_path / "base.npy") == 0.0


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\x93NUMPY\x01\x00"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    with pytest.raises(EngineFailed, match=r"x\.npy does not hold logits"):
        open_logits(path)


def test_arrays_that_are_no_logits_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    with pytest.raises(EngineFailed, match="float64"):
        open_logits(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.zeros((2, 0), np.float32))
    with pytest.raises(EngineFailed, match="shape"):
        open_logits(tmp_path / "x.npy")
    with pytest.raises(EngineFailed, match="does not hold"):
        open_logits(tmp_path / "missing.npy")


@pytest.mark.parametrize(
    "n, share, chance, k",
    [(27, 0.005, 1e-3, 2), (256, 0.005, 1e-3, 6), (10, 0.0, 1e-3, 0), (4, 0.9, 1e-9, 4)],
)
def test_how_many_of_n_happen_by_chance(n: int, share: float, chance: float, k: int) -> None:
    """As the exact binomial has it."""
    assert most_by_chance(n, share, chance) == k
    above = sum(math.comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(k + 1, n + 1))
    from_k = sum(math.comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(k, n + 1))
    assert above <= chance < from_k
