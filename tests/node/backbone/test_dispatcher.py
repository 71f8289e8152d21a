"""The dispatcher against workers that fail in every way we could think of.

The rule under test is always the same: the text is right, or the call fails cleanly and in time. Connections
are real TLS over socket pairs; the deadlines of workers that are meant to be late are short.
"""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from kvasir_node.backbone import dispatcher as dispatcher_module
from kvasir_node.backbone import holder as holder_module
from kvasir_node.backbone.dispatcher import Dispatcher, LocalHolder
from kvasir_node.backbone.holder import IndexBuffer, RemoteHolder
from kvasir_node.backbone.hook import DecodeAborted
from kvasir_node.backbone.reply_log import Exchange
from kvasir_node.backbone.row_audit import Asked
from kvasir_node.native_library import load
from kvasir_proto import dispatch
from kvasir_proto.audit.sampling import Sampling
from kvasir_proto.dispatch import DispatchHeader, FrameKind, PlainHeader, ReplyCode
from kvasir_proto.errors import EngineFailed, LocalProtocolError, NoHolderLeft
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.manifest import ShardSet
from tests.node.backbone.scripted_worker import PROMPT_NS, Deed, ScriptedWorker
from tests.node.toy_experts import (
    EVERYTHING,
    LAYERS,
    N_EXPERT,
    NOTHING,
    OTHER_PROGRAM,
    PROGRAM,
    ToyCall,
    ToyKernel,
    add_up,
    compute_rows,
    shard_of,
    toy_manifest,
)

IDS = [[0, 3], [4, 1], [5, 2], [3, 0]]
"""Four tokens that need all experts; experts 0 to 2 and 3 to 5 have four pairs each."""

LOW, HIGH = shard_of(0, 1, 2), shard_of(3, 4, 5)
IN_TIME_S = 5.0
"""Far more than any call may take here, far less than the deadlines that are not meant to matter."""


class Swarm:
    """A dispatcher, its workers, and whom it lost."""

    def __init__(self, width: int = 4, audit: object = None) -> None:
        self.width = width
        self.lost: list[tuple[NodeId, str, str]] = []
        self.timed: list[tuple[NodeId, int]] = []
        self.workers: list[ScriptedWorker] = []
        self.programs = [PROGRAM]
        self.dispatcher = Dispatcher(
            load(),
            toy_manifest(width),
            self.programs,
            on_holder_lost=lambda *all_of: self.lost.append(all_of),
            on_answers_timed=lambda *both: self.timed.append(both),
            audit=cast("Any", audit),
        )
        self.dispatcher.set_authority(0, 1)

    def add(
        self,
        shard: ShardSet = EVERYTHING,
        primary: ShardSet = NOTHING,
        *,
        floor_ns: int | None = None,
        **behaviour: Any,
    ) -> ScriptedWorker:
        worker = ScriptedWorker(width=self.width, **behaviour)
        self.workers.append(worker)
        self.dispatcher.add_holder(worker.holder(floor_ns), shard, primary)
        return worker

    def run(self, ids: list[list[int]] = IDS, layer: int = LAYERS[0]) -> ToyCall:
        """One layer call, which must give the right rows."""
        call = ToyCall(ids, layer, self.width)
        started = time.monotonic()
        self.dispatcher(call)
        assert time.monotonic() - started < IN_TIME_S
        assert call.is_right
        return call

    @property
    def codes(self) -> list[str]:
        return [code for _, code, _ in self.lost]

    def close(self) -> None:
        self.dispatcher.close()
        for worker in self.workers:
            worker.end()


@pytest.fixture
def swarm() -> Iterator[Swarm]:
    swarm = Swarm()
    yield swarm
    swarm.close()


# ---- The audit sees what was used ----


class NotedRows:
    """An audit that looks at everything."""

    has_room = True
    n_rows_unseen = 0

    def __init__(self) -> None:
        self.seen: list[tuple[NodeId, int, int, list[float], list[float]]] = []
        self.exchanges: list[Exchange | None] = []
        self.of_sums: list[tuple[tuple[int, float], ...]] = []

    def countdowns(self, node_id: NodeId, layer: int) -> None:
        """Nothing may go by unseen."""

    def note_rows(
        self,
        node_id: NodeId,
        layer: int,
        program: object,
        experts: list[int],
        asked: Callable[[int], Asked],
        answers_address: int,
        widths: tuple[int, int],
        keep: Callable[[], Exchange | None],
    ) -> None:
        self.exchanges.append(keep())
        width_in, width_out = widths
        for place, expert in enumerate(experts):
            x_address, index, pairs = asked(place)
            x = (ctypes.c_float * width_in).from_address(x_address)
            answer = (ctypes.c_float * width_out).from_address(answers_address + 4 * width_out * index)
            self.seen.append((node_id, layer, expert, list(x), list(answer)))
            self.of_sums.append(pairs)


def test_the_audit_sees_every_row_that_a_worker_gave_and_what_was_asked() -> None:
    noted = NotedRows()
    swarm = Swarm(audit=noted)
    swarm.add(EVERYTHING, LOW, default=Deed.NAN)
    good = swarm.add(EVERYTHING, HIGH)
    call = swarm.run()
    asked = {(expert, tuple(call.x[token].tolist())) for token, row in enumerate(IDS) for expert in row}
    assert {(expert, tuple(x)) for _, _, expert, x, _ in noted.seen} == asked
    assert len(noted.seen) == sum(map(len, IDS))
    assert {layer for _, layer, _, _, _ in noted.seen} == {LAYERS[0]}
    assert {node for node, *_ in noted.seen} == {good.node_id}, "rows that were not used are not looked at"
    answers = sorted(answer for *_, answer in noted.seen)
    assert answers == sorted(call.out.reshape(-1, 4).tolist())
    assert set(noted.of_sums) == {()}
    swarm.close()


def test_the_audit_is_told_what_every_sum_is_of() -> None:
    """Whoever holds which part: the sum of what it is told, computed again, is what the holder said."""
    noted = NotedRows()
    swarm = Swarm(audit=noted)
    swarm.add(LOW, LOW)
    swarm.add(HIGH, HIGH)
    call = sums_call([[0, 3, 1], [4, 5, 3], [2, 1, 0], [5, 0, 2]], weights=[[0.5, 2.0, 4.0]] * 4)
    swarm.dispatcher(call)
    assert call.is_right
    assert sorted(expert for _, _, expert, _, _ in noted.seen) == sorted(call.ids.reshape(-1).tolist())
    for (_, layer, expert, x, answer), pairs in zip(noted.seen, noted.of_sums, strict=True):
        experts = np.array([each for each, _ in pairs], np.int32)
        assert expert in experts
        weights = np.array([weight for _, weight in pairs], np.float32)
        of_row = np.zeros(len(pairs), np.int32)
        rows = compute_rows(layer, np.array([x], np.float32), of_row, experts)
        assert add_up(rows, of_row, weights).tolist() == [answer]
    swarm.close()


