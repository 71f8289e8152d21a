"""Every architecture with routed experts that llama.cpp builds, through the hook: the same bits as without.

The models are `tests.architecture_models`; what is compared, and how, is `tests.shapes`.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import gguf
import numpy as np
import pytest

import tests.shapes
from kvasir_node.backbone.hook import LayerCall
from kvasir_node.backbone.trunk import Trunk, TrunkSettings
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_node.model.backbone_file import write_backbone_file
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.model_manifest import build_manifest
from kvasir_proto.errors import EngineFailed, ModelUnusable
from kvasir_proto.manifest import is_expert_name
from tests.architecture_models import (
    ARCHITECTURES,
    ONE_OF_EACH_SHAPE,
    SHAPES,
    ArchitectureModel,
    Settings,
    make_architecture,
)
from tests.node.hooked_llama import InProcessWorkers, Llama, Rows, hooked, shards_of
from tests.node.kernel_calls import computed, distance, rows_and_pairs
from tests.shapes import make_model, run_model

NAMES = {model.name: model for model in ARCHITECTURES}
WITHOUT_EXPERTS_HERE = {"deci"}
"""What gguf gives experts and this llama.cpp does not (docs/reference/model-shapes.md)."""


def named(model: ArchitectureModel) -> str:
    return model.name


def first_of(architecture: str) -> ArchitectureModel:
    return next(each for each in ARCHITECTURES if each.architecture == architecture)


def halve_a_row(call: LayerCall) -> None:
    """Spoil the first row of a call's answer."""
    row = (ctypes.c_float * call.n_embd_out).from_address(call.out_address)
    np.ctypeslib.as_array(row)[:] *= 0.5


def test_the_table_has_every_architecture_that_gguf_knows_with_experts() -> None:
    tensors = {gguf.MODEL_TENSOR.FFN_UP_EXP, gguf.MODEL_TENSOR.FFN_DOWN_EXP}
    known = {gguf.MODEL_ARCH_NAMES[each] for each, has in gguf.MODEL_TENSORS.items() if tensors & set(has)}
    assert known - {each.architecture for each in ARCHITECTURES} <= WITHOUT_EXPERTS_HERE
    assert len(NAMES) == len(ARCHITECTURES)
    assert {each.shape for each in ARCHITECTURES} == set(SHAPES)


def test_the_reference_page_lists_every_model() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/model-shapes.md").read_text()
    rows = re.findall(r"^\| `([^`|]+)` \| (\S+) \| (\S+?)(, embeddings)? \| \d+ of (\d+) \|$", page, re.M)
    assert rows == [
        (
            each.architecture,
            each.shape,
            each.memory,
            "" if each.has_logits else ", embeddings",
            str(each.settings.get("expert_count", 8)),
        )
        for each in ARCHITECTURES
    ]


def test_the_table_says_what_is_exact_and_fails_for_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(*arguments: str) -> tuple[int, list[str]]:
        written = StringIO()
        status = tests.shapes.main(arguments, written)
        return status, written.getvalue().splitlines()

    status, (headings, line, total) = table("^llama4", "--workers", "2")
    assert status == 0
    assert " ".join(headings.split()) == "shape architecture weights experts calls/ubatch largest id result"
    assert " ".join(line.split()) == "swiglu-weighted llama4 F32 3 of 8 2 of 2 7 exact"
    assert total.startswith("1 models of 1 architectures in 1 shapes: 1 exact, 0 not; ")

    monkeypatch.setattr(tests.shapes, "run_model", partial(run_model, spoil=halve_a_row))
    status, (_, line, _) = table("^llama4")
    assert status == 1
    assert re.search(r" 7 +\d\.\de[+-]\d\d$", line)

    def refuse(call: LayerCall) -> None:
        raise EngineFailed("the swarm is gone")

    monkeypatch.setattr(tests.shapes, "run_model", partial(run_model, spoil=refuse))
    status, (_, line, _) = table("^llama4")
    assert status == 1
    assert line.endswith("llama_decode gave -3: the swarm is gone")
    assert table("no such architecture")[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ARCHITECTURES, ids=named)
