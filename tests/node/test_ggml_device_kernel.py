"""The expert kernel on a device of ggml's: as the CPU kernel where the device is the processor, and refusals.

Devices that compute less than all are the processor's with one function exchanged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvasir_node.ggml_devices import GgmlDevice, list_devices
from kvasir_node.kernels import ggml_device
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.ggml_device import GgmlDeviceKernel
from kvasir_proto.errors import ConfigurationInvalid, EngineFailed, RemoteProtocolError
from kvasir_proto.manifest import ShardSet
from kvasir_proto.program import ExpertProgram
from tests.node.test_ggml_cpu import (
    EVERYTHING,
    N_EXPERT,
    ODD_SHAPES,
    SWIGLU,
    Bench,
    X,
    compute,
    make_bench,
)

SHARD = ShardSet.from_pairs((layer, expert) for layer in (0, 2) for expert in range(N_EXPERT))
LAYOUTS = (
    ([0, 1, 2, 3], [1, 2, 3, 4]),  # a row each
    ([0, 0, 1, 1, 2, 2, 3, 3], [1, 2, 3, 4, 5, 6, 0, 1]),  # slots, in order
    ([0, 1, 2, 3, 3, 0], [6, 5, 4, 3, 2, 1]),  # gathered
)

POINTERS = 17
SUPPORTS_OP = 9
OP_OFFSET = 80
"""Of ggml's device and tensor, as native/src/ggml_abi.h has them."""

GLU, MUL_MAT_ID = 100, 30

Supports = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p)


@pytest.fixture(scope="module")
def odd() -> Bench:
    return make_bench(ODD_SHAPES)


@pytest.mark.parametrize(
    "type_name, program",
    [
        ("f32", SWIGLU),
        ("f32", EVERYTHING),
        ("f16", SWIGLU),
        ("bf16", SWIGLU),
        ("q8_0", SWIGLU),
        ("q4_0", SWIGLU),
    ],
)
def test_on_the_processor_it_is_the_cpu_kernel_bit_for_bit(type_name: str, program: ExpertProgram) -> None:
    shapes = ODD_SHAPES if type_name == "f32" else dict.fromkeys(SWIGLU.suffixes, (256, 256, N_EXPERT))
    bench = make_bench(shapes, type_name)
    inside = bench.kernel()
    device = make_kernel("ggml-device", bench.manifest, SHARD, bench.read, threads=2, device="CPU")
    assert device.backend == "ggml-device"
    assert device.memory_bytes == inside.memory_bytes
    x = np.random.default_rng(1).normal(size=(4, 19 if type_name == "f32" else 256)).astype(np.float32)
    numbers = [each.add_program(program) for each in (device, inside)]
    for rows, experts in (*LAYOUTS, *reversed(LAYOUTS)):  # its memory grows, and is used again
        found = compute(device, numbers[0], x, rows, experts)
        assert (found == compute(inside, numbers[1], x, rows, experts)).all()
    device.close()
    device.close()
    inside.close()


@pytest.mark.parametrize(
    "layer, rows, experts, code",
    [
        (1, [0, 1], [1, 2], "unknown_layer"),
        (2, [0, 1], [1, N_EXPERT], "foreign_expert"),
        (2, [0, 2], [1, 2], "row_out_of_range"),
        (2, [0], [1], "shape_invalid"),
    ],
)
def test_requests_are_refused_as_everywhere(
    odd: Bench, layer: int, rows: list[int], experts: list[int], code: str
) -> None:
    device = GgmlDeviceKernel(odd.manifest, SHARD, odd.read, "CPU")
    number = device.add_program(SWIGLU)
    with pytest.raises(RemoteProtocolError) as raised:
        compute(device, number, X, rows, experts, layer=layer, width_out=21)
    assert raised.value.code == code
    assert np.isfinite(compute(device, number, X, [0, 1], [1, 2])).all()
    device.close()


def test_a_device_that_is_not_there_is_a_wrong_configuration(odd: Bench) -> None:
    with pytest.raises(ConfigurationInvalid, match="no device 'CUDA7'"):
        GgmlDeviceKernel(odd.manifest, SHARD, odd.read, "CUDA7")
    with pytest.raises(EngineFailed, match="8192 threads"):
        GgmlDeviceKernel(odd.manifest, SHARD, odd.read, "CPU", threads=8192)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Make every device one that does not compute an operation."""
    kept: list[object] = []

    def forbid(operation: int) -> None:
        (processor,) = [each for each in list_devices() if each.kind == "cpu"]
        table = (ctypes.c_void_p * POINTERS).from_buffer_copy(
            (ctypes.c_void_p * POINTERS).from_address(processor.address)
        )
        usual = Supports(table[SUPPORTS_OP] or 0)

        def supports(device: int, tensor: int) -> bool:
            asked = ctypes.c_int32.from_address(tensor + OP_OFFSET).value
            return asked != operation and bool(usual(device, tensor))

        exchanged = Supports(supports)
        table[SUPPORTS_OP] = ctypes.cast(exchanged, ctypes.c_void_p).value
        kept.extend((table, exchanged, usual))
        poorer = GgmlDevice("poor", "", "gpu", 0, 0, ctypes.addressof(table))
        monkeypatch.setattr(ggml_device, "worker_device", lambda wanted: poorer)

    yield forbid
    kept.clear()


def test_weights_that_a_device_does_not_multiply_by_are_told_when_they_are_loaded(
    odd: Bench, without: Callable[[int], None]
) -> None:
    without(MUL_MAT_ID)
    with pytest.raises(EngineFailed, match="has type f32, which the device does not multiply by"):
        GgmlDeviceKernel(odd.manifest, SHARD, odd.read)


def test_a_step_that_a_device_does_not_compute_is_never_asked_of_it(
    odd: Bench, without: Callable[[int], None]
) -> None:
    without(GLU)
    device = GgmlDeviceKernel(odd.manifest, SHARD, odd.read)
    with pytest.raises(EngineFailed, match="step 3: the device does not compute GLU"):
        compute(device, device.add_program(SWIGLU), X, [0, 1], [1, 2])
    up = ExpertProgram(SWIGLU.steps[:1], input_per_slot=False)
    assert compute(device, device.add_program(up), X, [0, 1], [1, 2]).shape == (2, 13)
    device.close()
