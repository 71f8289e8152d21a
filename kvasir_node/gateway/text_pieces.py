"""From tokens' bytes to text that may be sent: whole characters, and nothing of a stop string.

Text that could still become a stop string waits, and so does what belongs to it (its log-probabilities would
tell it too). Of several stop strings the one that is complete first counts, and of those that are complete
at the same character the longest. Pure: the same bytes make the same text, however they are cut.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

TagT = TypeVar("TagT")


class TextPiece(NamedTuple, Generic[TagT]):
    """Text to send, and the tags of the tokens that are part of what was sent by now."""

    text: str
    tags: tuple[TagT, ...]


class TextPieces(Generic[TagT]):
    """One answer's text. Every token comes with a tag, which leaves with the last of the token's text.

    Bytes that are no UTF-8 become U+FFFD each as Python's decoder has it; those of a character that never
    comes to its end are dropped.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        assert all(stop_strings)
        self._stop_strings = tuple(sorted(set(stop_strings)))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._n_sent = 0  # characters
        self._waiting: deque[tuple[int, TagT]] = deque()
        """How many characters must be sent for a token to be, in the order of tokens."""
        self.is_stopped = False
        """Whether a stop string came. What follows is no part of the text."""

    def add(self, piece: bytes, tag: TagT) -> TextPiece[TagT]:
        """One more token. Not to be called once `is_stopped`."""
        assert not self.is_stopped
        self._held += self._decoder.decode(piece)
        n_decoded = self._n_sent + len(self._held)
        # A character that is still incomplete is part of the token too.
        n_needed = n_decoded + (1 if self._decoder.getstate()[0] else 0)
        self._waiting.append((n_needed, tag))
        found = [(at + len(each), at) for each in self._stop_strings if (at := self._held.find(each)) >= 0]
        if found:
            self.is_stopped = True
            return self._send(min(found)[1])
        return self._send(len(self._held) - self._n_in_doubt())

    def end(self) -> TextPiece[TagT]:
        """What was held back, now that there is no next token; nothing after a stop string."""
        if self.is_stopped:
            return TextPiece("", ())
        text, self._held = self._held, ""
        tags = tuple(tag for _, tag in self._waiting)
        self._waiting.clear()
        return TextPiece(text, tags)

    def _n_in_doubt(self) -> int:
        """Characters at the end of what is held that a stop string may begin with."""
        longest = max((len(each) for each in self._stop_strings), default=1) - 1
        for count in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-count:]
            if any(each.startswith(tail) for each in self._stop_strings):
                return count
        return 0

    def _send(self, count: int) -> TextPiece[TagT]:
        text, self._held = self._held[:count], self._held[count:]
        self._n_sent += count
        tags = []
        while self._waiting and self._waiting[0][0] <= self._n_sent:
            tags.append(self._waiting.popleft()[1])
        return TextPiece(text, tuple(tags))
