"""`python -m tests.probe_runs --seeds 200`: what the accumulation probe calls kernels whose sums are known.

Every seed asks anew: other columns, other places in other experts, another weight type and batch class. The
table says how often each kernel was called what. Status 1 when one that adds in F16 was ever called
anything else, or one that does not was called F32.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping

from kvasir_node.certification.classification import classify
from kvasir_node.certification.crafted_weights import CRAFTED_TYPES
from kvasir_node.certification.probe import probe_kernel
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from tests.node.certification.emulated_kernels import TABLE, Emulated

BATCH_CLASSES = (1, 8, 32)
GGML = {"ggml-cpu": Emulated(GgmlCpuKernel, "F32", "F32", "")}


def words(kernel: Emulated, seeds: range) -> Counter[str]:
    """How often each word was said of a kernel, of both products together: the worse counts."""
    said: Counter[str] = Counter()
    for seed in seeds:
        weight_type = CRAFTED_TYPES[seed % len(CRAFTED_TYPES)]
        batch_class = BATCH_CLASSES[seed // len(CRAFTED_TYPES) % len(BATCH_CLASSES)]
        found = {
            classify(each.figures).accumulation
            for each in probe_kernel(kernel.make, weight_type, kernel.shape, (batch_class,), seed)
        }
        said[" and ".join(sorted(found))] += 1
    return said


def main(kernels: Mapping[str, Emulated]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--kernels", default=",".join(kernels), help="of " + ", ".join(kernels))
    arguments = parser.parse_args()
    status = 0
    for name in arguments.kernels.split(","):
        kernel = kernels[name]
        said = words(kernel, range(arguments.seeds))
        is_wrong = set(said) != {kernel.accumulation}
        status |= is_wrong
        told = ", ".join(f"{word} {count}" for word, count in sorted(said.items()))
        line = f"{name:28} adds in {kernel.accumulation:5} called {told}{'  WRONG' if is_wrong else ''}\n"
        sys.stdout.write(line)
        sys.stdout.flush()
    return status


if __name__ == "__main__":
    sys.exit(main({**GGML, **TABLE}))
