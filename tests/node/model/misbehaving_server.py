"""An HTTP server on the loopback interface that gives one file in ranges, and misbehaves as it is told.

A `Behaviour` is asked for each request and may answer instead of the server. All bytes of bodies that were
sent are counted, and the ranges that were asked for are kept.
"""

from __future__ import annotations

import contextlib
import re
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvasir_node.model.model_url import ModelUrl

Behaviour = Callable[["Answering", int, int], bool]
"""Told of each request for the bytes from the first to before the second; True when it has answered."""

PIECE_BYTES = 1 << 20

TAG = '"one"'


class Answering(BaseHTTPRequestHandler):
    """One connection; what a behaviour answers with."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: MisbehavingServer

    def do_GET(self) -> None:
        server = self.server
        name = self.path.partition("?")[0].rpartition("/")[2]
        data = server.files.get(name)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if data is None or asked is None:
            self.head(404, {"Content-Length": "0"})
            return
        begin, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
        with server.lock:
            server.asked.append((begin, end))
        if begin >= len(data):
            self.head(416, {"Content-Length": "0"})
            return
        if server.behaviour is None or not server.behaviour(self, begin, end):
            self.part(data, begin, end)

    def part(
        self,
        data: bytes,
        begin: int,
        end: int,
        send: bytes | None = None,
        headers: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        """Status 206 with these bytes, or with `send` in their stead; a header that is None is left out."""
        answer = {
            "Content-Range": f"bytes {begin}-{end - 1}/{len(data)}",
            "Content-Length": str(end - begin),
            "ETag": TAG,
        } | dict(headers)
        self.head(206, answer)
        if send is not None:
            self.body(send)
            return
        for at in range(begin, end, PIECE_BYTES):
            self.body(data[at : min(at + PIECE_BYTES, end)])

    def head(self, status: int, headers: Mapping[str, str | None]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()

    def body(self, data: bytes) -> None:
        with self.server.lock:
            self.server.sent_bytes += len(data)
        self.wfile.write(data)

    def cut(self) -> None:
        """End the connection after this answer, whatever it promised."""
        self.close_connection = True

    @property
    def data(self) -> bytes:
        return self.server.files[self.path.partition("?")[0].rpartition("/")[2]]

    def log_message(self, format: str, *args: Any) -> None:
        pass


@dataclass
class MisbehavingServer(ThreadingHTTPServer):
    """Serves `files` by name."""

    files: dict[str, bytes]
    """A `mmap` will do too: what is asked for is a slice."""
    behaviour: Behaviour | None = None
    asked: list[tuple[int, int]] = field(default_factory=list)
    sent_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    """Set when the block that serves is over, for behaviours that wait."""

    daemon_threads = True

    def __post_init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is what is tested."""

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # without asking for the name of this machine
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def url(self, name: str) -> ModelUrl:
        return ModelUrl(f"http://127.0.0.1:{self.server_port}/{name}")

    def __hash__(self) -> int:
        return id(self)


@contextlib.contextmanager
def serving(
    *paths: Path, behaviour: Behaviour | None = None, files: Mapping[str, bytes] = MappingProxyType({})
) -> Iterator[MisbehavingServer]:
    """A server of these files, while the block runs."""
    all_files = {each.name: each.read_bytes() for each in paths} | dict(files)
    with MisbehavingServer(all_files, behaviour) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
