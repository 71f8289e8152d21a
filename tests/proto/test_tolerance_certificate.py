"""A certificate is its node's own word, within bounds; everything else about it is refused."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_proto.capability import BATCH_CLASSES, KernelClass
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import ModelDigest, node_id_of
from kvasir_proto.instants import WallTime, after, seconds
from kvasir_proto.measured_kernel import MeasuredClass, MeasuredKernel, measurement_key
from kvasir_proto.tolerance_certificate import (
    CERTIFICATE_LIFETIME,
    CERTIFICATE_SIZE_MAX,
    ToleranceCertificate,
    issue_certificate,
    open_certificate,
    open_verdict,
    sign_certificate,
)
from tests.proto.small_swarm import WALL, found, key_of

SWARM = found(key_of(1)).digest
NOW = WallTime(WALL)
GOOD = MeasuredClass(KernelClass(("q8_0",), BATCH_CLASSES, "Q8_0", "F32", True, True), 7e-8, 8e-4, True)
SHORT = MeasuredClass(KernelClass(("q4_K",), BATCH_CLASSES, "Q8_K", "F16"), 4e-3, None, False)


def measured(*classes: MeasuredClass, **changes: Any) -> MeasuredKernel:
    values: dict[str, Any] = {
        "backend": "ggml-cpu",
        "device": "x86_64",
        "kernel_build": "build",
        "model_digest": ModelDigest(bytes(32)),
        "probe_version": 1,
        "seed": 0,
        "classes": classes or (GOOD,),
        "not_probed": (),
        "unfit": (),
        "figures": bytes(32),
    }
    return MeasuredKernel(**values | changes)


def signed(certificate: ToleranceCertificate, by: int = 5) -> bytes:
    return sign_certificate(certificate, key_of(by), SWARM)


ISSUED = issue_certificate(measured(), key_of(5), WALL)


def test_a_certificate_is_opened_by_whoever_knows_the_swarm() -> None:
    assert open_certificate(signed(ISSUED), SWARM, NOW) == ISSUED
    assert ISSUED.node_id == node_id_of(key_of(5).public_key().public_bytes_raw())
    assert ISSUED.expires - ISSUED.issued == CERTIFICATE_LIFETIME


def test_its_name_is_that_of_what_was_measured_and_by_whom() -> None:
    assert issue_certificate(measured(), key_of(5), WALL + 7).digest() == ISSUED.digest()
    assert issue_certificate(measured(), key_of(6), WALL).digest() != ISSUED.digest()
    assert issue_certificate(measured(figures=b"f" * 32), key_of(5), WALL).digest() != ISSUED.digest()


REFUSED: dict[str, tuple[bytes, str]] = {
    "another node's": (signed(ISSUED, by=6), "wrong_node"),
    "expired": (signed(issue_certificate(measured(), key_of(5), WALL - 8 * 86400 * 10**9)), "expired"),
    "of the future": (signed(issue_certificate(measured(), key_of(5), WALL + seconds(601))), "out_of_bounds"),
    "for ever": (signed(replace(ISSUED, expires=ISSUED.expires + 1)), "out_of_bounds"),
    "for less than nothing": (signed(replace(ISSUED, issued=WALL + 2, expires=WALL + 1)), "out_of_bounds"),
    "out of tolerance and fit": (signed(issue_certificate(measured(SHORT), key_of(5), WALL)), "inconsistent"),
    "short sums that passed": (
        signed(issue_certificate(measured(replace(SHORT, passed=True)), key_of(5), WALL)),
        "inconsistent",
    ),
    **{
        f"passed, {what}": (signed(issue_certificate(measured(wrong), key_of(5), WALL)), "inconsistent")
        for what, wrong in {
            "outside its gate": replace(GOOD, rel_l2=1.0),
            "not finite": replace(GOOD, rel_l2=None),
            "without a gate": replace(GOOD, gate=None),
        }.items()
    },
    "two things of one class": (
        signed(issue_certificate(measured(GOOD, replace(GOOD, rel_l2=0.0)), key_of(5), WALL)),
        "inconsistent",
    ),
    "another swarm's": (sign_certificate(ISSUED, key_of(5), found(key_of(2)).digest), "bad_signature"),
    "too large": (bytes(CERTIFICATE_SIZE_MAX + 1), "oversize"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_good_certificate_is_refused(what: str) -> None:
    data, code = REFUSED[what]
    with pytest.raises(RemoteProtocolError) as refused:
        open_certificate(data, SWARM, NOW)
    assert refused.value.code == code


def test_a_short_kernel_may_say_so() -> None:
    honest = issue_certificate(measured(GOOD, SHORT, unfit=("backbone", "output")), key_of(5), WALL)
    kept = open_certificate(signed(honest), SWARM, NOW).measured
    assert (kept.fit, kept.accumulation) == (("bulk",), "F16")


def test_what_was_not_probed_is_fit_for_nothing_and_of_unknown_sums() -> None:
    kept = measured(not_probed=("q6_K",))
    assert (kept.fit, kept.accumulation) == ((), "UNKNOWN")
    nothing = measured(classes=())
    assert (nothing.fit, nothing.accumulation) == ((), "UNKNOWN")


@given(st.binary(max_size=400))
def test_any_bytes_are_a_certificate_a_verdict_or_an_error(data: bytes) -> None:
    for open_it in (open_certificate, open_verdict):
        with pytest.raises(RemoteProtocolError):
            open_it(data, SWARM, NOW)


@given(st.integers(0, 2000), st.integers(1, 255))
def test_a_certificate_with_another_byte_is_not_the_same_word(at: int, flip: int) -> None:
    data = bytearray(signed(ISSUED))
    data[at % len(data)] ^= flip
    with contextlib.suppress(RemoteProtocolError):
        assert open_certificate(bytes(data), SWARM, NOW) == ISSUED, "it may be in a field that nobody knows"


def test_certificates_expire_whatever_the_skew() -> None:
    late = after(after(NOW, CERTIFICATE_LIFETIME), seconds(600))
    assert open_certificate(signed(ISSUED), SWARM, late) == ISSUED
    with pytest.raises(RemoteProtocolError):
        open_certificate(signed(ISSUED), SWARM, after(late, seconds(1)))


def test_each_part_of_a_key_counts_by_itself() -> None:
    assert measurement_key("ab", "c") != measurement_key("a", "bc")
    assert measurement_key("a", b"b", 3) == measurement_key("a", b"b", 3)
