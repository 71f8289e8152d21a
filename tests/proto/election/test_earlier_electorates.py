"""What a node that was invited learns of the electorates before the one its invite named, and what not."""

from __future__ import annotations

import pytest

from kvasir_proto.codec import decode, encode
from kvasir_proto.election.configuration import (
    LINK,
    STORED_LINKS_MAX,
    CommittedElectorate,
    successor_of,
)
from kvasir_proto.election.knowledge import EARLIER_LINKS_MAX, ProvenKnowledge
from kvasir_proto.messages.election import LINKS_MAX
from kvasir_proto.term_proof import Electorate, ProvenTerm, endorse, founding_electorate
from tests.proto.election.swarm import IDS, KEYS, RECOVERY_KEY, SWARM

PUBLIC = [key.public_key().public_bytes_raw() for key in KEYS]
ROOT = founding_electorate(PUBLIC[0], "pinned")
TERM = ProvenTerm(0, 1, IDS[0])


def knowledge(anchor: bytes | None = None, stored: bytes | None = None) -> ProvenKnowledge:
    return ProvenKnowledge(
        SWARM,
        ROOT,
        RECOVERY_KEY.public_key().public_bytes_raw(),
        anchor=anchor,
        stored_electorates=stored,
        stored_fence=None,
    )


def link_to(before: Electorate, members: list[bytes]) -> bytes:
    """The next electorate, endorsed by everybody of both."""
    electorate = successor_of(before, members, 1)
    signers = sorted({*before.members, *members})
    endorsements = tuple(endorse(KEYS[PUBLIC.index(each)], SWARM, electorate, TERM, 1) for each in signers)
    return encode(CommittedElectorate(electorate, 1, 1, IDS[0], endorsements))


def chain(length: int) -> list[bytes]:
    """Each other electorate has one passer-by beside the founder and node 1: nodes 2 to 15 in turn."""
    links, newest = [], ROOT
    for number in range(length):
        members = PUBLIC[: min(2, number + 1)]
        if number and number % 2 == 0:
            members = [*members, PUBLIC[2 + (number // 2 - 1) % 14]]
        links.append(link_to(newest, members))
        newest = decode(links[-1], LINK).electorate
    return links


def informed(length: int) -> ProvenKnowledge:
    known = knowledge()
    links = chain(length)
    assert known.learn_links(links) == length
    return known


def catch_up(newcomer: ProvenKnowledge, member: ProvenKnowledge) -> int:
    """As `ElectionCore._on_knowledge`: ask and learn until there is no more to ask; how many questions."""
    request, asked = newcomer.request(), 0
    while True:
        asked += 1
        answer = member.answer(request)
        assert len(answer.links) <= LINKS_MAX
        was_anchored = newcomer.is_anchored
        newcomer.learn_links(answer.links)
        earlier = newcomer.learn_earlier(answer.links)
        following = newcomer.request_earlier()
        if following is None or (was_anchored and not earlier):
            return asked
        request = following


@pytest.mark.parametrize("length, n_former", [(1, 0), (3, 0), (4, 1), (18, 8), (34, 14), (64, 14)])
def test_an_invited_node_knows_the_same_former_electors_as_who_saw_them_come_and_go(
    length: int, n_former: int
) -> None:
    member = informed(length)
    newcomer = knowledge(anchor=member.newest.digest())
    assert newcomer.former_electors == ()
    asked = catch_up(newcomer, member)
    assert asked <= 1 + STORED_LINKS_MAX // EARLIER_LINKS_MAX
    assert newcomer.newest == member.newest
    assert newcomer.former_electors == member.former_electors
    assert len(member.former_electors) == n_former


def test_later_electorates_are_learned_beside_earlier_ones() -> None:
    member = informed(40)
    middle = decode(chain(20)[-1], LINK).electorate
    newcomer = knowledge(anchor=middle.digest())
    catch_up(newcomer, member)
    assert newcomer.newest.version >= middle.version + LINKS_MAX - EARLIER_LINKS_MAX - 1
    newcomer.learn_links(member.answer(newcomer.request()).links)
    assert newcomer.newest == member.newest
    assert newcomer.former_electors == member.former_electors


def test_who_was_an_elector_nobody_can_make_up() -> None:
    """A link before the named one counts by its digest alone: signed by whomever, it is another one."""
    links = chain(6)
    newest = decode(links[-1], LINK).electorate
    newcomer = knowledge(anchor=newest.digest())
    forged = link_to(decode(links[3], LINK).electorate, [PUBLIC[0], PUBLIC[1], PUBLIC[15]])
    newcomer.learn_links((forged, links[-1]))
    assert newcomer.learn_earlier((forged, links[-1], links[1])) == 0
    assert newcomer.former_electors == ()
    assert newcomer.learn_earlier((links[0], forged, links[4])) == 1, "what has a gap before it waits"
    assert newcomer.learn_earlier(tuple(links)) == 4
    assert PUBLIC[15] not in newcomer.former_electors
    assert newcomer.fence is None, "and nothing else follows from it"


def test_before_the_named_electorate_is_reached_nobody_was_an_elector() -> None:
    newcomer = knowledge(anchor=bytes(32))
    assert newcomer.learn_links(chain(3)) == 3
    assert newcomer.learn_earlier(chain(3)) == 0
    assert newcomer.former_electors == ()
    assert newcomer.request_earlier() is None
