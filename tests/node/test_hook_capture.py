"""Capture on hand-made sub-graphs: shapes that few models have, and those that are no expert program."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvasir_node.backbone.hook import ExpertHook, LayerCall
from kvasir_node.native_library import load
from kvasir_proto.errors import EngineFailed, LocalProtocolError
from kvasir_proto.program import ABSENT, ExpertProgram, GluKind, ProgramStep, StepOp, UnaryKind

N_EMBD, N_FF, N_EXPERT, N_SLOT, N_TOKEN = 16, 8, 5, 2, 3
F32, I32 = 0, 26
Node = int


class _InitParams(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("memory", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """The few functions of ggml's public interface that build a graph."""

    def __init__(self) -> None:
        load()  # so that the name below is the copy that llama_cpp brought
        self._library = ctypes.CDLL("libggml-base.so.0")

    def call(self, name: str, *arguments: object, result: Any = ctypes.c_void_p) -> int:
        function = self._library[f"ggml_{name}"]
        function.restype = result
        return function(*arguments)  # type: ignore[no-any-return]


class SubGraph:
    """Builds what the scheduler would hand to the hook, and hands it over."""

    def __init__(self, hook: ExpertHook) -> None:
        native, handle = load(), hook._handle()
        self.ggml = Ggml()
        self.device = ctypes.c_void_p(native.hook_device(handle))
        self.expert_buffer_type = ctypes.c_void_p(native.hook_buffer_type(handle))
        self.contexts = [self._context() for _ in range(3)]
        self.weights, self.inputs, self.nodes = self.contexts
        self.buffers: list[int] = []
        self.x = self._tensor(self.inputs, F32, N_EMBD, 1, N_TOKEN)
        self.ids = self._tensor(self.inputs, I32, N_SLOT, N_TOKEN)
        self._expert_tensors: dict[str, Node] = {}

    def _context(self) -> int:
        return self.ggml.call("init", _InitParams(1 << 20, None, True))

    def _tensor(self, context: int, kind: int, *shape: int) -> Node:
        dimensions = (ctypes.c_int64 * len(shape))(*shape)
        return self.ggml.call("new_tensor", ctypes.c_void_p(context), kind, len(shape), dimensions)

    def expert(self, name: str, *shape: int) -> Node:
        """A routed expert's tensor, in the hook's buffer type."""
        tensor = self._expert_tensors.get(name)
        if tensor is None:
            tensor = self._expert_tensors[name] = self._tensor(self.weights, F32, *shape, N_EXPERT)
            self.ggml.call("set_name", ctypes.c_void_p(tensor), name.encode())
        return tensor

    def outside(self, *shape: int) -> Node:
        """A value that somebody else computed."""
        return self._tensor(self.inputs, F32, *shape)

    def op(self, name: str, *arguments: Node | ctypes.c_float | ctypes.c_int64 | ctypes.c_size_t) -> Node:
        """Append ggml_<name>; plain integers are tensors."""
        converted = [ctypes.c_void_p(each) if isinstance(each, int) else each for each in arguments]
        return self.ggml.call(name, ctypes.c_void_p(self.nodes), *converted)

    def gate(self) -> Node:
        return self.op(
            "mul_mat_id", self.expert("blk.3.ffn_gate_exps.weight", N_EMBD, N_FF), self.x, self.ids
        )

    def up(self, layer: int = 3) -> Node:
        weight = self.expert(f"blk.{layer}.ffn_up_exps.weight", N_EMBD, N_FF)
        return self.op("mul_mat_id", weight, self.x, self.ids)

    def down(self, a: Node) -> Node:
        return self.op("mul_mat_id", self.expert("blk.3.ffn_down_exps.weight", N_FF, N_EMBD), a, self.ids)

    def taken(self, node: Node) -> bool:
        """Whether the hook would take the node from the scheduler."""
        self._allocate()
        return bool(
            self.ggml.call(
                "backend_dev_supports_op", self.device, ctypes.c_void_p(node), result=ctypes.c_bool
            )
        )

    def _allocate(self) -> None:
        if not self.buffers:
            host = self.ggml.call("backend_cpu_buffer_type")
            for context, kind in zip(
                self.contexts, (self.expert_buffer_type, *[ctypes.c_void_p(host)] * 2), strict=True
            ):
                self.buffers.append(
                    self.ggml.call("backend_alloc_ctx_tensors_from_buft", ctypes.c_void_p(context), kind)
                )

    def compute(self, *outputs: Node) -> int:
        """What the hook's backend says to the graph that leads to these nodes."""
        self._allocate()
        context = self._context()
        graph = ctypes.c_void_p(self.ggml.call("new_graph", ctypes.c_void_p(context)))
        for output in outputs:
            self.ggml.call("build_forward_expand", graph, ctypes.c_void_p(output))
        backend = ctypes.c_void_p(self.ggml.call("backend_dev_init", self.device, None))
        status = self.ggml.call("backend_graph_compute", backend, graph, result=ctypes.c_int)
        self.ggml.call("backend_free", backend)
        self.ggml.call("free", ctypes.c_void_p(context))
        return status

    def close(self) -> None:
        for buffer in self.buffers:
            self.ggml.call("backend_buffer_free", ctypes.c_void_p(buffer))
        for context in self.contexts:
            self.ggml.call("free", ctypes.c_void_p(context))

    def view(self, node: Node, width: int, n_tokens: int, stride: int, offset: int) -> Node:
        """A view of `width` floats of each token, `stride` bytes apart."""
        sizes = [ctypes.c_int64(each) for each in (width, n_tokens)]
        return self.op("view_2d", node, *sizes, *[ctypes.c_size_t(each) for each in (stride, offset)])

    def slot(self, node: Node, slot: int, n_slot: int = N_SLOT) -> Node:
        """One slot of a value, of all tokens, as llama.cpp spells it."""
        return self.view(node, N_EMBD, N_TOKEN, 4 * N_EMBD * n_slot, 4 * N_EMBD * slot)

    def fill(self, node: Node, values: Sequence[float]) -> None:
        """Write a value that somebody else computed."""
        self._allocate()
        data = self.ggml.call("get_data", ctypes.c_void_p(node))
        ctypes.memmove(data, struct.pack(f"<{len(values)}f", *values), 4 * len(values))

    def floats_of(self, node: Node, count: int) -> list[float]:
        """The first numbers of a value."""
        data = self.ggml.call("get_data", ctypes.c_void_p(node))
        return list((ctypes.c_float * count).from_address(data))


