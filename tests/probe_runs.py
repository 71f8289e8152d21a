"""`python -m tests.probe_runs --seeds 200`: what the accumulation probe calls kernels whose sums are known.

Every seed asks anew: other columns, other places in other experts, another weight type and batch class. The
table says how often each kernel was called what. Status 1 when one was ever called anything but what it is.
Without `--kernels` all are asked but those of kernel hosts, which are slow under an emulator: name them.
With `--held-out`: what the probe says, once, of kernels it was not made with.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from functools import partial

from kvasir_node.certification.classification import classify
from kvasir_node.certification.crafted_weights import CRAFTED_TYPES
from kvasir_node.certification.probe import probe_kernel
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.host_builds import built_hosts
from tests.node.certification.emulated_kernels import HELD_OUT, TABLE, WIDE, Emulated

BATCH_CLASSES = (1, 8, 32)
EMULATED_BATCH_CLASSES = (8, 32, 64)
"""Emulated kernels know no batches, and single rows take many calls."""

GGML = {"ggml-cpu": Emulated(GgmlCpuKernel, "F32", "F32", "")}


def hosts() -> dict[str, Emulated]:
    """Real builds for other processors, those that can be started here, by weights that they add alike."""
    found = {}
    for name, reason in built_hosts().items():
        if reason:
            continue
        make = partial(make_kernel, name)
        alike: dict[str, tuple[str, ...]] = {"": CRAFTED_TYPES}
        if name == "ggml-neon-v8.6":
            alike = {"/f16": ("f16",), "/others": tuple(each for each in CRAFTED_TYPES if each != "f16")}
        for suffix, weight_types in alike.items():
            word = "MIXED" if suffix == "/f16" else "F32"
            found[name + suffix] = Emulated(make, word, word, "", weight_types=weight_types)
    return found


def words(kernel: Emulated, seeds: range, *, knows_batches: bool) -> Counter[str]:
    """How often each word was said of a kernel, of both products together: the worse counts."""
    said: Counter[str] = Counter()
    for seed in seeds:
        weight_type = kernel.weight_types[seed % len(kernel.weight_types)]
        classes = BATCH_CLASSES if knows_batches else EMULATED_BATCH_CLASSES
        batch_class = classes[seed // len(kernel.weight_types) % len(classes)]
        found = {
            classify(each.figures).accumulation
            for each in probe_kernel(kernel.make, weight_type, kernel.shape, (batch_class,), seed)
        }
        said[" and ".join(sorted(found))] += 1
    return said


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def show_held_out() -> None:
    for name, kernel in HELD_OUT.items():
        for weight_type in ("f32", "q8_0", "q4_K"):
            for each in probe_kernel(kernel.make, weight_type, WIDE, (8,), seed=1):
                found = classify(each.figures)
                said = (found.accumulator, found.accumulation, found.activation, found.range, found.rounding)
                say(f"{name:28} {weight_type:5} {each.part:5} " + " | ".join(said))


def main(real: Mapping[str, Emulated], emulated: Mapping[str, Emulated], slow: Mapping[str, Emulated]) -> int:
    kernels = {**real, **emulated, **slow}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--kernels", default=",".join((*real, *emulated)), help="of " + ", ".join(kernels))
    parser.add_argument("--held-out", action="store_true")
    arguments = parser.parse_args()
    if arguments.held_out:
        show_held_out()
        return 0
    status = 0
    for name in arguments.kernels.split(","):
        kernel = kernels[name]
        said = words(kernel, range(arguments.seeds), knows_batches=name not in emulated)
        is_wrong = set(said) != {kernel.accumulation}
        status |= is_wrong
        told = ", ".join(f"{word} {count}" for word, count in sorted(said.items()))
        say(f"{name:28} adds in {kernel.accumulation:5} called {told}{'  WRONG' if is_wrong else ''}")
    return status


if __name__ == "__main__":
    sys.exit(main(GGML, TABLE, hosts()))
