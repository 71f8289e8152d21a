"""The official `openai` client, as anybody installs it: against a scripted swarm, and against real daemons.

What the gateway makes of tokens is tried on a swarm that says what was written down; that real tokens come
through, and go on coming as they should, on a founder and a worker that serve the demo model with a chat
template.
"""

from __future__ import annotations

import concurrent.futures
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trio

from kvasir_node.model.gguf_format import text_entry
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.model.gguf_writer import lay_out
from kvasir_node.model.store import DEMO_MODEL
from tests.loopback.daemons import Daemon, kvasir, wait_for
from tests.loopback.free_port import free_port
from tests.node.gateway.toy_swarm import MODEL, Script, ToyGateway

pytestmark = pytest.mark.loopback

TEXT = "Grüße, one two three! 😀"
HELLO: list[Any] = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }} {% endfor %}"


def client_at(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60.0)


def streamed(events: Any) -> tuple[str, list[str | None]]:
    """The text of a stream, and every choice's finish reason."""
    text, finishes = "", []
    for event in events:
        for choice in event.choices:
            text += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
            finishes.append(choice.finish_reason)
    return text, finishes


def refused(call: Callable[[], object], kind: type[openai.APIStatusError], parameter: str | None) -> None:
    with pytest.raises(kind) as error:
        call()
    assert error.value.param == parameter
    assert parameter is None or parameter in error.value.message


CHAT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"seed": -1, "temperature": 0.7},
    {"top_p": 0.5, "extra_body": {"top_k": 5, "min_p": 0.1}},
    {"presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 1}},
    {"max_tokens": 50, "n": 1, "user": "ann"},
    {"max_completion_tokens": 50, "logprobs": True, "top_logprobs": 2},
    {"stop": ["zzz"]},
]
TEXT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 100, "logprobs": 2},
    {"max_tokens": 100, "seed": 3, "stop": "zzz"},
]


