"""The dispatcher: one MoE layer's rows out to their holders, every row back, or a clean failure.

It runs inside llama.cpp's decode, in the decode thread, once per MoE layer and ubatch. Rows go to one holder
per expert; a row that comes late, refused, non-finite, short or not at all is dispatched again to another
holder inside the same call, and only when no holder is left does the decode fail. A missing row is never a
zero row (invariant 2). The router ran before this module is called: it takes ids as they come and decides
nothing about them (invariant 1).

A row that is not finite is no proof against its holder, since a model can overflow: the holder is a suspect
until somebody else has computed the same row. It is given up when that one is finite; when it is not, or when
there is nobody else, the call fails and no holder is given up.

Where the hook asks for weighted sums, each holder's sums are kept apart until all have come and are then
added up in one order, whoever was first; a lost holder's part is asked of others as a whole.

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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.holder import (
    NO_PAIRS,
    SMALL_ANSWER_PAIRS,
    IndexBuffer,
    PairIndices,
    RemoteHolder,
    Request,
)
from kvasir_node.backbone.hook import DecodeAborted, LayerCall
from kvasir_node.backbone.wire_types import exact_wire_type
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.native_library import NativeLibrary
from kvasir_node.system_words import in_words
from kvasir_node.telemetry import get_logger
from kvasir_proto import dispatch
from kvasir_proto.dispatch import Answer, FrameKind, WireType
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

if TYPE_CHECKING:  # the audit costs memory: who is audited imports it
    from kvasir_node.backbone.row_audit import Asked, RowAudit
    from kvasir_proto.audit.sampling import Countdowns

log = get_logger()

_POLL_SLICE_MS: Final = 200
"""Longest single wait; between waits an abort is noticed."""

COUNTED_NODES_MAX: Final = 1024
"""Nodes whose rows are counted: over the months more may come and go than hold anything at once."""

_COVERAGE_POLL_S: Final = 0.02
_NOBODY: Final = -1


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
    """Rows asked of each node; of those that are gone the latest `COUNTED_NODES_MAX` altogether are kept."""


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


_PART_FIELDS: Final = 4
_PART_CAPACITY, _PART_PAIRS, _PART_ROWS = 1, 2, 3
"""kvasir_holder_part: frame address, capacity in bytes, pairs, rows; 64 bits each."""


class _Parts:
    """What the native packer is told and tells of each place: frames, and an array of kvasir_holder_part."""

    __slots__ = ("address", "frames", "values")

    def __init__(self, n_places: int) -> None:
        data = bytearray(8 * _PART_FIELDS * max(1, n_places))
        self.frames: list[_FrameBuffer | None] = [None] * n_places
        self.values = memoryview(data).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(data))

    def make_room(self, n_embd_in: int, answer: Answer) -> None:
        """Give each place a frame as large as the packer has just found that it needs."""
        for index, frame in enumerate(self.frames):
            count = self.values[_PART_FIELDS * index + _PART_PAIRS]
            payload_bytes = dispatch.dispatch_payload_bytes(count, count, n_embd_in, answer=answer)
            size_bytes = dispatch.HEADER_BYTES + payload_bytes
            if count and (frame is None or len(frame.data) < size_bytes):
                self._set_frame(index, _FrameBuffer(size_bytes))

    def forget(self, index: int) -> None:
        """Let a place's frame go: it may not have left yet."""
        self._set_frame(index, None)

    def _set_frame(self, index: int, frame: _FrameBuffer | None) -> None:
        base = _PART_FIELDS * index
        self.frames[index] = frame
        self.values[base] = frame.address if frame else 0
        self.values[base + _PART_CAPACITY] = len(frame.data) if frame else 0


@dataclass(frozen=True, slots=True)
class _Sums:
    """One holder's weighted sums, [its tokens, n_embd_out], and the pairs they stand for."""

    values: npt.NDArray[np.float32]
    indices: IndexBuffer
    start: int
    n_pairs: int


@dataclass(frozen=True, slots=True)
class _Suspect:
    """What a holder has given in this call that is not finite."""

    reason: str
    bad: frozenset[int]
    """Pairs of rows, or of sums, that are not finite."""
    withheld: frozenset[int]
    """All pairs of the replies in which these were: others are asked for them."""


