"""The accumulation probe: crafted weights and rows go through a kernel in its production shapes.

Decides which sums are asked of a kernel and what each answer shows; `classification.py` decides what it all
means. Every sum has an answer that is known exactly, whatever formats round rows and weights on the way: a
large term is 64 times a weight, a small one once a weight, and in every block of 32 columns one column of
127, whose weights are zero, makes every shared step a power of two. Weights are written block by block and
not by a quantiser. All of a weight type's questions travel together: they are rows of a few experts as high
and as wide as the model's, and each call carries as many rows as its batch class.

Where columns stand, and which row of which expert asks what, is drawn from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_node.certification.classification import (
    CancellationFigure,
    PairFigure,
    ProbeFigures,
    RoundingFigure,
)
from kvasir_node.certification.crafted_weights import (
    CRAFTED_TYPES,
    exact_rows,
    expanded,
    random_rows,
    single_weights,
)
from kvasir_node.certification.synthetic_model import (
    Bytes,
    ExpertShape,
    Float32Array,
    MakeKernel,
    SyntheticExperts,
    compute,
)
from kvasir_node.kernels.activation_formats import ACTIVATION_ROUNDINGS
from kvasir_node.kernels.port import ExpertKernel
from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.program import ExpertProgram, ProgramStep, StepOp
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME

Float64Array = npt.NDArray[np.float64]

PARTS: Final = ("up", "down")
"""The products that are probed: into an expert's hidden row and out of it."""

COLUMNS_MIN: Final = 64

_GROUP: Final = 32
_PIN: Final = 31
"""In each group of 32 columns the last has weights of zero and a row value of 127."""

_PIN_VALUE: Final = 127.0
_LARGE: Final = 64.0
"""The row's value at an anchor; at every other column it is one."""

_WIDE: Final = 4096.0
"""The same in the row that asks about sums within one block of quants."""

_LARGE_WEIGHT: Final = 16.0
_TERM: Final = _LARGE * _LARGE_WEIGHT
"""A large term; F16 holds the smallest beside it as a normal number."""

_OFFSETS: Final = (
    *(1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 20, 24, 28, 29, 30),
    *(32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 3072, 4096, 8192),
)
_RANDOM_OFFSETS: Final = 4
_PAIR_EXPONENTS: Final = (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 18, 20, 22, 23, 24)
_PAIR_EXPONENT_MAX: Final = {"q6_K": 18}
"""Of types that keep their numbers with an offset, which some kernels take away after they have added up: a
small term is lost beside it that would not have been beside the large one."""

_BLOCK_PAIR_EXPONENTS: Final = (9, 10, 11, 12, 13, 14, 15)
_CANCELLATION_EXPONENTS: Final = (7, 8, 11, 14, 20, 28)
_ROUNDING_BITS: Final = tuple(range(5, 25))
_ROUNDING_OFFSETS: Final = 8
_PLUS_ANCHORS: Final = 3
_MINUS_ANCHORS: Final = 4
_SMALL_COLUMNS: Final = 4
_OVERFLOWING_WEIGHT: Final = 1536.0
_BESIDE_OVERFLOW: Final = 64.0
_SINGLE_WEIGHTS: Final = 32
_NOISE_ROWS: Final = 64
_ACTIVATION_EXPONENTS: Final = tuple(range(1, 24))
_SHARING_OFFSETS: Final = (15, 31, 63, 127, 255, 511, 1023)
_WIDE_ACTIVATION: Final = 2.0**17
_WHOLE_ROWS: Final = 2
_REAL_ROWS: Final = 4


def product_program(part: str) -> ExpertProgram:
    """The expert program that is one product and nothing else."""
    step = ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor=f"ffn_{part}_exps.weight")
    return ExpertProgram((step,), input_per_slot=False)


def is_probed(type_name: str, shape: ExpertShape) -> bool:
    """Whether rows of this type can be crafted, as wide as the shape has them."""
    widths = [shape.shape_of(part)[0] for part in PARTS]
    elements = TENSOR_TYPES_BY_NAME[type_name].block_elements
    is_whole = all(width % elements == 0 for width in widths)
    return type_name in CRAFTED_TYPES and is_whole and min(widths) >= COLUMNS_MIN


