"""The ggml CPU kernel: right numbers, untouched neighbours, and a refusal for whatever else it is sent."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.kernels.ggml_cpu import PROGRAMS_MAX, GgmlCpuKernel
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.native_library import load
from kvasir_proto.errors import EngineFailed, LocalProtocolError, RemoteProtocolError
from kvasir_proto.manifest import DIGEST_SIZE_BYTES, ManifestTensor, ModelManifest, ShardSet
from kvasir_proto.program import (
    ABSENT,
    TENSOR_SUFFIXES,
    ExpertProgram,
    GluKind,
    ProgramStep,
    StepOp,
    UnaryKind,
    program_of_flat,
)
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int32]

N_EXPERT = 7
GUARD = np.float32(-777.25)

# Sizes that are a multiple of nothing; every suffix that programs may name.
ODD_SHAPES: dict[str, tuple[int, ...]] = {
    "ffn_gate_exps.weight": (19, 13, N_EXPERT),
    "ffn_up_exps.weight": (19, 13, N_EXPERT),
    "ffn_down_exps.weight": (13, 21, N_EXPERT),
    "ffn_gate_up_exps.weight": (19, 26, N_EXPERT),
    "ffn_gate_exps.bias": (13, N_EXPERT),
    "ffn_up_exps.bias": (13, N_EXPERT),
    "ffn_down_exps.bias": (21, N_EXPERT),
    "ffn_gate_up_exps.bias": (26, N_EXPERT),
    "ffn_gate_exps.scale": (N_EXPERT,),
    "ffn_up_exps.scale": (N_EXPERT,),
    "ffn_down_exps.scale": (N_EXPERT,),
    "ffn_gate_up_exps.scale": (N_EXPERT,),
}


@dataclass(repr=False)
class Bench:
    """A made-up model's manifest and its expert tensors as floats."""

    manifest: ModelManifest
    tensors: dict[str, Floats]
    quantised: dict[str, bytes]

    def read(self, name: str, expert: int) -> bytes:
        if name in self.quantised:
            size = len(self.quantised[name]) // N_EXPERT
            return self.quantised[name][expert * size : (expert + 1) * size]
        return bytes(self.tensors[name][expert].tobytes())

    def kernel(self, experts: Sequence[int] = range(N_EXPERT), threads: int = 1) -> GgmlCpuKernel:
        shard = ShardSet.from_pairs((layer, expert) for layer in (0, 2) for expert in experts)
        return GgmlCpuKernel(self.manifest, shard, self.read, threads=threads)


def make_bench(shapes: Mapping[str, tuple[int, ...]], type_name: str = "f32") -> Bench:
    draws = np.random.default_rng(3)
    tensors: dict[str, Floats] = {}
    quantised: dict[str, bytes] = {}
    described = []
    offset = 64
    for layer in (0, 2):
        for suffix, shape in shapes.items():
            name = f"blk.{layer}.{suffix}"
            kind = TENSOR_TYPES_BY_NAME[type_name if suffix.endswith("weight") else "f32"]
            tensors[name] = (draws.normal(size=shape[::-1]) / np.sqrt(shape[0])).astype(np.float32)
            if kind.name != "f32":
                from gguf import GGMLQuantizationType, quants

                packed = quants.quantize(tensors[name], GGMLQuantizationType(kind.id))
                quantised[name] = packed.tobytes()
                tensors[name] = quants.dequantize(packed, GGMLQuantizationType(kind.id))
            size_bytes = kind.row_size_bytes(shape[0]) * int(np.prod(shape[1:], dtype=np.int64))
            described.append(
                ManifestTensor(name, kind, shape, offset, size_bytes, bytes(DIGEST_SIZE_BYTES * shape[-1]))
            )
            offset += size_bytes
    manifest = ModelManifest(
        name="bench",
        architecture="none",
        n_layer=3,
        n_embd=19,
        n_ff=13,
        n_expert=N_EXPERT,
        n_expert_used=2,
        n_vocab=0,
        n_ctx_train=0,
        moe_layers=(0, 2),
        file_size_bytes=offset,
        data_offset=64,
        header_sha256=bytes(32),
        metadata_sha256=bytes(32),
        hyper_parameters_sha256=bytes(32),
        tokenizer_sha256=bytes(32),
        template_sha256=bytes(32),
        tensors=tuple(described),
    )
    return Bench(manifest, tensors, quantised)


