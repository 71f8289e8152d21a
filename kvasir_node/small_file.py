"""Small files, read whole: what is no file is not waited for, and what is larger than it may be is not read.

A name in a home can be a pipe, where reading waits for ever, or a device without an end, which fills the
memory. One place, so that none of the files that a person can reach is forgotten. What is in a file, and what
it means that it cannot be read, is for the caller to say.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular_file(path: Path) -> BufferedReader:
    """The file, to be read. Raises `OSError`, also for what is no regular file, without waiting for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_small_file(path: Path, size_bytes_max: int) -> bytes:
    """The whole file. Raises `OSError`, also for what is no regular file or larger (`EFBIG`)."""
    with open_regular_file(path) as file:
        data = file.read(size_bytes_max + 1)
    if len(data) > size_bytes_max:
        raise OSError(errno.EFBIG, f"it is larger than {size_bytes_max} bytes", str(path))
    return data
