"""The gateway's sessions on a backbone that this node is itself: its port, over the backbone's duty.

Apart from the duty because words differ: a client's request here, an engine's messages there, and what
refuses whom and for how long. Where another node is the backbone every session is refused as not ready; the
way there is not built yet. HTTP is not known here.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from kvasir_node.gateway.ports import CompletionRefused, FinishReason, GeneratedToken, TokenRequest
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_proto.errors import EngineFailed, KvasirError, LocalProtocolError, NotReady, error_of_session
from kvasir_proto.ids import SessionId
from kvasir_proto.limits import as_sentence
from kvasir_proto.messages.engine import Generate, SessionEnded, TokenEmitted
from kvasir_proto.messages.local import USAGE_ERROR

OPEN_TIMEOUT_S: Final = 10.0
"""How long the engine may take to say whether a session has its place."""

SESSION_TIMEOUT_MS: Final = 3_600_000


class SessionRunner(Protocol):
    """What is asked of the backbone's duty."""

    async def run_session(
        self,
        wanted: Generate,
        emit: Callable[[TokenEmitted], Awaitable[None]],
        note_opened: Callable[[], None],
    ) -> SessionEnded:
        """Run one session; if cancelled, it is cancelled too. Raises `NotReady`."""


@dataclass(slots=True)
class _Opened:
    """A session on its way."""

    tokens: trio.MemorySendChannel[GeneratedToken]
    settled: trio.Event = field(default_factory=trio.Event)
    """It has its place, or will have none."""
    has_place: bool = False
    error: KvasirError | None = None
    """Why it gives no more tokens, where it did not end well."""

    def note_place(self) -> None:
        self.has_place = True
        self.settled.set()


class BackboneCompletions:
    """`gateway.ports.Completions` for the node that is the backbone."""

    def __init__(self, runner: SessionRunner) -> None:
        self._runner = runner

    @asynccontextmanager
    async def open(self, request: TokenRequest) -> AsyncIterator[AsyncIterator[GeneratedToken]]:
        """See `Completions.open`."""
        # Room for all of them: who reads slowly holds up nobody.
        into, out = trio.open_memory_channel[GeneratedToken](request.n_tokens_max + 1)
        opened = _Opened(into)
        async with open_unwrapping_nursery() as nursery:
            nursery.start_soon(self._run, request, opened)
            with trio.move_on_after(OPEN_TIMEOUT_S):
                await opened.settled.wait()
            if not opened.has_place:
                nursery.cancel_scope.cancel()
                raise opened.error or CompletionRefused("the backbone's engine does not answer", "not_ready")
            yield _Tokens(out, opened)
            nursery.cancel_scope.cancel()

    async def _run(self, request: TokenRequest, opened: _Opened) -> None:
        wanted = Generate(
            session=SessionId(secrets.token_bytes(16)),
            prompt=None,
            token_ids=request.token_ids,
            n_tokens=request.n_tokens_max,
            sampling=request.sampling,
            deadline_ms=SESSION_TIMEOUT_MS,
            client=request.client,
            end_tokens=request.stop_token_ids,
            n_top=request.n_top,
        )

        async def emit(token: TokenEmitted) -> None:
            opened.note_place()
            finish: FinishReason | None = "length" if token.is_last else None
            await opened.tokens.send(
                GeneratedToken(token.token, token.log_probability or 0.0, token.top, finish)
            )

        try:
            ended = await self._runner.run_session(wanted, emit, opened.note_place)
            if ended.reason == "end_of_text":
                opened.note_place()
                await opened.tokens.send(_last_of(ended))
            elif ended.reason != "length":
                opened.error = _error_of(ended)
        except NotReady as error:
            opened.error = error if opened.has_place else CompletionRefused(str(error), "not_ready")
        except LocalProtocolError as error:  # a number that no message can carry
            opened.error = CompletionRefused(as_sentence(error.reason), "too_long")
        except KvasirError as error:
            opened.error = error
        finally:
            opened.tokens.close()
            opened.settled.set()


def _last_of(ended: SessionEnded) -> GeneratedToken:
    """The token that ended the text, which is no part of it."""
    if ended.end_token is None:
        raise EngineFailed("a text has ended, and the engine does not say with what")
    return GeneratedToken(ended.end_token, ended.end_log_probability or 0.0, ended.end_top, "stop")


def _error_of(ended: SessionEnded) -> KvasirError:
    if ended.retry_after_ns:
        return CompletionRefused(ended.detail, "busy", ended.retry_after_ns / 1e9)
    if ended.code == USAGE_ERROR:
        return CompletionRefused(ended.detail, "too_long")
    if ended.code == "busy":
        return CompletionRefused(ended.detail, "busy")
    return error_of_session(ended.code or ended.reason, ended.detail)


class _Tokens:
    """What comes of a session; not a generator, which nobody closes whom its reader leaves in the middle."""

    def __init__(self, out: trio.MemoryReceiveChannel[GeneratedToken], opened: _Opened) -> None:
        self._out = out
        self._opened = opened

    def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        return self

    async def __anext__(self) -> GeneratedToken:
        try:
            return await self._out.receive()
        except trio.EndOfChannel:
            if self._opened.error is not None:
                raise self._opened.error from None
            raise StopAsyncIteration from None
