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
    normal one, and what rounds to more than `largest` is infinite.
    """

    significand_bits: int
    exponent_min: int
    largest: float


F64: Final = FloatFormat(53, -1022, float(np.finfo(np.float64).max))
F32: Final = FloatFormat(24, -126, float(np.finfo(np.float32).max))
F16: Final = FloatFormat(11, -14, 65504.0)
BF16: Final = FloatFormat(8, -126, float(np.finfo(np.float32).max))


@dataclass(frozen=True, slots=True)
class Accumulator:
    """How the products of a row's columns with a weight row's are added up.

    Column j belongs to lane (j // `at_once`) mod `lanes`. A lane adds `at_once` products as they are, adds
    them to its sum, and rounds that to `sums`. At the end lanes are added to the first, one after the other,
    each sum rounded to `lane_sums`, by default as `sums`. With `block` columns that happens after each block,
    whose sum is added in F32. Both factors are rounded to `factors` first, if there are any, and the result
    to `results`.
    """

    sums: FloatFormat
    lanes: int = 1
    at_once: int = 1
    lane_sums: FloatFormat | None = None
    block: int | None = None
    factors: FloatFormat | None = None
    results: FloatFormat = F32

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
        for index in range(a.shape[1]):
            left, right = a[:, index].transpose(1, 0, 2), weight[:, index].transpose(1, 2, 0)
            products = left * right if self.at_once == 1 else left @ right
            sums = rounded(sums + products, self.sums)
        total: Float64Array = sums[0]
        for lane in range(1, self.lanes):
            total = rounded(total + sums[lane], self.lane_sums or self.sums)
        return total


F16_SUMS: Final = Accumulator(F16, at_once=8)
"""What many GPUs do with F16 weights: dot-product instructions of eight products, added up in F16."""


def rounded(values: Float64Array, form: FloatFormat) -> Float64Array:
    """Float64 numbers rounded to a format, ties to even."""
    dropped = F64.significand_bits - form.significand_bits
    if dropped == 0:
        return values
    bits = np.ascontiguousarray(values).view(np.uint64)
    half = np.uint64((1 << (dropped - 1)) - 1)
    odd = (bits >> np.uint64(dropped)) & np.uint64(1)
    result = ((bits + half + odd) & ~np.uint64((1 << dropped) - 1)).view(np.float64)
    size = np.abs(result)
    small = size < math.ldexp(1.0, form.exponent_min)
    if small.any():
        quantum = math.ldexp(1.0, form.exponent_min - form.significand_bits + 1)
        result = np.where(small, np.rint(values / quantum) * quantum, result)
    large = size > form.largest
    if large.any():
        result = np.where(large, np.copysign(np.inf, result), result)
    return result
