"""Which of ggml's roundings of an activation format a kernel has: by what processor its rows are rounded.

Asks for products of rows whose values lie where the roundings part, each within a last bit of a tie; of noise
a few values in a million do, so that it would tell them apart by chance only. The rounding that gives the
nearest products is the kernel's. Apart from the probe, which asks for sums and finds the format. It refuses
to know what follows from it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvasir_node.certification.synthetic_model import Float32Array, SyntheticExperts, compute
from kvasir_node.kernels.activation_formats import processors_of
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.program import ExpertProgram, ProgramStep, StepOp

_ROWS: Final = 64
_BLOCKS: Final = {"q8_0": 32, "q8_K": 256}
"""Values that share a step."""
_PRODUCT: Final = ExpertProgram(
    (ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_gate_exps.weight"),), input_per_slot=False
)


def processor_of(kernel: ExpertKernel, experts: SyntheticExperts, form: str, batch_class: int) -> str:
    """A name of `ROUNDINGS_OF_PROCESSOR`: the usual one where all round this format alike.

    `kernel` has loaded `experts`; `form` is the format in which it takes rows, by the kernels' names. Raises
    what the kernel raises.
    """
    names = processors_of([form])
    if len(names) == 1:
        return names[0]
    rows = rows_near_ties(experts.shape.n_embd, _BLOCKS[form])
    asked = np.resize(rows, (-(-_ROWS // batch_class) * batch_class, rows.shape[1]))
    calls = [asked[first : first + batch_class] for first in range(0, len(asked), batch_class)]
    found = np.concatenate([compute(kernel, _PRODUCT, each, 0) for each in calls])[:_ROWS]
    exact = experts.load(
        lambda manifest, shard, read: ReferenceKernel(manifest, shard, read, Arithmetic.AS_GGML, None, form)
    )
    assert isinstance(exact, ReferenceKernel)
    distances = {}
    for name in names:
        exact.round_as_on(name)
        distances[name] = float(np.linalg.norm(found - compute(exact, _PRODUCT, rows, 0)))
    return min(distances, key=distances.__getitem__)


def rows_near_ties(width: int, block: int) -> Float32Array:
    """Rows of blocks that share a step; some values in a hundred are rounded in more than one way."""
    draws = np.random.default_rng(3)
    n_block = -(-width // block)
    largest = draws.uniform(0.1, 10, (_ROWS, n_block, 1))
    blocks = (draws.integers(-100, 100, (_ROWS, n_block, block)) + 0.5) * largest / 127
    blocks[:, :, 7] = largest[:, :, 0]
    rows: Float32Array = blocks.astype(np.float32).reshape(_ROWS, -1)[:, :width]
    return np.ascontiguousarray(rows)
