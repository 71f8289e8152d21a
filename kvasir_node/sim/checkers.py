"""What must hold while everything goes wrong: one class a property, each names its invariant.

A checker is told what happens, in order, and says at once when something must not have. It keeps little and
looks at one thing at a time, since it is asked after every event. It believes nobody: votes and plans it
verifies itself. What byzantine nodes say of themselves is not looked at; what honest ones make of it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from kvasir_node.sim.swarm import Crashed, Overflowed, Raised, SimNode, Started
from kvasir_proto.capability import CLOCK_SKEW_MAX
from kvasir_proto.codec import decode
from kvasir_proto.election.requests import ElectorateChanged, LeaseHeld, LeaseLost, TermFollowed
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest
from kvasir_proto.messages.membership import MEMBERSHIP
from kvasir_proto.node_core import PlanReceived
from kvasir_proto.placement.plan import PLAN
from kvasir_proto.records import RecordChanged
from kvasir_proto.signing import open_signed
from kvasir_proto.term_proof import TERM_PROOF, Electorate, ProvenTerm, verify_term_proof

VIOLATIONS_MAX: Final = 20
"""A run stops looking after so many: the first one is the one to read."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something happened that must not: when, at which node, against what, and what shows it."""

    at_s: float
    node: int
    checker: str
    invariant: str
    evidence: str


Listener = Callable[[int, SimNode, Any], str | None]
"""(real time, node, event) -> what is wrong, if something is."""


class Checker(Protocol):
    """One property."""

    invariant: ClassVar[str]

    def listeners(self) -> Mapping[type, Listener]:
        """What it wants to be told."""


class Checkers:
    """Tells every checker what it asked for, and keeps what they find."""

    def __init__(self, checkers: list[Checker]) -> None:
        self.violations: list[Violation] = []
        self._listeners: dict[type, list[tuple[Checker, Listener]]] = {}
        for checker in checkers:
            for kind, listener in checker.listeners().items():
                self._listeners.setdefault(kind, []).append((checker, listener))

    def saw(self, real: int, node: SimNode, event: object) -> None:
        """Something happened: see whether it may."""
        listeners = self._listeners.get(type(event))
        if listeners is None:
            return
        for checker, listener in listeners:
            evidence = listener(real, node, event)
            if evidence is not None and len(self.violations) < VIOLATIONS_MAX:
                name = type(checker).__name__
                self.violations.append(Violation(real / 1e9, node.index, name, checker.invariant, evidence))


class OneBackboneATerm:
    """Everybody who follows a term, and whoever holds its lease, means one node."""

    invariant: ClassVar[str] = "6: one backbone per (epoch, term)"

    def __init__(self) -> None:
        self.backbone_of: dict[tuple[int, int], tuple[NodeId, int]] = {}
        self.backbones_max = 0

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return {TermFollowed: self._followed, LeaseHeld: self._held}

    def _followed(self, _: int, node: SimNode, event: TermFollowed) -> str | None:
        return self._accept(node, event.term.epoch, event.term.term, event.term.backbone)

    def _held(self, _: int, node: SimNode, event: LeaseHeld) -> str | None:
        return self._accept(node, event.epoch, event.term, node.node_id)

    def _accept(self, node: SimNode, epoch: int, term: int, backbone: NodeId) -> str | None:
        if not node.is_honest:
            return None
        first, by = self.backbone_of.setdefault((epoch, term), (backbone, node.index))
        self.backbones_max = max(self.backbones_max, 1 + (first != backbone))
        if first == backbone:
            return None
        return f"({epoch}, {term}) has backbone {backbone} here and {first} at node {by}"


class OneLeaseAtATime:
    """No two nodes may decode at one real moment, each by its own clock."""

    invariant: ClassVar[str] = "6: sampling only on the backbone, only under its lease"

    def __init__(self) -> None:
        self._held: dict[int, tuple[SimNode, LeaseHeld]] = {}

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return {LeaseHeld: self._hold, LeaseLost: self._end, Crashed: self._end}

    def _hold(self, real: int, node: SimNode, event: LeaseHeld) -> str | None:
        if not node.is_honest or event.until <= node.clock.instant(real):
            return None
        found = None
        for index, (other, lease) in list(self._held.items()):
            if lease.until <= other.clock.instant(real):
                del self._held[index]
            elif other is not node:
                left_s = (lease.until - other.clock.instant(real)) / 1e9
                found = (
                    f"holds ({event.epoch}, {event.term}) while node {index} has {left_s:.3f} s left of its "
                    f"lease of ({lease.epoch}, {lease.term})"
                )
        self._held[node.index] = (node, event)
        return found

    def _end(self, _: int, node: SimNode, __: object) -> None:
        self._held.pop(node.index, None)


