"""A signed accusation: somebody has recomputed these rows of a node, and they are wrong.

It names the node as it was certified, what follows, and the evidence by its digest: small enough to be told
to everybody, and whoever would check it asks its signer for the rest. Whoever accuses first and whoever comes
to the same result by himself sign the same thing. Here is what one says and who may sign it; how many make a
verdict of the swarm is `accusations`' to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.capability import CLOCK_SKEW_MAX, has_expired
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeIdField, SwarmDigest
from kvasir_proto.instants import Duration, WallTime, after
from kvasir_proto.limits import AuditVerdict, ClaimDigest, Count, Digest, Length, Nanoseconds, Version
from kvasir_proto.messages import Family
from kvasir_proto.signing import Opened, open_signed, sign_message
from kvasir_proto.tolerance_certificate import CERTIFICATE_LIFETIME

ACCUSATION_VERSION: Final = 1
ACCUSATION_SIZE_MAX: Final = 1024
"""Bytes of the largest accusation with its signature."""
ACCUSATION_LIFETIME: Final[Duration] = CERTIFICATE_LIFETIME
"""As long as a certificate is good: by then the node had to be measured anew."""
REASON_LENGTH_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Accusation:
    """Its signer says that `n_rows` different rows of this node, with those certificates, are wrong.

    `evidence` is the digest of the encoded `RowEvidence`. Times are wall time, nanoseconds.
    """

    kind: ClassVar[str] = "accusation"
    version: Version
    node_id: NodeIdField
    claim_digest: ClaimDigest
    word: AuditVerdict
    reason: Annotated[str, Length(0, REASON_LENGTH_MAX)]
    n_rows: Count
    evidence: Digest
    issued: Nanoseconds
    expires: Nanoseconds


ACCUSATION: Final = Family("accusation", (Accusation,), ACCUSATION_SIZE_MAX)


def sign_accusation(accusation: Accusation, key: Ed25519PrivateKey, swarm: SwarmDigest) -> bytes:
    """The encoded `Signed`."""
    return sign_message(key, swarm, accusation)


def open_accusation(data: bytes, swarm: SwarmDigest, now: WallTime) -> Opened[Accusation]:
    """The accusation in an encoded `Signed`, and who signed it, whoever that is.

    Raises `RemoteProtocolError`: as `open_signed` does, or `oversize`, `own_verdict`, `incompatible_version`,
    `expired`, `out_of_bounds`.
    """
    opened = open_any_accusation(data, swarm)
    accusation = opened.message
    if accusation.version != ACCUSATION_VERSION:
        raise RemoteProtocolError(f"accusation of version {accusation.version}", "incompatible_version")
    if has_expired(accusation.expires, now):
        raise RemoteProtocolError("it has expired", "expired")
    lasts = accusation.expires - accusation.issued
    if accusation.issued > after(now, CLOCK_SKEW_MAX) or not 0 <= lasts <= ACCUSATION_LIFETIME:
        raise RemoteProtocolError("it is of the future, or lasts too long", "out_of_bounds")
    return opened


def open_any_accusation(data: bytes, swarm: SwarmDigest) -> Opened[Accusation]:
    """As `open_accusation`, of any version and time: what may be passed on."""
    if len(data) > ACCUSATION_SIZE_MAX:
        raise RemoteProtocolError("the accusation is too large", "oversize")
    opened = open_signed(data, ACCUSATION, swarm)
    if opened.message.node_id == opened.signer:
        raise RemoteProtocolError("nobody accuses itself", "own_verdict")
    return opened
