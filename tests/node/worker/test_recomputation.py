"""Rows that evidence shows, recomputed by an elector: wrong ones of real liars, right ones, and traps."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvasir_node.certification.certify import expert_program
from kvasir_node.certification.claimed_arithmetic import Claim
from kvasir_node.certification.crafted_weights import random_rows
from kvasir_node.certification.row_referee import RowReferee
from kvasir_node.certification.synthetic_model import ExpertShape, SyntheticExperts, compute
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.liars import LIES, Lie
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_node.native_library import load
from kvasir_node.worker.recomputation import SENSITIVE_GATE_SHARE, Opinion, judge
from kvasir_proto.audit.evidence import ShownRow
from kvasir_proto.dispatch import WireType
from kvasir_proto.errors import ModelUnusable, SourceFailed
from kvasir_proto.ids import node_id_of
from kvasir_proto.program import ExpertProgram, ProgramStep, StepOp
from tests.audited_rows import liar

NODE = node_id_of(b"\1" * 32)
SHAPE = ExpertShape(64, 64)
N_EXPERT = 8
N_ROW = 6
Rows = npt.NDArray[np.float32]


def made_experts(quantisation: str, shape: ExpertShape = SHAPE) -> SyntheticExperts:
    draws = np.random.default_rng(1)
    parts = {
        part: np.stack(
            [random_rows(quantisation, *shape.shape_of(part)[::-1], draws) for _ in range(N_EXPERT)]
        )
        for part in ("gate", "up", "down")
    }
    return SyntheticExperts(shape, quantisation, parts)


EXPERTS = made_experts("q8_0")


def asked(n_row: int = N_ROW, seed: int = 0, n_embd: int = SHAPE.n_embd) -> Rows:
    return np.random.default_rng(seed).standard_normal((n_row, n_embd)).astype(np.float32)


def shown(
    kernel: ExpertKernel,
    x: Rows,
    experts: SyntheticExperts = EXPERTS,
    program: ExpertProgram = expert_program(),  # noqa: B008
) -> list[ShownRow]:
    """What a node with this kernel answers, a row through each expert."""
    x = x.astype(np.float32)
    rows = [
        ShownRow(
            0,
            program,
            index % N_EXPERT,
            WireType.F32,
            x[index].tobytes(),
            compute(kernel, program, x[index : index + 1], index % N_EXPERT).tobytes(),
        )
        for index in range(len(x))
    ]
    kernel.close()
    return rows


def opinion(
    rows: list[ShownRow],
    claim: Claim | None = None,
    experts: SyntheticExperts = EXPERTS,
    programs: frozenset[bytes] = frozenset(),
) -> Opinion:
    return judge(NODE, rows, claim or Claim(), experts.manifest, experts.read, programs)


@pytest.mark.parametrize("lie", [each for each in LIES if each not in ("nan", "wrong-expert", "replayed")])
def test_rows_of_a_liar_are_wrong_for_whoever_recomputes_them(lie: Lie) -> None:
    found = opinion(shown(EXPERTS.load(liar(lie)), asked()))
    assert found.outcome in (("unfit", "quarantined") if lie == "f16" else ("quarantined",))
    assert found.n_rows >= 3


def test_rows_of_an_honest_kernel_are_right() -> None:
    assert opinion(shown(EXPERTS.load(GgmlCpuKernel), asked(64))).outcome == "right"


def test_who_claims_short_sums_is_not_held_to_long_ones() -> None:
    rows = shown(EXPERTS.load(liar("f16")), asked())
    assert opinion(rows, Claim(adds_in_f32=False)).outcome == "right"
    zeros = shown(EXPERTS.load(liar("zeros")), asked())
    assert opinion(zeros, Claim(adds_in_f32=False)).outcome == "quarantined"


def test_two_wrong_rows_among_right_ones_are_no_verdict() -> None:
    right = shown(EXPERTS.load(GgmlCpuKernel), asked())
    wrong = shown(EXPERTS.load(liar("scaled")), asked())
    assert opinion(right[:4] + wrong[4:]).outcome == "right"
    assert opinion(right[:3] + wrong[3:]).outcome == "quarantined"


def with_answer(rows: list[ShownRow], answer: Any) -> list[ShownRow]:
    return [replace_row(each, answer=answer(each.answer)) for each in rows]


def replace_row(row: ShownRow, **changes: Any) -> ShownRow:
    return row._replace(**changes)


def floats(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


BAD_ANSWERS: dict[str, Any] = {
    "constant": lambda answer: floats(*[0.25] * SHAPE.n_embd),
    "not finite": lambda answer: floats(*[float("nan")] * SHAPE.n_embd),
    "infinite": lambda answer: floats(*[float("inf")] * SHAPE.n_embd),
    "short": lambda answer: answer[:-4],
    "one value": lambda answer: answer[:4],
    "long": lambda answer: answer * 2,
}


@pytest.mark.parametrize("what", BAD_ANSWERS)
def test_an_answer_that_is_no_row_is_held_against_who_gave_it(what: str) -> None:
    rows = with_answer(shown(EXPERTS.load(GgmlCpuKernel), asked()), BAD_ANSWERS[what])
    assert opinion(rows).outcome == "quarantined"


BAD_REQUESTS: dict[str, Any] = {
    "a row that is not finite": lambda row: {"x": floats(*[float("nan")] * SHAPE.n_embd)},
    "a row of zeros": lambda row: {"x": floats(*[0.0] * SHAPE.n_embd)},
    "a row of another width": lambda row: {"x": row.x[:-4]},
    "an expert that is not there": lambda row: {"expert": N_EXPERT},
    "a layer that is not there": lambda row: {"layer": 7},
}


@pytest.mark.parametrize("what", BAD_REQUESTS)
def test_a_request_that_nobody_can_answer_is_held_against_nobody(what: str) -> None:
    rows = shown(EXPERTS.load(liar("zeros")), asked())
    bad = [replace_row(each, **BAD_REQUESTS[what](each)) for each in rows]
    assert opinion(bad).outcome == "inconclusive"


def test_rows_that_travelled_in_blocks_are_judged_as_they_came() -> None:
    draws = np.random.default_rng(3)
    blocks = [
        b"".join(
            np.float16(0.01).tobytes() + draws.integers(-127, 128, 32, np.int8).tobytes() for _ in range(2)
        )
        for _ in range(N_ROW)
    ]
    x = np.empty((N_ROW, SHAPE.n_embd), np.float32)
    for row, packed in zip(x, blocks, strict=True):
        raw = np.frombuffer(packed, np.uint8)
        load().expand_q8_0(raw.ctypes.data, row.size, row.ctypes.data)
    for kernel, expected in ((GgmlCpuKernel, "right"), (liar("scaled"), "quarantined")):
        rows = [
            replace_row(each, wire_type=WireType.Q8_0, x=packed)
            for each, packed in zip(shown(EXPERTS.load(kernel), x), blocks, strict=True)
        ]
        assert opinion(rows).outcome == expected


def test_ordinary_rows_do_not_hang_on_their_last_bits() -> None:
    referee = RowReferee(EXPERTS.manifest, EXPERTS.read)
    moved = [
        referee.sensitivity(0, expert_program(), index % N_EXPERT, x) for index, x in enumerate(asked(64))
    ]
    gate = 2e-6
    assert max(moved) < SENSITIVE_GATE_SHARE * gate
    referee.close()


def test_a_row_that_was_made_to_lose_its_sums_is_evidence_of_nothing() -> None:
    """A backbone chooses what it asks: a row for which every hidden value cancels convicts honest kernels."""
    experts = made_experts("f32")
    gates = [np.array(each, np.float64) for each in gates_of(experts)]
    rows: list[ShownRow] = []
    kernel = experts.load(GgmlCpuKernel)
    program = expert_program()
    for expert, gate in enumerate(gates[:N_ROW]):
        # The right singular vector of the least singular value, and so the smallest products there are.
        x = np.linalg.svd(gate)[2][-1].astype(np.float32) * np.float32(1000)
        answer = compute(kernel, program, x[None], expert)
        rows.append(ShownRow(0, program, expert, WireType.F32, x.tobytes(), answer.tobytes()))
    kernel.close()
    referee = RowReferee(experts.manifest, experts.read)
    moved = [referee.sensitivity(0, program, row.expert, np.frombuffer(row.x, np.float32)) for row in rows]
    assert max(moved) > 1e-6, "what this test is about did not happen"
    referee.close()
    assert opinion(rows, experts=experts).outcome in ("right", "inconclusive")


@pytest.mark.parametrize("quantisation", ["f32", "bf16", "f16", "q8_0", "q4_K"])
def test_rows_of_a_size_at_which_kernels_lose_values_are_evidence_of_nothing(quantisation: str) -> None:
    """Products underflow and sums overflow in each kernel in its own way, and a backbone chooses the rows."""
    experts = made_experts(quantisation, ExpertShape(256, 256))
    n_ordinary = 0
    for tenths in range(-230, 200, 6):
        draws = np.random.default_rng(tenths + 1000).standard_normal((4, 256))
        x = (draws * 10.0 ** (tenths / 10)).astype(np.float32)
        outcome = opinion(shown(experts.load(GgmlCpuKernel), x, experts), experts=experts).outcome
        assert outcome in ("right", "inconclusive"), tenths
        n_ordinary += outcome == "right"
    assert n_ordinary >= 3
    lies = shown(experts.load(liar("scaled")), asked(n_embd=256), experts)
    assert opinion(lies, experts=experts).outcome == "quarantined"


def test_rows_of_a_program_that_the_model_never_asks_for_are_evidence_of_nothing() -> None:
    """Where an elector knows those; whoever accuses chooses what was asked."""
    known = frozenset({expert_program().digest(), bytes(32)})
    ordinary = shown(EXPERTS.load(liar("zeros")), asked())
    steps = (*expert_program().steps, ProgramStep(StepOp.LINEAR, 4, params=struct.pack("<4f", 1, 0, 0, 0)))
    made_up = [each._replace(program=ExpertProgram(steps, False)) for each in ordinary]
    assert opinion(ordinary, programs=known).outcome == "quarantined"
    assert opinion(made_up).outcome == "quarantined"
    assert opinion(made_up, programs=known).outcome == "inconclusive"
    assert opinion([*made_up, *ordinary[:3]], programs=known).outcome == "quarantined"


def test_a_home_that_has_fetched_some_experts_judges_rows_of_those_alone() -> None:
    """What it has not, and what a disk has damaged, is nobody's fault."""

    def read(tensor_name: str, expert: int) -> bytes:
        if expert >= 3:
            raise ModelUnusable("it is damaged") if expert == 4 else SourceFailed("there is no such file")
        return bytes(EXPERTS.read(tensor_name, expert))

    lies, right = (shown(EXPERTS.load(kernel), asked()) for kernel in (liar("zeros"), GgmlCpuKernel))
    for rows, expected in (
        (lies, "quarantined"),
        (right, "inconclusive"),
        (lies[:2] + right[3:], "inconclusive"),
        (right[:3], "right"),
        (lies[3:], "inconclusive"),
    ):
        found = judge(NODE, rows, Claim(), EXPERTS.manifest, read)
        assert (found.outcome, found.n_rows) == (expected, sum(each in lies[:3] for each in rows))


