"""Emulated sums: against numpy's own F16 and F32, and against twins that add one product at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.kernels.accumulators import BF16, F16, F16_SUMS, F32, Accumulator, rounded
from kvasir_node.kernels.activation_formats import as_bf16

FLOATS = st.floats(allow_nan=False, width=64)


@given(st.lists(FLOATS, min_size=1, max_size=40))
def test_rounding_is_numpys(values: list[float]) -> None:
    numbers = np.array(values)
    with np.errstate(over="ignore"):
        assert np.array_equal(rounded(numbers, F16), numbers.astype(np.float16).astype(np.float64))
        assert np.array_equal(rounded(numbers, F32), numbers.astype(np.float32).astype(np.float64))
        singles = numbers.astype(np.float32)
    singles = singles[np.abs(singles) < 1e38]
    assert np.array_equal(rounded(singles.astype(np.float64), BF16), as_bf16(singles))


def factors() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    draws = np.random.default_rng(3)
    return draws.standard_normal((3, 44)), draws.standard_normal((5, 44))


def added_one_by_one(
    row: npt.NDArray[np.float64], weight: npt.NDArray[np.float64], lanes: int, at_once: int
) -> float:
    """F16 sums in lanes, with numpy's float16."""
    sums = [np.float16(0)] * lanes
    for begin in range(0, len(row), at_once):
        products = float(row[begin : begin + at_once] @ weight[begin : begin + at_once])
        lane = begin // at_once % lanes
        sums[lane] = np.float16(float(sums[lane]) + products)
    total = sums[0]
    for each in sums[1:]:
        total = np.float16(float(total) + float(each))
    return float(total)


@pytest.mark.parametrize("lanes, at_once", [(1, 1), (16, 1), (1, 8), (4, 2), (64, 1)])
def test_f16_sums_are_numpys_one_product_after_the_other(lanes: int, at_once: int) -> None:
    a, weight = factors()
    found = Accumulator(F16, lanes=lanes, at_once=at_once).add_up(a, weight)
    expected = [[added_one_by_one(row, one, lanes, at_once) for one in weight] for row in a]
    # Products of several columns are added exactly there and in float64 here: one rounding may differ.
    assert np.abs(found - expected).max() <= (0 if at_once == 1 else 2e-3)
    assert np.abs(found - a @ weight.T).max() > 1e-4


def test_blocks_are_added_up_in_f32() -> None:
    a, weight = factors()
    found = Accumulator(F16, block=16).add_up(a, weight)
    expected = np.zeros((3, 5), np.float32)
    for begin in (0, 16, 32):
        part = slice(begin, begin + 16)
        expected += [[added_one_by_one(row[part], one[part], 1, 1) for one in weight] for row in a]
    assert np.array_equal(found, expected)


def test_factors_and_results_are_rounded_where_asked() -> None:
    a, weight = factors()
    found = Accumulator(F32, lanes=44, factors=BF16).add_up(a, weight)
    assert np.abs(found - rounded(a, BF16) @ rounded(weight, BF16).T).max() < 1e-5
    found = Accumulator(F32, lanes=44, results=F16).add_up(a, weight)
    assert np.array_equal(found, rounded(found, F16))


def test_what_is_too_large_for_f16_is_infinite() -> None:
    assert np.isinf(F16_SUMS.add_up(np.full((1, 64), 64.0), np.full((1, 64), 64.0))).all()
