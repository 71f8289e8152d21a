"""What llama.cpp is told about devices and buffer types, read back from its own parameters."""

from __future__ import annotations

import ctypes

import llama_cpp
import pytest

from kvasir_node.backbone.tensor_placement import place_tensors


def devices_of(parameters: object) -> list[int]:
    """The list up to its end; llama.cpp stops at the first null."""
    addresses = ctypes.cast(parameters.devices, ctypes.POINTER(ctypes.c_void_p))  # type: ignore[attr-defined]
    found: list[int] = []
    while address := addresses[len(found)]:
        found.append(address)
    return found


@pytest.mark.parametrize(
    "trunk_device, other_devices, expected, n_gpu_layers",
    [(None, (), [], 0), (None, (7,), [7], 0), (9, (7,), [9, 7], -1), (9, (), [9], -1)],
)
def test_only_the_devices_that_are_named(
    trunk_device: int | None, other_devices: tuple[int, ...], expected: list[int], n_gpu_layers: int
) -> None:
    parameters = llama_cpp.llama_model_default_params()
    kept = place_tensors(parameters, trunk_device=trunk_device, other_devices=other_devices)
    assert parameters.devices, "no list at all would mean every device there is"
    assert devices_of(parameters) == expected
    assert parameters.n_gpu_layers == n_gpu_layers
    assert not parameters.use_extra_bufts
    assert not parameters.tensor_buft_overrides
    assert kept


def test_all_layers_go_to_the_trunks_device() -> None:
    parameters = llama_cpp.llama_model_default_params()
    kept = place_tensors(parameters, trunk_device=9, other_devices=(7,))
    shares = parameters.tensor_split[: llama_cpp.llama_max_devices()]
    assert shares == [1.0] + [0.0] * (len(shares) - 1)
    assert kept


def test_experts_alone_get_the_buffer_type() -> None:
    parameters = llama_cpp.llama_model_default_params()
    kept = place_tensors(parameters, trunk_device=None, expert_buffer_type=5)
    fields = ctypes.cast(parameters.tensor_buft_overrides, ctypes.POINTER(ctypes.c_void_p))
    assert ctypes.string_at(fields[0] or 0).startswith(b"^blk")
    assert (fields[1], fields[2], fields[3]) == (5, None, None)
    assert kept
