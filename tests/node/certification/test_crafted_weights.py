"""Crafted rows hold what was asked, read back by gguf's own expansion; what a type cannot hold is said."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir_node.certification.crafted_weights import (
    CRAFTED_TYPES,
    exact_rows,
    expanded,
    random_rows,
    single_weights,
)
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME


def powers_at(*entries: tuple[int, float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    row = np.zeros((1, 512))
    for column, value in entries:
        row[0, column] = value
    return row


@pytest.mark.parametrize("type_name", CRAFTED_TYPES)
@pytest.mark.parametrize(
    "entries",
    [
        (),
        ((0, 1.0),),
        ((0, 16.0), (300, 2.0**-14)),
        ((31, 0.75), (32, 3.0), (33, 15.0)),
        ((255, 1536.0), (0, 64.0), (511, 2.0**-20)),
    ],
)
def test_what_a_row_was_asked_to_hold_it_holds(
    type_name: str, entries: tuple[tuple[int, float], ...]
) -> None:
    values = powers_at(*entries)
    data, written = exact_rows(type_name, values)
    assert written.all()
    assert data.shape == (1, TENSOR_TYPES_BY_NAME[type_name].row_size_bytes(512))
    assert np.array_equal(expanded(type_name, data), values)


@pytest.mark.parametrize(
    "type_name, entries",
    [
        ("f16", ((0, 1 + 2.0**-11),)),
        ("f16", ((0, 65536.0),)),
        ("bf16", ((0, 1 + 2.0**-8),)),
        ("f32", ((0, 1 + 2.0**-24),)),
        ("q8_0", ((0, 1.0), (1, 2.0**-7))),
        ("q8_0", ((0, 2.0**-25),)),
        ("q8_0", ((0, 2.0**30),)),
        ("q4_K", ((0, 1.0), (1, 2.0**-4))),
        ("q4_K", ((0, 1.0), (32, 2.0**-9))),
        ("q4_K", ((0, -1.0),)),
        ("q5_K", ((0, 1.0), (1, 2.0**-5))),
        ("q5_K", ((0, 1.0), (32, 2.0**-10))),
        ("q5_K", ((0, -1.0),)),
        ("q6_K", ((0, 1.0), (1, 2.0**-5))),
        ("q6_K", ((0, 1.0), (16, 2.0**-11))),
        ("q6_K", ((0, 1.0), (1, -(2.0**-6)))),
    ],
)
def test_what_a_type_cannot_hold_is_said(type_name: str, entries: tuple[tuple[int, float], ...]) -> None:
    _, written = exact_rows(type_name, np.concatenate([powers_at(*entries), powers_at((5, 1.0))]))
    assert written.tolist() == [False, True]


@pytest.mark.parametrize(
    "type_name, entries",
    [
        ("q5_K", ((0, 1.0), (1, 2.0**-4), (2, 31 * 2.0**-4))),
        ("q5_K", ((0, 1.0), (32, 2.0**-9))),
        ("q6_K", ((0, 1.0), (1, 2.0**-4), (2, -2.0))),
        ("q6_K", ((0, 1.0), (16, 2.0**-10), (31, -(2.0**-10)))),
        ("q6_K", ((0, -31.0), (255, 31.0))),
    ],
)
def test_the_widest_that_types_of_two_scales_hold(
    type_name: str, entries: tuple[tuple[int, float], ...]
) -> None:
    values = powers_at(*entries)
    data, written = exact_rows(type_name, values)
    assert written.all()
    assert np.array_equal(expanded(type_name, data), values)


@pytest.mark.parametrize("type_name", ["q8_0", "q4_K", "q5_K", "q6_K"])
def test_every_column_has_its_own_place(type_name: str) -> None:
    draws = np.random.default_rng(4)
    columns = np.arange(512)
    single = expanded(type_name, single_weights(type_name, columns, 512, draws))
    assert np.array_equal(np.nonzero(single), (columns, columns))


def test_random_rows_of_exact_values_are_written_or_refused_but_never_wrong() -> None:
    """Sparse rows over many exponents; every type writes some and refuses some."""
    draws = np.random.default_rng(1)
    values = np.zeros((400, 512))
    for row in values:
        columns = draws.integers(0, 512, 3)
        row[columns] = draws.choice([1, 3, 8, 399], 3) * np.exp2(draws.integers(-26, 12, 3))
    for type_name in CRAFTED_TYPES:
        data, written = exact_rows(type_name, values)
        assert np.array_equal(expanded(type_name, data[written]), values[written])
        assert 0 < written.sum() <= 400
        assert type_name == "f32" or written.sum() < 400


@pytest.mark.parametrize("type_name", CRAFTED_TYPES)
def test_noise_has_a_deviation_near_one_and_single_weights_need_all_bits(type_name: str) -> None:
    draws = np.random.default_rng(2)
    noise = expanded(type_name, random_rows(type_name, 32, 512, draws))
    assert 0.8 < noise.std() < 1.2
    assert abs(noise.mean()) < 0.05
    columns = draws.integers(0, 512, 16)
    single = expanded(type_name, single_weights(type_name, columns, 512, draws))
    assert (np.count_nonzero(single, axis=1) == 1).all()
    values = single[np.arange(16), columns]
    # No value survives the loss of its type's last bit.
    bits = {"f32": 24, "f16": 11, "bf16": 8, "q8_0": 12, "q4_K": 14, "q5_K": 14, "q6_K": 12}[type_name]
    mantissas = np.frexp(values)[0] * 2.0 ** (bits - 1)
    assert (mantissas != np.rint(mantissas)).all()
