"""A manifest from somebody else: whatever its name does not cover is refused or ignored, never kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.model.backbone_file import verify_backbone_file, write_backbone_file
from kvasir_node.model.expert_cache import ExpertCache
from kvasir_node.model.gguf_format import GgufFile, MetadataEntry, float_entry, integer_entry, text_entry
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.gguf_writer import lay_out
from kvasir_node.model.model_manifest import build_manifest, moved_manifest
from kvasir_node.model.store import ModelStore
from kvasir_proto.errors import LocalProtocolError, ModelUnusable
from kvasir_proto.manifest import ManifestTensor, ModelManifest, ShardSet
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME
from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.model.misbehaving_server import serving

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

TEMPLATE: Final = "tokenizer.chat_template"
OTHER: Final = bytes(range(32))


@dataclass(frozen=True)
class Honest:
    """A model's file, its header and the manifest that is made of it."""

    path: Path
    gguf: GgufFile
    manifest: ModelManifest


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Honest:
    path = make_qwen3moe(tmp_path_factory.mktemp("honest") / "tiny.gguf", ModelShape(n_layer=2))
    return Honest(path, read_gguf(path), build_manifest(path))


# -- the manifest lies ---------------------------------------------------------------------------------


def with_tensor(manifest: ModelManifest, **changes: Any) -> ModelManifest:
    """The manifest with its first tensor changed."""
    first, *others = manifest.tensors
    return replace(manifest, tensors=(replace(first, **changes), *others))


def with_offsets_exchanged(manifest: ModelManifest) -> ModelManifest:
    """The manifest with two expert tensors of one size each where the other is."""
    one, other = manifest.expert_tensors(0)[:2]
    assert one.size_bytes == other.size_bytes
    exchanged = {one.name: other.offset, other.name: one.offset}
    tensors = [replace(each, offset=exchanged.get(each.name, each.offset)) for each in manifest.tensors]
    return replace(manifest, tensors=tuple(tensors))


Change = Callable[[ModelManifest], ModelManifest]

IGNORED: Final[dict[str, Change]] = {
    "name": lambda each: replace(each, name="another"),
    "file_size_bytes": lambda each: replace(each, file_size_bytes=each.file_size_bytes + 1),
    "data_offset": lambda each: replace(each, data_offset=each.data_offset - 1),
    "header_sha256": lambda each: replace(each, header_sha256=OTHER),
    "metadata_sha256": lambda each: replace(each, metadata_sha256=OTHER),
    "tensors": lambda each: replace(each, tensors=each.tensors[::-1]),
    "tensor.offset": with_offsets_exchanged,
}
"""What the name does not cover. `tensors` is their order."""

REFUSED: Final[dict[str, Change]] = {
    "architecture": lambda each: replace(each, architecture="qwen2moe"),
    "n_layer": lambda each: replace(each, n_layer=3),
    "n_embd": lambda each: replace(each, n_embd=65),
    "n_ff": lambda each: replace(each, n_ff=33),
    "n_expert": lambda each: replace(each, n_expert=9),
    "n_expert_used": lambda each: replace(each, n_expert_used=3),
    "n_vocab": lambda each: replace(each, n_vocab=97),
    "n_ctx_train": lambda each: replace(each, n_ctx_train=1),
    "moe_layers": lambda each: replace(each, moe_layers=(0,)),
    "hyper_parameters_sha256": lambda each: replace(each, hyper_parameters_sha256=OTHER),
    "tokenizer_sha256": lambda each: replace(each, tokenizer_sha256=OTHER),
    "template_sha256": lambda each: replace(each, template_sha256=OTHER),
    "tensor.name": lambda each: with_tensor(each, name="another.weight"),
    "tensor.type": lambda each: with_tensor(each, type=TENSOR_TYPES_BY_NAME["i32"]),
    "tensor.shape": lambda each: with_tensor(each, shape=each.tensors[0].shape[::-1]),
    "tensor.size_bytes": lambda each: with_tensor(each, size_bytes=each.tensors[0].size_bytes + 1),
    "tensor.digests": lambda each: with_tensor(each, digests=OTHER),
}
"""What the name covers: the manifest is another model's, or none."""


def test_every_field_of_a_manifest_is_ignored_or_refused() -> None:
    known = [each.name for each in fields(ModelManifest)]
    known += [f"tensor.{each.name}" for each in fields(ManifestTensor)]
    assert sorted(known) == sorted([*IGNORED, *REFUSED])


