"""Real engine processes that are killed, stopped and abandoned in the middle of their work.

The model is tiny and random; what counts is that its tokens are those of an undisturbed run, or that the
session ends with a clear error, and that every survivor goes on. Signals are sent where it is certain what
the victim owes: no test hopes to hit a moment.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node import local_swarm
from kvasir_node.engine.channel import ControlChannel
from kvasir_node.local_swarm import LocalSwarm, RunSettings, start_local_swarm
from kvasir_node.model.store import ModelStore, StoredModel
from kvasir_node.supervisor import Engine, start_engine
from kvasir_proto.certificate import bind_engine
from kvasir_proto.ids import NodeId, SessionId, SwarmDigest, node_id_of
from kvasir_proto.limits import Role
from kvasir_proto.messages.engine import (
    CancelSession,
    EngineCertificate,
    EngineHello,
    EngineIdentity,
    Generate,
    HolderLost,
    SessionEnded,
    SessionOpened,
    TokenEmitted,
)
from kvasir_proto.sampling import Sampling, SamplingOptions
from tests.model_makers import ModelShape, make_qwen3moe

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

SETTINGS = RunSettings(n_ctx=256, n_ubatch=8)
PROMPT = tuple(range(3, 30))
N_TOKENS = 200
PATIENCE_S = 30.0
"""How long a condition may take to come true on a busy machine. Nothing waits for this to pass."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    directory = tmp_path_factory.mktemp("model")
    return ModelStore(directory / "models").add(make_qwen3moe(directory / "tiny.gguf", ModelShape()))


@dataclass
class Outcome:
    """What came of one session."""

    tokens: list[int]
    lost: list[tuple[NodeId, str]]
    end: SessionEnded


class Session:
    """One session on a backbone engine, from the outside."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._id = SessionId(token_bytes(16))
        self.tokens: list[int] = []
        self.lost: list[tuple[NodeId, str]] = []
        self._end: SessionEnded | None = None

    @staticmethod
    async def begin(engine: Engine, *, deadline_ms: int = 60_000) -> Session:
        session = Session(engine)
        await engine.send(
            Generate(
                session=session._id,
                prompt=None,
                token_ids=PROMPT,
                n_tokens=N_TOKENS,
                sampling=SamplingOptions(Sampling(temperature=0.0)),
                deadline_ms=deadline_ms,
            )
        )
        return session

    async def wait_tokens(self, count: int) -> None:
        """Wait until it has emitted so many tokens."""
        while len(self.tokens) < count:
            await self._take_event()
            assert self._end is None

    async def wait_end(self) -> Outcome:
        """Wait until it is over."""
        while self._end is None:
            await self._take_event()
        return Outcome(self.tokens, self.lost, self._end)

    async def catch_up(self) -> None:
        """Take in all that the engine has said until now."""
        unread = array("i", [1])
        while unread[0]:
            await trio.lowlevel.checkpoint()
            fcntl.ioctl(self._engine._stream.socket.fileno(), termios.FIONREAD, unread)
        await trio.testing.wait_all_tasks_blocked()
        while self._engine.events.statistics().current_buffer_used:
            await self._take_event()

    async def cancel(self) -> None:
        await self._engine.send(CancelSession(self._id))

    async def _take_event(self) -> None:
        with trio.fail_after(PATIENCE_S):
            event = await self._engine.events.receive()
        match event:
            case SessionOpened():
                pass
            case TokenEmitted():
                assert event.session == self._id
                self.tokens.append(event.token)
            case SessionEnded():
                assert event.session == self._id
                self._end = event
            case HolderLost():
                self.lost.append((event.node_id, event.code))
            case _:
                raise AssertionError(f"unexpected {event}")


async def run(engine: Engine) -> Outcome:
    return await (await Session.begin(engine)).wait_end()


@asynccontextmanager
async def swarm_of_two(model: StoredModel, directory: Path) -> AsyncIterator[tuple[LocalSwarm, trio.Nursery]]:
    """Two workers that each hold everything, and are first asked for half of it."""
    async with trio.open_nursery() as nursery:
        swarm = await start_local_swarm(nursery, model, SETTINGS, directory, n_workers=2, holders=2)
        try:
            yield swarm, nursery
        finally:
            for engine in (swarm.backbone, *swarm.workers):
                if not engine.has_ended:
                    os.kill(engine.pid, signal.SIGCONT)
            nursery.cancel_scope.cancel()


async def kill(engine: Engine) -> None:
    os.kill(engine.pid, signal.SIGKILL)
    with trio.fail_after(PATIENCE_S):
        assert await engine.wait_ended() == "killed by SIGKILL"


def state_of(pid: int) -> str:
    """The process's state as the kernel tells it: R, S, T for stopped, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def stop(engine: Engine) -> None:
    os.kill(engine.pid, signal.SIGSTOP)
    with trio.fail_after(PATIENCE_S):
        while state_of(engine.pid) != "T":
            await trio.lowlevel.checkpoint()


