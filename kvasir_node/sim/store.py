"""What a simulated node keeps through a crash: the slots whose modelled fsync was done.

A write is durable when its time has come, not before. A crash loses the writes that were under way; of
several, the first few may have reached the disk, as on a real one. A write is whole or not there, as
`durable_file` promises. It knows no core and does not read what it keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import NamedTuple

from kvasir_proto.effects import Slot


class _Write(NamedTuple):
    done_at: int
    slot: Slot
    data: bytes


class NodeStore:
    """The slots of one node. Times are real time in nanoseconds."""

    __slots__ = ("_durable", "_pending", "writes", "writes_lost")

    def __init__(self) -> None:
        self._durable: dict[Slot, bytes] = {}
        self._pending: list[_Write] = []
        self.writes = 0
        self.writes_lost = 0

    def write(self, slot: Slot, data: bytes, done_at: int) -> None:
        """Begin to write; durable from `done_at`, which never lies before an earlier write's."""
        assert not self._pending or done_at >= self._pending[-1].done_at, "writes are done in order"
        self._pending.append(_Write(done_at, slot, data))
        self.writes += 1

    def complete(self, real: int) -> None:
        """What was due is durable now."""
        count = 0
        for write in self._pending:
            if write.done_at > real:
                break
            self._durable[write.slot] = write.data
            count += 1
        del self._pending[:count]

    def crash(self, real: int, randomness: Random) -> None:
        """Lose what was not durable, but for a few of the first writes, drawn."""
        self.complete(real)
        reached = randomness.randint(0, len(self._pending))
        for write in self._pending[:reached]:
            self._durable[write.slot] = write.data
        self.writes_lost += len(self._pending) - reached
        self._pending.clear()

    @property
    def pending_count(self) -> int:
        """Writes that a crash now could lose."""
        return len(self._pending)

    def stored(self) -> Mapping[Slot, bytes]:
        """What a node finds when it starts."""
        return dict(self._durable)
