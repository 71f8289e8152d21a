"""How many experts a call is expected to touch, and what their weights take at best."""

from __future__ import annotations

import pytest

from kvasir_node.measure.layer import CallFigures, expected_experts


@pytest.mark.parametrize(
    "n_expert, n_used, n_tokens, expected",
    [(256, 8, 1, 8.0), (8, 8, 5, 8.0), (256, 8, 32, 163.3), (4, 1, 2, 1.75), (256, 8, 10_000, 256.0)],
)
def test_experts_of_even_routing(n_expert: int, n_used: int, n_tokens: int, expected: float) -> None:
    assert expected_experts(n_expert, n_used, n_tokens) == pytest.approx(expected, abs=0.05)


def test_the_roofline_is_bytes_over_bandwidth() -> None:
    figures = CallFigures(1, 1, 0, 0, 0, 0, 0, 8, expert_bytes=2e9)
    assert figures.roofline_ns(4e9) == 0.5e9