async def rows_asked_of(backbone: Engine, worker_id: NodeId) -> int:
    """Rows that the backbone has asked of that worker so far."""
    statistics = json.loads(await backbone.statistics_json(PATIENCE_S))
    rows: dict[str, int] = statistics["dispatch"]["rows_by_holder"]
    return rows.get(worker_id, 0)


async def begin_and_pause(backbone: Engine) -> Session:
    """A session in the middle of its text, and the backbone stopped there."""
    while True:
        session = await Session.begin(backbone)
        await session.wait_tokens(5)
        await stop(backbone)
        await session.catch_up()
        if len(session.tokens) < N_TOKENS - 20:
            return session
        os.kill(backbone.pid, signal.SIGCONT)  # it was faster than the signal
        await session.wait_end()


async def begin_and_stall(backbone: Engine, worker: Engine, worker_id: NodeId) -> Session:
    """Stop that worker, then begin a session and wait until the backbone waits for the worker's rows."""
    before = await rows_asked_of(backbone, worker_id)
    await stop(worker)
    session = await Session.begin(backbone)
    with trio.fail_after(PATIENCE_S):
        while await rows_asked_of(backbone, worker_id) == before:
            await trio.lowlevel.checkpoint()
    return session


async def test_processes_that_fail(model: StoredModel, tmp_path: Path) -> None:
    """One swarm through all of it, because starting engines is what takes time here."""
    async with swarm_of_two(model, tmp_path) as (swarm, nursery):
        tokens = (await run(swarm.backbone)).tokens
        assert len(tokens) == N_TOKENS
        await stopped_workers_do_not_hold_a_session(swarm, tokens)
        await a_stopped_worker_is_late(swarm, tokens)
        backbone = await a_dead_backbone_takes_nobody_with_it(nursery, swarm, model, tokens, tmp_path)
        await a_worker_dies_in_the_middle_of_the_prompt(swarm, backbone, tokens)
        await the_last_worker_dies_in_the_middle_of_the_text(swarm, backbone, tokens)
        await a_new_worker_is_as_good_as_the_old(nursery, swarm, backbone, model, tokens, tmp_path)
        statistics = json.loads(await backbone.statistics_json(PATIENCE_S))
        assert statistics["experts_missing_total"] == 0


async def stopped_workers_do_not_hold_a_session(swarm: LocalSwarm, tokens: list[int]) -> None:
    """It ends by its own deadline or its client's word, not by theirs."""
    await stop(swarm.workers[0])
    await stop(swarm.workers[1])
    outcome = await (await Session.begin(swarm.backbone, deadline_ms=150)).wait_end()
    assert (outcome.end.reason, outcome.end.code) == ("failed", "session_deadline_expired")
    assert outcome.lost == []
    for worker in swarm.workers:
        os.kill(worker.pid, signal.SIGCONT)
    assert (await run(swarm.backbone)).tokens == tokens

    session = await begin_and_stall(swarm.backbone, swarm.workers[1], swarm.worker_ids[1])
    await session.cancel()
    outcome = await session.wait_end()
    assert (outcome.end.reason, outcome.lost) == ("cancelled", [])
    os.kill(swarm.workers[1].pid, signal.SIGCONT)


async def a_stopped_worker_is_late(swarm: LocalSwarm, tokens: list[int]) -> None:
    """The text goes on without it; continued, it has only lost a connection."""
    session = await begin_and_pause(swarm.backbone)
    await stop(swarm.workers[0])
    os.kill(swarm.backbone.pid, signal.SIGCONT)
    outcome = await session.wait_end()
    assert outcome.tokens == tokens
    assert outcome.end.rows_retried >= 1
    assert outcome.lost == [(swarm.worker_ids[0], "late")]
    os.kill(swarm.workers[0].pid, signal.SIGCONT)


async def a_dead_backbone_takes_nobody_with_it(
    nursery: trio.Nursery, swarm: LocalSwarm, model: StoredModel, tokens: list[int], directory: Path
) -> Engine:
    """Another one finds the workers as they were."""
    await kill(swarm.backbone)
    backbone = await start_engine(
        nursery,
        "backbone",
        node_key=Ed25519PrivateKey.generate(),
        swarm_digest=SwarmDigest(bytes(32)),
        generation=1,
        directory=directory,
    )
    await local_swarm._grant_lease(backbone)  # before the trunk: the order must not matter
    await local_swarm._load_trunk(backbone, model, model.backbone_path, SETTINGS, hooked=True)
    for worker, worker_id in zip(swarm.workers, swarm.worker_ids, strict=True):
        await local_swarm._connect(backbone, swarm.backbone_id, worker, worker_id, swarm.plan, b"proof")
    outcome = await run(backbone)
    assert (outcome.tokens, outcome.lost, outcome.end.rows_retried) == (tokens, [], 0)
    return backbone


async def a_worker_dies_in_the_middle_of_the_prompt(
    swarm: LocalSwarm, backbone: Engine, tokens: list[int]
) -> None:
    session = await begin_and_stall(backbone, swarm.workers[0], swarm.worker_ids[0])
    await kill(swarm.workers[0])
    outcome = await session.wait_end()
    assert outcome.tokens == tokens
    assert outcome.end.reason == "length"
    assert outcome.end.rows_retried >= 1
    assert outcome.lost == [(swarm.worker_ids[0], "closed")]


