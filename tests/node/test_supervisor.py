"""The supervisor with real child processes: engines that die, stop, babble or will not end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from trio.testing import MockClock

from kvasir_node import supervisor
from kvasir_node.engine.certificate import verify_engine_certificate
from kvasir_node.supervisor import (
    Engine,
    error_of_fault,
    keep_running,
    load_trunk,
    start_engine,
)
from kvasir_proto.errors import (
    ConfigurationInvalid,
    EngineFailed,
    IncompatibleVersion,
    KvasirError,
    ModelAborted,
    ModelUnusable,
    NoHolderLeft,
    PortInUse,
)
from kvasir_proto.ids import SwarmDigest, node_id_of
from kvasir_proto.instants import Instant
from kvasir_proto.limits import Role
from kvasir_proto.messages.engine import (
    EngineFault,
    EngineStatistics,
    Generate,
    LoadTrunk,
    QueryStatistics,
    Tokenized,
)
from kvasir_proto.sampling import SamplingOptions

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
NODE_ID = node_id_of(KEY.public_key().public_bytes_raw())
SWARM = SwarmDigest(bytes(range(32)))
PATIENCE_S = 60.0

PRELUDE = """
    import os, signal, socket, sys, time
    sys.path.insert(0, {repository!r})
    from kvasir_node.engine.channel import ControlChannel
    from kvasir_proto.messages.engine import *
    descriptor = int(sys.argv[sys.argv.index("--control-fd") + 1])
    connection = socket.socket(fileno=descriptor)
    channel = ControlChannel(connection)

    def introduce():
        channel.send(EngineHello(b"key", os.getpid(), "script"))
        assert isinstance(channel.receive(), EngineIdentity)
        channel.send(EngineCertificate(b"certificate"))
