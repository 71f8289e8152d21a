"""What Kvasir writes for llama.cpp: the trunk bit for bit, holes for experts, whole or not there at all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_node.model import byte_ranges
from kvasir_node.model.backbone_file import (
    expert_bytes_of,
    hole_type,
    verify_backbone_file,
    write_backbone_file,
)
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.model.reference_file import write_reference_file
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.manifest import ManifestTensor, ModelManifest, is_expert_name
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME
from tests.model_makers import MAKERS, ModelShape, make_qwen3moe, quantise
from tests.plain_llama import decode_plainly

WIDE = ModelShape(n_layer=4, n_embd=256, n_ff=128, n_expert=8, tokenizer=True)


def contents(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    data = path.read_bytes()
    return {
        each.name: (each.type.name, each.shape, data[each.offset : each.offset + each.size_bytes])
        for each in read_gguf(path).tensors
    }


@pytest.mark.parametrize("name", MAKERS)
def test_the_trunk_is_carried_through_and_experts_are_holes(name: str, tmp_path: Path) -> None:
    source = MAKERS[name](tmp_path / "model.gguf", WIDE)
    manifest = build_manifest(source)
    backbone, reference = tmp_path / "backbone.gguf", tmp_path / "reference.gguf"
    copied: list[int] = []
    write_backbone_file(source, manifest, backbone, copied.append)
    write_reference_file(source, manifest, reference)

    before, after = contents(source), contents(backbone)
    assert contents(reference) == before
    assert list(after) == list(before)
    for tensor_name, (type_name, shape, data) in after.items():
        assert shape == before[tensor_name][1]
        if is_expert_name(tensor_name):
            assert data == bytes(len(data))
            assert type_name == ("q1_0" if tensor_name.endswith("weight") else "f32")
        else:
            assert (type_name, shape, data) == before[tensor_name]
    assert sum(copied) == manifest.trunk_size_bytes()
    for written in (backbone, reference):
        assert {key: each.raw for key, each in read_gguf(written).metadata.items()} == {
            key: each.raw for key, each in read_gguf(source).metadata.items()
        }

    # Not one block of an expert is on the disk.
    assert expert_bytes_of(backbone) == 0
    stored = backbone.stat().st_blocks * 512
    assert stored < manifest.data_offset + manifest.trunk_size_bytes() + 8192 * len(manifest.tensors)
    assert expert_bytes_of(source) > 0.9 * manifest.experts_size_bytes()
    assert backbone.stat().st_size - manifest.trunk_size_bytes() < 0.06 * manifest.experts_size_bytes() + (
        manifest.data_offset + 65536
    )
    verify_backbone_file(backbone, manifest)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_llama_cpp_opens_both_files(name: str, tmp_path: Path) -> None:
    source = MAKERS[name](tmp_path / "model.gguf", ModelShape())
    manifest = build_manifest(source)
    backbone, reference = tmp_path / "backbone.gguf", tmp_path / "reference.gguf"
    write_backbone_file(source, manifest, backbone)
    write_reference_file(source, manifest, reference)
    tokens = list(range(1, 12))
    assert (decode_plainly(reference, tokens) == decode_plainly(source, tokens)).all()
    assert decode_plainly(backbone, tokens).shape == decode_plainly(source, tokens).shape


@pytest.mark.parametrize(
    "width, type_name", [(256, "q1_0"), (128, "q1_0"), (192, "q2_0"), (96, "mxfp4"), (40, "f16"), (7, "f16")]
)
def test_a_hole_has_the_smallest_type_whose_blocks_divide_its_rows(width: int, type_name: str) -> None:
    q8_0 = TENSOR_TYPES_BY_NAME["q8_0"]
    weight = ManifestTensor("blk.0.ffn_up_exps.weight", q8_0, (width, 5, 3), 64, 0, b"")
    assert hole_type(weight).name == type_name
    assert hole_type(replace(weight, name="blk.0.ffn_up_exps.bias")) is q8_0


@pytest.mark.slow
def test_quantised_experts_become_the_same_holes(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "model.gguf", replace(WIDE, n_ff=256))
    quantised = quantise(source, tmp_path / "q.gguf", "Q4_K_M")
    manifest = build_manifest(quantised)
    assert {each.type.name for each in manifest.tensors if each.is_expert} >= {"q4_K", "q6_K"}
    write_backbone_file(quantised, manifest, tmp_path / "backbone.gguf")
    holes = [each for each in read_gguf(tmp_path / "backbone.gguf").tensors if is_expert_name(each.name)]
    assert {each.type.name for each in holes} == {"q1_0"}
    assert expert_bytes_of(tmp_path / "backbone.gguf") == 0


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, ModelManifest]:
    path = make_qwen3moe(tmp_path / "model.gguf", ModelShape(n_layer=1))
    return path, build_manifest(path)


def damage(path: Path, offset: int) -> None:
    """Change one byte of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_source_whose_bytes_changed_is_not_copied(model: tuple[Path, ModelManifest]) -> None:
    source, manifest = model
    destination = source.with_name("backbone.gguf")
    damage(source, manifest.tensor("blk.0.attn_q.weight").offset + 5)
    with pytest.raises(ModelUnusable, match=r"attn_q\.weight has not the manifest's digest"):
        write_backbone_file(source, manifest, destination)
    assert [each.name for each in source.parent.iterdir()] == [source.name]


