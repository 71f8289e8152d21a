"""Real libp2p hosts on the loopback interface: what the network package promises, and each trap it avoids."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p import generate_new_rsa_identity, new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr

from kvasir_node.net.control_stream import Libp2pControlStream
from kvasir_node.net.host import HostOptions, Libp2pHost
from kvasir_node.net.identity import NodeIdentity
from kvasir_node.net.idle_connections import IdleConnections, IdleOptions
from kvasir_node.ports import CONTROL_PROTOCOL
from kvasir_proto.errors import (
    ConfigurationInvalid,
    LocalProtocolError,
    PortInUse,
    RemoteProtocolError,
    TransportUnavailable,
)
from kvasir_proto.ids import NodeId
from tests.loopback.free_port import free_port

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

PATIENCE_S = 20.0
"""How long a condition may take to come true on a busy machine. Nothing waits for this to pass."""


def identity() -> NodeIdentity:
    return NodeIdentity(Ed25519PrivateKey.generate())


def host(**options: object) -> Libp2pHost:
    return Libp2pHost(identity(), HostOptions(**options))  # type: ignore[arg-type]


async def echo(_node_id: NodeId, stream: Libp2pControlStream) -> None:
    """Sends back whatever comes until the other side ends."""
    while True:
        try:
            body = await stream.receive(PATIENCE_S)
        except TransportUnavailable:
            return
        await stream.send(body)


@asynccontextmanager
async def pair(
    **options: object,
) -> AsyncIterator[tuple[Libp2pHost, Libp2pHost]]:
    """Two hosts; the second serves echo and the first knows its address."""
    async with host() as first, host(**options) as second:
        second.set_stream_handler(echo)
        await first.connect(second.addresses())
        yield first, second


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - libp2p has no event for it
            await trio.sleep(0.005)


def port_of(one: Libp2pHost) -> int:
    return int(one.addresses()[0].split("/")[4])


async def test_frames_travel_both_ways_whole_and_in_order() -> None:
    async with pair() as (first, second):
        stream = await first.open_stream(second.node_id)
        bodies = [b"", b"x", b"y" * 100_000, b"z" * (2 << 20)]
        for body in bodies:
            await stream.send(body)
        assert [await stream.receive(PATIENCE_S) for _ in bodies] == bodies
        await stream.close()
        await stream.wait_finished()


async def test_each_side_knows_who_the_other_is() -> None:
    met: list[NodeId] = []
    heard = trio.Event()

    async def remember(node_id: NodeId, stream: Libp2pControlStream) -> None:
        assert stream.node_id == node_id
        met.append(node_id)
        heard.set()

    async with host() as first, host() as second:
        second.set_stream_handler(remember)
        assert await first.connect(second.addresses()[0]) == second.node_id
        stream = await first.open_stream(second.node_id)
        assert stream.node_id == second.node_id
        await stream.send(b"hello")
        with trio.fail_after(PATIENCE_S):
            await heard.wait()
        assert met == [first.node_id]
        assert first.connected_nodes() == (second.node_id,)
        assert second.is_connected(first.node_id)


async def test_three_hosts_and_many_streams_at_once() -> None:
    async with pair() as (first, second), host() as third:
        third.set_stream_handler(echo)
        await first.connect(third.addresses())

        async def converse(node_id: NodeId, number: int) -> None:
            stream = await first.open_stream(node_id)
            body = bytes([number]) * 30_000
            await stream.send(body)
            assert await stream.receive(PATIENCE_S) == body
            await stream.close()

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(converse, second.node_id, number)
                nursery.start_soon(converse, third.node_id, number)


async def test_addresses_are_real_and_name_the_node() -> None:
    async with host(listen_host="0.0.0.0") as wildcard:
        for address in wildcard.addresses():
            assert address.endswith(f"/p2p/{wildcard.node_id}")
            assert "/0.0.0.0/" not in address
            assert "/tcp/0/" not in address
        async with host() as other:
            assert await other.connect(wildcard.addresses()) == wildcard.node_id


async def test_announced_addresses_replace_the_listening_ones() -> None:
    async with host(announce=("/ip4/192.0.2.7/tcp/4001",)) as one:
        assert one.addresses() == (f"/ip4/192.0.2.7/tcp/4001/p2p/{one.node_id}",)


async def test_hosts_on_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 in this Python")
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with host(listen_host="::1") as one, host() as other:
        assert one.addresses()[0].startswith("/ip6/::1/tcp/")
        assert await other.connect(one.addresses()) == one.node_id


async def test_a_caller_without_encryption_is_refused() -> None:
    keys = create_new_key_pair()
    careless = new_host(key_pair=keys, sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(keys)})
    async with host() as ours:
        ours.set_stream_handler(echo)
        async with careless.run([]):
            with pytest.raises(Exception, match="security"):
                await careless.get_network().dial_addr(
                    Multiaddr(ours.addresses()[0]), ID.from_base58(ours.node_id)
                )
            assert ours.connected_nodes() == ()
            await careless.close()


async def test_a_caller_whose_key_is_not_ed25519_is_refused() -> None:
    keys = generate_new_rsa_identity()
    noise = {NOISE_PROTOCOL: NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)}
    stranger = new_host(key_pair=keys, sec_opt=noise)
    async with host() as ours:
        ours.set_stream_handler(echo)
        async with stranger.run([]):
            connection = await stranger.get_network().dial_addr(
                Multiaddr(ours.addresses()[0]), ID.from_base58(ours.node_id)
            )
            with trio.fail_after(PATIENCE_S):
                await connection.event_closed.wait()
            await stranger.close()
        async with host() as good:
            await good.connect(ours.addresses())


async def test_a_dead_address_before_a_good_one_costs_no_connection() -> None:
    async with host() as first, host() as second:
        second.set_stream_handler(echo)
        dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{second.node_id}"
        with pytest.raises(TransportUnavailable, match="cannot reach"):
            await first.connect(dead)
        # libp2p itself would now refuse this node for a minute, and would try the first address only.
        assert await first.connect([dead, *second.addresses()]) == second.node_id
        stream = await first.open_stream(second.node_id)
        await stream.send(b"still here")
        assert await stream.receive(PATIENCE_S) == b"still here"


async def test_an_impostor_at_the_address_is_not_connected_to() -> None:
    async with host() as first, host() as impostor:
        wanted = identity().node_id
        address = impostor.addresses()[0].replace(impostor.node_id, wanted)
        with pytest.raises(TransportUnavailable, match=wanted):
            await first.connect(address)
        assert not first.is_connected(wanted)


async def test_a_node_that_moved_to_another_port_is_found_there() -> None:
    moving = identity()
    async with host() as first:
        for _ in range(2):
            async with Libp2pHost(moving) as second:
                second.set_stream_handler(echo)
                await first.connect(second.addresses())
                stream = await first.open_stream(moving.node_id)
                await stream.send(b"here")
                assert await stream.receive(PATIENCE_S) == b"here"
            await until(lambda: not first.is_connected(moving.node_id))


async def test_open_stream_connects_again_by_itself() -> None:
    async with pair() as (first, second):
        await first.disconnect(second.node_id)
        await until(lambda: not first.is_connected(second.node_id))
        stream = await first.open_stream(second.node_id)
        await stream.send(b"again")
        assert await stream.receive(PATIENCE_S) == b"again"


async def test_a_node_nobody_told_us_about_is_unavailable() -> None:
    async with host() as one:
        with pytest.raises(TransportUnavailable, match="no known address"):
            await one.open_stream(identity().node_id)


async def test_what_is_remembered_for_dialling_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir_node.net.host.NODES_KNOWN_MAX", 2)
    port = free_port()
    async with host() as one, host() as two:
        await one.connect(two.addresses())
        dead = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity().node_id}" for _ in range(2)]
        for address in dead:
            with pytest.raises(TransportUnavailable, match="cannot reach"):
                await one.connect(address)
        assert [address for (address,) in one._known.values()] == dead
        await one.connect(two.addresses())
        assert list(one._known)[-1] == two.node_id
        assert len(one._known) == 2
        assert one._dialling == {}


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/127.0.0.1/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
    ],
)
async def test_what_is_no_address_is_said_to_be_none(address: str) -> None:
    async with host() as one:
        with pytest.raises(ConfigurationInvalid, match="address"):
            await one.connect(address)


async def test_addresses_of_two_nodes_or_of_oneself_are_refused() -> None:
    async with host() as one, host() as two, host() as three:
        with pytest.raises(ConfigurationInvalid, match="exactly one"):
            await one.connect([*two.addresses(), *three.addresses()])
        with pytest.raises(ConfigurationInvalid, match="this node itself"):
            await one.connect(one.addresses())


async def test_a_taken_port_is_a_sentence_with_the_way_out() -> None:
    async with host() as one:
        port = port_of(one)
        with pytest.raises(PortInUse, match=f"{port}.*--listen-port.*listen.port") as refusal:
            await Libp2pHost(identity(), HostOptions(listen_port=port)).__aenter__()
        assert refusal.value.exit_code == 5


async def test_a_port_shared_by_another_libp2p_host_is_taken() -> None:
    """libp2p listens with SO_REUSEPORT: two of its hosts share a port, and its callers, without an error."""
    other = new_host()
    async with other.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        port = int(other.get_transport_addrs()[0].value_for_protocol("tcp"))
        with pytest.raises(PortInUse):
            await Libp2pHost(identity(), HostOptions(listen_port=port)).__aenter__()
        await other.close()


async def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    with pytest.raises(ConfigurationInvalid, match="listen-host"):
        await Libp2pHost(identity(), HostOptions(listen_host="192.0.2.7")).__aenter__()


async def test_the_port_is_free_as_soon_as_the_host_is_left() -> None:
    async with host() as other:
        port = free_port()
        for _ in range(3):
            async with Libp2pHost(identity(), HostOptions(listen_port=port)) as one:
                await other.connect(one.addresses())
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0


async def test_the_port_is_free_after_a_cancelled_host() -> None:
    port = free_port()
    with trio.CancelScope() as scope:
        async with Libp2pHost(identity(), HostOptions(listen_port=port)):
            scope.cancel()
            await trio.Event().wait()
    assert scope.cancelled_caught
    async with Libp2pHost(identity(), HostOptions(listen_port=port)):
        pass


async def test_an_error_inside_comes_out_as_it_is() -> None:
    with pytest.raises(ConfigurationInvalid, match="no group around me"):
        async with host():
            raise ConfigurationInvalid("no group around me")


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 40,
        b"\xff" * 70_000,
        b"\x13/multistream/1.0.0\n\x04\xff\xfe\xfd\n",
    ],
)
async def test_garbage_on_the_port_hurts_nobody(garbage: bytes) -> None:
    async with pair() as (first, second):
        for _ in range(3):
            caller = await trio.open_tcp_stream("127.0.0.1", port_of(second))
            try:
                await caller.send_all(garbage)
                await caller.send_eof()
                with trio.move_on_after(PATIENCE_S):
                    while await caller.receive_some(4096):
                        pass
            except trio.BrokenResourceError:
                pass  # refused already
            await caller.aclose()
        stream = await first.open_stream(second.node_id)
        await stream.send(b"alive")
        assert await stream.receive(PATIENCE_S) == b"alive"


@pytest.mark.parametrize("name", [b"\xff\xfe\xfd\n", b"no newline", b"/ipfs/ping/1.0.0\n", b"ls\n", b"\n"])
async def test_garbage_where_a_protocol_is_named_does_not_end_the_host(name: bytes) -> None:
    """libp2p lets such an exception end the whole host: three bytes from anybody, and the node is gone."""
    keys = create_new_key_pair()
    noise = {NOISE_PROTOCOL: NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)}
    stranger = new_host(key_pair=keys, sec_opt=noise)
    async with pair() as (first, second), stranger.run([]):
        await stranger.get_network().dial_addr(
            Multiaddr(second.addresses()[0]), ID.from_base58(second.node_id)
        )
        stream = await stranger.get_network().new_stream(ID.from_base58(second.node_id))
        await stream.write(b"\x13/multistream/1.0.0\n" + bytes([len(name)]) + name)
        await stream.close_write()
        await stranger.close()
        again = await first.open_stream(second.node_id)
        await again.send(b"alive")
        assert await again.receive(PATIENCE_S) == b"alive"


async def test_places_of_ended_connections_are_given_back() -> None:
    """libp2p keeps them until the host stops; after that many callers it accepts none."""
    async with host(connections_max=4) as ours:
        for _ in range(8):
            async with host() as caller:
                await caller.connect(ours.addresses())
        await until(lambda: not ours.connected_nodes())


async def test_too_many_connections_are_refused_and_the_others_live() -> None:
    async with pair(connections_max=1) as (first, second):
        async with host() as late:
            with pytest.raises(TransportUnavailable):
                await late.connect(second.addresses())
        stream = await first.open_stream(second.node_id)
        await stream.send(b"alive")
        assert await stream.receive(PATIENCE_S) == b"alive"


async def test_one_node_cannot_take_all_the_streams() -> None:
    async with pair(streams_per_node_max=4) as (first, second):
        held: list[Libp2pControlStream] = []

        async def take_all() -> None:
            while True:
                stream = await first.open_stream(second.node_id)
                await stream.send(b"hold")
                assert await stream.receive(PATIENCE_S) == b"hold"
                held.append(stream)

        with pytest.raises(TransportUnavailable):
            await take_all()
        assert 1 <= len(held) <= 4
        async with host() as other:
            await other.connect(second.addresses())
            stream = await other.open_stream(second.node_id)
            await stream.send(b"mine")
            assert await stream.receive(PATIENCE_S) == b"mine"
        for stream in held:
            await stream.close()
            await stream.wait_finished()
        stream = await first.open_stream(second.node_id)
        await stream.send(b"free again")
        assert await stream.receive(PATIENCE_S) == b"free again"


async def test_streams_of_a_protocol_with_a_bound_of_its_own_do_not_count_among_the_others() -> None:
    async with pair(streams_per_node_max=2) as (first, second):
        second.set_stream_handler(echo, "/kvasir/test/1", streams_per_node_max=5)

        async def hold(protocol: str = "/kvasir/test/1") -> Libp2pControlStream:
            stream = await first.open_stream(second.node_id, protocol)
            await stream.send(b"hold")
            assert await stream.receive(PATIENCE_S) == b"hold"
            return stream

        held = [await hold() for _ in range(5)]
        with pytest.raises(TransportUnavailable):
            await hold()
        held.append(await hold(CONTROL_PROTOCOL))
        for stream in held:
            await stream.close()
            await stream.wait_finished()
        await until(lambda: not second._streams_of and not second._allowed)
        await hold()


async def test_a_stream_on_which_nothing_is_said_is_reset() -> None:
    async with pair(first_frame_timeout_s=0.05) as (first, second):
        stream = await first.open_stream(second.node_id)
        with pytest.raises(TransportUnavailable):
            await stream.receive(PATIENCE_S)
        with pytest.raises(TransportUnavailable):
            await stream.receive(PATIENCE_S)


async def test_silence_is_unavailable_and_the_stream_goes_on() -> None:
    async with pair() as (first, second):
        stream = await first.open_stream(second.node_id)
        with pytest.raises(TransportUnavailable, match="sent nothing"):
            await stream.receive(0.01)
        await stream.send(b"now")
        assert await stream.receive(PATIENCE_S) == b"now"


async def test_an_oversized_frame_is_a_protocol_error_of_whoever_sends_it() -> None:
    async with pair() as (first, second):
        stream = await first.open_stream(second.node_id)
        with pytest.raises(LocalProtocolError):
            await stream.send(bytes((2 << 20) + 1))
    raised: list[Exception] = []

    async def read_two(_node_id: NodeId, stream: Libp2pControlStream) -> None:
        await stream.receive(PATIENCE_S)
        try:
            await stream.receive(PATIENCE_S)
        except RemoteProtocolError as error:
            raised.append(error)
            raise

    async with host() as first, host(frame_size_max=10) as second:
        second.set_stream_handler(read_two)
        await first.connect(second.addresses())
        stream = await first.open_stream(second.node_id)
        await stream.send(b"short")
        await stream.send(b"much too long")
        with pytest.raises(TransportUnavailable):
            await stream.receive(PATIENCE_S)
        assert [error.code for error in raised if isinstance(error, RemoteProtocolError)] == ["oversize"]


async def test_a_handler_that_fails_costs_one_stream() -> None:
    calls = 0

    async def fail_once(node_id: NodeId, stream: Libp2pControlStream) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        await echo(node_id, stream)

    async with pair() as (first, second):
        second.set_stream_handler(fail_once)
        doomed = await first.open_stream(second.node_id)
        await doomed.send(b"now")
        with pytest.raises(TransportUnavailable):
            await doomed.receive(PATIENCE_S)
        stream = await first.open_stream(second.node_id)
        await stream.send(b"alive")
        assert await stream.receive(PATIENCE_S) == b"alive"


async def test_cancelling_anything_leaves_the_other_streams_whole() -> None:
    """With libp2p alone one cancelled write kills the connection and everything on it."""
    async with pair(streams_per_node_max=64) as (first, second):
        keeper = await first.open_stream(second.node_id)
        (connection,) = first._swarm.get_connections(ID.from_base58(second.node_id))
        for attempt in range(25):
            with trio.move_on_after(0.001 * attempt):
                stream = await first.open_stream(second.node_id)
                for _ in range(4):
                    await stream.send(bytes(2 << 20))
                await stream.receive(PATIENCE_S)
            body = bytes([attempt]) * 50_000
            await keeper.send(body)
            assert await keeper.receive(PATIENCE_S) == body
        assert first._swarm.get_connections(ID.from_base58(second.node_id)) == [connection]


async def test_a_side_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that cannot be written holds every stream of the connection, so it must not be for ever."""
    monkeypatch.setattr("kvasir_node.net.muxer.WRITE_TIMEOUT_S", 0.1)
    async with pair() as (first, second):
        stream = await first.open_stream(second.node_id)
        await stream.send(b"x")
        assert await stream.receive(PATIENCE_S) == b"x"
        (connection,) = first._swarm.get_connections(ID.from_base58(second.node_id))

        async def never(_data: bytes) -> None:
            await trio.Event().wait()

        monkeypatch.setattr(connection.muxed_conn.secured_conn, "write", never)
        await stream.send(b"y")
        with pytest.raises(TransportUnavailable, match=r"does not take|ended|broke"):
            await stream.receive(PATIENCE_S)
        await until(lambda: not first.is_connected(second.node_id))
        monkeypatch.undo()
        again = await first.open_stream(second.node_id)
        await again.send(b"z")
        assert await again.receive(PATIENCE_S) == b"z"


