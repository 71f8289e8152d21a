"""Which layers are of which rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.placement.ranks import bulk_layers, output_layers


@pytest.mark.parametrize(
    "moe_layers, output",
    [
        ((), ()),
        ((3,), (3,)),
        ((0, 1, 2), (2,)),
        (tuple(range(15)), (14,)),
        (tuple(range(1, 48, 2)), (43, 45, 47)),
        (tuple(range(49)), tuple(range(43, 49))),
    ],
)
def test_the_last_eighth_is_output_and_at_least_one(
    moe_layers: tuple[int, ...], output: tuple[int, ...]
) -> None:
    assert output_layers(moe_layers) == output


@given(st.sets(st.integers(0, 1000)))
def test_every_layer_has_one_rank_and_bulk_comes_first(layers: set[int]) -> None:
    bulk, output = bulk_layers(tuple(layers)), output_layers(tuple(layers))
    assert (*bulk, *output) == tuple(sorted(layers))
    assert len(output) >= bool(layers)
