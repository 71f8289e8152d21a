"""The reference kernel says what a program means: checked by hand-written formulas and by ggml itself."""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvasir_node.kernels.activation_formats import ACTIVATION_FORMATS, ACTIVATION_ROUNDINGS
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.native_library import load
from kvasir_proto.errors import EngineFailed, LocalProtocolError, RemoteProtocolError
from kvasir_proto.limits import Kernel
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram, GluKind, ProgramStep, StepOp, UnaryKind
from kvasir_proto.tensor_types import TENSOR_TYPES, TENSOR_TYPES_BY_NAME
from tests.model_makers import MAKERS, QUANTISED_TYPES, ModelShape, make_qwen3moe, quantise
from tests.node.hooked_llama import InProcessWorkers, Llama, hooked
from tests.node.kernel_calls import Ids, Rows, computed, distance, rows_and_pairs

WIDE = ModelShape(n_layer=1, n_embd=256, n_ff=256, n_expert=5)


def words(*values: int) -> bytes:
    return struct.pack("<4i", *values, *(0,) * (4 - len(values)))


def glu_params(kind: GluKind, alpha: float = 0.0, limit: float = 0.0, swapped: int = 0) -> bytes:
    return struct.pack("<2i2f", kind, swapped, alpha, limit)


def matmul(part: str, value: int = 0) -> ProgramStep:
    return ProgramStep(StepOp.EXPERT_MATMUL, value, tensor=f"ffn_{part}_exps.weight")


def gated(kind: GluKind, *, down: bool = True, alpha: float = 0.0, limit: float = 0.0) -> ExpertProgram:
    steps = (
        matmul("gate"),
        matmul("up"),
        ProgramStep(StepOp.GLU, 1, 2, params=glu_params(kind, alpha, limit)),
    )
    return ExpertProgram((*steps, matmul("down", 3)) if down else steps, input_per_slot=False)


def after_up(*steps: ProgramStep) -> ExpertProgram:
    """The product with `up` (value 1), then these steps."""
    return ExpertProgram((matmul("up"), *steps), input_per_slot=False)


