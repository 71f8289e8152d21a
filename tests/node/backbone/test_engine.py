"""The backbone engine's decode thread: every request is answered under its own number, whatever happens."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import pytest

from kvasir_node.backbone import engine as engine_module
from kvasir_node.backbone.engine import JOBS_WAITING_MAX, BackboneEngine
from kvasir_node.engine.channel import ControlChannel
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.messages.engine import (
    ConnectHolder,
    EngineFault,
    HolderConnected,
    LoadOwnShard,
    OwnShardLoaded,
    RemoveHolder,
    SetLease,
    Tokenize,
    Tokenized,
)
from tests.node.toy_experts import EVERYTHING, NOTHING, shard_of, toy_manifest

HOLDER = node_id_of(bytes(32))


class ToyTrunk:
    """Tokenises text into its bytes; waits for `release` first, and trips over one prompt."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.release = threading.Event()
        self.release.set()

    def tokenize(self, text: str) -> list[int]:
        self.entered.set()
        assert self.release.wait(10.0)
        if text == "trip":
            raise ZeroDivisionError("a bug of ours")
        return list(text.encode())

    def close(self) -> None:
        self.release.set()


@pytest.fixture
def trunk() -> ToyTrunk:
    return ToyTrunk()


@pytest.fixture
def control() -> Iterator[tuple[ControlChannel, ControlChannel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10.0)
        yield ControlChannel(ours), ControlChannel(theirs)


@pytest.fixture
def engine(control: tuple[ControlChannel, ControlChannel], trunk: ToyTrunk) -> Iterator[BackboneEngine]:
    engine = BackboneEngine(control[1], cast(Any, None))
    engine._trunk = cast(Any, trunk)
    yield engine
    trunk.release.set()
    engine.close()


def test_a_request_that_trips_us_is_answered_as_itself_and_the_next_is_served(
    engine: BackboneEngine, control: tuple[ControlChannel, ControlChannel]
) -> None:
    engine.handle(Tokenize(7, "trip"))
    engine.handle(Tokenize(8, "ab"))
    fault = control[0].receive()
    assert isinstance(fault, EngineFault)
    assert (fault.request, fault.code) == (7, "internal")
    assert control[0].receive() == Tokenized(8, (97, 98))


def test_a_request_too_many_is_refused_at_once(
    engine: BackboneEngine, control: tuple[ControlChannel, ControlChannel], trunk: ToyTrunk
) -> None:
    trunk.release.clear()
    engine.handle(Tokenize(1, "a"))
    assert trunk.entered.wait(10.0)
    for request in range(2, JOBS_WAITING_MAX + 3):
        engine.handle(Tokenize(request, "a"))
    fault = control[0].receive()
    assert isinstance(fault, EngineFault)
    assert (fault.request, fault.code) == (JOBS_WAITING_MAX + 2, "busy")
    trunk.release.set()
    answers = [control[0].receive() for _ in range(JOBS_WAITING_MAX + 1)]
    assert answers == [Tokenized(request, (97,)) for request in range(1, JOBS_WAITING_MAX + 2)]


class RecordingDispatcher:
    """Notes what it is told, and each time the decode thread settles it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.settled = threading.Semaphore(0)

    def set_authority(self, epoch: int, term: int) -> None:
        self.told.append(f"authority {epoch} {term}")

    def add_holder(self, *_all: object) -> None:
        self.told.append("add")

    def remove_holder(self, _node_id: NodeId, reason: str) -> None:
        self.told.append(f"remove: {reason}")

    def settle(self) -> None:
        self.settled.release()

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_holders_that_come_and_go_are_settled_also_while_nothing_is_decoded(
    engine: BackboneEngine,
    control: tuple[ControlChannel, ControlChannel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Connections that were replaced or removed would otherwise stay open until somebody wants text."""
    dispatcher = RecordingDispatcher()
    engine._dispatcher, engine._manifest = cast(Any, dispatcher), toy_manifest()
    monkeypatch.setattr(engine_module, "connect_pinned", lambda *_: None)
    monkeypatch.setattr(engine_module, "open_remote_holder", lambda *_: None)
    engine.handle(SetLease(0, 1, (1 << 62)))
    shard, primary = EVERYTHING.encode(), NOTHING.encode()
    engine.handle(ConnectHolder(HOLDER, "127.0.0.1", 1, bytes(16), b"c", shard, primary, b"p"))
    assert control[0].receive() == HolderConnected(HOLDER)
    assert dispatcher.settled.acquire(timeout=10.0)
    engine.handle(RemoveHolder(HOLDER, "it left"))
    assert dispatcher.settled.acquire(timeout=10.0)
    assert dispatcher.told == ["authority 0 1", "add", "remove: it left"]


def test_experts_of_its_own_need_a_hooked_trunk(
    engine: BackboneEngine, control: tuple[ControlChannel, ControlChannel]
) -> None:
    engine.handle(LoadOwnShard(9, HOLDER, "/nowhere", EVERYTHING.encode(), NOTHING.encode(), 1))
    fault = control[0].receive()
    assert isinstance(fault, EngineFault)
    assert (fault.request, fault.detail) == (9, "no trunk is loaded that needs experts")


class SlowKernel:
    """Weights whose loading takes until `release`; ``made`` has all there are."""

    made: ClassVar[list[SlowKernel]] = []
    memory_bytes = 7

    def __init__(self, *_all: object, **_more: object) -> None:
        self.release = threading.Event()
        self.is_closed = False
        SlowKernel.made.append(self)
        assert self.release.wait(10.0)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def loading(engine: BackboneEngine, monkeypatch: pytest.MonkeyPatch) -> RecordingDispatcher:
    SlowKernel.made = []
    dispatcher = RecordingDispatcher()
    engine._dispatcher, engine._manifest = cast(Any, dispatcher), toy_manifest()
    monkeypatch.setattr(engine_module, "GgmlCpuKernel", SlowKernel)
    monkeypatch.setattr(engine_module, "ExpertBytes", lambda *_: contextlib.nullcontext(cast(Any, engine)))
    monkeypatch.setattr(BackboneEngine, "read", None, raising=False)
    return dispatcher


def load_own(engine: BackboneEngine, request: int) -> SlowKernel:
    """Ask for experts, and wait until they are being loaded."""
    count = len(SlowKernel.made)
    shard = shard_of(request % 3).encode()
    engine.handle(LoadOwnShard(request, HOLDER, "/model", shard, shard, 1))
    deadline = time.monotonic() + 10.0
    while len(SlowKernel.made) == count:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return SlowKernel.made[-1]


def test_experts_that_nobody_wants_any_more_are_closed_and_said_to_be(
    engine: BackboneEngine,
    control: tuple[ControlChannel, ControlChannel],
    loading: RecordingDispatcher,
) -> None:
    kernel = load_own(engine, 1)
    engine.handle(RemoveHolder(node_id_of(b"\x01" * 32), "another"))
    engine.handle(RemoveHolder(HOLDER, "the reign is over"))
    kernel.release.set()
    fault = control[0].receive()
    assert isinstance(fault, EngineFault)
    assert (fault.request, fault.detail) == (1, "these experts are not to be held any more")
    assert kernel.is_closed
    assert "add" not in loading.told


def test_of_two_loads_the_newer_counts_whichever_is_done_first(
    engine: BackboneEngine,
    control: tuple[ControlChannel, ControlChannel],
    loading: RecordingDispatcher,
) -> None:
    first, second = load_own(engine, 1), load_own(engine, 2)
    engine.handle(RemoveHolder(node_id_of(b"\x01" * 32), "another holder is none of its own experts"))
    second.release.set()
    assert control[0].receive() == OwnShardLoaded(2, 7, shard_of(2).digest())
    first.release.set()
    fault = control[0].receive()
    assert isinstance(fault, EngineFault)
    assert fault.request == 1
    assert (first.is_closed, second.is_closed) == (True, False)
    assert loading.told.count("add") == 1
