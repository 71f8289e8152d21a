"""Taking in a model from an address: one pass, every byte once, and nothing left of what did not work."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir_node.model import store as store_module
from kvasir_node.model.backbone_file import verify_backbone_file
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.expert_cache import ExpertCache
from kvasir_node.model.gguf_split import part_locations
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.model.pull_journal import JOURNAL
from kvasir_node.model.store import PULL_KEPT_S, ModelStore, StoredModel
from kvasir_proto.errors import ModelUnusable, SourceFailed
from kvasir_proto.manifest import ModelManifest, ShardSet
from tests.model_makers import ModelShape, make_dense, make_qwen3moe
from tests.node.model.misbehaving_server import Answering, serving

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

SHAPE = ModelShape(n_layer=2, n_vocab=2000, tokenizer=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_qwen3moe(tmp_path / "tiny.gguf", SHAPE)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def test_a_model_at_an_address_is_the_same_model_as_its_file(
    store: ModelStore, source: Path, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    with serving(source) as server:
        url = server.url(source.name)
        pulled = store.pull(url, lambda done, total: seen.append((done, total)))
        sent_bytes = server.sent_bytes
    added = ModelStore(tmp_path / "others").add(source)
    assert pulled.manifest == added.manifest
    assert (pulled.name, pulled.source, pulled.has_source) == ("tiny", url, True)
    assert pulled.backbone_path.read_bytes() == added.backbone_path.read_bytes()
    total = sum(each.size_bytes for each in pulled.manifest.tensors)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    # The header is read in steps of 256 KiB.
    assert sent_bytes <= source.stat().st_size + (256 << 10) + 2
    assert store.list() == (pulled,)
    verify_backbone_file(pulled.backbone_path, pulled.manifest)
    # What engines read is what was fetched on the way.
    with (
        ExpertSource(pulled.source_path, pulled.manifest) as fetched,
        ExpertSource(source, added.manifest) as file,
    ):
        for tensor in pulled.manifest.tensors:
            for expert in range(tensor.shape[-1] if tensor.is_expert else 0):
                assert fetched.read(tensor.name, expert) == file.read(tensor.name, expert)


def test_a_split_model_at_an_address_is_the_model(store: ModelStore, source: Path, tmp_path: Path) -> None:
    first = make_qwen3moe(tmp_path / "parts.gguf", replace(SHAPE, tensors_a_part=9))
    paths = [each for each in part_locations(first) if isinstance(each, Path)]
    assert len(paths) > 2
    with serving(*paths) as server:
        pulled = store.pull(server.url(first.name))
    assert pulled.name == "parts"
    assert pulled.digest == ModelStore(tmp_path / "others").add(source).digest
    assert pulled.experts.missing(pulled.manifest, pulled.manifest.whole_shard()) == []


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30))
def test_twenty_cuts_anywhere_change_nothing(tmp_path: Path, source: Path, seed: int) -> None:
    draws = random.Random(seed)
    cuts = itertools.count()

    def cut(answering: Answering, begin: int, end: int) -> bool:
        if end - begin == 1 or next(cuts) >= 20:
            return False
        answering.part(answering.data, begin, end, answering.data[begin : draws.randrange(begin, end)])
        answering.cut()
        return True

    directory = tmp_path / f"models-{seed}"
    with serving(source) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvasir_node.model.http_file.retry_delay_s", lambda *_: 0.0)
        server.behaviour = cut
        pulled = ModelStore(directory).pull(server.url(source.name))
        assert next(cuts) >= 20
    assert pulled.manifest == ModelStore(directory).add(source).manifest
    verify_backbone_file(pulled.backbone_path, pulled.manifest)
    shutil.rmtree(directory)


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("is_wanted", [True, False])
def test_experts_without_room_are_hashed_and_not_kept(
    store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    free_bytes = store_module.SPARE_BYTES + source.stat().st_size - 1 if is_wanted else 1 << 40
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free_bytes))
    with serving(source) as server:
        pulled = store.pull(server.url(source.name), experts_bytes_max=None if is_wanted else 0)
    shard = pulled.manifest.whole_shard()
    assert len(pulled.experts.missing(pulled.manifest, shard)) == len(shard) * 3
    assert not pulled.experts.directory.exists()


@pytest.mark.parametrize("has_room", [True, False])
def test_no_more_experts_are_kept_than_are_allowed(store: ModelStore, source: Path, has_room: bool) -> None:
    with serving(source) as server:
        whole = store.pull(server.url(source.name), experts_bytes_max=0)
        size_bytes = whole.manifest.shard_size_bytes(whole.manifest.whole_shard())
        store.remove(whole)
        room_bytes = size_bytes if has_room else size_bytes - 1
        pulled = store.pull(server.url(source.name), experts_bytes_max=room_bytes)
    assert (pulled.experts.missing(pulled.manifest, pulled.manifest.whole_shard()) == []) == has_room


def test_others_use_the_store_while_a_models_backbone_file_is_fetched_again(
    store: ModelStore, source: Path, tmp_path: Path
) -> None:
    is_fetching, may_go_on = threading.Event(), threading.Event()

    def hang(answering: Answering, begin: int, end: int) -> bool:
        if begin:
            is_fetching.set()
            may_go_on.wait(30)
        return False

    second = make_qwen3moe(tmp_path / "second.gguf", replace(SHAPE, seed=5))
    with serving(source) as server:
        model = store.pull(server.url(source.name), experts_bytes_max=0)
        model.backbone_path.unlink()
        server.behaviour = hang
        mending = [threading.Thread(target=model.verified_backbone_path) for _ in range(2)]
        for each in mending:
            each.start()
        assert is_fetching.wait(30)
        adding = threading.Thread(target=store.add, args=(second,))
        adding.start()
        adding.join(20)
        is_held_up = adding.is_alive()
        asked_before = server.sent_bytes
        may_go_on.set()
        for each in (*mending, adding):
            each.join(30)
        sent_bytes = server.sent_bytes - asked_before
    assert not is_held_up
    assert {each.name for each in store.list()} == {"tiny", "second"}
    verify_backbone_file(model.backbone_path, model.manifest)
    assert sent_bytes < 2 * model.manifest.trunk_size_bytes(), "one of them fetches it, the other waits"


@pytest.mark.parametrize("has_manifest", [True, False])
def test_others_use_the_store_while_a_model_comes(
    store: ModelStore, source: Path, tmp_path: Path, has_manifest: bool
) -> None:
    """A server may take as long as it likes, above its bytes a second."""
    is_fetching, may_go_on = threading.Event(), threading.Event()

    def hang(answering: Answering, begin: int, end: int) -> bool:
        if begin and not is_fetching.is_set():  # behind the header
            is_fetching.set()
            may_go_on.wait(30)
        return False

    manifest = ModelStore(tmp_path / "others").add(source).manifest if has_manifest else None
    second = make_qwen3moe(tmp_path / "second.gguf", replace(SHAPE, seed=5))
    pulled: list[StoredModel] = []
    with serving(source) as server:
        server.behaviour = hang
        url = server.url(source.name)
        pulling = threading.Thread(target=lambda: pulled.append(store.pull(url, manifest=manifest)))
        pulling.start()
        assert is_fetching.wait(30)
        adding = threading.Thread(target=store.add, args=(second,))
        adding.start()
        adding.join(20)
        is_held_up = adding.is_alive()
        may_go_on.set()
        pulling.join(30)
        adding.join(30)
    assert not is_held_up
    assert {each.name for each in store.list()} == {"tiny", "second"}
    (model,) = pulled
    verify_backbone_file(model.backbone_path, model.manifest)
    if not has_manifest:
        assert model.experts.missing(model.manifest, model.manifest.whole_shard()) == []


def test_a_full_disk_is_said_before_anything_is_fetched(
    store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, store_module.SPARE_BYTES))
    with serving(source) as server:
        with pytest.raises(ModelUnusable, match=r"it takes \d+ MiB and 64 MiB must stay free, but only 64"):
            store.pull(server.url(source.name))
        assert len(server.asked) == 2, "its size and its header"


def test_with_a_manifest_only_header_and_trunk_are_fetched(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir_node.model.gguf_reader._READ_SIZE_BYTES", 4096)
    source = make_qwen3moe(tmp_path / "tiny.gguf", replace(SHAPE, n_expert=32, n_ff=64))
    manifest = ModelStore(tmp_path / "others").add(source).manifest
    with serving(source) as server:
        pulled = store.pull(server.url(source.name), manifest=manifest)
        wanted = manifest.data_offset + manifest.trunk_size_bytes()
        assert server.sent_bytes <= 1.05 * wanted + 2 * 4096
        assert wanted < source.stat().st_size / 2
    verify_backbone_file(pulled.backbone_path, manifest)
    assert pulled.experts.missing(manifest, ShardSet.from_pairs([(0, 0)])) != []


def test_with_the_manifest_of_a_whole_file_a_split_one_is_fetched_and_the_other_way_round(
    tmp_path: Path, source: Path
) -> None:
    first = make_qwen3moe(tmp_path / "parts.gguf", replace(SHAPE, tensors_a_part=9))
    paths = [each for each in part_locations(first) if isinstance(each, Path)]
    whole, split = (ModelStore(tmp_path / "others").add(each).manifest for each in (source, first))
    assert whole != split
    with serving(source, *paths) as server:
        for path, given, made in ((first, whole, split), (source, split, whole)):
            directory = tmp_path / f"models-{path.stem}"
            pulled = ModelStore(directory).pull(server.url(path.name), manifest=given)
            assert pulled.manifest == made
            verify_backbone_file(pulled.backbone_path, made)
            shard = ShardSet(((0, 1, 3), (1, 7, 8)))
            ExpertCache(directory).ensure(pulled, shard)
            assert pulled.experts.damaged(made, shard) == []


def test_a_manifest_of_another_model_is_refused(store: ModelStore, source: Path, tmp_path: Path) -> None:
    others = ModelStore(tmp_path / "others")
    other = others.add(make_qwen3moe(tmp_path / "other.gguf", replace(SHAPE, n_layer=1))).manifest
    with serving(source) as server, pytest.raises(ModelUnusable, match="not the model of the manifest"):
        store.pull(server.url(source.name), manifest=other)
    longer = make_qwen3moe(tmp_path / "longer.gguf", replace(SHAPE, n_ctx_train=4096))
    with (
        serving(source) as server,
        pytest.raises(ModelUnusable, match="its hyper_parameters_sha256 is another"),
    ):
        store.pull(server.url(source.name), manifest=others.add(longer).manifest)
    same_header = others.add(make_qwen3moe(tmp_path / "same.gguf", replace(SHAPE, seed=2))).manifest
    with serving(source) as server, pytest.raises(ModelUnusable, match="has not the manifest's digest"):
        store.pull(server.url(source.name), manifest=same_header)
    assert store.list() == ()


def test_pulling_again_fetches_the_header_only(store: ModelStore, source: Path) -> None:
    with serving(source) as server:
        first = store.pull(server.url(source.name))
        asked = len(server.asked)
        assert store.pull(server.url(source.name)) == first
        assert len(server.asked) == asked + 2
        first.backbone_path.unlink()
        assert store.pull(server.url(source.name)) == first
    verify_backbone_file(first.backbone_path, first.manifest)


def test_nothing_is_left_of_what_did_not_work(store: ModelStore, source: Path, tmp_path: Path) -> None:
    def refuse(path: Path) -> None:
        raise ModelUnusable("it is no good")

    def stop(answering: Answering, begin: int, end: int) -> bool:
        if begin > 100:
            answering.head(404, {"Content-Length": "0"})
        return begin > 100

    dense = make_dense(tmp_path / "dense.gguf", SHAPE)
    with serving(source, dense) as server:
        url = server.url(source.name)
        with pytest.raises(ModelUnusable, match=f"{url} cannot be used: it is no good"):
            store.pull(url, judge=refuse)
        with pytest.raises(ModelUnusable, match="not a Mixture-of-Experts"):
            store.pull(server.url(dense.name))
        server.behaviour = stop
        with pytest.raises(SourceFailed, match="status 404"):
            store.pull(url)
    directory = tmp_path / "models"
    assert [each.name for each in directory.iterdir()] == [".lock"]
    (directory / ".partial-killed").mkdir()
    (directory / ".partial-killed" / "experts").mkdir()
    store.add(source)
    assert not (directory / ".partial-killed").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_pull_that_ended_too_early_is_gone_on_with_however_it_ended(
    source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    is_fetching = threading.Event()
    size_bytes = source.stat().st_size
    cut = size_bytes * 2 // 3

    def hang(answering: Answering, begin: int, end: int) -> bool:
        if end > cut:
            answering.part(answering.data, begin, end, answering.data[begin:cut])
            is_fetching.set()
            answering.server.ended.wait(30)
        return end > cut

    home = tmp_path / "home"
    with serving(source) as server:
        server.behaviour = hang
        command = [sys.executable, "-m", "kvasir_node", "--home", str(home), "models", "pull"]
        with subprocess.Popen([*command, server.url(source.name).url], stderr=subprocess.DEVNULL) as process:
            try:
                assert is_fetching.wait(60)
                wait_for_noted(home, build_manifest(source), cut // 2)
                process.send_signal(number)
                assert process.wait(30) != 0
            finally:
                process.kill()
        server.behaviour, server.sent_bytes = None, 0
        ModelStore(home / "models").add(make_qwen3moe(tmp_path / "other.gguf", replace(SHAPE, seed=9)))
        pulled = ModelStore(home / "models").pull(server.url(source.name))
        assert server.sent_bytes < size_bytes - cut // 2 + HEADER_BYTES
    check_pulled(pulled, source, tmp_path)
    left = {each.name for each in (home / "models").iterdir()}
    assert {each for each in left if each.startswith(".")} == {".lock"}
    assert {each.name for each in pulled.manifest_path.parent.iterdir()} == {
        "entry.json",
        "manifest.msgpack",
        "backbone.gguf",
        "experts",
    }


HEADER_BYTES = (256 << 10) + 2
"""The header is read in steps of that size."""


def wait_for_noted(home: Path, manifest: ModelManifest, size_bytes: int) -> None:
    """Wait until so much has been noted as having come."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        journals = list(home.glob(f"models/.partial-pull-*/{JOURNAL}"))
        names = [line.split()[-1] for each in journals for line in each.read_text().splitlines()[1:]]
        tensors = [manifest.tensor(each) for each in names if manifest.has_tensor(each)]
        if (
            sum(each.expert_size_bytes if each.is_expert else each.size_bytes for each in tensors)
            >= size_bytes
        ):
            return
        time.sleep(0.02)
    raise AssertionError("nothing comes")


