"""Rows of weights written block by block: exactly the numbers that were asked for, or none at all.

Decides which numbers a weight type can hold exactly, with which scales and quants, and writes them so. A
quantiser chooses scales for a small error, and the accumulation probe needs none at all. Apart from the probe
because this is about formats in a file, and the probe about sums. It refuses to know what rows are for.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, quants

from kvasir_node.kernels.activation_formats import as_bf16
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME

Bytes = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]
Exponents = npt.NDArray[np.int64]

CRAFTED_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q4_K", "q5_K", "q6_K")
"""Weight types, by ggml's name, whose rows can be written here."""

_F16_EXPONENTS: Final = (-24, 15)
_NO_BIT: Final = 1 << 14
"""The exponent of the lowest bit of nothing: above every other."""

_SUPER_BLOCK: Final = 256
_SIX_BIT_SCALE_EXPONENT_MAX: Final = 5
_Q6_K_SCALE_EXPONENT_MAX: Final = 6
_Q4_K_DEVIATION: Final = 167.8
"""Standard deviation of scale x (quant - 7.5), scales drawn from 0..63, quants from 0..15."""

_Q5_K_DEVIATION: Final = 337.2
"""The same of scale x (quant - 15.5), quants from 0..31."""

_Q6_K_DEVIATION: Final = 1354.0
"""The same of scale x (quant - 32), scales drawn from -127..127, quants from 0..63."""

_Q8_0_DEVIATION: Final = 73.6
"""Standard deviation of a uniform draw from -127..127."""


def exact_rows(type_name: str, values: Float64Array) -> tuple[Bytes, Flags]:
    """The bytes of rows with exactly these values, [rows, bytes], and which rows could be written so.

    `values` is [rows, columns]; Q4_K and Q5_K hold no negative ones here. The bytes of other rows mean
    nothing.
    """
    if type_name == "q8_0":
        return _exact_q8_0(values)
    if type_name in ("q4_K", "q5_K"):
        return _exact_q4_k_or_q5_k(type_name, values)
    if type_name == "q6_K":
        return _exact_q6_k(values)
    with np.errstate(over="ignore"):
        data = _float_bytes(type_name, values)
    is_written: Flags = np.all(expanded(type_name, data) == values, axis=1)
    return data, is_written


