"""When plans are due: at first, after losses and newcomers, step by step, not too often, never too late."""

from __future__ import annotations

import dataclasses

import pytest

from kvasir_proto.codec import decode
from kvasir_proto.effects import Notice, Now, Persist
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.instants import Instant, WallTime
from kvasir_proto.placement.core import (
    BecomeBackbone,
    NotePlan,
    PlacementCore,
    PlanDue,
    SetInventory,
    StepDown,
)
from kvasir_proto.placement.inventory import Place
from kvasir_proto.placement.options import LAN
from kvasir_proto.placement.plan import PLAN, Plan
from kvasir_proto.placement.rebalance import place
from tests.proto.placement.places import BACKBONE, IDS, MODEL, backbone, proving, worker

OPTIONS = dataclasses.replace(LAN, workers_min=2)


class Swarm:
    """One core, a clock, and nodes that prove what they are given."""

    def __init__(self, n_workers: int = 3, stored: bytes | None = None) -> None:
        self.time = 0
        self.core = PlacementCore(node_id=BACKBONE, model=MODEL, options=OPTIONS, stored=stored, now=self.now)
        self.places: list[Place] = [worker(i) for i in range(n_workers)]
        self.plans: list[PlanDue] = []
        self.notices: list[Notice] = []

    @property
    def now(self) -> Now:
        return Now(Instant(self.time), WallTime(self.time))

    def tell(self) -> None:
        self.core.command(SetInventory((*self.places, backbone())), self.now)
        self.drain()

    def drain(self) -> None:
        effects = self.core.drain()
        for i, each in enumerate(effects):
            if isinstance(each, PlanDue):
                persisted = effects[i - 1]
                assert isinstance(persisted, Persist)
                assert decode(persisted.data, PLAN) == each.plan
                self.plans.append(each)
            elif isinstance(each, Notice):
                self.notices.append(each)

    def prove(self) -> None:
        assert self.core.plan is not None
        self.places = proving(self.places, self.core.plan)
        self.tell()

    def run(self, seconds: float) -> None:
        """Tick at the deadlines until then; every deadline must come to something."""
        end = self.time + round(seconds * 1e9)
        for _ in range(1000):
            deadline = self.core.next_deadline()
            if deadline is None or deadline > end:
                self.time = end
                return
            self.time = max(self.time, deadline)
            self.core.tick(self.now)
            self.drain()
        raise AssertionError("deadlines that come to nothing")

    def start(self) -> Plan:
        self.core.command(BecomeBackbone(0, 1), self.now)
        self.tell()
        self.run(5)
        self.prove()
        self.run(5)
        assert self.core.plan is not None
        return self.core.plan


def test_the_first_plan_waits_for_enough_workers() -> None:
    swarm = Swarm(1)
    swarm.core.command(BecomeBackbone(0, 1), swarm.now)
    swarm.tell()
    swarm.run(60)
    assert swarm.plans == []
    swarm.places.append(worker(1, memory_bytes=0))
    swarm.tell()
    swarm.run(60)
    assert swarm.plans == [], "who offers nothing is no worker, or not yet"
    swarm.places[1] = worker(1)
    swarm.tell()
    swarm.run(1)
    (first,) = swarm.plans
    assert first.reasons == ("first",)
    assert (first.plan.epoch, first.plan.term, first.plan.revision) == (0, 1, 1)
    assert first.plan.coverage() == (128, 128, 2, 0)


def test_a_swarm_in_which_nothing_happens_makes_no_plans() -> None:
    swarm = Swarm()
    swarm.start()
    swarm.run(10_000)
    assert len(swarm.plans) == 1
    assert swarm.core.next_deadline() is None


def test_only_the_backbone_plans() -> None:
    swarm = Swarm()
    swarm.tell()
    swarm.run(60)
    assert swarm.plans == []
    swarm.start()
    swarm.core.command(StepDown(), swarm.now)
    swarm.places.pop()
    swarm.tell()
    swarm.run(60)
    assert len(swarm.plans) == 1


