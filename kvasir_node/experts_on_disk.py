"""The keeper of one duty's experts: `ports.ExpertKeeper` on the cache of fetched experts.

Decides nothing of its own: it brings the cache's slow work into a thread, ends it when its caller is
cancelled, and holds on to what it was asked for last, so that nobody's need for room takes it away.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import trio

from kvasir_node.model.expert_cache import ExpertCache
from kvasir_node.model.store import StoredModel
from kvasir_proto.manifest import ShardSet

_AT_ONCE: Final = trio.CapacityLimiter(4)
"""Fetches that go on, or wait for another process's, in threads: those that nobody wants any more end by
themselves, and until then keep nobody else's work from a thread."""


class _Unwanted(Exception):
    """Whoever wanted the experts has gone."""


class ExpertsOnDisk:
    """See `ports.ExpertKeeper`."""

    def __init__(self, cache: ExpertCache, model: StoredModel) -> None:
        self._cache = cache
        self._model = model
        self._held = contextlib.ExitStack()
        self._lock = threading.Lock()

    async def keep(
        self, shard: ShardSet, progress: Callable[[int, int], None], *, is_damaged: bool = False
    ) -> None:
        """See `ports.ExpertKeeper`."""
        if isinstance(self._model.source, Path):
            return
        gone = threading.Event()

        def tell(done: int, total: int) -> None:
            if gone.is_set():
                raise _Unwanted
            progress(done, total)

        def work() -> None:
            with contextlib.suppress(_Unwanted), contextlib.ExitStack() as holding:
                holding.enter_context(self._cache.serving(self._model, shard))
                self._cache.ensure(self._model, shard, tell, is_damaged=is_damaged)
                self._hold_instead(holding, gone)

        try:
            await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=_AT_ONCE)
        finally:
            gone.set()

    async def keep_whole_model(self) -> bool:
        """See `ports.ExpertKeeper`."""
        if isinstance(self._model.source, Path):
            return self._model.source.exists()
        return await trio.to_thread.run_sync(self._hold_if_whole, abandon_on_cancel=True)

    def _hold_if_whole(self) -> bool:
        whole = self._model.manifest.whole_shard()
        with contextlib.ExitStack() as holding:
            holding.enter_context(self._cache.serving(self._model, whole))
            if self._model.experts.missing(self._model.manifest, whole):
                return False
            self._hold_instead(holding, threading.Event())
        return True

    def _hold_instead(self, holding: contextlib.ExitStack, gone: threading.Event) -> None:
        """Hold this from now on, and what was held before no more."""
        with self._lock:
            if not gone.is_set():
                self._held, before = holding.pop_all(), self._held
                before.close()
