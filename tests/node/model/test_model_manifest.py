"""Manifests of local files: right ranges and digests, and a sentence for what is no usable MoE model."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_node.model.gguf_format import (
    GgufFile,
    GgufTensor,
    MetadataEntry,
    ValueType,
    float_entry,
    integer_entry,
    text_entry,
)
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.model_manifest import build_manifest, expert_geometry, manifest_of
from kvasir_proto.errors import ModelUnusable
from kvasir_proto.manifest import ManifestTensor, ModelManifest
from tests.model_makers import MAKERS, ModelShape, make_dense, make_qwen3moe

SHAPE = ModelShape(n_layer=4, n_embd=64, n_ff=32, n_expert=6, n_expert_used=2)

MOE_LAYERS = {"deepseek2": (1, 2, 3), "deepseek2-merged": (1, 2, 3), "llama4": (1, 3)}


def digests_of(data: bytes, tensor: ManifestTensor) -> bytes:
    """The digests of one tensor, computed from the whole file at once."""
    whole = data[tensor.offset : tensor.offset + tensor.size_bytes]
    n_part = tensor.shape[-1] if "_exps." in tensor.name else 1
    size = len(whole) // n_part
    return b"".join(hashlib.sha256(whole[part * size : (part + 1) * size]).digest() for part in range(n_part))


@pytest.mark.parametrize("name", MAKERS)
def test_every_shape_has_its_manifest(name: str, tmp_path: Path) -> None:
    path = MAKERS[name](tmp_path / "model.gguf", SHAPE)
    data = path.read_bytes()
    seen: list[tuple[int, int]] = []
    manifest = build_manifest(path, lambda done, total: seen.append((done, total)))

    assert manifest.moe_layers == MOE_LAYERS.get(name, (0, 1, 2, 3))
    assert (manifest.n_layer, manifest.n_embd, manifest.n_ff) == (4, 64, 32)
    assert (manifest.n_expert, manifest.n_expert_used, manifest.n_vocab) == (6, 2, SHAPE.n_vocab)
    assert manifest.n_ctx_train == SHAPE.n_ctx_train
    architecture = name if name == "gpt-oss" else name.partition("-")[0]
    assert (manifest.name, manifest.architecture) == (f"random {architecture}", architecture)
    assert manifest.file_size_bytes == len(data)
    assert manifest.header_sha256 == hashlib.sha256(data[: manifest.data_offset]).digest()
    for tensor in manifest.tensors:
        assert tensor.digests == digests_of(data, tensor)
    total = sum(each.size_bytes for each in manifest.tensors)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert ModelManifest.decode(manifest.encode()) == manifest


def test_one_model_has_one_name_whatever_its_file_is_called(tmp_path: Path) -> None:
    first = make_qwen3moe(tmp_path / "a.gguf", SHAPE)
    again = make_qwen3moe(tmp_path / "b.gguf", SHAPE)
    other = make_qwen3moe(tmp_path / "c.gguf", replace(SHAPE, seed=2))
    assert build_manifest(first).digest() == build_manifest(again).digest()
    assert build_manifest(first).digest() != build_manifest(other).digest()


def test_the_tokenizer_has_a_digest_of_its_own(tmp_path: Path) -> None:
    shape = replace(SHAPE, tokenizer=True)
    first = build_manifest(make_qwen3moe(tmp_path / "a.gguf", shape))
    second = build_manifest(make_qwen3moe(tmp_path / "b.gguf", replace(shape, seed=2, n_layer=2)))
    without = build_manifest(make_qwen3moe(tmp_path / "c.gguf", SHAPE))
    assert first.tokenizer_sha256 == second.tokenizer_sha256 != without.tokenizer_sha256
    assert first.metadata_sha256 != second.metadata_sha256
    assert first.hyper_parameters_sha256 != second.hyper_parameters_sha256


CHAT_TEMPLATE = text_entry("tokenizer.chat_template", "{{ messages }}")


@pytest.mark.parametrize(
    "entry, changed",
    [
        (text_entry("general.name", "renamed"), set()),
        (text_entry("general.url", "an address"), set()),
        (CHAT_TEMPLATE, {"template_sha256"}),
        (text_entry("tokenizer.chat_template.tool_use", "{{ tools }}"), {"template_sha256"}),
        (integer_entry("tokenizer.ggml.eos_token_id", 7), {"tokenizer_sha256"}),
        (float_entry("gpt-oss.rope.freq_base", 5000.0), {"hyper_parameters_sha256"}),
    ],
)
def test_each_entry_is_in_the_digest_of_its_kind(
    header: GgufFile, entry: MetadataEntry, changed: set[str]
) -> None:
    before, after = manifest_of(header), manifest_of(with_entry(entry)(header))
    kinds = ("hyper_parameters_sha256", "tokenizer_sha256", "template_sha256")
    assert {each for each in kinds if getattr(before, each) != getattr(after, each)} == changed
    assert (after.digest() != before.digest()) == bool(changed)
    assert after.metadata_sha256 != before.metadata_sha256


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match="not a Mixture-of-Experts model"):
        build_manifest(make_dense(tmp_path / "dense.gguf", SHAPE))


def test_a_file_that_is_cut_short_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    path = make_qwen3moe(tmp_path / "model.gguf", SHAPE)
    header = read_gguf(path)
    with path.open("r+b") as file:
        file.truncate(header.size_bytes - 100)
    with pytest.raises(ModelUnusable, match="it is another file"):
        manifest_of(header)


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> GgufFile:
    path = tmp_path_factory.mktemp("headers") / "model.gguf"
    return read_gguf(MAKERS["gpt-oss"](path, SHAPE))


def with_entry(entry: MetadataEntry) -> Callable[[GgufFile], GgufFile]:
    return lambda header: replace(header, metadata={**header.metadata, entry.key: entry})


def without_entry(key: str) -> Callable[[GgufFile], GgufFile]:
    return lambda header: replace(
        header, metadata={each: value for each, value in header.metadata.items() if each != key}
    )


def with_tensor(which: str, **change: object) -> Callable[[GgufFile], GgufFile]:
    def changed(tensor: GgufTensor) -> GgufTensor:
        return replace(tensor, **change) if tensor.name == which else tensor  # type: ignore[arg-type]

    return lambda header: replace(header, tensors=tuple(map(changed, header.tensors)))


def without_tensors(part: str) -> Callable[[GgufFile], GgufFile]:
    return lambda header: replace(
        header, tensors=tuple(each for each in header.tensors if part not in each.name)
    )


UNUSABLE_HEADERS: dict[str, tuple[Callable[[GgufFile], GgufFile], str]] = {
    "no architecture": (without_entry("general.architecture"), "general.architecture is missing"),
    "architecture is a number": (
        with_entry(integer_entry("general.architecture", 1)),
        "general.architecture is not a text",
    ),
    "architecture is a path": (
        with_entry(text_entry("general.architecture", "../x")),
        "general.architecture is not a plain name",
    ),
    "no block count": (without_entry("gpt-oss.block_count"), "gpt-oss.block_count is missing"),
    "no blocks": (with_entry(integer_entry("gpt-oss.block_count", 0)), "block_count is 0, not in"),
    "huge block count": (
        with_entry(integer_entry("gpt-oss.block_count", 1 << 31)),
        "block_count is 2147483648",
    ),
    "fewer blocks than there are": (
        with_entry(integer_entry("gpt-oss.block_count", 3)),
        "experts in layer 3, but gpt-oss.block_count is 3",
    ),
    "block count is a text": (
        with_entry(text_entry("gpt-oss.block_count", "4")),
        "block_count is not a count",
    ),
    "no width": (without_entry("gpt-oss.embedding_length"), "embedding_length is missing"),
    "no expert count": (without_entry("gpt-oss.expert_count"), "expert_count does not say how many"),
    "another expert count": (
        with_entry(integer_entry("gpt-oss.expert_count", 7)),
        "has 6 experts, expert_count is 7",
    ),
    "huge expert count": (
        with_entry(integer_entry("gpt-oss.expert_count", 1 << 20)),
        "expert_count is 1048576",
    ),
    "no experts used": (with_entry(integer_entry("gpt-oss.expert_used_count", 0)), "expert_used_count is 0"),
    "more experts used": (
        with_entry(integer_entry("gpt-oss.expert_used_count", 7)),
        "expert_used_count is 7",
    ),
    "experts apart": (without_tensors("_exps."), "not stacked in one tensor"),
    "no down": (without_tensors("ffn_down_exps"), "experts without ffn_down_exps"),
    "no up": (without_tensors("ffn_up_exps.weight"), "without one of up and gate_up"),
    "rows that do not fit": (
        with_tensor("blk.2.ffn_up_exps.weight", shape=(64, 31, 6)),
        "blk.2.ffn_up_exps.weight has 31 rows, not 32",
    ),
    "gate that does not fit": (
        with_tensor("blk.2.ffn_gate_exps.weight", shape=(64, 64, 6)),
        "blk.2.ffn_gate_exps.weight has 64 rows, not 32",
    ),
    "inputs that do not fit": (
        with_tensor("blk.2.ffn_up_exps.weight", shape=(32, 32, 6)),
        "layer 2: gate takes 64 values, up 32",
    ),
    "matrix of two dimensions": (
        with_tensor("blk.2.ffn_up_exps.weight", shape=(64, 6)),
        "blk.2.ffn_up_exps.weight has 2 dimensions, not 3",
    ),
    "bias that does not fit": (
        with_tensor("blk.2.ffn_up_exps.bias", shape=(31, 6)),
        "blk.2.ffn_up_exps.bias has shape",
    ),
    "negative epsilon": (
        with_entry(float_entry("gpt-oss.attention.layer_norm_rms_epsilon", -1e-6)),
        "layer_norm_rms_epsilon is -1e-06, not a small number of at least 0",
    ),
    "epsilon that is no number": (
        with_entry(float_entry("gpt-oss.attention.layer_norm_epsilon", math.nan)),
        "layer_norm_epsilon is nan, not a small",
    ),
    "infinite epsilon in a list": (
        with_entry(
            MetadataEntry(
                "gpt-oss.some_epsilon",
                ValueType.ARRAY,
                struct.pack("<IQ2f", 6, 2, 0.0, math.inf),
                ValueType.FLOAT32,
                2,
            )
        ),
        "some_epsilon is inf, not a small",
    ),
    "negative base of the rotation": (
        with_entry(float_entry("gpt-oss.rope.freq_base", -1.0)),
        "rope.freq_base is -1, not a number of at least 0",
    ),
    "infinite scale of the experts": (
        with_entry(float_entry("gpt-oss.expert_weights_scale", math.inf)),
        "expert_weights_scale is inf, not a finite number",
    ),
    "a float that is no number": (
        with_entry(float_entry("gpt-oss.some_float", math.nan)),
        "some_float is nan, not a finite number",
    ),
    "an unknown suffix": (
        with_tensor("blk.2.ffn_up_exps.bias", name="blk.2.ffn_up_exps.input_scale"),
        "ffn_up_exps.input_scale belongs to experts in a way Kvasir does not know",
    ),
    "all layers are a prediction head's": (
        lambda header: without_tensors("blk.0.")(
            with_entry(integer_entry("gpt-oss.nextn_predict_layers", 3))(header)
        ),
        "no layer of its trunk has experts",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE_HEADERS)
def test_a_header_that_contradicts_itself_is_refused_by_name(case: str, header: GgufFile) -> None:
    change, sentence = UNUSABLE_HEADERS[case]
    with pytest.raises(ModelUnusable, match=sentence) as caught:
        expert_geometry(change(header))
    assert caught.value.exit_code == 7
    assert str(header.path) in str(caught.value)


def test_layers_of_a_prediction_head_are_not_the_trunk(header: GgufFile) -> None:
    with_head = with_entry(integer_entry("gpt-oss.nextn_predict_layers", 1))(header)
    assert expert_geometry(with_head).moe_layers == (0, 1, 2)
    manifest = manifest_of(with_head)
    assert manifest.whole_shard().layers == (0, 1, 2)
    assert manifest.expert_tensors(3)  # they are in the file, and holes in the backbone's


def test_a_name_that_cannot_be_shown_is_made_plain(header: GgufFile) -> None:
    named = with_entry(text_entry("general.name", "Bad\x1b[2J näme\n"))(header)
    assert manifest_of(named).name == "Bad?[2J n?me?"
    assert manifest_of(without_entry("general.name")(header)).name == "gpt-oss"
