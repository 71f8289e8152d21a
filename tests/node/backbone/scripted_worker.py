"""A worker in a thread that answers each dispatch as its script says: rightly, wrongly, or not at all.

It serves toy experts at the other end of a real TLS connection and writes down what it was sent. After a
`Deed` that ends the connection the thread ends; after one that keeps silent it waits for the backbone to
give up. Nothing here sleeps.
"""

from __future__ import annotations

import enum
import itertools
import socket
import ssl
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kvasir_node.backbone.holder import AnswerRate, RemoteHolder
from kvasir_proto import dispatch
from kvasir_proto.dispatch import Answer, DispatchHeader, FrameKind, Header, PlainHeader, ReplyCode
from kvasir_proto.ids import NodeId, node_id_of
from tests.node.tls_ends import tls_pair
from tests.node.toy_experts import Indices, Rows, add_up, compute_rows

PROMPT_NS = 30_000_000
"""A reply floor for holders that are meant to be late: long enough to send a frame, short enough to wait."""

_numbers = itertools.count(1)


class Deed(enum.Enum):
    """What a scripted worker does with one dispatch."""

    ANSWER = "answers"
    SILENCE = "reads it and keeps silent"
    STOP = "reads nothing any more, as a stopped process"
    CLOSE = "closes before it answers"
    CLOSE_MID_REPLY = "closes in the middle of the reply"
    HALF_FRAME = "sends half a reply and keeps silent"
    HALF_HEADER = "sends half a header and keeps silent"
    GARBAGE = "answers with noise"
    PLAINTEXT = "answers past the encryption"
    NAN = "one value is not a number"
    INFINITY = "one value is infinite"
    SHORT = "one row too few"
    LONG = "one row too many"
    HUGE = "announces 400 MiB"
    WRONG_COUNT = "right size, wrong number of pairs"
    FOREIGN_ID = "answers a request that nobody made"
    OLD_ID = "answers the request before again"
    TWICE = "answers twice"
    NOT_A_REPLY = "sends a dispatch of its own"
    EARLY = "answers before it has read the request"
    BAD_CODE = "refuses with a code that does not exist"
    LONG_REFUSAL = "refuses with more text than a refusal may have"
    REFUSE = "refuses"
    TRICKLE = "sends the reply byte by byte"
    BRAG = "claims that it computed for centuries"
    HOLD = "answers when it is told to"


@dataclass
class Dispatched:
    """One dispatch as the worker read it."""

    header: DispatchHeader
    x: Rows
    rows: Indices
    experts: Indices


