"""A prepared electorate: enough assents to one proposal that it may be committed, which anybody can check.

Electorates are made in two steps, as in PBFT: electors assent, then those who are shown the assents of as
many as commit it endorse. Two prepared electorates of one place and one ballot cannot be, since an honest
elector assents to one proposal a ballot; and an elector that endorsed one assents to another in its place
only if shown that it was prepared later (the lock of Tendermint; Castro and Liskov 1999, Buchman 2016). So
what is committed stays, whichever backbones and up to a third of the electors lie. Keys and bytes only: what
an elector may sign is the elector's, whom to ask the backbone's part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.codec import decode, encode
from kvasir_proto.election.configuration import Proposal, commits, require_successor
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import Epoch, NodeId, NodeIdField, SwarmDigest, Term
from kvasir_proto.limits import ELECTORS_MAX, Digest, Length, Sequence63
from kvasir_proto.messages import Family
from kvasir_proto.messages.election import BALLOT_SIZE_MAX, PREPARED_SIZE_MAX
from kvasir_proto.signing import Signed, sign, verify
from kvasir_proto.term_proof import Electorate


@dataclass(frozen=True, slots=True)
class Assent:
    """An elector's word that it would endorse this proposal, and none of an earlier ballot any more."""

    kind: ClassVar[str] = "assent"
    epoch: Epoch
    term: Term
    number: Sequence63
    backbone: NodeIdField
    electorate_digest: Digest


ASSENT: Final = Family("assent", (Assent,), BALLOT_SIZE_MAX)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A proposal of that backbone, and the assents of as many as would commit it."""

    kind: ClassVar[str] = "prepared"
    proposal: Proposal
    backbone: NodeIdField
    assents: Annotated[tuple[Signed, ...], Length(1, ELECTORS_MAX + 1)]

    @property
    def electorate(self) -> Electorate:
        """The electorate that may be committed."""
        return self.proposal.electorate


PREPARED: Final = Family("prepared electorate", (Prepared,), PREPARED_SIZE_MAX)


def sign_assent(
    elector_key: Ed25519PrivateKey, swarm_digest: SwarmDigest, proposal: Proposal, backbone: NodeId
) -> bytes:
    """One elector's encoded, signed assent."""
    return encode(sign(elector_key, Assent.kind, swarm_digest, encode(_assent_to(proposal, backbone))))


def verify_assent(signed: Signed, swarm_digest: SwarmDigest, proposal: Proposal, backbone: NodeId) -> None:
    """Raise `RemoteProtocolError` unless this is an assent to this proposal: as `decode` and `verify` do, or
    `wrong_vote`.
    """
    if signed.payload_kind != Assent.kind or decode(signed.payload, ASSENT) != _assent_to(proposal, backbone):
        raise RemoteProtocolError("an assent is to something else", "wrong_vote")
    verify(signed, Assent.kind, swarm_digest)


def make_prepared(proposal: Proposal, backbone: NodeId, assents: Iterable[Signed]) -> bytes:
    """The encoded proof, with the assents in the order of their signers. Does not check them."""
    return encode(Prepared(proposal, backbone, tuple(sorted(assents, key=lambda each: each.signer))))


def open_prepared(data: bytes, predecessor: Electorate, swarm_digest: SwarmDigest) -> Prepared:
    """What is prepared to follow this electorate.

    Raises `RemoteProtocolError`: as `decode` and `verify` do, `wrong_electorate`, `not_an_elector`,
    `voted_twice`, `wrong_vote` or `no_quorum`. What is cheap is checked first.
    """
    prepared = decode(data, PREPARED)
    electorate = prepared.electorate
    require_successor(electorate, predecessor)
    members = {*predecessor.members, *electorate.members}
    assenters = [each.signer for each in prepared.assents]
    if not members.issuperset(assenters):
        raise RemoteProtocolError("an assent is by somebody who has no vote", "not_an_elector")
    if len(set(assenters)) != len(assenters):
        raise RemoteProtocolError("an elector is counted twice", "voted_twice")
    if not commits(set(assenters), electorate, predecessor):
        raise RemoteProtocolError("too few electors assented to this electorate", "no_quorum")
    for signed in prepared.assents:
        verify_assent(signed, swarm_digest, prepared.proposal, prepared.backbone)
    return prepared


def peek_prepared(data: bytes) -> Prepared:
    """What is prepared by bytes whose signatures are not looked at: those a node has stored itself.

    Raises `RemoteProtocolError` as `decode` does.
    """
    return decode(data, PREPARED)


def _assent_to(proposal: Proposal, backbone: NodeId) -> Assent:
    return Assent(*proposal.ballot, backbone, proposal.electorate.digest())
