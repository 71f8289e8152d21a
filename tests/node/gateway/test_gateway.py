"""Every endpoint over HTTP, against a swarm that says what was written down for it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NoReturn

import hypothesis.strategies as st
import pytest
import trio
import trio.testing
from hypothesis import given, settings

from kvasir_node.gateway.doors import Doors
from kvasir_node.gateway.event_stream import KEEP_ALIVE_S
from kvasir_node.gateway.ports import CompletionRefused, Standing
from kvasir_proto.errors import EngineFailed
from tests.node.gateway.http_client import Answer
from tests.node.gateway.test_http_server import connected
from tests.node.gateway.test_text_pieces import reference
from tests.node.gateway.toy_swarm import END, MODEL, PROVENANCE, BytesTokenizer, Script, ToyGateway

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def body(path: str, **fields: Any) -> bytes:
    prompt = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    return json.dumps({"model": "demo", **prompt, **fields}).encode()


async def asked(toy: ToyGateway, path: str, **fields: Any) -> Answer:
    async with connected(toy.server) as client:
        return await client.ask("POST", path, body(path, **fields))


def events_of(answer: Answer) -> list[Any]:
    """The objects of a stream, after what every stream must keep to."""
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.body.decode("utf-8").split("\n\n")
    assert events[-1] == ""
    data = [each.removeprefix("data: ") for each in events[:-1] if not each.startswith(":")]
    assert data[-1] == "[DONE]"
    assert "[DONE]" not in data[:-1]
    return [json.loads(each) for each in data[:-1]]


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


def finishes_of(events: list[Any]) -> list[str]:
    """The reasons, which is one, with the last choice."""
    choices = [choice for event in events for choice in event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices]
    assert all(reason is None for reason in reasons[:-1])
    return [reason for reason in reasons if reason is not None]


async def test_a_chat(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway()
    answer = await asked(toy, CHAT, seed=5, temperature=0.5, max_tokens=9)
    assert answer.status == 200
    assert answer.document == {
        "id": "chatcmpl-000102030405060708090a0b",
        "object": "chat.completion",
        "created": 1_800_000_000,
        "model": "demo",
        "system_fingerprint": "kvasir-abababababababab",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": 6, "total_tokens": 14},
    }
    (request,) = toy.completions.requests
    assert bytes(request.token_ids) == b"user: Hi"
    assert (request.n_tokens_max, request.stop_token_ids, request.n_top) == (9, (END,), 0)
    assert (request.sampling.draw.seed, request.sampling.draw.temperature) == (5, 0.5)


async def test_a_completion(autojump_clock: trio.testing.MockClock) -> None:
    answer = await asked(ToyGateway(), TEXT, max_tokens=4)
    assert answer.document["object"] == "text_completion"
    assert answer.document["choices"] == [
        {"index": 0, "text": "Hell", "logprobs": None, "finish_reason": "length"}
    ]
    assert answer.document["usage"]["completion_tokens"] == 4


async def test_a_streamed_chat(autojump_clock: trio.testing.MockClock) -> None:
    events = events_of(await asked(ToyGateway(Script(b"Hi\xe2\x82\xac")), CHAT, stream=True))
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "H"},
        {"content": "i"},
        {"content": "€"},
        {},
    ]
    assert finishes_of(events) == ["stop"]
    assert not any("usage" in event for event in events)


async def test_usage_is_the_last_piece_where_it_is_wanted(autojump_clock: trio.testing.MockClock) -> None:
    for path in (CHAT, TEXT):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        events = events_of(await asked(ToyGateway(), path, **options))
        assert events[-1]["choices"] == []
        assert events[-1]["usage"]["completion_tokens"] == 6
        assert all(event["usage"] is None for event in events[:-1])
        assert finishes_of(events) == ["stop"]


async def test_log_probabilities_of_a_chat(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway(Script(b"a\xe2\x82\xac"))
    options = {"logprobs": True, "top_logprobs": 2}
    whole = (await asked(toy, CHAT, **options)).document["choices"][0]["logprobs"]["content"]
    assert [(each["token"], each["bytes"], each["logprob"]) for each in whole] == [
        ("a", [97], -0.5),
        ("bytes:\\xe2", [0xE2], -0.5),
        ("bytes:\\x82", [0x82], -0.5),
        ("bytes:\\xac", [0xAC], -0.5),
    ]
    assert whole[0]["top_logprobs"] == [
        {"token": "a", "logprob": -97.0, "bytes": [97]},
        {"token": "bytes:\\xff", "logprob": -255.0, "bytes": [255]},
    ]
    events = events_of(await asked(toy, CHAT, stream=True, **options))
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [entry for each in streamed if each for entry in each["content"]] == whole


async def test_log_probabilities_of_a_completion(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway(Script("aé!".encode()))
    whole = (await asked(toy, TEXT, logprobs=1)).document["choices"][0]["logprobs"]
    assert whole["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert whole["token_logprobs"] == [-0.5] * 4
    assert whole["top_logprobs"][0] == {"a": -97.0}
    assert whole["text_offset"] == [0, 1, 1, 2]
    events = events_of(await asked(toy, TEXT, stream=True, logprobs=1))
    told = [event["choices"][0]["logprobs"] for event in events]
    for name in ("tokens", "text_offset"):
        assert [entry for each in told if each for entry in each[name]] == whole[name]


async def test_a_stop_string_ends_text_and_session(autojump_clock: trio.testing.MockClock) -> None:
    for is_streamed in (False, True):
        toy = ToyGateway(Script(b"one STOP two", interval_s=1.0))
        answer = await asked(toy, CHAT, stop="STOP", stream=is_streamed, logprobs=True)
        assert b"S" not in answer.body.split(b'"choices"', 1)[1]
        assert len(toy.completions.left_at) == 1
        if is_streamed:
            events = events_of(answer)
            assert "".join(text_of(event["choices"][0]) for event in events) == "one "
            assert finishes_of(events) == ["stop"]
        else:
            choice = answer.document["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("one ", "stop")
            assert [each["token"] for each in choice["logprobs"]["content"]] == list("one ")
            assert answer.document["usage"]["completion_tokens"] == 8


@settings(max_examples=25)
@given(
    st.lists(st.sampled_from([b"a", b"b", "é".encode(), "€".encode(), b"\xff", b"\xe2"]), max_size=12),
    st.lists(st.text("abé", min_size=1, max_size=3), max_size=3),
    st.sampled_from([CHAT, TEXT]),
)
def test_pieces_make_what_comes_at_once(parts: list[bytes], stop_strings: list[str], path: str) -> None:
    async def ask() -> None:
        script = Script(b"".join(parts))
        whole = await asked(ToyGateway(script), path, stop=stop_strings, max_tokens=40)
        events = events_of(
            await asked(ToyGateway(script), path, stop=stop_strings, max_tokens=40, stream=True)
        )
        choice = whole.document["choices"][0]
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert "".join(text_of(event["choices"][0]) for event in events) == text
        assert finishes_of(events) == [choice["finish_reason"]]
        assert text == reference(script.text, stop_strings)[0]

    trio.run(ask, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_a_long_silence_has_comments(autojump_clock: trio.testing.MockClock) -> None:
    answer = await asked(ToyGateway(Script(b"ab", first_s=KEEP_ALIVE_S * 3.5)), CHAT, stream=True)
    assert answer.body.count(b": keep-alive\n\n") == 3
    assert finishes_of(events_of(answer)) == ["stop"]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_goes_away_ends_its_session(
    autojump_clock: trio.testing.MockClock, is_streamed: bool
) -> None:
    toy = ToyGateway(Script(b"ab", first_s=100.0))
    async with connected(toy.server) as client:
        await client.send("POST", CHAT, body(CHAT, stream=is_streamed))
        await trio.sleep(5)
        assert toy.completions.left_at == []
        await client.stream.aclose()
        await trio.sleep(5)
        assert toy.completions.left_at == [5]
    assert b"kvasir_gateway_answers_cut_short_total 1.0" in toy.metrics.text()
    assert b"kvasir_gateway_sessions 0.0" in toy.metrics.text()


@pytest.mark.parametrize(
    "kind, status, code, retry",
    [
        ("busy", 429, "too_many_requests", "3"),
        ("not_ready", 503, "not_ready", "3"),
        ("too_long", 400, "context_length_exceeded", None),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_who_gets_no_session_hears_why(
    autojump_clock: trio.testing.MockClock, kind: Any, status: int, code: str, retry: str, is_streamed: bool
) -> None:
    toy = ToyGateway(Script(refusal=CompletionRefused("no room", kind, 2.1)))
    answer = await asked(toy, CHAT, stream=is_streamed)
    assert (answer.status, answer.headers.get("retry-after")) == (status, retry)
    assert answer.document["error"]["code"] == code
    assert answer.document["error"]["message"] == "no room"


async def test_a_session_that_fails(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway(Script(b"ab", error=EngineFailed("the engine died")))
    whole = await asked(toy, CHAT)
    assert (whole.status, whole.headers["retry-after"]) == (503, "1")
    events = events_of(await asked(toy, CHAT, stream=True))
    assert events[-1] == whole.document
    assert whole.document["error"]["code"] == "engine_failed"
    assert finishes_of(events[:-1]) == []


async def test_a_session_that_falls_silent_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    answer = await asked(ToyGateway(Script(first_s=1e6)), TEXT)
    assert answer.status == 503
    assert trio.current_time() < 700


class Endless(BytesTokenizer):
    """Needs for ever for a text."""

    async def tokens_of(self, text: str, *, is_template: bool) -> NoReturn:
        await trio.sleep_forever()


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_gateway_that_ends_brings_its_answers_to_their_end(
    autojump_clock: trio.testing.MockClock, path: str, is_streamed: bool
) -> None:
    """Whatever an answer waits for; and what is asked from then on waits for nothing."""
    slow = ToyGateway(Script(b"abc", interval_s=100.0))
    cases = (
        (slow, 150.0),
        (ToyGateway(Script(first_s=500.0)), 1.0),
        (ToyGateway(tokenizer=Endless()), 1.0),
        (ToyGateway(Script(opens_s=500.0)), 1.0),
    )
    for toy, after_s in cases:
        async with connected(toy.server) as client:
            began = trio.current_time()
            await client.send("POST", path, body(path, stream=is_streamed))
            await trio.sleep(after_s)
            toy.gateway.end()
            answer = await client.receive()
            assert trio.current_time() == began + after_s
            if answer.status == 200:
                *pieces, error = events_of(answer)
                assert error["error"]["code"] == "not_ready"
                assert "stopping" in error["error"]["message"]
                assert finishes_of(pieces) == []
                told = "".join(text_of(choice) for each in pieces for choice in each["choices"])
                assert told == ("ab" if toy is slow else "")
            else:
                assert answer.status == 503
                assert "stopping" in answer.document["error"]["message"]
                assert not is_streamed or toy.completions.requests == []
            await trio.testing.wait_all_tasks_blocked()
            assert len(toy.completions.left_at) == len(toy.completions.requests)
            assert (await client.ask("POST", path, body(path))).status == 503
            assert (await client.ask("GET", "/health/live")).status == 200


async def test_who_asks_for_others_has_turns_for_them(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway()
    for user in ("ann", "bob", "ann"):
        await asked(toy, CHAT, user=user)
    first, second, third = [each.client for each in toy.completions.requests]
    assert first == third != second


async def test_whose_answer_it_is(autojump_clock: trio.testing.MockClock) -> None:
    for options in ({}, {"stream": True}):
        headers = (await asked(ToyGateway(), CHAT, **options)).headers
        assert {name: headers[name] for name in headers if name.startswith("kvasir-")} == {
            "kvasir-swarm": PROVENANCE.swarm,
            "kvasir-epoch": "2",
            "kvasir-term": "7",
            "kvasir-certificates": "verified",
        }


async def test_models(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway()
    async with connected(toy.server) as client:
        listed = (await client.ask("GET", "/v1/models")).document
        assert listed["object"] == "list"
        assert [each["id"] for each in listed["data"]] == ["demo"]
        assert (await client.ask("GET", "/v1/models/demo")).document == listed["data"][0]
        assert (await client.ask("GET", f"/v1/models/{MODEL.digest}")).status == 200
        missing = await client.ask("GET", "/v1/models/gpt%2d4")
        assert (missing.status, missing.document["error"]["code"]) == (404, "model_not_found")
    toy.swarm.now = Standing(None, None)
    async with connected(toy.server) as client:
        assert (await client.ask("GET", "/v1/models")).document["data"] == []


@pytest.mark.parametrize(
    "path, fields, status, parameter",
    [
        (CHAT, {"model": "other"}, 404, "model"),
        (CHAT, {"tools": [{}]}, 400, "tools"),
        (CHAT, {"n": 2}, 400, "n"),
        (CHAT, {"response_format": {"type": "text"}}, 400, "response_format"),
        (CHAT, {"logit_bias": {"257": 1}}, 400, "logit_bias"),
        (TEXT, {"prompt": [257]}, 400, "prompt"),
        (TEXT, {"prompt": ""}, 400, "prompt"),
        (TEXT, {"prompt": "a" * 64}, 400, "prompt"),
        ("/v1/embeddings", {}, 400, "/v1/embeddings"),
        ("/v1/responses", {}, 400, "/v1/responses"),
        ("/nowhere", {}, 404, None),
    ],
)
async def test_what_is_refused_is_named(
    autojump_clock: trio.testing.MockClock, path: str, fields: Any, status: int, parameter: str | None
) -> None:
    answer = await asked(ToyGateway(), path, **fields)
    assert (answer.status, answer.document["error"]["param"]) == (status, parameter)


async def test_an_answer_has_the_room_that_is_left(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway(Script(b"a" * 100))
    answer = await asked(toy, TEXT, prompt="a" * 60, max_tokens=50)
    assert answer.document["choices"][0]["finish_reason"] == "length"
    assert answer.document["usage"]["completion_tokens"] == 4


async def test_a_wrong_method_names_the_right_one(autojump_clock: trio.testing.MockClock) -> None:
    async with connected(ToyGateway().server) as client:
        answer = await client.ask("GET", CHAT)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    async with connected(ToyGateway().server) as client:
        assert (await client.ask("OPTIONS", "/v1/models")).status == 405
    async with connected(ToyGateway().server) as client:
        assert (await client.ask("POST", "/v1/models")).status == 405
    async with connected(ToyGateway().server) as client:
        assert (await client.ask("POST", CHAT, b"a=b", content_type="text/plain")).status == 415


async def test_health(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway(doors=Doors("0.0.0.0", token="t" * 16))
    async with connected(toy.server) as client:
        assert (await client.ask("GET", "/health/live")).status == 200
        assert (await client.ask("GET", "/health/ready")).document == {"status": "ready"}
        toy.swarm.now = replace(toy.swarm.now, obstacle="layer 3 has no holder")
        assert (await client.ask("GET", "/health/live")).status == 200
        closed = await client.ask("GET", "/health/ready")
        assert (closed.status, closed.document, closed.headers["retry-after"]) == (
            503,
            {"status": "not ready"},
            "5",
        )
        known = await client.ask("GET", "/health/ready", authorization="Bearer " + "t" * 16)
        assert known.document["reason"] == "layer 3 has no holder"
    answer = await asked(ToyGateway(), CHAT)
    assert answer.status == 200


async def test_who_asks_while_nothing_can_be_served(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway()
    for standing in (Standing(MODEL, PROVENANCE, "no backbone"), Standing(None, None)):
        toy.swarm.now = standing
        answer = await asked(toy, CHAT)
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert toy.completions.requests == []


async def test_metrics_count_and_tell_nothing_that_was_said(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway(Script(b"secret", first_s=2.0, interval_s=0.03))
    toy.metrics.watch_connections(lambda: toy.server.n_connections)
    await asked(toy, CHAT, messages=[{"role": "user", "content": "whisper"}])
    await asked(toy, CHAT, tools=[{}])
    await asked(toy, "/whisper")
    async with connected(toy.server) as client:
        answer = await client.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = answer.body.decode().splitlines()
    assert 'kvasir_gateway_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in lines
    assert 'kvasir_gateway_requests_total{endpoint="/v1/chat/completions",status="400"} 1.0' in lines
    assert 'kvasir_gateway_requests_total{endpoint="none",status="404"} 1.0' in lines
    assert "kvasir_gateway_generated_tokens_total 7.0" in lines
    assert "kvasir_gateway_connections 1.0" in lines
    assert 'kvasir_gateway_first_token_seconds_bucket{le="2.5"} 1.0' in lines
    assert 'kvasir_gateway_first_token_seconds_bucket{le="1.0"} 0.0' in lines
    assert 'kvasir_gateway_next_token_seconds_bucket{le="0.05"} 6.0' in lines
    assert b"whisper" not in answer.body
    assert b"secret" not in answer.body
