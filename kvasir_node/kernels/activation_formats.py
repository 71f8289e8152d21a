"""How ggml rounds activations before it multiplies them, written out value by value.

Decides nothing: it says what ggml 0.25.3 does, where the type of the weights fixes the form in which the
other factor is taken. Kernels of one equivalence class must round exactly so; kernels that do not differ by
a hundredth, which no precision of the sum repairs. Of Q8_0 ggml itself has three roundings and of Q8_K two,
by what it was compiled for and with: they part where a value lies within a last bit of a tie. Apart from the
reference kernel because probes and other backends' tests need the formats alone. Results are what the
rounded form stands for, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return _of_quants(np.rint(blocks * inverse), largest).reshape(rows.shape)


def as_q8_0_on_arm(rows: Float32Array) -> Float64Array:
    """As `as_q8_0`, but with the reciprocal of the step, which has been rounded itself: ggml with NEON."""
    blocks = rows.reshape(-1, _Q8_0_BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    return _of_quants(np.rint(blocks * _inverse_of_step(largest)), largest).reshape(rows.shape)


def as_q8_0_in_plain_c(rows: Float32Array) -> Float64Array:
    """As `as_q8_0_on_arm`, with ties away from zero: ggml where it has no vectors, as on x86 before AVX."""
    blocks = rows.reshape(-1, _Q8_0_BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    scaled = (blocks * _inverse_of_step(largest)).astype(np.float64)
    quants = np.trunc(scaled + np.copysign(0.5, scaled))
    return _of_quants(quants, largest).reshape(rows.shape)


def _inverse_of_step(largest: Float32Array) -> Float32Array:
    step = largest / np.float32(127)
    inverse: Float32Array = np.divide(np.float32(1), step, out=np.zeros_like(step), where=step > 0)
    return inverse


def _of_quants(quants: npt.NDArray[np.floating], largest: Float32Array) -> Float64Array:
    """What quants of blocks stand for whose largest values are these."""
    values: Float64Array = quants.astype(np.float64) * as_f16(largest / np.float32(127))
    return values


def as_q8_k(rows: Float32Array) -> Float64Array:
    """Blocks of 256: quants of one F32 step, with the value of largest size at -127 (the first of equals)."""
    blocks = rows.reshape(-1, _Q8_K_BLOCK)
    inverse = _inverse_of_extreme(blocks)
    return _of_q8_k_quants(np.rint(blocks * inverse), inverse).reshape(rows.shape)


def as_q8_k_fused(rows: Float32Array) -> Float64Array:
    """As `as_q8_k`, but products are not rounded before they are rounded to whole numbers: ggml where its
    compiler makes one instruction of multiplying and adding, as GCC does for ARM.
    """
    blocks = rows.reshape(-1, _Q8_K_BLOCK)
    inverse = _inverse_of_extreme(blocks)
    quants = np.rint(blocks.astype(np.float64) * inverse.astype(np.float64))
    return _of_q8_k_quants(quants, inverse).reshape(rows.shape)


def _inverse_of_extreme(blocks: Float32Array) -> Float32Array:
    first = np.abs(blocks).argmax(axis=1)
    extreme = np.take_along_axis(blocks, first[:, None], axis=1)
    inverse: Float32Array = np.divide(
        np.float32(-127), extreme, out=np.zeros_like(extreme), where=extreme != 0
    )
    return inverse


def _of_q8_k_quants(quants: npt.NDArray[np.floating], inverse: Float32Array) -> Float64Array:
    step = np.divide(np.float32(1), inverse, out=np.zeros_like(inverse), where=inverse != 0)
    values: Float64Array = np.minimum(quants, 127).astype(np.float64) * step.astype(np.float64)
    return values


ACTIVATION_ROUNDINGS: Final[Mapping[str, Callable[[Float32Array], Float64Array]]] = MappingProxyType(
    {"f32": as_f32, "f16": as_f16, "bf16": as_bf16, "q8_0": as_q8_0, "q8_K": as_q8_k}
)
"""What each activation format makes of F32 rows, by the format's name, as ggml on x86 with AVX."""

USUAL_PROCESSOR: Final = "AVX"

ROUNDINGS_OF_PROCESSOR: Final[Mapping[str, Mapping[str, Callable[[Float32Array], Float64Array]]]] = (
    MappingProxyType(
        {
            USUAL_PROCESSOR: ACTIVATION_ROUNDINGS,
            "NEON": MappingProxyType({**ACTIVATION_ROUNDINGS, "q8_0": as_q8_0_on_arm, "q8_K": as_q8_k_fused}),
            "plain C": MappingProxyType({**ACTIVATION_ROUNDINGS, "q8_0": as_q8_0_in_plain_c}),
        }
    )
)
"""The same by what ggml was compiled for, the usual one first. Each is as good a member of its class."""


def processors_of(formats: Iterable[str]) -> tuple[str, ...]:
    """Those that round one of these formats as no earlier one does, the usual one first."""
    seen: dict[tuple[object, ...], str] = {}
    names = tuple(formats)
    for processor, roundings in ROUNDINGS_OF_PROCESSOR.items():
        seen.setdefault(tuple(roundings[name] for name in names), processor)
    return tuple(seen.values())


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
