"""The backbone's audit beside real kernels: behind the rows that are used, and before the first of them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.backbone import reply_log, row_audit
from kvasir_node.backbone.dispatcher import Dispatcher
from kvasir_node.backbone.exhibits import Wrong
from kvasir_node.backbone.holder import RemoteHolder, open_remote_holder
from kvasir_node.backbone.hook import LayerCall
from kvasir_node.backbone.row_audit import Asked, RowAudit
from kvasir_node.certification.certify import expert_program
from kvasir_node.certification.claimed_arithmetic import Claim
from kvasir_node.certification.crafted_weights import random_rows
from kvasir_node.certification.row_referee import RowReferee
from kvasir_node.certification.synthetic_model import ExpertShape, SyntheticExperts, compute
from kvasir_node.engine.certificate import key_and_binding
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.liars import LIES, Lie, wrong_expert_of
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.native_library import load
from kvasir_node.worker.connection import BackboneConnection, ServingCounters
from kvasir_proto.audit.evidence import ROWS_NEEDED, ShownRow, open_evidence
from kvasir_proto.audit.verdict import Verdict
from kvasir_proto.certificate import bind_engine
from kvasir_proto.dispatch import SEAL_BYTES, Opening
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.instants import WallTime
from tests.audited_rows import liar, sum_of
from tests.node.tls_ends import EngineEnd, make_engine_end, seals_of, tls_pair, worker_end

NODE_KEY = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
NODE = node_id_of(NODE_KEY.public_key().public_bytes_raw())
SWARM = SwarmDigest(bytes([2]) * 32)
CLAIM = bytes([3]) * 32
SHAPE = ExpertShape(64, 64)
N_EXPERT = 8


def made_experts() -> SyntheticExperts:
    draws = np.random.default_rng(1)
    parts = {
        part: np.stack([random_rows("q8_0", *SHAPE.shape_of(part)[::-1], draws) for _ in range(N_EXPERT)])
        for part in ("gate", "up", "down")
    }
    return SyntheticExperts(SHAPE, "q8_0", parts)


EXPERTS = made_experts()
SHARD = EXPERTS.manifest.whole_shard()
PROGRAMS = {0: expert_program()}


class Audited:
    """An audit and what it said."""

    def __init__(self, kind: type[RowAudit] = RowAudit) -> None:
        self.verdicts: list[tuple[Verdict, int]] = []
        self.n_shown = 0
        self.evidence: list[bytes] = []
        self.unaccountable: list[tuple[str, str]] = []
        self.audit = kind(
            EXPERTS.manifest,
            EXPERTS.read,
            on_verdict=lambda verdict: self.verdicts.append((verdict, self.n_asked)),
            on_evidence=self.take_evidence,
            on_unaccountable=lambda node_id, code, reason: self.unaccountable.append((code, reason)),
        )

    def take_evidence(self, node_id: NodeId, claim_digest: bytes, evidence: bytes) -> None:
        """Of the one node that these tests know, as it is certified."""
        assert (node_id, claim_digest) == (NODE, CLAIM)
        self.evidence.append(evidence)

    @property
    def n_asked(self) -> int:
        """Rows that were asked so far."""
        return self.n_shown + sum(self.audit.rows_examined().values())

    def show(self, kernel: ExpertKernel, n_rows: int, *, seed: int = 0, expert: int = 0) -> None:
        """As the dispatcher does with an answer."""
        x = np.random.default_rng(seed).standard_normal((n_rows, SHAPE.n_embd)).astype(np.float32)
        answers = compute(kernel, expert_program(), x, expert)
        self.n_shown += n_rows
        self.audit.note_rows(
            NODE,
            0,
            expert_program(),
            [expert] * n_rows,
            lambda place: (x.ctypes.data + 4 * SHAPE.n_embd * place, place, ()),
            answers.ctypes.data,
            (SHAPE.n_embd, SHAPE.n_embd),
            lambda: None,
        )

    def wait_idle(self) -> None:
        """Until nothing waits; what was taken last may still be looked at."""
        deadline = time.monotonic() + 30.0
        while self.audit.statistics()["rows_waiting"]:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wait(self, n_rows: int) -> None:
        """Until so many rows were looked at."""
        deadline = time.monotonic() + 30.0
        while sum(each["rows"] for each in self.audit.statistics()["nodes"]) < n_rows:
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Audited]:
    monkeypatch.setattr(row_audit, "BUSY_SHARE", 1.0)
    monkeypatch.setattr(row_audit, "BUSY_SHARE_AT_FIRST", 1.0)
    monkeypatch.setattr(row_audit, "_LOWEST_PRIORITY", 0)  # at the lowest a busy machine gives it nothing
    found = Audited()
    yield found
    found.audit.close()
    found.audit.close()


def bound_end() -> EngineEnd:
    return make_engine_end(lambda key: bind_engine(NODE_KEY, SWARM, key, "worker", 1))


END = bound_end()
Seals: TypeAlias = Callable[[int, bytes, bytes], bytes]


@contextmanager
def served(kernel: ExpertKernel, seal: Seals | None = None) -> Iterator[RemoteHolder]:
    """A connection to a worker with this kernel."""
    client, server = tls_pair()
    seal = seal or seals_of(END, EXPERTS.manifest.digest(), CLAIM)
    connection = BackboneConnection(
        server, kernel, threading.Lock(), lambda opening: None, lambda: (0, 1), ServingCounters(), seal
    )
    stop = threading.Event()
    thread = threading.Thread(target=connection.serve, args=(stop,))
    thread.start()
    holder = open_remote_holder(NODE, client, Opening(0, 1, b"proof", bytes(32)).encode())
    try:
        yield holder
    finally:
        stop.set()
        holder.close()
        thread.join(10.0)
        server.close()
        kernel.close()


def examined(audit: RowAudit, kernel: ExpertKernel, seal: Seals | None = None) -> Verdict | None:
    with served(kernel, seal) as holder:
        holder.log = audit.log_of(NODE, *key_and_binding(END.certificate), CLAIM)
        return audit.examine(holder, SHARD, PROGRAMS, (0, 1))


def opened(evidence: bytes) -> tuple[ShownRow, ...]:
    now = WallTime(time.time_ns())
    return open_evidence(evidence, NODE, CLAIM, SWARM, EXPERTS.manifest.digest(), now)


def test_an_honest_holder_passes_its_examination_and_every_expert_was_asked(audited: Audited) -> None:
    assert examined(audited.audit, EXPERTS.load(GgmlCpuKernel)) is None
    assert audited.verdicts == []
    assert audited.audit.rows_examined() == {NODE: N_EXPERT}
    (node,) = audited.audit.statistics()["nodes"]
    assert (node["rows"], node["foreign"], node["verdict"]) == (N_EXPERT, 0, None)


@pytest.mark.parametrize("lie", [each for each in LIES if each != "nan"])
def test_a_liar_is_found_before_it_is_asked_for_anything_that_counts(audited: Audited, lie: Lie) -> None:
    verdict = examined(audited.audit, EXPERTS.load(liar(lie)))
    assert verdict is not None
    # Short sums look worse than they are now and then (docs/reference/audit.md).
    assert verdict.word in (("unfit", "quarantined") if lie == "f16" else ("quarantined",))
    assert [each for each, _ in audited.verdicts] == [verdict]
    assert audited.verdicts[0][1] <= 64
    (evidence,) = audited.evidence
    shown = opened(evidence)
    assert len(shown) >= ROWS_NEEDED
    referee = RowReferee(EXPERTS.manifest, EXPERTS.read)
    for row in shown:
        x, answer = (np.frombuffer(each, np.float32)[None] for each in (row.x, row.answer))
        (finding,) = referee.judge(NODE, row.layer, row.program, row.expert, x, answer)
        assert finding.outcome == "foreign", "who recomputes it finds the same"
    referee.close()


def test_an_honest_holder_is_sealed_and_nothing_is_shown_of_it(audited: Audited) -> None:
    assert examined(audited.audit, EXPERTS.load(GgmlCpuKernel)) is None
    assert (audited.evidence, audited.unaccountable) == ([], [])


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_a_clock_that_is_wrong_keeps_nobody_from_serving_and_who_lies_from_nothing(
    audited: Audited, ahead_s: int
) -> None:
    """No token hangs on a wall clock; who is held to what it answered has to say when that was."""
    seals = seals_of(END, EXPERTS.manifest.digest(), CLAIM, ahead_ns=ahead_s * 10**9)
    assert examined(audited.audit, EXPERTS.load(GgmlCpuKernel), seals) is None
    other = Audited()
    with pytest.raises(RemoteProtocolError, match="of another time") as raised:
        examined(other.audit, EXPERTS.load(liar("zeros")), seals)
    assert raised.value.code == "unaccountable"
    assert other.evidence == []
    other.audit.close()


GOOD_SEALS = seals_of(END, EXPERTS.manifest.digest(), CLAIM)
UNACCOUNTABLE: dict[str, tuple[Seals, str]] = {
    "another engine's key": (seals_of(worker_end(), EXPERTS.manifest.digest(), CLAIM), "unaccountable"),
    "another model": (seals_of(END, bytes(32), CLAIM), "unaccountable"),
    "other certificates": (seals_of(END, EXPERTS.manifest.digest(), b""), "stale_claim"),
    "nothing": (lambda n_replies, link, told: bytes(SEAL_BYTES), "unaccountable"),
    "another number": (
        lambda n_replies, link, told: GOOD_SEALS(n_replies + 1, link, told),
        "unaccountable",
    ),
    "other replies": (
        lambda n_replies, link, told: GOOD_SEALS(n_replies, told, told),
        "unaccountable",
    ),
    "other programs": (
        lambda n_replies, link, told: GOOD_SEALS(n_replies, link, link),
        "unaccountable",
    ),
    "a part of a seal": (lambda n_replies, link, told: bytes(7), "shape_invalid"),
}


@pytest.mark.parametrize("what", UNACCOUNTABLE)
def test_who_does_not_stand_for_its_answers_is_not_asked_for_any(audited: Audited, what: str) -> None:
    seal, code = UNACCOUNTABLE[what]
    with pytest.raises(RemoteProtocolError) as raised:
        examined(audited.audit, EXPERTS.load(GgmlCpuKernel), seal)
    assert raised.value.code == code
    assert (audited.verdicts, audited.evidence) == ([], [])


class Sessions:
    """A worker that a dispatcher asks, and its audit."""

    def __init__(self, audited: Audited, holder: RemoteHolder) -> None:
        self.holder = holder
        holder.log = audited.audit.log_of(NODE, *key_and_binding(END.certificate), CLAIM)
        holder.log.on_sealed = audited.audit._take_segment
        self.dispatcher = Dispatcher(
            load(),
            EXPERTS.manifest,
            [expert_program()],
            on_holder_lost=lambda *lost: None,
            on_answers_timed=lambda *timed: None,
            audit=audited.audit,
        )
        self.dispatcher.set_authority(0, 1)
        self.dispatcher.add_holder(holder, SHARD, SHARD)

    def ask(self, seed: int) -> None:
        """One token through two experts."""
        x = np.random.default_rng(seed).standard_normal((1, SHAPE.n_embd)).astype(np.float32)
        ids = np.array([seed % N_EXPERT, (seed + 1) % N_EXPERT], np.int32)
        out = np.zeros((2, SHAPE.n_embd), np.float32)
        n = SHAPE.n_embd
        addresses = x.ctypes.data, ids.ctypes.data, out.ctypes.data, 0
        self.dispatcher(LayerCall(0, 0, 1, 2, n, n, 1, 0, *addresses))


@pytest.mark.parametrize("is_seal_late", [False, True])
def test_what_is_found_behind_the_text_can_be_shown_once_it_is_sealed(
    audited: Audited, monkeypatch: pytest.MonkeyPatch, is_seal_late: bool
) -> None:
    """With seals as they come, and with none before the connection is closed."""
    monkeypatch.setattr(reply_log, "SEAL_INTERVAL_NS", 1 << 62 if is_seal_late else 0)
    with served(EXPERTS.load(liar("scaled"))) as holder:
        sessions = Sessions(audited, holder)
        for seed in range(200):
            sessions.ask(seed)
            audited.wait_idle()
            if audited.verdicts:
                break
        wait_for(lambda: bool(audited.verdicts))
        assert bool(audited.evidence) <= (not is_seal_late)
        if not is_seal_late:
            sessions.ask(1000)  # behind it the seal is asked for
            sessions.ask(1001)
        sessions.dispatcher.remove_holder(NODE, "it was found out")
        sessions.dispatcher.settle()
        wait_for(lambda: bool(audited.evidence))
    assert len(opened(audited.evidence[0])) >= ROWS_NEEDED
    assert len(audited.evidence) == 1
    assert not audited.unaccountable


def test_a_digest_of_other_rows_is_found_where_they_are_looked_at(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, served(EXPERTS.load(GgmlCpuKernel)) as holder:
        patched.setattr(
            "kvasir_node.worker.connection.dispatch.reply_digest", lambda request, rows: bytes(32)
        )
        sessions = Sessions(audited, holder)
        for seed in range(200):
            sessions.ask(seed)
    wait_for(lambda: bool(audited.unaccountable))
    assert {code for code, _ in audited.unaccountable} == {"unaccountable"}


def refused(n_replies: int, link: bytes, told: bytes) -> bytes:
    raise RemoteProtocolError("no", "kernel_failed")


def unanswered(n_replies: int, link: bytes, told: bytes) -> bytes:
    raise OSError


ENDS: dict[str, Seals] = {
    "it refuses": refused,
    "it is silent": unanswered,
    "it breaks off": seals_of(END, EXPERTS.manifest.digest(), CLAIM),
    "it shows other certificates": seals_of(END, EXPERTS.manifest.digest(), b""),
    "it says another time": seals_of(END, EXPERTS.manifest.digest(), CLAIM, ahead_ns=3600 * 10**9),
}
"""How a worker ends a connection without standing for what it answered last."""


def left_by(
    audited: Audited, kernel: ExpertKernel, how: str, monkeypatch: pytest.MonkeyPatch, *, is_looked_at: bool
) -> None:
    """A connection of 200 tokens that ends so; its rows are looked at before, or only then."""
    monkeypatch.setattr(reply_log, "SEAL_INTERVAL_NS", 1 << 62)
    monkeypatch.setattr("kvasir_node.backbone.holder.LAST_SEAL_S", 0.3)
    behind = contextlib.nullcontext() if is_looked_at else audited.audit._referee_lock
    with served(kernel, ENDS[how]) as holder, behind:
        sessions = Sessions(audited, holder)
        for seed in range(200):
            sessions.ask(seed)
        if is_looked_at:
            audited.wait_idle()
            audited.wait(3)
        if how == "it breaks off":
            holder.connection.shutdown(socket.SHUT_RDWR)
        sessions.dispatcher.remove_holder(NODE, "it has said that it holds nothing")
        sessions.dispatcher.settle()
        wait_for(lambda: holder.connection.fileno() == -1)


@pytest.mark.parametrize("is_looked_at", [True, False])
@pytest.mark.parametrize("how", ENDS)
def test_who_leaves_without_standing_for_a_wrong_row_is_unaccountable(
    audited: Audited, monkeypatch: pytest.MonkeyPatch, how: str, is_looked_at: bool
) -> None:
    """Whether that was known by then or not: else one could lie for a second, leave, and begin anew."""
    left_by(audited, EXPERTS.load(liar("scaled")), how, monkeypatch, is_looked_at=is_looked_at)
    wait_for(lambda: bool(audited.unaccountable))
    assert {code for code, _ in audited.unaccountable} == {"unaccountable"}
    assert not audited.evidence


def test_rows_that_cannot_be_sealed_any_more_take_no_place_of_one_that_can(audited: Audited) -> None:
    log = audited.audit.log_of(NODE, *key_and_binding(END.certificate), CLAIM)
    kept = []
    for number in range(reply_log.KEPT_EXCHANGES_MAX + 20):
        log.note_reply(bytes([number]) * 32)
        exchange = log.keep(memoryview(b"request"), memoryview(b"rows"))
        assert exchange is not None
        kept.append(exchange)
    exhibits = audited.audit._exhibits
    for exchange in reversed(kept):  # the newest is looked at first
        exhibits.note(Wrong(exchange, 0, exchange.digest))
    log.leave()
    assert [code for code, _ in audited.unaccountable] == ["unaccountable"]


@pytest.mark.parametrize("claim, kind", [(Claim(), None), (Claim(adds_in_f32=False), "f16")])
@pytest.mark.parametrize("how", ["it refuses", "it is silent", "it breaks off"])
def test_who_leaves_without_a_seal_after_what_is_right_by_its_claim_has_only_left(
    audited: Audited, monkeypatch: pytest.MonkeyPatch, how: str, claim: Claim, kind: Lie | None
) -> None:
    audited.audit.take_claim(NODE, claim)
    kernel = EXPERTS.load(GgmlCpuKernel if kind is None else liar(kind))
    left_by(audited, kernel, how, monkeypatch, is_looked_at=True)
    audited.wait_idle()
    assert (audited.unaccountable, audited.verdicts, audited.evidence) == ([], [], [])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_who_was_quarantined_is_asked_nothing_again_until_it_has_another_certificate(
    audited: Audited,
) -> None:
    audited.audit.take_claim(NODE, Claim(certificate=b"first"))
    verdict = examined(audited.audit, EXPERTS.load(liar("zeros")))
    asked = audited.audit.rows_examined()
    audited.audit.take_claim(NODE, Claim(certificate=b"first"))
    assert examined(audited.audit, EXPERTS.load(GgmlCpuKernel)) == verdict
    assert audited.audit.rows_examined() == asked
    audited.audit.take_claim(NODE, Claim(certificate=b"second"))
    assert examined(audited.audit, EXPERTS.load(GgmlCpuKernel)) is None


@pytest.mark.parametrize(
    "claim, can_be_held_to",
    [
        (Claim(), True),
        (Claim(activation="Q8_0"), True),
        (Claim(activation="Q8_K"), True),
        (Claim(adds_in_f32=False), False),
        (Claim(activation="TF32"), False),
    ],
)
def test_a_claim_that_nobody_can_compute_is_held_to_whether_rows_are_right(
    audited: Audited, claim: Claim, can_be_held_to: bool
) -> None:
    assert claim.can_be_held_to == can_be_held_to
    audited.audit.take_claim(NODE, claim)
    if not can_be_held_to:
        assert examined(audited.audit, EXPERTS.load(liar("f16"))) is None
        verdict = examined(audited.audit, EXPERTS.load(liar("zeros")))
        assert verdict is not None
        assert verdict.word == "quarantined"


def test_a_worker_that_does_not_answer_its_examination_is_late(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, server = tls_pair()
    holder = RemoteHolder(NODE, client, reply_floor_ns=50_000_000)
    with pytest.raises(RemoteProtocolError, match="deadline") as raised:
        audited.audit.examine(holder, SHARD, PROGRAMS, (0, 1))
    assert raised.value.code == "late"
    for each in (client, server):
        each.close()


def test_of_many_experts_some_are_examined(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_audit, "EXAMINED_ROWS_MAX", 3)
    assert examined(audited.audit, EXPERTS.load(GgmlCpuKernel)) is None
    assert audited.audit.rows_examined() == {NODE: 3}


@pytest.mark.parametrize("limit", ["EXAMINATION_S", "EXAMINATION_WAIT_S"])
def test_what_an_examination_has_no_time_for_is_looked_at_behind_it(
    audited: Audited, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A slow machine, or large experts: nobody is let in for good unseen."""
    monkeypatch.setattr(row_audit, limit, -1.0)
    with audited.audit._referee_lock:  # nothing can be judged before it ends
        assert examined(audited.audit, EXPERTS.load(liar("zeros"))) is None
    audited.wait(N_EXPERT)
    ((verdict, _),) = audited.verdicts
    assert verdict.word == "quarantined"


