"""Which kernel computes, on which device, by which build: what a measurement is of, and a report is about.

One place, so that `certify` names what it measured as the daemon names what it measures of itself. It looks
at devices in a child process and loads none of their drivers. It refuses to know models.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

from kvasir_node import ggml_devices
from kvasir_node.certification.kernel_build import backend_libraries, kernel_build
from kvasir_node.kernels.host_builds import HOST_BUILDS, host_command
from kvasir_node.kernels.opencl_devices import ANY_DEVICE, choose_device, devices_seen_by_child
from kvasir_node.telemetry import get_logger
from kvasir_proto.limits import Kernel

log = get_logger()


@dataclass(frozen=True, slots=True)
class KernelInUse:
    """A kernel that this node computes with: its name, what `engine.kernel_device` says, what that device is
    called, and the build.
    """

    kernel: Kernel
    kernel_device: str
    device: str
    build: str


def kernel_in_use(name: Kernel, device: str) -> KernelInUse:
    """The kernel of this name on the device that `engine.kernel_device` means.

    Raises `ConfigurationInvalid` for a device or build that is not there.
    """
    if name == "opencl":
        chosen = choose_device(device, devices_seen_by_child())
        log.info("opencl_device_found", device=chosen.name, platform=chosen.platform, driver=chosen.driver)
        build = kernel_build(f"{chosen.name} {chosen.platform} {chosen.driver}")
        return KernelInUse(name, device, chosen.word, build)
    if name == "ggml-device":
        found = ggml_devices.choose_worker_device(device, ggml_devices.devices_seen_by_child())
        log.info("ggml_device_found", device=found.name, description=found.description)
        return KernelInUse(name, device, found.word, kernel_build(found.word, backend_libraries()))
    if name in HOST_BUILDS:
        build = kernel_build(programs=[each for each in host_command(name) if each.startswith("/")])
        return KernelInUse(name, ANY_DEVICE, HOST_BUILDS[name].machine, build)
    return KernelInUse(name, ANY_DEVICE, platform.machine(), kernel_build())
