"""What was measured of a kernel is found again, whole or not at all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir_node.certification.kept_measurements import KEPT_MAX, KeptMeasurements
from kvasir_proto.measured_kernel import KeptMeasurement, measurement_key
from kvasir_proto.messages.engine import CertifyKernel
from tests.node.driver.twins import measured_kernel

ASKED = CertifyKernel(1, "/m", 1, "ggml-cpu", "auto", "x86_64", "build", 0)
KEPT = KeptMeasurement(measured_kernel(ASKED), 7)
KEY = measurement_key("ggml-cpu", 1, b"model")


def file_of(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_what_was_kept_is_found_again_under_its_key_alone(tmp_path: Path) -> None:
    kept = KeptMeasurements(tmp_path / "made when needed")
    assert kept.load(KEY) is None
    kept.save(KEY, KEPT)
    assert kept.load(KEY) == KEPT
    assert kept.load(measurement_key("opencl", 1, b"model")) is None
    kept.save(KEY, replace(KEPT, measured_at=8))
    found = kept.load(KEY)
    assert found is not None
    assert found.measured_at == 8


@pytest.mark.parametrize("at", [0, 31, 32, 100, -1])
def test_a_file_with_another_byte_counts_as_none(tmp_path: Path, at: int) -> None:
    kept = KeptMeasurements(tmp_path)
    kept.save(KEY, KEPT)
    path = file_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert kept.load(KEY) is None


def test_a_file_of_another_key_or_no_file_at_all_counts_as_none(tmp_path: Path) -> None:
    kept = KeptMeasurements(tmp_path)
    kept.save(KEY, KEPT)
    other = measurement_key("ggml-cpu", 2, b"model")
    file_of(tmp_path).rename(tmp_path / f"{other.hex()[:32]}.measurement")
    assert kept.load(other) is None
    file_of(tmp_path).write_bytes(b"")
    assert kept.load(other) is None
    file_of(tmp_path).unlink()
    os.mkfifo(tmp_path / f"{other.hex()[:32]}.measurement")
    assert kept.load(other) is None


def test_the_oldest_goes_when_there_are_too_many(tmp_path: Path) -> None:
    kept = KeptMeasurements(tmp_path)
    keys = [measurement_key(number) for number in range(KEPT_MAX + 2)]
    for number, key in enumerate(keys):
        kept.save(key, KEPT)
        os.utime(tmp_path / f"{key.hex()[:32]}.measurement", (number, number))
    kept.save(keys[-1], KEPT)
    assert [kept.load(key) is None for key in keys] == [True, True] + [False] * KEPT_MAX


def test_the_oldest_goes_also_where_another_node_removes_files_meanwhile(tmp_path: Path) -> None:
    """Those that share a directory remove the same files: what was listed may be gone when looked at."""
    kept = KeptMeasurements(tmp_path)
    (tmp_path / "gone.measurement").symlink_to(tmp_path / "nowhere")
    keys = [measurement_key(number) for number in range(KEPT_MAX + 1)]
    for number, key in enumerate(keys):
        kept.save(key, KEPT)
        os.utime(tmp_path / f"{key.hex()[:32]}.measurement", (number + 1, number + 1))
    assert [kept.load(key) is None for key in keys] == [True] + [False] * KEPT_MAX


def test_a_directory_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    kept = KeptMeasurements(tmp_path / "file")
    kept.save(KEY, KEPT)
    assert kept.load(KEY) is None


def test_each_part_of_a_key_counts_by_itself() -> None:
    assert measurement_key("ab", "c") != measurement_key("a", "bc")
    assert measurement_key("a", b"b", 3) == measurement_key("a", b"b", 3)
