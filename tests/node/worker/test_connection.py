"""A worker's side of a connection: every refusal can be reached, and after it the worker goes on serving.

Most tests run `serve` in this thread on a scripted socket, which gives exactly the chunks it is told to.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_node.worker import connection as connection_module
from kvasir_node.worker.connection import BUFFER_BYTES, BackboneConnection, ServingCounters
from kvasir_proto import dispatch
from kvasir_proto.audit.reply_chain import FIRST_LINK, Seal, last_link, next_program, open_seal
from kvasir_proto.dispatch import FrameKind, Opening, ReplyCode, ReplyHeader
from kvasir_proto.errors import EngineFailed, RemoteProtocolError
from tests.node.tls_ends import no_seals, seals_of, tls_pair, worker_end
from tests.node.toy_experts import (
    LAYERS,
    OTHER_PROGRAM,
    PROGRAM,
    UNFIT_PROGRAM,
    WIDTH,
    Rows,
    ToyKernel,
    compute_rows,
    shard_of,
)

MODEL = bytes(range(32))
CLAIM = bytes(range(1, 33))
LAYER = LAYERS[0]
Chunk = bytes | type[TimeoutError]


class ScriptedSocket:
    """Gives `chunks` one read at a time and keeps what is sent; its stream ends after the last chunk."""

    def __init__(self, chunks: Iterable[Chunk], send_size_max: int = 1 << 30) -> None:
        self._chunks: deque[Chunk] = deque(chunks)
        self.send_size_max = send_size_max
        self.sent = bytearray()
        self.largest_read = 0

    def settimeout(self, seconds: float) -> None:
        assert seconds > 0

    def recv_into(self, view: memoryview) -> int:
        assert len(view), "a read of no bytes looks like the end of the stream"
        self.largest_read = max(self.largest_read, len(view))
        if not self._chunks:
            return 0
        chunk = self._chunks.popleft()
        if not isinstance(chunk, bytes):
            raise TimeoutError("nothing came")
        part = chunk[: len(view)]
        view[: len(part)] = part
        if len(part) < len(chunk):
            self._chunks.appendleft(chunk[len(part) :])
        return len(part)

    def send(self, data: memoryview) -> int:
        part = data[: self.send_size_max]
        self.sent += part
        return len(part)


class Served:
    """What a connection did with a stream of bytes."""

    def __init__(
        self,
        chunks: Iterable[Chunk],
        *,
        kernel: ToyKernel | None = None,
        fence: tuple[int, int] = (0, 1),
        is_stopping: bool = False,
        send_size_max: int = 1 << 30,
    ) -> None:
        self.kernel = kernel or ToyKernel()
        self.fence = fence
        self.counters = ServingCounters()
        self.socket = ScriptedSocket(chunks, send_size_max)
        self.connection = BackboneConnection(
            cast(Any, self.socket),
            self.kernel,
            threading.Lock(),
            self.check_opening,
            lambda: self.fence,
            self.counters,
            seals_of(worker_end(), MODEL, CLAIM),
        )
        stop = threading.Event()
        if is_stopping:
            stop.set()
        self.reason = self.connection.serve(stop)

    def check_opening(self, opening: Opening) -> None:
        if opening.model_digest != MODEL:
            raise RemoteProtocolError("another model is loaded here", code="wrong_model")
        if (opening.epoch, opening.term) != self.fence:
            raise RemoteProtocolError("not the proven term", code="stale_term")

    @property
    def replies(self) -> list[tuple[ReplyHeader, bytes]]:
        return replies_in(self.socket.sent)

    @property
    def codes(self) -> list[ReplyCode]:
        return [header.code for header, _ in self.replies]


def replies_in(data: bytes | bytearray) -> list[tuple[ReplyHeader, bytes]]:
    """Headers and what they carry: rows without their digest, or a refusal's sentence."""
    found = []
    while data:
        header = dispatch.parse_header(data)
        assert isinstance(header, ReplyHeader)
        end = dispatch.HEADER_BYTES + header.payload_bytes
        digest_bytes = dispatch.DIGEST_BYTES if header.n_pairs else 0
        found.append((header, bytes(data[dispatch.HEADER_BYTES : end - digest_bytes])))
        data = data[end:]
    return found


def open_frame(request: int = 1, *, epoch: int = 0, term: int = 1, model: bytes = MODEL) -> bytes:
    return dispatch.pack_plain(FrameKind.OPEN, request, Opening(epoch, term, b"proof", model).encode())


