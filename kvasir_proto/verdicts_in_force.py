"""Whom this node plans without, and who gets bulk layers only: who was found out, of what, and until when.

One table for all of it, apart from whoever found the fault, and from placement, which sees only what follows.
A node that *spoke* wrongly is tried again when its time is over: that may have been a cable. One whose *rows*
were wrong was found out as it was certified then: its verdict holds as long as it shows those certificates,
and for a time that is set whatever it shows; no time and no good row ends it before. One whose rows a swarm
found wrong gets bulk layers only with other certificates, until auditors verify those. Certificates last no
longer than a week, and a verdict on one no longer than that. The table is kept on disk. It reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, NamedTuple, TypeAlias

from kvasir_proto.accusation import ACCUSATION_SIZE_MAX
from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import Now, Persist
from kvasir_proto.ids import NodeId, NodeIdField
from kvasir_proto.instants import Duration, Instant, after, between, seconds
from kvasir_proto.limits import ELECTORS_MAX, AuditVerdict, ClaimDigest, Length, Nanoseconds, Range
from kvasir_proto.messages import Family
from kvasir_proto.tolerance_certificate import CERTIFICATE_LIFETIME

VERDICTS_MAX: Final = 1024
"""Verdicts in the table; beyond, the one that ends soonest is let go."""
ACCUSATIONS_MAX: Final = 256
REASON_LENGTH_MAX: Final = 256
SET_TIME_MAX: Final[Duration] = seconds(24 * 3600)
"""The longest time for which a node is planned without whatever it shows."""


AccusationBytes: TypeAlias = Annotated[bytes, Length(1, ACCUSATION_SIZE_MAX)]


class VerdictInForce(NamedTuple):
    """What was found of a node, and why. It holds until then, whatever the node shows by then.

    With a `claim` (`CapabilityRecord.claim_digest`) it holds beyond that, as long as the node shows the
    certificates of that digest; None where it was no matter of its rows.
    """

    node_id: NodeId
    word: AuditVerdict
    reason: str
    until: Instant
    claim: bytes | None = None
    n_electors: int = 0
    """Electors who came to it by recomputing rows, where they make it the swarm's; 0: it binds us alone."""


@dataclass(frozen=True, slots=True)
class KeptVerdict:
    """A verdict as it lies on disk. Times are wall time: `ends` is when nothing is left of it."""

    node_id: NodeIdField
    word: AuditVerdict
    reason: Annotated[str, Length(0, REASON_LENGTH_MAX)]
    claim: ClaimDigest | None
    until: Nanoseconds
    ends: Nanoseconds
    n_electors: Annotated[int, Range(0, ELECTORS_MAX)] = 0


@dataclass(frozen=True, slots=True)
class VerdictsKept:
    """What the slot `verdicts` holds. `accusations` are this node's own, signed, that it goes on to say."""

    kind: ClassVar[str] = "verdicts_kept"
    verdicts: Annotated[tuple[KeptVerdict, ...], Length(0, VERDICTS_MAX)]
    accusations: Annotated[tuple[AccusationBytes, ...], Length(0, ACCUSATIONS_MAX)] = ()


VERDICTS_KEPT: Final = Family("verdicts kept", (VerdictsKept,), 2 << 20)


@dataclass(frozen=True, slots=True)
class _Row:
    verdict: VerdictInForce
    ends: Instant
    kept: KeptVerdict


