"""How long to wait before trying again: longer after each failure in a row, up to a bound.

One place, because the obvious power of two overflows after a thousand failures, which is a night without the
other side. It reads no clock and counts nothing itself.
"""

from __future__ import annotations


def retry_delay_s(failures_in_a_row: int, first_s: float, max_s: float) -> float:
    """Seconds: ``first_s`` after the first failure, then doubling, at most ``max_s``."""
    doublings = min(max(0, failures_in_a_row - 1), 64)
    return min(first_s * 2.0**doublings, max_s)
