"""Level "task": what a difference costs, as perplexity on held-out text and as a cloze score.

Decides how an item is scored: the passage goes through once, and of four words the one whose tokens are most
likely behind it is the answer. Words of one token need no second pass. The texts come with the package and
were made by `deploy/demo-model/cloze.py`. It refuses to know kernels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvasir_node.measure.intervals import Z_95, Interval, mean_error, share_interval
from kvasir_node.small_file import read_small_file
from kvasir_proto.errors import UsageError

Float64Array = npt.NDArray[np.float64]

HELD_OUT_TEXT: Final = Path(__file__).parents[1] / "data" / "held-out.txt"
CLOZE_ITEMS: Final = Path(__file__).parents[1] / "data" / "cloze.jsonl"
_ITEMS_BYTES_MAX: Final = 16 << 20
_ITEMS_MAX: Final = 65536


@dataclass(frozen=True, slots=True)
class ClozeItem:
    """A passage without its last word, words of which one is right, and the place of that one."""

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class ClozeScore:
    """How many items were right, and how sure a model was: the mean probability of the right word among the
    choices.
    """

    items: int
    right: int
    share: float
    share_95: Interval
    mean_confidence: float


@dataclass(frozen=True, slots=True)
class ClozeComparison:
    """Two runs' scores. `delta` is run minus base, its interval from items that only one has right, or where
    there is none what that many items without one leave open; `answers_changed` counts those that were
    answered otherwise.
    """

    base: ClozeScore
    run: ClozeScore
    delta: float
    delta_95: Interval
    answers_changed: int


def read_items(path: Path = CLOZE_ITEMS, n_items: int | None = None) -> tuple[ClozeItem, ...]:
    """The items of a file, one JSON object a line, spread evenly over it where fewer are wanted.

    Raises `UsageError` for a file that does not hold items.
    """
    try:
        lines = read_small_file(path, _ITEMS_BYTES_MAX).decode().splitlines()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise UsageError(f"{path} is not text") from None
    items = [_item_of(line, path, number) for number, line in enumerate(lines[:_ITEMS_MAX], 1) if line]
    if not items:
        raise UsageError(f"{path} has no item")
    if n_items is None or n_items >= len(items):
        return tuple(items)
    return tuple(items[index * len(items) // n_items] for index in range(n_items))


def _item_of(line: str, path: Path, number: int) -> ClozeItem:
    wrong = UsageError(f"{path}, line {number}: an item has a context, choices and the place of the answer")
    try:
        value: Any = json.loads(line)
        context, choices, answer = value["context"], value["choices"], value["answer"]
    except (ValueError, KeyError, TypeError):
        raise wrong from None
    texts = isinstance(choices, list) and all(isinstance(each, str) and each for each in choices)
    if not (isinstance(context, str) and context and texts and isinstance(answer, int)):
        raise wrong
    if not 0 <= answer < len(choices) or len(choices) < 2:
        raise wrong
    return ClozeItem(context, tuple(choices), answer)


def choice_score(log_p: Float64Array, n_context: int, tokens: Sequence[int]) -> float:
    """How likely a word's tokens are behind a passage of `n_context` tokens: natural logarithm.

    `log_p` [positions, vocabulary] are the logarithms of probabilities behind each position of the passage
    and of all but the last of the word's tokens.
    """
    return float(sum(log_p[n_context - 1 + index, token] for index, token in enumerate(tokens)))


def log_softmax(logits: npt.NDArray[np.float32]) -> Float64Array:
    """Logarithms of probabilities, in float64: [positions, vocabulary]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    result: Float64Array = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def cloze_score(items: Sequence[ClozeItem], scores: Sequence[Sequence[float]]) -> ClozeScore:
    """Of each item's choices, as `choice_score` gives them; the first of equals wins."""
    right, confidence = 0, 0.0
    for item, values in zip(items, scores, strict=True):
        right += int(np.argmax(values)) == item.answer
        powers = np.exp(np.asarray(values) - max(values))
        confidence += float(powers[item.answer] / powers.sum())
    n = len(items)
    return ClozeScore(n, right, right / n, share_interval(right, n), confidence / n)


def compare_cloze(
    items: Sequence[ClozeItem], base: Sequence[Sequence[float]], run: Sequence[Sequence[float]]
) -> ClozeComparison:
    """Both runs' scores of the same items, and how their shares differ, item by item."""
    answers = [
        (int(np.argmax(a)), int(np.argmax(b)), item.answer)
        for item, a, b in zip(items, base, run, strict=True)
    ]
    gains = np.array([(b == right) - (a == right) for a, b, right in answers], np.float64)
    half = Z_95 * mean_error(gains) if gains.any() else share_interval(0, len(gains)).high
    delta = float(gains.mean())
    return ClozeComparison(
        base=cloze_score(items, base),
        run=cloze_score(items, run),
        delta=delta,
        delta_95=Interval(delta - half, delta + half),
        answers_changed=sum(a != b for a, b, _ in answers),
    )
