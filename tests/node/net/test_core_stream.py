"""The cores' streams on a network in memory, under a clock that jumps."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.net.core_stream import CoreStreamOptions, CoreStreams
from kvasir_node.net.dialler import Dialler
from kvasir_node.ports import CORE_PROTOCOL, ConnectionLost, CoreMessage
from kvasir_proto.ids import NodeId
from tests.node.driver.memory_network import MemoryHost, MemoryNetwork, MemoryStream
from tests.node.driver.twins import node_key, node_of
from tests.node.net.core_streams_conformance import Member, check_core_streams, hears

NODES = [node_of(node_key(each)) for each in range(40)]


class World:
    """Members in memory, each knowing the addresses of all others."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.network = MemoryNetwork(nursery)
        self.hosts: dict[NodeId, MemoryHost] = {}

    async def member(self, node_id: NodeId, options: CoreStreamOptions | None = None) -> Member:
        host = self.hosts.setdefault(node_id, self.network.host(node_id))
        dialler = Dialler(host)
        streams = CoreStreams(host, dialler, options)
        for other in NODES:
            known = self.hosts.setdefault(other, self.network.host(other))
            dialler.learn(other, known.addresses(), "told")
        await self.nursery.start(streams.run)
        return Member(node_id, streams)


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    async with trio.open_nursery() as nursery:
        yield World(nursery)
        nursery.cancel_scope.cancel()


def statistics(member: Member) -> CoreStreams:
    assert isinstance(member.streams, CoreStreams)
    return member.streams


async def test_core_streams_conform(autojump_clock: MockClock) -> None:
    @contextlib.asynccontextmanager
    async def make_pair() -> AsyncIterator[tuple[Member, Member]]:
        async with world() as here:
            yield await here.member(NODES[0]), await here.member(NODES[1])

    await check_core_streams(make_pair)


async def test_an_answer_takes_the_stream_that_is_up(autojump_clock: MockClock) -> None:
    async with world() as here:
        first, second = await here.member(NODES[0]), await here.member(NODES[1])
        first.streams.send(second.node_id, b"question")
        await hears(second, first.node_id, b"question")
        second.streams.send(first.node_id, b"answer")
        await hears(first, second.node_id, b"answer")
        counts = statistics(second).statistics()
        assert (counts.streams_opened, counts.streams_accepted) == (0, 1)


async def test_a_node_that_died_is_reported_and_found_again(autojump_clock: MockClock) -> None:
    async with world() as here:
        first, second = await here.member(NODES[0]), await here.member(NODES[1])
        first.streams.send(second.node_id, b"x")
        await hears(second, first.node_id, b"x")
        here.network.drop(second.node_id)
        assert isinstance(await first.streams.receive(), ConnectionLost)
        first.streams.send(second.node_id, b"lost")
        assert isinstance(await first.streams.receive(), ConnectionLost)
        again = await here.member(NODES[1])
        await trio.sleep(60.0)
        first.streams.send(second.node_id, b"y")
        await hears(again, first.node_id, b"y")


async def test_a_dead_node_is_not_dialled_for_every_message(autojump_clock: MockClock) -> None:
    async with world() as here:
        first = await here.member(NODES[0])
        for _ in range(100):
            first.streams.send(NODES[1], b"x")
            assert isinstance(await first.streams.receive(), ConnectionLost)
            await trio.sleep(0.1)
        assert len(here.hosts[NODES[0]].dialled) <= 4


async def test_streams_least_used_are_closed_without_alarm(autojump_clock: MockClock) -> None:
    async with world() as here:
        first = await here.member(NODES[0], CoreStreamOptions(streams_max=4))
        others = [await here.member(each) for each in NODES[1:11]]
        for other in others:
            first.streams.send(other.node_id, b"x")
            await hears(other, first.node_id, b"x")
            await trio.sleep(10.0)
        assert statistics(first).connected_nodes() == tuple(sorted(each.node_id for each in others[-4:]))
        assert [statistics(each).connected_nodes() for each in others[:6]] == [()] * 6
        with trio.move_on_after(10.0) as silence:
            await first.streams.receive()
        assert silence.cancelled_caught
        others[0].streams.send(first.node_id, b"back")
        await hears(first, others[0].node_id, b"back")