class Model:
    """A small model with kernels of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = build_manifest(path)

    def reference(self, arithmetic: Arithmetic, shard: ShardSet | None = None) -> ReferenceKernel:
        with ExpertSource(self.path, self.manifest) as source:
            return ReferenceKernel(
                self.manifest, shard or self.manifest.whole_shard(), source.read, arithmetic
            )

    def ggml(self) -> GgmlCpuKernel:
        with ExpertSource(self.path, self.manifest) as source:
            return GgmlCpuKernel(self.manifest, self.manifest.whole_shard(), source.read)

    def numbers(self, name: str, expert: int) -> npt.NDArray[np.float64]:
        """One expert of an F32 tensor, [out, in]."""
        tensor = self.manifest.tensor(name)
        offset, size_bytes = tensor.expert_range(expert)
        data = np.frombuffer(self.path.read_bytes()[offset : offset + size_bytes], np.float32)
        return data.reshape(tensor.shape[-2::-1]).astype(np.float64)


@pytest.fixture(scope="module")
def f32_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3moe(tmp_path_factory.mktemp("reference") / "f32.gguf", WIDE)


@pytest.fixture(scope="module")
def model(f32_path: Path) -> Model:
    return Model(f32_path)


def test_the_exact_answer_is_the_formula(model: Model) -> None:
    x, rows, experts = rows_and_pairs(5, 256)
    kernel = model.reference(Arithmetic.FLOAT64)
    program = kernel.add_program(gated(GluKind.SWIGLU))
    found = kernel.compute_rows(0, program, x, rows, experts)
    for pair, (row, expert) in enumerate(zip(rows, experts, strict=True)):
        gate, up, down = (
            model.numbers(f"blk.0.ffn_{part}_exps.weight", expert) for part in ("gate", "up", "down")
        )
        g = gate @ x[row].astype(np.float64)
        expected = down @ (g / (1 + np.exp(-g)) * (up @ x[row].astype(np.float64)))
        np.testing.assert_allclose(found[pair], expected, rtol=1e-12, atol=1e-12)
    assert found.dtype == np.float64


def test_scales_biases_and_halves_are_the_formula(tmp_path: Path) -> None:
    shape = ModelShape(n_layer=1, n_embd=64, n_ff=32, n_expert=3)
    scaled = Model(make_qwen3moe(tmp_path / "scaled.gguf", shape, scales=True))
    x, rows, experts = rows_and_pairs(3, 64)
    program = after_up(
        ProgramStep(StepOp.EXPERT_SCALE, -1, tensor="ffn_up_exps.scale"),
        ProgramStep(StepOp.MULTIPLY, 1, 2),
        ProgramStep(StepOp.LINEAR, 3, params=struct.pack("<2f2i", 0.5, -1.0, 0, 0)),
        ProgramStep(StepOp.CLAMP, 4, params=struct.pack("<2f2i", -1.5, 0.5, 0, 0)),
        ProgramStep(StepOp.SQUARE, 5),
        ProgramStep(StepOp.GLU, 6, params=glu_params(GluKind.REGLU, swapped=1)),
    )
    kernel = scaled.reference(Arithmetic.FLOAT64)
    found = kernel.compute_rows(0, kernel.add_program(program), x, rows, experts)
    for pair, (row, expert) in enumerate(zip(rows, experts, strict=True)):
        scale = scaled.numbers("blk.0.ffn_up_exps.scale", expert)
        value = scaled.numbers("blk.0.ffn_up_exps.weight", expert) @ x[row].astype(np.float64) * scale
        value = np.clip(value * 0.5 - 1, -1.5, 0.5) ** 2
        np.testing.assert_allclose(found[pair], np.maximum(value[16:], 0) * value[:16], 1e-12, 1e-12)

    biased = Model(MAKERS["gpt-oss"](tmp_path / "biased.gguf", replace(shape, n_layer=1)))
    program = after_up(
        ProgramStep(StepOp.EXPERT_ADD, 1, tensor="ffn_up_exps.bias"),
        ProgramStep(StepOp.SLICE, 2, params=words(3, 7)),
        ProgramStep(StepOp.UNARY, 3, params=words(UnaryKind.NEG)),
    )
    kernel = biased.reference(Arithmetic.FLOAT64)
    found = kernel.compute_rows(0, kernel.add_program(program), x, rows, experts)
    for pair, (row, expert) in enumerate(zip(rows, experts, strict=True)):
        bias = biased.numbers("blk.0.ffn_up_exps.bias", expert)
        value = biased.numbers("blk.0.ffn_up_exps.weight", expert) @ x[row].astype(np.float64) + bias
        np.testing.assert_allclose(found[pair], -value[3:10], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", GluKind)
def test_every_gated_unit_is_ggmls(kind: GluKind, model: Model) -> None:
    has_limit = kind in (GluKind.SWIGLU_OAI, GluKind.SWIGLU_CLAMP)
    program = gated(kind, down=False, alpha=1.702 if has_limit else 0.0, limit=2.5 if has_limit else 0.0)
    check_against_ggml(model, program, kind in (GluKind.GEGLU, GluKind.GEGLU_QUICK))


@pytest.mark.parametrize("kind", UnaryKind)
def test_every_function_is_ggmls(kind: UnaryKind, model: Model) -> None:
    program = after_up(ProgramStep(StepOp.UNARY, 1, params=words(kind)))
    check_against_ggml(model, program, kind in (UnaryKind.GELU, UnaryKind.GELU_QUICK))


@pytest.mark.parametrize("swapped", [0, 1])
def test_halves_of_one_row_are_gate_and_up_as_in_ggml(swapped: int, model: Model) -> None:
    params = glu_params(GluKind.SWIGLU, swapped=swapped)
    check_against_ggml(model, after_up(ProgramStep(StepOp.GLU, 1, params=params)), by_table=False)


def check_against_ggml(model: Model, program: ExpertProgram, by_table: bool) -> None:
    """Compare all three arithmetics with ggml.

    `by_table`: ggml looks the function up among F16 numbers, where a last bit of x can choose the next entry.
    """
    x, rows, experts = rows_and_pairs(5, 256)
    theirs = computed(model.ggml(), 0, program, x, rows, experts)
    exact, single, alike = (
        distance(theirs, computed(model.reference(each), 0, program, x, rows, experts))
        for each in (Arithmetic.FLOAT64, Arithmetic.FLOAT32, Arithmetic.AS_GGML)
    )
    if by_table:
        assert exact > 1e-4
        assert alike < 3e-5
    else:
        assert exact < 2e-6
        assert alike < 2e-6
    assert single < (1e-3 if by_table else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("type_name", ["F32", *QUANTISED_TYPES])
def test_activations_are_rounded_as_ggml_rounds_them(type_name: str, f32_path: Path, tmp_path: Path) -> None:
    path = f32_path if type_name == "F32" else quantise(f32_path, tmp_path / "q.gguf", type_name)
    model = Model(path)
    x, rows, experts = rows_and_pairs(5, 256)
    x[:3] *= 10
    x[3, :64] = 0
    product = ExpertProgram((matmul("gate"),), input_per_slot=False)
    whole = gated(GluKind.SWIGLU)
    ggml, exact, alike = (
        model.ggml(),
        model.reference(Arithmetic.FLOAT64),
        model.reference(Arithmetic.AS_GGML),
    )
    theirs = computed(ggml, 0, product, x, rows, experts)
    assert distance(theirs, computed(alike, 0, product, x, rows, experts)) < 2e-6
    if type_name != "F32":
        # What the reference class is about: without the rounding, kernels are a hundred times apart.
        assert distance(theirs, computed(exact, 0, product, x, rows, experts)) > 1e-4
    # Behind the gate a last bit can flip a quant of the hidden row, so the whole is only nearly as close.
    theirs = computed(ggml, 0, whole, x, rows, experts)
    assert distance(theirs, computed(alike, 0, whole, x, rows, experts)) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_programs_of_real_graphs_mean_the_same_here(name: str, tmp_path: Path) -> None:
    path = MAKERS[name](tmp_path / "model.gguf", ModelShape(n_expert=6))
    model = Model(path)
    workers = InProcessWorkers(path, model.manifest, [model.manifest.whole_shard()])
    hook = hooked(workers)
    with Llama(path, hook) as llama:
        llama.run([1, 2, 3, 4, 5], [5])
        programs = tuple(hook.programs)
    hook.close()
    workers.close()
    assert programs
    ggml, reference = model.ggml(), model.reference(Arithmetic.FLOAT64)
    x, rows, experts = rows_and_pairs(6, 64)
    for program in programs:
        for layer in model.manifest.moe_layers:
            theirs = computed(ggml, layer, program, x, rows, experts)
            ours = computed(reference, layer, program, x, rows, experts)
            # grok's GELU comes from a table of F16 numbers
            assert distance(theirs, ours) < (1e-3 if name == "grok" else 2e-6)


class CpuTraits(ctypes.Structure):
    _fields_ = (
        ("from_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


@pytest.fixture(scope="module")
def traits_of() -> Callable[[int], Any]:
    """ggml's own functions for a type."""
    load()
    library = ctypes.CDLL("libggml-cpu.so.0" if platform.system() == "Linux" else "libggml-cpu.0.dylib")
    library.ggml_get_type_traits_cpu.restype = ctypes.POINTER(CpuTraits)
    return lambda type_id: library.ggml_get_type_traits_cpu(type_id).contents


