"""Chat templates, the good and the hostile: in the sandbox, and in the child process that bounds it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from kvasir_node.gateway import template_child
from kvasir_node.gateway.chat_template import ChatTemplates
from kvasir_node.gateway.ports import CompletionRefused, ServedModel
from kvasir_node.gateway.refusal import Refusal
from kvasir_node.gateway.template_child import answer
from kvasir_node.gateway.text_requests import ChatMessage

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELLO = (ChatMessage("system", " Be brief. "), ChatMessage("user", "Grüße 😀"))
FOR_EVER = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"


def model(template: str | None) -> ServedModel:
    return ServedModel("demo", "ab" * 32, 0, 100, 10, (1,), template, "<s>", "</s>")


@asynccontextmanager
async def templates(**options: Any) -> AsyncIterator[ChatTemplates]:
    made = ChatTemplates(**options)
    try:
        yield made
    finally:
        await made.close()


def asked(template: str, **variables: Any) -> dict[str, str]:
    return answer({"template": template, "variables": variables, "now_s": 1_700_000_000}, {})


@pytest.mark.parametrize(
    "template, prompt",
    [
        ("{% if a %}\n  yes\n{% endif %}\nend\n", "  yes\nend"),
        ("{% for b in [1, 2, 3] %}{% if b == 2 %}{% break %}{% endif %}{{ b }}{% endfor %}", "1"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ {'q': '\"<é>'} | tojson }}", '{"q": "\\"<é>"}'),
        ("{{ strftime_now('%d %b %Y') }}", "14 Nov 2023"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "1"),
        ("{{ missing }}{% if tools is defined %}no{% endif %}", ""),
        # What the sandbox hides is nothing.
        ("{{ raise_exception.__globals__ }}{{ '{0.__class__}'.format(1) }}", ""),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('a') }}", "[a]"),
    ],
)
def test_templates_find_what_they_are_written_for(template: str, prompt: str) -> None:
    assert asked(template, a=True) == {"prompt": prompt}


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include '/etc/passwd' %}",
        "{% for a in range(1000000) %}{% endfor %}",
        "{% for a in range(3) %}{{ 'x' * 1000000 }}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ missing.field }}",
        "{% broken",
        "{{ '\\ud800' }}",
    ],
)
def test_what_a_template_must_not_do_is_its_failure(template: str) -> None:
    made = asked(template, messages=[{"role": "user"}])
    assert set(made) == {"failed"}
    json.dumps(made).encode()


def test_a_template_refuses_in_its_own_words() -> None:
    assert asked("{{ raise_exception('roles must alternate') }}") == {"refused": "roles must alternate"}


def test_who_breaks_out_of_the_sandbox_has_nothing_to_open() -> None:
    program = (
        "import socket\n"
        "from kvasir_node.confinement import confine\n"
        "confine(512 << 20)\n"
        "for attempt in (lambda: open('/'), lambda: socket.socket(), lambda: bytearray(600 << 20)):\n"
        "    try: attempt()\n"
        "    except (OSError, MemoryError) as error: print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["OSError", "OSError", "MemoryError"]


async def test_a_conversation_becomes_the_models_text_again_and_again() -> None:
    async with templates() as made:
        prompts = [await made.prompt_of(model(CHATML), HELLO, 0) for _ in range(2)]
    prompt = (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nGrüße 😀<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompts == [prompt, prompt]


async def test_what_takes_for_ever_is_ended_and_the_next_text_is_made() -> None:
    # No more than what is left of the first second; on a busy machine that is half a minute.
    async with templates(processor_time_s=0, timeout_s=300.0) as made:
        with pytest.raises(Refusal, match="too much memory or processor time"):
            await made.prompt_of(model("{{ 9 ** (9 ** 9) }}"), HELLO, 0)
        with pytest.raises(Refusal, match="MemoryError"):
            await made.prompt_of(model("{{ 'a' * (10 ** 10) }}"), HELLO, 0)
        assert await made.prompt_of(model("{{ messages[0].role }}"), HELLO, 0) == "system"


async def test_a_machine_with_too_much_to_do_is_not_the_templates_fault() -> None:
    async with templates(processor_time_s=60, timeout_s=0.3) as made:
        with pytest.raises(CompletionRefused) as refused:
            await made.prompt_of(model(FOR_EVER), HELLO, 0)
    assert refused.value.kind == "busy"


async def test_who_goes_away_leaves_no_child_in_the_middle_of_a_text() -> None:
    async with templates(processor_time_s=60) as made:
        await made.prompt_of(model("warm"), HELLO, 0)
        child = made._child.process
        assert child is not None
        with trio.move_on_after(0.05):
            await made.prompt_of(model(FOR_EVER), HELLO, 0)
        assert child.returncode is not None
        assert await made.prompt_of(model("{{ messages[1].content }}"), HELLO, 0) == "Grüße 😀"


async def test_a_child_knows_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "secret")
    async with templates() as made:
        await made.prompt_of(model("x"), HELLO, 0)
        assert made._child.process is not None
        environment = await trio.Path(f"/proc/{made._child.process.pid}/environ").read_bytes()
    assert b"secret" not in environment


async def test_a_model_without_a_template_says_so() -> None:
    async with templates() as made:
        with pytest.raises(Refusal, match="no chat template"):
            await made.prompt_of(model(None), HELLO, 0)


@pytest.mark.parametrize("said", [b"", b"\xff\xff\xff\xff", b"\2\0\0\0{}", b"\1\0\0\0{", b"\1\0\0\0\xff"])
async def test_nothing_that_a_child_says_is_trusted(said: bytes) -> None:
    async with templates() as made:
        made._child.command = [sys.executable, "-c", f"import os; os.write(1, {said!r}); os.read(0, 9)"]
        with pytest.raises(Refusal, match="chat template cannot be used"):
            await made.prompt_of(model("x"), HELLO, 0)


async def test_nobody_waits_for_more_than_an_answer_can_have() -> None:
    async with templates(timeout_s=30.0) as made:
        made._child.command = [
            sys.executable,
            "-c",
            "import os, time; os.write(1, b'\\xff' * 4); time.sleep(60)",
        ]
        with pytest.raises(Refusal, match="chat template cannot be used"):
            await made.prompt_of(model("x"), HELLO, 0)


def test_every_limit_is_below_what_its_reader_takes() -> None:
    assert template_child.PROMPT_LENGTH_MAX * 4 < template_child.ANSWER_BYTES_MAX
