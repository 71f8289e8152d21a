"""The bond between a node and one of its engines, as it stands in the engine's certificate.

An engine makes its own key. Its node signs that key with a role and a generation, and the engine carries that
signature in an extension of its self-made X.509 certificate, under an object id of our own: never libp2p's,
because an engine must not be able to pose as the node. X.509 itself, and the dates in it, are the engine's
business; here are only the extension's bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, NodeIdField, SwarmDigest, node_id_of
from kvasir_proto.limits import Digest, Role, Sequence63
from kvasir_proto.messages import Family
from kvasir_proto.signing import open_signed, sign_message

ENGINE_EXTENSION_OID: Final = "1.3.6.1.4.1.58888.1.1"
"""Where the bond stands in an engine's certificate. The arc is private and unregistered: certificates with it
are only ever shown to nodes that were told to expect them."""


@dataclass(frozen=True, slots=True)
class EngineBinding:
    """A node says: the engine with this key works for me in this role. `generation` grows with each start."""

    kind: ClassVar[str] = "engine"
    node_id: NodeIdField
    engine_key_sha256: Digest
    role: Role
    generation: Sequence63


ENGINE_BINDING: Final = Family("engine binding", (EngineBinding,), 4096)


def bind_engine(
    node_key: Ed25519PrivateKey,
    swarm_digest: SwarmDigest,
    engine_public_key: bytes,
    role: Role,
    generation: int,
) -> bytes:
    """The value of the extension for an engine, whose key is given as DER (SubjectPublicKeyInfo)."""
    binding = EngineBinding(
        node_id=node_id_of(node_key.public_key().public_bytes_raw()),
        engine_key_sha256=hashlib.sha256(engine_public_key).digest(),
        role=role,
        generation=generation,
    )
    return sign_message(node_key, swarm_digest, binding)


def verify_binding(
    extension: bytes,
    swarm_digest: SwarmDigest,
    engine_public_key: bytes,
    node_id: NodeId,
    role: Role,
) -> EngineBinding:
    """The bond in an extension, if it is this node's, for this engine key (DER) in this role.

    Raises `RemoteProtocolError`: as `open_signed` does, or `wrong_node`, `wrong_engine`, `wrong_role`.
    """
    binding, signer = open_signed(extension, ENGINE_BINDING, swarm_digest)
    if signer != node_id or binding.node_id != node_id:
        raise RemoteProtocolError("the engine belongs to another node", "wrong_node")
    if binding.engine_key_sha256 != hashlib.sha256(engine_public_key).digest():
        raise RemoteProtocolError("the node vouches for another engine key", "wrong_engine")
    if binding.role != role:
        raise RemoteProtocolError(f"the engine is a {binding.role} and not a {role}", "wrong_role")
    return binding
