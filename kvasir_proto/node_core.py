"""One node's whole part in the swarm: the cores behind five verbs, and what they owe each other.

Membership, records, admission, election and placement are strangers; what one finds out and another must know
passes here and nowhere else. A death makes the election look sooner and the placement plan anew, a record
makes a candidate, a lease makes a planner. Whatever needs many facts at once (who stands, who votes, who
holds what) is reviewed a moment after something changed, not at each change, so that a burst costs one
review. Files, streams and clocks are the driver's; a session's tokens never pass here.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.accusations import (
    Accusations,
    Accuse,
    Agreed,
    RecomputationDue,
    Recomputed,
)
from kvasir_proto.admission import (
    AdmissionBook,
    AdmissionEvent,
    AdmissionFailed,
    CompareRevocations,
    ComparisonDue,
    CredentialGained,
    IssueInvite,
    KnowElectors,
    MembershipChanged,
    Revoke,
    UseInvite,
    open_credential,
)
from kvasir_proto.answer_times import AnswerTimes, SlowHolder
from kvasir_proto.capability import CapabilityRecord, HeldShard, Verdict, held_shard
from kvasir_proto.effects import Effect, Notice, Now, Send, Slot, SlotDamaged
from kvasir_proto.election.configuration import sign_nomination
from kvasir_proto.election.core import ElectionCore
from kvasir_proto.election.options import LAN as ELECTION_LAN
from kvasir_proto.election.options import WAN as ELECTION_WAN
from kvasir_proto.election.options import ElectionOptions
from kvasir_proto.election.requests import (
    AdoptAnnouncement,
    AdoptProof,
    CatchUp,
    ChangeElectorate,
    ElectionEvent,
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
from kvasir_proto.election.states import Role
from kvasir_proto.election.succession import next_electorate
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Duration, Instant, after, between, in_seconds, milliseconds
from kvasir_proto.limits import AuditVerdict, Rank, as_sentence
from kvasir_proto.manifest import ShardSet
from kvasir_proto.membership import options as membership_options
from kvasir_proto.membership.core import MembershipCore
from kvasir_proto.membership.events import (
    AnnounceRecord,
    ClockSuspected,
    ConnectionLost,
    Leave,
    MemberChanged,
    MembershipEvent,
    NoteRecord,
    RecordHint,
    Seed,
    SelfConflicted,
)
from kvasir_proto.membership.options import MembershipOptions
from kvasir_proto.membership.table import Member
from kvasir_proto.messages.certification import EvidenceReply, EvidenceRequest, VerdictNotice
from kvasir_proto.messages.core import (
    ADMISSION_MESSAGES,
    ELECTION_MESSAGES,
    MEMBERSHIP_MESSAGES,
    RECORD_MESSAGES,
    CoreMessage,
)
from kvasir_proto.messages.election import Knowledge
from kvasir_proto.messages.plan import PlanAccept, PlanOffer, PlanRefusal
from kvasir_proto.messages.records import RecordReply
from kvasir_proto.placement import options as placement_options
from kvasir_proto.placement.core import BecomeBackbone, NotePlan, PlacementCore, PlanDue, SetInventory
from kvasir_proto.placement.core import StepDown as StopPlanning
from kvasir_proto.placement.inventory import ModelShape, Place, PlaceState, as_alike
from kvasir_proto.placement.options import PlacementOptions
from kvasir_proto.placement.plan import Coverage, Missing, Plan, open_plan
from kvasir_proto.plan_offers import PlanOffers
from kvasir_proto.ranking import CandidateRank, candidate_rank, may_be_backbone
from kvasir_proto.records import LAN as RECORDS_LAN
from kvasir_proto.records import WAN as RECORDS_WAN
from kvasir_proto.records import (
    Fetch,
    IdentityContested,
    JudgeAnew,
    NoteLive,
    NoteNeeded,
    PublishOwn,
    RecordBook,
    RecordChanged,
    RecordEvent,
    RecordOptions,
    Withdraw,
)
from kvasir_proto.signing import sign_message
from kvasir_proto.steadiness import Steadiness
from kvasir_proto.swarm_manifest import FoundedSwarm
from kvasir_proto.term_proof import Electorate, ProvenTerm, verify_term_proof
from kvasir_proto.verdicts_in_force import VerdictInForce, VerdictTable
from kvasir_proto.verification import (
    ChallengeDone,
    ChallengeDue,
    ChallengeFailed,
    ChallengeResult,
    VerdictChanged,
    Verification,
)

if TYPE_CHECKING:
    import random

REVIEW_DELAY: Final[Duration] = milliseconds(200)
"""How long after a change everything that follows from many facts is looked at again."""
RTT_IGNORED: Final[Duration] = milliseconds(50)
"""Round trips below it are all the same to placement: a LAN's, and what a busy machine adds to them."""
FAR_SAMPLES_MIN: Final = 3
"""Who answers late so many times is far. One or two long round trips say more of a machine that has just
started than of the path; until then a member counts as no farther than the others. One short one will do."""
RTT_REVIEW_INTERVAL: Final[Duration] = milliseconds(5000)
"""How often the backbone looks again at round trips while a member is not known to be near."""
COMPARE_SPACING: Final[Duration] = milliseconds(1000)
"""Between two members that are asked what was revoked, when many come back at once."""
INTRODUCTION_INTERVAL: Final[Duration] = milliseconds(2000)
"""How often a node that does not answer is shown our record again, in a swarm by invitation."""
INTRODUCED_MAX: Final = 4096
"""Nodes of which it is remembered when they were shown it; those shown longest ago are shown it again."""
QUARANTINE_AFTER_CHALLENGE: Final[Duration] = milliseconds(600_000)
"""How long a node is planned without, whatever it shows by then, that was found out by a challenge or by
evidence."""
_DOUBLED_MAX: Final = 8
"""How often the time is doubled that a node is planned without which was found out again under other
certificates; the table has its own limit."""
_NO_TIME: Final = Duration(0)
WATCH_INTERVAL: Final[Duration] = milliseconds(1000)
"""How often the backbone looks whether an electorate was made, and how often somebody is asked who the
backbone is, while this node knows none that lives.
"""


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """The knobs of all cores."""

    membership: MembershipOptions
    election: ElectionOptions
    records: RecordOptions
    placement: PlacementOptions


LAN: Final = CoreOptions(membership_options.LAN, ELECTION_LAN, RECORDS_LAN, placement_options.LAN)
WAN: Final = CoreOptions(membership_options.WAN, ELECTION_WAN, RECORDS_WAN, placement_options.WAN)


# --- what a node is told ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Describe:
    """Say this of this node from now on. Its number, expiry, shard and state are filled in here."""

    record: CapabilityRecord


@dataclass(frozen=True, slots=True)
class ShardLoaded:
    """The engine serves this node's shard of that plan; it takes so much memory."""

    epoch: int
    term: int
    revision: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ShardRefused:
    """The engine cannot serve this node's shard of that plan. `need_bytes` is 0 unless memory is why."""

    epoch: int
    term: int
    revision: int
    code: str
    reason: str
    need_bytes: int = 0
    have_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ShardLost:
    """The engine has ended: what it held must be loaded again. `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class BackboneEngineDied:
    """The engine with the trunk has ended, or would not start: nothing samples any more. See `steadiness`."""

    reason: str


@dataclass(frozen=True, slots=True)
class HolderFailed:
    """As backbone: the connection to this holder broke, or could not be made, and it is to be asked again."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class FoundOut:
    """This node has seen that a member computed or spoke wrongly: what follows is in `verdicts_in_force`."""

    verdict: VerdictInForce


@dataclass(frozen=True, slots=True)
class AnswersSeen:
    """As backbone: the mean time of this holder's small answers in a window. See `answer_times`."""

    node_id: NodeId
    mean: Duration


NodeCommand: TypeAlias = (
    Seed
    | ConnectionLost
    | Leave
    | Describe
    | ShardLoaded
    | ShardRefused
    | ShardLost
    | BackboneEngineDied
    | HolderFailed
    | FoundOut
    | Accuse
    | Recomputed
    | AnswersSeen
    | ChallengeResult
    | AdoptProof
    | StepDown
    | Recover
    | IssueInvite
    | UseInvite
    | Revoke
)


