"""Holders: the places a dispatch can send rows to, and one connection's half-finished frames.

`RemoteHolder` is the backbone's end of one pinned TLS connection. It blocks for some milliseconds at most:
the dispatcher moves all connections forward together, so that a stopped worker delays nobody else's request.
It does not know what to do about a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.reply_log import Exchange, ReplyLog
from kvasir_node.native_library import load
from kvasir_proto import dispatch
from kvasir_proto.dispatch import FrameKind, ReplyCode, ReplyHeader
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId

PairIndices = npt.NDArray[np.int32]
"""Indices into one layer call's flattened [n_tokens, n_slots] pairs."""


class IndexBuffer:
    """Pair indices and where they lie, which numpy takes a microsecond to tell."""

    __slots__ = ("address", "values")

    def __init__(self, values: PairIndices) -> None:
        self.values = values
        self.address: int = values.ctypes.data


NO_PAIRS: Final = IndexBuffer(np.zeros(0, dtype=np.int32))

_SLICE_BYTES: Final = 256 * 1024
"""Bytes handed to one TLS write: large enough to be cheap, small enough to notice other connections."""

PATIENCE_S: Final = 0.005
"""Longest wait inside ``ssl`` for bytes of a connection; then others get their turn.

A reply in a local network takes no longer, and its records follow each other within microseconds: waiting for
them where they are read is cheaper than a poll and an exception.
"""

REPLY_FLOOR_NS: Final = 2_000_000_000
"""The constant part of a reply's deadline, for loopback; the rest grows with the predicted answer time."""

PAIR_NS_MAX: Final = 1_000_000_000
"""The slowest rate that is believed: a holder that needs longer for a pair is late, whatever it says."""

LAST_SEAL_S: Final = 2.0
_LAST_REQUEST_ID: Final = (1 << 64) - 1

OPEN_TIMEOUT_S: Final = 10.0
"""Longest time for the whole OPEN exchange."""

_BUFFER_BYTES: Final = 64 * 1024
"""What a connection's buffer starts with: more than any refusal, and enough for a token's rows."""

_ANSWER_MARGIN: Final = 4
_FIRST_PAIR_NS: Final = 2_000_000
"""Predicted time a pair before anything was measured."""

_SMOOTHING: Final = 0.2

SMALL_ANSWER_PAIRS: Final = 16
"""Answers of so many pairs or fewer are small: a token's, or those of a few sessions' tokens."""

_WINDOW_NS: Final = 10_000_000_000
_WINDOW_NS_MAX: Final = 60_000_000_000
_WINDOW_ANSWERS_MIN: Final = 64
_WINDOW_ANSWER_NS_MAX: Final = 500_000_000
"""One answer counts for no more: a machine that slept for a minute once is not slow."""


@dataclass(slots=True)
class Request:
    """One frame to a holder and the reply it waits for: rows for ``n_pairs`` pairs, none for a PROGRAM.

    The pairs are those from ``start`` on in ``indices``. ``n_results`` rows come back: one a pair, or one sum
    for each row that was sent. ``abandoned``: the layer call it belonged to has failed; its reply is read and
    dropped. ``frame`` is all of it, as long as its memory is not used again.
    """

    request_id: int
    unsent: memoryview
    indices: IndexBuffer
    start: int
    n_pairs: int
    n_results: int
    n_embd_out: int
    submitted_ns: int
    deadline_ns: int
    abandoned: bool = False
    is_seal: bool = False
    frame: memoryview = field(init=False)

    def __post_init__(self) -> None:
        self.frame = self.unsent

    @property
    def pairs(self) -> PairIndices:
        """The pairs it asks for."""
        return self.indices.values[self.start : self.start + self.n_pairs]


