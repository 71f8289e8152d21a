"""What the gateway counts, in Prometheus' text format. Never what anybody said.

A registry of its own, since libp2p's goes into the library's global one. Times are in seconds, as Prometheus
has them; buckets reach from a token of a small model on one machine to a long prompt over slow links.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
_FIRST_TOKEN_S: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_NEXT_TOKEN_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0, 10.0)


class GatewayMetrics:
    """Counters of one gateway."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "kvasir_gateway_requests",
            "Requests that were answered, by what was asked for and the status of the answer",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.sessions = Gauge(
            "kvasir_gateway_sessions", "Answers that are being made", registry=self._registry
        )
        self.prompt_tokens = Counter(
            "kvasir_gateway_prompt_tokens", "Tokens of prompts", registry=self._registry
        )
        self.generated_tokens = Counter(
            "kvasir_gateway_generated_tokens", "Tokens that were generated", registry=self._registry
        )
        self.answers_cut_short = Counter(
            "kvasir_gateway_answers_cut_short",
            "Answers whose client went away, or whose gateway was stopped",
            registry=self._registry,
        )
        self.first_token_s = Histogram(
            "kvasir_gateway_first_token_seconds",
            "From a request to the first token of its answer",
            buckets=_FIRST_TOKEN_S,
            registry=self._registry,
        )
        self.next_token_s = Histogram(
            "kvasir_gateway_next_token_seconds",
            "From one token of an answer to the next",
            buckets=_NEXT_TOKEN_S,
            registry=self._registry,
        )

    def count_request(self, endpoint: str, status: int) -> None:
        """A request was answered. ``endpoint`` is one of ours, not what a client wrote."""
        self._requests.labels(endpoint, str(status)).inc()

    def watch_connections(self, count: Callable[[], int]) -> None:
        """Show how many connections there are, as ``count`` says it."""
        gauge = Gauge("kvasir_gateway_connections", "Connections of clients", registry=self._registry)
        gauge.set_function(count)

    @property
    def answers_now(self) -> int:
        """Answers that are being made."""
        return int(self._registry.get_sample_value("kvasir_gateway_sessions") or 0)

    @property
    def generated_tokens_total(self) -> int:
        """Tokens that were generated since the gateway began."""
        return int(self._registry.get_sample_value("kvasir_gateway_generated_tokens_total") or 0)

    def text(self) -> bytes:
        """Everything, as it stands now."""
        return generate_latest(self._registry)
