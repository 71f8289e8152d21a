"""The models that benchmarks run on: large enough to be memory-bound, made on the spot from noise.

Decides their sizes (those of the measurements in the design: 12 layers of 64 experts in Q8_0; and one layer
of 256 wide experts in Q4_K, the shape of the published figures) and writes them quickly: random blocks
straight to the file, with scales that keep activations near one. The same arguments give the same bytes on
every machine. A model of noise says nothing, has no tokenizer, and is never shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvasir_node.model.gguf_format import (
    ALIGNMENT_DEFAULT,
    GgufTensor,
    MetadataEntry,
    float_entry,
    integer_entry,
    text_entry,
)
from kvasir_node.model.gguf_writer import lay_out, new_file
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME, TensorType

_Q8_0: Final = TENSOR_TYPES_BY_NAME["q8_0"]
_Q4_K: Final = TENSOR_TYPES_BY_NAME["q4_K"]
_F32: Final = TENSOR_TYPES_BY_NAME["f32"]
_QUANT_DEVIATION: Final = 73.6
"""Standard deviation of a uniform draw from -127..127."""

_Q4_K_DEVIATION: Final = 258.0
_Q4_K_MEAN_QUANT: Final = 7.5
"""Of scale x quant - 7.5 x minimum, where quants are drawn from 0..15, scales and minima from 0..63."""

_PIECE_BLOCKS: Final = 1 << 15
"""How many blocks (34 or 144 bytes each) are made at a time."""


@dataclass(frozen=True)
class TestModelShape:
    """The sizes of a test model. `n_embd` and `n_ff` are multiples of 32, the block of Q8_0.

    `expert_type` is `q8_0` or `q4_K`, whose block is 256 long; whatever is no expert is Q8_0 or F32.
    """

    __test__ = False  # the name begins like a test's, but pytest has nothing to collect here

    n_layer: int = 12
    n_embd: int = 1024
    n_ff: int = 512
    n_expert: int = 64
    n_expert_used: int = 8
    n_head: int = 16
    n_head_kv: int = 4
    head_size: int = 64
    n_vocab: int = 512
    n_ctx_train: int = 4096
    expert_type: Literal["q8_0", "q4_K"] = "q8_0"
    seed: int = 1


BENCH_SHAPE: Final = TestModelShape()
"""The model of the prototype's figures: 1.32 GB, of which 1.28 GB are experts."""

LAYER_SHAPE: Final = TestModelShape(
    n_layer=1,
    n_embd=3072,
    n_ff=1024,
    n_expert=256,
    n_expert_used=8,
    n_head=8,
    n_head_kv=2,
    n_vocab=256,
    expert_type="q4_K",
)
"""One layer of the shape of the published figures, little around it: 1.37 GB, 1.36 of them experts."""


