"""The referee's judgement of single rows, and the liars that it is there for."""

from __future__ import annotations

import math
import struct
from collections import Counter
from functools import partial

import numpy as np
import pytest

from kvasir_node.certification import row_referee
from kvasir_node.certification.certify import expert_program
from kvasir_node.certification.crafted_weights import random_rows
from kvasir_node.certification.row_referee import RowReferee
from kvasir_node.certification.synthetic_model import ExpertShape, SyntheticExperts, compute
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.liars import LIES, Lie, LyingKernel, wrong_expert_of
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.audit.finding import Finding
from kvasir_proto.errors import EngineFailed
from kvasir_proto.ids import node_id_of
from kvasir_proto.program import ExpertProgram, ProgramStep, StepOp
from tests.audited_rows import liar, sum_of

NODE = node_id_of(b"\1" * 32)
SHAPE = ExpertShape(64, 64)
N_EXPERT = 4


def experts_of(weight_type: str = "q8_0", shape: ExpertShape = SHAPE) -> SyntheticExperts:
    draws = np.random.default_rng(1)
    parts = {
        part: np.stack(
            [random_rows(weight_type, *shape.shape_of(part)[::-1], draws) for _ in range(N_EXPERT)]
        )
        for part in ("gate", "up", "down")
    }
    return SyntheticExperts(shape, weight_type, parts)


def rows_of(n_row: int, shape: ExpertShape = SHAPE, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n_row, shape.n_embd)).astype(np.float32)


def judged(lie: Lie | None, expert: int = 0, n_row: int = 64) -> tuple[Finding, ...]:
    experts = experts_of()
    kernel = experts.load(GgmlCpuKernel if lie is None else liar(lie))
    try:
        for seed in (3, 2):  # twice, for what repeats its last answer
            x = rows_of(n_row, seed=seed)
            answers = compute(kernel, expert_program(), x, expert)
        return RowReferee(experts.manifest, experts.read).judge(NODE, 0, expert_program(), expert, x, answers)
    finally:
        kernel.close()


@pytest.mark.parametrize("weight_type", ["q8_0", "f16", "bf16", "f32", "q4_K"])
def test_rows_of_an_honest_kernel_are_the_same_or_explained(weight_type: str) -> None:
    shape = ExpertShape(256, 256) if weight_type == "q4_K" else SHAPE
    experts = experts_of(weight_type, shape)
    referee = RowReferee(experts.manifest, experts.read)
    kernel = experts.load(GgmlCpuKernel)
    outcomes: Counter[str] = Counter()
    for expert in range(N_EXPERT):
        x = rows_of(128, shape, expert)
        answers = compute(kernel, expert_program(), x, expert)
        found = referee.judge(NODE, 0, expert_program(), expert, x, answers)
        outcomes.update(each.outcome for each in found)
        assert len({each.request_digest for each in found}) == 128
        assert all(each.excess < 1 for each in found if each.outcome == "same")
    assert set(outcomes) <= {"same", "flipped"}
    assert outcomes["flipped"] <= 4 * N_EXPERT * 128 * found[0].flip_chance
    kernel.close()


