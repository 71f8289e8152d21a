"""The OpenCL kernel: ggml's numbers within its class, one order of adding, refusals, and trouble made ours.

Run on every OpenCL device of this machine, and skipped where there is none.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

from kvasir_node.kernels import opencl_activations, opencl_queue
from kvasir_node.kernels.activation_formats import ACTIVATION_FORMATS, ACTIVATION_ROUNDINGS
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.opencl import PROGRAMS_MAX, WEIGHT_TYPES, Accumulator, OpenClKernel
from kvasir_node.kernels.opencl_activations import FORMATS, round_rows, values_of
from kvasir_node.kernels.opencl_queue import OpenClQueue, Scratch
from kvasir_node.kernels.opencl_steps import TILE, tables_of
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_node.kernels.value_registers import assign_registers
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.model_manifest import build_manifest
from kvasir_proto.errors import ConfigurationInvalid, EngineFailed, LocalProtocolError, RemoteProtocolError
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram, GluKind, ProgramStep, StepOp, UnaryKind, program_of_flat
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME
from tests.model_makers import ModelShape, make_qwen3moe, quantise
from tests.node.kernel_calls import computed, distance
from tests.node.opencl_here import each_device
from tests.node.test_ggml_cpu import (
    EVERYTHING,
    N_EXPERT,
    ODD_SHAPES,
    SWIGLU,
    Bench,
    compute,
    expected_row,
    flat_programs,
    floats,
    make_bench,
    scaled,
    words,
)
from tests.node.test_reference_kernel import after_up, difficult_values, gated, glu_params, matmul

Floats = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

SQUARE = ModelShape(n_layer=1, n_embd=512, n_ff=256, n_expert=5)
N_ROW = 160
"""Pooled rows of a comparison; the gates ask for 64 at least."""

FLIPS_MAX = 0.05
"""Rows in which a last bit of the hidden row rounds an activation the other way; some hundredths at most."""


@pytest.fixture(scope="module", params=each_device())
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def queue(device: str) -> OpenClQueue:
    return OpenClQueue(device, threads=2)


def opencl(
    bench: Bench, device: str, experts: Sequence[int] = range(N_EXPERT), **options: Any
) -> OpenClKernel:
    shard = ShardSet.from_pairs((layer, expert) for layer in (0, 2) for expert in experts)
    return OpenClKernel(bench.manifest, shard, bench.read, device=device, **options)


def reference(bench: Bench, arithmetic: Arithmetic) -> ReferenceKernel:
    shard = ShardSet.from_pairs((layer, expert) for layer in (0, 2) for expert in range(N_EXPERT))
    return ReferenceKernel(bench.manifest, shard, bench.read, arithmetic)


@pytest.fixture(scope="module")
def odd() -> Bench:
    return make_bench(ODD_SHAPES)


@pytest.fixture(scope="module")
def kernel(odd: Bench, device: str) -> Iterator[OpenClKernel]:
    kernel = opencl(odd, device)
    yield kernel
    kernel.close()


# ---- Activation formats ----


def rounded(queue: OpenClQueue, form: str, rows: Floats) -> Wide:
    given = queue.allocate(rows.nbytes)
    queue.write(given, rows)
    return values_of(queue, round_rows(queue, Scratch(queue), 0, form, given, *rows.shape))


@pytest.mark.parametrize("form", FORMATS)
def test_each_format_is_that_of_the_reference_to_the_last_bit(form: str, queue: OpenClQueue) -> None:
    draws = np.random.default_rng(11)
    noise = draws.standard_normal((600, 256)) * 10.0 ** draws.uniform(-30, 4, (600, 1))
    rows = np.concatenate([difficult_values(), noise.astype(np.float32)])
    if form in ("f16", "q8_0"):
        rows = rows[np.abs(rows).max(axis=1) < 60_000]  # beyond, a step is infinite
    assert len(rows) > 600
    assert np.array_equal(rounded(queue, form, rows), ACTIVATION_ROUNDINGS[form](rows))


@pytest.mark.parametrize("form", ["f32", "f16"])
def test_rows_of_odd_width_are_padded_with_nothing(form: str, queue: OpenClQueue) -> None:
    rows = np.random.default_rng(2).standard_normal((5, 19)).astype(np.float32)
    given = queue.allocate(rows.nbytes)
    queue.write(given, rows)
    made = round_rows(queue, Scratch(queue), 0, form, given, *rows.shape)
    numbers = np.empty((5, 32), made.form.dtype)
    queue.read(made.numbers, numbers)
    assert np.array_equal(numbers[:, :19].astype(np.float64), ACTIVATION_ROUNDINGS[form](rows))
    assert not numbers[:, 19:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", ["q8_0", "q8_K"])
def test_a_block_with_what_is_no_number_has_none_left(form: str, bad: float, queue: OpenClQueue) -> None:
    rows = np.ones((2, 256), np.float32)
    rows[1, 40] = bad
    values = rounded(queue, form, rows)
    assert np.isfinite(values[0]).all()
    assert np.isnan(values[1, 32:64]).all()


def test_a_device_that_rounds_otherwise_is_not_used(
    odd: Bench, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dict(ACTIVATION_ROUNDINGS) | {"q8_0": ACTIVATION_ROUNDINGS["q8_K"]}
    monkeypatch.setattr(opencl_activations, "ACTIVATION_ROUNDINGS", other)
    with pytest.raises(EngineFailed, match="does not round to q8_0 as ggml does"):
        opencl(odd, device)


# ---- What programs mean ----


@pytest.mark.parametrize("program", [SWIGLU, EVERYTHING], ids=["swiglu", "everything"])
@pytest.mark.parametrize("n_pairs", [1, 2, 3, 17, 300])
def test_rows_are_what_the_program_means(
    odd: Bench, kernel: OpenClKernel, program: ExpertProgram, n_pairs: int
) -> None:
    draws = np.random.default_rng(n_pairs)
    x = draws.normal(size=(max(1, n_pairs // 2), 19)).astype(np.float32)
    rows = draws.integers(0, len(x), n_pairs)
    experts = draws.integers(0, N_EXPERT, n_pairs)
    out = compute(kernel, kernel.add_program(program), x, rows.tolist(), experts.tolist())
    for pair in range(n_pairs):
        expected = expected_row(odd, program, 2, x[rows[pair]], int(experts[pair]))
        np.testing.assert_allclose(out[pair], expected, rtol=2e-5, atol=2e-6)


class Model:
    """A small model of one type of weights, and kernels of it."""

    def __init__(self, path: Path) -> None:
        self.manifest = build_manifest(path)
        with ExpertSource(path, self.manifest) as source:
            tensors = self.manifest.expert_tensors(0)
            self._bytes = {
                (each.name, expert): bytes(source.read(each.name, expert))
                for each in tensors
                for expert in range(each.shape[-1])
            }
        self.type_name = tensors[0].type.name
        self._kernels: dict[tuple[str, Accumulator], OpenClKernel] = {}

    def read(self, name: str, expert: int) -> bytes:
        return self._bytes[name, expert]

    def ggml(self) -> GgmlCpuKernel:
        return GgmlCpuKernel(self.manifest, self.manifest.whole_shard(), self.read)

    def reference(self, arithmetic: Arithmetic = Arithmetic.AS_GGML) -> ReferenceKernel:
        return ReferenceKernel(self.manifest, self.manifest.whole_shard(), self.read, arithmetic)

    def opencl(self, device: str, accumulator: Accumulator = Accumulator.F32) -> OpenClKernel:
        """One kernel for all tests, since each compiles anew."""
        if (device, accumulator) not in self._kernels:
            self._kernels[device, accumulator] = OpenClKernel(
                self.manifest, self.manifest.whole_shard(), self.read, device=device, accumulator=accumulator
            )
        return self._kernels[device, accumulator]

    @property
    def gate(self) -> float:
        """DESIGN section 5's, on the relative L2 of pooled rows of one class."""
        match ACTIVATION_FORMATS[self.type_name]:
            case "f32":
                return 2e-6
            case "f16":
                return 5e-5
        return 2e-4 * float(np.sqrt(1024 / SQUARE.n_ff))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    directory = tmp_path_factory.mktemp("opencl")
    plain = make_qwen3moe(directory / "f32.gguf", SQUARE)
    models: dict[str, Model] = {}

    def model(type_name: str) -> Model:
        if type_name not in models:
            path = plain
            if type_name != "f32":
                name = {"q4_K": "Q4_K_S"}.get(type_name, type_name.upper())
                path = quantise(plain, directory / f"{type_name}.gguf", name, pure=True)
            models[type_name] = Model(path)
            assert models[type_name].type_name == type_name
        return models[type_name]

    return model


