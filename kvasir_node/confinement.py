"""The child's end of a process that is fed what strangers wrote: its limits, and how it is asked.

Decides what such a process gives up before it is asked anything: processor time beyond so much for each
request, memory, files and sockets beyond those it has, other processes, writing to a disk. Requests come one
after another: a length and so many bytes on standard input, a length and so many bytes on standard output.
`confined_child` is the other end. What a request means is for its program to say.
"""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from typing import BinaryIO, Final

LENGTH: Final = struct.Struct("<I")
_OPEN_FILES: Final = 3
"""No file or socket has a higher number; those that are open stay so."""


def confine(memory_bytes: int) -> None:
    """Give up what answering does not need. ``memory_bytes`` is all that the process may have."""
    for which, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_AS, memory_bytes),
    ):
        _, hard = resource.getrlimit(which)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(which, (value, value))


def allow_processor_time(seconds: int) -> None:
    """Let one more request be answered; the kernel ends a process that takes longer."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    ends = int(usage.ru_utime + usage.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (ends, hard))


def answer_requests(
    source: BinaryIO,
    sink: BinaryIO,
    answer: Callable[[bytes], bytes],
    request_bytes_max: int,
    processor_time_s: int,
) -> None:
    """Answer until ``source`` ends, each request within so many seconds, or one more, of the processor."""
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        (length,) = LENGTH.unpack(head)
        assert length <= request_bytes_max
        allow_processor_time(processor_time_s)
        body = answer(source.read(length))
        sink.write(LENGTH.pack(len(body)) + body)
        sink.flush()
