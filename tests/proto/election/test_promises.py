"""What one elector signs, and what one backbone counts: each rule alone, by the code of its refusal.

Whole elections practically never meet most of these rules; a liar looks for exactly those. Each line fails
when its rule is taken away.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from kvasir_proto.codec import decode, encode
from kvasir_proto.election.configuration import Proposal, make_link, successor_of
from kvasir_proto.election.elector import MemberView
from kvasir_proto.election.options import LAN
from kvasir_proto.election.prepared import PREPARED, Prepared, make_prepared, open_prepared, sign_assent
from kvasir_proto.election.tenure import Tenure
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import node_id_of
from kvasir_proto.instants import Instant
from kvasir_proto.messages.election import (
    AssentRefusal,
    AssentRequest,
    ElectorateProposal,
    Evidence,
)
from kvasir_proto.signing import sign
from kvasir_proto.term_proof import (
    Electorate,
    Endorsement,
    ProvenTerm,
    cast_vote,
    endorse,
    make_electorate,
    make_term_proof,
)
from tests.proto.election.swarm import SWARM
from tests.proto.election.test_prepared import (
    IDS,
    KEYS,
    PUBLIC,
    HonestElector,
    place,
    prepared_by,
    removal,
)

EVERYBODY = MemberView(frozenset(IDS), frozenset(IDS), frozenset())
"""All are fit, and all are dead: whatever is proposed is fair."""

FIVE = place("open", 5)


def proof_of(backbone: int, term: int, present: Electorate = FIVE) -> bytes:
    won = ProvenTerm(0, term, IDS[backbone])
    votes = [cast_vote(KEYS[each], SWARM, present, won) for each in range(present.quorum)]
    return make_term_proof(present, won, votes)


def addition(member: int, term: int = 4, number: int = 1, present: Electorate = FIVE) -> Proposal:
    """That somebody comes, of an electorate made in term 3."""
    return Proposal(0, term, number, successor_of(present, [*present.members, PUBLIC[member]], 3), b"")


def elector(number: int = 1, *, proof: bytes = proof_of(0, 4), view: MemberView = EVERYBODY) -> HonestElector:
    """An elector that knows this backbone."""
    node = HonestElector(number, FIVE)
    node.elector.view = view
    node.knowledge.learn_proof(proof)
    return node


def asked(proposal: Proposal, shown: bytes = b"") -> AssentRequest:
    return AssentRequest(encode(proposal), proof_of(0, 4), shown)


def answer_of(node: HonestElector, message: AssentRequest | ElectorateProposal, backbone: int = 0) -> str:
    """The code it refuses with; else what it answers."""
    try:
        if isinstance(message, AssentRequest):
            return type(node.elector.assent(message, IDS[backbone])).__name__
        node.elector.endorse(message, IDS[backbone])
        return "endorsed"
    except RemoteProtocolError as error:
        return error.code


def voted_in_term_5() -> HonestElector:
    node = elector()
    node.elector.vote(ProvenTerm(0, 5, IDS[1]), (), Instant(10**12))
    return node


def knows_a_lie_in_term_4() -> HonestElector:
    node = elector()
    votes = [encode(cast_vote(KEYS[3], SWARM, FIVE, ProvenTerm(0, 4, IDS[each]))) for each in (0, 2)]
    node.knowledge.learn_evidence(Evidence(*votes))
    assert node.knowledge.is_void(0, 4)
    return node


def stranger_to_it() -> HonestElector:
    return elector(6)


OF_ANOTHER_PLACE = Proposal(
    0, 4, 1, successor_of(place("open", 4), [*place("open", 4).members, PUBLIC[4]], 3), b""
)
OF_A_LATER_TERM = Proposal(0, 4, 1, successor_of(FIVE, FIVE.members, 5), b"")


@pytest.mark.parametrize(
    "node, proposal, backbone, code",
    [
        (elector(), removal(FIVE, 2), 0, "AssentGrant"),
        (elector(), removal(FIVE, 2), 2, "not_the_backbone"),
        (elector(proof=proof_of(0, 5)), removal(FIVE, 2), 0, "not_the_backbone"),
        (voted_in_term_5(), removal(FIVE, 2), 0, "behind"),
        (knows_a_lie_in_term_4(), removal(FIVE, 2), 0, "behind"),
        (elector(), OF_ANOTHER_PLACE, 0, "wrong_electorate"),
        (elector(), OF_A_LATER_TERM, 0, "wrong_electorate"),
        (stranger_to_it(), removal(FIVE, 2), 0, "no_elector"),
        (elector(view=MemberView(frozenset(), frozenset(IDS))), addition(5), 0, "not_eligible"),
        (elector(5, view=MemberView(frozenset(), frozenset(IDS))), addition(5), 0, "AssentGrant"),
        (
            elector(view=MemberView(frozenset(IDS), frozenset(), frozenset({IDS[5]}))),
            addition(5),
            0,
            "not_eligible",
        ),
        (elector(view=MemberView(frozenset(IDS))), removal(FIVE, 2), 0, "not_dead"),
    ],
    ids=[
        "fair", "of no backbone", "of a term that is over", "voted later", "a term with a lie",
        "of another place", "made in a later term", "no elector", "unfit", "itself", "barred", "alive",
    ],
)  # fmt: skip
def test_what_an_elector_assents_to(
    node: HonestElector, proposal: Proposal, backbone: int, code: str
) -> None:
    assert answer_of(node, asked(proposal), backbone) == code
    if code not in ("AssentGrant", "not_dead", "not_eligible"):  # those are opinions, which a quorum had
        message = ElectorateProposal(prepared_by(proposal, (0, 2, 3, 4)), proof_of(0, 4))
        assert answer_of(node, message, backbone) == code


def endorsed_in(
    number: int, term: int, proposal_number: int, member: int = 2, assenters: Iterable[int] = (0, 2, 3, 4)
) -> HonestElector:
    """An elector that endorsed the removal of a member in that ballot, and knows the backbone of term 6."""
    node = HonestElector(number, FIVE)
    node.elector.view = EVERYBODY
    node.knowledge.learn_proof(proof_of(0, term))
    proposal = removal(FIVE, member, term=term, number=proposal_number)
    node.elector.endorse(ElectorateProposal(prepared_by(proposal, assenters), b""), IDS[0])
    node.knowledge.learn_proof(proof_of(0, 6))
    return node


@pytest.mark.parametrize(
    "ballot, is_free",
    [((4, 2), False), ((4, 9), False), ((5, 1), False), ((5, 2), False), ((5, 3), True), ((6, 1), True)],
)
def test_ballots_are_compared_by_term_before_number(ballot: tuple[int, int], is_free: bool) -> None:
    """Locked in ballot (5, 2), it is shown that another electorate was prepared."""
    node = endorsed_in(1, 5, 2)
    term, number = ballot
    shown = prepared_by(removal(FIVE, 3, term=term, number=number), (0, 2, 3, 4))
    wanted = AssentRequest(encode(removal(FIVE, 3, term=6, number=4)), b"", shown)
    assert answer_of(node, wanted) == ("AssentGrant" if is_free else "AssentRefusal")


def test_an_earlier_number_of_a_later_term_is_no_step_back() -> None:
    node = endorsed_in(1, 5, 7)
    shown = node.elector.prepared_successor()
    again = AssentRequest(encode(removal(FIVE, 2, term=6, number=1)), b"", shown)
    assert answer_of(node, again) == "AssentGrant"
    of_term_5 = removal(FIVE, 2, term=5, number=8)
    assert answer_of(node, ElectorateProposal(prepared_by(of_term_5, range(4)), b"")) == "not_the_backbone"


def test_two_prepared_in_one_ballot_are_not_both_endorsed() -> None:
    """More liars than are tolerated; those who are none still sign one only."""
    node = endorsed_in(1, 6, 2)
    other = prepared_by(removal(FIVE, 3, term=6, number=2), (0, 2, 3, 4))
    assert answer_of(node, ElectorateProposal(other, b"")) == "endorsed_another"


def test_what_was_prepared_for_another_backbone_is_not_endorsed() -> None:
    message = ElectorateProposal(prepared_by(removal(FIVE, 2), (0, 2, 3, 4), backbone=1), b"")
    assert answer_of(elector(), message) == "not_the_backbone"


def test_endorsing_the_same_electorate_again_keeps_the_later_ballot() -> None:
    node = endorsed_in(1, 5, 2)
    again = removal(FIVE, 2, term=6, number=3)
    assert answer_of(node, ElectorateProposal(prepared_by(again, (0, 2, 3, 4)), b"")) == "endorsed"
    assert open_prepared(node.elector.prepared_successor(), FIVE, SWARM).proposal.ballot == (0, 6, 3)


def test_a_lock_ends_with_its_place() -> None:
    one = ElectorateProposal(prepared_by(addition(5, number=1), range(5)), b"")
    node = elector()
    assert answer_of(node, one) == "endorsed"
    assert node.elector.prepared_successor()
    grown = addition(5).electorate
    endorsers = [endorse(KEYS[each], SWARM, grown, ProvenTerm(0, 4, IDS[0]), 1) for each in range(6)]
    node.knowledge.learn_links((make_link(grown, ProvenTerm(0, 4, IDS[0]), 1, endorsers),))
    assert node.knowledge.newest == grown
    assert node.elector.prepared_successor() == b"", "it is no successor of the newest one"
    node.knowledge.learn_proof(proof_of(0, 5, grown))
    next_one = Proposal(0, 5, 1, successor_of(grown, grown.members, 5), b"")
    assert answer_of(node, AssentRequest(encode(next_one), b"", b"")) == "AssentGrant"


# --- what proves that something was prepared ----------------------------------------------------------------


def forged(proposal: Proposal) -> bytes:
    """Assents of which the last has somebody else's signature."""
    opened = decode(prepared_by(proposal, (0, 2, 3, 4)), PREPARED)
    *honest, last = opened.assents
    return make_prepared(proposal, IDS[0], [*honest, replace(last, signature=honest[0].signature)])


