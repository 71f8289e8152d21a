"""The sessions of a backbone on its llama.cpp contexts: what the core of sessions decides is done here.

Each context has a thread that changes its cache, decodes its ubatch, samples, and tells the core; one thread
more keeps time. The lease is checked before each ubatch and again between sampling and the first token that
leaves. Clients hear of a session in the order in which the core says it, from one thread at a time. It is not
known where experts are, nor how tokens travel on.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.hook import DecodeAborted
from kvasir_node.backbone.sampling import Sampler, log_probabilities
from kvasir_node.engine.lease import LeaseExpired, boottime_ns
from kvasir_node.telemetry import get_logger
from kvasir_proto.errors import KvasirError, LocalProtocolError, NoHolderLeft, UsageError
from kvasir_proto.ids import SessionId
from kvasir_proto.instants import Instant, between, in_seconds
from kvasir_proto.limits import as_sentence
from kvasir_proto.sampling import Sampling, SamplingOptions
from kvasir_proto.sessions.core import SessionCore
from kvasir_proto.sessions.options import SessionOptions
from kvasir_proto.sessions.requests import (
    AbortDecode,
    CacheStep,
    Cancel,
    Decode,
    Decoded,
    DecodeFailed,
    Emit,
    End,
    EndAll,
    HoldersChanged,
    Open,
    Place,
    Refuse,
    Request,
    Sampled,
    Unsampled,
)

log = get_logger()

CLOSE_TIMEOUT_S: Final = 5.0
"""How long a context's thread is waited for when everything ends."""


class SequenceTrunk(Protocol):
    """What is asked of a `Trunk` with several sequences."""

    n_vocab: int

    def change_cache(self, step: CacheStep) -> None:
        """Change the cache as the core wants it."""

    def decode_places(self, places: Sequence[Place]) -> None:
        """Decode one ubatch; raises when it fails, and has taken it out of the cache then."""

    def n_in_cache(self, sequence: int) -> int:
        """Tokens of a sequence."""

    def logits(self, index: int) -> npt.NDArray[np.float32]:
        """Logits of that place, until the next decode."""

    def is_end_of_generation(self, token: int) -> bool:
        """Whether a token ends a text."""


class LayerDispatch(Protocol):
    """What is asked of the `Dispatcher` that a context's layer calls go to."""

    def watched_by(self, check: Callable[[], None]) -> AbstractContextManager[None]:
        """While inside, ``check`` runs whenever a layer call waits."""

    def settle(self) -> None:
        """Clear up behind a ubatch."""

    def missing_experts(self) -> dict[int, tuple[int, ...]]:
        """Experts without a holder."""


class ExclusiveUse:
    """A lock that goes from one thread to the other: who gives it back and wants it again comes second.

    With a plain lock a context that decodes on and on would let nobody else in.
    """

    def __init__(self) -> None:
        self._turnstile = threading.Lock()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._turnstile:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@dataclass(frozen=True, slots=True)
class SessionContext:
    """A context to decode in. Who uses it, or its dispatcher, is inside of ``exclusive``."""

    trunk: SequenceTrunk
    dispatch: LayerDispatch | None = None
    exclusive: ExclusiveUse = field(default_factory=ExclusiveUse)


@dataclass(frozen=True, slots=True)
class WantedSession:
    """A session that is wanted; ``n_top`` is None where no log-probabilities are."""

    opened: Open
    sampling: Sampling | SamplingOptions
    n_top: int | None = None


@dataclass(frozen=True, slots=True)
class NextToken:
    """A session's next token, under whose (epoch, term), and its log-probabilities where they are wanted."""

    emitted: Emit
    authority: tuple[int, int]
    log_probability: float | None
    top: tuple[tuple[int, float], ...]


class SessionListener(Protocol):
    """Who hears what becomes of sessions: from any thread, one call at a time. It must not block or raise."""

    def take_token(self, token: NextToken) -> None:
        """A session goes on, or ends with this token."""

    def take_end(self, end: End) -> None:
        """A session is over."""

    def take_refusal(self, refusal: Refuse) -> None:
        """A session is not begun."""


@dataclass(slots=True, eq=False)
class _Live:
    """A session that has not ended, with what only its context's thread uses."""

    wanted: WantedSession
    sampler: Sampler | None = None
    told: tuple[float | None, tuple[tuple[int, float], ...]] = (None, ())


