"""A node's own measurement of its kernels: before it says what they are, and again when that has aged.

Decides when an engine has to measure and when what was kept on disk is good enough, and what the measurements
of the kernels that this node uses mean together: the one that serves as holder, and the one that a backbone
computes its own experts with. What is measured and how is the engine's affair, what is said of it the node
duty's. It refuses to know records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NoReturn, Protocol

import trio

from kvasir_node.kernel_in_use import KernelInUse
from kvasir_node.model.store import StoredModel
from kvasir_node.ports import EnginePort
from kvasir_node.telemetry import get_logger
from kvasir_proto.errors import EngineFailed, KvasirError
from kvasir_proto.instants import Duration, WallTime, after, between, in_seconds, seconds
from kvasir_proto.limits import RANKS
from kvasir_proto.measured_kernel import KeptMeasurement, MeasuredKernel, measurement_key
from kvasir_proto.messages.engine import CertificationAdvanced, CertifyKernel, KernelCertified

log = get_logger()

CERTIFY_TIMEOUT_S: Final = 600.0
"""For one kernel. A processor takes seconds; sums that are emulated take minutes in the shapes of a large
model."""
RENEW_AFTER: Final[Duration] = seconds(5 * 24 * 3600)
"""How old a measurement may be before it is made again: drivers and machines change."""
LOOK_AGAIN_S: Final = 120.0
"""How often it is asked whether the machine is held back."""
CHANGED_AFTER: Final[Duration] = seconds(3600)
"""How old a measurement has to be to be made again for that: a machine that is now hot, now cool is not to be
kept hot by measuring it.
"""
_RETRY_AFTER_S: Final = 3600.0
_SEED: Final = 0
"""The same questions each time, so that the same kernel gives the same figures."""


class MeasurementStore(Protocol):
    """Where measurements are kept; neither call raises."""

    async def load(self, key: bytes) -> KeptMeasurement | None:
        """What was kept under this key."""

    async def save(self, key: bytes, kept: KeptMeasurement) -> None:
        """Keep it."""


class KernelCertifier:
    """Measures `kernels`, the holder's first."""

    def __init__(
        self,
        *,
        kernels: tuple[KernelInUse, ...],
        n_threads: int,
        model: StoredModel,
        store: MeasurementStore,
        wall_time: Callable[[], WallTime],
        is_held_back: Callable[[], bool | None],
        note_certified: Callable[[], None],
    ) -> None:
        """``is_held_back`` says whether the machine slows its processors down, None where nobody knows.
        ``note_certified`` hears of every measurement that an engine has made here, when all are there.
        """
        self._kernels = kernels
        self._n_threads = n_threads
        self._model = model
        self._digest = model.manifest.digest()
        self._store = store
        self._wall_time = wall_time
        self._is_held_back = is_held_back
        self._note_certified = note_certified
        self._measured_held_back: dict[KernelInUse, bool | None] = {}
        """Whether the machine was when that kernel was measured, or first heard of."""
        self._found: dict[KernelInUse, KeptMeasurement] = {}
        self._progress = ""

    # -- what is known -----------------------------------------------------------------------------

    @property
    def has_kernels(self) -> bool:
        """Whether this node computes experts at all."""
        return bool(self._kernels)

    @property
    def is_needed(self) -> bool:
        """Whether a kernel is still to be measured."""
        return len(self._found) < len(self._kernels)

    @property
    def measured(self) -> MeasuredKernel | None:
        """What the holder's kernel is, unfit also for what another kernel of this node makes it unfit for.

        None before all are measured, and without any.
        """
        if self.is_needed or not self._kernels:
            return None
        first, *others = (self._found[each].measured for each in self._kernels)
        spoiled = {"backbone" for each in others if "backbone" in each.unfit}
        return replace(first, unfit=tuple(rank for rank in RANKS if rank in {*first.unfit, *spoiled}))

    @property
    def measured_at(self) -> int:
        """When the oldest of the measurements was made, by this node's calendar; 0 before."""
        return min((each.measured_at for each in self._found.values()), default=0)

    @property
    def progress(self) -> str:
        """How far the measurement is that is being made; empty where none is."""
        return self._progress

    # -- measuring ---------------------------------------------------------------------------------

    async def recall(self) -> None:
        """Take what was kept on disk and is not too old."""
        for each in self._kernels:
            kept = await self._store.load(self._key_of(each))
            age = None if kept is None else between(WallTime(kept.measured_at), self._wall_time())
            if kept is not None and age is not None and 0 <= age < RENEW_AFTER:
                self._found[each] = kept

    async def certify(self, engine: EnginePort) -> None:
        """Have an engine measure what is not known yet. Raises `EngineFailed` where it cannot."""
        missing = [each for each in self._kernels if each not in self._found]
        for each in missing:
            await self._measure(engine, each)
        if missing:
            self._note_certified()

    async def keep_certified(self, engine: EnginePort) -> NoReturn:
        """Measure again what has aged, and everything when the machine has begun or ceased to slow its
        processors down, until cancelled. What cannot be measured again keeps what it had.
        """
        while True:
            due = await self._wait_due()
            try:
                await self._measure(engine, due)
            except KvasirError as error:
                if engine.has_ended:
                    await trio.sleep_forever()
                log.warning("recertification_failed", kernel=due.kernel, reason=str(error))
                await trio.sleep(_RETRY_AFTER_S)
            else:
                self._note_certified()

    async def _wait_due(self) -> KernelInUse:
        """The next kernel that is to be measured again, when it is time."""
        changed_before: KernelInUse | None = None
        while True:
            oldest = min(self._kernels, key=lambda each: self._found[each].measured_at)
            due = after(WallTime(self._found[oldest].measured_at), RENEW_AFTER)
            left_s = in_seconds(between(self._wall_time(), due))
            if left_s <= 0:
                return oldest
            changed = self._changed()
            if changed is not None and changed == changed_before:  # for a moment is no change
                return changed
            changed_before = changed
            await trio.sleep(min(left_s, LOOK_AGAIN_S))

    def _changed(self) -> KernelInUse | None:
        """A kernel that was measured while the machine was not as it is now, and not just now."""
        is_held_back = self._is_held_back()
        if is_held_back is None:
            return None
        for each in self._kernels:
            before = self._measured_held_back.setdefault(each, is_held_back)
            age = between(WallTime(self._found[each].measured_at), self._wall_time())
            if before is not is_held_back and age >= CHANGED_AFTER:
                return each
        return None

    def note_advance(self, advanced: CertificationAdvanced) -> None:
        """An engine says how far it is."""
        self._progress = f"step {advanced.n_done} of {advanced.n_all}: {advanced.found}"

    async def _measure(self, engine: EnginePort, kernel: KernelInUse) -> None:
        self._progress = f"measuring what {kernel.kernel} computes"
        is_held_back = self._is_held_back()
        request = CertifyKernel(
            request=engine.next_request(),
            manifest_path=str(self._model.manifest_path),
            threads=self._n_threads,
            kernel=kernel.kernel,
            kernel_device=kernel.kernel_device,
            device=kernel.device,
            kernel_build=kernel.build,
            seed=_SEED,
        )
        try:
            certified = await engine.exchange(request, KernelCertified, CERTIFY_TIMEOUT_S)
        finally:
            self._progress = ""
        measured = certified.measured
        if (measured.model_digest, measured.kernel_build) != (self._digest, kernel.build):
            raise EngineFailed("the engine measured another kernel than it was asked to")
        log.info(
            "kernel_certified",
            kernel=kernel.kernel,
            accumulation=measured.accumulation,
            fit=list(measured.fit),
            reason=certified.reason,
        )
        kept = KeptMeasurement(measured, self._wall_time())
        self._found[kernel] = kept
        if is_held_back is not None:
            self._measured_held_back[kernel] = is_held_back
        await self._store.save(self._key_of(kernel), kept)

    def _key_of(self, kernel: KernelInUse) -> bytes:
        return measurement_key(
            *(kernel.kernel, kernel.kernel_device, kernel.device, kernel.build),
            *(self._n_threads, self._digest, _SEED),
        )
