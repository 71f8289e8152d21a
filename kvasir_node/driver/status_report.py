"""The status document: what a node believes of itself and its swarm, in one form that programs may rely on.

A plain function from snapshots to a JSON object, apart from everything that runs, so that every field can be
tested from values made by hand. A field is there in every state, also before the node has entered a swarm:
what is not known yet is None, 0 or empty. It decides nothing, asks nobody and shortens nothing that people
would need; how it looks on a terminal is the command line's affair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from kvasir_node import __version__
from kvasir_node.driver.last_error import NO_ERROR
from kvasir_node.model.report import model_report
from kvasir_node.model.store import StoredModel
from kvasir_proto.answer_times import SlowHolder
from kvasir_proto.capability import CapabilityRecord, Verdict
from kvasir_proto.codec import decode
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Duration, Instant, between, in_seconds
from kvasir_proto.limits import Rank
from kvasir_proto.manifest import ShardSet
from kvasir_proto.membership.states import LIVE
from kvasir_proto.membership.table import Member
from kvasir_proto.node_core import NodeView
from kvasir_proto.placement.plan import Missing, Plan
from kvasir_proto.placement.ranks import output_layers
from kvasir_proto.swarm_manifest import FoundedSwarm
from kvasir_proto.term_proof import TERM_PROOF, Electorate
from kvasir_proto.verdicts_in_force import VerdictInForce

STATUS_SCHEMA_VERSION: Final = 1
MISSING_RANGES_MAX: Final = 1024
"""Ranges of missing experts that are listed; the counts of pairs count all."""
_FROM_WORST: Final = ("unfit", "none", "claimed", "verified")
NO_GATEWAY: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "is_enabled": False,
        "address": None,
        "is_answering": False,
        "needs_token": False,
        "reason": "gateway.enabled is false",
    }
)


def _nobody_has_a_record(_: NodeId) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSources:
    """What a status document is made of; everything but the first four may be unknown yet.

    `started` and the `now` of `status_document` are of one clock; `proof` is that of the view's fence.
    `holder` and `backbone` are what the duties report. Both may name an `engine`, and a `last_error` with its
    two companions; the holder its `shards`, `n_experts_held`, `shard_memory_bytes` and `data_address`; the
    backbone its `sessions`, `rows_retried_total`, as `own` the `n_experts` and `shard_bytes` that it serves
    itself, and `holders`, one a connection: `node_id`, `state`, `reason`, `shard_bytes`. `statistics` are the
    counters of the engine that `engine` in the document names, None without an answer.
    """

    node_id: NodeId
    state: str
    reason: str
    started: Instant
    pid: int = 0
    addresses: tuple[str, ...] = ()
    is_held_back: bool | None = None
    gateway: Mapping[str, Any] = field(default_factory=lambda: NO_GATEWAY)
    swarm: FoundedSwarm | None = None
    model: StoredModel | None = None
    view: NodeView | None = None
    proof: bytes = b""
    record_of: Callable[[NodeId], CapabilityRecord | None] = _nobody_has_a_record
    verdict_of: Callable[[CapabilityRecord, Rank], Verdict] = CapabilityRecord.verdict_of
    holder: Mapping[str, Any] = field(default_factory=dict)
    backbone: Mapping[str, Any] = field(default_factory=dict)
    statistics: Mapping[str, Any] | None = None
    last_error: Mapping[str, Any] = field(default_factory=lambda: NO_ERROR)


def status_document(sources: StatusSources, now: Instant) -> dict[str, Any]:
    """The whole document; see the reference page `status.md` for what each field means."""
    view = sources.view
    plan = view.plan if view is not None else None
    fence = view.fence if view is not None else None
    own_record = sources.record_of(sources.node_id)
    is_backbone = fence is not None and fence.backbone == sources.node_id
    duty = sources.backbone if is_backbone else sources.holder
    statistics = sources.statistics
    return {
        "schema_version": STATUS_SCHEMA_VERSION,
        "version": __version__,
        "state": sources.state,
        "reason": sources.reason,
        "node_id": sources.node_id,
        "pid": sources.pid,
        "uptime_s": round(in_seconds(between(sources.started, now)), 1),
        "addresses": list(sources.addresses),
        "gateway": dict(sources.gateway),
        **_swarm_part(sources.swarm),
        "model": model_report(sources.model) if sources.model is not None else None,
        "epoch": fence.epoch if fence is not None else 0,
        "term": fence.term if fence is not None else 0,
        "backbone": fence.backbone if fence is not None else None,
        "role": view.role.value if view is not None else None,
        "votes": len(decode(sources.proof, TERM_PROOF).votes) if sources.proof else 0,
        "lease_s": _lease_s(view, now),
        "electorate": _electorate_part(view.electorate) if view is not None else None,
        **_self_part(sources, own_record),
        "clock_offset_s": _seconds(view.clock_offset) if view is not None else None,
        "plan": _plan_part(sources),
        **_held_part(sources),
        "members": [
            _member_part(sources, plan, member, now) for member in (view.members if view is not None else ())
        ],
        "engine": duty.get("engine"),
        "engines": {
            "backbone": sources.backbone.get("engine"),
            "holder": sources.holder.get("engine"),
        },
        "engine_statistics": statistics,
        # Unknown is not zero: without an answer from the engine nobody can say that no row was missing.
        "experts_missing_total": statistics.get("experts_missing_total") if statistics is not None else None,
        "data_address": sources.holder.get("data_address"),
        "fetch": sources.backbone.get("fetch") or sources.holder.get("fetch"),
        "sessions": sources.backbone.get("sessions", 0),
        "rows_retried_total": sources.backbone.get("rows_retried_total", 0),
        **_newest_error(sources.last_error, sources.holder, sources.backbone),
    }


def _swarm_part(swarm: FoundedSwarm | None) -> dict[str, Any]:
    manifest = swarm.manifest if swarm is not None else None
    return {
        "swarm": swarm.digest.hex() if swarm is not None else None,
        "certificates": manifest.certificates if manifest is not None else None,
        "admission": manifest.admission if manifest is not None else None,
        "compact_activations": manifest.compact_activations if manifest is not None else None,
        "partial_sums": manifest.partial_sums if manifest is not None else None,
    }


def _electorate_part(electorate: Electorate) -> dict[str, Any]:
    return {
        "epoch": electorate.epoch,
        "term": electorate.term,
        "version": electorate.version,
        "rule": electorate.rule,
        "quorum": electorate.quorum,
        "members": sorted(node_id_of(key) for key in electorate.members),
    }


def _lease_s(view: NodeView | None, now: Instant) -> float | None:
    """How long this node may still go on as backbone; None where it holds no lease."""
    if view is None or view.lease_until is None:
        return None
    return round(max(0.0, in_seconds(between(now, view.lease_until))), 3)


def _self_part(sources: StatusSources, record: CapabilityRecord | None) -> dict[str, Any]:
    """What this node says of itself, in the words of a member."""
    return {
        "backend": record.backend if record is not None else None,
        "device": record.device if record is not None else None,
        "accumulation": record.accumulation if record is not None else "UNKNOWN",
        "certificate": _certificate(sources, record),
        "verdict": _verdict_part(_verdicts(sources).get(sources.node_id)),
        "memory_bytes": record.memory_bytes if record is not None else 0,
        **_rates(record),
        "is_held_back": sources.is_held_back,
        "ranks": _ranks(sources, sources.node_id),
    }


def _verdicts(sources: StatusSources) -> dict[NodeId, VerdictInForce]:
    return {each.node_id: each for each in sources.view.verdicts} if sources.view is not None else {}


def _rates(record: CapabilityRecord | None) -> dict[str, int | None]:
    """How fast a node says it is; None for what it has not measured."""
    return {
        "expert_row_ns": (record.expert_row_ns or None) if record is not None else None,
        "decode_token_ns": (record.decode_token_ns or None) if record is not None else None,
    }


def _held_part(sources: StatusSources) -> dict[str, Any]:
    """What this node holds: in its holder's engine, or as backbone in the backbone's."""
    own = sources.backbone.get("own", {})
    if own.get("n_experts"):
        plan = sources.view.plan if sources.view is not None else None
        shard = plan.shard_of(sources.node_id) if plan is not None else ShardSet()
        return {
            "shards": [list(each) for each in shard.ranges],
            "n_experts_held": own["n_experts"],
            "shard_memory_bytes": own["shard_bytes"],
        }
    return {
        "shards": sources.holder.get("shards", []),
        "n_experts_held": sources.holder.get("n_experts_held", 0),
        "shard_memory_bytes": sources.holder.get("shard_memory_bytes", 0),
    }


def _plan_part(sources: StatusSources) -> dict[str, Any]:
    view = sources.view
    plan = view.plan if view is not None else None
    missing: tuple[Missing, ...]
    if view is not None and plan is not None and view.coverage is not None:
        n_pairs, n_pairs_held, holders_min, by_backbone = view.coverage
        missing = view.missing
    else:
        missing = _all_missing(sources.model)
        n_pairs, n_pairs_held = sum(each.end - each.first for each in missing), 0
        holders_min = by_backbone = 0
    return {
        "epoch": plan.epoch if plan is not None else 0,
        "term": plan.term if plan is not None else 0,
        "revision": plan.revision if plan is not None else 0,
        "is_in_force": _is_in_force(sources, plan) if plan is not None else False,
        "is_served_here": view.is_serving_plan if view is not None else False,
        "coverage": {
            "n_pairs": n_pairs,
            "n_pairs_held": n_pairs_held,
            "by_backbone": by_backbone,
            "missing": [each._asdict() for each in missing[:MISSING_RANGES_MAX]],
            "layers": _layers_part(sources, missing),
        },
        "holders_min": holders_min,
        "degraded": plan.degraded if plan is not None else "",
    }


def _layers_part(sources: StatusSources, missing: tuple[Missing, ...]) -> list[dict[str, int]]:
    """Of each layer: its experts, those that have no holder, and those that only the backbone holds.

    Who holds what is judged as everywhere: on the backbone by who serves, elsewhere by who is there.
    """
    n_missing: Counter[int] = Counter()
    for each in missing:
        n_missing[each.layer] += each.end - each.first
    view = sources.view
    plan = view.plan if view is not None else None
    if view is None or plan is None or view.coverage is None:
        n_expert = sources.model.manifest.n_expert if sources.model is not None else 0
        return [_layer(layer, n_expert, n_missing[layer], 0) for layer in sorted(n_missing)]
    backbone = view.fence.backbone if view.fence is not None else None
    if backbone == sources.node_id:
        there = {
            each["node_id"] for each in sources.backbone.get("holders", ()) if each["state"] == "serving"
        }
        there |= {backbone} if view.is_serving_plan else set()
    else:
        there = {sources.node_id, *(each.node_id for each in view.members if each.state in LIVE)}
    holding = {index for index, node in enumerate(plan.nodes) if node in there}
    own = {index for index in holding if plan.nodes[index] == backbone}
    return [
        _layer(
            each.layer,
            plan.n_expert,
            n_missing[each.layer],
            sum(part.end - part.first for part in each.ranges if holding.intersection(part.holders) == own)
            if own
            else 0,
        )
        for each in plan.layers
    ]


def _layer(layer: int, n_experts: int, n_missing: int, n_by_backbone: int) -> dict[str, int]:
    return {"layer": layer, "n_experts": n_experts, "n_missing": n_missing, "n_by_backbone": n_by_backbone}


def _is_in_force(sources: StatusSources, plan: Plan) -> bool:
    """Whether this is the newest plan there is, as far as can be known here.

    In a large swarm only some of those that a plan gives nothing are told of it. They see that there is a
    newer one by the term, and by what others say of the shards that they hold.
    """
    view = sources.view
    assert view is not None
    fence = view.fence
    if fence is None or (plan.epoch, plan.term) != (fence.epoch, fence.term):
        return False
    if fence.backbone == sources.node_id:
        return True  # it is its own
    records = [sources.record_of(each.node_id) for each in view.members]
    held = [each.held for each in records if each is not None and each.held is not None]
    newest = (plan.epoch, plan.term, plan.revision)
    return all((each.epoch, each.term, each.revision) <= newest for each in held)


def _all_missing(model: StoredModel | None) -> tuple[Missing, ...]:
    """Every expert of the model, as long as nobody has said who holds them."""
    if model is None:
        return ()
    manifest = model.manifest
    return tuple(
        Missing(layer, 0, manifest.n_expert, "there is no plan yet") for layer in sorted(manifest.moe_layers)
    )


def _member_part(sources: StatusSources, plan: Plan | None, member: Member, now: Instant) -> dict[str, Any]:
    record = sources.record_of(member.node_id)
    connections = {each["node_id"]: each for each in sources.backbone.get("holders", ())}
    connection = connections.get(member.node_id, {})
    said_state, said_reason = (record.state, record.reason) if record is not None else (None, "")
    shard = plan.shard_of(member.node_id) if plan is not None else ShardSet()
    verdict = _verdicts(sources).get(member.node_id)
    fault = verdict if verdict is not None and verdict.word == "quarantined" else None
    slow = {each.node_id: each for each in sources.view.slow} if sources.view else {}
    late = slow.get(member.node_id)
    judged = {each["node_id"]: each for each in sources.backbone.get("audit", ())}
    return {
        "node_id": member.node_id,
        "state": member.state,
        "condition": member.condition,
        "reason": _reason_of(member, fault, late, connection, said_state, said_reason),
        "said_state": said_state,
        "holder_state": connection.get("state"),
        "quarantined_s": _seconds(_left(now, fault.until) if fault is not None else None),
        "verdict": _verdict_part(verdict),
        "answers_times_slower": late.times if late is not None else None,
        "audit": _audit_part(judged.get(member.node_id)),
        "version": record.node_version if record is not None else None,
        "backend": record.backend if record is not None else None,
        "device": record.device if record is not None else None,
        "accumulation": record.accumulation if record is not None else "UNKNOWN",
        "certificate": _certificate(sources, record),
        "ranks": _ranks(sources, member.node_id),
        "shards": len(shard),
        # It tells the backbone alone, which is then connected to it.
        "shard_bytes": connection.get("shard_bytes"),
        "memory_bytes": record.memory_bytes if record is not None else 0,
        **_rates(record),
        "rtt_ms": round(member.rtt / 1e6, 3) if member.rtt is not None else None,
        "path": member.path,
        "last_seen_s": _seconds(between(member.last_seen, now) if member.last_seen is not None else None),
        "clock_offset_s": _seconds(member.clock_offset),
        "addresses": list(record.addresses) if record is not None else [],
    }


def _left(now: Instant, until: Instant) -> Duration:
    return max(Duration(0), between(now, until))


def _verdict_part(verdict: VerdictInForce | None) -> dict[str, Any] | None:
    """What holds of a member here, and how that ends; None where nothing does."""
    if verdict is None:
        return None
    ends = "with its time" if verdict.claim is None else "with another certificate"
    return {
        "word": verdict.word,
        "reason": verdict.reason,
        "ends": ends,
        "electors": verdict.n_electors,
    }


def _audit_part(judged: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What this node's audit, as backbone, has found of a member; None where it has found nothing."""
    if judged is None:
        return None
    return {name: judged[name] for name in ("verdict", "reason", "rows", "foreign", "rows_asked")}


