"""This node among others: it listens, dials, and carries control streams, by libp2p.

Decides who may connect (anyone who proves an Ed25519 key, within limits) and for how long a silent
connection is believed. What is said on the streams it does not know. It is a context manager: inside, the
node can be reached; after, the port is free and every stream has ended.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, Final

import structlog
import trio
from libp2p import new_host
from libp2p.abc import INotifee
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.exceptions import SwarmException
from libp2p.network.health.ping_probe import ping_connection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr
from multiaddr.exceptions import MultiaddrError

from kvasir_node.net.control_stream import Libp2pControlStream
from kvasir_node.net.identity import NodeIdentity
from kvasir_node.net.idle_connections import ConnectionUse
from kvasir_node.net.listener import BoundTcp, open_listening_socket, reachable_addresses
from kvasir_node.net.muxer import use_uninterrupted_yamux
from kvasir_node.ports import CONTROL_PROTOCOL
from kvasir_node.telemetry import restore_library_levels
from kvasir_proto.errors import ConfigurationInvalid, KvasirError, RemoteProtocolError, TransportUnavailable
from kvasir_proto.ids import NodeId, is_node_id
from kvasir_proto.limits import SWARM_FRAME_SIZE_MAX, WORKERS_MAX

NODES_KNOWN_MAX: Final = 4 * WORKERS_MAX
"""Nodes whose addresses are remembered for the next dial; the one connected longest ago gives way."""

log = structlog.get_logger(__name__)

# Importing libp2p takes the handlers from its logger, cuts it off from the root, so that warnings reach
# standard error unformatted, past ours, and sets its level. What is shown is decided in `telemetry`.
logging.getLogger("libp2p").propagate = True
restore_library_levels()
# It calls every stream that could not be opened an error; whoever asked for it is told, and says so if it is.
logging.getLogger("libp2p.host.basic_host").setLevel(logging.CRITICAL)
# A node that was stopped for a moment is below its mark for minutes, and each check says so.
logging.getLogger("libp2p.network.health.monitor").setLevel(logging.ERROR)
# This module sets its own level, and reports twice a minute.
logging.getLogger("libp2p.network.auto_connector").setLevel(logging.NOTSET)

StreamHandler = Callable[[NodeId, Libp2pControlStream], Awaitable[None]]
"""Serves one stream another node opened; the stream ends when it returns. See
`Libp2pHost.set_stream_handler`.
"""

ConnectionWatcher = Callable[[NodeId, bool], None]
"""Told of a node, and whether it is connected now. See `Libp2pHost.watch_connections`."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How a host listens, and how much it gives strangers."""

    listen_host: str = "127.0.0.1"
    """An IP address of this machine, or a wildcard."""
    listen_port: int = 0
    last_port: int = 0
    """Listened at instead of any free port, if it is free; 0 where none is known."""
    announce: tuple[str, ...] = ()
    """Addresses to give to others instead of those listened at, for a port that somebody forwards."""
    connections_max: int = 512
    """Of them, an eighth is kept for those we dial, so that strangers cannot shut us in."""
    streams_per_node_max: int = 16
    """Streams one node may have open to us at a time, whatever they are for; but see
    `Libp2pHost.set_stream_handler`.
    """
    frame_size_max: int = SWARM_FRAME_SIZE_MAX
    dial_timeout_s: float = 10.0
    """For connecting to a node at all its addresses together, and for opening a stream."""
    handshake_timeout_s: float = 5.0
    first_frame_timeout_s: float = 10.0
    """A stream another node opened and then says nothing on is reset after this."""
    health_interval_s: float = 5.0
    """A connection is probed this often, and dropped when a probe is not answered for as long."""


