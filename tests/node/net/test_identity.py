"""The node's key on disk: made once, whole or not at all, private."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from structlog.testing import capture_logs

from kvasir_node.net.identity import load_identity, load_or_create_identity
from kvasir_proto.errors import ConfigurationInvalid
from kvasir_proto.ids import is_node_id, public_key_of

SECRET = b"-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEI\n-----END PRIVATE KEY-----\n"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_same_identity_every_time(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    first = load_or_create_identity(path)
    again = load_or_create_identity(path)
    assert first.node_id == again.node_id
    assert is_node_id(first.node_id)
    assert public_key_of(first.node_id) == first.public_key
    assert len(first.private_bytes) == 32


def test_the_name_is_the_one_libp2p_gives_the_key(tmp_path: Path) -> None:
    from libp2p.crypto.ed25519 import Ed25519PrivateKey as Libp2pKey
    from libp2p.peer.id import ID

    identity = load_or_create_identity(tmp_path / "identity.pem")
    public = Libp2pKey.from_bytes(identity.private_bytes).get_public_key()
    assert str(ID.from_pubkey(public)) == identity.node_id


def test_only_the_owner_may_read_it_whatever_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        load_or_create_identity(tmp_path / "identity.pem")
    finally:
        os.umask(previous)
    assert mode(tmp_path / "identity.pem") == 0o600


def test_nothing_else_is_left_beside_it(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path / "identity.pem")
    assert [each.name for each in tmp_path.iterdir()] == ["identity.pem"]


def test_open_permissions_are_tightened_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    load_or_create_identity(path)
    path.chmod(0o644)
    with capture_logs() as events:
        load_or_create_identity(path)
    assert mode(path) == 0o600
    assert [event["event"] for event in events] == ["identity_permissions_tightened"]
    with capture_logs() as events:
        load_or_create_identity(path)
    assert events == []


def test_an_identity_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.pem"
    load_or_create_identity(path)
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigurationInvalid, match="another user"):
        load_identity(path)


def test_who_comes_second_keeps_the_first_ones_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes find no file and both make a key; one of the keys must win for both."""
    from kvasir_node.net import identity as module

    path = tmp_path / "identity.pem"
    winner = load_or_create_identity(path).node_id
    answers = iter([None])
    real = module.load_identity
    monkeypatch.setattr(module, "load_identity", lambda file: next(answers, real(file)))
    assert load_or_create_identity(path).node_id == winner


def encrypted() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")
    )


def of_another_kind() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense", SECRET, b"\xff" * 100, b"A" * 5000, encrypted(), of_another_kind()],
    ids=["empty", "nonsense", "cut", "bytes", "huge", "encrypted", "other kind"],
)
def test_a_damaged_identity_is_named_and_never_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationInvalid, match=r"identity\.pem is damaged") as refusal:
        load_or_create_identity(path)
    assert refusal.value.exit_code == 6
    assert refusal.value.__cause__ is None, "a cause could carry the key into a log"
    assert path.read_bytes() == content


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "identity.pem").mkdir()
    with pytest.raises(ConfigurationInvalid, match="not a file"):
        load_or_create_identity(tmp_path / "identity.pem")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigurationInvalid, match="not a file"):
        load_or_create_identity(tmp_path / "pipe")


def test_a_place_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match="cannot write the identity"):
        load_or_create_identity(tmp_path / "missing" / "identity.pem")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationInvalid, match="cannot read the identity"):
        load_or_create_identity(tmp_path / "file" / "identity.pem")


def test_the_key_is_not_in_what_is_printed(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "identity.pem")
    assert repr(identity) == f"NodeIdentity({identity.node_id})"
