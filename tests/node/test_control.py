"""The control socket on a real Unix socket: hostile, slow and vanishing clients cost themselves only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from kvasir_node import control
from kvasir_node.control import (
    CONNECTIONS_MAX,
    LONG_REQUESTS_MAX,
    ControlServer,
    LocalConnection,
    busy_sentence,
    collect_text,
    connect_daemon,
    request_invite,
    request_ping,
    request_recovery,
    request_revocation,
    request_status,
    request_stop,
)
from kvasir_node.home_lock import HomeLock
from kvasir_node.locations import Locations
from kvasir_proto.codec import encode
from kvasir_proto.errors import (
    ConfigurationInvalid,
    DaemonUnreachable,
    EngineFailed,
    ModelAborted,
    NotReady,
    NotRunning,
    TransportUnavailable,
    UsageError,
)
from kvasir_proto.framing import frame
from kvasir_proto.ids import node_id_of
from kvasir_proto.instants import seconds
from kvasir_proto.limits import LOCAL_FRAME_SIZE_MAX
from kvasir_proto.messages.local import (
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
from kvasir_proto.sampling import Sampling

pytestmark = pytest.mark.loopback

PATIENCE_S = 20.0
NODE_ID = node_id_of(bytes(32))
Emit = Callable[[TokenEvent], Awaitable[None]]


def ask_for_text(n_tokens: int = 2) -> GenerateRequest:
    return GenerateRequest("hello", (), n_tokens, Sampling())


ENDED = GenerateEnd("length", "", "", "{}")


class Daemon:
    """Answers as it is told; remembers what was asked and what was cancelled."""

    def __init__(self) -> None:
        self.document = '{"state": "ready"}'
        self.error: Exception | None = None
        self.endless = False
        self.started = trio.Event()
        self.cancelled = trio.Event()
        self.stopped = trio.Event()
        self.pieces = [b"x"]

    async def status_document(self) -> str:
        if self.error is not None:
            raise self.error
        return self.document

    async def generate(self, request: GenerateRequest, emit: Emit) -> GenerateEnd:
        if self.error is not None:
            raise self.error
        try:
            self.started.set()
            for position in range(request.n_tokens):
                await emit(TokenEvent(position, 7, self.pieces[position % len(self.pieces)]))
            if self.endless:
                await trio.sleep_forever()
        except BaseException:
            self.cancelled.set()
            raise
        return ENDED

    async def evaluate(self, request: EvaluateRequest) -> EvaluateReply:
        try:
            self.started.set()
            if self.endless:
                await trio.sleep_forever()
        except BaseException:
            self.cancelled.set()
            raise
        return EvaluateReply(len(request.token_ids), 3, 0)

    async def ping(self, request: PingRequest) -> PingReply:
        if self.error is not None:
            raise self.error
        try:
            self.started.set()
            if self.endless:
                await trio.sleep_forever()
        except BaseException:
            self.cancelled.set()
            raise
        return PingReply(request.timeout_ms * 1000)

    async def issue_invite(self, request: InviteRequest) -> InviteReply:
        if self.error is not None:
            raise self.error
        return InviteReply(f"{'+'.join(request.ranks)} for {request.lifetime_ns}")

    async def recover(self, request: RecoveryRequest) -> RecoveryReply:
        if self.error is not None:
            raise self.error
        return RecoveryReply(len(request.link))

    async def revoke(self, request: RevocationRequest) -> RevocationReply:
        if self.error is not None:
            raise self.error
        assert request.revocation == b"signed"
        return RevocationReply()

    def stop(self) -> None:
        self.stopped.set()


def home_of(path: Path) -> Locations:
    """A home whose control socket is at that path."""
    return Locations(path.parent / "kvasir.toml", *[path.parent] * 4)


@contextlib.asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[Daemon, Path]]:
    """A server in ``directory``; at the end it must still answer, whatever was done to it."""
    daemon, path = Daemon(), directory / "control.sock"
    async with trio.open_nursery() as nursery:
        with trio.fail_after(PATIENCE_S):
            await nursery.start(ControlServer(path, daemon).run)
            yield daemon, path
            daemon.error = None
            assert await request_status(home_of(path)) == daemon.document
        nursery.cancel_scope.cancel()


async def converse(path: Path, request: LocalMessage) -> list[LocalMessage]:
    """Everything the daemon says to one request."""
    heard: list[LocalMessage] = []
    async with connect_daemon(home_of(path)) as connection:
        await connection.send(request)
        with contextlib.suppress(NotRunning):
            while True:
                heard.append(await connection.receive())
    return heard


async def send_raw(path: Path, data: bytes) -> bytes:
    """What comes back for these bytes until the daemon closes."""
    stream = await trio.open_unix_socket(str(path))
    async with stream:
        await stream.send_all(data)
        await stream.send_eof()
        received = b""
        with contextlib.suppress(trio.BrokenResourceError):
            while part := await stream.receive_some(4096):
                received += part
    return received


async def test_status_comes_as_it_is(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_daemon, path):
        assert await converse(path, StatusRequest()) == [StatusReply('{"state": "ready"}')]


async def test_tokens_come_before_the_end(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_daemon, path):
        heard = await converse(path, ask_for_text(3))
        assert heard == [*(TokenEvent(each, 7, b"x") for each in range(3)), ENDED]


async def test_logits_are_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_daemon, path):
        assert await converse(path, EvaluateRequest((1, 2), (2,), "/x")) == [EvaluateReply(2, 3, 0)]


async def test_a_round_trip_is_asked_for_with_its_deadline(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path):
        assert await request_ping(home_of(path), NODE_ID, 1.5) == 1_500_000
        daemon.error = TransportUnavailable("nobody answers there")
        with pytest.raises(TransportUnavailable, match="nobody answers there"):
            await request_ping(home_of(path), NODE_ID, 1.5)


async def test_a_client_that_goes_away_cancels_its_ping(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path):
        daemon.endless = True
        async with connect_daemon(home_of(path)) as connection:
            await connection.send(PingRequest(NODE_ID, 1000))
            await daemon.started.wait()
        await daemon.cancelled.wait()


async def test_an_invite_is_asked_for_with_ranks_and_lifetime(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path):
        invite = await request_invite(home_of(path), ("output", "bulk"), seconds(60))
        assert invite == "output+bulk for 60000000000"
        daemon.error = NotReady("this node is no elector")
        with pytest.raises(EngineFailed, match="no elector"):
            await request_invite(home_of(path), ("bulk",), seconds(60))


async def test_a_recovery_is_handed_on_and_a_bad_one_is_a_wrong_call(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path):
        assert await request_recovery(home_of(path), b"link") == 4
        daemon.error = UsageError("this begins no epoch here")
        with pytest.raises(UsageError, match="no epoch"):
            await request_recovery(home_of(path), b"link")


async def test_a_revocation_is_handed_on_and_a_bad_one_is_a_wrong_call(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path):
        await request_revocation(home_of(path), b"signed")
        daemon.error = UsageError("this revokes nothing here")
        with pytest.raises(UsageError, match="revokes nothing"):
            await request_revocation(home_of(path), b"signed")


async def test_only_the_owner_can_reach_the_socket(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_daemon, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_the_socket_is_gone_afterwards_and_a_stale_one_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    async with serving(tmp_path):
        pass
    assert not path.exists()
    with pytest.raises(NotRunning, match="no daemon runs"):
        await request_status(home_of(path))


async def test_a_socket_that_nobody_serves_means_not_running(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
        with pytest.raises(NotRunning):
            await request_status(home_of(path))


async def test_a_daemon_whose_socket_was_removed_is_told_from_one_that_does_not_run(tmp_path: Path) -> None:
    home = home_of(tmp_path / "control.sock")
    with HomeLock(home.lock_file), pytest.raises(DaemonUnreachable, match=f"kill {os.getpid()}"):
        await request_status(home)
    with pytest.raises(NotRunning):
        await request_status(home)


async def test_a_daemon_that_takes_no_more_callers_is_told_from_one_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is busy, or hangs: its queue is full, and Linux lets no further caller wait."""
    monkeypatch.setattr(control, "CONNECT_TIMEOUT_S", 0.3)
    here = home_of(tmp_path / "control.sock")
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(here.control_socket))
        listening.listen(1)
        for _ in range(2):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(str(here.control_socket))
        stack.enter_context(HomeLock(here.lock_file))
        for ask in (request_status(here), request_stop(here, 5.0)):
            with pytest.raises(
                DaemonUnreachable, match=f"process {os.getpid()}.*it is busy, or hangs; try again"
            ):
                await ask


