"""What is believed of a member, and what changes it: a transition table, and the order of claims.

Two kinds of news change a belief. What a node finds out by itself (`Evidence`) moves the state by
`TRANSITIONS`. What others say is a `Claim`, and claims of one member are ordered: a higher incarnation
replaces a lower one whole; within one incarnation the stronger state wins and the newest record counts.
`merge` is commutative, associative and idempotent, so that tables agree whatever came first or twice. No time
and no counting of witnesses in here: see `suspicion`.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias

from kvasir_proto.messages.membership import STATES, MemberState

Evidence: TypeAlias = Literal["probe_failed", "suspicion_expired", "newer_incarnation", "departure"]
"""`newer_incarnation`: the member itself said that it is alive, higher than all we knew of it."""

TRANSITIONS: Final[dict[tuple[MemberState, Evidence], MemberState]] = {
    ("alive", "probe_failed"): "suspect",
    ("alive", "suspicion_expired"): "alive",  # it refuted in time
    ("alive", "newer_incarnation"): "alive",
    ("alive", "departure"): "left",
    ("suspect", "probe_failed"): "suspect",
    ("suspect", "suspicion_expired"): "dead",
    ("suspect", "newer_incarnation"): "alive",
    ("suspect", "departure"): "left",
    ("dead", "probe_failed"): "dead",
    ("dead", "suspicion_expired"): "dead",
    ("dead", "newer_incarnation"): "alive",
    ("dead", "departure"): "left",
    ("left", "probe_failed"): "left",
    ("left", "suspicion_expired"): "left",
    ("left", "newer_incarnation"): "alive",
    ("left", "departure"): "left",
}

NO_RECORD: Final = bytes(32)
NO_INSTANCE: Final = bytes(8)
LIVE: Final[frozenset[MemberState]] = frozenset(("alive", "suspect"))
"""Who is counted, watched and asked; the others are tombstones."""

STRENGTH: Final[dict[MemberState, int]] = {state: strength for strength, state in enumerate(STATES)}


class Claim(NamedTuple):
    """What is said of one member; see `MemberUpdate` for the fields."""

    incarnation: int
    state: MemberState
    instance: bytes
    record_sequence: int
    record_digest: bytes


def merge(one: Claim, other: Claim) -> Claim:
    """The stronger of two claims about one member, field by field; `one` itself if `other` adds nothing."""
    if one == other or other.incarnation < one.incarnation:
        return one
    if one.incarnation < other.incarnation:
        return other
    record = max(one[3:], other[3:])
    merged = Claim(
        one.incarnation,
        one.state if STRENGTH[one.state] >= STRENGTH[other.state] else other.state,
        max(one.instance, other.instance),
        *record,
    )
    return one if merged == one else merged
