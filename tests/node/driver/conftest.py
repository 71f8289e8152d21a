"""The one tiny model that all duties are tested with."""

from __future__ import annotations

import pytest

from kvasir_node.model.store import ModelStore, StoredModel
from tests.model_makers import ModelShape, make_qwen3moe


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> StoredModel:
    """Four layers of eight experts."""
    directory = tmp_path_factory.mktemp("model")
    path = make_qwen3moe(directory / "tiny.gguf", ModelShape(n_layer=4, n_embd=32, n_head=2))
    return ModelStore(directory / "models").add(path)
