"""Router authority, shown to matter: replicated routers beside the pinned one, on really different kernels.

Three ways to run one model on two nodes whose kernels differ. *Apart*: each computes everything by itself,
and two routers choose. *In step*: each has a router and a trunk, computes the experts that it holds by its
own choice, and takes the other's rows for the rest; a row that the other's router did not choose is missing.
*Pinned*: one router chooses, and both compute what it says. What is measured is disagreement inside the
swarm; the distance from a reference outside is another matter, and stands apart. It refuses to know networks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvasir_node.backbone.hook import ExpertHook, LayerCall
from kvasir_node.backbone.traces import Numbers, Rows, Traces, joined_traces
from kvasir_node.kernels.addressed_arrays import array_at
from kvasir_node.kernels.port import ExpertKernel
from kvasir_node.measure.backends_here import Backend
from kvasir_node.measure.decisions import DecisionComparison, compare_choices
from kvasir_node.measure.in_process import (
    InProcessModel,
    KernelExperts,
    ModelSettings,
    rows_of_pairs,
)
from kvasir_node.measure.levels import compare_recordings
from kvasir_node.measure.recording import Recording, chunks_of
from kvasir_node.measure.statistics import LogitsComparison, compare_logits
from kvasir_node.model.expert_bytes import ExpertSource
from kvasir_node.model.store import StoredModel
from kvasir_proto.errors import EngineFailed, UsageError

Flags = npt.NDArray[np.bool_]

STEP_TIMEOUT_S: Final = 120.0
_SHARED_OF: Final = 3
"""Of every three experts one is held by both nodes, as hot ones are, one by the first, one by the second."""


@dataclass(frozen=True, slots=True)
class Inside:
    """Disagreement within a swarm of two: of routers, and what became of it.

    `choices` compares the two routers; None where there is one. `rows` were needed by all nodes together, and
    `rows_missing` of them nobody computed. `decisions_disagreeing` counts (layer, token) for which what was
    computed was not what a router chose, `logits` compares the nodes' own results; None where one has any.
    """

    choices: DecisionComparison | None
    rows: int
    rows_missing: int
    decisions: int
    decisions_disagreeing: int
    logits: LogitsComparison | None
    first_divergent_token: int | None


@dataclass(frozen=True, slots=True)
class AuthorityComparison:
    """One pair of kernels: three ways inside, and each way's distance from the outside reference."""

    a: str
    b: str
    positions: int
    apart: Inside
    in_step: Inside
    pinned: Inside
    outside: dict[str, LogitsComparison]
    outside_choices: dict[str, DecisionComparison]


@dataclass(frozen=True, slots=True)
class SwarmAuthority:
    """A swarm that runs as it is, with its one router: what was computed inside, and how far it is from the
    reference outside.
    """

    swarm: str
    reference: str
    positions: int
    pinned: Inside
    outside: LogitsComparison
    outside_choices: DecisionComparison


def authority_of_swarm(reference: Recording, swarm: Recording) -> SwarmAuthority:
    """Both were asked the same, and looked into. Raises `UsageError` otherwise, and where nobody saw what the
    swarm's holders were asked for.
    """
    compared = compare_recordings(reference, swarm)
    traces = swarm.traces
    if compared.logits is None or compared.decisions is None or traces is None:
        raise UsageError(f"nobody looked inside {reference.side} or {swarm.side}")
    if traces.asked is None:
        raise UsageError(f"{swarm.side} asks no holders: it has no router's word to obey")
    asked = dict(zip(traces.moe_layers, traces.asked, strict=True))
    return SwarmAuthority(
        swarm=swarm.side,
        reference=reference.side,
        positions=compared.positions,
        pinned=Inside(
            choices=None,
            rows=traces.experts.size,
            rows_missing=traces.experts.size - traces.asked.size,
            decisions=traces.experts.shape[0] * traces.experts.shape[1],
            decisions_disagreeing=disagreeing_decisions(traces, asked),
            logits=None,
            first_divergent_token=None,
        ),
        outside=compared.logits,
        outside_choices=compared.decisions,
    )


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one node's trunk gave for all windows."""

    logits: Rows
    traces: Traces


