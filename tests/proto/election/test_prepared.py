"""One place in the chain of electorates, decided by real electors, tenures and candidacies, whoever lies.

The model is the worst case: nobody ever hears that an electorate was committed. Messages come late, twice and
to some only, electors restart from their disks and see others die and live at random, a third of them and any
backbone lie: liars assent to and endorse everything, report nothing or what suits them, and lying backbones
propose what they like, several things at once. Then everything is well, and an honest backbone finishes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from kvasir_proto.codec import decode, encode
from kvasir_proto.election.candidacy import Candidacy
from kvasir_proto.election.configuration import (
    PROPOSAL,
    CommittedElectorate,
    Proposal,
    commits,
    make_link,
    open_link,
    successor_of,
)
from kvasir_proto.election.elector import Elector, MemberView
from kvasir_proto.election.knowledge import ProvenKnowledge
from kvasir_proto.election.options import LAN
from kvasir_proto.election.prepared import PREPARED, make_prepared, open_prepared, sign_assent
from kvasir_proto.election.quorum import liars_max
from kvasir_proto.election.readiness import sign_pre_vote
from kvasir_proto.election.tenure import Tenure
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Instant
from kvasir_proto.messages.election import (
    AssentGrant,
    AssentRefusal,
    AssentRequest,
    ElectorateProposal,
    VoteGrant,
)
from kvasir_proto.signing import SIGNED, Signed
from kvasir_proto.term_proof import (
    Electorate,
    ElectorateRule,
    ProvenTerm,
    cast_vote,
    endorse,
    founding_electorate,
    make_electorate,
    make_term_proof,
)
from tests.proto.election.swarm import KEYS as UNSORTED_KEYS
from tests.proto.election.swarm import RECOVERY_KEY, SWARM

KEYS = sorted(UNSORTED_KEYS, key=lambda key: key.public_key().public_bytes_raw())
PUBLIC = [key.public_key().public_bytes_raw() for key in KEYS]
IDS = [node_id_of(each) for each in PUBLIC]
NUMBER_OF = {each: number for number, each in enumerate(PUBLIC)}


def place(rule: ElectorateRule, size: int) -> Electorate:
    """An electorate of the first so many keys, made in term 3."""
    return make_electorate(5, rule, PUBLIC[:size], term=3)


class HonestElector:
    """One honest member of the electorate, with the real promises and what survives a restart."""

    def __init__(self, number: int, present: Electorate) -> None:
        self.number = number
        root = founding_electorate(PUBLIC[0], present.rule)
        self.knowledge = ProvenKnowledge(
            SWARM,
            root,
            RECOVERY_KEY.public_key().public_bytes_raw(),
            anchor=present.digest(),
            stored_electorates=None,
            stored_fence=None,
        )
        signed = endorse(KEYS[0], SWARM, present, ProvenTerm(0, 3, IDS[0]), 1)
        self.knowledge.learn_links((encode(CommittedElectorate(present, 3, 1, IDS[0], (signed,))),))
        assert self.knowledge.newest == present
        self.stored: bytes | None = None
        self.restart()

    def restart(self) -> None:
        """Begin again from the disk."""
        self.elector = Elector(KEYS[self.number], SWARM, IDS[0], self.knowledge, LAN, self.stored, Instant(0))

    def ask(self, message: AssentRequest | ElectorateProposal, backbone: int) -> object:
        """Its answer; None where it refuses with an error. What it promised is on its disk by then."""
        self.knowledge.learn_proof(message.proof)
        try:
            if isinstance(message, AssentRequest):
                return self.elector.assent(message, IDS[backbone])
            return self.elector.endorse(message, IDS[backbone])
        except RemoteProtocolError:
            return None
        finally:
            self.stored = self.elector.stored()

    def vote(self, term: ProvenTerm) -> VoteGrant | None:
        """Its vote, with what it endorsed; None if it is bound to a later term."""
        if (term.epoch, term.term) <= max(self.elector.voted, self.knowledge.fence_order):
            return None
        grant = VoteGrant(self.elector.vote(term, (), Instant(10**12)), self.elector.prepared_successor())
        self.stored = self.elector.stored()
        return grant


class Decision:
    """The model of the module; `liars` and `entropy` say how it goes."""

    def __init__(self, seed: int, rule: ElectorateRule, size: int) -> None:
        self.entropy = random.Random(f"{seed} {rule} {size}")
        self.present = place(rule, size)
        liars = self.entropy.sample(range(size), liars_max(self.present))
        self.liars = set(liars)
        self.honest = {
            number: HonestElector(number, self.present) for number in range(size + 2) if number not in liars
        }
        self.term = 3
        self.offices: list[tuple[int, int, bytes, Tenure | None]] = []  # backbone, term, proof, honest tenure
        self.assents: dict[tuple[Proposal, int], dict[int, bytes]] = {}
        self.shown: list[bytes] = []
        self.late: list[tuple[Tenure, AssentGrant | AssentRefusal, int]] = []
        self.endorsed: dict[tuple[Electorate, tuple[int, int, int]], set[bytes]] = {}
        self.committed: set[Electorate] = set()

    # --- what happens ---------------------------------------------------------------------------------------

    def successor(self, term: int) -> tuple[bytes, ...]:
        """Members of a successor: one of two strangers more, or one less, or the same."""
        members = set(self.present.members)
        change = self.entropy.choice([None, *self.present.members, *PUBLIC[len(members) : len(members) + 2]])
        if change is not None and self.present.term == term:
            members ^= {change}
        return tuple(sorted(members or self.present.members))

    def elect(self, backbone: int, voters: list[int], *, lies: bool) -> bool:
        """A new term, if a quorum of these votes for it; an honest winner hears what they endorsed."""
        self.term += 1
        candidacy = Candidacy(SWARM, self.present, ProvenTerm(0, self.term, IDS[backbone]))
        for number in voters:
            data = sign_pre_vote(KEYS[number], SWARM, self.present, candidacy.term)
            candidacy.take_pre_vote(data, IDS[number], frozenset())
        knowledge = next(iter(self.honest.values())).knowledge
        for number in voters:
            if number in self.liars:
                report = self.entropy.choice([b"", *self.shown])
                vote = cast_vote(KEYS[number], SWARM, self.present, candidacy.term)
                grant: VoteGrant | None = VoteGrant(encode(vote), report)
            else:
                grant = self.honest[number].vote(candidacy.term)
            if grant is not None and candidacy.is_ready:
                candidacy.take_vote(grant, IDS[number], knowledge)
        if not candidacy.is_elected:
            return False
        tenure = None
        if not lies:
            term = candidacy.term
            tenure = Tenure(SWARM, term, self.present, LAN.lease, candidacy.unfinished)
            request = tenure.ask(Instant(1))
            for member in self.present.members:
                tenure.take_grant(node_id_of(member), request)
        self.offices.append((backbone, self.term, candidacy.proof, tenure))
        return True

    def step(self) -> None:
        """Something."""
        entropy = self.entropy
        for node in self.honest.values():
            if entropy.random() < 0.3:
                dead = frozenset(each for each in IDS[: len(self.present.members)] if entropy.random() < 0.4)
                node.elector.view = MemberView(frozenset(IDS), dead, frozenset())
        if entropy.random() < 0.1:
            entropy.choice(list(self.honest.values())).restart()
        if not self.offices or entropy.random() < 0.12:
            size = len(self.present.members)
            backbone = entropy.choice([*range(size), *self.liars, *self.liars])
            lies = backbone in self.liars
            voters = entropy.sample(range(size), entropy.randint(self.present.quorum, size))
            self.elect(backbone, sorted(voters), lies=lies)
        elif self.late and entropy.random() < 0.1:
            tenure, answer, sender = entropy.choice(self.late)
            self.hear(tenure, answer, sender)
        else:
            office = self.offices[-1] if entropy.random() < 0.8 else entropy.choice(self.offices[-3:])
            if office[3] is None:
                self.lie(*office[:3])
            else:
                self.govern(office[0], office[2], office[3], chance=0.6)

    def govern(self, backbone: int, proof: bytes, tenure: Tenure, chance: float) -> None:
        """An honest backbone asks whom it asks; some of it gets there, and some answers come late."""
        entropy = self.entropy
        if entropy.random() < 0.1:
            tenure.drop_unanswered()
        change = PUBLIC[entropy.randrange(len(self.present.members) + 2)]
        tenure.want(tuple(sorted({*self.present.members} ^ {change})), b"")
        tenure.propose()
        if tenure.proposal is None:
            return
        message = tenure.proposal_message(proof)
        for node_id in tenure.to_ask:
            if entropy.random() < chance:
                self.ask(message, NUMBER_OF_ID[node_id], backbone, tenure)

    def ask(
        self, message: AssentRequest | ElectorateProposal, number: int, backbone: int, tenure: Tenure | None
    ) -> None:
        """One elector answers, honestly or with whatever helps; the backbone hears it now or later."""
        proposal = (
            decode(message.proposal, PROPOSAL)
            if isinstance(message, AssentRequest)
            else open_prepared(message.prepared, self.present, SWARM).proposal
        )
        if number in self.liars:
            answer: object = AssentGrant(sign_assent(KEYS[number], SWARM, proposal, IDS[backbone]))
            if self.shown and self.entropy.random() < 0.3:
                answer = AssentRefusal(self.entropy.choice(self.shown))
        else:
            answer = self.honest[number].ask(message, backbone)
        if isinstance(message, ElectorateProposal):
            self.shown.append(message.prepared)
            if answer is not None or number in self.liars:
                self.note_endorsed(proposal, number)
        elif isinstance(answer, AssentGrant):
            self.assents.setdefault((proposal, backbone), {})[number] = answer.assent
        if tenure is not None and isinstance(answer, AssentGrant | AssentRefusal):
            self.late.append((tenure, answer, number))
            if self.entropy.random() < 0.7:
                self.hear(tenure, answer, number)
        if tenure is not None and isinstance(answer, bytes):
            tenure.take_endorsement(answer, IDS[number])

    def hear(self, tenure: Tenure, answer: AssentGrant | AssentRefusal, sender: int) -> None:
        """What comes late may be of an earlier proposal: that is refused, or nothing."""
        try:
            if isinstance(answer, AssentGrant):
                tenure.take_assent(answer.assent, IDS[sender])
            else:
                tenure.take_refusal(answer.prepared)
        except RemoteProtocolError:
            pass

    def lie(self, backbone: int, term: int, proof: bytes) -> None:
        """A lying backbone proposes anything, shows anything, and to whom it likes."""
        entropy = self.entropy
        known = [key for key in self.assents if key[1] == backbone and key[0].term == term]
        if known and entropy.random() < 0.6:
            proposal, _ = entropy.choice(known)
        else:
            electorate = successor_of(self.present, self.successor(term), entropy.choice([term, 4, 5]))
            if self.shown and entropy.random() < 0.4:
                electorate = open_prepared(entropy.choice(self.shown), self.present, SWARM).electorate
            proposal = Proposal(0, term, entropy.randint(1, 3), electorate, b"")
        assents = self.assents.setdefault((proposal, backbone), {})
        for number in self.liars:
            assents[number] = sign_assent(KEYS[number], SWARM, proposal, IDS[backbone])
        message: AssentRequest | ElectorateProposal
        message = AssentRequest(encode(proposal), proof, entropy.choice([b"", *self.shown]))
        if commits({PUBLIC[each] for each in assents}, proposal.electorate, self.present):
            opened = [decode(each, SIGNED) for each in assents.values()]
            message = ElectorateProposal(make_prepared(proposal, IDS[backbone], opened), proof)
        for number in self.honest:
            if entropy.random() < 0.5:
                self.ask(message, number, backbone, None)

    def note_endorsed(self, proposal: Proposal, number: int) -> None:
        """Liars endorse everything: with them a few honest ones may be enough."""
        endorsers = self.endorsed.setdefault((proposal.electorate, proposal.ballot), set())
        endorsers |= {PUBLIC[number], *(PUBLIC[each] for each in self.liars)}
        if commits(endorsers, proposal.electorate, self.present):
            self.committed.add(proposal.electorate)
        assert len(self.committed) <= 1, "two electorates in one place"


NUMBER_OF_ID: dict[NodeId, int] = {each: number for number, each in enumerate(IDS)}
RULES_AND_SIZES: list[tuple[ElectorateRule, int]] = [
    ("open", 4), ("open", 5), ("open", 7), ("open", 3), ("pinned", 2), ("pinned", 3), ("pinned", 5),
]  # fmt: skip


@pytest.mark.parametrize("rule, size", RULES_AND_SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_a_place_has_one_electorate_and_gets_one(seed: int, rule: ElectorateRule, size: int) -> None:
    decision = Decision(seed, rule, size)
    for _ in range(decision.entropy.randint(5, STEPS_MAX)):
        decision.step()
    finish(decision)


STEPS_MAX = 60


def finish(decision: Decision) -> None:
    """Nothing is lost any more, nobody is dead, liars say nothing, and an honest backbone is elected."""
    honest = sorted(number for number in decision.honest if number < len(decision.present.members))
    for node in decision.honest.values():
        node.elector.view = MemberView(frozenset(IDS), frozenset(), frozenset())
    assert decision.elect(honest[0], honest, lies=False)
    backbone, _, proof, tenure = decision.offices[-1]
    assert tenure is not None
    tenure.want((*decision.present.members, PUBLIC[len(decision.present.members)]), b"")
    for _ in range(12):
        tenure.propose()
        if tenure.proposal is None:
            break
        message = tenure.proposal_message(proof)
        for node_id in tenure.to_ask:
            number = NUMBER_OF_ID[node_id]
            answer = decision.honest[number].ask(message, backbone) if number in decision.honest else None
            if isinstance(answer, bytes):
                link = tenure.take_endorsement(answer, node_id)
                decision.note_endorsed(tenure.proposal, number)
                if link is not None:
                    opened = open_link(link, decision.present, SWARM, b"")
                    assert decision.committed == {opened.electorate}
                    return
            elif isinstance(answer, AssentGrant | AssentRefusal):
                decision.hear(tenure, answer, number)
                if isinstance(answer, AssentRefusal):
                    break  # there may be something else to ask
    raise AssertionError("what was left unfinished held up everything that came after it")


# --- single rules -------------------------------------------------------------------------------------------


def elected(present: Electorate, backbone: int = 0, term: int = 4) -> tuple[dict[int, HonestElector], bytes]:
    """Honest electors that know this backbone's proof, and the proof."""
    nodes = {number: HonestElector(number, present) for number in range(len(present.members) + 1)}
    won = ProvenTerm(0, term, IDS[backbone])
    votes = [cast_vote(KEYS[each], SWARM, present, won) for each in range(present.quorum)]
    return nodes, make_term_proof(present, won, votes)


