"""The probe asks kernels of known arithmetic, and ggml's; each must be called what it is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir_node.certification.classification import classify
from kvasir_node.certification.probe import ProductFigures, is_probed, probe_kernel
from kvasir_node.certification.synthetic_model import ExpertShape, MakeKernel, Read
from kvasir_node.kernels.accumulators import F16, F32, Accumulator
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.manifest import ModelManifest, ShardSet
from tests.node.certification.emulated_kernels import HELD_OUT, NARROW, TABLE, Emulated

SHAPE = ExpertShape(512, 1024)
K_QUANTS = ("q4_K", "q5_K", "q6_K")
IN_QUANTISED_TYPES = ("f64", "f32-16-lanes", "f16-16-lanes", "bf16-16-lanes", "f16-blocks-of-32")
"""Weights that hold fewer ratios are asked fewer questions."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, type_name",
    [(name, "f32") for name in TABLE]
    + [(name, type_name) for name in IN_QUANTISED_TYPES for type_name in ("q8_0", *K_QUANTS)],
)
def test_every_emulated_kernel_is_called_what_it_is(name: str, type_name: str) -> None:
    expected = TABLE[name]
    found = list(probe_kernel(expected.make, type_name, expected.shape, (32,), seed=3))
    assert [each.part for each in found] == ["up", "down"]
    for each in found:
        require_class(each, expected, type_name)


@pytest.mark.slow
@pytest.mark.parametrize("name", HELD_OUT)
def test_kernels_that_the_probe_was_not_made_with(name: str) -> None:
    for each in probe_kernel(HELD_OUT[name].make, "f32", NARROW, (32,), seed=4):
        answer = classify(each.figures)
        assert answer.rounding == ("toward zero" if "cut" in name else "" if "fp8" in name else "nearest")
        require_class(each, HELD_OUT[name], rounding=answer.rounding)


def require_class(
    found: ProductFigures, expected: Emulated, type_name: str = "", rounding: str = "nearest"
) -> None:
    answer = classify(found.figures)
    if expected.accumulator == "F64" and type_name in K_QUANTS:
        # Two or four blocks of K-quants have too few places for terms that cancel.
        expected = replace(expected, accumulator="F32")
    assert (answer.accumulator, answer.accumulation, answer.activation, answer.range) == (
        expected.accumulator,
        expected.accumulation,
        expected.activation,
        expected.range,
    )
    assert answer.rounding in (rounding, "")
    assert found.figures.repeatable


@pytest.mark.slow
@pytest.mark.parametrize(
    "type_name, activation",
    [
        ("f32", "F32"),
        ("f16", "F16"),
        ("bf16", "BF16"),
        ("q8_0", "Q8_0"),
        ("q4_K", "Q8_K"),
        ("q5_K", "Q8_K"),
        ("q6_K", "Q8_K"),
    ],
)
def test_ggml_adds_in_f32_and_rounds_rows_as_its_class_does(type_name: str, activation: str) -> None:
    found = list(probe_kernel(GgmlCpuKernel, type_name, SHAPE, (1, 8, 64), seed=5))
    assert [(each.part, each.batch_class) for each in found] == [
        (part, batch_class) for part in ("up", "down") for batch_class in (1, 8, 64)
    ]
    for each in found:
        require_class(each, Emulated(GgmlCpuKernel, "F32", "F32", activation))
        figures = each.figures
        assert figures.weights_kept == 1
        assert figures.stagnation == 1
        assert figures.effective_bits > 19
        # Tiled kernels of K-quants begin at 8 rows, and round otherwise.
        assert figures.batch_invariant == (type_name not in K_QUANTS or each.batch_class == 1)


def by_batch(small: MakeKernel, large: MakeKernel, rows_from: int) -> MakeKernel:
    """One kernel for batches of fewer rows, another for larger ones, as GPUs choose theirs."""

    class ByBatch(ReferenceKernel):
        def __init__(self, manifest: ModelManifest, shard: ShardSet, read: Read) -> None:
            super().__init__(manifest, shard, read)
            self.small, self.large = small(manifest, shard, read), large(manifest, shard, read)

        def compute(self, layer: int, program_index: int, n_rows: int, *arguments: int) -> None:
            chosen = self.small if n_rows < rows_from else self.large
            chosen.compute(layer, chosen.add_program(self._programs[program_index]), n_rows, *arguments)

    return ByBatch


@pytest.mark.slow
def test_accumulation_belongs_to_the_batch_class() -> None:
    """As measured on a Vulkan device: F32 for single rows, F16 for many."""

    def adding(accumulator: Accumulator) -> MakeKernel:
        return lambda manifest, shard, read: ReferenceKernel(
            manifest, shard, read, Arithmetic.AS_GGML, accumulator, "f16"
        )

    make = by_batch(adding(Accumulator(F32, lanes=16)), adding(Accumulator(F16, lanes=16)), 32)
    found = {
        (each.part, each.batch_class): (classify(each.figures).accumulation, each.figures.batch_invariant)
        for each in probe_kernel(make, "f16", ExpertShape(256, 256), (1, 8, 32, 64), seed=1)
    }
    for (_, batch_class), (word, batch_invariant) in found.items():
        assert word == ("F32" if batch_class < 32 else "F16")
        assert batch_invariant == (batch_class < 32)


class NoisyKernel(ReferenceKernel):
    """Adds in another order each time, as atomic additions do."""

    n_lane = 1

    def compute(self, layer: int, program_index: int, *arguments: int) -> None:
        self.n_lane = self.n_lane % 7 + 1
        self._accumulator = Accumulator(F32, lanes=self.n_lane)
        super().compute(layer, program_index, *arguments)


def test_a_kernel_that_does_not_repeat_itself_is_seen() -> None:
    def make(manifest: ModelManifest, shard: ShardSet, read: Read) -> NoisyKernel:
        return NoisyKernel(manifest, shard, read, Arithmetic.AS_GGML, None, "f32")

    found = list(probe_kernel(make, "f32", ExpertShape(64, 512), (8,), seed=1))
    assert not all(each.figures.repeatable for each in found)
    assert {classify(each.figures).accumulation for each in found} == {"F32"}


@pytest.mark.parametrize(
    "type_name, n_embd, n_ff",
    [("q4_K", 256, 128), ("q4_K", 128, 256), ("q8_0", 80, 64), ("f32", 64, 32), ("q3_K", 256, 256)],
)
def test_shapes_that_a_type_cannot_have_or_that_are_too_narrow_are_refused(
    type_name: str, n_embd: int, n_ff: int
) -> None:
    shape = ExpertShape(n_embd, n_ff)
    assert not is_probed(type_name, shape)
    with pytest.raises(LocalProtocolError, match=f"{n_ff} columns"):
        list(probe_kernel(GgmlCpuKernel, type_name, shape, (1,), seed=1))
