"""A backbone's duty among twins: its core, which the test speaks for, and the holders of its plans.

A holder here is what a backbone sees of one: a place in the network that answers `DataRequest`, an engine,
and a word about what it serves. Of the core the twin plays what the duty sees: leases that are renewed,
plans, and offers that are made again when a holder has failed.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import trio
from cryptography.hazmat.primitives.serialization import Encoding

from kvasir_node.driver.backbone_duty import BackboneDuty, BackboneSettings
from kvasir_node.driver.conversation import hear, refuse, tell
from kvasir_node.engine.certificate import EngineKey, verify_engine_certificate
from kvasir_proto.capability import CapabilityRecord, held_shard
from kvasir_proto.certificate import bind_engine
from kvasir_proto.election.requests import LeaseHeld, LeaseLost, TermFollowed
from kvasir_proto.election.states import Role
from kvasir_proto.errors import KvasirError, ModelUnusable, RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import after, milliseconds
from kvasir_proto.manifest import ShardSet
from kvasir_proto.membership.events import MemberChanged
from kvasir_proto.messages.engine import ExpectDialler, TrunkLoaded
from kvasir_proto.messages.membership import MemberState
from kvasir_proto.messages.swarm import DataGrant, DataRequest
from kvasir_proto.node_core import HolderFailed, HolderReady, HolderRefused, NodeCommand, PlanReceived
from kvasir_proto.placement.plan import Plan, make_plan, plan_of
from kvasir_proto.records import RecordChanged
from kvasir_proto.swarm_manifest import open_swarm_manifest, sign_swarm_manifest
from kvasir_proto.term_proof import ProvenTerm, cast_vote, founding_electorate, make_term_proof
from tests.node.driver.memory_core import MemoryCore
from tests.node.driver.memory_network import MemoryStream
from tests.node.driver.twins import (
    Life,
    TwinEngine,
    TwinEngines,
    World,
    node_key,
    node_of,
    now,
    until,
    wall_time,
)
from tests.proto.small_swarm import capability, found

LEASE: Final = milliseconds(1350)
"""Nine tenths of the LAN preset: what the core tells its driver."""
RENEWAL_S: Final = 0.4
OFFER_S: Final = 0.05
"""From an offer to its answer, where nothing has to be loaded."""
LOAD_S: Final = 0.5


class TwinCore(MemoryCore):
    """The core of a backbone: an offer is made again when a holder has failed."""

    def __init__(self, backbone: TwinBackbone) -> None:
        super().__init__(backbone.node_id, backbone.swarm)
        self._backbone = backbone

    def command(self, request: NodeCommand) -> None:
        """See `ports.SwarmCore`."""
        super().command(request)
        if isinstance(request, HolderFailed):
            self._backbone.offer(request.node_id)


class TwinHolder:
    """A node that holds what a backbone plans for it, until the test says otherwise."""

    def __init__(self, backbone: TwinBackbone, number: int) -> None:
        self.backbone = backbone
        self.key = node_key(number)
        self.node_id = node_of(self.key)
        self.world = backbone.world
        self.host = self.world.network.host(self.node_id)
        self.holding: ShardSet | None = None
        """What its engine serves."""
        self.refusal: tuple[str, str] | None = None
        """What it answers to offers instead: a code and a reason."""
        self.load_s = LOAD_S
        self.is_up = True
        self.grant_error: RemoteProtocolError | None = None
        self.granted_to: list[bytes] = []
        """The certificate of each engine that it was asked to expect."""
        self._sequence = 0
        self.engine = self._new_engine()
        backbone.core.records[self.node_id] = self.record(None)
        self.world.network.serve(self.node_id, self._serve)

    def _new_engine(self, key: Any = None) -> TwinEngine:
        engine_key = EngineKey.generate()
        binding = bind_engine(key or self.key, self.backbone.swarm.digest, engine_key.public_der, "worker", 1)
        certificate = engine_key.certificate(binding).public_bytes(Encoding.DER)
        engine = TwinEngine(self.world, self.node_id, "worker", certificate, self.world.next_pid())
        engine.address = ("127.0.0.1", 5000 + engine.process.pid)
        self.world.engines.append(engine)
        return engine

    @property
    def grants(self) -> int:
        """How often it was asked to expect a connection, and did."""
        return len(self.granted_to)

    def pose_as(self, number: int) -> None:
        """Show from now on an engine's certificate that another node signed."""
        self.engine = self._new_engine(node_key(number))

    def restart_engine(self) -> None:
        """Its engine ends, and another one holds the same shard."""
        self.backbone.engine.connected.pop(self.node_id, None)
        self.engine.die()
        self.engine = self._new_engine()

    def record(self, plan: Plan | None, **changes: Any) -> CapabilityRecord:
        """A new record that says what it holds, or that it holds nothing."""
        self._sequence += 1
        held = None
        if plan is not None:
            shard = plan.shard_of(self.node_id)
            held = held_shard(plan.epoch, plan.term, plan.revision, bytes(32), shard)
        addresses = changes.pop("addresses", self.host.addresses())
        return capability(self.node_id, sequence=self._sequence, addresses=addresses, held=held, **changes)

    def publish(self, plan: Plan | None, **changes: Any) -> None:
        """Tell everybody what it holds."""
        record = self.record(plan, **changes)
        self.backbone.core.records[self.node_id] = record
        self.backbone.duty.take_event(RecordChanged(self.node_id, record, bytes(32)))

    async def answer(self, plan: Plan) -> tuple[str, str] | None:
        """Load what this plan gives it; a refusal, or None when it serves."""
        await trio.sleep(OFFER_S)
        if self.refusal is not None:
            return self.refusal
        shard = plan.shard_of(self.node_id)
        if shard != self.holding:
            await trio.sleep(self.load_s)
            self.holding = shard
        return None

    async def _serve(self, node_id: NodeId, stream: MemoryStream) -> None:
        try:
            message = await hear(stream)
            assert isinstance(message, DataRequest)
            self.backbone.core.check_proof(message.proof, node_id)
            verify_engine_certificate(
                message.engine_certificate, self.backbone.swarm.digest, node_id, "backbone"
            )
            if self.grant_error is not None:
                raise self.grant_error
            self.granted_to.append(message.engine_certificate)
            token = secrets.token_bytes(16)
            self.engine.expected[token] = ExpectDialler(
                token, message.engine_certificate, "backbone", node_id, now() + 10_000_000_000
            )
            await tell(stream, DataGrant(*self.engine.address, token, self.engine.certificate))
        except RemoteProtocolError as error:
            await refuse(stream, error)


