"""The evidence of rows: no bet that an honest node could win, and none that a liar survives."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.audit import sequential
from kvasir_proto.audit.drift import _THETA, ALARM, ALLOWED, ERROR_MAX, HONEST_MEAN, DriftAlarm
from kvasir_proto.audit.finding import Finding, Outcome, outcome_of
from kvasir_proto.audit.sequential import FOREIGN_CHANCE, LIFETIME_ROWS, SequentialTest, _factors
from tests.proto.audit.findings import finding, foreign


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_no_bet_pays_on_a_node_that_is_within_its_chances(allowed: float, flips: float, rare: float) -> None:
    """What makes Ville's inequality hold: each factor is at most 1 on average."""
    q = FOREIGN_CHANCE * rare
    p = min(1 - q, allowed * flips)
    rows = {
        "flipped": (p, _factors(finding(0, outcome="flipped", flip_chance=allowed))),
        "foreign": (q, _factors(foreign(0, flip_chance=allowed))),
        "same": (1 - p - q, _factors(finding(0, flip_chance=allowed))),
    }
    for bet in range(len(sequential._BETS)):
        assert sum(chance * factors[bet] for chance, factors in rows.values()) <= 1 + 1e-12
        assert all(factors[bet] >= 0 for _, factors in rows.values())


@given(st.lists(st.tuples(st.sampled_from(("same", "flipped", "foreign")), st.integers(0, 2)), max_size=30))
def test_evidence_is_the_sum_over_all_beginnings(rows: list[tuple[Outcome, int]]) -> None:
    """Beside the plain definition: of the node, and of each expert, from each row on. Beyond what convicts it
    is not counted.
    """
    test = SequentialTest()
    findings = [finding(0, outcome=outcome, expert=expert) for outcome, expert in rows]
    for each in findings:
        test.add(each)
    if test.evidence > 1e6:
        return
    total = 0.0
    for bet in range(len(sequential._BETS)):
        for expert in (None, 0, 1, 2):
            mine = [_factors(each)[bet] for each in findings if expert in (None, each.expert)]
            total += sum(math.prod(mine[begin:]) / LIFETIME_ROWS for begin in range(len(mine)))
    assert test.evidence == pytest.approx(total / (2 * len(sequential._BETS)), rel=1e-6)


def test_the_stake_of_a_lifetime_is_one() -> None:
    """If every factor were 1 the evidence would have grown to what was put in: 1 in a lifetime."""
    test = SequentialTest()
    original = sequential._factors
    try:
        sequential._factors = lambda finding: (1.0, 1.0)
        for number in range(LIFETIME_ROWS):
            test.add(finding(number, expert=number % 7))
    finally:
        sequential._factors = original
    assert test.evidence == pytest.approx(1.0)


@pytest.mark.parametrize("n_before", [0, 100, 5000])
def test_three_rows_that_nothing_explains_convict_at_any_time(n_before: int) -> None:
    test = SequentialTest()
    for number in range(n_before):
        test.add(finding(number, expert=number % 50))
    for number in range(3):
        assert not test.is_convinced
        test.add(foreign(n_before + number))
    assert test.is_convinced


def test_one_wrong_expert_among_many_is_found_by_its_own_rows() -> None:
    test = SequentialTest()
    for number in range(2000):
        is_wrong = number % 500 == 0
        test.add(foreign(number, expert=400) if is_wrong else finding(number, expert=number % 300))
        assert test.is_convinced == (number >= 1000)


def test_flips_count_where_there_are_too_many() -> None:
    honest, liar = SequentialTest(), SequentialTest()
    draws = random.Random(1)
    for number in range(3000):
        outcome: Outcome = "flipped" if draws.random() < 0.003 else "same"
        honest.add(finding(number, outcome=outcome))
        outcome = "flipped" if draws.random() < 0.2 else "same"
        liar.add(finding(number, outcome=outcome))
    assert honest.evidence < 1
    assert liar.is_convinced