def test_every_architecture_is_exact(model: ArchitectureModel, tmp_path: Path) -> None:
    path = make_model(tmp_path, model, "F32")
    run = run_model(path, model)
    assert run.delta == 0.0
    assert run.spread > 0.1
    assert run.called_layers == run.moe_layers * run.n_ubatches
    assert run.steps == (SHAPES[model.shape],)
    assert run.n_expert > run.n_expert_used
    assert run.largest_id > (255 if run.n_expert > 256 else 0)
    # and whoever answers wrongly is noticed
    assert run_model(path, model, spoil=halve_a_row).delta > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("model", ARCHITECTURES, ids=named)
def test_every_architecture_adds_up_alike_where_one_worker_does_it(
    model: ArchitectureModel, tmp_path: Path
) -> None:
    """Sums of one holder are those of llama.cpp bit for bit: the same products, in the same order."""
    run = run_model(make_model(tmp_path, model, "F32"), model, n_worker=1, sums=True)
    assert run.delta == 0.0
    has_sums = run.n_expert_used > 1 and not run.programs[0].input_per_slot
    assert run.summed_layers == (run.called_layers if has_sums else ())
    assert run.called_layers == run.moe_layers * run.n_ubatches
    assert run.steps == (SHAPES[model.shape],)


def test_sums_of_three_workers_are_equivalent_and_not_exact(tmp_path: Path) -> None:
    model = first_of("qwen3moe")
    model = replace(model, settings={**model.settings, "expert_used_count": 4})
    path = make_model(tmp_path, model, "F32")
    run = run_model(path, model, sums=True)
    assert run.spread > 0.1
    assert 0.0 < run.delta < 5e-3  # attention rounds to F16 what differs in the last bit
    # and whoever adds up wrongly is noticed
    assert run_model(path, model, sums=True, spoil=halve_a_row).delta > 5e-2


@pytest.mark.slow
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_K_M"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_exact_when_quantised(shape: str, type_name: str, tmp_path: Path) -> None:
    model = ONE_OF_EACH_SHAPE[shape]
    run = run_model(make_model(tmp_path, model, type_name), model)
    assert run.delta == 0.0
    assert run.spread > 0.1
    assert run.steps == (SHAPES[model.shape],)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_exact_when_its_rows_are_no_whole_vectors(shape: str, tmp_path: Path) -> None:
    base = ONE_OF_EACH_SHAPE[shape]
    odd: Settings = {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 37}
    model = replace(base, settings={**base.settings, **odd})
    run = run_model(make_architecture(tmp_path / "model.gguf", model, n_ff=37), model)
    assert run.delta == 0.0
    assert run.steps == (SHAPES[model.shape],)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_kernel_means_the_same_by_every_program(shape: str, tmp_path: Path) -> None:
    path = make_model(tmp_path, ONE_OF_EACH_SHAPE[shape], "F32")
    (program,) = run_model(path, ONE_OF_EACH_SHAPE[shape]).programs
    manifest = build_manifest(path)
    with ExpertSource(path, manifest) as source:
        ggml = GgmlCpuKernel(manifest, manifest.whole_shard(), source.read)
        reference = ReferenceKernel(manifest, manifest.whole_shard(), source.read, Arithmetic.FLOAT64)
    layer = manifest.moe_layers[-1]
    width = program.row_widths({each.suffix: each.shape for each in manifest.expert_tensors(layer)}.get)[0]
    x, rows, experts = rows_and_pairs(manifest.n_expert, width)
    theirs = computed(ggml, layer, program, x, rows, experts)
    # ggml takes a GELU from a table of F16 numbers
    assert distance(theirs, computed(reference, layer, program, x, rows, experts)) < (
        1e-3 if "ge" in shape else 2e-6
    )


def test_layers_of_one_model_may_have_programs_of_their_own(tmp_path: Path) -> None:
    step = first_of("step35")
    model = replace(step, settings={**step.settings, "swiglu_clamp_exp": (0.0, 0.5, 0.25, 0.0)})
    run = run_model(make_architecture(tmp_path / "model.gguf", model), model)
    assert run.delta == 0.0
    assert len(run.programs) == 3
    assert run.steps == (SHAPES["swiglu-clamped"], SHAPES["swiglu"])


def test_layers_may_differ_in_width_and_in_how_many_experts_they_use(tmp_path: Path) -> None:
    nemotron = first_of("nemotron_h_moe")
    differing: Settings = {"expert_used_count": (0, 0, 3, 2), "expert_feed_forward_length": (0, 0, 48, 32)}
    model = replace(nemotron, settings={**nemotron.settings, **differing})
    run = run_model(make_architecture(tmp_path / "model.gguf", model), model)
    assert run.delta == 0.0
    assert (run.n_expert_used, len(run.programs)) == (3, 1)


