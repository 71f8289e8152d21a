"""The holders of a backbone's plan, and how far its data connection to each of them is.

A plain table with rules about state, apart from all I/O, so that what a lost connection, a faulty row or a
holder's word means can be read and tested in one place. Who is alive is membership's affair, who shall hold
what is placement's. A holder that computed wrongly is not connected again until its quarantine is over, and
the next one is twice as long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from kvasir_node.backoff import retry_delay_s
from kvasir_node.supervisor import STEADY_AFTER
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, between, seconds
from kvasir_proto.manifest import ShardSet
from kvasir_proto.placement.plan import Coverage, Plan

HolderState: TypeAlias = Literal["loading", "serving", "refused", "unreachable", "quarantined"]

FAULTY_CODES: Final = frozenset(
    {"non_finite", "shape_invalid", "malformed", "unexpected_reply", "unaccountable", "quarantined"}
)
"""Ways to lose a holder that say it computes or speaks wrongly, not that it is slow or gone."""

FAULTY_MAX: Final = 1024
"""Nodes remembered as faulty; the one found first goes first."""

QUARANTINE_FIRST: Final[Duration] = seconds(600)
QUARANTINE_MAX: Final[Duration] = seconds(24 * 3600)
"""A fault may have been a bad cable: 10 minutes at first, twice as long with each other one, up to a day."""

_LONG_AGO: Final = Instant(0)

RETRY_DELAY_FIRST_S: Final = 1.0
RETRY_DELAY_MAX_S: Final = 15.0


class Share(NamedTuple):
    """What a holder is asked for: all it holds, and the part for which it is asked before anybody else."""

    shard: ShardSet
    primary: ShardSet

    @staticmethod
    def of(plan: Plan, node_id: NodeId) -> Share:
        """What the plan gives this node."""
        return Share(plan.shard_of(node_id), plan.primary_shard_of(node_id))


NO_SHARE: Final = Share(ShardSet(), ShardSet())


class Fault(NamedTuple):
    """What a holder did wrong last, how often it has by now, and until when it is not connected again."""

    reason: str
    n_faults: int
    until: Instant


@dataclass(slots=True)
class HolderConnection:
    """One holder as its backbone sees it; ``reason`` says why the state is not the best one."""

    node_id: NodeId
    wanted: Share
    """What the plan in force gives it; `NO_SHARE` where it names the node no more."""
    state: HolderState = "loading"
    reason: str = "it has not answered the plan"
    is_ready: bool = False
    """Whether it has said that it serves what is wanted."""
    memory_bytes: int = 0
    """What its shard takes of its memory, as it said itself."""
    connected: Share | None = None
    """What the engine asks it for now."""
    is_renewed: bool = False
    """It has said once more that it serves: its engine may be another one than the one that is connected."""
    has_shown_shard: bool = False
    """Whether its record has said since it was connected that it holds something."""
    attempt: int = 0
    """Grows with every attempt to connect it and whenever something makes the one under way pointless."""
    is_connecting: bool = False
    failures: int = 0
    """Losses and failed attempts in a row."""
    began: Instant = _LONG_AGO
    """When it was last tried."""
    retry_at: Instant = _LONG_AGO

    @property
    def is_due(self) -> bool:
        """Whether it is to be connected, or to be connected anew, as soon as its delay is over."""
        if not self.is_ready or self.is_connecting or not len(self.wanted.shard):
            return False
        return self.is_renewed or self.connected != self.wanted


class HolderConnections:
    """Holders by node id. Every method takes the time where it needs it; none reads a clock."""

    def __init__(self) -> None:
        self._rows: dict[NodeId, HolderConnection] = {}
        self._faults: dict[NodeId, Fault] = {}

    def __iter__(self) -> Iterator[HolderConnection]:
        return iter([self._rows[node_id] for node_id in sorted(self._rows)])

    def get(self, node_id: NodeId) -> HolderConnection | None:
        """This holder, if the plan in force or the one before it names it."""
        return self._rows.get(node_id)

    # -- what is wanted ----------------------------------------------------------------------------

    def follow(self, plan: Plan, backbone: NodeId, now: Instant) -> None:
        """A new plan is in force. Each holder has to say that it serves it before it is connected for it.

        What is connected goes on being asked for what it was connected for. A plan that names a node whose
        quarantine is over gives it another chance.
        """
        for node_id in plan.nodes:
            if node_id == backbone:
                continue
            row = self._rows.get(node_id)
            if row is None:
                row = self._rows[node_id] = HolderConnection(node_id, NO_SHARE)
            if self._is_in_quarantine(node_id, now):
                row.state, row.reason = "quarantined", self._faults[node_id].reason
            elif row.state == "quarantined":
                row.state, row.reason = "loading", "it has not answered the plan"
            row.wanted = Share.of(plan, node_id)
            row.is_ready = False
        for row in self:
            if row.node_id not in plan.nodes:
                row.wanted, row.is_ready, row.is_renewed = NO_SHARE, False, False
                if row.connected is None:
                    del self._rows[row.node_id]

    def superfluous(self, plan: Plan, backbone: NodeId, own: ShardSet) -> list[NodeId]:
        """Connected holders that the plan names no more, once all it names are connected."""
        leftovers = [row.node_id for row in self if row.connected and row.node_id not in plan.nodes]
        if leftovers and self.coverage(plan, backbone, own).n_pairs_held == plan.coverage().n_pairs_held:
            return leftovers
        return []

    def forget(self, node_id: NodeId) -> None:
        """Drop a holder that the plan names no more."""
        self._rows.pop(node_id, None)

    def clear(self) -> None:
        """No plan is in force. Who computed wrongly stays known."""
        self._rows.clear()

    # -- what happens ------------------------------------------------------------------------------

    def note_ready(self, node_id: NodeId, memory_bytes: int) -> None:
        """It says that it serves what the plan in force gives it."""
        row = self._rows.get(node_id)
        if row is None or row.state == "quarantined":
            return
        row.is_renewed = row.is_ready and row.connected is not None
        row.is_ready, row.memory_bytes = True, memory_bytes
        if row.connected is None and not row.failures:
            row.state, row.reason = "loading", "it is being connected"

    def note_refused(self, node_id: NodeId, code: str, reason: str) -> None:
        """It says that it cannot serve what the plan in force gives it."""
        row = self._rows.get(node_id)
        if row is not None and row.state != "quarantined":
            row.is_ready = False
            if row.connected is None:
                row.state, row.reason = "refused", f"{code}: {reason}"

    def note_gone(self, node_id: NodeId, reason: str) -> bool:
        """It is dead, has left, or has lost its shard: it is asked for nothing more.

        Its next word that it serves is believed at once. Whether it is in the table, and not quarantined.
        """
        row = self._rows.get(node_id)
        if row is None or row.state == "quarantined":
            return False
        self._disconnect(row)
        row.is_ready, row.failures, row.retry_at = False, 0, _LONG_AGO
        row.state, row.reason = "unreachable", reason
        return True

    def note_record(self, node_id: NodeId, holds: bool) -> bool:
        """Its record says whether it holds a shard. Whether that means that it has lost what we ask it for.

        A record made before it had loaded may come after its word that it has: only one that takes an earlier
        one back counts.
        """
        row = self._rows.get(node_id)
        if row is None or row.connected is None:
            return False
        was_shown, row.has_shown_shard = row.has_shown_shard, holds
        return was_shown and not holds

    def begin(self, row: HolderConnection, now: Instant) -> int:
        """An attempt to connect it begins; its number."""
        row.attempt += 1
        row.is_connecting, row.is_renewed, row.began = True, False, now
        return row.attempt

    def end(self, row: HolderConnection, attempt: int) -> None:
        """The attempt is over, or was broken off."""
        if self.is_current(row, attempt):
            row.is_connecting = False

    def is_current(self, row: HolderConnection, attempt: int) -> bool:
        """Whether nothing has made this attempt pointless."""
        return self._rows.get(row.node_id) is row and row.attempt == attempt

    def note_connected(self, row: HolderConnection, share: Share, *, has_shown_shard: bool) -> None:
        """The engine asks it for this share from now on; its record may have said that it holds it."""
        row.connected, row.has_shown_shard = share, has_shown_shard
        row.state, row.reason = "serving", ""

    def note_lost(
        self, node_id: NodeId, code: str, reason: str, now: Instant, *, is_engines_word: bool
    ) -> bool:
        """Its data connection broke or could not be made; whether that is news of a holder in the table, or
        of one that computes or speaks wrongly, in it or not any more.

        ``is_engines_word``: the engine has seen it on the data connection, where some codes tell of a holder
        that does so. That one is quarantined (see `fault_of`), others are tried again after a delay that
        grows with failures in a row.
        """
        row = self._rows.get(node_id)
        is_faulty = is_engines_word and code in FAULTY_CODES
        if row is None and is_faulty and not self._is_in_quarantine(node_id, now):
            # What is wrong with its rows may be found, and not be stood for, after it has gone.
            self._note_fault(node_id, f"{code}: {reason}", now)
            return True
        if row is None or row.state == "quarantined":
            return False
        self._disconnect(row)
        row.is_ready = False
        row.reason = f"{code}: {reason}" if is_engines_word else reason
        if is_faulty:
            row.state = "quarantined"
            self._note_fault(node_id, row.reason, now)
            return True
        row.state = "unreachable"
        row.failures = 1 if between(row.began, now) > STEADY_AFTER else row.failures + 1
        delay_s = retry_delay_s(row.failures, RETRY_DELAY_FIRST_S, RETRY_DELAY_MAX_S)
        row.retry_at = after(now, Duration(round(delay_s * 1e9)))
        return True

    def disconnect_all(self, reason: str) -> None:
        """The engine is gone, and each connection with it; who was ready still is."""
        for row in self:
            self._disconnect(row)
            if row.state == "serving":
                row.state, row.reason = "loading", reason

    def _disconnect(self, row: HolderConnection) -> None:
        row.attempt += 1
        row.connected, row.is_connecting, row.is_renewed = None, False, False

    def _is_in_quarantine(self, node_id: NodeId, now: Instant) -> bool:
        fault = self._faults.get(node_id)
        return fault is not None and fault.until > now

    def _note_fault(self, node_id: NodeId, reason: str, now: Instant) -> None:
        before = self._faults.pop(node_id, None)
        count = 1 if before is None else before.n_faults + 1
        lasts = min(QUARANTINE_MAX, QUARANTINE_FIRST << min(count - 1, 16))
        self._faults[node_id] = Fault(reason, count, after(now, Duration(lasts)))
        while len(self._faults) > FAULTY_MAX:
            del self._faults[next(iter(self._faults))]

    # -- what follows ------------------------------------------------------------------------------

    def fault_of(self, node_id: NodeId) -> Fault | None:
        """The fault for which this holder is in quarantine now, or was last where it is in the table no more;
        None where there is none.
        """
        row = self._rows.get(node_id)
        return self._faults.get(node_id) if row is None or row.state == "quarantined" else None

    def due(self, now: Instant) -> list[HolderConnection]:
        """Holders that are to be connected now."""
        return [row for row in self if row.is_due and row.retry_at <= now]

    def next_due(self) -> Instant | None:
        """When the next one is, unless something happens before."""
        return min((row.retry_at for row in self if row.is_due), default=None)

    def connected(self) -> list[NodeId]:
        """Holders that the engine asks."""
        return [row.node_id for row in self if row.connected is not None]

    def held(self, own: ShardSet) -> ShardSet:
        """Every (layer, expert) that some connected holder, or ``own``, has."""
        ranges = list(own.ranges)
        for row in self:
            if row.connected is not None:
                ranges += row.connected.shard.ranges
        return ShardSet.from_ranges(ranges)

    def coverage(self, plan: Plan, backbone: NodeId, own: ShardSet) -> Coverage:
        """How well those cover the plan that are connected for all that it gives them."""
        serving = {row.node_id for row in self if row.connected and row.connected.shard == row.wanted.shard}
        if len(own) and own == plan.shard_of(backbone):
            serving.add(backbone)
        return plan.coverage(serving)
