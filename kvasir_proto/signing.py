"""Signatures: what they cover, how they travel, how they are checked.

Every signature covers four things, each with its length before it: `kvasir/1`, the kind of what is signed,
the digest of the swarm manifest, and the payload bytes as sent. So no signature means anything for another
swarm or as another kind of thing, and a payload is never encoded again before it is checked: it travels as
one byte string. Ed25519 is deterministic, so signed things have golden vectors like any frame. Whether a
signer may say what it says is decided by the caller.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvasir_proto import SIGNATURE_DOMAIN
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, SwarmDigest, node_id_of
from kvasir_proto.limits import SIGNED_SIZE_MAX, Payload, PublicKey, Signature, Word
from kvasir_proto.messages import Family, Message, MessageT


@dataclass(frozen=True, slots=True)
class Signed:
    """A payload and who signed it. Nothing in it is believed before `verify`."""

    kind: ClassVar[str] = "signed"
    payload_kind: Word
    payload: Payload
    signer: PublicKey
    signature: Signature

    @property
    def signer_id(self) -> NodeId:
        """The node whose key this is signed with, or claims to be."""
        return node_id_of(self.signer)


SIGNED: Final = Family("signed", (Signed,), SIGNED_SIZE_MAX)

_GOOD_MAX: Final = 4096
_good: dict[bytes, None] = {}
"""Signatures that were found good, by a digest of them and all they cover: each is checked once, however
often a proof or a record comes by. Bad ones are not remembered: nobody fills it with what it did not sign."""


class Opened(NamedTuple, Generic[MessageT]):
    """A message whose signature is good, and who signed it."""

    message: MessageT
    signer: NodeId


def signed_bytes(kind: str, swarm_digest: SwarmDigest, payload: bytes) -> bytes:
    """Exactly what a signature covers: four parts, each after its length as four bytes, high byte first."""
    parts = (SIGNATURE_DOMAIN, kind.encode(), swarm_digest, payload)
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def sign(private_key: Ed25519PrivateKey, kind: str, swarm_digest: SwarmDigest, payload: bytes) -> Signed:
    """Sign these payload bytes as a thing of this kind in this swarm."""
    return Signed(
        payload_kind=kind,
        payload=payload,
        signer=private_key.public_key().public_bytes_raw(),
        signature=private_key.sign(signed_bytes(kind, swarm_digest, payload)),
    )


def verify(signed: Signed, kind: str, swarm_digest: SwarmDigest) -> bytes:
    """The payload, now known to be signed by `signed.signer` as a thing of this kind in this swarm.

    Raises `RemoteProtocolError`: `wrong_kind` or `bad_signature`.
    """
    if signed.payload_kind != kind:
        raise RemoteProtocolError(f"signed as something else than {kind}", "wrong_kind")
    covered = signed_bytes(kind, swarm_digest, signed.payload)
    # Key and signature have one length each, so that nothing else gives the same bytes.
    seen = hashlib.sha256(signed.signer + signed.signature + covered).digest()
    if seen in _good:
        return signed.payload
    try:
        Ed25519PublicKey.from_public_bytes(signed.signer).verify(signed.signature, covered)
    except (InvalidSignature, ValueError):
        raise RemoteProtocolError(f"the signature of this {kind} is not good", "bad_signature") from None
    if len(_good) >= _GOOD_MAX:
        del _good[next(iter(_good))]
    _good[seen] = None
    return signed.payload


def sign_message(private_key: Ed25519PrivateKey, swarm_digest: SwarmDigest, message: Message) -> bytes:
    """The encoded `Signed` of a message, signed under the message's own kind.

    Raises `LocalProtocolError` if the message is outside its declaration or too large to be signed.
    """
    return encode(sign(private_key, message.kind, swarm_digest, encode(message)))


def open_signed(data: bytes, family: Family[MessageT], swarm_digest: SwarmDigest) -> Opened[MessageT]:
    """The message in an encoded `Signed`, which must be one of the family's, and its signer.

    Raises `RemoteProtocolError`: as `decode` does for either layer, as `verify` does for the signature.
    """
    signed = decode(data, SIGNED)
    if signed.payload_kind not in family.by_kind:
        raise RemoteProtocolError(f"signed as something else than {family.name}", "wrong_kind")
    message = decode(verify(signed, signed.payload_kind, swarm_digest), family)
    if message.kind != signed.payload_kind:
        raise RemoteProtocolError("signed as one kind and encoded as another", "wrong_kind")
    return Opened(message, signed.signer_id)
