"""What a model is made of, byte for byte, and which part of its experts somebody holds.

Decides the form of the model manifest (every tensor with its real type, shape, byte range and SHA-256, one
digest an expert where the tensor belongs to routed experts) and of a shard set (pairs of layer and expert,
kept as ranges). The model's name is a digest over what makes it this model (hyper-parameters, tokenizer,
chat template, tensors), not over where its bytes lie: a split file and a whole one are one model. Every value
has one encoding, and a decoder refuses every other.

Apart from messages because a manifest is a file that outlives any conversation. It knows nothing of GGUF's
metadata, of paths or of how bytes are fetched: offsets are into "the file whose header has this digest".
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar

import msgpack

from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.limits import EXPERTS_MAX, LAYERS_MAX, SHARD_SIZE_MAX
from kvasir_proto.tensor_types import TENSOR_TYPES, TensorType

MANIFEST_FORMAT: Final = 2
"""Version of the manifest's form; another version is refused."""

MANIFEST_SIZE_BYTES_MAX: Final = 64 << 20
"""The largest manifest we read. 100 layers of 512 experts in three tensors take 5 MiB of digests."""

TENSORS_MAX: Final = 65536
DIMENSIONS_MAX: Final = 4
DIMENSION_MAX: Final = 1 << 31
FILE_SIZE_BYTES_MAX: Final = 1 << 50
SHARD_RANGES_MAX: Final = 65536

DIGEST_SIZE_BYTES: Final = 32

EXPERT_TENSOR: Final = re.compile(
    r"blk\.(0|[1-9][0-9]{0,3})\.(ffn_(?:up|down|gate|gate_up)_exps\.(?:weight|scale|bias))", re.ASCII
)
"""Names of routed experts' tensors: group 1 is the layer, group 2 the suffix."""

TENSOR_NAME: Final = re.compile(r"[!-~]{1,63}", re.ASCII)
"""What a tensor may be called: what ggml has room for, and can be printed."""

