"""The store: adding twice changes nothing, and what was damaged or left half done is made again."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_node.model import store as store_module
from kvasir_node.model.backbone_file import verify_backbone_file
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.gguf_split import PARTS_MAX
from kvasir_node.model.model_url import ModelUrl
from kvasir_node.model.store import DEMO_MODEL, ModelStore, StoredModel
from kvasir_proto.errors import ModelUnusable
from tests.model_makers import ModelShape, make_dense, make_qwen3moe

SHAPE = ModelShape(n_layer=2)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_qwen3moe(tmp_path / "tiny.gguf", SHAPE)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "models")


def test_a_model_is_added_and_found_by_every_name(store: ModelStore, source: Path) -> None:
    assert store.list() == ()
    added = store.add(source)
    assert added.digest == added.manifest.digest().hex()
    assert (added.name, added.source_path) == ("tiny", source)
    verify_backbone_file(added.backbone_path, added.manifest)
    assert store.list() == (added,)
    for name in ("tiny", "random qwen3moe", added.digest, added.digest[:6], added.digest[:9].upper()):
        assert store.get(name) == added


@pytest.mark.parametrize("name", ["other", "", "tin", "0" * 64])
def test_a_model_that_is_not_there_is_named_in_the_error(store: ModelStore, source: Path, name: str) -> None:
    store.add(source)
    with pytest.raises(ModelUnusable, match=f"there is no model '{name}' here") as caught:
        store.get(name)
    assert caught.value.exit_code == 7


def test_the_demo_model_is_there_before_it_is_added_and_gives_way_to_a_namesake(
    store: ModelStore, source: Path
) -> None:
    demo = store.get("demo-q8_0")
    assert demo.source_path == DEMO_MODEL
    assert store.get("demo") == demo
    namesake = store.add(source.rename(source.with_name("demo.gguf")))
    assert store.get("demo") == namesake
    assert store.get("demo-q8_0") == demo


def test_what_a_killed_command_left_goes_when_the_lock_is_next_taken(
    store: ModelStore, source: Path, tmp_path: Path
) -> None:
    added = store.add(source)
    left = added.manifest_path.with_name(".partial-left")
    left.write_bytes(b"x")
    added.reference_path()
    assert not left.exists(), "another file of the model had to be made"
    left.write_bytes(b"x")
    store.add(make_qwen3moe(tmp_path / "other.gguf", replace(SHAPE, seed=2)))
    assert not left.exists(), "another model was added"


@pytest.mark.parametrize("name", ["entry.json", "manifest.msgpack"])
def test_a_damaged_model_is_named_and_the_rest_of_an_interrupted_add_is_not(
    store: ModelStore, source: Path, name: str
) -> None:
    added = store.add(source)
    damaged = added.manifest_path.with_name(name)
    damaged.write_bytes(b"no")
    models, damage = store.list_with_damage()
    assert models == ()
    assert [each.startswith(f"{damaged} is damaged") for each in damage] == [True]
    added.manifest_path.with_name("entry.json").unlink()
    assert store.list_with_damage() == ((), ())


def test_a_short_prefix_is_not_enough(store: ModelStore, source: Path) -> None:
    with pytest.raises(ModelUnusable, match="there is no model"):
        store.get(store.add(source).digest[:5])


def test_two_models_of_one_name_must_be_told_apart(store: ModelStore, source: Path, tmp_path: Path) -> None:
    first = store.add(source)
    (tmp_path / "elsewhere").mkdir()
    second = store.add(make_qwen3moe(tmp_path / "elsewhere" / "tiny.gguf", replace(SHAPE, seed=9)))
    with pytest.raises(ModelUnusable, match="means several models") as caught:
        store.get("tiny")
    assert first.digest[:12] in str(caught.value)
    assert store.get(second.digest) == second
    assert set(store.list()) == {first, second}


def test_progress_goes_from_the_first_byte_to_the_last(store: ModelStore, source: Path) -> None:
    seen: list[tuple[int, int]] = []
    added = store.add(source, lambda done, total: seen.append((done, total)))
    total = sum(each.size_bytes for each in added.manifest.tensors) + added.manifest.trunk_size_bytes()
    assert seen == sorted(seen)
    assert {each for _, each in seen} == {total}
    assert seen[-1] == (total, total)


def test_adding_an_unchanged_file_again_reads_no_weights(
    store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = store.add(source)
    written = added.backbone_path.stat().st_mtime_ns

    def fail(*_: object) -> None:
        raise AssertionError("the whole file was read again")

    monkeypatch.setattr(store_module, "manifest_of", fail)
    assert store.add(source) == added
    assert added.backbone_path.stat().st_mtime_ns == written


def test_the_same_model_from_another_place_keeps_its_backbone_file(
    store: ModelStore, source: Path, tmp_path: Path
) -> None:
    added = store.add(source)
    written = added.backbone_path.stat().st_mtime_ns
    copy = tmp_path / "copy.gguf"
    shutil.copy(source, copy)
    source.unlink()
    again = store.add(copy)
    assert again == replace(added, name="copy", source=copy)
    assert again.backbone_path.stat().st_mtime_ns == written
    assert store.list() == (again,)


def test_a_file_that_changed_is_another_model(store: ModelStore, source: Path) -> None:
    before = store.add(source)
    make_qwen3moe(source, replace(SHAPE, seed=5))
    after = store.add(source)
    assert after.digest != before.digest
    assert {each.digest for each in store.list()} == {before.digest, after.digest}


def test_what_is_no_model_leaves_nothing(store: ModelStore, tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="not a Mixture-of-Experts"):
        store.add(make_dense(tmp_path / "dense.gguf", SHAPE))
    with pytest.raises(ModelUnusable, match="No such file"):
        store.add(tmp_path / "missing.gguf")
    assert store.list() == ()


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path: Path, tensor: str = "output.weight") -> None:
    """Change one bit of a tensor."""
    offset = next(each for each in read_gguf(path).tensors if each.name == tensor).offset
    with path.open("r+b") as file:
        file.seek(offset)
        first = file.read(1)
        file.seek(offset)
        file.write(bytes([first[0] ^ 4]))


def rewrite_entry(**fields: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | fields))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no entry": ("entry.json", Path.unlink),
    "entry cut": ("entry.json", cut),
    "entry of another version": ("entry.json", rewrite_entry(schema_version=1)),
    "entry without a path": ("entry.json", rewrite_entry(source=None)),
    "entry of another form": ("entry.json", lambda path: path.write_text("[]")),
    "entry too large": ("entry.json", lambda path: path.write_text(" " * 300_000)),
    "no manifest": ("manifest.msgpack", Path.unlink),
    "manifest cut": ("manifest.msgpack", cut),
    "no backbone": ("backbone.gguf", Path.unlink),
    "backbone cut": ("backbone.gguf", cut),
    "backbone is empty": ("backbone.gguf", lambda path: path.write_bytes(b"")),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_entry_is_not_listed_and_is_made_again(store: ModelStore, source: Path, case: str) -> None:
    added = store.add(source)
    name, damage = DAMAGES[case]
    damage(added.manifest_path.with_name(name))
    (added.manifest_path.parent / ".partial-left").write_bytes(b"x")
    assert store.list() == ()
    with pytest.raises(ModelUnusable):
        store.get(added.digest)

    assert store.add(source) == added
    assert store.list() == (added,)
    verify_backbone_file(added.backbone_path, added.manifest)
    assert not (added.manifest_path.parent / ".partial-left").exists()


def test_a_flipped_bit_of_the_trunk_is_found_by_adding_again(store: ModelStore, source: Path) -> None:
    added = store.add(source)
    flip(added.backbone_path)
    with pytest.raises(ModelUnusable, match="has not the manifest's digest"):
        verify_backbone_file(added.backbone_path, added.manifest)
    assert store.add(source) == added
    verify_backbone_file(added.backbone_path, added.manifest)


def test_a_manifest_of_another_model_is_not_believed(store: ModelStore, source: Path, tmp_path: Path) -> None:
    added = store.add(source)
    other = store.add(make_qwen3moe(tmp_path / "other.gguf", replace(SHAPE, seed=2)))
    shutil.copy(other.manifest_path, added.manifest_path)
    with pytest.raises(ModelUnusable, match="its digest is not its name"):
        store.get(added.digest)


def test_a_manifest_whose_ranges_changed_is_not_believed_though_it_names_the_model(
    store: ModelStore, source: Path
) -> None:
    added = store.add(source)
    moved = replace(added.manifest, file_size_bytes=added.manifest.file_size_bytes + 1)
    assert moved.digest() == added.manifest.digest()
    added.manifest_path.write_bytes(moved.encode())
    with pytest.raises(ModelUnusable, match="not the one that was written"):
        store.get(added.digest)
    assert store.add(source) == added


Usage = namedtuple("Usage", "total used free")


def with_free_space(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free_bytes))


def test_a_full_disk_is_said_before_anything_is_written(
    store: ModelStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free_space(monkeypatch, store_module.SPARE_BYTES)
    with pytest.raises(ModelUnusable, match="there is no space for the backbone file"):
        store.add(source)
    assert store.list() == ()
    with_free_space(monkeypatch, store_module.SPARE_BYTES + source.stat().st_size)
    added = store.add(source)
    with_free_space(monkeypatch, store_module.SPARE_BYTES)
    with pytest.raises(ModelUnusable, match="there is no space for the reference file"):
        added.reference_path()


def test_a_directory_that_cannot_be_made_is_said(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelUnusable, match="cannot be made"):
        ModelStore(tmp_path / "file" / "models").add(source)


@pytest.fixture
def added(store: ModelStore, source: Path) -> StoredModel:
    return store.add(source)


def test_the_reference_file_is_made_once_and_again_when_it_is_cut(added: StoredModel) -> None:
    seen: list[tuple[int, int]] = []
    path = added.reference_path(lambda done, total: seen.append((done, total)))
    whole = path.read_bytes()
    assert seen[-1][0] == seen[-1][1]
    written = path.stat().st_mtime_ns
    assert added.reference_path() == path
    assert path.stat().st_mtime_ns == written
    cut(path)
    assert added.reference_path().read_bytes() == whole


def test_a_reference_file_needs_the_source(added: StoredModel) -> None:
    added.source_path.unlink()
    with pytest.raises(ModelUnusable, match="No such file"):
        added.reference_path()


def test_a_damaged_backbone_file_is_mended_before_it_is_served(store: ModelStore, added: StoredModel) -> None:
    whole = added.backbone_path.read_bytes()
    flip(added.backbone_path)
    assert store.get("tiny") == added, "no header tells"
    seen: list[tuple[int, int]] = []
    path = added.verified_backbone_path(lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == whole
    assert seen[-1] == (added.manifest.trunk_size_bytes(), added.manifest.trunk_size_bytes())


@pytest.mark.parametrize("case", ["the source has gone", "the source is damaged too", "another model there"])
def test_a_backbone_file_that_cannot_be_mended_is_named_with_its_tensor(
    added: StoredModel, case: str
) -> None:
    flip(added.backbone_path)
    match case:
        case "the source has gone":
            added.source_path.unlink()
        case "the source is damaged too":
            flip(added.source_path)
        case _:
            make_qwen3moe(added.source_path, replace(SHAPE, n_layer=1))
    with pytest.raises(ModelUnusable, match=r"output\.weight has not the manifest's digest") as caught:
        added.verified_backbone_path()
    assert caught.value.exit_code == 7
    assert str(added.backbone_path) in str(caught.value)
    assert f"and it cannot be made again: {added.source_path}" in str(caught.value)


@pytest.mark.parametrize("case", [each for each in DAMAGES if DAMAGES[each][0] == "backbone.gguf"])
def test_a_backbone_file_without_its_header_is_mended_by_the_models_digest(
    store: ModelStore, added: StoredModel, case: str
) -> None:
    whole = added.backbone_path.read_bytes()
    DAMAGES[case][1](added.backbone_path)
    assert store.mended(added.digest) == added
    assert added.backbone_path.read_bytes() == whole
    assert store.list() == (added,)
    DAMAGES[case][1](added.backbone_path)
    added.source_path.unlink()
    with pytest.raises(ModelUnusable):
        store.mended(added.digest)
    assert store.mended("0" * 64) is None


def test_a_file_that_was_verified_is_read_again_only_when_it_was_touched(
    added: StoredModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def count(path: Path, *arguments: object) -> None:
        read.append(path)

    monkeypatch.setattr(store_module, "verify_backbone_file", count)
    added.verified_backbone_path()
    assert read == [], "it was checked as it was written"
    os.utime(added.backbone_path)
    added.verified_backbone_path()
    added.verified_backbone_path()
    assert read == [added.backbone_path]


@pytest.mark.parametrize("tensor", ["output.weight", "blk.1.ffn_down_exps.weight"])
def test_a_damaged_reference_file_is_written_again(added: StoredModel, tensor: str) -> None:
    path = added.reference_path()
    whole = path.read_bytes()
    flip(path, tensor)
    assert added.reference_path().read_bytes() == whole
    flip(path, tensor)
    added.source_path.unlink()
    with pytest.raises(ModelUnusable, match=f"{tensor} has not the manifest's digest, and it cannot be made"):
        added.reference_path()


def test_the_entry_of_a_model_in_the_most_parts_can_be_read_again(store: ModelStore, source: Path) -> None:
    added = store.add(source)
    entry_path = added.manifest_path.with_name("entry.json")
    entry = json.loads(entry_path.read_text())
    entry["source_identity"] = [2**63 - 1] * len(entry["source_identity"]) * PARTS_MAX
    entry_path.write_text(json.dumps(entry, indent=1))
    assert entry_path.stat().st_size > 65536
    assert store.list() == (added,)


def test_a_path_that_is_no_utf8_is_refused_before_anything_is_read(store: ModelStore, source: Path) -> None:
    path = source.rename(Path(os.fsdecode(os.fsencode(source.parent) + b"/m\xff.gguf")))
    with pytest.raises(ModelUnusable, match="its path is not valid UTF-8; rename it"):
        store.add(path)
    assert store.list() == ()


def test_a_manifest_alone_is_a_model_without_files(store: ModelStore, tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    manifest = ModelStore(tmp_path / "other").add(source).manifest
    taken = store.take_manifest(manifest)
    assert (taken.source, taken.has_source, taken.addresses) == (None, True, ())
    assert taken.source_path == taken.experts.directory
    assert [each.digest for each in store.list()] == [taken.digest]
    for path in (taken.verified_backbone_path, taken.reference_path):
        with pytest.raises(ModelUnusable, match="only the manifest is here"):
            path()
    added = store.add(source)
    assert added.source == source
    assert store.take_manifest(manifest) == added, "what is known of it stays"


@pytest.mark.parametrize(
    "url, told",
    [
        ("https://a.example/m.gguf", True),
        ("https://a.example/m.gguf?signature=secret", False),
        ("https://a.example/m.gguf#part", False),
    ],
)
def test_an_address_that_may_be_a_key_is_told_nobody(
    store: ModelStore, tmp_path: Path, url: str, told: bool
) -> None:
    model = store.add(make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1)))
    assert model.addresses == ()
    assert replace(model, source=ModelUrl(url)).addresses == ((url,) if told else ())
