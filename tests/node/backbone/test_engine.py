"""The backbone engine's decode thread: every request is answered under its own number, whatever happens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvasir_node.backbone.engine import JOBS_WAITING_MAX, BackboneEngine
from kvasir_node.engine.channel import ControlChannel
from kvasir_proto.messages.engine import EngineFault, Tokenize, Tokenized


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
