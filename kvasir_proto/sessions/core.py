"""The sessions of one backbone: who is admitted, what each context decodes next, how a session ends.

A session waits its client's turn, is promised a sequence and all the cells it can need, goes through its
prompt in chunks beside those that decode already, and then has one token in each ubatch of its context. A
ubatch that fails is made again without those that cannot be served; where nobody can say who they are,
halves of it are tried until they are found. What was emitted is never revised: what a cache has lost is
decoded again from the tokens. The core decodes nothing, samples nothing, and reads no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import SessionId
from kvasir_proto.instants import Duration, Instant, after, between, seconds, sooner
from kvasir_proto.limits import EndReason
from kvasir_proto.sessions.kv_cells import KvCells, Source
from kvasir_proto.sessions.options import SessionOptions
from kvasir_proto.sessions.requests import (
    AbortDecode,
    CacheStep,
    Cancel,
    ContextEvent,
    Decode,
    Decoded,
    DecodeFailed,
    Effect,
    Emit,
    End,
    EndAll,
    ForgetSequence,
    HoldersChanged,
    Open,
    Place,
    Refuse,
    Request,
    Sampled,
    Unsampled,
)
from kvasir_proto.sessions.turns import Turns

RETRY_AFTER_MIN: Final = seconds(1)
RETRY_AFTER_MAX: Final = seconds(120)
_RESIDENCE_WEIGHT: Final = 8
"""The mean time of a session counts the last one for an eighth."""


@dataclass(slots=True, eq=False)
class _Session:
    opened: Open
    number: int
    """The order in which sessions came."""
    waits_until: Instant
    tokens: list[int]
    n_emitted: int = 0
    n_decoded: int = 0
    """Tokens in its sequence of the cache; those after are decoded next, and what follows the last drawn."""
    sequence: int = -1
    n_cells: int = 0
    awaited: _Context | None = None
    """The context that is emptied for it while it is first in turn."""
    admitted: Instant | None = None
    aside_until: Instant | None = None
    """While it is set aside for want of a holder: when it fails for that."""
    patience_ends: Instant | None = None
    """The same, kept until it has got through a ubatch."""
    n_tries: int = 0
    fault: tuple[str, str] = ("", "")
    is_over: bool = False
    """It has ended, and its places in a ubatch are still being decoded."""

    @property
    def n_pending(self) -> int:
        return len(self.tokens) - self.n_decoded


@dataclass(slots=True, eq=False)
class _Context:
    index: int
    cells: KvCells
    sessions: list[_Session] = field(default_factory=list)
    """Those that are admitted here, in the order in which they were."""
    steps: list[CacheStep] = field(default_factory=list)
    decoding: tuple[Place, ...] = ()
    """The ubatch that is under way; empty while there is none."""
    in_ubatch: list[_Session] = field(default_factory=list)
    trials: list[list[_Session]] = field(default_factory=list)
    """Groups of a failed ubatch that are decoded apart; the last one first. Others wait meanwhile."""
    is_aborting: bool = False


class SessionCore:
    """The sessions of one backbone. See the module."""

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self._contexts = [
            _Context(
                index,
                KvCells(
                    options.n_cells, options.n_sequences, options.kept_prefixes, options.reused_tokens_min
                ),
            )
            for index in range(options.n_contexts)
        ]
        self._sessions: dict[SessionId, _Session] = {}
        """Those that have not ended."""
        self._waiting: list[_Session] = []
        self._n_waiting_tokens = 0
        self._turns = Turns()
        self._n_opened = 0
        self._residence: Duration = Duration(0)
        """How long an admitted session stays, on average."""
        self._effects: list[Effect] = []

    # -- the five verbs ----------------------------------------------------------------------------

    def command(self, request: Request, now: Instant) -> None:
        """Take in what somebody wants. Raises `LocalProtocolError` for a session that is there already."""
        match request:
            case Open():
                self._open(request, now)
            case Cancel(session_id):
                session = self._sessions.get(session_id)
                if session is not None:
                    self._end(session, "cancelled", "", "", now)
            case EndAll(code, detail):
                for session in list(self._sessions.values()):
                    self._end(session, "failed", code, detail, now)
            case HoldersChanged():
                for context in self._contexts:
                    for session in context.sessions:
                        session.aside_until = None
        self._go_on(now)

    def receive(self, event: ContextEvent, context: int, now: Instant) -> None:
        """Take in what became of the ubatch that this context was decoding.

        Raises `LocalProtocolError` where it was decoding none, or not these sessions.
        """
        if not self._contexts[context].decoding:
            raise LocalProtocolError(f"context {context} was decoding nothing")
        match event:
            case Decoded():
                self._take_decoded(self._contexts[context], event, now)
            case DecodeFailed():
                self._take_failure(self._contexts[context], event, now)
        self._go_on(now)

    def tick(self, now: Instant) -> None:
        """End what has had its time."""
        for session in list(self._sessions.values()):
            if session.opened.deadline <= now:
                self._end(
                    session, "failed", "session_deadline_expired", "the session's deadline has passed", now
                )
            elif session.aside_until is not None and session.aside_until <= now:
                self._end(session, "failed", *session.fault, now)
            elif session in self._waiting and session.waits_until <= now:
                self._forget_waiting(session)
                detail = "no place became free for the session in time"
                self._refuse(session.opened, "waited_too_long", detail, self._retry_after())
                self._turns.leave(session.opened.client)
        self._go_on(now)

    def next_deadline(self) -> Instant | None:
        """When `tick` is due; None while nothing is."""
        due: Instant | None = None
        for session in self._sessions.values():
            due = sooner(due, sooner(session.opened.deadline, session.aside_until))
        for session in self._waiting:
            due = sooner(due, session.waits_until)
        return due

    def drain(self) -> list[Effect]:
        """What is to be done, in this order; each is handed out once."""
        effects, self._effects = self._effects, []
        return effects

    # -- what is going on --------------------------------------------------------------------------

    @property
    def n_sessions(self) -> int:
        """Sessions that have not ended, waiting ones included."""
        return len(self._sessions)

    @property
    def n_waiting(self) -> int:
        """Sessions that wait for a sequence."""
        return len(self._waiting)

    def cells(self, context: int) -> KvCells:
        """What is promised of a context's cache; to be looked at only."""
        return self._contexts[context].cells

    # -- beginning ---------------------------------------------------------------------------------

    def _open(self, opened: Open, now: Instant) -> None:
        if opened.session in self._sessions:
            raise LocalProtocolError("a session of that name is there already")
        options, n_prompt = self._options, len(opened.tokens)
        if opened.n_tokens < 1:
            raise LocalProtocolError("a session of no tokens")
        if not n_prompt:
            self._refuse(opened, "empty_prompt", "the prompt is empty", None)
            return
        if n_prompt > options.n_cells:  # one that fills the context has room for what follows it, once
            detail = f"the prompt has {n_prompt} tokens, the context {options.n_cells}"
            self._refuse(opened, "prompt_too_long", detail, None)
            return
        session = _Session(opened, self._n_opened, after(now, options.waiting_time_max), list(opened.tokens))
        session.n_cells = min(n_prompt + opened.n_tokens - 1, options.n_cells)
        if not self._waiting and self._find_room(session) is not None:
            pass  # it is admitted at once, and waits for nobody
        elif (
            len(self._waiting) >= options.waiting_max
            or self._n_waiting_tokens + n_prompt > options.waiting_tokens_max
        ):
            self._refuse(opened, "queue_full", "too many sessions wait", self._retry_after())
            return
        elif self._n_waiting_of(opened.client) >= options.waiting_per_client_max:
            detail = "too many sessions of this client wait"
            self._refuse(opened, "client_queue_full", detail, self._retry_after())
            return
        self._n_opened += 1
        self._sessions[opened.session] = session
        self._waiting.append(session)
        self._n_waiting_tokens += n_prompt
        self._turns.enter(opened.client)

    def _n_waiting_of(self, client: str) -> int:
        return sum(each.opened.client == client for each in self._waiting)

    def _refuse(
        self,
        opened: Open,
        code: Literal[
            "empty_prompt", "prompt_too_long", "queue_full", "client_queue_full", "waited_too_long"
        ],
        detail: str,
        retry_after: Duration | None,
    ) -> None:
        self._effects.append(Refuse(opened.session, code, detail, retry_after))

    def _retry_after(self) -> Duration:
        """When a place in the queue, or a sequence, may have become free: never a promise."""
        n_slots = self._options.n_contexts * self._options.sessions_per_context
        expected = self._residence * max(1, len(self._waiting)) // n_slots
        return Duration(max(RETRY_AFTER_MIN, min(RETRY_AFTER_MAX, expected)))

    def _forget_waiting(self, session: _Session) -> None:
        """A session waits no more, and is not known any more."""
        self._waiting.remove(session)
        self._n_waiting_tokens -= len(session.opened.tokens)
        del self._sessions[session.opened.session]

    def _in_turn(self, sessions: Iterable[_Session]) -> list[_Session]:
        """Those of the client that has had least first; those of one client as they came."""
        return sorted(sessions, key=lambda each: (self._turns.account(each.opened.client), each.number))

    def _admit(self, now: Instant) -> None:
        """Give whoever's turn it is a sequence.

        The first for which no context has room has one emptied: nobody else is admitted there meanwhile, or
        small sessions would pass a large one for ever.
        """
        emptied: _Context | None = None
        for session in self._in_turn(self._waiting):
            context = self._find_room(session, emptied)
            if context is None:
                if emptied is None:
                    if session.awaited is None:  # or it would wait now for the one and now for the other
                        session.awaited = min(
                            self._contexts, key=lambda each: (each.cells.n_promised, each.index)
                        )
                    emptied = session.awaited
                continue
            self._waiting.remove(session)
            self._n_waiting_tokens -= len(session.opened.tokens)
            running = [
                Source(each.sequence, each.opened.client, each.tokens[: each.n_decoded])
                for each in (context.sessions if self._options.kept_prefixes else ())
                if each.opened.client == session.opened.client
            ]
            promise = context.cells.promise(session.n_cells, session.opened.client, session.tokens, running)
            session.sequence, session.n_decoded = promise.sequence, promise.n_reused
            session.admitted = now
            context.steps += promise.steps
            context.sessions.append(session)

    def _find_room(self, session: _Session, emptied: _Context | None = None) -> _Context | None:
        """The context with the fewest sessions, and then the most cells, that has room for this one."""
        fitting = [
            each
            for each in self._contexts
            if each is not emptied
            and each.cells.n_running < self._options.sessions_per_context
            and each.cells.has_room_for(session.n_cells)
        ]
        return min(
            fitting, key=lambda each: (each.cells.n_running, each.cells.n_promised, each.index), default=None
        )

    # -- decoding ----------------------------------------------------------------------------------

    def _go_on(self, now: Instant) -> None:
        self._admit(now)
        for context in self._contexts:
            if not context.decoding:
                self._compose(context)

    def _compose(self, context: _Context) -> None:
        """Begin the context's next ubatch, if there is anything to be decoded."""
        while context.trials:
            context.trials[-1] = [each for each in context.trials[-1] if not each.is_over]
            if any(each.aside_until is None for each in context.trials[-1]):
                break
            context.trials.pop()
        among = context.trials[-1] if context.trials else context.sessions
        able = [each for each in among if each.aside_until is None]
        places: list[Place] = []
        in_ubatch = []
        for session, n_tokens in self._shares(able):
            first, total = session.n_decoded, len(session.tokens)
            places += [
                Place(
                    session.opened.session,
                    session.sequence,
                    position,
                    session.tokens[position],
                    position == total - 1,
                )
                for position in range(first, first + n_tokens)
            ]
            in_ubatch.append(session)
        if not places:
            return
        context.decoding, context.in_ubatch = tuple(places), in_ubatch
        self._effects.append(Decode(context.index, tuple(context.steps), context.decoding))
        context.steps.clear()

    def _shares(self, sessions: list[_Session]) -> Iterator[tuple[_Session, int]]:
        """Who has how many places in the next ubatch: each that decodes one, and prompts what is left."""
        decoding = [each for each in sessions if each.n_pending == 1]
        room = self._options.n_ubatch - len(decoding)
        if decoding:
            room = min(room, self._options.prefill_chunk)
        for session in decoding:
            yield session, 1
        for session in self._in_turn(each for each in sessions if each.n_pending > 1):
            n_tokens = min(room, self._stretch(session))
            if n_tokens:
                yield session, n_tokens
            room -= n_tokens

    def _stretch(self, session: _Session) -> int:
        """How many of a session's pending tokens may go through the layers together.

        In a context with one session they go as they went the first time: the prompt by itself, and what was
        emitted one by one, since how many go together decides in which order numbers are added. So whoever
        goes on with a session, here after a failure or elsewhere, computes the very same.
        """
        if self._options.sessions_per_context > 1:
            return session.n_pending
        n_prompt = len(session.opened.tokens) - session.opened.n_emitted
        return max(1, n_prompt - session.n_decoded)

    def _take_decoded(self, context: _Context, event: Decoded, now: Instant) -> None:
        wanted = {each.session for each in context.decoding if each.is_sampled}
        given = {each.session: each for each in event.samples}
        if set(given) != wanted or len(event.samples) != len(wanted):
            raise LocalProtocolError(f"context {context.index} has sampled for other sessions than it should")
        n_places: dict[SessionId, int] = {}
        for place in context.decoding:
            n_places[place.session] = n_places.get(place.session, 0) + 1
        if context.trials:
            context.trials.pop()
        sessions = self._finish_ubatch(context)
        for session in sessions:
            session_id = session.opened.session
            session.n_decoded += n_places[session_id]
            session.n_tries, session.patience_ends = 0, None
            self._turns.charge(session.opened.client, n_places[session_id])
            sample = given.get(session_id)
            if sample is None or session.is_over:
                continue
            match sample:
                case Sampled(_, token, is_end):
                    self._emit(session, token, is_end, now)
                case Unsampled(_, code, detail):
                    self._end(session, "failed", code, detail, now)
        self._let_go(context, sessions)

    def _emit(self, session: _Session, token: int, is_end: bool, now: Instant) -> None:
        opened, position = session.opened, len(session.tokens)
        reason: Literal["length", "end_of_text"] | None = None
        if is_end or token in opened.end_tokens:
            reason = "end_of_text"
        else:
            session.tokens.append(token)
            session.n_emitted += 1
            if session.n_emitted >= opened.n_tokens or len(session.tokens) > session.n_cells:
                reason = "length"
        self._effects.append(Emit(opened.session, position, token, reason))
        if reason is not None:
            self._close(session, now)

    # -- failing and ending ------------------------------------------------------------------------

    def _take_failure(self, context: _Context, event: DecodeFailed, now: Instant) -> None:
        """Find out who cannot be served, and go on with the others."""
        trial = context.trials.pop() if context.trials else None
        sessions = self._finish_ubatch(context)
        standing = dict(event.standing)
        for session in sessions:
            session.n_decoded = standing.get(session.sequence, 0)
            if session.n_pending <= 0 and not session.is_over:
                # All of it went through, and its logits are gone: there is no going back by one token only.
                context.steps.append(ForgetSequence(session.sequence))
                session.n_decoded = 0
        concerned = [each for each in sessions if not each.is_over]
        if event.is_aborted:
            pass  # nobody's fault
        elif event.unserved or len(sessions) == 1:
            for session in concerned:
                if len(sessions) == 1 or session.opened.session in event.unserved:
                    self._fail(session, event, now)
            others = [each for each in trial or () if not each.is_over and each.aside_until is None]
            if others:
                context.trials.append(others)
        elif concerned:  # and it may have been one that is over meanwhile
            middle = len(concerned) // 2
            context.trials += [each for each in (concerned[middle:], concerned[:middle]) if each]
        self._let_go(context, sessions)

    def _fail(self, session: _Session, event: DecodeFailed, now: Instant) -> None:
        """A session cannot be served: it is set aside while a holder may come, or fails."""
        session.n_tries += 1
        session.fault = (event.code, event.detail)
        if session.patience_ends is None:
            session.patience_ends = after(now, self._options.coverage_patience)
        may_wait = event.is_for_want_of_holders and session.n_tries < self._options.tries_max
        if may_wait and now < session.patience_ends:
            session.aside_until = session.patience_ends
        else:
            self._end(session, "failed", *session.fault, now)

    def _finish_ubatch(self, context: _Context) -> list[_Session]:
        sessions, context.in_ubatch, context.decoding = context.in_ubatch, [], ()
        context.is_aborting = False
        return sessions

    def _end(self, session: _Session, reason: EndReason, code: str, detail: str, now: Instant) -> None:
        """End a session, whatever it is doing."""
        self._effects.append(End(session.opened.session, reason, code, detail))
        if session in self._waiting:
            self._forget_waiting(session)
            self._turns.leave(session.opened.client)
            return
        self._close(session, now)

    def _close(self, session: _Session, now: Instant) -> None:
        """What follows for the core when an admitted session has ended; its client knows already."""
        session.is_over = True
        del self._sessions[session.opened.session]
        assert session.admitted is not None
        stayed = between(session.admitted, now)
        if self._residence:
            stayed = Duration((self._residence * (_RESIDENCE_WEIGHT - 1) + stayed) // _RESIDENCE_WEIGHT)
        self._residence = stayed
        self._turns.leave(session.opened.client)
        context = next(each for each in self._contexts if session in each.sessions)
        if session not in context.in_ubatch:
            self._let_go(context, [session])
        elif all(each.is_over for each in context.in_ubatch) and not context.is_aborting:
            context.is_aborting = True
            self._effects.append(AbortDecode(context.index))

    def _let_go(self, context: _Context, sessions: Iterable[_Session]) -> None:
        """Give back, or keep, the cells of those that are over."""
        for session in sessions:
            if session.is_over and session in context.sessions:
                context.sessions.remove(session)
                in_cache = session.tokens[: session.n_decoded]
                context.steps += context.cells.release(session.sequence, session.opened.client, in_cache)
