"""`doctor`: what it says about machines of every kind, and that it leaves no trace."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvasir_node.cli import doctor, main
from kvasir_node.ggml_devices import GgmlDevice
from kvasir_node.locations import locate
from kvasir_proto.limits import Kernel


def run_doctor(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, dict[str, object]]]:
    status = main([*arguments, "doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["schema_version"] == doctor.SCHEMA_VERSION
    return status, {check["name"]: check for check in document["checks"]}


def test_a_home_that_does_not_exist_is_fine_and_is_not_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "new"
    status, checks = run_doctor(capsys, "--home", str(home))
    assert not home.exists()
    wrong = [check for check in checks.values() if not check["ok"]]
    assert status == (1 if wrong else 0)
    assert checks["daemon"]["found"] == "not running"
    assert checks["ggml"]["ok"]
    assert {"python", "native library", "cpu", "memory", "disk", "tls", "boot clock", "devices"} <= set(
        checks
    )


def test_a_readable_identity_is_found_and_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = tmp_path / "identity.pem"
    identity.write_text("secret")
    identity.chmod(0o644)
    status, checks = run_doctor(capsys, "--home", str(tmp_path))
    assert status == 1
    assert not checks["home"]["ok"]
    assert "chmod 600" in str(checks["home"]["remedy"])
    assert identity.stat().st_mode & 0o777 == 0o644


def test_a_configuration_that_is_wrong_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kvasir.toml").write_text("lisen.port = 1\n")
    status, checks = run_doctor(capsys, "--home", str(tmp_path))
    assert status == 1
    assert "listen.port" in str(checks["configuration"]["found"])


def test_a_model_that_is_not_there_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kvasir.toml").write_text('model = "no-such"\n')
    status, checks = run_doctor(capsys, "--home", str(tmp_path))
    assert status == 1
    assert not checks["model"]["ok"]


def test_the_table_is_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--home", str(tmp_path), "doctor"])
    output = capsys.readouterr().out
    assert "boot clock" in output
    assert "{" not in output


@pytest.mark.loopback
def test_a_port_of_another_program_is_a_finding() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert not doctor.check_port("listen port", "127.0.0.1", port, running=False).ok
        assert doctor.check_port("listen port", "127.0.0.1", port, running=True).ok
    assert doctor.check_port("listen port", "127.0.0.1", 0, running=False).ok


def test_an_address_of_another_machine_is_a_finding() -> None:
    assert not doctor.check_port("listen port", "192.0.2.1", 0, running=False).ok


@pytest.mark.parametrize(
    "machine, features, ok",
    [
        ("x86_64", {"avx2"}, True),
        ("x86_64", {"sse2"}, False),
        ("aarch64", {"asimd"}, False),
        ("aarch64", {"asimddp"}, True),
        ("riscv64", {"v"}, True),
        ("x86_64", set(), True),
    ],
)
def test_processors_are_judged_by_what_matters(machine: str, features: set[str], ok: bool) -> None:
    assert doctor.check_cpu(machine, frozenset(features)).ok is ok


def test_too_little_memory_is_a_finding_and_an_unknown_amount_is_not() -> None:
    assert doctor.check_memory(None).ok
    assert doctor.check_memory(doctor.MEMORY_BYTES_MIN).ok
    assert not doctor.check_memory(doctor.MEMORY_BYTES_MIN - 1).ok


CPU = GgmlDevice("CPU", "some processor", "cpu", 0, 0, 1)
BLAS = GgmlDevice("BLAS", "OpenBLAS", "accelerator", 0, 0, 2)
CARD = GgmlDevice("CUDA0", "some card", "gpu", 1 << 30, 2 << 30, 3)


@pytest.mark.parametrize(
    "wanted, devices, backends, signs, ok, found, remedy",
    [
        ("none", [CPU], ["CPU"], set(), True, ["CPU (some processor)"], ""),
        ("auto", [CPU, BLAS], ["CPU", "BLAS"], set(), True, ["BLAS (OpenBLAS)"], ""),
        ("none", [CARD, CPU], ["CUDA", "CPU"], set(), True, ["CUDA0", "engine.device is none"], "auto"),
        ("auto", [CARD, CPU], ["CUDA", "CPU"], set(), True, ["CUDA0 (some card): the trunk's"], ""),
        ("cuda0", [CARD, CPU], ["CUDA", "CPU"], set(), True, ["the trunk's"], ""),
        ("CUDA1", [CARD, CPU], ["CUDA", "CPU"], set(), False, ["CUDA1", "has CUDA0"], "gpu.md"),
        ("CPU", [CPU], ["CPU"], set(), False, ["no graphics processor"], "engine.device"),
        ("auto", [CPU], ["Vulkan", "CPU"], set(), True, ["Vulkan: built in", "no device"], "driver"),
        ("none", [CPU], ["CPU"], {"/dev/kfd"}, True, ["AMD", "without ROCm or Vulkan"], "gpu.md"),
        ("none", [CPU], ["CUDA", "CPU"], {"/dev/nvidiactl"}, True, ["CUDA: built in"], "driver"),
    ],
)
def test_devices_are_named_with_why_one_is_not_used(
    wanted: str,
    devices: list[GgmlDevice],
    backends: list[str],
    signs: set[str],
    ok: bool,
    found: list[str],
    remedy: str,
) -> None:
    check = doctor.check_devices(wanted, devices, backends, frozenset(signs))
    assert check.ok is ok
    assert all(each in check.found for each in found)
    assert remedy in check.remedy
    assert bool(check.remedy) is bool(remedy)


def test_kernel_hosts_are_wrong_only_where_one_is_wanted_and_cannot_be_started() -> None:
    reasons: dict[Kernel, str] = {"ggml-sse2": "", "ggml-avx2": "it is not built here"}
    assert doctor.check_kernel_hosts("ggml-cpu", reasons) == doctor.Check("kernel hosts", True, "ggml-sse2")
    assert doctor.check_kernel_hosts("ggml-sse2", reasons).found == "ggml-sse2: the experts'"
    missing = doctor.check_kernel_hosts("ggml-avx2", reasons)
    assert (missing.ok, missing.found) == (False, "it is not built here")
    assert (Path(__file__).parents[3] / missing.remedy.split()[-1]).is_file()
    assert doctor.check_kernel_hosts("opencl", {"ggml-avx2": "no"}).found == "none is built"


@pytest.mark.parametrize("now_s, ok", [(0.0, False), (1.8e9, True), (float("nan"), False)])
def test_a_clock_before_this_release_is_wrong(now_s: float, ok: bool) -> None:
    assert doctor.check_wall_clock(now_s).ok is ok


def test_a_directory_of_another_user_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locations = locate(tmp_path, {})
    assert doctor.check_home(locations).ok
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert "another user" in doctor.check_home(locations).found


@pytest.mark.parametrize(
    "flag, remedy", [(os.ST_RDONLY, "mount its file system for writing"), (0, "chmod u+rwx")]
)
def test_a_home_that_cannot_be_written_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: int, remedy: str
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=flag))
    assert remedy in doctor.check_home(locate(tmp_path, {})).remedy
