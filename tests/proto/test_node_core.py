"""Node cores together: what one core's news must do to another, in small swarms."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import pytest

from kvasir_proto import answer_times, records
from kvasir_proto.accusations import Agreed
from kvasir_proto.admission import (
    Credential,
    InviteIssued,
    IssueInvite,
    Revocation,
    Revoke,
    UseInvite,
    invite_key,
    sign_revocation,
)
from kvasir_proto.capability import RankVerdict, seal_record
from kvasir_proto.codec import decode
from kvasir_proto.effects import Notice, Now
from kvasir_proto.election.requests import LeaseHeld
from kvasir_proto.election.states import Role
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, node_id_of, public_key_of
from kvasir_proto.instants import Duration, Instant, after, milliseconds, seconds
from kvasir_proto.limits import Rank
from kvasir_proto.manifest import ShardSet
from kvasir_proto.membership.events import Leave, Seed
from kvasir_proto.messages.election import ELECTION, Knowledge
from kvasir_proto.messages.membership import Ping
from kvasir_proto.messages.plan import PlanAccept
from kvasir_proto.node_core import (
    FAR_SAMPLES_MIN,
    AnswersSeen,
    BackboneEngineDied,
    Describe,
    FoundOut,
    HolderFailed,
    HolderReady,
    HolderRefused,
    NodeCore,
    PlanReceived,
    ShardLost,
    ShardRefused,
)
from kvasir_proto.placement.plan import Plan
from kvasir_proto.plan_offers import INFORMING_BYTES_MAX, PlanOffers
from kvasir_proto.records import RecordChanged
from kvasir_proto.signing import sign_message
from kvasir_proto.tolerance_certificate import CERTIFICATE_LIFETIME
from kvasir_proto.verdicts_in_force import SET_TIME_MAX, VerdictInForce
from tests.proto.small_swarm import MODEL, SmallNode, SmallSwarm, capability, key_of


def backbones(swarm: SmallSwarm) -> list[SmallNode]:
    return [
        each
        for each in swarm.nodes.values()
        if each.core is not None and not each.is_stopped and each.core.view().role is Role.BACKBONE
    ]


def all_ready(swarm: SmallSwarm) -> bool:
    running = [each.core for each in swarm.nodes.values() if each.core is not None and not each.is_stopped]
    return all(core.view().state == "ready" for core in running) and len(backbones(swarm)) == 1


def of_type(node: SmallNode, kind: type) -> list[Any]:
    return [each for each in node.told if isinstance(each, kind)]


@pytest.mark.parametrize("electorate", ["open", "pinned"])
def test_six_nodes_elect_place_and_agree(electorate: str) -> None:
    swarm = SmallSwarm(6, electorate=electorate)
    assert swarm.run(seconds(20), lambda: all_ready(swarm)) < 10
    swarm.run(seconds(10))
    views = [each.core.view() for each in swarm.nodes.values() if each.core is not None]
    assert len({view.fence for view in views}) == 1
    assert len({view.plan for view in views if view.plan is not None}) == 1
    assert len({view.electorate for view in views}) == 1
    assert len(views[0].electorate.members) == (4 if electorate == "open" else 5)
    coverage = views[0].coverage
    assert coverage is not None
    assert (coverage.n_pairs_held, coverage.holders_min) == (32, 2)


def test_a_founder_alone_is_backbone_and_says_what_it_waits_for() -> None:
    swarm = SmallSwarm(1)
    swarm.run(seconds(10))
    core = swarm.node(1).core
    assert core is not None
    view = core.view()
    assert (view.role, view.state) == (Role.BACKBONE, "joining")
    assert view.reason == "no plan yet: no worker has joined"


def test_a_killed_backbone_is_replaced_and_its_successor_goes_on_with_the_plan() -> None:
    swarm = SmallSwarm(6)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(5))
    (first,) = backbones(swarm)
    term = first.core.fence  # type: ignore[union-attr]
    swarm.kill(first)
    assert swarm.run(seconds(10), lambda: bool(backbones(swarm))) < 4
    assert swarm.run(seconds(30), lambda: all_ready(swarm)) < 10
    (second,) = backbones(swarm)
    assert second.core is not None
    assert term is not None
    assert second.core.fence is not None
    assert second.core.fence[:2] > term[:2]
    swarm.start(first)
    assert swarm.run(seconds(30), lambda: all_ready(swarm)) < 15
    assert backbones(swarm) == [second]


def test_a_dead_workers_experts_get_other_holders() -> None:
    swarm = SmallSwarm(6)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(3))
    (backbone,) = backbones(swarm)
    worker = next(each for each in swarm.nodes.values() if each is not backbone)
    swarm.kill(worker)

    def is_mended() -> bool:
        assert backbone.core is not None
        view = backbone.core.view()
        assert view.coverage is not None
        gone = view.plan is not None and worker.node_id not in view.plan.nodes
        return gone and view.coverage.holders_min == 2 and view.state == "ready"

    assert swarm.run(seconds(30), is_mended) < 10


def test_what_an_ordinary_member_says_or_does_is_looked_at_by_its_backbone_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each node looked at everything again whenever any member changed, and found nothing."""
    swarm = SmallSwarm(5)
    plain = {"ranks": ("bulk",), "stands_for_elector": False, "has_backbone_file": False}
    said, died = swarm.add(6, **plain), swarm.add(7, memory_bytes=0, **plain)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(20))
    (backbone,) = backbones(swarm)
    reviewed: list[NodeId] = []
    review = NodeCore._review

    def counted(core: NodeCore, now: Now) -> None:
        reviewed.append(core.node_id)
        review(core, now)

    monkeypatch.setattr(NodeCore, "_review", counted)
    swarm.run(seconds(5))
    assert not reviewed, "nothing happens"
    assert said.core is not None
    said.core.command(Describe(replace(said.capability, device="another")), swarm.now())
    swarm._do(said)
    swarm.run(seconds(5))
    assert set(reviewed) == {said.node_id, backbone.node_id}
    reviewed.clear()
    swarm.kill(died)
    swarm.run(seconds(20))
    assert set(reviewed) == {backbone.node_id}
    reviewed.clear()
    better = next(each for each in swarm.nodes.values() if each not in (backbone, said, died))
    assert better.core is not None
    better.core.command(Describe(replace(better.capability, headroom_bytes=1 << 40)), swarm.now())
    swarm._do(better)
    swarm.run(seconds(5))
    others = {each.node_id for each in swarm.nodes.values()} - {said.node_id, died.node_id}
    assert set(reviewed) == others, "it is to those that stand beside it"


