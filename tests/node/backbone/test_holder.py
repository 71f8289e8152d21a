"""One holder's connection: half-sent requests, half-received replies, deadlines, and the OPEN exchange."""

from __future__ import annotations

import ctypes
import ssl
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvasir_node.backbone import holder as holder_module
from kvasir_node.backbone.holder import (
    NO_PAIRS,
    PAIR_NS_MAX,
    REPLY_FLOOR_NS,
    AnswerRate,
    AnswerWindow,
    IndexBuffer,
    RemoteHolder,
    Request,
    open_remote_holder,
)
from kvasir_proto import dispatch
from kvasir_proto.dispatch import FrameKind, Opening, ReplyCode
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import node_id_of
from tests.node.tls_ends import tls_pair

NODE = node_id_of(b"\x05" * 32)
Ends = tuple[RemoteHolder, ssl.SSLSocket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    client, server = tls_pair()
    yield RemoteHolder(NODE, client), server
    client.close()
    server.close()


def request(number: int, n_pairs: int = 3, n_embd_out: int = 5, size_bytes: int = 100) -> Request:
    pairs = IndexBuffer(np.arange(n_pairs, dtype=np.int32))
    return Request(number, memoryview(bytes(size_bytes)), pairs, 0, n_pairs, n_pairs, n_embd_out, 0, 1 << 62)


def reply(
    number: int,
    rows: bytes = bytes(60),
    n_pairs: int = 3,
    code: ReplyCode = ReplyCode.OK,
    payload_bytes: int | None = None,
) -> bytes:
    """A reply; where it has rows a digest that nobody looks at follows them."""
    if rows and code is ReplyCode.OK:
        rows += bytes(dispatch.DIGEST_BYTES)
    frame = bytearray(dispatch.HEADER_BYTES)
    dispatch.pack_reply_into(
        frame,
        request_id=number,
        code=code,
        payload_bytes=len(rows) if payload_bytes is None else payload_bytes,
        n_pairs=n_pairs,
        received_ns=7,
        compute_ns=8,
    )
    return bytes(frame) + rows


def asked(holder: RemoteHolder, *requests: Request) -> None:
    for each in requests:
        holder.submit(each)
    holder.send_pending()
    assert not holder.wants_to_send


def next_reply(holder: RemoteHolder) -> tuple[Request, bytes]:
    """The next answered request and its rows; they are copied because they only stay until the next call."""
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        found = holder.receive_reply()
        if found is not None:
            return found, ctypes.string_at(holder.payload_address, 4 * found.n_pairs * found.n_embd_out)
    raise AssertionError("no reply came")


def test_replies_come_in_the_order_of_requests(ends: Ends) -> None:
    holder, server = ends
    asked(holder, request(1), request(2, n_pairs=0), request(3, n_pairs=1))
    rows = bytes(range(60))
    server.sendall(reply(1, rows) + reply(2, b"", 0) + reply(3, rows[:20], 1))
    for number, expected in ((1, rows), (2, b""), (3, rows[:20])):
        found, payload = next_reply(holder)
        assert (found.request_id, payload) == (number, expected)
    assert not holder.outstanding


def test_a_request_knows_which_pairs_it_asks_for() -> None:
    indices = IndexBuffer(np.array([4, 7, 9, 11], np.int32))
    asking = Request(1, memoryview(b""), indices, 1, 2, 2, 5, 0, 0)
    assert asking.pairs.tolist() == [7, 9]


def test_a_reply_may_be_split_at_every_byte(ends: Ends) -> None:
    holder, server = ends
    frame = reply(1, bytes(range(60)))
    for cut in range(1, len(frame)):
        asked(holder, request(1))
        server.recv(1000)
        server.sendall(frame[:cut])
        assert holder.receive_reply() is None
        server.sendall(frame[cut:])
        assert next_reply(holder)[1] == bytes(range(60))


def test_a_reply_larger_than_every_buffer_arrives_whole(ends: Ends) -> None:
    holder, server = ends
    rows = np.random.default_rng(2).bytes(4 * 300 * 2000)
    asked(holder, request(1, 300, 2000))
    sender = threading.Thread(target=server.sendall, args=(reply(1, rows, 300),))
    sender.start()
    assert next_reply(holder)[1] == rows
    sender.join()


@pytest.mark.parametrize(
    "frame, code",
    [
        (reply(9), "unexpected_reply"),
        (reply(1, bytes(56)), "shape_invalid"),
        (reply(1, bytes(64)), "shape_invalid"),
        (reply(1, bytes(60), 2), "shape_invalid"),
        (reply(1, bytes(60), 4), "shape_invalid"),
        (reply(1, payload_bytes=1 << 60), "oversize"),
        (reply(1, code=ReplyCode.MALFORMED, payload_bytes=2000), "oversize"),
        (bytes(140), "malformed"),
        (dispatch.pack_plain(FrameKind.OPEN, 1, b"x" * 60), "malformed"),
        (reply(1, b"no", code=ReplyCode.KERNEL_FAILED) + bytes(58), "malformed"),
    ],
)
def test_what_is_no_fitting_reply_is_refused_by_its_header(ends: Ends, frame: bytes, code: str) -> None:
    holder, server = ends
    asked(holder, request(1))
    server.sendall(frame)
    with pytest.raises(RemoteProtocolError) as caught:
        next_reply(holder)
    assert caught.value.code == code
    assert len(holder._incoming) == 64 * 1024  # nothing was prepared for what it announced


def test_a_reply_to_no_request_is_refused(ends: Ends) -> None:
    holder, server = ends
    server.sendall(reply(1))
    with pytest.raises(RemoteProtocolError) as caught:
        next_reply(holder)
    assert caught.value.code == "unexpected_reply"


def test_a_refusal_is_an_error_with_its_code_and_sentence(ends: Ends) -> None:
    holder, server = ends
    asked(holder, request(1))
    server.sendall(dispatch.pack_refusal(1, ReplyCode.STALE_TERM, "too old"))
    with pytest.raises(RemoteProtocolError, match="too old") as caught:
        next_reply(holder)
    assert caught.value.code == "refused_stale_term"
    assert holder.outstanding, "it is still owed"


def test_an_early_refusal_is_taken_and_early_rows_are_not() -> None:
    for early, code in (
        (dispatch.pack_refusal(1, ReplyCode.OVERSIZE, ""), "refused_oversize"),
        (reply(1), "unexpected_reply"),
    ):
        client, server = tls_pair()
        holder = RemoteHolder(NODE, client)
        holder.submit(request(1, size_bytes=20 << 20))
        holder.send_pending()
        assert holder.wants_to_send
        server.sendall(early)
        with pytest.raises(RemoteProtocolError) as caught:
            next_reply(holder)
        assert caught.value.code == code
        client.close()
        server.close()


def test_a_large_request_is_sent_in_parts_without_waiting(ends: Ends) -> None:
    holder, server = ends
    data = np.random.default_rng(1).bytes(3 << 20)
    holder.submit(Request(1, memoryview(data), NO_PAIRS, 0, 0, 0, 1, 0, 0))
    holder.submit(Request(2, memoryview(b"after"), NO_PAIRS, 0, 0, 0, 1, 0, 0))
    started = time.monotonic()
    holder.send_pending()
    assert time.monotonic() - started < 1.0
    assert holder.wants_to_send
    received = bytearray()
    while len(received) < len(data) + 5:
        part = server.recv(1 << 20)
        received += part
        holder.send_pending()
    assert bytes(received) == data + b"after"
    assert not holder.wants_to_send


@pytest.mark.parametrize("cut", [0, 30, 100])
def test_the_end_of_the_stream_is_an_error_wherever_it_comes(ends: Ends, cut: int) -> None:
    holder, server = ends
    asked(holder, request(1))
    server.sendall(reply(1)[:cut])
    server.close()
    with pytest.raises(ConnectionResetError):
        next_reply(holder)


# ---- Deadlines ----


def test_a_deadline_is_round_trip_and_floor_and_four_times_the_prediction(ends: Ends) -> None:
    holder, _ = ends
    holder.rtt_ns = 500
    holder.rate = AnswerRate(pair_ns=1000.0, measured=True)
    assert holder.deadline_for(0, 10) == 10 + 500 + REPLY_FLOOR_NS
    assert holder.deadline_for(7, 10) == 10 + 500 + 4 * 7000 + REPLY_FLOOR_NS
    holder.submit(request(1, n_pairs=3))
    assert holder.deadline_for(7, 10) == 10 + 500 + 4 * 10_000 + REPLY_FLOOR_NS


def test_a_rate_is_learnt_from_replies_and_smoothed() -> None:
    rate = AnswerRate()
    rate.learn(4000, 4)
    assert rate.pair_ns == 1000.0
    rate.learn(8000, 4)
    assert rate.pair_ns == 1200.0


def test_a_window_closes_after_ten_seconds_of_enough_answers_with_their_mean() -> None:
    window, second = AnswerWindow(), 1_000_000_000
    closed = [window.take(100 + 60 * (number % 2), number * second // 10) for number in range(101)]
    assert closed == [None] * 100 + [129]
    assert window.take(7, 11 * second) is None, "a new one has begun"
    # Too few in ten seconds: it stays open for more of them, and is forgotten after a minute.
    window = AnswerWindow()
    assert [window.take(900, number * 5 * second) for number in range(14)] == [None] * 14
    closed = [window.take(5, 100 * second + number * second // 5) for number in range(80)]
    assert [each for each in closed if each is not None] == [5]


def test_one_answer_of_a_machine_that_slept_does_not_make_it_slow() -> None:
    window, second = AnswerWindow(), 1_000_000_000
    closed = [
        window.take(3600 * second if number == 7 else 0, number * second // 100) for number in range(1001)
    ]
    assert closed[-1] == second // 2 // 1001


def test_an_answer_faster_than_the_measured_round_trip_takes_no_time() -> None:
    rate = AnswerRate()
    rate.learn(-50, 3)
    assert rate.pair_ns == 0.0


def test_no_behaviour_raises_a_deadline_without_end() -> None:
    """A worker that always answers at the last moment gains a little each time, up to the bound."""
    rate = AnswerRate()
    for _ in range(300):
        deadline_ns = int(4 * rate.pair_ns) + REPLY_FLOOR_NS
        rate.learn(deadline_ns, 1)
    assert rate.pair_ns <= PAIR_NS_MAX


# ---- OPEN ----

OPENING = Opening(0, 1, b"proof", bytes(32)).encode()


def opened(answer: Callable[[ssl.SSLSocket], None]) -> RemoteHolder:
    """`open_remote_holder` against a worker that reads OPEN and then does `answer`."""
    client, server = tls_pair()

    def serve() -> None:
        received = b""
        while len(received) < dispatch.HEADER_BYTES + len(OPENING):
            received += server.recv(4096)
        header = dispatch.parse_header(received)
        assert isinstance(header, dispatch.PlainHeader)
        assert header.kind is FrameKind.OPEN
        answer(server)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        return open_remote_holder(NODE, client, OPENING)
    finally:
        thread.join(10.0)
        server.close()


def test_opening_measures_the_round_trip() -> None:
    holder = opened(lambda server: server.sendall(reply(0, b"", 0)))
    assert 0 < holder.rtt_ns < 10**10
    assert holder.connection.gettimeout() is not None
    holder.close()


@pytest.mark.parametrize(
    "frame, code",
    [
        (dispatch.pack_refusal(0, ReplyCode.STALE_TERM, "too old"), "stale_term"),
        (dispatch.pack_refusal(0, ReplyCode.WRONG_MODEL, "\udcff"), "wrong_model"),
        (reply(5, b"", 0), "malformed"),
        (reply(0, b"rows", 0), "malformed"),
        (bytes(80), "malformed"),
        (dispatch.pack_plain(FrameKind.OPEN, 0, b""), "malformed"),
    ],
)
def test_a_refused_opening_says_why_and_closes(frame: bytes, code: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        opened(lambda server: server.sendall(frame))
    assert caught.value.code == code


def test_an_opening_that_breaks_off_is_an_os_error() -> None:
    with pytest.raises(ConnectionResetError):
        opened(lambda server: server.close())

    def break_off(server: ssl.SSLSocket) -> None:
        server.sendall(reply(0)[:40])
        server.close()

    with pytest.raises(ConnectionResetError):
        opened(break_off)


def test_an_opening_has_one_deadline_for_all_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that trickles would otherwise hold a thread for one timeout a byte."""
    monkeypatch.setattr(holder_module, "OPEN_TIMEOUT_S", 0.05)
    is_over = threading.Event()

    def trickle(server: ssl.SSLSocket) -> None:
        frame = reply(0, b"", 0)
        for index in range(len(frame) - 1):
            server.sendall(frame[index : index + 1])
        is_over.wait(10.0)

    started = time.monotonic()
    client, server = tls_pair()
    thread = threading.Thread(target=trickle, args=(server,))
    thread.start()
    with pytest.raises(TimeoutError):
        open_remote_holder(NODE, client, OPENING)
    assert time.monotonic() - started < 5.0
    assert client.fileno() == -1
    is_over.set()
    thread.join(10.0)
    server.close()
