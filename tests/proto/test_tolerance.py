"""Gates of pairs of classes: a table of the numbers that were measured, and what holds for any pair."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.limits import Accumulation
from kvasir_proto.tolerance import EquivalenceClass, flips_max, gate_of, has_flips, regression_gate, row_gate

ACTIVATIONS = ("F32", "F16", "BF16", "Q8_0", "Q8_K", "TF32", "UNKNOWN")
CLASSES = st.builds(
    EquivalenceClass, st.sampled_from(ACTIVATIONS), st.sampled_from(list(get_args(Accumulation)))
)
WIDTHS = st.integers(32, 1 << 16)


@pytest.mark.parametrize(
    "a, b, n_embd, n_ff, gate",
    [
        ("F32", "F32", 3072, 1024, 2e-6),
        ("F32", "F32", 256, 128, 2e-6),
        ("F32", "F32", 12288, 1024, 4e-6),
        ("F32", "F32", 1024, 12288, 4e-6),
        ("F16", "F16", 3072, 1024, 5e-5),
        ("F16", "F16", 256, 64, 2e-4),
        ("BF16", "BF16", 3072, 1024, 1.5e-4),
        ("Q8_0", "Q8_0", 3072, 1024, 3e-4),
        ("Q8_K", "Q8_K", 3072, 1024, 4.5e-4),
        ("Q8_K", "Q8_K", 3072, 4096, 2.25e-4),
        ("Q8_0", "Q8_0", 256, 64, 1.2e-3),
        ("F16", "F32", 3072, 1024, 1e-3),
        ("F16", "BF16", 3072, 1024, None),
        ("BF16", "F32", 3072, 1024, None),
        ("Q8_0", "Q8_K", 3072, 1024, None),
        ("Q8_0", "F32", 3072, 1024, None),
        ("Q8_K", "F16", 3072, 1024, None),
        ("TF32", "TF32", 3072, 1024, None),
        ("UNKNOWN", "UNKNOWN", 3072, 1024, None),
    ],
)
def test_gates_are_those_that_were_measured(
    a: str, b: str, n_embd: int, n_ff: int, gate: float | None
) -> None:
    found = gate_of(EquivalenceClass(a, "F32"), EquivalenceClass(b, "F32"), n_embd, n_ff)
    assert found == (None if gate is None else pytest.approx(gate))


def test_two_ways_of_rounding_one_format_are_one_class_with_a_wider_gate() -> None:
    usual, other = EquivalenceClass("Q8_0", "F32"), EquivalenceClass("Q8_0", "F32", "NEON")
    gate = gate_of(usual, usual, 3072, 1024)
    assert gate is not None
    assert gate_of(other, other, 3072, 1024) == gate
    assert gate_of(usual, other, 3072, 1024) == gate_of(other, usual, 3072, 1024) == 4 * gate
    assert 7.1e-4 < 4 * gate < 4.3e-3, "between what was measured of honest pairs and what sums in F16 make"


@given(CLASSES, CLASSES, WIDTHS, WIDTHS)
def test_a_gate_takes_no_sides_and_only_f32_sums(
    a: EquivalenceClass, b: EquivalenceClass, n_embd: int, n_ff: int
) -> None:
    gate = gate_of(a, b, n_embd, n_ff)
    assert gate == gate_of(b, a, n_embd, n_ff)
    if {a.accumulation, b.accumulation} != {"F32"}:
        assert gate is None
    if gate is not None:
        assert 2e-6 <= gate < 1e-2, "a hundredth is what another activation format makes"
        assert 0 < regression_gate(gate) < gate
    assert row_gate(n_embd, n_ff) >= 2e-6


@given(WIDTHS, st.sampled_from(["Q8_0", "Q8_K", "F32", "F16", "BF16"]))
def test_a_factor_of_1_01_is_outside_every_gate_of_one_class(n_ff: int, activation: str) -> None:
    one = EquivalenceClass(activation, "F32")
    gate = gate_of(one, one, 3072, n_ff)
    assert gate is not None
    assert gate < 0.01


@given(st.sampled_from(["F16", "BF16", "Q8_0", "Q8_K"]), st.integers(0, 3000), st.integers(32, 8192))
def test_so_many_flips_are_one_in_a_million(activation: str, n_rows: int, n_ff: int) -> None:
    """Against the sum of binomial chances, written out."""
    a_row = {"F16": 0.5, "BF16": 0.1, "Q8_0": 0.025, "Q8_K": 0.006}[activation] * n_ff / 1024
    most = flips_max(activation, n_rows, n_ff)

    def tail_beyond(count: int) -> float:
        logs = (
            math.lgamma(n_rows + 1)
            - math.lgamma(k + 1)
            - math.lgamma(n_rows - k + 1)
            + k * math.log(1 - math.exp(-a_row))
            - (n_rows - k) * a_row
            for k in range(count + 1, n_rows + 1)
        )
        return sum(math.exp(each) for each in logs)

    assert has_flips(activation)
    assert tail_beyond(most) < 1.01e-6
    assert most == 0 or tail_beyond(most - 1) > 0.99e-6


def test_what_is_not_rounded_does_not_flip() -> None:
    assert not has_flips("F32")
    assert not has_flips("UNKNOWN")
