"""Servers of llama.cpp's RPC protocol, as small programs: right, wrong, mute, dead and deaf ones."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path

import pytest
import trio

from kvasir_node.bench import rpc_server
from kvasir_node.bench.rpc_server import (
    RPC_PROTOCOL_MAJOR,
    find_library,
    require_ggml_version,
    run_rpc_server,
)
from kvasir_node.cli import main
from kvasir_proto.errors import EngineFailed, IncompatibleVersion, KvasirError, UsageError

pytestmark = pytest.mark.loopback

PROGRAM = """#!{python}
import signal, socket, struct, sys, time
port = int(sys.argv[sys.argv.index("-p") + 1])
assert sys.argv[sys.argv.index("-H") + 1] == "127.0.0.1"
def listen():
    server = socket.create_server(("127.0.0.1", port))
    while True:
        connection, _ = server.accept()
        with connection:
            yield connection
def reply(major):
    for connection in listen():
        request = connection.recv(33, socket.MSG_WAITALL)
        assert request[:9] == struct.pack("<BQ", 14, 24), request
        connection.sendall(struct.pack("<QBBBB24x", 28, major, 2, 1, 0))
{body}
"""


def program(directory: Path, body: str) -> Path:
    path = directory / "server"
    path.write_text(PROGRAM.format(python=sys.executable, body=body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (directory / "libggml-rpc.so").write_bytes(b"")
    return path


async def start(server: Path, directory: Path) -> rpc_server.RpcServerProcess:
    """The server, when it has ended again."""
    async with run_rpc_server(server, directory / "libggml-rpc.so", directory, n_threads=1) as running:
        running.require_alive()
        assert running.cpu_ns() >= 0
        return running


async def test_a_server_of_our_version_is_ended_with_the_context(tmp_path: Path) -> None:
    running = await start(program(tmp_path, f"reply({RPC_PROTOCOL_MAJOR})"), tmp_path)
    with pytest.raises(EngineFailed, match="ended with status -15"):
        running.require_alive()


async def test_a_server_that_does_not_heed_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "STOP_TIMEOUT_S", 0.2)
    body = f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\nreply({RPC_PROTOCOL_MAJOR})"
    started = time.monotonic()
    running = await start(program(tmp_path, body), tmp_path)
    assert time.monotonic() - started < 10
    with pytest.raises(EngineFailed, match="ended with status -9"):
        running.require_alive()


@pytest.mark.parametrize(
    "body, error, said",
    [
        ("reply(6)", IncompatibleVersion, "speaks version 6.2.1 of its protocol"),
        ("for each in listen(): pass", IncompatibleVersion, "does not answer as version 7"),
        ("for each in listen(): each.sendall(b'x' * 100)", IncompatibleVersion, "does not answer as"),
        ("for each in listen(): time.sleep(60)", IncompatibleVersion, "does not answer as"),
        ("print('no such device', flush=True)\nsys.exit(3)", EngineFailed, "status 3 .*no such device"),
        ("time.sleep(60)", EngineFailed, "did not answer within 1 s"),
    ],
)
async def test_what_is_no_server_for_us_is_told_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, error: type[KvasirError], said: str
) -> None:
    monkeypatch.setattr(rpc_server, "START_TIMEOUT_S", 1.0)
    monkeypatch.setattr(rpc_server, "_HELLO_TIMEOUT_S", 0.2)
    if "reply" in body or "sys.exit" in body or "listen" in body:
        monkeypatch.setattr(rpc_server, "START_TIMEOUT_S", 10.0)
    with trio.fail_after(20), pytest.raises(error, match=said):
        await start(program(tmp_path, body), tmp_path)


async def test_a_failed_client_is_told_by_what_became_of_the_server(tmp_path: Path) -> None:
    server = program(tmp_path, f"reply({RPC_PROTOCOL_MAJOR})")
    async with run_rpc_server(server, tmp_path / "libggml-rpc.so", tmp_path, n_threads=1) as running:
        alive = running.failure_of_client(EngineFailed("killed by SIGABRT"))
        assert "RPC client gave up: killed by SIGABRT" in str(alive)
        running._process.kill()
        await running._process.wait()
        assert "RPC server ended with status -9" in str(running.failure_of_client(EngineFailed("SIGABRT")))


def test_the_library_lies_beside_the_server_or_is_named(tmp_path: Path) -> None:
    server = program(tmp_path, "")
    assert find_library(server, None) == tmp_path / "libggml-rpc.so"
    other = tmp_path / "other.so"
    with pytest.raises(UsageError, match="not there"):
        find_library(server, other)
    other.write_bytes(b"")
    assert find_library(server, other) == other
    (tmp_path / "libggml-rpc.so").unlink()
    with pytest.raises(UsageError, match="--rpc-library"):
        find_library(server, None)
    with pytest.raises(UsageError, match="no program"):
        find_library(tmp_path / "missing", None)


def test_a_library_of_another_ggml_is_refused_by_its_files_name(tmp_path: Path) -> None:
    real = tmp_path / "libggml-rpc.so.0.24.0"
    real.write_bytes(b"")
    link = tmp_path / "libggml-rpc.so"
    link.symlink_to(real)
    require_ggml_version(link, "0.24.0")
    with pytest.raises(IncompatibleVersion, match=r"0\.24\.0.*0\.25\.3"):
        require_ggml_version(link, "0.25.3")


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--peers", "rpc"], "--rpc-server"),
        (["--rpc-server", "/bin/true"], "--peers rpc"),
        (["--peers", "rpc", "--rpc-server", "/nonexistent/server"], "no program"),
    ],
)
def test_half_of_the_options_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["--home", str(tmp_path), "bench", *arguments]) == UsageError.exit_code
    assert said in capsys.readouterr().err
