"""The OpenCL devices of the machine that runs the tests, and tests that need one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kvasir_node.kernels.opencl_devices import OpenClDevice, devices_seen_by_child
from kvasir_proto.errors import ConfigurationInvalid


@cache
def opencl_devices() -> tuple[tuple[OpenClDevice, ...], str]:
    """Every device, or why there is none."""
    try:
        found = devices_seen_by_child()
    except ConfigurationInvalid as error:
        return (), str(error)
    return found, "" if found else "no OpenCL device here: 'make backends' installs PoCL where it can"


def each_device() -> list[Any]:
    """A parameter for each device, by its number; one that skips with a reason where there is none."""
    devices, reason = opencl_devices()
    if not devices:
        return [pytest.param("0", marks=pytest.mark.skip(reason=reason), id="no-device")]
    return [pytest.param(str(each.number), id=each.platform.replace(" ", "-")) for each in devices]
