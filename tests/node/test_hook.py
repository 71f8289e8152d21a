"""The hook against plain llama.cpp: the same bits for every sub-graph and split, and after failures.

The reference copies what exactness needs: one thread, no repacking, the same ubatches, the same cache.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvasir_node.backbone.hook import DecodeAborted, ExpertHook, LayerCall
from kvasir_node.model.backbone_file import write_backbone_file
from kvasir_node.model.model_manifest import build_manifest
from kvasir_proto.errors import EngineFailed, LocalProtocolError
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.program import GluKind, StepOp
from tests.model_makers import MAKERS, ModelShape, make_dense, quantise
from tests.node.hooked_llama import InProcessWorkers, Llama, Rows, hooked, shards_of

# Rows of 256 floats are one block of every K-quant.
SHAPE = ModelShape(
    n_layer=4, n_embd=256, n_ff=256, n_expert=8, n_expert_used=3, n_head=4, n_head_kv=2, head_size=64
)
CHUNKS = (70, 1, 1, 9, 1, 1)
N_UBATCH = 64  # so that the first chunk is two ubatches, the last of them 6 tokens
N_UBATCHES = 7


def tokens_of(manifest: ModelManifest, n: int = sum(CHUNKS)) -> list[int]:
    return [int(token) for token in np.random.default_rng(5).integers(0, manifest.n_vocab - 1, n)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Makes each model once: (maker, type) to its file."""
    directory = tmp_path_factory.mktemp("models")

    def model(maker: str, type_name: str) -> Path:
        path = directory / f"{maker}-{type_name}.gguf"
        if not path.exists():
            if type_name == "F32":
                MAKERS[maker](path, SHAPE)
            else:
                quantise(model(maker, "F32"), path, type_name)
        return path

    return model


