"""The referee: one row computed again from the model's own bytes, and what a node's answer differs by.

Decides what an audit sees of a row. It computes in the arithmetic that the node claims, with sums as exact as
F64 can have them, so that it stands for no kernel, and explains a difference by hidden values that were
rounded the other way where that could have happened. Apart from `kvasir_proto.audit`, which adds such
findings up, because that sees no rows. It refuses to know where rows come from.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_node.certification.comparison import Float64Array, count_flips
from kvasir_node.kernels.activation_formats import ACTIVATION_FORMATS, ACTIVATION_ROUNDINGS, processors_of
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.audit.finding import Finding, outcome_of
from kvasir_proto.errors import KvasirError, ProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram, StepOp
from kvasir_proto.tolerance import EquivalenceClass, flip_chance, gate_of, has_flips, row_gate

Float32Array = npt.NDArray[np.float32]

KEPT_BYTES_MAX: Final = 64 << 20
"""Bytes of experts that are kept for the next row of theirs; one is kept however large it is."""

_FLIPPED_POOLS_MAX: Final = 8
"""A flip's row is this many times over the gate of pooled rows at most; asked only where a program goes on
behind its last product, so that flips cannot be added up exactly."""


_CLASS_NAMES: Final = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q8_K": "Q8_K"}
"""Names of activation formats in the kernels' tables, to those of classes."""


@dataclass(frozen=True, slots=True)
class _Right:
    """What is right: `rows` [rows, n_out], what went into the last product, `hidden` [rows, n_ff], and how
    that was rounded. `down` gives the last weight; it `is_last` where nothing is done to what it gives.
    """

    rows: Float32Array
    hidden: Float32Array
    activation: str
    down: Callable[[], Float64Array]
    is_last: bool
    can_flip: bool

    @property
    def gate(self) -> float:
        """The largest relative L2 of a row in which nothing flipped."""
        return row_gate(self.rows.shape[1], self.hidden.shape[1])

    @property
    def flip_chance(self) -> float:
        """How often an honest kernel may have a flip."""
        return flip_chance(self.activation, self.hidden.shape[1]) if self.can_flip else 0.0

    def judge(self, index: int, answer: Float32Array) -> tuple[float, float, bool]:
        """An answer's relative L2 and slope, and whether flips explain what is over the gate."""
        residual, slope = _distance(answer, self.rows[index])
        return residual, slope, residual > self.gate and self.explains(index, answer, residual)

    def explains(self, index: int, answer: Float32Array, residual: float) -> bool:
        """Whether flips that could have happened account for what an answer differs by."""
        if not self.can_flip or not has_flips(self.activation):
            return False
        right, hidden = self.rows[index], self.hidden[index]
        if not self.is_last:
            one = EquivalenceClass(self.activation, "F32")
            gate = gate_of(one, one, len(right), len(hidden))
            return gate is not None and residual <= _FLIPPED_POOLS_MAX * gate
        return not count_flips(answer[None], right[None], hidden[None], self.activation, self.down()).foreign