@pytest.fixture
def calls() -> list[tuple[int, ...]]:
    return []


@pytest.fixture
def hook(calls: list[tuple[int, ...]]) -> Iterator[ExpertHook]:
    def on_layer(call: LayerCall) -> None:
        calls.append((call.layer, call.n_tokens, call.n_slots, call.n_embd_in, call.n_embd_out, call.x_rows))
        size = 4 * call.n_tokens * call.n_slots * call.n_embd_out
        ctypes.memset(call.out_address, 0, size)

    hook = ExpertHook(on_layer)
    yield hook
    hook.close()


@pytest.fixture
def graph(hook: ExpertHook) -> Iterator[SubGraph]:
    graph = SubGraph(hook)
    yield graph
    graph.close()


def floats(*values: float) -> bytes:
    return struct.pack("<4f", *values, *[0.0] * (4 - len(values)))


def words(*values: int) -> bytes:
    return struct.pack("<4i", *values, *[0] * (4 - len(values)))


def matmul(a: int, part: str) -> ProgramStep:
    return ProgramStep(StepOp.EXPERT_MATMUL, a, tensor=f"ffn_{part}_exps.weight")


def test_clamped_gates_spelt_out(graph: SubGraph, hook: ExpertHook, calls: list[tuple[int, ...]]) -> None:
    up = graph.op("clamp", graph.up(), ctypes.c_float(-7.0), ctypes.c_float(7.0))
    gate = graph.op(
        "clamp", graph.op("silu", graph.gate()), ctypes.c_float(-float("inf")), ctypes.c_float(7.0)
    )
    out = graph.down(graph.op("mul", gate, up))
    assert graph.compute(out) == 0
    assert calls == [(3, N_TOKEN, N_SLOT, N_EMBD, N_EMBD, N_TOKEN)]
    assert hook.programs[0] == ExpertProgram(
        (
            matmul(0, "gate"),
            ProgramStep(StepOp.UNARY, 1, params=words(UnaryKind.SILU)),
            ProgramStep(StepOp.CLAMP, 2, params=floats(-float("inf"), 7.0)),
            matmul(0, "up"),
            ProgramStep(StepOp.CLAMP, 4, params=floats(-7.0, 7.0)),
            ProgramStep(StepOp.MULTIPLY, 3, 5),
            matmul(6, "down"),
        ),
        input_per_slot=False,
    )