class FencesNeverFall:
    """A node that followed a term follows no earlier one, not after a crash either."""

    invariant: ClassVar[str] = "1, fence: the highest (epoch, term) that a node has proof of"

    def __init__(self) -> None:
        self._fence: dict[int, tuple[int, int]] = {}

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return {TermFollowed: self._followed, Started: self._started}

    def _followed(self, _: int, node: SimNode, event: TermFollowed) -> str | None:
        if not node.is_honest:
            return None
        pair, before = event.term[:2], self._fence.get(node.index, (0, 0))
        if pair < before:
            return f"followed {before}, now {pair}"
        self._fence[node.index] = pair
        return None

    def _started(self, _: int, node: SimNode, __: Started) -> str | None:
        before = self._fence.get(node.index, (0, 0))
        if not node.is_honest or before == (0, 0):
            return None
        assert node.core is not None
        fence = node.core.view().fence
        if fence is None or fence[:2] < before:
            return f"followed {before} before it crashed, starts with {fence and fence[:2]}"
        return None


class IncarnationsNeverFall:
    """No node says less than the highest incarnation it said before, not after a crash either."""

    invariant: ClassVar[str] = "4 (life of a node): incarnations order what is said of a member"

    def __init__(self) -> None:
        self._said: dict[int, int] = {}

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return dict.fromkeys(MEMBERSHIP.members, self._sent)

    def _sent(self, _: int, node: SimNode, message: Any) -> str | None:
        before = self._said.get(node.index, 0)
        if message.incarnation > before:
            self._said[node.index] = message.incarnation
        elif message.incarnation < before and node.is_honest:
            return f"said incarnation {before} before, now {message.incarnation}"
        return None


class TermsAreProven:
    """Who follows a term has its proof: a quorum's good votes under an electorate that really was one."""

    invariant: ClassVar[str] = "1, term proof: a fence moves only on proof"

    def __init__(self, swarm_digest: SwarmDigest, electorates: ElectoratesFollow) -> None:
        self._swarm_digest = swarm_digest
        self._electorates = electorates
        self._good: dict[bytes, ProvenTerm] = {}

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return {TermFollowed: self._followed}

    def _followed(self, _: int, node: SimNode, event: TermFollowed) -> str | None:
        if not node.is_honest:
            return None
        proven = self._good.get(event.proof)
        if proven is None:
            try:
                electorate = decode(event.proof, TERM_PROOF).electorate
                proven = verify_term_proof(event.proof, self._swarm_digest, electorate)
            except RemoteProtocolError as error:
                return f"follows {event.term[:2]} on what proves nothing: {error.code}"
            if not self._electorates.is_known(electorate):
                return f"follows {event.term[:2]} by an electorate that nobody made: {describe(electorate)}"
            self._good[event.proof] = proven
        if proven != event.term:
            return f"follows {event.term} on the proof of {proven}"
        return None


class ElectoratesFollow:
    """Every electorate follows one that was known before, and differs from it by one member at most.

    No two have one (epoch, term, version). A recovery's first electorate follows none.
    """

    invariant: ClassVar[str] = "4 (election): electorates follow one another, one member at a time"

    def __init__(self, founding: Electorate) -> None:
        self._of_digest = {founding.digest(): founding}
        self._of_order = {founding.order: founding}

    def is_known(self, electorate: Electorate) -> bool:
        """Whether it is one of those that honest nodes came to."""
        return electorate.digest() in self._of_digest

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return {ElectorateChanged: self._changed}

    def _changed(self, _: int, node: SimNode, event: ElectorateChanged) -> str | None:
        electorate = event.electorate
        digest = electorate.digest()
        if not node.is_honest or digest in self._of_digest:
            return None
        other = self._of_order.get(electorate.order)
        if other is not None:
            return f"{describe(electorate)} is not the {describe(other)} that others know"
        before = self._of_digest.get(electorate.predecessor)
        if before is None and electorate.predecessor != bytes(len(digest)):
            return f"{describe(electorate)} follows none that anybody knows"
        if before is not None and len(set(before.members) ^ set(electorate.members)) > 1:
            return f"{describe(electorate)} differs by more than a member from {describe(before)}"
        self._of_digest[digest] = electorate
        self._of_order[electorate.order] = electorate
        return None


