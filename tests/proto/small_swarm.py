"""A handful of node cores on one event queue, every message through the codec: enough to test `node_core`.

No faults but those a test makes: a node that is stopped hears nothing, a link can be cut, gossip can be lost.
Equal bytes are one message for two minutes, as in gossip's port. Shards load after a fixed time. The
simulator (`kvasir_node.sim`) is the same idea with everything that can go wrong.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.accusations import RecomputationDue, Recomputed
from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import FetchRecord, Notice, Now, Persist, Publish, Send, Slot
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import ModelDigest, NodeId, node_id_of
from kvasir_proto.instants import Duration, Instant, WallTime, milliseconds, seconds
from kvasir_proto.membership.events import Seed
from kvasir_proto.messages.core import CORE
from kvasir_proto.node_core import LAN, CoreOptions, NodeCore, PlanReceived, ShardLoaded
from kvasir_proto.placement.inventory import ModelShape
from kvasir_proto.placement.plan import Plan
from kvasir_proto.swarm_manifest import (
    FoundedSwarm,
    SwarmManifest,
    Thresholds,
    open_swarm_manifest,
    sign_swarm_manifest,
)
from kvasir_proto.verification import ChallengeDue, ChallengeFailed, ChallengeResult

WALL = 1_800_000_000 * 10**9
DELAY = milliseconds(1)
LOADING = milliseconds(50)
REMEMBERED = seconds(120)
MODEL = ModelShape(layers=(0, 1, 2, 3), n_expert=8, n_expert_used=2, expert_sizes_bytes=(1000,) * 4)


def key_of(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "big"))


RECOVERY_KEY = key_of(9999)


def found(
    founder: Ed25519PrivateKey,
    electorate: Any = "open",
    admission: Any = "open",
    certificates: Any = "claimed",
) -> FoundedSwarm:
    public_key = founder.public_key().public_bytes_raw()
    manifest = SwarmManifest(
        model_digest=ModelDigest(bytes(32)),
        model_name="toy",
        reference_class="ggml-activations",
        thresholds=Thresholds(),
        admission=admission,
        compact_activations=False,
        partial_sums=False,
        founder_public_key=public_key,
        recovery_public_key=RECOVERY_KEY.public_key().public_bytes_raw(),
        electorate=electorate,
        certificates=certificates,
    )
    return open_swarm_manifest(sign_swarm_manifest(manifest, founder))


def capability(node_id: NodeId, **changes: Any) -> CapabilityRecord:
    record = CapabilityRecord(
        node_id=node_id,
        sequence=0,
        expires=0,
        addresses=(),
        versions=(1,),
        node_version="test",
        backend="ggml-cpu",
        device="x86_64",
        accumulation="UNKNOWN",
        memory_bytes=1 << 20,
        state="joined",
        reason="",
        ranks=("backbone", "output", "bulk"),
        stands_for_elector=True,
        has_backbone_file=True,
        headroom_bytes=1 << 30,
    )
    return replace(record, **changes)


@dataclass
class SmallNode:
    """One node: its core, or None while it is down, what it stored, and what it told."""

    key: Ed25519PrivateKey
    capability: CapabilityRecord
    core: NodeCore | None = None
    stored: dict[Slot, bytes] = field(default_factory=dict)
    told: list[Any] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    is_stopped: bool = False
    life: int = 0
    skew: int = 0
    """How far its wall clock is ahead."""
    armed: int = -1

    @property
    def node_id(self) -> NodeId:
        return self.capability.node_id


def _not_recomputed(_elector: NodeId, due: RecomputationDue) -> Recomputed:
    return Recomputed(due.node_id, due.digest, None, "nobody knows how", 0, is_conclusive=False)


def _not_challenged(_auditor: NodeId, challenged: NodeId) -> ChallengeResult:
    return ChallengeFailed(challenged, "nobody knows how")


class SmallSwarm:
    """Nodes 1 to n; node 1 founded the swarm. `run` advances time."""

    def __init__(self, size: int, *, options: CoreOptions = LAN, seed: int = 1, **manifest: Any) -> None:
        self.swarm = found(key_of(1), **manifest)
        self.options = options
        self.entropy = random.Random(seed)
        self.time: int = seconds(1000)
        self.nodes: dict[NodeId, SmallNode] = {}
        self.cut: set[tuple[NodeId, NodeId]] = set()
        self.sent: Counter[tuple[NodeId, NodeId, str]] = Counter()
        """Messages by sender, receiver and kind."""
        self.gossips = True
        """Whether what a node publishes reaches anybody, as it does not before the mesh is there."""
        self.repeated: list[bytes] = []
        """What somebody published though it had been, by anybody, so that nobody heard it."""
        self.far: dict[NodeId, Duration] = {}
        """What messages to a node take longer than to others."""
        self.challenge: Callable[[NodeId, NodeId], ChallengeResult] = _not_challenged
        """What comes of it when the one challenges the other."""
        self.recompute: Callable[[NodeId, RecomputationDue], Recomputed] = _not_recomputed
        """What an elector finds when it recomputes rows."""
        self._published: dict[tuple[str, bytes], int] = {}
        self.nominees = [self._id_of(number) for number in range(1, 10)]
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for number in range(1, size + 1):
            self.add(number)

    def add(self, number: int, **changes: Any) -> SmallNode:
        """Start node ``number``."""
        key = key_of(number)
        node_id = node_id_of(key.public_key().public_bytes_raw())
        node = SmallNode(key, capability(node_id, **changes))
        self.nodes[node_id] = node
        self.start(node)
        return node

    def node(self, number: int) -> SmallNode:
        """Node ``number``."""
        return self.nodes[self._id_of(number)]

    @staticmethod
    def _id_of(number: int) -> NodeId:
        return node_id_of(key_of(number).public_key().public_bytes_raw())

    def start(self, node: SmallNode) -> None:
        """Start a node with what it stored."""
        node.life += 1
        node.core = NodeCore(
            private_key=node.key,
            swarm=self.swarm,
            capability=node.capability,
            model=MODEL,
            options=self.options,
            stored=node.stored,
            entropy=random.Random(self.entropy.random()),
            now=self.now(node),
            nominees=self.nominees,
        )
        founder = self.node(1).node_id if 1 in self._numbers() else node.node_id
        node.core.command(Seed((founder,)), self.now(node))
        self._do(node)

    def _numbers(self) -> set[int]:
        founder = node_id_of(key_of(1).public_key().public_bytes_raw())
        return {1} if founder in self.nodes else set()

    def kill(self, node: SmallNode) -> None:
        """End a node at once; what it persisted stays."""
        node.core = None

    def now(self, node: SmallNode | None = None) -> Now:
        """The time, on the clocks of this node."""
        return Now(Instant(self.time), WallTime(WALL + self.time + (node.skew if node is not None else 0)))

    def run(self, duration: Duration, until: Callable[[], bool] | None = None) -> float:
        """Advance by ``duration``, or until the condition holds; the seconds that took."""
        started, end = self.time, self.time + duration
        while self._queue and self._queue[0][0] <= end:
            self.time, _, action = heapq.heappop(self._queue)
            action()
            if until is not None and until():
                return (self.time - started) / 1e9
        assert until is None, "it never came to that"
        self.time = end
        return duration / 1e9

    # -- plumbing ------------------------------------------------------------------------------------

    def _at(self, delay: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.time + delay, next(self._order), action))

    def _later(self, node: SmallNode, delay: int, action: Callable[[NodeCore], None]) -> None:
        life = node.life

        def act() -> None:
            if node.core is not None and node.life == life and not node.is_stopped:
                action(node.core)
                self._do(node)

        self._at(delay, act)

    def _do(self, node: SmallNode) -> None:
        core = node.core
        assert core is not None
        for effect in core.drain():
            match effect:
                case Persist(slot, data):
                    node.stored[slot] = data
                case Send(to, message):
                    self.sent[node.node_id, to, message.kind] += 1
                    self._send(node.node_id, to, encode(message))
                case Publish(topic, data):
                    self._spread(node.node_id, topic, data)
                case FetchRecord() | Notice():
                    node.told.append(effect)
                case ChallengeDue(challenged):
                    node.told.append(effect)
                    self._later(node, LOADING, self._challenge(node, challenged))
                case RecomputationDue():
                    node.told.append(effect)
                    self._later(node, LOADING, self._recompute(node, effect))
                case PlanReceived(plan, _):
                    node.told.append(effect)
                    self._later(node, LOADING, self._load(node, plan))
                case _:
                    node.told.append(effect)
        deadline = core.next_deadline()
        if deadline is not None and deadline != node.armed:
            node.armed = deadline
            self._later(node, max(0, deadline - self.time), self._tick(node))

    def _load(self, node: SmallNode, plan: Plan) -> Callable[[NodeCore], None]:
        loaded = ShardLoaded(plan.epoch, plan.term, plan.revision, 1)
        return lambda core: core.command(loaded, self.now(node))

    def _challenge(self, node: SmallNode, challenged: NodeId) -> Callable[[NodeCore], None]:
        result = self.challenge(node.node_id, challenged)
        return lambda core: core.command(result, self.now(node))

    def _recompute(self, node: SmallNode, due: RecomputationDue) -> Callable[[NodeCore], None]:
        result = self.recompute(node.node_id, due)
        return lambda core: core.command(result, self.now(node))

    def _tick(self, node: SmallNode) -> Callable[[NodeCore], None]:
        def tick(core: NodeCore) -> None:
            node.armed = -1
            core.tick(self.now(node))

        return tick

    def _spread(self, publisher: NodeId, topic: Any, data: bytes) -> None:
        if self.time - self._published.get((topic, data), -REMEMBERED) < REMEMBERED:
            self.repeated.append(data)
            return
        self._published[topic, data] = self.time
        for node_id, other in self.nodes.items():
            if node_id != publisher and self.gossips and (publisher, node_id) not in self.cut:
                self._hear_gossip(other, topic, data, publisher)

    def _hear_gossip(self, other: SmallNode, topic: Any, data: bytes, sender: NodeId) -> None:
        self._later(other, DELAY, lambda core: core.receive_published(topic, data, sender, self.now(other)))

    def _send(self, sender: NodeId, to: NodeId, body: bytes) -> None:
        other = self.nodes.get(to)
        if other is not None and (sender, to) not in self.cut:
            delay = DELAY + self.far.get(to, 0)
            self._later(other, delay, lambda core: self._hear(other, core, body, sender))

    def _hear(self, node: SmallNode, core: NodeCore, body: bytes, sender: NodeId) -> None:
        try:
            core.receive(decode(body, CORE), sender, self.now(node))
        except RemoteProtocolError as error:
            node.refused.append(error.code)
