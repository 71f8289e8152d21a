"""From what the accumulation probe measured to the class of a kernel's arithmetic: the decision alone.

A sum that keeps p significand bits gives 1 + 2^-(p-1) exactly and loses 2^-p beside a 1. So pairs of terms,
one large and one small, at many distances, say how many bits are kept *where their two columns meet*. Terms
that cancel say whether the sum was short or only the result. How rows were rounded before that is another
question, with tests of its own. Apart from the probe so that every rule is a row in a table of a test; it
refuses to know kernels, weights and seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvasir_proto.limits import Accumulation

F32_BITS: Final = 24
F16_BITS: Final = 11
BF16_BITS: Final = 8

_CANCELLATIONS_MIN: Final = 30
"""So many that none of them is lost is no accident."""

_CONTRADICTION_BITS: Final = 16
"""Sums of random rows in F32 are right to 20 bits or more; fewer than these contradict pairs that are."""

_EFFECTIVE_BITS_MIN: Final = 20
"""What sums of random rows must show where a weight type is too coarse for pairs to ask for 24 bits."""

_FLOAT_ACTIVATIONS: Final = {
    (F32_BITS, True): "F32",
    (F16_BITS, False): "F16",
    (F16_BITS, True): "TF32",
    (BF16_BITS, True): "BF16",
}
"""By significand bits, and whether the range is that of F32."""

_BLOCK_FORMATS: Final = {32: "Q8_0", 256: "Q8_K"}


@dataclass(frozen=True, slots=True)
class PairFigure:
    """Of a large and a small term `offset` columns apart: how many bits their sum keeps, and how many were
    asked for at most, since a weight type cannot hold every ratio within one block.
    """

    offset: int
    bits: int
    bits_asked: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing was lost that F32 would have kept."""
        return self.bits >= min(self.bits_asked, F32_BITS)


@dataclass(frozen=True, slots=True)
class CancellationFigure:
    """Of sums 1 + 2^-`exponent` - 1 in many places: in how many the small term was lost."""

    exponent: int
    lost: int
    count: int


@dataclass(frozen=True, slots=True)
class RoundingFigure:
    """What became of three quarters of the last bit, of a sum that is thought to keep `bits` bits, beside a
    1 `offset` columns away: 0, 1, or what it was.
    """

    offset: int
    bits: int
    quotient: float


@dataclass(frozen=True, slots=True)
class ProbeFigures:
    """Everything the probe measured of one product: a weight type, a shape and a batch class.

    `block_pairs` are pairs within one block of quants that were asked for more bits, with rows of a larger
    range; they say nothing where rows share a step. `activation_bits` is what a lone value keeps,
    `activation_block` how many columns share a step (0: none). Ranges are wide where 98,304 passes in a sum,
    in a result, and 131,072 in a row. `format_distances` are relative L2 to exact sums of rows rounded to
    each known format.
    `weights_kept` is the share of single weights that came through to the last bit, `stagnation` the sum of
    ones over their number, `effective_bits` the exactness of sums of random terms.
    """

    pairs: tuple[PairFigure, ...]
    block_pairs: tuple[PairFigure, ...]
    cancellations: tuple[CancellationFigure, ...]
    roundings: tuple[RoundingFigure, ...]
    activation_bits: int
    activation_block: int
    activation_range_is_wide: bool
    sum_range_is_wide: bool
    result_range_is_wide: bool
    format_distances: tuple[tuple[str, float], ...]
    weights_kept: float
    stagnation: float
    effective_bits: float
    is_finite: bool
    repeatable: bool
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class Classification:
    """What a product's arithmetic is.

    `accumulator` is in full ("MIXED F16/F32"), `accumulation` the word that records carry, `bits` the fewest
    that a sum keeps. `short_offsets` are the distances of pairs that lose more than F32 does, where others do
    not. `rounding` is "nearest", "toward zero" or empty; `reason` says what speaks against the class.
    """

    accumulator: str
    accumulation: Accumulation
    bits: int
    short_offsets: tuple[int, ...]
    activation: str
    range: str
    rounding: str
    effective_bits: float
    reason: str = ""


