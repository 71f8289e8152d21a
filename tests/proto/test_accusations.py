"""Accusations: who signs them, who looks into them, when a swarm agrees, and what a liar achieves."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.certification.certify import expert_program
from kvasir_proto import accusations
from kvasir_proto.accusation import (
    ACCUSATION_LIFETIME,
    ACCUSATION_SIZE_MAX,
    Accusation,
    open_accusation,
    sign_accusation,
)
from kvasir_proto.accusations import (
    ACCUSED_OF_SIGNER_MAX,
    ANSWER_TIMEOUT,
    DISTRUST_FIRST,
    EVIDENCE_KEPT_MAX,
    RECOMPUTE_TIME_HOURLY,
    RECOMPUTE_TIMEOUT,
    REPEAT_INTERVAL,
    SIGNERS_MAX,
    UNSHOWN_FIRST,
    UNSHOWN_MAX,
    Accusations,
    Accuse,
    Agreed,
    RecomputationDue,
    Recomputed,
    _Case,
    _Heard,
)
from kvasir_proto.audit.evidence import EVIDENCE_SIZE_MAX, ROW_EVIDENCE, rows_shown
from kvasir_proto.codec import decode, encode
from kvasir_proto.effects import Notice, Now, Publish, Send
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.gossip_rules import is_record
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.instants import Duration, Instant, WallTime, after, seconds
from kvasir_proto.messages.certification import EvidenceReply, EvidenceRequest
from kvasir_proto.verdict_book import auditors_needed
from tests.node.sealed_rows import SealingWorker
from tests.proto.small_swarm import SmallNode, SmallSwarm, found, key_of

SWARM = found(key_of(1))
MODEL = bytes(32)
CLAIM, OTHER_CLAIM = b"", bytes([9]) * 32
PROGRAM = expert_program()
NOW = Now(Instant(seconds(1000)), WallTime(1 << 60))
HONEST, WRONG = 1.0, 5.0
"""An answer is right if it is the row's first value times this."""


def node(number: int) -> NodeId:
    return node_id_of(key_of(number).public_key().public_bytes_raw())


def evidence_of(
    number: int,
    factor: float,
    *,
    claim: bytes = CLAIM,
    swarm: SwarmDigest | None = None,
    n_rows: int = 3,
    at: int = 1 << 60,
) -> bytes:
    """Rows that this node's engine gave, rightly or wrongly."""
    worker = SealingWorker(key_of(number), swarm or SWARM.digest, PROGRAM, MODEL, claim, at)
    rows = [[float(each + 1), 2.0] for each in range(n_rows)]
    worker.answer(3, list(range(n_rows)), rows, [[row[0] * factor, 0.0] for row in rows])
    return encode(worker.evidence({0: range(n_rows)}))


WRONG_ROWS = evidence_of(20, WRONG)
RIGHT_ROWS = evidence_of(20, HONEST)
ACCUSED = node(20)


def recomputed(due: RecomputationDue) -> Recomputed:
    """As an honest elector's engine does."""
    shown = rows_shown(decode(due.evidence, ROW_EVIDENCE))
    wrong = 0
    for row in shown:
        x, answer = (memoryview(each).cast("f")[0] for each in (row.x, row.answer))
        wrong += answer != x * HONEST
    word: Any = "quarantined" if wrong >= 3 else None
    return Recomputed(due.node_id, due.digest, word, f"{wrong} rows", wrong)


def accuse(evidence: bytes, number: int = 20, **changes: Any) -> Accuse:
    return replace(Accuse(node(number), CLAIM, "quarantined", "3 of 9 rows", 3, evidence), **changes)


def accusation(number: int = 20, **changes: Any) -> Accusation:
    digest = hashlib.sha256(WRONG_ROWS).digest()
    expires = after(NOW.wall, ACCUSATION_LIFETIME)
    made = Accusation(1, node(number), CLAIM, "quarantined", "3 of 9", 3, digest, NOW.wall, expires)
    return replace(made, **changes)


# --- what is signed -----------------------------------------------------------------------------------------


def test_an_accusation_is_its_signers_word_and_small() -> None:
    said = accusation(reason="x" * 256, claim_digest=OTHER_CLAIM)
    data = sign_accusation(said, key_of(1), SWARM.digest)
    assert open_accusation(data, SWARM.digest, NOW.wall) == (said, node(1))
    assert len(data) < ACCUSATION_SIZE_MAX
    assert is_record(data, SWARM)
    assert not is_record(data, found(key_of(2)))
    with pytest.raises(LocalProtocolError):
        sign_accusation(accusation(reason="x" * 257), key_of(1), SWARM.digest)


