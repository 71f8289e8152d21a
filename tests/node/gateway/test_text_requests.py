"""What of a request is understood, and that everything else is refused by its name."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvasir_node.gateway.refusal import Refusal
from kvasir_node.gateway.text_requests import (
    ChatMessage,
    chat_request_of,
    completion_request_of,
)
from kvasir_proto.sampling import Sampling, SamplingOptions

MESSAGES = [{"role": "user", "content": "Hi"}]
PART = {"type": "text", "text": "P"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "messages": MESSAGES} | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "demo", "prompt": "Once"} | fields).encode()


def test_what_is_left_out_is_openais_default() -> None:
    request = chat_request_of(chat(), lambda: 7)
    assert request.messages == (ChatMessage("user", "Hi"),)
    assert request.options.sampling == SamplingOptions(
        Sampling(seed=7, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    )
    assert request.options.n_tokens_max is None
    assert request.options.n_top is None
    assert not request.options.is_streamed
    assert completion_request_of(completion(), lambda: 7).options.n_tokens_max == 16


def test_everything_that_can_be_said_is_heard() -> None:
    request = chat_request_of(
        chat(
            messages=[
                {"role": "developer", "content": "Be brief."},
                {
                    "role": "assistant",
                    "content": [PART, PART],
                },
                {"role": "user", "content": "", "name": "ann"},
            ],
            temperature=0,
            top_p=0.5,
            top_k=3,
            min_p=0.25,
            presence_penalty=-1,
            frequency_penalty=2,
            logit_bias={"50": -100, "7": 1.5},
            max_completion_tokens=9,
            max_tokens=9,
            stop=["x", "yz"],
            seed=-1,
            logprobs=True,
            top_logprobs=4,
            stream=True,
            stream_options={"include_usage": True},
            user="u",
            n=1,
            tools=[],
            response_format=None,
        ),
        lambda: 0,
    )
    assert request.messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("assistant", "PP"),
        ChatMessage("user", "", "ann"),
    )
    assert request.options.sampling == SamplingOptions(
        Sampling(seed=2**64 - 1, temperature=0.0, top_k=3, top_p=0.5, min_p=0.25),
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=((7, 1.5), (50, -100.0)),
    )
    assert request.options.n_tokens_max == 9
    assert request.options.stop_strings == ("x", "yz")
    assert request.options.n_top == 4
    assert request.options.is_streamed
    assert request.options.with_usage


@pytest.mark.parametrize("prompt, heard", [("a", "a"), (["a"], "a"), ([1, 2], (1, 2)), ([[3]], (3,))])
def test_a_prompt_is_text_or_tokens(prompt: object, heard: object) -> None:
    assert completion_request_of(completion(prompt=prompt), lambda: 0).prompt == heard


def test_log_probabilities_of_completions_are_a_number() -> None:
    assert completion_request_of(completion(logprobs=5), lambda: 0).options.n_top == 5
    assert completion_request_of(completion(logprobs=0), lambda: 0).options.n_top == 0


BAD_FOR_BOTH: list[tuple[str, object]] = [
    ("n", 2),
    ("n", True),
    ("tool_choice", "auto"),
    ("response_format", {"type": "json_object"}),
    ("temperature", 2.1),
    ("temperature", "1"),
    ("temperature", True),
    ("temperature", 10**400),
    ("top_p", -0.1),
    ("top_k", -1),
    ("top_k", 1.0),
    ("min_p", 2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("logit_bias", [1]),
    ("logit_bias", {"one": 1}),
    ("logit_bias", {"1": 1, "01": 1}),
    ("logit_bias", {str(2**31): 1}),
    ("logit_bias", {str(each): 0 for each in range(1025)}),
    ("max_tokens", 0),
    ("max_tokens", 2**18 + 1),
    ("stop", ""),
    ("stop", ["a"] * 17),
    ("stop", ["a" * 257]),
    ("stop", [1]),
    ("stop", "\ud800"),
    ("seed", 2**64),
    ("seed", 1.5),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("user", 1),
    ("user", "u" * 1025),
    ("model", ""),
    ("model", 1),
    ("no_such_parameter", 1),
]
BAD_CHATS: list[tuple[str, object]] = [
    ("tools", [{"type": "function"}]),
    ("top_logprobs", 1),
    ("logprobs", 1),
    ("messages", []),
    ("messages", "Hi"),
    ("messages", MESSAGES * 2049),
    ("messages", [{"role": "user", "content": "a" * (2**19)}] * 3),
    ("prompt", "Hi"),
]
BAD_COMPLETIONS: list[tuple[str, object]] = [
    ("suffix", "end"),
    ("echo", True),
    ("best_of", 2),
    ("logprobs", 21),
    ("logprobs", True),
    ("prompt", ["a", "b"]),
    ("prompt", []),
    ("prompt", [-1]),
    ("prompt", [True]),
    ("prompt", "a" * (2**20 + 1)),
    ("max_completion_tokens", 4),
]


@pytest.mark.parametrize("name, value", BAD_FOR_BOTH + BAD_CHATS)
def test_a_bad_parameter_of_a_chat_is_named(name: str, value: object) -> None:
    with pytest.raises(Refusal) as refused:
        chat_request_of(chat(**{name: value}), lambda: 0)
    assert_names(refused.value, name)


@pytest.mark.parametrize("name, value", BAD_FOR_BOTH + BAD_COMPLETIONS)
def test_a_bad_parameter_of_a_completion_is_named(name: str, value: object) -> None:
    with pytest.raises(Refusal) as refused:
        completion_request_of(completion(**{name: value}), lambda: 0)
    assert_names(refused.value, name)


def assert_names(refusal: Refusal, name: str) -> None:
    assert refusal.status == 400
    assert refusal.parameter is not None
    assert refusal.parameter.startswith(name)
    error = refusal.document()["error"]
    assert error["type"] == "invalid_request_error"
    assert name in error["message"]


@pytest.mark.parametrize(
    "message, named",
    [
        ("Hi", "messages[0]"),
        ({"content": "Hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "robot", "content": "Hi"}, "messages[0].role"),
        ({"role": "tool", "content": "Hi"}, "messages[0].role"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "messages[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [PART] * 257}, "messages[0].content"),
        ({"role": "user", "content": "Hi", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "Hi", "name": "n" * 65}, "messages[0].name"),
    ],
)
def test_a_bad_message_is_named(message: object, named: str) -> None:
    with pytest.raises(Refusal) as refused:
        chat_request_of(chat(messages=[message]), lambda: 0)
    assert refused.value.parameter == named


def test_two_limits_that_differ_are_refused() -> None:
    with pytest.raises(Refusal, match="max_tokens"):
        chat_request_of(chat(max_tokens=3, max_completion_tokens=4), lambda: 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b'"text"',
        b'{"model": "a"',
        b'{"model": NaN}',
        b'{"model": "a", "model": "b"}',
        b'{"model":' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        b'{"model":' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        chat_request_of(body, lambda: 0)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("many", [b"[],", b"{},", b'"":1,', b"1,"])
def test_what_would_take_long_to_read_is_not_read(many: bytes) -> None:
    body = b'{"model": "demo", "prompt": ' + many * (400_001 if many == b"1," else 150_001)
    with pytest.raises(Refusal) as refused:
        completion_request_of(body, lambda: 0)
    assert refused.value.status == 413


def test_the_longest_prompt_of_tokens_is_read() -> None:
    assert len(completion_request_of(completion(prompt=[7] * 2**18), lambda: 0).prompt) == 2**18


documents = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = [
    "model",
    "messages",
    "prompt",
    "stop",
    "seed",
    "logit_bias",
    "logprobs",
    "stream",
    "stream_options",
    "x",
]


@given(st.dictionaries(st.sampled_from(NAMES), documents))
def test_any_object_is_a_request_or_a_refusal(document: dict[str, Any]) -> None:
    body = json.dumps({"model": "demo", "messages": MESSAGES, "prompt": "a"} | document).encode()
    for parse in (chat_request_of, completion_request_of):
        try:
            parse(body, lambda: 0)
        except Refusal as refused:
            json.loads(refused.body())
