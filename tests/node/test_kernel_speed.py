"""A kernel's measurement of itself: which experts, which round counts, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from kvasir_node.kernels import speed
from kvasir_node.kernels.speed import (
    CPU_NS_MAX,
    ROUND_NS,
    ROUNDS_MAX,
    TOTAL_NS_MAX,
    measure_row_ns,
    program_like,
)
from kvasir_node.model.model_manifest import build_manifest
from kvasir_proto.limits import Kernel
from tests.model_makers import ModelShape, make_deepseek2, make_gpt_oss, make_qwen3moe
from tests.node.toy_experts import LAYERS, N_EXPERT, ToyKernel, toy_manifest

SHAPE = ModelShape(n_layer=2, n_expert=4, n_embd=32)


@pytest.mark.parametrize("kernel", ["ggml-cpu", "emulated-f16"])
@pytest.mark.parametrize(
    "make", [make_qwen3moe, lambda path: make_deepseek2(path, merged=True), make_gpt_oss]
)
def test_every_kernel_measures_what_models_have(
    tmp_path: Path, make: Callable[[Path], Path], kernel: Kernel
) -> None:
    manifest = build_manifest(make(tmp_path / "model.gguf"))
    assert 0 < measure_row_ns(kernel, manifest, 1) < 1_000_000_000


def test_experts_without_a_gate_are_measured_too() -> None:
    assert measure_row_ns("ggml-cpu", toy_manifest(width=32), 2) > 0


def test_the_program_has_all_products_of_a_layer(tmp_path: Path) -> None:
    for path in (make_qwen3moe(tmp_path / "a", SHAPE), make_deepseek2(tmp_path / "b", merged=True)):
        manifest = build_manifest(path)
        layer = manifest.moe_layers[-1]
        products = {each.tensor for each in program_like(manifest, layer).steps if each.tensor}
        weights = {each.suffix for each in manifest.expert_tensors(layer)}
        assert products == {each for each in weights if each is not None and each.endswith(".weight")}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ToyKernel:
    toy = ToyKernel()
    monkeypatch.setattr(speed, "make_kernel", lambda *_all: toy)
    return toy


class ScriptedClocks:
    """One call after the other takes so long; of that the processor gives a part."""

    def __init__(self, call_times_ns: Iterable[int], cpu_part: float = 1.0) -> None:
        self._times = iter(call_times_ns)
        self._cpu_part = cpu_part
        self._now_ns: int | None = None

    def wall_ns(self) -> int:
        """Each look but the first is the end of a call."""
        self._now_ns = 0 if self._now_ns is None else self._now_ns + next(self._times)
        return self._now_ns

    def cpu_ns(self) -> int:
        return round((self._now_ns or 0) * self._cpu_part)


def measured(call_times_ns: Iterable[int], cpu_part: float = 1.0) -> int:
    clocks = ScriptedClocks(call_times_ns, cpu_part)
    return measure_row_ns("ggml-cpu", toy_manifest(), 1, clock_ns=clocks.wall_ns, cpu_ns=clocks.cpu_ns)


def test_the_fastest_round_counts_a_row_of_it(kernel: ToyKernel) -> None:
    slow, fast = ROUND_NS // 2, ROUND_NS // 4
    times = [*[slow] * 20, *[fast] * 4, *[slow] * 10_000]
    assert measured(times) == fast // 2  # two rows a call
    assert kernel.is_closed


def test_a_round_has_all_its_calls(kernel: ToyKernel) -> None:
    few, many = [ROUND_NS], [ROUND_NS // 10] * 9 + [ROUND_NS]
    assert measured([ROUND_NS, *(few + many) * 500]) == round((ROUND_NS // 10 * 9 + ROUND_NS) / 10 / 2)


@pytest.mark.parametrize(
    "round_ns, cpu_part, n_rounds",
    [
        (ROUND_NS, 1.0, min(ROUNDS_MAX, CPU_NS_MAX // ROUND_NS)),
        (ROUND_NS, 0.0, ROUNDS_MAX),  # another device computes
        (4 * ROUND_NS, 1.0, CPU_NS_MAX // (4 * ROUND_NS)),  # a slow kernel
        (10 * ROUND_NS, 0.1, ROUNDS_MAX),  # a busy machine
        (100 * ROUND_NS, 0.001, TOTAL_NS_MAX // (100 * ROUND_NS)),
    ],
)
def test_it_ends_after_so_many_rounds_so_much_processor_time_or_so_long(
    kernel: ToyKernel, round_ns: int, cpu_part: float, n_rounds: int
) -> None:
    measured([round_ns] * n_rounds, cpu_part)
    assert len(kernel.asked) == n_rounds + 1


def test_a_machine_that_leaves_it_hardly_anything_is_measured_all_the_same(kernel: ToyKernel) -> None:
    """What took 200 ms of wall time alone ended before any round that was not disturbed."""
    disturbed, free = 50 * ROUND_NS, ROUND_NS
    assert measured([disturbed] * 10 + [free] + [disturbed] * 200, 0.02) == free // 2


def test_where_a_call_takes_long_one_counts(kernel: ToyKernel) -> None:
    assert measured([TOTAL_NS_MAX]) == TOTAL_NS_MAX // 2
    assert len(kernel.asked) == 2, "one call to warm up and one that counts"


def test_calls_take_turns_through_the_experts_of_one_layer(kernel: ToyKernel) -> None:
    measured([ROUND_NS] * ROUNDS_MAX)
    assert {layer for layer, _, _ in kernel.asked} == {LAYERS[0]}
    assert {tuple(experts) for _, _, experts in kernel.asked} == {(0, 1), (2, 3), (4, 5)}
    assert N_EXPERT == 6
