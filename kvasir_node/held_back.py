"""Whether this machine holds its processors back, as its system says: hot, short of power, or by a limit.

Decides which of Linux's files speak of that: the clock that a processor may have below the one it could, and
cooling that is done by being slow. Fans are none of it. A machine that says nothing, such as most virtual
ones, is not known to be either. What a node makes of it is not known here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from kvasir_node.small_file import read_small_file

_SYSTEM: Final = Path("/sys")
_FULL_CLOCK: Final = 0.95
"""Of the highest clock: less of it allowed is held back; governors round."""
_SLOWS_DOWN: Final = re.compile(r"processor|cpu|gpu|devfreq|powerclamp", re.ASCII | re.IGNORECASE)
"""In the type of a cooling device."""
_DEVICES_MAX: Final = 1024
_FILE_BYTES_MAX: Final = 4096


def is_held_back(system: Path = _SYSTEM) -> bool | None:
    """Whether some processor may not be as fast as it could; None where the system says nothing of it."""
    found: list[bool] = []
    for policy in _listed(system / "devices/system/cpu/cpufreq", "policy*"):
        allowed, highest = _number(policy / "scaling_max_freq"), _number(policy / "cpuinfo_max_freq")
        if allowed is not None and highest:
            found.append(allowed < _FULL_CLOCK * highest)
    for device in _listed(system / "class/thermal", "cooling_device*"):
        state = _number(device / "cur_state")
        if state is not None and _SLOWS_DOWN.search(_text(device / "type")):
            found.append(state > 0)  # an idle power clamp says -1
    return any(found) if found else None


def _listed(directory: Path, pattern: str) -> list[Path]:
    try:
        return sorted(directory.glob(pattern))[:_DEVICES_MAX]
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return read_small_file(path, _FILE_BYTES_MAX).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
