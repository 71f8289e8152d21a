"""A swarm of membership cores on an event queue, through the codec: for these tests alone.

The network's faults are plain attributes that a test changes as it goes; a `link` hook decides about single
messages. Every node has its own wall clock. Records are modelled by their names alone: whoever hears of one
has it a moment later.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import Notice, Now, Persist, Send
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Instant, WallTime
from kvasir_proto.membership.core import MembershipCore
from kvasir_proto.membership.events import (
    AnnounceRecord,
    ConnectionLost,
    Leave,
    NoteRecord,
    RecordHint,
    Seed,
)
from kvasir_proto.membership.options import LAN, MembershipOptions
from kvasir_proto.messages.membership import MEMBERSHIP

SECOND = 1_000_000_000
MILLISECOND = 1_000_000
RECORD = b"r" * 32
FETCHING = 20 * MILLISECOND
SPREADING = 300 * MILLISECOND
EPOCH_WALL = 1_800_000_000 * SECOND

NODE_IDS = [node_id_of(random.Random(number).randbytes(32)) for number in range(2100)]


@dataclasses.dataclass
class Node:
    """A running process; `generation` tells the events of one run from those of the next."""

    name: NodeId
    core: MembershipCore
    skew: int
    stored: bytes | None = None
    paused: bool = False
    dead: bool = False
    armed: int | None = None
    inbox: list[tuple[bytes, NodeId]] = dataclasses.field(default_factory=list)


class Swarm:
    """Cores, an event queue and an unreliable network between them."""

    def __init__(self, seed: int, options: MembershipOptions = LAN) -> None:
        self.random = random.Random(seed)
        self.options = options
        self.now = 0
        self.nodes: dict[NodeId, Node] = {}
        self.loss = 0.0
        self.duplicates = 0.0
        self.delay_ns = (MILLISECOND // 4, MILLISECOND)
        self.link: Callable[[NodeId, NodeId], bool] = lambda sender, to: True
        self.hears_of_broken_connections = False
        self.messages = 0
        self.bytes = 0
        self.events: list[tuple[int, NodeId, Any]] = []
        self.keep_events = True
        self._queue: list[tuple[int, int, str, Any]] = []
        self._count = 0

    def start(
        self, name: NodeId, seeds: tuple[NodeId, ...] = (), *, skew: int = 0, stored: bytes | None = None
    ) -> Node:
        core = MembershipCore(
            node_id=name,
            options=self.options,
            stored=stored,
            entropy=random.Random(self.random.random()),
            now=self._clock(skew),
        )
        node = Node(name, core, skew, stored)
        self.nodes[name] = node
        core.command(AnnounceRecord(self.now + 1, RECORD), self._clock(skew))
        self._publish(NoteRecord(name, self.now + 1, RECORD))
        if seeds:
            core.command(Seed(seeds), self._clock(skew))
        self._settle(node)
        return node

    def start_all(
        self, count: int, *, seeds: int = 2, spread_ns: int = SECOND, skew: int = 0
    ) -> list[NodeId]:
        names = NODE_IDS[:count]
        for index, name in enumerate(names):
            wrong = self.random.randint(-skew, skew) if skew else 0
            self.at(index * spread_ns // count, partial(self.start, name, tuple(names[:seeds]), skew=wrong))
        return names

    def at(self, delay_ns: int, action: Callable[[], Any]) -> None:
        self._push(self.now + delay_ns, "call", action)

    def kill(self, name: NodeId) -> None:
        """The process is gone; who was connected hears of it if the transport is to say so."""
        self.nodes[name].dead = True
        if self.hears_of_broken_connections:
            self.break_connections(name)

    def break_connections(self, name: NodeId) -> None:
        for other in sorted(self.nodes):
            node = self.nodes[other]
            if other != name and not node.dead and name in node.core.view():
                node.core.command(ConnectionLost(name), self._clock(node.skew))
                self._settle(node)

    def leave(self, name: NodeId) -> None:
        node = self.nodes[name]
        node.core.command(Leave("done"), self._clock(node.skew))
        self._settle(node)
        node.dead = True

    def pause(self, name: NodeId) -> None:
        self.nodes[name].paused = True

    def resume(self, name: NodeId) -> None:
        """What lay in its sockets comes first, then its timers."""
        node = self.nodes[name]
        node.paused = False
        inbox, node.inbox = node.inbox[:200], []
        for data, sender in inbox:
            self._deliver(node, data, sender)
        node.core.tick(self._clock(node.skew))
        self._settle(node)

    def run(self, duration_ns: int) -> None:
        end = self.now + duration_ns
        queue = self._queue
        while queue and queue[0][0] <= end:
            self.now, _, kind, argument = heapq.heappop(queue)
            if kind == "call":
                argument()
            elif kind == "message":
                to, sender, data = argument
                node = self.nodes.get(to)
                if node is None or node.dead:
                    continue
                if node.paused:
                    node.inbox.append((data, sender))
                else:
                    self._deliver(node, data, sender)
            else:
                node = argument
                if node.armed == self.now and not (node.dead or node.paused):
                    node.armed = None
                    node.core.tick(self._clock(node.skew))
                    self._settle(node)
        self.now = end

    def live(self) -> list[Node]:
        return [self.nodes[name] for name in sorted(self.nodes) if not self.nodes[name].dead]

    def is_whole(self) -> bool:
        """Every live node believes exactly the live ones to be there, and all tables are equal."""
        live = {node.name for node in self.live()}
        return len({node.core.table_digest() for node in self.live()}) == 1 and all(
            {each.node_id for each in node.core.members() if each.state in ("alive", "suspect")}
            == live - {node.name}
            for node in self.live()
        )

    def run_until(self, holds: Callable[[], bool], limit_ns: int, step_ns: int = SECOND // 4) -> float:
        """Seconds until it holds."""
        start = self.now
        while not holds():
            assert self.now - start < limit_ns, f"not within {limit_ns / SECOND} s"
            self.run(step_ns)
        return (self.now - start) / SECOND

    def state(self, of: NodeId, at: NodeId) -> str:
        member = self.nodes[at].core.member(of)
        return "unknown" if member is None else member.state

    def told(self, event_type: type[Any], at: NodeId | None = None) -> Iterator[tuple[int, NodeId, Any]]:
        for when, where, event in self.events:
            if isinstance(event, event_type) and (at is None or where == at):
                yield when, where, event

    def _clock(self, skew: int) -> Now:
        return Now(Instant(self.now), WallTime(EPOCH_WALL + self.now + skew))

    def _push(self, when: int, kind: str, argument: Any) -> None:
        self._count += 1
        heapq.heappush(self._queue, (when, self._count, kind, argument))

    def _deliver(self, node: Node, data: bytes, sender: NodeId) -> None:
        node.core.receive(decode(data, MEMBERSHIP), sender, self._clock(node.skew))
        self._settle(node)

    def _settle(self, node: Node) -> None:
        for effect in node.core.drain():
            if isinstance(effect, Send):
                self._carry(node.name, effect)
            elif isinstance(effect, Persist):
                node.stored = effect.data
            elif isinstance(effect, RecordHint) and effect.node_id in self.nodes:
                fetched = NoteRecord(effect.node_id, effect.sequence, effect.digest)
                self._push(self.now + FETCHING, "call", partial(self._note, node, fetched))
            elif self.keep_events:
                self.events.append((self.now, node.name, effect))
            else:
                assert effect is not None
        deadline = node.core.next_deadline()
        if deadline is not None and (node.armed is None or deadline < node.armed or node.armed < self.now):
            node.armed = max(deadline, self.now)
            self._push(node.armed, "tick", node)

    def _publish(self, record: NoteRecord) -> None:
        for other in self.nodes.values():
            if self.link(record.node_id, other.name):
                self._push(self.now + SPREADING, "call", partial(self._note, other, record))

    def _note(self, node: Node, request: NoteRecord) -> None:
        if not (node.dead or node.paused) and self.nodes[node.name] is node:
            node.core.command(request, self._clock(node.skew))
            self._settle(node)

    def _carry(self, sender: NodeId, effect: Send) -> None:
        data = encode(effect.message)
        self.messages += 1
        self.bytes += len(data)
        for _ in range(2 if self.duplicates and self.random.random() < self.duplicates else 1):
            if self.loss and self.random.random() < self.loss:
                continue
            if self.link(sender, effect.to):
                delay = self.random.randint(*self.delay_ns)
                self._push(self.now + delay, "message", (effect.to, sender, data))


def notices(swarm: Swarm, event: str) -> list[NodeId]:
    return [where for _, where, each in swarm.told(Notice) if each.event == event]
