"""Evidence that an elector lied: two things that it signed, and no honest elector signs both.

Two votes in one term for different nodes, or two endorsements of different backbones in one term. Two proofs
of one term always hold such a pair, since their quorums share an elector. Anybody can check evidence; what
follows from it is decided elsewhere. A vote and an endorsement are no pair: the loser's elector endorses the
winner.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import SwarmDigest
from kvasir_proto.messages.election import Evidence
from kvasir_proto.signing import SIGNED, Signed, verify
from kvasir_proto.term_proof import ENDORSEMENT, VOTE, Endorsement, Vote


class Conviction(NamedTuple):
    """Who lied (a public key), and in which term."""

    liar: bytes
    epoch: int
    term: int


class SeenBallots:
    """The last vote and the last endorsement seen of each elector, to catch the one that contradicts it.

    Holds `size_max` of them; then the oldest is forgotten. Only ballots whose signature is good belong here.
    """

    def __init__(self, size_max: int = 32) -> None:
        self._size_max = size_max
        self._seen: dict[tuple[bytes, str], Signed] = {}

    def see(self, ballots: Iterable[Signed]) -> list[Evidence]:
        """Remember these ballots, and return the contradictions that they make with what was seen."""
        found = []
        for signed in ballots:
            key = (signed.signer, signed.payload_kind)
            before = self._seen.pop(key, None)
            if before is not None and _contradict(_content(before), _content(signed)):
                found.append(Evidence(encode(before), encode(signed)))
            self._seen[key] = signed
            if len(self._seen) > self._size_max:
                del self._seen[next(iter(self._seen))]
        return found


def verify_evidence(evidence: Evidence, swarm_digest: SwarmDigest) -> Conviction:
    """Who is proved to have lied. Raises `RemoteProtocolError`: as `decode` and `verify`, `no_evidence`."""
    first, second = decode(evidence.first, SIGNED), decode(evidence.second, SIGNED)
    contents = _content(first), _content(second)
    if first.signer != second.signer or not _contradict(*contents):
        raise RemoteProtocolError("these two do not contradict each other", "no_evidence")
    for signed in (first, second):
        verify(signed, signed.payload_kind, swarm_digest)
    return Conviction(first.signer, contents[0].epoch, contents[0].term)


def _content(signed: Signed) -> Vote | Endorsement:
    if signed.payload_kind == Vote.kind:
        return decode(signed.payload, VOTE)
    if signed.payload_kind == Endorsement.kind:
        return decode(signed.payload, ENDORSEMENT)
    raise RemoteProtocolError("neither a vote nor an endorsement", "no_evidence")


def _contradict(first: Vote | Endorsement, second: Vote | Endorsement) -> bool:
    return (
        first.kind == second.kind
        and (first.epoch, first.term) == (second.epoch, second.term)
        and first.backbone != second.backbone
    )
