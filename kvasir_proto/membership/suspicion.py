"""How long a suspected member has to refute, by how many suspect it and how large the swarm is.

A crowd that sees the same thing may decide soon; a single accuser, who may be the one in trouble, waits long.
After Lifeguard and memberlist's `remainingSuspicionTime`: from the longest to the shortest time with the
logarithm of the confirmations. The curve is apart from any timer so that a table can test it.
"""

from __future__ import annotations

import math
from typing import Final

from kvasir_proto.instants import Duration

_MILLISECOND: Final = 1_000_000


def swarm_scale_permille(members: int) -> int:
    """1000 x log10(members), at least 1000: news needs about so many more rounds to reach everybody."""
    return max(1000, round(1000 * math.log10(max(1, members))))


def confirmations_wanted(members: int, confirmations: int) -> int:
    """How many further accusers shorten a suspicion: none where there are not enough members to be them."""
    return max(0, min(confirmations, members - 2))


def suspicion_time(confirmed: int, wanted: int, shortest: Duration, longest: Duration) -> Duration:
    """How long after its start a suspicion ends in death, in whole milliseconds.

    `confirmed` counts accusers beyond the first. With `wanted` of them (or none to be had) it is `shortest`.
    """
    if wanted < 1 or confirmed >= wanted:
        return shortest
    fraction = math.log(confirmed + 1) / math.log(wanted + 1)
    raw = longest - fraction * (longest - shortest)
    return Duration(max(shortest, int(raw) // _MILLISECOND * _MILLISECOND))