# --- what a node tells its driver ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanReceived:
    """A new plan of the term's backbone: this node is to serve its shard of it, which may be empty."""

    plan: Plan
    signed: bytes


@dataclass(frozen=True, slots=True)
class HolderReady:
    """As backbone: this node says that it serves its shard of the plan."""

    node_id: NodeId
    plan: Plan
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class HolderRefused:
    """As backbone: this node cannot serve its shard of the plan, and why."""

    node_id: NodeId
    code: str
    reason: str


NodeEvent: TypeAlias = (
    MembershipEvent
    | RecordEvent
    | AdmissionEvent
    | ElectionEvent
    | ChallengeDue
    | VerdictChanged
    | RecomputationDue
    | Agreed
    | PlanReceived
    | HolderReady
    | HolderRefused
)

NodeState: TypeAlias = Literal[
    "joining", "electing", "loading", "ready", "degraded", "isolated", "conflicted", "revoked", "stopping"
]


@dataclass(frozen=True, slots=True)
class NodeView:
    """What a node believes at one moment; for `status`, the simulator and tests."""

    node_id: NodeId
    state: NodeState
    reason: str
    fence: ProvenTerm | None
    role: Role
    lease_until: Instant | None
    electorate: Electorate
    members: tuple[Member, ...]
    plan: Plan | None
    is_serving_plan: bool
    coverage: Coverage | None
    missing: tuple[Missing, ...]
    clock_offset: Duration | None
    verdicts: tuple[VerdictInForce, ...] = ()
    """Whom this node, as backbone, plans without or gives bulk layers only; one verdict a node."""
    slow: tuple[SlowHolder, ...] = ()
    """Whom it has seen to answer later than the others, and plans with as with slower ones."""


_NOTHING: Final = ShardSet()
_SUBSTANCE: Final = attrgetter(
    *(each.name for each in fields(CapabilityRecord) if each.name not in ("sequence", "expires"))
)
"""All that a record says but its number and its time."""
_EFFECTS: Final = frozenset(get_args(Effect))
"""What no other core hears of."""
_HEARD_FROM_ANYBODY: Final = (*RECORD_MESSAGES, *ADMISSION_MESSAGES)
_NOT_NEEDED: Final = "the plan needs nothing of it"
_BACKBONE: Final = "the backbone "
"""What a follower's reason begins with that is its backbone's."""
_AFTER_A_CONFLICT: Final = "Start it again once the other one is gone"


@dataclass(slots=True)
class _Standing:
    """What follows from a node's record, kept until it says something else."""

    record: CapabilityRecord
    rank: CandidateRank | None
    """Among candidates for backbone; None when it is none."""
    is_live: bool
    """Whether membership says that it is there."""
    is_absent: bool = False
    """It was there, and went."""
    holding: ShardSet = _NOTHING
    """What it has said, as a holder of our plan, that it serves."""
    room_bytes: int | None = None
    """What it had room for when it refused a shard; None while it has refused none."""


@contextmanager
def _restoring(slot: Slot) -> Iterator[None]:
    """What is refused in here is what this slot held: `SlotDamaged`."""
    try:
        yield
    except RemoteProtocolError as error:
        raise SlotDamaged(slot, str(error)) from error