def test_one_tensor_may_ask_for_more_precision_than_the_others(tmp_path: Path) -> None:
    asked: Settings = {
        "general.tensor_extra.name": ("blk.1.ffn_up_exps.weight",),
        "general.tensor_extra.prec_a4": (False,),
    }
    model = replace(first_of("qwen3moe"), settings=asked)
    run = run_model(make_architecture(tmp_path / "model.gguf", model), model)
    assert run.delta == 0.0
    assert run.steps == ("gate up swiglu down", "gate up! swiglu down")


def test_a_second_bank_of_experts_stays_with_the_backbone(tmp_path: Path) -> None:
    path = make_architecture(tmp_path / "model.gguf", first_of("grovemoe"))
    manifest = build_manifest(path)
    write_backbone_file(path, manifest, tmp_path / "backbone.gguf")
    second = [each for each in read_gguf(tmp_path / "backbone.gguf").tensors if "_chexps" in each.name]
    assert len(second) == 3 * manifest.n_layer
    assert not any(is_expert_name(each.name) for each in second)
    assert all(each.type.name == "f32" for each in second)


MODELS_WITH_PREDICTION_HEADS: dict[str, Settings] = {
    "bailingmoe3": {},
    "cohere2moe": {},
    "deepseek2": {},
    "glm-dsa": {},
    "glm4moe": {"rope.dimension_sections": None},
    "hy_v3": {},
    "nemotron_h_moe": {"attention.head_count": (4, 0, 0, 4), "attention.head_count_kv": (4, 0, 0, 4)},
    "step35": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", MODELS_WITH_PREDICTION_HEADS)
def test_layers_that_predict_further_tokens_are_exact(architecture: str, tmp_path: Path) -> None:
    """They are no part of the trunk; whoever runs them finds their experts behind the hook all the same."""
    base = first_of(architecture)
    settings = {**base.settings, **MODELS_WITH_PREDICTION_HEADS[architecture], "nextn_predict_layers": 1}
    model = replace(base, settings=settings)
    path = make_architecture(tmp_path / "model.gguf", model)
    manifest = build_manifest(path)
    head = manifest.n_layer - 1
    assert head not in manifest.moe_layers
    assert run_model(path, model).delta == 0.0  # the trunk, which has one layer less

    tokens = list(range(16))
    with Llama(path, prediction_head=True) as llama:
        draws = np.random.default_rng(1)
        hidden = draws.standard_normal((len(tokens), llama.hidden_width)).astype(np.float32)
        expected = [
            llama.decode(tokens[:15], 0, hidden=hidden[:15]),
            llama.decode(tokens[15:], 15, hidden=hidden[15:]),
        ]
    whole = replace(manifest, moe_layers=(*manifest.moe_layers, head))
    workers = InProcessWorkers(path, whole, shards_of(whole, 3))
    hook = hooked(workers)
    with Llama(path.with_suffix(".backbone"), hook, prediction_head=True) as llama:
        found = [
            llama.decode(tokens[:15], 0, hidden=hidden[:15]),
            llama.decode(tokens[15:], 15, hidden=hidden[15:]),
        ]
    assert workers.layers == [head, head]
    workers.close()
    hook.close()
    for (code, rows), (expected_code, expected_rows) in zip(found, expected, strict=True):
        assert code == expected_code == 0
        assert expected_rows.std() > 0.1
        assert np.abs(rows - expected_rows).max() == 0.0


class Unsteady:
    """A swarm that fails at the n-th layer call, once."""

    def __init__(self, inner: InProcessWorkers) -> None:
        self.inner = inner
        self.calls_until_failure = -1

    def __call__(self, call: LayerCall) -> None:
        self.calls_until_failure -= 1
        if self.calls_until_failure == 0:
            raise EngineFailed("the swarm is gone")
        self.inner(call)


class TrunkPair:
    """A model as one process and as a swarm that can be made to fail."""

    def __init__(self, directory: Path, model: ArchitectureModel) -> None:
        path = make_architecture(directory / "model.gguf", model)
        self.manifest = build_manifest(path)
        write_backbone_file(path, self.manifest, directory / "backbone.gguf")
        self.workers = InProcessWorkers(path, self.manifest, shards_of(self.manifest, 2))
        self.swarm = Unsteady(self.workers)
        self.hook = hooked(self.swarm)
        self.workers.hook = self.hook
        settings = TrunkSettings(n_ctx=256, n_ubatch=16, n_threads=1, kv_type="f32")
        self.whole = Trunk(path, settings, None)
        self.split = Trunk(directory / "backbone.gguf", settings, self.hook)

    def close(self) -> None:
        self.whole.close()
        self.split.close()
        self.workers.close()
        self.hook.close()


@pytest.fixture
def pair_of(tmp_path: Path) -> Iterator[Callable[[ArchitectureModel], TrunkPair]]:
    pairs: list[TrunkPair] = []

    def pair(model: ArchitectureModel) -> TrunkPair:
        pairs.append(TrunkPair(tmp_path, model))
        return pairs[-1]

    yield pair
    for each in pairs:
        each.close()


# One of each kind of memory: caches of every layout, states of every kind.
@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        *("qwen3moe", "deepseek32", "gemma4", "gpt-oss", "hy_v4", "minimax-m3"),
        *("bailingmoe3", "deepseek4", "glm5-next", "granitehybrid", "jamba", "kimi-linear", "lfm2moe"),
        *("minimax-01", "nemotron_h_moe", "qwen35moe", "qwen4exp"),
    ],
)
def test_a_failed_decode_leaves_a_sequence_that_can_be_continued(
    pair_of: Callable[[ArchitectureModel], TrunkPair], architecture: str
) -> None:
    model = first_of(architecture)
    pair = pair_of(model)
    tokens = [int(each) for each in np.random.default_rng(3).integers(0, 95, 42)]
    pair.whole.decode(tokens[:40])
    pair.whole.decode(tokens[40:41])
    pair.whole.decode(tokens[41:])
    expected = pair.whole.logits().copy()
    # A prompt of 40 is three ubatches: the second fails in its first layer, then a single token in its last.
    n_called = len(pair.manifest.moe_layers)
    pair.swarm.calls_until_failure = n_called + 1
    with pytest.raises(EngineFailed, match="the swarm is gone"):
        pair.split.decode(tokens[:40], all_logits=True)
    assert pair.split.position == (0 if model.memory == "hybrid" else 16)
    pair.split.decode(tokens[pair.split.position : 40])
    pair.split.decode(tokens[40:41])
    pair.swarm.calls_until_failure = n_called
    with pytest.raises(EngineFailed, match="the swarm is gone"):
        pair.split.decode(tokens[41:])
    if model.memory == "hybrid":
        assert pair.split.position == 0
        pair.split.decode(tokens[:40])
        pair.split.decode(tokens[40:41])
    assert pair.split.position == 41
    pair.split.decode(tokens[41:])
    assert np.abs(pair.split.logits() - expected).max() == 0.0


