"""What a benchmark says about its machine, from the texts that Linux gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir_node.bench import machine


def test_x86_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").write_text("processor\t: 0\nmodel name\t: Some CPU 9000\nflags\t\t: fpu avx2 f16c\n")
    monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "cpu")
    assert machine.cpu_name() == "Some CPU 9000"
    assert machine.cpu_features() == {"fpu", "avx2", "f16c"}


def test_reading_memory_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ARRAY_BYTES", 1 << 20)
    assert 1e8 < machine.read_bandwidth(0.01) < 1e13


def test_arm_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").write_text("processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimddp\n")
    monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "cpu")
    assert "asimddp" in machine.cpu_features()
    assert machine.cpu_name() != ""


def test_memory_is_told_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").write_text("MemTotal:       16 kB\nMemAvailable:    8 kB\n")
    monkeypatch.setattr(machine, "_MEMORY_INFO", tmp_path / "memory")
    assert machine.memory_bytes("MemAvailable") == 8192
    assert machine.memory_bytes("SwapTotal") is None


def test_a_system_that_tells_nothing_is_described_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_CPU_INFO", "_MEMORY_INFO"):
        monkeypatch.setattr(machine, name, tmp_path / "missing")
    described = json.loads(json.dumps(machine.describe_machine()))
    assert described["memory_bytes"] is None
    assert described["cpus"] >= 1
    assert machine.cpu_features() == frozenset()
