"""The election on one node: five verbs around what is proven, what is promised, and the role in between.

Every node runs it. Workers only follow proofs; electors vote and grant leases; candidates, electors or not,
stand when no backbone is heard; one of them is the backbone. The rules are in the modules it is made of
(`knowledge`, `elector`, `candidacy`, `tenure`), the roles in `states`; this one answers messages, minds the
deadlines and says what must be on disk before what is sent. It does not know who is alive, nor what a
backbone does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import Effect, Notice, Now, Persist, Publish, Send, Slot
from kvasir_proto.election.allowance import Allowance
from kvasir_proto.election.candidacy import Candidacy
from kvasir_proto.election.configuration import Proposal
from kvasir_proto.election.elector import Elector, MemberView
from kvasir_proto.election.knowledge import ProvenKnowledge
from kvasir_proto.election.options import ElectionOptions
from kvasir_proto.election.release import make_release, verify_release
from kvasir_proto.election.requests import (
    AdoptAnnouncement,
    AdoptProof,
    CatchUp,
    ChangeElectorate,
    ElectionEvent,
    ElectionRequest,
    ElectorateChanged,
    LeaseHeld,
    LeaseLost,
    Recover,
    SetCandidacy,
    SetMembers,
    StepDown,
    SuspectBackbone,
    TermFollowed,
    TermVoided,
)
from kvasir_proto.election.states import Role, RoleEvent, next_role
from kvasir_proto.election.tenure import Tenure
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of, public_key_of
from kvasir_proto.instants import Duration, Instant, after
from kvasir_proto.limits import ELECTORS_MAX, UINT32_MAX
from kvasir_proto.messages.election import (
    ELECTION,
    LINKS_MAX,
    AssentGrant,
    AssentRefusal,
    AssentRequest,
    ElectionMessage,
    ElectorateEndorsement,
    ElectorateProposal,
    Evidence,
    Knowledge,
    KnowledgeRequest,
    LeaseGrant,
    LeaseRelease,
    LeaseRequest,
    PreVoteGrant,
    PreVoteRequest,
    RefusalReason,
    VoteGrant,
    VoteRefusal,
    VoteRequest,
)
from kvasir_proto.term_proof import (
    Electorate,
    ElectorateRule,
    ProvenTerm,
    decode_term_proof,
    founding_electorate,
)

if TYPE_CHECKING:
    import random

Output: TypeAlias = Effect | ElectionEvent

_BACKOFF_MAX: Final = 8
"""A candidate that fails again and again waits up to this many steps longer, at random."""
_AT_ONCE: Final = Duration(0)
_PROPOSAL_PATIENCE: Final = 10
"""Patiences that electors are given to assent to a change, before the backbone does without it."""
_PUT_OFF_COUNT_MAX: Final = 2
"""A change that nobody wanted waits as long again before the next try, doubled at most this often."""
_PUT_OFF_MAX: Final = 64


class ElectionCore:
    """See the module. `stored` is what this node persisted in its slots, if anything.

    `rule` is the manifest's rule for electorates; `anchor` the digest of the electorate that an invite named.
    Raises `SlotDamaged` when a slot is damaged: a node that forgot its votes must not vote.
    """

    def __init__(
        self,
        *,
        private_key: Ed25519PrivateKey,
        swarm_digest: SwarmDigest,
        founder_public_key: bytes,
        recovery_public_key: bytes,
        rule: ElectorateRule,
        options: ElectionOptions,
        stored: Mapping[Slot, bytes],
        entropy: random.Random,
        now: Now,
        anchor: bytes | None = None,
    ) -> None:
        self._private_key = private_key
        self._node_id = node_id_of(private_key.public_key().public_bytes_raw())
        self._swarm_digest = swarm_digest
        self._options = options
        self._entropy = entropy
        self._knowledge = ProvenKnowledge(
            swarm_digest,
            founding_electorate(founder_public_key, rule),
            recovery_public_key,
            anchor=anchor,
            stored_electorates=stored.get("electorate"),
            stored_fence=stored.get("fence"),
        )
        self._elector = Elector(
            private_key,
            swarm_digest,
            node_id_of(founder_public_key),
            self._knowledge,
            options,
            stored.get("election"),
            now.instant,
        )
        self._allowance = Allowance()
        self._output: list[Output] = []
        self._role = Role.FOLLOWER
        self._is_fit = False
        self._position = 0
        self._failures = 0
        self._stand_at: Instant | None = None
        self._candidacy: Candidacy | None = None
        self._tenure: Tenure | None = None
        self._deadline = now.instant  # of the phase a candidate is in
        self._retry_at = now.instant  # when what was not answered is asked again
        self._proposed_at = now.instant
        self._propose_again_at = now.instant
        self._announce_at = now.instant
        self._pause = options.outsider_pause
        self._voided: tuple[int, int] | None = None
        self._put_off_until: dict[NodeId, tuple[int, Instant]] = {}

    # --- what others may look at ----------------------------------------------------------------------------

    @property
    def role(self) -> Role:
        """What this node is in the election now."""
        return self._role

    @property
    def electorate(self) -> Electorate:
        """The newest electorate that is known."""
        return self._knowledge.newest

    @property
    def fence(self) -> ProvenTerm | None:
        """The highest term that is proven, void or not."""
        return self._knowledge.fence

    @property
    def proof(self) -> bytes:
        """The fence's proof, b"" where there is none."""
        return self._knowledge.proof

    @property
    def won(self) -> tuple[int, int]:
        """The highest (epoch, term) that this node ever won."""
        return self._elector.won

    @property
    def lease_until(self) -> Instant | None:
        """Until when this node may sample; None when it is not the backbone."""
        return self._tenure.until if self._role is Role.BACKBONE and self._tenure is not None else None

    @property
    def former_electors(self) -> tuple[bytes, ...]:
        """Who was an elector, as far as the chain of electorates shows it here, and is none any more."""
        return self._knowledge.former_electors

    @property
    def convicted(self) -> frozenset[NodeId]:
        """Nodes with evidence against them."""
        return frozenset(node_id_of(each) for each in self._knowledge.liars)

    @property
    def is_changing_electorate(self) -> bool:
        """Whether this node is the backbone and an electorate is under way."""
        return self._tenure is not None and self._tenure.is_changing

    def put_off(self, now: Instant) -> frozenset[NodeId]:
        """Who is neither to become an elector nor to be one no more just now: it was tried in vain."""
        return frozenset(each for each, (_, until) in self._put_off_until.items() if now < until)

    # --- the five verbs -------------------------------------------------------------------------------------

    def receive(self, message: ElectionMessage, sender: NodeId, now: Now) -> None:
        """Take a message. What is wrong with it costs its sender an answer, and is noted."""
        electors = {node_id_of(each) for each in self._knowledge.newest.members}
        if sender == self._node_id or not self._allowance.take(sender, electors, now.instant):
            return
        try:
            self._receive(message, sender, now.instant)
        except RemoteProtocolError as error:
            self._note("election_message_refused", node=sender, kind=message.kind, code=error.code)
        self._settle(now.instant)

    def command(self, request: ElectionRequest, now: Now) -> None:
        """Do what `node_core` asks. Raises `RemoteProtocolError` for a `Recover` that is not one."""
        instant = now.instant
        match request:
            case SetCandidacy():
                self._set_candidacy(request, instant)
            case SetMembers():
                self._elector.view = MemberView(request.eligible, request.dead, request.barred)
            case AdoptProof():
                try:
                    self._adopt(request.proof, request.source)
                except RemoteProtocolError as error:
                    self._note("term_proof_refused", node=request.source, code=error.code)
            case AdoptAnnouncement():
                self._adopt_announcement(request, now)
            case SuspectBackbone():
                fence = self._knowledge.fence
                if fence is not None and fence.backbone == request.node_id:
                    self._pause = self._options.outsider_pause
                    self._stand_soon(instant)
            case StepDown():
                self._step_down(request.reason, instant)
            case ChangeElectorate():
                self._change_electorate(request)
            case Recover():
                self._knowledge.learn_links((request.link,))
            case CatchUp():
                self._send(request.source, self._knowledge.request())
        self._settle(instant)

    def tick(self, now: Now) -> None:
        """Do what is due."""
        instant = now.instant
        if self._role is Role.FOLLOWER:
            if self._stand_at is not None and instant >= self._stand_at:
                self._stand(instant)
        elif self._role in (Role.PRE_CANDIDATE, Role.CANDIDATE):
            self._campaign(instant)
        else:
            self._hold_office(instant)
        self._settle(instant)

    def next_deadline(self) -> Instant | None:
        """When `tick` has something to do next; None while nothing is awaited."""
        if self._role is Role.FOLLOWER:
            return self._stand_at
        if self._role in (Role.PRE_CANDIDATE, Role.CANDIDATE):
            return min(self._deadline, self._retry_at)
        tenure = self._tenure
        assert tenure is not None
        due = [self._retry_at]
        if self._role is Role.ELECTED:
            due.append(self._deadline)
        else:
            assert tenure.until is not None
            due += [tenure.until, self._announce_at]
            if tenure.proposal is not None:
                due.append(self._propose_again_at)
        return min(due)

    def drain(self) -> list[Output]:
        """What to do, in order: what must be on disk comes before what is sent."""
        output, self._output = self._output, []
        if not output:
            return output
        persists = [each for each in output if isinstance(each, Persist)]
        newest: dict[Slot, Persist] = {each.slot: each for each in persists}
        return [*newest.values(), *(each for each in output if not isinstance(each, Persist))]

    # --- messages -------------------------------------------------------------------------------------------

    def _receive(self, message: ElectionMessage, sender: NodeId, now: Instant) -> None:
        match message:
            case PreVoteRequest():
                self._on_pre_vote_request(message, sender, now)
            case VoteRequest():
                self._on_vote_request(message, sender, now)
            case PreVoteGrant():
                self._on_pre_vote_grant(message, sender, now)
            case VoteGrant():
                self._on_vote_grant(message, sender, now)
            case VoteRefusal():
                self._on_refusal(message, sender, now)
            case LeaseRequest():
                self._on_lease_request(message, sender, now)
            case LeaseGrant():
                self._on_lease_grant(message, sender, now)
            case LeaseRelease():
                self._on_release(message, now)
            case AssentRequest():
                self._adopt(message.proof, sender)
                self._send(sender, self._elector.assent(message, sender))
            case AssentGrant() | AssentRefusal():
                self._on_opinion(message, sender, now)
            case ElectorateProposal():
                self._on_proposal(message, sender)
            case ElectorateEndorsement():
                self._on_endorsement(message, sender, now)
            case KnowledgeRequest():
                self._send(sender, self._knowledge.answer(message))
            case Knowledge():
                self._on_knowledge(message, sender)
            case Evidence():
                self._knowledge.learn_evidence(message)

    def _on_pre_vote_request(self, message: PreVoteRequest, sender: NodeId, now: Instant) -> None:
        objection = self._elector.objection(
            sender, message.epoch, message.term, message.electorate_digest, now
        )
        if objection is None:
            term = ProvenTerm(message.epoch, message.term, sender)
            self._send(sender, PreVoteGrant(self._elector.pre_vote(term)))
        else:
            self._refuse(message, sender, objection, now)

    def _on_vote_request(self, message: VoteRequest, sender: NodeId, now: Instant) -> None:
        term = ProvenTerm(message.epoch, message.term, sender)
        newest = self._knowledge.newest
        is_ours = message.electorate_digest == newest.digest()
        if is_ours and self._knowledge.learn_readiness(message.readiness) != term:
            raise RemoteProtocolError("nobody was ready for this term", "wrong_vote")
        objection = self._elector.objection(
            sender, message.epoch, message.term, message.electorate_digest, now
        )
        if objection is not None:
            self._refuse(message, sender, objection, now)
            return
        vote = self._elector.vote(term, message.readiness, now)
        self._send(sender, VoteGrant(vote, self._elector.prepared_successor()))

    def _refuse(
        self, message: PreVoteRequest | VoteRequest, sender: NodeId, reason: RefusalReason, now: Instant
    ) -> None:
        """Say why, and bring up to date whoever is behind: the candidate, or this node."""
        newest = self._knowledge.newest
        wait = self._elector.wait(sender, now) if reason in ("restarted", "promised") else 0
        self._send(
            sender,
            VoteRefusal(newest.epoch, self._elector.highest_term, newest.version, message.term, reason, wait),
        )
        known, theirs = (newest.epoch, newest.version), (message.epoch, message.version)
        if reason == "electorate" and known < theirs:
            self._send(sender, self._knowledge.request())
        elif reason in ("electorate", "behind"):
            self._inform(sender, *theirs)

    def _inform(self, node_id: NodeId, epoch: int, version: int) -> None:
        """Send a node what it does not know beyond that electorate, and how far terms have come."""
        answer = self._knowledge.answer(
            KnowledgeRequest(epoch, version, *self._knowledge.fence_order, bytes(32))
        )
        readiness = self._knowledge.readiness or self._elector.readiness
        self._send(node_id, Knowledge(answer.links, answer.proof, readiness, answer.evidence))

    def _on_pre_vote_grant(self, message: PreVoteGrant, sender: NodeId, now: Instant) -> None:
        candidacy = self._candidacy
        if self._role is Role.PRE_CANDIDATE and candidacy is not None:
            candidacy.take_pre_vote(message.pre_vote, sender, self._knowledge.liars)
            if candidacy.is_ready:
                self._become(RoleEvent.PRE_VOTES_WON)
                self._knowledge.learn_readiness(candidacy.readiness)
                self._deadline = after(now, self._options.patience)
                self._ask_electors(now)

    def _on_vote_grant(self, message: VoteGrant, sender: NodeId, now: Instant) -> None:
        candidacy = self._candidacy
        if self._role is Role.CANDIDATE and candidacy is not None:
            candidacy.take_vote(message, sender, self._knowledge)
            if candidacy.is_elected:
                self._take_office(candidacy, now)

    def _on_refusal(self, message: VoteRefusal, sender: NodeId, now: Instant) -> None:
        if self._tenure is not None:
            self._tenure.knows_proof.discard(sender)
        candidacy = self._candidacy
        if candidacy is None or message.asked_term != candidacy.term.term:
            return
        wait = candidacy.take_refusal(sender, Duration(min(message.wait_ns, 2 * self._options.lease)))
        if wait is not None:
            # Somebody is the backbone, or may be: no use to ask again before the promises end.
            wait = max(wait, self._options.retry)
            self._end_candidacy(RoleEvent.PATIENCE_OVER, now, wait, is_own_failure=False)

    def _on_knowledge(self, message: Knowledge, sender: NodeId) -> None:
        was_anchored = self._knowledge.is_anchored
        try:
            learned = self._knowledge.learn_links(message.links)
        except RemoteProtocolError as error:
            if error.code != "wrong_electorate" or len(message.links) > 1:
                raise
            learned = 0
            self._send(sender, self._knowledge.request())  # its newest does not follow ours: ask for all
        for evidence in message.evidence:
            self._knowledge.learn_evidence(evidence)
        if message.proof:
            self._adopt(message.proof, sender if learned else None)
        if learned and len(message.links) == LINKS_MAX:
            self._send(sender, self._knowledge.request())
        if self._knowledge.learn_earlier(message.links) or not was_anchored:
            earlier = self._knowledge.request_earlier()
            if earlier is not None:
                self._send(sender, earlier)
        if message.readiness:
            # Honest nodes pass on what was gathered under an electorate that is not the newest any more.
            with suppress(RemoteProtocolError):
                self._knowledge.learn_readiness(message.readiness)

    def _adopt(self, proof: bytes, source: NodeId | None) -> None:
        """Learn a proof, or what is missing to judge it."""
        if self._knowledge.learn_proof(proof) == "unknown_electorate" and source is not None:
            self._send(source, self._knowledge.request())

    def _adopt_announcement(self, request: AdoptAnnouncement, now: Now) -> None:
        try:
            message = decode(request.data, ELECTION)
        except RemoteProtocolError as error:
            self._note("election_message_refused", node=request.source, kind="?", code=error.code)
            return
        if not isinstance(message, Knowledge | Evidence | LeaseRelease):
            self._note("election_message_refused", node=request.source, kind=message.kind, code="not_public")
            return
        self.receive(message, request.source, now)

    # --- electing -------------------------------------------------------------------------------------------

    def _set_candidacy(self, request: SetCandidacy, now: Instant) -> None:
        if self._stand_at is not None and request.position > self._position:
            # It has heard of better ones since it decided when to stand: they go first all the same.
            later = Duration((request.position - self._position) * self._options.step)
            self._stand_at = after(self._stand_at, later)
        self._position = request.position
        if request.is_fit and not self._is_fit:
            self._is_fit = True
            self._stand_soon(now)
        elif not request.is_fit and self._is_fit:
            self._is_fit = False
            self._stand_at = None
            if self._role is not Role.FOLLOWER:
                self._leave(RoleEvent.STEPPED_DOWN, "unfit", now)

    def _delay(self) -> Duration:
        """The candidacy delay: rank first, then chance, more of it after each failure."""
        step = self._options.step
        spread = step * min(1 + self._failures, _BACKOFF_MAX)
        return Duration(self._position * step + self._entropy.randrange(spread))

    def _stand_soon(self, now: Instant, wait: Duration = _AT_ONCE) -> None:
        """Stand after the delay, and not before `wait` and this node's own promise are over."""
        if self._role is Role.FOLLOWER and self._is_fit:
            if self._elector.is_elector():
                wait = max(wait, self._elector.wait(self._node_id, now))
            self._stand_at = after(now, Duration(wait + self._delay()))

    def _stand(self, now: Instant) -> None:
        """Ask for pre-votes in the next term, unless this node has itself promised not to."""
        knowledge = self._knowledge
        newest, term = knowledge.newest, self._elector.highest_term + 1
        if not self._is_fit or not knowledge.is_anchored or term > UINT32_MAX:
            self._stand_at = None
            return
        if self._elector.is_elector() and self._elector.wait(self._node_id, now) > 0:
            self._stand_soon(now)
            return
        self._stand_at = None
        self._become(RoleEvent.DELAY_OVER)
        self._candidacy = Candidacy(self._swarm_digest, newest, ProvenTerm(newest.epoch, term, self._node_id))
        self._deadline = after(now, self._options.patience)
        self._ask_electors(now)

    def _ask_electors(self, now: Instant) -> None:
        """Ask all electors that have not answered, this node itself first."""
        candidacy = self._candidacy
        assert candidacy is not None
        self._retry_at = after(now, self._options.retry)
        request = candidacy.request
        for elector in candidacy.unanswered:
            if elector != self._node_id:
                self._send(elector, request)
        if self._node_id in candidacy.unanswered:
            self._ask_itself(candidacy, now)

    def _ask_itself(self, candidacy: Candidacy, now: Instant) -> None:
        term, digest = candidacy.term, candidacy.electorate.digest()
        if self._elector.objection(self._node_id, term.epoch, term.term, digest, now) is not None:
            return
        if isinstance(candidacy.request, PreVoteRequest):
            self._on_pre_vote_grant(PreVoteGrant(self._elector.pre_vote(term)), self._node_id, now)
        else:
            vote = self._elector.vote(term, candidacy.readiness, now)
            grant = VoteGrant(vote, self._elector.prepared_successor())
            self._on_vote_grant(grant, self._node_id, now)

    def _campaign(self, now: Instant) -> None:
        candidacy = self._candidacy
        if now >= self._deadline:
            # Electors take only so many messages of strangers a second: who got no yes waits as if refused.
            is_backed = candidacy is not None and candidacy.is_backed
            wait = self._options.patience
            self._end_candidacy(
                RoleEvent.PATIENCE_OVER, now, wait, is_own_failure=is_backed or self._elector.is_elector()
            )
        elif now >= self._retry_at:
            self._ask_electors(now)

    def _end_candidacy(
        self, event: RoleEvent, now: Instant, wait: Duration, *, is_own_failure: bool = True
    ) -> None:
        """Become a follower again and stand later: after `wait`, and after a delay."""
        if self._role not in (Role.PRE_CANDIDATE, Role.CANDIDATE):
            return
        self._become(event)
        self._candidacy = None
        if is_own_failure:
            self._failures = min(self._failures + 1, _BACKOFF_MAX)
        elif not self._elector.is_elector():
            wait = max(wait, self._pause)
            self._pause = Duration(min(self._pause * 2, self._outsider_pause_max()))
        self._stand_soon(now, wait)

    def _outsider_pause_max(self) -> Duration:
        """Longer for those far behind: the best few are enough to find out that the electors wait for one."""
        turns = 1 + self._position // ELECTORS_MAX
        return Duration(self._options.outsider_pause * _BACKOFF_MAX * turns)

    # --- in office ------------------------------------------------------------------------------------------

    def _take_office(self, candidacy: Candidacy, now: Instant) -> None:
        """A quorum voted: the term is won, and on disk; the lease is still to be asked for."""
        try:
            outcome = self._knowledge.learn_proof(candidacy.proof)
        except RemoteProtocolError:
            outcome = "stale"
        if outcome != "moved":
            return  # superseded meanwhile; `_settle` ends the candidacy
        self._become(RoleEvent.VOTES_WON)
        term = candidacy.term
        self._elector.note_won(term.epoch, term.term)
        self._candidacy = None
        self._failures = 0
        self._tenure = Tenure(
            self._swarm_digest,
            term,
            candidacy.electorate,
            self._options.lease,
            candidacy.unfinished,
        )
        self._deadline = after(now, self._options.lease)
        self._announce_at = now
        self._note("term_won", epoch=term.epoch, term=term.term)
        self._ask_lease(now)

    def _hold_office(self, now: Instant) -> None:
        tenure = self._tenure
        assert tenure is not None
        if self._role is Role.BACKBONE and tenure.until is not None and now >= tenure.until:
            self._become(RoleEvent.LEASE_OVER)
            self._deadline = after(now, self._options.lease)
            self._output.append(LeaseLost(tenure.term.epoch, tenure.term.term, "lease over", True))
        if self._role is Role.ELECTED and now >= self._deadline:
            self._leave(RoleEvent.PATIENCE_OVER, "no quorum", now)
            return
        if now >= self._retry_at:
            self._ask_lease(now)
        if self._role is Role.BACKBONE:
            if now >= self._announce_at:
                self._announce(now)
            self._press_proposal(now)

    def _ask_lease(self, now: Instant) -> None:
        """Ask every elector, with the proof for those that have not shown that they know it."""
        tenure = self._tenure
        assert tenure is not None
        pause = self._options.renewal if self._role is Role.BACKBONE else self._options.retry
        self._retry_at = after(now, pause)
        number, term = tenure.ask(now), tenure.term
        for public_key in tenure.electorate.members:
            elector = node_id_of(public_key)
            if elector == self._node_id:
                continue
            proof = b"" if elector in tenure.knows_proof else self._knowledge.proof
            self._send(elector, LeaseRequest(term.epoch, term.term, number, proof))
        if self._elector.grant(self._node_id, term.epoch, term.term, now) is None:
            self._take_grant(self._node_id, number, now)

    def _on_lease_request(self, message: LeaseRequest, sender: NodeId, now: Instant) -> None:
        if message.proof:
            self._adopt(message.proof, sender)
        reason = self._elector.grant(sender, message.epoch, message.term, now)
        if reason is None:
            self._send(sender, LeaseGrant(message.epoch, message.term, message.number))
            return
        newest = self._knowledge.newest
        self._send(
            sender,
            VoteRefusal(newest.epoch, self._elector.highest_term, newest.version, message.term, reason, 0),
        )
        if reason in ("behind", "voided"):
            self._send(sender, self._knowledge.announcement())

    def _on_lease_grant(self, message: LeaseGrant, sender: NodeId, now: Instant) -> None:
        tenure = self._tenure
        if tenure is not None and (message.epoch, message.term) == tenure.term[:2]:
            self._take_grant(sender, message.number, now)

    def _take_grant(self, elector: NodeId, number: int, now: Instant) -> None:
        tenure = self._tenure
        assert tenure is not None
        if not tenure.take_grant(elector, number) or tenure.until is None or tenure.until <= now:
            return
        if self._role is Role.ELECTED:
            self._become(RoleEvent.LEASE_WON)
            self._retry_at = after(now, self._options.renewal)
        self._output.append(LeaseHeld(tenure.term.epoch, tenure.term.term, tenure.until))
        self._press_proposal(now)

    def _announce(self, now: Instant) -> None:
        self._announce_at = after(now, self._options.announcement)
        tenure = self._tenure
        assert tenure is not None
        tenure.announcements += 1
        self._output.append(Publish("terms", encode(self._knowledge.announcement(tenure.announcements))))

    def _on_release(self, message: LeaseRelease, now: Instant) -> None:
        released = verify_release(message.release, self._swarm_digest, self._knowledge.fence)
        was_bound = self._elector.release(released.epoch, released.term, released.backbone)
        if was_bound or not self._elector.is_elector():
            self._stand_soon(now)

    def _step_down(self, reason: str, now: Instant) -> None:
        tenure = self._tenure
        if tenure is not None:
            release = LeaseRelease(make_release(self._private_key, self._swarm_digest, tenure.term))
            electorate = tenure.electorate
            self._leave(RoleEvent.STEPPED_DOWN, reason, now)
            self._elector.release(*tenure.term)
            for public_key in electorate.members:
                self._send(node_id_of(public_key), release)
            self._output.append(Publish("terms", encode(release)))
        elif self._role is not Role.FOLLOWER:
            self._end_candidacy(RoleEvent.STEPPED_DOWN, now, self._options.lease)
        # Whoever steps down lets the others go first.
        self._stand_soon(now, self._options.lease)

    def _leave(self, event: RoleEvent, reason: str, now: Instant) -> None:
        """Become a follower, whatever the role was; its term is over for good."""
        self._become(event)
        self._candidacy = None
        tenure, self._tenure = self._tenure, None
        if tenure is not None and tenure.until is not None:
            self._output.append(LeaseLost(tenure.term.epoch, tenure.term.term, reason, False))
        self._stand_soon(now, self._options.patience)

    # --- electorates ----------------------------------------------------------------------------------------

    def _change_electorate(self, request: ChangeElectorate) -> None:
        members = tuple(public_key_of(each) for each in request.members)
        if self._role is not Role.BACKBONE or self._tenure is None:
            self._note("electorate_change_refused", reason="not the backbone")
        elif not self._tenure.want(members, request.nomination):
            self._note("electorate_change_refused", reason="not one change, or one is under way")

    def _press_proposal(self, now: Instant) -> None:
        """Begin a proposal if there is one to make, and ask again for endorsements that are missing."""
        tenure = self._tenure
        if tenure is None or self._role is not Role.BACKBONE:
            return
        if tenure.propose():
            self._proposed_at = self._propose_again_at = now
        if tenure.proposal is None or now < self._propose_again_at:
            return
        self._propose_again_at = after(now, Duration(self._options.retry * 2))
        patience = Duration(self._options.patience * _PROPOSAL_PATIENCE)
        if now >= after(self._proposed_at, patience):
            dropped = tenure.drop_unanswered()
            if dropped is not None:
                self._put_off(dropped, now)
                self._note("electorate_change_refused", reason="too few would endorse it")
                return
        self._ask_endorsements(now)

    def _put_off(self, node_ids: frozenset[NodeId], now: Instant) -> None:
        """Others first: one that never answers, or that only this node sees dead, would hold them up."""
        for node_id in sorted(node_ids):
            count, _ = self._put_off_until.pop(node_id, (0, now))
            pause = Duration(self._options.patience * _PROPOSAL_PATIENCE << count)
            self._put_off_until[node_id] = (min(count + 1, _PUT_OFF_COUNT_MAX), after(now, pause))
        while len(self._put_off_until) > _PUT_OFF_MAX:
            del self._put_off_until[next(iter(self._put_off_until))]

    def _ask_endorsements(self, now: Instant) -> None:
        tenure = self._tenure
        if tenure is None or tenure.proposal is None:
            return
        message = tenure.proposal_message(self._knowledge.proof)
        asked = tenure.to_ask
        for elector in asked:
            if elector != self._node_id:
                self._send(elector, message)
        if self._node_id not in asked:
            return
        try:
            if isinstance(message, AssentRequest):
                self._on_opinion(self._elector.assent(message, self._node_id), self._node_id, now)
            else:
                endorsement = self._elector.endorse(message, self._node_id)
                self._on_endorsement(ElectorateEndorsement(endorsement), self._node_id, now)
        except RemoteProtocolError as error:
            self._note("electorate_change_refused", reason=error.reason)

    def _on_proposal(self, message: ElectorateProposal, sender: NodeId) -> None:
        self._adopt(message.proof, sender)
        self._send(sender, ElectorateEndorsement(self._elector.endorse(message, sender)))

    def _on_opinion(self, message: AssentGrant | AssentRefusal, sender: NodeId, now: Instant) -> None:
        tenure = self._tenure
        if tenure is None or self._role is not Role.BACKBONE:
            return
        if isinstance(message, AssentGrant):
            is_news = tenure.take_assent(message.assent, sender)
        elif public_key_of(sender) not in tenure.electorate.members:
            raise RemoteProtocolError("what it endorsed binds electors only", "not_an_elector")
        else:
            is_news = tenure.take_refusal(message.prepared)
        if is_news:
            self._propose_again_at = now
            self._press_proposal(now)

    def _on_endorsement(self, message: ElectorateEndorsement, sender: NodeId, now: Instant) -> None:
        tenure = self._tenure
        if tenure is None or self._role is not Role.BACKBONE or tenure.proposal is None:
            return
        asked_before = tenure.to_ask
        proposal: Proposal = tenure.proposal
        before = tenure.electorate
        link = tenure.take_endorsement(message.endorsement, sender)
        if link is None:
            if set(tenure.to_ask) - set(asked_before):
                self._ask_endorsements(now)  # the new one has answered: now everybody
            return
        self._knowledge.learn_links((link,))
        told = {node_id_of(each) for each in (*before.members, *proposal.electorate.members)}
        for node_id in sorted(told - {self._node_id}):
            self._send(node_id, self._knowledge.announcement())

    # --- what follows from what was learned -----------------------------------------------------------------

    def _settle(self, now: Instant) -> None:
        """Write to disk what changed, tell who must know, and give up what is superseded."""
        knowledge, changed = self._knowledge, self._knowledge.changed
        knowledge.changed = set()
        fence = knowledge.fence
        if self._elector.is_changed:
            self._elector.is_changed = False
            self._output.append(Persist("election", self._elector.stored()))
        if "electorate" in changed or "liars" in changed:
            self._output.append(Persist("electorate", knowledge.stored_electorates()))
            convicted = frozenset(node_id_of(each) for each in knowledge.liars)
            self._output.append(ElectorateChanged(knowledge.newest, convicted))
        if "fence" in changed and fence is not None:
            self._output.append(Persist("fence", knowledge.stored_fence()))
            self._output.append(TermFollowed(fence, knowledge.proof))
            self._pause = self._options.outsider_pause
        if "liars" in changed:
            for evidence in knowledge.evidence:
                self._output.append(Publish("terms", encode(evidence)))
        if fence is not None and knowledge.is_void(*fence[:2]) and self._voided != fence[:2]:
            self._voided = fence[:2]
            self._output.append(TermVoided(*fence[:2]))
            self._stand_soon(now, self._options.lease)
        self._give_up_what_is_over(now, has_new_liars="liars" in changed)
        if self._tenure is not None and "electorate" in changed:
            self._tenure.adopt_electorate(knowledge.newest)
            self._ask_lease(now)
            if self._role is Role.BACKBONE:
                self._announce(now)

    def _give_up_what_is_over(self, now: Instant, *, has_new_liars: bool) -> None:
        knowledge = self._knowledge
        if self._tenure is not None:
            term = self._tenure.term
            if knowledge.fence != term or knowledge.newest.epoch != term.epoch:
                self._leave(RoleEvent.SUPERSEDED, "superseded", now)
            elif knowledge.is_void(term.epoch, term.term):
                self._leave(RoleEvent.VOIDED, "void", now)
            elif not self._is_provable():
                self._leave(RoleEvent.SUPERSEDED, "another electorate", now)
        elif self._candidacy is not None:
            candidacy = self._candidacy
            is_behind = (candidacy.term.epoch, candidacy.term.term) <= knowledge.fence_order
            # What a liar signed may have been counted: count again.
            if is_behind or has_new_liars or candidacy.electorate != knowledge.newest:
                self._end_candidacy(RoleEvent.SUPERSEDED, now, self._options.patience, is_own_failure=False)

    def _is_provable(self) -> bool:
        """Whether this backbone's proof is under the newest electorate, so that others can accept it.

        It is not when an electorate turns up that an earlier backbone committed and no voter knew of: then
        there must be another election, under that one.
        """
        return decode_term_proof(self._knowledge.proof).electorate == self._knowledge.newest

    # --- small things ---------------------------------------------------------------------------------------

    def _become(self, event: RoleEvent) -> None:
        self._role = next_role(self._role, event)

    def _send(self, to: NodeId, message: ElectionMessage) -> None:
        if to != self._node_id:
            self._output.append(Send(to, message))

    def _note(self, event: str, **fields: str | int) -> None:
        self._output.append(Notice(event, tuple(sorted(fields.items()))))
