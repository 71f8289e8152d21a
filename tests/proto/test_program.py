"""Expert programs: only well formed ones exist, one program has one encoding, and widths are checked."""

from __future__ import annotations

import struct
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.program import (
    ABSENT,
    PROGRAM_MATMULS_MAX,
    PROGRAM_STEPS_MAX,
    PROGRAM_VERSION,
    TENSOR_SUFFIXES,
    ExpertProgram,
    GluKind,
    ProgramStep,
    StepOp,
    UnaryKind,
    decode_program,
    program_of_flat,
)

GATE, UP, DOWN = (f"ffn_{part}_exps.weight" for part in ("gate", "up", "down"))
NAN = float("nan")


def _words(*words: int) -> bytes:
    return struct.pack("<4i", *words, *[0] * (4 - len(words)))


def _floats(*floats: float) -> bytes:
    return struct.pack("<4f", *floats, *[0.0] * (4 - len(floats)))


SWIGLU = ExpertProgram(
    (
        ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor=GATE),
        ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor=UP),
        ProgramStep(StepOp.GLU, 1, 2, params=_words(GluKind.SWIGLU)),
        ProgramStep(StepOp.EXPERT_MATMUL, 3, tensor=DOWN),
    ),
    input_per_slot=False,
)

MERGED = ExpertProgram(
    (
        ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_gate_up_exps.weight"),
        ProgramStep(StepOp.EXPERT_ADD, 1, tensor="ffn_gate_up_exps.bias"),
        ProgramStep(StepOp.SLICE, 2, params=_words(0, 12)),
        ProgramStep(StepOp.SLICE, 2, params=_words(12, 12)),
        ProgramStep(StepOp.CLAMP, 4, params=_floats(-7.0, 7.0)),
        ProgramStep(StepOp.UNARY, 3, params=_words(UnaryKind.SILU)),
        ProgramStep(StepOp.MULTIPLY, 6, 5),
        ProgramStep(StepOp.LINEAR, 7, params=_floats(0.5, 1.0)),
        ProgramStep(StepOp.SQUARE, 8),
        ProgramStep(StepOp.EXPERT_MATMUL, 9, tensor=DOWN),
        ProgramStep(StepOp.EXPERT_SCALE, ABSENT, tensor="ffn_down_exps.scale"),
        ProgramStep(StepOp.MULTIPLY, 10, 11),
    ),
    input_per_slot=True,
)

SHAPES = {
    GATE: (20, 12, 5),
    UP: (20, 12, 5),
    DOWN: (12, 18, 5),
    "ffn_gate_up_exps.weight": (20, 24, 5),
    "ffn_gate_up_exps.bias": (24, 5),
    "ffn_down_exps.scale": (5,),
}


@pytest.mark.parametrize("program", [SWIGLU, MERGED], ids=["swiglu", "merged"])
def test_encoding_and_flat_form_are_lossless(program: ExpertProgram) -> None:
    assert decode_program(program.encode()) == program
    assert program_of_flat(program.flat(), program.input_per_slot) == program
    assert len(program.flat()) == 32 * len(program.steps)


def test_the_encoding_never_changes() -> None:
    assert SWIGLU.digest().hex() == "ee81fbfbd1693cd7620fddc03b182881ce45ae5dd2f86a5ada97efbdf6ec87c8"
    assert MERGED.digest().hex() == "6354787be3bc7b9055de16cd54cfa29592964f369b45fcf919de5a250a368897"


def test_suffixes_are_in_a_fixed_order() -> None:
    assert SWIGLU.suffixes == (GATE, UP, DOWN)
    assert MERGED.suffixes == (
        DOWN,
        "ffn_down_exps.scale",
        "ffn_gate_up_exps.weight",
        "ffn_gate_up_exps.bias",
    )


def test_widths_follow_the_tensors() -> None:
    assert SWIGLU.row_widths(SHAPES.get) == (20, 12, 12, 12, 18)
    assert MERGED.row_widths(SHAPES.get) == (20, 24, 24, 12, 12, 12, 12, 12, 12, 12, 18, 1, 18)


@pytest.mark.parametrize(
    "suffix, shape, reason",
    [
        (GATE, None, "has no ffn_gate_exps.weight"),
        (UP, (20, 13, 5), "gate and up differ"),
        (UP, (21, 12, 5), "not as wide as the weights"),
        (DOWN, (13, 18, 5), "not as wide as the weights"),
        (DOWN, (12, 18), "has 2 dimensions"),
    ],
)
def test_a_program_that_does_not_fit_is_refused(
    suffix: str, shape: tuple[int, ...] | None, reason: str
) -> None:
    shapes = {**SHAPES, suffix: shape}
    with pytest.raises(RemoteProtocolError, match=reason) as raised:
        SWIGLU.row_widths(shapes.get)
    assert raised.value.code == "program_unfit"


def _with(program: ExpertProgram, index: int, **changes: object) -> tuple[ProgramStep, ...]:
    steps = list(program.steps)
    steps[index] = replace(steps[index], **changes)  # type: ignore[arg-type]
    return tuple(steps)