async def test_a_silent_connection_is_dropped() -> None:
    async with host(health_interval_s=0.1) as first, host() as second:
        await first.connect(second.addresses())
        (connection,) = second._swarm.get_connections(ID.from_base58(first.node_id))

        async def swallow(_data: bytes) -> None:
            await trio.lowlevel.checkpoint()

        # As if the other machine had lost its network: the connection stays, nothing comes through it.
        connection.muxed_conn._write_frame = swallow
        await until(lambda: not first.is_connected(second.node_id))


async def test_what_was_queued_is_sent_before_the_stream_ends() -> None:
    received: list[bytes] = []
    ended = trio.Event()

    async def collect(_node_id: NodeId, stream: Libp2pControlStream) -> None:
        try:
            while True:
                received.append(await stream.receive(PATIENCE_S))
        except TransportUnavailable:
            ended.set()

    async with pair() as (first, second):
        second.set_stream_handler(collect)
        stream = await first.open_stream(second.node_id)
        bodies = [bytes([number]) * 50_000 for number in range(10)]
        for body in bodies:
            await stream.send(body)
        await stream.close()
        await stream.close()
        with trio.fail_after(PATIENCE_S):
            await ended.wait()
        assert received == bodies
        with pytest.raises(TransportUnavailable, match="closed on this side"):
            await stream.send(b"late")
        with pytest.raises(TransportUnavailable, match="closed on this side"):
            await stream.receive(PATIENCE_S)


