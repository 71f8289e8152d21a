"""A child process with a model's vocabulary, so that the control process never has llama.cpp in it.

What a text does to a tokeniser that was made for honest ones costs this process: it is confined
(`kvasir_node.confinement`) once the vocabulary is loaded. The first byte of a request says what is wanted:
`DESCRIBE`, or the tokens of the UTF-8 that follows, as `PLAIN` or as `TEMPLATE`. The first byte of an answer
says what it is: `VOCABULARY`, `TOKENS` (32 bits each, as this machine has them), `TOO_MANY`, or the words of
an error, `WRONG_CALL` or `UNUSABLE`. `child_tokenizer` is the other end.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvasir_node.confinement import answer_requests, confine
from kvasir_node.tokenizer.vocabulary import DESCRIPTION_BYTES_MAX
from kvasir_proto.errors import KvasirError, UsageError
from kvasir_proto.limits import CONTEXT_LENGTH_MAX, as_sentence

DESCRIBE, PLAIN, TEMPLATE = b"D", b"P", b"T"
VOCABULARY, TOKENS, TOO_MANY, WRONG_CALL, UNUSABLE = b"v", b"t", b"m", b"w", b"u"

REQUEST_BYTES_MAX: Final = 16 << 20
"""A prompt of the gateway has 2 Mi characters at most."""
ANSWER_BYTES_MAX: Final = 1 + max(DESCRIPTION_BYTES_MAX, 4 * CONTEXT_LENGTH_MAX)
PROCESSOR_TIME_S: Final = 20
"""For one text, or up to a second more; 2 Mi characters take a tenth of that."""
MEMORY_BYTES: Final = 2 << 30
"""On top of what the vocabulary and the libraries take."""


def answered(call: Callable[[], bytes]) -> bytes:
    """What a call gives, or its error as an answer."""
    try:
        return call()
    except UsageError as error:
        return WRONG_CALL + as_sentence(str(error)).encode()
    except (KvasirError, MemoryError) as error:
        return UNUSABLE + as_sentence(str(error) or "there is not enough memory").encode()


def _main() -> None:
    path, metadata, processor_time_s = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])
    # Whatever a library prints is no answer.
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    from kvasir_node.tokenizer.vocabulary_reader import VocabularyReader

    made: list[VocabularyReader] = []

    def load() -> bytes:
        made.append(VocabularyReader(path, metadata))
        return b""

    why_not = answered(load)

    def answer(request: bytes) -> bytes:
        if not made:
            return why_not
        reader = made[0]
        if request[:1] == DESCRIBE:
            return answered(lambda: VOCABULARY + reader.described().encode())
        return answered(lambda: _tokens(reader.tokens_of(request[1:], is_template=request[:1] == TEMPLATE)))

    confine(_memory_in_use_bytes() + MEMORY_BYTES)
    answer_requests(sys.stdin.buffer, sink, answer, REQUEST_BYTES_MAX, processor_time_s)


def _tokens(token_ids: list[int]) -> bytes:
    if len(token_ids) > CONTEXT_LENGTH_MAX:
        return TOO_MANY + str(len(token_ids)).encode()
    return TOKENS + array("i", token_ids).tobytes()


def _memory_in_use_bytes() -> int:
    """Addresses that this process uses, libraries included."""
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    _main()