def removal(present: Electorate, member: int, term: int = 4, number: int = 1) -> Proposal:
    """That a member goes, of an electorate made in this term."""
    remaining = [each for each in present.members if each != PUBLIC[member]]
    return Proposal(0, term, number, successor_of(present, remaining, 3), b"")


def prepared_by(proposal: Proposal, assenters: Iterable[int], backbone: int = 0) -> bytes:
    signed = [sign_assent(KEYS[each], SWARM, proposal, IDS[backbone]) for each in assenters]
    opened = [decode(each, SIGNED) for each in signed]
    return make_prepared(proposal, IDS[backbone], opened)


def test_an_elector_assents_to_one_proposal_a_ballot_also_after_a_restart() -> None:
    present = place("open", 5)
    nodes, proof = elected(present)
    node, one, other = nodes[1], removal(present, 2), removal(present, 3)
    everybody = MemberView(frozenset(IDS), frozenset(IDS), frozenset())
    for is_restarted in (False, True):
        if is_restarted:
            node.restart()
        node.elector.view = everybody
        assert isinstance(node.ask(AssentRequest(encode(one), proof, b""), 0), AssentGrant)
        assert node.ask(AssentRequest(encode(other), proof, b""), 0) is None
    later = replace(other, number=2)
    assert isinstance(node.ask(AssentRequest(encode(later), proof, b""), 0), AssentGrant)
    assert node.ask(AssentRequest(encode(one), proof, b""), 0) is None, "an earlier ballot is over"
    assert node.ask(ElectorateProposal(prepared_by(one, range(4)), proof), 0) is None


