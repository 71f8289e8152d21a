"""The expert kernel on any device that the installed llama.cpp has: CUDA, ROCm, Vulkan, Metal, OpenCL, ...

Everything but the device is that of `ggml_cpu`, whose class of arithmetic this need not be: what a device's
sums and roundings are, the probe says, and for each batch class anew. A device that does not compute with a
shard's weights is told when they are loaded. It refuses to know how devices are built in.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir_node.ggml_devices import ANY_DEVICE, worker_device
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.native_library import load
from kvasir_proto.manifest import ModelManifest, ShardSet


class GgmlDeviceKernel(GgmlCpuKernel):
    """A shard's experts in a device's memory. See `port.ExpertKernel`."""

    backend = "ggml-device"

    def __init__(
        self,
        manifest: ModelManifest,
        shard: ShardSet,
        read: Callable[[str, int], bytes | bytearray | memoryview],
        device: str = ANY_DEVICE,
        threads: int = 1,
    ) -> None:
        """Load `shard` on the device that `device` means. `threads` count where that is the processor.

        Raises `ConfigurationInvalid` where there is none, and else as `GgmlCpuKernel` does.
        """
        self._device = worker_device(device)
        super().__init__(manifest, shard, read, threads)

    def _create(self, threads: int, n_expert: int) -> int | None:
        return load().kernel_create_on(self._device.address, threads, n_expert)
