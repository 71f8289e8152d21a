"""What nodes say to each other to have one backbone: votes, leases, electorates, and what is known.

Whatever proves something travels as the bytes that were signed. Grants of a lease are believed because of who
sent them, everything else because of who signed it. A refusal says where the one who refuses stands, and
whoever is behind is sent `Knowledge`. Nothing here can carry a condition on a candidate's merits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, TypeAlias, get_args

from kvasir_proto.ids import Epoch, Term
from kvasir_proto.limits import (
    ELECTORS_MAX,
    PROOF_SIZE_MAX,
    SWARM_FRAME_SIZE_MAX,
    Digest,
    Length,
    Nanoseconds,
    ProofBytes,
    Sequence63,
)
from kvasir_proto.messages import Family

BALLOT_SIZE_MAX: Final = 1024
"""Bytes of the largest signed vote, pre-vote, endorsement or release."""
PROPOSAL_SIZE_MAX: Final = 4096
LINK_SIZE_MAX: Final = 8192
PREPARED_SIZE_MAX: Final = 8192
LINKS_MAX: Final = 32
"""Electorates in one message: 256 KiB at most. Whoever needs more asks again."""
EVIDENCE_COUNT_MAX: Final = 16
"""Liars that a node remembers, and so pieces of evidence in one message."""

BallotBytes: TypeAlias = Annotated[bytes, Length(1, BALLOT_SIZE_MAX)]
"""An encoded `Signed` vote, pre-vote, endorsement or release."""
ProposalBytes: TypeAlias = Annotated[bytes, Length(1, PROPOSAL_SIZE_MAX)]
"""An encoded proposal of an electorate."""
PreparedBytes: TypeAlias = Annotated[bytes, Length(1, PREPARED_SIZE_MAX)]
"""An encoded prepared electorate: the proof that so many assented to it."""
OptionalPrepared: TypeAlias = Annotated[bytes, Length(0, PREPARED_SIZE_MAX)]
LinkBytes: TypeAlias = Annotated[bytes, Length(1, LINK_SIZE_MAX)]
"""An encoded link of the chain of electorates."""
Links: TypeAlias = Annotated[tuple[LinkBytes, ...], Length(0, LINKS_MAX)]
Readiness: TypeAlias = Annotated[tuple[BallotBytes, ...], Length(0, ELECTORS_MAX)]
"""Pre-votes of a quorum for one candidate in one term; empty where none is known."""
OptionalProof: TypeAlias = Annotated[bytes, Length(0, PROOF_SIZE_MAX)]
"""`ProofBytes`, or empty where the receiver has it or there is none."""
RefusalReason: TypeAlias = Literal[
    "electorate", "no_elector", "restarted", "promised", "behind", "ahead", "barred", "voided"
]
"""Why there is no vote or lease: the electorate is not ours, we are none of its electors, we started a moment
ago, our promise to somebody else runs, the term is not above what we know, the term is too far above it, we
know something against the candidate, the term is void."""


@dataclass(frozen=True, slots=True)
class PreVoteRequest:
    """Would you vote for me in this term? `version` is the version of the electorate that is named."""

    kind: ClassVar[str] = "pre_vote_request"
    epoch: Epoch
    term: Term
    version: Sequence63
    electorate_digest: Digest


@dataclass(frozen=True, slots=True)
class PreVoteGrant:
    """Now I would. A promise of nothing; a quorum of them is what a vote asks for."""

    kind: ClassVar[str] = "pre_vote_grant"
    pre_vote: BallotBytes


@dataclass(frozen=True, slots=True)
class VoteRequest:
    """Vote for me in this term, which a quorum was ready for."""

    kind: ClassVar[str] = "vote_request"
    epoch: Epoch
    term: Term
    version: Sequence63
    electorate_digest: Digest
    readiness: Readiness


@dataclass(frozen=True, slots=True)
class VoteGrant:
    """The vote, and the prepared electorate its elector endorsed last, if it may have become the next one."""

    kind: ClassVar[str] = "vote_grant"
    vote: BallotBytes
    prepared: OptionalPrepared


@dataclass(frozen=True, slots=True)
class VoteRefusal:
    """No vote, pre-vote or lease in `asked_term`, and what the highest term and electorate known here are."""

    kind: ClassVar[str] = "vote_refusal"
    epoch: Epoch
    term: Term
    version: Sequence63
    asked_term: Term
    reason: RefusalReason
    wait_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """The backbone asks for its lease; `number` grows with each request. With the proof, once a term."""

    kind: ClassVar[str] = "lease_request"
    epoch: Epoch
    term: Term
    number: Sequence63
    proof: OptionalProof


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """No vote of mine goes to another until a lease and a tenth after I sent this."""

    kind: ClassVar[str] = "lease_grant"
    epoch: Epoch
    term: Term
    number: Sequence63


@dataclass(frozen=True, slots=True)
class LeaseRelease:
    """The signed word of a backbone that it uses its lease no more, for good in this term."""

    kind: ClassVar[str] = "lease_release"
    release: BallotBytes


@dataclass(frozen=True, slots=True)
class AssentRequest:
    """Would you endorse this proposal of mine? With the proof that the sender is the backbone.

    `prepared` shows that a quorum assented to the same electorate in an earlier ballot, if it did.
    """

    kind: ClassVar[str] = "assent_request"
    proposal: ProposalBytes
    proof: ProofBytes
    prepared: OptionalPrepared


@dataclass(frozen=True, slots=True)
class AssentGrant:
    """I would, and no proposal of an earlier ballot any more."""

    kind: ClassVar[str] = "assent_grant"
    assent: BallotBytes


@dataclass(frozen=True, slots=True)
class AssentRefusal:
    """I endorsed this one in its place, and for all I know it is committed."""

    kind: ClassVar[str] = "assent_refusal"
    prepared: PreparedBytes


@dataclass(frozen=True, slots=True)
class ElectorateProposal:
    """Endorse this prepared electorate. With the proof that the sender is the backbone."""

    kind: ClassVar[str] = "electorate_proposal"
    prepared: PreparedBytes
    proof: ProofBytes


@dataclass(frozen=True, slots=True)
class ElectorateEndorsement:
    """The answer to `ElectorateProposal`."""

    kind: ClassVar[str] = "electorate_endorsement"
    endorsement: BallotBytes


@dataclass(frozen=True, slots=True)
class KnowledgeRequest:
    """What do you know beyond this electorate and this fence? `anchor` is an electorate we were told of."""

    kind: ClassVar[str] = "knowledge_request"
    epoch: Epoch
    version: Sequence63
    fence_epoch: Epoch
    fence_term: Term
    anchor: Digest


@dataclass(frozen=True, slots=True)
class Evidence:
    """Two things that one elector signed and no honest one signs both."""

    kind: ClassVar[str] = "evidence"
    first: BallotBytes
    second: BallotBytes


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Electorates in their order, the newest term proof, the highest term a quorum was ready for, liars.

    `number` grows with each announcement of one term, for gossip carries equal bytes once only; 0 in answers.
    """

    kind: ClassVar[str] = "knowledge"
    links: Links
    proof: OptionalProof
    readiness: Readiness
    evidence: Annotated[tuple[Evidence, ...], Length(0, EVIDENCE_COUNT_MAX)]
    number: Sequence63 = 0


ElectionMessage: TypeAlias = (
    PreVoteRequest
    | PreVoteGrant
    | VoteRequest
    | VoteGrant
    | VoteRefusal
    | LeaseRequest
    | LeaseGrant
    | LeaseRelease
    | AssentRequest
    | AssentGrant
    | AssentRefusal
    | ElectorateProposal
    | ElectorateEndorsement
    | KnowledgeRequest
    | Knowledge
    | Evidence
)

ELECTION: Final[Family[ElectionMessage]] = Family("election", get_args(ElectionMessage), SWARM_FRAME_SIZE_MAX)