@dataclass(slots=True)
class AnswerRate:
    """Smoothed nanoseconds between a request and its rows, a pair, the round trip taken off.

    Measured here and not by the holder's word for it: transfer over a slow link is part of what a large
    request takes, and no holder may talk itself into an endless deadline.
    """

    pair_ns: float = _FIRST_PAIR_NS
    measured: bool = False

    def learn(self, elapsed_ns: int, n_pairs: int) -> None:
        """Take in how long one reply for ``n_pairs`` took."""
        sample = min(max(0, elapsed_ns) / max(1, n_pairs), PAIR_NS_MAX)
        self.pair_ns = sample if not self.measured else self.pair_ns + _SMOOTHING * (sample - self.pair_ns)
        self.measured = True


class AnswerWindow:
    """The time of a holder's small answers, round trip included, over ten seconds or more: their mean.

    Small ones alone, since a layer of a text waits for such; each holder's can be compared with the others'.
    The mean, since a machine that stands still nine tenths of the time answers most requests at once.
    """

    __slots__ = ("_n_answers", "_started_ns", "_total_ns")

    def __init__(self) -> None:
        self._n_answers = self._total_ns = self._started_ns = 0

    def take(self, elapsed_ns: int, now_ns: int) -> int | None:
        """Take in one answer. Returns the mean in nanoseconds if that closes the window, else None."""
        if not self._n_answers:
            self._started_ns = now_ns
        self._n_answers += 1
        self._total_ns += min(elapsed_ns, _WINDOW_ANSWER_NS_MAX)
        if now_ns - self._started_ns < _WINDOW_NS:
            return None
        mean_ns = self._total_ns // self._n_answers if self._n_answers >= _WINDOW_ANSWERS_MIN else None
        if mean_ns is not None or now_ns - self._started_ns > _WINDOW_NS_MAX:
            self._n_answers = self._total_ns = 0
        return mean_ns


