"""The gateway's sessions, wherever the backbone is, and whoever becomes it while they last.

Each session is a `Continuation`, which decides; here it gets its streams, its time and the news of terms, and
its client the tokens. The backbone is another node, reached over a stream, or this very one, reached over
queues: the other end is a `SessionServer` in both cases. HTTP, text and engines are not known here.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

import trio

from kvasir_node.driver.session_link import SessionLink, link_within
from kvasir_node.gateway.ports import CompletionRefused, GeneratedToken, TokenRequest
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import ControlStream
from kvasir_node.telemetry import get_logger
from kvasir_proto.codec import encode
from kvasir_proto.continuation import (
    Ask,
    AttemptFailed,
    Begin,
    Continuation,
    ContinuationOptions,
    Deliver,
    Fail,
    FollowTerm,
    GiveUp,
    Refuse,
    SessionWanted,
)
from kvasir_proto.election.requests import TermFollowed, TermVoided
from kvasir_proto.errors import (
    KvasirError,
    LocalProtocolError,
    NotReady,
    RemoteProtocolError,
    error_of_session,
)
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, between, in_seconds, seconds
from kvasir_proto.limits import as_sentence
from kvasir_proto.messages.session import OpenSession, StillHere
from kvasir_proto.node_core import NodeEvent
from kvasir_proto.term_proof import ProvenTerm

log = get_logger()

SESSION_TIMEOUT: Final[Duration] = seconds(3600)
STILL_HERE_S: Final = 5.0
"""How often a backbone is told that its gateway is there; it waits four times as long for a word."""


class SwarmCompletions:
    """`gateway.ports.Completions` on any node of a swarm, backbone or not.

    `take_event` must be given what the node's core says, and everything is called in one trio thread. There
    is nothing to run: each session's tasks live inside its own context.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        term: ProvenTerm | None,
        open_stream: Callable[[NodeId], Awaitable[ControlStream]],
        serve: Callable[[NodeId, SessionLink], Awaitable[None]],
        now: Callable[[], Instant],
        options: ContinuationOptions | None = None,
    ) -> None:
        """``term`` is what is proven when this begins, from the disk.

        ``open_stream`` opens a stream for one session to another node, reaching it first; it raises
        `TransportUnavailable` in bounded time. ``serve`` is this node's own `SessionServer.serve`.
        """
        self._node_id = node_id
        self._term = term
        self._open_stream = open_stream
        self._serve = serve
        self._now = now
        self._options = ContinuationOptions() if options is None else options
        self._sessions: set[_Session] = set()

    def take_event(self, event: NodeEvent) -> None:
        """Hear what this node's core says of terms; never waits."""
        match event:
            case TermFollowed(term, _):
                self._term = term
            case TermVoided(epoch, term) if self._term is not None and self._term[:2] == (epoch, term):
                self._term = None
            case _:
                return
        for session in list(self._sessions):
            session.follow(self._term)

    @asynccontextmanager
    async def open(self, request: TokenRequest) -> AsyncIterator[AsyncIterator[GeneratedToken]]:
        """See `Completions.open`. While no backbone serves, it takes up to `open_patience`."""
        wanted = self._wanted(request)
        async with open_unwrapping_nursery() as nursery:
            session = _Session(self, wanted, nursery)
            self._sessions.add(session)
            try:
                session.follow(self._term)
                nursery.start_soon(session.keep_time)
                await session.settled.wait()
                if not session.has_begun:
                    assert session.error is not None
                    raise session.error
                yield _Tokens(session)
            finally:
                self._sessions.discard(session)
                nursery.cancel_scope.cancel()

    def _wanted(self, request: TokenRequest) -> SessionWanted:
        """Raises `CompletionRefused` for what no message can carry."""
        try:
            encode(
                OpenSession(
                    epoch=0,
                    term=0,
                    client=request.client,
                    token_ids=request.token_ids,
                    n_emitted=0,
                    sampling=request.sampling,
                    n_tokens=request.n_tokens_max,
                    end_tokens=request.stop_token_ids,
                    n_top=request.n_top,
                    deadline_ms=1,
                )
            )
        except LocalProtocolError as error:
            raise CompletionRefused(as_sentence(error.reason), "too_long") from None
        return SessionWanted(
            request.client,
            request.token_ids,
            request.sampling,
            request.n_tokens_max,
            request.stop_token_ids,
            request.n_top,
            after(self._now(), SESSION_TIMEOUT),
        )

    async def link_to(self, backbone: NodeId, nursery: trio.Nursery) -> SessionLink:
        """A link to this node's session server; raises `TransportUnavailable`."""
        if backbone != self._node_id:
            return SessionLink(await self._open_stream(backbone))
        near, far = link_within()
        nursery.start_soon(self._serve_within, far)
        return near

    async def _serve_within(self, link: SessionLink) -> None:
        try:
            await self._serve(self._node_id, link)
        finally:
            await link.close()