@dataclass
class ScriptedWorker:
    """One worker and its connection. ``script``: the number of a dispatch, from 0, to what is done with it.

    ``default`` is done with dispatches that the script does not name; ``width`` is that of the toy model.
    """

    script: Mapping[int, Deed] = field(default_factory=dict)
    default: Deed = Deed.ANSWER
    refusal: ReplyCode = ReplyCode.FOREIGN_EXPERT
    width: int = 4
    node_id: NodeId = field(default_factory=lambda: node_id_of(struct.pack("<32xQ", next(_numbers))[-32:]))
    frames: list[Header] = field(default_factory=list)
    dispatches: list[Dispatched] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    refuses_programs: bool = False
    closes_at_once: bool = False
    reads_when_released: bool = False

    def __post_init__(self) -> None:
        self.backbone_end, self._connection = tls_pair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if self.closes_at_once:
            self._connection.close()
        else:
            self._thread.start()

    def holder(self, reply_floor_ns: int | None = None) -> RemoteHolder:
        """The backbone's view of it: with a short deadline if its script makes it late."""
        late = {Deed.SILENCE, Deed.STOP, Deed.HALF_FRAME, Deed.HALF_HEADER}
        if reply_floor_ns is None:
            is_late = bool(late & {self.default, *self.script.values()})
            reply_floor_ns = PROMPT_NS if is_late else 20_000_000_000
        return RemoteHolder(
            self.node_id,
            self.backbone_end,
            reply_floor_ns=reply_floor_ns,
            rate=AnswerRate(pair_ns=1000.0, measured=True),
        )

    def end(self) -> None:
        """Close the connection and wait for the thread."""
        self.release.set()
        self.backbone_end.close()
        if self._thread.is_alive():
            self._thread.join(10.0)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            if self.reads_when_released:
                self.release.wait()
            while self._serve_frame():
                pass
        except OSError:
            pass  # the backbone gave this worker up
        finally:
            self._connection.close()

    def _serve_frame(self) -> bool:
        deed = self.script.get(len(self.dispatches), self.default)
        header_bytes = self._read(dispatch.HEADER_BYTES)
        header = dispatch.parse_header(header_bytes)
        self.frames.append(header)
        if isinstance(header, PlainHeader):
            self._read(header.payload_bytes)
            if self.refuses_programs and header.kind is FrameKind.PROGRAM:
                self._send(dispatch.pack_refusal(header.request_id, ReplyCode.PROGRAM_UNFIT, "no"))
            else:
                self._send(self._reply(header.request_id, b"", 0))
            return True
        assert isinstance(header, DispatchHeader)
        if deed is Deed.STOP:
            self.arrived.set()
            self.release.wait()
            return False
        are_summed = header.answer is Answer.SUMS
        if deed is Deed.EARLY:
            n_results = header.n_rows if are_summed else header.n_pairs
            self._send(self._reply(header.request_id, bytes(4 * n_results * self.width), header.n_pairs))
        payload = self._read(header.payload_bytes)
        n_pairs, n_rows = header.n_pairs, header.n_rows
        rows = np.frombuffer(payload, np.int32, n_pairs)
        experts = np.frombuffer(payload, np.int32, n_pairs, 4 * n_pairs)
        begin = dispatch.tables_bytes(n_pairs, header.answer)
        x = np.frombuffer(payload, np.float32, n_rows * self.width, begin).reshape(n_rows, self.width)
        self.dispatches.append(Dispatched(header, x, rows, experts))
        self.arrived.set()
        results = compute_rows(header.layer, x, rows, experts)
        if are_summed:
            results = add_up(results, rows, np.frombuffer(payload, np.float32, n_pairs, 8 * n_pairs))
        return deed is Deed.EARLY or self._do(deed, header, results)

    def _do(self, deed: Deed, header: DispatchHeader, rows: Rows) -> bool:
        """Do it; whether the conversation goes on."""
        request, n_pairs = header.request_id, header.n_pairs
        reply = self._reply(request, rows.tobytes(), n_pairs)
        match deed:
            case Deed.ANSWER:
                self._send(reply)
            case Deed.SILENCE:
                self.release.wait()
                return False
            case Deed.HOLD:
                self.release.wait()
                self._send(reply)
            case Deed.CLOSE:
                return False
            case Deed.CLOSE_MID_REPLY:
                self._send(reply[: dispatch.HEADER_BYTES + 5])
                return False
            case Deed.HALF_FRAME:
                self._send(reply[: dispatch.HEADER_BYTES + 5])
                self.release.wait()
                return False
            case Deed.HALF_HEADER:
                self._send(reply[:40])
                self.release.wait()
                return False
            case Deed.GARBAGE:
                self._send(bytes(range(7, 87)) + bytes(len(reply)))
            case Deed.PLAINTEXT:
                raw = socket.socket(fileno=socket.dup(self._connection.fileno()))
                raw.settimeout(10.0)
                raw.sendall(reply)
                raw.close()
            case Deed.NAN | Deed.INFINITY:
                bad = rows.copy()
                bad[-1, -1] = np.nan if deed is Deed.NAN else -np.inf
                self._send(self._reply(request, bad.tobytes(), n_pairs))
            case Deed.SHORT:
                self._send(self._reply(request, rows[:-1].tobytes(), n_pairs - 1))
            case Deed.LONG:
                self._send(self._reply(request, rows.tobytes() + rows[:1].tobytes(), n_pairs + 1))
            case Deed.HUGE:
                self._send(self._reply(request, b"", n_pairs, payload_bytes=400 << 20))
            case Deed.WRONG_COUNT:
                self._send(self._reply(request, rows.tobytes(), n_pairs + 1))
            case Deed.FOREIGN_ID:
                self._send(self._reply(request + 1000, rows.tobytes(), n_pairs))
            case Deed.OLD_ID:
                self._send(self._reply(request - 1, rows.tobytes(), n_pairs))
            case Deed.TWICE:
                self._send(reply + reply)
            case Deed.NOT_A_REPLY:
                frame = bytearray(dispatch.HEADER_BYTES)
                dispatch.pack_dispatch_into(
                    frame,
                    request_id=request,
                    epoch=0,
                    term=1,
                    layer=1,
                    program=0,
                    n_rows=1,
                    n_pairs=1,
                    n_embd_in=4,
                )
                self._send(bytes(frame))
            case Deed.BAD_CODE:
                frame = bytearray(dispatch.pack_refusal(request, ReplyCode.KERNEL_FAILED, "x"))
                frame[6:8] = (999).to_bytes(2, "little")
                self._send(bytes(frame))
            case Deed.LONG_REFUSAL:
                frame = bytearray(dispatch.pack_refusal(request, ReplyCode.KERNEL_FAILED, "x"))
                frame[16:24] = (1 << 20).to_bytes(8, "little")
                self._send(bytes(frame) + bytes(1 << 16))
            case Deed.REFUSE:
                self._send(dispatch.pack_refusal(request, self.refusal, "not by me"))
            case Deed.TRICKLE:
                for index in range(len(reply)):
                    self._send(reply[index : index + 1])
            case Deed.BRAG:
                self._send(self._reply(request, rows.tobytes(), n_pairs, compute_ns=2**64 - 1))
            case Deed.STOP | Deed.EARLY:
                raise AssertionError("done before the payload is read")
        return True

    def _reply(
        self,
        request_id: int,
        payload: bytes,
        n_pairs: int,
        *,
        payload_bytes: int | None = None,
        compute_ns: int = 1000,
    ) -> bytes:
        if payload:
            payload += bytes(dispatch.DIGEST_BYTES)  # nobody audits it
        frame = bytearray(dispatch.HEADER_BYTES)
        dispatch.pack_reply_into(
            frame,
            request_id=request_id,
            code=ReplyCode.OK,
            payload_bytes=len(payload) if payload_bytes is None else payload_bytes,
            n_pairs=n_pairs,
            received_ns=0,
            compute_ns=compute_ns,
        )
        return bytes(frame) + payload

    def _send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def _read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = self._connection.recv(count - len(data))
            except ssl.SSLError as error:
                raise ConnectionResetError from error
            if not part:
                raise ConnectionResetError
            data += part
        return bytes(data)
