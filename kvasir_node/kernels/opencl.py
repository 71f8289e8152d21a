"""The expert kernel on an OpenCL device, with kernels of our own (native/kernels).

Decides where a shard's experts lie on the device, and checks a call before the device sees it. In the
reference class: activations are rounded as ggml rounds them for the weights' type. As in ggml's CPU backend a
graph's wishes for precision change nothing; in what products are added is chosen when the kernel is made, and
anything but F32 is there to be measured. A row is added up in one order, whatever else is in the call. It
refuses to know files, digests and networks.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kvasir_node.kernels.activation_formats import ACTIVATION_FORMATS
from kvasir_node.kernels.addressed_arrays import array_at
from kvasir_node.kernels.expert_functions import unary
from kvasir_node.kernels.opencl_activations import FORMATS, require_ggmls_rounding
from kvasir_node.kernels.opencl_devices import ANY_DEVICE
from kvasir_node.kernels.opencl_queue import Buffer, OpenClQueue
from kvasir_node.kernels.opencl_steps import (
    TILE,
    FittedProgram,
    HeldTensor,
    Numbers,
    StepRunner,
    tables_of,
)
from kvasir_node.kernels.value_registers import assign_registers
from kvasir_proto.errors import EngineFailed, KvasirError, LocalProtocolError, RemoteProtocolError
from kvasir_proto.manifest import ManifestTensor, ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram, ProgramStep, StepOp, UnaryKind

PROGRAMS_MAX: Final = 256
PAIRS_MAX: Final = 65536
"""As ggml's kernel: more than any ubatch has."""

WEIGHT_TYPES: Final = ("f32", "f16", "q8_0", "q4_K")
"""The types of weights that our kernels expand."""

Read = Callable[[str, int], bytes | bytearray | memoryview]


class Accumulator(enum.Enum):
    """In what the products of a matrix product are added."""

    F32 = "F32"
    F16 = "F16"
    """Each sum rounded to F16: by the device itself where it computes in F16, else after each step."""
    MIXED = "MIXED"
    """F16 inside blocks of 256 columns, F32 across them."""


@dataclass(slots=True)
class _Layer:
    """The held experts of a layer; ``local`` has each expert's place among them, or -1."""

    local: Numbers
    tensors: dict[str, HeldTensor]
    fitted: dict[int, FittedProgram] = field(default_factory=dict)
    """By the program's number."""

    def shape_of(self, suffix: str) -> tuple[int, ...] | None:
        return self.tensors[suffix].tensor.shape if suffix in self.tensors else None

    def fit(self, program: ExpertProgram) -> FittedProgram:
        """Raises `RemoteProtocolError` (`program_unfit`) where it does not fit, or wants too much memory."""
        widths = program.row_widths(self.shape_of)
        return FittedProgram(program, assign_registers(program), widths, self.tensors)


