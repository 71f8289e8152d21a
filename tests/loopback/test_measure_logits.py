"""`measure logits` and `bench` with real processes: exact, sharded, and refusing what is no model."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvasir_node.cli import main
from kvasir_node.model.gguf_reader import read_gguf
from kvasir_proto.errors import ModelUnusable, UsageError
from tests.model_makers import ModelShape, make_deepseek2, make_dense, make_qwen3moe, quantise

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

SMALL = ModelShape(n_layer=2)


def measure(
    capsys: pytest.CaptureFixture[str], home: Path, model: Path, *arguments: str
) -> tuple[int, dict[str, Any], str]:
    """Exit status, the JSON object (empty when there is none) and standard error."""
    status = main(["--home", str(home), "measure", "logits", "--model", str(model), *arguments, "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out) if captured.out else {}, captured.err


def test_three_workers_with_a_third_of_the_experts_each_are_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_qwen3moe(tmp_path / "model.gguf", SMALL)
    status, document, progress = measure(
        capsys, tmp_path / "home", model, "--token-ids", "1,2,3", "--workers", "3", "--require-exact"
    )
    assert status == 0, progress
    assert document["max_abs_delta"] == 0.0
    assert (document["top1_agreement"], document["mean_kld"]) == (1.0, 0.0)
    assert (document["positions"], document["moe_layers"], document["ubatches"]) == (3, 2, 2)
    assert document["hook_calls"] == document["moe_layers"] * document["ubatches"]
    assert (document["backbone_expert_bytes"], document["experts_missing_total"]) == (0, 0)
    workers = [each for each in document["processes"] if each["role"] == "worker"]
    assert len({each["pid"] for each in document["processes"]}) == 4
    assert sum(each["n_experts"] for each in workers) == 2 * SMALL.n_expert
    assert max(each["n_experts"] for each in workers) < SMALL.n_expert
    assert "the swarm computes 3 positions" in progress
    assert not list((tmp_path / "home" / "cache").glob("measure-*"))


@pytest.mark.parametrize("expert_type, is_compact", [("Q8_0", True), ("Q4_K_M", False)])
def test_compact_activations_save_bytes_and_change_nothing(
    expert_type: str, is_compact: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the weights take them in another form (Q8_K, of Q4_K) they travel as they are."""
    source = make_qwen3moe(tmp_path / "source.gguf", ModelShape(n_layer=2, n_embd=256, n_ff=256))
    model = quantise(source, tmp_path / "model.gguf", expert_type)
    sent = []
    for options in ([], ["--compact-activations"]):
        arguments = ("--positions", "40", "--workers", "2", "--require-exact", *options)
        status, document, progress = measure(capsys, tmp_path / "home", model, *arguments)
        assert status == 0, progress
        sent.append(document["bytes_per_token_to_holders"])
    assert (sent[1] < 0.35 * sent[0]) if is_compact else (sent[1] == sent[0])


def test_dense_layers_shared_experts_and_quantised_rows_in_uneven_ubatches_are_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ModelShape(n_layer=3, n_embd=256, n_ff=256)
    source = make_deepseek2(tmp_path / "source.gguf", shape)
    model = quantise(source, tmp_path / "model.gguf", "Q4_K_M")
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("[" + ", ".join(str(7 * each % 96) for each in range(45)) + "]\n")
    status, document, progress = measure(
        *(capsys, tmp_path / "home", model, "--tokens-file", str(tokens), "--workers", "2"),
        *("--holders", "2", "--ubatch", "16", "--chunks", "37,5,1x3", "--kv-type", "f32", "--require-exact"),
    )
    assert status == 0, progress
    assert (document["positions"], document["ubatches"], document["moe_layers"]) == (45, 3 + 1 + 3, 2)
    assert document["hook_calls"] == 2 * 7


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def lie_about_sizes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:16] = struct.pack("<Q", 2**40)  # the count of tensors
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut_short, lie_about_sizes, lambda path: path.write_text("no model")])
def test_a_damaged_file_is_refused_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object]
) -> None:
    model = make_qwen3moe(tmp_path / "model.gguf", SMALL)
    damage(model)
    status, document, progress = measure(capsys, tmp_path / "home", model, "--token-ids", "1,2,3")
    assert status == ModelUnusable.exit_code
    assert document == {}
    assert progress.startswith("kvasir-node: ")
    assert "model.gguf" in progress


def test_a_false_hyper_parameter_is_refused_by_the_name_of_the_file_and_for_llama_cpps_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_qwen3moe(tmp_path / "model.gguf", SMALL)
    data = bytearray(model.read_bytes())
    key = b"qwen3moe.attention.head_count"
    value = data.index(key + struct.pack("<I", 4)) + len(key) + 4
    data[value : value + 4] = struct.pack("<I", SMALL.n_head * 2)
    model.write_bytes(data)
    status, document, progress = measure(capsys, tmp_path / "home", model, "--token-ids", "1,2,3")
    assert status == ModelUnusable.exit_code
    assert document == {}
    sentence = progress.splitlines()[-1]
    assert sentence.startswith(f"kvasir-node: {model} cannot be used: llama.cpp could not load")
    assert "has wrong shape" in sentence


