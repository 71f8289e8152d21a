"""One backbone's connection to a worker: frames in, rows or a coded refusal out, and on to the next.

A refusal never ends the connection while frames can still be told apart; when they cannot (a header that is
malformed or oversize), the connection is closed after the refusal and the worker goes on serving others. A
dispatch is judged by its header, so that the payload of one that will be refused takes no memory. The worker
takes ids and rows and computes; nothing here chooses an expert, and every number from the network is
bounded before it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.native_library import load
from kvasir_node.system_words import in_words
from kvasir_node.telemetry import get_logger
from kvasir_proto import dispatch
from kvasir_proto.audit.reply_chain import FIRST_LINK, next_link, next_program
from kvasir_proto.dispatch import Answer, DispatchHeader, FrameKind, Opening, PlainHeader, ReplyCode, WireType
from kvasir_proto.errors import KvasirError, LocalProtocolError, RemoteProtocolError
from kvasir_proto.program import decode_program

log = get_logger()

IDLE_TICK_S: Final = 30.0
"""How long one read waits; between frames the wait is repeated, inside a frame it is an error."""

FRAME_TIMEOUT_S: Final = 120.0
"""Longest time for one frame to arrive whole, or to be taken, however slowly its bytes trickle."""

BUFFER_BYTES: Final = 64 * 1024
"""What a connection's buffers start with. They grow with what arrives, not with what a header announces."""

_TLS_RECORD_BYTES: Final = 16 * 1024
"""What TLS puts into one record: a frame sent in these pieces is as few records as it can be."""

_CODE_OF_ERROR: Final = {code.name.lower(): code for code in ReplyCode}


@dataclass(slots=True)
class ServingCounters:
    """What a worker engine has done since it started."""

    requests: int = 0
    rows: int = 0
    refusals: int = 0
    compute_ns: int = 0


