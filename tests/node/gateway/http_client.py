"""A client over one stream, as far as tests need one: h11 says what the bytes mean."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import h11
import trio


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class HttpClient:
    """Asks one thing after another."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._http = h11.Connection(h11.CLIENT)

    async def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        """Send a request whole; ``_`` in a header's name is a hyphen."""
        sent = {"host": "localhost", "content-length": str(len(body))}
        if body:
            sent["content-type"] = "application/json"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        events: list[h11.Event] = [h11.Request(method=method, target=path, headers=list(sent.items()))]
        if body:
            events.append(h11.Data(data=body))
        data = b"".join(self._http.send(each) or b"" for each in [*events, h11.EndOfMessage()])
        await self.stream.send_all(data)

    async def head(self) -> h11.Response:
        """The head of the answer."""
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event
            assert isinstance(event, h11.InformationalResponse)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            assert isinstance(event, h11.Data)
            yield bytes(event.data)

    async def receive(self) -> Answer:
        """The whole answer."""
        response = await self.head()
        body = b"".join([piece async for piece in self.pieces()])
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        return Answer(
            response.status_code, {name.decode(): value.decode() for name, value in response.headers}, body
        )

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """A request and its answer."""
        await self.send(method, path, body, **headers)
        return await self.receive()

    async def _event(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(bytes(await self.stream.receive_some(1 << 16)))
        return event
