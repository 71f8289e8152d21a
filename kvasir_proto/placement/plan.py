"""The plan: who holds each expert of each MoE layer, the first to be asked first, or why nobody does.

A plan is whole or explained: an expert without a holder stands in a layer that gives the reason. The backbone
may be a holder like any other node. Only the term's backbone signs plans. The plan knows neither speeds nor
bytes; `rebalance.place` weighs them. `make_plan` is for swarms of equals with room for everything: each
layer's experts are cut into one contiguous range a worker; sizes differ by at most one, and the larger ranges
go round, so that what a node is primary of differs by at most one in all. Further holders go round from layer
to layer, so that the work of a lost node falls on all others and not on one neighbour.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, ClassVar, Final, NamedTuple, TypeAlias

from kvasir_proto.codec import encode
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import Epoch, NodeId, NodeIdField, SwarmDigest, Term
from kvasir_proto.limits import (
    EXPERTS_MAX,
    HOLDERS_MAX,
    LAYERS_MAX,
    SIGNED_SIZE_MAX,
    WORKERS_MAX,
    ExpertCount,
    ExpertIndex,
    Layer,
    Length,
    Range,
    Sentence,
    Sequence63,
)
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages import Family
from kvasir_proto.signing import open_signed

_NodeIndex: TypeAlias = Annotated[int, Range(0, WORKERS_MAX - 1)]
_NOTHING: Final = ShardSet()
_OPENED_MAX: Final = 8
"""Plans that are remembered with their signatures checked: an offer is made more than once."""


@dataclass(frozen=True, slots=True)
class ExpertRange:
    """Experts `first` to `end` (exclusive) of a layer, and who holds them, as indices into `Plan.nodes`.

    No holders: the experts are missing, and their layer says why.
    """

    first: ExpertIndex
    end: ExpertCount
    holders: Annotated[tuple[_NodeIndex, ...], Length(0, HOLDERS_MAX)]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer: ranges in order, without a gap. `missing`: why some have no holder, if some have none."""

    layer: Layer
    ranges: Annotated[tuple[ExpertRange, ...], Length(1, EXPERTS_MAX)]
    missing: Sentence = ""


class Coverage(NamedTuple):
    """How well a set of nodes covers the experts of a plan. Counts are of (layer, expert) pairs."""

    n_pairs: int
    n_pairs_held: int
    holders_min: int
    """Holders of the expert that has the fewest; 0 when some expert has none."""
    n_pairs_by_backbone: int = 0
    """Those of the held ones that nobody but the backbone holds; 0 where it was not named."""


class Missing(NamedTuple):
    """Experts `first` to `end` (exclusive) of a layer that nobody holds, and why."""

    layer: int
    first: int
    end: int
    reason: str


