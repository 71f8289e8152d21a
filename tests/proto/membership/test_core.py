"""One core at a time: what it persists, refuses, refutes, and says about odd members."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest

from kvasir_proto.codec import decode
from kvasir_proto.effects import Now, Persist, Send
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Instant, WallTime
from kvasir_proto.membership.core import MembershipCore
from kvasir_proto.membership.events import (
    AnnounceRecord,
    ClockSuspected,
    ConnectionLost,
    Leave,
    MemberChanged,
    NoteRecord,
    RecordHint,
    Seed,
    SelfConflicted,
)
from kvasir_proto.membership.options import (
    HEARSAY_LIFETIME,
    INCARNATION_BLOCK,
    INCARNATION_HEARSAY_MAX,
    INCARNATION_STEP_MAX,
    LAN,
    MEMBERS_MAX,
)
from kvasir_proto.messages.membership import (
    BUCKET_DIGEST_SIZE,
    BUCKETS,
    INCARNATION_MAX,
    RESERVED_INCARNATIONS,
    UPDATE_SIZE,
    Ack,
    Departure,
    Gossip,
    MemberState,
    MemberUpdate,
    Ping,
    PingRequest,
    ProbeResult,
    ViewPart,
    ViewRequest,
    pack_update,
    unpack_update,
)
from tests.proto.membership.simulation import EPOCH_WALL, MILLISECOND, NODE_IDS, SECOND

ME, ONE, TWO, THREE = NODE_IDS[:4]
RUN = b"instance"


class Lone:
    """One core, a clock moved by hand, and what it said. With `shows` every record that is named is there."""

    def __init__(self, stored: bytes | None = None, *, shows: bool = True) -> None:
        self.now = 0
        self.shows = shows
        self.said: list[Any] = []
        self.core = MembershipCore(
            node_id=ME, options=LAN, stored=stored, entropy=random.Random(1), now=self._clock()
        )
        self._take()

    def _clock(self) -> Now:
        return Now(Instant(self.now), WallTime(EPOCH_WALL + self.now))

    def _take(self) -> list[Any]:
        new = list(self.core.drain())
        self.said += new
        return new

    def hears(self, message: Any, sender: NodeId) -> list[Any]:
        self.core.receive(message, sender, self._clock())
        said = self._take()
        if self.shows:
            for hint in of_type(said, RecordHint):
                said += self.is_asked(NoteRecord(hint.node_id, hint.sequence, hint.digest))
        return said

    def is_asked(self, request: Any) -> list[Any]:
        self.core.command(request, self._clock())
        return self._take()

    def waits(self, duration_ns: int) -> list[Any]:
        end, said = self.now + duration_ns, []
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(due, self.now)
            self.core.tick(self._clock())
            said += self._take()
        self.now = end
        return said

    def sleeps(self, duration_ns: int) -> list[Any]:
        """The clock goes on and nobody calls."""
        self.now += duration_ns
        self.core.tick(self._clock())
        return self._take()


def claim(
    node_id: NodeId,
    state: MemberState = "alive",
    incarnation: int = 1,
    sequence: int = 0,
    accuser: bytes = bytes(4),
    digest: bytes = bytes(32),
) -> bytes:
    return pack_update(MemberUpdate(node_id, state, incarnation, RUN, accuser, sequence, digest))


def gossip(*claims: bytes, incarnation: int = 1, instance: bytes = RUN) -> Gossip:
    return Gossip(incarnation, instance, b"".join(claims))


def messages(said: list[Any], kind: type[Any], to: NodeId | None = None) -> list[Any]:
    return [
        each.message
        for each in said
        if isinstance(each, Send) and isinstance(each.message, kind) and to in (None, each.to)
    ]


def of_type(said: list[Any], kind: type[Any]) -> list[Any]:
    return [each for each in said if isinstance(each, kind)]


def claims_in(message: Any) -> list[MemberUpdate]:
    data = message.updates
    return [unpack_update(data[at : at + UPDATE_SIZE]) for at in range(0, len(data), UPDATE_SIZE)]


def state_of(lone: Lone, node_id: NodeId) -> str:
    member = lone.core.member(node_id)
    return "unknown" if member is None else member.state


# --- incarnations -------------------------------------------------------------------------------------------


def test_incarnations_are_on_disk_in_blocks_before_they_are_used() -> None:
    lone = Lone()
    (first,) = of_type(lone.said, Persist)
    assert first.slot == "incarnation"
    assert decode(first.data, RESERVED_INCARNATIONS).first_free > lone.core.incarnation
    for _ in range(3 * INCARNATION_BLOCK):
        said = lone.hears(gossip(claim(ME, "suspect", lone.core.incarnation)), ONE)
        reserved = decode(of_type(lone.said, Persist)[-1].data, RESERVED_INCARNATIONS).first_free
        assert lone.core.incarnation < reserved
        kinds = [type(each) for each in said]
        assert Persist not in kinds or kinds.index(Persist) == 0 or Send not in kinds[: kinds.index(Persist)]
    assert len(of_type(lone.said, Persist)) <= 5

    again = Lone(of_type(lone.said, Persist)[-1].data)
    assert again.core.incarnation > lone.core.incarnation


def test_stored_bytes_of_another_kind_are_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        Lone(b"nonsense")


@pytest.mark.parametrize("state", ["suspect", "dead", "left"])
def test_an_accused_node_refutes_with_a_higher_incarnation(state: MemberState) -> None:
    lone = Lone()
    lone.hears(gossip(), ONE)
    before = lone.core.incarnation
    said = lone.hears(Ping(7, 1, RUN, claim(ME, state, before + 3)), ONE)
    assert lone.core.incarnation == before + 4
    (ack,) = messages(said, Ack, ONE)
    assert ack.incarnation == before + 4


def test_stale_accusations_are_not_worth_an_incarnation() -> None:
    lone = Lone()
    lone.hears(gossip(claim(ME, "dead", 9)), ONE)
    assert lone.core.incarnation == 10
    for _ in range(5):
        lone.hears(gossip(claim(ME, "dead", 9)), ONE)
    assert lone.core.incarnation == 10


def test_a_liar_cannot_use_up_the_incarnations_of_others() -> None:
    lone = Lone()
    lone.hears(gossip(), ONE)
    lone.hears(gossip(), TWO)
    lone.hears(gossip(claim(TWO, "dead", 1 + INCARNATION_STEP_MAX + 1)), ONE)
    assert state_of(lone, TWO) == "alive"
    lone.hears(gossip(claim(ME, "dead", INCARNATION_MAX)), ONE)
    assert lone.core.incarnation == 1


# --- the table ----------------------------------------------------------------------------------------------


def test_malformed_claims_cost_the_sender_and_change_nothing() -> None:
    lone = Lone()
    before = lone.core.table_digest()
    for data in (claim(ONE)[:-1], claim(ONE) + b"\0", claim(ONE)[:32] + b"\x09" + claim(ONE)[33:]):
        with pytest.raises(RemoteProtocolError):
            lone.core.receive(Gossip(1, RUN, data), TWO, Now(Instant(0), WallTime(0)))
    assert lone.core.table_digest() == before
    assert lone.core.members() == ()


def test_death_of_a_stranger_is_no_news() -> None:
    lone = Lone()
    lone.hears(gossip(claim(ONE, "dead"), claim(TWO, "left")), THREE)
    assert [each.node_id for each in lone.core.members()] == [THREE]


def test_who_missed_a_goodbye_and_says_dead_is_told_of_it() -> None:
    """It was said while the network was parted. An elector that left is replaced sooner than a dead one."""
    lone = Lone()
    for each in (ONE, TWO, THREE):
        lone.hears(gossip(), each)

    incarnations = count(2)

    def says_it_left(heard: bytes) -> bool:
        incarnation = next(incarnations)  # those whom nobody answers for are suspected, and refute
        said = lone.hears(gossip(heard, incarnation=incarnation), TWO)
        said += lone.hears(gossip(incarnation=incarnation), THREE) + lone.waits(SECOND)
        talk = [each.message for each in said if isinstance(each, Send)]
        return any(claim(ONE, "left") in each.updates for each in talk if isinstance(each, Gossip | Ping))

    assert says_it_left(claim(ONE, "left"))
    for _ in range(10):
        heard_last = says_it_left(claim(ONE, "left"))
    assert not heard_last, "by now all has been said"
    assert says_it_left(claim(ONE, "dead"))
    assert state_of(lone, ONE) == "left"


def test_old_deaths_are_forgotten_and_the_lost_are_tried_for_ever() -> None:
    lone = Lone()
    lone.hears(gossip(), ONE)
    lone.waits(30 * SECOND)
    assert state_of(lone, ONE) == "dead"
    lone.waits(LAN.tombstone_lifetime)
    assert state_of(lone, ONE) == "unknown"
    tries = messages(lone.waits(100 * SECOND), Ping, ONE)
    assert 15 <= len(tries) <= 21


def test_a_full_table_refuses_the_newcomer_and_says_so_once() -> None:
    lone = Lone()
    keys = [random.Random(number).randbytes(32) for number in range(10_000, 10_000 + MEMBERS_MAX + 20)]
    blank = claim(ONE)[32:]
    for start in range(0, len(keys), 8):
        lone.hears(gossip(*(key + blank for key in keys[start : start + 8])), ONE)
    assert len(lone.core.members()) == MEMBERS_MAX - 1
    assert sum(getattr(each, "event", "") == "members_full" for each in lone.said) == 1


# --- hearsay ------------------------------------------------------------------------------------------------


def invented(count: int) -> list[bytes]:
    """Claims about members that nobody ever was."""
    blank = claim(ONE, sequence=5)[32:]
    return [random.Random(number).randbytes(32) + blank for number in range(20_000, 20_000 + count)]


def test_whom_only_others_speak_of_is_neither_counted_nor_watched_nor_passed_on() -> None:
    lone = Lone(shows=False)
    lone.hears(gossip(), ONE)
    before = lone.core.live_count
    claims = invented(80)
    said = [each for at in range(0, 80, 8) for each in lone.hears(gossip(*claims[at : at + 8]), ONE)]
    assert len({each.node_id for each in of_type(said, RecordHint)}) == 80, "their records are asked for"
    said += lone.waits(SECOND)
    assert lone.core.live_count == before
    assert [each.node_id for each in lone.core.members()] == [ONE]
    assert lone.core.view() == (ONE,)
    assert {each.to for each in said if isinstance(each, Send)} == {ONE}
    passed_on = [
        each for message in messages(said, Gossip) + messages(said, Ping) for each in claims_in(message)
    ]
    assert {each.node_id for each in passed_on} <= {ME, ONE}
    lone.core.receive(ViewRequest(bytes(BUCKETS * BUCKET_DIGEST_SIZE), 1, RUN), ONE, lone._clock())
    given = [each for part in messages(lone._take(), ViewPart) for each in claims_in(part)]
    assert {each.node_id for each in given} <= {ME, ONE}


def test_hearsay_is_asked_after_for_a_while_and_then_forgotten_without_a_trace() -> None:
    lone = Lone(shows=False)
    lone.hears(gossip(), ONE)
    digest = lone.core.table_digest()
    lone.hears(gossip(*invented(3)), ONE)
    assert lone.core.table_digest() != digest
    hints = of_type(lone.waits(HEARSAY_LIFETIME - SECOND), RecordHint)
    assert 3 * 25 < len(hints) <= 3 * 30
    lone.waits(3 * SECOND)
    assert of_type(lone.waits(10 * SECOND), RecordHint) == []
    assert {each.node_id for each in lone.core._table.in_order()} == {ME, ONE}


@pytest.mark.parametrize("way", ["record", "own word"])
def test_who_shows_itself_is_a_member_whatever_was_said_of_it(way: str) -> None:
    lone = Lone(shows=False)
    lone.hears(gossip(claim(TWO, "suspect", incarnation=9, sequence=4, digest=b"d" * 32)), ONE)
    assert state_of(lone, TWO) == "unknown"
    if way == "record":
        said = lone.is_asked(NoteRecord(TWO, 4, b"d" * 32))
        assert state_of(lone, TWO) == "suspect"
    else:
        said = lone.hears(gossip(incarnation=3, instance=b"another "), TWO)
        assert state_of(lone, TWO) == "alive", "its own word counts, and theirs did not"
    assert [each.node_id for each in of_type(said, MemberChanged)] == [TWO]
    assert set(lone.core.view()) == {ONE, TWO}
    assert lone.core.live_count == 3


def test_invented_members_give_way_to_everybody_else_in_a_full_table() -> None:
    lone = Lone(shows=False)
    lone.hears(gossip(claim(TWO, sequence=1)), ONE)
    lone.is_asked(NoteRecord(TWO, 1, bytes(32)))
    lone.hears(Departure("", 1, RUN, b""), TWO)
    claims = invented(MEMBERS_MAX + 100)
    for at in range(0, len(claims), 8):
        lone.hears(gossip(*claims[at : at + 8]), ONE)
    assert len(lone.core._table) == MEMBERS_MAX
    assert state_of(lone, TWO) == "left", "not even a tombstone went for them"
    assert lone.hears(gossip(), THREE), "who speaks itself has a place"
    assert state_of(lone, THREE) == "alive"
    assert len(lone.core._table) == MEMBERS_MAX
    assert "members_full" not in [getattr(each, "event", "") for each in lone.said]


def test_nobody_can_use_up_the_incarnations_of_a_node_that_is_not_known_here() -> None:
    lone, subject = (
        Lone(shows=False),
        MembershipCore(
            node_id=TWO, options=LAN, stored=None, entropy=random.Random(2), now=Now(Instant(0), WallTime(0))
        ),
    )
    for high in (INCARNATION_MAX, INCARNATION_HEARSAY_MAX + 1, INCARNATION_HEARSAY_MAX):
        lone.hears(gossip(claim(TWO, incarnation=high, sequence=1)), ONE)
        subject.receive(
            gossip(claim(TWO, "dead", incarnation=high, sequence=1)), ONE, Now(Instant(0), WallTime(0))
        )
    lone.is_asked(NoteRecord(TWO, 1, bytes(32)))
    assert lone.core.member(TWO).incarnation == INCARNATION_HEARSAY_MAX  # type: ignore[union-attr]
    assert INCARNATION_HEARSAY_MAX < subject.incarnation < INCARNATION_MAX, (
        "it can still say that it is alive"
    )
    lone.hears(gossip(incarnation=subject.incarnation, instance=b"another "), TWO)
    assert lone.core.member(TWO).incarnation == subject.incarnation  # type: ignore[union-attr]


def test_what_is_said_dead_before_it_was_ever_shown_is_forgotten() -> None:
    lone = Lone(shows=False)
    lone.hears(gossip(claim(TWO, sequence=1)), ONE)
    lone.hears(gossip(claim(TWO, "dead", sequence=1)), ONE)
    assert of_type(lone.waits(5 * SECOND), RecordHint) == []
    lone.is_asked(NoteRecord(TWO, 1, bytes(32)))
    assert state_of(lone, TWO) == "unknown"


def test_a_members_newer_record_is_asked_for_until_it_came() -> None:
    lone = Lone(shows=False)
    lone.hears(gossip(), ONE)
    lone.hears(gossip(claim(ONE, sequence=7, digest=b"d" * 32)), TWO)
    again = []
    for turn in range(2, 27):
        again += of_type(lone.waits(SECOND), RecordHint)
        lone.hears(gossip(incarnation=turn), ONE)  # so that it is not taken for dead
    assert {(each.node_id, each.sequence) for each in again} == {(ONE, 7)}
    assert len(again) == 2, "at each sweep"
    lone.is_asked(NoteRecord(ONE, 7, b"d" * 32))
    assert of_type(lone.waits(11 * SECOND), RecordHint) == []


# --- probes -------------------------------------------------------------------------------------------------


def test_a_lost_connection_is_a_hint_and_no_verdict() -> None:
    lone = Lone()
    lone.hears(gossip(claim(TWO), claim(THREE)), ONE)
    said = lone.is_asked(ConnectionLost(ONE))
    (ping,) = messages(said, Ping, ONE)
    assert state_of(lone, ONE) == "alive"
    said = lone.is_asked(ConnectionLost(ONE))  # dialling failed as well: ask others at once
    assert {each.to for each in said if isinstance(each, Send)} == {TWO, THREE}
    lone.hears(Ack(ping.sequence, EPOCH_WALL, 1, RUN, b""), ONE)
    assert state_of(lone, ONE) == "alive"
    assert lone.is_asked(ConnectionLost(NODE_IDS[9])) == []


def test_helpers_that_all_say_no_end_the_wait() -> None:
    lone = Lone()
    lone.hears(gossip(claim(TWO), claim(THREE)), ONE)
    lone.is_asked(ConnectionLost(ONE))
    request = messages(lone.is_asked(ConnectionLost(ONE)), PingRequest)[0]
    for helper in (TWO, THREE):
        lone.hears(ProbeResult(request.sequence, ONE, False, 1, RUN, b""), helper)
    assert state_of(lone, ONE) == "suspect"


def test_a_result_from_nobody_asked_counts_for_nothing() -> None:
    lone = Lone()
    lone.hears(gossip(claim(TWO)), ONE)
    lone.is_asked(ConnectionLost(ONE))
    request = messages(lone.is_asked(ConnectionLost(ONE)), PingRequest)[0]
    lone.hears(ProbeResult(request.sequence, ONE, False, 1, RUN, b""), THREE)
    lone.hears(ProbeResult(request.sequence, TWO, False, 1, RUN, b""), TWO)
    lone.hears(Ack(request.sequence, EPOCH_WALL, 1, RUN, b""), TWO)
    assert state_of(lone, ONE) == "alive"


def test_probes_for_others_are_answered_either_way() -> None:
    lone = Lone()
    lone.hears(gossip(claim(TWO)), ONE)
    (ping,) = messages(lone.hears(PingRequest(5, TWO, 1, RUN, b""), ONE), Ping, TWO)
    (result,) = messages(lone.hears(Ack(ping.sequence, EPOCH_WALL, 1, RUN, b""), TWO), ProbeResult, ONE)
    assert (result.sequence, result.target, result.reached) == (5, TWO, True)

    lone.hears(PingRequest(6, TWO, 1, RUN, b""), ONE)
    results = messages(lone.waits(SECOND), ProbeResult, ONE)
    assert [(each.sequence, each.reached) for each in results] == [(6, False)]

    (result,) = messages(lone.hears(PingRequest(7, NODE_IDS[9], 1, RUN, b""), ONE), ProbeResult)
    assert not result.reached


def test_nobody_is_accused_for_what_was_missed_in_a_pause() -> None:
    lone = Lone()
    lone.hears(gossip(claim(TWO, "suspect")), ONE)
    lone.waits(SECOND // 2)
    before = lone.core.incarnation
    said = lone.sleeps(60 * SECOND)
    assert "node_paused" in [getattr(each, "event", "") for each in said]
    assert lone.core.incarnation == before + 1
    assert [(state_of(lone, ONE)), state_of(lone, TWO)] == ["alive", "suspect"]
    assert messages(said, Gossip)  # and it says at once that it is back


def test_a_late_tick_postpones_a_verdict_once() -> None:
    lone = Lone()
    lone.hears(gossip(), ONE)
    lone.is_asked(ConnectionLost(ONE))
    lone.sleeps(SECOND)  # the probe's time is over by half a second: answers may lie unread
    assert state_of(lone, ONE) == "alive"
    lone.waits(5 * SECOND)
    assert state_of(lone, ONE) != "alive"


# --- odd members --------------------------------------------------------------------------------------------


def answered(lone: Lone, duration_ns: int, skews: dict[NodeId, int], delay_ns: int = MILLISECOND) -> None:
    """These answer every ping, with their clocks."""
    end = lone.now + duration_ns
    while lone.now < end:
        due = lone.core.next_deadline()
        assert due is not None
        for send in lone.waits(max(due - lone.now, 1)):
            if isinstance(send, Send) and isinstance(send.message, Ping) and send.to in skews:
                lone.waits(delay_ns)
                wall = EPOCH_WALL + lone.now - delay_ns // 2 + skews[send.to]
                lone.hears(Ack(send.message.sequence, wall, 1, RUN, b""), send.to)


def test_wrong_clock_of_one_member_is_named_and_of_ours_too() -> None:
    lone = Lone()
    skews = dict.fromkeys(NODE_IDS[1:5], 0) | {NODE_IDS[5]: -600 * SECOND}
    for name in skews:
        lone.hears(gossip(), name)
    answered(lone, 15 * SECOND, skews)
    assert [each.node_id for each in lone.core.members() if each.condition == "clock_wrong"] == [NODE_IDS[5]]
    member = lone.core.member(NODE_IDS[5])
    assert member is not None
    assert member.clock_offset is not None
    assert abs(member.clock_offset + 600 * SECOND) < SECOND // 100
    assert of_type(lone.said, ClockSuspected) == []

    answered(lone, 15 * SECOND, dict.fromkeys(skews, 300 * SECOND))
    (suspected,) = of_type(lone.said, ClockSuspected)
    assert abs(suspected.offset - 300 * SECOND) < SECOND // 100
    answered(lone, 15 * SECOND, dict.fromkeys(skews, 0))
    assert of_type(lone.said, ClockSuspected)[-1].offset is None
    assert {each.condition for each in lone.core.members()} == {"well"}


def test_slow_link_is_measured_named_and_given_time() -> None:
    lone = Lone()
    lone.hears(gossip(), ONE)
    answered(lone, 30 * SECOND, {ONE: 0}, delay_ns=300 * MILLISECOND)
    member = lone.core.member(ONE)
    assert member is not None
    assert (member.state, member.condition, member.path) == ("alive", "slow", "direct")
    assert member.rtt is not None
    assert abs(member.rtt - 300 * MILLISECOND) < 5 * MILLISECOND
    assert not [each for each in of_type(lone.said, MemberChanged) if each.state != "alive"]


def test_round_trips_on_a_busy_machine_are_not_called_slow_and_a_path_that_became_slow_is() -> None:
    lone = Lone()
    lone.hears(gossip(), ONE)
    answered(lone, 3 * SECOND, {ONE: 0}, delay_ns=300 * MILLISECOND)  # it was starting
    assert least_and_condition(lone) == (300, "slow")
    answered(lone, 2 * SECOND, {ONE: 0}, delay_ns=2 * MILLISECOND)
    assert least_and_condition(lone) == (2, "well")
    for _ in range(8):
        answered(lone, 20 * SECOND, {ONE: 0}, delay_ns=400 * MILLISECOND)
        answered(lone, 3 * SECOND, {ONE: 0}, delay_ns=3 * MILLISECOND)
        assert least_and_condition(lone) in ((2, "well"), (3, "well"))
    answered(lone, 130 * SECOND, {ONE: 0}, delay_ns=400 * MILLISECOND)
    assert least_and_condition(lone) == (400, "slow")


def least_and_condition(lone: Lone) -> tuple[int, str]:
    member = lone.core.member(ONE)
    assert member is not None
    assert member.rtt_least is not None
    return member.rtt_least // MILLISECOND, member.condition


def test_one_id_in_two_instances_by_turns_is_a_conflict_and_a_restart_is_none() -> None:
    lone = Lone()
    lone.hears(gossip(instance=b"run one "), ONE)
    lone.waits(SECOND)
    lone.hears(gossip(incarnation=65, instance=b"run two "), ONE)
    lone.hears(gossip(instance=b"run one "), ONE)  # still under way
    lone.hears(gossip(incarnation=65, instance=b"run two "), ONE)
    lone.waits(SECOND // 10)
    member = lone.core.member(ONE)
    assert member is not None
    assert member.condition == "well"
    for number in range(6):
        lone.waits(SECOND // 2)
        lone.hears(gossip(incarnation=66 + number, instance=b"run one " if number % 2 else b"run two "), ONE)
    member = lone.core.member(ONE)
    assert member is not None
    assert member.condition == "conflicted"
    changed = of_type(lone.said, MemberChanged)
    assert "two processes" in changed[-1].reason


def test_one_incarnation_of_two_instances_is_a_conflict_at_once_and_is_forgotten_later() -> None:
    lone = Lone()
    lone.hears(gossip(incarnation=5, instance=b"run one "), ONE)
    lone.hears(gossip(claim(ONE, "alive", 5)), TWO)
    member = lone.core.member(ONE)
    assert member is not None
    assert member.condition == "conflicted"
    answered(lone, LAN.conflict_memory + 11 * SECOND, {ONE: 0, TWO: 0})
    assert "conflicted" not in [each.condition for each in lone.core.members()]


def test_what_others_say_of_us_is_outdone_and_makes_no_twin() -> None:
    """Claims are unsigned: else a liar could keep from voting whom it likes."""
    lone = Lone()
    lone.hears(gossip(claim(ME, "alive", 70)), ONE)
    assert lone.core.incarnation == 71
    for _ in range(20):
        lone.waits(SECOND)
        lone.hears(gossip(claim(ME, "alive", 70)), ONE)
    assert lone.core.incarnation == 71, "an echo of an earlier run"
    for _ in range(60):
        lone.waits(SECOND)
        lone.hears(gossip(claim(ME, "alive", lone.core.incarnation + 1)), ONE)
    assert lone.core.incarnation > 71 + 60
    assert of_type(lone.said, SelfConflicted) == []


def test_a_record_that_is_named_as_ours_and_is_not_is_looked_for() -> None:
    lone = Lone()
    lone.is_asked(AnnounceRecord(8, b"o" * 32))
    for sequence, digest in ((7, b"x" * 32), (8, b"o" * 32), (0, bytes(32))):
        named = gossip(claim(ME, "alive", lone.core.incarnation, sequence, digest=digest))
        assert of_type(lone.hears(named, ONE), RecordHint) == []
    for sequence, digest in ((9, b"t" * 32), (8, b"p" * 32)):
        named = gossip(claim(ME, "alive", lone.core.incarnation, sequence, digest=digest))
        assert of_type(lone.hears(named, ONE), RecordHint) == [RecordHint(ME, sequence, digest, ONE)]


def test_a_twin_that_speaks_to_us_is_told() -> None:
    lone = Lone()
    for _ in range(5):
        lone.waits(SECOND)
        lone.hears(Ping(1, lone.core.incarnation, RUN, b""), ME)
    assert len(of_type(lone.said, SelfConflicted)) == 1


# --- records, leaving, joining ------------------------------------------------------------------------------


def test_newest_record_is_hinted_at_once() -> None:
    lone = Lone()
    lone.hears(gossip(claim(ONE, sequence=3)), TWO)
    lone.hears(gossip(claim(ONE, sequence=3), claim(ONE, sequence=2)), THREE)
    lone.hears(gossip(claim(ONE, sequence=4)), THREE)
    hints = of_type(lone.said, RecordHint)
    assert [(each.node_id, each.sequence, each.from_node) for each in hints] == [
        (ONE, 3, TWO),
        (ONE, 4, THREE),
    ]


def test_who_said_numbers_that_nobody_else_believes_is_looked_at_by_ourselves() -> None:
    lone = Lone()
    high = 2 * INCARNATION_STEP_MAX
    lone.hears(gossip(incarnation=high), ONE)  # it spoke to us just now, so that there is no need yet
    assert messages(lone.hears(gossip(claim(ONE, "dead", incarnation=2)), TWO), Ping) == []
    assert state_of(lone, ONE) == "alive"
    lone.hears(gossip(claim(THREE)), TWO)
    said = lone.hears(gossip(claim(THREE, "dead", incarnation=high)), TWO)
    assert len(messages(said, Ping, to=THREE)) == 1
    assert state_of(lone, THREE) == "alive"


def test_a_dead_member_of_whom_others_say_far_higher_numbers_is_called_and_comes_back() -> None:
    """It had outdone liars, step by step; whoever missed a step thought it dead and never looked again."""
    lone = Lone()
    lone.hears(gossip(), ONE)
    lone.hears(gossip(claim(ONE, "dead")), TWO)
    assert state_of(lone, ONE) == "dead"
    far = 3 * INCARNATION_STEP_MAX
    lone.waits(SECOND)
    said = lone.hears(gossip(claim(ONE, incarnation=far)), TWO)
    said += lone.hears(gossip(claim(ONE, incarnation=far)), TWO)
    (ping,) = messages(said, Ping, to=ONE)
    assert state_of(lone, ONE) == "dead"
    assert messages(lone.hears(gossip(claim(ONE, "dead", incarnation=far)), TWO), Ping, to=ONE) == []
    lone.hears(Ack(ping.sequence, EPOCH_WALL, far, RUN, b""), ONE)
    assert state_of(lone, ONE) == "alive"


def test_record_that_came_by_itself_is_no_news_when_it_is_hinted() -> None:
    lone = Lone()
    lone.hears(gossip(claim(ONE)), TWO)
    lone.waits(SECOND)
    lone.is_asked(NoteRecord(ONE, 7, b"d" * 32))
    lone.is_asked(NoteRecord(ONE, 6, b"e" * 32))
    lone.is_asked(NoteRecord(THREE, 6, b"e" * 32))
    member = lone.core.member(ONE)
    assert member is not None
    assert (member.record_sequence, member.record_digest) == (7, b"d" * 32)
    assert lone.core.member(THREE) is None
    assert of_type(lone.hears(gossip(claim(ONE, sequence=7, digest=b"d" * 32)), TWO), RecordHint) == []


def test_own_record_is_announced_and_a_lie_about_it_is_outdone() -> None:
    lone = Lone()
    lone.hears(gossip(), ONE)
    lone.waits(SECOND)
    lone.is_asked(AnnounceRecord(3, b"d" * 32))
    assert messages(lone.waits(SECOND), Gossip)
    lone.waits(2 * SECOND)
    assert messages(lone.is_asked(AnnounceRecord(4, b"d" * 32)), Gossip) == []
    said = lone.hears(Ping(1, 1, bytes(8), b""), TWO)
    own = [each for message in messages(said, Ack) for each in claims_in(message) if each.node_id == ME]
    assert {(each.record_sequence, each.record_digest) for each in own} == {(4, b"d" * 32)}
    before = lone.core.incarnation
    lie = MemberUpdate(ME, "alive", before, own[0].instance, bytes(4), 999, bytes(32))
    lone.hears(gossip(pack_update(lie)), ONE)
    assert lone.core.incarnation == before + 1


def test_leaving_is_said_and_then_there_is_silence() -> None:
    lone = Lone()
    lone.hears(gossip(claim(TWO)), ONE)
    said = lone.is_asked(Leave("maintenance"))
    assert {each.to for each in said if isinstance(each, Send)} == {ONE, TWO}
    assert {each.reason for each in messages(said, Departure)} == {"maintenance"}
    assert lone.core.next_deadline() is None
    assert lone.hears(gossip(claim(ME, "dead", 1)), ONE) == []

    other = Lone()
    other.hears(gossip(), ONE)
    other.hears(Departure("maintenance", 1, RUN, b""), ONE)
    (change,) = [each for each in of_type(other.said, MemberChanged) if each.state == "left"]
    assert "maintenance" in change.reason
    other.waits(30 * SECOND)
    assert state_of(other, ONE) == "left"


def test_who_is_believed_dead_and_speaks_is_told_so() -> None:
    lone = Lone()
    lone.hears(gossip(), ONE)
    lone.hears(gossip(claim(ONE, "dead")), TWO)
    (ack,) = messages(lone.hears(Ping(9, 1, RUN, b""), ONE), Ack, ONE)
    assert (ONE, "dead") in [(each.node_id, each.state) for each in claims_in(ack)]
    assert state_of(lone, ONE) == "dead"
    lone.hears(gossip(incarnation=2), ONE)
    assert state_of(lone, ONE) == "alive"


def test_seeds_are_asked_with_growing_patience() -> None:
    lone = Lone()
    said = lone.is_asked(Seed((ONE, TWO, ME)))
    assert [each.to for each in said if isinstance(each, Send)] == [ONE, TWO]
    assert {type(each.message) for each in said if isinstance(each, Send)} == {ViewRequest}
    requests = messages(lone.waits(120 * SECOND), ViewRequest)
    assert 10 <= len(requests) <= 20


def test_table_is_given_in_bounded_parts_and_only_where_it_differs() -> None:
    lone = Lone()
    for name in NODE_IDS[2:302]:
        lone.hears(gossip(claim(name)), TWO)
    blank = bytes(BUCKETS * BUCKET_DIGEST_SIZE)
    parts = messages(lone.hears(ViewRequest(blank, 1, RUN), ONE), ViewPart, ONE)
    assert 1 <= len(parts) <= LAN.answer_parts_max
    assert parts[-1].remaining > 0
    assert [each.ends_answer for each in parts] == [False] * (len(parts) - 1) + [True]
    parts = messages(lone.hears(ViewRequest(lone.core.table_digest(), 1, RUN), ONE), ViewPart, ONE)
    assert [(each.updates, each.remaining, each.ends_answer) for each in parts] == [(b"", 0, True)]


# --- saying less --------------------------------------------------------------------------------------------


def test_an_answered_probe_wakes_nobody_up_again() -> None:
    """Each probe that was answered cost a node a second wake-up, at the end of a time-out of nothing."""
    lone = Lone()
    lone.hears(gossip(), ONE)
    answered = wake_ups = 0
    while lone.now < 60 * SECOND:
        due = lone.core.next_deadline()
        assert due is not None
        lone.now = max(due, lone.now)
        wake_ups += 1
        lone.core.tick(lone._clock())
        for ping in messages(lone._take(), Ping, ONE):
            answered += 1
            lone.hears(Ack(ping.sequence, EPOCH_WALL + lone.now, 1, RUN, b""), ONE)
    assert answered >= 58
    assert wake_ups < 2 * answered - 10


def rounds_of_gossip(lone: Lone, newcomers: list[NodeId], interval: int) -> list[int]:
    """When it gossiped, while it hears of one newcomer after another."""
    times: list[int] = []
    lone.hears(gossip(), ONE)  # it is asked for its table, and what it says is then no news
    for node_id in newcomers:
        said = lone.hears(gossip(claim(node_id)), TWO) + lone.waits(interval)
        times += [lone.now] * (len(messages(said, Gossip)) >= LAN.gossip_fanout)
    return times


def test_gossip_grows_rare_while_there_is_news_all_the_time_and_is_quick_again_after_it() -> None:
    lone = Lone()
    times = rounds_of_gossip(lone, NODE_IDS[4:124], 250 * MILLISECOND)
    assert len([each for each in times if each <= 2 * SECOND]) >= 7
    assert 4 <= len([each for each in times if each > 25 * SECOND]) <= 6, times
    lone.waits(300 * SECOND)  # those who never were are found dead, one after another, and then it is quiet
    again = rounds_of_gossip(lone, NODE_IDS[124:128], 250 * MILLISECOND)
    assert len(again) >= 3


def test_what_a_node_says_of_itself_does_not_wait_for_others_news() -> None:
    lone = Lone()
    rounds_of_gossip(lone, NODE_IDS[4:124], 250 * MILLISECOND)
    lone.hears(gossip(claim(NODE_IDS[130])), TWO)
    said = lone.hears(gossip(claim(ME, "suspect", lone.core.incarnation + 3)), TWO)
    said += lone.waits(250 * MILLISECOND)
    refuted = [
        each for message in messages(said, Gossip) for each in claims_in(message) if each.node_id == ME
    ]
    assert refuted
