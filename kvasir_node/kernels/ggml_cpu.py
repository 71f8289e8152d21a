"""The expert kernel on ggml's CPU backend: the reference class of every swarm that runs it.

Decides what of a shard goes where in native memory, and checks a program against the manifest before native
code sees it. Results are those of llama.cpp itself, bit for bit, when all rows of one expert in one ubatch
come in one call (ggml's tiled K-quant kernels start at 8 rows of an expert). It refuses to know files,
digests and networks: bytes come from a function.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np

from kvasir_node.native_library import load
from kvasir_proto.errors import EngineFailed, LocalProtocolError, ProtocolError, RemoteProtocolError
from kvasir_proto.manifest import ManifestTensor, ModelManifest, ShardSet
from kvasir_proto.program import TENSOR_SUFFIXES, ExpertProgram

PROGRAMS_MAX: Final = 256
"""Different programs one kernel will learn: far more than a model has, few enough to bound a flood."""

_CODE_OF_STATUS: Final = {  # the statuses of native/include/kvasir_native.h that a request can bring about
    -1: "shape_invalid",
    -2: "unknown_layer",
    -3: "unknown_program",
    -4: "program_unfit",
    -5: "foreign_expert",
    -6: "row_out_of_range",
}


class KernelFunctions(Protocol):
    """The functions of `native/include/kvasir_native.h` that a kernel is made of, wherever they compute.

    Those that return an integer return a status, and 0 is good. Addresses are of this process's memory.
    """

    def kernel_create(self, threads: int, n_expert: int, /) -> int | None:
        """A handle for all the others, or None."""

    def kernel_destroy(self, kernel: int, /) -> None:
        """Free everything."""

    def kernel_add_layer(self, kernel: int, layer: int, experts: Any, n_held: int, /) -> int:
        """Declare which experts of a layer are held."""

    def kernel_add_tensor(
        self, kernel: int, layer: int, tensor: int, type_id: int, shape: Any, n_dims: int, /
    ) -> int:
        """Make room for a tensor of a declared layer."""

    def kernel_set_expert(
        self, kernel: int, layer: int, tensor: int, expert: int, address: int, size_bytes: int, /
    ) -> int:
        """Copy one held expert's bytes."""

    def kernel_memory_bytes(self, kernel: int, /) -> int:
        """Bytes of weights."""

    def kernel_add_program(self, kernel: int, index: int, flat: bytes, n_steps: int, /) -> int:
        """Add or replace a program."""

    def kernel_bind(self, kernel: int, layer: int, index: int, /) -> tuple[int, int, int]:
        """(status, width of an input row, width of an output row)."""

    def kernel_compute(
        self,
        kernel: int,
        layer: int,
        index: int,
        n_rows: int,
        n_pairs: int,
        x_address: int,
        row_of_pair_address: int,
        expert_of_pair_address: int,
        out_address: int,
        /,
    ) -> int:
        """Check everything, then compute."""

    def kernel_error(self, kernel: int, /) -> str:
        """A sentence about the last call that was not good."""


