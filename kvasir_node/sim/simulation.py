"""One run: a swarm is made, everything goes wrong for a while, then it is healed and has to be one again.

First phase: the chosen faults happen, and every checker looks at every event (safety). Second phase: all
faults end, everybody of the core runs, and within `heal_limit` there must be one backbone, one view of who
is there and a holder for every expert, and it must stay so (liveness). A run that begins with a formed
swarm leaves out the time in which thousands of nodes get to know each other, and says so.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol, TextIO

from kvasir_node.sim.byzantine import Twin
from kvasir_node.sim.checkers import Checker, Checkers, Violation
from kvasir_node.sim.faults import FaultSchedule, clock_with, faults_with, network_with
from kvasir_node.sim.joins import JoinTimes
from kvasir_node.sim.network import QUIET
from kvasir_node.sim.swarm import Adversary, CoreKit, SimNode, Swarm, SwarmOptions
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, milliseconds, seconds

HEAL_LIMIT: Final = seconds(30)
"""A healed swarm on a LAN is one again within this."""
FORMED_FROM: Final = 200
"""Runs without faults begin with a formed swarm from this many nodes on."""
_LOOK_INTERVAL: Final = milliseconds(250)
_STAYS: Final = seconds(2)
_REPLACED_WITHIN: Final = seconds(60)
"""After so long whoever left should be no elector any more, whatever went wrong meanwhile."""
LIARS_TOLERATED: Final = 2
"""Of seven electors of an open electorate."""
_CLONED_AT: Final = seconds(20)
"""When some electors get their twins: an electorate of seven has been made by then."""
_JOIN_WINDOW: Final = seconds(5)
"""The nodes of a swarm that is not formed start within this."""


class Kit(CoreKit, Protocol):
    """A kind of core, and how to judge it."""

    def checkers(self) -> tuple[Sequence[Checker], Callable[[], int]]:
        """What must hold, and how many backbones any (epoch, term) had at most."""

    def lacking(self, core: Sequence[SimNode], long_gone: Set[NodeId] = frozenset()) -> str | None:
        """What these nodes lack to be one swarm; None if they are. `long_gone` should be missed no more."""

    def bears_departure(self, core: Sequence[SimNode], node_id: NodeId) -> bool:
        """Whether these nodes can go on when that one of them leaves for good."""

    def make_liar(self, node_id: NodeId, randomness: Random) -> Adversary:
        """A byzantine member."""

    def form(self, swarm: Swarm, nodes: Sequence[SimNode]) -> None:
        """Start these nodes as members of one swarm that has existed for a while."""

    def member_seen(self, event: object) -> NodeId | None:
        """The member that this event says is alive, if it says so."""

    def detections(self, notices: dict[str, int]) -> dict[str, int]:
        """Those of these notices that name a liar."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What one run is: everything that `replay` has to say."""

    nodes: int
    seconds: int
    seed: int
    faults: tuple[str, ...]
    lying_electors: int = 0
    heal_limit: Duration = HEAL_LIMIT

    @property
    def is_formed(self) -> bool:
        """Whether the run begins with a formed swarm."""
        return not self.faults and self.nodes >= FORMED_FROM

    @property
    def is_beyond_bound(self) -> bool:
        """Whether more electors lie than an electorate tolerates: then they have to be found out, no more."""
        return self.lying_electors > LIARS_TOLERATED


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, in plain numbers."""

    violations: tuple[Violation, ...]
    lacking: str | None
    convergence_s: float | None
    backbones_per_term_max: int
    nodes_end: int
    messages: int
    messages_by_kind: dict[str, int]
    bytes: int
    mesh_published: int
    mesh_bytes: int
    mesh_dropped: int
    mesh_model: str
    joins: int
    join_p99_s: float | None
    packets_lost: int
    refused_by_codec: int
    refused_by_core: int
    refused_by_transport: int
    faults_happened: dict[str, int]
    notices: dict[str, int]
    detections: dict[str, int]
    simulated_s: float

    @property
    def is_good(self) -> bool:
        """Whether it was safe, and became one swarm again."""
        return not self.violations and self.lacking is None


class Simulation:
    """One run, to be called once."""

    def __init__(self, options: SimulationOptions, kit: Kit, trace: TextIO | None = None) -> None:
        self.options = options
        self.kit = kit
        found, self._backbones_max = kit.checkers()
        self.checkers = Checkers(list(found))
        self.faults = faults_with(options.faults, options.nodes)
        self.swarm = Swarm(
            SwarmOptions(
                seed=options.seed,
                network=network_with(QUIET, options.faults),
                fsync_slow=self.faults.fsync_slow,
            ),
            kit,
            self,
            trace,
        )
        self.schedule = FaultSchedule(self.swarm, self.faults, self._join, kit.bears_departure, options.nodes)
        self.join_times = JoinTimes(lambda: self.swarm.up_count)
        self._clocks = self.swarm.randomness("clocks")
        self._joins = self.swarm.randomness("joins")
        self._joined = 0

    def run(self) -> Outcome:
        """Both phases, and what came of them."""
        collects = gc.isenabled()
        gc.disable()  # nothing here is a cycle; looking for some costs a tenth of a long run
        try:
            self._begin()
            end = seconds(self.options.seconds)
            self.swarm.run_until(end)
            self.schedule.heal()
            lacking, convergence_s = self._wait_for_convergence()
        finally:
            if collects:
                gc.enable()
        return self._outcome(lacking, convergence_s)

    def saw(self, real: int, node: SimNode, event: object) -> None:
        """Tell the checkers, and whoever waits for newcomers."""
        self.checkers.saw(real, node, event)
        if self.join_times.pending:
            member = self.kit.member_seen(event)
            if member is not None:
                self.join_times.known(real, node, member)

    # --- beginning ------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        options, swarm = self.options, self.swarm
        for _ in range(options.nodes):
            self._add_machine()
        if self.faults.byzantine:
            self._corrupt_some()
        if options.is_formed:
            self.kit.form(swarm, swarm.nodes)
            self._let_newcomers_come()
        else:
            founder = swarm.nodes[0]
            swarm.start(founder)
            for node in swarm.nodes[1:]:
                at = int(self._joins.random() * _JOIN_WINDOW)
                swarm.schedule(at, self._start, (node, (founder.node_id,)))
        if options.lying_electors:
            swarm.schedule(_CLONED_AT, self._clone_electors)
        self.schedule.begin()

    def _clone_electors(self, _: int) -> None:
        """Copy the homes of some electors, and start what is in the copies beside them."""
        for node in self.swarm.nodes[1 : 1 + self.options.lying_electors]:
            twin = self.swarm.add_node(node.clock, twin_of=node.index)
            for slot, data in sorted(node.store.stored().items()):
                twin.store.write(slot, data, self.swarm.now)
            node.adversary = twin.adversary = Twin()
            self.swarm.start(twin, (self.swarm.nodes[0].node_id,))

    def _add_machine(self) -> SimNode:
        return self.swarm.add_node(clock_with(self.faults, self._clocks))

    def _start(self, _: int, node: SimNode, seeds: tuple[NodeId, ...]) -> None:
        if not node.is_up and not node.has_left and not node.starts:
            self.swarm.start(node, seeds)

    def _corrupt_some(self) -> None:
        """One node in ten lies; never the founder, who would be the swarm's word."""
        randomness = self.swarm.randomness("byzantine")
        count = max(1, self.options.nodes // 10)
        for node in randomness.sample(self.swarm.nodes[1:], min(count, self.options.nodes - 1)):
            node.adversary = self.kit.make_liar(node.node_id, self.swarm.randomness(f"liar/{node.index}"))

    def _join(self) -> None:
        """A newcomer with an invite that names two members."""
        swarm = self.swarm
        running = [node.node_id for node in swarm.nodes if node.is_up and node.is_honest]
        node = self._add_machine()
        self._joined += 1
        self.join_times.joins(swarm.now, node)
        swarm.start(node, tuple(self._joins.sample(running, min(2, len(running)))))

    def _let_newcomers_come(self) -> None:
        """Ten over the first half of the run, so that all can be known before its end."""
        for number in range(10):
            at = seconds(self.options.seconds) * (number + 1) // 22
            self.swarm.schedule(at, lambda _: self._join())

    # --- ending ---------------------------------------------------------------------------------------------

    def _wait_for_convergence(self) -> tuple[str | None, float | None]:
        """What is lacking in the end, and after how long nothing was."""
        swarm, healed = self.swarm, self.swarm.now
        limit = healed + self.options.heal_limit
        while True:
            lacking = self._lacking()
            if lacking is None:
                found = swarm.now
                swarm.run_until(found + _STAYS)
                lacking = self._lacking()
                if lacking is None:
                    return None, (found - healed) / 1e9
            if swarm.now >= limit:
                return lacking, None
            swarm.run_until(swarm.now + _LOOK_INTERVAL)

    def _lacking(self) -> str | None:
        latest = self.swarm.now - _REPLACED_WITHIN
        gone = (each for each in self.swarm.nodes if each.left_at is not None and each.left_at <= latest)
        return self.kit.lacking(self.schedule.core(), frozenset(each.node_id for each in gone))

    def _outcome(self, lacking: str | None, convergence_s: float | None) -> Outcome:
        swarm = self.swarm
        return Outcome(
            violations=tuple(self.checkers.violations),
            lacking=lacking,
            convergence_s=convergence_s,
            backbones_per_term_max=self._backbones_max(),
            nodes_end=len([node for node in swarm.nodes if node.is_up]),
            messages=swarm.messages,
            messages_by_kind=dict(sorted(swarm.sent_by_kind.items())),
            bytes=swarm.bytes,
            mesh_published=swarm.mesh.published_count,
            mesh_bytes=swarm.mesh.bytes_count,
            mesh_dropped=swarm.mesh.dropped_count,
            mesh_model=swarm.mesh.options.describe(),
            joins=self._joined,
            join_p99_s=self.join_times.p99_s(),
            packets_lost=swarm.network.lost_count,
            refused_by_codec=swarm.refused_by_codec,
            refused_by_core=swarm.refused_by_core,
            refused_by_transport=swarm.refused_by_transport,
            faults_happened=dict(sorted(self.schedule.counts.items())),
            notices=dict(sorted(swarm.notices.items())),
            detections=self.kit.detections(swarm.notices),
            simulated_s=swarm.now / 1e9,
        )
