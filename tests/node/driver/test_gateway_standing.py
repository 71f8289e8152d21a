"""What stands in the way of a text, in every state that a node and its backbone can be in."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from kvasir_node.driver.gateway_standing import ReadModel, standing_of
from kvasir_node.driver.status_report import StatusSources
from kvasir_node.gateway.ports import Provenance, ServedModel
from kvasir_node.tokenizer.vocabulary import Vocabulary
from kvasir_proto.capability import CapabilityRecord, RankVerdict
from kvasir_proto.ids import NodeId
from kvasir_proto.term_proof import ProvenTerm
from tests.node.driver.test_status_report import (
    OWN,
    SECOND,
    STARTED,
    THIRD,
    plan_of_equals,
    record,
    swarm_with,
    view_with,
)

MODEL = ReadModel(Vocabulary(array("I", [1, 2]), b"ab", "<s>", "</s>", (1,), "{{ x }}"), 512, 1_700_000_000)
UNREAD = "the model's vocabulary is being read"


def sources(
    state: str, backbone: str | None, records: dict[NodeId, CapabilityRecord] | None = None, **changes: Any
) -> StatusSources:
    fence = None if backbone is None else ProvenTerm(2, 7, {"own": OWN, "other": SECOND}[backbone])
    known = records or {}
    return StatusSources(
        node_id=OWN,
        state=state,
        reason="why",
        started=STARTED,
        swarm=swarm_with(),
        view=view_with(fence=fence, **changes),
        record_of=known.get,
    )


@pytest.mark.parametrize(
    "state, backbone, said, obstacle",
    [
        ("joining", None, "ready", "this node is joining: why"),
        ("ready", "own", "ready", ""),
        ("degraded", "own", "ready", ""),
        ("joining", "own", "ready", "this node is joining: why"),
        ("certifying", "own", "ready", "this node is certifying: why"),
        ("stopping", "own", "ready", "this node is stopping: why"),
        ("ready", "other", "ready", ""),
        ("degraded", "other", "degraded", ""),
        # Its own part is not done, and that is nothing to those who ask.
        ("certifying", "other", "ready", ""),
        ("loading", "other", "ready", ""),
        ("ready", "other", None, ""),
        ("ready", "other", "joining", "the backbone is joining: it lacks experts"),
        ("ready", "other", "loading", "the backbone is loading: it lacks experts"),
        *(
            (state, "other", "ready", f"this node is {state}: why")
            for state in ("electing", "isolated", "conflicted", "revoked", "stopping", "joining", "starting")
        ),
    ],
)
def test_what_stands_in_the_way(state: str, backbone: str | None, said: str | None, obstacle: str) -> None:
    records = {} if said is None else {SECOND: record(SECOND, state=said, reason="it lacks experts")}
    known = sources(state, backbone, records)
    made = standing_of(known, MODEL, "")
    assert made.obstacle == obstacle
    assert made.model is not None
    assert standing_of(known, None, "").obstacle == (obstacle or UNREAD)
    assert standing_of(known, None, "no file").obstacle == (obstacle or "no file")


def test_before_anything_is_known() -> None:
    bare = StatusSources(node_id=OWN, state="starting", reason="", started=STARTED)
    made = standing_of(bare, None, "")
    assert (made.model, made.provenance, made.obstacle) == (None, None, "this node is starting")
    assert standing_of(bare, MODEL, "").model is None


def test_model_and_provenance() -> None:
    records = {
        OWN: record(OWN),
        SECOND: record(SECOND, ranks=("bulk",), verdicts=(RankVerdict("bulk", "claimed", bytes(32)),)),
    }
    known = sources("ready", "own", records, plan=plan_of_equals())
    made = standing_of(known, MODEL, "")
    digest = bytes(32).hex()
    assert made.model == ServedModel("tiny", digest, 1_700_000_000, 512, 2, (1,), "{{ x }}", "<s>", "</s>")
    assert known.swarm is not None
    # A holder of whom nothing is known here has no certificate that is.
    assert made.provenance == Provenance(known.swarm.digest.hex(), 2, 7, "none")
    records[THIRD] = record(THIRD)
    made = standing_of(known, MODEL, "")
    assert made.provenance == Provenance(known.swarm.digest.hex(), 2, 7, "claimed")
