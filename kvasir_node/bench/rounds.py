"""The arithmetic of a benchmark: rounds of interleaved modes, and the figures that they give.

A machine's speed drifts by more than what is measured here, so every mode runs in every round, token blocks
in turns and in an order that rotates, and modes are compared within a round: figures are medians of per-round
ratios and differences.
The module knows numbers only; it starts and times nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

REFERENCE = "reference"
ONE_WORKER = "1 worker"
TWO_WORKERS = "2 workers"
RPC = "llama.cpp RPC"
SWARM_MODES = (ONE_WORKER, TWO_WORKERS)
MODES = (REFERENCE, *SWARM_MODES)
"""What every benchmark runs; `RPC` is a further mode where there is a server."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One mode in one round.

    `decode_ns` has the time of each single-token decode, `prefill_ns` that of the prompt of
    `n_prefill` tokens in one decode. CPU times and bytes are those of all the single-token decodes; bytes are
    what the dispatcher counted, frames without TLS, and 0 where there is no dispatcher.
    """

    decode_ns: tuple[int, ...]
    prefill_ns: int
    n_prefill: int
    backbone_cpu_ns: int
    workers_cpu_ns: int
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def token_ns(self) -> float:
        """Nanoseconds of a decoded token: the median, which a single disturbance does not move."""
        return float(statistics.median(self.decode_ns))

    @property
    def backbone_cpu_ms(self) -> float:
        """Milliseconds of CPU time a token in the backbone, or in the one process of the reference."""
        return self.backbone_cpu_ns / len(self.decode_ns) / 1e6

    @property
    def workers_cpu_ms(self) -> float:
        """Milliseconds of CPU time a token in all workers together."""
        return self.workers_cpu_ns / len(self.decode_ns) / 1e6

    @property
    def cpu_ms(self) -> float:
        """Milliseconds of CPU time a token in all processes together."""
        return self.backbone_cpu_ms + self.workers_cpu_ms

    @property
    def sent_bytes_per_token(self) -> float:
        """Bytes of frames from the backbone to its workers for each token."""
        return self.sent_bytes / len(self.decode_ns)

    @property
    def received_bytes_per_token(self) -> float:
        """Bytes of frames from the workers to their backbone for each token."""
        return self.received_bytes / len(self.decode_ns)


Round = Mapping[str, Sample]
"""One sample of each mode."""


def order_of(modes: Sequence[str], index: int) -> tuple[str, ...]:
    """The order of the modes in round `index`: each mode is first, second and last equally often."""
    first = index % len(modes)
    return (*modes[first:], *modes[:first])


def median_of(rounds: Sequence[Round], figure: Callable[[Round], float]) -> float:
    """The median over the rounds of a figure made from one round."""
    return float(statistics.median(figure(each) for each in rounds))


def median_in(rounds: Sequence[Round], mode: str, figure: Callable[[Sample], float]) -> float:
    """The median over the rounds of a figure made from one mode's sample."""
    return median_of(rounds, lambda each: figure(each[mode]))


def decode_ratio(rounds: Sequence[Round], mode: str, base: str = REFERENCE) -> float:
    """Decoded tokens a second of `mode`, divided by those of `base`."""
    return median_of(rounds, lambda each: each[base].token_ns / each[mode].token_ns)


def prefill_ratio(rounds: Sequence[Round], mode: str, base: str = REFERENCE) -> float:
    """Prompt tokens a second of `mode`, divided by those of `base`."""
    return median_of(rounds, lambda each: each[base].prefill_ns / each[mode].prefill_ns)


def layer_overhead_us(rounds: Sequence[Round], mode: str, n_moe_layer: int) -> float:
    """Microseconds that each MoE layer of a decoded token takes longer than in the reference."""
    return median_of(
        rounds, lambda each: (each[mode].token_ns - each[REFERENCE].token_ns) / 1000 / n_moe_layer
    )