async def the_last_worker_dies_in_the_middle_of_the_text(
    swarm: LocalSwarm, backbone: Engine, tokens: list[int]
) -> None:
    """The session fails with a sentence, and so does the next, at once."""
    session = await begin_and_pause(backbone)
    await kill(swarm.workers[1])
    os.kill(backbone.pid, signal.SIGCONT)
    outcome = await session.wait_end()
    assert (outcome.end.reason, outcome.end.code) == ("failed", "no_holder_left")
    assert re.match(r"no holder is left for layer [0-3], experts \d", outcome.end.detail)
    assert outcome.tokens == tokens[: outcome.end.n_generated]
    assert 5 <= outcome.end.n_generated < N_TOKENS
    assert outcome.lost == [(swarm.worker_ids[1], "closed")]
    assert (await run(backbone)).end.code == "no_holder_left"


async def a_new_worker_is_as_good_as_the_old(
    nursery: trio.Nursery,
    swarm: LocalSwarm,
    backbone: Engine,
    model: StoredModel,
    tokens: list[int],
    directory: Path,
) -> None:
    worker_id = swarm.worker_ids[1]
    worker = await start_engine(
        nursery,
        "worker",
        node_key=Ed25519PrivateKey.generate(),
        swarm_digest=SwarmDigest(bytes(32)),
        generation=2,
        directory=directory,
    )
    await local_swarm._serve_shard(worker, model, swarm.plan, worker_id, SETTINGS)
    await local_swarm._connect(backbone, swarm.backbone_id, worker, worker_id, swarm.plan, b"proof")
    outcome = await run(backbone)
    assert (outcome.tokens, outcome.end.rows_retried) == (tokens, 0)


# ---- Engines without control ----


ENGINE = ("-m", "kvasir_node.engine")
_SIT = "p._make_role_engine = lambda *_: threading.Event().wait()"
STUCK_ENGINE = (
    "-c",
    f"import sys, threading; from kvasir_node.engine import process as p; {_SIT}; p.main(sys.argv[1:])",
)
"""One whose main thread sits in something for ever, as in a file on a dead network mount."""


class Orphan:
    """An engine process started as control does it, with control's end of its channel in the test's hand."""

    def __init__(self, role: str, directory: Path, program: tuple[str, str] = ENGINE) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        self._ours = ours
        self.control = ControlChannel(ours)
        self.process = subprocess.Popen(
            [
                *(sys.executable, *program, "--role", role),
                *("--control-fd", str(theirs.fileno()), "--directory", str(directory)),
            ],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        theirs.close()
        self.public_key = b""

    def wait_hello(self) -> None:
        hello = self.control.receive()
        assert isinstance(hello, EngineHello)
        self.public_key = hello.public_key

    def identify(self, role: Role) -> None:
        key = Ed25519PrivateKey.generate()
        digest = SwarmDigest(bytes(32))
        binding = bind_engine(key, digest, self.public_key, role, 1)
        node_id = node_id_of(key.public_key().public_bytes_raw())
        self.control.send(EngineIdentity(node_id, role, binding))

    def introduce(self, role: Role) -> None:
        self.identify(role)
        assert isinstance(self.control.receive(), EngineCertificate)

    def send_noise(self) -> None:
        self._ours.sendall(b"\0\0\0\x04ugh!")

    def lose_control(self) -> None:
        self._ours.close()

    def wait(self) -> tuple[int, str]:
        """(exit status, what it wrote to standard error), within a few seconds."""
        _, errors = self.process.communicate(timeout=5.0)
        return self.process.returncode, errors.decode()

    def close(self) -> None:
        self._ours.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def orphans(tmp_path: Path) -> Iterator[list[Orphan]]:
    """A backbone and a worker, started at the same time."""
    made = [Orphan(role, tmp_path) for role in ("backbone", "worker")]
    for each in made:
        each.wait_hello()
    yield made
    for each in made:
        each.close()


def test_engines_end_with_their_control(orphans: list[Orphan], tmp_path: Path) -> None:
    backbone, worker = orphans
    stuck = Orphan("worker", tmp_path, STUCK_ENGINE)
    try:
        stuck.wait_hello()
        stuck.identify("worker")
        worker.introduce("worker")
        for each in (backbone, worker, stuck):
            each.lose_control()
        assert (backbone.wait(), worker.wait()) == ((0, ""), (0, ""))
        assert stuck.wait() == (1, "")
    finally:
        stuck.close()


def test_engines_that_are_told_nonsense_end_with_a_sentence(orphans: list[Orphan]) -> None:
    orphans[1].introduce("worker")
    for each in orphans:
        each.send_noise()
    for each in orphans:
        status, errors = each.wait()
        assert status == 1
        assert "Traceback" not in errors
        assert "protocol" in str(each.control.receive())
