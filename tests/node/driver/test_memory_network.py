"""The network in memory keeps the promises of its ports, so that what is tested on it holds."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from kvasir_proto.errors import ConfigurationInvalid, TransportUnavailable
from kvasir_proto.ids import NodeId
from tests.node.driver.control_stream_conformance import Pair, check_control_stream
from tests.node.driver.memory_network import DIAL_TIMEOUT_S, MemoryNetwork, MemoryStream, stream_pair
from tests.node.driver.twins import node_key, node_of

FIRST, SECOND, THIRD = (node_of(node_key(each)) for each in range(3))


async def test_streams_conform(autojump_clock: MockClock) -> None:
    async def open_pair() -> Pair:
        await trio.lowlevel.checkpoint()
        return stream_pair(FIRST, SECOND)

    await check_control_stream(open_pair)


async def echo(_node_id: NodeId, stream: MemoryStream) -> None:
    while True:
        await stream.send(await stream.receive(100.0))


async def test_a_node_is_reached_while_it_serves(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        first, second = network.host(FIRST), network.host(SECOND)
        started = trio.current_time()
        with pytest.raises(TransportUnavailable):
            await first.connect(second.addresses())
        assert trio.current_time() - started == DIAL_TIMEOUT_S
        network.serve(SECOND, echo)
        assert await first.connect(second.addresses()[0]) == SECOND
        stream = await first.open_stream(SECOND)
        await stream.send(b"x")
        assert await stream.receive(1.0) == b"x"
        network.drop(SECOND)
        with pytest.raises(TransportUnavailable):
            await stream.receive(1.0)
        with pytest.raises(TransportUnavailable):
            await first.open_stream(SECOND)


async def test_a_cut_concerns_two_nodes_only(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        network = MemoryNetwork(nursery)
        first, third = network.host(FIRST), network.host(THIRD)
        network.host(SECOND)
        network.serve(SECOND, echo)
        network.cut(FIRST, SECOND)
        with pytest.raises(TransportUnavailable):
            await first.open_stream(SECOND)
        stream = await third.open_stream(SECOND)
        await stream.send(b"x")
        assert await stream.receive(1.0) == b"x"
        network.mend(FIRST, SECOND)
        await (await first.open_stream(SECOND)).close()
        network.drop(SECOND)


@pytest.mark.parametrize("address", ["", "nonsense", "/ip4/10.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/1/p2p/x"])
async def test_what_is_no_address_is_refused_as_by_the_real_host(address: str) -> None:
    async with trio.open_nursery() as nursery:
        host = MemoryNetwork(nursery).host(FIRST)
        with pytest.raises(ConfigurationInvalid):
            await host.connect(address)
        with pytest.raises(ConfigurationInvalid):
            await host.connect(host.addresses())
