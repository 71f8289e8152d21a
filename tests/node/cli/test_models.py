"""`models`: taking a file in and listing what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.model.store import ModelStore
from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.cli.invocation import call
from tests.node.model.misbehaving_server import serving

pytestmark = [pytest.mark.loopback, pytest.mark.slow]


def test_a_model_is_added_listed_and_noticed_when_its_file_is_gone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    empty = call("models", "list", "--json", home=home)
    assert empty.document["models"] == []
    assert "models add FILE" in call("models", "list", home=home).out

    path = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    added = call("models", "add", str(path), "--json", home=home)
    model = added.document["model"]
    assert (model["name"], model["arch"], model["n_expert"]) == ("tiny", "qwen3moe", 8)
    assert model["source_exists"] is True

    path.unlink()
    listed = call("models", "list", "--json", home=home).document["models"]
    assert listed == [model | {"source_exists": False}]
    for_people = call("models", "list", home=home)
    assert "(gone)" in for_people.out
    assert for_people.err == ""


def test_progress_goes_to_standard_error(tmp_path: Path) -> None:
    path = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    outcome = call("models", "add", str(path), home=tmp_path / "home")
    assert "hashing: 100 %" in outcome.err
    assert "hashing" not in outcome.out


def test_a_damaged_model_is_named_on_standard_error(tmp_path: Path) -> None:
    path = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    home = tmp_path / "home"
    model = call("models", "add", str(path), "--json", home=home).document["model"]
    (home / "models" / model["digest"] / "manifest.msgpack").write_bytes(b"no")
    listed = call("models", "list", "--json", home=home)
    assert (listed.status, listed.document["models"]) == (0, [])
    assert f"{model['digest']}/manifest.msgpack is damaged" in listed.err
    assert "models add FILE" in listed.err


def test_a_model_is_pulled_shown_and_pulled_elsewhere_with_its_manifest(
    tmp_path: Path,
) -> None:
    path = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    saved = tmp_path / "tiny.manifest"
    with serving(path) as server:
        url = server.url(path.name).url
        pulled = call("models", "pull", url, "--json", home=tmp_path / "home")
        model = pulled.document["model"]
        assert (model["name"], model["source"]) == ("tiny", url)
        assert model["fetched_expert_bytes"] == model["expert_bytes"] > 0
        assert "fetching: 100 %, 0 of 0 MiB" in pulled.err

        shown = call("models", "show", "tiny", "--save", str(saved), "--json", home=tmp_path / "home")
        described = shown.document["model"]
        assert described.items() >= model.items()
        assert {len(each["sha256"]) for each in described["tensors"]} == {1, 8}
        assert f"{model['digest']}" in call("models", "show", "tiny", home=tmp_path / "home").out

        elsewhere = call(
            "models", "pull", url, "--manifest", str(saved), "--json", home=tmp_path / "elsewhere"
        )
    assert elsewhere.document["model"] == model | {"fetched_expert_bytes": 0}


def test_what_cannot_be_pulled_ends_with_its_status(tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert call("models", "pull", "ftp://host/model.gguf", home=home).status == 2
    assert call("models", "pull", "tiny.gguf", home=home).status == 2
    not_gguf = tmp_path / "model.gguf"
    not_gguf.write_bytes(b"no model" * 100)
    with serving(not_gguf) as server:
        refused = call("models", "pull", server.url("model.gguf").url, home=home)
        assert (refused.status, "not a GGUF file" in refused.sentence) == (7, True)
        missing = call("models", "pull", server.url("other.gguf").url, home=home)
        assert (missing.status, "status 404" in missing.sentence) == (7, True)
        broken = call("models", "pull", server.url("model.gguf").url, "--manifest", str(not_gguf), home=home)
        assert (broken.status, "is no manifest" in broken.sentence) == (7, True)


def test_a_shard_is_fetched_verified_and_let_go_of(tmp_path: Path) -> None:
    path = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=2))
    home = tmp_path / "home"
    with serving(path) as server:
        url = server.url(path.name).url
        assert call("models", "pull", url, "--no-experts", home=home).status == 0
        shard = call("models", "shard", "tiny", "0-1:2-3", "1:7", "--json", home=home)
        assert shard.document["shard"]["n_experts"] == 5
        assert "fetching: 100 %" in shard.err
        directory = Path(shard.document["shard"]["directory"])
        damaged = next(each for each in sorted(directory.rglob("7")))
        damaged.write_bytes(bytes(damaged.stat().st_size))
        verified = call("models", "verify", "tiny", "--json", home=home)
        assert verified.status == 0
        assert verified.document["model"]["damaged_experts"] == [f"expert 7 of blk.1.{damaged.parent.name}"]
        assert not damaged.exists()
        server.files.clear()
        fails = call("models", "shard", "tiny", "1:7", home=home)
        assert fails.status == 7
        assert "status 404" in fails.err
        elsewhere = call("models", "shard", "tiny", "1:7", "--from", str(path), home=home)
        assert (elsewhere.status, damaged.exists()) == (0, True)
    assert "MiB of experts removed" in call("models", "rm", "tiny", "--experts", home=home).out
    assert list(directory.rglob("7")) == []
    assert call("models", "rm", "tiny", home=home).status == 0
    assert call("models", "list", "--json", home=home).document["models"] == []
    assert path.exists()


@pytest.mark.parametrize("shard", ["", "x", "0-", "2", "0-2", "0:8", "0:3-2", "1-0", "0:0-8", "9" * 30])
def test_a_shard_that_names_no_experts_is_a_wrong_call(tmp_path: Path, shard: str) -> None:
    path = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=2))
    home = tmp_path / "home"
    ModelStore(home / "models").add(path)
    assert call("models", "shard", "tiny", shard, home=home).status == 2
    assert call("models", "shard", "tiny", home=home).status == 2


def test_a_local_file_that_was_damaged_is_found(tmp_path: Path) -> None:
    path = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    home = tmp_path / "home"
    model = ModelStore(home / "models").add(path)
    assert call("models", "verify", "tiny", home=home).status == 0
    tensor = model.manifest.tensor("blk.0.ffn_down_exps.weight")
    data = bytearray(path.read_bytes())
    data[tensor.expert_range(5)[0]] ^= 1
    path.write_bytes(data)
    outcome = call("models", "verify", "tiny", home=home)
    assert outcome.status == 7
    assert "expert 5 of blk.0.ffn_down_exps.weight" in outcome.err
