"""The control socket: how the command line speaks to the daemon of the same home.

A Unix socket in a directory that only its owner may enter; loopback is no trust boundary, so the other end's
user id is checked as well. One request a connection, whole messages of the local family, a deadline on every
read and write. The server hands requests to an `Operator`; the client half is used by the command line.
"""

from __future__ import annotations

import codecs
import contextlib
import math
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, Protocol, TypeVar

import trio

from kvasir_node.home_lock import holder_of, is_locked
from kvasir_node.locations import Locations
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.small_file import read_small_file
from kvasir_node.telemetry import get_logger
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import (
    ConfigurationInvalid,
    DaemonUnreachable,
    EngineFailed,
    KvasirError,
    NotRunning,
    ProtocolError,
    RemoteProtocolError,
    error_of,
)
from kvasir_proto.framing import FrameReader, frame
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration
from kvasir_proto.limits import Rank, as_sentence
from kvasir_proto.messages.local import (
    LOCAL,
    EvaluateReply,
    EvaluateRequest,
    GenerateEnd,
    GenerateRequest,
    InviteReply,
    InviteRequest,
    LocalMessage,
    PingReply,
    PingRequest,
    RecoveryReply,
    RecoveryRequest,
    Refusal,
    RevocationReply,
    RevocationRequest,
    StatusReply,
    StatusRequest,
    StopReply,
    StopRequest,
    TokenEvent,
)

log = get_logger()

ReplyT = TypeVar("ReplyT")

REQUEST_TIMEOUT_S: Final = 10.0
SEND_TIMEOUT_S: Final = 60.0
"""How long the other end may leave unread what was sent to it, in a pager for instance."""

SILENCE_S: Final = 15.0
"""After so long without a word of a session the daemon is asked on another connection whether it is there."""

CONNECT_TIMEOUT_S: Final = 10.0
"""How long a daemon whose queue of callers is full is tried again."""
_CONNECT_POLL_S: Final = 0.1

LONG_REQUESTS_MAX: Final = 32
"""Sessions and evaluations at one time; one more is refused at once."""

CONNECTIONS_MAX: Final = LONG_REQUESTS_MAX + 32
"""Connections served at one time; one more is refused at once. So no session keeps `status` or `stop` out."""

_CALLERS_WAITING_MAX: Final = 128
"""Callers that the system lets wait while the daemon has no time to take them."""
_READ_BYTES: Final = 64 * 1024
_PROCESS_STATE_SIZE_MAX: Final = 4096
_PEER_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid


class Operator(Protocol):
    """What the daemon can be asked for."""

    async def status_document(self) -> str:
        """The status report as JSON."""

    async def generate(
        self, request: GenerateRequest, emit: Callable[[TokenEvent], Awaitable[None]]
    ) -> GenerateEnd:
        """Run a session. Cancelled when the client goes away."""

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        """Write the live swarm's logits to a file. Cancelled when the client goes away."""

    async def ping(self, request: PingRequest) -> PingReply:
        """One round trip to a member. Raises `TransportUnavailable`, within the time that was asked for."""

    async def issue_invite(self, request: InviteRequest) -> InviteReply:
        """An invite, kept before it is shown. Raises `NotReady` on a node that may issue none now."""

    async def recover(self, request: RecoveryRequest) -> RecoveryReply:
        """Begin a new epoch, kept before it is answered. Raises `NotReady`, `UsageError` for a bad link."""

    async def revoke(self, request: RevocationRequest) -> RevocationReply:
        """Take a revocation in, kept before it is answered. Raises `NotReady`, `UsageError` for a bad one."""

    def stop(self) -> None:
        """Begin to stop in good order."""


