"""The referee: a row, or a sum of some, computed again from the model's bytes; what an answer differs by.

Decides what an audit sees of a row. It computes in the arithmetic that the node claims, with sums as exact as
F64 can have them, so that it stands for no kernel, and explains a difference by hidden values that were
rounded the other way where that could have happened. Apart from `kvasir_proto.audit`, which adds such
findings up, because that sees no rows. It refuses to know where rows come from.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_node.certification.comparison import Float64Array, is_of_flips, possible_flips
from kvasir_node.kernels.activation_formats import ACTIVATION_FORMATS, ACTIVATION_ROUNDINGS, processors_of
from kvasir_node.kernels.expert_functions import Rows
from kvasir_node.kernels.reference import Arithmetic, ReferenceKernel
from kvasir_proto.audit.finding import Finding, outcome_of
from kvasir_proto.errors import KvasirError, ProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.manifest import ModelManifest, ShardSet
from kvasir_proto.program import ExpertProgram, StepOp
from kvasir_proto.tolerance import EquivalenceClass, flip_chance, gate_of, has_flips, row_gate

Float32Array = npt.NDArray[np.float32]

_NUDGES: Final = 8
_DISTURBANCE: Final = 2.0**-22
"""Of a sum, by the root of its squared terms: what honest kernels' orders of adding up differ by, or more."""

KEPT_BYTES_MAX: Final = 64 << 20
"""Bytes of experts that are kept for the next row of theirs; one is kept however large it is."""

ORDINARY_RMS_MIN: Final = 1e-5
ORDINARY_MAX: Final = 3e4
"""Root mean square and largest value of what a node can be held to: products of smaller ones underflow in
F32, larger ones overflow in F16. What comes out of a model's norms is near one."""

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