def program_frame(request: int = 2, index: int = 0, payload: bytes = PROGRAM.encode()) -> bytes:
    return dispatch.pack_plain(FrameKind.PROGRAM, request, payload, program=index)


def dispatch_frame(
    request: int = 3,
    *,
    x: Rows | None = None,
    rows: Sequence[int] = (0, 0, 1),
    experts: Sequence[int] = (0, 3, 5),
    layer: int = LAYER,
    program: int = 0,
    epoch: int = 0,
    term: int = 1,
    width: int = WIDTH,
) -> bytes:
    if x is None:
        x = np.arange(2 * width, dtype=np.float32).reshape(2, width)
    frame = bytearray(dispatch.HEADER_BYTES)
    dispatch.pack_dispatch_into(
        frame,
        request_id=request,
        epoch=epoch,
        term=term,
        layer=layer,
        program=program,
        n_rows=len(x),
        n_pairs=len(rows),
        n_embd_in=width,
    )
    tables = struct.pack(f"<{len(rows)}i{len(experts)}i", *rows, *experts)
    return bytes(frame) + tables + x.astype(np.float32).tobytes()


BEGINNING = open_frame() + program_frame()
GOOD = dispatch_frame(99)
GOOD_ROWS = compute_rows(
    LAYER,
    np.arange(2 * WIDTH, dtype=np.float32).reshape(2, WIDTH),
    np.array([0, 0, 1], np.int32),
    np.array([0, 3, 5], np.int32),
).tobytes()


def test_rows_come_back_with_times_and_digest() -> None:
    served = Served([BEGINNING + GOOD])
    header, rows = served.replies[-1]
    assert rows == GOOD_ROWS
    assert (header.request_id, header.n_pairs) == (99, 3)
    assert served.socket.sent.endswith(GOOD_ROWS + dispatch.reply_digest(GOOD, GOOD_ROWS))
    assert 0 < header.received_ns <= time.monotonic_ns()
    assert served.reason == "closed by the backbone"
    assert (served.counters.requests, served.counters.rows, served.counters.refusals) == (1, 3, 0)


def test_rows_in_q8_0_are_expanded_before_the_kernel_sees_them() -> None:
    width, steps = 64, np.array([0.5, 2.0, 0.25, 1.0], np.float16)
    quants = np.arange(-64, 64, dtype=np.int8).reshape(4, 32)
    x = (quants * steps[:, None].astype(np.float32)).reshape(2, width)
    plain = dispatch_frame(99, x=x.astype(np.float32), width=width)
    blocks = b"".join(step.tobytes() + row.tobytes() for step, row in zip(steps, quants, strict=True))
    served = Served([BEGINNING, plain, q8_0_frame(98, blocks, width)], kernel=ToyKernel(width=width))
    (first, expected), (second, rows) = served.replies[2:]
    assert (first.code, second.code) == (ReplyCode.OK, ReplyCode.OK)
    assert rows == expected
    tables = struct.pack("<6i", 0, 0, 1, 0, 3, 5)
    assert served.socket.sent.endswith(dispatch.reply_digest(q8_0_frame(98, blocks, width), rows))
    assert q8_0_frame(98, blocks, width).endswith(tables + blocks)


def q8_0_frame(request: int, blocks: bytes, width: int) -> bytes:
    """A dispatch of two rows in Q8_0 to three experts."""
    frame = bytearray(dispatch.HEADER_BYTES)
    dispatch.pack_dispatch_into(
        frame,
        request_id=request,
        epoch=0,
        term=1,
        layer=LAYER,
        program=0,
        n_rows=2,
        n_pairs=3,
        n_embd_in=width,
        wire_type=dispatch.WireType.Q8_0,
    )
    return bytes(frame) + struct.pack("<6i", 0, 0, 1, 0, 3, 5) + blocks


