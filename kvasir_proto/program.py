"""Expert programs: what a worker computes for one (token, slot) pair, as a short list of whitelisted steps.

Decides the form of a program, when one is well formed, and its canonical bytes. A program is read out of
the sub-graph that llama.cpp builds for a MoE layer (`kvasir_node.backbone.hook`), so no architecture is
special, and is rebuilt by every kernel on the rows it was sent. Every value is one row of floats a pair:
value 0 is the pair's input row, value i the result of step i, and the last step's value is the output row.
Experts' tensors are named by suffix (`ffn_up_exps.weight`); which slice is meant is the pair's expert.

Apart from messages because it also names what a shard must contain. It refuses to know shapes of any one
layer (`row_widths` fits a program to some), ggml's graphs, and where rows come from.
"""

from __future__ import annotations

import enum
import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError

PROGRAM_VERSION: Final = 1
"""Version of the steps' meaning, of the numbers below and of the bytes."""

PROGRAM_STEPS_MAX: Final = 32
PROGRAM_MATMULS_MAX: Final = 8
PROGRAM_SIZE_BYTES_MAX: Final = 4096
ROW_WIDTH_MAX: Final = 1 << 24
"""The widest row of floats a program may work on."""

ABSENT: Final = -1
"""The input of a step that takes none."""

TENSOR_PARTS: Final = ("gate", "up", "down", "gate_up")
TENSOR_KINDS: Final = ("weight", "scale", "bias")
TENSOR_SUFFIXES: Final = tuple(f"ffn_{part}_exps.{kind}" for part in TENSOR_PARTS for kind in TENSOR_KINDS)
"""Every tensor that a step may name; its index is the tensor's number in the flat form."""


class StepOp(enum.IntEnum):
    """What a step does with value `a`, value `b` and the pair's expert's slice `t` of its tensor.

    `params` are four little-endian 32-bit words, integers or floats as said; words not named are zero.
    """

    EXPERT_MATMUL = 1
    """t · a. Words 0 and 3: the precision ggml was asked for, of the sum and of a (see `PRECISIONS`)."""
    EXPERT_ADD = 2
    """a + t, a bias row."""
    EXPERT_SCALE = 3
    """t itself, one float; no input."""
    GLU = 4
    """Gated unit. Word 0: `GluKind`; 1: swapped; floats 2, 3: alpha, limit. Gate a, up b; or halves of a."""
    UNARY = 5
    """Word 0: `UnaryKind`."""
    SQUARE = 6
    """a²."""
    CLAMP = 7
    """Floats 0, 1: minimum and maximum."""
    LINEAR = 8
    """a · float 0 + float 1."""
    MULTIPLY = 9
    """a · b; b is as wide as a, or one float."""
    SLICE = 10
    """Words 0, 1: first element and width."""


class GluKind(enum.IntEnum):
    """Gated units, numbered as ggml 0.25.3 does."""

    REGLU = 0
    GEGLU = 1
    SWIGLU = 2
    SWIGLU_OAI = 3
    GEGLU_ERF = 4
    GEGLU_QUICK = 5
    SWIGLU_CLAMP = 6


class UnaryKind(enum.IntEnum):
    """Functions of one number, numbered as ggml 0.25.3 does."""

    ABS = 0
    SGN = 1
    NEG = 2
    STEP = 3
    TANH = 4
    ELU = 5
    RELU = 6
    SIGMOID = 7
    GELU = 8
    GELU_QUICK = 9
    SILU = 10
    HARDSWISH = 11
    HARDSIGMOID = 12
    EXP = 13
    EXPM1 = 14
    SOFTPLUS = 15
    GELU_ERF = 16


PRECISIONS: Final = frozenset((0, 10, 15, 20, 30, 40))
"""ggml's precision words: unsaid, F32, BF16, F16, Q8, Q4."""

NO_PARAMS: Final = bytes(16)

_PARAMS_SIZE_BYTES: Final = 16
_FLAT_STEP: Final = struct.Struct("<4i16s")

