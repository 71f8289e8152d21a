"""How a node that was invited gets its credential, a member a newer one, and anybody what was revoked.

What is signed travels as the bytes that were signed. No secret is ever said: `Redeem` carries a signature
that only its holder could make, over the one node it is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, TypeAlias, get_args

from kvasir_proto.limits import Digest, Length, Sentence, Word
from kvasir_proto.messages import Family

REVOCATIONS_A_MESSAGE_MAX: Final = 1024

_Small: TypeAlias = Annotated[bytes, Length(1, 2048)]
_Revocations: TypeAlias = Annotated[tuple[_Small, ...], Length(0, REVOCATIONS_A_MESSAGE_MAX)]


@dataclass(frozen=True, slots=True)
class Redeem:
    """Asks the elector that issued an invite for a credential; the invite's key signed `redemption`."""

    kind: ClassVar[str] = "redeem"
    redemption: _Small


@dataclass(frozen=True, slots=True)
class Renew:
    """Asks an elector for a credential in the place of this one, which it or another elector signed."""

    kind: ClassVar[str] = "renew"
    credential: _Small


@dataclass(frozen=True, slots=True)
class Admitted:
    """The answer to both: a credential, and all that was ever revoked."""

    kind: ClassVar[str] = "admitted"
    credential: _Small
    revocations: _Revocations


@dataclass(frozen=True, slots=True)
class NotAdmitted:
    """The other answer to both: a code for programs, a sentence for people."""

    kind: ClassVar[str] = "not_admitted"
    code: Word
    reason: Sentence


@dataclass(frozen=True, slots=True)
class RevocationsRequest:
    """Asks for all that was ever revoked. `known` is the digest of what the asker knows of it."""

    kind: ClassVar[str] = "revocations_request"
    known: Digest


@dataclass(frozen=True, slots=True)
class Revocations:
    """All that the sender knows to be revoked, each signed by the founder's key; none to who knows the same.

    `known` is the digest of it. Sent in answer, and once to who answered and knows less.
    """

    kind: ClassVar[str] = "revocations"
    known: Digest
    revocations: _Revocations


AdmissionMessage: TypeAlias = Redeem | Renew | Admitted | NotAdmitted | RevocationsRequest | Revocations

ADMISSION: Final[Family[AdmissionMessage]] = Family("admission", get_args(AdmissionMessage), 1 << 20)
