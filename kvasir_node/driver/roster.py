"""The members that a backbone knows, and what each is good for now.

A plain table with rules about state, apart from all I/O, so that what a heartbeat, a lost connection or a
faulty row means can be read and tested in one place. SWIM takes its place behind the same questions later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, between, seconds
from kvasir_proto.limits import WORKERS_MAX

MemberState: TypeAlias = Literal["joined", "loading", "serving", "unreachable", "lost", "quarantined", "left"]

HEARTBEAT_INTERVAL_MS: Final = 1000
LOST_AFTER: Final[Duration] = seconds(5)
"""Silence after which a member counts as lost."""

UNFIT_FOR: Final[Duration] = seconds(600)
"""How long plans do without a member that could not take its part; then it is tried again."""

FORGOTTEN_AFTER: Final[Duration] = seconds(15)
"""Silence after which its experts are given to others, if they are covered by nobody else."""

REJOIN_GRACE: Final[Duration] = seconds(30)
"""How long after a start the members of the adopted plan have to come back; workers try every 15 s."""

FAULTY_CODES: Final = frozenset({"non_finite", "shape_invalid", "malformed", "unexpected_reply"})
"""Ways to lose a holder that say it computes or speaks wrongly, not that it is slow or gone."""


_LONG_AGO: Final = Instant(0)


@dataclass(slots=True)
class Member:
    """One member as its backbone sees it; ``reason`` says why the state is not the best one."""

    node_id: NodeId
    record: CapabilityRecord
    state: MemberState
    reason: str
    last_seen: Instant
    shard_bytes: int = 0
    """What its shard takes of its memory, as it said when it accepted the plan."""
    failure: str = ""
    """Why it could not be brought to serving the last time; empty once it serves."""
    unfit_until: Instant = _LONG_AGO
    """Until then no plan counts on it: it has refused or failed every offer."""

    @property
    def is_active(self) -> bool:
        """Whether it may be given experts."""
        return self.state not in ("lost", "quarantined", "left")


class Roster:
    """Members by node id. Every method takes the time; none reads a clock."""

    def __init__(self, started: Instant) -> None:
        """``started``: from when on members can have joined."""
        self._started = started
        self._members: dict[NodeId, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter([self._members[node_id] for node_id in sorted(self._members)])

    def get(self, node_id: NodeId) -> Member | None:
        """The member with this id, if it ever joined."""
        return self._members.get(node_id)

    def join(self, record: CapabilityRecord, now: Instant) -> Member:
        """Take in a member, or its newer record.

        Raises `RemoteProtocolError`: ``stale_record`` for one that is not newer than what we have, ``full``,
        or ``quarantined`` for a member that has computed wrong rows here.
        """
        known = self._members.get(record.node_id)
        if known is None:
            self._make_room()
            known = Member(record.node_id, record, "joined", "", now)
            self._members[record.node_id] = known
            return known
        if record.sequence <= known.record.sequence:
            raise RemoteProtocolError("a newer record of this node is known", "stale_record")
        if known.state == "quarantined":
            raise RemoteProtocolError(f"quarantined: {known.reason}", "quarantined")
        known.record, known.last_seen = record, now
        known.state, known.reason = "joined", ""
        return known

    def _make_room(self) -> None:
        """Forget who has been gone longest when the table is full; a quarantine is never forgotten."""
        if len(self._members) < WORKERS_MAX:
            return
        gone = [each for each in self if each.state in ("lost", "left")]
        if not gone:
            raise RemoteProtocolError(f"the swarm has {WORKERS_MAX} members", "full")
        del self._members[min(gone, key=lambda each: each.last_seen).node_id]

    def heartbeat(self, node_id: NodeId, now: Instant) -> Member:
        """A member is alive. Raises `RemoteProtocolError` (``unknown_member``) for one that must join."""
        member = self._members.get(node_id)
        if member is None or not member.is_active:
            raise RemoteProtocolError("join first", "unknown_member")
        member.last_seen = now
        return member

    def leave(self, node_id: NodeId, reason: str) -> None:
        """A member goes on purpose."""
        member = self._members.get(node_id)
        if member is not None and member.state != "quarantined":
            member.state, member.reason = "left", reason

    def set_state(self, node_id: NodeId, state: MemberState, reason: str = "") -> None:
        """Note how far a member's shard and connection are; a quarantine is never lifted by this."""
        member = self._members.get(node_id)
        if member is not None and member.is_active:
            member.state, member.reason = state, reason

    def holder_lost(self, node_id: NodeId, code: str, reason: str) -> None:
        """A data connection broke: quarantine a member that computed wrongly, else try again later."""
        state: MemberState = "quarantined" if code in FAULTY_CODES else "unreachable"
        self.set_state(node_id, state, f"{code}: {reason}")

    def expire(self, now: Instant) -> list[NodeId]:
        """Mark members that have been silent too long as lost; their ids."""
        silent = [
            member for member in self if member.is_active and between(member.last_seen, now) > LOST_AFTER
        ]
        for member in silent:
            member.state, member.reason = "lost", "no heartbeat"
        return [member.node_id for member in silent]

    def active(self, now: Instant) -> list[NodeId]:
        """Members that may be given experts, in the order of their ids."""
        return [member.node_id for member in self if member.is_active and member.unfit_until <= now]

    def note_unfit(self, node_id: NodeId, now: Instant) -> None:
        """Leave a member that could not take what it was offered out of plans for a while."""
        member = self._members.get(node_id)
        if member is not None:
            member.unfit_until = after(now, UNFIT_FOR)

    def serving(self) -> list[NodeId]:
        """Members whose shard is loaded and connected."""
        return [member.node_id for member in self if member.state == "serving"]

    def is_forgotten(self, node_id: NodeId, now: Instant) -> bool:
        """Whether a member has been gone so long, or for good, that others should take its experts."""
        member = self._members.get(node_id)
        if member is None:
            return now > after(self._started, REJOIN_GRACE)
        if member.state in ("quarantined", "left") or member.unfit_until > now:
            return True
        return member.state == "lost" and now > after(member.last_seen, FORGOTTEN_AFTER)
