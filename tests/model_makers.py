"""Tiny random Mixture-of-Experts models of any size, for tests that need sizes and tokenizers to be theirs.

Each maker writes one GGUF file, the same bytes for the same arguments, that llama.cpp loads and decodes.
The weights are noise scaled so that activations stay near one and routing differs from token to token.
Nothing here is a model that says anything: they exist to compare two ways of computing the same thing.
Every architecture that llama.cpp builds, in one size, is in `architecture_models`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

import gguf
import numpy as np

from kvasir_node.model.gguf_reader import read_gguf
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME
from tests.plain_llama import silence

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model; every maker takes one and ignores what its architecture does not have.

    qwen2moe and grok have no head size of their own: theirs is `n_embd / n_head`. With `tensors_a_part`
    the model is split into files of so many tensors, named as llama.cpp names them.
    """

    n_layer: int = 4
    n_embd: int = 64
    n_ff: int = 32
    n_expert: int = 8
    n_expert_used: int = 2
    n_head: int = 4
    n_head_kv: int = 2
    head_size: int = 16
    n_vocab: int = 96
    n_ctx_train: int = 2048
    seed: int = 1
    tokenizer: bool = False
    tensors_a_part: int = 0


class _Maker:
    """One file under construction: the writer, the draws, and the tensors every architecture has."""

    def __init__(
        self, path: Path, architecture: str, shape: ModelShape, *, cached_row: tuple[int, int] | None = None
    ) -> None:
        self.shape = shape
        self.draws = np.random.Generator(np.random.PCG64(shape.seed))
        self.writer = gguf.GGUFWriter(path, architecture, split_max_tensors=shape.tensors_a_part)
        self.n_vocab = shape.n_vocab
        writer = self.writer
        writer.add_name(f"random {architecture}")
        writer.add_context_length(shape.n_ctx_train)
        writer.add_embedding_length(shape.n_embd)
        writer.add_block_count(shape.n_layer)
        writer.add_feed_forward_length(2 * shape.n_ff)
        writer.add_head_count(shape.n_head)
        # Latent attention caches one row (key and value sizes) for all heads.
        key_size, value_size = cached_row or (shape.head_size, shape.head_size)
        writer.add_head_count_kv(1 if cached_row else shape.n_head_kv)
        writer.add_key_length(key_size)
        writer.add_value_length(value_size)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        if shape.n_expert:
            writer.add_expert_count(shape.n_expert)
            writer.add_expert_used_count(shape.n_expert_used)
            writer.add_expert_feed_forward_length(shape.n_ff)
        if shape.tokenizer:
            self._add_byte_tokenizer()
        else:
            writer.add_tokenizer_model("none")
        writer.add_vocab_size(self.n_vocab)
        self.matrix("token_embd.weight", shape.n_embd, self.n_vocab, scale=1.0)
        self.ones("output_norm.weight", shape.n_embd)
        self.matrix("output.weight", shape.n_embd, self.n_vocab)

    def _add_byte_tokenizer(self) -> None:
        """A byte-level BPE vocabulary: end of text, the 256 byte letters, and a few merges."""
        letters = _byte_letters()
        merges = [("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), (letters[32], "a")]
        tokens = [END_OF_TEXT, *letters, *(first + second for first, second in merges)]
        types = [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1)
        self.writer.add_tokenizer_model("gpt2")
        self.writer.add_tokenizer_pre("gpt-2")
        self.writer.add_token_list(tokens)
        self.writer.add_token_types(types)
        self.writer.add_token_merges([f"{first} {second}" for first, second in merges])
        self.writer.add_bos_token_id(0)
        self.writer.add_eos_token_id(0)
        self.writer.add_add_bos_token(False)
        self.n_vocab = len(tokens)

    def matrix(self, name: str, *shape: int, scale: float | None = None) -> None:
        """A random tensor of ggml `shape` (fastest first); by default rows of norm one."""
        if scale is None:
            scale = float(shape[0]) ** -0.5
        values = self.draws.standard_normal(shape[::-1], dtype=np.float32) * np.float32(scale)
        self.writer.add_tensor(name, values.astype(np.float32))

    def ones(self, name: str, *shape: int) -> None:
        """A norm's or scale's weights: near one, each different."""
        values = 1 + 0.1 * self.draws.standard_normal(shape[::-1], dtype=np.float32)
        self.writer.add_tensor(name, values.astype(np.float32))

    def attention(self, layer: int, *, biases: tuple[str, ...] = ()) -> None:
        """Grouped-query attention's matrices and its norm; `biases` names the matrices that have one."""
        shape = self.shape
        block = f"blk.{layer}."
        rows = {
            "attn_q": (shape.n_embd, shape.n_head * shape.head_size),
            "attn_k": (shape.n_embd, shape.n_head_kv * shape.head_size),
            "attn_v": (shape.n_embd, shape.n_head_kv * shape.head_size),
            "attn_output": (shape.n_head * shape.head_size, shape.n_embd),
        }
        self.ones(block + "attn_norm.weight", shape.n_embd)
        for name, (n_in, n_out) in rows.items():
            self.matrix(f"{block}{name}.weight", n_in, n_out)
            if name in biases:
                self.matrix(f"{block}{name}.bias", n_out, scale=0.1)

    def router(self, layer: int) -> None:
        """The router: logits wide enough that the chosen experts change from token to token."""
        shape = self.shape
        self.matrix(f"blk.{layer}.ffn_gate_inp.weight", shape.n_embd, shape.n_expert, scale=0.5)

    def experts(
        self, layer: int, *, merged: bool = False, scales: bool = False, biases: bool = False
    ) -> None:
        """The routed experts' matrices, with what may stand beside them."""
        shape = self.shape
        ups = {"gate_up": 2 * shape.n_ff} if merged else {"gate": shape.n_ff, "up": shape.n_ff}
        matrices = {name: (shape.n_embd, n_out) for name, n_out in ups.items()}
        matrices["down"] = (shape.n_ff, shape.n_embd)
        for name, (n_in, n_out) in matrices.items():
            stem = f"blk.{layer}.ffn_{name}_exps."
            self.matrix(stem + "weight", n_in, n_out, shape.n_expert)
            if scales:
                self.ones(stem + "scale", shape.n_expert)
            if biases:
                self.matrix(stem + "bias", n_out, shape.n_expert, scale=0.2)

    def feed_forward(self, layer: int, n_ff: int, kind: str = "") -> None:
        """A dense feed-forward block, or with `kind` "_shexp" the shared experts' one."""
        n_embd = self.shape.n_embd
        self.matrix(f"blk.{layer}.ffn_gate{kind}.weight", n_embd, n_ff)
        self.matrix(f"blk.{layer}.ffn_up{kind}.weight", n_embd, n_ff)
        self.matrix(f"blk.{layer}.ffn_down{kind}.weight", n_ff, n_embd)

    def finish(self) -> Path:
        """Write the file, or all parts; returns the path of the first."""
        first, *_ = self.writer.print_plan()
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return first


def make_qwen3moe(path: Path, shape: ModelShape = ModelShape(), *, scales: bool = False) -> Path:
    """SwiGLU with separate gate and up; with `scales`, one factor an expert on each matrix."""
    maker = _Maker(path, "qwen3moe", shape)
    for layer in range(shape.n_layer):
        maker.attention(layer)
        maker.ones(f"blk.{layer}.attn_q_norm.weight", shape.head_size)
        maker.ones(f"blk.{layer}.attn_k_norm.weight", shape.head_size)
        maker.ones(f"blk.{layer}.ffn_norm.weight", shape.n_embd)
        maker.router(layer)
        maker.experts(layer, scales=scales)
    return maker.finish()


def make_qwen2moe(path: Path, shape: ModelShape = ModelShape()) -> Path:
    """SwiGLU with a gated shared expert beside the routed ones, and attention biases."""
    shape = replace(shape, head_size=shape.n_embd // shape.n_head)
    maker = _Maker(path, "qwen2moe", shape)
    maker.writer.add_expert_shared_feed_forward_length(2 * shape.n_ff)
    for layer in range(shape.n_layer):
        maker.attention(layer, biases=("attn_q", "attn_k", "attn_v"))
        maker.ones(f"blk.{layer}.ffn_norm.weight", shape.n_embd)
        maker.router(layer)
        maker.experts(layer)
        maker.matrix(f"blk.{layer}.ffn_gate_inp_shexp.weight", shape.n_embd)
        maker.feed_forward(layer, 2 * shape.n_ff, "_shexp")
    return maker.finish()


def make_deepseek2(path: Path, shape: ModelShape = ModelShape(), *, merged: bool = False) -> Path:
    """Latent attention, a dense first layer, expert groups, a selection bias and a shared expert.

    `n_expert` must be even (two groups, both may be chosen from). `merged`: one gate_up matrix.
    """
    rope_size, latent_size, query_rank = 8, 32, 48
    nope_size = value_size = shape.head_size
    maker = _Maker(path, "deepseek2", shape, cached_row=(latent_size + rope_size, latent_size))
    writer = maker.writer
    writer.add_q_lora_rank(query_rank)
    writer.add_kv_lora_rank(latent_size)
    writer.add_key_length_mla(nope_size + rope_size)
    writer.add_value_length_mla(value_size)
    writer.add_rope_dimension_count(rope_size)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(2.5)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(2)
    writer.add_expert_group_used_count(1)
    for layer in range(shape.n_layer):
        block = f"blk.{layer}."
        maker.ones(block + "attn_norm.weight", shape.n_embd)
        maker.matrix(block + "attn_q_a.weight", shape.n_embd, query_rank)
        maker.ones(block + "attn_q_a_norm.weight", query_rank)
        maker.matrix(block + "attn_q_b.weight", query_rank, shape.n_head * (nope_size + rope_size))
        maker.matrix(block + "attn_kv_a_mqa.weight", shape.n_embd, latent_size + rope_size)
        maker.ones(block + "attn_kv_a_norm.weight", latent_size)
        maker.matrix(block + "attn_k_b.weight", nope_size, latent_size, shape.n_head)
        maker.matrix(block + "attn_v_b.weight", latent_size, value_size, shape.n_head)
        maker.matrix(block + "attn_output.weight", shape.n_head * value_size, shape.n_embd)
        maker.ones(block + "ffn_norm.weight", shape.n_embd)
        if layer == 0:
            maker.feed_forward(layer, 2 * shape.n_ff)
            continue
        maker.router(layer)
        maker.matrix(block + "exp_probs_b.bias", shape.n_expert, scale=0.05)
        maker.experts(layer, merged=merged)
        maker.feed_forward(layer, shape.n_ff, "_shexp")
    return maker.finish()


def make_gpt_oss(path: Path, shape: ModelShape = ModelShape()) -> Path:
    """Biases on every expert matrix and the clamped SwiGLU of that family, attention sinks."""
    maker = _Maker(path, "gpt-oss", shape)
    maker.writer.add_sliding_window(32)
    for layer in range(shape.n_layer):
        maker.attention(layer, biases=("attn_q", "attn_k", "attn_v", "attn_output"))
        maker.matrix(f"blk.{layer}.attn_sinks.weight", shape.n_head, scale=1.0)
        maker.ones(f"blk.{layer}.post_attention_norm.weight", shape.n_embd)
        maker.router(layer)
        maker.matrix(f"blk.{layer}.ffn_gate_inp.bias", shape.n_expert, scale=0.1)
        maker.experts(layer, biases=True)
    return maker.finish()


def make_llama4(path: Path, shape: ModelShape = ModelShape()) -> Path:
    """Routing weights applied before the experts (one row a slot), experts in every second layer.

    llama.cpp aborts with fewer than 4 layers: every fourth layer has no rotary embedding and its own input.
    """
    if shape.n_layer < 4:
        raise ValueError("llama.cpp runs no llama4 of fewer than 4 layers")
    maker = _Maker(path, "llama4", shape)
    maker.writer.add_interleave_moe_layer_step(2)
    maker.writer.add_rope_dimension_count(shape.head_size)
    for layer in range(shape.n_layer):
        maker.attention(layer)
        maker.ones(f"blk.{layer}.ffn_norm.weight", shape.n_embd)
        if layer % 2 == 0:
            maker.feed_forward(layer, 2 * shape.n_ff)
            continue
        maker.router(layer)
        maker.experts(layer)
        maker.feed_forward(layer, shape.n_ff, "_shexp")
    return maker.finish()


def make_grok(path: Path, shape: ModelShape = ModelShape()) -> Path:
    """GeGLU experts, with a norm after attention and after the feed-forward block."""
    shape = replace(shape, head_size=shape.n_embd // shape.n_head)
    maker = _Maker(path, "grok", shape)
    maker.writer.add_rope_dimension_count(shape.head_size)
    for layer in range(shape.n_layer):
        maker.attention(layer)
        maker.ones(f"blk.{layer}.attn_output_norm.weight", shape.n_embd)
        maker.ones(f"blk.{layer}.ffn_norm.weight", shape.n_embd)
        maker.router(layer)
        maker.experts(layer)
        maker.ones(f"blk.{layer}.layer_output_norm.weight", shape.n_embd)
    return maker.finish()


def make_dense(path: Path, shape: ModelShape = ModelShape()) -> Path:
    """A llama without any expert: what must be refused."""
    maker = _Maker(path, "llama", replace(shape, n_expert=0))
    maker.writer.add_rope_dimension_count(shape.head_size)
    for layer in range(shape.n_layer):
        maker.attention(layer)
        maker.ones(f"blk.{layer}.ffn_norm.weight", shape.n_embd)
        maker.feed_forward(layer, 2 * shape.n_ff)
    return maker.finish()


MAKERS: Mapping[str, Callable[[Path, ModelShape], Path]] = MappingProxyType(
    {
        "qwen3moe": make_qwen3moe,
        "qwen3moe-scales": lambda path, shape: make_qwen3moe(path, shape, scales=True),
        "qwen2moe": make_qwen2moe,
        "deepseek2": make_deepseek2,
        "deepseek2-merged": lambda path, shape: make_deepseek2(path, shape, merged=True),
        "gpt-oss": make_gpt_oss,
        "llama4": make_llama4,
        "grok": make_grok,
    }
)
"""The makers by name; a test that runs over all of them runs over these."""


@functools.cache
def file_types() -> Mapping[str, int]:
    """Every file type (`llama_ftype`) of the pinned llama.cpp by its usual name."""
    import llama_cpp

    name = re.compile("LLAMA_FTYPE_(?:ALL|MOSTLY)_(.+)")
    return {match[1]: getattr(llama_cpp, match[0]) for match in map(name.fullmatch, dir(llama_cpp)) if match}


QUANTISED_TYPES: Final = ("F16", "Q4_0", "Q8_0", "Q4_K_M", "BF16")
"""The file types that most models come in."""


def quantise(
    source: Path,
    destination: Path,
    type_name: str,
    *,
    types_of: Mapping[str, str] = MappingProxyType({}),
    pure: bool = False,
    keep_split: bool = False,
) -> Path:
    """Write `source` (F32) as `type_name` with llama.cpp's own quantiser.

    Rows that are not a whole number of blocks get llama.cpp's fallback type, as in real files. `types_of`
    gives tensors another type: a pattern of their names, and ggml's name of the type. `pure`: the one type
    everywhere, not llama.cpp's mixture. With `keep_split` a split model stays one, and `destination` is what
    its parts' names begin with. The types that cannot do without get an importance matrix, in which
    each column of a matrix matters differently.
    """
    import llama_cpp

    silence()
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = file_types()[type_name]
    parameters.nthread = 1
    parameters.pure = pure
    parameters.keep_split = keep_split
    wanted = {type_name, *(each.upper() for each in types_of.values())}
    importance = _importance_of(source) if wanted & _NEEDING_IMPORTANCE else None
    if importance is not None:
        parameters.imatrix = importance
    overrides = (llama_cpp.llama_model_tensor_override * (len(types_of) + 1))()
    for place, (pattern, name) in zip(overrides, types_of.items(), strict=False):
        place.pattern = pattern.encode()
        place.type = TENSOR_TYPES_BY_NAME[name].id
    if types_of:
        parameters.tt_overrides = overrides
    code = llama_cpp.llama_model_quantize(bytes(source), bytes(destination), parameters)
    if code != 0:
        raise AssertionError(f"llama.cpp could not write {source.name} as {type_name}: {code}")
    return destination


_NEEDING_IMPORTANCE: Final = frozenset(
    [
        "IQ1_S",
        "IQ1_M",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ2_M",
        "IQ3_XXS",
        "IQ3_XS",
        "Q2_K_S",
    ]  # by name or by what they mix in
)


def _importance_of(source: Path) -> object:
    """An importance matrix for every tensor of a model: for each expert a positive number a column."""
    import llama_cpp

    tensors = [each for each in read_gguf(source).tensors if len(each.shape) > 1]
    entries = (llama_cpp.llama_model_imatrix_data * (len(tensors) + 1))()
    draws = np.random.Generator(np.random.PCG64(1))
    for entry, tensor in zip(entries, tensors, strict=False):
        count = tensor.shape[0] * (tensor.shape[2] if len(tensor.shape) > 2 else 1)
        values = draws.uniform(0.5, 1.5, count).astype(np.float32)
        entry.name = tensor.name.encode()
        entry.data = np.ctypeslib.as_ctypes(values)
        entry.size = count
    return entries


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE uses for each byte, in the order of the bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters = []
    shifted = 256
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(shifted))
            shifted += 1
    return letters
