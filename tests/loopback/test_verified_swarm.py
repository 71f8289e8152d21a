"""Real daemons of a swarm that verifies: a worker is challenged, and then it serves output layers."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir
from tests.model_makers import ModelShape, make_qwen3moe

pytestmark = [pytest.mark.loopback, pytest.mark.slow]


def test_a_worker_is_verified_by_the_founder_and_serves_output_layers(tmp_path: Path) -> None:
    shape = ModelShape(n_layer=2, n_expert=4, n_embd=64, n_ff=64)
    model = make_qwen3moe(tmp_path / "tiny.gguf", shape)
    home = tmp_path / "f"
    rules = ("--found", "--certificates", "verified", "--model", str(model))
    founded = kvasir("--home", str(home), "init", *rules)
    subprocess.run(founded, check=True, capture_output=True, timeout=PATIENCE_S)
    founder = Daemon(home)
    daemons = [founder]
    try:
        founder.start()
        address = founder.wait(lambda document: document["addresses"], "an address")["addresses"][0]
        ranks = ("--ranks", "output,bulk")
        worker = Daemon(tmp_path / "w", "--bootstrap", address, "--model", str(model), *ranks)
        daemons.append(worker)
        worker.start()
        own = worker.wait(lambda document: document["certificate"] == "verified", "its verdict")
        assert own["accumulation"] == "F32"
        document = founder.wait(
            lambda document: document["members"][0]["ranks"] == ["output", "bulk"], "the output layers"
        )
        (member,) = document["members"]
        assert (member["certificate"], document["certificates"]) == ("verified", "verified")
        founder.wait_state("ready")
        assert "holder_challenged" in founder.log()
        for daemon in daemons:
            daemon.kill(signal.SIGTERM)
        for daemon in daemons:
            assert daemon.wait_ended() == 0, daemon.log()
    finally:
        for daemon in daemons:
            daemon.end()
