"""The reference kernel: expert programs in numpy, slowly and plainly, for other kernels to be measured by.

Decides what an expert program *means*. `Arithmetic` says in which numbers: the exact answer (float64), plain
float32, or ggml's class, where activations are rounded as ggml rounds them before each product and everything
else is as exact as F32 results allow. Another format of activations, or an emulated accumulator
(`accumulators.py`), makes it any other class. It is no backend to serve from: weights are expanded on every
call. It refuses to know files, and gets bytes from a function as every kernel does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from kvasir_node.kernels.accumulators import Accumulator
from kvasir_node.kernels.activation_formats import (
    ACTIVATION_FORMATS,
    ROUNDINGS_OF_PROCESSOR,
    USUAL_PROCESSOR,
)
from kvasir_node.kernels.addressed_arrays import array_at
from kvasir_node.kernels.expert_functions import Rows, glu, unary
from kvasir_proto.errors import EngineFailed, LocalProtocolError, RemoteProtocolError
from kvasir_proto.manifest import ManifestTensor, ModelManifest, ShardSet
from kvasir_proto.program import ABSENT, ExpertProgram, GluKind, ProgramStep, StepOp, UnaryKind

PAIRS_MAX: Final = 1 << 20
PROGRAMS_MAX: Final = 256
PART_VALUES: Final = 1 << 17
"""Of a weight, expanded at a time."""

Read = Callable[[str, int], bytes | bytearray | memoryview]
Numbers = npt.NDArray[np.int32]


class Arithmetic(enum.Enum):
    """In which numbers the reference computes."""

    FLOAT64 = "float64"
    """Activations as they are, everything in float64: the exact answer, to 1e-15."""
    FLOAT32 = "float32"
    """Activations as they are, everything in float32, sums in numpy's order."""
    AS_GGML = "as-ggml"
    """Activations rounded as ggml does for the weights' type; products exact, each step's result F32."""


