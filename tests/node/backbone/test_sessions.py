"""Sessions on contexts in threads: a toy model for what is heard when, the demo model for what comes out."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvasir_node.backbone.hook import DecodeAborted, ExpertHook, LayerCall
from kvasir_node.backbone.sampling import Sampler
from kvasir_node.backbone.sessions import NextToken, SessionContext, Sessions, WantedSession
from kvasir_node.backbone.trunk import Trunk, TrunkSettings
from kvasir_node.engine.lease import LeaseExpired
from kvasir_node.model.backbone_file import write_backbone_file
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.model.store import DEMO_MODEL
from kvasir_proto.errors import EngineFailed, LocalProtocolError, NoHolderLeft, UsageError
from kvasir_proto.ids import SessionId
from kvasir_proto.instants import Instant
from kvasir_proto.sampling import Sampling, SamplingOptions
from kvasir_proto.sessions.options import SessionOptions
from kvasir_proto.sessions.requests import (
    CacheStep,
    CopySequence,
    Decode,
    End,
    ForgetSequence,
    Open,
    Place,
    Refuse,
)
from tests.node.hooked_llama import InProcessWorkers, shards_of
from tests.proto.sessions.toy_backbone import END, N_VOCAB, ToyCache, alone, next_token
from tests.proto.sessions.toy_backbone import LATE as NEVER

GREEDY = Sampling(temperature=0.0)
PATIENCE_S = 60.0
"""For threads on a busy machine; nothing here waits so long when it is right."""


def named(name: int) -> SessionId:
    return SessionId(name.to_bytes(16, "big"))


class Heard:
    """Listens, and lets a test wait for the end of a session."""

    def __init__(self) -> None:
        self.tokens: dict[SessionId, list[NextToken]] = {}
        self.ends: dict[SessionId, str] = {}
        self.said: dict[SessionId, End | Refuse] = {}
        self._changed = threading.Condition()

    def take_token(self, token: NextToken) -> None:
        with self._changed:
            session, reason = token.emitted.session, token.emitted.reason
            assert session not in self.ends
            if reason != "end_of_text":
                self.tokens.setdefault(session, []).append(token)
            if reason is not None:
                self.ends[session] = reason
            self._changed.notify_all()

    def take_end(self, end: End) -> None:
        self._take_last(end, end.reason)

    def take_refusal(self, refusal: Refuse) -> None:
        self._take_last(refusal, "refused")

    def _take_last(self, last: End | Refuse, end: str) -> None:
        with self._changed:
            assert last.session not in self.ends
            self.ends[last.session], self.said[last.session] = end, last
            self._changed.notify_all()

    def ids(self, name: int) -> list[int]:
        return [each.emitted.token for each in self.tokens.get(named(name), [])]

    def wait(self, *names: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: all(named(each) in self.ends for each in names), PATIENCE_S)

    def wait_tokens(self, name: int, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ids(name)) >= count, PATIENCE_S)


class ToyTrunk:
    """The toy model of the core's tests behind the trunk's face. `before_decode` may block or raise."""

    n_vocab = N_VOCAB

    def __init__(self, options: SessionOptions) -> None:
        self.cache = ToyCache(options.n_cells, options.n_sequences)
        self.places: Sequence[Place] = ()
        self.before_decode: Callable[[Sequence[Place]], None] = lambda _: None
        self.not_finite: SessionId | None = None

    def change_cache(self, step: CacheStep) -> None:
        self.cache.apply(Decode(0, (step,), ()))

    def decode_places(self, places: Sequence[Place]) -> None:
        self.before_decode(places)
        self.places = places
        self.cache.apply(Decode(0, (), tuple(places)))

    def n_in_cache(self, sequence: int) -> int:
        return len(self.cache.sequences[sequence])

    def logits(self, index: int) -> npt.NDArray[np.float32]:
        place = self.places[index]
        assert place.is_sampled
        logits = np.zeros(N_VOCAB, np.float32)
        logits[next_token(self.cache.tokens(place.sequence))] = 5.0
        if place.session == self.not_finite:
            logits[3] = np.nan
        return logits

    def is_end_of_generation(self, token: int) -> bool:
        return token == END


@dataclass
class ToyDispatch:
    """Holders that a test takes away and gives back."""

    missing: dict[int, tuple[int, ...]] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def watched_by(self, check: Callable[[], None]) -> Iterator[None]:
        self.check = check
        yield

    def settle(self) -> None:
        pass

    def missing_experts(self) -> dict[int, tuple[int, ...]]:
        return self.missing


class ToySessions:
    """One context of the toy model, and all that a test may want to turn."""

    def __init__(self, **changes: int) -> None:
        values = {"n_cells": 64, "n_ubatch": 16, "sessions_per_context": 4, "prefill_chunk": 4} | changes
        options = SessionOptions(**values)  # type: ignore[arg-type]
        self.heard = Heard()
        self.trunk, self.dispatch = ToyTrunk(options), ToyDispatch()
        self.has_lease = True
        self.now = Instant(0)
        self.sessions = Sessions(
            [SessionContext(self.trunk, self.dispatch)],
            options,
            self.heard,
            check_authority=self.check,
            now=lambda: self.now,
        )

    def check(self) -> tuple[int, int]:
        if not self.has_lease:
            raise LeaseExpired("over")
        return (1, 7)

    def open(
        self,
        name: int,
        prompt: Sequence[int],
        n_tokens: int,
        *,
        deadline: Instant = NEVER,
        n_top: int | None = None,
    ) -> None:
        opened = Open(named(name), "someone", tuple(prompt), n_tokens, frozenset(), deadline)
        self.sessions.open(WantedSession(opened, GREEDY, n_top))


@pytest.fixture
def toys() -> Iterator[Callable[..., ToySessions]]:
    made: list[ToySessions] = []

    def make(**changes: int) -> ToySessions:
        made.append(ToySessions(**changes))
        return made[-1]

    yield make
    for each in made:
        each.trunk.before_decode = lambda _: None
        each.sessions.close()


def long_prompt(start: int, n_tokens: int = 50) -> list[int]:
    """A prompt of one token, of the vocabulary, after which the toy model goes on for so long."""
    found = (each for each in range(start, N_VOCAB) if alone([each], n_tokens, 99)[1] == "length")
    return [next(found)]


def test_sessions_together_get_what_each_gets_alone(toys: Callable[..., ToySessions]) -> None:
    toy = toys()
    for name in range(1, 9):
        toy.open(name, range(name, name + 9), 6)
    toy.heard.wait(*range(1, 9))
    for name in range(1, 9):
        expected = alone(range(name, name + 9), 6, 64)
        assert (toy.heard.ids(name), toy.heard.ends[named(name)]) == expected
    assert {each.authority for many in toy.heard.tokens.values() for each in many} == {(1, 7)}


def test_a_token_comes_with_its_log_probability_where_it_is_wanted(toys: Callable[..., ToySessions]) -> None:
    toy = toys()
    toy.open(1, [5], 2, n_top=2)
    toy.open(2, [5], 2)
    toy.heard.wait(1, 2)
    token = toy.heard.tokens[named(1)][0]
    others = float(np.log(np.exp(5.0) + N_VOCAB - 1))
    lowest = 0 if token.emitted.token else 1
    assert token.log_probability == pytest.approx(5.0 - others)
    assert [each for each, _ in token.top] == [token.emitted.token, lowest]
    assert [each for _, each in token.top] == pytest.approx([5.0 - others, -others])
    unwanted = toy.heard.tokens[named(2)][0]
    assert unwanted.log_probability is None
    assert not unwanted.top


def test_cancelling_ends_a_session_while_its_layer_call_hangs(toys: Callable[..., ToySessions]) -> None:
    """And the call ends as well when it is for nobody else."""
    toy = toys()
    in_call = threading.Event()

    def hang(_: Sequence[Place]) -> None:
        in_call.set()
        while True:
            toy.dispatch.check()
            threading.Event().wait(0.001)

    toy.trunk.before_decode = hang
    toy.open(1, [5], 9)
    assert in_call.wait(PATIENCE_S)
    toy.sessions.cancel(named(1))
    assert toy.heard.ends == {named(1): "cancelled"}, "at once, whatever the call does"
    toy.trunk.before_decode = lambda _: None
    toy.open(2, [5], 3)
    toy.heard.wait(2)
    assert toy.heard.ids(2) == alone([5], 3, 64)[0]


def test_a_deadline_ends_a_session_while_its_layer_call_hangs(toys: Callable[..., ToySessions]) -> None:
    toy = toys()

    def hang(_: Sequence[Place]) -> None:
        while True:
            toy.dispatch.check()
            threading.Event().wait(0.001)

    toy.trunk.before_decode = hang
    toy.open(1, [5], 9, deadline=Instant(10_000_000))
    toy.now = Instant(10_000_000)
    toy.heard.wait(1)
    said = toy.heard.said[named(1)]
    assert isinstance(said, End)
    assert said.code == "session_deadline_expired"


def test_a_lease_that_ends_ends_all_and_nothing_is_emitted_after(toys: Callable[..., ToySessions]) -> None:
    toy = toys()
    n_decodes = 0

    def lose_it(_: Sequence[Place]) -> None:
        nonlocal n_decodes
        n_decodes += 1
        toy.has_lease = n_decodes < 4

    toy.trunk.before_decode = lose_it
    toy.open(1, long_prompt(1), 50)
    toy.heard.wait(1)
    said = toy.heard.said[named(1)]
    assert isinstance(said, End)
    assert (said.reason, said.code) == ("failed", "lease_expired")
    assert len(toy.heard.ids(1)) == 3, "the fourth was sampled without a lease"
    toy.has_lease = True
    toy.trunk.before_decode = lambda _: None
    toy.open(2, [5], 3)
    toy.heard.wait(2)
    assert toy.heard.ids(2) == alone([5], 3, 64)[0]


def test_without_a_lease_nothing_is_decoded(toys: Callable[..., ToySessions]) -> None:
    toy = toys()
    decoded: list[int] = []
    toy.trunk.before_decode = lambda places: decoded.append(len(places))
    toy.has_lease = False
    toy.open(1, [5], 3)
    toy.heard.wait(1)
    assert decoded == []


def test_a_session_without_a_holder_waits_for_one_and_the_others_go_on(
    toys: Callable[..., ToySessions],
) -> None:
    toy = toys()
    bad = long_prompt(1)
    good = long_prompt(bad[0] + 1)

    def lack(places: Sequence[Place]) -> None:
        mine = frozenset(index for index, each in enumerate(places) if each.session == named(1))
        if mine and any(places[each].position >= 4 for each in mine) and not toy.heard.ends:
            toy.dispatch.missing = {3: (1,)}
            raise NoHolderLeft("no holder is left", mine, len(places))

    toy.trunk.before_decode = lack
    toy.open(1, bad, 20)
    toy.open(2, good, 40)
    toy.heard.wait(2)
    assert named(1) not in toy.heard.ends
    assert len(toy.heard.ids(1)) == 4
    toy.dispatch.missing = {}
    toy.sessions.note_holders()
    toy.heard.wait(1)
    assert toy.heard.ids(1) == alone(bad, 20, 64)[0]
    assert toy.heard.ids(2) == alone(good, 40, 64)[0]


def test_a_holder_that_came_while_the_failure_was_found_out_is_enough(
    toys: Callable[..., ToySessions],
) -> None:
    toy = toys()
    n_failures = 0

    def lack_once(places: Sequence[Place]) -> None:
        nonlocal n_failures
        n_failures += 1
        if n_failures == 2:
            raise NoHolderLeft("no holder is left", frozenset({0}), len(places))

    toy.trunk.before_decode = lack_once
    toy.open(1, [5], 4)
    toy.heard.wait(1)
    assert toy.heard.ids(1) == alone([5], 4, 64)[0]


@pytest.mark.parametrize("failure", [EngineFailed("of it"), ZeroDivisionError("a bug of ours")])
def test_who_makes_every_ubatch_fail_fails_alone(
    failure: Exception, toys: Callable[..., ToySessions]
) -> None:
    toy = toys()

    def fail(places: Sequence[Place]) -> None:
        if any(each.session == named(3) for each in places):
            raise failure

    toy.trunk.before_decode = fail
    for name in range(1, 5):
        toy.open(name, [name], 6)
    toy.heard.wait(1, 2, 3, 4)
    assert toy.heard.ends[named(3)] == "failed"
    for name in (1, 2, 4):
        assert toy.heard.ids(name) == alone([name], 6, 64)[0]


def test_logits_that_are_not_finite_fail_one_session(toys: Callable[..., ToySessions]) -> None:
    toy = toys()
    toy.trunk.not_finite = named(1)
    toy.open(1, [1], 6)
    toy.open(2, [2], 6)
    toy.heard.wait(1, 2)
    assert toy.heard.ends[named(1)] == "failed"
    assert toy.heard.ids(2) == alone([2], 6, 64)[0]


def test_what_cannot_be_is_refused(toys: Callable[..., ToySessions]) -> None:
    toy = toys()
    with pytest.raises(UsageError):
        toy.open(1, [N_VOCAB], 3)
    toy.open(2, [], 3)
    assert toy.heard.ends == {named(2): "refused"}

    def be_slow(_: Sequence[Place]) -> None:
        toy.dispatch.check()
        threading.Event().wait(0.01)

    toy.trunk.before_decode = be_slow
    toy.open(3, long_prompt(1), 40)
    with pytest.raises(LocalProtocolError):
        toy.open(3, [1], 3)
    toy.sessions.close()
    assert toy.heard.ends[named(3)] == "failed"
    with pytest.raises(LocalProtocolError):
        toy.open(4, [1], 3)


def test_what_was_emitted_elsewhere_counts_for_penalties(toys: Callable[..., ToySessions]) -> None:
    """A continuation draws as the session would have drawn that was never interrupted."""
    toy = toys()
    options = SamplingOptions(GREEDY, presence_penalty=2.0, frequency_penalty=2.0)
    tokens = next(
        (first, again, again)
        for first in range(1, N_VOCAB)
        for again in range(1, N_VOCAB)
        if next_token((first, again, again)) == again
    )
    for name, n_emitted in ((1, 0), (2, 2)):
        opened = Open(named(name), "someone", tokens, 1, frozenset(), NEVER, n_emitted)
        toy.sessions.open(WantedSession(opened, options))
        toy.heard.wait(name)
    assert toy.heard.ids(1) == [tokens[-1]]
    assert toy.heard.ids(2) != [tokens[-1]]


# -- the demo model ------------------------------------------------------------------------------------------

SETTINGS = TrunkSettings(n_ctx=1024, n_ubatch=64, n_threads=1)
PROMPTS = [
    "Once upon a time there was a little girl who lived near the sea",
    "The three friends went to the",
    "One day a dog found a red ball in the garden. He wanted to",
    "Tom",
    "It was very cold and the snow fell on the houses, so the children stayed at home and",
    "Her mother said: you must not",
    "A bird sat in a tree. It sang a song for all the animals of the forest, and they",
    "In the morning the sun",
]
N_TOKENS = 24


@dataclass
class Demo:
    """The demo model's trunk with its experts in this process, and what each prompt gives alone."""

    workers: InProcessWorkers
    trunk: Trunk
    fails: Callable[[LayerCall], None] = lambda _: None

    def __call__(self, call: LayerCall) -> None:
        self.fails(call)
        self.workers(call)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    directory: Path = tmp_path_factory.mktemp("demo")
    manifest = build_manifest(DEMO_MODEL)
    write_backbone_file(DEMO_MODEL, manifest, directory / "backbone.gguf")
    workers = InProcessWorkers(DEMO_MODEL, manifest, shards_of(manifest, 2))
    demo = Demo(workers, None)  # type: ignore[arg-type]
    workers.hook = hook = ExpertHook(demo)
    demo.trunk = Trunk(directory / "backbone.gguf", SETTINGS, hook)
    yield demo
    demo.trunk.close()
    workers.close()
    hook.close()