class ChosenRows(NotedRows):
    """An audit whose core chooses; what goes by unseen is counted for it."""

    def __init__(self) -> None:
        super().__init__()
        self.sampling = Sampling(Random(3), toy_manifest(4).n_expert)
        self.chosen: list[int] = []
        self.n_asked = 0

    def countdowns(self, node_id: NodeId, layer: int) -> Any:
        return self.sampling.countdowns(node_id, layer)

    def note_rows(self, node_id: NodeId, layer: int, program: object, experts: list[int], *rest: Any) -> None:
        self.n_asked += 1
        self.chosen += [experts[each] for each in self.sampling.choose(node_id, layer, experts)]


@pytest.mark.parametrize("are_summed", [False, True])
def test_the_audit_is_asked_only_where_it_looks_at_something(are_summed: bool) -> None:
    """And counts the same, row by row, as one that is asked each time."""
    chosen, each_time = ChosenRows(), Sampling(Random(3), toy_manifest(4).n_expert)
    swarm = Swarm(audit=chosen)
    worker = swarm.add()
    expected: list[int] = []
    for _ in range(300):
        call = sums_call() if are_summed else ToyCall(IDS)
        swarm.dispatcher(call)
        experts = [expert for row in IDS for expert in row]
        expected += [experts[each] for each in each_time.choose(worker.node_id, LAYERS[0], experts)]
    assert chosen.chosen == expected
    assert chosen.n_asked < 200
    chosen.sampling.scrutinise(worker.node_id, LAYERS[0], 5)
    each_time.scrutinise(worker.node_id, LAYERS[0], 5)
    for _ in range(8):
        swarm.run()
        expected += [experts[each] for each in each_time.choose(worker.node_id, LAYERS[0], experts)]
    assert chosen.chosen == expected
    before = chosen.n_asked
    chosen.has_room = False
    for _ in range(50):
        swarm.run()
    assert chosen.n_asked == before, "what nobody would look at is not counted"
    assert chosen.n_rows_unseen == 50 * 8
    chosen.has_room = True
    chosen.sampling.forget(worker.node_id)
    swarm.run()
    assert chosen.n_asked == before + 1, "it begins anew"
    swarm.close()


# ---- One worker misbehaves ----

CODES = {
    Deed.SILENCE: {"late"},
    Deed.STOP: {"late"},
    Deed.CLOSE: {"closed"},
    Deed.CLOSE_MID_REPLY: {"closed"},
    Deed.HALF_FRAME: {"late"},
    Deed.HALF_HEADER: {"late"},
    Deed.GARBAGE: {"malformed"},
    Deed.PLAINTEXT: {"closed"},
    Deed.NAN: {"non_finite"},
    Deed.INFINITY: {"non_finite"},
    Deed.SHORT: {"shape_invalid"},
    Deed.LONG: {"shape_invalid"},
    Deed.HUGE: {"shape_invalid"},
    Deed.WRONG_COUNT: {"shape_invalid"},
    Deed.FOREIGN_ID: {"unexpected_reply"},
    Deed.OLD_ID: {"unexpected_reply"},
    Deed.NOT_A_REPLY: {"malformed"},
    Deed.BAD_CODE: {"malformed"},
    Deed.LONG_REFUSAL: {"oversize"},
    Deed.REFUSE: {"refused_foreign_expert"},
}
"""What a worker is given up for. An end of the connection in the middle of a reply is still an end."""


@pytest.mark.parametrize("deed", CODES, ids=lambda deed: deed.name.lower())
def test_rows_of_a_bad_worker_come_from_another(swarm: Swarm, deed: Deed) -> None:
    bad = swarm.add(EVERYTHING, LOW, default=deed)
    good = swarm.add(EVERYTHING, HIGH)
    swarm.run()
    statistics = swarm.dispatcher.statistics()
    assert [node for node, _, _ in swarm.lost] == [bad.node_id]
    assert set(swarm.codes) <= CODES[deed]
    assert (statistics.rows_retried, statistics.holders_lost) == (4, 1)
    assert statistics.rows_dispatched == 8
    assert statistics.rows_by_holder == {bad.node_id: 4, good.node_id: 8}
    # It is not asked again, and the others go on.
    swarm.run(layer=LAYERS[1])
    assert len(bad.dispatches) <= 1
    assert swarm.dispatcher.statistics().rows_retried == 4


NO_EVIDENCE = (Deed.NAN, Deed.INFINITY)
"""What the model may be to blame for as well, while nobody else has computed the same."""


@pytest.mark.parametrize(
    "deed", [each for each in CODES if each not in NO_EVIDENCE], ids=lambda each: each.name.lower()
)
def test_without_another_holder_the_call_fails_in_time(swarm: Swarm, deed: Deed) -> None:
    swarm.add(LOW, LOW, default=deed)
    swarm.add(HIGH, HIGH)
    call = ToyCall(IDS)
    started = time.monotonic()
    with pytest.raises(NoHolderLeft, match=r"layer 1, experts 0, 1, 2$") as raised:
        swarm.dispatcher(call)
    assert raised.value.n_tokens == len(IDS)
    assert time.monotonic() - started < IN_TIME_S
    assert set(swarm.codes) <= CODES[deed]
    swarm.dispatcher.settle()
    # Nothing of the failed call is left: with a holder for those experts the next one works.
    swarm.add(LOW, LOW)
    for layer in LAYERS:
        swarm.run(layer=layer)
    assert len(swarm.lost) == 1


@pytest.mark.parametrize("code", [code for code in ReplyCode if code is not ReplyCode.OK])
def test_every_refusal_is_retried_and_reported_by_its_name(swarm: Swarm, code: ReplyCode) -> None:
    bad = swarm.add(EVERYTHING, EVERYTHING, default=Deed.REFUSE, refusal=code)
    swarm.add()
    swarm.run()
    assert swarm.lost == [(bad.node_id, f"refused_{code.name.lower()}", "not by me")]


def test_a_worker_that_refuses_a_program_is_given_up(swarm: Swarm) -> None:
    bad = swarm.add(EVERYTHING, EVERYTHING, refuses_programs=True)
    swarm.add()
    swarm.run()
    assert swarm.lost == [(bad.node_id, "refused_program_unfit", "no")]
    assert swarm.dispatcher.statistics().rows_retried == 8


