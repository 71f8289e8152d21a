"""The one ctypes module: finds our native library and ggml, and proves that they fit.

Decides which ggml is *the* ggml of this process (the one that llama_cpp loaded, never a second copy), and
refuses to go on, with exit status 8, when it is not the version our declarations were written for. Everything
else in Kvasir calls native code through the typed functions here; `native/include/kvasir_native.h` is the
same list in C. It refuses to know what a model, a shard or a swarm is.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any, Final, cast

from kvasir_proto.errors import IncompatibleVersion
from kvasir_proto.program import PROGRAM_STEPS_MAX

NATIVE_ABI: Final = 3
"""`KVASIR_NATIVE_ABI` of the header this module mirrors."""

LAYER_DONE: Final = 0
LAYER_FAILED: Final = -1
LAYER_ABORTED: Final = 1

PROGRAM_FLAT_SIZE_BYTES_MAX: Final = 32 * PROGRAM_STEPS_MAX

_ERROR_SIZE_BYTES: Final = 512

_LIBRARY_NAMES: Final = {
    "linux": (b"libggml-base.so.0", b"libggml-cpu.so.0", b"libggml.so.0"),
    "android": (b"libggml-base.so.0", b"libggml-cpu.so.0", b"libggml.so.0"),
    "darwin": (b"libggml-base.0.dylib", b"libggml-cpu.0.dylib", b"libggml.0.dylib"),
}

AbortCallback = ctypes.CFUNCTYPE(None, c_char_p)
"""C's view of what ggml calls before it ends the process: with the place in its source, and what failed."""

LayerCallback = ctypes.CFUNCTYPE(c_int32, c_void_p)
"""C's view of a layer callback: address of a `kvasir_layer_call` in, one of the `LAYER_` codes out."""


