"""Libp2p hosts on loopback that are connected with each other, with the services of a test around them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.net.dialler import Dialler
from kvasir_node.net.host import HostOptions, Libp2pHost
from kvasir_node.net.identity import NodeIdentity
from kvasir_proto.ids import SwarmDigest

SWARM = SwarmDigest(bytes(range(32)))
OTHER_SWARM = SwarmDigest(bytes(32))
PATIENCE_S = 20.0


@contextlib.asynccontextmanager
async def hosts(count: int) -> AsyncIterator[list[Libp2pHost]]:
    """Hosts that are not connected yet."""
    async with contextlib.AsyncExitStack() as stack:
        options = HostOptions(handshake_timeout_s=PATIENCE_S)
        yield [
            await stack.enter_async_context(Libp2pHost(NodeIdentity(Ed25519PrivateKey.generate()), options))
            for _ in range(count)
        ]


async def connect_all(some: list[Libp2pHost]) -> None:
    for index, host in enumerate(some):
        for other in some[:index]:
            await host.connect(other.addresses())


def dialler_of(host: Libp2pHost, others: list[Libp2pHost]) -> Dialler:
    """A dialler that was told of the others."""
    dialler = Dialler(host)
    for other in others:
        dialler.learn(other.node_id, other.addresses(), "told")
    return dialler


async def until(condition: object) -> None:
    assert callable(condition)
    with trio.fail_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - libp2p has no event for it
            await trio.sleep(0.01)