class PlansAreTheBackbones:
    """Plans are signed by their term's backbone, and no two of an honest one have one revision.

    A backbone that lies can sign two: who receives one of them cannot know, and both are good plans.
    """

    invariant: ClassVar[str] = (
        "4 (placement): only the term's backbone issues plans; versioned by (epoch, term, revision)"
    )

    def __init__(
        self,
        swarm_digest: SwarmDigest,
        terms: OneBackboneATerm,
        may_lie: Callable[[NodeId], bool] = lambda _: False,
    ) -> None:
        self._swarm_digest = swarm_digest
        self._terms = terms
        self._may_lie = may_lie
        self._plan_of: dict[tuple[int, int, int], bytes] = {}

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return {PlanReceived: self._received}

    def _received(self, _: int, node: SimNode, event: PlanReceived) -> str | None:
        version = (event.plan.epoch, event.plan.term, event.plan.revision)
        if not node.is_honest or self._plan_of.get(version) == event.signed:
            return None
        plan, signer = open_signed(event.signed, PLAN, self._swarm_digest)
        if plan != event.plan:
            return f"the plan of revision {version} is not the one that was signed"
        first = self._terms.backbone_of.get(version[:2])
        if first is None or first[0] != signer:
            return f"a plan of {version} signed by {signer}; its term's backbone is {first and first[0]}"
        if version in self._plan_of and not self._may_lie(signer):
            return f"two plans of revision {version}"
        self._plan_of[version] = event.signed
        return None


class OutputRanksAreF32:
    """No node that adds in less than F32 is given experts of the output layers, or is backbone."""

    invariant: ClassVar[str] = "4: F16-accumulating nodes never serve output or backbone"

    def __init__(self, output_layers: frozenset[int], adds_in_f32: Callable[[NodeId], bool]) -> None:
        self._output_layers = output_layers
        self._adds_in_f32 = adds_in_f32
        self._good: set[bytes] = set()

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return {PlanReceived: self._received, LeaseHeld: self._held}

    def _received(self, _: int, node: SimNode, event: PlanReceived) -> str | None:
        if not node.is_honest or event.signed in self._good:
            return None
        plan = event.plan
        for layer in plan.layers:
            if layer.layer in self._output_layers:
                for part in layer.ranges:
                    for holder in part.holders:
                        if not self._adds_in_f32(plan.nodes[holder]):
                            return f"layer {layer.layer} is an output layer, and held by {plan.nodes[holder]}"
        self._good.add(event.signed)
        return None

    def _held(self, _: int, node: SimNode, event: LeaseHeld) -> str | None:
        if not node.is_honest or self._adds_in_f32(node.node_id):
            return None
        return f"is backbone of ({event.epoch}, {event.term}) and does not add in F32"


class GoneRecordsStayGone:
    """While a node runs, a record that it knows to be gone does not come back, and numbers do not fall."""

    invariant: ClassVar[str] = "10: a record is believed only while it is signed, in sequence and unexpired"

    def __init__(self) -> None:
        self._highest: dict[int, dict[NodeId, int]] = {}
        self._gone: dict[int, dict[NodeId, int]] = {}

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return {RecordChanged: self._changed, Crashed: self._forget}

    def _changed(self, real: int, node: SimNode, event: RecordChanged) -> str | None:
        if not node.is_honest:
            return None
        highest = self._highest.setdefault(node.index, {})
        gone = self._gone.setdefault(node.index, {})
        if event.record is None:
            gone[event.node_id] = highest.get(event.node_id, 0)
            return None
        sequence = event.record.sequence
        if event.node_id in gone and sequence <= gone[event.node_id]:
            return f"{event.node_id}'s record {sequence} is gone, and is believed again"
        if sequence < highest.get(event.node_id, 0):
            return f"{event.node_id}'s record {sequence} came after {highest[event.node_id]}"
        if event.record.expires + CLOCK_SKEW_MAX < node.clock.wall(real):
            return f"{event.node_id}'s record {sequence} has expired, and is believed"
        highest[event.node_id] = sequence
        return None

    def _forget(self, _: int, node: SimNode, __: Crashed) -> None:
        self._highest.pop(node.index, None)
        self._gone.pop(node.index, None)


class NothingOverflows:
    """No step of a core asks for more than a bound, and no deadline stands still."""

    invariant: ClassVar[str] = "8: every queue and frame has a bound"

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return {Overflowed: self._overflowed}

    def _overflowed(self, _: int, __: SimNode, event: Overflowed) -> str | None:
        return event.what


class NothingRaises:
    """Whatever arrives, no core raises: an error of a sender costs the sender, never the node."""

    invariant: ClassVar[str] = "B5 (errors): a remote error costs the sender, never the node"

    def listeners(self) -> Mapping[type, Listener]:
        """See `Checker`."""
        return {Raised: self._raised}

    def _raised(self, _: int, __: SimNode, event: Raised) -> str | None:
        return event.what


def describe(electorate: Electorate) -> str:
    """An electorate in a few words."""
    return (
        f"electorate ({electorate.epoch}, {electorate.term}, {electorate.version}), {electorate.rule}, of "
        f"{len(electorate.members)}"
    )
