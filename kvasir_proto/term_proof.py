"""Who is the backbone, proved: a quorum of signed votes for one node in one (epoch, term).

A worker moves its fence only on such a proof, so a lie about a huge term moves nothing. A proof is checked
under an electorate that the verifier already knows, never under one the proof brings along. Votes name the
electorate they were cast in, so they cannot be counted in another. A founder alone is an electorate of one,
and its own vote proves (0, 1). How votes are won is election's part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import Epoch, NodeId, NodeIdField, SwarmDigest, Term
from kvasir_proto.limits import ELECTORS_MAX, PROOF_SIZE_MAX, Digest, Length, PublicKey, Sequence63
from kvasir_proto.messages import Family
from kvasir_proto.signing import Signed, sign, verify

FOUNDING_EPOCH: Final = 0
FOUNDING_TERM: Final = 1


@dataclass(frozen=True, slots=True)
class Electorate:
    """Everybody with a vote, by public key in ascending order; `version` orders configurations in a term.

    A `pinned` electorate decides by majority: its members may crash but not lie. An `open` one of four or
    more needs more than two thirds, so that fewer than a third of liars prove nothing.
    """

    kind: ClassVar[str] = "electorate"
    version: Sequence63
    rule: Literal["pinned", "open"]
    members: Annotated[tuple[PublicKey, ...], Length(1, ELECTORS_MAX)]

    @property
    def quorum(self) -> int:
        """How many members must agree."""
        count = len(self.members)
        if self.rule == "open" and count >= 4:
            return 2 * count // 3 + 1
        return count // 2 + 1

    def digest(self) -> bytes:
        """SHA-256 of the encoded configuration: what a vote names."""
        return hashlib.sha256(encode(self)).digest()


@dataclass(frozen=True, slots=True)
class Vote:
    """One elector's vote for a backbone; the elector is who signed it."""

    kind: ClassVar[str] = "vote"
    epoch: Epoch
    term: Term
    backbone: NodeIdField
    electorate_digest: Digest


_Votes: TypeAlias = Annotated[tuple[Signed, ...], Length(1, ELECTORS_MAX)]


@dataclass(frozen=True, slots=True)
class TermProof:
    """The votes that made a backbone."""

    kind: ClassVar[str] = "term_proof"
    epoch: Epoch
    term: Term
    backbone: NodeIdField
    electorate: Electorate
    votes: _Votes


VOTE: Final = Family("vote", (Vote,), 4096)
TERM_PROOF: Final = Family("term proof", (TermProof,), PROOF_SIZE_MAX)


class ProvenTerm(NamedTuple):
    """Which node is the backbone in which (epoch, term). Compares by (epoch, term) first."""

    epoch: int
    term: int
    backbone: NodeId


def make_electorate(version: int, rule: Literal["pinned", "open"], members: Iterable[bytes]) -> Electorate:
    """The electorate of these raw public keys, in their order, each once."""
    return Electorate(version, rule, tuple(sorted(set(members))))


def founding_electorate(founder_public_key: bytes) -> Electorate:
    """The electorate every swarm begins with: its founder."""
    return make_electorate(0, "pinned", (founder_public_key,))


def cast_vote(
    elector_key: Ed25519PrivateKey,
    swarm_digest: SwarmDigest,
    electorate: Electorate,
    term: ProvenTerm,
) -> Signed:
    """One elector's signed vote that `term.backbone` be the backbone of that (epoch, term)."""
    vote = Vote(term.epoch, term.term, term.backbone, electorate.digest())
    return sign(elector_key, Vote.kind, swarm_digest, encode(vote))


def make_term_proof(electorate: Electorate, term: ProvenTerm, votes: Iterable[Signed]) -> bytes:
    """The encoded proof, with the votes in the order of their signers. Does not check them."""
    ordered = tuple(sorted(votes, key=lambda vote: vote.signer))
    return encode(TermProof(term.epoch, term.term, term.backbone, electorate, ordered))


def verify_term_proof(data: bytes, swarm_digest: SwarmDigest, electorate: Electorate) -> ProvenTerm:
    """What the proof proves under the electorate that the verifier knows to be the newest.

    Raises `RemoteProtocolError`: as `decode` and `verify` do, or `unknown_electorate` (the proof is for
    another configuration), `wrong_vote` (a vote for something else), `not_an_elector`, `voted_twice`,
    `no_quorum`. One bad vote spoils the proof: an honest backbone does not send any.
    """
    proof = decode(data, TERM_PROOF)
    if proof.electorate != electorate:
        raise RemoteProtocolError("the term proof is for an electorate we do not know", "unknown_electorate")
    expected = Vote(proof.epoch, proof.term, proof.backbone, electorate.digest())
    voters: set[bytes] = set()
    for signed in proof.votes:
        if signed.signer not in electorate.members:
            raise RemoteProtocolError("a vote is by somebody who has none", "not_an_elector")
        if signed.signer in voters:
            raise RemoteProtocolError("an elector is counted twice", "voted_twice")
        if decode(verify(signed, Vote.kind, swarm_digest), VOTE) != expected:
            raise RemoteProtocolError("a vote is for another term, node or electorate", "wrong_vote")
        voters.add(signed.signer)
    if len(voters) < electorate.quorum:
        raise RemoteProtocolError(
            f"{len(voters)} votes of the {electorate.quorum} that are needed", "no_quorum"
        )
    return ProvenTerm(proof.epoch, proof.term, proof.backbone)
