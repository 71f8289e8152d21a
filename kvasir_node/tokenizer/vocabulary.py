"""What has to be known of a model's vocabulary where no text is made into tokens: its tokens' bytes.

Decides how that travels from the child process that read it, and what is believed of it: the child has read a
stranger's file, so every count and length is checked again. A table of 260,000 tokens takes 3 MiB. How a text
becomes tokens is llama.cpp's matter (`vocabulary_reader`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import msgpack

from kvasir_proto.errors import ModelUnusable
from kvasir_proto.limits import END_TOKENS_MAX

TOKENS_MAX: Final = 4 << 20
"""As many texts as a GGUF header may have in one array."""
PIECE_BYTES_MAX: Final = 1 << 16
"""Of one token."""
PIECES_BYTES_MAX: Final = 64 << 20
"""Of all tokens: they come from a header that is no longer."""
MARK_LENGTH_MAX: Final = 4096
TEMPLATE_LENGTH_MAX: Final = 4 << 20
DESCRIPTION_BYTES_MAX: Final = PIECES_BYTES_MAX + 4 * TOKENS_MAX + 4 * TEMPLATE_LENGTH_MAX + (1 << 16)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model. ``ends`` has for each the place in ``pieces`` where its bytes end.

    ``first_text`` is what its texts begin with and ``last_text`` what they end with, as a template writes
    them; ``stop_token_ids`` every token that ends a text, at most `END_TOKENS_MAX` of them, in order.
    """

    ends: array[int]
    pieces: bytes
    first_text: str
    last_text: str
    stop_token_ids: tuple[int, ...]
    chat_template: str | None

    @property
    def n_tokens(self) -> int:
        """How many tokens there are."""
        return len(self.ends)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token stands for in a text; empty for control tokens and for those that there are not."""
        if not 0 <= token_id < len(self.ends):
            return b""
        begin = self.ends[token_id - 1] if token_id else 0
        return self.pieces[begin : self.ends[token_id]]

    def encode(self) -> bytes:
        """As it is told."""
        return bytes(
            msgpack.packb(
                [
                    self.ends.tobytes(),
                    self.pieces,
                    self.first_text,
                    self.last_text,
                    list(self.stop_token_ids),
                    self.chat_template,
                ]
            )
        )


def vocabulary_of(
    pieces: list[bytes],
    first_text: str,
    last_text: str,
    stop_token_ids: list[int],
    chat_template: str | None,
) -> Vocabulary:
    """The vocabulary whose tokens have these bytes, in order."""
    ends = array("I")
    end = 0
    for each in pieces:
        end += len(each)
        ends.append(end)
    stops = tuple(sorted(stop_token_ids)[:END_TOKENS_MAX])
    return Vocabulary(ends, b"".join(pieces), first_text, last_text, stops, chat_template)


def decoded_vocabulary(data: bytes) -> Vocabulary:
    """The vocabulary that `Vocabulary.encode` told. Raises `ModelUnusable` for anything else."""
    try:
        told = msgpack.unpackb(data, strict_map_key=True, max_ext_len=0, max_map_len=0)
    except ValueError:
        told = None
    match told:
        case [
            bytes(raw_ends),
            bytes(pieces),
            str(first_text),
            str(last_text),
            list(stop_token_ids),
            None | str() as chat_template,
        ] if len(raw_ends) % array("I").itemsize == 0:
            ends = array("I", raw_ends)
        case _:
            raise ModelUnusable("the model's vocabulary is told in a form that it cannot have")
    n_tokens = len(ends)
    is_possible = (
        n_tokens <= TOKENS_MAX
        and len(pieces) <= PIECES_BYTES_MAX
        and (ends[-1] if n_tokens else 0) == len(pieces)
        and all(begin <= end for begin, end in pairwise(ends))
        and max(len(first_text), len(last_text)) <= MARK_LENGTH_MAX
        and len(chat_template or "") <= TEMPLATE_LENGTH_MAX
        and len(stop_token_ids) <= END_TOKENS_MAX
        and all(type(each) is int and 0 <= each < n_tokens for each in stop_token_ids)
        and stop_token_ids == sorted(set(stop_token_ids))
    )
    if not is_possible:
        raise ModelUnusable("the model's vocabulary is told in a form that it cannot have")
    return Vocabulary(ends, pieces, first_text, last_text, tuple(stop_token_ids), chat_template)
