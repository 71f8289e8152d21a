"""The newest each node has said of itself: which record counts, which is gone for good, when ours goes out.

What a node says is ordered by its sequence; of two things said under one number (equivocation) a withdrawal
counts before a record, and of two records that with the lower digest. So books that have heard the same, in
whatever order and however often, hold the same. The number of what was withdrawn or has expired stays here
until nobody could believe the record any more, whose clock is off by what we tolerate: it cannot come back. A
node can, with a higher number, which only the holder of its key can give.

Our own number is on disk before the record leaves, and is wall time or one more than the last: it does not
fall when a clock goes back. Of liveness the book knows what it is told, and asks for it only when it is full;
of a swarm's size only how many it holds.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, NamedTuple, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.admission import AdmissionBook
from kvasir_proto.capability import (
    CLOCK_SKEW_MAX,
    CapabilityRecord,
    OpenedRecord,
    Withdrawal,
    check_draft,
    has_expired,
    judge_times,
    open_sealed,
    seal_record,
)
from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import Effect, FetchRecord, Notice, Now, Persist, Publish, Send
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import NodeId, NodeIdField, SwarmDigest, node_id_of
from kvasir_proto.instants import Duration, Instant, after, milliseconds, seconds, sooner
from kvasir_proto.limits import INT63_MAX, Length, Nanoseconds, Sequence63
from kvasir_proto.messages import Family
from kvasir_proto.messages.records import RECORDS_A_MESSAGE_MAX, RecordMessage, RecordReply, RecordRequest

if TYPE_CHECKING:
    from random import Random

RECORDS_MAX: Final = 4096
"""Records that count at a time; the largest take 16 KiB each, usual ones a tenth of that. When they are so
many a newcomer takes the place of a record that counts for less than its own (`_Worth`), or is refused."""
ISSUER_SHARE_MAX: Final = RECORDS_MAX // 4
"""So many of them may be vouched for by one elector; more by one that lies count as unvouched."""
GONE_MAX: Final = 4096
"""Numbers of what is gone. When they are so many, one goes that would go next anyway, of nodes first of which
we never held a record: else a stranger with many keys could make us forget."""
HELD_BACK_MAX: Final = 256
"""Records kept until it is known what was revoked; whose was dropped is asked for again."""
FETCHES_MAX: Final = 256
"""Digests being fetched at a time; whoever named one more will name it again."""
ADOPTED_AHEAD_MAX: Final[Duration] = seconds(366 * 24 * 3600)
"""How far before our clock a number that our own key gave elsewhere may be for us to go on above it."""


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """When records go out. Each knob's cost is in records per second of the whole swarm of n members."""

    refresh_interval_min: Duration
    refresh_interval_per_member: Duration
    """A record is said again after max(min, n * this), less up to a tenth: at most 1.1 / this a second."""
    lifetime_refreshes: int
    lifetime_min: Duration
    """A record is good for max(min, so many refreshes); all but one may be lost before a living member's
    expires. Lower means that the dead who withdrew nothing are forgotten sooner; liveness is SWIM's."""
    change_delay_min: Duration
    change_delay_per_member: Duration
    """A change goes out after U(1/2, 1) * (min + n * this), and changes meanwhile with it: a plan that
    changes every record at once makes at most 2 / this a second."""
    quiet_delay_per_member: Duration
    """After n * this a change goes out that nobody acts on: what a node holds, as long as it is something, or
    what it calls its state. Many members have those at once, each time that a plan moves experts or a
    backbone changes: they make 1 / this a second at most. Which plan gave a node the same as before waits for
    the next time that its record is said again."""
    persist_interval: Duration
    """How long the numbers of others that are gone may wait for the disk; ours never do."""
    fetch_delay: Duration
    """How long what members name is collected before they are asked: a newcomer hears of all at once."""
    fetch_timeout: Duration
    """How long gossip may take to bring a newer record than we have, before the member that named it is
    asked; and how long that may take to hand it over, before the DHT is."""


LAN: Final = RecordOptions(
    refresh_interval_min=seconds(60),
    refresh_interval_per_member=milliseconds(500),
    lifetime_refreshes=5,
    lifetime_min=seconds(600),
    change_delay_min=milliseconds(200),
    change_delay_per_member=milliseconds(10),
    quiet_delay_per_member=milliseconds(400),
    persist_interval=seconds(5),
    fetch_delay=milliseconds(100),
    fetch_timeout=seconds(1),
)
"""Calculated at 14 ms of CPU a gossip message: 0.3 % of a core for records at 10 members, 3 % at 2000."""