async def test_the_end_of_a_host_ends_the_streams_of_the_others() -> None:
    async with host() as first:
        async with host() as second:
            second.set_stream_handler(echo)
            await first.connect(second.addresses())
            stream = await first.open_stream(second.node_id)
            await stream.send(b"x")
            assert await stream.receive(PATIENCE_S) == b"x"
        with pytest.raises(TransportUnavailable):
            await stream.receive(PATIENCE_S)
        await until(lambda: not first.is_connected(second.node_id))
        with pytest.raises(TransportUnavailable):
            await first.open_stream(second.node_id)


async def test_nobody_is_dialled_that_we_were_not_told_to_dial() -> None:
    """libp2p connects, by itself, to whatever its address book has, and strangers write in that."""
    async with host() as first, host() as second, host() as third:
        for heard_of in (second, third):
            first._swarm.peerstore.add_addrs(
                ID.from_base58(heard_of.node_id), [Multiaddr(heard_of.addresses()[0])], 60
            )
        await first._swarm.auto_connector.maybe_connect()
        assert first.connected_nodes() == ()


async def test_libp2ps_services_dial_nobody() -> None:
    async with host() as first, host() as second:
        second_id = ID.from_base58(second.node_id)
        first._swarm.peerstore.add_addrs(second_id, [Multiaddr(second.addresses()[0])], 60)
        with pytest.raises(SwarmException, match="nobody asked"):
            await first.libp2p.new_stream(second_id, [CONTROL_PROTOCOL])
        assert first.connected_nodes() == ()
        await first.connect(second.addresses())
        await first.libp2p.new_stream(second_id, [CONTROL_PROTOCOL])