async def test_only_a_daemon_that_is_stopped_is_called_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy one was, with the advice to kill it."""
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.05)
    monkeypatch.setattr(control, "SILENCE_S", 0.02)
    here = home_of(tmp_path / "control.sock")

    async def end(process: trio.Process) -> None:
        process.kill()  # one that is stopped ends by nothing else

    async with trio.open_nursery() as nursery:
        process = await nursery.start(partial(trio.run_process, ["sleep", "60"], deliver_cancel=end))
        monkeypatch.setattr(control, "holder_of", lambda _path: process.pid)
        with socket.socket(socket.AF_UNIX) as deaf:
            deaf.bind(str(here.control_socket))
            deaf.listen(8)
            for number, said in (
                (signal.SIGSTOP, f"is stopped: 'kill -CONT {process.pid}' continues it"),
                (signal.SIGCONT, f"busy, or hangs; try again, .* 'kill {process.pid}' asks it to end"),
            ):
                process.send_signal(number)
                seen = os.WSTOPPED | os.WCONTINUED
                await trio.to_thread.run_sync(os.waitid, os.P_PID, process.pid, seen)
                async with connect_daemon(here) as connection:
                    with pytest.raises(DaemonUnreachable, match=said) as caught:
                        await collect_text(connection, ask_for_text(), None)
                assert "KILL" not in str(caught.value)
        nursery.cancel_scope.cancel()


async def test_a_place_where_no_socket_can_be_made_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationInvalid, match=r"control socket .* cannot be made"):
        await ControlServer(tmp_path / "absent" / "control.sock", Daemon()).run()


@pytest.mark.parametrize(
    "data, code",
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "oversize"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "oversize"),
        ((LOCAL_FRAME_SIZE_MAX + 1).to_bytes(4, "big"), "oversize"),
        (frame(b"nonsense", 100), "malformed"),
        (frame(b"\xc1" * 50, 100), "malformed"),
        (frame(b"", 100), "malformed"),
        (frame(encode(StopReply()), 100), "unexpected_message"),
        (frame(encode(TokenEvent(0, 1, b"")), 100), "unexpected_message"),
    ],
)
async def test_nonsense_is_refused_and_costs_only_its_sender(tmp_path: Path, data: bytes, code: str) -> None:
    async with serving(tmp_path) as (_daemon, path):
        answer = await send_raw(path, data)
        assert code.encode() in answer, answer


@pytest.mark.parametrize("data", [b"", b"\x00", frame(encode(StatusRequest()), 100)[:-1]])
async def test_half_a_request_needs_no_answer(tmp_path: Path, data: bytes) -> None:
    async with serving(tmp_path) as (_daemon, path):
        assert await send_raw(path, data) == b""


async def test_a_client_that_says_nothing_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.05)
    async with serving(tmp_path) as (_daemon, path), connect_daemon(home_of(path)) as connection:
        await connection.wait_closed()


async def test_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as (_daemon, path):
        # The kernel says who connects, so the daemon's own idea of itself is what a test can change. A
        # process of root's may always, so this one is given another user's credentials by name.
        credentials = control._PEER_CREDENTIALS.pack(os.getpid(), os.geteuid() + 1, 0)
        with monkeypatch.context() as patched:
            patched.setattr(control, "_credentials_of", lambda _socket: credentials)
            assert await converse(path, StatusRequest()) == []


async def test_sessions_leave_room_for_short_questions_and_one_session_too_many_is_refused_at_once(
    tmp_path: Path,
) -> None:
    """Seventy callers of `generate` kept `status` and `stop` out."""
    async with serving(tmp_path) as (daemon, path):
        daemon.endless = True
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(LONG_REQUESTS_MAX):
                connection = await stack.enter_async_context(connect_daemon(home_of(path)))
                await connection.send(ask_for_text(1))
                assert isinstance(await connection.receive(), TokenEvent)
            for request in (ask_for_text(1), EvaluateRequest((1,), (1,), "/x"), ask_for_text(1)):
                assert await converse(path, request) == [Refusal("busy", busy_sentence(LONG_REQUESTS_MAX))]
            assert await request_status(home_of(path)) == await daemon.status_document()
            async with connect_daemon(home_of(path)) as asking:
                assert await asking.ask(StopRequest()) == StopReply()
        await daemon.cancelled.wait()
        daemon.endless = False
        while isinstance((await converse(path, ask_for_text(1)))[0], Refusal):
            await trio.lowlevel.checkpoint()


async def test_a_client_that_goes_away_cancels_its_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path):
        daemon.endless = True
        async with connect_daemon(home_of(path)) as connection:
            await connection.send(ask_for_text())
            await connection.receive()
        await daemon.cancelled.wait()


async def test_a_client_that_goes_away_cancels_its_evaluation(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path):
        daemon.endless = True
        async with connect_daemon(home_of(path)) as connection:
            await connection.send(EvaluateRequest((1,), (1,), "/x"))
            await daemon.started.wait()
        await daemon.cancelled.wait()


async def test_a_client_that_never_reads_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SEND_TIMEOUT_S", 0.05)
    async with serving(tmp_path) as (daemon, path):
        daemon.pieces = [bytes(4096)]
        async with connect_daemon(home_of(path)) as connection:
            await connection.send(ask_for_text(100_000))
            await daemon.cancelled.wait()


async def test_a_client_gone_when_the_end_is_to_be_said_costs_nothing(tmp_path: Path) -> None:
    """The end of a session and the client's own end cross: the daemon must survive the failed send."""
    async with serving(tmp_path) as (daemon, path):
        for _ in range(20):
            stream = await trio.open_unix_socket(str(path))
            await stream.send_all(frame(encode(ask_for_text(1)), LOCAL_FRAME_SIZE_MAX))
            await stream.aclose()
        daemon.error = NotReady("not now")
        for _ in range(20):
            stream = await trio.open_unix_socket(str(path))
            await stream.send_all(frame(encode(ask_for_text(1)), LOCAL_FRAME_SIZE_MAX))
            await stream.aclose()


