"""How published bytes reach every node: a modelled gossipsub mesh, with the cost that was measured.

Each node keeps about six neighbours. What it publishes, or hears for the first time, costs it 8 to 14 ms of
one core (measured with py-libp2p, at a mesh of 7, everything included), one message after the other, and
then goes to its neighbours over reliable streams: late where packets are lost, not at all where the path is
cut. A node with too much waiting drops what comes, as the library's queues do. What a node missed it
fetches: records are told apart by digest, from the member that named one or from the DHT. Nothing here
reads what it carries.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from kvasir_node.sim.network import Network
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, milliseconds, seconds


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """Gossipsub's degree and bounds, and what one message costs each node.

    `repair_interval` is gossipsub's heartbeat: a node that lost neighbours finds new ones at the next.
    `waiting_max` is how much undone work a node may have before it drops messages.
    """

    degree: int
    degree_low: int
    degree_high: int
    cpu_min: Duration
    cpu_max: Duration
    waiting_max: Duration
    repair_interval: Duration
    fetch_retention: int

    def describe(self) -> str:
        """One sentence for the output: what is modelled here and not real."""
        return (
            f"modelled: degree {self.degree}, {self.cpu_min // 10**6} to {self.cpu_max // 10**6} ms of CPU "
            "for each message and node (measured with py-libp2p), a delay a hop, lost packets sent again"
        )


MEASURED: Final = MeshOptions(
    degree=6,
    degree_low=4,
    degree_high=12,
    cpu_min=milliseconds(8),
    cpu_max=milliseconds(14),
    waiting_max=milliseconds(350),
    repair_interval=seconds(1),
    fetch_retention=1 << 16,
)


class _Publication:
    """One message on its way: when each node gets it at the earliest, and who has it."""

    __slots__ = ("best", "data", "done", "origin", "source", "topic")

    def __init__(self, origin: int, topic: str, data: bytes) -> None:
        self.origin = origin
        self.topic = topic
        self.data = data
        self.best: dict[int, int] = {}
        self.source: dict[int, int] = {}
        self.done: set[int] = set()


Schedule = Callable[[int, Callable[..., None], tuple[object, ...]], None]
"""(real time, what to call, its arguments)."""
Deliver = Callable[[int, int, str, bytes], None]
"""(node, the neighbour it came from, topic, bytes): hand it to the node's core."""


class Mesh:
    """Carries publications between the nodes that are up. Nodes are numbers from 0."""

    def __init__(
        self, options: MeshOptions, network: Network, randomness: Random, schedule: Schedule, deliver: Deliver
    ) -> None:
        self.options = options
        self.published_count = 0
        self.dropped_count = 0
        self.bytes_count = 0
        self._network = network
        self._random = randomness
        self._schedule = schedule
        self._deliver = deliver
        self._neighbours: dict[int, set[int]] = {}
        self._in_order: dict[int, list[int]] = {}
        """The neighbours of a node in order, until they change."""
        self._free_at: list[int] = []
        self._repair_at: int | None = None
        self._by_digest: OrderedDict[bytes, bytes] = OrderedDict()
        self._newest: dict[NodeId, bytes] = {}

    def add_node(self) -> None:
        """One node more; it takes part after `connect`."""
        self._free_at.append(0)

    def connect(self, node: int, now: int) -> None:
        """The node is up and looks for neighbours."""
        self._neighbours.setdefault(node, set())
        self._free_at[node] = now
        self._fill(node)

    def disconnect(self, node: int, now: int) -> None:
        """The node is gone; those it leaves behind mend the mesh at their next heartbeat."""
        self._in_order.pop(node, None)
        for other in self._neighbours.pop(node, ()):
            self._neighbours[other].discard(node)
            self._in_order.pop(other, None)
        if self._repair_at is None:
            self._repair_at = now + self.options.repair_interval

    def neighbours_of(self, node: int) -> list[int]:
        """Whom the node has connections with."""
        known = self._in_order.get(node)
        if known is None:
            known = self._in_order[node] = sorted(self._neighbours.get(node, ()))
        return known

    def publish(self, now: int, node: int, publisher: NodeId, topic: str, data: bytes) -> None:
        """Spread these bytes from this node to all that can be reached. The node itself is not told."""
        if self._repair_at is not None and now >= self._repair_at:
            self._repair()
        self.published_count += 1
        if topic == "records":
            self._remember(publisher, data)
        publication = _Publication(node, topic, data)
        publication.best[node] = now
        self._arrive(now, node, publication)

    def _remember(self, publisher: NodeId, data: bytes) -> None:
        self._by_digest[hashlib.sha256(data).digest()] = data
        self._newest[publisher] = data
        while len(self._by_digest) > self.options.fetch_retention:
            self._by_digest.popitem(last=False)

    def _arrive(self, now: int, node: int, publication: _Publication) -> None:
        """A node has the bytes, and works on them as soon as it is done with those before."""
        if node in publication.done or node not in self._neighbours:
            return
        publication.done.add(node)
        begin = max(now, self._free_at[node])
        if begin - now > self.options.waiting_max:
            self.dropped_count += 1
            return
        cost = self.options.cpu_min + int(
            self._random.random() * (self.options.cpu_max - self.options.cpu_min)
        )
        self._free_at[node] = begin + cost
        self._schedule(begin + cost, self._process, (node, publication))

    def _process(self, now: int, node: int, publication: _Publication) -> None:
        if node not in self._neighbours:
            return
        best, done, network = publication.best, publication.done, self._network
        size, is_whole = len(publication.data), network.is_whole
        for other in self.neighbours_of(node):
            if not is_whole and network.is_cut(node, other):
                continue
            self.bytes_count += size
            if other in done:
                continue
            at = now + network.delay()
            known = best.get(other)
            if known is None or at < known:
                best[other] = at
                publication.source[other] = node
                self._schedule(at, self._arrive, (other, publication))
        if node != publication.origin:
            self._deliver(node, publication.source[node], publication.topic, publication.data)

    def _fill(self, node: int) -> None:
        """Find neighbours: first among those that want some; up to the lowest degree among all others."""
        self._take(node, self.options.degree, self.options.degree)
        self._take(node, self.options.degree_low, self.options.degree_high)

    def _take(self, node: int, wanted: int, others_below: int) -> None:
        mine = self._neighbours[node]
        if len(mine) >= wanted:
            return
        candidates = [
            other
            for other, theirs in self._neighbours.items()
            if len(theirs) < others_below and other != node and other not in mine
        ]
        for other in self._random.sample(candidates, min(wanted - len(mine), len(candidates))):
            mine.add(other)
            self._neighbours[other].add(node)
            self._in_order.pop(other, None)
        self._in_order.pop(node, None)

    def _repair(self) -> None:
        self._repair_at = None
        for node in sorted(self._neighbours):
            if len(self._neighbours[node]) < self.options.degree_low:
                self._fill(node)

    # --- fetching -------------------------------------------------------------------------------------------

    def find(self, node_id: NodeId, digest: bytes) -> bytes | None:
        """The published record with this digest, or else the newest of that node; None if there is none."""
        return self._by_digest.get(digest) or self._newest.get(node_id)