def test_a_liar_is_found_behind_the_rows_that_were_used(audited: Audited) -> None:
    kernel = EXPERTS.load(liar("scaled"))
    for seed in range(8):
        audited.show(kernel, 16, seed=seed)
    audited.wait(3)
    deadline = time.monotonic() + 30.0
    while not audited.verdicts:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    ((verdict, n_asked),) = audited.verdicts
    assert (verdict.node_id, verdict.word) == (NODE, "quarantined")
    assert n_asked <= 128
    kernel.close()


@pytest.mark.parametrize("is_in_time", [True, False])
def test_a_verdict_is_of_what_the_node_claimed_when_it_gave_the_rows(
    audited: Audited, is_in_time: bool
) -> None:
    """What is looked at when it is here as another says nothing of that one, which is examined itself."""
    first, second = Claim(certificate=b"first"), Claim(certificate=b"second", adds_in_f32=False)
    audited.audit.take_claim(NODE, first)
    kernel = EXPERTS.load(liar("zeros"))
    if is_in_time:
        audited.show(kernel, 64)
        wait_for(lambda: bool(audited.verdicts))
        ((verdict, _),) = audited.verdicts
        assert verdict.certificate == b"first"
    else:
        with audited.audit._referee_lock:
            audited.show(kernel, 64)
            audited.audit.take_claim(NODE, second)
        audited.wait_idle()
        audited.show(EXPERTS.load(GgmlCpuKernel), 64)
        audited.wait(3)
        assert audited.verdicts == []
        (node,) = audited.audit.statistics()["nodes"]
        assert node["foreign"] == 0
    kernel.close()