def test_no_gate_and_a_squared_relu(graph: SubGraph, hook: ExpertHook) -> None:
    assert graph.compute(graph.down(graph.op("sqr", graph.op("relu", graph.up())))) == 0
    assert hook.programs[0].steps == (
        matmul(0, "up"),
        ProgramStep(StepOp.UNARY, 1, params=words(UnaryKind.RELU)),
        ProgramStep(StepOp.SQUARE, 2),
        matmul(3, "down"),
    )


def test_a_value_used_twice_is_one_value(graph: SubGraph, hook: ExpertHook) -> None:
    gate = graph.gate()
    tanh = graph.op("tanh", graph.op("scale", gate, ctypes.c_float(0.5)))
    out = graph.down(graph.op("mul", tanh, graph.op("sigmoid", gate)))
    assert graph.compute(out) == 0
    assert hook.programs[0].steps == (
        matmul(0, "gate"),
        ProgramStep(StepOp.LINEAR, 1, params=floats(0.5, 0.0)),
        ProgramStep(StepOp.UNARY, 2, params=words(UnaryKind.TANH)),
        ProgramStep(StepOp.UNARY, 1, params=words(UnaryKind.SIGMOID)),
        ProgramStep(StepOp.MULTIPLY, 3, 4),
        matmul(5, "down"),
    )


def test_a_gated_unit_that_halves_its_row(graph: SubGraph, hook: ExpertHook) -> None:
    weight = graph.expert("blk.3.ffn_gate_up_exps.weight", N_EMBD, 2 * N_FF)
    both = graph.op("mul_mat_id", weight, graph.x, graph.ids)
    assert graph.compute(graph.down(graph.op("geglu_swapped", both))) == 0
    assert hook.programs[0].steps[1] == ProgramStep(StepOp.GLU, 1, params=words(GluKind.GEGLU, 1))


def test_asked_precision_is_part_of_the_program(graph: SubGraph, hook: ExpertHook) -> None:
    up = graph.up()
    out = graph.down(graph.op("silu", up))
    f32 = 10
    graph.ggml.call("prec_set_acc", ctypes.c_void_p(up), f32, result=ctypes.c_bool)
    graph.ggml.call("prec_set_src", ctypes.c_void_p(out), f32, 1, result=ctypes.c_bool)
    assert graph.compute(out) == 0
    assert [step.words() for step in hook.programs[0].steps][::2] == [(f32, 0, 0, 0), (0, 0, 0, f32)]


def test_a_scale_is_one_step_however_it_is_spelt(graph: SubGraph, hook: ExpertHook) -> None:
    def one(number: int) -> ctypes.c_int64:
        return ctypes.c_int64(number)

    scale = graph.op("reshape_3d", graph.expert("blk.3.ffn_up_exps.scale"), one(1), one(N_EXPERT), one(1))
    table = graph.op("repeat_4d", scale, one(1), one(N_EXPERT), one(N_TOKEN), one(1))
    out = graph.op("mul", graph.up(), graph.op("get_rows", table, graph.ids))
    assert all(graph.taken(node) for node in (scale, table, out))
    assert graph.compute(out) == 0
    assert hook.programs[0].steps == (
        matmul(0, "up"),
        ProgramStep(StepOp.EXPERT_SCALE, ABSENT, tensor="ffn_up_exps.scale"),
        ProgramStep(StepOp.MULTIPLY, 1, 2),
    )


def test_equal_sub_graphs_share_a_program_and_others_do_not(graph: SubGraph, hook: ExpertHook) -> None:
    outs = [graph.up(3), graph.up(4), graph.op("silu", graph.up(3))]
    assert [graph.compute(out) for out in outs] == [0, 0, 0]
    assert len(hook.programs) == 2


