"""How a daemon takes in a model by its manifest: from its address, a told one, or without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.app import Node, open_home
from kvasir_node.config import Configuration
from kvasir_node.locations import locate
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.model.model_url import ModelUrl
from kvasir_proto.errors import ModelUnusable
from tests.model_makers import ModelShape, make_qwen3moe
from tests.node.model.misbehaving_server import serving

pytestmark = [pytest.mark.loopback, pytest.mark.slow]


def node(directory: Path, configuration: Configuration) -> Node:
    return Node(open_home(locate(directory / "home", {}), configuration))


async def test_an_address_that_a_member_tells_is_followed_past_those_of_no_use(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    other = make_qwen3moe(tmp_path / "other.gguf", ModelShape(n_layer=1, n_expert=4))
    manifest = build_manifest(source)
    daemon = node(tmp_path, Configuration(models_follow_addresses=True))
    take = daemon._manifest_taker()
    assert take is not None
    with serving(source, other) as server:
        urls = [server.url(each.name).url for each in (other, source)]
        with pytest.raises(ModelUnusable, match=r"other\.gguf"):
            await take(manifest, (urls[0],))
        with pytest.raises(ModelUnusable, match="no member tells"):
            await take(manifest, (str(source), "file:///etc/passwd"))
        await take(manifest, (str(source), *urls))
    (stored,) = daemon._home.models.list()
    assert (stored.source, stored.manifest.digest()) == (ModelUrl(urls[1]), manifest.digest())


async def test_what_the_user_configured_counts_and_not_what_members_tell(tmp_path: Path) -> None:
    source = make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1))
    told = "http://127.0.0.1:1/tiny.gguf"
    with serving(source) as server:
        configured = Configuration(model=server.url(source.name).url, models_follow_addresses=True)
        take = node(tmp_path, configured)._manifest_taker()
        assert take is not None
        await take(build_manifest(source), (told,))


@pytest.mark.parametrize(
    "configuration, takes",
    [
        (Configuration(), False),
        (Configuration(model="demo"), False),
        (Configuration(model="demo", models_follow_addresses=True), False),
        (Configuration(model="demo", node_ranks=("bulk",)), False),
        (Configuration(models_follow_addresses=True), True),
        (Configuration(node_ranks=("output", "bulk")), True),
    ],
)
def test_nothing_is_followed_or_taken_unasked(
    tmp_path: Path, configuration: Configuration, takes: bool
) -> None:
    assert (node(tmp_path, configuration)._manifest_taker() is not None) == takes


async def test_a_worker_takes_the_manifest_alone_whatever_members_tell(tmp_path: Path) -> None:
    manifest = build_manifest(make_qwen3moe(tmp_path / "tiny.gguf", ModelShape(n_layer=1)))
    daemon = node(tmp_path, Configuration(node_ranks=("output", "bulk"), models_follow_addresses=True))
    take = daemon._manifest_taker()
    assert take is not None
    await take(manifest, ("http://127.0.0.1:1/tiny.gguf",))
    (stored,) = daemon._home.models.list()
    assert stored.source is None