def test_an_answer_given_twice_costs_the_worker_its_place_and_no_row(swarm: Swarm) -> None:
    bad = swarm.add(EVERYTHING, LOW, default=Deed.TWICE)
    swarm.add(EVERYTHING, HIGH)
    for _ in range(3):
        swarm.run()
    assert [(node, code) for node, code, _ in swarm.lost] == [(bad.node_id, "unexpected_reply")]


def test_a_reply_in_many_pieces_is_one_reply(swarm: Swarm) -> None:
    swarm.add(default=Deed.TRICKLE)
    swarm.run()
    swarm.run()
    assert swarm.lost == []


def test_a_worker_found_dead_at_sending_is_replaced(swarm: Swarm) -> None:
    dead = swarm.add(EVERYTHING, LOW, closes_at_once=True)
    swarm.add(EVERYTHING, HIGH)
    swarm.run()
    assert [(node, code) for node, code, _ in swarm.lost] == [(dead.node_id, "closed")]
    assert swarm.dispatcher.statistics().rows_retried == 4


def test_a_worker_that_died_while_nothing_was_asked_costs_nothing(swarm: Swarm) -> None:
    idle = swarm.add(EVERYTHING, NOTHING, closes_at_once=True)
    busy = swarm.add(EVERYTHING, EVERYTHING, default=Deed.HOLD)
    checks = 0

    def release_after_a_wait() -> None:
        nonlocal checks
        checks += 1
        if checks > 2:  # the first reply is that to the program
            busy.release.set()

    with swarm.dispatcher.watched_by(release_after_a_wait):
        swarm.run()
    assert [node for node, _, _ in swarm.lost] == [idle.node_id]
    assert swarm.dispatcher.statistics().rows_retried == 0


def test_workers_fail_one_after_another_until_one_is_right(swarm: Swarm) -> None:
    for deed in (Deed.NAN, Deed.CLOSE, Deed.SHORT, Deed.SILENCE, Deed.REFUSE):
        swarm.add(EVERYTHING, EVERYTHING, default=deed)
    swarm.add(EVERYTHING, EVERYTHING, closes_at_once=True)
    good = swarm.add(EVERYTHING, NOTHING)
    swarm.run()
    assert len(swarm.lost) == 6
    assert [len(each.experts) for each in good.dispatches] == [8]
    assert swarm.dispatcher.statistics().rows_retried == 6 * 8


def test_an_experts_rows_stay_together_and_in_order_also_on_retry(swarm: Swarm) -> None:
    """K-quants give the same bits only then (kernels/ggml_cpu.py)."""
    draws = Random(4)
    shards = [shard_of(0, 1, 2, 3), shard_of(2, 3, 4, 5), shard_of(4, 5, 0, 1)]
    primaries = [shard_of(0, 1), shard_of(2, 3), shard_of(4, 5)]
    first = swarm.add(shards[0], primaries[0], default=Deed.NAN)
    second = swarm.add(shards[1], primaries[1], script={0: Deed.ANSWER, 1: Deed.CLOSE})
    swarm.add(shards[2], primaries[2])
    swarm.add(EVERYTHING, NOTHING)
    ids = [draws.sample(range(N_EXPERT), 3) for _ in range(40)]
    swarm.run(ids)
    assert {node for node, _, _ in swarm.lost} <= {first.node_id, second.node_id}
    assert first.node_id in {node for node, _, _ in swarm.lost}
    for expert in range(N_EXPERT):
        wanted = [token for token, slots in enumerate(ids) if expert in slots]
        seen = [
            each.x[each.rows[each.experts == expert], 0].astype(int).tolist()
            for worker in swarm.workers
            for each in worker.dispatches
            if (each.experts == expert).any()
        ]
        assert seen
        assert all(tokens == wanted for tokens in seen)


def test_any_mixture_of_failures_gives_right_rows_or_a_clean_failure() -> None:
    """Each round some of three holders misbehave; what is lost is replaced, as control does."""
    draws = Random(11)
    # Not the one that lies with numbers: right in form and wrong is what audits are for.
    deeds = [deed for deed in Deed if deed not in (Deed.HOLD, Deed.EARLY)]
    swarm = Swarm()
    rights = failures = 0
    try:
        for _ in range(40):
            held = {place.node_id for place in swarm.dispatcher._places if place is not None}
            for number in range(3):
                node_id = node_id_of(bytes([number]) * 32)
                if node_id not in held or draws.random() < 0.2:
                    script = {each: draws.choice(deeds) for each in range(4) if draws.random() < 0.6}
                    primary = ShardSet.from_pairs((layer, 2 * number) for layer in LAYERS)
                    swarm.add(
                        EVERYTHING, primary, node_id=node_id, script=script, refusal=ReplyCode.STALE_TERM
                    )
            ids = [draws.sample(range(N_EXPERT), 2) for _ in range(draws.randint(1, 5))]
            call = ToyCall(ids, draws.choice(LAYERS))
            try:
                swarm.dispatcher(call)
            except (NoHolderLeft, EngineFailed):
                failures += 1
                swarm.dispatcher.settle()
            else:
                rights += 1
                assert call.is_right
    finally:
        swarm.close()
    assert rights > 20
    assert failures > 0
    assert len(swarm.lost) > 20


# ---- Waiting, aborting, settling ----


def test_a_stopped_worker_does_not_hold_up_what_is_sent_to_others() -> None:
    swarm = Swarm(width=1024)
    try:
        stopped = swarm.add(EVERYTHING, LOW, default=Deed.STOP, floor_ns=300_000_000)
        good = swarm.add(EVERYTHING, HIGH)
        call = ToyCall([[0, 3]] * 400, width=1024)  # 1.6 MB each, more than the sockets take
        failure: list[BaseException] = []

        def run() -> None:
            try:
                swarm.dispatcher(call)
            except BaseException as error:
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        # The good worker has its whole request while the stopped one has not taken a byte of its payload.
        assert good.arrived.wait(10.0)
        assert not stopped.dispatches
        thread.join(10.0)
        assert not failure
        assert call.is_right
        assert [(node, code) for node, code, _ in swarm.lost] == [(stopped.node_id, "late")]
    finally:
        swarm.close()


def test_an_answer_to_half_a_request_is_not_taken() -> None:
    swarm = Swarm(width=1024)
    try:
        bad = swarm.add(EVERYTHING, LOW, default=Deed.EARLY, floor_ns=PROMPT_NS)
        swarm.add(EVERYTHING, HIGH)
        call = ToyCall([[0, 3]] * 400, width=1024)
        swarm.dispatcher(call)
        assert call.is_right
        assert [(node, code) for node, code, _ in swarm.lost] == [(bad.node_id, "unexpected_reply")]
    finally:
        swarm.close()


