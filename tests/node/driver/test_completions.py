"""The gateway's port over a duty that tells what an engine would: every session ends in one way, in time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.driver.completions import OPEN_TIMEOUT_S, BackboneCompletions
from kvasir_node.gateway.ports import CompletionRefused, GeneratedToken, TokenRequest
from kvasir_proto.errors import EngineFailed, LocalProtocolError, NotReady
from kvasir_proto.limits import EndReason
from kvasir_proto.messages.engine import Generate, SessionEnded, TokenEmitted
from kvasir_proto.sampling import Sampling, SamplingOptions

GREEDY = SamplingOptions(Sampling(temperature=0.0), presence_penalty=0.5)
REQUEST = TokenRequest("somebody", (1, 2, 3), GREEDY, 4, (9,), 2)
Emit = Callable[[TokenEmitted], Awaitable[None]]


class ScriptedRunner:
    """Opens after so long, emits tokens a second apart, then ends or raises."""

    def __init__(
        self, n_tokens: int, end: SessionEnded | Exception | None, opens_after_s: float = 0.0
    ) -> None:
        self.n_tokens, self.end, self.opens_after_s = n_tokens, end, opens_after_s
        self.wanted: list[Generate] = []
        self.is_cancelled = False

    async def run_session(
        self, wanted: Generate, emit: Emit, note_opened: Callable[[], None]
    ) -> SessionEnded:
        self.wanted.append(wanted)
        try:
            await trio.sleep(self.opens_after_s)
            if self.n_tokens or self.end is None:
                note_opened()
            for index in range(self.n_tokens):
                await trio.sleep(1.0)
                is_last = isinstance(self.end, SessionEnded) and self.end.reason == "length"
                await emit(
                    TokenEmitted(
                        wanted.session,
                        3 + index,
                        20 + index,
                        b"",
                        1,
                        1,
                        -0.5,
                        ((20 + index, -0.5), (7, -2.0)),
                        is_last and index + 1 == self.n_tokens,
                    )
                )
            if self.end is None:
                await trio.sleep_forever()
            if isinstance(self.end, Exception):
                raise self.end
            assert self.end is not None
            return self.end
        except trio.Cancelled:
            self.is_cancelled = True
            raise


def ended(reason: EndReason, code: str = "", **more: Any) -> SessionEnded:
    return SessionEnded(bytes(16), reason, code, "a sentence", 3, 0, 0, 0, 0, 0, **more)  # type: ignore[arg-type]


async def collect(runner: ScriptedRunner, got: list[GeneratedToken] | None = None) -> list[GeneratedToken]:
    got = [] if got is None else got
    async with BackboneCompletions(runner).open(REQUEST) as tokens:
        async for each in tokens:
            got.append(each)
    return got


async def test_a_request_is_handed_over_whole(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(2, ended("length"))
    await collect(runner)
    (wanted,) = runner.wanted
    assert (wanted.client, wanted.token_ids, wanted.sampling) == ("somebody", (1, 2, 3), GREEDY)
    assert (wanted.n_tokens, wanted.end_tokens, wanted.n_top) == (4, (9,), 2)


async def test_the_last_token_says_why_it_is_the_last(autojump_clock: MockClock) -> None:
    got = await collect(ScriptedRunner(2, ended("length")))
    assert got[0] == GeneratedToken(20, -0.5, ((20, -0.5), (7, -2.0)), None)
    assert [(each.token_id, each.finish) for each in got] == [(20, None), (21, "length")]
    end = ended("end_of_text", end_token=9, end_log_probability=-0.25, end_top=((9, -0.25),))
    got = await collect(ScriptedRunner(2, end))
    assert [(each.token_id, each.finish) for each in got] == [(20, None), (21, None), (9, "stop")]
    assert got[-1].top == ((9, -0.25),)
    assert [each.finish for each in await collect(ScriptedRunner(0, end))] == ["stop"]


@pytest.mark.parametrize(
    "end, kind, retry_after_s",
    [
        (ended("failed", "queue_full", retry_after_ns=7_000_000_000), "busy", 7.0),
        (ended("failed", "busy"), "busy", 1.0),
        (ended("failed", "usage_error"), "too_long", 1.0),
        (NotReady("not the backbone"), "not_ready", 1.0),
        (LocalProtocolError("n_tokens is out of bounds"), "too_long", 1.0),
    ],
)
async def test_what_is_not_begun_is_refused_while_it_is_opened(
    end: SessionEnded | Exception, kind: str, retry_after_s: float, autojump_clock: MockClock
) -> None:
    with pytest.raises(CompletionRefused) as raised:
        async with BackboneCompletions(ScriptedRunner(0, end)).open(REQUEST):
            raise AssertionError("it was opened")
    assert (raised.value.kind, raised.value.retry_after_s) == (kind, retry_after_s)


async def test_an_engine_that_says_nothing_is_not_waited_for_for_ever(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(1, None, opens_after_s=1000.0)
    began = trio.current_time()
    with pytest.raises(CompletionRefused) as raised:
        async with BackboneCompletions(runner).open(REQUEST):
            raise AssertionError("it was opened")
    assert raised.value.kind == "not_ready"
    assert trio.current_time() - began == pytest.approx(OPEN_TIMEOUT_S)
    assert runner.is_cancelled


@pytest.mark.parametrize(
    "end, error",
    [
        (ended("failed", "no_holder_left"), EngineFailed),
        (EngineFailed("the engine ended"), EngineFailed),
        (NotReady("no longer the backbone"), NotReady),
        (ended("failed", "waited_too_long", retry_after_ns=1), CompletionRefused),
    ],
)
async def test_a_session_that_cannot_go_on_says_so_behind_its_tokens(
    end: SessionEnded | Exception, error: type[Exception], autojump_clock: MockClock
) -> None:
    got: list[GeneratedToken] = []
    with pytest.raises(error):
        await collect(ScriptedRunner(1, end), got)
    assert [each.token_id for each in got] == [20]


async def test_leaving_cancels_the_session_at_once(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(1, None)
    async with BackboneCompletions(runner).open(REQUEST) as tokens:
        async for _ in tokens:
            break
        began = trio.current_time()
    assert runner.is_cancelled
    assert trio.current_time() == began


async def test_an_error_of_whoever_reads_comes_as_itself(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(1, None)
    with pytest.raises(ZeroDivisionError):
        async with BackboneCompletions(runner).open(REQUEST):
            raise ZeroDivisionError
    assert runner.is_cancelled
