"""`recover` against a control socket: which key it takes, what it asks for, and when it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.swarm_files import SwarmFiles
from kvasir_proto.codec import decode
from kvasir_proto.election.configuration import LINK, open_link
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.swarm_manifest import FoundedSwarm
from kvasir_proto.term_proof import founding_electorate
from tests.node.cli.daemon_twin import twin_daemon
from tests.node.cli.invocation import call
from tests.node.cli.test_status import backbone, joining

pytestmark = pytest.mark.loopback

FOUNDER = Ed25519PrivateKey.from_private_bytes(b"f" * 32)
OTHERS = [node_id_of(bytes([number]) * 32) for number in range(1, 9)]


def founded(home: Path) -> tuple[FoundedSwarm, Path]:
    """A home that founded a swarm, and where its recovery key is."""
    files = SwarmFiles(home / "state")
    return files.found(FOUNDER, bytes(32), "toy").swarm, files.recovery_key_file


def lost(**changes: Any) -> dict[str, Any]:
    """What a daemon says whose electorate has lost its quorum in epoch 2."""
    document = backbone()
    document |= {"state": "electing", "reason": "the backbone does not answer", **changes}
    document["electorate"] = {**document["electorate"], "epoch": 2}
    return document


def test_the_new_epoch_is_one_above_the_old_with_this_node_alone_unless_others_are_named(
    tmp_path: Path,
) -> None:
    swarm, _ = founded(tmp_path)
    document = lost()
    with twin_daemon(tmp_path, document) as daemon:
        outcome = call("recover", home=tmp_path)
        named = call("recover", "--elector", OTHERS[0], "--elector", OTHERS[1], "--json", home=tmp_path)
    assert (outcome.status, named.status) == (0, 0), outcome.err + named.err
    assert f"epoch 3 begins, with 1 elector:\n  {document['node_id']}\n" in outcome.out
    assert named.document["epoch"] == 3
    assert named.document["electors"] == sorted(OTHERS[:2])
    root = founding_electorate(swarm.manifest.founder_public_key, "open")
    recovery_key = swarm.manifest.recovery_public_key
    for request, members in zip(daemon.recovered, ([NodeId(document["node_id"])], OTHERS[:2]), strict=True):
        electorate = open_link(request.link, root, swarm.digest, recovery_key).electorate
        assert electorate == decode(request.link, LINK).electorate
        assert {node_id_of(each) for each in electorate.members} == set(members)
        assert (electorate.epoch, electorate.rule) == (3, "open")


@pytest.mark.parametrize("state", ["ready", "degraded", "loading", "standby"])
def test_where_a_backbone_serves_nothing_is_recovered_unless_forced(tmp_path: Path, state: str) -> None:
    founded(tmp_path)
    with twin_daemon(tmp_path, lost(state=state)) as daemon:
        refused = call("recover", home=tmp_path)
        assert (refused.status, daemon.recovered) == (1, [])
        assert "nothing is lost" in refused.sentence
        assert call("recover", "--force", home=tmp_path).status == 0
    assert len(daemon.recovered) == 1


def test_only_this_swarms_recovery_key_is_used(tmp_path: Path) -> None:
    _, key_file = founded(tmp_path)
    elsewhere = tmp_path / "on a stick"
    key_file.rename(elsewhere)
    short, foreign = tmp_path / "short", tmp_path / "foreign"
    short.write_bytes(b"x")
    foreign.write_bytes(b"y" * 32)
    with twin_daemon(tmp_path, lost()) as daemon:
        for arguments, words in (
            ((), "cannot be read"),
            (("--key", str(short)), "no recovery key"),
            (("--key", str(foreign)), "another swarm"),
        ):
            outcome = call("recover", *arguments, home=tmp_path)
            assert outcome.status == 6
            assert words in outcome.sentence
        assert daemon.recovered == []
        assert call("recover", "--key", str(elsewhere), home=tmp_path).status == 0


@pytest.mark.parametrize("electors", [["nobody"], OTHERS])
def test_wrong_electors_are_a_wrong_call(tmp_path: Path, electors: list[str]) -> None:
    founded(tmp_path)
    arguments = [each for elector in electors for each in ("--elector", elector)]
    assert call("recover", *arguments, home=tmp_path).status == 2


def test_without_a_swarm_a_daemon_or_an_electorate_there_is_nothing_to_recover(tmp_path: Path) -> None:
    assert call("recover", home=tmp_path).status == 6
    founded(tmp_path)
    assert call("recover", home=tmp_path).status == 3
    with twin_daemon(tmp_path, joining()) as daemon:
        outcome = call("recover", home=tmp_path)
    assert outcome.status == 1
    assert "looking for the swarm" in outcome.sentence
    assert daemon.recovered == []
