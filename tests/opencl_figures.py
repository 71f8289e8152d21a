"""`python -m tests.opencl_figures`: the OpenCL kernel beside ggml's, as a table.

At the published shape (rows of 3072, experts of 1024, 8 of them), for each type of weights and each
accumulator: relative L2 against ggml's CPU kernel, pooled over all rows, and the best time of a call. Nothing
else should run meanwhile if the times are to mean anything.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.opencl import WEIGHT_TYPES, Accumulator, OpenClKernel
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.model_manifest import build_manifest
from kvasir_proto.program import GluKind
from tests.model_makers import ModelShape, make_qwen3moe, quantise
from tests.node.kernel_calls import Rows, computed, distance
from tests.node.test_reference_kernel import gated

SHAPE = ModelShape(n_layer=1, n_embd=3072, n_ff=1024, n_expert=8)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        plain = make_qwen3moe(Path(name) / "f32.gguf", SHAPE)
        for type_name in WEIGHT_TYPES:
            path = plain
            if type_name != "f32":
                file_type = {"q4_K": "Q4_K_S"}.get(type_name, type_name.upper())
                path = quantise(plain, Path(name) / f"{type_name}.gguf", file_type, pure=True)
            compare(path, type_name, options)
    return 0


def compare(path: Path, type_name: str, options: argparse.Namespace) -> None:
    """Print one type's lines."""
    manifest = build_manifest(path)
    shard = manifest.whole_shard()
    with ExpertSource(path, manifest) as source:
        kernels: dict[str, ExpertKernel] = {
            "ggml-cpu": GgmlCpuKernel(manifest, shard, source.read, threads=options.threads)
        }
        for accumulator in Accumulator:
            kernels[f"opencl {accumulator.value}"] = OpenClKernel(
                manifest,
                shard,
                source.read,
                device=options.device,
                threads=options.threads,
                accumulator=accumulator,
            )
    for n_token in options.tokens:
        draws = np.random.default_rng(n_token)
        x = draws.standard_normal((n_token, SHAPE.n_embd)).astype(np.float32)
        rows = np.repeat(np.arange(n_token, dtype=np.int32), SHAPE.n_expert)
        experts = np.tile(np.arange(SHAPE.n_expert, dtype=np.int32), n_token)
        ggml: Rows | None = None
        for name, kernel in kernels.items():
            times = []
            for _ in range(5):
                started = time.perf_counter()
                found = computed(kernel, 0, gated(GluKind.SWIGLU), x, rows, experts)
                times.append(time.perf_counter() - started)
            ggml = found if ggml is None else ggml
            sys.stdout.write(
                f"{type_name:5} {n_token:3} tokens  {name:12} {1e3 * min(times):8.1f} ms"
                f"  relative L2 {distance(found, ggml):.2e}\n"
            )
            sys.stdout.flush()
    for kernel in kernels.values():
        kernel.close()


if __name__ == "__main__":
    sys.exit(main())
