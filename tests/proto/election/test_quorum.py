"""Quorums of electorates that can act at the same time share an honest elector: all of them are tried.

DESIGN section 4: changed one member at a time; an open electorate of n tolerates (n - 1) // 3 liars.
"""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from kvasir_proto.election.quorum import endorsements_needed, instant_of_quorum, liars_max
from kvasir_proto.instants import Instant
from kvasir_proto.limits import ELECTORS_MAX
from kvasir_proto.term_proof import Electorate, ElectorateRule, make_electorate

MEMBERS = [bytes([number]) * 32 for number in range(ELECTORS_MAX)]
RULES: tuple[ElectorateRule, ...] = ("pinned", "open")
FROM_THREE_TO_FOUR = ("open", 3, 4)
"""Three tolerate no liar, so one that begins to lie while only some of the three know of the fourth is not
tolerated either (docs/explanation/election.md, "what is not promised")."""


def electorate(rule: ElectorateRule, size: int) -> Electorate:
    return make_electorate(size, rule, MEMBERS[:size])


def smallest_overlap(first: Electorate, first_size: int, second: Electorate, second_size: int) -> int:
    return min(
        len(set(one) & set(other))
        for one in combinations(first.members, first_size)
        for other in combinations(second.members, second_size)
    )


NEIGHBOURS = [
    (rule, size, other)
    for rule in RULES
    for size, other in [*pairwise(range(1, 8)), *((b, a) for a, b in pairwise(range(1, 8)))]
]


@pytest.mark.parametrize("rule, size, other", NEIGHBOURS)
def test_two_quorums_of_neighbours_share_more_than_may_lie(
    rule: ElectorateRule, size: int, other: int
) -> None:
    """At most one backbone a term, and no lease beside another, while some know only the one before."""
    one, two = electorate(rule, size), electorate(rule, other)
    liars = max(liars_max(one), liars_max(two))
    shared = smallest_overlap(one, one.quorum, two, two.quorum)
    assert (shared > liars) == ((rule, *sorted((size, other))) != FROM_THREE_TO_FOUR)


@pytest.mark.parametrize("rule, size, other", NEIGHBOURS)
def test_whoever_is_elected_hears_of_a_successor_that_may_be_committed(
    rule: ElectorateRule, size: int, other: int
) -> None:
    """Votes of a quorum and the endorsements that commit a successor share an honest elector, always."""
    one, two = electorate(rule, size), electorate(rule, other)
    liars = max(liars_max(one), liars_max(two))
    assert smallest_overlap(one, one.quorum, one, endorsements_needed(one, two)) > liars
    assert endorsements_needed(one, two) <= size


@pytest.mark.parametrize("rule", RULES)
def test_an_electorate_cannot_act_once_the_one_after_the_next_is_committed(rule: ElectorateRule) -> None:
    """Endorsers of the third know the second, and vote under the first no more. Every set is tried."""
    for first_size, second_size in pairwise(range(1, 8)):
        for one, two in (
            (electorate(rule, first_size), electorate(rule, second_size)),
            (electorate(rule, second_size), electorate(rule, first_size)),
        ):
            for third_size in (len(two.members) - 1, len(two.members) + 1):
                if (
                    not 1 <= third_size <= 7
                    or (
                        rule,
                        *sorted((first_size, second_size)),
                    )
                    == FROM_THREE_TO_FOUR
                ):
                    continue
                needed = endorsements_needed(two, electorate(rule, third_size))
                for endorsers in combinations(two.members, needed):
                    left = len(set(one.members) - set(endorsers))
                    assert left + liars_max(one) < one.quorum


def test_three_become_four_only_by_all_three() -> None:
    assert endorsements_needed(electorate("open", 3), electorate("open", 4)) == 3
    assert endorsements_needed(electorate("pinned", 3), electorate("pinned", 4)) == 2
    assert [endorsements_needed(electorate("open", n), electorate("open", n + 1)) for n in range(1, 7)] == [
        1, 2, 3, 3, 4, 5,
    ]  # fmt: skip


def test_instant_of_a_quorum_against_a_slow_twin() -> None:
    for instants in combinations(range(6), 4):
        for quorum in range(1, 6):
            slow = [each for each in instants if sum(other >= each for other in instants) >= quorum]
            found = instant_of_quorum([Instant(each) for each in instants], quorum)
            assert found == (max(slow) if slow else None)