def test_rows_of_which_nothing_can_be_said_change_nothing() -> None:
    test = SequentialTest()
    for number in range(100):
        test.add(finding(number, outcome="void", residual=math.inf, gate=0.0))
    assert (test.n_rows, test.evidence) == (0, 0.0)


def test_only_so_many_experts_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "STRATA_MAX", 10)
    test = SequentialTest()
    test.add(foreign(0, expert=99))
    for number in range(1, 200):
        test.add(finding(number, expert=number % 50))
    assert len(test._strata) == 10
    assert (0, 99) in test._strata, "the one with most evidence stays"
    assert test._of_strata == pytest.approx(sum(sum(each) for each in test._strata.values()))


# --- drift --------------------------------------------------------------------------------------------------


def test_the_bound_on_drift_is_that_of_its_rule() -> None:
    """theta: a row of mean m, 1 at most, has no more than this chance to grow the sum exponentially."""
    left = 1 - HONEST_MEAN + HONEST_MEAN * math.exp(_THETA)
    assert left <= math.exp(_THETA * ALLOWED)
    assert left == pytest.approx(math.exp(_THETA * ALLOWED), rel=1e-3)
    assert LIFETIME_ROWS * math.exp(-_THETA * ALARM) == pytest.approx(ERROR_MAX)


@pytest.mark.parametrize("used, n_rows", [(1.0, 18), (0.75, 35), (0.6, 87), (0.5, None), (0.1, None)])
def test_the_alarm_comes_before_a_row_is_outside_its_gate(used: float, n_rows: int | None) -> None:
    alarm = DriftAlarm()
    raised_at = None
    for number in range(1000):
        alarm.add(finding(number, residual=used * 2e-6))
        if alarm.is_raised and raised_at is None:
            raised_at = number + 1
    assert raised_at == n_rows


def test_honest_rows_take_back_what_bad_ones_gave() -> None:
    alarm = DriftAlarm()
    for number in range(10_000):
        alarm.add(finding(number, residual=2e-6 if number % 3 == 0 else 2e-7))
    assert alarm.level < 2
    alarm.add(finding(0, outcome="flipped", residual=1e-3))
    alarm.add(finding(0, outcome="void", residual=math.inf))
    assert alarm.level < 2


# --- what a row is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "residual, sound, whole, explained, outcome",
    [
        (1e-7, True, True, False, "same"),
        (2e-6, True, True, False, "same"),
        (1e-3, True, True, True, "flipped"),
        (1e-3, True, True, False, "foreign"),
        (math.inf, True, False, False, "foreign"),
        (1e-7, True, False, True, "foreign"),
        (math.nan, True, True, True, "foreign"),
        (math.inf, True, True, True, "foreign"),
        (-1.0, True, True, True, "foreign"),
        (1e-7, False, True, True, "void"),
        (math.inf, False, False, False, "void"),
    ],
)
def test_what_cannot_be_judged_is_held_against_the_node_but_a_bad_referee_against_nobody(
    residual: float, sound: bool, whole: bool, explained: bool, outcome: Outcome
) -> None:
    named = outcome_of(residual, 2e-6, is_referee_sound=sound, is_answer_whole=whole, is_explained=explained)
    assert named == outcome


def test_without_a_gate_nothing_can_be_said() -> None:
    for gate, residual in itertools.product((0.0, -1.0, math.nan), (0.0, 1.0)):
        named = outcome_of(residual, gate, is_referee_sound=True, is_answer_whole=True, is_explained=True)
        assert named == "void"


def test_a_row_uses_at_most_all_of_its_gate() -> None:
    rows: list[tuple[Finding, float]] = [
        (finding(0, residual=1e-6), 0.5),
        (finding(0, residual=1.0), 1.0),
        (finding(0, residual=math.inf), 1.0),
        (finding(0, residual=math.nan), 1.0),
        (finding(0, gate=0.0), 1.0),
    ]
    assert [each.excess for each, _ in rows] == [used for _, used in rows]
