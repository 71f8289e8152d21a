"""First add, then drop: no step takes an expert's last proved holder away, and every transition ends."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.ids import NodeId
from kvasir_proto.placement.inventory import ModelShape, Place
from kvasir_proto.placement.options import LAN
from kvasir_proto.placement.plan import Plan
from kvasir_proto.placement.rebalance import place
from kvasir_proto.placement.transition import next_step
from tests.proto.placement.places import (
    BACKBONE,
    IDS,
    MODEL,
    backbone,
    holders_of,
    inventories,
    models,
    proving,
    worker,
)

GENTLE = dataclasses.replace(LAN, in_flight_bytes_max=100)


def _walk(current: Plan, target: Plan, places: list[Place], model: ModelShape) -> list[Plan]:
    """All steps, each proved before the next."""
    steps = [current]
    for _ in range(2000):
        step = next_step(steps[-1], target, proving(places, steps[-1]), model, GENTLE)
        if step.holds_the_same_as(steps[-1]):
            return steps
        steps.append(step)
    raise AssertionError("the transition does not end")


def test_an_old_holder_stays_first_until_the_new_one_is_proved() -> None:
    old, new = worker(0), worker(1)
    current = place([old], MODEL).plan
    target = place([new], MODEL).plan
    places = proving([old, new], current)
    step = next_step(current, target, places, MODEL)
    assert set(holders_of(step).values()) == {(IDS[0], IDS[1])}
    assert next_step(step, target, places, MODEL).holds_the_same_as(step)
    assert next_step(step, target, proving(places, step), MODEL).holds_the_same_as(target)


def test_bytes_in_flight_are_bounded_except_for_what_nobody_holds() -> None:
    old, new = worker(0), worker(1)
    current = place([old], MODEL).plan
    target = place([new], MODEL).plan
    step = next_step(current, target, proving([old, new], current), MODEL, GENTLE)
    assert len(step.shard_of(IDS[1])) == 10
    gone = next_step(current, target, [new], MODEL, GENTLE)
    assert gone.holds_the_same_as(target)


def test_one_expert_over_the_bound_still_moves() -> None:
    small = dataclasses.replace(LAN, in_flight_bytes_max=1)
    current, target = place([worker(0)], MODEL).plan, place([worker(1)], MODEL).plan
    step = next_step(current, target, proving([worker(0), worker(1)], current), MODEL, small)
    assert len(step.shard_of(IDS[1])) == 1


def test_who_may_not_hold_output_any_more_is_dropped_at_once() -> None:
    places = [worker(0), worker(1)]
    current = place(places, MODEL, options=dataclasses.replace(LAN, holders=1)).plan
    places = [*proving([worker(0, output_verdict=False), worker(1)], current), backbone()]
    step = next_step(current, place(places, MODEL, current).plan, places, MODEL)
    assert all(holders == (IDS[1],) for (layer, _), holders in holders_of(step).items() if layer == 7)


def test_the_backbone_serves_until_a_worker_has_proved() -> None:
    own = backbone(memory_bytes=2000)
    current = place([own], MODEL).plan
    places = proving([own, worker(0)], current)
    target = place(places, MODEL, current).plan
    steps = _walk(current, target, places, MODEL)
    assert target.nodes == (IDS[0],)
    assert steps[-1].holds_the_same_as(target)
    assert all(each.degraded for each in steps[:-1])
    assert BACKBONE in steps[1].nodes


def test_full_nodes_that_exchange_seconds_make_room_first() -> None:
    """Each is full; what goes first is a holder that is neither wanted nor the last one."""
    model = ModelShape((0,), 4, 1, (10,))
    one = {"memory_bytes": 40}
    places = [worker(0, **one), worker(1, **one), worker(2, memory_bytes=0), worker(3, **one)]
    current = place([places[0], places[1]], model).plan
    target = place([places[0], places[3]], model).plan
    steps = _walk(current, target, places, model)
    assert steps[-1].holds_the_same_as(target)


@given(st.data(), models())
def test_every_transition_is_safe_and_ends(data: st.DataObject, model: ModelShape) -> None:
    first = data.draw(inventories(model))
    current = place(first, model).plan
    places = data.draw(inventories(model))
    places += [each for each in first if each.node_id not in {other.node_id for other in places}]
    places = [each for i, each in enumerate(places) if not each.is_backbone or i == _last_backbone(places)]
    target = place(places, model, current).plan
    steps = _walk(current, target, places, model)
    by_id = {each.node_id: each for each in places}
    alive = {each.node_id for each in places if each.state != "lost"}
    for before, after in pairwise(steps):
        held_before, held_after = holders_of(before), holders_of(after)
        added: Counter[NodeId] = Counter()
        for (layer, expert), holders in held_after.items():
            size = model.size_of_layer[layer]
            for node in set(holders).difference(held_before[layer, expert]):
                added[node] += size
            if layer not in model.output_layers and alive.intersection(held_before[layer, expert]):
                assert alive.intersection(held_before[layer, expert]).intersection(holders)
        for node, size in added.items():
            held = model.shard_size_bytes(before.shard_of(by_id[node].node_id))
            assert held + size <= by_id[node].free_bytes


def _last_backbone(places: list[Place]) -> int:
    return max((i for i, each in enumerate(places) if each.is_backbone), default=-1)
