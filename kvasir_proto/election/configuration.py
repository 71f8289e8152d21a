"""The chain of electorates: how one follows another, and the proof that it did.

An electorate is committed by endorsements: enough members of its predecessor and a quorum of its own, all for
one proven backbone in one term. Committed electorates form a line from the founder alone, or from the one an
invite named; a recovery, signed by the manifest's recovery key, starts a new one in a higher epoch. An
uncommitted one that somebody endorsed is not forgotten: the next backbone finishes it first. Refuses to know
who ought to be an elector.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, NamedTuple, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.codec import decode, encode
from kvasir_proto.election.quorum import endorsements_needed
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import Epoch, NodeId, NodeIdField, SwarmDigest, Term, public_key_of
from kvasir_proto.limits import ELECTORS_MAX, Length, Sequence63
from kvasir_proto.messages import Family
from kvasir_proto.messages.election import BALLOT_SIZE_MAX, LINK_SIZE_MAX, PROPOSAL_SIZE_MAX
from kvasir_proto.signing import Signed, open_signed, sign, sign_message, verify
from kvasir_proto.term_proof import (
    ENDORSEMENT,
    NO_PREDECESSOR,
    Electorate,
    ElectorateRule,
    Endorsement,
    ProvenTerm,
    make_electorate,
    make_term_proof,
)

STORED_LINKS_MAX: Final = 64
"""Electorates a node keeps to bring others up to date; who is further behind needs a new invite."""

_Endorsements: TypeAlias = Annotated[tuple[Signed, ...], Length(1, ELECTORS_MAX + 1)]
"""Of an electorate and its predecessor, which differ by one member."""


@dataclass(frozen=True, slots=True)
class CommittedElectorate:
    """An electorate and the endorsements that committed it, in one ballot under its term's backbone."""

    kind: ClassVar[str] = "committed_electorate"
    electorate: Electorate
    term: Term
    number: Sequence63
    backbone: NodeIdField
    endorsements: _Endorsements


@dataclass(frozen=True, slots=True)
class RecoveredElectorate:
    """A new epoch's first electorate, signed by the manifest's recovery key."""

    kind: ClassVar[str] = "recovered_electorate"
    electorate: Electorate
    recovery: Signed


LINK: Final[Family[CommittedElectorate | RecoveredElectorate]] = Family(
    "electorate link", (CommittedElectorate, RecoveredElectorate), LINK_SIZE_MAX
)


@dataclass(frozen=True, slots=True)
class Recovery:
    """What the recovery key signs: this electorate starts a new epoch."""

    kind: ClassVar[str] = "recovery"
    electorate: Electorate


RECOVERY: Final = Family("recovery", (Recovery,), PROPOSAL_SIZE_MAX)


@dataclass(frozen=True, slots=True)
class Nomination:
    """The founder's key says that this node may be an elector of a pinned electorate."""

    kind: ClassVar[str] = "nomination"
    member: NodeIdField


NOMINATION: Final = Family("nomination", (Nomination,), BALLOT_SIZE_MAX)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The backbone of (epoch, term) proposes an electorate. `nomination` is that of the member it adds.

    `number` counts the proposals of the term, from 1.
    """

    kind: ClassVar[str] = "proposal"
    epoch: Epoch
    term: Term
    number: Sequence63
    electorate: Electorate
    nomination: Annotated[bytes, Length(0, BALLOT_SIZE_MAX)]

    @property
    def ballot(self) -> tuple[int, int, int]:
        """Its place among all proposals; (0, 0, 0) is before the first."""
        return (self.epoch, self.term, self.number)


PROPOSAL: Final = Family("proposal", (Proposal,), PROPOSAL_SIZE_MAX)


class Link(NamedTuple):
    """One electorate of the chain and the bytes that prove it; `proof` is a term proof under it, or b""."""

    electorate: Electorate
    data: bytes
    proof: bytes


def sign_nomination(founder_key: Ed25519PrivateKey, swarm_digest: SwarmDigest, member: NodeId) -> bytes:
    """The founder's signed word that `member` may be an elector."""
    return sign_message(founder_key, swarm_digest, Nomination(member))


def make_recovery(
    recovery_key: Ed25519PrivateKey,
    swarm_digest: SwarmDigest,
    epoch: int,
    rule: ElectorateRule,
    members: Iterable[NodeId],
) -> bytes:
    """The encoded link that starts `epoch` with these electors."""
    electorate = make_electorate(0, rule, [public_key_of(each) for each in members], epoch=epoch)
    recovery = sign(recovery_key, Recovery.kind, swarm_digest, encode(Recovery(electorate)))
    return encode(RecoveredElectorate(electorate, recovery))


def successor_of(predecessor: Electorate, members: Iterable[bytes], term: int) -> Electorate:
    """The electorate of these public keys that follows `predecessor` in `term` of the same epoch."""
    return make_electorate(
        predecessor.version + 1,
        predecessor.rule,
        members,
        epoch=predecessor.epoch,
        term=term,
        predecessor=predecessor.digest(),
    )