class BackboneConnection:
    """Serves one backbone until it closes, misbehaves beyond repair, or `stop` is set."""

    def __init__(
        self,
        connection: socket.socket,
        kernel: ExpertKernel,
        kernel_lock: threading.Lock,
        check_opening: Callable[[Opening], None],
        current_fence: Callable[[], tuple[int, int]],
        counters: ServingCounters,
        seal: Callable[[int, bytes, bytes], bytes],
    ) -> None:
        """`seal(number of replies, last link, digest of programs)` signs what a SEAL asks for."""
        self._connection = connection
        self._kernel = kernel
        self._kernel_lock = kernel_lock
        self._check_opening = check_opening
        self._current_fence = current_fence
        self._counters = counters
        self._incoming = bytearray(BUFFER_BYTES)
        self._incoming_address = _address_of(self._incoming)
        self._received = 0
        self._header: DispatchHeader | PlainHeader | None = None
        self._refusal: RemoteProtocolError | None = None
        self._program = 0
        self._width_in = 0
        self._width_out = 0
        self._expanded = bytearray()
        self._expand_q8_0 = load().expand_q8_0
        self._rows = bytearray()  # of which the reply has the sums
        self._weighted_sums = load().weighted_sums
        self._outgoing = bytearray(BUFFER_BYTES)
        self._outgoing_address = _address_of(self._outgoing)
        self._authority: tuple[int, int] | None = None
        self._programs: dict[int, int] = {}
        self._widths: dict[tuple[int, int], tuple[int, int]] = {}
        self._seal = seal
        self._n_replies = 0
        self._link = FIRST_LINK
        self._told = FIRST_LINK

    def serve(self, stop: threading.Event) -> str:
        """Answer frames until the end; return why it ended, in a few words."""
        self._connection.settimeout(IDLE_TICK_S)
        try:
            while True:
                size = self._receive_frame(stop)
                if size == 0:
                    return "closed by the backbone"
                self._answer(size, time.monotonic_ns())
                self._forget(size)
        except RemoteProtocolError as error:
            self._refuse(dispatch.request_id_of(self._incoming), error)
            return f"{error.code}: {error}"
        except OSError as error:
            return in_words(error)

    def _receive_frame(self, stop: threading.Event) -> int:
        """Wait for one whole frame at the start of the buffer; its size there, or 0 at a clean end.

        The payload of a frame that is refused by its header is not kept. Raises `RemoteProtocolError` when a
        header is unacceptable, `OSError` when the stream breaks off or dawdles inside a frame.
        """
        wanted = dispatch.HEADER_BYTES
        header_seen = False
        started = time.monotonic()
        while True:
            if self._received >= wanted:
                if header_seen:
                    return wanted
                wanted += self._announced_payload_bytes()
                header_seen = True
                continue
            if header_seen and self._refusal is not None:
                wanted -= self._received - dispatch.HEADER_BYTES
                self._received = dispatch.HEADER_BYTES
            elif self._received == len(self._incoming):
                self._grow(wanted)
            try:
                count = self._connection.recv_into(memoryview(self._incoming)[self._received :])
            except TimeoutError:
                if self._received or stop.is_set():
                    raise
                started = time.monotonic()
                continue
            if count == 0:
                if self._received:
                    raise ConnectionResetError("closed inside a frame")
                return 0
            if self._received == 0:
                started = time.monotonic()
            elif time.monotonic() - started > FRAME_TIMEOUT_S:
                raise TimeoutError("a frame took too long to arrive")
            self._received += count

    def _announced_payload_bytes(self) -> int:
        header = dispatch.parse_header(self._incoming)
        self._refusal = None
        if isinstance(header, DispatchHeader):
            try:
                self._check_dispatch(header)
            except RemoteProtocolError as error:
                self._refusal = error
            except (KvasirError, LocalProtocolError) as error:
                self._refusal = RemoteProtocolError(str(error), code="kernel_failed")
        elif not isinstance(header, PlainHeader):
            raise RemoteProtocolError("a backbone does not send replies", code="malformed")
        self._header = header
        return header.payload_bytes

    def _grow(self, size_bytes_max: int) -> None:
        """Make room for more of a frame of that size: at most as much again as has arrived."""
        grown = bytearray(min(size_bytes_max, 2 * len(self._incoming)))
        grown[: self._received] = self._incoming
        self._incoming = grown
        self._incoming_address = _address_of(grown)

    def _forget(self, size: int) -> None:
        """Drop the answered frame; what a backbone sent behind it moves to the front."""
        rest = self._received - size
        if rest:
            self._incoming[:rest] = self._incoming[size : self._received]
        self._received = rest

    def _answer(self, size: int, received_ns: int) -> None:
        header = self._header
        assert header is not None
        try:
            if isinstance(header, DispatchHeader):
                if self._refusal is not None:
                    raise self._refusal
                self._compute(header, size, received_ns)
                return
            payload = bytes(memoryview(self._incoming)[dispatch.HEADER_BYTES : size])
            if header.kind is FrameKind.SEAL:
                self._send_seal(header.request_id, received_ns)
                return
            if header.kind is FrameKind.OPEN:
                self._open(payload)
            else:
                self._learn_program(header.program, payload)
            self._acknowledge(header.request_id, received_ns)
        except RemoteProtocolError as error:
            self._refuse(header.request_id, error)
        except (KvasirError, LocalProtocolError) as error:
            self._refuse(header.request_id, RemoteProtocolError(str(error), code="kernel_failed"))

    def _open(self, payload: bytes) -> None:
        opening = Opening.decode(payload)
        self._check_opening(opening)
        self._authority = (opening.epoch, opening.term)

    def _learn_program(self, index: int, payload: bytes) -> None:
        if self._authority is None:
            raise RemoteProtocolError("a program before OPEN", code="not_open")
        program = decode_program(payload)
        with self._kernel_lock:
            self._programs[index] = self._kernel.add_program(program)
        self._told = next_program(self._told, index, payload)

    def _check_dispatch(self, header: DispatchHeader) -> None:
        """Judge a dispatch before its payload. Raises `RemoteProtocolError` with a reply code."""
        if self._authority is None:
            raise RemoteProtocolError("a dispatch before OPEN", code="not_open")
        if (header.epoch, header.term) != self._authority or self._authority < self._current_fence():
            raise RemoteProtocolError(
                f"({header.epoch}, {header.term}) is not the term in force", code="stale_term"
            )
        program = self._programs.get(header.program)
        if program is None:
            raise RemoteProtocolError(f"program {header.program} was never sent", code="unknown_program")
        n_embd_in, n_embd_out = self._row_widths(header.layer, program)
        if header.wire_type is WireType.Q8_0 and n_embd_in % dispatch.Q8_0_BLOCK:
            raise RemoteProtocolError(f"rows of {n_embd_in} are not whole Q8_0 blocks", code="shape_invalid")
        if header.payload_bytes != dispatch.dispatch_payload_bytes(
            header.n_rows, header.n_pairs, n_embd_in, header.wire_type, header.answer
        ):
            raise RemoteProtocolError(
                f"{header.payload_bytes} bytes are not {header.n_rows} rows of {n_embd_in} "
                f"in {header.wire_type.name}",
                code="shape_invalid",
            )
        if 4 * header.n_rows * n_embd_in > dispatch.PAYLOAD_BYTES_MAX:
            raise RemoteProtocolError(f"{header.n_rows} rows of {n_embd_in}", code="oversize")
        if 4 * header.n_pairs * n_embd_out > dispatch.PAYLOAD_BYTES_MAX:
            raise RemoteProtocolError(f"{header.n_pairs} rows of {n_embd_out} in a reply", code="oversize")
        self._program, self._width_in, self._width_out = program, n_embd_in, n_embd_out

    def _compute(self, header: DispatchHeader, size: int, received_ns: int) -> None:
        """Run the kernel on a dispatch whose header is good; send the rows or their sums."""
        are_summed = header.answer is Answer.SUMS
        n_results = header.n_rows if are_summed else header.n_pairs
        payload_bytes = dispatch.reply_payload_bytes(n_results, self._width_out)
        self._reserve_outgoing(dispatch.HEADER_BYTES + payload_bytes)
        results_address = self._outgoing_address + dispatch.HEADER_BYTES
        out_address = results_address
        if are_summed:
            self._rows = _at_least(self._rows, 4 * header.n_pairs * self._width_out)
            out_address = _address_of(self._rows)
        address = self._incoming_address + dispatch.HEADER_BYTES
        x_address = address + dispatch.tables_bytes(header.n_pairs, header.answer)
        if header.wire_type is WireType.Q8_0:
            x_address = self._expand(x_address, header.n_rows * self._width_in)
        with self._kernel_lock:
            started_ns = time.monotonic_ns()
            self._kernel.compute(
                layer=header.layer,
                program_index=self._program,
                n_rows=header.n_rows,
                n_pairs=header.n_pairs,
                x_address=x_address,
                row_of_pair_address=address,
                expert_of_pair_address=address + 4 * header.n_pairs,
                out_address=out_address,
            )
            if are_summed:
                self._add_up(header, out_address, results_address)
            compute_ns = time.monotonic_ns() - started_ns
        self._counters.requests += 1
        self._counters.rows += header.n_pairs
        self._counters.compute_ns += compute_ns
        self._send_rows(header, size, payload_bytes, received_ns, compute_ns)

    def _add_up(self, header: DispatchHeader, rows_address: int, sums_address: int) -> None:
        """Write the weighted sum of each row's pairs. A row without one would be a silent zero: refused."""
        tables_address = self._incoming_address + dispatch.HEADER_BYTES
        fault = self._weighted_sums(
            rows_address,
            tables_address,
            tables_address + 8 * header.n_pairs,
            header.n_pairs,
            header.n_rows,
            self._width_out,
            sums_address,
        )
        if fault >= 0:
            raise RemoteProtocolError(
                f"pair {fault} breaks the order of rows of a dispatch that asks for sums",
                code="row_out_of_range",
            )

    def _expand(self, blocks_address: int, n_values: int) -> int:
        """Turn the Q8_0 rows of a dispatch into F32; where those lie until the next time."""
        self._expanded = _at_least(self._expanded, 4 * n_values)
        address = _address_of(self._expanded)
        self._expand_q8_0(blocks_address, n_values, address)
        return address

    def _row_widths(self, layer: int, program: int) -> tuple[int, int]:
        """As the kernel says; asked once. Bounded by what the kernel accepts, not by what a backbone asks."""
        widths = self._widths.get((layer, program))
        if widths is None:
            with self._kernel_lock:
                widths = self._widths[layer, program] = self._kernel.row_widths(layer, program)
        return widths

    def _send_rows(
        self, header: DispatchHeader, size: int, payload_bytes: int, received_ns: int, compute_ns: int
    ) -> None:
        """Send the reply whose rows already lie behind the header's place in the outgoing buffer.

        The whole TLS records among it go first: the backbone takes longer to wake up than the digest takes.
        """
        end = dispatch.HEADER_BYTES + payload_bytes
        rows_end = end - dispatch.DIGEST_BYTES
        frame = memoryview(self._outgoing)
        dispatch.pack_reply_into(
            frame,
            request_id=header.request_id,
            code=ReplyCode.OK,
            payload_bytes=payload_bytes,
            n_pairs=header.n_pairs,
            received_ns=received_ns,
            compute_ns=compute_ns,
        )
        whole_records = rows_end - rows_end % _TLS_RECORD_BYTES
        self._send(frame[:whole_records])
        digest = dispatch.reply_digest(
            memoryview(self._incoming)[:size], frame[dispatch.HEADER_BYTES : rows_end]
        )
        frame[rows_end:end] = digest
        self._send(frame[whole_records:end])
        self._n_replies += 1
        self._link = next_link(self._link, digest)

    def _send_seal(self, request_id: int, received_ns: int) -> None:
        """Sign what was answered so far: the replies before have left already."""
        if self._authority is None:
            raise RemoteProtocolError("a seal before OPEN", code="not_open")
        self._acknowledge(request_id, received_ns, self._seal(self._n_replies, self._link, self._told))

    def _acknowledge(self, request_id: int, received_ns: int, payload: bytes = b"") -> None:
        """Send the reply to a frame that asks for no rows."""
        frame = bytearray(dispatch.HEADER_BYTES) + payload
        dispatch.pack_reply_into(
            frame,
            request_id=request_id,
            code=ReplyCode.OK,
            payload_bytes=len(payload),
            n_pairs=0,
            received_ns=received_ns,
            compute_ns=0,
        )
        self._send(memoryview(frame))

    def _refuse(self, request_id: int, error: RemoteProtocolError) -> None:
        self._counters.refusals += 1
        code = _CODE_OF_ERROR.get(error.code, ReplyCode.MALFORMED)
        log.warning("dispatch_refused", code=error.code, reason=str(error))
        with contextlib.suppress(OSError):
            self._send(memoryview(dispatch.pack_refusal(request_id, code, str(error))))

    def _send(self, data: memoryview) -> None:
        """Send all of it within `FRAME_TIMEOUT_S`. Raises `TimeoutError` when it is not taken by then.

        ``SSLSocket.sendall`` begins its timeout anew with every record, so a backbone that takes a byte now
        and then would hold a thread for hours.
        """
        deadline = time.monotonic() + FRAME_TIMEOUT_S
        while len(data):
            data = data[self._connection.send(data) :]
            if len(data) and time.monotonic() > deadline:
                raise TimeoutError("a reply took too long to be taken")

    def _reserve_outgoing(self, size_bytes: int) -> None:
        if size_bytes > len(self._outgoing):
            self._outgoing = bytearray(size_bytes)
            self._outgoing_address = _address_of(self._outgoing)


def _at_least(buffer: bytearray, size_bytes: int) -> bytearray:
    """The buffer, or a larger one in its place; what it holds does not matter."""
    return buffer if len(buffer) >= size_bytes else bytearray(size_bytes)


def _address_of(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
