"""What the planner knows: of each node and of the model, as plain values.

A `Place` is one node as a possible holder; the backbone is one too. A `ModelShape` is what there is to hold.
Whoever fills them in has believed the records and the certificates already: here nothing is signed and
nothing has an age. The rank rule is here as well, because every later step asks it and none may bend it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median_low
from typing import Final, Literal, NamedTuple, TypeAlias

from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.limits import EXPERTS_MAX, LAYERS_MAX, Accumulation
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.placement.ranks import output_layers

PlaceState: TypeAlias = Literal["serving", "joined", "suspect", "draining", "lost"]
"""`suspect` keeps what it has proved to hold and gets nothing new; `draining` and `lost` get nothing."""

ALIKE_WITHIN: Final = 8
"""Rates that differ by less than 1/8 are taken for equal. More: a member that much slower delays the others.
Less: the noise of a measurement leaves out equal machines."""

_RATE_NOMINAL: Final = 1000
"""Rows a second of a node when nobody's rate is known: only that all are equal matters then."""


@dataclass(frozen=True, slots=True)
class Place:
    """One node as a possible holder.

    `memory_bytes` is what it offers for experts, `reserved_bytes` the part of it that is spoken for.
    `output_verdict` is what its certificate says of rank `output`; None while it has none. `rate_rows_s`
    (rows of one expert a second) and `rtt_ns` are None while unmeasured. `holding` is what it has proved to
    serve now. Of all places at most one `is_backbone`.
    """

    node_id: NodeId
    memory_bytes: int
    reserved_bytes: int = 0
    accumulation: Accumulation = "UNKNOWN"
    equivalence_class: str = ""
    output_verdict: bool | None = None
    rate_rows_s: int | None = None
    rtt_ns: int | None = None
    state: PlaceState = "joined"
    is_backbone: bool = False
    holding: ShardSet = field(default_factory=ShardSet)

    @property
    def free_bytes(self) -> int:
        """What can be promised before anything is; never negative."""
        return max(0, self.memory_bytes - self.reserved_bytes)

    @property
    def is_usable(self) -> bool:
        """Whether a plan may name it at all."""
        return self.state in ("serving", "joined", "suspect")


@dataclass(frozen=True)
class ModelShape:
    """The routed experts there are. `expert_sizes_bytes` has one entry a layer: types differ between layers.

    Raises `LocalProtocolError` for a shape without layers or experts, or with layers out of order.
    """

    layers: tuple[int, ...]
    n_expert: int
    n_expert_used: int
    expert_sizes_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        in_order = list(self.layers) == sorted(set(self.layers))
        sizes_fit = len(self.expert_sizes_bytes) == len(self.layers) and min(self.expert_sizes_bytes) > 0
        if not 1 <= len(self.layers) <= LAYERS_MAX or not in_order or not sizes_fit:
            raise LocalProtocolError(
                "a model's MoE layers are ascending, and each has a size for its experts"
            )
        if not 1 <= self.n_expert_used <= self.n_expert <= EXPERTS_MAX:
            raise LocalProtocolError(f"a model cannot use {self.n_expert_used} of {self.n_expert} experts")

    @staticmethod
    def of(manifest: ModelManifest) -> ModelShape:
        """The shape of the model that this manifest describes."""
        layers = tuple(sorted(manifest.moe_layers))
        sizes = tuple(manifest.expert_size_bytes(layer) for layer in layers)
        return ModelShape(layers, manifest.n_expert, manifest.n_expert_used, sizes)

    @cached_property
    def output_layers(self) -> frozenset[int]:
        """The layers of rank `output`."""
        return frozenset(output_layers(self.layers))

    @cached_property
    def size_of_layer(self) -> dict[int, int]:
        """Bytes of one expert, by layer."""
        return dict(zip(self.layers, self.expert_sizes_bytes, strict=True))

    def shard_size_bytes(self, shard: ShardSet) -> int:
        """Bytes of a shard of this model."""
        return sum((end - first) * self.size_of_layer[layer] for layer, first, end in shard.ranges)


def may_hold_output(place: Place, *, trust_claims: bool) -> bool:
    """Whether the rank rule lets this place serve experts of the output layers.

    What accumulates in less than F32 never does. While the swarm has certificates (`trust_claims` false) only
    a verdict opens the rank; while it has none, a node's claim stands, and `UNKNOWN`, which claims nothing
    bad, stands with it. The backbone needs no verdict: it is the one that judges.
    """
    if place.accumulation not in ("F32", "UNKNOWN") or place.output_verdict is False:
        return False
    if place.is_backbone or trust_claims:
        return True
    return place.accumulation == "F32" and place.output_verdict is True


class Speed(NamedTuple):
    """How long a place takes, in nanoseconds: a round trip, and one row of one expert (at least 1)."""

    rtt_ns: int
    row_ns: int

    @property
    def one_row_ns(self) -> int:
        """The soonest that anything can be back."""
        return self.rtt_ns + self.row_ns


def as_alike(row_times: Iterable[int]) -> dict[int, int]:
    """For each measured time of a row, the one that placement reckons with: the same for what hardly differs.

    Times of equal machines differ by some percent, and a place is left out for less than that. From the
    fastest on, those within 1/8 of the first of a group count as that group's median. 0 stands for no
    measurement and is in no group.
    """
    groups: list[list[int]] = []
    for each in sorted(row_times):
        if each == 0:
            continue
        if not groups or each * ALIKE_WITHIN > groups[-1][0] * (ALIKE_WITHIN + 1):
            groups.append([])
        groups[-1].append(each)
    return {each: median_low(group) for group in groups for each in group}


def speeds_of(places: Sequence[Place]) -> list[Speed]:
    """Each place's speed; what is unknown is the median of its class, or of all, or nominal."""
    rates: dict[str, list[int]] = {}
    for each in places:
        if each.rate_rows_s is not None and not each.is_backbone:
            rates.setdefault(each.equivalence_class, []).append(each.rate_rows_s)
    rate_of_class = {name: median_low(known) for name, known in rates.items()}
    rate_of_all = _median_or(_RATE_NOMINAL, (rate for known in rates.values() for rate in known))
    rtt_of_all = _median_or(
        0, (each.rtt_ns for each in places if each.rtt_ns is not None and not each.is_backbone)
    )
    speeds = []
    for each in places:
        rate = each.rate_rows_s
        if rate is None:
            rate = rate_of_class.get(each.equivalence_class, rate_of_all)
        rtt_ns = 0 if each.is_backbone else rtt_of_all if each.rtt_ns is None else each.rtt_ns
        speeds.append(Speed(rtt_ns, max(1, 10**9 // max(1, rate))))
    return speeds


def _median_or(nominal: int, values: Iterable[int]) -> int:
    known = list(values)
    return median_low(known) if known else nominal
