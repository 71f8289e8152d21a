"""The model that a measurement is about: a file, one of this home, the demo's, or a random one."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvasir_node.backbone.trial import try_backbone_file
from kvasir_node.bench.test_model import TestModelShape, size_bytes_of, write_test_model
from kvasir_node.cli.output import progress_on_stderr
from kvasir_node.locations import Locations
from kvasir_node.model.store import SPARE_BYTES, ModelStore, StoredModel
from kvasir_proto.errors import ModelUnusable


def prepare_reference(stored: StoredModel) -> None:
    """Make or verify the file that the single process reads, with progress. Raises `ModelUnusable`."""
    with progress_on_stderr("preparing the single process's model") as progress:
        stored.reference_path(progress)


def random_model(locations: Locations, shape: TestModelShape, name: str) -> StoredModel:
    """A random test model, from the cache or made now. Raises `ModelUnusable` when there is no space."""
    locations.prepare()
    size_bytes = size_bytes_of(shape)
    path = locations.cache / f"{name}-{shape.seed}.gguf"
    if not path.exists() or path.stat().st_size != size_bytes:
        # The model, the single process's copy of it, and the backbone file beside them.
        needed_bytes = 2 * size_bytes + (size_bytes >> 3) + SPARE_BYTES
        free_bytes = shutil.disk_usage(locations.cache).free
        if free_bytes < needed_bytes:
            raise ModelUnusable(
                f"the random model takes {needed_bytes >> 20} MiB in {locations.cache}, where "
                f"{free_bytes >> 20} MiB are free: make room, or name a model with --model"
            )
        with progress_on_stderr("making the model") as progress:
            write_test_model(path, shape, progress)
    return stored_model(locations, str(path))


def stored_model(locations: Locations, model: str) -> StoredModel:
    """The model to measure, verified: a file, taken into a store in the cache, or one that this home has.

    Raises `ModelUnusable`.
    """
    locations.prepare()
    path = Path(model)
    if path.suffix != ".gguf" and not path.exists():
        stored = ModelStore(locations.models).get(model)
        with progress_on_stderr("checking the model") as progress:
            stored.verified_backbone_path(progress)
        return stored
    with progress_on_stderr("reading the model") as progress:
        return ModelStore(locations.cache / "models").add(path, progress, try_backbone_file)
