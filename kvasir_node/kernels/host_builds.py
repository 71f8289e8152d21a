"""The builds of ggml for other instruction sets that this environment has, and how each is started.

Decides what the names stand for, where their kernel hosts lie (`deploy/kernel-hosts` puts them there) and
which emulator runs those of another machine. A program that is not the one that was built under its name is
none of them: what a node certifies by it would be another's arithmetic. Apart from the hosts because a name
is known where nothing is built. It refuses to know what a host says.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvasir_node.small_file import read_small_file
from kvasir_proto.errors import ConfigurationInvalid
from kvasir_proto.limits import Kernel

HOSTS_DIRECTORY: Final = Path(sys.prefix) / "lib" / "kvasir-kernel-hosts"
"""In the environment, so that it goes when that does."""
RECORD_SUFFIX: Final = ".sha256"
"""Beside each program: the digest of what was built under its name, in hexadecimal digits."""
_RECORD_SIZE_BYTES_MAX: Final = 128


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

    Raises `ConfigurationInvalid` where it is not built, is another program than was built under its name, or
    nothing here can run it.
    """
    build = HOST_BUILDS[kernel]
    program = directory / kernel
    if not program.is_file():
        raise ConfigurationInvalid(f"{kernel} is not built here: 'make backends' builds it where it can")
    if not _is_as_built(program):
        raise ConfigurationInvalid(
            f"{program} is not what was built under that name: 'make backends' builds it again"
        )
    if build.machine == platform.machine():
        return (str(program),)
    emulators = (f"qemu-{build.machine}", f"qemu-{build.machine}-static")
    emulator = next((found for name in emulators if (found := shutil.which(name))), None)
    if emulator is None:
        raise ConfigurationInvalid(
            f"{kernel} is for {build.machine}, and nothing here runs that: install Debian's qemu-user"
        )
    return (emulator, "-cpu", "max", str(program))


def _is_as_built(program: Path) -> bool:
    """Whether this is what `deploy/kernel-hosts` built under its name."""
    record = program.with_name(program.name + RECORD_SUFFIX)
    try:
        with program.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        return read_small_file(record, _RECORD_SIZE_BYTES_MAX).decode("ascii").strip() == found
    except (OSError, UnicodeDecodeError):
        return False


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