async def test_connections_are_watched() -> None:
    seen: list[tuple[NodeId, bool]] = []
    async with host() as first, host() as second:
        for each in (first, second):
            each.watch_connections(lambda node_id, connected: seen.append((node_id, connected)))
        await first.connect(second.addresses())
        await until(lambda: len(seen) == 2)
        assert sorted(seen) == sorted([(first.node_id, True), (second.node_id, True)])
        seen.clear()
        await first.disconnect(second.node_id)
        await until(lambda: len(seen) == 2)
        assert sorted(seen) == sorted([(first.node_id, False), (second.node_id, False)])


async def test_protocols_have_handlers_of_their_own() -> None:
    async def shout(_node_id: NodeId, stream: Libp2pControlStream) -> None:
        await stream.send((await stream.receive(PATIENCE_S)).upper())
        await stream.wait_finished()

    async with pair() as (first, second):
        second.set_stream_handler(shout, "/kvasir/test/1")
        for protocol, answer in ((CONTROL_PROTOCOL, b"x"), ("/kvasir/test/1", b"X")):
            stream = await first.open_stream(second.node_id, protocol)
            await stream.send(b"x")
            assert await stream.receive(PATIENCE_S) == answer
            await stream.close()


async def test_a_host_that_speaks_another_protocol_is_unavailable() -> None:
    keys = create_new_key_pair()
    noise = {NOISE_PROTOCOL: NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)}
    other = new_host(key_pair=keys, sec_opt=noise)
    async with host() as ours, other.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        node_id = await ours.connect(str(other.get_addrs()[0]))
        with pytest.raises(TransportUnavailable, match="no stream to node"):
            await ours.open_stream(node_id)
        assert CONTROL_PROTOCOL not in other.get_mux().get_protocols()
        await other.close()