def measure_authority(
    model: StoredModel,
    pair: tuple[Backend, Backend],
    windows: Sequence[tuple[int, ...]],
    settings: ModelSettings,
    singly: int,
    say: Callable[[str], None] = lambda text: None,
) -> AuthorityComparison:
    """Run all three ways on these windows, and plain llama.cpp. Raises what a decode raises."""
    first, second = pair
    tokens = tuple(token for window in windows for token in window)
    lengths = tuple(map(len, windows))

    def logits_of(base: _Seen, run: _Seen) -> LogitsComparison:
        return compare_logits(base.logits, run.logits, tokens, lengths)

    say("the outside reference: llama.cpp alone")
    with InProcessModel(model, settings) as alone:
        reference = _evaluate(alone, windows, singly)
    say(f"apart: {first.name} and {second.name}, each by itself")
    by_itself = []
    for backend in pair:
        with InProcessModel(model, settings, KernelExperts(model, backend.make)) as whole:
            by_itself.append(_evaluate(whole, windows, singly))
    say("in step: two routers, rows exchanged")
    in_step, missing, needed = _run_in_step(model, pair, windows, settings, singly)
    say("pinned: one router, two holders")
    pinned_experts = _PinnedExperts(model, pair)
    with InProcessModel(model, settings, pinned_experts) as backbone:
        pinned = _evaluate(backbone, windows, singly)
        computed = pinned_experts.computed
    pinned_decisions = pinned.traces.experts.shape[0] * pinned.traces.experts.shape[1]
    apart_choices = compare_choices(by_itself[0].traces, by_itself[1].traces)
    step_choices = compare_choices(in_step[0].traces, in_step[1].traces)
    ways = {
        f"apart, {first.name}": by_itself[0],
        f"apart, {second.name}": by_itself[1],
        f"in step, {first.name}": in_step[0],
        f"in step, {second.name}": in_step[1],
        "pinned": pinned,
    }
    return AuthorityComparison(
        a=first.name,
        b=second.name,
        positions=len(tokens),
        apart=Inside(
            choices=apart_choices,
            rows=0,
            rows_missing=0,
            decisions=apart_choices.decisions,
            decisions_disagreeing=apart_choices.decisions_disagreeing,
            logits=logits_of(by_itself[0], by_itself[1]),
            first_divergent_token=first_difference(by_itself[0].logits, by_itself[1].logits),
        ),
        in_step=Inside(
            choices=step_choices,
            rows=needed,
            rows_missing=missing,
            decisions=step_choices.decisions,
            decisions_disagreeing=step_choices.decisions_disagreeing,
            logits=logits_of(in_step[0], in_step[1]),
            first_divergent_token=first_difference(in_step[0].logits, in_step[1].logits),
        ),
        pinned=Inside(
            choices=None,
            rows=pinned.traces.experts.size,
            rows_missing=pinned.traces.experts.size - sum(each.size for each in computed.values()),
            decisions=pinned_decisions,
            decisions_disagreeing=disagreeing_decisions(pinned.traces, computed),
            logits=None,
            first_divergent_token=None,
        ),
        outside={name: logits_of(reference, each) for name, each in ways.items()},
        outside_choices={name: compare_choices(reference.traces, each.traces) for name, each in ways.items()},
    )


def first_difference(base: Rows, run: Rows) -> int | None:
    """The first position whose most likely token differs, on the same text."""
    different = np.flatnonzero(base.argmax(axis=1) != run.argmax(axis=1))
    return int(different[0]) if len(different) else None


def disagreeing_decisions(traces: Traces, computed: dict[int, Numbers]) -> int:
    """For how many (layer, token) the experts that were computed are not those that the router chose.

    `computed` has, of each layer, the experts of every position in order: [positions, used].
    """
    count = 0
    for layer, chosen in zip(traces.moe_layers, traces.experts, strict=True):
        found = computed.get(layer)
        if found is None or found.shape != chosen.shape:
            count += len(chosen)
        else:
            count += int((np.sort(found, axis=1) != np.sort(chosen, axis=1)).any(axis=1).sum())
    return count