WAN: Final = replace(
    LAN,
    change_delay_min=seconds(2),
    change_delay_per_member=milliseconds(20),
    fetch_delay=milliseconds(500),
    fetch_timeout=seconds(5),
)
"""Slower to say a change and more patient, since a round trip and gossip itself take longer there."""


# --- what the book is told and tells ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublishOwn:
    """Say this of ourselves, now and until told otherwise. The book numbers it and sets when it expires.

    `state_matters` where others act on the state this node is in; otherwise a change of that can wait.
    After `Withdraw` this is the explicit way back: nothing else makes the node say anything again.
    """

    record: CapabilityRecord
    state_matters: bool = True


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Say that we have gone. Does nothing where nothing was ever said."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the record with this digest: from the member that named it, and failing that from the DHT."""

    node_id: NodeId
    digest: bytes
    from_node: NodeId


@dataclass(frozen=True, slots=True)
class JudgeAnew:
    """Who may be a member has changed: records of those who may not are gone."""


@dataclass(frozen=True, slots=True)
class NoteLive:
    """Membership says whether this node is there: a full book does without those that are not."""

    node_id: NodeId
    is_live: bool


@dataclass(frozen=True, slots=True)
class NoteNeeded:
    """These are electors, or the plan names them: their records stay, whoever comes."""

    node_ids: frozenset[NodeId]


RecordCommand: TypeAlias = PublishOwn | Withdraw | Fetch | JudgeAnew | NoteLive | NoteNeeded


@dataclass(frozen=True, slots=True)
class RecordChanged:
    """What a node says of itself now: a record and its digest, or None when it has withdrawn or expired."""

    node_id: NodeId
    record: CapabilityRecord | None
    digest: bytes


@dataclass(frozen=True, slots=True)
class Equivocation:
    """A node said two things under one number. Both, as signed: evidence. Told once for each number."""

    node_id: NodeId
    sequence: int
    kept: bytes
    other: bytes


@dataclass(frozen=True, slots=True)
class IdentityContested:
    """Somebody else says things with our key, above our own number: a twin, or a copy of our directory."""

    node_id: NodeId
    sequence: int
    said: bytes


RecordEvent: TypeAlias = RecordChanged | Equivocation | IdentityContested

Verdict: TypeAlias = Literal["accepted", "known", "stale", "refused"]

_SEEN_OTHERWISE_ELSEWHERE: Final = frozenset(
    (
        "credential_expired",
        "expired",
        "full",
        "not_caught_up",
        "out_of_bounds",
        "revoked",
        "unknown_issuer",
    )
)
"""By a node with another clock, other members, or news of revocations and electors that we have or it has."""


class Outcome(NamedTuple):
    """What became of bytes that claim to be a record; `code` says why when they were refused.

    Gossip passes on what was `accepted`, drops what is `known` or `stale`, and holds only `refused` against
    who sent it, and of that nothing that honest nodes may see otherwise, for now.
    """

    verdict: Verdict
    code: str = ""
    node_id: NodeId | None = None

    @property
    def is_sender_at_fault(self) -> bool:
        """Whether no honest node would have passed this on."""
        return self.verdict == "refused" and self.code not in _SEEN_OTHERWISE_ELSEWHERE


# --- what is kept -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gone:
    """The highest number of a node that counts no more, and until when (our wall time) we know it."""

    node_id: NodeIdField
    sequence: Sequence63
    until: Nanoseconds
    was_member: bool


@dataclass(frozen=True, slots=True)
class RecordsKept:
    """The slot `records`: our own number, the latest expiry we ever gave, and the numbers that are gone."""

    kind: ClassVar[str] = "records_kept"
    own_sequence: Sequence63
    own_expires: Nanoseconds
    gone: Annotated[tuple[Gone, ...], Length(0, GONE_MAX)]


RECORDS_KEPT: Final = Family("records kept", (RecordsKept,), 1 << 20)