_PLAIN_TEXT: Final = re.compile(r"[ -~]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ManifestTensor:
    """One tensor as it lies in the model file.

    `shape` is in ggml's order (fastest first); `offset` is absolute in the file; `digests` holds one
    SHA-256 of the whole tensor, or, for a routed expert's tensor, one for each expert in order.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    digests: bytes

    @property
    def layer(self) -> int | None:
        """The layer of a routed expert's tensor; None for any other tensor."""
        match = EXPERT_TENSOR.fullmatch(self.name)
        return int(match[1]) if match else None

    @property
    def suffix(self) -> str | None:
        """For example `ffn_gate_exps.weight`; None for a tensor that is not a routed expert's."""
        match = EXPERT_TENSOR.fullmatch(self.name)
        return match[2] if match else None

    @property
    def is_expert(self) -> bool:
        """Whether the tensor belongs to routed experts, which lie along its last dimension."""
        return is_expert_name(self.name)

    @property
    def expert_size_bytes(self) -> int:
        """Bytes of one expert's slice; only for a routed expert's tensor."""
        return self.size_bytes // self.shape[-1]

    @property
    def sha256(self) -> bytes:
        """Digest of the whole tensor; only for a tensor that is not a routed expert's."""
        if self.is_expert:
            raise LocalProtocolError(f"{self.name} has one digest an expert, not one")
        return self.digests

    def expert_range(self, expert: int) -> tuple[int, int]:
        """(offset in the file, size in bytes) of one expert's slice."""
        self._require_expert(expert)
        size_bytes = self.expert_size_bytes
        return self.offset + expert * size_bytes, size_bytes

    def expert_sha256(self, expert: int) -> bytes:
        """Digest of one expert's slice."""
        self._require_expert(expert)
        return self.digests[expert * DIGEST_SIZE_BYTES : (expert + 1) * DIGEST_SIZE_BYTES]

    def _require_expert(self, expert: int) -> None:
        if not self.is_expert or not 0 <= expert < self.shape[-1]:
            raise LocalProtocolError(f"{self.name} has no expert {expert}")


@dataclass(frozen=True)
class ModelManifest:
    """Everything one has to know to fetch, verify and place a model.

    `digest` is the model's name. Where the bytes lie (sizes of the file and of its header, offsets, digests
    of the header as such) is no part of it, nor is what a model calls itself. Sizes come from the tensors
    themselves where they can: `n_ff` is the widest routed expert's hidden row, `n_embd` the model's width.
    `moe_layers` are the layers of the trunk that have routed experts (layers of a multi-token prediction head
    are not among them). `header_sha256` covers the first `data_offset` bytes of the file; `metadata_sha256`
    the header's entries sorted by key, which a file made from this model keeps; `hyper_parameters_sha256`
    those whose key begins with the architecture's name, `template_sha256` with `tokenizer.chat_template`,
    `tokenizer_sha256` the others that begin with `tokenizer.`. Tensors are in the file's order. Raises
    `LocalProtocolError` when the parts contradict each other.
    """

    name: str
    architecture: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_expert: int
    n_expert_used: int
    n_vocab: int
    n_ctx_train: int
    moe_layers: tuple[int, ...]
    file_size_bytes: int
    data_offset: int
    header_sha256: bytes
    metadata_sha256: bytes
    hyper_parameters_sha256: bytes
    tokenizer_sha256: bytes
    template_sha256: bytes
    tensors: tuple[ManifestTensor, ...]

    def __post_init__(self) -> None:
        try:
            _check_manifest(self)
        except ValueError as error:
            raise LocalProtocolError(f"manifest: {error}") from error

    def encode(self) -> bytes:
        """The canonical bytes of this manifest (a msgpack array, fields in the order of the class)."""
        return bytes(
            msgpack.packb(
                [
                    "kvasir/model-manifest",
                    MANIFEST_FORMAT,
                    self.name,
                    self.architecture,
                    *(getattr(self, field) for field in _COUNTS),
                    list(self.moe_layers),
                    self.file_size_bytes,
                    self.data_offset,
                    *(getattr(self, field) for field in _DIGESTS),
                    [
                        [one.name, one.type.id, list(one.shape), one.offset, one.size_bytes, one.digests]
                        for one in self.tensors
                    ],
                ],
                use_bin_type=True,
            )
        )

    @staticmethod
    def decode(data: bytes) -> ModelManifest:
        """The manifest in `data`; `RemoteProtocolError` for anything but one whole canonical manifest."""
        if len(data) > MANIFEST_SIZE_BYTES_MAX:
            raise RemoteProtocolError("manifest: too large", "manifest_invalid")
        return _decoded(data, "manifest", "manifest_invalid", _manifest_of)

    def digest(self) -> bytes:
        """The model's name everywhere: SHA-256 over what makes it this model, tensors sorted by name."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        named = [
            "kvasir/model",
            MANIFEST_FORMAT,
            self.architecture,
            *(getattr(self, field) for field in _COUNTS),
            list(self.moe_layers),
            self.hyper_parameters_sha256,
            self.tokenizer_sha256,
            self.template_sha256,
            [
                [each.name, each.type.id, list(each.shape), each.digests]
                for each in sorted(self.tensors, key=lambda each: each.name)
            ],
        ]
        return hashlib.sha256(msgpack.packb(named, use_bin_type=True)).digest()

    @cached_property
    def _tensor_of_name(self) -> dict[str, ManifestTensor]:
        return {each.name: each for each in self.tensors}

    @cached_property
    def _experts_of_layer(self) -> dict[int, tuple[ManifestTensor, ...]]:
        layers: dict[int, list[ManifestTensor]] = {}
        for each in self.tensors:
            layer = each.layer
            if layer is not None:
                layers.setdefault(layer, []).append(each)
        return {layer: tuple(tensors) for layer, tensors in layers.items()}

    def tensor(self, name: str) -> ManifestTensor:
        """The tensor called `name`; `LocalProtocolError` when there is none."""
        try:
            return self._tensor_of_name[name]
        except KeyError:
            raise LocalProtocolError(f"the model has no tensor {name!r}") from None

    def has_tensor(self, name: str) -> bool:
        """Whether the model has a tensor called `name`."""
        return name in self._tensor_of_name

    def expert_tensors(self, layer: int) -> tuple[ManifestTensor, ...]:
        """The routed experts' tensors of one layer, in the file's order; empty for a dense layer."""
        return self._experts_of_layer.get(layer, ())

    def expert_size_bytes(self, layer: int) -> int:
        """Bytes of one routed expert of `layer`, over all its tensors."""
        return sum(each.expert_size_bytes for each in self.expert_tensors(layer))

    def experts_size_bytes(self) -> int:
        """Bytes of all routed experts' tensors in the file."""
        return sum(each.size_bytes for each in self.tensors if each.is_expert)

    def trunk_size_bytes(self) -> int:
        """Bytes of all tensors that are not routed experts': what a backbone holds."""
        return sum(each.size_bytes for each in self.tensors if not each.is_expert)

    def shard_size_bytes(self, shard: ShardSet) -> int:
        """Bytes of weights that a holder of `shard` keeps."""
        return sum((end - first) * self.expert_size_bytes(layer) for layer, first, end in shard.ranges)

    def whole_shard(self) -> ShardSet:
        """Every routed expert of the trunk."""
        return ShardSet(tuple((layer, 0, self.n_expert) for layer in self.moe_layers))


@dataclass(frozen=True, slots=True)
class ShardSet:
    """A set of (layer, expert) pairs, kept as sorted ranges `(layer, first, last_exclusive)`.

    Ranges are never empty, never touch and never overlap within a layer, so equal sets are equal values
    and have equal bytes. Build one with `from_pairs` or `from_ranges`, which bring any input to that form;
    the constructor raises `LocalProtocolError` for ranges that are not in it.
    """

    ranges: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        try:
            _check_ranges(self.ranges)
        except ValueError as error:
            raise LocalProtocolError(f"shard set: {error}") from error

    @staticmethod
    def from_pairs(pairs: Iterable[tuple[int, int]]) -> ShardSet:
        """The set of these (layer, expert) pairs; repeats are one."""
        return ShardSet.from_ranges((layer, expert, expert + 1) for layer, expert in pairs)

    @staticmethod
    def from_ranges(ranges: Iterable[tuple[int, int, int]]) -> ShardSet:
        """The union of these ranges, which may overlap, touch, be empty or come in any order."""
        merged: list[tuple[int, int, int]] = []
        for layer, first, end in sorted(ranges):
            if first >= end:
                continue
            if merged and merged[-1][0] == layer and first <= merged[-1][2]:
                merged[-1] = (layer, merged[-1][1], max(end, merged[-1][2]))
            else:
                merged.append((layer, first, end))
        return ShardSet(tuple(merged))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with at least one pair, ascending."""
        return tuple(sorted({layer for layer, _, _ in self.ranges}))

    def experts_of(self, layer: int) -> tuple[int, ...]:
        """The experts of one layer, ascending; empty when the set has none there."""
        return tuple(
            expert for each, first, end in self.ranges if each == layer for expert in range(first, end)
        )

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Every pair, ascending."""
        return ((layer, expert) for layer, first, end in self.ranges for expert in range(first, end))

    def union(self, other: ShardSet) -> ShardSet:
        """Pairs in this set or in `other`."""
        return ShardSet.from_ranges(self.ranges + other.ranges)

    def difference(self, other: ShardSet) -> ShardSet:
        """Pairs in this set and not in `other`."""
        if self.ranges == other.ranges:
            return ShardSet()
        gone = set(other.pairs())
        return ShardSet.from_pairs(pair for pair in self.pairs() if pair not in gone)

    def __contains__(self, pair: tuple[int, int]) -> bool:
        layer, expert = pair
        return any(each == layer and first <= expert < end for each, first, end in self.ranges)

    def __len__(self) -> int:
        return sum(end - first for _, first, end in self.ranges)

    def encode(self) -> bytes:
        """The canonical bytes of this set (a msgpack array of ranges)."""
        return bytes(msgpack.packb([list(each) for each in self.ranges], use_bin_type=True))

    @staticmethod
    def decode(data: bytes) -> ShardSet:
        """The set in `data`; `RemoteProtocolError` for anything but one whole canonical shard set."""
        if len(data) > SHARD_SIZE_MAX:
            raise RemoteProtocolError("shard set: too large", "shard_invalid")
        return _decoded(data, "shard set", "shard_invalid", _shard_of)

    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return hashlib.sha256(self.encode()).digest()


_Decoded = TypeVar("_Decoded", ModelManifest, ShardSet)

_COUNTS: Final = ("n_layer", "n_embd", "n_ff", "n_expert", "n_expert_used", "n_vocab", "n_ctx_train")

_DIGESTS: Final = (
    "header_sha256",
    "metadata_sha256",
    "hyper_parameters_sha256",
    "tokenizer_sha256",
    "template_sha256",
)

_COUNT_BOUNDS: Final = {
    "n_layer": (1, LAYERS_MAX),
    "n_embd": (1, DIMENSION_MAX),
    "n_ff": (1, DIMENSION_MAX),
    "n_expert": (1, EXPERTS_MAX),
    "n_expert_used": (1, EXPERTS_MAX),
    "n_vocab": (0, DIMENSION_MAX),
    "n_ctx_train": (0, DIMENSION_MAX),
}


def _check_manifest(manifest: ModelManifest) -> None:
    """ValueError, naming the field, when the manifest's parts are out of bounds or contradict each other."""
    _require(_PLAIN_TEXT.fullmatch(manifest.name) is not None, "name is not 1 to 128 printable characters")
    _require(_PLAIN_TEXT.fullmatch(manifest.architecture) is not None, "architecture is not plain text")
    for field, (low, high) in _COUNT_BOUNDS.items():
        _require(low <= getattr(manifest, field) <= high, f"{field} is not in {low}..{high}")
    _require(manifest.n_expert_used <= manifest.n_expert, "n_expert_used exceeds n_expert")
    _require(0 < manifest.file_size_bytes <= FILE_SIZE_BYTES_MAX, "file_size_bytes is out of range")
    _require(0 < manifest.data_offset <= manifest.file_size_bytes, "data_offset is out of range")
    for field in _DIGESTS:
        _require(len(getattr(manifest, field)) == DIGEST_SIZE_BYTES, f"{field} is not 32 bytes")
    _require(0 < len(manifest.tensors) <= TENSORS_MAX, "the number of tensors is out of range")

    names: set[str] = set()
    layers: set[int] = set()
    for tensor in manifest.tensors:
        _check_tensor(tensor, manifest)
        _require(tensor.name not in names, f"{tensor.name} occurs twice")
        names.add(tensor.name)
        layer = tensor.layer
        if layer is not None:
            layers.add(layer)
    end = manifest.data_offset
    for tensor in sorted(manifest.tensors, key=lambda each: each.offset):
        _require(tensor.offset >= end, f"{tensor.name} overlaps what lies before it")
        end = tensor.offset + tensor.size_bytes
    _require(end <= manifest.file_size_bytes, "tensors reach past the end of the file")

    moe_layers = manifest.moe_layers
    _require(len(moe_layers) > 0, "moe_layers is empty")
    _require(list(moe_layers) == sorted(set(moe_layers)), "moe_layers is not ascending")
    _require(set(moe_layers) <= layers, "moe_layers names a layer without expert tensors")
    _require(moe_layers[0] >= 0 and moe_layers[-1] < manifest.n_layer, "moe_layers is out of range")


def _check_tensor(tensor: ManifestTensor, manifest: ModelManifest) -> None:
    name = tensor.name
    _require(TENSOR_NAME.fullmatch(name) is not None, "a tensor's name is not 1 to 63 printable characters")
    _require(TENSOR_TYPES.get(tensor.type.id) == tensor.type, f"{name} has an unknown type")
    _require(1 <= len(tensor.shape) <= DIMENSIONS_MAX, f"{name} has {len(tensor.shape)} dimensions")
    _require(all(1 <= each <= DIMENSION_MAX for each in tensor.shape), f"{name} has a bad dimension")
    _require(tensor.shape[0] % tensor.type.block_elements == 0, f"{name} is not a whole number of blocks")
    size_bytes = tensor_size_bytes(tensor.type, tensor.shape)
    _require(tensor.size_bytes == size_bytes, f"{name} lies about its size")
    _require(0 < tensor.offset <= FILE_SIZE_BYTES_MAX, f"{name} has a bad offset")
    n_digest = 1
    layer = tensor.layer
    if layer is not None:
        n_digest = tensor.shape[-1]
        _require(layer < LAYERS_MAX, f"{name} has a bad layer")
        _require(n_digest == manifest.n_expert, f"{name} does not have n_expert experts")
        _require(
            len(tensor.shape) > 1 or tensor.type.block_elements == 1, f"{name} cannot be cut into experts"
        )
    _require(len(tensor.digests) == n_digest * DIGEST_SIZE_BYTES, f"{name} has a wrong number of digests")


def tensor_size_bytes(tensor_type: TensorType, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; `shape[0]` must be a whole number of blocks."""
    size_bytes = tensor_type.row_size_bytes(shape[0])
    for dimension in shape[1:]:
        size_bytes *= dimension
    return size_bytes


def is_expert_name(name: str) -> bool:
    """Whether a tensor of this name belongs to routed experts."""
    return EXPERT_TENSOR.fullmatch(name) is not None


def _check_ranges(ranges: tuple[tuple[int, int, int], ...]) -> None:
    _require(len(ranges) <= SHARD_RANGES_MAX, "too many ranges")
    before = (-1, 0, 0)
    for layer, first, end in ranges:
        _require(0 <= layer < LAYERS_MAX, "a layer is out of range")
        _require(0 <= first < end <= EXPERTS_MAX, "an expert is out of range")
        _require(layer > before[0] or (layer == before[0] and first > before[2]), "ranges are not in order")
        before = (layer, first, end)


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _decoded(data: bytes, what: str, code: str, build: Callable[[Any], _Decoded]) -> _Decoded:
    try:
        value = build(msgpack.unpackb(data, use_list=True, raw=False, strict_map_key=True))
    except (TypeError, OverflowError, RecursionError) as error:  # Python's words say nothing of the bytes
        raise RemoteProtocolError(f"{what}: not well formed", code) from error
    except (ValueError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"{what}: not well formed ({error})", code) from error
    except LocalProtocolError as error:
        raise RemoteProtocolError(str(error), code) from error
    if value.encode() != data:
        raise RemoteProtocolError(f"{what}: not the canonical encoding", code)
    return value


def _manifest_of(parts: Any) -> ModelManifest:
    _require(isinstance(parts, list) and len(parts) == 20, "a manifest has 20 parts")
    _require(parts[0] == "kvasir/model-manifest", "it is something else")
    _require(type(parts[1]) is int, "its format is not a number")
    _require(parts[1] == MANIFEST_FORMAT, f"format {parts[1]} is not known")
    counts = {field: _integer(parts[4 + index]) for index, field in enumerate(_COUNTS)}
    return ModelManifest(
        name=_text(parts[2]),
        architecture=_text(parts[3]),
        **counts,
        moe_layers=tuple(_integer(each) for each in _list(parts[11], LAYERS_MAX)),
        file_size_bytes=_integer(parts[12]),
        data_offset=_integer(parts[13]),
        header_sha256=_binary(parts[14]),
        metadata_sha256=_binary(parts[15]),
        hyper_parameters_sha256=_binary(parts[16]),
        tokenizer_sha256=_binary(parts[17]),
        template_sha256=_binary(parts[18]),
        tensors=tuple(_tensor_of(each) for each in _list(parts[19], TENSORS_MAX)),
    )


def _tensor_of(parts: Any) -> ManifestTensor:
    _require(isinstance(parts, list) and len(parts) == 6, "a tensor has 6 parts")
    type_id = _integer(parts[1])
    _require(type_id in TENSOR_TYPES, f"tensor type {type_id} is not known")
    return ManifestTensor(
        name=_text(parts[0]),
        type=TENSOR_TYPES[type_id],
        shape=tuple(_integer(each) for each in _list(parts[2], DIMENSIONS_MAX)),
        offset=_integer(parts[3]),
        size_bytes=_integer(parts[4]),
        digests=_binary(parts[5]),
    )


def _shard_of(parts: Any) -> ShardSet:
    ranges = []
    for each in _list(parts, SHARD_RANGES_MAX):
        layer, first, end = (_integer(number) for number in _list(each, 3))
        ranges.append((layer, first, end))
    return ShardSet(tuple(ranges))


def _integer(value: Any) -> int:
    _require(type(value) is int and 0 <= value <= FILE_SIZE_BYTES_MAX, "a number is not an integer in range")
    return int(value)


def _text(value: Any) -> str:
    _require(type(value) is str, "a text is not a text")
    return str(value)


def _binary(value: Any) -> bytes:
    _require(type(value) is bytes, "a digest is not binary")
    return bytes(value)


def _list(value: Any, length_max: int) -> list[Any]:
    _require(type(value) is list and len(value) <= length_max, "a list is not a list, or too long")
    return list(value)
