"""`generate` over the gateway's port: text in, bytes and counts out, errors with the status of their kind."""

from __future__ import annotations

import json

import pytest
from trio.testing import MockClock

from kvasir_node.driver.generation_elsewhere import generate_elsewhere
from kvasir_node.gateway.ports import CompletionRefused
from kvasir_proto.errors import Busy, EngineFailed, NotReady, UsageError
from kvasir_proto.messages.engine import SessionEnded
from kvasir_proto.messages.local import GenerateEnd, GenerateRequest, TokenEvent
from kvasir_proto.sampling import Sampling
from tests.node.driver.test_completions import ScriptedRunner, completions, ended
from tests.node.driver.twins import now

SAMPLING = Sampling(seed=4)


class Letters:
    """Each character is a token."""

    async def tokens_of(self, text: str, *, is_template: bool) -> tuple[int, ...]:
        assert not is_template
        if len(text) > 100:
            raise CompletionRefused("the text is longer than any context", "too_long")
        return tuple(text.encode())

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id])


async def run(runner: ScriptedRunner, request: GenerateRequest) -> tuple[list[TokenEvent], GenerateEnd]:
    events = []

    async def emit(event: TokenEvent) -> None:
        events.append(event)

    made = completions(runner)
    end = await generate_elsewhere(request, emit, completions=made, tokenizer=Letters(), now=now)
    return events, end


@pytest.mark.parametrize(
    "end, reason",
    [(ended("length"), "length"), (ended("end_of_text", end_token=9), "end_of_text")],
)
async def test_a_text_goes_in_and_tokens_with_their_bytes_come_out(
    end: SessionEnded, reason: str, autojump_clock: MockClock
) -> None:
    runner = ScriptedRunner(3, end)
    n_tokens = 3 if reason == "length" else 4
    events, told = await run(runner, GenerateRequest("abc", (), n_tokens, SAMPLING))
    assert events == [TokenEvent(3 + index, 20 + index, bytes([20 + index])) for index in range(3)]
    assert (told.reason, told.code) == (reason, "")
    assert runner.wanted[0].token_ids == tuple(b"abc")
    assert runner.wanted[0].sampling.draw == SAMPLING
    statistics = json.loads(told.statistics)
    assert (statistics["n_prompt"], statistics["n_generated"]) == (3, 3)
    assert statistics["prompt_s"] == pytest.approx(1.0)
    assert statistics["decode_s"] == pytest.approx(2.0)
    assert statistics["tokens_per_second"] == pytest.approx(1.0)
    assert statistics["rows_retried"] is None


async def test_token_ids_are_taken_as_they_are(autojump_clock: MockClock) -> None:
    runner = ScriptedRunner(0, ended("end_of_text", end_token=9))
    events, told = await run(runner, GenerateRequest(None, (1, 2, 3), 3, SAMPLING))
    assert (events, told.reason) == ([], "end_of_text")
    assert json.loads(told.statistics)["tokens_per_second"] == 0.0


@pytest.mark.parametrize(
    "end, error",
    [
        (ended("failed", "usage_error"), UsageError),
        (ended("failed", "queue_full", retry_after_ns=1), Busy),
        (NotReady("not yet"), NotReady),
        (ended("failed", "internal"), EngineFailed),
    ],
)
async def test_what_fails_ends_the_command_with_the_status_of_its_kind(
    end: SessionEnded | Exception, error: type[Exception], autojump_clock: MockClock
) -> None:
    with pytest.raises(error):
        await run(ScriptedRunner(0, end), GenerateRequest("abc", (), 3, SAMPLING))


async def test_a_text_that_is_too_long_is_a_mistake_of_its_user(autojump_clock: MockClock) -> None:
    with pytest.raises(UsageError):
        await run(ScriptedRunner(0, None), GenerateRequest("a" * 101, (), 3, SAMPLING))
