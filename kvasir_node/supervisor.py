"""Engine processes as control sees them: started, spoken to, noticed when they die, restarted with patience.

An engine is a child joined by a socket pair; an abort inside ggml or a hostile file costs the engine and
never the node. This module knows processes and messages. What an engine is told, and what its death means
for the swarm, is decided by its duty.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.backoff import retry_delay_s
from kvasir_node.ports import EnginePort
from kvasir_node.system_words import in_words
from kvasir_node.telemetry import LogFormat, LogLevel, get_logger
from kvasir_proto.certificate import bind_engine
from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import (
    ConfigurationInvalid,
    DiskFull,
    EngineFailed,
    IncompatibleVersion,
    KvasirError,
    ModelAborted,
    ModelUnusable,
    NoHolderLeft,
    PortInUse,
    RemoteProtocolError,
)
from kvasir_proto.framing import FrameReader, frame
from kvasir_proto.ids import SwarmDigest, node_id_of
from kvasir_proto.instants import Duration, Instant, between, seconds
from kvasir_proto.limits import Role
from kvasir_proto.messages.engine import (
    ENGINE,
    EngineCertificate,
    EngineFault,
    EngineHello,
    EngineIdentity,
    EngineMessage,
    EngineStatistics,
    LoadTrunk,
    QueryStatistics,
    Shutdown,
    TrunkLoaded,
)

log = get_logger()

START_TIMEOUT_S: Final = 60.0
"""From fork to certificate; imports take about a second on a desktop, more on a phone under load."""

LOAD_TIMEOUT_S: Final = 900.0
"""For an engine to read what it was told to hold: a backbone file, or a shard with all its digests."""

WATCH_INTERVAL_S: Final = 5.0
WATCH_TIMEOUT_S: Final = 30.0
"""How long an engine may leave a simple question unanswered; a busy machine is slow, a stopped one mute."""

STOP_TIMEOUT_S: Final = 6.0
"""How long an engine may take to end in good order before it is killed."""

STEADY_AFTER: Final[Duration] = seconds(60)
"""An engine that lived this long starts with short delays again when it ends."""

EVENTS_WAITING_MAX: Final = 1024
FRAMES_WAITING_MAX: Final = 64
"""Messages that wait for an engine to read; a sender waits when there are more."""

STATISTICS_TIMEOUT_S: Final = 2.0
"""An engine that is busy or stopped must not make `status` slow."""

MODEL_ABORTED: Final = ModelAborted("").code

_READ_BYTES: Final = 64 * 1024
_RESTART_DELAY_FIRST_S: Final = 1.0
_RESTART_DELAY_MAX_S: Final = 60.0
_ERROR_OF_EXIT_CODE: Final[dict[int, type[KvasirError]]] = {
    PortInUse.exit_code: PortInUse,
    ConfigurationInvalid.exit_code: ConfigurationInvalid,
    ModelUnusable.exit_code: ModelUnusable,
    IncompatibleVersion.exit_code: IncompatibleVersion,
}

ReplyT = TypeVar("ReplyT")


async def load_trunk(engine: EnginePort, request: LoadTrunk) -> TrunkLoaded:
    """Have an engine load its trunk. Raises `ModelUnusable` also when llama.cpp aborts on the file.

    Values that only one architecture gives a meaning to pass our reader, and llama.cpp asserts on some.
    """
    try:
        return await engine.exchange(request, TrunkLoaded, LOAD_TIMEOUT_S)
    except EngineFailed as error:
        if engine.has_ended:
            raise ModelUnusable(f"llama.cpp gave up on the model: {error}") from error
        raise


async def keep_running(
    run_once: Callable[[], Awaitable[NoReturn]],
    now: Callable[[], Instant],
    note_failure: Callable[[KvasirError], None],
    *,
    is_first_raised: bool = True,
) -> NoReturn:
    """Call ``run_once`` again and again, with patience, as each engine's life ends in an error of ours.

    What makes a first start pointless (another ggml, a port that is taken, a damaged model, a home that
    cannot be written, a full disk, a device that is not there) is raised: the user is there to read it. The
    same trouble later is waited out like any other, and so from the start where the user is not
    (``is_first_raised`` is false).
    """
    failures = 0
    first = is_first_raised
    while True:
        started = now()
        try:
            await run_once()
        except (IncompatibleVersion, PortInUse, ModelUnusable, ConfigurationInvalid, DiskFull) as error:
            if first:
                raise
            note_failure(error)
        except KvasirError as error:
            note_failure(error)
        first = False
        failures = 1 if between(started, now()) > STEADY_AFTER else failures + 1
        await trio.sleep(retry_delay_s(failures, _RESTART_DELAY_FIRST_S, _RESTART_DELAY_MAX_S))


async def watch_engine(engine: EnginePort, quiet: trio.Lock) -> None:
    """Kill an engine that does not answer any more: stopped, deadlocked, lost in a driver.

    Whoever keeps it running then starts another. ``quiet`` is held by who has given the engine work that may
    keep it from answering.
    """
    while not engine.has_ended:
        await trio.sleep(WATCH_INTERVAL_S)
        async with quiet:
            try:
                await engine.statistics_json(WATCH_TIMEOUT_S)
            except EngineFailed as error:
                if not engine.has_ended:
                    log.error("engine_unresponsive", pid=engine.pid, reason=str(error))
                    engine.kill(f"this node killed it: it had been mute for {WATCH_TIMEOUT_S:g} s")
                    return


def error_of_fault(fault: EngineFault) -> KvasirError:
    """The exception that an engine's fault stands for on this side of the socket pair."""
    if fault.code == "no_holder_left":
        return NoHolderLeft(fault.detail)
    return _ERROR_OF_EXIT_CODE.get(fault.exit_code, EngineFailed)(fault.detail)


