"""HTTP by clients that are slow, greedy, gone or talk nonsense: each costs itself only."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import hypothesis.strategies as st
import pytest
import trio
import trio.testing
from hypothesis import given, settings

from kvasir_node.gateway import http_server
from kvasir_node.gateway.http_messages import HttpHead, HttpReply, HttpRequest
from kvasir_node.gateway.http_server import HttpLimits, HttpServer
from kvasir_node.gateway.refusal import Refusal
from tests.node.gateway.http_client import HttpClient

LIMITS = HttpLimits()


class Echo:
    """Answers with the request's body; some paths are special."""

    def __init__(self) -> None:
        self.answered: list[str] = []
        self.cancelled_at: list[float] = []

    def check(self, head: HttpHead) -> None:
        if head.path == "/forbidden":
            raise Refusal(403, "no")

    async def answer(self, request: HttpRequest, reply: HttpReply) -> None:
        self.answered.append(request.head.path)
        special: dict[str, Callable[[HttpReply], Awaitable[None]]] = {
            "/wait": self._wait,
            "/pour": self._pour,
            "/crash": self._crash,
            "/halfway": self._halfway,
        }
        if request.head.path == "/slow":
            await trio.sleep(1)
        if request.head.path in special:
            await special[request.head.path](reply)
        else:
            await reply.send(200, (("Content-Type", "text/plain"),), request.body)

    async def _wait(self, reply: HttpReply) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled_at.append(trio.current_time())

    async def _pour(self, reply: HttpReply) -> None:
        try:
            await reply.start(200, ())
            while True:
                await reply.write(b"drop")
        finally:
            self.cancelled_at.append(trio.current_time())

    async def _crash(self, reply: HttpReply) -> None:
        raise ZeroDivisionError

    async def _halfway(self, reply: HttpReply) -> None:
        await reply.start(200, ())
        await reply.write(b"half")
        raise Refusal(500, "broken")


@contextlib.asynccontextmanager
async def connected(
    server: HttpServer,
    pair: Callable[[], tuple[trio.abc.Stream, trio.abc.Stream]] = trio.testing.memory_stream_pair,
) -> AsyncIterator[HttpClient]:
    async with trio.open_nursery() as nursery:
        ours, theirs = pair()
        nursery.start_soon(server.serve_connection, theirs)
        yield HttpClient(ours)
        nursery.cancel_scope.cancel()


async def everything(stream: trio.abc.ReceiveStream) -> bytes:
    return b"".join([bytes(each) async for each in stream])


async def test_one_connection_many_requests(autojump_clock: trio.testing.MockClock) -> None:
    async with connected(HttpServer(Echo(), wall_time=lambda: 0)) as client:
        first = await client.ask("POST", "/a?b=c", b"one")
        assert (first.status, first.body) == (200, b"one")
        assert first.headers["date"] == "Thu, 01 Jan 1970 00:00:00 GMT"
        assert first.headers["x-content-type-options"] == "nosniff"
        assert not [name for name in first.headers if name.startswith("access-control")]
        second = await client.ask("HEAD", "/a")
        assert (second.status, second.body, second.headers["content-length"]) == (200, b"", "0")
        assert (await client.ask("GET", "/crash")).status == 500
        assert (await client.ask("POST", "/a", b"still here")).body == b"still here"


async def test_requests_sent_ahead_are_answered_in_order(autojump_clock: trio.testing.MockClock) -> None:
    async with connected(HttpServer(Echo())) as client:
        request = b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n%d"
        await client.stream.send_all(b"".join(request % number for number in range(3)))
        got = b""
        while got.count(b"HTTP/1.1 200") < 3 or not got.endswith(b"2"):
            got += await client.stream.receive_some(1 << 16)
        bodies = [part[:1] for part in got.split(b"\r\n\r\n")[1:]]
        assert bodies == [b"0", b"1", b"2"]


