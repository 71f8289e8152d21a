"""Held-out text and cloze items for `kvasir-node measure task`, cut from the held-out side of the corpus.

Decides which passages are taken and how an item is made: a passage up to the last word of a sentence, that
word, and three others that end sentences elsewhere in the held-out text about as often, so that frequency
alone does not tell. All four are words that the tokeniser has whole, so that one pass over the passage judges
them. Nothing of it was trained on: the split is `corpus.py`'s. It needs the standard library only, and knows
no model.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Protocol

SEED = 11
ITEMS = 640
CHOICES = 4
CONTEXT_WORDS = (24, 48)
WORD = re.compile(r"[a-z]{3,10}")
SOURCES = ("austen", "kjv", "mhcc", "web")
TEXT_BYTES = 96_000
PASSAGE_BYTES = 3_000

_SPACE = "\u0120"  # how byte-level tokenisers write a space
_SENTENCE = re.compile(r"[^.!?]*[.!?]")


class Document(Protocol):
    """What is read of a document of the corpus."""

    source: str
    text: str


def held_out_text(documents: Sequence[Document]) -> str:
    """The beginnings of held-out documents, one source after the other, cut at a sentence's end."""
    queues = {source: [each.text for each in documents if each.source == source] for source in SOURCES}
    passages: list[str] = []
    size_bytes = 0
    while size_bytes < TEXT_BYTES and any(queues.values()):
        for source in SOURCES:
            if queues[source]:
                passage = _whole_sentences(queues[source].pop(0)[:PASSAGE_BYTES])
                passages.append(passage)
                size_bytes += len(passage.encode())
    return "\n\n".join(passage for passage in passages if passage) + "\n"


def words_of(tokenizer_path: Path) -> frozenset[str]:
    """The words that a tokeniser's file has as one token, with the space before them."""
    vocabulary = json.loads(tokenizer_path.read_text(encoding="utf-8"))["model"]["vocab"]
    return frozenset(entry[1:] for entry in vocabulary if entry.startswith(_SPACE))


def cloze_items(
    documents: Sequence[Document], words: Container[str], seed: int = SEED
) -> list[dict[str, object]]:
    """Items {"source", "context", "choices", "answer"}; `answer` is the place of the right word.

    At most one item a paragraph. The right word and the wrong ones are among ``words`` and in lower case, and
    none of the wrong ones stands in the context.
    """
    draws = random.Random(seed)
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for document in documents:
        if document.source in SOURCES:
            for paragraph in document.text.split("\n"):
                if item := _context_and_word(paragraph, words, draws):
                    found[document.source].append(item)
    counts = Counter(word for items in found.values() for _, word in items)
    by_count = sorted(counts, key=lambda word: (-counts[word], word))
    rank = {word: index for index, word in enumerate(by_count)}
    made: list[dict[str, object]] = []
    for source in SOURCES:
        items = found[source]
        draws.shuffle(items)
        for context, word in items[: ITEMS // len(SOURCES)]:
            wrong = _neighbours(word, context, by_count, rank[word], draws)
            choices = [word, *wrong]
            draws.shuffle(choices)
            made.append(
                {"source": source, "context": context, "choices": choices, "answer": choices.index(word)}
            )
    return made


def write(
    documents: Sequence[Document], words: Container[str], text_path: Path, items_path: Path
) -> tuple[int, int]:
    """Both files; how many bytes of text and how many items."""
    text, items = held_out_text(documents), cloze_items(documents, words)
    text_path.write_text(text, encoding="utf-8")
    lines = (json.dumps(item, ensure_ascii=True) for item in items)
    items_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(text.encode()), len(items)


def _whole_sentences(text: str) -> str:
    end = max(text.rfind(mark) for mark in ".!?")
    return text[: end + 1].strip()


def _context_and_word(paragraph: str, known: Container[str], draws: random.Random) -> tuple[str, str] | None:
    """A passage of the paragraph up to the last word of one of its sentences, and that word."""
    ends = [match.end() for match in _SENTENCE.finditer(paragraph)]
    draws.shuffle(ends)
    for end in ends:
        words = paragraph[: end - 1].split()[-CONTEXT_WORDS[1] :]
        if len(words) >= CONTEXT_WORDS[0] and WORD.fullmatch(words[-1]) and words[-1] in known:
            return " ".join(words[:-1]), words[-1]
    return None


def _neighbours(
    word: str, context: str, by_count: Sequence[str], place: int, draws: random.Random
) -> list[str]:
    """Words that end sentences about as often, nearest in rank first drawn from, none of the context."""
    said = set(re.findall(r"[a-z]+", context.lower())) | {word}
    near = [each for each in by_count[max(0, place - 40) : place + 41] if each not in said]
    return draws.sample(near, CHOICES - 1)
