"""Files of our own in a model's directory: how they are opened, begun to be hashed, and complained about.

Nobody else may read them, and none is written through a link that somebody put there. What they hold, and
when it counts, is the affair of whoever writes them.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvasir_node.model.byte_ranges import PIECE_SIZE_BYTES
from kvasir_proto.errors import ModelUnusable


def private(path: str, flags: int) -> int:
    """An opener for `open`: for this user alone, and through no link."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def unwritable(path: Path, error: OSError) -> ModelUnusable:
    """What is said where the file system refuses."""
    return ModelUnusable(f"{path} cannot be written: {error.strerror or error}")


def hasher_of_start(path: Path, size_bytes: int) -> hashlib._Hash:
    """A SHA-256 hasher that has been given the file's first bytes, or all where it has fewer."""
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while size_bytes:
            piece = file.read(min(size_bytes, PIECE_SIZE_BYTES))
            if not piece:
                break
            hasher.update(piece)
            size_bytes -= len(piece)
    return hasher