def random_rows(
    type_name: str, n_row: int, n_column: int, draws: np.random.Generator, *, exact_in_bf16: bool = False
) -> Bytes:
    """Rows of noise with a deviation near 1, of floats on request numbers that are exact in BF16."""
    if type_name == "q8_0":
        blocks = np.zeros((n_row, n_column // 32, 34), np.uint8)
        _put_f16(blocks, 0, draws.uniform(0.8, 1.2, blocks.shape[:2]) / _Q8_0_DEVIATION)
        blocks[:, :, 2:] = draws.integers(-127, 128, (*blocks.shape[:2], 32)).astype(np.int8).view(np.uint8)
    elif type_name in ("q4_K", "q5_K"):
        deviation, middle = (_Q4_K_DEVIATION, 7.5) if type_name == "q4_K" else (_Q5_K_DEVIATION, 15.5)
        blocks = _super_blocks(type_name, n_row, n_column)
        step = (draws.uniform(0.8, 1.2, blocks.shape[:2]) / deviation).astype(np.float16)
        _put_f16(blocks, 0, step)
        _put_f16(blocks, 2, middle * step.astype(np.float64))
        scales = draws.integers(0, 64, (*blocks.shape[:2], 8))
        blocks[:, :, 4:16] = _packed_scales(scales, scales)
        blocks[:, :, 16:] = draws.integers(0, 256, blocks[:, :, 16:].shape)
    elif type_name == "q6_K":
        blocks = _super_blocks(type_name, n_row, n_column)
        blocks[:, :, :192] = draws.integers(0, 256, (*blocks.shape[:2], 192))
        blocks[:, :, 192:208] = (
            draws.integers(-127, 128, (*blocks.shape[:2], 16)).astype(np.int8).view(np.uint8)
        )
        _put_f16(blocks, 208, draws.uniform(0.8, 1.2, blocks.shape[:2]) / _Q6_K_DEVIATION)
    else:
        values = draws.standard_normal((n_row, n_column)).astype(np.float32)
        return _float_bytes(type_name, as_bf16(values) if exact_in_bf16 else values.astype(np.float64))
    return blocks.reshape(n_row, -1)


def single_weights(
    type_name: str, columns: npt.NDArray[np.int64], n_column: int, draws: np.random.Generator
) -> Bytes:
    """Rows that are zero but for one weight each, at these columns, that needs all bits its type has."""
    n_row = len(columns)
    significands = 1 + draws.integers(0, 1 << 10, n_row) / 1024 + 1 / 1024
    at = np.arange(n_row)
    if type_name == "q8_0":
        blocks = np.zeros((n_row, n_column // 32, 34), np.uint8)
        _put_f16(blocks, 0, np.broadcast_to(significands[:, None], blocks.shape[:2]))
        quants_drawn = (2 * draws.integers(32, 64, n_row) + 1).astype(np.int8)
        blocks[at, columns // 32, 2 + columns % 32] = quants_drawn.view(np.uint8)
        return blocks.reshape(n_row, -1)
    if type_name in ("q4_K", "q5_K"):
        blocks = _super_blocks(type_name, n_row, n_column)
        _put_f16(blocks, 0, np.broadcast_to(significands[:, None], blocks.shape[:2]))
        scales = np.broadcast_to(
            (2 * draws.integers(16, 32, n_row) + 1)[:, None, None], (*blocks.shape[:2], 8)
        )
        blocks[:, :, 4:16] = _packed_scales(scales, np.zeros_like(scales))
        half = 4 if type_name == "q4_K" else 8
        levels = np.zeros((n_row, n_column // _SUPER_BLOCK, 8, 32), np.int64)
        group = columns % _SUPER_BLOCK // 32
        levels[at, columns // _SUPER_BLOCK, group, columns % 32] = (
            2 * draws.integers(half, 2 * half, n_row) + 1
        )
        blocks[:, :, 16:] = _packed_quants(type_name, levels)
        return blocks.reshape(n_row, -1)
    if type_name == "q6_K":
        # Scale and quant alone have more bits than F16; with a step that is no power of two what a kernel may
        # take away again (see `_exact_q6_k`) would have more than F32.
        blocks = _super_blocks(type_name, n_row, n_column)
        levels = np.zeros((n_row, n_column // _SUPER_BLOCK, _SUPER_BLOCK), np.int64)
        levels[at, columns // _SUPER_BLOCK, columns % _SUPER_BLOCK] = 2 * draws.integers(10, 16, n_row) + 1
        blocks[:, :, :192] = _packed_six_bits(levels + 32)
        scales = (2 * draws.integers(56, 64, n_row) + 1).astype(np.uint8)
        blocks[at, columns // _SUPER_BLOCK, 192 + columns % _SUPER_BLOCK // 16] = scales
        _put_f16(blocks, 208, np.ones(blocks.shape[:2]))
        return blocks.reshape(n_row, -1)
    bits = {"f32": 24, "f16": 11, "bf16": 8}[type_name]
    values = np.zeros((n_row, n_column))
    values[at, columns] = 1 + (2 * draws.integers(0, 1 << (bits - 2), n_row) + 1) * 2.0 ** (1 - bits)
    return _float_bytes(type_name, values)


def expanded(type_name: str, data: Bytes) -> Float64Array:
    """The numbers that rows of bytes stand for, [rows, columns]."""
    type_id = GGMLQuantizationType(TENSOR_TYPES_BY_NAME[type_name].id)
    with np.errstate(all="ignore"):
        return np.asarray(quants.dequantize(np.ascontiguousarray(data), type_id), np.float64)


def _float_bytes(type_name: str, values: Float64Array) -> Bytes:
    single = values.astype(np.float32)
    if type_name == "f32":
        return single.view(np.uint8)
    if type_name == "f16":
        return values.astype(np.float16).view(np.uint8)
    words = as_bf16(single).astype(np.float32).view(np.uint32) >> np.uint32(16)
    return words.astype(np.uint16).view(np.uint8)


def _exact_q8_0(values: Float64Array) -> tuple[Bytes, Flags]:
    cut = values.reshape(len(values), -1, 32)
    exponents = _lowest_bits(cut).min(axis=2)
    exponents = np.where(exponents == _NO_BIT, 0, exponents)
    levels = cut * np.exp2(-exponents)[..., None]
    fits = _f16_holds(exponents) & (np.abs(levels) <= 127).all(axis=2)
    blocks = np.zeros((*cut.shape[:2], 34), np.uint8)
    _put_f16(blocks, 0, np.exp2(np.clip(exponents, *_F16_EXPONENTS)))
    blocks[:, :, 2:] = np.clip(levels, -127, 127).astype(np.int8).view(np.uint8)
    is_written: Flags = np.all(fits, axis=1)
    return blocks.reshape(len(values), -1), is_written


def _exact_q4_k_or_q5_k(type_name: str, values: Float64Array) -> tuple[Bytes, Flags]:
    cut = values.reshape(len(values), -1, 8, 32)
    of_block, raised, levels = _levels_of(cut, _SIX_BIT_SCALE_EXPONENT_MAX)
    level_max = 15 if type_name == "q4_K" else 31
    fits = _f16_holds(of_block) & ((levels >= 0) & (levels <= level_max)).all(axis=(2, 3))
    blocks = _super_blocks(type_name, len(values), values.shape[1])
    _put_f16(blocks, 0, np.exp2(np.clip(of_block, *_F16_EXPONENTS)))
    scales = np.left_shift(1, raised)
    blocks[:, :, 4:16] = _packed_scales(scales, np.zeros_like(scales))
    blocks[:, :, 16:] = _packed_quants(type_name, np.clip(levels, 0, level_max).astype(np.int64))
    is_written: Flags = np.all(fits, axis=1)
    return blocks.reshape(len(values), -1), is_written


def _exact_q6_k(values: Float64Array) -> tuple[Bytes, Flags]:
    """With quants as large as they can be, and scales of zero where nothing is: a kernel may add up quants
    from 0 to 63 and take 32 away later, and what it takes away is to be small beside what is asked.
    """
    cut = values.reshape(len(values), -1, 16, 16)
    lowest = _lowest_bits(cut).min(axis=3)
    is_empty = lowest == _NO_BIT
    largest = np.frexp(np.abs(cut).max(axis=3))[1].astype(np.int64)
    finest = np.minimum(largest - 5, lowest)  # below it a quant would need six bits and a sign
    step = np.maximum(
        np.where(is_empty, _NO_BIT, finest).min(axis=2),
        np.where(is_empty, -_NO_BIT, finest).max(axis=2) - _Q6_K_SCALE_EXPONENT_MAX,
    )
    step = np.where(is_empty.all(axis=2), 0, np.maximum(step, _F16_EXPONENTS[0]))
    raised = np.clip(np.where(is_empty, 0, finest - step[..., None]), 0, _Q6_K_SCALE_EXPONENT_MAX)
    levels = cut * np.exp2(-(step[..., None] + raised))[..., None]
    fits = _f16_holds(step) & ((levels >= -32) & (levels <= 31) & (levels == np.rint(levels))).all(
        axis=(2, 3)
    )
    blocks = _super_blocks("q6_K", len(values), values.shape[1])
    quants_written = np.clip(np.rint(levels), -32, 31).astype(np.int64) + 32
    blocks[:, :, :192] = _packed_six_bits(quants_written.reshape(*blocks.shape[:2], _SUPER_BLOCK))
    blocks[:, :, 192:208] = np.where(is_empty, 0, np.left_shift(1, raised))
    _put_f16(blocks, 208, np.exp2(np.clip(step, *_F16_EXPONENTS)))
    is_written: Flags = np.all(fits, axis=1)
    return blocks.reshape(len(values), -1), is_written


def _levels_of(cut: Float64Array, scale_exponent_max: int) -> tuple[Exponents, Exponents, Float64Array]:
    """Of numbers [rows, blocks, groups, columns] the exponents of each block's step and of each group's
    scale, and the numbers in units of both: whole ones.
    """
    of_group = _lowest_bits(cut).min(axis=3)
    of_block = of_group.min(axis=2)
    of_block = np.where(of_block == _NO_BIT, 0, of_block)
    raised = np.clip(of_group - of_block[..., None], 0, scale_exponent_max)
    raised = np.where(of_group == _NO_BIT, 0, raised)
    return of_block, raised, cut * np.exp2(-(of_block[..., None] + raised))[..., None]


def _super_blocks(type_name: str, n_row: int, n_column: int) -> Bytes:
    """Blocks of zeros, [rows, blocks, bytes]."""
    size_bytes = TENSOR_TYPES_BY_NAME[type_name].row_size_bytes(_SUPER_BLOCK)
    return np.zeros((n_row, n_column // _SUPER_BLOCK, size_bytes), np.uint8)


def _lowest_bits(values: Float64Array) -> Exponents:
    """The exponent of each number's lowest bit that is set."""
    mantissas, exponents = np.frexp(np.abs(values))
    whole = np.ldexp(mantissas, 53).astype(np.int64)
    lowest = whole & -whole
    of_lowest = np.frexp(np.maximum(lowest, 1).astype(np.float64))[1] - 1
    return np.where(whole == 0, _NO_BIT, exponents.astype(np.int64) - 53 + of_lowest)


def _f16_holds(exponents: Exponents) -> Flags:
    return (exponents >= _F16_EXPONENTS[0]) & (exponents <= _F16_EXPONENTS[1])


def _put_f16(blocks: Bytes, offset: int, values: npt.NDArray[np.floating]) -> None:
    halves = np.ascontiguousarray(values, np.float16).view(np.uint8)
    blocks[:, :, offset : offset + 2] = halves.reshape(*blocks.shape[:2], 2)


def _packed_scales(scales: npt.NDArray[np.int64], minima: npt.NDArray[np.int64]) -> Bytes:
    """Eight scales and eight minima of six bits in twelve bytes, as ggml packs them."""
    packed = np.zeros((*scales.shape[:2], 12), np.uint8)
    packed[..., :4] = scales[..., :4] | (scales[..., 4:] >> 4) << 6
    packed[..., 4:8] = minima[..., :4] | (minima[..., 4:] >> 4) << 6
    packed[..., 8:] = (scales[..., 4:] & 15) | (minima[..., 4:] & 15) << 4
    return packed


def _packed_quants(type_name: str, levels: npt.NDArray[np.int64]) -> Bytes:
    """Quants of eight groups of 32: two groups share 32 bytes, the first in the low halves. Those of five
    bits have the fifth before that, a group's in one bit of 32 bytes.
    """
    low = levels & 15
    packed = low[:, :, 0::2] | low[:, :, 1::2] << 4
    halves = packed.astype(np.uint8).reshape(*levels.shape[:2], 128)
    if type_name == "q4_K":
        return halves
    fifth = (levels >> 4) << np.arange(8)[:, None]
    return np.concatenate([fifth.sum(axis=2).astype(np.uint8), halves], axis=2)


def _packed_six_bits(levels: npt.NDArray[np.int64]) -> Bytes:
    """256 quants of 0 to 63, as ggml packs them: of each 128 the low four bits of quarters one and three, and
    of two and four, share 32 bytes; behind all of those the high two bits of the four share one byte.
    """
    quarters = levels.reshape(*levels.shape[:2], 2, 4, 32)
    low, high = quarters & 15, quarters >> 4
    nibbles = low[..., :2, :] | low[..., 2:, :] << 4
    pairs = (high << (2 * np.arange(4))[:, None]).sum(axis=3)
    parts = [each.astype(np.uint8).reshape(*levels.shape[:2], -1) for each in (nibbles, pairs)]
    return np.concatenate(parts, axis=2)
