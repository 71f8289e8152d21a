"""How one plan becomes another without an expert ever losing its last holder: first add, then drop.

A step is a plan itself. It gives new holders what they are to hold and leaves the old ones in place and asked
first; only when the new ones have proved it (`Place.holding`) does a later step drop the old. So a node is
never asked for room that it has only after dropping, and what a step makes nodes load is bounded, except for
experts that nobody holds: these come first and all at once. A step that changes nothing means that the
transition waits for a proof, is over, or is as far as memory lets it go.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvasir_proto.ids import NodeId
from kvasir_proto.limits import HOLDERS_MAX
from kvasir_proto.placement.inventory import ModelShape, Place, may_hold_output
from kvasir_proto.placement.options import LAN, PlacementOptions
from kvasir_proto.placement.plan import Plan, plan_of

_LOST: Final = "the node that held it is gone, and no other has room"
_BY_BACKBONE: Final = "the backbone serves experts itself until a worker has loaded them"

_Holders = list[list[tuple[NodeId, ...]]]


def next_step(
    current: Plan,
    target: Plan,
    places: Iterable[Place],
    model: ModelShape,
    options: PlacementOptions = LAN,
) -> Plan:
    """The plan that comes after `current` on the way to `target`, with the target's version.

    Both are plans of this model. A node that is gone or may not hold a rank any more is dropped at once,
    whatever that uncovers.
    """
    step = _Step(current, target, sorted(places, key=lambda each: each.node_id), model, options)
    step.add_what_nobody_holds()
    step.go_on()
    if step.is_stuck:
        step.drop_spare_holders()
    return step.plan()


def holders_by_expert(plan: Plan) -> _Holders:
    """By place of the layer in the plan and by expert: its holders, the first to be asked first."""
    return [
        [
            holders
            for part in layer.ranges
            for holders in [tuple(plan.nodes[index] for index in part.holders)] * (part.end - part.first)
        ]
        for layer in plan.layers
    ]


class _Step:
    def __init__(
        self,
        current: Plan,
        target: Plan,
        places: Sequence[Place],
        model: ModelShape,
        options: PlacementOptions,
    ) -> None:
        self.target_plan = target
        self.was_degraded = current.degraded
        self.model = model
        self.budget_bytes = options.in_flight_bytes_max
        self.has_moved = False
        self.is_waiting = False
        """Whether something is left for a later step: this one moves enough, or a proof is missing."""
        self.has_dropped = False
        there = {each.node_id for each in places if each.state != "lost"}
        fit = {each.node_id for each in places if may_hold_output(each, trust_claims=options.trust_claims)}
        self.backbone = next((each.node_id for each in places if each.is_backbone), None)
        before = holders_by_expert(current)
        self.free = {each.node_id: each.free_bytes for each in places}
        self.current: _Holders = []
        for layer, size, experts in zip(model.layers, model.expert_sizes_bytes, before, strict=True):
            fit_here = there & fit if layer in model.output_layers else there
            kept = []
            for holders in experts:
                for node in holders:
                    if node in self.free:
                        self.free[node] -= size
                kept.append(tuple(node for node in holders if node in fit_here))
            self.current.append(kept)
        self.target = holders_by_expert(target)
        self.proved = {each.node_id: frozenset(each.holding.pairs()) for each in places}
        self.next: _Holders = [list(experts) for experts in self.current]

    def add_what_nobody_holds(self) -> None:
        for at, size in enumerate(self.model.expert_sizes_bytes):
            for expert, wanted in enumerate(self.target[at]):
                if not self.current[at][expert] and wanted:
                    self.next[at][expert] = self._with_room(wanted, size)

    def go_on(self) -> None:
        for at, (layer, size) in enumerate(
            zip(self.model.layers, self.model.expert_sizes_bytes, strict=True)
        ):
            for expert, wanted in enumerate(self.target[at]):
                holders = self.current[at][expert]
                if not holders or not wanted or holders == wanted:
                    continue
                lacking = tuple(node for node in wanted if node not in holders)
                if not lacking:
                    if all((layer, expert) in self.proved[node] for node in wanted):
                        self.next[at][expert] = wanted
                        self.has_dropped = True
                    else:
                        self.is_waiting = True
                elif self._may_move(size):
                    added = self._with_room(lacking[: HOLDERS_MAX - len(holders)], size)
                    self.next[at][expert] = holders + added
                    self.budget_bytes -= size * len(added)
                    self.has_moved = self.has_moved or bool(added)

    @property
    def is_stuck(self) -> bool:
        return not (self.has_moved or self.has_dropped or self.is_waiting)

    def drop_spare_holders(self) -> None:
        """No step has room: holders that are not wanted and are not the last make room for the next one."""
        for at, experts in enumerate(self.next):
            for expert, holders in enumerate(experts):
                wanted = self.target[at][expert]
                spared = tuple(node for node in holders if node in wanted) or holders[:1]
                if wanted and len(spared) < len(holders):
                    self.next[at][expert] = spared

    def _may_move(self, size: int) -> bool:
        if self.has_moved and self.budget_bytes < size:
            self.is_waiting = True
            return False
        return True

    def _with_room(self, nodes: Sequence[NodeId], size: int) -> tuple[NodeId, ...]:
        """Those of the nodes that have room for an expert more, which is taken."""
        taken = []
        for node in nodes:
            if self.free.get(node, 0) >= size:
                self.free[node] -= size
                taken.append(node)
        return tuple(taken)

    def plan(self) -> Plan:
        target = self.target_plan
        by_backbone = any(self.backbone in holders for experts in self.next for holders in experts)
        return plan_of(
            self.next,
            self.model.layers,
            epoch=target.epoch,
            term=target.term,
            revision=target.revision,
            missing=[layer.missing or _LOST for layer in target.layers],
            degraded=(target.degraded or self.was_degraded or _BY_BACKBONE) if by_backbone else "",
        )
