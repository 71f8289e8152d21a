"""Files of logits on a disk that has no room for them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from kvasir_node.logits_file import create_logits


def test_a_new_file_takes_its_room_at_once(tmp_path: Path) -> None:
    path = tmp_path / "logits.npy"
    logits = create_logits(path, 100, 1000)
    assert path.stat().st_blocks * 512 >= 4 * 100 * 1000
    logits[:] = 1.5
    del logits
    assert np.load(path).sum() == 150_000


def test_a_disk_without_room_is_an_error_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        create_logits(tmp_path / "logits.npy", 100, 1000)
    assert list(tmp_path.iterdir()) == []