class LocalConnection:
    """Whole messages over one end of a control socket connection.

    ``check_alive`` is called where the other end has been silent for `SILENCE_S`, again and again; what it
    raises ends the waiting. Without it whoever waits has a deadline of its own.
    """

    def __init__(
        self, stream: trio.SocketStream, check_alive: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._stream = stream
        self._check_alive = check_alive
        self._reader = FrameReader(LOCAL.size_bytes_max)
        self._ready: list[LocalMessage] = []

    async def send(self, message: LocalMessage) -> None:
        """Send one message. Raises `NotRunning` when the other end is gone, or has stopped reading."""
        data = frame(encode(message), LOCAL.size_bytes_max)
        try:
            with trio.fail_after(SEND_TIMEOUT_S):
                await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise NotRunning("the connection was closed") from None
        except trio.TooSlowError:
            raise NotRunning(f"the other end has read nothing for {SEND_TIMEOUT_S:g} s") from None

    async def receive(self) -> LocalMessage:
        """The next message. Raises `NotRunning` at the end, `RemoteProtocolError` for nonsense."""
        while not self._ready:
            data = None
            try:
                with trio.move_on_after(SILENCE_S if self._check_alive is not None else math.inf):
                    data = await self._stream.receive_some(_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if data is None:
                assert self._check_alive is not None
                await self._check_alive()
                continue
            if not data:
                raise NotRunning("the connection was closed before the answer came")
            self._ready.extend(decode(body, LOCAL) for body in self._reader.feed(data))
        return self._ready.pop(0)

    async def ask(self, request: LocalMessage) -> LocalMessage:
        """Send ``request`` and receive the first answer to it. Raises like `send` and `receive`.

        A daemon that is busy refuses and closes without waiting for the request: then sending fails, and its
        answer is there to be read all the same.
        """
        try:
            await self.send(request)
        except NotRunning as gone:
            try:
                return await self.receive()
            except NotRunning:
                raise gone from None
        return await self.receive()

    async def wait_closed(self) -> None:
        """Wait until the other end closes, ignoring whatever it still says. Whoever calls has a deadline."""
        self._check_alive = None  # one that is ending answers nobody any more
        with contextlib.suppress(NotRunning, RemoteProtocolError):
            while True:
                await self.receive()


class ControlServer:
    """Listens on ``path`` for the command line of this user."""

    def __init__(self, path: Path, operator: Operator) -> None:
        self._path = path
        self._operator = operator
        self._connections = trio.CapacityLimiter(CONNECTIONS_MAX)
        self._long_requests = trio.CapacityLimiter(LONG_REQUESTS_MAX)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. The home's lock guarantees that no other daemon uses the path.

        Raises `ConfigurationInvalid` when the socket cannot be made there.
        """
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with listener:
            try:
                self._path.unlink(missing_ok=True)
                await listener.bind(str(self._path))
                self._path.chmod(0o600)
            except OSError as error:
                raise ConfigurationInvalid(
                    f"the control socket {self._path} cannot be made: {error.strerror or error}"
                ) from error
            listener.listen(_CALLERS_WAITING_MAX)
            task_status.started()
            try:
                await trio.serve_listeners(self._serve, [trio.SocketListener(listener)])
            finally:
                self._path.unlink(missing_ok=True)

    async def _serve(self, stream: trio.SocketStream) -> None:
        _, user, _ = _PEER_CREDENTIALS.unpack(_credentials_of(stream.socket))
        if user not in (os.geteuid(), 0):
            log.warning("control_refused", user=user)
            await stream.aclose()
            return
        async with stream:
            connection = LocalConnection(stream)
            # A client that goes away needs no answer, and one that talks nonsense gets one if it can.
            with contextlib.suppress(NotRunning):
                await self._answer_within_bounds(connection)

    async def _answer_within_bounds(self, connection: LocalConnection) -> None:
        """Answer one request; nothing that comes of it may raise here, where it would end the daemon."""
        try:
            with _one_of(self._connections, connection):
                await self._answer(connection)
        except NotRunning:
            raise
        except KvasirError as error:
            await connection.send(Refusal(error.code, as_sentence(str(error))))
        except RemoteProtocolError as error:
            await connection.send(Refusal(error.code, as_sentence(error.reason)))
        except ProtocolError as error:
            await connection.send(Refusal("unacceptable", as_sentence(error.reason)))
        except Exception as error:
            log.exception("control_request_crashed")
            await connection.send(Refusal("internal", as_sentence(f"{type(error).__name__}: {error}")))

    async def _answer(self, connection: LocalConnection) -> None:
        with trio.move_on_after(REQUEST_TIMEOUT_S) as waiting:
            request = await connection.receive()
        if waiting.cancelled_caught:
            return
        match request:
            case StatusRequest():
                await connection.send(StatusReply(await self._operator.status_document()))
            case GenerateRequest():
                emit = connection.send
                with _one_of(self._long_requests, connection):
                    await self._while_connected(connection, lambda: self._operator.generate(request, emit))
            case EvaluateRequest():
                with _one_of(self._long_requests, connection):
                    await self._while_connected(connection, lambda: self._operator.evaluate(request))
            case PingRequest():
                await self._while_connected(connection, lambda: self._operator.ping(request))
            case InviteRequest():
                await self._while_connected(connection, lambda: self._operator.issue_invite(request))
            case RecoveryRequest():
                await self._while_connected(connection, lambda: self._operator.recover(request))
            case RevocationRequest():
                await self._while_connected(connection, lambda: self._operator.revoke(request))
            case StopRequest():
                await connection.send(StopReply())
                self._operator.stop()
                await connection.wait_closed()
            case _:
                raise RemoteProtocolError(f"{request.kind} is not a request", "unexpected_message")

    async def _while_connected(
        self, connection: LocalConnection, work: Callable[[], Awaitable[LocalMessage]]
    ) -> None:
        """Answer with what ``work`` gives; it is cancelled when the client goes away."""
        async with open_unwrapping_nursery() as nursery:

            async def cancel_when_closed() -> None:
                await connection.wait_closed()
                nursery.cancel_scope.cancel()

            nursery.start_soon(cancel_when_closed)
            await connection.send(await work())
            nursery.cancel_scope.cancel()


class _Busy(KvasirError):
    """No place is free. Whoever is refused may ask again."""


@contextlib.contextmanager
def _one_of(places: trio.CapacityLimiter, connection: LocalConnection) -> Iterator[None]:
    """A place for this connection. Raises `_Busy` at once where all are taken."""
    try:
        places.acquire_on_behalf_of_nowait(connection)
    except trio.WouldBlock:
        log.warning("control_refused", reason="too many requests", places=places.total_tokens)
        raise _Busy(busy_sentence(int(places.total_tokens))) from None
    try:
        yield
    finally:
        places.release_on_behalf_of(connection)


def busy_sentence(n_requests: int) -> str:
    """What is said to one more than these."""
    return f"the daemon is busy: {n_requests} requests are being answered already"


def _credentials_of(connection: trio.socket.SocketType) -> bytes:
    """The kernel's word on who is at the other end."""
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)


@contextlib.asynccontextmanager
async def connect_daemon(locations: Locations) -> AsyncIterator[LocalConnection]:
    """A connection to the daemon of this home.

    Raises `NotRunning` when there is none, `DaemonUnreachable` when one holds the home and does not listen.
    """

    async def check_alive() -> None:
        async with await _connected(locations) as stream:
            with trio.move_on_after(REQUEST_TIMEOUT_S):
                await LocalConnection(stream).ask(StatusRequest())
                return  # whatever it says, a refusal for instance
        raise _mute(locations)

    async with await _connected(locations) as stream:
        yield LocalConnection(stream, check_alive)


def _mute(locations: Locations) -> DaemonUnreachable:
    """The error for a daemon that is there and says nothing."""
    holder = holder_of(locations.lock_file)
    if holder is not None and _is_stopped(holder):
        return DaemonUnreachable(
            f"a daemon runs in this home (process {holder}) and is stopped: 'kill -CONT {holder}' continues "
            "it"
        )
    return DaemonUnreachable(
        f"a daemon runs in this home (process {holder}) and has not answered yet: it is busy, or hangs; try "
        f"again, and where that does not help for minutes, 'kill {holder}' asks it to end"
    )


def _is_stopped(process: int) -> bool:
    """Whether a signal, or a debugger, has stopped it; False also where the system does not tell."""
    try:
        told = read_small_file(Path(f"/proc/{process}/stat"), _PROCESS_STATE_SIZE_MAX)
    except OSError:
        return False
    return told.rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])


