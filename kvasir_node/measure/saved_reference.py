"""A side's answers in a directory: to be compared another day, or on another machine.

One document, and an array a file beside it. The document has a digest of each file and of itself: figures of
a damaged reference would look like those of a good one. It is no signature; who made a reference is for its
reader to know. What is in it is shown to a person only as far as it is printable.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvasir_node.backbone.traces import Traces
from kvasir_node.measure.in_process import Continuation
from kvasir_node.measure.recording import LOGITS_FILE, Recording, Workload
from kvasir_node.measure.statistics import open_logits
from kvasir_node.measure.task import read_items
from kvasir_node.small_file import open_regular_file, read_small_file
from kvasir_proto.errors import EngineFailed, UsageError
from kvasir_proto.limits import as_sentence

SCHEMA_VERSION: Final = 2
DOCUMENT_FILE: Final = "recording.json"
_TRACES: Final = ("hidden", "router", "experts")
_ASKED: Final = "asked"
"""What holders were asked for: of a swarm only."""
_DOCUMENT_BYTES_MAX: Final = 64 << 20


def save_reference(recording: Recording, directory: Path) -> None:
    """Keep a recording in the directory where its logits are. Raises `OSError`."""
    workload, traces = recording.workload, recording.traces
    files = [LOGITS_FILE] if workload.windows else []
    if traces is not None:
        for name in _TRACES:
            np.save(directory / f"{name}.npy", getattr(traces, name))
            files.append(f"{name}.npy")
        if traces.asked is not None:
            np.save(directory / f"{_ASKED}.npy", traces.asked)
            files.append(f"{_ASKED}.npy")
    answers = {
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
        "files": {each: _digest_of(directory / each) for each in files},
    }
    document = {"schema_version": SCHEMA_VERSION, "digest": _digest_of_answers(answers), "answers": answers}
    (directory / DOCUMENT_FILE).write_text(json.dumps(document), encoding="utf-8")


def load_reference(directory: Path) -> Recording:
    """A saved one; without cloze scores where the items are others by now.

    Raises `UsageError` for a directory that holds none, or a damaged one.
    """
    try:
        data = read_small_file(directory / DOCUMENT_FILE, _DOCUMENT_BYTES_MAX)
    except OSError:
        raise UsageError(f"{directory} holds no saved reference: 'measure save' makes one") from None
    try:
        document: Any = json.loads(data)
        if document["schema_version"] != SCHEMA_VERSION:
            raise UsageError(f"{directory} was saved by another version: save it again")
        answers = document["answers"]
        if document["digest"] != _digest_of_answers(answers):
            raise ValueError(f"{DOCUMENT_FILE} does not fit its digest")
        for name, digest in answers["files"].items():
            if name not in (LOGITS_FILE, *(f"{each}.npy" for each in (*_TRACES, _ASKED))):
                raise ValueError("it names a file that is none of its own")
            if _digest_of(directory / name) != digest:
                raise ValueError(f"{name} does not fit its digest")
        return _recording_of(answers, directory)
    except OSError as error:
        problem = f"{Path(str(error.filename)).name} cannot be read: {error.strerror}"
    except RecursionError:
        problem = f"{DOCUMENT_FILE} is nested too deeply"
    except (KeyError, TypeError, AttributeError):
        problem = f"{DOCUMENT_FILE} lacks what belongs to one"
    except (ValueError, EngineFailed) as error:
        problem = str(error)
    raise UsageError(f"the saved reference in {directory} is damaged: {as_sentence(problem)}")


def _recording_of(answers: Any, directory: Path) -> Recording:
    n_scores = len(answers["scores"])
    workload = Workload(
        model_digest=str(answers["model_digest"]),
        windows=tuple(map(_tokens, answers["windows"])),
        singly=int(answers["singly"]),
        prompts=tuple(map(_tokens, answers["prompts"])),
        n_generated=int(answers["n_generated"]),
        items=read_items(n_items=n_scores) if n_scores else (),
    )
    if workload.items_digest != answers["items_digest"]:
        workload = dataclasses.replace(workload, items=())
    continuations = tuple(
        Continuation(
            _tokens(each["tokens"]),
            None if each["margins"] is None else tuple(map(float, each["margins"])),
        )
        for each in answers["continuations"]
    )
    traces = None
    if answers["layers"] is not None:
        names = [name for name in (*_TRACES, _ASKED) if name != _ASKED or f"{name}.npy" in answers["files"]]
        arrays = [np.load(directory / f"{name}.npy", allow_pickle=False) for name in names]
        traces = Traces(tuple(answers["layers"]), tuple(answers["moe_layers"]), *arrays)
    logits = open_logits(directory / LOGITS_FILE) if workload.windows else np.zeros((0, 1), np.float32)
    if min(workload.lengths, default=2) < 2:
        raise ValueError("it has a window of one token")
    if workload.windows and len(logits) != len(workload.tokens):
        raise ValueError(f"{LOGITS_FILE} is for other texts")
    if len(continuations) != len(workload.prompts):
        raise ValueError("it has not one continuation a prompt")
    return Recording(
        side=f"saved {as_sentence(str(answers['side']))}",
        workload=workload,
        logits=logits,
        traces=traces,
        continuations=continuations,
        scores=tuple(tuple(map(float, each)) for each in answers["scores"]) if workload.items else (),
        seconds=float(answers["seconds"]),
    )


def _tokens(found: Any) -> tuple[int, ...]:
    tokens = tuple(map(int, found))
    if min(tokens, default=0) < 0:
        raise ValueError("it has a token below 0")
    return tokens


def _digest_of(path: Path) -> str:
    with open_regular_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of_answers(answers: Any) -> str:
    return hashlib.sha256(json.dumps(answers, sort_keys=True).encode()).hexdigest()