def test_libp2p_does_not_write_past_our_logging() -> None:
    assert logging.getLogger("libp2p").propagate
    assert logging.getLogger("libp2p").handlers == []


async def test_a_connection_is_in_use_while_a_stream_of_ours_is_open_and_idle_ones_are_let_go_of() -> None:
    async with host() as ours, host() as talking, host() as idle:
        for each in (talking, idle):
            each.set_stream_handler(echo)
            await ours.connect(each.addresses())
        stream = await ours.open_stream(talking.node_id)
        await stream.send(b"x")
        assert await stream.receive(PATIENCE_S) == b"x"
        uses = {each.node_id: each for each in ours.connection_uses()}
        assert {each: use.is_busy for each, use in uses.items()} == {
            talking.node_id: True,
            idle.node_id: False,
        }
        await until(lambda: [each.is_busy for each in talking.connection_uses()] == [True])
        trimmer = IdleConnections(ours, tuple, IdleOptions(kept_max=0, idle_min_s=0.0))
        await trimmer.trim()
        await until(lambda: ours.connected_nodes() == (talking.node_id,))
        await stream.send(b"y")
        assert await stream.receive(PATIENCE_S) == b"y"
        await stream.close()
        await until(lambda: not any(each.is_busy for each in ours.connection_uses()))
        assert ours.connection_uses()[0].used_at_s > uses[talking.node_id].used_at_s
        await trimmer.trim()
        await until(lambda: not ours.connected_nodes())