@pytest.mark.parametrize(
    "error, code",
    [
        (NotReady("not now"), "not_ready"),
        (EngineFailed("dead"), "engine_failed"),
        (ModelAborted("not now"), "model_aborted"),
        (KeyError("x"), "internal"),
    ],
)
@pytest.mark.parametrize("request_", [StatusRequest(), ask_for_text()])
async def test_what_fails_is_refused_with_a_code_and_the_daemon_goes_on(
    tmp_path: Path, error: Exception, code: str, request_: LocalMessage
) -> None:
    async with serving(tmp_path) as (daemon, path):
        daemon.error = error
        heard = await converse(path, request_)
        assert [each.code for each in heard if isinstance(each, Refusal)] == [code]
        if code in ("not_ready", "model_aborted"):
            with pytest.raises(EngineFailed, match="not now") as caught:
                await request_status(home_of(path))
            assert caught.value.exit_code == (7 if code == "model_aborted" else 1)


async def test_a_document_too_large_to_send_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path):
        document, daemon.document = daemon.document, '"' + "x" * (4 << 20) + '"'
        heard = await converse(path, StatusRequest())
        assert [each.code for each in heard if isinstance(each, Refusal)] == ["unacceptable"]
        daemon.document = document


async def test_stop_waits_until_the_daemon_has_ended(tmp_path: Path) -> None:
    daemon, path = Daemon(), tmp_path / "control.sock"
    ended = False
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:

            async def live() -> None:
                nonlocal ended
                async with trio.open_nursery() as inner:
                    await inner.start(ControlServer(path, daemon).run)
                    listening.set()
                    await daemon.stopped.wait()
                    for _ in range(100):
                        await trio.lowlevel.checkpoint()  # whatever else has to end first
                    ended = True
                    inner.cancel_scope.cancel()

            listening = trio.Event()
            nursery.start_soon(live)
            await listening.wait()
            await request_stop(home_of(path), PATIENCE_S)
            assert ended