def twice(proposal: Proposal) -> bytes:
    opened = decode(prepared_by(proposal, (0, 2, 3, 4)), PREPARED)
    return encode(Prepared(proposal, IDS[0], (*opened.assents, opened.assents[-1])))


def of_another_kind(proposal: Proposal) -> bytes:
    """The right words, signed as something else."""
    honest = decode(prepared_by(proposal, (0, 2, 3, 4)), PREPARED).assents
    other = sign(KEYS[4], Endorsement.kind, SWARM, honest[-1].payload)
    return make_prepared(proposal, IDS[0], [*(each for each in honest if each.signer != PUBLIC[4]), other])


@pytest.mark.parametrize(
    "data, code",
    [
        (prepared_by(OF_ANOTHER_PLACE, range(5)), "wrong_electorate"),
        (prepared_by(removal(FIVE, 2), (0, 2, 3, 4, 6)), "not_an_elector"),
        (twice(removal(FIVE, 2)), "voted_twice"),
        (prepared_by(removal(FIVE, 2), (0, 3)), "no_quorum"),
        (forged(removal(FIVE, 2)), "bad_signature"),
        (of_another_kind(removal(FIVE, 2)), "wrong_vote"),
        (prepared_by(removal(FIVE, 2, number=3), (0, 2, 3, 4), backbone=1), ""),
    ],
    ids=["of another place", "a stranger's", "one twice", "too few", "forged", "of another kind", "in order"],
)
def test_what_is_prepared_is_checked_to_the_last_assent(data: bytes, code: str) -> None:
    try:
        open_prepared(data, FIVE, SWARM)
        found = ""
    except RemoteProtocolError as error:
        found = error.code
    assert found == code


