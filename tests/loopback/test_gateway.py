"""The gateway on a real TCP port: a stream to its end, and one whose client goes away in the middle."""

from __future__ import annotations

import socket
import struct

import pytest
import trio

from kvasir_node.gateway.http_messages import HttpHead
from kvasir_node.gateway.http_server import HttpServer
from tests.node.gateway.http_client import HttpClient
from tests.node.gateway.test_gateway import CHAT, body, events_of, finishes_of
from tests.node.gateway.test_http_server import Echo
from tests.node.gateway.toy_swarm import Script, ToyGateway

pytestmark = pytest.mark.loopback


async def test_a_real_socket_streams_and_its_end_is_noticed() -> None:
    toy = ToyGateway()
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(toy.server.serve, listeners)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                answer = await HttpClient(stream).ask("POST", CHAT, body(CHAT, stream=True))
                assert finishes_of(events_of(answer)) == ["stop"]
                assert toy.completions.requests[0].client == "127.0.0.1"
            toy.completions.script = Script(b"ab", interval_s=1000.0)
            for is_reset in (False, True):
                stream = await trio.open_tcp_stream("127.0.0.1", port)
                client = HttpClient(stream)
                await client.send("POST", CHAT, body(CHAT, stream=True))
                await client.head()
                if is_reset:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                left = toy.completions.next_left
                await stream.aclose()
                await left.wait()
            nursery.cancel_scope.cancel()


class Buggy(Echo):
    """Has a bug where no answer can be made of it."""

    def check(self, head: HttpHead) -> None:
        if head.path == "/bug":
            raise ZeroDivisionError


async def test_a_bug_costs_one_connection_and_no_gateway() -> None:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(HttpServer(Buggy()).serve, listeners)
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                await HttpClient(stream).send("GET", "/bug")
                assert await stream.receive_some(100) == b""
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                assert (await HttpClient(stream).ask("GET", "/a")).status == 200
            nursery.cancel_scope.cancel()
