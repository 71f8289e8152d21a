"""What nodes say to each other about how others compute: an auditor's verdict, and evidence of wrong rows.

A verdict that verifies goes to the node alone, which carries it in its record; one that does not is gossiped,
since nobody would show it of himself. Accusations are gossiped too; the evidence for one is asked for by
whoever would check it. All of it is believed for its signatures, not its sender.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, TypeAlias, get_args

from kvasir_proto.audit.evidence import EVIDENCE_SIZE_MAX, EvidenceBytes
from kvasir_proto.limits import Digest, Length
from kvasir_proto.messages import Family


@dataclass(frozen=True, slots=True)
class VerdictNotice:
    """An auditor's verdict on whoever is told, an encoded `Signed`."""

    kind: ClassVar[str] = "verdict_notice"
    verdict: Annotated[bytes, Length(1, 1024)]


@dataclass(frozen=True, slots=True)
class EvidenceRequest:
    """Asks whoever signed an accusation for the evidence that it names."""

    kind: ClassVar[str] = "evidence_request"
    evidence: Digest


@dataclass(frozen=True, slots=True)
class EvidenceReply:
    """Encoded `RowEvidence` that was asked for."""

    kind: ClassVar[str] = "evidence_reply"
    evidence: EvidenceBytes


CertificationMessage: TypeAlias = VerdictNotice | EvidenceRequest | EvidenceReply

CERTIFICATION: Final[Family[CertificationMessage]] = Family(
    "certification", get_args(CertificationMessage), EVIDENCE_SIZE_MAX + 1024
)