@pytest.fixture(scope="module")
def by_itself(demo: Demo) -> list[tuple[list[int], list[int], list[npt.NDArray[np.float32]]]]:
    """Of each prompt its tokens, what follows by itself in a context of its own, and the logits of that."""
    answers = []
    for text in PROMPTS:
        prompt = demo.trunk.tokenize(text)
        context = demo.trunk.beside(SETTINGS.n_ctx, SETTINGS.n_ubatch)
        sampler = Sampler(GREEDY, context.n_vocab)
        context.decode(prompt)
        tokens, logits = [], []
        for _ in range(N_TOKENS):
            logits.append(context.logits().copy())
            tokens.append(sampler.sample(logits[-1], context.position))
            if context.is_end_of_generation(tokens[-1]):
                tokens.pop()
                break
            context.decode(tokens[-1:])
        context.close()
        answers.append((prompt, tokens, logits))
    return answers


@contextlib.contextmanager
def running(
    demo: Demo, n_contexts: int, per_context: int, **changes: int
) -> Iterator[tuple[Sessions, Heard]]:
    values = {
        "n_contexts": n_contexts,
        "n_cells": SETTINGS.n_ctx,
        "n_ubatch": SETTINGS.n_ubatch,
        "sessions_per_context": per_context,
        "coverage_patience": 0,
    }
    options = SessionOptions(**(values | changes))  # type: ignore[arg-type]
    trunks = [
        demo.trunk.beside(options.n_cells, options.n_ubatch, n_sequences=options.n_sequences)
        for _ in range(n_contexts)
    ]
    heard = Heard()
    sessions = Sessions(
        [SessionContext(each) for each in trunks], options, heard, check_authority=lambda: (1, 1)
    )
    try:
        yield sessions, heard
    finally:
        sessions.close()
        for trunk in trunks:
            trunk.close()


