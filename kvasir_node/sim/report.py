"""What a run says about itself: one JSON object with everything needed to judge it and to run it again."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from kvasir_node.sim.simulation import FORMED_FROM, Outcome, SimulationOptions

SCHEMA_VERSION: Final = 1


def replay_command(options: SimulationOptions, faults: str) -> str:
    """The command that does exactly this run again."""
    lying = f" --lying-electors {options.lying_electors}" if options.lying_electors else ""
    return (
        f"kvasir-node sim --nodes {options.nodes} --seconds {options.seconds} --seed {options.seed} "
        f"--faults {faults}{lying} --json"
    )


def document_of(options: SimulationOptions, faults: str, outcome: Outcome, wall_s: float) -> dict[str, Any]:
    """The JSON object. Rates are means over the whole run and all nodes."""
    node_seconds = outcome.nodes_end * outcome.simulated_s
    return {
        "schema_version": SCHEMA_VERSION,
        "seed": options.seed,
        "nodes": options.nodes,
        "seconds": options.seconds,
        "faults": list(options.faults),
        "begins": (
            f"with a formed swarm (no faults, {FORMED_FROM} nodes or more)"
            if options.is_formed
            else "with a founder and nodes that know nobody else"
        ),
        "safety_violations": [dataclasses.asdict(each) for each in outcome.violations],
        "converged": outcome.lacking is None,
        "convergence_s": outcome.convergence_s,
        "lacking": outcome.lacking,
        "beyond_bound": options.is_beyond_bound,
        "heal_limit_s": options.heal_limit / 1e9,
        "backbones_per_term_max": outcome.backbones_per_term_max,
        "messages": outcome.messages,
        "messages_by_kind": outcome.messages_by_kind,
        "messages_per_node_per_s": round(outcome.messages / node_seconds, 3),
        "bytes_per_node_per_s": round(outcome.bytes / node_seconds, 1),
        "joins": outcome.joins,
        "join_p99_s": outcome.join_p99_s,
        "mesh": {
            "model": outcome.mesh_model,
            "published": outcome.mesh_published,
            "published_per_s": round(outcome.mesh_published / outcome.simulated_s, 3),
            "bytes_per_node_per_s": round(outcome.mesh_bytes / node_seconds, 1),
            "dropped": outcome.mesh_dropped,
        },
        "packets": {
            "lost": outcome.packets_lost,
            "refused_by_codec": outcome.refused_by_codec,
            "refused_by_core": outcome.refused_by_core,
            "refused_by_transport": outcome.refused_by_transport,
        },
        "faults_happened": outcome.faults_happened,
        "notices": outcome.notices,
        "detections": outcome.detections,
        "wall_s": round(wall_s, 2),
        "replay": replay_command(options, faults),
    }
