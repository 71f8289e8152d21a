"""Builds the manifest of a local model file, in one pass over its bytes.

Decides whether a GGUF file is a Mixture-of-Experts model that a swarm can serve: its counts and the shapes of
its experts' tensors must agree with each other. No architecture is special here: what matters is which
tensors have the names that the hook takes over, and their shapes. It never loads a tensor whole.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Final, Protocol

from kvasir_node.model.byte_ranges import InOrder
from kvasir_node.model.gguf_format import INTEGER_TYPES, GgufFile, GgufTensor, ValueType, metadata_sha256
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.model_bytes import ModelBytes
from kvasir_node.model.model_url import Location
from kvasir_proto.errors import LocalProtocolError, ModelUnusable
from kvasir_proto.limits import EXPERTS_MAX, LAYERS_MAX
from kvasir_proto.manifest import (
    DIMENSION_MAX,
    EXPERT_TENSOR,
    ManifestTensor,
    ModelManifest,
    is_expert_name,
)

_TEMPLATE: Final = "tokenizer.chat_template"
_NEVER_NEGATIVE: Final = ("rope_freq_base", "rope.freq_base", "rope.freq_base_swa")
_ARCHITECTURE: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}", re.ASCII)
_LIKE_EXPERTS: Final = re.compile("ffn_(up|down|gate|gate_up)_exps")
"""In the name of a tensor that is not named as routed experts' are: who it belongs to would be a guess."""

Progress = Callable[[int, int], None]
"""Told (bytes done, bytes in all) as work goes on."""

CopyOf = Callable[[GgufTensor, int], AbstractContextManager[BinaryIO | None]]
"""Of a tensor and, where it belongs to routed experts, one of them (else 0): a file to write its bytes to, at
the place where they belong; None where nobody wants them. Left without an error only when all have come."""


@dataclass(frozen=True, slots=True)
class ExpertGeometry:
    """The counts of a Mixture-of-Experts model, read from its metadata and agreed with its tensors."""

    architecture: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_expert: int
    n_expert_used: int
    n_vocab: int
    n_ctx_train: int
    moe_layers: tuple[int, ...]


def build_manifest(path: Location, progress: Progress | None = None) -> ModelManifest:
    """The manifest of the model at `path`, reading the file once from begin to end.

    Raises `ModelUnusable` for a file that `read_gguf` refuses, that is not a Mixture of Experts, that
    contradicts itself, or that changes while it is read.
    """
    return manifest_of(read_gguf(path), progress)


class PartsHad(Protocol):
    """What an earlier pass over the same bytes has had of them."""

    def begin(self, versions: tuple[str, ...]) -> None:
        """The pass is over these versions of the files; of others nothing counts."""

    def may_have(self, tensor: GgufTensor, part: int) -> bool:
        """Whether `digest_of` may know it; asked for what is to be read together."""

    def digest_of(self, tensor: GgufTensor, part: int) -> bytes | None:
        """The digest of a part that need not be read again; None where it must."""

    def note(self, tensor: GgufTensor, part: int, digest: bytes) -> None:
        """A part has been read."""


def manifest_of(
    gguf: GgufFile,
    progress: Progress | None = None,
    copy_of: CopyOf | None = None,
    had: PartsHad | None = None,
) -> ModelManifest:
    """As `build_manifest`, for a header that has been read already.

    `copy_of` says where the bytes of a part are to be written as they pass, so that none is read twice;
    `had` which of them an earlier pass has read.
    """
    fields = _header_fields(gguf)
    return _manifest(gguf, fields, lambda: _digested_tensors(gguf, progress, copy_of or _no_copy, had))


