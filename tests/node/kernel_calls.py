"""Calling a kernel through its port with numpy arrays, and how far apart two answers are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvasir_node.kernels.port import ExpertKernel
from kvasir_proto.program import ExpertProgram

Rows = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


def rows_and_pairs(n_expert: int, width: int, n_row: int = 40, n_slot: int = 3) -> tuple[Rows, Ids, Ids]:
    draws = np.random.Generator(np.random.PCG64(7))
    x = (3 * draws.standard_normal((n_row, width))).astype(np.float32)
    rows = np.repeat(np.arange(n_row, dtype=np.int32), n_slot)
    experts = draws.integers(0, n_expert, len(rows)).astype(np.int32)
    return x, rows, experts


def computed(
    kernel: ExpertKernel, layer: int, program: ExpertProgram, x: Rows, rows: Ids, experts: Ids
) -> Rows:
    """What a kernel writes, through the port."""
    number = kernel.add_program(program)
    width_in, width_out = kernel.row_widths(layer, number)
    assert x.shape[1] == width_in
    out = np.full((len(rows), width_out), np.nan, np.float32)
    kernel.compute(
        layer,
        number,
        len(x),
        len(rows),
        x.ctypes.data,
        rows.ctypes.data,
        experts.ctypes.data,
        out.ctypes.data,
    )
    return out


def distance(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """Relative L2."""
    difference = np.linalg.norm(found.astype(np.float64) - expected)
    return float(difference / np.linalg.norm(expected.astype(np.float64)))