def test_a_node_in_quarantine_gets_no_experts_until_its_time_is_over() -> None:
    swarm = SmallSwarm(6)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(3))
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    liar = next(each for each in swarm.nodes.values() if each is not backbone)
    until = Instant(swarm.time + seconds(60))
    verdict = VerdictInForce(liar.node_id, "quarantined", "non_finite: row 3", until)
    backbone.core.command(FoundOut(verdict), swarm.now())
    swarm._do(backbone)
    assert backbone.core.view().verdicts == (verdict,)

    def is_named() -> bool:
        assert backbone.core is not None
        plan = backbone.core.view().plan
        return plan is not None and len(plan.shard_of(liar.node_id)) > 0

    def is_mended() -> bool:
        assert backbone.core is not None
        view = backbone.core.view()
        assert view.coverage is not None
        return not is_named() and view.coverage.holders_min == 2 and view.state == "ready"

    assert swarm.run(seconds(30), is_mended) < 10
    swarm.kill(liar)
    swarm.start(liar)  # what it says of itself changes nothing
    while swarm.time < until:
        assert not is_named()
        swarm.run(seconds(1))
    assert swarm.run(seconds(30), is_named) < 10
    assert backbone.core.view().verdicts == ()


def test_a_member_that_was_found_unfit_gets_bulk_layers_only_until_it_is_certified_anew() -> None:
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    (last,) = MODEL.output_layers
    plan = backbone.core.view().plan
    assert plan is not None
    unfit = next(
        swarm.nodes[each]
        for each in plan.nodes
        if each != backbone.node_id and last in plan.shard_of(each).layers
    )
    verdict = VerdictInForce(unfit.node_id, "unfit", "3 of 9 rows", Instant(swarm.time), b"")
    backbone.core.command(FoundOut(verdict), swarm.now())
    swarm._do(backbone)

    def holds_output() -> bool:
        assert backbone.core is not None
        newest = backbone.core.view().plan
        return newest is not None and last in newest.shard_of(unfit.node_id).layers

    assert swarm.run(seconds(30), lambda: not holds_output()) < 10
    swarm.run(seconds(20))
    assert not holds_output()
    record = backbone.core.record_of(unfit.node_id)
    assert record is not None
    certified = replace(record, verdicts=(RankVerdict("output", "verified", bytes(32)),))
    assert record.claim_digest() == b""
    assert len(certified.claim_digest()) == 32
    assert backbone.core._verdict_on(record) == "unfit"
    assert backbone.core._verdict_on(certified) is None
    swarm.kill(backbone)
    swarm.start(backbone)
    assert backbone.core is not None
    assert backbone.core._verdict_on(record) == "unfit", "a restart is no certificate"


def test_what_a_node_in_quarantine_says_it_holds_does_not_count() -> None:
    swarm = SmallSwarm(3)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(3))
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    plan = backbone.core.view().plan
    assert plan is not None
    liar = next(swarm.nodes[each] for each in plan.nodes if each != backbone.node_id)
    until = Instant(swarm.time + seconds(60))
    verdict = VerdictInForce(liar.node_id, "quarantined", "malformed", until)
    backbone.core.command(FoundOut(verdict), swarm.now())
    answer = PlanAccept(plan.epoch, plan.term, plan.revision, plan.shard_of(liar.node_id).digest(), 1)
    backbone.core.command(HolderFailed(liar.node_id, "let it be offered the plan again"), swarm.now())
    backbone.core.drain()
    backbone.core.receive(answer, liar.node_id, swarm.now())
    assert not [each for each in backbone.core.drain() if isinstance(each, HolderReady)]
    coverage = backbone.core.view().coverage
    assert coverage is not None
    assert coverage.holders_min < 2


def test_the_whole_swarm_starts_again_with_what_it_stored() -> None:
    swarm = SmallSwarm(5)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    before = max(each.core.fence for each in swarm.nodes.values() if each.core and each.core.fence)
    for node in swarm.nodes.values():
        swarm.kill(node)
    swarm.run(seconds(5))
    for node in swarm.nodes.values():
        swarm.start(node)
    assert swarm.run(seconds(30), lambda: all_ready(swarm)) < 15
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    assert backbone.core.fence is not None
    assert backbone.core.fence[:2] > before[:2]


def test_nodes_that_add_in_less_than_f32_get_no_output_experts_and_never_stand() -> None:
    swarm = SmallSwarm(3)
    weak = [swarm.add(number, accumulation="F16") for number in (4, 5)]
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(5))
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    plan = backbone.core.view().plan
    assert plan is not None
    last = MODEL.layers[-1]
    for node in weak:
        assert not plan.shard_of(node.node_id).experts_of(last)
        assert plan.shard_of(node.node_id).ranges
    for strong in (1, 2, 3):
        swarm.kill(swarm.node(strong))
    swarm.run(seconds(20))
    assert not backbones(swarm)
    view = weak[0].core.view()  # type: ignore[union-attr]
    assert view.state == "electing"
    assert "the backbone" in view.reason


def test_a_member_the_plan_does_not_need_is_ready_and_one_it_needs_no_more_hears_so() -> None:
    swarm = SmallSwarm(4, electorate="pinned")
    swarm.run(seconds(20), lambda: all_ready(swarm))
    idle = swarm.add(5, ranks=(), stands_for_elector=False)
    assert idle.core is not None
    swarm.run(seconds(20))
    view = idle.core.view()
    assert (view.state, view.reason) == ("ready", "the plan needs nothing of it")
    assert all_ready(swarm)
    released = swarm.add(6, stands_for_elector=False, ranks=("bulk",))
    swarm.run(seconds(60), lambda: any(len(shard_of(each, released)) for each in plans_of(released)))
    assert released.core is not None
    released.core.command(Describe(replace(released.capability, ranks=())), swarm.now())
    swarm.run(seconds(120), lambda: not len(shard_of(plans_of(released)[-1], released)))


def versions_of(swarm: SmallSwarm) -> set[tuple[int, int, int]]:
    """The plans that the nodes of a swarm know."""
    plans = [each.core.view().plan for each in swarm.nodes.values() if each.core and not each.is_stopped]
    return {(each.epoch, each.term, each.revision) if each is not None else (0, 0, 0) for each in plans}


def test_whom_the_plan_gives_nothing_knows_the_plan_in_force_too() -> None:
    """Through plans, elections and its own absence: it showed the last plan that had named it for good."""
    swarm = SmallSwarm(4, electorate="pinned")
    swarm.run(seconds(20), lambda: all_ready(swarm))
    idle = swarm.add(5, ranks=(), stands_for_elector=False)
    swarm.run(seconds(20), lambda: len(versions_of(swarm)) == 1)
    swarm.add(6, stands_for_elector=False, ranks=("bulk",))
    swarm.run(seconds(60), lambda: max(versions_of(swarm))[2] > 1 and len(versions_of(swarm)) == 1)
    (backbone,) = backbones(swarm)
    backbone.is_stopped = True
    swarm.run(seconds(60), lambda: max(versions_of(swarm))[1] > 1 and len(versions_of(swarm)) == 1)
    backbone.is_stopped, backbone.armed = False, -1
    swarm._later(backbone, 1, lambda core: core.tick(swarm.now()))
    swarm.kill(idle)
    swarm.run(seconds(20))
    swarm.add(7, stands_for_elector=False, ranks=("bulk",))
    swarm.run(seconds(60))
    swarm.start(idle)
    swarm.run(seconds(20), lambda: len(versions_of(swarm)) == 1)
    swarm.run(seconds(5))
    assert all_ready(swarm)


