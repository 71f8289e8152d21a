"""Evidence of wrong rows, such that anybody can check that this node's engine gave them.

An exhibit is one exchange of a connection, whole: the request as it was sent, the rows as they came, and the
links of the chain from there to a seal of the engine, whose key its node has signed. So nobody can make up an
answer of somebody else's, cut one, or put it to another request, program, model or claim. Whether the rows
are wrong is for whoever has the weights to find out: here they are only laid open. Rows of sums, and frames
that are larger than what a decoded token needs, are no evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, NamedTuple, TypeAlias

from kvasir_proto import dispatch
from kvasir_proto.audit.reply_chain import (
    FIRST_LINK,
    SEALED_REPLIES_MAX,
    claim_in_seal,
    last_link,
    next_program,
    open_seal,
)
from kvasir_proto.capability import CLOCK_SKEW_MAX
from kvasir_proto.certificate import verify_binding
from kvasir_proto.codec import decode
from kvasir_proto.dispatch import SEAL_BYTES, Answer, DispatchHeader, WireType, reply_digest
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, NodeIdField, SwarmDigest
from kvasir_proto.instants import Duration, WallTime
from kvasir_proto.limits import Count, Digest, Length, PublicKeyDer, Range
from kvasir_proto.messages import Family
from kvasir_proto.program import ExpertProgram, decode_program
from kvasir_proto.tolerance_certificate import CERTIFICATE_LIFETIME

ROWS_NEEDED: Final = 3
"""Different rows of one node that nothing explains, of which one is no proof: memory has errors too."""
EXHIBITS_MAX: Final = 4
EXHIBIT_BYTES_MAX: Final = 256 << 10
"""Bytes of a request and its rows: a token through eight experts of 4,096 columns takes 160 KiB."""
EVIDENCE_LIFETIME: Final[Duration] = CERTIFICATE_LIFETIME
EVIDENCE_SIZE_MAX: Final = 5 << 18
PROGRAMS_TOLD_MAX: Final = 8
ROWS_OF_AN_EXHIBIT_MAX: Final = 16

EvidenceBytes: TypeAlias = Annotated[bytes, Length(1, EVIDENCE_SIZE_MAX)]
"""Encoded `RowEvidence`."""
ExchangedBytes: TypeAlias = Annotated[bytes, Length(4, EXHIBIT_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class ToldProgram:
    """An expert program, encoded, and the index under which a connection knows it."""

    index: Annotated[int, Range(0, dispatch.PROGRAMS_MAX - 1)]
    program: Annotated[bytes, Length(1, dispatch.PROGRAM_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A DISPATCH frame, the rows of its reply, and which of its pairs have rows that nothing explains.

    `link` is that before this reply, the `n_before` of which came earlier; `later` are the digests of those
    between it and the `seal`.
    """

    request: ExchangedBytes
    rows: ExchangedBytes
    pairs: Annotated[
        tuple[Annotated[int, Range(0, dispatch.PAIRS_MAX - 1)], ...], Length(1, ROWS_OF_AN_EXHIBIT_MAX)
    ]
    link: Digest
    n_before: Count
    later: Annotated[tuple[Digest, ...], Length(0, SEALED_REPLIES_MAX)]
    seal: Annotated[bytes, Length(SEAL_BYTES, SEAL_BYTES)]


@dataclass(frozen=True, slots=True)
class RowEvidence:
    """Rows of `node_id`, all of one connection to its worker's engine.

    `binding` is that engine's, as it stands in its certificate, and `engine_key` the key that it names.
    """

    kind: ClassVar[str] = "row_evidence"
    node_id: NodeIdField
    binding: Annotated[bytes, Length(1, 4096)]
    engine_key: PublicKeyDer
    programs: Annotated[tuple[ToldProgram, ...], Length(1, PROGRAMS_TOLD_MAX)]
    exhibits: Annotated[tuple[Exhibit, ...], Length(1, EXHIBITS_MAX)]


ROW_EVIDENCE: Final = Family("row evidence", (RowEvidence,), EVIDENCE_SIZE_MAX)


class ShownRow(NamedTuple):
    """A row that was asked, as it travelled, and its answer: F32, little-endian."""

    layer: int
    program: ExpertProgram
    expert: int
    wire_type: WireType
    x: bytes
    answer: bytes


