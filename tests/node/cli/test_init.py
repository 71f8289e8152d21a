"""`init`: an identity that stays, a swarm that is founded once."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvasir_node.home_lock import HomeLock
from kvasir_node.swarm_files import SwarmFiles
from kvasir_proto.swarm_manifest import open_swarm_manifest
from tests.model_makers import ModelShape, make_dense, make_qwen3moe
from tests.node.cli.invocation import call

pytestmark = [pytest.mark.loopback, pytest.mark.slow]


def test_it_can_be_called_again_and_keeps_the_identity(tmp_path: Path) -> None:
    first = call("init", "--json", home=tmp_path).document
    assert first["node_id"].startswith("12D3KooW")
    assert call("init", "--json", home=tmp_path).document == first
    assert stat.S_IMODE((tmp_path / "identity.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_a_home_that_becomes_private_is_told(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    home.chmod(0o555)
    assert "had mode 555 and has 700 now" in call("init", home=home).err
    assert call("init", home=home).err == ""


def test_what_to_call_next_names_the_home(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    address = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWK99VoVxNE7XzyBwXEzW7xhK7Gpv85r9F3V3fyKSUKPH5"
    assert f"kvasir-node --home '{home}' init --join" in call("init", home=home).out
    assert f"kvasir-node --home '{home}' run\n" in call("init", "--join", address, home=home).out


def test_two_homes_are_two_nodes(tmp_path: Path) -> None:
    ids = {call("init", "--json", home=tmp_path / each).document["node_id"] for each in "ab"}
    assert len(ids) == 2


def test_a_swarm_is_founded_once(tmp_path: Path) -> None:
    model = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    home = tmp_path / "home"
    outcome = call("init", "--found", "--model", str(model), "--json", home=home)
    assert outcome.status == 0
    founded = outcome.document
    assert founded["model"] == "tiny"
    assert len(founded["swarm"]) == 64
    recovery_key = Path(founded["recovery_key_file"])
    assert stat.S_IMODE(recovery_key.stat().st_mode) == 0o600
    again = call("init", "--found", "--model", str(model), home=home)
    assert again.status == 6
    assert "belongs to swarm" in again.sentence
    later = call("init", home=home)
    assert later.status == 0
    assert "This node founded a swarm" in later.out
    assert "--join" not in later.out


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--compact-activations",),
        ("--partial-sums",),
        ("--admission", "invite"),
        ("--electorate", "pinned"),
    ],
)
def test_what_a_swarm_is_founded_with_is_in_its_manifest(tmp_path: Path, options: tuple[str, ...]) -> None:
    model = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    outcome = call("init", "--found", "--model", str(model), *options, home=tmp_path / "home")
    assert outcome.status == 0
    assert ("compact activations out" in outcome.out) is ("--compact-activations" in options)
    assert ("partial sums back (not exact)" in outcome.out) is ("--partial-sums" in options)
    swarm = open_swarm_manifest((tmp_path / "home" / "state" / "swarm-manifest").read_bytes())
    assert swarm.manifest.compact_activations is ("--compact-activations" in options)
    assert swarm.manifest.partial_sums is ("--partial-sums" in options)
    assert swarm.manifest.admission == ("invite" if "--admission" in options else "open")
    assert swarm.manifest.electorate == ("pinned" if "--electorate" in options else "open")
    assert swarm.manifest.certificates == "claimed"


def test_a_home_that_joined_a_swarm_founds_none(tmp_path: Path) -> None:
    model = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    founder, worker = tmp_path / "founder", tmp_path / "worker"
    call("init", "--found", "--model", str(model), home=founder)
    call("init", home=worker)
    SwarmFiles(worker / "state").save_swarm((founder / "state" / "swarm-manifest").read_bytes())
    outcome = call("init", "--found", "--model", str(model), home=worker)
    assert outcome.status == 6
    assert "belongs to swarm" in outcome.sentence


def test_nothing_is_founded_under_a_running_daemon(tmp_path: Path) -> None:
    call("init", home=tmp_path)
    with HomeLock(tmp_path / "lock"):
        assert call("init", "--found", home=tmp_path).status == 4


def cut_short(path: Path) -> Path:
    make_qwen3moe(path, ModelShape(n_layer=1))
    path.write_bytes(path.read_bytes()[:-4096])
    return path


def no_gguf(path: Path) -> Path:
    path.write_bytes(b"not a model at all" * 100)
    return path


def dense(path: Path) -> Path:
    return make_dense(path, ModelShape(n_layer=1))


def absent(path: Path) -> Path:
    return path


@pytest.mark.parametrize("make", [cut_short, no_gguf, dense, absent])
@pytest.mark.parametrize("command", ["init --found --model", "models add"])
def test_a_model_that_cannot_be_used_exits_7_with_a_sentence(
    tmp_path: Path, make: object, command: str
) -> None:
    assert callable(make)
    path = make(tmp_path / "model.gguf")
    outcome = call(*command.split(), str(path), home=tmp_path / "home")
    assert outcome.status == 7
    assert outcome.out == ""
    assert len(outcome.sentence) > 20
    assert SwarmFiles(tmp_path / "home" / "state").load_swarm() is None


def test_a_name_that_is_not_in_the_store_exits_7(tmp_path: Path) -> None:
    outcome = call("init", "--found", "--model", "nosuch", home=tmp_path)
    assert outcome.status == 7
    assert "there is no model 'nosuch'" in outcome.sentence


def test_a_damaged_identity_exits_6(tmp_path: Path) -> None:
    call("init", home=tmp_path)
    (tmp_path / "identity.pem").write_bytes(b"damaged")
    outcome = call("init", home=tmp_path)
    assert outcome.status == 6
    assert "identity.pem is damaged" in outcome.sentence
