"""One daemon per home: a lock that dies with its holder.

Two daemons with one identity would be two nodes with one name, and would tear each other's state. The lock
is `flock` on a file that is never removed (removing it would let two daemons each lock a file of that
name), and the kernel drops it however the holder ends, so no stale lock is ever to be cleaned up. It knows
nothing of daemons.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Final

from kvasir_node.durable_file import unwritable
from kvasir_node.small_file import read_small_file
from kvasir_proto.errors import AlreadyRunning, ConfigurationInvalid

_FILE_SIZE_MAX: Final = 64


class HomeLock:
    """A context manager that holds the lock of a home while its body runs.

    Entering raises `AlreadyRunning` when another process holds it, and `ConfigurationInvalid` when the file
    cannot be opened or its file system has no locks, `DiskFull` when it has no room.
    The file then names the holder's process id. Processes started by the holder do not inherit the lock.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def __enter__(self) -> HomeLock:
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationInvalid(f"cannot open the lock {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = holder_of(self._path)
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise ConfigurationInvalid(f"cannot lock {self._path}: {error.strerror}") from error
            named = "another process" if holder is None else f"process {holder}"
            raise AlreadyRunning(
                f"{named} runs a node in {self._path.parent} already: stop it, or use another --home"
            ) from None
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise unwritable(f"cannot write the lock {self._path}", error) from error
        self._descriptor = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock at `path` now; of a lock that cannot be looked at, nobody does."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(descriptor)
    return False


def holder_of(path: Path) -> int | None:
    """The process id written in the lock file at `path`; None if there is none.

    It may be that of a holder long gone: the file says who held the lock last, only taking it says whether
    it is held.
    """
    try:
        text = read_small_file(path, _FILE_SIZE_MAX).decode("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() else None