def _reason_of(
    member: Member,
    fault: VerdictInForce | None,
    late: SlowHolder | None,
    connection: Mapping[str, Any],
    said_state: str | None,
    said_reason: str,
) -> str:
    """The reason for what is most worth knowing of a member, in the order in which the table looks for that.

    Of one that is well in every way: how it is known to be there.
    """
    if member.state != "alive" or member.condition in ("conflicted", "clock_wrong"):
        return member.reason
    if fault is not None:
        return fault.reason
    if connection and connection["state"] != "serving":
        return str(connection["reason"] or member.reason)
    if late is not None:
        return f"it answers {late.times} times later than the others: it is asked for less, or for nothing"
    if member.condition != "well" or said_state in (None, "ready"):
        return member.reason or said_reason
    return said_reason or member.reason


def _ranks(sources: StatusSources, node_id: NodeId) -> list[str]:
    """The ranks that a node fills now: by the newest term proof, and by the plan."""
    view = sources.view
    if view is None:
        return []
    ranks = ["backbone"] if view.fence is not None and view.fence.backbone == node_id else []
    if view.plan is not None:
        last = set(output_layers([each.layer for each in view.plan.layers]))
        held = {layer for layer, _, _ in view.plan.shard_of(node_id).ranges}
        ranks += ["output"] if held & last else []
        ranks += ["bulk"] if held - last else []
    return ranks


