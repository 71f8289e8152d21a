"""Experts on the disk before an engine is told to load them, and how far that is.

Decides that a fetch ends when nobody wants its shard any more, and what `status` says of one that goes on.
What is fetched from where, and which experts may go meanwhile, is the keeper's part (`ports.ExpertKeeper`);
when a shard is wanted, the duties decide.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import trio

from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import ExpertKeeper
from kvasir_proto.instants import Instant, between, in_seconds
from kvasir_proto.manifest import ShardSet


@dataclass(frozen=True, slots=True)
class _Progress:
    """How far a fetch is. `begun` and `done_before` are of its first word: what was there came at no rate."""

    begun: Instant
    done_before: int
    done: int
    total: int


class ExpertFetching:
    """One duty's fetches, one at a time. Without a keeper the whole model's file is here."""

    def __init__(self, keeper: ExpertKeeper | None, now: Callable[[], Instant]) -> None:
        self._keeper = keeper
        self._now = now
        self._progress: _Progress | None = None

    async def have(
        self,
        shard: ShardSet,
        is_wanted: Callable[[], bool],
        wait_change: Callable[[], Awaitable[object]],
        *,
        is_damaged: bool = False,
    ) -> bool:
        """Have these experts on the disk; False where ``is_wanted``, asked after each change, ended it.

        Raises `ModelUnusable` where they cannot be had.
        """
        if self._keeper is None:
            return is_wanted()
        try:
            async with open_unwrapping_nursery() as nursery:
                nursery.start_soon(self._end_when_unwanted, is_wanted, wait_change, nursery.cancel_scope)
                await self._keeper.keep(shard, self._note, is_damaged=is_damaged)
                nursery.cancel_scope.cancel()
        finally:
            self._progress = None
        return is_wanted()

    def text(self) -> str:
        """How far the fetch is, for people; empty while there is none."""
        report = self.report()
        if report is None:
            return ""
        left_s = report["left_s"]
        return (
            f"fetching experts: {report['done_bytes'] >> 20} of {report['total_bytes'] >> 20} MiB, "
            f"{report['bytes_per_second'] / 2**20:.1f} MiB/s"
            + ("" if left_s is None else f", {left_s:.0f} s left")
        )

    def report(self) -> dict[str, Any] | None:
        """How far the fetch is, for programs; None while there is none."""
        progress = self._progress
        if progress is None or self._keeper is None:
            return None
        took_s = in_seconds(between(progress.begun, self._now()))
        rate = (progress.done - progress.done_before) / took_s if took_s > 0 else 0.0
        return {
            "done_bytes": progress.done,
            "total_bytes": progress.total,
            "bytes_per_second": rate,
            "left_s": (progress.total - progress.done) / rate if rate > 0 else None,
            "from": [
                {"source": source, "bytes": size_bytes}
                for source, size_bytes in sorted(self._keeper.came_from().items())
                if size_bytes > 0
            ],
        }

    def _note(self, done: int, total: int) -> None:
        """Called in the keeper's thread."""
        before = self._progress
        if before is None:
            self._progress = _Progress(self._now(), done, done, total)
        else:
            self._progress = _Progress(before.begun, before.done_before, done, total)

    async def _end_when_unwanted(
        self,
        is_wanted: Callable[[], bool],
        wait_change: Callable[[], Awaitable[object]],
        scope: trio.CancelScope,
    ) -> None:
        while is_wanted():
            await wait_change()
        scope.cancel()