class RowReferee:
    """Judges rows of one model. `read(tensor name, expert)` gives verified bytes. For one thread alone."""

    def __init__(
        self, manifest: ModelManifest, read: Callable[[str, int], bytes | bytearray | memoryview]
    ) -> None:
        self._manifest = manifest
        self._read = read
        self._kernels: OrderedDict[tuple[int, int, str | None], ReferenceKernel] = OrderedDict()

    def judge(
        self,
        node_id: NodeId,
        layer: int,
        program: ExpertProgram,
        expert: int,
        x: Float32Array,
        answers: Float32Array,
        activation: str | None = None,
    ) -> tuple[Finding, ...]:
        """What a node's `answers` [rows, width out] to the rows `x` [rows, width in] of one expert are.

        `activation` is the format in which the node claims to take rows, by the kernels' names; None is as
        the reference class does. Answers of another shape are of no row. An answer that ggml gives on another
        kind of processor is as good as the usual one.
        """
        processors = self._processors(layer, activation)
        rights: list[_Right] = []  # by processor, and no more than some row needed

        def right_on(number: int) -> _Right:
            while len(rights) <= number:
                processor = processors[len(rights)]
                rights.append(self._compute(layer, program, expert, x, activation, processor))
            return rights[number]

        right: _Right | None
        try:
            right = right_on(0)
        except (KvasirError, ProtocolError, KeyError):
            right = None  # a model or program that the referee cannot compute says nothing of a node
        findings = []
        for index, row in enumerate(x):
            answer = answers[index] if answers.ndim == 2 and index < len(answers) else np.zeros(0, np.float32)
            key = layer.to_bytes(4, "big") + expert.to_bytes(4, "big") + row.tobytes()
            residual = slope = math.inf
            is_sound = is_whole = is_explained = False
            if right is not None:
                expected = right.rows[index]
                is_sound = bool(np.isfinite(expected).all() and np.isfinite(row).all() and expected.any())
                is_whole = answer.shape == expected.shape and bool(np.isfinite(answer).all())
                if is_sound and is_whole:
                    residual, slope, is_explained = right.judge(index, answer)
                    for number in range(1, len(processors)):
                        if residual <= right.gate or is_explained:
                            break
                        other = right_on(number).judge(index, answer)
                        if other[0] <= right.gate or other[2]:
                            residual, slope, is_explained = other
            outcome = outcome_of(
                residual,
                right.gate if right is not None else 0.0,
                is_referee_sound=is_sound,
                is_answer_whole=is_whole,
                is_explained=is_explained,
            )
            findings.append(
                Finding(
                    node_id,
                    layer,
                    expert,
                    hashlib.sha256(key).digest(),
                    outcome,
                    residual,
                    right.gate if right is not None else 0.0,
                    slope,
                    right.flip_chance if right is not None else 0.0,
                )
            )
        return tuple(findings)

    def close(self) -> None:
        """Let go of all experts."""
        while self._kernels:
            self._kernels.popitem()[1].close()

    def _processors(self, layer: int, activation: str | None) -> tuple[str, ...]:
        """Those on which ggml may round the rows of this layer's experts differently."""
        types = (each.type.name for each in self._manifest.expert_tensors(layer))
        formats = {ACTIVATION_FORMATS.get(each, "") for each in types} if activation is None else {activation}
        return processors_of(sorted(each for each in formats if each in ACTIVATION_ROUNDINGS))

    def _compute(
        self,
        layer: int,
        program: ExpertProgram,
        expert: int,
        x: Float32Array,
        activation: str | None,
        processor: str,
    ) -> _Right:
        kernel = self._kernel(layer, expert, activation)
        kernel.round_as_on(processor)
        rows = _run(kernel, layer, program, expert, x)
        last = max(i for i, step in enumerate(program.steps) if step.op is StepOp.EXPERT_MATMUL)
        before, suffix = program.steps[last].input_a, program.steps[last].tensor
        hidden = x
        if before:
            inner = ExpertProgram(program.steps[:before], program.input_per_slot)
            hidden = _run(kernel, layer, inner, expert, x)
        types = {each.suffix: each.type.name for each in self._manifest.expert_tensors(layer)}
        return _Right(
            rows=rows,
            hidden=hidden,
            activation=_CLASS_NAMES[activation or ACTIVATION_FORMATS[types[suffix]]],
            down=lambda: kernel.weight(layer, suffix, expert),
            is_last=last + 1 == len(program.steps),
            can_flip=before > 0,
        )

    def _kernel(self, layer: int, expert: int, activation: str | None) -> ReferenceKernel:
        key = (layer, expert, activation)
        kernel = self._kernels.get(key)
        if kernel is None:
            shard = ShardSet.from_ranges([(layer, expert, expert + 1)])
            kernel = self._kernels[key] = ReferenceKernel(
                self._manifest, shard, self._read, Arithmetic.AS_GGML, activations=activation
            )
        self._kernels.move_to_end(key)
        while len(self._kernels) > 1 and sum(k.memory_bytes for k in self._kernels.values()) > KEPT_BYTES_MAX:
            self._kernels.popitem(last=False)[1].close()
        return kernel


def _run(
    kernel: ReferenceKernel, layer: int, program: ExpertProgram, expert: int, x: Float32Array
) -> Float32Array:
    index = kernel.add_program(program)
    rows, experts = np.arange(len(x), dtype=np.int32), np.full(len(x), expert, np.int32)
    return np.asarray(kernel.compute_rows(layer, index, x, rows, experts), np.float32)


def _distance(answer: Float32Array, right: Float32Array) -> tuple[float, float]:
    """Relative L2, and the factor that brings `right` nearest to `answer`."""
    found: Float64Array = answer.astype(np.float64)
    expected: Float64Array = right.astype(np.float64)
    size = float(expected @ expected)
    return math.sqrt(float((found - expected) @ (found - expected)) / size), float(found @ expected) / size
