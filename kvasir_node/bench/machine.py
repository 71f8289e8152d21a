"""What a benchmark ran on: figures without their machine mean nothing. Reads the system, changes nothing."""

from __future__ import annotations

import os
import platform
import re
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

_CPU_INFO: Final = Path("/proc/cpuinfo")
_MEMORY_INFO: Final = Path("/proc/meminfo")
_ARRAY_BYTES: Final = 256 << 20


def describe_machine() -> dict[str, object]:
    """The machine in JSON's types: processor, cores this process may use, memory in bytes, versions, load."""
    load = os.getloadavg()
    return {
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes("MemTotal"),
        "memory_available_bytes": memory_bytes("MemAvailable"),
        "load_1_min": round(load[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
    }


def cpu_name() -> str:
    """The processor's name as the system tells it; its architecture where it tells none."""
    match = re.search(r"^model name\s*:\s*(.+)$", _text_of(_CPU_INFO), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def cpu_features() -> frozenset[str]:
    """The instruction sets that the system reports, in its own words (`avx2`, `asimd`, ...)."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", _text_of(_CPU_INFO), re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def memory_bytes(field: str) -> int | None:
    """A line of /proc/meminfo (`MemTotal`, `MemAvailable`) in bytes; None where there is none."""
    match = re.search(rf"^{re.escape(field)}:\s*(\d+) kB$", _text_of(_MEMORY_INFO), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def read_bandwidth(seconds: float = 1.0) -> float:
    """Bytes a second that all processors together read from memory: the best of what fits into ``seconds``.

    Each has an array of its own, too large for any cache, and adds up the squares of its F32 numbers.
    """
    n_threads = len(os.sched_getaffinity(0))
    arrays = [np.ones(_ARRAY_BYTES // 4, np.float32) for _ in range(n_threads)]
    best = 0.0
    with ThreadPoolExecutor(n_threads) as threads:
        list(threads.map(_read, arrays))  # starts the threads, touches the pages
        ends = time.monotonic() + seconds
        while time.monotonic() < ends or best == 0.0:
            started = time.perf_counter()
            list(threads.map(_read, arrays))
            best = max(best, n_threads * _ARRAY_BYTES / (time.perf_counter() - started))
    return best


def _read(array: npt.NDArray[np.float32]) -> float:
    return float(np.dot(array, array))


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
