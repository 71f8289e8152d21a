"""A saved reference is what was saved, or it is refused with what is wrong with it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_node.backbone.traces import Traces
from kvasir_node.measure.in_process import Continuation
from kvasir_node.measure.recording import LOGITS_FILE, Recording, Workload
from kvasir_node.measure.saved_reference import DOCUMENT_FILE, load_reference, save_reference
from kvasir_node.measure.statistics import open_logits
from kvasir_node.measure.task import read_items
from kvasir_proto.errors import EngineFailed, UsageError

FILES = (DOCUMENT_FILE, LOGITS_FILE, "hidden.npy", "router.npy", "experts.npy", "asked.npy")


def saved(directory: Path) -> Recording:
    draws = np.random.default_rng(1)
    directory.mkdir()
    np.save(directory / LOGITS_FILE, draws.standard_normal((5, 7)).astype(np.float32))
    router = draws.standard_normal((2, 5, 4)).astype(np.float32)
    experts = np.argsort(router)[:, :, :2].astype(np.int32)
    recording = Recording(
        side="ggml-cpu",
        workload=Workload("model", ((1, 2, 3), (4, 5)), 1, ((1, 2), (3,)), 2, read_items(n_items=2)),
        logits=open_logits(directory / LOGITS_FILE),
        traces=Traces((0, 1), (0, 1), router.copy(), router, experts, experts[:, :, ::-1].copy()),
        continuations=(Continuation((4, 5), (0.5, 1.25)), Continuation((6, 7))),
        scores=((-1.0, -2.0, -3.0, -4.0), (-0.1, -0.2, -0.3, -0.4)),
        seconds=1.5,
    )
    save_reference(recording, directory)
    return recording


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    recording = saved(tmp_path / "reference")
    found = load_reference(tmp_path / "reference")
    assert found.side == "saved ggml-cpu"
    assert (found.workload, found.continuations) == (recording.workload, recording.continuations)
    assert (found.scores, found.seconds) == (recording.scores, recording.seconds)
    assert np.array_equal(found.logits, recording.logits)
    assert found.traces is not None
    assert recording.traces is not None
    for name in ("hidden", "router", "experts", "asked"):
        assert np.array_equal(getattr(found.traces, name), getattr(recording.traces, name))


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(FILES), place=st.integers(0, 1 << 20), bit=st.integers(0, 7))
def test_no_bit_of_any_file_can_turn_unseen(
    tmp_path_factory: pytest.TempPathFactory, name: str, place: int, bit: int
) -> None:
    directory = tmp_path_factory.mktemp("saved") / "reference"
    saved(directory)
    data = bytearray((directory / name).read_bytes())
    data[place % len(data)] ^= 1 << bit
    (directory / name).write_bytes(data)
    try:
        found = load_reference(directory)
    except UsageError:
        return
    # Only what reads as the same again: a space in the document, an escape for what it stands for.
    assert name == DOCUMENT_FILE
    assert json.loads(bytes(data)) == json.loads(_document_of(found, directory))


def _document_of(found: Recording, directory: Path) -> str:
    save_reference(dataclasses.replace(found, side=found.side.removeprefix("saved ")), directory)
    return (directory / DOCUMENT_FILE).read_text()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "gone", "pipe", "directory"])
def test_a_file_that_is_none_any_more_is_an_error_at_once(tmp_path: Path, name: str, how: str) -> None:
    saved(tmp_path / "reference")
    path = tmp_path / "reference" / name
    data = path.read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "directory":
        path.mkdir()
    with pytest.raises(UsageError, match=r"is damaged|holds no saved reference"):
        load_reference(tmp_path / "reference")


def _nothing(answers: dict[str, Any]) -> None:
    answers.clear()


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda answers: answers.__setitem__(name, value)


@pytest.mark.parametrize(
    "change",
    [
        _nothing,
        _set("windows", [[1, 2, 3]]),
        _set("windows", [[1, 2, -3], [4, 5]]),
        _set("windows", "12345"),
        _set("continuations", []),
        _set("continuations", [{"tokens": [-1], "margins": None}] * 2),
        _set("continuations", [{"tokens": [1], "margins": [float("nan")]}] * 2),
        _set("continuations", [{"tokens": [1]}] * 2),
        _set("scores", [[float("nan")] * 4] * 2),
        _set("scores", 3),
        _set("seconds", "x"),
        _set("files", {"../secret": ""}),
        _set("files", []),
    ],
)
def test_a_document_that_somebody_made_up_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    saved(tmp_path / "reference")
    path = tmp_path / "reference" / DOCUMENT_FILE
    document = json.loads(path.read_text())
    change(document["answers"])
    document["digest"] = hashlib.sha256(json.dumps(document["answers"], sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(document))
    with pytest.raises(UsageError, match="is damaged"):
        load_reference(tmp_path / "reference")


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", "3", '"', '{"schema_version": 2}', "\xff"])
def test_a_document_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    saved(tmp_path / "reference")
    (tmp_path / "reference" / DOCUMENT_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(UsageError, match="is damaged"):
        load_reference(tmp_path / "reference")


def test_what_a_stranger_calls_his_side_does_not_write_on_a_terminal(tmp_path: Path) -> None:
    recording = saved(tmp_path / "reference")
    save_reference(dataclasses.replace(recording, side="\x1b[2J\nyours"), tmp_path / "reference")
    assert load_reference(tmp_path / "reference").side.isprintable()


@pytest.mark.parametrize("what", ["hidden", "router"])
def test_what_is_not_finite_is_no_recording(tmp_path: Path, what: str) -> None:
    """Compared, it would agree with anything: no value of it is above another."""
    recording = saved(tmp_path / "reference")
    assert recording.traces is not None
    values = np.full_like(getattr(recording.traces, what), np.nan)
    with pytest.raises(EngineFailed, match="not finite"):
        dataclasses.replace(recording, traces=dataclasses.replace(recording.traces, **{what: values}))
