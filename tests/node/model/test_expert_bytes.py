"""Single experts are read by range, and used only when their digest is the manifest's."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.model_manifest import build_manifest
from kvasir_proto.errors import LocalProtocolError, ModelUnusable
from kvasir_proto.manifest import ModelManifest
from tests.model_makers import MAKERS, ModelShape


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, ModelManifest]:
    path = MAKERS["gpt-oss"](tmp_path / "model.gguf", ModelShape(n_layer=1, n_expert=5))
    return path, build_manifest(path)


def test_every_expert_of_every_tensor_is_its_slice(model: tuple[Path, ModelManifest]) -> None:
    path, manifest = model
    data = path.read_bytes()
    tensors = manifest.expert_tensors(0)
    assert len(tensors) == 6  # gate, up and down, each with a bias
    with ExpertSource(path, manifest) as source:
        for tensor in tensors:
            whole = b"".join(source.read(tensor.name, expert) for expert in range(5))
            assert whole == data[tensor.offset : tensor.offset + tensor.size_bytes]


def test_a_changed_byte_makes_that_expert_unusable_and_no_other(model: tuple[Path, ModelManifest]) -> None:
    path, manifest = model
    offset, size_bytes = manifest.tensor("blk.0.ffn_up_exps.weight").expert_range(2)
    with path.open("r+b") as file:
        file.seek(offset + size_bytes - 1)
        last = file.read(1)
        file.seek(offset + size_bytes - 1)
        file.write(bytes([last[0] ^ 0x80]))
    with ExpertSource(path, manifest) as source:
        with pytest.raises(ModelUnusable, match=r"expert 2 of blk\.0\.ffn_up_exps\.weight"):
            source.read("blk.0.ffn_up_exps.weight", 2)
        for expert in (0, 1, 3, 4):
            assert len(source.read("blk.0.ffn_up_exps.weight", expert)) == size_bytes


def test_what_the_model_does_not_have_cannot_be_read(model: tuple[Path, ModelManifest]) -> None:
    path, manifest = model
    with ExpertSource(path, manifest) as source:
        for name, expert in (("nothing", 0), ("blk.0.ffn_up_exps.weight", 5), ("output.weight", 0)):
            with pytest.raises(LocalProtocolError):
                source.read(name, expert)
    with pytest.raises(LocalProtocolError, match="closed"):
        source.read("blk.0.ffn_up_exps.weight", 0)
    source.close()  # closing twice is nothing special


def test_a_file_that_shrinks_or_is_missing_is_unusable(model: tuple[Path, ModelManifest]) -> None:
    path, manifest = model
    last = max(manifest.expert_tensors(0), key=lambda each: each.offset)
    with ExpertSource(path, manifest) as source:
        with path.open("r+b") as file:
            file.truncate(last.offset)
        with pytest.raises(ModelUnusable, match="cut short"):
            source.read(last.name, 0)
    with pytest.raises(ModelUnusable, match="it is another file"):
        ExpertSource(path, manifest)
    path.unlink()
    with pytest.raises(ModelUnusable, match="No such file"):
        ExpertSource(path, manifest)