def wanted(name: int, prompt: Sequence[int], n_tokens: int = N_TOKENS) -> WantedSession:
    return WantedSession(Open(named(name), "someone", tuple(prompt), n_tokens, frozenset(), NEVER), GREEDY)


Answers = list[tuple[list[int], list[int], list[npt.NDArray[np.float32]]]]


def test_with_a_context_for_each_sessions_are_identical_to_themselves_alone(
    demo: Demo, by_itself: Answers
) -> None:
    """Eight sessions, two contexts in threads, one sequence in each: the same shapes, so the same bits."""
    with running(demo, 2, 1) as (sessions, heard):
        for name, (prompt, _, _) in enumerate(by_itself):
            sessions.open(wanted(name, prompt))
        heard.wait(*range(len(by_itself)))
    for name, (_, tokens, _) in enumerate(by_itself):
        assert heard.ids(name) == tokens


def require_equivalent(
    ids: Sequence[int], tokens: Sequence[int], logits: Sequence[npt.NDArray[np.float32]]
) -> bool:
    """Whether both are the same to the end; where they part, the margin has to be borderline."""
    for index, (one, other) in enumerate(zip(ids, tokens, strict=False)):
        if one != other:
            margin = float(logits[index][other] - logits[index][one])
            assert margin < 0.05, f"token {index} is another one by {margin}"
            return False
    return len(ids) == len(tokens)