async def _connected(locations: Locations) -> trio.SocketStream:
    """A stream to the daemon's socket, which may have no room for one more caller for a moment."""
    path = locations.control_socket
    ends = trio.current_time() + CONNECT_TIMEOUT_S
    while True:
        try:
            stream = await trio.open_unix_socket(str(path))
        except OSError:
            if not is_locked(locations.lock_file):
                raise NotRunning(f"no daemon runs in this home (nobody listens on {path})") from None
            holder = holder_of(locations.lock_file)
            raise DaemonUnreachable(
                f"a daemon runs in this home (process {holder}) and does not listen on {path}: it is "
                "starting or stopping, or its socket was removed; "
                f"then end it with 'kill {holder}' and start it again"
            ) from None
        try:
            # Where the queue of callers is full, Linux refuses to wait and trio takes that for connected.
            stream.socket.getpeername()
        except OSError:
            await stream.aclose()
        else:
            return stream
        if trio.current_time() >= ends:
            raise _mute(locations)
        await trio.sleep(_CONNECT_POLL_S)


async def request_status(locations: Locations) -> str:
    """The running daemon's status document, as JSON. Raises like `connect_daemon`, or `EngineFailed`."""
    reply = await _request(locations, StatusRequest(), StatusReply, REQUEST_TIMEOUT_S)
    return reply.document