def test_only_the_wrong_expert_of_a_liar_is_held_against_it(audited: Audited) -> None:
    _, wrong = wrong_expert_of(SHARD)
    kernel = EXPERTS.load(liar("wrong-expert"))
    other = (wrong + 2) % N_EXPERT
    audited.show(kernel, 64, expert=other)
    audited.wait(4)
    assert not audited.verdicts
    audited.show(kernel, 64, expert=wrong)
    audited.wait(8)
    ((verdict, _),) = audited.verdicts
    assert verdict.n_foreign >= 3
    kernel.close()


@pytest.mark.parametrize("lie, is_found", [(None, False), ("wrong-expert", True), ("scaled", True)])
def test_sums_are_looked_at_for_the_sake_of_each_expert_in_them(
    audited: Audited, lie: Lie | None, is_found: bool
) -> None:
    """One wrong expert is found in sums where it is never the first, nor weighs most."""
    _, wrong = wrong_expert_of(SHARD)
    right = [each for each in range(N_EXPERT) if each != wrong]
    kernel = EXPERTS.load(GgmlCpuKernel if lie is None else liar(lie))
    draws = np.random.default_rng(4)
    n_asked = 0
    while n_asked < 300 and not audited.verdicts:
        others = draws.permutation(right)[:2].tolist()
        pairs = (*((each, 0.4) for each in others), (wrong, 0.1))
        x = draws.standard_normal(SHAPE.n_embd).astype(np.float32)
        answer = sum_of(kernel, x, pairs)
        asked: Asked = (x.ctypes.data, 0, pairs)
        audited.audit.note_rows(
            NODE,
            0,
            expert_program(),
            [each for each, _ in pairs],
            ([asked] * len(pairs)).__getitem__,
            answer.ctypes.data,
            (SHAPE.n_embd, SHAPE.n_embd),
            lambda: None,
        )
        n_asked += 1
        audited.n_shown += len(pairs)
        audited.wait_idle()
    assert bool(audited.verdicts) == is_found
    if is_found:
        assert audited.verdicts[0][0].word == "quarantined"
        assert 0 < audited.verdicts[0][1] <= 3 * n_asked  # it may be asked once more while that is judged
    kernel.close()


