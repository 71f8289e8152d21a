"""What a node measured of its own kernel: classes, what they passed, the ranks it is shown to be unfit for.

The engine that computes measures it, its control keeps it on disk and says it of the node, and a tolerance
certificate is this with a signature and dates. Apart from certificates because there is nothing to believe
here, and from whoever measures because all of them must mean the same by it. It refuses to know rows, times
and keys.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from kvasir_proto.capability import KernelClass, worst_accumulation
from kvasir_proto.codec import encode
from kvasir_proto.ids import ModelDigestField
from kvasir_proto.limits import RANKS, Accumulation, Digest, Length, Nanoseconds, Range, Rank, Seed, Word
from kvasir_proto.messages import Family

PROBE_VERSION: Final = 1
"""Of the questions that are asked: with other ones everything is measured anew."""

MEASURED_SIZE_MAX: Final = 8 << 10
"""Bytes of the largest encoded measurement; that of a model with three weight types has 700."""


@dataclass(frozen=True, slots=True)
class MeasuredClass:
    """Weight types and batch classes that were found alike. `rel_l2` is the largest distance of whole experts
    from an exact kernel of their class, None where some rows were not finite; `gate` the least of the gates,
    None where their class has none.
    """

    kernel: KernelClass
    rel_l2: Annotated[float, Range(0.0, 1e30)] | None
    gate: Annotated[float, Range(0.0, 1.0)] | None
    passed: bool


@dataclass(frozen=True, slots=True)
class MeasuredKernel:
    """One kernel on one device with weights of one model's types, in its shapes.

    `not_probed` are types of the model that no questions can be asked in. `unfit` are the ranks that what was
    measured rules out; of the others nothing speaks against it, and only where everything was probed does it
    speak for them. `figures` is the digest of all that was measured.
    """

    kind: ClassVar[str] = "measured_kernel"
    backend: Word
    device: Word
    kernel_build: Word
    model_digest: ModelDigestField
    probe_version: Annotated[int, Range(1, 1 << 16)]
    seed: Seed
    classes: Annotated[tuple[MeasuredClass, ...], Length(0, 16)]
    not_probed: Annotated[tuple[Word, ...], Length(0, 32)]
    unfit: Annotated[tuple[Rank, ...], Length(0, len(RANKS))]
    figures: Digest

    @property
    def fit(self) -> tuple[Rank, ...]:
        """The ranks that it was shown to be fit for."""
        if self.not_probed or not self.classes:
            return ()
        return tuple(rank for rank in RANKS if rank not in self.unfit)

    @property
    def accumulation(self) -> Accumulation:
        """The worst of its classes in one word: UNKNOWN where not all of the model's types were probed."""
        return "UNKNOWN" if self.not_probed else worst_accumulation(self.kernel_classes)

    @property
    def kernel_classes(self) -> tuple[KernelClass, ...]:
        """The classes, as a capability record has them."""
        return tuple(each.kernel for each in self.classes)

    def digest(self) -> bytes:
        """Its name: the same as long as the same is measured of the same kernel."""
        return hashlib.sha256(encode(self)).digest()


@dataclass(frozen=True, slots=True)
class KeptMeasurement:
    """A measurement as a node keeps it on its disk, and when it was made, by its own calendar."""

    kind: ClassVar[str] = "kept_measurement"
    measured: MeasuredKernel
    measured_at: Nanoseconds


KEPT_MEASUREMENT: Final = Family("kept measurement", (KeptMeasurement,), MEASURED_SIZE_MAX)


def measurement_key(*parts: str | bytes | int) -> bytes:
    """What a measurement is kept under: all that it depends on, in order, and which questions are asked."""
    said = hashlib.sha256(PROBE_VERSION.to_bytes(4, "big"))
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        said.update(len(data).to_bytes(4, "big") + data)
    return said.digest()