class Libp2pHost:
    """A libp2p host, as an async context manager. `ports.Host` states what its calls guarantee.

    Entering raises `PortInUse` when the port to listen at is taken.
    """

    def __init__(self, identity: NodeIdentity, options: HostOptions | None = None) -> None:
        self._identity = identity
        self._options = HostOptions() if options is None else options
        self._handlers: dict[str, StreamHandler] = {}
        self._watchers: list[ConnectionWatcher] = []
        self._addresses: tuple[str, ...] = ()
        self._known: dict[NodeId, tuple[str, ...]] = {}
        self._dialling: dict[NodeId, trio.Lock] = {}
        self._streams_of: Counter[NodeId] = Counter()
        self._allowances: dict[str, int] = {}
        """Protocols whose streams have a bound of their own for each node."""
        self._allowed: Counter[tuple[NodeId, str]] = Counter()
        self._conversations: Counter[NodeId] = Counter()
        self._used_at_s: dict[NodeId, float] = {}
        self._stack = AsyncExitStack()
        self._host: Any = None
        self._swarm: Any = None
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()

    @property
    def node_id(self) -> NodeId:
        """Our own name."""
        return self._identity.node_id

    def addresses(self) -> tuple[str, ...]:
        """Addresses at which others reach us, our name included; never a wildcard, never port 0."""
        return self._addresses

    def connected_nodes(self) -> tuple[NodeId, ...]:
        """The nodes with a live connection, in the order of their names."""
        return tuple(sorted(NodeId(str(each)) for each in self._swarm.connections if self._live(each)))

    def connection_uses(self) -> tuple[ConnectionUse, ...]:
        """The nodes with a live connection: whether one of our streams is open, and when one was last."""
        now_s = trio.current_time()
        return tuple(
            ConnectionUse(each, self._conversations[each] > 0, self._used_at_s.setdefault(each, now_s))
            for each in self.connected_nodes()
        )

    def is_connected(self, node_id: NodeId) -> bool:
        """Whether there is a connection to that node that is not known to be dead."""
        return bool(self._live(libp2p_id_of(node_id)))

    def set_stream_handler(
        self,
        handler: StreamHandler,
        protocol: str = CONTROL_PROTOCOL,
        *,
        streams_per_node_max: int | None = None,
    ) -> None:
        """Serve the streams of this protocol that others open with `handler`.

        It is called, in a task of its own, once the first message is there to be received. When it returns
        the stream is closed; when it raises the stream is reset, the error logged, and the node goes on. With
        `streams_per_node_max` these streams do not count among a node's others, and have that bound.
        """
        self._handlers[protocol] = handler
        if streams_per_node_max is not None:
            self._allowances[protocol] = streams_per_node_max
        if self._host is not None and protocol != CONTROL_PROTOCOL:
            self._host.set_stream_handler(protocol, partial(self._serve, protocol))

    @property
    def libp2p(self) -> Any:
        """libp2p's own host, for the services of it that this package runs."""
        return self._host

    def watch_connections(self, watcher: ConnectionWatcher) -> None:
        """Call `watcher` when a node is connected, and when its last connection has ended. It must not raise.

        For as long as the host lives; called in the middle of the network's work.
        """
        self._watchers.append(watcher)

    async def connect(self, address: str | Sequence[str]) -> NodeId:
        """Be connected to the node at this address, or at one of these, which all end in its name.

        Addresses are tried in order until the node has proved its name at one of them. Raises
        `TransportUnavailable` after `dial_timeout_s` at most, and `ConfigurationInvalid` for what is no
        address.
        """
        addresses = (address,) if isinstance(address, str) else tuple(address)
        node_id = _node_of(addresses)
        if node_id == self.node_id:
            raise ConfigurationInvalid(f"{addresses[0]} is the address of this node itself")
        self._known.pop(node_id, None)
        self._known[node_id] = addresses
        while len(self._known) > NODES_KNOWN_MAX:
            del self._known[next(iter(self._known))]
        await self._ensure_connected(node_id)
        return node_id

    async def open_stream(self, node_id: NodeId, protocol: str = CONTROL_PROTOCOL) -> Libp2pControlStream:
        """A new stream to a node that is connected, or that `connect` was given addresses of.

        Raises `TransportUnavailable` when it cannot be had within twice `dial_timeout_s`.
        """
        await self._ensure_connected(node_id)
        try:
            with trio.fail_after(self._options.dial_timeout_s):
                stream = await self._host.new_stream(libp2p_id_of(node_id), [protocol])
        except trio.TooSlowError:
            # It has a connection and does not answer on it. The next attempt starts from a new one.
            await self.disconnect(node_id)
            raise TransportUnavailable(
                f"node {node_id} did not answer the opening of a stream in time"
            ) from None
        except Exception as error:  # libp2p raises many types here, none documented
            log.debug("stream_not_opened", node=node_id, protocol=protocol, error=repr(error))
            raise TransportUnavailable(
                f"no stream to node {node_id}: the connection broke, or it does not speak {protocol}"
            ) from error
        control = Libp2pControlStream(stream, node_id, self._options.frame_size_max)
        self._tasks.start_soon(self._converse, node_id, control)
        return control

    @property
    def port(self) -> int:
        """The TCP port it listens at."""
        return self._port

    async def disconnect(self, node_id: NodeId) -> None:
        """Drop every connection to that node. It may connect again."""
        for connection in self._live(libp2p_id_of(node_id)):
            try:
                await connection.close()
            except Exception as error:  # it was broken already
                log.debug("connection_close_failed", reason=f"{type(error).__name__}: {error}")
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Libp2pHost:
        options = self._options
        socket = open_listening_socket(options.listen_host, options.listen_port, options.last_port)
        try:
            self._start(socket)
        except BaseException:
            await socket.aclose()
            raise
        try:
            self._nursery = await self._stack.enter_async_context(trio.open_nursery())
            await self._stack.enter_async_context(self._host.run([self._bound_address]))
            if not self._swarm.listeners:
                raise TransportUnavailable("libp2p does not listen, and does not say why")
        except BaseException:
            await self._stop()
            raise
        log.info("host_started", node=self.node_id, addresses=self._addresses)
        return self

    def _start(self, socket: trio.SocketListener) -> None:
        options = self._options
        private_key = Ed25519PrivateKey.from_bytes(self._identity.private_bytes)
        key_pair = KeyPair(private_key, private_key.get_public_key())
        inbound_max = options.connections_max - options.connections_max // 8
        announced = [Multiaddr(each) for each in options.announce] or list(reachable_addresses(socket))
        self._bound_address = reachable_addresses(socket)[0]
        self._port = int(socket.socket.getsockname()[1])
        self._host = new_host(
            key_pair=key_pair,
            # Left to its defaults, a host accepts a caller that speaks no encryption at all.
            sec_opt={
                NOISE_PROTOCOL: NoiseTransport(key_pair, noise_privkey=create_noise_key_pair().private_key)
            },
            transports=[BoundTcp(socket, self._admit, inbound_max)],
            connection_config=ConnectionConfig(
                max_connections=options.connections_max,
                high_watermark=options.connections_max,
                low_watermark=0,
                min_connections=0,
                inbound_upgrade_timeout=options.handshake_timeout_s,
                outbound_upgrade_timeout=options.handshake_timeout_s,
                # Without this a connection whose other end was stopped or unplugged is never noticed.
                enable_health_monitoring=True,
                health_initial_delay=options.health_interval_s,
                health_warmup_window=0.0,
                health_check_interval=options.health_interval_s,
                ping_timeout=options.health_interval_s,
                abort_connection_on_ping_failure=True,
                # A slow node is not a sick one: never replace a connection because of its latency.
                min_health_threshold=0.0,
                min_ping_success_rate=0.0,
                max_ping_latency=float("inf"),
            ),
            announce_addrs=announced,
            # What others say our address is comes from strangers, and would be passed on to others.
            disable_identify_address_discovery=True,
        )
        self._swarm = self._host.get_network()
        # Who wants to be connected tries again itself; libp2p's three attempts cost 0.7 s a dead address.
        self._swarm.retry_config = RetryConfig(max_retries=0)
        use_uninterrupted_yamux(self._swarm)
        self._swarm.auto_connector = _NoAutoConnector(self._swarm)
        self._swarm.dial_peer = _dial_nobody
        self._swarm.register_notifee(_ConnectionNotifee(self._connection_changed))
        self._addresses = tuple(str(each) for each in self._host.get_addrs())
        for protocol in sorted({CONTROL_PROTOCOL, *self._handlers}):
            self._host.set_stream_handler(protocol, partial(self._serve, protocol))
        self._negotiate = self._swarm.common_stream_handler
        self._swarm.set_stream_handler(self._guard)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        cancelled = error is not None and _has_cancelled(error)
        await self._close_libp2p()
        if cancelled:
            # It may be the nursery's own cancellation, which only the nursery can catch.
            return await self._stack.__aexit__(kind, error, traceback)
        # Not handed to the nursery, which would wrap the caller's exception in a group.
        await self._stack.aclose()
        return None

    async def _stop(self) -> None:
        await self._close_libp2p()
        await self._stack.aclose()

    async def _close_libp2p(self) -> None:
        """End the streams, the connections and the listener: leaving libp2p's `run` leaves the port open."""
        with trio.CancelScope(shield=True, deadline=trio.current_time() + 2 * self._options.dial_timeout_s):
            try:
                await self._host.close()
            except Exception:
                log.exception("host_close_failed")
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    @property
    def _tasks(self) -> trio.Nursery:
        assert self._nursery is not None, "the host is used outside its context"
        return self._nursery

    def _live(self, libp2p_id: ID) -> list[Any]:
        return [each for each in self._swarm.get_connections(libp2p_id) if not each.is_closed]

    def _connection_changed(self, node_id: NodeId, connected: bool) -> None:
        if is_node_id(node_id) and connected == self.is_connected(node_id):
            if connected:
                self._used_at_s[node_id] = trio.current_time()
            else:
                self._used_at_s.pop(node_id, None)
            for watcher in self._watchers:
                watcher(node_id, connected)

    async def _ensure_connected(self, node_id: NodeId) -> None:
        # One dial at a time for each node: two would make two connections.
        dialling = self._dialling.setdefault(node_id, trio.Lock())
        try:
            async with dialling:
                await self._dial_unless_connected(node_id)
        finally:
            if not dialling.locked():  # or another waits, and holds it already
                self._dialling.pop(node_id, None)

    async def _dial_unless_connected(self, node_id: NodeId) -> None:
        libp2p_id = libp2p_id_of(node_id)
        if self._live(libp2p_id):
            return
        addresses = self._known.get(node_id, ())
        if not addresses:
            raise TransportUnavailable(f"node {node_id} is not connected and has no known address")
        failures = []
        deadline = trio.current_time() + self._options.dial_timeout_s
        # libp2p would try one address of them all and then refuse the node for a minute; so each is
        # dialled by itself. Addresses it heard of before are forgotten: the node may have moved to a
        # new port.
        self._swarm.peerstore.clear_addrs(libp2p_id)
        self._swarm.unblock_peer(libp2p_id)
        for index, address in enumerate(addresses):
            share_s = (deadline - trio.current_time()) / (len(addresses) - index)
            failures.append(f"{address}: {await self._dial(address, libp2p_id, share_s)}")
            if self._live(libp2p_id):
                return
        raise TransportUnavailable("cannot reach node " + node_id + " at " + "; ".join(failures))

    async def _dial(self, address: str, libp2p_id: ID, timeout_s: float) -> str:
        """Try one address; 'connected', or why not."""
        try:
            with trio.fail_after(timeout_s):
                connection = await self._swarm.dial_addr(Multiaddr(address), libp2p_id)
                # A node that has no place for us finishes the handshake first and closes then. Only an answer
                # proves that it kept the connection.
                answer = await ping_connection(connection, ping_timeout=timeout_s)
            if not answer.success:
                await connection.close()
                return "the connection was closed at once"
        except trio.TooSlowError:
            return f"no answer within {timeout_s:.1f} s"
        except Exception as error:  # libp2p raises many types here, none documented
            return _reason_of(error)
        return "connected"

    async def _admit(self, connection: Any) -> None:
        """Do the handshake with a caller and wait until its connection ends."""
        muxed = await self._swarm.upgrade_inbound_raw_conn(connection, self._bound_address)
        if is_node_id(str(muxed.peer_id)):
            await muxed.event_closed.wait()
        else:
            log.info("connection_refused", reason="the caller's key is not Ed25519")
            await muxed.close()

    async def _guard(self, stream: Any) -> None:
        """Serve any stream, of whatever protocol, so that nothing sent on it can end the host.

        An exception here would end libp2p's service and with it the node; three bytes that are not UTF-8
        where libp2p expects the name of a protocol are enough.
        """
        node_id = NodeId(str(stream.muxed_conn.peer_id))
        refused = self._streams_of[node_id] >= self._options.streams_per_node_max
        if refused:
            log.warning("stream_refused", node=node_id, reason="too many streams")
        self._streams_of[node_id] += 1
        try:
            if not refused:
                await self._negotiate(stream)
        except Exception as error:
            refused = True
            log.info("stream_refused", node=node_id, reason=f"{type(error).__name__}: {error}")
        finally:
            self._streams_of[node_id] -= 1
            if not self._streams_of[node_id]:
                del self._streams_of[node_id]
        if refused:
            try:
                await stream.reset()
            except Exception as error:  # the connection is gone, and the stream with it
                log.debug("stream_reset_failed", reason=f"{type(error).__name__}: {error}")

    async def _converse(self, node_id: NodeId, control: Libp2pControlStream) -> None:
        """Carry a stream of whole messages; while it lasts its connection is in use."""
        self._conversations[node_id] += 1
        try:
            await control.run()
        finally:
            self._conversations[node_id] -= 1
            if not self._conversations[node_id]:
                del self._conversations[node_id]
            self._used_at_s[node_id] = trio.current_time()

    async def _serve(self, protocol: str, stream: Any) -> None:
        """Serve a stream that another node opened, within what it may have open of this protocol."""
        node_id = NodeId(str(stream.muxed_conn.peer_id))
        allowance = self._allowances.get(protocol)
        if allowance is None:
            await self._serve_messages(node_id, protocol, stream)
            return
        key = (node_id, protocol)
        if self._allowed[key] >= allowance:
            log.warning("stream_refused", node=node_id, reason=f"too many streams of {protocol}")
            await stream.reset()
            return
        self._streams_of[node_id] -= 1
        self._allowed[key] += 1
        try:
            await self._serve_messages(node_id, protocol, stream)
        finally:
            self._streams_of[node_id] += 1
            self._allowed[key] -= 1
            if not self._allowed[key]:
                del self._allowed[key]

    async def _serve_messages(self, node_id: NodeId, protocol: str, stream: Any) -> None:
        """Serve a stream of whole messages."""
        control = Libp2pControlStream(stream, node_id, self._options.frame_size_max)
        self._tasks.start_soon(self._converse, node_id, control)
        try:
            await control.wait_first(self._options.first_frame_timeout_s)
            handler = self._handlers.get(protocol)
            if handler is None:
                raise TransportUnavailable("this node serves no streams yet")
            await handler(node_id, control)
            await control.close()
        except RemoteProtocolError as error:
            log.warning("stream_refused", node=node_id, code=error.code, reason=error.reason)
            await control.abort()
        except KvasirError as error:
            log.info("stream_ended", node=node_id, reason=str(error))
            await control.abort()
        except Exception:
            log.exception("stream_handler_failed", node=node_id)
            await control.abort()
        # The stream counts as one of the node's until it is really gone.
        await control.wait_finished()


