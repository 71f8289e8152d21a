"""A model in this process: exact with ggml's kernel, drifting with others, and the same whoever looks on."""

from __future__ import annotations

import numpy as np
import pytest

from kvasir_node.backbone.graph_watch import GraphWatch
from kvasir_node.backbone.traces import TraceRecorder
from kvasir_node.certification.synthetic_model import Read
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_node.measure.authority import measure_authority
from kvasir_node.measure.backends_here import Backend
from kvasir_node.measure.decisions import compare_choices
from kvasir_node.measure.drift import compare_hidden
from kvasir_node.measure.in_process import InProcessModel, KernelExperts, ModelSettings
from kvasir_node.model.store import DEMO_MODEL, ModelStore, StoredModel
from kvasir_proto.errors import EngineFailed
from kvasir_proto.manifest import ModelManifest, ShardSet

SETTINGS = ModelSettings(n_ctx=256, n_ubatch=64)
TEXT = (
    "And it came to pass in those days, that the king said unto his servants, Bring me the book of the law. "
    * 3
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """The demo model in a store of its own."""
    return ModelStore(tmp_path_factory.mktemp("store")).add(DEMO_MODEL)


def ggml(manifest: ModelManifest, shard: ShardSet, read: Read) -> ExpertKernel:
    return make_kernel("ggml-cpu", manifest, shard, read)


def unrounded(manifest: ModelManifest, shard: ShardSet, read: Read) -> ExpertKernel:
    return ReferenceKernel(manifest, shard, read, Arithmetic.FLOAT32)


@pytest.mark.slow
def test_ggmls_kernel_behind_the_hook_is_llama_cpp_itself(demo: StoredModel) -> None:
    with InProcessModel(demo, SETTINGS) as plain, InProcessModel(demo, SETTINGS, is_watched=False) as unseen:
        tokens = plain.tokenize(TEXT)
        chunks = (len(tokens) - 3, 1, 1, 1)
        base, seen = plain.evaluate(tokens, chunks)
        unwatched, nothing = unseen.evaluate(tokens, chunks)
        base_text = plain.greedy(tokens[:20], 12)
    assert nothing is None
    assert np.array_equal(base, unwatched), "looking on changes what is computed"
    assert seen is not None
    assert seen.hidden.shape == (6, len(tokens), 256)
    assert seen.router.shape == (6, len(tokens), 32)
    assert seen.experts.shape == (6, len(tokens), 4)
    ranked = np.sort(np.argsort(-seen.router, axis=2)[:, :, :4], axis=2)
    assert np.array_equal(ranked, np.sort(seen.experts, axis=2)), (
        "the router takes the experts it rates highest"
    )
    with InProcessModel(demo, SETTINGS, KernelExperts(demo, ggml)) as hooked:
        run, hooked_seen = hooked.evaluate(tokens, chunks)
        assert hooked.greedy(tokens[:20], 12) == base_text
    assert np.array_equal(base, run)
    assert hooked_seen is not None
    assert np.array_equal(seen.hidden, hooked_seen.hidden)
    with InProcessModel(demo, SETTINGS, KernelExperts(demo, unrounded)) as other:
        drifted, other_seen = other.evaluate(tokens, chunks)
    assert other_seen is not None
    drift = compare_hidden(seen, other_seen)
    assert 1e-4 < drift.layers[0].rel_l2 < 0.05
    assert compare_choices(seen, other_seen).decisions == 6 * len(tokens)
    assert not np.array_equal(base, drifted)
    assert len(base_text.tokens) == 12
    assert base_text.margins is not None
    assert min(base_text.margins) >= 0


@pytest.mark.slow
def test_one_router_disagrees_with_nobody(demo: StoredModel) -> None:
    with InProcessModel(demo, SETTINGS, is_watched=False) as plain:
        tokens = plain.tokenize(TEXT)
    pair = (Backend("ggml", False, ggml), Backend("unrounded", False, unrounded))
    found = measure_authority(demo, pair, (tokens,), SETTINGS, 2)
    assert (found.pinned.decisions_disagreeing, found.pinned.rows_missing) == (0, 0)
    assert found.pinned.decisions == 6 * len(tokens)
    assert found.in_step.rows == 2 * 6 * 4 * len(tokens)
    assert found.outside["apart, ggml"].max_abs_delta == 0.0
    assert found.outside["pinned"].max_abs_delta > 0
    assert found.apart.choices is not None
    alike = measure_authority(demo, (pair[0], pair[0]), (tokens,), SETTINGS, 2)
    for inside in (alike.apart, alike.in_step, alike.pinned):
        assert (inside.decisions_disagreeing, inside.rows_missing) == (0, 0)
    assert {name: each.max_abs_delta for name, each in alike.outside.items()} == dict.fromkeys(
        alike.outside, 0.0
    )


@pytest.mark.slow
def test_a_node_that_fails_lets_the_other_go(demo: StoredModel) -> None:
    class Failing(ReferenceKernel):
        def compute(self, *arguments: int) -> None:
            raise EngineFailed("it fails")

    def failing(manifest: ModelManifest, shard: ShardSet, read: Read) -> ExpertKernel:
        return Failing(manifest, shard, read)

    class FailsInStep:
        """Right the first time it is loaded, for the run by itself."""

        loaded = 0

        def __call__(self, manifest: ModelManifest, shard: ShardSet, read: Read) -> ExpertKernel:
            self.loaded += 1
            return (ggml if self.loaded == 1 else failing)(manifest, shard, read)

    pair = (Backend("ggml", False, ggml), Backend("failing", False, FailsInStep()))
    with pytest.raises(EngineFailed):
        measure_authority(demo, pair, ((1, 2, 3),), SETTINGS, 1)


@pytest.mark.slow
def test_what_somebody_who_looks_on_raises_ends_the_decode(
    demo: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: TraceRecorder, name: str, values: object) -> None:
        raise ValueError("not to be read")

    monkeypatch.setattr(TraceRecorder, "_take", broken)
    with InProcessModel(demo, SETTINGS) as plain, pytest.raises(EngineFailed, match="not to be read"):
        plain.evaluate((1, 2, 3), (3,))


def test_names_that_nobody_wants_are_not_asked_again() -> None:
    asked: list[str] = []

    def wants(name: str) -> bool:
        asked.append(name)
        return False

    watch = GraphWatch(wants, lambda name, values: None)
    memory = np.zeros(336, np.uint8)
    memory[256:260] = np.frombuffer(b"abc\0", np.uint8)
    for _ in range(3):
        assert watch._look(memory.ctypes.data, True, 0) is False
    assert asked == ["abc"]
    assert watch.failure is None