def _raised_by(run: Callable[[], None], worker: ScriptedWorker, act: Callable[[], None]) -> BaseException:
    """What `run` raises when `act` is done while it waits for that worker's reply."""
    failure: list[BaseException] = []

    def catch() -> None:
        try:
            run()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=catch)
    started = time.monotonic()
    thread.start()
    assert worker.arrived.wait(10.0)
    act()
    thread.join(10.0)
    assert not thread.is_alive()
    assert time.monotonic() - started < IN_TIME_S
    return failure[0]


def test_abort_ends_a_waiting_call_and_resume_allows_the_next(swarm: Swarm) -> None:
    worker = swarm.add(default=Deed.HOLD)
    call = ToyCall(IDS)
    failure = _raised_by(lambda: swarm.dispatcher(call), worker, swarm.dispatcher.abort)
    assert isinstance(failure, DecodeAborted)
    swarm.dispatcher.settle()  # does not wait for what was aborted
    with pytest.raises(DecodeAborted):
        swarm.dispatcher(ToyCall(IDS))
    swarm.dispatcher.resume()
    worker.release.set()
    swarm.run()
    assert swarm.lost == []


def test_a_watch_ends_a_waiting_call_and_not_the_one_after(swarm: Swarm) -> None:
    worker = swarm.add(default=Deed.HOLD)
    is_over = threading.Event()

    def check() -> None:
        if is_over.is_set():
            raise EngineFailed("the session is over")

    def run() -> None:
        with swarm.dispatcher.watched_by(check):
            swarm.dispatcher(ToyCall(IDS))

    assert str(_raised_by(run, worker, is_over.set)) == "the session is over"
    worker.release.set()
    swarm.run()
    assert swarm.lost == []


def test_settling_reads_what_a_failed_call_left_behind(swarm: Swarm) -> None:
    """A worker that cannot get rid of its reply would end the connection in the end."""
    swarm.add(LOW, LOW, default=Deed.CLOSE)
    slow = swarm.add(HIGH, HIGH, script={0: Deed.HOLD})
    with pytest.raises(NoHolderLeft):
        swarm.dispatcher(ToyCall(IDS))
    place = next(each for each in swarm.dispatcher._places if each is not None)
    assert isinstance(place.holder, RemoteHolder)
    assert place.holder.outstanding
    slow.release.set()
    swarm.dispatcher.settle()
    assert not place.holder.outstanding
    swarm.add(LOW, LOW)
    swarm.run()
    assert len(swarm.lost) == 1


def test_a_call_without_holders_says_for_which_tokens(swarm: Swarm) -> None:
    """Whoever decodes several sessions together goes on without those."""
    swarm.add(HIGH, HIGH)
    with pytest.raises(NoHolderLeft, match=r"layer 1, experts 0, 1$") as raised:
        swarm.dispatcher(ToyCall([[3, 4], [0, 3], [5, 4], [5, 1], [3, 5]]))
    assert raised.value.tokens == {1, 3}
    assert raised.value.n_tokens == 5


def test_a_holder_that_dies_says_for_which_tokens_nobody_is_left(swarm: Swarm) -> None:
    swarm.add(HIGH, HIGH)
    swarm.add(LOW, LOW, default=Deed.CLOSE)
    with pytest.raises(NoHolderLeft) as raised:
        swarm.dispatcher(ToyCall([[3, 4], [0, 3], [5, 4], [5, 1], [3, 5]]))
    assert raised.value.tokens == {1, 3}
    assert raised.value.n_tokens == 5


def test_settling_gives_up_who_is_late(swarm: Swarm) -> None:
    silent = swarm.add(HIGH, HIGH, default=Deed.SILENCE)
    swarm.add(LOW, LOW, closes_at_once=True)
    with pytest.raises(NoHolderLeft):
        swarm.dispatcher(ToyCall(IDS))
    swarm.dispatcher.settle()
    assert [(node, code) for node, code, _ in swarm.lost][1:] == [(silent.node_id, "late")]


def test_small_answers_are_timed_in_windows(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holder_module, "_WINDOW_NS", 0)
    monkeypatch.setattr(holder_module, "_WINDOW_ANSWERS_MIN", 4)
    holders = {swarm.add(LOW, LOW).node_id, swarm.add(HIGH, HIGH).node_id}
    for _ in range(4):
        swarm.run()
    means = dict(swarm.timed)
    assert means.keys() == holders
    assert all(0 < each < IN_TIME_S * 10**9 for each in means.values())
    monkeypatch.setattr(dispatcher_module, "SMALL_ANSWER_PAIRS", 1)
    swarm.timed.clear()
    for _ in range(4):
        swarm.run()
    assert swarm.timed == []


def test_coverage_is_awaited_with_patience_and_for_whoever_still_wants_it(swarm: Swarm) -> None:
    swarm.add(LOW, LOW, closes_at_once=True)
    swarm.add(HIGH, HIGH)
    with pytest.raises(NoHolderLeft):
        swarm.dispatcher(ToyCall(IDS))
    assert not swarm.dispatcher.await_coverage(patience_ns=1_000_000)

    def check() -> None:
        checks.append(1)
        if len(checks) == 3:
            swarm.add(LOW, LOW)

    checks: list[int] = []
    with swarm.dispatcher.watched_by(check):
        assert swarm.dispatcher.await_coverage(patience_ns=60 * 10**9)
    assert len(checks) == 3
    swarm.run()

    swarm.dispatcher.remove_holder(swarm.workers[-1].node_id, "gone")
    swarm.dispatcher.abort()
    with pytest.raises(DecodeAborted):
        swarm.dispatcher.await_coverage(patience_ns=60 * 10**9)


@pytest.fixture
def wide_swarm() -> Iterator[Swarm]:
    """One whose requests are larger than a socket's buffers."""
    swarm = Swarm(width=1 << 18)
    yield swarm
    swarm.close()


def test_requests_half_sent_when_a_call_fails_are_sent_all_the_same(wide_swarm: Swarm) -> None:
    """Otherwise their workers would be late with answers to what they never got."""
    good = wide_swarm.add(HIGH, HIGH, reads_when_released=True)
    wide_swarm.add(LOW, LOW, closes_at_once=True)
    with pytest.raises(NoHolderLeft):
        wide_swarm.dispatcher(ToyCall(IDS, width=wide_swarm.width))
    assert not good.dispatches
    good.release.set()
    wide_swarm.dispatcher.settle()
    assert len(good.dispatches) == 1
    assert len(wide_swarm.lost) == 1