class _Session:
    """One client's session. Its tasks are in the nursery of whoever opened it."""

    def __init__(self, owner: SwarmCompletions, wanted: SessionWanted, nursery: trio.Nursery) -> None:
        self._owner = owner
        self._nursery = nursery
        self._core = Continuation(wanted, owner._now(), owner._options)
        self._attempts: dict[int, trio.CancelScope] = {}
        self._is_due = trio.Event()
        # Room for all of them: who reads slowly holds up nobody.
        self._into, self.out = trio.open_memory_channel[GeneratedToken](wanted.n_tokens_max + 1)
        self.settled = trio.Event()
        """It has its place, or will have none."""
        self.has_begun = False
        self.error: KvasirError | None = None
        """Why it gives no more tokens, where it did not end well."""

    def follow(self, term: ProvenTerm | None) -> None:
        """This is the newest proven term."""
        self._core.command(FollowTerm(term), self._owner._now())
        self._carry_out()

    async def keep_time(self) -> None:
        """Tell the core when something is due, until the session is over."""
        while (due := self._core.next_deadline()) is not None:
            wait_s = in_seconds(between(self._owner._now(), due))
            if wait_s <= 0:
                self._core.tick(self._owner._now())
                self._carry_out()
                continue
            self._is_due = trio.Event()
            with trio.move_on_after(wait_s):
                await self._is_due.wait()

    def _carry_out(self) -> None:
        for effect in self._core.drain():
            match effect:
                case Ask():
                    scope = self._attempts[effect.attempt] = trio.CancelScope()
                    self._nursery.start_soon(self._attempt, effect, scope)
                    if effect.attempt > 1:
                        log.info(
                            "session_asked_again",
                            backbone=effect.backbone,
                            term=effect.request.term,
                            attempt=effect.attempt,
                            n_emitted=effect.request.n_emitted,
                        )
                case GiveUp(attempt):
                    if attempt in self._attempts:
                        self._attempts[attempt].cancel()
                case Begin():
                    self.has_begun = True
                    self.settled.set()
                case Deliver(token):
                    self._into.send_nowait(
                        GeneratedToken(token.token, token.log_probability, token.top, token.finish)
                    )
                case Refuse(refusal, reason, retry_after):
                    self.error = CompletionRefused(reason, refusal, in_seconds(retry_after))
                case Fail(code, reason):
                    log.warning("session_failed", code=code, reason=reason)
                    is_waiting_over = code == "no_backbone"
                    self.error = NotReady(reason) if is_waiting_over else error_of_session(code, reason)
        if self._core.is_over:
            self._into.close()
            self.settled.set()
        self._is_due.set()

    async def _attempt(self, ask: Ask, scope: trio.CancelScope) -> None:
        """Ask one backbone, and hear what it says until the attempt is given up."""
        reason = "its stream has ended"
        with scope:
            try:
                await self._converse(ask)
            except (KvasirError, RemoteProtocolError) as error:
                reason = str(error)
        del self._attempts[ask.attempt]
        self._core.command(AttemptFailed(ask.attempt, reason), self._owner._now())
        self._carry_out()

    async def _converse(self, ask: Ask) -> None:
        async with open_unwrapping_nursery() as nursery:
            link = await self._owner.link_to(ask.backbone, nursery)
            try:
                await link.send(ask.request)
                nursery.start_soon(_say_still_here, link)
                while True:
                    message = await link.receive(math.inf)
                    self._core.receive(message, ask.attempt, self._owner._now())
                    self._carry_out()
            finally:
                await link.close()


async def _say_still_here(link: SessionLink) -> None:
    while True:
        await trio.sleep(STILL_HERE_S)
        await link.send(StillHere())


class _Tokens:
    """What comes of a session; not a generator, which nobody closes whom its reader leaves in the middle."""

    def __init__(self, session: _Session) -> None:
        self._session = session

    def __aiter__(self) -> AsyncIterator[GeneratedToken]:
        return self

    async def __anext__(self) -> GeneratedToken:
        try:
            return await self._session.out.receive()
        except trio.EndOfChannel:
            if self._session.error is not None:
                raise self._session.error from None
            raise StopAsyncIteration from None
