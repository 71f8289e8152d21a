"""Fetched experts: whatever places and processes do, what is there is right, fits, and came once."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvasir_node.model import store as store_module
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.expert_cache import ExpertCache
from kvasir_node.model.expert_fetch import DAMAGED_MAX
from kvasir_node.model.expert_files import slices_of
from kvasir_node.model.store import ModelStore, StoredModel
from kvasir_proto.errors import ModelUnusable, SourceFailed
from kvasir_proto.manifest import ShardSet
from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.model.misbehaving_server import Answering, MisbehavingServer, serving

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

SHAPE = ModelShape(n_layer=2)
SHARD = ShardSet(((0, 2, 5), (1, 0, 1), (1, 6, 8)))


class Case:
    """One model on a server, taken in without experts."""

    def __init__(self, directory: Path, server: MisbehavingServer, source: Path) -> None:
        self.server = server
        self.source = source
        self.directory = directory / "models"
        self.model = ModelStore(self.directory).pull(server.url(source.name), experts_bytes_max=0)
        self.cache = ExpertCache(self.directory)
        self.manifest = self.model.manifest
        server.sent_bytes, server.asked = 0, []

    def shard_bytes(self, shard: ShardSet = SHARD) -> int:
        return self.manifest.shard_size_bytes(shard)

    def check(self, shard: ShardSet = SHARD) -> None:
        """Every expert is there and is the file's; nothing unfinished is left."""
        slices = slices_of(self.manifest, shard)
        with (
            ExpertSource(self.model.source_path, self.manifest) as fetched,
            ExpertSource(self.source, self.manifest) as file,
        ):
            for each in slices:
                name = each.tensor.name
                assert fetched.read(name, each.expert) == file.read(name, each.expert)
        assert list(self.directory.rglob("*.partial")) == []

    def stored(self) -> set[Path]:
        return {each for each in self.model.experts.directory.rglob("*") if each.is_file()}


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr("kvasir_node.model.http_file.retry_delay_s", lambda *_: 0.0)
    source = make_qwen3moe(tmp_path / "tiny.gguf", SHAPE)
    with serving(source) as server:
        yield Case(tmp_path, server, source)


def test_only_the_ranges_of_the_shard_are_fetched_and_those_once(case: Case) -> None:
    seen: list[tuple[int, int]] = []
    case.cache.ensure(case.model, SHARD, lambda done, total: seen.append((done, total)))
    case.check()
    # One byte tells the server's file's size; experts side by side are one range in each tensor.
    assert case.server.sent_bytes == 1 + case.shard_bytes()
    assert len(case.server.asked) <= 1 + 3 * len(SHARD.ranges)
    assert seen == sorted(seen)
    assert seen[-1] == (case.shard_bytes(), case.shard_bytes())
    assert sum(each.stat().st_size for each in case.stored()) == case.shard_bytes()
    case.cache.ensure(case.model, SHARD)
    assert case.server.sent_bytes == 1 + case.shard_bytes()
    more = SHARD.union(ShardSet(((0, 0, 8),)))
    case.cache.ensure(case.model, more)
    case.check(more)
    assert case.server.sent_bytes == 2 + case.shard_bytes(more)


class Killed(Exception):
    """Stands for the end of the process."""


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=6))
def test_a_process_that_ends_at_any_byte_loses_none(case: Case, ends: list[int]) -> None:
    shutil.rmtree(case.model.experts.directory, ignore_errors=True)
    case.server.sent_bytes = 0
    case.server.behaviour = in_small_steps
    n_ended = 0
    for end in ends:

        def killed(done: int, total: int, end: int = end) -> None:
            if done >= end:
                raise Killed

        try:
            case.cache.ensure(case.model, SHARD, killed)
        except Killed:
            n_ended += 1
    case.cache.ensure(case.model, SHARD)
    case.check()
    # What was on its way when a process ended is all that comes twice.
    assert case.server.sent_bytes <= case.shard_bytes() + (n_ended + len(ends) + 1) * (STEP_BYTES + 1)


STEP_BYTES = 3000


def in_small_steps(answering: Answering, begin: int, end: int) -> bool:
    end = min(end, begin + STEP_BYTES)
    answering.part(answering.data, begin, end)
    return True


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.fixture
def other(case: Case, tmp_path: Path) -> Iterator[MisbehavingServer]:
    """A second server of the same file."""
    with serving(case.source) as server:
        yield server