def sample(n_embd: int = SQUARE.n_embd, n_expert: int = SQUARE.n_expert) -> tuple[Floats, Any, Any]:
    draws = np.random.default_rng(7)
    x = (3 * draws.standard_normal((N_ROW, n_embd))).astype(np.float32)
    rows = np.arange(N_ROW, dtype=np.int32)
    return x, rows, draws.integers(0, n_expert, N_ROW).astype(np.int32)


@pytest.mark.parametrize("kind", GluKind)
def test_every_gated_unit_is_ggmls(kind: GluKind, device: str, model_of: Callable[[str], Model]) -> None:
    has_limit = kind in (GluKind.SWIGLU_OAI, GluKind.SWIGLU_CLAMP)
    program = gated(kind, down=False, alpha=1.702 if has_limit else 0.0, limit=2.5 if has_limit else 0.0)
    check_against_ggml(model_of("f32"), device, program, kind in (GluKind.GEGLU, GluKind.GEGLU_QUICK))


@pytest.mark.parametrize("kind", UnaryKind)
def test_every_function_is_ggmls(kind: UnaryKind, device: str, model_of: Callable[[str], Model]) -> None:
    program = after_up(ProgramStep(StepOp.UNARY, 1, params=words(kind)))
    check_against_ggml(model_of("f32"), device, program, kind in (UnaryKind.GELU, UnaryKind.GELU_QUICK))