class NativeLibrary:
    """Our library, bound to the process's ggml. Every address is an integer; every call releases the GIL.

    The functions do what the header says of the C function of the same name, and check as little.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.abi: int = library.kvasir_native_abi()
        self.ggml_version: str = _function(library, "native_ggml_version", c_char_p)().decode()

        self.hook_create: Callable[[Any], int | None] = _function(
            library, "hook_create", c_void_p, LayerCallback
        )
        self.hook_claim_sums: Callable[[int, Any, int], int] = _function(
            library, "hook_claim_sums", c_int32, c_void_p, POINTER(c_int32), c_int32
        )
        self.hook_destroy: Callable[[int], int] = _function(library, "hook_destroy", c_int32, c_void_p)
        self.hook_device: Callable[[int], int] = _function(library, "hook_device", c_void_p, c_void_p)
        self.hook_buffer_type: Callable[[int], int] = _function(
            library, "hook_buffer_type", c_void_p, c_void_p
        )
        self.hook_calls: Callable[[int], int] = _function(library, "hook_calls", c_int64, c_void_p)
        self.hook_rows_unfilled: Callable[[int], int] = _function(
            library, "hook_rows_unfilled", c_int64, c_void_p
        )
        self._hook_program = _function(
            library, "hook_program", c_int32, c_void_p, c_int32, c_char_p, POINTER(c_int32)
        )
        self._hook_take_error = _function(library, "hook_take_error", None, c_void_p, c_char_p, c_size_t)

        self.kernel_create: Callable[[int, int], int | None] = _function(
            library, "kernel_create", c_void_p, c_int32, c_int32
        )
        self.kernel_destroy: Callable[[int], None] = _function(library, "kernel_destroy", None, c_void_p)
        self.kernel_add_layer: Callable[[int, int, Any, int], int] = _function(
            library, "kernel_add_layer", c_int32, c_void_p, c_int32, POINTER(c_int32), c_int32
        )
        self.kernel_add_tensor: Callable[[int, int, int, int, Any, int], int] = _function(
            library,
            "kernel_add_tensor",
            c_int32,
            *(c_void_p, c_int32, c_int32, c_int32, POINTER(c_int64), c_int32),
        )
        self.kernel_set_expert: Callable[[int, int, int, int, Any, int], int] = _function(
            library, "kernel_set_expert", c_int32, c_void_p, c_int32, c_int32, c_int32, c_void_p, c_size_t
        )
        self.kernel_memory_bytes: Callable[[int], int] = _function(
            library, "kernel_memory_bytes", c_int64, c_void_p
        )
        self.kernel_add_program: Callable[[int, int, bytes, int], int] = _function(
            library, "kernel_add_program", c_int32, c_void_p, c_int32, c_char_p, c_int32
        )
        self._kernel_bind = _function(
            library, "kernel_bind", c_int32, c_void_p, c_int32, c_int32, POINTER(c_int32), POINTER(c_int32)
        )
        self.kernel_compute: Callable[[int, int, int, int, int, int, int, int, int], int] = _function(
            library,
            "kernel_compute",
            c_int32,
            *(c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p),
        )
        self._kernel_error = _function(library, "kernel_error", None, c_void_p, c_char_p, c_size_t)

        self.pack_call: Callable[[int, bool, int, int, int, int, int, int | None, int, int, int], int] = (
            _function(
                library,
                "pack_call",
                c_int32,
                *(c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_int32, c_int32),
                *(c_void_p, c_int32, c_void_p, c_void_p),
            )
        )
        self.expand_q8_0: Callable[[int, int, int], None] = _function(
            library, "expand_q8_0", None, c_void_p, c_int64, c_void_p
        )
        self.is_expected_reply: Callable[[int, int, int, int], int] = _function(
            library, "is_expected_reply", c_int32, c_void_p, c_uint64, c_uint64, c_int32
        )
        self.scatter_rows: Callable[[int, int, int, int, int], int] = _function(
            library, "scatter_rows", c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p
        )
        self.weighted_sums: Callable[[int, int, int, int, int, int, int], int] = _function(
            library,
            "weighted_sums",
            c_int32,
            *(c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p),
        )
        self.add_sums: Callable[[int, int, int, int, int, int], int] = _function(
            library, "add_sums", c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p
        )

    def pass_by(self) -> Callable[[int, int, int, int, int], int]:
        """The function of C. Looked up when it is asked for, since it came without another ABI."""
        try:
            found: Callable[[int, int, int, int, int], int] = _function(
                self._library, "pass_by", c_int32, c_void_p, c_void_p, c_int32, c_void_p, c_void_p
            )
        except AttributeError:
            raise IncompatibleVersion(
                "the native library was built before it counted rows: run the installation again"
            ) from None
        return found

    def kernel_create_on(self, device: int, threads: int, n_expert: int) -> int | None:
        """As in C. Looked up when it is asked for, since it came without another ABI."""
        try:
            create = _function(self._library, "kernel_create_on", c_void_p, c_void_p, c_int32, c_int32)
        except AttributeError:
            raise IncompatibleVersion(
                "the native library was built before it knew devices: run the installation again"
            ) from None
        handle: int | None = create(device, threads, n_expert)
        return handle

    def hook_program(self, hook: int, index: int) -> tuple[bytes, bool] | None:
        """Program `index`: its flat steps, and whether every slot has an input row; None past the end."""
        steps = ctypes.create_string_buffer(PROGRAM_FLAT_SIZE_BYTES_MAX)
        per_slot = c_int32()
        n_steps = self._hook_program(hook, index, steps, ctypes.byref(per_slot))
        return None if n_steps < 0 else (steps.raw[: 32 * n_steps], bool(per_slot.value))

    def hook_take_error(self, hook: int) -> str:
        """Why the last failed graph was refused, once; empty when there is nothing to tell."""
        return _text(self._hook_take_error, hook)

    def kernel_bind(self, kernel: int, layer: int, index: int) -> tuple[int, int, int]:
        """(status, width of an input row, width of an output row)."""
        width_in, width_out = c_int32(), c_int32()
        status = self._kernel_bind(kernel, layer, index, ctypes.byref(width_in), ctypes.byref(width_out))
        return status, width_in.value, width_out.value

    def kernel_error(self, kernel: int) -> str:
        """A sentence about the kernel's last failed call."""
        return _text(self._kernel_error, kernel)