class _Worth(IntEnum):
    """What a record is worth in a full book: a newcomer displaces only what is worth less than itself."""

    ABSENT = 0
    """Membership does not count its node. Who was never seen goes before the dead, and the oldest first."""
    UNVOUCHED = 1
    """It lives and nobody vouches for it, or somebody who vouches for too many. The youngest goes first."""
    VOUCHED = 2
    """It lives and has a good credential. Where admission is by invitation everybody has one."""
    NEEDED = 3
    """An elector, named by the plan, or this node itself: never displaced."""


class _Head(NamedTuple):
    """The newest record of a node."""

    record: CapabilityRecord
    digest: bytes
    data: bytes


@dataclass(slots=True)
class _Wanted:
    """A record being waited for; `known` is the digest of what we had of its node when we began to."""

    node_id: NodeId
    from_node: NodeId
    known: bytes
    is_asked_for: bool
    deadline: Instant


def _is_of_another_plan(before: CapabilityRecord, now: CapabilityRecord) -> bool:
    """Whether all that changed is which plan gave the node what it holds."""
    old, new = before.held, now.held
    if old is None or new is None or new.ranges is None:
        return False
    return (old.n_pairs, old.ranges) == (new.n_pairs, new.ranges) and replace(before, held=new) == now


def _has_changed_quietly(before: CapabilityRecord, now: CapabilityRecord) -> bool:
    """Whether all that changed is what the node holds, where it goes on to hold something, and its own state.

    Whoever plans hears from the holder itself what it serves; a record says it to those who come later.
    """
    if (before.held is None) != (now.held is None):
        return False
    return replace(before, held=now.held, state=now.state, reason=now.reason) == now


