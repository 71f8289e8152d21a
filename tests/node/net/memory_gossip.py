"""Gossip and records in memory: the twins of `ports.Gossip` and `ports.RecordStore`.

What is published reaches every other member that is reachable, after a delay; what is stored is where all
find it. Each promises what its port says, checked with the real one by the conformance functions, and no
more: losses and cuts are the test's to make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

import trio

from kvasir_node.ports import Accept, Claim, Gossiped, GossipTopic, JudgeRecord
from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import NodeId

MESSAGE_SIZE_MAX: Final = 64 << 10
RECEIVED_MAX: Final = 2048
REMEMBERED_S: Final = 120.0


class MemoryGossipNetwork:
    """All members of one swarm. ``reaches`` may cut pairs; ``delay_s`` is from member to member."""

    def __init__(self, nursery: trio.Nursery, delay_s: float = 0.05) -> None:
        self._nursery = nursery
        self.delay_s = delay_s
        self.reaches: Callable[[NodeId, NodeId], bool] = lambda _here, _there: True
        self._members: dict[NodeId, MemoryGossip] = {}

    def join(self, node_id: NodeId, accept: Mapping[GossipTopic, Accept]) -> MemoryGossip:
        """A member's gossip; it takes the place of one of that name that was there."""
        member = self._members[node_id] = MemoryGossip(self, node_id, accept)
        return member

    def leave(self, node_id: NodeId) -> None:
        """The member is gone."""
        self._members.pop(node_id, None)

    def spread(self, forwarder: NodeId, topic: GossipTopic, data: bytes) -> None:
        """Have everybody whom the forwarder reaches hear it, after the delay."""
        self._nursery.start_soon(self._deliver, forwarder, topic, data)

    async def _deliver(self, forwarder: NodeId, topic: GossipTopic, data: bytes) -> None:
        await trio.sleep(self.delay_s)
        for node_id, member in sorted(self._members.items()):
            if node_id != forwarder and self.reaches(forwarder, node_id):
                member.hear(topic, data, forwarder)


class MemoryGossip:
    """See `ports.Gossip`."""

    def __init__(
        self, network: MemoryGossipNetwork, node_id: NodeId, accept: Mapping[GossipTopic, Accept]
    ) -> None:
        self._network = network
        self._node_id = node_id
        self._accept = dict(accept)
        self._seen: dict[tuple[GossipTopic, bytes], float] = {}
        self._arriving, self._arrived = trio.open_memory_channel[Gossiped](RECEIVED_MAX)
        self.refused: Counter[NodeId] = Counter()

    def publish(self, topic: GossipTopic, data: bytes) -> bool:
        """See `ports.Gossip`."""
        if not 0 < len(data) <= MESSAGE_SIZE_MAX or not self._accept[topic](data):
            raise LocalProtocolError("no message to spread")
        if self._is_new(topic, data):
            self._network.spread(self._node_id, topic, data)
        return True

    async def receive(self) -> Gossiped:
        """See `ports.Gossip`."""
        return await self._arrived.receive()

    def hear(self, topic: GossipTopic, data: bytes, forwarder: NodeId) -> None:
        """Somebody said this to us; pass it on if it is good and new."""
        if not 0 < len(data) <= MESSAGE_SIZE_MAX or not self._is_new(topic, data):
            return
        if not self._accept[topic](data):
            self.refused[forwarder] += 1
            return
        try:
            self._arriving.send_nowait(Gossiped(topic, data, forwarder))
        except trio.WouldBlock:
            return
        self._network.spread(self._node_id, topic, data)

    def _is_new(self, topic: GossipTopic, data: bytes) -> bool:
        now_s = trio.current_time()
        known_until_s = self._seen.get((topic, data), float("-inf"))
        self._seen[topic, data] = now_s + REMEMBERED_S
        return known_until_s < now_s


class MemoryRecordNetwork:
    """Where records are kept in memory, one place for all members."""

    def __init__(self) -> None:
        self.records: dict[NodeId, bytes] = {}


class MemoryRecordStore:
    """See `ports.RecordStore`."""

    def __init__(self, network: MemoryRecordNetwork, judge: JudgeRecord, size_max: int = 64 << 10) -> None:
        self._network = network
        self._judge = judge
        self._size_max = size_max

    async def put(self, data: bytes) -> None:
        """See `ports.RecordStore`."""
        await trio.lowlevel.checkpoint()
        claim = self._judge(data)
        if claim is None or len(data) > self._size_max:
            raise LocalProtocolError("no valid record")
        stored = self._claim(claim.node_id)
        if stored is not None and stored.order > claim.order:
            raise LocalProtocolError("a newer record is stored already")
        self._network.records[claim.node_id] = data

    async def get(self, node_id: NodeId, timeout_s: float) -> bytes | None:
        """See `ports.RecordStore`."""
        await trio.lowlevel.checkpoint()
        return self._network.records[node_id] if self._claim(node_id) is not None else None

    def _claim(self, node_id: NodeId) -> Claim | None:
        data = self._network.records.get(node_id)
        return None if data is None else self._judge(data)
