"""Experts come to the disk before an engine is told of them, and no longer than they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.driver.expert_fetching import ExpertFetching
from kvasir_node.model.store import StoredModel
from kvasir_proto.errors import NoRoomOnDisk, SourceFailed
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import EngineFault, LoadShard
from kvasir_proto.node_core import ShardLoaded, ShardRefused
from tests.node.driver.test_holder_duty import HOLDER, TWIN_MEMORY_BYTES, node, open_holder
from tests.node.driver.twins import now, until

MIB = 1 << 20


class TwinKeeper:
    """Takes a second for each MiB of four, unless it has an error to raise instead."""

    def __init__(self) -> None:
        self.asked: list[tuple[ShardSet, bool]] = []
        self.kept: list[ShardSet] = []
        self.n_cancelled = 0
        self.errors: list[Exception] = []

    async def keep(
        self, shard: ShardSet, progress: Callable[[int, int], None], *, is_damaged: bool = False
    ) -> None:
        """See `ports.ExpertKeeper`."""
        self.asked.append((shard, is_damaged))
        try:
            for done in range(5):
                progress(done * MIB, 4 * MIB)
                await trio.sleep(1.0)
        except trio.Cancelled:
            self.n_cancelled += 1
            raise
        if self.errors:
            raise self.errors.pop(0)
        self.kept.append(shard)

    async def keep_whole_model(self) -> bool:
        """See `ports.ExpertKeeper`."""
        return False

    def came_from(self) -> dict[str, int]:
        """See `ports.ExpertKeeper`."""
        return {"node B": 0, "node A": MIB, "https://example.org/m.gguf": MIB}


async def test_experts_are_on_the_disk_before_the_engine_hears_of_them(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    keeper = TwinKeeper()
    async with open_holder(model, tmp_path, experts=keeper) as holder:
        assert holder.duty.report()["fetch"] is None
        holder.core.hand(holder.plan())
        await until(lambda: (holder.duty.report()["fetch"] or {"done_bytes": 0})["done_bytes"])
        await trio.sleep(1.1)
        assert holder.loads() == []
        fetch = holder.duty.report()["fetch"]
        assert (fetch["done_bytes"], fetch["total_bytes"]) == (2 * MIB, 4 * MIB)
        assert 0.8 * MIB < fetch["bytes_per_second"] < 1.1 * MIB
        assert 1.5 < fetch["left_s"] < 2.5
        assert fetch["from"] == [
            {"source": "https://example.org/m.gguf", "bytes": MIB},
            {"source": "node A", "bytes": MIB},
        ]
        state, reason = holder.duty.state()
        assert state == "loading"
        assert reason.startswith("fetching experts: 2 of 4 MiB, ")
        assert reason.endswith(" s left")
        await until(lambda: holder.state == "ready")
        assert holder.loads() == keeper.kept == [holder.plan().shard_of(node(HOLDER))]
        assert holder.duty.report()["fetch"] is None


async def test_a_fetch_ends_when_another_plan_wants_something_else_and_not_when_it_wants_the_same(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    keeper = TwinKeeper()
    async with open_holder(model, tmp_path, experts=keeper) as holder:
        holder.core.hand(holder.plan(revision=1))
        await until(lambda: keeper.asked)
        holder.core.hand(holder.plan(revision=2))
        await trio.sleep(1.0)
        assert (len(keeper.asked), keeper.n_cancelled) == (1, 0)
        other = holder.plan(2, revision=3)
        holder.core.hand(other)
        await until(lambda: holder.state == "ready")
        assert keeper.n_cancelled == 1
        assert holder.loads() == keeper.kept == [other.shard_of(node(HOLDER))]
        assert holder.core.commands == [ShardLoaded(0, 1, 3, TWIN_MEMORY_BYTES)]


async def test_what_cannot_be_fetched_is_refused_and_tried_again_with_a_look_at_what_is_there(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    keeper = TwinKeeper()
    keeper.errors = [SourceFailed("nobody has them"), NoRoomOnDisk("no room", 400, 300)]
    async with open_holder(model, tmp_path, experts=keeper) as holder:
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "ready")
        assert holder.core.commands == [
            ShardRefused(0, 1, 1, "source_failed", "nobody has them"),
            ShardRefused(0, 1, 1, "no_room_on_disk", "no room", 400, 300),
            ShardLoaded(0, 1, 1, TWIN_MEMORY_BYTES),
        ]
        assert [is_damaged for _, is_damaged in keeper.asked] == [False, True, True]
        assert len(holder.loads()) == 1


async def test_experts_that_the_engine_finds_damaged_are_compared_before_they_are_loaded_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    keeper = TwinKeeper()
    async with open_holder(model, tmp_path, experts=keeper) as holder:
        holder.engine.refusals[LoadShard] = EngineFault(None, "model_unusable", "it is damaged", 7)
        holder.core.hand(holder.plan())
        await until(lambda: holder.state == "degraded")
        holder.engine.refusals.clear()
        await until(lambda: holder.state == "ready")
        assert [is_damaged for _, is_damaged in keeper.asked] == [False, True]


async def test_without_a_keeper_there_is_nothing_to_wait_for(autojump_clock: MockClock) -> None:
    fetching = ExpertFetching(None, now)
    assert await fetching.have(ShardSet(), lambda: True, trio.sleep_forever)
    assert not await fetching.have(ShardSet(), lambda: False, trio.sleep_forever)
    assert (fetching.report(), fetching.text()) == (None, "")


async def test_a_fetch_that_fails_leaves_no_progress_behind(autojump_clock: MockClock) -> None:
    keeper = TwinKeeper()
    keeper.errors = [SourceFailed("no")]
    fetching = ExpertFetching(keeper, now)
    with pytest.raises(SourceFailed):
        await fetching.have(ShardSet(), lambda: True, trio.sleep_forever)
    assert fetching.report() is None
