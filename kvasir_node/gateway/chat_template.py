"""A conversation as the text that its model was trained on, by the model's own chat template.

The template is a stranger's program, so it runs in a confined child process (`template_child`) that is asked
for one text at a time. Decides who is to blame for what comes of that: whoever wrote the messages, the
template, or a machine with too much to do. Nothing that the child says is trusted beyond its length.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from kvasir_node.confined_child import ChildLate, ChildLost, ConfinedChild
from kvasir_node.gateway.ports import CompletionRefused, ServedModel
from kvasir_node.gateway.refusal import Refusal
from kvasir_node.gateway.template_child import (
    ANSWER_BYTES_MAX,
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


class ChatTemplates:
    """The child process and whose turn it is."""

    def __init__(
        self, *, processor_time_s: int = PROCESSOR_TIME_S, timeout_s: float = RENDER_TIMEOUT_S
    ) -> None:
        self._child = ConfinedChild(
            "kvasir_node.gateway.template_child",
            [str(processor_time_s)],
            timeout_s=timeout_s,
            answer_bytes_max=ANSWER_BYTES_MAX,
        )

    async def end_when_idle(self, idle_s: float) -> None:
        """Until cancelled, end a child that has rendered nothing for so long; then the one there is."""
        await self._child.end_when_idle(idle_s)

    async def close(self) -> None:
        """End the child. Idempotent."""
        await self._child.close()

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
        try:
            return _prompt_in(await self._child.ask(body))
        except ChildLate as error:
            log.warning("template_late", reason=str(error))
            raise CompletionRefused("the chat template had no time to be rendered", "busy", 5.0) from None
        except ChildLost:
            log.warning("template_child_lost")
            raise _unusable("it takes too much memory or processor time for these messages") from None


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
