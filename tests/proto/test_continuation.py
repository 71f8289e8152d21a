"""A session that goes on: tables of what is believed, and a swarm whose backbones die, stall and lie.

The toy model's next token follows from all before it, so whatever happens there is one right text. Streams
keep order and lose only their end, as the real ones do; what was on its way still arrives after it was given
up.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_proto.continuation import (
    Ask,
    AttemptFailed,
    Begin,
    Continuation,
    ContinuationOptions,
    Deliver,
    Effect,
    Fail,
    FollowTerm,
    GiveUp,
    Refuse,
    SessionWanted,
)
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.instants import Duration, Instant, after, milliseconds, seconds
from kvasir_proto.messages.session import (
    TERM_OVER,
    OpenSession,
    SessionBroken,
    SessionMessage,
    SessionPlaced,
    SessionRefused,
    SessionToken,
    StillHere,
)
from kvasir_proto.sampling import Sampling, SamplingOptions
from kvasir_proto.term_proof import ProvenTerm

NODES = tuple(node_id_of(bytes([number]) * 32) for number in range(1, 5))
OPTIONS = ContinuationOptions()
PROMPT = (3, 1, 4)
WANTED = SessionWanted(
    "somebody", PROMPT, SamplingOptions(Sampling(seed=9)), 8, (99,), 1, Instant(seconds(600))
)
START = Instant(0)


def term(number: int, node: NodeId = NODES[0]) -> ProvenTerm:
    return ProvenTerm(0, number, node)


def following_token(tokens: tuple[int, ...]) -> int:
    value = 7
    for each in tokens:
        value = (value * 31 + each) % 9973
    return value


def right_text(n_tokens: int, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    tokens = prompt
    for _ in range(n_tokens):
        tokens = (*tokens, following_token(tokens))
    return list(tokens[len(prompt) :])


def token(position: int, number: int = 1, *, finish: Any = None, value: int = 5) -> SessionToken:
    return SessionToken(position, 0, number, value, -1.0, ((value, -1.0),), finish)


@dataclass
class Talk:
    """A continuation, and everything it wanted."""

    core: Continuation = field(default_factory=lambda: Continuation(WANTED, START, OPTIONS))
    now: Instant = START
    done: list[Effect] = field(default_factory=list)

    def follow(self, number: int, node: NodeId = NODES[0]) -> list[Effect]:
        self.core.command(FollowTerm(term(number, node)), self.now)
        return self.take()

    def hear(self, *messages: SessionMessage, attempt: int = 1) -> list[Effect]:
        for each in messages:
            self.core.receive(each, attempt, self.now)
        return self.take()

    def fail(self, attempt: int) -> list[Effect]:
        self.core.command(AttemptFailed(attempt, "it is gone"), self.now)
        return self.take()

    def wait(self, duration: Duration) -> list[Effect]:
        """Let time pass, and the timer go off as often as it is due."""
        end = after(self.now, duration)
        while (due := self.core.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.core.tick(self.now)
        self.now = end
        return self.take()

    def take(self) -> list[Effect]:
        effects = self.core.drain()
        self.done += effects
        return effects

    def of(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.done if isinstance(each, kind)]


def running() -> Talk:
    """A session that has its place at term 1's backbone, and one token."""
    talk = Talk()
    talk.follow(1)
    talk.hear(SessionPlaced(), token(3))
    return talk


def test_the_backbone_of_the_proven_term_is_asked_for_all_of_it() -> None:
    (ask,) = Talk().follow(6)
    assert isinstance(ask, Ask)
    assert (ask.attempt, ask.backbone) == (1, NODES[0])
    assert ask.request == OpenSession(0, 6, "somebody", PROMPT, 0, WANTED.sampling, 8, (99,), 1, 600_000)


def test_tokens_are_delivered_in_order_and_the_last_one_ends_it() -> None:
    talk = running()
    assert talk.of(Begin) == [Begin()]
    talk.hear(token(4), token(5, finish="stop"), token(6))
    assert [each.token.position for each in talk.of(Deliver)] == [3, 4, 5]
    assert talk.core.is_over
    assert talk.of(GiveUp) == [GiveUp(1)], "the stream is of no more use"
    assert talk.core.next_deadline() is None


