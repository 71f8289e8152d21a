"""Every worker that adds in F32 is killed in turn, under load: the output layers end on the backbone itself.

Real daemons with the shipped model: one that may be backbone, workers in F32, and then workers that add in
F16, which must never be given experts of the output layers, whoever is left.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from kvasir_node.control import connect_daemon
from kvasir_node.measure.statistics import compare_logits, open_logits
from kvasir_proto.messages.local import EvaluateReply, EvaluateRequest
from kvasir_proto.swarm_manifest import Thresholds
from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir, run_session

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

N_TOKENS = 24
PROMPT = (5, 6, 7)
"""What `run_session` begins with."""


class LastWorkers:
    """A backbone and its workers, and what becomes of the text while workers go."""

    def __init__(self, directory: Path, n_workers: int) -> None:
        self.directory = directory
        home = directory / "backbone"
        founded = kvasir("--home", str(home), "init", "--found")
        subprocess.run(founded, check=True, capture_output=True, timeout=PATIENCE_S)
        self.backbone = Daemon(home, "--workers-min", str(n_workers))
        self.backbone.start()
        document = self.backbone.wait(lambda each: each["addresses"], "an address")
        self.address = document["addresses"][0]
        self.workers: list[Daemon] = []
        self.started: list[Daemon] = [self.backbone]
        for number in range(n_workers):
            self.workers.append(self.start_worker(f"f32-{number}"))
        self.n_pairs = self.wait_serving(n_workers, "ready")["plan"]["coverage"]["n_pairs"]

    def start_worker(self, name: str, *arguments: str) -> Daemon:
        """Start a node that may hold experts and not be backbone."""
        daemon = Daemon(
            self.directory / name, "--bootstrap", self.address, "--ranks", "output,bulk", *arguments
        )
        daemon.start()
        self.started.append(daemon)
        return daemon

    def end(self) -> None:
        """Nothing is left of it."""
        for daemon in self.started:
            daemon.end()

    def wait_serving(self, n_workers: int, state: str) -> dict[str, Any]:
        """Every expert is held, by so many living workers or by the backbone, which is connected to all."""

        def is_served(document: dict[str, Any]) -> bool:
            members = document["members"]
            coverage = document["plan"]["coverage"]
            named = [each for each in members if each["shards"]]
            return (
                document["state"] == state
                and coverage["n_pairs_held"] == coverage["n_pairs"] > 0
                and len(named) == n_workers
                and all((each["state"], each["holder_state"]) == ("alive", "serving") for each in named)
            )

        return self.backbone.wait(is_served, f"that {n_workers} workers and the backbone serve everything")

    def text(self) -> list[int]:
        """The token ids of a session."""
        return trio.run(run_session, self.backbone, N_TOKENS)

    def text_while_killing(self, worker: Daemon) -> list[int] | None:
        """The token ids of a session in which this worker is killed; None where it failed, as it may."""

        def kill(n_tokens: int) -> None:
            if n_tokens == N_TOKENS // 3:
                worker.kill(signal.SIGKILL)

        try:
            tokens = trio.run(run_session, self.backbone, N_TOKENS, kill)
        except AssertionError:
            tokens = None
        worker.process.wait(PATIENCE_S)
        return tokens

    def logits(self, tokens: list[int], name: str) -> Path:
        """Every logit over the prompt and these tokens."""
        path = self.directory / f"{name}.npy"
        chunk_sizes = (len(PROMPT), *[1] * len(tokens))
        request = EvaluateRequest((*PROMPT, *tokens), chunk_sizes, str(path))

        async def evaluate() -> None:
            with trio.fail_after(PATIENCE_S):
                async with connect_daemon(self.backbone.locations) as connection:
                    reply = await connection.ask(request)
            assert isinstance(reply, EvaluateReply), reply

        trio.run(evaluate)
        return path


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[LastWorkers]:
    made = LastWorkers(tmp_path, 3)
    try:
        yield made
    finally:
        made.end()


def test_the_text_stays_right_until_the_backbone_serves_alone_and_f16_never_serves_output(
    swarm: LastWorkers,
) -> None:
    uninterrupted = swarm.text()
    for n_left in (2, 1):
        assert swarm.text_while_killing(swarm.workers.pop()) == uninterrupted
        assert swarm.wait_serving(n_left, "ready")["plan"]["coverage"]["by_backbone"] == 0
    # With the last one goes the only holder of everything: the session may end, but never with other tokens.
    assert swarm.text_while_killing(swarm.workers.pop()) in (uninterrupted, None)
    document = swarm.wait_serving(0, "degraded")
    assert document["plan"]["coverage"]["by_backbone"] == swarm.n_pairs
    assert document["ranks"] == ["backbone", "output", "bulk"]
    assert swarm.text() == uninterrupted, "the same kernel, and every row of it: bit for bit"
    exact = swarm.logits(uninterrupted, "exact")

    f16 = [swarm.start_worker(f"f16-{number}", "--kernel", "emulated-f16") for number in range(2)]
    ranks_seen = set()

    def have_bulk(document: dict[str, Any]) -> bool:
        ranks = [tuple(each["ranks"]) for each in document["members"] if each["accumulation"] == "F16"]
        ranks_seen.update(ranks)
        n_output = swarm.n_pairs // 6
        # First they hold what the backbone holds too, then it gives that up.
        has_given_up = document["ranks"] == ["backbone", "output"]
        is_left = document["plan"]["coverage"]["by_backbone"] == n_output
        return ranks == [("bulk",)] * 2 and has_given_up and is_left

    swarm.backbone.wait(have_bulk, "that F16 workers hold all bulk experts")
    swarm.wait_serving(len(f16), "degraded")
    tokens = [*PROMPT, *uninterrupted]
    comparison = compare_logits(open_logits(exact), open_logits(swarm.logits(uninterrupted, "f16")), tokens)
    assert swarm.wait_serving(len(f16), "degraded")["experts_missing_total"] == 0
    assert ranks_seen <= {(), ("bulk",)}
    assert comparison.max_abs_delta > 0
    assert comparison.top1_agreement >= 1 - 1 / len(tokens)
    assert comparison.mean_kld <= Thresholds().mean_kld_max
