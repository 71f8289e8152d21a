"""The cores' streams on libp2p: the check of the twin in memory, and hostile nodes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.peer.id import ID

from kvasir_node.net.core_stream import CoreStreams
from kvasir_node.net.dialler import Dialler
from kvasir_node.net.host import HostOptions, Libp2pHost
from kvasir_node.net.identity import NodeIdentity
from kvasir_node.ports import CORE_PROTOCOL, ConnectionLost, CoreMessage
from tests.node.net.core_streams_conformance import Member, check_core_streams, hears

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

PATIENCE_S = 20.0


@contextlib.asynccontextmanager
async def hosts(count: int) -> AsyncIterator[list[Libp2pHost]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                Libp2pHost(NodeIdentity(Ed25519PrivateKey.generate()), HostOptions(handshake_timeout_s=20.0))
            )
            for _ in range(count)
        ]


@contextlib.asynccontextmanager
async def members(count: int) -> AsyncIterator[list[tuple[Member, Libp2pHost]]]:
    async with hosts(count) as all_hosts, trio.open_nursery() as nursery:
        found = []
        for host in all_hosts:
            dialler = Dialler(host)
            for other in all_hosts:
                dialler.learn(other.node_id, other.addresses(), "told")
            streams = CoreStreams(host, dialler)
            await nursery.start(streams.run)
            found.append((Member(host.node_id, streams), host))
        yield found
        nursery.cancel_scope.cancel()


async def test_core_streams_conform() -> None:
    @contextlib.asynccontextmanager
    async def make_pair() -> AsyncIterator[tuple[Member, Member]]:
        async with members(2) as ((first, _), (second, _)):
            yield first, second

    await check_core_streams(make_pair)


async def test_a_connection_that_breaks_is_reported_and_opened_again() -> None:
    async with members(2) as ((first, first_host), (second, _)):
        with trio.fail_after(PATIENCE_S):
            first.streams.send(second.node_id, b"x")
            await hears(second, first.node_id, b"x")
            await first_host.disconnect(second.node_id)
            for member in (first, second):
                assert isinstance(await member.streams.receive(), ConnectionLost)
            second.streams.send(first.node_id, b"y")
            await hears(first, second.node_id, b"y")


@pytest.mark.parametrize(
    "garbage", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x05abc", b"", bytes(range(256)) * 300]
)
async def test_garbage_costs_a_stream(garbage: bytes) -> None:
    async with members(2) as ((first, _), (second, second_host)), hosts(1) as (stranger,):
        with trio.fail_after(PATIENCE_S):
            await stranger.connect(second_host.addresses())
            for _ in range(3):
                raw = await stranger._host.new_stream(ID.from_base58(second.node_id), [CORE_PROTOCOL])
                await raw.write(garbage)
                await raw.close_write()
            first.streams.send(second.node_id, b"sense")
            heard = False
            while not heard:
                match await second.streams.receive():
                    case ConnectionLost(node_id):
                        assert node_id == stranger.node_id
                    case CoreMessage(sender, body):
                        heard = sender == first.node_id and body == b"sense"


async def test_a_node_that_reads_nothing_is_given_up_and_others_are_served() -> None:
    async with members(2) as ((first, first_host), (second, _)), hosts(1) as (mute,):
        with trio.fail_after(2 * PATIENCE_S):
            held = trio.Event()

            async def hold(_node_id: object, _stream: object) -> None:
                held.set()
                await trio.sleep_forever()

            mute.set_stream_handler(hold, CORE_PROTOCOL)
            await first_host.connect(mute.addresses())
            streams = first.streams
            assert isinstance(streams, CoreStreams)
            streams._dialler.learn(mute.node_id, mute.addresses(), "told")
            streams.send(mute.node_id, b"first")
            await held.wait()
            for _ in range(64):
                streams.send(mute.node_id, bytes(1 << 20))
                await trio.lowlevel.checkpoint()
            streams.send(second.node_id, b"you")
            await hears(second, first.node_id, b"you")
