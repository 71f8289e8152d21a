"""What auditors say of nodes, added up: which ranks a node is verified for, and for which it is unfit.

Holds the newest verdict of each auditor on each node, as signed. A node's own auditors' word counts while
they are auditors, and while the node is certified as it was then. So many must agree as one more than may
lie; this node's own verdict is enough for itself. Apart from certificates because there everything can be
judged by itself, and from the core because nobody else needs to know how verdicts are counted. It reads no
clock and asks nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvasir_proto.capability import CLOCK_SKEW_MAX, CapabilityRecord, Verdict, has_expired
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest
from kvasir_proto.instants import WallTime, after
from kvasir_proto.limits import Rank
from kvasir_proto.tolerance_certificate import AuditorVerdict, open_verdict

VERDICTS_MAX: Final = 4096
"""Verdicts that are held; of more the one goes that expires first."""
AUDITORS_OF_A_NODE_MAX: Final = 8
"""Verdicts that are held of one node: all electors' and one more. Others' go first."""


class Held(NamedTuple):
    """A verdict, who signed it, and the signed bytes."""

    verdict: AuditorVerdict
    auditor: NodeId
    data: bytes


@dataclass(frozen=True, slots=True)
class Auditors:
    """Whose verdicts count, and how many that agree make a fact."""

    node_ids: frozenset[NodeId]
    n_needed: int


def auditors_needed(n_auditors: int, *, may_lie: bool) -> int:
    """One more than may lie: of an open electorate a third, of a pinned one nobody."""
    return (n_auditors - 1) // 3 + 1 if may_lie and n_auditors >= 4 else 1


class VerdictBook:
    """See the module. `own` is this node, whose verdicts are enough for itself."""

    def __init__(self, own: NodeId, swarm: SwarmDigest) -> None:
        self._own = own
        self._swarm = swarm
        self._held: dict[NodeId, dict[NodeId, Held]] = {}
        self._auditors = Auditors(frozenset(), 1)

    def know_auditors(self, auditors: Auditors) -> bool:
        """From now on these count; whether that is news."""
        is_news = auditors != self._auditors
        self._auditors = auditors
        return is_news

    @property
    def auditors(self) -> Auditors:
        """Whose verdicts count."""
        return self._auditors

    def take(self, data: bytes, now: WallTime) -> NodeId | None:
        """Hold a verdict if it is newer than its auditor's last: the node that it is about, None if not.

        Raises `RemoteProtocolError` as `open_verdict` does, or `not_an_auditor`.
        """
        verdict, auditor = open_verdict(data, self._swarm, now)
        if auditor not in self._auditors.node_ids:
            raise RemoteProtocolError("it is signed by nobody who is an auditor here", "not_an_auditor")
        of_node = self._held.setdefault(verdict.node_id, {})
        before = of_node.get(auditor)
        if before is not None and before.verdict.issued >= verdict.issued:
            return None
        of_node.pop(auditor, None)
        of_node[auditor] = Held(verdict, auditor, data)
        self._make_room(verdict.node_id)
        return verdict.node_id

    def verdict_of(self, record: CapabilityRecord, rank: Rank) -> Verdict:
        """What is known of a node's fitness for a rank: what it says, and what auditors say to that."""
        own = record.verdict_of(rank)
        certificate = next((each.certificate for each in record.verdicts if each.rank == rank), b"")
        words: list[str] = []
        for held in self._counting(record.node_id):
            verdict = held.verdict
            if rank not in verdict.ranks or verdict.certificate != certificate:
                continue
            word = "verified" if verdict.verdict == "verified" else "unfit"
            if held.auditor == self._own:
                return _not_better_than(own, word)
            words.append(word)
        for word in ("unfit", "verified"):
            if words.count(word) >= self._auditors.n_needed:
                return _not_better_than(own, word)
        return "claimed" if own == "verified" else own

    def for_record(self, node_id: NodeId, certificate: bytes) -> tuple[bytes, ...]:
        """What a node may show of itself: signed verdicts that verify this certificate, in order."""
        fit = [
            each.data
            for each in sorted(self._counting(node_id), key=lambda each: each.auditor)
            if each.verdict.verdict == "verified" and each.verdict.certificate == certificate
        ]
        return tuple(fit[: self._auditors.n_needed + 1])

    def count_of(self, node_id: NodeId, certificate: bytes, now: WallTime) -> int:
        """How many auditors verify this certificate for some time to come."""
        soon = after(now, CLOCK_SKEW_MAX)
        return sum(
            each.verdict.verdict == "verified"
            and each.verdict.certificate == certificate
            and each.verdict.expires > soon
            for each in self._counting(node_id)
        )

    def held(self, node_id: NodeId, auditor: NodeId) -> Held | None:
        """What an auditor said last of a node."""
        return self._held.get(node_id, {}).get(auditor)

    def expire(self, now: WallTime) -> list[NodeId]:
        """Forget what has expired: the nodes that something was forgotten of."""
        changed = []
        for node_id in sorted(self._held):
            of_node = self._held[node_id]
            over = [each for each, held in of_node.items() if has_expired(held.verdict.expires, now)]
            for auditor in over:
                del of_node[auditor]
            if over:
                changed.append(node_id)
            if not of_node:
                del self._held[node_id]
        return changed

    def forget(self, node_id: NodeId) -> None:
        """A node is gone for good."""
        self._held.pop(node_id, None)

    def _counting(self, node_id: NodeId) -> Iterable[Held]:
        of_node = self._held.get(node_id, {})
        return [of_node[each] for each in sorted(of_node) if each in self._auditors.node_ids]

    def _make_room(self, newest: NodeId) -> None:
        of_node = self._held[newest]
        while len(of_node) > AUDITORS_OF_A_NODE_MAX:
            del of_node[min(of_node, key=lambda each: self._worth(of_node[each], self._auditors.node_ids))]
        while sum(map(len, self._held.values())) > VERDICTS_MAX:
            every = [held for held_of in self._held.values() for held in held_of.values()]
            first = min(every, key=lambda each: self._worth(each, self._auditors.node_ids))
            del self._held[first.verdict.node_id][first.auditor]
            if not self._held[first.verdict.node_id]:
                del self._held[first.verdict.node_id]

    @staticmethod
    def _worth(held: Held, auditors: Collection[NodeId]) -> tuple[bool, int, NodeId]:
        return held.auditor in auditors, held.verdict.expires, held.auditor


def _not_better_than(own: Verdict, word: str) -> Verdict:
    """A node that says itself that it is unfit, or nothing, is not made fit by others."""
    if word == "unfit" or own == "unfit":
        return "unfit"
    return "verified" if own != "none" else "none"
