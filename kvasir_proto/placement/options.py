"""What turns the planner's judgement: how many holders, how sure a gain must be, how fast plans may follow.

Each knob says what it costs to turn it. Two presets: machines on one LAN, and machines across the internet,
where fetching an expert takes minutes and a plan that is taken back is expensive.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.instants import Duration, milliseconds, seconds
from kvasir_proto.limits import HOLDERS_MAX, WORKERS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """Every knob of placement. Raises `LocalProtocolError` for values that make no sense."""

    trust_claims: bool = True
    """Whether a node's word stands for a certificate: true while the manifest says certificates = claimed."""

    holders: int = 2
    """Holders of each expert where there is room. Each one more costs the model's bytes once more and lets
    one more node be lost without a gap."""

    hot_holders: int = 1
    """Further holders of a hot expert, where there is room."""

    hot_factor: int = 4
    """An expert is hot from so many times the mean of its layer on. Lower: more copies, more memory."""

    tokens_expected: int = 1
    """Tokens that go through a layer together. More of them make slow nodes worth using: their one row takes
    no longer than the many rows of the fast. Too high a number slows single sessions down."""

    slower_by_at_most: int = 32
    """A node is used while it makes a layer slower by no more than 1/32 by the cost model: measured rates are
    not exact, and equal machines should share alike. The bar for a slow member is 0.95 of the speed."""

    gain_min: int = 8
    """A plan is made anew only where it is faster by more than 1/8. Lower: more moves for less gain."""

    nodes_max: int = WORKERS_MAX
    """Nodes that one plan may name, the backbone among them."""

    workers_min: int = 1
    """The first plan waits for so many workers: nodes that offer memory for experts."""

    in_flight_bytes_max: int = 2 << 30
    """Bytes that one step of a transition makes nodes load, beyond what nobody holds yet. Less: gentler and
    slower. One expert is always allowed."""

    settle: Duration
    """How long to wait for more news before planning for it: nodes that join together get one plan. It is
    not prolonged by news."""

    plan_interval: Duration
    """At least so long between two plans."""

    plan_interval_urgent: Duration
    """The same while some expert has no holder."""

    step_timeout: Duration
    """How long the holders of a step may take to prove what they were given, to begin with ..."""

    load_rate_bytes_s: int = 50 << 20
    """... and how fast they must load. A member that takes longer gets nothing new for a while."""

    retry_after: Duration
    """For how long such a member gets nothing new."""

    def __post_init__(self) -> None:
        counts = (self.holders, self.tokens_expected, self.slower_by_at_most, self.gain_min, self.hot_factor)
        more = (self.workers_min, self.in_flight_bytes_max, self.load_rate_bytes_s, self.plan_interval_urgent)
        if min(*counts, *more) < 1 or not 0 <= self.hot_holders <= HOLDERS_MAX - self.holders:
            raise LocalProtocolError("placement's options are positive, and an expert has few holders")
        if not 2 <= self.nodes_max <= WORKERS_MAX or self.plan_interval < self.plan_interval_urgent:
            raise LocalProtocolError(f"a plan is for 2 to {WORKERS_MAX} nodes, and urgent ones come sooner")


LAN: Final = PlacementOptions(
    settle=milliseconds(500),
    plan_interval=seconds(2),
    plan_interval_urgent=milliseconds(250),
    step_timeout=seconds(60),
    retry_after=seconds(120),
)

WAN: Final = replace(
    LAN,
    in_flight_bytes_max=256 << 20,
    settle=seconds(10),
    plan_interval=seconds(30),
    plan_interval_urgent=seconds(2),
    step_timeout=seconds(300),
    load_rate_bytes_s=1 << 20,
    retry_after=seconds(1800),
)
