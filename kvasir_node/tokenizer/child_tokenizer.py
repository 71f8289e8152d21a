"""The gateway's tokenizer: asks the child process that has the vocabulary, and keeps its tokens' bytes.

Decides what becomes of a child that is late or lost (the text is refused, the next one has another child) and
that nothing it says is believed unchecked. Which file has the vocabulary is for whoever starts it to say; it
is told once, since a swarm has one model.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Final, NoReturn

from kvasir_node.confined_child import ChildLate, ChildLost, ConfinedChild
from kvasir_node.gateway.ports import CompletionRefused
from kvasir_node.telemetry import get_logger
from kvasir_node.tokenizer.tokenizer_child import (
    ANSWER_BYTES_MAX,
    DESCRIBE,
    PLAIN,
    PROCESSOR_TIME_S,
    REQUEST_BYTES_MAX,
    TEMPLATE,
    TOKENS,
    TOO_MANY,
    UNUSABLE,
    VOCABULARY,
    WRONG_CALL,
)
from kvasir_node.tokenizer.vocabulary import Vocabulary, decoded_vocabulary
from kvasir_proto.errors import ModelUnusable, NotReady, UsageError
from kvasir_proto.limits import as_sentence

log = get_logger()

ANSWER_TIMEOUT_S: Final = 30.0
"""From a text to its tokens, by the wall; with the start of a child and a vocabulary to load."""


class ChildTokenizer:
    """`gateway.ports.Tokenizer`, from `read` on; before it no text has tokens and no token bytes."""

    def __init__(
        self, *, processor_time_s: int = PROCESSOR_TIME_S, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._processor_time_s = processor_time_s
        self._timeout_s = timeout_s
        self._child: ConfinedChild | None = None
        self._vocabulary: Vocabulary | None = None

    @property
    def child(self) -> ConfinedChild | None:
        """What is asked."""
        return self._child

    async def read(self, path: Path, metadata_sha256: bytes) -> Vocabulary:
        """The vocabulary of a file that Kvasir wrote, whose metadata have this digest.

        Raises `ModelUnusable` where there is none in it, `NotReady` where a later attempt has a chance.
        """
        if self._child is not None:
            await self._child.close()
        self._child = ConfinedChild(
            "kvasir_node.tokenizer.tokenizer_child",
            [str(path), metadata_sha256.hex(), str(self._processor_time_s)],
            timeout_s=self._timeout_s,
            answer_bytes_max=ANSWER_BYTES_MAX,
            # numpy would have a thread and its memory for each processor.
            variables={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        try:
            answer = await self._child.ask(DESCRIBE)
        except (ChildLate, ChildLost) as error:
            raise NotReady(f"the model's vocabulary could not be read: {error}") from error
        if answer[:1] != VOCABULARY:
            _refuse(answer)
        self._vocabulary = decoded_vocabulary(answer[1:])
        return self._vocabulary

    async def end_when_idle(self, idle_s: float) -> None:
        """Until cancelled, end a child that had no text for so long; then the one there is. After `read`."""
        assert self._child is not None
        await self._child.end_when_idle(idle_s)

    async def tokens_of(self, text: str, *, is_template: bool) -> tuple[int, ...]:
        """See `Tokenizer`. Raises `UsageError` for a text that the model does not take, `CompletionRefused`
        where there is too much to do or the text has more tokens than any context.
        """
        vocabulary = self._vocabulary
        if self._child is None or vocabulary is None:
            raise NotReady("the model's vocabulary is not read yet")
        request = (TEMPLATE if is_template else PLAIN) + text.encode()
        if len(request) > REQUEST_BYTES_MAX:
            raise CompletionRefused("the text is longer than any context", "too_long")
        try:
            answer = await self._child.ask(request)
        except ChildLate as error:
            log.warning("tokenizer_late", reason=str(error))
            raise CompletionRefused("the tokenizer had no time for this text", "busy", 5.0) from None
        except ChildLost:
            log.warning("tokenizer_lost")
            raise CompletionRefused(
                "the tokenizer's process ended over this text", "not_ready", 5.0
            ) from None
        if answer[:1] != TOKENS or len(answer) % array("i").itemsize != 1:
            _refuse(answer)
        token_ids = tuple(array("i", answer[1:]))
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary.n_tokens:
            raise ModelUnusable("the tokenizer made a token that there is not")
        return token_ids

    def bytes_of(self, token_id: int) -> bytes:
        """See `Tokenizer`."""
        return b"" if self._vocabulary is None else self._vocabulary.bytes_of(token_id)


def _refuse(answer: bytes) -> NoReturn:
    """Raise what an answer means that is none."""
    kind, words = answer[:1], as_sentence(answer[1:2000].decode(errors="replace"))
    if kind == WRONG_CALL:
        raise UsageError(words)
    if kind == TOO_MANY:
        raise CompletionRefused(f"the text has {words[:20]} tokens, more than any context", "too_long")
    raise ModelUnusable(words if kind == UNUSABLE else "the tokenizer says what cannot be")
