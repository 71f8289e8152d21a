"""Rows of real kernels, honest and lying, as the audit's referee sees them: what its figures are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvasir_node.certification.certify import expert_program
from kvasir_node.certification.crafted_weights import random_rows
from kvasir_node.certification.row_referee import Float32Array, RowReferee
from kvasir_node.certification.synthetic_model import ExpertShape, MakeKernel, Read, SyntheticExperts, compute
from kvasir_node.kernels.accumulators import F32, Accumulator
from kvasir_node.kernels.activation_formats import ACTIVATION_FORMATS
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.ggml_cpu import GgmlCpuKernel
from kvasir_node.kernels.host_builds import built_hosts
from kvasir_node.kernels.liars import Lie, LyingKernel
from kvasir_node.kernels.opencl import OpenClKernel
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_node.native_library import load
from kvasir_proto.audit.finding import Finding
from kvasir_proto.errors import ConfigurationInvalid, EngineFailed
from kvasir_proto.ids import NodeId, node_id_of
from kvasir_proto.manifest import ModelManifest, ShardSet

SUBJECT = node_id_of(b"\1" * 32)
BATCHES = (1, 8, 64)
N_EXPERT = 4


@dataclass(frozen=True, slots=True)
class Case:
    """Experts of one weight type and shape; `n_rows` rows are recorded of each kernel."""

    weight_type: str
    shape: ExpertShape
    n_rows: int


CASES = (
    Case("q8_0", ExpertShape(256, 128), 16384),
    Case("q8_0", ExpertShape(3072, 1024), 4096),
    Case("q4_K", ExpertShape(512, 256), 16384),
    Case("f16", ExpertShape(256, 128), 16384),
    Case("bf16", ExpertShape(256, 128), 16384),
    Case("f32", ExpertShape(256, 128), 8192),
)


def experts_of(case: Case, seed: int = 1) -> SyntheticExperts:
    draws = np.random.default_rng(seed)
    parts = {
        part: np.stack(
            [random_rows(case.weight_type, *case.shape.shape_of(part)[::-1], draws) for _ in range(N_EXPERT)]
        )
        for part in ("gate", "up", "down")
    }
    return SyntheticExperts(case.shape, case.weight_type, parts)


def honest_kernels(case: Case) -> Iterator[tuple[str, MakeKernel, bool]]:
    """Kernels of the reference class: a name, how one is made, and whether it is too slow for many rows."""
    yield "ggml-cpu", GgmlCpuKernel, False
    if case.weight_type in ("f32", "f16", "q8_0", "q4_K"):
        try:
            experts_of(case).load(OpenClKernel).close()
        except (EngineFailed, ConfigurationInvalid):
            pass  # no device here
        else:
            yield "opencl", OpenClKernel, False
    form = ACTIVATION_FORMATS[case.weight_type]

    def numpy_f32(manifest: ModelManifest, shard: ShardSet, read: Read) -> ReferenceKernel:
        return ReferenceKernel(manifest, shard, read, Arithmetic.FLOAT32, activations=form)

    for build, missing in built_hosts().items():
        # ARMv8.6 adds products of F16 weights in F16: no member of this class, and its certificate says so.
        is_of_class = (build, form) != ("ggml-neon-v8.6", "f16")
        if not missing and is_of_class and case.weight_type in ("q8_0", "q4_K", "f16"):
            yield build, partial(make_kernel, build), True
    if form == "f32":  # elsewhere numpy adds rounded rows in F64
        yield "numpy-f32", numpy_f32, False

    def emulated(manifest: ModelManifest, shard: ShardSet, read: Read) -> ReferenceKernel:
        return ReferenceKernel(manifest, shard, read, Arithmetic.AS_GGML, Accumulator(F32, lanes=16))

    yield "f32-16-lanes", emulated, True


def record(
    case: Case, make: MakeKernel, n_rows: int, *, seed: int = 2, node_id: NodeId = SUBJECT
) -> list[Finding]:
    """Findings of rows of this kernel: noise of many sizes, some rows with values that stand out."""
    experts = experts_of(case)
    program = expert_program()
    kernel = experts.load(make)
    referee = RowReferee(experts.manifest, experts.read)
    draws = np.random.default_rng(seed)
    findings: list[Finding] = []
    while len(findings) < n_rows:
        batch = BATCHES[int(draws.integers(len(BATCHES)))]
        x = draws.standard_normal((batch, case.shape.n_embd)) / np.sqrt(case.shape.n_embd)
        x *= np.exp(draws.normal(0, 1, (batch, 1)))
        heavy = draws.random(batch) < 0.25
        x[heavy, :: case.shape.n_embd // 8] *= draws.choice((10, 50))
        expert = int(draws.integers(N_EXPERT))
        rows = x.astype(np.float32)
        answers = compute(kernel, program, rows, expert)
        findings += referee.judge(node_id, 0, program, expert, rows, answers)
    kernel.close()
    return findings[:n_rows]


def liar(lie: Lie) -> MakeKernel:
    return lambda manifest, shard, read: LyingKernel(lie, manifest, shard, read, 1)


def sum_of(kernel: ExpertKernel, x: Float32Array, pairs: Sequence[tuple[int, float]]) -> Float32Array:
    """What a holder says of one row [n_embd] that is asked of these experts, as the worker adds it up."""
    n_pair = len(pairs)
    index = kernel.add_program(expert_program())
    row_of_pair = np.zeros(n_pair, np.int32)
    experts = np.array([expert for expert, _ in pairs], np.int32)
    weights = np.array([weight for _, weight in pairs], np.float32)
    rows, total = np.empty((n_pair, len(x)), np.float32), np.empty(len(x), np.float32)
    addresses = (x.ctypes.data, row_of_pair.ctypes.data, experts.ctypes.data, rows.ctypes.data)
    kernel.compute(0, index, 1, n_pair, *addresses)
    fault = load().weighted_sums(
        *(rows.ctypes.data, row_of_pair.ctypes.data, weights.ctypes.data, n_pair, 1, len(x)),
        total.ctypes.data,
    )
    assert fault < 0
    return total
