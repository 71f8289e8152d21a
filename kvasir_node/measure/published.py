"""Figures that others published of one expert layer on several backends, and which pair of ours is like each.

Decides what stands beside what: the published pairs are of a model and of machines that are not here, so each
is set beside a pair of the same two arithmetics at the same shape. Apart from the measurements because these
numbers were read, not measured. It refuses to know kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

PUBLISHED_SHAPE: Final = (3072, 1024)
"""n_embd and n_ff of the published layer: Qwen3.5-122B, layer 0."""

PUBLISHED_USED: Final = 8
"""Experts that a token uses there, of 256."""


@dataclass(frozen=True, slots=True)
class PublishedPair:
    """One published line. None where a figure was not given.

    `a` and `b` of ours: (backend, weight type), of which only the backend may differ. `explanation` says what
    the two arithmetics are thought to be, and what the distance then is.
    """

    name: str
    max_abs: float | None
    cosine: float | None
    ours: tuple[str, str, str] | None
    explanation: str

    @property
    def rel_l2(self) -> float | None:
        """What the cosine says of relative L2, if the two rows are of one length."""
        return None if self.cosine is None else math.sqrt(max(0.0, 2 * (1 - self.cosine)))


_EIGHT_BITS: Final = "the one rounds rows to eight bits in blocks of 32, the other not at all"
_TWO_BLOCKS: Final = "the one rounds rows to eight bits in blocks of 32, the other in blocks of 256"

PUBLISHED: Final = (
    PublishedPair("ROCm, numpy", 7.9e-7, 0.99996, ("ggml-cpu", "reference-f64", "q8_0"), _EIGHT_BITS),
    PublishedPair(
        "phone's ARM, numpy",
        1.4e-6,
        0.99992,
        ("ggml-cpu", "reference-f64", "q4_K"),
        "the one rounds rows to eight bits in blocks of 256, the other not at all",
    ),
    PublishedPair(
        "ROCm, phone's ARM", 1.5e-6, 0.99990, ("ggml-cpu", "reference-q8_0-rows", "q4_K"), _TWO_BLOCKS
    ),
    PublishedPair(
        "CUDA, ROCm",
        3.5e-10,
        1.0,
        ("ggml-cpu", "reference-as-ggml", "q8_0"),
        "one arithmetic on two machines: sums in another order, and now and then a flip",
    ),
    PublishedPair("CUDA, Grace ARM", None, 0.99975, ("ggml-cpu", "reference-q8_0-rows", "q4_K"), _TWO_BLOCKS),
    PublishedPair(
        "one backend, split and combined",
        3.6e-12,
        None,
        None,
        "splitting experts changes nothing here: every logit of a swarm is that of one process, bit for bit",
    ),
)
