"""The curve from one accuser to a crowd, by table; self-doubt."""

from __future__ import annotations

import pytest

from kvasir_proto.instants import milliseconds, seconds
from kvasir_proto.membership.health import Health
from kvasir_proto.membership.suspicion import confirmations_wanted, suspicion_time, swarm_scale_permille


@pytest.mark.parametrize(
    "confirmed, wanted, expected_ms",
    [
        # memberlist's own table: 30 s for nobody, 2 s for k = 3
        (0, 3, 30_000),
        (1, 3, 16_000),
        (2, 3, 7_810),
        (3, 3, 2_000),
        (4, 3, 2_000),
        (5, 3, 2_000),
        (0, 0, 2_000),
        (0, 1, 30_000),
        (1, 1, 2_000),
    ],
)
def test_remaining_time(confirmed: int, wanted: int, expected_ms: int) -> None:
    found = suspicion_time(confirmed, wanted, seconds(2), seconds(30))
    assert abs(found - milliseconds(expected_ms)) <= milliseconds(1)
    assert found % milliseconds(1) == 0


@pytest.mark.parametrize("members, wanted", [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3), (50, 3)])
def test_no_more_witnesses_are_wanted_than_there_can_be(members: int, wanted: int) -> None:
    assert confirmations_wanted(members, 3) == wanted


@pytest.mark.parametrize("members, scale", [(0, 1000), (1, 1000), (10, 1000), (100, 2000), (2000, 3301)])
def test_scale_is_the_logarithm(members: int, scale: int) -> None:
    assert swarm_scale_permille(members) == scale


def test_self_doubt_stretches_and_is_bounded() -> None:
    health = Health(4)
    assert health.stretch(seconds(1)) == seconds(1)
    health.worsen(2)
    assert health.stretch(seconds(1)) == seconds(3)
    health.worsen(9)
    assert health.score == 4
    for _ in range(9):
        health.improve()
    assert health.score == 0
