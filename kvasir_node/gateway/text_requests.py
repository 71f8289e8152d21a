"""What a client asks for at `/v1/chat/completions` and `/v1/completions`, read from JSON and bounded.

Decides which of OpenAI's parameters are understood, what each may be and what its absence means (their
defaults: temperature 1, no filter, 16 tokens of a completion, as many as fit of a chat). Everything else is
refused by name. It knows no model: what depends on one (its name, its vocabulary, its context) is the
endpoint's to check.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from kvasir_node.gateway.fields import Fields, integer, nested, number, parsed_body, refuse, text, truth
from kvasir_node.gateway.refusal import Refusal
from kvasir_proto.limits import CONTEXT_LENGTH_MAX, LOGIT_BIASES_MAX, TOP_K_MAX, UINT64_MAX
from kvasir_proto.sampling import Sampling, SamplingOptions

MESSAGES_MAX: Final = 2048
PARTS_MAX: Final = 256
"""Parts of one message's content."""
TEXT_LENGTH_MAX: Final = 1 << 20
"""Characters of all messages together, or of a prompt."""
STOP_STRINGS_MAX: Final = 16
STOP_STRING_LENGTH_MAX: Final = 256
TOP_LOG_PROBABILITIES_MAX: Final = 20
COMPLETION_TOKENS_DEFAULT: Final = 16
"""OpenAI's, of `/v1/completions` only."""

_TOKEN_MAX: Final = (1 << 31) - 1
_TOKEN: Final = re.compile(r"[0-9]{1,10}", re.ASCII)
_SEED_MIN: Final = -(1 << 63)

Role: TypeAlias = Literal["system", "user", "assistant"]
_ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer word; templates know the older one
    "user": "user",
    "assistant": "assistant",
}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. ``name`` is empty where none was given."""

    role: Role
    content: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the answer is to be made, and told.

    ``n_tokens_max`` is None for as many as fit; ``n_top`` None for no log-probabilities at all.
    ``user`` is on whose behalf is asked; empty where that is not said.
    """

    model: str
    sampling: SamplingOptions
    n_tokens_max: int | None
    stop_strings: tuple[str, ...]
    n_top: int | None
    user: str
    is_streamed: bool
    with_usage: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation whose next message is wanted."""

    messages: tuple[ChatMessage, ...]
    options: AnswerOptions


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A text, or its tokens, whose continuation is wanted."""

    prompt: str | tuple[int, ...]
    options: AnswerOptions


def chat_request_of(body: bytes, draw_seed: Callable[[], int]) -> ChatRequest:
    """Read a request; ``draw_seed`` gives the seed where the client has none. Raises `Refusal`."""
    fields = parsed_body(body)
    messages = fields.require("messages", _messages)
    wants = fields.take("logprobs", truth, False)
    n_top = fields.take("top_logprobs", integer(0, TOP_LOG_PROBABILITIES_MAX), None)
    if n_top is not None and not wants:
        refuse("top_logprobs", "left out where logprobs is not true")
    n_tokens_max = fields.take("max_completion_tokens", integer(1, CONTEXT_LENGTH_MAX), None)
    old_name = fields.take("max_tokens", integer(1, CONTEXT_LENGTH_MAX), None)
    if None not in (n_tokens_max, old_name) and n_tokens_max != old_name:
        refuse("max_tokens", "what max_completion_tokens is, or left out")
    if n_tokens_max is None:
        n_tokens_max = old_name
    options = _options(fields, draw_seed, n_tokens_max, (n_top or 0) if wants else None)
    fields.allow_only("tools", [])
    fields.finish()
    return ChatRequest(messages, options)


def completion_request_of(body: bytes, draw_seed: Callable[[], int]) -> CompletionRequest:
    """Read a request, as `chat_request_of`."""
    fields = parsed_body(body)
    prompt = fields.require("prompt", _prompt)
    n_top = fields.take("logprobs", integer(0, TOP_LOG_PROBABILITIES_MAX), None)
    n_tokens_max = fields.take("max_tokens", integer(1, CONTEXT_LENGTH_MAX), COMPLETION_TOKENS_DEFAULT)
    options = _options(fields, draw_seed, n_tokens_max, n_top)
    fields.allow_only("echo", False)
    fields.allow_only("best_of", 1)
    fields.finish()
    return CompletionRequest(prompt, options)