def test_an_expert_that_changed_does_not_reach_the_reference(model: tuple[Path, ModelManifest]) -> None:
    source, manifest = model
    damage(source, manifest.tensor("blk.0.ffn_up_exps.weight").expert_range(3)[0])
    write_backbone_file(source, manifest, source.with_name("backbone.gguf"))
    with pytest.raises(ModelUnusable, match=r"ffn_up_exps\.weight has not the manifest's digest"):
        write_reference_file(source, manifest, source.with_name("reference.gguf"))
    assert not source.with_name("reference.gguf").exists()


def test_large_tensors_go_through_in_pieces(
    model: tuple[Path, ModelManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, manifest = model
    monkeypatch.setattr(byte_ranges, "PIECE_SIZE_BYTES", 100)
    assert build_manifest(source) == manifest
    copied: list[int] = []
    write_reference_file(source, manifest, source.with_name("reference.gguf"), copied.append)
    assert contents(source.with_name("reference.gguf")) == contents(source)
    assert max(copied) == 100
    assert sum(copied) == manifest.trunk_size_bytes() + manifest.experts_size_bytes()


def test_another_file_is_not_taken_for_the_model(model: tuple[Path, ModelManifest], tmp_path: Path) -> None:
    _, manifest = model
    other = make_qwen3moe(tmp_path / "other.gguf", ModelShape(n_layer=1, n_ctx_train=99))
    with pytest.raises(ModelUnusable, match="not the model of the manifest"):
        write_backbone_file(other, manifest, tmp_path / "backbone.gguf")


def test_a_disk_that_fails_leaves_nothing_behind(
    model: tuple[Path, ModelManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, manifest = model

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ModelUnusable, match="cannot be written: No space left on device"):
        write_backbone_file(source, manifest, source.with_name("backbone.gguf"))
    assert [each.name for each in source.parent.iterdir()] == [source.name]


@pytest.mark.parametrize("what", ["tensor", "metadata", "cut", "longer", "layout"])
def test_a_damaged_backbone_file_is_found(model: tuple[Path, ModelManifest], what: str) -> None:
    source, manifest = model
    path = source.with_name("backbone.gguf")
    write_backbone_file(source, manifest, path)
    verify_backbone_file(path, manifest)
    header = read_gguf(path)
    if what == "tensor":
        damage(path, next(each for each in header.tensors if each.name == "output.weight").offset + 9)
    elif what == "metadata":
        damage(path, path.read_bytes().index(b"random qwen3moe"))
    elif what == "cut":
        with path.open("r+b") as file:
            file.truncate(header.size_bytes - 1)
    elif what == "longer":
        with path.open("ab") as file:
            file.write(bytes(32))
    else:
        write_reference_file(source, manifest, path)
    with pytest.raises(ModelUnusable):
        verify_backbone_file(path, manifest)
