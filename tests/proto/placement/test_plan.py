"""Every expert has its holders, nobody has more than a fair share, and the order of nodes changes nothing."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.limits import HOLDERS_MAX, WORKERS_MAX
from kvasir_proto.manifest import ShardSet
from kvasir_proto.placement.plan import ExpertRange, LayerPlan, Plan, make_plan, open_plan
from kvasir_proto.signing import sign_message

NODES = sorted(node_id_of(number.to_bytes(32, "big")) for number in range(WORKERS_MAX + 1))
STRANGER = node_id_of(b"\xff" * 32)
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
BACKBONE = node_id_of(KEY.public_key().public_bytes_raw())
SWARM = SwarmDigest(bytes(32))


def _plan(
    layers: int | list[int], n_expert: int, workers: int | list[NodeId], holders: int | None = None
) -> Plan:
    return make_plan(
        range(layers) if isinstance(layers, int) else layers,
        n_expert,
        NODES[:workers] if isinstance(workers, int) else workers,
        epoch=0,
        term=1,
        revision=1,
        holders=holders,
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layers = draw(st.lists(st.integers(0, 60), min_size=1, max_size=6, unique=True))
    workers = draw(st.lists(st.sampled_from(NODES[:40]), min_size=1, max_size=9, unique=True))
    holders = draw(st.none() | st.integers(1, min(len(workers), HOLDERS_MAX)))
    return _plan(layers, draw(st.integers(1, 40)), workers, holders)


def _pairs(plan: Plan) -> list[tuple[int, int]]:
    return [(each.layer, expert) for each in plan.layers for expert in range(plan.n_expert)]


@given(plans())
def test_every_expert_has_distinct_holders_among_the_workers(plan: Plan) -> None:
    counts = {len(plan.holders_of(*pair)) for pair in _pairs(plan)}
    assert len(counts) == 1
    for pair in _pairs(plan):
        holders = plan.holders_of(*pair)
        assert len(set(holders)) == len(holders)
        assert set(holders) <= set(plan.nodes)


@pytest.mark.parametrize("workers, holders", [(1, 1), (2, 1), (3, 2), (4, 2), (9, 2)])
def test_holders_by_default(workers: int, holders: int) -> None:
    assert _plan(2, 8, workers).coverage() == (16, 16, holders, 0)


@given(plans())
def test_primaries_are_even_in_each_layer_and_in_all(plan: Plan) -> None:
    in_all = Counter(dict.fromkeys(plan.nodes, 0))
    for each in plan.layers:
        in_layer = Counter(dict.fromkeys(plan.nodes, 0))
        in_layer.update(plan.holders_of(each.layer, expert)[0] for expert in range(plan.n_expert))
        assert max(in_layer.values()) - min(in_layer.values()) <= 1
        in_all.update(in_layer)
    assert max(in_all.values()) - min(in_all.values()) <= 1


@given(plans())
def test_all_holders_are_even_in_each_layer(plan: Plan) -> None:
    for each in plan.layers:
        for rank in range(len(plan.holders_of(each.layer, 0))):
            held = Counter(dict.fromkeys(plan.nodes, 0))
            held.update(plan.holders_of(each.layer, expert)[rank] for expert in range(plan.n_expert))
            assert max(held.values()) - min(held.values()) <= 1


def test_work_of_a_lost_node_falls_on_all_others() -> None:
    plan = _plan(12, 32, 4)
    heirs = Counter(
        plan.holders_of(layer, expert)[1]
        for layer, expert in _pairs(plan)
        if plan.holders_of(layer, expert)[0] == NODES[0]
    )
    assert set(heirs) == set(NODES[1:4])
    assert max(heirs.values()) - min(heirs.values()) <= 1


@given(plans(), st.randoms(use_true_random=False))
def test_order_of_nodes_and_layers_changes_nothing(plan: Plan, random: Any) -> None:
    nodes = [*plan.nodes, plan.nodes[0]]
    layers = [each.layer for each in plan.layers] * 2
    random.shuffle(nodes)
    random.shuffle(layers)
    assert _plan(layers, plan.n_expert, nodes, len(plan.layers[0].ranges[0].holders)) == plan


@given(plans())
def test_shards_say_the_same_as_holders(plan: Plan) -> None:
    for node in plan.nodes:
        shard, primary = plan.shard_of(node), plan.primary_shard_of(node)
        assert set(shard.pairs()) == {pair for pair in _pairs(plan) if node in plan.holders_of(*pair)}
        assert set(primary.pairs()) == {pair for pair in _pairs(plan) if plan.holders_of(*pair)[0] == node}
    assert plan.shard_of(STRANGER) == plan.primary_shard_of(STRANGER) == ShardSet()


@given(plans(), st.sets(st.sampled_from(NODES[:40])))
def test_coverage_counts_what_brute_force_counts(plan: Plan, alive: set[NodeId]) -> None:
    counts = [len(alive.intersection(plan.holders_of(*pair))) for pair in _pairs(plan)]
    assert plan.coverage(alive) == (len(counts), sum(map(bool, counts)), min(counts), 0)


@given(plans())
def test_plan_comes_back_from_its_signed_bytes(plan: Plan) -> None:
    assert open_plan(sign_message(KEY, SWARM, plan), SWARM, BACKBONE) == plan


def test_largest_plans_of_today_fit_a_frame() -> None:
    plan = _plan(96, 512, 64)
    assert open_plan(sign_message(KEY, SWARM, plan), SWARM, BACKBONE) == plan


def test_only_the_backbone_plans() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        open_plan(sign_message(KEY, SWARM, _plan(1, 4, 2)), SWARM, NODES[0])
    assert caught.value.code == "wrong_node"


def _with_ranges(*ranges: tuple[int, int, tuple[int, ...]]) -> dict[str, Any]:
    return {"layers": (LayerPlan(0, tuple(ExpertRange(*each) for each in ranges)),)}


@pytest.mark.parametrize(
    "changes, flaw",
    [
        (_with_ranges((0, 2, (0,)), (3, 4, (1,))), "expert 2"),
        (_with_ranges((0, 3, (0,)), (2, 4, (1,))), "expert 3"),
        (_with_ranges((1, 4, (0,))), "expert 0"),
        (_with_ranges((0, 3, (0,))), "expert 3 of 4"),
        (_with_ranges((0, 5, (0,))), "expert 5 of 4"),
        (_with_ranges((0, 4, (0,)), (4, 1, (0,))), "expert 4"),
        (_with_ranges((0, 4, (2,))), "nobody"),
        (_with_ranges((0, 4, (1, 1))), "named twice"),
        ({"nodes": (NODES[1], NODES[0])}, "nodes"),
        ({"nodes": (NODES[0], NODES[0])}, "nodes"),
        ({"layers": _plan(2, 4, 2).layers[::-1]}, "layers"),
        ({"layers": _plan(1, 4, 2).layers * 2}, "layers"),
        ({"n_expert": 5}, "expert 4 of 5"),
        (_with_ranges((0, 4, ())), "does not say why"),
        ({"layers": (dataclasses.replace(_plan(1, 4, 2).layers[0], missing="lost"),)}, "does not say why"),
    ],
    ids=range(15),
)
def test_plans_that_are_not_whole_are_refused(changes: dict[str, Any], flaw: str) -> None:
    plan = dataclasses.replace(_plan(1, 4, 2), **changes)
    with pytest.raises(RemoteProtocolError, match=flaw) as caught:
        open_plan(sign_message(KEY, SWARM, plan), SWARM, BACKBONE)
    assert caught.value.code == "incomplete_plan"


@pytest.mark.parametrize(
    "layers, n_expert, workers, holders",
    [
        (0, 4, 1, None),
        (1, 0, 1, None),
        (1, 4, 0, None),
        (1, 4, WORKERS_MAX + 1, None),
        (1, 4, 2, 3),
        (1, 4, 2, 0),
    ],
)
def test_impossible_plans_are_our_error(
    layers: int, n_expert: int, workers: int, holders: int | None
) -> None:
    with pytest.raises(LocalProtocolError):
        _plan(layers, n_expert, workers, holders)


@pytest.mark.parametrize("layer, expert", [(1, 0), (3, 0), (5, 0), (2, -1), (2, 4)])
def test_plan_knows_what_it_does_not_place(layer: int, expert: int) -> None:
    plan = _plan([2, 4], 4, 2)
    assert plan.holders_of(2, 3)
    with pytest.raises(LocalProtocolError, match="no expert"):
        plan.holders_of(layer, expert)


def test_a_plan_with_a_reason_for_what_is_missing_is_accepted() -> None:
    layer = LayerPlan(0, (ExpertRange(0, 3, (0,)), ExpertRange(3, 4, ())), "no room")
    plan = dataclasses.replace(_plan(1, 4, 2), layers=(layer,))
    assert open_plan(sign_message(KEY, SWARM, plan), SWARM, BACKBONE) == plan
    assert plan.missing() == ((0, 3, 4, "no room"),)
    assert plan.coverage() == (4, 3, 0, 0)
    assert plan.coverage(backbone=NODES[0]) == (4, 3, 0, 3)
    assert [each[:3] for each in plan.missing({NODES[1]})] == [(0, 0, 3), (0, 3, 4)]
    assert plan.primary_shard_of(NODES[0]).ranges == ((0, 0, 3),)
