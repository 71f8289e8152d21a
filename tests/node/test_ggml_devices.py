"""Which device a trunk is put on, and what the installed ggml says of its own."""

from __future__ import annotations

import pytest

from kvasir_node.ggml_devices import (
    GgmlDevice,
    choose_device,
    choose_worker_device,
    devices_seen_by_child,
    list_backends,
    list_devices,
    trunk_device,
)
from kvasir_proto.errors import ConfigurationInvalid

CPU = GgmlDevice("CPU", "", "cpu", 0, 0, 1)
BUILT_IN = GgmlDevice("Vulkan0", "", "integrated gpu", 0, 0, 2)
FIRST = GgmlDevice("Vulkan1", "", "gpu", 0, 0, 3)
SECOND = GgmlDevice("CUDA0", "", "gpu", 0, 0, 4)
BLAS = GgmlDevice("BLAS", "", "accelerator", 0, 0, 5)


@pytest.mark.parametrize(
    "wanted, devices, chosen",
    [
        ("none", [FIRST, CPU], None),
        ("auto", [CPU], None),
        ("auto", [BLAS, CPU], None),
        ("auto", [BUILT_IN, CPU], BUILT_IN),
        ("auto", [BUILT_IN, FIRST, SECOND, CPU], FIRST),
        ("CUDA0", [BUILT_IN, FIRST, SECOND, CPU], SECOND),
        ("vulkan0", [BUILT_IN, FIRST], BUILT_IN),
    ],
)
def test_the_device_that_is_meant(wanted: str, devices: list[GgmlDevice], chosen: GgmlDevice | None) -> None:
    assert choose_device(wanted, devices) is chosen


@pytest.mark.parametrize("wanted", ["CPU", "BLAS", "CUDA1", "Vulkan", ""])
def test_what_is_not_there_or_holds_no_trunk_is_refused_by_name(wanted: str) -> None:
    with pytest.raises(ConfigurationInvalid) as refused:
        choose_device(wanted, [CPU, BLAS, SECOND])
    assert repr(wanted) in str(refused.value)
    assert "CUDA0" in str(refused.value)


@pytest.mark.parametrize(
    "wanted, devices, chosen",
    [
        ("auto", [CPU, BUILT_IN, FIRST], FIRST),
        ("cuda0", [FIRST, SECOND, CPU], SECOND),
        ("CPU", [FIRST, CPU], CPU),
        ("BLAS", [BLAS, CPU], BLAS),
    ],
)
def test_experts_may_be_on_any_device(wanted: str, devices: list[GgmlDevice], chosen: GgmlDevice) -> None:
    assert choose_worker_device(wanted, devices) is chosen


@pytest.mark.parametrize("wanted", ["auto", "none", "CUDA1", ""])
def test_a_device_for_experts_that_is_not_there_is_refused(wanted: str) -> None:
    with pytest.raises(ConfigurationInvalid, match="its devices are CPU, BLAS") as refused:
        choose_worker_device(wanted, [CPU, BLAS])
    assert wanted == "auto" or repr(wanted) in str(refused.value)


def test_a_child_sees_what_this_process_sees() -> None:
    found = devices_seen_by_child()
    assert [(each.name, each.kind, each.description) for each in found] == [
        (each.name, each.kind, each.description) for each in list_devices()
    ]
    assert {each.address for each in found} == {0}
    assert all(0 < len(each.word) <= 64 for each in found)


def test_the_installed_ggml_has_this_processor() -> None:
    (processor,) = [each for each in list_devices() if each.kind == "cpu"]
    assert processor.name == "CPU"
    assert processor.address
    assert processor.memory_total_bytes > 0
    assert not processor.can_hold_trunk
    assert "CPU" in list_backends()


def test_without_a_device_no_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvasir_node.ggml_devices.load_ggml", lambda: pytest.fail("asked"))
    assert trunk_device("none") is None
