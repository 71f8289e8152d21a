"""Whole nodes of a swarm that verifies: they challenge each other through their engines, and obey that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.certification.certify import expert_program
from kvasir_node.model.store import StoredModel
from kvasir_proto.accusations import RecomputationDue
from kvasir_proto.capability import RankVerdict
from kvasir_proto.codec import encode
from kvasir_proto.errors import EngineFailed, TransportUnavailable
from kvasir_proto.ids import node_id_of
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    ChallengeHolder,
    EngineFault,
    HolderEvidenced,
    HolderJudged,
    HolderLost,
    RecomputeRows,
)
from tests.node.driver.node_world import NodeWorld, TwinNode
from tests.node.driver.test_node_duty import open_nodes, own_record, plan_of
from tests.node.driver.twins import PROGRAMS, TwinEngine, node_key, until, wall_time
from tests.node.sealed_rows import SealingWorker


def worker_engine(node: TwinNode) -> TwinEngine:
    return [each for each in node.engines.all if each.role == "worker"][-1]


def holds_output(backbone: TwinNode, node: TwinNode) -> bool:
    plan = plan_of(backbone)
    return max(each.layer for each in plan.layers) in plan.shard_of(node.node_id).layers


def challenges_by(node: TwinNode) -> list[ChallengeHolder]:
    return [each for each in worker_engine(node).received if isinstance(each, ChallengeHolder)]


async def founder_and(
    world: NodeWorld, *numbers: int, answers: Any = None
) -> tuple[TwinNode, list[TwinNode]]:
    world.start(0)
    others = world.start(*numbers)
    for each in others:
        if answers is not None:
            each.engines.before_start = lambda engine: setattr(engine, "answers_to_challenges", answers)
    founder = world.nodes[0]
    await until(lambda: founder.reigns and founder.duty._core is not None)
    await until(lambda: founder.duty._core.view().plan is not None)  # type: ignore[union-attr]
    return founder, others


async def test_members_are_verified_and_then_serve_output_layers(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path, certificates="verified") as world:
        founder, others = await founder_and(world, 1, 2)
        assert not any(holds_output(founder, each) for each in others), "nobody is taken at its word"
        await until(lambda: all(holds_output(founder, each) for each in others))
        await until(world.is_ready)
        asked = challenges_by(founder)
        assert asked
        for request in asked:
            assert request.activation == ""
            assert len(ShardSet.decode(request.shard)) in (1, 2)
        assert len({request.seed for request in asked}) == len(asked), "rows that nobody has seen"
        for each in others:
            said = own_record(each)
            assert {verdict.verdict for verdict in said.verdicts} == {"verified"}
            assert said.auditor_verdicts


@pytest.mark.parametrize(
    "outcome, state", [("unfit", "degraded"), ("inconclusive", "degraded"), ("quarantined", "joining")]
)
async def test_who_does_not_pass_serves_no_output_layer(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, outcome: str, state: str
) -> None:
    async with open_nodes(model, tmp_path, certificates="verified") as world:
        founder, others = await founder_and(world, 1, 2, answers=(outcome, "a reason"))
        await until(lambda: challenges_by(founder))
        await trio.sleep(60)
        assert not any(holds_output(founder, each) for each in others)
        assert not any(own_record(each).auditor_verdicts for each in others)
        sources = founder.duty._core.view().verdicts  # type: ignore[union-attr]
        assert bool(sources) == (outcome == "quarantined")


SPOILT: dict[str, Any] = {
    "another certificate in its record": lambda said: {
        "verdicts": tuple(RankVerdict(each.rank, "claimed", bytes(32)) for each in said.verdicts)
    },
    "another class in its record": lambda said: {"classes": ()},
}


@pytest.mark.parametrize("what", SPOILT)
async def test_a_record_that_does_not_fit_its_certificate_verifies_nothing(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, what: str
) -> None:
    async with open_nodes(model, tmp_path, certificates="verified") as world:
        founder, (other,) = await founder_and(world, 1)
        await until(lambda: own_record(other).verdicts)
        duty = other.duty
        arithmetic = duty._arithmetic
        duty._arithmetic = lambda: arithmetic() | SPOILT[what](own_record(other))  # type: ignore[method-assign]
        duty._note_certified()
        await trio.sleep(60)
        assert not holds_output(founder, other)
        assert not challenges_by(founder), "nothing is asked of who shows something else than it says"


async def test_only_auditors_are_let_in_and_shown_the_certificate(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        world.start(0, 1)
        await until(world.is_ready)
        assert world.backbone is not None
        other = next(each for each in world.nodes if each is not world.backbone)
        auditor, core = world.backbone.duty._auditor, world.backbone.duty._core
        assert auditor is not None
        assert core is not None
        assert core.auditors == frozenset(), "members are taken at their word here"
        await until(lambda: (said := core.record_of(other.node_id)) is not None and said.held is not None)
        with pytest.raises(Exception, match="only an auditor's worker"):
            await auditor._challenge(other.node_id)


async def test_an_auditor_without_an_engine_tries_again_later(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path, certificates="verified") as world:
        founder, (other,) = await founder_and(world, 1)
        fault = EngineFault(None, "not_challenged", "no memory", 1)
        worker_engine(founder).refusals[ChallengeHolder] = fault
        await until(lambda: challenges_by(founder))
        assert not holds_output(founder, other)
        worker_engine(founder).refusals.clear()
        await until(lambda: holds_output(founder, other))
        auditor = founder.duty._auditor
        assert auditor is not None
        worker_engine(founder).die()
        await until(lambda: founder.duty._holder.engine is None)  # type: ignore[union-attr]
        with pytest.raises(EngineFailed, match="not running"):
            await auditor._challenge(other.node_id)


async def test_rows_are_judged_by_the_claim_that_they_were_given_under_or_not_at_all(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        world.start(0, 1, 2)
        await until(world.is_ready)
        elector, other = world.nodes[0], world.nodes[1]
        auditor = elector.duty._auditor
        assert auditor is not None
        core = elector.duty._core
        await until(lambda: core is not None and core.record_of(other.node_id) is not None)
        due = RecomputationDue(other.node_id, own_record(other).claim_digest(), b"rows", bytes(32))
        assert (await auditor._recompute(due)).digest == due.digest
        n_asked = len(worker_engine(elector).received)
        for changed in (
            replace(due, claim_digest=bytes([7]) * 32),
            replace(due, node_id=node_id_of(bytes(32))),
        ):
            with pytest.raises(TransportUnavailable, match="claim"):
                await auditor._recompute(changed)
        assert len(worker_engine(elector).received) == n_asked


async def found_out(
    world: NodeWorld, *, answers: tuple[str, str]
) -> tuple[TwinNode, TwinNode, list[TwinNode]]:
    """Node 1 was found out by the audit of the backbone, which can show why: both, and the others."""
    world.start(0, 1, 2, 3)
    await until(world.is_ready)
    backbone = world.backbone
    assert backbone is not None
    number = next(number for number, each in enumerate(world.nodes) if each is not backbone)
    liar = world.nodes[number]
    await until(lambda: len(backbone.duty._core.view().electorate.members) >= 4)  # type: ignore[union-attr]
    for each in world.nodes:
        worker_engine(each).answers_to_recomputations = answers
    claim = own_record(liar).claim_digest()
    digest = world.model.manifest.digest()
    worker = SealingWorker(node_key(number), world.swarm.digest, expert_program(), digest, claim, wall_time())
    rows = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    worker.answer(0, [0, 1, 2], rows, rows)
    engine = [each for each in backbone.engines.all if each.role == "backbone"][-1]
    await engine.say(HolderJudged(liar.node_id, "quarantined", "3 of 3 rows", 3, 3, 9, claim))
    await engine.say(HolderLost(liar.node_id, "quarantined", "3 of 3 rows"))
    await engine.say(HolderEvidenced(liar.node_id, claim, encode(worker.evidence({0: [0, 1, 2]}))))
    return backbone, liar, [each for each in world.nodes if each not in (backbone, liar)]


def verdicts_of(node: TwinNode, accused: TwinNode) -> list[tuple[str, int]]:
    core = node.duty._core
    assert core is not None
    found = [each for each in core.view().verdicts if each.node_id == accused.node_id]
    return [(each.word, each.n_electors) for each in found]


async def test_what_the_audit_can_show_electors_recompute_and_everybody_obeys(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone, liar, others = await found_out(world, answers=("quarantined", "3 of 3 rows"))
        await until(lambda: all(verdicts_of(each, liar) == [("quarantined", 3)] for each in world.nodes))
        for each in others:
            asked = [m for m in worker_engine(each).received if isinstance(m, RecomputeRows)]
            assert [(m.adds_in_f32, m.activation) for m in asked] == [(True, "F32")]
            assert [m.programs for m in asked] == [PROGRAMS], "those that its own trunk asks for"
        await until(lambda: liar.node_id not in plan_of(backbone).nodes)
        said = liar.duty.state()
        assert said[0] == "degraded"
        assert "3 electors recomputed its rows" in said[1]


@pytest.mark.parametrize("outcome", ["right", "inconclusive"])
async def test_what_electors_do_not_find_too_binds_the_backbone_alone(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, outcome: str
) -> None:
    async with open_nodes(model, tmp_path) as world:
        backbone, liar, others = await found_out(world, answers=(outcome, "a reason"))
        await trio.sleep(60)
        assert verdicts_of(backbone, liar) == [("quarantined", 0)]
        assert not any(verdicts_of(each, liar) for each in (*others, liar))
        for each in others:
            assert [m for m in worker_engine(each).received if isinstance(m, RecomputeRows)]