class Case:
    """A model, its backbone file, and what plain llama.cpp makes of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = build_manifest(path)
        self.backbone = path.with_suffix(".backbone")
        if not self.backbone.exists():
            write_backbone_file(path, self.manifest, self.backbone)

    def plainly(self, tokens: Sequence[int], chunks: Sequence[int], n_ubatch: int = N_UBATCH) -> Rows:
        with Llama(self.path, n_ubatch=n_ubatch) as llama:
            return llama.run(tokens, chunks)


@pytest.fixture
def swiglu(models: Callable[[str, str], Path]) -> Case:
    return Case(models("qwen3moe", "F32"))


@pytest.fixture
def workers(swiglu: Case) -> Iterator[InProcessWorkers]:
    workers = InProcessWorkers(swiglu.path, swiglu.manifest, shards_of(swiglu.manifest, 2))
    yield workers
    workers.close()


@pytest.mark.slow
@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("maker", list(MAKERS))
def test_every_sub_graph_is_exact(models: Callable[[str, str], Path], maker: str, type_name: str) -> None:
    case = Case(models(maker, type_name))
    tokens = tokens_of(case.manifest)
    expected = case.plainly(tokens, CHUNKS)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    for n_worker in (1, 2, 3, 5):
        workers = InProcessWorkers(case.path, case.manifest, shards_of(case.manifest, n_worker))
        hook = hooked(workers)
        with Llama(case.backbone, hook, n_ubatch=N_UBATCH) as llama:
            rows = llama.run(tokens, CHUNKS)
        assert np.abs(rows - expected).max() == 0.0
        # One call for each MoE layer and ubatch, in order, all of one kind.
        assert workers.layers == list(case.manifest.moe_layers) * N_UBATCHES
        assert hook.calls == len(workers.layers)
        assert workers.widest == N_UBATCH * case.manifest.n_expert_used
        assert len(hook.programs) == 1
        assert hook.rows_unfilled_total == 0
        assert hook.take_failure() is None
        workers.close()
        hook.close()


@pytest.mark.parametrize("f32_cache", [True, False])
def test_positions_beyond_one_attention_block_are_exact(swiglu: Case, f32_cache: bool) -> None:
    tokens = tokens_of(swiglu.manifest, 650)
    chunks = (512, 100, 1, 1, 36)
    with Llama(swiglu.path, n_ctx=768, n_ubatch=512, f32_cache=f32_cache) as plain:
        expected = plain.run(tokens, chunks)
    workers = InProcessWorkers(swiglu.path, swiglu.manifest, shards_of(swiglu.manifest, 3))
    with Llama(swiglu.backbone, hooked(workers), n_ctx=768, n_ubatch=512, f32_cache=f32_cache) as llama:
        assert np.abs(llama.run(tokens, chunks) - expected).max() == 0.0
    workers.close()


@pytest.mark.parametrize("n_ff, n_expert, n_used", [(37, 7, 3), (1, 2, 1), (33, 5, 5), (64, 3, 1)])
def test_odd_sizes_are_exact(tmp_path: Path, n_ff: int, n_expert: int, n_used: int) -> None:
    shape = ModelShape(n_layer=4, n_embd=48, n_ff=n_ff, n_expert=n_expert, n_expert_used=n_used)
    for maker in ("qwen3moe-scales", "gpt-oss", "llama4", "deepseek2-merged"):
        if maker == "deepseek2-merged":  # its experts come in groups
            shape = replace(shape, n_expert=8)
        case = Case(MAKERS[maker](tmp_path / f"{maker}.gguf", shape))
        tokens = tokens_of(case.manifest, 25)
        expected = case.plainly(tokens, (19, 1, 5))
        workers = InProcessWorkers(case.path, case.manifest, shards_of(case.manifest, 2))
        with Llama(case.backbone, hooked(workers)) as llama:
            assert np.abs(llama.run(tokens, (19, 1, 5)) - expected).max() == 0.0
        workers.close()


def _ops(case: Case) -> tuple[list[StepOp], bool]:
    workers = InProcessWorkers(case.path, case.manifest, [case.manifest.whole_shard()])
    hook = hooked(workers)
    with Llama(case.backbone, hook) as llama:
        llama.run(tokens_of(case.manifest, 4), (3, 1))
    (program,) = hook.programs
    workers.close()
    hook.close()
    glu = next(step for step in program.steps if step.op is StepOp.GLU)
    assert glu.words()[0] == {
        "gpt-oss": GluKind.SWIGLU_OAI,
        "grok": GluKind.GEGLU,
    }.get(case.manifest.architecture, GluKind.SWIGLU)
    return [step.op for step in program.steps], program.input_per_slot


def test_programs_are_what_the_sub_graphs_say(models: Callable[[str, str], Path]) -> None:
    matmul, glu = StepOp.EXPERT_MATMUL, StepOp.GLU
    plain = [matmul, matmul, glu, matmul]
    scaled = [matmul, StepOp.EXPERT_SCALE, StepOp.MULTIPLY]
    biased = [matmul, StepOp.EXPERT_ADD]
    assert {maker: _ops(Case(models(maker, "F32"))) for maker in MAKERS} == {
        "qwen3moe": (plain, False),
        "qwen3moe-scales": ([*scaled, *scaled, glu, *scaled], False),
        "qwen2moe": (plain, False),
        "deepseek2": (plain, False),
        "deepseek2-merged": ([matmul, StepOp.SLICE, StepOp.SLICE, glu, matmul], False),
        "gpt-oss": ([*biased, *biased, glu, *biased], False),
        "llama4": (plain, True),
        "grok": (plain, False),
    }


def test_a_layer_without_wanted_outputs_is_not_called(swiglu: Case, workers: InProcessWorkers) -> None:
    tokens = tokens_of(swiglu.manifest, 40)
    wanted = [False] * 39 + [True]
    with Llama(swiglu.path, n_ubatch=16) as plain:
        _, expected = plain.decode(tokens, 0, wanted=wanted)
    with Llama(swiglu.backbone, hooked(workers), n_ubatch=16) as llama:
        code, rows = llama.decode(tokens, 0, wanted=wanted)
    assert code == 0
    assert np.abs(rows - expected).max() == 0.0
    layers = list(swiglu.manifest.moe_layers)
    assert workers.layers == layers[:-1] * 2 + layers  # nobody wants the first two ubatches' last layer


def test_a_batch_of_sessions_is_one_call_a_layer(swiglu: Case, workers: InProcessWorkers) -> None:
    tokens, sequences = tokens_of(swiglu.manifest, 12), [0, 1, 2, 3] * 3
    with Llama(swiglu.path, n_seq=4) as plain:
        _, expected = plain.decode(tokens, 0, sequences=sequences)
    with Llama(swiglu.backbone, hooked(workers), n_seq=4) as llama:
        _, rows = llama.decode(tokens, 0, sequences=sequences)
    assert np.abs(rows - expected).max() == 0.0
    assert workers.layers == list(swiglu.manifest.moe_layers)


class Saboteur:
    """Passes calls on, except the ones it is told to spoil."""

    def __init__(self, inner: InProcessWorkers, layer: int, spoil: Callable[[LayerCall], None]) -> None:
        self.inner = inner
        self.layer = layer
        self.spoil: Callable[[LayerCall], None] | None = spoil

    def __call__(self, call: LayerCall) -> None:
        if call.layer == self.layer and self.spoil is not None:
            self.spoil(call)
        else:
            self.inner(call)


def _fail(call: LayerCall) -> None:
    raise EngineFailed(f"layer {call.layer} is spoilt")


def _abort(call: LayerCall) -> None:
    raise DecodeAborted


def _interrupt(call: LayerCall) -> None:
    raise KeyboardInterrupt


def _forget(call: LayerCall) -> None:
    """Return without filling anything."""


@pytest.mark.parametrize(
    "spoil, expected_code, failure, text",
    [
        (_fail, -3, EngineFailed, "layer 2 is spoilt"),
        (_abort, 2, DecodeAborted, ""),
        (_interrupt, -3, KeyboardInterrupt, ""),
        (_forget, -3, EngineFailed, "layer 2 cannot be dispatched: not every row came back"),
    ],
)
def test_a_failed_decode_leaves_no_trace_and_can_be_repeated(
    swiglu: Case,
    workers: InProcessWorkers,
    spoil: Callable[[LayerCall], None],
    expected_code: int,
    failure: type[BaseException],
    text: str,
) -> None:
    tokens = tokens_of(swiglu.manifest, 21)
    expected = swiglu.plainly(tokens, (20, 1))
    saboteur = Saboteur(workers, 2, spoil)
    workers.hook = hook = hooked(saboteur)
    with Llama(swiglu.backbone, hook) as llama:
        saboteur.spoil = None
        _, first = llama.decode(tokens[:20], 0)
        saboteur.spoil = spoil
        code, _ = llama.decode(tokens[20:], 20)
        assert code == expected_code
        assert llama.last_position() == 19
        assert isinstance(hook.failure, failure) or spoil is _forget
        taken = hook.take_failure()
        assert isinstance(taken, failure)
        assert str(taken) == text
        assert hook.take_failure() is None
        assert hook.rows_unfilled_total == (swiglu.manifest.n_expert_used if spoil is _forget else 0)
        saboteur.spoil = None
        code, last = llama.decode(tokens[20:], 20)
        assert code == 0
    assert np.abs(np.concatenate([first, last]) - expected).max() == 0.0
    hook.close()


def test_one_missing_row_of_many_is_noticed(swiglu: Case, workers: InProcessWorkers) -> None:
    def all_but_one(call: LayerCall) -> None:
        size = call.n_tokens * call.n_slots * call.n_embd_out
        out = np.ctypeslib.as_array((ctypes.c_float * size).from_address(call.out_address))
        out.reshape(-1, call.n_embd_out)[np.arange(call.n_tokens * call.n_slots) != 7] = 1.0

    hook = hooked(Saboteur(workers, 1, all_but_one))
    workers.hook = hook
    with Llama(swiglu.backbone, hook) as llama:
        assert llama.decode(tokens_of(swiglu.manifest, 5), 0)[0] == -3
    assert hook.rows_unfilled_total == 1
    hook.close()


def test_a_sub_graph_that_is_cut_in_pieces_is_refused(swiglu: Case, workers: InProcessWorkers) -> None:
    """Whoever asks llama.cpp for a value inside the expert part makes the scheduler cut the sub-graph."""
    hook = hooked(workers)
    with Llama(swiglu.backbone, hook, watched_node=b"ffn_moe_gate-1") as llama:
        assert llama.decode(tokens_of(swiglu.manifest, 5), 0)[0] == -3
    failure = hook.take_failure()
    assert isinstance(failure, EngineFailed)
    assert "layer 1 cannot be dispatched: it takes MUL_MAT_ID of ffn_moe_gate-1 from outside" in str(failure)
    assert workers.layers == [0, 1]  # the first piece is a program too: gate rows in, and nothing lost
    hook.close()


def test_inputs_do_not_share_memory_with_outputs(swiglu: Case, workers: InProcessWorkers) -> None:
    class Checker(InProcessWorkers):
        def __call__(self, call: LayerCall) -> None:
            ids = (ctypes.c_int32 * (call.n_tokens * call.n_slots)).from_address(call.ids_address)
            x = (ctypes.c_float * (call.x_rows * call.n_embd_in)).from_address(call.x_address)
            before = bytes(ids), bytes(x)
            ctypes.memset(call.out_address, 0xAA, 4 * call.n_tokens * call.n_slots * call.n_embd_out)
            assert (bytes(ids), bytes(x)) == before
            super().__call__(call)

    tokens = tokens_of(swiglu.manifest, 30)
    expected = swiglu.plainly(tokens, (28, 1, 1))
    checker = Checker(swiglu.path, swiglu.manifest, shards_of(swiglu.manifest, 2))
    with Llama(swiglu.backbone, hooked(checker)) as llama:
        assert np.abs(llama.run(tokens, (28, 1, 1)) - expected).max() == 0.0
    checker.close()


def test_two_models_and_three_threads_in_one_process(
    swiglu: Case, models: Callable[[str, str], Path]
) -> None:
    cases = [swiglu, Case(models("llama4", "F32")), swiglu]
    expected = [case.plainly(tokens_of(case.manifest, 24), (20, 1, 1, 1, 1)) for case in cases]
    results: list[Rows | None] = [None] * len(cases)

    def decode(index: int) -> None:
        case = cases[index]
        workers = InProcessWorkers(case.path, case.manifest, shards_of(case.manifest, 2))
        hook = hooked(workers)
        with Llama(case.backbone, hook) as llama:
            results[index] = llama.run(tokens_of(case.manifest, 24), (20, 1, 1, 1, 1))
        workers.close()
        hook.close()

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rows, wanted in zip(results, expected, strict=True):
        assert rows is not None
        assert np.abs(rows - wanted).max() == 0.0


def test_a_hook_in_use_cannot_be_closed(swiglu: Case, workers: InProcessWorkers) -> None:
    hook = hooked(workers)
    with Llama(swiglu.backbone, hook), pytest.raises(LocalProtocolError, match="still used"):
        hook.close()
    hook.close()
    hook.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        _ = hook.calls


def test_a_model_without_experts_is_left_alone(tmp_path: Path) -> None:
    path = make_dense(tmp_path / "dense.gguf", SHAPE)
    hook = ExpertHook(_fail)
    with Llama(path) as plain:
        expected = plain.run([1, 2, 3, 4], (3, 1))
    with Llama(path, hook) as llama:
        assert np.abs(llama.run([1, 2, 3, 4], (3, 1)) - expected).max() == 0.0
    assert hook.calls == 0
    hook.close()


def test_the_program_table_is_a_sequence(swiglu: Case, workers: InProcessWorkers) -> None:
    hook: ExpertHook = hooked(workers)
    assert len(hook.programs) == 0
    assert list(hook.programs) == []
    with pytest.raises(IndexError):
        _ = hook.programs[0]
    with Llama(swiglu.backbone, hook) as llama:
        llama.decode([1], 0)
    assert hook.programs[-1] == hook.programs[0] == hook.programs[:1][0]
    hook.close()


def test_a_shard_holds_each_expert_once(swiglu: Case) -> None:
    """What the exactness tests rely on: sharding is real, no expert has two holders."""
    shards = shards_of(swiglu.manifest, 3)
    pairs = [pair for shard in shards for pair in shard.pairs()]
    assert sorted(pairs) == list(swiglu.manifest.whole_shard().pairs())
    assert ShardSet.from_pairs(pairs) == swiglu.manifest.whole_shard()
