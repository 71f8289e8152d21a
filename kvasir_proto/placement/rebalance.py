"""From what there is to who holds what: `place`, a plain function, and what it had to leave out.

The order of the rules is the order of the code: the rank rule first, then memory (never promised twice), then
coverage, then speed (`cost`), then further holders, then the least movement against the previous plan.
Several drafts are made, from one that only mends the previous plan on; one that changes more is taken where
it covers more, uses a node that is worth using and was not used, or is faster by more than `gain_min`. The
order in which nodes are named changes nothing: every table is in the order of node ids. It knows no clock;
`transition` says how a plan is reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple, TypeAlias

from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.manifest import ShardSet
from kvasir_proto.placement.cost import WHOLE, layer_ns, shares_of
from kvasir_proto.placement.inventory import ModelShape, Place, Speed, may_hold_output, speeds_of
from kvasir_proto.placement.options import LAN, PlacementOptions
from kvasir_proto.placement.plan import Missing, Plan, plan_of

RANGES_MAX: Final = 20_000
"""Ranges of all layers of a plan: what fits a signed payload with eight holders each (42 bytes a range)."""

Hotness: TypeAlias = tuple[tuple[int, ...], ...]
"""For each layer of the model, how often each expert was chosen; empty while nothing was counted."""

_Holders: TypeAlias = list[list[list[int]]]
"""By place in `ModelShape.layers` and by expert: indices of places, the first to be asked first."""


class Refusal(NamedTuple):
    """What a node was to hold, by the previous plan or for one expert at least, and has no memory for."""

    node_id: NodeId
    need_bytes: int
    have_bytes: int


class Move(NamedTuple):
    """What one node has to load that it does not hold."""

    node_id: NodeId
    shard: ShardSet
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A plan, what was left out, and what it costs to get there. `layers_ns`: the predicted sum of layers."""

    plan: Plan
    missing: tuple[Missing, ...]
    refused: tuple[Refusal, ...]
    moves: tuple[Move, ...]
    layers_ns: int

    @property
    def moved_bytes(self) -> int:
        """Bytes that all nodes together have to load."""
        return sum(each.size_bytes for each in self.moves)


