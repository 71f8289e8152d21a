"""One context's KV cache: which cells are promised to whom, and which ended sessions' are kept.

A session is promised every cell it can ever need before it begins, so that none fails in its middle for want
of one. What a kept prefix has in common with the sessions that began with it is counted for each of them:
that promises too little at times, and never a cell twice. Tokens are compared here and nowhere else. What a
ubatch is, is not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvasir_proto.sessions.requests import CacheStep, ClearCache, CopySequence, ForgetSequence


@dataclass(frozen=True, slots=True)
class Promise:
    """A sequence for a session, with so many tokens in it already once `steps` are done."""

    sequence: int
    n_reused: int
    steps: tuple[CacheStep, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A sequence whose beginning may be shared, the tokens in it, and whose they are."""

    sequence: int
    client: str
    tokens: Sequence[int]


class KvCells:
    """The cells of one context. At no time are more promised or kept than there are."""

    def __init__(self, n_cells: int, n_sequences: int, kept_max: int, reused_tokens_min: int) -> None:
        self.n_cells = n_cells
        self._kept_max = kept_max
        self._reused_tokens_min = reused_tokens_min
        self._free = list(range(n_sequences - 1, -1, -1))
        self._promised: dict[int, int] = {}
        self._kept: list[Source] = []
        """The least lately used first."""
        self._n_promised = 0
        self._n_kept = 0

    @property
    def n_promised(self) -> int:
        """Cells that running sessions can count on."""
        return self._n_promised

    @property
    def n_kept(self) -> int:
        """Cells of ended sessions, which go when somebody needs them."""
        return self._n_kept

    @property
    def n_running(self) -> int:
        """Sequences that sessions have."""
        return len(self._promised)

    def has_room_for(self, n_cells: int) -> bool:
        """Whether so many more can be promised, whatever is kept."""
        return self._n_promised + n_cells <= self.n_cells

    def promise(
        self, n_cells: int, client: str, tokens: Sequence[int], running: Iterable[Source] = ()
    ) -> Promise:
        """Set cells and a sequence aside for a session; `has_room_for` them and a sequence must be there.

        What the beginning of ``tokens`` has in common with a kept or running sequence of the same client is
        shared, but never all of it: a token has to be decoded to say what follows.
        """
        steps: list[CacheStep] = []
        if not self._promised and not self._kept:
            # Where cells lie decides in which order attention adds: alone, a session begins as in a new one.
            steps.append(ClearCache())
        source, n_reused = self._best_source(client, tokens, running)
        sequence = self._free.pop()
        if source is not None:
            steps.append(CopySequence(source.sequence, sequence, n_reused))
            if source in self._kept:
                self._kept.remove(source)
                self._kept.append(source)
        while self._n_promised + self._n_kept + n_cells > self.n_cells:
            steps += self._drop(self._kept[0])
        self._promised[sequence] = n_cells
        self._n_promised += n_cells
        return Promise(sequence, n_reused, tuple(steps))

    def release(self, sequence: int, client: str = "", tokens: Sequence[int] = ()) -> tuple[CacheStep, ...]:
        """A session has ended; its ``tokens`` in the cache are kept where there is a place for them."""
        self._n_promised -= self._promised.pop(sequence)
        steps: list[CacheStep] = []
        if self._kept_max and len(tokens) >= self._reused_tokens_min:
            kept = Source(sequence, client, tuple(tokens))
            for other in [each for each in self._kept if _is_beginning(each, kept)]:
                steps += self._drop(other)
            while len(self._kept) >= self._kept_max:
                steps += self._drop(self._kept[0])
            self._kept.append(kept)
            self._n_kept += len(kept.tokens)
        else:
            self._free.append(sequence)
            steps.append(ForgetSequence(sequence))
        return tuple(steps)

    def _best_source(
        self, client: str, tokens: Sequence[int], running: Iterable[Source]
    ) -> tuple[Source | None, int]:
        best, n_best = None, 0
        if self._kept_max:
            for source in [*self._kept, *running]:
                n_common = common_length(source.tokens, tokens) if source.client == client else 0
                if n_common > n_best:
                    best, n_best = source, n_common
        n_reused = min(n_best, len(tokens) - 1)
        return (best, n_reused) if n_reused >= self._reused_tokens_min else (None, 0)

    def _drop(self, kept: Source) -> list[CacheStep]:
        self._kept.remove(kept)
        self._n_kept -= len(kept.tokens)
        self._free.append(kept.sequence)
        return [ForgetSequence(kept.sequence)]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if list(one[low:middle]) == list(other[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low


def _is_beginning(one: Source, whole: Source) -> bool:
    return one.client == whole.client and common_length(one.tokens, whole.tokens) == len(one.tokens)