@pytest.mark.parametrize("kept", [0, 4])
def test_eight_sessions_in_two_contexts_are_equivalent_to_themselves_alone(
    kept: int, demo: Demo, by_itself: Answers
) -> None:
    with running(demo, 2, 4, prefill_chunk=5, kept_prefixes=kept, reused_tokens_min=4) as (sessions, heard):
        for turn in range(2 if kept else 1):
            for name, (prompt, _, _) in enumerate(by_itself):
                sessions.open(wanted(100 * turn + name, prompt))
            heard.wait(*(100 * turn + name for name in range(len(by_itself))))
    n_same = 0
    for turn in range(2 if kept else 1):
        for name, (_, tokens, logits) in enumerate(by_itself):
            n_same += require_equivalent(heard.ids(100 * turn + name), tokens, logits)
    assert n_same >= 6 * (2 if kept else 1)


def test_a_layer_that_fails_for_one_session_is_computed_again_for_the_others(
    demo: Demo, by_itself: Answers
) -> None:
    """The third row of a ubatch of decoding sessions has no holder, once; then the whole of it fails."""
    failures: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def fail(call: LayerCall) -> None:
        if call.layer == 1 and call.n_tokens == 4 and not failures.empty():
            raise failures.get()

    with running(demo, 1, 4) as (sessions, heard):
        for name in range(4):
            sessions.open(wanted(name, by_itself[name][0], 100))
        for name in range(4):
            heard.wait_tokens(name, 2)
        failures.put(NoHolderLeft("no holder is left", frozenset({2}), 4))
        demo.fails = fail
        heard.wait(*range(4))
        demo.fails = lambda _: None
    ended = sorted(heard.ends[named(name)] for name in range(4))
    assert ended.count("failed") == 1, "without patience for holders it fails, and nobody else does"
    for name in range(4):
        _, tokens, logits = by_itself[name]
        require_equivalent(heard.ids(name)[:N_TOKENS], tokens, logits)


def test_a_copied_sequence_has_what_was_copied(demo: Demo) -> None:
    trunk = demo.trunk.beside(256, 64, n_sequences=2)
    trunk.decode_places([Place(named(1), 0, each, 5 + each, False) for each in range(9)])
    trunk.change_cache(CopySequence(0, 1, 6))
    assert (trunk.n_in_cache(0), trunk.n_in_cache(1)) == (9, 6)
    trunk.change_cache(ForgetSequence(0))
    assert (trunk.n_in_cache(0), trunk.n_in_cache(1)) == (0, 6)
    trunk.close()


def test_an_aborted_decode_leaves_the_context_as_it_was(demo: Demo, by_itself: Answers) -> None:
    aborted = threading.Event()

    def abort(call: LayerCall) -> None:
        if call.layer == 2 and call.n_tokens == 1 and not aborted.is_set():
            aborted.set()
            raise DecodeAborted

    with running(demo, 1, 1) as (sessions, heard):
        demo.fails = abort
        sessions.open(wanted(1, by_itself[0][0]))
        heard.wait(1)
        demo.fails = lambda _: None
    assert aborted.is_set()
    assert heard.ids(1) == by_itself[0][1]