class Sessions:
    """All sessions of one backbone. `open`, `cancel` and the rest from any thread."""

    def __init__(
        self,
        contexts: Sequence[SessionContext],
        options: SessionOptions,
        listener: SessionListener,
        *,
        check_authority: Callable[[], tuple[int, int]],
        now: Callable[[], Instant] = lambda: Instant(boottime_ns()),
    ) -> None:
        """``check_authority`` gives the (epoch, term) in force and raises `LeaseExpired`.

        Every trunk has the cells, sequences and ubatch that ``options`` say.
        """
        if len(contexts) != options.n_contexts:
            raise LocalProtocolError(f"{len(contexts)} contexts, and not {options.n_contexts}")
        self._contexts = contexts
        self._core = SessionCore(options)
        self._listener = listener
        self._check_authority = check_authority
        self._now = now
        self._lock = threading.Condition()
        """Of the core and all below, and of the order in which the listener hears."""
        self._live: dict[SessionId, _Live] = {}
        self._is_closed = False
        self._wakes_at: Instant | None = None
        self._authority = (0, 0)
        self._is_aborting = [False for _ in contexts]
        self._next: list[queue.SimpleQueue[Decode | None]] = [queue.SimpleQueue() for _ in contexts]
        self._threads = [
            threading.Thread(target=self._decode, args=(index,), name=f"decode {index}", daemon=True)
            for index in range(len(contexts))
        ]
        self._threads.append(threading.Thread(target=self._keep_time, name="session time", daemon=True))
        for thread in self._threads:
            thread.start()

    # -- from any thread ---------------------------------------------------------------------------

    def open(self, wanted: WantedSession) -> bool:
        """Take a session in; what becomes of it the listener hears. Whether it was not refused at once.

        Raises `UsageError` for tokens that are not of the vocabulary, `LocalProtocolError` for a session
        that is there already, or when everything has ended.
        """
        n_vocab = self._contexts[0].trunk.n_vocab
        if any(not 0 <= token < n_vocab for token in wanted.opened.tokens):
            raise UsageError(f"the prompt has a token id outside the vocabulary of {n_vocab}")
        with self._lock:
            if self._is_closed:
                raise LocalProtocolError("nothing is generated here any more")
            if wanted.opened.session not in self._live:
                self._live[wanted.opened.session] = _Live(wanted)
            self._command(wanted.opened)
            return wanted.opened.session in self._live

    def cancel(self, session: SessionId) -> None:
        """Nobody wants this session any more: it ends now, and a layer call that waits for it alone soon."""
        with self._lock:
            self._command(Cancel(session))

    def end_all(self, code: str, detail: str) -> None:
        """End every session as failed."""
        with self._lock:
            self._command(EndAll(code, as_sentence(detail)))

    def note_holders(self) -> None:
        """Some expert has a holder more: who was set aside is tried again when none is missing."""
        if self._is_covered():
            with self._lock:
                self._command(HoldersChanged())

    @property
    def n_sessions(self) -> int:
        """Sessions that have not ended."""
        with self._lock:
            return self._core.n_sessions

    def close(self) -> bool:
        """End every session and thread. Idempotent; waits a bounded time.

        Whether all have ended: if not, one still uses its context.
        """
        with self._lock:
            if not self._is_closed:
                self._command(EndAll("stopped", "the backbone stops"))
                self._is_closed = True
                self._lock.notify_all()
                for each in self._next:
                    each.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        return not any(thread.is_alive() for thread in self._threads)

    # -- with the lock -----------------------------------------------------------------------------

    def _command(self, request: Request) -> None:
        self._core.command(request, self._now())
        self._carry_out()

    def _carry_out(self) -> None:
        for effect in self._core.drain():
            match effect:
                case Decode():
                    self._is_aborting[effect.context] = False
                    self._next[effect.context].put(effect)
                case AbortDecode(context):
                    self._is_aborting[context] = True
                case Emit():
                    live = self._live[effect.session]
                    if effect.reason is not None:
                        del self._live[effect.session]
                    self._listener.take_token(NextToken(effect, self._authority, *live.told))
                case End():
                    del self._live[effect.session]
                    self._listener.take_end(effect)
                case Refuse():
                    del self._live[effect.session]
                    self._listener.take_refusal(effect)
        due = self._core.next_deadline()
        if due is not None and (self._wakes_at is None or due < self._wakes_at):
            self._lock.notify_all()

    # -- threads -----------------------------------------------------------------------------------

    def _keep_time(self) -> None:
        with self._lock:
            while not self._is_closed:
                self._wakes_at = due = self._core.next_deadline()
                if due is None:
                    self._lock.wait()
                elif (left := in_seconds(between(self._now(), due))) > 0:
                    self._lock.wait(min(left, threading.TIMEOUT_MAX))
                else:
                    self._core.tick(self._now())
                    self._carry_out()

    def _decode(self, index: int) -> None:
        context = self._contexts[index]
        while (decode := self._next[index].get()) is not None:
            with context.exclusive:
                event, authority = self._attempt(context, decode)
                with self._lock:
                    self._authority = authority
                    self._core.receive(event, index, self._now())
                    self._carry_out()
                if context.dispatch is not None:
                    context.dispatch.settle()  # only now: clients know already
            if isinstance(event, DecodeFailed) and event.is_for_want_of_holders:
                self.note_holders()  # another one may have come while this was found out

    def _attempt(self, context: SessionContext, decode: Decode) -> tuple[Decoded | DecodeFailed, Any]:
        """Decode a ubatch and sample; what came of it, and under which (epoch, term)."""
        authority = (0, 0)
        failure: BaseException
        try:
            self._check_authority()
            for step in decode.steps:
                context.trunk.change_cache(step)
            decode = Decode(decode.context, (), decode.places)
            with self._abortable(context, decode.context):
                context.trunk.decode_places(decode.places)
            samples = self._samples(context.trunk, decode.places)
            return Decoded(samples), self._check_authority()  # sampling may have taken long
        except LeaseExpired as error:
            # Their steps are still to be done: nothing may be left in the cache that the core has given away.
            for step in decode.steps:
                context.trunk.change_cache(step)
            self.end_all(error.code, str(error))
            failure = error
        except DecodeAborted as error:
            failure = error
        except KvasirError as error:
            failure = error
        except Exception as error:
            # The thread goes on: a context whose thread is dead would never answer again.
            log.exception("decode_crashed")
            failure = error
        return self._failed(context, decode.places, failure), authority

    def _failed(
        self, context: SessionContext, places: Sequence[Place], failure: BaseException
    ) -> DecodeFailed:
        standing = {each.sequence: context.trunk.n_in_cache(each.sequence) for each in places}
        is_unserved = isinstance(failure, NoHolderLeft)
        unserved = frozenset(
            places[each].session for each in (failure.tokens if isinstance(failure, NoHolderLeft) else ())
        )
        known = isinstance(failure, KvasirError)
        return DecodeFailed(
            code=failure.code if isinstance(failure, KvasirError) else "internal",
            detail=as_sentence(str(failure) if known else f"{type(failure).__name__}: {failure}"),
            standing=tuple(sorted(standing.items())),
            unserved=unserved,
            is_for_want_of_holders=is_unserved,
            is_aborted=isinstance(failure, DecodeAborted | LeaseExpired),
        )

    def _samples(self, trunk: SequenceTrunk, places: Sequence[Place]) -> tuple[Sampled | Unsampled, ...]:
        samples: list[Sampled | Unsampled] = []
        for index, place in enumerate(places):
            if not place.is_sampled:
                continue
            live = self._live.get(place.session)
            if live is None:  # it has ended meanwhile; the core passes over this
                samples.append(Unsampled(place.session, "cancelled", ""))
                continue
            try:
                token = self._sample(live, trunk, index, place.position + 1)
            except KvasirError as error:
                samples.append(Unsampled(place.session, error.code, as_sentence(str(error))))
            else:
                samples.append(Sampled(place.session, token, trunk.is_end_of_generation(token)))
        return tuple(samples)

    def _sample(self, live: _Live, trunk: SequenceTrunk, index: int, position: int) -> int:
        wanted = live.wanted
        if live.sampler is None:
            tokens = wanted.opened.tokens
            emitted = tokens[len(tokens) - wanted.opened.n_emitted :]
            live.sampler = Sampler(wanted.sampling, trunk.n_vocab, emitted)
        logits = trunk.logits(index)
        token = live.sampler.sample(logits, position)
        if wanted.n_top is not None:
            live.told = log_probabilities(logits, token, wanted.n_top)
        return token

    def _abortable(self, context: SessionContext, index: int) -> AbstractContextManager[None]:
        """While inside, a layer call that waits ends when nobody wants its ubatch any more."""
        if context.dispatch is None:
            return contextlib.nullcontext()

        def check() -> None:
            if self._is_aborting[index]:
                raise DecodeAborted

        return context.dispatch.watched_by(check)

    def _is_covered(self) -> bool:
        return not any(
            each.dispatch is not None and each.dispatch.missing_experts() for each in self._contexts
        )
