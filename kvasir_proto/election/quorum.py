"""How many electors are enough: to make an electorate of its predecessor, and to hold a lease.

Arithmetic only. `Electorate.quorum` is how many make a backbone. Any two quorums that can act in one term
share an honest elector (`tests/proto/election/test_quorum.py` tries all of them).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvasir_proto.instants import Instant
from kvasir_proto.term_proof import Electorate


def liars_max(electorate: Electorate) -> int:
    """How many members may lie without harm."""
    count = len(electorate.members)
    return (count - 1) // 3 if electorate.rule == "open" and count >= 4 else 0


def endorsements_needed(predecessor: Electorate, electorate: Electorate) -> int:
    """How many members of the predecessor must endorse the electorate that follows it.

    A quorum; but where the successor tolerates more liars than the quorum of its predecessor allows for, as
    many as leave no quorum of the predecessor to those who have not endorsed and those who may lie. Three
    electors become four only by all three: else one of them, lying now, and the one who was not asked would
    still be two of three.
    """
    count = len(predecessor.members)
    liars = max(liars_max(predecessor), liars_max(electorate))
    return max(predecessor.quorum, count + liars + 1 - predecessor.quorum)


def instant_of_quorum(instants: Iterable[Instant], quorum: int) -> Instant | None:
    """The latest instant that a quorum has reached, of one for each elector; None without a quorum."""
    ordered = sorted(instants, reverse=True)
    return ordered[quorum - 1] if len(ordered) >= quorum else None
