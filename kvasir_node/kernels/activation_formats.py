"""How ggml rounds activations before it multiplies them, written out value by value.

Decides nothing: it says what ggml 0.25.3 does on x86, where the type of the weights fixes the form in which
the other factor is taken. Kernels of one equivalence class must round exactly so; kernels that do not differ
by a hundredth, which no precision of the sum repairs. Apart from the reference kernel because probes and
other backends' tests need the formats alone. Results are what the rounded form stands for, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

_Q8_0_BLOCK: Final = 32
_Q8_K_BLOCK: Final = 256


def as_f32(rows: Float32Array) -> Float64Array:
    """F32 as it is."""
    return rows.astype(np.float64)


def as_f16(rows: Float32Array) -> Float64Array:
    """Rounded to F16, ties to even; beyond 65,504 becomes infinite."""
    with np.errstate(over="ignore"):
        return rows.astype(np.float16).astype(np.float64)


def as_bf16(rows: Float32Array) -> Float64Array:
    """Rounded to BF16, ties to even. Finite numbers only (ggml keeps a NaN a NaN)."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def as_q8_0(rows: Float32Array) -> Float64Array:
    """Blocks of 32: quants of one step, the largest value's 127th part, which is kept as F16.

    Quants are rounded (ties to even) with the step's exact reciprocal, not with the F16 it is kept as.
    """
    blocks = rows.reshape(-1, _Q8_0_BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    step = largest / np.float32(127)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    quants = np.rint(blocks * inverse)
    values: Float64Array = quants.astype(np.float64) * as_f16(step)
    return values.reshape(rows.shape)


def as_q8_k(rows: Float32Array) -> Float64Array:
    """Blocks of 256: quants of one F32 step, with the value of largest size at -127 (the first of equals)."""
    blocks = rows.reshape(-1, _Q8_K_BLOCK)
    first = np.abs(blocks).argmax(axis=1)
    extreme = np.take_along_axis(blocks, first[:, None], axis=1)
    inverse = np.divide(np.float32(-127), extreme, out=np.zeros_like(extreme), where=extreme != 0)
    quants = np.minimum(np.rint(blocks * inverse), np.float32(127))
    step = np.divide(np.float32(1), inverse, out=np.zeros_like(inverse), where=inverse != 0)
    values: Float64Array = quants.astype(np.float64) * step.astype(np.float64)
    return values.reshape(rows.shape)


ACTIVATION_ROUNDINGS: Final[Mapping[str, Callable[[Float32Array], Float64Array]]] = MappingProxyType(
    {"f32": as_f32, "f16": as_f16, "bf16": as_bf16, "q8_0": as_q8_0, "q8_K": as_q8_k}
)
"""What each activation format makes of F32 rows, by the format's name."""

_Q8_0_WEIGHTS: Final = ("q4_0", "q5_0", "q8_0", "iq4_nl", "mxfp4", "nvfp4", "q1_0", "q2_0")
_Q8_K_WEIGHTS: Final = (
    *("q2_K", "q3_K", "q4_K", "q5_K", "q6_K", "tq1_0", "tq2_0"),
    *("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"),
)

ACTIVATION_FORMATS: Final[Mapping[str, str]] = MappingProxyType(
    {"f32": "f32", "f16": "f16", "bf16": "bf16"}
    | dict.fromkeys(_Q8_0_WEIGHTS, "q8_0")
    | dict.fromkeys(_Q8_K_WEIGHTS, "q8_K")
)
"""The activation format that ggml's CPU backend takes for weights of each type.

q4_1 and q5_1 are missing: their format (q8_1) keeps a rounded sum beside the quants, so what it stands for
depends on the weights.
"""
