"""One OpenCL device at work: our kernels built for it, memory on it, and its errors made ours.

Decides how sources are found, built and started: one queue, in order, work-groups of one size, so that a
kernel is compiled once. Whatever the device or its compiler reports is `EngineFailed`. Apart from the expert
kernel because none of this is about experts. It refuses to know programs, tensors and formats.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from kvasir_node.kernels.opencl_devices import choose_device, handles, import_pyopencl, list_devices
from kvasir_proto.errors import EngineFailed

SOURCES: Final = Path(__file__).resolve().parents[1] / "data" / "opencl"
"""Our kernels in OpenCL C; in the repository a link to native/kernels."""

Buffer: TypeAlias = Any
"""Memory on the device, as PyOpenCL has it."""
Argument: TypeAlias = Any
"""A `Buffer` or a numpy scalar."""

_WORK_GROUP: Final = 32
_LOG_CHARACTERS: Final = 300
_BUILD_OPTIONS: Final = ("-cl-std=CL1.2",)
_EXACT_DIVISION: Final = "-cl-fp32-correctly-rounded-divide-sqrt"


class OpenClQueue:
    """A context, a queue and what was built for them. Not to be used by two threads at once."""

    def __init__(self, wanted: str, threads: int) -> None:
        """Open the device that ``wanted`` names (see `choose_device`), with ``threads`` of a processor.

        Raises `ConfigurationInvalid` where there is no such device, `EngineFailed` when it cannot be opened.
        """
        # Programs are few and built once a process; drivers keep caches of their own.
        os.environ.setdefault("PYOPENCL_NO_CACHE", "1")
        self._cl = import_pyopencl()
        self.device = choose_device(wanted, list_devices())
        with self.failing("cannot be opened"):
            handle = self._with_threads(handles()[self.device.number], threads)
            self._context = self._cl.Context([handle])
            self._queue = self._cl.CommandQueue(self._context)
            self._handle = handle
        self._kernels: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}

    @property
    def allocation_bytes_max(self) -> int:
        """The largest buffer that the device gives."""
        return int(self._handle.max_mem_alloc_size)

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Turn what PyOpenCL raises inside into `EngineFailed`: 'the OpenCL device NAME <what>: reason'."""
        try:
            yield
        except (self._cl.Error, MemoryError) as error:
            reason = " ".join(str(error).split())[:_LOG_CHARACTERS] or type(error).__name__
            raise EngineFailed(f"the OpenCL device {self.device.name} {what}: {reason}") from error

    def build(self, source: str, *defines: str) -> dict[str, Any]:
        """The kernels of a source file, by name, built with these macros. Raises `EngineFailed`."""
        built = self._kernels.get((source, defines))
        if built is None:
            text = (SOURCES / source).read_text("ascii")
            with self.failing(f"cannot build {source}"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a compiler that has something to say has not failed
                program = self._cl.Program(self._context, text).build([*self._options(), *_defined(defines)])
                built = {each.function_name: each for each in program.all_kernels()}
            self._kernels[source, defines] = built
        return built

    def start(self, kernel: Any, n_items: int, n_rows: int, *arguments: Argument) -> None:
        """Have a kernel run for ``n_items`` times ``n_rows``; it must itself see to the items beyond."""
        for index, argument in enumerate(arguments):
            kernel.set_arg(index, argument)
        rounded = -(-n_items // _WORK_GROUP) * _WORK_GROUP
        self._cl.enqueue_nd_range_kernel(self._queue, kernel, (rounded, n_rows), (_WORK_GROUP, 1))

    def allocate(self, size_bytes: int) -> Buffer:
        """Memory on the device, with whatever is in it."""
        return self._cl.Buffer(self._context, self._cl.mem_flags.READ_WRITE, max(1, size_bytes))

    def write(self, buffer: Buffer, data: np.ndarray[Any, Any], offset_bytes: int = 0) -> None:
        """Copy to the device; returns when ``data`` may change."""
        self._cl.enqueue_copy(self._queue, buffer, data, dst_offset=offset_bytes, is_blocking=True)

    def read(self, buffer: Buffer, into: np.ndarray[Any, Any]) -> None:
        """Wait for everything that was started, and copy from the device."""
        self._cl.enqueue_copy(self._queue, into, buffer, is_blocking=True)

    def finish(self) -> None:
        """Wait for everything that was started."""
        self._queue.finish()

    def _options(self) -> Sequence[str]:
        flag = self._cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT
        exact = bool(self._handle.single_fp_config & flag)
        return (*_BUILD_OPTIONS, *((_EXACT_DIVISION,) if exact else ()))

    def _with_threads(self, handle: Any, threads: int) -> Any:
        """A part of a processor that has as many units, where its driver can part it; else all of it."""
        partition = self._cl.device_partition_property
        if (
            self.device.kind != "cpu"
            or threads >= handle.max_compute_units
            or partition.BY_COUNTS not in handle.partition_properties
        ):
            return handle
        return handle.create_sub_devices([partition.BY_COUNTS, threads, partition.BY_COUNTS_LIST_END])[0]


class Scratch:
    """Memory on the device by purpose, kept from call to call and only ever growing."""

    def __init__(self, queue: OpenClQueue) -> None:
        self._queue = queue
        self._there: dict[tuple[str, int], tuple[int, Buffer]] = {}

    def take(self, purpose: str, index: int, size_bytes: int) -> Buffer:
        """At least as many bytes for piece ``index`` of a purpose; what was in them is lost."""
        there = self._there.get((purpose, index))
        if there is None or there[0] < size_bytes:
            self._there.pop((purpose, index), None)
            there = self._there[purpose, index] = (size_bytes, self._queue.allocate(size_bytes))
        return there[1]


def _defined(names: Sequence[str]) -> list[str]:
    return [f"-D{name}" for name in names]