async def test_who_sends_slowly_is_not_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    async def drip(client: HttpClient, data: bytes, interval_s: float) -> bytes:
        """Send a byte now and then, and say what came of it."""
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    for index in range(len(data)):
                        await client.stream.send_all(data[index : index + 1])
                        await trio.sleep(interval_s)

            nursery.start_soon(send)
            got = await everything(client.stream)
            nursery.cancel_scope.cancel()
        return got

    head = b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
    for before, data, patience_s in ((b"", head, LIMITS.head_s), (head, b"x" * 99, LIMITS.body_s)):
        async with connected(HttpServer(Echo())) as client:
            started = trio.current_time()
            if before:
                await client.stream.send_all(before)
            got = await drip(client, data, 0.9)
            assert got.startswith(b"HTTP/1.1 408 ")
            assert trio.current_time() - started <= patience_s + LIMITS.linger_s + 1


async def test_an_idle_connection_ends_without_a_word(autojump_clock: trio.testing.MockClock) -> None:
    async with connected(HttpServer(Echo())) as client:
        assert await everything(client.stream) == b""
        assert LIMITS.idle_s <= trio.current_time() <= LIMITS.idle_s + 1


async def test_who_reads_nothing_is_gone(autojump_clock: trio.testing.MockClock) -> None:
    echo = Echo()
    async with connected(HttpServer(echo), trio.testing.lockstep_stream_pair) as client:
        with trio.move_on_after(5):
            await client.send("GET", "/pour")
            await client.head()
        started = trio.current_time()
        await trio.sleep(LIMITS.write_s + 1)
        (cancelled_at,) = echo.cancelled_at
        assert cancelled_at - started <= LIMITS.write_s


@pytest.mark.parametrize("half", [False, True])
async def test_who_closes_is_gone_at_once(autojump_clock: trio.testing.MockClock, half: bool) -> None:
    echo = Echo()
    server = HttpServer(echo)
    async with connected(server) as client:
        await client.send("GET", "/wait")
        await trio.sleep(100)
        assert echo.cancelled_at == []
        if half:
            assert isinstance(client.stream, trio.StapledStream)
            await client.stream.send_eof()
        else:
            await client.stream.aclose()
        await trio.sleep(0.5)
        assert echo.cancelled_at == [100]
        assert server.n_connections == 0


async def test_who_sends_far_ahead_is_let_go(autojump_clock: trio.testing.MockClock) -> None:
    echo = Echo()
    async with connected(HttpServer(echo)) as client:
        await client.send("GET", "/wait")
        await client.stream.send_all(b"x" * LIMITS.ahead_bytes_max)
        await trio.sleep(1)
        assert echo.cancelled_at == []
        await client.stream.send_all(b"xx")
        assert await everything(client.stream) == b""
        assert echo.cancelled_at == [1]


async def test_there_are_so_many_connections_and_no_more(autojump_clock: trio.testing.MockClock) -> None:
    server = HttpServer(Echo(), HttpLimits(connections_max=2, refusing_max=1))
    async with connected(server) as first, connected(server) as second:
        await first.send("GET", "/wait")
        await second.send("GET", "/wait")
        await trio.testing.wait_all_tasks_blocked()
        assert server.n_connections == 2
        async with connected(server) as third:
            await trio.testing.wait_all_tasks_blocked()
            async with connected(server) as fourth:
                assert await everything(fourth.stream) == b""
            refused = await everything(third.stream)
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"Retry-After: 1\r\n" in refused
        await first.stream.aclose()
        await trio.sleep(1)
        async with connected(server) as third:
            assert (await third.ask("GET", "/a")).status == 200


async def test_the_longest_idle_connection_makes_room(autojump_clock: trio.testing.MockClock) -> None:
    server = HttpServer(Echo(), HttpLimits(connections_max=3))
    async with connected(server) as busy, connected(server) as idle, connected(server) as idle_for_less:
        await busy.send("GET", "/wait")
        assert (await idle.ask("GET", "/a")).status == 200
        await trio.sleep(1)
        assert (await idle_for_less.ask("GET", "/a")).status == 200
        await trio.sleep(1)
        async with connected(server) as new:
            assert (await new.ask("GET", "/a")).status == 200
            assert server.n_connections == 3
            assert await everything(idle.stream) == b""
            assert (await idle_for_less.ask("GET", "/a")).status == 200
            assert trio.current_time() == 2


