"""Every type that llama.cpp's quantiser gives to experts: a sharded layer has the bits of a whole one.

The models are random and tiny, and llama.cpp itself quantises them; the reference is plain llama.cpp on the
quantised file. All in this process: real processes are compared in tests/loopback.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import pytest

from kvasir_node.model.backbone_file import write_backbone_file
from kvasir_node.model.model_manifest import build_manifest
from kvasir_proto.manifest import ModelManifest
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME
from tests.model_makers import ModelShape, file_types, make_gpt_oss, make_qwen3moe, quantise
from tests.node.hooked_llama import InProcessWorkers, Llama, hooked, shards_of

# Rows of 256 floats are one block of every K- and I-type.
SHAPE: Final = ModelShape(n_layer=2, n_embd=256, n_ff=256, n_expert=5, n_expert_used=2, head_size=64)
CHUNKS: Final = (44, 1, 1, 4)
"""The first gives some experts more than the 8 rows at which ggml's tiled kernels begin, others fewer."""

NOT_FOR_MATRICES: Final = {"i8", "i16", "i32", "i64", "f64"}

# What llama.cpp gives to experts in a model of two layers; mixtures are richer in larger ones.
EXPERT_TYPES: Final = {
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "Q1_0": "q1_0",
    "Q2_0": "q2_0",
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q8_0": "q8_0",
    "Q2_K": "q2_K q3_K",
    "Q2_K_S": "q2_K",
    "Q3_K_S": "q3_K",
    "Q3_K_M": "q3_K q4_K",
    "Q3_K_L": "q3_K q5_K",
    "Q4_K_S": "q4_K",
    "Q4_K_M": "q4_K q6_K",
    "Q5_K_S": "q5_K",
    "Q5_K_M": "q5_K q6_K",
    "Q6_K": "q6_K",
    "IQ1_S": "iq1_s",
    "IQ1_M": "iq1_m",
    "IQ2_XXS": "iq2_xxs",
    "IQ2_XS": "iq2_xs",
    "IQ2_S": "iq2_xs",
    "IQ2_M": "iq2_s",
    "IQ3_XXS": "iq3_xxs",
    "IQ3_XS": "iq3_xxs iq3_s",
    "IQ3_S": "iq3_s",
    "IQ3_M": "iq3_s",
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_xs",
    "TQ1_0": "tq1_0",
    "TQ2_0": "tq2_0",
    "MXFP4_MOE": "mxfp4",
}
WITHOUT_QUANTISER: Final = "NVFP4"
"""A file type that the quantiser refuses; it does write single tensors of it."""


def test_the_table_has_every_file_type_and_every_type_that_ggml_multiplies() -> None:
    assert set(EXPERT_TYPES) == set(file_types()) - {WITHOUT_QUANTISER}
    types = {each for types in EXPERT_TYPES.values() for each in types.split()} | {"nvfp4"}
    assert types == set(TENSOR_TYPES_BY_NAME) - NOT_FOR_MATRICES


def expert_types(manifest: ModelManifest) -> dict[str, str]:
    return {each.name: each.type.name for each in manifest.tensors if each.is_expert}


def require_exact(path: Path) -> ModelManifest:
    """Compare two shards with plain llama.cpp, prompt and single tokens."""
    manifest = build_manifest(path)
    backbone = path.with_suffix(".backbone")
    write_backbone_file(path, manifest, backbone)
    tokens = [int(each) for each in np.random.default_rng(5).integers(0, manifest.n_vocab, sum(CHUNKS))]
    with Llama(path) as plain:
        expected = plain.run(tokens, CHUNKS)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    workers = InProcessWorkers(path, manifest, shards_of(manifest, 2))
    hook = hooked(workers)
    with Llama(backbone, hook) as llama:
        rows = llama.run(tokens, CHUNKS)
    workers.close()
    hook.close()
    assert float(np.abs(rows - expected).max()) == 0.0
    return manifest


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3moe(tmp_path_factory.mktemp("source") / "source.gguf", SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("type_name", EXPERT_TYPES)
def test_every_file_type_is_exact(source: Path, type_name: str, tmp_path: Path) -> None:
    manifest = require_exact(quantise(source, tmp_path / "model.gguf", type_name))
    assert set(expert_types(manifest).values()) == set(EXPERT_TYPES[type_name].split())


@pytest.mark.parametrize(
    "types_of",
    [
        {"_exps": "nvfp4"},
        {"ffn_gate_exps": "q4_K", "ffn_up_exps": "q6_K", "ffn_down_exps": "q5_0"},
        {"ffn_gate_exps": "f16", "ffn_up_exps": "mxfp4", "ffn_down_exps": "tq2_0"},
        {r"blk\.0\.ffn_.*_exps": "iq4_nl", r"blk\.1\.ffn_.*_exps": "bf16"},
        {r"blk\.0\.ffn_up_exps": "q8_0", r"blk\.1\.ffn_gate_exps": "iq4_xs", "ffn_down_exps": "q3_K"},
    ],
)
def test_types_given_to_single_tensors_are_exact(
    source: Path, types_of: dict[str, str], tmp_path: Path
) -> None:
    path = quantise(source, tmp_path / "model.gguf", "Q4_1", types_of=types_of)
    types = set(expert_types(require_exact(path)).values())
    assert types == set(types_of.values()) | (types & {"q4_1"})


def test_rows_too_narrow_for_a_type_get_llama_cpps_fallback_and_are_exact(tmp_path: Path) -> None:
    """A width of 96 is no whole K-block: real models of odd widths mix types in this way."""
    narrow = ModelShape(n_layer=2, n_embd=256, n_ff=96, n_expert=5, n_expert_used=2, head_size=64)
    source = make_gpt_oss(tmp_path / "source.gguf", narrow)
    manifest = require_exact(quantise(source, tmp_path / "model.gguf", "Q4_K_M"))
    types = expert_types(manifest)
    assert types["blk.0.ffn_up_exps.weight"] == "q4_K"
    assert types["blk.0.ffn_down_exps.weight"] not in {"q4_K", "q6_K", "f32"}
    assert types["blk.0.ffn_down_exps.bias"] == "f32"
