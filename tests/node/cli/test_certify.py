"""`certify` on the command line: what it prints, in JSON and as a table, and how it ends."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from kvasir_node import __version__
from tests.model_makers import ModelShape, make_qwen3moe, quantise
from tests.node.cli.invocation import call

SHORT = ("--batch-classes", "8")


def test_the_demo_models_shapes_are_certified_unless_asked(tmp_path: Path) -> None:
    outcome = call("certify", "--json", "--batch-classes", "1,8", "--weight-types", "f32,q4_K", home=tmp_path)
    assert outcome.status == 0, outcome.err
    found = outcome.document
    assert (found["backend"], found["n_embd"], found["n_ff"]) == ("ggml-cpu", 256, 128)
    assert found["fit"] == {"backbone": True, "output": True, "bulk": True, "reason": ""}
    assert (found["status"], found["accumulation"], found["not_probed"]) == ("claimed", "F32", [])
    # Hidden rows of 128 are no whole block of Q4_K; the model's own type comes first whatever was asked.
    assert [(each["weight_type"], each["batch_class"]) for each in found["classes"]] == [
        ("q8_0", 1),
        ("q8_0", 8),
        ("f32", 1),
        ("f32", 8),
    ]
    for each in found["classes"]:
        assert each["activation"] == each["weight_type"].upper()
        assert each["accumulator"] == "F32"
        assert each["passed"]
        assert 0 < each["rel_l2"] < each["gate"]
        assert each["repeatable"]
        assert each["batch_invariant"]
    assert "q8_0 up, 1 rows" in outcome.err
    assert found["kernel_build"].startswith(f"{__version__}+")


def test_a_kernel_that_adds_in_f16_ends_with_9_and_a_table_all_the_same(tmp_path: Path) -> None:
    outcome = call("certify", "--kernel", "emulated-f16", *SHORT, "--weight-types", "f16", home=tmp_path)
    assert outcome.status == 9
    assert outcome.err.splitlines()[-1] == (
        "kvasir-node: out of tolerance: q8_0 at 8 rows: sums are F16, not F32"
    )
    lines = outcome.out.splitlines()
    assert lines[0].startswith("reference on ")
    assert lines[1].startswith(f"kernel emulated-f16 on {platform.machine()}, build {__version__}+")
    assert "Only calls of 8 rows were looked at." in lines
    table = [line.split() for line in lines if line.endswith(" out")]
    assert [each[:4] for each in table] == [["q8_0", "8", "Q8_0", "F16"], ["f16", "8", "F16", "F16"]]
    assert all(8 < float(each[4]) < 12 for each in table), "effective bits"
    assert "Fit for bulk, by its own word (claimed)." in outcome.out


@pytest.mark.slow
def test_a_models_own_types_and_shapes_count(tmp_path: Path) -> None:
    shape = ModelShape(n_layer=1, n_embd=256, n_ff=256, n_expert=2, n_expert_used=1, head_size=64)
    path = quantise(make_qwen3moe(tmp_path / "source.gguf", shape), tmp_path / "mixed.gguf", "Q4_K_M")
    outcome = call("certify", "--json", "--model", str(path), *SHORT, "--weight-types", "q4_K", home=tmp_path)
    assert outcome.status == 0, outcome.err
    found = outcome.document
    assert (found["n_embd"], found["n_ff"]) == (256, 256)
    assert (found["model_types"], found["not_probed"]) == (["q4_K", "q6_K"], [])
    assert [each["passed"] for each in found["classes"]] == [True, True]
    assert found["fit"] == {"backbone": True, "output": True, "bulk": True, "reason": ""}


@pytest.mark.slow
def test_a_model_with_a_type_that_cannot_be_probed_is_not_certified(tmp_path: Path) -> None:
    shape = ModelShape(n_layer=1, n_embd=256, n_ff=256, n_expert=2, n_expert_used=1, head_size=64)
    path = quantise(make_qwen3moe(tmp_path / "source.gguf", shape), tmp_path / "mixed.gguf", "Q3_K_M")
    outcome = call("certify", "--json", "--model", str(path), *SHORT, "--weight-types", "q4_K", home=tmp_path)
    assert outcome.status == 9
    found = outcome.document
    assert "q3_K" in found["not_probed"]
    assert found["fit"]["output"] is False
    assert "q3_K" in outcome.err.splitlines()[-1]
    assert "out of tolerance" not in outcome.err, "nothing of what was measured is"


def test_shapes_of_no_model(tmp_path: Path) -> None:
    outcome = call("certify", "--shape", "96x64", "--json", *SHORT, "--weight-types", "f16", home=tmp_path)
    assert outcome.status == 0, outcome.err
    assert outcome.document["model_types"] == ["f16"]
    assert (outcome.document["n_embd"], outcome.document["n_ff"]) == (96, 64)


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("--shape", "64"), "takes two widths"),
        (("--shape", "64x32"), "widths from 64"),
        (("--shape", "99999x64"), "widths from 64 to 16384"),
        (("--shape", "64x64", "--model", "demo"), "one of --model and --shape"),
        (("--weight-types", "q3_K"), "and not 'q3_K'"),
        (("--batch-classes", "1,7"), "and not '7'"),
    ],
)
def test_wrong_calls_are_named(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    outcome = call("certify", *arguments, home=tmp_path)
    assert outcome.status == 2
    assert sentence in outcome.sentence


def test_a_model_that_is_not_here_is_status_7(tmp_path: Path) -> None:
    assert call("certify", "--model", "nothing", home=tmp_path).status == 7
    assert call("certify", "--model", str(tmp_path / "no.gguf"), home=tmp_path).status == 7