def test_a_damaged_range_is_rejected_and_fetched_from_elsewhere(case: Case, other: MisbehavingServer) -> None:
    slices = slices_of(case.manifest, SHARD)
    damaged = slices[4]
    case.server.files["tiny.gguf"] = flipped(case.source.read_bytes(), damaged.offset + 7)
    case.cache.ensure(case.model, SHARD, others=[other.url("tiny.gguf")])
    case.check()
    assert other.asked[1:] == [(damaged.offset, damaged.offset + damaged.size_bytes)]


def test_a_place_that_gives_one_damaged_slice_after_another_is_given_up(
    case: Case, other: MisbehavingServer
) -> None:
    case.server.files["tiny.gguf"] = bytes(len(case.source.read_bytes()))
    case.cache.ensure(case.model, SHARD, others=[other.url("tiny.gguf")])
    case.check()
    size_bytes = slices_of(case.manifest, SHARD)[0].size_bytes
    assert case.server.sent_bytes <= 1 + len(SHARD.experts_of(0)) * size_bytes
    assert other.sent_bytes == 1 + case.shard_bytes()


def test_damage_on_the_way_is_fetched_again_from_the_only_place(case: Case) -> None:
    damaged = slices_of(case.manifest, SHARD)[4]
    left = [1]

    def once(answering: Answering, begin: int, end: int) -> bool:
        if begin <= damaged.offset < end and left:
            left.pop()
            answering.part(answering.data, begin, end, flipped(answering.data, damaged.offset)[begin:end])
            return True
        return False

    case.server.behaviour = once
    case.cache.ensure(case.model, SHARD)
    case.check()
    assert not left
    assert case.server.sent_bytes == 2 + case.shard_bytes() + damaged.size_bytes


def test_what_was_begun_at_one_place_and_spoilt_is_not_blamed_on_another(case: Case) -> None:
    """A partial slice may be of a bad place, or of a disk after a power cut: it is thrown away, once."""
    slices = slices_of(case.manifest, SHARD)
    for each in slices[: DAMAGED_MAX + 1]:
        path = case.model.experts.path_of(each.tensor.name, each.expert)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".partial").write_bytes(bytes(100))
    case.cache.ensure(case.model, SHARD)
    case.check()


@pytest.mark.parametrize("size_bytes", [0, 1, 1 << 20])
def test_what_lies_in_a_slices_place_and_is_none_is_made_again(case: Case, size_bytes: int) -> None:
    each = slices_of(case.manifest, SHARD)[3]
    path = case.model.experts.path_of(each.tensor.name, each.expert)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(size_bytes))
    path.with_name(path.name + ".partial").write_bytes(bytes(size_bytes))
    case.cache.ensure(case.model, SHARD)
    case.check()


def test_a_slice_that_a_disk_damaged_is_found_when_it_is_asked_for_and_fetched_again(case: Case) -> None:
    case.cache.ensure(case.model, SHARD)
    each = slices_of(case.manifest, SHARD)[3]
    path = case.model.experts.path_of(each.tensor.name, each.expert)
    path.write_bytes(flipped(path.read_bytes(), 5))
    with (
        ExpertSource(case.model.source_path, case.manifest) as source,
        pytest.raises(ModelUnusable, match="has not the manifest's digest"),
    ):
        source.read(each.tensor.name, each.expert)
    before = case.server.sent_bytes
    case.cache.ensure(case.model, SHARD, is_damaged=True)
    case.check()
    assert case.server.sent_bytes == before + 1 + each.size_bytes


def test_when_no_place_gives_them_each_one_is_named_with_its_reason(
    case: Case, other: MisbehavingServer
) -> None:
    case.server.files.clear()
    other.files["tiny.gguf"] = bytes(len(case.source.read_bytes()))
    with pytest.raises(SourceFailed) as caught:
        case.cache.ensure(case.model, SHARD, others=[other.url("tiny.gguf")])
    sentence = str(caught.value)
    assert f"{case.server.url('tiny.gguf')} cannot be used: the server answers with status 404" in sentence
    assert f"{other.url('tiny.gguf')} gave {DAMAGED_MAX} damaged ones" in sentence
    assert "18 parts of experts, of which the first is expert 2 of blk.0." in sentence
    other.files["tiny.gguf"] = b"another file"
    with pytest.raises(SourceFailed, match="it is another file"):
        case.cache.ensure(case.model, SHARD, others=[other.url("tiny.gguf")])


