"""New files of logits: .npy, mapped into memory, with all their room on the disk from the first moment.

A mapped file with holes in it kills its process (SIGBUS) where the disk is full by the time a hole is
written; room that is taken beforehand gives an error that can be said.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def create_logits(
    path: Path, n_positions: int, n_vocab: int
) -> np.memmap[tuple[int, ...], np.dtype[np.float32]]:
    """A new file of F32 logits [positions, vocabulary], to be filled and flushed.

    Raises `OSError`, and leaves no file, where there is no room for it.
    """
    try:
        shape = (n_positions, n_vocab)
        logits = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return logits
