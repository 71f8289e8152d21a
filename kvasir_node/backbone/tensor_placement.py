"""Where llama.cpp is to put a model's tensors: the devices it may use, and a memory of their own for experts.

Apart from hook and trunk because every way of running a trunk says it in these words: with the hook, plain,
plain with a graphics processor, and with llama.cpp's own RPC backend to compare with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

from kvasir_proto.manifest import EXPERT_TENSOR

# llama.cpp searches for it anywhere in a name, so it says where a name begins and ends.
_EXPERT_PATTERN: Final = f"^{EXPERT_TENSOR.pattern}$".encode()
_ALL_LAYERS: Final = -1
_LOAD_MODE_NONE: Final = 0


class _TensorBufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def place_tensors(
    model_params: Any,
    *,
    trunk_device: int | None,
    other_devices: Sequence[int] = (),
    expert_buffer_type: int | None = None,
) -> list[Any]:
    """Change a `llama_cpp.llama_model_params`: no repacked weights, no mmap, and these devices only.

    Everything but the routed experts goes to ``trunk_device``, or stays with the processor; routed experts
    go to ``expert_buffer_type``, or to where the rest of their layer is. ``other_devices`` compute and get no
    tensor by themselves. Addresses are ggml's. The caller keeps the returned objects as long as the model.
    """
    addresses = [*([] if trunk_device is None else [trunk_device]), *other_devices]
    # A list that ends at once means no device; no list would mean all that llama.cpp finds.
    devices = (ctypes.c_void_p * (len(addresses) + 1))(*addresses, None)
    model_params.devices = ctypes.addressof(devices)
    model_params.n_gpu_layers = 0 if trunk_device is None else _ALL_LAYERS
    model_params.use_extra_bufts = False
    model_params.load_mode = _LOAD_MODE_NONE
    kept: list[Any] = [devices]
    if trunk_device is not None:
        # By default llama.cpp would divide the layers among the devices by their free memory.
        import llama_cpp

        shares = (ctypes.c_float * llama_cpp.llama_max_devices())(1.0)
        model_params.tensor_split = shares
        kept.append(shares)
    if expert_buffer_type is not None:
        overrides = (_TensorBufferOverride * 2)(
            _TensorBufferOverride(_EXPERT_PATTERN, expert_buffer_type), _TensorBufferOverride(None, None)
        )
        model_params.tensor_buft_overrides = ctypes.addressof(overrides)
        kept.append(overrides)
    return kept
