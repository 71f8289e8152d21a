"""The node's key: made once, kept in one file, never shown.

The file is the Ed25519 private key in PEM, readable by its owner only. It appears whole or not at all, and
an existing one is never replaced: losing it means being another node. Whether two processes use it at once
is not decided here but by the lock of the home.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import structlog
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from kvasir_node.durable_file import durable_file, unwritable
from kvasir_proto.errors import ConfigurationInvalid
from kvasir_proto.ids import NodeId, node_id_of

_FILE_SIZE_MAX = 4096
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, repr=False)
class NodeIdentity:
    """A node's private key, and the name that follows from it."""

    private_key: Ed25519PrivateKey

    @property
    def public_key(self) -> bytes:
        """The raw public key, 32 bytes."""
        return self.private_key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @property
    def private_bytes(self) -> bytes:
        """The raw private key, 32 bytes."""
        return self.private_key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    @property
    def node_id(self) -> NodeId:
        """The node's name: `12D3KooW...`."""
        return node_id_of(self.public_key)

    def __repr__(self) -> str:
        return f"NodeIdentity({self.node_id})"


def load_or_create_identity(path: Path) -> NodeIdentity:
    """The identity kept at `path`, made now if there is none.

    Two processes that do this at once end with the same identity. Raises `ConfigurationInvalid`, naming the
    file, when it cannot be read or written, is damaged, or belongs to another user.
    """
    identity = load_identity(path)
    if identity is not None:
        return identity
    _create(path, Ed25519PrivateKey.generate())
    identity = load_identity(path)
    if identity is None:
        raise ConfigurationInvalid(f"the identity {path} disappeared while it was being made")
    return identity


def load_identity(path: Path) -> NodeIdentity | None:
    """The identity kept at `path`; None if there is no such file. Raises like `load_or_create_identity`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationInvalid(f"cannot read the identity {path}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigurationInvalid(f"the identity {path} is not a file")
        _keep_private(path, descriptor, status)
        data = os.read(descriptor, _FILE_SIZE_MAX + 1)
    finally:
        os.close(descriptor)
    damaged = ConfigurationInvalid(
        f"the identity {path} is damaged: put back a copy of it; to become a new node, use another --home"
    )
    if len(data) > _FILE_SIZE_MAX:
        raise damaged
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise damaged from None  # the cause could quote the key
    if not isinstance(key, Ed25519PrivateKey):
        raise damaged
    return NodeIdentity(key)


def _keep_private(path: Path, descriptor: int, status: os.stat_result) -> None:
    """Take everybody's but the owner's access away. Only the owner can, and so nobody else may use the
    file.
    """
    if status.st_uid != os.geteuid():
        raise ConfigurationInvalid(f"the identity {path} belongs to another user")
    if stat.S_IMODE(status.st_mode) & 0o077:
        try:
            os.fchmod(descriptor, 0o600)
        except OSError as error:
            raise ConfigurationInvalid(
                f"others may read the identity {path}, and that cannot be changed: {error.strerror}"
            ) from error
        log.warning("identity_permissions_tightened", path=str(path), mode=oct(stat.S_IMODE(status.st_mode)))


def _create(path: Path, key: Ed25519PrivateKey) -> None:
    """Write the key so that `path` is complete from the moment it exists, and lasts through a power cut."""
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        # If another process was first, its key stays.
        with durable_file(path, keep_existing=True) as file:
            file.write(data)
    except OSError as error:
        raise unwritable(f"cannot write the identity {path}", error) from error
