"""One client's session as its gateway keeps it going: which backbone is asked, and what is believed of it.

A token is accepted at the next position only, from the backbone that is asked now, and under the (epoch,
term) that is proven: so each is delivered once and never revised, whatever comes late, twice or forged. When
a backbone is lost, the one of the newest proven term is asked to go on from the tokens that were accepted.
Waiting ends: for a first place, for another one, for a word, and the session altogether. Streams, nodes'
addresses and how a term is proven are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, after, between, milliseconds, seconds, sooner
from kvasir_proto.limits import EndTokens, as_sentence
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
from kvasir_proto.sampling import SamplingOptions
from kvasir_proto.term_proof import ProvenTerm

DEADLINE_EXPIRED: Final = "session_deadline_expired"
_DEADLINE_MS_MAX: Final = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class ContinuationOptions:
    """How long is waited for what."""

    open_patience: Duration = seconds(10)  # noqa: RUF009 - an integer
    """Until some backbone gives the session its first place; then the client is refused."""
    patience: Duration = seconds(60)  # noqa: RUF009 - an integer
    """Without a place, since the last token; then the session has failed. An election takes seconds."""
    silence_max: Duration = seconds(10)  # noqa: RUF009 - an integer
    """Without a word of a backbone, which says one every two seconds; then it is lost."""
    retry_first: Duration = milliseconds(250)  # noqa: RUF009 - an integer
    """Before the same backbone is asked again; then twice as long each time."""
    retry_max: Duration = seconds(2)  # noqa: RUF009 - an integer
    losses_max: int = 4
    """Places that may be lost in a row without a token between. A prompt that kills every engine that reads
    it must not be taken to all of them.
    """


# --- what it is told ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionWanted:
    """Up to ``n_tokens_max`` tokens after ``token_ids``, and none after one of ``end_tokens``."""

    client: str
    token_ids: tuple[int, ...]
    sampling: SamplingOptions
    n_tokens_max: int
    end_tokens: EndTokens
    n_top: int
    deadline: Instant


@dataclass(frozen=True, slots=True)
class FollowTerm:
    """This term is proven, and on the disk; None: the one that was followed is void."""

    term: ProvenTerm | None


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """The backbone could not be reached, or the stream to it has ended."""

    attempt: int
    reason: str


Request: TypeAlias = FollowTerm | AttemptFailed

# --- what is to be done -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask this node for the session, on a stream of its own. What comes on it belongs to this attempt."""

    attempt: int
    backbone: NodeId
    request: OpenSession


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the stream of this attempt; nothing that came on it counts any more."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The session has its first place. Told once."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """The session's next token; the last one has a ``finish``."""

    token: SessionToken


@dataclass(frozen=True, slots=True)
class Refuse:
    """The session never began, and is over."""

    refusal: SessionRefusal
    reason: str
    retry_after: Duration


@dataclass(frozen=True, slots=True)
class Fail:
    """The session cannot go on, and is over."""

    code: str
    reason: str


Effect: TypeAlias = Ask | GiveUp | Begin | Deliver | Refuse | Fail