def test_informing_of_a_plan_is_bounded_by_bytes_and_ends_with_an_answer() -> None:
    """At 2,000 nodes with a large plan most hear nothing of it, and what is sent does not grow with them."""
    swarm = SmallSwarm(2)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    plan = next(iter(plans_of(swarm.node(1))))
    named = [node_id_of(key_of(1).public_key().public_bytes_raw())]
    idle = [NodeId(f"n{number:04}") for number in range(2000)]
    offers = PlanOffers()
    offers.inform(idle, Instant(0))
    assert offers.next_deadline() is None, "there is no plan to tell of"
    offers.offer(plan, bytes(INFORMING_BYTES_MAX // 100), b"", named, Instant(0))
    offers.drain()
    offers.inform([*named, *idle], Instant(0))
    while offers.next_deadline() == Instant(0):
        offers.tick(Instant(0))
    assert sorted(each.to for each in offers.drain()) == idle[:100]
    offers.inform(idle[:1], Instant(1))
    accept = PlanAccept(plan.epoch, plan.term, plan.revision, ShardSet().digest(), 0)
    assert offers.take(accept, idle[0], Instant(1))
    assert not offers.take(accept, idle[1], Instant(1)), "it is not told any more"
    offers.tick(after(Instant(0), seconds(3600)))
    assert [each.to for each in offers.drain()] == named
    offers.withdraw()
    assert offers.next_deadline() is None


def plans_of(node: SmallNode) -> list[Plan]:
    return [each.plan for each in of_type(node, PlanReceived)]


def shard_of(plan: Plan, node: SmallNode) -> ShardSet:
    return plan.shard_of(node.node_id)


def test_a_shard_without_room_is_refused_with_need_and_have_and_placed_elsewhere() -> None:
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    worker = next(each for each in swarm.nodes.values() if each is not backbone)
    assert worker.core is not None
    plan = backbone.core.view().plan
    assert plan is not None
    refusal = ShardRefused(plan.epoch, plan.term, plan.revision, "no_memory", "no room", 4000, 2000)
    worker.core.command(ShardLost("its engine ended"), swarm.now())
    worker.core.command(refusal, swarm.now())
    swarm._do(worker)
    backbone.core.command(HolderFailed(worker.node_id, "closed"), swarm.now())
    swarm._do(backbone)
    swarm.run(seconds(40))
    assert of_type(backbone, HolderRefused)[0].code == "no_memory"
    plan = backbone.core.view().plan
    assert plan is not None
    assert MODEL.shard_size_bytes(plan.shard_of(worker.node_id)) <= 2000


def test_a_node_that_leaves_is_gone_for_everybody_and_says_nothing_more() -> None:
    swarm = SmallSwarm(5)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(5))
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    backbone.core.command(Leave("the node stops"), swarm.now())
    swarm._do(backbone)
    leaving, backbone.is_stopped = backbone, True
    assert swarm.run(seconds(10), lambda: bool(backbones(swarm))) < 1.5, "its lease was given back"
    swarm.run(seconds(5))
    for node in swarm.nodes.values():
        if node is not leaving:
            assert node.core is not None
            member = {each.node_id: each for each in node.core.view().members}[leaving.node_id]
            assert member.state == "left"
            assert node.core.record_of(leaving.node_id) is None


def test_a_stopped_node_rejoins_by_itself() -> None:
    swarm = SmallSwarm(6)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    (backbone,) = backbones(swarm)
    worker = next(each for each in swarm.nodes.values() if each is not backbone)
    worker.is_stopped = True
    swarm.run(seconds(60))
    worker.is_stopped = False
    worker.armed = -1
    swarm._later(worker, 1, lambda core: core.tick(swarm.now()))
    assert swarm.run(seconds(30), lambda: all_ready(swarm)) < 20


UNFIT: dict[str, dict[str, Any]] = {
    "adds in F16": {"accumulation": "F16"},
    "adds in BF16": {"accumulation": "BF16"},
    "adds in less than F32 for some weights": {"accumulation": "MIXED"},
    "was not invited for it, or does not want to": {"ranks": ("output", "bulk")},
    "has no backbone file": {"has_backbone_file": False},
    "is judged unfit": {"verdicts": (RankVerdict("backbone", "unfit", bytes(32)),)},
}


@pytest.mark.parametrize("why", list(UNFIT))
def test_a_node_unfit_for_backbone_never_stands_not_even_alone(why: str) -> None:
    """It has its vote and founded the swarm, nobody else is there, and it stands in no term."""
    swarm = SmallSwarm(0)
    unfit = swarm.add(1, **UNFIT[why])
    swarm.run(seconds(60))
    assert unfit.core is not None
    view = unfit.core.view()
    assert (view.role, view.fence, view.lease_until) == (Role.FOLLOWER, None, None)
    assert (view.state, view.reason) == ("joining", "no backbone is known yet")
    swarm.add(2, accumulation="F32")
    swarm.run(seconds(20), lambda: bool(backbones(swarm)))
    assert backbones(swarm) == [swarm.node(2)], "it votes for who is fit"


@pytest.mark.parametrize("minutes", [-10, 10])
def test_a_wrong_clock_is_named_on_both_sides_and_changes_nothing_else(minutes: int) -> None:
    swarm = SmallSwarm(5)
    wrong = swarm.add(6)
    wrong.skew = seconds(60) * minutes
    assert swarm.run(seconds(30), lambda: len(backbones(swarm)) == 1) < 10
    swarm.run(seconds(30))
    assert wrong.core is not None
    view = wrong.core.view()
    assert view.state == "degraded"
    assert f"its clock is 600 s {'ahead of' if minutes > 0 else 'behind'} most members'" in view.reason
    for node in swarm.nodes.values():
        assert node.core is not None
        if node is not wrong:
            (seen,) = (each for each in node.core.view().members if each.node_id == wrong.node_id)
            assert (seen.state, seen.condition) == ("alive", "clock_wrong")
            assert node.core.view().state == "ready"
    wrong.skew = 0
    swarm.run(seconds(60))
    assert wrong.core.view().state == "ready"


def kill_engine(swarm: SmallSwarm, node: SmallNode, times: int) -> None:
    """The backbone engine of this node dies so often, a second apart."""
    for _ in range(times):
        assert node.core is not None
        node.core.command(BackboneEngineDied("killed by signal 9"), swarm.now())
        swarm._do(node)
        swarm.run(seconds(1))


def test_a_backbone_whose_engine_keeps_dying_steps_down_and_stands_behind_all_others() -> None:
    swarm = SmallSwarm(3)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(10))
    (first,) = backbones(swarm)
    kill_engine(swarm, first, 2)
    assert backbones(swarm) == [first], "an engine may die"
    kill_engine(swarm, first, 1)
    assert first.core is not None
    swarm.run(seconds(10), lambda: bool(backbones(swarm)))
    (second,) = backbones(swarm)
    assert second is not first
    assert [each.event for each in of_type(first, Notice)].count("backbone_engine_unsteady") == 1
    swarm.run(seconds(20))
    view = first.core.view()
    assert view.state == "degraded"
    assert "its backbone engine died 3 times within 10 min" in view.reason
    record = second.core.record_of(first.node_id) if second.core is not None else None
    assert record is not None
    assert record.state == "degraded", "the others are told"
    assert first.core._candidacy.position == 3, "behind the three that live, itself among them"
    swarm.run(seconds(560))
    assert first.core.view().state == "degraded"
    swarm.run(seconds(30))
    assert [each.event for each in of_type(first, Notice)].count("backbone_engine_steady") == 1
    assert first.core.view().state == "ready"
    assert first.core._candidacy.position < 3