@pytest.fixture(scope="module")
def odd() -> Bench:
    return make_bench(ODD_SHAPES)


@pytest.fixture(scope="module")
def square() -> Bench:
    """Rows of 256 floats: a whole block of every type."""
    return make_bench(dict.fromkeys(SWIGLU.suffixes, (256, 256, N_EXPERT)))


@pytest.fixture(scope="module")
def kernel(odd: Bench) -> Iterator[GgmlCpuKernel]:
    kernel = odd.kernel()
    yield kernel
    kernel.close()


def compute(
    kernel: ExpertKernel,
    program: int,
    x: Floats,
    row_of_pair: Sequence[int],
    expert_of_pair: Sequence[int],
    *,
    layer: int = 2,
    width_out: int | None = None,
) -> Floats:
    """The kernel's rows; asserts that it wrote them and nothing else, and left its inputs alone."""
    if width_out is None:
        _, width_out = kernel.row_widths(layer, program)
    # In frames from the network nothing is aligned to more than four bytes.
    unaligned = np.empty(x.size + 1, np.float32)[1:]
    unaligned[:] = x.ravel()
    rows = np.array(row_of_pair, np.int32)
    experts = np.array(expert_of_pair, np.int32)
    size = len(rows) * width_out
    out = np.full(size + 64, GUARD, np.float32)
    inputs = [each.tobytes() for each in (unaligned, rows, experts)]
    try:
        kernel.compute(
            layer,
            program,
            len(x),
            len(rows),
            unaligned.ctypes.data,
            rows.ctypes.data,
            experts.ctypes.data,
            out[33:].ctypes.data,
        )
    except Exception:
        assert (out == GUARD).all(), "a refused call has written something"
        raise
    assert (out[:33] == GUARD).all()
    assert (out[33 + size :] == GUARD).all()
    assert inputs == [each.tobytes() for each in (unaligned, rows, experts)]
    return out[33 : 33 + size].reshape(len(rows), width_out)


def words(*values: int) -> bytes:
    return struct.pack("<4i", *values, *[0] * (4 - len(values)))


def floats(*values: float) -> bytes:
    return struct.pack("<4f", *values, *[0.0] * (4 - len(values)))


def matmul(a: int, part: str) -> ProgramStep:
    return ProgramStep(StepOp.EXPERT_MATMUL, a, tensor=f"ffn_{part}_exps.weight")


SWIGLU = ExpertProgram(
    (
        matmul(0, "gate"),
        matmul(0, "up"),
        ProgramStep(StepOp.GLU, 1, 2, params=words(GluKind.SWIGLU)),
        matmul(3, "down"),
    ),
    input_per_slot=False,
)

# Every operation, in shapes that real graphs have: scales, biases, slices, clamps, and both forms of a GLU.
EVERYTHING = ExpertProgram(
    (
        matmul(0, "gate_up"),
        ProgramStep(StepOp.EXPERT_SCALE, ABSENT, tensor="ffn_gate_up_exps.scale"),
        ProgramStep(StepOp.MULTIPLY, 1, 2),
        ProgramStep(StepOp.EXPERT_ADD, 3, tensor="ffn_gate_up_exps.bias"),
        ProgramStep(StepOp.SLICE, 4, params=words(0, 13)),
        ProgramStep(StepOp.SLICE, 4, params=words(13, 13)),
        ProgramStep(StepOp.CLAMP, 6, params=floats(-0.5, 0.75)),
        ProgramStep(StepOp.UNARY, 5, params=words(UnaryKind.TANH)),
        ProgramStep(StepOp.MULTIPLY, 8, 7),
        ProgramStep(StepOp.GLU, 4, params=words(GluKind.REGLU)),
        ProgramStep(StepOp.LINEAR, 10, params=floats(0.5, 0.25)),
        ProgramStep(StepOp.SQUARE, 11),
        ProgramStep(StepOp.MULTIPLY, 12, 9),
        matmul(13, "down"),
        ProgramStep(StepOp.EXPERT_ADD, 14, tensor="ffn_down_exps.bias"),
    ),
    input_per_slot=False,
)