ACTIVATION_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q8_1": 9, "q8_K": 15, "bf16": 30}


def test_weights_take_the_activation_formats_that_ggml_takes(traits_of: Callable[[int], Any]) -> None:
    for tensor_type in TENSOR_TYPES.values():
        traits = traits_of(tensor_type.id)
        form = ACTIVATION_FORMATS.get(tensor_type.name)
        if form is not None:
            assert traits.vec_dot_type == ACTIVATION_TYPES[form], tensor_type.name
        else:
            assert not traits.vec_dot or traits.vec_dot_type == ACTIVATION_TYPES["q8_1"], tensor_type.name


def difficult_values() -> Rows:
    draws = np.random.Generator(np.random.PCG64(3))
    values = draws.standard_normal((64, 256)).astype(np.float32)
    scales = np.float32(10.0) ** np.arange(-32, 32, dtype=np.float32).reshape(64, 1)
    values = np.where(np.arange(64).reshape(64, 1) % 2, values, values * scales).astype(np.float32)
    special = np.zeros((6, 256), np.float32)
    special[1] = 1
    special[2, ::2] = -1
    special[3] = np.arange(256) / 2 - 64  # halves: ties of the rounding
    special[4, ::2], special[4, 1::2] = 7, -7  # two values of the largest size
    special[5, 17] = np.finfo(np.float32).max
    return np.concatenate([values, special])


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="other processors round otherwise")
@pytest.mark.parametrize("form", ["f16", "bf16", "q8_0", "q8_K"])
def test_each_format_is_ggmls_to_the_last_bit(form: str, traits_of: Callable[[int], Any]) -> None:
    values = difficult_values()
    if form in ("f16", "q8_0"):
        values = values[np.abs(values).max(axis=1) < 60_000]  # beyond, a step is infinite
    size_bytes = {"f16": 2 / 1, "bf16": 2 / 1, "q8_0": 34 / 32, "q8_K": 292 / 256}[form] * values.size
    data = np.zeros(int(size_bytes), np.uint8)
    traits_of(ACTIVATION_TYPES[form]).from_float(values.ctypes.data, data.ctypes.data, values.size)
    if form == "f16":
        theirs = data.view(np.float16).astype(np.float64)
    elif form == "bf16":
        theirs = (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    elif form == "q8_0":
        blocks = data.reshape(-1, 34)
        theirs = blocks[:, :2].copy().view(np.float16).astype(np.float64) * blocks[:, 2:].view(np.int8)
    else:
        blocks = data.reshape(-1, 292)
        theirs = blocks[:, :4].copy().view(np.float32).astype(np.float64) * blocks[:, 4:260].view(np.int8)
    assert np.array_equal(ACTIVATION_ROUNDINGS[form](values), theirs.reshape(values.shape))


def refusal(kernel: ReferenceKernel, layer: int, number: int, x: Rows, rows: Ids, experts: Ids) -> str:
    """The code a request is refused with; nothing may be written."""
    out = np.full((len(rows), 512), 7, np.float32)
    addresses = (x.ctypes.data, rows.ctypes.data, experts.ctypes.data, out.ctypes.data)
    with pytest.raises(RemoteProtocolError) as caught:
        kernel.compute(layer, number, len(x), len(rows), *addresses)
    assert (out == 7).all()
    return caught.value.code


def test_strange_requests_are_refused_by_code(model: Model) -> None:
    kernel = model.reference(Arithmetic.FLOAT64, ShardSet.from_ranges([(0, 1, 3)]))
    number = kernel.add_program(gated(GluKind.SWIGLU))
    assert kernel.add_program(gated(GluKind.SWIGLU)) == number
    x = np.ones((2, 256), np.float32)
    rows, experts = np.array([0, 1], np.int32), np.array([1, 2], np.int32)
    assert refusal(kernel, 1, number, x, rows, experts) == "unknown_layer"
    assert refusal(kernel, 0, number + 1, x, rows, experts) == "unknown_program"
    assert refusal(kernel, 0, -1, x, rows, experts) == "unknown_program"
    assert refusal(kernel, 0, number, x, rows, np.array([1, 3], np.int32)) == "foreign_expert"
    assert refusal(kernel, 0, number, x, rows, np.array([-1, 1], np.int32)) == "foreign_expert"
    assert refusal(kernel, 0, number, x, np.array([0, 2], np.int32), experts) == "row_out_of_range"
    assert refusal(kernel, 0, number, x, np.array([-1, 1], np.int32), experts) == "row_out_of_range"
    assert refusal(kernel, 0, number, x, rows[:1], experts[:1]) == "shape_invalid"
    assert refusal(kernel, 0, number, x[:0], rows, experts) == "shape_invalid"
    for wrong in (x[:, :255], x[0]):
        with pytest.raises(RemoteProtocolError, match="shape"):
            kernel.compute_rows(0, number, wrong, rows, experts)
    with pytest.raises(RemoteProtocolError) as caught:
        kernel.add_program(after_up(ProgramStep(StepOp.EXPERT_ADD, 1, tensor="ffn_up_exps.bias")))
    assert caught.value.code == "program_unfit"
    assert np.isfinite(computed(kernel, 0, gated(GluKind.SWIGLU), x, rows, experts)).all()


def test_a_shard_is_its_bytes_and_no_more(model: Model) -> None:
    shard = ShardSet.from_ranges([(0, 1, 3)])
    kernel = model.reference(Arithmetic.FLOAT64, shard)
    assert kernel.memory_bytes == model.manifest.shard_size_bytes(shard)
    assert kernel.backend == "reference"
    kernel.close()
    kernel.close()
    assert kernel.memory_bytes == 0


def test_a_shard_that_cannot_be_loaded_is_refused(model: Model) -> None:
    with pytest.raises(LocalProtocolError, match="without routed experts"):
        ReferenceKernel(model.manifest, ShardSet.from_pairs([(3, 0)]), lambda name, expert: b"")
    with pytest.raises(EngineFailed, match="wrong size"):
        ReferenceKernel(model.manifest, model.manifest.whole_shard(), lambda name, expert: b"short")


@pytest.mark.parametrize(
    "type_name, arithmetic, sentence",
    [
        ("q2_0", Arithmetic.FLOAT64, "cannot expand q2_0"),
        ("q4_1", Arithmetic.AS_GGML, "does not know how ggml multiplies q4_1"),
    ],
)
def test_a_type_it_does_not_know_is_refused_by_name(
    type_name: str, arithmetic: Arithmetic, sentence: str, model: Model
) -> None:
    def retyped(manifest: ModelManifest) -> ModelManifest:
        tensor_type = TENSOR_TYPES_BY_NAME[type_name]
        tensors = []
        for each in manifest.tensors:
            if each.is_expert:
                row = tensor_type.row_size_bytes(each.shape[0])
                each = replace(each, type=tensor_type, size_bytes=row * each.shape[1] * each.shape[2])
            tensors.append(each)
        return replace(manifest, tensors=tuple(tensors))

    with pytest.raises(EngineFailed, match=sentence):
        ReferenceKernel(
            retyped(model.manifest), model.manifest.whole_shard(), lambda name, expert: b"", arithmetic
        )


def test_what_overflows_is_told_and_not_hidden(model: Model) -> None:
    kernel = model.reference(Arithmetic.AS_GGML)
    x = np.full((1, 256), 3e38, np.float32)
    one = np.zeros(1, np.int32)
    assert not np.isfinite(computed(kernel, 0, gated(GluKind.SWIGLU), x, one, one)).all()


@pytest.mark.parametrize("name, backend", [("ggml-cpu", "ggml-cpu"), ("emulated-f16", "reference")])
def test_a_name_stands_for_a_kernel(name: Kernel, backend: str, model: Model) -> None:
    with ExpertSource(model.path, model.manifest) as source:
        kernel = make_kernel(name, model.manifest, model.manifest.whole_shard(), source.read)
    assert kernel.backend == backend
    x, rows, experts = rows_and_pairs(5, 256)
    program = gated(GluKind.SWIGLU)
    apart = distance(
        computed(kernel, 0, program, x, rows, experts),
        computed(model.reference(Arithmetic.AS_GGML), 0, program, x, rows, experts),
    )
    assert apart < 2e-6 if name == "ggml-cpu" else 1e-4 < apart < 1e-1
