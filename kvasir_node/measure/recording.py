"""What a side of a comparison answered to one workload: kept in files, to be compared now or another day.

Decides what a workload is (texts in windows, prompts to go on with, cloze items) and how answers are kept:
logits on disk, so that memory stays bounded, the rest beside them. A saved reference is such a directory.
It refuses to judge, and to compare answers to two workloads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from kvasir_node.measure.in_process import Continuation, Traces, joined_traces
from kvasir_node.measure.sides import OpenSide
from kvasir_node.measure.statistics import Logits, open_logits
from kvasir_node.measure.task import ClozeItem, choice_score, log_softmax, read_items
from kvasir_node.small_file import read_small_file
from kvasir_proto.errors import EngineFailed, UsageError

SCHEMA_VERSION: Final = 1
_DOCUMENT: Final = "recording.json"
_LOGITS: Final = "logits.npy"
_TRACES: Final = ("hidden", "router", "experts")
_DOCUMENT_BYTES_MAX: Final = 64 << 20


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
    """A side's answers: logits of all windows' positions, one after the other, and the rest."""

    side: str
    workload: Workload
    logits: Logits
    traces: Traces | None
    continuations: tuple[Continuation, ...]
    scores: tuple[tuple[float, ...], ...]
    seconds: float


def chunks_of(n_tokens: int, singly: int) -> tuple[int, ...]:
    """All but the last `singly` tokens at once, those one by one: both of llama.cpp's paths."""
    last = min(singly, n_tokens - 1)
    return (n_tokens - last, *(1 for _ in range(last)))


def cut_into_windows(tokens: Sequence[int], n_positions: int, window: int) -> tuple[tuple[int, ...], ...]:
    """So many tokens from the beginning, in windows; the last one may be shorter, but not of one token.

    Raises `UsageError` when there are fewer tokens.
    """
    if len(tokens) < n_positions:
        raise UsageError(f"the text has {len(tokens)} tokens, and {n_positions} are wanted")
    starts = range(0, n_positions, window)
    windows = [tuple(tokens[start : min(start + window, n_positions)]) for start in starts]
    return tuple(each for each in windows if len(each) > 1)


async def record(
    side: OpenSide, workload: Workload, directory: Path, say: Callable[[str], None] = lambda text: None
) -> Recording:
    """Ask a side everything, and write it to ``directory``, which is made. Raises what the side raises."""
    started = time.monotonic()
    await trio.Path(directory).mkdir(parents=True, exist_ok=True)
    traces: list[Traces] = []
    logits: Any = None
    row = 0
    for number, window in enumerate(workload.windows, 1):
        found, seen = await side.evaluate(window, chunks_of(len(window), workload.singly))
        if logits is None:
            shape = (len(workload.tokens), found.shape[1])
            logits = np.lib.format.open_memmap(directory / _LOGITS, mode="w+", dtype=np.float32, shape=shape)
        logits[row : row + len(window)] = found
        row += len(window)
        if seen is not None:
            traces.append(seen)
        say(f"{side.name}: window {number} of {len(workload.windows)}")
    if logits is not None:
        logits.flush()
    continuations = [await side.greedy(prompt, workload.n_generated) for prompt in workload.prompts]
    scores = [await _scores_of(side, item) for item in workload.items]
    recording = Recording(
        side=side.name,
        workload=workload,
        logits=open_logits(directory / _LOGITS) if logits is not None else np.zeros((0, 1), np.float32),
        traces=joined_traces(traces) if traces else None,
        continuations=tuple(continuations),
        scores=tuple(scores),
        seconds=time.monotonic() - started,
    )
    await trio.to_thread.run_sync(_write, recording, directory)
    return recording


def load_recording(directory: Path) -> Recording:
    """A saved one; without cloze scores where the items are others by now.

    Raises `UsageError` for a directory that holds none.
    """
    path = directory / _DOCUMENT
    wrong = UsageError(f"{directory} holds no saved reference: 'measure save' makes one")
    try:
        document: Any = json.loads(read_small_file(path, _DOCUMENT_BYTES_MAX))
        if document["schema_version"] != SCHEMA_VERSION:
            raise UsageError(f"{directory} was saved by another version: save it again")
        n_scores = len(document["scores"])
        items = read_items(n_items=n_scores) if n_scores else ()
        workload = Workload(
            model_digest=str(document["model_digest"]),
            windows=tuple(tuple(map(int, each)) for each in document["windows"]),
            singly=int(document["singly"]),
            prompts=tuple(tuple(map(int, each)) for each in document["prompts"]),
            n_generated=int(document["n_generated"]),
            items=items,
        )
        if workload.items_digest != document["items_digest"]:
            workload = dataclasses.replace(workload, items=())
        continuations = tuple(
            Continuation(tuple(map(int, each["tokens"])), tuple(each["margins"]) if each["margins"] else None)
            for each in document["continuations"]
        )
        scores = tuple(tuple(map(float, each)) for each in document["scores"]) if workload.items else ()
        traces = None
        if document["layers"] is not None:
            arrays = [np.load(directory / f"{name}.npy", allow_pickle=False) for name in _TRACES]
            traces = Traces(tuple(document["layers"]), tuple(document["moe_layers"]), *arrays)
        logits = open_logits(directory / _LOGITS) if workload.windows else np.zeros((0, 1), np.float32)
    except (OSError, ValueError, KeyError, TypeError, EngineFailed):
        raise wrong from None
    if workload.windows and len(logits) != len(workload.tokens):
        raise wrong
    return Recording(
        side=f"saved {document['side']}",
        workload=workload,
        logits=logits,
        traces=traces,
        continuations=continuations,
        scores=scores,
        seconds=float(document["seconds"]),
    )


async def _scores_of(side: OpenSide, item: ClozeItem) -> tuple[float, ...]:
    """One pass for the passage, and one more for each word of several tokens."""
    context = await side.tokenize(item.context)
    bare, _ = await side.evaluate(context, (len(context),))
    bare_log_p = log_softmax(bare[-1:])
    scores = []
    for choice in item.choices:
        tokens = await side.tokenize(f" {choice}")
        if len(tokens) == 1:
            scores.append(choice_score(bare_log_p, 1, tokens))
            continue
        whole = (*context, *tokens[:-1])
        logits, _ = await side.evaluate(whole, (len(whole),))
        scores.append(choice_score(log_softmax(logits[len(context) - 1 :]), 1, tokens))
    return tuple(scores)


def _write(recording: Recording, directory: Path) -> None:
    workload, traces = recording.workload, recording.traces
    if traces is not None:
        for name in _TRACES:
            np.save(directory / f"{name}.npy", getattr(traces, name))
    document = {
        "schema_version": SCHEMA_VERSION,
        "side": recording.side,
        "model_digest": workload.model_digest,
        "windows": workload.windows,
        "singly": workload.singly,
        "prompts": workload.prompts,
        "n_generated": workload.n_generated,
        "items_digest": workload.items_digest,
        "scores": recording.scores,
        "continuations": [
            {"tokens": each.tokens, "margins": each.margins} for each in recording.continuations
        ],
        "layers": None if traces is None else traces.layers,
        "moe_layers": None if traces is None else traces.moe_layers,
        "seconds": recording.seconds,
    }
    (directory / _DOCUMENT).write_text(json.dumps(document), encoding="utf-8")