def place(
    places: Iterable[Place],
    model: ModelShape,
    previous: Plan | None = None,
    options: PlacementOptions = LAN,
    *,
    epoch: int = 0,
    term: int = 1,
    revision: int = 1,
    hotness: Hotness = (),
) -> Placement:
    """Who is to hold which experts. Without a previous plan, what places prove to hold stands for it.

    Raises `LocalProtocolError` for two places of one node, two backbones, or hotness of another shape.
    """
    known = sorted(places, key=lambda each: each.node_id)
    if len({each.node_id for each in known}) != len(known) or sum(each.is_backbone for each in known) > 1:
        raise LocalProtocolError("each node is one place, and one of them at most is the backbone")
    if hotness and [len(each) for each in hotness] != [model.n_expert] * len(model.layers):
        raise LocalProtocolError("hotness is counted for every expert of every layer")
    if previous is not None and (
        previous.n_expert != model.n_expert or tuple(each.layer for each in previous.layers) != model.layers
    ):
        previous = None
    nodes_max = options.nodes_max
    n_ranges_max = RANGES_MAX if model.n_expert * len(model.layers) <= RANGES_MAX else RANGES_MAX // 2
    while True:
        task = _Task(known, model, previous, replace(options, nodes_max=nodes_max), hotness)
        draft = task.best_draft()
        placement = draft.result(known, epoch, term, revision)
        n_ranges = sum(len(each.ranges) for each in placement.plan.layers)
        if n_ranges <= n_ranges_max or nodes_max == 2:
            return placement
        # Too many pieces for one message: few nodes and straight cuts, whatever it moves.
        previous = Plan(epoch, term, revision, model.n_expert, (), ())
        nodes_max = max(2, min(nodes_max // 2, n_ranges_max // (3 * len(model.layers))))


class _Task:
    """What is to be placed, in indices: `places` are the chosen ones in order of their ids."""

    def __init__(
        self,
        known: Sequence[Place],
        model: ModelShape,
        previous: Plan | None,
        options: PlacementOptions,
        hotness: Hotness,
    ) -> None:
        self.model = model
        self.options = options
        self.places = _chosen(known, model, previous, options)
        n_places = len(self.places)
        self.speeds: list[Speed] = speeds_of(self.places)
        self.backbone = next((i for i in range(n_places) if self.places[i].is_backbone), None)
        self.workers = [i for i in range(n_places) if i != self.backbone]
        self.output_places = [
            i for i in range(n_places) if may_hold_output(self.places[i], trust_claims=options.trust_claims)
        ]
        may_output = set(self.output_places)
        self.is_output = [layer in model.output_layers for layer in model.layers]
        self.workers_by_rank = (self.workers, [i for i in self.workers if i in may_output])
        self.order = sorted(range(len(model.layers)), key=lambda at: (not self.is_output[at], at))
        """Layers, output first: they have fewer places to go to."""
        self.rows = model.n_expert_used * options.tokens_expected
        self.units = _units(model, hotness)
        self.shares = self._shares()
        self.raw = _holders_before(self.places, model, previous)
        self.kept = self._valid()

    def allowed(self, at: int) -> list[int]:
        """The workers that the rank rule lets hold experts of a layer."""
        return self.workers_by_rank[self.is_output[at]]

    def backbone_may(self, at: int) -> bool:
        return self.backbone is not None and (not self.is_output[at] or self.backbone in self.output_places)

    def share(self, at: int) -> tuple[int, ...]:
        return self.shares[self.is_output[at]]

    def _shares(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Each place's share of a bulk layer and of an output layer. Output takes its memory first."""
        free = [each.free_bytes for each in self.places]
        shares: list[tuple[int, ...]] = []
        for is_output in (True, False):
            sizes = zip(self.is_output, self.model.expert_sizes_bytes, strict=True)
            size_bytes = self.model.n_expert * sum(size for each, size in sizes if each is is_output)
            caps = [0] * len(self.places)
            for i in self.workers_by_rank[is_output]:
                caps[i] = min(WHOLE, free[i] * WHOLE // size_bytes) if size_bytes else 0
            share = shares_of(self.speeds, caps, self.rows, self.options.slower_by_at_most)
            for i in self.workers:
                free[i] -= share[i] * size_bytes // WHOLE
            shares.append(share)
        return shares[1], shares[0]

    def _valid(self) -> _Holders:
        """The holders of before that may go on: there, of the right rank, and a suspect only with proof.

        The backbone is not among them: it serves only while nobody else can.
        """
        proved = {
            i: set(each.holding.pairs()) for i, each in enumerate(self.places) if each.state == "suspect"
        }
        kept = []
        for at, layer in enumerate(self.model.layers):
            allowed = set(self.allowed(at))
            kept.append(
                [
                    [i for i in holders if i in allowed and (i not in proved or (layer, expert) in proved[i])]
                    for expert, holders in enumerate(self.raw[at])
                ]
            )
        return kept

    def best_draft(self) -> _Draft:
        """The mended plan, or one that changes more where that is worth it.

        In the order of how much they change: holders keep everything; holders of one expert may change
        places, which moves nothing; experts move to where shares are; and, where something is left over, as
        if nobody held anything: what is kept may be in the way of what fits nowhere else.
        """
        balanced = _Draft(self)
        balanced.keep_primaries(within_shares=True)
        balanced.fill_gaps()
        balanced.add_further()
        if not any(holders for layer in self.kept for holders in layer):
            return balanced
        best = self._mended(within_shares=False)
        for draft in (self._mended(within_shares=True), balanced):
            best = draft if draft.is_worth_more_than(best) else best
        if best.shortfall > (0, 0):
            anew = _Draft(self)
            anew.fill_gaps()
            anew.add_further()
            best = anew if anew.is_worth_more_than(best) else best
        return best

    def _mended(self, *, within_shares: bool) -> _Draft:
        draft = _Draft(self)
        draft.keep_primaries(within_shares=within_shares)
        draft.keep_over_shares()
        draft.keep_further()
        draft.fill_gaps()
        if draft.shortfall > (0, 0):
            # The further copies may be in the way: an expert that nobody holds comes before a second holder.
            draft = _Draft(self)
            draft.keep_primaries(within_shares=within_shares)
            draft.keep_over_shares()
            draft.fill_gaps()
        draft.add_further()
        return draft


class _Draft:
    """Holders in the making, with the memory that is left."""

    def __init__(self, task: _Task) -> None:
        self.task = task
        self.holders: _Holders = [[[] for _ in range(task.model.n_expert)] for _ in task.model.layers]
        self.free = [each.free_bytes for each in task.places]
        self.load = [[0] * len(task.places) for _ in task.model.layers]
        """What each place is asked for first, of each layer, in parts of `WHOLE`."""
        self.n_missing = 0
        self.n_on_backbone = 0

    # -- primaries -------------------------------------------------------------------------------------------

    def keep_primaries(self, *, within_shares: bool) -> None:
        """Leave each expert with its first holder of before, as far as memory and, if so asked, shares go."""
        carry = [0] * len(self.task.places)
        for at in self.task.order:
            quotas = self._quotas(at, carry)
            for expert, kept in enumerate(self.task.kept[at]):
                if kept and (not within_shares or self.load[at][kept[0]] < quotas[kept[0]]):
                    self._take(at, expert, kept[0])
            if within_shares:
                self._carry_on(at, carry, quotas)

    def keep_over_shares(self) -> None:
        """Leave what is left with one of its holders of before: one below its share, or the least over it."""
        for at in self.task.order:
            quotas = self._quotas(at, [0] * len(self.task.places))
            load = self.load[at]
            for expert, kept in enumerate(self.task.kept[at]):
                if not self.holders[at][expert]:
                    for i in sorted(kept, key=lambda i: (load[i] - quotas[i], i)):
                        if self._take(at, expert, i):
                            break

    def fill_gaps(self) -> None:
        """Give every expert without a holder to one that may: by shares, then anywhere, then to nobody."""
        carry = [0] * len(self.task.places)
        for at in self.task.order:
            quotas = self._quotas(at, carry)
            gaps = [expert for expert, holders in enumerate(self.holders[at]) if not holders]
            if gaps:
                gaps = self._promote(at, gaps, quotas)
                gaps = self._fill_by_shares(at, gaps, quotas)
                gaps = self._fill_by_least_over(at, gaps, quotas)
                self._fill_anywhere(at, gaps)
            self._carry_on(at, carry, quotas)

    def _quotas(self, at: int, carry: list[int]) -> list[int]:
        in_all = sum(self.task.units[at])
        return [
            share * in_all // WHOLE + owed for share, owed in zip(self.task.share(at), carry, strict=True)
        ]

    def _carry_on(self, at: int, carry: list[int], quotas: list[int]) -> None:
        """What a place got too little of this layer it may have more of the next, up to one expert."""
        one = max(1, WHOLE // self.task.model.n_expert)
        for i, share in enumerate(self.task.share(at)):
            carry[i] = max(-one, min(one, quotas[i] - self.load[at][i])) if share else 0

    def _promote(self, at: int, gaps: list[int], quotas: list[int]) -> list[int]:
        """Let who holds an expert already be asked first: that moves nothing."""
        left = []
        for expert in gaps:
            for i in self.task.kept[at][expert]:
                if self.load[at][i] < quotas[i] and self._take(at, expert, i):
                    break
            else:
                left.append(expert)
        return left

    def _fill_by_shares(self, at: int, gaps: list[int], quotas: list[int]) -> list[int]:
        """Neighbouring experts to one place, as far as its share goes."""
        units, load = self.task.units[at], self.load[at]
        size = self.task.model.expert_sizes_bytes[at]
        position = 0
        for i in self._may_get(at):
            while position < len(gaps) and self.free[i] >= size:
                if load[i] + units[gaps[position]] // 2 > quotas[i]:
                    break
                self._take(at, gaps[position], i)
                position += 1
        return gaps[position:]

    def _fill_by_least_over(self, at: int, gaps: list[int], quotas: list[int]) -> list[int]:
        """One by one to the place that is least over its share, of those that have one."""
        if not gaps:
            return gaps
        size, share = self.task.model.expert_sizes_bytes[at], self.task.share(at)
        heap = [
            (self.load[at][i] - quotas[i], i) for i in self._may_get(at) if share[i] and self.free[i] >= size
        ]
        heapify(heap)
        left = []
        for expert in gaps:
            if not heap:
                left.append(expert)
                continue
            _, i = heappop(heap)
            self._take(at, expert, i)
            if self.free[i] >= size:
                heappush(heap, (self.load[at][i] - quotas[i], i))
        return left

    def _fill_anywhere(self, at: int, gaps: list[int]) -> None:
        """Covering comes before speed: whoever has room, the soonest to answer first; else the backbone."""
        task = self.task
        size = task.model.expert_sizes_bytes[at]
        heap = [
            (task.speeds[i].rtt_ns + self._row_times(at, i), i)
            for i in self._may_get(at)
            if self.free[i] >= size
        ]
        heapify(heap)
        for expert in gaps:
            if heap:
                _, i = heappop(heap)
                self._take(at, expert, i)
                if self.free[i] >= size:
                    heappush(heap, (task.speeds[i].rtt_ns + self._row_times(at, i), i))
            elif task.backbone is not None and task.backbone_may(at) and self.free[task.backbone] >= size:
                self._take(at, expert, task.backbone)
                self.n_on_backbone += 1
            else:
                self.n_missing += 1

    def _row_times(self, at: int, i: int) -> int:
        """How long a place computes if it gets an expert more of the layer."""
        task = self.task
        units = self.load[at][i] + WHOLE // task.model.n_expert
        return max(1, task.rows * units // WHOLE) * task.speeds[i].row_ns

    def _may_get(self, at: int) -> list[int]:
        """The workers that may get something new of a layer."""
        return [i for i in self.task.allowed(at) if self.task.places[i].state != "suspect"]

    def _take(self, at: int, expert: int, i: int) -> bool:
        """Make a place the primary of an expert that has no holder, if it has the memory."""
        size = self.task.model.expert_sizes_bytes[at]
        if self.free[i] < size:
            return False
        self.free[i] -= size
        self.load[at][i] += self.task.units[at][expert]
        self.holders[at][expert].append(i)
        return True

    # -- further holders -------------------------------------------------------------------------------------

    def _wanted(self, at: int, expert: int) -> int:
        """How many holders an expert should have where there is room."""
        options, units = self.task.options, self.task.units[at]
        is_hot = units[expert] * len(units) >= options.hot_factor * sum(units)
        return options.holders + (options.hot_holders if is_hot else 0)

    def add_further(self) -> None:
        """Second and further holders: those of before first."""
        self.keep_further()
        self.fill_further()

    def keep_further(self) -> None:
        """Keep the other holders of before, as far as memory goes."""
        for at in self.task.order:
            size = self.task.model.expert_sizes_bytes[at]
            for expert, kept in enumerate(self.task.kept[at]):
                holders = self.holders[at][expert]
                for i in kept:
                    if len(holders) >= self._wanted(at, expert) - (not holders):
                        break
                    if i not in holders and self.free[i] >= size:
                        self.free[i] -= size
                        holders.append(i)

    def fill_further(self) -> None:
        """Give experts further holders where there is room: all their second, and the hot ones last."""
        for n_holders in range(2, self.task.options.holders + self.task.options.hot_holders + 1):
            for turn, at in enumerate(self.task.order):
                self._fill_layer(at, turn, n_holders)

    def _fill_layer(self, at: int, turn: int, n_holders: int) -> None:
        """Neighbours of one primary to one place, but what a primary has spread over all others."""
        size = self.task.model.expert_sizes_bytes[at]
        candidates = [i for i in self._may_get(at) if self.free[i] >= size]
        lacking = [
            holders
            for expert, holders in enumerate(self.holders[at])
            if len(holders) == n_holders - 1 and self._wanted(at, expert) >= n_holders
        ]
        parts_max = max(1, RANGES_MAX // 2 // (len(self.holders) * max(1, len(candidates))))
        n_of_primary = Counter(holders[0] for holders in lacking)
        tiers: dict[str, list[list[int]]] = {}
        turns: dict[int, int] = {}
        last: dict[int, tuple[int, int]] = {}
        for holders in lacking:
            primary = holders[0]
            chosen, n_left = last.get(primary, (primary, 0))
            if not n_left or chosen in holders or self.free[chosen] < size:
                name = self.task.places[primary].equivalence_class
                if name not in tiers:
                    tiers[name] = self._tiers(at, name, candidates)
                turns[primary] = turns.get(primary, turn - 1) + 1
                found = self._next_with_room(tiers[name], holders, turns[primary], size)
                if found is None:
                    continue
                n_others = max(1, len(next((tier for tier in tiers[name] if found in tier), ())) - 1)
                n_parts = min(n_others, parts_max)
                chosen, n_left = found, -(-n_of_primary[primary] // n_parts)
            last[primary] = chosen, n_left - 1
            self.free[chosen] -= size
            holders.append(chosen)

    def _tiers(self, at: int, name: str, candidates: list[int]) -> list[list[int]]:
        """Who is taken first: of the same class and fast, of the same class, fast, any."""
        share, places = self.task.share(at), self.task.places
        tiers: list[list[int]] = [[], [], [], []]
        for i in candidates:
            tiers[2 * (places[i].equivalence_class != name) + (not share[i])].append(i)
        return tiers

    def _next_with_room(self, tiers: list[list[int]], holders: list[int], turn: int, size: int) -> int | None:
        """Round and round from layer to layer, so that a lost node's work falls on all others."""
        primary = holders[0]
        for tier in tiers:
            after_it = [i for i in tier if i > primary] + [i for i in tier if i < primary]
            for step in range(len(after_it)):
                i = after_it[(turn + step) % len(after_it)]
                if i not in holders and self.free[i] >= size:
                    return i
            tier[:] = [i for i in tier if self.free[i] >= size]
        return None

    # -- what it is worth ------------------------------------------------------------------------------------

    @property
    def shortfall(self) -> tuple[int, int]:
        """Experts that nobody holds, and those that only the backbone does."""
        return self.n_missing, self.n_on_backbone

    def is_worth_more_than(self, other: _Draft) -> bool:
        """Whether to change more than the other does: to cover more, to use who is idle, or to be faster."""
        mine, others = ((each.shortfall, each.n_idle) for each in (self, other))
        gain_ns = other.layers_ns - self.layers_ns
        return mine < others or (mine == others and gain_ns * self.task.options.gain_min > other.layers_ns)

    @cached_property
    def layers_ns(self) -> int:
        """The predicted time of all layers together; asked only of a draft that is done."""
        task = self.task
        return sum(
            layer_ns(task.speeds, ((i, part) for i, part in enumerate(load) if part), task.rows)
            for load in self.load
        )

    @cached_property
    def n_idle(self) -> int:
        """Workers that are worth an expert or more, by their shares, and are asked first for none."""
        task = self.task
        n_output = sum(task.is_output)
        n_bulk = len(task.is_output) - n_output
        return sum(
            (task.shares[0][i] * n_bulk + task.shares[1][i] * n_output) * task.model.n_expert >= WHOLE
            and task.places[i].state != "suspect"
            and not any(load[i] for load in self.load)
            for i in task.workers
        )

    # -- as values -------------------------------------------------------------------------------------------

    def result(self, known: Sequence[Place], epoch: int, term: int, revision: int) -> Placement:
        """The draft as a plan."""
        task = self.task
        ids = [each.node_id for each in task.places]
        plan = plan_of(
            [[tuple(ids[i] for i in holders) for holders in layer] for layer in self.holders],
            task.model.layers,
            epoch=epoch,
            term=term,
            revision=revision,
            missing=[self._why_missing(at) for at in range(len(task.model.layers))],
            degraded=self._why_degraded(),
        )
        return Placement(plan, plan.missing(), self._refused(known), self._moves(), self.layers_ns)

    def _why_missing(self, at: int) -> str:
        """The reason for experts of a layer without a holder, with need and have; empty if all have one."""
        task = self.task
        need = sum(not holders for holders in self.holders[at]) * task.model.expert_sizes_bytes[at]
        if not need:
            return ""
        where = [
            *task.allowed(at),
            *([task.backbone] if task.backbone_may(at) and task.backbone is not None else []),
        ]
        rank = "output" if task.is_output[at] else "bulk"
        if not where:
            return f"no node may hold experts of rank {rank}"
        have = sum(self.free[i] for i in where)
        return f"no room on the {len(where)} node(s) of rank {rank}: need {need} bytes, have {have} in pieces"

    def _why_degraded(self) -> str:
        if not self.n_on_backbone:
            return ""
        task = self.task
        n_output = sum(
            task.is_output[at] and task.backbone in holders
            for at, layer in enumerate(self.holders)
            for holders in layer
        )
        if not task.workers:
            why = "no worker is there to hold any"
        elif n_output and not task.workers_by_rank[True]:
            why = "no worker may serve the output layers"
        elif n_output == self.n_on_backbone:
            why = "workers that may serve the output layers have no room"
        else:
            why = "workers have no room"
        return f"the backbone serves {self.n_on_backbone} experts itself: {why}"

    def _refused(self, known: Sequence[Place]) -> tuple[Refusal, ...]:
        task = self.task
        held_bytes = dict.fromkeys((each.node_id for each in task.places), 0)
        for size, layer in zip(task.model.expert_sizes_bytes, task.kept, strict=True):
            for holders in layer:
                for i in holders:
                    held_bytes[task.places[i].node_id] += size
        smallest = min(task.model.expert_sizes_bytes)
        refused = []
        for each in known:
            need = max(smallest, held_bytes.get(each.node_id, 0))
            if each.is_usable and not each.is_backbone and each.free_bytes < need:
                refused.append(Refusal(each.node_id, need, each.free_bytes))
        return tuple(refused)

    def _moves(self) -> tuple[Move, ...]:
        task = self.task
        news: list[list[tuple[int, int]]] = [[] for _ in task.places]
        for at, layer in enumerate(task.model.layers):
            for expert, holders in enumerate(self.holders[at]):
                for i in holders:
                    if i not in task.raw[at][expert]:
                        news[i].append((layer, expert))
        moves = []
        for each, pairs in zip(task.places, news, strict=True):
            if pairs:
                held = set(each.holding.pairs())
                shard = ShardSet.from_pairs(pair for pair in pairs if pair not in held)
                if len(shard):
                    moves.append(Move(each.node_id, shard, task.model.shard_size_bytes(shard)))
        return tuple(moves)


def _units(model: ModelShape, hotness: Hotness) -> list[list[int]]:
    """Each expert's part of its layer's traffic, of `WHOLE`; equal where nothing was counted."""
    even = [max(1, WHOLE // model.n_expert)] * model.n_expert
    units = []
    for at in range(len(model.layers)):
        counted = sum(hotness[at]) if hotness else 0
        units.append([max(1, each * WHOLE // counted) for each in hotness[at]] if counted else even)
    return units


def _holders_before(places: Sequence[Place], model: ModelShape, previous: Plan | None) -> _Holders:
    """The previous plan's holders that are among the places, or what places prove to hold."""
    index_of = {each.node_id: i for i, each in enumerate(places)}
    holders: _Holders = [[[] for _ in range(model.n_expert)] for _ in model.layers]
    at_of = {layer: at for at, layer in enumerate(model.layers)}
    if previous is None:
        for i, each in enumerate(places):
            for layer, first, end in each.holding.ranges:
                for expert in range(first, min(end, model.n_expert)) if layer in at_of else ():
                    holders[at_of[layer]][expert].append(i)
        return holders
    indices = [index_of.get(node) for node in previous.nodes]
    for at, layer_plan in enumerate(previous.layers):
        for part in layer_plan.ranges:
            found = [i for i in (indices[holder] for holder in part.holders) if i is not None]
            for expert in range(part.first, part.end):
                holders[at][expert] = found
    return holders


def _chosen(
    known: Sequence[Place], model: ModelShape, previous: Plan | None, options: PlacementOptions
) -> list[Place]:
    """At most `nodes_max` usable places, in order of their ids: the soonest to answer, if they have room.

    Who holds something already counts as a quarter faster, so that a newcomer replaces it only for a reason.
    Where the soonest together have no memory for the output layers, or for all, the smallest make way for
    the largest, as long as the output layers keep enough room.
    """
    usable = [each for each in known if each.is_usable]
    backbones = [each for each in usable if each.is_backbone]
    workers = [each for each in usable if not each.is_backbone]
    n_max = options.nodes_max - len(backbones)
    if len(workers) <= n_max:
        return usable
    held_before = set(previous.nodes) if previous else set()
    ranked = sorted(
        zip(workers, speeds_of(workers), strict=True),
        key=lambda each: (
            each[1].one_row_ns * (3 if each[0].node_id in held_before else 4),
            -each[0].free_bytes,
            each[0].node_id,
        ),
    )
    chosen = [each for each, _ in ranked[:n_max]]
    spare = [each for each, _ in ranked[n_max:]]

    def serves_output(each: Place) -> bool:
        return may_hold_output(each, trust_claims=options.trust_claims)

    sizes = model.size_of_layer
    output_bytes = model.n_expert * sum(sizes[layer] for layer in model.output_layers)
    all_bytes = model.n_expert * sum(sizes.values())
    for _ in range(len(chosen)):
        spare_for_output = sum(each.free_bytes for each in chosen if serves_output(each)) - output_bytes
        if spare_for_output >= 0 and sum(each.free_bytes for each in chosen) >= all_bytes:
            break
        chosen.sort(key=lambda each: (each.free_bytes, each.node_id))
        spare.sort(key=lambda each: (-each.free_bytes, each.node_id))
        comers = [*spare[:1], *[each for each in spare if serves_output(each)][:1]]
        exchange = next(
            (
                (leaver, comer)
                for leaver in chosen
                for comer in comers
                if _gains(leaver, comer, serves_output, spare_for_output)
            ),
            None,
        )
        if exchange is None:
            break
        leaver, comer = exchange
        chosen.remove(leaver)
        spare.remove(comer)
        chosen.append(comer)
        spare.append(leaver)
    return sorted((*backbones, *chosen), key=lambda each: each.node_id)


def _gains(
    leaver: Place, comer: Place, serves_output: Callable[[Place], bool], spare_for_output: int
) -> bool:
    """Whether there is more room with one than with the other: for output while that lacks, else in all."""
    if spare_for_output < 0:
        return serves_output(comer) and (not serves_output(leaver) or comer.free_bytes > leaver.free_bytes)
    is_safe = serves_output(comer) or not serves_output(leaver) or leaver.free_bytes <= spare_for_output
    return is_safe and comer.free_bytes > leaver.free_bytes