class ReferenceKernel:
    """A shard's experts as bytes, expanded when used. See `port.ExpertKernel` for what each call guarantees.

    Threads may not share one.
    """

    backend = "reference"

    def __init__(
        self,
        manifest: ModelManifest,
        shard: ShardSet,
        read: Read,
        arithmetic: Arithmetic = Arithmetic.FLOAT64,
        accumulator: Accumulator | None = None,
        activations: str | None = None,
        processor: str = USUAL_PROCESSOR,
    ) -> None:
        """Load `shard`. `read(tensor name, expert)` gives one expert's slice of a tensor, already verified.

        Matrix products are added up by `accumulator` if there is one, else exactly as `arithmetic` allows.
        With `activations`, a name of `ACTIVATION_ROUNDINGS`, every product takes its rows in that format.
        Formats are rounded as ggml does on `processor`, a name of `ROUNDINGS_OF_PROCESSOR`.

        Raises `EngineFailed` for a tensor type that cannot be expanded, or has no activation format where
        one is needed; `LocalProtocolError` for a shard that is not of this model.
        """
        self._arithmetic = arithmetic
        self._accumulator = accumulator
        self._activations = activations
        self.round_as_on(processor)
        self._shard = shard
        self._programs: list[ExpertProgram] = []
        self._tensors: dict[int, dict[str, ManifestTensor]] = {}
        self._bytes: dict[tuple[int, str, int], bytes] = {}
        if not set(shard.layers) <= set(manifest.moe_layers):
            raise LocalProtocolError("the shard names a layer without routed experts")
        for layer in shard.layers:
            tensors = {each.suffix or "": each for each in manifest.expert_tensors(layer)}
            self._tensors[layer] = tensors
            for suffix, tensor in tensors.items():
                self._require_computable(tensor)
                for expert in shard.experts_of(layer):
                    data = bytes(read(tensor.name, expert))
                    if len(data) != tensor.expert_size_bytes:
                        raise EngineFailed(f"the shard cannot be loaded: {tensor.name} has a wrong size")
                    self._bytes[layer, suffix, expert] = data

    def round_as_on(self, processor: str) -> None:
        """From now on formats are rounded as ggml does there, a name of `ROUNDINGS_OF_PROCESSOR`."""
        self._roundings = ROUNDINGS_OF_PROCESSOR[processor]

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights held, as they are in the file."""
        return sum(map(len, self._bytes.values()))

    def add_program(self, program: ExpertProgram) -> int:
        """Make a program known and return its number, counted from 0 in the order of first adding."""
        if program in self._programs:
            return self._programs.index(program)
        if len(self._programs) >= PROGRAMS_MAX:
            raise RemoteProtocolError("there are too many different programs", "program_unfit")
        misfit = RemoteProtocolError("no layer is held that the program could fit", "program_unfit")
        for layer in reversed(self._shard.layers):
            try:
                program.row_widths(self._shape_of(layer))
            except RemoteProtocolError as error:
                misfit = error
            else:
                self._programs.append(program)
                return len(self._programs) - 1
        raise misfit

    def row_widths(self, layer: int, program_index: int) -> tuple[int, int]:
        """Floats of an input row and of an output row."""
        if layer not in self._tensors:
            raise RemoteProtocolError(f"layer {layer} is not held", "unknown_layer")
        if not 0 <= program_index < len(self._programs):
            raise RemoteProtocolError(f"program {program_index} is not known", "unknown_program")
        widths = self._programs[program_index].row_widths(self._shape_of(layer))
        return widths[0], widths[-1]

    def compute(
        self,
        layer: int,
        program_index: int,
        n_rows: int,
        n_pairs: int,
        x_address: int,
        row_of_pair_address: int,
        expert_of_pair_address: int,
        out_address: int,
    ) -> None:
        """Run a program on gathered rows; see the port."""
        width_in, width_out = self.row_widths(layer, program_index)
        if not 1 <= n_rows <= n_pairs <= PAIRS_MAX:
            raise RemoteProtocolError(f"{n_rows} rows in {n_pairs} pairs are out of range", "shape_invalid")
        x = array_at(x_address, np.float32, n_rows, width_in)
        rows = array_at(row_of_pair_address, np.int32, n_pairs)
        experts = array_at(expert_of_pair_address, np.int32, n_pairs)
        out = array_at(out_address, np.float32, n_pairs, width_out)
        with np.errstate(over="ignore"):
            out[:] = self.compute_rows(layer, program_index, x, rows, experts)

    def compute_rows(
        self,
        layer: int,
        program_index: int,
        x: npt.NDArray[np.float32],
        row_of_pair: Numbers,
        expert_of_pair: Numbers,
    ) -> Rows:
        """As `compute`, on arrays, and without rounding to F32 what this arithmetic gives.

        `x` [rows, width in]; the result is [pairs, width out], float64 for `FLOAT64`, else float32.
        """
        width_in, width_out = self.row_widths(layer, program_index)
        if x.ndim != 2 or x.shape[1] != width_in or row_of_pair.shape != expert_of_pair.shape:
            raise RemoteProtocolError("the rows do not have the program's shape", "shape_invalid")
        if ((row_of_pair < 0) | (row_of_pair >= len(x))).any():
            raise RemoteProtocolError("a pair names a row that is not there", "row_out_of_range")
        held = set(self._shard.experts_of(layer))
        foreign = sorted(set(expert_of_pair.tolist()) - held)
        if foreign:
            raise RemoteProtocolError(f"expert {foreign[0]} of layer {layer} is not held", "foreign_expert")
        is_exact = self._arithmetic is Arithmetic.FLOAT64
        results: Rows = np.empty((len(row_of_pair), width_out), np.float64 if is_exact else np.float32)
        for expert in sorted(set(expert_of_pair.tolist())):
            mine = expert_of_pair == expert
            results[mine] = self.values(layer, self._programs[program_index], expert, x[row_of_pair[mine]])[
                -1
            ]
        return results

    def weight(self, layer: int, suffix: str, expert: int) -> npt.NDArray[np.float64]:
        """The numbers of one expert's slice of a tensor that is held, [out, in] of a weight."""
        return np.asarray(self._expanded(layer, suffix, expert), np.float64)

    def close(self) -> None:
        """Free the weights. Idempotent."""
        self._bytes.clear()
        self._tensors.clear()

    def values(
        self, layer: int, program: ExpertProgram, expert: int, x: npt.NDArray[np.float32]
    ) -> list[Rows]:
        """The program's values for rows `x` [rows, width in] of one expert that is held: the rows themselves,
        then what each step gives, [rows, width].
        """
        kept = np.float64 if self._arithmetic is Arithmetic.FLOAT64 else np.float32
        worked = np.float32 if self._arithmetic is Arithmetic.FLOAT32 else np.float64
        values: list[Rows] = [x.astype(kept)]
        # Overflow, and what comes of it, is a result like any other: the caller judges it.
        with np.errstate(all="ignore"):
            for step in program.steps:
                a = values[step.input_a].astype(worked) if step.input_a != ABSENT else None
                b = values[step.input_b].astype(worked) if step.input_b != ABSENT else None
                values.append(self._step(layer, expert, step, a, b, len(x)).astype(kept))
        return values

    def _step(
        self, layer: int, expert: int, step: ProgramStep, a: Rows | None, b: Rows | None, n_pairs: int
    ) -> Rows:
        """The value of one step, in the arithmetic's working precision."""
        if step.op is StepOp.EXPERT_SCALE:
            return np.broadcast_to(self._expanded(layer, step.tensor, expert), (n_pairs, 1))
        if a is None:
            raise AssertionError("a well formed program gives every other step an input")
        floats, words = step.floats(), step.words()
        as_ggml = self._arithmetic is Arithmetic.AS_GGML
        match step.op:
            case StepOp.EXPERT_MATMUL:
                form = self._activations_of(self._tensors[layer][step.tensor])
                if form is not None:
                    a = self._roundings[form](a.astype(np.float32))
                parts = self._expanded_parts(layer, step.tensor, expert)
                return np.concatenate([self._product(a, part) for part in parts], axis=1)
            case StepOp.EXPERT_ADD:
                return a + self._expanded(layer, step.tensor, expert)
            case StepOp.GLU:
                if b is None:
                    a, b = np.split(a, 2, axis=1)
                    if words[1]:
                        a, b = b, a
                return glu(GluKind(words[0]), a, b, floats[2], floats[3], as_ggml=as_ggml)
            case StepOp.UNARY:
                return unary(UnaryKind(words[0]), a, as_ggml=as_ggml)
            case StepOp.SQUARE:
                return a * a
            case StepOp.CLAMP:
                return np.clip(a, floats[0], floats[1])
            case StepOp.LINEAR:
                return a * floats[0] + floats[1]
            case StepOp.MULTIPLY if b is not None:
                return a * b
            case StepOp.SLICE:
                return a[:, words[0] : words[0] + words[1]]
        raise AssertionError(f"a well formed program has no step {step}")

    def _product(self, a: Rows, weight: Rows) -> Rows:
        """Rows `a` [rows, in] with some of a weight's rows [out, in]: [rows, out]."""
        return a @ weight.T if self._accumulator is None else self._accumulator.add_up(a, weight)

    def _expanded(self, layer: int, suffix: str, expert: int) -> Rows:
        """One expert's slice of a tensor as numbers: [out, in] of a weight, [1, width] of anything else."""
        return np.concatenate(list(self._expanded_parts(layer, suffix, expert)))

    def _expanded_parts(self, layer: int, suffix: str, expert: int) -> Iterator[Rows]:
        """The same, some of its rows at a time, which stay in a processor's cache."""
        tensor = self._tensors[layer][suffix]
        n_row = tensor.shape[1] if len(tensor.shape) == 3 else 1
        data = np.frombuffer(self._bytes[layer, suffix, expert], np.uint8).reshape(n_row, -1)
        n_part = max(1, PART_VALUES // tensor.shape[0])
        for first in range(0, n_row, n_part):
            values = quants.dequantize(data[first : first + n_part], GGMLQuantizationType(tensor.type.id))
            yield np.asarray(values, np.float32 if self._arithmetic is Arithmetic.FLOAT32 else np.float64)

    def _activations_of(self, tensor: ManifestTensor) -> str | None:
        """The format in which products with this tensor take their rows; None for rows as they are."""
        if self._activations is None and self._arithmetic is Arithmetic.AS_GGML:
            return ACTIVATION_FORMATS[tensor.type.name]
        return self._activations

    def _require_computable(self, tensor: ManifestTensor) -> None:
        name = tensor.type.name
        try:
            one_block = np.zeros((1, tensor.type.block_size_bytes), np.uint8)
            with np.errstate(all="ignore"):
                quants.dequantize(one_block, GGMLQuantizationType(tensor.type.id))
        except (ValueError, NotImplementedError) as error:
            raise EngineFailed(f"the reference kernel cannot expand {name} ({tensor.name})") from error
        knows_format = self._activations is not None or name in ACTIVATION_FORMATS
        if self._arithmetic is Arithmetic.AS_GGML and not knows_format:
            raise EngineFailed(
                f"the reference kernel does not know how ggml multiplies {name} ({tensor.name})"
            )

    def _shape_of(self, layer: int) -> Callable[[str], tuple[int, ...] | None]:
        tensors = self._tensors[layer]
        return lambda suffix: tensors[suffix].shape if suffix in tensors else None
