"""Every checker catches a core that breaks its property, and lets a right one be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.sim.byzantine import Twin
from kvasir_node.sim.checkers import (
    Checker,
    Checkers,
    ElectoratesFollow,
    FencesNeverFall,
    GoneRecordsStayGone,
    IncarnationsNeverFall,
    NothingOverflows,
    NothingRaises,
    OneBackboneATerm,
    OneLeaseAtATime,
    OutputRanksAreF32,
    PlansAreTheBackbones,
    TermsAreProven,
)
from kvasir_node.sim.clocks import WALL_START, NodeClock
from kvasir_node.sim.network import QUIET
from kvasir_node.sim.swarm import SimNode, Swarm, SwarmOptions, key_of
from kvasir_proto.capability import CLOCK_SKEW_MAX, CapabilityRecord
from kvasir_proto.effects import Notice, Now, Send
from kvasir_proto.election.requests import ElectorateChanged, LeaseHeld, LeaseLost, TermFollowed
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Instant, milliseconds, seconds
from kvasir_proto.messages.membership import Gossip
from kvasir_proto.node_core import PlanReceived
from kvasir_proto.placement.plan import make_plan
from kvasir_proto.records import RecordChanged
from kvasir_proto.signing import sign_message
from kvasir_proto.term_proof import Electorate, ProvenTerm, cast_vote, founding_electorate, make_term_proof
from tests.node.sim.toy_core import SWARM, Say, ToyCore, ToyKit

SEED = 3
FOUNDER = key_of(SEED, 0)
FOUNDER_PUBLIC = FOUNDER.public_key().public_bytes_raw()
FOUNDER_ID = node_id_of(FOUNDER_PUBLIC)
ELECTORATE = founding_electorate(FOUNDER_PUBLIC)


def watched(*checkers: Checker, core: type[ToyCore] = ToyCore, nodes: int = 3) -> tuple[Swarm, Checkers]:
    witness = Checkers(list(checkers))
    network = replace(QUIET, delay_min=milliseconds(1), delay_mean=milliseconds(1))
    swarm = Swarm(SwarmOptions(seed=SEED, network=network, spins_max=8, drain_max=64), ToyKit(core), witness)
    for _ in range(nodes):
        swarm.add_node()
    for node in swarm.nodes:
        swarm.start(node, (swarm.nodes[0].node_id,) if node.index else ())
    swarm.run_until(seconds(2))
    assert witness.violations == []
    return swarm, witness


def say(swarm: Swarm, index: int, *events: object) -> None:
    swarm.command(swarm.nodes[index], Say(events))
    swarm.run_until(swarm.now + milliseconds(20))


def proof_of(term: ProvenTerm, key: Ed25519PrivateKey = FOUNDER) -> bytes:
    electorate = founding_electorate(key.public_key().public_bytes_raw())
    return make_term_proof(electorate, term, [cast_vote(key, SWARM, electorate, term)])


def followed(term: int, backbone: NodeId, key: Ed25519PrivateKey = FOUNDER) -> TermFollowed:
    proven = ProvenTerm(0, term, backbone)
    return TermFollowed(proven, proof_of(proven, key))


def test_two_backbones_of_one_term_are_caught() -> None:
    swarm, witness = watched(OneBackboneATerm())
    say(swarm, 1, followed(5, swarm.nodes[1].node_id))
    say(swarm, 2, followed(6, swarm.nodes[2].node_id))
    assert witness.violations == []
    say(swarm, 2, followed(5, swarm.nodes[2].node_id))
    (violation,) = witness.violations
    assert violation.node == 2
    assert violation.checker == "OneBackboneATerm"
    assert violation.invariant.startswith("6")
    assert "(0, 5)" in violation.evidence


def test_a_lease_of_another_terms_backbone_is_caught() -> None:
    swarm, witness = watched(OneBackboneATerm())
    say(swarm, 1, LeaseHeld(0, 1, Instant(seconds(9))))
    assert [each.node for each in witness.violations] == [1]


@pytest.mark.parametrize("end", ["step down", "crash", "lapse", "nothing"])
def test_two_leases_at_a_time_are_caught_by_each_nodes_own_clock(end: str) -> None:
    swarm, witness = watched(OneLeaseAtATime(), nodes=4)
    swarm.crash(swarm.nodes[0])  # the toy founder would hold its lease for ever
    one, two = swarm.nodes[1:3]
    one.clock = NodeClock(Instant(seconds(1000)))
    until = Instant(one.clock.instant(swarm.now) + seconds(2))
    swarm.command(one, Say((LeaseHeld(0, 2, until),)))
    if end == "step down":
        swarm.command(one, Say((LeaseLost(0, 2, "asked to", False),)))
    elif end == "crash":
        swarm.crash(one)
    begin = swarm.now + (seconds(2) if end == "lapse" else milliseconds(1990))
    swarm.run_until(begin)
    swarm.command(two, Say((LeaseHeld(0, 3, Instant(two.clock.instant(begin) + seconds(1))),)))
    assert bool(witness.violations) is (end == "nothing")


class ForgetfulCore(ToyCore):
    """Follows a term before it is on disk."""

    def drain(self) -> Any:
        return [effect for effect in super().drain() if getattr(effect, "slot", "") != "fence"]


def test_a_fence_that_falls_is_caught() -> None:
    swarm, witness = watched(FencesNeverFall())
    say(swarm, 1, followed(5, FOUNDER_ID), followed(6, FOUNDER_ID))
    assert witness.violations == []
    say(swarm, 1, followed(5, FOUNDER_ID))
    assert [each.node for each in witness.violations] == [1]


def test_a_fence_that_is_forgotten_in_a_crash_is_caught() -> None:
    for core, forgets in ((ToyCore, False), (ForgetfulCore, True)):
        swarm, witness = watched(FencesNeverFall(), core=core)
        swarm.crash(swarm.nodes[1])
        swarm.start(swarm.nodes[1])
        assert bool(witness.violations) is forgets


@pytest.mark.parametrize("starts_anew", [False, True])
def test_an_incarnation_that_falls_is_caught_after_a_crash_too(starts_anew: bool) -> None:
    swarm, witness = watched(IncarnationsNeverFall())
    to = swarm.nodes[2].node_id
    say(swarm, 1, *(Send(to, Gossip(number, bytes(8), b"")) for number in (3, 4, 4)))
    assert witness.violations == []
    if starts_anew:
        swarm.crash(swarm.nodes[1])
        swarm.start(swarm.nodes[1])
    say(swarm, 1, Send(to, Gossip(2, bytes(8), b"")))
    assert [each.node for each in witness.violations] == [1]


PUBLIC = [key_of(SEED, index).public_key().public_bytes_raw() for index in range(4)]
SECOND = Electorate(0, 1, 1, ELECTORATE.digest(), "pinned", tuple(sorted(PUBLIC[:2])))


@pytest.mark.parametrize(
    "bad",
    [
        dataclasses.replace(SECOND, members=tuple(sorted((PUBLIC[0], PUBLIC[2])))),
        dataclasses.replace(SECOND, version=2, members=tuple(sorted(PUBLIC[:3]))),
        dataclasses.replace(SECOND, version=2, predecessor=bytes([7] * 32)),
    ],
    ids=["two of one number", "two members at a time", "after nobody's"],
)
def test_an_electorate_that_follows_none_is_caught(bad: Electorate) -> None:
    swarm, witness = watched(ElectoratesFollow(ELECTORATE))
    say(swarm, 1, ElectorateChanged(SECOND, frozenset()), ElectorateChanged(SECOND, frozenset()))
    assert witness.violations == []
    say(swarm, 2, ElectorateChanged(bad, frozenset()))
    assert [each.checker for each in witness.violations] == ["ElectoratesFollow"]


def record_of(sequence: int, expires: int = 1 << 62) -> RecordChanged:
    record = CapabilityRecord(
        node_id=FOUNDER_ID,
        sequence=sequence,
        expires=expires,
        addresses=(),
        versions=(1,),
        node_version="1",
        backend="toy",
        device="toy",
        accumulation="F32",
        memory_bytes=0,
        state="ready",
        reason="",
    )
    return RecordChanged(FOUNDER_ID, record, bytes(32))


GONE = RecordChanged(FOUNDER_ID, None, b"")


@pytest.mark.parametrize(
    "events, caught",
    [
        ((record_of(1), record_of(2), GONE, record_of(3)), False),
        ((record_of(1), GONE, record_of(1)), True),
        ((record_of(2), record_of(1)), True),
        ((record_of(1, expires=WALL_START - CLOCK_SKEW_MAX),), True),
        ((record_of(1, expires=WALL_START),), False),
    ],
)
def test_a_record_that_comes_back_is_caught(events: tuple[object, ...], caught: bool) -> None:
    swarm, witness = watched(GoneRecordsStayGone())
    say(swarm, 1, *events)
    assert bool(witness.violations) is caught


@pytest.mark.parametrize(
    "event",
    [
        followed(7, FOUNDER_ID, key_of(SEED, 1)),
        TermFollowed(ProvenTerm(0, 7, FOUNDER_ID), proof_of(ProvenTerm(0, 6, FOUNDER_ID))),
        TermFollowed(ProvenTerm(0, 7, FOUNDER_ID), b"\x80"),
        TermFollowed(
            ProvenTerm(0, 7, FOUNDER_ID),
            make_term_proof(
                ELECTORATE,
                ProvenTerm(0, 7, FOUNDER_ID),
                [cast_vote(key_of(SEED, 1), SWARM, ELECTORATE, ProvenTerm(0, 7, FOUNDER_ID))],
            ),
        ),
    ],
    ids=["electorate of its own", "proof of another term", "no proof", "a vote of nobody"],
)
def test_a_term_without_its_proof_is_caught(event: TermFollowed) -> None:
    swarm, witness = watched(TermsAreProven(SWARM, ElectoratesFollow(ELECTORATE)))
    say(swarm, 1, followed(6, FOUNDER_ID))
    assert witness.violations == []
    say(swarm, 1, event)
    assert [each.checker for each in witness.violations] == ["TermsAreProven"]


def plan_of(revision: int, key: Ed25519PrivateKey = FOUNDER, workers: int = 2, term: int = 1) -> PlanReceived:
    nodes = [node_id_of(public_key) for public_key in PUBLIC[:workers]]
    plan = make_plan(range(4), 8, nodes, epoch=0, term=term, revision=revision)
    return PlanReceived(plan, sign_message(key, SWARM, plan))


def test_a_plan_by_anybody_else_and_a_revision_used_twice_are_caught() -> None:
    for bad in (plan_of(3, key_of(SEED, 1)), plan_of(1, workers=3), plan_of(3, term=9)):
        terms = OneBackboneATerm()
        swarm, witness = watched(terms, PlansAreTheBackbones(SWARM, terms))
        say(swarm, 0, plan_of(1), plan_of(1), plan_of(2))
        assert witness.violations == []
        say(swarm, 1, bad)
        assert [each.checker for each in witness.violations] == ["PlansAreTheBackbones"]


def test_experts_of_output_layers_on_a_node_that_adds_in_f16_are_caught() -> None:
    half = swarm_id(1)

    def checker(output_layers: set[int]) -> OutputRanksAreF32:
        return OutputRanksAreF32(frozenset(output_layers), lambda node_id: node_id != half)

    for layers, caught in ((set(), False), ({3}, True)):
        swarm, witness = watched(checker(layers))
        say(swarm, 0, plan_of(1))
        assert bool(witness.violations) is caught
    swarm, witness = watched(checker(set()))
    say(swarm, 1, LeaseHeld(0, 2, Instant(seconds(60))))
    assert len(witness.violations) == 1


def swarm_id(index: int) -> NodeId:
    return node_id_of(key_of(SEED, index).public_key().public_bytes_raw())


class TalkativeCore(ToyCore):
    """Asks for more each time."""

    def tick(self, now: Now) -> None:
        super().tick(now)
        self._effects.extend(Notice("again") for _ in range(now.instant // seconds(1)))


class StandingCore(ToyCore):
    """Its deadline stands still from 3 s on."""

    def tick(self, now: Now) -> None:
        if now.instant < seconds(3):
            super().tick(now)


class FragileCore(ToyCore):
    """Cannot hear of a lost connection."""

    def command(self, request: Any, now: Now) -> None:
        if isinstance(request, str):
            raise KeyError(request)
        super().command(request, now)


@pytest.mark.parametrize("core, end_s", [(TalkativeCore, 70), (StandingCore, 4)])
def test_a_core_that_asks_for_ever_more_or_stands_still_is_caught(core: type[ToyCore], end_s: int) -> None:
    swarm, witness = watched(NothingOverflows(), core=core)
    swarm.run_until(seconds(end_s))
    assert {each.checker for each in witness.violations} == {"NothingOverflows"}


def test_a_core_that_raises_is_caught_and_crashed() -> None:
    swarm, witness = watched(NothingRaises(), core=FragileCore)
    swarm.crash(swarm.nodes[0])
    swarm.run_until(seconds(3))
    assert {each.node for each in witness.violations} == {1, 2}
    assert "KeyError" in witness.violations[0].evidence
    assert not swarm.nodes[1].is_up


def test_what_liars_say_of_themselves_is_not_looked_at() -> None:
    lies: list[Callable[[], object]] = [
        lambda: followed(1, swarm_id(1), key_of(SEED, 1)),
        lambda: LeaseHeld(0, 1, Instant(seconds(99))),
        lambda: followed(0, swarm_id(1), key_of(SEED, 1)),
        lambda: plan_of(1, key_of(SEED, 1)),
    ]
    for is_liar in (True, False):
        terms = OneBackboneATerm()
        checkers: list[Checker] = [
            terms,
            OneLeaseAtATime(),
            FencesNeverFall(),
            TermsAreProven(SWARM, ElectoratesFollow(ELECTORATE)),
            PlansAreTheBackbones(SWARM, terms),
        ]
        witness = Checkers(checkers)
        swarm = Swarm(SwarmOptions(seed=SEED), ToyKit(), witness)
        for _ in range(2):
            swarm.add_node()
        node: SimNode = swarm.nodes[1]
        node.adversary = Twin() if is_liar else None
        for each in swarm.nodes:
            swarm.start(each, (swarm.nodes[0].node_id,) if each.index else ())
        swarm.run_until(seconds(2))
        assert witness.violations == []
        say(swarm, 1, *(lie() for lie in lies))
        assert bool(witness.violations) is not is_liar