def test_only_what_comes_from_experts_is_taken(graph: SubGraph) -> None:
    gate, up, weights = graph.gate(), graph.up(), graph.outside(1, N_SLOT, N_TOKEN)
    dense = graph.outside(N_FF, N_SLOT, N_TOKEN)
    down = graph.down(graph.op("silu", gate))
    taken = [
        gate,
        graph.expert("blk.3.ffn_gate_exps.weight", N_EMBD, N_FF),
        graph.op("swiglu_split", gate, up),
        graph.op("mul", gate, up),
        down,
    ]
    left = [
        graph.op("mul", down, weights),  # the combine is the backbone's
        graph.op("silu", dense),
        graph.op("swiglu_split", gate, dense),
        graph.op("add", down, down),
        graph.op("mul_mat", graph.outside(N_FF, 4), dense),
    ]
    assert [graph.taken(node) for node in taken] == [True] * len(taken)
    assert [graph.taken(node) for node in left] == [False] * len(left)


def _two_layers(graph: SubGraph) -> list[Node]:
    return [graph.op("mul", graph.up(3), graph.up(4))]


def _two_inputs(graph: SubGraph) -> list[Node]:
    other = graph.outside(N_EMBD, 1, N_TOKEN)
    up = graph.op("mul_mat_id", graph.expert("blk.3.ffn_up_exps.weight", N_EMBD, N_FF), other, graph.ids)
    return [graph.op("mul", graph.gate(), up)]


def _two_outputs(graph: SubGraph) -> list[Node]:
    return [graph.gate(), graph.up()]


def _another_op(graph: SubGraph) -> list[Node]:
    return [graph.op("add", graph.gate(), graph.up())]


def _outside_factor(graph: SubGraph) -> list[Node]:
    return [graph.op("mul", graph.gate(), graph.outside(N_FF, N_SLOT, N_TOKEN))]


def _in_place(graph: SubGraph) -> list[Node]:
    return [graph.down(graph.op("silu_inplace", graph.gate()))]


def _slice_across_slots(graph: SubGraph) -> list[Node]:
    sizes = [ctypes.c_int64(each) for each in (N_FF, 1, N_TOKEN)]
    strides = [ctypes.c_size_t(4 * N_FF * each) for each in (1, N_SLOT)]
    view = graph.op("view_3d", graph.gate(), *sizes, *strides, ctypes.c_size_t(4 * N_FF))
    return [graph.op("silu", view)]


def _strange_name(graph: SubGraph) -> list[Node]:
    weight = graph.expert("blk.3.ffn_side_exps.weight", N_EMBD, N_FF)
    return [graph.op("mul_mat_id", weight, graph.x, graph.ids)]


@pytest.mark.parametrize(
    "build, reason",
    [
        (_two_layers, "it mixes layers 3 and 4"),
        (_two_inputs, "it has two inputs"),
        (_two_outputs, "1 of its 2 nodes do not lead to its output"),
        (_another_op, "it computes ADD"),
        (_outside_factor, "from outside"),
        (_in_place, "it computes UNARY in place"),
        (_slice_across_slots, "it views an activation across rows"),
        (_strange_name, "blk.3.ffn_side_exps.weight is not a routed expert's tensor"),
    ],
)
def test_what_is_no_expert_program_fails_the_decode(
    graph: SubGraph,
    hook: ExpertHook,
    calls: list[tuple[int, ...]],
    build: Callable[[SubGraph], list[Node]],
    reason: str,
) -> None:
    assert graph.compute(*build(graph)) == -1
    failure = hook.take_failure()
    assert isinstance(failure, EngineFailed)
    assert reason in str(failure)
    assert calls == []
    assert len(hook.programs) == 0


# ---- Weighted sums ----

WEIGHTS = tuple(0.5 + pair for pair in range(N_SLOT * N_TOKEN))
ROWS = [[10.0 * pair + each for each in range(N_EMBD)] for pair in range(N_SLOT * N_TOKEN)]
SUMS = [
    [WEIGHTS[pair] * ROWS[pair][each] + WEIGHTS[pair + 1] * ROWS[pair + 1][each] for each in range(N_EMBD)]
    for pair in range(0, N_SLOT * N_TOKEN, N_SLOT)
]
"""Exact in F32: small numbers with one binary place."""


