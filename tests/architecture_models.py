"""Tiny random models of every Mixture-of-Experts architecture that the pinned llama.cpp builds.

One maker for all of them. An architecture is a row of `ARCHITECTURES`: the settings its header needs beyond
the common ones. Which tensors such a model has, and in which shapes, llama.cpp itself says: it is given the
header alone (`llama_model_init_from_user`) and asks for every tensor it would take. What it would take but
can do without (scales of single matrices, above all) is left out unless the row wants it.

Each row names the *shape* of its expert sub-graph (`SHAPES`): what the captured program must look like. The
weights are noise scaled so that activations stay near one and routing differs from token to token.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np

from tests.plain_llama import last_words, silence

Setting = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str] | None
Settings = Mapping[str, Setting]

N_LAYER: Final = 4
N_EMBD: Final = 256
N_HEAD: Final = 4
HEAD_SIZE: Final = N_EMBD // N_HEAD
N_VOCAB: Final = 96

_OFFSET_OF_SHAPE, _OFFSET_OF_NAME = 16, 256  # in ggml_tensor
_DECAY: Final = re.compile(r"ssm_a(\.weight)?$")
_NEAR_ONE: Final = re.compile(r"norm(?!.*\.bias$)|scale(\.weight)?$|^rope_freqs")
_NOT_NEEDED: Final = re.compile(r"\.(input_)?scale$|^rope_freqs\.weight$")

SHAPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "swiglu": "gate up swiglu down",
        "swiglu-weighted": "gate up swiglu down, a row for each slot",
        "swiglu-merged": "gate_up slice slice swiglu down",
        "swiglu-merged-precise": "gate_up slice slice swiglu down!",
        "swiglu-merged-scaled": "gate_up slice slice swiglu down scale multiply",
        "swiglu-scaled": "gate scale multiply up scale multiply swiglu down scale multiply",
        "swiglu-clamped": "gate silu clamp up clamp multiply down",
        "swiglu-clamp": "gate up swiglu_clamp down",
        "swiglu-oai": "gate up swiglu_oai down",
        "swiglu-oai-biased": "gate bias up bias swiglu_oai down bias",
        "geglu": "gate up geglu down",
        "geglu-merged-scaled": "gate_up slice slice geglu down scale multiply",
        "reglu": "gate up reglu down",
        "situ": "gate linear tanh linear sigmoid multiply up linear tanh linear multiply down",
        "situ-half": "gate linear tanh linear sigmoid multiply up multiply down",
        "silu": "up silu down",
        "gelu": "up gelu down",
        "relu-squared": "up relu square down",
        "relu-squared-scaled": "up scale multiply relu square down scale multiply",
    }
)
"""Every shape of expert sub-graph, by name: the steps of its program.

