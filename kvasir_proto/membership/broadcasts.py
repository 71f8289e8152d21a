"""Which claims ride on the next message: those sent least, of these the newest, and none too often.

A claim is known here by the key of the member it is about: news of a member replaces older news, and what is
sent is what is believed when it is sent. Everything costs a few dictionary operations, whatever waits.
"""

from __future__ import annotations

from typing import Final

FRESH: Final = 3
"""Claims sent less often than this are worth a message of their own."""


class Broadcasts:
    """Keys of members, by how often their claim was sent."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._levels: list[dict[bytes, None]] = []
        self._level_of: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def add(self, key: bytes, sent: int = 0) -> None:
        """There is news of this member; counted as if it had been sent `sent` times already.

        What is not fresh in itself does not make older news that waits any less fresh.
        """
        level = self._level_of.pop(key, None)
        if level is not None:
            del self._levels[level][key]
            sent = min(sent, level)
        elif len(self._level_of) >= self._size_max:
            self._drop_one()
        self._put(key, sent)

    def discard(self, key: bytes) -> None:
        """Nothing more is to be said of this member."""
        level = self._level_of.pop(key, None)
        if level is not None:
            del self._levels[level][key]

    def has_fresh(self) -> bool:
        """Whether a claim waits that has hardly been sent."""
        return any(self._levels[:FRESH])

    def is_fresh(self, key: bytes) -> bool:
        """Whether this claim waits, and has hardly been sent."""
        return self._level_of.get(key, FRESH) < FRESH

    def take(self, count: int, repeats_max: int) -> list[bytes]:
        """Up to `count` keys for one message; each is dropped once it was taken `repeats_max` times."""
        taken: list[bytes] = []
        risen: list[tuple[int, list[bytes]]] = []
        for level, waiting in enumerate(self._levels):
            wanted = min(count - len(taken), len(waiting))
            if wanted:
                keys = [waiting.popitem()[0] for _ in range(wanted)]
                taken += keys
                risen.append((level + 1, keys))
        for level, keys in risen:
            if level >= repeats_max:
                for key in keys:
                    del self._level_of[key]
                continue
            while len(self._levels) <= level:
                self._levels.append({})
            keys.reverse()
            self._levels[level].update(dict.fromkeys(keys))
            self._level_of.update(dict.fromkeys(keys, level))
        return taken

    def _put(self, key: bytes, level: int) -> None:
        while len(self._levels) <= level:
            self._levels.append({})
        self._levels[level][key] = None
        self._level_of[key] = level

    def _drop_one(self) -> None:
        for waiting in reversed(self._levels):
            if waiting:
                key = next(iter(waiting))
                del waiting[key]
                del self._level_of[key]
                return
