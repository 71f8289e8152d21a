"""One call of an expert program on an OpenCL device: which of our kernels runs for which step.

Decides nothing but that. Every value of a program lies in a register of its own (`value_registers`), input
rows apart; products read their input in the activation format of their weights' type, rounded once however
often it is read. Apart from the expert kernel, which has checked everything beforehand and knows shards. It
refuses to know where weights come from, and whether a call is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvasir_node.kernels.activation_formats import ACTIVATION_FORMATS
from kvasir_node.kernels.opencl_activations import RoundedRows, round_rows
from kvasir_node.kernels.opencl_queue import Buffer, OpenClQueue, Scratch
from kvasir_proto.manifest import ManifestTensor
from kvasir_proto.program import ABSENT, ExpertProgram, ProgramStep, StepOp

TILE: Final = 4
"""Pairs of one expert that share one reading of its weights, at most."""

Numbers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor of a layer on the device: the held experts' parts, one behind the other."""

    tensor: ManifestTensor
    buffer: Buffer
    row_bytes: int


@dataclass(frozen=True, slots=True)
class PairTables:
    """What every kernel of a call reads of its pairs; native/kernels/products.cl says how it lies there."""

    n_rows: int
    n_pairs: int
    n_shared: int
    n_ones: int
    numbers: Numbers


def tables_of(row_of_pair: Numbers, local_of_pair: Numbers, n_rows: int) -> PairTables:
    """The tables of pairs whose experts are given by their places among those that are held."""
    order = np.argsort(local_of_pair, kind="stable").astype(np.int32)
    changes = np.flatnonzero(np.diff(local_of_pair[order])) + 1
    shared: list[int] = []
    ones: list[int] = []
    for first, end in zip([0, *changes.tolist()], [*changes.tolist(), len(order)], strict=True):
        for begin in range(first, end, TILE):
            size = min(TILE, end - begin)
            (ones if size == 1 else shared).extend((begin, begin + size))
    tiles = np.array(shared + ones, np.int32)
    return PairTables(
        n_rows,
        len(order),
        len(shared) // 2,
        len(ones) // 2,
        np.concatenate([row_of_pair, local_of_pair, order, tiles]).astype(np.int32),
    )


@dataclass(frozen=True, slots=True)
class FittedProgram:
    """A program, the register and the width of each of its values, and the tensors of the layer it fits."""

    program: ExpertProgram
    registers: tuple[int, ...]
    widths: tuple[int, ...]
    tensors: Mapping[str, HeldTensor]


class StepRunner:
    """Runs programs on one device, with sums of one kind; ``functions`` are ggml's two tables of results."""

    def __init__(self, queue: OpenClQueue, accumulator: str, functions: Buffer) -> None:
        self._queue = queue
        self._accumulator = accumulator
        self._functions = functions
        self._scratch = Scratch(queue)

    def run(self, fitted: FittedProgram, x: npt.NDArray[np.float32], tables: PairTables) -> Buffer:
        """Start everything and give the buffer that will have the result, [pairs, width out] in F32.

        PyOpenCL's errors pass. One call at a time: the next one takes the same memory.
        """
        call = _Call(
            self._queue,
            self._scratch,
            fitted,
            tables,
            self._scratch.take("tables", 0, tables.numbers.nbytes),
            self._accumulator,
            self._functions,
        )
        self._queue.write(call.tables_buffer, tables.numbers)
        given = self._scratch.take("x", 0, x.nbytes)
        self._queue.write(given, x)
        call.values.append(given)
        for number, step in enumerate(fitted.program.steps, 1):
            call.values.append(call.register_of(number))
            call.start(step, number)
        return call.values[-1]


