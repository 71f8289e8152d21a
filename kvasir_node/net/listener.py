"""How connections come in: our own listening socket, in place of libp2p's.

libp2p 0.8.1 opens its listening sockets with SO_REUSEPORT, so a second node on the same port starts without
an error and takes half of the first one's callers; and it holds a place among its inbound connections until
the host stops, not until the connection ends, so that a node that has ever accepted `max_connections`
callers accepts no more. Both are silent. So the socket is opened here, before libp2p runs, where a port in
use is an error with a sentence, and each accepted connection is counted while it lives. A handshake costs us
milliseconds and a caller that breaks it off next to nothing: an address whose callers do so too often is
closed on without one, for a time.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Final

import structlog
import trio
from libp2p.abc import IListener
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr
from multiaddr.utils import get_thin_waist_addresses

from kvasir_node.net.token_bucket import TokenBucket
from kvasir_proto.errors import ConfigurationInvalid, PortInUse

_BACKLOG = 128
BROKEN_OFF_PER_S: Final = 2.0
BROKEN_OFF_BURST: Final = 32.0
"""How often callers of one address may break off their handshake: many nodes may share an address."""
ADDRESSES_MAX: Final = 1024
"""Addresses whose broken off handshakes are counted; the one that began longest ago is forgotten first."""
log = structlog.get_logger(__name__)

Admit = Callable[[RawConnection], Awaitable[None]]
"""Does the handshake on an accepted connection and returns when the connection has ended."""


def open_listening_socket(host: str, port: int, last_port: int = 0) -> trio.SocketListener:
    """A socket that listens at an IP address and port; port 0 takes the last port if it is free, else any.

    Raises `PortInUse` when the port is taken, `ConfigurationInvalid` when the address cannot be listened at.
    """
    if not port and last_port:
        with contextlib.suppress(PortInUse, ConfigurationInvalid):  # for one below 1024 it may lack the right
            return open_listening_socket(host, last_port)
    address = ipaddress.ip_address(host)
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    plain = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of a daemon that just stopped linger on the port for a minute; they are not in the way.
        # This lets nobody share the port: on Linux that takes SO_REUSEPORT on both sockets.
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            plain.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        plain.bind((host, port))
        plain.listen(_BACKLOG)
    except OSError as error:
        plain.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} of {host} is in use by another program: choose another with --listen-port "
                "or listen.port in kvasir.toml (0 takes any that is free)"
            ) from None
        raise ConfigurationInvalid(
            f"cannot listen at {host} port {port}: {error.strerror} (--listen-host, listen.host)"
        ) from error
    plain.setblocking(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(plain))


def reachable_addresses(listener: trio.SocketListener) -> tuple[Multiaddr, ...]:
    """The addresses others can dial to reach this socket.

    A wildcard is no address: libp2p would advertise 0.0.0.0 literally. It becomes the addresses of the
    machine's interfaces; loopback only if there is no other.
    """
    host, port = listener.socket.getsockname()[:2]
    family = "ip6" if listener.socket.family == socket.AF_INET6 else "ip4"
    bound = Multiaddr(f"/{family}/{host}/tcp/{port}")
    if not ipaddress.ip_address(host).is_unspecified:
        return (bound,)
    interfaces = get_thin_waist_addresses(bound)
    loopback = "::1" if family == "ip6" else "127.0.0.1"
    return tuple(interfaces) or (Multiaddr(f"/{family}/{loopback}/tcp/{port}"),)


class BoundTcp(TCP):
    """libp2p's TCP transport for dialling, with a listening socket that already exists."""

    def __init__(self, listener: trio.SocketListener, admit: Admit, connections_max: int) -> None:
        super().__init__()
        self._listener = _BoundListener(listener, admit, connections_max)

    def create_listener(self, _handler: object) -> _BoundListener:
        """The one listener. libp2p's handler is left out: it never gives a connection's place back."""
        return self._listener


class Callers:
    """Who may try a handshake, by where it calls from. Times are seconds on a clock that never goes back."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        self._refused_until_s: dict[str, float] = {}

    def may_call(self, address: str, now_s: float) -> bool:
        """Whether a caller from there is worth a handshake now."""
        return now_s >= self._refused_until_s.get(address, now_s)

    def note_broken_off(self, address: str, now_s: float) -> None:
        """One from there broke its handshake off."""
        if address not in self._buckets:
            if len(self._buckets) >= ADDRESSES_MAX:
                oldest = next(iter(self._buckets))
                del self._buckets[oldest]
                self._refused_until_s.pop(oldest, None)
            self._buckets[address] = TokenBucket(BROKEN_OFF_PER_S, BROKEN_OFF_BURST, now_s)
        wait_s = self._buckets[address].take(now_s)
        if wait_s > 0.0:
            self._refused_until_s[address] = now_s + wait_s


class _BoundListener(IListener):
    def __init__(self, listener: trio.SocketListener, admit: Admit, connections_max: int) -> None:
        self._listener = listener
        self._admit = admit
        self._places = trio.CapacityLimiter(connections_max)
        self._callers = Callers()
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self._started = False

    async def listen(self, _address: Multiaddr) -> None:
        """Begin to accept. The socket knows where it listens."""
        self._started = True
        # A system task, as libp2p's own: it must outlive the call and end in `close`, whoever calls that.
        trio.lowlevel.spawn_system_task(self._serve)
        await trio.lowlevel.checkpoint()

    async def _serve(self) -> None:
        try:
            with self._scope:
                await trio.serve_listeners(self._accept, [self._listener])
        finally:
            self._ended.set()

    async def _accept(self, stream: trio.SocketStream) -> None:
        """Serve one connection; trio closes it when this returns. Nothing a stranger sends may raise here."""
        place = object()
        address = _address_of(stream)
        if not self._callers.may_call(address, trio.current_time()):
            log.info("connection_refused", address=address, reason="too many handshakes were broken off")
            return
        try:
            self._places.acquire_on_behalf_of_nowait(place)
        except trio.WouldBlock:
            log.warning("connection_refused", reason="too many inbound connections")
            return
        try:
            await self._admit(RawConnection(TrioTCPStream(stream), False))
        except Exception as error:  # whatever libp2p raises about what a stranger sent
            self._callers.note_broken_off(address, trio.current_time())
            log.debug("connection_refused", reason=f"{type(error).__name__}: {error}")
        finally:
            self._places.release_on_behalf_of(place)

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        """The addresses to dial."""
        return reachable_addresses(self._listener)

    async def close(self) -> None:
        """Stop accepting, end the connections that were accepted, and free the port."""
        self._scope.cancel()
        if self._started:
            await self._ended.wait()
        await self._listener.aclose()


def _address_of(stream: trio.SocketStream) -> str:
    """The other end's IP address; empty where it has gone already."""
    try:
        return str(stream.socket.getpeername()[0])
    except OSError:
        return ""
