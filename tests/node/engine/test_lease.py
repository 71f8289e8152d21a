"""A lease is good until its end, and the newest term's grant is the one that counts."""

from __future__ import annotations

import threading
import time

import pytest

from kvasir_node.engine import lease as lease_module
from kvasir_node.engine.lease import LeaseExpired, LeaseWatch, boottime_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The clock's value; a test moves it."""
    now = [1000]
    monkeypatch.setattr(lease_module, "boottime_ns", lambda: now[0])
    return now


def test_without_a_grant_there_is_no_lease(clock: list[int]) -> None:
    watch = LeaseWatch(patience_s=0.0)
    assert watch.newest == (0, 0)
    with pytest.raises(LeaseExpired, match=r"\(0, 0\)"):
        watch.check()


def test_a_lease_is_good_until_its_end_and_not_at_it(clock: list[int]) -> None:
    watch = LeaseWatch(patience_s=0.0)
    watch.renew(0, 1, 2000)
    assert watch.check() == (0, 1)
    clock[0] = 1999
    assert watch.check() == (0, 1)
    clock[0] = 2000
    with pytest.raises(LeaseExpired, match=r"the lease of \(0, 1\) has run out"):
        watch.check()
    assert watch.newest == (0, 1)


def test_a_renewal_moves_the_end_in_either_direction(clock: list[int]) -> None:
    watch = LeaseWatch(patience_s=0.0)
    watch.renew(0, 1, 2000)
    watch.renew(0, 1, 3000)
    clock[0] = 2500
    assert watch.check() == (0, 1)
    watch.renew(0, 1, 2400)  # released early
    with pytest.raises(LeaseExpired):
        watch.check()


def test_a_grant_of_an_older_term_changes_nothing(clock: list[int]) -> None:
    watch = LeaseWatch(patience_s=0.0)
    watch.renew(1, 3, 2000)
    for older in ((1, 2), (0, 99), (0, 0)):
        watch.renew(*older, 10**9)
        assert watch.newest == watch.check() == (1, 3)
    clock[0] = 2000
    with pytest.raises(LeaseExpired):
        watch.check()


def test_a_newer_term_counts_even_if_its_lease_is_over(clock: list[int]) -> None:
    watch = LeaseWatch(patience_s=0.0)
    watch.renew(0, 1, 10**9)
    watch.renew(0, 2, 500)
    with pytest.raises(LeaseExpired, match=r"\(0, 2\)"):
        watch.check()
    watch.renew(1, 0, 10**9)
    assert watch.check() == (1, 0)


def test_a_check_waits_for_control_that_is_late(clock: list[int]) -> None:
    watch = LeaseWatch(patience_s=60.0)
    watch.renew(0, 1, clock[0])
    checked: list[tuple[int, int]] = []
    waiting = threading.Thread(target=lambda: checked.append(watch.check()))
    waiting.start()
    watch.renew(0, 1, clock[0] + 1000)
    waiting.join(30.0)
    assert checked == [(0, 1)]


def test_the_clock_is_the_one_that_counts_suspend() -> None:
    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    assert before <= boottime_ns() <= time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def test_an_expired_lease_ends_a_session_with_its_own_code() -> None:
    assert LeaseExpired("x").code == "lease_expired"
