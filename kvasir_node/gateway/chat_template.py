"""A conversation as the text that its model was trained on, by the model's own chat template.

The template is a stranger's program, so it runs in a child process (`template_child`) that is asked over a
pipe, one text at a time. Decides what becomes of a child that is late, dies or talks nonsense (it is killed,
and the next text has another one), and who is to blame: whoever wrote the messages, the template, or a
machine with too much to do. A child is started when it is first needed and stays; nothing that it says is
trusted beyond its length.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

import trio

from kvasir_node.gateway.ports import CompletionRefused, ServedModel
from kvasir_node.gateway.refusal import Refusal
from kvasir_node.gateway.template_child import (
    ANSWER_BYTES_MAX,
    LENGTH,
    PROCESSOR_TIME_S,
    PROMPT_LENGTH_MAX,
    REQUEST_BYTES_MAX,
)
from kvasir_node.gateway.text_requests import ChatMessage
from kvasir_node.telemetry import get_logger

log = get_logger()

RENDER_TIMEOUT_S: Final = 15.0
"""From the request to the whole answer, the start of a child included. By the wall, so that it tells of the
machine: what a template takes of the processor is bounded in the child."""

TURN_TIMEOUT_S: Final = 10.0
"""How long a text waits for those before it."""

END_TIMEOUT_S: Final = 2.0

_INHERITED: Final = ("PATH", "PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "HOME", "LANG")
"""Variables that a Python may need to start; no other one is a template's business."""


class ChatTemplates:
    """The child process and whose turn it is."""

    def __init__(
        self, *, processor_time_s: int = PROCESSOR_TIME_S, timeout_s: float = RENDER_TIMEOUT_S
    ) -> None:
        self._command = [
            sys.executable, "-P", "-m", "kvasir_node.gateway.template_child", str(processor_time_s)
        ]  # fmt: skip
        self._timeout_s = timeout_s
        self._turn = trio.Lock()
        self._child: trio.Process | None = None

    async def prompt_of(self, model: ServedModel, messages: Sequence[ChatMessage], now_s: int) -> str:
        """The text that asks for the next message. ``now_s`` is Unix time, for templates that say the date.

        Raises `Refusal` where the messages or the template are to blame, and `CompletionRefused` where there
        is too much to do.
        """
        if model.chat_template is None:
            raise Refusal(
                400,
                "this model has no chat template; /v1/completions takes plain text",
                code="chat_template_missing",
            )
        variables = {
            "messages": [_as_templates_know_it(each) for each in messages],
            "add_generation_prompt": True,
            "bos_token": model.first_text,
            "eos_token": model.last_text,
            "tools": None,
            "documents": None,
        }
        request = {"template": model.chat_template, "variables": variables, "now_s": now_s}
        body = json.dumps(request, ensure_ascii=False).encode()
        if len(body) > REQUEST_BYTES_MAX:
            raise Refusal(400, "the messages and the chat template are too long", parameter="messages")
        with trio.move_on_after(TURN_TIMEOUT_S) as waiting:
            await self._turn.acquire()
        if waiting.cancelled_caught:
            raise CompletionRefused("too many conversations wait for the chat template", "busy")
        try:
            return _prompt_in(await self._ask(body))
        finally:
            self._turn.release()

    async def close(self) -> None:
        """End the child. Idempotent."""
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        with trio.move_on_after(END_TIMEOUT_S, shield=True):
            assert child.stdin is not None
            assert child.stdout is not None
            await trio.aclose_forcefully(child.stdin)
            await trio.aclose_forcefully(child.stdout)
            await child.wait()

    async def _ask(self, body: bytes) -> bytes:
        """What the child answers. Where anything goes wrong, and also when cancelled, it has been killed."""
        try:
            with trio.fail_after(self._timeout_s):
                if self._child is None:
                    self._child = await self._started()
                child = self._child
                assert child.stdin is not None
                assert child.stdout is not None
                await child.stdin.send_all(LENGTH.pack(len(body)) + body)
                (length,) = LENGTH.unpack(await _read(child.stdout, LENGTH.size))
                if length > ANSWER_BYTES_MAX:
                    raise EOFError
                return await _read(child.stdout, length)
        except trio.TooSlowError:
            await self.close()
            log.warning("template_late", timeout_s=self._timeout_s)
            raise CompletionRefused("the chat template had no time to be rendered", "busy", 5.0) from None
        except (EOFError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self.close()
            log.warning("template_child_lost")
            raise _unusable("it takes too much memory or processor time for these messages") from None
        except BaseException:
            await self.close()
            raise

    async def _started(self) -> trio.Process:
        # Its own session: an interrupt at the terminal is for us. What it complains of could be a prompt.
        return await trio.lowlevel.open_process(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
            cwd="/",
            start_new_session=True,
        )


async def _read(stream: trio.abc.ReceiveStream, count: int) -> bytes:
    """Exactly so many bytes. Raises `EOFError` when the stream ends before."""
    parts: list[bytes] = []
    while count:
        part = await stream.receive_some(min(count, 1 << 16))
        if not part:
            raise EOFError
        parts.append(bytes(part))
        count -= len(part)
    return b"".join(parts)


def _prompt_in(body: bytes) -> str:
    """What an answer means. Raises `Refusal`."""
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    match answer:
        case {"prompt": str(prompt)} if len(prompt) <= PROMPT_LENGTH_MAX:
            return prompt
        case {"refused": str(words)}:
            raise Refusal(
                400,
                f"the model's chat template refuses: {words}",
                parameter="messages",
                code="refused_by_template",
            )
        case {"failed": str(words)}:
            raise _unusable(words)
        case _:
            raise _unusable("its process says what cannot be")


def _unusable(why: str) -> Refusal:
    return Refusal(
        400,
        f"the model's chat template cannot be used: {why}; /v1/completions takes plain text",
        code="chat_template_unusable",
    )


def _as_templates_know_it(message: ChatMessage) -> dict[str, Any]:
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **named}
