"""Everything between the nodes of one swarm, started together: dialler, streams, gossip, records, discovery.

The composition of this package's parts for one swarm (`ports.SwarmNetwork`), so that the composition root
need not know libp2p's order of things: services begin before anybody is dialled, and discovery last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from kvasir_node.net.core_stream import CoreStreams
from kvasir_node.net.dialler import Dialler
from kvasir_node.net.discovery import Discovery
from kvasir_node.net.gossip import GossipMesh
from kvasir_node.net.host import Libp2pHost
from kvasir_node.net.idle_connections import IdleConnections
from kvasir_node.net.lan import LanDiscovery
from kvasir_node.net.members_file import MembersFile
from kvasir_node.net.record_store import DhtRecordStore
from kvasir_node.ports import Accept, GossipTopic, JudgeRecord
from kvasir_proto.ids import NodeId, SwarmDigest

if TYPE_CHECKING:
    import random

_FLUSH_S: Final = 0.5
"""Gossip says when it hands a message on, not when it has left; a goodbye gets this long."""


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """What the configuration and the home say: whom we were told of, where members are remembered, mDNS."""

    told: tuple[str, ...]
    members_file: Path
    lan: bool


class Libp2pSwarmNetwork:
    """See `ports.SwarmNetwork`."""

    def __init__(
        self,
        host: Libp2pHost,
        swarm: SwarmDigest,
        *,
        accept: Mapping[GossipTopic, Accept],
        judge: JudgeRecord,
        options: NetworkOptions,
        entropy: random.Random,
    ) -> None:
        self._topics = tuple(accept)
        self._dialler = Dialler(host)
        self.streams = CoreStreams(host, self._dialler)
        self.gossip = GossipMesh(host, swarm, accept)
        self._idle_connections = IdleConnections(host, self._gossip_neighbours)
        self.record_store = DhtRecordStore(host, self._dialler, swarm, judge)
        self._discovery = Discovery(
            host,
            self._dialler,
            told=options.told,
            remembered=MembersFile(options.members_file),
            lan=LanDiscovery(host.node_id, swarm, host.addresses()) if options.lan else None,
            entropy=entropy,
        )

    async def start(self, nursery: trio.Nursery) -> None:
        """Run all of it in this nursery; returns when it is running."""
        await nursery.start(self.gossip.run)
        await nursery.start(self.record_store.run)
        await nursery.start(self.streams.run)
        await nursery.start(self._idle_connections.run)
        await nursery.start(self._discovery.run)

    def _gossip_neighbours(self) -> frozenset[NodeId]:
        return frozenset(each for topic in self._topics for each in self.gossip.neighbours(topic))

    def candidates(self) -> tuple[NodeId, ...]:
        """See `ports.SwarmNetwork`."""
        return self._discovery.candidates()

    async def wait_candidates(self) -> None:
        """See `ports.SwarmNetwork`."""
        await self._discovery.wait_news()

    def note_record(self, node_id: NodeId, addresses: Sequence[str]) -> None:
        """See `ports.SwarmNetwork`."""
        self._discovery.note_record(node_id, addresses)

    def note_gone(self, node_id: NodeId) -> None:
        """See `ports.SwarmNetwork`."""
        self._discovery.note_gone(node_id)

    async def reach(self, node_id: NodeId) -> None:
        """See `ports.SwarmNetwork`."""
        await self._dialler.reach(node_id, insist=True)

    async def flush(self) -> None:
        """See `ports.SwarmNetwork`."""
        await self._discovery.save()
        await trio.sleep(_FLUSH_S)
