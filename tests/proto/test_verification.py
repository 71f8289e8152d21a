"""Whose word makes a node fit in a swarm that verifies, whom auditors challenge, and what verdicts do."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from kvasir_proto.capability import CapabilityRecord, RankVerdict, Verdict
from kvasir_proto.challenges import (
    CHALLENGE_TIMEOUT,
    PATIENCES_MAX,
    RETRY_FIRST,
    RETRY_MAX,
    SPACING,
    SPREAD,
    Challenges,
)
from kvasir_proto.effects import Notice, Now, Publish, Send
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Duration, Instant, WallTime, after, seconds
from kvasir_proto.limits import RANKS
from kvasir_proto.messages.certification import VerdictNotice
from kvasir_proto.ranking import may_be_backbone
from kvasir_proto.tolerance_certificate import VERDICT_LIFETIME, AuditorVerdict, sign_verdict
from kvasir_proto.verdict_book import (
    AUDITORS_OF_A_NODE_MAX,
    VERDICTS_MAX,
    Auditors,
    VerdictBook,
    auditors_needed,
)
from kvasir_proto.verification import (
    VERDICT_RENEWED_AFTER,
    ChallengeDone,
    ChallengeDue,
    ChallengeFailed,
    ChallengeResult,
    Verification,
)
from tests.proto.small_swarm import WALL, SmallSwarm, capability, found, key_of

CERTIFICATE, OTHER_CERTIFICATE = b"c" * 32, b"d" * 32
NOW = Now(Instant(seconds(1000)), WallTime(WALL))


def node(number: int) -> NodeId:
    return node_id_of(key_of(number).public_key().public_bytes_raw())


SWARM = found(key_of(1), certificates="verified")


def claims(certificate: bytes = CERTIFICATE, word: Any = "claimed") -> dict[str, Any]:
    verdicts = tuple(RankVerdict(rank, word, certificate) for rank in RANKS)
    return {"accumulation": "F32", "verdicts": verdicts}


def record(number: int, **changes: Any) -> CapabilityRecord:
    return capability(node(number), **claims() | changes)


def verdict(number: int, auditor: int, word: Any = "verified", at: int = WALL, **changes: Any) -> bytes:
    values: dict[str, Any] = {
        "node_id": node(number),
        "certificate": CERTIFICATE,
        "verdict": word,
        "ranks": RANKS,
        "reason": "",
        "n_rows": 256,
        "evidence": bytes(32),
        "issued": at,
        "expires": at + VERDICT_LIFETIME,
    }
    return sign_verdict(AuditorVerdict(**values | changes), key_of(auditor), SWARM.digest)


# --- the book -----------------------------------------------------------------------------------------------


def book(own: int = 9, auditors: tuple[int, ...] = (1, 2, 3), n_needed: int = 1) -> VerdictBook:
    made = VerdictBook(node(own), SWARM.digest)
    made.know_auditors(Auditors(frozenset(map(node, auditors)), n_needed))
    return made


def test_how_many_auditors_must_agree() -> None:
    assert [auditors_needed(n, may_lie=True) for n in range(1, 8)] == [1, 1, 1, 2, 2, 2, 3]
    assert [auditors_needed(n, may_lie=False) for n in range(1, 8)] == [1] * 7


# (own number, needed, verdicts as (auditor, word, changes), what the node says itself, what is known)
COUNTED: dict[str, tuple[int, int, list[tuple[int, str, dict[str, Any]]], str, Verdict]] = {
    "its own word": (9, 1, [], "claimed", "claimed"),
    "its own word that it is verified": (9, 1, [], "verified", "claimed"),
    "an auditor's": (9, 1, [(1, "verified", {})], "claimed", "verified"),
    "an auditor's, and its own": (9, 1, [(1, "verified", {})], "verified", "verified"),
    "too few": (9, 2, [(1, "verified", {})], "claimed", "claimed"),
    "enough": (9, 2, [(1, "verified", {}), (2, "verified", {})], "claimed", "verified"),
    "one that is against it": (9, 1, [(1, "verified", {}), (2, "unfit", {})], "claimed", "unfit"),
    "one liar of many": (
        9,
        2,
        [(1, "verified", {}), (2, "verified", {}), (3, "unfit", {})],
        "claimed",
        "verified",
    ),
    "wrong weights": (9, 1, [(1, "quarantined", {})], "claimed", "unfit"),
    "of another certificate": (
        9,
        1,
        [(1, "verified", {"certificate": OTHER_CERTIFICATE})],
        "claimed",
        "claimed",
    ),
    "for another rank": (9, 1, [(1, "verified", {"ranks": ("bulk",)})], "claimed", "claimed"),
    "fit by others' word alone": (9, 1, [(1, "verified", {})], "none", "none"),
    "unfit by its own word": (9, 1, [(1, "verified", {})], "unfit", "unfit"),
    "our own verdict, alone": (1, 3, [(1, "verified", {})], "claimed", "verified"),
    "our own verdict, against all others'": (
        1,
        2,
        [(1, "unfit", {}), (2, "verified", {}), (3, "verified", {})],
        "claimed",
        "unfit",
    ),
}


@pytest.mark.parametrize("what", COUNTED)
def test_what_is_known_of_a_node(what: str) -> None:
    own, needed, said, word, expected = COUNTED[what]
    held = book(own, n_needed=needed)
    for auditor, found_word, changes in said:
        assert held.take(verdict(5, auditor, found_word, **changes), NOW.wall) == node(5)
    claimed = () if word == "none" else claims(word=word)["verdicts"]
    assert held.verdict_of(record(5, verdicts=claimed), "output") == expected


def test_who_is_no_auditor_any_more_does_not_count() -> None:
    held = book()
    held.take(verdict(5, 1), NOW.wall)
    held.know_auditors(Auditors(frozenset({node(2)}), 1))
    assert held.verdict_of(record(5), "output") == "claimed"
    held.know_auditors(Auditors(frozenset({node(1)}), 1))
    assert held.verdict_of(record(5), "output") == "verified"


REFUSED: dict[str, tuple[bytes, str]] = {
    "of itself": (verdict(5, 5), "own_verdict"),
    "by nobody who is an auditor": (verdict(5, 7), "not_an_auditor"),
    "expired": (verdict(5, 1, at=WALL - VERDICT_LIFETIME - seconds(601)), "expired"),
    "of the future": (verdict(5, 1, at=WALL + seconds(601)), "out_of_bounds"),
    "for too long": (verdict(5, 1, expires=WALL + VERDICT_LIFETIME + 1), "out_of_bounds"),
    "with a spoilt signature": (verdict(5, 1)[:-1] + bytes([verdict(5, 1)[-1] ^ 1]), "bad_signature"),
    "of nothing": (b"", "malformed"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_verdict_that_is_not_good_is_refused(what: str) -> None:
    data, code = REFUSED[what]
    held = book()
    with pytest.raises(RemoteProtocolError) as refused:
        held.take(data, NOW.wall)
    assert refused.value.code == code
    assert held.verdict_of(record(5), "output") == "claimed"


def test_an_older_verdict_takes_nothing_back() -> None:
    held = book()
    held.take(verdict(5, 1, at=WALL + 2), NOW.wall)
    assert held.take(verdict(5, 1, "unfit", at=WALL + 1), NOW.wall) is None
    assert held.take(verdict(5, 1, "unfit", at=WALL + 2), NOW.wall) is None
    assert held.verdict_of(record(5), "output") == "verified"
    assert held.take(verdict(5, 1, "unfit", at=WALL + 3), NOW.wall) == node(5)
    assert held.verdict_of(record(5), "output") == "unfit"


def test_what_has_expired_is_forgotten() -> None:
    held = book()
    held.take(verdict(5, 1), NOW.wall)
    assert held.expire(after(NOW.wall, VERDICT_LIFETIME)) == []
    late = after(after(NOW.wall, VERDICT_LIFETIME), seconds(601))
    assert held.expire(late) == [node(5)]
    assert held.verdict_of(record(5), "output") == "claimed"


def test_what_a_node_shows_is_enough_and_one_more() -> None:
    held = book(auditors=(1, 2, 3, 4), n_needed=1)
    for auditor in (1, 2, 3):
        held.take(verdict(5, auditor), NOW.wall)
    held.take(verdict(5, 4, "unfit"), NOW.wall)
    assert len(held.for_record(node(5), CERTIFICATE)) == 2
    assert held.for_record(node(5), OTHER_CERTIFICATE) == ()


def test_the_book_is_bounded_and_auditors_verdicts_go_last(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VERDICTS_MAX == 4096
    monkeypatch.setattr("kvasir_proto.verdict_book.VERDICTS_MAX", 4)
    held = book(auditors=tuple(range(1, 13)))
    for auditor in range(1, 13):
        held.take(verdict(20, auditor, at=WALL + auditor), NOW.wall)
    assert len(held._held[node(20)]) == 4
    for number in range(21, 27):
        held.take(verdict(number, 1, at=WALL + number), NOW.wall)
    assert sum(map(len, held._held.values())) == 4
    monkeypatch.undo()
    held = book(auditors=tuple(range(1, 13)))
    for auditor in range(1, 13):
        held.take(verdict(20, auditor, at=WALL + auditor), NOW.wall)
    assert len(held._held[node(20)]) == AUDITORS_OF_A_NODE_MAX


# --- whom to challenge --------------------------------------------------------------------------------------


def at(moment: int) -> Instant:
    return Instant(seconds(1000) + moment)


def test_one_challenge_at_a_time_and_a_pause_between() -> None:
    challenges = Challenges(random.Random(1))
    challenges.need([node(5), node(6)], at(0))
    later = at(SPREAD)
    first = challenges.next_due(later)
    assert first in (node(5), node(6))
    assert challenges.next_due(later) is None, "one at a time"
    challenges.note_done(first, later)
    assert challenges.next_due(later) is None, "and a pause"
    second = challenges.next_due(after(later, SPACING))
    assert {first, second} == {node(5), node(6)}


def test_a_node_that_cannot_be_challenged_is_tried_more_and_more_seldom() -> None:
    challenges = Challenges(random.Random(1))
    moment, pauses = at(0), []
    for _ in range(14):
        began = moment
        challenges.need([node(5)], moment)
        while challenges.next_due(moment) is None:
            deadline = challenges.next_deadline()
            assert deadline is not None
            assert deadline > moment
            moment = deadline
        pauses.append(moment - began)
        challenges.note_failed(node(5), moment)
    assert pauses[0] <= SPREAD
    assert RETRY_FIRST <= pauses[1] <= RETRY_FIRST + SPREAD
    assert max(pauses) <= RETRY_MAX + SPREAD
    assert pauses[-1] >= RETRY_MAX
    challenges.need([node(5)], moment)
    challenges.note_done(node(5), moment)
    challenges.need([], moment)
    challenges.need([node(5)], moment)
    assert challenges.next_due(after(moment, SPREAD)) == node(5), "it was well once, so all is forgotten"


def test_a_challenge_that_nobody_ends_ends_by_itself() -> None:
    challenges = Challenges(random.Random(1))
    challenges.need([node(5)], at(0))
    assert challenges.next_due(at(SPREAD)) == node(5)
    over = at(SPREAD + CHALLENGE_TIMEOUT)
    assert challenges.next_deadline() == over
    assert challenges.next_due(over) is None
    assert challenges.current is None


def test_who_could_not_be_challenged_is_tried_again_without_being_named_again() -> None:
    challenges = Challenges(random.Random(1))
    challenges.need([node(5)], at(0))
    assert challenges.next_due(at(SPREAD)) == node(5)
    challenges.note_failed(node(5), at(SPREAD))
    assert challenges.next_deadline() == at(SPREAD + RETRY_FIRST)
    assert challenges.next_due(at(SPREAD + RETRY_FIRST)) == node(5)


def test_what_is_remembered_of_failures_is_bounded() -> None:
    challenges = Challenges(random.Random(1))
    for number in range(PATIENCES_MAX + 10):
        challenges.note_failed(NodeId(str(number)), at(number))
    assert len(challenges._patience) == PATIENCES_MAX


def test_who_needs_none_any_more_is_not_challenged() -> None:
    challenges = Challenges(random.Random(1))
    challenges.need([node(5)], at(0))
    challenges.need([], at(1))
    assert challenges.next_due(at(SPREAD)) is None
    assert challenges.next_deadline() is None


# --- a node's part ------------------------------------------------------------------------------------------


def done(number: int, word: Any = "verified", **changes: Any) -> ChallengeDone:
    values: dict[str, Any] = {
        "node_id": node(number),
        "certificate": CERTIFICATE,
        "ranks": RANKS,
        "word": word,
        "reason": "why",
        "n_rows": 256,
        "evidence": bytes(32),
    }
    return ChallengeDone(**values | changes)


def auditor(electors: tuple[int, ...] = (1, 2), own: int = 1) -> Verification:
    made = Verification(key_of(own), SWARM, random.Random(1), NOW)
    made.know_electors(frozenset(map(node, electors)))
    made.drain()
    return made


def challenged(verification: Verification, *records: CapabilityRecord, now: Now = NOW) -> list[NodeId]:
    """Whom it challenges within a while."""
    verification.review(records, None, now)
    verification.tick(Now(after(now.instant, SPREAD), now.wall))
    return [each.node_id for each in verification.drain() if isinstance(each, ChallengeDue)]


def test_an_auditor_challenges_who_is_not_verified() -> None:
    assert challenged(auditor(), record(5)) == [node(5)]
    assert challenged(auditor(), record(1)) == [], "not itself"
    assert challenged(auditor(electors=(2, 3)), record(5)) == [], "it is no auditor"
    assert challenged(auditor(), record(5, accumulation="F16")) == [], "it says itself that it adds in F16"
    assert challenged(auditor(), record(5, verdicts=())) == [], "it shows no certificate"


def test_nobody_is_challenged_where_members_are_taken_at_their_word() -> None:
    claimed = found(key_of(1))
    verification = Verification(key_of(1), claimed, random.Random(1), NOW)
    verification.know_electors(frozenset({node(1)}))
    assert challenged(verification, record(5)) == []
    assert not verification.is_auditor
    assert verification.next_deadline() is None
    assert verification.verdict_of(record(5, **claims(word="verified")), "output") == "verified"


def test_enough_auditors_and_one_more_challenge_a_node_and_the_others_need_not() -> None:
    third = auditor(electors=(1, 2, 3), own=3)
    shown = record(5, auditor_verdicts=(verdict(5, 1),))
    third.take_record(shown, NOW)
    third.drain()
    assert challenged(third, shown) == [node(5)]
    third = auditor(electors=(1, 2, 3), own=3)
    shown = record(5, auditor_verdicts=(verdict(5, 1), verdict(5, 2)))
    third.take_record(shown, NOW)
    third.drain()
    assert challenged(third, shown) == []


def test_a_verdict_is_told_the_node_and_one_against_it_everybody() -> None:
    for word in ("verified", "unfit", "quarantined"):
        verification = auditor()
        assert challenged(verification, record(5)) == [node(5)]
        verification.finish(done(5, word), NOW)
        output = verification.drain()
        (told,) = (each for each in output if isinstance(each, Send))
        assert told.to == node(5)
        assert isinstance(told.message, VerdictNotice)
        published = [each.data for each in output if isinstance(each, Publish)]
        assert published == ([] if word == "verified" else [told.message.verdict])
        assert any(isinstance(each, Notice) for each in output)
        expected = "verified" if word == "verified" else "unfit"
        assert verification.verdict_of(record(5), "output") == expected
        other = auditor(own=2)
        assert other.take(told.message.verdict, NOW)
        assert other.verdict_of(record(5), "output") == expected
        assert challenged(verification, record(5, auditor_verdicts=(told.message.verdict,))) == []


def test_a_challenge_that_failed_verifies_nothing_and_is_made_again() -> None:
    verification = auditor()
    assert challenged(verification, record(5)) == [node(5)]
    verification.finish(ChallengeFailed(node(5), "it did not answer"), NOW)
    assert not [each for each in verification.drain() if isinstance(each, Send | Publish)]
    assert verification.verdict_of(record(5), "output") == "claimed"
    later = Now(after(NOW.instant, RETRY_FIRST), NOW.wall)
    assert challenged(verification, record(5), now=later) == [node(5)]


def test_a_result_that_nobody_waits_for_any_more_says_nothing() -> None:
    verification = auditor()
    verification.finish(done(5), NOW)
    assert verification.drain() == []
    assert verification.verdict_of(record(5), "output") == "claimed"


def test_who_was_found_unfit_is_challenged_again_with_another_certificate_only() -> None:
    verification = auditor()
    challenged(verification, record(5))
    verification.finish(done(5, "unfit"), NOW)
    verification.drain()
    later = Now(after(NOW.instant, seconds(7200)), after(NOW.wall, seconds(7200)))
    assert challenged(verification, record(5), now=later) == []
    again = record(5, **claims(OTHER_CERTIFICATE))
    assert verification.verdict_of(again, "output") == "claimed", "nothing is known of that one"
    assert challenged(verification, again, now=later) == [node(5)]


def test_a_verdict_is_renewed_before_it_expires() -> None:
    verification = auditor()
    challenged(verification, record(5))
    verification.finish(done(5), NOW)
    verification.drain()
    for wait, expected in [(VERDICT_RENEWED_AFTER - 1, []), (VERDICT_RENEWED_AFTER, [node(5)])]:
        later = Now(after(NOW.instant, Duration(wait)), after(NOW.wall, Duration(wait)))
        assert challenged(verification, record(5), now=later) == expected


def test_a_node_that_started_again_is_reminded_once_for_each_record() -> None:
    verification = auditor()
    challenged(verification, record(5))
    verification.finish(done(5), NOW)
    verification.drain()

    def reminders(sequence: int) -> int:
        verification.review([record(5, sequence=sequence)], None, NOW)
        return len([each for each in verification.drain() if isinstance(each, Send)])

    assert [reminders(each) for each in (1, 1, 2, 2)] == [1, 0, 1, 0]


def test_a_node_shows_what_bears_it_out() -> None:
    subject = auditor(own=5)
    own = record(5)
    assert subject.borne_out(own) == own
    subject.take(verdict(5, 1), NOW)
    shown = subject.borne_out(own)
    assert [each.verdict for each in shown.verdicts] == ["verified"] * 3
    assert shown.auditor_verdicts == (verdict(5, 1),)
    fresh = auditor(own=9)
    fresh.take_record(shown, NOW)
    assert fresh.verdict_of(shown, "output") == "verified", "who hears of it for the first time can check it"
    stranger = auditor(electors=(7,), own=9)
    stranger.take_record(shown, NOW)
    assert stranger.verdict_of(shown, "output") == "claimed"


def test_who_founded_may_begin_by_its_own_word_and_nobody_else() -> None:
    verification = auditor(own=2)
    assert verification.may_begin(record(1))
    assert not verification.may_begin(record(5))
    verification.take(verdict(1, 2, "unfit"), NOW)
    assert not verification.may_begin(record(1))


@pytest.mark.parametrize(
    "accumulation, known, may_begin, expected",
    [
        ("F32", "verified", False, True),
        ("F32", "claimed", False, False),
        ("F32", "claimed", True, True),
        ("F32", "none", True, False),
        ("F32", "unfit", True, False),
        ("F16", "verified", True, False),
        ("UNKNOWN", "verified", True, False),
    ],
)
def test_who_may_be_backbone_where_words_are_not_enough(
    accumulation: Any, known: Verdict, may_begin: bool, expected: bool
) -> None:
    said = record(5, accumulation=accumulation)
    assert may_be_backbone(said, SWARM.manifest, known, may_begin=may_begin) == expected


# --- whole cores --------------------------------------------------------------------------------------------


def output_holders(swarm: SmallSwarm, backbone: int = 1) -> set[NodeId]:
    core = swarm.node(backbone).core
    assert core is not None
    plan = core.view().plan
    if plan is None:
        return set()
    last = max(each.layer for each in plan.layers)
    return {each for each in plan.nodes if last in plan.shard_of(each).layers}


def verifying_swarm(*numbers: int, outcome: Any = "verified", **manifest: Any) -> SmallSwarm:
    swarm = SmallSwarm(0, certificates="verified", **manifest)

    def challenge(_auditor: NodeId, subject: NodeId) -> ChallengeResult:
        return replace(done(5, outcome), node_id=subject)

    swarm.challenge = challenge
    for number in numbers:
        swarm.add(number, **claims())
    return swarm


def state_of(swarm: SmallSwarm, number: int) -> tuple[str, str]:
    core = swarm.node(number).core
    assert core is not None
    view = core.view()
    return view.state, view.reason


def test_output_layers_go_to_who_is_verified_and_until_then_to_the_backbone() -> None:
    swarm = verifying_swarm(1, 2, 3)
    others = {node(2), node(3)}
    seen: list[set[NodeId]] = []

    def is_verified() -> bool:
        held = output_holders(swarm)
        if held and held not in seen:
            seen.append(held)
        return others <= held

    swarm.run(seconds(60), is_verified)
    assert seen[0] == {node(1)}, "nobody is taken at its word"
    swarm.run(seconds(20))
    assert state_of(swarm, 1) == ("ready", "")
    core = swarm.node(3).core
    assert core is not None
    record_of_2 = core.record_of(node(2))
    assert record_of_2 is not None
    assert core.verdict_of(record_of_2, "output") == "verified"
    assert record_of_2.auditor_verdicts


@pytest.mark.parametrize("outcome", ["unfit", "quarantined"])
def test_who_is_found_out_gets_no_output_layer(outcome: str) -> None:
    swarm = verifying_swarm(1, 2, 3, outcome=outcome)
    swarm.run(seconds(60))
    assert output_holders(swarm) == {node(1)}
    assert state_of(swarm, 1)[0] == "degraded"
    core = swarm.node(1).core
    assert core is not None
    quarantined = {each.node_id for each in core.view().verdicts}
    assert quarantined == ({node(2), node(3)} if outcome == "quarantined" else set())


def test_who_cannot_be_challenged_gets_no_output_layer() -> None:
    swarm = verifying_swarm(1, 2, 3)
    swarm.challenge = lambda _, subject: ChallengeFailed(subject, "it does not answer")
    swarm.run(seconds(120))
    assert output_holders(swarm) == {node(1)}
    core = swarm.node(1).core
    assert core is not None
    assert not core.view().verdicts, "that is no fault of anybody's"


def test_a_node_that_calls_itself_verified_is_not() -> None:
    swarm = verifying_swarm(1)
    swarm.challenge = lambda _, subject: ChallengeFailed(subject, "it does not answer")
    swarm.add(2, **claims(word="verified"))
    swarm.run(seconds(60))
    assert output_holders(swarm) == {node(1)}
    swarm.kill(swarm.node(1))
    swarm.run(seconds(60))
    core = swarm.node(2).core
    assert core is not None
    assert core.view().role.value == "follower", "it is no candidate either"


def test_a_verified_standby_takes_over_and_who_was_verified_stays_so() -> None:
    swarm = verifying_swarm(1, 2, 3, 4)

    def all_are_verified() -> bool:
        core = swarm.node(1).core
        assert core is not None
        records = [core.record_of(node(each)) for each in (2, 3, 4)]
        return all(each is not None and core.verdict_of(each, "output") == "verified" for each in records)

    swarm.run(seconds(90), all_are_verified)
    swarm.run(seconds(30))
    held = output_holders(swarm)
    assert held
    assert node(1) not in held
    swarm.kill(swarm.node(1))

    def is_led() -> bool:
        cores = [swarm.node(each).core for each in (2, 3, 4)]
        return any(core is not None and core.view().role.value == "backbone" for core in cores)

    swarm.run(seconds(30), is_led)


def test_verdicts_are_renewed_in_a_swarm_in_which_nothing_happens() -> None:
    swarm = verifying_swarm(1, 2)
    swarm.run(seconds(60), lambda: node(2) in output_holders(swarm))
    swarm.run(seconds(60))
    (before,) = {each for each in swarm.node(1).told if isinstance(each, ChallengeDue)}
    count = swarm.node(1).told.count(before)
    # A day would take too long to simulate: let what was said be that old.
    core = swarm.node(1).core
    assert core is not None
    held = core._verification._book._held[node(2)]
    said = held[node(1)]
    held[node(1)] = said._replace(
        verdict=replace(said.verdict, issued=said.verdict.issued - VERDICT_RENEWED_AFTER)
    )
    swarm.run(seconds(70))
    assert swarm.node(1).told.count(before) == count + 1


def test_a_founder_whose_sums_nobody_knows_never_stands() -> None:
    swarm = SmallSwarm(0, certificates="verified")
    alone = swarm.add(1, verdicts=claims()["verdicts"])
    swarm.run(seconds(60))
    assert alone.core is not None
    assert alone.core.view().fence is None