@dataclass(frozen=True)
class Plan:
    """Which node serves which shard, versioned by (epoch, term, revision).

    One that came from `make_plan`, `plan_of` or `open_plan` is whole or explained: every expert of every
    layer has distinct holders, or its layer says why it has none. `degraded` says why the backbone serves
    experts itself; empty if it does not.
    """

    kind: ClassVar[str] = "plan"
    epoch: Epoch
    term: Term
    revision: Sequence63
    n_expert: ExpertCount
    nodes: Annotated[tuple[NodeIdField, ...], Length(0, WORKERS_MAX)]
    layers: Annotated[tuple[LayerPlan, ...], Length(1, LAYERS_MAX)]
    degraded: Sentence = ""

    def holders_of(self, layer: int, expert: int) -> tuple[NodeId, ...]:
        """The holders of one expert, primary first. Raises `LocalProtocolError` if the plan has no such."""
        position = bisect_right(self.layers, layer, key=lambda each: each.layer) - 1
        if position < 0 or self.layers[position].layer != layer or not 0 <= expert < self.n_expert:
            raise LocalProtocolError(f"the plan has no expert {expert} in layer {layer}")
        ranges = self.layers[position].ranges
        found = ranges[bisect_right(ranges, expert, key=lambda each: each.first) - 1]
        return tuple(self.nodes[index] for index in found.holders)

    def shard_of(self, node: NodeId) -> ShardSet:
        """Every (layer, expert) the node holds, as primary or not; empty for a node not in the plan."""
        return self._shards.get(node, _NOTHING)

    @cached_property
    def encoded(self) -> bytes:
        """Its canonical bytes, made once: a backbone signs and keeps them, and so does every holder."""
        return encode(self)

    @cached_property
    def _shards(self) -> dict[NodeId, ShardSet]:
        ranges: list[list[tuple[int, int, int]]] = [[] for _ in self.nodes]
        for each in self.layers:
            for part in each.ranges:
                for index in part.holders:
                    ranges[index].append((each.layer, part.first, part.end))
        return {node: ShardSet.from_ranges(ranges[index]) for index, node in enumerate(self.nodes)}

    def primary_shard_of(self, node: NodeId) -> ShardSet:
        """Every (layer, expert) for which the node is asked first; empty for a node not in the plan."""
        if node not in self.nodes:
            return _NOTHING
        index = self.nodes.index(node)
        return ShardSet.from_ranges(
            (each.layer, part.first, part.end)
            for each in self.layers
            for part in each.ranges
            if part.holders[:1] == (index,)
        )

    def coverage(self, alive: Collection[NodeId] | None = None, backbone: NodeId | None = None) -> Coverage:
        """How well these nodes cover the experts; without an argument, how well all the plan's nodes do."""
        counted = self._indices_of(alive)
        own = {index for index in counted if self.nodes[index] == backbone}
        n_pairs = n_held = n_own = 0
        holders_min = len(self.nodes)
        for each in self.layers:
            for part in each.ranges:
                held, size = counted.intersection(part.holders), part.end - part.first
                n_pairs += size
                n_held += size if held else 0
                n_own += size if held and held <= own else 0
                holders_min = min(holders_min, len(held))
        return Coverage(n_pairs, n_held, holders_min, n_own)

    def missing(self, alive: Collection[NodeId] | None = None) -> tuple[Missing, ...]:
        """The experts that none of these nodes (by default: of the plan's nodes) holds, with the reason."""
        counted = self._indices_of(alive)
        found: list[Missing] = []
        for each in self.layers:
            for part in each.ranges:
                if counted.intersection(part.holders):
                    continue
                reason = "none of its holders is there" if part.holders else each.missing
                last = found[-1] if found else None
                if last and (last.layer, last.end, last.reason) == (each.layer, part.first, reason):
                    found[-1] = last._replace(end=part.end)
                else:
                    found.append(Missing(each.layer, part.first, part.end, reason))
        return tuple(found)

    def _indices_of(self, alive: Collection[NodeId] | None) -> set[int]:
        return {index for index, node in enumerate(self.nodes) if alive is None or node in alive}

    def holds_the_same_as(self, other: Plan) -> bool:
        """Whether both give the same experts to the same nodes, in the same order, with the same reasons."""
        mine, theirs = ((each.nodes, each.layers, each.degraded) for each in (self, other))
        return mine == theirs


PLAN: Final = Family("plan", (Plan,), SIGNED_SIZE_MAX)


def make_plan(
    moe_layers: Iterable[int],
    n_expert: int,
    workers: Iterable[NodeId],
    *,
    epoch: int,
    term: int,
    revision: int,
    holders: int | None = None,
) -> Plan:
    """Place every expert of these layers on these workers.

    `holders` is how many nodes hold each expert, the primary among them; by default two where there are three
    workers or more, else one. Raises `LocalProtocolError` without workers or layers, for more than
    `WORKERS_MAX` workers, and for more holders than workers or `HOLDERS_MAX`.
    """
    nodes = tuple(sorted(set(workers)))
    layers = tuple(sorted(set(moe_layers)))
    if not 1 <= len(nodes) <= WORKERS_MAX:
        raise LocalProtocolError(f"a plan is for 1 to {WORKERS_MAX} workers, not {len(nodes)}")
    if not layers or not 1 <= n_expert <= EXPERTS_MAX:
        raise LocalProtocolError(f"a plan cannot place {n_expert} experts in {len(layers)} layers")
    if holders is None:
        holders = max(1, min(2, len(nodes) - 1))
    if not 1 <= holders <= min(len(nodes), HOLDERS_MAX):
        raise LocalProtocolError(f"{len(nodes)} workers cannot be {holders} holders of one expert")
    return Plan(
        epoch=epoch,
        term=term,
        revision=revision,
        n_expert=n_expert,
        nodes=nodes,
        layers=tuple(
            LayerPlan(layer, _cut_layer(turn, n_expert, len(nodes), holders))
            for turn, layer in enumerate(layers)
        ),
    )