def test_what_comes_from_nobody_that_is_asked_now_counts_for_nothing() -> None:
    talk = running()
    talk.follow(2, NODES[1])
    assert talk.done[-2:-1] == [GiveUp(1)]
    before = list(talk.done)
    talk.hear(token(4), SessionBroken("internal", "it lies", True), attempt=1)
    talk.fail(1)
    assert talk.done == before
    talk.hear(token(4, 2), attempt=2)
    assert [each.token.term for each in talk.of(Deliver)] == [1, 2]


@pytest.mark.parametrize(
    "lie",
    [
        token(3),
        token(5),
        token(4, 2),
        token(4, 0),
        replace(token(4), epoch=1),
        replace(token(4), top=((1, -1.0), (2, -2.0))),
        OpenSession(0, 1, "x", (1,), 0, SamplingOptions(), 1, (), 0, 1),
    ],
    ids=["again", "skipped", "later term", "earlier term", "later epoch", "more than asked", "a question"],
)
def test_a_backbone_that_lies_loses_the_session_and_nothing_of_it_is_delivered(lie: SessionMessage) -> None:
    talk = running()
    assert talk.hear(lie) == [GiveUp(1)]
    (ask,) = talk.wait(OPTIONS.retry_first)
    assert isinstance(ask, Ask)
    assert ask.request.token_ids == (*PROMPT, 5)
    assert len(talk.of(Deliver)) == 1


def test_what_was_emitted_goes_along_and_counts_against_what_is_left() -> None:
    talk = running()
    talk.hear(token(4, value=6))
    talk.follow(2, NODES[1])
    ask = talk.of(Ask)[-1]
    assert ask.backbone == NODES[1]
    assert (ask.request.token_ids, ask.request.n_emitted, ask.request.n_tokens) == ((*PROMPT, 5, 6), 2, 6)
    assert ask.request.sampling == WANTED.sampling


def test_a_backbone_that_does_not_stop_is_stopped() -> None:
    talk = running()
    talk.hear(*(token(position) for position in range(4, 20)))
    assert [each.token.finish for each in talk.of(Deliver)] == [None] * 7 + ["length"]
    assert talk.core.is_over


def test_an_older_term_is_never_followed_again_nor_the_same_asked_twice() -> None:
    talk = running()
    talk.follow(3, NODES[1])
    talk.follow(2, NODES[2])
    talk.follow(3, NODES[1])
    assert [each.backbone for each in talk.of(Ask)] == [NODES[0], NODES[1]]


def test_a_void_term_gives_nothing_more_until_a_later_one_is_proven() -> None:
    talk = running()
    talk.core.command(FollowTerm(None), talk.now)
    assert talk.take() == [GiveUp(1)]
    talk.hear(token(4))
    assert talk.wait(seconds(5)) == []
    assert talk.follow(1) == []
    (ask,) = talk.follow(2, NODES[1])
    assert isinstance(ask, Ask)


def test_a_term_that_is_over_is_no_fault_and_the_next_one_is_asked_at_once() -> None:
    talk = running()
    assert talk.hear(SessionBroken(TERM_OVER, "it is stopping", False)) == [GiveUp(1)]
    (ask,) = talk.follow(2, NODES[1])
    assert isinstance(ask, Ask)


def test_a_lost_stream_is_opened_again_where_nobody_else_is_the_backbone_and_ever_more_seldom() -> None:
    talk = running()
    asked_at = []
    for attempt in range(1, 6):
        talk.fail(attempt)
        before = talk.now
        while len(talk.of(Ask)) == attempt:
            talk.wait(milliseconds(10))
        asked_at.append(talk.now - before)
    assert asked_at == [milliseconds(each) for each in (250, 500, 1000, 2000, 2000)]


def test_silence_is_found_out_and_a_word_is_none() -> None:
    talk = running()
    for _ in range(8):
        assert talk.wait(Duration(OPTIONS.silence_max - 1)) == []
        talk.hear(StillHere())
    assert talk.wait(OPTIONS.silence_max)[:1] == [GiveUp(1)]


