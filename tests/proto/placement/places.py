"""Places and models to plan with: values and strategies that the tests of placement share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.placement.inventory import ModelShape, Place
from kvasir_proto.placement.plan import Plan

IDS = sorted(node_id_of(number.to_bytes(32, "big")) for number in range(2050))
BACKBONE = IDS[-1]
MODEL = ModelShape(tuple(range(8)), 16, 4, (10,) * 8)
"""Eight layers of sixteen experts, ten bytes each: 1280 bytes; layer 7 is of rank output."""


def worker(number: int, **fields: Any) -> Place:
    plain: dict[str, Any] = {
        "memory_bytes": 10_000,
        "accumulation": "F32",
        "rate_rows_s": 10_000,
        "rtt_ns": 1000,
    }
    return Place(node_id=IDS[number], **(plain | fields))


def backbone(**fields: Any) -> Place:
    plain: dict[str, Any] = {"memory_bytes": 0, "accumulation": "F32", "is_backbone": True}
    return Place(node_id=BACKBONE, **(plain | fields))


def proving(places: Iterable[Place], plan: Plan) -> list[Place]:
    """The places once each has proved what the plan gives it."""
    return [replace(each, holding=plan.shard_of(each.node_id), state="serving") for each in places]


def holders_of(plan: Plan) -> dict[tuple[int, int], tuple[NodeId, ...]]:
    return {
        (each.layer, expert): plan.holders_of(each.layer, expert)
        for each in plan.layers
        for expert in range(plan.n_expert)
    }


@st.composite
def inventories(draw: st.DrawFn, model: ModelShape) -> list[Place]:
    """A few nodes of all kinds, and often a backbone."""
    whole = model.n_expert * sum(model.expert_sizes_bytes)
    places = [
        Place(
            node_id,
            memory_bytes=draw(st.integers(0, whole)),
            reserved_bytes=draw(st.sampled_from([0, 0, 25])),
            accumulation=draw(st.sampled_from(["F32", "F32", "F16", "BF16", "MIXED", "UNKNOWN"])),
            equivalence_class=draw(st.sampled_from(["a", "b"])),
            output_verdict=draw(st.sampled_from([None, None, True, False])),
            rate_rows_s=draw(st.none() | st.integers(1, 100_000)),
            rtt_ns=draw(st.none() | st.integers(0, 10**8)),
            state=draw(st.sampled_from(["serving", "joined", "joined", "suspect", "draining", "lost"])),
        )
        for node_id in draw(st.lists(st.sampled_from(IDS[:30]), max_size=7, unique=True))
    ]
    if draw(st.booleans()):
        places.append(backbone(memory_bytes=draw(st.integers(0, whole))))
    return places


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    layers = tuple(sorted(draw(st.sets(st.integers(0, 20), min_size=1, max_size=4))))
    n_expert = draw(st.integers(1, 9))
    sizes = tuple(draw(st.integers(1, 40)) for _ in layers)
    return ModelShape(layers, n_expert, draw(st.integers(1, n_expert)), sizes)
