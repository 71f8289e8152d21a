"""The dispatcher: one MoE layer's rows out to their holders, every row back, or a clean failure.

It runs inside llama.cpp's decode, in the decode thread, once per MoE layer and ubatch. Rows go to one holder
per expert; a row that comes late, refused, non-finite, short or not at all is dispatched again to another
holder inside the same call, and only when no holder is left does the decode fail. A missing row is never a
zero row (invariant 2). The router ran before this module is called: it takes ids as they come and decides
nothing about them (invariant 1).

It refuses to know libp2p, trio, sessions and how a holder came to be connected.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.holder import PairIndices, RemoteHolder, Request
from kvasir_node.backbone.hook import DecodeAborted, LayerCall
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.native_library import NativeLibrary
from kvasir_node.telemetry import get_logger
from kvasir_proto import dispatch
from kvasir_proto.dispatch import FrameKind, ReplyCode, ReplyHeader
from kvasir_proto.errors import (
    EngineFailed,
    KvasirError,
    LocalProtocolError,
    NoHolderLeft,
    ProtocolError,
    RemoteProtocolError,
)
from kvasir_proto.ids import NodeId
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram

log = get_logger()

_POLL_SLICE_MS: Final = 200
"""Longest single wait; between waits an abort is noticed."""

_NOBODY: Final = -1
_NO_PAIRS: Final[PairIndices] = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class DispatchStatistics:
    """Counters since the dispatcher was made; an immutable snapshot."""

    layer_calls: int
    rows_dispatched: int
    rows_retried: int
    bytes_sent: int
    bytes_received: int
    holders_lost: int
    rows_by_holder: dict[NodeId, int]
    """Rows asked of each node, also of those that are gone; the sum of their expert computations."""


@dataclass(frozen=True, slots=True)
class LocalHolder:
    """The backbone's own copy of some experts: a kernel called in the process."""

    node_id: NodeId
    kernel: ExpertKernel


class _FrameBuffer:
    """An outgoing frame's memory and its address, kept from layer to layer."""

    __slots__ = ("address", "data", "view")

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)
        self.view = memoryview(self.data)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))


class _Indices:
    """An array of I32 and its address, which numpy takes a microsecond to tell."""

    __slots__ = ("address", "values")

    def __init__(self, values: PairIndices) -> None:
        self.values = values
        self.address: int = values.ctypes.data


_PART_FIELDS: Final = 4
_PART_CAPACITY, _PART_PAIRS, _PART_ROWS = 1, 2, 3
"""kvasir_holder_part: payload address, capacity in bytes, pairs, rows; 64 bits each."""


class _Parts:
    """What the native packer is told and tells of each place: an array of kvasir_holder_part."""

    __slots__ = ("address", "values")

    def __init__(self, n_places: int) -> None:
        data = bytearray(8 * _PART_FIELDS * max(1, n_places))
        self.values = memoryview(data).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(data))

    def set_room(self, index: int, frame: _FrameBuffer | None) -> None:
        """Let the packer write a place's payload into ``frame``, or nowhere."""
        base = _PART_FIELDS * index
        self.values[base] = frame.address + dispatch.HEADER_BYTES if frame else 0
        self.values[base + _PART_CAPACITY] = len(frame.data) - dispatch.HEADER_BYTES if frame else 0


@dataclass(slots=True)
class _Place:
    """A holder in the table, at the index that the expert tables name."""

    holder: RemoteHolder | LocalHolder
    shard: ShardSet
    primary: ShardSet
    frame: _FrameBuffer | None = None
    """Memory for its part of a whole layer call; what is dispatched again gets memory of its own."""

    @property
    def node_id(self) -> NodeId:
        return self.holder.node_id


_Share = tuple[int, RemoteHolder | LocalHolder, _FrameBuffer, PairIndices, int, int]
"""What one holder gets: its place's index, itself, the packed frame, the pairs, their address, n_rows."""


@dataclass(frozen=True, slots=True)
class _Departure:
    """A node to be taken out before the next layer call."""

    node_id: NodeId
    reason: str


