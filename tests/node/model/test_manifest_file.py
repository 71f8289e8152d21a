"""A manifest that has gone while the daemon ran: the engine that is started next says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_node.model.manifest_file import read_manifest
from kvasir_node.model.store import DEMO_MODEL, ModelStore
from kvasir_proto.errors import ModelUnusable


def test_a_manifest_that_has_gone_or_is_damaged_is_made_again_as_the_sentence_says(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    stored = store.add(DEMO_MODEL)
    assert read_manifest(stored.manifest_path) == stored.manifest
    stored.manifest_path.write_bytes(b"damaged")
    with pytest.raises(ModelUnusable, match=r"manifest\.msgpack is damaged: .*'kvasir-node models add FILE'"):
        read_manifest(stored.manifest_path)
    stored.manifest_path.unlink()
    with pytest.raises(
        ModelUnusable, match=r"manifest\.msgpack cannot be read: No such file .*'kvasir-node models add"
    ):
        read_manifest(stored.manifest_path)
    store.add(DEMO_MODEL)
    assert read_manifest(stored.manifest_path) == stored.manifest