def test_without_any_backbone_a_client_is_refused_after_a_while_and_told_why() -> None:
    talk = Talk()
    assert talk.wait(Duration(OPTIONS.open_patience - 1)) == []
    (refuse,) = talk.wait(Duration(1))
    assert refuse == Refuse("not_ready", "no backbone is known yet", seconds(1))
    talk = Talk()
    talk.follow(1)
    refused = SessionRefused("not_ready", "3 of 8 experts have a holder", 0)
    while not talk.core.is_over:
        talk.hear(refused, attempt=len(talk.of(Ask)))
        talk.wait(milliseconds(100))
    assert talk.of(Refuse) == [Refuse("not_ready", "3 of 8 experts have a holder", seconds(1))]
    assert talk.now == pytest.approx(OPTIONS.open_patience, abs=milliseconds(200))


def test_a_session_that_has_begun_waits_longer_and_fails_then() -> None:
    talk = running()
    talk.fail(1)
    talk.follow(2, NODES[1])
    attempt = 2
    while talk.core.next_deadline() is not None:
        talk.fail(attempt)
        talk.wait(milliseconds(50))
        attempt = len(talk.of(Ask))
    assert talk.of(Fail) == [Fail("no_backbone", "it is gone")]
    assert talk.now == pytest.approx(OPTIONS.patience, abs=milliseconds(100))


def test_time_with_a_place_is_no_waiting_and_time_without_one_adds_up() -> None:
    talk = running()
    talk.fail(1)
    for number in range(2, 4):
        talk.wait(seconds(25))
        talk.follow(number, NODES[1])
        talk.hear(SessionPlaced(), attempt=talk.core._n_attempts)
        for _ in range(50):
            talk.wait(seconds(2))
            talk.hear(StillHere(), attempt=talk.core._n_attempts)
        assert not talk.core.is_over
        talk.hear(SessionBroken(TERM_OVER, "over", False), attempt=talk.core._n_attempts)
        talk.core.command(FollowTerm(None), talk.now)
    talk.wait(seconds(9))
    assert not talk.core.is_over
    talk.wait(seconds(2))
    assert talk.of(Fail) == [Fail("no_backbone", "over")]


def test_a_session_under_which_every_backbone_dies_is_not_taken_to_all_of_them() -> None:
    talk = running()
    talk.fail(1)
    for number in range(2, OPTIONS.losses_max + 1):
        assert not talk.core.is_over
        talk.follow(number, NODES[number % 2])
        talk.hear(SessionPlaced(), attempt=number)
        talk.fail(number)
    (fail,) = talk.of(Fail)
    assert fail.code == "session_lost"
    assert len(talk.of(Ask)) == OPTIONS.losses_max


def test_a_token_between_makes_up_for_what_was_lost() -> None:
    talk = running()
    for number in range(2, 8):
        talk.fail(number - 1)
        talk.follow(number)
        talk.hear(token(2 + number, number), attempt=number)
    assert not talk.core.is_over
    assert len(talk.of(Deliver)) == 7


def test_leases_that_end_in_good_order_are_no_losses_and_waits_between_tokens_do_not_add_up() -> None:
    talk = running()
    for number in range(2, 8):
        talk.hear(SessionBroken(TERM_OVER, "over", False), attempt=number - 1)
        talk.core.command(FollowTerm(None), talk.now)
        talk.wait(seconds(8))
        talk.follow(number)
        talk.hear(SessionPlaced(), attempt=number)
    assert not talk.core.is_over
    talk.hear(token(4, 7), attempt=7)
    talk.core.command(FollowTerm(None), talk.now)
    talk.wait(seconds(59))
    assert not talk.core.is_over, "48 s were before the token"
    talk.wait(seconds(2))
    assert talk.core.is_over


@pytest.mark.parametrize(
    "message, effect",
    [
        (SessionRefused("busy", "too many", seconds(7)), Refuse("busy", "too many", seconds(7))),
        (SessionRefused("too_long", "9 tokens", 0), Refuse("too_long", "9 tokens", Duration(0))),
        (SessionBroken("usage_error", "no", True), Fail("usage_error", "no")),
    ],
)
def test_what_is_refused_for_good_is_refused_at_once(message: SessionMessage, effect: Effect) -> None:
    talk = Talk()
    talk.follow(1)
    assert talk.hear(message) == [GiveUp(1), effect]
    talk = Talk()
    talk.follow(1)
    assert talk.hear(SessionPlaced(), message)[-1] == effect, "so too in a queue"