async def request_ping(locations: Locations, node_id: NodeId, timeout_s: float) -> Duration:
    """One round trip from the running daemon to this member.

    Raises like `connect_daemon`, `TransportUnavailable` when that member does not answer in time, or
    `EngineFailed`.
    """
    request = PingRequest(node_id, max(1, round(timeout_s * 1000)))
    reply = await _request(locations, request, PingReply, timeout_s + REQUEST_TIMEOUT_S)
    return Duration(reply.round_trip_ns)


async def request_invite(locations: Locations, ranks: tuple[Rank, ...], lifetime: Duration) -> str:
    """A new invite of the running daemon, as text. Raises like `connect_daemon`, or `EngineFailed`."""
    request = InviteRequest(ranks, lifetime)
    reply = await _request(locations, request, InviteReply, REQUEST_TIMEOUT_S)
    return reply.invite


async def request_recovery(locations: Locations, link: bytes) -> int:
    """Have the running daemon begin a new epoch, and say which.

    Raises like `connect_daemon`, `UsageError` for a link that begins none, or `EngineFailed`.
    """
    reply = await _request(locations, RecoveryRequest(link), RecoveryReply, REQUEST_TIMEOUT_S)
    return reply.epoch


async def request_revocation(locations: Locations, revocation: bytes) -> None:
    """Have the running daemon take in a signed revocation and spread it.

    Raises like `connect_daemon`, `UsageError` for one that does not count, or `EngineFailed`.
    """
    await _request(locations, RevocationRequest(revocation), RevocationReply, REQUEST_TIMEOUT_S)


async def _request(
    locations: Locations, request: LocalMessage, reply_type: type[ReplyT], timeout_s: float
) -> ReplyT:
    """Ask the running daemon one thing that has one answer."""
    async with connect_daemon(locations) as connection:
        with trio.move_on_after(timeout_s):
            reply = await connection.ask(request)
            if isinstance(reply, Refusal):
                raise error_of(reply.code, reply.reason)
            if not isinstance(reply, reply_type):
                raise EngineFailed(f"the daemon answered {reply.kind} to a {request.kind}")
            return reply
    raise EngineFailed(f"the daemon did not answer within {timeout_s:g} s")


async def request_stop(locations: Locations, timeout_s: float) -> None:
    """Ask the daemon to stop and wait until it serves nobody any more.

    Raises like `connect_daemon`, or `EngineFailed` when it refuses or ``timeout_s`` passes.
    """
    async with connect_daemon(locations) as connection:
        with trio.move_on_after(timeout_s):
            reply = await connection.ask(StopRequest())
            if isinstance(reply, Refusal):
                raise error_of(reply.code, reply.reason)
            await connection.wait_closed()
            return
    raise EngineFailed(f"the daemon did not stop within {timeout_s:g} s")


async def collect_text(
    connection: LocalConnection, request: GenerateRequest, on_text: Callable[[str], None] | None
) -> tuple[list[int], str, GenerateEnd]:
    """Run a session; its token ids, its text, and how it ended. ``on_text`` gets each new piece of text.

    Raises `EngineFailed` when the daemon refuses, `UsageError` when it says that the request is impossible,
    `NotRunning` when it goes away.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tokens: list[int] = []
    parts: list[str] = []
    reply = await connection.ask(request)
    while True:
        match reply:
            case TokenEvent():
                tokens.append(reply.token)
                piece = decoder.decode(reply.piece)
            case GenerateEnd():
                piece = decoder.decode(b"", final=True)
            case Refusal():
                raise error_of(reply.code, reply.reason)
            case _:
                raise EngineFailed(f"the daemon answered {reply.kind} to a request for text")
        parts.append(piece)
        if on_text is not None and piece:
            on_text(piece)
        if isinstance(reply, GenerateEnd):
            return tokens, "".join(parts), reply
        reply = await connection.receive()
