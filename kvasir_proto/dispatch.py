"""The data plane's frames: what a backbone and a worker say to each other once per MoE layer.

These frames ride a mutually authenticated TLS connection, one request after another, outside msgpack: a
layer costs a few hundred microseconds and a fixed header packs in one. The module knows layouts and bounds
only. It refuses to know numpy, sockets, clocks or what an expert computes.

Every frame is a fixed header of `HEADER_BYTES` and then `payload_bytes` of payload, all little-endian:

* ``OPEN``: msgpack; the session's epoch, term, term proof and the model's digest. Answered by a ``REPLY``.
* ``PROGRAM``: one encoded expert program under an index that later dispatches name. Answered by a ``REPLY``.
* ``DISPATCH``: I32 row_of_pair[n_pairs], I32 expert_of_pair[n_pairs], for sums F32 weight_of_pair[n_pairs],
  rows[n_rows, n_embd_in].
* ``SEAL``: nothing; asks the worker to sign what it has answered so far. Answered by a ``REPLY``.
* ``REPLY``: when the code is ``OK``, F32 rows[n_pairs, n_embd_out], or F32 sums[n_rows, n_embd_out] where
  sums were asked for, and behind them the SHA-256 over (request, rows); `SEAL_BYTES` where a seal was asked
  for (`audit.reply_chain`), nothing where neither was; else a UTF-8 sentence.

The digest stands behind the rows so that they are under way while it is computed.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgpack

from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.program import PROGRAM_SIZE_BYTES_MAX

HEADER_BYTES: Final = 48
"""Size of every frame's header."""

DIGEST_BYTES: Final = 32
"""Size of the SHA-256 behind a REPLY's rows."""

SEAL_BYTES: Final = 176
"""Size of the payload of a REPLY to a SEAL."""

PAIRS_MAX: Final = 65_536
"""(row, expert) pairs in one dispatch: a ubatch of 4,096 tokens with 16 experts each."""

PAYLOAD_BYTES_MAX: Final = 512 * 1024 * 1024
"""Largest payload a receiver prepares for; 4,096 tokens x 8 slots x n_embd 4,096 in F32."""

Q8_0_BLOCK: Final = 32
Q8_0_BLOCK_BYTES: Final = 34
"""Values in one block of `WireType.Q8_0`, and its size."""

REFUSAL_TEXT_BYTES_MAX: Final = 1024
OPEN_BYTES_MAX: Final = 64 * 1024
PROGRAM_BYTES_MAX: Final = PROGRAM_SIZE_BYTES_MAX
PROGRAMS_MAX: Final = 64
"""Programs one connection may name: a model has one for each kind of layer."""

_MAGIC: Final = b"KVA1"
_COMMON: Final = struct.Struct("<4sBBHQQ")  # magic, kind, wire type, code, request id, payload bytes
_DISPATCH: Final = struct.Struct("<4sBBHQQIIIIII")  # + epoch, term, layer, program, n_rows, n_pairs
_REPLY: Final = struct.Struct("<4sBBHQQQQI4x")  # + received_ns, compute_ns, n_pairs

assert _DISPATCH.size == _REPLY.size == HEADER_BYTES


class FrameKind(enum.IntEnum):
    """What a frame is."""

    OPEN = 1
    PROGRAM = 2
    DISPATCH = 3
    REPLY = 4
    SEAL = 5


class WireType(enum.IntEnum):
    """How activation rows travel to a worker; what comes back is F32.

    ``Q8_0`` is ggml's block format: for each 32 values an F16 step and 32 signed bytes. A kernel that rounds
    its input so anyway gets the same numbers from it as from F32 (`kvasir_node.backbone.wire_types`).
    """

    F32 = 0
    Q8_0 = 1


class Answer(enum.IntEnum):
    """What a dispatch asks for.

    ``SUMS``: for each row that travelled, the experts' rows times the pairs' weights, added up in the order
    of pairs. Only of this dispatch's own pairs: who asked adds what other holders have of the same row. It
    travels where replies have their code.
    """

    ROWS = 0
    SUMS = 1