def check_pulled(pulled: StoredModel, source: Path, tmp_path: Path) -> None:
    added = ModelStore(tmp_path / "others").add(source)
    assert pulled.manifest == added.manifest
    assert pulled.backbone_path.read_bytes() == added.backbone_path.read_bytes()
    whole = pulled.manifest.whole_shard()
    assert pulled.experts.missing(pulled.manifest, whole) == []
    assert pulled.experts.damaged(pulled.manifest, whole) == []


class Interrupted(BaseException):
    """As a signal that ends a pull."""


def interrupt_at(fraction: float) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done >= fraction * total:
            raise Interrupted

    return progress


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 1 << 30), keep_experts=st.booleans())
def test_interrupted_anywhere_and_damaged_meanwhile_a_pull_gives_the_model(
    tmp_path: Path, source: Path, seed: int, keep_experts: bool
) -> None:
    """A power cut leaves zeros, holes and torn lines; each costs what it took and is never believed."""
    draws = random.Random(seed)
    directory = tmp_path / f"models-{seed}-{keep_experts}"
    store = ModelStore(directory)
    experts_bytes_max = None if keep_experts else 0
    with serving(source) as server:
        url = server.url(source.name)
        for _ in range(3):
            with contextlib.suppress(Interrupted):
                store.pull(url, interrupt_at(draws.random()), experts_bytes_max=experts_bytes_max)
            files = sorted(each for each in directory.glob(".partial-pull-*/**/*") if each.is_file())
            for path in draws.sample(files, min(2, len(files))):
                data = bytearray(path.read_bytes())
                begin = draws.randrange(len(data) + 1)
                if path.name == JOURNAL or draws.random() < 0.5:
                    del data[begin:]
                else:
                    data[begin:] = bytes(len(data) - begin)
                path.write_bytes(data)
        pulled = store.pull(url, experts_bytes_max=experts_bytes_max)
    assert pulled.manifest == ModelStore(tmp_path / "others").add(source).manifest
    verify_backbone_file(pulled.backbone_path, pulled.manifest)
    whole = pulled.manifest.whole_shard()
    assert pulled.experts.damaged(pulled.manifest, whole) == []
    if keep_experts:
        check_pulled(pulled, source, tmp_path)
    else:
        assert not pulled.experts.directory.exists()
    shutil.rmtree(directory)


