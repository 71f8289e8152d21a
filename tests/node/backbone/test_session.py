"""A session on a trunk that only counts: when it stops, and that it is checked before all it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest

from kvasir_node.backbone import session
from kvasir_node.backbone.session import EmittedToken, SessionDeadlineExpired, SessionOutcome, run_session
from kvasir_node.backbone.trunk import DecodeFailed, Trunk, TrunkSettings
from kvasir_node.engine.lease import LeaseExpired
from kvasir_proto.errors import NoHolderLeft, UsageError
from kvasir_proto.sampling import Sampling

N_VOCAB = 40
END = 39
GREEDY = Sampling(temperature=0.0)


class CountingTrunk:
    """After a token t comes t + 1: what a session needs of a trunk, and a record of what it asked."""

    n_vocab = N_VOCAB

    def __init__(self, n_ctx: int = 32, n_ubatch: int = 4) -> None:
        self.n_ctx = n_ctx
        self.settings = TrunkSettings(n_ctx=n_ctx, n_ubatch=n_ubatch, n_threads=1)
        self.position = 0
        self.decoded: list[tuple[list[int], bool]] = []
        self.before_decode: Callable[[], None] = lambda: None

    def clear(self) -> None:
        self.position = 0

    def decode(self, tokens: Sequence[int], *, no_logits: bool = False) -> None:
        self.before_decode()
        if self.position + len(tokens) > self.n_ctx:
            raise DecodeFailed("full")
        self.position += len(tokens)
        self.decoded.append((list(tokens), not no_logits))

    def logits(self) -> npt.NDArray[np.float32]:
        assert self.decoded[-1][1], "logits of a chunk that asked for none"
        logits = np.zeros(N_VOCAB, np.float32)
        logits[self.decoded[-1][0][-1] + 1] = 1.0
        return logits

    def piece(self, token: int) -> bytes:
        return b"<%d>" % token

    def is_end_of_generation(self, token: int) -> bool:
        return token == END


class Run:
    """One session and all it did."""

    def __init__(self, trunk: CountingTrunk | None = None) -> None:
        self.trunk = trunk or CountingTrunk()
        self.outcome = SessionOutcome()
        self.emitted: list[EmittedToken] = []
        self.cancelled = threading.Event()
        self.on_emit: Callable[[EmittedToken], None] = lambda _: None
        self.check: Callable[[], object] = lambda: None
        self.await_holders: Callable[[], bool] = lambda: False
        self.deadline_ns = time.monotonic_ns() + 60 * 10**9

    def __call__(self, prompt: Sequence[int], n_tokens: int) -> SessionOutcome:
        def emit(token: EmittedToken) -> None:
            self.emitted.append(token)
            self.on_emit(token)

        run_session(
            cast(Trunk, self.trunk),
            prompt,
            n_tokens,
            GREEDY,
            outcome=self.outcome,
            check_authority=self.check,
            await_holders=self.await_holders,
            emit=emit,
            cancelled=self.cancelled,
            deadline_ns=self.deadline_ns,
        )
        return self.outcome


def test_a_session_emits_its_tokens_with_their_positions() -> None:
    run = Run()
    outcome = run([1, 2, 3], 4)
    assert [(each.position, each.token, each.piece) for each in run.emitted] == [
        (3, 4, b"<4>"),
        (4, 5, b"<5>"),
        (5, 6, b"<6>"),
        (6, 7, b"<7>"),
    ]
    assert (outcome.reason, outcome.n_prompt, outcome.n_generated) == ("length", 3, 4)
    assert outcome.tokens == [4, 5, 6, 7]
    assert outcome.prompt_ns > 0
    assert outcome.decode_ns > 0


def test_the_last_token_is_not_decoded() -> None:
    run = Run()
    run([1], 2)
    assert [tokens for tokens, _ in run.trunk.decoded] == [[1], [2]]


def test_a_prompt_goes_in_ubatches_and_only_the_last_asks_for_logits() -> None:
    run = Run()
    run(list(range(10)), 1)
    assert run.trunk.decoded == [([0, 1, 2, 3], False), ([4, 5, 6, 7], False), ([8, 9], True)]
    exact = Run()
    exact(list(range(8)), 1)
    assert exact.trunk.decoded == [([0, 1, 2, 3], False), ([4, 5, 6, 7], True)]


def test_the_end_of_the_text_is_not_emitted() -> None:
    run = Run()
    assert run([36], 10).reason == "end_of_text"
    assert [each.token for each in run.emitted] == [37, 38]


def test_a_full_context_ends_a_session() -> None:
    run = Run(CountingTrunk(n_ctx=8))
    outcome = run([1, 2, 3], 100)
    assert outcome.reason == "length"
    assert 4 <= outcome.n_generated <= 6
    assert run.trunk.position <= 8


@pytest.mark.parametrize("prompt", [[], list(range(32)), list(range(33)), [1, N_VOCAB], [-1]])
def test_a_prompt_that_cannot_be_run_is_refused_before_anything_is_decoded(prompt: list[int]) -> None:
    run = Run()
    with pytest.raises(
        UsageError, match=r"prompt (is empty|has (\d+ tokens, the context 32|a token id out))"
    ):
        run(prompt, 3)
    assert run.trunk.decoded == []


def test_the_longest_prompt_gets_its_token() -> None:
    run = Run()
    assert run(list(range(31)), 5).n_generated >= 1


def test_a_new_session_forgets_the_last() -> None:
    trunk = CountingTrunk()
    Run(trunk)([1, 2], 2)
    second = Run(trunk)
    second([5], 1)
    assert second.emitted[0].position == 1


def test_a_lease_lost_in_the_middle_stops_decoding_and_emitting() -> None:
    run = Run()
    is_lost = threading.Event()

    def check() -> None:
        if is_lost.is_set():
            raise LeaseExpired("over")

    run.check = check
    run.on_emit = lambda token: is_lost.set() if token.position == 5 else None
    with pytest.raises(LeaseExpired):
        run([1, 2, 3], 100)
    assert [each.position for each in run.emitted] == [3, 4, 5]
    assert run.outcome.n_generated == 3
    assert run.trunk.position == 5  # and its token was not decoded


def test_a_lease_lost_while_decoding_keeps_its_token_back() -> None:
    run = Run()
    is_lost = threading.Event()

    def check() -> None:
        if is_lost.is_set():
            raise LeaseExpired("over")

    run.check = check
    run.trunk.before_decode = is_lost.set
    with pytest.raises(LeaseExpired):
        run([1, 2, 3], 100)
    assert run.emitted == []


def test_the_lease_is_checked_before_each_decode_and_each_token() -> None:
    run = Run()
    log: list[str] = []
    run.check = lambda: log.append("check")
    run.trunk.before_decode = lambda: log.append("decode")
    run.on_emit = lambda _: log.append("emit")
    run(list(range(6)), 3)
    assert (log.count("decode"), log.count("emit")) == (4, 3)
    assert all(log[index - 1] == "check" for index, what in enumerate(log) if what != "check")


def test_a_lease_lost_before_the_prompt_decodes_nothing() -> None:
    run = Run()

    def check() -> None:
        raise LeaseExpired("over")

    run.check = check
    with pytest.raises(LeaseExpired):
        run([1], 1)
    assert run.trunk.decoded == []


def test_cancelling_between_tokens_ends_as_cancelled() -> None:
    run = Run()
    run.on_emit = lambda token: run.cancelled.set() if token.position == 4 else None
    outcome = run([1, 2, 3], 100)
    assert (outcome.reason, outcome.n_generated) == ("cancelled", 2)


def test_cancelling_in_the_prompt_emits_nothing() -> None:
    run = Run()
    run.trunk.before_decode = run.cancelled.set
    outcome = run(list(range(20)), 5)
    assert (outcome.reason, outcome.n_generated, len(run.trunk.decoded)) == ("cancelled", 0, 1)


def test_a_cancelled_session_is_cancelled_also_without_a_lease_and_too_late() -> None:
    run = Run()

    def check() -> None:
        raise LeaseExpired("over")

    run.check = check
    run.deadline_ns = 0
    run.cancelled.set()
    assert run([1], 1).reason == "cancelled"


def test_a_deadline_ends_a_session_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1000
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic_ns=lambda: now_ns))
    run = Run()
    run.deadline_ns = 2000

    def pass_time(token: EmittedToken) -> None:
        nonlocal now_ns
        now_ns += 600

    run.on_emit = pass_time
    with pytest.raises(SessionDeadlineExpired):
        run([1, 2, 3], 100)
    assert [each.position for each in run.emitted] == [3, 4]


def test_a_deadline_that_has_passed_decodes_nothing() -> None:
    run = Run()
    run.deadline_ns = 0
    with pytest.raises(SessionDeadlineExpired):
        run([1, 2, 3], 5)
    assert run.trunk.decoded == []


def test_a_ubatch_whose_last_holder_died_is_decoded_again_once_there_is_another() -> None:
    run = Run()
    failures = [2, 5, 5, 6]

    def fail() -> None:
        if failures and run.trunk.position >= failures[0]:
            failures.pop(0)
            raise NoHolderLeft("layer 2, experts 7")

    run.trunk.before_decode = fail
    run.await_holders = lambda: True
    run(list(range(6)), 6)
    assert failures == []
    assert run.outcome.tokens == [6, 7, 8, 9, 10, 11]
    assert [each[0] for each in run.trunk.decoded] == [[0, 1, 2, 3], [4, 5], [6], [7], [8], [9], [10]]


def test_holders_that_die_again_and_again_and_a_trunk_that_forgot_end_the_session() -> None:
    run = Run()
    asked = []

    def fail() -> None:
        if run.trunk.position >= 5:
            raise NoHolderLeft("layer 2, experts 7")

    run.trunk.before_decode = fail
    run.await_holders = lambda: not asked.append(1)  # type: ignore[func-returns-value]
    with pytest.raises(NoHolderLeft):
        run([1, 2, 3], 100)
    assert len(asked) == session.DECODES_MAX - 1

    def fail_and_forget() -> None:
        if run.trunk.position >= 5:
            run.trunk.clear()
            raise NoHolderLeft("layer 2, experts 7")

    run.trunk.before_decode = fail_and_forget
    asked.clear()
    with pytest.raises(NoHolderLeft):
        run([1, 2, 3], 100)
    assert asked == []


def test_what_a_decode_raises_passes_through_and_the_outcome_stays_true() -> None:
    run = Run()

    def fail() -> None:
        if run.trunk.position >= 5:
            raise NoHolderLeft("layer 2, experts 7")

    run.trunk.before_decode = fail
    with pytest.raises(NoHolderLeft):
        run([1, 2, 3], 100)
    assert run.outcome.n_generated == len(run.emitted) == 3
    assert run.outcome.tokens == [4, 5, 6]
