"""Nodes that lie, for the small swarm: each has its own key and says what it likes."""

from __future__ import annotations

import random

from kvasir_proto.codec import decode, encode
from kvasir_proto.election.configuration import PROPOSAL, Proposal, make_recovery, successor_of
from kvasir_proto.election.prepared import make_prepared, sign_assent
from kvasir_proto.election.readiness import sign_pre_vote
from kvasir_proto.election.release import make_release
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.messages.election import (
    AssentGrant,
    AssentRefusal,
    AssentRequest,
    ElectionMessage,
    ElectorateEndorsement,
    ElectorateProposal,
    Knowledge,
    LeaseGrant,
    LeaseRelease,
    LeaseRequest,
    PreVoteGrant,
    PreVoteRequest,
    VoteGrant,
    VoteRefusal,
    VoteRequest,
)
from kvasir_proto.signing import SIGNED
from kvasir_proto.term_proof import Electorate, ProvenTerm, cast_vote, endorse, make_term_proof
from tests.proto.election.swarm import IDS, KEYS, SWARM, Adversary, Swarm

Said = list[tuple[NodeId, ElectionMessage]]


class liar:
    """Forges, replays, invents terms, refuses, and grants without meaning it; votes once a term at most."""

    votes_for_all = False

    def __init__(self, swarm: Swarm, number: int) -> None:
        self.swarm, self.number = swarm, number
        self.key, self.node_id = KEYS[number], IDS[number]
        self.entropy = random.Random(number)
        self.adversary = Adversary(self.receive, self.act)
        self.terms: set[tuple[int, int]] = set()

    def newest(self) -> Electorate:
        cores = [node.core for node in self.swarm.nodes if node.core is not None]
        return max((core.electorate for core in cores), key=lambda each: each.order)

    def receive(self, message: ElectionMessage, sender: NodeId) -> Said:
        """Every pre-vote, at most one vote a term, every lease, and sometimes a no to all of it."""
        if self.entropy.random() < 0.2 and isinstance(message, PreVoteRequest | VoteRequest):
            return [(sender, VoteRefusal(0, 2**32 - 1, 9, message.term, "promised", 2**62))]
        electorate = self.newest()
        if isinstance(message, PreVoteRequest):
            term = ProvenTerm(message.epoch, message.term, sender)
            return [(sender, PreVoteGrant(sign_pre_vote(self.key, SWARM, electorate, term)))]
        if isinstance(message, VoteRequest):
            place = (message.epoch, message.term)
            if place in self.terms and not self.votes_for_all:
                return []
            self.terms.add(place)
            vote = cast_vote(self.key, SWARM, electorate, ProvenTerm(*place, sender))
            return [(sender, VoteGrant(encode(vote), b""))]
        if isinstance(message, LeaseRequest):
            return [(sender, LeaseGrant(message.epoch, message.term, message.number))]
        if isinstance(message, AssentRequest):
            proposal = decode(message.proposal, PROPOSAL)
            return [(sender, AssentGrant(sign_assent(self.key, SWARM, proposal, sender)))]
        if isinstance(message, ElectorateProposal):
            return self.endorse_what_it_likes(sender, electorate)
        return []

    def endorse_what_it_likes(self, sender: NodeId, electorate: Electorate) -> Said:
        fence = max(self.swarm.proven)
        term = ProvenTerm(*fence, sender)
        other = successor_of(electorate, electorate.members, fence[1])
        return [(sender, ElectorateEndorsement(encode(endorse(self.key, SWARM, other, term, 1))))]

    def act(self, now: int) -> Said:
        """Something hostile to everybody, a different thing each time."""
        others = [each for each in IDS[: self.swarm.count] if each != self.node_id]
        electorate, kind = self.newest(), self.entropy.randrange(7)
        epoch, top = max(self.swarm.proven)
        huge = self.entropy.choice([top + 1, top + 7, top + 1000, 2**32 - 1])
        term = ProvenTerm(epoch, huge, self.node_id)
        vote = cast_vote(self.key, SWARM, electorate, term)
        place = (epoch, huge, electorate.version, electorate.digest())
        said: list[ElectionMessage] = []
        if kind == 0:
            said = [PreVoteRequest(*place)]
        elif kind == 1:
            said = [VoteRequest(*place, (sign_pre_vote(self.key, SWARM, electorate, term),))]
        elif kind == 2:
            said = [LeaseRequest(epoch, huge, 1, make_term_proof(electorate, term, [vote]))]
        elif kind == 3:
            forged = make_recovery(self.key, SWARM, epoch + 1, "open", [self.node_id])
            said = [Knowledge((forged,), b"", (), ())]
        elif kind == 4:
            mine = successor_of(electorate, [self.key.public_key().public_bytes_raw()], top)
            proposal = Proposal(epoch, top, 1, mine, b"")
            proof = make_term_proof(electorate, term, [vote])
            assent = decode(sign_assent(self.key, SWARM, proposal, self.node_id), SIGNED)
            prepared = make_prepared(proposal, self.node_id, [assent])
            said = [
                AssentRequest(encode(proposal), proof, prepared),
                ElectorateProposal(prepared, proof),
                AssentRefusal(prepared),
            ]
        elif kind == 5:
            said = [LeaseRelease(make_release(self.key, SWARM, ProvenTerm(epoch, top, self.node_id)))]
        elif self.swarm.captured:
            said = [self.entropy.choice(self.swarm.captured)]
        return [(each, message) for message in said for each in others]


class double_voter(liar):
    """Votes for everybody who asks, in every term."""

    votes_for_all = True


class ready_double_voter(double_voter):
    """Does that, says yes to everything else, and is hostile in no other way."""

    def receive(self, message: ElectionMessage, sender: NodeId) -> Said:
        self.entropy = random.Random(0)  # its first draw is no refusal
        return super().receive(message, sender)

    def act(self, now: int) -> Said:
        return []


class hoarder(liar):
    """Stands for election all the time and, elected, does nothing."""

    def __init__(self, swarm: Swarm, number: int) -> None:
        super().__init__(swarm, number)
        self.pre_votes: dict[tuple[int, int], dict[NodeId, bytes]] = {}
        self.asked: tuple[int, int] = (0, 0)

    def receive(self, message: ElectionMessage, sender: NodeId) -> Said:
        electorate = self.newest()
        if isinstance(message, PreVoteGrant):
            got = self.pre_votes.setdefault(self.asked, {})
            got[sender] = message.pre_vote
            if len(got) >= electorate.quorum:
                place = (*self.asked, electorate.version, electorate.digest())
                request = VoteRequest(*place, tuple(got[each] for each in sorted(got)))
                return [(node_id_of(each), request) for each in electorate.members]
            return []
        return super().receive(message, sender)

    def act(self, now: int) -> Said:
        electorate = self.newest()
        epoch, top = max(self.swarm.proven)
        self.asked = (epoch, top + 1 + self.entropy.randrange(3))
        own = sign_pre_vote(self.key, SWARM, electorate, ProvenTerm(*self.asked, self.node_id))
        self.pre_votes = {self.asked: {self.node_id: own}}
        request = PreVoteRequest(*self.asked, electorate.version, electorate.digest())
        return [(node_id_of(each), request) for each in electorate.members]