@pytest.mark.parametrize("swapped", [0, 1])
def test_halves_of_one_row_are_gate_and_up(
    swapped: int, device: str, model_of: Callable[[str], Model]
) -> None:
    params = glu_params(GluKind.SWIGLU, swapped=swapped)
    check_against_ggml(model_of("f32"), device, after_up(ProgramStep(StepOp.GLU, 1, params=params)), False)


def check_against_ggml(model: Model, device: str, program: ExpertProgram, by_table: bool) -> None:
    """`by_table`: the function is looked up among F16 numbers, where a last bit can choose the next entry."""
    call = (0, program, *sample())
    ours, ggml, alike = (
        computed(each, *call) for each in (model.opencl(device), model.ggml(), model.reference())
    )
    assert distance(ours, ggml) < (3e-5 if by_table else 2e-6)
    assert distance(ours, alike) < (3e-5 if by_table else 2e-6)


def test_what_is_no_number_stays_so_in_every_step(kernel: OpenClKernel, odd: Bench) -> None:
    """A function that makes a number of what is none would hide a broken row."""
    x = np.ones((1, 19), np.float32)
    x[0, 3] = np.nan
    steps = [
        ProgramStep(StepOp.UNARY, 1, params=words(kind)) for kind in UnaryKind if kind is not UnaryKind.STEP
    ]
    steps += [ProgramStep(StepOp.GLU, 1, params=glu_params(kind, 1.0, 2.0)) for kind in GluKind]
    steps += [ProgramStep(StepOp.CLAMP, 1, params=floats(-1.0, 1.0)), ProgramStep(StepOp.SQUARE, 1)]
    for step in steps:
        program = ExpertProgram((matmul("gate_up"), step), input_per_slot=False)
        assert np.isnan(compute(kernel, kernel.add_program(program), x, [0], [1])).all(), step


