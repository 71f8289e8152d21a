"""Level "per-op delta": the same rows and weights through every backend that is here, pair by pair.

Decides what is computed (the product into an expert, the one out of it, an expert's hidden rows, a whole
expert, and the weighted sum of those that a token uses), how two answers are compared, and which gate
applies: that of the two classes the probe *measured*, never of what a backend calls itself. A distance
between classes is labelled and is no evidence. It refuses to know where kernels come from.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_node.certification.certify import certify_kernel, expert_program
from kvasir_node.certification.comparison import compare
from kvasir_node.certification.crafted_weights import random_rows
from kvasir_node.certification.probe import is_probed, product_program
from kvasir_node.certification.synthetic_model import LAYER, ExpertShape, SyntheticExperts
from kvasir_node.kernels.activation_formats import USUAL_PROCESSOR
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.measure.backends_here import EXACT, Backend
from kvasir_proto.errors import ConfigurationInvalid, EngineFailed
from kvasir_proto.program import ExpertProgram
from kvasir_proto.tolerance import EquivalenceClass, gate_of, row_gate

Rows = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

OPERATIONS: Final = ("product-in", "product-out", "hidden", "expert", "combined")
"""`combined` is what a layer gives for a token: its experts' rows, weighted, added up slot by slot."""

ROWS: Final = 64
_PARTS: Final = ("gate", "up", "down")
_HEAVY_ROWS: Final = 4
_SHOWN_VALUES: Final = 64
_NOTHING: Final = EquivalenceClass("UNKNOWN", "UNKNOWN")


@dataclass(frozen=True, slots=True)
class OperationsSettings:
    """What is measured: rows of noise, some with outliers, in calls of each batch class.

    `n_used` experts serve every row. `probe_shape_max` bounds the width at which emulated backends are
    probed, whose sums take minutes otherwise and are the same code at any width.
    """

    shape: ExpertShape
    n_used: int
    weight_types: tuple[str, ...]
    batch_classes: tuple[int, ...]
    seed: int = 0
    probe_width_max: int = 512


@dataclass(frozen=True, slots=True)
class MeasuredClass:
    """What the probe says of a backend with weights of a type in calls of a batch class."""

    backend: str
    weight_type: str
    batch_class: int
    arithmetic: EquivalenceClass
    accumulator: str
    repeatable: bool
    batch_invariant: bool
    probed_shape: ExpertShape


@dataclass(frozen=True, slots=True)
class BackendReport:
    """A backend, the types of weights it computes with, and how long measuring it took."""

    name: str
    emulated: bool
    weight_types: tuple[str, ...]
    seconds: float
    missing: str


@dataclass(frozen=True, slots=True)
class PairFigures:
    """Two backends' answers to the same rows. `rms` is that of `a`'s; `gate` is None across classes for
    which a distance is no evidence, and `passed` with it. `nmse` is test-backend-ops' figure.
    """

    operation: str
    weight_type: str
    batch_class: int
    a: str
    b: str
    class_a: EquivalenceClass
    class_b: EquivalenceClass
    n_rows: int
    rms: float
    max_abs: float
    rel_l2: float
    nmse: float
    cosine: float
    gate: float | None
    reason: str

    @property
    def is_same_class(self) -> bool:
        """Whether both do the same arithmetic, so that a gate makes sense."""
        return _without_rounding(self.class_a) == _without_rounding(self.class_b)

    @property
    def passed(self) -> bool | None:
        """Whether it is inside its gate; None without one."""
        return None if self.gate is None else not self.reason


@dataclass(frozen=True, slots=True)
class ShownRow:
    """The first values of one output row from every backend, for a picture: those of the exact one, and each
    one's distances from it in units of the row's root mean square, `rms`. `band` is the gate in these units.
    """

    weight_type: str
    exact: str
    values: tuple[float, ...]
    rms: float
    band: float
    deviations: Mapping[str, tuple[float, ...]]
    classes: Mapping[str, EquivalenceClass]


