"""Certifying a kernel: its class for each weight type and batch class, and what that makes it fit for.

Decides what is asked of a kernel and what follows from it: the accumulation probe says what its sums are, a
whole expert of noise says how far its rows are from an exact kernel of the same class, and both together say
which ranks it may fill. The result is the node's own word, `claimed`; that others believe it is their
auditors' business. It refuses to know which kernel it is, and prints nothing.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np

from kvasir_node.certification.classification import Classification, classify
from kvasir_node.certification.comparison import Comparison, FlipCount, compare, count_flips
from kvasir_node.certification.crafted_weights import expanded, random_rows
from kvasir_node.certification.probe import PARTS, ProductFigures, is_probed, probe_kernel
from kvasir_node.certification.processor_rounding import processor_of
from kvasir_node.certification.synthetic_model import (
    Bytes,
    ExpertShape,
    Float32Array,
    MakeKernel,
    SyntheticExperts,
    compute,
)
from kvasir_node.kernels.activation_formats import (
    ACTIVATION_FORMATS,
    ACTIVATION_ROUNDINGS,
)
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.capability import BATCH_CLASSES, KernelClass, worst_accumulation
from kvasir_proto.errors import EngineFailed
from kvasir_proto.ids import ModelDigest
from kvasir_proto.limits import RANKS, Accumulation
from kvasir_proto.measured_kernel import PROBE_VERSION, MeasuredClass, MeasuredKernel
from kvasir_proto.program import ExpertProgram, GluKind, ProgramStep, StepOp
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME
from kvasir_proto.tolerance import POOLED_ROWS_MIN, EquivalenceClass, gate_of, has_flips

BROKEN_REL_L2: Final = 0.1
"""Rows this far from the exact ones are of no arithmetic, but of wrong weights: unfit even for `bulk`. Sums
in F16 were measured at 0.013, and the widest distance between formats of rows at 0.02."""

_PARTS: Final = ("gate", "up", "down")
_FORMATS: Final = {name.upper(): name for name in ACTIVATION_ROUNDINGS}
"""Names of activation formats as records carry them, to those of the kernels' tables."""

_TYPES_A_CLASS_MAX: Final = 8
"""Weight types that a class of a record can name."""

_HEAVY_ROWS: Final = 4
"""Every so many-th row of noise has a few values that stand out, as real rows do."""


@dataclass(frozen=True, slots=True)
class CertifiedClass:
    """A kernel with weights of one type at one batch class: the worse of the products in and out of an
    expert, and a whole expert beside an exact one. `flips` is there where activations are rounded; on which
    `processor` ggml rounds them so is a name of `ROUNDINGS_OF_PROCESSOR`.
    """

    weight_type: str
    batch_class: int
    sums: Classification
    repeatable: bool
    batch_invariant: bool
    weights_kept: float
    comparison: Comparison
    flips: FlipCount | None
    in_reference_class: bool
    processor: str

    @property
    def activation(self) -> str:
        """The format in which rows are taken: "Q8_0"."""
        return self.sums.activation

    @property
    def reason(self) -> str:
        """Why it has not passed; empty if it has."""
        if self.sums.reason:
            return self.sums.reason
        if self.sums.accumulation != "F32":
            return f"sums are {self.sums.accumulator}, not F32"
        if self.weights_kept < 1:
            return f"only {100 * self.weights_kept:.0f} % of weights keep all their bits"
        if self.flips is not None and not self.flips.is_honest:
            return f"{self.flips.foreign} rows differ by no flip, and {self.flips.flipped} by some"
        return self.comparison.reason

    @property
    def passed(self) -> bool:
        """Whether it is equivalent to an exact kernel of its class, and adds in F32."""
        return not self.reason

    @property
    def is_broken(self) -> bool:
        """Whether its rows are of no arithmetic at all."""
        return not self.comparison.rel_l2 < BROKEN_REL_L2


