"""Files that are either whole or not there, also after a power cut.

Written under a temporary name in the same directory, flushed, put in place in one step, and the directory
flushed too: a fence that could be forgotten or a half-written model would be worse than none. Writing raises
`OSError`; `unwritable` is what it means for a file of the home.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from kvasir_proto.errors import ConfigurationInvalid, DiskFull, KvasirError

PARTIAL_PREFIX: Final = ".partial-"
"""How the names of files that are being written begin."""


def unwritable(failure: str, error: OSError) -> KvasirError:
    """The error for a file of the home that cannot be written: `DiskFull`, or `ConfigurationInvalid`.

    ``failure`` says which file, and is followed by what the system says.
    A full disk is nobody's configuration and may pass; a home that is not ours to write will not.
    """
    no_room = error.errno in (errno.ENOSPC, errno.EDQUOT)
    kind = DiskFull if no_room else ConfigurationInvalid
    return kind(f"{failure}: {error.strerror or error}")


@contextlib.contextmanager
def durable_file(destination: Path, *, keep_existing: bool = False) -> Iterator[BinaryIO]:
    """A file to write that takes the name `destination` when the block ends well, and is gone otherwise.

    Readable by this user only. With `keep_existing` a file that has the name by then stays as it is: of two
    writers at once the first wins, otherwise the last. Raises `OSError`.
    """
    handle, name = tempfile.mkstemp(prefix=PARTIAL_PREFIX, dir=destination.parent)
    partial = Path(name)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: its leftovers stay
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep_existing:
            with contextlib.suppress(FileExistsError):
                destination.hardlink_to(partial)
        else:
            partial.replace(destination)
    finally:
        partial.unlink(missing_ok=True)
    directory = os.open(destination.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_leftovers(directory: Path) -> None:
    """Remove the files that writers began in this directory and were killed over; never one being written.

    A writer holds a lock on its file, which ends with it however it ends. What cannot be removed stays.
    """
    for partial in directory.glob(f"{PARTIAL_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(partial, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                partial.unlink()
            finally:
                os.close(descriptor)
