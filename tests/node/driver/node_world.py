"""Whole nodes in memory: the real duties and cores, with twins for network, engines and disk.

What is left out is what has tests of its own: libp2p, processes, files. Time is trio's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import trio

from kvasir_node.driver.backbone_duty import BackboneSettings
from kvasir_node.driver.holder_duty import HolderSettings
from kvasir_node.driver.node_duty import ModelOnDisk, NodeDuty, NodeSettings, TakeManifest
from kvasir_node.kernel_in_use import KernelInUse
from kvasir_node.model.store import StoredModel
from kvasir_node.net.core_stream import CoreStreams
from kvasir_node.net.dialler import Dialler
from kvasir_node.ports import Claim
from kvasir_node.swarm_files import KnownSwarm
from kvasir_proto.admission import Invite
from kvasir_proto.effects import Slot
from kvasir_proto.errors import ConfigurationInvalid, KvasirError, ModelUnusable
from kvasir_proto.gossip_rules import is_announcement, is_record, record_in_store
from kvasir_proto.ids import ModelDigest, NodeId, SwarmDigest
from kvasir_proto.node_core import LAN
from kvasir_proto.swarm_manifest import FoundedSwarm, open_swarm_manifest, sign_swarm_manifest
from tests.node.driver.memory_network import MemoryHost
from tests.node.driver.twins import (
    Life,
    MemoryMeasurements,
    TwinEngines,
    World,
    node_key,
    node_of,
    now,
    wall_time,
)
from tests.node.net.memory_gossip import (
    MemoryGossip,
    MemoryGossipNetwork,
    MemoryRecordNetwork,
    MemoryRecordStore,
)
from tests.proto.small_swarm import found

SAVE_S: Final = 0.002


class TwinNetwork:
    """What is between the nodes: the real streams and dialler on a network in memory, twins for the rest."""

    def __init__(self, host: MemoryHost, gossip: MemoryGossip, records: MemoryRecordStore) -> None:
        self._dialler = Dialler(host)
        self.streams = CoreStreams(host, self._dialler)
        self.gossip = gossip
        self.record_store = records
        self._candidates: dict[NodeId, None] = {}
        self._news = trio.Event()

    def learn(self, node_id: NodeId, addresses: tuple[str, ...]) -> None:
        """This node was told of from outside."""
        self._dialler.learn(node_id, addresses, "told")
        self._candidates[node_id] = None
        self._news.set()

    def candidates(self) -> tuple[NodeId, ...]:
        """See `ports.SwarmNetwork`."""
        return tuple(self._candidates)

    async def wait_candidates(self) -> None:
        """See `ports.SwarmNetwork`."""
        await self._news.wait()
        self._news = trio.Event()

    def note_record(self, node_id: NodeId, addresses: Any) -> None:
        """See `ports.SwarmNetwork`."""
        self._dialler.learn(node_id, addresses, "record")

    def note_gone(self, node_id: NodeId) -> None:
        """See `ports.SwarmNetwork`."""
        self._dialler.forget(node_id)

    async def reach(self, node_id: NodeId) -> None:
        """See `ports.SwarmNetwork`."""
        await self._dialler.reach(node_id)

    async def flush(self) -> None:
        """See `ports.SwarmNetwork`."""
        await trio.sleep(0.01)


class NodeWorld(World):
    """Nodes of one swarm; number 0 founded it."""

    def __init__(self, nursery: trio.Nursery, model: StoredModel, directory: Path, **rules: Any) -> None:
        super().__init__(nursery, model, directory)
        self.gossip = MemoryGossipNetwork(nursery)
        self.records = MemoryRecordNetwork()
        manifest = found(node_key(0)).manifest
        digest = ModelDigest(model.manifest.digest())
        self.signed_manifest = sign_swarm_manifest(
            replace(manifest, model_digest=digest, **rules), node_key(0)
        )
        self.swarm: FoundedSwarm = open_swarm_manifest(self.signed_manifest)
        self.nodes: list[TwinNode] = []

    def start(self, *numbers: int, **settings: Any) -> list[TwinNode]:
        """Nodes that live; all but the founder enter by the founder's address."""
        added = [TwinNode(self, number, **settings) for number in numbers]
        self.nodes += added
        for each in added:
            each.start()
        return added

    @property
    def living(self) -> list[TwinNode]:
        """Nodes that run."""
        return [each for each in self.nodes if each.is_up]

    @property
    def backbone(self) -> TwinNode | None:
        """The node that reigns, by its own word."""
        reigning = [each for each in self.living if each.reigns]
        return reigning[0] if len(reigning) == 1 else None

    def is_ready(self) -> bool:
        """Whether one node reigns and serves, and every other knows its part."""
        backbone = self.backbone
        return (
            backbone is not None
            and backbone.duty.backbone.state()[0] == "ready"
            and all(each.duty.state()[0] == "ready" for each in self.living)
        )


