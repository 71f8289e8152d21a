"""All known members, and a digest of them that two nodes can compare bucket by bucket.

An entry holds the claim that won, and beside it what this node alone has seen of the member. The digest of a
bucket is the sum of a hash of each live member's claim (suspicion left out: it comes and goes), kept up to
date with every change, so that comparing costs nothing. Tombstones are kept in the order of their deaths and
are in no digest: two nodes may forget one at different times. A member that only others spoke of, and whose
record nobody has shown, is *hearsay*: it is in the digests, so that a table that was just downloaded compares
equal, and counts for nothing else; in a full table it gives way first. What news means is decided elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final, Literal, TypeAlias

from kvasir_proto.ids import NodeId, public_key_of
from kvasir_proto.instants import Duration, Instant
from kvasir_proto.membership.states import LIVE, Claim
from kvasir_proto.messages.membership import (
    ACCUSER_SIZE,
    BUCKET_DIGEST_SIZE,
    BUCKETS,
    MemberState,
    MemberUpdate,
    pack_update,
)

Path: TypeAlias = Literal["unknown", "direct", "indirect"]
"""Whether the member answers this node itself, only others, or was never probed by this node."""
Condition: TypeAlias = Literal["well", "slow", "indirect", "clock_wrong", "conflicted"]
"""What is odd about a live member, the oddest thing first to be named last here."""

NOBODY: Final = bytes(ACCUSER_SIZE)
RTT_SAMPLES_MAX: Final = 16
"""As far as a member's round trips are counted."""
_SUM_MASK: Final = (1 << (8 * BUCKET_DIGEST_SIZE)) - 1


@dataclass(frozen=True, slots=True)
class Member:
    """What a node knows of a member, for status: `rtt` and `clock_offset` are None until measured.

    `rtt` is smoothed, `rtt_least` the least of the last one to two minutes: what the path takes, without what
    busy machines add to it, of `rtt_samples` round trips or more (counted up to `RTT_SAMPLES_MAX`).

    `last_seen` is when a message came from itself; None for members this node only hears of.
    """

    node_id: NodeId
    state: MemberState
    path: Path
    condition: Condition
    reason: str
    rtt: Duration | None
    rtt_least: Duration | None
    rtt_samples: int
    clock_offset: Duration | None
    last_seen: Instant | None
    incarnation: int
    record_sequence: int
    record_digest: bytes


Timer: TypeAlias = list[Any]
"""[when, order, what to do or None once it is not wanted any more, its argument]."""


class Suspicion:
    """A member's time to refute is running."""

    __slots__ = ("accusers", "deadline", "started", "timer")

    def __init__(self, started: Instant, accuser: bytes) -> None:
        self.started = started
        self.accusers = {accuser}
        self.deadline = started
        self.timer: Timer | None = None


class Entry:
    """One member: the claim that won, and what this node has seen itself.

    `is_shown` once it has spoken to this node, or its record counts here; else it is hearsay of `heard_from`.
    """

    __slots__ = (
        "accuser",
        "alternation_started",
        "alternations",
        "claim",
        "clock_wrong",
        "conflicted_until",
        "corrected",
        "heard_from",
        "heard_instance",
        "is_live",
        "is_shown",
        "key",
        "last_seen",
        "misses",
        "node_id",
        "packed",
        "path",
        "previous_instance",
        "probe",
        "reason",
        "record_noted",
        "rtt",
        "rtt_least",
        "rtt_least_before",
        "rtt_least_since",
        "rtt_samples",
        "rtt_variation",
        "share",
        "slow",
        "suspicion",
        "told",
    )

    def __init__(self, node_id: NodeId, claim: Claim, *, heard_from: NodeId | None = None) -> None:
        """With `heard_from` it is hearsay of that node."""
        self.node_id = node_id
        self.key = public_key_of(node_id)
        self.claim = claim
        self.heard_from = heard_from
        self.is_shown = heard_from is None
        self.is_live = self.is_shown and claim.state in LIVE
        """Whether it counts as a member, rather than as a tombstone or hearsay."""
        self.record_noted = 0
        self.accuser = NOBODY
        self.packed = b""
        self.share = 0
        self.path: Path = "unknown"
        self.rtt: Duration | None = None
        self.rtt_variation = Duration(0)
        self.rtt_least: Duration | None = None
        self.rtt_least_before: Duration | None = None
        self.rtt_least_since: Instant | None = None
        self.rtt_samples = 0
        self.slow = False
        self.clock_wrong = False
        self.last_seen: Instant | None = None
        self.suspicion: Suspicion | None = None
        self.probe = 0
        self.misses = 0
        self.heard_instance = b""
        self.previous_instance = b""
        self.alternations = 0
        self.alternation_started = Instant(0)
        self.conflicted_until: Instant | None = None
        self.corrected: Instant | None = None
        self.reason = ""
        self.told: tuple[MemberState, Condition] | None = None

    @property
    def condition(self) -> Condition:
        """The oddest thing about it."""
        if self.conflicted_until is not None:
            return "conflicted"
        if self.clock_wrong:
            return "clock_wrong"
        if self.path == "indirect":
            return "indirect"
        return "slow" if self.slow else "well"


_by_id: Final = attrgetter("node_id")


