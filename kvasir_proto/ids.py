"""Names of nodes, models, swarms and sessions, each its own type so that none is taken for another.

A node's name is its key: the libp2p peer id of its Ed25519 public key, which holds the key itself, so name
and key are turned into each other here, without libp2p. Models and swarms are named by SHA-256 digests. The
`...Field` twins are for messages: the same types with the bounds the codec checks. This module makes no keys
and checks no signatures.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Final, NewType, TypeAlias

from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.limits import UINT32_MAX, Check, Length, Range

NodeId = NewType("NodeId", str)
"""A libp2p peer id of an Ed25519 key in base58: `12D3KooW...`, 52 characters."""
ModelDigest = NewType("ModelDigest", bytes)
"""SHA-256 of a model manifest, 32 bytes: the model's name."""
SwarmDigest = NewType("SwarmDigest", bytes)
"""SHA-256 of a swarm manifest's payload, 32 bytes: the swarm's name."""
SessionId = NewType("SessionId", bytes)
"""16 random bytes that name one generation."""

_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_VALUE_OF: Final = {character: value for value, character in enumerate(_ALPHABET)}
# A multihash of the identity "hash" (0x00), 36 bytes long (0x24), over libp2p's protobuf of a public key:
# field 1, type = Ed25519 (0x08 0x01); field 2, 32 bytes of key (0x12 0x20).
_PREFIX: Final = bytes.fromhex("002408011220")
_NODE_ID_LENGTH: Final = 52


@lru_cache(maxsize=8192)
def node_id_of(public_key: bytes) -> NodeId:
    """The name of the node whose raw Ed25519 public key this is. The key must be 32 bytes (`ValueError`)."""
    if len(public_key) != 32:
        raise ValueError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    number = int.from_bytes(_PREFIX + public_key, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    # Base58 writes each leading zero byte as the digit for zero; the prefix has exactly one.
    return NodeId(_ALPHABET[0] + "".join(reversed(digits)))


@lru_cache(maxsize=4096)
def public_key_of(node_id: str) -> bytes:
    """The raw Ed25519 public key (32 bytes) inside a node's name.

    Raises `RemoteProtocolError` (`bad_node_id`) for anything that is not the one spelling of such a name.
    """
    refusal = RemoteProtocolError("not the id of a node with an Ed25519 key", "bad_node_id")
    if len(node_id) != _NODE_ID_LENGTH or node_id[0] != _ALPHABET[0]:
        raise refusal
    number = 0
    for character in node_id[1:]:
        value = _VALUE_OF.get(character)
        if value is None:
            raise refusal
        number = number * 58 + value
    # 51 base58 digits hold at most 38 bytes, so this cannot overflow; a second zero byte breaks the prefix.
    data = number.to_bytes(len(_PREFIX) + 32, "big")
    if not data.startswith(_PREFIX):
        raise refusal
    return data[len(_PREFIX) :]


def is_node_id(text: str) -> bool:
    """Whether `text` is the id of a node, exactly as `node_id_of` spells it."""
    try:
        public_key_of(text)
    except RemoteProtocolError:
        return False
    return True


NodeIdField: TypeAlias = Annotated[
    NodeId,
    Length(_NODE_ID_LENGTH, _NODE_ID_LENGTH),
    Check(is_node_id, "the id of a node with an Ed25519 key"),
]
ModelDigestField: TypeAlias = Annotated[ModelDigest, Length(32, 32)]
SwarmDigestField: TypeAlias = Annotated[SwarmDigest, Length(32, 32)]
SessionIdField: TypeAlias = Annotated[SessionId, Length(16, 16)]

Epoch: TypeAlias = Annotated[int, Range(0, UINT32_MAX)]
"""Counts the times a swarm was recovered by its recovery key."""
Term: TypeAlias = Annotated[int, Range(0, UINT32_MAX)]
"""Counts elections within an epoch. (epoch, term) orders backbones; the founder's is (0, 1)."""
