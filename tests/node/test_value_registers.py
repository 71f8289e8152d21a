"""Registers of expert programs: no value is overwritten that is still to be read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from kvasir_node.kernels.value_registers import REGISTERS_MAX, assign_registers
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.program import ExpertProgram, ProgramStep, StepOp, program_of_flat
from tests.node.test_ggml_cpu import EVERYTHING, SWIGLU, flat_programs


def check(program: ExpertProgram) -> None:
    """Run it on names: each read must find the value that it means."""
    held: dict[int, int] = {}
    for value, (step, register) in enumerate(zip(program.steps, assign_registers(program), strict=True), 1):
        for read in (step.input_a, step.input_b):
            if read > 0:
                there = assign_registers(program)[read - 1]
                assert held[there] == read
                assert there != register, "nothing is computed in place"
        held[register] = value
    assert len(held) <= REGISTERS_MAX


@pytest.mark.parametrize("program, n_register", [(SWIGLU, 3), (EVERYTHING, 4)])
def test_memory_is_used_again(program: ExpertProgram, n_register: int) -> None:
    check(program)
    assert len(set(assign_registers(program))) == n_register


@settings(max_examples=300)
@given(flat=flat_programs())
def test_no_value_is_overwritten_that_is_still_to_be_read(flat: bytes) -> None:
    try:
        program = program_of_flat(flat, input_per_slot=False)
        assign_registers(program)
    except (LocalProtocolError, RemoteProtocolError):
        return
    check(program)


def test_too_many_values_at_once_are_refused() -> None:
    products = [ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_up_exps.weight")]
    squares = [ProgramStep(StepOp.SQUARE, 1) for _ in range(REGISTERS_MAX)]
    steps = [*products, *squares]
    while len(steps) < 2 * REGISTERS_MAX + 1:
        last, other = len(steps), len(steps) - len(products) - len(squares) + 1
        steps.append(ProgramStep(StepOp.MULTIPLY, last, max(1, other)))
    for value in range(2, REGISTERS_MAX + 2):
        steps.append(ProgramStep(StepOp.MULTIPLY, len(steps), value))
    program = ExpertProgram(tuple(steps), input_per_slot=False)
    with pytest.raises(RemoteProtocolError, match="live at once") as raised:
        assign_registers(program)
    assert raised.value.code == "program_unfit"
