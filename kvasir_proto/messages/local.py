"""What the command line and a running daemon say to each other over the control socket.

One request a connection. A `GenerateRequest` is answered with any number of `TokenEvent` and one
`GenerateEnd`; the others with one reply. Reports are JSON documents with a `schema_version` of their own: the
socket does not know their form, so a report can grow without a new protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, TypeAlias, get_args

from kvasir_proto.ids import Epoch, NodeIdField
from kvasir_proto.limits import (
    LOCAL_FRAME_SIZE_MAX,
    ChunkSizes,
    Count,
    Document,
    EndReason,
    FilePath,
    Length,
    Milliseconds,
    Nanoseconds,
    OptionalWord,
    Piece,
    Position,
    PositionCount,
    Prompt,
    Rank,
    Sentence,
    SignedBytes,
    Token,
    Tokens,
    Word,
)
from kvasir_proto.messages import Family
from kvasir_proto.messages.election import LinkBytes
from kvasir_proto.sampling import Sampling

USAGE_ERROR: Final = "usage_error"
"""The code of what failed because the client asked for something impossible: no fault of the daemon's."""


@dataclass(frozen=True, slots=True)
class StatusRequest:
    """Asks what the daemon, its engines and its swarm are doing."""

    kind: ClassVar[str] = "status_request"


@dataclass(frozen=True, slots=True)
class StatusReply:
    """The answer to `StatusRequest`."""

    kind: ClassVar[str] = "status_reply"
    document: Document


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Asks for text. `prompt` is text, or None and `token_ids` is the prompt."""

    kind: ClassVar[str] = "generate_request"
    prompt: Prompt | None
    token_ids: Tokens
    n_tokens: PositionCount
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token was generated, at this position of the session."""

    kind: ClassVar[str] = "token_event"
    position: Position
    token: Token
    piece: Piece


@dataclass(frozen=True, slots=True)
class GenerateEnd:
    """Nothing more will come. `code` is empty unless `reason` is `failed`; `statistics` is JSON."""

    kind: ClassVar[str] = "generate_end"
    reason: EndReason
    code: OptionalWord
    detail: Sentence
    statistics: Document


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """Asks for the live swarm's logits: these tokens in batches of these sizes, written to a file as .npy.

    With `traces_path`, what the backbone sees inside meanwhile goes to that file, as .npz. With `n_ubatch`,
    so many positions are computed at once, and not as many as in sessions.
    """

    kind: ClassVar[str] = "evaluate_request"
    token_ids: Tokens
    chunk_sizes: ChunkSizes
    output_path: FilePath
    traces_path: FilePath | None = None
    n_ubatch: PositionCount | None = None


@dataclass(frozen=True, slots=True)
class EvaluateReply:
    """The answer to `EvaluateRequest`, once the file is written."""

    kind: ClassVar[str] = "evaluate_reply"
    positions: Count
    hook_calls: Count
    rows_retried: Count


@dataclass(frozen=True, slots=True)
class PingRequest:
    """Asks how long one round trip to this member takes, on a control stream; at most so long is waited."""

    kind: ClassVar[str] = "ping_request"
    node_id: NodeIdField
    timeout_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class PingReply:
    """The answer to `PingRequest`: the round trip, the opening of the stream left out."""

    kind: ClassVar[str] = "ping_reply"
    round_trip_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class InviteRequest:
    """Asks for an invite that admits one node, to fill these ranks, for so long from now."""

    kind: ClassVar[str] = "invite_request"
    ranks: Annotated[tuple[Rank, ...], Length(1, 3)]
    lifetime_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class InviteReply:
    """The answer to `InviteRequest`: the invite as text to be handed on (`admission.format_invite`)."""

    kind: ClassVar[str] = "invite_reply"
    invite: Annotated[str, Length(1, 16 << 10)]


@dataclass(frozen=True, slots=True)
class RecoveryRequest:
    """Asks to begin a new epoch: to take in a link that the recovery key signed, and to spread it."""

    kind: ClassVar[str] = "recovery_request"
    link: LinkBytes


@dataclass(frozen=True, slots=True)
class RecoveryReply:
    """The answer to `RecoveryRequest`, once it is on disk: the epoch that has begun."""

    kind: ClassVar[str] = "recovery_reply"
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class RevocationRequest:
    """Asks to take in a revocation that the founder's key signed, and to spread it."""

    kind: ClassVar[str] = "revocation_request"
    revocation: SignedBytes


@dataclass(frozen=True, slots=True)
class RevocationReply:
    """The answer to `RevocationRequest`, once it is on disk."""

    kind: ClassVar[str] = "revocation_reply"


@dataclass(frozen=True, slots=True)
class StopRequest:
    """Asks the daemon to stop in good order."""

    kind: ClassVar[str] = "stop_request"


@dataclass(frozen=True, slots=True)
class StopReply:
    """The daemon has begun to stop; it has stopped when the connection closes."""

    kind: ClassVar[str] = "stop_reply"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request was not acceptable, or cannot be done: a code for programs, a sentence for people."""

    kind: ClassVar[str] = "refusal"
    code: Word
    reason: Sentence


LocalMessage: TypeAlias = (
    StatusRequest
    | StatusReply
    | GenerateRequest
    | TokenEvent
    | GenerateEnd
    | EvaluateRequest
    | EvaluateReply
    | PingRequest
    | PingReply
    | InviteRequest
    | InviteReply
    | RecoveryRequest
    | RecoveryReply
    | RevocationRequest
    | RevocationReply
    | StopRequest
    | StopReply
    | Refusal
)

LOCAL: Final[Family[LocalMessage]] = Family("local", get_args(LocalMessage), LOCAL_FRAME_SIZE_MAX)
