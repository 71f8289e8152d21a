"""Records in libp2p's DHT: the check of the twin in memory, and what strangers may try."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
import trio
from libp2p.host.exceptions import StreamFailure
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network.stream.exceptions import StreamEOF, StreamReset
from libp2p.peer.id import ID
from libp2p.utils import encode_uvarint, encode_varint_prefixed

from kvasir_node.net.host import Libp2pHost
from kvasir_node.net.record_store import DhtRecordStore, RecordStoreOptions, key_of
from kvasir_proto.ids import NodeId
from tests.loopback.swarm_of_hosts import (
    OTHER_SWARM,
    PATIENCE_S,
    SWARM,
    connect_all,
    dialler_of,
    hosts,
    until,
)
from tests.node.net.record_store_conformance import Storer, check_record_store, judge, record

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

PROTOCOL = f"/kvasir/{SWARM.hex()[:16]}/kad/1"


@contextlib.asynccontextmanager
async def stores(
    some: list[Libp2pHost], options: RecordStoreOptions | None = None
) -> AsyncIterator[list[DhtRecordStore]]:
    async with trio.open_nursery() as nursery:
        found = [DhtRecordStore(each, dialler_of(each, some), SWARM, judge, options) for each in some]
        for store in found:
            await nursery.start(store.run)
        await connect_all(some)
        await until(lambda: all(store.neighbours() == len(some) - 1 for store in found))
        yield found
        nursery.cancel_scope.cancel()


async def ask(host: Libp2pHost, victim: NodeId, message: bytes) -> bytes | None:
    """What the victim answers to these bytes; None for a refusal."""
    stream = await host.libp2p.new_stream(ID.from_base58(victim), [PROTOCOL])
    try:
        await stream.write(message)
        with trio.fail_after(PATIENCE_S):
            return bytes(await stream.read(1 << 16))
    except Exception:
        return None
    finally:
        with contextlib.suppress(Exception):
            await stream.reset()


def put_message(key: bytes, value: bytes) -> bytes:
    message = Message(type=Message.MessageType.PUT_VALUE, key=key)
    message.record.key = key
    message.record.value = value
    return bytes(encode_varint_prefixed(message.SerializeToString()))


async def test_records_conform() -> None:
    @contextlib.asynccontextmanager
    async def make_storers(count: int) -> AsyncIterator[list[Storer]]:
        async with hosts(count) as some, stores(some) as found:
            yield [Storer(host.node_id, store) for host, store in zip(some, found, strict=True)]

    await check_record_store(make_storers)


async def test_others_still_have_the_record_of_a_node_that_is_gone() -> None:
    async with hosts(3) as some, stores(some) as (first, second, third):
        await first.put(record(some[0].node_id, 1))
        await some[1].disconnect(some[0].node_id)
        assert await third.get(some[0].node_id, PATIENCE_S) == record(some[0].node_id, 1)
        assert second.stored() >= 1


async def test_a_record_under_the_key_of_another_is_refused() -> None:
    async with hosts(2) as some, stores(some) as (_, second), hosts(1) as (stranger,):
        await stranger.connect(some[1].addresses())
        victim = some[0].node_id
        good = record(stranger.node_id, 7)
        assert await ask(stranger, some[1].node_id, put_message(key_of(victim).encode(), good)) is None
        assert await ask(stranger, some[1].node_id, put_message(b"/pk/" + b"x" * 32, good)) is None
        assert await ask(stranger, some[1].node_id, put_message(b"plain", good)) is None
        assert second.stored() == 0
        key = key_of(stranger.node_id).encode()
        assert await ask(stranger, some[1].node_id, put_message(key, good)) is not None
        assert await ask(stranger, some[1].node_id, put_message(key, record(stranger.node_id, 6))) is None
        assert await second.get(stranger.node_id, PATIENCE_S) == good


GARBAGE = [
    b"\xff" * 9 + b"\x01",
    b"\x80" * 20,
    b"\x05hello",
    bytes(encode_uvarint(1 << 30)),
    b"\x00",
    b"\x02\x08\x63",
]


async def test_garbage_is_refused_and_others_are_served() -> None:
    async with hosts(2) as some, stores(some) as (first, second), hosts(1) as (stranger,):
        await stranger.connect(some[1].addresses())
        for garbage in GARBAGE:
            with trio.move_on_after(0.2):
                await ask(stranger, some[1].node_id, garbage)
        await first.put(record(some[0].node_id, 1))
        assert await second.get(some[0].node_id, PATIENCE_S) == record(some[0].node_id, 1)
        assert second.stored() == 1


async def test_who_holds_streams_open_does_not_shut_others_out() -> None:
    """libp2p serves twelve at a time for as long as they like: one silent caller, and it serves nobody."""
    options = RecordStoreOptions(stream_timeout_s=1.0)
    async with hosts(2) as some, stores(some, options) as (first, second), hosts(1) as (stranger,):
        await stranger.connect(some[1].addresses())
        held = []
        for _ in range(12):
            with contextlib.suppress(StreamFailure):
                held.append(await stranger.libp2p.new_stream(ID.from_base58(some[1].node_id), [PROTOCOL]))
        assert 1 <= len(held) < 12
        started = trio.current_time()
        await first.put(record(some[0].node_id, 1))
        assert second.stored() == 1
        assert trio.current_time() - started < 1.0
        for stream in held:
            with trio.fail_after(PATIENCE_S), contextlib.suppress(StreamReset, StreamEOF):
                assert not await stream.read(1)
        assert second._dht._streams_of == {}


async def test_a_node_of_another_swarm_is_no_neighbour() -> None:
    async with hosts(2) as some, hosts(1) as (foreign,), trio.open_nursery() as nursery:
        ours = DhtRecordStore(some[0], dialler_of(some[0], []), SWARM, judge)
        theirs = DhtRecordStore(foreign, dialler_of(foreign, []), OTHER_SWARM, judge)
        await nursery.start(ours.run)
        await nursery.start(theirs.run)
        await foreign.connect(some[0].addresses())
        await trio.sleep(0.5)
        await theirs.put(record(foreign.node_id, 1))
        assert (ours.stored(), ours.neighbours()) == (0, 0)
        nursery.cancel_scope.cancel()


async def test_expired_records_are_neither_given_nor_kept() -> None:
    valid = True
    async with hosts(2) as some, trio.open_nursery() as nursery:

        def judge_now(data: bytes) -> object:
            return judge(data) if valid else None

        found = [
            DhtRecordStore(each, dialler_of(each, some), SWARM, judge_now)  # type: ignore[arg-type]
            for each in some
        ]
        for store in found:
            await nursery.start(store.run)
        await connect_all(some)
        await until(lambda: all(store.neighbours() for store in found))
        await found[0].put(record(some[0].node_id, 1))
        valid = False
        assert await found[1].get(some[0].node_id, PATIENCE_S) is None
        found[1]._drop_expired()
        assert found[1].stored() == 0
        nursery.cancel_scope.cancel()


async def test_a_newcomer_gets_the_record_when_it_is_stored_again() -> None:
    options = RecordStoreOptions(republish_interval_s=0.5)
    async with hosts(3) as some, stores(some[:2], options) as (first, _), trio.open_nursery() as nursery:
        await first.put(record(some[0].node_id, 1))
        late = DhtRecordStore(some[2], dialler_of(some[2], some), SWARM, judge)
        await nursery.start(late.run)
        await some[2].connect(some[0].addresses())
        await until(lambda: late.stored() == 1)
        nursery.cancel_scope.cancel()


async def test_those_who_begin_later_become_neighbours() -> None:
    options = RecordStoreOptions(meet_interval_s=0.1)
    async with hosts(3) as some, trio.open_nursery() as nursery:
        await connect_all(some)
        found = []
        for host in some:
            found.append(DhtRecordStore(host, dialler_of(host, some), SWARM, judge, options))
            await nursery.start(found[-1].run)
            await trio.sleep(0.2)
        await until(lambda: [each.neighbours() for each in found] == [2, 2, 2])
        nursery.cancel_scope.cancel()


async def test_a_node_that_is_not_connected_is_dialled_by_the_dialler_alone() -> None:
    async with hosts(3) as some, stores(some) as (first, _, third):
        await first.put(record(some[0].node_id, 1))
        for other in some[:2]:
            await some[2].disconnect(other.node_id)
        await until(lambda: not some[2].connected_nodes())
        assert await third.get(some[0].node_id, PATIENCE_S) == record(some[0].node_id, 1)
        assert some[2].connected_nodes()


def test_keys_are_short_enough_to_be_looked_for() -> None:
    assert len(key_of(NodeId("12D3KooW" + "x" * 44))) == 40