@pytest.mark.parametrize(
    "steps, reason",
    [
        ((), "1 to 32 steps"),
        (SWIGLU.steps * 9, "1 to 32 steps"),
        (SWIGLU.steps[:2], "a value is not used"),
        (_with(SWIGLU, 0, input_a=1), "not an earlier value"),
        (_with(SWIGLU, 0, input_a=ABSENT), "not an earlier value"),
        (_with(SWIGLU, 0, input_a=-7), "not an earlier value"),
        (_with(SWIGLU, 2, input_a=0), "not an earlier value"),
        (_with(SWIGLU, 2, input_b=3), "not an earlier value"),
        (_with(SWIGLU, 2, input_b=0), "not an earlier value"),
        (_with(SWIGLU, 3, input_b=1), "one input too many"),
        (_with(SWIGLU, 0, tensor="ffn_gate_exps.bias"), "is not a weight"),
        (_with(SWIGLU, 0, tensor="ffn_gate_inp.weight"), "not a routed expert's"),
        (_with(SWIGLU, 0, tensor=""), "not a routed expert's"),
        (_with(SWIGLU, 2, tensor=GATE), "it names a tensor"),
        (_with(SWIGLU, 0, params=_words(11)), "precision is not known"),
        (_with(SWIGLU, 0, params=_words(0, 1)), "precision is not known"),
        (_with(SWIGLU, 2, params=_words(7)), "not a valid GluKind"),
        (_with(SWIGLU, 2, params=_words(2, 1)), "cannot be swapped"),
        (_with(SWIGLU, 2, params=_words(2, 0, 0x7FC00000)), "not finite"),
        (_with(SWIGLU, 2, params=b""), "not four words"),
        (_with(MERGED, 5, params=_words(17)), "not a valid UnaryKind"),
        (_with(MERGED, 5, params=_words(10, 1)), "it cannot use"),
        (_with(MERGED, 4, params=_floats(7.0, -7.0)), "no range"),
        (_with(MERGED, 4, params=_floats(NAN, 7.0)), "no range"),
        (_with(MERGED, 7, params=_floats(NAN)), "not finite"),
        (_with(MERGED, 2, params=_words(-1, 12)), "slice is empty"),
        (_with(MERGED, 2, params=_words(0, 0)), "slice is empty"),
        (_with(MERGED, 3, input_a=3), "cannot work on a slice"),
        (_with(MERGED, 7, input_a=4), "cannot work on a slice"),
        (_with(MERGED, 6, input_b=ABSENT), "one input too few"),
        (_with(MERGED, 10, input_a=1), "no use for"),
        (MERGED.steps[:3], "cannot be an output"),
        (SWIGLU.steps[:1] + MERGED.steps[10:11], "not used|cannot be an output"),
    ],
)
def test_what_is_no_program_is_refused(steps: tuple[ProgramStep, ...], reason: str) -> None:
    with pytest.raises(LocalProtocolError, match=reason):
        ExpertProgram(steps, input_per_slot=False)


def test_matrix_products_are_bounded() -> None:
    def chain(n: int) -> tuple[ProgramStep, ...]:
        return tuple(ProgramStep(StepOp.EXPERT_MATMUL, i, tensor=GATE) for i in range(n))

    ExpertProgram(chain(PROGRAM_MATMULS_MAX), input_per_slot=False)
    with pytest.raises(LocalProtocolError, match="matrix products"):
        ExpertProgram(chain(PROGRAM_MATMULS_MAX + 1), input_per_slot=False)


@pytest.mark.parametrize(
    "parts",
    [
        ["kvasir/expert-program", PROGRAM_VERSION + 1, False, []],
        ["kvasir/expert-program", True, False, []],
        ["kvasir/expert-program", PROGRAM_VERSION, 0, []],
        ["kvasir/model-manifest", PROGRAM_VERSION, False, []],
        ["kvasir/expert-program", PROGRAM_VERSION, False, [[99, 0, -1, "", bytes(16)]]],
        ["kvasir/expert-program", PROGRAM_VERSION, False, [[1.0, 0, -1, GATE, bytes(16)]]],
        ["kvasir/expert-program", PROGRAM_VERSION, False, [[1, 0, -1, GATE, "0123456789abcdef"]]],
        ["kvasir/expert-program", PROGRAM_VERSION, False, [[1, 0, -1, GATE]]],
        ["kvasir/expert-program", PROGRAM_VERSION, False, [1] * (PROGRAM_STEPS_MAX + 1)],
        ["kvasir/expert-program", PROGRAM_VERSION, False],
        {},
        None,
    ],
)
def test_other_bytes_are_refused(parts: object) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        decode_program(msgpack.packb(parts))
    assert raised.value.code == "program_invalid"


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_program_or_a_remote_error(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_program(data)


@given(st.integers(0, len(MERGED.encode()) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_another_program_or_a_remote_error(index: int, value: int) -> None:
    data = bytearray(MERGED.encode())
    data[index] = value
    try:
        program = decode_program(bytes(data))
    except RemoteProtocolError:
        return
    assert program.encode() == data
    assert (program == MERGED) == (data == MERGED.encode())


@pytest.mark.parametrize("data", [SWIGLU.encode() + b"\0", SWIGLU.encode()[:-1], bytes(5000)])
def test_more_or_less_than_one_program_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_program(data)


@pytest.mark.parametrize("flat", [b"\0" * 31, b"\0" * 32, struct.pack("<4i16s", 1, 0, -1, 12, bytes(16))])
def test_flat_bytes_that_are_no_program_are_refused(flat: bytes) -> None:
    with pytest.raises(LocalProtocolError):
        program_of_flat(flat, input_per_slot=False)


def test_tensor_numbers_never_change() -> None:
    assert TENSOR_SUFFIXES == (
        "ffn_gate_exps.weight",
        "ffn_gate_exps.scale",
        "ffn_gate_exps.bias",
        "ffn_up_exps.weight",
        "ffn_up_exps.scale",
        "ffn_up_exps.bias",
        "ffn_down_exps.weight",
        "ffn_down_exps.scale",
        "ffn_down_exps.bias",
        "ffn_gate_up_exps.weight",
        "ffn_gate_up_exps.scale",
        "ffn_gate_up_exps.bias",
    )