class _NoAutoConnector(AutoConnector):
    """Never starts. libp2p's own dials the addresses strangers told it of, up to half the highest
    watermark.
    """

    async def start(self) -> None:
        await trio.lowlevel.checkpoint()


class _ConnectionNotifee(INotifee):
    """Passes on what libp2p says of connections, and nothing else of what it says."""

    def __init__(self, changed: ConnectionWatcher) -> None:
        self._changed = changed

    async def connected(self, _network: Any, connection: Any) -> None:
        await trio.lowlevel.checkpoint()
        self._changed(NodeId(str(connection.muxed_conn.peer_id)), True)

    async def disconnected(self, _network: Any, connection: Any) -> None:
        await trio.lowlevel.checkpoint()
        self._changed(NodeId(str(connection.muxed_conn.peer_id)), False)

    async def opened_stream(self, _network: Any, _stream: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def closed_stream(self, _network: Any, _stream: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def listen(self, _network: Any, _address: Any) -> None:
        await trio.lowlevel.checkpoint()

    async def listen_close(self, _network: Any, _address: Any) -> None:
        await trio.lowlevel.checkpoint()


async def _dial_nobody(libp2p_id: ID) -> list[Any]:
    """What libp2p does when it wants a stream to a node that is not connected: it does without.

    Its own dial tries one address, one from whomever, and then refuses the node for a minute.
    """
    await trio.lowlevel.checkpoint()
    raise SwarmException(f"node {libp2p_id} is not connected, and nobody asked to dial it")


@lru_cache(maxsize=4 * NODES_KNOWN_MAX)
def libp2p_id_of(node_id: NodeId) -> ID:
    """A node's id in libp2p's form. Remembered: to decode one takes as long as to do something with it."""
    return ID.from_base58(node_id)


def _node_of(addresses: tuple[str, ...]) -> NodeId:
    """The one node all these addresses end in."""
    names = set()
    for address in addresses:
        try:
            name = Multiaddr(address).value_for_protocol("p2p")
        except (MultiaddrError, ValueError, LookupError):
            name = None
        if not isinstance(name, str) or not is_node_id(name):
            raise ConfigurationInvalid(
                f"{address!r} is not a node's address, such as /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW..."
            )
        names.add(name)
    if len(names) != 1:
        raise ConfigurationInvalid("addresses of exactly one node are needed, not of " + str(len(names)))
    return NodeId(names.pop())


def _reason_of(error: BaseException) -> str:
    """Why a dial failed: what the system said, where libp2p's exception goes back to that."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(sorted({_reason_of(each) for each in error.exceptions}))
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _has_cancelled(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(trio.Cancelled) is not None
    return isinstance(error, trio.Cancelled)