def sums_frame(
    request: int, rows: Sequence[int] = (0, 0, 1), *, n_rows: int = 2, blocks: bytes = b"", width: int = WIDTH
) -> bytes:
    """A dispatch that asks experts 0, 3 and 5 for sums with weights 0.5, 2 and 0.25; of Q8_0 rows if any."""
    frame = bytearray(dispatch.HEADER_BYTES)
    wire_type = dispatch.WireType.Q8_0 if blocks else dispatch.WireType.F32
    dispatch.pack_dispatch_into(
        frame,
        request_id=request,
        epoch=0,
        term=1,
        layer=LAYER,
        program=0,
        n_rows=n_rows,
        n_pairs=3,
        n_embd_in=width,
        wire_type=wire_type,
        answer=dispatch.Answer.SUMS,
    )
    tables = struct.pack("<6i3f", *rows, 0, 3, 5, 0.5, 2.0, 0.25)
    x = np.arange(n_rows * width, dtype=np.float32).tobytes()
    return bytes(frame) + tables + (blocks or x)


def summed(rows: bytes, width: int = WIDTH) -> bytes:
    """What `sums_frame` asks for, of the three rows."""
    first, second, third = np.frombuffer(rows, np.float32).reshape(3, width)
    return np.array(
        [first * np.float32(0.5) + second * np.float32(2.0), third * np.float32(0.25)], np.float32
    ).tobytes()


def test_sums_come_back_one_for_each_row_that_was_sent() -> None:
    served = Served([BEGINNING, sums_frame(98), GOOD])
    (header, sums), (_, rows) = served.replies[2:]
    assert rows == GOOD_ROWS  # the next dispatch asks for rows and gets them
    assert sums == summed(GOOD_ROWS)
    assert (header.code, header.n_pairs) == (ReplyCode.OK, 3)
    assert header.payload_bytes == 2 * 4 * WIDTH + dispatch.DIGEST_BYTES
    assert sums + dispatch.reply_digest(sums_frame(98), sums) in served.socket.sent
    assert (served.counters.requests, served.counters.rows) == (2, 6)


def test_sums_of_rows_in_q8_0() -> None:
    width = 64
    steps = np.array([0.5, 2.0, 0.25, 1.0], np.float16)
    quants = np.arange(-64, 64, dtype=np.int8).reshape(4, 32)
    blocks = b"".join(step.tobytes() + row.tobytes() for step, row in zip(steps, quants, strict=True))
    frames = [BEGINNING, q8_0_frame(99, blocks, width), sums_frame(98, blocks=blocks, width=width)]
    (_, rows), (_, sums) = Served(frames, kernel=ToyKernel(width=width)).replies[2:]
    assert sums == summed(rows, width)


@pytest.mark.parametrize("rows, n_rows", [((0, 1, 0), 2), ((0, 0, 0), 2), ((0, 0, 2), 3), ((1, 1, 1), 2)])
def test_a_row_without_a_pair_or_out_of_order_has_no_sum(rows: tuple[int, ...], n_rows: int) -> None:
    """It would be a silent zero, or overwritten."""
    served = Served([BEGINNING, sums_frame(7, rows, n_rows=n_rows), GOOD])
    assert served.codes[2:] == [ReplyCode.ROW_OUT_OF_RANGE, ReplyCode.OK]
    assert served.replies[-1][1] == GOOD_ROWS


def test_weights_that_are_missing_are_noticed_by_the_header() -> None:
    damaged = bytearray(dispatch_frame(7))
    damaged[6] = dispatch.Answer.SUMS
    served = Served([BEGINNING, bytes(damaged), GOOD])
    assert served.codes[2:] == [ReplyCode.SHAPE_INVALID, ReplyCode.OK]


def test_rows_that_are_no_whole_q8_0_blocks_are_refused() -> None:
    served = Served([BEGINNING, q8_0_frame(7, b"", WIDTH), GOOD])
    assert served.codes[2:] == [ReplyCode.SHAPE_INVALID, ReplyCode.OK]


