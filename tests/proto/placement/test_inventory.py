"""What placement reckons with where measurements hardly differ."""

from __future__ import annotations

import random

import pytest

from kvasir_proto.placement.inventory import ALIKE_WITHIN, as_alike


@pytest.mark.parametrize(
    "times, expected",
    [
        ([], {}),
        ([0, 0], {}),
        ([4600], {4600: 4600}),
        ([4600, 4700, 5000], {4600: 4700, 4700: 4700, 5000: 4700}),
        ([800, 900, 901], {800: 800, 900: 800, 901: 901}),
        ([5000, 50_000, 0, 5100], {5000: 5000, 5100: 5000, 50_000: 50_000}),
        ([1, 1, 1, 9], {1: 1, 9: 9}),
    ],
)
def test_times_that_hardly_differ_count_as_one(times: list[int], expected: dict[int, int]) -> None:
    assert as_alike(times) == expected


def test_no_time_is_taken_for_one_that_is_further_off_than_it_may_be() -> None:
    draws = random.Random(3)
    for _ in range(300):
        times = [draws.randint(1, 10_000) for _ in range(draws.randint(1, 30))]
        alike = as_alike(times)
        assert set(alike) == set(times)
        for each, counted in alike.items():
            near, far = sorted((each, counted))
            assert far * ALIKE_WITHIN <= near * (ALIKE_WITHIN + 1)
        in_order = [alike[each] for each in sorted(times)]
        assert in_order == sorted(in_order), "who is faster is never taken for slower"