@settings(max_examples=150)
@given(flat=flat_programs())
def test_whatever_is_a_program_is_computed_or_refused(odd: Bench, kernel: OpenClKernel, flat: bytes) -> None:
    """Compared with numpy wherever numpy's own two precisions agree about the result."""
    try:
        program = program_of_flat(flat, input_per_slot=False)
        program.row_widths(ODD_SHAPES.get)
    except (LocalProtocolError, RemoteProtocolError):
        return
    fresh = opencl_programs_emptied(kernel)
    try:
        assign_registers(program)
    except RemoteProtocolError:
        with pytest.raises(RemoteProtocolError, match="live at once"):
            fresh.add_program(program)
        return
    number = fresh.add_program(program)
    x = (
        np.random.default_rng(len(flat))
        .standard_normal((3, fresh.row_widths(0, number)[0]))
        .astype(np.float32)
    )
    rows, experts = np.array([0, 1, 2, 0], np.int32), np.array([3, 0, 3, 6], np.int32)
    found = compute(fresh, number, x, rows.tolist(), experts.tolist(), layer=0)
    exact, single = (
        computed(reference(odd, each), 0, program, x, rows, experts)
        for each in (Arithmetic.FLOAT64, Arithmetic.FLOAT32)
    )
    if np.isfinite(exact).all() and np.isfinite(single).all() and np.abs(exact).max() < 1e15 and exact.any():
        if distance(single, exact) < 1e-6:
            # Two tables of F16 numbers may follow one another.
            assert distance(found, exact) < 2e-2
    elif not np.isfinite(exact).any():
        assert not np.isfinite(found).any()


def opencl_programs_emptied(kernel: OpenClKernel) -> OpenClKernel:
    """The same kernel without the programs it has learnt: there is a bound on them."""
    kernel._programs.clear()
    for layer in kernel._layers.values():
        layer.fitted.clear()
    return kernel


# ---- The class ----


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_with_sums_in_f32_it_is_in_ggmls_class(
    type_name: str, device: str, model_of: Callable[[str], Model]
) -> None:
    model = model_of(type_name)
    call = (0, gated(GluKind.SWIGLU), *sample())
    ours, ggml, alike = (
        computed(each, *call) for each in (model.opencl(device), model.ggml(), model.reference())
    )
    assert distance(ours, ggml) < model.gate
    assert distance(ours, alike) < model.gate


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_what_is_left_is_activations_that_round_the_other_way(
    type_name: str, device: str, model_of: Callable[[str], Model]
) -> None:
    """One product agrees to 2e-6. Behind the gate a last bit may flip a rounding of the hidden row: then the
    difference is that flip times columns of W_down, to 2e-6 again, and such rows are few.
    """
    model = model_of(type_name)
    x, rows, experts = sample()
    ours, ggml = model.opencl(device), model.ggml()
    for part in ("gate", "up"):
        product = ExpertProgram((matmul(part),), input_per_slot=False)
        assert distance(*(computed(each, 0, product, x, rows, experts) for each in (ours, ggml))) < 2e-6
    hidden = gated(GluKind.SWIGLU, down=False)
    whole = gated(GluKind.SWIGLU)
    form = ACTIVATION_FORMATS[type_name]
    inner = [computed(each, 0, hidden, x, rows, experts) for each in (ours, ggml)]
    flips = np.subtract(*(ACTIVATION_ROUNDINGS[form](each) for each in inner))
    outs = [computed(each, 0, whole, x, rows, experts) for each in (ours, ggml)]
    residual = outs[0].astype(np.float64) - outs[1]
    down = model.reference(Arithmetic.FLOAT64)
    for pair, expert in enumerate(experts):
        weights = down._expanded(0, "ffn_down_exps.weight", int(expert))
        left = residual[pair] - weights @ flips[pair]
        assert np.linalg.norm(left) < 2e-6 * np.linalg.norm(outs[1][pair])
    block = FORMATS[form].block
    if block:
        half_a_step = np.repeat(np.abs(inner[1].reshape(-1, block)).max(axis=1) / 254, block)
        flipped = (np.abs(flips) > half_a_step.reshape(flips.shape)).any(axis=1)
        assert flipped.mean() < FLIPS_MAX


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
@pytest.mark.parametrize("accumulator", [Accumulator.F16, Accumulator.MIXED])
def test_with_sums_in_f16_it_is_far_outside(
    type_name: str, accumulator: Accumulator, device: str, model_of: Callable[[str], Model]
) -> None:
    model = model_of(type_name)
    call = (0, gated(GluKind.SWIGLU), *sample())
    off = distance(computed(model.opencl(device, accumulator), *call), computed(model.ggml(), *call))
    assert 5 * model.gate < off < 2e-2


