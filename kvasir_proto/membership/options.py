"""The knobs of membership, each with its formula and what turning it costs.

Everything a node sends follows from them: per second `1 / probe_interval` pings and as many acks, gossip for
fresh news only, one comparison of tables each `anti_entropy_interval`. None of it depends on the swarm's size
but the number of times a claim is repeated, which grows with its logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvasir_proto.instants import Duration, milliseconds, seconds
from kvasir_proto.messages.membership import INCARNATION_MAX

MEMBERS_MAX: Final = 4096
"""Members a node remembers, tombstones and hearsay included. When full, the oldest hearsay goes, then the
oldest tombstone; if there is neither, the newcomer is refused and a notice says so."""
HEARSAY_LIFETIME: Final[Duration] = seconds(30)
"""How long a member that only others spoke of is remembered if neither its record nor itself turns up. Until
then it is neither counted nor watched nor passed on: nobody fills a swarm with members that it invented."""
RECORD_HINT_INTERVAL: Final[Duration] = seconds(1)
"""How often the records of hearsay are asked for again; each sweep asks for those of members too."""
RECORD_HINTS_MAX: Final = 128
"""So many at a time: a newcomer's table of thousands is known within half a minute."""
SEEDS_MAX: Final = 64
"""Ids of the bootstrap list that are tried for ever."""
PROBES_MAX: Final = 16
"""Probes of our own under way at once; the regular one is one of them."""
RELAYS_MAX: Final = 64
"""Probes for others under way at once; further requests are answered with `reached = false`."""
BROADCASTS_MAX: Final = 512
"""Claims waiting to be repeated; when full, the one that was repeated most is dropped."""
INCARNATION_BLOCK: Final = 64
"""Incarnations reserved on disk at a time: one write for so many refutations."""
INCARNATION_HEARSAY_MAX: Final = INCARNATION_MAX // 2
"""What third parties may say of a node that is not known here: it can still rise above it, for ever."""
INCARNATION_STEP_MAX: Final = 1 << 20
"""How far above what we know of a member a third party may claim it to be: a liar cannot use up the range."""


@dataclass(frozen=True, slots=True)
class MembershipOptions:
    """How patient and how talkative a node is."""

    view_size: int
    """Members that a node watches, and so connections it keeps. Everybody is watched by about as many,
    once in `view_size` intervals each; larger finds failures no sooner and costs connections. In
    a swarm of up to `view_size` + 1 everybody watches everybody."""
    probe_interval: Duration
    """One probe each. A silent death is noticed about one interval after it; traffic is inverse to it."""
    probe_timeout: Duration
    """For a direct answer while no round trip to the member is known; then smoothed round trip + 4 x its
    variation, from `probe_timeout_min` to `probe_timeout_max`; times self-doubt + 1."""
    probe_timeout_min: Duration
    probe_timeout_max: Duration
    relay_allowance: Duration
    """Added for those who probe for us: they may have to dial first."""
    indirect_probes: int
    """Helpers asked when there is no direct answer. Each costs 4 messages and makes false suspicion rarer."""
    suspicion_min: Duration
    """Shortest time to refute, x log10(members): a round trip of gossip must fit in."""
    suspicion_max_factor: int
    """Longest time to refute / shortest: for one accuser alone."""
    suspicion_confirmations: int
    """Further accusers that make it the shortest."""
    gossip_interval: Duration
    """Fresh claims are sent at most this often, to `gossip_fanout` members. Quiet swarms send none."""
    gossip_interval_max: Duration
    """The interval grows to this by `gossip_interval` each `gossip_patience` rounds, while there is news all
    the time: a swarm in turmoil does not add a storm of gossip to it. A quiet moment makes it short again."""
    gossip_patience: int
    gossip_fanout: int
    repeat_factor: int
    """A claim is sent at most factor x log10(members + 1) times, rounded up, by each node."""
    health_score_max: int
    """Self-doubt stretches time-outs at most (this + 1) times; more makes a sick node blind."""
    anti_entropy_interval: Duration
    """Between comparisons of tables with a random member of the view: 0.5 KiB, and the buckets that differ.
    It bounds how long a lost claim stays lost."""
    anti_entropy_soon: Duration
    """Until the next comparison when the last one changed a lot: after a partition, news doubles each."""
    view_request_spacing: Duration
    """Between two requests of one download: at most `answer_parts_max` x 6 KiB each."""
    answer_parts_max: int
    """Parts of up to 64 claims in one answer."""
    reprobe_interval: Duration
    """One dead member or silent seed is tried each, for ever: so a healed partition is noticed."""
    tombstone_lifetime: Duration
    """How long a dead or departed member is remembered, so that stale claims cannot revive it."""
    pause_min: Duration
    """A tick that comes later than this says that we were stopped or suspended: we accuse nobody for it."""
    join_retry: Duration
    """Between tries at the seeds while we know nobody alive; doubles up to `join_retry_max`."""
    join_retry_max: Duration
    slow_round_trip: Duration
    """Members beyond this are shown as slow; nothing else follows."""
    clock_offset_max: Duration
    """A clock further off than this is called wrong."""
    conflict_min: Duration
    """Two runs of one node must have been heard in turn for this long to be called a conflict: messages of
    a run that has ended may still be under way."""
    conflict_memory: Duration
    """How long a member is called conflicted after the last sign of it."""


LAN: Final = MembershipOptions(
    view_size=12,
    probe_interval=seconds(1),
    probe_timeout=milliseconds(500),
    probe_timeout_min=milliseconds(200),
    probe_timeout_max=seconds(2),
    relay_allowance=milliseconds(100),
    indirect_probes=3,
    suspicion_min=seconds(1),
    suspicion_max_factor=3,
    suspicion_confirmations=3,
    gossip_interval=milliseconds(250),
    gossip_interval_max=seconds(1),
    gossip_patience=8,
    gossip_fanout=3,
    repeat_factor=4,
    health_score_max=4,
    anti_entropy_interval=seconds(10),
    anti_entropy_soon=seconds(1),
    view_request_spacing=milliseconds(50),
    answer_parts_max=4,
    reprobe_interval=seconds(5),
    tombstone_lifetime=seconds(600),
    pause_min=seconds(2),
    join_retry=seconds(1),
    join_retry_max=seconds(30),
    slow_round_trip=milliseconds(100),
    clock_offset_max=seconds(60),
    conflict_min=seconds(3),
    conflict_memory=seconds(60),
)
"""Round trips of a millisecond: a killed node is dead within 2 s, a stopped one within 5 s."""

WAN: Final = replace(
    LAN,
    probe_interval=seconds(2),
    probe_timeout=seconds(2),
    probe_timeout_min=milliseconds(500),
    probe_timeout_max=seconds(6),
    relay_allowance=milliseconds(600),
    suspicion_min=seconds(5),
    gossip_interval=milliseconds(500),
    gossip_interval_max=seconds(2),
    anti_entropy_interval=seconds(30),
    anti_entropy_soon=seconds(3),
    view_request_spacing=milliseconds(200),
    reprobe_interval=seconds(15),
    tombstone_lifetime=seconds(1800),
    pause_min=seconds(5),
    slow_round_trip=milliseconds(600),
    conflict_min=seconds(10),
)
"""Round trips of up to half a second and dialling as slow: three times less traffic, a death within 20 s."""
