"""Finding members in memory, under a clock that jumps."""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock
from zeroconf import ServiceInfo

from kvasir_node.net.dialler import Dialler
from kvasir_node.net.discovery import Discovery, DiscoveryOptions
from kvasir_node.net.lan import SERVICE, member_of
from kvasir_node.net.members_file import ADDRESSES_MAX, MEMBERS_MAX, MembersFile
from kvasir_proto.ids import NodeId
from tests.node.driver.memory_network import MemoryHost, MemoryNetwork, MemoryStream
from tests.node.driver.twins import node_key, node_of

HERE, *OTHERS = (node_of(node_key(each)) for each in range(20))


class Remembered:
    """`MembersFile` without a file."""

    def __init__(self, members: dict[NodeId, tuple[str, ...]] | None = None) -> None:
        self.members = dict(members or {})
        self.n_saved = 0

    def load(self) -> dict[NodeId, tuple[str, ...]]:
        return self.members

    async def save(self, members: Mapping[NodeId, tuple[str, ...]]) -> None:
        await trio.lowlevel.checkpoint()
        self.members = dict(members)
        self.n_saved += 1


class TwinLan:
    """A LAN on which a test says who is found."""

    found: Callable[[NodeId, tuple[str, ...]], None]

    async def run(self, found: Callable[[NodeId, tuple[str, ...]], None]) -> None:
        self.found = found
        await trio.sleep_forever()


class World:
    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.network = MemoryNetwork(nursery)
        self.host = self.network.host(HERE)
        self.others = {each: self.network.host(each) for each in OTHERS}
        self.dialler = Dialler(self.host)

    def up(self, *nodes: NodeId) -> None:
        for each in nodes:
            self.network.serve(each, serve)

    def addresses(self, *nodes: NodeId) -> list[str]:
        return [address for each in nodes for address in self.others[each].addresses()]

    async def discover(
        self,
        told: Sequence[str] = (),
        remembered: Remembered | None = None,
        lan: TwinLan | None = None,
        options: DiscoveryOptions | None = None,
    ) -> Discovery:
        discovery = Discovery(
            self.host,
            self.dialler,
            told=told,
            remembered=remembered or Remembered(),
            lan=lan,
            entropy=random.Random(1),
            options=options,
        )
        await self.nursery.start(discovery.run)
        return discovery


async def serve(_node_id: NodeId, _stream: MemoryStream) -> None:
    await trio.sleep_forever()


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        yield World(nursery)
        nursery.cancel_scope.cancel()


def connected(host: MemoryHost) -> set[NodeId]:
    return {each for each in OTHERS if host.is_connected(each)}


async def test_the_told_are_reached(autojump_clock: MockClock) -> None:
    async with world() as here:
        here.up(*OTHERS[:3])
        await here.discover(here.addresses(*OTHERS[:3]))
        await trio.sleep(1.0)
        assert connected(here.host) == set(OTHERS[:3])


async def test_with_every_bootstrap_dead_it_tries_for_ever_and_finds_them_when_they_come(
    autojump_clock: MockClock,
) -> None:
    async with world() as here:
        discovery = await here.discover(here.addresses(*OTHERS[:3]))
        await trio.sleep(24 * 3600.0)
        assert discovery.statistics().connected == 0
        assert discovery.statistics().rounds_without_answer > 100
        assert "cannot reach" in discovery.statistics().last_failure
        assert len(here.host.dialled) <= 3 * 24 * 60, "at most one dial a minute for each"
        here.up(OTHERS[1])
        await trio.sleep(130.0)
        assert connected(here.host) == {OTHERS[1]}
        assert discovery.statistics().rounds_without_answer == 0


async def test_those_of_last_time_are_tried_when_nobody_is_told(autojump_clock: MockClock) -> None:
    async with world() as here:
        here.up(OTHERS[5])
        members = {each: here.others[each].addresses() for each in OTHERS[3:8]}
        await here.discover(remembered=Remembered(members))
        await trio.sleep(60.0)
        assert connected(here.host) == {OTHERS[5]}


async def test_a_member_on_the_lan_is_reached_at_once(autojump_clock: MockClock) -> None:
    async with world() as here:
        lan = TwinLan()
        await here.discover(here.addresses(OTHERS[0]), lan=lan)
        await trio.sleep(600.0)
        here.up(OTHERS[9])
        lan.found(OTHERS[9], here.others[OTHERS[9]].addresses())
        lan.found(HERE, here.others[OTHERS[9]].addresses())
        await trio.sleep(11.0)
        assert connected(here.host) == {OTHERS[9]}


async def test_no_more_are_dialled_than_wanted(autojump_clock: MockClock) -> None:
    async with world() as here:
        here.up(*OTHERS)
        await here.discover(
            here.addresses(*OTHERS), options=DiscoveryOptions(wanted=3, batch=2, check_interval_s=5.0)
        )
        await trio.sleep(100.0)
        assert 3 <= len(connected(here.host)) <= 4


