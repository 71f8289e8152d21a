"""When a plan is due: the machine around `place` and `next_step`.

It keeps the newest plan this node knows, on disk, whoever made it; while this node is backbone it compares
that plan with the inventory and says when the next one is due and why. It signs and sends nothing: whoever
drives it signs `PlanDue` and tells the holders, and what these then prove comes back in the next inventory.
It never waits for ever: a holder that does not prove its part of a step in time gets nothing new for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, TypeAlias

from kvasir_proto.codec import decode
from kvasir_proto.effects import Effect, Notice, Now, Persist
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages import Message
from kvasir_proto.placement.inventory import ModelShape, Place
from kvasir_proto.placement.options import LAN, PlacementOptions
from kvasir_proto.placement.plan import PLAN, Plan
from kvasir_proto.placement.rebalance import Hotness, Placement, place
from kvasir_proto.placement.transition import next_step


@dataclass(frozen=True, slots=True)
class SetInventory:
    """All nodes that may hold something, as they are now; it replaces what was said before."""

    places: tuple[Place, ...]
    hotness: Hotness = ()


@dataclass(frozen=True, slots=True)
class BecomeBackbone:
    """This node is backbone of a term from now on. `adopted` is the newest plan it learnt of, if any."""

    epoch: int
    term: int
    adopted: Plan | None = None


@dataclass(frozen=True, slots=True)
class NotePlan:
    """Another backbone's plan, believed already: kept, so that this node could go on with it."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class StepDown:
    """This node is not backbone any more."""


@dataclass(frozen=True, slots=True)
class PlanDue:
    """A plan to sign and to tell its holders. It is persisted in the same drain."""

    plan: Plan
    reasons: tuple[str, ...]


Request: TypeAlias = SetInventory | BecomeBackbone | NotePlan | StepDown