def test_a_retry_before_the_decode_returns_is_exact_where_states_cannot_go_back(tmp_path: Path) -> None:
    model = first_of("jamba")
    path = make_architecture(tmp_path / "model.gguf", model)
    n_retried = 0

    class Retrying(InProcessWorkers):
        def __call__(self, call: LayerCall) -> None:
            nonlocal n_retried
            n_retried += 1
            ctypes.memset(call.out_address, 0x41, 4 * call.n_tokens * call.n_slots * call.n_embd_out)
            super().__call__(call)  # a holder answered rubbish; another one's rows take its place

    manifest = build_manifest(path)
    write_backbone_file(path, manifest, tmp_path / "backbone.gguf")
    with Llama(path) as llama:
        expected: Rows = llama.run(list(range(20)), (18, 1, 1))
    workers = Retrying(path, manifest, shards_of(manifest, 2))
    hook = hooked(workers)
    with Llama(tmp_path / "backbone.gguf", hook) as llama:
        assert np.abs(llama.run(list(range(20)), (18, 1, 1)) - expected).max() == 0.0
    assert n_retried == 3 * len(manifest.moe_layers)
    workers.close()
    hook.close()


@pytest.mark.parametrize("architecture", ["llada-moe", "nomic-bert-moe", "rnd1"])
def test_a_model_that_remembers_no_sequence_is_refused_by_the_trunk(
    architecture: str, tmp_path: Path
) -> None:
    path = make_architecture(tmp_path / "model.gguf", first_of(architecture))
    with pytest.raises(ModelUnusable, match="the model remembers no sequence"):
        Trunk(path, TrunkSettings(n_ctx=64, n_ubatch=16, n_threads=1), None)