class Continuation:
    """See the module. Begins with no backbone known: `FollowTerm` says who it is."""

    def __init__(self, wanted: SessionWanted, now: Instant, options: ContinuationOptions) -> None:
        self._wanted = wanted
        self._options = options
        self._emitted: list[int] = []
        self._term: ProvenTerm | None = None
        """The newest that is proven."""
        self._highest = (-1, -1)
        self._n_attempts = 0
        self._asked: ProvenTerm | None = None
        """What the current attempt asks; None while there is none."""
        self._heard_at = now
        self._is_placed = False
        self._has_begun = False
        self._waits_since = now
        """While it has no place: since when."""
        self._waited = Duration(0)
        """How long it was without a place before that, since the last token."""
        self._retry_at: Instant | None = None
        self._n_retries = 0
        self._n_losses = 0
        self._reason = "no backbone is known yet"
        self._is_over = False
        self._effects: list[Effect] = []

    # -- the five verbs ----------------------------------------------------------------------------

    def command(self, request: Request, now: Instant) -> None:
        """Take in what is proven of terms, and what became of streams."""
        if self._is_over:
            return
        match request:
            case FollowTerm(term):
                self._follow(term, now)
            case AttemptFailed(attempt, reason):
                if self._is_current(attempt):
                    self._lose(reason, now, is_hard=True)
        self._go_on(now)

    def receive(self, message: SessionMessage, attempt: int, now: Instant) -> None:
        """Take in what came on the stream of this attempt. What is not believed costs its sender."""
        if self._is_over or not self._is_current(attempt):
            return  # it was given up meanwhile
        self._heard_at = now
        match message:
            case SessionPlaced():
                self._note_place(now)
            case SessionToken():
                self._take_token(message, now)
            case SessionRefused():
                self._take_refusal(message, now)
            case SessionBroken(code, reason, is_final):
                if is_final:
                    self._end(Fail(code, reason))
                else:
                    self._give_up(reason, now, is_hard=code != TERM_OVER)
            case StillHere():
                pass
            case OpenSession():
                self._give_up("the backbone asks for what it is asked for", now, is_hard=True)
        self._go_on(now)

    def tick(self, now: Instant) -> None:
        """End what has had its time, and ask again where that is due."""
        if self._is_over:
            return
        if now >= self._wanted.deadline:
            self._end_without(DEADLINE_EXPIRED, "the session's deadline has passed")
        elif not self._is_placed and now >= self._patience_ends():
            self._end_without("no_backbone", self._reason)
        elif self._asked is not None and now >= after(self._heard_at, self._options.silence_max):
            self._give_up("the backbone has fallen silent", now, is_hard=True)
        self._go_on(now)

    def next_deadline(self) -> Instant | None:
        """When `tick` is due; None once the session is over."""
        if self._is_over:
            return None
        due: Instant | None = self._wanted.deadline
        if not self._is_placed:
            due = sooner(due, self._patience_ends())
        if self._asked is not None:
            due = sooner(due, after(self._heard_at, self._options.silence_max))
        elif self._term is not None:
            due = sooner(due, self._retry_at)
        return due

    def drain(self) -> list[Effect]:
        """What is to be done, in this order; each is handed out once."""
        effects, self._effects = self._effects, []
        return effects

    @property
    def is_over(self) -> bool:
        """Whether the last token was delivered, or why there will be none was told."""
        return self._is_over

    # -- terms and attempts ------------------------------------------------------------------------

    def _is_current(self, attempt: int) -> bool:
        return self._asked is not None and attempt == self._n_attempts

    def _follow(self, term: ProvenTerm | None, now: Instant) -> None:
        if term == self._term or (term is not None and term[:2] <= self._highest):
            return  # a newer proof of the same term, or an older term: a fence never goes back
        self._term = term
        if term is not None:
            self._highest = term[:2]
        if self._asked is not None:
            reason = "its term is void" if term is None else f"{term.backbone} is the backbone now"
            self._give_up(reason, now, is_hard=False)
        self._retry_at, self._n_retries = None, 0

    def _go_on(self, now: Instant) -> None:
        """Ask the backbone, if nobody is asked and it is time to."""
        if self._is_over or self._asked is not None or self._term is None:
            return
        if self._retry_at is not None and now < self._retry_at:
            return
        wanted, term = self._wanted, self._term
        left_ms = between(now, wanted.deadline) // milliseconds(1)
        self._n_attempts += 1
        self._asked, self._heard_at, self._retry_at = term, now, None
        request = OpenSession(
            epoch=term.epoch,
            term=term.term,
            client=wanted.client,
            token_ids=(*wanted.token_ids, *self._emitted),
            n_emitted=len(self._emitted),
            sampling=wanted.sampling,
            n_tokens=wanted.n_tokens_max - len(self._emitted),
            end_tokens=wanted.end_tokens,
            n_top=wanted.n_top,
            deadline_ms=max(1, min(left_ms, _DEADLINE_MS_MAX)),
        )
        self._effects.append(Ask(self._n_attempts, term.backbone, request))

    def _give_up(self, reason: str, now: Instant, *, is_hard: bool, pause: Duration | None = None) -> None:
        """End the current attempt."""
        self._effects.append(GiveUp(self._n_attempts))
        self._lose(reason, now, is_hard=is_hard, pause=pause)

    def _lose(self, reason: str, now: Instant, *, is_hard: bool, pause: Duration | None = None) -> None:
        """The current attempt has ended; `is_hard` where nobody said why in good order."""
        assert self._asked is not None
        self._reason = as_sentence(reason)
        self._asked = None
        if self._is_placed:
            self._is_placed = False
            self._waits_since = now
            self._n_losses += is_hard
            if self._n_losses >= self._options.losses_max:
                self._end_without("session_lost", f"it was lost {self._n_losses} times in a row: {reason}")
                return
        if pause is None:
            pause = Duration(
                min(self._options.retry_first << min(self._n_retries, 16), self._options.retry_max)
            )
        self._n_retries += 1
        self._retry_at = after(now, pause)

    def _note_place(self, now: Instant) -> None:
        if self._is_placed:
            return
        self._waited = Duration(self._waited + between(self._waits_since, now))
        self._is_placed = True
        if not self._has_begun:
            self._has_begun = True
            self._effects.append(Begin())

    def _patience_ends(self) -> Instant:
        """When it has been without a place for too long; only while it has none."""
        options = self._options
        patience = options.patience if self._has_begun else options.open_patience
        return after(self._waits_since, Duration(patience - self._waited))

    # -- what a backbone says ----------------------------------------------------------------------

    def _take_token(self, token: SessionToken, now: Instant) -> None:
        asked, wanted = self._asked, self._wanted
        assert asked is not None
        position = len(wanted.token_ids) + len(self._emitted)
        if (token.epoch, token.term) != asked[:2]:
            self._give_up(f"it gives a token of ({token.epoch}, {token.term})", now, is_hard=True)
            return
        if token.position != position:
            reason = f"it gives the token of position {token.position}, and not of {position}"
            self._give_up(reason, now, is_hard=True)
            return
        if len(token.top) > wanted.n_top:
            self._give_up("it gives more likely tokens than were asked for", now, is_hard=True)
            return
        self._note_place(now)
        self._waited, self._n_losses, self._n_retries = Duration(0), 0, 0
        self._emitted.append(token.token)
        if token.finish is None and len(self._emitted) >= wanted.n_tokens_max:
            # It is the last, whatever the backbone thinks.
            token = SessionToken(
                token.position,
                token.epoch,
                token.term,
                token.token,
                token.log_probability,
                token.top,
                "length",
            )
        self._effects.append(Deliver(token))
        if token.finish is not None:
            self._effects.append(GiveUp(self._n_attempts))
            self._asked, self._is_over = None, True

    def _take_refusal(self, refused: SessionRefused, now: Instant) -> None:
        retry_after = Duration(refused.retry_after_ns)
        if refused.refusal == "too_long" or (refused.refusal == "busy" and not self._emitted):
            # No backbone has room for it, or its client may come again as well as it could.
            if not self._emitted:
                self._end(Refuse(refused.refusal, refused.reason, retry_after))
            else:
                self._end(Fail(refused.refusal, refused.reason))
        elif refused.refusal == "busy":
            self._give_up(refused.reason, now, is_hard=False, pause=self._pause_of(retry_after))
        else:
            self._give_up(refused.reason, now, is_hard=False)

    def _pause_of(self, retry_after: Duration) -> Duration:
        """Of a queue that is full a place is wanted, and only so much time is left to find one."""
        return Duration(max(self._options.retry_first, min(retry_after, self._options.silence_max)))

    # -- the end -----------------------------------------------------------------------------------

    def _end_without(self, code: str, reason: str) -> None:
        """No token will come any more."""
        if self._has_begun:
            self._end(Fail(code, reason))
        else:
            self._end(Refuse("not_ready", reason, seconds(1)))

    def _end(self, effect: Refuse | Fail) -> None:
        if self._asked is not None:
            self._effects.append(GiveUp(self._n_attempts))
            self._asked = None
        self._effects.append(effect)
        self._is_over = True
