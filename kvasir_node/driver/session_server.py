"""The backbone's side of sessions that gateways ask for, its own node's gateway included.

Decides who may have one (members of this swarm, as far as their records count here), how many a node may
have, and what a gateway is told when the backbone's duty refuses, fails or ends a session. A gateway that
ends its stream, or says nothing any more, has its session cancelled. How sessions are decoded is the duty's
affair, and going on elsewhere the gateway's.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from kvasir_node.driver.backbone_duty import SESSION_TIMEOUT_MS
from kvasir_node.driver.session_link import SessionLink
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.ports import ControlStream, SwarmCore
from kvasir_node.telemetry import get_logger
from kvasir_proto.errors import (
    Busy,
    EngineFailed,
    LocalProtocolError,
    NotReady,
    RemoteProtocolError,
    TransportUnavailable,
)
from kvasir_proto.ids import NodeId, SessionId
from kvasir_proto.instants import seconds
from kvasir_proto.limits import as_sentence
from kvasir_proto.messages.engine import Generate, SessionEnded, TokenEmitted
from kvasir_proto.messages.local import USAGE_ERROR
from kvasir_proto.messages.session import (
    TERM_OVER,
    OpenSession,
    SessionBroken,
    SessionMessage,
    SessionPlaced,
    SessionRefusal,
    SessionRefused,
    SessionToken,
    StillHere,
)

log = get_logger()

SESSIONS_PER_NODE_MAX: Final = 64
"""Sessions that one gateway's node has or waits for; it may stand for many clients."""

STILL_HERE_S: Final = 2.0
"""How often a gateway is told that the backbone is there."""

GATEWAY_SILENCE_S: Final = 20.0
"""A gateway that has said nothing for so long is gone: it says every five seconds that it is there."""

READY_PATIENCE_S: Final = 8.0
"""How long the backbone of a term that has just begun may take to have its holders; whoever waits is told
that it is there. Asking again and again would cost a stream each time, when it has most to do.
"""

REQUEST_TIMEOUT_S: Final = 10.0

_ENDED_WITH_THE_LEASE: Final = frozenset({"lease_expired", "stopped"})
_NOT_FOR_GOOD: Final = frozenset({"no_holder_left", "cancelled"})
"""Codes of failures that another attempt may not have."""


class SessionRunner(Protocol):
    """What is asked of the backbone's duty."""

    @property
    def reign_version(self) -> tuple[int, int] | None:
        """The (epoch, term) that it is the backbone of now."""

    async def wait_ready(self, version: tuple[int, int]) -> None:
        """Wait until it serves, or is not the backbone of this (epoch, term) any more."""

    async def run_session(
        self,
        wanted: Generate,
        emit: Callable[[TokenEmitted], Awaitable[None]],
        note_opened: Callable[[], None],
    ) -> SessionEnded:
        """Run one session; if cancelled, it is cancelled too. Raises `NotReady`."""


@dataclass(slots=True, eq=False)
class _Session:
    asked: OpenSession
    link: SessionLink
    position: int
    """Of its next token."""
    has_place: bool = False
    placed: trio.Event = field(default_factory=trio.Event)

    def note_place(self) -> None:
        self.has_place = True
        self.placed.set()


