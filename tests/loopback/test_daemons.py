"""Real daemons on the loopback interface: processes, libp2p, TLS, disk, signals. One swarm for most of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from kvasir_node.backbone.traces import Rows, Traces
from kvasir_node.control import connect_daemon
from kvasir_node.measure.in_process import InProcessModel, ModelSettings
from kvasir_node.measure.live_side import open_live_side
from kvasir_node.model.store import ModelStore
from kvasir_proto.errors import KvasirError
from kvasir_proto.messages.local import GenerateRequest
from tests.loopback.daemons import PATIENCE_S, SAMPLING, Daemon, kvasir, run_session, wait_for
from tests.loopback.free_port import free_port
from tests.model_makers import ModelShape, make_qwen3moe

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

N_TOKENS = 300


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def state_of(document: dict[str, Any], node_id: str) -> str:
    """What a status document says of a member."""
    return {each["node_id"]: str(each["state"]) for each in document["members"]}[node_id]


@dataclass(frozen=True)
class Swarm:
    """A founder with three nodes that only hold experts, each expert held by two."""

    founder: Daemon
    workers: list[Daemon]
    model: Path
    text: list[int]
    """What the swarm says when nothing disturbs it."""

    def wait_ready(self) -> dict[str, Any]:
        """All of it serves."""
        for worker in self.workers:
            worker.wait_state("ready")
        return self.founder.wait_state("ready")

    def wait_settled(self) -> dict[str, Any]:
        """No plan is on its way: each expert is held by two and by no more, and all are connected."""

        def settled() -> dict[str, Any] | None:
            document = self.wait_ready()
            held = [(worker.status() or {}).get("n_experts_held", 0) for worker in self.workers]
            serve = all(each["holder_state"] == "serving" for each in document["members"])
            return document if sum(held) == 2 * 2 * 12 and serve else None

        document: dict[str, Any] = wait_for(settled, "each expert held by two, all of them connected")
        return document


def generate(
    daemon: Daemon, n_tokens: int = N_TOKENS, on_token: Callable[[int], None] = lambda _: None
) -> list[int]:
    """The token ids of one session; ``on_token`` is told how many there are after each."""
    return trio.run(run_session, daemon, n_tokens, on_token)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    directory = tmp_path_factory.mktemp("swarm")
    model = make_qwen3moe(directory / "tiny.gguf", ModelShape(n_layer=2, n_expert=12))
    home = directory / "f"
    founded = kvasir("--home", str(home), "init", "--found", "--model", str(model))
    subprocess.run(founded, check=True, capture_output=True, timeout=PATIENCE_S)
    founder = Daemon(home, "--workers-min", "3", "--listen-port", str(free_port()))
    daemons = [founder]
    try:
        founder.start()
        address = founder.wait(lambda document: document["addresses"], "an address")["addresses"][0]
        workers = [
            Daemon(
                *(directory / f"w{each}", "--bootstrap", address, "--model", str(model)),
                *("--ranks", "output,bulk"),
            )
            for each in range(3)
        ]
        daemons += workers
        for worker in workers:
            worker.start()
        founder.wait_state("ready")
        yield Swarm(founder, workers, model, generate(founder))
        for daemon in daemons:
            daemon.kill(signal.SIGTERM)
        for daemon in daemons:
            assert daemon.wait_ended() == 0, daemon.log()
            assert "library=" not in daemon.log_file.read_text(), "a library spoke past our words"
    finally:
        for daemon in daemons:
            daemon.end()


def test_the_swarm_serves_and_says_everything_about_itself(swarm: Swarm) -> None:
    document = swarm.wait_settled()
    assert [(each["state"], each["holder_state"]) for each in document["members"]] == [
        ("alive", "serving")
    ] * 3
    assert document["plan"]["holders_min"] == 2
    assert document["plan"]["coverage"] == {
        "n_pairs": 24,
        "n_pairs_held": 24,
        "by_backbone": 0,
        "missing": [],
        "layers": [
            {"layer": layer, "n_experts": 12, "n_by_backbone": 0, "n_missing": 0} for layer in range(2)
        ],
    }
    assert document["experts_missing_total"] == 0
    assert len(swarm.text) == N_TOKENS
    assert len(set(swarm.text)) > 10, "a text that says one thing only would prove little"
    assert generate(swarm.founder) == swarm.text


def test_the_running_swarm_can_be_looked_into_and_computes_what_llama_cpp_does(
    swarm: Swarm, tmp_path: Path
) -> None:
    swarm.wait_settled()
    model = ModelStore(tmp_path / "models").add(swarm.model)
    draws = np.random.default_rng(3)
    tokens = tuple(draws.integers(0, model.manifest.n_vocab, 90).tolist())
    chunks = (86, 1, 1, 1, 1)
    with InProcessModel(model, ModelSettings(n_ctx=256, n_ubatch=32)) as alone:
        expected, seen = alone.evaluate(tokens, chunks)
        text = alone.greedy(tokens, 8)

    async def ask() -> tuple[Rows, Traces | None, Rows, Traces | None, tuple[int, ...]]:
        home = swarm.founder.locations
        async with open_live_side("live", home, model, tmp_path, 32, is_watched=True) as live:
            looked = await live.evaluate(tokens, chunks)
            unseen = await live.evaluate(tokens, chunks, looks_inside=False)
            return (*looked, *unseen, (await live.greedy(tokens, 8)).tokens)

    found, inside, unseen, nothing, continuation = trio.run(ask)
    assert np.array_equal(found, expected)
    assert np.array_equal(unseen, expected)
    assert nothing is None
    assert continuation == text.tokens
    assert seen is not None
    assert inside is not None
    assert seen.asked is None, "there are no holders"
    for name in ("hidden", "router", "experts"):
        assert np.array_equal(getattr(inside, name), getattr(seen, name)), name
    assert inside.asked is not None
    assert np.array_equal(inside.asked, inside.experts), "holders are asked for what the router chose"


def test_a_worker_killed_in_the_middle_changes_no_token_and_serves_again(swarm: Swarm) -> None:
    swarm.wait_ready()
    victim = swarm.workers[0]
    document = victim.status() or {}
    engine_pid, node_id = document["engine"]["pid"], document["node_id"]

    def kill(count: int) -> None:
        if count == N_TOKENS // 3:
            victim.kill(signal.SIGKILL)

    assert generate(swarm.founder, on_token=kill) == swarm.text
    victim.process.wait()
    wait_for(lambda: not is_alive(engine_pid), "the end of an engine whose control was killed")
    swarm.founder.wait(lambda document: state_of(document, node_id) == "dead", "a dead member")
    swarm.founder.wait(lambda document: document["plan"]["holders_min"] == 2, "its experts at others")
    assert generate(swarm.founder) == swarm.text
    victim.start()
    swarm.wait_ready()
    assert generate(swarm.founder) == swarm.text


def test_a_stopped_worker_engine_changes_no_token(swarm: Swarm) -> None:
    swarm.wait_ready()
    engine_pid = (swarm.workers[1].status() or {})["engine"]["pid"]

    def stop(count: int) -> None:
        if count == N_TOKENS // 3:
            os.kill(engine_pid, signal.SIGSTOP)

    try:
        assert generate(swarm.founder, on_token=stop) == swarm.text
    finally:
        os.kill(engine_pid, signal.SIGKILL)
    swarm.wait_ready()


def test_an_idle_worker_whose_engine_dies_serves_again_before_anybody_asks(swarm: Swarm) -> None:
    swarm.wait_ready()
    worker = swarm.workers[2]
    first = (worker.status() or {})["engine"]["pid"]
    os.kill(first, signal.SIGKILL)
    worker.wait(lambda document: (document["engine"] or {}).get("pid", first) != first, "another engine")
    swarm.wait_ready()
    assert generate(swarm.founder) == swarm.text


def test_a_killed_backbone_engine_comes_back_with_all_holders(swarm: Swarm) -> None:
    first = swarm.wait_ready()["engine"]["pid"]

    def kill(count: int) -> None:
        if count == N_TOKENS // 3:
            os.kill(first, signal.SIGKILL)

    with pytest.raises((AssertionError, KvasirError)) as caught:
        generate(swarm.founder, on_token=kill)
    assert "engine" in str(caught.value)
    swarm.founder.wait(lambda document: (document["engine"] or {}).get("pid", first) != first, "a new engine")
    swarm.wait_ready()
    assert generate(swarm.founder) == swarm.text


def test_a_client_that_goes_away_ends_its_session(swarm: Swarm) -> None:
    swarm.wait_ready()

    async def leave() -> None:
        async with connect_daemon(swarm.founder.locations) as connection:
            await connection.send(GenerateRequest(None, (5, 6, 7), 2000, SAMPLING))
            await connection.receive()

    trio.run(leave)
    swarm.founder.wait(lambda document: document["sessions"] == 0, "no session")
    assert generate(swarm.founder) == swarm.text


def test_a_founder_that_is_stopped_and_started_finds_its_workers_again(swarm: Swarm) -> None:
    term = swarm.wait_ready()["term"]
    swarm.founder.kill(signal.SIGTERM)
    started = time.monotonic()
    assert swarm.founder.wait_ended() == 0, swarm.founder.log()
    assert time.monotonic() - started < 10.0
    for worker in swarm.workers:
        assert "the backbone" in worker.wait_state("electing")["reason"]
    swarm.founder.start()
    assert swarm.wait_ready()["term"] > term
    assert generate(swarm.founder) == swarm.text


def test_a_worker_that_is_stopped_has_said_so(swarm: Swarm) -> None:
    swarm.wait_ready()
    worker = swarm.workers[0]
    node_id = (worker.status() or {})["node_id"]
    stopped = subprocess.run(
        kvasir("--home", str(worker.home), "stop"), check=False, capture_output=True, timeout=PATIENCE_S
    )
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (0, b"", b"")
    assert worker.process.poll() == 0, "stop returns when the process is gone"
    said = state_of(swarm.founder.status() or {}, node_id)
    assert said == "left", "heard at once, not concluded from a silence"
    worker.start()  # at once: nothing of the one before is in the way
    swarm.wait_ready()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_interrupting_the_whole_group_ends_it_in_good_order(swarm: Swarm, number: signal.Signals) -> None:
    """Ctrl-C and a terminal that closes reach control and engine at once: control decides what it means."""
    swarm.wait_ready()
    worker = swarm.workers[1]
    os.killpg(worker.process.pid, number)
    assert worker.wait_ended() == 0, worker.log()
    assert "Traceback" not in worker.log()
    worker.start()
    swarm.wait_ready()


def test_stopping_with_a_stopped_engine_takes_bounded_time(swarm: Swarm) -> None:
    swarm.wait_ready()
    worker = swarm.workers[2]
    engine_pid = (worker.status() or {})["engine"]["pid"]
    os.kill(engine_pid, signal.SIGSTOP)
    document = worker.status()
    assert document is not None, "status answers although the engine does not"
    assert document["engine_statistics"] is None
    worker.kill(signal.SIGTERM)
    assert worker.wait_ended(20.0) == 0
    assert not is_alive(engine_pid)
    worker.start()
    swarm.wait_ready()


def test_a_port_in_use_exits_5_and_a_home_in_use_exits_4(swarm: Swarm, tmp_path: Path) -> None:
    port = swarm.founder.arguments[-1]
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{(swarm.founder.status() or {})['node_id']}"
    taken = subprocess.run(
        kvasir("--home", str(tmp_path), "run", "--listen-port", port, "--bootstrap", address),
        check=False,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert taken.returncode == 5
    assert f"port {port} of 127.0.0.1 is in use" in taken.stderr.decode()
    second = subprocess.run(
        kvasir("--home", str(swarm.founder.home), "run"), check=False, capture_output=True, timeout=PATIENCE_S
    )
    assert second.returncode == 4
    assert swarm.founder.status() is not None, "the first one still answers"


def test_with_only_a_dead_bootstrap_a_daemon_stays_up_and_answers(swarm: Swarm, tmp_path: Path) -> None:
    node_id = (swarm.founder.status() or {})["node_id"]
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{node_id}"
    daemon = Daemon(tmp_path / "w", "--bootstrap", address)
    try:
        daemon.start()
        document = daemon.wait(lambda document: address in document["reason"], "a reason")
        assert document["state"] == "joining"
        assert document["reason"].endswith(f"{address}: Connection refused")
        daemon.kill(signal.SIGTERM)
        assert daemon.wait_ended() == 0
        assert "[error" not in daemon.log(), daemon.log()
    finally:
        daemon.end()


def test_a_daemon_ends_with_its_standard_input_if_told_so(swarm: Swarm, tmp_path: Path) -> None:
    node_id = (swarm.founder.status() or {})["node_id"]
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{node_id}"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            kvasir("--home", str(tmp_path / "w"), "run", "--stop-on-eof", "--bootstrap", address),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: b"others join through" in (tmp_path / "log").read_bytes(), "a start")
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