def test_waiting_does_not_spin(wide_swarm: Swarm) -> None:
    """A connection that was once waited for to take bytes is not waited for in that way for ever."""
    swarm = wide_swarm
    silent = swarm.add(HIGH, HIGH, script={1: Deed.SILENCE}, reads_when_released=True, floor_ns=1_000_000_000)
    swarm.add(LOW, LOW, closes_at_once=True)
    with pytest.raises(NoHolderLeft):
        swarm.dispatcher(ToyCall(IDS, width=swarm.width))  # leaves a request half sent
    silent.release.set()
    swarm.dispatcher.settle()
    silent.release.clear()
    polls = 0
    poll = swarm.dispatcher._poll

    class CountingPoll:
        def __getattr__(self, name: str) -> Any:
            return getattr(poll, name)

        def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
            nonlocal polls
            polls += 1
            return poll.poll(timeout_ms)

    swarm.dispatcher._poll = CountingPoll()  # type: ignore[assignment]
    with pytest.raises(NoHolderLeft):
        swarm.dispatcher(ToyCall([[3, 4]], width=swarm.width))
    assert swarm.codes == ["closed", "late"]
    assert polls < 20


def test_a_worker_cannot_talk_itself_into_an_endless_deadline(swarm: Swarm) -> None:
    bragging = swarm.add(EVERYTHING, EVERYTHING, script={0: Deed.BRAG, 1: Deed.SILENCE})
    swarm.add()
    swarm.run()
    place = next(each for each in swarm.dispatcher._places if each and each.node_id == bragging.node_id)
    assert isinstance(place.holder, RemoteHolder)
    now_ns = time.monotonic_ns()
    assert place.holder.deadline_for(8, now_ns) - now_ns < IN_TIME_S * 1e9
    swarm.run()
    assert swarm.codes == ["late"]


# ---- Programs, authority, changes of holders ----


def test_a_program_goes_before_its_first_dispatch_and_again_to_a_new_connection(swarm: Swarm) -> None:
    first = swarm.add()
    swarm.programs.append(OTHER_PROGRAM)
    swarm.run()
    swarm.run()
    call = ToyCall(IDS)
    call.program_index = 1
    swarm.dispatcher(call)
    kinds = [
        (FrameKind.PROGRAM if isinstance(each, PlainHeader) else FrameKind.DISPATCH) for each in first.frames
    ]
    P, D = FrameKind.PROGRAM, FrameKind.DISPATCH
    assert kinds == [P, D, D, P, D]
    assert [each.program for each in first.frames if not isinstance(each, dispatch.ReplyHeader)] == [
        0,
        0,
        0,
        1,
        1,
    ]
    again = swarm.add(node_id=first.node_id)
    swarm.run()
    assert [type(each) for each in again.frames] == [PlainHeader, DispatchHeader]
    assert len(first.dispatches) == 3


def test_dispatches_name_the_authority_in_force(swarm: Swarm) -> None:
    worker = swarm.add()
    swarm.run()
    swarm.dispatcher.set_authority(2, 7)
    swarm.run()
    assert [(each.header.epoch, each.header.term) for each in worker.dispatches] == [(0, 1), (2, 7)]


def test_primaries_are_asked_first_and_a_primary_added_later_takes_over(swarm: Swarm) -> None:
    low, high = swarm.add(EVERYTHING, LOW), swarm.add(EVERYTHING, HIGH)
    swarm.run()
    assert {int(expert) for each in low.dispatches for expert in each.experts} == {0, 1, 2}
    assert {int(expert) for each in high.dispatches for expert in each.experts} == {3, 4, 5}
    newcomer = swarm.add(EVERYTHING, HIGH)
    swarm.dispatcher.remove_holder(high.node_id, "moved")
    swarm.run()
    assert len(high.dispatches) == 1
    assert {int(expert) for each in newcomer.dispatches for expert in each.experts} == {3, 4, 5}


def test_only_holders_that_are_needed_are_asked(swarm: Swarm) -> None:
    low, high = swarm.add(EVERYTHING, LOW), swarm.add(EVERYTHING, HIGH)
    swarm.run([[0, 1], [2, 0]])
    assert (len(low.dispatches), len(high.dispatches)) == (1, 0)
    assert high.frames == []


def test_rows_travel_once(swarm: Swarm) -> None:
    worker = swarm.add()
    swarm.run([[0, 1], [2, 3], [4, 5]])
    assert (worker.dispatches[0].header.n_rows, worker.dispatches[0].header.n_pairs) == (3, 6)


def test_changes_take_effect_in_the_order_they_were_made(swarm: Swarm) -> None:
    first = swarm.add()
    swarm.dispatcher.remove_holder(first.node_id, "gone")
    assert len(swarm.dispatcher.missing_experts()) == len(LAYERS)
    with pytest.raises(NoHolderLeft):
        swarm.dispatcher(ToyCall(IDS))
    again = swarm.add(node_id=first.node_id)
    swarm.dispatcher.remove_holder(first.node_id, "gone")
    last = swarm.add(node_id=first.node_id)
    assert swarm.dispatcher.missing_experts() == {}
    swarm.run()
    assert (first.frames, again.frames) == ([], [])
    assert len(last.dispatches) == 1
    assert swarm.lost == []


def test_a_superseded_holder_is_closed_at_once(swarm: Swarm) -> None:
    first = swarm.add()
    swarm.add(node_id=first.node_id)
    assert first.backbone_end.fileno() == -1


def test_a_row_that_is_not_finite_on_two_nodes_is_nobodys_fault(swarm: Swarm) -> None:
    """An expert that overflows would otherwise cost every holder that it has, one after another."""
    workers = [swarm.add(EVERYTHING, script={0: Deed.NAN}) for _ in range(3)]
    with pytest.raises(EngineFailed, match=r"expert 0 of layer 1 .* on more than one node"):
        swarm.dispatcher(ToyCall(IDS))
    assert swarm.lost == []
    swarm.dispatcher.settle()
    swarm.run()
    assert len([each for worker in workers for each in worker.dispatches]) == 3


@pytest.mark.parametrize("others", [0, 1, 2])
def test_experts_that_overflow_on_several_holders_cost_none(swarm: Swarm, others: int) -> None:
    """Each is primary of other experts and all of these overflow, so that all are suspected at once."""
    overflow = {0: Deed.NAN, 1: Deed.INFINITY}
    swarm.add(EVERYTHING, LOW, script=overflow)
    swarm.add(EVERYTHING, HIGH, script=overflow)
    for _ in range(others):
        swarm.add(EVERYTHING, script=overflow)
    with pytest.raises(EngineFailed, match=r"expert \d of layer 1 .* on more than one node"):
        swarm.dispatcher(ToyCall(IDS))
    assert swarm.lost == []