def drive_scripted(address: str) -> int:
    """Everything that one client can ask; how many requests that were."""
    client = client_at(address)
    n_calls = 0

    def chat(**options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return client.chat.completions.create(**{"model": "demo", "messages": HELLO} | options)

    def complete(**options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return client.completions.create(**{"model": "demo", "prompt": "Hi"} | options)

    assert [each.id for each in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    for options in CHAT_OPTIONS:
        answer = chat(**options).choices[0]
        assert (answer.message.content, answer.finish_reason) == (TEXT, "stop"), options
        text, finishes = streamed(chat(stream=True, **options))
        assert (text, finishes[-1], set(finishes[:-1])) == (TEXT, "stop", {None}), options
    for options in TEXT_OPTIONS:
        answer = complete(**options).choices[0]
        assert TEXT.startswith(answer.text)
        assert answer.text
        assert answer.finish_reason == ("stop" if options else "length")
        assert streamed(complete(stream=True, **options))[0] == answer.text
    for stop in (" two", ["nope", " tw", "one two"]):
        assert chat(stop=stop).choices[0].message.content in ("Grüße, one", "Grüße, ")
        assert "tw" not in streamed(chat(stop=stop, stream=True))[0]
    told = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert (told[0].token, len(told[0].top_logprobs)) == ("G", 3)
    *_, last = chat(stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage.completion_tokens) == ([], len(TEXT.encode()) + 1)
    said = chat().choices[0].message
    again = chat(messages=[*HELLO, said, {"role": "user", "content": [{"type": "text", "text": "more"}]}])
    assert again.choices[0].message.content == TEXT
    with client.chat.completions.stream(model="demo", messages=HELLO) as stream:
        assert sum(1 for _ in stream) > 3
        assert stream.get_final_completion().choices[0].message.content == TEXT
    raw = client.chat.completions.with_raw_response.create(model="demo", messages=HELLO)
    assert (raw.headers["kvasir-term"], raw.headers["kvasir-certificates"]) == ("7", "verified")
    refused(lambda: chat(model="other"), openai.NotFoundError, "model")
    refused(lambda: chat(n=2), openai.BadRequestError, "n")
    refused(
        lambda: chat(tools=[{"type": "function", "function": {"name": "f"}}]), openai.BadRequestError, "tools"
    )
    json_mode = {"type": "json_object"}
    refused(lambda: chat(response_format=json_mode), openai.BadRequestError, "response_format")
    refused(lambda: chat(messages=[]), openai.BadRequestError, "messages")
    refused(lambda: complete(prompt="a" * 200), openai.BadRequestError, "prompt")
    refused(lambda: complete(prompt=["a", "b"]), openai.BadRequestError, "prompt")
    refused(
        lambda: client.embeddings.create(model="demo", input="x"), openai.BadRequestError, "/v1/embeddings"
    )
    refused(lambda: client.responses.create(model="demo", input="x"), openai.BadRequestError, "/v1/responses")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: chat().choices[0].message.content, range(8)))
    assert answers == [TEXT] * 8
    return n_calls + 7


async def test_every_call_of_the_client_on_a_scripted_swarm() -> None:
    toy = ToyGateway(Script(TEXT.encode()))
    toy.swarm.now = replace(toy.swarm.now, model=replace(MODEL, context_tokens=150))
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(toy.server.serve, listeners)
        n_calls = await trio.to_thread.run_sync(drive_scripted, f"http://127.0.0.1:{port}")
        assert n_calls >= 50
        nursery.cancel_scope.cancel()


def demo_with_template(path: Path) -> Path:
    """The demo model, which has no chat template, with one."""
    gguf = read_gguf(DEMO_MODEL)
    metadata = (*gguf.metadata.values(), text_entry("tokenizer.chat_template", TEMPLATE))
    tensors = [(each.name, each.type, each.shape) for each in gguf.tensors]
    header, placed, _ = lay_out(metadata, tensors, gguf.alignment)
    data = DEMO_MODEL.read_bytes()
    with path.open("wb") as file:
        file.write(header)
        for old, new in zip(gguf.tensors, placed, strict=True):
            file.seek(new.offset)
            file.write(data[old.offset : old.offset + old.size_bytes])
        file.truncate(placed[-1].offset + -(-placed[-1].size_bytes // gguf.alignment) * gguf.alignment)
    return path


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[tuple[Daemon, str, str]]:
    """A founder that is the backbone, and where its gateway answers; a worker, and where that one does."""
    model = demo_with_template(tmp_path / "tiny-chat.gguf")
    home, port = tmp_path / "founder", free_port()
    subprocess.run(kvasir("--home", str(home), "init", "--found", "--model", str(model)), check=True)
    founder = Daemon(home, "--listen-port", str(port), "--gateway-port", "0")
    founder.has_gateway = "true"
    try:
        founder.start()
        node_id = founder.wait(lambda said: said["addresses"], "its address")["node_id"]
        worker = Daemon(
            tmp_path / "worker",
            *("--join", f"/ip4/127.0.0.1/tcp/{port}/p2p/{node_id}"),
            *("--ranks", "output,bulk", "--model", str(model)),
            *("--gateway-port", "0"),
        )
        worker.has_gateway = "true"
        try:
            worker.start()
            address = founder.wait(
                lambda said: said["state"] == "ready" and said["gateway"]["is_answering"], "ready", 180.0
            )["gateway"]["address"]
            other = worker.wait(lambda said: said["gateway"]["is_answering"], "its gateway")
            wait_for(lambda: is_ready(other["gateway"]["address"]), "the other gateway's readiness")
            yield founder, address, other["gateway"]["address"]
        finally:
            worker.end()
    finally:
        founder.end()


def is_ready(address: str) -> bool:
    return httpx.get(f"{address}/health/ready", timeout=60).status_code == 200


def test_the_client_on_real_daemons(serving: tuple[Daemon, str, str]) -> None:
    founder, address, other = serving
    client = client_at(address)
    (name,) = [each.id for each in client.models.list()]
    assert name == "tiny-chat"
    greedy: dict[str, Any] = {"model": name, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}

    first = client.completions.create(**greedy, logprobs=2)
    text = first.choices[0].text
    assert (len(text) > 10, first.choices[0].finish_reason) == (True, "length")
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (5, 12)
    told = first.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert "".join(told.tokens) == text
    assert streamed(client.completions.create(**greedy, stream=True)) == (text, [None] * 12 + ["length"])
    # The likeliest of one is the likeliest.
    assert (
        client.completions.create(**greedy | {"temperature": 2, "extra_body": {"top_k": 1}}).choices[0].text
        == text
    )
    assert client.completions.create(**greedy, stop=text[4:7]).choices[0].text == text[:4]
    drawn = {**greedy, "temperature": 1.5, "seed": 11}
    assert (
        client.completions.create(**drawn).choices[0].text
        == client.completions.create(**drawn).choices[0].text
    )
    forced = client.completions.create(**greedy, logit_bias={"3287": 100}, extra_body={"top_k": 1})
    assert forced.choices[0].text == "On" * 12
    ended = client.completions.create(**greedy, logit_bias={"0": 100})
    assert (ended.choices[0].text, ended.choices[0].finish_reason) == ("", "stop")

    chat = client.chat.completions.create(model=name, messages=HELLO, max_tokens=8, temperature=0)
    plain = client.completions.create(**greedy | {"prompt": [72, 73, 222], "max_tokens": 8})
    assert chat.usage is not None
    assert chat.choices[0].message.content
    assert plain.choices[0].text
    events = client.chat.completions.create(
        model=name, messages=HELLO, max_tokens=8, temperature=0, stream=True
    )
    assert streamed(events)[0] == chat.choices[0].message.content
    refused(
        lambda: client.completions.create(**greedy | {"prompt": "a" * 600}), openai.BadRequestError, "prompt"
    )

    # A node that is no backbone asks the one that is.
    elsewhere = client_at(other)
    assert elsewhere.completions.create(**greedy).choices[0].text == text
    assert streamed(elsewhere.completions.create(**greedy, stream=True))[0] == text

    # What the dashboard shows is what the command `status` says, but for an engine's counters.
    said, shown = founder.status(), httpx.get(f"{address}/status", timeout=60).json()
    assert said is not None
    assert shown["gateway"] == {
        "model": name,
        "has_chat_template": True,
        "obstacle": "",
        "answers_now": 0,
        "generated_tokens_total": shown["gateway"]["generated_tokens_total"],
    }
    assert shown["gateway"]["generated_tokens_total"] > 12
    assert set(shown["status"]) == set(said)
    for field in ("node_id", "state", "swarm", "backbone", "term", "ranks", "plan", "model"):
        assert shown["status"][field] == said[field], field
    assert [each["ranks"] for each in shown["status"]["members"]] == [["output", "bulk"]]
    assert [each["n_missing"] for each in shown["status"]["plan"]["coverage"]["layers"]] == [0] * 6
    assert "<title>Kvasir</title>" in httpx.get(address, timeout=60).text

    # Streams that are cut by a daemon that stops end, each with the reason.
    begun = threading.Barrier(5, timeout=60)

    def read_on(_: int) -> str:
        # Without the token that would end it: the daemon is to be the first to stop.
        options: dict[str, Any] = {"max_tokens": 100, "temperature": 1.5, "stream": True}
        options["logit_bias"] = {"0": -100}
        events = iter(client.completions.create(**greedy | options))
        next(events)
        begun.wait()
        with pytest.raises(openai.APIError) as error:
            for _ in events:
                pass
        return error.value.message

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        reasons = [pool.submit(read_on, number) for number in range(4)]
        begun.wait()
        founder.kill(signal.SIGTERM)
        assert {each.result(60) for each in reasons} == {"this node is stopping"}
    assert founder.wait_ended() == 0