def in_halves(values: Wide) -> Wide:
    return values.astype(np.float16).astype(np.float64)


def twin(a: Wide, weights: Wide, accumulator: Accumulator) -> Wide:
    """Sixteen sums along the columns, each product added with one rounding to F16; then a tree."""
    across = np.zeros((len(a), len(weights), 16))
    sums = np.zeros_like(across)
    for column in range(0, a.shape[1], 16):
        part = slice(column, column + 16)
        sums = in_halves(in_halves(weights[None, :, part]) * in_halves(a[:, None, part]) + sums)
        if accumulator is Accumulator.MIXED and (column + 16) % 256 == 0:
            across, sums = (across + sums).astype(np.float32).astype(np.float64), np.zeros_like(sums)
    keep = in_halves if accumulator is Accumulator.F16 else lambda v: v.astype(np.float32).astype(np.float64)
    total = sums if accumulator is Accumulator.F16 else across
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = keep(total[..., :half] + total[..., half:])
    return total[..., 0]


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
@pytest.mark.parametrize("accumulator", [Accumulator.F16, Accumulator.MIXED])
def test_sums_in_f16_are_rounded_at_each_step(
    type_name: str, accumulator: Accumulator, device: str, model_of: Callable[[str], Model]
) -> None:
    """Bit for bit what a twin in numpy makes of it, but for double roundings, one in thousands."""
    model = model_of(type_name)
    x, rows, _ = sample()
    experts = np.full(N_ROW, 2, np.int32)
    product = ExpertProgram((matmul("up"),), input_per_slot=False)
    found = computed(model.opencl(device, accumulator), 0, product, x, rows, experts)
    weights = model.reference(Arithmetic.FLOAT64)._expanded(0, "ffn_up_exps.weight", 2)
    activations = ACTIVATION_ROUNDINGS[ACTIVATION_FORMATS[type_name]](x)
    expected = twin(
        activations.astype(np.float32).astype(np.float64),
        weights.astype(np.float32).astype(np.float64),
        accumulator,
    )
    assert (found == expected).mean() > 0.99
    assert distance(found, expected) < 2e-4


# ---- One order of adding ----


@pytest.mark.parametrize("accumulator", Accumulator)
@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_layout_grouping_and_sharding_do_not_change_a_bit(
    type_name: str, accumulator: Accumulator, device: str, model_of: Callable[[str], Model]
) -> None:
    model = model_of(type_name)
    whole = model.opencl(device, accumulator)
    program = gated(GluKind.SWIGLU)
    x, _, _ = sample()
    draws = np.random.default_rng(9)
    n_pairs = 90
    rows = np.repeat(np.arange(30, dtype=np.int32), 3)
    experts = draws.integers(0, SQUARE.n_expert, n_pairs).astype(np.int32)
    expected = computed(whole, 0, program, x[:30], rows, experts)

    order = draws.permutation(n_pairs)
    assert (computed(whole, 0, program, x[:30], rows[order], experts[order]) == expected[order]).all()
    for pair in range(0, n_pairs, 7):
        one = computed(
            whole, 0, program, x[rows[pair]][None], np.zeros(1, np.int32), experts[pair : pair + 1]
        )
        assert (one[0] == expected[pair]).all()
    for held in ([1, 4], [0, 2, 3]):
        part = OpenClKernel(
            model.manifest,
            ShardSet.from_pairs((0, expert) for expert in held),
            model.read,
            device=device,
            threads=2,
            accumulator=accumulator,
        )
        mine = np.flatnonzero(np.isin(experts, held))
        needed, row_of_pair = np.unique(rows[mine], return_inverse=True)
        out = computed(part, 0, program, x[needed], row_of_pair.astype(np.int32), experts[mine])
        assert (out == expected[mine]).all()
        part.close()


