"""llama.cpp's tokeniser over the vocabulary of a file that Kvasir wrote, without its weights.

Decides that only such a file is opened whose header has the manifest's digest: llama.cpp trusts what it
opens. No tensor is read and no context made. The same calls as a backbone's engine makes (`backbone.trunk`),
so a text has the same tokens everywhere; a test compares them. Only the child process imports it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp

from kvasir_node.model.gguf_format import metadata_sha256
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_node.tokenizer.vocabulary import PIECE_BYTES_MAX, Vocabulary, vocabulary_of
from kvasir_proto.errors import ModelUnusable, UsageError

_CHAT_TEMPLATE = "tokenizer.chat_template"


class VocabularyReader:
    """The vocabulary of the file at ``path``, whose metadata must have the digest ``metadata``.

    Raises `ModelUnusable` for another file, and where llama.cpp refuses it.
    """

    def __init__(self, path: Path, metadata: bytes) -> None:
        gguf = read_gguf(path)
        if metadata_sha256(gguf.metadata) != metadata:
            raise ModelUnusable(f"{path} is damaged: its metadata are not the manifest's")
        self._template = _template_in(gguf.metadata.get(_CHAT_TEMPLATE))
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        self._model: Any = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise ModelUnusable("llama.cpp could not load the model's vocabulary")
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._has_tokenizer = llama_cpp.llama_vocab_type(self._vocabulary) != llama_cpp.LLAMA_VOCAB_TYPE_NONE

    def described(self) -> Vocabulary:
        """What `Vocabulary` says; without a tokenizer tokens have no bytes and none ends a text."""
        n_tokens = int(llama_cpp.llama_vocab_n_tokens(self._vocabulary))
        if not self._has_tokenizer:
            return vocabulary_of([b""] * n_tokens, "", "", [], self._template)
        return vocabulary_of(
            [self._piece(token, special=False) for token in range(n_tokens)],
            self._mark(llama_cpp.llama_vocab_bos(self._vocabulary)),
            self._mark(llama_cpp.llama_vocab_eos(self._vocabulary)),
            [each for each in range(n_tokens) if llama_cpp.llama_vocab_is_eog(self._vocabulary, each)],
            self._template,
        )

    def tokens_of(self, text: bytes, *, is_template: bool) -> list[int]:
        """See `gateway.ports.Tokenizer`. Raises `UsageError` without a tokenizer, and for what it refuses."""
        if not self._has_tokenizer:
            raise UsageError("this model has no tokenizer: give token ids")
        capacity = len(text) + 8
        tokens = (llama_cpp.llama_token * capacity)()
        count = llama_cpp.llama_tokenize(
            self._vocabulary, text, len(text), tokens, capacity, not is_template, is_template
        )
        if count < 0:
            raise UsageError("the model's tokenizer does not take this text")
        return list(tokens[:count])

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(512)
        count = llama_cpp.llama_token_to_piece(self._vocabulary, token, buffer, len(buffer), 0, special)
        if -PIECE_BYTES_MAX <= count < -len(buffer):
            buffer = ctypes.create_string_buffer(-count)
            count = llama_cpp.llama_token_to_piece(self._vocabulary, token, buffer, len(buffer), 0, special)
        return buffer.raw[: max(0, int(count))]

    def _mark(self, token: int) -> str:
        return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""


def _template_in(entry: Any) -> str | None:
    try:
        return None if entry is None else str(entry.text())
    except ValueError:  # no text, or not UTF-8: a template that nobody can render
        return None
