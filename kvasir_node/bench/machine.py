"""What a benchmark ran on: figures without their machine mean nothing. Reads the system, changes nothing."""

from __future__ import annotations

import os
import platform
import re
import ssl
from pathlib import Path
from typing import Final

_CPU_INFO: Final = Path("/proc/cpuinfo")
_MEMORY_INFO: Final = Path("/proc/meminfo")


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


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