def test_an_unsteady_node_leads_where_there_is_nobody_else_and_is_not_deposed_twice() -> None:
    swarm = SmallSwarm(1)
    swarm.add(2, ranks=("output", "bulk"), has_backbone_file=False)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    founder = swarm.node(1)
    assert founder.core is not None
    term = founder.core.fence
    kill_engine(swarm, founder, 5)
    assert founder.core.fence == term, "nobody else could serve: it goes on"
    swarm.kill(founder)
    swarm.start(founder)
    assert swarm.run(seconds(20), lambda: bool(backbones(swarm))) < 10
    swarm.add(3)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    kill_engine(swarm, founder, 3)
    swarm.run(seconds(10), lambda: bool(backbones(swarm)))
    (third,) = backbones(swarm)
    kill_engine(swarm, third, 3)
    swarm.run(seconds(10), lambda: bool(backbones(swarm)))
    (last,) = backbones(swarm)
    kill_engine(swarm, last, 9)
    assert backbones(swarm) == [last], "whose engines all die pass the lease round once, and no more"


def twins_record(swarm: SmallSwarm, node: SmallNode) -> bytes:
    """What another process with the node's identity says of itself."""
    assert node.core is not None
    own = node.core.record_of(node.node_id)
    assert own is not None
    twin = replace(own, sequence=own.sequence + 10**9, device="a copied home")
    return seal_record(node.key, swarm.swarm.digest, twin)


def test_a_second_process_with_this_identity_is_named_and_neither_votes_nor_stands() -> None:
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(5))
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    data = twins_record(swarm, backbone)
    backbone.core.receive_published("records", data, backbone.node_id, swarm.now())
    swarm._do(backbone)
    view = backbone.core.view()
    assert (view.state, view.role) == ("conflicted", Role.FOLLOWER)
    assert "identity" in view.reason
    swarm.run(seconds(10), lambda: bool(backbones(swarm)))
    assert backbones(swarm) != [backbone]


def test_a_twin_whose_record_went_past_this_node_is_found_by_what_others_name() -> None:
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(5))
    (backbone,) = backbones(swarm)
    other = next(each for each in swarm.nodes.values() if each is not backbone)
    assert backbone.core is not None
    assert other.core is not None
    data = twins_record(swarm, backbone)
    other.core.receive_published("records", data, other.node_id, swarm.now())
    swarm._do(other)
    core = backbone.core
    assert swarm.run(seconds(30), lambda: core.view().state == "conflicted") < 30
    assert "a record with this node's identity" in core.view().reason


def test_in_a_swarm_by_invitation_strangers_are_not_heard_and_invites_admit_one_node() -> None:
    swarm = SmallSwarm(1, admission="invite")
    swarm.run(seconds(5))
    founder = swarm.node(1)
    assert founder.core is not None
    stranger = swarm.add(2)
    swarm.run(seconds(5))
    assert stranger.core is not None
    assert founder.core.record_of(stranger.node_id) is None
    with pytest.raises(RemoteProtocolError) as refused:
        founder.core.receive(Ping(1, 1, bytes(8), b""), stranger.node_id, swarm.now())
    assert refused.value.code == "not_a_member"

    digest = founder.core.view().electorate.digest()
    ranks: tuple[Rank, ...] = ("backbone", "output", "bulk")
    request = IssueInvite(b"0123456789abcdef", digest, ranks, ("/ip4/127.0.0.1/tcp/1",), seconds(600))
    founder.core.command(request, swarm.now())
    swarm._do(founder)
    (issued,) = of_type(founder, InviteIssued)
    stranger.core.command(UseInvite(issued.invite), swarm.now())
    swarm._do(stranger)
    swarm.run(
        seconds(20), lambda: founder.core is not None and founder.core.record_of(stranger.node_id) is not None
    )
    swarm.run(seconds(30), lambda: all_ready(swarm))

    third = swarm.add(3)
    assert third.core is not None
    third.core.command(UseInvite(issued.invite), swarm.now())
    swarm._do(third)
    swarm.run(seconds(15))
    assert founder.core.record_of(third.node_id) is None, "an invite admits one node"

    request = IssueInvite(b"fedcba9876543210", digest, ("bulk",), ("/ip4/127.0.0.1/tcp/1",), seconds(600))
    founder.core.command(request, swarm.now())
    swarm._do(founder)
    fourth = swarm.add(4)
    assert fourth.core is not None
    fourth.core.command(UseInvite(of_type(founder, InviteIssued)[-1].invite), swarm.now())
    swarm._do(fourth)
    core = founder.core
    swarm.run(seconds(30), lambda: core.record_of(fourth.node_id) is not None)
    record = core.record_of(fourth.node_id)
    assert record is not None
    assert (record.ranks, record.stands_for_elector) == (("bulk",), False), "no more than it was invited for"

    revocation = Revocation(1, "node", public_key_of(stranger.node_id))
    founder.core.command(Revoke(sign_revocation(key_of(1), swarm.swarm, revocation)), swarm.now())
    swarm._do(founder)
    swarm.run(seconds(10))
    assert founder.core.record_of(stranger.node_id) is None


