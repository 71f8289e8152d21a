"""Real daemons and a model that is on a web server only: each node fetches what its plan gives it, once."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
from pathlib import Path

import pytest
import trio

from kvasir_node.model.store import ModelStore
from kvasir_proto.manifest import ShardSet
from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir, run_session, wait_for
from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.model.misbehaving_server import Answering, serving

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

SHAPE = ModelShape(n_layer=2, n_embd=128, n_ff=256, n_expert=16)
N_CUTS = 4
HEADER_STEP_BYTES = 256 << 10
"""In which headers are read: what lies behind them comes twice."""


def succeed(*arguments: str) -> None:
    done = subprocess.run(kvasir(*arguments), check=False, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_nodes_fetch_their_shards_from_a_server_that_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVASIR_MODELS_GIVE_MIB_PER_SECOND", "0")  # members would give everything
    source = make_qwen3moe(tmp_path / "tiny.gguf", SHAPE)
    size_bytes = source.stat().st_size
    draws, requests = random.Random(5), itertools.count()

    def cut(answering: Answering, begin: int, end: int) -> bool:
        """Some answers end anywhere."""
        if end - begin < 1000 or next(requests) >= N_CUTS:
            return False
        answering.part(answering.data, begin, end, answering.data[begin : draws.randrange(begin + 1, end)])
        answering.cut()
        return True

    homes = [tmp_path / name for name in ("f", "w")]
    daemons: list[Daemon] = []
    with serving(source) as server:
        url = server.url(source.name).url
        succeed("--home", str(homes[0]), "init", "--found", "--model", url)
        assert size_bytes <= server.sent_bytes <= 1.05 * size_bytes + HEADER_STEP_BYTES
        server.behaviour, server.sent_bytes = cut, 0
        try:
            founder = Daemon(homes[0], "--workers-min", "1", "--holders", "1")
            daemons.append(founder)
            founder.start()
            address = founder.wait(lambda document: document["addresses"], "an address")["addresses"][0]
            for home in homes[1:]:
                daemons.append(Daemon(home, "--bootstrap", address, "--ranks", "output,bulk", "--model", url))
                daemons[-1].start()

            def is_served() -> bool:
                assert founder.process.poll() is None, founder.log()
                return (daemons[1].status() or {}).get("n_experts_held") == 2 * 16

            wait_for(is_served, "each expert at the worker", 2 * PATIENCE_S)
            document = founder.wait_state("ready")
            assert document["plan"]["coverage"]["n_pairs_held"] == 2 * 16
            assert (document["model"]["name"], document["fetch"]) == ("tiny", None)
            assert len(trio.run(run_session, founder, 20)) == 20
            for each in daemons[1:]:
                check_disk(each)
        finally:
            for each in daemons:
                if each.process.poll() is None:
                    each.kill(signal.SIGTERM)
            for each in daemons:
                each.wait_ended()
                each.end()
        # The worker has the manifest from the founder, and needs every byte of the file once.
        assert server.sent_bytes <= 1.05 * size_bytes + 2 * HEADER_STEP_BYTES
    assert next(requests) > N_CUTS


def check_disk(daemon: Daemon) -> None:
    """A worker's experts are those it holds, and perhaps those of plans before."""
    document = daemon.status()
    assert document is not None
    model = ModelStore(daemon.home / "models").get("tiny")
    shard = ShardSet.from_ranges(tuple(each) for each in document["shards"])
    assert model.experts.missing(model.manifest, shard) == []
    assert model.experts.damaged(model.manifest, shard) == []
    assert list(daemon.home.rglob("*.partial")) == []