@pytest.mark.parametrize(
    "frame, code, id_of_reply",
    [
        (dispatch_frame(7, experts=(0, 1, 4)), ReplyCode.FOREIGN_EXPERT, 7),
        (dispatch_frame(7, experts=(0, 1, -1)), ReplyCode.FOREIGN_EXPERT, 7),
        (dispatch_frame(7, rows=(0, 1, 2)), ReplyCode.ROW_OUT_OF_RANGE, 7),
        (dispatch_frame(7, rows=(0, 1, -1)), ReplyCode.ROW_OUT_OF_RANGE, 7),
        (dispatch_frame(7, layer=0), ReplyCode.UNKNOWN_LAYER, 7),
        (dispatch_frame(7, layer=2**32 - 1), ReplyCode.UNKNOWN_LAYER, 7),
        (dispatch_frame(7, width=WIDTH + 1), ReplyCode.SHAPE_INVALID, 7),
        (dispatch_frame(7, width=1), ReplyCode.SHAPE_INVALID, 7),
        (dispatch_frame(7, width=100_000), ReplyCode.SHAPE_INVALID, 7),
        (dispatch_frame(7, term=0), ReplyCode.STALE_TERM, 7),
        (dispatch_frame(7, term=2), ReplyCode.STALE_TERM, 7),
        (dispatch_frame(7, epoch=1), ReplyCode.STALE_TERM, 7),
        (dispatch_frame(7, program=1), ReplyCode.UNKNOWN_PROGRAM, 7),
        (dispatch_frame(7, program=2**32 - 1), ReplyCode.UNKNOWN_PROGRAM, 7),
        (program_frame(7, 1, UNFIT_PROGRAM.encode()), ReplyCode.PROGRAM_UNFIT, 7),
        (program_frame(7, 1, b"\xc1 nonsense"), ReplyCode.MALFORMED, 7),
        (program_frame(7, 1, b""), ReplyCode.MALFORMED, 7),
        (program_frame(7, 1, PROGRAM.encode() + b"\0"), ReplyCode.MALFORMED, 7),
        (open_frame(7, term=2), ReplyCode.STALE_TERM, 7),
        (open_frame(7, epoch=9), ReplyCode.STALE_TERM, 7),
        (open_frame(7, model=bytes(32)), ReplyCode.WRONG_MODEL, 7),
        (dispatch.pack_plain(FrameKind.OPEN, 7, b"nonsense"), ReplyCode.MALFORMED, 7),
    ],
)
def test_a_refusal_has_its_code_and_the_worker_goes_on_serving(
    frame: bytes, code: ReplyCode, id_of_reply: int
) -> None:
    served = Served([BEGINNING + frame + GOOD], kernel=ToyKernel(shard_of(0, 1, 2, 3, 5)))
    assert served.codes == [ReplyCode.OK, ReplyCode.OK, code, ReplyCode.OK]
    refusal, text = served.replies[2]
    assert refusal.request_id == id_of_reply
    assert text.decode()
    assert served.replies[3][1] == GOOD_ROWS
    assert served.counters.refusals == 1


@pytest.mark.parametrize("frame", [dispatch_frame(7), program_frame(7)])
def test_nothing_is_served_before_open(frame: bytes) -> None:
    kernel = ToyKernel()
    served = Served([frame + BEGINNING + GOOD], kernel=kernel)
    assert served.codes[0] is ReplyCode.NOT_OPEN
    assert served.replies[0][0].request_id == 7
    assert served.codes[1:] == [ReplyCode.OK] * 3
    assert len(kernel.asked) == 1


def test_a_refused_opening_opens_nothing() -> None:
    served = Served([open_frame(model=bytes(32)) + program_frame() + GOOD])
    assert served.codes == [ReplyCode.WRONG_MODEL, ReplyCode.NOT_OPEN, ReplyCode.NOT_OPEN]


@pytest.mark.parametrize(
    "header, code",
    [
        (bytes(80), ReplyCode.MALFORMED),
        (b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" + b" " * 80, ReplyCode.MALFORMED),
        (GOOD[:4] + b"\x09" + GOOD[5:], ReplyCode.MALFORMED),
        (dispatch.pack_refusal(7, ReplyCode.MALFORMED, "no, you"), ReplyCode.MALFORMED),
        (GOOD[:16] + struct.pack("<Q", 2**63) + GOOD[24:], ReplyCode.OVERSIZE),
        (GOOD[:44] + struct.pack("<I", 2**31) + GOOD[48:], ReplyCode.OVERSIZE),
        (dispatch.pack_plain(FrameKind.OPEN, 7, bytes(dispatch.OPEN_BYTES_MAX + 1)), ReplyCode.OVERSIZE),
        (dispatch.pack_plain(FrameKind.PROGRAM, 7, b"", program=64), ReplyCode.OVERSIZE),
    ],
)
def test_a_stream_that_lost_its_frames_is_refused_and_ended(header: bytes, code: ReplyCode) -> None:
    served = Served([BEGINNING + header + GOOD])
    assert served.codes == [ReplyCode.OK, ReplyCode.OK, code]
    assert served.reason.startswith(code.name.lower())


def test_a_reply_larger_than_a_frame_is_refused_before_anything_is_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "PAYLOAD_BYTES_MAX", 4 * WIDTH * 30)
    many = dispatch_frame(7, x=np.ones((1, WIDTH), np.float32), rows=[0] * 31, experts=[0] * 31)
    served = Served([BEGINNING + many + GOOD])
    assert served.codes[2:] == [ReplyCode.OVERSIZE, ReplyCode.OK]


