"""The kernel hosts that this machine can run, and tests that need one."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir_node.kernels.host_builds import built_hosts


def each_host() -> list[Any]:
    """A parameter for each build by its name; one that skips with a reason where it cannot be started."""
    return [
        pytest.param(name, id=name, marks=pytest.mark.skip(reason=reason) if reason else ())
        for name, reason in built_hosts().items()
    ]
