"""`measure layer` with real processes on a layer of noise: exact, every figure there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir_node.bench.test_model import TestModelShape, write_test_model
from kvasir_node.cli import main, measure
from kvasir_proto.errors import ConfigurationInvalid, UsageError

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

TWO_LAYERS = TestModelShape(n_layer=2, n_embd=64, n_ff=32, n_expert=6, n_expert_used=2, n_head=2, n_head_kv=1)
ONE_LAYER = TestModelShape(
    n_layer=1, n_embd=256, n_ff=256, n_expert=6, n_expert_used=2, n_head=2, n_head_kv=1, expert_type="q4_K"
)


def test_a_layers_call_is_measured_beside_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 1e9)
    write_test_model(tmp_path / "layer.gguf", ONE_LAYER)
    arguments = ["--model", str(tmp_path / "layer.gguf"), "--batches", "1,8", "--calls", "2", "--rounds", "1"]
    command = ["--home", str(tmp_path), "measure", "layer", *arguments, "--require-exact", "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["max_abs_delta"], document["positions"]) == (0.0, 2 * (2 + 16))
    one, eight = document["calls"]
    assert (one["tokens"], eight["tokens"], one["calls"]) == (1, 8, 2)
    assert 0 < one["call_us"] <= one["step_us"]
    assert one["expert_bytes_expected"] == 2 * 3 * 256 * 256 // 256 * 144
    assert one["roofline_us"] == pytest.approx(one["expert_bytes_expected"] / 1e3, abs=0.1)
    assert eight["received_bytes"] > 8 * 2 * 4 * 256
    assert eight["sent_bytes"] > one["sent_bytes"]


def test_two_layers_are_no_layer_and_a_device_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "read_bandwidth", lambda: 1e9)
    write_test_model(tmp_path / "model.gguf", TWO_LAYERS)
    model = str(tmp_path / "model.gguf")
    assert main(["--home", str(tmp_path), "measure", "layer", "--model", model]) == UsageError.exit_code
    assert "one MoE layer" in capsys.readouterr().err
    command = ["--home", str(tmp_path), "measure", "logits", "--model", model, "--device", "NoSuch0"]
    assert main(command) == ConfigurationInvalid.exit_code
    assert "'NoSuch0'" in capsys.readouterr().err