@pytest.mark.parametrize(
    "weight_type, width, processor", [("q8_0", 64, "NEON"), ("q8_0", 64, "plain C"), ("q4_K", 256, "NEON")]
)
def test_rows_of_another_processor_are_honest(
    weight_type: str, width: int, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ggml rounds to Q8_0 in three ways, to Q8_K in two: rows of which most values lie where these part."""
    experts = experts_of(weight_type, ExpertShape(width, width))
    kernel = experts.load(partial(ReferenceKernel, arithmetic=Arithmetic.AS_GGML, processor=processor))
    draws = np.random.default_rng(3)
    largest = draws.uniform(0.5, 5, (64, 1))
    x = ((draws.integers(-100, 100, (64, width)) + 0.5) * largest / 127).astype(np.float32)
    x[:, :: 32 if weight_type == "q8_0" else 256] = largest
    answers = compute(kernel, expert_program(), x, 0)
    kernel.close()

    def outcomes() -> Counter[str]:
        referee = RowReferee(experts.manifest, experts.read)
        found = referee.judge(NODE, 0, expert_program(), 0, x, answers)
        referee.close()
        return Counter(each.outcome for each in found)

    assert outcomes()["same"] == 64
    monkeypatch.setattr(row_referee, "processors_of", lambda formats: ("AVX",))
    assert outcomes()["foreign"] > 8


@pytest.mark.parametrize("lie", [each for each in LIES if each not in ("wrong-expert", "nan")])
def test_every_row_of_a_liar_is_foreign(lie: Lie) -> None:
    found = judged(lie)
    assert {each.outcome for each in found} == {"foreign"}
    directions = {each.slope == pytest.approx(1.01, abs=1e-4) for each in found}
    assert directions == {lie == "scaled"}


PAIRS = ((0, 0.4), (2, -0.05), (3, 0.25), (1, 0.3))
"""Experts in the order of slots, with weights as routers give them, and one that they do not."""


def judged_sums(
    lie: Lie | None,
    weight_type: str = "q8_0",
    shape: ExpertShape = SHAPE,
    pairs: tuple[tuple[int, float], ...] = PAIRS,
    n_row: int = 128,
) -> tuple[Finding, ...]:
    experts = experts_of(weight_type, shape)
    kernel = experts.load(GgmlCpuKernel if lie is None else liar(lie))
    referee = RowReferee(experts.manifest, experts.read)
    try:
        return tuple(
            referee.judge_sum(NODE, 0, expert_program(), pairs[0][0], pairs, x, sum_of(kernel, x, pairs))
            for x in rows_of(n_row, shape)
        )
    finally:
        kernel.close()


@pytest.mark.parametrize("weight_type", ["q8_0", "f16", "bf16", "f32", "q4_K"])
def test_sums_of_an_honest_kernel_are_the_same_or_explained(weight_type: str) -> None:
    found = judged_sums(None, weight_type, ExpertShape(256, 256) if weight_type == "q4_K" else SHAPE)
    outcomes = Counter(each.outcome for each in found)
    assert set(outcomes) <= {"same", "flipped"}
    assert outcomes["flipped"] <= 4 * len(found) * found[0].flip_chance
    assert len({each.request_digest for each in found}) == len(found)


def test_flips_of_several_experts_in_one_sum_are_explained() -> None:
    """F16 rows flip so often that many sums have two and more."""
    outcomes = Counter(each.outcome for each in judged_sums(None, "f16", ExpertShape(256, 128), n_row=256))
    assert outcomes["flipped"] > 8
    assert not outcomes["foreign"]


@pytest.mark.parametrize("lie", [each for each in LIES if each not in ("wrong-expert", "nan", "replayed")])
def test_every_sum_of_a_liar_is_foreign(lie: Lie) -> None:
    assert {each.outcome for each in judged_sums(lie, n_row=32)} == {"foreign"}


def test_a_sum_is_foreign_where_one_of_its_experts_is_wrong() -> None:
    _, wrong = wrong_expert_of(experts_of().manifest.whole_shard())
    others = tuple(pair for pair in PAIRS if pair[0] != wrong)
    small = (*others, (wrong, 0.01))
    assert {each.outcome for each in judged_sums("wrong-expert", pairs=small)} == {"foreign"}
    assert {each.outcome for each in judged_sums("wrong-expert", pairs=others)} <= {"same", "flipped"}


def test_a_sum_in_which_a_row_is_missing_or_weighs_otherwise_is_foreign() -> None:
    experts = experts_of()
    kernel = experts.load(GgmlCpuKernel)
    referee = RowReferee(experts.manifest, experts.read)
    (x,) = rows_of(1)
    for said in (PAIRS[1:], ((0, 0.401), *PAIRS[1:])):
        answer = sum_of(kernel, x, said)
        assert referee.judge_sum(NODE, 0, expert_program(), 0, PAIRS, x, answer).outcome == "foreign"
    kernel.close()


def test_sums_that_cancel_are_held_to_what_was_added_up() -> None:
    """What is left of an expert less itself is all rounding: no error of whoever computed it."""
    experts = experts_of()
    kernel = experts.load(GgmlCpuKernel)
    referee = RowReferee(experts.manifest, experts.read)
    pairs = ((0, 1.0), (0, -0.999999))
    for x in rows_of(32):
        answer = sum_of(kernel, x, pairs)
        found = referee.judge_sum(NODE, 0, expert_program(), 0, pairs, x, answer)
        assert found.outcome == "same"  # a flip is in both of them
    kernel.close()


def test_of_weights_that_are_nothing_or_not_finite_nothing_is_said() -> None:
    experts = experts_of()
    referee = RowReferee(experts.manifest, experts.read)
    (x,) = rows_of(1)
    for weight in (0.0, math.nan, math.inf):
        pairs = ((0, weight), (1, weight))
        found = referee.judge_sum(NODE, 0, expert_program(), 0, pairs, x, x)
        assert found.outcome == "void"


def test_one_wrong_expert_is_foreign_and_the_others_are_not() -> None:
    layer, wrong = wrong_expert_of(experts_of().manifest.whole_shard())
    assert layer == 0
    for expert in range(N_EXPERT):
        outcomes = {each.outcome for each in judged("wrong-expert", expert)}
        assert outcomes == ({"foreign"} if expert == wrong else {"same"})


def test_rows_that_are_not_finite_are_foreign_and_the_others_are_not() -> None:
    found = judged("nan", n_row=2000)
    not_finite = [each for each in found if math.isinf(each.residual)]
    assert 5 < len(not_finite) < 60
    assert {each.outcome for each in not_finite} == {"foreign"}
    assert {each.outcome for each in found if each not in not_finite} <= {"same", "flipped"}


def test_answers_that_are_empty_short_constant_or_of_another_row_are_foreign() -> None:
    experts = experts_of()
    referee = RowReferee(experts.manifest, experts.read)
    x = rows_of(4)
    kernel = experts.load(GgmlCpuKernel)
    right = compute(kernel, expert_program(), x, 0)
    kernel.close()
    for answers in (
        np.zeros((0, 0), np.float32),
        np.zeros(0, np.float32),
        right[:, :-1],
        np.full_like(right, 0.5),
        np.roll(right, 1, axis=0),
        np.full_like(right, np.inf),
    ):
        found = referee.judge(NODE, 0, expert_program(), 0, x, answers)
        assert [each.outcome for each in found] == ["foreign"] * 4
    found = referee.judge(NODE, 0, expert_program(), 0, x, right[:2])
    assert [each.outcome for each in found] == ["same", "same", "foreign", "foreign"]


def test_where_the_referee_has_no_good_answer_nothing_is_said() -> None:
    experts = experts_of()
    referee = RowReferee(experts.manifest, experts.read)
    right = np.ones((1, SHAPE.n_embd), np.float32)
    for x in (
        np.full((1, SHAPE.n_embd), np.nan, np.float32),
        np.full((1, SHAPE.n_embd), 3e38, np.float32),
        np.zeros((1, SHAPE.n_embd), np.float32),
    ):
        (found,) = referee.judge(NODE, 0, expert_program(), 0, x, right)
        assert found.outcome == "void"
    unfit = ExpertProgram((ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_gate_up_exps.weight"),), False)
    for layer, program, expert in ((0, unfit, 0), (9, expert_program(), 0)):
        (found,) = referee.judge(NODE, layer, program, expert, rows_of(1), right)
        assert found.outcome == "void"


def test_it_computes_in_the_arithmetic_that_a_node_claims() -> None:
    experts = experts_of()
    kernel = experts.load(
        lambda manifest, shard, read: ReferenceKernel(
            manifest, shard, read, Arithmetic.FLOAT32, activations="f32"
        )
    )
    x = rows_of(16)
    answers = compute(kernel, expert_program(), x, 0)
    referee = RowReferee(experts.manifest, experts.read)
    as_claimed = referee.judge(NODE, 0, expert_program(), 0, x, answers, activation="f32")
    as_reference = referee.judge(NODE, 0, expert_program(), 0, x, answers)
    assert {each.outcome for each in as_claimed} == {"same"}
    assert {each.outcome for each in as_reference} == {"foreign"}
    referee.close()


def test_a_program_that_goes_on_behind_its_last_product_is_judged_by_size() -> None:
    program = expert_program()
    doubled = ExpertProgram(
        (*program.steps, ProgramStep(StepOp.LINEAR, 4, params=struct.pack("<4f", 2.0, 0.0, 0.0, 0.0))), False
    )
    experts = experts_of("f16")
    kernel = experts.load(GgmlCpuKernel)
    x = rows_of(256)
    answers = compute(kernel, doubled, x, 0)
    kernel.close()
    referee = RowReferee(experts.manifest, experts.read)
    outcomes = Counter(each.outcome for each in referee.judge(NODE, 0, doubled, 0, x, answers))
    assert set(outcomes) <= {"same", "flipped"}
    wrong = {each.outcome for each in referee.judge(NODE, 0, doubled, 0, x, answers * np.float32(1.01))}
    assert wrong == {"foreign"}


def test_only_so_many_experts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = experts_of()
    reads: list[tuple[str, int]] = []

    def read(name: str, expert: int) -> memoryview:
        reads.append((name, expert))
        return experts.read(name, expert)

    referee = RowReferee(experts.manifest, read)
    x, right = rows_of(1), np.ones((1, SHAPE.n_embd), np.float32)
    for _ in range(3):
        for expert in range(N_EXPERT):
            referee.judge(NODE, 0, expert_program(), expert, x, right)
    assert len(reads) == 3 * N_EXPERT
    monkeypatch.setattr("kvasir_node.certification.row_referee.KEPT_BYTES_MAX", 1)
    for expert in range(N_EXPERT):
        referee.judge(NODE, 0, expert_program(), expert, x, right)
    assert len(referee._kernels) == 1


@pytest.mark.parametrize("lie, weight_type", [("q4", "q4_K"), ("odd-blocks", "f16")])
def test_a_lie_that_weights_cannot_have_is_refused(lie: Lie, weight_type: str) -> None:
    experts = experts_of(weight_type, ExpertShape(256, 256))
    with pytest.raises(EngineFailed):
        LyingKernel(lie, experts.manifest, experts.manifest.whole_shard(), experts.read, 1)