def require_successor(electorate: Electorate, predecessor: Electorate) -> None:
    """Raise `RemoteProtocolError` (`wrong_electorate`) unless the one may follow the other.

    One member more or less, and that only when the predecessor was made in the same term: the first
    electorate a backbone makes has the members it found.
    """
    changed = set(electorate.members) ^ set(predecessor.members)
    follows = (
        electorate.predecessor == predecessor.digest()
        and electorate.version == predecessor.version + 1
        and electorate.epoch == predecessor.epoch
        and electorate.term >= predecessor.term
        and electorate.rule == predecessor.rule
        and list(electorate.members) == sorted(set(electorate.members))
        and len(changed) <= (1 if electorate.term == predecessor.term else 0)
    )
    if not follows:
        raise RemoteProtocolError("this electorate cannot follow the one we know", "wrong_electorate")


def commits(endorsers: set[bytes], electorate: Electorate, predecessor: Electorate) -> bool:
    """Whether these public keys are enough of the predecessor and a quorum of the electorate."""
    return (
        len(endorsers & set(predecessor.members)) >= endorsements_needed(predecessor, electorate)
        and len(endorsers & set(electorate.members)) >= electorate.quorum
    )


def open_link(
    data: bytes,
    newest: Electorate,
    swarm_digest: SwarmDigest,
    recovery_public_key: bytes,
) -> Link:
    """The link in these bytes, if it follows the newest electorate that is known.

    Endorsements by known liars count: who learns of a lie first and of an older link later must not be stuck
    before it, and the quorums already allow for as many liars as there may be.

    Raises `RemoteProtocolError`: as `decode` and `verify` do, `wrong_electorate`, `not_an_elector`,
    `voted_twice`, `wrong_vote`, `no_quorum`, or `wrong_recovery`. What is cheap is checked first.
    """
    link = decode(data, LINK)
    if isinstance(link, RecoveredElectorate):
        return Link(_recovered(link, newest, swarm_digest, recovery_public_key), data, b"")
    electorate = link.electorate
    require_successor(electorate, newest)
    if link.term < electorate.term:
        raise RemoteProtocolError("endorsed before it was made", "wrong_electorate")
    members = set(newest.members) | set(electorate.members)
    expected = Endorsement(electorate.epoch, link.term, link.number, link.backbone, electorate.digest())
    endorsers: set[bytes] = set()
    for signed in link.endorsements:
        if signed.signer not in members:
            raise RemoteProtocolError("an endorsement is by somebody who has no vote", "not_an_elector")
        if signed.signer in endorsers:
            raise RemoteProtocolError("an elector is counted twice", "voted_twice")
        if decode(verify(signed, Endorsement.kind, swarm_digest), ENDORSEMENT) != expected:
            raise RemoteProtocolError("an endorsement is for something else", "wrong_vote")
        endorsers.add(signed.signer)
    if not commits(endorsers, electorate, newest):
        raise RemoteProtocolError("too few electors endorsed this electorate", "no_quorum")
    return Link(electorate, data, _proof_of(link))


def anchored_link(data: bytes, anchor: bytes) -> Link:
    """The link in these bytes if its electorate is the one with this digest, which somebody trusted named.

    Raises `RemoteProtocolError`: as `decode` does, or `wrong_electorate`. Its endorsements are not checked,
    so it proves no backbone.
    """
    electorate = decode(data, LINK).electorate
    if electorate.digest() != anchor:
        raise RemoteProtocolError("not the electorate that the invite named", "wrong_electorate")
    return Link(electorate, data, b"")


def make_link(electorate: Electorate, term: ProvenTerm, number: int, endorsements: Iterable[Signed]) -> bytes:
    """The encoded link, with the endorsements in the order of their signers. Does not check them."""
    ordered = tuple(sorted(endorsements, key=lambda each: each.signer))
    return encode(CommittedElectorate(electorate, term.term, number, term.backbone, ordered))


def is_nominated(nomination: bytes, member: NodeId, swarm_digest: SwarmDigest, founder: NodeId) -> bool:
    """Whether the founder's key nominates this member."""
    try:
        opened = open_signed(nomination, NOMINATION, swarm_digest)
    except RemoteProtocolError:
        return False
    return opened.signer == founder and opened.message.member == member


def _recovered(
    link: RecoveredElectorate, newest: Electorate, swarm_digest: SwarmDigest, recovery_public_key: bytes
) -> Electorate:
    electorate = link.electorate
    fits = (
        electorate.epoch > newest.epoch
        and (electorate.term, electorate.version, electorate.predecessor) == (0, 0, NO_PREDECESSOR)
        and list(electorate.members) == sorted(set(electorate.members))
    )
    if not fits:
        raise RemoteProtocolError("this recovery starts no epoch after ours", "wrong_recovery")
    if link.recovery.signer != recovery_public_key:
        raise RemoteProtocolError("a recovery is signed by the recovery key", "wrong_recovery")
    if decode(verify(link.recovery, Recovery.kind, swarm_digest), RECOVERY) != Recovery(electorate):
        raise RemoteProtocolError("the recovery key signed another electorate", "wrong_recovery")
    return electorate


def _proof_of(link: CommittedElectorate) -> bytes:
    """The term proof that the endorsements by the electorate's own members are."""
    members = set(link.electorate.members)
    own = [each for each in link.endorsements if each.signer in members]
    term = ProvenTerm(link.electorate.epoch, link.term, link.backbone)
    return make_term_proof(link.electorate, term, own)
