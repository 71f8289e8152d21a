"""How long a kernel takes for one row through one expert: a short piece of work at a node's start.

The work is the same every time and needs no file: experts of the model's largest shape with all weights zero,
whose arithmetic takes as long as any other, through the same port as real rows. The fastest of many short
rounds is what the node says of itself: the others were disturbed by somebody else. What the network and the
protocol add is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from kvasir_node.kernels.choice import make_kernel
from kvasir_node.kernels.liars import face_of
from kvasir_node.kernels.opencl_devices import ANY_DEVICE
from kvasir_node.kernels.port import ExpertKernel
from kvasir_proto.limits import Kernel
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram, GluKind, ProgramStep, StepOp, UnaryKind

WEIGHTS_BYTES_MAX: Final = 64 << 20
"""Weights that are made up: of large experts so many that they do not stay in a cache, but one at least."""

ROUND_NS: Final = 1_000_000
"""A round lasts at least so long, shorter than what a busy system lets a process have in one piece ..."""

ROUNDS_MAX: Final = 200
CPU_NS_MAX: Final = 200_000_000
TOTAL_NS_MAX: Final = 5_000_000_000
"""... and no round begins after so many, after so much processor time, or after so long. Where a busy machine
lets it have a hundredth of a processor, a short time would have no round that was not disturbed."""


def measure_row_ns(
    kernel: Kernel,
    manifest: ModelManifest,
    threads: int,
    device: str = ANY_DEVICE,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    cpu_ns: Callable[[], int] = time.process_time_ns,
) -> int:
    """Nanoseconds of one row through one expert, at least 1, in a token's batch of `n_expert_used` of them.

    Takes `CPU_NS_MAX` where nobody disturbs it and `TOTAL_NS_MAX` at most, or two calls where these take
    longer, and `WEIGHTS_BYTES_MAX` of memory. Raises as kernels do.
    """
    layer = max(manifest.moe_layers, key=lambda each: (manifest.expert_size_bytes(each), -each))
    n_held = min(manifest.n_expert, max(1, WEIGHTS_BYTES_MAX // manifest.expert_size_bytes(layer)))
    sizes = {each.name: each.expert_size_bytes for each in manifest.expert_tensors(layer)}
    zeros = bytes(max(sizes.values()))
    shard = ShardSet.from_ranges([(layer, 0, n_held)])
    computed = make_kernel(
        face_of(kernel),
        manifest,
        shard,
        lambda name, _expert: memoryview(zeros)[: sizes[name]],
        threads,
        device,
    )
    try:
        return _fastest_row_ns(computed, manifest, layer, n_held, clock_ns, cpu_ns)
    finally:
        computed.close()


def _fastest_row_ns(
    kernel: ExpertKernel,
    manifest: ModelManifest,
    layer: int,
    n_held: int,
    clock_ns: Callable[[], int],
    cpu_ns: Callable[[], int],
) -> int:
    program = kernel.add_program(program_like(manifest, layer))
    width_in, width_out = kernel.row_widths(layer, program)
    n_pairs = min(manifest.n_expert_used, n_held)
    row = np.linspace(-1.0, 1.0, width_in, dtype=np.float32)
    rows_of = np.zeros(n_pairs, np.int32)
    out = np.empty((n_pairs, width_out), np.float32)
    turns = [
        np.ascontiguousarray((np.arange(n_pairs) + first) % n_held, np.int32)
        for first in range(0, n_held, n_pairs)
    ]

    def call(number: int) -> None:
        experts = turns[number % len(turns)]
        kernel.compute(
            layer,
            program,
            1,
            n_pairs,
            row.ctypes.data,
            rows_of.ctypes.data,
            experts.ctypes.data,
            out.ctypes.data,
        )

    call(0)
    began = ended = clock_ns()
    cpu_began = cpu_ns()
    fastest: float | None = None
    number = 0
    for _ in range(ROUNDS_MAX):
        round_began, n_calls = ended, 0
        while ended - round_began < ROUND_NS:
            number += 1
            n_calls += 1
            call(number)
            ended = clock_ns()
        row_ns = (ended - round_began) / (n_calls * n_pairs)
        fastest = row_ns if fastest is None else min(fastest, row_ns)
        if ended - began >= TOTAL_NS_MAX or cpu_ns() - cpu_began >= CPU_NS_MAX:
            break
    assert fastest is not None
    return max(1, round(fastest))


def program_like(manifest: ModelManifest, layer: int) -> ExpertProgram:
    """The products of this layer's experts, joined as most models do.

    What the model's own graph asks for is known only to its backbone; its products are these, and they are
    what takes time.
    """
    suffixes = {each.suffix for each in manifest.expert_tensors(layer)}
    inner: tuple[ProgramStep, ...]
    swiglu = bytes([GluKind.SWIGLU]) + bytes(15)
    if "ffn_gate_up_exps.weight" in suffixes:
        inner = (
            ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_gate_up_exps.weight"),
            ProgramStep(StepOp.GLU, 1, params=swiglu),
        )
    elif "ffn_gate_exps.weight" in suffixes:
        inner = (
            ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_gate_exps.weight"),
            ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_up_exps.weight"),
            ProgramStep(StepOp.GLU, 1, 2, params=swiglu),
        )
    else:
        inner = (
            ProgramStep(StepOp.EXPERT_MATMUL, 0, tensor="ffn_up_exps.weight"),
            ProgramStep(StepOp.UNARY, 1, params=bytes([UnaryKind.SILU]) + bytes(15)),
        )
    down = ProgramStep(StepOp.EXPERT_MATMUL, len(inner), tensor="ffn_down_exps.weight")
    return ExpertProgram((*inner, down), input_per_slot=False)
