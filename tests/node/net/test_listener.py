"""Where a node listens, and callers who break their handshakes off: refused for a time, and others not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.net.last_port import LastPort
from kvasir_node.net.listener import (
    ADDRESSES_MAX,
    BROKEN_OFF_BURST,
    BROKEN_OFF_PER_S,
    Callers,
    open_listening_socket,
)


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


async def test_the_port_of_last_time_is_taken_again_where_it_is_free(tmp_path: Path) -> None:
    """A swarm that stops as a whole knows where its members were, and nothing else."""
    kept = LastPort(tmp_path / "listen-port")
    assert kept.load() == 0
    first = open_listening_socket("127.0.0.1", 0, kept.load())
    port = first.socket.getsockname()[1]
    kept.save(port)
    assert kept.load() == port
    taken = open_listening_socket("127.0.0.1", 0, kept.load())
    assert taken.socket.getsockname()[1] != port, "somebody else has it: any other will do"
    await first.aclose()
    again = open_listening_socket("127.0.0.1", 0, kept.load())
    assert again.socket.getsockname()[1] == port
    await again.aclose()
    await taken.aclose()


@pytest.mark.parametrize("content", [b"", b"x", b"0", b"-5", b"70000", b"1" * 999, b"\xff\n"])
def test_a_damaged_last_port_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "listen-port").write_bytes(content)
    assert LastPort(tmp_path / "listen-port").load() == 0


def test_a_last_port_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    LastPort(tmp_path / "absent" / "listen-port").save(4001)