@dataclass(frozen=True, slots=True)
class Fit:
    """Which ranks a node may fill by what was measured here, and why not."""

    backbone: bool
    output: bool
    bulk: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Certification:
    """What was measured of one kernel, with weights of the model's types and of others. `not_probed` are the
    model's that no probe can craft. Only the model's types count for everything but `classes`.
    """

    backend: str
    shape: ExpertShape
    model_types: tuple[str, ...]
    classes: tuple[CertifiedClass, ...]
    not_probed: tuple[str, ...]
    status: Literal["claimed"] = "claimed"

    @property
    def model_classes(self) -> tuple[CertifiedClass, ...]:
        """Those of the model's weight types."""
        return tuple(each for each in self.classes if each.weight_type in self.model_types)

    @property
    def fit(self) -> Fit:
        """The ranks it may fill."""
        return fit_of(self.model_classes, self.not_probed)

    @property
    def accumulation(self) -> Accumulation:
        """The worst of the classes, in one word."""
        classes = (each.kernel for each in self.measured_classes())
        return "UNKNOWN" if self.not_probed else worst_accumulation(classes)

    def measured_classes(self) -> tuple[MeasuredClass, ...]:
        """The model's classes as records and certificates carry them, those that are alike together."""
        alike: dict[_Likeness, dict[str, list[CertifiedClass]]] = {}
        for each in self.model_classes:
            alike.setdefault(_likeness(each), {}).setdefault(each.weight_type, []).append(each)
        groups: dict[tuple[_Likeness, tuple[int, ...]], list[list[CertifiedClass]]] = {}
        for likeness, of_type in alike.items():
            for found in of_type.values():
                key = (likeness, tuple(each.batch_class for each in found))
                groups.setdefault(key, []).append(found)
        return tuple(
            _measured_class(group[first : first + _TYPES_A_CLASS_MAX])
            for group in groups.values()
            for first in range(0, len(group), _TYPES_A_CLASS_MAX)
        )

    def measured(
        self, *, backend: str, device: str, kernel_build: str, model_digest: bytes, seed: int
    ) -> MeasuredKernel:
        """What was measured, as it is kept and said. `backend` counts where no kernel was loaded."""
        ruled_out = fit_of(self.model_classes, ()) if self.model_classes else Fit(True, True, True, "")
        return MeasuredKernel(
            backend=self.backend or backend,
            device=device,
            kernel_build=kernel_build,
            model_digest=ModelDigest(model_digest),
            probe_version=PROBE_VERSION,
            seed=seed,
            classes=self.measured_classes(),
            not_probed=self.not_probed,
            unfit=tuple(rank for rank in RANKS if not getattr(ruled_out, rank)),
            figures=hashlib.sha256(repr([astuple(each) for each in self.model_classes]).encode()).digest(),
        )


_Likeness: TypeAlias = tuple[str, Accumulation, bool, bool, bool]


def _likeness(each: CertifiedClass) -> _Likeness:
    return (each.activation, each.sums.accumulation, each.repeatable, each.batch_invariant, each.passed)


def _measured_class(group: list[list[CertifiedClass]]) -> MeasuredClass:
    """One class of weight types that are alike, each with its batch classes."""
    every = [each for found in group for each in found]
    first = every[0]
    distances = [each.comparison.rel_l2 for each in every]
    gates = [each.comparison.gate for each in every]
    return MeasuredClass(
        kernel=KernelClass(
            tuple(found[0].weight_type for found in group),
            tuple(each.batch_class for each in group[0]),
            first.activation,
            first.sums.accumulation,
            first.repeatable,
            first.batch_invariant,
        ),
        rel_l2=max(distances) if all(map(math.isfinite, distances)) else None,
        gate=min((each for each in gates if each is not None), default=None),
        passed=first.passed,
    )


def certification_steps(n_types: int, n_batch_classes: int) -> int:
    """How often `certify_kernel` says something of so many types that can be probed."""
    return n_types * n_batch_classes * (len(PARTS) + 1)


def expert_program() -> ExpertProgram:
    """A gated expert, as most models have them."""
    steps = (
        ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_gate_exps.weight"),
        ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_up_exps.weight"),
        ProgramStep(StepOp.GLU, 1, 2, params=struct.pack("<2i2f", GluKind.SWIGLU, 0, 0.0, 0.0)),
        ProgramStep(StepOp.EXPERT_MATMUL, 3, tensor="ffn_down_exps.weight"),
    )
    return ExpertProgram(steps, input_per_slot=False)


