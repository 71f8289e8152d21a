"""What the core of sessions is told, and what it has done.

Apart from the core because the shell that carries it out, and tests that play it, share these words. Every
`Decode` is answered by one `Decoded` or `DecodeFailed` of its context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvasir_proto.ids import SessionId
from kvasir_proto.instants import Duration, Instant
from kvasir_proto.limits import EndReason

# --- what clients want --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """A session is wanted: up to ``n_tokens`` more after ``tokens``, and none after one of ``end_tokens``.

    ``tokens`` are the prompt, and behind it ``n_emitted`` that were emitted already, elsewhere, where a
    session is gone on with. ``client`` names whose turn it is: clients share alike, however many sessions
    each has.
    """

    session: SessionId
    client: str
    tokens: tuple[int, ...]
    n_tokens: int
    end_tokens: frozenset[int]
    deadline: Instant
    n_emitted: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants this session any more; unknown ones are ignored."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class EndAll:
    """Nothing may be generated any more: all sessions end as failed, for this reason."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class HoldersChanged:
    """Every expert has a holder again: who was set aside is tried again."""


Request: TypeAlias = Open | Cancel | EndAll | HoldersChanged

# --- what contexts say --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token that a session's last place gave, and whether the model ends its text with it."""

    session: SessionId
    token: int
    is_end: bool = False


@dataclass(frozen=True, slots=True)
class Unsampled:
    """A session's logits gave no token: it alone fails."""

    session: SessionId
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """A context's ubatch went through; one of `samples` for each place that `is_sampled`."""

    samples: tuple[Sampled | Unsampled, ...]


@dataclass(frozen=True, slots=True)
class DecodeFailed:
    """A context's ubatch did not go through.

    ``standing`` says for each of its sequences how many tokens are left in the cache. ``unserved`` are the
    sessions for whose tokens an expert had no holder; empty where that is not the reason, or nobody can say.
    ``is_for_want_of_holders`` tells these apart. ``is_aborted``: the core wanted it to stop.
    """

    code: str
    detail: str
    standing: tuple[tuple[int, int], ...]
    unserved: frozenset[SessionId] = frozenset()
    is_for_want_of_holders: bool = False
    is_aborted: bool = False


ContextEvent: TypeAlias = Decoded | DecodeFailed

# --- what is to be done -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClearCache:
    """Forget every sequence of the context, as if it were new."""


@dataclass(frozen=True, slots=True)
class ForgetSequence:
    """Give this sequence's cells back."""

    sequence: int


@dataclass(frozen=True, slots=True)
class CopySequence:
    """Let an empty sequence begin with the first ``n_tokens`` of another one; their cells are shared."""

    source: int
    target: int
    n_tokens: int


CacheStep: TypeAlias = ClearCache | ForgetSequence | CopySequence


@dataclass(frozen=True, slots=True)
class Place:
    """One token of a ubatch. Where it ``is_sampled`` the session's next token is drawn from its logits."""

    session: SessionId
    sequence: int
    position: int
    token: int
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """Have this context change its cache in this order, then decode these places as one ubatch."""

    context: int
    steps: tuple[CacheStep, ...]
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class AbortDecode:
    """Nobody wants what this context decodes just now: let it fail as soon as it can."""

    context: int


@dataclass(frozen=True, slots=True)
class Emit:
    """A session has its next token, at this position; with a ``reason`` it is its last.

    The token that ends a text comes with `end_of_text`, and is no part of it.
    """

    session: SessionId
    position: int
    token: int
    reason: Literal["length", "end_of_text"] | None


@dataclass(frozen=True, slots=True)
class End:
    """A session is over without a last token."""

    session: SessionId
    reason: EndReason
    code: str
    detail: str


RefusalCode: TypeAlias = Literal[
    "empty_prompt", "prompt_too_long", "queue_full", "client_queue_full", "waited_too_long"
]


@dataclass(frozen=True, slots=True)
class Refuse:
    """A session is not begun. Where ``retry_after`` is None, trying again helps nobody."""

    session: SessionId
    code: RefusalCode
    detail: str
    retry_after: Duration | None


Effect: TypeAlias = Decode | AbortDecode | Emit | End | Refuse