class NodeCore:
    """See the module. `capability` is what the node says of itself at first; `model` what there is to place.

    `stored` has what was persisted in each slot before. Raises `SlotDamaged` when one is: a node that forgot
    what it promised must not go on.
    """

    def __init__(
        self,
        *,
        private_key: Ed25519PrivateKey,
        swarm: FoundedSwarm,
        capability: CapabilityRecord,
        model: ModelShape,
        options: CoreOptions,
        stored: Mapping[Slot, bytes],
        entropy: random.Random,
        now: Now,
        anchor: bytes | None = None,
        nominees: Collection[NodeId] = (),
    ) -> None:
        """``anchor`` is the digest of the electorate that an invite named.

        ``nominees`` are whom this node, if it is the founder's, names as electors of a pinned swarm.
        """
        manifest = swarm.manifest
        self._nominees = frozenset(nominees)
        self._private_key = private_key
        self._node_id = node_id_of(private_key.public_key().public_bytes_raw())
        self._swarm = swarm
        self._options = options
        self._capability = capability
        self._said: tuple[object, ...] = ()
        self._is_by_invitation = manifest.admission == "invite"
        self._is_founder = manifest.founder_public_key == private_key.public_key().public_bytes_raw()
        with _restoring("incarnation"):
            self._membership = MembershipCore(
                node_id=self._node_id,
                options=options.membership,
                stored=stored.get("incarnation"),
                entropy=entropy,
                now=now,
            )
        with _restoring("admission"):
            self._admission = AdmissionBook(
                private_key=private_key,
                swarm=swarm,
                stored=stored.get("admission"),
                entropy=entropy,
                now=now,
            )
        with _restoring("records"):
            self._book = RecordBook(
                private_key=private_key,
                swarm=swarm.digest,
                options=options.records,
                stored=stored.get("records"),
                entropy=entropy,
                now=now,
                admission=self._admission,
            )
        self._election = ElectionCore(
            private_key=private_key,
            swarm_digest=swarm.digest,
            founder_public_key=manifest.founder_public_key,
            recovery_public_key=manifest.recovery_public_key,
            rule=manifest.electorate,
            options=options.election,
            stored=stored,
            entropy=entropy,
            now=now,
            anchor=anchor,
        )
        with _restoring("plan"):
            self._placement = PlacementCore(
                node_id=self._node_id,
                model=model,
                options=replace(options.placement, trust_claims=manifest.certificates == "claimed"),
                stored=stored.get("plan"),
                now=now,
            )
        self._verification = Verification(private_key, swarm, entropy, now)
        self._accusations = Accusations(
            private_key,
            swarm.digest,
            manifest.model_digest,
            self._claim_of,
            may_lie=manifest.electorate == "open",
        )
        self._offers = PlanOffers()
        with _restoring("verdicts"):
            self._verdicts = VerdictTable(stored.get("verdicts"), now)
        self._answer_times = AnswerTimes()
        self._steadiness = Steadiness()
        self._drains: tuple[Callable[[], Sequence[Effect | NodeEvent]], ...] = (
            self._membership.drain,
            self._admission.drain,
            self._book.drain,
            self._election.drain,
            self._verification.drain,
            self._accusations.drain,
            self._verdicts.drain,
        )
        self._deadlines = (
            self._admission.next_deadline,
            self._book.next_deadline,
            self._election.next_deadline,
            self._placement.next_deadline,
            self._offers.next_deadline,
            self._verdicts.next_end,
            self._answer_times.next_end,
            self._steadiness.next_deadline,
            self._verification.next_deadline,
            self._accusations.next_deadline,
        )
        self._deadline: Instant | None = None
        """When anybody but membership has something to do, if that is known."""
        self._is_deadline_known = False
        self._effects: list[Effect | NodeEvent] = []
        self._standing: dict[NodeId, _Standing] = {}
        self._live_ranks: list[CandidateRank] | None = None
        self._live_standing: list[NodeId] | None = None
        self._review_at: Instant | None = now.instant
        self._has_left = False
        self._conflict = ""
        self._clock_offset: Duration | None = None
        self._candidacy = SetCandidacy(False)
        self._known_members = SetMembers()
        self._asked = self._node_id
        """Whom this node asked last who the backbone is."""
        self._plan = self._placement.plan
        self._signed_plan = b""
        self._served: Plan | None = None
        self._served_bytes = 0
        self._refusal: ShardRefused | None = None
        self._held: HeldShard | None = None
        self._is_planning = False
        self._entropy = entropy
        self._introduced_at: dict[NodeId, Instant] = {}
        self._admission_failure = ""
        self._compared_at = Instant(now.instant - COMPARE_SPACING)
        self._needed: frozenset[NodeId] = frozenset()
        self._electors: frozenset[NodeId] = frozenset()
        self._absent_since: dict[NodeId, Instant] = {}
        self._revoked_reason = ""
        self._note_electors(now)
        if self._election.fence is not None:
            self._accusations.know_backbone(self._election.fence.backbone)
        self._accusations.restore(self._verdicts.accusations, now)
        self._note_revocation(now)
        self._settle(now)

    # --- the five verbs -------------------------------------------------------------------------------------

    def receive(self, message: CoreMessage, sender: NodeId, now: Now) -> None:
        """A message of a node whose id the transport proved. Raises `RemoteProtocolError` for a bad one.

        In a swarm by invitation a node is heard once its record has been: until then it may only show that,
        redeem its invite, and ask what was revoked.
        """
        if self._has_left:
            return
        if isinstance(message, MEMBERSHIP_MESSAGES) and self._may_speak(sender):
            try:
                self._membership.receive(message, sender, now)
            finally:
                self._settle_membership(now)
            return
        try:
            if isinstance(message, ADMISSION_MESSAGES):
                self._admission.receive(message, sender, now)
            elif not isinstance(message, RECORD_MESSAGES) and not self._may_speak(sender):
                raise RemoteProtocolError(
                    "this swarm is by invitation: show your record first", "not_a_member"
                )
            elif isinstance(message, ELECTION_MESSAGES):
                # With two processes under one identity each would keep its promises and both together none.
                if not self._conflict or isinstance(message, Knowledge):
                    self._election.receive(message, sender, now)
            elif isinstance(message, RECORD_MESSAGES):
                self._book.receive(message, sender, now)
            elif isinstance(message, PlanOffer):
                self._take_offer(message, sender, now)
            elif isinstance(message, PlanAccept | PlanRefusal):
                self._take_answer(message, sender, now)
            elif isinstance(message, VerdictNotice):
                self._verification.take(message.verdict, now)
            elif isinstance(message, EvidenceRequest | EvidenceReply):
                self._accusations.receive(message, sender, now)
        finally:
            self._settle(now)

    def receive_published(
        self, topic: Literal["records", "terms"], data: bytes, forwarder: NodeId, now: Now
    ) -> None:
        """Something that came by gossip."""
        if self._has_left:
            return
        if topic == "records":
            if self._book.take(data, now).code == "wrong_kind":
                self._admission.take(data, now)
                self._verification.take(data, now)
                self._accusations.take(data, now)
        else:
            self._election.command(AdoptAnnouncement(data, forwarder), now)
        self._settle(now)

    def receive_record(self, data: bytes, now: Now) -> None:
        """The answer to a `FetchRecord`."""
        if not self._has_left:
            self._book.take(data, now)
            self._settle(now)

    def command(self, request: NodeCommand, now: Now) -> None:
        """What this node wants, or what its engine says.

        Raises `RemoteProtocolError` for a bad `Recover` or `Revoke`, `LocalProtocolError` for an invite that
        this node may not issue.
        """
        if self._has_left:
            return
        match request:
            case Seed(node_ids):
                if self._admission.is_waiting:
                    self._compare_revocations(node_ids, now)
                self._membership.command(request, now)
            case ConnectionLost(node_id):
                self._introduced_at.pop(node_id, None)
                self._membership.command(request, now)
            case IssueInvite() | UseInvite() | Revoke():
                self._admission.command(request, now)
            case AdoptProof() | StepDown() | Recover():
                self._election.command(request, now)
            case Describe(record):
                self._capability = record
                self._note_change(now.instant)
            case Leave():
                self._leave(request, now)
            case ShardLoaded():
                self._note_loaded(request, now)
            case ShardRefused():
                self._note_refused(request, now)
            case ShardLost():
                self._served, self._held = None, None
                self._forget_holding(self._node_id)
                self._note_change(now.instant)
            case BackboneEngineDied(reason):
                self._note_engine_death(reason, now)
            case HolderFailed(node_id, _):
                self._ask_again(node_id, now.instant)
                self._note_change(now.instant)
            case ChallengeDone() | ChallengeFailed():
                self._verification.finish(request, now)
                if isinstance(request, ChallengeDone) and request.word == "quarantined":
                    verdict = VerdictInForce(
                        node_id=request.node_id,
                        word=request.word,
                        reason=as_sentence(request.reason),
                        until=after(now.instant, QUARANTINE_AFTER_CHALLENGE),
                        claim=self._claim_of(request.node_id) or b"",
                    )
                    self._note_verdict(verdict, now)
            case FoundOut(verdict):
                self._note_verdict(verdict, now)
            case Accuse():
                self._accusations.accuse(request, now)
            case Recomputed():
                self._accusations.finish(request, now)
            case AnswersSeen(node_id, mean):
                slow = self._answer_times.note(node_id, mean, now.instant)
                if slow is not None:
                    self._effects.append(Notice("holder_slow", (("node", node_id), ("times", slow.times))))
                    self._note_change(now.instant)
        self._settle(now)

    def tick(self, now: Now) -> None:
        """Do what is due."""
        deadline = self._membership.next_deadline()
        if deadline is not None and deadline <= now.instant:
            self._membership.tick(now)
            self._settle_membership(now)
        deadline = self.next_deadline()
        if deadline is None or deadline > now.instant:
            return
        for core in (self._admission, self._book, self._election, self._placement):
            deadline = core.next_deadline()
            if deadline is not None and deadline <= now.instant:
                core.tick(now)
        self._offers.tick(now.instant)
        self._verification.tick(now)
        self._accusations.tick(now)
        # Both: each is to forget those whose time is over.
        if self._verdicts.let_go(now.instant) | self._answer_times.let_go(now.instant):
            self._hear_of_verdict(self._node_id, now.instant)
        if self._steadiness.tick(now.instant):
            self._effects.append(Notice("backbone_engine_steady"))
            self._note_change(now.instant)
        self._settle(now)
        if self._review_at is not None and self._review_at <= now.instant and not self._has_left:
            self._review_at = None
            self._review(now)
            self._settle(now)

    def next_deadline(self) -> Instant | None:
        """When to call `tick` next."""
        if not self._is_deadline_known:
            deadline = self._review_at
            for deadline_of in self._deadlines:
                due = deadline_of()
                if due is not None and (deadline is None or due < deadline):
                    deadline = due
            self._deadline, self._is_deadline_known = deadline, True
        due, others = self._membership.next_deadline(), self._deadline
        return others if due is None or (others is not None and others < due) else due

    def drain(self) -> list[Effect | NodeEvent]:
        """What is to be done and told, in order, each once."""
        effects, self._effects = self._effects, []
        return effects

    # --- snapshots ------------------------------------------------------------------------------------------

    @property
    def node_id(self) -> NodeId:
        """This node's id."""
        return self._node_id

    @property
    def fence(self) -> ProvenTerm | None:
        """The highest term with a proof."""
        return self._election.fence

    @property
    def proof(self) -> bytes:
        """That proof, or b""."""
        return self._election.proof

    @property
    def is_admitted(self) -> bool:
        """Whether this node needs no invite (any more) to be a member."""
        has_credential = self._admission.credential is not None and not self._revoked_reason
        return not self._is_by_invitation or self._is_founder or has_credential

    @property
    def incarnation(self) -> int:
        """This node's own incarnation."""
        return self._membership.incarnation

    @property
    def auditors(self) -> frozenset[NodeId]:
        """Whose verdicts on others count in this swarm; nobody's where members are taken at their word."""
        return self._verification.auditors

    def verdict_of(self, record: CapabilityRecord, rank: Rank) -> Verdict:
        """What is known here of a node's fitness for a rank."""
        return self._verification.verdict_of(record, rank)

    def record_of(self, node_id: NodeId) -> CapabilityRecord | None:
        """What this node says of itself, as far as it is known here."""
        return self._book.record_of(node_id)

    def check_proof(self, proof: bytes, source: NodeId, now: Now) -> ProvenTerm:
        """The term that a proof shows, which `source` brought along, if it is the newest that is known.

        Raises `RemoteProtocolError`: as `verify_term_proof` does, or `stale_term`.
        """
        self._election.command(AdoptProof(proof, source), now)
        self._settle(now)
        term = verify_term_proof(proof, self._swarm.digest, self._election.electorate)
        fence = self._election.fence
        if fence is not None and term[:2] < fence[:2]:
            raise RemoteProtocolError(f"({term.epoch}, {term.term}) is behind the fence", "stale_term")
        return term

    def view(self) -> NodeView:
        """What this node believes now."""
        state, reason = self._state()
        coverage, missing = self._coverage()
        return NodeView(
            node_id=self._node_id,
            state=state,
            reason=reason,
            fence=self._election.fence,
            role=self._election.role,
            lease_until=self._election.lease_until,
            electorate=self._election.electorate,
            members=self._membership.members(),
            plan=self._plan,
            is_serving_plan=self._served is not None and self._served == self._plan,
            coverage=coverage,
            missing=missing,
            clock_offset=self._clock_offset,
            verdicts=self._verdicts_in_force(),
            slow=self._answer_times.rows(),
        )

    def _state(self) -> tuple[NodeState, str]:
        if self._revoked_reason and not self._has_left:
            return "revoked", self._revoked_reason
        state, reason = self._state_in_swarm()
        troubles = [
            each for each in (self._steadiness.reason, self._clock_trouble(), self._own_verdict()) if each
        ]
        if state in ("ready", "degraded") and troubles:
            return "degraded", as_sentence("; ".join([*([reason] if reason else []), *troubles]))
        return state, reason

    def _own_verdict(self) -> str:
        """What the swarm has found of this node, where it has."""
        own = self._in_force(self._node_id)
        if own is None or not own.n_electors:
            return ""
        return f"{own.n_electors} electors recomputed its rows and call it {own.word}: {own.reason}"

    def _clock_trouble(self) -> str:
        if self._clock_offset is None:
            return ""
        behind = "behind" if self._clock_offset > 0 else "ahead of"
        return f"its clock is {round(abs(in_seconds(self._clock_offset)))} s {behind} most members'"

    def _state_in_swarm(self) -> tuple[NodeState, str]:
        fence = self._election.fence
        if self._has_left:
            return "stopping", ""
        if self._conflict:
            return "conflicted", self._conflict
        if not self.is_admitted:
            if self._admission_failure:
                return "joining", as_sentence(f"not admitted: {self._admission_failure}")
            asks = self._admission.is_asking
            waits = "its invite is not answered yet" if asks else "this node needs an invite"
            return "joining", f"this swarm is by invitation: {waits}"
        if fence is None:
            return "joining", "no backbone is known yet"
        if fence.backbone == self._node_id:
            return self._state_of_backbone(fence)
        backbone = self._membership.member(fence.backbone)
        if backbone is None or backbone.state in ("dead", "left"):
            seen = "is not known here" if backbone is None else f"is {backbone.state}"
            if self._membership.live_count == 1:
                return "isolated", f"no member answers, and {_BACKBONE}{fence.backbone} {seen}"
            n_seen, n_needed, electors = self._electors_seen()
            why = f"; {electors}" if n_seen < n_needed else ""
            return "electing", as_sentence(f"{_BACKBONE}{fence.backbone} {seen}{why}")
        said = self._book.record_of(fence.backbone)
        is_served = said is not None and said.state in ("ready", "degraded")
        if self._plan is None or not _is_of(self._plan, fence):
            # A plan is offered to those it names before anybody else: whose backbone serves is not needed.
            if is_served:
                return "ready", _NOT_NEEDED
            return "joining", "no plan yet" if said is None else as_sentence(_waits_for(said))
        if self._refusal is not None:
            return "degraded", self._refusal.reason
        shard = self._plan.shard_of(self._node_id)
        is_needed = bool(len(shard)) or self._held is not None
        if is_needed and self._served != self._plan:
            return "loading", f"loading {len(shard)} experts"
        if said is not None and not is_served:
            # Nobody is served by a swarm whose backbone is not: what it waits for is its own to say.
            return "joining", as_sentence(_waits_for(said))
        return "ready", "" if is_needed else _NOT_NEEDED

    def _state_of_backbone(self, fence: ProvenTerm) -> tuple[NodeState, str]:
        if self._election.lease_until is None:
            n_seen, n_needed, electors = self._electors_seen()
            if n_seen >= n_needed:
                electors += ", and fewer grant it"
            lease = f"the lease of ({fence.epoch}, {fence.term})"
            return "isolated", f"no quorum of the electorate grants {lease}: {electors}"
        plan = self._plan
        if plan is None or not _is_of(plan, fence):
            n_workers = sum(
                each != self._node_id and standing.is_live and _is_worker(standing.record)
                for each, standing in self._standing.items()
            )
            there = "1 worker is there" if n_workers == 1 else f"{n_workers} workers are there"
            waits = there if n_workers else "no worker has joined"
            return "joining", f"no plan yet: {waits}"
        coverage, missing = self._coverage()
        assert coverage is not None
        if missing:
            first = missing[0]
            return "joining", (
                f"{coverage.n_pairs - coverage.n_pairs_held} of {coverage.n_pairs} experts have no holder, "
                f"the first in layer {first.layer}: {first.reason}"
            )
        return ("degraded", plan.degraded) if plan.degraded else ("ready", "")

    def _electors_seen(self) -> tuple[int, int, str]:
        """How many electors are alive for all that is seen here, how many are needed, and both in words."""
        electorate = self._election.electorate
        n_seen = sum(self._is_live(node_id_of(each)) for each in electorate.members)
        words = (
            f"{n_seen} of {len(electorate.members)} electors are seen here, {electorate.quorum} are needed"
        )
        return n_seen, electorate.quorum, words

    def _coverage(self) -> tuple[Coverage | None, tuple[Missing, ...]]:
        """How well the plan is served: as backbone by those that said so, else by those that are there."""
        plan = self._plan
        if plan is None:
            return None, ()
        fence = self._election.fence
        own = fence is not None and fence.backbone == self._node_id
        serving = {each for each in plan.nodes if (self._serves(plan, each) if own else self._is_live(each))}
        return plan.coverage(serving, fence.backbone if fence else None), plan.missing(serving)

    def _serves(self, plan: Plan, node_id: NodeId) -> bool:
        """As backbone: whether this node has said that it holds its shard of this plan."""
        if node_id == self._node_id:
            return self._served is not None and self._served.shard_of(node_id) == plan.shard_of(node_id)
        standing = self._standing.get(node_id)
        if standing is None or not standing.is_live:
            return False
        return not plan.shard_of(node_id).difference(standing.holding)

    # --- between the cores ----------------------------------------------------------------------------------

    def _settle_membership(self, now: Now) -> None:
        """As `_settle`, where nobody but membership was asked: mostly it only has something to send."""
        output = self._membership.drain()
        if output and self._take_in(output, now):
            self._settle(now)

    def _settle(self, now: Now) -> None:
        """Pass on what the cores say until none has more to say."""
        self._is_deadline_known = False
        is_settled = False
        while not is_settled:
            is_settled = True
            for drain in self._drains:
                output = drain()
                if output and self._take_in(output, now):
                    is_settled = False
            for due in self._placement.drain():
                if isinstance(due, PlanDue):
                    self._issue(due.plan, now)
                    is_settled = False
                else:
                    self._effects.append(due)
            offers = self._offers.drain()
            if offers:
                self._effects += self._introducing(offers, now)

    def _take_in(self, output: Sequence[Effect | NodeEvent], now: Now) -> bool:
        """Write down what a core asks for and tells, and let the others hear of it; whether any had to."""
        self._effects += self._introducing(output, now)
        events = [each for each in output if type(each) not in _EFFECTS]
        for each in events:
            self._hear(each, now)
        return bool(events)

    def _hear(self, event: Effect | NodeEvent, now: Now) -> None:
        match event:
            case MemberChanged():
                self._hear_of_member(event, now)
            case RecordHint():
                self._hear_of_hint(event, now)
            case SelfConflicted():
                self._note_conflict(event.reason, now)
            case IdentityContested():
                reason = "a record with this node's identity is another's: is its home a copy of this one?"
                self._note_conflict(reason, now)
            case ClockSuspected(offset):
                self._clock_offset = offset
                self._note_change(now.instant)
            case RecordChanged():
                self._hear_of_record(event, now)
            case LeaseHeld():
                if not self._is_planning:
                    self._begin_planning(now)
            case LeaseLost() | TermVoided():
                self._end_planning(now)
            case ElectorateChanged():
                self._note_electors(now)
                self._note_change(now.instant)
            case TermFollowed(term, proof):
                self._accusations.know_backbone(term.backbone)
                self._offers.renew_proof(proof)
                self._note_change(now.instant)
            case CredentialGained():
                self._admission_failure = ""
                self._note_revocation(now)
                self._describe_itself(now)
                self._note_change(now.instant)
            case AdmissionFailed():
                self._admission_failure = event.reason
                self._note_change(now.instant)
            case ComparisonDue():
                view = self._membership.view()
                if view:
                    self._compare_revocations((self._entropy.choice(view),), now)
                else:
                    self._ask_whether_revoked(now)
            case MembershipChanged():
                self._book.command(JudgeAnew(), now)
                self._note_revocation(now)
                self._note_change(now.instant)
            case VerdictChanged(node_id):
                self._hear_of_verdict(node_id, now.instant)
            case Agreed():
                self._take_agreed(event, now)
            case _:
                pass

    def _note_electors(self, now: Now) -> None:
        members = self._election.electorate.members
        self._electors = frozenset(map(node_id_of, members))
        self._admission.command(KnowElectors(members, self._election.former_electors), now)
        self._verification.know_electors(self._electors)
        self._accusations.know_electors(self._electors)
        if self._admission.is_waiting:
            self._compare_revocations(tuple(node_id_of(each) for each in members), now)

    def _compare_revocations(self, node_ids: tuple[NodeId, ...], now: Now) -> None:
        """Ask them what was revoked while they were not heard, but not all of a swarm that comes back."""
        if between(self._compared_at, now.instant) >= COMPARE_SPACING or self._admission.is_waiting:
            self._compared_at = now.instant
            self._admission.command(CompareRevocations(node_ids), now)

    def _ask_whether_revoked(self, now: Now) -> None:
        """Nobody answers: the swarm may be gone, or this node put out of it. What was revoked electors tell
        anybody who asks, also whom they do not hear otherwise."""
        electors = tuple(node_id_of(each) for each in self._election.electorate.members)
        self._compare_revocations(electors, now)

    def _note_revocation(self, now: Now) -> None:
        """Whether this node is out: said, and then it leads no more. A new invite brings it in again."""
        reason = self._admission.revoked_reason
        if reason == self._revoked_reason:
            return
        self._revoked_reason = reason
        if reason:
            self._effects.append(Notice("membership_revoked", (("reason", reason),)))
            if self._election.role is not Role.FOLLOWER:
                self._election.command(StepDown("its membership was revoked"), now)

    def _hear_of_member(self, event: MemberChanged, now: Now) -> None:
        standing = self._standing.get(event.node_id)
        is_live = event.state in ("alive", "suspect")
        if event.state != "alive":
            self._introduced_at.pop(event.node_id, None)  # it may have lost our record
        self._book.command(NoteLive(event.node_id, is_live), now)
        if is_live and standing is not None and standing.is_absent:
            self._compare_revocations((event.node_id,), now)
        is_turn = standing is None or standing.is_live != is_live
        if standing is not None and standing.is_live != is_live:
            standing.is_live = is_live
            self._forget_ranking(standing)
        if is_live:
            if standing is not None:
                standing.is_absent = False
                if not len(standing.holding):
                    # What it held was forgotten when it was called dead: let it say again what it serves.
                    self._ask_again(event.node_id, now.instant)
        else:
            if standing is not None:
                standing.is_absent = True
            self._forget_holding(event.node_id)
            if self._membership.live_count == 1:
                self._ask_whether_revoked(now)
        fence = self._election.fence
        if fence is not None and fence.backbone == event.node_id and event.state != "alive":
            self._election.command(SuspectBackbone(event.node_id), now)
        if standing is not None or fence is None or fence.backbone == event.node_id:
            # Nothing else follows from who never said what it is.
            is_standing = standing is not None and _stands(standing)
            counts = is_turn and (is_standing or event.node_id in self._electors)
            self._note_what_follows(event.node_id, counts, now.instant)

    def _hear_of_hint(self, hint: RecordHint, now: Now) -> None:
        known = self._book.record_of(hint.node_id)
        if hint.sequence > (known.sequence if known is not None else 0):
            self._book.command(Fetch(hint.node_id, hint.digest, hint.from_node), now)
        if known is not None:
            digest = self._book.digest_of(hint.node_id) or hint.digest
            self._membership.command(NoteRecord(hint.node_id, known.sequence, digest), now)

    def _hear_of_record(self, event: RecordChanged, now: Now) -> None:
        before = self._standing.get(event.node_id)
        if before is not None and event.record is not None and _says_the_same(before.record, event.record):
            before.record = event.record
            self._tell_membership(event.node_id, event.record, event.digest, now)
            return
        stands_anew = before is None or _stands(before)
        if event.record is None:
            self._verification.forget(event.node_id)
            self._standing.pop(event.node_id, None)
            if before is not None:
                self._forget_ranking(before)
        else:
            self._verification.take_record(event.record, now)
            rank = self._rank_of(event.record)
            if before is None:
                is_live = self._is_live(event.node_id)
                standing = self._standing[event.node_id] = _Standing(event.record, rank, is_live)
                stands_anew = _stands(standing)
                self._forget_ranking(standing)
                # What it may have answered before was kept nowhere, since it was unknown what it is.
                self._ask_again(event.node_id, now.instant)
            else:
                stands_anew = _ranking(before.record) != _ranking(event.record) or before.rank != rank
                if stands_anew:
                    self._live_ranks = self._live_standing = None
                if before.record.memory_bytes != event.record.memory_bytes:
                    before.room_bytes = None
                before.record, before.rank = event.record, rank
                if event.record.held is None and len(before.holding) and event.node_id != self._node_id:
                    # It started again before anybody missed it: what it served is gone.
                    self._ask_again(event.node_id, now.instant)
            self._tell_membership(event.node_id, event.record, event.digest, now)
        self._note_what_follows(event.node_id, stands_anew, now.instant)

    def _rank_of(self, record: CapabilityRecord) -> CandidateRank | None:
        """Its place among candidates for backbone, by what is known of it; None if it is none."""
        verdict = self._in_force(record.node_id, record)
        if verdict is not None and verdict.n_electors:
            return None
        is_candidate = may_be_backbone(
            record,
            self._swarm.manifest,
            self._verification.verdict_of(record, "backbone"),
            may_begin=self._verification.may_begin(record),
        )
        return candidate_rank(record) if is_candidate else None

    def _hear_of_verdict(self, node_id: NodeId, now: Instant) -> None:
        """Auditors say something else of a node, or of this one: then anything, if auditors are others."""
        for each in self._standing.values() if node_id == self._node_id else (self._standing.get(node_id),):
            if each is not None and each.rank != (rank := self._rank_of(each.record)):
                each.rank = rank
                self._live_ranks = self._live_standing = None
        self._note_change(now)

    def _note_what_follows(self, node_id: NodeId, counts: bool, now: Instant) -> None:
        """A member came, went or said something else: mostly that is nothing to any but the backbone.

        `counts` where it is another candidate, or elector to be, than before: to those that vote or stand.
        """
        fence = self._election.fence
        if (
            fence is None
            or node_id == self._node_id
            or fence.backbone in (node_id, self._node_id)
            or self._verification.is_auditor
            or not self._is_live(fence.backbone)  # and so somebody has to be asked who is it now
            or (counts and self._has_a_say())
        ):
            self._note_change(now)

    def _has_a_say(self) -> bool:
        """Whether this node votes, or stands for anything."""
        own = self._standing.get(self._node_id)
        return self._node_id in self._electors or (own is not None and _stands(own))

    def _tell_membership(self, node_id: NodeId, record: CapabilityRecord, digest: bytes, now: Now) -> None:
        if node_id == self._node_id:
            self._membership.command(AnnounceRecord(record.sequence, digest), now)
        else:
            self._membership.command(NoteRecord(node_id, record.sequence, digest), now)

    def _forget_ranking(self, standing: _Standing) -> None:
        """Somebody with this record came, changed or went: who stands is to be counted anew, if it did."""
        if standing.rank is not None:
            self._live_ranks = None
        if standing.record.stands_for_elector:
            self._live_standing = None

    def _note_conflict(self, reason: str, now: Now) -> None:
        """Another process has this identity. Named and shown until restarted: promises cannot be shared."""
        if not self._conflict:
            self._conflict = f"{reason} {_AFTER_A_CONFLICT}"
            self._effects.append(Notice("identity_conflicted", (("reason", reason),)))
            if self._election.role is not Role.FOLLOWER:
                self._election.command(StepDown("its identity is used twice"), now)
        self._note_change(now.instant)

    def _leave(self, request: Leave, now: Now) -> None:
        if self._election.role is not Role.FOLLOWER:
            self._election.command(StepDown(request.reason), now)
        self._book.command(Withdraw(), now)
        self._membership.command(request, now)
        self._settle(now)
        self._has_left = True
        self._review_at = None

    # --- what follows from many facts -----------------------------------------------------------------------

    def _note_change(self, now: Instant, delay: Duration = REVIEW_DELAY) -> None:
        due = after(now, delay)
        self._is_deadline_known = False
        if not self._has_left and (self._review_at is None or due < self._review_at):
            self._review_at = due

    def _review(self, now: Now) -> None:
        """Say what this node is, whether it stands, who may vote, and as backbone who holds what."""
        self._describe_itself(now)
        self._settle(now)
        self._review_candidacy(now)
        electors = [node_id_of(each) for each in self._election.electorate.members]
        eligible = self._eligible(electors)
        dead = self._long_dead(electors, now.instant)
        members = SetMembers(frozenset(eligible), dead, frozenset())
        if members != self._known_members:
            self._known_members = members
            self._election.command(members, now)
        waits = [
            Duration(self._absence_borne(each) - between(since, now.instant))
            for each, since in self._absent_since.items()
        ]
        if any(wait > 0 for wait in waits):
            self._note_change(now.instant, min(wait for wait in waits if wait > 0))
        fence = self._election.fence
        named = self._plan.nodes if self._plan is not None else ()
        needed = frozenset((*electors, *named, *((fence.backbone,) if fence is not None else ())))
        if needed != self._needed:
            self._needed = needed
            self._book.command(NoteNeeded(needed), now)
        self._ask_for_backbone(now)
        own = self._standing.get(self._node_id)
        self._verification.review(self._holders(), own.record if own is not None else None, now)
        if self._election.role is not Role.BACKBONE:
            return
        self._review_electorate(electors, eligible, dead, now)
        if self._is_planning:
            places = self._places()
            self._placement.command(SetInventory(places), now)
            others = (each.node_id for each in places if each.node_id != self._node_id)
            self._offers.inform(others, now.instant)
            if any(each.rtt_ns != 0 for each in places):
                self._note_change(now.instant, RTT_REVIEW_INTERVAL)

    def _ask_for_backbone(self, now: Now) -> None:
        """While no backbone is known that lives, ask a member, each time the next, what it knows.

        Announcements go by gossip, in which a newcomer has no part for its first seconds.
        """
        fence = self._election.fence
        others = self._membership.view()
        if (fence is not None and self._is_live(fence.backbone)) or not others:
            return
        self._asked = others[bisect_right(others, self._asked) % len(others)]
        self._election.command(CatchUp(self._asked), now)
        self._note_change(now.instant, WATCH_INTERVAL)

    def _holders(self) -> Iterator[CapabilityRecord]:
        """What living nodes say of themselves that hold experts by their own word.

        Without the backbone: what that holds is in its backbone engine, which nobody dials.
        """
        fence = self._election.fence
        backbone = fence.backbone if fence is not None else ""
        for node_id, standing in sorted(self._standing.items()):
            if standing.record.held is not None and node_id != backbone and self._is_live(node_id):
                yield standing.record

    def _allowed_capability(self) -> CapabilityRecord:
        """What this node says of itself, without ranks that it was not invited for."""
        own, credential = self._capability, self._admission.credential
        if credential is None or not self._is_by_invitation:
            return own
        allowed = open_credential(credential, self._swarm.digest).credential.ranks
        ranks = tuple(rank for rank in own.ranks if rank in allowed)
        return replace(own, ranks=ranks, stands_for_elector=own.stands_for_elector and "backbone" in ranks)

    def _describe_itself(self, now: Now) -> None:
        """Say what this node is now, if that is not what it said last."""
        state, reason = self._state()
        fence = self._election.fence
        is_backbone = fence is not None and fence.backbone == self._node_id
        state_matters = is_backbone or state in ("stopping", "conflicted")
        capability = self._verification.borne_out(self._allowed_capability())
        said = (capability, self._held, state, reason, state_matters, self._admission.credential)
        if said == self._said:
            return
        record = replace(
            capability, held=self._held, state=state, reason=reason, credential=self._admission.credential
        )
        self._book.command(PublishOwn(record, state_matters), now)
        self._said = said

    def _introducing(self, effects: Sequence[Effect | NodeEvent], now: Now) -> Sequence[Effect | NodeEvent]:
        """In a swarm by invitation: our record goes before the first thing that we say to a node.

        Else it would not hear us. Gossip and hints bring it everywhere too, but not to those whom a newcomer
        meets first; it goes again, now and then, to whoever does not answer.
        """
        if not self._is_by_invitation:
            return effects
        introduced: list[Effect | NodeEvent] = []
        for each in effects:
            if type(each) is Send and not isinstance(each.message, _HEARD_FROM_ANYBODY):
                data = self._introduction(each.to, now.instant)
                if data:
                    introduced.append(Send(each.to, RecordReply((data,))))
            introduced.append(each)
        return introduced

    def _introduction(self, node_id: NodeId, now: Instant) -> bytes:
        """Our record, if this node has to be shown it now."""
        shown_at = self._introduced_at.get(node_id)
        if shown_at is not None and (
            self._membership.is_live(node_id) or between(shown_at, now) < INTRODUCTION_INTERVAL
        ):
            return b""
        own = self._book.record_of(self._node_id)
        digest = self._book.digest_of(self._node_id)
        if own is None or digest is None or (own.credential is None and not self._is_founder):
            return b""  # nothing that anybody would take
        self._introduced_at.pop(node_id, None)
        while len(self._introduced_at) >= INTRODUCED_MAX:
            del self._introduced_at[next(iter(self._introduced_at))]
        self._introduced_at[node_id] = now
        return self._book.data_of(digest) or b""

    def _may_speak(self, sender: NodeId) -> bool:
        """Whether what this node says is heard at all."""
        return not self._is_by_invitation or self._book.record_of(sender) is not None

    def _review_candidacy(self, now: Now) -> None:
        own = self._standing.get(self._node_id)
        is_barred = bool(self._conflict or self._revoked_reason)
        own_rank = own.rank if own is not None and not is_barred else None
        position = 0
        if own_rank is not None:
            ranks = self._ranks_alive()
            position = bisect_left(ranks, own_rank) if self._steadiness.is_steady else len(ranks)
        candidacy = SetCandidacy(own_rank is not None, position)
        if candidacy != self._candidacy:
            self._candidacy = candidacy
            self._election.command(candidacy, now)

    def _ranks_alive(self) -> list[CandidateRank]:
        """The ranks of all candidates that live, this node among them if it is one, best first."""
        if self._live_ranks is None:
            found = [each.rank for each in self._standing.values() if each.is_live]
            self._live_ranks = sorted(rank for rank in found if rank is not None)
        return self._live_ranks

    def _note_engine_death(self, reason: str, now: Now) -> None:
        """Count it; after too many leave the lease to somebody else, if there is anybody.

        Whoever is elected again all the same leaves it again, but only to one whose own engine is well: where
        all die the lease goes round once.
        """
        is_new = self._steadiness.note_death(reason, now.instant)
        if self._steadiness.is_steady:
            return
        if is_new:
            self._effects.append(Notice("backbone_engine_unsteady", (("reason", self._steadiness.reason),)))
        self._review_candidacy(now)
        others = [
            rank.node_id
            for rank in self._ranks_alive()
            if rank.node_id != self._node_id
            and (is_new or self._standing[rank.node_id].record.state == "ready")
        ]
        if others and self._election.role is not Role.FOLLOWER:
            self._election.command(StepDown("its engine keeps dying"), now)
        self._note_change(now.instant)

    def _eligible(self, electors: list[NodeId]) -> list[NodeId]:
        """Living nodes that may be electors, best first; in a pinned swarm those the founder names."""
        if self._live_standing is None:
            found = [
                (each.rank is None, candidate_rank(each.record), node_id)
                for node_id, each in self._standing.items()
                if each.is_live and each.record.stands_for_elector
            ]
            self._live_standing = [node_id for _, _, node_id in sorted(found)]
        if self._swarm.manifest.electorate == "open":
            return list(self._live_standing)
        named = {*electors, *(self._nominees if self._is_founder else ())}
        return [each for each in self._live_standing if each in named]

    def _review_electorate(
        self, electors: list[NodeId], eligible: list[NodeId], dead: frozenset[NodeId], now: Now
    ) -> None:
        if self._election.is_changing_electorate:
            self._note_change(now.instant, WATCH_INTERVAL)
            return
        put_off = self._election.put_off(now.instant)
        members = next_electorate(
            electors,
            self._swarm.manifest.electorate,
            self._node_id,
            eligible=eligible,
            dead=dead,
            convicted=self._election.convicted,
            put_off=put_off,
        )
        if members is None:
            if put_off:
                self._note_change(now.instant, WATCH_INTERVAL)
            return
        nomination = b""
        joining = sorted(set(members).difference(electors))
        if joining and self._swarm.manifest.electorate == "pinned":
            nomination = sign_nomination(self._private_key, self._swarm.digest, joining[0])
        self._election.command(ChangeElectorate(members, nomination), now)
        self._note_change(now.instant, WATCH_INTERVAL)

    def _is_live(self, node_id: NodeId) -> bool:
        return node_id == self._node_id or self._membership.is_live(node_id)

    def _long_dead(self, electors: list[NodeId], now: Instant) -> frozenset[NodeId]:
        """Electors that are not there for long: dead, or never seen here; gone with a goodbye, sooner."""
        absent = [each for each in electors if not self._is_live(each)]
        self._absent_since = {each: self._absent_since.get(each, now) for each in absent}
        return frozenset(
            each for each in absent if between(self._absent_since[each], now) >= self._absence_borne(each)
        )

    def _absence_borne(self, elector: NodeId) -> Duration:
        """For how long its place is kept for an elector that is not there."""
        member = self._membership.member(elector)
        options = self._options.election
        return options.left_after if member is not None and member.state == "left" else options.dead_after

    # --- as backbone: who holds what ------------------------------------------------------------------------

    def _begin_planning(self, now: Now) -> None:
        fence = self._election.fence
        assert fence is not None
        self._is_planning = True
        if self._plan is None:
            # Nothing to go on with: what members say they hold is where the first plan starts from.
            for standing in self._standing.values():
                held = standing.record.held
                if held is not None and held.ranges is not None and not len(standing.holding):
                    standing.holding = ShardSet.decode(held.ranges)
        self._placement.command(BecomeBackbone(fence.epoch, fence.term, self._plan), now)
        self._note_change(now.instant)

    def _end_planning(self, now: Now) -> None:
        self._is_planning = False
        self._placement.command(StopPlanning(), now)
        self._offers.withdraw()
        self._note_change(now.instant)

    def _places(self) -> tuple[Place, ...]:
        there = sorted((node_id, each) for node_id, each in self._standing.items() if each.is_live)
        row_times = as_alike(each.record.expert_row_ns for _, each in there)
        return tuple(self._place(node_id, each, row_times) for node_id, each in there)

    def _place(self, node_id: NodeId, standing: _Standing, row_times: Mapping[int, int]) -> Place:
        record = standing.record
        row_ns = row_times.get(record.expert_row_ns)
        times = self._answer_times.times(node_id)
        is_own = node_id == self._node_id
        member = None if is_own else self._membership.member(node_id)
        state: PlaceState = "serving" if len(standing.holding) else "joined"
        if member is not None and member.state == "suspect":
            state = "suspect"
        elif record.state == "stopping":
            state = "draining"
        verdict = self._verdict_on(record)
        if verdict == "quarantined":
            state = "lost"
        memory_bytes = record.memory_bytes
        if standing.room_bytes is not None:
            memory_bytes = min(memory_bytes, standing.room_bytes)
        known = self._verification.verdict_of(record, "output")
        fitness = {"verified": True, "unfit": False}.get(known)
        is_short_of_f32 = verdict == "unfit" and record.adds_in_f32
        return Place(
            node_id=node_id,
            memory_bytes=memory_bytes if _is_worker(record) else 0,
            accumulation="F16" if is_short_of_f32 else record.accumulation,
            equivalence_class=" ".join(sorted({each.activation_format for each in record.classes})),
            output_verdict=fitness if "output" in record.ranks else False,
            rate_rows_s=max(1, 1_000_000_000 // (row_ns * times)) if row_ns else None,
            rtt_ns=0 if is_own else _coarse_rtt(member),
            state=state,
            is_backbone=is_own,
            holding=standing.holding,
        )

    def _note_verdict(self, verdict: VerdictInForce, now: Now) -> None:
        """A member was found out; of one in quarantine nothing that it said it holds counts any more."""
        self._verdicts.add(verdict, now)
        if verdict.word == "quarantined":
            self._forget_holding(verdict.node_id)
        self._note_change(now.instant)

    def _take_agreed(self, agreed: Agreed, now: Now) -> None:
        """This node has recomputed rows itself, or enough electors have: it is kept and acted upon."""
        before = self._verdicts.n_agreed_under_others(agreed.node_id, agreed.claim_digest)
        is_set = agreed.word == "quarantined" or before > 0
        lasts = Duration(QUARANTINE_AFTER_CHALLENGE << min(before, _DOUBLED_MAX)) if is_set else _NO_TIME
        verdict = VerdictInForce(
            node_id=agreed.node_id,
            word=agreed.word,
            reason=agreed.reason,
            until=after(now.instant, lasts),
            claim=agreed.claim_digest,
            n_electors=agreed.n_electors,
        )
        self._note_verdict(verdict, now)
        self._verdicts.keep_accusations(self._accusations.own())
        self._hear_of_verdict(agreed.node_id, now.instant)

    def _claim_of(self, node_id: NodeId) -> bytes | None:
        """The digest of the certificates that a node shows now; None where that is not known."""
        record = self._book.record_of(node_id)
        return record.claim_digest() if record is not None else None

    def _verdict_on(self, record: CapabilityRecord) -> AuditVerdict | None:
        """What holds of a node that shows this record."""
        verdict = self._in_force(record.node_id, record)
        return verdict.word if verdict is not None else None

    def _in_force(self, node_id: NodeId, record: CapabilityRecord | None = None) -> VerdictInForce | None:
        """What holds of a node that shows this record; without one, the record that is known of it."""
        record = record if record is not None else self._book.record_of(node_id)
        if record is None:
            return self._verdicts.in_force(node_id, None)
        is_verified = (  # by auditors: in a swarm that takes members at their word there are none
            self._verification.is_needed and self._verification.verdict_of(record, "output") == "verified"
        )
        return self._verdicts.in_force(node_id, record.claim_digest(), is_verified=is_verified)

    def _verdicts_in_force(self) -> tuple[VerdictInForce, ...]:
        """Of every node of which something holds, in order of ids."""
        found = []
        for node_id in self._verdicts.node_ids():
            verdict = self._in_force(node_id)
            if verdict is not None:
                found.append(verdict)
        return tuple(found)

    def _issue(self, plan: Plan, now: Now) -> None:
        """Sign what placement decided, keep it, and offer it to all it names and all who vote."""
        fence = self._election.fence
        if fence is None or fence.backbone != self._node_id or not _is_of(plan, fence):
            return
        signed = sign_message(self._private_key, self._swarm.digest, plan)
        electors = [node_id_of(each) for each in self._election.electorate.members]
        # Whom the plan before named is to hear that it holds nothing any more.
        released = [each for each in (self._plan.nodes if self._plan else ()) if self._is_live(each)]
        self._follow_plan(plan, signed)
        named = {*plan.nodes, *released, *electors} - {self._node_id}
        self._offers.offer(plan, signed, self._election.proof, named, now.instant)
        self._note_change(now.instant)

    def _take_answer(self, message: PlanAccept | PlanRefusal, sender: NodeId, now: Now) -> None:
        if not self._offers.take(message, sender, now.instant):
            return
        plan = self._offers.plan
        assert plan is not None
        if isinstance(message, PlanRefusal):
            self._forget_holding(sender)
            self._note_room(sender, message.need_bytes, message.have_bytes)
            self._effects.append(HolderRefused(sender, message.code, message.reason))
        else:
            standing = self._standing.get(sender)
            if standing is not None and self._verdict_on(standing.record) == "quarantined":
                return  # nothing is asked of it, whatever it says
            if standing is not None:
                standing.holding = plan.shard_of(sender)
            self._effects.append(HolderReady(sender, plan, message.memory_bytes))
        self._note_change(now.instant)

    def _note_room(self, node_id: NodeId, need_bytes: int, have_bytes: int) -> None:
        """A node had less room than it said: plan with what it has, until it says something else."""
        standing = self._standing.get(node_id)
        if standing is not None and have_bytes < need_bytes:
            standing.room_bytes = have_bytes

    def _ask_again(self, node_id: NodeId, now: Instant) -> None:
        """Whether a holder still serves what it said is in doubt: let it say so again."""
        self._forget_holding(node_id)
        self._offers.hurry(node_id, now)

    def _forget_holding(self, node_id: NodeId) -> None:
        standing = self._standing.get(node_id)
        if standing is not None:
            standing.holding = _NOTHING

    # --- as holder ------------------------------------------------------------------------------------------

    def _follow_plan(self, plan: Plan, signed: bytes) -> None:
        self._plan, self._signed_plan, self._refusal = plan, signed, None
        self._effects.append(PlanReceived(plan, signed))

    def _take_offer(self, message: PlanOffer, sender: NodeId, now: Now) -> None:
        try:
            term = self.check_proof(message.proof, sender, now)
        except RemoteProtocolError as error:
            if error.code == "unknown_electorate":
                return  # we are behind and have asked for it; the offer comes again
            raise
        if term.backbone != sender:
            raise RemoteProtocolError("the proof makes another node backbone", "not_backbone")
        if message.plan != self._signed_plan:
            plan = open_plan(message.plan, self._swarm.digest, sender)
            if not _is_of(plan, term):
                raise RemoteProtocolError("the plan is of another term than its proof", "stale_term")
            current = self._plan
            if current is not None and _is_of(current, term):
                if plan.revision < current.revision:
                    return  # it was overtaken on its way
                if plan.revision == current.revision and plan != current:
                    raise RemoteProtocolError("two plans have one revision", "plan_equivocated")
            self._placement.command(NotePlan(plan), now)
            self._follow_plan(plan, message.plan)
            self._note_change(now.instant)
        self._answer_offer()

    def _answer_offer(self) -> None:
        """Say how far this node is with the plan, if there is anything to say yet."""
        plan = self._plan
        assert plan is not None
        if not len(plan.shard_of(self._node_id)):
            self._answer(plan, 0)
        elif self._served == plan and self._held is not None:
            self._answer(plan, self._served_bytes)
        elif self._refusal is not None:
            self._refuse(self._refusal)

    def _note_loaded(self, request: ShardLoaded, now: Now) -> None:
        plan = self._plan
        if plan is None or (request.epoch, request.term, request.revision) != _version(plan):
            return
        shard = plan.shard_of(self._node_id)
        self._served, self._served_bytes, self._refusal = plan, request.memory_bytes, None
        digest = hashlib.sha256(self._signed_plan).digest()
        self._held = held_shard(*_version(plan), digest, shard) if len(shard) else None
        standing = self._standing.get(self._node_id)
        if standing is not None:
            standing.holding = shard
        fence = self._election.fence
        if fence is not None and fence.backbone != self._node_id:
            self._answer(plan, request.memory_bytes)
        self._note_change(now.instant)

    def _note_refused(self, request: ShardRefused, now: Now) -> None:
        plan = self._plan
        if plan is None or (request.epoch, request.term, request.revision) != _version(plan):
            return
        self._refusal = request
        fence = self._election.fence
        if fence is not None and fence.backbone == self._node_id:
            self._note_room(self._node_id, request.need_bytes, request.have_bytes)
        else:
            self._refuse(request)
        self._note_change(now.instant)

    def _answer(self, plan: Plan, memory_bytes: int) -> None:
        fence = self._election.fence
        if fence is not None and _is_of(plan, fence) and fence.backbone != self._node_id:
            digest = plan.shard_of(self._node_id).digest()
            self._effects.append(Send(fence.backbone, PlanAccept(*_version(plan), digest, memory_bytes)))

    def _refuse(self, refusal: ShardRefused) -> None:
        fence = self._election.fence
        if fence is not None and fence.backbone != self._node_id:
            answer = PlanRefusal(
                refusal.epoch,
                refusal.term,
                refusal.revision,
                refusal.code,
                as_sentence(refusal.reason),
                refusal.need_bytes,
                refusal.have_bytes,
            )
            self._effects.append(Send(fence.backbone, answer))


def _is_worker(record: CapabilityRecord) -> bool:
    """Whether a node stands for experts."""
    return "output" in record.ranks or "bulk" in record.ranks


def _waits_for(said: CapabilityRecord) -> str:
    """What the backbone with this record waits for, in its words; not what it said as a follower before."""
    if said.reason.startswith(_BACKBONE):
        return f"{_BACKBONE}{said.node_id} has only just been elected"
    why = f": {said.reason}" if said.reason else ""
    return f"{_BACKBONE}{said.node_id} is {said.state}{why}"


def _is_of(plan: Plan, term: ProvenTerm) -> bool:
    """Whether this is a plan of that term."""
    return (plan.epoch, plan.term) == (term.epoch, term.term)


def _coarse_rtt(member: Member | None) -> int | None:
    """A round trip as placement sees it: not at all below `RTT_IGNORED`, then in powers of two.

    It is measured between control processes, which are slow when their machine is busy: plans must not follow
    its noise. So it is the least of some minutes, and what is left of that tells a LAN from a WAN. None while
    that is not known yet.
    """
    if member is None or member.rtt_least is None:
        return None
    if member.rtt_least < RTT_IGNORED:
        return 0
    return 1 << (member.rtt_least - 1).bit_length() if member.rtt_samples >= FAR_SAMPLES_MIN else None


def _says_the_same(before: CapabilityRecord, now: CapabilityRecord) -> bool:
    """Whether a record was only said again, as each is from time to time."""
    return _SUBSTANCE(before) == _SUBSTANCE(now)


def _stands(standing: _Standing) -> bool:
    """Whether it stands for backbone or for elector."""
    return standing.rank is not None or standing.record.stands_for_elector


def _ranking(record: CapabilityRecord) -> tuple[bool, CandidateRank]:
    """What the order of those who may be electors depends on."""
    return record.stands_for_elector, candidate_rank(record)


def _version(plan: Plan) -> tuple[int, int, int]:
    return (plan.epoch, plan.term, plan.revision)
