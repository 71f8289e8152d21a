"""Kernels of known arithmetic, for the probe to be asked about: what each is, and what it must be called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvasir_node.certification.crafted_weights import CRAFTED_TYPES
from kvasir_node.certification.synthetic_model import ExpertShape, MakeKernel
from kvasir_node.kernels.accumulators import BF16, E4M3, F16, F16_SUMS, F32, TF32, Accumulator, FloatFormat
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel

NARROW: Final = ExpertShape(256, 256)
WIDE: Final = ExpertShape(512, 512)


@dataclass(frozen=True)
class Emulated:
    """A kernel, and the accumulator, word and activation format that are the right answer."""

    make: MakeKernel
    accumulator: str
    accumulation: str
    activation: str
    range: str = "wide"
    shape: ExpertShape = NARROW
    weight_types: tuple[str, ...] = CRAFTED_TYPES


def adding(
    accumulator: Accumulator | None,
    activations: str | None = None,
    arithmetic: Arithmetic = Arithmetic.AS_GGML,
) -> MakeKernel:
    return lambda manifest, shard, read: ReferenceKernel(
        manifest, shard, read, arithmetic, accumulator, activations
    )


TABLE: Final[dict[str, Emulated]] = {
    "f64": Emulated(adding(None, None, Arithmetic.FLOAT64), "F64", "F32", "F32"),
    "f32-numpy": Emulated(adding(None, None, Arithmetic.FLOAT32), "F32", "F32", "F32"),
    "f32-sequential": Emulated(adding(Accumulator(F32), "f32"), "F32", "F32", "F32"),
    "f32-16-lanes": Emulated(adding(Accumulator(F32, lanes=16), "f32"), "F32", "F32", "F32"),
    "f32-sums-f16-results": Emulated(
        adding(Accumulator(F32, lanes=16, results=F16), "f16"), "wider, results in 11-bit", "F16", "F16"
    ),
    "f16-sequential": Emulated(adding(Accumulator(F16), "f16"), "F16", "F16", "F16", "F16"),
    "f16-16-lanes": Emulated(adding(Accumulator(F16, lanes=16), "f16"), "F16", "F16", "F16", "F16"),
    "f16-256-lanes": Emulated(adding(Accumulator(F16, lanes=256), "f16"), "F16", "F16", "F16", "F16"),
    "f16-16-lanes-f32-rows": Emulated(
        adding(Accumulator(F16, lanes=16), "f32"), "F16", "F16", "UNKNOWN", "F16"
    ),
    "f16-16-lanes-q8_0-rows": Emulated(
        adding(Accumulator(F16, lanes=16), "q8_0"), "F16", "F16", "Q8_0", "F16"
    ),
    "f32-16-lanes-q8_0-rows": Emulated(adding(Accumulator(F32, lanes=16), "q8_0"), "F32", "F32", "Q8_0"),
    "f32-16-lanes-q8_K-rows": Emulated(adding(Accumulator(F32, lanes=16), "q8_K"), "F32", "F32", "Q8_K"),
    "f16-of-8-at-once": Emulated(adding(F16_SUMS, "f16"), "F16", "F16", "F16", "F16"),
    "bf16-16-lanes": Emulated(adding(Accumulator(BF16, lanes=16), "f32"), "BF16", "BF16", "BF16"),
    "bf16-factors-f32": Emulated(
        adding(Accumulator(F32, lanes=16, factors=BF16), "f32"), "F32", "F32", "BF16"
    ),
    "f16-factors-f32": Emulated(adding(Accumulator(F32, lanes=16, factors=F16), "f32"), "F32", "F32", "F16"),
    "f16-blocks-of-32": Emulated(
        adding(Accumulator(F16, block=32), "f16"), "MIXED F16/F32", "MIXED", "F16", "F16"
    ),
    "f16-blocks-of-256-16-lanes": Emulated(
        adding(Accumulator(F16, lanes=16, block=256), "f16"),
        "MIXED F16/F32",
        "MIXED",
        "F16",
        "F16",
        WIDE,
    ),
    "f16-8-lanes-added-in-f32": Emulated(
        adding(Accumulator(F16, lanes=8, lane_sums=F32), "f16"), "MIXED F16/F32", "MIXED", "F16", "F16"
    ),
}
"""What the probe was made with: the cases of the research it comes from."""

FOURTEEN_BITS: Final = FloatFormat(14, -126, F32.largest)

HELD_OUT: Final[dict[str, Emulated]] = {
    "f16-32-lanes-pairwise": Emulated(
        adding(Accumulator(F16, lanes=32, pairwise=True), "f16"), "F16", "F16", "F16", "F16"
    ),
    "f32-cut-to-bf16-every-64": Emulated(
        adding(Accumulator(F32, cut_columns=64, cut=BF16), "f32"), "BF16", "BF16", "BF16"
    ),
    "f32-cut-to-14-bits-every-64": Emulated(
        adding(Accumulator(F32, cut_columns=64, cut=FOURTEEN_BITS), "f32"), "14-bit", "MIXED", "UNKNOWN"
    ),
    "tf32-factors-f32": Emulated(
        adding(Accumulator(F32, lanes=16, factors=TF32), "f32"), "F32", "F32", "TF32"
    ),
    "fp8-factors-f32": Emulated(
        adding(Accumulator(F32, lanes=16, factors=E4M3), "f32"), "19-bit or more", "MIXED", "UNKNOWN"
    ),
    "f16-kahan": Emulated(adding(Accumulator(F16, compensated=True), "f16"), "F16", "F16", "F16", "F16"),
    "f16-16-lanes-kahan": Emulated(
        adding(Accumulator(F16, lanes=16, compensated=True), "f16"), "F16", "F16", "F16", "F16"
    ),
}
"""What the probe was not made with: written after it and first asked when it was finished, with what it says
of them (docs/reference/equivalence.md tells what it said the first time).
"""
