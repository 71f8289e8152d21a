"""How an auditor tells a node what it found, so that the node can show it to everybody.

A verdict that verifies goes to the node alone, which carries it in its record; one that does not is gossiped,
since nobody would show it of himself. It is believed for its signature, not its sender.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, TypeAlias

from kvasir_proto.limits import Length
from kvasir_proto.messages import Family


@dataclass(frozen=True, slots=True)
class VerdictNotice:
    """An auditor's verdict on whoever is told, an encoded `Signed`."""

    kind: ClassVar[str] = "verdict_notice"
    verdict: Annotated[bytes, Length(1, 1024)]


CertificationMessage: TypeAlias = VerdictNotice

CERTIFICATION: Final[Family[CertificationMessage]] = Family("certification", (VerdictNotice,), 2048)