def test_a_full_queue_is_waited_for_by_who_has_begun() -> None:
    talk = running()
    talk.follow(2, NODES[1])
    talk.hear(SessionRefused("busy", "too many", seconds(3)), attempt=2)
    assert talk.wait(Duration(seconds(3) - 1)) == []
    (ask,) = talk.wait(Duration(1))
    assert isinstance(ask, Ask)
    talk.hear(SessionRefused("busy", "too many", seconds(3000)), attempt=3)
    (ask,) = talk.wait(OPTIONS.silence_max)
    assert isinstance(ask, Ask), "however long the other side thinks it takes"
    assert talk.hear(SessionRefused("too_long", "a smaller context", 0), attempt=4)[-1] == Fail(
        "too_long", "a smaller context"
    )


def test_the_deadline_ends_it_whatever_is_said() -> None:
    talk = running()
    while not talk.core.is_over:
        talk.hear(StillHere())
        talk.wait(seconds(5))
    assert talk.of(Fail) == [Fail("session_deadline_expired", "the session's deadline has passed")]
    assert talk.now <= seconds(606)


# --- a small swarm ------------------------------------------------------------------------------------------

Manner = Literal["honest", "repeats", "skips", "another term", "silent", "stops"]
MANNERS: tuple[Manner, ...] = ("honest", "honest", "repeats", "skips", "another term", "silent", "stops")


@dataclass
class _Stream:
    """One attempt, at the backbone's end."""

    attempt: int
    node: NodeId
    request: OpenSession
    tokens: tuple[int, ...] = ()
    n_left: int = 0
    arrives_at: int = 0
    is_closed: bool = False


