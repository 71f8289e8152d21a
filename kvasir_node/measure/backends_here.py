"""Every backend that can compute experts on this machine, by name, for the measurements to compare.

Decides what counts as a backend of its own: each kernel that a worker can be told to use, on each device it
finds, and numpy in the arithmetics that show where differences come from. What is emulated, because numpy or
a compiler imitates another machine's sums, says so. Apart from `kernels/choice.py`, which makes what one name
means. It refuses to know rows and gates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, get_args

from kvasir_node.certification.synthetic_model import MakeKernel
from kvasir_node.ggml_devices import list_devices
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.host_builds import built_hosts
from kvasir_node.kernels.liars import LYING_KERNELS
from kvasir_node.kernels.opencl import Accumulator as OpenClSums
from kvasir_node.kernels.opencl import OpenClKernel
from kvasir_node.kernels.opencl_devices import OpenClDevice, devices_seen_by_child
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.errors import ConfigurationInvalid, UsageError
from kvasir_proto.limits import Kernel

ALL: Final = "all"
EXACT: Final = "reference-as-ggml"
"""Sums in float64, rows rounded as the reference class rounds them: what every backend of it is held to."""

_EMULATED_KERNELS: Final = ("emulated-f16",)
_WITH_DEVICES: Final = "opencl"
_ON_GGML_DEVICES: Final = "ggml-device"
_PLATFORMS: Final = {"portable computing language": "pocl", "intel(r) opencl": "intel"}


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compute experts. `emulated` says that numbers are imitated, not the machine's own."""

    name: str
    emulated: bool
    make: MakeKernel


def backends_here(
    threads: int = 1,
    *,
    say: Callable[[str], None] = lambda text: None,
    ask_devices: Callable[[], Sequence[OpenClDevice]] = devices_seen_by_child,
    ask_hosts: Callable[[], Mapping[Kernel, str]] = built_hosts,
) -> tuple[Backend, ...]:
    """All of them, those that workers use first. ``say`` is told what is not here, and why."""
    try:
        devices = ask_devices()
    except ConfigurationInvalid as error:
        say(f"no OpenCL backend: {error}")
        devices = ()
    found: list[Backend] = []
    hosts = ask_hosts()
    for name in get_args(Kernel):
        if hosts.get(name):
            say(f"no backend {name}: {hosts[name]}")
        elif name == _WITH_DEVICES:
            found += [_on_device(device, devices, OpenClSums.F32, threads) for device in devices]
        elif name == _ON_GGML_DEVICES:
            found += [_on_ggml_device(each.name, threads) for each in list_devices() if each.kind != "cpu"]
        elif name not in LYING_KERNELS:
            found.append(Backend(name, name in _EMULATED_KERNELS, _named(name, threads)))
    found += [
        Backend(EXACT, True, _in_numpy(Arithmetic.AS_GGML)),
        Backend("reference-q8_0-rows", True, _in_numpy(Arithmetic.AS_GGML, "q8_0")),
        Backend("reference-f64", False, _in_numpy(Arithmetic.FLOAT64)),
        Backend("reference-f32", False, _in_numpy(Arithmetic.FLOAT32)),
    ]
    for device in devices:
        found += [_on_device(device, devices, sums, threads) for sums in (OpenClSums.F16, OpenClSums.MIXED)]
    return tuple(found)


def choose_backends(wanted: str, here: Sequence[Backend]) -> tuple[Backend, ...]:
    """Those that a comma-separated list names, or all. Raises `UsageError` for a name that is not here."""
    if wanted.strip() == ALL:
        return tuple(here)
    by_name = {each.name: each for each in here}
    names = [part.strip() for part in wanted.split(",")]
    unknown = next((name for name in names if name not in by_name), None)
    if unknown is not None:
        raise UsageError(f"there is no backend {unknown!r} here: there are {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _named(name: Kernel, threads: int) -> MakeKernel:
    return lambda manifest, shard, read: make_kernel(name, manifest, shard, read, threads)


def _on_ggml_device(device: str, threads: int) -> Backend:
    make: MakeKernel = partial(make_kernel, _ON_GGML_DEVICES, threads=threads, device=device)
    return Backend(f"ggml-{device.lower()}", False, make)


def _in_numpy(arithmetic: Arithmetic, activations: str | None = None) -> MakeKernel:
    return lambda manifest, shard, read: ReferenceKernel(manifest, shard, read, arithmetic, None, activations)


def _on_device(
    device: OpenClDevice, devices: Sequence[OpenClDevice], sums: OpenClSums, threads: int
) -> Backend:
    """Named after the platform, and its number too where a platform has several."""
    platform = device.platform.casefold()
    platform = _PLATFORMS.get(platform) or (platform.split() or ["unnamed"])[0]
    twins = [each for each in devices if each.platform == device.platform]
    name = f"opencl-{platform}" + (f"-{device.number}" if len(twins) > 1 else "")
    if sums is not OpenClSums.F32:
        name += f"-{sums.value.casefold()}-sums"
    is_own = sums is OpenClSums.F32 or device.has_f16
    number = str(device.number)
    return Backend(
        name,
        not is_own,
        lambda manifest, shard, read: OpenClKernel(
            manifest, shard, read, device=number, threads=threads, accumulator=sums
        ),
    )
