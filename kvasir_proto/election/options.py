"""The election's knobs: how long a lease is, and everything that is measured in it.

One record with two presets. All electors and candidates of a swarm must use the same `lease`: the safety of
the lease is `lease` against `lease`. The other knobs are each node's own and only cost time or messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvasir_proto.instants import Duration, milliseconds, seconds


@dataclass(frozen=True, slots=True)
class ElectionOptions:
    """Durations are on the node's own clock, which may be a tenth fast or slow."""

    # How long a grant is worth. A backbone that dies is replaced after about 1.1 x lease + one election; one
    # that stalls for 0.9 x lease - renewal stops serving. Shorter: quicker failover, more false alarms.
    lease: Duration
    # How often the backbone asks: three requests fit in a lease, so that one may be lost. Each costs a
    # request and a reply per elector.
    renewal: Duration
    # How long a candidate waits for a quorum in each phase, and an elector that voted before it would vote
    # for another. A few round trips; longer delays the next try after a split vote.
    patience: Duration
    # How often what was not answered is asked again within `patience`.
    retry: Duration
    # Candidacy delay = position x step + random part of one step. A step is longer than a round trip, so that
    # the best candidate is usually alone.
    step: Duration
    # A node that is no elector hears no lease requests; after `promised` it asks again no sooner than this,
    # doubled each time up to eight times, and eight more for each seven candidates before it: those of a
    # large swarm together ask little more than those of a small one. It is woken by `SuspectBackbone`.
    outsider_pause: Duration
    # A backbone tells everybody again who it is, for those that gossip missed.
    announcement: Duration
    # How long an elector is dead before it is replaced: longer than a restart takes.
    dead_after: Duration
    # The same for one that said goodbye: as long as stopping it and starting it again takes a person.
    left_after: Duration

    def __post_init__(self) -> None:
        if not 0 < self.renewal * 2 <= self.lease or not 0 < self.retry <= self.patience:
            raise ValueError("a lease is renewed at least twice, and a request retried within its patience")


LAN: Final = ElectionOptions(
    lease=milliseconds(1500),
    renewal=milliseconds(400),
    patience=milliseconds(400),
    retry=milliseconds(150),
    step=milliseconds(100),
    outsider_pause=milliseconds(1500),
    announcement=seconds(30),
    dead_after=seconds(30),
    left_after=seconds(10),
)
WAN: Final = ElectionOptions(
    lease=seconds(10),
    renewal=seconds(3),
    patience=seconds(3),
    retry=milliseconds(1000),
    step=milliseconds(600),
    outsider_pause=seconds(10),
    announcement=seconds(60),
    dead_after=seconds(120),
    left_after=seconds(30),
)