def test_what_the_kernel_cannot_do_is_refused_and_not_a_crash() -> None:
    kernel = ToyKernel()
    kernel.failure = EngineFailed("no memory")
    served = Served([BEGINNING + dispatch_frame(7) + GOOD], kernel=kernel)
    assert served.codes[2:] == [ReplyCode.KERNEL_FAILED] * 2
    assert served.replies[2][1] == b"no memory"


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_a_kernel_that_was_closed_meanwhile_is_refused_and_not_a_crash(is_asked_before: bool) -> None:
    class Closing(ToyKernel):
        """Closes after its first computation, or right after it learnt its program."""

        def add_program(self, program: Any) -> int:
            index = super().add_program(program)
            self.is_closed = not is_asked_before
            return index

        def compute(self, *arguments: Any, **named: Any) -> None:
            super().compute(*arguments, **named)
            self.is_closed = True

    served = Served([BEGINNING + GOOD + GOOD + program_frame(8)], kernel=Closing())
    first = ReplyCode.OK if is_asked_before else ReplyCode.KERNEL_FAILED
    assert served.codes[2:] == [first, ReplyCode.KERNEL_FAILED, ReplyCode.KERNEL_FAILED]


def test_a_fence_that_moved_makes_dispatches_stale_until_a_new_opening() -> None:
    class MovingFence(Served):
        def check_opening(self, opening: Opening) -> None:
            super().check_opening(opening)
            self.fence = (0, 2)  # moves as soon as the term of this opening is in force

    served = MovingFence([BEGINNING + GOOD + open_frame(4, term=2) + dispatch_frame(5, term=2)])
    assert served.codes == [ReplyCode.OK, ReplyCode.OK, ReplyCode.STALE_TERM, ReplyCode.OK, ReplyCode.OK]


def test_programs_are_told_apart_by_the_index_the_backbone_gave() -> None:
    kernel = ToyKernel()
    frames = program_frame(2, 63, OTHER_PROGRAM.encode()) + program_frame(3, 0)
    served = Served([open_frame() + frames + dispatch_frame(4, program=63) + GOOD], kernel=kernel)
    assert set(served.codes) == {ReplyCode.OK}
    assert kernel.programs == [OTHER_PROGRAM, PROGRAM]


# ---- How bytes arrive ----

STREAM = BEGINNING + dispatch_frame(7, layer=0) + GOOD


def test_frames_may_be_split_at_every_byte() -> None:
    for cut in range(1, len(STREAM)):
        served = Served([STREAM[:cut], STREAM[cut:]])
        assert served.codes == [ReplyCode.OK, ReplyCode.OK, ReplyCode.UNKNOWN_LAYER, ReplyCode.OK], cut
        assert served.replies[-1][1] == GOOD_ROWS


@given(st.lists(st.integers(1, 200), max_size=20))
def test_any_split_of_the_stream_gives_the_same_replies(sizes: list[int]) -> None:
    chunks, rest = [], STREAM
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    served = Served([chunk for chunk in [*chunks, rest] if chunk])
    assert served.codes == [ReplyCode.OK, ReplyCode.OK, ReplyCode.UNKNOWN_LAYER, ReplyCode.OK]
    assert served.replies[-1][1] == GOOD_ROWS


@given(st.binary(max_size=400))
def test_noise_never_crashes_a_connection(noise: bytes) -> None:
    served = Served([BEGINNING + noise] if noise else [BEGINNING])
    assert served.codes[:2] == [ReplyCode.OK, ReplyCode.OK]
    assert len(served.codes) <= 3