def invite(swarm: SmallSwarm, issuer: SmallNode, node: SmallNode, secret: bytes) -> None:
    """Have an issuer invite a node, which uses the invite."""
    assert issuer.core is not None
    assert node.core is not None
    digest = issuer.core.view().electorate.digest()
    ranks: tuple[Rank, ...] = ("backbone", "output", "bulk")
    request = IssueInvite(secret, digest, ranks, ("/ip4/127.0.0.1/tcp/1",), seconds(3600))
    issuer.core.command(request, swarm.now())
    swarm._do(issuer)
    node.core.command(UseInvite(of_type(issuer, InviteIssued)[-1].invite), swarm.now())
    swarm._do(node)


def knows(observer: SmallNode, node: SmallNode) -> bool:
    return observer.core is not None and observer.core.record_of(node.node_id) is not None


@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("gossips", [False, True])
@pytest.mark.parametrize(
    "of, admission", [("node", "open"), ("node", "invite"), ("invite", "invite"), ("issuer", "invite")]
)
def test_who_is_revoked_learns_it_and_says_so(
    of: Literal["node", "invite", "issuer"], admission: str, gossips: bool, is_away: bool
) -> None:
    """It called itself isolated, with all others dead; and after a restart ready, for a moment."""
    swarm = SmallSwarm(2, admission=admission)
    swarm.run(seconds(5))
    founder, out = swarm.node(1), swarm.node(2)
    if admission == "invite":
        invite(swarm, founder, out, b"0123456789abcdef")
    swarm.run(seconds(60), lambda: all_ready(swarm))
    swarm.gossips = gossips
    if is_away:
        swarm.kill(out)
    issuer = founder.node_id if of == "issuer" else out.node_id
    secret = invite_key(b"0123456789abcdef").public_key().public_bytes_raw()
    revocation = Revocation(1, of, secret if of == "invite" else public_key_of(issuer))
    assert founder.core is not None
    founder.core.command(Revoke(sign_revocation(key_of(1), swarm.swarm, revocation)), swarm.now())
    swarm._do(founder)
    if is_away:
        swarm.run(seconds(20))
        swarm.start(out)
    swarm.run(seconds(150), lambda: out.core is not None and out.core.view().state == "revoked")
    assert out.core is not None
    assert "the founder has revoked" in out.core.view().reason
    assert ("membership_revoked",) in [(each.event,) for each in of_type(out, Notice)]
    swarm.run(seconds(30))
    swarm.kill(out)
    swarm.start(out)
    assert out.core.view().state == "revoked", "from the first moment"
    assert out.core.view().role is Role.FOLLOWER
    assert founder.core.view().state != "revoked"


def test_a_new_invite_brings_in_again_whose_invite_was_revoked() -> None:
    swarm = SmallSwarm(2, admission="invite")
    swarm.run(seconds(5))
    founder, out = swarm.node(1), swarm.node(2)
    invite(swarm, founder, out, b"0123456789abcdef")
    swarm.run(seconds(60), lambda: all_ready(swarm))
    secret = invite_key(b"0123456789abcdef").public_key().public_bytes_raw()
    assert founder.core is not None
    signed = sign_revocation(key_of(1), swarm.swarm, Revocation(1, "invite", secret))
    founder.core.command(Revoke(signed), swarm.now())
    swarm._do(founder)
    swarm.run(seconds(60), lambda: out.core is not None and out.core.view().state == "revoked")
    assert out.core is not None
    assert not out.core.is_admitted
    invite(swarm, founder, out, b"fedcba9876543210")
    swarm.run(seconds(60), lambda: all_ready(swarm))


def test_a_member_that_was_away_learns_what_was_revoked_before_it_trusts_anybody() -> None:
    """It comes back, and the first it hears of is the one whose membership was revoked meanwhile."""
    swarm = SmallSwarm(1, admission="invite")
    swarm.run(seconds(5))
    founder, bad, away = swarm.node(1), swarm.add(2), swarm.add(3)
    for number, node in ((2, bad), (3, away)):
        invite(swarm, founder, node, bytes([number]) * 16)
    swarm.run(seconds(30), lambda: knows(away, bad) and knows(founder, away))
    swarm.run(seconds(10))
    swarm.kill(away)
    revocation = Revocation(1, "node", public_key_of(bad.node_id))
    assert founder.core is not None
    founder.core.command(Revoke(sign_revocation(key_of(1), swarm.swarm, revocation)), swarm.now())
    swarm._do(founder)
    swarm.run(seconds(10))
    swarm.start(away)
    assert bad.core is not None
    assert away.core is not None
    own = bad.core._book.data_of(bad.core._book.digest_of(bad.node_id) or b"")
    assert own is not None
    away.core.receive_published("records", own, bad.node_id, swarm.now())
    swarm._do(away)
    assert not knows(away, bad), "it waits to be told"
    swarm.run(seconds(5), lambda: knows(away, founder) or knows(away, bad))
    assert not knows(away, bad)
    swarm.run(seconds(20))
    assert not knows(away, bad)
    assert swarm.run(seconds(20), lambda: all_ready_but(swarm, bad)) < 20


def all_ready_but(swarm: SmallSwarm, node: SmallNode) -> bool:
    others = [each.core for each in swarm.nodes.values() if each is not node and each.core is not None]
    return all(core.view().state in ("ready", "degraded") for core in others)


def test_halves_of_a_swarm_tell_each_other_what_was_revoked_while_they_were_apart() -> None:
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    ids = [each.node_id for each in swarm.nodes.values()]
    founder, bad = swarm.node(1), swarm.node(2)
    far = {swarm.node(3).node_id, swarm.node(4).node_id}
    swarm.cut = {(one, other) for one in ids for other in ids if (one in far) != (other in far)}
    swarm.run(seconds(15))
    assert founder.core is not None
    revocation = Revocation(1, "node", public_key_of(bad.node_id))
    founder.core.command(Revoke(sign_revocation(key_of(1), swarm.swarm, revocation)), swarm.now())
    swarm._do(founder)
    swarm.run(seconds(5))
    assert not knows(founder, bad)
    assert knows(swarm.node(3), bad), "the other side has not heard of it"
    swarm.cut = set()
    swarm.run(seconds(30), lambda: not knows(swarm.node(3), bad) and not knows(swarm.node(4), bad))


