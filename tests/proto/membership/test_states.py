"""The transition table is whole, and claims merge the same whatever came first, or twice."""

from __future__ import annotations

import itertools
from functools import reduce
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.membership.states import LIVE, TRANSITIONS, Claim, Evidence, merge
from kvasir_proto.messages.membership import STATES, MemberState

claims = st.builds(
    Claim,
    st.integers(0, 3),
    st.sampled_from(STATES),
    st.sampled_from([b"a" * 8, b"b" * 8]),
    st.integers(0, 2),
    st.sampled_from([bytes(32), b"d" * 32]),
)


def test_every_state_has_an_answer_to_every_evidence() -> None:
    assert set(TRANSITIONS) == set(itertools.product(STATES, get_args(Evidence)))


@pytest.mark.parametrize(
    "path, end",
    [
        (("probe_failed", "suspicion_expired"), "dead"),
        (("probe_failed", "newer_incarnation", "suspicion_expired"), "alive"),
        (("probe_failed", "suspicion_expired", "newer_incarnation"), "alive"),
        (("departure", "probe_failed", "suspicion_expired"), "left"),
        (("departure", "newer_incarnation"), "alive"),
        (("suspicion_expired",), "alive"),
    ],
)
def test_lives_of_a_member(path: tuple[Evidence, ...], end: MemberState) -> None:
    state: MemberState = "alive"
    for evidence in path:
        state = TRANSITIONS[state, evidence]
    assert state == end


def test_only_the_member_itself_comes_back_to_life() -> None:
    for (before, evidence), state in TRANSITIONS.items():
        if before not in LIVE and state in LIVE:
            assert evidence == "newer_incarnation"


def slow_merge(all_claims: list[Claim]) -> Claim:
    """The same by brute force: of the highest incarnation, each field's best."""
    highest = max(claim.incarnation for claim in all_claims)
    of_it = [claim for claim in all_claims if claim.incarnation == highest]
    return Claim(
        highest,
        STATES[max(STATES.index(claim.state) for claim in of_it)],
        max(claim.instance for claim in of_it),
        *max((claim.record_sequence, claim.record_digest) for claim in of_it),
    )


@given(st.lists(claims, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_merging_is_the_brute_force_twin_in_any_order_with_any_repeats(
    some: list[Claim], shuffler: object
) -> None:
    repeated = some + some[: len(some) // 2]
    shuffler.shuffle(repeated)  # type: ignore[attr-defined]  # a random.Random
    assert reduce(merge, repeated) == slow_merge(some)


@given(claims, claims, claims)
def test_merge_is_commutative_associative_and_idempotent(one: Claim, two: Claim, three: Claim) -> None:
    assert merge(one, two) == merge(two, one)
    assert merge(merge(one, two), three) == merge(one, merge(two, three))
    assert merge(one, one) is one
    assert merge(merge(one, two), two) == merge(one, two)


@given(claims, claims)
def test_what_adds_nothing_gives_the_very_same_claim(one: Claim, two: Claim) -> None:
    merged = merge(one, two)
    assert (merged is one) == (merged == one)