# --- what a backbone counts ---------------------------------------------------------------------------------


def tenure_of(term: int = 4, present: Electorate = FIVE, unfinished: Prepared | None = None) -> Tenure:
    """A backbone whose lease its electorate has granted."""
    tenure = Tenure(SWARM, ProvenTerm(0, term, IDS[0]), present, LAN.lease, unfinished)
    request = tenure.ask(Instant(1))
    for member in present.members:
        tenure.take_grant(node_id_of(member), request)
    return tenure


def assent_by(tenure: Tenure, number: int) -> bool:
    assert tenure.proposal is not None
    return tenure.take_assent(sign_assent(KEYS[number], SWARM, tenure.proposal, IDS[0]), IDS[number])


def endorsement_by(tenure: Tenure, number: int, *, ballot: int | None = None) -> bytes | None:
    proposal = tenure.proposal
    assert proposal is not None
    signed = endorse(KEYS[number], SWARM, proposal.electorate, tenure.term, ballot or proposal.number)
    return tenure.take_endorsement(encode(signed), IDS[number])


def test_nothing_is_proposed_before_the_electorate_has_granted_a_lease() -> None:
    tenure = Tenure(SWARM, ProvenTerm(0, 4, IDS[0]), FIVE, LAN.lease, None)
    assert tenure.want((*FIVE.members, PUBLIC[5]), b"")
    assert not tenure.propose()


