"""A trunk's measurement of itself: the fastest of a few tokens, and nothing is left of them."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir_node.backbone.token_speed import TOKENS_MAX, TOTAL_NS_MAX, measure_token_ns
from kvasir_node.backbone.trunk import DecodeFailed


class ScriptedTrunk:
    """Takes so long for each token, on a clock of its own."""

    def __init__(self, *token_times_ns: int, fails_at: int | None = None) -> None:
        self._times = token_times_ns
        self._fails_at = fails_at
        self.now_ns = 1000
        self.n_decoded = 0
        self.n_cleared = 0

    def decode(self, tokens: Sequence[int]) -> None:
        assert list(tokens) == [0]
        if self.n_decoded == self._fails_at:
            raise DecodeFailed("no")
        self.now_ns += self._times[min(self.n_decoded, len(self._times) - 1)]
        self.n_decoded += 1

    def clear(self) -> None:
        self.n_cleared += 1


def measured(trunk: ScriptedTrunk) -> int:
    return measure_token_ns(trunk, lambda: trunk.now_ns)


def test_the_fastest_token_counts_and_the_sequence_is_forgotten() -> None:
    trunk = ScriptedTrunk(900, 300, 200, 500)
    assert measured(trunk) == 200
    assert (trunk.n_decoded, trunk.n_cleared) == (TOKENS_MAX, 1)


def test_a_slow_trunk_is_asked_for_one_token() -> None:
    trunk = ScriptedTrunk(TOTAL_NS_MAX)
    assert measured(trunk) == TOTAL_NS_MAX
    assert trunk.n_decoded == 1


def test_what_is_not_decoded_is_not_measured() -> None:
    trunk = ScriptedTrunk(100, fails_at=2)
    assert (measured(trunk), trunk.n_cleared) == (0, 1)


def test_a_clock_that_stands_still_gives_the_least_there_is() -> None:
    assert measured(ScriptedTrunk(0)) == 1