_TENSOR_KIND_OF_OP: Final = {
    StepOp.EXPERT_MATMUL: "weight",
    StepOp.EXPERT_ADD: "bias",
    StepOp.EXPERT_SCALE: "scale",
}


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One step. Inputs are numbers of earlier values, or `ABSENT`; `tensor` is a suffix, or empty."""

    op: StepOp
    input_a: int
    input_b: int = ABSENT
    tensor: str = ""
    params: bytes = NO_PARAMS

    def words(self) -> tuple[int, int, int, int]:
        """The parameters read as signed integers."""
        return struct.unpack("<4i", self.params)

    def floats(self) -> tuple[float, float, float, float]:
        """The parameters read as floats."""
        return struct.unpack("<4f", self.params)


@dataclass(frozen=True, slots=True)
class ExpertProgram:
    """A well formed program; `LocalProtocolError` says what is wrong with any other.

    `input_per_slot` is true where every slot of a token has an input row of its own (weights applied before
    the experts), false where a token's slots share one.
    """

    steps: tuple[ProgramStep, ...]
    input_per_slot: bool

    def __post_init__(self) -> None:
        try:
            _check_program(self.steps)
        except ValueError as error:
            raise LocalProtocolError(f"expert program: {error}") from error

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The tensors it needs, in the order of `TENSOR_SUFFIXES`."""
        named = {step.tensor for step in self.steps if step.tensor}
        return tuple(suffix for suffix in TENSOR_SUFFIXES if suffix in named)

    def row_widths(self, shape_of: Callable[[str], Sequence[int] | None]) -> tuple[int, ...]:
        """The width in floats of every value, input row first, for tensors of these shapes.

        `shape_of` gives a tensor's shape in ggml's order with the experts last ([in, out, experts] of a
        weight, [width, experts] of a bias, [experts] of a scale), or None where there is no such tensor.
        Raises `RemoteProtocolError` (`program_unfit`) when the program does not fit.
        """
        try:
            return _row_widths(self.steps, shape_of)
        except ValueError as error:
            raise RemoteProtocolError(f"expert program: {error}", "program_unfit") from error

    def encode(self) -> bytes:
        """The canonical bytes (a msgpack array)."""
        return bytes(
            msgpack.packb(
                [
                    "kvasir/expert-program",
                    PROGRAM_VERSION,
                    self.input_per_slot,
                    [[int(s.op), s.input_a, s.input_b, s.tensor, s.params] for s in self.steps],
                ],
                use_bin_type=True,
            )
        )

    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return hashlib.sha256(self.encode()).digest()

    def flat(self) -> bytes:
        """The steps as the native library takes them: 32 bytes each."""
        return b"".join(
            _FLAT_STEP.pack(
                step.op,
                step.input_a,
                step.input_b,
                TENSOR_SUFFIXES.index(step.tensor) if step.tensor else ABSENT,
                step.params,
            )
            for step in self.steps
        )


def program_of_flat(flat: bytes, input_per_slot: bool) -> ExpertProgram:
    """The program of steps in the native library's form; `LocalProtocolError` if it is not well formed."""
    try:
        steps = tuple(
            ProgramStep(StepOp(op), a, b, _suffix_of(tensor), params)
            for op, a, b, tensor, params in _FLAT_STEP.iter_unpack(flat)
        )
    except (ValueError, struct.error) as error:
        raise LocalProtocolError(f"expert program: not in the flat form ({error})") from error
    return ExpertProgram(steps, input_per_slot)


def _suffix_of(number: int) -> str:
    """The suffix that has this number in the flat form; empty for `ABSENT`."""
    _require(ABSENT <= number < len(TENSOR_SUFFIXES), f"tensor {number} is not a routed expert's")
    return TENSOR_SUFFIXES[number] if number != ABSENT else ""


