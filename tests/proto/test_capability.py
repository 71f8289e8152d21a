"""A record is believed while it is signed by its node and unexpired."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.capability import CLOCK_SKEW_MAX, RECORD_LIFETIME_MAX, CapabilityRecord, open_record
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import SwarmDigest, node_id_of
from kvasir_proto.instants import WallTime, after, seconds
from kvasir_proto.signing import sign_message

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


def _open(key: Ed25519PrivateKey = KEY, now: WallTime = NOW, **changes: Any) -> CapabilityRecord:
    return open_record(sign_message(key, SWARM, dataclasses.replace(RECORD, **changes)), SWARM, now)


def _refused(**arguments: Any) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        _open(**arguments)
    return caught.value.code


def test_record_comes_back() -> None:
    assert _open() == RECORD


def test_record_is_signed_by_the_node_it_describes() -> None:
    assert _refused(key=OTHER_KEY) == "wrong_node"


def test_record_expires_at_its_instant() -> None:
    assert _open(now=WallTime(RECORD.expires - 1)) == RECORD
    assert _refused(now=WallTime(RECORD.expires)) == "expired"


def test_record_cannot_outlive_its_tombstone() -> None:
    longest = after(after(NOW, RECORD_LIFETIME_MAX), CLOCK_SKEW_MAX)
    assert _open(expires=longest).expires == longest
    assert _refused(expires=longest + 1) == "out_of_bounds"
