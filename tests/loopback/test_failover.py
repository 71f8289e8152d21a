"""A stream through a node that is no backbone, as daemons die under it: it pauses, and the text is whole."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from kvasir_proto.sampling import Sampling
from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir, run_session
from tests.loopback.test_elections import Nodes

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

GREEDY = Sampling(temperature=0.0)
N_TOKENS = 60
N_BEFORE = 12
"""Tokens that have come when something dies."""


class StreamingDaemon(Daemon):
    """One whose sessions go through the gateway's port."""

    program = "tests.loopback.streaming_daemon"


class StreamingNodes(Nodes):
    """Three nodes with the demo model, any of which may be the backbone."""

    def wait_settled(self) -> None:
        """Besides, each has both engines: one that was just started may be elected before it can serve."""
        for daemon in self.daemons:
            daemon.wait(lambda document: all(document["engines"].values()), "both engines")
        super().wait_settled()

    def __init__(self, directory: Path) -> None:
        home = directory / "n0"
        founded = kvasir("--home", str(home), "init", "--found")
        subprocess.run(founded, check=True, capture_output=True, timeout=PATIENCE_S)
        self.daemons = [StreamingDaemon(home)]
        self.daemons[0].start()
        document = self.daemons[0].wait(lambda document: document["addresses"], "an address")
        for number in (1, 2):
            self.daemons.append(
                StreamingDaemon(directory / f"n{number}", "--bootstrap", document["addresses"][0])
            )
            self.daemons[-1].start()


def read(daemon: Daemon, at_token: Callable[[], None] = lambda: None) -> tuple[list[int], float]:
    """The tokens, and the longest time between two; ``at_token`` is called when some have come."""
    times: list[float] = []

    def note(count: int) -> None:
        times.append(time.monotonic())
        if count == N_BEFORE:
            at_token()

    tokens = trio.run(run_session, daemon, N_TOKENS, note, GREEDY)
    return tokens, max(later - earlier for earlier, later in itertools.pairwise(times))


def test_a_stream_outlives_a_worker_and_its_backbone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = StreamingNodes(tmp_path)
    try:
        nodes.wait_settled()
        backbone, before = nodes.backbone()
        gateway, worker = [each for each in nodes.daemons if each is not backbone]
        text, undisturbed_s = read(gateway)
        assert len(text) == N_TOKENS
        assert read(backbone)[0] == text, "whichever node is asked"

        again, worker_s = read(gateway, lambda: worker.kill(signal.SIGKILL))
        assert again == text
        worker.start()
        nodes.wait_settled()
        backbone, before = nodes.backbone()
        (gateway, _) = [each for each in nodes.daemons if each is not backbone]

        again, backbone_s = read(gateway, lambda: backbone.kill(signal.SIGKILL))
        assert again == text
        _, after = nodes.backbone([each for each in nodes.daemons if each is not backbone])
        assert (after["epoch"], after["term"]) > (before["epoch"], before["term"])
        with capsys.disabled():
            sys.stdout.write(
                f"\nlongest pause: {undisturbed_s:.2f} s undisturbed, {worker_s:.2f} s when a worker was "
                f"killed, {backbone_s:.2f} s when the backbone was\n"
            )
    finally:
        for daemon in nodes.daemons:
            daemon.end()
