"""Every rule of placement by a table; what holds of every placement by properties and a brute-force twin."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.codec import encode
from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.limits import SIGNED_SIZE_MAX
from kvasir_proto.manifest import ShardSet
from kvasir_proto.placement.inventory import ModelShape, Place, PlaceState, may_hold_output
from kvasir_proto.placement.options import LAN, PlacementOptions
from kvasir_proto.placement.plan import make_plan
from kvasir_proto.placement.rebalance import Placement, place
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

CHECKED = dataclasses.replace(LAN, trust_claims=False)
OUTPUT = sorted(MODEL.output_layers)


# --- the rank rule ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "accumulation, verdict, claimed, checked",
    [
        ("F32", None, True, False),
        ("F32", True, True, True),
        ("F32", False, False, False),
        ("UNKNOWN", None, True, False),
        ("UNKNOWN", True, True, False),
        ("F16", None, False, False),
        ("F16", True, False, False),
        ("BF16", True, False, False),
        ("MIXED", True, False, False),
    ],
)
def test_who_may_hold_output(accumulation: Any, verdict: bool | None, claimed: bool, checked: bool) -> None:
    one = worker(0, accumulation=accumulation, output_verdict=verdict)
    assert may_hold_output(one, trust_claims=True) is claimed
    assert may_hold_output(one, trust_claims=False) is checked


def test_the_backbone_needs_no_verdict_and_no_less_precision() -> None:
    assert may_hold_output(backbone(), trust_claims=False)
    assert not may_hold_output(backbone(accumulation="F16"), trust_claims=True)


def test_output_goes_to_the_f32_worker_alone() -> None:
    plan = place([worker(0, accumulation="F16"), worker(1), worker(2, accumulation="BF16")], MODEL).plan
    for (layer, _), holders in holders_of(plan).items():
        assert holders == (IDS[1],) if layer in OUTPUT else len(holders) == 2


def test_the_backbone_serves_output_where_no_f32_worker_is_left() -> None:
    places = [worker(0, accumulation="F16"), worker(1, accumulation="F16"), backbone(memory_bytes=160)]
    result = place(places, MODEL)
    assert {holders for (layer, _), holders in holders_of(result.plan).items() if layer in OUTPUT} == {
        (BACKBONE,)
    }
    assert (
        result.plan.degraded == "the backbone serves 16 experts itself: no worker may serve the output layers"
    )
    assert result.plan.coverage(backbone=BACKBONE) == (128, 128, 1, 16)
    # An F32 worker comes: the backbone is relieved.
    after = place([*places, worker(3)], MODEL, result.plan)
    assert BACKBONE not in after.plan.nodes
    assert after.plan.degraded == ""


def test_a_backbone_without_any_worker_does_not_blame_workers() -> None:
    plan = place([backbone(memory_bytes=1 << 20)], MODEL).plan
    assert plan.degraded == "the backbone serves 128 experts itself: no worker is there to hold any"


def test_what_nobody_can_hold_is_missing_with_a_reason() -> None:
    result = place([worker(0, accumulation="F16"), backbone(memory_bytes=50)], MODEL)
    ((layer, first, end, reason),) = result.missing
    assert (layer, first, end) == (7, 5, 16)
    assert reason == "no room on the 1 node(s) of rank output: need 110 bytes, have 0 in pieces"
    assert result.plan.coverage() == (128, 117, 0, 0)


def test_a_swarm_of_nobody_misses_everything_and_says_so() -> None:
    result = place([], MODEL)
    assert result.plan.coverage() == (128, 0, 0, 0)
    assert {each.reason for each in result.missing} == {
        "no node may hold experts of rank bulk",
        "no node may hold experts of rank output",
    }


# --- memory -------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_need_and_have() -> None:
    first = place([worker(0), worker(1)], MODEL).plan
    result = place(
        [worker(0, memory_bytes=700, reserved_bytes=100), worker(1), worker(2, memory_bytes=9)], MODEL, first
    )
    assert result.refused == ((IDS[0], 1280, 600), (IDS[2], 10, 9))
    assert result.plan.coverage().n_pairs_held == 128


def test_output_takes_scarce_memory_first() -> None:
    result = place([worker(0, memory_bytes=160), worker(1, accumulation="F16", memory_bytes=1120)], MODEL)
    assert not result.missing
    assert result.plan.shard_of(IDS[0]).layers == (7,)


# --- speed --------------------------------------------------------------------------------------------------


def test_a_ten_times_slower_member_is_asked_first_for_nothing() -> None:
    fast = [worker(i) for i in range(6)]
    alone = place(fast, MODEL)
    joined = place([*fast, worker(6, rate_rows_s=1000)], MODEL, alone.plan)
    assert joined.layers_ns <= alone.layers_ns
    assert len(joined.plan.primary_shard_of(IDS[6])) == 0
    assert joined.moves == ()


def test_a_slow_member_covers_what_nobody_else_has_room_for() -> None:
    result = place([worker(0, memory_bytes=640), worker(1, rate_rows_s=10)], MODEL)
    assert not result.missing
    assert len(result.plan.shard_of(IDS[0])) == 64


def test_shares_follow_speed() -> None:
    plan = place(
        [worker(0, rate_rows_s=30_000), worker(1, rate_rows_s=10_000)],
        ModelShape(tuple(range(8)), 64, 8, (1,) * 8),
        options=dataclasses.replace(LAN, tokens_expected=64),
    ).plan
    assert abs(len(plan.primary_shard_of(IDS[0])) - 384) <= 8


# --- further holders ----------------------------------------------------------------------------------------


def test_holders_are_of_one_class_where_there_is_a_choice() -> None:
    plan = place([worker(i, equivalence_class="ab"[i % 2]) for i in range(4)], MODEL).plan
    for first, second in holders_of(plan).values():
        assert IDS.index(first) % 2 == IDS.index(second) % 2


def test_hot_experts_are_held_more() -> None:
    hotness = tuple(tuple(100 if expert == 3 else 1 for expert in range(16)) for _ in MODEL.layers)
    plan = place([worker(i) for i in range(4)], MODEL, hotness=hotness).plan
    assert {expert for (_, expert), holders in holders_of(plan).items() if len(holders) == 3} == {3}


def test_work_of_a_lost_node_falls_on_all_others() -> None:
    plan = place([worker(i) for i in range(5)], MODEL).plan
    heirs = Counter(second for first, second in holders_of(plan).values() if first == IDS[0])
    assert set(heirs) == set(IDS[1:5])


# --- least movement -----------------------------------------------------------------------------------------


def test_a_newcomer_gets_its_share_and_hardly_anything_else_moves() -> None:
    before = place([worker(i) for i in range(4)], MODEL)
    after = place([worker(i) for i in range(5)], MODEL, before.plan)
    others = sum(each.size_bytes for each in after.moves if each.node_id != IDS[4])
    assert others <= 1280 // 20
    assert 20 <= len(after.plan.primary_shard_of(IDS[4])) <= 30


def test_a_lost_nodes_experts_are_all_that_moves() -> None:
    places = [worker(i) for i in range(5)]
    before = place(places, MODEL).plan
    after = place([dataclasses.replace(places[0], state="lost"), *places[1:]], MODEL, before)
    lost = set(before.shard_of(IDS[0]).pairs())
    for move in after.moves:
        assert set(move.shard.pairs()) <= lost
    assert after.moved_bytes == 10 * len(lost)
    for pair, holders in holders_of(after.plan).items():
        assert pair in lost or holders == holders_of(before)[pair]


def test_a_rate_that_wobbles_moves_nothing() -> None:
    before = place([worker(i) for i in range(5)], MODEL)
    after = place([worker(i, rate_rows_s=10_000 + 400 * (i % 3 - 1)) for i in range(5)], MODEL, before.plan)
    assert after.plan.holds_the_same_as(before.plan)


@pytest.mark.parametrize("state, keeps", [("suspect", True), ("draining", False), ("lost", False)])
def test_states(state: PlaceState, keeps: bool) -> None:
    places = [worker(i) for i in range(3)]
    before = place(places, MODEL).plan
    places = proving(places, before)
    places[0] = dataclasses.replace(places[0], state=state)
    after = place(places, MODEL, before).plan
    assert after.shard_of(IDS[0]) == (before.shard_of(IDS[0]) if keeps else ShardSet())


def test_what_nodes_hold_stands_for_a_lost_plan() -> None:
    places = [worker(i) for i in range(4)]
    before = place(places, MODEL).plan
    after = place(proving(places, before), MODEL, None)
    assert after.moved_bytes <= 2 * 1280 // 10


# --- many nodes ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_large_swarm_is_placed_soon_and_fits_a_signed_message() -> None:
    model = ModelShape(tuple(range(48)), 256, 8, (10_000_000,) * 48)
    places = [
        worker(i, memory_bytes=2 * 10**9, accumulation="F16" if i % 4 == 0 else "F32", rate_rows_s=10_000 + i)
        for i in range(255)
    ]
    started = time.process_time()
    first = place([*places, backbone()], model)
    again = place([*places[1:], backbone()], model, first.plan)
    assert time.process_time() - started < 4.0
    assert first.plan.coverage() == (12288, 12288, 2, 0)
    assert len(encode(first.plan)) < SIGNED_SIZE_MAX - 512
    assert again.moved_bytes == model.shard_size_bytes(first.plan.shard_of(IDS[0]))


def test_of_two_thousand_nodes_few_enough_are_chosen_to_hold_everything() -> None:
    model = ModelShape(tuple(range(8)), 64, 8, (1000,) * 8)
    places = [worker(i, memory_bytes=1000, rate_rows_s=20_000) for i in range(1800)]
    places += [worker(i, memory_bytes=4000, rate_rows_s=5_000, accumulation="F16") for i in range(1800, 2000)]
    result = place([*places, backbone()], model)
    assert len(result.plan.nodes) <= 256
    assert not result.missing


@pytest.mark.slow
def test_more_pieces_than_a_message_holds_become_straight_cuts() -> None:
    model = ModelShape(tuple(range(41)), 512, 8, (1,) * 41)
    plan = place([worker(i, memory_bytes=10**6, rate_rows_s=10**6) for i in range(100)], model).plan
    assert plan.coverage()[:2] == (20992, 20992)
    assert len(encode(plan)) < SIGNED_SIZE_MAX // 2


# --- of every placement -------------------------------------------------------------------------------------


def _check(result: Placement, places: list[Place], model: ModelShape, options: PlacementOptions) -> None:
    """Total, within memory, within ranks, whole or explained."""
    plan = result.plan
    by_id = {each.node_id: each for each in places}
    fit = {each.node_id for each in places if may_hold_output(each, trust_claims=options.trust_claims)}
    used: Counter[NodeId] = Counter()
    for (layer, _), holders in holders_of(plan).items():
        assert len(set(holders)) == len(holders)
        for node in holders:
            used[node] += model.size_of_layer[layer]
            assert by_id[node].is_usable
            assert layer not in model.output_layers or may_hold_output(
                by_id[node], trust_claims=options.trust_claims
            )
    for holder, size in used.items():
        assert size <= by_id[holder].free_bytes
    missing = {(each.layer, expert) for each in result.missing for expert in range(each.first, each.end)}
    assert missing == {pair for pair, holders in holders_of(plan).items() if not holders}
    assert all(each.reason for each in result.missing)
    for layer, _ in missing:
        for each in places:
            if not each.is_usable or each.state == "suspect":
                continue
            if layer not in model.output_layers or each.node_id in fit:
                assert each.free_bytes - used[each.node_id] < model.size_of_layer[layer]
    assert bool(plan.degraded) == (BACKBONE in plan.nodes)


@given(st.data(), models(), st.sampled_from([LAN, CHECKED]))
def test_every_placement_is_total_and_lawful_and_stays(
    data: st.DataObject, model: ModelShape, options: Any
) -> None:
    places = data.draw(inventories(model))
    first = place(places, model, options=options)
    _check(first, places, model, options)
    shuffled = data.draw(st.permutations(places))
    assert place(shuffled, model, options=options) == first
    again = place(places, model, first.plan, options)
    _check(again, places, model, options)
    assert again.moves == ()


@given(st.data(), models())
def test_placing_after_any_change_is_lawful_and_settles(data: st.DataObject, model: ModelShape) -> None:
    before = place(data.draw(inventories(model)), model)
    places = data.draw(inventories(model))
    after = place(places, model, before.plan)
    _check(after, places, model, LAN)
    seen = [after.plan]
    for _ in range(4):
        seen.append(place(places, model, seen[-1]).plan)
    assert seen[-1].holds_the_same_as(seen[-2])


@given(st.integers(3, 6), st.data())
def test_removing_one_node_moves_what_it_held_and_little_more(n: int, data: st.DataObject) -> None:
    places = [worker(i, equivalence_class=data.draw(st.sampled_from("ab"))) for i in range(n)]
    before = place(places, MODEL).plan
    gone = data.draw(st.sampled_from(places))
    after = place([each for each in places if each != gone], MODEL, before)
    lost = set(before.shard_of(gone.node_id).pairs())
    moved = [pair for each in after.moves for pair in each.shard.pairs()]
    # A few more where that makes the layers faster by more than an eighth.
    assert len(set(moved) - lost) <= len(holders_of(before)) // 10
    assert len(moved) <= len(lost) + len(holders_of(before)) // 10


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=4), st.integers(0, 6), st.data())
def test_as_much_is_covered_as_can_be(slots: list[tuple[bool, int]], own: int, data: st.DataObject) -> None:
    """With experts of one size the most that can be covered is a count: F32 room goes to output first."""
    model = ModelShape((0, 1), 5, 2, (10, 10))
    places = [
        worker(i, accumulation="F32" if is_f32 else "F16", memory_bytes=10 * n + 3)
        for i, (is_f32, n) in enumerate(slots)
    ]
    places.append(backbone(memory_bytes=10 * own))
    f32 = own + sum(n for is_f32, n in slots if is_f32)
    other = sum(n for is_f32, n in slots if not is_f32)
    most = min(5, f32) + min(5, other + f32 - min(5, f32))
    before = place(data.draw(inventories(model)), model).plan
    for previous in (None, before):
        assert place(places, model, previous).plan.coverage().n_pairs_held == most


def test_nonsense_is_our_error() -> None:
    for places in ([worker(0), worker(0)], [backbone(), worker(0, is_backbone=True)]):
        with pytest.raises(LocalProtocolError):
            place(places, MODEL)
    with pytest.raises(LocalProtocolError):
        place([worker(0)], MODEL, hotness=((1,),))
    with pytest.raises(LocalProtocolError):
        ModelShape((1, 0), 4, 2, (1, 1))
    with pytest.raises(LocalProtocolError):
        dataclasses.replace(LAN, holders=0)


def test_a_plan_of_another_model_is_no_previous_plan() -> None:
    other = make_plan([0], 4, [IDS[0]], epoch=0, term=1, revision=1)
    assert place([worker(0)], MODEL, other).moved_bytes == 1280