def moved_manifest(manifest: ModelManifest, gguf: GgufFile) -> ModelManifest:
    """The manifest with the ranges of another file of the same model, of which only the header was read.

    So whoever has the manifest of a whole file can fetch from a split one, and whoever gave the manifest need
    not be believed: nothing is taken of it but the tensors' digests, which its name covers. Raises
    `ModelUnusable` when the header is not one of this model; whether the bytes are, digests say as they come.
    """
    fields = _header_fields(gguf)
    if (differing := _differing_field(fields, manifest)) is not None:
        raise _another_model(gguf, f"its {differing} is another")
    digests = {each.name: (each.type, each.shape, each.digests) for each in manifest.tensors}

    def tensors() -> tuple[ManifestTensor, ...]:
        found = []
        for each in gguf.tensors:
            known_type, shape, digest = digests.get(each.name, (None, None, b""))
            if (known_type, shape) != (each.type, each.shape):
                raise _another_model(gguf, f"{each.name} differs")
            found.append(
                ManifestTensor(each.name, each.type, each.shape, each.offset, each.size_bytes, digest)
            )
        return tuple(found)

    moved = _manifest(gguf, fields, tensors)
    if moved.digest() != manifest.digest():
        raise _another_model(gguf, "it has fewer tensors")
    return moved


def differing_field(gguf: GgufFile, manifest: ModelManifest) -> str | None:
    """A field of the manifest that its name covers, tensors apart, and of which this header says otherwise.

    Types of tensors do not matter, so it may be a backbone file's header. Raises as `expert_geometry` does.
    """
    return _differing_field(_header_fields(gguf), manifest)


def _differing_field(fields: Mapping[str, Any], manifest: ModelManifest) -> str | None:
    return next((field for field in sorted(fields) if fields[field] != getattr(manifest, field)), None)


def _header_fields(gguf: GgufFile) -> dict[str, Any]:
    """What a header says of all that a model's name covers beside its tensors, by the manifest's fields."""
    geometry = expert_geometry(gguf)
    return asdict(geometry) | {
        "hyper_parameters_sha256": metadata_sha256(gguf.metadata, f"{geometry.architecture}."),
        "tokenizer_sha256": metadata_sha256(gguf.metadata, "tokenizer.", without=_TEMPLATE),
        "template_sha256": metadata_sha256(gguf.metadata, _TEMPLATE),
    }


def _another_model(gguf: GgufFile, reason: str) -> ModelUnusable:
    return ModelUnusable(f"{gguf.path} is not the model of the manifest: {reason}")


def _manifest(
    gguf: GgufFile, fields: Mapping[str, Any], tensors: Callable[[], tuple[ManifestTensor, ...]]
) -> ModelManifest:
    try:
        return ModelManifest(
            name=_name_of(gguf, fields["architecture"]),
            **fields,
            file_size_bytes=gguf.size_bytes,
            data_offset=gguf.data_offset,
            header_sha256=gguf.header_sha256,
            metadata_sha256=metadata_sha256(gguf.metadata),
            tensors=tensors(),
        )
    except LocalProtocolError as error:
        raise ModelUnusable(f"{gguf.path} cannot be used: {error}") from error


def expert_geometry(gguf: GgufFile) -> ExpertGeometry:
    """The counts of the model; `ModelUnusable`, naming the field, when it is not a usable Mixture of Experts.

    A file that has one tensor an expert (the form before 2024) is refused by name.
    """
    fields = _Fields(gguf)
    architecture = fields.text("general.architecture")
    if _ARCHITECTURE.fullmatch(architecture) is None:
        raise fields.refusal("general.architecture is not a plain name")

    fields.check_floats(architecture)
    experts = _expert_tensors(fields, gguf)
    key = f"{architecture}."
    n_expert = fields.count(key + "expert_count", 0, EXPERTS_MAX, missing=0)
    if not experts:
        if n_expert:
            raise fields.refusal("it is a Mixture of Experts, but its experts are not stacked in one tensor")
        raise fields.refusal("it is not a Mixture-of-Experts model: it has no expert tensors")
    if not n_expert:
        raise fields.refusal(f"it has expert tensors, but {key}expert_count does not say how many experts")
    n_layer = fields.count(key + "block_count", 1, LAYERS_MAX)
    n_prediction_layer = fields.count(key + "nextn_predict_layers", 0, n_layer - 1, missing=0)
    if max(experts) >= n_layer:
        raise fields.refusal(f"it has experts in layer {max(experts)}, but {key}block_count is {n_layer}")
    widths = [_checked_layer(fields, layer, experts[layer], n_expert) for layer in sorted(experts)]
    moe_layers = tuple(each for each in sorted(experts) if each < n_layer - n_prediction_layer)
    if not moe_layers:
        raise fields.refusal("no layer of its trunk has experts")
    embedding = next((each for each in gguf.tensors if each.name == "token_embd.weight"), None)
    return ExpertGeometry(
        architecture=architecture,
        n_layer=n_layer,
        n_embd=fields.count(key + "embedding_length", 1, DIMENSION_MAX),
        n_ff=max(widths),
        n_expert=n_expert,
        n_expert_used=fields.count(key + "expert_used_count", 1, n_expert),
        n_vocab=embedding.shape[-1] if embedding is not None else 0,
        n_ctx_train=fields.count(key + "context_length", 0, DIMENSION_MAX, missing=0),
        moe_layers=moe_layers,
    )


