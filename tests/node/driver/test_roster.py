"""The roster's rules, as tables: what each event makes of each state."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from kvasir_node.driver.roster import (
    FAULTY_CODES,
    FORGOTTEN_AFTER,
    LOST_AFTER,
    REJOIN_GRACE,
    Member,
    MemberState,
    Roster,
)
from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, seconds
from kvasir_proto.limits import WORKERS_MAX
from tests.node.driver.twins import node_key, node_of

START = Instant(1_000_000_000)
FIRST, SECOND, THIRD = (node_of(node_key(each)) for each in range(3))
STATES: tuple[MemberState, ...] = get_args(MemberState)
INACTIVE = ("lost", "quarantined", "left")


def record(node_id: NodeId, sequence: int = 1) -> CapabilityRecord:
    return CapabilityRecord(
        node_id=node_id,
        sequence=sequence,
        expires=1,
        addresses=(),
        versions=(1,),
        node_version="0",
        backend="twin",
        device="twin",
        accumulation="UNKNOWN",
        memory_bytes=1,
        state="joined",
        reason="",
    )


def roster_with(state: MemberState) -> tuple[Roster, Member]:
    """A roster whose one member is in this state."""
    roster = Roster(START)
    member = roster.join(record(FIRST), START)
    if state == "lost":
        roster.expire(after(START, Duration(LOST_AFTER + 1)))
    elif state == "left":
        roster.leave(FIRST, "bye")
    elif state == "quarantined":
        roster.holder_lost(FIRST, "non_finite", "row 3")
    else:
        roster.set_state(FIRST, state, "told so")
    assert member.state == state
    return roster, member


def refusal(roster: Roster, sequence: int) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        roster.join(record(FIRST, sequence), START)
    return caught.value.code


@pytest.mark.parametrize("state", STATES)
def test_activity_and_service_follow_from_the_state(state: MemberState) -> None:
    roster, member = roster_with(state)
    assert member.is_active == (state not in INACTIVE)
    assert roster.active(START) == ([] if state in INACTIVE else [FIRST])
    assert roster.serving() == ([FIRST] if state == "serving" else [])


@pytest.mark.parametrize("state", STATES)
def test_a_newer_record_makes_any_member_join_afresh_but_a_quarantined_one(state: MemberState) -> None:
    roster, member = roster_with(state)
    later = after(START, seconds(100))
    if state == "quarantined":
        assert refusal(roster, 2) == "quarantined"
        assert member.state == "quarantined"
        return
    assert roster.join(record(FIRST, 2), later) is member
    assert (member.state, member.reason, member.last_seen, member.record.sequence) == ("joined", "", later, 2)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("sequence", [0, 1])
def test_a_record_that_is_not_newer_changes_nothing(state: MemberState, sequence: int) -> None:
    roster, member = roster_with(state)
    before = replace(member)
    assert refusal(roster, sequence) == "stale_record"
    assert member == before


@pytest.mark.parametrize("state", STATES)
def test_a_heartbeat_counts_for_those_who_are_active(state: MemberState) -> None:
    roster, member = roster_with(state)
    later = after(START, seconds(3))
    if state in INACTIVE:
        with pytest.raises(RemoteProtocolError) as caught:
            roster.heartbeat(FIRST, later)
        assert caught.value.code == "unknown_member"
        assert member.last_seen == START
    else:
        assert roster.heartbeat(FIRST, later) is member
        assert (member.last_seen, member.state) == (later, state)


def test_a_stranger_has_no_heartbeat() -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        Roster(START).heartbeat(FIRST, START)
    assert caught.value.code == "unknown_member"


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("target", STATES)
def test_only_an_active_member_changes_its_state(state: MemberState, target: MemberState) -> None:
    roster, member = roster_with(state)
    roster.set_state(FIRST, target, "why")
    assert member.state == (state if state in INACTIVE else target)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("code", [*sorted(FAULTY_CODES), "late", "closed", "refused_busy", ""])
def test_wrong_rows_quarantine_and_slow_ones_do_not(state: MemberState, code: str) -> None:
    roster, member = roster_with(state)
    roster.holder_lost(FIRST, code, "reason")
    expected = "quarantined" if code in FAULTY_CODES else "unreachable"
    assert member.state == (state if state in INACTIVE else expected)
    if state not in INACTIVE:
        assert member.reason == f"{code}: reason"


@pytest.mark.parametrize("state", STATES)
def test_leaving_lifts_no_quarantine(state: MemberState) -> None:
    roster, member = roster_with(state)
    roster.leave(FIRST, "bye")
    assert member.state == ("quarantined" if state == "quarantined" else "left")


@pytest.mark.parametrize("state", STATES)
def test_silence_loses_the_active_ones_once(state: MemberState) -> None:
    roster, member = roster_with(state)
    assert roster.expire(after(START, LOST_AFTER)) == []
    late = after(START, Duration(LOST_AFTER + 1))
    assert roster.expire(late) == ([] if state in INACTIVE else [FIRST])
    assert roster.expire(late) == []
    assert member.state == (state if state in INACTIVE else "lost")


def test_events_about_strangers_are_ignored() -> None:
    roster = Roster(START)
    roster.leave(FIRST, "bye")
    roster.set_state(FIRST, "serving")
    roster.holder_lost(FIRST, "late", "")
    assert list(roster) == []
    assert roster.get(FIRST) is None


@pytest.mark.parametrize("state", STATES)
def test_who_is_forgotten(state: MemberState) -> None:
    roster, _ = roster_with(state)
    moments = {
        each: after(START, each) for each in (Duration(0), FORGOTTEN_AFTER, Duration(FORGOTTEN_AFTER + 1))
    }
    forgotten = [roster.is_forgotten(FIRST, moment) for moment in moments.values()]
    if state in ("left", "quarantined"):
        assert forgotten == [True, True, True]
    else:
        assert forgotten == [False, False, state == "lost"]


def test_who_has_not_come_yet_is_forgotten_after_a_grace() -> None:
    roster = Roster(START)
    assert not roster.is_forgotten(FIRST, after(START, REJOIN_GRACE))
    assert roster.is_forgotten(FIRST, after(START, Duration(REJOIN_GRACE + 1)))


def test_members_come_in_the_order_of_their_ids() -> None:
    roster = Roster(START)
    for node_id in (THIRD, FIRST, SECOND):
        roster.join(record(node_id), START)
    assert [each.node_id for each in roster] == sorted([FIRST, SECOND, THIRD])
    assert roster.active(START) == sorted([FIRST, SECOND, THIRD])


def test_a_full_roster_takes_a_newcomer_only_for_one_that_is_gone() -> None:
    roster = Roster(START)
    ids = [node_of(node_key(each)) for each in range(WORKERS_MAX + 2)]
    for node_id in ids[:WORKERS_MAX]:
        roster.join(record(node_id), START)
    with pytest.raises(RemoteProtocolError) as caught:
        roster.join(record(ids[WORKERS_MAX]), START)
    assert caught.value.code == "full"

    roster.holder_lost(ids[0], "non_finite", "")
    for index in (5, 3):
        roster.heartbeat(ids[index], after(START, seconds(index)))
        roster.leave(ids[index], "bye")
    roster.join(record(ids[WORKERS_MAX]), START)
    assert roster.get(ids[3]) is None, "the one that has been gone longest makes room"
    assert roster.get(ids[5]) is not None
    roster.join(record(ids[WORKERS_MAX + 1]), START)
    assert roster.get(ids[5]) is None
    quarantined = roster.get(ids[0])
    assert quarantined is not None
    assert quarantined.state == "quarantined", "a quarantine is never forgotten"
