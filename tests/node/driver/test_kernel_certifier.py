"""When a node measures its kernels, what it makes of several, and when it does so again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvasir_node.driver.kernel_certifier import RENEW_AFTER, KernelCertifier
from kvasir_node.kernel_in_use import KernelInUse
from kvasir_node.model.store import StoredModel
from kvasir_proto.errors import EngineFailed
from kvasir_proto.instants import in_seconds
from kvasir_proto.messages.engine import CertifyKernel, EngineFault
from tests.node.driver.twins import (
    MemoryMeasurements,
    TwinEngine,
    TwinEngines,
    World,
    node_key,
    until,
    wall_time,
)
from tests.proto.small_swarm import found

GGML = KernelInUse("ggml-cpu", "auto", "x86_64", "build")
OPENCL = KernelInUse("opencl", "0", "a device", "build and driver")


class Certifying:
    """A certifier, an engine for it, and what it said."""

    def __init__(
        self, model: StoredModel, *kernels: KernelInUse, store: MemoryMeasurements | None = None
    ) -> None:
        self.store = store or MemoryMeasurements()
        self.n_noted = 0
        self.is_held_back: bool | None = None
        self.certifier = KernelCertifier(
            kernels=kernels or (GGML,),
            n_threads=1,
            model=model,
            store=self.store,
            wall_time=wall_time,
            is_held_back=lambda: self.is_held_back,
            note_certified=self._note,
        )

    def _note(self) -> None:
        self.n_noted += 1


async def start_engine(nursery: trio.Nursery, model: StoredModel, directory: Path) -> TwinEngine:
    engines = TwinEngines(World(nursery, model, directory), node_key(0), lambda: found(node_key(0)).digest)
    await engines(nursery, "worker", 1)
    return engines.last


async def test_a_kernel_is_measured_once_and_known_after_a_restart(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        twin = await start_engine(nursery, model, tmp_path)
        first = Certifying(model)
        await first.certifier.recall()
        assert first.certifier.is_needed
        assert first.certifier.measured is None
        await first.certifier.certify(twin.engine)
        await first.certifier.certify(twin.engine)
        assert (twin.count(CertifyKernel), first.n_noted) == (1, 1)
        again = Certifying(model, store=first.store)
        await again.certifier.recall()
        assert again.certifier.measured == first.certifier.measured
        await again.certifier.certify(twin.engine)
        assert (twin.count(CertifyKernel), again.n_noted) == (1, 0)
        nursery.cancel_scope.cancel()


CHANGED: dict[str, KernelInUse] = {
    "kernel": KernelInUse("emulated-f16", "auto", "x86_64", "build"),
    "choice of device": KernelInUse("ggml-cpu", "1", "x86_64", "build"),
    "device": KernelInUse("ggml-cpu", "auto", "aarch64", "build"),
    "build or driver": KernelInUse("ggml-cpu", "auto", "x86_64", "another"),
}


@pytest.mark.parametrize("what", CHANGED)
async def test_another_kernel_device_or_build_is_measured_anew(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, what: str
) -> None:
    async with trio.open_nursery() as nursery:
        twin = await start_engine(nursery, model, tmp_path)
        first = Certifying(model)
        await first.certifier.certify(twin.engine)
        changed = Certifying(model, CHANGED[what], store=first.store)
        await changed.certifier.recall()
        assert changed.certifier.is_needed
        nursery.cancel_scope.cancel()


async def test_what_has_aged_is_measured_again_while_the_node_serves_and_at_its_start(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        twin = await start_engine(nursery, model, tmp_path)
        running = Certifying(model)
        await running.certifier.certify(twin.engine)
        before = running.certifier.measured_at
        nursery.start_soon(running.certifier.keep_certified, twin.engine)
        await trio.sleep(in_seconds(RENEW_AFTER) - 10)
        fresh = Certifying(model, store=running.store)
        await fresh.certifier.recall()
        assert not fresh.certifier.is_needed
        assert twin.count(CertifyKernel) == 1
        twin.arithmetic = {"accumulation": "F16"}
        twin.refusals[CertifyKernel] = EngineFault(None, "not_certified", "no memory", 1)
        await trio.sleep(20)
        assert twin.count(CertifyKernel) == 2
        assert running.certifier.measured_at == before, "what cannot be measured again keeps what it had"
        late = Certifying(model, store=running.store)
        await late.certifier.recall()
        assert late.certifier.is_needed, "too old to start with"
        twin.refusals.clear()
        await trio.sleep(3600)
        await until(lambda: running.n_noted == 2)
        measured = running.certifier.measured
        assert measured is not None
        assert (measured.accumulation, measured.fit) == ("F16", ("bulk",))
        nursery.cancel_scope.cancel()


SLOWED_DOWN: dict[str, tuple[list[tuple[float, bool | None]], int]] = {
    "never said": ([(9000, None)], 1),
    "never": ([(9000, False)], 1),
    "for a moment": ([(9000, False), (60, True), (9000, False)], 1),
    "soon after it was measured": ([(60, False), (1200, True), (9000, False)], 1),
    "for good": ([(9000, False), (90000, True)], 2),
    "from its start": ([(9000, True)], 1),
    "and no more": ([(9000, False), (9000, True), (9000, False)], 3),
    "now and then": ([(9001, False), *[(411, True), (411, False)] * 20], 6),
    "and nobody can say so any more": ([(9000, False), (9000, None), (9000, False)], 1),
}


@pytest.mark.parametrize("what", SLOWED_DOWN)
async def test_a_machine_that_is_slowed_down_or_no_more_is_measured_again(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, what: str
) -> None:
    """In that state, if it lasts, and no more than once an hour."""
    course, n_measured = SLOWED_DOWN[what]
    async with trio.open_nursery() as nursery:
        twin = await start_engine(nursery, model, tmp_path)
        running = Certifying(model)
        running.is_held_back = course[0][1]
        await running.certifier.certify(twin.engine)
        nursery.start_soon(running.certifier.keep_certified, twin.engine)
        for seconds, is_held_back in course:
            running.is_held_back = is_held_back
            await trio.sleep(seconds)
        assert (twin.count(CertifyKernel), running.n_noted) == (n_measured, n_measured)
        nursery.cancel_scope.cancel()


async def test_every_kernel_is_measured_again_in_a_machine_that_is_slowed_down(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        twin = await start_engine(nursery, model, tmp_path)
        both = Certifying(model, OPENCL, GGML)
        both.is_held_back = False
        await both.certifier.certify(twin.engine)
        recalled = Certifying(model, OPENCL, GGML, store=both.store)
        recalled.is_held_back = False
        await recalled.certifier.recall()
        nursery.start_soon(recalled.certifier.keep_certified, twin.engine)
        await trio.sleep(9000)
        recalled.is_held_back = True
        await trio.sleep(9000)
        asked = [each.kernel for each in twin.received if isinstance(each, CertifyKernel)]
        assert asked == ["opencl", "ggml-cpu"] * 2
        nursery.cancel_scope.cancel()


async def test_a_measurement_from_a_later_day_counts_as_none(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        twin = await start_engine(nursery, model, tmp_path)
        first = Certifying(model)
        await first.certifier.certify(twin.engine)
        ((key, kept),) = first.store.kept.items()
        first.store.kept[key] = type(kept)(kept.measured, kept.measured_at + 10**15)
        set_back = Certifying(model, store=first.store)
        await set_back.certifier.recall()
        assert set_back.certifier.is_needed
        nursery.cancel_scope.cancel()


async def test_the_kernel_of_a_backbones_own_experts_counts_for_that_rank_alone(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path
) -> None:
    async with trio.open_nursery() as nursery:
        twin = await start_engine(nursery, model, tmp_path)
        both = Certifying(model, OPENCL, GGML)
        await both.certifier.certify(twin.engine)
        assert [each.kernel for each in twin.received if isinstance(each, CertifyKernel)] == [
            "opencl",
            "ggml-cpu",
        ]
        measured = both.certifier.measured
        assert measured is not None
        assert (measured.backend, measured.device, measured.unfit) == ("opencl", "a device", ())
        assert both.n_noted == 1
        short = Certifying(model, OPENCL, GGML)
        await short.certifier._measure(twin.engine, OPENCL)
        assert short.certifier.is_needed, "one of two is not enough"
        twin.arithmetic = {"accumulation": "F16"}
        await short.certifier.certify(twin.engine)
        measured = short.certifier.measured
        assert measured is not None
        assert (measured.accumulation, measured.unfit) == ("F32", ("backbone",))
        nursery.cancel_scope.cancel()


ANSWERS: dict[str, dict[str, Any]] = {
    "of another model": {"model_digest": bytes(32)},
    "of another build": {"kernel_build": "older"},
}


@pytest.mark.parametrize("what", ANSWERS)
async def test_an_answer_of_something_else_is_none(
    autojump_clock: MockClock, model: StoredModel, tmp_path: Path, what: str
) -> None:
    async with trio.open_nursery() as nursery:
        twin = await start_engine(nursery, model, tmp_path)
        twin.arithmetic = ANSWERS[what]
        asked = Certifying(model)
        with pytest.raises(EngineFailed, match="another kernel"):
            await asked.certifier.certify(twin.engine)
        assert asked.certifier.is_needed
        assert not asked.store.kept
        nursery.cancel_scope.cancel()