async def test_lost_members_are_replaced(autojump_clock: MockClock) -> None:
    async with world() as here:
        here.up(*OTHERS)
        await here.discover(here.addresses(*OTHERS), options=DiscoveryOptions(wanted=4, batch=2))
        await trio.sleep(30.0)
        before = connected(here.host)
        for each in sorted(before):
            here.network.drop(each)
        await trio.sleep(90.0)
        assert len(connected(here.host)) >= 4
        assert not connected(here.host) & before


async def test_members_with_records_are_remembered_and_the_gone_are_not(autojump_clock: MockClock) -> None:
    async with world() as here:
        here.up(*OTHERS[:3])
        remembered = Remembered()
        discovery = await here.discover(here.addresses(OTHERS[0]), remembered)
        for each in OTHERS[:4]:
            discovery.note_record(each, here.others[each].addresses())
        discovery.note_gone(OTHERS[2])
        discovery.note_gone(OTHERS[0])
        await trio.sleep(200.0)
        assert list(remembered.members) == [OTHERS[1], OTHERS[0], OTHERS[3]]
        assert remembered.n_saved == 1
        assert connected(here.host) == {OTHERS[0], OTHERS[1]}


async def test_candidates_are_bounded_and_the_told_stay(autojump_clock: MockClock) -> None:
    async with world() as here:
        discovery = await here.discover(here.addresses(OTHERS[0]), options=DiscoveryOptions(candidates_max=5))
        for each in OTHERS[1:]:
            discovery.note_record(each, here.others[each].addresses())
        assert discovery.statistics().candidates == 5
        here.up(OTHERS[0])
        await trio.sleep(300.0)
        assert OTHERS[0] in connected(here.host)


async def test_the_members_file_survives(tmp_path: Path) -> None:
    file = MembersFile(tmp_path / "members.json")
    assert file.load() == {}
    members = {each: (f"/ip4/192.0.2.1/tcp/1/p2p/{each}", "/ip4/192.0.2.2/tcp/1") for each in OTHERS}
    await file.save(members)
    assert file.load() == members
    assert list(file.load()) == OTHERS
    assert os.listdir(tmp_path) == ["members.json"]  # noqa: PTH208 - nothing partial is left


async def test_the_members_file_is_bounded(tmp_path: Path) -> None:
    file = MembersFile(tmp_path / "members.json")
    nodes = [node_of(node_key(each)) for each in range(MEMBERS_MAX + 10)]
    await file.save({each: (f"/ip4/192.0.2.1/tcp/1/p2p/{each}",) * 50 for each in nodes})
    loaded = file.load()
    assert list(loaded) == nodes[:MEMBERS_MAX]
    assert {len(each) for each in loaded.values()} == {ADDRESSES_MAX}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"null",
        b"[" * 100_000,
        b'{"members": 5}',
        b'{"members": [5, null, {"node_id": 7}, {"node_id": "x", "addresses": ["/ip4/1.1.1.1/tcp/1"]}]}',
        json.dumps({"members": [{"node_id": HERE, "addresses": "/ip4/1.1.1.1/tcp/1"}]}).encode(),
        json.dumps({"members": [{"node_id": HERE, "addresses": ["nonsense", 5]}]}).encode(),
        b" " * (3 << 20),
    ],
)
def test_a_damaged_members_file_is_no_members(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "members.json").write_bytes(content)
    assert MembersFile(tmp_path / "members.json").load() == {}


async def test_a_members_file_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    await MembersFile(tmp_path / "absent" / "members.json").save({})


def announced(**fields: str | bytes) -> ServiceInfo:
    return ServiceInfo(
        SERVICE, f"x.{SERVICE}", port=1, properties=dict(fields), addresses=[b"\x01\x02\x03\x04"]
    )


def test_announcements_of_our_swarm_are_read() -> None:
    info = announced(swarm="5" * 16, node=HERE, a0="/ip4/192.0.2.1/tcp/1", a1="nonsense")
    assert member_of(info, "5" * 16) == (HERE, (f"/ip4/192.0.2.1/tcp/1/p2p/{HERE}",))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"swarm": "6" * 16, "node": HERE, "a0": "/ip4/192.0.2.1/tcp/1"},
        {"swarm": "5" * 16, "node": "x", "a0": "/ip4/192.0.2.1/tcp/1"},
        {"swarm": "5" * 16, "node": HERE},
        {"swarm": "5" * 16, "node": HERE, "a0": b"\xff\xfe"},
        {"swarm": "5" * 16, "node": HERE, "a0": f"/ip4/192.0.2.1/tcp/1/p2p/{OTHERS[0]}"},
    ],
)
def test_other_announcements_are_left_out(fields: dict[str, str | bytes]) -> None:
    assert member_of(announced(**fields), "5" * 16) is None
