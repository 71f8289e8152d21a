"""Certifying kernels: ggml's passes, and every planted fault is out of tolerance or broken."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from kvasir_node.certification import processor_rounding
from kvasir_node.certification.certify import Certification, certify_kernel, fit_of
from kvasir_node.certification.synthetic_model import ExpertShape, MakeKernel, Read
from kvasir_node.kernels.accumulators import F16, F32, Accumulator
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.capability import KernelClass
from kvasir_proto.errors import EngineFailed
from kvasir_proto.manifest import ModelManifest, ShardSet
from tests.node.certification.emulated_kernels import adding

SHAPE = ExpertShape(256, 128)


def ggml(manifest: ModelManifest, shard: ShardSet, read: Read) -> GgmlCpuKernel:
    return GgmlCpuKernel(manifest, shard, read)


def certified(
    make: MakeKernel,
    weight_type: str = "q8_0",
    batch_classes: tuple[int, ...] = (8,),
    shape: ExpertShape = SHAPE,
) -> Certification:
    return certify_kernel(make, shape, [weight_type], batch_classes=batch_classes, seed=2)


@pytest.mark.slow
def test_ggml_is_fit_for_everything() -> None:
    said: list[str] = []
    found = certify_kernel(
        ggml,
        ExpertShape(256, 256),
        ["q8_0", "q4_K", "q5_K", "q6_K"],
        other_types=["f32", "f16", "bf16", "q8_0"],
        batch_classes=(1, 8, 64),
        say=said.append,
    )
    assert [(each.weight_type, each.batch_class) for each in found.classes] == [
        (weight_type, batch_class)
        for weight_type in ("q8_0", "q4_K", "q5_K", "q6_K", "f32", "f16", "bf16")
        for batch_class in (1, 8, 64)
    ]
    for each in found.classes:
        assert each.passed, each.reason
        assert each.repeatable
        assert each.in_reference_class
        assert each.comparison.gate is not None
        assert each.comparison.n_rows == 64
    assert (found.fit.backbone, found.fit.output, found.fit.bulk, found.fit.reason) == (True, True, True, "")
    assert (found.backend, found.accumulation, found.status) == ("ggml-cpu", "F32", "claimed")
    kept = found.measured(backend="", device="x86_64", kernel_build="b", model_digest=bytes(32), seed=0)
    assert kept.kernel_classes == (
        KernelClass(("q8_0",), (1, 8, 64), "Q8_0", "F32", True, True),
        KernelClass(("q4_K", "q5_K", "q6_K"), (1,), "Q8_K", "F32", True, True),
        KernelClass(("q4_K", "q5_K", "q6_K"), (8, 64), "Q8_K", "F32", True, False),
    )
    assert (kept.fit, kept.unfit, kept.accumulation) == (("backbone", "output", "bulk"), (), "F32")
    assert all(each.passed and each.rel_l2 is not None and each.gate is not None for each in kept.classes)
    assert len(said) == 7 * 3 * 3


class Faulty(GgmlCpuKernel):
    """ggml's kernel with something wrong."""

    factor = 1.0

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
        super().compute(
            layer,
            program_index,
            n_rows,
            n_pairs,
            x_address,
            row_of_pair_address,
            expert_of_pair_address,
            out_address,
        )
        width = self.row_widths(layer, program_index)[1]
        memory = (ctypes.c_float * (n_pairs * width)).from_address(out_address)
        self.spoil(np.ctypeslib.as_array(memory).reshape(n_pairs, width))

    def spoil(self, rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        rows *= np.float32(self.factor)


class Scaled(Faulty):
    factor = 1.01


class Zeros(Faulty):
    factor = 0.0


class NotFinite(Faulty):
    def spoil(self, rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        rows[0, 0] = np.nan


def of_another_expert(manifest: ModelManifest, shard: ShardSet, read: Read) -> GgmlCpuKernel:
    """Weights of other places: every second block of rows is that of a neighbour."""

    def wrong(name: str, expert: int) -> bytes:
        data = np.frombuffer(read(name, expert), np.uint8)
        n_row = manifest.tensor(name).shape[1]
        return np.roll(data.reshape(n_row, -1), 1, axis=0).tobytes()

    return GgmlCpuKernel(manifest, shard, wrong)


def of_four_bits(manifest: ModelManifest, shard: ShardSet, read: Read) -> GgmlCpuKernel:
    """Q8_0 weights of which four bits are left."""

    def coarse(name: str, expert: int) -> bytes:
        blocks = np.frombuffer(read(name, expert), np.uint8).reshape(-1, 34).copy()
        levels = blocks[:, 2:].view(np.int8).astype(np.float64)
        blocks[:, 2:] = np.clip(np.rint(levels / 16) * 16, -127, 127).astype(np.int8).view(np.uint8)
        return blocks.tobytes()

    return GgmlCpuKernel(manifest, shard, coarse)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, serves_bulk, reason",
    [
        (Scaled, True, ""),
        (Zeros, False, ""),
        (NotFinite, False, "L2 inf"),
        (of_another_expert, False, ""),
        (of_four_bits, False, ""),
        (adding(Accumulator(F16, lanes=16), "q8_0"), True, "sums are F16"),
        (adding(Accumulator(F32, lanes=16), "q8_0"), True, None),
        (adding(Accumulator(F32, lanes=16), "f32"), True, "not as the reference class does"),
    ],
    ids=["scaled", "zeros", "nan", "expert", "four-bits", "f16", "honest", "other-class"],
)
def test_planted_faults(make: MakeKernel, serves_bulk: bool, reason: str | None) -> None:
    found = certified(make)
    fit = found.fit
    assert fit.output == (reason is None)
    assert fit.bulk == serves_bulk
    assert (reason or "") in fit.reason
    is_other_class = reason is not None and "reference class" in reason
    assert fit.backbone == (reason is None or is_other_class)
    assert all(each.passed for each in found.classes) == fit.backbone


def test_a_model_whose_types_nobody_can_craft_is_fit_for_nothing_that_matters() -> None:
    found = certify_kernel(ggml, SHAPE, ["q3_K", "f32"], other_types=["q4_K"], batch_classes=(8,))
    assert found.not_probed == ("q3_K",)
    assert {each.weight_type for each in found.classes} == {"f32"}
    assert (found.fit.backbone, found.fit.output, found.fit.bulk) == (False, False, True)
    assert "q3_K" in found.fit.reason
    assert found.accumulation == "UNKNOWN"
    assert fit_of((), ()).bulk is False


def test_other_types_than_the_models_decide_nothing() -> None:
    make = adding(Accumulator(F32, lanes=16, factors=F16), "f16")
    found = certify_kernel(make, SHAPE, ["f16"], other_types=["f32"], batch_classes=(8,))
    by_type = {each.weight_type: each for each in found.classes}
    assert by_type["f16"].passed
    assert not by_type["f32"].passed
    assert found.fit.output
    assert replace(found, model_types=("f32",)).fit.output is False
    short = replace(by_type["f16"], weights_kept=0.75)
    assert not short.passed
    assert short.reason == "only 75 % of weights keep all their bits"


def test_a_type_that_the_kernel_does_not_compute_with_is_left_out_unless_it_is_the_models() -> None:
    def no_bf16(manifest: ModelManifest, shard: ShardSet, read: Read) -> GgmlCpuKernel:
        if any(each.type.name == "bf16" for each in manifest.tensors):
            raise EngineFailed("this kernel does not compute with bf16")
        return ggml(manifest, shard, read)

    said: list[str] = []
    shape = ExpertShape(64, 64)
    found = certify_kernel(
        no_bf16, shape, [], other_types=["bf16", "f16"], batch_classes=(8,), say=said.append
    )
    assert [each.weight_type for each in found.classes] == ["f16"]
    assert found.model_types == ("f16",)
    assert found.fit.output
    assert said[0] == "bf16: this kernel does not compute with it"
    with pytest.raises(EngineFailed):
        certify_kernel(no_bf16, shape, ["bf16"], batch_classes=(8,))


@pytest.mark.parametrize("name", ["ggml-cpu", "emulated-f16"])
def test_the_same_seed_asks_the_same(name: str) -> None:
    def once() -> Certification:
        return certify_kernel(
            lambda manifest, shard, read: make_kernel(name, manifest, shard, read),  # type: ignore[arg-type]
            ExpertShape(64, 64),
            ["f32"],
            batch_classes=(8,),
            seed=9,
        )

    assert once() == once()


@pytest.mark.parametrize("processor, seed", [("NEON", 31), ("plain C", 16)])
def test_every_rounding_that_ggml_has_of_a_format_is_of_its_class(
    processor: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeds whose rows have a value that ARM, or C without vectors, rounds another way than AVX does."""

    def once() -> Certification:
        return certify_kernel(
            lambda manifest, shard, read: ReferenceKernel(
                manifest, shard, read, Arithmetic.AS_GGML, processor=processor
            ),
            SHAPE,
            ["q8_0"],
            batch_classes=(1, 8, 64),
            seed=seed,
        )

    found = once()
    assert [each.processor for each in found.classes] == [processor] * 3
    assert found.fit.output, found.fit.reason
    assert found.classes[0].comparison.rel_l2 < 1e-6
    monkeypatch.setattr(processor_rounding, "processors_of", lambda formats: ("AVX",))
    assert "differ by no flip" in once().fit.reason
