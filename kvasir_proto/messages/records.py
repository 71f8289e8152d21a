"""How one member gets records from another, by digest.

Records spread by gossip, which may lose one; whoever hears of a digest it does not know asks a member that
named it. They travel as the bytes that were signed, and are believed for their signature, not their sender.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, TypeAlias, get_args

from kvasir_proto.limits import Digest, Length
from kvasir_proto.messages import Family

RECORDS_A_MESSAGE_MAX: Final = 16

_RecordBytes: TypeAlias = Annotated[bytes, Length(1, 16 << 10)]


@dataclass(frozen=True, slots=True)
class RecordRequest:
    """Asks for the records with these digests."""

    kind: ClassVar[str] = "record_request"
    digests: Annotated[tuple[Digest, ...], Length(1, RECORDS_A_MESSAGE_MAX)]


@dataclass(frozen=True, slots=True)
class RecordReply:
    """Those of them that the sender has, each an encoded `Signed`."""

    kind: ClassVar[str] = "record_reply"
    records: Annotated[tuple[_RecordBytes, ...], Length(0, RECORDS_A_MESSAGE_MAX)]


RecordMessage: TypeAlias = RecordRequest | RecordReply

RECORDS: Final[Family[RecordMessage]] = Family("records", get_args(RecordMessage), 512 << 10)