def _certificate(sources: StatusSources, record: CapabilityRecord | None) -> str:
    """One word: the worst verdict over the ranks that a node stands for.

    Where the swarm takes its members at their word, a node without a certificate is `claimed` by that alone.
    """
    if record is None:
        return "none"
    swarm = sources.swarm
    floor = "claimed" if swarm is not None and swarm.manifest.certificates == "claimed" else "none"
    verdicts = [sources.verdict_of(record, rank) for rank in record.ranks]
    words = [floor if each == "none" else each for each in verdicts] or [floor]
    return min(words, key=_FROM_WORST.index)


def certificate_of_swarm(sources: StatusSources) -> str:
    """One word: the worst certificate of the backbone and of whom the plan names, as far as that is known."""
    view = sources.view
    if view is None or view.fence is None:
        return "none"
    serving = {view.fence.backbone, *(view.plan.nodes if view.plan is not None else ())}
    return min(
        (_certificate(sources, sources.record_of(each)) for each in sorted(serving)), key=_FROM_WORST.index
    )


def _newest_error(*reports: Mapping[str, Any]) -> dict[str, Any]:
    """The last error of this node, whoever noted it: of two, the one that is not over, then the later one."""
    errors = [{name: report.get(name, empty) for name, empty in NO_ERROR.items()} for report in reports]
    return max(
        errors,
        key=lambda each: (
            bool(each["last_error"]) and not each["last_error_recovered"],
            each["last_error_at"] or "",
        ),
    )


def _seconds(duration: Duration | None) -> float | None:
    return round(in_seconds(duration), 3) if duration is not None else None
