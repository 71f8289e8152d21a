"""The native dispatch primitives: who gets which rows, the frames they travel in, and where answers go."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvasir_node.backbone.hook import LayerCall
from kvasir_node.native_library import load
from kvasir_proto import dispatch
from kvasir_proto.dispatch import HEADER_BYTES, Answer, DispatchHeader, ReplyCode, WireType

GUARD = np.float32(-77.0)
FIRST_REQUEST_ID, EPOCH, TERM, LAYER, PROGRAM = 2**40 + 5, 3, 2**32 - 1, 7, 2


@dataclass
class Packed:
    """What a packing gave: status, grouped pairs, and each holder's (n_pairs, n_rows, frame)."""

    status: int
    pairs: list[int]
    parts: list[tuple[int, int, bytes]]


def pack(
    ids: Sequence[int],
    holders: Sequence[int],
    n_holder: int,
    *,
    n_slot: int = 1,
    width: int = 2,
    per_slot: bool = False,
    chosen: Sequence[int] | None = None,
    room: int | None = None,
    wire_type: WireType = WireType.F32,
    answer: Answer = Answer.ROWS,
) -> Packed:
    """Pack a call whose row r is r, r, ...; ``room`` bytes for each holder, enough for everything if None.

    Where sums are asked for, pair p has weight p / 2.
    """
    n_pairs = len(ids) if chosen is None else len(chosen)
    needed = HEADER_BYTES + dispatch.dispatch_payload_bytes(n_pairs, n_pairs, width, answer=answer)
    room = needed if room is None else room
    weights = np.arange(len(ids), dtype=np.float32) / 2
    id_array, table = np.array(ids, np.int32), np.array(holders, np.int32)
    n_row = len(ids) if per_slot else len(ids) // n_slot
    x = np.repeat(np.arange(n_row, dtype=np.float32), width)
    call = LayerCall(
        *(LAYER, PROGRAM, len(ids) // n_slot, n_slot, width, width, n_row, 0),
        *(x.ctypes.data, id_array.ctypes.data, 0),
        weights.ctypes.data if answer is Answer.SUMS else 0,
    )
    grouped = np.full(n_pairs + 2, -9, np.int32)
    frames = np.full((n_holder, room // 4 * 4 + 8), 0xEE, np.uint8)  # each begins at a multiple of four
    parts = np.zeros((n_holder, 4), np.int64)
    parts[:, 0] = [frame.ctypes.data for frame in frames]
    parts[:, 1] = room
    subset = None if chosen is None else np.array(chosen, np.int32)
    authority = np.array([FIRST_REQUEST_ID, EPOCH | TERM << 32], np.uint64)
    status = load().pack_call(
        ctypes.addressof(call),
        per_slot,
        wire_type,
        authority.ctypes.data,
        table.ctypes.data,
        len(holders),
        n_holder,
        None if subset is None else subset.ctypes.data,
        n_pairs,
        grouped[1:].ctypes.data,
        parts.ctypes.data,
    )
    assert grouped[0] == grouped[-1] == -9
    assert (frames[:, room:] == 0xEE).all()
    return Packed(
        status,
        grouped[1:-1].tolist(),
        [
            (int(part[2]), int(part[3]), frame[:room].tobytes())
            for part, frame in zip(parts, frames, strict=True)
        ],
    )


@given(st.data())
def test_every_pair_reaches_the_holder_of_its_expert_in_a_frame_of_the_protocol(data: st.DataObject) -> None:
    n_holder = data.draw(st.integers(1, 4))
    holders = data.draw(st.lists(st.integers(0, n_holder - 1), min_size=1, max_size=6))
    n_token, n_slot, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3)), 3
    expert = st.integers(0, len(holders) - 1)
    ids = data.draw(st.lists(expert, min_size=n_token * n_slot, max_size=n_token * n_slot))
    per_slot = data.draw(st.booleans())
    some = data.draw(st.one_of(st.none(), st.sets(st.integers(0, len(ids) - 1), min_size=1)))
    chosen = None if some is None else sorted(some)
    answer = data.draw(st.sampled_from(Answer))
    packed = pack(
        ids, holders, n_holder, n_slot=n_slot, width=width, per_slot=per_slot, chosen=chosen, answer=answer
    )
    assert packed.status == 0
    everything = chosen or range(len(ids))
    groups = [[pair for pair in everything if holders[ids[pair]] == holder] for holder in range(n_holder)]
    assert packed.pairs == [pair for group in groups for pair in group]
    for holder, (group, (n_pairs, n_rows, frame)) in enumerate(zip(groups, packed.parts, strict=True)):
        assert n_pairs == len(group)
        if not group:
            assert set(frame) == {0xEE}, "who gets nothing is not written to"
            continue
        sources = [pair if per_slot else pair // n_slot for pair in group]
        assert n_rows == len(set(sources)), "each row travels once"
        expected = bytearray(HEADER_BYTES)
        payload_bytes = dispatch.pack_dispatch_into(
            expected,
            request_id=FIRST_REQUEST_ID + holder,
            epoch=EPOCH,
            term=TERM,
            layer=LAYER,
            program=PROGRAM,
            n_rows=n_rows,
            n_pairs=n_pairs,
            n_embd_in=width,
            answer=answer,
        )
        assert frame[:HEADER_BYTES] == bytes(expected)
        payload = frame[HEADER_BYTES : HEADER_BYTES + payload_bytes]
        row_of = np.frombuffer(payload, np.int32, n_pairs)
        assert np.frombuffer(payload, np.int32, n_pairs, 4 * n_pairs).tolist() == [ids[p] for p in group]
        if answer is Answer.SUMS:
            weights = np.frombuffer(payload, np.float32, n_pairs, 8 * n_pairs)
            assert weights.tolist() == [pair / 2 for pair in group]
        tables_bytes = dispatch.tables_bytes(n_pairs, answer)
        rows = np.frombuffer(payload, np.float32, n_rows * width, tables_bytes).reshape(n_rows, width)
        assert (rows[row_of] == np.array(sources, np.float32)[:, None]).all()


@pytest.mark.parametrize(
    "ids, holders, status",
    [
        ([0, 1, 5], [0, 1], -3),
        ([-1], [0], -1),
        ([0, 0, 1], [0, -1], -1000002),
        ([0, 1], [0, 2], -2),
        ([0, 1], [0, -2], -2),
    ],
)
def test_the_first_pair_that_nobody_can_get_is_named(ids: list[int], holders: list[int], status: int) -> None:
    packed = pack(ids, holders, 2)
    assert packed.status == status
    assert all(set(frame) == {0xEE} for _, _, frame in packed.parts)


@pytest.mark.parametrize("room", [0, HEADER_BYTES, HEADER_BYTES + 2 * (8 + 8) - 1])
def test_without_room_it_says_how_much_is_needed_and_writes_nothing(room: int) -> None:
    packed = pack([0, 1, 0], [0, 1], 2, room=room)
    assert packed.status == 1
    assert [part[:2] for part in packed.parts] == [(2, 0), (1, 0)]
    assert all(set(frame) <= {0xEE} for _, _, frame in packed.parts)


def test_weights_need_room_too() -> None:
    room = HEADER_BYTES + 2 * (12 + 8)
    assert pack([0, 0], [0], 1, room=room, answer=Answer.SUMS).status == 0
    assert pack([0, 0], [0], 1, room=room - 1, answer=Answer.SUMS).status == 1


def test_a_holder_without_pairs_needs_no_room() -> None:
    packed = pack([1, 1], [0, 1], 2)
    assert (packed.status, packed.parts[0][0]) == (0, 0)


# ---- Rows in Q8_0 ----


def expanded(blocks: bytes, n_values: int) -> npt.NDArray[np.float32]:
    data = np.frombuffer(blocks, np.uint8)
    out = np.full(n_values, GUARD)
    load().expand_q8_0(data.ctypes.data, n_values, out.ctypes.data)
    return out


def test_a_frame_of_q8_0_rows_says_so_and_holds_them() -> None:
    packed = pack([0, 1, 1], [0, 0], 1, n_slot=1, width=64, wire_type=WireType.Q8_0)
    (n_pairs, n_rows, frame) = packed.parts[0]
    header = dispatch.parse_header(frame)
    assert isinstance(header, DispatchHeader)
    assert (header.wire_type, header.n_pairs, header.n_rows) == (WireType.Q8_0, n_pairs, n_rows) == (1, 3, 3)
    assert header.payload_bytes == 8 * 3 + 3 * 2 * 34
    blocks = frame[HEADER_BYTES + 24 : HEADER_BYTES + header.payload_bytes]
    rows = expanded(blocks, 3 * 64).reshape(3, 64)
    assert np.allclose(rows, np.arange(3)[:, None], rtol=1e-3)


@given(
    rows=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32),
    scale=st.sampled_from([1.0, 1e-7, 1e-38, 1e3]),
)
@example(rows=[0.0] * 32, scale=1.0)
@example(rows=[1e-45] * 32, scale=1.0)
@example(rows=[8e6] + [1.0] * 31, scale=1.0)
def test_rounding_what_is_rounded_changes_nothing(rows: list[float], scale: float) -> None:
    """What makes Q8_0 on the wire exact: a kernel that rounds its input so gets the same blocks again."""
    with np.errstate(over="ignore", under="ignore"):
        x = np.array(rows, np.float32) * np.float32(scale)
    if not np.abs(x).max() < 65504 * 127:
        return  # the step would be infinite as F16, and the row with it
    once = rounded(x)
    again = rounded(expanded(once, 32))
    no_step = bytes(2)  # quants that mean nothing: all that the block stands for is zero
    assert again == once or again[:2] == once[:2] == no_step


def rounded(x: npt.NDArray[np.float32]) -> bytes:
    """One row as ggml rounds it, through the packer."""
    ids, table = np.zeros(1, np.int32), np.zeros(1, np.int32)
    call = LayerCall(0, 0, 1, 1, 32, 32, 1, 0, x.ctypes.data, ids.ctypes.data, 0)
    frame, grouped = np.zeros(HEADER_BYTES + 8 + 128, np.uint8), np.zeros(1, np.int32)
    parts, authority = np.array([[frame.ctypes.data, frame.nbytes, 0, 0]], np.int64), np.zeros(2, np.uint64)
    status = load().pack_call(
        *(ctypes.addressof(call), False, WireType.Q8_0, authority.ctypes.data, table.ctypes.data, 1, 1),
        *(None, 1, grouped.ctypes.data, parts.ctypes.data),
    )
    assert status == 0
    return frame[HEADER_BYTES + 8 : HEADER_BYTES + 8 + 34].tobytes()


# ---- Replies ----


def reply_header(code: ReplyCode = ReplyCode.OK, **changes: int) -> bytes:
    fields = {"request_id": 9, "payload_bytes": 92, "n_pairs": 3, "received_ns": 2**63, "compute_ns": 5}
    fields |= changes
    frame = bytearray(HEADER_BYTES)
    dispatch.pack_reply_into(frame, code=code, **fields)
    return bytes(frame)


def is_expected(header: bytes) -> bool:
    return bool(load().is_expected_reply(np.frombuffer(header, np.uint8).ctypes.data, 9, 92, 3))


def test_the_expected_reply_is_recognised_whatever_its_times_are() -> None:
    assert is_expected(reply_header())
    assert is_expected(reply_header(received_ns=0, compute_ns=2**64 - 1))


@given(offset=st.integers(0, HEADER_BYTES - 1), value=st.integers(0, 255))
def test_any_other_byte_that_means_something_makes_it_another_reply(offset: int, value: int) -> None:
    header = bytearray(reply_header())
    is_time_or_padding = 24 <= offset < 40 or offset >= 44
    same = header[offset] == value
    header[offset] = value
    assert is_expected(bytes(header)) == (same or is_time_or_padding)


# ---- Rows ----


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_scatter_stops_at_the_first_row_that_is_not_finite(bad: float) -> None:
    rows = np.arange(33, dtype=np.float32).reshape(3, 11)
    rows[0, :3] = (3.4028235e38, 1e-40, -0.0)
    pairs = np.array([4, 0, 2], np.int32)
    out: npt.NDArray[np.float32] = np.full((6, 11), GUARD)

    def scatter() -> int:
        return load().scatter_rows(rows.ctypes.data, pairs.ctypes.data, 3, 11, out.ctypes.data)

    assert scatter() == -1
    assert (out[[4, 0, 2]] == rows).all()
    assert (out[[1, 3, 5]] == GUARD).all()
    out[:] = GUARD
    rows[1, 10] = bad
    assert scatter() == 1
    assert (out[4] == rows[0]).all()
    assert (out[[0, 1, 2, 3, 5]] == GUARD).all()


# ---- Weighted sums ----

Floats = npt.NDArray[np.float32]
FINITE = st.floats(-(2.0**60), 2.0**60, width=32)


def weighted_sums(
    rows: Floats, row_of_pair: Sequence[int], weights: Floats, n_rows: int
) -> tuple[int, Floats]:
    """(status, sums), the sums with a guard behind them."""
    n_pairs, width = rows.shape
    sums: Floats = np.full((n_rows + 1, width), GUARD)
    table = np.array(row_of_pair, np.int32)
    status = load().weighted_sums(
        *(rows.ctypes.data, table.ctypes.data, weights.ctypes.data, n_pairs, n_rows, width),
        sums.ctypes.data,
    )
    assert (sums[n_rows] == GUARD).all()
    return status, sums[:n_rows]


@given(st.data())
def test_sums_are_products_added_in_the_order_of_pairs(data: st.DataObject) -> None:
    """Each operation is rounded by itself: numpy's are, and a fused one would differ."""
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    row_of_pair = [row for row, count in enumerate(counts) for _ in range(count)]
    width = data.draw(st.integers(1, 9))
    size = len(row_of_pair) * width
    rows = np.array(data.draw(st.lists(FINITE, min_size=size, max_size=size)), np.float32).reshape(-1, width)
    count = len(row_of_pair)
    weights = np.array(data.draw(st.lists(FINITE, min_size=count, max_size=count)), np.float32)
    status, sums = weighted_sums(rows, row_of_pair, weights, len(counts))
    assert status == -1
    assert sums.tobytes() == one_by_one(rows, row_of_pair, weights).tobytes()


def one_by_one(rows: Floats, row_of_pair: Sequence[int], weights: Floats) -> Floats:
    expected: list[Floats] = []
    with np.errstate(over="ignore", under="ignore"):
        for row, target, weight in zip(rows, row_of_pair, weights, strict=True):
            product = np.asarray(row * weight, np.float32)
            if target == len(expected):
                expected.append(product)
            else:
                expected[target] = np.asarray(expected[target] + product, np.float32)
    return np.array(expected)


def test_a_sum_of_one_negative_zero_keeps_its_sign() -> None:
    _, sums = weighted_sums(np.zeros((1, 3), np.float32), [0], np.array([-1.0], np.float32), 1)
    assert np.signbit(sums).all()


@pytest.mark.parametrize(
    "row_of_pair, n_rows, fault",
    [
        ([0, 2], 3, 1),  # row 1 would have no pair: a silent zero
        ([1, 1], 2, 0),
        ([0, 0], 2, 2),
        ([0, 1, 0], 2, 2),
        ([0, 1], 1, 1),
        ([-1, 0], 1, 0),
        ([0, 2**31 - 1], 2, 1),
        ([0, -(2**31)], 2, 1),
    ],
)
def test_rows_out_of_order_are_named_and_nothing_is_written(
    row_of_pair: list[int], n_rows: int, fault: int
) -> None:
    n_pairs = len(row_of_pair)
    rows, weights = np.ones((n_pairs, 2), np.float32), np.ones(n_pairs, np.float32)
    status, sums = weighted_sums(rows, row_of_pair, weights, n_rows)
    assert status == fault
    assert (sums == GUARD).all()


def add_sums(
    parts: Sequence[tuple[Floats, Sequence[int]]], n_token: int, n_slot: int, width: int
) -> tuple[int, Floats]:
    """(status, the tokens' sums) of (sums, pairs) of some holders."""
    tables = [np.array(pairs, np.int32) for _, pairs in parts]
    described = np.array(
        [
            (sums.ctypes.data, table.ctypes.data, len(table))
            for (sums, _), table in zip(parts, tables, strict=True)
        ],
        np.int64,
    ).reshape(len(parts), 3)
    out: Floats = np.full((n_token + 1, width), GUARD)
    status = load().add_sums(described.ctypes.data, len(parts), n_token, n_slot, width, out.ctypes.data)
    assert (out[n_token] == GUARD).all()
    return status, out[:n_token]


@given(st.data())
def test_parts_are_added_by_their_first_slot_whoever_came_first(data: st.DataObject) -> None:
    n_token, n_slot, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)), 3
    n_pairs = n_token * n_slot
    owner = data.draw(st.lists(st.integers(0, 3), min_size=n_pairs, max_size=n_pairs))
    draws = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    parts = []
    expected: list[Floats | None] = [None] * n_token
    contributions: dict[tuple[int, int], Floats] = {}
    for holder in data.draw(st.permutations(sorted(set(owner)))):
        pairs = [pair for pair in range(n_pairs) if owner[pair] == holder]
        tokens = sorted({pair // n_slot for pair in pairs})
        sums = draws.standard_normal((len(tokens), width)).astype(np.float32)
        parts.append((sums, pairs))
        contributions |= {(token, holder): row for token, row in zip(tokens, sums, strict=True)}
    for token in range(n_token):
        slots = owner[token * n_slot : (token + 1) * n_slot]
        for holder in dict.fromkeys(slots):  # in the order of first slots
            row, so_far = contributions[token, holder], expected[token]
            expected[token] = row if so_far is None else np.asarray(so_far + row, np.float32)
    status, out = add_sums(parts, n_token, n_slot, width)
    assert status == -1
    assert out.tobytes() == np.array(expected).tobytes()


@pytest.mark.parametrize(
    "pairs, fault",
    [
        ([[0, 1], [3]], 2),
        ([[0, 1], [1, 2, 3]], 1),
        ([[0, 1, 2, 3], [4]], 3),
        ([[-1, 0, 1, 2, 3]], 3),
        ([], 0),
    ],
)
def test_a_pair_that_is_not_in_exactly_one_part_is_named(pairs: list[list[int]], fault: int) -> None:
    status, out = add_sums([(np.ones((2, 3), np.float32), each) for each in pairs], 2, 2, 3)
    assert status == fault
    assert (out == GUARD).all()