class Summing:
    """A hook that is told to claim sums in layer 3, and what it was asked."""

    def __init__(self, layers: Sequence[int] = (3,)) -> None:
        self.asked: list[tuple[int, list[float]]] = []
        self.hook = ExpertHook(self.on_layer, layers)
        self.graph = SubGraph(self.hook)
        self.weights = self.graph.outside(1, N_SLOT, N_TOKEN)
        self.graph_fills: list[Node] = [self.weights]

    def on_layer(self, call: LayerCall) -> None:
        n_pairs = call.n_tokens * call.n_slots
        answer = ROWS
        weights: list[float] = []
        if call.weights_address:
            weights = list((ctypes.c_float * n_pairs).from_address(call.weights_address))
            answer = SUMS
        self.asked.append((call.layer, weights))
        flat = [each for row in answer for each in row]
        ctypes.memmove(call.out_address, struct.pack(f"<{len(flat)}f", *flat), 4 * len(flat))

    def compute(self, *outputs: Node) -> int:
        for node in self.graph_fills:
            self.graph.fill(node, WEIGHTS)
        return self.graph.compute(*outputs)

    def close(self) -> None:
        self.graph.close()
        self.hook.close()


@pytest.fixture
def summing() -> Iterator[Summing]:
    summing = Summing()
    yield summing
    summing.close()


def weighted(summing: Summing, rows: Node | None = None) -> Node:
    graph = summing.graph
    rows = graph.down(graph.op("silu", graph.up())) if rows is None else rows
    return graph.op("mul", rows, summing.weights)


def test_the_whole_sum_is_taken_where_it_has_its_plain_form(summing: Summing) -> None:
    graph = summing.graph
    product = weighted(summing)
    views = [graph.slot(product, slot) for slot in range(N_SLOT)]
    total = graph.op("add", *views)
    shared = graph.outside(N_EMBD, N_TOKEN)
    assert all(graph.taken(node) for node in (product, *views, total))
    assert not graph.taken(graph.op("scale", total, ctypes.c_float(2.0)))
    assert not graph.taken(graph.op("add", total, shared))
    assert summing.compute(total) == 0
    assert summing.asked == [(3, list(WEIGHTS))]
    assert graph.floats_of(total, N_TOKEN * N_EMBD) == [each for row in SUMS for each in row]
    assert [step.op for step in summing.hook.programs[0].steps][-1] is StepOp.EXPERT_MATMUL


def test_a_sub_graph_that_ends_with_weighted_rows_is_asked_for_rows(summing: Summing) -> None:
    """Somebody else goes on from there, a scale between groups for instance."""
    product = weighted(summing)
    assert summing.compute(product) == 0
    assert summing.asked == [(3, [])]
    assert summing.graph.floats_of(product, N_SLOT * N_TOKEN * N_EMBD) == [
        weight * each for weight, row in zip(WEIGHTS, ROWS, strict=True) for each in row
    ]


def test_a_sum_of_a_row_for_each_slot_is_added_up_here(summing: Summing) -> None:
    """Where each slot has its own input row, sums would save nothing."""
    graph = summing.graph
    graph.x = graph.outside(N_EMBD, N_SLOT, N_TOKEN)
    product = weighted(summing)
    total = graph.op("add", graph.slot(product, 0), graph.slot(product, 1))
    assert summing.compute(total) == 0
    assert summing.asked == [(3, [])]
    assert summing.hook.programs[0].input_per_slot
    assert graph.floats_of(total, N_TOKEN * N_EMBD) == [each for row in SUMS for each in row]


def test_weights_may_lie_apart(summing: Summing) -> None:
    graph = summing.graph
    table = graph.outside(4, N_SLOT, N_TOKEN)
    sizes = [ctypes.c_int64(each) for each in (1, N_SLOT, N_TOKEN)]
    strides = [ctypes.c_size_t(each) for each in (16, 16 * N_SLOT, 4)]
    summing.weights = graph.op("view_3d", table, *sizes, *strides)
    product = weighted(summing)
    total = graph.op("add", graph.slot(product, 0), graph.slot(product, 1))
    graph.fill(table, [each for weight in WEIGHTS for each in (-1.0, weight, -1.0, -1.0)])
    assert graph.compute(total) == 0
    assert summing.asked == [(3, list(WEIGHTS))]