A matrix product is named by its matrix, with a `!` where more than ggml's usual precision is asked for.
"""

_BASE: Final[Settings] = MappingProxyType(
    {
        "vocab_size": N_VOCAB,
        "context_length": 2048,
        "embedding_length": N_EMBD,
        "block_count": N_LAYER,
        "leading_dense_block_count": 1,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "full_attention_interval": 2,
        "attention.head_count": N_HEAD,
        "attention.head_count_kv": N_HEAD,
        "attention.clamp_kqv": 4.0,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 64,
        "attention.sliding_window": 32,
        "attention.sliding_window_pattern": 2,
        "attention.indexer.head_count": 4,
        "attention.indexer.key_length": 64,
        "attention.indexer.top_k": 131072,
        "attention.indexer.block_size": 4,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.local_blocks": 1,
        "rope.dimension_sections": (16, 16, 16, 16),
        "expert_shared_feed_forward_length": 64,
        "expert_latent_length": 128,
        "interleave_moe_layer_step": 1,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_shared_count": 1,
        "expert_gating_func": 2,
        "expert_group_scale": 0.5,
        "experts_per_group": 2,
        "ssm.inner_size": 2 * N_EMBD,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 64,
        "ssm.time_step_rank": N_HEAD,
        "ssm.group_count": 2,
        "kda.head_dim": 64,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "shortconv.l_cache": 3,
        "residual_scale": 0.7,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
    }
)
"""What an architecture does not ask for it does not read."""

_LATENT: Final[Settings] = MappingProxyType(
    {
        "attention.head_count_kv": 1,
        "attention.key_length": 96,
        "attention.value_length": 64,
        "attention.key_length_mla": 64,
        "attention.value_length_mla": 64,
        "rope.dimension_count": 32,
    }
)
"""Latent attention: a cached row of 64 values and 32 rotated ones for all heads."""

_ALTERNATE: Final[Settings] = MappingProxyType({"attention.sliding_window_pattern": (1, 0, 1, 0)})
_SECOND_RECURRENT: Final[Settings] = MappingProxyType(
    {
        "attention.head_count": (N_HEAD, 0, N_HEAD, N_HEAD),
        "attention.head_count_kv": (N_HEAD, 0, N_HEAD, N_HEAD),
    }
)
_MANY: Final[Settings] = MappingProxyType({"expert_count": 272, "expert_feed_forward_length": 16})
"""So many experts that their numbers do not fit a byte; narrow, so that the model stays small."""


@dataclass(frozen=True)
class ArchitectureModel:
    """One model that `make_architecture` can make.

    `settings` are the header's beyond the common ones (None removes one); `keep` and `leave_out` are patterns
    of tensors' names: what to take though llama.cpp can do without, and what to leave out. `halve_merged`
    writes one merged gate_up matrix as its two halves. `memory` says what the trunk remembers of a sequence:
    "attention" (a cache of keys and values), "hybrid" (also states that cannot go back), "none" (it sees each
    batch for itself). Without `has_logits` it gives embeddings.
    """

    architecture: str
    shape: str
    settings: Settings = field(default_factory=dict)
    keep: str = ""
    leave_out: str = ""
    halve_merged: bool = False
    memory: str = "attention"
    has_logits: bool = True

    @property
    def name(self) -> str:
        """A name for tests and files."""
        return f"{self.architecture}-{self.shape}"


_HYPER: Final[Settings] = MappingProxyType(
    {
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 2,
        "hyper_connection.epsilon": 1e-6,
        "hyper_connection.low_rank": 8,
        "hyper_connection.magnitude": 2.0,
    }
)
_DEEPSEEK4: Final[Settings] = MappingProxyType(
    {
        **_HYPER,
        "attention.head_count": 8,
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "rope.dimension_count": 32,
        "attention.output_group_count": 8,
        "attention.output_lora_rank": 32,
        "attention.compress_ratios": (0, 0, 4, 128),
        "attention.compress_rope_freq_base": 160000.0,
        "hash_layer_count": 2,
        "swiglu_clamp_exp": 0.5,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
    }
)
_LINEAR_ATTENTION: Final[Settings] = MappingProxyType(
    {"ssm.inner_size": 256, "ssm.time_step_rank": 4, "ssm.state_size": 64}
)

_LATENT_RECURRENT: Final[Settings] = MappingProxyType(
    {
        **_LATENT,
        "attention.head_count": (N_HEAD, 0, N_HEAD, N_HEAD),
        "attention.head_count_kv": (1, 0, 1, 1),
    }
)
_NEMOTRON: Final[Settings] = MappingProxyType(
    {
        "attention.head_count": (N_HEAD, 0, 0, 0),
        "attention.head_count_kv": (N_HEAD, 0, 0, 0),
        "feed_forward_length": (0, 0, 32, 32),
    }
)
_SCALED: Final = r"_exps\.scale$"

ARCHITECTURES: Final[tuple[ArchitectureModel, ...]] = (
    ArchitectureModel("afmoe", "swiglu"),
    ArchitectureModel("arctic", "swiglu"),
    ArchitectureModel("bailingmoe", "swiglu"),
    ArchitectureModel("bailingmoe2", "swiglu"),
    ArchitectureModel(
        "bailingmoe3",
        "swiglu-clamped",
        {
            **_LATENT_RECURRENT,
            "swiglu_clamp_exp": (0.0, 0.5, 0.5, 0.5),
            "swiglu_clamp_shexp": (0.0, 5.0, 5.0, 5.0),
            "rope.dimension_sections": (4, 6, 6, 0),
        },
        memory="hybrid",
    ),
    ArchitectureModel("cohere2moe", "swiglu-merged", _ALTERNATE),
    ArchitectureModel("dbrx", "swiglu"),
    ArchitectureModel("deepseek", "swiglu"),
    ArchitectureModel("deepseek2", "swiglu", _LATENT, halve_merged=True),
    ArchitectureModel("deepseek2-ocr", "swiglu-merged"),
    ArchitectureModel("deepseek32", "swiglu-scaled", _LATENT, keep=_SCALED),
    ArchitectureModel("deepseek4", "swiglu-clamp", {**_DEEPSEEK4, **_MANY}, memory="hybrid"),
    ArchitectureModel(
        "dflash",
        "swiglu-clamp",
        {
            **_DEEPSEEK4,
            "attention.compress_ratios": (0, 0, 0, 0),
            "rope.dimension_sections": None,
            "target_layers": (0, 1),
        },
    ),
    ArchitectureModel("dots1", "swiglu", _MANY),
    ArchitectureModel(
        "dots3note",
        "swiglu",
        {
            **_LATENT,
            **_ALTERNATE,
            "attention.kv_lora_rank_swa": 64,
            "attention.key_length_swa": 96,
            "attention.value_length_swa": 64,
            "attention.key_length_mla_swa": 64,
            "attention.value_length_mla_swa": 64,
            "rope.freq_base_swa": 10000.0,
            "attention.indexer.types": (0, 1, 0, 1),
        },
    ),
    ArchitectureModel("ernie4_5-moe", "swiglu"),
    ArchitectureModel("exaone-moe", "swiglu"),
    ArchitectureModel(
        "gemma4",
        "geglu-merged-scaled",
        {
            **_ALTERNATE,
            "embedding_length_per_layer_input": 32,
            "attention.shared_kv_layers": 0,
            "attention.key_length_swa": 64,
            "attention.value_length_swa": 64,
            "rope.freq_base_swa": 10000.0,
        },
        keep=r"ffn_(gate_inp|down_exps)\.scale$|^rope_freqs",
    ),
    ArchitectureModel("glm-dsa", "swiglu", _LATENT),
    ArchitectureModel("glm4moe", "swiglu"),
    ArchitectureModel(
        "glm5-next",
        "swiglu-clamp",
        {
            **_LATENT,
            **_HYPER,
            "attention.key_length": 64,
            "attention.head_count_kv": (1, 0, 1, 1),
            "rope.dimension_count": 0,
            "swiglu_clamp_exp": 0.5,
        },
        memory="hybrid",
    ),
    ArchitectureModel("gpt-oss", "swiglu-oai-biased"),
    ArchitectureModel("granite", "swiglu"),
    ArchitectureModel("granite_swa", "swiglu-merged", _ALTERNATE),
    ArchitectureModel("granitehybrid", "swiglu", _SECOND_RECURRENT, memory="hybrid"),
    ArchitectureModel("granitemoe", "swiglu"),
    ArchitectureModel("grok", "geglu"),
    ArchitectureModel("grovemoe", "swiglu"),
    ArchitectureModel("hunyuan-moe", "swiglu"),
    ArchitectureModel("hy_v3", "swiglu-merged"),
    ArchitectureModel(
        "hy_v4",
        "swiglu-clamp",
        {
            **_LATENT,
            **_HYPER,
            "swiglu_clamp_exp": 0.5,
            "expert_weights_norm": True,
            "attention.indexer.types": (1, 0, 1, 0),
        },
    ),
    ArchitectureModel("jamba", "swiglu", _SECOND_RECURRENT, memory="hybrid"),
    ArchitectureModel("kimi-k3", "situ", _LATENT_RECURRENT, memory="hybrid"),
    ArchitectureModel(
        "kimi-k3",
        "situ-half",
        {**_LATENT_RECURRENT, **_MANY, "activation.situ_linear_beta": 0.0},
        memory="hybrid",
    ),
    ArchitectureModel("kimi-linear", "swiglu", _LATENT_RECURRENT, memory="hybrid"),
    ArchitectureModel("laguna", "swiglu"),
    ArchitectureModel("lfm2moe", "swiglu", _SECOND_RECURRENT, memory="hybrid"),
    ArchitectureModel("llada-moe", "swiglu", memory="none"),
    ArchitectureModel("llama", "swiglu-scaled", keep=_SCALED),
    ArchitectureModel("llama", "silu", leave_out="ffn_gate_exps"),
    ArchitectureModel("llama-embed", "swiglu", has_logits=False),
    ArchitectureModel("llama4", "swiglu-weighted", {"interleave_moe_layer_step": 2}),
    ArchitectureModel("maple", "swiglu-clamp", {**_ALTERNATE, "swiglu_clamp_exp": 0.5}),
    ArchitectureModel("mellum", "swiglu-scaled", keep=_SCALED),
    ArchitectureModel("mimo2", "swiglu", _ALTERNATE),
    ArchitectureModel("minicpm", "swiglu"),
    ArchitectureModel("minimax-01", "swiglu", memory="hybrid"),
    ArchitectureModel("minimax-m2", "swiglu"),
    ArchitectureModel("minimax-m3", "swiglu-oai", {"rope.dimension_count": 32}),
    ArchitectureModel("mistral3", "swiglu"),
    ArchitectureModel("mistral4", "swiglu-merged-precise", _LATENT),
    ArchitectureModel("nemotron_h", "relu-squared", {**_NEMOTRON, **_MANY}, memory="hybrid"),
    ArchitectureModel(
        "nemotron_h_moe", "relu-squared", {**_NEMOTRON, "moe_latent_size": 128}, memory="hybrid"
    ),
    ArchitectureModel("nemotron_h_moe", "relu-squared-scaled", _NEMOTRON, keep=_SCALED, memory="hybrid"),
    ArchitectureModel(
        "nomic-bert-moe",
        "gelu",
        {"moe_every_n_layers": 2, "tokenizer.ggml.token_type_count": 1},
        memory="none",
        has_logits=False,
    ),
    ArchitectureModel("olmoe", "swiglu"),
    ArchitectureModel("phimoe", "swiglu"),
    ArchitectureModel("qwen2moe", "swiglu"),
    ArchitectureModel("qwen35moe", "swiglu-merged-scaled", _LINEAR_ATTENTION, keep=_SCALED, memory="hybrid"),
    ArchitectureModel("qwen3moe", "swiglu"),
    ArchitectureModel("qwen3next", "swiglu-merged", {**_LINEAR_ATTENTION, **_MANY}, memory="hybrid"),
    ArchitectureModel("qwen3vlmoe", "swiglu"),
    ArchitectureModel(
        "qwen4exp",
        "swiglu-merged",
        {**_LINEAR_ATTENTION, **_HYPER, "attention.compress_ratios": (4, 4, 4, 4)},
        memory="hybrid",
    ),
    ArchitectureModel("rnd1", "swiglu", memory="none"),
    ArchitectureModel("smallthinker", "reglu"),
    ArchitectureModel("step35", "swiglu-clamped", {**_ALTERNATE, "swiglu_clamp_exp": 0.5}),
)
"""In the order of their names; one architecture more than once where it builds more than one shape."""

ONE_OF_EACH_SHAPE: Final[Mapping[str, ArchitectureModel]] = MappingProxyType(
    {
        shape: min(
            (model for model in ARCHITECTURES if model.shape == shape),
            key=lambda model: "expert_count" in model.settings,
        )
        for shape in SHAPES
    }
)
"""A model of each shape: where there is one, one of few experts, as wide as K-quants need."""


def make_architecture(path: Path, model: ArchitectureModel, *, n_ff: int = 32) -> Path:
    """Write the model: the same bytes for the same arguments.

    `n_ff` is the width of an expert's hidden row, except in models of many experts.
    """
    settings = {
        **_BASE,
        "feed_forward_length": n_ff,
        "expert_feed_forward_length": n_ff,
        **model.settings,
    }
    header = path.with_suffix(".header")
    _write(header, model.architecture, settings, {})
    try:
        wanted = _wanted_tensors(header)
    finally:
        header.unlink()
    tensors: dict[str, tuple[int, ...]] = {}
    for name, shape in wanted.items():
        needed = not _NOT_NEEDED.search(name) or (model.keep and re.search(model.keep, name))
        if not needed or (model.leave_out and re.search(model.leave_out, name)):
            continue
        if model.halve_merged and ".ffn_gate_up_exps." in name:
            for half in ("gate", "up"):
                tensors[name.replace("gate_up", half)] = (shape[0], shape[1] // 2, shape[2])
        else:
            tensors[name] = shape
    n_expert = settings["expert_count"]
    assert isinstance(n_expert, int)
    _write(
        path, model.architecture, settings, {each: _values(each, tensors[each], n_expert) for each in tensors}
    )
    return path


def _write(
    path: Path, architecture: str, settings: Settings, tensors: Mapping[str, np.ndarray[Any, Any]]
) -> None:
    """A GGUF file without a tokenizer."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in settings.items():
        if value is None:
            continue
        key = key if key.startswith(("general.", "tokenizer.")) else f"{architecture}.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, list(value))
    writer.add_tokenizer_model("none")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class _GgufInit(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def _wanted_tensors(header: Path) -> dict[str, tuple[int, ...]]:
    """The tensors llama.cpp would take for this header, with their shapes in ggml's order."""
    import llama_cpp

    silence()
    library = ctypes.CDLL("libggml-base.so.0")  # the copy that llama_cpp brought
    library.gguf_init_from_file.restype = ctypes.c_void_p
    metadata = library.gguf_init_from_file(bytes(header), _GgufInit(True, None))
    found: dict[str, tuple[int, ...]] = {}

    @llama_cpp.llama_model_set_tensor_data_t  # type: ignore[untyped-decorator]
    def note(tensor: int, _: int) -> None:
        shape = tuple((ctypes.c_int64 * 4).from_address(tensor + _OFFSET_OF_SHAPE))
        while len(shape) > 1 and shape[-1] == 1:
            shape = shape[:-1]
        found[ctypes.string_at(tensor + _OFFSET_OF_NAME).decode()] = shape

    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.load_mtp = True
    try:
        model = llama_cpp.llama_model_init_from_user(metadata, note, None, parameters)
        if not model:
            raise AssertionError(f"llama.cpp makes no model of {header.stem}: {last_words()}")
        llama_cpp.llama_model_free(model)
    finally:
        library.gguf_free(ctypes.c_void_p(metadata))
    return found


def _values(name: str, shape: tuple[int, ...], n_expert: int) -> np.ndarray[Any, Any]:
    """A tensor's noise, of numpy's shape; the same for the same name and shape."""
    draws = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    if name.endswith("tid2eid.weight"):  # different experts for each token
        table = [draws.permutation(n_expert)[: shape[0]] for _ in range(shape[1])]
        return np.array(table, np.int32)
    values = draws.standard_normal(shape[::-1], dtype=np.float32)
    if _DECAY.search(name):
        return -np.abs(values) - np.float32(0.1)
    if _NEAR_ONE.search(name):
        return 1 + np.float32(0.1) * values
    if len(shape) == 1:
        return np.float32(0.1) * values
    if name.startswith("token_embd"):
        return values
    spread = 4.0 if "ffn_gate_inp" in name else 1.0
    return np.float32(spread * shape[0] ** -0.5) * values
