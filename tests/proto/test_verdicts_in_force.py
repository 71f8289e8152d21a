"""Who is planned without or gets bulk layers only, until when, by which certificates; and what disks keep."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.codec import decode
from kvasir_proto.effects import Now
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Instant, WallTime, after, seconds
from kvasir_proto.tolerance_certificate import CERTIFICATE_LIFETIME
from kvasir_proto.verdicts_in_force import (
    REASON_LENGTH_MAX,
    SET_TIME_MAX,
    VERDICTS_KEPT,
    VERDICTS_MAX,
    VerdictInForce,
    VerdictTable,
)

FIRST, SECOND = (node_id_of(bytes([number]) * 32) for number in (1, 2))
CLAIM, OTHER = bytes([7]) * 32, bytes([8]) * 32
WEEK = CERTIFICATE_LIFETIME


def at(instant: int, *, wall_ahead: int = 1 << 60) -> Now:
    return Now(Instant(instant), WallTime(instant + wall_ahead))


def verdict(
    node_id: NodeId,
    until: int,
    reason: str = "non_finite",
    word: Literal["unfit", "quarantined"] = "quarantined",
    claim: bytes | None = None,
) -> VerdictInForce:
    return VerdictInForce(node_id, word, reason, Instant(until), claim)


def kept(table: VerdictTable) -> bytes:
    (persist,) = table.drain()
    assert persist.slot == "verdicts"
    return persist.data


def test_a_fault_of_speech_is_over_with_its_time() -> None:
    table = VerdictTable(None, at(0))
    assert (table.next_end(), table.let_go(Instant(0))) == (None, False)
    table.add(verdict(SECOND, 20), at(0))
    table.add(verdict(FIRST, 10), at(0))
    assert table.node_ids() == tuple(sorted((FIRST, SECOND)))
    assert table.next_end() == 10
    assert not table.let_go(Instant(9))
    assert table.in_force(FIRST, CLAIM) == verdict(FIRST, 10)
    assert table.let_go(Instant(10))
    assert table.in_force(FIRST, None) is None
    assert table.in_force(SECOND, None) == verdict(SECOND, 20)
    assert table.next_end() == 20


@pytest.mark.parametrize("word", ["unfit", "quarantined"])
def test_wrong_rows_are_over_with_other_certificates_and_not_before_their_time(word: Any) -> None:
    table = VerdictTable(None, at(0))
    found = verdict(FIRST, 10, "3 of 9 rows", word, CLAIM)
    table.add(found, at(0))
    assert table.in_force(FIRST, OTHER) == found, "others that come at once change nothing"
    assert table.let_go(Instant(10)), "from now on it matters what it shows"
    assert not table.let_go(Instant(11))
    assert table.in_force(FIRST, OTHER) is None
    assert table.in_force(FIRST, CLAIM) == found
    assert table.in_force(FIRST, None) == found, "who shows nothing was not certified anew"
    assert not table.let_go(Instant(WEEK - 1))
    assert table.in_force(FIRST, CLAIM) == found, "no time ends it as long as its certificates are good"
    assert table.next_end() == Instant(WEEK)
    assert table.let_go(Instant(WEEK))
    assert (table.in_force(FIRST, CLAIM), table.node_ids(), table.next_end()) == (None, (), None)


def test_who_was_found_out_twice_has_neither_certificate_to_go_back_to() -> None:
    table = VerdictTable(None, at(0))
    table.add(verdict(FIRST, 1, "a", "unfit", CLAIM), at(0))
    table.add(verdict(FIRST, 1, "b", "quarantined", OTHER), at(0))
    table.let_go(Instant(2))
    words = [found.word for each in (CLAIM, OTHER) if (found := table.in_force(FIRST, each))]
    assert words == ["unfit", "quarantined"]
    assert table.in_force(FIRST, bytes(32)) is None


@pytest.mark.parametrize("word", ["unfit", "quarantined"])
def test_whom_a_swarm_found_out_is_unfit_under_others_until_they_are_verified(word: Any) -> None:
    table = VerdictTable(None, at(0))
    table.add(verdict(FIRST, 10, "short sums", word, CLAIM)._replace(n_electors=3), at(0))
    table.add(verdict(SECOND, 10, "one's own opinion", word, CLAIM), at(0))
    table.let_go(Instant(10))
    for claim in (OTHER, bytes(32), b""):
        found = table.in_force(FIRST, claim)
        assert found is not None
        assert (found.word, found.n_electors, found.until) == ("unfit", 3, Instant(WEEK))
        assert found.reason.endswith("short sums")
        assert table.in_force(FIRST, claim, is_verified=True) is None
        assert table.in_force(SECOND, claim) is None
    for is_verified in (True, False):
        found = table.in_force(FIRST, CLAIM, is_verified=is_verified)
        assert found is not None
        assert found.word == word, "that of these certificates"
    table.let_go(Instant(WEEK))
    assert table.in_force(FIRST, OTHER) is None


def test_nothing_makes_a_verdict_milder() -> None:
    table = VerdictTable(None, at(0))
    table.add(verdict(FIRST, 20, "malformed"), at(0))
    table.add(verdict(FIRST, 10, "a second fault"), at(0))
    assert table.in_force(FIRST, None) == verdict(FIRST, 20, "malformed")
    table.add(verdict(FIRST, 30), at(0))
    assert table.in_force(FIRST, None) == verdict(FIRST, 30)
    table.add(verdict(SECOND, 30, "zeros", "quarantined", CLAIM), at(0))
    table.add(verdict(SECOND, 0, "F16", "unfit", CLAIM), at(0))
    found = table.in_force(SECOND, CLAIM)
    assert found is not None
    assert (found.word, found.until) == ("quarantined", 30)


def test_the_table_is_bounded_and_what_ends_soonest_goes() -> None:
    table = VerdictTable(None, at(0))
    nodes = [node_id_of(number.to_bytes(32, "big")) for number in range(VERDICTS_MAX + 2)]
    for number, node_id in enumerate(nodes):
        table.add(verdict(node_id, 10_000 + number, "\N{GRINNING FACE}" * 5000), at(0))
    assert table.node_ids() == tuple(sorted(nodes[2:]))
    (shown,) = {len(each.reason) for each in decode(kept(table), VERDICTS_KEPT).verdicts}
    assert shown == REASON_LENGTH_MAX


def test_verdicts_survive_a_restart_by_wall_time() -> None:
    table = VerdictTable(None, at(0))
    table.add(verdict(FIRST, seconds(60), "late twice"), at(0))
    table.add(verdict(SECOND, seconds(60), "zeros", claim=CLAIM), at(0))
    data = kept(table)
    assert table.drain() == [], "once"
    # Another boot: its instants begin anew, and 40 s have passed.
    booted = Now(Instant(5), after(at(0).wall, seconds(40)))
    restored = VerdictTable(data, booted)
    assert restored.in_force(FIRST, None) == verdict(FIRST, 5 + seconds(20), "late twice")
    assert restored.let_go(after(Instant(5), seconds(20)))
    assert restored.in_force(FIRST, None) is None
    assert restored.in_force(SECOND, CLAIM) is not None
    assert restored.in_force(SECOND, OTHER) is None
    much_later = Now(Instant(5), after(at(0).wall, WEEK))
    assert VerdictTable(data, much_later).node_ids() == ()


@pytest.mark.parametrize("wall", [0, 1, 1 << 60, (1 << 63) - 1])
def test_a_clock_that_is_wrong_makes_no_verdict_last_for_ever(wall: int) -> None:
    table = VerdictTable(None, Now(Instant(0), WallTime(1 << 61)))
    table.add(verdict(FIRST, seconds(60), claim=CLAIM), Now(Instant(0), WallTime(1 << 61)))
    restored = VerdictTable(kept(table), Now(Instant(0), WallTime(wall)))
    assert restored.next_end() is None or restored.next_end() <= SET_TIME_MAX  # type: ignore[operator]
    restored.let_go(Instant(WEEK))
    assert restored.node_ids() == ()


def test_no_fault_is_set_for_longer_than_a_day() -> None:
    table = VerdictTable(None, at(0))
    table.add(verdict(FIRST, 1 << 62), at(0))
    assert table.next_end() == Instant(SET_TIME_MAX)


@pytest.mark.parametrize("damage", [b"", b"no", bytes(64)])
def test_what_is_no_table_is_refused(damage: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        VerdictTable(damage, at(0))


CLAIMS = st.sampled_from([None, CLAIM, OTHER])


@given(
    st.lists(
        st.tuples(st.sampled_from([FIRST, SECOND]), CLAIMS, st.integers(0, 50), st.sampled_from([0, 3])),
        max_size=8,
    ),
    st.lists(st.integers(0, 60), max_size=6),
)
def test_a_restart_at_any_time_changes_nothing_that_holds(
    found: list[tuple[NodeId, bytes | None, int, int]], looks: list[int]
) -> None:
    table = VerdictTable(None, at(0))
    data = None
    for node_id, claim, until, n_electors in found:
        made = verdict(node_id, until, "why", "quarantined", claim)
        table.add(made._replace(n_electors=n_electors), at(0))
        data = kept(table)
    for moment in sorted(looks):
        table.let_go(Instant(moment))
        again = VerdictTable(data, at(moment))
        for node_id in (FIRST, SECOND):
            for claim in (CLAIM, OTHER):
                assert again.in_force(node_id, claim) == table.in_force(node_id, claim)