class _Call:
    def __init__(
        self,
        queue: OpenClQueue,
        scratch: Scratch,
        fitted: FittedProgram,
        tables: PairTables,
        tables_buffer: Buffer,
        accumulator: str,
        functions: Buffer,
    ) -> None:
        self.queue = queue
        self.scratch = scratch
        self.fitted = fitted
        self.tables = tables
        self.tables_buffer = tables_buffer
        self.accumulator = accumulator
        self.functions = functions
        self.values: list[Buffer] = []
        self.rounded: dict[tuple[int, str], RoundedRows] = {}

    def register_of(self, value: int) -> Buffer:
        """The memory of a value: as wide as the widest that lives there."""
        registers, widths = self.fitted.registers, self.fitted.widths
        mine = registers[value - 1]
        widest = max(width for width, register in zip(widths[1:], registers, strict=True) if register == mine)
        return self.scratch.take("register", mine, 4 * self.tables.n_pairs * widest)

    def start(self, step: ProgramStep, value: int) -> None:
        """Start one step; its value is number ``value``."""
        out, width = self.values[value], self.fitted.widths[value]
        words, floats = step.words(), step.floats()
        a_width = self.fitted.widths[step.input_a] if step.input_a != ABSENT else 0
        a = self.values[step.input_a] if step.input_a != ABSENT else None
        b = self.values[step.input_b] if step.input_b != ABSENT else None
        pairs = (self.tables_buffer, np.int32(self.tables.n_pairs))
        match step.op:
            case StepOp.EXPERT_MATMUL:
                self._multiply(self.fitted.tensors[step.tensor], step.input_a, out)
            case StepOp.EXPERT_ADD:
                bias = self.fitted.tensors[step.tensor].buffer
                self._each("add_bias", width, a, np.int32(width), bias, *pairs, out)
            case StepOp.EXPERT_SCALE:
                self._each("take_scale", 1, self.fitted.tensors[step.tensor].buffer, *pairs, out)
            case StepOp.GLU:
                first = np.array(
                    (0, 0) if b is not None else (width, 0) if words[1] else (0, width), np.int32
                )
                ups = b if b is not None else a
                self._each(
                    "gated_unit",
                    width,
                    *(a, np.int32(a_width), first[0], ups, np.int32(a_width), first[1], np.int32(width)),
                    *(np.int32(words[0]), np.float32(floats[2]), np.float32(floats[3]), self.functions, out),
                )
            case StepOp.UNARY:
                kind = np.int32(words[0])
                self._each("apply_function", width, a, np.int32(width), kind, self.functions, out)
            case StepOp.SQUARE:
                self._each("square", width, a, np.int32(width), out)
            case StepOp.CLAMP:
                self._each("clamp_between", width, a, np.int32(width), *map(np.float32, floats[:2]), out)
            case StepOp.LINEAR:
                self._each("linear", width, a, np.int32(width), *map(np.float32, floats[:2]), out)
            case StepOp.MULTIPLY:
                b_width = np.int32(self.fitted.widths[step.input_b])
                self._each("multiply", width, a, np.int32(width), b, b_width, out)
            case StepOp.SLICE:
                self._each("slice", width, a, np.int32(a_width), np.int32(words[0]), np.int32(width), out)
            case _:
                raise AssertionError(f"a well formed program has no step {step}")

    def _each(self, kernel: str, width: int, *arguments: Any) -> None:
        """Start a kernel of steps.cl for each number of each pair."""
        self.queue.start(self.queue.build("steps.cl")[kernel], width, self.tables.n_pairs, *arguments)

    def _multiply(self, held: HeldTensor, value: int, out: Buffer) -> None:
        rounded = self._rounded(value, ACTIVATION_FORMATS[held.tensor.type.name])
        n_in, n_out = held.tensor.shape[0], held.tensor.shape[1]
        kinds = (f"WEIGHTS_{held.tensor.type.name.upper()}", f"SUMS_{self.accumulator}")
        for size, first, n_tiles in (
            (TILE, 0, self.tables.n_shared),
            (1, self.tables.n_shared, self.tables.n_ones),
        ):
            if n_tiles:
                self.queue.start(
                    self.queue.build("products.cl", *kinds, f"TILE={size}")["multiply"],
                    n_out,
                    n_tiles,
                    *(held.buffer, np.uint64(held.row_bytes), np.int32(n_in), np.int32(n_out)),
                    *(rounded.numbers, np.int32(rounded.form.stride(n_in)), rounded.steps),
                    *(np.int32(value == 0), self.tables_buffer, np.int32(self.tables.n_pairs)),
                    *(np.int32(first), out),
                )

    def _rounded(self, value: int, name: str) -> RoundedRows:
        """A value in an activation format; an input row that pairs share is rounded once."""
        there = self.rounded.get((value, name))
        if there is None:
            n_rows = self.tables.n_rows if value == 0 else self.tables.n_pairs
            there = self.rounded[value, name] = round_rows(
                self.queue,
                self.scratch,
                len(self.rounded),
                name,
                self.values[value],
                n_rows,
                self.fitted.widths[value],
            )
        return there
