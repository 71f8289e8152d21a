"""A process of llama.cpp's RPC server, to measure beside: started, asked for its version, watched, ended.

The server is the user's own build. It has no authentication, so it listens on this machine's loopback and
lives no longer than the benchmark. What its experts are asked is the engine's affair; this module knows a
process, a port and the one exchange that opens the protocol.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from kvasir_proto.errors import EngineFailed, IncompatibleVersion, KvasirError, UsageError
from kvasir_proto.limits import as_sentence
from kvasir_proto.messages.engine import RpcServer

RPC_PROTOCOL_MAJOR: Final = 7
"""RPC_PROTO_MAJOR_VERSION of the llama.cpp that this package pins: client and server must agree on it."""

START_TIMEOUT_S: Final = 20.0
STOP_TIMEOUT_S: Final = 5.0
_HELLO_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.1
_HOST: Final = "127.0.0.1"
_LIBRARY_NAMES: Final = ("libggml-rpc.so", "libggml-rpc.so.0", "libggml-rpc.dylib", "libggml-rpc.0.dylib")
_VERSION_IN_NAME: Final = re.compile(r"\d+\.\d+\.\d+")
_OUTPUT_BYTES_MAX: Final = 64 * 1024

# One byte of command, the size of what follows, 24 bytes of abilities, of which we have none.
_HELLO: Final = struct.pack("<BQ24x", 14, 24)
_HELLO_REPLY: Final = struct.Struct("<QBBBx24x")


def find_library(server: Path, named: Path | None) -> Path:
    """The client library of ``server``: ``named``, or what lies beside it. Raises `UsageError`."""
    if not os.access(server, os.X_OK) or not server.is_file():
        raise UsageError(f"{server} is no program that can be run: name llama.cpp's RPC server")
    if named is not None:
        if not named.is_file():
            raise UsageError(f"{named} is not there")
        return named.absolute()
    for directory in (server.resolve().parent, server.resolve().parent.parent / "lib"):
        for name in _LIBRARY_NAMES:
            if (directory / name).is_file():
                return directory / name
    raise UsageError(f"there is no libggml-rpc beside {server}: name it with --rpc-library")


def require_ggml_version(library: Path, ggml_version: str) -> None:
    """Raise `IncompatibleVersion` when the library's file says that it belongs to another ggml."""
    found = _VERSION_IN_NAME.search(library.resolve().name)
    if found is not None and found[0] != ggml_version:
        raise IncompatibleVersion(
            f"{library.name} belongs to ggml {found[0]}, the installed llama.cpp has {ggml_version}: build "
            "both RPC parts from the source of the installed one"
        )


@dataclass(slots=True, eq=False)
class RpcServerProcess:
    """A running server. Made by `run_rpc_server`."""

    address: RpcServer
    _process: trio.Process
    _output: Path

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def cpu_ns(self) -> int:
        """CPU time that the server has used, in nanoseconds; raises as `require_alive` does."""
        self.require_alive()
        fields = Path(f"/proc/{self.pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")

    def require_alive(self) -> None:
        """Raise `EngineFailed`, with the server's last words, when it has ended."""
        if (status := self._process.poll()) is not None:
            raise EngineFailed(f"llama.cpp's RPC server ended with status {status}{self._last_words()}")

    def failure_of_client(self, failure: KvasirError) -> KvasirError:
        """What to tell when the engine that used the server failed: the server's end, or the client's."""
        try:
            self.require_alive()
        except EngineFailed as error:
            return error
        return EngineFailed(f"llama.cpp's RPC client gave up: {failure}{self._last_words()}")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._output.read_bytes()[-_OUTPUT_BYTES_MAX:].decode(errors="replace").split("\n")
            if said := next((line.strip() for line in reversed(lines) if line.strip()), ""):
                return f" (its last line: {as_sentence(said)})"
        return ""


@contextlib.asynccontextmanager
async def run_rpc_server(
    executable: Path, library: Path, directory: Path, *, n_threads: int
) -> AsyncIterator[RpcServerProcess]:
    """A server on the CPU that answers and speaks our version; it has ended when the context ends.

    Paths are absolute; ``directory`` gets its output. Raises `EngineFailed` when it does not start or does
    not answer within `START_TIMEOUT_S`, `IncompatibleVersion` when it speaks another version.
    """
    port = _free_port()
    output = directory / "rpc-server.log"
    command = [str(executable), "-H", _HOST, "-p", str(port), "-t", str(n_threads), "-d", "CPU"]
    with output.open("wb") as log:
        try:
            process = await trio.lowlevel.open_process(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=directory
            )
        except OSError as error:
            raise EngineFailed(f"{executable} cannot be run: {error.strerror}") from None
    server = RpcServerProcess(RpcServer(str(library), _HOST, port), process, output)
    try:
        await _wait_answering(server)
        yield server
    finally:
        await _end(process)


async def _wait_answering(server: RpcServerProcess) -> None:
    reply = b""
    with trio.move_on_after(START_TIMEOUT_S):
        while not reply:
            server.require_alive()
            reply = await _say_hello(server.address.port)
            if not reply:
                await trio.sleep(_RETRY_S)
    server.require_alive()
    if not reply:
        raise EngineFailed(
            f"llama.cpp's RPC server did not answer within {START_TIMEOUT_S:g} s{server._last_words()}"
        )
    if len(reply) == _HELLO_REPLY.size:
        size_bytes, major, minor, patch = _HELLO_REPLY.unpack(reply)
        if size_bytes == _HELLO_REPLY.size - 8 and major == RPC_PROTOCOL_MAJOR:
            return
        if size_bytes == _HELLO_REPLY.size - 8:
            raise IncompatibleVersion(
                f"llama.cpp's RPC server speaks version {major}.{minor}.{patch} of its protocol, the "
                f"installed llama.cpp {RPC_PROTOCOL_MAJOR}: build the server from the installed one's source"
            )
    raise IncompatibleVersion(
        f"llama.cpp's RPC server does not answer as version {RPC_PROTOCOL_MAJOR} of its protocol does: build "
        "it from the source of the installed llama.cpp"
    )


async def _say_hello(port: int) -> bytes:
    """The server's answer; empty when nobody listens yet. A server that hangs up has answered wrongly."""
    try:
        stream = await trio.open_tcp_stream(_HOST, port)
    except OSError:
        return b""
    reply = b""
    async with stream:
        with trio.move_on_after(_HELLO_TIMEOUT_S), contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(_HELLO)
            while len(reply) < _HELLO_REPLY.size:
                data = await stream.receive_some(_HELLO_REPLY.size - len(reply))
                if not data:
                    break
                reply += data
    return reply or b"\0"


async def _end(process: trio.Process) -> None:
    """End the server: asked once, killed after `STOP_TIMEOUT_S`."""
    with trio.CancelScope(shield=True):
        process.terminate()
        with trio.move_on_after(STOP_TIMEOUT_S):
            await process.wait()
        process.kill()
        await process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind((_HOST, 0))
        return int(sock.getsockname()[1])
