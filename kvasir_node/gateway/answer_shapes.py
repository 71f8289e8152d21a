"""What an answer looks like: OpenAI's objects for chats and completions, whole and in pieces.

Pure: everything that an answer says of itself (its id, its time) is an argument.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvasir_node.gateway.ports import FinishReason, ServedModel

LOG_PROBABILITY_MIN: Final = -9999.0
"""JSON has no infinity; OpenAI's word for what cannot be."""


@dataclass(frozen=True, slots=True)
class TokenTold:
    """One token as a client sees it. ``top`` has the likeliest ones, each with its bytes."""

    data: bytes
    log_probability: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a request took."""

    n_prompt: int
    n_generated: int

    def document(self) -> dict[str, int]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_generated,
            "total_tokens": self.n_prompt + self.n_generated,
        }


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What all objects of one answer have in common."""

    name: str
    created: int
    model: ServedModel

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object of this kind."""
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"kvasir-{self.model.digest[:16]}",
            "choices": choices,
        }


class AnswerShape(Protocol):
    """One endpoint's objects. ``told`` is None where no log-probabilities were asked for."""

    prefix: str
    """What an answer's id begins with."""
    kind: str
    kind_of_pieces: str

    def whole(self, text: str, told: Sequence[TokenTold] | None, finish: FinishReason) -> dict[str, Any]:
        """The choice of an answer that comes at once."""

    def opening(self) -> dict[str, Any] | None:
        """The choice before any text, if there is one."""

    def piece(self, text: str, told: Sequence[TokenTold] | None) -> dict[str, Any]:
        """The choice of one piece of text."""

    def closing(self, finish: FinishReason) -> dict[str, Any]:
        """The last choice, and the only one with a reason."""


class ChatShape:
    """`/v1/chat/completions`."""

    prefix = "chatcmpl-"
    kind = "chat.completion"
    kind_of_pieces = "chat.completion.chunk"

    def whole(self, text: str, told: Sequence[TokenTold] | None, finish: FinishReason) -> dict[str, Any]:
        """See `AnswerShape`."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": _of_chat(told), "finish_reason": finish}

    def opening(self) -> dict[str, Any] | None:
        """See `AnswerShape`."""
        return _delta({"role": "assistant", "content": ""}, None, None)

    def piece(self, text: str, told: Sequence[TokenTold] | None) -> dict[str, Any]:
        """See `AnswerShape`."""
        return _delta({"content": text}, told, None)

    def closing(self, finish: FinishReason) -> dict[str, Any]:
        """See `AnswerShape`."""
        return _delta({}, None, finish)


class CompletionShape:
    """`/v1/completions`. Of one answer only: it counts where each token begins."""

    prefix = "cmpl-"
    kind = "text_completion"
    kind_of_pieces = "text_completion"

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def whole(self, text: str, told: Sequence[TokenTold] | None, finish: FinishReason) -> dict[str, Any]:
        """See `AnswerShape`."""
        return {"index": 0, "text": text, "logprobs": self._of_completion(told), "finish_reason": finish}

    def opening(self) -> dict[str, Any] | None:
        """See `AnswerShape`."""
        return None

    def piece(self, text: str, told: Sequence[TokenTold] | None) -> dict[str, Any]:
        """See `AnswerShape`."""
        return {"index": 0, "text": text, "logprobs": self._of_completion(told), "finish_reason": None}

    def closing(self, finish: FinishReason) -> dict[str, Any]:
        """See `AnswerShape`."""
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": finish}

    def _of_completion(self, told: Sequence[TokenTold] | None) -> dict[str, Any] | None:
        if told is None:
            return None
        offsets = []
        for each in told:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(each.data))
        return {
            "tokens": [_as_text(each.data) for each in told],
            "token_logprobs": [_finite(each.log_probability) for each in told],
            # Likeliest first, and of two that read alike the likelier one.
            "top_logprobs": [
                {_as_text(data): _finite(value) for data, value in reversed(each.top)} for each in told
            ],
            "text_offset": offsets,
        }


def _delta(
    delta: dict[str, Any], told: Sequence[TokenTold] | None, finish: FinishReason | None
) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": _of_chat(told), "finish_reason": finish}


def _of_chat(told: Sequence[TokenTold] | None) -> dict[str, Any] | None:
    if told is None:
        return None
    content = [
        {
            **_entry(each.data, each.log_probability),
            "top_logprobs": [_entry(data, value) for data, value in each.top],
        }
        for each in told
    ]
    return {"content": content, "refusal": None}


def _entry(data: bytes, log_probability: float) -> dict[str, Any]:
    return {"token": _as_text(data), "logprob": _finite(log_probability), "bytes": list(data)}


def _as_text(data: bytes) -> str:
    """A token's text; where it is no text by itself, its bytes as OpenAI writes them."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{each:02x}" for each in data)


def _finite(log_probability: float) -> float:
    return max(log_probability, LOG_PROBABILITY_MIN)
