"""Who is fit for what, as the records say it: candidates for backbone in their order, and electors.

Plain functions of one record each, so that every node comes to the same order from the same records. While a
swarm's manifest says `certificates = claimed` a node's own word makes it fit; otherwise its auditors' word.
The order sets how long a candidate waits before it stands, and nothing else: no vote depends on it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvasir_proto.capability import CapabilityRecord, Verdict
from kvasir_proto.ids import NodeId
from kvasir_proto.swarm_manifest import SwarmManifest

_GIB: Final = 1 << 30


class CandidateRank(NamedTuple):
    """A candidate's place among others: the smaller, the sooner it stands."""

    headroom_gib: int
    """Whole GiB that its trunk leaves free, negative: less is later. Coarse, so that speed decides."""
    decode_token_ns: int
    """Measured time of one token; one that was not measured comes last."""
    started: int
    """Wall time of its start: who has been there longer is steadier."""
    node_id: NodeId


def may_be_backbone(
    record: CapabilityRecord, manifest: SwarmManifest, verdict: Verdict, *, may_begin: bool = False
) -> bool:
    """Whether this node stands for `backbone`, has the file at hand, and is fit as far as this swarm judges.

    `verdict` is what is known of its fitness for that rank; `may_begin` where its own word has to be enough.
    What accumulates in less than F32 never is (invariant 4); `UNKNOWN` claims nothing worse, and stands only
    where claims do.
    """
    if "backbone" not in record.ranks or not record.has_backbone_file:
        return False
    if manifest.certificates == "claimed":
        return record.accumulation in ("F32", "UNKNOWN") and verdict != "unfit"
    is_fit = verdict == "verified" or (may_begin and verdict == "claimed")
    return record.accumulation == "F32" and is_fit


def candidate_rank(record: CapabilityRecord) -> CandidateRank:
    """Where a candidate stands among the others."""
    return CandidateRank(
        headroom_gib=-(record.headroom_bytes // _GIB),
        decode_token_ns=record.decode_token_ns or (1 << 62),
        started=record.started,
        node_id=record.node_id,
    )
