"""The levels on the command line: what they print, what is saved and compared again, and how they end."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from kvasir_node.cli.measure import _WITH_BETWEEN, _WITHOUT_BETWEEN, logits
from tests.node.cli.invocation import call

SMALL = ("--positions", "96", "--window", "48")


@pytest.mark.slow
def test_a_saved_reference_answers_for_its_side_at_every_level(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    few = ("--prompts", "2", "--tokens", "6", "--items", "4")
    outcome = call("measure", "save", "--out", str(saved), *SMALL, *few, "--json", home=tmp_path)
    assert outcome.status == 0, outcome.err
    assert (outcome.document["positions"], outcome.document["items"]) == (96, 4)
    sides = ("--between", f"saved:{saved}", "reference-f32")
    found = call("measure", "drift", *sides, *SMALL, "--json", home=tmp_path).document
    assert (found["base"], found["run"], found["positions"]) == ("saved llama.cpp", "reference-f32", 96)
    layers = found["layer_drift"]["layers"]
    assert [each["layer"] for each in layers] == list(range(6))
    assert all(1e-4 < each["rel_l2"] < 0.2 for each in layers)
    found = call("measure", "decisions", *sides, *SMALL, "--json", home=tmp_path).document
    assert found["decisions"]["decisions"] == 6 * 96
    found = call(
        "measure", "generation", *sides, "--prompts", "2", "--tokens", "6", "--json", home=tmp_path
    ).document
    assert len(found["generation"]["prompts"]) == 2
    found = call("measure", "task", *sides, *SMALL, "--items", "4", "--json", home=tmp_path).document
    assert found["cloze"]["base"]["items"] == 4
    assert found["logits"]["base_perplexity"] > 1
    again = ("--between", f"saved:{saved}", "llama.cpp")
    same = call("measure", "logits", *again, "--positions", "96", "--json", home=tmp_path)
    assert (same.status, same.document["passed"]) == (0, True)
    assert same.document["logits"]["max_abs_delta"] == 0.0
    assert same.document["logits"]["perplexity_change_95"] == {"low": 0.0, "high": 0.0}
    refused = call("measure", "save", "--out", str(saved), home=tmp_path)
    assert refused.status == 2
    (saved / "recording.json").write_text("{}")
    damaged = call("measure", "drift", *sides, home=tmp_path)
    assert damaged.status == 2
    assert "is damaged" in damaged.err.splitlines()[-1]


@pytest.mark.slow
def test_tables_are_printed_for_every_level(tmp_path: Path) -> None:
    sides = ("--between", "llama.cpp", "ggml-cpu")
    for level, said in (
        ("drift", "REL L2 OF THOSE"),
        ("decisions", "0 of 576 decisions differ"),
        ("task", "4 of 4"),
    ):
        items = ("--items", "4") if level == "task" else ()
        outcome = call("measure", level, *sides, *SMALL, *items, home=tmp_path)
        assert outcome.status == 0, outcome.err
        assert said in outcome.out
    outcome = call("measure", "generation", *sides, "--prompts", "1", "--tokens", "4", home=tmp_path)
    assert "1 of 1 texts are identical" in outcome.out


OF_BOTH = {"between", "model", "positions", "threads", "ubatch", "kv_type", "as_json"}
VALUES = {
    "token_ids": "1,2",
    "tokens_file": "tokens",
    "chunks": "1x4",
    "text": "text",
    "scored": "all",
    "flash_attention": "on",
    "device": "none",
    "reference_device": "none",
}
"""What is given where a number will not do: defaults too, for whoever gives one wants it."""


@pytest.mark.parametrize("parameter", [each for each in logits.params if each.name not in OF_BOTH], ids=str)
def test_logits_refuses_what_it_does_not_use(tmp_path: Path, parameter: click.Parameter) -> None:
    """What is not for a process beside a swarm and for two sides alike is for one of them, not ignored."""
    name = str(parameter.name)
    assert (name in _WITH_BETWEEN) != (name in _WITHOUT_BETWEEN)
    option = "--" + name.replace("_", "-")
    given = (option,) if parameter.is_flag else (option, VALUES.get(name, "2"))  # type: ignore[attr-defined]
    sides = ("--between", "llama.cpp", "ggml-cpu") if name in _WITHOUT_BETWEEN else ()
    outcome = call("measure", "logits", *sides, *given, home=tmp_path)
    assert outcome.status == 2, outcome.err
    assert option in outcome.err.splitlines()[-1]
    assert "--between" in outcome.err.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("drift", "--between", "llama.cpp", "cuda"), "there is no 'cuda' here"),
        (("drift", "--between", "llama.cpp", "live:"), "takes the home of a daemon"),
        (
            ("logits", "--between", "llama.cpp", "live", "--flash-attention", "off"),
            "always use flash attention",
        ),
        (("logits", "--window", "64"), "--flash-attention go with --between"),
        (("ops", "--between", "ggml-cpu", "live"), "a swarm shows what is behind whole layers"),
        (("ops", "--backends", "ggml-cpu,saved:x"), "operations are of backends"),
        (("ops", "--backends", "ggml-cpu", "--between", "a", "b"), "give one of"),
        (("authority", "--between", "llama.cpp", "ggml-cpu"), "have no routers to replicate"),
        (("authority", "--between", "live", "llama.cpp"), "given first"),
        (("authority", "--between", "a", "b", "--kernels", "a+b"), "give one of"),
        (("authority", "--between", "ggml-cpu", "cuda"), "no backend 'cuda' here"),
        (("logits", "--between", "llama.cpp", "swarm:ggml-cpu+cuda"), "of ggml-cpu, opencl"),
        (("decisions", "--between", "saved:nowhere", "llama.cpp"), "holds no saved reference"),
        (("task", "--text", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("drift", "--positions", "1000000"), "tokens, and 1000000 are wanted"),
        (
            ("logits", "--between", "llama.cpp", "ggml-cpu", "--token-ids", "1"),
            "takes its tokens from the held-out",
        ),
        (("authority", "--kernels", "ggml-cpu"), "--kernels takes pairs"),
        (("authority", "--kernels", "ggml-cpu+cuda"), "no backend 'cuda' here"),
        (("save", "--out", "x", "--side", "saved:x"), "need not be saved again"),
    ],
)
def test_bad_arguments_are_status_2(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    outcome = call("measure", *arguments, home=tmp_path)
    assert outcome.status == 2, outcome.err
    assert said in outcome.err.splitlines()[-1]


@pytest.mark.slow
def test_a_swarm_of_unlike_workers_is_a_side(tmp_path: Path) -> None:
    sides = ("--between", "llama.cpp", "swarm:ggml-cpu+emulated-f16")
    outcome = call("measure", "logits", *sides, "--positions", "64", "--json", home=tmp_path)
    found = outcome.document
    assert found["run"] == "swarm:ggml-cpu+emulated-f16"
    assert found["logits"]["positions"] == 64
    assert 0 < found["logits"]["mean_kld"] < 0.1, "one of the workers adds in F16"
    obeyed = call("measure", "authority", *sides, "--positions", "64", "--json", home=tmp_path)
    assert obeyed.status == 0, obeyed.err
    (inside,) = obeyed.document["swarms"]
    assert (inside["swarm"], inside["reference"]) == (found["run"], "llama.cpp")
    assert (inside["pinned"]["decisions"], inside["pinned"]["decisions_disagreeing"]) == (6 * 64, 0)
    assert (inside["pinned"]["rows"], inside["pinned"]["rows_missing"]) == (6 * 64 * 4, 0)
    assert inside["outside"]["mean_kld"] == found["logits"]["mean_kld"]
    text = call(
        *(
            "measure",
            "generation",
            "--between",
            "llama.cpp",
            "swarm",
            "--prompts",
            "1",
            "--tokens",
            "4",
            "--json",
        ),
        home=tmp_path,
    )
    assert text.document["generation"]["identical"] == 1


@pytest.mark.slow
def test_authority_is_told_in_json(tmp_path: Path) -> None:
    pair = ("--kernels", "ggml-cpu+reference-f32", "--positions", "64")
    outcome = call("measure", "authority", *pair, "--json", home=tmp_path)
    assert outcome.status == 0, outcome.err
    (found,) = outcome.document["authority"]
    assert found["pinned"]["decisions_disagreeing"] == 0
    assert found["pinned"]["decisions"] == 6 * 64
    assert set(found["outside"]) >= {"pinned", "apart, ggml-cpu"}
    table = call("measure", "authority", *pair, home=tmp_path)
    assert "BESIDE LLAMA.CPP ALONE" in table.out