def test_damaged_files_of_the_store_are_mended_before_they_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_qwen3moe(tmp_path / "model.gguf", SMALL)
    home = tmp_path / "home"
    arguments = ("--token-ids", "1,2,3", "--require-exact")
    status, _, progress = measure(capsys, home, model, *arguments)
    assert status == 0, progress
    for name, tensor in (("reference.gguf", "blk.1.ffn_up_exps.weight"), ("backbone.gguf", "output.weight")):
        (path,) = (home / "cache" / "models").glob(f"*/{name}")
        (found,) = (each for each in read_gguf(path).tensors if each.name == tensor)
        with path.open("r+b") as file:
            file.seek(found.offset)
            file.write(bytes(found.size_bytes))
    status, document, progress = measure(capsys, home, model, *arguments)
    assert status == 0, progress
    assert document["max_abs_delta"] == 0.0


def test_a_model_without_experts_or_without_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_dense(tmp_path / "model.gguf", SMALL)
    status, _, progress = measure(capsys, tmp_path / "home", model, "--token-ids", "1")
    assert status == ModelUnusable.exit_code
    assert "Mixture" in progress
    status, _, progress = measure(capsys, tmp_path / "home", tmp_path / "none.gguf", "--token-ids", "1")
    assert status == ModelUnusable.exit_code


@pytest.mark.parametrize(
    "arguments",
    [
        ("--token-ids", "1,2", "--positions", "3"),
        ("--token-ids", ""),
        ("--token-ids", "1,x"),
        ("--positions", "0"),
        ("--positions", "4", "--chunks", "3"),
        ("--positions", "4", "--holders", "2"),
        ("--tokens-file", "/nowhere"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    status, _, _ = measure(capsys, tmp_path / "home", tmp_path / "never-opened.gguf", *arguments)
    assert status == UsageError.exit_code


def test_a_token_outside_the_vocabulary_is_a_mistake_of_the_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_qwen3moe(tmp_path / "model.gguf", SMALL)
    status, _, progress = measure(capsys, tmp_path / "home", model, "--token-ids", "1,96")
    assert status == UsageError.exit_code
    assert "96" in progress


def test_a_short_benchmark_gives_every_figure_and_equal_logits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_qwen3moe(tmp_path / "model.gguf", SMALL)
    arguments = ["bench", "--model", str(model), "--rounds", "1", "--tokens", "2", "--json"]
    assert main(["--home", str(tmp_path / "home"), *arguments]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["max_abs_delta"] == 0.0
    assert (document["n_rounds"], document["rows_retried"]) == (1, 0)
    for name in ("decode_ratio", "decode_ratio_2_workers", "prefill_ratio_2_workers", "cpu_ms_per_token"):
        assert document[name] > 0
    assert isinstance(document["layer_call_overhead_us"], float)
    assert document["backbone_rss_bytes"] > 0
    rows_bytes = 4 * SMALL.n_embd * SMALL.n_layer
    one, two = (document["wire_bytes_per_token"][mode] for mode in ("1 worker", "2 workers"))
    assert one["sent"] > rows_bytes
    assert one["received"] > SMALL.n_expert_used * rows_bytes
    assert two["received"] >= one["received"]
    assert not [field for field in document if "rpc" in field]
    assert set(document["rounds"][0]) == {"reference", "1 worker", "2 workers"}
    assert len(document["rounds"][0]["1 worker"]["decode_us"]) == 2
    assert "round 1 of 1" in captured.err


def test_partial_sums_save_bytes_and_are_equivalent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the last layer answer with sums, one worker's exactly; with rows in Q8_0 or without."""
    shape = ModelShape(n_layer=3, n_embd=256, n_ff=256, n_expert=16, n_expert_used=4)
    model = quantise(make_qwen3moe(tmp_path / "source.gguf", shape), tmp_path / "model.gguf", "Q8_0")
    received = {}
    for options in ([], ["--partial-sums"], ["--partial-sums", "--compact-activations"]):
        arguments = ("--positions", "40", "--workers", "2", "--kv-type", "f32", *options)
        status, document, progress = measure(capsys, tmp_path / "home", model, *arguments)
        assert status == 0, progress
        assert document["partial_sums"] is bool(options)
        assert document["hook_calls"] == document["moe_layers"] * document["ubatches"]
        assert document["mean_kld"] < 1e-5
        received[tuple(options)] = document["bytes_per_token_from_holders"]
    rows, *sums = received.values()
    assert sums[0] == sums[1]
    assert sums[0] < 0.75 * rows
    # What one worker adds up is what llama.cpp adds up.
    arguments = ("--positions", "40", "--require-exact", "--partial-sums")
    status, document, progress = measure(capsys, tmp_path / "home", model, *arguments)
    assert status == 0, progress
    assert document["bytes_per_token_from_holders"] < 0.6 * rows