def _options(
    fields: Fields, draw_seed: Callable[[], int], n_tokens_max: int | None, n_top: int | None
) -> AnswerOptions:
    """What both endpoints have."""
    model = fields.require("model", text(1, 256))
    is_streamed = fields.take("stream", truth, False)
    with_usage = fields.take("stream_options", _stream_options, None)
    if with_usage is not None and not is_streamed:
        refuse("stream_options", "left out where stream is not true")
    seed = fields.take("seed", integer(_SEED_MIN, UINT64_MAX), None)
    draw = Sampling(
        seed=draw_seed() if seed is None else seed & UINT64_MAX,
        temperature=fields.take("temperature", number(0.0, 2.0), 1.0),
        top_k=fields.take("top_k", integer(0, TOP_K_MAX), 0),
        top_p=fields.take("top_p", number(0.0, 1.0), 1.0),
        min_p=fields.take("min_p", number(0.0, 1.0), 0.0),
    )
    sampling = SamplingOptions(
        draw=draw,
        presence_penalty=fields.take("presence_penalty", number(-2.0, 2.0), 0.0),
        frequency_penalty=fields.take("frequency_penalty", number(-2.0, 2.0), 0.0),
        logit_bias=fields.take("logit_bias", _logit_bias, ()),
    )
    no_stop_strings: tuple[str, ...] = ()
    stop_strings = fields.take("stop", _stop_strings, no_stop_strings)
    user = fields.take("user", text(0, 1024), "")
    fields.allow_only("n", 1)
    return AnswerOptions(
        model=model,
        sampling=sampling,
        n_tokens_max=n_tokens_max,
        stop_strings=stop_strings,
        n_top=n_top,
        user=user,
        is_streamed=is_streamed,
        with_usage=bool(with_usage),
    )


def _stream_options(value: object, name: str) -> bool | None:
    fields = nested(value, name)
    with_usage = fields.take("include_usage", truth, False)
    fields.finish()
    return with_usage


def _stop_strings(value: object, name: str) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if len(values) > STOP_STRINGS_MAX:
        refuse(name, f"at most {STOP_STRINGS_MAX} strings")
    parse = text(1, STOP_STRING_LENGTH_MAX)
    return tuple(parse(each, name) for each in values)


def _logit_bias(value: object, name: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or len(value) > LOGIT_BIASES_MAX:
        refuse(name, f"an object of at most {LOGIT_BIASES_MAX} tokens, each with a number")
    parse = number(-100.0, 100.0)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if not _TOKEN.fullmatch(token) or int(token) > _TOKEN_MAX or int(token) in biases:
            refuse(name, "an object whose keys are ids of tokens, each once")
        biases[int(token)] = parse(bias, f"{name}.{token}")
    return tuple(sorted(biases.items()))


def _prompt(value: object, name: str) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]  # a batch of one
    if isinstance(value, list):
        if value and isinstance(value[0], str | list):
            refuse(name, "one prompt: several at once are not supported here", "unsupported_value")
        if not 1 <= len(value) <= CONTEXT_LENGTH_MAX:
            refuse(name, f"text, or 1 to {CONTEXT_LENGTH_MAX} ids of tokens")
        parse = integer(0, _TOKEN_MAX)
        return tuple(parse(each, name) for each in value)
    return text(0, TEXT_LENGTH_MAX)(value, name)


def _messages(value: object, name: str) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MESSAGES_MAX:
        refuse(name, f"an array of 1 to {MESSAGES_MAX} messages")
    messages = tuple(_message(each, f"{name}[{index}]") for index, each in enumerate(value))
    if sum(len(each.content) for each in messages) > TEXT_LENGTH_MAX:
        refuse(name, f"at most {TEXT_LENGTH_MAX} characters together")
    return messages


def _message(value: object, name: str) -> ChatMessage:
    fields = nested(value, name)
    role = fields.require("role", _role)
    content = fields.require("content", _content)
    speaker = fields.take("name", text(0, 64), "")
    # What clients send back of an answer, with nothing in it.
    for each in ("tool_calls", "annotations"):
        fields.allow_only(each, [])
    fields.finish()
    return ChatMessage(role, content, speaker)


def _role(value: object, name: str) -> Role:
    if not isinstance(value, str) or value not in _ROLES:
        if value in ("tool", "function"):
            raise Refusal(
                400, f"{name}: tools are not supported here", parameter=name, code="unsupported_value"
            )
        refuse(name, "system, developer, user or assistant")
    return _ROLES[value]


def _content(value: object, name: str) -> str:
    if not isinstance(value, list):
        return text(0, TEXT_LENGTH_MAX)(value, name)
    if len(value) > PARTS_MAX:
        refuse(name, f"text, or at most {PARTS_MAX} parts")
    return "".join(_part(each, f"{name}[{index}]") for index, each in enumerate(value))


def _part(value: object, name: str) -> str:
    fields = nested(value, name)
    kind = fields.require("type", text(1, 64))
    if kind != "text":
        refuse(f"{name}.type", "text: nothing else is supported here", "unsupported_value")
    part = fields.require("text", text(0, TEXT_LENGTH_MAX))
    fields.finish()
    return part
