"""At most one backbone a term: only a quorum of the electorate we know proves one."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Literal

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.codec import encode
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import SwarmDigest, node_id_of
from kvasir_proto.limits import ELECTORS_MAX, PROOF_SIZE_MAX
from kvasir_proto.signing import Signed, sign
from kvasir_proto.term_proof import (
    FOUNDING_EPOCH,
    FOUNDING_TERM,
    Electorate,
    ProvenTerm,
    cast_vote,
    endorse,
    founding_electorate,
    make_electorate,
    make_term_proof,
    verify_term_proof,
)

Rule = Literal["pinned", "open"]
SWARM = SwarmDigest(bytes(32))
KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(ELECTORS_MAX)]
PUBLIC = [key.public_key().public_bytes_raw() for key in KEYS]
TERM = ProvenTerm(2, 9, node_id_of(PUBLIC[0]))
OTHER_TERM = ProvenTerm(2, 9, node_id_of(PUBLIC[1]))
THREE = make_electorate(5, "pinned", PUBLIC[:3], epoch=2, term=8)


def _votes(*voters: int, electorate: Electorate = THREE, term: ProvenTerm = TERM) -> list[Signed]:
    return [cast_vote(KEYS[voter], SWARM, electorate, term) for voter in voters]


def _refused(votes: list[Signed], known: Electorate = THREE, claimed: Electorate = THREE) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        verify_term_proof(make_term_proof(claimed, TERM, votes), SWARM, known)
    return caught.value.code


def test_founder_proves_the_first_term_alone() -> None:
    electorate = founding_electorate(PUBLIC[0])
    first = ProvenTerm(FOUNDING_EPOCH, FOUNDING_TERM, node_id_of(PUBLIC[0]))
    assert first[:2] == (0, 1)
    proof = make_term_proof(electorate, first, [cast_vote(KEYS[0], SWARM, electorate, first)])
    assert verify_term_proof(proof, SWARM, electorate) == first


@pytest.mark.parametrize(
    "rule, quorums", [("pinned", [1, 2, 2, 3, 3, 4, 4]), ("open", [1, 2, 2, 3, 4, 5, 5])]
)
def test_quorum_of_each_size(rule: Rule, quorums: list[int]) -> None:
    sizes = range(1, ELECTORS_MAX + 1)
    assert [make_electorate(0, rule, PUBLIC[:size]).quorum for size in sizes] == quorums


@pytest.mark.parametrize("rule", ["pinned", "open"])
def test_two_quorums_share_more_members_than_may_lie(rule: Rule) -> None:
    for size in range(1, ELECTORS_MAX + 1):
        quorum = make_electorate(0, rule, PUBLIC[:size]).quorum
        liars = (size - 1) // 3 if rule == "open" and size >= 4 else 0
        shared = min(
            len(set(one) & set(other))
            for one in combinations(range(size), quorum)
            for other in combinations(range(size), quorum)
        )
        assert shared > liars
        assert quorum <= size - liars


@given(st.sets(st.integers(0, ELECTORS_MAX - 1), min_size=1), st.integers(1, ELECTORS_MAX))
def test_exactly_a_quorum_of_members_proves(voters: set[int], size: int) -> None:
    electorate = make_electorate(5, "pinned", PUBLIC[:size], epoch=2)
    proof = make_term_proof(electorate, TERM, _votes(*voters, electorate=electorate))
    proves = len(voters) >= electorate.quorum and max(voters) < size
    if proves:
        assert verify_term_proof(proof, SWARM, electorate) == TERM
    else:
        with pytest.raises(RemoteProtocolError):
            verify_term_proof(proof, SWARM, electorate)


def test_largest_proof_fits_its_bound() -> None:
    electorate = make_electorate(2**63 - 1, "open", PUBLIC, epoch=2**32 - 1, term=2**32 - 2)
    term = ProvenTerm(2**32 - 1, 2**32 - 1, node_id_of(PUBLIC[6]))
    proof = make_term_proof(electorate, term, _votes(*range(7), electorate=electorate, term=term))
    assert verify_term_proof(proof, SWARM, electorate) == term
    assert len(proof) < PROOF_SIZE_MAX / 2


def test_proof_does_not_depend_on_the_order_of_votes() -> None:
    assert make_term_proof(THREE, TERM, _votes(0, 2)) == make_term_proof(THREE, TERM, _votes(2, 0))
    assert make_electorate(5, "pinned", [*PUBLIC[2::-1], PUBLIC[0]], epoch=2, term=8) == THREE


def test_proof_under_an_electorate_we_do_not_know_is_refused() -> None:
    usurpers = make_electorate(6, "pinned", PUBLIC[3:6], epoch=2)
    votes = _votes(3, 4, 5, electorate=usurpers)
    assert _refused(votes, claimed=usurpers) == "unknown_electorate"
    assert _refused(votes) == "not_an_elector"
    later = dataclasses.replace(THREE, version=6)
    assert _refused(_votes(0, 1, electorate=later)) == "wrong_vote"


def test_each_vote_must_be_for_this_backbone_in_this_term() -> None:
    assert _refused(_votes(0, 1, term=OTHER_TERM)) == "wrong_vote"
    assert _refused([*_votes(0, 1), *_votes(2, term=TERM._replace(term=8))]) == "wrong_vote"
    assert _refused(_votes(0)) == "no_quorum"
    assert _refused(_votes(0, 0)) == "voted_twice"


def test_votes_of_the_electorates_own_term_prove_nothing_but_endorsements_do() -> None:
    """DESIGN 4: four of seven electors of a new electorate need not have voted in the term that made it."""
    of_this_term = dataclasses.replace(THREE, term=TERM.term)
    assert _refused(_votes(0, 1, electorate=of_this_term), of_this_term, of_this_term) == "wrong_term"
    endorsed = [endorse(KEYS[each], SWARM, of_this_term, TERM, 1) for each in (0, 1)]
    assert verify_term_proof(make_term_proof(of_this_term, TERM, endorsed), SWARM, of_this_term) == TERM
    later = dataclasses.replace(THREE, term=TERM.term + 1)
    endorsed = [endorse(KEYS[each], SWARM, later, TERM, 1) for each in (0, 1)]
    assert _refused(endorsed, later, later) == "wrong_term"
    other_epoch = dataclasses.replace(THREE, epoch=1)
    assert _refused(_votes(0, 1, electorate=other_epoch), other_epoch, other_epoch) == "wrong_term"


def test_what_known_liars_sign_is_not_counted() -> None:
    proof = make_term_proof(THREE, TERM, _votes(0, 1, 2))
    assert verify_term_proof(proof, SWARM, THREE, {PUBLIC[0]}) == TERM
    with pytest.raises(RemoteProtocolError, match="1 votes of the 2"):
        verify_term_proof(proof, SWARM, THREE, {PUBLIC[0], PUBLIC[1]})


def test_votes_of_another_swarm_and_forged_votes_are_refused() -> None:
    elsewhere = [cast_vote(key, SwarmDigest(bytes([1]) * 32), THREE, TERM) for key in KEYS[:2]]
    assert _refused(elsewhere) == "bad_signature"
    forged = [dataclasses.replace(vote, signer=PUBLIC[2]) for vote in _votes(1)]
    assert _refused([*_votes(0), *forged]) == "bad_signature"
    not_a_vote = sign(KEYS[1], "vote", SWARM, encode(THREE))
    assert _refused([*_votes(0), not_a_vote]) == "unknown_kind"
    assert _refused([*_votes(0), sign(KEYS[1], "plan", SWARM, encode(THREE))]) == "wrong_kind"


@given(st.data())
def test_mutated_proofs_prove_nothing_else(data: st.DataObject) -> None:
    mutated = bytearray(make_term_proof(THREE, TERM, _votes(0, 1)))
    place = data.draw(st.integers(0, len(mutated) - 1))
    mutated[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RemoteProtocolError):
        verify_term_proof(bytes(mutated), SWARM, THREE)
