"""Which layers' routed experts are of which rank: `output` for the last ones, `bulk` for all others.

What goes wrong in the last layers reaches the logits undamped, so that only proven nodes serve them and
nothing is approximated there. One rule, for whoever places experts and whoever chooses how rows travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_OUTPUT_PART: Final = 8
"""One of so many MoE layers is of rank `output`."""


def output_layers(moe_layers: Sequence[int]) -> tuple[int, ...]:
    """The last eighth of these layers, ascending, and at least one; all of none are none."""
    ordered = sorted(moe_layers)
    return tuple(ordered[-max(1, len(ordered) // _OUTPUT_PART) :])


def bulk_layers(moe_layers: Sequence[int]) -> tuple[int, ...]:
    """All others, ascending."""
    return tuple(sorted(set(moe_layers).difference(output_layers(moe_layers))))
