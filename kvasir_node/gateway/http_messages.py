"""One HTTP request and the ways to answer it, as whoever answers sees them; no bytes, no connection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

Headers: TypeAlias = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class HttpHead:
    """The beginning of a request: what can be judged before a byte of its body is read.

    ``headers`` have lower-case names, in the order they came in. ``path`` is as it was sent, without query.
    """

    method: str
    path: str
    headers: Headers
    client: str
    """Who asks: the address that the connection comes from."""

    def header(self, name: str) -> str | None:
        """The first header of this lower-case name."""
        return next((value for each, value in self.headers if each == name), None)


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A whole request."""

    head: HttpHead
    body: bytes


class ClientGone(Exception):
    """The client closed its connection, or has stopped reading: there is nobody to answer."""


class HttpReply(Protocol):
    """The answer to one request: either `send`, or `start`, any number of `write`, and `finish`."""

    async def send(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole answer. Raises `ClientGone`, like all of these."""

    async def start(self, status: int, headers: Headers) -> None:
        """The head of an answer whose body comes in pieces."""

    async def write(self, data: bytes) -> None:
        """A piece of the body, on its way when this returns. One call at a time."""

    async def finish(self) -> None:
        """There are no more pieces."""


class HttpHandler(Protocol):
    """Whoever answers requests. Both may raise `Refusal`."""

    def check(self, head: HttpHead) -> None:
        """Refuse a request by its head, before its body is read."""

    async def answer(self, request: HttpRequest, reply: HttpReply) -> None:
        """Answer; cancelled when the client goes away."""