@given(data=st.data())
def test_a_frame_with_wild_numbers_never_crashes_a_connection(data: st.DataObject) -> None:
    """Each of the header's and the tables' numbers in turn, with extremes among the values."""
    wild = st.sampled_from([0, 1, 2, 3, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
    frame = bytearray(dispatch_frame(7))
    for _ in range(data.draw(st.integers(1, 3))):
        offset = data.draw(st.sampled_from([4, *range(16, 48, 4), *range(80, 104, 4)]))
        struct.pack_into("<I", frame, offset, data.draw(wild))
    served = Served([BEGINNING + bytes(frame), GOOD])
    assert served.codes[:2] == [ReplyCode.OK, ReplyCode.OK]


@pytest.mark.parametrize("cut", [1, 79, 80, 85, len(GOOD) - 1])
def test_a_stream_that_ends_inside_a_frame_is_noticed(cut: int) -> None:
    assert Served([BEGINNING + GOOD[:cut]]).reason == "closed inside a frame"


def test_silence_between_frames_is_allowed_and_inside_one_is_not() -> None:
    served = Served([TimeoutError, BEGINNING, TimeoutError, TimeoutError, GOOD, TimeoutError])
    assert served.codes == [ReplyCode.OK] * 3
    assert served.reason == "closed by the backbone"
    served = Served([BEGINNING, GOOD[:90], TimeoutError, GOOD[90:]])
    assert served.codes == [ReplyCode.OK] * 2
    assert served.reason == "nothing came"


def test_a_connection_that_is_to_stop_ends_at_the_next_silence() -> None:
    served = Served([BEGINNING, TimeoutError, GOOD], is_stopping=True)
    assert served.codes == [ReplyCode.OK] * 2


def test_a_frame_that_trickles_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "FRAME_TIMEOUT_S", -1.0)
    served = Served([BEGINNING, *(GOOD[index : index + 1] for index in range(20))])
    assert served.reason == "a frame took too long to arrive"


def test_a_reply_that_is_taken_byte_by_byte_arrives_whole() -> None:
    served = Served([BEGINNING, GOOD], send_size_max=1)
    assert served.codes[-1] is ReplyCode.OK
    assert served.reason == "closed by the backbone"


def test_a_reply_that_is_taken_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "FRAME_TIMEOUT_S", -1.0)
    served = Served([BEGINNING + GOOD], send_size_max=1)
    assert served.reason == "a reply took too long to be taken"
    assert len(served.socket.sent) == 1


# ---- Memory ----


def hostile_header(n_rows: int, n_pairs: int, payload_bytes: int) -> bytes:
    header = bytearray(dispatch_frame(7)[: dispatch.HEADER_BYTES])
    struct.pack_into("<Q", header, 16, payload_bytes)
    struct.pack_into("<II", header, 40, n_rows, n_pairs)
    return bytes(header)