def test_a_program_that_was_made_to_round_what_comes_out_convicts_nobody() -> None:
    """A backbone names the program too: far from zero and back again, answers jump where sums hardly move."""
    experts = made_experts("f32", ExpertShape(256, 256))
    far, back = (
        ProgramStep(StepOp.LINEAR, step, params=struct.pack("<4f", 1.0, bias, 0.0, 0.0))
        for step, bias in ((4, 2e4), (5, -2e4))
    )
    program = ExpertProgram((*expert_program().steps, far, back), False)
    rows = [
        replace_row(each, program=program)
        for exponent in (-1, -2, -3)
        for each in shown(
            experts.load(GgmlCpuKernel), asked(200, exponent + 9, 256) * 10.0**exponent, experts, program
        )
    ]
    referee = RowReferee(experts.manifest, experts.read)
    foreign = [
        each
        for each in rows
        for finding in referee.judge(
            NODE,
            0,
            program,
            each.expert,
            np.frombuffer(each.x, np.float32)[None],
            np.frombuffer(each.answer, np.float32)[None],
        )
        if finding.outcome == "foreign"
    ]
    referee.close()
    assert len(foreign) >= 3, "what this test is about did not happen"
    assert opinion(foreign, experts=experts).outcome in ("right", "inconclusive")


def gates_of(experts: SyntheticExperts) -> list[npt.NDArray[np.float32]]:

    kernel = ReferenceKernel(
        experts.manifest, experts.manifest.whole_shard(), experts.read, Arithmetic.AS_GGML
    )
    tensors = [each.suffix or "" for each in experts.manifest.expert_tensors(0)]
    suffix = next(each for each in tensors if "gate" in each)
    return [np.asarray(kernel.weight(0, suffix, expert), np.float32) for expert in range(N_EXPERT)]