def test_who_would_come_assents_and_endorses_before_any_elector_is_bound() -> None:
    present = make_electorate(5, "open", PUBLIC[:5], term=4)
    tenure = tenure_of(present=present)
    assert tenure.want((*present.members, PUBLIC[5]), b"")
    assert tenure.propose()
    assert not any(assent_by(tenure, each) for each in range(5)), "all but the one who would come"
    assert set(tenure.to_ask) == {IDS[5]}
    assert assent_by(tenure, 5)
    assert tenure.to_ask == (IDS[5],), "nobody else endorses before it"
    assert endorsement_by(tenure, 5) is None
    assert set(tenure.to_ask) == set(IDS[:5])


def test_what_is_left_is_finished_by_the_electors_whether_or_not_the_newcomer_is_there() -> None:
    unfinished = decode(prepared_by(addition(5, term=3), range(6), backbone=1), PREPARED)
    tenure = tenure_of(unfinished=unfinished)
    assert tenure.want(FIVE.members[:4], b"")
    assert tenure.propose()
    assert tenure.proposal is not None
    assert tenure.proposal.electorate == unfinished.electorate
    message = tenure.proposal_message(b"")
    assert isinstance(message, AssentRequest)
    assert decode(message.prepared, PREPARED) == unfinished, "which shows why"
    assert any(assent_by(tenure, each) for each in range(5))
    assert set(tenure.to_ask) == set(IDS[:6]), "electors are not kept waiting for it"
    links = [endorsement_by(tenure, each) for each in range(5)]
    assert any(links)


def test_endorsements_count_for_their_ballot_and_from_their_signer_only() -> None:
    tenure = tenure_of(unfinished=decode(prepared_by(addition(5, term=3), range(6), backbone=1), PREPARED))
    assert tenure.propose()
    for each in range(5):
        assent_by(tenure, each)
    assert tenure.proposal is not None
    for each in range(5):
        assert endorsement_by(tenure, each, ballot=7) is None
    genuine = endorse(KEYS[1], SWARM, tenure.proposal.electorate, tenure.term, tenure.proposal.number)
    stolen = replace(genuine, signer=PUBLIC[2])
    with pytest.raises(RemoteProtocolError):
        tenure.take_endorsement(encode(stolen), IDS[2])
    links = [endorsement_by(tenure, each) for each in range(5)]
    assert any(links)


