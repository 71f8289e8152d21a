"""The tests' own models: llama.cpp runs every one of them, also with odd sizes and many experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.model_makers import MAKERS, QUANTISED_TYPES, ModelShape, make_qwen3moe, quantise
from tests.plain_llama import decode_plainly

TOKENS = range(1, 24)

SHAPES = {
    "default": ModelShape(),
    "odd sizes": ModelShape(n_embd=72, n_ff=40, n_expert=14, n_expert_used=3, seed=3),
    "wide, with a tokenizer": ModelShape(n_embd=256, n_ff=256, n_expert=6, tokenizer=True),
    "one slot": ModelShape(n_expert_used=1),
}


def check(path: Path) -> None:
    """The model runs, its logits are sane, and tokens make a difference."""
    logits = decode_plainly(path, TOKENS)
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10
    assert len(set(logits.argmax(axis=1))) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_runs_every_model(name: str, shape: str, tmp_path: Path) -> None:
    check(MAKERS[name](tmp_path / "model.gguf", SHAPES[shape]))


@pytest.mark.slow
@pytest.mark.parametrize("n_expert", [7, 257, 512])
def test_llama_cpp_runs_any_number_of_experts(n_expert: int, tmp_path: Path) -> None:
    shape = ModelShape(n_layer=1, n_expert=n_expert, n_expert_used=5)
    check(make_qwen3moe(tmp_path / "model.gguf", shape))


@pytest.mark.slow
@pytest.mark.parametrize("type_name", QUANTISED_TYPES)
def test_every_quantised_type_runs(type_name: str, tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "model.gguf", ModelShape(n_layer=2, n_embd=256, n_ff=256))
    check(quantise(source, tmp_path / "quantised.gguf", type_name))


def test_the_same_shape_gives_the_same_bytes(tmp_path: Path) -> None:
    first = make_qwen3moe(tmp_path / "a.gguf", ModelShape()).read_bytes()
    assert make_qwen3moe(tmp_path / "b.gguf", ModelShape()).read_bytes() == first
    assert make_qwen3moe(tmp_path / "c.gguf", replace(ModelShape(), seed=2)).read_bytes() != first