@dataclass(slots=True, eq=False)
class _Waiter:
    matches: Callable[[EngineMessage], bool]
    arrived: trio.Event
    reply: EngineMessage | None = None


class Engine:
    """One running engine process. Made by `start_engine`; used from one trio nursery."""

    def __init__(self, role: Role, process: trio.Process, stream: trio.SocketStream) -> None:
        self.role = role
        self.pid = process.pid
        self.backend = ""
        self.certificate = b""
        self._process = process
        self._stream = stream
        self._to_write, self._written = trio.open_memory_channel[bytes](FRAMES_WAITING_MAX)
        self._requests = itertools.count(1)
        self._waiters: list[_Waiter] = []
        self._ended = trio.Event()
        self._end_reason = ""
        self._end_kind = EngineFailed
        self._events_in, self.events = trio.open_memory_channel[EngineMessage](EVENTS_WAITING_MAX)

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone or its channel is closed."""
        return self._ended.is_set()

    def next_request(self) -> int:
        """A request number that no other message to this engine has."""
        return next(self._requests)

    async def send(self, message: EngineMessage) -> None:
        """Queue one message; waits while the queue is full. Raises `EngineFailed` when the engine has ended.

        Whoever is cancelled here has sent the whole message or nothing of it.
        """
        data = frame(encode(message), ENGINE.size_bytes_max)
        try:
            await self._to_write.send(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise self.end_error(f"{self.role} engine: {self._reason}") from None

    async def exchange(
        self,
        message: EngineMessage | None,
        reply_type: type[ReplyT] | tuple[type[ReplyT], ...],
        timeout_s: float,
        *,
        where: Callable[[Any], bool] = lambda _: True,
    ) -> ReplyT:
        """Send ``message`` and wait for a reply of that type, or of one of those, for which ``where`` holds.

        A fault that names the same request, or none, ends the wait. Raises that fault's error, or
        `EngineFailed` when the engine ends or ``timeout_s`` passes.
        """
        request = getattr(message, "request", None)

        def matches(candidate: EngineMessage) -> bool:
            if isinstance(candidate, EngineFault):
                return candidate.request is None or candidate.request == request
            return (
                isinstance(candidate, reply_type)
                and (request is None or getattr(candidate, "request", request) == request)
                and where(candidate)
            )

        waiter = _Waiter(matches, trio.Event())
        self._waiters.append(waiter)
        if self.has_ended:
            waiter.arrived.set()
        try:
            with trio.move_on_after(timeout_s):
                if message is not None:
                    await self.send(message)
                await waiter.arrived.wait()
        finally:
            self._waiters.remove(waiter)
        reply = waiter.reply
        if isinstance(reply, EngineFault):
            raise error_of_fault(reply)
        if reply is None:
            reason = self._reason if self.has_ended else f"no answer in {timeout_s:g} s"
            raise self.end_error(f"{self.role} engine: {reason}")
        assert isinstance(reply, reply_type)
        return reply

    async def statistics_json(self, timeout_s: float = STATISTICS_TIMEOUT_S) -> str:
        """The engine's counters as one JSON object."""
        reply = await self.exchange(QueryStatistics(self.next_request()), EngineStatistics, timeout_s)
        return reply.values_json

    async def wait_ended(self) -> str:
        """Wait until the engine is gone; why, in a few words."""
        await self._ended.wait()
        return self._reason

    def end_error(self, sentence: str) -> EngineFailed:
        """What an end like this engine's is raised as: `ModelAborted` where llama.cpp gave up."""
        return self._end_kind(sentence)

    @property
    def _reason(self) -> str:
        return self._end_reason or "the engine has ended"

    async def _receive_all(self) -> None:
        """Hand each message to the exchange that waits for it, or to `events`; return at the end.

        What an engine said before it ended is handed over before its end is noted.
        """
        reader = FrameReader(ENGINE.size_bytes_max)
        try:
            while data := await self._stream.receive_some(_READ_BYTES):
                for body in reader.feed(data):
                    await self._hand_over(decode(body, ENGINE))
        except RemoteProtocolError as error:
            self._end_reason = f"the engine broke the protocol: {error}"
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass

    async def _hand_over(self, message: EngineMessage) -> None:
        if isinstance(message, EngineFault) and message.code == MODEL_ABORTED:
            # Its last words: whoever waits hears them when it is gone.
            self._end_reason = self._end_reason or message.detail
            self._end_kind = ModelAborted
            return
        for waiter in self._waiters:
            if waiter.reply is None and waiter.matches(message):
                waiter.reply = message
                waiter.arrived.set()
                return
        await self._events_in.send(message)

    async def _write_all(self) -> None:
        """Write what is queued. Only this task writes: a message that was begun is never broken off."""
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in self._written:
                await self._stream.send_all(data)

    def kill(self, reason: str) -> None:
        """End the engine at once, whatever state it is in; `wait_ended` says ``reason`` when it is gone."""
        self._end_reason = self._end_reason or reason
        self._process.kill()

    async def close(self) -> None:
        """End the engine in good order, or kill it; returns within a bounded time."""
        with trio.CancelScope(shield=True):
            with contextlib.suppress(EngineFailed), trio.move_on_after(1.0):
                await self.send(Shutdown())
            with trio.move_on_after(STOP_TIMEOUT_S):
                await self._process.wait()
            self._process.kill()  # SIGKILL also ends a stopped process; nothing happens to one that has ended
            await self._ended.wait()

    async def _run(self) -> None:
        """Live as long as the process; whatever ends this task ends the process too."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_all)
                await self._receive_all()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                # The end of its stream is what tells an engine to end; one that does not is killed.
                await self._stream.aclose()
                with trio.move_on_after(STOP_TIMEOUT_S):
                    await self._process.wait()
                self._process.kill()
                await self._process.wait()
            self._note_end(self._process.returncode or 0)

    def _note_end(self, status: int) -> None:
        if status == -signal.SIGABRT:
            self._end_kind = ModelAborted
        if not self._end_reason and status < 0:
            self._end_reason = f"killed by {_signal_name(-status)}"
        elif not self._end_reason and status > 0:
            self._end_reason = f"ended with status {status}"
        self._ended.set()
        self._written.close()
        for waiter in self._waiters:
            waiter.arrived.set()
        self._events_in.close()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # most real-time signals have no name of their own


_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""Or numpy has a thread for each processor turn round and wait for the others. On a busy machine a referee's
products took ten times as long with them, and what they used was counted as nobody's.
"""


