"""Bytes of experts from one member to another, on streams of their own.

`ExpertRequest` asks for a range of one tensor's experts from a byte on; `ExpertPiece`s answer it in order,
`Refusal` where it is not given. An answer ends by its own word, before the range does where the giver wants:
what is in flight is bounded by that, and the asker goes on at the byte. Whoever takes the bytes compares them
with the manifest's digests: no message here says what they are, and none names a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, TypeAlias, get_args

from kvasir_proto.ids import ModelDigestField
from kvasir_proto.limits import (
    EXPERT_PIECE_SIZE_MAX,
    EXPERTS_MAX,
    Count,
    ExpertIndex,
    Length,
    Range,
)
from kvasir_proto.messages import Family
from kvasir_proto.messages.swarm import Refusal


@dataclass(frozen=True, slots=True)
class ExpertRequest:
    """Asks for the bytes of experts `first` to `end` of one tensor, `end` not among them, one after another.

    `offset` counts from the first byte of `first`: what is before it is here already.
    """

    kind: ClassVar[str] = "expert_request"
    model_digest: ModelDigestField
    tensor: Annotated[str, Length(1, 63)]
    first: ExpertIndex
    end: Annotated[int, Range(1, EXPERTS_MAX)]
    offset: Count


@dataclass(frozen=True, slots=True)
class ExpertPiece:
    """The next bytes of what was asked for last. After the one that `is_last` nothing comes unasked."""

    kind: ClassVar[str] = "expert_piece"
    data: Annotated[bytes, Length(1, EXPERT_PIECE_SIZE_MAX)]
    is_last: bool


ExpertMessage: TypeAlias = ExpertRequest | ExpertPiece | Refusal

EXPERT_EXCHANGE: Final[Family[ExpertMessage]] = Family(
    "experts", get_args(ExpertMessage), EXPERT_PIECE_SIZE_MAX + 4096
)
