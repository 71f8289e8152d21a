"""Which homes' daemons can be a side of a comparison, and what the others are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from kvasir_node.locations import locate
from kvasir_node.measure.live_side import LiveSide, check_backbone
from kvasir_node.measure.sides import home_of
from kvasir_node.model.store import DEMO_MODEL, ModelStore, StoredModel
from kvasir_proto.errors import EngineFailed, KvasirError, NotRunning, UsageError
from tests.node.cli.daemon_twin import twin_daemon


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """The demo model in a store of its own."""
    return ModelStore(tmp_path_factory.mktemp("store")).add(DEMO_MODEL)


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({}, None, ""),
        ({"model": None}, UsageError, "this daemon has no model"),
        (
            {"model": {"name": "other", "digest": "ab" * 32}},
            UsageError,
            r"its swarm serves other \(abababababababab\)",
        ),
        ({"backbone": None}, UsageError, r"has no backbone now \(joining: nobody is there\)"),
        ({"backbone": "somebody"}, UsageError, "name the home of somebody"),
        ({"backbone": ...}, EngineFailed, "the daemon's status cannot be read"),
    ],
)
def test_only_the_backbone_of_that_model_is_asked(
    tmp_path: Path, demo: StoredModel, change: dict[str, object], error: type[KvasirError] | None, said: str
) -> None:
    document: dict[str, object] = {
        "node_id": "me",
        "backbone": "me",
        "state": "joining",
        "reason": "nobody is there",
        "model": {"name": "demo", "digest": demo.digest},
    }
    document = {name: each for name, each in (document | change).items() if each is not ...}
    with twin_daemon(tmp_path, document):
        if error is None:
            trio.run(check_backbone, "live", locate(tmp_path, {}), demo)
        else:
            with pytest.raises(error, match=f"^live: .*{said}|{said}"):
                trio.run(check_backbone, "live", locate(tmp_path, {}), demo)
    with pytest.raises(NotRunning):
        trio.run(check_backbone, "live", locate(tmp_path, {}), demo)


def test_what_the_daemon_refuses_is_told_with_the_sides_name(tmp_path: Path) -> None:
    class NoVocabulary:
        """Nobody tokenises here."""

    side = LiveSide("live:x", locate(tmp_path, {}), NoVocabulary(), tmp_path, 64, is_watched=True)  # type: ignore[arg-type]

    async def ask() -> None:
        await side.evaluate((1, 2), (2,))

    async def generate() -> None:
        await side.greedy((1, 2), 3)

    with twin_daemon(tmp_path, {}):
        with pytest.raises(KvasirError, match="live:x: this is a twin"):
            trio.run(ask)
        with pytest.raises(KvasirError, match="this is a twin"):
            trio.run(generate)


def test_live_means_this_home_or_the_one_it_names(tmp_path: Path) -> None:
    here = locate(tmp_path / "here", {})
    assert home_of("live", here) == here
    assert home_of(f"live:{tmp_path / 'there'}", here).data == tmp_path / "there"
    with pytest.raises(UsageError, match="behind the colon"):
        home_of("live:", here)