@pytest.mark.parametrize("deed", NO_EVIDENCE, ids=lambda each: each.name.lower())
def test_the_only_holder_of_an_expert_is_not_judged_by_its_own_rows(swarm: Swarm, deed: Deed) -> None:
    only = swarm.add(LOW, LOW, script={0: deed})
    swarm.add(HIGH, HIGH)
    with pytest.raises(EngineFailed, match=rf"expert 0 of layer 1 .* on {only.node_id}, and no other node"):
        swarm.dispatcher(ToyCall(IDS))
    assert swarm.lost == []
    swarm.dispatcher.settle()
    swarm.run()


def test_suspects_that_others_refute_are_given_up(swarm: Swarm) -> None:
    bad = [swarm.add(EVERYTHING, part, default=Deed.NAN) for part in (LOW, HIGH)]
    good = swarm.add(EVERYTHING)
    swarm.run()
    assert sorted(node for node, _, _ in swarm.lost) == sorted(each.node_id for each in bad)
    assert swarm.codes == ["non_finite", "non_finite"]
    assert sum(len(each.experts) for each in good.dispatches) == 8


def test_a_suspect_still_answers_what_it_is_not_suspected_of(swarm: Swarm) -> None:
    """It is asked for another's rows while it waits for its verdict, and owes them no longer after it."""
    first = swarm.add(EVERYTHING, LOW, script={0: Deed.NAN})
    swarm.add(HIGH, HIGH, closes_at_once=True)
    swarm.add(LOW)
    swarm.add(HIGH)
    swarm.run()
    assert (first.node_id, "non_finite") in [(node, code) for node, code, _ in swarm.lost]


def test_a_suspect_that_is_lost_otherwise_leaves_no_holder(swarm: Swarm) -> None:
    """Its bad row has another holder, which is lost too before it could tell."""
    swarm.add(LOW, LOW, script={0: Deed.NAN})
    swarm.add(LOW, script={0: Deed.CLOSE})
    swarm.add(HIGH, HIGH)
    with pytest.raises(EngineFailed, match="no other node is left"):
        swarm.dispatcher(ToyCall(IDS))
    assert swarm.codes == ["closed"]


def test_rows_whose_holder_is_lost_before_they_are_sent_go_to_somebody_else(swarm: Swarm) -> None:
    """Sending to the first fails, and so does sending its rows to the second, whose own have yet to go."""
    swarm.add(EVERYTHING)
    broken = [swarm.add(EVERYTHING, part) for part in (LOW, HIGH)]
    for worker in broken:
        socket.socket.shutdown(worker.backbone_end, socket.SHUT_WR)
    swarm.run()
    assert {node for node, _, _ in swarm.lost} == {worker.node_id for worker in broken}
    assert swarm.dispatcher.statistics().rows_retried == 12


def test_counts_of_nodes_long_gone_are_forgotten(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "COUNTED_NODES_MAX", 2)
    workers = []
    for _ in range(4):
        workers.append(swarm.add(EVERYTHING, EVERYTHING))
        swarm.run()
        swarm.dispatcher.remove_holder(workers[-1].node_id, "left")
    staying = swarm.add(EVERYTHING, EVERYTHING)
    swarm.run()
    counted = swarm.dispatcher.statistics().rows_by_holder
    assert list(counted) == [each.node_id for each in (*workers[-2:], staying)]


def test_without_any_holder_a_call_fails_as_no_holder_left(swarm: Swarm) -> None:
    with pytest.raises(NoHolderLeft, match=r"layer 1, experts 0, 1, 2, 3, 4, 5$"):
        swarm.dispatcher(ToyCall(IDS))


def test_the_error_names_at_most_eight_experts_and_counts_the_rest() -> None:
    swarm = Swarm()
    table = IndexBuffer(np.full(20, -1, np.int32))
    swarm.dispatcher._call = ToyCall([list(range(20))])
    error = swarm.dispatcher._unassignable(None, 20, table)
    assert str(error) == "no holder is left for layer 1, experts 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"


def test_missing_experts_are_named_by_layer(swarm: Swarm) -> None:
    swarm.add(ShardSet.from_pairs([(LAYERS[0], 0), (LAYERS[1], 5)]))
    swarm.add(HIGH)
    assert swarm.dispatcher.missing_experts() == {LAYERS[0]: (1, 2), LAYERS[1]: (0, 1, 2)}


@pytest.mark.parametrize(
    "shard, primary",
    [
        (ShardSet.from_pairs([(0, 0)]), NOTHING),
        (ShardSet.from_pairs([(1, N_EXPERT)]), NOTHING),
        (LOW, HIGH),
        (LOW, ShardSet.from_pairs([(0, 0)])),
    ],
)
def test_a_shard_that_is_not_of_this_model_is_refused(
    swarm: Swarm, shard: ShardSet, primary: ShardSet
) -> None:
    worker = ScriptedWorker()
    swarm.workers.append(worker)
    with pytest.raises(LocalProtocolError):
        swarm.dispatcher.add_holder(worker.holder(), shard, primary)
    assert len(swarm.dispatcher.missing_experts()) == len(LAYERS)


# ---- What is not a worker's fault ----


def test_an_expert_that_does_not_exist_is_the_engines_failure(swarm: Swarm) -> None:
    swarm.add()
    for wrong in (-1, N_EXPERT):
        with pytest.raises(EngineFailed, match=f"expert {wrong} of {N_EXPERT}"):
            swarm.dispatcher(ToyCall([[0, wrong]]))
    swarm.run()
    assert swarm.lost == []


def test_activations_that_are_not_finite_are_not_blamed_on_workers(swarm: Swarm) -> None:
    """One prompt that overflows the trunk must not cost the swarm its workers."""
    swarm.add(EVERYTHING, LOW)
    swarm.add(EVERYTHING, HIGH)
    call = ToyCall(IDS)
    call.x[2, 1] = np.nan
    with pytest.raises(EngineFailed, match="trunk's own activations in layer 1"):
        swarm.dispatcher(call)
    swarm.dispatcher.settle()
    swarm.run()
    assert swarm.lost == []


