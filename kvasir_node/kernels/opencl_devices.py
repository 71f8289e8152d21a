"""The OpenCL devices of this machine, and which of them `engine.kernel_device` means.

Asking loads every driver that is installed, some of which bring a compiler and threads of their own. So a
process that has other work has a child of its own ask (`devices_seen_by_child`, which starts this module);
engines that compute ask themselves. PyOpenCL is optional, and its absence is told like that of a device.
It refuses to know kernels and models.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

from kvasir_node.driver_child import devices_told_by, tell_devices
from kvasir_proto.errors import ConfigurationInvalid
from kvasir_proto.limits import as_sentence

DeviceKind: TypeAlias = Literal["gpu", "accelerator", "cpu", "other"]

ANY_DEVICE: Final = "auto"
"""The best kind of device there is, and of those the first."""

CHILD_TIMEOUT_S: Final = 60.0
"""How long drivers may take to say what they have; loading several compilers takes seconds on a slow disk."""

NAME_LENGTH_MAX: Final = 64
"""As `kvasir_proto.limits.Word` has it."""

_KINDS: Final[tuple[DeviceKind, ...]] = ("gpu", "accelerator", "cpu", "other")
"""From the kind that is taken first."""
_NUMBER_DIGITS_MAX: Final = 2
_HOW_TO_GET: Final = "docs/how-to/opencl.md"
_NO_PLATFORM: Final = -1001
"""What the loader says where no driver is installed (CL_PLATFORM_NOT_FOUND_KHR)."""


@dataclass(frozen=True, slots=True)
class OpenClDevice:
    """One device, as its driver describes it. ``number`` is its place in the list."""

    number: int
    name: str
    platform: str
    driver: str
    kind: DeviceKind
    memory_bytes: int
    has_f16: bool
    """It computes in F16 by itself (`cl_khr_fp16`)."""

    @property
    def word(self) -> str:
        """The name, as long as capability records have room for one."""
        return as_sentence(self.name)[:NAME_LENGTH_MAX] or "unnamed"


def import_pyopencl() -> Any:
    """The module. Raises `ConfigurationInvalid` where it is not installed or cannot be loaded."""
    try:
        import pyopencl
    except ImportError as error:
        raise ConfigurationInvalid(
            f"OpenCL needs PyOpenCL, which is not installed here ({error}): see {_HOW_TO_GET}"
        ) from error
    return pyopencl


def handles() -> list[Any]:
    """PyOpenCL's own objects, in the order of `list_devices`. Raises `ConfigurationInvalid`."""
    cl = import_pyopencl()
    found = []
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        if error.code == _NO_PLATFORM:
            return []
        raise ConfigurationInvalid(f"OpenCL cannot be used here: {error}") from error
    for platform in platforms:
        try:
            found += platform.get_devices()
        except cl.Error:  # a driver without hardware, beside others that have some
            continue
    return found


def list_devices() -> tuple[OpenClDevice, ...]:
    """Every device that this process's drivers show. Raises `ConfigurationInvalid` without PyOpenCL."""
    return tuple(_described(number, handle) for number, handle in enumerate(handles()))


def _described(number: int, handle: Any) -> OpenClDevice:
    types = import_pyopencl().device_type
    flags: dict[DeviceKind, int] = {
        "gpu": types.GPU,
        "accelerator": types.ACCELERATOR,
        "cpu": types.CPU,
    }
    return OpenClDevice(
        number=number,
        name=" ".join(handle.name.split()),
        platform=" ".join(handle.platform.name.split()),
        driver=" ".join(handle.driver_version.split()),
        kind=next((kind for kind, flag in flags.items() if handle.type & flag), "other"),
        memory_bytes=int(handle.global_mem_size),
        has_f16="cl_khr_fp16" in handle.extensions.split(),
    )


def choose_device(wanted: str, devices: Sequence[OpenClDevice]) -> OpenClDevice:
    """The device that ``wanted`` means: `auto`, a number in the list, or a part of one device's name.

    Raises `ConfigurationInvalid` where there is none, or a part fits several that have different names.
    """
    if not devices:
        raise ConfigurationInvalid(f"there is no OpenCL device here: see {_HOW_TO_GET}")
    if wanted == ANY_DEVICE:
        return min(devices, key=lambda each: (_KINDS.index(each.kind), each.number))
    if wanted.isdecimal() and len(wanted) <= _NUMBER_DIGITS_MAX:
        fit = [each for each in devices if each.number == int(wanted)]
    else:
        fit = [each for each in devices if wanted.casefold() in each.name.casefold()]
        fit = [each for each in fit if each.name.casefold() == wanted.casefold()] or fit
    if len({each.name for each in fit}) != 1:
        there = ", ".join(f"{each.number} {each.name!r}" for each in devices)
        what = "is not here" if not fit else "is not one device"
        raise ConfigurationInvalid(f"the OpenCL device {wanted!r} {what}: there are {there}")
    return fit[0]


def devices_seen_by_child() -> tuple[OpenClDevice, ...]:
    """`list_devices` as a process of its own sees them: a driver that crashes or hangs is an error here.

    Raises `ConfigurationInvalid`.
    """
    # PoCL leaves a file in its cache whenever it is asked for anything.
    with tempfile.TemporaryDirectory(prefix="kvasir-") as cache:
        told = devices_told_by(__name__, "OpenCL", CHILD_TIMEOUT_S, {"POCL_CACHE_DIR": cache})
    return tuple(OpenClDevice(**each) for each in told)


def _answer() -> dict[str, object]:
    try:
        return {"devices": [asdict(each) for each in list_devices()]}
    except ConfigurationInvalid as error:
        return {"error": str(error)}


if __name__ == "__main__":
    tell_devices(_answer)