def test_who_begins_to_lie_while_the_audit_is_behind_is_found_by_the_next_rows(audited: Audited) -> None:
    """A queue that keeps what is old shows honest rows for as long as it is full."""
    honest, liar_now = EXPERTS.load(GgmlCpuKernel), EXPERTS.load(liar("scaled"))
    with audited.audit._referee_lock:
        for seed in range(2000):
            audited.show(honest, 16, seed=seed, expert=seed % N_EXPERT)
        for seed in range(100):
            audited.show(liar_now, 16, seed=seed, expert=seed % N_EXPERT)
    deadline = time.monotonic() + 30.0
    while not audited.verdicts:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    ((verdict, _),) = audited.verdicts
    assert verdict.word == "quarantined"
    assert verdict.n_rows < 40
    for each in (honest, liar_now):
        each.close()


def test_who_is_looked_at_too_seldom_is_said(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_audit, "PACE_INTERVAL_S", 0.0)
    said: list[str] = []
    monkeypatch.setattr(row_audit.log, "info", lambda event, **values: said.append(event))
    kernel = EXPERTS.load(GgmlCpuKernel)
    with audited.audit._referee_lock:
        for seed in range(2000):
            audited.show(kernel, 16, seed=seed, expert=seed % N_EXPERT)
    audited.wait(2)
    assert "audit_falls_behind" in said
    kernel.close()


