"""The builds of ggml for other instruction sets that this environment has, and how each is started.

Decides what the names stand for, where their kernel hosts lie (`deploy/kernel-hosts` puts them there) and
which emulator runs those of another machine. Apart from the hosts because a name is known where nothing is
built. It refuses to know what a host says.
"""

from __future__ import annotations

import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvasir_proto.errors import ConfigurationInvalid
from kvasir_proto.limits import Kernel

HOSTS_DIRECTORY: Final = Path(sys.prefix) / "lib" / "kvasir-kernel-hosts"
"""In the environment, so that it goes when that does."""


@dataclass(frozen=True, slots=True)
class HostBuild:
    """ggml's CPU backend for one instruction set. ``machine`` is as `platform.machine()` has it."""

    kernel: Kernel
    machine: str
    what: str


HOST_BUILDS: Final = {
    each.kernel: each
    for each in (
        HostBuild("ggml-neon-v8.6", "aarch64", "ARMv8.6-A with dot products, i8mm and F16 arithmetic"),
        HostBuild("ggml-sse2", "x86_64", "x86-64 with SSE2 and nothing newer"),
        HostBuild("ggml-neon-v8.0", "aarch64", "ARMv8.0-A: NEON in F32"),
        HostBuild("ggml-avx2", "x86_64", "x86-64 with AVX2, FMA, F16C and BMI2"),
    )
}


def host_command(kernel: Kernel, directory: Path = HOSTS_DIRECTORY) -> tuple[str, ...]:
    """What starts the host of this name, under an emulator if it is of another machine.

    Raises `ConfigurationInvalid` where it is not built, or nothing here can run it.
    """
    build = HOST_BUILDS[kernel]
    program = directory / kernel
    if not program.is_file():
        raise ConfigurationInvalid(f"{kernel} is not built here: 'make backends' builds it where it can")
    if build.machine == platform.machine():
        return (str(program),)
    emulators = (f"qemu-{build.machine}", f"qemu-{build.machine}-static")
    emulator = next((found for name in emulators if (found := shutil.which(name))), None)
    if emulator is None:
        raise ConfigurationInvalid(
            f"{kernel} is for {build.machine}, and nothing here runs that: install Debian's qemu-user"
        )
    return (emulator, "-cpu", "max", str(program))


def built_hosts(directory: Path = HOSTS_DIRECTORY) -> dict[Kernel, str]:
    """Each build by name: empty if it can be started here, otherwise why not."""
    reasons: dict[Kernel, str] = {}
    for kernel in HOST_BUILDS:
        try:
            host_command(kernel, directory)
        except ConfigurationInvalid as error:
            reasons[kernel] = str(error)
        else:
            reasons[kernel] = ""
    return reasons
