"""Which wire type loses nothing: where an expert program rounds its input, the input may travel rounded.

ggml multiplies weights of many types with activations that it first rounds to blocks of Q8_0. Rounding what
is rounded already changes nothing, so such rows can travel in that form, at a quarter of the bytes, and every
result stays what it was, bit for bit. Decides for one layer and program; who uses it is the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir_node.kernels.activation_formats import ACTIVATION_FORMATS
from kvasir_proto.dispatch import Q8_0_BLOCK, WireType
from kvasir_proto.program import ExpertProgram


def exact_wire_type(program: ExpertProgram, weight_type_of: Callable[[str], str], n_embd_in: int) -> WireType:
    """The smallest wire type from which every kernel of the reference class computes the same as from F32.

    ``weight_type_of`` gives the type's name of a tensor suffix (`ffn_up_exps.weight`). Rows may travel as
    Q8_0 when everything that reads the input row is a product with weights that take it in that form, at the
    precision that ggml chooses by itself.
    """
    rounds_alike = all(
        not any(step.words()) and ACTIVATION_FORMATS.get(weight_type_of(step.tensor)) == "q8_0"
        for step in program.steps
        if step.input_a == 0  # by the rules of programs a matrix product
    )
    return WireType.Q8_0 if rounds_alike and n_embd_in % Q8_0_BLOCK == 0 else WireType.F32
