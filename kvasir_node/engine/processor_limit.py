"""How much of a processor this process may use: the limits of Linux control groups, as containers set them.

A limited process runs at full speed for some milliseconds and then stands still, so that a short measurement
does not see the limit. Here it is read where the system says it. Control groups of both versions are known;
elsewhere, or where nothing is said, there is no limit. It measures nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")


def processors_allowed(groups: Path = _GROUPS, mount: Path = _MOUNT) -> float | None:
    """How many processors' time this process gets at most, such as 0.5; None where nothing limits it."""
    shares: list[float] = []
    for group in _groups_of(groups, mount):
        share = _share_of(group)
        if share is not None:
            shares.append(share)
    return min(shares, default=None)


def _groups_of(groups: Path, mount: Path) -> Iterator[Path]:
    """The directories of this process's groups that can limit processors, and of all groups above them."""
    try:
        lines = groups.read_text().splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        below = [each for each in path.split("/") if each not in ("", "..")]
        roots = [mount, mount / "unified"] if not controllers else [mount / controllers, mount / "cpu"]
        for root in roots:
            for depth in range(len(below) + 1):
                yield root.joinpath(*below[:depth])


def _share_of(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period) if quota != "max" and int(period) > 0 else None
    with contextlib.suppress(OSError, ValueError):
        quota_us = int((group / "cpu.cfs_quota_us").read_text())
        period_us = int((group / "cpu.cfs_period_us").read_text())
        return quota_us / period_us if quota_us > 0 and period_us > 0 else None
    return None