class TwinBackbone:
    """A node whose core is elected when the test says so."""

    def __init__(self, world: World, number: int = 0, rules: Any = None, **settings: Any) -> None:
        self.world = world
        self.key = node_key(number)
        self.node_id = node_of(self.key)
        manifest = replace(found(self.key, electorate="pinned").manifest, **(rules or {}))
        self.swarm = open_swarm_manifest(sign_swarm_manifest(manifest, self.key))
        self.host = world.network.host(self.node_id)
        self.engines = TwinEngines(world, self.key, lambda: self.swarm.digest)
        self.core = TwinCore(self)
        self.generation = 0
        self.generation_error: KvasirError | None = None
        self.backbone_file_error: ModelUnusable | None = None
        defaults: dict[str, Any] = {
            "n_ctx": 64,
            "n_ubatch": 32,
            "n_threads": 1,
            "device": "none",
            "memory_bytes": 1 << 30,
            "standby": True,
        }
        self.settings = BackboneSettings(**defaults | settings)
        self.holders: dict[NodeId, TwinHolder] = {}
        self.plan: Plan | None = None
        self.term = ProvenTerm(0, 0, self.node_id)
        self._renewing = trio.CancelScope()
        self.trunks: list[TrunkLoaded] = []
        """What its engines said of their trunks, one after the other."""
        self.duty = BackboneDuty(
            node_key=self.key,
            swarm=self.swarm,
            model=world.model,
            find_backbone_file=self._find_backbone_file,
            core=self.core,
            host=self.host,
            start_engine=self.engines,
            next_generation=self._next_generation,
            settings=self.settings,
            note_trunk=self.trunks.append,
            now=now,
            wall_time=wall_time,
        )
        self.core.hear = self.duty.take_event
        self.life: Life = world.live(self.duty.run)

    def _next_generation(self) -> int:
        if self.generation_error is not None:
            raise self.generation_error
        self.generation += 1
        return self.generation

    async def _find_backbone_file(self) -> Path:
        if self.backbone_file_error is not None:
            raise self.backbone_file_error
        return self.world.model.backbone_path

    # -- what a test asks --------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """The duty's word for how it is."""
        return self.duty.state()[0]

    @property
    def reason(self) -> str:
        """And its reason."""
        return self.duty.state()[1]

    @property
    def engine(self) -> TwinEngine:
        """The engine started last."""
        return self.engines.last

    def line(self, holder: TwinHolder) -> dict[str, Any]:
        """A holder's line in the report."""
        return next(each for each in self.duty.report()["holders"] if each["node_id"] == holder.node_id)

    def failed(self, holder: TwinHolder) -> int:
        """How often the core was told that this holder has failed."""
        return sum(each.node_id == holder.node_id for each in self.core.commanded(HolderFailed))

    # -- what a core does --------------------------------------------------------------------------

    def add_holders(self, n_holders: int, first: int = 1) -> list[TwinHolder]:
        """Holders that wait for a plan."""
        added = [TwinHolder(self, first + each) for each in range(n_holders)]
        self.holders |= {each.node_id: each for each in added}
        return added

    def prove(self, term: int, backbone: NodeId | None = None) -> tuple[ProvenTerm, bytes]:
        """A term and its proof."""
        electorate = founding_electorate(self.key.public_key().public_bytes_raw(), "pinned")
        proven = ProvenTerm(0, term, backbone or self.node_id)
        vote = cast_vote(self.key, self.swarm.digest, electorate, proven)
        return proven, make_term_proof(electorate, proven, [vote])

    def elect(self, term: int = 1, *, has_proof: bool = True, renews: bool = True) -> None:
        """This node is the backbone of the term from now on, and its lease is renewed."""
        self.term, proof = self.prove(term)
        self.core.change(fence=self.term, role=Role.BACKBONE)
        if has_proof:
            self.duty.take_event(TermFollowed(self.term, proof))
        self._renewing.cancel()
        self._renewing = trio.CancelScope()
        self.renew()
        if renews:
            self.world.nursery.start_soon(self._renew, self._renewing)

    def renew(self) -> None:
        """A quorum has granted the lease anew."""
        until_instant = after(now(), LEASE)
        self.core.change(lease_until=until_instant)
        self.duty.take_event(LeaseHeld(self.term.epoch, self.term.term, until_instant))

    async def _renew(self, scope: trio.CancelScope) -> None:
        with scope:
            while True:
                await trio.sleep(RENEWAL_S)
                self.renew()

    def lose(self, reason: str = "no quorum", *, may_return: bool = False) -> None:
        """The lease has run out, for good or until its electors grant it again."""
        self._renewing.cancel()
        self.core.change(lease_until=None, role=Role.ELECTED)
        self.duty.take_event(LeaseLost(self.term.epoch, self.term.term, reason, may_return))

    def depose(self, term: int, number: int = 99) -> None:
        """Another node is the backbone of that term."""
        self._renewing.cancel()
        proven, proof = self.prove(term, node_of(node_key(number)))
        self.core.change(fence=proven, role=Role.FOLLOWER, lease_until=None)
        self.duty.take_event(TermFollowed(proven, proof))

    def make(self, *nodes: TwinHolder | TwinBackbone, holders: int | None = None) -> Plan:
        """The next plan of the term for these nodes."""
        manifest = self.world.model.manifest
        return make_plan(
            manifest.moe_layers,
            manifest.n_expert,
            [each.node_id for each in nodes],
            epoch=self.term.epoch,
            term=self.term.term,
            revision=self.plan.revision + 1 if self.plan is not None else 1,
            holders=holders,
        )

    def make_of(self, *holders: tuple[TwinHolder | TwinBackbone, ...]) -> Plan:
        """The next plan: expert e of every layer is held by the nodes in ``holders[e]``, primary first."""
        manifest = self.world.model.manifest
        assert len(holders) == manifest.n_expert
        layers = manifest.moe_layers
        return plan_of(
            [[tuple(each.node_id for each in nodes) for nodes in holders] for _ in layers],
            layers,
            epoch=self.term.epoch,
            term=self.term.term,
            revision=self.plan.revision + 1 if self.plan is not None else 1,
            missing=[""] * len(layers),
            degraded="",
        )

    def issue(self, plan: Plan) -> Plan:
        """This plan is in force, and offered to all it names."""
        self.plan = plan
        self.core.change(plan=plan)
        self.duty.take_event(PlanReceived(plan, b"signed"))
        for node_id in plan.nodes:
            self.offer(node_id)
        return plan

    def offer(self, node_id: NodeId) -> None:
        """Offer the plan in force to one holder, whose answer is told."""
        if node_id in self.holders and self.plan is not None:
            self.world.nursery.start_soon(self._offer, self.holders[node_id], self.plan)

    async def _offer(self, holder: TwinHolder, plan: Plan) -> None:
        if not holder.is_up or node_of(holder.key) not in plan.nodes:
            return
        refusal = await holder.answer(plan)
        if plan is not self.plan or not holder.is_up:
            return
        if refusal is not None:
            self.duty.take_event(HolderRefused(holder.node_id, *refusal))
        else:
            self.duty.take_event(HolderReady(holder.node_id, plan, 1000))

    def see(self, holder: TwinHolder, state: MemberState) -> None:
        """Membership says this of a holder."""
        if state in ("dead", "left"):
            holder.is_up = False
            self.world.network.drop(holder.node_id)
        self.duty.take_event(MemberChanged(holder.node_id, state, cast(Any, "ok"), "", None))


async def serving_backbone(
    world: World, n_holders: int, *, holders: int | None = None, **settings: Any
) -> tuple[TwinBackbone, list[TwinHolder]]:
    """A backbone in its first term with so many holders, all of them serving."""
    backbone = TwinBackbone(world, **settings)
    added = backbone.add_holders(n_holders)
    backbone.elect()
    backbone.issue(backbone.make(*added, holders=holders))
    await until(lambda: backbone.state == "ready")
    return backbone, added
