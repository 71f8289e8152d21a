"""Two answers to the same rows: what is equivalent, what is a flip, and what is neither."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.certification.certify import expert_program
from kvasir_node.certification.comparison import FlipCount, compare, count_flips
from kvasir_node.certification.crafted_weights import expanded, random_rows
from kvasir_node.certification.synthetic_model import ExpertShape, SyntheticExperts, compute
from kvasir_node.kernels.activation_formats import ACTIVATION_ROUNDINGS
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.program import ExpertProgram
from kvasir_proto.tolerance import flips_max

Rows = npt.NDArray[np.float64]
GATE = 2e-4


def rows_of(seed: int, n_row: int = 64) -> Rows:
    return np.random.default_rng(seed).standard_normal((n_row, 96))


@given(st.integers(0, 1000), st.floats(0.0, 0.9))
@settings(max_examples=40)
def test_noise_within_the_gate_passes_whatever_it_is(seed: int, share: float) -> None:
    """Errors that know nothing of each other move neither slope nor mean."""
    rows = rows_of(seed)
    noise = rows_of(seed + 1)
    found = rows + noise * share * GATE * np.linalg.norm(rows) / np.linalg.norm(noise)
    compared = compare(found, rows, GATE)
    assert compared.passed, compared.reason
    assert compared.rel_l2 == pytest.approx(share * GATE, abs=1e-12)


@given(st.integers(0, 1000), st.floats(1.01, 100.0))
@settings(max_examples=40)
def test_noise_over_the_gate_does_not(seed: int, share: float) -> None:
    rows, noise = rows_of(seed), rows_of(seed + 1)
    found = rows + noise * share * GATE * np.linalg.norm(rows) / np.linalg.norm(noise)
    assert "over the gate" in compare(found, rows, GATE).reason


def with_nan(rows: Rows) -> Rows:
    rows = rows.copy()
    rows[3, 5] = np.nan
    return rows


@pytest.mark.parametrize(
    "found, reason",
    [
        (rows_of(1) * 1.01, "over the gate"),
        (rows_of(1) * 1.0001, "1.000100 times"),
        (rows_of(1) + 1e-4, "off by"),
        (np.zeros((64, 96)), "over the gate"),
        (rows_of(2), "over the gate"),
        (np.roll(rows_of(1), 1, axis=0), "over the gate"),
        (with_nan(rows_of(1)), "not finite"),
        (rows_of(1) * np.inf, "not finite"),
    ],
)
def test_faults_are_named(found: Rows, reason: str) -> None:
    compared = compare(found, rows_of(1), GATE)
    assert reason in compared.reason
    assert not compared.passed


def test_nothing_passes_without_a_gate_or_with_too_few_rows_or_beside_nothing() -> None:
    rows = rows_of(1)
    assert "no gate" in compare(rows, rows, None).reason
    assert "too few" in compare(rows[:63], rows[:63], GATE).reason
    assert not compare(rows, np.zeros((64, 96)), GATE).passed


SHAPE = ExpertShape(256, 256)
FORMATS = {"f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_K": "Q8_K"}


class Expert:
    """One expert of noise in ggml's kernel and in an exact one of its class, on many rows."""

    def __init__(self, type_name: str, n_row: int) -> None:
        draws = np.random.default_rng(11)
        parts = {
            part: random_rows(type_name, *SHAPE.shape_of(part)[::-1], draws)[None]
            for part in ("gate", "up", "down")
        }
        experts = SyntheticExperts(SHAPE, type_name, parts)
        exact = experts.load(
            lambda manifest, shard, read: ReferenceKernel(manifest, shard, read, Arithmetic.AS_GGML)
        )
        x = (draws.standard_normal((n_row, SHAPE.n_embd)) / 16).astype(np.float32)
        program = expert_program()
        self.found = compute(experts.load(GgmlCpuKernel), program, x, 0)
        self.expected = compute(exact, program, x, 0)
        self.hidden = compute(exact, ExpertProgram(program.steps[:3], program.input_per_slot), x, 0)
        self.down = expanded(type_name, parts["down"][0])
        self.activation = FORMATS[type_name]

    def judged(self, found: npt.NDArray[np.float32] | Rows) -> FlipCount:
        return count_flips(found, self.expected, self.hidden, self.activation, self.down)


@pytest.mark.slow
@pytest.mark.parametrize("type_name", FORMATS)
def test_what_ggml_and_an_exact_kernel_differ_by_is_flips_and_nothing_else(type_name: str) -> None:
    expert = Expert(type_name, 3000)
    judged = expert.judged(expert.found)
    assert judged.foreign == 0
    assert judged.flipped <= flips_max(judged.activation, 3000, SHAPE.n_ff)
    assert judged.flipped > 0 or type_name == "q4_K"
    assert judged.is_honest


@pytest.mark.parametrize("type_name", FORMATS)
def test_a_value_that_was_not_near_a_tie_cannot_have_flipped(type_name: str) -> None:
    """Every hidden value is moved to what it is rounded to: then none is near, whatever a row differs by."""
    expert = Expert(type_name, 4)
    rounding = ACTIVATION_ROUNDINGS[{"Q8_K": "q8_K"}.get(expert.activation, expert.activation.lower())]
    expert.hidden = rounding(expert.hidden).astype(np.float32)
    found = expert.expected.astype(np.float64)
    found[2] += expert.down[:, 9] * np.abs(expert.hidden[2]).max() / 127
    judged = expert.judged(found)
    assert (judged.same, judged.flipped, judged.foreign) == (3, 0, 1)
    assert not judged.is_honest


@pytest.mark.parametrize("type_name", ["f16", "bf16"])
def test_a_value_that_is_small_because_terms_cancelled_may_be_off_by_more_of_itself(type_name: str) -> None:
    """The last bits of its terms decide, and they are as large as those of any other value."""
    expert = Expert(type_name, 1)
    rms = float(np.sqrt(np.mean(expert.hidden**2)))
    bits = {"f16": 11, "bf16": 8}[type_name]
    gap = 2.0 ** (np.frexp(rms / 32)[1] - bits)
    expert.hidden[0, 5] = (2**bits - 1.5) * gap + 1e-6 * rms
    found = expert.expected + (gap * expert.down[:, 5])[None]
    # One such flip is little; three of a kind are more than sums explain.
    for column in (6, 7):
        expert.hidden[0, column] = expert.hidden[0, 5]
        found += (gap * expert.down[:, column])[None]
    judged = expert.judged(found)
    assert (judged.same, judged.flipped, judged.foreign) == (0, 1, 0)


@pytest.mark.parametrize("type_name", FORMATS)
def test_faults_are_no_flips(type_name: str) -> None:
    expert = Expert(type_name, 40)
    exact = expert.expected.astype(np.float64)
    draws = np.random.default_rng(1)
    for fault in (
        exact * 1.01,
        np.zeros_like(exact),
        np.roll(exact, 1, axis=0),
        exact + 1e-3 * draws.standard_normal(exact.shape),
        exact * np.nan,
    ):
        judged = expert.judged(fault)
        assert judged.foreign == 40
        assert not judged.is_honest


def test_too_many_flips_are_not_honest_either() -> None:
    assert FlipCount("Q8_0", 60, 4, 0, 1024).is_honest
    assert not FlipCount("Q8_0", 40, 24, 0, 1024).is_honest
    assert not FlipCount("Q8_0", 63, 0, 1, 1024).is_honest
