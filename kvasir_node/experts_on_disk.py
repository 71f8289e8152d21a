"""The disk behind the duties' ports of experts: the keeper of one duty's, and what others may have of them.

Decides nothing of its own: it brings the cache's slow work into a thread, ends it when its caller is
cancelled, and holds on to what it was asked for last, so that nobody's need for room takes it away. Members
are asked by the duty's own side, from which their bytes come back to a thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import trio

from kvasir_node.model.expert_cache import ExpertCache
from kvasir_node.model.expert_files import Slice
from kvasir_node.model.expert_intake import ExpertIntake
from kvasir_node.model.expert_shelf import ExpertShelf
from kvasir_node.model.store import StoredModel
from kvasir_node.ports import ExpertMembers
from kvasir_node.telemetry import get_logger
from kvasir_proto.expert_sources import ExpertRun, WantedExpert
from kvasir_proto.manifest import ShardSet

log = get_logger()

_AT_ONCE: Final = trio.CapacityLimiter(4)
"""Fetches that go on, or wait for another process's, in threads: those that nobody wants any more end by
themselves, and until then keep nobody else's work from a thread."""


_READING: Final = trio.CapacityLimiter(2)
"""Readings for other members."""


class _Unwanted(Exception):
    """Whoever wanted the experts has gone."""


class ExpertsOnDisk:
    """See `ports.ExpertKeeper`."""

    def __init__(self, cache: ExpertCache, model: StoredModel, members: ExpertMembers | None = None) -> None:
        """``members`` are asked before the model's source; None: only that is."""
        self._cache = cache
        self._model = model
        self._members = members
        self._came: dict[str, int] = {}
        self._held = contextlib.ExitStack()
        self._lock = threading.Lock()

    async def keep(
        self, shard: ShardSet, progress: Callable[[int, int], None], *, is_damaged: bool = False
    ) -> None:
        """See `ports.ExpertKeeper`."""
        if isinstance(self._model.source, Path):
            return
        gone = threading.Event()
        asking = trio.CancelScope()
        came: dict[str, int] = {}
        self._came = came

        def tell(done: int, total: int) -> None:
            if gone.is_set():
                raise _Unwanted
            progress(done, total)

        def note(size_bytes: int, giver: str) -> None:
            came[giver] = came.get(giver, 0) + size_bytes

        def ask_members(intake: ExpertIntake, missing: Sequence[Slice]) -> None:
            # This thread may be abandoned; what it asks for then ends with the scope.
            trio.from_thread.run(self._ask_members, asking, intake, missing)

        def work() -> None:
            with contextlib.suppress(_Unwanted), contextlib.ExitStack() as holding:
                holding.enter_context(self._cache.serving(self._model, shard))
                self._cache.ensure(
                    self._model,
                    shard,
                    tell,
                    is_damaged=is_damaged,
                    ask_members=None if self._members is None else ask_members,
                    note=note,
                )
                self._hold_instead(holding, gone)

        try:
            await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=_AT_ONCE)
        finally:
            gone.set()
            asking.cancel()
            if came:
                log.info("experts_fetched", given=dict(sorted(came.items())))

    def came_from(self) -> Mapping[str, int]:
        """See `ports.ExpertKeeper`."""
        return dict(self._came)

    async def _ask_members(
        self, asking: trio.CancelScope, intake: ExpertIntake, missing: Sequence[Slice]
    ) -> None:
        async def take(run: ExpertRun, offset: int, data: bytes, giver: str) -> tuple[WantedExpert, ...]:
            return await trio.to_thread.run_sync(intake.take, run, offset, data, giver)

        assert self._members is not None
        with asking:
            wanted = await trio.to_thread.run_sync(intake.wanted, missing)
            await self._members.fetch(wanted, take, is_patient=self._model.source is None)
        if asking.cancel_called:
            raise _Unwanted

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


class ShelfOnDisk:
    """See `ports.ExpertsHere`."""

    def __init__(self, model: StoredModel) -> None:
        self._shelf = ExpertShelf(model.source_path, model.manifest)

    async def read(self, tensor_name: str, first: int, end: int, offset: int, size_bytes_max: int) -> bytes:
        """See `ports.ExpertsHere`."""
        return await trio.to_thread.run_sync(
            self._shelf.read,
            tensor_name,
            first,
            end,
            offset,
            size_bytes_max,
            abandon_on_cancel=True,
            limiter=_READING,
        )
