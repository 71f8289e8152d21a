"""Status documents of swarms that do not run: a node as the report has it, and members made up beside it."""

from __future__ import annotations

from typing import Any, Final

from kvasir_node.driver.status_report import StatusSources, status_document
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Instant, seconds

N_LAYER: Final = 12
N_EXPERT: Final = 16


def node_id(number: int) -> NodeId:
    return node_id_of(number.to_bytes(32, "big"))


OWN: Final = node_id(1)


def member(number: int, **changes: Any) -> dict[str, Any]:
    """A member that is well and holds experts."""
    made: dict[str, Any] = {
        "node_id": node_id(number),
        "state": "alive",
        "condition": "well",
        "reason": "it answers",
        "said_state": "ready",
        "holder_state": "serving",
        "quarantined_s": None,
        "verdict": None,
        "answers_times_slower": None,
        "audit": None,
        "version": "0.1.0",
        "backend": "ggml-cpu",
        "device": "a processor",
        "accumulation": "F32",
        "certificate": "verified",
        "ranks": ["bulk"],
        "shards": 38,
        "shard_bytes": 1 << 28,
        "memory_bytes": 1 << 33,
        "expert_row_ns": 20_000,
        "decode_token_ns": 3_000_000,
        "rtt_ms": 0.2 + number * 0.7,
        "path": "direct",
        "last_seen_s": 0.4,
        "clock_offset_s": None,
        "addresses": ["/ip4/127.0.0.1/tcp/4001"],
    }
    unknown = set(changes) - set(made)
    assert not unknown, unknown
    return made | changes


def layers(**changes: tuple[int, int]) -> list[dict[str, int]]:
    """All covered, but for ``layer_3=(n_missing, n_by_backbone)``."""
    return [
        {"layer": layer, "n_experts": N_EXPERT, "n_missing": missing, "n_by_backbone": by_backbone}
        for layer in range(N_LAYER)
        for missing, by_backbone in [changes.get(f"layer_{layer}", (0, 0))]
    ]


def status(members: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """The backbone's document, with these members."""
    sources = StatusSources(
        node_id=OWN, state="ready", reason="", started=Instant(seconds(1000)), addresses=(ADDRESS,)
    )
    made = status_document(sources, Instant(seconds(4600)))
    ids = sorted([OWN, *(each["node_id"] for each in members)])
    made |= {
        "swarm": "cd" * 32,
        "certificates": "verified",
        "admission": "invite",
        "compact_activations": True,
        "partial_sums": False,
        "epoch": 2,
        "term": 7,
        "backbone": OWN,
        "votes": 3,
        "lease_s": 1.21,
        "role": "backbone",
        "electorate": {
            "epoch": 2,
            "term": 7,
            "version": 3,
            "rule": "open",
            "quorum": 3,
            "members": ids[:4],
        },
        "backend": "ggml-cuda",
        "device": "a graphics card",
        "accumulation": "F32",
        "certificate": "verified",
        "ranks": ["backbone"],
        "plan": {
            "epoch": 2,
            "term": 7,
            "revision": 4,
            "is_in_force": True,
            "is_served_here": True,
            "degraded": "",
            "holders_min": 2,
            "coverage": {
                "n_pairs": N_LAYER * N_EXPERT,
                "n_pairs_held": N_LAYER * N_EXPERT,
                "by_backbone": 0,
                "missing": [],
                "layers": layers(),
            },
        },
        "members": members,
        "experts_missing_total": 0,
    }
    unknown = set(changes) - set(made)
    assert not unknown, unknown
    return made | changes


ADDRESS: Final = f"/ip4/192.0.2.7/tcp/4001/p2p/{OWN}"


def six(**changes: Any) -> dict[str, Any]:
    """A swarm of six, unlike each other."""
    members = [
        member(2, ranks=["output", "bulk"], backend="ggml-cuda", rtt_ms=0.4),
        member(3, ranks=["output", "bulk"], backend="ggml-hip", certificate="claimed", rtt_ms=1.3),
        member(4, backend="ggml-vulkan", accumulation="F16", rtt_ms=8.7),
        member(
            5,
            state="suspect",
            reason="it has not answered for 1.2 s",
            backend="opencl",
            accumulation="F16",
            certificate="claimed",
            rtt_ms=31.2,
        ),
        member(
            6,
            ranks=[],
            shards=0,
            holder_state=None,
            path="indirect",
            condition="indirect",
            rtt_ms=None,
            reason="only others reach it",
        ),
    ]
    return status(members, **changes)


def many(count: int) -> dict[str, Any]:
    """A swarm of so many: of a few kinds, some of them not well."""
    kinds: list[dict[str, Any]] = [
        {"ranks": ["output", "bulk"], "backend": "ggml-cuda"},
        {"backend": "ggml-cpu"},
        {"backend": "ggml-vulkan", "accumulation": "F16", "certificate": "claimed"},
        {"backend": "opencl", "accumulation": "F16", "certificate": "claimed"},
        {"ranks": [], "shards": 0, "holder_state": None},
    ]
    members = [member(number, **kinds[number % len(kinds)]) for number in range(2, count + 1)]
    for number, each in enumerate(members):
        each["rtt_ms"] = 0.3 + number * 37 % 90 / 2
        if number % 29 == 7:
            each |= {"state": "dead", "reason": "it has not answered for 12 s", "rtt_ms": None}
    return status(members)
