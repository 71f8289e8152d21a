"""Accusations: who signs them, who looks into them, when a swarm agrees, and what a liar achieves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.certification.certify import expert_program
from kvasir_proto.accusation import (
    ACCUSATION_LIFETIME,
    ACCUSATION_SIZE_MAX,
    Accusation,
    open_accusation,
    sign_accusation,
)
from kvasir_proto.accusations import (
    ACCUSED_MAX,
    ANSWER_TIMEOUT,
    DISTRUST_FIRST,
    EVIDENCE_KEPT,
    REPEAT_INTERVAL,
    WAITING_MAX,
    Accusations,
    Accuse,
    Agreed,
    RecomputationDue,
    Recomputed,
)
from kvasir_proto.audit.evidence import ROW_EVIDENCE, rows_shown
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
    return Recomputed(due.node_id, word, f"{wrong} rows", wrong)


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
            moment = max(self.now.instant, min(due, default=end))
            passed = Duration(moment - self.now.instant)
            self.now = Now(moment, after(self.now.wall, passed))
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
        5, recompute=lambda due: Recomputed(due.node_id, None, "no file", 0, is_conclusive=False)
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
    for number in range(ACCUSED_MAX + WAITING_MAX):
        said = accusation(100 + number)
        core.take(sign_accusation(said, key_of(1), SWARM.digest), NOW)
    assert len(core._heard) <= ACCUSED_MAX
    assert len(core._waiting) <= WAITING_MAX
    for number in range(20, 20 + EVIDENCE_KEPT + 2):
        core.accuse(accuse(evidence_of(number, WRONG), number), NOW)
    assert len(core._evidence) == EVIDENCE_KEPT


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
