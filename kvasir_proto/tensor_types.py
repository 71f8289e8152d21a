"""The tensor types a GGUF file may store: their numbers, names and block sizes.

Decides how many bytes a row of a given type takes, and nothing else. Apart from the manifest because the
GGUF reader, the manifest and expert programs all need the same table, and because it is the one place to
look at when ggml adds a type. It knows no arithmetic: how a block is read is a kernel's business.

Numbers and names are those of the pinned ggml (`ggml_type_name`). Types that ggml only uses for activations
(q8_1, q8_K) and types it has removed are left out on purpose: a file that claims them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class TensorType:
    """One storable type: `block_elements` values along the first dimension take `block_size_bytes`."""

    id: int
    name: str
    block_elements: int
    block_size_bytes: int

    def row_size_bytes(self, n_elements: int) -> int:
        """Bytes of a row of `n_elements`, which must be a multiple of `block_elements`."""
        if n_elements % self.block_elements:
            raise ValueError(f"{n_elements} values are not a whole number of {self.name} blocks")
        return n_elements // self.block_elements * self.block_size_bytes


_ALL = (
    TensorType(0, "f32", 1, 4),
    TensorType(1, "f16", 1, 2),
    TensorType(2, "q4_0", 32, 18),
    TensorType(3, "q4_1", 32, 20),
    TensorType(6, "q5_0", 32, 22),
    TensorType(7, "q5_1", 32, 24),
    TensorType(8, "q8_0", 32, 34),
    TensorType(10, "q2_K", 256, 84),
    TensorType(11, "q3_K", 256, 110),
    TensorType(12, "q4_K", 256, 144),
    TensorType(13, "q5_K", 256, 176),
    TensorType(14, "q6_K", 256, 210),
    TensorType(16, "iq2_xxs", 256, 66),
    TensorType(17, "iq2_xs", 256, 74),
    TensorType(18, "iq3_xxs", 256, 98),
    TensorType(19, "iq1_s", 256, 50),
    TensorType(20, "iq4_nl", 32, 18),
    TensorType(21, "iq3_s", 256, 110),
    TensorType(22, "iq2_s", 256, 82),
    TensorType(23, "iq4_xs", 256, 136),
    TensorType(24, "i8", 1, 1),
    TensorType(25, "i16", 1, 2),
    TensorType(26, "i32", 1, 4),
    TensorType(27, "i64", 1, 8),
    TensorType(28, "f64", 1, 8),
    TensorType(29, "iq1_m", 256, 56),
    TensorType(30, "bf16", 1, 2),
    TensorType(34, "tq1_0", 256, 54),
    TensorType(35, "tq2_0", 256, 66),
    TensorType(39, "mxfp4", 32, 17),
    TensorType(40, "nvfp4", 64, 36),
    TensorType(41, "q1_0", 128, 18),
    TensorType(42, "q2_0", 64, 18),
)

TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType({each.id: each for each in _ALL})
"""Every storable type by ggml's number."""

TENSOR_TYPES_BY_NAME: Mapping[str, TensorType] = MappingProxyType({each.name: each for each in _ALL})
"""Every storable type by ggml's name."""