class _RightSum:
    """The right sum of some experts' rows times weights; a row alone is such a sum, with a weight of 1.

    A distance is told in units of what was added up, not of what is left where that cancels: an honest
    kernel's error does not cancel with it.
    """

    def __init__(self, parts: Sequence[tuple[_Right, float]], index: int = 0) -> None:
        self._parts = parts
        self._index = index
        rows = [(part.rows[index].astype(np.float64), weight) for part, weight in parts]
        with np.errstate(all="ignore"):  # what is not finite is said of it
            self.values: Float64Array = np.sum([weight * row for row, weight in rows], axis=0)
            self._size = sum(abs(weight) * float(np.linalg.norm(row)) for row, weight in rows)

    @property
    def is_sound(self) -> bool:
        """Whether anybody can be held to it."""
        return math.isfinite(self._size) and self._size > 0 and bool(np.isfinite(self.values).all())

    @property
    def gate(self) -> float:
        """The largest distance at which nothing flipped."""
        return max(row_gate(len(self.values), part.hidden.shape[1]) for part, _ in self._parts)

    @property
    def flip_chance(self) -> float:
        """How often an honest kernel may have a flip in one of the rows."""
        none = 1.0
        for part, _ in self._parts:
            if part.can_flip:
                none *= 1 - flip_chance(part.activation, part.hidden.shape[1])
        return 1 - none

    def judge(self, answer: Float32Array) -> tuple[float, float, bool]:
        """An answer's distance and slope, and whether flips explain what is over the gate."""
        found: Float64Array = answer.astype(np.float64)
        difference = found - self.values
        residual = float(np.linalg.norm(difference)) / self._size
        length = float(np.linalg.norm(self.values))
        slope = 1 + float(difference @ self.values) / (length * self._size) if length else 1.0
        return residual, slope, residual > self.gate and self._explains(difference, residual)

    def _explains(self, difference: Float64Array, residual: float) -> bool:
        """Whether flips that could have happened account for what an answer differs by."""
        flipping = [
            (part, weight) for part, weight in self._parts if part.can_flip and has_flips(part.activation)
        ]
        if not flipping:
            return False
        if not all(part.is_last for part, _ in flipping):
            one = EquivalenceClass(flipping[0][0].activation, "F32")
            gate = gate_of(one, one, len(self.values), flipping[0][0].hidden.shape[1])
            return gate is not None and residual <= _FLIPPED_POOLS_MAX * gate
        directions = [
            weight * possible_flips(part.hidden[self._index], part.activation, part.down())
            for part, weight in flipping
        ]
        return is_of_flips(difference, self.gate * self._size, np.concatenate(directions, axis=1))


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
        pairs = ((expert, 1.0),)
        rights: dict[str, _Right] = {}

        def right_on(index: int, processor: str) -> _RightSum:
            if processor not in rights:  # no more than some row needs
                rights[processor] = self._compute(layer, program, expert, x, activation, processor)
            return _RightSum([(rights[processor], 1.0)], index)

        return tuple(
            self._judge(
                *(node_id, layer, expert, pairs, row, activation),
                answers[index] if answers.ndim == 2 and index < len(answers) else np.zeros(0, np.float32),
                partial(right_on, index),
            )
            for index, row in enumerate(x)
        )

    def judge_sum(
        self,
        node_id: NodeId,
        layer: int,
        program: ExpertProgram,
        expert: int,
        pairs: Sequence[tuple[int, float]],
        x: Float32Array,
        answer: Float32Array,
        activation: str | None = None,
    ) -> Finding:
        """What a node's `answer` [width out] is, which is to be the sum over `pairs`, experts and weights, of
        the rows for `x` [width in]; `expert` is the one of them for whose sake it is looked at.
        """

        def right_on(processor: str) -> _RightSum:
            compute = partial(self._compute, layer, program)
            return _RightSum(
                [(compute(each, x[None], activation, processor), weight) for each, weight in pairs]
            )

        return self._judge(node_id, layer, expert, pairs, x, activation, answer, right_on)

    def _judge(
        self,
        node_id: NodeId,
        layer: int,
        expert: int,
        pairs: Sequence[tuple[int, float]],
        x: Float32Array,
        activation: str | None,
        answer: Float32Array,
        right_on: Callable[[str], _RightSum],
    ) -> Finding:
        """Of one row or sum; `right_on(processor)` is what it has to be there."""
        residual = slope = math.inf
        gate = chance = 0.0
        is_sound = is_whole = is_explained = False
        # A model or program that the referee cannot compute says nothing of a node.
        with contextlib.suppress(KvasirError, ProtocolError, KeyError):
            for processor in self._processors(layer, activation):
                right = right_on(processor)
                if not is_sound:
                    is_sound = right.is_sound and bool(np.isfinite(x).all())
                    is_whole = answer.shape == right.values.shape and bool(np.isfinite(answer).all())
                    gate, chance = right.gate, right.flip_chance
                    if not (is_sound and is_whole):
                        break
                    residual, slope, is_explained = right.judge(answer)
                elif (other := right.judge(answer))[0] <= gate or other[2]:
                    residual, slope, is_explained = other
                if residual <= gate or is_explained:
                    break
        outcome = outcome_of(
            residual, gate, is_referee_sound=is_sound, is_answer_whole=is_whole, is_explained=is_explained
        )
        asked = hashlib.sha256(layer.to_bytes(4, "big"))
        for number, weight in pairs:
            asked.update(number.to_bytes(4, "big") + np.float32(weight).tobytes())
        asked.update(x.tobytes())
        return Finding(node_id, layer, expert, asked.digest(), outcome, residual, gate, slope, chance)

    def sensitivity(self, layer: int, program: ExpertProgram, expert: int, x: Float32Array) -> float:
        """By how much an answer moves, in relative L2, with the last bit of each value of the row `x` [width
        in]: large where nearly everything in it cancels, and then no kernel's sums are exact. Infinite where
        values are so small or large that honest kernels lose them, each in its own way.

        Nothing is rounded on the way. The bits that are turned are drawn anew each time: whoever chooses a
        row cannot choose it by them. Raises as the reference kernel does, `ValueError` for another width.
        """
        towards = np.random.default_rng().choice([-math.inf, math.inf], (_NUDGES, len(x)))
        rows = np.vstack([x, np.nextafter(x, towards.astype(np.float32))])
        kernel = self._kernel(layer, expert, "f32")
        kernel.add_program(program)  # raises for one that does not fit
        values = [np.asarray(each, np.float64) for each in kernel.values(layer, program, expert, rows)]
        with np.errstate(invalid="ignore", over="ignore"):
            if not all(_is_ordinary(each[0]) for each in values):
                return math.inf
        return _largest_move(values[-1])

    def unsteadiness(
        self, layer: int, program: ExpertProgram, expert: int, x: Float32Array, activation: str | None
    ) -> float:
        """By how much the answer to the row `x` moves, in relative L2, when every sum in it is off by what
        honest kernels differ by: large where a value is about to be rounded the other way.

        In the arithmetic of `judge`. Raises as `sensitivity`.
        """
        shard = ShardSet.from_ranges([(layer, expert, expert + 1)])
        kernel = _DisturbedKernel(
            self._manifest, shard, self._read, Arithmetic.AS_GGML, activations=activation
        )
        try:
            kernel.add_program(program)
            rows = np.repeat(x[None], 1 + _NUDGES, axis=0)
            return _largest_move(np.asarray(kernel.values(layer, program, expert, rows)[-1], np.float64))
        finally:
            kernel.close()

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
        kernel.add_program(program)  # raises for one that does not fit
        values = kernel.values(layer, program, expert, x)
        last = max(i for i, step in enumerate(program.steps) if step.op is StepOp.EXPERT_MATMUL)
        before, suffix = program.steps[last].input_a, program.steps[last].tensor
        types = {each.suffix: each.type.name for each in self._manifest.expert_tensors(layer)}
        return _Right(
            rows=np.asarray(values[-1], np.float32),
            hidden=np.asarray(values[before], np.float32),
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


class _DisturbedKernel(ReferenceKernel):
    """The reference, with every sum of every row but the first a little off."""

    def _product(self, a: Rows, weight: Rows) -> Rows:
        right = super()._product(a, weight)
        with np.errstate(all="ignore"):
            spread = np.sqrt((a * a) @ (weight * weight).T)
        off = _DISTURBANCE * spread * np.random.default_rng().standard_normal(right.shape)
        off[0] = 0.0
        disturbed: Rows = right + off
        return disturbed


def _largest_move(rows: Float64Array) -> float:
    """The largest relative L2 of the other rows from the first."""
    right = rows[0]
    size = float(np.linalg.norm(right))
    return float(np.linalg.norm(rows[1:] - right, axis=1).max()) / size if size else math.inf


def _is_ordinary(values: Float64Array) -> bool:
    """Whether these are of a size at which no kernel underflows or overflows, whatever it works in."""
    size = float(np.sqrt(np.mean(values * values)))
    return size >= ORDINARY_RMS_MIN and float(np.abs(values).max()) <= ORDINARY_MAX
