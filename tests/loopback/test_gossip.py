"""Gossip by libp2p: the check of the twin in memory, and what strangers may try."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from libp2p.host.exceptions import StreamFailure
from libp2p.network.stream.exceptions import StreamClosed, StreamReset
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11
from libp2p.pubsub.pb import rpc_pb2
from libp2p.tools.timed_cache import first_seen_cache
from libp2p.utils import encode_varint_prefixed

from kvasir_node.net.gossip import GossipMesh, GossipOptions
from kvasir_node.net.host import Libp2pHost
from kvasir_node.ports import GOSSIP_TOPICS, Gossiped
from tests.loopback.swarm_of_hosts import OTHER_SWARM, PATIENCE_S, SWARM, connect_all, hosts, until
from tests.node.net.gossip_conformance import ACCEPT, Gossiper, check_gossip, heard

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

NAME = f"/kvasir/{SWARM.hex()[:16]}/records"


@contextlib.asynccontextmanager
async def meshes(
    some: list[Libp2pHost], options: GossipOptions | None = None
) -> AsyncIterator[list[GossipMesh]]:
    async with trio.open_nursery() as nursery:
        found = [GossipMesh(each, SWARM, ACCEPT, options) for each in some]
        for mesh in found:
            await nursery.start(mesh.run)
        await connect_all(some)
        await until(
            lambda: all(
                len(mesh.neighbours(topic)) == len(some) - 1
                for mesh in found
                for topic in ("records", "terms")
            )
        )
        yield found
        nursery.cancel_scope.cancel()


async def test_gossip_conforms() -> None:
    @contextlib.asynccontextmanager
    async def make_members(count: int) -> AsyncIterator[list[Gossiper]]:
        async with hosts(count) as some, meshes(some) as found:
            yield [Gossiper(host.node_id, mesh) for host, mesh in zip(some, found, strict=True)]

    await check_gossip(make_members)


ORDERS = list(permutations(("dialler runs", "dialled runs", "connected")))


async def have_met(first: GossipMesh, second: GossipMesh) -> None:
    """Wait until both pass on to each other what is said on either topic."""
    topics = GOSSIP_TOPICS
    await until(lambda: all(len(each.neighbours(topic)) == 1 for each in (first, second) for topic in topics))


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
async def test_whoever_takes_part_first_and_whenever_they_connect_both_hear(order: tuple[str, ...]) -> None:
    async with hosts(2) as some, trio.open_nursery() as nursery:
        first, second = (GossipMesh(each, SWARM, ACCEPT) for each in some)
        for step in order:
            if step == "connected":
                await some[0].connect(some[1].addresses())
                alone = [each._pubsub for each in (first, second) if each._pubsub is not None]
                if len(alone) == 1:  # it asks at once, and is told that the other does not take part
                    await until(lambda alone=alone: alone[0]._refusals)
            else:
                await nursery.start((first if step == "dialler runs" else second).run)
        await have_met(first, second)
        for host, mesh, other in ((some[0], first, second), (some[1], second, first)):
            other.publish("terms", b"good from the other of " + host.node_id.encode())
            assert len(await heard(Gossiper(host.node_id, mesh), 1)) == 1
        nursery.cancel_scope.cancel()


async def test_a_stream_that_could_not_be_opened_is_tried_again_whatever_was_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosts(2) as some, trio.open_nursery() as nursery:
        options = GossipOptions(heartbeat_interval_s=0.05)
        first, second = (GossipMesh(each, SWARM, ACCEPT, options) for each in some)
        for mesh in (first, second):
            await nursery.start(mesh.run)
            assert mesh._pubsub is not None
            errors = iter([StreamFailure("late"), TimeoutError(), OSError(), ValueError("what is this")])
            monkeypatch.setattr(
                mesh._pubsub, "_handle_new_peer", failing(mesh._pubsub._handle_new_peer, errors)
            )
        await some[0].connect(some[1].addresses())
        await have_met(first, second)
        nursery.cancel_scope.cancel()


def failing(real: Any, errors: Iterator[Exception]) -> Any:
    """Raise each of these in turn, then do the real thing."""

    async def do(libp2p_id: ID) -> None:
        for error in errors:
            raise error
        await real(libp2p_id)

    return do


async def test_what_is_said_again_is_one_message_for_two_minutes_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosts(2) as some, meshes(some) as (first, second):
        clock_s = time.time()
        monkeypatch.setattr(first_seen_cache, "time", SimpleNamespace(time=lambda: clock_s))
        for each in range(1, 6):
            first.publish("terms", b"good")
            await until(
                lambda each=each: first.statistics().published + first.statistics().said_before == each
            )
            with trio.fail_after(PATIENCE_S):
                if each in (1, 5):
                    assert (await second.receive()).data == b"good"
            clock_s += 30.0
        assert first.statistics().said_before == 3
        assert second.statistics().received == 2


async def raw_stream(stranger: Libp2pHost, victim: Libp2pHost) -> Any:
    await stranger.connect(victim.addresses())
    return await stranger.libp2p.new_stream(ID.from_base58(victim.node_id), [PROTOCOL_ID_V11])


def rpc(*messages: rpc_pb2.Message) -> bytes:
    return bytes(encode_varint_prefixed(rpc_pb2.RPC(publish=list(messages)).SerializeToString()))


def message(data: bytes, **fields: Any) -> rpc_pb2.Message:
    return rpc_pb2.Message(data=data, topicIDs=fields.pop("topicIDs", [NAME]), **fields)


GARBAGE = [
    b"\xff" * 12,
    bytes(encode_varint_prefixed(b"\xff\xfe\xfd")),
    bytes(encode_varint_prefixed(bytes(range(250)))),
    b"\xff\xff\xff\x7f",
    rpc(message(b"bad")),
    rpc(message(b"good" + bytes(70_000))),
    rpc(message(b"good, signed", from_id=b"\x00\x01", seqno=b"1", signature=b"x")),
    rpc(message(b"good", topicIDs=[NAME, NAME])),
    rpc(message(b"good", topicIDs=["/elsewhere"])),
    rpc(message(b"")),
]


async def test_garbage_is_refused_and_others_are_heard() -> None:
    async with hosts(2) as some, meshes(some) as (first, second), hosts(1) as (stranger,):
        for garbage in GARBAGE:
            stream = await raw_stream(stranger, some[1])
            await stream.write(garbage)
            await trio.sleep(0.01)
            with contextlib.suppress(StreamClosed, StreamReset):
                await stream.reset()
        first.publish("records", b"good afterwards")
        assert await heard(Gossiper(some[1].node_id, second), 1) == [b"good afterwards"]


async def test_a_flood_costs_its_forwarder_its_turn_and_nobody_else() -> None:
    options = GossipOptions(messages_per_s_max=20.0, burst_max=50.0)
    async with hosts(2) as some, meshes(some, options) as (first, second), hosts(1) as (stranger,):
        stream = await raw_stream(stranger, some[1])
        for number in range(100):
            await stream.write(rpc(*(message(b"good flood %d %d" % (number, each)) for each in range(20))))
        await trio.sleep(0.2)
        first.publish("records", b"good sense")
        found: list[Gossiped] = []
        with trio.fail_after(PATIENCE_S):
            while not found or found[-1].data != b"good sense":
                found.append(await second.receive())
        assert found[-1].forwarder == some[0].node_id
        assert len(found) < 500
        assert second.statistics().over_rate > 1000
        assert second.statistics().failures == 0


async def test_what_is_refused_is_not_passed_on() -> None:
    async with hosts(3) as some, meshes(some) as found, hosts(1) as (stranger,):
        stream = await raw_stream(stranger, some[0])
        await stream.write(rpc(message(b"bad"), message(b"good")))
        for host, mesh in zip(some, found, strict=True):
            assert await heard(Gossiper(host.node_id, mesh), 1) == [b"good"]
        assert found[0].statistics().refused == 1
        assert found[1].statistics().refused == 0


async def test_one_asked_for_a_thousand_times_is_given_once() -> None:
    async with hosts(2) as some, meshes(some) as (first, _), hosts(1) as (stranger,):
        data = b"good " + bytes(10_000)
        first.publish("records", data)
        await trio.sleep(0.2)
        assert first._pubsub is not None
        names = list(first._router.mcache.msgs)
        assert len(names) == 1
        wanted = rpc_pb2.ControlIWant(messageIDs=names * 1000)
        sent: list[Any] = []
        first._router.send_rpc = lambda _node, packet, priority=False: sent.append(packet)
        stream = await raw_stream(stranger, some[0])
        control = rpc_pb2.RPC(control=rpc_pb2.ControlMessage(iwant=[wanted]))
        await stream.write(encode_varint_prefixed(control.SerializeToString()))
        await until(lambda: any(each.publish for each in sent))
        assert [len(each.publish) for each in sent if each.publish] == [1]


async def test_swarms_do_not_hear_each_other() -> None:
    async with hosts(2) as some, trio.open_nursery() as nursery:
        ours = GossipMesh(some[0], SWARM, ACCEPT)
        theirs = GossipMesh(some[1], OTHER_SWARM, ACCEPT)
        for mesh in (ours, theirs):
            await nursery.start(mesh.run)
        await connect_all(some)
        await trio.sleep(0.5)
        theirs.publish("records", b"good")
        assert await heard(Gossiper(some[0].node_id, ours), 0) == []
        nursery.cancel_scope.cancel()


async def test_a_burst_of_fifty_arrives_whole() -> None:
    async with hosts(3) as some, meshes(some) as found:
        data = [b"good %d " % number + bytes(600) for number in range(50)]
        for each in data:
            assert found[0].publish("records", each)
        for host, mesh in zip(some[1:], found[1:], strict=True):
            assert await heard(Gossiper(host.node_id, mesh), 50) == sorted(data)


async def test_a_node_that_comes_back_takes_part_again() -> None:
    async with hosts(2) as some, meshes(some) as (first, second):
        for number in range(4):
            await some[0].disconnect(some[1].node_id)
            if number % 2:  # else it comes back before the other has noticed that it was away
                await until(lambda: not first.neighbours("records") and not second.neighbours("records"))
            await some[0].connect(some[1].addresses())
            await until(lambda: len(first.neighbours("records")) == 1 == len(second.neighbours("records")))
            await until(lambda: first._topics.keys() == first._pubsub.peer_topics.keys())  # type: ignore[union-attr]
            second.publish("records", b"good again %d" % number)
            assert await heard(Gossiper(some[0].node_id, first), 1) == [b"good again %d" % number]
