"""What a side of a comparison answered to one workload.

Decides what a workload is (texts in windows, prompts to go on with, cloze items) and how it is asked; logits
are on disk from the first on, so that memory stays bounded. It refuses to judge, to compare answers to two
workloads, and to know how answers are kept for another day (`saved_reference`).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from kvasir_node.backbone.traces import Traces, joined_traces
from kvasir_node.logits_file import create_logits
from kvasir_node.measure.in_process import Continuation
from kvasir_node.measure.sides import OpenSide
from kvasir_node.measure.statistics import Logits, open_logits
from kvasir_node.measure.task import ClozeItem, choice_score, log_softmax
from kvasir_proto.errors import EngineFailed, UsageError

LOGITS_FILE: Final = "logits.npy"


@dataclass(frozen=True, slots=True)
class Workload:
    """What a side is asked. Each window begins in an empty context; its last `singly` tokens go through one
    by one, all before them at once.
    """

    model_digest: str
    windows: tuple[tuple[int, ...], ...]
    singly: int
    prompts: tuple[tuple[int, ...], ...] = ()
    n_generated: int = 0
    items: tuple[ClozeItem, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Those of all windows."""
        return tuple(token for window in self.windows for token in window)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How long the windows are."""
        return tuple(map(len, self.windows))

    @property
    def items_digest(self) -> str:
        """What tells two lists of items apart."""
        texts = json.dumps([(each.context, each.choices, each.answer) for each in self.items])
        return hashlib.sha256(texts.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Recording:
    """A side's answers: logits of all windows' positions, one after the other, and the rest.

    Raises `EngineFailed` where what was seen inside is not finite: it would compare as equal to anything.
    """

    side: str
    workload: Workload
    logits: Logits
    traces: Traces | None
    continuations: tuple[Continuation, ...]
    scores: tuple[tuple[float, ...], ...]
    seconds: float

    def __post_init__(self) -> None:
        traces = () if self.traces is None else (self.traces.hidden, self.traces.router)
        margins = [each.margins for each in self.continuations if each.margins is not None]
        if not all(np.isfinite(each).all() for each in (*traces, *margins, *self.scores)):
            raise EngineFailed(f"{self.side} gave values that are not finite")


def chunks_of(n_tokens: int, singly: int) -> tuple[int, ...]:
    """All but the last `singly` tokens at once, those one by one: both of llama.cpp's paths."""
    last = min(singly, n_tokens - 1)
    return (n_tokens - last, *(1 for _ in range(last)))


def cut_into_windows(
    tokens: Sequence[int], n_positions: int, window: int, beginning: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """So many tokens from the beginning, in windows; the last one may be shorter, but not of one token.

    `beginning` is what every text of the model begins with, one token or none: it takes the place of a
    window's first, as llama-perplexity has it. Raises `UsageError` when there are fewer tokens.
    """
    if len(tokens) < n_positions:
        raise UsageError(f"the text has {len(tokens)} tokens, and {n_positions} are wanted")
    starts = range(0, n_positions, window)
    windows = [(*tokens[start : min(start + window, n_positions)],) for start in starts]
    return tuple((*beginning, *each[len(beginning) :]) for each in windows if len(each) > 1)


async def record(
    side: OpenSide, workload: Workload, directory: Path, say: Callable[[str], None] = lambda text: None
) -> Recording:
    """Ask a side everything; its logits go to ``directory``, which is made. Raises what the side raises."""
    started = time.monotonic()
    await trio.Path(directory).mkdir(parents=True, exist_ok=True)
    traces: list[Traces] = []
    logits: Any = None
    row = 0
    for number, window in enumerate(workload.windows, 1):
        found, seen = await side.evaluate(window, chunks_of(len(window), workload.singly))
        if logits is None:
            logits = create_logits(directory / LOGITS_FILE, len(workload.tokens), found.shape[1])
        logits[row : row + len(window)] = found
        row += len(window)
        if seen is not None:
            traces.append(seen)
        say(f"{side.name}: window {number} of {len(workload.windows)}")
    if logits is not None:
        logits.flush()
    continuations = [await side.greedy(prompt, workload.n_generated) for prompt in workload.prompts]
    scores = [await _scores_of(side, item) for item in workload.items]
    return Recording(
        side=side.name,
        workload=workload,
        logits=open_logits(directory / LOGITS_FILE) if logits is not None else np.zeros((0, 1), np.float32),
        traces=joined_traces(traces) if traces else None,
        continuations=tuple(continuations),
        scores=tuple(scores),
        seconds=time.monotonic() - started,
    )


async def _scores_of(side: OpenSide, item: ClozeItem) -> tuple[float, ...]:
    """One pass for the passage, and one more for each word of several tokens."""
    context = await side.tokenize(item.context)
    bare, _ = await side.evaluate(context, (len(context),), looks_inside=False)
    bare_log_p = log_softmax(bare[-1:])
    scores = []
    for choice in item.choices:
        tokens = await side.tokenize(f" {choice}")
        if len(tokens) == 1:
            scores.append(choice_score(bare_log_p, 1, tokens))
            continue
        whole = (*context, *tokens[:-1])
        logits, _ = await side.evaluate(whole, (len(whole),), looks_inside=False)
        scores.append(choice_score(log_softmax(logits[len(context) - 1 :]), 1, tokens))
    return tuple(scores)
