"""The functions of one row that expert programs use: gates, activations, clamps, as plain numpy.

Decides what each number of `GluKind` and `UnaryKind` means, in the precision of the arrays it is given. With
`as_ggml` the two GELUs that ggml looks up in a table of F16 numbers are rounded as that table is. Apart from
the reference kernel because a function is a formula, and a kernel is memory and order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvasir_proto.program import GluKind, UnaryKind

Rows = npt.NDArray[Any]

_GELU_CUBIC: Final = 0.044715
_ROOT_2_OVER_PI: Final = 0.79788456080286535587989211986876
_GELU_QUICK_SLOPE: Final = 1.702
_erf: Final = np.vectorize(math.erf, otypes=[np.float64])


def glu(kind: GluKind, gate: Rows, up: Rows, alpha: float, limit: float, *, as_ggml: bool) -> Rows:
    """A gated unit. `alpha` and `limit` are those of the step; kinds that have none ignore them."""
    if kind is GluKind.SWIGLU_OAI:
        gate = np.minimum(gate, limit)
        return _product(_swish(gate, alpha), np.clip(up, -limit, limit) + 1)
    if kind is GluKind.SWIGLU_CLAMP:
        return _product(_silu(np.minimum(gate, limit)), np.clip(up, -limit, limit))
    gates: dict[GluKind, Callable[[Rows], Rows]] = {
        GluKind.REGLU: _relu,
        GluKind.GEGLU: _gelu_of_table if as_ggml else _gelu,
        GluKind.SWIGLU: _silu,
        GluKind.GEGLU_ERF: _gelu_erf,
        GluKind.GEGLU_QUICK: _gelu_quick_of_table if as_ggml else _gelu_quick,
    }
    return _product(gates[kind](gate), up)


def unary(kind: UnaryKind, rows: Rows, *, as_ggml: bool) -> Rows:
    """A function of each number."""
    functions: dict[UnaryKind, Callable[[Rows], Rows]] = {
        UnaryKind.ABS: np.abs,
        UnaryKind.SGN: np.sign,
        UnaryKind.NEG: np.negative,
        UnaryKind.STEP: lambda x: (x > 0).astype(x.dtype),
        UnaryKind.TANH: np.tanh,
        UnaryKind.ELU: lambda x: np.where(x > 0, x, np.expm1(x)),
        UnaryKind.RELU: _relu,
        UnaryKind.SIGMOID: _sigmoid,
        UnaryKind.GELU: _gelu_of_table if as_ggml else _gelu,
        UnaryKind.GELU_QUICK: _gelu_quick_of_table if as_ggml else _gelu_quick,
        UnaryKind.SILU: _silu,
        UnaryKind.HARDSWISH: lambda x: x * _hard_sigmoid(x),
        UnaryKind.HARDSIGMOID: _hard_sigmoid,
        UnaryKind.EXP: np.exp,
        UnaryKind.EXPM1: np.expm1,
        UnaryKind.SOFTPLUS: lambda x: np.where(x > 20, x, np.log1p(np.exp(x))),
        UnaryKind.GELU_ERF: _gelu_erf,
    }
    return functions[kind](rows)


def _relu(x: Rows) -> Rows:
    return np.maximum(x, 0)


def _sigmoid(x: Rows) -> Rows:
    quotient: Rows = 1 / (1 + np.exp(-x))
    return quotient


def _swish(x: Rows, slope: float) -> Rows:
    quotient: Rows = x / (1 + np.exp(-slope * x))
    return quotient


def _silu(x: Rows) -> Rows:
    return _swish(x, 1.0)


def _hard_sigmoid(x: Rows) -> Rows:
    return np.clip((x + 3) / 6, 0, 1)


def _gelu(x: Rows) -> Rows:
    """GELU's usual approximation by tanh."""
    return _product(0.5 * x, 1 + np.tanh(_ROOT_2_OVER_PI * x * (1 + _GELU_CUBIC * x * x)))


def _gelu_quick(x: Rows) -> Rows:
    return _swish(x, _GELU_QUICK_SLOPE)


def _gelu_erf(x: Rows) -> Rows:
    return _product(0.5 * x, (1 + _erf(x * math.sqrt(0.5))).astype(x.dtype))


def _gelu_of_table(x: Rows) -> Rows:
    """As ggml: F16 in, F16 out, except beyond ten, where the result is x or nothing."""
    return np.where(x <= -10, 0, np.where(x >= 10, x, _table(_gelu, x))).astype(x.dtype)


def _gelu_quick_of_table(x: Rows) -> Rows:
    """As ggml: F16 in, F16 out."""
    return _table(_gelu_quick, x).astype(x.dtype)


def _table(function: Callable[[Rows], Rows], x: Rows) -> Rows:
    """What a table of F16 results, made with F32 arithmetic, gives for x."""
    return function(x.astype(np.float16).astype(np.float32)).astype(np.float16).astype(np.float32)


def _product(a: Rows, b: Rows) -> Rows:
    product: Rows = a * b
    return product
