"""HTTP/1.1 over trio's streams: h11 says what bytes mean, this module how long and how much is waited for.

Every read and write has a deadline, every size and the number of connections a bound; a client that sends one
byte a second, reads nothing or never stops costs itself a connection. While an answer is made the connection
is watched: a client that closes it, be it in one direction, is gone, and who answers is cancelled at once.
What requests mean is the handler's; TLS is for a proxy in front.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Final

import h11
import trio

from kvasir_node import __version__
from kvasir_node.gateway.http_messages import ClientGone, Headers, HttpHandler, HttpHead, HttpRequest
from kvasir_node.gateway.refusal import Refusal
from kvasir_node.gateway.turns import address_group
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.telemetry import get_logger

log = get_logger()

_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one client may cost. Times in seconds."""

    connections_max: int = 256
    """Descriptors: 1024 is what a process often has. For one more, the longest idle one is closed."""
    connections_of_address_max: int = 64
    """Of one address, or one IPv6 network of 64 bits; not of this machine itself: it may be a proxy."""
    refusing_max: int = 16
    """Connections that are told at one time that there are too many; more are closed without a word."""
    head_bytes_max: int = 32 << 10
    """Of a request's first line and headers. A browser's cookies for localhost can be 8 KiB."""
    body_bytes_max: int = 4 << 20
    """A prompt of a million characters, most of them of one byte."""
    bodies_bytes_max: int = 64 << 20
    """Of all requests that are being read or answered."""
    ahead_bytes_max: int = 64 << 10
    """What a client may send of its next request while it is answered."""
    idle_s: float = 75.0
    """Between requests. OpenAI's client lets connections go after 5 s, a browser after about 60 s."""
    head_s: float = 10.0
    """From a request's first byte to the last of its head."""
    body_s: float = 30.0
    write_s: float = 30.0
    """For one piece of an answer to be taken from us."""
    linger_s: float = 2.0
    """How long is read on, so that an error reaches a client that is still sending."""


