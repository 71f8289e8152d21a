"""The membership core: SWIM behind five verbs.

It watches its view by probes, asks helpers where a direct answer is missing, gives a suspect time to refute,
passes claims on, and compares tables with a random member now and then, which is also how a newcomer gets its
first one. Whom only others speak of is neither watched nor counted nor passed on before it has shown itself,
by its record or by a word of its own. What the transport reports (`ConnectionLost`) only makes it look
sooner. It refuses to know what a member can do, who is backbone, and how messages travel: as best they can.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import Effect, Notice, Now, Persist, Send
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, between
from kvasir_proto.limits import as_sentence
from kvasir_proto.membership.broadcasts import FRESH, Broadcasts
from kvasir_proto.membership.clocks import Clocks
from kvasir_proto.membership.events import (
    AnnounceRecord,
    ClockSuspected,
    ConnectionLost,
    MemberChanged,
    MembershipEvent,
    MembershipRequest,
    NoteRecord,
    RecordHint,
    Seed,
    SelfConflicted,
)
from kvasir_proto.membership.health import Health
from kvasir_proto.membership.options import (
    BROADCASTS_MAX,
    HEARSAY_LIFETIME,
    INCARNATION_BLOCK,
    INCARNATION_HEARSAY_MAX,
    INCARNATION_STEP_MAX,
    MEMBERS_MAX,
    PROBES_MAX,
    RECORD_HINT_INTERVAL,
    RECORD_HINTS_MAX,
    RELAYS_MAX,
    SEEDS_MAX,
    MembershipOptions,
)
from kvasir_proto.membership.states import LIVE, NO_RECORD, TRANSITIONS, Claim, merge
from kvasir_proto.membership.suspicion import confirmations_wanted, suspicion_time, swarm_scale_permille
from kvasir_proto.membership.table import (
    NOBODY,
    RTT_SAMPLES_MAX,
    Condition,
    Entry,
    Member,
    Suspicion,
    Table,
    Timer,
)
from kvasir_proto.membership.view import View, accuser_mark
from kvasir_proto.messages.membership import (
    BUCKET_DIGEST_SIZE,
    BUCKETS,
    INCARNATION_MAX,
    INSTANCE_SIZE,
    KEY_SIZE,
    PART_UPDATES_MAX,
    RESERVED_INCARNATIONS,
    UPDATE_SIZE,
    UPDATES_MAX,
    Ack,
    Departure,
    Gossip,
    MembershipMessage,
    MemberState,
    MemberUpdate,
    Ping,
    PingRequest,
    ProbeResult,
    ReservedIncarnations,
    ViewPart,
    ViewRequest,
    unpack_update,
)

if TYPE_CHECKING:
    import random


# --- bookkeeping --------------------------------------------------------------------------------------------

_LEAST_WINDOW: Final = Duration(60_000_000_000)
"""The least round trip is that of the last one to two of these."""
_SWEEP_INTERVAL: Final = Duration(10_000_000_000)
_CHANGED_A_LOT: Final = 16
"""Changes by one comparison of tables that call for the next one soon."""
_JOIN_AT_ONCE: Final = 3
_ANSWERED_PARTS_MAX: Final = 64
"""Parts of the table given away in a second; beyond it each request still gets one."""
_LATE_MAX: Final = 64
_LOOK_INTERVAL: Final = Duration(100_000_000)
"""Between two calls to dead members of whom others say that they live: a liar makes us call no more often."""
_TWIN_SIGNS: Final = 3
_MISSES_OF_A_BROKEN_PATH: Final = 3
"""Probes in a row that only helpers got answered: fewer may be chance."""


class _Probe:
    """One question under way, and what is done when it stays without an answer."""

    __slots__ = ("answers", "helpers", "node_id", "postponed", "sent", "timer")

    def __init__(self, node_id: NodeId, sent: Instant) -> None:
        self.node_id = node_id
        self.sent = sent
        self.helpers: tuple[NodeId, ...] | None = None
        self.answers = 0
        self.postponed = False
        self.timer: Timer | None = None


@dataclass(frozen=True, slots=True)
class _Relay:
    target: NodeId
    asker: NodeId
    sequence: int
    timer: Timer


class MembershipCore:
    """One node's membership. `stored` is what it last persisted in the slot `incarnation`, or None.

    Raises `RemoteProtocolError` if `stored` is not what some run persisted. `receive` raises it too, for
    claims that are malformed: that costs the sender and changes nothing here.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        options: MembershipOptions,
        stored: bytes | None,
        entropy: random.Random,
        now: Now,
    ) -> None:
        self._node_id = node_id
        self._options = options
        self._entropy = entropy
        self._mark = accuser_mark(node_id)
        self._effects: list[Effect | MembershipEvent] = []
        self._timers: list[Timer] = []
        self._timer_count = 0
        self._has_left = False

        self._table = Table(MEMBERS_MAX)
        self._view = View(node_id, options.view_size)
        self._broadcasts = Broadcasts(BROADCASTS_MAX)
        self._health = Health(options.health_score_max)
        self._clocks = Clocks(options.clock_offset_max)
        self._clocks_apart = False
        self._own_clock_offset: Duration | None = None

        self._sequence = 0
        self._looked_at = now.instant
        self._probes: dict[int, _Probe] = {}
        self._relays: dict[int, _Relay] = {}
        self._late: dict[int, tuple[NodeId, Instant]] = {}
        self._round: list[NodeId] = []
        self._round_view: tuple[NodeId, ...] = ()
        self._suspects: dict[NodeId, None] = {}
        self._conflicts: dict[NodeId, None] = {}
        self._twin_signs = 0
        self._twin_first = now.instant
        self._twin_told = False
        self._rose = Instant(now.instant - options.gossip_interval)
        self._gossip_timer: Timer | None = None
        self._gossip_rounds = 0
        self._gossiped = Instant(now.instant - options.gossip_interval)

        self._seeds: tuple[NodeId, ...] = ()
        self._join_index = 0
        self._join_delay = options.join_retry
        self._joining = False
        self._lost: dict[NodeId, None] = {}
        self._seeds_turn = True
        self._asked: NodeId | None = None
        self._asked_at = Instant(now.instant - options.anti_entropy_soon)
        self._answer_changes = 0
        self._answer_news = 0
        self._exchange_news = 0
        self._comparison = 0
        self._parts_given = 0
        self._parts_since = now.instant
        self._full_told = False
        self._hinting = False

        first_free = 1 if stored is None else decode(stored, RESERVED_INCARNATIONS).first_free
        self._reserve(first_free)
        claim = Claim(first_free, "alive", entropy.randbytes(INSTANCE_SIZE), 0, NO_RECORD)
        self._self = Entry(node_id, claim)
        self._table.add(self._self, claim, NOBODY, now.instant)
        self._broadcasts.add(self._self.key)
        self._recount()

        self._at(self._soon(now, options.probe_interval), self._probe_next)
        self._at(self._soon(now, options.reprobe_interval), self._try_the_lost)
        self._at(after(now.instant, _SWEEP_INTERVAL), self._sweep)
        self._plan_comparison(now, options.anti_entropy_interval)

    # --- the five verbs -------------------------------------------------------------------------------------

    def receive(self, message: MembershipMessage, sender: NodeId, now: Now) -> None:
        """A message from the node that the transport proved to be `sender`."""
        if self._has_left:
            return
        data = message.updates if not isinstance(message, ViewRequest) else b""
        news = self._news_in(data)
        self._notice_pause(now)
        if sender == self._node_id:
            self._meet_twin(message.instance, message.incarnation, now)
            return
        entry = self._hear(sender, message, now)
        for update in news:
            self._apply(update, sender, now)
        if entry is not None:
            self._answer(message, entry, now)
        self._arm_gossip(now)

    def command(self, request: MembershipRequest, now: Now) -> None:
        """Something this node wants, or was told by its transport."""
        if self._has_left:
            return
        self._notice_pause(now)
        if isinstance(request, Seed):
            wanted = dict.fromkeys((*request.node_ids, *self._seeds))
            wanted.pop(self._node_id, None)
            self._seeds = tuple(wanted)[:SEEDS_MAX]
            if not self._joining and self._seeds:
                self._joining = True
                self._join_delay = self._options.join_retry
                self._join(now, now.instant, None)
        elif isinstance(request, ConnectionLost):
            self._look_at(request.node_id, now)
        elif isinstance(request, AnnounceRecord):
            claim = self._self.claim
            if (request.sequence, request.digest) > claim[3:]:
                sent = FRESH if claim.record_sequence else 0
                claim = claim._replace(record_sequence=request.sequence, record_digest=request.digest)
                self._claim_self(claim, sent)
        elif isinstance(request, NoteRecord):
            self._note_record(request, now)
        else:
            self._leave(as_sentence(request.reason))
            return
        self._arm_gossip(now)

    def tick(self, now: Now) -> None:
        """Do all that is due."""
        self._notice_pause(now)
        timers = self._timers
        while timers and timers[0][0] <= now.instant:
            due, _, action, argument = heapq.heappop(timers)
            if action is not None:
                action(now, due, argument)
        if not self._has_left:
            self._arm_gossip(now)

    def next_deadline(self) -> Instant | None:
        """When to call `tick` next; None once the node has left."""
        timers = self._timers
        while timers and timers[0][2] is None:
            heapq.heappop(timers)
        return timers[0][0] if timers else None

    def drain(self) -> list[Effect | MembershipEvent]:
        """Everything to be done and told since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

    # --- snapshots ------------------------------------------------------------------------------------------

    def members(self) -> tuple[Member, ...]:
        """Every other member this node remembers and that is more than hearsay, by id."""
        return tuple(
            self._snapshot(entry)
            for entry in self._table.in_order()
            if entry.is_shown and entry is not self._self
        )

    def member(self, node_id: NodeId) -> Member | None:
        """One other member, if it is known."""
        entry = self._table.get(node_id)
        return None if entry is None or not entry.is_shown or entry is self._self else self._snapshot(entry)

    def is_live(self, node_id: NodeId) -> bool:
        """Whether this is a live member, suspected or not; this node itself is one."""
        entry = self._table.get(node_id)
        return entry is not None and entry.is_live

    def view(self) -> tuple[NodeId, ...]:
        """The members this node watches and keeps connections to, sorted."""
        return self._view.members

    @property
    def incarnation(self) -> int:
        """This node's own incarnation."""
        return self._self.claim.incarnation

    @property
    def live_count(self) -> int:
        """Live members, this node included."""
        return self._table.live_count

    def table_digest(self) -> bytes:
        """Equal on two nodes that believe the same of all live members."""
        return b"".join(self._table.digests)

    def _snapshot(self, entry: Entry) -> Member:
        claim = entry.claim
        return Member(
            node_id=entry.node_id,
            state=claim.state,
            path=entry.path,
            condition=entry.condition,
            reason=entry.reason,
            rtt=entry.rtt,
            rtt_least=_least_of(entry),
            rtt_samples=entry.rtt_samples,
            clock_offset=self._clocks.offset_of(entry.node_id),
            last_seen=entry.last_seen,
            incarnation=claim.incarnation,
            record_sequence=claim.record_sequence,
            record_digest=claim.record_digest,
        )

    # --- timers ---------------------------------------------------------------------------------------------

    def _at(self, due: Instant, action: Callable[[Now, Instant, Any], None], argument: Any = None) -> Timer:
        self._timer_count += 1
        timer: Timer = [due, self._timer_count, action, argument]
        heapq.heappush(self._timers, timer)
        return timer

    def _soon(self, now: Now, interval: Duration) -> Instant:
        """A random moment within the interval, so that nodes started together do not act together."""
        return after(now.instant, Duration(self._entropy.randrange(1, interval + 1)))

    def _notice_pause(self, now: Now) -> None:
        """Doubt ourselves if the clock went on without us: stopped, suspended, or starved of CPU."""
        timers = self._timers
        if not timers or now.instant - timers[0][0] <= self._options.pause_min:
            return  # as nearly always, also if that timer is not wanted any more
        deadline = self.next_deadline()
        if deadline is None:
            return
        late = between(deadline, now.instant)
        if late <= self._options.pause_min:
            return
        for sequence, probe in self._probes.items():
            entry = self._table.get(probe.node_id)
            if entry is not None and entry.probe == sequence:
                entry.probe = 0
        self._probes.clear()
        self._relays.clear()
        self._late.clear()
        self._asked = None
        # Nothing happened in between, so all that is overdue is due now, in its old order.
        for timer in self._timers:
            timer[0] = max(timer[0], now.instant)
        heapq.heapify(self._timers)
        for node_id in self._suspects:
            entry = self._table[node_id]
            if entry.suspicion is not None:
                entry.suspicion.started = now.instant
                self._time_suspicion(entry)
        self._health.worsen(2)
        self._effects.append(Notice("node_paused", (("late_ms", late // 1_000_000),)))
        self._rise_above(self._self.claim.incarnation, now)
        self._plan_comparison(now, self._options.view_request_spacing)

    # --- claims ---------------------------------------------------------------------------------------------

    def _news_in(self, data: bytes) -> list[MemberUpdate]:
        """The claims that say something we do not already say in the same bytes."""
        news = []
        with_key = self._table.with_key
        for start in range(0, len(data), UPDATE_SIZE):
            chunk = data[start : start + UPDATE_SIZE]
            known = with_key(chunk[:KEY_SIZE])
            if known is None or known.packed != chunk:
                news.append(unpack_update(chunk))
        return news

    def _hear(self, sender: NodeId, message: MembershipMessage, now: Now) -> Entry | None:
        """A message came from the member itself: what its run says outweighs what others say."""
        incarnation, instance = message.incarnation, message.instance
        entry = self._table.get(sender)
        if entry is None:
            entry = self._enter(sender, Claim(incarnation, "alive", instance, 0, NO_RECORD), sender, now)
            if entry is None:
                return None
            self._compare_with(sender, now)
        elif not entry.is_shown:
            self._hear_from_hearsay(entry, incarnation, instance, now)
        entry.last_seen = now.instant
        if instance != entry.heard_instance:
            self._hear_instance(entry, instance, now)
        claim = entry.claim
        if incarnation > claim.incarnation:
            was_live = entry.is_live
            state = TRANSITIONS[claim.state, "newer_incarnation"]
            self._believe(
                entry,
                Claim(incarnation, state, instance, *claim[3:]),
                now,
                "it says itself that it is alive",
            )
            if not was_live:
                self._compare_with(sender, now)
        elif incarnation < claim.incarnation or claim.state != "alive" or instance != claim.instance:
            if incarnation == claim.incarnation and instance != claim.instance:
                self._mark_conflict(entry, now)
            self._correct(entry, message, now)
        return entry

    def _hear_from_hearsay(self, entry: Entry, incarnation: int, instance: bytes, now: Now) -> None:
        """Somebody of whom only others spoke speaks itself: nothing they said of its run counts any more."""
        said = Claim(incarnation, "alive", instance, *entry.claim[3:])
        self._table.put(entry, said, NOBODY, now.instant)
        self._show(entry, "it joined", now)
        self._compare_with(entry.node_id, now)

    def _correct(self, entry: Entry, message: MembershipMessage, now: Now) -> None:
        """Tell a member what is said of it, so that it can refute; an `Ack` to its `Ping` will do that."""
        if isinstance(message, Departure) or (isinstance(message, Ping) and entry.claim.state != "alive"):
            return
        if entry.corrected is None or between(entry.corrected, now.instant) >= self._options.gossip_interval:
            entry.corrected = now.instant
            self._send(entry.node_id, Gossip(*self._run(), entry.packed))

    def _apply(self, update: MemberUpdate, source: NodeId, now: Now) -> None:
        """Somebody's claim about a member: believe it if it is stronger than what we believe."""
        node_id = update.node_id
        claim = Claim(update.incarnation, update.state, update.instance, update[5], update[6])
        entry = self._table.get(node_id)
        if entry is self._self:
            self._hear_of_self(claim, source, now)
            return
        if entry is None:
            # Tombstones of members we never knew would be handed on for ever, each time as new.
            if claim.state in ("alive", "suspect"):
                self._enter(node_id, claim, source, now, update.accuser)
            return
        if not entry.is_shown:
            self._apply_hearsay(entry, claim, source, now, update.accuser)
            return
        known = entry.claim
        if abs(claim.incarnation - known.incarnation) > INCARNATION_STEP_MAX and source != node_id:
            # It said such numbers of itself, and neither of us believes the other's. But if others found it
            # dead, or alive where we think it dead, we have to look ourselves, if it did not speak just now.
            seen = entry.last_seen
            is_new = seen is not None and between(seen, now.instant) < self._options.probe_interval
            if entry.is_live:
                if claim.state not in LIVE and not is_new:
                    self._probe(entry, now)
            elif claim.state in LIVE and between(self._looked_at, now.instant) >= _LOOK_INTERVAL:
                self._looked_at = now.instant
                self._call(entry.node_id)
            return
        if claim.incarnation == known.incarnation and claim.instance != known.instance:
            self._mark_conflict(entry, now)
        merged = merge(known, claim)
        if merged is not known:
            accuser = update.accuser if claim.state == "suspect" else entry.accuser
            self._believe(entry, merged, now, _REASON_HEARD[merged.state], accuser, source)
        elif known.state == "left" and (claim.incarnation, claim.state) == (known.incarnation, "dead"):
            self._broadcasts.add(entry.key)  # they missed its goodbye: who left is replaced sooner
        if (
            entry.suspicion is not None
            and claim.state == "suspect"
            and claim.incarnation == entry.claim.incarnation
        ):
            self._confirm(entry, update.accuser, now)

    def _apply_hearsay(self, entry: Entry, claim: Claim, source: NodeId, now: Now, accuser: bytes) -> None:
        """Somebody speaks again of a member that has not shown itself."""
        if claim.incarnation > INCARNATION_HEARSAY_MAX:
            return
        known = entry.claim
        merged = merge(known, claim)
        if merged.state not in LIVE:
            self._table.remove(entry.node_id)
        elif merged is not known:
            self._table.put(entry, merged, accuser if merged.state == "suspect" else NOBODY, now.instant)
            entry.heard_from = source
            self._hint(entry)

    def _enter(
        self, node_id: NodeId, claim: Claim, source: NodeId, now: Now, accuser: bytes = NOBODY
    ) -> Entry | None:
        """A member that was unknown: itself, or hearsay. None if there is no room for it."""
        is_itself = source == node_id
        if not is_itself and claim.incarnation > INCARNATION_HEARSAY_MAX:
            return None
        entry = Entry(node_id, claim, heard_from=None if is_itself else source)
        try:
            forgotten = self._table.add(entry, claim, accuser, now.instant)
        except OverflowError:
            if not self._full_told:
                self._full_told = True
                self._effects.append(Notice("members_full", (("members_max", MEMBERS_MAX),)))
            return None
        if forgotten is not None:
            self._broadcasts.discard(Entry(forgotten, claim).key)
        self._answer_changes += 1
        self._answer_news += 1
        if is_itself:
            self._count_in(entry, "it joined", now)
        else:
            self._hint(entry)
            self._hint_later(now)
        return entry

    def _show(self, entry: Entry, reason: str, now: Now) -> None:
        """Hearsay has turned out to be somebody: it counts, is watched and is passed on from now on."""
        self._table.show(entry)
        self._count_in(entry, reason, now)

    def _count_in(self, entry: Entry, reason: str, now: Now) -> None:
        self._view.add(entry.node_id)
        self._recount()
        # Who downloads a whole table does not repeat it: those it comes from know it.
        was_downloaded = entry.heard_from is not None and entry.heard_from == self._asked
        self._broadcasts.add(entry.key, FRESH if was_downloaded else 0)
        if entry.claim.state == "suspect":
            self._suspect(entry, entry.accuser, now)
        self._tell(entry, reason)

    def _hint(self, entry: Entry) -> None:
        """Ask for what is not known here: a member's newer record, or whether hearsay is anybody."""
        claim = entry.claim
        if not entry.is_shown or claim.record_sequence > entry.record_noted:
            source = entry.heard_from or entry.node_id
            self._effects.append(
                RecordHint(entry.node_id, claim.record_sequence, claim.record_digest, source)
            )

    def _hint_later(self, now: Now) -> None:
        if not self._hinting:
            self._hinting = True
            self._at(after(now.instant, RECORD_HINT_INTERVAL), self._hint_again)

    def _hint_again(self, now: Now, due: Instant, _: Any) -> None:
        """Forget hearsay that nobody showed in time; ask for the records of the rest, a part at a time."""
        hearsay = self._table.hearsay
        for node_id in list(hearsay):
            if between(hearsay[node_id], now.instant) < HEARSAY_LIFETIME:
                break
            self._table.remove(node_id)
        self._hinting = bool(hearsay)
        if not self._hinting:
            return
        waiting = list(hearsay)
        if len(waiting) > RECORD_HINTS_MAX:
            waiting = self._entropy.sample(waiting, RECORD_HINTS_MAX)
        for node_id in waiting:
            self._hint(self._table[node_id])
        self._at(after(now.instant, RECORD_HINT_INTERVAL), self._hint_again)

    def _believe(
        self,
        entry: Entry,
        claim: Claim,
        now: Now,
        reason: str,
        accuser: bytes = NOBODY,
        source: NodeId | None = None,
    ) -> None:
        """Change what is believed of a known member, with all that follows from it."""
        before = entry.claim
        was_live = entry.is_live
        self._table.put(entry, claim, accuser if claim.state == "suspect" else NOBODY, now.instant)
        if entry.is_live != was_live:
            if was_live:
                self._view.remove(entry.node_id)
                self._clocks.forget(entry.node_id)
                entry.clock_wrong = False
                self._probes.pop(entry.probe, None)
                entry.probe = 0
            else:
                self._view.add(entry.node_id)
                entry.path, entry.misses = "unknown", 0
            self._recount()
        # Worth a message of its own is what changes who is there, or which run of it: that a live member
        # says so anew, or has a newer record, rides along. The latter spreads by itself.
        is_news = (claim.state, claim.instance) != (before.state, before.instance)
        self._answer_changes += 1
        self._answer_news += is_news
        is_known_widely = not is_news or (source is not None and source == self._asked)
        self._broadcasts.add(entry.key, FRESH if is_known_widely else 0)
        if claim.state != "suspect":
            if entry.suspicion is not None:
                _cancel(entry.suspicion.timer)
            entry.suspicion = None
            self._suspects.pop(entry.node_id, None)
        elif before.state != "suspect" or before.incarnation != claim.incarnation:
            self._suspect(entry, accuser, now)
        if claim.record_sequence and claim[3:] != before[3:]:
            self._effects.append(
                RecordHint(entry.node_id, claim.record_sequence, claim.record_digest, source or entry.node_id)
            )
        self._tell(entry, reason)

    def _tell(self, entry: Entry, reason: str) -> None:
        """Let the world know of another state or condition."""
        now_is = (entry.claim.state, entry.condition)
        if now_is == entry.told:
            return
        entry.told = now_is
        if now_is[0] == "alive":
            reason = _REASON_OF.get(now_is[1], reason)
        entry.reason = reason
        self._effects.append(MemberChanged(entry.node_id, *now_is, reason, entry.rtt))

    def _recount(self) -> None:
        """The number of live members changed: so do the times that follow from it."""
        members = self._table.live_count
        self._scale_permille = swarm_scale_permille(members)
        repeats = self._options.repeat_factor * swarm_scale_permille(members + 1)
        self._repeats_max = -(-repeats // 1000)

    def _note_record(self, request: NoteRecord, now: Now) -> None:
        entry = self._table.get(request.node_id)
        if entry is None or entry is self._self:
            return
        entry.record_noted = max(entry.record_noted, request.sequence)
        if (request.sequence, request.digest) > entry.claim[3:]:
            claim = entry.claim._replace(record_sequence=request.sequence, record_digest=request.digest)
            self._table.put(entry, claim, entry.accuser, now.instant)
        if not entry.is_shown:
            self._show(entry, "others know it", now)

    # --- ourselves ------------------------------------------------------------------------------------------

    def _run(self) -> tuple[int, bytes]:
        return self._self.claim[0], self._self.claim[2]

    def _reserve(self, first_unused: int) -> None:
        """Have a block of incarnations on disk before the first of it is used."""
        self._reserved = min(first_unused + INCARNATION_BLOCK, INCARNATION_MAX)
        self._effects.append(Persist("incarnation", encode(ReservedIncarnations(self._reserved))))

    def _claim_self(self, claim: Claim, sent: int = 0) -> None:
        self._table.put(self._self, claim, NOBODY, Instant(0))
        self._broadcasts.add(self._self.key, sent)

    def _rise_above(self, incarnation: int, now: Now) -> None:
        """Say anew that we are alive, higher than whatever was said."""
        claim = self._self.claim
        wanted = max(incarnation, claim.incarnation) + 1
        if wanted >= INCARNATION_MAX:
            self._effects.append(Notice("incarnations_exhausted", (("incarnation", incarnation),)))
            return
        self._rose = now.instant
        if wanted >= self._reserved:
            self._reserve(wanted)
        self._claim_self(claim._replace(incarnation=wanted))

    def _hear_of_self(self, claim: Claim, source: NodeId, now: Now) -> None:
        """Others' claims about us: what is not what we say, we outdo.

        Claims are unsigned, so none of them is a reason to believe in a twin: whoever lies about us would
        keep us from voting. The record that a twin has signed is one, so what is named as ours is looked for.
        """
        own = self._self.claim
        if claim.incarnation < own.incarnation:
            return
        if claim.record_sequence and claim[3:] > own[3:]:
            self._effects.append(
                RecordHint(self._node_id, claim.record_sequence, claim.record_digest, source)
            )
        if claim.instance != own.instance:
            self._rise_above_another(claim.incarnation, now)
            own = self._self.claim
            if claim.state == "alive" or claim.incarnation < own.incarnation:
                return
        accused = claim.state != "alive"
        if accused or claim.incarnation > own.incarnation or claim[3:] > own[3:]:
            if accused:
                self._health.worsen()
                self._effects.append(Notice("node_accused", (("state", claim.state),)))
            self._rise_above(claim.incarnation, now)

    def _rise_above_another(self, incarnation: int, now: Now) -> None:
        """Outdo a run that is not this one, at the pace of gossip and no faster: twins do not race."""
        is_due = between(self._rose, now.instant) >= self._options.gossip_interval
        if incarnation >= self._self.claim.incarnation and is_due:
            self._rise_above(incarnation, now)

    def _meet_twin(self, instance: bytes, incarnation: int, now: Now) -> None:
        """Who has proved to have our key speaks to us: a run before this one does so once, a twin goes on."""
        if instance == self._self.claim.instance:
            return  # our own message, come back
        options = self._options
        self._rise_above_another(incarnation, now)
        if between(self._twin_first, now.instant) > options.conflict_memory:
            self._twin_signs, self._twin_told = 0, False
        if self._twin_signs == 0:
            self._twin_first = now.instant
        self._twin_signs += 1
        if (
            self._twin_signs >= _TWIN_SIGNS
            and not self._twin_told
            and between(self._twin_first, now.instant) >= options.conflict_min
        ):
            self._twin_told = True
            reason = "another process says that it is this node: is its home a copy of this one?"
            self._effects.append(SelfConflicted(instance, reason))

    def _leave(self, reason: str) -> None:
        self._claim_self(self._self.claim._replace(state="left"))
        for node_id in self._view.members:
            self._send(node_id, Departure(reason, *self._run(), b""))
        self._timers = []
        self._has_left = True

    # --- two runs of one node -------------------------------------------------------------------------------

    def _hear_instance(self, entry: Entry, instance: bytes, now: Now) -> None:
        """The member speaks as another run than before: restarted, or two of them in turn."""
        if entry.heard_instance == b"":
            entry.heard_instance = instance
            return
        returned = instance == entry.previous_instance
        entry.previous_instance, entry.heard_instance = entry.heard_instance, instance
        recent = between(entry.alternation_started, now.instant) <= self._options.conflict_memory
        if not returned or not recent:
            entry.alternations = 0
            entry.alternation_started = now.instant
            return
        entry.alternations += 1
        if (
            entry.alternations >= 2
            and between(entry.alternation_started, now.instant) >= self._options.conflict_min
        ):
            entry.alternation_started = after(now.instant, Duration(-self._options.conflict_min))
            self._mark_conflict(entry, now)

    def _mark_conflict(self, entry: Entry, now: Now) -> None:
        entry.conflicted_until = after(now.instant, self._options.conflict_memory)
        self._conflicts[entry.node_id] = None
        self._tell(entry, _REASON_OF["conflicted"])

    # --- suspicion ------------------------------------------------------------------------------------------

    def _suspect(self, entry: Entry, accuser: bytes, now: Now) -> None:
        """Start the member's time to refute, and look ourselves if we watch it."""
        if entry.suspicion is not None:
            _cancel(entry.suspicion.timer)
        entry.suspicion = Suspicion(now.instant, accuser)
        self._suspects[entry.node_id] = None
        self._time_suspicion(entry)
        if accuser != self._mark and entry.node_id in self._view.members:
            self._probe(entry, now)

    def _confirm(self, entry: Entry, accuser: bytes, now: Now) -> None:
        """One more member says first-hand that it does not answer."""
        suspicion = entry.suspicion
        assert suspicion is not None
        if accuser in suspicion.accusers or len(suspicion.accusers) > self._options.suspicion_confirmations:
            return
        suspicion.accusers.add(accuser)
        self._table.put(entry, entry.claim, accuser, now.instant)
        # Each who watches it says what itself found; what others found is passed on with other messages.
        self._broadcasts.add(entry.key, 0 if accuser == self._mark else FRESH)
        self._time_suspicion(entry)

    def _time_suspicion(self, entry: Entry) -> None:
        suspicion, options = entry.suspicion, self._options
        assert suspicion is not None
        shortest = Duration(options.suspicion_min * self._scale_permille // 1000)
        length = suspicion_time(
            len(suspicion.accusers) - 1,
            confirmations_wanted(self._table.live_count, options.suspicion_confirmations),
            shortest,
            Duration(shortest * options.suspicion_max_factor),
        )
        suspicion.deadline = after(suspicion.started, length)
        _cancel(suspicion.timer)
        suspicion.timer = self._at(suspicion.deadline, self._end_suspicion, (entry, suspicion))

    def _end_suspicion(self, now: Now, due: Instant, argument: tuple[Entry, Suspicion]) -> None:
        entry, suspicion = argument
        if entry.suspicion is not suspicion or now.instant < suspicion.deadline:
            return
        if self._is_late(now, due):
            suspicion.deadline = after(now.instant, self._options.suspicion_min)
            suspicion.timer = self._at(suspicion.deadline, self._end_suspicion, argument)
            return
        state = TRANSITIONS[entry.claim.state, "suspicion_expired"]
        witnesses = len(suspicion.accusers)
        waited_ms = between(suspicion.started, now.instant) // 1_000_000
        reason = f"suspected by {witnesses} for {waited_ms} ms without a word from it"
        self._believe(entry, entry.claim._replace(state=state), now, reason)

    def _is_late(self, now: Now, due: Instant) -> bool:
        """Whether we come so late that answers may lie unread: then nobody is judged."""
        return between(due, now.instant) > self._options.probe_timeout_min // 2

    # --- probes ---------------------------------------------------------------------------------------------

    def _probe_next(self, now: Now, due: Instant, _: Any) -> None:
        """The regular probe: through the view in random order, each once before any twice."""
        self._at(max(after(due, self._options.probe_interval), now.instant), self._probe_next)
        view = self._view.members
        if view is not self._round_view:
            for node_id in view:
                if node_id not in self._round_view:
                    self._round.insert(self._entropy.randrange(len(self._round) + 1), node_id)
            self._round_view = view
        for _ in range(len(self._round) + len(view)):
            if not self._round:
                self._round = list(view)
                self._entropy.shuffle(self._round)
            node_id = self._round.pop()
            if node_id in view and self._probe(self._table[node_id], now):
                return

    def _probe(self, entry: Entry, now: Now) -> bool:
        """Ask a live member whether it is there, unless that is being done."""
        if entry.probe or not entry.is_live or len(self._probes) >= PROBES_MAX:
            return False
        self._sequence += 1
        entry.probe = self._sequence
        probe = self._probes[self._sequence] = _Probe(entry.node_id, now.instant)
        self._send(entry.node_id, Ping(self._sequence, *self._run(), self._updates_for(entry)))
        probe.timer = self._at(after(now.instant, self._timeout(entry)), self._miss_answer, self._sequence)
        return True

    def _timeout(self, entry: Entry) -> Duration:
        options = self._options
        if entry.rtt is None:
            expected = options.probe_timeout
        else:
            expected = Duration(
                min(
                    max(entry.rtt + 4 * entry.rtt_variation, options.probe_timeout_min),
                    options.probe_timeout_max,
                )
            )
        return self._health.stretch(expected)

    def _miss_answer(self, now: Now, due: Instant, sequence: int) -> None:
        """No direct answer in time."""
        probe = self._probes.get(sequence)
        if probe is None or probe.helpers is not None:
            return
        if self._is_late(now, due) and not probe.postponed:
            probe.postponed = True
            self._health.worsen()
            entry = self._table[probe.node_id]
            probe.timer = self._at(after(now.instant, self._timeout(entry)), self._miss_answer, sequence)
            return
        self._ask_helpers(sequence, probe, now)

    def _ask_helpers(self, sequence: int, probe: _Probe, now: Now) -> None:
        entry, options = self._table[probe.node_id], self._options
        # Neighbours on the ring watch each other, so those helpers have a connection to it already.
        near = [each for each in self._view.successors if each != probe.node_id]
        if probe.node_id not in self._view.successors or len(near) < options.indirect_probes:
            near = [each for each in self._view.members if each != probe.node_id]
        fit = [each for each in near if each not in self._suspects] or near
        helpers = self._entropy.sample(fit, min(self._helpers_wanted(entry), len(fit)))
        probe.helpers = tuple(sorted(helpers))
        for helper in probe.helpers:
            updates = self._updates_for(self._table[helper])
            self._send(helper, PingRequest(sequence, probe.node_id, *self._run(), updates))
        timeout = self._timeout(entry)
        wait = Duration(2 * timeout + options.relay_allowance) if helpers else timeout
        _cancel(probe.timer)
        probe.timer = self._at(after(now.instant, wait), self._fail, sequence)

    def _helpers_wanted(self, entry: Entry) -> int:
        """Who is suspected was asked after by three already, and if it was for us, that need not be again."""
        if entry.suspicion is None:
            return self._options.indirect_probes
        return 0 if self._mark in entry.suspicion.accusers else 1

    def _fail(self, now: Now, due: Instant, sequence: int) -> None:
        """Neither it nor a helper answered in time."""
        probe = self._probes.get(sequence)
        if probe is None:
            return
        if self._is_late(now, due) and not probe.postponed:
            probe.postponed = True
            self._health.worsen()
            wait = self._timeout(self._table[probe.node_id])
            probe.timer = self._at(after(now.instant, wait), self._fail, sequence)
            return
        if probe.helpers and not probe.answers:
            self._health.worsen()  # three silent helpers at once: it is more likely us
        self._accuse(sequence, probe, now)

    def _accuse(self, sequence: int, probe: _Probe, now: Now) -> None:
        entry = self._end_probe(sequence, probe)
        entry.path = "unknown"
        claim = entry.claim
        state = TRANSITIONS[claim.state, "probe_failed"]
        if state != claim.state:
            asked = (
                f"and not to {len(probe.helpers)} helpers" if probe.helpers else "and there are no helpers"
            )
            reason = f"no answer to a probe, {asked}"
            self._believe(entry, claim._replace(state=state), now, reason, self._mark)
        else:
            self._confirm(entry, self._mark, now)
        self._at(after(now.instant, self._options.gossip_interval), self._probe_again, entry)

    def _probe_again(self, now: Now, due: Instant, entry: Entry) -> None:
        """Who is suspected, or answered others only, is asked again soon."""
        if entry.suspicion is not None or 0 < entry.misses < _MISSES_OF_A_BROKEN_PATH:
            self._probe(entry, now)

    def _end_probe(self, sequence: int, probe: _Probe) -> Entry:
        del self._probes[sequence]
        _cancel(probe.timer)
        if len(self._late) >= _LATE_MAX:
            del self._late[next(iter(self._late))]
        self._late[sequence] = (probe.node_id, probe.sent)
        entry = self._table[probe.node_id]
        entry.probe = 0
        return entry

    def _look_at(self, node_id: NodeId, now: Now) -> None:
        """The transport has a hint that this member is gone."""
        for number, relay in list(self._relays.items()):
            if relay.target == node_id:
                self._end_relay(number, reached=False)
        entry = self._table.get(node_id)
        if entry is None or not entry.is_live or entry is self._self:
            return
        if not entry.probe:
            self._probe(entry, now)
            return
        probe = self._probes[entry.probe]
        if probe.helpers is None:
            self._ask_helpers(entry.probe, probe, now)

    # --- answers --------------------------------------------------------------------------------------------

    def _answer(self, message: MembershipMessage, entry: Entry, now: Now) -> None:
        if isinstance(message, Ping):
            updates = self._updates_for(entry)
            wall = min(max(now.wall, 0), (1 << 63) - 1)
            self._send(entry.node_id, Ack(message.sequence, wall, *self._run(), updates))
        elif isinstance(message, Ack):
            self._take_ack(message, entry, now)
        elif isinstance(message, PingRequest):
            self._relay(message, entry, now)
        elif isinstance(message, ProbeResult):
            self._take_result(message, entry, now)
        elif isinstance(message, ViewRequest):
            self._give_parts(message, entry.node_id, now)
        elif isinstance(message, ViewPart):
            self._take_part(message, entry.node_id, now)
        elif isinstance(message, Departure) and message.incarnation >= entry.claim.incarnation:
            state = TRANSITIONS[entry.claim.state, "departure"]
            if state != entry.claim.state:
                self._believe(entry, entry.claim._replace(state=state), now, message.reason)
            entry.reason = f"it left: {message.reason}" if message.reason else "it left"

    def _take_ack(self, ack: Ack, entry: Entry, now: Now) -> None:
        probe = self._probes.get(ack.sequence)
        if probe is not None and probe.node_id == entry.node_id:
            sent = probe.sent
            self._end_probe(ack.sequence, probe)
            self._health.improve()
        elif ack.sequence in self._relays:
            if self._relays[ack.sequence].target == entry.node_id:
                self._end_relay(ack.sequence, reached=True)
            return
        else:
            late = self._late.get(ack.sequence)
            if late is None or late[0] != entry.node_id:
                return
            sent = late[1]
        self._late.pop(ack.sequence, None)
        if not entry.is_live:
            return
        self._measure(entry, between(sent, now.instant), now.instant)
        entry.path, entry.misses = "direct", 0
        self._set_clock(entry, ack, now)
        self._tell(entry, "it answers")

    def _measure(self, entry: Entry, sample: Duration, now: Instant) -> None:
        """Smooth the round trip as TCP does: a sample counts for an eighth, its deviation for a quarter.

        Slow is a member whose least one is long: one of a few is quick on any path that is not.
        """
        if entry.rtt is None:
            entry.rtt, entry.rtt_variation = sample, Duration(sample // 2)
        else:
            deviation = abs(sample - entry.rtt)
            entry.rtt_variation = Duration(entry.rtt_variation + (deviation - entry.rtt_variation) // 4)
            entry.rtt = Duration(entry.rtt + (sample - entry.rtt) // 8)
        since = entry.rtt_least_since
        if entry.rtt_least is None or since is None or between(since, now) >= _LEAST_WINDOW:
            is_recent = since is not None and between(since, now) < 2 * _LEAST_WINDOW
            entry.rtt_least_before = entry.rtt_least if is_recent else None
            entry.rtt_least, entry.rtt_least_since = sample, now
            entry.rtt_samples = entry.rtt_samples if is_recent else 0
        entry.rtt_samples = min(entry.rtt_samples + 1, RTT_SAMPLES_MAX)
        entry.rtt_least = min(entry.rtt_least, sample)
        least = _least_of(entry)
        assert least is not None
        bound = self._options.slow_round_trip
        entry.slow = least > (bound * 4 // 5 if entry.slow else bound)

    def _set_clock(self, entry: Entry, ack: Ack, now: Now) -> None:
        assert entry.rtt is not None
        offset = Duration(ack.wall_time - (now.wall - entry.rtt // 2))
        self._clocks.observe(entry.node_id, offset)
        if abs(offset) > self._options.clock_offset_max or self._clocks_apart:
            self._judge_clocks()

    def _judge_clocks(self) -> None:
        wrong, own = self._clocks.wrong(), self._clocks.own_offset()
        for entry in [self._table[each] for each in self._clocks.measured()]:
            entry.clock_wrong = entry.node_id in wrong
            self._tell(entry, "its clock is right again")
        self._clocks_apart = bool(wrong) or own is not None
        if (own is None) != (self._own_clock_offset is None):
            self._effects.append(ClockSuspected(own))
        self._own_clock_offset = own

    def _relay(self, request: PingRequest, entry: Entry, now: Now) -> None:
        """Probe a member for somebody else."""
        target = self._table.get(request.target)
        is_known = target is not None and target.is_shown and target is not self._self
        if target is None or not is_known or len(self._relays) >= RELAYS_MAX:
            reached = target is self._self
            self._send(
                entry.node_id, ProbeResult(request.sequence, request.target, reached, *self._run(), b"")
            )
            return
        self._sequence += 1
        wait = Duration(self._timeout(target) + self._options.relay_allowance)
        timer = self._at(after(now.instant, wait), self._miss_relay, self._sequence)
        self._relays[self._sequence] = _Relay(request.target, entry.node_id, request.sequence, timer)
        self._send(request.target, Ping(self._sequence, *self._run(), self._updates_for(target)))

    def _miss_relay(self, now: Now, due: Instant, number: int) -> None:
        if number in self._relays:
            self._end_relay(number, reached=False)

    def _end_relay(self, number: int, *, reached: bool) -> None:
        relay = self._relays.pop(number)
        _cancel(relay.timer)
        asker = self._table.get(relay.asker)
        if asker is None:
            return
        updates = self._updates_for(asker)
        self._send(relay.asker, ProbeResult(relay.sequence, relay.target, reached, *self._run(), updates))

    def _take_result(self, result: ProbeResult, entry: Entry, now: Now) -> None:
        probe = self._probes.get(result.sequence)
        if probe is None or probe.node_id != result.target or not probe.helpers:
            return
        if entry.node_id not in probe.helpers:
            return
        if result.reached:
            target = self._end_probe(result.sequence, probe)
            self._health.improve()
            target.misses += 1
            if target.misses >= _MISSES_OF_A_BROKEN_PATH:
                target.path = "indirect"
                self._tell(target, "it answers")
            else:
                self._at(after(now.instant, self._options.gossip_interval), self._probe_again, target)
            return
        probe.answers += 1
        if probe.answers >= len(probe.helpers):
            self._accuse(result.sequence, probe, now)

    # --- gossip ---------------------------------------------------------------------------------------------

    def _send(self, to: NodeId, message: MembershipMessage) -> None:
        self._effects.append(Send(to, message))

    def _updates_for(self, entry: Entry) -> bytes:
        """What to say beside: to a member that is accused, its accusation first."""
        chunks = [] if entry.claim.state == "alive" else [entry.packed]
        if len(self._broadcasts):
            for key in self._broadcasts.take(UPDATES_MAX - len(chunks), self._repeats_max):
                known = self._table.with_key(key)
                if known is not None and known is not entry:
                    chunks.append(known.packed)
        return b"".join(chunks)

    def _arm_gossip(self, now: Now) -> None:
        """Fresh claims leave at once if there were none lately, or when the interval is over."""
        armed = self._gossip_timer
        if armed is not None and not self._broadcasts.is_fresh(self._self.key):
            return
        if not self._broadcasts.has_fresh():
            return
        due = after(self._gossiped, self._gossip_pause())
        if armed is not None:
            if armed[0] <= due:
                return
            _cancel(armed)
        if due <= now.instant:
            self._gossip(now, now.instant, None)
        else:
            self._gossip_timer = self._at(due, self._gossip)

    def _gossip_pause(self) -> Duration:
        """Longer, step by step, while there is news all the time; what we say of ourselves does not wait."""
        options = self._options
        if self._broadcasts.is_fresh(self._self.key):
            return options.gossip_interval
        steps = self._gossip_rounds // options.gossip_patience
        return Duration(min(options.gossip_interval * (1 + steps), options.gossip_interval_max))

    def _gossip(self, now: Now, due: Instant, _: Any) -> None:
        self._gossip_timer = None
        view = self._view.members
        if not view or not self._broadcasts.has_fresh():
            return
        is_quiet = between(self._gossiped, now.instant) > 2 * self._gossip_pause()
        self._gossip_rounds = 0 if is_quiet else self._gossip_rounds + 1
        self._gossiped = now.instant
        for node_id in sorted(self._entropy.sample(view, min(self._options.gossip_fanout, len(view)))):
            self._send(node_id, Gossip(*self._run(), self._updates_for(self._table[node_id])))

    # --- joining and comparing tables -----------------------------------------------------------------------

    def _join(self, now: Now, due: Instant, _: Any) -> None:
        """Ask seeds until somebody alive is known."""
        if self._table.live_count > 1:
            self._joining = False
            return
        for _ in range(min(_JOIN_AT_ONCE, len(self._seeds))):
            self._request_view(self._seeds[self._join_index % len(self._seeds)], now)
            self._join_index += 1
        self._at(after(now.instant, self._join_delay), self._join)
        self._join_delay = Duration(min(2 * self._join_delay, self._options.join_retry_max))

    def _request_view(self, node_id: NodeId, now: Now) -> None:
        self._asked, self._asked_at = node_id, now.instant
        self._answer_changes = self._answer_news = 0
        self._send(node_id, ViewRequest(b"".join(self._table.digests), *self._run()))

    def _plan_comparison(self, now: Now, interval: Duration) -> None:
        self._comparison += 1
        spread = Duration(interval * 3 // 4 + self._entropy.randrange(interval // 2 + 1))
        self._at(after(now.instant, spread), self._compare, self._comparison)

    def _compare(self, now: Now, due: Instant, number: int) -> None:
        """Compare tables with a random member of the view."""
        if number != self._comparison:
            return
        self._plan_comparison(now, self._options.anti_entropy_interval)
        if self._view.members:
            self._exchange_news = 0
            self._request_view(self._entropy.choice(self._view.members), now)

    def _compare_with(self, node_id: NodeId, now: Now) -> None:
        """Somebody new, or back from the dead, spoke to us: its table may be another one."""
        if between(self._asked_at, now.instant) >= self._options.anti_entropy_soon:
            self._exchange_news = 0
            self._request_view(node_id, now)

    def _give_parts(self, request: ViewRequest, to: NodeId, now: Now) -> None:
        size = BUCKET_DIGEST_SIZE
        digests = self._table.digests
        differing = [
            index
            for index in range(BUCKETS)
            if request.digests[index * size : (index + 1) * size] != digests[index]
        ]
        if between(self._parts_since, now.instant) > 1_000_000_000:
            self._parts_since, self._parts_given = now.instant, 0
        allowed = self._options.answer_parts_max if self._parts_given < _ANSWERED_PARTS_MAX else 1
        if differing:
            turn = self._entropy.randrange(len(differing))  # so that those in a queue get different parts
            differing = differing[turn:] + differing[:turn]
        parts: list[tuple[int, bytes, bool]] = []
        sent = 0
        for index in differing:
            bucket = self._parts_of(index)
            if parts and len(parts) + len(bucket) > allowed:
                break
            parts += bucket
            sent += 1
        self._parts_given += len(parts)
        remaining = len(differing) - sent
        for number, (index, updates, ends_bucket) in enumerate(parts or [(0, b"", False)], 1):
            ends_answer = number >= len(parts)
            self._send_part(to, index, updates, (True, ends_bucket, ends_answer), remaining)

    def _parts_of(self, index: int) -> list[tuple[int, bytes, bool]]:
        """A bucket in parts; of a bucket that somebody stuffed, a random selection."""
        entries = self._table.bucket(index)
        size_max = PART_UPDATES_MAX * self._options.answer_parts_max
        if len(entries) > size_max:
            entries = self._entropy.sample(entries, size_max)
        packed = [entry.packed for entry in entries]
        starts = range(0, max(1, len(packed)), PART_UPDATES_MAX)
        return [
            (index, b"".join(packed[start : start + PART_UPDATES_MAX]), start == starts[-1])
            for start in starts
        ]

    def _send_part(
        self, to: NodeId, index: int, updates: bytes, flags: tuple[bool, bool, bool], remaining: int
    ) -> None:
        digest = self._table.digests[index]
        self._send(to, ViewPart(index, digest, *flags, remaining, *self._run(), updates))

    def _take_part(self, part: ViewPart, sender: NodeId, now: Now) -> None:
        """Its claims have been applied; say what we know better, and ask on."""
        if not part.answers or (sender != self._asked and not self._joining):
            return
        if part.ends_bucket and part.digest != self._table.digests[part.bucket]:
            for index, updates, ends_bucket in self._parts_of(part.bucket):
                self._send_part(sender, index, updates, (False, ends_bucket, False), 0)
        if not part.ends_answer:
            return
        self._asked = None
        self._exchange_news += self._answer_news
        if part.remaining and self._answer_changes:
            self._at(after(now.instant, self._options.view_request_spacing), self._ask_on, sender)
        elif self._exchange_news >= (1 if part.remaining else _CHANGED_A_LOT):
            self._plan_comparison(now, self._options.anti_entropy_soon)

    def _ask_on(self, now: Now, due: Instant, node_id: NodeId) -> None:
        if self._asked is None:
            self._request_view(node_id, now)

    # --- the dead, the lost, the silent ---------------------------------------------------------------------

    def _try_the_lost(self, now: Now, due: Instant, _: Any) -> None:
        """Try one that is not there, seeds and the dead in turn: a partition may have healed."""
        self._at(after(now.instant, self._options.reprobe_interval), self._try_the_lost)
        dead = [each for each in self._table.tombstones if self._table[each].claim.state == "dead"]
        silent = [each for each in self._seeds if not self.is_live(each)]
        gone = [*dead, *self._lost]
        self._seeds_turn = not self._seeds_turn
        candidates = silent if silent and (self._seeds_turn or not gone) else gone
        if not candidates:
            return
        self._call(self._entropy.choice(candidates))

    def _call(self, node_id: NodeId) -> None:
        """Ask somebody who is not there whether it is: an answer is news, and silence is none."""
        self._sequence += 1
        entry = self._table.get(node_id)
        updates = self._self.packed if entry is None else self._updates_for(entry)
        self._send(node_id, Ping(self._sequence, *self._run(), updates))

    def _sweep(self, now: Now, due: Instant, _: Any) -> None:
        """Forget old tombstones and old conflicts."""
        self._at(after(now.instant, _SWEEP_INTERVAL), self._sweep)
        tombstones = self._table.tombstones
        while tombstones:
            node_id = next(iter(tombstones))
            if between(tombstones[node_id], now.instant) < self._options.tombstone_lifetime:
                break
            entry = self._table[node_id]
            if entry.claim.state == "dead" and entry.last_seen is not None:
                self._lost.pop(node_id, None)
                if len(self._lost) >= SEEDS_MAX:
                    del self._lost[next(iter(self._lost))]
                self._lost[node_id] = None
            self._broadcasts.discard(entry.key)
            self._table.remove(node_id)
        for node_id in sorted(self._lost):
            if self.is_live(node_id):
                del self._lost[node_id]
        for node_id in sorted(self._conflicts):
            conflicted = self._table.get(node_id)
            if conflicted is None or conflicted.conflicted_until is None:
                del self._conflicts[node_id]
            elif conflicted.conflicted_until <= now.instant:
                del self._conflicts[node_id]
                conflicted.conflicted_until = None
                self._tell(conflicted, "no sign of a second process any more")
        self._hint_at_newer_records()

    def _hint_at_newer_records(self) -> None:
        """Members whose record was lost on its way, refused, or displaced: let it be asked for once more."""
        behind = [each for each in self._table.behind() if each is not self._self]
        if len(behind) > RECORD_HINTS_MAX:
            behind = self._entropy.sample(behind, RECORD_HINTS_MAX)
        for entry in behind:
            self._hint(entry)


def _cancel(timer: Timer | None) -> None:
    """Nothing is done when its time comes, and nobody wakes up for it."""
    if timer is not None:
        timer[2] = timer[3] = None


_REASON_HEARD: Final[dict[MemberState, str]] = {
    "alive": "others heard that it is alive",
    "suspect": "others say that it does not answer",
    "dead": "others say that it is dead",
    "left": "others say that it left",
}
_REASON_OF: Final[dict[Condition, str]] = {
    "slow": "its round trips are long",
    "indirect": "it answers others and not this node: the path between the two is broken, perhaps one way",
    "clock_wrong": "its wall clock is more than a minute from the others'",
    "conflicted": "two processes use this identity in turn",
}


def _least_of(entry: Entry) -> Duration | None:
    """The least round trip to a member in this window and the one before; None until one is measured."""
    least, before = entry.rtt_least, entry.rtt_least_before
    return least if before is None or least is None else min(least, before)