class SmallSwarm:
    """Backbones of one term after another, and one session that a gateway keeps going through them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = START
        self.n_tokens = self.random.randrange(1, 40)
        wanted = replace(WANTED, n_tokens_max=self.n_tokens, n_top=0, deadline=Instant(seconds(3000)))
        self.core = Continuation(wanted, START, replace(OPTIONS, losses_max=1000, patience=seconds(1000)))
        self.term = term(1)
        self.manner: dict[NodeId, Manner] = {}
        self.dead: set[NodeId] = set()
        self.streams: dict[int, _Stream] = {}
        self.delivered: list[SessionToken] = []
        self.end: Effect | None = None
        self.is_healed = False
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> None:
        n_faults = self.random.randrange(0, 8)
        at = 0
        for _ in range(n_faults):
            at += self.random.randrange(milliseconds(1), milliseconds(1500))
            self._later(at, self.random.choice([self._kill, self._elect, self._elect, self._cut]))
        self._later(at + milliseconds(1), self._heal)
        self._later(milliseconds(self.random.randrange(2000)), self._elect)
        while not self.core.is_over:
            due = self.core.next_deadline()
            assert due is not None
            if self._heap and self._heap[0][0] <= due:
                at, _, action = heapq.heappop(self._heap)
                self.now = Instant(max(self.now, at))
                action()
            else:
                self.now = max(self.now, due)
                self.core.tick(self.now)
            self._carry_out()
            assert self.now < seconds(1500), "it goes on for ever"

    def _later(self, at: int, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at, next(self._order), action))

    # -- what happens ------------------------------------------------------------------------------

    def _elect(self) -> None:
        """Another node is elected, and the gateway hears of it some time."""
        alive = [each for each in NODES if each not in self.dead]
        old, self.term = self.term, term(self.term.term + 1, self.random.choice(alive))
        self.manner[self.term.backbone] = "honest" if self.is_healed else self.random.choice(MANNERS)
        for stream in self.streams.values():
            if stream.node == old.backbone and not stream.is_closed and self.random.random() < 0.7:
                self._send(stream, SessionBroken(TERM_OVER, "its lease is over", False))
                stream.is_closed = True
        proven = self.term
        delay = self.random.randrange(milliseconds(400))
        self._later(self.now + delay, lambda: self.core.command(FollowTerm(proven), self.now))

    def _kill(self) -> None:
        if len(self.dead) < len(NODES) - 1:
            self.dead.add(self.term.backbone)
            is_noticed = self.random.random() < 0.8
            for stream in self.streams.values():
                if stream.node in self.dead and not stream.is_closed:
                    stream.is_closed = True
                    if is_noticed:
                        self._end(stream)
            self._later(self.now + self.random.randrange(milliseconds(3000)), self._elect)

    def _cut(self) -> None:
        for stream in self.streams.values():
            if not stream.is_closed:
                stream.is_closed = True
                self._end(stream)

    def _heal(self) -> None:
        self.is_healed = True
        self._elect()

    # -- backbones ---------------------------------------------------------------------------------

    def _carry_out(self) -> None:
        for effect in self.core.drain():
            match effect:
                case Ask(attempt, node, request):
                    stream = _Stream(attempt, node, request, request.token_ids, request.n_tokens)
                    self.streams[attempt] = stream
                    delay = self.random.randrange(milliseconds(20))
                    self._later(self.now + delay, partial(self._open, stream))
                case GiveUp(attempt):
                    stream = self.streams[attempt]
                    delay = self.random.randrange(milliseconds(100))
                    self._later(self.now + delay, partial(self._close, stream))
                case Deliver(given):
                    assert given.term == self.streams[max(self.streams)].request.term
                    self.delivered.append(given)
                case Begin():
                    pass
                case _:
                    self.end = effect

    def _close(self, stream: _Stream) -> None:
        stream.is_closed = True

    def _end(self, stream: _Stream) -> None:
        def fail() -> None:
            self.core.command(AttemptFailed(stream.attempt, "the stream has ended"), self.now)

        self._later(max(stream.arrives_at, self.now + milliseconds(1)), fail)

    def _send(self, stream: _Stream, message: SessionMessage) -> None:
        """It arrives some time, behind what was sent before it, whoever still wants it."""
        delay = self.random.randrange(milliseconds(30))
        stream.arrives_at = max(stream.arrives_at + 1, self.now + delay)
        self._later(stream.arrives_at, lambda: self.core.receive(message, stream.attempt, self.now))

    def _open(self, stream: _Stream) -> None:
        if stream.node in self.dead:
            self._end(stream)
        elif (stream.request.term, stream.node) != (self.term.term, self.term.backbone):
            self._send(stream, SessionRefused("not_ready", "it is not the backbone of that term", 0))
            stream.is_closed = True
        elif self.random.random() < 0.1 and not self.is_healed:
            self._send(stream, SessionRefused("not_ready", "experts have no holder", 0))
            stream.is_closed = True
        else:
            self._send(stream, SessionPlaced())
            self._decode(stream)

    def _decode(self, stream: _Stream) -> None:
        if stream.is_closed:
            return
        manner = self.manner.get(stream.node, "honest")
        value = following_token(stream.tokens)
        position, number = len(stream.tokens), stream.request.term
        if self.random.random() < 0.2:
            match manner:
                case "repeats":
                    position = self.random.randrange(position)
                case "skips":
                    position += self.random.randrange(1, 5)
                case "another term":
                    number = self.random.choice([number - 1, number + 1])
                case "silent":
                    return
                case "stops":
                    self._send(stream, SessionBroken("engine_failed", "its engine died", False))
                    stream.is_closed = True
                    return
                case "honest":
                    pass
        stream.tokens = (*stream.tokens, value)
        stream.n_left -= 1
        finish: Any = None if stream.n_left else "length"
        self._send(stream, SessionToken(position, 0, number, value, 0.0, (), finish))
        if stream.n_left:
            step = self.random.randrange(milliseconds(5), milliseconds(60))
            self._later(self.now + step, lambda: self._decode(stream))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
def test_whatever_becomes_of_backbones_every_token_comes_once_and_is_the_right_one(seed: int) -> None:
    swarm = SmallSwarm(seed)
    swarm.run()
    assert swarm.end is None or (isinstance(swarm.end, Refuse) and not swarm.delivered), swarm.end
    if swarm.end is None:
        assert [each.token for each in swarm.delivered] == right_text(swarm.n_tokens)
        positions = range(len(PROMPT), len(PROMPT) + swarm.n_tokens)
        assert [each.position for each in swarm.delivered] == list(positions)
        assert [each.finish for each in swarm.delivered] == [None] * (swarm.n_tokens - 1) + ["length"]
        terms = [each.term for each in swarm.delivered]
        assert terms == sorted(terms), "never an older term"


def test_the_small_swarm_does_what_it_is_made_for() -> None:
    """Most of its sessions end well, and many of them had more than one backbone."""
    swarms = [SmallSwarm(seed) for seed in range(60)]
    for each in swarms:
        each.run()
    finished = [each for each in swarms if each.end is None]
    assert len(finished) > 50
    assert sum(len({each.term for each in swarm.delivered}) > 1 for swarm in finished) > 20
