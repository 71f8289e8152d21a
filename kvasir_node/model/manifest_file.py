"""The manifest of a stored model, as an engine finds it: control has said where, which may be a while ago.

What has gone or been damaged meanwhile is said with what mends it: an engine's word ends up in `status`,
where nobody can know what a number of the system's means. The store (`store.py`) writes the file.
"""

from __future__ import annotations

from pathlib import Path

from kvasir_node.small_file import read_small_file
from kvasir_proto.errors import ModelUnusable, RemoteProtocolError
from kvasir_proto.manifest import MANIFEST_SIZE_BYTES_MAX, ModelManifest


def read_manifest(path: Path) -> ModelManifest:
    """The manifest in this file. Raises `ModelUnusable`, with the command that makes it again."""
    try:
        return ModelManifest.decode(read_small_file(path, MANIFEST_SIZE_BYTES_MAX))
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
    except RemoteProtocolError as error:
        what = f"is damaged: {error.reason}"
    raise ModelUnusable(f"{path} {what}; 'kvasir-node models add FILE' with the model's file makes it again")


def read_manifest_of_others(path: Path) -> ModelManifest:
    """A manifest that somebody handed over as a file. Raises `ModelUnusable`."""
    try:
        return ModelManifest.decode(read_small_file(path, MANIFEST_SIZE_BYTES_MAX))
    except OSError as error:
        raise ModelUnusable(f"{path} cannot be read: {error.strerror or error}") from error
    except RemoteProtocolError as error:
        raise ModelUnusable(f"{path} is no manifest: {error.reason}") from error
