"""Single rules of DESIGN section 4, each on a small swarm that has made its electorate."""

from __future__ import annotations

import pytest

from kvasir_proto.codec import encode
from kvasir_proto.effects import Persist, Send
from kvasir_proto.election.configuration import make_recovery
from kvasir_proto.election.options import LAN
from kvasir_proto.election.readiness import sign_pre_vote
from kvasir_proto.election.requests import AdoptProof, CatchUp, Recover
from kvasir_proto.election.states import Role
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import node_id_of
from kvasir_proto.instants import milliseconds
from kvasir_proto.messages.election import Evidence, VoteGrant, VoteRefusal, VoteRequest
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


def asked_to_vote(swarm: Swarm, number: int, candidate: int, term: int) -> VoteGrant | VoteRefusal:
    """What an elector answers to a candidate that a quorum was ready for in this term."""
    node = swarm.nodes[number]
    core = node.core
    assert core is not None
    electorate = core.electorate
    wanted = ProvenTerm(electorate.epoch, term, IDS[candidate])
    keys = [key for key in KEYS if key.public_key().public_bytes_raw() in electorate.members]
    readiness = tuple(sign_pre_vote(key, SWARM, electorate, wanted) for key in keys[: electorate.quorum])
    place = (electorate.epoch, term, electorate.version, electorate.digest())
    core.receive(VoteRequest(*place, readiness), IDS[candidate], swarm._now_of(node))
    outputs = core.drain()
    node.disk |= {each.slot: each.data for each in outputs if isinstance(each, Persist)}
    said = [each.message for each in outputs if isinstance(each, Send) and each.to == IDS[candidate]]
    (answer,) = (each for each in said if isinstance(each, VoteGrant | VoteRefusal))
    return answer


PROMISE_MS = LAN.lease * 13 // 10 // milliseconds(1)
"""A promise's time on the slowest clock, and a little more."""


@pytest.mark.parametrize(
    "forgets, wait_ms, refusal",
    [
        (False, 100, "behind"),
        (False, PROMISE_MS, "behind"),
        (True, 100, "restarted"),
        (True, PROMISE_MS, None),
    ],
    ids=["at once", "after the wait", "the wait hides a vote forgotten", "and after it there are two"],
)
def test_an_elector_that_restarts_between_two_requests_of_a_term_votes_once(
    forgets: bool, wait_ms: int, refusal: str | None
) -> None:
    """The wait after a restart hides a vote that was not stored, so the second candidate asks after it too.

    In the last rows the disk is as it was before the vote, and in the end there are two: so what refuses
    above is the vote that was stored, and nothing else.
    """
    swarm = grown()
    core = swarm.nodes[0].core
    assert core is not None
    assert core.fence is not None
    members, term = core.electorate.members, core.fence.term + 1
    elector, first, second = [n for n in range(5) if KEYS[n].public_key().public_bytes_raw() in members][1:4]
    node = swarm.nodes[elector]
    node.is_fit = False  # it is not to vote for itself meanwhile
    for number in range(5):
        swarm.crash(number)
    swarm.start(elector)
    swarm.run(PROMISE_MS)
    before = dict(node.disk)
    vote = asked_to_vote(swarm, elector, first, term)
    assert isinstance(vote, VoteGrant)
    swarm.crash(elector)
    if forgets:
        node.disk = before
    swarm.start(elector)
    swarm.run(wait_ms)
    answer = asked_to_vote(swarm, elector, second, term)
    assert (answer.reason if isinstance(answer, VoteRefusal) else None) == refusal
    if not forgets and wait_ms == PROMISE_MS:
        assert asked_to_vote(swarm, elector, first, term) == vote, "the one it voted for gets the same vote"


@pytest.mark.parametrize("is_older", [False, True], ids=["gone", "an older copy"])
@pytest.mark.parametrize("number", range(4))
def test_who_has_lost_its_electorates_elects_nobody_until_it_has_learned_them_again(
    number: int, is_older: bool
) -> None:
    """The founder would be an electorate of itself again, and a backbone beside the swarm's."""
    swarm = Swarm(5, 5, rule="open", electors_max=4)
    swarm.start_all()
    swarm.run(6000, until=lambda: len(swarm.electorates) >= 2)
    older = {
        each: node.disk["electorate"] for each, node in enumerate(swarm.nodes) if "electorate" in node.disk
    }
    swarm.run(6000)
    assert settled(swarm)
    core = swarm.nodes[number].core
    assert core is not None
    fence, electorate = core.fence, core.electorate
    for each in range(5):
        swarm.crash(each)
    del swarm.nodes[number].disk["electorate"]
    copy = older[number]
    if is_older and copy is not None:
        swarm.nodes[number].disk["electorate"] = copy
    swarm.start(number)
    swarm.run(20_000)
    alone = swarm.nodes[number].core
    assert alone is not None
    assert (alone.fence, alone.role) == (fence, Role.FOLLOWER)
    assert fence is not None
    answer = asked_to_vote(swarm, number, (number + 1) % 4, fence.term + 1)
    assert isinstance(answer, VoteRefusal)
    for each in range(5):
        if each != number:
            swarm.start(each)
    swarm.run(15_000)
    assert settled(swarm)
    assert alone.electorate.order >= electorate.order


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
