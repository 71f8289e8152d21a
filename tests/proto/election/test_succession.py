"""DESIGN section 4: which electorate next. One row a case; nodes are letters, the backbone is `a`."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from kvasir_proto.election.succession import next_electorate
from kvasir_proto.ids import NodeId

Rule = Literal["pinned", "open"]


def ids(letters: str) -> tuple[NodeId, ...]:
    return tuple(NodeId(each) for each in letters)


def step(
    members: str, rule: Rule, eligible: str, dead: str = "", convicted: str = "", backbone: str = "a"
) -> str | None:
    found = next_electorate(
        ids(members),
        rule,
        NodeId(backbone),
        eligible=ids(eligible),
        dead=frozenset(ids(dead)),
        convicted=frozenset(ids(convicted)),
    )
    return None if found is None else "".join(found)


@pytest.mark.parametrize(
    "members, rule, eligible, dead, convicted, expected",
    [
        # alone, and never two for long
        ("a", "pinned", "a", "", "", None),
        ("a", "pinned", "ab", "", "", None),
        ("a", "pinned", "abc", "", "", "ab"),
        ("ab", "pinned", "abc", "", "", "abc"),
        ("ab", "pinned", "ab", "", "", "a"),
        ("ab", "pinned", "a", "b", "", "a"),
        # growing in the caller's rank, odd sizes pinned, four and seven open
        ("abc", "pinned", "abcd", "", "", None),
        ("abc", "pinned", "acbed", "", "", "abce"),
        ("abc", "open", "abcd", "", "", "abcd"),
        ("abcd", "open", "abcdef", "", "", None),
        ("abcd", "open", "abcdefg", "", "", "abcde"),
        ("abcdefg", "pinned", "abcdefgh", "", "", None),
        # the dead: replaced first, or dropped while that leaves a better electorate
        ("abc", "pinned", "abd", "c", "", "abcd"),
        ("abcd", "pinned", "abd", "c", "", "abd"),
        ("abc", "pinned", "ab", "c", "", "ab"),
        ("abcdefg", "pinned", "abcdefh", "g", "", "abcdef"),
        ("abcdef", "pinned", "abcdefh", "", "", "abcdefh"),
        # an open one keeps its tolerance of a liar
        ("abcd", "open", "abc", "d", "", None),
        ("abcd", "open", "abce", "d", "", "abcde"),
        ("abcde", "open", "abce", "d", "", "abce"),
        ("abc", "open", "abde", "c", "", "ab"),
        # no elector of it would agree that one goes which lives: such a change would wait for ever
        ("abcde", "open", "abcde", "", "", None),
        ("abcdef", "open", "abcdef", "", "", None),
        ("abcdef", "open", "abcde", "", "", None),
        ("abcdef", "open", "abcdef", "b", "", "acdef"),
        # a liar leaves at once, whatever that costs, and does not come back
        ("abcd", "open", "abcd", "", "d", "abc"),
        ("abc", "open", "abcd", "", "d", None),
        ("abcd", "open", "abcde", "", "b", "acd"),
        ("a", "pinned", "a", "", "a", None),
        # a member of whom nobody knows keeps its vote
        ("abc", "pinned", "ab", "", "", None),
    ],
)
def test_next_electorate(
    members: str, rule: Rule, eligible: str, dead: str, convicted: str, expected: str | None
) -> None:
    assert step(members, rule, eligible, dead, convicted) == expected


@pytest.mark.parametrize("rule", ["pinned", "open"])
def test_policy_changes_one_member_at_a_time_and_comes_to_rest(rule: Rule) -> None:
    entropy = random.Random(4)
    for _ in range(2000):
        letters = "abcdefghij"
        members = "a" + "".join(sorted(entropy.sample(letters[1:], entropy.randint(0, 6))))
        dead = "".join(each for each in letters[1:] if entropy.random() < 0.2)
        convicted = "".join(each for each in letters[1:] if entropy.random() < 0.1)
        eligible = "".join(entropy.sample(letters, entropy.randint(1, 10)))
        seen = [members]
        while (following := step(seen[-1], rule, eligible, dead, convicted)) is not None:
            assert len(set(following) ^ set(seen[-1])) == 1
            assert 1 <= len(following) <= 7
            assert "a" in following, "the backbone keeps its vote"
            seen.append(following)
            assert len(seen) < 20, f"never at rest: {seen}"
        assert not set(seen[-1]) & set(convicted)
        if len(seen[-1]) == 2:
            raise AssertionError(f"at rest at two: {seen}, eligible {eligible}, dead {dead}")
