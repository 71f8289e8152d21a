"""Holders: the places a dispatch can send rows to, and one connection's half-finished frames.

`RemoteHolder` is the backbone's end of one pinned TLS connection. It blocks for a millisecond at most: the
dispatcher moves all connections forward together, so that a stopped worker delays nobody else's request. It
does not know what to do about a failure.
"""

from __future__ import annotations

import ctypes
import ssl
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_proto import dispatch
from kvasir_proto.dispatch import FrameKind, ReplyCode, ReplyHeader
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId

PairIndices = npt.NDArray[np.int32]
"""Indices into one layer call's flattened [n_tokens, n_slots] pairs."""

_SLICE_BYTES: Final = 256 * 1024
"""Bytes handed to one TLS write: large enough to be cheap, small enough to notice other connections."""

_PATIENCE_S: Final = 0.001
"""Longest wait for the rest of a record whose beginning is here; then other connections get their turn.

A reply is several records. Waiting inside ``ssl`` for the next one, microseconds behind, is cheaper than an
exception and another poll.
"""

REPLY_FLOOR_NS: Final = 2_000_000_000
"""The constant part of a reply's deadline, for loopback; the rest grows with the predicted answer time."""

PAIR_NS_MAX: Final = 1_000_000_000
"""The slowest rate that is believed: a holder that needs longer for a pair is late, whatever it says."""

OPEN_TIMEOUT_S: Final = 10.0
"""Longest time for the whole OPEN exchange."""

_ANSWER_MARGIN: Final = 4
_FIRST_PAIR_NS: Final = 2_000_000
"""Predicted time a pair before anything was measured."""

_SMOOTHING: Final = 0.2


@dataclass(slots=True)
class Request:
    """One frame to a holder and the reply it waits for. ``pairs`` is empty for a PROGRAM.

    ``abandoned``: the layer call it belonged to has failed; its reply is read and dropped.
    """

    request_id: int
    unsent: memoryview
    pairs: PairIndices
    n_embd_out: int
    submitted_ns: int
    deadline_ns: int
    abandoned: bool = False
    pairs_address: int = 0
    """Where the indices in ``pairs`` lie; numpy takes a microsecond to tell."""


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


@dataclass(slots=True)
class RemoteHolder:
    """A worker as the dispatcher sees it. ``reply_floor_ns`` is the constant part of its deadlines."""

    node_id: NodeId
    connection: ssl.SSLSocket
    rtt_ns: int = 0
    reply_floor_ns: int = REPLY_FLOOR_NS
    rate: AnswerRate = field(default_factory=AnswerRate)
    programs: set[int] = field(default_factory=set)
    outstanding: deque[Request] = field(default_factory=deque)
    _sending: deque[Request] = field(default_factory=deque)
    _received: int = 0
    _incoming: bytearray = field(default_factory=lambda: bytearray(64 * 1024))
    _view: memoryview = field(init=False)
    _incoming_address: int = 0
    _end: int = dispatch.HEADER_BYTES
    _header: ReplyHeader | None = None

    def __post_init__(self) -> None:
        self.connection.settimeout(_PATIENCE_S)
        self._view = memoryview(self._incoming)
        self._incoming_address = _address_of(self._incoming)

    def deadline_for(self, n_pairs: int, now_ns: int) -> int:
        """When a reply for ``n_pairs`` is late: RTT + 4 x predicted time + floor, behind what waits."""
        for request in self.outstanding:
            n_pairs += len(request.pairs)
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

    def receive_reply(self) -> tuple[Request, ReplyHeader, memoryview] | None:
        """The next whole reply, or None when more bytes must arrive first.

        The payload view is valid until the next call. Raises `OSError` when the connection is dead or at its
        end, `RemoteProtocolError` when the reply is not one that the oldest request can have.
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
            if self._header is None and self._received >= dispatch.HEADER_BYTES:
                self._header = self._check_header()
                self._end = dispatch.HEADER_BYTES + self._header.payload_bytes
                self._reserve(self._end)

    def _expect(self) -> None:
        """Prepare for the frame that the oldest request expects, or for a header that nobody expects."""
        self._end = dispatch.HEADER_BYTES
        if self.outstanding:
            request = self.outstanding[0]
            self._end += 4 * len(request.pairs) * request.n_embd_out
        self._reserve(self._end)

    def _reserve(self, size_bytes: int) -> None:
        """Make room by replacing the buffer: views of an earlier reply may still be alive."""
        if size_bytes > len(self._incoming):
            grown = bytearray(size_bytes)
            grown[: self._received] = self._incoming[: self._received]
            self._incoming = grown
            self._view = memoryview(grown)
            self._incoming_address = _address_of(grown)

    @property
    def payload_address(self) -> int:
        """Where the payload of the reply taken last lies, as long as its view is valid."""
        return self._incoming_address + dispatch.HEADER_BYTES

    def _check_header(self) -> ReplyHeader:
        header = dispatch.parse_header(self._incoming)
        if not isinstance(header, ReplyHeader):
            raise RemoteProtocolError("a worker may only send replies", code="malformed")
        if not self.outstanding:
            raise RemoteProtocolError("a reply to no request", code="unexpected_reply")
        request = self.outstanding[0]
        if header.request_id != request.request_id:
            raise RemoteProtocolError("a reply to another request", code="unexpected_reply")
        expected = 4 * len(request.pairs) * request.n_embd_out
        if header.code is ReplyCode.OK and len(request.unsent):
            raise RemoteProtocolError("an answer to half a request", code="unexpected_reply")
        if header.code is ReplyCode.OK and (
            header.payload_bytes != expected or header.n_pairs != len(request.pairs)
        ):
            raise RemoteProtocolError(
                f"{header.payload_bytes} bytes of rows where {expected} were asked for", code="shape_invalid"
            )
        needed = dispatch.HEADER_BYTES + header.payload_bytes
        if self._received > needed:
            raise RemoteProtocolError("bytes after a reply", code="malformed")
        return header

    def _take_reply(self) -> tuple[Request, ReplyHeader, memoryview]:
        header = self._header
        assert header is not None
        request = self.outstanding.popleft()
        payload = self._view[dispatch.HEADER_BYTES : self._received]
        self._received = 0
        self._header = None
        return request, header, payload

    def close(self) -> None:
        """Close at once; TLS closure alerts are not waited for."""
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