class TwinNode:
    """One node with a disk that outlives it."""

    def __init__(self, world: NodeWorld, number: int, **settings: Any) -> None:
        self.world = world
        self.number = number
        self.key = node_key(number)
        self.node_id = node_of(self.key)
        self.host = world.network.host(self.node_id)
        self.engines = TwinEngines(world, self.key, lambda: world.swarm.digest)
        self.slots: dict[Slot, bytes] = {}
        self.measurements = MemoryMeasurements()
        self.known: KnownSwarm | None = None
        if number == 0:
            self.known = KnownSwarm(world.swarm, world.signed_manifest)
        self.generation = 0
        self.life: Life | None = None
        self.duty: NodeDuty
        self.network: TwinNetwork | None = None
        self.settings = settings
        self.take_manifest: TakeManifest | None = None
        """With one, it has no model before this took it in."""
        self.has_model = True

    # -- `HomeFiles` -------------------------------------------------------------------------------

    def load_swarm(self) -> KnownSwarm | None:
        """See `HomeFiles`."""
        return self.known

    def save_swarm(self, signed_manifest: bytes) -> None:
        """See `HomeFiles`."""
        self.known = KnownSwarm(open_swarm_manifest(signed_manifest), signed_manifest)

    def load_invite(self) -> Invite | None:
        """See `HomeFiles`."""
        return None

    def claim_slots(self, swarm: SwarmDigest, node_id: NodeId) -> None:
        """See `HomeFiles`."""
        assert (swarm, node_id) == (self.world.swarm.digest, self.node_id)

    def load_slots(self) -> dict[Slot, bytes]:
        """See `HomeFiles`."""
        return dict(self.slots)

    def slot_damaged(self, slot: Slot, reason: str) -> KvasirError:
        """See `HomeFiles`."""
        return ConfigurationInvalid(f"slot-{slot} is damaged: {reason}")

    async def _save(self, slot: Slot, data: bytes) -> None:
        await trio.sleep(SAVE_S)
        self.slots[slot] = data

    def _next_generation(self) -> int:
        self.generation += 1
        return self.generation

    async def _find_model(self, _digest: bytes) -> ModelOnDisk:
        await trio.lowlevel.checkpoint()
        if not self.has_model:
            raise ModelUnusable("it is not here")
        return ModelOnDisk(self.world.model, has_experts=True)

    async def _find_backbone_file(self, model: StoredModel) -> Path:
        await trio.lowlevel.checkpoint()
        return model.backbone_path

    async def _start_network(self, nursery: trio.Nursery, swarm: SwarmDigest) -> TwinNetwork:
        world = self.world
        accept: Mapping[str, Any] = {
            "records": lambda data: is_record(data, world.swarm),
            "terms": is_announcement,
        }

        def judge(data: bytes) -> Claim | None:
            opened = record_in_store(data, swarm, wall_time())
            return None if opened is None else Claim(opened.said.node_id, opened.said.sequence)

        gossip = world.gossip.join(self.node_id, accept)  # type: ignore[arg-type]
        network = TwinNetwork(self.host, gossip, MemoryRecordStore(world.records, judge))
        await nursery.start(network.streams.run)
        for each in world.nodes[:1]:
            if each is not self:
                network.learn(each.node_id, each.host.addresses())
        self.network = network
        return network

    # -- for the test ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a life with what is on the disk."""
        founder = self.world.nodes[0] if self.world.nodes else self
        memory_bytes = 1 << 30
        defaults: dict[str, Any] = {
            "bootstrap": founder.host.addresses() if founder is not self else (),
            "core": LAN,
            "ranks": ("backbone", "output", "bulk"),
            "nominees": tuple(node_of(node_key(each)) for each in range(7)),
            "memory_bytes": memory_bytes,
            "kernels": (KernelInUse("ggml-cpu", "auto", "twin", "build"),),
            "holder": HolderSettings("127.0.0.1", 0, 1, memory_bytes),
            "backbone": BackboneSettings(64, 32, 1, "none", memory_bytes, standby=True),
        }
        self.duty = NodeDuty(
            node_key=self.key,
            files=self,
            save_slot=self._save,
            host=self.host,
            start_network=self._start_network,
            find_model=self._find_model,
            find_backbone_file=self._find_backbone_file,
            start_engine=lambda _digest: self.engines,
            next_generation=self._next_generation,
            measurements=self.measurements,
            is_held_back=lambda: None,
            settings=NodeSettings(**defaults | self.settings),
            entropy=random.Random(self.number),
            now=now,
            wall_time=wall_time,
            take_manifest=self.take_manifest,
        )
        self.world.network.serve(self.node_id, self.duty.serve_stream)
        self.life = self.world.live(self.duty.run)

    @property
    def is_up(self) -> bool:
        """Whether it runs."""
        return self.life is not None and not self.life.has_ended

    @property
    def reigns(self) -> bool:
        """Whether it is the backbone, as far as it knows."""
        try:
            return bool(self.duty.backbone.report()["is_backbone"])
        except Exception:  # it has not entered its swarm yet
            return False

    async def crash(self) -> None:
        """End as if killed: nobody is told, streams and engines just end."""
        assert self.life is not None
        self.world.network.drop(self.node_id)
        for engine in self.engines.all:
            engine.die()
        await self.life.end()

    async def leave(self) -> None:
        """End in good order, as the daemon does it."""
        assert self.life is not None
        await self.duty.leave()
        await self.life.end()
        self.world.network.drop(self.node_id)