def _evaluate(model: InProcessModel, windows: Sequence[tuple[int, ...]], singly: int) -> _Seen:
    logits, traces = [], []
    for window in windows:
        rows, seen = model.evaluate(window, chunks_of(len(window), singly))
        if seen is None:
            raise EngineFailed("a run that is not looked into cannot be compared")
        logits.append(rows)
        traces.append(seen)
    return _Seen(np.concatenate(logits), joined_traces(traces))


def _held_by(node: int, n_expert: int) -> Flags:
    """Which experts a node holds: a third are held by both."""
    numbers = np.arange(n_expert) % _SHARED_OF
    held: Flags = (numbers == 0) | (numbers == 1 + node)
    return held


def _load(model: StoredModel, backend: Backend) -> ExpertKernel:
    with ExpertSource(model.source_path, model.manifest) as source:
        return backend.make(model.manifest, model.manifest.whole_shard(), source.read)


class _PinnedExperts:
    """One router's choices, computed by two kernels: the first one's own experts, the second one's others."""

    def __init__(self, model: StoredModel, pair: tuple[Backend, Backend]) -> None:
        self._kernels = [_load(model, each) for each in pair]
        self._first = _held_by(0, model.manifest.n_expert)
        self.computed: dict[int, Numbers] = {}
        """Of each layer, the experts that holders were asked for, position by position."""
        self.hook = ExpertHook(self._on_layer)

    def _on_layer(self, call: LayerCall) -> None:
        program = self.hook.programs[call.program_index]
        rows = rows_of_pairs(call)
        experts = np.array(array_at(call.ids_address, np.int32, len(rows)))
        out = array_at(call.out_address, np.float32, len(rows), call.n_embd_out)
        seen = np.full(len(rows), -1, np.int32)
        by_first = self._first[experts]
        for kernel, mine in zip(self._kernels, (by_first, ~by_first), strict=True):
            if mine.any():
                found = np.empty((int(mine.sum()), call.n_embd_out), np.float32)
                _compute(kernel, kernel.add_program(program), call, rows[mine], experts[mine], found)
                out[mine] = found
                seen[mine] = experts[mine]
        of_positions = seen.reshape(call.n_tokens, call.n_slots)
        before = self.computed.get(call.layer)
        self.computed[call.layer] = of_positions if before is None else np.concatenate([before, of_positions])

    def close(self) -> None:
        self.hook.close()
        for kernel in self._kernels:
            kernel.close()


def _compute(
    kernel: ExpertKernel,
    program_index: int,
    call: LayerCall,
    row_of_pair: Numbers,
    expert_of_pair: Numbers,
    out: Rows,
) -> None:
    """Some pairs of a call: their rows are gathered, since a call has no more rows than pairs."""
    used, numbers = np.unique(row_of_pair, return_inverse=True)
    x = np.ascontiguousarray(array_at(call.x_address, np.float32, call.x_rows, call.n_embd_in)[used])
    rows = np.ascontiguousarray(numbers.astype(np.int32).reshape(-1))
    experts = np.ascontiguousarray(expert_of_pair)
    kernel.compute(
        call.layer,
        program_index,
        len(x),
        len(rows),
        x.ctypes.data,
        rows.ctypes.data,
        experts.ctypes.data,
        out.ctypes.data,
    )


@dataclass(slots=True)
class _Offer:
    """What a node shows the other at a layer: its choices, and the rows of those that it holds."""

    layer: int
    experts: Numbers
    is_held: Flags
    rows: Rows


class _Meeting:
    """Where two nodes meet at each layer. A node that fails lets the other go at once."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=STEP_TIMEOUT_S)
        self.offers: list[_Offer | None] = [None, None]

    def exchange(self, node: int, offer: _Offer) -> _Offer:
        """Show an offer and get the other's. Raises `EngineFailed` when the other does not come."""
        try:
            self.offers[node] = offer
            self.barrier.wait()
            other = self.offers[1 - node]
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise EngineFailed("the other node did not come to the same layer") from None
        if other is None or other.layer != offer.layer or other.experts.shape != offer.experts.shape:
            raise EngineFailed("two nodes are not at the same layer")
        return other


