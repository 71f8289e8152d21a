"""Evidence of rows: what a third party can be sure of, and that nothing else passes for it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.certification.certify import expert_program
from kvasir_proto import dispatch
from kvasir_proto.audit.evidence import (
    EVIDENCE_LIFETIME,
    EXHIBIT_BYTES_MAX,
    ROWS_NEEDED,
    RowEvidence,
    ShownRow,
    ToldProgram,
    open_evidence,
)
from kvasir_proto.audit.reply_chain import (
    FIRST_LINK,
    Seal,
    last_link,
    link_said,
    next_program,
    open_seal,
    sign_seal,
)
from kvasir_proto.capability import CLOCK_SKEW_MAX
from kvasir_proto.codec import encode
from kvasir_proto.dispatch import Answer, WireType
from kvasir_proto.errors import ProtocolError, RemoteProtocolError
from kvasir_proto.ids import SwarmDigest
from kvasir_proto.instants import Duration, WallTime, after, seconds
from kvasir_proto.program import ExpertProgram
from tests.node.sealed_rows import SealingWorker

SWARM, OTHER_SWARM = SwarmDigest(bytes([1]) * 32), SwarmDigest(bytes([2]) * 32)
MODEL = bytes([3]) * 32
NOW = WallTime(1 << 60)
CLAIM = bytes([4]) * 32
PROGRAM = expert_program()
OTHER_PROGRAM = ExpertProgram(PROGRAM.steps[:1], PROGRAM.input_per_slot)


def worker(number: int = 1, **changes: Any) -> SealingWorker:
    key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
    made = SealingWorker(key, SWARM, PROGRAM, MODEL, CLAIM, **changes)
    for token in range(4):
        rows = [[float(token), 1.0], [float(token), 2.0]]
        made.answer(5, [3, 9], rows, [[7.0, token], [8.0, token]])
    return made


WORKER = worker()
GOOD = WORKER.evidence({1: [0, 1], 2: [1]})


def opened(evidence: RowEvidence, **changes: Any) -> tuple[ShownRow, ...]:
    known: dict[str, Any] = {"node_id": WORKER.node_id, "claim_digest": CLAIM, "swarm": SWARM}
    known |= {"model_digest": MODEL, "now": NOW}
    return open_evidence(encode(evidence), **{**known, **changes})


def floats(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 4}f", data)


def test_what_was_asked_and_answered_is_laid_open() -> None:
    shown = opened(GOOD)
    assert [(each.layer, each.expert) for each in shown] == [(5, 3), (5, 9), (5, 9)]
    assert [floats(each.x) for each in shown] == [(1.0, 1.0), (1.0, 2.0), (2.0, 2.0)]
    assert [floats(each.answer) for each in shown] == [(7.0, 1.0), (8.0, 1.0), (8.0, 2.0)]
    assert {(each.program, each.wire_type) for each in shown} == {(PROGRAM, WireType.F32)}


def with_exhibit(**changes: Any) -> RowEvidence:
    first, *rest = GOOD.exhibits
    return replace(GOOD, exhibits=(replace(first, **changes), *rest))


def flipped(data: bytes, place: int = -1) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


FIRST = GOOD.exhibits[0]
STRANGER = worker(2)
RESEALED = worker()
RESEALED.end, RESEALED.binding = WORKER.end, WORKER.binding
RESEALED.program = OTHER_PROGRAM
SUMS = bytearray(FIRST.request)
struct.pack_into("<H", SUMS, 6, Answer.SUMS)

FORGED: dict[str, Callable[[], RowEvidence]] = {
    "another answer": lambda: with_exhibit(rows=flipped(FIRST.rows)),
    "an answer to another request": lambda: with_exhibit(request=WORKER.exchanges[3][0]),
    "another request": lambda: with_exhibit(request=flipped(FIRST.request)),
    "a row less": lambda: with_exhibit(rows=FIRST.rows[:8], pairs=(0,)),
    "half a row": lambda: with_exhibit(rows=FIRST.rows[:-2]),
    "rows of nothing": lambda: with_exhibit(rows=bytes(len(FIRST.rows))),
    "no header": lambda: with_exhibit(request=FIRST.request[:40]),
    "sums": lambda: with_exhibit(request=bytes(SUMS)),
    "a reply as the request": lambda: with_exhibit(
        request=dispatch.pack_refusal(1, dispatch.ReplyCode.MALFORMED, "no")
    ),
    "another link": lambda: with_exhibit(link=flipped(FIRST.link)),
    "a link left out": lambda: with_exhibit(later=FIRST.later[1:]),
    "links in another order": lambda: with_exhibit(later=FIRST.later[::-1]),
    "another number": lambda: with_exhibit(n_before=FIRST.n_before + 1),
    "another seal": lambda: with_exhibit(seal=STRANGER.seal()),
    "a seal that is cut to nothing": lambda: with_exhibit(seal=bytes(dispatch.SEAL_BYTES)),
    "a seal of other programs": lambda: with_exhibit(seal=RESEALED.seal()),
    "another program": lambda: replace(GOOD, programs=(ToldProgram(0, OTHER_PROGRAM.encode()),)),
    "a program that was never told": lambda: replace(
        GOOD, programs=(*GOOD.programs, ToldProgram(1, PROGRAM.encode())), exhibits=(FIRST,)
    ),
    "a program told twice": lambda: replace(GOOD, programs=GOOD.programs * 2),
    "no program of that index": lambda: replace(GOOD, programs=(ToldProgram(1, PROGRAM.encode()),)),
    "a pair that is not there": lambda: with_exhibit(pairs=(0, 2)),
    "a pair twice": lambda: with_exhibit(pairs=(0, 0)),
    "pairs out of order": lambda: with_exhibit(pairs=(1, 0)),
    "one row shown twice": lambda: replace(GOOD, exhibits=(FIRST, FIRST)),
    "too few rows": lambda: replace(GOOD, exhibits=(FIRST,)),
    "another node's engine": lambda: replace(GOOD, binding=STRANGER.binding, engine_key=STRANGER.end.key),
    "another node's key": lambda: replace(GOOD, engine_key=STRANGER.end.key),
    "another node": lambda: replace(GOOD, node_id=STRANGER.node_id),
    "its backbone's engine": lambda: worker(1, role="backbone").evidence({1: [0, 1], 2: [1]}),
}


@pytest.mark.parametrize("what", FORGED)
def test_what_the_node_did_not_say_is_no_evidence(what: str) -> None:
    with pytest.raises(RemoteProtocolError):
        opened(FORGED[what]())


@pytest.mark.parametrize(
    "of",
    [
        {"node_id": STRANGER.node_id},
        {"claim_digest": bytes(32)},
        {"claim_digest": b""},
        {"swarm": OTHER_SWARM},
        {"model_digest": bytes(32)},
    ],
)
def test_evidence_is_of_one_node_as_it_was_certified_in_one_swarm_with_one_model(of: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        opened(GOOD, **of)


@pytest.mark.parametrize(
    "passed, counts",
    [
        (seconds(0), True),
        (EVIDENCE_LIFETIME, True),
        (Duration(EVIDENCE_LIFETIME + 2 * CLOCK_SKEW_MAX), False),
        (Duration(-CLOCK_SKEW_MAX), True),
        (Duration(-CLOCK_SKEW_MAX - 1), False),
    ],
)
def test_evidence_is_over_with_the_certificates_of_its_time(passed: Duration, counts: bool) -> None:
    """Else an old sin could be held against a node for ever."""
    if counts:
        assert opened(GOOD, now=after(NOW, passed))
        return
    with pytest.raises(RemoteProtocolError, match="too old, or of the future"):
        opened(GOOD, now=after(NOW, passed))


def test_a_node_without_certificates_can_be_found_out_too() -> None:
    made = worker()
    made.claim_digest = b""
    assert len(opened(made.evidence({1: [0, 1], 2: [1]}), claim_digest=b"")) == ROWS_NEEDED


def test_rows_of_programs_that_were_told_later_count_with_the_seals_of_then() -> None:
    told = (*GOOD.programs, ToldProgram(1, OTHER_PROGRAM.encode()))
    assert opened(replace(GOOD, programs=told)) == opened(GOOD)


def test_what_is_larger_than_evidence_may_be_is_refused() -> None:
    made = worker()
    wide = [[1.0] * (EXHIBIT_BYTES_MAX // 8)]
    number = made.answer(5, [3], wide, wide)
    with pytest.raises(ProtocolError):
        opened(made.evidence({number: [0], 1: [0, 1], 2: [1]}))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(encode(GOOD)) - 1), st.integers(1, 255))
def test_no_byte_of_it_can_be_changed(place: int, change: int) -> None:
    data = bytearray(encode(GOOD))
    data[place] ^= change
    try:
        shown = open_evidence(bytes(data), WORKER.node_id, CLAIM, SWARM, MODEL, NOW)
    except RemoteProtocolError:
        return
    assert set(shown) <= {*opened(GOOD), *opened(WORKER.evidence({1: [0, 1], 2: [0, 1]}))}, "only which pairs"


def test_a_seal_says_what_was_signed_and_nothing_of_another_engine_or_model() -> None:
    programs = next_program(FIRST_LINK, 0, PROGRAM.encode())
    seal = Seal(7, last_link(FIRST_LINK, [bytes(32)] * 7), programs, CLAIM, NOW)
    data = sign_seal(seal, MODEL, WORKER.end.credentials.sign)
    assert open_seal(data, MODEL, WORKER.end.key) == seal
    assert link_said(data) == seal.link
    for key in (STRANGER.end.key, b"no key", b""):
        with pytest.raises(RemoteProtocolError):
            open_seal(data, MODEL, key)
    for place in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            open_seal(flipped(data, place), MODEL, WORKER.end.key)
    for other in (b"", data[:-1], data + b"\0"):
        with pytest.raises(RemoteProtocolError):
            open_seal(other, MODEL, WORKER.end.key)