class RecordBook:
    """Every node's newest record, by the rules above. Five verbs, and questions that change nothing."""

    def __init__(
        self,
        *,
        private_key: Ed25519PrivateKey,
        swarm: SwarmDigest,
        options: RecordOptions,
        stored: bytes | None,
        entropy: Random,
        now: Now,
        admission: AdmissionBook | None = None,
    ) -> None:
        """`stored` is what the slot `records` held. Raises `RemoteProtocolError` when it is damaged.

        `admission` judges what is taken in; without it anybody may be a member.
        """
        kept = decode(stored, RECORDS_KEPT) if stored is not None else RecordsKept(0, 0, ())
        self._private_key = private_key
        self._node_id = node_id_of(private_key.public_key().public_bytes_raw())
        self._swarm = swarm
        self._options = options
        self._entropy = entropy
        self._admission = admission
        self._now = now
        self._founder = None if admission is None else admission.founder
        self._heads: dict[NodeId, _Head] = {}
        self._live: set[NodeId] = set()
        self._seen: dict[NodeId, None] = {}
        """Who was live at some time while its record counted."""
        self._needed: frozenset[NodeId] = frozenset()
        self._full_told = False
        self._held_back: dict[NodeId, bytes] = {}
        self._by_digest: dict[bytes, NodeId] = {}
        self._gone: dict[NodeId, Gone] = {each.node_id: each for each in kept.gone}
        self._expiries: list[tuple[int, NodeId]] = [(each.until, each.node_id) for each in kept.gone]
        heapq.heapify(self._expiries)
        self._equivocated: dict[NodeId, int] = {}
        self._own_sequence = kept.own_sequence
        self._own_expires = kept.own_expires
        self._draft: CapabilityRecord | None = None
        self._said: CapabilityRecord | None = None
        """The draft of the record that went out last; None where it has to be said again whatever it says."""
        self._is_quiet = False
        self._said_at = self._refresh_at = now.instant
        self._publish_at: Instant | None = None
        self._persist_at: Instant | None = None
        self._ask_at: Instant | None = None
        self._wanted: dict[bytes, _Wanted] = {}
        self._unasked: dict[NodeId, list[bytes]] = {}
        self._effects: list[Effect | RecordEvent] = []

    # -- questions -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._heads)

    def __iter__(self) -> Iterator[CapabilityRecord]:
        """Every record that counts, in the order of node ids."""
        return iter([self._heads[node_id].record for node_id in sorted(self._heads)])

    def record_of(self, node_id: NodeId) -> CapabilityRecord | None:
        """What this node says of itself, if it says anything."""
        head = self._heads.get(node_id)
        return None if head is None else head.record

    def digest_of(self, node_id: NodeId) -> bytes | None:
        """The digest of this node's record: what others are told so that they can fetch it."""
        head = self._heads.get(node_id)
        return None if head is None else head.digest

    def data_of(self, digest: bytes) -> bytes | None:
        """The signed bytes of the record with this digest, if it counts."""
        node_id = self._by_digest.get(digest)
        return None if node_id is None else self._heads[node_id].data

    @property
    def refresh_interval(self) -> Duration:
        """How often records are said again in a swarm of this size."""
        options = self._options
        grown = len(self._heads) * options.refresh_interval_per_member
        return Duration(max(options.refresh_interval_min, grown))

    @property
    def lifetime(self) -> Duration:
        """How long a record said now is good for."""
        return Duration(
            max(self._options.lifetime_min, self._options.lifetime_refreshes * self.refresh_interval)
        )

    # -- the five verbs ------------------------------------------------------------------------------

    def receive(self, message: RecordMessage, sender: NodeId, now: Now) -> None:
        """Answer a request, take in a reply."""
        self._now = now
        if isinstance(message, RecordRequest):
            found = (self.data_of(digest) for digest in message.digests)
            self._effects.append(Send(sender, RecordReply(tuple(each for each in found if each is not None))))
            return
        for data in message.records:
            self.take(data, now)

    def take(self, data: bytes, now: Now) -> Outcome:
        """Take in what came by gossip, from the DHT, or by any other way; trusted for its signature alone."""
        self._now = now
        try:
            opened = open_sealed(data, self._swarm)
            judge_times(opened.said, now.wall)
            if self._admission is not None and isinstance(opened.said, CapabilityRecord):
                self._admission.judge(opened.said, now.wall)
        except RemoteProtocolError as error:
            if error.code == "not_caught_up":
                self._hold_back(opened)
            return Outcome("refused", error.code)
        self._wanted.pop(opened.digest, None)
        said = opened.said
        if said.node_id == self._node_id:
            return self._take_own(opened)
        if isinstance(said, CapabilityRecord) and not self._make_room(said):
            return Outcome("refused", "full", said.node_id)
        return Outcome(self._merge(opened), "", said.node_id)

    def command(self, request: RecordCommand, now: Now) -> None:
        """Do as asked. Raises `LocalProtocolError` for a record not ours, or that nobody would believe."""
        self._now = now
        match request:
            case PublishOwn(record, state_matters):
                self._publish_own(record, is_quiet=not state_matters)
            case Withdraw():
                self._withdraw()
            case Fetch(node_id, digest, from_node):
                self._fetch(node_id, digest, from_node)
            case JudgeAnew():
                self._judge_anew()
            case NoteLive(node_id, is_live):
                if is_live:
                    self._live.add(node_id)
                    self._seen[node_id] = None
                else:
                    self._live.discard(node_id)
            case NoteNeeded(node_ids):
                self._needed = node_ids

    def tick(self, now: Now) -> None:
        """Let expire what has, say what is due, give up waiting for what is late."""
        self._now = now
        self._expire()
        if self._publish_at is not None and self._publish_at <= now.instant:
            self._say_what_is_due()
        if self._persist_at is not None and self._persist_at <= now.instant:
            self._persist()
        for digest in sorted(each for each, wanted in self._wanted.items() if wanted.deadline <= now.instant):
            wanted = self._wanted.pop(digest)
            if (self.digest_of(wanted.node_id) or b"") != wanted.known:
                continue
            if wanted.is_asked_for:
                self._effects.append(FetchRecord(wanted.node_id, digest, wanted.from_node))
            else:
                self._ask(digest, wanted)
        if self._ask_at is not None and self._ask_at <= now.instant:
            self._send_requests()

    def next_deadline(self) -> Instant | None:
        """When `tick` has something to do, if nothing happens before."""
        deadline = self._publish_at
        for due in (self._persist_at, self._ask_at):
            if due is not None:
                deadline = sooner(deadline, due)
        if self._wanted:
            # Everything is waited for equally long, so the one asked for first is due first.
            deadline = sooner(deadline, next(iter(self._wanted.values())).deadline)
        if self._expiries:
            # Wall time may be set anew meanwhile; then we look too early or too late, and see.
            instant, wall = self._now
            wait = self._expiries[0][0] + 1 - wall
            deadline = sooner(deadline, after(instant, Duration(wait)) if wait > 0 else instant)
        return deadline

    def drain(self) -> list[Effect | RecordEvent]:
        """What is to be done, in order, each once."""
        drained, self._effects = self._effects, []
        return drained

    # -- what others say -----------------------------------------------------------------------------

    def _hold_back(self, opened: OpenedRecord) -> None:
        """Admission does not know yet whom to trust: keep it until it does."""
        self._held_back.pop(opened.said.node_id, None)
        self._held_back[opened.said.node_id] = opened.data
        if len(self._held_back) > HELD_BACK_MAX:
            del self._held_back[next(iter(self._held_back))]

    def _make_room(self, said: CapabilityRecord) -> bool:
        """Whether there is a place for this record, if another has to go for it."""
        heads = self._heads
        if said.node_id in heads or len(heads) < RECORDS_MAX:
            return True
        if not self._full_told:
            self._full_told = True
            self._effects.append(Notice("records_full", (("records_max", RECORDS_MAX),)))
        by_issuer: Counter[bytes] = Counter()
        least: tuple[_Worth, bool, int] | None = None
        displaced = said.node_id
        for arrival, (node_id, head) in enumerate(heads.items()):
            worth = self._worth(head.record, by_issuer)
            is_absent = worth is _Worth.ABSENT
            order = (worth, is_absent and node_id in self._seen, arrival if is_absent else -arrival)
            if least is None or order < least:
                least, displaced = order, node_id
        # Whoever comes has not been seen yet, and is taken for as good as if it had.
        own = max(_Worth.UNVOUCHED, self._worth_if_live(said, by_issuer))
        if least is None or least[0] >= own:
            return False
        head = heads.pop(displaced)
        del self._by_digest[head.digest]
        self._seen.pop(displaced, None)
        self._effects.append(RecordChanged(displaced, None, head.digest))
        return True

    def _worth(self, record: CapabilityRecord, by_issuer: Counter[bytes]) -> _Worth:
        node_id = record.node_id
        if node_id == self._node_id or node_id in self._needed:
            return _Worth.NEEDED
        return self._worth_if_live(record, by_issuer) if node_id in self._live else _Worth.ABSENT

    def _worth_if_live(self, record: CapabilityRecord, by_issuer: Counter[bytes]) -> _Worth:
        issuer = None if self._admission is None else self._admission.issuer_of(record, self._now.wall)
        if issuer is None:
            return _Worth.UNVOUCHED
        by_issuer[issuer] += 1
        is_within = by_issuer[issuer] <= ISSUER_SHARE_MAX or issuer == self._founder
        return _Worth.VOUCHED if is_within else _Worth.UNVOUCHED

    def _merge(self, opened: OpenedRecord) -> Verdict:
        """Put what is newer in the place of what is older."""
        said = opened.said
        node_id = said.node_id
        head, gone = self._heads.get(node_id), self._gone.get(node_id)
        if gone is not None and said.sequence <= gone.sequence:
            return "stale"
        if head is not None and said.sequence < head.record.sequence:
            return "stale"
        if isinstance(said, Withdrawal):
            if head is not None and head.record.sequence == said.sequence:
                self._note_equivocation(head, opened)
            self._note_gone(said.sequence, said.expires, node_id)
            return "accepted"
        if head is not None and head.digest == opened.digest:
            return "known"
        if head is not None and head.record.sequence == said.sequence:
            self._note_equivocation(head, opened)
            if head.digest < opened.digest:
                return "stale"
        self._hold(said, opened)
        return "accepted"

    def _hold(self, record: CapabilityRecord, opened: OpenedRecord) -> None:
        node_id = record.node_id
        head = self._heads.get(node_id)
        if head is not None:
            del self._by_digest[head.digest]
        self._heads[node_id] = _Head(record, opened.digest, opened.data)
        self._by_digest[opened.digest] = node_id
        # What is gone stays noted beside a newer record: an older one must not come between.
        self._expect(record.expires + CLOCK_SKEW_MAX, node_id)
        self._effects.append(RecordChanged(node_id, record, opened.digest))

    def _note_equivocation(self, head: _Head, opened: OpenedRecord) -> None:
        node_id, sequence = head.record.node_id, head.record.sequence
        if self._equivocated.get(node_id) == sequence:
            return
        self._equivocated[node_id] = sequence
        kept, other = head.data, opened.data
        if isinstance(opened.said, Withdrawal) or opened.digest < head.digest:
            kept, other = other, kept
        self._effects.append(Equivocation(node_id, sequence, kept, other))

    def _judge_anew(self) -> None:
        if self._admission is None:
            return
        held_back, self._held_back = self._held_back, {}
        for data in held_back.values():
            self.take(data, self._now)
        for node_id in sorted(each for each in self._heads if each != self._node_id):
            record = self._heads[node_id].record
            try:
                self._admission.judge(record, self._now.wall)
            except RemoteProtocolError:
                self._note_gone(record.sequence, record.expires, node_id)

    # -- what is gone --------------------------------------------------------------------------------

    def _note_gone(self, sequence: int, expires: int, node_id: NodeId) -> None:
        """No record of this node up to this number counts, now and ever."""
        head, before = self._heads.pop(node_id, None), self._gone.get(node_id)
        self._seen.pop(node_id, None)
        was_member = head is not None or (before is not None and before.was_member)
        if head is not None:
            expires = max(expires, head.record.expires)
            del self._by_digest[head.digest]
            self._effects.append(RecordChanged(node_id, None, head.digest))
        # Whoever reads this clock believes a record until `expires` and the tolerance; as much again covers
        # that the clock is set back meanwhile.
        until = min(INT63_MAX, expires + 2 * CLOCK_SKEW_MAX)
        if before is not None:
            until = max(until, before.until)
        self._gone[node_id] = Gone(node_id, sequence, until, was_member)
        self._expect(until, node_id)
        if len(self._gone) > GONE_MAX:
            first = min(self._gone.values(), key=lambda each: (each.was_member, each.until, each.node_id))
            self._forget_gone(first.node_id)
        if self._persist_at is None:
            self._persist_at = after(self._now.instant, self._options.persist_interval)

    def _expect(self, wall: int, node_id: NodeId) -> None:
        """Look at this node again then. What was replaced stays in the heap, so it is made anew at times."""
        heapq.heappush(self._expiries, (wall, node_id))
        if len(self._expiries) > 64 + 4 * (len(self._heads) + len(self._gone)):
            self._expiries = [
                (each.record.expires + CLOCK_SKEW_MAX, key) for key, each in self._heads.items()
            ]
            self._expiries += [(each.until, key) for key, each in self._gone.items()]
            heapq.heapify(self._expiries)

    def _expire(self) -> None:
        while self._expiries and self._expiries[0][0] < self._now.wall:
            _, node_id = heapq.heappop(self._expiries)
            head, gone = self._heads.get(node_id), self._gone.get(node_id)
            if head is not None and has_expired(head.record.expires, self._now.wall):
                self._note_gone(head.record.sequence, head.record.expires, node_id)
            elif gone is not None and gone.until < self._now.wall:
                self._forget_gone(node_id)

    def _forget_gone(self, node_id: NodeId) -> None:
        del self._gone[node_id]
        if node_id not in self._heads:
            self._equivocated.pop(node_id, None)

    # -- what we say ---------------------------------------------------------------------------------

    def _publish_own(self, record: CapabilityRecord, *, is_quiet: bool) -> None:
        if record.node_id != self._node_id:
            raise LocalProtocolError("a node says nothing of others")
        draft = replace(record, sequence=0, expires=0)
        matters_now = self._is_quiet and not is_quiet
        self._is_quiet = is_quiet
        if draft == self._draft:
            if matters_now and draft != self._said:
                self._say_soon()
            return
        check_draft(draft)
        is_first = self._draft is None
        self._draft = draft
        if is_first:
            self._say()
        else:
            self._say_soon()

    def _say_what_is_due(self) -> None:
        """Say what we are, unless it is what we said last, or as good as: then that is said again later."""
        assert self._draft is not None
        said, now = self._said, self._now.instant
        due = now
        if said == self._draft or (said is not None and _is_of_another_plan(said, self._draft)):
            due = self._refresh_at
        elif said is not None and self._is_quiet and _has_changed_quietly(said, self._draft):
            wait = Duration(len(self._heads) * self._options.quiet_delay_per_member)
            due = min(self._refresh_at, after(self._said_at, wait))
        if due > now:
            self._publish_at = due
        else:
            self._say()

    def _say_soon(self) -> None:
        options = self._options
        delay = options.change_delay_min + len(self._heads) * options.change_delay_per_member
        at = after(self._now.instant, Duration(delay // 2 + self._entropy.randrange(delay // 2 + 1)))
        if self._publish_at is None or at < self._publish_at:
            self._publish_at = at

    def _next_number(self) -> int:
        number = max(self._own_sequence + 1, self._now.wall)
        if number > INT63_MAX:
            raise LocalProtocolError("this identity has used up its numbers")
        return number

    def _say(self) -> None:
        """Number, sign, persist and publish what we say of ourselves; it is due again after an interval."""
        assert self._draft is not None
        self._own_sequence = self._next_number()
        expires = after(self._now.wall, self.lifetime)
        self._own_expires = max(self._own_expires, expires)
        record = replace(self._draft, sequence=self._own_sequence, expires=expires)
        opened = open_sealed(seal_record(self._private_key, self._swarm, record), self._swarm)
        self._hold(record, opened)
        self._persist()
        self._effects.append(Publish("records", opened.data))
        interval = self.refresh_interval
        self._said, self._said_at = self._draft, self._now.instant
        self._refresh_at = after(
            self._now.instant, Duration(interval - self._entropy.randrange(interval // 10 + 1))
        )
        self._publish_at = self._refresh_at

    def _withdraw(self) -> None:
        self._draft, self._publish_at = None, None
        if self._own_expires == 0:
            return
        self._own_sequence = self._next_number()
        withdrawal = Withdrawal(self._node_id, self._own_sequence, max(self._own_expires, self._now.wall))
        self._note_gone(withdrawal.sequence, withdrawal.expires, self._node_id)
        self._persist()
        self._effects.append(Publish("records", seal_record(self._private_key, self._swarm, withdrawal)))

    def _take_own(self, opened: OpenedRecord) -> Outcome:
        """Something with our own key: an echo, what an earlier life of ours said, or a twin's."""
        said = opened.said
        if self.digest_of(self._node_id) == opened.digest:
            return Outcome("known", "", self._node_id)
        if said.sequence < self._own_sequence:
            return Outcome("stale", "", self._node_id)
        if said.sequence - self._now.wall > ADOPTED_AHEAD_MAX:
            return Outcome("stale", "", self._node_id)
        if said.sequence == self._own_sequence and self._draft is None:
            return Outcome("known", "", self._node_id)  # our withdrawal comes back
        self._own_sequence = said.sequence
        self._own_expires = max(self._own_expires, said.expires)
        if self._draft is not None:
            # We say ours again above it, at the pace of changes and no faster: twins do not race.
            self._effects.append(IdentityContested(self._node_id, said.sequence, opened.data))
            self._said = None
            self._say_soon()
        return Outcome("stale", "", self._node_id)

    def _persist(self) -> None:
        gone = tuple(self._gone[node_id] for node_id in sorted(self._gone))
        self._effects.append(
            Persist("records", encode(RecordsKept(self._own_sequence, self._own_expires, gone)))
        )
        self._persist_at = None

    # -- fetching ------------------------------------------------------------------------------------

    def _fetch(self, node_id: NodeId, digest: bytes, from_node: NodeId) -> None:
        if digest in self._by_digest or digest in self._wanted or len(self._wanted) >= FETCHES_MAX:
            return
        known = self.digest_of(node_id)
        deadline = after(self._now.instant, self._options.fetch_timeout)
        wanted = _Wanted(node_id, from_node, known or b"", known is None, deadline)
        if known is None:
            self._ask(digest, wanted)
        else:
            self._wanted[digest] = wanted  # a newer one is on its way by gossip, and mostly comes first

    def _ask(self, digest: bytes, wanted: _Wanted) -> None:
        """Ask whoever named it; it goes to the end of those that are waited for."""
        wanted.is_asked_for = True
        wanted.deadline = after(self._now.instant, self._options.fetch_timeout)
        self._wanted[digest] = wanted
        self._unasked.setdefault(wanted.from_node, []).append(digest)
        if self._ask_at is None:
            self._ask_at = after(self._now.instant, self._options.fetch_delay)

    def _send_requests(self) -> None:
        """Ask each member at once for all that it named lately and that has not come meanwhile."""
        self._ask_at = None
        for from_node in sorted(self._unasked):
            digests = [each for each in self._unasked[from_node] if each in self._wanted]
            for first in range(0, len(digests), RECORDS_A_MESSAGE_MAX):
                batch = tuple(digests[first : first + RECORDS_A_MESSAGE_MAX])
                self._effects.append(Send(from_node, RecordRequest(batch)))
        self._unasked.clear()
