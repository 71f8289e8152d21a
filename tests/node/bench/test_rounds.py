"""The arithmetic of a benchmark, on rounds whose figures are known."""

from __future__ import annotations

import pytest

from kvasir_node.bench.rounds import (
    MODES,
    ONE_WORKER,
    REFERENCE,
    TWO_WORKERS,
    Round,
    Sample,
    decode_ratio,
    layer_overhead_us,
    median_in,
    order_of,
    prefill_ratio,
)


def test_bytes_are_counted_for_each_token() -> None:
    figures = Sample((1, 1, 1, 1), 1, 1, 0, 0, sent_bytes=400, received_bytes=1000)
    assert (figures.sent_bytes_per_token, figures.received_bytes_per_token) == (100, 250)


def test_a_mode_may_be_held_against_another_than_the_reference() -> None:
    rounds = [round_of(10, 20, 5), round_of(10, 40, 5), round_of(10, 10, 5)]
    assert decode_ratio(rounds, TWO_WORKERS, ONE_WORKER) == 4.0
    assert prefill_ratio(rounds, TWO_WORKERS, ONE_WORKER) == 1.0


def sample(token_us: float, prefill_us: int = 100, cpu_us: tuple[int, int] = (0, 0)) -> Sample:
    decode_ns = tuple(int(token_us * 1000) for _ in range(4))
    return Sample(decode_ns, prefill_us * 1000, 8, cpu_us[0] * 1000, cpu_us[1] * 1000)


def round_of(reference_us: float, one_us: float, two_us: float) -> Round:
    return {REFERENCE: sample(reference_us), ONE_WORKER: sample(one_us), TWO_WORKERS: sample(two_us)}


def test_every_mode_has_every_place_equally_often() -> None:
    orders = [order_of(MODES, index) for index in range(6)]
    assert all(sorted(order) == sorted(MODES) for order in orders)
    for place in range(3):
        assert sorted(order[place] for order in orders) == sorted(MODES * 2)


def test_ratios_are_taken_within_a_round() -> None:
    # The machine slows down by half between rounds; the modes' relation does not change.
    rounds = [round_of(800, 1000, 850), round_of(1200, 1500, 1275), round_of(1000, 1250, 1062.5)]
    assert decode_ratio(rounds, ONE_WORKER) == pytest.approx(0.8)
    assert decode_ratio(rounds, TWO_WORKERS) == pytest.approx(800 / 850)
    assert decode_ratio(rounds, REFERENCE) == 1.0


def test_one_disturbed_round_or_token_does_not_move_a_median() -> None:
    calm = round_of(800, 1000, 850)
    assert decode_ratio([calm, round_of(800, 9000, 9000), calm], ONE_WORKER) == pytest.approx(0.8)
    assert Sample((10, 10, 999, 10, 10), 1, 1, 0, 0).token_ns == 10


def test_overhead_is_a_difference_for_each_layer() -> None:
    assert layer_overhead_us([round_of(800, 1000, 850)], ONE_WORKER, 4) == pytest.approx(50)


def test_prefill_is_compared_by_its_own_time() -> None:
    rounds = [{REFERENCE: sample(1, 300), ONE_WORKER: sample(1, 200), TWO_WORKERS: sample(1, 100)}]
    assert prefill_ratio(rounds, ONE_WORKER) == pytest.approx(1.5)


def test_cpu_time_is_told_for_a_token() -> None:
    rounds = [{REFERENCE: sample(1), ONE_WORKER: sample(1, cpu_us=(2000, 6000)), TWO_WORKERS: sample(1)}]
    assert median_in(rounds, ONE_WORKER, lambda each: each.backbone_cpu_ms) == pytest.approx(0.5)
    assert median_in(rounds, ONE_WORKER, lambda each: each.workers_cpu_ms) == pytest.approx(1.5)
    assert median_in(rounds, ONE_WORKER, lambda each: each.cpu_ms) == pytest.approx(2.0)
