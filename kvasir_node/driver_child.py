"""A child process that asks drivers what devices they have: one that crashes or hangs is an error here.

The child is a module of this package, run as a program, that prints one JSON object: `devices`, or `error`
with a sentence. What drivers and libraries say meanwhile, on standard output too, is no part of it. Apart
from whoever asks, since there is more than one family of drivers. It refuses to know what a device is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kvasir_proto.errors import ConfigurationInvalid


def devices_told_by(
    module: str, drivers: str, timeout_s: float, environment: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What the child says of each device. ``drivers`` names them in a sentence: "OpenCL". Raises
    `ConfigurationInvalid`.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module],
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env=os.environ | environment,
        )
    except subprocess.TimeoutExpired:
        raise ConfigurationInvalid(
            f"the {drivers} drivers do not say in {timeout_s:g} s what devices they have"
        ) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ConfigurationInvalid(
            f"one of the {drivers} drivers ended the process that asked for its devices (status "
            f"{done.returncode})"
        ) from None
    if "error" in answer:
        raise ConfigurationInvalid(answer["error"])
    devices: list[dict[str, Any]] = answer["devices"]
    return devices


def tell_devices(answer: Callable[[], Mapping[str, object]]) -> None:
    """In the child: print what ``answer`` says, and nothing else."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        out.write(json.dumps(answer()))
