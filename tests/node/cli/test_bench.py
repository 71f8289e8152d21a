"""`bench` before it starts: what it refuses rather than fill a disk or make a machine swap."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvasir_node.bench.test_model import TestModelShape, write_test_model
from kvasir_node.cli import bench, main
from kvasir_proto.errors import EngineFailed, ModelUnusable

SMALL = TestModelShape(n_layer=1, n_embd=64, n_ff=32, n_expert=4, n_expert_used=2, n_head=2, n_head_kv=1)


def test_without_space_for_the_model_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert main(["--home", str(tmp_path), "bench", "--json"]) == ModelUnusable.exit_code
    assert "make room" in capsys.readouterr().err
    assert not list((tmp_path / "cache").iterdir())


def test_without_memory_for_three_copies_no_process_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "small.gguf"
    write_test_model(model, SMALL)
    monkeypatch.setattr(bench, "memory_bytes", lambda _: 3 * model.stat().st_size - 1)
    status = main(["--home", str(tmp_path / "home"), "bench", "--model", str(model), "--json"])
    assert status == EngineFailed.exit_code
    assert "3 copies" in capsys.readouterr().err
