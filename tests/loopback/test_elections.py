"""Whole nodes as real daemons: they elect, go on when the backbone dies, and take back who returns."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from kvasir_proto.errors import KvasirError
from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir, run_session, wait_for
from tests.model_makers import ModelShape, make_qwen3moe

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

FAILOVER_S = 30.0
"""Far more than it takes: speed is shown by a measurement, not here."""


class Nodes:
    """Four nodes of one swarm, any of which may be backbone."""

    def __init__(self, directory: Path) -> None:
        self.model = make_qwen3moe(directory / "tiny.gguf", ModelShape(n_layer=2, n_expert=12))
        home = directory / "n0"
        founded = kvasir("--home", str(home), "init", "--found", "--model", str(self.model))
        subprocess.run(founded, check=True, capture_output=True, timeout=PATIENCE_S)
        self.daemons = [Daemon(home)]
        self.daemons[0].start()
        document = self.daemons[0].wait(lambda document: document["addresses"], "an address")
        for number in (1, 2, 3):
            arguments = ("--bootstrap", document["addresses"][0], "--model", str(self.model))
            self.daemons.append(Daemon(directory / f"n{number}", *arguments))
            self.daemons[-1].start()

    def backbone(self, among: list[Daemon] | None = None) -> tuple[Daemon, dict[str, Any]]:
        """The one that serves now, once there is one."""

        def serving() -> tuple[Daemon, dict[str, Any]] | None:
            for daemon in among or self.daemons:
                document = daemon.status() or {}
                is_it = document.get("backbone") == document.get("node_id")
                if is_it and document.get("state") == "ready" and document["lease_s"] is not None:
                    return daemon, document
            return None

        found: tuple[Daemon, dict[str, Any]] = wait_for(serving, "a backbone that serves", FAILOVER_S)
        return found

    def wait_settled(self) -> None:
        """All are ready, and there are enough electors to lose one."""
        for daemon in self.daemons:
            daemon.wait(
                lambda document: document["state"] == "ready" and len(document["electorate"]["members"]) >= 3,
                "ready, with electors enough",
            )


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("nodes"))
    try:
        yield made
        for daemon in made.daemons:
            daemon.kill(signal.SIGTERM)
        for daemon in made.daemons:
            assert daemon.wait_ended() == 0, daemon.log()
    finally:
        for daemon in made.daemons:
            daemon.end()


def test_a_killed_backbone_is_replaced_and_the_next_says_the_same(nodes: Nodes) -> None:
    """The same class of machine everywhere, and the same batch shapes: the text is the same, bit for bit."""
    nodes.wait_settled()
    first, before = nodes.backbone()
    text = trio.run(run_session, first, 40)
    assert len(set(text)) > 5
    first.kill(signal.SIGKILL)
    first.process.wait()
    others = [each for each in nodes.daemons if each is not first]
    second, after = nodes.backbone(others)
    assert (after["epoch"], after["term"]) > (before["epoch"], before["term"])
    assert trio.run(run_session, second, 40) == text
    for daemon in others:
        if daemon is not second:
            with pytest.raises((AssertionError, KvasirError), match=after["node_id"]):
                trio.run(run_session, daemon, 1)
    first.start()
    nodes.wait_settled()
    _, later = nodes.backbone()
    assert (later["term"], later["backbone"]) == (after["term"], after["backbone"]), "nobody is deposed"


def test_a_stopped_backbone_is_replaced_and_comes_back_as_a_member(nodes: Nodes) -> None:
    nodes.wait_settled()
    first, before = nodes.backbone()
    first.kill(signal.SIGSTOP)
    try:
        others = [each for each in nodes.daemons if each is not first]
        second, after = nodes.backbone(others)
        assert after["term"] > before["term"]
        assert len(trio.run(run_session, second, 10)) == 10
    finally:
        first.kill(signal.SIGCONT)
    first.wait(lambda document: document["backbone"] == after["node_id"], "that it follows the new one")
    nodes.wait_settled()


def test_a_backbone_that_is_stopped_in_good_order_is_replaced_sooner_than_its_lease(nodes: Nodes) -> None:
    nodes.wait_settled()
    first, before = nodes.backbone()
    first.kill(signal.SIGTERM)
    assert first.wait_ended() == 0
    started = time.monotonic()
    _, after = nodes.backbone([each for each in nodes.daemons if each is not first])
    assert time.monotonic() - started < FAILOVER_S
    assert after["term"] > before["term"]
    first.start()
    nodes.wait_settled()


def test_a_swarm_by_invitation_takes_in_whom_it_invited_and_others_say_why_not(tmp_path: Path) -> None:
    model = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=2, n_expert=12))

    def said(*arguments: str) -> str:
        done = subprocess.run(
            kvasir(*arguments), check=True, capture_output=True, timeout=PATIENCE_S, text=True
        )
        return done.stdout.strip()

    said("--home", str(tmp_path / "n0"), "init", "--found", "--admission", "invite", "--model", str(model))
    daemons = [
        Daemon(tmp_path / f"n{number}", *(("--model", str(model)) if number else ())) for number in range(4)
    ]
    try:
        daemons[0].start()
        document = daemons[0].wait(lambda each: each["addresses"] and each["lease_s"] is not None, "a lease")
        for number in (1, 2):
            home = str(tmp_path / f"n{number}")
            said("--home", home, "init", "--join", said("--home", str(tmp_path / "n0"), "invite"))
        said("--home", str(tmp_path / "n3"), "init", "--join", document["addresses"][0])
        for daemon in daemons[1:]:
            daemon.start()
        for daemon in daemons[:3]:
            daemon.wait(
                lambda each: each["state"] == "ready" and len(each["members"]) == 2, "ready, all three"
            )
        daemons[3].wait(lambda each: "by invitation" in each["reason"], "a reason")
    finally:
        for daemon in daemons:
            daemon.end()