def _mul_before_down(summing: Summing) -> list[Node]:
    graph = summing.graph
    return [graph.op("mul", graph.up(), graph.outside(1, N_SLOT, N_TOKEN))]


def _weights_of_another_shape(summing: Summing) -> list[Node]:
    graph = summing.graph
    down = graph.down(graph.up())
    return [
        graph.op("mul", down, graph.outside(N_EMBD, N_SLOT, N_TOKEN)),
        graph.op("mul", down, graph.outside(1, N_SLOT, 1)),
        graph.op("mul", down, graph.outside(1, 1, N_TOKEN)),
    ]


def _weights_before_the_experts(summing: Summing) -> list[Node]:
    graph = summing.graph
    down = graph.down(graph.up())
    return [graph.op("add", graph.slot(down, 0), graph.slot(down, 1))]


def _slots_out_of_order(summing: Summing) -> list[Node]:
    graph, product = summing.graph, weighted(summing)
    first, second = graph.slot(product, 0), graph.slot(product, 1)
    return [
        graph.op("add", second, first),
        graph.op("add", first, first),
        graph.op("add", second, second),
        graph.op("add", graph.op("add", first, second), second),
        graph.op("add", first, graph.op("add", first, second)),
    ]


def _other_views(summing: Summing) -> list[Node]:
    graph, product = summing.graph, weighted(summing)
    row, token = 4 * N_EMBD, 4 * N_EMBD * N_SLOT
    return [
        graph.view(product, N_EMBD // 2, N_TOKEN, token, 0),
        graph.view(product, N_EMBD, N_TOKEN, row, 0),
        graph.view(product, N_EMBD, N_TOKEN - 1, token, 0),
        graph.view(product, N_EMBD, N_TOKEN - 1, token, token),
        graph.view(product, N_EMBD // 2, N_TOKEN, token, row // 2),
    ]


def _two_products(summing: Summing) -> list[Node]:
    graph = summing.graph
    one, other = weighted(summing), weighted(summing)
    return [graph.op("add", graph.slot(one, 0), graph.slot(other, 1))]


def _further_steps(summing: Summing) -> list[Node]:
    graph, product = summing.graph, weighted(summing)
    return [
        graph.op("scale", product, ctypes.c_float(0.5)),
        graph.op("silu", product),
        graph.op("mul", product, summing.weights),
        graph.op("mul_inplace", graph.down(graph.up()), summing.weights),
        graph.op("cont", graph.slot(product, 0)),
    ]


def _another_layer(summing: Summing) -> list[Node]:
    graph = summing.graph
    weight = graph.expert("blk.4.ffn_down_exps.weight", N_FF, N_EMBD)
    product = weighted(summing, graph.op("mul_mat_id", weight, graph.up(4), graph.ids))
    return [product, graph.op("add", graph.slot(product, 0), graph.slot(product, 1))]


@pytest.mark.parametrize(
    "build",
    [
        _mul_before_down,
        _weights_of_another_shape,
        _weights_before_the_experts,
        _slots_out_of_order,
        _other_views,
        _two_products,
        _further_steps,
        _another_layer,
    ],
)
def test_what_is_no_plain_sum_stays_with_the_backbone(
    summing: Summing, build: Callable[[Summing], list[Node]]
) -> None:
    assert not any(summing.graph.taken(node) for node in build(summing))


def test_one_slot_is_no_sum_and_too_many_are_left() -> None:
    for n_slot, is_taken in ((1, False), (2, True), (32, True), (33, False)):
        summing = Summing()
        graph = summing.graph
        graph.ids = graph._tensor(graph.inputs, I32, n_slot, N_TOKEN)
        summing.weights = graph.outside(1, n_slot, N_TOKEN)
        product = weighted(summing)
        total = graph.slot(product, 0, n_slot)
        for slot in range(1, n_slot):
            total = graph.op("add", total, graph.slot(product, slot, n_slot))
        assert graph.taken(product) is graph.taken(total) is is_taken
        summing.close()


@pytest.mark.parametrize("layers", [[-1], [1 << 16], [3, 2**31 - 1]])
def test_layers_that_no_model_has_cannot_be_claimed(layers: list[int]) -> None:
    with pytest.raises(LocalProtocolError, match="no model has all of the layers"):
        ExpertHook(lambda call: None, layers)