class VerdictTable:
    """See the module. Raises `RemoteProtocolError` for a slot that holds no table."""

    def __init__(self, stored: bytes | None, now: Now) -> None:
        self._rows: dict[tuple[NodeId, bytes | None], _Row] = {}
        self._looked_at = now.instant
        self._effects: list[Persist] = []
        self.accusations: tuple[bytes, ...] = ()
        """This node's own, as they were kept."""
        if stored is not None:
            found = decode(stored, VERDICTS_KEPT)
            self.accusations = found.accusations
            for kept in found.verdicts:
                self._restore(kept, now)

    def add(self, verdict: VerdictInForce, now: Now) -> None:
        """Have this hold from now on. What the table has of the same certificates is never made milder."""
        reason = verdict.reason[:REASON_LENGTH_MAX]
        latest = after(now.instant, SET_TIME_MAX)
        verdict = verdict._replace(reason=reason, until=min(verdict.until, latest))
        key = (verdict.node_id, verdict.claim)
        before = self._rows.get(key)
        if before is not None:
            if before.verdict.until > verdict.until:
                verdict = verdict._replace(until=before.verdict.until, reason=before.verdict.reason)
            if before.verdict.word == "quarantined":
                verdict = verdict._replace(word="quarantined")
            if before.verdict.n_electors > verdict.n_electors:
                verdict = verdict._replace(n_electors=before.verdict.n_electors)
        lasts = between(now.instant, verdict.until)
        lasts_at_most = lasts if verdict.claim is None else max(lasts, CERTIFICATE_LIFETIME)
        kept = KeptVerdict(
            *(verdict.node_id, verdict.word, verdict.reason, verdict.claim),
            until=max(0, after(now.wall, lasts)),
            ends=max(0, after(now.wall, lasts_at_most)),
            n_electors=verdict.n_electors,
        )
        self._rows[key] = _Row(verdict, after(now.instant, lasts_at_most), kept)
        self._make_room()
        self._persist()

    def keep_accusations(self, accusations: tuple[bytes, ...]) -> None:
        """These are this node's own by now."""
        if accusations != self.accusations:
            self.accusations = accusations
            self._persist()

    def in_force(
        self, node_id: NodeId, claim: bytes | None, *, is_verified: bool = False
    ) -> VerdictInForce | None:
        """What holds of a node whose certificates have this digest; None as a claim: nobody knows them.

        Of several the worst, then the longest. Whom a swarm found out in the last week under others is unfit
        with these as well, unless auditors have verified them: that costs one that lies more than new bytes.
        """
        found = [each for each in self._of(node_id) if self._holds(each, claim)]
        if not found and not is_verified:
            found = [
                VerdictInForce(
                    node_id,
                    "unfit",
                    f"under other certificates, and nobody has verified these: {row.verdict.reason}",
                    row.ends,
                    claim,
                    row.verdict.n_electors,
                )
                for (of, _), row in self._rows.items()
                if of == node_id and row.verdict.n_electors > 0 and row.ends > self._looked_at
            ]
        return max(found, key=lambda each: (each.word == "quarantined", each.until), default=None)

    def let_go(self, now: Instant) -> bool:
        """Forget what has ended; whether anything holds no more, or only with the certificates it is of."""
        before, self._looked_at = self._looked_at, max(self._looked_at, now)
        over = [key for key, row in self._rows.items() if row.ends <= now]
        for key in over:
            del self._rows[key]
        if over:
            self._persist()
        return bool(over) or any(before < row.verdict.until <= now for row in self._rows.values())

    def next_end(self) -> Instant | None:
        """When `let_go` has something to do next."""
        ends = (
            row.verdict.until if row.verdict.until > self._looked_at else row.ends
            for row in self._rows.values()
        )
        return min(ends, default=None)

    def node_ids(self) -> tuple[NodeId, ...]:
        """Those of whom there is something, in order."""
        return tuple(sorted({node_id for node_id, _ in self._rows}))

    def n_agreed_under_others(self, node_id: NodeId, claim: bytes) -> int:
        """How often a swarm found this node out in the last week while it showed other certificates than
        these: whoever is found out can always show others.
        """
        return sum(each.n_electors > 0 and each.claim != claim for each in self._of(node_id))

    def drain(self) -> list[Persist]:
        """What is to be kept, once."""
        effects, self._effects = self._effects, []
        return effects

    def _of(self, node_id: NodeId) -> Iterator[VerdictInForce]:
        return (row.verdict for (of, _), row in self._rows.items() if of == node_id)

    def _holds(self, verdict: VerdictInForce, claim: bytes | None) -> bool:
        is_as_it_was = verdict.claim is not None and (claim is None or claim == verdict.claim)
        return is_as_it_was or verdict.until > self._looked_at

    def _restore(self, kept: KeptVerdict, now: Now) -> None:
        """Take up what is left of a kept verdict: no more than it may last, whatever the clock says."""
        lasts = min(kept.until - now.wall, SET_TIME_MAX)
        lasts_at_most = min(kept.ends - now.wall, CERTIFICATE_LIFETIME)
        if lasts_at_most <= 0:
            return
        until = after(now.instant, Duration(lasts))
        verdict = VerdictInForce(kept.node_id, kept.word, kept.reason, until, kept.claim, kept.n_electors)
        ends = after(now.instant, Duration(lasts_at_most))
        self._rows[verdict.node_id, verdict.claim] = _Row(verdict, ends, kept)

    def _make_room(self) -> None:
        while len(self._rows) > VERDICTS_MAX:
            del self._rows[min(self._rows, key=lambda key: (self._rows[key].ends, key[0], key[1] or b""))]

    def _persist(self) -> None:
        rows = sorted(self._rows, key=lambda key: (key[0], key[1] is not None, key[1] or b""))
        kept = VerdictsKept(tuple(self._rows[key].kept for key in rows), self.accusations)
        self._effects = [Persist("verdicts", encode(kept))]