def test_a_newcomer_believes_what_an_elector_of_the_past_signed_before_it_came() -> None:
    """The elector has left, its member could not renew yet, and the newcomer never saw that elector."""
    swarm = SmallSwarm(1, admission="invite")
    swarm.run(seconds(5))
    founder = swarm.node(1)
    electors = [swarm.add(number) for number in (2, 3, 4)]
    for number, node in enumerate(electors):
        invite(swarm, founder, node, bytes([number]) * 16)

    def electorate() -> set[bytes]:
        assert founder.core is not None
        return set(founder.core.view().electorate.members)

    swarm.run(seconds(60), lambda: len(electorate()) == 4)
    swarm.run(seconds(5))
    issuer, member = electors[0], swarm._id_of(5)
    issued = Credential(member, ("bulk",), swarm.now().wall, swarm.now().wall + seconds(3600), bytes(32))
    credential = sign_message(issuer.key, swarm.swarm.digest, issued)
    record = capability(member, sequence=1, expires=issued.expires, ranks=("bulk",), credential=credential)
    data = seal_record(key_of(5), swarm.swarm.digest, replace(record, stands_for_elector=False))
    spare = swarm.add(6)
    invite(swarm, founder, spare, b"s" * 16)
    swarm.run(seconds(30), lambda: knows(founder, spare))
    swarm.run(seconds(10))  # the spare has met the issuer too: whom one has never seen is dead later
    assert founder.core is not None
    assert issuer.core is not None
    issuer.core.command(Leave("for good"), swarm.now())
    swarm._do(issuer)
    issuer.is_stopped = True
    left = swarm.run(seconds(120), lambda: public_key_of(issuer.node_id) not in electorate())
    assert left < 20, "who leaves with a goodbye keeps its place for a restart, and not for `dead_after`"
    newcomer = swarm.add(7, ranks=("bulk",), stands_for_elector=False)
    invite(swarm, founder, newcomer, b"n" * 16)
    swarm.run(seconds(30), lambda: knows(founder, newcomer))
    swarm.run(seconds(5))
    assert newcomer.core is not None
    assert newcomer.core.view().electorate == founder.core.view().electorate
    newcomer.core.receive_published("records", data, founder.node_id, swarm.now())
    assert newcomer.core.record_of(member) is not None
    founder.core.receive_published("records", data, founder.node_id, swarm.now())
    assert founder.core.record_of(member) is not None, "as who saw the elector come and go"


def test_minted_identities_fill_the_book_of_an_open_swarm_and_hinder_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "RECORDS_MAX", 12)
    swarm = SmallSwarm(5)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    members = [each.node_id for each in swarm.nodes.values()]
    minted = 1000

    def mint(count: int) -> None:
        nonlocal minted
        for _ in range(count):
            minted += 1
            node_id = swarm._id_of(minted)
            record = capability(node_id, sequence=1, expires=swarm.now().wall + seconds(600))
            data = seal_record(key_of(minted), swarm.swarm.digest, record)
            for node in list(swarm.nodes.values()):
                swarm._hear_gossip(node, "records", data, members[4])
            swarm.run(milliseconds(20))

    (backbone,) = backbones(swarm)
    mint(60)
    newcomer = swarm.add(6)
    mint(100)
    swarm.run(seconds(30), lambda: newcomer.core is not None and newcomer.core.view().state == "ready")
    mint(30)
    assert backbones(swarm) == [backbone]
    for node in swarm.nodes.values():
        assert node.core is not None
        known = [each.node_id for each in node.core._book]
        assert len(known) == 12
        assert {*members, newcomer.node_id} <= set(known)
        assert node.core.view().state == "ready"
        assert {each.node_id for each in node.core.view().members} <= {*members, newcomer.node_id}


@pytest.mark.parametrize("lost", [(), (1,), (2,), (1, 2)])
def test_who_was_invited_is_heard_without_gossip_whatever_is_lost_at_first(lost: tuple[int, ...]) -> None:
    swarm = SmallSwarm(1, admission="invite")
    swarm.gossips = False
    swarm.run(seconds(5))
    founder = swarm.node(1)
    assert founder.core is not None
    digest = founder.core.view().electorate.digest()
    ranks: tuple[Rank, ...] = ("backbone", "output", "bulk")
    request = IssueInvite(b"0123456789abcdef", digest, ranks, ("/ip4/127.0.0.1/tcp/1",), seconds(600))
    founder.core.command(request, swarm.now())
    swarm._do(founder)
    (issued,) = of_type(founder, InviteIssued)
    invited = swarm.add(2)
    assert invited.core is not None
    swarm.run(seconds(1))
    assert invited.core.view().reason == "this swarm is by invitation: this node needs an invite"
    invited.core.command(UseInvite(issued.invite), swarm.now())
    swarm._do(invited)
    core = invited.core
    swarm.run(seconds(5), lambda: core.is_admitted)
    pair = {1: (founder.node_id, invited.node_id), 2: (invited.node_id, founder.node_id)}
    swarm.cut = {pair[each] for each in lost}
    swarm.run(seconds(3))
    swarm.cut = set()
    swarm.run(seconds(30), lambda: all_ready(swarm))
    shown = swarm.sent[invited.node_id, founder.node_id, "record_reply"]
    assert shown <= 10, "who hears it is not shown the record again and again"


def test_a_refused_invite_is_told_in_the_state_of_who_used_it() -> None:
    swarm = SmallSwarm(1, admission="invite")
    swarm.run(seconds(5))
    founder = swarm.node(1)
    assert founder.core is not None
    digest = founder.core.view().electorate.digest()
    request = IssueInvite(b"0123456789abcdef", digest, ("bulk",), ("/ip4/127.0.0.1/tcp/1",), seconds(600))
    founder.core.command(request, swarm.now())
    swarm._do(founder)
    (issued,) = of_type(founder, InviteIssued)
    reasons = []
    for number in (2, 3):
        node = swarm.add(number)
        assert node.core is not None
        node.core.command(UseInvite(issued.invite), swarm.now())
        swarm._do(node)
        swarm.run(seconds(20))
        reasons.append(node.core.view().reason)
    assert "not admitted" not in reasons[0]
    assert reasons[1].startswith("not admitted: "), reasons[1]


def test_a_plan_is_told_once_and_an_offer_that_comes_again_is_answered_again() -> None:
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    worker = next(each for each in swarm.nodes.values() if each is not backbone)
    told = len(of_type(worker, PlanReceived))
    backbone.core.command(HolderFailed(worker.node_id, "closed"), swarm.now())
    swarm._do(backbone)
    swarm.run(seconds(5))
    assert backbone.core.view().state == "ready"
    assert len(of_type(worker, PlanReceived)) == told


def test_a_plan_that_was_offered_before_the_electorate_changed_is_believed_after_it() -> None:
    swarm = SmallSwarm(4)
    founder = swarm.node(1)
    swarm.run(seconds(20), lambda: founder.core is not None and founder.core.view().plan is not None)
    late = swarm.node(4)
    late.is_stopped = True
    swarm.run(
        seconds(3), lambda: founder.core is not None and len(founder.core.view().electorate.members) == 3
    )
    late.is_stopped = False
    late.armed = -1
    swarm._later(late, 1, lambda core: core.tick(swarm.now()))
    assert swarm.run(seconds(30), lambda: all_ready(swarm)) < 15


