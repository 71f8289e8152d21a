"""Bringing a plan to those it names, and keeping track of who serves it.

The backbone's side of the plan exchange, apart from placement (which decides what the plan is) and from
election (which decides who may issue one). Each node of the plan is offered it until it answers, with growing
pauses and never in bursts; what it answers is a fact for placement. A refusal pauses the offers to that node
longer, since the reason may pass; nothing here gives a node up. Whoever the plan gives nothing is told too,
so that it knows the plan in force, as long as that costs little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from kvasir_proto.effects import Send
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, seconds
from kvasir_proto.messages.plan import PlanAccept, PlanOffer, PlanRefusal
from kvasir_proto.placement.plan import Plan

RETRY_FIRST: Final[Duration] = seconds(2)
RETRY_MAX: Final[Duration] = seconds(30)
"""An offer that is not answered is made again after 2, 4, 8, 16 and then every 30 seconds."""
INFORMING_BYTES_MAX: Final = 1 << 20
"""Bytes of one plan for nodes that it gives nothing: of 4 KiB it goes to 256 of them, of 1 MiB to one."""
OFFERS_AT_ONCE_MAX: Final = 32
"""Offers sent in one go: a plan for 256 nodes has up to 1 MiB each time."""


@dataclass(slots=True)
class _Offer:
    due: Instant
    tries: int = 0
    is_answered: bool = False


class PlanOffers:
    """Who has answered the plan that is offered now. Between `withdraw` and `offer` there is none."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._message: PlanOffer | None = None
        self._offers: dict[NodeId, _Offer] = {}
        self._informed: set[NodeId] = set()
        """Those of the offers that go to nodes without a part in the plan."""
        self._effects: list[Send] = []

    @property
    def plan(self) -> Plan | None:
        """The plan that is offered."""
        return self._plan

    def offer(
        self, plan: Plan, signed_plan: bytes, proof: bytes, to: Collection[NodeId], now: Instant
    ) -> None:
        """Bring this plan to these nodes; the one before is offered no more."""
        self._plan = plan
        self._message = PlanOffer(signed_plan, proof)
        self._offers = {node_id: _Offer(now) for node_id in to}
        self._informed = set()
        self.tick(now)

    def inform(self, node_ids: Iterable[NodeId], now: Instant) -> None:
        """Let these hear of the plan that is offered, the first ones where there is not room for all.

        They replace those of the call before: who is not named any more is not told again.
        """
        if self._message is None:
            return
        room = INFORMING_BYTES_MAX // len(self._message.plan)
        others = (each for each in node_ids if each in self._informed or each not in self._offers)
        wanted = set(islice(others, room))
        for gone in self._informed - wanted:
            del self._offers[gone]
        self._offers |= {each: _Offer(now) for each in sorted(wanted - self._informed)}
        self._informed = wanted
        self.tick(now)

    def renew_proof(self, proof: bytes) -> None:
        """Offer with this proof from now on: the electorate has changed, and nobody believes the old one."""
        if self._message is not None:
            self._message = replace(self._message, proof=proof)

    def withdraw(self) -> None:
        """Offer nothing: the term is over."""
        self._plan = self._message = None
        self._offers = {}
        self._informed = set()

    def hurry(self, node_id: NodeId, now: Instant) -> None:
        """Its connection was lost: offer the node the plan now, whatever it answered before."""
        if node_id in self._offers:
            self._offers[node_id] = _Offer(now)

    def take(self, answer: PlanAccept | PlanRefusal, sender: NodeId, now: Instant) -> bool:
        """Note an answer; whether it is one to the plan that is offered now, by a node that it names."""
        plan, offer = self._plan, self._offers.get(sender)
        if plan is None or offer is None:
            return False
        if (answer.epoch, answer.term, answer.revision) != (plan.epoch, plan.term, plan.revision):
            return False
        if isinstance(answer, PlanRefusal):
            offer.due = after(now, RETRY_MAX)
            return True
        offer.is_answered = answer.shard_digest == plan.shard_of(sender).digest()
        return offer.is_answered

    def tick(self, now: Instant) -> None:
        """Offer again what is due."""
        if self._message is None:
            return
        due = [each for each, offer in sorted(self._offers.items()) if self._is_due(offer, now)]
        for node_id in due[:OFFERS_AT_ONCE_MAX]:
            offer = self._offers[node_id]
            offer.due = after(now, Duration(min(RETRY_MAX, RETRY_FIRST << min(offer.tries, 8))))
            offer.tries += 1
            self._effects.append(Send(node_id, self._message))

    @staticmethod
    def _is_due(offer: _Offer, now: Instant) -> bool:
        return not offer.is_answered and offer.due <= now

    def next_deadline(self) -> Instant | None:
        """When to call `tick` next."""
        if not self._offers:
            return None
        return min((each.due for each in self._offers.values() if not each.is_answered), default=None)

    def drain(self) -> list[Send]:
        """Offers to be made."""
        effects, self._effects = self._effects, []
        return effects
