"""`demo` as a user runs it: its report, and that nothing of it is left however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.loopback.daemons import PATIENCE_S, kvasir, wait_for

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

N_TOKENS = 24


def processes_that_mention(text: str) -> list[int]:
    """Ids of processes whose command line has this text in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in command:
                found.append(int(entry.name))
    return found


def test_a_worker_that_multiplies_by_a_factor_is_accused_alone_and_has_no_part_in_the_text(
    tmp_path: Path,
) -> None:
    arguments = ("--liar", "scaled", "--workers", "2", "--tokens", "8")
    command = kvasir("--home", str(tmp_path / "home"), "demo", "--json", *arguments)
    done = subprocess.run(command, capture_output=True, timeout=4 * PATIENCE_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    report = json.loads(done.stdout)
    (accused,) = report["audit"]["accused"]
    assert (report["passed"], report["text_equals_honest_run"]) == (True, True)
    assert (accused["node"], accused["verdict"]) == (report["audit"]["planted"], "quarantined")
    assert 3 <= accused["rows_touching_fault"] <= 300


def test_the_report_has_every_field_and_the_killed_worker_changed_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = kvasir("--home", str(home), "demo", "--json", "--kill-worker", "--tokens", str(N_TOKENS))
    done = subprocess.run(command, capture_output=True, timeout=4 * PATIENCE_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert [each["role"] for each in report["processes"]] == ["backbone", "worker", "worker", "worker"]
    assert all(each["backend"] == "ggml-cpu" for each in report["processes"])
    assert len({each["pid"] for each in report["processes"]}) == 4
    backbone, *workers = [each["node_id"] for each in report["processes"]]
    election = report["election"]
    assert election["backbone"] == backbone
    assert (election["epoch"], election["term"] >= 1, election["votes"] >= 1) == (0, True, True)
    placement = {each["node"]: each for each in report["placement"]}
    assert placement.keys() == {backbone, *workers}
    assert placement[backbone]["ranks"] == ["backbone"]
    assert all(placement[each]["ranks"] == ["output", "bulk"] for each in workers), "all are of one class"
    assert sum(placement[each]["experts"] for each in workers) >= 2 * 6 * 32, "each has two holders"
    model = report["model"]
    assert (model["arch"], model["n_layer"], model["n_expert"], model["n_expert_used"]) == (
        "qwen3moe",
        6,
        32,
        4,
    )
    assert report["tokens"] == N_TOKENS
    assert len(report["text"]) > 10
    exact = report["exact"]
    assert (exact["max_abs_logit_delta"], exact["top1_agreement"]) == (0.0, 1.0)
    assert exact["compared_positions"] > N_TOKENS
    assert report["router"]["worker_decisions"] == 0
    assert report["experts_missing_total"] == 0
    assert report["tokens_per_second"] > 0
    assert report["single_process_tokens_per_second"] > 0
    assert report["killed_pid"] in [each["pid"] for each in report["processes"]]
    assert report["rows_retried"] >= 1
    assert report["text_equals_uninterrupted"] is True
    assert b"info" not in done.stderr, "progress for people, no log of engines"
    assert [each.name for each in (home / "cache").iterdir()] == ["measurements"], "for the next time"
    assert processes_that_mention(str(home)) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_demo_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    home = tmp_path / "home"
    log_file = tmp_path / "log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            kvasir("--home", str(home), "demo", "--workers", "2"), stdout=log, stderr=log
        )
    try:
        wait_for(lambda: b"waiting until" in log_file.read_bytes(), "the start of all nodes")
        wait_for(lambda: len(processes_that_mention("kvasir_node.engine")) > 0, "an engine")
        process.send_signal(number)
        status = process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    wait_for(lambda: processes_that_mention(str(home)) == [], "the end of all nodes")
    if number is not signal.SIGKILL:
        assert status == 1
        assert [each.name for each in (home / "cache").iterdir()] == ["measurements"]
        assert "Traceback" not in log_file.read_text()


def test_a_worker_that_adds_in_f16_gets_bulk_experts_only_and_the_verdict_is_by_tolerance(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    command = kvasir("--home", str(home), "demo", "--json", "--mixed", "--tokens", str(N_TOKENS))
    done = subprocess.run(command, capture_output=True, timeout=4 * PATIENCE_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    report = json.loads(done.stdout)
    assert "exact" not in report, "equivalent is not exact"
    mixed, compared = report["mixed"], report["equivalent"]
    assert mixed["rows"] > 0
    assert compared["compared_positions"] > 256, "a verdict by tolerance needs more than a short text"
    assert compared["mean_kld"] <= mixed["mean_kld_max"]
    assert mixed["in_comparison"] is (compared["max_abs_logit_delta"] > 0.0)
    placement = {each["node"]: each for each in report["placement"]}
    assert [each["node"] for each in placement.values() if each["accumulation"] == "F16"] == [mixed["node"]]
    assert placement[mixed["node"]]["ranks"] == ["bulk"]
    assert sorted(path.name for path in (home / "cache").iterdir()) == [
        "demo-q8_0-f16-experts.gguf",
        "measurements",
    ]