def open_evidence(
    data: bytes,
    node_id: NodeId,
    claim_digest: bytes,
    swarm: SwarmDigest,
    model_digest: bytes,
    now: WallTime,
) -> tuple[ShownRow, ...]:
    """The rows that this node's engine certainly gave, as a node with that claim, within the last week: no
    certificate is good for longer, and neither is what was found of a node with it.

    Raises `RemoteProtocolError`: as `decode`, `verify_binding` and `open_seal` do, or `bad_evidence` for what
    does not fit together, and for less than `ROWS_NEEDED` different rows.
    """
    evidence = decode(data, ROW_EVIDENCE)
    if evidence.node_id != node_id:
        raise _bad("it is of another node")
    verify_binding(evidence.binding, swarm, evidence.engine_key, node_id, "worker")
    known_at: dict[bytes, set[int]] = {}
    told, indices = FIRST_LINK, set[int]()
    for each in evidence.programs:
        indices = {*indices, each.index}
        told = next_program(told, each.index, each.program)
        known_at[told] = indices
    for exhibit in evidence.exhibits:
        digest = reply_digest(exhibit.request, exhibit.rows)
        seal = open_seal(exhibit.seal, model_digest, evidence.engine_key)
        if seal.link != last_link(exhibit.link, (digest, *exhibit.later)):
            raise _bad("its links do not lead to the seal")
        if seal.n_replies != exhibit.n_before + 1 + len(exhibit.later):
            raise _bad("the seal is of another number of replies")
        if seal.programs not in known_at or seal.claim != claim_in_seal(claim_digest):
            raise _bad("the seal is of other programs or another claim")
        if not 0 <= now - seal.at + CLOCK_SKEW_MAX <= EVIDENCE_LIFETIME + 2 * CLOCK_SKEW_MAX:
            raise _bad("its seal is too old, or of the future")
        if _header_of(exhibit).program not in known_at[seal.programs]:
            raise _bad("the request names a program that was not told by then")
    shown = rows_shown(evidence)
    if len({(each.layer, each.expert, each.x) for each in shown}) != len(shown):
        raise _bad("one row is shown twice")
    if len(shown) < ROWS_NEEDED:
        raise _bad(f"{len(shown)} rows prove nothing")
    return shown


def rows_shown(evidence: RowEvidence) -> tuple[ShownRow, ...]:
    """The rows in evidence, of which nothing is proved here. Raises `RemoteProtocolError`, `bad_evidence`."""
    programs: dict[int, ExpertProgram] = {}
    for each in evidence.programs:
        if each.index in programs:
            raise _bad("a program was told twice under one index")
        programs[each.index] = decode_program(each.program)
    return tuple(row for exhibit in evidence.exhibits for row in _rows_of(exhibit, programs))


def _header_of(exhibit: Exhibit) -> DispatchHeader:
    request = exhibit.request
    if len(request) + len(exhibit.rows) > EXHIBIT_BYTES_MAX or len(request) < dispatch.HEADER_BYTES:
        raise _bad("an exchange of that size is no evidence")
    header = dispatch.parse_header(request)
    if not isinstance(header, DispatchHeader) or header.answer is not Answer.ROWS:
        raise _bad("the request does not ask for rows")
    return header


def _rows_of(exhibit: Exhibit, programs: dict[int, ExpertProgram]) -> list[ShownRow]:
    request, rows = exhibit.request, exhibit.rows
    header = _header_of(exhibit)
    program = programs.get(header.program)
    if program is None:
        raise _bad("the request names a program that was not told")
    tables_bytes = dispatch.tables_bytes(header.n_pairs, header.answer)
    payload = request[dispatch.HEADER_BYTES :]
    x_bytes, x_rest = divmod(len(payload) - tables_bytes, header.n_rows)
    answer_bytes, answer_rest = divmod(len(rows), header.n_pairs)
    unit = dispatch.Q8_0_BLOCK_BYTES if header.wire_type is WireType.Q8_0 else 4
    if (
        len(payload) != header.payload_bytes
        or x_rest
        or answer_rest
        or x_bytes <= 0
        or x_bytes % unit
        or not answer_bytes
        or answer_bytes % 4
    ):
        raise _bad("the request or its rows are not whole")
    if list(exhibit.pairs) != sorted({*exhibit.pairs}) or exhibit.pairs[-1] >= header.n_pairs:
        raise _bad("the pairs are not in order, or not of this request")
    tables = memoryview(payload)
    shown = []
    for pair in exhibit.pairs:
        row = int.from_bytes(tables[4 * pair : 4 * pair + 4], "little", signed=True)
        at = 4 * (header.n_pairs + pair)
        expert = int.from_bytes(tables[at : at + 4], "little", signed=True)
        if not 0 <= row < header.n_rows or expert < 0:
            raise _bad("a pair names a row that is not there")
        start = tables_bytes + x_bytes * row
        x = payload[start : start + x_bytes]
        answer = rows[answer_bytes * pair : answer_bytes * (pair + 1)]
        shown.append(ShownRow(header.layer, program, expert, header.wire_type, x, answer))
    return shown


def _bad(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(reason, "bad_evidence")
