"""Real processes on models that are not like the others: states beside caches, gates of other kinds.

Few, since they are slow: that every architecture is exact is shown in one process (`test_architectures.py`).
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import trio

from kvasir_node.cli import main
from kvasir_node.local_swarm import RunSettings, evaluate_logits, start_local_swarm, start_reference
from kvasir_node.measure.logits import random_tokens
from kvasir_node.model.store import ModelStore
from kvasir_proto.errors import ModelUnusable
from tests import shapes
from tests.architecture_models import ARCHITECTURES, make_architecture
from tests.shapes import make_model

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

MODELS = {model.name: model for model in ARCHITECTURES}


@pytest.mark.parametrize(
    "name, type_name", [("qwen35moe-swiglu-merged-scaled", "Q4_K_M"), ("kimi-k3-situ-half", "Q8_0")]
)
def test_hybrid_trunks_are_exact(
    name: str, type_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_model(tmp_path, MODELS[name], type_name)
    options = ["--positions", "60", "--workers", "3", "--require-exact", "--json"]
    status = main(["--home", str(tmp_path / "home"), "measure", "logits", "--model", str(model), *options])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    document = json.loads(captured.out)
    assert document["max_abs_delta"] == 0.0
    assert document["hook_calls"] == document["moe_layers"] * document["ubatches"]
    assert (document["backbone_expert_bytes"], document["experts_missing_total"]) == (0, 0)


def test_a_model_without_a_sequence_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_architecture(tmp_path / "model.gguf", MODELS["rnd1-swiglu"])
    status = main(["--home", str(tmp_path / "home"), "measure", "logits", "--model", str(model)])
    assert status == ModelUnusable.exit_code
    assert "does not write text token by token" in capsys.readouterr().err


def test_a_stopped_worker_costs_a_recurrent_state_nothing(tmp_path: Path) -> None:
    """Its rows come late and are asked of another holder before the decode returns: nothing goes back."""
    trio.run(_compare_with_a_stopped_worker, tmp_path)


async def _compare_with_a_stopped_worker(directory: Path) -> None:
    path = make_architecture(directory / "model.gguf", MODELS["jamba-swiglu"])
    model = ModelStore(directory / "models").add(path)
    settings = RunSettings(n_ctx=256, n_ubatch=16)
    tokens = random_tokens(40, model.manifest.n_vocab, seed=5)
    chunks = (30, *[1] * 10)
    async with trio.open_nursery() as nursery:
        reference, _ = await start_reference(nursery, model, settings, directory)
        await evaluate_logits(reference, tokens, chunks, directory / "single.npy")
        await reference.close()
        swarm = await start_local_swarm(nursery, model, settings, directory, n_workers=2, holders=2)
        os.kill(swarm.workers[0].pid, signal.SIGSTOP)
        try:
            evaluated = await evaluate_logits(swarm.backbone, tokens, chunks, directory / "swarm.npy")
        finally:
            os.kill(swarm.workers[0].pid, signal.SIGCONT)
        assert evaluated.rows_retried > 0
        for engine in (swarm.backbone, *swarm.workers):
            await engine.close()
    difference = np.load(directory / "swarm.npy") - np.load(directory / "single.npy")
    assert np.abs(difference).max() == 0.0


@pytest.mark.parametrize("arguments", [["--type", "Q9"], ["["]], ids=["no such type", "no such pattern"])
def test_wrong_arguments_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        shapes.main(arguments)
    assert caught.value.code == 2
    assert arguments[-1] in capsys.readouterr().err