@dataclass(frozen=True, slots=True)
class ProductFigures:
    """What was measured of one product at one batch class."""

    part: str
    batch_class: int
    figures: ProbeFigures


def probe_kernel(
    make: MakeKernel, type_name: str, shape: ExpertShape, batch_classes: Sequence[int], seed: int
) -> Iterator[ProductFigures]:
    """Probe a kernel with weights of one type: both products, each batch class in turn.

    Raises `LocalProtocolError` for a type and shape that are not `is_probed`, and whatever the kernel
    raises.
    """
    if not is_probed(type_name, shape):
        raise LocalProtocolError(
            f"no row of {shape.n_embd} or {shape.n_ff} columns can be probed in {type_name}"
        )
    questions = {
        part: _Questions(type_name, shape.shape_of(part)[0], np.random.default_rng((seed, index)))
        for index, part in enumerate(PARTS)
    }
    n_page = max(math.ceil(len(questions[part].weights) / shape.shape_of(part)[1]) for part in PARTS)
    places = np.random.default_rng((seed, len(PARTS)))
    pages = {part: _Pages(questions[part].weights, n_page, shape.shape_of(part)[1], places) for part in PARTS}
    experts = SyntheticExperts(shape, type_name, {part: pages[part].data for part in PARTS})
    kernel = experts.load(make)
    try:
        for part in PARTS:
            first: Float32Array | None = None
            for batch_class in batch_classes:
                answers = _Answers(kernel, part, questions[part], pages[part], batch_class)
                first = answers.of_each if first is None else first
                same = bool(np.array_equal(first, answers.of_each, equal_nan=True))
                yield ProductFigures(part, batch_class, questions[part].figures(answers, same))
    finally:
        kernel.close()


class _Pages:
    """Weight rows put into experts of so many rows each, in random places among rows of zeros."""

    def __init__(self, weights: Bytes, n_page: int, n_row: int, draws: np.random.Generator) -> None:
        self.n_page = n_page
        self.place_of = draws.permutation(n_page * n_row)[: len(weights)]
        flat = np.zeros((n_page * n_row, weights.shape[1]), np.uint8)
        flat[self.place_of] = weights
        self.data = flat.reshape(n_page, n_row, -1)


class _Answers:
    """Everything a kernel answered at one batch class."""

    def __init__(
        self, kernel: ExpertKernel, part: str, questions: _Questions, pages: _Pages, batch_class: int
    ) -> None:
        program = product_program(part)
        n_x = len(questions.rows)
        n_call = math.ceil(n_x / batch_class)
        asked = np.arange(n_call * batch_class) % n_x
        self.repeatable = True
        found = []
        for page in range(pages.n_page):
            parts = []
            for call in range(n_call):
                rows = questions.rows[asked[call * batch_class : (call + 1) * batch_class]]
                parts.append(compute(kernel, program, rows, page))
                if call == 0:
                    again = compute(kernel, program, rows, page)
                    self.repeatable &= bool(np.array_equal(again, parts[0], equal_nan=True))
            found.append(np.concatenate(parts))
        self._found = np.concatenate(found, axis=1)[:, pages.place_of]
        self._slots_of = [np.flatnonzero(asked == index) for index in range(n_x)]

    @property
    def of_each(self) -> Float32Array:
        """One answer to each question, [rows of activations, rows of weights]."""
        return self._found[[slots[0] for slots in self._slots_of]]

    def of(self, row: int, weights: slice) -> Float64Array:
        """Every answer to these questions, from each place in a batch where they were asked: [places,
        weights].
        """
        return self._found[self._slots_of[row], weights].astype(np.float64)


