"""A network in memory: the twins of `ports.Host` and `ports.ControlStream`, without sockets or threads.

Streams lose nothing and keep order, and end when either side closes or a node crashes. What the twin promises
is checked against the real one by `control_stream_conformance`. Time is trio's, so a mock clock rules it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from kvasir_node.ports import CONTROL_PROTOCOL
from kvasir_proto.errors import ConfigurationInvalid, KvasirError, RemoteProtocolError, TransportUnavailable
from kvasir_proto.ids import NodeId, is_node_id

QUEUE_FRAMES_MAX: Final = 16
SEND_TIMEOUT_S: Final = 10.0
DIAL_TIMEOUT_S: Final = 10.0

Handler = Callable[[NodeId, "MemoryStream"], Awaitable[None]]


class MemoryStream:
    """One end of a stream; ``node_id`` is at the other."""

    def __init__(
        self,
        node_id: NodeId,
        outgoing: trio.MemorySendChannel[bytes],
        incoming: trio.MemoryReceiveChannel[bytes],
    ) -> None:
        self.node_id = node_id
        self._outgoing = outgoing
        self._incoming = incoming

    async def send(self, body: bytes) -> None:
        """See `ports.ControlStream`."""
        try:
            with trio.fail_after(SEND_TIMEOUT_S):
                await self._outgoing.send(bytes(body))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise TransportUnavailable("the stream has ended") from None
        except trio.TooSlowError:
            self.end()
            raise TransportUnavailable("the other side does not take what is sent to it") from None

    async def receive(self, timeout_s: float) -> bytes:
        """See `ports.ControlStream`."""
        try:
            with trio.fail_after(timeout_s):
                return await self._incoming.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise TransportUnavailable("the stream has ended") from None
        except trio.TooSlowError:
            raise TransportUnavailable(f"nothing came for {timeout_s:g} s") from None

    async def close(self) -> None:
        """See `ports.ControlStream`."""
        self.end()
        await trio.lowlevel.checkpoint()

    def end(self) -> None:
        """What `close` does, where nobody can wait."""
        self._outgoing.close()
        self._incoming.close()


def stream_pair(first: NodeId, second: NodeId) -> tuple[MemoryStream, MemoryStream]:
    """The two ends of one stream: the one ``first`` holds, the one ``second`` holds."""
    there_in, there_out = trio.open_memory_channel[bytes](QUEUE_FRAMES_MAX)
    back_in, back_out = trio.open_memory_channel[bytes](QUEUE_FRAMES_MAX)
    return MemoryStream(second, there_in, back_out), MemoryStream(first, back_in, there_out)


class MemoryHost:
    """One node in a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, node_id: NodeId, address: str) -> None:
        self._network = network
        self._node_id = node_id
        self._address = address
        self.dialled: list[str] = []
        """Every address that `connect` was given, in order."""
        self._connected: set[NodeId] = set()

    @property
    def node_id(self) -> NodeId:
        """See `ports.Host`."""
        return self._node_id

    def addresses(self) -> tuple[str, ...]:
        """See `ports.Host`."""
        return (self._address,)

    async def connect(self, address: str | Sequence[str]) -> NodeId:
        """See `ports.Host`."""
        addresses = (address,) if isinstance(address, str) else tuple(address)
        self.dialled.extend(addresses)
        node_id = _node_of(addresses)
        if node_id == self._node_id:
            raise ConfigurationInvalid("the address of this node itself")
        await self._network.check_reachable(self._node_id, node_id)
        self._connected.add(node_id)
        return node_id

    def is_connected(self, node_id: NodeId) -> bool:
        """See `ports.Host`."""
        return node_id in self._connected and self._network.is_reachable(self._node_id, node_id)

    async def open_stream(self, node_id: NodeId, protocol: str = CONTROL_PROTOCOL) -> MemoryStream:
        """See `ports.Host`."""
        await self._network.check_reachable(self._node_id, node_id)
        self._connected.add(node_id)
        return self._network.open_stream(self._node_id, node_id, protocol)

    def set_stream_handler(
        self,
        handler: Handler,
        protocol: str = CONTROL_PROTOCOL,
        *,
        streams_per_node_max: int | None = None,
    ) -> None:
        """See `ports.Host`. From the first handler on others reach this node; streams are not counted."""
        self._network.serve(self._node_id, handler, protocol)


