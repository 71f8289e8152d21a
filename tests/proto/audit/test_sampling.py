"""Which rows are looked at: never none for long, never many, never those that a holder could name."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.audit import sampling
from kvasir_proto.audit.sampling import PROBATION_WINDOW, PROBATION_WINDOWS, SCRUTINY_ROWS, WINDOW, Sampling
from tests.proto.audit.findings import FIRST, SECOND, THIRD


def chosen_of(sampler: Sampling, experts: list[int], size: int = 16) -> list[int]:
    """The numbers of the chosen rows when these come in answers of this size."""
    return [
        start + place
        for start in range(0, len(experts), size)
        for place in sampler.choose(FIRST, 0, experts[start : start + size])
    ]


@given(st.integers(0, 1 << 32), st.integers(1, 40), st.integers(1, 64))
def test_no_two_windows_go_unseen(seed: int, n_expert: int, size: int) -> None:
    """Of a node as a whole, and of each expert by itself."""
    draws = random.Random(seed)
    experts = [draws.randrange(n_expert) for _ in range(4000)]
    chosen = set(chosen_of(Sampling(draws), experts, size))
    for expert in (None, *range(n_expert)):
        rows = [number for number, each in enumerate(experts) if expert in (None, each)]
        seen = [-1, *(place for place, number in enumerate(rows) if number in chosen), len(rows)]
        assert max(after - before for before, after in itertools.pairwise(seen)) <= 2 * WINDOW


def test_after_probation_fewer_than_one_row_in_fifty_is_looked_at() -> None:
    draws = random.Random(1)
    sampler = Sampling(draws)
    experts = [draws.randrange(8) for _ in range(400_000)]
    chosen = chosen_of(sampler, experts)
    begun = PROBATION_WINDOW * PROBATION_WINDOWS * 8 * 2
    share = sum(number >= begun for number in chosen) / (len(experts) - begun)
    assert 0.017 < share < 0.02


def test_probation_looks_at_a_quarter_of_the_first_rows_of_every_expert() -> None:
    sampler = Sampling(random.Random(2))
    n_first = PROBATION_WINDOW * PROBATION_WINDOWS
    for expert in range(20):
        chosen = sampler.choose(FIRST, 3, [expert] * n_first)
        assert PROBATION_WINDOWS <= len(chosen) <= PROBATION_WINDOWS + n_first // WINDOW + 1


def test_what_is_chosen_follows_from_the_draws_alone() -> None:
    experts = [number % 5 for number in range(3000)]
    first, again, other = (chosen_of(Sampling(random.Random(seed)), experts) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_every_place_of_a_window_is_drawn_alike() -> None:
    counts = [0] * WINDOW
    windows = sampling._Windows()
    draws = random.Random(6)
    for _ in range(40 * WINDOW):
        windows.to_the_end = 0
        counts[windows.begin(draws)] += 1
    assert min(counts) > 10
    assert max(counts) < 90


def test_where_something_was_found_row_after_row_is_looked_at() -> None:
    sampler = Sampling(random.Random(3))
    sampler.choose(FIRST, 0, [0, 1] * 200)
    sampler.scrutinise(FIRST, 0, 1)
    assert sampler.choose(FIRST, 0, [0] * SCRUTINY_ROWS) == list(range(SCRUTINY_ROWS))
    assert sampler.choose(FIRST, 0, [1] * SCRUTINY_ROWS) == list(range(SCRUTINY_ROWS))
    assert len(sampler.choose(FIRST, 0, [0, 1] * 10)) < 10
    sampler.scrutinise(SECOND, 0, 0)  # whom nobody has asked anything


def test_countdowns_say_how_many_rows_go_by_unseen() -> None:
    sampler = Sampling(random.Random(7), 8)
    assert sampler.countdowns(FIRST, 0) is None
    sampler.choose(FIRST, 0, [0, 1] * 100)
    assert sampler.countdowns(FIRST, 1) is None
    counts = sampler.countdowns(FIRST, 0)
    assert counts is not None
    for _ in range(50):
        assert sampler.countdowns(FIRST, 0) is not None
        unseen = min(counts.of_experts[1], counts.of_node[0])
        assert sampler.choose(FIRST, 0, [1] * (unseen + 1)) == [unseen]
    assert counts.of_node.tolist()[1] == 0
    sampler.scrutinise(FIRST, 0, 1)
    assert counts.of_node.tolist()[1] == 1, "choose is to be asked"
    sampler.choose(FIRST, 0, [])
    assert [*counts.of_node, counts.of_experts[1]] == [0, 0, 0]
    sampler.forget(FIRST)
    assert counts.of_node.tolist()[1] == 1, "these are not counted by any more"


def test_a_node_that_is_forgotten_is_in_probation_again() -> None:
    sampler = Sampling(random.Random(4))
    sampler.choose(FIRST, 0, [0] * 1000)
    few = len(sampler.choose(FIRST, 0, [0] * 16))
    sampler.forget(FIRST)
    sampler.forget(FIRST)
    assert few < PROBATION_WINDOWS <= len(sampler.choose(FIRST, 0, [0] * 16))


def test_only_so_many_experts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "EXPERTS_MAX", 100)
    sampler = Sampling(random.Random(5))
    for node_id in (FIRST, SECOND, THIRD):
        for layer in range(10):
            sampler.choose(node_id, layer, list(range(8)))
            kept = sum(len(of) for node in sampler._nodes.values() for of in node.layers.values())
            assert kept == sampler._n_expert <= 100
    assert FIRST not in sampler._nodes
    assert len(sampler._nodes[THIRD].layers) == 10