class SessionServer:
    """Serves session after session, each in whatever task calls `serve`."""

    def __init__(self, *, node_id: NodeId, core: SwarmCore, runner: SessionRunner) -> None:
        """``node_id`` is this node's own, whose gateway needs no record to be let in."""
        self._node_id = node_id
        self._core = core
        self._runner = runner
        self._n_sessions: Counter[NodeId] = Counter()

    async def serve_stream(self, node_id: NodeId, stream: ControlStream) -> None:
        """Serve a stream that a node opened, which is closed when this returns."""
        await self.serve(node_id, SessionLink(stream))

    async def serve(self, node_id: NodeId, link: SessionLink) -> None:
        """Answer one question for a session until it is over. Whoever made the link closes it.

        Raises `TransportUnavailable` where nobody listens any more, `RemoteProtocolError` for what is no such
        question.
        """
        asked = await link.receive(REQUEST_TIMEOUT_S)
        if not isinstance(asked, OpenSession):
            raise RemoteProtocolError(f"{asked.kind} opens no session", "unexpected_message")
        refusal = self._refusal_of(node_id, asked)
        if refusal is not None:
            await link.send(refusal)
            return
        self._n_sessions[node_id] += 1
        try:
            await self._serve_admitted(node_id, asked, link)
        finally:
            self._n_sessions[node_id] -= 1
            if not self._n_sessions[node_id]:
                del self._n_sessions[node_id]

    def _refusal_of(self, node_id: NodeId, asked: OpenSession) -> SessionRefused | None:
        """Why a session is not even tried."""
        if node_id != self._node_id and self._core.record_of(node_id) is None:
            return _refused("not_ready", f"{node_id} is no member of this swarm, as far as is known here")
        if self._runner.reign_version != (asked.epoch, asked.term):
            reason = f"{self._node_id} is not the backbone of ({asked.epoch}, {asked.term})"
            return _refused("not_ready", reason)
        if self._n_sessions[node_id] >= SESSIONS_PER_NODE_MAX:
            return _refused("busy", f"{SESSIONS_PER_NODE_MAX} sessions of {node_id} run or wait already")
        return None

    async def _serve_admitted(self, node_id: NodeId, asked: OpenSession, link: SessionLink) -> None:
        session = _Session(asked, link, len(asked.token_ids))
        async with open_unwrapping_nursery() as nursery:
            nursery.start_soon(self._listen, node_id, link, nursery.cancel_scope)
            nursery.start_soon(self._say_still_here, session)
            last = await self._run(node_id, session)
            if last is not None:
                await link.send(last)
            nursery.cancel_scope.cancel()

    async def _listen(self, node_id: NodeId, link: SessionLink, scope: trio.CancelScope) -> None:
        """Cancel the session when its gateway wants no more of it, or is gone."""
        try:
            while True:
                message = await link.receive(GATEWAY_SILENCE_S)
                if not isinstance(message, StillHere):
                    raise RemoteProtocolError(f"{message.kind} within a session", "unexpected_message")
        except TransportUnavailable as error:
            log.debug("session_left", node=node_id, reason=str(error))
            scope.cancel()

    async def _say_still_here(self, session: _Session) -> None:
        """Say again and again that the backbone is there, and once that the session has its place."""
        while not session.has_place:
            with trio.move_on_after(STILL_HERE_S):
                await session.placed.wait()
            if not session.has_place:
                await session.link.send(StillHere())
        await session.link.send(SessionPlaced())
        while True:
            await trio.sleep(STILL_HERE_S)
            await session.link.send(StillHere())

    async def _run(self, node_id: NodeId, session: _Session) -> SessionMessage | None:
        """Have the session decoded; what is to be said of its end, if its last token has not said it."""
        asked = session.asked
        wanted = Generate(
            session=SessionId(secrets.token_bytes(16)),
            prompt=None,
            token_ids=asked.token_ids,
            n_tokens=asked.n_tokens,
            sampling=asked.sampling,
            deadline_ms=min(asked.deadline_ms, SESSION_TIMEOUT_MS),
            client=_client_of(node_id, asked.client),
            end_tokens=asked.end_tokens,
            n_top=asked.n_top,
            n_emitted=asked.n_emitted,
        )

        async def emit(token: TokenEmitted) -> None:
            session.note_place()
            session.position = token.position + 1
            await session.link.send(
                SessionToken(
                    position=token.position,
                    epoch=token.epoch,
                    term=token.term,
                    token=token.token,
                    log_probability=token.log_probability or 0.0,
                    top=token.top,
                    finish="length" if token.is_last else None,
                )
            )

        with trio.move_on_after(READY_PATIENCE_S):
            await self._runner.wait_ready((asked.epoch, asked.term))
        try:
            ended = await self._runner.run_session(wanted, emit, session.note_place)
        except Busy as error:
            return _refused("busy", str(error))
        except NotReady as error:
            if session.has_place:
                return SessionBroken(TERM_OVER, as_sentence(str(error)), is_final=False)
            return _refused("not_ready", str(error))
        except LocalProtocolError as error:  # more than the engine can be told
            return _refused("too_long", error.reason)
        except EngineFailed as error:
            return SessionBroken(error.code, as_sentence(str(error)), is_final=False)
        return _last_word(session, ended)


def _last_word(session: _Session, ended: SessionEnded) -> SessionMessage | None:
    if ended.reason == "end_of_text":
        if ended.end_token is None:
            return SessionBroken(
                "internal", "a text has ended, and the engine does not say how", is_final=True
            )
        return SessionToken(
            position=session.position,
            epoch=session.asked.epoch,
            term=session.asked.term,
            token=ended.end_token,
            log_probability=ended.end_log_probability or 0.0,
            top=ended.end_top,
            finish="stop",
        )
    if ended.reason == "length":
        return None
    if ended.retry_after_ns or ended.code == "busy":
        return SessionRefused("busy", ended.detail, ended.retry_after_ns or seconds(1))
    if ended.code == USAGE_ERROR:
        return SessionRefused("too_long", ended.detail, 0)
    if ended.code in _ENDED_WITH_THE_LEASE:
        return SessionBroken(TERM_OVER, ended.detail, is_final=False)
    code = ended.code or ended.reason
    return SessionBroken(code, ended.detail, is_final=code not in _NOT_FOR_GOOD)


def _refused(refusal: SessionRefusal, reason: str) -> SessionRefused:
    return SessionRefused(refusal, as_sentence(reason), seconds(1))


def _client_of(node_id: NodeId, client: str) -> str:
    """Whose turn it is: nobody takes the turns, or shares what is kept for, a client of another node."""
    return hashlib.sha256(f"{node_id} {client}".encode()).hexdigest()[:32]