class GgmlCpuKernel:
    """A shard's experts in ggml's memory. See `port.ExpertKernel` for what each call guarantees."""

    backend: str = "ggml-cpu"

    def __init__(
        self,
        manifest: ModelManifest,
        shard: ShardSet,
        read: Callable[[str, int], bytes | bytearray | memoryview],
        threads: int = 1,
        functions: KernelFunctions | None = None,
    ) -> None:
        """Load `shard`. `read(tensor name, expert)` gives one expert's slice of a tensor, already verified.

        Without `functions` those of this process's native library compute.
        Raises `EngineFailed` without memory or for a tensor type ggml's CPU backend cannot compute with,
        `LocalProtocolError` for a shard that is not of this model, and whatever `read` raises.
        """
        self._native: KernelFunctions = load() if functions is None else functions
        self._manifest = manifest
        self._shard = shard
        self._indices: dict[ExpertProgram, int] = {}
        if not set(shard.layers) <= set(manifest.moe_layers):
            raise LocalProtocolError("the shard names a layer without routed experts")
        self._kernel = self._create(threads, manifest.n_expert)
        if not self._kernel:
            raise EngineFailed(f"the expert kernel could not be created with {threads} threads")
        try:
            for layer in shard.layers:
                self._load_layer(layer, read)
        except BaseException:
            self.close()
            raise

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights held."""
        return self._native.kernel_memory_bytes(self._handle())

    def add_program(self, program: ExpertProgram) -> int:
        """Make a program known and return its number, counted from 0 in the order of first adding."""
        index = self._indices.get(program)
        if index is not None:
            return index
        if len(self._indices) >= PROGRAMS_MAX:
            raise RemoteProtocolError("there are too many different programs", "program_unfit")
        self._require_fitting_layer(program)
        index = len(self._indices)
        flat = program.flat()
        self._check(self._native.kernel_add_program(self._handle(), index, flat, len(program.steps)))
        self._indices[program] = index
        return index

    def row_widths(self, layer: int, program_index: int) -> tuple[int, int]:
        """Floats of an input row and of an output row."""
        status, width_in, width_out = self._native.kernel_bind(self._handle(), layer, program_index)
        self._check(status)
        return width_in, width_out

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
        status = self._native.kernel_compute(
            self._handle(),
            layer,
            program_index,
            n_rows,
            n_pairs,
            x_address,
            row_of_pair_address,
            expert_of_pair_address,
            out_address,
        )
        if status != 0:
            self._check(status)

    def close(self) -> None:
        """Free the weights. Idempotent."""
        if self._kernel:
            self._native.kernel_destroy(self._kernel)
            self._kernel = None

    def _create(self, threads: int, n_expert: int) -> int | None:
        """A kernel's handle; None where it cannot be made."""
        return self._native.kernel_create(threads, n_expert)

    def _handle(self) -> int:
        if not self._kernel:
            raise LocalProtocolError("the kernel is closed")
        return self._kernel

    def _load_layer(self, layer: int, read: Callable[[str, int], bytes | bytearray | memoryview]) -> None:
        experts = self._shard.experts_of(layer)
        held = (ctypes.c_int32 * len(experts))(*experts)
        self._check_loading(self._native.kernel_add_layer(self._handle(), layer, held, len(experts)))
        for tensor in self._manifest.expert_tensors(layer):
            number = TENSOR_SUFFIXES.index(tensor.suffix or "")
            shape = (ctypes.c_int64 * max(1, len(tensor.shape) - 1))(*tensor.shape[:-1])
            self._check_loading(
                self._native.kernel_add_tensor(
                    self._handle(), layer, number, tensor.type.id, shape, len(tensor.shape) - 1
                )
            )
            for expert in experts:
                self._load_expert(layer, number, tensor, expert, read)

    def _load_expert(
        self,
        layer: int,
        number: int,
        tensor: ManifestTensor,
        expert: int,
        read: Callable[[str, int], bytes | bytearray | memoryview],
    ) -> None:
        data = np.frombuffer(read(tensor.name, expert), dtype=np.uint8)
        self._check_loading(
            self._native.kernel_set_expert(
                self._handle(), layer, number, expert, data.ctypes.data, data.nbytes
            )
        )

    def _require_fitting_layer(self, program: ExpertProgram) -> None:
        """`RemoteProtocolError` unless some held layer's tensors fit; the first layer's misfit is told."""
        misfit: RemoteProtocolError | None = None
        for layer in self._shard.layers:
            shapes = {each.suffix: each.shape for each in self._manifest.expert_tensors(layer)}
            try:
                program.row_widths(shapes.get)
            except RemoteProtocolError as error:
                misfit = misfit or error
            else:
                return
        raise misfit or RemoteProtocolError("no layer is held that the program could fit", "program_unfit")

    def _check(self, status: int) -> None:
        """Raise what a status of a request means."""
        if status == 0:
            return
        reason = self._native.kernel_error(self._handle())
        code = _CODE_OF_STATUS.get(status)
        if code is None:
            raise EngineFailed(f"the expert kernel failed: {reason}")
        raise RemoteProtocolError(reason, code)

    def _check_loading(self, status: int) -> None:
        """Raise what a status means while a shard is loaded: nothing there came from a request."""
        try:
            self._check(status)
        except ProtocolError as error:
            raise EngineFailed(f"the shard cannot be loaded: {error.reason}") from error
