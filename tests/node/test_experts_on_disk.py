"""The keeper of experts: in a thread that ends with who asked, holding what was asked for last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from kvasir_node.experts_on_disk import ExpertsOnDisk
from kvasir_node.model.expert_cache import ExpertCache
from kvasir_node.model.expert_shelf import ExpertShelf
from kvasir_node.model.store import ModelStore
from kvasir_node.ports import TakeExperts
from kvasir_proto.errors import ModelUnusable, NoRoomOnDisk
from kvasir_proto.expert_sources import ExpertRun, WantedExpert
from kvasir_proto.manifest import ModelManifest, ShardSet
from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.model.misbehaving_server import Answering, serving

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

FIRST, SECOND = ShardSet(((0, 0, 2),)), ShardSet(((0, 2, 4),))


async def test_what_was_asked_for_last_is_held_and_what_was_before_is_not(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    with serving(source) as server:
        model = ModelStore(tmp_path / "models").pull(server.url("tiny.gguf"), experts_bytes_max=0)
        manifest, room_bytes = model.manifest, model.manifest.shard_size_bytes(FIRST)
        cache = ExpertCache(tmp_path / "models", room_bytes)
        keeper, other = ExpertsOnDisk(cache, model), ExpertsOnDisk(cache, model)
        seen: list[tuple[int, int]] = []
        await keeper.keep(FIRST, lambda done, total: seen.append((done, total)))
        assert seen[-1] == (room_bytes, room_bytes)
        with pytest.raises(NoRoomOnDisk) as caught:
            await other.keep(SECOND, lambda done, total: None)
        assert (caught.value.need_bytes, caught.value.have_bytes) == (room_bytes, 0)
        assert not await other.keep_whole_model()
        with pytest.raises(NoRoomOnDisk):  # what it held stays until what it wants is there
            await keeper.keep(SECOND, lambda done, total: None)
        assert model.experts.missing(manifest, FIRST) == []
        await keeper.keep(ShardSet(), lambda done, total: None)
        await other.keep(SECOND, lambda done, total: None)
        assert model.experts.missing(manifest, SECOND) == []


STEP_BYTES = 50_000
"""After which the server breaks off each time; what follows is asked for after a moment."""


async def test_a_fetch_ends_with_who_asked_for_it_and_goes_on_with_the_next(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1, n_ff=256))

    def in_steps(answering: Answering, begin: int, end: int) -> bool:
        end = min(end, begin + STEP_BYTES)
        answering.part(answering.data, begin, end)
        return True

    with serving(source) as server:
        model = ModelStore(tmp_path / "models").pull(server.url("tiny.gguf"), experts_bytes_max=0)
        keeper = ExpertsOnDisk(ExpertCache(tmp_path / "models"), model)
        server.behaviour, server.sent_bytes = in_steps, 0
        with trio.CancelScope() as scope:

            def cancel(done: int, total: int) -> None:
                trio.from_thread.run_sync(scope.cancel)

            await keeper.keep(FIRST, cancel)
        assert scope.cancelled_caught
        seen: list[int] = []
        await keeper.keep(FIRST, lambda done, total: seen.append(done))
        assert model.experts.missing(model.manifest, FIRST) == []
        assert seen[0] < seen[-1], "the thread had not ended with who asked"
        wanted = model.manifest.shard_size_bytes(FIRST)
        assert server.sent_bytes <= wanted + 3 * STEP_BYTES, "what came before was not thrown away"


async def test_the_whole_model_is_held_where_all_of_it_is_here(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    other = make_qwen3moe(tmp_path / "other.gguf", ModelShape(n_layer=1, seed=2))
    store = ModelStore(tmp_path / "models")
    with serving(source, other) as server:
        model = store.pull(server.url("tiny.gguf"))
        keeper = ExpertsOnDisk(ExpertCache(tmp_path / "models"), model)
        assert await keeper.keep_whole_model()
        size_bytes = model.manifest.experts_size_bytes()
        second = store.pull(server.url("other.gguf"), experts_bytes_max=0)
        with pytest.raises(ModelUnusable, match="no room"):
            ExpertCache(tmp_path / "models", size_bytes).ensure(second, FIRST)


async def test_of_a_file_that_is_here_nothing_is_fetched_or_held(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    model = ModelStore(tmp_path / "models").add(source)
    keeper = ExpertsOnDisk(ExpertCache(tmp_path / "models", 0), model)
    await keeper.keep(FIRST, lambda done, total: None)
    assert await keeper.keep_whole_model()
    source.unlink()
    assert not await keeper.keep_whole_model()
    assert list(model.manifest_path.parent.glob("*serv*")) == []


class Members:
    """Give what they are told to, from a file, and then wait where they are told to."""

    def __init__(self, source: Path, manifest: ModelManifest, tensors: str) -> None:
        self.shelf = ExpertShelf(source, manifest)
        self.tensors = tensors
        self.asked: list[tuple[int, bool]] = []
        self.hang = False
        self.n_cancelled = 0
        self.given = trio.Event()

    async def fetch(
        self, wanted: Sequence[WantedExpert], take: TakeExperts, *, is_patient: bool = True
    ) -> None:
        """See `ports.ExpertMembers`."""
        self.asked.append((len(wanted), is_patient))
        for each in wanted:
            if self.tensors in each.tensor:
                begin, end = each.expert, each.expert + 1
                data = self.shelf.read(each.tensor, begin, end, each.begun_bytes, each.size_bytes)
                assert await take(ExpertRun((each,)), each.begun_bytes, data, "node A") == ()
        self.given.set()
        if self.hang:
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                self.n_cancelled += 1
                raise


async def test_members_are_asked_first_and_the_address_for_the_rest(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    with serving(source) as server:
        url = server.url("tiny.gguf")
        model = ModelStore(tmp_path / "models").pull(url, experts_bytes_max=0)
        manifest = model.manifest
        members = Members(source, manifest, "ffn_up")
        keeper = ExpertsOnDisk(ExpertCache(tmp_path / "models"), model, members)
        server.sent_bytes = 0
        seen: list[tuple[int, int]] = []
        await keeper.keep(FIRST, lambda done, total: seen.append((done, total)))
        total = manifest.shard_size_bytes(FIRST)
        assert seen[-1] == (total, total)
        assert members.asked == [(6, False)]
        given = 2 * manifest.tensor("blk.0.ffn_up_exps.weight").expert_size_bytes
        assert keeper.came_from() == {"node A": given, str(url): total - given}
        assert server.sent_bytes <= 1 + total - given
        assert model.experts.damaged(manifest, FIRST) == []
        await keeper.keep(FIRST, lambda done, total: None)
        assert len(members.asked) == 1, "what is here is asked of nobody"


async def test_with_a_manifest_alone_members_are_all_there_is(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    manifest = ModelStore(tmp_path / "others").add(source).manifest
    model = ModelStore(tmp_path / "models").take_manifest(manifest)
    members = Members(source, manifest, "ffn_up")
    keeper = ExpertsOnDisk(ExpertCache(tmp_path / "models"), model, members)
    with pytest.raises(ModelUnusable, match="nobody has them"):
        await keeper.keep(FIRST, lambda done, total: None)
    members.tensors = "ffn"
    await keeper.keep(FIRST, lambda done, total: None)
    assert members.asked == [(6, True), (4, True)], "what came is kept"
    assert model.experts.damaged(manifest, FIRST) == model.experts.missing(manifest, FIRST) == []


async def test_asking_members_ends_with_who_wanted_the_experts(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    manifest = ModelStore(tmp_path / "others").add(source).manifest
    model = ModelStore(tmp_path / "models").take_manifest(manifest)
    members = Members(source, manifest, "ffn")
    members.hang = True
    keeper = ExpertsOnDisk(ExpertCache(tmp_path / "models"), model, members)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.keep, FIRST, lambda done, total: None)
        with trio.fail_after(30):
            await members.given.wait()
        assert model.experts.missing(manifest, FIRST) == []
        nursery.cancel_scope.cancel()
    members.hang = False
    with trio.fail_after(30):  # the lock of who was cancelled is free
        await ExpertsOnDisk(ExpertCache(tmp_path / "models"), model, members).keep(
            SECOND, lambda done, total: None
        )
    assert members.n_cancelled == 1
