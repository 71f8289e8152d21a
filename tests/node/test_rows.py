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
from kvasir_proto.dispatch import HEADER_BYTES, DispatchHeader, ReplyCode, WireType

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
) -> Packed:
    """Pack a call whose row r is r, r, ...; ``room`` bytes for each holder, enough for everything if None."""
    n_pairs = len(ids) if chosen is None else len(chosen)
    room = HEADER_BYTES + n_pairs * (8 + 4 * width) if room is None else room
    id_array, table = np.array(ids, np.int32), np.array(holders, np.int32)
    n_row = len(ids) if per_slot else len(ids) // n_slot
    x = np.repeat(np.arange(n_row, dtype=np.float32), width)
    call = LayerCall(
        *(LAYER, PROGRAM, len(ids) // n_slot, n_slot, width, width, n_row, 0),
        *(x.ctypes.data, id_array.ctypes.data, 0),
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
    packed = pack(ids, holders, n_holder, n_slot=n_slot, width=width, per_slot=per_slot, chosen=chosen)
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
        )
        assert frame[:HEADER_BYTES] == bytes(expected)
        payload = frame[HEADER_BYTES : HEADER_BYTES + payload_bytes]
        row_of = np.frombuffer(payload, np.int32, n_pairs)
        assert np.frombuffer(payload, np.int32, n_pairs, 4 * n_pairs).tolist() == [ids[p] for p in group]
        rows = np.frombuffer(payload, np.float32, n_rows * width, 8 * n_pairs).reshape(n_rows, width)
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