class MemoryNetwork:
    """Who can reach whom, and the streams between them."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._handlers: dict[NodeId, dict[str, Handler]] = {}
        self._cut: set[frozenset[NodeId]] = set()
        self._streams: list[tuple[frozenset[NodeId], MemoryStream, MemoryStream]] = []
        self._n_hosts = 0

    def host(self, node_id: NodeId) -> MemoryHost:
        """A place for a node; others reach it once it serves."""
        self._n_hosts += 1
        return MemoryHost(self, node_id, f"/ip4/10.0.0.{self._n_hosts}/tcp/4001/p2p/{node_id}")

    def serve(self, node_id: NodeId, handler: Handler, protocol: str = CONTROL_PROTOCOL) -> None:
        """From now on streams of this protocol to this node are served."""
        self._handlers.setdefault(node_id, {})[protocol] = handler

    def drop(self, node_id: NodeId) -> None:
        """The node is gone: its streams end, and nobody reaches it until it serves again."""
        self._handlers.pop(node_id, None)
        self._end_streams(lambda pair: node_id in pair)

    def cut(self, first: NodeId, second: NodeId) -> None:
        """No stream between the two survives, and none can be opened until `mend`."""
        self._cut.add(frozenset({first, second}))
        self._end_streams(lambda pair: pair == {first, second})

    def mend(self, first: NodeId, second: NodeId) -> None:
        """Undo `cut`."""
        self._cut.discard(frozenset({first, second}))

    def _end_streams(self, concerned: Callable[[frozenset[NodeId]], bool]) -> None:
        for pair, near, far in self._streams:
            if concerned(pair):
                near.end()
                far.end()
        self._streams = [each for each in self._streams if not concerned(each[0])]

    def is_reachable(self, here: NodeId, there: NodeId) -> bool:
        """Whether ``there`` answers ``here``."""
        return there in self._handlers and frozenset({here, there}) not in self._cut

    async def check_reachable(self, here: NodeId, there: NodeId) -> None:
        """Return when ``there`` answers; otherwise raise as late as a real dial may."""
        await trio.lowlevel.checkpoint()
        if not self.is_reachable(here, there):
            await trio.sleep(DIAL_TIMEOUT_S)
            raise TransportUnavailable(f"cannot reach node {there}")

    def open_stream(self, here: NodeId, there: NodeId, protocol: str = CONTROL_PROTOCOL) -> MemoryStream:
        """A stream, served at the other end by its handler."""
        near, far = stream_pair(here, there)
        self._streams.append((frozenset({here, there}), near, far))
        self._nursery.start_soon(self._serve, here, there, protocol, far)
        return near

    async def _serve(self, here: NodeId, there: NodeId, protocol: str, stream: MemoryStream) -> None:
        """As the real host: whatever a handler raises of ours ends the stream and nothing else."""
        handler = self._handlers.get(there, {}).get(protocol)
        try:
            if handler is not None:
                await handler(here, stream)
        except (KvasirError, RemoteProtocolError):
            pass
        finally:
            stream.end()


def _node_of(addresses: Sequence[str]) -> NodeId:
    names = set()
    for address in addresses:
        match = re.fullmatch(r"/ip4/[0-9.]+/tcp/[0-9]+/p2p/(?P<node>\w+)", address)
        if match is None or not is_node_id(match["node"]):
            raise ConfigurationInvalid(f"{address!r} is not a node's address")
        names.add(match["node"])
    if len(names) != 1:
        raise ConfigurationInvalid("addresses of exactly one node are needed")
    return NodeId(names.pop())