"""


def use_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """From now on engines are this script instead of ours."""
    script = tmp_path / "engine"
    prelude = textwrap.dedent(PRELUDE).format(repository=str(Path(__file__).parents[2]))
    script.write_text(f"#!{sys.executable}\n{prelude}\n{textwrap.dedent(body)}")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


async def start(nursery: trio.Nursery, tmp_path: Path, role: Role = "worker") -> Engine:
    return await start_engine(
        nursery, role, node_key=KEY, swarm_digest=SWARM, generation=3, directory=tmp_path
    )


@contextlib.asynccontextmanager
async def engine_of(tmp_path: Path, role: Role = "worker") -> AsyncIterator[Engine]:
    """A running engine, closed at the end; nothing of it may be left then."""
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            engine = await start(nursery, tmp_path, role)
            try:
                yield engine
            finally:
                await engine.close()
            assert engine.has_ended
            assert not is_alive(engine.pid)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def failure_of_start(tmp_path: Path) -> KvasirError:
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            with pytest.raises(KvasirError) as caught:
                await start(nursery, tmp_path)
    return caught.value


@pytest.mark.parametrize("said, given", [(None, b"1"), ("4", b"4")])
async def test_numpy_has_one_thread_in_an_engine_unless_somebody_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str | None, given: bytes
) -> None:
    """More of them wait by turning round, for each other, and nobody counts what that takes."""
    use_script(tmp_path, monkeypatch, "introduce()\nchannel.receive()")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", said)
    async with engine_of(tmp_path) as engine:
        environment = (await trio.Path(f"/proc/{engine.pid}/environ").read_bytes()).split(b"\0")
        assert b"OPENBLAS_NUM_THREADS=" + given in environment


# -- the real engine -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker", "backbone"])
async def test_an_engine_is_introduced_answers_and_ends_in_good_order(tmp_path: Path, role: Role) -> None:
    async with engine_of(tmp_path, role) as engine:
        assert engine.backend == "ggml-cpu"
        binding = verify_engine_certificate(engine.certificate, SWARM, NODE_ID, role)
        assert binding.generation == 3
        assert '"cpu_ns"' in await engine.statistics_json(PATIENCE_S)
    assert await engine.wait_ended() == "the engine has ended"


@pytest.mark.slow
async def test_an_engine_imports_nothing_from_where_its_daemon_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "somebody-elses"
    here.mkdir()
    (here / "queue.py").write_text("raise SystemExit(77)")
    monkeypatch.chdir(here)
    async with engine_of(tmp_path, "worker") as engine:
        assert engine.backend == "ggml-cpu"


@pytest.mark.slow
async def test_an_engine_ends_when_its_stream_does(tmp_path: Path) -> None:
    """As when control is killed: nobody says Shutdown, the end of the socket pair has to do."""
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            engine = await start(nursery, tmp_path)
            nursery.cancel_scope.cancel()
    assert engine.has_ended
    assert await engine.wait_ended() == "the engine has ended"
    assert not is_alive(engine.pid)


# -- engines that fail -----------------------------------------------------------------------------


async def test_an_engine_that_dies_at_start_is_noticed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(tmp_path, monkeypatch, "sys.exit(3)")
    error = await failure_of_start(tmp_path)
    assert type(error) is EngineFailed
    assert str(error) == "worker engine: ended with status 3"


async def test_what_an_engines_own_check_found_is_raised_as_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(
        tmp_path, monkeypatch, 'channel.send(EngineFault(None, "incompatible_version", "another ggml", 8))'
    )
    error = await failure_of_start(tmp_path)
    assert type(error) is IncompatibleVersion
    assert str(error) == "another ggml"


async def test_an_engine_that_says_nothing_is_given_up_and_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "START_TIMEOUT_S", 0.1)
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 0.1)
    use_script(tmp_path, monkeypatch, "signal.pause()")
    assert str(await failure_of_start(tmp_path)) == "worker engine: no answer in 0.1 s"


async def test_a_program_that_cannot_be_started_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    error = await failure_of_start(tmp_path)
    assert type(error) is EngineFailed
    assert "could not be started" in str(error)


@pytest.mark.parametrize(
    "babble", [r"b'\xff\xff\xff\xff'", r"b'\x00\x00\x00\x02xx'", "frame(encode(StopRequest()), 100)"]
)
async def test_an_engine_that_breaks_the_protocol_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, babble: str
) -> None:
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 0.1)
    use_script(
        tmp_path,
        monkeypatch,
        f"""
        from kvasir_proto.codec import encode
        from kvasir_proto.framing import frame
        from kvasir_proto.messages.local import StopRequest
        introduce()
        connection.sendall({babble})
        signal.pause()
        """,
    )
    async with engine_of(tmp_path) as engine:
        assert (await engine.wait_ended()).startswith("the engine broke the protocol")
        with pytest.raises(EngineFailed, match="broke the protocol"):
            await engine.statistics_json()


async def test_a_killed_engine_fails_who_waits_and_who_asks_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(tmp_path, monkeypatch, "introduce()\nchannel.receive()\nos.kill(os.getpid(), signal.SIGKILL)")
    async with engine_of(tmp_path) as engine:
        with pytest.raises(EngineFailed, match="worker engine: killed by SIGKILL"):
            await engine.statistics_json(PATIENCE_S)
        with pytest.raises(EngineFailed, match="killed by SIGKILL"):
            await engine.statistics_json(PATIENCE_S)
        assert [each async for each in engine.events] == []


async def test_what_an_engine_said_before_it_died_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(tmp_path, monkeypatch, "introduce()\nfor n in range(500): channel.send(Tokenized(n, (1, 2)))")
    async with engine_of(tmp_path) as engine:
        heard = [each async for each in engine.events]
        assert heard == [Tokenized(number, (1, 2)) for number in range(500)]


# -- engines that will not end ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "introduce()\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()",
        "introduce()\nos.kill(os.getpid(), signal.SIGSTOP)",
    ],
)
@pytest.mark.parametrize("close_first", [True, False])
async def test_an_engine_that_does_not_end_is_killed_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, close_first: bool
) -> None:
    monkeypatch.setattr(supervisor, "STOP_TIMEOUT_S", 0.1)
    use_script(tmp_path, monkeypatch, body)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            engine = await start(nursery, tmp_path)
            started = trio.current_time()
            if close_first:
                await engine.close()
            nursery.cancel_scope.cancel()
    assert trio.current_time() - started < 10.0
    assert await engine.wait_ended() == "killed by SIGKILL"
    assert not is_alive(engine.pid)


async def test_a_message_is_never_broken_off_midway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Senders are cancelled while the engine does not read; what it reads later is whole messages."""
    use_script(
        tmp_path,
        monkeypatch,
        """
        introduce()
        os.kill(os.getpid(), signal.SIGSTOP)
        n_sessions = 0
        while (message := channel.receive()) is not None:
            if isinstance(message, Generate):
                n_sessions += 1
            elif isinstance(message, QueryStatistics):
                channel.send(EngineStatistics(message.request, str(n_sessions) + " "))
            elif isinstance(message, Shutdown):
                break
        """,
    )
    large = Generate(bytes(16), "x" * 300_000, (), 1, SamplingOptions(), 1)  # type: ignore[arg-type]
    async with engine_of(tmp_path) as engine:
        n_sent = 0
        for _ in range(supervisor.FRAMES_WAITING_MAX + 8):
            with trio.move_on_after(0.02):
                await engine.send(large)
                n_sent += 1
        assert n_sent < supervisor.FRAMES_WAITING_MAX + 8, "the queue is bounded"
        os.kill(engine.pid, signal.SIGCONT)
        assert await engine.statistics_json(PATIENCE_S) == f"{n_sent} "


