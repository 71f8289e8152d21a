"""Who is the backbone, proved: a quorum of signed votes for one node in one (epoch, term).

A worker moves its fence only on such a proof, so a lie about a huge term moves nothing. A proof is checked
under an electorate that the verifier already knows, never under one the proof brings along. Votes name the
electorate they were cast in, so they cannot be counted in another. An electorate that a backbone made in its
own term was not there to vote for it: its members endorse that backbone instead, and what they sign proves
the same. A founder alone is an electorate of one, and its own vote proves (0, 1). How votes are won is
election's part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import lru_cache
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
NO_PREDECESSOR: Final = bytes(32)

ElectorateRule: TypeAlias = Literal["pinned", "open"]
"""Who may be an elector: whom the founder's key nominates, or every member that is eligible."""


@dataclass(frozen=True, slots=True)
class Electorate:
    """Everybody with a vote, by public key in ascending order.

    `epoch` and `term` are those it was made in and `version` counts from its epoch's first: together they
    order electorates. `predecessor` is the digest of the one before, or zeros for an epoch's first. A
    `pinned` electorate decides by majority: its members may crash but not lie. An `open` one of four or more
    needs more than two thirds, so that fewer than a third of liars prove nothing.
    """

    kind: ClassVar[str] = "electorate"
    epoch: Epoch
    term: Term
    version: Sequence63
    predecessor: Digest
    rule: ElectorateRule
    members: Annotated[tuple[PublicKey, ...], Length(1, ELECTORS_MAX)]

    @property
    def order(self) -> tuple[int, int, int]:
        """What says which of two electorates is the later one."""
        return (self.epoch, self.term, self.version)

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


@dataclass(frozen=True, slots=True)
class Endorsement:
    """An elector's word that this node is the proven backbone of the term, and this the next electorate.

    Said by members of the electorate before it and of itself. Not a vote: an elector whose own candidate lost
    endorses the one that won. `number` is the proposal's in its term: those of two ballots do not add up.
    """

    kind: ClassVar[str] = "endorsement"
    epoch: Epoch
    term: Term
    number: Sequence63
    backbone: NodeIdField
    electorate_digest: Digest


_Votes: TypeAlias = Annotated[tuple[Signed, ...], Length(1, ELECTORS_MAX)]


@dataclass(frozen=True, slots=True)
class TermProof:
    """The votes that made a backbone, or the endorsements by an electorate that it made in its own term."""

    kind: ClassVar[str] = "term_proof"
    epoch: Epoch
    term: Term
    backbone: NodeIdField
    electorate: Electorate
    votes: _Votes


VOTE: Final = Family("vote", (Vote,), 4096)
ENDORSEMENT: Final = Family("endorsement", (Endorsement,), 4096)
TERM_PROOF: Final = Family("term proof", (TermProof,), PROOF_SIZE_MAX)
_DECODED_MAX: Final = 64


class ProvenTerm(NamedTuple):
    """Which node is the backbone in which (epoch, term). Compares by (epoch, term) first."""

    epoch: int
    term: int
    backbone: NodeId


def make_electorate(
    version: int,
    rule: ElectorateRule,
    members: Iterable[bytes],
    *,
    epoch: int = FOUNDING_EPOCH,
    term: int = 0,
    predecessor: bytes = NO_PREDECESSOR,
) -> Electorate:
    """The electorate of these raw public keys, in their order, each once."""
    return Electorate(epoch, term, version, predecessor, rule, tuple(sorted(set(members))))


def founding_electorate(founder_public_key: bytes, rule: ElectorateRule = "pinned") -> Electorate:
    """The electorate every swarm begins with: its founder."""
    return make_electorate(0, rule, (founder_public_key,))


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


def endorse(
    elector_key: Ed25519PrivateKey,
    swarm_digest: SwarmDigest,
    electorate: Electorate,
    term: ProvenTerm,
    number: int,
) -> Signed:
    """One elector's signed word that `term.backbone` is proven to it, and `electorate` the next one.

    `number` is that of the proposal in its term.
    """
    endorsement = Endorsement(term.epoch, term.term, number, term.backbone, electorate.digest())
    return sign(elector_key, Endorsement.kind, swarm_digest, encode(endorsement))


def verify_term_proof(
    data: bytes,
    swarm_digest: SwarmDigest,
    electorate: Electorate,
    not_counted: Set[bytes] = frozenset(),
) -> ProvenTerm:
    """What the proof proves under the electorate that the verifier knows to be the newest.

    Electors in `not_counted` (public keys) have lied before; what they sign counts for nothing. Raises
    `RemoteProtocolError`: as `decode` and `verify` do, or `unknown_electorate` (the proof is for another
    configuration), `wrong_term` (a vote in a term that the electorate is not older than), `wrong_vote` (a
    vote for something else), `not_an_elector`, `voted_twice`, `no_quorum`. One bad vote spoils the proof: an
    honest backbone does not send any.
    """
    proof = decode_term_proof(data)
    if proof.electorate != electorate:
        raise RemoteProtocolError("the term proof is for an electorate we do not know", "unknown_electorate")
    term, voters = _voters(data, swarm_digest)
    counted = len(voters - not_counted)
    if counted < electorate.quorum:
        raise RemoteProtocolError(f"{counted} votes of the {electorate.quorum} that are needed", "no_quorum")
    return term


@lru_cache(maxsize=_DECODED_MAX)
def decode_term_proof(data: bytes) -> TermProof:
    """What a proof says, unchecked. Remembered: the proof of a term comes by with every plan and message."""
    return decode(data, TERM_PROOF)


@lru_cache(maxsize=_DECODED_MAX)
def _voters(data: bytes, swarm_digest: SwarmDigest) -> tuple[ProvenTerm, frozenset[bytes]]:
    """What a proof is of, and who voted for it, under the electorate that it names itself."""
    proof = decode_term_proof(data)
    term = ProvenTerm(proof.epoch, proof.term, proof.backbone)
    return term, frozenset(verify_votes(proof.votes, swarm_digest, proof.electorate, term))


def verify_votes(
    votes: Iterable[Signed], swarm_digest: SwarmDigest, electorate: Electorate, term: ProvenTerm
) -> set[bytes]:
    """Whose votes and endorsements these are, all for this term's backbone under this electorate.

    Raises `RemoteProtocolError` as `verify_term_proof` does, for any of them that is not.
    """
    digest = electorate.digest()
    voters: set[bytes] = set()
    for signed in votes:
        if signed.signer not in electorate.members:
            raise RemoteProtocolError("a vote is by somebody who has none", "not_an_elector")
        if signed.signer in voters:
            raise RemoteProtocolError("an elector is counted twice", "voted_twice")
        is_vote = signed.payload_kind == Vote.kind
        # A vote in the term that the electorate was made in would be counted beside those of the electorate
        # before it, which it need not share a voter with.
        if term.epoch != electorate.epoch or term.term < electorate.term + is_vote:
            raise RemoteProtocolError("the electorate is not older than the term", "wrong_term")
        if is_vote:
            is_right = decode(verify(signed, Vote.kind, swarm_digest), VOTE) == Vote(*term, digest)
        else:
            payload = verify(signed, Endorsement.kind, swarm_digest)
            said = decode(payload, ENDORSEMENT)
            is_right = (said.epoch, said.term, said.backbone, said.electorate_digest) == (*term, digest)
        if not is_right:
            raise RemoteProtocolError("a vote is for another term, node or electorate", "wrong_vote")
        voters.add(signed.signer)
    return voters
