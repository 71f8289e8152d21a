"""The parts around the core: claims in bytes, what rides along, digests of tables, clocks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.instants import Duration, Instant, seconds
from kvasir_proto.membership.broadcasts import Broadcasts
from kvasir_proto.membership.clocks import OFFSETS_MAX, Clocks
from kvasir_proto.membership.states import NO_RECORD, Claim
from kvasir_proto.membership.table import NOBODY, Entry, Table
from kvasir_proto.messages.membership import (
    BUCKETS,
    STATES,
    UPDATE_SIZE,
    MemberState,
    MemberUpdate,
    pack_update,
    unpack_update,
)
from tests.proto.membership.simulation import NODE_IDS

updates = st.builds(
    MemberUpdate,
    st.sampled_from(NODE_IDS[:20]),
    st.sampled_from(STATES),
    st.integers(0, 2**48 - 1),
    st.binary(min_size=8, max_size=8),
    st.binary(min_size=4, max_size=4),
    st.integers(0, 2**63 - 1),
    st.binary(min_size=32, max_size=32),
)


# --- claims in bytes ----------------------------------------------------------------------------------------


@given(updates)
def test_a_claim_comes_back(update: MemberUpdate) -> None:
    data = pack_update(update)
    assert len(data) == UPDATE_SIZE
    assert unpack_update(data) == update


def test_a_claim_has_the_bytes_it_always_had() -> None:
    update = MemberUpdate(NODE_IDS[0], "dead", 5, b"instance", b"mark", 258, b"\xff" * 32)
    assert pack_update(update)[32:].hex() == (
        "02" + "0000000000000005" + b"instance".hex() + b"mark".hex() + "0000000000000102" + "ff" * 32
    )


@given(st.binary(max_size=2 * UPDATE_SIZE))
def test_any_bytes_are_a_claim_or_the_senders_error(data: bytes) -> None:
    try:
        update = unpack_update(data)
    except RemoteProtocolError:
        return
    assert pack_update(update) == data


@pytest.mark.parametrize(
    "offset, value",
    [(32, b"\4"), (33, b"\0\1" + bytes(6)), (53, b"\x80" + bytes(7))],
    ids=["state", "incarnation", "sequence"],
)
def test_impossible_numbers_are_refused(offset: int, value: bytes) -> None:
    data = bytearray(pack_update(MemberUpdate(NODE_IDS[0], "alive", 1, bytes(8), bytes(4), 1, bytes(32))))
    data[offset : offset + len(value)] = value
    with pytest.raises(RemoteProtocolError) as caught:
        unpack_update(bytes(data))
    assert caught.value.code == "out_of_bounds"


# --- what rides along ---------------------------------------------------------------------------------------


def test_least_sent_first_and_of_these_the_newest() -> None:
    waiting = Broadcasts(10)
    for key in (b"1", b"2", b"3"):
        waiting.add(key)
    assert waiting.take(2, 4) == [b"3", b"2"]
    waiting.add(b"4")
    assert waiting.take(2, 4) == [b"4", b"1"]
    assert waiting.take(4, 4)[0] in (b"4", b"1", b"3", b"2")


def test_each_is_sent_so_often_and_no_more() -> None:
    waiting = Broadcasts(100)
    for number in range(20):
        waiting.add(bytes([number]))
    taken = []
    while keys := waiting.take(8, 5):
        assert len(set(keys)) == len(keys) <= 8
        taken += keys
    assert sorted(taken) == sorted(bytes([number]) for number in range(20) for _ in range(5))
    assert len(waiting) == 0


def test_news_of_a_member_replaces_older_news() -> None:
    waiting = Broadcasts(10)
    waiting.add(b"1")
    waiting.take(1, 2)
    waiting.add(b"1")
    assert len(waiting) == 1
    assert waiting.has_fresh()
    assert waiting.take(1, 2) + waiting.take(1, 2) + waiting.take(1, 2) == [b"1", b"1"]


def test_the_most_repeated_gives_way_when_full() -> None:
    waiting = Broadcasts(3)
    waiting.add(b"old")
    waiting.take(1, 9)
    for key in (b"1", b"2", b"3"):
        waiting.add(key)
    assert len(waiting) == 3
    assert b"old" not in waiting.take(3, 9)


# --- tables -------------------------------------------------------------------------------------------------


def claim(incarnation: int, state: MemberState = "alive") -> Claim:
    return Claim(incarnation, state, bytes(8), 0, NO_RECORD)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3), st.sampled_from(STATES)), max_size=30))
def test_digests_depend_on_what_is_believed_and_not_on_the_way_there(
    history: list[tuple[int, int, MemberState]],
) -> None:
    table, final = Table(100), dict[int, Claim]()
    for number, incarnation, state in history:
        final[number] = claim(incarnation, state)
        known = table.get(NODE_IDS[number])
        if known is None and state in ("dead", "left"):
            del final[number]  # tombstones of strangers are not entered
        elif known is None:
            table.add(Entry(NODE_IDS[number], final[number]), final[number], NOBODY, Instant(0))
        else:
            table.put(known, final[number], NOBODY, Instant(0))
    twin = Table(100)
    for number in sorted(final):
        if final[number].state in ("alive", "suspect"):
            twin.add(
                Entry(NODE_IDS[number], final[number]), claim(final[number].incarnation), NOBODY, Instant(0)
            )
    assert table.digests == twin.digests
    assert table.live_count == twin.live_count == len(twin)
    assert len(table.tombstones) == len(table) - table.live_count


def test_a_full_table_forgets_its_oldest_tombstone_first() -> None:
    table = Table(3)
    for name in NODE_IDS[:3]:
        table.add(Entry(name, claim(1)), claim(1), NOBODY, Instant(0))
    with pytest.raises(OverflowError):
        table.add(Entry(NODE_IDS[3], claim(1)), claim(1), NOBODY, Instant(0))
    for when, name in enumerate((NODE_IDS[1], NODE_IDS[0])):
        table.put(table[name], claim(1, "dead"), NOBODY, Instant(when))
    assert table.add(Entry(NODE_IDS[3], claim(1)), claim(1), NOBODY, Instant(0)) == NODE_IDS[1]
    assert {each.node_id for each in table.in_order()} == {NODE_IDS[0], NODE_IDS[2], NODE_IDS[3]}


def test_hearsay_is_in_the_digests_gives_way_first_and_takes_nobodys_place() -> None:
    table = Table(3)
    for name in NODE_IDS[:2]:
        table.add(Entry(name, claim(1)), claim(1), NOBODY, Instant(0))
    table.put(table[NODE_IDS[1]], claim(1, "dead"), NOBODY, Instant(1))
    without = list(table.digests)
    heard = [Entry(name, claim(1), heard_from=NODE_IDS[0]) for name in NODE_IDS[2:4]]
    assert table.add(heard[0], claim(1), NOBODY, Instant(2)) is None
    assert table.digests != without
    assert (table.live_count, len(table.tombstones)) == (1, 1)
    assert heard[0] not in [entry for index in range(BUCKETS) for entry in table.bucket(index)]
    assert table.add(heard[1], claim(1), NOBODY, Instant(3)) == NODE_IDS[2]
    assert table.add(Entry(NODE_IDS[4], claim(1)), claim(1), NOBODY, Instant(4)) == NODE_IDS[3]
    assert table.add(Entry(NODE_IDS[5], claim(1)), claim(1), NOBODY, Instant(5)) == NODE_IDS[1]
    assert (table.live_count, len(table.tombstones), len(table.hearsay)) == (3, 0, 0)


# --- clocks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offsets_s, own_s, wrong",
    [
        ([], None, ()),
        ([0, 1, -1], None, ()),
        ([600], None, (0,)),  # two clocks apart: shown, nobody judged
        ([600, 600], None, (0, 1)),
        ([600, 601, 599], 600, ()),
        ([-600, -601, -599, 0], -599, (3,)),
        ([0, 1, 600], None, (2,)),
        ([600, 600, 0, 0], None, (0, 1)),  # a draw: in doubt for ourselves
        ([59, 59, 59], None, ()),
        ([61, 61, 61], 61, ()),
    ],
)
def test_most_clocks_are_right(offsets_s: list[int], own_s: int | None, wrong: tuple[int, ...]) -> None:
    clocks = Clocks(seconds(60))
    for index, offset in enumerate(offsets_s):
        clocks.observe(NODE_IDS[index], seconds(offset))
    assert clocks.own_offset() == (None if own_s is None else seconds(own_s))
    assert clocks.wrong() == frozenset(NODE_IDS[index] for index in wrong)


def test_offsets_kept_are_bounded() -> None:
    clocks = Clocks(seconds(60))
    draw = random.Random(1)
    for name in NODE_IDS[: 3 * OFFSETS_MAX]:
        clocks.observe(name, Duration(draw.randrange(10)))
    assert len(clocks.measured()) == OFFSETS_MAX
    assert clocks.offset_of(NODE_IDS[0]) is None
