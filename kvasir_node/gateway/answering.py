"""One session's tokens as the text of one answer, whether it is sent in pieces or at once.

Decides when an answer is over (a stop string, the model's own end, the length) and what is told of each
token. How an answer looks is its shape's matter, and how it travels its receiver's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import trio

from kvasir_node.gateway.answer_shapes import TokenTold
from kvasir_node.gateway.ending import Ending
from kvasir_node.gateway.gateway_metrics import GatewayMetrics
from kvasir_node.gateway.ports import FinishReason, GeneratedToken, Tokenizer
from kvasir_node.gateway.text_pieces import TextPiece, TextPieces
from kvasir_proto.errors import EngineFailed

SILENCE_S: Final = 600.0
"""How long a session may give no token, its place in a queue included."""

TellPiece = Callable[[str, tuple[TokenTold, ...]], Awaitable[None]]


class Answering:
    """The text of one answer. ``n_generated`` counts tokens, the one that ends a text included."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: tuple[str, ...],
        metrics: GatewayMetrics,
        ending: Ending,
        asked_at: float,
    ) -> None:
        self._tokenizer = tokenizer
        self._ending = ending
        self._pieces: TextPieces[TokenTold] = TextPieces(stop_strings)
        self._metrics = metrics
        self._last_at = asked_at
        self.n_generated = 0

    async def run(self, tokens: AsyncIterator[GeneratedToken], tell: TellPiece) -> FinishReason:
        """Tell every piece of text there is, and why there is no more.

        Raises `KvasirError` for a session that failed, or a gateway that ends. After a stop string the
        session is still open.
        """
        while True:
            token = await self._next(tokens)
            if token.finish == "stop":
                await self._tell(self._pieces.end(), tell)
                return "stop"
            data = self._tokenizer.bytes_of(token.token_id)
            await self._tell(self._pieces.add(data, self._told(token, data)), tell)
            if self._pieces.is_stopped:
                return "stop"
            if token.finish == "length":
                await self._tell(self._pieces.end(), tell)
                return "length"

    async def _next(self, tokens: AsyncIterator[GeneratedToken]) -> GeneratedToken:
        with self._ending.cuts(), trio.move_on_after(SILENCE_S) as waiting:
            token = await anext(tokens, None)
        if waiting.cancelled_caught:
            raise EngineFailed(f"the session gave no token for {SILENCE_S:g} s")
        if token is None:
            raise EngineFailed("the session ended and did not say why")
        now = trio.current_time()
        times = self._metrics.next_token_s if self.n_generated else self._metrics.first_token_s
        times.observe(now - self._last_at)
        self._last_at = now
        self._metrics.generated_tokens.inc()
        self.n_generated += 1
        return token

    def _told(self, token: GeneratedToken, data: bytes) -> TokenTold:
        top = tuple((self._tokenizer.bytes_of(each), value) for each, value in token.top)
        return TokenTold(data, token.log_probability, top)

    async def _tell(self, piece: TextPiece[TokenTold], tell: TellPiece) -> None:
        if piece.text or piece.tags:
            await tell(piece.text, piece.tags)
