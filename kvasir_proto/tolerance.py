"""Equivalence classes of kernels, and how far apart two kernels of given classes may be.

Decides the gate on relative L2 for a pair of classes and a model's widths, what a regression beside it may
find, and how many rows of integer activations may have had a quant flip. Numbers are those of the design,
section 5, measured on real kernels. Apart from certificates and audits because both judge by it, and from
whoever computes rows because a gate depends on classes and shapes only. It refuses to know rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvasir_proto.limits import Accumulation

INTEGER_ACTIVATIONS: Final = frozenset({"Q8_0", "Q8_K"})
"""Formats of eight bits that share a step a block: a last bit of a hidden row can move a quant by one."""

SHORT_FLOAT_ACTIVATIONS: Final = frozenset({"F16", "BF16"})

POOLED_ROWS_MIN: Final = 64
"""Rows whose squared distances are added up before a gate is asked."""

_F32_GATE: Final = 2e-6
_F32_GATE_WIDTH: Final = 3072
_SHORT_FLOAT_GATE: Final = 5e-5
_INTEGER_GATE: Final = 2e-4
_INTEGER_GATE_N_FF: Final = 1024
_F16_AGAINST_F32_GATE: Final = 1e-3

_REGRESSION_SHARE: Final = 1 / 8
"""Of the gate. Errors that know nothing of each other move a slope by the gate over the root of the number
of values, which is a ninetieth for the smallest pool; what has a direction moves it by all it is."""

_FLIP_RATE: Final = 0.01
"""Of rows, at n_ff 1024, and in proportion to it: above the 0.2 to 0.8 % that were measured."""

_FLIPS_CHANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class EquivalenceClass:
    """The arithmetic that a kernel really does: ("Q8_0", "F32"). Activations in another format than those
    named here, such as "TF32", are a class too, that has a gate against nothing.
    """

    activation: str
    accumulation: Accumulation


def gate_of(a: EquivalenceClass, b: EquivalenceClass, n_embd: int, n_ff: int) -> float | None:
    """The largest relative L2, pooled over at least `POOLED_ROWS_MIN` rows, at which two kernels are
    equivalent; None for classes between which a distance is no evidence.

    `n_embd` and `n_ff` are the widths of the experts' rows and of their hidden rows.
    """
    if a.accumulation != "F32" or b.accumulation != "F32":
        return None
    activations = {a.activation, b.activation}
    if activations == {"F16", "F32"}:
        return _F16_AGAINST_F32_GATE
    if len(activations) > 1:
        return None
    if activations == {"F32"}:
        return row_gate(n_embd, n_ff)
    if activations <= SHORT_FLOAT_ACTIVATIONS:
        return _SHORT_FLOAT_GATE
    if activations <= INTEGER_ACTIVATIONS:
        return _INTEGER_GATE * math.sqrt(_INTEGER_GATE_N_FF / n_ff)
    return None


def row_gate(n_embd: int, n_ff: int) -> float:
    """The largest relative L2 of one row of integer activations in which no quant flipped, and of rows of
    F32 activations: what the order of F32 sums of these widths is worth.
    """
    return max(_F32_GATE, _F32_GATE * math.sqrt(max(n_embd, n_ff) / _F32_GATE_WIDTH))


def regression_gate(gate: float) -> float:
    """How far the slope of one kernel's values over the other's may be from 1, and their mean difference from
    0 in units of the values' root mean square.
    """
    return gate * _REGRESSION_SHARE


def flips_max(n_rows: int, n_ff: int) -> int:
    """The most of `n_rows` rows in which honest kernels have a quant flipped, but for once in a million."""
    rate = min(0.5, _FLIP_RATE * n_ff / _INTEGER_GATE_N_FF)
    if n_rows == 0:
        return 0
    log_chance = n_rows * math.log1p(-rate)  # of exactly so many flips, from none on
    tail = 1 - math.exp(log_chance)
    flips = 0
    while tail > _FLIPS_CHANCE and flips < n_rows:
        flips += 1
        log_chance += math.log((n_rows - flips + 1) / flips) + math.log(rate / (1 - rate))
        tail -= math.exp(log_chance)
    return flips