@dataclass(slots=True)
class RemoteHolder:
    """A worker as the dispatcher sees it. ``reply_floor_ns`` is the constant part of its deadlines."""

    node_id: NodeId
    connection: ssl.SSLSocket
    rtt_ns: int = 0
    reply_floor_ns: int = REPLY_FLOOR_NS
    rate: AnswerRate = field(default_factory=AnswerRate)
    window: AnswerWindow = field(default_factory=AnswerWindow)
    programs: set[int] = field(default_factory=set)
    outstanding: deque[Request] = field(default_factory=deque)
    log: ReplyLog | None = None
    """What it has answered, where that is audited."""
    _sending: deque[Request] = field(default_factory=deque)
    _received: int = 0
    _incoming: bytearray = field(default_factory=lambda: bytearray(_BUFFER_BYTES))
    _view: memoryview = field(init=False)
    _incoming_address: int = 0
    _end: int = dispatch.HEADER_BYTES
    _header_seen: bool = False
    _refusal: ReplyCode | None = None
    _is_closing: bool = False
    _is_expected_reply: Callable[[int, int, int, int], int] = field(
        default_factory=lambda: load().is_expected_reply
    )

    def __post_init__(self) -> None:
        self.connection.settimeout(PATIENCE_S)
        self._view = memoryview(self._incoming)
        self._incoming_address = _address_of(self._incoming)

    def deadline_for(self, n_pairs: int, now_ns: int) -> int:
        """When a reply for ``n_pairs`` is late: RTT + 4 x predicted time + floor, behind what waits."""
        for request in self.outstanding:
            n_pairs += request.n_pairs
        predicted = int(n_pairs * self.rate.pair_ns)
        return now_ns + self.rtt_ns + _ANSWER_MARGIN * predicted + self.reply_floor_ns

    def submit(self, request: Request) -> None:
        """Queue a request; `send_pending` sends it."""
        self.outstanding.append(request)
        self._sending.append(request)

    @property
    def wants_to_send(self) -> bool:
        """Whether part of a request has not been handed to the kernel yet."""
        return bool(self._sending)

    def fileno(self) -> int:
        """The connection's file descriptor, for poll."""
        return self.connection.fileno()

    def send_pending(self) -> None:
        """Send what the socket takes without waiting. Raises `OSError` when the connection is dead."""
        while self._sending:
            request = self._sending[0]
            while len(request.unsent):
                try:
                    sent = self.connection.send(request.unsent[:_SLICE_BYTES])
                except (ssl.SSLWantWriteError, ssl.SSLWantReadError, TimeoutError):
                    return
                request.unsent = request.unsent[sent:]
            self._sending.popleft()

    def receive_reply(self) -> Request | None:
        """The oldest request, now answered with rows, or None when more bytes must arrive first.

        The rows lie at `payload_address` until the next call. Raises `OSError` when the connection is dead or
        at its end; `RemoteProtocolError` when the reply is not one that the oldest request can have, or when
        it is a refusal (code ``refused_...``): that request then stays outstanding.
        """
        while True:
            # Never past the frame that the oldest request expects: one read usually takes a record whole, and
            # whatever else the worker sends stays where the next receive finds it misplaced.
            if self._received == 0:
                self._expect()
            elif self._received >= self._end:
                return self._take_reply()
            try:
                count = self.connection.recv_into(self._view[self._received : self._end])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, TimeoutError):
                return None
            if count == 0:
                raise ConnectionResetError("the worker closed the connection")
            self._received += count
            if not self._header_seen and self._received >= dispatch.HEADER_BYTES:
                self._check_header()

    def _expect(self) -> None:
        """Prepare for the frame that the oldest request expects, or for a header that nobody expects."""
        self._end = dispatch.HEADER_BYTES
        if self.outstanding:
            request = self.outstanding[0]
            self._end += (
                dispatch.SEAL_BYTES
                if request.is_seal
                else dispatch.reply_payload_bytes(request.n_results, request.n_embd_out)
            )
            if self._end > len(self._incoming):
                self._incoming = bytearray(self._end)
                self._view = memoryview(self._incoming)
                self._incoming_address = _address_of(self._incoming)

    @property
    def payload_address(self) -> int:
        """Where the rows of the reply taken last lie."""
        return self._incoming_address + dispatch.HEADER_BYTES

    def _check_header(self) -> None:
        """Let through an answer to the oldest request, or a refusal; say what is wrong with anything else."""
        request = self.outstanding[0] if self.outstanding else None
        expected_bytes = self._end - dispatch.HEADER_BYTES
        if (
            request is not None
            and not request.unsent
            and self._is_expected_reply(
                self._incoming_address, request.request_id, expected_bytes, request.n_pairs
            )
        ):
            self._header_seen = True
            return
        header = dispatch.parse_header(self._incoming)
        if not isinstance(header, ReplyHeader):
            raise RemoteProtocolError("a worker may only send replies", code="malformed")
        if request is None:
            raise RemoteProtocolError("a reply to no request", code="unexpected_reply")
        if header.request_id != request.request_id:
            raise RemoteProtocolError("a reply to another request", code="unexpected_reply")
        if header.code is ReplyCode.OK:
            if request.unsent:
                raise RemoteProtocolError("an answer to half a request", code="unexpected_reply")
            raise RemoteProtocolError(
                f"{header.payload_bytes} bytes for {header.n_pairs} pairs where {expected_bytes} bytes "
                f"for {request.n_pairs} pairs were asked for",
                code="shape_invalid",
            )
        self._refusal = header.code
        self._header_seen = True
        self._end = dispatch.HEADER_BYTES + header.payload_bytes  # never more than the buffer begins with
        if self._received > self._end:
            raise RemoteProtocolError("bytes after a reply", code="malformed")

    def _take_reply(self) -> Request:
        refusal, self._refusal = self._refusal, None
        self._received = 0
        self._header_seen = False
        if refusal is not None:
            reason = bytes(self._view[dispatch.HEADER_BYTES : self._end]).decode(errors="replace")
            raise RemoteProtocolError(reason, code=f"refused_{refusal.name.lower()}")
        request = self.outstanding.popleft()
        if self.log is not None:
            if request.is_seal:
                self.log.take_seal(bytes(self._view[dispatch.HEADER_BYTES : self._end]))
            elif request.n_results:
                self.log.note_reply(bytes(self._view[self._end - dispatch.DIGEST_BYTES : self._end]))
        return request

    def keep_exchange(self, request: Request) -> Exchange | None:
        """The request whose reply was taken last, and its rows, for an audit; None if that is impossible."""
        if self.log is None:
            return None
        rows = self._view[dispatch.HEADER_BYTES : self._end - dispatch.DIGEST_BYTES]
        return self.log.keep(request.frame, rows)

    def ask_for_seal(self, request_id: int, log: ReplyLog, now_ns: int) -> None:
        """Queue a request that the worker sign what it has answered so far."""
        frame = memoryview(dispatch.pack_plain(FrameKind.SEAL, request_id, b""))
        deadline_ns = self.deadline_for(0, now_ns)
        self.submit(Request(request_id, frame, NO_PAIRS, 0, 0, 0, 0, now_ns, deadline_ns, is_seal=True))
        log.note_asked(now_ns)

    def close(self) -> None:
        """Close at once, TLS closure alerts are not waited for; where rows are kept for an audit, behind the
        seal of those: whoever ends a connection, its worker is to stand for what it has answered.

        That one is waited for in a thread of its own, `LAST_SEAL_S` at most.
        """
        if self._is_closing:
            return
        if self.log is None or not self.log.has_kept:
            self.connection.close()
            return
        self._is_closing = True
        try:
            threading.Thread(target=self._seal_and_close, args=(self.log,), name="seal", daemon=True).start()
        except RuntimeError:  # no memory or no right to another thread
            self.connection.close()

    def _seal_and_close(self, log: ReplyLog) -> None:
        ends = time.monotonic() + LAST_SEAL_S
        with contextlib.suppress(OSError, RemoteProtocolError):
            if not log.is_seal_under_way:
                self.ask_for_seal(_LAST_REQUEST_ID, log, time.monotonic_ns())
            while self.outstanding and time.monotonic() < ends:
                self.send_pending()
                self.receive_reply()
        log.leave()
        self.connection.close()


