"""The demonstration's judgement: when its swarm is ready, whom it kills and when. No process is started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from kvasir_node import demo
from kvasir_node.demo import DemoNode, DemoReporter, DemoSwarm, WorkerKill, what_is_not_ready
from kvasir_proto.errors import EngineFailed, NotRunning, UsageError
from kvasir_proto.messages.local import GenerateEnd, GenerateRequest
from kvasir_proto.sampling import Sampling

REQUEST = GenerateRequest("In the beginning", (), 12, Sampling(seed=7))


def document(node_id: str, **changes: Any) -> dict[str, Any]:
    plan = {"epoch": 0, "term": 1, "revision": 4}
    made = {"node_id": node_id, "state": "ready", "reason": "", "backbone": "b", "epoch": 0, "term": 1}
    made["verdict"] = None
    members = [{"node_id": each, "shards": 0 if each == "idle" else 64} for each in ("w", "idle")]
    return {**made, "plan": plan, "members": members if node_id == "b" else [], **changes}


@pytest.mark.parametrize(
    "worker, idle, expected",
    [
        ({}, {}, ""),
        ({}, {"plan": {"epoch": 0, "term": 1, "revision": 1}}, ""),
        (
            {"plan": {"epoch": 0, "term": 1, "revision": 3}},
            {},
            "node-2 has not heard of revision 4 of the plan",
        ),
        ({"state": "loading", "reason": "loading 64 experts"}, {}, "node-2 is loading, loading 64 experts"),
        ({}, {"state": "electing"}, "node-3 is electing"),
        ({}, {"state": "degraded", "verdict": {"word": "quarantined", "electors": 3}}, ""),
        ({}, {"state": "degraded", "reason": "why"}, "node-3 is degraded, why"),
        ({}, {"term": 2}, "the nodes follow 2 different terms"),
        (None, {}, "node-2 does not answer yet"),
        ({}, None, "node-3 does not answer yet"),
    ],
)
def test_a_swarm_is_ready_when_all_are_and_those_that_hold_something_serve_the_plan(
    worker: dict[str, Any] | None, idle: dict[str, Any] | None, expected: str
) -> None:
    """A node that the plan gives nothing need not know it: `demo --workers 5` waited for that in vain."""
    statuses = {
        "node-1": document("b"),
        "node-2": document("w", **worker) if worker is not None else None,
        "node-3": document("idle", **idle) if idle is not None else None,
    }
    assert what_is_not_ready(statuses) == expected


def test_a_swarm_whose_backbone_is_another_node_is_not_ready() -> None:
    assert what_is_not_ready({"node-2": document("w")}) == "none of the nodes is the backbone"


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[signal.Signals]:
    """The signals that are sent, instead of sending them."""
    sent: list[signal.Signals] = []
    monkeypatch.setattr(os, "kill", lambda _, number: sent.append(number))
    return sent


async def test_a_worker_is_killed_once_the_text_stands_still(
    autojump_clock: MockClock, signals: list[signal.Signals]
) -> None:
    ended: list[str] = []
    kill = WorkerKill(1, lambda: ended.append("node"), after_pieces=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill.run)
        kill.note_piece()
        await trio.sleep(5)
        assert signals == [], "it is too early"
        for _ in range(4):
            kill.note_piece()
            await trio.sleep(0.2)
        assert (signals, kill.is_done) == ([signal.SIGSTOP], False), "text comes: it owes nothing"
    assert (signals, ended, kill.is_done) == ([signal.SIGSTOP, signal.SIGKILL], ["node"], True)


async def test_a_worker_that_nobody_asked_goes_on_when_the_session_is_over(
    autojump_clock: MockClock, signals: list[signal.Signals]
) -> None:
    kill = WorkerKill(1, pytest.fail, after_pieces=1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill.run)
        for _ in range(9):
            kill.note_piece()
            await trio.sleep(0.2)
        nursery.cancel_scope.cancel()
    assert (signals, kill.is_done) == ([signal.SIGSTOP, signal.SIGCONT], False)


class Backbone:
    """A backbone with two idle workers and one that is asked; ``sessions`` says how each session goes on."""

    def __init__(self, sessions: list[tuple[int, float]], end: GenerateEnd) -> None:
        self.sessions = sessions
        self.end = end
        self.asked = {"c": 5}
        self.locations = self

    async def status(self) -> dict[str, Any]:
        return {"engine_statistics": {"dispatch": {"rows_by_holder": dict(self.asked)}}}

    async def generate(
        self, _: Any, request: GenerateRequest, on_text: Callable[[str], None]
    ) -> tuple[list[int], str, GenerateEnd]:
        self.asked["b"] = self.asked.get("b", 0) + 10
        if request.n_tokens < REQUEST.n_tokens:
            return [], "", self.end  # that was to see whom it asks
        pieces, then_s = self.sessions.pop(0)
        for _ in range(pieces):
            on_text("x")
        await trio.sleep(then_s)
        return [0] * pieces, "x" * pieces, self.end


def swarm_with(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> DemoSwarm:
    monkeypatch.setattr(demo, "_generate", backbone.generate)
    node = SimpleNamespace(process=SimpleNamespace(kill=lambda: None))
    workers = [{"node_id": each, "engine": {"pid": 1}} for each in "abc"]
    return DemoSwarm(cast(Any, backbone), [cast(Any, node)] * 3, {}, workers)


@pytest.mark.parametrize(
    "sessions, n_said",
    [
        ([(12, 5.0)], 0),
        ([(12, 0.0), (1, 5.0)], 1),
        ([(1, 5.0), (12, 0.0), (12, 5.0)], 2),
    ],
)
async def test_who_is_asked_is_killed_while_the_session_lasts_and_another_runs_if_it_was_too_late(
    autojump_clock: MockClock,
    signals: list[signal.Signals],
    monkeypatch: pytest.MonkeyPatch,
    sessions: list[tuple[int, float]],
    n_said: int,
) -> None:
    said: list[str] = []
    report = DemoReporter(said.append, lambda *_: None, lambda _: None)
    swarm = swarm_with(Backbone(sessions, GenerateEnd("length", "", "", "{}")), monkeypatch)
    victim, _ = await demo._generate_while_killing(swarm, REQUEST, report)
    assert (victim, len(said)) == (1, n_said)
    assert signals[-1] == signal.SIGKILL
    assert sessions == []


async def test_who_could_not_be_killed_is_said_and_a_failed_session_keeps_its_status(
    autojump_clock: MockClock, signals: list[signal.Signals], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = DemoReporter(lambda _: None, lambda *_: None, lambda _: None)
    swarm = swarm_with(Backbone([(12, 0.0)] * 3, GenerateEnd("length", "", "", "{}")), monkeypatch)
    with pytest.raises(EngineFailed, match="3 times the text ended"):
        await demo._generate_while_killing(swarm, REQUEST, report)
    assert signal.SIGKILL not in signals
    too_long = GenerateEnd("failed", "usage_error", "the prompt has 9000 tokens", "{}")
    with pytest.raises(UsageError, match=r"^the prompt has 9000 tokens$"):
        await demo._generate_while_killing(swarm_with(Backbone([], too_long), monkeypatch), REQUEST, report)


@pytest.mark.parametrize("log, said", [(b"", "none"), (b"starts\nfails at last\n\n", "fails at last")])
def test_a_node_that_ended_is_named_with_its_last_words(tmp_path: Path, log: bytes, said: str) -> None:
    (tmp_path / "log").write_bytes(log)
    process = cast(Any, SimpleNamespace(poll=lambda: -9, returncode=-9))
    node = DemoNode("node-2", process, cast(Any, None), tmp_path / "log")
    with pytest.raises(EngineFailed) as ended:
        demo._check_running([node])
    assert str(ended.value) == f"node-2 ended with status -9, its last words: {said}"


async def test_a_backbone_that_is_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 3 would say that this home has no daemon: it has nothing to do with that."""
    (tmp_path / "log").write_text("serving")
    process = cast(Any, SimpleNamespace(poll=lambda: -9, returncode=-9))
    swarm = DemoSwarm(DemoNode("node-1", process, cast(Any, None), tmp_path / "log"), [], {}, [])

    @contextlib.asynccontextmanager
    async def opened(*arguments: object) -> AsyncIterator[DemoSwarm]:
        yield swarm

    async def lost(*arguments: object) -> dict[str, Any]:
        raise NotRunning("the connection was closed before the answer came")

    monkeypatch.setattr(demo, "_open_swarm", opened)
    monkeypatch.setattr(demo, "_demonstrate", lost)
    with pytest.raises(EngineFailed, match="node-1 ended with status -9, its last words: serving"):
        await demo.run_demo(cast(Any, None), tmp_path, cast(Any, SimpleNamespace(say=None)))
