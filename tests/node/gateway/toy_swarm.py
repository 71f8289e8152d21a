"""A swarm without a model: what it says is written down beforehand, and when."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import trio

from kvasir_node.gateway.chat_template import ChatTemplates
from kvasir_node.gateway.doors import Doors
from kvasir_node.gateway.gateway import Gateway
from kvasir_node.gateway.gateway_metrics import GatewayMetrics
from kvasir_node.gateway.http_server import HttpServer
from kvasir_node.gateway.ports import (
    CompletionRefused,
    FinishReason,
    GeneratedToken,
    Provenance,
    ServedModel,
    Standing,
    Tokenizer,
    TokenRequest,
)
from kvasir_node.gateway.text_requests import ChatMessage
from kvasir_proto.errors import KvasirError
from tests.node.gateway.toy_status import six

END = 256
"""The token that ends a text; each one before is a byte."""

MODEL = ServedModel("demo", "ab" * 32, 1_700_000_000, 64, 257, (END,), "{{ messages }}", "", "")
PROVENANCE = Provenance("cd" * 32, 2, 7, "verified")


class BytesTokenizer:
    """A byte a token."""

    async def tokens_of(self, text: str, *, is_template: bool) -> tuple[int, ...]:
        return tuple(text.encode())

    def bytes_of(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END else b""


@dataclass
class Script:
    """What a session gives: tokens, each after so many seconds, and then its end."""

    text: bytes = b"Hello"
    interval_s: float = 0.0
    opens_s: float = 0.0
    first_s: float = 0.0
    finish: FinishReason = "stop"
    error: KvasirError | None = None
    """Raised after the text, instead of an end."""
    refusal: CompletionRefused | None = None


@dataclass
class ScriptedCompletions:
    """Sessions by the script; remembers what was asked for, and when sessions were let go of."""

    script: Script = field(default_factory=Script)
    requests: list[TokenRequest] = field(default_factory=list)
    left_at: list[float] = field(default_factory=list)
    next_left: trio.Event = field(default_factory=trio.Event)
    """Set when a session is let go of, and another one from then on."""

    @contextlib.asynccontextmanager
    async def open(self, request: TokenRequest) -> AsyncIterator[AsyncIterator[GeneratedToken]]:
        await trio.lowlevel.checkpoint()
        if self.script.refusal is not None:
            raise self.script.refusal
        await trio.sleep(self.script.opens_s)
        self.requests.append(request)
        try:
            async with contextlib.aclosing(self._tokens(request)) as tokens:
                yield tokens
        finally:
            self.left_at.append(trio.current_time())
            self.next_left.set()
            self.next_left = trio.Event()

    async def _tokens(self, request: TokenRequest) -> AsyncGenerator[GeneratedToken, None]:
        script = self.script
        await trio.sleep(script.first_s)
        data = script.text[: request.n_tokens_max]
        for index, byte in enumerate(data):
            is_last = index == len(data) - 1 and len(data) == request.n_tokens_max
            is_last = is_last or (index == len(data) - 1 and script.finish == "length" and not script.error)
            top = tuple((each, -float(each)) for each in (byte, 255, END)[: request.n_top])
            yield GeneratedToken(byte, -0.5, top, "length" if is_last else None)
            if is_last:
                return
            await trio.sleep(script.interval_s)
        if script.error is not None:
            raise script.error
        yield GeneratedToken(END, -0.25, (), "stop")


@dataclass
class ToySwarm:
    """How things stand, as the test says."""

    now: Standing = field(default_factory=lambda: Standing(MODEL, PROVENANCE))

    said: Mapping[str, Any] = field(default_factory=six)
    n_asked: int = 0
    """How often it was asked for its status."""

    def standing(self) -> Standing:
        return self.now

    def status(self) -> Mapping[str, Any]:
        self.n_asked += 1
        return self.said


class PlainTemplates(ChatTemplates):
    """No child process: what was said, line by line."""

    async def prompt_of(self, model: ServedModel, messages: Sequence[ChatMessage], now_s: int) -> str:
        return "\n".join(f"{each.role}: {each.content}" for each in messages)


class ToyGateway:
    """A gateway and all that it stands on."""

    def __init__(
        self,
        script: Script | None = None,
        doors: Doors | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.swarm = ToySwarm()
        self.completions = ScriptedCompletions(script or Script())
        self.metrics = GatewayMetrics()
        self.gateway = Gateway(
            self.swarm,
            self.completions,
            tokenizer or BytesTokenizer(),
            PlainTemplates(),
            doors or Doors("127.0.0.1"),
            self.metrics,
            wall_time=lambda: 1_800_000_000,
            entropy=lambda count: bytes(range(count)),
        )
        self.server = HttpServer(self.gateway, wall_time=lambda: 0)