def test_each_proposal_of_a_term_has_a_number_of_its_own_and_begins_with_nothing() -> None:
    """Assents and endorsements of the one before are not counted for it."""
    present = make_electorate(5, "open", PUBLIC[:5], term=4)
    tenure = tenure_of(present=present)
    numbers = []
    for member in (5, 6):
        assert tenure.want((*present.members, PUBLIC[member]), b"")
        assert tenure.propose()
        assert tenure.proposal is not None
        numbers.append(tenure.proposal.number)
        assert set(tenure.to_ask) == {*IDS[:5], IDS[member]}
        for each in (*range(5), member):
            assent_by(tenure, each)
        assert isinstance(tenure.proposal_message(b""), ElectorateProposal)
        assert not tenure.want(present.members[:4], b""), "one at a time"
        if member == 5:
            endorsement_by(tenure, 1)  # unasked, as a liar may
            assert tenure.drop_unanswered() == frozenset({IDS[5]})
    assert len(set(numbers)) == 2
    endorsement_by(tenure, 6)
    assert set(tenure.to_ask) == set(IDS[:5])


def test_a_refusal_counts_only_where_it_shows_what_is_later_and_signed() -> None:
    first, later = (
        prepared_by(removal(FIVE, member, term=3, number=number), range(5), backbone=1)
        for member, number in ((2, 2), (3, 4))
    )
    tenure = tenure_of()
    assert tenure.want((*FIVE.members, PUBLIC[5]), b"")
    assert tenure.propose()
    with pytest.raises(RemoteProtocolError):
        tenure.take_refusal(prepared_by(removal(FIVE, 2, term=3), (0, 1)))
    assert tenure.take_refusal(later)
    assert tenure.propose()
    assert not tenure.take_refusal(first), "an earlier one may not be committed any more"
    assert tenure.proposal is not None
    assert tenure.proposal.electorate == removal(FIVE, 3).electorate
    for each in range(5):
        assent_by(tenure, each)
    assert not tenure.take_refusal(prepared_by(removal(FIVE, 2, term=3, number=9), range(5), backbone=1)), (
        "what is prepared goes on"
    )


def test_another_electorate_ends_what_was_meant_for_the_one_before() -> None:
    unfinished = decode(prepared_by(addition(5, term=3), range(6), backbone=1), PREPARED)
    for left in (None, unfinished):
        tenure = tenure_of(unfinished=left)
        grown = addition(6).electorate
        assert tenure.want(grown.members, b"")
        assert tenure.propose()
        tenure.adopt_electorate(grown)
        assert tenure.proposal is None
        assert not tenure.is_changing, "it is what was wanted"
        request = tenure.ask(Instant(2))
        for member in grown.members:
            tenure.take_grant(node_id_of(member), request)
        assert not tenure.propose(), "and what was left is of a place that is taken"


def test_refusals_and_votes_tell_what_is_locked() -> None:
    """Else the next backbone would not know what to finish."""
    node = endorsed_in(1, 5, 2)
    other = AssentRequest(encode(removal(FIVE, 3, term=6, number=4)), b"", b"")
    answer = node.elector.assent(other, IDS[0])
    assert isinstance(answer, AssentRefusal)
    assert open_prepared(answer.prepared, FIVE, SWARM).electorate == removal(FIVE, 2).electorate
    node.stored = node.elector.stored()
    node.restart()
    node.elector.view = EVERYBODY
    assert isinstance(node.elector.assent(other, IDS[0]), AssentRefusal)


def test_an_assent_is_on_the_disk() -> None:
    node = elector()
    assert answer_of(node, asked(removal(FIVE, 2, number=3))) == "AssentGrant"
    for _ in range(2):
        assert answer_of(node, asked(removal(FIVE, 3, number=3))) == "assented_another"
        assert answer_of(node, asked(removal(FIVE, 3, number=2))) == "behind"
        node.stored = node.elector.stored()
        node.restart()
        node.elector.view = EVERYBODY
    assert answer_of(node, asked(removal(FIVE, 3, number=4))) == "AssentGrant"


def test_what_is_shown_must_be_of_the_same_electorate() -> None:
    shown = prepared_by(removal(FIVE, 3, number=1), (0, 2, 3, 4))
    assert answer_of(elector(), asked(removal(FIVE, 2, number=3), shown)) == "wrong_electorate"
    unseen = MemberView(frozenset(IDS))
    assert answer_of(elector(view=unseen), asked(removal(FIVE, 3, number=3), shown)) == "AssentGrant"
