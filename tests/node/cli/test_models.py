"""`models`: taking a file in and listing what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

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
