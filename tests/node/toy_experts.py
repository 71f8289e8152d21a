"""A made-up model whose experts compute what one can check in the head, and a kernel that computes it.

Expert e of layer l turns a row x into `x * (e + 1) + 100 * l`, exact in F32 for small whole numbers. Tests of
the data plane use it where the arithmetic is not the subject.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.hook import LayerCall
from kvasir_node.kernels.addressed_arrays import array_at
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.manifest import DIGEST_SIZE_BYTES, ManifestTensor, ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram, ProgramStep, StepOp, UnaryKind
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME

Rows = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int32]

LAYERS = (1, 3)
N_EXPERT = 6
WIDTH = 4

PROGRAM = ExpertProgram(
    (
        ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_up_exps.weight"),
        ProgramStep(StepOp.EXPERT_MATMUL, 1, tensor="ffn_down_exps.weight"),
    ),
    input_per_slot=False,
)
OTHER_PROGRAM = ExpertProgram(
    (
        ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_up_exps.weight"),
        ProgramStep(StepOp.UNARY, 1, params=bytes([UnaryKind.SILU]) + bytes(15)),
        ProgramStep(StepOp.EXPERT_MATMUL, 2, tensor="ffn_down_exps.weight"),
    ),
    input_per_slot=False,
)
"""As good as the other: toy experts do not look into their program."""

UNFIT_PROGRAM = ExpertProgram(
    (
        ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_gate_exps.weight"),
        ProgramStep(StepOp.EXPERT_MATMUL, 1, tensor="ffn_down_exps.weight"),
    ),
    input_per_slot=False,
)
"""Names a tensor that the toy model does not have."""


def toy_manifest(width: int = WIDTH) -> ModelManifest:
    """A model of 4 layers, `LAYERS` of them with experts, whose rows have `width` floats."""
    f32 = TENSOR_TYPES_BY_NAME["f32"]
    tensors = []
    offset = 64
    for layer in LAYERS:
        for part in ("up", "down"):
            size_bytes = 4 * width * width * N_EXPERT
            tensors.append(
                ManifestTensor(
                    f"blk.{layer}.ffn_{part}_exps.weight",
                    f32,
                    (width, width, N_EXPERT),
                    offset,
                    size_bytes,
                    bytes(DIGEST_SIZE_BYTES * N_EXPERT),
                )
            )
            offset += size_bytes
    return ModelManifest(
        name="toy",
        architecture="none",
        n_layer=4,
        n_embd=width,
        n_ff=width,
        n_expert=N_EXPERT,
        n_expert_used=2,
        n_vocab=0,
        n_ctx_train=0,
        moe_layers=LAYERS,
        file_size_bytes=offset,
        data_offset=64,
        header_sha256=bytes(32),
        metadata_sha256=bytes(32),
        hyper_parameters_sha256=bytes(32),
        tokenizer_sha256=bytes(32),
        template_sha256=bytes(32),
        tensors=tuple(tensors),
    )


def shard_of(*experts: int) -> ShardSet:
    """These experts of every layer."""
    return ShardSet.from_pairs((layer, expert) for layer in LAYERS for expert in experts)


EVERYTHING = shard_of(*range(N_EXPERT))
NOTHING = ShardSet()


def compute_rows(layer: int, x: Rows, row_of_pair: Indices, expert_of_pair: Indices) -> Rows:
    """The rows of these pairs, [pairs, width]."""
    factors = (expert_of_pair + 1).astype(np.float32)[:, np.newaxis]
    return np.asarray(x[row_of_pair] * factors + np.float32(100 * layer), np.float32)


def add_up(rows: Rows, row_of_pair: Indices, weight_of_pair: Rows) -> Rows:
    """The weighted sum of each row's pairs, in their order."""
    sums: list[Rows] = []
    for row, target, weight in zip(rows, row_of_pair.tolist(), weight_of_pair, strict=True):
        if target == len(sums):
            sums.append(row * weight)
        else:
            sums[target] = sums[target] + row * weight
    return np.array(sums, np.float32)


