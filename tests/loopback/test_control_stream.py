"""libp2p's control streams keep what `ports.ControlStream` promises, by the check of the twin in memory."""

from __future__ import annotations

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.net.control_stream import Libp2pControlStream
from kvasir_node.net.host import Libp2pHost
from kvasir_node.net.identity import NodeIdentity
from kvasir_proto.ids import NodeId
from tests.node.driver.control_stream_conformance import Pair, check_control_stream

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

OPENING = b"the first message, without which a stream is not handed over"


async def test_streams_conform() -> None:
    arriving, arrived = trio.open_memory_channel[Libp2pControlStream](1)

    async def hand_over(_node_id: NodeId, stream: Libp2pControlStream) -> None:
        await arriving.send(stream)
        await stream.wait_finished()

    async with (
        Libp2pHost(NodeIdentity(Ed25519PrivateKey.generate())) as first,
        Libp2pHost(NodeIdentity(Ed25519PrivateKey.generate())) as second,
    ):
        second.set_stream_handler(hand_over)
        await first.connect(second.addresses())

        async def open_pair() -> Pair:
            near = await first.open_stream(second.node_id)
            await near.send(OPENING)
            far = await arrived.receive()
            assert await far.receive(20.0) == OPENING
            return near, far

        await check_control_stream(open_pair)
