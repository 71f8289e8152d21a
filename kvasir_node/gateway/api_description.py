"""The gateway's API as an OpenAPI document, for programs that read one.

It says what `text_requests` takes, by the same bounds; a test holds the two together. What OpenAPI cannot say
(that two parameters exclude each other, what depends on the model) is answered with a 400 all the same.
"""

from __future__ import annotations

from typing import Any, Final

from kvasir_node import __version__
from kvasir_node.gateway.ports import ServedModel
from kvasir_node.gateway.text_requests import (
    COMPLETION_TOKENS_DEFAULT,
    MESSAGES_MAX,
    PARTS_MAX,
    STOP_STRING_LENGTH_MAX,
    STOP_STRINGS_MAX,
    TEXT_LENGTH_MAX,
    TOP_LOG_PROBABILITIES_MAX,
)
from kvasir_proto.limits import CONTEXT_LENGTH_MAX, LOGIT_BIASES_MAX, TOP_K_MAX, UINT64_MAX

Schema = dict[str, Any]


def _integer(low: int, high: int) -> Schema:
    return {"type": "integer", "minimum": low, "maximum": high}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _text(low: int, high: int) -> Schema:
    return {"type": "string", "minLength": low, "maxLength": high}


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _array(items: Schema, low: int, high: int) -> Schema:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


_STOP_STRING: Final = _text(1, STOP_STRING_LENGTH_MAX)
_TOKEN: Final = _integer(0, (1 << 31) - 1)
_SHARED: Final[dict[str, Schema]] = {
    "model": _text(1, 256),
    "stream": {"type": "boolean", "default": False},
    "stream_options": _object({"include_usage": {"type": "boolean"}}),
    "max_tokens": _integer(1, CONTEXT_LENGTH_MAX),
    "temperature": {**_number(0.0, 2.0), "default": 1.0},
    "top_k": {**_integer(0, TOP_K_MAX), "default": 0},
    "top_p": {**_number(0.0, 1.0), "default": 1.0},
    "min_p": {**_number(0.0, 1.0), "default": 0.0},
    "presence_penalty": {**_number(-2.0, 2.0), "default": 0.0},
    "frequency_penalty": {**_number(-2.0, 2.0), "default": 0.0},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
        "additionalProperties": _number(-100.0, 100.0),
        "maxProperties": LOGIT_BIASES_MAX,
    },
    "seed": _integer(-(1 << 63), UINT64_MAX),
    "stop": {"anyOf": [_STOP_STRING, _array(_STOP_STRING, 0, STOP_STRINGS_MAX)]},
    "n": _integer(1, 1),
    "user": _text(0, 1024),
}
_PART: Final = _object(
    {"type": {"type": "string", "enum": ["text"]}, "text": _text(0, TEXT_LENGTH_MAX)}, "type", "text"
)
_MESSAGE: Final = _object(
    {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [_text(0, TEXT_LENGTH_MAX), _array(_PART, 0, PARTS_MAX)]},
        "name": _text(0, 64),
    },
    "role",
    "content",
)
CHAT: Final = _object(
    {
        **_SHARED,
        "messages": _array(_MESSAGE, 1, MESSAGES_MAX),
        "max_completion_tokens": _integer(1, CONTEXT_LENGTH_MAX),
        "logprobs": {"type": "boolean", "default": False},
        "top_logprobs": _integer(0, TOP_LOG_PROBABILITIES_MAX),
    },
    "model",
    "messages",
)
COMPLETION: Final = _object(
    {
        **_SHARED,
        "prompt": {"anyOf": [_text(0, TEXT_LENGTH_MAX), _array(_TOKEN, 1, CONTEXT_LENGTH_MAX)]},
        "max_tokens": {**_integer(1, CONTEXT_LENGTH_MAX), "default": COMPLETION_TOKENS_DEFAULT},
        "logprobs": _integer(0, TOP_LOG_PROBABILITIES_MAX),
    },
    "model",
    "prompt",
)
_ERROR: Final = _object(
    {
        "error": _object(
            {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "message",
            "type",
            "param",
            "code",
        )
    },
    "error",
)
_FAILURES: Final = {
    "400": "not understood, or more than there is room for",
    "401": "the token is missing",
    "403": "asked by another name or from another site",
    "404": "another model than the swarm's",
    "413": "too long",
    "415": "not said to be JSON",
    "429": "too much to do; Retry-After says when to come again",
    "503": "nothing can be served now; Retry-After says when to come again",
}


def _answers(description: str, *media_types: str) -> Schema:
    failures = {
        status: {"description": why, "content": {"application/json": {"schema": _ERROR}}}
        for status, why in _FAILURES.items()
    }
    content: Schema = {each: {"schema": {}} for each in media_types}
    return {"200": {"description": description, "content": content}, **failures}


def _get(summary: str, media_type: str = "application/json", **more: Any) -> Schema:
    return {"get": {"summary": summary, "responses": _answers(summary, media_type), **more}}


def _post(summary: str, schema: Schema) -> Schema:
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    answers = _answers(summary, "application/json", "text/event-stream")
    return {"post": {"summary": summary, "requestBody": body, "responses": answers}}


def api_description(model: ServedModel | None) -> Schema:
    """The document. Which model there is is part of it, when it is known."""
    named = _text(1, 256) if model is None else {"type": "string", "enum": [model.name, model.digest]}
    name = {"name": "model", "in": "path", "required": True, "schema": named}

    def asking(schema: Schema) -> Schema:
        return {**schema, "properties": {**schema["properties"], "model": named}}

    ready = _get("Whether the swarm can serve")
    not_ready = {"description": "not now", "content": {"application/json": {"schema": {}}}}
    ready["get"]["responses"]["503"] = not_ready
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kvasir's gateway", "version": __version__},
        "paths": {
            "/v1/chat/completions": _post("The next message of a conversation", asking(CHAT)),
            "/v1/completions": _post("The continuation of a text", asking(COMPLETION)),
            "/v1/models": _get("The swarm's model"),
            "/v1/models/{model}": _get("One model", parameters=[name]),
            "/": _get("The dashboard, a page for people", "text/html"),
            "/status": _get("What this node and its swarm are doing; what the dashboard shows"),
            "/health/live": _get("Whether the gateway answers"),
            "/health/ready": ready,
            "/metrics": _get("Counters for Prometheus", "text/plain"),
        },
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }
