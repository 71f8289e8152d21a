"""Single rules of DESIGN section 4, each on a small swarm that has made its electorate."""

from __future__ import annotations

import pytest

from kvasir_proto.codec import encode
from kvasir_proto.election.configuration import make_recovery
from kvasir_proto.election.requests import AdoptProof, CatchUp, Recover
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import node_id_of
from kvasir_proto.messages.election import Evidence
from kvasir_proto.term_proof import ProvenTerm, cast_vote, founding_electorate, make_term_proof
from tests.proto.election.swarm import IDS, KEYS, RECOVERY_KEY, SWARM, Swarm, settled


def grown(count: int = 5, electors_max: int = 4) -> Swarm:
    swarm = Swarm(5, count, rule="open", electors_max=electors_max)
    swarm.start_all()
    swarm.run(6000)
    assert settled(swarm)
    return swarm


def test_evidence_voids_the_term_and_the_liar_leaves_the_electorate() -> None:
    swarm = grown()
    core = swarm.nodes[0].core
    assert core is not None
    fence = core.fence
    assert fence is not None
    electorate = core.electorate
    number = next(n for n in range(1, 5) if KEYS[n].public_key().public_bytes_raw() in electorate.members)
    first, second = (
        encode(cast_vote(KEYS[number], SWARM, electorate, ProvenTerm(fence.epoch, fence.term, IDS[each])))
        for each in (0, 1)
    )
    swarm.transmit(IDS[number], IDS[0], Evidence(first, first))
    swarm.run(100)
    assert not core.convicted, "the same vote twice is no lie"
    swarm.transmit(IDS[number], IDS[0], Evidence(first, second))
    swarm.run(100)
    assert core.convicted == {IDS[number]}
    assert not swarm.backbones()
    swarm.run(15_000)
    assert settled(swarm)
    after = swarm.backbones()[0].core
    assert after is not None
    assert after.fence is not None
    assert after.fence.term > fence.term
    assert IDS[number] not in {node_id_of(each) for each in after.electorate.members}


def test_a_lie_about_a_huge_term_moves_nothing() -> None:
    swarm = grown()
    core = swarm.nodes[1].core
    assert core is not None
    before = (core.fence, core.electorate)
    term = ProvenTerm(0, 2**32 - 1, IDS[2])
    votes = [cast_vote(KEYS[each], SWARM, core.electorate, term) for each in (2, 3)]
    swarm.command(1, AdoptProof(make_term_proof(core.electorate, term, votes[:1]), IDS[2]))
    swarm.command(1, AdoptProof(b"nonsense", IDS[2]))
    assert (core.fence, core.electorate) == before


def test_recovery_starts_an_epoch_when_the_quorum_is_lost_for_good() -> None:
    swarm = grown()
    survivor = next(number for number in range(5) if number != 0)
    for number in range(5):
        if number != survivor:
            swarm.crash(number)
    swarm.run(10_000)
    assert not swarm.backbones()
    with pytest.raises(RemoteProtocolError, match="recovery key"):
        swarm.command(survivor, Recover(make_recovery(KEYS[survivor], SWARM, 1, "open", [IDS[survivor]])))
    swarm.command(survivor, Recover(make_recovery(RECOVERY_KEY, SWARM, 1, "open", [IDS[survivor]])))
    swarm.run(6000)
    assert [each.node_id for each in swarm.backbones()] == [IDS[survivor]]
    core = swarm.nodes[survivor].core
    assert core is not None
    assert core.fence == ProvenTerm(1, 1, IDS[survivor])
    for number in range(5):
        if number != survivor:
            swarm.start(number)
    swarm.run(8000)
    assert settled(swarm)
    assert max(swarm.proven)[0] == 1


def test_fence_and_votes_survive_a_restart() -> None:
    swarm = grown()
    for number in range(5):
        core = swarm.nodes[number].core
        assert core is not None
        before = (core.fence, core.electorate, core.won)
        swarm.crash(number)
        swarm.start(number)
        again = swarm.nodes[number].core
        assert again is not None
        assert (again.fence, again.electorate, again.won) == before


def test_a_node_with_an_anchor_believes_nothing_before_it() -> None:
    """DESIGN 4: invites carry the digest of an electorate; the founder's key alone proves nothing then."""
    swarm = grown()
    core = swarm.nodes[0].core
    assert core is not None
    anchor, source = core.electorate.digest(), IDS[0]
    root = founding_electorate(KEYS[0].public_key().public_bytes_raw(), "open")
    term = ProvenTerm(0, 9, IDS[0])
    forged = make_term_proof(root, term, [cast_vote(KEYS[0], SWARM, root, term)])
    swarm.crash(4)
    swarm.nodes[4].disk.clear()
    swarm.start(4, anchor=anchor)
    swarm.command(4, AdoptProof(forged, IDS[1]))
    joined = swarm.nodes[4].core
    assert joined is not None
    assert joined.fence is None
    swarm.command(4, CatchUp(source))
    swarm.run(200)
    assert joined.electorate.digest() == anchor
    assert joined.fence == core.fence


def test_a_lease_under_the_first_electorate_is_awaited_before_the_second_change() -> None:
    """1 -> 2 -> 3 within a lease: each change waits for grants of the electorate before it."""
    swarm = Swarm(8, 3)
    swarm.start_all()
    swarm.run(10_000, until=lambda: len(swarm.electorates) >= 2)
    core = swarm.nodes[0].core
    assert core is not None
    tenure = core._tenure
    assert tenure is not None
    assert not tenure._is_confirmed
    assert not tenure.propose()