@pytest.mark.parametrize(
    "beginning, header",
    [
        (b"", hostile_header(65536, 65536, dispatch.PAYLOAD_BYTES_MAX)),
        (BEGINNING, hostile_header(65536, 65536, dispatch.PAYLOAD_BYTES_MAX)),
        (BEGINNING, hostile_header(1, 1, dispatch.PAYLOAD_BYTES_MAX)),
        (BEGINNING, hostile_header(65536, 65536, dispatch.dispatch_payload_bytes(65536, 65536, WIDTH))),
    ],
    ids=["before-open", "inconsistent", "one-row", "consistent"],
)
def test_a_header_alone_costs_no_memory(beginning: bytes, header: bytes) -> None:
    tracemalloc.start()
    served = Served([beginning + header, bytes(1000)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert served.reason == "closed inside a frame"
    assert peak < 20 * BUFFER_BYTES


def test_the_payload_of_a_refused_dispatch_is_not_kept() -> None:
    size_bytes = 3 << 20
    chunks = [bytes(1 << 16)] * (size_bytes >> 16)
    served = Served([BEGINNING + hostile_header(1, 1, size_bytes), *chunks, GOOD])
    assert served.codes[2:] == [ReplyCode.SHAPE_INVALID, ReplyCode.OK]
    assert served.replies[-1][1] == GOOD_ROWS
    assert served.socket.largest_read <= BUFFER_BYTES


def test_a_large_dispatch_is_taken_as_it_comes() -> None:
    width = 512
    x = np.random.default_rng(3).normal(size=(900, width)).astype(np.float32)
    frame = dispatch_frame(7, x=x, rows=range(900), experts=[2] * 900, width=width)
    chunks = [frame[start : start + 70_000] for start in range(0, len(frame), 70_000)]
    served = Served([BEGINNING, *chunks], kernel=ToyKernel(width=width))
    expected = compute_rows(LAYER, x, np.arange(900, dtype=np.int32), np.full(900, 2, np.int32))
    assert served.replies[-1][1] == expected.tobytes()
    assert served.socket.largest_read <= len(frame)
    # And smaller ones after it.
    served = Served([BEGINNING, *chunks, *chunks], kernel=ToyKernel(width=width))
    assert [rows for _, rows in served.replies[2:]] == [expected.tobytes()] * 2


# ---- Seals ----


def test_a_seal_is_of_all_that_was_answered_and_of_the_programs_that_were_told() -> None:
    seal = dispatch.pack_plain(FrameKind.SEAL, 9, b"")
    other = program_frame(4, index=5)
    served = Served([BEGINNING + GOOD + GOOD + seal + dispatch_frame(8, program=3) + GOOD + other + seal])
    OK, UNKNOWN = ReplyCode.OK, ReplyCode.UNKNOWN_PROGRAM
    assert served.codes == [OK, OK, OK, OK, OK, UNKNOWN, OK, OK, OK]
    digest = dispatch.reply_digest(GOOD, GOOD_ROWS)
    told = next_program(FIRST_LINK, 0, PROGRAM.encode())
    for place, n_replies, programs in ((4, 2, told), (8, 3, next_program(told, 5, PROGRAM.encode()))):
        header, payload = served.replies[place]
        assert (header.request_id, header.n_pairs) == (9, 0)
        found = open_seal(payload, MODEL, worker_end().key)
        link = last_link(FIRST_LINK, [digest] * n_replies)
        assert found == Seal(n_replies, link, programs, CLAIM, found.at)


def test_nobody_seals_before_it_was_opened() -> None:
    served = Served([dispatch.pack_plain(FrameKind.SEAL, 9, b"") + BEGINNING])
    assert served.codes == [ReplyCode.NOT_OPEN, ReplyCode.OK, ReplyCode.OK]


# ---- Over TLS ----


def test_a_program_and_its_dispatch_in_one_record_are_both_answered() -> None:
    """The second frame is in the TLS object, not in the socket, when the worker looks for it."""
    client, server = tls_pair()
    connection = BackboneConnection(
        server, ToyKernel(), threading.Lock(), lambda _: None, lambda: (0, 1), ServingCounters(), no_seals
    )
    thread = threading.Thread(target=connection.serve, args=(threading.Event(),))
    thread.start()
    client.sendall(open_frame() + program_frame() + GOOD + GOOD)
    received = b""
    while len(received) < 4 * dispatch.HEADER_BYTES + 2 * (len(GOOD_ROWS) + dispatch.DIGEST_BYTES):
        received += client.recv(65536)
    assert [header.code for header, _ in replies_in(received)] == [ReplyCode.OK] * 4
    client.close()
    thread.join(10.0)
    assert not thread.is_alive()
    server.close()


def test_a_backbone_that_breaks_the_encryption_ends_its_connection() -> None:
    client, server = tls_pair()
    connection = BackboneConnection(
        server, ToyKernel(), threading.Lock(), lambda _: None, lambda: (0, 1), ServingCounters(), no_seals
    )
    reasons: list[str] = []
    thread = threading.Thread(target=lambda: reasons.append(connection.serve(threading.Event())))
    thread.start()
    socket.socket.sendall(client, GOOD)  # past the TLS object
    thread.join(10.0)
    assert reasons
    client.close()
    server.close()


def test_two_connections_share_one_kernel_without_meeting_in_it() -> None:
    """Programs are added and widths asked for under the same lock as computations."""

    class Exclusive(ToyKernel):
        def add_program(self, program: Any) -> int:
            assert lock.locked()
            return super().add_program(program)

        def row_widths(self, layer: int, program_index: int) -> tuple[int, int]:
            assert lock.locked()
            return super().row_widths(layer, program_index)

        def compute(self, *arguments: Any, **named: Any) -> None:
            assert lock.locked()
            super().compute(*arguments, **named)

    lock = threading.Lock()
    kernel = Exclusive()
    connection = BackboneConnection(
        cast(Any, ScriptedSocket([BEGINNING + GOOD])),
        kernel,
        lock,
        lambda _: None,
        lambda: (0, 1),
        ServingCounters(),
        no_seals,
    )
    assert connection.serve(threading.Event()) == "closed by the backbone"
    assert len(kernel.asked) == 1
