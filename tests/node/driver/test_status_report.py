"""The status document from views made by hand: every state a node can be in, field by field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.cli.status import word_of
from kvasir_node.driver.status_report import MISSING_RANGES_MAX, StatusSources, status_document
from kvasir_node.model.store import StoredModel
from kvasir_proto.answer_times import SlowHolder
from kvasir_proto.capability import CapabilityRecord, RankVerdict, held_shard
from kvasir_proto.election.states import Role
from kvasir_proto.ids import ModelDigest, NodeId, node_id_of
from kvasir_proto.instants import Duration, Instant, milliseconds, seconds
from kvasir_proto.manifest import ShardSet
from kvasir_proto.membership.table import Member
from kvasir_proto.node_core import NodeView
from kvasir_proto.placement.plan import ExpertRange, LayerPlan, Missing, Plan, make_plan
from kvasir_proto.swarm_manifest import (
    FoundedSwarm,
    SwarmManifest,
    Thresholds,
    open_swarm_manifest,
    sign_swarm_manifest,
)
from kvasir_proto.term_proof import ProvenTerm, cast_vote, make_electorate, make_term_proof
from kvasir_proto.verdicts_in_force import VerdictInForce

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(1, 6)]
PUBLIC_KEYS = [each.public_key().public_bytes_raw() for each in KEYS]
OWN, SECOND, THIRD, FOURTH, FIFTH = (node_id_of(each) for each in PUBLIC_KEYS)
STARTED = Instant(seconds(1000))
NOW = Instant(seconds(1060))
N_LAYER, N_EXPERT = 4, 8


def swarm_with(**changes: Any) -> FoundedSwarm:
    manifest = SwarmManifest(
        model_digest=ModelDigest(bytes(32)),
        model_name="tiny",
        reference_class="ggml-activations",
        thresholds=Thresholds(),
        admission="open",
        compact_activations=False,
        partial_sums=True,
        founder_public_key=PUBLIC_KEYS[0],
        recovery_public_key=bytes(32),
    )
    return open_swarm_manifest(sign_swarm_manifest(dataclasses.replace(manifest, **changes), KEYS[0]))


def record(node_id: NodeId, **changes: Any) -> CapabilityRecord:
    made = CapabilityRecord(
        node_id=node_id,
        sequence=1,
        expires=0,
        addresses=(f"/ip4/127.0.0.1/tcp/4001/p2p/{node_id}",),
        versions=(1,),
        node_version="0.1",
        backend="ggml-cpu",
        device="x86_64",
        accumulation="UNKNOWN",
        memory_bytes=1 << 30,
        state="ready",
        reason="",
        ranks=("backbone", "output", "bulk"),
    )
    return dataclasses.replace(made, **changes)


def member(node_id: NodeId, **changes: Any) -> Member:
    made = Member(
        node_id=node_id,
        state="alive",
        path="direct",
        condition="well",
        reason="",
        rtt=milliseconds(2),
        rtt_least=milliseconds(1),
        rtt_samples=3,
        clock_offset=None,
        last_seen=Instant(NOW - milliseconds(500)),
        incarnation=1,
        record_sequence=1,
        record_digest=bytes(32),
    )
    return dataclasses.replace(made, **changes)


def plan_of_equals(**changes: Any) -> Plan:
    made = make_plan(range(N_LAYER), N_EXPERT, (SECOND, THIRD), epoch=0, term=3, revision=7, holders=1)
    return dataclasses.replace(made, **changes)


def view_with(**changes: Any) -> NodeView:
    made = NodeView(
        node_id=OWN,
        state="joining",
        reason="",
        fence=None,
        role=Role.FOLLOWER,
        lease_until=None,
        electorate=make_electorate(0, "pinned", PUBLIC_KEYS[:1]),
        members=(),
        plan=None,
        is_serving_plan=False,
        coverage=None,
        missing=(),
        clock_offset=None,
    )
    return dataclasses.replace(made, **changes)


def layers_of_equals(n_missing: int = 0, n_by_backbone: int = 0) -> list[dict[str, int]]:
    return [
        {
            "layer": layer,
            "n_experts": N_EXPERT,
            "n_missing": n_missing,
            "n_by_backbone": n_by_backbone,
        }
        for layer in range(N_LAYER)
    ]


def served(plan: Plan, *nodes: NodeId, **changes: Any) -> NodeView:
    """A view in which these nodes serve the plan."""
    return view_with(
        plan=plan,
        coverage=plan.coverage(nodes, changes["fence"].backbone),
        missing=plan.missing(nodes),
        **changes,
    )


def quarantine(reason: str, lasts: Duration) -> VerdictInForce:
    return VerdictInForce(SECOND, "quarantined", reason, Instant(NOW + lasts))


def document(
    view: NodeView | None = None, records: Mapping[NodeId, CapabilityRecord] | None = None, **changes: Any
) -> dict[str, Any]:
    known = records or {}
    sources = StatusSources(
        node_id=OWN, state="joining", reason="why", started=STARTED, view=view, record_of=known.get
    )
    made = status_document(dataclasses.replace(sources, **changes), NOW)
    assert json.loads(json.dumps(made)) == made, "a document is JSON"
    return made


EVERY_KEY = set(document())
MEMBER_KEYS = {
    *(
        "node_id",
        "state",
        "condition",
        "reason",
        "said_state",
        "holder_state",
        "quarantined_s",
        "verdict",
        "answers_times_slower",
        "audit",
        "version",
        "backend",
        "device",
    ),
    *("accumulation", "certificate", "ranks", "shards", "shard_bytes", "memory_bytes", "rtt_ms", "path"),
    *("last_seen_s", "clock_offset_s", "addresses", "expert_row_ns", "decode_token_ns"),
}


def test_every_field_is_there_before_anything_is_known() -> None:
    made = document()
    assert made["schema_version"] == 1
    assert (made["state"], made["reason"], made["node_id"]) == ("joining", "why", OWN)
    assert made["uptime_s"] == 60.0
    assert (made["epoch"], made["term"], made["votes"], made["backbone"]) == (0, 0, 0, None)
    assert made["gateway"] == {
        "is_enabled": False,
        "address": None,
        "is_answering": False,
        "needs_token": False,
        "reason": "gateway.enabled is false",
    }
    assert (made["swarm"], made["certificates"], made["electorate"], made["model"]) == (None,) * 4
    assert (made["ranks"], made["members"], made["shards"], made["addresses"]) == ([],) * 4
    assert made["plan"] == {
        "epoch": 0,
        "term": 0,
        "revision": 0,
        "is_in_force": False,
        "is_served_here": False,
        "coverage": {"n_pairs": 0, "n_pairs_held": 0, "by_backbone": 0, "missing": [], "layers": []},
        "holders_min": 0,
        "degraded": "",
    }
    assert made["engines"] == {"backbone": None, "holder": None}
    assert (made["engine"], made["engine_statistics"], made["experts_missing_total"]) == (None, None, None)
    assert (made["last_error"], made["last_error_at"], made["last_error_recovered"]) == ("", None, None)


def test_the_swarm_is_described_by_its_manifest() -> None:
    swarm = swarm_with(admission="invite")
    made = document(swarm=swarm)
    assert made["swarm"] == swarm.digest.hex()
    assert (made["certificates"], made["admission"]) == ("claimed", "invite")
    assert (made["compact_activations"], made["partial_sums"]) == (False, True)


def test_the_term_is_the_fences_and_its_votes_are_those_of_its_proof() -> None:
    electorate = make_electorate(2, "open", PUBLIC_KEYS[:4])
    term = ProvenTerm(1, 5, SECOND)
    votes = [cast_vote(each, swarm_with().digest, electorate, term) for each in KEYS[:3]]
    view = view_with(fence=term, electorate=electorate)
    made = document(view, proof=make_term_proof(electorate, term, votes))
    assert (made["epoch"], made["term"], made["backbone"], made["votes"]) == (1, 5, SECOND, 3)
    assert made["electorate"] == {
        "epoch": 0,
        "term": 0,
        "version": 2,
        "rule": "open",
        "quorum": 3,
        "members": sorted((OWN, SECOND, THIRD, FOURTH)),
    }
    assert (made["role"], made["lease_s"]) == ("follower", None)


@pytest.mark.parametrize("left, shown", [(1200, 1.2), (-5, 0.0)])
def test_a_backbone_shows_how_long_its_lease_lasts(left: int, shown: float) -> None:
    view = view_with(
        fence=ProvenTerm(0, 1, OWN), role=Role.BACKBONE, lease_until=Instant(NOW + milliseconds(left))
    )
    made = document(view)
    assert (made["role"], made["lease_s"], made["ranks"]) == ("backbone", shown, ["backbone"])


def test_without_a_plan_every_expert_is_missing_for_that_reason(model: StoredModel) -> None:
    coverage = document(view_with(), model=model)["plan"]["coverage"]
    assert (coverage["n_pairs"], coverage["n_pairs_held"]) == (N_LAYER * N_EXPERT, 0)
    assert coverage["missing"] == [
        {"layer": layer, "first": 0, "end": N_EXPERT, "reason": "there is no plan yet"}
        for layer in range(N_LAYER)
    ]


def test_without_a_plan_no_layer_has_a_holder(model: StoredModel) -> None:
    coverage = document(view_with(), model=model)["plan"]["coverage"]
    assert coverage["layers"] == layers_of_equals(n_missing=N_EXPERT)


@pytest.mark.parametrize(
    "backbone, there, n_missing, n_by_backbone",
    [
        (OWN, (OWN, SECOND, THIRD), 0, 2),
        (OWN, (OWN, SECOND), 3, 2),
        (OWN, (OWN, THIRD), 0, 5),
        (OWN, (OWN,), 3, 5),
        (OWN, (SECOND, THIRD), 2, 0),
        (OWN, (), 8, 0),
        (SECOND, (OWN, SECOND, THIRD), 0, 0),
        (SECOND, (OWN, SECOND), 3, 0),
        (THIRD, (OWN, SECOND, THIRD), 0, 3),
        (THIRD, (OWN, SECOND), 3, 0),
        (FOURTH, (OWN, SECOND), 3, 0),
    ],
)
def test_each_layer_says_what_is_missing_and_what_only_the_backbone_holds(
    backbone: NodeId, there: tuple[NodeId, ...], n_missing: int, n_by_backbone: int
) -> None:
    """Two experts of a layer this node holds, three it and a second one, three a third one."""
    ranges = (ExpertRange(0, 2, (0,)), ExpertRange(2, 5, (0, 1)), ExpertRange(5, 8, (2,)))
    plan = plan_of_equals(
        nodes=(OWN, SECOND, THIRD), layers=tuple(LayerPlan(each, ranges) for each in range(N_LAYER))
    )
    members = tuple(
        member(each, state="alive" if each in there else "dead") for each in (SECOND, THIRD, FOURTH)
    )
    view = served(
        plan, *there, fence=ProvenTerm(0, 3, backbone), members=members, is_serving_plan=OWN in there
    )
    holders = [{"node_id": each, "state": "serving", "reason": ""} for each in there if each != OWN]
    gone = [
        {"node_id": each, "state": "loading", "reason": ""} for each in (SECOND, THIRD) if each not in there
    ]
    reported = {"holders": holders + gone} if backbone == OWN else {}
    coverage = document(view, backbone=reported)["plan"]["coverage"]
    assert coverage["layers"] == layers_of_equals(n_missing, n_by_backbone)
    assert coverage["n_pairs"] - coverage["n_pairs_held"] == N_LAYER * n_missing
    assert coverage["by_backbone"] == N_LAYER * n_by_backbone


def test_a_plan_that_is_served_whole(model: StoredModel) -> None:
    view = served(plan_of_equals(), SECOND, THIRD, fence=ProvenTerm(0, 3, OWN), is_serving_plan=True)
    made = document(view, model=model)
    assert made["plan"] == {
        "epoch": 0,
        "term": 3,
        "revision": 7,
        "is_in_force": True,
        "is_served_here": True,
        "coverage": {
            "n_pairs": 32,
            "n_pairs_held": 32,
            "by_backbone": 0,
            "missing": [],
            "layers": layers_of_equals(),
        },
        "holders_min": 1,
        "degraded": "",
    }
    assert made["model"]["n_moe_layer"] * made["model"]["n_expert"] == 32


def test_a_plan_with_a_holder_that_has_gone_names_what_is_missing() -> None:
    view = served(plan_of_equals(), SECOND, fence=ProvenTerm(0, 3, OWN))
    plan = document(view)["plan"]
    assert (plan["coverage"]["n_pairs_held"], plan["holders_min"]) == (16, 0)
    assert sum(each["end"] - each["first"] for each in plan["coverage"]["missing"]) == 16
    assert {each["reason"] for each in plan["coverage"]["missing"]} == {"none of its holders is there"}


def test_what_only_the_backbone_serves_is_counted_and_explained() -> None:
    layers = tuple(LayerPlan(layer, (ExpertRange(0, N_EXPERT, (0,)),)) for layer in range(N_LAYER))
    plan = plan_of_equals(nodes=(OWN,), layers=layers, degraded="no other node adds in F32")
    own = {"n_experts": 32, "shard_bytes": 4096}
    made = document(served(plan, OWN, fence=ProvenTerm(0, 3, OWN)), backbone={"own": own})
    assert (made["n_experts_held"], made["shard_memory_bytes"]) == (32, 4096)
    assert made["shards"] == [[layer, 0, N_EXPERT] for layer in range(N_LAYER)]
    assert made["plan"]["coverage"]["by_backbone"] == N_LAYER * N_EXPERT
    assert made["plan"]["degraded"] == "no other node adds in F32"
    assert made["ranks"] == ["backbone", "output", "bulk"]


def test_a_list_of_missing_experts_is_bounded() -> None:
    missing = tuple(Missing(0, each, each + 1, f"{each}") for each in range(MISSING_RANGES_MAX + 1))
    plan = plan_of_equals()
    view = dataclasses.replace(served(plan, fence=ProvenTerm(0, 3, OWN)), missing=missing)
    assert len(document(view)["plan"]["coverage"]["missing"]) == MISSING_RANGES_MAX


def test_a_member_is_its_record_and_what_was_seen_of_it() -> None:
    view = served(
        plan_of_equals(), SECOND, THIRD, fence=ProvenTerm(0, 3, OWN), members=(member(SECOND), member(FIFTH))
    )
    said = record(SECOND, accumulation="F32", device="zen4", expert_row_ns=4600)
    members = document(view, {SECOND: said}, swarm=swarm_with())["members"]
    assert all(set(each) == MEMBER_KEYS for each in members)
    assert members[0] == {
        "node_id": SECOND,
        "state": "alive",
        "condition": "well",
        "reason": "",
        "said_state": "ready",
        "holder_state": None,
        "quarantined_s": None,
        "verdict": None,
        "answers_times_slower": None,
        "audit": None,
        "version": "0.1",
        "backend": "ggml-cpu",
        "device": "zen4",
        "accumulation": "F32",
        "certificate": "claimed",
        "ranks": ["output", "bulk"],
        "shards": 16,
        "shard_bytes": None,
        "memory_bytes": 1 << 30,
        "expert_row_ns": 4600,
        "decode_token_ns": None,
        "rtt_ms": 2.0,
        "path": "direct",
        "last_seen_s": 0.5,
        "clock_offset_s": None,
        "addresses": [f"/ip4/127.0.0.1/tcp/4001/p2p/{SECOND}"],
    }
    stranger = members[1]
    assert (stranger["backend"], stranger["accumulation"], stranger["certificate"]) == (
        None,
        "UNKNOWN",
        "none",
    )
    assert (stranger["ranks"], stranger["shards"], stranger["addresses"]) == ([], 0, [])


def test_a_member_in_quarantine_is_shown_with_its_reason_and_its_time() -> None:
    entry = quarantine("non_finite: row 3 is not finite", seconds(90))
    view = view_with(members=(member(SECOND), member(THIRD)), verdicts=(entry,))
    known = {SECOND: record(SECOND, reason="its disk is slow")}
    shown, other = document(view, known)["members"]
    assert (shown["quarantined_s"], shown["reason"]) == (90.0, "non_finite: row 3 is not finite")
    word = {"word": "quarantined", "reason": entry.reason}
    assert shown["verdict"] == {**word, "ends": "with its time", "electors": 0}
    assert (other["quarantined_s"], other["verdict"], other["reason"]) == (None, None, "")


@pytest.mark.parametrize("word, quarantined_s", [("quarantined", 0.0), ("unfit", None)])
def test_what_another_certificate_alone_ends_is_shown_as_that(word: Any, quarantined_s: float | None) -> None:
    entry = VerdictInForce(SECOND, word, "3 of 9 rows", Instant(NOW - seconds(90)), bytes(32), 3)
    (shown,) = document(view_with(members=(member(SECOND),), verdicts=(entry,)))["members"]
    expected = {"word": word, "reason": "3 of 9 rows", "ends": "with another certificate", "electors": 3}
    assert shown["verdict"] == expected
    own = entry._replace(node_id=OWN)
    assert document(view_with(verdicts=(own,)))["verdict"] == expected
    assert document()["verdict"] is None
    assert shown["quarantined_s"] == quarantined_s


def test_a_member_that_answers_later_than_it_says_is_shown_with_how_much_later() -> None:
    late = SlowHolder(SECOND, 12, Instant(NOW + seconds(90)))
    view = view_with(members=(member(SECOND), member(THIRD)), slow=(late,))
    shown, other = document(view)["members"]
    assert shown["answers_times_slower"] == 12
    assert "12 times later than the others" in shown["reason"]
    assert other["answers_times_slower"] is None


def test_what_the_audit_has_found_of_a_member_is_shown() -> None:
    found = {"verdict": "unfit", "reason": "3 of 9 rows", "rows": 9, "foreign": 3, "rows_asked": 70}
    view = view_with(members=(member(SECOND), member(THIRD)))
    shown, other = document(view, backbone={"audit": [{"node_id": SECOND, **found}]})["members"]
    assert (shown["audit"], other["audit"]) == (found, None)


def test_a_member_that_was_never_heard_has_no_times() -> None:
    heard_of = member(SECOND, path="unknown", rtt=None, last_seen=None)
    shown = document(view_with(members=(heard_of,)))["members"][0]
    assert (shown["path"], shown["rtt_ms"], shown["last_seen_s"]) == ("unknown", None, None)


STATES = ("alive", "suspect", "dead", "left")
CONDITIONS = ("well", "slow", "indirect", "clock_wrong", "conflicted")
HOLDER_STATES = (None, "loading", "serving", "refused", "unreachable", "quarantined")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("holder_state", HOLDER_STATES)
@pytest.mark.parametrize("is_quarantined", [False, True])
def test_the_reason_is_of_that_which_the_word_says(
    state: Any, condition: Any, holder_state: str | None, is_quarantined: bool
) -> None:
    """Never `unreachable: it answers`: the word of the connection with the reason of membership."""
    for said_state in (None, "ready", "degraded", "loading"):
        seen = member(SECOND, state=state, condition=condition, reason="seen")
        fault = (quarantine("fault", seconds(9)),) if is_quarantined else ()
        holders = [{"node_id": SECOND, "state": holder_state, "shard_bytes": 4096}]
        holders[0]["reason"] = "" if holder_state == "serving" else "connection"
        records = {SECOND: record(SECOND, state=said_state, reason="said")} if said_state else {}
        (shown,) = document(
            view_with(members=(seen,), verdicts=fault),
            records,
            backbone={"holders": holders if holder_state else []},
        )["members"]
        is_well = condition == "well"
        expected = {
            state: "seen",
            condition.partition("_")[0]: "seen",
            holder_state: "connection",
            "quarantined": "fault" if is_quarantined else "connection",
            **{each: "said" for each in ("degraded", "loading") if each == said_state != holder_state},
            "ready": "seen",
            "alive": "seen",
            "serving": "said" if is_well and said_state in ("degraded", "loading") else "seen",
        }
        assert shown["reason"] == expected[word_of(shown)], shown


@pytest.mark.parametrize("holders, expected", [([], None), ([4096], 4096)])
def test_what_a_holders_shard_takes_is_known_where_it_was_said(
    holders: list[int], expected: int | None
) -> None:
    """Holders showed 0 of each other: it is told to the backbone alone."""
    rows = [{"node_id": SECOND, "state": "serving", "reason": "", "shard_bytes": each} for each in holders]
    (shown,) = document(view_with(members=(member(SECOND),)), backbone={"holders": rows})["members"]
    assert shown["shard_bytes"] == expected


@pytest.mark.parametrize(
    "fence, held, expected",
    [
        (ProvenTerm(0, 3, SECOND), (0, 3, 7), True),
        (ProvenTerm(0, 3, SECOND), (0, 2, 9), True),
        (ProvenTerm(0, 3, SECOND), (0, 3, 8), False),
        (ProvenTerm(0, 4, SECOND), (0, 3, 7), False),
        (ProvenTerm(0, 3, OWN), (0, 3, 7), True),
        (None, (0, 3, 7), False),
    ],
)
def test_a_plan_is_in_force_unless_the_term_or_what_others_hold_says_otherwise(
    fence: ProvenTerm | None, held: tuple[int, int, int], expected: bool
) -> None:
    holding = held_shard(*held, bytes(32), ShardSet())
    view = view_with(fence=fence, plan=plan_of_equals(), members=(member(THIRD),))
    shown = document(view, {THIRD: record(THIRD, held=holding)})["plan"]
    assert (shown["revision"], shown["is_in_force"]) == (7, expected)


@pytest.mark.parametrize(
    "rule, verdicts, expected",
    [
        ("claimed", {}, "claimed"),
        ("verified", {}, "none"),
        ("verified", {"output": "claimed", "bulk": "verified"}, "none"),
        ("verified", {"backbone": "verified", "output": "verified", "bulk": "verified"}, "verified"),
        ("verified", {"backbone": "verified", "output": "claimed", "bulk": "verified"}, "claimed"),
        ("claimed", {"output": "unfit"}, "unfit"),
        ("verified", {"backbone": "verified", "output": "unfit"}, "unfit"),
    ],
)
def test_the_worst_verdict_is_the_one_shown(rule: str, verdicts: dict[str, Any], expected: str) -> None:
    said = record(
        SECOND,
        verdicts=tuple(RankVerdict(rank, verdicts[rank], bytes(32)) for rank in sorted(verdicts)),  # type: ignore[arg-type]
    )
    view = view_with(members=(member(SECOND),))
    made = document(view, {SECOND: said, OWN: said}, swarm=swarm_with(certificates=rule))
    assert made["members"][0]["certificate"] == expected
    assert made["certificate"] == expected
    assert made["certificates"] == rule


def test_ranks_are_those_of_the_layers_held() -> None:
    layers = tuple(
        LayerPlan(layer, (ExpertRange(0, N_EXPERT, (1 if layer == N_LAYER - 1 else 0,)),))
        for layer in range(N_LAYER)
    )
    plan = plan_of_equals(nodes=tuple(sorted((SECOND, THIRD))), layers=layers)
    bulk, output = plan.nodes
    view = served(
        plan,
        bulk,
        output,
        fence=ProvenTerm(0, 3, FOURTH),
        members=(member(SECOND), member(THIRD), member(FOURTH)),
    )
    ranks = {each["node_id"]: each["ranks"] for each in document(view)["members"]}
    assert ranks == {bulk: ["bulk"], output: ["output"], FOURTH: ["backbone"]}


@pytest.mark.parametrize("backbone, shown", [(OWN, "backbone"), (SECOND, "holder")])
def test_the_engine_shown_is_that_of_the_nodes_part(backbone: NodeId, shown: str) -> None:
    engines = {"backbone": {"pid": 1, "backend": "llama.cpp"}, "holder": {"pid": 2, "backend": "ggml-cpu"}}
    made = document(
        view_with(fence=ProvenTerm(0, 1, backbone)),
        holder={
            "engine": engines["holder"],
            "shards": [[0, 0, 8]],
            "n_experts_held": 8,
            "data_address": "h:1",
        },
        backbone={"engine": engines["backbone"], "sessions": 2, "rows_retried_total": 3},
        statistics={"experts_missing_total": 0},
    )
    assert made["engine"] == engines[shown]
    assert made["engines"] == engines
    assert (made["shards"], made["n_experts_held"], made["data_address"]) == ([[0, 0, 8]], 8, "h:1")
    assert (made["sessions"], made["rows_retried_total"], made["experts_missing_total"]) == (2, 3, 0)


def error(text: str, at: str, recovered: bool) -> dict[str, Any]:
    return {"last_error": text, "last_error_at": at, "last_error_recovered": recovered}


EARLY, LATE = "2026-11-30T09:00:00+00:00", "2026-11-30T10:00:00+00:00"


@pytest.mark.parametrize(
    "own, holder, backbone, expected",
    [
        (None, None, None, ""),
        (error("own", EARLY, True), None, None, "own"),
        (None, error("holder", EARLY, False), None, "holder"),
        (error("own", LATE, True), error("holder", EARLY, False), None, "holder"),
        (error("own", EARLY, False), None, error("backbone", LATE, False), "backbone"),
        (error("own", EARLY, True), error("holder", LATE, True), None, "holder"),
    ],
)
def test_of_several_errors_the_one_that_lasts_or_the_latest_is_shown(
    own: Any, holder: Any, backbone: Any, expected: str
) -> None:
    made = document(last_error=own or {}, holder=holder or {}, backbone=backbone or {})
    assert made["last_error"] == expected


def test_clocks_that_differ_are_told() -> None:
    view = view_with(clock_offset=seconds(-90), members=(member(SECOND, clock_offset=milliseconds(40)),))
    made = document(view)
    assert made["clock_offset_s"] == -90.0
    assert made["members"][0]["clock_offset_s"] == 0.04


def test_no_state_has_other_fields(model: StoredModel) -> None:
    view = served(plan_of_equals(), SECOND, fence=ProvenTerm(0, 3, OWN), members=(member(SECOND),))
    made = document(view, {SECOND: record(SECOND)}, model=model, swarm=swarm_with(), pid=7)
    assert set(made) == EVERY_KEY
    assert made["pid"] == 7
