"""Which piece of memory each value of an expert program gets: one that no other living value has.

Decides how much scratch a kernel needs for a program, and refuses a program that wants more than any that
llama.cpp builds: `native/src/kernel.cpp` draws the same line. Apart from the kernels because it is about
programs alone. It refuses to know widths and memory.
"""

from __future__ import annotations

from typing import Final

from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.program import ABSENT, ExpertProgram

REGISTERS_MAX: Final = 8
"""Values alive at one time."""


def assign_registers(program: ExpertProgram) -> tuple[int, ...]:
    """The register of each step's value, the first step's first. No step's register is one of its inputs'.

    Raises `RemoteProtocolError` (`program_unfit`) when more than `REGISTERS_MAX` values live at once.
    """
    last_use = {0: 0}
    for value, step in enumerate(program.steps, 1):
        last_use[value] = value
        for read in (step.input_a, step.input_b):
            if read != ABSENT:
                last_use[read] = value
    busy_until: list[int] = []
    registers = []
    for value in range(1, len(program.steps) + 1):
        register = next((index for index, end in enumerate(busy_until) if end < value), len(busy_until))
        if register == REGISTERS_MAX:
            raise RemoteProtocolError(
                f"expert program: more than {REGISTERS_MAX} values live at once", "program_unfit"
            )
        busy_until[register : register + 1] = [last_use[value]]
        registers.append(register)
    return tuple(registers)
