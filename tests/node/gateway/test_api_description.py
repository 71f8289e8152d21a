"""The OpenAPI document and what requests may be: the same parameters with the same bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio.testing

from kvasir_node.gateway.api_description import CHAT, COMPLETION, Schema
from kvasir_node.gateway.ports import Standing
from kvasir_node.gateway.refusal import Refusal
from kvasir_node.gateway.text_requests import chat_request_of, completion_request_of
from tests.node.gateway.test_http_server import connected
from tests.node.gateway.toy_swarm import MODEL, ToyGateway

PARSERS = {"chat": (CHAT, chat_request_of), "completion": (COMPLETION, completion_request_of)}
BASE: dict[str, Any] = {"model": "demo", "stream": True, "stream_options": {}}
BASES: dict[str, dict[str, Any]] = {
    "chat": {**BASE, "messages": [{"role": "user", "content": "a"}], "logprobs": True},
    "completion": {**BASE, "prompt": "a"},
}


def within(schema: Schema) -> list[Any]:
    """Values at the edges of what a schema allows."""
    if "anyOf" in schema:
        return [value for each in schema["anyOf"] for value in within(each)]
    if "enum" in schema:
        return list(schema["enum"])
    match schema["type"]:
        case "integer" | "number":
            return [schema["minimum"], schema["maximum"]]
        case "string":
            return ["a" * schema["minLength"], "a" * schema["maxLength"]]
        case "boolean":
            return [True, False]
        case "array":
            item = within(schema["items"])[0]
            return [[item] * max(schema["minItems"], 1), [item] * min(schema["maxItems"], 10_000)]
        case "object":
            return [{name: within(each)[0] for name, each in schema.get("properties", {}).items()}]
    raise AssertionError(schema)


def beyond(schema: Schema) -> list[Any]:
    """Values just outside."""
    if "anyOf" in schema:
        return [value for each in schema["anyOf"] for value in beyond(each) if value not in ([], "", [[]])]
    if "enum" in schema:
        return ["another"]
    match schema["type"]:
        case "integer" | "number":
            return [schema["minimum"] - 1, schema["maximum"] + 1, "1", True]
        case "string":
            shorter = ["a" * (schema["minLength"] - 1)] if schema["minLength"] else []
            return [*shorter, "a" * (schema["maxLength"] + 1), 1]
        case "boolean":
            return [1, "true"]
        case "array":
            return [[within(schema["items"])[0]] * (schema["maxItems"] + 1), {}]
        case "object":
            return [{"no_such_field": 1}, []]
    raise AssertionError(schema)


PARAMETERS = [(kind, name) for kind, (schema, _) in PARSERS.items() for name in sorted(schema["properties"])]


@pytest.mark.parametrize("kind, name", PARAMETERS)
def test_what_is_described_is_what_is_taken(kind: str, name: str) -> None:
    schema, parse = PARSERS[kind]
    for value in within(schema["properties"][name]):
        document = {**BASES[kind], name: value}
        if not document["stream"]:
            del document["stream_options"]
        parse(json.dumps(document).encode(), lambda: 0)
    for value in beyond(schema["properties"][name]):
        with pytest.raises(Refusal):
            parse(json.dumps({**BASES[kind], name: value}).encode(), lambda: 0)


@pytest.mark.parametrize("kind", PARSERS)
def test_what_is_required_is_required(kind: str) -> None:
    schema, parse = PARSERS[kind]
    for name in schema["properties"]:
        document = {each: value for each, value in BASES[kind].items() if each != name}
        if name in schema["required"]:
            with pytest.raises(Refusal, match="is missing"):
                parse(json.dumps(document).encode(), lambda: 0)


async def test_the_document_names_the_model(autojump_clock: trio.testing.MockClock) -> None:
    toy = ToyGateway()
    for standing, named in ((toy.swarm.now, {"demo", MODEL.digest}), (Standing(None, None), None)):
        toy.swarm.now = standing
        async with connected(toy.server) as client:
            document = (await client.ask("GET", "/openapi.json")).document
        posted = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
        enumerated = posted["schema"]["properties"]["model"].get("enum")
        assert (set(enumerated) if enumerated else None) == named
