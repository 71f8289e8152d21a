"""From figures to a class: one row of the table for each rule, and for each way in which figures mislead."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir_node.certification.classification import (
    CancellationFigure,
    PairFigure,
    ProbeFigures,
    RoundingFigure,
    classify,
)


def pairs(bits: int, *offsets: int, asked: int = 25) -> tuple[PairFigure, ...]:
    return tuple(PairFigure(each, bits, asked) for each in offsets or (1, 8, 32, 256))


def lost(*exponents: int) -> tuple[CancellationFigure, ...]:
    """The small terms of these exponents are lost in half of the places."""
    return tuple(CancellationFigure(each, 24 if each in exponents else 0, 48) for each in (8, 11, 14, 20, 28))


DISTANCES = (("f32", 2e-7), ("f16", 2e-4), ("q8_0", 6e-3), ("q8_K", 8e-3))
F32 = ProbeFigures(
    pairs=pairs(24),
    block_pairs=(),
    cancellations=lost(28),
    roundings=(RoundingFigure(1, 24, 1.0), RoundingFigure(1, 11, 0.75)),
    activation_bits=24,
    activation_block=0,
    activation_range_is_wide=True,
    sum_range_is_wide=True,
    result_range_is_wide=True,
    format_distances=DISTANCES,
    weights_kept=1.0,
    stagnation=1.0,
    effective_bits=23.0,
    is_finite=True,
    repeatable=True,
    batch_invariant=True,
)
F16 = replace(
    F32,
    pairs=pairs(11),
    cancellations=lost(11, 14, 20, 28),
    roundings=(RoundingFigure(1, 11, 1.0), RoundingFigure(1, 24, 0.0)),
    sum_range_is_wide=False,
    activation_bits=11,
    activation_range_is_wide=False,
    effective_bits=8.8,
)
SHARED = replace(F32, activation_block=32, activation_bits=1)


@pytest.mark.parametrize(
    "figures, accumulator, word",
    [
        (F32, "F32", "F32"),
        (replace(F32, cancellations=lost()), "F64", "F32"),
        (replace(F32, cancellations=(CancellationFigure(28, 0, 20),)), "F32", "F32"),
        (F16, "F16", "F16"),
        (replace(F16, stagnation=1.0, effective_bits=10.3), "F16", "F16"),
        (replace(F16, cancellations=lost(28)), "wider, results in F16", "F16"),
        (replace(F16, sum_range_is_wide=True), "11-bit", "F16"),
        (replace(F16, pairs=pairs(8), cancellations=lost(8, 11, 14, 20, 28)), "BF16", "BF16"),
        (replace(F16, pairs=pairs(14), cancellations=lost(14, 20, 28)), "14-bit", "MIXED"),
        (replace(F16, pairs=pairs(22), cancellations=lost(28)), "22-bit", "MIXED"),
        (replace(F16, pairs=pairs(5), cancellations=lost(8, 11)), "5-bit", "BF16"),
        (replace(F16, pairs=pairs(11, 8, 32) + pairs(24, 1, 2)), "MIXED F16/F32", "MIXED"),
        (replace(F16, pairs=pairs(11, 8, 32) + pairs(14, 1, 2)), "MIXED F16/14-bit", "MIXED"),
        # A type that cannot hold the ratio was not asked: it speaks neither for F32 nor against F16.
        (replace(F16, pairs=pairs(11, 32, 64) + pairs(10, 1, 2, asked=10)), "F16", "F16"),
        (replace(F32, pairs=pairs(24, 32) + pairs(10, 1, 2, asked=10)), "F32", "F32"),
        # Where nothing could be asked for 24 bits, sums of noise must show them.
        (replace(F32, pairs=pairs(15, 1, 32, asked=15), effective_bits=21.0), "F32", "F32"),
        (replace(F32, pairs=pairs(15, 1, 32, asked=15), effective_bits=17.0), "UNKNOWN", "UNKNOWN"),
        (replace(F32, pairs=pairs(19, 1, 32, asked=19), weights_kept=0.0), "19-bit or more", "MIXED"),
        # Where rows keep their values, more was asked within a block than weights alone could.
        (replace(F32, block_pairs=pairs(11, 1, asked=16)), "MIXED 11-bit/F32", "MIXED"),
        (replace(F16, pairs=pairs(11, 32) + pairs(10, 1, asked=10), block_pairs=pairs(16, 1, asked=16)),
         "MIXED F16/F32", "MIXED"),
        # Where they share a step, a small value beside a large one is gone before any sum.
        (replace(SHARED, block_pairs=pairs(1, 1, asked=16)), "F32", "F32"),
        (replace(F32, is_finite=False), "UNKNOWN", "UNKNOWN"),
        (replace(F32, pairs=()), "UNKNOWN", "UNKNOWN"),
        (replace(F32, effective_bits=9.0), "UNKNOWN", "UNKNOWN"),
        (replace(F32, effective_bits=9.0, weights_kept=0.0), "F32", "F32"),
    ],
)  # fmt: skip
def test_sums(figures: ProbeFigures, accumulator: str, word: str) -> None:
    found = classify(figures)
    assert (found.accumulator, found.accumulation) == (accumulator, word)
    assert bool(found.reason) == (accumulator in ("UNKNOWN", "19-bit or more"))


@pytest.mark.parametrize(
    "figures, activation",
    [
        (F32, "F32"),
        (replace(F32, activation_bits=11), "TF32"),
        (replace(F32, activation_bits=11, activation_range_is_wide=False), "F16"),
        (replace(F32, activation_bits=8), "BF16"),
        (replace(F32, activation_bits=8, activation_range_is_wide=False), "UNKNOWN"),
        (replace(F32, activation_bits=4), "UNKNOWN"),
        (F16, "F16"),
        (replace(F16, activation_range_is_wide=True), "UNKNOWN"),
        (replace(SHARED, format_distances=(("q8_0", 1e-7), ("f32", 6e-3))), "Q8_0"),
        (replace(SHARED, format_distances=(("q8_0", 1e-3), ("f32", 1e-4))), "UNKNOWN"),
        (replace(SHARED, activation_block=256, format_distances=(("q8_K", 1e-7),)), "Q8_K"),
        (replace(SHARED, activation_block=64, format_distances=(("q8_0", 1e-7),)), "UNKNOWN"),
        (replace(SHARED, activation_block=1024, format_distances=(("q8_K", 1e-7),)), "UNKNOWN"),
    ],
)
def test_activations(figures: ProbeFigures, activation: str) -> None:
    assert classify(figures).activation == activation


@pytest.mark.parametrize(
    "figures, rounding",
    [
        (F32, "nearest"),
        (F16, "nearest"),
        (replace(F16, roundings=(RoundingFigure(1, 11, 0.0), RoundingFigure(1, 24, 1.0))), "toward zero"),
        (replace(F16, roundings=(RoundingFigure(1, 11, 0.0), RoundingFigure(8, 11, 1.0))), ""),
        (replace(F16, roundings=(RoundingFigure(2, 11, 0.0),)), ""),
        (replace(F16, roundings=()), ""),
        (replace(F32, pairs=pairs(19, asked=19), roundings=(RoundingFigure(1, 24, 0.0),)), ""),
    ],
)
def test_rounding_is_that_of_the_shortest_sums(figures: ProbeFigures, rounding: str) -> None:
    assert classify(figures).rounding == rounding


def test_ranges_and_columns_of_mixed_sums_are_said() -> None:
    found = classify(replace(F16, pairs=pairs(11, 8, 32) + pairs(24, 1, 2)))
    assert (found.range, found.short_offsets, found.bits) == ("F16", (8, 32), 11)
    assert (classify(F32).range, classify(F32).short_offsets, classify(F32).bits) == ("wide", (), 24)