class FromAfar:
    """Streams that come from an address, as far as the server can tell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.address = ""
        monkeypatch.setattr(http_server, "_client_of", lambda _: self.address)


async def test_one_address_has_so_many_connections_and_others_have_theirs(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = FromAfar(monkeypatch)
    server = HttpServer(Echo(), HttpLimits(connections_of_address_max=2))
    async with contextlib.AsyncExitStack() as stack:

        async def connect(address: str) -> HttpClient:
            where.address = address
            client = await stack.enter_async_context(connected(server))
            await trio.testing.wait_all_tasks_blocked()
            return client

        busy, idle = await connect("2001:db8::1"), await connect("2001:db8::2")
        await busy.send("GET", "/wait")
        # The idle one makes room; where both are busy there is none.
        third = await connect("2001:db8::3")
        assert await everything(idle.stream) == b""
        await third.send("GET", "/wait")
        await trio.testing.wait_all_tasks_blocked()
        fourth = await connect("2001:db8::4")
        assert (await everything(fourth.stream)).startswith(b"HTTP/1.1 503 ")
        for _ in range(3):
            assert (await (await connect("192.0.2.1")).ask("GET", "/a")).status == 200
            own = await connect("127.0.0.1")
            await own.send("GET", "/wait")
        assert server.n_connections == 2 + 2 + 3


async def test_a_server_that_ends_answers_what_it_was_asked(autojump_clock: trio.testing.MockClock) -> None:
    echo = Echo()
    server = HttpServer(echo)
    async with connected(server) as idle, connected(server) as busy, connected(server) as late:
        assert (await idle.ask("GET", "/a")).headers.get("connection") is None
        await busy.send("POST", "/slow", b"said")
        await late.send("GET", "/wait")
        await trio.testing.wait_all_tasks_blocked()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.end, 3.0)
            answer = await busy.receive()
            assert (answer.body, answer.headers["connection"]) == (b"said", "close")
            assert await everything(busy.stream) == b""
            assert await everything(idle.stream) == b""
        # Who does not come to an end is waited for only so long.
        assert trio.current_time() == 3
        assert echo.cancelled_at == []
        assert server.n_connections == 1


async def test_all_bodies_together_have_a_bound(autojump_clock: trio.testing.MockClock) -> None:
    server = HttpServer(Echo(), HttpLimits(bodies_bytes_max=100))
    async with connected(server) as client:
        for _ in range(3):  # what was answered has its room back
            assert (await client.ask("POST", "/a", b"x" * 60)).status == 200
        async with connected(server) as waiting, connected(server) as gone:
            await waiting.send("POST", "/wait", b"x" * 60)
            await trio.testing.wait_all_tasks_blocked()
            refused = await gone.ask("POST", "/a", b"x" * 60)
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            await waiting.stream.aclose()
            await trio.testing.wait_all_tasks_blocked()
        assert (await client.ask("POST", "/a", b"x" * 60)).status == 200


async def test_a_refused_head_leaves_its_body_unread(autojump_clock: trio.testing.MockClock) -> None:
    async with connected(HttpServer(Echo())) as client:
        await client.send("POST", "/forbidden", b"x" * 1000)
        refused = await client.receive()
        assert (refused.status, refused.headers["connection"]) == (403, "close")
        assert refused.document["error"]["type"] == "permission_error"


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_that_is_too_long(autojump_clock: trio.testing.MockClock, is_chunked: bool) -> None:
    echo = Echo()
    async with connected(HttpServer(echo, HttpLimits(body_bytes_max=10))) as client:
        if is_chunked:
            how = b"Transfer-Encoding: chunked\r\n\r\n6\r\nabcdef\r\n5\r\nabcde\r\n0\r\n\r\n"
        else:
            how = b"Expect: 100-continue\r\nContent-Length: 11\r\n\r\n"
        await client.stream.send_all(b"POST /a HTTP/1.1\r\nHost: localhost\r\n" + how)
        got = await everything(client.stream)
        assert got.startswith(b"HTTP/1.1 413 ")
        assert echo.answered == []


async def test_who_asks_before_it_sends_is_told_to(autojump_clock: trio.testing.MockClock) -> None:
    async with connected(HttpServer(Echo())) as client:
        await client.stream.send_all(
            b"POST /a HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert (await client.stream.receive_some(100)).startswith(b"HTTP/1.1 100 ")
        await client.stream.send_all(b"ok")
        assert (await client.stream.receive_some(1000)).endswith(b"ok")


async def test_what_breaks_after_its_head_has_no_end(autojump_clock: trio.testing.MockClock) -> None:
    async with connected(HttpServer(Echo())) as client:
        await client.stream.send_all(b"GET /halfway HTTP/1.1\r\nHost: a\r\n\r\n")
        got = await everything(client.stream)
        assert b"half" in got
        assert not got.endswith(b"0\r\n\r\n")


NONSENSE = [
    (b"\r\nnonsense\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\n\r\n", 400),  # no Host
    (b"GET /a HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
    (b"GET /a HTTP/1.1\r\nHost: a\r\nX: " + b"x" * LIMITS.head_bytes_max + b"\r\n\r\n", 431),
    (b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    (b"GET /a HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999999999999999999\r\n\r\n", 400),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
]


@pytest.mark.parametrize("said, status", NONSENSE)
async def test_nonsense_is_told_so(autojump_clock: trio.testing.MockClock, said: bytes, status: int) -> None:
    async with connected(HttpServer(Echo())) as client:
        await client.stream.send_all(said)
        got = await everything(client.stream)
        assert got.startswith(b"HTTP/1.1 %d " % status), got


@pytest.mark.parametrize(
    "said, status",
    [
        *[(said, status) for said, status in NONSENSE if said.startswith((b"GET", b"POST"))],
        (b"GET /forbidden HTTP/1.1\r\nHost: a\r\n\r\n", 403),
        (b"GET /crash HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 500),
        (b"GET /a HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n", 408),
        (b"GET /a HTTP/0.1\r\nHost: a\r\n\r\n", 505),
    ],
)
async def test_a_head_is_refused_as_anything_else(
    autojump_clock: trio.testing.MockClock, said: bytes, status: int
) -> None:
    async with connected(HttpServer(Echo())) as client:
        await client.stream.send_all(b"HEAD" + said[said.index(b" ") :])
        got = await everything(client.stream)
        assert got.startswith(b"HTTP/1.1 %d " % status), got


WORDS = [
    b"GET ",
    b"POST ",
    b"HEAD ",
    b"/a",
    b"/pour",
    b" HTTP/1.1",
    b" HTTP/0.1",
    b"\r\n",
    b"Host: a",
    b"\r\n\r\n",
    b"0",
    b"5",
]
MORE = [b"Content-Length: 3", b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"abc", b"\0", b"\xff"]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(WORDS + MORE), max_size=25))
def test_whatever_is_said_the_connection_ends_and_nothing_raises(said: list[bytes]) -> None:
    async def say() -> None:
        server = HttpServer(Echo(), HttpLimits(ahead_bytes_max=0))
        ours, theirs = trio.testing.memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve_connection, theirs)
            with contextlib.suppress(trio.BrokenResourceError):
                for each in said:
                    await ours.send_all(each)
            await trio.sleep(1)
            await ours.aclose()
        assert server.n_connections == 0
        assert trio.current_time() < 200

    trio.run(say, clock=trio.testing.MockClock(autojump_threshold=0))