def test_what_is_shown_to_be_prepared_needs_nobodys_opinion_and_nothing_less_helps() -> None:
    """The one who is to go lives, for all that is seen here; a quorum saw it otherwise."""
    present = place("open", 4)
    nodes, proof = elected(present)
    node, earlier = nodes[1], removal(present, 3, number=1)
    again = replace(earlier, number=5)
    assert node.ask(AssentRequest(encode(again), proof, b""), 0) is None
    for shown in (
        prepared_by(earlier, (0, 2)),
        prepared_by(removal(present, 2), (0, 1, 2)),
        prepared_by(earlier, (0, 2, 5)),
        prepared_by(earlier, (0, 2, 2)),
        make_prepared(again, IDS[0], decode(prepared_by(earlier, (0, 1, 2)), PREPARED).assents),
    ):
        assert node.ask(AssentRequest(encode(again), proof, shown), 0) is None
    answer = node.ask(AssentRequest(encode(again), proof, prepared_by(earlier, (0, 1, 2))), 0)
    assert isinstance(answer, AssentGrant)


def test_a_backbone_hears_from_a_refusal_what_no_voter_knew() -> None:
    """The elector that endorsed it had no vote to give; without it there is no quorum now."""
    present = place("open", 4)
    nodes, proof = elected(present)
    tenure = Tenure(SWARM, ProvenTerm(0, 4, IDS[0]), present, LAN.lease, None)
    request = tenure.ask(Instant(1))
    for member in present.members:
        tenure.take_grant(node_id_of(member), request)
    assert tenure.want(present.members[:3], b"")
    assert tenure.propose()
    left = replace(removal(present, 2), term=3)
    unfinished = prepared_by(left, (0, 1, 3), backbone=1)
    nodes[1].elector._prepared = decode(unfinished, PREPARED)
    nodes[1].elector._keep(prepared=unfinished)
    message = tenure.proposal_message(proof)
    assert isinstance(message, AssentRequest)
    refusal = nodes[1].ask(message, 0)
    assert refusal == AssentRefusal(unfinished)
    assert tenure.take_refusal(unfinished)
    assert not tenure.take_refusal(unfinished), "nothing is begun twice"
    assert tenure.propose()
    assert tenure.proposal is not None
    assert tenure.proposal.electorate == left.electorate
    again = tenure.proposal_message(proof)
    assert isinstance(again, AssentRequest)
    for number in range(4):
        answer = nodes[number].ask(again, 0)
        assert isinstance(answer, AssentGrant)
        tenure.take_assent(answer.assent, IDS[number])
    assert isinstance(tenure.proposal_message(proof), ElectorateProposal)