class GgmlLibrary:
    """The few functions of ggml itself that tell of its devices, and of its end.

    Addresses are integers, never None for 0.
    """

    def __init__(self, base: ctypes.CDLL, cpu: ctypes.CDLL, registry: ctypes.CDLL) -> None:
        self.backend_count: Callable[[], int] = _named(registry, "ggml_backend_reg_count", c_size_t)
        self.backend_at: Callable[[int], int] = _named(registry, "ggml_backend_reg_get", c_void_p, c_size_t)
        self._backend_name = _named(base, "ggml_backend_reg_name", c_char_p, c_void_p)
        self.device_count: Callable[[], int] = _named(registry, "ggml_backend_dev_count", c_size_t)
        self.device_at: Callable[[int], int] = _named(registry, "ggml_backend_dev_get", c_void_p, c_size_t)
        self.device_kind: Callable[[int], int] = _named(base, "ggml_backend_dev_type", c_int32, c_void_p)
        self.cpu_buffer_type: Callable[[], int] = _named(cpu, "ggml_backend_cpu_buffer_type", c_void_p)
        self.device_of_registry: Callable[[int, int], int] = _named(
            base, "ggml_backend_reg_dev_get", c_void_p, c_void_p, c_size_t
        )
        self.set_abort_callback: Callable[[Any], object] = _named(
            base, "ggml_set_abort_callback", c_void_p, AbortCallback
        )
        self._device_name = _named(base, "ggml_backend_dev_name", c_char_p, c_void_p)
        self._device_description = _named(base, "ggml_backend_dev_description", c_char_p, c_void_p)
        self._device_memory = _named(
            base, "ggml_backend_dev_memory", None, c_void_p, POINTER(c_size_t), POINTER(c_size_t)
        )

    def backend_name(self, backend: int) -> str:
        """What ggml calls the backend: `CPU`, `CUDA`, `ROCm`, `Vulkan`, `MTL`, ..."""
        return cast("bytes", self._backend_name(backend)).decode(errors="replace")

    def device_name(self, device: int) -> str:
        """What llama.cpp's options call the device: `CPU`, `CUDA0`, `Vulkan0`, ..."""
        return cast("bytes", self._device_name(device)).decode(errors="replace")

    def device_description(self, device: int) -> str:
        """The device as its driver calls it."""
        return cast("bytes", self._device_description(device)).decode(errors="replace")

    def device_memory(self, device: int) -> tuple[int, int]:
        """(free, total) memory in bytes, as the driver tells; 0 where it does not."""
        free, total = c_size_t(), c_size_t()
        self._device_memory(device, ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    return _named(library, f"kvasir_{name}", result, *arguments)


def _named(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    function = library[name]
    function.restype = result
    function.argtypes = arguments
    return cast("Callable[..., Any]", function)


def _text(read: Callable[..., Any], handle: int) -> str:
    buffer = ctypes.create_string_buffer(_ERROR_SIZE_BYTES)
    read(handle, buffer, len(buffer))
    return buffer.value.decode(errors="replace")


@cache
def load() -> NativeLibrary:
    """The native library, loaded and proved once a process. Raises `IncompatibleVersion`.

    Imports llama_cpp, which loads ggml: only processes that compute should call this.
    """
    names = _LIBRARY_NAMES.get(sys.platform)
    if names is None:
        raise IncompatibleVersion(f"the native library is not made for {sys.platform}")
    # Its import loads the libraries that `names` are looked up in.
    import llama_cpp  # noqa: F401

    library = ctypes.CDLL(_library_path())
    abi: int = library.kvasir_native_abi()
    if abi != NATIVE_ABI:
        raise IncompatibleVersion(
            f"the native library has ABI {abi}, this version of Kvasir needs {NATIVE_ABI}: "
            "run the installation again"
        )
    bind = _function(library, "native_bind", c_int32, c_char_p, c_char_p, c_char_p, c_char_p, c_size_t)
    error = ctypes.create_string_buffer(_ERROR_SIZE_BYTES)
    if bind(*names, error, len(error)) != 0:
        raise IncompatibleVersion(error.value.decode(errors="replace"))
    native = NativeLibrary(library)
    _require_one_ggml(_function(library, "native_count_ggml", c_int32)())
    return native


class RpcClient:
    """The client library of llama.cpp's RPC backend. Where anything goes wrong it ends the process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.add_server: Callable[[bytes], int | None] = _named(
            library, "ggml_backend_rpc_add_server", c_void_p, c_char_p
        )
        self.buffer_type: Callable[[bytes, int], int] = _named(
            library, "ggml_backend_rpc_buffer_type", c_void_p, c_char_p, c_uint32
        )


def load_rpc_client(path: str) -> RpcClient:
    """Load llama.cpp's RPC client into the process's ggml. Raises `IncompatibleVersion`.

    It finds the ggml that is there by the name it was linked to; one linked to another brings a second copy.
    """
    load()
    try:
        client = RpcClient(ctypes.CDLL(path))
    except (OSError, AttributeError) as error:
        raise IncompatibleVersion(f"llama.cpp's RPC client library does not fit: {error}") from None
    self_check()
    return client


@cache
def load_ggml() -> GgmlLibrary:
    """The process's ggml, proved first. Raises `IncompatibleVersion`."""
    load()
    # RTLD_NOLOAD finds what is loaded and brings in no second copy.
    base, cpu, registry = (
        ctypes.CDLL(name.decode(), mode=os.RTLD_NOLOAD | os.RTLD_NOW) for name in _LIBRARY_NAMES[sys.platform]
    )
    return GgmlLibrary(base, cpu, registry)


def self_check() -> None:
    """Prove that native library, llama.cpp and ggml fit together. Raises `IncompatibleVersion` otherwise."""
    native = load()
    # Something may have brought a second ggml in since the library was loaded.
    _require_one_ggml(native._library.kvasir_native_count_ggml())


def _require_one_ggml(count: int) -> None:
    """Two copies have two registries and two sets of state: pointers of one mean nothing to the other."""
    if count > 1:
        raise IncompatibleVersion(
            f"{count} copies of ggml are loaded in this process; Kvasir needs exactly one "
            "(llama_cpp._ggml must not be imported)"
        )


def _library_path() -> str:
    spec = importlib.util.find_spec("kvasir_node._native")
    if spec is None or spec.origin is None:
        raise IncompatibleVersion("the native library is not built: run the installation again")
    return spec.origin