class _ReplicatedExperts:
    """A node with a router of its own: it computes what it holds by its own choice, and takes the rest."""

    def __init__(self, model: StoredModel, backend: Backend, node: int, meeting: _Meeting) -> None:
        self._kernel = _load(model, backend)
        self._held = _held_by(node, model.manifest.n_expert)
        self._node = node
        self._meeting = meeting
        self.rows_needed = 0
        self.rows_missing = 0
        self.hook = ExpertHook(self._on_layer)

    def _on_layer(self, call: LayerCall) -> None:
        program = self.hook.programs[call.program_index]
        rows = rows_of_pairs(call)
        experts = np.array(array_at(call.ids_address, np.int32, len(rows)))
        out = array_at(call.out_address, np.float32, len(rows), call.n_embd_out)
        mine = self._held[experts]
        found = np.zeros((len(rows), call.n_embd_out), np.float32)
        if mine.any():
            part = np.empty((int(mine.sum()), call.n_embd_out), np.float32)
            number = self._kernel.add_program(program)
            _compute(self._kernel, number, call, rows[mine], experts[mine], part)
            found[mine] = part
        shape = (call.n_tokens, call.n_slots)
        offer = _Offer(
            call.layer, experts.reshape(shape), mine.reshape(shape), found.reshape(*shape, call.n_embd_out)
        )
        other = self._meeting.exchange(self._node, offer)
        taken, missing = take_rows(
            offer.experts, offer.is_held, offer.rows, other.experts, other.is_held, other.rows
        )
        out[:] = taken.reshape(len(rows), call.n_embd_out)
        self.rows_needed += len(rows)
        self.rows_missing += missing

    def close(self) -> None:
        self.hook.close()
        self._kernel.close()


def take_rows(
    experts: Numbers,
    is_held: Flags,
    rows: Rows,
    other_experts: Numbers,
    other_is_held: Flags,
    other_rows: Rows,
) -> tuple[Rows, int]:
    """A node's rows, completed from what the other computed for the same token, and how many nobody has.

    `experts` and `is_held` are [tokens, slots], `rows` [tokens, slots, width]; a missing row is zeros.
    """
    is_same = (experts[:, :, None] == other_experts[:, None, :]) & other_is_held[:, None, :]
    has = is_same.any(axis=2)
    where = is_same.argmax(axis=2)
    offered = np.take_along_axis(other_rows, where[:, :, None], axis=1)
    completed = np.where(is_held[:, :, None], rows, np.where(has[:, :, None], offered, np.float32(0)))
    return completed.astype(np.float32, copy=False), int((~is_held & ~has).sum())


def _run_in_step(
    model: StoredModel,
    pair: tuple[Backend, Backend],
    windows: Sequence[tuple[int, ...]],
    settings: ModelSettings,
    singly: int,
) -> tuple[tuple[_Seen, _Seen], int, int]:
    """Both nodes' results, how many rows were missing, and of how many."""
    meeting = _Meeting()
    experts: list[_ReplicatedExperts] = []
    seen: dict[int, _Seen] = {}
    failures: list[BaseException] = []

    def run(node: int, loaded: InProcessModel) -> None:
        try:
            seen[node] = _evaluate(loaded, windows, singly)
        except BaseException as error:
            failures.append(error)
            meeting.barrier.abort()

    loaded: list[InProcessModel] = []
    try:
        for node, backend in enumerate(pair):
            experts.append(_ReplicatedExperts(model, backend, node, meeting))
            loaded.append(InProcessModel(model, settings, experts[node]))
        threads = [
            threading.Thread(target=run, args=(node, each), name=f"replica-{node}", daemon=True)
            for node, each in enumerate(loaded)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        missing = sum(each.rows_missing for each in experts)
        needed = sum(each.rows_needed for each in experts)
    finally:
        for each in loaded:
            each.close()
    if failures:
        raise failures[0]
    return (seen[0], seen[1]), missing, needed
