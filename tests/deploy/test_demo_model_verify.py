"""The check of deploy/demo-model: a tie between experts may go either way, and nothing else may differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.deploy.demo_model_scripts import load_script

verify = load_script("verify")
N_TOKENS, N_VOCAB = 6, 11


def draw(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(N_TOKENS, N_VOCAB)).astype(np.float32)


def reference(tmp_path: Path) -> Any:
    """Two windows: the first without a tie, the second with two and so four ways."""
    np.savez(
        tmp_path / "reference.npz",
        ids=np.zeros((2, N_TOKENS), dtype=np.int64),
        logits=np.stack([draw(seed) for seed in range(5)]),
        window_of=np.array([0, 1, 1, 1, 1]),
    )
    return verify.TorchLogits.load(tmp_path / "reference.npz")


def test_the_ways_of_each_window_are_kept_apart(tmp_path: Path) -> None:
    torch_logits = reference(tmp_path)
    assert [len(ways) for ways in torch_logits.logits] == [1, 4]
    assert torch_logits.n_ties == 2
    assert [way.tolist() for way in torch_logits.own_way()] == [draw(0).tolist(), draw(1).tolist()]


@pytest.mark.parametrize("way", [1, 2, 3, 4])
def test_any_way_of_breaking_ties_agrees(tmp_path: Path, way: int) -> None:
    torch_logits = reference(tmp_path)
    ours = [draw(0) + 1e-4, draw(way) - 1e-4]
    figures = verify.compare_logits(ours, torch_logits.nearest(ours))
    assert figures["max_abs_delta"] == pytest.approx(1e-4, rel=0.1)
    assert figures["top1_agreement"] == 1.0
    own = verify.compare_logits(ours, torch_logits.own_way())
    assert (own["max_abs_delta"] > 0.1) == (way != 1)


@pytest.mark.parametrize("window, position", [(0, 0), (0, 5), (1, 3)])
def test_one_wrong_logit_fails_the_gate_whatever_the_ties(tmp_path: Path, window: int, position: int) -> None:
    torch_logits = reference(tmp_path)
    ours = [draw(0), draw(3)]
    ours[window][position, 7] += 2 * verify.F32_LOGIT_DELTA_MAX
    figures = verify.compare_logits(ours, torch_logits.nearest(ours))
    held = verify.gates(sound_document() | {"f32_file_f32_kv_cache_ties_either_way": figures})
    assert [name for name, holds in held.items() if not holds] == ["float32 logits agree"]


def test_a_window_without_a_tie_has_one_way_only(tmp_path: Path) -> None:
    torch_logits = reference(tmp_path)
    ours = [draw(4), draw(1)]  # the first is a way of the second window
    figures = verify.compare_logits(ours, torch_logits.nearest(ours))
    assert figures["max_abs_delta"] > verify.F32_LOGIT_DELTA_MAX


def sound_document() -> dict[str, Any]:
    document = {
        "size_bytes": 1,
        "f32_file_f32_kv_cache_ties_either_way": {"max_abs_delta": 0.0},
        "q8_0_file_f16_kv_cache": {"mean_kl": 0.0, "top1_agreement": 1.0},
        "perplexity_torch_f32": 28.0,
        "perplexity_q8_0": 28.0,
        "tokenizer": {"strings": 1, "different": 0},
    }
    assert all(verify.gates(document).values())
    return document
