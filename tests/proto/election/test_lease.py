"""DESIGN section 4: lease x 0.9 for the backbone, lease x 1.1 for the elector, clocks a tenth off."""

from __future__ import annotations

import pytest

from kvasir_proto.election.lease import Promise, promised_until, usable_until
from kvasir_proto.election.options import LAN, WAN, ElectionOptions
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, milliseconds

A, B = NodeId("a"), NodeId("b")


def real_length(duration: int, rate: int) -> float:
    """How long `duration` of a clock is in real time, whose rate is in thousandths."""
    return duration * 1000 / rate


@pytest.mark.parametrize("options", [LAN, WAN], ids=["LAN", "WAN"])
@pytest.mark.parametrize("backbone_rate", [900, 950, 1000, 1050, 1100])
@pytest.mark.parametrize("elector_rate", [900, 950, 1000, 1050, 1100])
@pytest.mark.parametrize("flight", [0, 1, 10**9])
def test_every_promise_outlasts_the_lease_it_makes(
    options: ElectionOptions, backbone_rate: int, elector_rate: int, flight: int
) -> None:
    """Asked at real time 0, granted after `flight`: the elector is bound until the backbone has stopped."""
    stops = real_length(usable_until(Instant(0), options.lease), backbone_rate)
    is_free = flight + real_length(promised_until(Instant(0), options.lease), elector_rate)
    assert is_free >= stops


def test_clocks_further_apart_than_that_are_not_covered() -> None:
    """The bound is what it says: a fifth apart each and the lease outlives the promise."""
    stops = real_length(usable_until(Instant(0), LAN.lease), 800)
    assert real_length(promised_until(Instant(0), LAN.lease), 1200) < stops


def test_promise_binds_against_everybody_else_until_it_ends() -> None:
    promise = Promise(0, 1, A, Instant(100))
    assert promise.binds_against(B, Instant(99))
    assert not promise.binds_against(B, Instant(100))
    assert not promise.binds_against(A, Instant(0))


def test_presets_and_rounding() -> None:
    assert LAN.lease == milliseconds(1500)
    assert promised_until(Instant(0), LAN.lease) == Instant(milliseconds(1650))
    assert usable_until(Instant(0), LAN.lease) == Instant(milliseconds(1350))
    odd = Duration(7)
    assert (usable_until(Instant(0), odd), promised_until(Instant(0), odd)) == (6, 8)