class _Authority:
    """The (epoch, term) that every dispatch names, and the next request id: kvasir_dispatch_authority."""

    __slots__ = ("_request_ids", "_term", "address")

    def __init__(self) -> None:
        data = bytearray(16)
        view = memoryview(data)
        self._request_ids = view[:8].cast("Q")
        self._request_ids[0] = 1  # 0 is that of OPEN
        self._term = view[8:].cast("I")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(data))

    def set_term(self, epoch: int, term: int) -> None:
        """The authority from the next dispatch on."""
        self._term[0], self._term[1] = epoch, term

    @property
    def next_request_id(self) -> int:
        """The first id that no request has had."""
        return self._request_ids[0]

    def skip(self, count: int) -> None:
        """Use up ``count`` ids."""
        self._request_ids[0] += count


@dataclass(slots=True)
class _Place:
    """A holder in the table, at the index that the expert tables name.

    `countdowns` are the audit's, by layer, and where they lie.
    """

    holder: RemoteHolder | LocalHolder
    shard: ShardSet
    primary: ShardSet
    countdowns: dict[int, tuple[Countdowns, int, int]] = field(default_factory=dict, compare=False)

    @property
    def node_id(self) -> NodeId:
        return self.holder.node_id

    @property
    def remote(self) -> RemoteHolder | None:
        """The connection, unless it is the backbone's own copy."""
        return self.holder if isinstance(self.holder, RemoteHolder) else None


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
        on_answers_timed: Callable[[NodeId, int], None],
        compact_activations: bool = False,
        audit: RowAudit | None = None,
    ) -> None:
        """``programs`` is the hook's growing table, indexed by `LayerCall.program_index`.

        With an ``audit`` it is shown nodes' rows or sums, when they have been used, as long as it has room.

        With ``compact_activations`` rows travel to holders in the smallest wire type that changes no result.
        ``on_holder_lost`` gets a node id, a code of one word and a sentence, ``on_answers_timed`` a node id
        and the mean nanoseconds of its small answers in a window of time; they must not block.
        """
        self._native = native
        self._manifest = manifest
        self._programs = programs
        self._on_holder_lost = on_holder_lost
        self._on_answers_timed = on_answers_timed
        self._compact_activations = compact_activations
        self._audit = audit
        self._pass_by = native.pass_by() if audit is not None else None
        self._wire_types: dict[tuple[int, int], WireType] = {}  # by layer and program
        self._authority = _Authority()
        self._places: list[_Place | None] = []
        self._tables: dict[int, IndexBuffer] = {}
        self._poll = select.poll()
        self._index_of_descriptor: dict[int, int] = {}
        self._lock = threading.Lock()
        self._changes: list[_Place | _Departure] = []
        self._aborted = False
        self._check: Callable[[], None] | None = None
        self._layer_calls = 0
        self._rows_dispatched = 0
        self._rows_retried = 0
        self._bytes_sent = 0
        self._bytes_received = 0
        self._holders_lost = 0
        self._rows_by_holder: Counter[NodeId] = Counter()
        self._grouped = NO_PAIRS
        self._parts = _Parts(0)
        self._filled = 0
        self._suspects: dict[int, _Suspect] = {}  # by place, in this call
        self._call: LayerCall  # the layer call being served; only meaningful inside __call__
        self._wire_type = WireType.F32  # how its rows travel
        self._answer = Answer.ROWS  # and what comes back
        self._sums: list[_Sums] = []  # what has come of it
        self._one_by_one = NO_PAIRS

    # -- from any thread ---------------------------------------------------------------------------

    def add_holder(self, holder: RemoteHolder | LocalHolder, shard: ShardSet, primary: ShardSet) -> None:
        """Offer a holder from the next layer call on; it replaces a former one of the same node.

        ``shard`` is all it can compute; for the part in ``primary`` it is asked before anybody else. A former
        one is closed, unless it is this very one with other parts. Raises
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
        in_use = [place.holder for place in self._places if place is not None]
        for each in superseded:
            if each.holder is not holder and not any(each.holder is other for other in in_use):
                _close(each.holder)

    def remove_holder(self, node_id: NodeId, reason: str) -> None:
        """Take a holder out before the next layer call."""
        with self._lock:
            self._changes.append(_Departure(node_id, reason))

    def set_authority(self, epoch: int, term: int) -> None:
        """The (epoch, term) that every dispatch names."""
        self._authority.set_term(epoch, term)

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

    def rows_asked(self, node_id: NodeId) -> int:
        """How many rows were asked of a node so far."""
        return self._rows_by_holder[node_id]

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
        self._wire_type = self._wire_type_of(call)
        self._answer = Answer.SUMS if call.weights_address else Answer.ROWS
        self._filled = 0
        self._suspects.clear()
        self._sums.clear()
        n_pairs = call.n_tokens * call.n_slots
        if len(self._grouped.values) < n_pairs:
            self._grouped = IndexBuffer(np.zeros(n_pairs, dtype=np.int32))
        try:
            self._assign(None, n_pairs, self._grouped, self._parts)
            while self._filled < n_pairs:
                self._advance()
            if self._answer is Answer.SUMS:
                self._add_up()
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
        nothing is outstanding, and when `abort` is called. Then holders come and go as they were told to, so
        that one which was removed or replaced is closed also where no layer call follows.
        """
        with contextlib.suppress(DecodeAborted):
            while self._is_owed:
                self._advance()
            if self._changes:
                self._apply_changes()

    @property
    def _is_owed(self) -> bool:
        """Whether some holder has yet to answer."""
        return any(place and place.remote and place.remote.outstanding for place in self._places)

    def await_coverage(self, patience_ns: int) -> bool:
        """Whether every expert has a holder, after waiting for that as long as there is patience.

        For when a call has raised `NoHolderLeft`. Raises `DecodeAborted`, and what the check of `watched_by`
        raises.
        """
        ends_ns = time.monotonic_ns() + patience_ns
        while self.missing_experts():
            if time.monotonic_ns() > ends_ns:
                return False
            if self._is_owed:
                self._advance()
            else:
                self._require_wanted()
                time.sleep(_COVERAGE_POLL_S)
        self.settle()
        return True

    def _apply_changes(self) -> None:
        with self._lock:
            changes, self._changes = self._changes, []
        for change in changes:
            for index, place in enumerate(self._places):
                if place is not None and place.node_id == change.node_id:
                    stays = isinstance(change, _Place) and change.holder is place.holder
                    self._drop(index, is_closed=not stays)
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
        self._forget_counts()

    def _forget_counts(self) -> None:
        """Keep the counts of nodes that are gone within bounds, those counted first going first."""
        present = {place.node_id for place in self._places if place is not None}
        surplus = len(self._rows_by_holder) - COUNTED_NODES_MAX
        for node_id in [each for each in self._rows_by_holder if each not in present][: max(0, surplus)]:
            del self._rows_by_holder[node_id]

    def _compact(self) -> None:
        """Forget empty places; only between layer calls, when no table or request names an index."""
        self._places = [place for place in self._places if place is not None]
        self._index_of_descriptor = {
            place.holder.fileno(): index
            for index, place in enumerate(self._places)
            if place is not None and isinstance(place.holder, RemoteHolder)
        }
        self._parts = _Parts(len(self._places))

    def _table(self, layer: int) -> IndexBuffer:
        """The place that each expert's rows go to, shape [n_expert]; -1 where nobody is left."""
        table = self._tables.get(layer)
        if table is None:
            table = self._tables[layer] = self._table_without(layer, frozenset())
        return table

    def _table_without(self, layer: int, excluded: frozenset[int]) -> IndexBuffer:
        """`_table` as it would be without these places."""
        values = np.full(self._manifest.n_expert, _NOBODY, dtype=np.int32)
        for primaries_only in (False, True):
            for index, place in enumerate(self._places):
                if place is not None and index not in excluded:
                    held = place.primary if primaries_only else place.shard
                    values[list(held.experts_of(layer))] = index
        return IndexBuffer(values)

    def _assign(
        self,
        pairs: IndexBuffer | None,
        n_pairs: int,
        grouped: IndexBuffer,
        parts: _Parts,
        excluded: frozenset[int] = frozenset(),
    ) -> None:
        """Send pairs of the call, ascending, to their holders; None means all of them.

        ``grouped`` (room for n_pairs) and the frames in ``parts`` stay in use until the rows are back. All
        workers get theirs before what is the backbone's own is computed. Places in ``excluded`` get none.
        """
        layer = self._call.layer
        table = self._table_without(layer, excluded) if excluded else self._table(layer)
        first_request_id = self._authority.next_request_id
        status = self._pack(table, pairs, n_pairs, grouped, parts)
        if status > 0:
            parts.make_room(self._call.n_embd_in, self._answer)
            status = self._pack(table, pairs, n_pairs, grouped, parts)
        if status != 0:
            if excluded and pairs:
                self._require_other_holders(pairs, excluded)
            raise self._unassignable(pairs, n_pairs, table)
        self._authority.skip(len(parts.frames))
        own: list[tuple[int, LocalHolder, int, int]] = []
        start = 0
        now_ns = time.monotonic_ns()
        for index, frame in enumerate(parts.frames):
            count = parts.values[_PART_FIELDS * index + _PART_PAIRS]
            if not count:
                continue
            place = self._places[index]
            if place is None:  # lost since the frames were packed: sending to somebody else has failed
                self._assign_again(grouped.values[start : start + count])
            elif isinstance(place.holder, LocalHolder):
                own.append((index, place.holder, start, count))
            else:
                assert frame is not None
                n_rows = parts.values[_PART_FIELDS * index + _PART_ROWS]
                request_id = first_request_id + index
                self._submit(place.holder, frame, request_id, grouped, start, count, n_rows, now_ns)
                self._send(index)
            start += count
        for index, holder, start, count in own:
            frame = parts.frames[index]
            assert frame is not None
            n_rows = parts.values[_PART_FIELDS * index + _PART_ROWS]
            self._compute_locally(holder, frame, grouped, start, count, n_rows)

    def _wire_type_of(self, call: LayerCall) -> WireType:
        """How the rows of a call travel."""
        if not self._compact_activations:
            return WireType.F32
        key = call.layer, call.program_index
        wire_type = self._wire_types.get(key)
        if wire_type is None:
            types = {each.suffix: each.type.name for each in self._manifest.expert_tensors(call.layer)}
            program = self._programs[call.program_index]
            wire_type = exact_wire_type(program, lambda suffix: types[suffix], call.n_embd_in)
            self._wire_types[key] = wire_type
        return wire_type

    def _pack(
        self,
        table: IndexBuffer,
        pairs: IndexBuffer | None,
        n_pairs: int,
        grouped: IndexBuffer,
        parts: _Parts,
    ) -> int:
        call = self._call
        return self._native.pack_call(
            ctypes.addressof(call),
            self._programs[call.program_index].input_per_slot,
            self._wire_type,
            self._authority.address,
            table.address,
            self._manifest.n_expert,
            len(parts.frames),
            pairs.address if pairs else None,
            n_pairs,
            grouped.address,
            parts.address,
        )

    def _assign_again(self, pairs: npt.NDArray[np.int32]) -> None:
        """Send pairs whose holder has failed, ascending, to whoever else holds their experts.

        Whoever is suspected for one of them is not asked.
        """
        self._rows_retried += len(pairs)
        asked = frozenset(pairs.tolist()) if self._suspects else frozenset()
        excluded = frozenset(
            index
            for index, suspect in self._suspects.items()
            if self._places[index] is not None and not asked.isdisjoint(suspect.withheld)
        )
        # Memory of its own: the call's frames may be half-way out, and this may happen more than once.
        grouped = IndexBuffer(np.zeros(len(pairs), dtype=np.int32))
        again = IndexBuffer(pairs.copy())
        self._assign(again, len(pairs), grouped, _Parts(len(self._places)), excluded)

    def _require_other_holders(self, pairs: IndexBuffer, excluded: frozenset[int]) -> None:
        """Raise `EngineFailed` if nobody is left for one of these pairs but those that are suspected.

        Nothing then tells whether they compute wrongly or the model overflows.
        """
        call = self._call
        ids = _ids_at(call.ids_address, call.n_tokens * call.n_slots)[pairs.values]
        others = self._table_without(call.layer, excluded).values[ids]
        alone = pairs.values[(others == _NOBODY) & (self._table(call.layer).values[ids] != _NOBODY)]
        if not len(alone):
            return
        bad = sorted(set().union(*(self._suspects[index].bad for index in excluded)))
        if len(excluded) > 1:
            raise self._overflow(bad[0])
        (index,) = excluded
        suspect = self._places[index]
        assert suspect is not None
        raise EngineFailed(
            f"expert {self._expert_of(bad[0])} of layer {call.layer} gives non-finite values on "
            f"{suspect.node_id}, and no other node is left to compute it"
        )

    def _overflow(self, pair: int) -> EngineFailed:
        """The error for a pair for which two holders gave a row that is not finite."""
        return EngineFailed(
            f"expert {self._expert_of(pair)} of layer {self._call.layer} gives non-finite values on more "
            "than one node"
        )

    def _expert_of(self, pair: int) -> int:
        call = self._call
        return int(_ids_at(call.ids_address, call.n_tokens * call.n_slots)[pair])

    def _unassignable(self, pairs: IndexBuffer | None, n_pairs: int, table: IndexBuffer) -> KvasirError:
        """The error for ids that name experts that nobody has, or that do not exist."""
        call = self._call
        ids = _ids_at(call.ids_address, call.n_tokens * call.n_slots)
        of_pairs = pairs.values if pairs else np.arange(n_pairs, dtype=np.int32)
        ids = ids[of_pairs]
        holder_of_expert = table.values
        outside = ids[(ids < 0) | (ids >= len(holder_of_expert))]
        if len(outside):
            return EngineFailed(f"the router chose expert {int(outside[0])} of {len(holder_of_expert)}")
        is_absent = holder_of_expert[ids] == _NOBODY
        absent = np.unique(ids[is_absent])
        tokens = frozenset((of_pairs[is_absent] // call.n_slots).tolist())
        shown = ", ".join(str(expert) for expert in absent[:8])
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        reason = f"no holder is left for layer {call.layer}, experts {shown}{more}"
        return NoHolderLeft(reason, tokens, call.n_tokens)

    def _submit(
        self,
        holder: RemoteHolder,
        frame: _FrameBuffer,
        request_id: int,
        grouped: IndexBuffer,
        start: int,
        n_pairs: int,
        n_rows: int,
        now_ns: int,
    ) -> None:
        call = self._call
        if call.program_index not in holder.programs:
            self._submit_program(holder, call.program_index, now_ns)
        payload_bytes = dispatch.dispatch_payload_bytes(
            n_rows, n_pairs, call.n_embd_in, self._wire_type, self._answer
        )
        if (
            n_pairs > dispatch.PAIRS_MAX
            or payload_bytes > dispatch.PAYLOAD_BYTES_MAX
            or dispatch.reply_payload_bytes(n_pairs, call.n_embd_out) > dispatch.PAYLOAD_BYTES_MAX
        ):
            raise EngineFailed(
                f"{n_pairs} rows for one holder are more than a frame takes: use a smaller ubatch"
            )
        size_bytes = dispatch.HEADER_BYTES + payload_bytes
        self._bytes_sent += size_bytes
        self._rows_by_holder[holder.node_id] += n_pairs
        holder.submit(
            Request(
                request_id,
                frame.view[:size_bytes],
                grouped,
                start,
                n_pairs,
                n_rows if self._answer is Answer.SUMS else n_pairs,
                call.n_embd_out,
                now_ns,
                holder.deadline_for(n_pairs, now_ns),
            )
        )
        if holder.log is not None and holder.log.is_seal_due(now_ns):
            # Behind the rows, so that its worker signs while the trunk goes on.
            holder.ask_for_seal(self._authority.next_request_id, holder.log, now_ns)
            self._authority.skip(1)

    def _submit_program(self, holder: RemoteHolder, index: int, now_ns: int) -> None:
        """Tell a holder an expert program before the first dispatch that names it."""
        if index >= dispatch.PROGRAMS_MAX:  # no worker could be told, so none is to blame
            raise EngineFailed(f"the model needs more than {dispatch.PROGRAMS_MAX} expert programs")
        request_id = self._authority.next_request_id
        self._authority.skip(1)
        encoded = self._programs[index].encode()
        frame = dispatch.pack_plain(FrameKind.PROGRAM, request_id, encoded, program=index)
        if holder.log is not None:
            holder.log.note_program(index, encoded)
        deadline_ns = holder.deadline_for(0, now_ns)
        holder.submit(Request(request_id, memoryview(frame), NO_PAIRS, 0, 0, 0, 0, now_ns, deadline_ns))
        holder.programs.add(index)

    def _compute_locally(
        self,
        holder: LocalHolder,
        frame: _FrameBuffer,
        grouped: IndexBuffer,
        start: int,
        n_pairs: int,
        n_rows: int,
    ) -> None:
        call = self._call
        payload = frame.address + dispatch.HEADER_BYTES
        x_address = payload + dispatch.tables_bytes(n_pairs, self._answer)
        if self._wire_type is WireType.Q8_0:
            x = np.empty((n_rows, call.n_embd_in), dtype=np.float32)
            self._native.expand_q8_0(x_address, x.size, x.ctypes.data)
            x_address = x.ctypes.data
        rows = np.empty((n_pairs, call.n_embd_out), dtype=np.float32)
        try:
            program = holder.kernel.add_program(self._programs[call.program_index])
            holder.kernel.compute(
                layer=call.layer,
                program_index=program,
                n_rows=n_rows,
                n_pairs=n_pairs,
                x_address=x_address,
                row_of_pair_address=payload,
                expert_of_pair_address=payload + 4 * n_pairs,
                out_address=rows.ctypes.data,
            )
        except ProtocolError as error:
            raise EngineFailed(f"the backbone's own experts refuse layer {call.layer}: {error}") from error
        self._rows_by_holder[holder.node_id] += n_pairs
        if self._answer is Answer.SUMS:
            sums = np.empty((n_rows, call.n_embd_out), dtype=np.float32)
            fault = self._native.weighted_sums(
                *(rows.ctypes.data, payload, payload + 8 * n_pairs, n_pairs, n_rows, call.n_embd_out),
                sums.ctypes.data,
            )
            assert fault < 0, "the packer numbers rows one after another"
            rows = sums
        pairs = grouped.values[start : start + n_pairs]
        if self._accept(rows.ctypes.data, len(rows), grouped, start, n_pairs) >= 0:
            self._require_fault(self._bad_pairs(rows.ctypes.data, len(rows), pairs))
            raise EngineFailed(f"the backbone's own experts gave a non-finite row in layer {call.layer}")
        self._convict(pairs)

    def _accept(
        self, rows_address: int, n_results: int, indices: IndexBuffer, start: int, n_pairs: int
    ) -> int:
        """Copy rows to their slots, or keep sums. Returns -1, or the index of the first not finite."""
        call = self._call
        if self._answer is Answer.SUMS:
            sums = _Sums(np.empty((n_results, call.n_embd_out), dtype=np.float32), indices, start, n_pairs)
            if len(self._one_by_one.values) < n_results:
                self._one_by_one = IndexBuffer(np.arange(n_results, dtype=np.int32))
            bad = self._native.scatter_rows(
                *(rows_address, self._one_by_one.address, n_results, call.n_embd_out),
                sums.values.ctypes.data,
            )
            if bad < 0:
                self._sums.append(sums)
        else:
            bad = self._native.scatter_rows(
                rows_address, indices.address + 4 * start, n_pairs, call.n_embd_out, call.out_address
            )
        if bad < 0:
            self._filled += n_pairs
        return bad

    def _add_up(self) -> None:
        """Write every token's sum: parts are added in the order of the first slot that each has of it."""
        call = self._call
        parts = np.array(
            [
                (each.values.ctypes.data, each.indices.address + 4 * each.start, each.n_pairs)
                for each in self._sums
            ],
            dtype=np.int64,
        )  # kvasir_sums_part
        fault = self._native.add_sums(
            *(parts.ctypes.data, len(parts), call.n_tokens, call.n_slots, call.n_embd_out),
            call.out_address,
        )
        if fault >= 0:
            raise EngineFailed(f"pair {fault} of layer {call.layer} is not in exactly one holder's sums")

    def _send(self, index: int) -> None:
        place = self._places[index]
        if place is None:
            return
        holder = place.holder
        assert isinstance(holder, RemoteHolder)
        try:
            holder.send_pending()
        except OSError as error:
            self._lose(index, "closed", f"sending failed: {in_words(error)}")
            return
        if holder.wants_to_send:
            self._poll.modify(holder.fileno(), select.POLLIN | select.POLLOUT)

    def _require_wanted(self) -> None:
        """Raise `DecodeAborted`, or what the check raises, if nobody waits for this any more."""
        if self._aborted:
            raise DecodeAborted
        if self._check is not None:
            self._check()

    def _advance(self) -> None:
        """Wait for any connection to move, then move it; lose what is late."""
        self._require_wanted()
        due, deadline_ns, sending = -1, 0, False
        for index, place in enumerate(self._places):
            if place and (remote := place.remote) and remote.outstanding:
                sending = sending or remote.wants_to_send
                due_ns = remote.outstanding[0].deadline_ns
                if due < 0 or due_ns < deadline_ns:
                    due, deadline_ns = index, due_ns
        assert due >= 0, "rows are missing and nobody owes them"
        # Who is due first is expected first. To wait where the reply is read spares the usual layer a poll.
        if not sending and self._move(due, select.POLLIN):
            return
        wait_ms = max(0, (deadline_ns - time.monotonic_ns() + 999_999) // 1_000_000)
        for descriptor, events in self._poll.poll(min(wait_ms, _POLL_SLICE_MS)):
            ready = self._index_of_descriptor.get(descriptor)
            if ready is not None:
                self._move(ready, events)
        if time.monotonic_ns() >= deadline_ns:
            self._lose_late()

    def _move(self, index: int, events: int) -> bool:
        """Send and receive what can be at once; whether a reply was taken or the holder was lost."""
        place = self._places[index]
        assert place is not None
        holder = place.remote
        assert holder is not None
        taken = False
        try:
            if events & select.POLLOUT:
                holder.send_pending()
                if not holder.wants_to_send:
                    self._poll.modify(holder.fileno(), select.POLLIN)
            # With nothing outstanding one read is due all the same: it is how an end of stream is noticed.
            while (request := holder.receive_reply()) is not None:
                taken = True
                self._take(index, holder, request)
                if self._places[index] is not place or not holder.outstanding:
                    break
        except OSError as error:
            self._lose(index, "closed", in_words(error))
            return True
        except RemoteProtocolError as error:
            self._lose(index, error.code, str(error))
            return True
        return taken

    def _take(self, index: int, holder: RemoteHolder, request: Request) -> None:
        """Use the rows that have come."""
        n_pairs = request.n_pairs
        self._bytes_received += dispatch.HEADER_BYTES + dispatch.reply_payload_bytes(
            request.n_results, request.n_embd_out
        )
        if request.abandoned or not n_pairs:
            return
        now_ns = time.monotonic_ns()
        elapsed_ns = now_ns - request.submitted_ns
        holder.rate.learn(elapsed_ns - holder.rtt_ns, n_pairs)
        if n_pairs <= SMALL_ANSWER_PAIRS:
            mean_ns = holder.window.take(elapsed_ns, now_ns)
            if mean_ns is not None:
                self._on_answers_timed(holder.node_id, mean_ns)
        bad = self._accept(holder.payload_address, request.n_results, request.indices, request.start, n_pairs)
        if bad >= 0:
            bad_pairs = self._bad_pairs(holder.payload_address, request.n_results, request.pairs)
            self._require_fault(bad_pairs)
            self._suspect(index, bad, bad_pairs, request.pairs)
        else:
            self._convict(request.pairs)
            if self._audit is not None and self._audit.has_room:
                self._show(self._audit, index, holder, request)
            elif self._audit is not None:
                self._audit.n_rows_unseen += n_pairs

    def _show(self, audit: RowAudit, index: int, holder: RemoteHolder, request: Request) -> None:
        """Let the audit have a look at what has just been taken; mostly it wants none, and that is quick."""
        call, place = self._call, self._places[index]
        assert place is not None
        assert self._pass_by is not None
        pairs_address = request.indices.address + 4 * request.start
        known = place.countdowns.get(call.layer)
        if known is None or self._pass_by(
            call.ids_address, pairs_address, request.n_pairs, known[1], known[2]
        ):
            self._note(audit, holder, request)
            countdowns = audit.countdowns(holder.node_id, call.layer)
            if countdowns is None:
                place.countdowns.pop(call.layer, None)
            else:
                of_experts, of_node = countdowns
                addresses = of_experts.buffer_info()[0], of_node.buffer_info()[0]
                place.countdowns[call.layer] = (countdowns, *addresses)

    def _note(self, audit: RowAudit, holder: RemoteHolder, request: Request) -> None:
        """Tell the audit of the rows that have just been taken."""
        call = self._call
        program = self._programs[call.program_index]
        pairs = request.pairs
        n_slots, are_summed = call.n_slots, self._answer is Answer.SUMS
        per_row = 1 if program.input_per_slot else n_slots
        ids = _ids_at(call.ids_address, call.n_tokens * n_slots)
        experts: list[int] = ids[pairs].tolist()

        def asked(place: int) -> Asked:
            pair = int(pairs[place])
            x_address = call.x_address + 4 * call.n_embd_in * (pair // per_row)
            if not are_summed:
                return x_address, place, ()
            tokens = pairs // n_slots  # ascending; each has a sum
            weights = _floats_at(call.weights_address, call.n_tokens * n_slots)
            mine = np.flatnonzero(tokens == tokens[place]).tolist()
            of_sum = tuple((experts[each], float(weights[pairs[each]])) for each in mine)
            return x_address, int(np.count_nonzero(np.diff(tokens[: place + 1]))), of_sum

        audit.note_rows(
            holder.node_id,
            call.layer,
            program,
            experts,
            asked,
            holder.payload_address,
            (call.n_embd_in, call.n_embd_out),
            # Sums are no evidence: whose part of one is wrong, nobody can show.
            lambda: None if are_summed else holder.keep_exchange(request),
        )

    def _bad_pairs(self, address: int, n_results: int, pairs: PairIndices) -> frozenset[int]:
        """Those of a request's pairs, ascending, whose rows, or tokens' sums, are not finite."""
        n_embd_out = self._call.n_embd_out
        results = np.ctypeslib.as_array((ctypes.c_float * (n_results * n_embd_out)).from_address(address))
        bad = ~np.isfinite(results.reshape(n_results, n_embd_out)).all(axis=1)
        if self._answer is Answer.SUMS:
            _, result_of_pair = np.unique(pairs // self._call.n_slots, return_inverse=True)
            bad = bad[result_of_pair]
        return frozenset(pairs[bad].tolist())

    def _require_fault(self, pairs: frozenset[int]) -> None:
        """Raise `EngineFailed` when bad rows for these pairs are not a holder's fault: none could do better.

        That is so when the trunk's own activations or weights are not finite, or when somebody else has given
        a bad row for one of these pairs already. Several are pairs of one token, whose sum is bad.
        """
        call = self._call
        for pair in sorted(pairs):
            row = pair if self._programs[call.program_index].input_per_slot else pair // call.n_slots
            address = call.x_address + 4 * row * call.n_embd_in
            x = np.ctypeslib.as_array((ctypes.c_float * call.n_embd_in).from_address(address))
            if not np.isfinite(x).all():
                raise EngineFailed(f"the trunk's own activations in layer {call.layer} are not finite")
        if self._answer is Answer.SUMS:
            weights = _floats_at(call.weights_address, call.n_tokens * call.n_slots)
            if not np.isfinite(weights[sorted(pairs)]).all():
                raise EngineFailed(f"the router's weights in layer {call.layer} are not finite")
        again = [min(common) for each in self._suspects.values() if (common := pairs & each.bad)]
        if again:
            raise self._overflow(min(again))

    def _suspect(self, index: int, row: int, bad: frozenset[int], pairs: PairIndices) -> None:
        """Ask somebody else for a reply's pairs, of which ``bad`` were not finite; that one's will tell."""
        known = self._suspects.get(index)
        withheld = frozenset(pairs.tolist())
        if known is not None:
            bad, withheld = bad | known.bad, withheld | known.withheld
        self._suspects[index] = _Suspect(
            f"row {row} of layer {self._call.layer} is not finite", bad, withheld
        )
        self._assign_again(np.sort(pairs))

    def _convict(self, pairs: PairIndices) -> None:
        """Give up every suspect for whose bad pairs somebody else has now given finite rows."""
        if not self._suspects:
            return
        finite = frozenset(pairs.tolist())
        for index, suspect in sorted(self._suspects.items()):
            if not finite.isdisjoint(suspect.bad) and self._places[index] is not None:
                self._lose(index, "non_finite", suspect.reason)

    def _lose_late(self) -> None:
        now_ns = time.monotonic_ns()
        for index, place in enumerate(self._places):
            outstanding = place.remote.outstanding if place and place.remote else None
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
        pairs = np.sort(np.concatenate(owed)) if owed else NO_PAIRS.values
        if len(pairs):
            self._assign_again(pairs)

    def _drop(self, index: int, *, is_closed: bool = True) -> None:
        place = self._places[index]
        assert place is not None
        self._places[index] = None
        self._tables.clear()
        if isinstance(place.holder, RemoteHolder):
            descriptor = place.holder.fileno()
            self._poll.unregister(descriptor)
            del self._index_of_descriptor[descriptor]
        if is_closed:
            _close(place.holder)

    def _abandon_outstanding(self) -> None:
        """After a failed call: replies still under way belong to nobody."""
        for index, place in enumerate(self._places):
            if place is not None and isinstance(place.holder, RemoteHolder):
                for request in place.holder.outstanding:
                    request.abandoned = True
                    self._parts.forget(index)
                if place.holder.wants_to_send:  # or its worker would be blamed for not answering
                    self._poll.modify(place.holder.fileno(), select.POLLIN | select.POLLOUT)


def _ids_at(address: int, count: int) -> npt.NDArray[np.int32]:
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))


def _floats_at(address: int, count: int) -> npt.NDArray[np.float32]:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def _close(holder: RemoteHolder | LocalHolder) -> None:
    if isinstance(holder, RemoteHolder):
        holder.close()
    else:
        holder.kernel.close()