def test_a_holder_that_was_thought_dead_for_a_moment_is_asked_again_what_it_serves() -> None:
    """It had answered the offer and was not offered the plan again: its experts had no holder for ever."""
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(3))
    (backbone,) = backbones(swarm)
    worker = next(each for each in swarm.nodes.values() if each is not backbone)
    worker.is_stopped = True

    def is_thought_dead() -> bool:
        assert backbone.core is not None
        members = {each.node_id: each.state for each in backbone.core.view().members}
        return members[worker.node_id] == "dead"

    swarm.run(seconds(20), is_thought_dead)
    worker.is_stopped = False
    worker.armed = -1
    swarm._later(worker, 1, lambda core: core.tick(swarm.now()))
    assert swarm.run(seconds(30), lambda: all_ready(swarm)) < 15
    swarm.run(seconds(5))
    assert backbone.core is not None
    coverage = backbone.core.view().coverage
    assert coverage is not None
    assert coverage.holders_min == 2


def test_a_holder_that_answers_before_its_record_is_here_is_asked_again_what_it_serves() -> None:
    """Its answer counted as given and was kept nowhere: what it serves had no holder for ever."""
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(3))
    (backbone,) = backbones(swarm)
    worker = next(each for each in swarm.nodes.values() if each is not backbone)
    assert backbone.core is not None
    known = backbone.core.record_of(worker.node_id)
    assert known is not None
    backbone.core._hear(RecordChanged(worker.node_id, None, bytes(32)), swarm.now())
    offers = backbone.core._offers
    assert offers.plan is not None
    version = (offers.plan.epoch, offers.plan.term, offers.plan.revision)
    answer = PlanAccept(*version, offers.plan.shard_of(worker.node_id).digest(), 0)
    backbone.core.receive(answer, worker.node_id, swarm.now())
    backbone.core._hear(RecordChanged(worker.node_id, known, bytes(32)), swarm.now())
    swarm._later(backbone, 1, lambda core: core.tick(swarm.now()))

    def is_held() -> bool:
        assert backbone.core is not None
        coverage = backbone.core.view().coverage
        return coverage is not None and coverage.holders_min == 2

    assert not is_held()
    assert swarm.run(seconds(5), is_held) < 1


def test_the_lease_that_is_told_grows_and_is_never_longer_than_nine_tenths() -> None:
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(3))
    (backbone,) = backbones(swarm)
    held = of_type(backbone, LeaseHeld)
    assert len(held) > 3
    assert all(earlier.until <= later.until for earlier, later in pairwise(held))
    assert held[-1].until <= swarm.time + swarm.options.election.lease * 9 // 10


def test_a_seed_that_is_nobody_costs_nothing() -> None:
    swarm = SmallSwarm(2)
    stranger = replace(swarm.node(2).capability).node_id
    core = swarm.node(1).core
    assert core is not None
    core.command(Seed((stranger,)), swarm.now())
    swarm._do(swarm.node(1))
    swarm.run(seconds(10))


def test_what_is_announced_again_is_never_what_gossip_has_carried_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swarm = SmallSwarm(3)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    late = swarm.add(4, ranks=(), stands_for_elector=False, has_backbone_file=False, memory_bytes=0)
    heard: list[tuple[str, bytes]] = []
    assert late.core is not None
    monkeypatch.setattr(late.core, "receive_published", lambda topic, data, *_: heard.append((topic, data)))
    swarm.run(seconds(100), lambda: sum(topic == "terms" for topic, _ in heard) == 3)
    said = [decode(data, ELECTION) for topic, data in heard if topic == "terms"]
    assert all(isinstance(each, Knowledge) and each.proof for each in said)
    assert swarm.repeated == []


def has_what_they_say(node: SmallNode, others: list[SmallNode]) -> bool:
    """Whether a node has what all of these say of themselves now."""
    core = node.core
    assert core is not None
    said = [each.core.record_of(each.node_id) for each in others if each.core is not None]
    return None not in said and [core.record_of(each.node_id) for each in others] == said


@pytest.mark.parametrize("admission", ["open", "invite"])
def test_what_was_lost_to_gossip_reaches_everybody_all_the_same(admission: str) -> None:
    swarm = SmallSwarm(1, admission=admission)
    swarm.run(seconds(5))
    for number in (2, 3, 4):
        node = swarm.add(number)
        if admission == "invite":
            invite(swarm, swarm.node(1), node, bytes([number]) * 16)
    members = list(swarm.nodes.values())
    swarm.run(seconds(30), lambda: all_ready(swarm) and has_what_they_say(swarm.node(2), members))

    newcomer = swarm.add(5, ranks=("bulk",), stands_for_elector=False, memory_bytes=0)
    everybody = list(swarm.nodes.values())
    swarm.gossips = False
    if admission == "invite":
        invite(swarm, swarm.node(1), newcomer, bytes([5]) * 16)
    (backbone,) = backbones(swarm)
    took = swarm.run(seconds(10), lambda: fence_of(newcomer) == fence_of(backbone))
    assert took < 5, "who is backbone is asked for, not waited for"
    swarm.run(seconds(20), lambda: all(has_what_they_say(each, everybody) for each in everybody))

    assert backbone.core is not None
    backbone.core.command(Describe(replace(backbone.capability, device="another")), swarm.now())
    swarm._do(backbone)
    swarm.run(seconds(2))
    swarm.run(seconds(20), lambda: all(has_what_they_say(each, everybody) for each in everybody))
    assert newcomer.core is not None
    said = newcomer.core.record_of(backbone.node_id)
    assert said is not None
    assert said.device == "another"


def fence_of(node: SmallNode) -> Any:
    return node.core.fence if node.core is not None else None


@pytest.mark.parametrize("way", [seconds(1), milliseconds(80)], ids=["called slow", "too near for that"])
def test_a_member_that_seemed_far_when_it_started_is_placed_once_it_is_near(way: Duration) -> None:
    swarm = SmallSwarm(3)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    far = swarm.add(4, ranks=("output", "bulk"), stands_for_elector=False)
    swarm.far[far.node_id] = way
    swarm.run(seconds(40))
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    plan = backbone.core.view().plan
    assert plan is not None
    assert not len(plan.primary_shard_of(far.node_id)), "it is asked in need only"
    swarm.far.clear()
    swarm.run(seconds(40), lambda: len(plans_of(backbone)[-1].primary_shard_of(far.node_id)) > 0)


def test_a_member_whose_first_round_trips_are_long_is_placed_with_the_others() -> None:
    """A machine that has just started answers late once or twice; that it is far takes more than that."""
    swarm = SmallSwarm(3)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    starting = swarm.add(4, ranks=("output", "bulk"), stands_for_elector=False)
    swarm.far[starting.node_id] = milliseconds(80)
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    swarm.run(seconds(20), lambda: starting.node_id in plans_of(backbone)[-1].nodes)
    (member,) = (each for each in backbone.core.view().members if each.node_id == starting.node_id)
    assert member.rtt_samples < FAR_SAMPLES_MIN, "it was placed before anybody could say that it is far"