def expected_row(bench: Bench, program: ExpertProgram, layer: int, x: Floats, expert: int) -> Floats:
    """What a program means, in float64."""
    values: list[npt.NDArray[np.float64]] = [x.astype(np.float64)]
    for step in program.steps:
        a = values[step.input_a] if step.input_a != ABSENT else np.zeros(0)
        b = values[step.input_b] if step.input_b != ABSENT else None
        held = bench.tensors[f"blk.{layer}.{step.tensor}"][expert] if step.tensor else np.zeros(0)
        integer, number = step.words(), step.floats()
        match step.op:
            case StepOp.EXPERT_MATMUL:
                value = held.astype(np.float64) @ a
            case StepOp.EXPERT_ADD:
                value = a + held
            case StepOp.EXPERT_SCALE:
                value = np.array([held], np.float64)
            case StepOp.MULTIPLY:
                assert b is not None
                value = a * b
            case StepOp.SLICE:
                value = a[integer[0] : integer[0] + integer[1]]
            case StepOp.CLAMP:
                value = np.clip(a, number[0], number[1])
            case StepOp.LINEAR:
                value = a * number[0] + number[1]
            case StepOp.SQUARE:
                value = a * a
            case StepOp.UNARY:
                assert integer[0] == UnaryKind.TANH
                value = np.tanh(a)
            case StepOp.GLU:
                gate, up = (a, b) if b is not None else np.split(a, 2)
                assert up is not None
                value = (
                    np.maximum(gate, 0) * up
                    if integer[0] == GluKind.REGLU
                    else gate / (1 + np.exp(-gate)) * up
                )
        values.append(value)
    return values[-1].astype(np.float32)