class ToyKernel:
    """A holder's kernel over toy experts; see `port.ExpertKernel`. Knows what it was asked, in `asked`."""

    backend = "toy"

    def __init__(self, shard: ShardSet = EVERYTHING, width: int = WIDTH) -> None:
        self.shard = shard
        self.width = width
        self.programs: list[ExpertProgram] = []
        self.asked: list[tuple[int, Rows, Indices]] = []
        self.failure: Exception | None = None
        self.is_closed = False

    @property
    def memory_bytes(self) -> int:
        return 0

    def add_program(self, program: ExpertProgram) -> int:
        self._require_open()
        if program == UNFIT_PROGRAM:
            raise RemoteProtocolError("the layer has no ffn_gate_exps.weight", "program_unfit")
        if program not in self.programs:
            self.programs.append(program)
        return self.programs.index(program)

    def row_widths(self, layer: int, program_index: int) -> tuple[int, int]:
        self._require_open()
        if layer not in self.shard.layers:
            raise RemoteProtocolError(f"layer {layer} is not held", "unknown_layer")
        if program_index >= len(self.programs):
            raise RemoteProtocolError(f"program {program_index} is not known", "unknown_program")
        return self.width, self.width

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
        self.row_widths(layer, program_index)
        if self.failure is not None:
            raise self.failure
        x = array_at(x_address, np.float32, n_rows, self.width)
        rows = array_at(row_of_pair_address, np.int32, n_pairs)
        experts = array_at(expert_of_pair_address, np.int32, n_pairs)
        if ((rows < 0) | (rows >= n_rows)).any():
            raise RemoteProtocolError("a pair names a row that is not there", "row_out_of_range")
        for expert in experts.tolist():
            if (layer, expert) not in self.shard:
                raise RemoteProtocolError(f"expert {expert} is not held", "foreign_expert")
        self.asked.append((layer, x[rows].copy(), experts.copy()))
        array_at(out_address, np.float32, n_pairs, self.width)[:] = compute_rows(layer, x, rows, experts)

    def close(self) -> None:
        self.is_closed = True

    def _require_open(self) -> None:
        if self.is_closed:
            raise LocalProtocolError("the kernel is closed")


class ToyCall(LayerCall):
    """One layer call as the hook would make it: after it `out` must equal `expected`.

    Row t of the input is `t, t + 1, ...`, so that a row tells its token. `out` begins as NaN. With `weights`
    [n_tokens, n_slots] it asks for sums.
    """

    def __init__(
        self,
        ids: list[list[int]],
        layer: int = LAYERS[0],
        width: int = WIDTH,
        weights: list[list[float]] | None = None,
    ) -> None:
        super().__init__()
        self.ids = np.array(ids, np.int32)
        n_tokens, n_slots = self.ids.shape
        self.x: Rows = (np.arange(n_tokens)[:, np.newaxis] + np.arange(width)).astype(np.float32)
        self.weights: Rows | None = None if weights is None else np.array(weights, np.float32)
        shape = (n_tokens, n_slots, width) if weights is None else (n_tokens, width)
        self.out: Rows = np.full(shape, np.nan, np.float32)
        self.layer, self.program_index = layer, 0
        self.n_tokens, self.n_slots = n_tokens, n_slots
        self.n_embd_in = self.n_embd_out = width
        self.x_rows = n_tokens
        self.x_address = self.x.ctypes.data
        self.ids_address = self.ids.ctypes.data
        self.out_address = self.out.ctypes.data
        self.weights_address = 0 if self.weights is None else self.weights.ctypes.data

    @property
    def expected(self) -> Rows:
        n_tokens, n_slots = self.ids.shape
        tokens = np.repeat(np.arange(n_tokens, dtype=np.int32), n_slots)
        rows = compute_rows(self.layer, self.x, tokens, self.ids.reshape(-1))
        if self.weights is not None:
            rows = add_up(rows, tokens, self.weights.reshape(-1))
        return rows.reshape(self.out.shape)

    @property
    def is_right(self) -> bool:
        return bool((self.out == self.expected).all())
