"""Activations on an OpenCL device, rounded as ggml rounds them, and the proof that they are.

Decides which kernel rounds to which format, and how each lies in memory. A device is used only after it has
rounded difficult numbers to the last bit as `activation_formats` says, since compilers and processors differ
in how exactly they divide. Apart from the expert kernel because probes want it alone. It refuses to know
weights and experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvasir_node.kernels.activation_formats import ACTIVATION_ROUNDINGS
from kvasir_node.kernels.opencl_queue import Buffer, OpenClQueue, Scratch
from kvasir_proto.errors import EngineFailed

_COLUMNS_AT_ONCE: Final = 32
"""The kernels read so many columns at a time; rows of plain numbers are padded to a multiple of them."""

_LARGEST_IN_F16: Final = 60_000.0


@dataclass(frozen=True, slots=True)
class ActivationFormat:
    """Numbers of this type, and one step for each block of them; `block` is 0 where there are no steps."""

    kernel: str
    dtype: type[Any]
    block: int

    def steps(self, width: int) -> int:
        """Steps of a row."""
        return width // self.block if self.block else 0

    def stride(self, width: int) -> int:
        """Numbers of a row as it lies in memory."""
        return width if self.block else -(-width // _COLUMNS_AT_ONCE) * _COLUMNS_AT_ONCE


FORMATS: Final[Mapping[str, ActivationFormat]] = MappingProxyType(
    {
        "f32": ActivationFormat("round_f32", np.float32, 0),
        "f16": ActivationFormat("round_f16", np.float16, 0),
        "q8_0": ActivationFormat("round_q8_0", np.int8, 32),
        "q8_K": ActivationFormat("round_q8_k", np.int8, 256),
    }
)
"""The formats that our kernels round to, by the names of `activation_formats`."""


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows in an activation format, on the device; good until the same piece of scratch is taken."""

    form: ActivationFormat
    n_rows: int
    width: int
    numbers: Buffer
    steps: Buffer


def round_rows(
    queue: OpenClQueue, scratch: Scratch, piece: int, name: str, rows: Buffer, n_rows: int, width: int
) -> RoundedRows:
    """Start the rounding of rows [n_rows, width] that lie on the device as F32; PyOpenCL's errors pass."""
    form = FORMATS[name]
    stride = form.stride(width)
    numbers = scratch.take("numbers", piece, n_rows * stride * np.dtype(form.dtype).itemsize)
    steps = scratch.take("steps", piece, 4 * n_rows * form.steps(width))
    kernel = queue.build("activations.cl")[form.kernel]
    if form.block:
        queue.start(kernel, form.steps(width), n_rows, rows, np.int32(width), numbers, steps)
    else:
        queue.start(kernel, stride, n_rows, rows, np.int32(width), np.int32(stride), numbers)
    return RoundedRows(form, n_rows, width, numbers, steps)


def values_of(queue: OpenClQueue, rounded: RoundedRows) -> npt.NDArray[np.float64]:
    """What rounded rows stand for, exactly: [n_rows, width]."""
    form = rounded.form
    numbers = np.empty((rounded.n_rows, form.stride(rounded.width)), form.dtype)
    queue.read(rounded.numbers, numbers)
    values = numbers[:, : rounded.width].astype(np.float64)
    if form.block:
        steps = np.empty((rounded.n_rows, form.steps(rounded.width)), np.float32)
        queue.read(rounded.steps, steps)
        values *= np.repeat(steps.astype(np.float64), form.block, axis=1)
    return values


def require_ggmls_rounding(queue: OpenClQueue) -> None:
    """Raise `EngineFailed` unless this device rounds to each format as ggml does."""
    scratch = Scratch(queue)
    with queue.failing("failed"):
        for name in FORMATS:
            rows = _difficult_rows()
            if name in ("f16", "q8_0"):
                rows = rows[np.abs(rows).max(axis=1) < _LARGEST_IN_F16]
            given = queue.allocate(rows.nbytes)
            queue.write(given, rows)
            found = values_of(queue, round_rows(queue, scratch, 0, name, given, *rows.shape))
            if not np.array_equal(found, ACTIVATION_ROUNDINGS[name](rows)):
                raise EngineFailed(
                    f"the OpenCL device {queue.device.name} does not round to {name} as ggml does"
                )


def _difficult_rows() -> npt.NDArray[np.float32]:
    """Rows of 256 numbers: of every magnitude, ties of the rounding, equals of the largest size, zeros."""
    column = np.arange(256)
    rows = [np.sin(column * (1 + row) + row) * 10.0 ** (row / 4 - 24) for row in range(192)]
    rows += [np.zeros(256), np.ones(256), column / 2 - 64, np.where(column % 2, 7.0, -7.0)]
    rows += [np.where(column == 17, float(np.finfo(np.float32).max), 0.0)]
    return np.array(rows, np.float32)
