"""Sums as unlike machines add them up, emulated: how many bits, how many partial sums, rounded when.

Decides what a matrix product is when its sums are kept in F16, in lanes, in blocks. Tests of the accumulation
probe and of everything that must tell such kernels apart run on these, and a person can give a swarm one to
see what becomes of it (`emulated-f16`). Apart from the reference kernel because that says what a program
means, and this what a machine makes of one sum. It is slow, and no backend to serve from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Numbers of so many significand bits, the leading one included; 2 ** `exponent_min` is the smallest
    normal one, and what rounds to more than `largest` is infinite, or `largest` where it `saturates`.
    """

    significand_bits: int
    exponent_min: int
    largest: float
    saturates: bool = False


F64: Final = FloatFormat(53, -1022, float(np.finfo(np.float64).max))
F32: Final = FloatFormat(24, -126, float(np.finfo(np.float32).max))
F16: Final = FloatFormat(11, -14, 65504.0)
BF16: Final = FloatFormat(8, -126, float(np.finfo(np.float32).max))
TF32: Final = FloatFormat(11, -126, float(np.finfo(np.float32).max))
E4M3: Final = FloatFormat(4, -6, 448.0, saturates=True)
"""Eight bits as tensor units take them, without a scale."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """How the products of a row's columns with a weight row's are added up.

    Column j belongs to lane (j // `at_once`) mod `lanes`. A lane adds `at_once` products as they are, adds
    them to its sum, and rounds that to `sums`. At the end lanes are added to the first, one after the other,
    each sum rounded to `lane_sums`, by default as `sums`. With `block` columns that happens after each block,
    whose sum is added in F32. Both factors are rounded to `factors` first, if there are any, and the result
    to `results`.

    `pairwise` lanes are added up as a tree. A `compensated` lane keeps what rounding took from its sum and
    takes it off the next products (Kahan). With `cut_columns` a lane loses, after so many columns and at the
    end, all bits that `cut` does not have.
    """

    sums: FloatFormat
    lanes: int = 1
    at_once: int = 1
    lane_sums: FloatFormat | None = None
    block: int | None = None
    factors: FloatFormat | None = None
    results: FloatFormat = F32
    pairwise: bool = False
    compensated: bool = False
    cut_columns: int | None = None
    cut: FloatFormat = BF16

    def add_up(self, a: Rows, weight: Rows) -> Float64Array:
        """`a @ weight.T` in this arithmetic: a [rows, columns], weight [out, columns]; [rows, out]."""
        factors = (np.asarray(a, np.float64), np.asarray(weight, np.float64))
        with np.errstate(all="ignore"):
            if self.factors is not None:
                factors = (rounded(factors[0], self.factors), rounded(factors[1], self.factors))
            total = np.zeros((len(a), len(weight)))
            if self.block is None:
                total = self._block(*factors)
            else:
                for begin in range(0, a.shape[1], self.block):
                    part = slice(begin, begin + self.block)
                    total = rounded(total + self._block(factors[0][:, part], factors[1][:, part]), F32)
            return rounded(total, self.results)

    def _block(self, a: Float64Array, weight: Float64Array) -> Float64Array:
        """The sum of one block's products: all of them, or `block` columns."""
        step = self.lanes * self.at_once
        missing = -a.shape[1] % step
        a = np.pad(a, ((0, 0), (0, missing))).reshape(len(a), -1, self.lanes, self.at_once)
        weight = np.pad(weight, ((0, 0), (0, missing))).reshape(len(weight), -1, self.lanes, self.at_once)
        sums = np.zeros((self.lanes, len(a), len(weight)))
        lost = np.zeros_like(sums)
        for index in range(a.shape[1]):
            left, right = a[:, index].transpose(1, 0, 2), weight[:, index].transpose(1, 2, 0)
            products = left * right if self.at_once == 1 else left @ right
            if self.compensated:
                products = rounded(products - lost, self.sums)
                before, sums = sums, rounded(sums + products, self.sums)
                lost = rounded(rounded(sums - before, self.sums) - products, self.sums)
            else:
                sums = rounded(sums + products, self.sums)
            is_last = index + 1 == a.shape[1]
            if self.cut_columns and (is_last or (index + 1) * step % self.cut_columns < step):
                sums = rounded(sums, self.cut, toward_zero=True)
        return self._added_lanes(sums)

    def _added_lanes(self, sums: Float64Array) -> Float64Array:
        form = self.lane_sums or self.sums
        if self.pairwise:
            while len(sums) > 1:
                sums = np.pad(sums, ((0, len(sums) % 2), (0, 0), (0, 0)))
                sums = rounded(sums[0::2] + sums[1::2], form)
        total: Float64Array = sums[0]
        for each in sums[1:]:
            total = rounded(total + each, form)
        return total


F16_SUMS: Final = Accumulator(F16, at_once=8)
"""What many GPUs do with F16 weights: dot-product instructions of eight products, added up in F16."""


def rounded(values: Float64Array, form: FloatFormat, *, toward_zero: bool = False) -> Float64Array:
    """Float64 numbers rounded to a format: to the nearest, ties to even, or toward zero."""
    dropped = F64.significand_bits - form.significand_bits
    if dropped == 0:
        return values
    bits = np.ascontiguousarray(values).view(np.uint64)
    if toward_zero:
        kept = bits.copy()
    else:
        kept = bits >> np.uint64(dropped)
        kept &= np.uint64(1)
        kept += bits
        kept += np.uint64((1 << (dropped - 1)) - 1)
    kept &= ~np.uint64((1 << dropped) - 1)
    result = kept.view(np.float64)
    size = np.abs(result)
    small = size < math.ldexp(1.0, form.exponent_min)
    small &= size > 0
    if small.any():
        quantum = math.ldexp(1.0, form.exponent_min - form.significand_bits + 1)
        counts = values / quantum
        result = np.where(small, (np.trunc(counts) if toward_zero else np.rint(counts)) * quantum, result)
    large = size > form.largest
    if large.any():
        limit = form.largest if form.saturates else np.inf
        result = np.where(large, np.copysign(limit, result), result)
    return result