def test_a_file_of_this_machine_can_be_the_other_place(case: Case) -> None:
    case.server.files.clear()
    case.cache.ensure(case.model, SHARD, others=[case.source])
    case.check()


# -- room ----------------------------------------------------------------------------------------------------

FIRST, SECOND, THIRD = (ShardSet(((0, begin, begin + 2),)) for begin in (0, 2, 4))


def free_space(monkeypatch: pytest.MonkeyPatch, free_bytes: Callable[[], int]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, free_bytes()))


def test_those_used_longest_ago_go_first(case: Case) -> None:
    cache = ExpertCache(case.directory, 2 * case.shard_bytes(FIRST))
    cache.ensure(case.model, FIRST)
    cache.ensure(case.model, SECOND)
    cache.ensure(case.model, FIRST)  # used again
    cache.ensure(case.model, THIRD)
    case.check(FIRST.union(THIRD))
    assert not case.model.experts.has(slices_of(case.manifest, SECOND)[0])
    assert sum(each.stat().st_size for each in case.stored()) <= 2 * case.shard_bytes(FIRST)


@pytest.mark.parametrize("limit_bytes", [None, 0])
def test_what_does_not_fit_is_refused_before_a_byte_is_fetched(
    case: Case, monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None
) -> None:
    if limit_bytes is None:
        free_space(monkeypatch, lambda: store_module.SPARE_BYTES + case.shard_bytes() - 1)
    with pytest.raises(ModelUnusable, match=r"no room .*: they need 1 MiB and 0 MiB") as caught:
        ExpertCache(case.directory, limit_bytes).ensure(case.model, SHARD)
    assert caught.value.exit_code == 7
    assert case.server.sent_bytes == 0
    assert case.stored() == set()


def test_nothing_goes_when_that_would_not_be_enough(case: Case) -> None:
    ExpertCache(case.directory).ensure(case.model, FIRST)
    cache = ExpertCache(case.directory, case.shard_bytes(FIRST))
    with pytest.raises(ModelUnusable, match="no room"):
        cache.ensure(case.model, SECOND.union(THIRD))
    case.check(FIRST)


def test_what_is_served_never_goes_and_what_was_served_may(case: Case) -> None:
    cache = ExpertCache(case.directory, 2 * case.shard_bytes(FIRST))
    cache.ensure(case.model, FIRST)
    with cache.serving(case.model, FIRST):
        cache.ensure(case.model, SECOND)
        cache.ensure(case.model, THIRD)
        case.check(FIRST.union(THIRD))
        with pytest.raises(ModelUnusable, match="no room"):
            cache.ensure(case.model, SECOND.union(THIRD))
        case.check(FIRST)
    cache.ensure(case.model, SECOND.union(THIRD))
    case.check(SECOND.union(THIRD))
    assert list(case.directory.glob("*/*serv*")) == []


SERVING = """
import sys, pathlib
from kvasir_node.model.store import ModelStore
from kvasir_node.model.expert_cache import ExpertCache
from kvasir_proto.manifest import ShardSet
directory = pathlib.Path(sys.argv[1])
with ExpertCache(directory).serving(ModelStore(directory).list()[0], ShardSet(((0, 0, 2),))):
    print("serving", flush=True)
    sys.stdin.read()
"""


