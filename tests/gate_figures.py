"""`python -m tests.gate_figures`: how far ggml's kernel is from an exact one of its class, as a table.

What the gates of `kvasir_proto.tolerance` rest on: pools of 64 rows of whole experts, how far apart their
relative L2 lie, and how many rows have a hidden value that was rounded the other way. `foreign` counts rows
that differ by anything else: there should be none. `--kernel` is another kernel than ggml's own, such as a
kernel host's; `--processor` how the exact one rounds, and by another's rounding there are foreign rows.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import get_args

import numpy as np

from kvasir_node.certification.certify import expert_program
from kvasir_node.certification.comparison import count_flips
from kvasir_node.certification.crafted_weights import expanded, random_rows
from kvasir_node.certification.synthetic_model import ExpertShape, SyntheticExperts, compute
from kvasir_node.kernels.activation_formats import ROUNDINGS_OF_PROCESSOR
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.limits import Kernel
from kvasir_proto.program import ExpertProgram
from kvasir_proto.tolerance import EquivalenceClass, gate_of

POOL = 64
ACTIVATIONS = {"f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_K": "Q8_K"}
CASES = (
    *(
        ("f16", ExpertShape(256, 64), 128),
        ("f16", ExpertShape(256, 128), 128),
        ("f16", ExpertShape(3072, 1024), 24),
    ),
    *(
        ("bf16", ExpertShape(256, 64), 128),
        ("bf16", ExpertShape(256, 128), 128),
        ("bf16", ExpertShape(3072, 1024), 24),
    ),
    *(("q8_0", ExpertShape(256, 128), 128), ("q8_0", ExpertShape(3072, 1024), 64)),
    *(("q4_K", ExpertShape(512, 256), 128), ("q4_K", ExpertShape(3072, 1024), 64)),
)


def show(name: Kernel, processor: str, type_name: str, shape: ExpertShape, n_pool: int) -> None:
    draws = np.random.default_rng(1)
    parts = {
        part: random_rows(type_name, *shape.shape_of(part)[::-1], draws)[None]
        for part in ("gate", "up", "down")
    }
    experts = SyntheticExperts(shape, type_name, parts)
    kernel = experts.load(partial(make_kernel, name))
    exact = experts.load(partial(ReferenceKernel, arithmetic=Arithmetic.AS_GGML, processor=processor))
    program = expert_program()
    hidden_program = ExpertProgram(program.steps[:3], program.input_per_slot)
    down = expanded(type_name, parts["down"][0])
    activation = ACTIVATIONS[type_name]
    pools = []
    flipped = foreign = 0
    for _ in range(n_pool):
        x = (draws.standard_normal((POOL, shape.n_embd)) / np.sqrt(shape.n_embd)).astype(np.float32)
        found, expected = compute(kernel, program, x, 0), compute(exact, program, x, 0)
        hidden = compute(exact, hidden_program, x, 0)
        difference = np.linalg.norm(found.astype(np.float64) - expected)
        pools.append(difference / np.linalg.norm(expected.astype(np.float64)))
        flips = count_flips(found, expected, hidden, activation, down)
        flipped, foreign = flipped + flips.flipped, foreign + flips.foreign
    one = EquivalenceClass(activation, "F32")
    gate = gate_of(one, one, shape.n_embd, shape.n_ff)
    middle, most, largest = np.quantile(pools, (0.5, 0.9, 1.0))
    sys.stdout.write(
        f"{type_name:5} {shape.n_embd:5} {shape.n_ff:5} {n_pool * POOL:6} rows   median {middle:.1e}   "
        f"90 % {most:.1e}   largest {largest:.1e}   gate {gate:.1e}   flipped {flipped}   foreign {foreign}\n"
    )
    sys.stdout.flush()
    kernel.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=get_args(Kernel), default="ggml-cpu")
    parser.add_argument("--processor", choices=tuple(ROUNDINGS_OF_PROCESSOR), default="AVX")
    parser.add_argument("--weight-types", default=",".join(ACTIVATIONS))
    arguments = parser.parse_args()
    for case in CASES:
        if case[0] in arguments.weight_types.split(","):
            show(arguments.kernel, arguments.processor, *case)