def open_remote_holder(node_id: NodeId, connection: ssl.SSLSocket, open_payload: bytes) -> RemoteHolder:
    """Do the OPEN exchange on a fresh blocking connection and measure its round trip.

    Raises `OSError` or `RemoteProtocolError` (the worker's refusal, by its code) and closes the connection.
    """
    try:
        started_ns = time.monotonic_ns()
        deadline = time.monotonic() + OPEN_TIMEOUT_S
        connection.settimeout(OPEN_TIMEOUT_S)
        connection.sendall(dispatch.pack_plain(FrameKind.OPEN, 0, open_payload))
        header_bytes = _receive_exactly(connection, dispatch.HEADER_BYTES, deadline)
        rtt_ns = time.monotonic_ns() - started_ns
        header = dispatch.parse_header(header_bytes)
        if not isinstance(header, ReplyHeader) or header.request_id != 0:
            raise RemoteProtocolError("not an answer to OPEN", code="malformed")
        if header.code is not ReplyCode.OK:
            text = _receive_exactly(connection, header.payload_bytes, deadline).decode(errors="replace")
            raise RemoteProtocolError(text, code=header.code.name.lower())
        if header.payload_bytes:
            raise RemoteProtocolError("an OPEN reply has no payload", code="malformed")
    except BaseException:
        connection.close()
        raise
    return RemoteHolder(node_id, connection, rtt_ns=rtt_ns)


def _address_of(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def _receive_exactly(connection: ssl.SSLSocket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the worker did not answer in time")
        connection.settimeout(remaining_s)
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionResetError("the worker closed the connection before it was ready")
        data += part
    return bytes(data)