def write_test_model(
    path: Path, shape: TestModelShape = BENCH_SHAPE, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write a random qwen3moe model of quantised matrices and F32 norms and routers at `path`.

    `progress` is told (bytes done, bytes in all). Raises `ModelUnusable` when the file cannot be written.
    """
    header, tensors, size_bytes = lay_out(_metadata(shape), _tensors(shape), ALIGNMENT_DEFAULT)
    draws = np.random.PCG64(shape.seed)
    with new_file(path) as file:
        file.write(header)
        for tensor in tensors:
            file.seek(tensor.offset)
            for piece in _pieces(tensor, draws):
                file.write(piece)
            if progress is not None:
                progress(tensor.offset + tensor.size_bytes, size_bytes)
        file.truncate(size_bytes)


def size_bytes_of(shape: TestModelShape = BENCH_SHAPE) -> int:
    """The size of the file that `write_test_model` writes."""
    return lay_out(_metadata(shape), _tensors(shape), ALIGNMENT_DEFAULT)[2]


def _metadata(shape: TestModelShape) -> tuple[MetadataEntry, ...]:
    key = "qwen3moe."
    return (
        text_entry("general.architecture", "qwen3moe"),
        text_entry("general.name", "kvasir test model"),
        integer_entry("general.file_type", 7),
        integer_entry("general.quantization_version", 2),
        integer_entry(key + "block_count", shape.n_layer),
        integer_entry(key + "context_length", shape.n_ctx_train),
        integer_entry(key + "embedding_length", shape.n_embd),
        integer_entry(key + "feed_forward_length", shape.n_ff),
        integer_entry(key + "attention.head_count", shape.n_head),
        integer_entry(key + "attention.head_count_kv", shape.n_head_kv),
        integer_entry(key + "attention.key_length", shape.head_size),
        integer_entry(key + "attention.value_length", shape.head_size),
        float_entry(key + "attention.layer_norm_rms_epsilon", 1e-6),
        float_entry(key + "rope.freq_base", 10000.0),
        integer_entry(key + "expert_count", shape.n_expert),
        integer_entry(key + "expert_used_count", shape.n_expert_used),
        integer_entry(key + "expert_feed_forward_length", shape.n_ff),
        integer_entry(key + "vocab_size", shape.n_vocab),
        text_entry("tokenizer.ggml.model", "none"),
    )


def _tensors(shape: TestModelShape) -> list[tuple[str, TensorType, tuple[int, ...]]]:
    """(name, type, shape) of every tensor, in the file's order."""
    n_embd, n_ff, n_expert = shape.n_embd, shape.n_ff, shape.n_expert
    experts = TENSOR_TYPES_BY_NAME[shape.expert_type]
    n_query, n_key = shape.n_head * shape.head_size, shape.n_head_kv * shape.head_size
    tensors = [
        ("token_embd.weight", _Q8_0, (n_embd, shape.n_vocab)),
        ("output_norm.weight", _F32, (n_embd,)),
        ("output.weight", _Q8_0, (n_embd, shape.n_vocab)),
    ]
    for layer in range(shape.n_layer):
        in_layer: dict[str, tuple[TensorType, tuple[int, ...]]] = {
            "attn_norm": (_F32, (n_embd,)),
            "attn_q": (_Q8_0, (n_embd, n_query)),
            "attn_k": (_Q8_0, (n_embd, n_key)),
            "attn_v": (_Q8_0, (n_embd, n_key)),
            "attn_output": (_Q8_0, (n_query, n_embd)),
            "attn_q_norm": (_F32, (shape.head_size,)),
            "attn_k_norm": (_F32, (shape.head_size,)),
            "ffn_norm": (_F32, (n_embd,)),
            "ffn_gate_inp": (_F32, (n_embd, n_expert)),
            "ffn_gate_exps": (experts, (n_embd, n_ff, n_expert)),
            "ffn_up_exps": (experts, (n_embd, n_ff, n_expert)),
            "ffn_down_exps": (experts, (n_ff, n_embd, n_expert)),
        }
        tensors += [(f"blk.{layer}.{name}.weight", *each) for name, each in in_layer.items()]
    return tensors


def _pieces(tensor: GgufTensor, draws: np.random.PCG64) -> Iterator[bytes]:
    """The tensor's bytes. Matrices have rows of norm one, the router is wider so that routing varies."""
    deviation = 0.5 if "ffn_gate_inp" in tensor.name else tensor.shape[0] ** -0.5
    if tensor.type is _F32:
        if len(tensor.shape) == 1:
            yield np.ones(tensor.shape, "<f4").tobytes()
        else:
            quants = _quants(draws, tensor.size_bytes // 4)
            yield (quants * np.float32(deviation / _QUANT_DEVIATION)).astype("<f4").tobytes()
        return
    n_block = tensor.size_bytes // tensor.type.block_size_bytes
    if tensor.name == "token_embd.weight":
        deviation = 1.0
    blocks = _q4_k_blocks if tensor.type is _Q4_K else _q8_0_blocks
    for begin in range(0, n_block, _PIECE_BLOCKS):
        yield blocks(draws, min(_PIECE_BLOCKS, n_block - begin), deviation)


def _q8_0_blocks(draws: np.random.PCG64, n_block: int, deviation: float) -> bytes:
    """Blocks of one F16 scale and 32 signed quants."""
    blocks = np.empty((n_block, _Q8_0.block_size_bytes), np.uint8)
    blocks[:, :2] = np.array([deviation / _QUANT_DEVIATION], "<f2").view(np.uint8)
    blocks[:, 2:] = _quants(draws, n_block * 32).view(np.uint8).reshape(n_block, 32)
    return blocks.tobytes()


def _q4_k_blocks(draws: np.random.PCG64, n_block: int, deviation: float) -> bytes:
    """Blocks of two F16 factors, then 12 bytes of 6-bit scales and minima and 128 of 4-bit quants."""
    blocks = np.empty((n_block, _Q4_K.block_size_bytes), np.uint8)
    scale = deviation / _Q4_K_DEVIATION
    blocks[:, :4] = np.array([scale, scale * _Q4_K_MEAN_QUANT], "<f2").view(np.uint8)
    packed_bytes = _Q4_K.block_size_bytes - 4
    raw = np.asarray(draws.random_raw(-(-n_block * packed_bytes // 8)), "<u8").view(np.uint8)
    blocks[:, 4:] = raw[: n_block * packed_bytes].reshape(n_block, packed_bytes)
    return blocks.tobytes()


def _quants(draws: np.random.PCG64, count: int) -> npt.NDArray[np.int8]:
    """`count` draws from -127..127, from the generator's raw numbers: the same on every machine."""
    raw = np.asarray(draws.random_raw(-(-count // 8)), "<u8").view(np.int8)[:count]
    return np.maximum(raw, np.int8(-127))