class _Fields:
    """The metadata of one file, read with bounds; every refusal names the file and the key."""

    def __init__(self, gguf: GgufFile) -> None:
        self._gguf = gguf

    def refusal(self, reason: str) -> ModelUnusable:
        return ModelUnusable(f"{self._gguf.path} cannot be used: {reason}")

    def text(self, key: str) -> str:
        entry = self._gguf.metadata.get(key)
        if entry is None:
            raise self.refusal(f"{key} is missing")
        try:
            return entry.text()
        except ValueError as error:
            raise self.refusal(f"{key} is not a text") from error

    def check_floats(self, architecture: str) -> None:
        """Refuse what can be right in no architecture: nothing finite would ever come out of it.

        Norms divide by a root of something plus an epsilon: ggml ends the process over a negative one. A
        root is drawn of a rotation's base.
        """
        for key, entry in self._gguf.metadata.items():
            if not key.startswith(f"{architecture}."):
                continue
            if (entry.element_type or entry.type) not in (ValueType.FLOAT32, ValueType.FLOAT64):
                continue
            for value in entry.scalars():
                if key.endswith("epsilon") and not 0 <= value < math.inf:
                    raise self.refusal(f"{key} is {value:g}, not a small number of at least 0")
                if key.endswith(_NEVER_NEGATIVE) and not 0 <= value < math.inf:
                    raise self.refusal(f"{key} is {value:g}, not a number of at least 0")
                if math.isnan(value) or (key.endswith("expert_weights_scale") and math.isinf(value)):
                    raise self.refusal(f"{key} is {value:g}, not a finite number")

    def count(self, key: str, low: int, high: int, missing: int | None = None) -> int:
        """One count, or the largest of an array of counts (one a layer)."""
        entry = self._gguf.metadata.get(key)
        if entry is None:
            if missing is None:
                raise self.refusal(f"{key} is missing")
            return missing
        kind = entry.element_type if entry.element_type is not None else entry.type
        if kind not in INTEGER_TYPES or not entry.count:
            raise self.refusal(f"{key} is not a count")
        value = max(int(each) for each in entry.scalars())
        if not low <= value <= high:
            raise self.refusal(f"{key} is {value}, not in {low}..{high}")
        return value


def _expert_tensors(fields: _Fields, gguf: GgufFile) -> dict[int, dict[str, GgufTensor]]:
    """The experts' tensors by layer and suffix."""
    layers: dict[int, dict[str, GgufTensor]] = {}
    for tensor in gguf.tensors:
        match = EXPERT_TENSOR.fullmatch(tensor.name)
        if match is not None:
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
        elif _LIKE_EXPERTS.search(tensor.name):
            raise fields.refusal(f"{tensor.name} belongs to experts in a way Kvasir does not know")
    return layers


