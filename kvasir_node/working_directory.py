"""Directories of one command's own, gone when it ends, and at the latest when the next one starts.

A command that is killed cannot clean up behind itself. So each such directory has a lock that dies with its
owner, and whoever makes the next one removes those whose lock nobody holds. A directory gets the name that is
looked for only once its lock is held: there is no moment in which it seems left behind. What is kept in one
is not known here.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from kvasir_node.home_lock import HomeLock, is_locked

_OWNER: Final = ".owner"
_NAMED: Final = re.compile(r"(demo|measure)-[a-z0-9_]{8}", re.ASCII)


@contextlib.contextmanager
def working_directory(parent: Path, purpose: Literal["demo", "measure"]) -> Iterator[Path]:
    """A directory in `parent` that only this user can enter, removed at the end with all that is in it.

    Those that killed commands left in `parent` are removed first; one that is in use never is.
    """
    _remove_left(parent)
    unnamed = Path(tempfile.mkdtemp(prefix=f".{purpose}-", dir=parent))
    directory = unnamed.with_name(unnamed.name.removeprefix("."))
    try:
        with HomeLock(unnamed / _OWNER):
            unnamed.rename(directory)
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    finally:
        shutil.rmtree(unnamed, ignore_errors=True)  # where there was no room for its lock


def _remove_left(parent: Path) -> None:
    """Remove the directories whose owner is gone; what cannot be removed is left to the next one."""
    for each in parent.iterdir():
        if _NAMED.fullmatch(each.name) and not each.is_symlink() and not is_locked(each / _OWNER):
            shutil.rmtree(each, ignore_errors=True)
