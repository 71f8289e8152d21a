"""Emulated sums: against numpy's own F16 and F32, and against twins that add one product at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.kernels.accumulators import BF16, E4M3, F16, F16_SUMS, F32, TF32, Accumulator, rounded
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


def test_lanes_may_be_added_up_as_a_tree() -> None:
    a, weight = factors()
    found = Accumulator(F16, lanes=6, pairwise=True).add_up(a, weight)
    for row in range(3):
        for out in range(5):
            lanes = [np.float16(0)] * 6
            for column in range(44):
                product = a[row, column] * weight[out, column]
                lanes[column % 6] = np.float16(float(lanes[column % 6]) + product)
            twos = [np.float16(float(lanes[i]) + float(lanes[i + 1])) for i in (0, 2, 4)]
            fours = [np.float16(float(twos[0]) + float(twos[1])), twos[2]]
            assert found[row, out] == np.float16(float(fours[0]) + float(fours[1]))


def test_compensated_sums_keep_what_rounding_takes() -> None:
    ones, tenths = np.ones((1, 4000)), np.full((1, 4000), 0.1)
    plain = Accumulator(F16).add_up(ones, tenths)[0, 0]
    compensated = Accumulator(F16, compensated=True).add_up(ones, tenths)[0, 0]
    assert plain == 256, "half a last bit of 256 is more than a tenth"
    assert compensated == pytest.approx(400, abs=0.5)


def test_bits_are_cut_off_after_so_many_columns_and_at_the_end() -> None:
    a, weight = factors()
    found = Accumulator(F32, cut_columns=16).add_up(np.abs(a), np.abs(weight))
    for row in range(3):
        for out in range(5):
            total = 0.0
            for column in range(44):
                total = float(np.float32(total + abs(a[row, column] * weight[out, column])))
                if column % 16 == 15 or column == 43:
                    total = float(
                        np.frombuffer((np.array(total, np.float32).view(np.uint32) & 0xFFFF0000), np.float32)[
                            0
                        ]
                    )
            assert found[row, out] == total


@given(st.floats(-440, 440))
def test_eight_bit_floats_are_the_nearest_of_their_kind(value: float) -> None:
    kinds = [m * 2.0**e for e in range(-9, 6) for m in range(8, 16)] + [m * 2.0**-9 for m in range(8)]
    nearest = min(abs(abs(value) - each) for each in kinds)
    assert abs(rounded(np.array([value]), E4M3)[0] - value) == nearest


def test_what_is_too_large_for_eight_bits_is_the_largest() -> None:
    assert rounded(np.array([1e4, -460.0, 448.0]), E4M3).tolist() == [448, -448, 448]
    assert rounded(np.array([2.0**20, 1 + 2.0**-10, 1 + 2.0**-12]), TF32).tolist() == [2**20, 1 + 2.0**-10, 1]
