"""An engine's end of the socket pair to its control process: whole messages, blocking, from any thread.

The end of the stream means that control is gone, and an engine without control ends at once. Control's end
lives in the supervisor, under trio.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import Final

from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import KvasirError
from kvasir_proto.framing import FrameReader, frame
from kvasir_proto.limits import as_sentence
from kvasir_proto.messages.engine import ENGINE, EngineFault, EngineMessage

_READ_BYTES: Final = 64 * 1024


def fault_of(request: int | None, error: BaseException, code: str) -> EngineFault:
    """The fault that tells control of ``error``; an error of ours brings its own code and exit status."""
    detail = as_sentence(str(error) or type(error).__name__)
    if isinstance(error, KvasirError):
        return EngineFault(request, error.code, detail, error.exit_code)
    return EngineFault(request, code, detail, KvasirError.exit_code)


class ControlChannel:
    """Messages to and from control over ``sock``, which it owns."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._send_lock = threading.Lock()
        self._reader = FrameReader(ENGINE.size_bytes_max)
        self._ready: deque[EngineMessage] = deque()

    def send(self, message: EngineMessage) -> None:
        """Send one message. A control process that is gone is noticed by `receive`, so not reported here."""
        data = frame(encode(message), ENGINE.size_bytes_max)
        with self._send_lock:
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def receive(self) -> EngineMessage | None:
        """The next message, or None when control is gone. Raises `RemoteProtocolError` for nonsense."""
        while not self._ready:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._ready.extend(decode(body, ENGINE) for body in self._reader.feed(data))
        return self._ready.popleft()