class ReplyCode(enum.IntEnum):
    """Why a worker did not answer with rows; ``OK`` when it did."""

    OK = 0
    MALFORMED = 1
    OVERSIZE = 2
    NOT_OPEN = 3
    STALE_TERM = 4
    WRONG_MODEL = 5
    UNKNOWN_PROGRAM = 6
    UNKNOWN_LAYER = 7
    FOREIGN_EXPERT = 8
    ROW_OUT_OF_RANGE = 9
    SHAPE_INVALID = 10
    PROGRAM_UNFIT = 11
    KERNEL_FAILED = 12


_PLAIN_BYTES_MAX: Final = {
    FrameKind.OPEN: OPEN_BYTES_MAX,
    FrameKind.PROGRAM: PROGRAM_BYTES_MAX,
    FrameKind.SEAL: 0,
}

# Plain numbers: an enumeration's members take a tenth of a microsecond to look up, more with cold caches.
_F32: Final = int(WireType.F32)
_WIRE_TYPES: Final = tuple(WireType)
assert [int(each) for each in _WIRE_TYPES] == list(range(len(_WIRE_TYPES)))
_SUMS: Final = int(Answer.SUMS)
_ANSWERS: Final = tuple(Answer)
assert [int(each) for each in _ANSWERS] == list(range(len(_ANSWERS)))
_KIND_DISPATCH: Final = int(FrameKind.DISPATCH)
_KIND_REPLY: Final = int(FrameKind.REPLY)
_REPLY_CODES: Final = tuple(ReplyCode)
assert [int(code) for code in _REPLY_CODES] == list(range(len(_REPLY_CODES)))


class DispatchHeader(NamedTuple):
    """A dispatch: which rows, through which experts of which layer, under which authority.

    ``n_rows`` distinct activation rows travel; pair p asks for expert ``expert_of_pair[p]`` on row
    ``row_of_pair[p]``. ``program`` is the index that an earlier PROGRAM frame gave.
    """

    wire_type: WireType
    answer: Answer
    request_id: int
    payload_bytes: int
    epoch: int
    term: int
    layer: int
    program: int
    n_rows: int
    n_pairs: int


class ReplyHeader(NamedTuple):
    """A reply: the code and the worker's own timestamps.

    ``received_ns`` is the worker's monotonic clock when the request was complete, ``compute_ns`` how long
    the kernel took. Across machines only differences of the former mean anything.
    """

    request_id: int
    payload_bytes: int
    code: ReplyCode
    received_ns: int
    compute_ns: int
    n_pairs: int


class PlainHeader(NamedTuple):
    """OPEN, PROGRAM or SEAL; ``program`` is the index that a PROGRAM frame gives to what it carries."""

    kind: FrameKind
    request_id: int
    payload_bytes: int
    program: int


@dataclass(frozen=True, slots=True)
class Opening:
    """What a backbone says first on a connection: under which proven term, and of which model.

    An engine knows no electorate: its control has checked ``proof`` before it moved the fence and let this
    dialler in. It travels here as well so that a connection can be judged by itself.
    """

    epoch: int
    term: int
    proof: bytes
    model_digest: bytes

    def encode(self) -> bytes:
        """The payload of an OPEN frame."""
        return bytes(msgpack.packb([self.epoch, self.term, self.proof, self.model_digest]))

    @classmethod
    def decode(cls, data: bytes) -> Opening:
        """Raises `RemoteProtocolError` for anything but a well-formed opening."""
        try:
            fields = msgpack.unpackb(data, use_list=False)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise RemoteProtocolError("OPEN is not msgpack", code="malformed") from error
        kinds = (int, int, bytes, bytes)
        if (
            not isinstance(fields, tuple)
            or len(fields) != len(kinds)
            or any(type(value) is not kind for value, kind in zip(fields, kinds, strict=True))
            or not 0 <= fields[0] < 2**32
            or not 0 <= fields[1] < 2**32
        ):
            raise RemoteProtocolError("OPEN has other fields than expected", code="malformed")
        return cls(*fields)