def test_a_row_that_is_broken_breaks_no_other(device: str, model_of: Callable[[str], Model]) -> None:
    for type_name in WEIGHT_TYPES:
        kernel = model_of(type_name).opencl(device)
        x, rows, experts = sample()
        expected = computed(kernel, 0, gated(GluKind.SWIGLU), x, rows, experts)
        for row, bad in ((3, np.nan), (4, np.inf), (5, -np.inf)):
            x[row, 17] = bad
        found = computed(kernel, 0, gated(GluKind.SWIGLU), x, rows, experts)
        broken = np.isin(np.arange(N_ROW), [3, 4, 5])
        assert not np.isfinite(found[broken]).any()
        assert (found[~broken] == expected[~broken]).all()


@pytest.mark.parametrize("n_pairs", [1, TILE - 1, TILE, TILE + 1, 3 * TILE + 1, 50])
def test_every_pair_is_in_one_tile_of_its_expert(n_pairs: int) -> None:
    draws = np.random.default_rng(n_pairs)
    rows, local = (draws.integers(0, 6, n_pairs).astype(np.int32) for _ in range(2))
    tables = tables_of(rows, local, 6)
    numbers = tables.numbers
    assert (numbers[:n_pairs] == rows).all()
    assert (numbers[n_pairs : 2 * n_pairs] == local).all()
    order, tiles = numbers[2 * n_pairs : 3 * n_pairs], numbers[3 * n_pairs :].reshape(-1, 2)
    assert len(tiles) == tables.n_shared + tables.n_ones
    assert sorted(order[place] for begin, end in tiles for place in range(begin, end)) == list(range(n_pairs))
    for index, (begin, end) in enumerate(tiles):
        assert bool(end - begin == 1) is (index >= tables.n_shared)
        assert end - begin <= TILE
        assert len(set(local[order[begin:end]])) == 1


# ---- Requests and shards ----


@pytest.fixture(scope="module")
def part(odd: Bench, device: str) -> Iterator[OpenClKernel]:
    """Two experts of each layer, and SWIGLU as program 0."""
    part = opencl(odd, device, [1, 2])
    assert part.add_program(SWIGLU) == 0
    yield part
    part.close()


X = np.ones((2, 19), np.float32)


@pytest.mark.parametrize(
    "layer, program, rows, experts, code",
    [
        (1, 0, [0, 1], [1, 2], "unknown_layer"),
        (-1, 0, [0, 1], [1, 2], "unknown_layer"),
        (2, 7, [0, 1], [1, 2], "unknown_program"),
        (2, -1, [0, 1], [1, 2], "unknown_program"),
        (2, 0, [0, 1], [1, 3], "foreign_expert"),
        (2, 0, [0, 1], [1, N_EXPERT], "foreign_expert"),
        (2, 0, [0, 1], [1, -1], "foreign_expert"),
        (2, 0, [0, 1], [2**31 - 1, 1], "foreign_expert"),
        (2, 0, [0, 1], [-(2**31), 1], "foreign_expert"),
        (2, 0, [0, 2], [1, 2], "row_out_of_range"),
        (2, 0, [0, -1], [1, 2], "row_out_of_range"),
        (2, 0, [0], [1], "shape_invalid"),  # more rows than pairs
        (2, 0, [], [], "shape_invalid"),
    ],
)
def test_requests_are_checked_before_anything_is_computed(
    part: OpenClKernel, layer: int, program: int, rows: list[int], experts: list[int], code: str
) -> None:
    with pytest.raises(RemoteProtocolError) as raised:
        compute(part, program, X, rows, experts, layer=layer, width_out=21)
    assert raised.value.code == code
    assert np.isfinite(compute(part, 0, X, [0, 1], [1, 2])).all()  # and it goes on serving


def test_programs_are_numbered_once_and_bounded(odd: Bench, device: str) -> None:
    kernel = opencl(odd, device)
    assert [kernel.add_program(each) for each in (SWIGLU, EVERYTHING, SWIGLU)] == [0, 1, 0]
    for factor in range(PROGRAMS_MAX - 2):
        kernel.add_program(scaled(factor))
    with pytest.raises(RemoteProtocolError, match="too many different programs"):
        kernel.add_program(scaled(PROGRAMS_MAX))