L, A, B, C = range(4)
"""A lying backbone and three honest electors."""


@pytest.mark.parametrize(
    "steps",
    [
        # The lock of C would go back from ballot 4 to ballot 2, and what was prepared in 3 would free it.
        [
            ("prepare", "Y", 2, (L, A, B)),
            ("prepare", "X", 3, (L, A, B)),
            ("prepare", "Y", 4, (L, A, B)),
            ("endorse", "Y", 4, (L, A, C)),
            ("endorse", "Y", 2, (C,)),
            ("prepare", "X", 5, (L, B, C)),
            ("endorse", "X", 5, (L, B, C)),
        ],
        # What A endorsed in ballot 1 would count beside what L and C endorsed in ballot 3.
        [
            ("prepare", "Y", 1, (L, A, B)),
            ("endorse", "Y", 1, (A,)),
            ("prepare", "X", 2, (L, B, C)),
            ("prepare", "Y", 3, (L, B, C)),
            ("endorse", "Y", 3, (L, C)),
            ("prepare", "X", 4, (L, A, B)),
            ("endorse", "X", 4, (L, A, B)),
        ],
    ],
    ids=["the lock goes back", "two ballots add up"],
)
def test_a_lying_backbone_of_one_term_and_four_ballots_commits_one_electorate(
    steps: list[tuple[str, str, int, tuple[int, ...]]],
) -> None:
    """Found by trying all interleavings; the random model practically never gets there."""
    present = place("open", 4)
    _, proof = elected(present, backbone=L)
    nodes = {number: HonestElector(number, present) for number in (A, B, C, 4, 5)}
    for node in nodes.values():
        node.elector.view = MemberView(frozenset(IDS), frozenset(), frozenset())
    added = {"X": 4, "Y": 5}
    successors = {
        name: successor_of(present, [*present.members, PUBLIC[each]], 3) for name, each in added.items()
    }
    prepared: dict[tuple[str, int], bytes] = {}
    endorsed: dict[str, dict[bytes, Signed]] = {"X": {}, "Y": {}}
    won = ProvenTerm(0, 4, IDS[L])
    for what, name, number, who in steps:
        proposal = Proposal(0, 4, number, successors[name], b"")
        if what == "prepare":
            assents = [sign_assent(KEYS[L], SWARM, proposal, IDS[L])] if L in who else []
            shown = max((each for each in prepared if each[0] == name and each[1] < number), default=None)
            request = AssentRequest(encode(proposal), proof, prepared[shown] if shown else b"")
            for each in (*sorted(set(who) - {L}), added[name]):
                answer = nodes[each].ask(request, L)
                if isinstance(answer, AssentGrant):
                    assents.append(answer.assent)
            opened = [decode(each, SIGNED) for each in assents]
            prepared[name, number] = make_prepared(proposal, IDS[L], opened)
            continue
        message = ElectorateProposal(prepared[name, number], proof)
        said: list[object] = [nodes[each].ask(message, L) for each in (*sorted(set(who) - {L}), added[name])]
        said += [encode(endorse(KEYS[L], SWARM, successors[name], won, number))] if L in who else []
        for data in said:
            if isinstance(data, bytes):
                signed = decode(data, SIGNED)
                endorsed[name].setdefault(signed.signer, signed)
    links = set()
    for name, by in endorsed.items():
        for number in range(1, 6):
            try:
                links.add(
                    open_link(
                        make_link(successors[name], won, number, by.values()), present, SWARM, b""
                    ).electorate
                )
            except RemoteProtocolError:
                continue
    assert len(links) <= 1