def test_what_another_process_serves_stays_until_that_is_killed(case: Case) -> None:
    cache = ExpertCache(case.directory, case.shard_bytes(FIRST))
    cache.ensure(case.model, FIRST)
    command = [sys.executable, "-c", SERVING, str(case.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"serving\n"
        with pytest.raises(ModelUnusable, match="no room"):
            cache.ensure(case.model, SECOND)
        process.kill()
        process.wait()
    cache.ensure(case.model, SECOND)
    case.check(SECOND)
    assert list(case.directory.glob("*/served-*")) == []


def test_what_somebody_begins_to_serve_while_room_is_made_stays(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes room looks at what is served, and removes: nobody begins to serve in between."""
    case.cache.ensure(case.model, FIRST)
    case.cache.ensure(case.model, SECOND)
    served, looked, began, done = ExpertCache._served, threading.Event(), threading.Event(), []

    def slowly(cache: ExpertCache) -> set[Path]:
        found = served(cache)
        looked.set()
        began.wait(0.3)  # as long as it takes the other to begin, if nothing stops it
        return found

    def serve() -> None:
        looked.wait(10)
        with case.cache.serving(case.model, FIRST):
            began.set()
            done.append(case.model.experts.missing(case.manifest, FIRST))
            making.join(10)
            done.append(case.model.experts.missing(case.manifest, FIRST))

    monkeypatch.setattr(ExpertCache, "_served", slowly)
    cache = ExpertCache(case.directory, 2 * case.shard_bytes(FIRST))
    making = threading.Thread(target=cache.ensure, args=(case.model, THIRD))
    server = threading.Thread(target=serve)
    for each in (server, making):
        each.start()
    server.join(20)
    before, after = done
    assert before == after, "of what it serves nothing goes any more"
    case.check(SECOND.union(THIRD))


def test_two_fetches_do_not_count_on_the_same_room(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one has yet to fetch is no room for another model's, nor for what a pull may keep."""
    second = make_qwen3moe(tmp_path / "second.gguf", replace(SHAPE, seed=5))
    size_bytes = case.shard_bytes(FIRST)
    cache = ExpertCache(case.directory, size_bytes + size_bytes // 2)
    refused: list[ModelUnusable] = []
    rooms: list[int | None] = []

    def meanwhile(done: int, total: int) -> None:
        if not rooms:
            rooms.append(cache.room_bytes())
            with pytest.raises(ModelUnusable, match="no room") as caught:
                cache.ensure(model, FIRST)
            refused.append(caught.value)

    with serving(second) as server:
        model = ModelStore(case.directory).pull(server.url("second.gguf"), experts_bytes_max=0)
        with cache.serving(case.model, FIRST):
            cache.ensure(case.model, FIRST, meanwhile)
            assert (len(refused), rooms) == (1, [size_bytes // 2])
            assert cache.room_bytes() == size_bytes // 2
        cache.ensure(model, FIRST)
    assert ExpertCache(case.directory).room_bytes() is None


def test_a_smaller_limit_is_kept_by_the_next_fetch_also_where_nothing_is_missing(case: Case) -> None:
    for shard in (FIRST, SECOND, THIRD):
        case.cache.ensure(case.model, shard)
    smaller = ExpertCache(case.directory, case.shard_bytes(FIRST) - 1)
    smaller.ensure(case.model, FIRST)
    case.check(FIRST)
    assert sum(each.stat().st_size for each in case.stored()) == case.shard_bytes(FIRST), (
        "no more than is used"
    )


def test_other_models_experts_make_room_too_and_are_told_apart(case: Case, tmp_path: Path) -> None:
    second = make_qwen3moe(tmp_path / "second.gguf", replace(SHAPE, seed=5))
    with serving(second) as server:
        model = ModelStore(case.directory).pull(server.url("second.gguf"), experts_bytes_max=0)
        cache = ExpertCache(case.directory, case.shard_bytes(FIRST))
        cache.ensure(model, FIRST)
        with cache.serving(case.model, FIRST):  # the other model's, of the same numbers
            cache.ensure(case.model, FIRST)
        case.check(FIRST)
        assert not model.experts.has(slices_of(model.manifest, FIRST)[0])


def test_unfinished_slices_of_an_abandoned_shard_go(case: Case) -> None:
    def killed(done: int, total: int) -> None:
        raise Killed

    case.server.behaviour = in_small_steps
    with pytest.raises(Killed):
        case.cache.ensure(case.model, FIRST, killed)
    assert len(list(case.directory.rglob("*.partial"))) == 1
    case.cache.ensure(case.model, SECOND)
    case.check(SECOND)


def test_a_model_whose_file_is_here_needs_nothing(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "local.gguf", SHAPE)
    store = ModelStore(tmp_path / "models")
    model: StoredModel = store.add(source)
    ExpertCache(tmp_path / "models", 0).ensure(model, SHARD)
    assert model.source_path == source
    assert not model.experts.directory.exists()


def test_random_shards_one_after_another_are_right_and_within_the_limit(case: Case) -> None:
    draws = random.Random(3)
    everything = [(layer, expert) for layer in range(2) for expert in range(8)]
    limit_bytes = case.manifest.shard_size_bytes(ShardSet(((0, 0, 6),)))
    cache = ExpertCache(case.directory, limit_bytes)
    for _ in range(12):
        shard = ShardSet.from_pairs(draws.sample(everything, draws.randrange(1, 7)))
        cache.ensure(case.model, shard)
        case.check(shard)
        assert sum(each.stat().st_size for each in case.stored()) <= limit_bytes