def test_where_too_much_waits_a_row_is_not_looked_at_and_nothing_waits(audited: Audited) -> None:
    kernel = EXPERTS.load(GgmlCpuKernel)
    with audited.audit._referee_lock:  # the audit's thread stands still
        for seed in range(2000):
            audited.show(kernel, 16, seed=seed, expert=seed % N_EXPERT)
        statistics = audited.audit.statistics()
        assert statistics["rows_waiting"] == row_audit.ROWS_WAITING_MAX
        assert statistics["rows_dropped"] > 0
    kernel.close()


def test_it_has_room_until_too_much_waits_and_again_for_each_row_that_it_has_looked_at(
    audited: Audited,
) -> None:
    kernel = EXPERTS.load(GgmlCpuKernel)

    def has_room() -> bool:
        return audited.audit.has_room

    with audited.audit._referee_lock:  # its thread can take one row, and no more
        assert has_room()
        seeds = iter(range(2000))
        while has_room():
            seed = next(seeds)
            audited.show(kernel, 16, seed=seed, expert=seed % N_EXPERT)
        assert audited.audit.statistics()["rows_waiting"] >= row_audit.ROWS_WAITING_MAX - 1
        before = audited.audit.statistics()["rows_dropped"]
        audited.audit.n_rows_unseen += 5600  # the decode thread's, which chose none of them
        assert audited.audit.statistics()["rows_dropped"] == before + 100
    deadline = time.monotonic() + 30.0
    while not has_room():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    kernel.close()


