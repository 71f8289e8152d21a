"""The byte-level BPE tokeniser, and the corpus as two flat arrays of token ids.

Decides the vocabulary and how documents are laid end to end. Trained on the training documents
only. The pre-tokeniser's pattern is the one llama.cpp calls `gpt-2`; llama.cpp must give the same
ids, and verify.py checks that it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from corpus import Document
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


@dataclass(frozen=True)
class TokenArray:
    """Documents end to end.

    `ids` is uint16 [n]: each document is the end-of-text token and then its own tokens; one more
    end-of-text token closes the array. `starts` is int64 [documents], where each document begins.
    """

    ids: NDArray[np.uint16]
    starts: NDArray[np.int64]

    def save(self, path: Path) -> None:
        np.savez(path, ids=self.ids, starts=self.starts)

    @classmethod
    def load(cls, path: Path) -> TokenArray:
        with np.load(path) as stored:
            return cls(stored["ids"], stored["starts"])


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A tokeniser of `VOCABULARY` entries: end-of-text, the 256 byte letters, then merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} entries, not {VOCABULARY}")
    return tokenizer


def tokenize(tokenizer: Tokenizer, documents: Sequence[Document]) -> TokenArray:
    """The documents as one array of token ids."""
    ids: list[int] = []
    starts: list[int] = []
    for encoding in tokenizer.encode_batch([document.text for document in documents]):
        starts.append(len(ids))
        ids.append(END_OF_TEXT_ID)
        ids.extend(encoding.ids)
    ids.append(END_OF_TEXT_ID)
    return TokenArray(np.array(ids, dtype=np.uint16), np.array(starts, dtype=np.int64))