Header = DispatchHeader | ReplyHeader | PlainHeader


def pack_dispatch_into(
    buffer: bytearray | memoryview,
    *,
    request_id: int,
    epoch: int,
    term: int,
    layer: int,
    program: int,
    n_rows: int,
    n_pairs: int,
    n_embd_in: int,
    wire_type: WireType = WireType.F32,
    answer: Answer = Answer.ROWS,
) -> int:
    """Write a DISPATCH header at the start of ``buffer``; return the payload's size in bytes."""
    payload_bytes = dispatch_payload_bytes(n_rows, n_pairs, n_embd_in, wire_type, answer)
    _DISPATCH.pack_into(
        buffer,
        0,
        _MAGIC,
        _KIND_DISPATCH,
        wire_type,
        answer,
        request_id,
        payload_bytes,
        epoch,
        term,
        layer,
        program,
        n_rows,
        n_pairs,
    )
    return payload_bytes


def dispatch_payload_bytes(
    n_rows: int,
    n_pairs: int,
    n_embd_in: int,
    wire_type: WireType = WireType.F32,
    answer: Answer = Answer.ROWS,
) -> int:
    """Size in bytes of a DISPATCH payload: what travels with each pair, then the rows.

    Rows in Q8_0 are a whole number of blocks: ``n_embd_in`` is a multiple of `Q8_0_BLOCK`.
    """
    if wire_type is WireType.Q8_0:
        return tables_bytes(n_pairs, answer) + n_rows * (n_embd_in // Q8_0_BLOCK) * Q8_0_BLOCK_BYTES
    return tables_bytes(n_pairs, answer) + 4 * n_rows * n_embd_in


def tables_bytes(n_pairs: int, answer: Answer) -> int:
    """Size in bytes of what stands before the rows of a DISPATCH: two I32 a pair, and its weight for sums."""
    return (12 if answer is Answer.SUMS else 8) * n_pairs


def reply_payload_bytes(n_results: int, n_embd_out: int) -> int:
    """Size in bytes of an ``OK`` REPLY's payload: F32 rows or sums and their digest, or nothing at all."""
    return 4 * n_results * n_embd_out + DIGEST_BYTES if n_results else 0


def pack_reply_into(
    buffer: bytearray | memoryview,
    *,
    request_id: int,
    code: ReplyCode,
    payload_bytes: int,
    n_pairs: int,
    received_ns: int,
    compute_ns: int,
) -> None:
    """Write a REPLY header at the start of ``buffer``."""
    _REPLY.pack_into(
        buffer,
        0,
        _MAGIC,
        _KIND_REPLY,
        _F32,
        code,
        request_id,
        payload_bytes,
        received_ns,
        compute_ns,
        n_pairs,
    )


def pack_refusal(request_id: int, code: ReplyCode, reason: str) -> bytes:
    """A whole REPLY frame that refuses: the code and a sentence of bounded size."""
    text = reason.encode(errors="replace")[:REFUSAL_TEXT_BYTES_MAX]
    frame = bytearray(HEADER_BYTES)
    pack_reply_into(
        frame,
        request_id=request_id,
        code=code,
        payload_bytes=len(text),
        n_pairs=0,
        received_ns=0,
        compute_ns=0,
    )
    return bytes(frame) + text


def pack_plain(kind: FrameKind, request_id: int, payload: bytes, *, program: int = 0) -> bytes:
    """A whole OPEN, PROGRAM or SEAL frame."""
    if kind not in _PLAIN_BYTES_MAX:
        raise LocalProtocolError(f"{kind!r} frames are not plain")
    header = bytearray(HEADER_BYTES)
    _COMMON.pack_into(header, 0, _MAGIC, kind, WireType.F32, 0, request_id, len(payload))
    struct.pack_into("<I", header, _COMMON.size, program)
    return bytes(header) + payload


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """Read a header from the first `HEADER_BYTES` of ``data``.

    Raises `RemoteProtocolError` with code ``malformed`` or ``oversize`` for anything this module would
    not write; ``data`` shorter than a header is the caller's own error.
    """
    magic, kind, wire, code, request_id, payload_bytes = _COMMON.unpack_from(data, 0)
    if magic != _MAGIC:
        raise RemoteProtocolError("the frame does not start with KVA1", code="malformed")
    if wire != _F32 and (kind != _KIND_DISPATCH or wire >= len(_WIRE_TYPES)):
        raise RemoteProtocolError(f"wire type {wire} in a frame of kind {kind}", code="malformed")
    if kind == _KIND_REPLY:
        return _parse_reply(data, code)
    if kind == _KIND_DISPATCH and code <= _SUMS:
        return _parse_dispatch(data, _WIRE_TYPES[wire], _ANSWERS[code])
    if code:
        raise RemoteProtocolError(f"code {code} in a frame of kind {kind}", code="malformed")
    if kind in _PLAIN_BYTES_MAX:
        if payload_bytes > _PLAIN_BYTES_MAX[FrameKind(kind)]:
            raise RemoteProtocolError(f"{FrameKind(kind).name} of {payload_bytes} bytes", code="oversize")
        (program,) = struct.unpack_from("<I", data, _COMMON.size)
        if program >= PROGRAMS_MAX:
            raise RemoteProtocolError(f"program index {program}", code="oversize")
        return PlainHeader(FrameKind(kind), request_id, payload_bytes, program)
    raise RemoteProtocolError(f"unknown frame kind {kind}", code="malformed")


def request_id_of(data: bytes | bytearray | memoryview) -> int:
    """The request id of a header that `parse_header` refused: whatever stands in its place."""
    request_id: int = _COMMON.unpack_from(data, 0)[4]
    return request_id


def _parse_dispatch(
    data: bytes | bytearray | memoryview, wire_type: WireType, answer: Answer
) -> DispatchHeader:
    header = DispatchHeader(wire_type, answer, *_DISPATCH.unpack_from(data, 0)[4:])
    if header.payload_bytes > PAYLOAD_BYTES_MAX or header.n_pairs > PAIRS_MAX:
        raise RemoteProtocolError(
            f"dispatch of {header.n_pairs} pairs and {header.payload_bytes} bytes", code="oversize"
        )
    if header.n_pairs == 0 or header.n_rows == 0 or header.n_rows > header.n_pairs:
        raise RemoteProtocolError(
            f"dispatch of {header.n_rows} rows for {header.n_pairs} pairs", code="malformed"
        )
    return header


def _parse_reply(data: bytes | bytearray | memoryview, code: int) -> ReplyHeader:
    _, _, _, _, request_id, payload_bytes, received_ns, compute_ns, n_pairs = _REPLY.unpack_from(data, 0)
    if code >= len(_REPLY_CODES):
        raise RemoteProtocolError(f"unknown reply code {code}", code="malformed")
    if payload_bytes > (REFUSAL_TEXT_BYTES_MAX if code else PAYLOAD_BYTES_MAX) or n_pairs > PAIRS_MAX:
        raise RemoteProtocolError(f"reply of {payload_bytes} bytes", code="oversize")
    return ReplyHeader(request_id, payload_bytes, _REPLY_CODES[code], received_ns, compute_ns, n_pairs)


def reply_digest(request: bytes | bytearray | memoryview, rows: bytes | bytearray | memoryview) -> bytes:
    """SHA-256 over (request frame as sent, rows as sent): what a worker is held to when it is audited."""
    digest = hashlib.sha256(request)
    digest.update(rows)
    return digest.digest()
