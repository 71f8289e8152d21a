"""`measure ops` on the command line: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.certification.synthetic_model import Read
from kvasir_node.cli import measure_operations
from kvasir_node.measure.backends_here import Backend
from kvasir_proto.errors import EngineFailed
from kvasir_proto.manifest import ModelManifest, ShardSet
from tests.node.certification.test_certify import Scaled
from tests.node.cli.invocation import call
from tests.node.measure.test_operations import ggml, scaled_experts

SHORT = ("--weight-types", "q8_0", "--batch-classes", "8", "--shape", "128x64")


def test_pairs_are_told_with_their_classes_and_gates(tmp_path: Path) -> None:
    names = "ggml-cpu,reference-as-ggml,reference-f64"
    outcome = call("measure", "ops", "--backends", names, *SHORT, "--json", home=tmp_path)
    assert outcome.status == 0, outcome.err
    found = outcome.document
    assert [(each["name"], each["emulated"]) for each in found["backends"]] == [
        ("ggml-cpu", False),
        ("reference-as-ggml", True),
        ("reference-f64", False),
    ]
    expert = {(each["a"], each["b"]): each for each in found["pairs"] if each["operation"] == "expert"}
    same = expert["ggml-cpu", "reference-as-ggml"]
    assert (same["class_a"], same["class_b"], same["passed"]) == ("Q8_0/F32", "Q8_0/F32", True)
    assert same["rel_l2"] <= same["gate"]
    other = expert["ggml-cpu", "reference-f64"]
    assert (other["class_b"], other["gate"], other["passed"]) == ("F32/F32", None, None)
    assert 0.999 < other["cosine"] < 0.99999
    beside = {each["pair"]: each for each in found["published"]}
    assert beside["ROCm, numpy"]["cosine"] == 0.99996
    assert beside["ROCm, numpy"]["ours"]["b"] == "reference-f64"
    assert beside["phone's ARM, numpy"]["ours"] is None


def test_a_pair_outside_its_gate_is_status_9(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = (Backend("ggml-cpu", False, ggml), Backend("scaled", False, scaled_experts))
    monkeypatch.setattr(measure_operations, "backends_here", lambda threads, say: here)
    outcome = call("measure", "ops", *SHORT, home=tmp_path)
    assert outcome.status == 9
    assert "scaled" in outcome.out
    assert "ggml-cpu and scaled" in outcome.err.splitlines()[-1]


def test_a_backend_of_no_known_arithmetic_is_status_9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scaled(manifest: ModelManifest, shard: ShardSet, read: Read) -> Scaled:
        return Scaled(manifest, shard, read)

    here = (Backend("scaled", False, scaled), Backend("ggml-cpu", False, ggml))
    monkeypatch.setattr(measure_operations, "backends_here", lambda threads, say: here)
    outcome = call("measure", "ops", *SHORT, home=tmp_path)
    assert outcome.status == 9
    assert "scaled at 8 rows in q8_0 is of no arithmetic" in outcome.err.splitlines()[-1]


def test_a_backend_that_was_asked_for_and_cannot_be_loaded_is_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(manifest: ModelManifest, shard: ShardSet, read: Read) -> Scaled:
        raise EngineFailed("its host was ended by SIGBUS")

    here = (Backend("lost", False, lost), Backend("ggml-cpu", False, ggml))
    monkeypatch.setattr(measure_operations, "backends_here", lambda threads, say: here)
    assert call("measure", "ops", *SHORT, home=tmp_path).status == 0
    outcome = call("measure", "ops", *SHORT, "--backends", "ggml-cpu,lost", home=tmp_path)
    assert outcome.status == 1
    assert "took no part: q8_0: its host was ended by SIGBUS" in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--backends", "cuda"), "no backend 'cuda' here"),
        (("--backends", "ggml-cpu, ggml-cpu"), "ggml-cpu alone has nothing to be compared with"),
        (("--weight-types", ""), "--weight-types takes"),
        (("--batch-classes", ""), "--batch-classes takes"),
        (("--shape", "3x4"), "--shape takes widths from 64"),
        (("--shape", "wide"), "--shape takes demo, published"),
        (("--weight-types", "q4_K"), "cannot be in q4_K"),
        (("--weight-types", "q3_K"), "--weight-types takes f32"),
        (("--batch-classes", "7"), "--batch-classes takes 1"),
    ],
)
def test_bad_arguments_are_status_2(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    outcome = call("measure", "ops", *arguments, home=tmp_path)
    assert outcome.status == 2
    assert said in outcome.err.splitlines()[-1]