def test_a_ubatch_too_large_for_a_frame_is_not_blamed_on_workers(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm.add()
    monkeypatch.setattr(dispatch, "PAIRS_MAX", 7)
    with pytest.raises(EngineFailed, match="use a smaller ubatch"):
        swarm.dispatcher(ToyCall(IDS))
    monkeypatch.undo()
    swarm.dispatcher.settle()
    swarm.run()
    assert swarm.lost == []


def test_a_model_of_too_many_programs_is_not_blamed_on_workers(swarm: Swarm) -> None:
    swarm.add()
    swarm.programs.extend([PROGRAM] * dispatch.PROGRAMS_MAX)
    call = ToyCall(IDS)
    call.program_index = dispatch.PROGRAMS_MAX
    with pytest.raises(EngineFailed, match="more than 64 expert programs"):
        swarm.dispatcher(call)
    swarm.dispatcher.settle()
    swarm.run()
    assert swarm.lost == []


# ---- The backbone's own experts ----

OWN = node_id_of(b"\x77" * 32)


def test_local_experts_are_asked_in_the_process(swarm: Swarm) -> None:
    kernel = ToyKernel()
    swarm.dispatcher.add_holder(LocalHolder(OWN, kernel), EVERYTHING, LOW)
    worker = swarm.add(EVERYTHING, HIGH)
    swarm.run()
    (layer, _, experts) = kernel.asked[0]
    assert (layer, set(experts.tolist())) == (1, {0, 1, 2})
    assert swarm.dispatcher.statistics().rows_by_holder == {OWN: 4, worker.node_id: 4}
    swarm.dispatcher.remove_holder(OWN, "moved away")
    swarm.run()
    assert kernel.is_closed


def test_who_is_removed_or_replaced_between_calls_is_closed_without_another_call(swarm: Swarm) -> None:
    """A backbone that lost its lease makes no more calls, and keeps no connection and no weights."""
    kernel, other = ToyKernel(), ToyKernel()
    swarm.dispatcher.add_holder(LocalHolder(OWN, kernel), EVERYTHING, LOW)
    worker = swarm.add(EVERYTHING, HIGH)
    swarm.run()
    swarm.dispatcher.add_holder(LocalHolder(OWN, other), EVERYTHING, LOW)
    swarm.dispatcher.remove_holder(worker.node_id, "the lease is over")
    assert not kernel.is_closed, "a call may be running on it"
    swarm.dispatcher.settle()
    assert (kernel.is_closed, other.is_closed, worker.backbone_end.fileno()) == (True, False, -1)
    swarm.run()
    assert other.asked


def test_a_holder_that_is_offered_again_for_other_parts_stays_open(swarm: Swarm) -> None:
    kernel = ToyKernel()
    own = LocalHolder(OWN, kernel)
    swarm.dispatcher.add_holder(own, EVERYTHING, NOTHING)
    worker = swarm.add(EVERYTHING, EVERYTHING)
    swarm.run()
    assert kernel.asked == []
    swarm.dispatcher.add_holder(own, EVERYTHING, EVERYTHING)
    swarm.dispatcher.remove_holder(worker.node_id, "moved")
    swarm.run()
    assert len(kernel.asked) == 1
    assert not kernel.is_closed


def test_one_that_serves_is_not_closed_before_the_next_call_whatever_comes_after_it(swarm: Swarm) -> None:
    kernel, other = ToyKernel(), ToyKernel()
    own = LocalHolder(OWN, kernel)
    swarm.dispatcher.add_holder(own, EVERYTHING, NOTHING)
    swarm.run()
    swarm.dispatcher.add_holder(own, EVERYTHING, LOW)
    swarm.dispatcher.add_holder(LocalHolder(OWN, other), EVERYTHING, LOW)
    assert not kernel.is_closed, "a call may be running on it"
    swarm.run()
    assert (kernel.is_closed, other.is_closed) == (True, False)


def test_local_experts_stand_in_for_a_worker(swarm: Swarm) -> None:
    swarm.dispatcher.add_holder(LocalHolder(OWN, ToyKernel()), EVERYTHING, NOTHING)
    swarm.add(EVERYTHING, EVERYTHING, default=Deed.INFINITY)
    swarm.run()
    assert swarm.codes == ["non_finite"]


def test_a_retry_does_not_pack_over_local_rows_that_wait(swarm: Swarm) -> None:
    """The worker is found dead while the local rows are packed and not yet computed."""
    kernel = ToyKernel()
    swarm.dispatcher.add_holder(LocalHolder(OWN, kernel), EVERYTHING, LOW)
    swarm.run([[0, 1, 2, 0, 1, 2, 0, 1]])  # its frame is now large enough to be used again
    swarm.add(EVERYTHING, HIGH, closes_at_once=True)
    swarm.run()
    assert swarm.codes == ["closed"]


@pytest.mark.parametrize("failure", [EngineFailed("no memory"), LocalProtocolError("the kernel is closed")])
def test_a_local_failure_ends_the_call_cleanly(swarm: Swarm, failure: Exception) -> None:
    kernel = ToyKernel()
    kernel.failure = failure
    swarm.dispatcher.add_holder(LocalHolder(OWN, kernel), EVERYTHING, NOTHING)
    with pytest.raises(EngineFailed, match=str(failure)):
        swarm.dispatcher(ToyCall(IDS))
    kernel.failure = None
    swarm.run()


def test_closing_closes_every_holder_also_those_not_yet_in_use() -> None:
    swarm = Swarm()
    kernel = ToyKernel()
    swarm.dispatcher.add_holder(LocalHolder(OWN, kernel), EVERYTHING, NOTHING)
    used = swarm.add()
    swarm.run()
    waiting = swarm.add()
    swarm.dispatcher.close()
    assert kernel.is_closed
    assert (used.backbone_end.fileno(), waiting.backbone_end.fileno()) == (-1, -1)
    swarm.close()


# ---- Weighted sums ----

WEIGHTS = [[0.5, 2.0], [0.25, 1.0], [4.0, 0.125], [1.0, 0.5]]
"""Powers of two: toy sums are exact whoever adds up what."""


def sums_call(
    ids: list[list[int]] = IDS,
    layer: int = LAYERS[0],
    width: int = 4,
    weights: list[list[float]] | None = None,
) -> ToyCall:
    usual = [WEIGHTS[index % len(WEIGHTS)] for index in range(len(ids))]
    return ToyCall(ids, layer, width, usual if weights is None else weights)


@pytest.mark.parametrize("deed", CODES, ids=lambda deed: deed.name.lower())
def test_a_lost_holders_whole_part_is_asked_of_another(swarm: Swarm, deed: Deed) -> None:
    bad = swarm.add(EVERYTHING, LOW, default=deed)
    good = swarm.add(EVERYTHING, HIGH)
    call = sums_call()
    swarm.dispatcher(call)
    assert call.is_right
    assert [node for node, _, _ in swarm.lost] == [bad.node_id]
    assert set(swarm.codes) <= CODES[deed]
    assert [each.experts.tolist() for each in good.dispatches] == [[3, 4, 5, 3], [0, 1, 2, 0]]
    assert all(each.header.answer is dispatch.Answer.SUMS for each in good.dispatches)
    assert swarm.dispatcher.statistics().rows_retried == 4
    swarm.run()  # and rows again, in the next layer


@pytest.mark.parametrize("deed", CODES, ids=lambda deed: deed.name.lower())
def test_a_call_for_sums_that_fails_has_written_nothing(swarm: Swarm, deed: Deed) -> None:
    """What the good holder has sent is half a sum."""
    bad = swarm.add(LOW, LOW, default=deed)
    good = swarm.add(HIGH, HIGH)
    call = sums_call()
    with pytest.raises(EngineFailed if deed in NO_EVIDENCE else NoHolderLeft):
        swarm.dispatcher(call)
    assert good.arrived.wait(10.0)
    assert np.isnan(call.out).all()
    swarm.dispatcher.settle()
    swarm.dispatcher.remove_holder(bad.node_id, "its expert overflows")
    swarm.add(LOW, LOW)
    again = sums_call()
    swarm.dispatcher(again)
    assert again.is_right


def test_a_part_may_be_divided_between_those_who_are_left(swarm: Swarm) -> None:
    swarm.add(EVERYTHING, EVERYTHING, default=Deed.CLOSE)
    low, high = swarm.add(LOW), swarm.add(HIGH)
    call = sums_call()
    swarm.dispatcher(call)
    assert call.is_right
    assert [each.header.n_pairs for worker in (low, high) for each in worker.dispatches] == [4, 4]


def test_parts_are_added_in_the_order_of_slots_not_of_arrival() -> None:
    """F32 sums depend on their order, so that the same placement must always have the same one."""
    ids = [[0, 2, 4], [4, 0, 2], [2, 4, 0]]
    weights = [[1.0, 1e8, -1e8]] * 3
    shards = [shard_of(0, 1), shard_of(2, 3), shard_of(4, 5)]
    found = []
    for last in range(3):
        swarm = Swarm()
        workers = [
            swarm.add(shard, shard, default=Deed.HOLD if number == last else Deed.ANSWER)
            for number, shard in enumerate(shards)
        ]

        def release(last: int = last, workers: list[ScriptedWorker] = workers, swarm: Swarm = swarm) -> None:
            if swarm.dispatcher._filled == 6:  # the two others have answered
                workers[last].release.set()

        call = ToyCall(ids, weights=weights)
        with swarm.dispatcher.watched_by(release):
            swarm.dispatcher(call)
        found.append(call.out.tobytes())
        assert call.is_right  # each slot another holder: the order of slots is that of one process
        assert not swarm.lost
        swarm.close()
    assert len(set(found)) == 1


def test_the_backbones_own_experts_give_their_part(swarm: Swarm) -> None:
    kernel = ToyKernel(LOW)
    swarm.dispatcher.add_holder(LocalHolder(node_id_of(b"\x09" * 32), kernel), LOW, LOW)
    swarm.add(HIGH, HIGH)
    call = sums_call()
    swarm.dispatcher(call)
    assert call.is_right
    assert len(kernel.asked) == 1


def test_sums_come_back_in_fewer_bytes(swarm: Swarm) -> None:
    swarm.add()
    swarm.run()
    rows = swarm.dispatcher.statistics()
    swarm.dispatcher(sums_call())
    sums = swarm.dispatcher.statistics()
    program_reply = dispatch.HEADER_BYTES
    assert rows.bytes_received - program_reply == 48 + 8 * 4 * 4 + 32
    assert sums.bytes_received - rows.bytes_received == 48 + 4 * 4 * 4 + 32
    assert sums.bytes_sent - rows.bytes_sent == rows.bytes_sent + 8 * 4


@pytest.mark.parametrize("place", ["x", "weights"])
def test_what_is_not_finite_in_the_trunk_costs_no_holder_of_sums(swarm: Swarm, place: str) -> None:
    swarm.add(EVERYTHING, LOW)
    swarm.add(EVERYTHING, HIGH)
    call = sums_call()
    array = call.x if place == "x" else call.weights
    assert array is not None
    array[2, 1] = np.inf
    with pytest.raises(EngineFailed, match=r"activations|weights"):
        swarm.dispatcher(call)
    assert np.isnan(call.out).all()
    assert not swarm.lost


def test_a_sum_that_is_not_finite_on_two_nodes_is_nobodys_fault(swarm: Swarm) -> None:
    for _ in range(3):
        swarm.add(EVERYTHING, EVERYTHING, default=Deed.NAN)
    with pytest.raises(EngineFailed, match=r"expert 3 of layer 1 .* on more than one node"):
        swarm.dispatcher(sums_call())
    assert swarm.lost == []


def test_a_sum_that_only_one_node_spoils_costs_that_node(swarm: Swarm) -> None:
    bad = swarm.add(EVERYTHING, LOW, default=Deed.NAN)
    swarm.add(EVERYTHING, HIGH)
    call = sums_call()
    swarm.dispatcher(call)
    assert call.is_right
    assert [(node, code) for node, code, _ in swarm.lost] == [(bad.node_id, "non_finite")]


def test_any_mixture_of_failures_gives_right_sums_or_a_clean_failure() -> None:
    draws = Random(12)
    deeds = [deed for deed in Deed if deed not in (Deed.HOLD, Deed.EARLY)]
    swarm = Swarm()
    rights = failures = 0
    try:
        for _ in range(30):
            held = {place.node_id for place in swarm.dispatcher._places if place is not None}
            for number in range(3):
                node_id = node_id_of(bytes([number]) * 32)
                if node_id not in held or draws.random() < 0.2:
                    script = {each: draws.choice(deeds) for each in range(4) if draws.random() < 0.6}
                    primary = ShardSet.from_pairs((layer, 2 * number) for layer in LAYERS)
                    swarm.add(EVERYTHING, primary, node_id=node_id, script=script)
            ids = [draws.sample(range(N_EXPERT), 2) for _ in range(draws.randint(1, 5))]
            call = sums_call(ids, draws.choice(LAYERS))
            try:
                swarm.dispatcher(call)
            except (NoHolderLeft, EngineFailed):
                failures += 1
                assert np.isnan(call.out).all()
                swarm.dispatcher.settle()
            else:
                rights += 1
                assert call.is_right
    finally:
        swarm.close()
    assert rights > 15
    assert failures > 0
