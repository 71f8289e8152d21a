"""`models`: taking a file in and listing what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.cli.invocation import call

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
