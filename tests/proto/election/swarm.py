"""A small swarm of election cores on an event queue: real codec, lying clocks, a bad network, crashes, liars.

Real time is one integer; each node's clock runs a tenth fast or slow of it and starts anywhere. Safety is
checked at every event, in real time. What a `node_core` would tell a core (who is alive, which electorate
next) is told here from the truth. Deterministic in its seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import Notice, Now, Persist, Publish, Send, Slot
from kvasir_proto.election.configuration import sign_nomination
from kvasir_proto.election.core import ElectionCore
from kvasir_proto.election.options import LAN
from kvasir_proto.election.requests import (
    AdoptAnnouncement,
    ChangeElectorate,
    ElectionRequest,
    ElectorateChanged,
    LeaseHeld,
    LeaseLost,
    SetCandidacy,
    SetMembers,
    SuspectBackbone,
    TermFollowed,
)
from kvasir_proto.election.states import Role
from kvasir_proto.election.succession import next_electorate
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.instants import Instant, WallTime, milliseconds
from kvasir_proto.messages.election import ELECTION, ElectionMessage
from kvasir_proto.term_proof import ElectorateRule

SWARM = SwarmDigest(bytes(range(32)))
RECOVERY_KEY = Ed25519PrivateKey.from_private_bytes(b"\xee" * 32)
KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([1 + number]) * 32) for number in range(16)]
IDS = [node_id_of(key.public_key().public_bytes_raw()) for key in KEYS]


@dataclass
class Faults:
    """What goes wrong, each as a chance of one message or one drain."""

    loss: float = 0.0
    duplicates: float = 0.0
    late: float = 0.0  # delayed by up to two seconds, so also reordered
    crash: float = 0.0  # while a drain is carried out


class Node:
    """One machine: a key, a clock, a disk, and a core while it runs."""

    def __init__(self, number: int, entropy: random.Random, max_drift: int) -> None:
        self.key, self.node_id = KEYS[number], IDS[number]
        self.rate = 1000 + entropy.randint(-max_drift, max_drift)
        self.offset = entropy.randrange(10**12)
        self.disk: dict[Slot, bytes] = {}
        self.core: ElectionCore | None = None
        self.generation = 0
        self.is_fit = True
        self.believed_dead: frozenset[NodeId] = frozenset()

    def instant(self, real: int) -> Instant:
        """Its own clock."""
        return Instant(self.offset + real * self.rate // 1000)

    def real(self, instant: Instant) -> int:
        """The first real time at which its clock shows that instant."""
        return -(-(instant - self.offset) * 1000 // self.rate)


@dataclass
class LeaseSpan:
    """A lease in real time, as long as its holder may believe in it."""

    node_id: NodeId
    term: tuple[int, int]
    begin: int
    end: int


@dataclass
class Adversary:
    """Runs a node in place of a core: `receive` and `act` say what it sends."""

    receive: Callable[[ElectionMessage, NodeId], list[tuple[NodeId, ElectionMessage]]]
    act: Callable[[int], list[tuple[NodeId, ElectionMessage]]]


@dataclass
class Swarm:
    """See the module. The first node founded it; `rule` is the electorate's."""

    seed: int
    count: int
    rule: ElectorateRule = "pinned"
    max_drift: int = 99
    electors_max: int = 7
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self.entropy = random.Random(self.seed)
        self.now = 0
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self.nodes = [Node(number, self.entropy, self.max_drift) for number in range(self.count)]
        self.by_id = {node.node_id: node for node in self.nodes}
        self.adversaries: dict[NodeId, Adversary] = {}
        self.groups: dict[NodeId, int] = {}
        self.leases: list[LeaseSpan] = []
        self.proven: dict[tuple[int, int], NodeId] = {}
        self.electorates: dict[tuple[int, int], bytes] = {}
        self.notices: list[Notice] = []
        self.sent = 0
        self.grows = True
        self.captured: list[ElectionMessage] = []

    # --- machines -------------------------------------------------------------------------------------------

    def start(self, number: int, anchor: bytes | None = None) -> None:
        """Start a node from its disk."""
        node = self.nodes[number]
        node.generation += 1
        node.core = ElectionCore(
            private_key=node.key,
            swarm_digest=SWARM,
            founder_public_key=KEYS[0].public_key().public_bytes_raw(),
            recovery_public_key=RECOVERY_KEY.public_key().public_bytes_raw(),
            rule=self.rule,
            options=LAN,
            stored=dict(node.disk),
            entropy=random.Random(self.entropy.random()),
            now=self._now_of(node),
            anchor=anchor,
        )
        self.command(number, SetCandidacy(node.is_fit, number % 5))

    def start_all(self) -> None:
        """Start every node that is no adversary's."""
        for number, node in enumerate(self.nodes):
            if node.node_id not in self.adversaries:
                self.start(number)
        self._at(self.now, self._govern)

    def crash(self, number: int) -> None:
        """Stop a node without a word; its engine ends with it."""
        node = self.nodes[number]
        node.core = None
        node.generation += 1
        self._end_leases(node.node_id)

    def corrupt(self, number: int, adversary: Adversary) -> None:
        """Hand a node over to an adversary, for good."""
        self.crash(number)
        self.adversaries[self.nodes[number].node_id] = adversary

    def command(self, number: int, request: ElectionRequest) -> None:
        """Ask a node's core."""
        node = self.nodes[number]
        if node.core is not None:
            node.core.command(request, self._now_of(node))
            self._carry_out(node)

    def partition(self, *groups: list[int]) -> None:
        """Only nodes of one group hear each other; without groups everybody does."""
        self.groups = {IDS[number]: index for index, group in enumerate(groups) for number in group}

    def backbones(self) -> list[Node]:
        """The nodes that hold a lease now."""
        return [
            node
            for node in self.nodes
            if node.core is not None
            and node.core.role is Role.BACKBONE
            and node.core.lease_until is not None
            and node.core.lease_until > node.instant(self.now)
        ]

    # --- time -----------------------------------------------------------------------------------------------

    def run(self, duration_ms: int, until: Callable[[], bool] | None = None) -> int:
        """Let that much real time pass, or less if `until` comes true; says how many ms it was."""
        began, end = self.now, self.now + milliseconds(duration_ms)
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            if until is not None and until():
                return (self.now - began) // milliseconds(1)
        self.now = end
        return duration_ms

    def _at(self, real: int, action: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (max(real, self.now), self._sequence, action))

    def _now_of(self, node: Node) -> Now:
        return Now(node.instant(self.now), WallTime(0))

    def _tick(self, node: Node, generation: int) -> None:
        if node.core is not None and node.generation == generation:
            due = node.core.next_deadline()
            if due is not None and due <= node.instant(self.now):
                node.core.tick(self._now_of(node))
                self._carry_out(node)

    # --- effects --------------------------------------------------------------------------------------------

    def _carry_out(self, node: Node) -> None:
        core = node.core
        assert core is not None
        outputs = core.drain()
        crash_at = -1
        if outputs and self.entropy.random() < self.faults.crash:
            crash_at = self.entropy.randrange(len(outputs))
        for index, output in enumerate(outputs):
            if index == crash_at:
                self._crash_for_a_while(node)
                return
            if isinstance(output, Persist):
                node.disk[output.slot] = output.data
            elif isinstance(output, Send):
                assert node.node_id != output.to
                self.transmit(node.node_id, output.to, output.message)  # type: ignore[arg-type]
            elif isinstance(output, Publish):
                for other in self.nodes:
                    if other is not node:
                        self._deliver_later(
                            node.node_id,
                            other.node_id,
                            partial(self._announce, other, output.data, node.node_id),
                        )
            elif isinstance(output, LeaseHeld):
                self._hold_lease(node, output)
            elif isinstance(output, LeaseLost):
                self._end_leases(node.node_id)
            elif isinstance(output, TermFollowed):
                key = (output.term.epoch, output.term.term)
                known = self.proven.setdefault(key, output.term.backbone)
                assert known == output.term.backbone, f"seed {self.seed}: two proofs of {key}"
            elif isinstance(output, ElectorateChanged):
                place = (output.electorate.epoch, output.electorate.version)
                digest = self.electorates.setdefault(place, output.electorate.digest())
                assert digest == output.electorate.digest(), f"seed {self.seed}: two electorates at {place}"
            elif isinstance(output, Notice):
                self.notices.append(output)
        due = core.next_deadline()
        if due is not None:
            self._at(node.real(due), lambda generation=node.generation: self._tick(node, generation))  # type: ignore[misc]

    def _crash_for_a_while(self, node: Node) -> None:
        number = self.nodes.index(node)
        self.crash(number)
        generation = node.generation

        def restart() -> None:
            if node.generation == generation:
                self.start(number)

        self._at(self.now + milliseconds(self.entropy.randint(50, 4000)), restart)

    def _hold_lease(self, node: Node, held: LeaseHeld) -> None:
        begin, end = self.now, node.real(held.until)
        term = (held.epoch, held.term)
        for lease in self.leases:
            if lease.node_id != node.node_id and lease.end > begin:
                raise AssertionError(f"seed {self.seed}: {lease} and {node.node_id} in {term} from {begin}")
        self.leases = [each for each in self.leases if each.end > begin and each.node_id != node.node_id]
        self.leases.append(LeaseSpan(node.node_id, term, begin, end))

    def _end_leases(self, node_id: NodeId) -> None:
        self.leases = [each for each in self.leases if each.node_id != node_id]

    # --- the network ----------------------------------------------------------------------------------------

    def transmit(self, sender: NodeId, to: NodeId, message: ElectionMessage) -> None:
        """Send a message as the network sends it: lost, late, twice, or well."""
        data = encode(message)
        self.sent += 1
        if self.adversaries and self.entropy.random() < 0.05:
            self.captured = [*self.captured[-200:], message]
        copies = 2 if self.entropy.random() < self.faults.duplicates else 1
        for _ in range(copies):
            self._deliver_later(sender, to, lambda: self._deliver(to, data, sender))

    def _deliver_later(self, sender: NodeId, to: NodeId, action: Callable[[], None]) -> None:
        if self.groups.get(sender) != self.groups.get(to) or self.entropy.random() < self.faults.loss:
            return
        delay = milliseconds(self.entropy.randint(1, 15))
        if self.entropy.random() < self.faults.late:
            delay = milliseconds(self.entropy.randint(15, 2000))
        self._at(self.now + delay, action)

    def _deliver(self, to: NodeId, data: bytes, sender: NodeId) -> None:
        message = decode(data, ELECTION)
        if to in self.adversaries:
            for receiver, answer in self.adversaries[to].receive(message, sender):
                self.transmit(to, receiver, answer)
            return
        node = self.by_id.get(to)
        if node is not None and node.core is not None:
            node.core.receive(message, sender, self._now_of(node))
            self._carry_out(node)

    def _announce(self, node: Node, data: bytes, source: NodeId) -> None:
        if node.core is not None:
            node.core.command(AdoptAnnouncement(data, source), self._now_of(node))
            self._carry_out(node)

    # --- what node_core would do ----------------------------------------------------------------------------

    def _govern(self) -> None:
        """Every 200 ms: tell who is alive, and let the backbone make the next electorate."""
        self._at(self.now + milliseconds(200), self._govern)
        alive = [
            node.node_id for node in self.nodes if node.core is not None or node.node_id in self.adversaries
        ]
        for node_id in sorted(self.adversaries):
            for to, message in self.adversaries[node_id].act(self.now):
                self.transmit(node_id, to, message)
        for number, node in enumerate(self.nodes):
            dead = frozenset(node.believed_dead)
            self.command(number, SetMembers(frozenset(alive), dead, frozenset()))
            core = node.core  # a command may crash the node
            if core is None:
                continue
            fence = core.fence
            if fence is not None and fence.backbone not in alive and self.entropy.random() < 0.5:
                self.command(number, SuspectBackbone(fence.backbone))
            elif self.grows and core.role is Role.BACKBONE:
                self._change_electorate(number, core, [each for each in alive if each not in dead], dead)

    def _change_electorate(
        self, number: int, core: ElectionCore, alive: list[NodeId], dead: frozenset[NodeId]
    ) -> None:
        if core.is_changing_electorate:
            return
        present = [node_id_of(each) for each in core.electorate.members]
        eligible = alive if len(present) < self.electors_max else [each for each in alive if each in present]
        wanted = next_electorate(
            present,
            self.rule,
            IDS[number],
            eligible=eligible,
            dead=dead,
            convicted=core.convicted,
            put_off=core.put_off(self.nodes[number].instant(self.now)),
        )
        if wanted is not None:
            added = [each for each in wanted if each not in present]
            nomination = sign_nomination(KEYS[0], SWARM, added[0]) if added and self.rule == "pinned" else b""
            self.command(number, ChangeElectorate(wanted, nomination))


def settled(swarm: Swarm) -> bool:
    """Whether there is one backbone, and every node that runs follows it."""
    backbones = swarm.backbones()
    if len(backbones) != 1 or backbones[0].core is None:
        return False
    fence = backbones[0].core.fence
    return all(node.core.fence == fence for node in swarm.nodes if node.core is not None)


def lease_ms(count: int) -> int:
    """That many leases, in ms, on the slowest clock."""
    return count * LAN.lease * 11 // 10 // milliseconds(1)
