"""How many sessions run at once and wait, and how the places of a ubatch are shared out.

Apart from the core so that each knob has its reason beside it. What is measured (the memory that a cell of
the KV cache takes) is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.instants import Duration, seconds
from kvasir_proto.limits import CONTEXT_LENGTH_MAX, SESSIONS_TOGETHER_MAX

CONTEXTS_MAX: Final = 16
SEQUENCES_MAX: Final = SESSIONS_TOGETHER_MAX
"""Sessions of one context, and kept prefixes; llama.cpp knows 256 sequences."""
WAITING_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Every knob. Raises `LocalProtocolError` for values that make no sense together."""

    n_contexts: int = 1
    """Contexts, each driven by a thread of its own: what they wait for on the wire overlaps."""

    n_cells: int
    """Cells of each context's KV cache: tokens that its sessions have together."""

    n_ubatch: int
    """Tokens that go through the layers together."""

    sessions_per_context: int = 8
    """Sessions that decode together. More of them hide more of a slow link and make each reply larger. With
    one, whoever goes on with a session computes what was emitted token by token, as it was the first time:
    identical, and as slow as that was."""

    prefill_chunk: int = 64
    """Tokens of prompts beside decoding sessions: a larger chunk ends a prompt sooner and lets everybody else
    wait longer for the next token."""

    kept_prefixes: int = 0
    """Sequences of ended sessions that a context keeps for a next one that begins alike. With none, a session
    that runs alone is computed in the same shapes whatever ran before it; with some, only equivalently."""

    reused_tokens_min: int = 32
    """A shorter common beginning is computed anew."""

    waiting_max: int = 64
    """Sessions that wait for a sequence; one more is refused."""

    waiting_per_client_max: int = 32
    """Sessions of one client that wait."""

    waiting_tokens_max: int = 4 * CONTEXT_LENGTH_MAX
    """Tokens of all prompts that wait: what they take in memory."""

    waiting_time_max: Duration = seconds(300)  # noqa: RUF009 - an integer
    """Whoever has waited so long is told to come again later."""

    coverage_patience: Duration = seconds(10)  # noqa: RUF009 - an integer
    """How long a session that needs an expert without a holder is set aside before it fails."""

    tries_max: int = 4
    """How often a session may be in a ubatch that fails because of it before it gets a token."""

    def __post_init__(self) -> None:
        bounds = (
            ("n_contexts", self.n_contexts, 1, CONTEXTS_MAX),
            ("n_cells", self.n_cells, 2, CONTEXT_LENGTH_MAX * SEQUENCES_MAX),
            ("sessions_per_context", self.sessions_per_context, 1, SEQUENCES_MAX),
            # Who decodes always has a place, and one is left for a prompt.
            ("n_ubatch", self.n_ubatch, self.sessions_per_context, CONTEXT_LENGTH_MAX),
            ("prefill_chunk", self.prefill_chunk, 1, CONTEXT_LENGTH_MAX),
            ("kept_prefixes", self.kept_prefixes, 0, SEQUENCES_MAX),
            ("reused_tokens_min", self.reused_tokens_min, 1, CONTEXT_LENGTH_MAX),
            ("waiting_max", self.waiting_max, 0, WAITING_MAX),
            ("waiting_per_client_max", self.waiting_per_client_max, 0, WAITING_MAX),
            ("waiting_tokens_max", self.waiting_tokens_max, 0, WAITING_MAX * CONTEXT_LENGTH_MAX),
            ("waiting_time_max", self.waiting_time_max, 0, seconds(24 * 3600)),
            ("coverage_patience", self.coverage_patience, 0, seconds(24 * 3600)),
            ("tries_max", self.tries_max, 1, 64),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:
                raise LocalProtocolError(f"{name} is {value}, and has to be from {low} to {high}")

    @property
    def n_sequences(self) -> int:
        """Sequences that each context needs."""
        return self.sessions_per_context + self.kept_prefixes


def cells_within(memory_bytes: int, cell_bytes: int, n_contexts: int, wanted: int) -> int:
    """Cells for each context, at most ``wanted``, so that all of them fit the memory; may be 0.

    ``cell_bytes`` is what one token takes in the KV cache, over all layers.
    """
    return max(0, min(wanted, memory_bytes // max(1, cell_bytes * n_contexts)))