class OpenClKernel:
    """A shard's experts on an OpenCL device. See `port.ExpertKernel` for what each call guarantees."""

    backend = "opencl"

    def __init__(
        self,
        manifest: ModelManifest,
        shard: ShardSet,
        read: Read,
        *,
        device: str = ANY_DEVICE,
        threads: int = 1,
        accumulator: Accumulator = Accumulator.F32,
    ) -> None:
        """Load `shard`. `read(tensor name, expert)` gives one expert's slice of a tensor, already verified.

        `threads` matter to processors only. Raises `ConfigurationInvalid` where there is no such device,
        `EngineFailed` without memory, for a type of weights that our kernels do not expand or a device that
        rounds otherwise than ggml, `LocalProtocolError` for a shard that is not of this model, and whatever
        `read` raises.
        """
        if not set(shard.layers) <= set(manifest.moe_layers):
            raise LocalProtocolError("the shard names a layer without routed experts")
        for layer in shard.layers:
            for tensor in manifest.expert_tensors(layer):
                _require_computable(tensor)
        self._programs: list[ExpertProgram] = []
        self._layers: dict[int, _Layer] = {}
        self._memory_bytes = 0
        self._lock = threading.Lock()
        self._queue: OpenClQueue | None = None
        queue = OpenClQueue(device, threads)
        require_ggmls_rounding(queue)
        with queue.failing("cannot hold the shard"):
            self._runner = StepRunner(queue, accumulator.value, _function_tables(queue))
            for layer in shard.layers:
                self._layers[layer] = self._load_layer(queue, manifest, layer, shard.experts_of(layer), read)
            queue.finish()
        self._queue = queue
        self.device_name = queue.device.name
        self._prepare_products()

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights held, with the columns that pad them."""
        self._opened()
        return self._memory_bytes

    def add_program(self, program: ExpertProgram) -> int:
        """Make a program known and return its number, counted from 0 in the order of first adding."""
        self._opened()
        if program in self._programs:
            return self._programs.index(program)
        if len(self._programs) >= PROGRAMS_MAX:
            raise RemoteProtocolError("there are too many different programs", "program_unfit")
        misfit: RemoteProtocolError | None = None
        for layer in self._layers.values():
            try:
                fitted = layer.fit(program)
            except RemoteProtocolError as error:
                misfit = misfit or error
            else:
                self._prepare(fitted)
                self._programs.append(program)
                return len(self._programs) - 1
        raise misfit or RemoteProtocolError("no layer is held that the program could fit", "program_unfit")

    def row_widths(self, layer: int, program_index: int) -> tuple[int, int]:
        """Floats of an input row and of an output row."""
        widths = self._fitted(layer, program_index)[1].widths
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
        held, fitted = self._fitted(layer, program_index)
        if not 1 <= n_rows <= n_pairs <= PAIRS_MAX:
            raise RemoteProtocolError(f"{n_rows} rows in {n_pairs} pairs are out of range", "shape_invalid")
        rows: Numbers = array_at(row_of_pair_address, np.int32, n_pairs)
        experts: Numbers = array_at(expert_of_pair_address, np.int32, n_pairs)
        if ((rows < 0) | (rows >= n_rows)).any():
            raise RemoteProtocolError("a pair names a row that is not there", "row_out_of_range")
        near = np.clip(experts, 0, len(held.local) - 1)
        local = np.where(near == experts, held.local[near], np.int32(-1))
        if (local < 0).any():
            raise RemoteProtocolError(f"expert {experts[local < 0][0]} is not held", "foreign_expert")
        x = array_at(x_address, np.float32, n_rows, fitted.widths[0])
        out = array_at(out_address, np.float32, n_pairs, fitted.widths[-1])
        with self._lock, self._working() as queue:
            queue.read(self._runner.run(fitted, x, tables_of(rows, local, n_rows)), out)

    def close(self) -> None:
        """Free the weights. Idempotent."""
        if self._queue is not None:
            self._queue = None
            del self._runner
            self._layers.clear()

    def _opened(self) -> OpenClQueue:
        if self._queue is None:
            raise LocalProtocolError("the kernel is closed")
        return self._queue

    @contextlib.contextmanager
    def _working(self) -> Iterator[OpenClQueue]:
        """A computation; whatever fails is `EngineFailed`, and nothing runs on that could read our memory."""
        queue = self._opened()
        try:
            with queue.failing("failed"):
                yield queue
        except KvasirError:
            with contextlib.suppress(KvasirError), queue.failing("failed"):
                queue.finish()
            raise

    def _prepare_products(self) -> None:
        """Have the device's compiler make the products that this shard needs, while nobody waits for rows."""
        prepared: set[str] = set()
        for layer in self._layers.values():
            for suffix, held in layer.tensors.items():
                if len(held.tensor.shape) == 3 and held.tensor.type.name not in prepared:
                    prepared.add(held.tensor.type.name)
                    step = ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor=suffix)
                    self._prepare(layer.fit(ExpertProgram((step,), input_per_slot=False)))

    def _prepare(self, fitted: FittedProgram) -> None:
        """Run a program on nothing, in both kinds of tiles: devices compile a kernel when it first runs."""
        for n_pairs in (1, TILE):
            x = np.zeros((1, fitted.widths[0]), np.float32)
            out = np.empty((n_pairs, fitted.widths[-1]), np.float32)
            nothing = np.zeros(n_pairs, np.int32)
            with self._lock, self._working() as queue:
                queue.read(self._runner.run(fitted, x, tables_of(nothing, nothing, 1)), out)

    def _fitted(self, layer: int, program_index: int) -> tuple[_Layer, FittedProgram]:
        """What a call is about. Raises `RemoteProtocolError` as `compute` does."""
        self._opened()
        held = self._layers.get(layer)
        if held is None:
            raise RemoteProtocolError(f"no expert of layer {layer} is held", "unknown_layer")
        if not 0 <= program_index < len(self._programs):
            raise RemoteProtocolError(f"program {program_index} is not known", "unknown_program")
        fitted = held.fitted.get(program_index)
        if fitted is None:
            fitted = held.fitted[program_index] = held.fit(self._programs[program_index])
        return held, fitted

    def _load_layer(
        self, queue: OpenClQueue, manifest: ModelManifest, layer: int, experts: Sequence[int], read: Read
    ) -> _Layer:
        if min(experts) < 0 or max(experts) >= manifest.n_expert:
            raise EngineFailed(f"the shard cannot be loaded: layer {layer} has {manifest.n_expert} experts")
        local = np.full(manifest.n_expert, -1, np.int32)
        local[list(experts)] = np.arange(len(experts))
        tensors = {
            each.suffix or "": self._load_tensor(queue, each, experts, read)
            for each in manifest.expert_tensors(layer)
        }
        return _Layer(local, tensors)

    def _load_tensor(
        self, queue: OpenClQueue, tensor: ManifestTensor, experts: Sequence[int], read: Read
    ) -> HeldTensor:
        """Copy the held experts' parts to the device, with rows padded as those of activations are."""
        n_row, row_bytes = 1, tensor.expert_size_bytes
        if len(tensor.shape) == 3:
            n_row = tensor.shape[1]
            row_bytes = tensor.expert_size_bytes // n_row
        padded_bytes = row_bytes
        if len(tensor.shape) == 3:
            stride = FORMATS[ACTIVATION_FORMATS[tensor.type.name]].stride(tensor.shape[0])
            padded_bytes = row_bytes * stride // tensor.shape[0]
        expert_bytes = n_row * padded_bytes
        size_bytes = expert_bytes * len(experts)
        if size_bytes > queue.allocation_bytes_max:
            raise EngineFailed(
                f"the shard cannot be loaded: {tensor.name} needs {size_bytes} bytes in one piece and the "
                f"OpenCL device {queue.device.name} gives at most {queue.allocation_bytes_max}"
            )
        buffer = queue.allocate(size_bytes)
        for place, expert in enumerate(experts):
            data = np.frombuffer(read(tensor.name, expert), np.uint8)
            if data.nbytes != tensor.expert_size_bytes:
                raise EngineFailed(f"the shard cannot be loaded: {tensor.name} has a wrong size")
            padded = np.zeros((n_row, padded_bytes), np.uint8)
            padded[:, :row_bytes] = data.reshape(n_row, row_bytes)
            queue.write(buffer, padded, place * expert_bytes)
        self._memory_bytes += size_bytes
        return HeldTensor(tensor, buffer, padded_bytes)


def _require_computable(tensor: ManifestTensor) -> None:
    """Raise `EngineFailed` for a type that our kernels do not compute with."""
    types = WEIGHT_TYPES if len(tensor.shape) == 3 else ("f32",)
    if tensor.type.name not in types:
        raise EngineFailed(
            f"the shard cannot be loaded: the OpenCL kernel does not compute with {tensor.type.name} "
            f"({tensor.name}), only with {', '.join(types)}"
        )


def _function_tables(queue: OpenClQueue) -> Buffer:
    """What ggml's GELU and quick GELU give for each F16 number, on the device."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(all="ignore"):
        tables = [unary(kind, every, as_ggml=True) for kind in (UnaryKind.GELU, UnaryKind.GELU_QUICK)]
    numbers = np.concatenate(tables).astype(np.float32)
    buffer = queue.allocate(numbers.nbytes)
    queue.write(buffer, numbers)
    return buffer