async def test_of_many_streams_of_one_node_two_are_kept(autojump_clock: MockClock) -> None:
    async with world() as here:
        first = await here.member(NODES[0])
        hostile = here.hosts[NODES[1]]
        here.network.serve(NODES[1], _ignore)
        streams = [await hostile.open_stream(first.node_id, CORE_PROTOCOL) for _ in range(8)]
        for stream in streams:
            await trio.sleep(0.01)
            with contextlib.suppress(Exception):
                await stream.send(b"held")
        await trio.sleep(1.0)
        line = statistics(first)._lines[NODES[1]]
        assert len(line.streams) == 2


async def test_who_talks_too_fast_is_read_slowly_and_others_are_heard(autojump_clock: MockClock) -> None:
    options = CoreStreamOptions(messages_per_s_max=10.0, burst_max=20.0)
    async with world() as here:
        first = await here.member(NODES[0], options)
        flooder = await here.hosts[NODES[1]].open_stream(first.node_id, CORE_PROTOCOL)
        honest = await here.member(NODES[2])

        async def flood() -> None:
            while True:
                await flooder.send(b"noise")

        here.nursery.start_soon(flood)
        await trio.sleep(1.0)
        honest.streams.send(first.node_id, b"sense")
        heard: list[NodeId] = []
        with trio.move_on_after(10.0):
            while True:
                event = await first.streams.receive()
                assert isinstance(event, CoreMessage)
                heard.append(event.sender)
        assert heard.count(NODES[2]) == 1
        assert heard.index(NODES[2]) < 32
        assert heard.count(NODES[1]) <= 20 + 12 * 10


async def test_an_oversized_message_ends_that_stream_only(autojump_clock: MockClock) -> None:
    async with world() as here:
        first = await here.member(NODES[0], CoreStreamOptions(frame_size_max=100))
        second = await here.member(NODES[1])
        third = await here.member(NODES[2])
        second.streams.send(first.node_id, bytes(101))
        lost = await first.streams.receive()
        assert isinstance(lost, ConnectionLost)
        assert lost.node_id == second.node_id
        third.streams.send(first.node_id, b"fine")
        await hears(first, third.node_id, b"fine")
        assert statistics(first).statistics().refused == 1


async def test_a_reader_that_is_away_costs_bounded_memory(autojump_clock: MockClock) -> None:
    options = CoreStreamOptions(queue_bytes_max=1000, events_max=4)
    async with world() as here:
        first, second = await here.member(NODES[0], options), await here.member(NODES[1], options)
        for number in range(500):
            first.streams.send(second.node_id, number.to_bytes(2, "big") * 50)
            await trio.sleep(0.001)
        line = statistics(first)._lines[second.node_id]
        assert line.queued_bytes <= 1000
        assert line.queued_bytes == sum(map(len, line.queue))
        assert statistics(first).statistics().dropped_full > 100


async def test_nothing_is_kept_of_those_who_left(autojump_clock: MockClock) -> None:
    async with world() as here:
        first = await here.member(NODES[0])
        for each in NODES[1:20]:
            first.streams.send(each, b"x")
        for _ in NODES[1:20]:
            await first.streams.receive()
        await trio.sleep(1.0)
        second = await here.member(NODES[30])
        first.streams.send(second.node_id, b"x")
        await hears(second, first.node_id, b"x")
        here.network.drop(second.node_id)
        await first.streams.receive()
        await trio.sleep(0.1)
        assert statistics(first)._lines == {}


@pytest.mark.parametrize("count", [1, 3])
async def test_messages_from_before_the_start_are_sent(autojump_clock: MockClock, count: int) -> None:
    async with world() as here:
        second = await here.member(NODES[1])
        dialler = Dialler(here.hosts[NODES[0]])
        dialler.learn(second.node_id, here.hosts[second.node_id].addresses(), "told")
        streams = CoreStreams(here.hosts[NODES[0]], dialler)
        for number in range(count):
            streams.send(second.node_id, bytes([number + 1]))
        await here.nursery.start(streams.run)
        for number in range(count):
            await hears(second, NODES[0], bytes([number + 1]))


async def _ignore(_node_id: NodeId, _stream: MemoryStream) -> None:
    await trio.sleep_forever()