def _checked_layer(fields: _Fields, layer: int, tensors: Mapping[str, GgufTensor], n_expert: int) -> int:
    """The hidden width of one layer's experts; refuses tensors whose shapes do not fit each other."""

    def matrix(kind: str) -> tuple[int, int] | None:
        """(values in, values out) of one kind of matrix; None when the layer has none."""
        tensor = tensors.get(f"ffn_{kind}_exps.weight")
        if tensor is None:
            return None
        if len(tensor.shape) != 3:
            raise fields.refusal(f"{tensor.name} has {len(tensor.shape)} dimensions, not 3")
        return tensor.shape[0], tensor.shape[1]

    for tensor in tensors.values():
        if tensor.shape[-1] != n_expert:
            raise fields.refusal(f"{tensor.name} has {tensor.shape[-1]} experts, expert_count is {n_expert}")
    down, gate, up, gate_up = (matrix(kind) for kind in ("down", "gate", "up", "gate_up"))
    if down is None or (up is None) == (gate_up is None):
        raise fields.refusal(
            f"layer {layer} has experts without ffn_down_exps, or without one of up and gate_up"
        )
    n_ff, n_out = down
    widths = {"gate": (gate, n_ff), "up": (up, n_ff), "gate_up": (gate_up, 2 * n_ff), "down": (down, n_out)}
    for kind, (shape, n_rows) in widths.items():
        if shape is not None and shape[1] != n_rows:
            raise fields.refusal(f"blk.{layer}.ffn_{kind}_exps.weight has {shape[1]} rows, not {n_rows}")
        for suffix, expected in (("bias", (n_rows, n_expert)), ("scale", (n_expert,))):
            extra = tensors.get(f"ffn_{kind}_exps.{suffix}")
            if extra is not None and (shape is None or extra.shape != expected):
                raise fields.refusal(f"{extra.name} has shape {extra.shape}, not {expected}")
    if gate is not None and up is not None and gate[0] != up[0]:
        raise fields.refusal(f"layer {layer}: gate takes {gate[0]} values, up {up[0]}")
    return n_ff


def _no_copy(tensor: GgufTensor, part: int) -> AbstractContextManager[None]:
    return nullcontext()


def _digested_tensors(
    gguf: GgufFile, progress: Progress | None, copy_of: CopyOf, had: PartsHad | None
) -> tuple[ManifestTensor, ...]:
    """Every tensor with its digests, in the file's order, read in the order of the bytes."""
    digests: dict[str, bytes] = {}
    total = sum(each.size_bytes for each in gguf.tensors)
    done = 0
    parts = [
        (tensor, part)
        for tensor in sorted(gguf.tensors, key=lambda each: each.offset)
        for part in range(_n_part(tensor))
    ]
    with ModelBytes(gguf.path, gguf.size_bytes) as model:
        if had is not None:
            had.begin(model.versions)
        source, source_end = InOrder(model, 0, 0), 0
        for number, (tensor, part) in enumerate(parts):
            size_bytes = tensor.size_bytes // _n_part(tensor)
            begin = tensor.offset + part * size_bytes
            digest = None if had is None else had.digest_of(tensor, part)
            if digest is None:
                if begin >= source_end:
                    source_end = _end_of_run(gguf, parts, number, had)
                    source = InOrder(model, begin, source_end)
                hasher = hashlib.sha256()
                with copy_of(tensor, part) as copy:
                    for piece in source.pieces(begin, size_bytes):
                        hasher.update(piece)
                        if copy is not None:
                            copy.write(piece)
                digest = hasher.digest()
                if had is not None:
                    had.note(tensor, part, digest)
            digests[tensor.name] = digests.get(tensor.name, b"") + digest
            done += size_bytes
            if progress is not None:
                progress(done, total)
    return tuple(
        ManifestTensor(each.name, each.type, each.shape, each.offset, each.size_bytes, digests[each.name])
        for each in gguf.tensors
    )


def _n_part(tensor: GgufTensor) -> int:
    return tensor.shape[-1] if is_expert_name(tensor.name) else 1


def _end_of_run(
    gguf: GgufFile, parts: Sequence[tuple[GgufTensor, int]], number: int, had: PartsHad | None
) -> int:
    """Where what is read together from this part on ends: before the next one that need not be read."""
    for tensor, part in parts[number + 1 :] if had is not None else ():
        if had is not None and had.may_have(tensor, part):
            return tensor.offset + part * (tensor.size_bytes // _n_part(tensor))
    return gguf.size_bytes


def _name_of(gguf: GgufFile, architecture: str) -> str:
    """The model's own name when it can be shown safely, else its architecture's."""
    entry = gguf.metadata.get("general.name")
    try:
        name = entry.text() if entry is not None else ""
    except ValueError:
        name = ""
    name = "".join(each if " " <= each <= "~" else "?" for each in name).strip()[:128]
    return name or architecture
