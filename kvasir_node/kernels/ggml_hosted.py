"""ggml's CPU kernel of another instruction set, in a process of its own, under an emulator if need be.

Everything but the arithmetic is that of `ggml_cpu`: which tensor goes where, which program fits, what a
refusal is called. It refuses to know what is on the pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.kernel_host import CALL_TIMEOUT_S, KernelHost
from kvasir_proto.limits import Kernel
from kvasir_proto.manifest import ModelManifest, ShardSet


class GgmlHostedKernel(GgmlCpuKernel):
    """A shard's experts in the memory of a kernel host. See `port.ExpertKernel`.

    When the host is lost, every call is `EngineFailed` from then on.
    """

    def __init__(
        self,
        manifest: ModelManifest,
        shard: ShardSet,
        read: Callable[[str, int], bytes | bytearray | memoryview],
        kernel: Kernel,
        command: Sequence[str],
        threads: int = 1,
        call_timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Start ``command``, which is a host for ``kernel``, and load the shard into it.

        Raises as `GgmlCpuKernel` and `KernelHost` do.
        """
        self.backend = kernel
        self._host = KernelHost(command, call_timeout_s=call_timeout_s)
        try:
            super().__init__(manifest, shard, read, threads, self._host)
        except BaseException:
            self._host.close()
            raise

    @property
    def features(self) -> str:
        """What ggml says that the host was compiled for."""
        return self._host.features
