"""The capability record: what a node says it is, signed by itself.

It is a claim: what a backend's accumulation really is, is measured by others. A record is believed only
while it is signed, in sequence and unexpired (invariant 10); the first and the last are checked here, the
sequence by whoever keeps the newest record of each node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeIdField, SwarmDigest
from kvasir_proto.instants import Duration, WallTime, after, seconds
from kvasir_proto.limits import (
    Accumulation,
    Addresses,
    Count,
    Nanoseconds,
    Sentence,
    Sequence63,
    Versions,
    Word,
)
from kvasir_proto.messages import Family
from kvasir_proto.signing import open_signed

RECORD_LIFETIME_MAX: Final[Duration] = seconds(24 * 3600)
"""A record that claims to be good for longer than this is refused: its tombstone could not outlive it."""

CLOCK_SKEW_MAX: Final[Duration] = seconds(10 * 60)
"""How far apart we tolerate the clocks of two nodes to be."""


@dataclass(frozen=True, slots=True)
class CapabilityRecord:
    """One node's description of itself.

    `memory_bytes` is what it offers for shards; `expires` is wall time in nanoseconds since 1970 and
    `sequence` grows with every record the node signs. `reason` says why when `state` is not the best one.
    """

    kind: ClassVar[str] = "capability"
    node_id: NodeIdField
    sequence: Sequence63
    expires: Nanoseconds
    addresses: Addresses
    versions: Versions
    node_version: Word
    backend: Word
    device: Word
    accumulation: Accumulation
    memory_bytes: Count
    state: Word
    reason: Sentence


CAPABILITY: Final = Family("capability", (CapabilityRecord,), 64 << 10)


def open_record(data: bytes, swarm_digest: SwarmDigest, now: WallTime) -> CapabilityRecord:
    """The record in an encoded `Signed`, if the node it describes signed it and it has not expired.

    Raises `RemoteProtocolError`: as `open_signed` does, or `wrong_node`, `expired`, `out_of_bounds` (it
    claims a lifetime over `RECORD_LIFETIME_MAX`).
    """
    record, signer = open_signed(data, CAPABILITY, swarm_digest)
    if record.node_id != signer:
        raise RemoteProtocolError("a capability record is signed by the node it describes", "wrong_node")
    if record.expires <= now:
        raise RemoteProtocolError("the capability record has expired", "expired")
    if record.expires > after(after(now, RECORD_LIFETIME_MAX), CLOCK_SKEW_MAX):
        raise RemoteProtocolError("the capability record claims too long a lifetime", "out_of_bounds")
    return record
