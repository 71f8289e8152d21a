"""A record is believed while it is signed by its node, does not contradict itself, and is unexpired."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.capability import (
    BATCH_CLASSES,
    CLOCK_SKEW_MAX,
    RANGES_SIZE_MAX,
    RECORD_LIFETIME_MAX,
    CapabilityRecord,
    KernelClass,
    RankVerdict,
    Withdrawal,
    held_shard,
    open_record,
    open_sealed,
    seal_record,
    worst_accumulation,
)
from kvasir_proto.codec import decode
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import SwarmDigest, node_id_of
from kvasir_proto.instants import WallTime, after, seconds
from kvasir_proto.limits import Accumulation
from kvasir_proto.manifest import ShardSet
from kvasir_proto.signing import SIGNED, sign_message

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
SWARM = SwarmDigest(bytes(32))
NOW = WallTime(1_700_000_000_000_000_000)
RECORD = CapabilityRecord(
    node_id=node_id_of(KEY.public_key().public_bytes_raw()),
    sequence=4,
    expires=after(NOW, seconds(60)),
    addresses=("/ip4/127.0.0.1/tcp/4001",),
    versions=(1,),
    node_version="0.1.0",
    backend="ggml-cpu",
    device="x86_64",
    accumulation="F32",
    memory_bytes=1 << 30,
    state="ready",
    reason="",
)
SHARD = ShardSet.from_ranges((layer, 16 * (layer % 4), 16 * (layer % 4) + 16) for layer in range(48))
FULL = dataclasses.replace(
    RECORD,
    addresses=(
        f"/ip4/192.168.178.21/tcp/4001/p2p/{RECORD.node_id}",
        f"/ip4/203.0.113.77/tcp/4001/p2p/{RECORD.node_id}",
    ),
    started=NOW,
    classes=(KernelClass(("q4_K", "q6_K"), BATCH_CLASSES, "Q8_K", "F32"),),
    held=held_shard(0, 7, 23, bytes(32), SHARD),
    decode_token_ns=41_000_000,
    expert_row_ns=310_000,
    backbone_rtt_ns=2_100_000,
    verdicts=(RankVerdict("bulk", "verified", bytes(32)), RankVerdict("output", "claimed", bytes(32))),
    ranks=("bulk", "output"),
    stands_for_elector=True,
    headroom_bytes=3 << 30,
)
"""A worker as workers usually are: 48 layers, one range in each, two weight types, two addresses."""


def _open(key: Ed25519PrivateKey = KEY, now: WallTime = NOW, **changes: Any) -> CapabilityRecord:
    return open_record(sign_message(key, SWARM, dataclasses.replace(RECORD, **changes)), SWARM, now)


def _refused(**arguments: Any) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        _open(**arguments)
    return caught.value.code


@pytest.mark.parametrize("record", [RECORD, FULL], ids=["plain", "full"])
def test_record_comes_back(record: CapabilityRecord) -> None:
    assert open_record(seal_record(KEY, SWARM, record), SWARM, NOW) == record


def test_usual_record_is_small() -> None:
    assert len(seal_record(KEY, SWARM, FULL)) < 1360


def test_record_is_signed_by_the_node_it_describes() -> None:
    assert _refused(key=OTHER_KEY) == "wrong_node"


def test_signature_that_is_not_good_is_refused_every_time() -> None:
    data = seal_record(KEY, SWARM, RECORD)
    for _ in range(2):
        with pytest.raises(RemoteProtocolError) as caught:
            open_sealed(data[:-1] + bytes([data[-1] ^ 1]), SWARM)
        assert caught.value.code == "bad_signature"
    with pytest.raises(RemoteProtocolError):
        open_sealed(data, SwarmDigest(bytes([1]) * 32))


def test_withdrawal_is_no_record() -> None:
    data = seal_record(KEY, SWARM, Withdrawal(RECORD.node_id, 5, RECORD.expires))
    assert open_sealed(data, SWARM).said == Withdrawal(RECORD.node_id, 5, RECORD.expires)
    with pytest.raises(RemoteProtocolError) as caught:
        open_record(data, SWARM, NOW)
    assert caught.value.code == "wrong_kind"
    with pytest.raises(LocalProtocolError, match="signed by the node"):
        seal_record(OTHER_KEY, SWARM, Withdrawal(RECORD.node_id, 5, RECORD.expires))


def test_envelope_can_be_dressed_up_and_the_name_stays() -> None:
    """Else whoever passes a record on could make its node seem to have said two things."""
    data = seal_record(KEY, SWARM, RECORD)
    dressed = bytes([data[0] + 1]) + data[1:] + b"\xa1x\xc3"
    assert decode(dressed, SIGNED) == decode(data, SIGNED)
    assert dressed != data
    assert open_sealed(dressed, SWARM) == open_sealed(data, SWARM)
    assert open_sealed(dressed, SWARM).data == data


CONTRADICTIONS: tuple[dict[str, Any], ...] = (
    {"classes": (KernelClass(("q8_0",), (1, 8), "Q8_0", "F16"),)},
    {"accumulation": "F16", "classes": (KernelClass(("q8_0",), (1, 8), "Q8_0", "F32"),)},
    {
        "classes": (
            KernelClass(("q8_0",), (1, 8), "Q8_0", "F32"),
            KernelClass(("q8_0",), (8, 32), "F16", "F32"),
        )
    },
    {"classes": (KernelClass(("q8_0",), (1, 1), "Q8_0", "F32"),)},
    {"ranks": ("bulk", "bulk")},
    {"verdicts": (RankVerdict("bulk", "unfit", bytes(32)), RankVerdict("bulk", "verified", bytes(32)))},
    {"held": dataclasses.replace(held_shard(0, 1, 1, bytes(32), SHARD), ranges=b"\x91\x93\x00\x05\x05")},
    {"held": dataclasses.replace(held_shard(0, 1, 1, bytes(32), SHARD), ranges=b"nonsense")},
    {"held": dataclasses.replace(held_shard(0, 1, 1, bytes(32), SHARD), n_pairs=1)},
)


@pytest.mark.parametrize("changes", CONTRADICTIONS)
def test_record_that_contradicts_itself_is_refused_and_not_signed(changes: dict[str, Any]) -> None:
    assert _refused(**changes) == "inconsistent"
    with pytest.raises(LocalProtocolError, match="contradicts itself"):
        seal_record(KEY, SWARM, dataclasses.replace(RECORD, **changes))


def test_record_too_large_is_not_signed_nor_believed() -> None:
    changes: dict[str, Any] = {
        "addresses": tuple("x" * 512 for _ in range(16)),
        "reason": "\U0001f600" * 1024,
    }
    changes["classes"] = tuple(KernelClass(("\U0001f600" * 63 + str(i),), (1,), "x", "F32") for i in range(9))
    changes["device"] = "\U0001f600" * 64
    with pytest.raises(LocalProtocolError, match="limit"):
        seal_record(KEY, SWARM, dataclasses.replace(RECORD, **changes, credential=bytes(2048)))
    assert _refused(**changes, credential=bytes(2048)) == "oversize"


@pytest.mark.parametrize(
    "said, word",
    [
        ((), "UNKNOWN"),
        (("F32", "F32"), "F32"),
        (("F32", "MIXED"), "MIXED"),
        (("F16", "MIXED"), "F16"),
        (("F16", "BF16"), "BF16"),
        (("UNKNOWN", "BF16", "F32"), "UNKNOWN"),
    ],
)
def test_accumulation_in_one_word_is_the_worst(said: tuple[Accumulation, ...], word: str) -> None:
    assert worst_accumulation(KernelClass(("q8_0",), (1,), "Q8_0", each) for each in said) == word


def test_scattered_shard_is_left_to_the_plan() -> None:
    scattered = ShardSet.from_pairs((layer, 2 * each) for layer in range(48) for each in range(64))
    said = held_shard(0, 1, 1, bytes(32), scattered)
    assert said.ranges is None
    assert said.n_pairs == 48 * 64
    assert len(scattered.encode()) > RANGES_SIZE_MAX
    assert _open(held=said).held == said


def test_verdict_of_a_rank() -> None:
    assert [FULL.verdict_of(rank) for rank in ("bulk", "output", "backbone")] == [
        "verified",
        "claimed",
        "none",
    ]


def test_record_cannot_outlive_its_tombstone() -> None:
    longest = after(after(NOW, RECORD_LIFETIME_MAX), CLOCK_SKEW_MAX)
    assert _open(expires=longest).expires == longest
    assert _refused(expires=longest + 1) == "out_of_bounds"


SKEWS_MINUTES = (-10, -5, 0, 5, 10)
LIFETIME = seconds(1200)


@pytest.mark.parametrize("writer", SKEWS_MINUTES)
@pytest.mark.parametrize("reader", SKEWS_MINUTES)
@pytest.mark.parametrize("age_s", [0, 600, 1199, 1201, 1799, 2401, 3601])
def test_clocks_ten_minutes_apart_agree_on_what_is_fresh(writer: int, reader: int, age_s: int) -> None:
    """While two clocks differ by no more than is tolerated, no living record is refused, and none lives on
    for longer than its lifetime and twice that: once for the difference, once for the tolerance."""
    expires = after(after(NOW, seconds(60 * writer)), LIFETIME)
    read_at = after(after(NOW, seconds(60 * reader)), seconds(age_s))
    data = seal_record(KEY, SWARM, dataclasses.replace(RECORD, expires=expires))
    try:
        open_record(data, SWARM, read_at)
        outcome = "believed"
    except RemoteProtocolError as error:
        outcome = error.code
    ahead_s = 60 * (reader - writer)
    assert outcome == ("believed" if age_s + ahead_s <= 1200 + 600 else "expired")
    if abs(ahead_s) <= 600:
        assert outcome == "believed" or age_s > 1200
        assert outcome == "expired" or age_s <= 1200 + 1200


def test_longest_lifetime_is_believed_through_the_tolerated_skew() -> None:
    data = seal_record(KEY, SWARM, dataclasses.replace(RECORD, expires=after(NOW, RECORD_LIFETIME_MAX)))
    behind = WallTime(NOW - CLOCK_SKEW_MAX)
    assert open_record(data, SWARM, behind).sequence == 4
    with pytest.raises(RemoteProtocolError) as caught:
        open_record(data, SWARM, WallTime(behind - 1))
    assert caught.value.code == "out_of_bounds"


def test_a_node_that_says_that_it_computes_otherwise_claims_something_else() -> None:
    """Or it could be held to less than what its rows were given under, with the same certificates."""
    certified = dataclasses.replace(
        RECORD, accumulation="F32", verdicts=(RankVerdict("output", "claimed", bytes(32)),)
    )
    other_class = KernelClass(("q8_0",), (1,), "F32", "F32")
    others = [
        dataclasses.replace(certified, accumulation="F16"),
        dataclasses.replace(certified, classes=(other_class,)),
        dataclasses.replace(certified, verdicts=(RankVerdict("output", "claimed", bytes([1]) * 32),)),
    ]
    digests = {each.claim_digest() for each in (certified, *others)}
    assert len(digests) == 4
    for change in ({"sequence": 9}, {"state": "loading"}, {"memory_bytes": 7}):
        assert dataclasses.replace(certified, **change).claim_digest() == certified.claim_digest()
    assert dataclasses.replace(certified, verdicts=()).claim_digest() == b""