async def start_engine(
    nursery: trio.Nursery,
    role: Role,
    *,
    node_key: Ed25519PrivateKey,
    swarm_digest: SwarmDigest,
    generation: int,
    directory: Path,
    log_level: LogLevel = "warning",
    log_format: LogFormat = "console",
) -> Engine:
    """Start an engine and vouch for its key; it lives at most as long as ``nursery``.

    ``directory`` is private to this user; the engine passes its key through it. It logs to the same standard
    error as this process. Raises `EngineFailed`, or what the engine's own start-up check found
    (`IncompatibleVersion`).
    """
    ours, theirs = socket.socketpair()
    command = [
        # -P: never import from whatever directory the daemon was started in.
        *(sys.executable, "-P", "-m", "kvasir_node.engine"),
        *("--role", role, "--control-fd", str(theirs.fileno()), "--directory", str(directory)),
        *("--log-level", log_level, "--log-format", log_format),
    ]
    try:
        process = await trio.lowlevel.open_process(
            command,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Without a backtrace: an assertion in ggml would have a debugger print pages.
            env=_ENVIRONMENT | os.environ | {"GGML_NO_BACKTRACE": "1"},
        )
    except OSError as error:
        ours.close()
        raise EngineFailed(f"an engine process could not be started: {in_words(error)}") from error
    finally:
        theirs.close()
    engine = Engine(role, process, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))
    nursery.start_soon(engine._run)
    try:
        hello = await engine.exchange(None, EngineHello, START_TIMEOUT_S)
        engine.backend = hello.backend
        binding = bind_engine(node_key, swarm_digest, hello.public_key, role, generation)
        node_id = node_id_of(node_key.public_key().public_bytes_raw())
        identity = EngineIdentity(node_id, role, binding)
        reply = await engine.exchange(identity, EngineCertificate, START_TIMEOUT_S)
    except BaseException:
        await engine.close()
        raise
    engine.certificate = reply.certificate
    log.info("engine_started", role=role, pid=engine.pid, generation=generation)
    return engine