def decode_program(data: bytes) -> ExpertProgram:
    """The program in `data`; `RemoteProtocolError` for anything but one whole canonical program."""
    if len(data) > PROGRAM_SIZE_BYTES_MAX:
        raise RemoteProtocolError("expert program: too large", "program_invalid")
    try:
        program = _program_of(msgpack.unpackb(data, use_list=True, raw=False, strict_map_key=True))
    except (TypeError, OverflowError, RecursionError) as error:  # Python's words say nothing of the bytes
        raise RemoteProtocolError("expert program: not well formed", "program_invalid") from error
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"expert program: not well formed ({error})", "program_invalid") from error
    except LocalProtocolError as error:
        raise RemoteProtocolError(str(error), "program_invalid") from error
    if program.encode() != data:
        raise RemoteProtocolError("expert program: not the canonical encoding", "program_invalid")
    return program


def _program_of(parts: Any) -> ExpertProgram:
    _require(isinstance(parts, list) and len(parts) == 4, "a program has 4 parts")
    _require(parts[0] == "kvasir/expert-program", "it is something else")
    _require(type(parts[1]) is int, "its version is not a number")
    _require(parts[1] == PROGRAM_VERSION, f"version {parts[1]} is not known")
    _require(type(parts[2]) is bool and type(parts[3]) is list, "its parts have wrong types")
    _require(len(parts[3]) <= PROGRAM_STEPS_MAX, "it has too many steps")
    return ExpertProgram(tuple(_step_of(each) for each in parts[3]), parts[2])


def _step_of(parts: Any) -> ProgramStep:
    _require(type(parts) is list and len(parts) == 5, "a step has 5 parts")
    op, input_a, input_b, tensor, params = parts
    _require(type(op) is int and type(input_a) is int and type(input_b) is int, "a number is not an integer")
    _require(type(tensor) is str and type(params) is bytes, "a step's parts have wrong types")
    return ProgramStep(StepOp(op), input_a, input_b, tensor, params)


def _check_program(steps: tuple[ProgramStep, ...]) -> None:
    """ValueError, naming the step, when the steps are no program. `native/src/program.cpp` checks alike."""
    _require(1 <= len(steps) <= PROGRAM_STEPS_MAX, f"a program has 1 to {PROGRAM_STEPS_MAX} steps")
    used: set[int] = set()
    for index, step in enumerate(steps):
        try:
            _require(isinstance(step.op, StepOp), "the operation is not known")
            _require(len(step.params) == _PARAMS_SIZE_BYTES, "the parameters are not four words")
            _check_tensor(step)
            _check_inputs(step, steps[:index])
            _check_params(step)
        except ValueError as error:
            raise ValueError(f"step {index + 1}: {error}") from error
        used.update((step.input_a, step.input_b))
    _require(used >= set(range(len(steps))), "a value is not used")
    n_matmul = sum(step.op is StepOp.EXPERT_MATMUL for step in steps)
    _require(n_matmul <= PROGRAM_MATMULS_MAX, f"it has more than {PROGRAM_MATMULS_MAX} matrix products")
    _require(steps[-1].op not in (StepOp.SLICE, StepOp.EXPERT_SCALE), "the last step cannot be an output")


def _check_tensor(step: ProgramStep) -> None:
    kind = _TENSOR_KIND_OF_OP.get(step.op)
    if kind is None:
        _require(not step.tensor, "it names a tensor that it cannot use")
    else:
        _require(step.tensor in TENSOR_SUFFIXES, "its tensor is not a routed expert's")
        _require(step.tensor.endswith(f".{kind}"), f"{step.tensor} is not a {kind}")


