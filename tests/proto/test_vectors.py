"""The bytes themselves: what this build writes is what every build has written.

One example of each message, framed and signed things, names of nodes and a plan, as hex in `tests/vectors`. A
difference is a change of the protocol. `pytest tests/proto/test_vectors.py --regenerate-vectors` writes
them anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.certificate import bind_engine
from kvasir_proto.codec import decode, encode
from kvasir_proto.framing import frame
from kvasir_proto.ids import ModelDigest, SwarmDigest, node_id_of
from kvasir_proto.messages import Family
from kvasir_proto.messages.election import ELECTION
from kvasir_proto.messages.engine import ENGINE
from kvasir_proto.messages.experts import EXPERT_EXCHANGE
from kvasir_proto.messages.local import LOCAL
from kvasir_proto.messages.membership import MEMBERSHIP
from kvasir_proto.messages.plan import PLAN_EXCHANGE
from kvasir_proto.messages.session import SESSION
from kvasir_proto.messages.swarm import SWARM
from kvasir_proto.placement.plan import make_plan
from kvasir_proto.signing import sign_message
from kvasir_proto.swarm_manifest import SwarmManifest, Thresholds, open_swarm_manifest, sign_swarm_manifest
from kvasir_proto.term_proof import ProvenTerm, cast_vote, founding_electorate, make_term_proof
from tests.proto.declared import FAMILIES, example_of

VECTORS = Path(__file__).parent.parent / "vectors"
FOUNDER = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
STREAMS: tuple[Family[Any], ...] = (
    SWARM,
    SESSION,
    ENGINE,
    LOCAL,
    MEMBERSHIP,
    ELECTION,
    PLAN_EXCHANGE,
    EXPERT_EXCHANGE,
)
WORKERS = tuple(node_id_of(bytes([number]) * 32) for number in (1, 2, 3))


def _compare(name: str, found: dict[str, Any], config: pytest.Config) -> None:
    path = VECTORS / name
    if config.getoption("--regenerate-vectors", default=False):
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")
    assert json.loads(path.read_text(encoding="ascii")) == found


def _vectors_of(family: Family[Any]) -> dict[str, str]:
    return {member.kind: encode(example_of(member)).hex() for member in family.members}


@pytest.mark.parametrize("family", STREAMS, ids=lambda family: family.name)
def test_messages_have_the_bytes_they_always_had(family: Family[Any], pytestconfig: pytest.Config) -> None:
    _compare(f"messages_{family.name}.json", _vectors_of(family), pytestconfig)


@pytest.mark.parametrize("family", STREAMS, ids=lambda family: family.name)
def test_bytes_on_record_are_still_understood(family: Family[Any]) -> None:
    recorded = json.loads((VECTORS / f"messages_{family.name}.json").read_text(encoding="ascii"))
    for kind, data in recorded.items():
        assert decode(bytes.fromhex(data), family) == example_of(family.by_kind[kind])


def test_records_have_the_bytes_they_always_had(pytestconfig: pytest.Config) -> None:
    records = {
        kind: data
        for family in FAMILIES
        if family not in STREAMS
        for kind, data in _vectors_of(family).items()
    }
    _compare("records.json", records, pytestconfig)


def test_signed_things_have_the_bytes_they_always_had(pytestconfig: pytest.Config) -> None:
    manifest = SwarmManifest(
        model_digest=ModelDigest(bytes(32)),
        model_name="demo",
        reference_class="Q8_0",
        thresholds=Thresholds(),
        admission="open",
        compact_activations=False,
        partial_sums=False,
        founder_public_key=FOUNDER.public_key().public_bytes_raw(),
        recovery_public_key=bytes(range(32, 64)),
    )
    signed_manifest = sign_swarm_manifest(manifest, FOUNDER)
    swarm_digest = open_swarm_manifest(signed_manifest).digest
    electorate = founding_electorate(manifest.founder_public_key)
    term = ProvenTerm(0, 1, node_id_of(manifest.founder_public_key))
    plan = make_plan([1, 2], 8, WORKERS, epoch=0, term=1, revision=1)
    found = {
        "swarm_manifest": signed_manifest.hex(),
        "swarm_digest": swarm_digest.hex(),
        "founding_proof": make_term_proof(
            electorate, term, [cast_vote(FOUNDER, swarm_digest, electorate, term)]
        ).hex(),
        "engine_binding": bind_engine(FOUNDER, swarm_digest, b"an engine's key", "worker", 7).hex(),
        "plan": sign_message(FOUNDER, swarm_digest, plan).hex(),
        "plan_in_another_swarm": sign_message(FOUNDER, SwarmDigest(bytes(32)), plan).hex(),
    }
    _compare("signed.json", found, pytestconfig)


def test_nodes_have_the_names_they_always_had(pytestconfig: pytest.Config) -> None:
    keys = [bytes(32), bytes(range(32)), b"\xff" * 32, FOUNDER.public_key().public_bytes_raw()]
    _compare("node_ids.json", {key.hex(): node_id_of(key) for key in keys}, pytestconfig)


def test_frames_have_the_bytes_they_always_had(pytestconfig: pytest.Config) -> None:
    bodies = [b"", b"a", bytes(300)]
    _compare("frames.json", {body.hex(): frame(body, 300).hex() for body in bodies}, pytestconfig)
