"""Equivalence classes of kernels, and how far apart two kernels of given classes may be.

Decides the gate on relative L2 for a pair of classes and a model's widths, what a regression beside it may
find, and in how many rows a rounded hidden value may have fallen the other way. Numbers were measured on real
kernels (docs/reference/equivalence.md). Apart from certificates and audits because both judge by it, and from
whoever computes rows because a gate depends on classes and shapes only. It refuses to know rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvasir_proto.limits import Accumulation

POOLED_ROWS_MIN: Final = 64
"""Rows whose squared distances are added up before a gate is asked."""

_F32_GATE: Final = 2e-6
_F32_GATE_WIDTH: Final = 3072
_ROUNDED_GATES: Final[Mapping[str, float]] = MappingProxyType(
    {"F16": 5e-5, "BF16": 1.5e-4, "Q8_0": 3e-4, "Q8_K": 4.5e-4}
)
"""At n_ff 1024; they go with the root of 1 / n_ff. Where rows are rounded on the way, a last bit of a hidden
value can move what it is rounded to, and the fewer hidden values there are, the more each one weighs."""

_OTHER_ROUNDING: Final = 4
"""Times the gate, between kernels that round a format in different ways. A value of the row that goes in then
falls the other way in some rows of a thousand, moves all hidden values a little, and some of these over a
tie: such a row is 4e-3 off. Measured of Q8_0 and Q8_K: 2.4 times the gate at most."""

_ROUNDED_GATE_N_FF: Final = 1024
_F16_AGAINST_F32_GATE: Final = 1e-3

_REGRESSION_SHARE: Final = 1 / 8
"""Of the gate. Errors that know nothing of each other move a slope by the gate over the root of the number
of values, which is a ninetieth for the smallest pool; what has a direction moves it by all it is."""

_FLIPS_A_ROW: Final[Mapping[str, float]] = MappingProxyType(
    {"F16": 0.5, "BF16": 0.1, "Q8_0": 0.025, "Q8_K": 0.006}
)
"""At n_ff 1024, and in proportion to it: above the 0.34, 0.06, 0.014 and 0.002 that were measured."""

_FLIPS_CHANCE: Final = 1e-6


@dataclass(frozen=True, slots=True)
class EquivalenceClass:
    """The arithmetic that a kernel really does: ("Q8_0", "F32"). Activations in another format than those
    named here, such as "TF32", are a class too, that has a gate against nothing. `rounding` says where a
    format is rounded in another of its ways than the usual one: two that differ in it are of one class, and
    may be farther apart.
    """

    activation: str
    accumulation: Accumulation
    rounding: str = ""


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
    gate = _ROUNDED_GATES.get(a.activation)
    if gate is None:
        return None
    wider = 1 if a.rounding == b.rounding else _OTHER_ROUNDING
    return wider * gate * math.sqrt(_ROUNDED_GATE_N_FF / n_ff)


def row_gate(n_embd: int, n_ff: int) -> float:
    """The largest relative L2 of one row in which no rounded value fell the other way, and of pooled rows of
    F32 activations: what the order of F32 sums of these widths is worth.
    """
    return max(_F32_GATE, _F32_GATE * math.sqrt(max(n_embd, n_ff) / _F32_GATE_WIDTH))


def regression_gate(gate: float) -> float:
    """How far the slope of one kernel's values over the other's may be from 1, and their mean difference from
    0 in units of the values' root mean square.
    """
    return gate * _REGRESSION_SHARE


def has_flips(activation: str) -> bool:
    """Whether rows of this format are rounded so that a hidden value can fall the other way."""
    return activation in _FLIPS_A_ROW


def flip_chance(activation: str, n_ff: int) -> float:
    """The most often that honest kernels give a row with a hidden value that fell the other way; 0 for a
    format in which none can.
    """
    return -math.expm1(-_FLIPS_A_ROW.get(activation, 0.0) * n_ff / _ROUNDED_GATE_N_FF)


def flips_max(activation: str, n_rows: int, n_ff: int) -> int:
    """The most of `n_rows` rows in which honest kernels have a hidden value that fell the other way, but for
    once in a million.
    """
    expected = _FLIPS_A_ROW[activation] * n_ff / _ROUNDED_GATE_N_FF
    log_none, log_some = -expected, math.log(-math.expm1(-expected))
    log_chance = n_rows * log_none  # of exactly so many rows, from none on
    tail = -math.expm1(log_chance)
    flips = 0
    while tail > _FLIPS_CHANCE and flips < n_rows:
        flips += 1
        log_chance += math.log((n_rows - flips + 1) / flips) + log_some - log_none
        tail -= math.exp(log_chance)
    return flips
