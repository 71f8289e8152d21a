"""Which electorate the winner of a term has to finish, of what its electors say they endorsed: a table.

And the other way round: for all sets of electors that commit a successor, and all sets that are heard, the
committed one is never let go of.
"""

from __future__ import annotations

from itertools import combinations

import pytest

from kvasir_proto.election.configuration import Proposal, successor_of
from kvasir_proto.election.quorum import endorsements_needed, liars_max
from kvasir_proto.election.unfinished import Unfinished
from kvasir_proto.term_proof import Electorate, ElectorateRule, make_electorate

MEMBERS = [bytes([number]) * 32 for number in range(8)]


def electorate(rule: ElectorateRule, size: int) -> Electorate:
    return make_electorate(5, rule, MEMBERS[:size], term=3)


def without(present: Electorate, member: int, term: int = 3) -> Proposal:
    """The backbone of a term proposes that this one goes."""
    remaining = [each for each in present.members if each != MEMBERS[member]]
    return Proposal(0, term, successor_of(present, remaining, 3), b"")


def heard(present: Electorate, endorsed: dict[int, Proposal | None]) -> Unfinished:
    unfinished = Unfinished(present)
    for number, proposal in endorsed.items():
        unfinished.hear(MEMBERS[number], proposal)
    return unfinished


@pytest.mark.parametrize(
    "rule, size, endorsers, unheard, is_pending",
    [
        ("open", 7, 0, 2, False),
        ("open", 7, 1, 0, False),
        ("open", 7, 1, 1, False),
        ("open", 7, 1, 2, True),
        ("open", 7, 2, 0, False),
        ("open", 7, 2, 1, True),
        ("open", 7, 3, 0, True),
        ("open", 4, 1, 0, False),
        ("open", 4, 1, 1, True),
        ("open", 4, 2, 0, True),
        ("open", 5, 1, 1, False),
        ("pinned", 3, 1, 0, False),
        ("pinned", 3, 1, 1, True),
        ("pinned", 5, 2, 0, False),
        ("pinned", 5, 2, 1, True),
    ],
)
def test_an_electorate_is_pending_as_long_as_it_may_be_committed(
    rule: ElectorateRule, size: int, endorsers: int, unheard: int, is_pending: bool
) -> None:
    present = electorate(rule, size)
    proposal = without(present, size - 1)
    said = {number: proposal if number < endorsers else None for number in range(size - unheard)}
    assert heard(present, said).proposal == (proposal if is_pending else None)


@pytest.mark.parametrize("rule, size", [("open", 4), ("open", 5), ("open", 7), ("pinned", 3), ("pinned", 5)])
def test_what_is_committed_is_never_let_go_of(rule: ElectorateRule, size: int) -> None:
    """Whoever committed it, whoever of them lies now, and whichever quorum is heard."""
    present = electorate(rule, size)
    proposal = without(present, size - 1)
    liars = liars_max(present)
    for endorsers in combinations(range(size), endorsements_needed(present, proposal.electorate)):
        for lying in combinations(endorsers, liars):
            for voters in combinations(range(size), present.quorum):
                said = {
                    number: proposal if number in endorsers and number not in lying else None
                    for number in voters
                }
                assert heard(present, said).proposal == proposal


def test_the_one_proposed_last_comes_first_and_hides_none_before_it() -> None:
    """Who endorsed the later one may have endorsed the earlier one before: it says the last only."""
    present = electorate("open", 7)
    earlier, later = without(present, 6, term=3), without(present, 5, term=4)
    assert heard(present, {0: later, 1: later, 2: later, 3: earlier, 4: None}).proposal == later
    all_heard = {0: earlier, 1: earlier, 2: later, 3: None, 4: None, 5: None, 6: None}
    assert heard(present, all_heard).proposal == earlier
    assert heard(present, all_heard | {1: None}).proposal is None


def test_nobody_speaks_twice_and_strangers_not_at_all() -> None:
    present = electorate("open", 4)
    proposal = without(present, 3)
    unfinished = heard(present, {0: proposal, 1: proposal, 2: None, 3: None})
    unfinished.hear(MEMBERS[0], None)
    unfinished.hear(MEMBERS[7], None)
    assert unfinished.proposal == proposal
