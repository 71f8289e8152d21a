"""The model manifest and shard sets: one value has one encoding, and every other input is refused."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.limits import EXPERTS_MAX, LAYERS_MAX
from kvasir_proto.manifest import ManifestTensor, ModelManifest, ShardSet
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME

Q8_0 = TENSOR_TYPES_BY_NAME["q8_0"]
F32 = TENSOR_TYPES_BY_NAME["f32"]


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def tensor(
    name: str, shape: tuple[int, ...], offset: int, tensor_type: str = "f32", n_digest: int = 1
) -> ManifestTensor:
    kind = TENSOR_TYPES_BY_NAME[tensor_type]
    size_bytes = kind.row_size_bytes(shape[0])
    for each in shape[1:]:
        size_bytes *= each
    digests = b"".join(digest(f"{name} {index}") for index in range(n_digest))
    return ManifestTensor(name, kind, shape, offset, size_bytes, digests)


def small_manifest() -> ModelManifest:
    """Two layers, experts in the second: 3 experts of 64 -> 32 -> 64 in Q8_0 with a bias on `down`."""
    return ModelManifest(
        name="small",
        architecture="qwen3moe",
        n_layer=2,
        n_embd=64,
        n_ff=32,
        n_expert=3,
        n_expert_used=2,
        n_vocab=10,
        n_ctx_train=128,
        moe_layers=(1,),
        file_size_bytes=100_000,
        data_offset=1024,
        header_sha256=digest("header"),
        metadata_sha256=digest("metadata"),
        hyper_parameters_sha256=digest("hyper-parameters"),
        tokenizer_sha256=digest("tokenizer"),
        template_sha256=digest("template"),
        tensors=(
            tensor("token_embd.weight", (64, 10), 1024),
            tensor("blk.1.ffn_up_exps.weight", (64, 32, 3), 4096, "q8_0", 3),
            tensor("blk.1.ffn_down_exps.weight", (32, 64, 3), 16384, "q8_0", 3),
            tensor("blk.1.ffn_down_exps.bias", (64, 3), 32768, "f32", 3),
        ),
    )


def test_decode_gives_back_what_was_encoded() -> None:
    manifest = small_manifest()
    assert ModelManifest.decode(manifest.encode()) == manifest


@pytest.mark.parametrize(
    "change, is_another_model",
    [
        ({"name": "renamed"}, False),
        ({"file_size_bytes": 200_000}, False),
        ({"data_offset": 512}, False),
        ({"header_sha256": digest("other")}, False),
        ({"metadata_sha256": digest("other")}, False),
        ({"architecture": "other"}, True),
        ({"n_expert_used": 1}, True),
        ({"n_vocab": 11}, True),
        ({"hyper_parameters_sha256": digest("other")}, True),
        ({"tokenizer_sha256": digest("other")}, True),
        ({"template_sha256": digest("other")}, True),
    ],
)
def test_a_models_name_is_of_what_it_is_and_not_of_where_it_lies(
    change: dict[str, object], is_another_model: bool
) -> None:
    manifest = small_manifest()
    changed = replace(manifest, **change)  # type: ignore[arg-type]
    assert changed != manifest
    assert (changed.digest() != manifest.digest()) == is_another_model


@pytest.mark.parametrize(
    "change, is_another_model",
    [
        ({"offset": 65536}, False),
        ({"digests": digest("another value")}, True),
        ({"shape": (10, 64)}, True),
        ({"name": "output.weight"}, True),
    ],
)
def test_each_tensor_is_part_of_the_name_but_not_its_offset(
    change: dict[str, object], is_another_model: bool
) -> None:
    manifest = small_manifest()
    first, *others = manifest.tensors
    changed = replace(manifest, tensors=(replace(first, **change), *others))  # type: ignore[arg-type]
    assert (changed.digest() != manifest.digest()) == is_another_model
    assert replace(manifest, tensors=(*others, first)).digest() == manifest.digest(), "in another order"


def test_the_encoding_is_the_one_agreed_on() -> None:
    assert small_manifest().digest().hex() == DIGEST_OF_SMALL_MANIFEST


DIGEST_OF_SMALL_MANIFEST = "ee48dd8ea3f8893178533bf28aa9f859737178fcb56b5b21a30dc7c40d02248f"
"""Changes only together with MANIFEST_FORMAT: it is the name that swarms know a model by."""


def test_an_expert_is_one_range_with_one_digest() -> None:
    up = small_manifest().tensor("blk.1.ffn_up_exps.weight")
    assert (up.layer, up.suffix, up.is_expert) == (1, "ffn_up_exps.weight", True)
    assert up.expert_range(2) == (4096 + 2 * 32 * 68, 32 * 68)
    assert up.expert_sha256(2) == digest("blk.1.ffn_up_exps.weight 2")
    with pytest.raises(LocalProtocolError, match="no expert 3"):
        up.expert_range(3)
    with pytest.raises(LocalProtocolError, match="no expert -1"):
        up.expert_sha256(-1)
    with pytest.raises(LocalProtocolError, match="one digest an expert"):
        _ = up.sha256


def test_sizes_are_sums_of_tensors() -> None:
    manifest = small_manifest()
    per_expert = 32 * 68 + 64 * 34 + 64 * 4
    assert manifest.expert_size_bytes(1) == per_expert
    assert manifest.expert_size_bytes(0) == 0
    assert manifest.experts_size_bytes() == 3 * per_expert
    assert manifest.trunk_size_bytes() == 64 * 10 * 4
    assert manifest.whole_shard() == ShardSet(((1, 0, 3),))
    assert manifest.shard_size_bytes(ShardSet.from_pairs([(1, 2)])) == per_expert
    assert not manifest.has_tensor("blk.0.attn_q.weight")
    with pytest.raises(LocalProtocolError, match=r"no tensor 'blk\.0\.attn_q\.weight'"):
        manifest.tensor("blk.0.attn_q.weight")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"n_expert": 0}, "n_expert is not in"),
        ({"n_expert": 4}, "does not have n_expert experts"),
        ({"n_expert_used": 4}, "n_expert_used exceeds n_expert"),
        ({"n_layer": 0}, "n_layer is not in"),
        ({"n_layer": LAYERS_MAX + 1}, "n_layer is not in"),
        ({"name": "line\nbreak"}, "name is not"),
        ({"architecture": ""}, "architecture is not"),
        ({"moe_layers": ()}, "moe_layers is empty"),
        ({"moe_layers": (1, 1)}, "moe_layers is not ascending"),
        ({"moe_layers": (0,)}, "layer without expert tensors"),
        ({"n_layer": 1}, "moe_layers is out of range"),
        ({"data_offset": 2048}, "overlaps"),
        ({"file_size_bytes": 33_000}, "past the end"),
        ({"header_sha256": b"short"}, "header_sha256 is not 32 bytes"),
        ({"metadata_sha256": b""}, "metadata_sha256 is not 32 bytes"),
        ({"hyper_parameters_sha256": b""}, "hyper_parameters_sha256 is not 32 bytes"),
        ({"tokenizer_sha256": b"x" * 33}, "tokenizer_sha256 is not 32 bytes"),
        ({"template_sha256": b"x"}, "template_sha256 is not 32 bytes"),
        ({"tensors": ()}, "number of tensors"),
    ],
)
def test_a_manifest_that_contradicts_itself_cannot_be_made(change: dict[str, object], reason: str) -> None:
    with pytest.raises(LocalProtocolError, match=reason):
        replace(small_manifest(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"size_bytes": 1}, "lies about its size"),
        ({"name": "with space"}, "name is not 1 to 63"),
        ({"shape": ()}, "0 dimensions"),
        ({"shape": (0, 10)}, "bad dimension"),
        ({"shape": (64, 2, 5, 1, 1)}, "5 dimensions"),
        ({"offset": 0}, "bad offset"),
        ({"digests": b""}, "wrong number of digests"),
        ({"type": Q8_0, "shape": (60, 10)}, "whole number of blocks"),
        ({"type": replace(F32, block_size_bytes=2)}, "unknown type"),
        ({"name": "blk.1.ffn_up_exps.weight"}, "n_expert experts"),
    ],
)
def test_a_tensor_that_contradicts_itself_cannot_be_in_a_manifest(
    change: dict[str, object], reason: str
) -> None:
    manifest = small_manifest()
    broken = replace(manifest.tensors[0], **change)  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match=reason):
        replace(manifest, tensors=(broken, *manifest.tensors[1:]))


def test_two_tensors_of_one_name_are_refused() -> None:
    manifest = small_manifest()
    again = replace(manifest.tensors[0], offset=50_000)
    with pytest.raises(LocalProtocolError, match="occurs twice"):
        replace(manifest, tensors=(*manifest.tensors, again))


def test_another_format_is_refused_by_number() -> None:
    parts = msgpack.unpackb(small_manifest().encode())
    parts[1] = 1
    with pytest.raises(RemoteProtocolError, match="format 1 is not known") as caught:
        ModelManifest.decode(msgpack.packb(parts))
    assert caught.value.code == "manifest_invalid"


def test_only_the_canonical_encoding_is_accepted() -> None:
    data = small_manifest().encode()
    longer_integer = data.replace(b"\x02\x40\x20", b"\xcc\x02\x40\x20", 1)  # n_layer 2 as a two-byte number
    assert longer_integer != data
    with pytest.raises(RemoteProtocolError, match="canonical"):
        ModelManifest.decode(longer_integer)
    with pytest.raises(RemoteProtocolError):
        ModelManifest.decode(data + b"\0")


@given(st.integers(min_value=0), st.binary(min_size=1, max_size=4), st.booleans())
def test_a_damaged_manifest_is_a_remote_error_or_another_manifest(
    position: int, patch: bytes, cut: bool
) -> None:
    data = small_manifest().encode()
    position %= len(data)
    damaged = data[:position] + patch + (b"" if cut else data[position + len(patch) :])
    with contextlib.suppress(RemoteProtocolError):
        assert ModelManifest.decode(damaged).encode() == damaged


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_shard_set_or_a_remote_error(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert ShardSet.decode(data).encode() == data


pairs = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 20)), max_size=40)


@given(pairs)
def test_a_shard_set_is_the_set_of_its_pairs(members: set[tuple[int, int]]) -> None:
    shard = ShardSet.from_pairs(members)
    assert set(shard.pairs()) == members
    assert list(shard.pairs()) == sorted(members)
    assert len(shard) == len(members)
    assert {pair for pair in ((a, b) for a in range(7) for b in range(22)) if pair in shard} == members
    assert shard.layers == tuple(sorted({layer for layer, _ in members}))
    for layer in range(7):
        assert shard.experts_of(layer) == tuple(sorted(expert for each, expert in members if each == layer))
    assert ShardSet.decode(shard.encode()) == shard


@given(pairs, pairs)
def test_sets_combine_as_sets_do(first: set[tuple[int, int]], second: set[tuple[int, int]]) -> None:
    one, other = ShardSet.from_pairs(first), ShardSet.from_pairs(second)
    assert one.union(other) == ShardSet.from_pairs(first | second)
    assert one.difference(other) == ShardSet.from_pairs(first - second)
    assert (one.digest() == other.digest()) == (first == second)


def test_ranges_in_any_order_become_one_form() -> None:
    assert ShardSet.from_ranges([(1, 4, 6), (0, 0, 2), (1, 0, 4), (1, 9, 9), (1, 5, 7)]) == ShardSet(
        ((0, 0, 2), (1, 0, 7))
    )


@pytest.mark.parametrize(
    "ranges",
    [
        ((0, 1, 1),),
        ((0, 2, 1),),
        ((-1, 0, 1),),
        ((LAYERS_MAX, 0, 1),),
        ((0, -1, 1),),
        ((0, 0, EXPERTS_MAX + 1),),
        ((1, 0, 1), (0, 0, 1)),
        ((0, 0, 2), (0, 2, 3)),
        ((0, 0, 2), (0, 1, 3)),
    ],
)
def test_ranges_that_are_not_in_the_one_form_are_refused(ranges: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(LocalProtocolError):
        ShardSet(ranges)
    with pytest.raises(RemoteProtocolError):
        ShardSet.decode(msgpack.packb([list(each) for each in ranges]))


@pytest.mark.parametrize("value", [None, 1, "x", {}, [[0, 0]], [[0, 0, 1, 2]], [[0, 0, True]], [[0, 0.0, 1]]])
def test_a_shard_set_of_another_form_is_refused(value: object) -> None:
    with pytest.raises(RemoteProtocolError):
        ShardSet.decode(msgpack.packb(value))