@pytest.mark.parametrize("field", IGNORED)
def test_what_the_name_does_not_cover_is_read_from_the_file(
    honest: Honest, field: str, tmp_path: Path
) -> None:
    lie = IGNORED[field](honest.manifest)
    assert lie != honest.manifest
    assert lie.digest() == honest.manifest.digest()
    lie = ModelManifest.decode(lie.encode())
    store = ModelStore(tmp_path)
    with serving(honest.path) as server:
        pulled = store.pull(server.url(honest.path.name), manifest=lie)
        assert pulled.manifest == store.get(pulled.digest).manifest == honest.manifest
        shard = ShardSet(((0, 1, 3),))
        ExpertCache(tmp_path).ensure(pulled, shard)
    assert pulled.experts.damaged(honest.manifest, shard) == []
    verify_backbone_file(pulled.backbone_path, honest.manifest)


@given(seed=st.integers(0, 1 << 30))
def test_all_of_it_together_is_read_from_the_file(honest: Honest, seed: int) -> None:
    draws = random.Random(seed)
    tensors, offset = [], draws.randrange(1, 1000)
    data_offset = draws.randint(1, offset)
    for each in draws.sample(honest.manifest.tensors, len(honest.manifest.tensors)):
        tensors.append(replace(each, offset=offset))
        offset += each.size_bytes + draws.randrange(100)
    lie = replace(
        honest.manifest,
        name=draws.choice(["x", "tiny"]),
        file_size_bytes=offset + draws.randrange(1000),
        data_offset=data_offset,
        header_sha256=draws.randbytes(32),
        metadata_sha256=draws.randbytes(32),
        tensors=tuple(draws.sample(tensors, len(tensors))),
    )
    assert lie.digest() == honest.manifest.digest()
    assert moved_manifest(lie, honest.gguf) == honest.manifest


@pytest.mark.parametrize("field", REFUSED)
def test_what_the_name_covers_is_another_models_and_refused(
    honest: Honest, field: str, tmp_path: Path
) -> None:
    try:
        lie = REFUSED[field](honest.manifest)
    except LocalProtocolError:
        return  # no manifest at all
    assert lie.digest() != honest.manifest.digest()
    with serving(honest.path) as server, pytest.raises(ModelUnusable):
        ModelStore(tmp_path).pull(server.url(honest.path.name), manifest=lie)
    assert ModelStore(tmp_path).list_with_damage() == ((), ())


@pytest.mark.parametrize("field", IGNORED)
def test_a_file_is_written_only_with_the_manifest_that_it_gives(
    honest: Honest, field: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelUnusable, match="is not the file of the manifest any more"):
        write_backbone_file(honest.path, IGNORED[field](honest.manifest), tmp_path / "backbone.gguf")
    assert list(tmp_path.iterdir()) == []


# -- the file lies too ---------------------------------------------------------------------------------

Place = tuple[str, Any, tuple[int, ...], bytes]
"""A tensor to be written: name, type, shape, bytes."""


def rewritten(
    honest: Honest,
    destination: Path,
    entries: Sequence[MetadataEntry] = (),
    change: Callable[[list[Place]], list[Place]] = lambda each: each,
) -> Path:
    """The model again with these entries instead of its own, or with other tensors."""
    data = honest.path.read_bytes()
    places = change(
        [
            (each.name, each.type, each.shape, data[each.offset : each.offset + each.size_bytes])
            for each in honest.gguf.tensors
        ]
    )
    metadata = dict(honest.gguf.metadata) | {each.key: each for each in entries}
    header, placed, size_bytes = lay_out(
        tuple(metadata.values()), [each[:3] for each in places], honest.gguf.alignment
    )
    written = bytearray(header.ljust(size_bytes, b"\0"))
    for place, each in zip(placed, places, strict=True):
        written[place.offset : place.offset + place.size_bytes] = each[3]
    destination.write_bytes(written)
    return destination


METADATA: Final[dict[str, tuple[MetadataEntry, str]]] = {
    "tokenizer": (text_entry("tokenizer.ggml.model", "gpt2"), "tokenizer_sha256"),
    "one more token": (integer_entry("tokenizer.ggml.bos_token_id", 7), "tokenizer_sha256"),
    "chat template": (text_entry(TEMPLATE, "{{ evil }}"), "template_sha256"),
    "another template": (text_entry(f"{TEMPLATE}.tool_use", "{{ evil }}"), "template_sha256"),
    "hyper-parameter": (float_entry("qwen3moe.rope.freq_base", 5e5), "hyper_parameters_sha256"),
    "count": (integer_entry("qwen3moe.context_length", 64), "hyper_parameters_sha256"),
    "experts used": (integer_entry("qwen3moe.expert_used_count", 1), "hyper_parameters_sha256"),
}


