"""The daemon's own core in a simulation: how nodes differ, what their engines do, when they are one swarm.

Nodes are unlike: memory and speed differ, every seventh adds in F16, every third may be backbone. An engine
is a delay that depends on how much it has to load. What a whole swarm has to be is said here once, in terms
of what nodes show (`NodeView`). It makes no fault and checks no invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from random import Random
from typing import Any, Final

from kvasir_node.sim.byzantine import Liar
from kvasir_node.sim.checkers import (
    Checker,
    ElectoratesFollow,
    FencesNeverFall,
    GoneRecordsStayGone,
    IncarnationsNeverFall,
    NothingOverflows,
    NothingRaises,
    OneBackboneATerm,
    OneLeaseAtATime,
    OutputRanksAreF32,
    PlansAreTheBackbones,
    TermsAreProven,
)
from kvasir_node.sim.formed import form
from kvasir_node.sim.simulation import SimulationOptions
from kvasir_node.sim.swarm import Adversary, NodeIdentity, SimNode, Swarm, key_of
from kvasir_proto.capability import CAPABILITY, CapabilityRecord
from kvasir_proto.effects import Now, Slot
from kvasir_proto.election.readiness import PRE_VOTE
from kvasir_proto.election.requests import ElectorateChanged
from kvasir_proto.election.states import Role
from kvasir_proto.election.succession import OPEN_MIN
from kvasir_proto.ids import ModelDigest, NodeId, node_id_of
from kvasir_proto.instants import Duration, milliseconds
from kvasir_proto.limits import Rank
from kvasir_proto.membership.events import ConnectionLost, Leave, MemberChanged, Seed
from kvasir_proto.messages import Family
from kvasir_proto.messages.core import CORE
from kvasir_proto.node_core import LAN, NodeCore, NodeView, PlanReceived, ShardLoaded, ShardRefused
from kvasir_proto.placement.inventory import ModelShape
from kvasir_proto.placement.plan import PLAN, Plan
from kvasir_proto.records import Equivocation
from kvasir_proto.swarm_manifest import SwarmManifest, Thresholds, open_swarm_manifest, sign_swarm_manifest
from kvasir_proto.term_proof import VOTE, ProvenTerm, founding_electorate

MODEL: Final = ModelShape(
    layers=tuple(range(8)), n_expert=16, n_expert_used=4, expert_sizes_bytes=(1 << 20,) * 8
)
ELECTORS: Final = 9
"""So many of the first nodes stand for elector: two more than an electorate has."""
_MEMORY_STEP: Final = 16 << 20
_LOAD_BYTES_S: Final = 1 << 30
_LOAD_MIN: Final = milliseconds(50)
_VIEWS_COMPARED: Final = 64
"""In a larger swarm the views of so many nodes are compared, and the fences of all."""


class NodeCoreKit:
    """Real cores, LAN preset, for one run."""

    family: Family[Any] = CORE

    def __init__(self, options: SimulationOptions) -> None:
        self._options = options
        self._has_liars = "byzantine" in options.faults or options.lying_electors > 0
        founder, recovery = key_of(options.seed, 0), key_of(options.seed, "recovery")
        manifest = SwarmManifest(
            model_digest=ModelDigest(bytes(32)),
            model_name="simulated",
            reference_class="ggml-activations",
            thresholds=Thresholds(),
            admission="open",
            compact_activations=False,
            partial_sums=False,
            founder_public_key=founder.public_key().public_bytes_raw(),
            recovery_public_key=recovery.public_key().public_bytes_raw(),
            electorate="open" if self._has_liars else "pinned",
        )
        self.swarm = open_swarm_manifest(sign_swarm_manifest(manifest, founder))
        keys = (key_of(options.seed, index).public_key() for index in range(ELECTORS))
        self._nominees = [node_id_of(each.public_bytes_raw()) for each in keys]
        self._index_of: dict[NodeId, int] = {}
        self._liars: set[NodeId] = set()
        self._honest: set[NodeId] = set()
        self._convicted: set[NodeId] = set()
        self._equivocated: set[NodeId] = set()

    # --- starting and driving -------------------------------------------------------------------------------

    def start(
        self, identity: NodeIdentity, stored: Mapping[Slot, bytes], entropy: Random, now: Now
    ) -> NodeCore:
        """See `CoreKit`."""
        self._index_of.setdefault(identity.node_id, identity.index)  # a twin adds as the first one does
        if identity.node_id not in self._liars:
            self._honest.add(identity.node_id)
        return NodeCore(
            private_key=identity.private_key,
            swarm=self.swarm,
            capability=self._capability_of(identity, now),
            model=MODEL,
            options=LAN,
            stored=stored,
            entropy=entropy,
            now=now,
            nominees=self._nominees,
        )

    def _capability_of(self, identity: NodeIdentity, now: Now) -> CapabilityRecord:
        index = identity.index
        adds_in_f32 = self.adds_in_f32(identity.node_id)
        is_candidate = adds_in_f32 and index % 3 == 0
        ranks: tuple[Rank, ...] = ("bulk", "output") if adds_in_f32 else ("bulk",)
        return CapabilityRecord(
            node_id=identity.node_id,
            sequence=0,
            expires=0,
            addresses=(),
            versions=(1,),
            node_version="sim",
            backend="simulated",
            device="simulated",
            accumulation="F32" if adds_in_f32 else "F16",
            memory_bytes=memory_of(index),
            state="joining",
            reason="",
            started=now.wall,
            decode_token_ns=milliseconds(10 + index % 5),
            expert_row_ns=500_000 if index % 11 == 5 else 50_000,
            ranks=("backbone", *ranks) if is_candidate else ranks,
            stands_for_elector=index < ELECTORS and identity.node_id not in self._liars,
            has_backbone_file=is_candidate,
            headroom_bytes=(4 if is_candidate else 0) << 30,
        )

    def adds_in_f32(self, node_id: NodeId) -> bool:
        """Whether it says so and may be believed; a liar cannot be told from its word."""
        return node_id in self._liars or self._index_of[node_id] % 7 != 3

    def seed(self, node_ids: tuple[NodeId, ...]) -> object:
        """See `CoreKit`."""
        return Seed(node_ids)

    def leave(self, reason: str) -> object:
        """See `CoreKit`."""
        return Leave(reason)

    def connection_lost(self, node_id: NodeId) -> object:
        """See `CoreKit`."""
        return ConnectionLost(node_id)

    def react(self, swarm: Swarm, node: SimNode, event: object) -> None:
        """An engine loads its shard of a new plan, or has no memory for it."""
        if isinstance(event, PlanReceived):
            self._load(swarm, node, event.plan)
        elif isinstance(event, ElectorateChanged):
            self._convicted |= event.convicted
        elif isinstance(event, Equivocation):
            self._equivocated.add(event.node_id)

    def _load(self, swarm: Swarm, node: SimNode, plan: Plan) -> None:
        version = (plan.epoch, plan.term, plan.revision)
        size_bytes = MODEL.shard_size_bytes(plan.shard_of(node.node_id))
        have_bytes = memory_of(node.index)
        if size_bytes > have_bytes:
            refusal = ShardRefused(*version, "no_memory", "the shard does not fit", size_bytes, have_bytes)
            swarm.command_later(node, _LOAD_MIN, refusal)
            return
        delay = Duration(_LOAD_MIN + size_bytes * 1_000_000_000 // _LOAD_BYTES_S)
        swarm.command_later(node, delay, ShardLoaded(*version, size_bytes))

    # --- judging --------------------------------------------------------------------------------------------

    def checkers(self) -> tuple[Sequence[Checker], Callable[[], int]]:
        """See `Kit`."""
        manifest, digest = self.swarm.manifest, self.swarm.digest
        terms = OneBackboneATerm()
        electorates = ElectoratesFollow(founding_electorate(manifest.founder_public_key, manifest.electorate))
        found: list[Checker] = [
            terms,
            OneLeaseAtATime(),
            FencesNeverFall(),
            IncarnationsNeverFall(),
            electorates,
            TermsAreProven(digest, electorates),
            PlansAreTheBackbones(digest, terms, lambda node_id: node_id in self._liars),
            OutputRanksAreF32(MODEL.output_layers, self.adds_in_f32),
            GoneRecordsStayGone(),
            NothingOverflows(),
            NothingRaises(),
        ]
        return found, lambda: terms.backbones_max

    def bears_departure(self, core: Sequence[SimNode], node_id: NodeId) -> bool:
        """Whether a quorum of the newest electorate would stay: whoever loses it for good needs `recover`."""
        known = [node.core.view().electorate for node in core if isinstance(node.core, NodeCore)]
        if not known:
            return False
        newest = max(known, key=lambda each: each.order)
        staying = {node.node_id for node in core} - {node_id}
        electors = {node_id_of(each) for each in newest.members}
        return node_id not in electors or len(electors & staying) >= newest.quorum

    def lacking(self, core: Sequence[SimNode], long_gone: Set[NodeId] = frozenset()) -> str | None:
        """One backbone with its lease, one fence, one view of who is there, all experts served.

        And no elector that is long gone, but where four remain: an open electorate becomes no smaller.
        """
        name = {node.node_id: f"node {node.index}" for node in core}
        fences: dict[ProvenTerm | None, SimNode] = {}
        for node in core:
            if node.core is None:
                return f"node {node.index} does not run"
            assert isinstance(node.core, NodeCore)
            fences.setdefault(node.core.fence, node)
        if len(fences) != 1 or None in fences:
            said = (f"node {node.index}: {fence and fence[:2]}" for fence, node in list(fences.items())[:3])
            return f"{len(fences)} terms are followed ({', '.join(said)})"
        (fence,) = fences
        backbone = next((node for node in core if fence is not None and node.node_id == fence.backbone), None)
        if backbone is None:
            return "the backbone is gone"
        assert isinstance(backbone.core, NodeCore)
        view = backbone.core.view()
        if view.role is not Role.BACKBONE or view.lease_until is None:
            return f"{name[backbone.node_id]} is followed as backbone and has no lease"
        electors = [node_id_of(each) for each in view.electorate.members]
        unreplaced = long_gone & set(electors)
        if unreplaced and len(electors) > OPEN_MIN:
            return f"{len(unreplaced)} electors that are long gone have not been replaced"
        if view.coverage is None or view.plan is None:
            return f"there is no plan: {view.reason}"
        if view.missing:
            first = view.missing[0]
            return f"layer {first.layer} has experts without a holder: {first.reason}"
        if view.state not in ("ready", "degraded"):
            return f"the backbone is {view.state}: {view.reason}"
        return self._views_differ(core, view, name)

    def _views_differ(
        self, core: Sequence[SimNode], backbones: NodeView, name: Mapping[NodeId, str]
    ) -> str | None:
        step = max(1, len(core) // _VIEWS_COMPARED)
        ids = frozenset(name)
        # Liars are stopped and made up members never were.
        plan = backbones.plan
        assert plan is not None
        strangers = sorted(set(plan.nodes) - ids)
        if strangers:
            return f"the plan names {len(strangers)} nodes that are gone"
        for node in core[::step]:
            assert node.core is not None
            view: NodeView = node.core.view()
            alive = {each.node_id for each in view.members if each.state == "alive"} | {node.node_id}
            alive &= self._honest
            if alive != ids:
                missing, extra = sorted(ids - alive), sorted(alive - ids)
                what = f"does not see {name[missing[0]]} alive" if missing else f"sees {extra[0]} alive"
                return f"node {node.index} {what} ({len(missing)} missing, {len(extra)} too many)"
            if node.node_id in plan.nodes and (view.plan != plan or not view.is_serving_plan):
                return f"node {node.index} does not serve plan revision {plan.revision}: {view.reason}"
        return None

    def make_liar(self, node_id: NodeId, randomness: Random) -> Adversary:
        """See `Kit`."""
        self._liars.add(node_id)
        families: dict[str, Family[Any]] = {}
        for family in (CAPABILITY, VOTE, PRE_VOTE, PLAN):
            families.update(dict.fromkeys(family.by_kind, family))
        return Liar(self.swarm.digest, families, randomness)

    def form(self, swarm: Swarm, nodes: Sequence[SimNode]) -> None:
        """See `Kit`."""
        form(swarm, nodes)

    def member_seen(self, event: object) -> NodeId | None:
        """See `Kit`."""
        return event.node_id if type(event) is MemberChanged and event.state == "alive" else None

    def detections(self, notices: dict[str, int]) -> dict[str, int]:
        """See `Kit`."""
        found = {
            "electors_convicted": len(self._convicted),
            "nodes_equivocated": len(self._equivocated),
            "identities_conflicted": notices.get("identity_conflicted", 0),
        }
        return {what: count for what, count in found.items() if count}


def memory_of(index: int) -> int:
    """Bytes that a node offers for experts: three hold the model once, a dozen several times."""
    return (4 + index % 5) * _MEMORY_STEP
