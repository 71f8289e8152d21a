"""Kernels that lie: each plants one fault behind an honest kernel's face, for audits to find.

Decides what each fault is. Some are in the weights a kernel is given, some in the rows it gives back; the
honest kernel inside knows of neither. Tests, `demo --liar` and the figures of the audit run on these; a
person can give a swarm one (`--kernel liar-scaled`) to see what becomes of it. They lie to requests only: a
node with one certifies the honest kernel, as a liar would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
from gguf import GGMLQuantizationType, quants

from kvasir_node.kernels.accumulators import F16_SUMS
from kvasir_node.kernels.addressed_arrays import array_at
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.errors import EngineFailed
from kvasir_proto.limits import Kernel
from kvasir_proto.manifest import ManifestTensor, ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram

Lie: TypeAlias = Literal[
    "f16", "scaled", "zeros", "stale", "wrong-expert", "nan", "q4", "replayed", "odd-blocks"
]
LIES: Final[tuple[Lie, ...]] = get_args(Lie)

LYING_KERNELS: Final[Mapping[Kernel, Lie]] = MappingProxyType(
    {name: lie for name in get_args(Kernel) for lie in LIES if name == f"liar-{lie}"}
)
"""The kernels' names that stand for each."""

Read = Callable[[str, int], bytes | bytearray | memoryview]

_FACTOR: Final = np.float32(1.01)
_NAN_SHARE: Final = 0.01
_STALE_PART: Final = 8
"""One in so many rows of a weight is that of another expert."""
_SEED: Final = 7


def face_of(name: Kernel) -> Kernel:
    """What a node with this kernel says it has, and what it measures of itself: a liar the honest kernel."""
    return "ggml-cpu" if name in LYING_KERNELS else name


class LyingKernel:
    """An `ExpertKernel` with a planted fault; see the port. Its `backend` is the honest kernel's."""

    def __init__(self, lie: Lie, manifest: ModelManifest, shard: ShardSet, read: Read, threads: int) -> None:
        """Raises `EngineFailed` for a fault that weights of this model's types cannot have."""
        self._lie = lie
        self._draws = np.random.default_rng(_SEED)
        self._before: dict[tuple[int, int], np.ndarray[tuple[int, int], np.dtype[np.float32]]] = {}
        self._honest: ExpertKernel
        if lie == "f16":
            self._honest = ReferenceKernel(manifest, shard, read, Arithmetic.AS_GGML, F16_SUMS)
        else:
            self._honest = GgmlCpuKernel(manifest, shard, _altered(lie, manifest, shard, read), threads)

    @property
    def backend(self) -> str:
        """What an honest node would say."""
        return GgmlCpuKernel.backend

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights held."""
        return self._honest.memory_bytes

    def add_program(self, program: ExpertProgram) -> int:
        """As the honest kernel."""
        return self._honest.add_program(program)

    def row_widths(self, layer: int, program_index: int) -> tuple[int, int]:
        """As the honest kernel."""
        return self._honest.row_widths(layer, program_index)

    def compute(
        self,
        layer: int,
        program_index: int,
        n_rows: int,
        n_pairs: int,
        x_address: int,
        row_of_pair_address: int,
        expert_of_pair_address: int,
        out_address: int,
    ) -> None:
        """As the honest kernel, and then the lie."""
        self._honest.compute(
            layer,
            program_index,
            n_rows,
            n_pairs,
            x_address,
            row_of_pair_address,
            expert_of_pair_address,
            out_address,
        )
        out = array_at(out_address, np.float32, n_pairs, self.row_widths(layer, program_index)[1])
        if self._lie == "scaled":
            out *= _FACTOR
        elif self._lie == "zeros":
            out[:] = 0
        elif self._lie == "nan":
            out[self._draws.random(n_pairs) < _NAN_SHARE] = np.nan
        elif self._lie == "replayed":
            key = layer, out.shape[1]
            before, self._before[key] = self._before.get(key), out.copy()
            if before is not None:
                out[:] = np.resize(before, out.shape)

    def close(self) -> None:
        """Free the weights. Idempotent."""
        self._honest.close()


def wrong_expert_of(shard: ShardSet) -> tuple[int, int]:
    """The (layer, expert) that `wrong-expert` computes with another expert's weights: one in the middle."""
    layer, first, end = shard.ranges[len(shard.ranges) // 2]
    return layer, (first + end - 1) // 2


def _altered(lie: Lie, manifest: ModelManifest, shard: ShardSet, read: Read) -> Read:
    """What reads the weights that this liar computes with."""
    if lie == "wrong-expert" and len(shard):
        wrong = wrong_expert_of(shard)

        def read_another(name: str, expert: int) -> bytes | bytearray | memoryview:
            is_wrong = (manifest.tensor(name).layer, expert) == wrong
            return read(name, _next_expert(manifest, expert) if is_wrong else expert)

        return read_another
    if lie not in ("stale", "q4", "odd-blocks"):
        return read

    def read_altered(name: str, expert: int) -> bytes:
        tensor = manifest.tensor(name)
        data = np.frombuffer(read(name, expert), np.uint8)
        if len(tensor.shape) != 3:
            return data.tobytes()
        rows = data.reshape(tensor.shape[1], -1).copy()
        if lie == "stale":
            other = np.frombuffer(read(name, _next_expert(manifest, expert)), np.uint8).reshape(rows.shape)
            rows[::_STALE_PART] = other[::_STALE_PART]
        elif lie == "q4":
            rows = _through_q4(tensor, rows)
        else:
            _double_odd_blocks(tensor, rows)
        return rows.tobytes()

    return read_altered


def _next_expert(manifest: ModelManifest, expert: int) -> int:
    return (expert + 1) % manifest.n_expert


def _through_q4(
    tensor: ManifestTensor, rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]
) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Weights as a file in Q4_0 would have them, written in the type they should have."""
    own = GGMLQuantizationType(tensor.type.id)
    try:
        short = quants.quantize(
            np.asarray(quants.dequantize(rows, own), np.float32), GGMLQuantizationType.Q4_0
        )
        back = np.asarray(quants.dequantize(short, GGMLQuantizationType.Q4_0), np.float32)
        return np.ascontiguousarray(quants.quantize(back, own)).view(np.uint8).reshape(rows.shape)
    except (NotImplementedError, ValueError) as error:
        raise EngineFailed(f"no weights in {tensor.type.name} can be made from Q4_0 here") from error


def _double_odd_blocks(tensor: ManifestTensor, rows: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
    """Take every other block's scale for twice what it is."""
    if tensor.type.name != "q8_0":
        raise EngineFailed(f"only Q8_0 has blocks whose scale is known here, not {tensor.type.name}")
    blocks = rows.reshape(len(rows), -1, tensor.type.block_size_bytes)
    scales = np.ascontiguousarray(blocks[:, 1::2, :2]).view(np.float16) * np.float16(2)
    blocks[:, 1::2, :2] = np.ascontiguousarray(scales).view(np.uint8)