def _cut_layer(turn: int, n_expert: int, n_nodes: int, holders: int) -> tuple[ExpertRange, ...]:
    """The ranges of the layer that comes `turn`-th, one a node, without the empty ones."""
    size, remainder = divmod(n_expert, n_nodes)
    # The nodes with one expert more follow those that had it in the layer before.
    first_larger = turn * remainder % n_nodes
    ranges = []
    first = 0
    for node in range(n_nodes):
        end = first + size + ((node - first_larger) % n_nodes < remainder)
        if end > first:
            further = (_nth_other(node, turn + step, n_nodes) for step in range(holders - 1))
            ranges.append(ExpertRange(first, end, (node, *further)))
        first = end
    return tuple(ranges)


def _nth_other(node: int, turn: int, n_nodes: int) -> int:
    """The node that is `turn` places on, among all but this one, round and round."""
    return (node + 1 + turn % (n_nodes - 1)) % n_nodes


def plan_of(
    holders: Sequence[Sequence[tuple[NodeId, ...]]],
    layers: Sequence[int],
    *,
    epoch: int,
    term: int,
    revision: int,
    missing: Sequence[str],
    degraded: str,
) -> Plan:
    """The plan in which `holders[i][expert]` hold that expert of `layers[i]`; equal neighbours are one range.

    `missing[i]` is why experts of that layer have no holder; it is left out where all have one.
    """
    nodes = tuple(sorted({node for layer in holders for each in set(layer) for node in each}))
    index_of = {node: index for index, node in enumerate(nodes)}
    return Plan(
        epoch,
        term,
        revision,
        len(holders[0]),
        nodes,
        tuple(
            LayerPlan(number, _merged(layer, index_of), "" if all(layer) else reason)
            for number, layer, reason in zip(layers, holders, missing, strict=True)
        ),
        degraded,
    )


def _merged(layer: Sequence[tuple[NodeId, ...]], index_of: dict[NodeId, int]) -> tuple[ExpertRange, ...]:
    ranges = []
    first = 0
    for end in range(1, len(layer) + 1):
        if end == len(layer) or layer[end] != layer[first]:
            ranges.append(ExpertRange(first, end, tuple(index_of[node] for node in layer[first])))
            first = end
    return tuple(ranges)


@lru_cache(maxsize=_OPENED_MAX)
def open_plan(data: bytes, swarm_digest: SwarmDigest, backbone: NodeId) -> Plan:
    """The plan in an encoded `Signed`, if that backbone signed it and it is whole. Remembered: it is pure.

    Raises `RemoteProtocolError`: as `open_signed` does, or `wrong_node` (another node signed it),
    `incomplete_plan` (an expert without a holder or a reason, a reason without such an expert, a holder that
    is nobody or named twice, parts out of order).
    """
    plan, signer = open_signed(data, PLAN, swarm_digest)
    if signer != backbone:
        raise RemoteProtocolError("the plan is not signed by the backbone", "wrong_node")
    flaw = _flaw_of(plan)
    if flaw is not None:
        raise RemoteProtocolError(f"the plan is not whole: {flaw}", "incomplete_plan")
    return plan


def _flaw_of(plan: Plan) -> str | None:
    if list(plan.nodes) != sorted(set(plan.nodes)):
        return "its nodes are not in order"
    layers = [each.layer for each in plan.layers]
    if layers != sorted(set(layers)):
        return "its layers are not in order"
    for each in plan.layers:
        covered = 0
        for part in each.ranges:
            if part.first != covered or part.end <= part.first:
                return f"layer {each.layer} has a gap or an overlap at expert {covered}"
            if len(set(part.holders)) != len(part.holders) or max(part.holders, default=0) >= len(plan.nodes):
                return f"layer {each.layer} has a holder that is nobody or named twice"
            covered = part.end
        if covered != plan.n_expert:
            return f"layer {each.layer} ends at expert {covered} of {plan.n_expert}"
        if all(part.holders for part in each.ranges) != (not each.missing):
            return f"layer {each.layer} does not say why experts have no holder, or says so of none"
    return None
