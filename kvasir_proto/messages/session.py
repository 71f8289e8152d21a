"""What a gateway's node and the backbone say about one session, on a stream that has no other.

The gateway asks with `OpenSession`, for a new session and for one that is gone on with alike, and then says
no more than that it is still there; that it wants no more of the session it says by ending the stream. The
backbone answers with a refusal or a place, then with tokens in their order. Both say `StillHere` where they
have nothing else to say, so that a connection with nobody at its other end is found out. Who may ask is
decided by who the node at the other end is, which the transport has proved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal, TypeAlias, get_args

from kvasir_proto.ids import Epoch, Term
from kvasir_proto.limits import (
    CONTEXT_LENGTH_MAX,
    SWARM_FRAME_SIZE_MAX,
    EndTokens,
    Length,
    LogProbability,
    Milliseconds,
    Nanoseconds,
    Position,
    PositionCount,
    Sentence,
    Token,
    TokenCount,
    TopTokenCount,
    TopTokens,
    Word,
)
from kvasir_proto.messages import Family
from kvasir_proto.sampling import SamplingOptions

SessionRefusal: TypeAlias = Literal["busy", "not_ready", "too_long"]
"""Too much to do already; no backbone of that term, or none for this node; no such session can be."""

TERM_OVER: Final = "term_over"
"""The code of a session that ended with its backbone's lease: another backbone, or the next term, goes on."""


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Asks the backbone of this (epoch, term) for up to `n_tokens` more tokens.

    `token_ids` are the prompt, and behind it the `n_emitted` tokens that were emitted already, by whichever
    backbone: they are never drawn again, and penalties count them. `client` is whose turn it takes among
    those of the same node. With each token come the `n_top` likeliest and their log-probabilities.
    """

    kind: ClassVar[str] = "open_session"
    epoch: Epoch
    term: Term
    client: Word
    token_ids: Annotated[tuple[Token, ...], Length(1, CONTEXT_LENGTH_MAX)]
    n_emitted: TokenCount
    sampling: SamplingOptions
    n_tokens: PositionCount
    end_tokens: EndTokens
    n_top: TopTokenCount
    deadline_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class SessionPlaced:
    """The session has its place, maybe in a queue. It may come behind the first token, or not at all."""

    kind: ClassVar[str] = "session_placed"


@dataclass(frozen=True, slots=True)
class SessionRefused:
    """The session is not begun. After `retry_after_ns` another attempt has a chance."""

    kind: ClassVar[str] = "session_refused"
    refusal: SessionRefusal
    reason: Sentence
    retry_after_ns: Nanoseconds


@dataclass(frozen=True, slots=True)
class SessionToken:
    """The session's next token, and the (epoch, term) under whose lease it was sampled.

    With a `finish` it is the last: `stop` with one that ends the text and is no part of it, `length` with one
    that is text and had to be the last.
    """

    kind: ClassVar[str] = "session_token"
    position: Position
    epoch: Epoch
    term: Term
    token: Token
    log_probability: LogProbability
    top: TopTokens
    finish: Literal["stop", "length"] | None


@dataclass(frozen=True, slots=True)
class SessionBroken:
    """The session has ended without a last token. Where it `is_final` nobody can go on with it."""

    kind: ClassVar[str] = "session_broken"
    code: Word
    reason: Sentence
    is_final: bool


@dataclass(frozen=True, slots=True)
class StillHere:
    """Nothing has happened, and whoever says this is there."""

    kind: ClassVar[str] = "still_here"


SessionMessage: TypeAlias = (
    OpenSession | SessionPlaced | SessionRefused | SessionToken | SessionBroken | StillHere
)

SESSION: Final[Family[SessionMessage]] = Family("session", get_args(SessionMessage), SWARM_FRAME_SIZE_MAX)