def certify_kernel(
    make: MakeKernel,
    shape: ExpertShape,
    model_types: Sequence[str],
    *,
    other_types: Sequence[str] = (),
    batch_classes: Sequence[int] = BATCH_CLASSES,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Certification:
    """Measure a kernel with weights of a model's types, by ggml's names, and of others, in its shapes.

    Types of the model that cannot be crafted, or not in this shape, are named in the result; others that
    cannot, or that the kernel does not compute with, are left out. Without model types all that is measured
    counts. The same seed asks the same questions. Raises whatever the kernel raises.
    """
    classes: list[CertifiedClass] = []
    backend = ""
    for weight_type in dict.fromkeys((*model_types, *other_types)):
        if not is_probed(weight_type, shape):
            continue
        if weight_type not in model_types and not _computes(make, weight_type, shape):
            say(f"{weight_type}: this kernel does not compute with it")
            continue
        products: dict[int, list[ProductFigures]] = {each: [] for each in batch_classes}
        for product in probe_kernel(make, weight_type, shape, batch_classes, seed):
            products[product.batch_class].append(product)
            told = _told(classify(product.figures))
            say(f"{weight_type} {product.part}, {product.batch_class} rows: {told}")
        whole = _WholeExpert(make, weight_type, shape, seed)
        try:
            backend = whole.backend
            for batch_class in batch_classes:
                certified = _certified(weight_type, batch_class, products[batch_class], whole)
                classes.append(certified)
                say(
                    f"{weight_type}, {batch_class} rows: relative L2 {certified.comparison.rel_l2:.1e}, "
                    + (certified.reason or "passed")
                )
        finally:
            whole.close()
    not_probed = tuple(each for each in model_types if not is_probed(each, shape))
    counted = tuple(model_types) or tuple(dict.fromkeys(each.weight_type for each in classes))
    return Certification(backend, shape, counted, tuple(classes), not_probed)


def _computes(make: MakeKernel, weight_type: str, shape: ExpertShape) -> bool:
    """Whether a kernel loads weights of this type at all."""
    data = np.zeros((1, shape.n_embd, TENSOR_TYPES_BY_NAME[weight_type].row_size_bytes(shape.n_ff)), np.uint8)
    try:
        SyntheticExperts(shape, weight_type, {"down": data}).load(make).close()
    except EngineFailed:
        return False
    return True


def fit_of(classes: tuple[CertifiedClass, ...], not_probed: tuple[str, ...]) -> Fit:
    """The ranks that what was measured makes a node fit for.

    Output layers take F32 sums in the reference class, and a backbone F32 sums; nothing was measured here of
    the trunk that a backbone computes itself. A kernel in tolerance of nothing still serves bulk layers, as
    long as it is not broken.
    """
    failed = next((each for each in classes if not each.passed), None)
    foreign = next((each for each in classes if not each.in_reference_class), None)
    broken = next((each for each in classes if each.is_broken), None)
    reason = ""
    if not_probed or not classes:
        reason = f"nothing can be said of weights in {', '.join(not_probed) or 'no type at all'}"
    elif broken is not None:
        reason = f"{_named(broken)}: relative L2 {broken.comparison.rel_l2:.1e} is of wrong weights or none"
    elif failed is not None:
        reason = f"{_named(failed)}: {failed.reason}"
    elif foreign is not None:
        reason = f"{_named(foreign)}: rows are taken in {foreign.activation}, not as the reference class does"
    is_measured = bool(classes) and not not_probed
    return Fit(
        backbone=is_measured and failed is None,
        output=is_measured and failed is None and foreign is None,
        bulk=bool(classes) and broken is None,
        reason=reason,
    )


def _named(each: CertifiedClass) -> str:
    return f"{each.weight_type} at {each.batch_class} rows"


def _told(sums: Classification) -> str:
    return f"{sums.accumulator} sums of {sums.activation} rows, {sums.effective_bits:.1f} bits"


class _WholeExpert:
    """One expert of noise in the kernel that is looked at, and what exact kernels make of the same rows."""

    def __init__(self, make: MakeKernel, weight_type: str, shape: ExpertShape, seed: int) -> None:
        draws = np.random.default_rng((seed, 3))
        self._parts: dict[str, Bytes] = {}
        for part in _PARTS:
            n_column, n_row = shape.shape_of(part)
            self._parts[part] = random_rows(weight_type, n_row, n_column, draws)[None]
        self.weight_type = weight_type
        self.shape = shape
        self._experts = SyntheticExperts(shape, weight_type, self._parts)
        self._rows = _noise(POOLED_ROWS_MIN, shape.n_embd, draws)
        self._down = expanded(weight_type, self._parts["down"][0])
        self._exact: dict[tuple[str, str], tuple[Float32Array, Float32Array]] = {}
        self._kernel = self._experts.load(make)

    @property
    def backend(self) -> str:
        """What the kernel calls itself."""
        return self._kernel.backend

    def close(self) -> None:
        """Free the kernel."""
        self._kernel.close()

    def found(self, batch_class: int) -> Float32Array:
        """The kernel's answers to every row, in batches of this class; where a row is asked more than once,
        the last one.
        """
        n_row = len(self._rows)
        n_call = -(-n_row // batch_class)
        asked = np.arange(n_call * batch_class) % n_row
        program = expert_program()
        parts = [
            compute(self._kernel, program, self._rows[asked[begin : begin + batch_class]], 0)
            for begin in range(0, len(asked), batch_class)
        ]
        return np.concatenate(parts)[-n_row:][np.argsort(asked[-n_row:])]

    def processor_of(self, activation: str, batch_class: int) -> str:
        """By what processor the kernel rounds rows to this format, or to ggml's where it is none."""
        form = _FORMATS.get(activation, ACTIVATION_FORMATS[self.weight_type])
        return processor_of(self._kernel, self._experts, form, batch_class)

    def exact(self, activation: str, processor: str) -> tuple[Float32Array, Float32Array]:
        """What an exact kernel gives that takes rows in this format, or as ggml does where it is none, and
        rounds them as on this processor: the rows, and its hidden ones.
        """
        form = _FORMATS.get(activation)
        if (activation, processor) not in self._exact:
            kernel = self._experts.load(
                lambda manifest, shard, read: ReferenceKernel(
                    manifest, shard, read, Arithmetic.AS_GGML, None, form, processor
                )
            )
            whole = expert_program()
            hidden = ExpertProgram(whole.steps[:3], whole.input_per_slot)
            self._exact[activation, processor] = (
                compute(kernel, whole, self._rows, 0),
                compute(kernel, hidden, self._rows, 0),
            )
        return self._exact[activation, processor]

    def flips(self, found: Float32Array, activation: str, processor: str) -> FlipCount:
        """The rows one by one, where they are rounded on the way."""
        exact, hidden = self.exact(activation, processor)
        return count_flips(found, exact, hidden, activation, self._down)


def _certified(
    weight_type: str, batch_class: int, products: list[ProductFigures], whole: _WholeExpert
) -> CertifiedClass:
    sums = [classify(each.figures) for each in products]
    worst = worst_accumulation(
        KernelClass((weight_type,), (batch_class,), each.activation, each.accumulation) for each in sums
    )
    shown = next(each for each in sums if each.accumulation == worst)
    if len({each.activation for each in sums}) > 1:
        shown = _of_two_formats(shown)
    own = EquivalenceClass(shown.activation, shown.accumulation)
    exact = EquivalenceClass(shown.activation, "F32")
    found = whole.found(batch_class)
    gate = gate_of(own, exact, whole.shape.n_embd, whole.shape.n_ff)
    processor = whole.processor_of(shown.activation, batch_class)
    is_judged_by_rows = gate is not None and has_flips(shown.activation)
    return CertifiedClass(
        weight_type=weight_type,
        batch_class=batch_class,
        sums=shown,
        repeatable=all(each.figures.repeatable for each in products),
        batch_invariant=all(each.figures.batch_invariant for each in products),
        weights_kept=min(each.figures.weights_kept for each in products),
        comparison=compare(found, whole.exact(shown.activation, processor)[0], gate),
        flips=whole.flips(found, shown.activation, processor) if is_judged_by_rows else None,
        in_reference_class=shown.activation == ACTIVATION_FORMATS[weight_type].upper(),
        processor=processor,
    )


def _of_two_formats(sums: Classification) -> Classification:
    """A kernel that takes rows in one format into an expert and in another out of it is of no class."""
    return replace(sums, activation="UNKNOWN")


def _noise(n_row: int, width: int, draws: np.random.Generator) -> Float32Array:
    """Rows whose products with weights of deviation one have a deviation of one; some have heavy tails."""
    rows = draws.standard_normal((n_row, width))
    heavy = rows[::_HEAVY_ROWS]
    heavy *= np.where(draws.random(heavy.shape) < 0.01, 10.0, 1.0)
    rows /= np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    return rows.astype(np.float32)