class _Questions:
    """The rows of weights and of activations for one weight type and width, and how answers are read."""

    def __init__(self, type_name: str, n_column: int, draws: np.random.Generator) -> None:
        self._type_name = type_name
        self._n_column = n_column
        self._draws = draws
        self._weight_parts: list[Bytes] = []
        self._n_weight = 0
        self._row_parts: list[Float32Array] = []
        self._place_columns()
        self._ask_pairs()
        self._ask_block_pairs()
        self._ask_terms()
        self._ask_cancellations()
        self._ask_roundings()
        self._ask_ranges()
        self._ask_single_weights()
        self._ask_noise()
        self._ask_activations()
        self.weights: Bytes = np.concatenate(self._weight_parts)
        self.rows: Float32Array = np.concatenate(self._row_parts)

    def figures(self, answers: _Answers, batch_invariant: bool) -> ProbeFigures:
        """What the answers show."""
        pairs = self._kept(answers, self._base, self._pairs)
        return ProbeFigures(
            pairs=_pair_figures(pairs),
            block_pairs=_pair_figures(pairs, self._kept(answers, self._wide, self._block_pairs)),
            cancellations=self._cancellation_figures(answers),
            roundings=self._rounding_figures(answers),
            activation_bits=self._activation_bits(answers),
            activation_block=self._activation_block(answers),
            activation_range_is_wide=bool(
                (np.abs(answers.of(self._wide_activation, self._small_weight) / _TERM - 1) < 0.01).all()
            ),
            sum_range_is_wide=bool(
                (np.abs(answers.of(self._base, self._overflowing_sums) - _BESIDE_OVERFLOW) < 1024).all()
            ),
            result_range_is_wide=bool(
                (
                    np.abs(answers.of(self._base, self._overflowing) / (_OVERFLOWING_WEIGHT * _LARGE) - 1)
                    < 0.01
                ).all()
            ),
            format_distances=self._format_distances(answers),
            weights_kept=float(
                (answers.of(self._base, self._single) == self._single_values).all(axis=0).mean()
            ),
            stagnation=float(answers.of(self._base, self._ones)[0, 0] / self._n_ones),
            effective_bits=self._effective_bits(answers),
            is_finite=bool(np.isfinite(answers.of(self._base, self._ordinary)).all()),
            repeatable=answers.repeatable,
            batch_invariant=batch_invariant,
        )

    # --- where columns stand ----------------------------------------------------------------------------

    def _place_columns(self) -> None:
        n, draws = self._n_column, self._draws
        is_pin = np.zeros(n, np.bool_)
        is_pin[_PIN::_GROUP] = True
        # The first anchor begins a block of any format, so that every near column lies in its block.
        block = 1024 if n >= 2048 else 256 if n >= 512 else n
        self._first = int(draws.integers(0, max(1, n // block))) * block
        offsets = [each for each in (*_OFFSETS, n // 2, n - _GROUP) if each < n]
        offsets += draws.integers(1, n, _RANDOM_OFFSETS).tolist()
        partners = {each: (self._first + each) % n for each in offsets}
        self._partners = {each: column for each, column in sorted(partners.items()) if not is_pin[column]}
        free = np.ones(n, np.bool_)
        free[is_pin] = False
        free[[self._first, *self._partners.values()]] = False
        drawn = draws.permutation(np.flatnonzero(free))
        plus, minus = np.split(drawn[: _PLUS_ANCHORS - 1 + _MINUS_ANCHORS], [_PLUS_ANCHORS - 1])
        self._plus = [self._first, *plus.tolist()]
        self._minus = minus.tolist()
        self._small = drawn[_PLUS_ANCHORS - 1 + _MINUS_ANCHORS :]
        row = np.ones(n, np.float32)
        row[is_pin] = _PIN_VALUE
        row[self._plus] = _LARGE
        row[self._minus] = -_LARGE
        self._is_pin = is_pin
        self._base = self._add_row(row)
        row = row.copy()
        row[self._first] = _WIDE
        self._wide = self._add_row(row)

    # --- what is asked ----------------------------------------------------------------------------------

    def _ask_pairs(self) -> None:
        """1 + 2^-k, at every distance, for every k that the type can hold there."""
        values, asked = [], []
        exponent_max = _PAIR_EXPONENT_MAX.get(self._type_name, max(_PAIR_EXPONENTS))
        for offset, column in self._partners.items():
            for exponent in _PAIR_EXPONENTS:
                if exponent > exponent_max:
                    break
                values.append(
                    self._weights_at((self._first, _LARGE_WEIGHT), (column, _TERM * 2.0**-exponent))
                )
                asked.append((offset, exponent))
        self._pairs = self._add_exact(values, asked)

    def _ask_block_pairs(self) -> None:
        """The same within a block of quants, where weights alone have too small a range."""
        values, asked = [], []
        if TENSOR_TYPES_BY_NAME[self._type_name].block_elements > 1:
            for offset, column in self._partners.items():
                if offset >= _GROUP:
                    continue
                for exponent in _BLOCK_PAIR_EXPONENTS:
                    ratio = 2.0 ** (exponent - math.log2(_WIDE))  # of the large weight to the small
                    large, small = max(1.0, ratio), max(1.0, 1 / ratio)
                    values.append(self._weights_at((self._first, large), (column, small)))
                    asked.append((offset, exponent))
        self._block_pairs = self._add_exact(values, asked)

    def _ask_terms(self) -> None:
        """Each term of a pair alone: what does not come through alone was not lost in a sum."""
        other = next(iter(self._partners.values()))
        weights = {"large": set[float](), "small": set[float]()}
        for asked in (self._pairs, self._block_pairs):
            for values in asked.values:
                large = float(values[self._first])
                weights["large"].add(large)
                weights["small"].add(float(values.sum()) - large)
        self._alone = {
            (column, weight): self._add_exact([self._weights_at((column, weight))], [(0, 0)]).rows
            for column, kind in ((self._first, "large"), (other, "small"))
            for weight in sorted(weights[kind])
        }
        self._other = other

    def _ask_cancellations(self) -> None:
        """1 + 2^-k - 1, the three in many places."""
        values, asked = [], []
        for plus in self._plus:
            for minus in self._minus:
                for small in self._draws.choice(self._small, _SMALL_COLUMNS).tolist():
                    for exponent in _CANCELLATION_EXPONENTS:
                        entries = (
                            (plus, _LARGE_WEIGHT),
                            (minus, _LARGE_WEIGHT),
                            (small, _TERM * 2.0**-exponent),
                        )
                        values.append(self._weights_at(*entries))
                        asked.append((0, exponent))
        self._cancellations = self._add_exact(values, asked)

    def _ask_roundings(self) -> None:
        """1 + three quarters of a last bit, for every number of bits."""
        offsets = list(self._partners)
        chosen = [offsets[index] for index in np.linspace(0, len(offsets) - 1, _ROUNDING_OFFSETS).astype(int)]
        values, asked = [], []
        for offset in sorted(set(chosen)):
            for bits in _ROUNDING_BITS:
                small = _TERM * 0.75 * 2.0 ** (1 - bits)
                values.append(self._weights_at((self._first, _LARGE_WEIGHT), (self._partners[offset], small)))
                asked.append((offset, bits))
        self._roundings = self._add_exact(values, asked)

    def _ask_ranges(self) -> None:
        """98,304, alone, and with its opposite and something small beside it."""
        large = _OVERFLOWING_WEIGHT
        small = int(self._small[0])
        alone = [self._weights_at((plus, large)) for plus in self._plus]
        summed = [
            self._weights_at((plus, large), (minus, large), (small, _BESIDE_OVERFLOW))
            for plus in self._plus
            for minus in self._minus
        ]
        self._overflowing = self._add_exact(alone, [(0, 0)] * len(alone)).rows
        self._overflowing_sums = self._add_exact(summed, [(0, 0)] * len(summed)).rows

    def _ask_single_weights(self) -> None:
        columns = self._draws.choice(self._small, _SINGLE_WEIGHTS).astype(np.int64)
        data = single_weights(self._type_name, columns, self._n_column, self._draws)
        self._single = self._add_weights(data)
        self._single_values = expanded(self._type_name, data)[np.arange(len(columns)), columns]

    def _ask_noise(self) -> None:
        """Sums of many terms: of ones, and of noise with rows of whole numbers and with rows of any."""
        ones = np.ones(self._n_column)
        ones[self._is_pin] = 0
        ones[self._plus] = 0
        ones[self._minus] = 0
        self._ones = self._add_exact([ones], [(0, 0)]).rows
        self._n_ones = int(ones.sum())
        data = random_rows(self._type_name, _NOISE_ROWS, self._n_column, self._draws, exact_in_bf16=True)
        self._noise = self._add_weights(data)
        self._noise_values = expanded(self._type_name, data)
        self._whole, self._real = [], []
        for _ in range(_WHOLE_ROWS):
            row = self._draws.integers(-100, 101, self._n_column).astype(np.float32)
            row[self._is_pin] = _PIN_VALUE
            self._whole.append(self._add_row(row))
        for _ in range(_REAL_ROWS):
            self._real.append(self._add_row(self._draws.standard_normal(self._n_column).astype(np.float32)))

    def _ask_activations(self) -> None:
        """Rows of one value, or of two, through a single weight."""
        column = self._first
        small_weight = _TERM / _WIDE_ACTIVATION
        self._one_weight = self._add_exact([self._weights_at((column, 1.0))], [(0, 0)]).rows
        self._small_weight = self._add_exact([self._weights_at((column, small_weight))], [(0, 0)]).rows
        self._lone = [
            (each, self._add_row(self._row_of((column, 1 + 2.0**-each)))) for each in _ACTIVATION_EXPONENTS
        ]
        self._sharing = [
            (each + 1, self._add_row(self._row_of((column, 2.0**-9), (column + each, 1.0))))
            for each in _SHARING_OFFSETS
            if column + each < self._n_column
        ]
        self._wide_activation = self._add_row(self._row_of((column, _WIDE_ACTIVATION)))
        self._ordinary = slice(self._pairs.rows.start, self._roundings.rows.stop)

    # --- what answers show ------------------------------------------------------------------------------

    def _kept(self, answers: _Answers, row: int, asked: _Asked) -> dict[tuple[int, int], bool]:
        """Of each (offset, exponent) that was asked with this row: whether the answer was exact. Pairs with a
        term that does not even come through alone were not asked anything.
        """
        x = self._row_parts[row][0].astype(np.float64)
        comes_through = {
            (column, weight): bool((answers.of(row, rows) == weight * x[column]).all())
            for (column, weight), rows in self._alone.items()
        }
        exact = (answers.of(row, asked.rows) == asked.values @ x).all(axis=0)
        kept = {}
        for key, values, is_exact in zip(asked.of, asked.values, exact.tolist(), strict=True):
            large = float(values[self._first])
            small = float(values.sum()) - large
            if comes_through[self._first, large] and comes_through[self._other, small]:
                kept[key] = is_exact
        return kept

    def _cancellation_figures(self, answers: _Answers) -> tuple[CancellationFigure, ...]:
        found = answers.of(self._base, self._cancellations.rows)
        exponents = np.array([exponent for _, exponent in self._cancellations.of])
        is_lost = (found != _TERM * np.exp2(-exponents.astype(np.float64))).any(axis=0)
        return tuple(
            CancellationFigure(each, int(is_lost[exponents == each].sum()), int((exponents == each).sum()))
            for each in sorted(set(exponents.tolist()))
        )

    def _rounding_figures(self, answers: _Answers) -> tuple[RoundingFigure, ...]:
        found = answers.of(self._base, self._roundings.rows)[0]
        return tuple(
            RoundingFigure(offset, bits, float((value / _TERM - 1) / 2.0 ** (1 - bits)))
            for value, (offset, bits) in zip(found, self._roundings.of, strict=True)
        )

    def _activation_bits(self, answers: _Answers) -> int:
        bits = 1
        for exponent, row in self._lone:
            if not (answers.of(row, self._one_weight) == 1 + 2.0**-exponent).all():
                break
            bits = exponent + 1
        return bits

    def _activation_block(self, answers: _Answers) -> int:
        """The widest aligned stretch of columns in which a one drowns a 2^-9."""
        shared = [
            width
            for width, row in self._sharing
            if (np.abs(answers.of(row, self._one_weight) * 2.0**9 - 1) > 0.05).any()
        ]
        return max(shared, default=0)

    def _format_distances(self, answers: _Answers) -> tuple[tuple[str, float], ...]:
        found = np.concatenate([answers.of(row, self._noise)[:1] for row in self._real])
        with np.errstate(all="ignore"):
            return tuple(
                (name, float(np.linalg.norm(found - expected) / np.linalg.norm(expected)))
                for name, expected in self._exact_of_format.items()
            )

    @cached_property
    def _exact_of_format(self) -> dict[str, Float64Array]:
        """The exact sums of rows of noise that were rounded to each format, [rows, weights]."""
        rows = np.concatenate([self._row_parts[row] for row in self._real])
        return {
            name: rounding(rows) @ self._noise_values.T
            for name, rounding in ACTIVATION_ROUNDINGS.items()
            if name != "q8_K" or self._n_column % 256 == 0
        }

    def _effective_bits(self, answers: _Answers) -> float:
        """How exact sums of noise are, in units of the root of the sum of squared terms."""
        errors = []
        for row in self._whole:
            x = self._row_parts[row][0].astype(np.float64)
            size = np.sqrt((self._noise_values * x) ** 2 @ np.ones(self._n_column))
            errors.append((answers.of(row, self._noise) - self._noise_values @ x) / size)
        with np.errstate(all="ignore"):
            error = float(np.sqrt(np.mean(np.concatenate(errors) ** 2)))
        if not math.isfinite(error):
            return 0.0
        return -math.log2(max(error, 2.0**-53))

    # --- writing ----------------------------------------------------------------------------------------

    def _weights_at(self, *entries: tuple[int, float]) -> Float64Array:
        values = np.zeros(self._n_column)
        for column, value in entries:
            values[column] = value
        return values

    def _row_of(self, *entries: tuple[int, float]) -> Float32Array:
        return self._weights_at(*entries).astype(np.float32)

    def _add_row(self, row: Float32Array) -> int:
        self._row_parts.append(row[None])
        return len(self._row_parts) - 1

    def _add_weights(self, data: Bytes) -> slice:
        rows = slice(self._n_weight, self._n_weight + len(data))
        self._weight_parts.append(data)
        self._n_weight += len(data)
        return rows

    def _add_exact(self, values: list[Float64Array], asked: list[tuple[int, int]]) -> _Asked:
        """Write those of the rows that the type can hold."""
        if not values:
            return _Asked(self._add_weights(self._nothing()), np.zeros((0, self._n_column)), ())
        table = np.array(values)
        data, written = exact_rows(self._type_name, table)
        kept = tuple(each for each, is_written in zip(asked, written.tolist(), strict=True) if is_written)
        return _Asked(self._add_weights(data[written]), table[written], kept)

    def _nothing(self) -> Bytes:
        tensor_type = TENSOR_TYPES_BY_NAME[self._type_name]
        return np.zeros((0, tensor_type.row_size_bytes(self._n_column)), np.uint8)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Weight rows that ask one kind of question: where they are, their values, and what each asks: an offset,
    and an exponent or a number of bits.
    """

    rows: slice
    values: Float64Array
    of: tuple[tuple[int, int], ...]


def _pair_figures(
    kept: dict[tuple[int, int], bool], more: dict[tuple[int, int], bool] | None = None
) -> tuple[PairFigure, ...]:
    """Bits that were kept, counted from the easiest pair on until the first loss. With `more`, which was
    asked with other rows, of the offsets in it only, and of both.
    """
    figures = []
    for offset in sorted({offset for offset, _ in (kept if more is None else more)}):
        asked = {
            k: whole for source in (kept, more or {}) for (at, k), whole in source.items() if at == offset
        }
        bits = 1
        for exponent in sorted(asked):
            if not asked[exponent]:
                break
            bits = exponent + 1
        figures.append(PairFigure(offset, bits, max(asked) + 1))
    return tuple(figures)
