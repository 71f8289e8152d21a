"""Which files this process has read whole and found right, so that none is read again for nothing.

A file of a model is compared with its digests before it is used, which takes as long as reading and hashing
it does. Here alone is decided when that may be left out: when the very file (device, inode, size, times of
change) was found right before by this process. Nothing is remembered on disk: a disk that damages a file in
silence is found out at the next start. What right means is for the callers to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvasir_proto.errors import ModelUnusable


class VerifiedFiles:
    """The files found right so far; one entry for each path that was asked about. Threads may share one."""

    def __init__(self) -> None:
        self._identities: dict[Path, tuple[str, tuple[int, ...]]] = {}

    def check(self, path: Path, digest: str, verify: Callable[[], None]) -> None:
        """Call `verify`, unless it has passed for this very file and the manifest of this `digest` before.

        A file that changes meanwhile is not remembered. Raises what `verify` does, or `ModelUnusable` when
        the file is not there.
        """
        before = (digest, identity_of([path]))
        if self._identities.get(path) == before:
            return
        verify()
        if (digest, identity_of([path])) == before:
            self._identities[path] = before

    def remember(self, path: Path, digest: str) -> None:
        """Take the file as found right: it was checked while it was written."""
        self._identities[path] = (digest, identity_of([path]))


def identity_of(paths: Sequence[Path]) -> tuple[int, ...]:
    """What changes when somebody writes to one of the files, or puts another in its place.

    Raises `ModelUnusable` when one cannot be looked at.
    """
    identity: tuple[int, ...] = ()
    for each in paths:
        try:
            status = each.stat()
        except OSError as error:
            raise ModelUnusable(f"{each} cannot be read: {error.strerror or error}") from error
        times = (status.st_mtime_ns, status.st_ctime_ns)
        identity += (status.st_dev, status.st_ino, status.st_size, *times)
    return identity
