"""The twins of gossip and record store keep the promises of their ports."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import trio
from trio.testing import MockClock

from kvasir_node.ports import Accept, GossipTopic
from tests.node.driver.twins import node_key, node_of
from tests.node.net.gossip_conformance import ACCEPT, Gossiper, check_gossip
from tests.node.net.memory_gossip import (
    MemoryGossipNetwork,
    MemoryRecordNetwork,
    MemoryRecordStore,
)
from tests.node.net.record_store_conformance import Storer, check_record_store, judge

NODES = [node_of(node_key(each)) for each in range(8)]


async def test_gossip_conforms(autojump_clock: MockClock) -> None:
    @contextlib.asynccontextmanager
    async def make_members(count: int) -> AsyncIterator[list[Gossiper]]:
        async with trio.open_nursery() as nursery:
            network = MemoryGossipNetwork(nursery)
            yield [Gossiper(each, network.join(each, ACCEPT)) for each in NODES[:count]]
            nursery.cancel_scope.cancel()

    await check_gossip(make_members)


async def test_records_conform(autojump_clock: MockClock) -> None:
    @contextlib.asynccontextmanager
    async def make_storers(count: int) -> AsyncIterator[list[Storer]]:
        await trio.lowlevel.checkpoint()
        network = MemoryRecordNetwork()
        yield [Storer(each, MemoryRecordStore(network, judge)) for each in NODES[:count]]

    await check_record_store(make_storers)


async def test_what_a_member_does_not_accept_it_does_not_pass_on(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        network = MemoryGossipNetwork(nursery)
        network.reaches = lambda here, there: abs(NODES.index(here) - NODES.index(there)) == 1
        lax: dict[GossipTopic, Accept] = {"records": lambda _data: True, "terms": lambda _data: True}
        liar = network.join(NODES[0], lax)
        strict = network.join(NODES[1], ACCEPT)
        beyond = network.join(NODES[2], lax)
        liar.publish("terms", b"bad")
        liar.publish("terms", b"good")
        assert (await strict.receive()).data == b"good"
        assert (await beyond.receive()).data == b"good"
        with trio.move_on_after(10.0) as quiet:
            await beyond.receive()
        assert quiet.cancelled_caught
        assert strict.refused[NODES[0]] == 1