@lru_cache(maxsize=16384)
def _written(node_id: NodeId, claim: Claim, accuser: bytes) -> tuple[Claim, bytes, int]:
    """A claim, as bytes, and its share of its bucket's digest; kept, since most nodes say the same."""
    packed = pack_update(
        MemberUpdate(
            node_id,
            claim.state,
            claim.incarnation,
            claim.instance,
            accuser,
            claim.record_sequence,
            claim.record_digest,
        )
    )
    if claim.state not in LIVE:
        return claim, packed, 0
    said = b"%b%d.%b%d.%b" % (
        public_key_of(node_id),
        claim.incarnation,
        claim.instance,
        claim.record_sequence,
        claim.record_digest,
    )
    hashed = hashlib.blake2b(said, digest_size=BUCKET_DIGEST_SIZE).digest()
    return claim, packed, int.from_bytes(hashed, "big")


class Table:
    """Every member by id and by key, with bucket digests."""

    def __init__(self, members_max: int) -> None:
        self._members_max = members_max
        self._entries: dict[NodeId, Entry] = {}
        self.get = self._entries.get
        """The entry of the member with this id, if it is known."""
        self._buckets: list[dict[bytes, Entry]] = [{} for _ in range(BUCKETS)]
        self._sums = [0] * BUCKETS
        self.digests = [bytes(BUCKET_DIGEST_SIZE)] * BUCKETS
        self.live_count = 0
        self.tombstones: dict[NodeId, Instant] = {}
        self.hearsay: dict[NodeId, Instant] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, node_id: NodeId) -> Entry:
        return self._entries[node_id]

    def with_key(self, key: bytes) -> Entry | None:
        """The entry of the member with this public key, if it is known."""
        return self._buckets[key[0] % BUCKETS].get(key)

    def in_order(self) -> list[Entry]:
        """All entries, by node id."""
        return [self._entries[node_id] for node_id in sorted(self._entries)]

    def behind(self) -> list[Entry]:
        """Live members of which a newer record was named than was seen, by node id."""
        found = [
            each
            for each in self._entries.values()
            if each.is_live and each.claim.record_sequence > each.record_noted
        ]
        return sorted(found, key=_by_id)

    def bucket(self, index: int) -> list[Entry]:
        """A bucket's entries, tombstones included and hearsay left out, by key."""
        bucket = self._buckets[index]
        return [entry for key in sorted(bucket) if (entry := bucket[key]).is_shown]

    def add(self, entry: Entry, claim: Claim, accuser: bytes, now: Instant) -> NodeId | None:
        """Enter somebody new. If the table was full, whoever was forgotten for it is named.

        The oldest hearsay gives way first, then the oldest tombstone. Raises `OverflowError` where all are
        live members.
        """
        forgotten = None
        if len(self._entries) >= self._members_max:
            forgotten = next(iter(self.hearsay), None) or next(iter(self.tombstones), None)
            if forgotten is None:
                raise OverflowError("the table is full of live members")
            self.remove(forgotten)
        self._entries[entry.node_id] = entry
        self._buckets[entry.key[0] % BUCKETS][entry.key] = entry
        self._write(entry, claim, accuser)
        if not entry.is_shown:
            self.hearsay[entry.node_id] = now
        elif entry.is_live:
            self.live_count += 1
        return forgotten

    def add_all(self, entries: Iterable[Entry]) -> None:
        """Enter live members with their claims: as `add` for each, for the price of one digest a bucket."""
        for entry in entries:
            entry.claim, entry.packed, entry.share = _written(entry.node_id, entry.claim, NOBODY)
            index = entry.key[0] % BUCKETS
            self._entries[entry.node_id] = self._buckets[index][entry.key] = entry
            self._sums[index] += entry.share
            self.live_count += 1
        for index in range(BUCKETS):
            self._sum(index, 0)

    def put(self, entry: Entry, claim: Claim, accuser: bytes, now: Instant) -> None:
        """A known member's claim has changed; what is said of hearsay stays hearsay, and lives for it."""
        was_live = entry.is_live
        self._write(entry, claim, accuser)
        is_live = entry.is_live
        if was_live and not is_live:
            self.live_count -= 1
            self.tombstones[entry.node_id] = now
        elif is_live and not was_live:
            self.live_count += 1
            del self.tombstones[entry.node_id]

    def show(self, entry: Entry) -> None:
        """Hearsay has turned out to be somebody."""
        entry.is_shown = True
        entry.is_live = entry.claim.state in LIVE
        del self.hearsay[entry.node_id]
        self.live_count += 1

    def remove(self, node_id: NodeId) -> None:
        """Forget a tombstone, or hearsay."""
        entry = self._entries.pop(node_id)
        index = entry.key[0] % BUCKETS
        del self._buckets[index][entry.key]
        if entry.share:
            self._sum(index, -entry.share)
        self.hearsay.pop(node_id, None)
        self.tombstones.pop(node_id, None)

    def _write(self, entry: Entry, claim: Claim, accuser: bytes) -> None:
        entry.accuser = accuser
        entry.claim, entry.packed, share = _written(entry.node_id, claim, accuser)
        entry.is_live = entry.is_shown and entry.claim.state in LIVE
        if share != entry.share:
            self._sum(entry.key[0] % BUCKETS, share - entry.share)
            entry.share = share

    def _sum(self, index: int, change: int) -> None:
        self._sums[index] = (self._sums[index] + change) & _SUM_MASK
        self.digests[index] = self._sums[index].to_bytes(BUCKET_DIGEST_SIZE, "big")
