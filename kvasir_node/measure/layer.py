"""Level "one layer": a single MoE layer's call over real worker processes, beside the machine's memory.

The model is one layer of noise of any shape, so that what a call costs can be told apart from the rest of a
token: microseconds in the hook's callback, bytes of frames, and the time in which the memory could at best
deliver the experts' weights. Every logit is compared with a single process's in every round. It judges
nothing and prints nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from kvasir_node.local_swarm import RunSettings, evaluate_logits, start_local_swarm, start_reference
from kvasir_node.measure.statistics import largest_delta
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.supervisor import Engine
from kvasir_proto.errors import UsageError
from kvasir_proto.messages.engine import LogitsEvaluated

ROUND_TIMEOUT_S: Final = 600.0
_SEED: Final = 20_261_130


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """What is run: in each round, for each of `batches`, so many calls of so many tokens."""

    n_workers: int = 3
    batches: tuple[int, ...] = (1, 32)
    n_calls: int = 16
    n_rounds: int = 5
    n_threads: int = 1


@dataclass(frozen=True, slots=True)
class CallFigures:
    """One layer call of `n_tokens`. Times are medians over all calls, bytes those of frames without TLS.

    `call_ns` is the time from the rows' coming to their being there, `step_ns` that of the decode around it,
    `reference_ns` that of the single process's decode. `n_experts` is how many different experts a call
    touches where routing is even.
    """

    n_tokens: int
    n_calls: int
    call_ns: float
    step_ns: float
    reference_ns: float
    sent_bytes: float
    received_bytes: float
    n_experts: float
    expert_bytes: float

    def roofline_ns(self, bytes_per_s: float) -> float:
        """The time in which the memory could deliver the weights."""
        return self.expert_bytes / bytes_per_s * 1e9


@dataclass(frozen=True, slots=True)
class LayerMeasurement:
    """What was measured, for each batch size, and how far it was from the single process."""

    figures: tuple[CallFigures, ...]
    max_abs_delta: float
    rows_retried: int
    positions: int


def expected_experts(n_expert: int, n_used: int, n_tokens: int) -> float:
    """How many experts are touched by `n_tokens` that use `n_used` each, where all are equally likely."""
    return float(n_expert * (1 - (1 - n_used / n_expert) ** n_tokens))


async def measure_layer(
    model: StoredModel, settings: LayerSettings, directory: Path, say: Callable[[str], None]
) -> LayerMeasurement:
    """Start a single process and a swarm, run the rounds on both, compare. ``directory`` is private.

    Needs about twice the model's memory. Raises `UsageError` for a model with more than one MoE layer, and
    what an engine reports.
    """
    manifest = model.manifest
    if len(manifest.moe_layers) != 1:
        raise UsageError(
            f"this measures models of one MoE layer, and {model.name} has {len(manifest.moe_layers)}"
        )
    n_ctx = max(settings.batches) * settings.n_calls
    run_settings = RunSettings(n_ctx=n_ctx, n_ubatch=max(settings.batches), n_threads=settings.n_threads)
    async with open_unwrapping_nursery() as nursery:
        say("the single process loads the whole model")
        reference, _ = await start_reference(nursery, model, run_settings, directory)
        say(f"a backbone and {settings.n_workers} workers load their parts")
        swarm = await start_local_swarm(
            nursery, model, run_settings, directory, n_workers=settings.n_workers, holders=1
        )
        rounds = _Rounds(reference, swarm.backbone, settings, directory, manifest.n_vocab)
        say("warming up")
        await rounds.run(keep=False)
        for index in range(settings.n_rounds):
            say(f"round {index + 1} of {settings.n_rounds}")
            await rounds.run(keep=True)
        for engine in (reference, swarm.backbone, *swarm.workers):
            await engine.close()
    expert_bytes = sum(each.size_bytes for each in manifest.tensors if each.is_expert) / manifest.n_expert
    return LayerMeasurement(
        figures=tuple(
            rounds.figures(n_tokens, manifest.n_expert, manifest.n_expert_used, expert_bytes)
            for n_tokens in settings.batches
        ),
        max_abs_delta=rounds.max_abs_delta,
        rows_retried=rounds.rows_retried,
        positions=rounds.positions,
    )


class _Rounds:
    """Runs both sides on the same tokens and keeps the times of what is to be kept."""

    def __init__(
        self, reference: Engine, backbone: Engine, settings: LayerSettings, directory: Path, n_vocab: int
    ) -> None:
        self._reference = reference
        self._backbone = backbone
        self._settings = settings
        self._directory = directory
        draws = np.random.Generator(np.random.PCG64(_SEED))
        n_tokens = max(settings.batches) * settings.n_calls
        self._tokens = tuple(int(each) for each in draws.integers(0, n_vocab, n_tokens))
        self._reference_ns: dict[int, list[int]] = {n_tokens: [] for n_tokens in settings.batches}
        self._step_ns: dict[int, list[int]] = {n_tokens: [] for n_tokens in settings.batches}
        self._call_ns: dict[int, list[int]] = {n_tokens: [] for n_tokens in settings.batches}
        self._sent_bytes = dict.fromkeys(settings.batches, 0)
        self._received_bytes = dict.fromkeys(settings.batches, 0)
        self.max_abs_delta = 0.0
        self.rows_retried = 0
        self.positions = 0

    async def run(self, *, keep: bool) -> None:
        """Every batch size once, on both sides; compare always, count only what is kept."""
        for n_tokens in self._settings.batches:
            chunks = (n_tokens,) * self._settings.n_calls
            base_path, run_path = self._directory / "single.npy", self._directory / "swarm.npy"
            alone = await self._evaluate(self._reference, chunks, base_path)
            before = await _dispatch_statistics(self._backbone)
            swarm = await self._evaluate(self._backbone, chunks, run_path)
            after = await _dispatch_statistics(self._backbone)
            delta = await trio.to_thread.run_sync(largest_delta, base_path, run_path)
            self.max_abs_delta = max(self.max_abs_delta, delta)
            self.rows_retried += swarm.rows_retried
            self.positions += sum(chunks)
            if keep:
                self._reference_ns[n_tokens] += alone.chunk_ns
                self._step_ns[n_tokens] += swarm.chunk_ns
                self._call_ns[n_tokens] += swarm.layers_ns
                self._sent_bytes[n_tokens] += after["bytes_sent"] - before["bytes_sent"]
                self._received_bytes[n_tokens] += after["bytes_received"] - before["bytes_received"]

    async def _evaluate(self, engine: Engine, chunks: tuple[int, ...], path: Path) -> LogitsEvaluated:
        return await evaluate_logits(engine, self._tokens[: sum(chunks)], chunks, path, ROUND_TIMEOUT_S)

    def figures(self, n_tokens: int, n_expert: int, n_used: int, expert_bytes: float) -> CallFigures:
        """The figures of one batch size; ``expert_bytes`` is the size of one expert."""
        n_calls = len(self._call_ns[n_tokens])
        n_experts = expected_experts(n_expert, n_used, n_tokens)
        return CallFigures(
            n_tokens=n_tokens,
            n_calls=n_calls,
            call_ns=statistics.median(self._call_ns[n_tokens]),
            step_ns=statistics.median(self._step_ns[n_tokens]),
            reference_ns=statistics.median(self._reference_ns[n_tokens]),
            sent_bytes=self._sent_bytes[n_tokens] / n_calls,
            received_bytes=self._received_bytes[n_tokens] / n_calls,
            n_experts=n_experts,
            expert_bytes=n_experts * expert_bytes,
        )


async def _dispatch_statistics(backbone: Engine) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(await backbone.statistics_json())
    dispatch: dict[str, Any] = values["dispatch"]
    return dispatch
