"""The backbone's audit: a few rows of answers, computed again in a thread of its own.

Decides what is copied when and how much of a processor that may take. The decode thread copies chosen rows
and waits for nothing: where too much waits, what is old is not looked at. A new connection is examined
before it is asked for anything that counts: rows through the experts it is to serve, so that a node that
computes wrongly has no part in any text. What rows add up to is `kvasir_proto.audit`'s to say, how a row is
judged the referee's. It refuses to know what becomes of a node that was found out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.exhibits import Exhibits, Wrong
from kvasir_node.backbone.holder import NO_PAIRS, IndexBuffer, RemoteHolder, Request
from kvasir_node.backbone.reply_log import Exchange, ReplyLog, Segment
from kvasir_node.backbone.waiting_rows import WaitingRows
from kvasir_node.certification.claimed_arithmetic import Claim
from kvasir_node.certification.row_referee import RowReferee
from kvasir_node.telemetry import get_logger
from kvasir_proto import dispatch
from kvasir_proto.audit.core import NODES_MAX, AuditCore, NoteClaim, NoteFindings
from kvasir_proto.audit.evidence import EXHIBIT_BYTES_MAX
from kvasir_proto.audit.finding import Finding
from kvasir_proto.audit.sampling import CHOSEN_OF_WINDOW, WINDOW, Countdowns
from kvasir_proto.audit.verdict import Verdict, is_wrong_for_short_sums
from kvasir_proto.dispatch import FrameKind
from kvasir_proto.effects import Now
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Instant, WallTime
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram

log = get_logger()

Float32Array = npt.NDArray[np.float32]

EXCHANGES_WAITING_MAX: Final = 64
"""With more rows that wait, a row is looked at without what it came in: 16 MB of that at most."""
ROWS_WAITING_MAX: Final = 256
"""Copied rows that wait to be looked at: a few MB. For one more an old one is dropped, and counted."""
BUSY_SHARE: Final = 0.015
"""Of the processor time of this engine, and of one processor, as long as there is nothing new to look at."""
BUSY_SHARE_AT_FIRST: Final = 0.25
"""The same while a node's first rows are looked at, and where one was found that nothing explains."""
_IDLE_SHARE: Final = 0.1
"""Of one processor: an engine that uses less waits for others, and nothing is taken from its tokens."""
IDLE_AFTER_S: Final = 1.0
_LOOK_AGAIN_S: Final = 0.02
FIRST_ROWS: Final = 64
PACE_INTERVAL_S: Final = 600.0
"""How often the log is told that the audit does not keep up."""

EXAMINED_ROWS_MAX: Final = 512
"""Rows of one examination; of more experts, some are drawn."""
EXAMINATION_S: Final = 3.0
"""Processor time in which the rows of one are judged before its node is let in, however large experts are.
Those that are left are judged behind its work, like rows of a text. A reply has its own deadline."""
EXAMINATION_WAIT_S: Final = 12.0
"""The same in time that goes by, on a machine with more to do than it can."""
_ROUNDS_MAX: Final = 4
_ROWS_AGAIN: Final = 8
"""Rows through an expert in whose row something was found, in each further round."""

_NEVER: Final = Now(Instant(0), WallTime(0))
"""The audit's core asks for no time."""
_LOWEST_PRIORITY: Final = 19