# -- what faults mean, and patience ----------------------------------------------------------------


@pytest.mark.parametrize(
    "code, exit_code, expected",
    [
        ("no_holder_left", 1, NoHolderLeft),
        ("port_in_use", PortInUse.exit_code, PortInUse),
        ("model_unusable", ModelUnusable.exit_code, ModelUnusable),
        ("incompatible_version", IncompatibleVersion.exit_code, IncompatibleVersion),
        ("busy", 1, EngineFailed),
        ("whatever", 99, EngineFailed),
        ("whatever", 0, EngineFailed),
    ],
)
def test_a_fault_becomes_the_error_it_stands_for(
    code: str, exit_code: int, expected: type[KvasirError]
) -> None:
    error = error_of_fault(EngineFault(None, code, "detail", exit_code))
    assert type(error) is expected
    assert str(error) == "detail"


def mock_now() -> Instant:
    return Instant(round(trio.current_time() * 1e9))


async def failures_of(errors: list[Exception], life_s: float) -> tuple[list[str], list[float]]:
    """What `keep_running` notes and when it starts anew, when lives of ``life_s`` end in these errors."""
    noted: list[str] = []
    starts: list[float] = []
    remaining = list(errors)

    async def run_once() -> NoReturn:
        starts.append(trio.current_time())
        await trio.sleep(life_s)
        if not remaining:
            raise KeyboardInterrupt
        raise remaining.pop(0)

    with contextlib.suppress(KeyboardInterrupt):
        await keep_running(run_once, mock_now, lambda error: noted.append(str(error)))
    return noted, [later - earlier - life_s for earlier, later in itertools.pairwise(starts)]


async def test_short_lives_are_started_ever_more_slowly(autojump_clock: MockClock) -> None:
    noted, pauses = await failures_of([EngineFailed(str(each)) for each in range(5)], 1.0)
    assert noted == ["0", "1", "2", "3", "4"]
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0])


async def test_a_long_life_starts_with_a_short_pause_again(autojump_clock: MockClock) -> None:
    _, pauses = await failures_of([EngineFailed(str(each)) for each in range(4)], 61.0)
    assert pauses == pytest.approx([1.0] * 4)


@pytest.mark.parametrize("kind", [IncompatibleVersion, PortInUse, ModelUnusable, ConfigurationInvalid])
async def test_what_makes_a_first_start_pointless_is_raised_and_waited_out_later(
    autojump_clock: MockClock, kind: type[KvasirError]
) -> None:
    with pytest.raises(kind):
        await failures_of([kind("at once")], 1.0)
    noted, _ = await failures_of([EngineFailed("first"), kind("later")], 1.0)
    assert noted == ["first", "later"]


async def test_a_bug_is_not_waited_out(autojump_clock: MockClock) -> None:
    with pytest.raises(ZeroDivisionError):
        await failures_of([ZeroDivisionError()], 1.0)


ABORTS = {
    "without a word": ("os.abort()", "killed by SIGABRT"),
    "with ggml's words": (
        "channel.send(EngineFault(None, 'model_aborted', 'llama.cpp gave up: why', 7)); os.abort()",
        "llama.cpp gave up: why",
    ),
}


@pytest.mark.parametrize("case", ABORTS)
async def test_an_engine_that_aborts_says_why_to_whoever_waits_and_to_who_comes_later(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, reason = ABORTS[case]
    use_script(tmp_path, monkeypatch, f"introduce()\nchannel.receive()\n{script}")
    async with engine_of(tmp_path) as engine:
        with pytest.raises(ModelAborted, match=reason) as caught:
            await engine.exchange(QueryStatistics(1), EngineStatistics, 30.0)
        assert caught.value.exit_code == ModelUnusable.exit_code
        assert await engine.wait_ended() == reason
        assert isinstance(engine.end_error("what"), ModelAborted)
        with pytest.raises(ModelAborted, match=reason):
            await engine.send(QueryStatistics(2))


async def test_a_model_on_which_the_engine_dies_is_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_script(tmp_path, monkeypatch, "introduce()\nchannel.receive()\nos.abort()")
    async with engine_of(tmp_path) as engine:
        request = LoadTrunk(
            engine.next_request(), "/x", "/y", 8, 8, 1, True, "f16", False, False, 0, "none", None
        )
        with pytest.raises(ModelUnusable, match="killed by SIGABRT"):
            await load_trunk(engine, request)
