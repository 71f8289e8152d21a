"""Delays double, and stay bounded however long the trouble lasts."""

from __future__ import annotations

import pytest

from kvasir_node.backoff import retry_delay_s


def test_delays_double_up_to_the_bound() -> None:
    delays = [retry_delay_s(each, 1.0, 60.0) for each in range(10)]
    assert delays == [1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


@pytest.mark.parametrize("failures", [65, 1100, 10**9])
def test_no_number_of_failures_is_too_large(failures: int) -> None:
    assert retry_delay_s(failures, 0.5, 15.0) == 15.0