def test_a_program_may_fit_some_layers_only_or_none(device: str) -> None:
    bench = make_bench({suffix: ODD_SHAPES[suffix] for suffix in SWIGLU.suffixes})
    kept = tuple(each for each in bench.manifest.tensors if each.name != "blk.0.ffn_up_exps.weight")
    bench.manifest = replace(bench.manifest, tensors=kept)
    kernel = opencl(bench, device)
    number = kernel.add_program(SWIGLU)
    assert compute(kernel, number, X, [0, 1], [0, 1], layer=2).shape == (2, 21)
    with pytest.raises(RemoteProtocolError) as raised:
        compute(kernel, number, X, [0, 1], [0, 1], layer=0, width_out=21)
    assert raised.value.code == "program_unfit"
    with pytest.raises(RemoteProtocolError) as raised:
        kernel.add_program(EVERYTHING)
    assert raised.value.code == "program_unfit"


def test_it_holds_its_shard_and_says_where(odd: Bench, device: str) -> None:
    kernel = opencl(odd, device, [2, 5])
    assert kernel.backend == "opencl"
    assert kernel.device_name
    # Rows of 19 and of 13 numbers are padded to 32.
    weights = 4 * 32 * (13 + 13 + 21 + 26)
    others = 4 * (13 + 13 + 21 + 26 + 4)
    assert kernel.memory_bytes == 2 * 2 * (weights + others)
    assert kernel.row_widths(0, kernel.add_program(SWIGLU)) == (19, 21)
    kernel.close()
    kernel.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        _ = kernel.memory_bytes
    with pytest.raises(LocalProtocolError, match="closed"):
        kernel.add_program(SWIGLU)


def test_a_shard_that_cannot_be_loaded_says_why(
    odd: Bench, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LocalProtocolError, match="without routed experts"):
        OpenClKernel(odd.manifest, ShardSet.from_pairs([(1, 0)]), odd.read, device=device)
    with pytest.raises(EngineFailed, match="wrong size"):
        OpenClKernel(odd.manifest, ShardSet.from_pairs([(0, 0)]), lambda name, expert: b"abc", device=device)
    with pytest.raises(EngineFailed, match="7 experts"):
        opencl(odd, device, [N_EXPERT])
    with pytest.raises(ConfigurationInvalid, match="'no such card' is not here"):
        opencl(odd, "no such card")
    monkeypatch.setattr(OpenClQueue, "allocation_bytes_max", 1000)
    with pytest.raises(EngineFailed, match="gives at most 1000"):
        opencl(odd, device)


@pytest.fixture(scope="module")
def square() -> Bench:
    """Rows of 256 floats: a whole block of every type."""
    return make_bench(dict.fromkeys(SWIGLU.suffixes, (256, 256, N_EXPERT)))


def retyped(bench: Bench, type_name: str) -> tuple[ModelManifest, bytes]:
    """The model with weights of another type, and noise that can be one expert's part of a tensor."""
    kind = TENSOR_TYPES_BY_NAME[type_name]
    size_bytes = kind.row_size_bytes(256) * 256
    manifest = replace(
        bench.manifest,
        tensors=tuple(
            replace(each, type=kind, size_bytes=size_bytes * N_EXPERT, offset=64 + size_bytes * N_EXPERT * i)
            for i, each in enumerate(bench.manifest.tensors)
        ),
        file_size_bytes=1 << 30,
    )
    return manifest, np.random.default_rng(4).integers(0, 256, size_bytes, np.uint8).tobytes()


@pytest.mark.parametrize("type_name", sorted(set(TENSOR_TYPES_BY_NAME) - set(WEIGHT_TYPES)))
def test_types_that_our_kernels_do_not_expand_are_refused_by_name(square: Bench, type_name: str) -> None:
    manifest, noise = retyped(square, type_name)
    with pytest.raises(EngineFailed, match=f"does not compute with {type_name} "):
        OpenClKernel(manifest, ShardSet.from_pairs([(0, 0)]), lambda name, expert: noise)


