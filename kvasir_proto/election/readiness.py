"""That a quorum was ready for a term: its pre-votes, without which no elector votes in it.

Terms so advance one quorum at a time. A candidate that asks for votes in a huge term is refused, and one that
lures a single elector ever higher, until the others refuse what that one needs, cannot: each step takes the
signatures of a quorum, and those bring everybody else up to date. A pre-vote binds nobody.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import ClassVar, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.codec import decode
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import Epoch, NodeIdField, SwarmDigest, Term
from kvasir_proto.limits import Digest
from kvasir_proto.messages import Family
from kvasir_proto.messages.election import BALLOT_SIZE_MAX
from kvasir_proto.signing import SIGNED, sign_message, verify
from kvasir_proto.term_proof import Electorate, ProvenTerm


@dataclass(frozen=True, slots=True)
class PreVote:
    """An elector would have voted for this candidate in this term when it was asked."""

    kind: ClassVar[str] = "pre_vote"
    epoch: Epoch
    term: Term
    candidate: NodeIdField
    electorate_digest: Digest


PRE_VOTE: Final = Family("pre-vote", (PreVote,), BALLOT_SIZE_MAX)


def sign_pre_vote(
    elector_key: Ed25519PrivateKey, swarm_digest: SwarmDigest, electorate: Electorate, term: ProvenTerm
) -> bytes:
    """One elector's encoded, signed pre-vote for `term.backbone` in that (epoch, term)."""
    return sign_message(elector_key, swarm_digest, PreVote(*term, electorate.digest()))


def open_pre_vote(
    data: bytes, swarm_digest: SwarmDigest, electorate: Electorate, expected: ProvenTerm | None = None
) -> tuple[ProvenTerm, bytes]:
    """What an encoded pre-vote is for, and the public key of its elector.

    Raises `RemoteProtocolError`: as `decode` and `verify` do, `not_an_elector`, or `wrong_vote` if it is for
    another electorate, or for something else than `expected`.
    """
    signed = decode(data, SIGNED)
    if signed.signer not in electorate.members:
        raise RemoteProtocolError("a pre-vote is by somebody who has none", "not_an_elector")
    if signed.payload_kind != PreVote.kind:
        raise RemoteProtocolError("not a pre-vote", "wrong_kind")
    content = decode(signed.payload, PRE_VOTE)
    term = ProvenTerm(content.epoch, content.term, content.candidate)
    if content.electorate_digest != electorate.digest() or (expected is not None and term != expected):
        raise RemoteProtocolError("a pre-vote is for another term, node or electorate", "wrong_vote")
    verify(signed, PreVote.kind, swarm_digest)
    return term, signed.signer


def verify_readiness(
    pre_votes: Sequence[bytes],
    swarm_digest: SwarmDigest,
    electorate: Electorate,
    not_counted: Set[bytes] = frozenset(),
) -> ProvenTerm:
    """For whom a quorum was ready, and in which term.

    Raises `RemoteProtocolError` as `open_pre_vote` does, or `no_quorum`, `wrong_term`.
    """
    if len(pre_votes) < electorate.quorum:
        raise RemoteProtocolError("fewer pre-votes than a quorum", "no_quorum")
    ready, _ = open_pre_vote(pre_votes[0], swarm_digest, electorate)
    if ready.epoch != electorate.epoch or ready.term <= electorate.term:
        raise RemoteProtocolError("the electorate is not older than the term", "wrong_term")
    electors = {open_pre_vote(each, swarm_digest, electorate, ready)[1] for each in pre_votes}
    if len(electors - not_counted) < electorate.quorum:
        raise RemoteProtocolError("fewer pre-votes than a quorum", "no_quorum")
    return ready
