"""Writes the whole model again, for the single-process run that a swarm is measured against.

llama.cpp only ever opens files that Kvasir wrote from validated values; this is that file for the reference
run. The bytes of every tensor are checked against the manifest on the way, so both sides of a comparison
have provably the same weights. It decides nothing else: the form is the backbone file's, without holes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvasir_node.model.backbone_file import verify_model_file, write_model_file
from kvasir_node.model.model_url import Location
from kvasir_proto.manifest import ModelManifest


def write_reference_file(
    source: Location,
    manifest: ModelManifest,
    destination: Path,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write the whole model at `source` as `destination`; it appears whole or not at all.

    `on_bytes` is told the size of each piece copied. Raises `ModelUnusable` when the source is not the
    manifest's model any more, or the file cannot be written.
    """
    write_model_file(source, manifest, destination, lambda tensor: True, on_bytes)


def verify_reference_file(
    path: Path, manifest: ModelManifest, on_bytes: Callable[[int], None] | None = None
) -> None:
    """Check that `path` is the whole model of the manifest, reading every byte, experts' too.

    `on_bytes` is told the size of each piece read. Raises `ModelUnusable` otherwise.
    """
    verify_model_file(path, manifest, lambda tensor: True, on_bytes)