def test_a_newcomer_is_given_its_share_before_anybody_drops_it() -> None:
    swarm = Swarm()
    first = swarm.start()
    swarm.places.append(worker(3))
    swarm.tell()
    swarm.run(3)
    assert swarm.plans[-1].reasons == ("newcomer",)
    added = swarm.plans[-1].plan
    assert len(added.shard_of(IDS[3])) > 0
    for i in range(3):
        assert added.shard_of(IDS[i]) == first.shard_of(IDS[i])
    swarm.run(10)
    assert len(swarm.plans) == 2, "nothing is dropped before the newcomer has proved"
    swarm.prove()
    swarm.run(10)
    last = swarm.plans[-1].plan
    assert last.shard_of(IDS[3]) == added.shard_of(IDS[3])
    assert any(len(last.shard_of(IDS[i])) < len(first.shard_of(IDS[i])) for i in range(3))


def test_a_lost_members_experts_get_second_holders_again() -> None:
    swarm = Swarm(4)
    swarm.start()
    swarm.places.pop(0)
    swarm.tell()
    swarm.run(3)
    assert "member_lost" in swarm.plans[-1].reasons
    swarm.prove()
    swarm.run(10)
    assert swarm.plans[-1].plan.coverage({each.node_id for each in swarm.places}) == (128, 128, 2, 0)


def test_an_expert_without_a_holder_does_not_wait_for_the_rate() -> None:
    swarm = Swarm(4)
    swarm.start()
    del swarm.places[:2]
    swarm.tell()
    swarm.run(0.3)
    assert swarm.plans[-1].plan.coverage({each.node_id for each in swarm.places}).n_pairs_held == 128


def test_plans_follow_each_other_at_a_bounded_rate() -> None:
    swarm = Swarm(3)
    swarm.start()
    for i in range(3, 43):
        swarm.places.append(worker(i))
        swarm.tell()
        swarm.run(0.1)
        swarm.prove()
    assert len(swarm.plans) <= 4


def test_who_does_not_prove_in_time_gets_nothing_new_for_a_while() -> None:
    swarm = Swarm()
    swarm.start()
    swarm.places.append(worker(3))
    swarm.tell()
    swarm.run(70)
    assert [dict(each.fields)["node"] for each in swarm.notices if each.event == "shard_not_proved"] == [
        IDS[3]
    ]
    assert swarm.core.plan is not None
    assert IDS[3] not in swarm.core.plan.nodes
    n_plans = len(swarm.plans)
    swarm.run(200)
    assert IDS[3] in {node for each in swarm.plans[n_plans:] for node in each.plan.nodes}


def test_a_new_backbone_goes_on_with_the_last_plan() -> None:
    adopted = place([worker(i) for i in range(3)], MODEL, epoch=0, term=4, revision=9).plan
    swarm = Swarm()
    swarm.places = proving(swarm.places, adopted)
    swarm.core.command(BecomeBackbone(0, 5, adopted), swarm.now)
    swarm.tell()
    assert [each.reasons for each in swarm.plans] == [("adopted",)]
    plan = swarm.plans[0].plan
    assert plan.holds_the_same_as(adopted)
    assert (plan.epoch, plan.term, plan.revision) == (0, 5, 10)
    swarm.run(100)
    assert len(swarm.plans) == 1


def test_a_plan_that_was_noted_is_kept_through_a_restart_and_adopted() -> None:
    swarm = Swarm()
    plan = place(swarm.places, MODEL, epoch=0, term=4, revision=9).plan
    swarm.core.command(NotePlan(plan), swarm.now)
    swarm.core.command(NotePlan(dataclasses.replace(plan, revision=8)), swarm.now)
    (persisted,) = swarm.core.drain()
    assert isinstance(persisted, Persist)
    assert persisted.slot == "plan"
    again = Swarm(stored=persisted.data)
    assert again.core.plan == plan
    again.core.command(BecomeBackbone(0, 5), again.now)
    again.tell()
    assert again.plans[0].reasons == ("adopted",)


def test_nobody_talks_to_placement() -> None:
    swarm = Swarm()
    plan = place(swarm.places, MODEL).plan
    with pytest.raises(RemoteProtocolError, match="not for placement"):
        swarm.core.receive(plan, IDS[0], swarm.now)
    with pytest.raises(LocalProtocolError):
        swarm.core.command(SetInventory((worker(0), worker(0))), swarm.now)