def classify(figures: ProbeFigures) -> Classification:
    """The class of one product."""
    activation = _activation_of(figures)
    better = {} if figures.activation_block else {each.offset: each for each in figures.block_pairs}
    pairs = tuple(better.get(each.offset, each) for each in figures.pairs)
    short = tuple(each for each in pairs if not each.is_whole)
    bits = min((each.bits for each in short), default=F32_BITS)
    whole = [each for each in pairs if each.is_whole and each.bits > bits]
    short_offsets: tuple[int, ...] = ()
    reason = ""
    if not figures.is_finite or not pairs:
        accumulator, accumulation = "UNKNOWN", _word("UNKNOWN")
        reason = "some results are not finite"
    elif not short:
        accumulator, accumulation = "F64" if _keeps_more_than_f32(figures) else "F32", _word("F32")
        most = max(each.bits_asked for each in pairs)
        least = _CONTRADICTION_BITS if most >= F32_BITS else _EFFECTIVE_BITS_MIN
        if figures.weights_kept == 1.0 and figures.effective_bits < least:
            accumulator, accumulation = "UNKNOWN", _word("UNKNOWN")
            reason = f"pairs are kept, but sums of random rows to {figures.effective_bits:.1f} bits only"
        elif figures.weights_kept < 1.0 and most < F32_BITS:
            accumulator, accumulation = f"{most}-bit or more", _word("MIXED")
            reason = "terms and weights lose bits before they are added up"
    elif whole:
        accumulator, accumulation = f"MIXED {_name(bits, figures)}/F32", _word("MIXED")
        short_offsets = tuple(sorted({each.offset for each in short}))
    elif any(each.bits != bits for each in short):
        most = max(each.bits for each in short)
        accumulator = f"MIXED {_name(bits, figures)}/{_name(most, figures)}"
        accumulation = _word("MIXED")
        short_offsets = tuple(sorted({each.offset for each in short if each.bits == bits}))
    elif _is_lost_in_sums(figures, bits):
        accumulator, accumulation = _name(bits, figures), _word_of_bits(bits)
    else:
        accumulator = f"wider, results in {_name(bits, figures)}"
        accumulation = _word_of_bits(bits)
    return Classification(
        accumulator=accumulator,
        accumulation=accumulation,
        bits=bits,
        short_offsets=short_offsets,
        activation=activation,
        range="wide" if figures.sum_range_is_wide else "F16",
        rounding=_rounding_of(figures, bits, short),
        effective_bits=figures.effective_bits,
        reason=reason,
    )


def _activation_of(figures: ProbeFigures) -> str:
    """The format in which rows are taken, or UNKNOWN."""
    nearest = min(figures.format_distances, key=lambda each: each[1], default=("", 0.0))[0]
    if figures.activation_block:
        name = _BLOCK_FORMATS.get(figures.activation_block, "UNKNOWN")
        return name if name.lower() == nearest.lower() else "UNKNOWN"
    is_hidden = any(not each.is_whole and each.bits <= F16_BITS for each in figures.pairs)
    name = _FLOAT_ACTIVATIONS.get((figures.activation_bits, figures.activation_range_is_wide), "UNKNOWN")
    # Behind short sums rows of F32 and of TF32 look alike, and neither is what one would expect.
    return "UNKNOWN" if name == "TF32" and is_hidden else name


def _keeps_more_than_f32(figures: ProbeFigures) -> bool:
    """Whether sums keep what F32 loses for certain."""
    beyond = [each for each in figures.cancellations if each.exponent > F32_BITS]
    return sum(each.count for each in beyond) >= _CANCELLATIONS_MIN and not any(each.lost for each in beyond)


def _is_lost_in_sums(figures: ProbeFigures, bits: int) -> bool:
    """Whether what a result of so many bits could not hold was lost before it: then the sum is short."""
    beyond = [each for each in figures.cancellations if bits <= each.exponent < F32_BITS]
    return not beyond or any(each.lost for each in beyond)


def _name(bits: int, figures: ProbeFigures) -> str:
    """Of sums that keep so many bits."""
    if bits == F16_BITS and not figures.sum_range_is_wide:
        return "F16"
    return "BF16" if bits == BF16_BITS else f"{bits}-bit"


def _word_of_bits(bits: int) -> Accumulation:
    """Short everywhere, in one word: nothing that is short is ever taken for F32, or for not measured."""
    return _word("BF16" if bits <= BF16_BITS else "F16" if bits <= F16_BITS else "MIXED")


def _word(accumulation: Accumulation) -> Accumulation:
    return accumulation


def _rounding_of(figures: ProbeFigures, bits: int, short: tuple[PairFigure, ...]) -> str:
    """How the shortest sums are rounded, where terms so small could be asked about."""
    if not short and max((each.bits_asked for each in figures.pairs), default=0) < F32_BITS:
        return ""
    offsets = {each.offset for each in short if each.bits == bits}
    quotients = {
        each.quotient
        for each in figures.roundings
        if each.bits == bits and (not short or each.offset in offsets)
    }
    if quotients == {1.0}:
        return "nearest"
    return "toward zero" if quotients == {0.0} else ""
