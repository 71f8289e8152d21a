"""`revoke` against a control socket: what it signs, who may, and what is a wrong call."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvasir_node.net.identity import load_or_create_identity
from kvasir_node.swarm_files import SwarmFiles
from kvasir_proto.admission import REVOCATION, Invite, Revocation, format_invite, invite_key
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of, public_key_of
from kvasir_proto.signing import open_signed
from kvasir_proto.swarm_manifest import FoundedSwarm
from tests.node.cli.daemon_twin import twin_daemon
from tests.node.cli.invocation import call
from tests.node.cli.test_status import backbone

pytestmark = pytest.mark.loopback

OTHER = node_id_of(b"o" * 32)


def founded(home: Path, admission: Any = "invite") -> tuple[FoundedSwarm, NodeId]:
    """A home that founded a swarm, and its node."""
    identity = load_or_create_identity(home / "identity.pem")
    files = SwarmFiles(home / "state")
    return files.found(identity.private_key, bytes(32), "toy", admission=admission).swarm, identity.node_id


def invite_to(swarm: FoundedSwarm, founder: NodeId) -> Invite:
    return Invite(
        swarm=swarm.digest,
        electorate_digest=bytes(32),
        issuer=founder,
        addresses=(f"/ip4/192.0.2.7/tcp/4001/p2p/{founder}",),
        ranks=("bulk",),
        expires=1,
        secret=b"s" * 16,
    )


def test_it_signs_for_a_node_an_invite_or_an_issuer(tmp_path: Path) -> None:
    swarm, founder = founded(tmp_path)
    invite = invite_to(swarm, founder)
    expected = [
        ("node", public_key_of(OTHER)),
        ("issuer", public_key_of(OTHER)),
        ("invite", invite_key(invite.secret).public_key().public_bytes_raw()),
    ]
    with twin_daemon(tmp_path, backbone()) as daemon:
        for of, argument in (("node", OTHER), ("issuer", OTHER), ("invite", format_invite(invite))):
            outcome = call("revoke", f"--{of}", argument, "--json", home=tmp_path)
            assert outcome.status == 0, outcome.err
            assert outcome.document["of"] == of
        assert f"the node {OTHER}" in call("revoke", "--node", OTHER, home=tmp_path).out
    opened = [open_signed(each.revocation, REVOCATION, swarm.digest) for each in daemon.revoked]
    assert {each.signer for each in opened} == {founder}
    assert [(each.message.of, each.message.key) for each in opened[:3]] == expected
    assert isinstance(opened[0].message, Revocation)
    assert opened[3].message.sequence > opened[0].message.sequence


def test_who_did_not_found_the_swarm_or_is_in_none_revokes_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert call("revoke", "--node", OTHER, home=home).status == 6
    load_or_create_identity(tmp_path / "identity.pem")
    other = tmp_path / "other"
    other.mkdir()
    SwarmFiles(tmp_path / "state").found(
        load_or_create_identity(other / "identity.pem").private_key, bytes(32), "toy"
    )
    with twin_daemon(tmp_path, backbone()) as daemon:
        outcome = call("revoke", "--node", OTHER, home=tmp_path)
    assert (outcome.status, daemon.revoked) == (6, [])
    assert "only the founder's key revokes" in outcome.sentence


def test_without_a_daemon_nobody_is_told(tmp_path: Path) -> None:
    founded(tmp_path)
    assert call("revoke", "--node", OTHER, home=tmp_path).status == 3


def test_wrong_calls_are_2_and_revoke_nothing(tmp_path: Path) -> None:
    swarm, founder = founded(tmp_path)
    elsewhere = format_invite(dataclasses.replace(invite_to(swarm, founder), swarm=SwarmDigest(bytes(32))))
    with twin_daemon(tmp_path, backbone()) as daemon:
        for arguments, words in [
            ((), "give one of"),
            (("--node", OTHER, "--issuer", OTHER), "give one of"),
            (("--node", OTHER[:-1]), "no node id"),
            (("--node", founder), "the founder's own node"),
            (("--issuer", founder), "the founder's own node"),
            (("--invite", "kvasir-invite-1:x"), "--invite"),
            (("--invite", elsewhere), "another swarm"),
        ]:
            outcome = call("revoke", *arguments, home=tmp_path)
            assert outcome.status == 2
            assert words in outcome.sentence
    assert daemon.revoked == []


def test_in_an_open_swarm_only_nodes_can_be_put_out(tmp_path: Path) -> None:
    founded(tmp_path, "open")
    with twin_daemon(tmp_path, backbone()) as daemon:
        assert call("revoke", "--issuer", OTHER, home=tmp_path).status == 2
        assert call("revoke", "--node", OTHER, home=tmp_path).status == 0
    assert len(daemon.revoked) == 1