def test_promises_hold_after_a_restart_and_in_later_terms() -> None:
    """Each line is a rule that safety rests on."""
    present = place("open", 5)
    nodes, proof = elected(present)
    everybody = MemberView(frozenset(IDS), frozenset(IDS), frozenset())
    one, other = removal(present, 2, number=2), removal(present, 3, number=3)
    node = nodes[1]
    assert isinstance(node.ask(ElectorateProposal(prepared_by(one, (0, 2, 3, 4)), proof), 0), bytes)
    node.restart()
    node.elector.view = everybody
    refusal = node.ask(AssentRequest(encode(other), proof, b""), 0)
    assert refusal == AssentRefusal(prepared_by(one, (0, 2, 3, 4))), "the lock is on the disk"
    for earlier in (removal(present, 3, number=1), replace(one, number=1)):
        low = prepared_by(earlier, (0, 2, 3, 4))
        assert node.ask(ElectorateProposal(low, proof), 0) is None, "nothing is endorsed in an earlier ballot"
    assenter = nodes[0]
    assenter.elector.view = everybody
    assert isinstance(assenter.ask(AssentRequest(encode(other), proof, b""), 0), AssentGrant)
    assenter.restart()
    assenter.elector.view = everybody
    same_ballot = replace(removal(present, 2), number=3)
    assert assenter.ask(AssentRequest(encode(same_ballot), proof, b""), 0) is None, (
        "the assent is on the disk"
    )
    voter = nodes[2]
    voter.elector.view = everybody
    assert voter.vote(ProvenTerm(0, 5, IDS[1])) is not None
    assert voter.ask(AssentRequest(encode(other), proof, b""), 0) is None, "it voted in a later term"


