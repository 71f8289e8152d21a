"""The audit of all nodes: what it takes for evidence, what follows, and what never clears anybody."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.audit import core as audit_core
from kvasir_proto.audit.core import AuditCore, NoteClaim, NoteFindings
from kvasir_proto.audit.finding import Finding
from kvasir_proto.audit.verdict import Verdict
from kvasir_proto.effects import Now
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import node_id_of
from kvasir_proto.instants import Instant, WallTime
from kvasir_proto.messages.membership import Ack
from tests.proto.audit.findings import FIRST, NOW, SECOND, THIRD, finding, foreign


def made() -> AuditCore:
    return AuditCore(draws=random.Random(1))


def after(core: AuditCore, findings: Iterable[Finding]) -> list[Verdict]:
    core.command(NoteFindings(tuple(findings)), NOW)
    return core.drain()


@pytest.mark.parametrize(
    "residual, slope, word",
    [
        (0.004, 1.00005, "unfit"),  # F16 sums
        (0.013, 0.9998, "unfit"),  # and the worst that were measured
        (0.01, 1.01, "quarantined"),  # times 1.01
        (1e-4, 1.0001, "quarantined"),
        (1.0, 0.0, "quarantined"),  # zeros
        (0.12, 0.97, "quarantined"),  # Q4 for Q8
        (3.2, 3.4, "quarantined"),  # every other block twice as large
        (math.inf, math.inf, "quarantined"),  # not finite
        (math.nan, 1.0, "quarantined"),
    ],
)
def test_what_the_rows_are_like_makes_the_verdict(residual: float, slope: float, word: str) -> None:
    rows = [foreign(number, residual=residual, slope=slope) for number in range(3)]
    (verdict,) = after(made(), rows)
    assert (verdict.node_id, verdict.word, verdict.n_rows, verdict.n_foreign) == (FIRST, word, 3, 3)
    assert "3 of 3" in verdict.reason


def test_of_two_who_disagree_the_one_whom_the_referee_finds_wrong_is_accused() -> None:
    core = made()
    rows = [row for number in range(3) for row in (foreign(number), finding(number, node_id=SECOND))]
    assert [each.node_id for each in after(core, rows)] == [FIRST]


def test_an_honest_node_is_never_accused_whatever_the_others_are() -> None:
    core = made()
    for number in range(2000):
        rows = [finding(number), foreign(number, node_id=SECOND), finding(number, node_id=THIRD)]
        assert all(each.node_id == SECOND for each in after(core, rows))
    assert [each.node_id for each in core.standings()] == sorted([FIRST, SECOND, THIRD])


def test_one_and_the_same_request_is_evidence_once() -> None:
    core = made()
    assert not after(core, [foreign(0)] * 50 + [foreign(1)] * 50)
    standing = core.standing_of(FIRST)
    assert standing is not None
    assert (standing.n_rows, standing.n_foreign) == (2, 2)
    assert after(core, [foreign(2)])


def test_only_so_many_requests_are_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_core, "REQUESTS_KEPT", 4)
    core = made()
    after(core, [finding(number) for number in range(5)])
    after(core, [finding(4), finding(0)])
    standing = core.standing_of(FIRST)
    assert standing is not None
    assert standing.n_rows == 6


def test_rows_of_which_nothing_can_be_said_are_no_evidence_and_no_excuse() -> None:
    core = made()
    after(core, [foreign(0), foreign(1)])
    assert not after(core, [finding(number, outcome="void", gate=0.0) for number in range(2, 500)])
    assert after(core, [foreign(501)])


def test_a_verdict_is_said_once_and_only_another_certificate_ends_it() -> None:
    core = made()
    core.command(NoteClaim(FIRST, True, b"first"), NOW)
    (verdict,) = after(core, [foreign(number, residual=1.0) for number in range(3)])
    assert not after(core, [foreign(number) for number in range(3, 60)])
    assert not after(core, [finding(number) for number in range(60, 5000)])
    late = Now(Instant(1 << 62), WallTime(1 << 62))
    core.tick(late)
    core.command(NoteClaim(FIRST, True, b"first"), late)
    standing = core.standing_of(FIRST)
    assert (core.next_deadline(), core.drain()) == (None, [])
    assert standing is not None
    assert standing.verdict == verdict
    core.command(NoteClaim(FIRST, True, b"second"), late)
    standing = core.standing_of(FIRST)
    assert standing is not None
    assert (standing.verdict, standing.n_rows) == (None, 0)
    assert after(core, [foreign(number) for number in range(3)]), "and is looked at as before"


@pytest.mark.parametrize("how", ["says so", "was found out"])
def test_who_adds_in_less_than_f32_is_judged_by_whether_its_rows_are_right_at_all(how: str) -> None:
    core = made()
    if how == "says so":
        core.command(NoteClaim(FIRST, False), NOW)
    else:
        (verdict,) = after(core, [foreign(number) for number in range(3)])
        assert verdict.word == "unfit"
    assert not after(core, [foreign(number, residual=0.013) for number in range(3, 2000)])
    (verdict,) = after(core, [foreign(number, residual=0.5) for number in range(2000, 2003)])
    assert verdict.word == "quarantined"


def test_a_node_that_grows_worse_is_unfit_before_a_row_is_outside_its_gate() -> None:
    core = made()
    verdicts: list[Verdict] = []
    for number in range(400):
        residual = min(1.9e-6, 1e-7 * 1.01**number)
        row = finding(number, residual=residual)
        assert residual < row.gate
        verdicts += after(core, [row])
    (verdict,) = verdicts
    assert (verdict.word, verdict.n_foreign) == ("unfit", 0)
    assert "nearer to the gate" in verdict.reason


def test_too_many_flips_make_a_node_unfit() -> None:
    core = made()
    verdicts = after(core, [finding(number, outcome="flipped", residual=1e-3) for number in range(20)])
    assert [each.word for each in verdicts] == ["unfit"]
    assert "rounded another way" in verdicts[0].reason


def test_whom_there_is_a_verdict_of_is_remembered_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_core, "NODES_MAX", 8)
    core = made()
    after(core, [foreign(number) for number in range(3)])
    for number in range(10, 60):
        after(core, [finding(number, node_id=node_id_of(bytes([number]) * 32))])
    assert len(core.standings()) == 8
    standing = core.standing_of(FIRST)
    assert standing is not None
    assert standing.verdict is not None
    assert core.standing_of(THIRD) is None


def test_a_row_that_nothing_explains_has_the_next_ones_looked_at() -> None:
    core = made()
    core.choose(FIRST, 0, [0] * 500)
    after(core, [foreign(0)])
    assert core.choose(FIRST, 0, [0] * 10) == list(range(10))


@given(st.lists(st.sampled_from(("same", "flipped", "foreign", "void")), max_size=60))
def test_never_more_than_two_verdicts_and_never_a_milder_one(outcomes: list[str]) -> None:
    core = made()
    verdicts = after(
        core, [finding(number, outcome=each, residual=0.01) for number, each in enumerate(outcomes)]
    )
    assert [each.word for each in verdicts] in ([], ["unfit"], ["quarantined"], ["unfit", "quarantined"])


def test_it_has_no_messages() -> None:
    with pytest.raises(RemoteProtocolError, match="not for the audit"):
        made().receive(Ack(1, 1, 1, bytes(8), b""), FIRST, NOW)
