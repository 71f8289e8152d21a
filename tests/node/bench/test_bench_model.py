"""The benchmark's model: the sizes it promises, the same bytes each time, and llama.cpp runs it."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvasir_node.bench.test_model import (
    BENCH_SHAPE,
    LAYER_SHAPE,
    TestModelShape,
    size_bytes_of,
    write_test_model,
)
from kvasir_node.model.model_manifest import build_manifest
from tests.plain_llama import decode_plainly

SMALL = TestModelShape(n_layer=2, n_embd=128, n_ff=64, n_expert=6, n_expert_used=2, n_head=4, n_head_kv=2)


def test_the_same_shape_gives_the_same_bytes_on_every_machine(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    write_test_model(tmp_path / "a.gguf", SMALL, lambda *each: done.append(each))
    data = (tmp_path / "a.gguf").read_bytes()
    assert hashlib.sha256(data).hexdigest() == SMALL_SHA256
    assert done == sorted(done)
    assert done[-1] == (len(data), len(data))


SMALL_SHA256 = "1dbd6a9269827a617bc1fb859f893a314316e1b7129850a2acf62dd90aef3191"


def test_the_small_one_is_a_model_that_runs(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_test_model(path, SMALL)
    manifest = build_manifest(path)
    assert (manifest.n_expert, manifest.n_expert_used, manifest.moe_layers) == (6, 2, (0, 1))
    assert {each.type.name for each in manifest.tensors if each.is_expert} == {"q8_0"}
    logits = decode_plainly(path, range(1, 20))
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3
    assert len(set(logits.argmax(axis=1))) > 5


def test_a_layer_of_q4_k_is_a_model_that_runs(tmp_path: Path) -> None:
    shape = dataclasses.replace(SMALL, n_layer=1, n_embd=256, n_ff=256, n_expert=8, expert_type="q4_K")
    path = tmp_path / "layer.gguf"
    write_test_model(path, shape)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == LAYER_SHA256
    manifest = build_manifest(path)
    assert {each.type.name for each in manifest.tensors if each.is_expert} == {"q4_K"}
    logits = decode_plainly(path, range(1, 20))
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


LAYER_SHA256 = "c616bb220989c7ad656a7c71792a6e31856b5a929ead3b8945c1d4c628d6141b"


def test_the_published_layer_has_its_sizes() -> None:
    one_expert_bytes = 3 * 3072 * 1024 // 256 * 144
    assert (LAYER_SHAPE.n_embd, LAYER_SHAPE.n_ff, LAYER_SHAPE.n_layer) == (3072, 1024, 1)
    assert (LAYER_SHAPE.n_expert, LAYER_SHAPE.n_expert_used) == (256, 8)
    assert 0 < size_bytes_of(LAYER_SHAPE) - 256 * one_expert_bytes < 16e6


def test_the_real_one_has_the_size_of_the_published_figures(tmp_path: Path) -> None:
    assert size_bytes_of() == pytest.approx(1.32e9, rel=0.005)
    assert BENCH_SHAPE.n_layer * BENCH_SHAPE.n_expert * 3 * 1024 * 512 // 32 * 34 == pytest.approx(
        1.28e9, rel=0.01
    )
    write_test_model(tmp_path / "small.gguf", SMALL)
    assert size_bytes_of(SMALL) == (tmp_path / "small.gguf").stat().st_size