Asked: TypeAlias = tuple[int, int, tuple[tuple[int, float], ...]]
"""Where a row that was asked lies, and which of the answers is to it; of a sum, the experts and weights that
it is to have, none of a row.
"""


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that was asked of a node with that claim, and its answer; `pairs` as in `Asked`."""

    node_id: NodeId
    claim: Claim
    layer: int
    program: ExpertProgram
    expert: int
    pairs: tuple[tuple[int, float], ...]
    x: Float32Array
    answer: Float32Array
    exchange: Exchange | None
    """What it is a pair of, where that can be evidence."""
    pair: int


@dataclass(frozen=True, slots=True)
class _Sealed:
    """A connection was sealed."""

    log: ReplyLog
    segment: Segment

    @property
    def node_id(self) -> NodeId:
        return self.log.node_id


class RowAudit:
    """The audit of one backbone engine. `note_rows` in the decode thread, the rest from any."""

    def __init__(
        self,
        manifest: ModelManifest,
        read: Callable[[str, int], bytes | bytearray | memoryview],
        on_verdict: Callable[[Verdict], None],
        on_evidence: Callable[[NodeId, bytes, bytes], None],
        on_unaccountable: Callable[[NodeId, str, str], None],
    ) -> None:
        """`read(tensor name, expert)` gives any expert's bytes, verified. `on_verdict` gets each verdict
        once, `on_evidence` what can be shown to others of a node that was found out, behind the digest of
        its claim, `on_unaccountable` a node that does not stand for its answers, with a code and a
        reason. None may block.
        """
        self._manifest = manifest
        self._referee = RowReferee(manifest, read)
        self._referee_lock = threading.Lock()
        self._lock = threading.Lock()
        """Over the core, claims and counts: the decode thread, examinations and control's thread use them."""
        self._core = AuditCore(draws=random.SystemRandom(), n_expert=manifest.n_expert)
        self._on_verdict = on_verdict
        self._on_unaccountable = on_unaccountable
        self._exhibits = Exhibits(on_evidence)
        row_bytes = 2 * 4 * (manifest.n_embd + 1)  # a row, its answer, and what stands in the tables
        self._rows_a_request = max(1, (EXHIBIT_BYTES_MAX - dispatch.HEADER_BYTES) // row_bytes)
        self._claims: dict[NodeId, Claim] = {}
        self._rows_examined: Counter[NodeId] = Counter()
        self._rows_dropped = 0
        self._rows: WaitingRows[_Row | _Sealed] = WaitingRows(ROWS_WAITING_MAX)
        self.has_room = True
        """Whether to choose rows. Where more wait than can, one is chosen for each that was looked at: of a
        quick model no more could be looked at, and counting all costs more than looking at some.
        """
        self.n_rows_unseen = 0
        """Rows that were not even counted for that; the decode thread's."""
        self._idleness = _Idleness()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()

    # -- the decode thread -------------------------------------------------------------------------

    def note_rows(
        self,
        node_id: NodeId,
        layer: int,
        program: ExpertProgram,
        experts: Sequence[int],
        asked: Callable[[int], Asked],
        answers_address: int,
        widths: tuple[int, int],
        keep: Callable[[], Exchange | None],
    ) -> None:
        """A node has answered: `experts` says whose row each of its F32 answers is, or has a part in a sum.

        `asked(place)` tells of each of them, `widths` are those of a row and of an answer. What is to be
        looked at is copied; nothing is waited for. `keep()` gives the exchange that they are of.
        """
        with self._lock:
            places = self._core.choose(node_id, layer, experts)
            claim = self._claim_of(node_id)
        width_in, width_out = widths
        seen: set[int] = set()
        exchange = keep() if places and len(self._rows) < EXCHANGES_WAITING_MAX else None
        for place in places:
            address, index, pairs = asked(place)
            if index in seen:
                continue  # a sum in which two rows were chosen
            seen.add(index)
            x = _copied(address, width_in)
            answer = _copied(answers_address + 4 * width_out * index, width_out)
            row = _Row(node_id, claim, layer, program, experts[place], pairs, x, answer, exchange, place)
            self._look_later(row)

    def countdowns(self, node_id: NodeId, layer: int) -> Countdowns | None:
        """By these the decode thread may count rows itself, until one is to be looked at, or `note_rows` is
        asked for: then they may be others.
        """
        with self._lock:
            return self._core.countdowns(node_id, layer)

    # -- a new connection --------------------------------------------------------------------------

    def log_of(self, node_id: NodeId, engine_key: bytes, binding: bytes, claim_digest: bytes) -> ReplyLog:
        """A log for a new connection to this node's engine, whose key (DER) its node binds so."""
        return ReplyLog(
            node_id,
            engine_key,
            binding,
            self._manifest.digest(),
            claim_digest,
            on_left=self._take_end,
        )

    def _take_segment(self, log: ReplyLog, segment: Segment) -> None:
        self._look_later(_Sealed(log, segment))

    def _take_end(self, log: ReplyLog) -> None:
        try:
            self._exhibits.take_end(log)
        except RemoteProtocolError as error:
            self._on_unaccountable(log.node_id, error.code, str(error))

    def take_claim(self, node_id: NodeId, claim: Claim) -> None:
        """What this node says of itself from now on."""
        with self._lock:
            self._claims.pop(node_id, None)
            self._claims[node_id] = claim
            while len(self._claims) > NODES_MAX:
                forgotten = next(iter(self._claims))
                del self._claims[forgotten], self._rows_examined[forgotten]
            self._core.command(NoteClaim(node_id, claim.can_be_held_to, claim.certificate), _NEVER)

    def examine(
        self,
        holder: RemoteHolder,
        shard: ShardSet,
        programs: dict[int, ExpertProgram],
        authority: tuple[int, int],
    ) -> Verdict | None:
        """Ask rows of a connection that nobody uses yet, and say what there is against its node by then.

        `programs` are the expert programs by layer, as far as they are known. Raises `OSError` and
        `RemoteProtocolError` as the connection does.
        """
        known = self.verdict_of(holder.node_id)
        if known is not None and known.word == "quarantined":
            return known
        draws = np.random.default_rng()
        pairs = [
            (layer, expert)
            for layer, first, end in shard.ranges
            if layer in programs
            for expert in range(first, end)
        ]
        pairs = [pairs[index] for index in draws.permutation(len(pairs))[:EXAMINED_ROWS_MAX].tolist()]
        examination = _Examination(holder, self._manifest, authority)
        try:
            self._ask_and_judge(examination, holder, pairs, programs, draws)
            if holder.log is not None:
                self._exhibits.take_segment(holder.log, examination.seal(holder.log))
        finally:
            if holder.log is not None:
                holder.log.on_sealed = self._take_segment  # also of one that is sealed as it is closed
        return self.verdict_of(holder.node_id)

    def _ask_and_judge(
        self,
        examination: _Examination,
        holder: RemoteHolder,
        pairs: list[tuple[int, int]],
        programs: dict[int, ExpertProgram],
        draws: np.random.Generator,
    ) -> None:
        """The rounds of an examination; what there is no time for goes behind it."""
        known = self.verdict_of(holder.node_id)
        ends_at, latest = time.thread_time() + EXAMINATION_S, time.monotonic() + EXAMINATION_WAIT_S
        n_later = 0
        for _ in range(_ROUNDS_MAX):
            again: list[tuple[int, int]] = []
            for layer, experts in _requests_of(pairs, self._rows_a_request):
                x, answers, exchange = examination.ask(layer, programs[layer], experts, draws)
                with self._lock:
                    self._rows_examined[holder.node_id] += len(experts)
                    claim = self._claim_of(holder.node_id)
                is_wrong = is_later = False
                for expert in sorted(set(experts.tolist())):
                    (mine,) = np.nonzero(experts == expert)
                    if time.thread_time() > ends_at or time.monotonic() > latest:
                        for place in mine.tolist():
                            of = (holder.node_id, claim, layer, programs[layer], expert)
                            self._look_later(_Row(*of, (), x[place], answers[place], exchange, place))
                        is_later = True
                        n_later += len(mine)
                        continue
                    what = (holder.node_id, layer, programs[layer], expert, x[mine], answers[mine])
                    found = self._judge(holder.node_id, claim, partial(self._referee.judge, *what))
                    is_wrong |= self._note_wrong(found, exchange, mine.tolist())
                    if any(each.outcome == "foreign" for each in found):
                        again.append((layer, expert))
                if exchange is not None and not is_wrong and not is_later:
                    exchange.log.release(exchange)
            pairs = [pair for pair in again[: EXAMINED_ROWS_MAX // _ROWS_AGAIN] for _ in range(_ROWS_AGAIN)]
            verdict = self.verdict_of(holder.node_id)
            if not pairs or (verdict is not None and verdict != known):
                break
        if n_later:
            log.info("examination_goes_on_behind", node=holder.node_id, rows=n_later)

    def _look_later(self, row: _Row | _Sealed) -> None:
        if self._rows.put(row.node_id, row):
            self.has_room = False
            with self._lock:
                self._rows_dropped += 1

    # -- what is going on --------------------------------------------------------------------------

    def verdict_of(self, node_id: NodeId) -> Verdict | None:
        """What was found of this node; None where nothing was."""
        with self._lock:
            standing = self._core.standing_of(node_id)
        return standing.verdict if standing is not None else None

    def rows_examined(self) -> dict[NodeId, int]:
        """Rows that were asked of each node in examinations alone."""
        with self._lock:
            return dict(self._rows_examined)

    def statistics(self) -> dict[str, Any]:
        """What the audit has seen, for status: of every node that it knows."""
        with self._lock:
            standings = self._core.standings()
        return {
            "rows_waiting": len(self._rows),
            "rows_dropped": self._n_dropped(),
            "nodes": [
                {
                    "node": each.node_id,
                    "rows": each.n_rows,
                    "flipped": each.n_flipped,
                    "foreign": each.n_foreign,
                    "evidence": round(each.evidence, 6),
                    "drift": round(each.drift, 3),
                    "verdict": each.verdict.word if each.verdict is not None else None,
                }
                for each in standings
            ],
        }

    def _n_dropped(self) -> int:
        """Rows that were chosen and forgotten, or would have been chosen."""
        with self._lock:
            return self._rows_dropped + self.n_rows_unseen * CHOSEN_OF_WINDOW // WINDOW

    def close(self) -> None:
        """End the thread; rows that wait are not looked at any more."""
        self._is_closing.set()
        self._rows.close()
        self._thread.join(5.0)
        with self._referee_lock:
            self._referee.close()

    # -- the audit's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        pace = _Pace()
        while not self._is_closing.is_set():
            each = self._rows.get()
            if each is None:
                return
            self.has_room = True
            pace.note_looked(self._n_dropped())
            began = time.thread_time()
            try:
                self._look_at(each)
            except RemoteProtocolError as error:
                self._on_unaccountable(each.node_id, error.code, str(error))
            except Exception:
                log.exception("audit_failed")  # the thread goes on: others' rows are to be looked at
            busy = time.thread_time() - began
            self._rest(busy * (1 / self._share_for(each.node_id) - 1))

    def _rest(self, seconds: float) -> None:
        """Until so much time has gone by, and the other threads have had as much of a processor.

        Of time alone a machine with more to do than it can would give this thread a larger part than them.
        Threads that wait for others' answers, or have nothing to do, are not waited for.
        """
        used_before = _used_by_others()
        self._idleness.note(time.monotonic(), used_before)
        wait = seconds
        while not self._is_closing.wait(wait):
            used = _used_by_others()
            self._idleness.note(time.monotonic(), used)
            if used - used_before >= seconds or self._idleness.is_idle:
                return
            wait = max(seconds - (used - used_before), _LOOK_AGAIN_S)

    def _share_for(self, node_id: NodeId) -> float:
        """How busy this thread may be while it looks at rows of this node."""
        with self._lock:
            standing = self._core.standing_of(node_id)
        if standing is None or standing.verdict is not None:
            return BUSY_SHARE
        is_new = standing.n_rows < FIRST_ROWS or standing.evidence > 1
        return BUSY_SHARE_AT_FIRST if is_new else BUSY_SHARE

    def _look_at(self, each: _Row | _Sealed) -> None:
        """Raises `RemoteProtocolError` where its node does not stand for what it answered."""
        if isinstance(each, _Sealed):
            self._exhibits.take_segment(each.log, each.segment)
            return
        if each.exchange is not None:
            each.exchange.check()
        row, what = each, (each.node_id, each.layer, each.program, each.expert)
        if row.pairs:
            judge_sum = self._referee.judge_sum
            self._judge(
                row.node_id,
                row.claim,
                lambda form: (judge_sum(*what, row.pairs, row.x, row.answer, form),),
            )
            return
        judge = partial(self._referee.judge, *what, row.x[None], row.answer[None])
        found = self._judge(row.node_id, row.claim, judge)
        self._note_wrong(found, row.exchange, [row.pair])

    def _judge(
        self, node_id: NodeId, claim: Claim, judge: Callable[[str | None], tuple[Finding, ...]]
    ) -> tuple[Finding, ...]:
        """Have the referee judge answers in the form that their node claimed, and take in what it finds:
        nothing where the node is here as another by then, which is examined itself.
        """
        with self._referee_lock:
            if self._is_closing.is_set():
                return ()
            found = judge(claim.form)
        with self._lock:
            if self._claim_of(node_id) != claim:
                return ()
            self._core.command(NoteFindings(found), _NEVER)
            verdicts = self._core.drain()
        for verdict in verdicts:
            self._on_verdict(verdict)
            self._exhibits.accuse(node_id)
        return found

    def _note_wrong(self, found: Sequence[Finding], exchange: Exchange | None, pairs: Sequence[int]) -> bool:
        """Put what nothing explains among the exhibits; whether there was anything. Rows as they come from
        short sums are nothing wrong of a node that claims no others.

        Raises `RemoteProtocolError` as `Exhibits.note` does.
        """
        wrong = [
            (pair, finding.request_digest)
            for finding, pair in zip(found, pairs, strict=False)
            if finding.outcome == "foreign" and self._is_held_against(finding)
        ]
        if exchange is not None:
            for pair, digest in wrong:
                self._exhibits.note(Wrong(exchange, pair, digest))
        return bool(wrong)

    def _claim_of(self, node_id: NodeId) -> Claim:
        """Under the lock."""
        return self._claims.get(node_id, Claim())

    def _is_held_against(self, finding: Finding) -> bool:
        with self._lock:
            is_held_to_f32 = self._claim_of(finding.node_id).can_be_held_to
        return is_held_to_f32 or is_wrong_for_short_sums(finding)


class _Idleness:
    """Whether the other threads use next to nothing of a processor, over a second and more: for moments they
    do so too where others have the processors.
    """

    def __init__(self) -> None:
        self.is_idle = False
        self._began: tuple[float, float] | None = None

    def note(self, now: float, used: float) -> None:
        """By now they have used so many seconds."""
        if self._began is None:
            self._began = now, used
        elapsed = now - self._began[0]
        if elapsed >= IDLE_AFTER_S:
            self.is_idle = used - self._began[1] < _IDLE_SHARE * elapsed
            self._began = now, used


class _Pace:
    """Says now and then that more rows are dropped than are looked at: what that hides is found later."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._n_looked = 0
        self._n_dropped_before = 0

    def note_looked(self, n_dropped: int) -> None:
        """One more row is looked at; so many were dropped until now."""
        self._n_looked += 1
        if time.monotonic() < self._began + PACE_INTERVAL_S:
            return
        n_new = n_dropped - self._n_dropped_before
        if n_new > self._n_looked:
            log.info("audit_falls_behind", rows_looked_at=self._n_looked, rows_dropped=n_new)
        self._began, self._n_looked, self._n_dropped_before = time.monotonic(), 0, n_dropped


def _used_by_others() -> float:
    """Seconds of processors that the other threads of this process have used."""
    return time.process_time() - time.thread_time()


def _requests_of(pairs: Sequence[tuple[int, int]], n_max: int) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    """The experts of each layer in two requests at least, for who gives an answer twice is honest in its
    first; and no more rows in one than evidence may have.
    """
    for layer in sorted({layer for layer, _ in pairs}):
        experts = np.array([expert for of, expert in pairs if of == layer], np.int32)
        size = min(n_max, (len(experts) + 1) // 2)
        for start in range(0, len(experts), size):
            yield layer, experts[start : start + size]


class _Examination:
    """Requests over a connection that the dispatcher does not have yet, one after the other."""

    def __init__(self, holder: RemoteHolder, manifest: ModelManifest, authority: tuple[int, int]) -> None:
        self._holder = holder
        self._manifest = manifest
        self._epoch, self._term = authority
        self._programs: dict[ExpertProgram, int] = {}
        self._request_id = 0

    def ask(
        self,
        layer: int,
        program: ExpertProgram,
        experts: npt.NDArray[np.int32],
        draws: np.random.Generator,
    ) -> tuple[Float32Array, Float32Array, Exchange | None]:
        """A made-up row through each of these experts, the answers, and both as they travelled."""
        shapes = {each.suffix: each.shape for each in self._manifest.expert_tensors(layer)}
        widths = program.row_widths(shapes.get)
        index = self._programs.get(program)
        if index is None:
            # From behind: the dispatcher, which gets the connection afterwards, numbers them from 0.
            index = self._programs[program] = dispatch.PROGRAMS_MAX - 1 - len(self._programs)
            told = dispatch.pack_plain(FrameKind.PROGRAM, self._next_id(), program.encode(), program=index)
            if self._holder.log is not None:
                self._holder.log.note_program(index, program.encode())
            self._exchange(memoryview(told), NO_PAIRS, 0, 0)
        n = len(experts)
        sizes = np.exp(draws.normal(0.0, 0.5, (n, 1)))
        x = (draws.standard_normal((n, widths[0])) * sizes).astype(np.float32)
        frame = bytearray(dispatch.HEADER_BYTES)
        dispatch.pack_dispatch_into(
            frame,
            request_id=self._next_id(),
            epoch=self._epoch,
            term=self._term,
            layer=layer,
            program=index,
            n_rows=n,
            n_pairs=n,
            n_embd_in=widths[0],
        )
        frame += np.arange(n, dtype=np.int32).tobytes() + experts.tobytes() + x.tobytes()
        indices = IndexBuffer(np.arange(n, dtype=np.int32))
        request = self._exchange(memoryview(frame), indices, n, widths[-1])
        answers = _copied(self._holder.payload_address, n * widths[-1])
        return x, answers.reshape(n, widths[-1]), self._holder.keep_exchange(request)

    def seal(self, log: ReplyLog) -> Segment:
        """Have the worker stand for what it answered."""
        now_ns = time.monotonic_ns()
        self._holder.ask_for_seal(self._next_id(), log, now_ns)
        self._wait(self._holder.deadline_for(0, now_ns))
        assert log.last_segment is not None
        return log.last_segment

    def _next_id(self) -> int:
        self._request_id += 1
        return self._request_id

    def _exchange(self, frame: memoryview, indices: IndexBuffer, n_pairs: int, width: int) -> Request:
        holder, now_ns = self._holder, time.monotonic_ns()
        deadline_ns = holder.deadline_for(n_pairs, now_ns)
        request = Request(self._request_id, frame, indices, 0, n_pairs, n_pairs, width, now_ns, deadline_ns)
        holder.submit(request)
        self._wait(deadline_ns)
        return request

    def _wait(self, deadline_ns: int) -> None:
        """Until what was submitted last is answered."""
        self._holder.send_pending()
        while self._holder.receive_reply() is None:
            if time.monotonic_ns() > deadline_ns:
                raise RemoteProtocolError("no reply within its deadline", "late")
            self._holder.send_pending()


def _copied(address: int, n_value: int) -> Float32Array:
    return np.frombuffer(ctypes.string_at(address, 4 * n_value), np.float32)
