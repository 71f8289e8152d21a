"""How long the trunk takes for one token, without the work of routed experts: a candidate's rate.

Measured when the trunk has been loaded, with zeros for the experts' rows, so that it needs no holder. The
fastest of a few tokens counts: the first one touches memory for the first time, others are disturbed by other
processes. The sequence is forgotten afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kvasir_proto.errors import EngineFailed

TOKENS_MAX: Final = 8
TOTAL_NS_MAX: Final = 250_000_000
"""No token begins after so many, or after so long."""


class MeasuredTrunk(Protocol):
    """What is asked of a `Trunk`."""

    def decode(self, tokens: Sequence[int]) -> None:
        """Append these tokens to the sequence."""

    def clear(self) -> None:
        """Forget the sequence."""


def measure_token_ns(trunk: MeasuredTrunk, clock_ns: Callable[[], int] = time.perf_counter_ns) -> int:
    """Nanoseconds of the fastest token, at least 1; 0 where llama.cpp does not decode one like that."""
    times_ns: list[int] = []
    began = ended = clock_ns()
    try:
        for _ in range(TOKENS_MAX):
            before = ended
            trunk.decode([0])
            ended = clock_ns()
            times_ns.append(max(1, ended - before))
            if ended - began >= TOTAL_NS_MAX:
                break
    except EngineFailed:
        return 0
    finally:
        trunk.clear()
    return min(times_ns)
