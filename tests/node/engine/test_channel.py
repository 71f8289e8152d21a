"""An engine's end of its socket pair: whole messages, in order, from any thread, until control is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from kvasir_node.engine.channel import ControlChannel, fault_of
from kvasir_proto.codec import encode
from kvasir_proto.errors import EngineFailed, IncompatibleVersion, ModelUnusable, RemoteProtocolError
from kvasir_proto.framing import frame
from kvasir_proto.ids import SessionId
from kvasir_proto.messages.engine import (
    ENGINE,
    CancelSession,
    EngineFault,
    EngineMessage,
    QueryStatistics,
    SetFence,
    Shutdown,
    Tokenized,
)


@pytest.fixture
def ends() -> Iterator[tuple[ControlChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(10.0)
    theirs.settimeout(10.0)
    yield ControlChannel(ours), theirs
    ours.close()
    theirs.close()


def framed(message: EngineMessage) -> bytes:
    return frame(encode(message), ENGINE.size_bytes_max)


MESSAGES: list[EngineMessage] = [
    SetFence(0, 1),
    QueryStatistics(3),
    CancelSession(SessionId(bytes(16))),
    Shutdown(),
]


def test_messages_arrive_whole_and_in_order(ends: tuple[ControlChannel, socket.socket]) -> None:
    channel, control = ends
    control.sendall(b"".join(framed(each) for each in MESSAGES))
    assert [channel.receive() for _ in MESSAGES] == MESSAGES


def test_messages_may_be_split_at_every_byte(ends: tuple[ControlChannel, socket.socket]) -> None:
    channel, control = ends
    received: list[EngineMessage | None] = []
    reader = threading.Thread(target=lambda: received.extend(channel.receive() for _ in MESSAGES))
    reader.start()
    for byte in b"".join(framed(each) for each in MESSAGES):
        control.sendall(bytes([byte]))
    reader.join(10.0)
    assert received == MESSAGES


def test_the_end_of_the_stream_is_none_also_inside_a_message(
    ends: tuple[ControlChannel, socket.socket],
) -> None:
    channel, control = ends
    control.sendall(framed(SetFence(0, 1)) + framed(SetFence(0, 2))[:5])
    control.close()
    assert channel.receive() == SetFence(0, 1)
    assert channel.receive() is None
    assert channel.receive() is None


@pytest.mark.parametrize("noise", [b"\0\0\0\x03\xc1\xc1\xc1", b"\xff\xff\xff\xff", b"\0\0\0\0"])
def test_nonsense_is_a_protocol_error(ends: tuple[ControlChannel, socket.socket], noise: bytes) -> None:
    channel, control = ends
    control.sendall(noise)
    with pytest.raises(RemoteProtocolError):
        channel.receive()


def test_threads_send_whole_messages(ends: tuple[ControlChannel, socket.socket]) -> None:
    channel, theirs = ends
    control = ControlChannel(theirs)
    long = [Tokenized(number, tuple(range(5000))) for number in range(4)]

    def send(message: EngineMessage) -> None:
        for _ in range(10):
            channel.send(message)

    threads = [threading.Thread(target=send, args=(each,)) for each in long]
    for thread in threads:
        thread.start()
    received = [control.receive() for _ in range(40)]
    for thread in threads:
        thread.join(10.0)
    assert all(received.count(each) == 10 for each in long)


def test_sending_to_a_control_that_is_gone_is_not_an_error(
    ends: tuple[ControlChannel, socket.socket],
) -> None:
    channel, control = ends
    control.close()
    for _ in range(3):
        channel.send(SetFence(0, 1))
    assert channel.receive() is None


@pytest.mark.parametrize(
    "error, code, exit_code",
    [
        (ModelUnusable("damaged"), "model_unusable", 7),
        (IncompatibleVersion("old"), "incompatible_version", 8),
        (EngineFailed("no memory"), "engine_failed", 1),
        (RemoteProtocolError("odd", "weird"), "given", 1),
        (OSError(2, "No such file"), "given", 1),
        (MemoryError(), "given", 1),
    ],
)
def test_a_fault_tells_the_error_in_its_own_words(error: BaseException, code: str, exit_code: int) -> None:
    fault = fault_of(4, error, "given")
    assert (fault.request, fault.code, fault.exit_code) == (4, code, exit_code)
    assert fault.detail == (str(error) or "MemoryError")


def test_a_fault_with_an_endless_or_broken_text_can_be_sent() -> None:
    for text in ("x" * 100_000, "a\udcffb"):
        fault = fault_of(None, OSError(text), "given")
        assert isinstance(fault, EngineFault)
        assert framed(fault)