def _check_inputs(step: ProgramStep, earlier: tuple[ProgramStep, ...]) -> None:
    if step.op is StepOp.EXPERT_SCALE:
        _require(step.input_a == ABSENT and step.input_b == ABSENT, "it takes an input it has no use for")
        return
    first = 0 if step.op is StepOp.EXPERT_MATMUL else 1
    _require(first <= step.input_a <= len(earlier), "its input is not an earlier value")
    if step.input_b == ABSENT:
        _require(step.op is not StepOp.MULTIPLY, "it has one input too few")
    else:
        _require(step.op in (StepOp.MULTIPLY, StepOp.GLU), "it has one input too many")
        _require(1 <= step.input_b <= len(earlier), "its input is not an earlier value")
    if step.input_a > 0 and earlier[step.input_a - 1].op is StepOp.SLICE:
        _require(step.op not in (StepOp.SLICE, StepOp.LINEAR), "it cannot work on a slice")


def _check_params(step: ProgramStep) -> None:
    words = step.words()
    floats = step.floats()
    used = 0
    match step.op:
        case StepOp.EXPERT_MATMUL:
            used = 4
            _require(words[1] == 0 and words[2] == 0, "the precision is not known")
            _require(words[0] in PRECISIONS and words[3] in PRECISIONS, "the precision is not known")
        case StepOp.GLU:
            used = 4
            GluKind(words[0])
            _require(words[1] == 0 or (words[1] == 1 and step.input_b == ABSENT), "it cannot be swapped")
            _require(math.isfinite(floats[2]) and math.isfinite(floats[3]), "alpha or limit is not finite")
        case StepOp.UNARY:
            used = 1
            UnaryKind(words[0])
        case StepOp.CLAMP:
            used = 2
            _require(floats[0] <= floats[1], "the clamp has no range")
        case StepOp.LINEAR:
            used = 2
            _require(math.isfinite(floats[0]) and math.isfinite(floats[1]), "a factor is not finite")
        case StepOp.SLICE:
            used = 2
            _require(words[0] >= 0 and words[1] > 0, "the slice is empty")
    _require(not any(words[used:]), "it has parameters that it cannot use")


def _row_widths(
    steps: tuple[ProgramStep, ...], shape_of: Callable[[str], Sequence[int] | None]
) -> tuple[int, ...]:
    widths = [0]
    for index, step in enumerate(steps):
        try:
            widths.append(_row_width(step, widths, shape_of))
        except ValueError as error:
            raise ValueError(f"step {index + 1}: {error}") from error
        _require(0 < widths[-1] <= ROW_WIDTH_MAX, f"step {index + 1}: the row is too wide")
    return tuple(widths)


def _row_width(step: ProgramStep, widths: list[int], shape_of: Callable[[str], Sequence[int] | None]) -> int:
    """Width of the step's value; sets widths[0] at the first matrix product of the input row."""
    a = widths[step.input_a] if step.input_a != ABSENT else 0
    b = widths[step.input_b] if step.input_b != ABSENT else 0
    shape: Sequence[int] = ()
    if step.tensor:
        found = shape_of(step.tensor)
        if found is None:
            raise ValueError(f"the layer has no {step.tensor}")
        shape = found
        n_dims = 1 + {"weight": 2, "bias": 1, "scale": 0}[_TENSOR_KIND_OF_OP[step.op]]
        _require(len(shape) == n_dims, f"{step.tensor} has {len(shape)} dimensions")
    match step.op:
        case StepOp.EXPERT_MATMUL:
            if step.input_a == 0 and widths[0] == 0:
                widths[0] = a = shape[0]
            _require(a == shape[0], "the row is not as wide as the weights")
            return shape[1]
        case StepOp.EXPERT_ADD:
            _require(a == shape[0], "the row is not as wide as the bias")
            return a
        case StepOp.EXPERT_SCALE:
            return 1
        case StepOp.GLU:
            if step.input_b == ABSENT:
                _require(a % 2 == 0, "the row cannot be halved")
                return a // 2
            _require(a == b, "gate and up differ in width")
            return a
        case StepOp.MULTIPLY:
            _require(b in (a, 1), "the factors differ in width")
            return a
        case StepOp.SLICE:
            first, width = step.words()[:2]
            _require(first + width <= a, "the slice reaches past the row")
            return width
    return a


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)