def test_a_failure_of_the_referee_ends_nothing(audited: Audited, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = EXPERTS.load(GgmlCpuKernel)
    right = audited.audit._referee.judge

    def fail(*arguments: object) -> None:
        monkeypatch.setattr(audited.audit._referee, "judge", right)
        raise ZeroDivisionError

    monkeypatch.setattr(audited.audit._referee, "judge", fail)
    audited.show(kernel, 64)
    audited.wait(3)
    kernel.close()


class OwnedLock:
    """A lock that knows whose it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.owner: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self.owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.owner = None
        self._lock.release()


OF_ANY_THREAD = {
    "_manifest",
    "_on_verdict",
    "_on_unaccountable",
    "_exhibits",
    "_rows_a_request",
    "_referee",
    "_referee_lock",
    "_lock",
    "_rows",
    "has_room",
    "n_rows_unseen",
    "_idleness",
    "_is_closing",
    "_thread",
}
"""What never changes, or is made for several threads. The referee and exhibits have locks of their own."""


class WatchedAudit(RowAudit):
    """Notes who touches anything else without the lock."""

    touched: ClassVar[list[str]] = []

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, OwnedLock() if name == "_lock" else value)

    def __getattribute__(self, name: str) -> Any:
        values = object.__getattribute__(self, "__dict__")
        if name in values and name not in OF_ANY_THREAD and values["_lock"].owner != threading.get_ident():
            self.touched.append(f"{name} in {threading.current_thread().name}")
        return object.__getattribute__(self, name)


def test_what_several_threads_use_is_used_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that count at once lose counts, however seldom."""
    monkeypatch.setattr(row_audit, "BUSY_SHARE_AT_FIRST", 1.0)
    monkeypatch.setattr(row_audit, "ROWS_WAITING_MAX", 2)
    monkeypatch.setattr(row_audit, "NODES_MAX", 1)
    audited = Audited(WatchedAudit)
    audited.audit.take_claim(NODE, Claim(certificate=b"first"))
    assert examined(audited.audit, EXPERTS.load(liar("zeros"))) is not None
    assert audited.audit.rows_examined()
    audited.audit.take_claim(node_id_of(b"\2" * 32), Claim())
    kernel = EXPERTS.load(liar("zeros"))
    for _ in range(3):
        audited.show(kernel, 64)
    audited.wait(N_EXPERT + 2)
    assert audited.audit.statistics()["rows_dropped"]
    audited.audit.close()
    kernel.close()
    assert WatchedAudit.touched == []


class PassingTime:
    """Waits that pass at once, on a machine that gives the other threads `rate` of a processor."""

    def __init__(self, rate: float) -> None:
        self.now = self.used = 0.0
        self.rate = rate

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.used += seconds * self.rate
        return False


@pytest.mark.parametrize(
    "rate, rested", [(1.0, 4.9), (3.0, 4.9), (0.5, 9.8), (0.2, 24.5), (0.05, 4.9), (0.0, 4.9)]
)
def test_it_rests_until_the_tokens_had_their_part_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, audited: Audited, rate: float, rested: float
) -> None:
    """However little that is; where they need none, as long as it may keep one."""
    passing = PassingTime(rate)
    monkeypatch.setattr(audited.audit._is_closing, "wait", passing.wait)
    monkeypatch.setattr("kvasir_node.backbone.row_audit.time.monotonic", lambda: passing.now)
    monkeypatch.setattr(row_audit, "_used_by_others", lambda: passing.used)
    audited.audit._rest(4.9)
    monkeypatch.undo()
    assert passing.now == pytest.approx(rested, rel=0.01)