class Dispatcher:
    """Routes layer calls to holders. `__call__` in the decode thread; everything else from any thread."""

    def __init__(
        self,
        native: NativeLibrary,
        manifest: ModelManifest,
        programs: Sequence[ExpertProgram],
        *,
        on_holder_lost: Callable[[NodeId, str, str], None],
    ) -> None:
        """``programs`` is the hook's growing table, indexed by `LayerCall.program_index`.

        ``on_holder_lost`` gets a node id, a code of one word and a sentence; it must not block.
        """
        self._native = native
        self._manifest = manifest
        self._programs = programs
        self._on_holder_lost = on_holder_lost
        self._authority = (0, 0)
        self._places: list[_Place | None] = []
        self._tables: dict[int, _Indices] = {}
        self._poll = select.poll()
        self._index_of_descriptor: dict[int, int] = {}
        self._lock = threading.Lock()
        self._changes: list[_Place | _Departure] = []
        self._aborted = False
        self._check: Callable[[], None] | None = None
        self._request_id = 0
        self._layer_calls = 0
        self._rows_dispatched = 0
        self._rows_retried = 0
        self._bytes_sent = 0
        self._bytes_received = 0
        self._holders_lost = 0
        self._rows_by_holder: Counter[NodeId] = Counter()
        self._pairs = _Indices(_NO_PAIRS)
        self._parts = _Parts(0)
        self._filled = 0
        self._call: LayerCall  # the layer call being served; only meaningful inside __call__

    # -- from any thread ---------------------------------------------------------------------------

    def add_holder(self, holder: RemoteHolder | LocalHolder, shard: ShardSet, primary: ShardSet) -> None:
        """Offer a holder from the next layer call on; it replaces a former one of the same node.

        ``shard`` is all it can compute; for the part in ``primary`` it is asked before anybody else. Raises
        `LocalProtocolError` for a shard that is not of this model, or a primary part outside the shard.
        """
        for layer, _, end in shard.ranges:
            if layer not in self._manifest.moe_layers or end > self._manifest.n_expert:
                raise LocalProtocolError(f"layer {layer} of the shard is not of this model")
        if len(primary.difference(shard)):
            raise LocalProtocolError("the primary part reaches outside the shard")
        with self._lock:
            # One of the same node that never came into use would otherwise stay open until the next call.
            superseded = [
                each for each in self._changes if isinstance(each, _Place) and each.node_id == holder.node_id
            ]
            self._changes = [each for each in self._changes if each not in superseded]
            self._changes.append(_Place(holder, shard, primary))
        for each in superseded:
            _close(each.holder)

    def remove_holder(self, node_id: NodeId, reason: str) -> None:
        """Take a holder out before the next layer call."""
        with self._lock:
            self._changes.append(_Departure(node_id, reason))

    def set_authority(self, epoch: int, term: int) -> None:
        """The (epoch, term) that every dispatch names."""
        self._authority = (epoch, term)

    def abort(self) -> None:
        """Make the current and every later layer call raise `DecodeAborted`, until `resume`."""
        self._aborted = True

    def resume(self) -> None:
        """Allow layer calls again."""
        self._aborted = False

    def statistics(self) -> DispatchStatistics:
        """A snapshot of the counters."""
        return DispatchStatistics(
            layer_calls=self._layer_calls,
            rows_dispatched=self._rows_dispatched,
            rows_retried=self._rows_retried,
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            holders_lost=self._holders_lost,
            rows_by_holder=dict(self._rows_by_holder),
        )

    def missing_experts(self) -> dict[int, tuple[int, ...]]:
        """Layer to the experts that no holder has; empty when every expert is covered."""
        with self._lock:
            places = [place for place in self._places if place is not None]
            for change in self._changes:
                places = [place for place in places if place.node_id != change.node_id]
                if isinstance(change, _Place):
                    places.append(change)
        missing = {}
        for layer in self._manifest.moe_layers:
            held = {expert for place in places for expert in place.shard.experts_of(layer)}
            absent = tuple(expert for expert in range(self._manifest.n_expert) if expert not in held)
            if absent:
                missing[layer] = absent
        return missing

    def close(self) -> None:
        """Close every holder. Only after the last layer call."""
        for place in [*self._places, *self._changes]:
            if isinstance(place, _Place):
                _close(place.holder)
        self._places.clear()
        self._changes.clear()

    # -- in the decode thread ----------------------------------------------------------------------

    def __call__(self, call: LayerCall) -> None:
        """Fill every row of ``call``'s output.

        Raises `NoHolderLeft`, `DecodeAborted`, what the check of `watched_by` raises, or `EngineFailed` for
        what is nobody else's fault. After any of them `settle` is due before long.
        """
        if self._changes:
            self._apply_changes()
        self._call = call
        self._filled = 0
        n_pairs = call.n_tokens * call.n_slots
        if len(self._pairs.values) < n_pairs:
            self._pairs = _Indices(np.zeros(n_pairs, dtype=np.int32))
        try:
            self._assign(n_pairs)
            while self._filled < n_pairs:
                self._advance()
        except BaseException:
            self._abandon_outstanding()
            raise
        self._layer_calls += 1
        self._rows_dispatched += n_pairs

    @contextlib.contextmanager
    def watched_by(self, check: Callable[[], None]) -> Iterator[None]:
        """While inside, ``check`` runs whenever a layer call waits; what it raises ends that call.

        It is how a session's own deadline and its cancellation reach a call that waits for a worker.
        """
        self._check = check
        try:
            yield
        finally:
            self._check = None

    def settle(self) -> None:
        """Wait for the replies that a failed call left behind; none is waited for beyond its deadline.

        A worker that cannot get rid of its reply gives up the connection after a while. Returns at once when
        nothing is outstanding, and when `abort` is called.
        """
        with contextlib.suppress(DecodeAborted):
            while any(
                place is not None and isinstance(place.holder, RemoteHolder) and place.holder.outstanding
                for place in self._places
            ):
                self._advance()

    def _apply_changes(self) -> None:
        with self._lock:
            changes, self._changes = self._changes, []
        for change in changes:
            for index, place in enumerate(self._places):
                if place is not None and place.node_id == change.node_id:
                    self._drop(index)
            if isinstance(change, _Departure):
                log.info("holder_removed", node=change.node_id, reason=change.reason)
                continue
            self._places.append(change)
            if isinstance(change.holder, RemoteHolder):
                descriptor = change.holder.fileno()
                self._poll.register(descriptor, select.POLLIN)
                self._index_of_descriptor[descriptor] = len(self._places) - 1
        self._compact()
        self._tables.clear()

    def _compact(self) -> None:
        """Forget empty places; only between layer calls, when no table or request names an index."""
        self._places = [place for place in self._places if place is not None]
        self._index_of_descriptor = {
            place.holder.fileno(): index
            for index, place in enumerate(self._places)
            if place is not None and isinstance(place.holder, RemoteHolder)
        }
        self._parts = _Parts(len(self._places))
        for index, each in enumerate(self._places):
            if each is not None:
                self._parts.set_room(index, each.frame)

    def _table(self, layer: int) -> _Indices:
        """The place that each expert's rows go to, shape [n_expert]; -1 where nobody is left."""
        table = self._tables.get(layer)
        if table is None:
            values = np.full(self._manifest.n_expert, _NOBODY, dtype=np.int32)
            for primaries_only in (False, True):
                for index, place in enumerate(self._places):
                    if place is not None:
                        held = place.primary if primaries_only else place.shard
                        values[list(held.experts_of(layer))] = index
            table = self._tables[layer] = _Indices(values)
        return table

    def _assign(self, n_pairs: int) -> None:
        """Send every pair of the call to its holder: all requests first, then the backbone's own part."""
        call = self._call
        table = self._table(call.layer)
        parts = self._parts
        status = self._pack_call(table)
        if status > 0:
            self._make_room()
            status = self._pack_call(table)
        if status != 0:
            raise self._unassignable(call.ids_address, n_pairs, table.values)
        start = 0
        shares: list[_Share] = []
        for index, place in enumerate(self._places):
            count = parts.values[_PART_FIELDS * index + _PART_PAIRS]
            if not count:
                continue
            assert place is not None
            assert place.frame is not None
            pairs = self._pairs.values[start : start + count]
            n_rows = parts.values[_PART_FIELDS * index + _PART_ROWS]
            shares.append((index, place.holder, place.frame, pairs, self._pairs.address + 4 * start, n_rows))
            start += count
        self._deliver(shares)

    def _pack_call(self, table: _Indices) -> int:
        call = self._call
        return self._native.pack_call(
            ctypes.addressof(call),
            self._programs[call.program_index].input_per_slot,
            table.address,
            self._manifest.n_expert,
            len(self._places),
            self._pairs.address,
            self._parts.address,
        )

    def _make_room(self) -> None:
        """Give each place as much memory as the packer has just found that it needs."""
        n_embd_in = self._call.n_embd_in
        for index, place in enumerate(self._places):
            count = self._parts.values[_PART_FIELDS * index + _PART_PAIRS]
            size_bytes = dispatch.HEADER_BYTES + dispatch.dispatch_payload_bytes(count, count, n_embd_in)
            if place is not None and (place.frame is None or len(place.frame.data) < size_bytes):
                place.frame = _FrameBuffer(size_bytes)
                self._parts.set_room(index, place.frame)

    def _assign_again(self, pairs: PairIndices) -> None:
        """Send pairs whose holder has failed, ascending, to whoever else holds their experts."""
        call = self._call
        table = self._table(call.layer)
        n_pairs = len(pairs)
        ids = _ids_at(call.ids_address, call.n_tokens * call.n_slots)[pairs]
        grouped = np.zeros(n_pairs, dtype=np.int32)
        counts = np.zeros(max(1, len(self._places)), dtype=np.int32)
        status = self._native.partition(
            ids.ctypes.data,
            n_pairs,
            table.address,
            self._manifest.n_expert,
            len(self._places),
            grouped.ctypes.data,
            counts.ctypes.data,
        )
        if status != 0:
            raise self._unassignable(ids.ctypes.data, n_pairs, table.values)
        start = 0
        shares: list[_Share] = []
        for index, count in enumerate(counts.tolist()):
            if not count:
                continue
            place = self._places[index]
            assert place is not None
            part = _Indices(pairs[grouped[start : start + count]])
            frame, n_rows = self._pack(part)
            shares.append((index, place.holder, frame, part.values, part.address, n_rows))
            start += count
        self._deliver(shares)

    def _deliver(self, shares: list[_Share]) -> None:
        """Send to all workers first, then compute what is the backbone's own meanwhile."""
        now_ns = time.monotonic_ns()
        for _, holder, frame, pairs, pairs_address, n_rows in shares:
            if isinstance(holder, RemoteHolder):
                self._submit(holder, frame, pairs, pairs_address, n_rows, now_ns)
        for index, holder, *_ in shares:
            if isinstance(holder, RemoteHolder):
                self._send(index)
        for _, holder, frame, pairs, _, n_rows in shares:
            if isinstance(holder, LocalHolder):
                self._compute_locally(holder, frame, pairs, n_rows)

    def _unassignable(self, ids_address: int, n_pairs: int, table: npt.NDArray[np.int32]) -> KvasirError:
        """The error for ids that name experts that nobody has, or that do not exist."""
        call = self._call
        ids = _ids_at(ids_address, n_pairs)
        outside = ids[(ids < 0) | (ids >= len(table))]
        if len(outside):
            return EngineFailed(f"the router chose expert {int(outside[0])} of {len(table)}")
        absent = np.unique(ids[table[ids] == _NOBODY])
        shown = ", ".join(str(expert) for expert in absent[:8])
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        return NoHolderLeft(f"no holder is left for layer {call.layer}, experts {shown}{more}")

    def _pack(self, pairs: _Indices) -> tuple[_FrameBuffer, int]:
        """Lay out a dispatch payload for these pairs behind room for its header; return it and n_rows."""
        call = self._call
        n_pairs = len(pairs.values)
        frame = _FrameBuffer(
            dispatch.HEADER_BYTES + dispatch.dispatch_payload_bytes(n_pairs, n_pairs, call.n_embd_in)
        )
        rows_of_pairs = frame.address + dispatch.HEADER_BYTES
        n_rows = self._native.pack_rows(
            call.x_address,
            call.n_embd_in,
            call.n_slots,
            self._programs[call.program_index].input_per_slot,
            call.ids_address,
            pairs.address,
            n_pairs,
            rows_of_pairs,
            rows_of_pairs + 4 * n_pairs,
            rows_of_pairs + 8 * n_pairs,
        )
        return frame, n_rows

    def _submit(
        self,
        holder: RemoteHolder,
        frame: _FrameBuffer,
        pairs: PairIndices,
        pairs_address: int,
        n_rows: int,
        now_ns: int,
    ) -> None:
        call = self._call
        epoch, term = self._authority
        if call.program_index not in holder.programs:
            if call.program_index >= dispatch.PROGRAMS_MAX:  # no worker could be told, so none is to blame
                raise EngineFailed(f"the model needs more than {dispatch.PROGRAMS_MAX} expert programs")
            program = self._programs[call.program_index].encode()
            self._request_id += 1
            request = dispatch.pack_plain(
                FrameKind.PROGRAM, self._request_id, program, program=call.program_index
            )
            holder.submit(
                Request(
                    self._request_id,
                    memoryview(request),
                    _NO_PAIRS,
                    0,
                    now_ns,
                    holder.deadline_for(0, now_ns),
                )
            )
            holder.programs.add(call.program_index)
        self._request_id += 1
        n_pairs = len(pairs)
        reply_bytes = 4 * n_pairs * call.n_embd_out
        if (
            n_pairs > dispatch.PAIRS_MAX
            or dispatch.dispatch_payload_bytes(n_rows, n_pairs, call.n_embd_in) > dispatch.PAYLOAD_BYTES_MAX
            or reply_bytes > dispatch.PAYLOAD_BYTES_MAX
        ):
            raise EngineFailed(
                f"{n_pairs} rows for one holder are more than a frame takes: use a smaller ubatch"
            )
        payload_bytes = dispatch.pack_dispatch_into(
            frame.view,
            request_id=self._request_id,
            epoch=epoch,
            term=term,
            layer=call.layer,
            program=call.program_index,
            n_rows=n_rows,
            n_pairs=n_pairs,
            n_embd_in=call.n_embd_in,
        )
        size_bytes = dispatch.HEADER_BYTES + payload_bytes
        self._bytes_sent += size_bytes
        self._rows_by_holder[holder.node_id] += n_pairs
        holder.submit(
            Request(
                self._request_id,
                frame.view[:size_bytes],
                pairs,
                call.n_embd_out,
                now_ns,
                holder.deadline_for(n_pairs, now_ns),
                pairs_address=pairs_address,
            )
        )

    def _compute_locally(
        self, holder: LocalHolder, frame: _FrameBuffer, pairs: PairIndices, n_rows: int
    ) -> None:
        call = self._call
        rows_of_pairs = frame.address + dispatch.HEADER_BYTES
        rows = np.empty((len(pairs), call.n_embd_out), dtype=np.float32)
        try:
            program = holder.kernel.add_program(self._programs[call.program_index])
            holder.kernel.compute(
                layer=call.layer,
                program_index=program,
                n_rows=n_rows,
                n_pairs=len(pairs),
                x_address=rows_of_pairs + 8 * len(pairs),
                row_of_pair_address=rows_of_pairs,
                expert_of_pair_address=rows_of_pairs + 4 * len(pairs),
                out_address=rows.ctypes.data,
            )
        except ProtocolError as error:
            raise EngineFailed(f"the backbone's own experts refuse layer {call.layer}: {error}") from error
        self._rows_by_holder[holder.node_id] += len(pairs)
        bad = self._scatter(rows.ctypes.data, pairs.ctypes.data, len(pairs))
        if bad >= 0:
            self._require_finite_input(int(pairs[bad]))
            raise EngineFailed(f"the backbone's own experts gave a non-finite row in layer {call.layer}")

    def _scatter(self, rows_address: int, pairs_address: int, n_pairs: int) -> int:
        """Copy rows to their slots. Returns -1, or the index of the first row that is not finite."""
        call = self._call
        bad = self._native.scatter_rows(
            rows_address, pairs_address, n_pairs, call.n_embd_out, call.out_address
        )
        if bad < 0:
            self._filled += n_pairs
        return bad

    def _send(self, index: int) -> None:
        place = self._places[index]
        if place is None:
            return
        holder = place.holder
        assert isinstance(holder, RemoteHolder)
        try:
            holder.send_pending()
        except OSError as error:
            self._lose(index, "closed", f"sending failed: {error}")
            return
        if holder.wants_to_send:
            self._poll.modify(holder.fileno(), select.POLLIN | select.POLLOUT)

    def _advance(self) -> None:
        """Wait for any connection to move, then move it; lose what is late."""
        if self._aborted:
            raise DecodeAborted
        if self._check is not None:
            self._check()
        deadline_ns = 0
        for place in self._places:
            if place and isinstance(place.holder, RemoteHolder) and place.holder.outstanding:
                due_ns = place.holder.outstanding[0].deadline_ns
                if not deadline_ns or due_ns < deadline_ns:
                    deadline_ns = due_ns
        assert deadline_ns, "rows are missing and nobody owes them"
        wait_ms = max(0, (deadline_ns - time.monotonic_ns() + 999_999) // 1_000_000)
        for descriptor, events in self._poll.poll(min(wait_ms, _POLL_SLICE_MS)):
            index = self._index_of_descriptor.get(descriptor)
            if index is not None:
                self._move(index, events)
        if time.monotonic_ns() >= deadline_ns:
            self._lose_late()

    def _move(self, index: int, events: int) -> None:
        place = self._places[index]
        assert place is not None
        holder = place.holder
        assert isinstance(holder, RemoteHolder)
        try:
            if events & select.POLLOUT:
                holder.send_pending()
                if not holder.wants_to_send:
                    self._poll.modify(holder.fileno(), select.POLLIN)
            # With nothing outstanding one read is due all the same: it is how an end of stream is noticed.
            while (reply := holder.receive_reply()) is not None:
                if not self._take(index, holder, *reply) or not holder.outstanding:
                    return
        except OSError as error:
            self._lose(index, "closed", str(error) or type(error).__name__)
        except RemoteProtocolError as error:
            self._lose(index, error.code, str(error))

    def _take(
        self, index: int, holder: RemoteHolder, request: Request, header: ReplyHeader, payload: memoryview
    ) -> bool:
        """Use one reply. Returns False when it cost the holder its place."""
        if header.code is not ReplyCode.OK:
            holder.outstanding.appendleft(request)
            reason = bytes(payload).decode(errors="replace")
            self._lose(index, f"refused_{header.code.name.lower()}", reason)
            return False
        self._bytes_received += dispatch.HEADER_BYTES + len(payload)
        n_pairs = len(request.pairs)
        if request.abandoned or not n_pairs:
            return True
        holder.rate.learn(time.monotonic_ns() - request.submitted_ns - holder.rtt_ns, n_pairs)
        bad = self._scatter(holder.payload_address, request.pairs_address, n_pairs)
        if bad >= 0:
            self._require_finite_input(int(request.pairs[bad]))
            holder.outstanding.appendleft(request)
            self._lose(index, "non_finite", f"row {bad} of layer {self._call.layer} is not finite")
            return False
        return True

    def _require_finite_input(self, pair: int) -> None:
        """Raise `EngineFailed` when a bad row is the trunk's fault: then no holder can do better."""
        call = self._call
        row = pair if self._programs[call.program_index].input_per_slot else pair // call.n_slots
        address = call.x_address + 4 * row * call.n_embd_in
        x = np.ctypeslib.as_array((ctypes.c_float * call.n_embd_in).from_address(address))
        if not np.isfinite(x).all():
            raise EngineFailed(f"the trunk's own activations in layer {call.layer} are not finite")

    def _lose_late(self) -> None:
        now_ns = time.monotonic_ns()
        for index, place in enumerate(self._places):
            if place is None or not isinstance(place.holder, RemoteHolder):
                continue
            outstanding = place.holder.outstanding
            if outstanding and outstanding[0].deadline_ns <= now_ns:
                self._lose(index, "late", "no reply within its deadline")

    def _lose(self, index: int, code: str, reason: str) -> None:
        """Take a holder out and dispatch what it owed again. Raises `NoHolderLeft` when nobody else can."""
        place = self._places[index]
        assert place is not None
        holder = place.holder
        assert isinstance(holder, RemoteHolder)
        owed = [request.pairs for request in holder.outstanding if not request.abandoned]
        self._drop(index)
        self._holders_lost += 1
        self._on_holder_lost(holder.node_id, code, reason)
        # In the order of the ubatch, as the first time: a kernel's tiles depend on the order of rows.
        pairs = np.sort(np.concatenate(owed)) if owed else _NO_PAIRS
        if len(pairs):
            self._rows_retried += len(pairs)
            self._assign_again(pairs)

    def _drop(self, index: int) -> None:
        place = self._places[index]
        assert place is not None
        self._places[index] = None
        self._tables.clear()
        if isinstance(place.holder, RemoteHolder):
            descriptor = place.holder.fileno()
            self._poll.unregister(descriptor)
            del self._index_of_descriptor[descriptor]
        _close(place.holder)

    def _abandon_outstanding(self) -> None:
        """After a failed call: replies still under way belong to nobody."""
        for index, place in enumerate(self._places):
            if place is not None and isinstance(place.holder, RemoteHolder):
                for request in place.holder.outstanding:
                    request.abandoned = True
                    place.frame = None  # it may not have left yet
                    self._parts.set_room(index, None)
                if place.holder.wants_to_send:  # or its worker would be blamed for not answering
                    self._poll.modify(place.holder.fileno(), select.POLLIN | select.POLLOUT)


def _ids_at(address: int, count: int) -> npt.NDArray[np.int32]:
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))


def _close(holder: RemoteHolder | LocalHolder) -> None:
    if isinstance(holder, RemoteHolder):
        holder.close()
    else:
        holder.kernel.close()
