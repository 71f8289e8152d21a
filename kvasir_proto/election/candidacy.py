"""One attempt to be elected: first the pre-votes of a quorum, then its votes, in one term.

Collects and counts; whom to ask again and what to send is here, when is the core's. Each answer is checked
for what is cheap before its signature. A vote may bring along a prepared electorate that its elector
endorsed: it may be committed, so the winner finishes the one prepared last (`unfinished`) before its own.
"""

from __future__ import annotations

from kvasir_proto.codec import decode
from kvasir_proto.election.knowledge import ProvenKnowledge
from kvasir_proto.election.prepared import Prepared, open_prepared
from kvasir_proto.election.readiness import open_pre_vote
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of, public_key_of
from kvasir_proto.instants import Duration
from kvasir_proto.messages.election import PreVoteRequest, VoteGrant, VoteRequest
from kvasir_proto.signing import SIGNED, Signed
from kvasir_proto.term_proof import (
    Electorate,
    ProvenTerm,
    Vote,
    make_term_proof,
    verify_votes,
)


class Candidacy:
    """An attempt of `term.backbone` in that (epoch, term), under one electorate."""

    def __init__(self, swarm_digest: SwarmDigest, electorate: Electorate, term: ProvenTerm) -> None:
        self._swarm_digest = swarm_digest
        self.electorate = electorate
        self.term = term
        self._pre_votes: dict[bytes, bytes] = {}
        self._votes: dict[bytes, Signed] = {}
        self._refusals: dict[bytes, Duration] = {}
        self.unfinished: Prepared | None = None

    @property
    def request(self) -> PreVoteRequest | VoteRequest:
        """What to ask now: pre-votes, or once a quorum is ready, votes."""
        electorate = self.electorate
        place = (self.term.epoch, self.term.term, electorate.version, electorate.digest())
        return VoteRequest(*place, self.readiness) if self.is_ready else PreVoteRequest(*place)

    @property
    def unanswered(self) -> tuple[NodeId, ...]:
        """The electors that have not given what is asked for now, in the order of their keys."""
        answered = self._votes.keys() if self.is_ready else self._pre_votes.keys()
        return tuple(node_id_of(each) for each in self.electorate.members if each not in answered)

    @property
    def is_backed(self) -> bool:
        """Whether any elector would vote for it."""
        return bool(self._pre_votes)

    @property
    def is_ready(self) -> bool:
        """Whether a quorum would vote for it."""
        return len(self._pre_votes) >= self.electorate.quorum

    @property
    def is_elected(self) -> bool:
        """Whether a quorum voted for it."""
        return len(self._votes) >= self.electorate.quorum

    @property
    def readiness(self) -> tuple[bytes, ...]:
        """The pre-votes, in the order of their electors' keys."""
        return tuple(self._pre_votes[each] for each in sorted(self._pre_votes))

    @property
    def proof(self) -> bytes:
        """The term proof of its votes."""
        return make_term_proof(self.electorate, self.term, self._votes.values())

    def take_refusal(self, sender: NodeId, wait: Duration) -> Duration | None:
        """Note that an elector says no, for that long. Once no quorum is left: for how long that stays so.

        Counted to a quorum like everything else: one elector that always says no ends no candidacy.
        """
        public_key = public_key_of(sender)
        members = self.electorate.members
        if public_key in members and sender in self.unanswered:
            self._refusals[public_key] = wait
        missing = self.electorate.quorum - (len(members) - len(self._refusals))
        return sorted(self._refusals.values())[missing - 1] if missing > 0 else None

    def take_pre_vote(self, data: bytes, sender: NodeId, liars: frozenset[bytes]) -> None:
        """Count a pre-vote. Raises `RemoteProtocolError` for a bad one."""
        public_key = public_key_of(sender)
        if self.is_ready or public_key in self._pre_votes or public_key in liars:
            return
        _, elector = open_pre_vote(data, self._swarm_digest, self.electorate, self.term)
        if elector != public_key:
            raise RemoteProtocolError("somebody else's pre-vote", "wrong_vote")
        self._refusals.pop(public_key, None)
        self._pre_votes[elector] = data

    def take_vote(self, grant: VoteGrant, sender: NodeId, knowledge: ProvenKnowledge) -> None:
        """Count a vote, and keep what it says of an unfinished electorate. Raises `RemoteProtocolError`."""
        public_key = public_key_of(sender)
        if not self.is_ready or public_key in self._votes or public_key in knowledge.liars:
            return
        signed = decode(grant.vote, SIGNED)
        if signed.signer != public_key or signed.payload_kind != Vote.kind:
            raise RemoteProtocolError("not a vote of the one who sends it", "wrong_vote")
        verify_votes((signed,), self._swarm_digest, self.electorate, self.term)
        knowledge.see_ballots((signed,))
        if public_key in knowledge.liars:
            return
        self._refusals.pop(public_key, None)
        self._votes[public_key] = signed
        if grant.prepared:
            self._note_prepared(grant.prepared)

    def _note_prepared(self, data: bytes) -> None:
        """Keep the one of the latest ballot. What is made up is passed over; the vote counts all the same."""
        try:
            prepared = open_prepared(data, self.electorate, self._swarm_digest)
        except RemoteProtocolError:
            return
        if self.unfinished is None or prepared.proposal.ballot > self.unfinished.proposal.ballot:
            self.unfinished = prepared