WEEK = ACCUSATION_LIFETIME
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "of itself": ({"number": 1}, "own_verdict"),
    "of a later version": ({"version": 2}, "incompatible_version"),
    "of long ago": ({"issued": NOW.wall - 2 * WEEK, "expires": NOW.wall - WEEK}, "expired"),
    "of the future": ({"issued": NOW.wall + seconds(3600)}, "out_of_bounds"),
    "for ever": ({"expires": NOW.wall + WEEK + 1}, "out_of_bounds"),
    "that ends before it begins": ({"issued": NOW.wall, "expires": NOW.wall - 1}, "out_of_bounds"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_accusation_is_refused(what: str) -> None:
    changes, code = REFUSED[what]
    data = sign_accusation(accusation(**changes), key_of(1), SWARM.digest)
    with pytest.raises(RemoteProtocolError) as raised:
        open_accusation(data, SWARM.digest, NOW.wall)
    assert raised.value.code == code


def test_nobody_can_change_what_another_says() -> None:
    data = sign_accusation(accusation(), key_of(1), SWARM.digest)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(RemoteProtocolError):
            open_accusation(bytes(changed), SWARM.digest, NOW.wall)


# --- electors, without a network ----------------------------------------------------------------------------


@dataclass
class Electors:
    """So many electors and one member, who hear each other at once. Liars do nothing by themselves."""

    n: int = 5
    liars: frozenset[int] = frozenset()
    may_lie: bool = True
    claims: dict[NodeId, bytes | None] = field(default_factory=dict)
    now: Now = NOW
    notices: list[Notice] = field(default_factory=list)
    agreed: dict[int, list[Agreed]] = field(default_factory=dict)
    recompute: Callable[[RecomputationDue], Recomputed] = recomputed
    n_recomputed: int = 0
    takes: Callable[[RecomputationDue], Duration] = lambda due: Duration(0)
    """How long a recomputation of that takes."""
    busy: list[tuple[int, Instant, Duration, RecomputationDue]] = field(default_factory=list)
    """Recomputations that are not over: whose, from when, how long, of what."""
    spent: list[tuple[int, Instant, Duration, bytes]] = field(default_factory=list)
    """All there were: whose, from when, how long, of which evidence."""
    evidence_of_liars: dict[bytes, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.voters = range(1, self.n + 1)
        self.all = {
            number: Accusations(
                key_of(number),
                SWARM.digest,
                MODEL,
                lambda node_id: self.claims.get(node_id, CLAIM),
                may_lie=self.may_lie,
            )
            for number in (*self.voters, 50)
        }
        for each in self.all.values():
            each.know_electors(frozenset(map(node, self.voters)))
        self.agreed = {number: [] for number in self.all}

    def settle(self) -> None:
        """Do what they ask until none asks more."""
        for _ in range(1000):
            effects = [(number, each) for number, core in self.all.items() for each in core.drain()]
            if not effects:
                return
            for number, effect in effects:
                self._do(number, effect)
        raise AssertionError("it never ends")

    def _do(self, number: int, effect: object) -> None:
        core = self.all[number]
        if number in self.liars and not isinstance(effect, Agreed | Notice):
            return
        match effect:
            case Publish(_, data):
                self.say(data)
            case Send(to, EvidenceRequest() as request):
                liar = next((each for each in self.liars if node(each) == to), None)
                if liar is not None:
                    data = self.evidence_of_liars.get(request.evidence, b"")
                    if data:
                        self.receive(number, EvidenceReply(data), to)
                    return
                self.receive(self.number_of(to), request, node(number))
            case Send(to, message):
                self.receive(self.number_of(to), message, node(number))
            case RecomputationDue():
                self.n_recomputed += 1
                lasts = self.takes(effect)
                self.spent.append((number, self.now.instant, lasts, effect.evidence))
                if lasts:
                    self.busy.append((number, self.now.instant, lasts, effect))
                else:
                    core.finish(self.recompute(effect), self.now)
            case Agreed():
                self.agreed[number].append(effect)
            case Notice():
                self.notices.append(effect)

    def number_of(self, node_id: NodeId) -> int:
        return next(int(each) for each in self.all if node(each) == node_id)

    def receive(self, number: int, message: Any, sender: NodeId) -> None:
        try:
            self.all[number].receive(message, sender, self.now)
        except RemoteProtocolError as error:
            self.notices.append(Notice("refused", (("code", error.code),)))

    def say(self, data: bytes) -> None:
        for number, core in self.all.items():
            if number not in self.liars:
                core.take(data, self.now)

    def lie(self, liar: int, said: Accusation, evidence: bytes) -> None:
        """The liar says so, and has that to show for it."""
        self.evidence_of_liars[said.evidence] = evidence
        self.say(sign_accusation(said, key_of(liar), SWARM.digest))
        self.settle()

    def wait(self, duration: Duration) -> None:
        """Let time pass, with every deadline on the way."""
        end = after(self.now.instant, duration)
        while True:
            due = [at for core in self.all.values() if (at := core.next_deadline()) is not None and at <= end]
            due += [over for _, at, lasts, _ in self.busy if (over := after(at, lasts)) <= end]
            moment = max(self.now.instant, min(due, default=end))
            passed = Duration(moment - self.now.instant)
            self.now = Now(moment, after(self.now.wall, passed))
            for each in [each for each in self.busy if after(each[1], each[2]) <= moment]:
                self.busy.remove(each)
                self.all[each[0]].finish(self.recompute(each[3]), self.now)
            for core in self.all.values():
                core.tick(self.now)
            self.settle()
            if not due:
                return

    def verdicts(self, number: int) -> list[tuple[NodeId, str, int]]:
        return [(each.node_id, each.word, each.n_electors) for each in self.agreed[number]]

    def swarm_verdicts(self, number: int) -> list[tuple[NodeId, str]]:
        return [(each.node_id, each.word) for each in self.agreed[number] if each.n_electors]


@pytest.mark.parametrize("n, may_lie, needed", [(1, True, 2), (3, False, 2), (5, True, 2), (7, True, 3)])
def test_more_electors_than_may_lie_make_a_verdict_and_two_at_least(
    n: int, may_lie: bool, needed: int
) -> None:
    assert Electors(n, may_lie=may_lie).all[1].n_needed == needed
    assert needed > auditors_needed(n, may_lie=may_lie) - 1


def test_what_electors_find_too_is_the_swarms_verdict_and_everybody_hears_it() -> None:
    world = Electors(5)
    world.all[1].accuse(accuse(WRONG_ROWS), NOW)
    world.settle()
    world.wait(seconds(30))
    for number in (*world.voters, 50):
        assert world.swarm_verdicts(number)[0] == (ACCUSED, "quarantined")
        assert world.agreed[number][-1].n_electors == 5
    assert world.n_recomputed == 4, "each who votes recomputes it once"
    assert world.verdicts(1)[0] == (ACCUSED, "quarantined", 0), "it binds its signer at once"
    assert not [each for each in world.notices if each.event == "accusation_refuted"]


def test_one_accusation_binds_nobody_but_its_signer() -> None:
    world = Electors(
        5, recompute=lambda due: Recomputed(due.node_id, due.digest, None, "no file", 0, is_conclusive=False)
    )
    world.all[1].accuse(accuse(WRONG_ROWS), NOW)
    world.settle()
    world.wait(seconds(60))
    assert world.verdicts(1) == [(ACCUSED, "quarantined", 0)]
    assert not any(world.agreed[number] for number in (2, 3, 4, 5, 50))


def test_a_backbone_that_does_not_vote_is_looked_into_and_does_not_count() -> None:
    world = Electors(3)
    world.all[50].accuse(accuse(WRONG_ROWS), NOW)
    (data,) = [each.data for each in world.all[50].drain() if isinstance(each, Publish)]
    world.say(data)
    world.settle()
    assert world.n_recomputed == 0, "a member's word is nothing"
    for core in world.all.values():
        core.know_backbone(node(50))
    world.say(data)
    world.settle()
    world.wait(seconds(30))
    assert world.n_recomputed == 3
    assert world.agreed[2][-1].n_electors == 3, "those that vote, and not the fourth who said so first"


def test_an_unfit_node_is_unfit_where_some_call_it_worse() -> None:
    world = Electors(4)
    words = iter(["unfit", "quarantined", "unfit"])
    world.recompute = lambda due: replace(recomputed(due), word=next(words))  # type: ignore[arg-type]
    world.all[1].accuse(accuse(WRONG_ROWS), NOW)
    world.settle()
    world.wait(seconds(30))
    found = [each for each in world.agreed[50] if each.n_electors]
    assert found[0].word == "unfit"
    assert found[-1].word == "quarantined", "two of four by now"


LIES: dict[str, tuple[Accusation, bytes]] = {
    "right rows": (accusation(evidence=hashlib.sha256(RIGHT_ROWS).digest()), RIGHT_ROWS),
    "nothing": (accusation(), b""),
    "noise": (accusation(evidence=hashlib.sha256(b"noise").digest()), b"noise"),
    "other evidence than it named": (accusation(evidence=bytes(32)), WRONG_ROWS),
    "another node's rows": (accusation(21), WRONG_ROWS),
    "rows it made itself": (
        accusation(evidence=hashlib.sha256(evidence_of(1, WRONG)).digest()),
        evidence_of(1, WRONG),
    ),
    "rows of another certificate": (
        accusation(evidence=hashlib.sha256(evidence_of(20, WRONG, claim=OTHER_CLAIM)).digest()),
        evidence_of(20, WRONG, claim=OTHER_CLAIM),
    ),
    "rows of another swarm": (
        accusation(evidence=hashlib.sha256(evidence_of(20, WRONG, swarm=found(key_of(2)).digest)).digest()),
        evidence_of(20, WRONG, swarm=found(key_of(2)).digest),
    ),
    "a certificate that it has no more": (accusation(claim_digest=OTHER_CLAIM), WRONG_ROWS),
    "two rows": (
        accusation(evidence=hashlib.sha256(evidence_of(20, WRONG, n_rows=2)).digest()),
        evidence_of(20, WRONG, n_rows=2),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_one_lying_elector_among_five_harms_nobody(lie: str) -> None:
    said, evidence = LIES[lie]
    world = Electors(5, liars=frozenset({1}))
    world.lie(1, said, evidence)
    world.wait(Duration(ANSWER_TIMEOUT + seconds(20)))
    assert not any(world.agreed.values())
    is_shown = lie not in ("nothing", "a certificate that it has no more")
    refuted = [each for each in world.notices if each.event == "accusation_refuted"]
    assert len(refuted) == (4 if is_shown else 0)


def test_a_liar_is_listened_to_less_and_less_and_what_others_say_is_heard() -> None:
    world = Electors(5, liars=frozenset({1}))
    said, evidence = LIES["right rows"]
    for number in range(4):
        world.lie(1, replace(said, issued=said.issued + number), evidence)
        world.wait(seconds(5))
    assert world.n_recomputed == 4, "once by each"
    world.wait(DISTRUST_FIRST)
    world.lie(1, replace(said, issued=world.now.wall), evidence)
    world.wait(DISTRUST_FIRST)
    assert world.n_recomputed == 8
    world.lie(1, replace(said, issued=world.now.wall), evidence)
    world.wait(seconds(60))
    assert world.n_recomputed == 8, "twice as long now"
    world.all[2].accuse(accuse(WRONG_ROWS), world.now)
    world.settle()
    world.wait(seconds(30))
    assert world.swarm_verdicts(50)[0] == (ACCUSED, "quarantined")


def test_two_who_accuse_at_once_are_each_looked_into() -> None:
    """The first shows nothing, the second does."""
    world = Electors(5, liars=frozenset({1}))
    world.lie(1, accusation(), b"")
    world.all[2].accuse(accuse(WRONG_ROWS), world.now)
    world.settle()
    world.wait(Duration(ANSWER_TIMEOUT + seconds(20)))
    assert world.swarm_verdicts(50)[0] == (ACCUSED, "quarantined")


def test_the_accused_is_no_judge_in_its_own_case() -> None:
    world = Electors(5)
    evidence = evidence_of(3, WRONG)
    world.all[1].accuse(accuse(evidence, 3), NOW)
    world.settle()
    world.wait(seconds(30))
    assert world.n_recomputed == 3
    assert world.agreed[3][-1].n_electors == 4, "and hears of it like everybody"


def test_what_is_still_so_is_said_again_for_those_that_were_away() -> None:
    world = Electors(3, may_lie=False)
    world.all[1].accuse(accuse(WRONG_ROWS), NOW)
    world.settle()
    world.wait(seconds(30))
    away = Accusations(key_of(60), SWARM.digest, MODEL, lambda _: CLAIM, may_lie=False)
    away.know_electors(frozenset(map(node, world.voters)))
    world.all[60], world.agreed[60] = away, []
    world.wait(REPEAT_INTERVAL)
    assert world.agreed[60][-1].n_electors == 3
    world.claims[ACCUSED] = OTHER_CLAIM
    said: list[bytes] = []
    setattr(world, "say", said.append)  # noqa: B010 - nobody hears it any more
    world.wait(Duration(2 * REPEAT_INTERVAL))
    assert said == [], "it has other certificates by now"


def test_evidence_is_given_to_electors_alone() -> None:
    world = Electors(3)
    world.all[1].accuse(accuse(WRONG_ROWS), NOW)
    world.all[1].drain()
    request = EvidenceRequest(hashlib.sha256(WRONG_ROWS).digest())
    with pytest.raises(RemoteProtocolError) as raised:
        world.all[1].receive(request, node(50), NOW)
    assert raised.value.code == "not_an_elector"
    world.all[1].receive(request, node(2), NOW)
    assert world.all[1].drain() == [Send(node(2), EvidenceReply(WRONG_ROWS))]
    world.all[1].receive(EvidenceRequest(bytes(32)), node(2), NOW)
    world.all[2].receive(EvidenceReply(WRONG_ROWS), node(1), NOW)
    assert world.all[1].drain() == world.all[2].drain() == []


def test_who_starts_again_goes_on_to_say_what_is_its_own_and_nothing_else() -> None:
    world = Electors(3)
    core = world.all[1]
    core.accuse(accuse(WRONG_ROWS), NOW)
    core.drain()
    (own,) = core.own()
    others = sign_accusation(accusation(), key_of(2), SWARM.digest)
    over = sign_accusation(accusation(21, issued=1, expires=2), key_of(1), SWARM.digest)
    again = Accusations(key_of(1), SWARM.digest, MODEL, lambda _: CLAIM, may_lie=True)
    again.restore((others, over, b"noise", own), NOW)
    assert again.own() == (own,)
    again.tick(NOW)
    assert [each.data for each in again.drain() if isinstance(each, Publish)] == [own]


def test_tables_are_bounded() -> None:
    world = Electors(5, liars=frozenset({1}))
    core = world.all[2]
    for number in range(ACCUSED_OF_SIGNER_MAX + 40):
        said = accusation(100 + number)
        core.take(sign_accusation(said, key_of(1), SWARM.digest), NOW)
    assert len(core._heard) == len(core._said[node(1)]) == ACCUSED_OF_SIGNER_MAX
    assert len(core._waiting[node(1)]) <= ACCUSED_OF_SIGNER_MAX
    for number in range(20, 20 + EVIDENCE_KEPT_MAX + 2):
        core.accuse(accuse(evidence_of(number, WRONG), number), NOW)
    assert len(core._evidence) == EVIDENCE_KEPT_MAX


def is_shown(core: Accusations, evidence: bytes, to: int, now: Now = NOW) -> bool:
    core.drain()
    with contextlib.suppress(RemoteProtocolError):
        core.receive(EvidenceRequest(hashlib.sha256(evidence).digest()), node(to), now)
    return Send(node(to), EvidenceReply(evidence)) in core.drain()


def test_of_many_found_out_at_once_each_can_be_shown_and_who_is_agreed_on_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = {number: evidence_of(number, WRONG) for number in range(20, 33)}
    size_bytes = max(len(each) for each in shown.values())
    assert accusations.EVIDENCE_KEPT_BYTES_MAX == 12 * EVIDENCE_SIZE_MAX
    monkeypatch.setattr(accusations, "EVIDENCE_KEPT_BYTES_MAX", 12 * size_bytes)
    core = Electors(3).all[1]
    for number in range(20, 32):
        core.accuse(accuse(shown[number], number), NOW)
    assert all(is_shown(core, shown[number], 2) for number in range(20, 32))
    for signer in (2, 3):
        said = accusation(25, evidence=hashlib.sha256(shown[25]).digest())
        core.take(sign_accusation(said, key_of(signer), SWARM.digest), NOW)
    core.accuse(accuse(shown[32], 32), NOW)
    assert [number for number in shown if not is_shown(core, shown[number], 3)] == [25], "all know"
    core.accuse(accuse(evidence_of(33, WRONG), 33), NOW)
    later = Now(after(NOW.instant, ANSWER_TIMEOUT), NOW.wall)
    assert [number for number in shown if not is_shown(core, shown[number], 3, later)] == [20, 25], "oldest"


def test_one_piece_of_evidence_goes_to_one_elector_as_often_as_that_can_use_it() -> None:
    core = Electors(3).all[1]
    other = evidence_of(21, WRONG)
    core.accuse(accuse(WRONG_ROWS), NOW)
    core.accuse(accuse(other, 21), NOW)
    given = [0, 0, 0]
    for second in range(200):
        now = Now(after(NOW.instant, seconds(second)), NOW.wall)
        for index, (evidence, to) in enumerate(((WRONG_ROWS, 2), (other, 2), (WRONG_ROWS, 3))):
            given[index] += is_shown(core, evidence, to, now)
    assert given == [-(-200 * 10**9 // ANSWER_TIMEOUT)] * 3


def test_nobody_accuses_by_what_shows_nothing() -> None:
    """It would cost this node its own word."""
    world = Electors(5)
    for evidence, changes in (
        (b"noise", {}),
        (evidence_of(21, WRONG), {}),
        (WRONG_ROWS, {"claim_digest": OTHER_CLAIM}),
    ):
        world.all[1].accuse(accuse(evidence, **changes), NOW)  # type: ignore[arg-type]
    assert [type(each) for each in world.all[1].drain()] == [Notice] * 3


def say(core: Accusations, signer: int, number: int, now: Now = NOW, **changes: Any) -> bool:
    """Have it hear this signer's accusation of that node."""
    expires = after(now.wall, ACCUSATION_LIFETIME)
    said = accusation(number, issued=now.wall, expires=expires, **changes)
    return core.take(sign_accusation(said, key_of(signer), SWARM.digest), now)


def later(moments: Duration) -> Now:
    return Now(after(NOW.instant, moments), after(NOW.wall, moments))


def test_made_up_accusations_take_no_other_signers_place() -> None:
    """Three electors say so of one node, and a fourth of very many in between, to one who does not vote."""
    world = Electors(7)
    member = world.all[50]
    for step, signer in enumerate((3, 4, 5)):
        assert say(member, signer, 20, later(seconds(100 * step)))
        for number in range(300):
            claim = hashlib.sha256(bytes([step, number // 256, number % 256])).digest()
            say(member, 1, 21, later(seconds(100 * step)), claim_digest=claim)
    assert [each.node_id for each in member.drain() if isinstance(each, Agreed)] == [ACCUSED]
    assert len(member._heard) <= ACCUSED_OF_SIGNER_MAX + 1


def test_nobody_is_asked_about_whom_nobody_knows() -> None:
    world = Electors(5, claims={node(99): None})
    assert not say(world.all[2], 1, 99)
    assert world.all[2].drain() == []
    world.claims[node(99)] = CLAIM
    assert say(world.all[2], 1, 99), "said again, when its record has come"
    assert world.all[2].drain()


def test_accusations_of_former_electors_are_let_go_of_first() -> None:
    core = Electors(7).all[2]
    for number in range(100, 140):
        core.know_electors(frozenset({node(2), node(3), node(number)}))
        if number == 100:
            say(core, 3, 20)
        say(core, number, 21)
    assert len(core._said) <= SIGNERS_MAX
    assert node(3) in core._said
    assert len(core._heard) == 2


def test_silence_costs_its_signer_a_minute_then_two_and_nobody_else_anything() -> None:
    core = Electors(5).all[2]
    asked: list[Instant] = []
    end = seconds(3600)
    now = NOW
    while now.instant < after(NOW.instant, end):
        for number in range(100, 103):
            say(core, 1, number, now)
        core.tick(now)
        asked += [now.instant for each in core.drain() if isinstance(each, Send)]
        now = Now(after(now.instant, seconds(10)), after(now.wall, seconds(10)))
    apart = [int(b - a) // 10**9 for a, b in pairwise(asked)]
    waits = [ANSWER_TIMEOUT + min(UNSHOWN_MAX, UNSHOWN_FIRST << each) for each in range(len(apart))]
    assert apart == [each // 10**9 for each in waits]
    assert len(asked) == 7


@pytest.mark.parametrize("ends", ["not judged", "not in time"])
def test_rows_that_cannot_be_judged_cost_their_signer_time_and_nobody_else_anything(ends: str) -> None:
    """And a signer whose turn it is not gets the next one at once."""
    core = Electors(5).all[2]
    for number in (20, 21):
        say(core, 1, number)
    say(core, 3, 22)
    core.receive(EvidenceReply(WRONG_ROWS), node(1), NOW)
    (due,) = [each for each in core.drain() if isinstance(each, RecomputationDue)]
    if ends == "not judged":
        core.finish(replace(recomputed(due), word=None, is_conclusive=False), now := NOW)
    else:
        core.tick(now := later(RECOMPUTE_TIMEOUT))
    core.tick(Now(after(now.instant, seconds(1)), now.wall))
    said, asked = core.drain()
    assert isinstance(said, Notice)
    assert said.event == "accusation_not_shown"
    assert isinstance(asked, Send)
    assert asked.to == node(3), "it has another one waiting"
    signer = core._signers[node(1)]
    assert signer.distrusted_until == after(now.instant, UNSHOWN_FIRST)
    assert signer.time_left == RECOMPUTE_TIME_HOURLY - (0 if ends == "not judged" else RECOMPUTE_TIMEOUT)


def test_signers_have_their_turns() -> None:
    core = Electors(7).all[2]
    for number in range(20, 25):
        say(core, 1, number)
    for signer in (3, 4):
        for number in range(25, 27):
            say(core, signer, number)
    asked: list[NodeId] = []
    now = NOW
    for _ in range(20):
        for each in core.drain():
            if isinstance(each, Send):
                asked.append(each.to)
                core._end(now)  # as if nothing had come of it and nobody were distrusted for it
        now = Now(after(now.instant, seconds(1)), now.wall)
        core.tick(now)
    turns = [node(each) for each in (1, 3, 4, 1, 3, 4, 1, 1, 1)]
    assert sorted(asked[:3]) == sorted(turns[:3])
    assert sorted(asked[3:6]) == sorted(turns[:3])
    assert asked[6:] == turns[6:]


def test_what_is_borne_out_ends_distrust_for_silence_alone() -> None:
    core = Electors(5).all[2]
    say(core, 1, 20)
    core.tick(later(ANSWER_TIMEOUT))
    signer = core._signers[node(1)]
    assert signer.unshown == 1
    say(core, 1, 20, now := later(seconds(100)))
    core.receive(EvidenceReply(WRONG_ROWS), node(1), now)
    (due,) = [each for each in core.drain() if isinstance(each, RecomputationDue)]
    core.finish(recomputed(due), now)
    assert (signer.unshown, signer.refuted) == (0, 0)


def test_a_late_result_is_no_result_of_another_inquiry() -> None:
    """Of rows that are right, of the same node, from a signer whose time was over."""
    core = Electors(5).all[2]
    say(core, 1, 20, evidence=hashlib.sha256(RIGHT_ROWS).digest())
    core.receive(EvidenceReply(RIGHT_ROWS), node(1), NOW)
    (late,) = [each for each in core.drain() if isinstance(each, RecomputationDue)]
    core.tick(now := later(seconds(130)))
    say(core, 3, 20, now)
    core.tick(now := later(seconds(140)))
    core.receive(EvidenceReply(WRONG_ROWS), node(3), now)
    core.drain()
    core.finish(recomputed(late), now)
    assert core.drain() == []
    core.finish(
        replace(recomputed(late), digest=hashlib.sha256(WRONG_ROWS).digest(), word="unfit", n_rows=3), now
    )
    assert [type(each) for each in core.drain()] == [Publish, Notice, Agreed]


@pytest.mark.parametrize("when", ["before it is shown", "while it is recomputed"])
def test_who_has_other_certificates_meanwhile_is_not_judged_and_nobody_distrusted(when: str) -> None:
    world = Electors(5)
    core = world.all[2]
    say(core, 1, 20)
    if when == "before it is shown":
        world.claims[ACCUSED] = OTHER_CLAIM
    core.receive(EvidenceReply(WRONG_ROWS), node(1), NOW)
    due = [each for each in core.drain() if isinstance(each, RecomputationDue)]
    assert bool(due) == (when != "before it is shown")
    for each in due:
        world.claims[ACCUSED] = OTHER_CLAIM
        core.finish(recomputed(each), NOW)
    assert core._inquiry is None
    assert core.drain() == []
    assert all(each.distrusted_until <= NOW.instant for each in core._signers.values())


def test_who_forgets_its_own_accusation_while_it_is_recomputed_is_refuted_all_the_same() -> None:
    core = Electors(5).all[2]
    say(core, 1, 20, evidence=hashlib.sha256(RIGHT_ROWS).digest())
    core.receive(EvidenceReply(RIGHT_ROWS), node(1), NOW)
    (due,) = [each for each in core.drain() if isinstance(each, RecomputationDue)]
    for number in range(100, 100 + ACCUSED_OF_SIGNER_MAX):
        say(core, 1, number)
    assert node(1) not in core._heard.get(_Case(ACCUSED, CLAIM), _Heard()).by_signer
    core.finish(recomputed(due), NOW)
    assert core._signers[node(1)].refuted == 1


SILENT, VOID, RIGHT = "silent", "void", "right"
VOID_ROWS = {each: evidence_of(each, WRONG, n_rows=4) for each in range(21, 26)}
RIGHT_OF = {each: evidence_of(each, HONEST) for each in range(21, 26)}
HOUR = seconds(3600)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(21, 25), st.sampled_from([SILENT, VOID, RIGHT])), max_size=12),
            st.integers(1, 900),
        ),
        min_size=4,
        max_size=24,
    ),
    st.integers(0, 3),
    st.integers(1, 200),
    st.booleans(),
)
def test_one_lying_elector_among_five_delays_the_others_by_one_turn_and_costs_them_its_budget(
    lies: Sequence[tuple[list[tuple[int, str]], int]], begins: int, void_takes: int, has_accomplices: bool
) -> None:
    """It says whatever it likes of five nodes and never runs dry; its evidence takes long and shows nothing.

    With accomplices some of it is even borne out: nodes that give wrong rows, which ends distrust.
    """
    world = Electors(5, liars=frozenset({1}))

    def judge(due: RecomputationDue) -> Recomputed:
        if due.evidence in VOID_ROWS.values() and not has_accomplices:
            return Recomputed(due.node_id, due.digest, None, "cannot be judged", 0, is_conclusive=False)
        return recomputed(due)

    world.recompute = judge
    lied = {*VOID_ROWS.values(), *RIGHT_OF.values()}
    world.takes = lambda due: seconds(void_takes if due.evidence in lied else 2)
    for step, (said, pause) in enumerate(lies):
        for number, kind in said:
            evidence = {SILENT: b"", VOID: VOID_ROWS[number], RIGHT: RIGHT_OF[number]}[kind]
            digest = hashlib.sha256(evidence or bytes([number])).digest()
            expires = after(world.now.wall, ACCUSATION_LIFETIME)
            made = accusation(number, evidence=digest, issued=world.now.wall, expires=expires)
            world.lie(1, made, evidence)
        if step == begins:
            world.all[2].accuse(accuse(WRONG_ROWS), world.now)
            world.settle()
            world.wait(Duration(ANSWER_TIMEOUT + RECOMPUTE_TIMEOUT + seconds(10)))
            for number in (2, 3, 4, 5, 50):
                assert (ACCUSED, "quarantined") in world.swarm_verdicts(number)
        world.wait(seconds(pause))
    for number in (2, 3, 4, 5):
        # Nobody waits for longer than the time limit, whatever its engine does then.
        used = [
            (at, min(lasts, RECOMPUTE_TIMEOUT))
            for who, at, lasts, evidence in world.spent
            if who == number and evidence in lied
        ]
        for begin, _ in used:
            within = sum(lasts for at, lasts in used if begin <= at < after(begin, HOUR))
            assert within <= 2 * RECOMPUTE_TIME_HOURLY
        hours = (world.now.instant - NOW.instant) / HOUR
        assert sum(lasts for _, lasts in used) <= RECOMPUTE_TIME_HOURLY * (1 + hours)


def test_true_accusations_without_end_take_the_budget_and_then_wait_for_it() -> None:
    """A liar that spends accomplices: each is borne out, so nothing but the budget bounds it."""
    accomplices = {each: evidence_of(each, WRONG) for each in range(21, 61)}
    world = Electors(5, liars=frozenset({1}))
    world.takes = lambda due: seconds(30)
    for number, evidence in accomplices.items():
        made = accusation(number, evidence=hashlib.sha256(evidence).digest())
        world.lie(1, made, evidence)
    world.wait(HOUR)
    used = [lasts for who, _, lasts, _ in world.spent if who == 2]
    assert RECOMPUTE_TIME_HOURLY <= sum(used) <= 2 * RECOMPUTE_TIME_HOURLY
    assert len(used) < len(accomplices)
    n_before = len(used)
    world.wait(HOUR)
    assert n_before < len([0 for who, _, _, _ in world.spent if who == 2]), "what waits has its turn"


SHOWN = [evidence for _, evidence in LIES.values()] + [WRONG_ROWS]
NAMED = st.sampled_from([20, 21, 2, 3])


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            NAMED,
            st.sampled_from([CLAIM, OTHER_CLAIM]),
            st.sampled_from(range(len(SHOWN))),
            st.booleans(),
            st.integers(0, 1300),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_one_of_five_says_only_who_gave_wrong_rows_is_ever_judged(
    lies: Sequence[tuple[int, bytes, int, bool, int]],
) -> None:
    """Node 20 gave wrong rows, with its certificate of now; 21, 2 and 3 never did."""
    world = Electors(5, liars=frozenset({1}))
    for number, claim, shown, is_named, pause in lies:
        evidence = SHOWN[shown]
        digest = hashlib.sha256(evidence).digest() if is_named else bytes(32)
        said = accusation(number, claim_digest=claim, evidence=digest, issued=world.now.wall)
        said = replace(said, expires=after(world.now.wall, ACCUSATION_LIFETIME))
        world.lie(1, said, evidence)
        world.wait(seconds(pause))
    judged = {(each.node_id, each.claim_digest) for found in world.agreed.values() for each in found}
    assert judged <= {(ACCUSED, CLAIM)}


# --- whole cores --------------------------------------------------------------------------------------------


def accusing_swarm(size: int = 5) -> tuple[SmallSwarm, SmallNode]:
    """A swarm that is ready, and its backbone."""
    swarm = SmallSwarm(size)
    swarm.recompute = lambda _, due: recomputed(due)

    def is_ready() -> bool:
        running = [each.core.view() for each in swarm.nodes.values() if each.core is not None]
        return all(view.state == "ready" for view in running) and len(running[0].electorate.members) >= 4

    swarm.run(seconds(40), is_ready)
    swarm.run(seconds(5))
    core = swarm.node(1).core
    assert core is not None
    fence = core.view().fence
    assert fence is not None
    return swarm, swarm.nodes[fence.backbone]


def of_swarm(swarm: SmallSwarm, accused: NodeId) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for core in [each.core for each in swarm.nodes.values() if each.core is not None]:
        found += [
            (verdict.word, verdict.n_electors)
            for verdict in core.view().verdicts
            if verdict.node_id == accused and verdict.n_electors
        ]
    return found


def test_a_whole_swarm_avoids_whom_its_electors_have_found_out() -> None:
    swarm, backbone = accusing_swarm()
    assert backbone.core is not None
    number = next(each for each in range(1, 6) if swarm.node(each) is not backbone)
    liar = swarm.node(number)
    evidence = evidence_of(number, WRONG, swarm=swarm.swarm.digest, at=swarm.now().wall)
    backbone.core.command(accuse(evidence, number), swarm.now())
    swarm._do(backbone)
    swarm.run(seconds(30), lambda: len(of_swarm(swarm, liar.node_id)) == 5)
    swarm.run(seconds(20))
    for each in swarm.nodes.values():
        assert each.core is not None
        (verdict,) = each.core.view().verdicts
        assert (verdict.node_id, verdict.word) == (liar.node_id, "quarantined")
        assert verdict.reason
        plan = each.core.view().plan
        if plan is not None:
            assert liar.node_id not in plan.nodes
    # Another backbone avoids it too, and it is no backbone itself.
    swarm.kill(backbone)
    swarm.run(seconds(40))
    others = [each for each in swarm.nodes.values() if each.core is not None]
    fences = {each.core.view().fence for each in others if each.core is not None}
    (fence,) = fences
    assert fence is not None
    assert fence.backbone not in (liar.node_id, backbone.node_id)
    plan = others[0].core.view().plan if others[0].core is not None else None
    assert plan is not None
    assert liar.node_id not in plan.nodes
    # And so it stays after all have started again, and who comes then hears of it.
    for each in others:
        swarm.kill(each)
        swarm.start(each)
    assert len(of_swarm(swarm, liar.node_id)) == len(others)
    newcomer = swarm.add(6)
    swarm.run(Duration(2 * REPEAT_INTERVAL))
    assert newcomer.core is not None
    (verdict,) = newcomer.core.view().verdicts
    assert (verdict.node_id, verdict.n_electors > 1) == (liar.node_id, True)


def test_a_lying_backbone_makes_nobody_else_avoid_an_honest_node() -> None:
    swarm, backbone = accusing_swarm()
    assert backbone.core is not None
    number = next(each for each in range(1, 6) if swarm.node(each) is not backbone)
    honest = swarm.node(number)
    evidence = evidence_of(number, HONEST, swarm=swarm.swarm.digest, at=swarm.now().wall)
    backbone.core.command(accuse(evidence, number), swarm.now())
    swarm._do(backbone)
    swarm.run(seconds(60))
    assert of_swarm(swarm, honest.node_id) == []
    refuted = [
        each
        for other in swarm.nodes.values()
        for each in other.told
        if isinstance(each, Notice) and each.event == "accusation_refuted"
    ]
    assert len(refuted) >= 2
    for other in swarm.nodes.values():
        if other is not backbone and other.core is not None:
            assert other.core.view().verdicts == ()