def test_threads_that_wait_for_a_processor_for_a_moment_are_not_idle(
    monkeypatch: pytest.MonkeyPatch, audited: Audited
) -> None:
    """Rests of 50 ms, of which the others get 10 each, but nothing in three of four of them."""
    passing = PassingTime(0.0)
    n_waits = 0

    def wait(seconds: float) -> bool:
        nonlocal n_waits
        n_waits += 1
        passing.rate = 0.8 if n_waits % 4 == 0 else 0.0
        return passing.wait(seconds)

    monkeypatch.setattr(audited.audit._is_closing, "wait", wait)
    monkeypatch.setattr("kvasir_node.backbone.row_audit.time.monotonic", lambda: passing.now)
    monkeypatch.setattr(row_audit, "_used_by_others", lambda: passing.used)
    for _ in range(100):
        audited.audit._rest(0.05)
    monkeypatch.undo()
    assert passing.used >= 5.0


def test_what_it_does_is_counted_in_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_audit, "FIRST_ROWS", 0)
    audited = Audited()
    rests: list[float] = []
    times = iter(range(1, 1000))
    monkeypatch.setattr(audited.audit, "_rest", rests.append)
    monkeypatch.setattr("kvasir_node.backbone.row_audit.time.thread_time", lambda: next(times) * 0.001)
    kernel = EXPERTS.load(GgmlCpuKernel)
    audited.show(kernel, 64)
    audited.wait(4)
    deadline = time.monotonic() + 10.0
    while len(rests) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert rests[:4] == pytest.approx([0.001 * (1 / row_audit.BUSY_SHARE - 1)] * 4)
    audited.audit.close()
    kernel.close()


def test_no_request_of_an_examination_is_larger_than_evidence_may_be(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of many requests the first is evidence as well as the last."""
    audited.audit._rows_a_request = 1
    monkeypatch.setattr(reply_log, "KEPT_EXCHANGES_MAX", 4)
    assert examined(audited.audit, EXPERTS.load(liar("wrong-expert"))) is not None
    (evidence,) = audited.evidence
    assert len(opened(evidence)) >= ROWS_NEEDED
    wide = row_audit._requests_of([(0, expert) for expert in range(100)], 7)
    sizes = [len(experts) for _, experts in wide]
    assert sum(sizes) == 100
    assert max(sizes) == 7
    assert [len(each) for _, each in row_audit._requests_of([(0, 1), (0, 2), (0, 3)], 7)] == [2, 1]