def dressed(path: Path, honest: Honest) -> ModelManifest:
    """A manifest of the honest model's name that says of `path` whatever the name leaves open."""
    made = build_manifest(path)
    offsets = {each.name: each.offset for each in made.tensors}
    tensors = tuple(
        replace(each, offset=offsets.get(each.name, made.data_offset)) for each in honest.manifest.tensors
    )
    kept = ("name", "file_size_bytes", "data_offset", "header_sha256", "metadata_sha256")
    lie = replace(honest.manifest, tensors=tensors, **{each: getattr(made, each) for each in kept})
    assert lie.digest() == honest.manifest.digest()
    return lie


@pytest.mark.parametrize("case", METADATA)
def test_another_header_does_not_take_the_models_name(honest: Honest, case: str, tmp_path: Path) -> None:
    entry, field = METADATA[case]
    path = rewritten(honest, tmp_path / "tiny.gguf", [entry])
    lie = dressed(path, honest)
    store = ModelStore(tmp_path / "models")
    with serving(path) as server, pytest.raises(ModelUnusable, match="not the model of the manifest: its "):
        store.pull(server.url(path.name), manifest=lie)
    assert store.list_with_damage() == ((), ())
    backbone = tmp_path / "backbone.gguf"
    with pytest.raises(ModelUnusable, match="not the model of the manifest: its "):
        write_backbone_file(path, lie, backbone)
    # A file that somebody put in its place is found out, though all that is not in the name fits.
    made = build_manifest(path)
    write_backbone_file(path, made, backbone)
    verify_backbone_file(backbone, made)
    with pytest.raises(ModelUnusable, match="is damaged: its "):
        verify_backbone_file(backbone, lie)
    assert getattr(made, field) != getattr(lie, field)


def _other_shape(each: Place) -> Place:
    return (each[0], each[1], each[2][::-1], each[3])


TENSORS: Final[dict[str, Callable[[list[Place]], list[Place]]]] = {
    "fewer": lambda places: [places[0], *places[2:]],
    "one more": lambda places: [*places, ("more.weight", *places[1][1:])],
    "another name": lambda places: [places[0], ("more.weight", *places[1][1:]), *places[2:]],
    "another type": lambda places: [places[0], _as_i32(places[1]), *places[2:]],
    "another shape": lambda places: [_other_shape(each) if each[0] == ROUTER else each for each in places],
    "other bytes": lambda places: [(*each[:3], each[3][::-1]) for each in places],
}

ROUTER: Final = "blk.0.ffn_gate_inp.weight"


def _as_i32(each: Place) -> Place:
    return (each[0], TENSOR_TYPES_BY_NAME["i32"], *each[2:])


@pytest.mark.parametrize("case", TENSORS)
def test_other_tensors_do_not_take_the_models_name(honest: Honest, case: str, tmp_path: Path) -> None:
    path = rewritten(honest, tmp_path / "tiny.gguf", change=TENSORS[case])
    store = ModelStore(tmp_path / "models")
    reason = "has not the manifest's digest" if case == "other bytes" else "not the model of the manifest"
    with serving(path) as server, pytest.raises(ModelUnusable, match=reason):
        store.pull(server.url(path.name), manifest=honest.manifest)
    assert store.list_with_damage() == ((), ())


def test_a_file_that_differs_only_outside_the_name_is_the_model_as_it_was_read(
    honest: Honest, tmp_path: Path
) -> None:
    path = rewritten(
        honest,
        tmp_path / "again.gguf",
        [text_entry("general.name", "again")],
        lambda places: places[::-1],
    )
    made = build_manifest(path)
    assert made != honest.manifest
    assert made.digest() == honest.manifest.digest()
    store = ModelStore(tmp_path / "models")
    with serving(honest.path, path) as server:
        store.pull(server.url(honest.path.name))
        # The file that is there was found right, but for another manifest of the same name.
        pulled = store.pull(server.url(path.name), manifest=honest.manifest)
        assert (pulled.manifest, store.list()) == (made, (pulled,))
        verify_backbone_file(pulled.verified_backbone_path(), made)


def test_a_manifest_in_the_store_is_believed_no_more_than_a_strangers(honest: Honest, tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    with serving(honest.path) as server, pytest.MonkeyPatch.context() as patch:
        url = server.url(honest.path.name)
        patch.setattr("kvasir_node.model.store.moved_manifest", lambda manifest, gguf: manifest)
        patch.setattr("kvasir_node.model.backbone_file.moved_manifest", lambda manifest, gguf: manifest)
        lie = with_offsets_exchanged(honest.manifest)
        assert store.pull(url, manifest=lie).manifest == lie
        patch.undo()
        assert store.pull(url).manifest == honest.manifest