@pytest.mark.parametrize("program", [SWIGLU, EVERYTHING], ids=["swiglu", "everything"])
@pytest.mark.parametrize("n_pairs", [1, 2, 3, 17])
def test_rows_are_what_the_program_means(
    odd: Bench, kernel: GgmlCpuKernel, program: ExpertProgram, n_pairs: int
) -> None:
    draws = np.random.default_rng(n_pairs)
    x = draws.normal(size=(max(1, n_pairs // 2), 19)).astype(np.float32)
    rows = draws.integers(0, len(x), n_pairs)
    experts = draws.integers(0, N_EXPERT, n_pairs)
    out = compute(kernel, kernel.add_program(program), x, rows.tolist(), experts.tolist())
    for pair in range(n_pairs):
        expected = expected_row(odd, program, 2, x[rows[pair]], int(experts[pair]))
        np.testing.assert_allclose(out[pair], expected, rtol=2e-5, atol=2e-6)


# Not K-quants: ggml has another kernel for them from 8 rows of one expert on (see kernel.cpp).
@pytest.mark.parametrize("type_name", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_layout_grouping_and_sharding_do_not_change_a_bit(type_name: str) -> None:
    shapes = {
        suffix: (64, 96, N_EXPERT) if "down" not in suffix else (96, 64, N_EXPERT)
        for suffix in SWIGLU.suffixes
    }
    bench = make_bench(shapes, type_name)
    whole = bench.kernel()
    number = whole.add_program(SWIGLU)
    draws = np.random.default_rng(9)
    x = draws.normal(size=(12, 64)).astype(np.float32)
    rows = np.repeat(np.arange(12), 3)  # three slots a token, in order: the layout without gathering
    experts = draws.integers(0, N_EXPERT, 36)
    expected = compute(whole, number, x, rows.tolist(), experts.tolist())

    order = draws.permutation(36)
    shuffled = compute(whole, number, x, rows[order].tolist(), experts[order].tolist())
    assert (shuffled == expected[order]).all()
    for pair in range(36):
        single = compute(whole, number, x[rows[pair]][None], [0], [int(experts[pair])])
        assert (single[0] == expected[pair]).all()
    for held in ([1, 4], [0, 2, 3, 5, 6]):
        part = bench.kernel(held)
        mine = np.flatnonzero(np.isin(experts, held))
        needed, row_of_pair = np.unique(rows[mine], return_inverse=True)
        out = compute(part, part.add_program(SWIGLU), x[needed], row_of_pair.tolist(), experts[mine].tolist())
        assert (out == expected[mine]).all()
        part.close()
    threaded = bench.kernel(threads=2)
    out = compute(threaded, threaded.add_program(SWIGLU), x, rows.tolist(), experts.tolist())
    assert (out == expected).all()
    threaded.close()
    whole.close()


def test_a_kernel_holds_its_shard_and_nothing_else(odd: Bench) -> None:
    held = odd.kernel([2, 5])
    per_expert = 4 * sum(int(np.prod(shape[:-1], dtype=np.int64)) for shape in ODD_SHAPES.values())
    assert held.memory_bytes == 2 * 2 * per_expert
    assert held.row_widths(0, held.add_program(SWIGLU)) == (19, 21)
    held.close()
    held.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        _ = held.memory_bytes


def scaled(factor: float) -> ExpertProgram:
    linear = ProgramStep(StepOp.LINEAR, 4, params=floats(factor))
    return ExpertProgram((*SWIGLU.steps, linear), input_per_slot=False)


def test_programs_are_numbered_once(odd: Bench) -> None:
    kernel = odd.kernel()
    assert [kernel.add_program(each) for each in (SWIGLU, EVERYTHING, SWIGLU)] == [0, 1, 0]
    per_slot = replace(SWIGLU, input_per_slot=True)
    assert kernel.add_program(per_slot) == 2
    for factor in range(PROGRAMS_MAX - 3):
        kernel.add_program(scaled(factor))
    with pytest.raises(RemoteProtocolError, match="too many different programs"):
        kernel.add_program(scaled(PROGRAMS_MAX))
    kernel.close()


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
        (2, 0, [0, 2], [1, 2], "row_out_of_range"),
        (2, 0, [0, -1], [1, 2], "row_out_of_range"),
        (2, 0, [0], [1], "shape_invalid"),  # more rows than pairs
        (2, 0, [], [], "shape_invalid"),
    ],
)
def test_requests_are_checked_before_anything_is_computed(
    odd: Bench, layer: int, program: int, rows: list[int], experts: list[int], code: str
) -> None:
    kernel = odd.kernel([1, 2])
    number = kernel.add_program(SWIGLU)
    assert number == 0
    with pytest.raises(RemoteProtocolError) as raised:
        compute(kernel, program, X, rows, experts, layer=layer, width_out=21)
    assert raised.value.code == code
    assert np.isfinite(compute(kernel, number, X, [0, 1], [1, 2])).all()  # and it goes on serving
    kernel.close()


def test_a_program_that_fits_no_layer_is_refused(odd: Bench) -> None:
    kernel = odd.kernel()
    backwards = ExpertProgram((matmul(0, "down"), matmul(1, "down")), input_per_slot=False)
    with pytest.raises(RemoteProtocolError, match="not as wide") as raised:
        kernel.add_program(backwards)
    assert raised.value.code == "program_unfit"
    kernel.close()


def test_a_program_may_fit_some_layers_only() -> None:
    shapes = {suffix: ODD_SHAPES[suffix] for suffix in SWIGLU.suffixes}
    bench = make_bench(shapes)
    kept = tuple(each for each in bench.manifest.tensors if each.name != "blk.0.ffn_up_exps.weight")
    bench.manifest = replace(bench.manifest, tensors=kept)
    kernel = bench.kernel()
    number = kernel.add_program(SWIGLU)
    assert compute(kernel, number, X, [0, 1], [0, 1], layer=2).shape == (2, 21)
    with pytest.raises(RemoteProtocolError, match="the layer has no such tensor") as raised:
        compute(kernel, number, X, [0, 1], [0, 1], layer=0, width_out=21)
    assert raised.value.code == "program_unfit"
    kernel.close()


def test_a_shard_that_cannot_be_loaded_says_why(odd: Bench) -> None:
    with pytest.raises(LocalProtocolError, match="without routed experts"):
        GgmlCpuKernel(odd.manifest, ShardSet.from_pairs([(1, 0)]), odd.read)
    with pytest.raises(EngineFailed, match="8192 threads"):
        odd.kernel(threads=8192)
    with pytest.raises(EngineFailed, match="bytes here, not 3"):
        GgmlCpuKernel(odd.manifest, ShardSet.from_pairs([(0, 0)]), lambda name, expert: b"abc")
    with pytest.raises(EngineFailed, match="out of range"):
        odd.kernel([N_EXPERT])
    i32 = replace(odd.manifest.tensors[0], type=TENSOR_TYPES_BY_NAME["i32"])
    odd_type = replace(odd.manifest, tensors=(i32, *odd.manifest.tensors[1:]))
    with pytest.raises(EngineFailed, match="type 26, which this kernel cannot use"):
        GgmlCpuKernel(odd_type, ShardSet.from_pairs([(0, 0)]), odd.read)


NO_PRODUCT = {"f64", "i8", "i16", "i32", "i64"}
"""Types that ggml's CPU backend cannot multiply rows by."""


@pytest.mark.parametrize("type_name", sorted(TENSOR_TYPES_BY_NAME))
def test_any_type_any_bytes_and_any_row_leave_the_process_alive(square: Bench, type_name: str) -> None:
    """Weights are noise here, scales among them infinite or no number, and so are the rows."""
    kind = TENSOR_TYPES_BY_NAME[type_name]
    size_bytes = kind.row_size_bytes(256) * 256
    manifest = replace(
        square.manifest,
        tensors=tuple(
            replace(each, type=kind, size_bytes=size_bytes * N_EXPERT, offset=64 + size_bytes * N_EXPERT * i)
            for i, each in enumerate(square.manifest.tensors)
        ),
        file_size_bytes=1 << 30,
    )
    noise = np.random.default_rng(4).integers(0, 256, size_bytes, np.uint8).tobytes()
    shard = ShardSet.from_pairs([(2, 0), (2, 3)])
    if type_name in NO_PRODUCT:
        with pytest.raises(EngineFailed, match="which this kernel cannot use"):
            GgmlCpuKernel(manifest, shard, lambda name, expert: noise)
        return
    kernel = GgmlCpuKernel(manifest, shard, lambda name, expert: noise)
    x = np.random.default_rng(5).normal(size=(20, 256)).astype(np.float32)
    x[3:8, ::7] = np.array([[np.nan], [np.inf], [-np.inf], [3e38], [1e-42]])
    out = compute(kernel, kernel.add_program(SWIGLU), x, list(range(20)), [0, 3] * 10)
    assert out.shape == (20, 256)
    kernel.close()


# ---- Hostile programs: what the Python checks refuse is given to native code directly ----

integers = st.one_of(st.integers(-3, 14), st.sampled_from([-(2**31), 2**31 - 1, 0x7FC00000, 0x3F800000]))


class _Grower:
    """Grows a random program backwards from a row of the wanted width; every value it makes is used."""

    MATMULS: ClassVar = {13: ("gate", "up"), 26: ("gate_up",), 21: ("down",)}

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.steps: list[list[int]] = []
        self.known: dict[int, list[int]] = {}

    def row(self, width: int, depth: int) -> int:
        """The number of a value as wide as this, new or known."""
        if self.known.get(width) and self.draw(st.integers(0, 4)) == 0:
            return self.draw(st.sampled_from(self.known[width]))
        choices = (
            ["matmul"] if depth <= 0 else ["matmul", "unary", "clamp", "square", "linear", "pair", "glu"]
        )
        if depth > 0:
            choices += ["add", "scale"] + (["slice", "halves"] if width == 13 else [])
        kind = self.draw(st.sampled_from(choices))
        part = self.draw(st.sampled_from(self.MATMULS[width]))
        if kind == "matmul":
            return self.step(
                width, StepOp.EXPERT_MATMUL, self.row(13, depth - 1) if width == 21 else 0, part=part
            )
        if kind in ("slice", "halves"):
            a = self.row(26, depth - 1)
            if kind == "halves":
                return self.step(13, StepOp.GLU, a, params=(self.draw(st.integers(0, 6)), 1))
            return self.step(13, StepOp.SLICE, a, params=(self.draw(st.integers(0, 13)), 13))
        a = self.row(width, depth - 1)
        match kind:
            case "add":
                return self.step(width, StepOp.EXPERT_ADD, a, part=part)
            case "scale":
                return self.step(
                    width, StepOp.MULTIPLY, a, self.step(1, StepOp.EXPERT_SCALE, ABSENT, part="up")
                )
            case "unary":
                return self.step(width, StepOp.UNARY, a, params=(self.draw(st.integers(0, 16)),))
            case "clamp":
                return self.step(width, StepOp.CLAMP, a, params=(-1082130432, 1065353216))  # -1.0, 1.0
            case "square":
                return self.step(width, StepOp.SQUARE, a)
            case "linear":
                return self.step(width, StepOp.LINEAR, a, params=(1056964608,))  # 0.5
            case "pair":
                return self.step(width, StepOp.MULTIPLY, a, self.row(width, depth - 1))
        return self.step(
            width, StepOp.GLU, a, self.row(width, depth - 1), params=(self.draw(st.integers(0, 6)),)
        )

    def step(
        self, width: int, op: StepOp, a: int, b: int = ABSENT, *, part: str = "", params: Sequence[int] = ()
    ) -> int:
        kind = {StepOp.EXPERT_MATMUL: "weight", StepOp.EXPERT_ADD: "bias", StepOp.EXPERT_SCALE: "scale"}.get(
            op
        )
        tensor = TENSOR_SUFFIXES.index(f"ffn_{part}_exps.{kind}") if kind else ABSENT
        self.steps.append([op, a, b, tensor, *params, *[0] * (4 - len(params))])
        if width > 1:
            self.known.setdefault(width, []).append(len(self.steps))
        return len(self.steps)


@st.composite
def flat_programs(draw: st.DrawFn) -> bytes:
    """Programs in the flat form, most of them good; the others with one wild number somewhere."""
    grower = _Grower(draw)
    grower.row(draw(st.sampled_from([13, 21, 26])), draw(st.integers(0, 4)))
    if draw(st.integers(0, 2)) == 0:
        step = draw(st.sampled_from(grower.steps))
        step[draw(st.integers(0, 7))] = draw(integers)
    return b"".join(struct.pack("<8i", *step) for step in grower.steps)


@settings(max_examples=400)
@given(flat=flat_programs())
def test_native_code_and_python_agree_on_what_a_program_is(
    odd: Bench, kernel: GgmlCpuKernel, flat: bytes
) -> None:
    """And whatever both accept can be run: ggml's own checks would end this process."""
    native = load()
    handle = kernel._handle()
    spare = PROGRAMS_MAX  # a number that the kernel never gives out
    accepted = native.kernel_add_program(handle, spare, flat, len(flat) // 32) == 0
    try:
        program = program_of_flat(flat, input_per_slot=False)
    except LocalProtocolError:
        assert not accepted
        return
    assert accepted
    status, width_in, width_out = native.kernel_bind(handle, 0, spare)
    try:
        widths = program.row_widths(ODD_SHAPES.get)
    except RemoteProtocolError:
        assert status == -4
        return
    if status == -4:
        assert "live at once" in native.kernel_error(handle)  # the one bound that is native code's own
        return
    assert (status, width_in, width_out) == (0, widths[0], widths[-1])
    x = np.full((2, width_in), 0.5, np.float32)
    for rows, experts in (([0, 1], [3, 0]), ([0, 0, 1], [6, 6, 1]), ([1, 1, 0, 0], [1, 2, 3, 4])):
        out = compute(kernel, spare, x, rows, experts, layer=0, width_out=width_out)
        assert out.shape == (len(rows), width_out)


@settings(max_examples=150)
@given(flat=st.binary(min_size=32, max_size=32 * 6).map(lambda data: data[: len(data) // 32 * 32]))
def test_arbitrary_bytes_are_no_program(kernel: GgmlCpuKernel, flat: bytes) -> None:
    native = load()
    assert native.kernel_add_program(kernel._handle(), PROGRAMS_MAX, flat, len(flat) // 32) == -4


@pytest.mark.parametrize("n_steps", [0, -1, 33, 2**31 - 1])
def test_a_step_count_out_of_range_is_refused_unread(kernel: GgmlCpuKernel, n_steps: int) -> None:
    assert load().kernel_add_program(kernel._handle(), PROGRAMS_MAX, bytes(32), n_steps) == -4


def test_native_calls_release_the_interpreter() -> None:
    assert isinstance(load()._library, ctypes.CDLL)
    assert not isinstance(load()._library, ctypes.PyDLL)


def test_tensor_numbers_are_those_of_the_header() -> None:
    parts, kinds = ("gate", "up", "down", "gate_up"), ("weight", "scale", "bias")
    numbers = [3 * part + kind for part in range(4) for kind in range(3)]
    names = [f"ffn_{parts[number // 3]}_exps.{kinds[number % 3]}" for number in numbers]
    assert tuple(names) == TENSOR_SUFFIXES
