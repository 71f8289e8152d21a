"""Callers who break their handshakes off: an address is refused for a time, others are not, none for ever."""

from __future__ import annotations

from kvasir_node.net.listener import ADDRESSES_MAX, BROKEN_OFF_BURST, BROKEN_OFF_PER_S, Callers


def storm(callers: Callers, address: str, per_s: int, seconds: int) -> int:
    """How many handshakes so many callers a second get, each of whom breaks it off."""
    tried = 0
    for number in range(per_s * seconds):
        now_s = number / per_s
        if callers.may_call(address, now_s):
            callers.note_broken_off(address, now_s)
            tried += 1
    return tried


def test_a_storm_gets_its_burst_and_then_its_rate_whatever_its_own() -> None:
    for per_s in (50, 1000):
        callers = Callers()
        tried = storm(callers, "192.0.2.1", per_s, 20)
        assert BROKEN_OFF_BURST <= tried <= 2 * (BROKEN_OFF_BURST + 20 * BROKEN_OFF_PER_S)
        assert not callers.may_call("192.0.2.1", 19.999)
        assert callers.may_call("192.0.2.2", 19.999)
        assert callers.may_call("192.0.2.1", 21.0)


def test_who_breaks_off_now_and_then_is_never_refused() -> None:
    assert storm(Callers(), "192.0.2.1", 1, 500) == 500


def test_many_addresses_take_bounded_memory() -> None:
    callers = Callers()
    for number in range(3 * ADDRESSES_MAX):
        for _ in range(40):
            callers.note_broken_off(str(number), 0.0)
    assert len(callers._buckets) == ADDRESSES_MAX
    assert len(callers._refused_until_s) <= ADDRESSES_MAX
    assert callers.may_call("0", 0.0), "forgotten"
    assert not callers.may_call(str(3 * ADDRESSES_MAX - 1), 0.0)
