"""Per-op deltas: pairs of one class inside their gate, other pairs labelled, and a wrong kernel outside."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvasir_node.certification.synthetic_model import ExpertShape, Read
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.opencl_devices import OpenClDevice
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_node.measure.backends_here import Backend, backends_here, choose_backends
from kvasir_node.measure.operations import (
    OPERATIONS,
    MeasuredClass,
    OperationsMeasurement,
    OperationsSettings,
    PairFigures,
    figures_of,
    gate_for,
    measure_operations,
)
from kvasir_proto.errors import ConfigurationInvalid, EngineFailed, UsageError
from kvasir_proto.limits import Kernel
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram
from kvasir_proto.tolerance import EquivalenceClass
from tests.node.certification.test_certify import Scaled

SHAPE = ExpertShape(128, 64)
Q8 = EquivalenceClass("Q8_0", "F32")
F32 = EquivalenceClass("F32", "F32")


def device(number: int, platform: str, *, has_f16: bool = False) -> OpenClDevice:
    return OpenClDevice(number, "a device", platform, "1", "cpu", 1 << 30, has_f16)


def test_every_kernel_and_device_is_a_backend_of_its_own() -> None:
    devices = [
        device(0, "Portable Computing Language"),
        device(1, "Intel(R) OpenCL", has_f16=True),
        device(2, "Other Thing", has_f16=True),
        device(3, "Other Thing"),
    ]
    emulated = {each.name: each.emulated for each in backends_here(ask_devices=lambda: devices)}
    assert emulated["ggml-cpu"] is False
    assert emulated["emulated-f16"] is True
    assert (emulated["opencl-pocl"], emulated["opencl-pocl-f16-sums"]) == (False, True)
    assert (emulated["opencl-intel"], emulated["opencl-intel-f16-sums"]) == (False, False)
    assert {"opencl-other-2", "opencl-other-3", "opencl-other-2-mixed-sums"} <= set(emulated)
    assert (emulated["reference-f64"], emulated["reference-as-ggml"]) == (False, True)


def test_without_opencl_the_others_are_there_and_the_reason_is_said() -> None:
    def none() -> tuple[OpenClDevice, ...]:
        raise ConfigurationInvalid("PyOpenCL is not installed")

    said: list[str] = []
    hosts: dict[Kernel, str] = {"ggml-sse2": "", "ggml-avx2": "it is not built"}
    here = backends_here(say=said.append, ask_devices=none, ask_hosts=lambda: hosts)
    names = [each.name for each in here]
    assert {"ggml-cpu", "ggml-sse2"} <= set(names)
    assert "ggml-avx2" not in names
    assert not any(name.startswith("opencl") for name in names)
    assert said == [
        "no OpenCL backend: PyOpenCL is not installed",
        "no backend ggml-avx2: it is not built",
    ]


def test_backends_are_chosen_by_name() -> None:
    here = backends_here(ask_devices=tuple)
    assert choose_backends("all", here) == here
    assert [each.name for each in choose_backends("reference-f64, ggml-cpu,ggml-cpu", here)] == [
        "reference-f64",
        "ggml-cpu",
    ]
    with pytest.raises(UsageError, match="no backend 'cuda' here: there are ggml-cpu"):
        choose_backends("cuda", here)


def test_figures_are_what_their_names_say() -> None:
    expected = np.array([[3.0, 4.0]], np.float32)
    rms, max_abs, rel_l2, nmse, cosine = figures_of(np.array([[3.0, 4.5]], np.float32), expected)
    assert rms == pytest.approx(math.sqrt(12.5))
    assert max_abs == 0.5
    assert rel_l2 == pytest.approx(0.1)
    assert nmse == pytest.approx(0.01)
    assert cosine == pytest.approx(27 / (5 * math.hypot(3, 4.5)))
    assert figures_of(expected, expected)[1:4] == (0.0, 0.0, 0.0)
    assert figures_of(np.array([[np.nan, 4.0]], np.float32), expected)[1:] == (
        math.inf,
        math.inf,
        math.inf,
        0,
    )


def test_a_product_has_the_gate_of_sums_and_an_expert_that_of_flips() -> None:
    assert gate_for("product-in", Q8, Q8, SHAPE) == 2e-6
    assert gate_for("expert", Q8, Q8, SHAPE) == pytest.approx(3e-4 * 4)
    assert gate_for("combined", F32, F32, SHAPE) == 2e-6
    assert gate_for("product-in", Q8, F32, SHAPE) is None
    assert gate_for("hidden", EquivalenceClass("F16", "F32"), F32, SHAPE) == 1e-3
    on_arm = EquivalenceClass("Q8_0", "F32", "NEON")
    assert gate_for("product-in", on_arm, Q8, SHAPE) == gate_for("expert", on_arm, Q8, SHAPE)
    assert gate_for("product-in", on_arm, on_arm, SHAPE) == gate_for("gate", Q8, Q8, SHAPE)
    assert gate_for("expert", EquivalenceClass("Q8_0", "F16"), EquivalenceClass("Q8_0", "F16"), SHAPE) is None


def ggml(manifest: ModelManifest, shard: ShardSet, read: Read) -> ExpertKernel:
    return make_kernel("ggml-cpu", manifest, shard, read)


def exact(manifest: ModelManifest, shard: ShardSet, read: Read) -> ExpertKernel:
    return ReferenceKernel(manifest, shard, read, Arithmetic.AS_GGML)


def unrounded(manifest: ModelManifest, shard: ShardSet, read: Read) -> ExpertKernel:
    return ReferenceKernel(manifest, shard, read, Arithmetic.FLOAT64)


def without_f16(manifest: ModelManifest, shard: ShardSet, read: Read) -> ExpertKernel:
    if manifest.tensors[0].type.name == "f16":
        raise EngineFailed("no such weights")
    return exact(manifest, shard, read)


def measured(*backends: Backend, weight_types: tuple[str, ...] = ("q8_0",)) -> OperationsMeasurement:
    return measure_operations(backends, OperationsSettings(SHAPE, 2, weight_types, (1, 8)))


def test_one_class_is_inside_its_gate_and_another_is_labelled() -> None:
    found = measured(
        Backend("ggml", False, ggml), Backend("exact", True, exact), Backend("f64", False, unrounded)
    )
    assert len(found.pairs) == 3 * 2 * len(OPERATIONS)
    assert not found.failed
    for each in found.pairs:
        assert each.n_rows == 64
        if "f64" in (each.a, each.b):
            assert (each.gate, each.passed) == (None, None)
            assert (each.class_b, each.is_same_class) == (F32, False)
            assert 1e-3 < each.rel_l2 < 3e-2
        else:
            assert each.is_same_class
            assert each.passed is True
            assert each.gate is not None
            assert each.rel_l2 <= each.gate
    (shown,) = found.shown
    assert shown.band == pytest.approx(1.2e-3)
    assert set(shown.deviations) == {"ggml", "exact", "f64"}
    assert [(each.backend, each.batch_class) for each in found.classes if each.arithmetic == F32] == [
        ("f64", 1),
        ("f64", 8),
    ]


def test_two_ways_of_rounding_one_format_are_one_class() -> None:
    on_arm = EquivalenceClass("Q8_0", "F32", "NEON")

    def pair(b: EquivalenceClass) -> PairFigures:
        return PairFigures("expert", "q8_0", 8, "x", "y", Q8, b, 64, 1.0, 0.0, 0.0, 0.0, 1.0, None, "")

    assert pair(on_arm).is_same_class
    assert not pair(F32).is_same_class


class ScaledExperts(Scaled):
    """Right in every single product, and so in every probe; whole experts are a hundredth too large."""

    factor = 1.0

    def add_program(self, program: ExpertProgram) -> int:
        self.factor = 1.01 if len(program.steps) > 1 else 1.0
        return super().add_program(program)


def scaled_experts(manifest: ModelManifest, shard: ShardSet, read: Read) -> ExpertKernel:
    return ScaledExperts(manifest, shard, read)


def test_experts_a_hundredth_too_large_are_outside_their_gate() -> None:
    found = measured(Backend("ggml", False, ggml), Backend("scaled", False, scaled_experts))
    assert {each.operation for each in found.failed} == {"hidden", "expert", "combined"}
    assert not found.unclassified


def test_products_a_hundredth_too_large_are_of_no_class() -> None:
    def scaled(manifest: ModelManifest, shard: ShardSet, read: Read) -> ExpertKernel:
        return Scaled(manifest, shard, read)

    found = measured(Backend("scaled", False, scaled))
    assert {each.backend for each in found.unclassified} == {"scaled"}


@pytest.mark.parametrize(
    "arithmetic, is_strange",
    [
        (EquivalenceClass("Q8_0", "UNKNOWN"), True),
        (EquivalenceClass("UNKNOWN", "F32"), True),
        (EquivalenceClass("UNKNOWN", "F16"), False),
        (EquivalenceClass("F16", "MIXED"), False),
    ],
)
def test_short_sums_may_hide_how_rows_are_rounded(arithmetic: EquivalenceClass, is_strange: bool) -> None:
    measured_class = MeasuredClass("x", "f32", 8, arithmetic, "", True, True, SHAPE)
    settings = OperationsSettings(SHAPE, 2, ("f32",), (8,))
    found = OperationsMeasurement(settings, (), (measured_class,), (), ())
    assert bool(found.unclassified) == is_strange


def test_weights_that_a_backend_does_not_compute_with_are_told_and_left_out() -> None:
    found = measured(
        Backend("ggml", False, ggml), Backend("odd", False, without_f16), weight_types=("f16", "q8_0")
    )
    assert [each.weight_types for each in found.backends] == [("f16", "q8_0"), ("q8_0",)]
    assert found.backends[1].missing == "f16: no such weights"
    assert {each.weight_type for each in found.pairs} == {"q8_0"}
