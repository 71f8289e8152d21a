"""Real daemons of which one has the model's file: the others have its experts from members alone."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import trio

from kvasir_node.model.store import ModelStore
from kvasir_proto.manifest import ShardSet
from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir, run_session, wait_for
from tests.model_makers import ModelShape, make_qwen3moe

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

SHAPE = ModelShape(n_layer=2, n_embd=128, n_ff=256, n_expert=16)


def test_newcomers_get_their_experts_from_members_and_pass_over_one_whose_disk_is_damaged(
    tmp_path: Path,
) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", SHAPE)
    homes = [tmp_path / name for name in ("f", "w", "v")]
    command = kvasir("--home", str(homes[0]), "init", "--found", "--model", str(source))
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    founder = Daemon(homes[0], "--workers-min", "1", "--holders", "1")
    started = [founder]
    try:
        founder.start()
        address = founder.wait(lambda document: document["addresses"], "an address")["addresses"][0]
        first, second = [Daemon(home, "--bootstrap", address, "--ranks", "output,bulk") for home in homes[1:]]
        started.append(first)
        first.start()
        first.wait(lambda document: document["n_experts_held"] == 2 * 16, "every expert", 2 * PATIENCE_S)
        assert given_to(first) == {"node " + node_id_of(founder)}
        founder.wait_state("ready")
        assert len(trio.run(run_session, founder, 8)) == 8

        damage(first)
        started.append(second)
        second.start()
        second.wait(lambda document: document["n_experts_held"] > 0, "some experts", 2 * PATIENCE_S)
        check_disk(second)
        assert "giver_passed_over" in second.log_file.read_text()
        assert "is damaged" in second.log_file.read_text()
        wait_for(lambda: len(trio.run(run_session, founder, 8)) == 8, "an answer of all three")
    finally:
        for each in started:
            if each.process.poll() is None:
                each.kill(signal.SIGTERM)
        for each in started:
            each.wait_ended()
            each.end()


def node_id_of(daemon: Daemon) -> str:
    return str(daemon.wait(lambda document: document["node_id"], "a name")["node_id"])


def given_to(daemon: Daemon) -> set[str]:
    """Who gave this node experts, by its log."""
    lines = [each for each in daemon.log_file.read_text().splitlines() if "experts_fetched" in each]
    return {"node " + part.split("'")[0] for each in lines for part in each.split("'node ")[1:]}


def damage(daemon: Daemon) -> None:
    """Change a byte of each expert on its disk; what its engine has in memory stays as it is."""
    for path in daemon.home.rglob("experts/*/*/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def check_disk(daemon: Daemon) -> None:
    document: dict[str, Any] | None = daemon.status()
    assert document is not None
    (model,) = [each for each in ModelStore(daemon.home / "models").list() if each.source is None]
    shard = ShardSet.from_ranges(tuple(each) for each in document["shards"])
    assert len(shard)
    assert model.experts.missing(model.manifest, shard) == []
    assert model.experts.damaged(model.manifest, shard) == []