async def test_stop_gives_up_at_its_deadline(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path):
        with pytest.raises(EngineFailed, match=r"did not stop within 0\.05 s"):
            await request_stop(home_of(path), 0.05)
        assert daemon.stopped.is_set()


async def test_a_daemon_that_does_not_answer_is_said_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(path))
        deaf.listen(1)
        monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.05)
        with pytest.raises(EngineFailed, match=r"did not answer within 0\.05 s"):
            await request_status(home_of(path))


async def test_a_daemon_that_falls_silent_in_a_session_is_asked_whether_it_is_there(
    mock_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may compute for long; one that is stopped would be waited for for ever."""
    monkeypatch.setattr(control, "SILENCE_S", 0.02)
    asked: list[int] = []
    async with serving(tmp_path) as (daemon, path):
        # Both ends are in this process, and nothing is under way when all wait. (Binding takes a thread.)
        mock_clock.autojump_threshold = 0
        daemon.endless = True
        answer = daemon.status_document

        async def count_and_answer() -> str:
            asked.append(1)
            return await answer()

        monkeypatch.setattr(daemon, "status_document", count_and_answer)
        with trio.move_on_after(0.5) as waiting:
            await converse(path, ask_for_text())
        assert waiting.cancelled_caught, "it answers, so it is waited for"
        assert len(asked) == 0.5 // 0.02

        async def never() -> str:
            await trio.sleep_forever()
            raise AssertionError

        monkeypatch.setattr(daemon, "status_document", never)
        monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.05)
        with HomeLock(home_of(path).lock_file):
            async with connect_daemon(home_of(path)) as connection:
                with pytest.raises(
                    DaemonUnreachable, match=f"process {os.getpid()}.*it is busy, or hangs; try again"
                ):
                    await collect_text(connection, ask_for_text(), None)
        monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", PATIENCE_S)
        monkeypatch.setattr(daemon, "status_document", answer)


async def test_a_daemon_that_breaks_off_or_answers_nonsense_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    answers = [b"", frame(encode(StopRequest()), 100)]

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            await LocalConnection(stream).receive()
            await stream.send_all(answers.pop(0))

    with trio.socket.socket(socket.AF_UNIX) as listener:
        await listener.bind(str(path))
        listener.listen(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, answer, [trio.SocketListener(listener)])
            with pytest.raises(NotRunning, match="closed before the answer"):
                await request_status(home_of(path))
            with pytest.raises(EngineFailed, match="answered stop_request to a status_request"):
                await request_status(home_of(path))
            nursery.cancel_scope.cancel()


async def test_text_is_put_together_from_pieces_that_cut_letters(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path), connect_daemon(home_of(path)) as connection:
        daemon.pieces = ["ä".encode()[:1], "ä".encode()[1:] + b"b"]
        shown: list[str] = []
        assert await collect_text(connection, ask_for_text(2), shown.append) == ([7, 7], "äb", ENDED)
        assert shown == ["äb"]


async def test_a_daemon_that_is_busy_says_the_same_to_everybody(tmp_path: Path) -> None:
    busy = f"^{busy_sentence(CONNECTIONS_MAX)}$"
    async with serving(tmp_path) as (_, path), contextlib.AsyncExitStack() as stack:
        for _ in range(CONNECTIONS_MAX):
            await stack.enter_async_context(connect_daemon(home_of(path)))
        refused = await stack.enter_async_context(connect_daemon(home_of(path)))
        # It closes before the request can come, which is what makes sending fail.
        await trio.testing.wait_all_tasks_blocked(0.01)
        with pytest.raises(EngineFailed, match=busy):
            await collect_text(refused, ask_for_text(), None)
        with pytest.raises(EngineFailed, match=busy):
            await request_status(home_of(path))
        with pytest.raises(EngineFailed, match=busy):
            await request_stop(home_of(path), PATIENCE_S)
        await stack.aclose()
        await wait_free(path)


async def test_a_session_is_not_given_up_because_the_daemon_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks whether it is there and is refused has an answer: it is."""
    monkeypatch.setattr(control, "SILENCE_S", 0.02)
    async with serving(tmp_path) as (daemon, path), contextlib.AsyncExitStack() as stack:
        daemon.endless = True
        connection = await stack.enter_async_context(connect_daemon(home_of(path)))
        await connection.send(ask_for_text(1))
        assert isinstance(await connection.receive(), TokenEvent)
        for _ in range(CONNECTIONS_MAX - 1):
            await stack.enter_async_context(connect_daemon(home_of(path)))
        await trio.testing.wait_all_tasks_blocked(0.01)
        with trio.move_on_after(0.2) as waiting:
            await connection.receive()
        assert waiting.cancelled_caught


async def wait_free(path: Path) -> None:
    """Return as soon as the daemon answers: a slot is free once its own task has seen the end."""
    while True:
        with contextlib.suppress(EngineFailed):
            await request_status(home_of(path))
            return
        await trio.lowlevel.checkpoint()


async def test_an_impossible_request_was_called_wrongly(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path), connect_daemon(home_of(path)) as connection:
        daemon.error = UsageError("this model has no tokenizer: give token ids")
        with pytest.raises(UsageError, match="no tokenizer"):
            await collect_text(connection, ask_for_text(), None)


async def test_a_refused_session_is_an_error_with_its_reason(tmp_path: Path) -> None:
    async with serving(tmp_path) as (daemon, path), connect_daemon(home_of(path)) as connection:
        daemon.error = NotReady("the swarm is joining: 0 of 1 workers have joined")
        with pytest.raises(EngineFailed, match="0 of 1 workers"):
            await collect_text(connection, ask_for_text(), None)
