"""Where rows may travel rounded: only where everything that reads them rounds them so anyway."""

from __future__ import annotations

import struct

import pytest

from kvasir_node.backbone.wire_types import exact_wire_type
from kvasir_proto.dispatch import WireType
from kvasir_proto.program import ExpertProgram, GluKind, ProgramStep, StepOp

GATE, UP, DOWN = (f"ffn_{part}_exps.weight" for part in ("gate", "up", "down"))


def words(*values: int) -> bytes:
    return struct.pack("<4i", *values, *[0] * (4 - len(values)))


def swiglu(*, up_params: bytes = bytes(16)) -> ExpertProgram:
    return ExpertProgram(
        (
            ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor=GATE),
            ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor=UP, params=up_params),
            ProgramStep(StepOp.GLU, 1, 2, params=words(GluKind.SWIGLU)),
            ProgramStep(StepOp.EXPERT_MATMUL, 3, tensor=DOWN),
        ),
        input_per_slot=False,
    )


@pytest.mark.parametrize(
    "gate, up, down, width, expected",
    [
        ("q8_0", "q8_0", "q8_0", 64, WireType.Q8_0),
        ("q8_0", "q4_0", "q4_K", 64, WireType.Q8_0),  # what the last multiplication takes is not the input
        ("mxfp4", "iq4_nl", "f32", 32, WireType.Q8_0),
        ("q8_0", "q4_K", "q8_0", 256, WireType.F32),
        ("q4_1", "q4_1", "q8_0", 64, WireType.F32),  # rounded to another form, with a sum beside
        ("f32", "f32", "q8_0", 64, WireType.F32),
        ("f16", "q8_0", "q8_0", 64, WireType.F32),
        ("q8_0", "q8_0", "q8_0", 48, WireType.F32),  # no whole number of blocks
    ],
)
def test_types_decide(gate: str, up: str, down: str, width: int, expected: WireType) -> None:
    types = {GATE: gate, UP: up, DOWN: down}
    assert exact_wire_type(swiglu(), types.__getitem__, width) is expected


def test_a_precision_that_was_asked_for_is_not_second_guessed() -> None:
    assert exact_wire_type(swiglu(up_params=words(10)), lambda _: "q8_0", 64) is WireType.F32
