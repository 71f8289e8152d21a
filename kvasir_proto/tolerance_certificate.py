"""A node's signed word on its own arithmetic, and what auditors who measured it say to that.

A certificate is claimed: a measurement, who made it of itself, and how long it stands. An auditor that has
sent the node rows and recomputed the answers signs a verdict on it, which names the certificate by its digest
and carries the digest of what was seen. Here is what both say and whose signature they need; who is an
auditor, and how many must agree, is decided by whoever adds them up (`verdict_book`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final, Literal, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.capability import CLOCK_SKEW_MAX, has_expired
from kvasir_proto.codec import encode
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeIdField, SwarmDigest, node_id_of
from kvasir_proto.instants import Duration, WallTime, after, seconds
from kvasir_proto.limits import RANKS, Count, Digest, Length, Nanoseconds, Rank
from kvasir_proto.measured_kernel import MEASURED_SIZE_MAX, MeasuredClass, MeasuredKernel
from kvasir_proto.messages import Family
from kvasir_proto.signing import Opened, open_signed, sign_message

CERTIFICATE_LIFETIME: Final[Duration] = seconds(7 * 24 * 3600)
CERTIFICATE_SIZE_MAX: Final = MEASURED_SIZE_MAX + 1024
VERDICT_LIFETIME: Final[Duration] = seconds(24 * 3600)
VERDICT_SIZE_MAX: Final = 1024
"""Bytes of the largest verdict with its signature."""

VerdictWord: TypeAlias = Literal["verified", "unfit", "quarantined"]
"""What an auditor found: fit for the ranks it names; not fit for them; wrong weights or rows."""


@dataclass(frozen=True, slots=True)
class ToleranceCertificate:
    """A node says: this is what my kernel is, measured by myself. Times are wall time, nanoseconds."""

    kind: ClassVar[str] = "tolerance_certificate"
    node_id: NodeIdField
    measured: MeasuredKernel
    issued: Nanoseconds
    expires: Nanoseconds

    def digest(self) -> bytes:
        """Its name. Dates are no part of it: who measures the same again keeps what auditors said of it."""
        return hashlib.sha256(encode(replace(self, issued=0, expires=0))).digest()


@dataclass(frozen=True, slots=True)
class AuditorVerdict:
    """An auditor says what it found when it measured this node, as it was certified then.

    `ranks` are those it speaks of, `n_rows` how many rows it compared, `evidence` the digest of them.
    """

    kind: ClassVar[str] = "auditor_verdict"
    node_id: NodeIdField
    certificate: Digest
    verdict: VerdictWord
    ranks: Annotated[tuple[Rank, ...], Length(1, len(RANKS))]
    reason: Annotated[str, Length(0, 256)]
    n_rows: Count
    evidence: Digest
    issued: Nanoseconds
    expires: Nanoseconds


TOLERANCE_CERTIFICATE: Final = Family("tolerance certificate", (ToleranceCertificate,), CERTIFICATE_SIZE_MAX)
AUDITOR_VERDICT: Final = Family("auditor verdict", (AuditorVerdict,), VERDICT_SIZE_MAX)


def issue_certificate(measured: MeasuredKernel, node_key: Ed25519PrivateKey, at: int) -> ToleranceCertificate:
    """What a node with this key says of what it measured then."""
    node_id = node_id_of(node_key.public_key().public_bytes_raw())
    return ToleranceCertificate(node_id, measured, at, after(WallTime(at), CERTIFICATE_LIFETIME))


def sign_certificate(
    certificate: ToleranceCertificate, node_key: Ed25519PrivateKey, swarm: SwarmDigest
) -> bytes:
    """The encoded `Signed`."""
    return sign_message(node_key, swarm, certificate)


def open_certificate(data: bytes, swarm: SwarmDigest, now: WallTime) -> ToleranceCertificate:
    """The certificate in an encoded `Signed`, if it is its own node's and neither too old nor of the future.

    Raises `RemoteProtocolError`: as `open_signed` does, or `oversize`, `wrong_node`, `expired`,
    `out_of_bounds`, and `inconsistent` where it contradicts itself or rules out less than what it measured.
    """
    if len(data) > CERTIFICATE_SIZE_MAX:
        raise RemoteProtocolError("the certificate is too large", "oversize")
    certificate, signer = open_signed(data, TOLERANCE_CERTIFICATE, swarm)
    if certificate.node_id != signer:
        raise RemoteProtocolError("a certificate is signed by the node it is about", "wrong_node")
    _check_times(certificate.issued, certificate.expires, CERTIFICATE_LIFETIME, now)
    measured = certificate.measured
    if any(not each.passed for each in measured.classes) and not {"backbone", "output"} <= {*measured.unfit}:
        raise RemoteProtocolError("it is out of tolerance and says that it is fit", "inconsistent")
    if any(each.passed and each.kernel.accumulation != "F32" for each in measured.classes):
        raise RemoteProtocolError("sums that are not F32 are in no tolerance", "inconsistent")
    if any(each.passed and not _is_inside(each) for each in measured.classes):
        raise RemoteProtocolError("a class is said to pass that is not inside its gate", "inconsistent")
    said_of = [
        (weight_type, batch_class)
        for each in measured.kernel_classes
        for weight_type in each.weight_types
        for batch_class in each.batch_classes
    ]
    if len(said_of) != len(set(said_of)):
        raise RemoteProtocolError("it says two things of one class", "inconsistent")
    return certificate


def _is_inside(measured: MeasuredClass) -> bool:
    return measured.rel_l2 is not None and measured.gate is not None and measured.rel_l2 <= measured.gate


def sign_verdict(verdict: AuditorVerdict, auditor_key: Ed25519PrivateKey, swarm: SwarmDigest) -> bytes:
    """The encoded `Signed`."""
    return sign_message(auditor_key, swarm, verdict)


def open_verdict(data: bytes, swarm: SwarmDigest, now: WallTime) -> Opened[AuditorVerdict]:
    """The verdict in an encoded `Signed`, and who signed it: whose word that is worth
    anything is not judged here, but nobody's on itself is.

    Raises `RemoteProtocolError`: as `open_signed` does, or `oversize`, `own_verdict`, `expired`,
    `out_of_bounds`.
    """
    if len(data) > VERDICT_SIZE_MAX:
        raise RemoteProtocolError("the verdict is too large", "oversize")
    verdict, signer = open_signed(data, AUDITOR_VERDICT, swarm)
    if verdict.node_id == signer:
        raise RemoteProtocolError("nobody is an auditor of itself", "own_verdict")
    _check_times(verdict.issued, verdict.expires, VERDICT_LIFETIME, now)
    return Opened(verdict, signer)


def _check_times(issued: int, expires: int, lifetime_max: Duration, now: WallTime) -> None:
    if has_expired(expires, now):
        raise RemoteProtocolError("it has expired", "expired")
    if issued > after(now, CLOCK_SKEW_MAX) or not 0 <= expires - issued <= lifetime_max:
        raise RemoteProtocolError("it is of the future, or lasts too long", "out_of_bounds")
