"""The data plane's frames: what is packed is parsed, what is not ours is refused, bytes never change."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto import dispatch
from kvasir_proto.dispatch import (
    HEADER_BYTES,
    OPEN_BYTES_MAX,
    PAIRS_MAX,
    PAYLOAD_BYTES_MAX,
    PROGRAM_BYTES_MAX,
    PROGRAMS_MAX,
    REFUSAL_TEXT_BYTES_MAX,
    Answer,
    DispatchHeader,
    FrameKind,
    Opening,
    PlainHeader,
    ReplyCode,
    ReplyHeader,
    WireType,
    dispatch_payload_bytes,
    pack_dispatch_into,
    pack_plain,
    pack_refusal,
    pack_reply_into,
    parse_header,
    reply_digest,
    request_id_of,
)
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError

VECTORS = Path(__file__).parent.parent / "vectors" / "dispatch.json"

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def refusal_of(data: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        parse_header(data)
    return caught.value.code


def dispatch_frame(
    n_rows: int = 2,
    n_pairs: int = 3,
    n_embd_in: int = 4,
    *,
    epoch: int = 0,
    layer: int = 5,
    answer: Answer = Answer.ROWS,
) -> bytes:
    frame = bytearray(HEADER_BYTES)
    pack_dispatch_into(
        frame,
        request_id=7,
        epoch=epoch,
        term=1,
        layer=layer,
        program=2,
        n_rows=n_rows,
        n_pairs=n_pairs,
        n_embd_in=n_embd_in,
        answer=answer,
    )
    return bytes(frame)


def reply_frame(code: int = 0, payload_bytes: int = 48, n_pairs: int = 3) -> bytes:
    frame = bytearray(HEADER_BYTES)
    pack_reply_into(
        frame,
        request_id=7,
        code=ReplyCode.OK,
        payload_bytes=payload_bytes,
        n_pairs=n_pairs,
        received_ns=1,
        compute_ns=2,
    )
    struct.pack_into("<H", frame, 6, code)
    return bytes(frame)


def edited(frame: bytes, offset: int, layout: str, value: int) -> bytes:
    changed = bytearray(frame)
    struct.pack_into(layout, changed, offset, value)
    return bytes(changed)


# ---- What is packed is parsed ----


@given(
    request_id=U64,
    epoch=U32,
    term=U32,
    layer=U32,
    program=U32,
    n_pairs=st.integers(1, PAIRS_MAX),
    n_embd_in=st.integers(1, 2000),
    wire_type=st.sampled_from(WireType),
    answer=st.sampled_from(Answer),
    data=st.data(),
)
def test_a_dispatch_comes_back_as_it_was_packed(
    request_id: int,
    epoch: int,
    term: int,
    layer: int,
    program: int,
    n_pairs: int,
    n_embd_in: int,
    wire_type: WireType,
    answer: Answer,
    data: st.DataObject,
) -> None:
    if wire_type is WireType.Q8_0:
        n_embd_in *= dispatch.Q8_0_BLOCK
    n_rows = data.draw(st.integers(1, min(n_pairs, (PAYLOAD_BYTES_MAX - 12 * n_pairs) // (4 * n_embd_in))))
    buffer = bytearray(b"\xaa" * (HEADER_BYTES + 5))
    payload_bytes = pack_dispatch_into(
        buffer,
        request_id=request_id,
        epoch=epoch,
        term=term,
        layer=layer,
        program=program,
        n_rows=n_rows,
        n_pairs=n_pairs,
        n_embd_in=n_embd_in,
        wire_type=wire_type,
        answer=answer,
    )
    assert payload_bytes == dispatch_payload_bytes(n_rows, n_pairs, n_embd_in, wire_type, answer)
    expected = DispatchHeader(
        wire_type, answer, request_id, payload_bytes, epoch, term, layer, program, n_rows, n_pairs
    )
    assert parse_header(buffer) == expected
    assert isinstance(parse_header(buffer), DispatchHeader)
    assert buffer[HEADER_BYTES:] == b"\xaa" * 5


@given(
    request_id=U64,
    code=st.sampled_from(ReplyCode),
    payload_bytes=st.integers(0, REFUSAL_TEXT_BYTES_MAX),
    n_pairs=st.integers(0, PAIRS_MAX),
    received_ns=U64,
    compute_ns=U64,
)
def test_a_reply_comes_back_as_it_was_packed(
    request_id: int,
    code: ReplyCode,
    payload_bytes: int,
    n_pairs: int,
    received_ns: int,
    compute_ns: int,
) -> None:
    buffer = bytearray(b"\xaa" * HEADER_BYTES)
    pack_reply_into(
        buffer,
        request_id=request_id,
        code=code,
        payload_bytes=payload_bytes,
        n_pairs=n_pairs,
        received_ns=received_ns,
        compute_ns=compute_ns,
    )
    header = parse_header(buffer)
    assert header == ReplyHeader(request_id, payload_bytes, code, received_ns, compute_ns, n_pairs)
    assert isinstance(header, ReplyHeader)
    assert header.code is code


@given(
    kind=st.sampled_from([FrameKind.OPEN, FrameKind.PROGRAM]),
    request_id=U64,
    payload=st.binary(max_size=50),
    program=st.integers(0, PROGRAMS_MAX - 1),
)
def test_a_plain_frame_comes_back_as_it_was_packed(
    kind: FrameKind, request_id: int, payload: bytes, program: int
) -> None:
    frame = pack_plain(kind, request_id, payload, program=program)
    header = parse_header(frame)
    assert header == PlainHeader(kind, request_id, len(payload), program)
    assert isinstance(header, PlainHeader)
    assert header.kind is kind
    assert frame[HEADER_BYTES:] == payload


@given(request_id=U64, code=st.sampled_from(list(ReplyCode)[1:]), reason=st.text(max_size=1200))
def test_a_refusal_of_any_text_is_a_reply(request_id: int, code: ReplyCode, reason: str) -> None:
    frame = pack_refusal(request_id, code, reason)
    header = parse_header(frame)
    assert isinstance(header, ReplyHeader)
    assert (header.request_id, header.code, header.n_pairs) == (request_id, code, 0)
    text = frame[HEADER_BYTES:]
    assert header.payload_bytes == len(text) <= REFUSAL_TEXT_BYTES_MAX
    assert reason.encode().startswith(text)


def test_a_refusal_of_text_that_is_no_text_is_still_a_refusal() -> None:
    assert pack_refusal(1, ReplyCode.MALFORMED, "a\udcffb").endswith(b"a?b")


@pytest.mark.parametrize("kind", [FrameKind.DISPATCH, FrameKind.REPLY])
def test_only_open_and_program_are_plain(kind: FrameKind) -> None:
    with pytest.raises(LocalProtocolError):
        pack_plain(kind, 0, b"")


# ---- Arbitrary bytes ----


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES + 8))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert refusal_of(data) == "malformed"


headers = st.one_of(
    st.binary(min_size=HEADER_BYTES - 6, max_size=HEADER_BYTES - 6),
    st.binary(min_size=40, max_size=40).map(lambda rest: bytes(24) + rest + bytes(10)),
)


@given(
    kind=st.integers(0, 6),
    wire=st.integers(0, 1),
    rest=headers,
    small=st.lists(st.tuples(st.sampled_from([2, 10, 26, 30, 34, 38, 42]), st.integers(0, 70)), max_size=5),
)
def test_noise_behind_the_magic_gives_a_header_or_a_refusal(
    kind: int, wire: int, rest: bytes, small: list[tuple[int, int]]
) -> None:
    """Some of the noise is made small, so that what passes one check meets the next."""
    data = bytearray(b"KVA1" + bytes([kind, wire]) + rest)
    for offset, value in small:
        struct.pack_into("<I", data, offset + 6 if offset < HEADER_BYTES - 10 else offset, value)
    try:
        header = parse_header(bytes(data))
    except RemoteProtocolError as error:
        refusal = error.code
    else:
        refusal = ""
    if refusal:
        assert refusal in ("malformed", "oversize")
        return
    assert header.request_id == request_id_of(data)
    if isinstance(header, DispatchHeader):
        assert 1 <= header.n_rows <= header.n_pairs <= PAIRS_MAX
        assert header.payload_bytes <= PAYLOAD_BYTES_MAX
    elif isinstance(header, ReplyHeader):
        assert header.payload_bytes <= (PAYLOAD_BYTES_MAX if header.code is ReplyCode.OK else 1024)
        assert header.n_pairs <= PAIRS_MAX
    else:
        assert header.payload_bytes <= 65536
        assert header.program < PROGRAMS_MAX


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_headers_are_read_from_any_buffer(kind: type) -> None:
    assert parse_header(kind(dispatch_frame())) == parse_header(dispatch_frame())


# ---- Bounds ----


@pytest.mark.parametrize(
    "frame, code",
    [
        (edited(dispatch_frame(), 3, "<B", ord("2")), "malformed"),
        (edited(dispatch_frame(), 4, "<B", 0), "malformed"),
        (edited(dispatch_frame(), 4, "<B", 6), "malformed"),
        (edited(dispatch_frame(), 5, "<B", len(WireType)), "malformed"),
        (edited(reply_frame(), 5, "<B", WireType.Q8_0), "malformed"),
        (edited(pack_plain(FrameKind.OPEN, 1, b""), 5, "<B", WireType.Q8_0), "malformed"),
        (edited(dispatch_frame(), 6, "<H", len(Answer)), "malformed"),
        (edited(dispatch_frame(), 6, "<H", 0x100), "malformed"),
        (edited(pack_plain(FrameKind.OPEN, 1, b""), 6, "<H", Answer.SUMS), "malformed"),
        (edited(pack_plain(FrameKind.OPEN, 1, b""), 6, "<H", 12), "malformed"),
        (dispatch_frame(n_rows=0), "malformed"),
        (dispatch_frame(n_rows=0, n_pairs=0), "malformed"),
        (dispatch_frame(n_rows=4, n_pairs=3), "malformed"),
        (dispatch_frame(n_rows=1, n_pairs=PAIRS_MAX + 1), "oversize"),
        (edited(dispatch_frame(), 16, "<Q", PAYLOAD_BYTES_MAX + 1), "oversize"),
        (edited(dispatch_frame(), 16, "<Q", 2**64 - 1), "oversize"),
        (edited(dispatch_frame(), 40, "<I", 2**32 - 1), "malformed"),
        (reply_frame(code=len(ReplyCode)), "malformed"),
        (reply_frame(code=65535), "malformed"),
        (reply_frame(payload_bytes=PAYLOAD_BYTES_MAX + 1), "oversize"),
        (reply_frame(code=1, payload_bytes=REFUSAL_TEXT_BYTES_MAX + 1), "oversize"),
        (reply_frame(n_pairs=PAIRS_MAX + 1), "oversize"),
        (pack_plain(FrameKind.OPEN, 1, bytes(OPEN_BYTES_MAX + 1)), "oversize"),
        (pack_plain(FrameKind.PROGRAM, 1, bytes(PROGRAM_BYTES_MAX + 1)), "oversize"),
        (pack_plain(FrameKind.PROGRAM, 1, b"", program=PROGRAMS_MAX), "oversize"),
        (pack_plain(FrameKind.SEAL, 1, b"x"), "oversize"),
    ],
)
def test_what_is_out_of_bounds_is_refused(frame: bytes, code: str) -> None:
    assert refusal_of(frame) == code


@pytest.mark.parametrize(
    "frame",
    [
        dispatch_frame(n_rows=PAIRS_MAX, n_pairs=PAIRS_MAX, n_embd_in=1),
        edited(dispatch_frame(), 16, "<Q", PAYLOAD_BYTES_MAX),
        reply_frame(code=len(ReplyCode) - 1, payload_bytes=REFUSAL_TEXT_BYTES_MAX),
        reply_frame(payload_bytes=PAYLOAD_BYTES_MAX, n_pairs=PAIRS_MAX),
        pack_plain(FrameKind.OPEN, 1, bytes(OPEN_BYTES_MAX)),
        pack_plain(FrameKind.PROGRAM, 1, bytes(PROGRAM_BYTES_MAX), program=PROGRAMS_MAX - 1),
    ],
)
def test_what_is_just_within_bounds_is_taken(frame: bytes) -> None:
    parse_header(frame)


# ---- OPEN ----


@given(epoch=U32, term=U32, proof=st.binary(max_size=40), digest=st.binary(max_size=32))
def test_an_opening_comes_back_as_it_was_encoded(epoch: int, term: int, proof: bytes, digest: bytes) -> None:
    opening = Opening(epoch, term, proof, digest)
    assert Opening.decode(opening.encode()) == opening


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=8)
    | st.text(max_size=4),
    lambda each: st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=2), each, max_size=3),
    max_leaves=8,
)


@given(
    st.binary(max_size=60)
    | anything.map(msgpack.packb)
    | st.lists(anything, min_size=4, max_size=4).map(msgpack.packb)
)
def test_anything_else_is_no_opening(data: bytes) -> None:
    try:
        opening = Opening.decode(data)
    except RemoteProtocolError as error:
        refusal = error.code
    else:
        refusal = ""
    if refusal:
        assert refusal == "malformed"
    else:
        assert 0 <= opening.epoch < 2**32
        assert type(opening.proof) is type(opening.model_digest) is bytes


@pytest.mark.parametrize(
    "fields",
    [
        [0, 1, b"", b"", b""],
        [0, 1, b""],
        [True, 1, b"", b""],
        [0, 1.0, b"", b""],
        [0, 1, "", b""],
        [-1, 1, b"", b""],
        [0, 2**32, b"", b""],
        {0: 1},
        None,
    ],
)
def test_openings_of_wrong_form_are_refused(fields: object) -> None:
    with pytest.raises(RemoteProtocolError):
        Opening.decode(msgpack.packb(fields))


def test_an_opening_with_bytes_behind_it_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        Opening.decode(Opening(0, 1, b"", b"").encode() + b"\0")


def test_a_deeply_nested_opening_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        Opening.decode(b"\x91" * 60_000)


def test_q8_0_rows_take_34_bytes_for_32_values() -> None:
    assert dispatch_payload_bytes(3, 5, 64, WireType.Q8_0) == 8 * 5 + 3 * 2 * 34
    assert dispatch_payload_bytes(3, 5, 64) == 8 * 5 + 3 * 64 * 4


def test_sums_cost_a_weight_for_each_pair() -> None:
    assert dispatch_payload_bytes(3, 5, 64, answer=Answer.SUMS) == 12 * 5 + 3 * 64 * 4
    assert dispatch_payload_bytes(3, 5, 64, WireType.Q8_0, Answer.SUMS) == 12 * 5 + 3 * 2 * 34


# ---- The digest, and golden vectors ----


def test_rows_are_followed_by_their_digest_and_nothing_by_nothing() -> None:
    assert dispatch.reply_payload_bytes(3, 5) == 60 + dispatch.DIGEST_BYTES
    assert dispatch.reply_payload_bytes(0, 5) == 0


def test_a_replys_digest_covers_request_and_rows() -> None:
    digest = reply_digest(b"request", bytearray(b"rows"))
    assert digest == hashlib.sha256(b"requestrows").digest()
    assert reply_digest(b"requestr", b"ows") == digest  # the request's own header says where it ends


def test_frames_have_the_bytes_they_always_had(pytestconfig: pytest.Config) -> None:
    found = {
        "open": pack_plain(FrameKind.OPEN, 1, Opening(0, 1, b"proof", bytes(range(32))).encode()).hex(),
        "program": pack_plain(FrameKind.PROGRAM, 2, b"program", program=3).hex(),
        "seal": pack_plain(FrameKind.SEAL, 4, b"").hex(),
        "dispatch": dispatch_frame(epoch=9, layer=11).hex(),
        "dispatch_for_sums": dispatch_frame(epoch=9, layer=11, answer=Answer.SUMS).hex(),
        "reply": reply_frame().hex(),
        "refusal": pack_refusal(4, ReplyCode.FOREIGN_EXPERT, "expert 7 is not held").hex(),
        "codes": {code.name: int(code) for code in ReplyCode},
    }
    if pytestconfig.getoption("--regenerate-vectors", default=False):
        VECTORS.write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")
    assert json.loads(VECTORS.read_text(encoding="ascii")) == found


def test_bytes_on_record_are_still_understood() -> None:
    recorded = json.loads(VECTORS.read_text(encoding="ascii"))
    assert parse_header(bytes.fromhex(recorded["open"])) == PlainHeader(FrameKind.OPEN, 1, 44, 0)
    assert Opening.decode(bytes.fromhex(recorded["open"])[HEADER_BYTES:]).proof == b"proof"
    assert parse_header(bytes.fromhex(recorded["program"])) == PlainHeader(FrameKind.PROGRAM, 2, 7, 3)
    assert parse_header(bytes.fromhex(recorded["dispatch"])) == DispatchHeader(
        WireType.F32, Answer.ROWS, 7, 56, 9, 1, 11, 2, 2, 3
    )
    assert parse_header(bytes.fromhex(recorded["dispatch_for_sums"])) == DispatchHeader(
        WireType.F32, Answer.SUMS, 7, 68, 9, 1, 11, 2, 2, 3
    )
    reply = parse_header(bytes.fromhex(recorded["reply"]))
    assert reply == ReplyHeader(7, 48, ReplyCode.OK, 1, 2, 3)
    refusal = parse_header(bytes.fromhex(recorded["refusal"]))
    assert isinstance(refusal, ReplyHeader)
    assert refusal.code is ReplyCode.FOREIGN_EXPERT


def test_every_frame_begins_with_its_magic_and_kind() -> None:
    assert dispatch.HEADER_BYTES == 48
    assert [frame[:5] for frame in (dispatch_frame(), reply_frame())] == [b"KVA1\x03", b"KVA1\x04"]
