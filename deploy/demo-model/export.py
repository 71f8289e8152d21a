"""The trained weights as GGUF files, float32 (to verify against torch) and Q8_0 (what ships), and back.

Decides names, layouts, types and metadata. Tensors of two or more dimensions are quantised, but
for the routers: like llama.cpp's own quantiser, which keeps them in float32. gguf's Q8_0 rounds
as ggml does. Knows nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from model import Shape
from numpy.typing import NDArray
from tokenizer import END_OF_TEXT_ID
from torch import Tensor

ARCHITECTURE = "qwen3moe"
QUANTIZATION_VERSION = 2


def gguf_tensors(weights: dict[str, Tensor], shape: Shape) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """(GGUF name, values) of every tensor, in numpy's order of dimensions.

    Experts are [E, rows out, rows in], as ggml's MUL_MAT_ID reads them; queries and keys are not
    permuted, for the rotation is NEOX style on both sides. The output matrix is the embedding, so
    there is no `output.weight`.
    """

    def values(tensor: Tensor) -> NDArray[np.float32]:
        return tensor.detach().float().contiguous().numpy()

    yield "token_embd.weight", values(weights["embedding"])
    yield "output_norm.weight", values(weights["output_norm"])
    n_query, n_key = shape.n_head * shape.head_size, shape.n_head_kv * shape.head_size
    for index in range(shape.n_layer):
        ours = {
            name.removeprefix(f"layers.{index}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{index}.")
        }
        query, key, value = ours["qkv"].split([n_query, n_key, n_key])
        gate, up = ours["gate_up"].split(shape.n_ff_expert, 2)
        for name, tensor in (
            ("attn_norm", ours["attention_norm"]),
            ("attn_q", query),
            ("attn_k", key),
            ("attn_v", value),
            ("attn_q_norm", ours["query_norm"]),
            ("attn_k_norm", ours["key_norm"]),
            ("attn_output", ours["attention_output"]),
            ("ffn_norm", ours["expert_norm"]),
            ("ffn_gate_inp", ours["router"]),
            ("ffn_gate_exps", gate.transpose(1, 2)),
            ("ffn_up_exps", up.transpose(1, 2)),
            ("ffn_down_exps", ours["down"].transpose(1, 2)),
        ):
            yield f"blk.{index}.{name}.weight", values(tensor)


def add_metadata(writer: Any, shape: Shape, tokenizer_path: Path) -> None:
    """The model's sizes and its tokeniser."""
    writer.add_name("kvasir-demo-moe-21m")
    writer.add_description("A small mixture-of-experts language model, trained to demonstrate Kvasir")
    writer.add_license("Apache-2.0")
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff_expert * shape.n_expert_used)
    writer.add_expert_feed_forward_length(shape.n_ff_expert)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(shape.rms_epsilon)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_expert_count(shape.n_expert)
    writer.add_expert_used_count(shape.n_expert_used)
    writer.add_vocab_size(shape.n_vocab)

    trained = json.loads(tokenizer_path.read_text(encoding="utf-8"))["model"]
    tokens = sorted(trained["vocab"], key=trained["vocab"].__getitem__)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in trained["merges"]]
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    kinds[END_OF_TEXT_ID] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(END_OF_TEXT_ID)
    writer.add_eos_token_id(END_OF_TEXT_ID)
    writer.add_pad_token_id(END_OF_TEXT_ID)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def write_gguf(weights_path: Path, tokenizer_path: Path, destination: Path, quantised: bool) -> None:
    """Writes the model as Q8_0 when `quantised`, else as float32."""
    shape = Shape()
    writer = gguf.GGUFWriter(destination, ARCHITECTURE)
    add_metadata(writer, shape, tokenizer_path)
    file_type = gguf.LlamaFileType.MOSTLY_Q8_0 if quantised else gguf.LlamaFileType.ALL_F32
    writer.add_file_type(file_type)
    writer.add_quantization_version(QUANTIZATION_VERSION)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for name, values in gguf_tensors(torch.load(weights_path), shape):
        if quantised and values.ndim > 1 and "ffn_gate_inp" not in name:
            writer.add_tensor(name, gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights of a demo model's GGUF file, dequantised, as `DemoModel` names them."""
    shape = Shape()
    stored = {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        for tensor in gguf.GGUFReader(path).tensors
    }
    weights = {"embedding": stored["token_embd.weight"], "output_norm": stored["output_norm.weight"]}
    for index in range(shape.n_layer):

        def theirs(name: str, block: str = f"blk.{index}") -> Tensor:
            return stored[f"{block}.{name}.weight"]

        ours = {
            "attention_norm": theirs("attn_norm"),
            "query_norm": theirs("attn_q_norm"),
            "key_norm": theirs("attn_k_norm"),
            "qkv": torch.cat([theirs("attn_q"), theirs("attn_k"), theirs("attn_v")]),
            "attention_output": theirs("attn_output"),
            "expert_norm": theirs("ffn_norm"),
            "router": theirs("ffn_gate_inp"),
            "gate_up": torch.cat([theirs("ffn_gate_exps"), theirs("ffn_up_exps")], 1).transpose(1, 2),
            "down": theirs("ffn_down_exps").transpose(1, 2),
        }
        weights |= {f"layers.{index}.{name}": tensor.contiguous() for name, tensor in ours.items()}
    return weights