@dataclass(frozen=True, slots=True)
class OperationsMeasurement:
    """Everything that was measured."""

    settings: OperationsSettings
    backends: tuple[BackendReport, ...]
    classes: tuple[MeasuredClass, ...]
    pairs: tuple[PairFigures, ...]
    shown: tuple[ShownRow, ...]

    @property
    def failed(self) -> tuple[PairFigures, ...]:
        """Pairs outside a gate that they have."""
        return tuple(each for each in self.pairs if each.passed is False)

    @property
    def unclassified(self) -> tuple[MeasuredClass, ...]:
        """Arithmetics that were probed and are of no class: no gate holds for them, and no label excuses.

        Sums that are known to be short may hide how rows are rounded.
        """
        return tuple(
            each
            for each in self.classes
            if each.arithmetic.accumulation == "UNKNOWN"
            or (each.arithmetic.activation == "UNKNOWN" and each.arithmetic.accumulation == "F32")
        )


def figures_of(found: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> tuple[float, ...]:
    """(rms of expected, max|delta|, relative L2, NMSE, cosine); infinite and 0 where not all is finite."""
    with np.errstate(all="ignore"):
        a, b = expected.astype(np.float64), found.astype(np.float64)
        difference = b - a
        size, other = float(np.linalg.norm(a)), float(np.linalg.norm(b))
        rms = size / math.sqrt(a.size)
        rel_l2 = float(np.linalg.norm(difference)) / size if size else math.inf
        cosine = float((a * b).sum()) / (size * other) if size and other else 0.0
        max_abs = float(np.abs(difference).max())
    if not math.isfinite(rel_l2):
        return rms, math.inf, math.inf, math.inf, 0.0
    return rms, max_abs, rel_l2, rel_l2 * rel_l2, cosine


def gate_for(operation: str, a: EquivalenceClass, b: EquivalenceClass, shape: ExpertShape) -> float | None:
    """The gate of a pair at one operation: that of whole experts, or where no row is rounded on the way what
    the order of sums is worth.
    """
    whole = gate_of(a, b, shape.n_embd, shape.n_ff)
    if whole is None or operation in ("expert", "combined"):
        return whole
    if (a.activation, a.rounding) != (b.activation, b.rounding):
        return whole
    return row_gate(shape.n_embd, shape.n_ff)


def _without_rounding(arithmetic: EquivalenceClass) -> EquivalenceClass:
    return dataclasses.replace(arithmetic, rounding="")


def measure_operations(
    backends: Sequence[Backend],
    settings: OperationsSettings,
    say: Callable[[str], None] = lambda text: None,
) -> OperationsMeasurement:
    """Measure every backend and every pair of them. What cannot be loaded is reported as missing.

    Raises what a kernel raises while it computes.
    """
    reports: list[BackendReport] = []
    classes: list[MeasuredClass] = []
    answers: dict[tuple[str, int], dict[str, dict[str, Rows]]] = {}
    for backend in backends:
        started = time.monotonic()
        measured, missing = [], ""
        for weight_type in settings.weight_types:
            experts = _NoiseExperts(settings, weight_type)
            try:
                kernel = experts.load(backend)
            except (EngineFailed, ConfigurationInvalid) as error:
                missing = f"{weight_type}: {error}"
                continue
            try:
                for batch_class in settings.batch_classes:
                    found = experts.answers(kernel, batch_class)
                    answers.setdefault((weight_type, batch_class), {})[backend.name] = found
            finally:
                kernel.close()
            measured.append(weight_type)
            classes += _classes_of(backend, weight_type, settings)
            say(f"{backend.name}, {weight_type}: measured")
        seconds = time.monotonic() - started
        reports.append(BackendReport(backend.name, backend.emulated, tuple(measured), seconds, missing))
    known = {(each.backend, each.weight_type, each.batch_class): each.arithmetic for each in classes}
    pairs: list[PairFigures] = []
    for (weight_type, batch_class), by_backend in answers.items():
        names = list(by_backend)
        for index, first in enumerate(names):
            for second in names[index + 1 :]:
                both = (
                    known.get((first, weight_type, batch_class), _NOTHING),
                    known.get((second, weight_type, batch_class), _NOTHING),
                )
                pairs += [
                    _pair(
                        (operation, weight_type, batch_class),
                        (first, by_backend[first][operation]),
                        (second, by_backend[second][operation]),
                        both,
                        settings.shape,
                    )
                    for operation in OPERATIONS
                ]
    return OperationsMeasurement(
        settings, tuple(reports), tuple(classes), tuple(pairs), _shown(answers, known, settings)
    )


def _pair(
    where: tuple[str, str, int],
    first: tuple[str, Rows],
    second: tuple[str, Rows],
    classes: tuple[EquivalenceClass, EquivalenceClass],
    shape: ExpertShape,
) -> PairFigures:
    operation, weight_type, batch_class = where
    gate = gate_for(operation, *classes, shape)
    rms, max_abs, rel_l2, nmse, cosine = figures_of(second[1], first[1])
    reason = "" if gate is None else compare(second[1], first[1], gate).reason
    return PairFigures(
        operation=operation,
        weight_type=weight_type,
        batch_class=batch_class,
        a=first[0],
        b=second[0],
        class_a=classes[0],
        class_b=classes[1],
        n_rows=len(first[1]),
        rms=rms,
        max_abs=max_abs,
        rel_l2=rel_l2,
        nmse=nmse,
        cosine=cosine,
        gate=gate,
        reason=reason,
    )


def _shown(
    answers: Mapping[tuple[str, int], Mapping[str, Mapping[str, Rows]]],
    known: Mapping[tuple[str, str, int], EquivalenceClass],
    settings: OperationsSettings,
) -> tuple[ShownRow, ...]:
    """One row of one expert for each weight type, at the largest batch class."""
    shown = []
    batch_class = settings.batch_classes[-1]
    for weight_type in settings.weight_types:
        by_backend = answers.get((weight_type, batch_class), {})
        if len(by_backend) < 2:
            continue
        name = EXACT if EXACT in by_backend else next(iter(by_backend))
        row = by_backend[name]["expert"][0].astype(np.float64)
        rms = float(np.sqrt(np.mean(row * row))) or 1.0
        own = known.get((name, weight_type, batch_class), _NOTHING)
        band = gate_of(own, own, settings.shape.n_embd, settings.shape.n_ff) or 0.0
        shown.append(
            ShownRow(
                weight_type,
                name,
                tuple(row[:_SHOWN_VALUES].tolist()),
                rms,
                band,
                {
                    other: tuple(((found["expert"][0] - row) / rms)[:_SHOWN_VALUES].tolist())
                    for other, found in by_backend.items()
                },
                {other: known.get((other, weight_type, batch_class), _NOTHING) for other in by_backend},
            )
        )
    return tuple(shown)


def _classes_of(backend: Backend, weight_type: str, settings: OperationsSettings) -> list[MeasuredClass]:
    """What the probe says at each batch class; nothing for what it cannot craft."""
    shape = settings.shape
    if backend.emulated:
        width = settings.probe_width_max
        shape = ExpertShape(min(shape.n_embd, width), min(shape.n_ff, width))
    if not is_probed(weight_type, shape):
        return []
    certification = certify_kernel(
        backend.make, shape, (weight_type,), batch_classes=settings.batch_classes, seed=settings.seed
    )
    return [
        MeasuredClass(
            backend=backend.name,
            weight_type=weight_type,
            batch_class=each.batch_class,
            arithmetic=EquivalenceClass(
                each.activation,
                each.sums.accumulation,
                "" if each.processor == USUAL_PROCESSOR else each.processor,
            ),
            accumulator=each.sums.accumulator,
            repeatable=each.repeatable,
            batch_invariant=each.batch_invariant,
            probed_shape=shape,
        )
        for each in certification.classes
    ]


class _NoiseExperts:
    """The experts of noise that a token uses, and the rows that every backend is asked."""

    def __init__(self, settings: OperationsSettings, weight_type: str) -> None:
        draws = np.random.default_rng((settings.seed, 11))
        shape = settings.shape
        parts = {}
        for part in _PARTS:
            n_column, n_row = shape.shape_of(part)
            parts[part] = np.stack(
                [random_rows(weight_type, n_row, n_column, draws) for _ in range(settings.n_used)]
            )
        self._n_used = settings.n_used
        self._experts = SyntheticExperts(shape, weight_type, parts)
        self._rows = {
            "in": _noise(ROWS, shape.n_embd, draws),
            "out": _noise(ROWS, shape.n_ff, draws),
        }
        weights = draws.dirichlet(np.full(settings.n_used, 4.0), ROWS)
        self._weights = weights.astype(np.float32)

    def load(self, backend: Backend) -> ExpertKernel:
        """A backend's kernel with these experts. Raises as it does."""
        return self._experts.load(backend.make)

    def answers(self, kernel: ExpertKernel, batch_class: int) -> dict[str, Rows]:
        """[rows, width] of each operation; the first expert's where it is of one expert."""
        whole = expert_program()
        hidden = ExpertProgram(whole.steps[:3], whole.input_per_slot)
        slots = self._run(kernel, whole, self._rows["in"], batch_class, self._n_used)
        combined = np.zeros_like(slots[:, 0])
        for slot in range(self._n_used):
            combined += self._weights[:, slot, None] * slots[:, slot]
        return {
            "product-in": self._run(kernel, product_program("up"), self._rows["in"], batch_class, 1)[:, 0],
            "product-out": self._run(kernel, product_program("down"), self._rows["out"], batch_class, 1)[
                :, 0
            ],
            "hidden": self._run(kernel, hidden, self._rows["in"], batch_class, 1)[:, 0],
            "expert": slots[:, 0],
            "combined": combined,
        }

    @staticmethod
    def _run(kernel: ExpertKernel, program: ExpertProgram, x: Rows, batch_class: int, n_slots: int) -> Rows:
        """Every row through the first `n_slots` experts, so many rows a call: [rows, slots, width]."""
        index = kernel.add_program(program)
        _, width_out = kernel.row_widths(LAYER, index)
        parts = []
        for begin in range(0, len(x), batch_class):
            # The last call is filled up from the start, so that every call has the class's size.
            rows = np.ascontiguousarray(np.take(x, range(begin, begin + batch_class), axis=0, mode="wrap"))
            row_of_pair = np.repeat(np.arange(batch_class, dtype=np.int32), n_slots)
            expert_of_pair = np.tile(np.arange(n_slots, dtype=np.int32), batch_class)
            out = np.full((batch_class * n_slots, width_out), np.nan, np.float32)
            kernel.compute(
                LAYER,
                index,
                batch_class,
                batch_class * n_slots,
                rows.ctypes.data,
                row_of_pair.ctypes.data,
                expert_of_pair.ctypes.data,
                out.ctypes.data,
            )
            parts.append(out.reshape(batch_class, n_slots, width_out))
        return np.concatenate(parts)[: len(x)]


def _noise(n_row: int, width: int, draws: np.random.Generator) -> Rows:
    """Rows of length one; every fourth has a few values that stand out, as real rows do."""
    rows = draws.standard_normal((n_row, width))
    heavy = rows[::_HEAVY_ROWS]
    heavy *= np.where(draws.random(heavy.shape) < 0.01, 10.0, 1.0)
    rows /= np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    return rows.astype(np.float32)
