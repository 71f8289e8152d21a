"""Server-sent events: an answer's objects as they come, and comments while there are none.

A comment in a long silence keeps proxies and clients from taking the connection for dead. What is written is
whole events, never two at a time.
"""

from __future__ import annotations

import json
from typing import Any, Final

import trio

from kvasir_node.gateway.http_messages import Headers, HttpReply

KEEP_ALIVE_S: Final = 10.0
"""Proxies let a silent connection go after 30 s or more."""

HEADERS: Final[Headers] = (
    ("Content-Type", "text/event-stream; charset=utf-8"),
    # nginx would collect the answer first.
    ("X-Accel-Buffering", "no"),
)


class EventStream:
    """The events of one answer whose head was sent."""

    def __init__(self, reply: HttpReply) -> None:
        self._reply = reply
        self._turn = trio.Lock()
        self._silent_since = trio.current_time()

    async def send(self, document: dict[str, Any]) -> None:
        """One object. JSON has no line ends of its own, so that it is one event."""
        await self._write(b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n")

    async def end(self) -> None:
        """The last event."""
        await self._write(b"data: [DONE]\n\n")
        await self._reply.finish()

    async def keep_alive(self) -> None:
        """Write a comment after each silence, until cancelled."""
        while True:
            await trio.sleep_until(self._silent_since + KEEP_ALIVE_S)
            if trio.current_time() >= self._silent_since + KEEP_ALIVE_S:
                await self._write(b": keep-alive\n\n")

    async def _write(self, data: bytes) -> None:
        async with self._turn:
            await self._reply.write(data)
            self._silent_since = trio.current_time()