@pytest.mark.parametrize("type_name", WEIGHT_TYPES)
def test_any_bytes_and_any_row_leave_the_process_alive(square: Bench, type_name: str, device: str) -> None:
    """Weights are noise here, scales among them infinite or no number, and so are the rows."""
    manifest, noise = retyped(square, type_name)
    shard = ShardSet.from_pairs([(2, 0), (2, 3)])
    kernel = OpenClKernel(manifest, shard, lambda name, expert: noise, device=device)
    x = np.random.default_rng(5).normal(size=(20, 256)).astype(np.float32)
    x[3:8, ::7] = np.array([[np.nan], [np.inf], [-np.inf], [3e38], [1e-42]])
    out = compute(kernel, kernel.add_program(SWIGLU), x, list(range(20)), [0, 3] * 10)
    assert out.shape == (20, 256)


# ---- Trouble with the device ----


@dataclass
class Trouble:
    """Raises at the n-th use of a method of the queue."""

    raised: Exception
    after: int

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.after -= 1
        if self.after < 0:
            raise self.raised
        return self.true(*arguments, **options)

    true: Callable[..., Any] = print


@pytest.mark.parametrize(
    "method, after", [("start", 0), ("start", 2), ("write", 1), ("read", 0), ("allocate", 0)]
)
@pytest.mark.parametrize("kind", ["RuntimeError", "MemoryError", "LogicError"])
def test_a_device_in_trouble_fails_the_call_and_not_the_process(
    part: OpenClKernel, method: str, after: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cl: Any = pytest.importorskip("pyopencl")
    rows, experts = [0, 1] * 10, [1, 2] * 10
    expected = compute(part, 0, X, rows, experts)
    error = getattr(cl, kind)(f"{method} failed: DEVICE_NOT_AVAILABLE")
    with monkeypatch.context() as patch:
        patch.setattr(part._runner, "_scratch", Scratch(part._opened()))  # memory is taken anew
        patch.setattr(part._queue, method, Trouble(error, after, getattr(part._queue, method)))
        with pytest.raises(EngineFailed, match=f"OpenCL device .* failed: {method} failed"):
            compute(part, 0, X, rows, experts)
    assert (compute(part, 0, X, rows, experts) == expected).all()


def test_a_compiler_that_refuses_our_kernels_is_told(
    odd: Bench, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in opencl_queue.SOURCES.iterdir():
        (tmp_path / each.name).write_text(each.read_text())
    (tmp_path / "products.cl").write_text("this is no program\n")
    monkeypatch.setattr(opencl_queue, "SOURCES", tmp_path)
    with pytest.raises(EngineFailed, match=r"cannot build products\.cl"):
        opencl(odd, device)


def test_without_pyopencl_there_is_a_sentence(odd: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    with pytest.raises(ConfigurationInvalid, match="needs PyOpenCL") as raised:
        opencl(odd, "auto")
    assert raised.value.exit_code == 6


def test_calls_of_several_threads_wait_for_one_another(odd: Bench, device: str) -> None:
    kernel = opencl(odd, device)
    number = kernel.add_program(SWIGLU)
    draws = np.random.default_rng(1)
    inputs = [draws.normal(size=(n, 19)).astype(np.float32) for n in (1, 5, 20, 3)]
    expected = [compute(kernel, number, x, range(len(x)), [4] * len(x)) for x in inputs]
    wrong: list[int] = []

    def repeat(index: int) -> None:
        for _ in range(20):
            out = compute(kernel, number, inputs[index], range(len(inputs[index])), [4] * len(inputs[index]))
            if not (out == expected[index]).all():
                wrong.append(index)

    threads = [threading.Thread(target=repeat, args=(index,)) for index in range(len(inputs))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_kernels_are_those_of_the_repository() -> None:
    """What is installed as package data are links to the sources, and none is missing."""
    root = Path(__file__).parents[2]
    sources = {each.name: each.read_bytes() for each in (root / "native" / "kernels").iterdir()}
    assert {each.name: each.read_bytes() for each in opencl_queue.SOURCES.iterdir()} == sources