class PlacementCore:
    """Placement on one node. `stored` is what it persisted last in slot `plan`, None if nothing.

    Raises `RemoteProtocolError` for stored bytes that are not a plan.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        model: ModelShape,
        options: PlacementOptions = LAN,
        stored: bytes | None = None,
        now: Now,
    ) -> None:
        self._node_id = node_id
        self._model = model
        self._options = options
        self._plan = decode(stored, PLAN) if stored is not None else None
        self._term: tuple[int, int] | None = None
        self._inventory: SetInventory | None = None
        self._placement: Placement | None = None
        self._adopts = False
        self._news_at: Instant | None = None
        """When the oldest news arrived that no plan has answered."""
        self._not_before = now.instant
        """When the next plan may be made."""
        self._urgent_not_before = now.instant
        """The same while some expert has no holder."""
        self._step_ends: Instant | None = None
        """Until when the holders of the plan have to prove it; None once they have."""
        self._shunned: dict[NodeId, Instant] = {}
        """Nodes that did not prove in time, and until when they get nothing new: some of the inventory."""
        self._uncovered: tuple[Plan, SetInventory, bool] | None = None
        self._effects: list[Effect | PlanDue] = []

    # -- the five verbs --------------------------------------------------------------------------------------

    def receive(self, message: Message, sender: NodeId, now: Now) -> NoReturn:
        """Placement has no messages of its own. Raises `RemoteProtocolError`."""
        raise RemoteProtocolError(f"{message.kind} is not for placement", "unexpected_message")

    def command(self, request: Request, now: Now) -> None:
        """Take one request. Raises `LocalProtocolError` for an inventory that `place` would refuse."""
        match request:
            case SetInventory():
                self._take_inventory(request, now)
            case BecomeBackbone():
                self._begin_term(request, now)
            case NotePlan(plan):
                if self._term is None and (self._plan is None or _version(self._plan) < _version(plan)):
                    self._keep(plan)
            case StepDown():
                self._term = None
                self._step_ends = self._news_at = None
        self._consider(now)

    def tick(self, now: Now) -> None:
        """Time has passed."""
        self._consider(now)

    def next_deadline(self) -> Instant | None:
        """When `tick` is needed next; None while only news can change anything."""
        if self._term is None or self._inventory is None:
            return None
        deadlines = [each for each in (self._step_ends, *self._shunned.values()) if each is not None]
        due_at = self._due_at()
        return min((*deadlines, due_at) if due_at is not None else deadlines, default=None)

    def drain(self) -> list[Effect | PlanDue]:
        """What is to be done, in order; forgotten here."""
        effects, self._effects = self._effects, []
        return effects

    # -- what is known ---------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The newest plan this node knows, its own or another backbone's."""
        return self._plan

    @property
    def placement(self) -> Placement | None:
        """What was last aimed at; None where this node has not planned in this term."""
        return self._placement

    def _take_inventory(self, request: SetInventory, now: Now) -> None:
        ids = [each.node_id for each in request.places]
        if len(set(ids)) != len(ids) or sum(each.is_backbone for each in request.places) > 1:
            raise LocalProtocolError("each node is one place, and one of them at most is the backbone")
        if request != self._inventory:
            self._inventory = request
            self._note_news(now)
        self._shunned = {node: until for node, until in self._shunned.items() if node in set(ids)}

    def _begin_term(self, request: BecomeBackbone, now: Now) -> None:
        """Take the newest plan known over: the same shards, this term's version."""
        if request.adopted is not None and (
            self._plan is None or _version(self._plan) < _version(request.adopted)
        ):
            self._plan = request.adopted
        self._term = (request.epoch, request.term)
        self._adopts = self._plan is not None and self._fits_model(self._plan)
        if not self._adopts and self._plan is not None:
            self._effects.append(Notice("plan_of_another_model", (("revision", self._plan.revision),)))
        self._placement = None
        self._shunned = {}
        self._step_ends = None
        self._not_before = self._urgent_not_before = now.instant
        self._note_news(now)

    def _fits_model(self, plan: Plan) -> bool:
        layers = tuple(each.layer for each in plan.layers)
        return (layers, plan.n_expert) == (self._model.layers, self._model.n_expert)

    def _note_news(self, now: Now) -> None:
        if self._news_at is None:
            self._news_at = now.instant

    # -- when and what ---------------------------------------------------------------------------------------

    def _consider(self, now: Now) -> None:
        if self._term is None or self._inventory is None:
            return
        self._forgive(now)
        if self._adopts:
            assert self._plan is not None
            self._adopts = False
            self._issue(self._plan, ("adopted",), now)
            self._note_news(now)
            return
        self._watch_step(now)
        due_at = self._due_at()
        if due_at is not None and now.instant >= due_at:
            self._plan_anew(now)

    def _due_at(self) -> Instant | None:
        """When the next plan may be thought about; None while there is nothing to think about."""
        if self._adopts:
            return self._not_before
        if self._news_at is None or self._inventory is None:
            return None
        settled = after(self._news_at, self._options.settle)
        if self._plan is None or not self._fits_model(self._plan):
            return max(settled, self._not_before)
        if self._is_uncovered(self._plan):
            return max(self._news_at, self._urgent_not_before)
        if self._step_ends is not None:
            return None
        return max(settled, self._not_before)

    def _is_uncovered(self, plan: Plan) -> bool:
        """Kept until the plan or the inventory is another one: it is asked whenever the time is."""
        assert self._inventory is not None
        known = self._uncovered
        if known is None or known[0] is not plan or known[1] is not self._inventory:
            there = {each.node_id for each in self._inventory.places if each.state != "lost"}
            coverage = plan.coverage(there)
            known = self._uncovered = (plan, self._inventory, coverage.n_pairs_held < coverage.n_pairs)
        return known[2]

    def _places(self) -> list[Place]:
        """The inventory, with those that were shunned treated as suspects: nothing new for them."""
        assert self._inventory is not None
        return [
            replace(each, state="suspect")
            if each.node_id in self._shunned and each.state in ("serving", "joined")
            else each
            for each in self._inventory.places
        ]

    def _plan_anew(self, now: Now) -> None:
        assert self._inventory is not None
        assert self._term is not None
        self._news_at = None
        places = self._places()
        previous = self._plan if self._plan is not None and self._fits_model(self._plan) else None
        if previous is None:
            n_workers = sum(
                each.is_usable and not each.is_backbone and bool(each.free_bytes) for each in places
            )
            if n_workers < self._options.workers_min:
                return
        epoch, term = self._term
        revision = self._plan.revision + 1 if self._plan is not None else 1
        target = place(
            places,
            self._model,
            previous,
            self._options,
            epoch=epoch,
            term=term,
            revision=revision,
            hotness=self._inventory.hotness,
        )
        self._placement = target
        self._effects.extend(
            Notice(
                "shard_refused",
                (("node", each.node_id), ("need", each.need_bytes), ("have", each.have_bytes)),
            )
            for each in target.refused
        )
        if previous is None:
            self._issue(target.plan, ("first",), now)
            return
        step = next_step(previous, target.plan, places, self._model, self._options)
        if not step.holds_the_same_as(previous):
            self._issue(step, self._reasons(previous, target.plan, places), now)

    def _reasons(self, previous: Plan, target: Plan, places: Sequence[Place]) -> tuple[str, ...]:
        states = {each.node_id: each.state for each in places}
        reasons = []
        if any(states.get(node, "lost") == "lost" for node in previous.nodes):
            reasons.append("member_lost")
        if any(states.get(node) == "draining" for node in previous.nodes):
            reasons.append("member_draining")
        if set(target.nodes) - set(previous.nodes):
            reasons.append("newcomer")
        return tuple(reasons) or ("rebalanced",)

    def _issue(self, plan: Plan, reasons: tuple[str, ...], now: Now) -> None:
        assert self._term is not None
        epoch, term = self._term
        revision = self._plan.revision + 1 if self._plan is not None else 1
        plan = replace(plan, epoch=epoch, term=term, revision=revision)
        self._keep(plan)
        self._effects.append(PlanDue(plan, reasons))
        options = self._options
        self._not_before = after(now.instant, options.plan_interval)
        self._urgent_not_before = after(now.instant, options.plan_interval_urgent)
        to_load = max((self._unproved_bytes(plan, each) for each in self._places()), default=0)
        patience = options.step_timeout + to_load * 10**9 // options.load_rate_bytes_s
        self._step_ends = after(now.instant, Duration(patience))

    def _keep(self, plan: Plan) -> None:
        self._plan = plan
        self._effects.append(Persist("plan", plan.encoded))

    # -- proofs ----------------------------------------------------------------------------------------------

    def _unproved_bytes(self, plan: Plan, one: Place) -> int:
        """Bytes of what the plan gives a node that it has not proved to hold."""
        shard = plan.shard_of(one.node_id)
        if shard == one.holding:
            return 0
        return self._model.shard_size_bytes(_without(shard, one.holding))

    def _has_room(self, plan: Plan, one: Place) -> bool:
        """Whether what the plan gives a node fits where the node now says it has room."""
        return self._model.shard_size_bytes(plan.shard_of(one.node_id)) <= one.free_bytes

    def _watch_step(self, now: Now) -> None:
        """See whether the holders have proved the plan; shun those that had their time."""
        if self._step_ends is None or self._plan is None:
            return
        late = [
            each
            for each in sorted(self._places(), key=lambda each: each.node_id)
            if each.is_usable
            and each.state != "suspect"
            and each.node_id in self._plan.nodes
            and self._unproved_bytes(self._plan, each)
        ]
        # Who has less room than it said will prove nothing: to wait for it is no use, and it is not to blame.
        late = [each for each in late if self._has_room(self._plan, each)]
        if late and now.instant < self._step_ends:
            return
        self._step_ends = None
        self._note_news(now)
        for each in late:
            self._shunned[each.node_id] = after(now.instant, self._options.retry_after)
            self._effects.append(
                Notice("shard_not_proved", (("node", each.node_id), ("revision", self._plan.revision)))
            )

    def _forgive(self, now: Now) -> None:
        over = [node for node, until in self._shunned.items() if until <= now.instant]
        for node in over:
            del self._shunned[node]
            self._note_news(now)


def _version(plan: Plan) -> tuple[int, int, int]:
    return plan.epoch, plan.term, plan.revision


def _without(shard: ShardSet, held: ShardSet) -> ShardSet:
    """The pairs of a shard that another set lacks."""
    return shard.difference(held) if held.ranges else shard
