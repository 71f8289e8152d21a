"""Which kernel a name stands for: the one place that makes kernels of what a person or a message chose.

Apart from the kernels because a worker, `certify` and the measurements must mean the same by a name. It
refuses to know files: bytes come from a function, as for every kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from kvasir_node.kernels.accumulators import F16_SUMS
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.ggml_device import GgmlDeviceKernel
from kvasir_node.kernels.ggml_hosted import GgmlHostedKernel
from kvasir_node.kernels.host_builds import HOST_BUILDS, host_command
from kvasir_node.kernels.liars import LYING_KERNELS, LyingKernel
from kvasir_node.kernels.opencl import OpenClKernel
from kvasir_node.kernels.opencl_devices import ANY_DEVICE
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.limits import Kernel
from kvasir_proto.manifest import ModelManifest, ShardSet


def make_kernel(
    name: Kernel,
    manifest: ModelManifest,
    shard: ShardSet,
    read: Callable[[str, int], bytes | bytearray | memoryview],
    threads: int = 1,
    device: str = ANY_DEVICE,
) -> ExpertKernel:
    """The shard's experts in the kernel of this name. `read` gives one expert's slice of a tensor, verified.

    Kernels that have no threads of their own ignore `threads`, those that have no choice of devices `device`.
    Raises as the kernel does.
    """
    if name == "opencl":
        return OpenClKernel(manifest, shard, read, device=device, threads=threads)
    if name == "ggml-device":
        return GgmlDeviceKernel(manifest, shard, read, device, threads)
    if name == "emulated-f16":
        return ReferenceKernel(manifest, shard, read, Arithmetic.AS_GGML, F16_SUMS)
    if name in LYING_KERNELS:
        return LyingKernel(LYING_KERNELS[name], manifest, shard, read, threads)
    if name in HOST_BUILDS:
        return GgmlHostedKernel(manifest, shard, read, name, host_command(name), threads)
    return GgmlCpuKernel(manifest, shard, read, threads=threads)