def test_a_holder_that_answers_later_than_it_says_is_asked_for_nothing_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer_times, "SLOW_FOR", seconds(20))
    swarm = SmallSwarm(0)
    for number in range(1, 5):
        swarm.add(number, expert_row_ns=5_000)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    (backbone,) = backbones(swarm)
    assert backbone.core is not None
    late, *others = (each for each in swarm.nodes.values() if each is not backbone)

    def asked_of(node: SmallNode) -> int:
        return len(plans_of(backbone)[-1].primary_shard_of(node.node_id))

    swarm.run(seconds(20), lambda: asked_of(late) > 0)
    for _ in range(answer_times.WINDOWS):
        swarm.run(seconds(1))
        for each in others:
            backbone.core.command(AnswersSeen(each.node_id, milliseconds(1)), swarm.now(backbone))
        backbone.core.command(AnswersSeen(late.node_id, milliseconds(40)), swarm.now(backbone))
        swarm._do(backbone)
    swarm.run(seconds(30), lambda: asked_of(late) == 0)
    (slow,) = backbone.core.view().slow
    assert (slow.node_id, slow.times) == (late.node_id, 40)
    swarm.run(seconds(40), lambda: asked_of(late) > 0)
    assert backbone.core.view().slow == ()


def test_nobody_says_ready_while_the_backbone_is_not() -> None:
    """It has lost its quorum, or experts have no holder: who follows it is served as little as it is."""
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(20))
    (backbone,) = backbones(swarm)
    last, *others = (each for each in swarm.nodes.values() if each is not backbone)
    for each in others:
        swarm.kill(each)
    assert backbone.core is not None
    assert last.core is not None
    swarm.run(seconds(40))
    assert backbone.core.view().state == "isolated"
    view = last.core.view()
    assert view.state == "joining"
    assert f"the backbone {backbone.node_id} is isolated: no quorum" in view.reason
    late = swarm.add(5)
    swarm.run(seconds(20))
    assert late.core is not None
    view = late.core.view()
    assert f"the backbone {backbone.node_id} is isolated: no quorum" in view.reason, "also who has no plan"
    for each in others:
        swarm.start(each)
    swarm.run(seconds(30), lambda: all_ready(swarm))


def test_who_waits_for_an_election_that_cannot_be_says_how_many_electors_are_missing() -> None:
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(20))
    (backbone,) = backbones(swarm)
    killed, *left = (each for each in swarm.nodes.values() if each is not backbone)
    for each in (backbone, killed):
        swarm.kill(each)
    swarm.run(seconds(40))
    for each in left:
        assert each.core is not None
        view = each.core.view()
        assert view.state == "electing"
        assert view.reason.endswith("is dead; 2 of 4 electors are seen here, 3 are needed")


def test_a_backbone_is_not_quoted_with_what_it_said_of_the_one_before() -> None:
    swarm = SmallSwarm(4)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    (backbone,) = backbones(swarm)
    follower = next(each for each in swarm.nodes.values() if each is not backbone)
    assert backbone.core is not None
    assert follower.core is not None
    own = backbone.core.record_of(backbone.node_id)
    assert own is not None
    reason = f"the backbone {follower.node_id} is isolated: no quorum"
    earlier = replace(own, sequence=own.sequence + 1, state="joining", reason=reason)
    data = seal_record(backbone.key, swarm.swarm.digest, earlier)
    follower.core.receive_published("records", data, follower.node_id, swarm.now())
    view = follower.core.view()
    assert view.reason == f"the backbone {backbone.node_id} has only just been elected"


def test_an_unsteady_node_that_is_elected_all_the_same_leaves_the_lease_to_one_that_is_well() -> None:
    swarm = SmallSwarm(2)
    for number in (3, 4):
        swarm.add(number, ranks=("output", "bulk"), has_backbone_file=False)
    swarm.run(seconds(20), lambda: all_ready(swarm))
    swarm.run(seconds(10))
    (first,) = backbones(swarm)
    kill_engine(swarm, first, 3)
    swarm.run(seconds(10), lambda: bool(backbones(swarm)))
    (second,) = backbones(swarm)
    assert second is not first
    swarm.kill(second)
    swarm.run(seconds(30), lambda: backbones(swarm) == [first])
    swarm.start(second)
    swarm.run(seconds(20), lambda: all_ready_but(swarm, first))
    swarm.run(seconds(3))
    assert backbones(swarm) == [first], "while its engine lives there is no reason to go"
    kill_engine(swarm, first, 1)
    swarm.run(seconds(20), lambda: backbones(swarm) == [second])


def test_who_is_found_out_again_under_other_certificates_is_planned_without_for_longer() -> None:
    """What a node shows is its own to choose: new certificates each time were a newcomer's each time."""
    swarm = SmallSwarm(2)
    core, accused = swarm.node(1).core, swarm.node(2).node_id
    assert core is not None
    now = swarm.now()
    lasted = []
    for number in range(12):
        claim = bytes([number]) * 32
        core._take_agreed(Agreed(accused, claim, "quarantined", "wrong rows", 3), now)
        found = core._verdicts.in_force(accused, claim)
        assert found is not None
        lasted.append(found.until - now.instant)
    minutes = seconds(60)
    assert lasted[:4] == [10 * minutes, 20 * minutes, 40 * minutes, 80 * minutes]
    assert lasted[-1] == SET_TIME_MAX
    core._take_agreed(Agreed(swarm.node(1).node_id, bytes(32), "unfit", "sums are short", 3), now)
    found = core._verdicts.in_force(swarm.node(1).node_id, b"other")
    assert found is not None
    assert (found.word, found.until - now.instant) == ("unfit", CERTIFICATE_LIFETIME), "bulk layers only"


def test_whom_a_swarm_found_unfit_is_believed_again_when_auditors_say_so_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own word that it is verified is none, and nobody's is where members are taken at their word."""
    swarm = SmallSwarm(2)
    core, accused = swarm.node(1).core, swarm.node(2).node_id
    assert core is not None
    swarm.run(seconds(20), lambda: all_ready(swarm))
    record = core.record_of(accused)
    assert record is not None
    core._take_agreed(Agreed(accused, record.claim_digest(), "unfit", "sums are short", 3), swarm.now())
    core.tick(swarm.now())
    certified = replace(record, verdicts=(RankVerdict("output", "verified", bytes(32)),))
    assert core._verdict_on(certified) == "unfit"
    assert core._rank_of(certified) is None
    for word, expected in (("claimed", "unfit"), ("verified", None)):
        with monkeypatch.context() as patched:
            patched.setattr(core._verification, "is_needed", True)
            patched.setattr(core._verification, "verdict_of", lambda *_, word=word: word)
            assert core._verdict_on(certified) == expected
            assert core._verdict_on(record) == "unfit", "of the certificates that it was found out with"
