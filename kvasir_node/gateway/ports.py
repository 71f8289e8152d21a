"""What the gateway may expect of the swarm: sessions of tokens, the model's tokenizer, and how things stand.

Apart from `kvasir_node.ports` because no duty needs it. Text stops here: behind these ports are token ids.
Who implements them knows where the backbone is, and keeps a session going when that dies; the gateway is
only made to wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from kvasir_proto.errors import KvasirError
from kvasir_proto.sampling import SamplingOptions

FinishReason: TypeAlias = Literal["stop", "length"]
RefusalKind: TypeAlias = Literal["busy", "not_ready", "too_long"]
"""Too much to do already; nobody there who could do it; more positions than a session can have."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One session that is wanted.

    ``token_ids`` is the prompt, at least one. At most ``n_tokens_max`` tokens are generated; one of
    ``stop_token_ids`` ends the session as well. With each token come the ``n_top`` likeliest and their
    log-probabilities, in the low-level distribution, before any filter. ``client`` names whose turn it is.
    """

    client: str
    token_ids: tuple[int, ...]
    sampling: SamplingOptions
    n_tokens_max: int
    stop_token_ids: tuple[int, ...]
    n_top: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """The next token of a session, and its natural log-probability before any filter.

    ``top`` has `TokenRequest.n_top` pairs of token and log-probability, likeliest first. ``finish`` is None
    but with the last token: ``stop`` with one that ends the text and is no part of it, ``length`` with one
    that is text and had to be the last.
    """

    token_id: int
    log_probability: float
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None


class CompletionRefused(KvasirError):
    """No session is made of a request. After ``retry_after_s`` another attempt has a chance."""

    def __init__(self, reason: str, kind: RefusalKind, retry_after_s: float = 1.0) -> None:
        super().__init__(reason)
        self.kind = kind
        self.retry_after_s = retry_after_s


class Completions(Protocol):
    """Sessions of the swarm's model."""

    def open(self, request: TokenRequest) -> AbstractAsyncContextManager[AsyncIterator[GeneratedToken]]:
        """A session, for as long as its context is entered; leaving that cancels it, within a second.

        Entering takes a bounded time: the session has its place then, maybe in a queue, or
        `CompletionRefused` is raised. The iterator gives tokens in order, each once and never revised, and
        ends after the one with a ``finish``. It raises `KvasirError` when the session cannot go on, and
        `CompletionRefused` when it never began; every wait inside it is bounded. Errors come as themselves,
        in no group.
        """


class Tokenizer(Protocol):
    """The model's vocabulary."""

    async def tokens_of(self, text: str, *, is_template: bool) -> tuple[int, ...]:
        """The tokens of a text.

        Of what a chat template made, control tokens that are written out are taken as such and nothing is
        put before it; any other text is only text, and begins with what the model's texts begin with. Raises
        `KvasirError`, in bounded time.
        """

    def bytes_of(self, token_id: int) -> bytes:
        """What a token stands for, alone not always UTF-8; empty for control tokens and unknown ones."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the swarm runs. ``created`` is in seconds of Unix time, of its manifest."""

    name: str
    digest: str
    created: int
    context_tokens: int
    vocabulary_size: int
    stop_token_ids: tuple[int, ...]
    chat_template: str | None
    first_text: str
    """What its texts begin with, and `last_text` what they end with, as a template writes them."""
    last_text: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """Whose tokens these are: swarm (its digest, hexadecimal), reign, and what is known of certificates."""

    swarm: str
    epoch: int
    term: int
    certificates: str


@dataclass(frozen=True, slots=True)
class Standing:
    """How things stand. ``obstacle`` says in a sentence why nothing can be served; empty when it can."""

    model: ServedModel | None
    provenance: Provenance | None
    obstacle: str = ""

    @property
    def why_not_ready(self) -> str:
        """Why requests are refused, as clients hear it; empty when they are not."""
        if self.model is None:
            return self.obstacle or "this node does not know its swarm's model yet"
        return self.obstacle


class Swarm(Protocol):
    """What this node knows of its swarm."""

    def standing(self) -> Standing:
        """How things stand now; never waits."""

    def status(self) -> Mapping[str, Any]:
        """What `kvasir-node status --json` says, as of now; never waits.

        Every field is there in every state. What only an engine could say may be null.
        """