def test_an_open_electorate_of_four_loses_nobody_but_a_proven_liar() -> None:
    """A lying backbone would get itself into a three, which tolerates none."""
    for size, answers in ((4, False), (5, True)):
        present = place("open", size)
        nodes, proof = elected(present)
        nodes[1].elector.view = MemberView(frozenset(IDS), frozenset(IDS), frozenset())
        answer = nodes[1].ask(AssentRequest(encode(removal(present, 2)), proof, b""), 0)
        assert isinstance(answer, AssentGrant) == answers


def test_what_cannot_be_prepared_again_gives_something_else_its_turn() -> None:
    """A liar shows what it got prepared as a backbone and never told anybody, of one who is gone by now."""
    present = place("open", 4)
    tenure = Tenure(SWARM, ProvenTerm(0, 5, IDS[0]), present, LAN.lease, None)
    request = tenure.ask(Instant(1))
    for member in present.members:
        tenure.take_grant(node_id_of(member), request)
    gone = Proposal(0, 4, 1, successor_of(present, [*present.members, PUBLIC[4]], 3), b"")
    hoarded = prepared_by(gone, range(4), backbone=3)
    for _ in range(3):
        assert tenure.want((*present.members, PUBLIC[5]), b"")
        assert tenure.propose()
        assert tenure.take_refusal(hoarded)
        assert tenure.propose()
        assert tenure.proposal is not None
        assert tenure.proposal.electorate == gone.electorate
        assert tenure.drop_unanswered() is not None
        assert tenure.want((*present.members, PUBLIC[5]), b"")
        assert tenure.propose()
        assert not tenure.take_refusal(hoarded), "it had its turn"
        assert tenure.proposal.electorate != gone.electorate
        assert tenure.drop_unanswered() is not None
