"""Contexts that count cells one by one, and a model whose next token is a function of all before it.

What a session emits here is right only if every token of it went into its own sequence, once, in order: so
whatever the core makes of failures, copies and cancellations, the answer alone is the answer together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvasir_proto.ids import SessionId
from kvasir_proto.instants import Instant, seconds
from kvasir_proto.sessions.core import SessionCore
from kvasir_proto.sessions.options import SessionOptions
from kvasir_proto.sessions.requests import (
    AbortDecode,
    Cancel,
    ClearCache,
    CopySequence,
    Decode,
    Decoded,
    DecodeFailed,
    Emit,
    End,
    ForgetSequence,
    Open,
    Refuse,
    Request,
    Sampled,
)

END = 0
N_VOCAB = 97
LATE = Instant(10**18)


def next_token(tokens: Sequence[int]) -> int:
    """What the toy model says after these tokens; `END` now and then."""
    digest = hashlib.blake2s(repr(list(tokens)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % N_VOCAB


def alone(prompt: Sequence[int], n_tokens: int, n_cells: int) -> tuple[list[int], str]:
    """What a session emits that has all to itself, and why it ends."""
    tokens, n_most = list(prompt), min(n_tokens, n_cells - len(prompt) + 1)
    for _ in range(n_most):
        token = next_token(tokens)
        if token == END:
            return tokens[len(prompt) :], "end_of_text"
        tokens.append(token)
    return tokens[len(prompt) :], "length"


class ToyCache:
    """The KV cache of one context: cells with a token each, shared by sequences as llama.cpp shares them."""

    def __init__(self, n_cells: int, n_sequences: int) -> None:
        self.n_cells = n_cells
        self.sequences: list[list[object]] = [[] for _ in range(n_sequences)]

    @property
    def n_used(self) -> int:
        return len({id(cell) for cells in self.sequences for cell in cells})

    def tokens(self, sequence: int) -> list[int]:
        return [cell[0] for cell in self.sequences[sequence]]  # type: ignore[index]

    def apply(self, decode: Decode) -> None:
        for step in decode.steps:
            match step:
                case ClearCache():
                    for cells in self.sequences:
                        cells.clear()
                case ForgetSequence(sequence):
                    self.sequences[sequence].clear()
                case CopySequence(source, target, n_tokens):
                    assert not self.sequences[target], "a copy over somebody's tokens"
                    assert len(self.sequences[source]) >= n_tokens, "a copy of what is not there"
                    self.sequences[target] = self.sequences[source][:n_tokens]
        for place in decode.places:
            assert place.position == len(self.sequences[place.sequence]), "a token out of order"
            self.sequences[place.sequence].append([place.token])
        assert self.n_used <= self.n_cells, "a cell was promised twice"


@dataclass
class Seen:
    """What a client saw of its session."""

    tokens: list[int] = field(default_factory=list)
    end: str = ""
    code: str = ""
    retry_after: int | None = None


class ToyBackbone:
    """A core and its contexts; `step` finishes one ubatch, at a moment the test chooses."""

    def __init__(self, options: SessionOptions) -> None:
        self.options = options
        self.core = SessionCore(options)
        self.caches = [ToyCache(options.n_cells, options.n_sequences) for _ in range(options.n_contexts)]
        self.decoding: dict[int, Decode] = {}
        self.seen: dict[SessionId, Seen] = {}
        self.opened: dict[SessionId, Open] = {}
        self.aborts: list[int] = []
        self.decodes: list[Decode] = []
        self.now = Instant(0)

    def command(self, request: Request) -> None:
        self.core.command(request, self.now)
        self.drain()

    def open(
        self,
        name: int,
        prompt: Sequence[int],
        n_tokens: int,
        *,
        client: str = "someone",
        deadline: Instant = LATE,
        end_tokens: frozenset[int] = frozenset(),
        n_emitted: int = 0,
    ) -> Seen:
        session = SessionId(name.to_bytes(16, "big"))
        opened = Open(session, client, tuple(prompt), n_tokens, end_tokens, deadline, n_emitted)
        self.seen[session], self.opened[session] = Seen(), opened
        self.command(opened)
        return self.seen[session]

    def cancel(self, name: int) -> None:
        self.command(Cancel(SessionId(name.to_bytes(16, "big"))))

    def tick(self, now: int) -> None:
        self.now = Instant(now)
        self.core.tick(self.now)
        self.drain()

    def drain(self) -> None:
        for effect in self.core.drain():
            match effect:
                case Decode():
                    assert effect.context not in self.decoding, "two ubatches of one context at once"
                    assert 1 <= len(effect.places) <= self.options.n_ubatch
                    self.decoding[effect.context] = effect
                    self.decodes.append(effect)
                case AbortDecode(context):
                    assert context in self.decoding
                    self.aborts.append(context)
                case Emit(session, position, token, reason):
                    seen = self.seen[session]
                    assert not seen.end, "a token after the last"
                    assert position == len(self.opened[session].tokens) + len(seen.tokens)
                    if reason != "end_of_text":
                        seen.tokens.append(token)
                    seen.end = reason or ""
                case End() | Refuse():
                    self._close(effect)
        self.check()

    def _close(self, effect: End | Refuse) -> None:
        seen = self.seen[effect.session]
        assert not seen.end, "a session that ends twice"
        if isinstance(effect, Refuse):
            seen.end, seen.code, seen.retry_after = "refused", effect.code, effect.retry_after
            assert not seen.tokens
        else:
            seen.end, seen.code = effect.reason, effect.code

    def check(self) -> None:
        for index in range(self.options.n_contexts):
            cells = self.core.cells(index)
            assert 0 <= cells.n_promised + cells.n_kept <= cells.n_cells
            assert cells.n_running <= self.options.sessions_per_context
        assert self.core.n_waiting <= self.options.waiting_max + self.options.n_contexts

    def step(
        self,
        context: int | None = None,
        *,
        fails: Callable[[Decode], DecodeFailed | None] = lambda _: None,
        n_left: int = 0,
    ) -> Decode:
        """Finish a context's ubatch: the lowest one's unless it is said which.

        Of a failed one ``n_left`` tokens of each sequence are in the cache all the same.
        """
        index = min(self.decoding) if context is None else context
        decode = self.decoding.pop(index)
        cache = self.caches[index]
        before = {each.sequence: each.position for each in reversed(decode.places)}
        cache.apply(decode)
        failure = fails(decode)
        if failure is not None:
            for sequence, n_tokens in before.items():
                del cache.sequences[sequence][n_tokens + n_left :]
            standing = tuple((each, len(cache.sequences[each])) for each in sorted(before))
            failed = DecodeFailed(
                failure.code,
                failure.detail,
                standing,
                failure.unserved,
                failure.is_for_want_of_holders,
                failure.is_aborted,
            )
            self.core.receive(failed, index, self.now)
        else:
            samples = []
            for place in decode.places:
                if place.is_sampled:
                    token = next_token(cache.tokens(place.sequence))
                    samples.append(Sampled(place.session, token, token == END))
            self.core.receive(Decoded(tuple(samples)), index, self.now)
        self.drain()
        return decode

    def run(self, n_steps: int = 100_000) -> None:
        """Finish ubatches, one context after the other, until there is none."""
        for count in range(n_steps):
            if not self.decoding:
                return
            self.step(sorted(self.decoding)[count % len(self.decoding)])
        raise AssertionError("it does not come to an end")


def small(**changes: int) -> SessionOptions:
    """A context of 64 cells with four sessions, ubatches of 16 and 4 tokens of prompts beside decodes."""
    values: dict[str, int] = {
        "n_cells": 64,
        "n_ubatch": 16,
        "sessions_per_context": 4,
        "prefill_chunk": 4,
        "waiting_time_max": seconds(1000),
    }
    return SessionOptions(**(values | changes))  # type: ignore[arg-type]
