"""A model of one layer whose experts are written on the spot, for kernels to be loaded with.

Decides how experts' bytes are named and found: a kernel sees a manifest, a shard and a function that reads,
as it would of a real model. Apart from what fills the experts, which is the probe's or the comparison's
business. Nothing of it is ever a file, so digests and offsets say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvasir_node.kernels.port import ExpertKernel
from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.manifest import (
    DIGEST_SIZE_BYTES,
    ManifestTensor,
    ModelManifest,
    ShardSet,
    tensor_size_bytes,
)
from kvasir_proto.program import ExpertProgram
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME

Read: TypeAlias = Callable[[str, int], bytes | bytearray | memoryview]
MakeKernel: TypeAlias = Callable[[ModelManifest, ShardSet, Read], ExpertKernel]
"""Loads a shard of a model into the kernel that is looked at."""

Float32Array: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

LAYER: Final = 0
_DATA_OFFSET: Final = 4096


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """How wide a model's rows are, outside its experts and inside them."""

    n_embd: int
    n_ff: int

    def shape_of(self, part: str) -> tuple[int, int]:
        """(columns, rows) of the weight `up`, `gate` or `down`."""
        return (self.n_ff, self.n_embd) if part == "down" else (self.n_embd, self.n_ff)


def expert_shape_of(manifest: ModelManifest) -> ExpertShape:
    """The widths of the first layer's experts; what a model's header says of n_ff may be of dense layers."""
    layer = manifest.moe_layers[0]
    down = manifest.tensor(f"blk.{layer}.ffn_down_exps.weight")
    return ExpertShape(n_embd=down.shape[1], n_ff=down.shape[0])


def expert_types_of(manifest: ModelManifest) -> tuple[str, ...]:
    """The types of all experts' weights, by ggml's names, in order."""
    names = {
        each.type.name for each in manifest.tensors if each.is_expert and each.name.endswith("_exps.weight")
    }
    return tuple(sorted(names))


class SyntheticExperts:
    """Experts of one shape and type, given as `parts`: of "gate", "up", "down" the bytes of each expert's
    rows, [experts, rows, bytes of a row].
    """

    def __init__(self, shape: ExpertShape, type_name: str, parts: Mapping[str, Bytes]) -> None:
        self.shape = shape
        self.type_name = type_name
        self._parts = dict(parts)
        self.n_expert = len(next(iter(parts.values())))
        if any(len(each) != self.n_expert for each in parts.values()):
            raise LocalProtocolError("every part has every expert")
        self.manifest = self._manifest()

    def load(self, make: MakeKernel) -> ExpertKernel:
        """A kernel that holds all of them. Raises as it does."""
        return make(self.manifest, self.manifest.whole_shard(), self.read)

    def read(self, tensor_name: str, expert: int) -> memoryview:
        """One expert's slice of a tensor."""
        part = tensor_name.removeprefix(f"blk.{LAYER}.ffn_").removesuffix("_exps.weight")
        return np.ascontiguousarray(self._parts[part][expert]).data.cast("B")

    def _manifest(self) -> ModelManifest:
        tensor_type = TENSOR_TYPES_BY_NAME[self.type_name]
        offset = _DATA_OFFSET
        tensors = []
        for part in sorted(self._parts):
            shape = (*self.shape.shape_of(part), self.n_expert)
            size_bytes = tensor_size_bytes(tensor_type, shape)
            digests = bytes(DIGEST_SIZE_BYTES * self.n_expert)
            name = f"blk.{LAYER}.ffn_{part}_exps.weight"
            tensors.append(ManifestTensor(name, tensor_type, shape, offset, size_bytes, digests))
            offset += size_bytes
        return ModelManifest(
            name="synthetic",
            architecture="none",
            n_layer=LAYER + 1,
            n_embd=self.shape.n_embd,
            n_ff=self.shape.n_ff,
            n_expert=self.n_expert,
            n_expert_used=1,
            n_vocab=0,
            n_ctx_train=0,
            moe_layers=(LAYER,),
            file_size_bytes=offset,
            data_offset=_DATA_OFFSET,
            header_sha256=bytes(DIGEST_SIZE_BYTES),
            metadata_sha256=bytes(DIGEST_SIZE_BYTES),
            hyper_parameters_sha256=bytes(DIGEST_SIZE_BYTES),
            tokenizer_sha256=bytes(DIGEST_SIZE_BYTES),
            template_sha256=bytes(DIGEST_SIZE_BYTES),
            tensors=tuple(tensors),
        )


def compute(kernel: ExpertKernel, program: ExpertProgram, x: Float32Array, expert: int) -> Float32Array:
    """What a kernel makes of these rows with one expert, [rows, width out], in one call."""
    index = kernel.add_program(program)
    width_in, width_out = kernel.row_widths(LAYER, index)
    if x.shape[1] != width_in:
        raise LocalProtocolError(f"rows of {x.shape[1]} floats where the program takes {width_in}")
    x = np.ascontiguousarray(x, np.float32)
    n_row = len(x)
    rows = np.arange(n_row, dtype=np.int32)
    experts = np.full(n_row, expert, np.int32)
    out = np.full((n_row, width_out), np.nan, np.float32)
    addresses = (x.ctypes.data, rows.ctypes.data, experts.ctypes.data, out.ctypes.data)
    kernel.compute(LAYER, index, n_row, n_row, *addresses)
    return out