@pytest.mark.parametrize("keep_experts", [True, False])
def test_what_came_before_is_not_fetched_again(store: ModelStore, source: Path, keep_experts: bool) -> None:
    size_bytes = source.stat().st_size
    experts_bytes_max = None if keep_experts else 0
    with serving(source) as server:
        url = server.url(source.name)
        with pytest.raises(Interrupted):
            store.pull(url, interrupt_at(0.8), experts_bytes_max=experts_bytes_max)
        server.sent_bytes = 0
        store.pull(url, experts_bytes_max=experts_bytes_max)
        assert server.sent_bytes < 0.3 * size_bytes + HEADER_BYTES


@pytest.mark.parametrize(
    "before, later", [('"one"', '"two"'), ('"one"', 'W/"one"'), ('W/"one"', 'W/"one"'), (None, None)]
)
def test_bytes_of_another_version_are_not_gone_on_with(
    store: ModelStore, source: Path, tmp_path: Path, before: str | None, later: str | None
) -> None:
    """A file with the same header and other weights; or a server that does not say."""
    other = make_qwen3moe(tmp_path / "other.gguf", replace(SHAPE, seed=9))
    assert other.stat().st_size == source.stat().st_size
    with serving(source) as server:
        url = server.url(source.name)
        tag = before

        def tagged(answering: Answering, begin: int, end: int) -> bool:
            answering.part(answering.data, begin, end, headers={"ETag": tag})
            return True

        server.behaviour = tagged
        with pytest.raises(Interrupted):
            store.pull(url, interrupt_at(0.8))
        server.files[source.name] = other.read_bytes()
        tag = later
        pulled = store.pull(url)
    check_pulled(pulled, other, tmp_path)


def test_what_nobody_goes_on_with_is_kept_for_a_week(store: ModelStore, source: Path, tmp_path: Path) -> None:
    with serving(source) as server, pytest.raises(Interrupted):
        store.pull(server.url(source.name), interrupt_at(0.5))
    (journal,) = tmp_path.glob(f"models/.partial-pull-*/{JOURNAL}")
    for age_s, is_kept in ((PULL_KEPT_S - 100, True), (PULL_KEPT_S + 100, False)):
        then = time.time() - age_s
        os.utime(journal, (then, then))
        store.add(source)
        assert journal.parent.exists() == is_kept