class HttpServer:
    """Connections and their requests. ``wall_time`` gives Unix time, for the `Date` header."""

    def __init__(
        self,
        handler: HttpHandler,
        limits: HttpLimits | None = None,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self._handler = handler
        self._limits = limits or HttpLimits()
        self._wall_time = wall_time
        self._n_refusing = 0
        self._connections: dict[_Connection, None] = {}
        self._none_left = trio.Event()
        """Set when the last connection of a server that ends has ended."""
        self._is_ending = False
        self._accepting = trio.CancelScope()
        self._serving = trio.CancelScope()
        self._bodies = _Bodies(self._limits.bodies_bytes_max)

    @property
    def n_connections(self) -> int:
        """Connections that are served now."""
        return len(self._connections)

    async def serve(self, listeners: Sequence[trio.SocketListener]) -> None:
        """Serve until cancelled, or ended; at most once."""
        with self._serving:
            async with open_unwrapping_nursery() as connections:
                with self._accepting:
                    await trio.serve_listeners(
                        self._serve_whatever_comes, list(listeners), handler_nursery=connections
                    )

    async def end(self, within_s: float) -> None:
        """Take no more connections, and let those that there are go after the answer at hand.

        Whoever has it not within so long is cut off; then `serve` returns.
        """
        self._is_ending = True
        self._accepting.cancel()
        for each in list(self._connections):
            if each.idle_since is not None:
                del self._connections[each]
            each.end_soon()
        if self._connections:
            with trio.move_on_after(within_s):
                await self._none_left.wait()
        self._serving.cancel()

    async def _serve_whatever_comes(self, stream: trio.abc.Stream) -> None:
        """A bug that one connection meets costs that connection; tests meet it in `serve_connection`."""
        try:
            await self.serve_connection(stream)
        except Exception:
            log.exception("gateway_connection_crashed")

    async def serve_connection(self, stream: trio.abc.Stream) -> None:
        """One connection, to its end. Nothing that a client does raises here."""
        connection = _Connection(stream, self._limits, self._wall_time, self._bodies)
        if not self._has_room_for(connection):
            await self._refuse(connection, stream)
            return
        self._connections[connection] = None
        try:
            with contextlib.suppress(ClientGone):
                await connection.serve(self._handler)
                # One that was let go of was idle: there is nothing on its way.
                if connection in self._connections:
                    await connection.linger()
        finally:
            self._connections.pop(connection, None)
            if self._is_ending and not self._connections:
                self._none_left.set()
            await trio.aclose_forcefully(stream)

    def _has_room_for(self, connection: _Connection) -> bool:
        """Whether there is room for one more from where it comes, or room was made."""
        limits, group = self._limits, connection.group
        if group is not None:
            alike = [each for each in self._connections if each.group == group]
            if len(alike) >= limits.connections_of_address_max and not self._make_room(alike):
                return False
        return self.n_connections < limits.connections_max or self._make_room(self._connections)

    def _make_room(self, among: Iterable[_Connection]) -> bool:
        """Let go of the connection that has been idle for longest, if any is; clients expect that."""
        idle = [(each.idle_since, each) for each in among if each.idle_since is not None]
        if not idle:
            return False
        _, longest = min(idle, key=lambda each: each[0])
        del self._connections[longest]
        longest.let_go()
        return True

    async def _refuse(self, connection: _Connection, stream: trio.abc.Stream) -> None:
        """Tell one client that there are too many."""
        refusal = Refusal(503, "too many connections", code="too_many_connections", retry_after_s=1.0)
        self._n_refusing += 1
        try:
            if self._n_refusing <= self._limits.refusing_max:
                with contextlib.suppress(ClientGone), trio.move_on_after(self._limits.linger_s):
                    await connection.refuse(refusal)
                    await connection.linger()
        finally:
            self._n_refusing -= 1
            await trio.aclose_forcefully(stream)


class _Bodies:
    """The bytes of all requests' bodies that are in memory."""

    def __init__(self, bytes_max: int) -> None:
        self._n_left = bytes_max

    def take(self, count: int) -> None:
        """Count bytes in. Raises `Refusal` where there is no room for them."""
        if count > self._n_left:
            raise Refusal(503, "too many long requests at once", code="too_many_requests", retry_after_s=1.0)
        self._n_left -= count

    def give_back(self, count: int) -> None:
        """Count bytes out."""
        self._n_left += count


class _Connection:
    """One connection: requests, one after another, and the reply to the one at hand."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        limits: HttpLimits,
        wall_time: Callable[[], float],
        bodies: _Bodies,
    ) -> None:
        self.idle_since: float | None = None
        """Since when no request has begun; None while there is one."""
        self._bodies = bodies
        self._n_held = 0
        """Bytes of the body at hand, counted in `_Bodies`."""
        self._waiting = trio.CancelScope()
        self._stream = stream
        self._limits = limits
        self._wall_time = wall_time
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.head_bytes_max)
        self._deadline = math.inf
        self.client = _client_of(stream)
        """The address it comes from; empty where it has none."""
        self.group = address_group(self.client)
        """What counts as one address with it."""
        self._is_last = False
        """Whether the answer at hand is the last one."""
        self._is_head_only = False
        """Whether the request at hand wants no body."""

    def let_go(self) -> None:
        """End an idle connection."""
        self._waiting.cancel()

    def end_soon(self) -> None:
        """End now if it is idle, else after the answer at hand."""
        self._is_last = True
        if self.idle_since is not None:
            self.let_go()

    async def serve(self, handler: HttpHandler) -> None:
        """Answer requests until the connection is to end. Raises `ClientGone`."""
        try:
            await self._serve(handler)
        finally:
            self._forget_body()

    async def _serve(self, handler: HttpHandler) -> None:
        while True:
            try:
                head = await self._receive_head()
                if head is None:
                    return
                handler.check(head)
                request = HttpRequest(head, await self._receive_body(head))
            except h11.RemoteProtocolError as error:
                await self.refuse(Refusal(_status_of(error), f"this is no HTTP that is spoken here: {error}"))
                return
            except Refusal as refusal:
                # A body that was not read is in the way of the next request.
                await self.refuse(refusal)
                return
            await self._answer(handler, request)
            self._forget_body()
            if (
                self._is_last
                or self._http.our_state is not h11.DONE
                or self._http.their_state is not h11.DONE
            ):
                return
            self._http.start_next_cycle()

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error, where an answer can still begin. Raises `ClientGone`."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = (("Content-Type", "application/json"), *refusal.headers())
            if self._http.their_state is not h11.DONE and not self._is_last:
                headers = (*headers, ("Connection", "close"))
            await self.send(refusal.status, headers, refusal.body())

    async def linger(self) -> None:
        """Let what was sent arrive: closing with bytes unread would take it back."""
        if self._is_last and self._http.their_state is h11.DONE and not self._http.trailing_data[0]:
            return  # there is nothing unread, and nobody to wait for
        n_left = self._limits.body_bytes_max
        with trio.move_on_after(self._limits.linger_s), contextlib.suppress(trio.BrokenResourceError):
            if isinstance(self._stream, trio.abc.HalfCloseableStream):
                await self._stream.send_eof()
            while n_left > 0 and (data := await self._stream.receive_some(_READ_BYTES)):
                n_left -= len(data)

    # --- the reply ------------------------------------------------------------------------------------------

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """See `HttpReply`."""
        await self._send(
            self._response(status, (*headers, ("Content-Length", str(len(body))))),
            *((h11.Data(data=body),) if body and not self._is_head_only else ()),
            h11.EndOfMessage(),
        )

    async def start(self, status: int, headers: Headers) -> None:
        """See `HttpReply`."""
        await self._send(self._response(status, headers))

    async def write(self, data: bytes) -> None:
        """See `HttpReply`."""
        if data and not self._is_head_only:
            await self._send(h11.Data(data=data))

    async def finish(self) -> None:
        """See `HttpReply`."""
        await self._send(h11.EndOfMessage())

    def _response(self, status: int, headers: Headers) -> h11.Response:
        return h11.Response(
            status_code=status,
            headers=[
                ("Date", formatdate(self._wall_time(), usegmt=True)),
                ("Server", f"kvasir/{__version__}"),
                ("Cache-Control", "no-store"),
                ("X-Content-Type-Options", "nosniff"),
                *((("Connection", "close"),) if self._is_last else ()),
                *headers,
            ],
        )

    async def _send(self, *events: h11.Event) -> None:
        data = b"".join(self._http.send(each) or b"" for each in events)
        if not data:
            return
        try:
            with trio.fail_after(self._limits.write_s):
                await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            raise ClientGone from None

    # --- the request ----------------------------------------------------------------------------------------

    async def _receive_head(self) -> HttpHead | None:
        """The next request's head; None when there is none, or the connection was idle for too long."""
        limits = self._limits
        has_begun = bool(self._http.trailing_data[0])
        self._deadline = trio.current_time() + (limits.head_s if has_begun else limits.idle_s)
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self.idle_since = None if has_begun else trio.current_time()
            is_more = await self._receive_more()
            self.idle_since = None
            if not is_more:
                if has_begun:
                    raise Refusal(408, "the request did not come to its end in time", code="timeout")
                return None
            if not has_begun:
                has_begun = True
                self._deadline = trio.current_time() + limits.head_s
        if not isinstance(event, h11.Request):
            return None
        self._is_head_only = event.method == b"HEAD"
        if event.http_version not in (b"1.0", b"1.1"):
            raise Refusal(505, "HTTP/1.1 is spoken here", code="http_version")
        # h11 bounds what is incomplete; a head that came at once can be as long as what is read at once.
        size = len(event.target) + sum(len(name) + len(value) + 4 for name, value in event.headers)
        if size > limits.head_bytes_max:
            raise Refusal(431, "the headers are too long", code="headers_too_long")
        headers = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers)
        path = event.target.decode("latin-1").partition("?")[0]
        return HttpHead(event.method.decode("latin-1"), path, headers, self.client)

    async def _receive_body(self, head: HttpHead) -> bytes:
        """The body of that request. Raises `Refusal` when it is too long, or too long coming."""
        limits = self._limits
        self._deadline = trio.current_time() + limits.body_s
        too_long = Refusal(413, f"a body has at most {limits.body_bytes_max} bytes", code="body_too_large")
        # Said before somebody sends it all; h11 has seen to it that it is a number.
        if int(head.header("content-length") or 0) > limits.body_bytes_max:
            raise too_long
        body = bytearray()
        while not isinstance(event := self._http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                if not await self._receive_more():
                    raise Refusal(408, "the request did not come to its end in time", code="timeout")
            elif isinstance(event, h11.Data):
                self._bodies.take(len(event.data))
                self._n_held += len(event.data)
                body += event.data
                if len(body) > limits.body_bytes_max:
                    raise too_long
            else:
                raise ClientGone
        return bytes(body)

    async def _receive_more(self) -> bool:
        """Hand h11 what comes next; False when the deadline passed before. Raises `ClientGone`."""
        with trio.move_on_at(self._deadline) as self._waiting:
            try:
                data = await self._stream.receive_some(_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise ClientGone from None
            self._http.receive_data(bytes(data))
            return True
        return False

    def _forget_body(self) -> None:
        self._bodies.give_back(self._n_held)
        self._n_held = 0

    # --- both -----------------------------------------------------------------------------------------------

    async def _answer(self, handler: HttpHandler, request: HttpRequest) -> None:
        """Have one request answered; whoever does it is cancelled when the client goes away."""
        async with open_unwrapping_nursery() as nursery:
            is_gone = False

            async def watch() -> None:
                nonlocal is_gone
                await self._wait_gone()
                is_gone = True
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await self._answer_or_refuse(handler, request)
            nursery.cancel_scope.cancel()
        if is_gone:
            raise ClientGone

    async def _answer_or_refuse(self, handler: HttpHandler, request: HttpRequest) -> None:
        try:
            await handler.answer(request, self)
        except Refusal as refusal:
            await self.refuse(refusal)
        except ClientGone:
            raise
        except Exception:
            log.exception("gateway_request_crashed", path=request.head.path)
            await self.refuse(Refusal(500, "the gateway failed; its log says how", code="internal"))

    async def _wait_gone(self) -> None:
        """Return when the client has closed, or sends far ahead of what it is answered."""
        n_ahead = 0
        while n_ahead <= self._limits.ahead_bytes_max:
            try:
                data = await self._stream.receive_some(_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not data:
                return
            n_ahead += len(data)
            self._http.receive_data(bytes(data))


def _client_of(stream: trio.abc.Stream) -> str:
    """The address at the other end, without its port; empty where there is none."""
    if isinstance(stream, trio.SocketStream):
        with contextlib.suppress(OSError):
            return str(stream.socket.getpeername()[0])
    return ""


def _status_of(error: h11.RemoteProtocolError) -> int:
    return error.error_status_hint if 400 <= error.error_status_hint < 600 else 400
