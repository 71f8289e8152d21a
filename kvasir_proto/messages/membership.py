"""What members say to each other about who is there: probes, gossip, and comparing of tables.

Every message names the run of its sender (`incarnation`, `instance`) and may carry claims about other members
(`updates`), at most `UPDATES_MAX` of them. A claim has a fixed layout of 93 bytes instead of a map: tables of
thousands of members are compared and sent, and claims are most of what is said. Nobody signs a claim: it is a
hint that its subject can always outdo with a higher incarnation, and the transport proves who the sender is.
Parts of a table are sent bucket by bucket: a member belongs to the bucket that its key's first byte names.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, TypeAlias, get_args

from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId, NodeIdField, node_id_of, public_key_of
from kvasir_proto.limits import INT63_MAX, Length, Nanoseconds, Range, Sentence, Sequence63
from kvasir_proto.messages import Family

INCARNATION_MAX: Final = (1 << 48) - 1
INSTANCE_SIZE: Final = 8
ACCUSER_SIZE: Final = 4
KEY_SIZE: Final = 32
UPDATES_MAX: Final = 8
"""Claims that one message carries beside what it is about."""
PART_UPDATES_MAX: Final = 64
"""Claims in one part of a table."""
BUCKETS: Final = 64
BUCKET_DIGEST_SIZE: Final = 8

_LAYOUT: Final = struct.Struct(f">{KEY_SIZE}sBQ{INSTANCE_SIZE}s{ACCUSER_SIZE}sQ32s")
UPDATE_SIZE: Final = _LAYOUT.size

MemberState: TypeAlias = Literal["alive", "suspect", "dead", "left"]
"""What is believed of a member; each is stronger than those before it, within one incarnation."""
STATES: Final[tuple[MemberState, ...]] = get_args(MemberState)

Incarnation: TypeAlias = Annotated[int, Range(0, INCARNATION_MAX)]
"""Counts the times a node had to say anew that it is alive; only the node itself raises it, for ever."""
Instance: TypeAlias = Annotated[bytes, Length(INSTANCE_SIZE, INSTANCE_SIZE)]
"""Random bytes of one run of a daemon: two at a time under one node id are two processes."""
UpdateBytes: TypeAlias = Annotated[bytes, Length(0, UPDATES_MAX * UPDATE_SIZE)]
"""Packed `MemberUpdate`s, one after the other."""
PartBytes: TypeAlias = Annotated[bytes, Length(0, PART_UPDATES_MAX * UPDATE_SIZE)]
Bucket: TypeAlias = Annotated[int, Range(0, BUCKETS - 1)]
BucketDigest: TypeAlias = Annotated[bytes, Length(BUCKET_DIGEST_SIZE, BUCKET_DIGEST_SIZE)]
TableDigest: TypeAlias = Annotated[bytes, Length(BUCKETS * BUCKET_DIGEST_SIZE, BUCKETS * BUCKET_DIGEST_SIZE)]
"""The digests of all buckets, one after the other."""


class MemberUpdate(NamedTuple):
    """One claim about one member.

    `accuser` marks who first-hand suspects it (the start of SHA-256 of its id; zeros unless `suspect`), so
    that an echo is not taken for a second witness. `record_sequence` and `record_digest` say which
    capability record of it is the newest; zeros if none is known.
    """

    node_id: NodeId
    state: MemberState
    incarnation: int
    instance: bytes
    accuser: bytes
    record_sequence: int
    record_digest: bytes


@lru_cache(maxsize=8192)
def _node_id_of_key(key: bytes) -> NodeId:
    return node_id_of(key)


def pack_update(update: MemberUpdate) -> bytes:
    """The claim's 93 bytes."""
    return _LAYOUT.pack(
        public_key_of(update.node_id),
        STATES.index(update.state),
        update.incarnation,
        update.instance,
        update.accuser,
        update.record_sequence,
        update.record_digest,
    )


@lru_cache(maxsize=8192)
def unpack_update(chunk: bytes) -> MemberUpdate:
    """The claim in these 93 bytes. Raises `RemoteProtocolError` (`malformed`, `out_of_bounds`)."""
    if len(chunk) != UPDATE_SIZE:
        raise RemoteProtocolError("claims about members that are cut short", "malformed")
    key, state, incarnation, instance, accuser, record_sequence, record_digest = _LAYOUT.unpack(chunk)
    if state >= len(STATES) or incarnation > INCARNATION_MAX or record_sequence > INT63_MAX:
        raise RemoteProtocolError("a claim about a member with an impossible number", "out_of_bounds")
    return MemberUpdate(
        _node_id_of_key(key),
        STATES[state],
        incarnation,
        instance,
        accuser,
        record_sequence,
        record_digest,
    )


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there? Answered with `Ack`."""

    kind: ClassVar[str] = "ping"
    sequence: Sequence63
    incarnation: Incarnation
    instance: Instance
    updates: UpdateBytes


@dataclass(frozen=True, slots=True)
class Ack:
    """The answer to `Ping`, with the wall time at which it was given."""

    kind: ClassVar[str] = "ack"
    sequence: Sequence63
    wall_time: Nanoseconds
    incarnation: Incarnation
    instance: Instance
    updates: UpdateBytes


@dataclass(frozen=True, slots=True)
class PingRequest:
    """Ping `target` for me: it does not answer me. Answered with `ProbeResult`."""

    kind: ClassVar[str] = "ping_request"
    sequence: Sequence63
    target: NodeIdField
    incarnation: Incarnation
    instance: Instance
    updates: UpdateBytes


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The answer to `PingRequest`: whether `target` answered the one who was asked."""

    kind: ClassVar[str] = "probe_result"
    sequence: Sequence63
    target: NodeIdField
    reached: bool
    incarnation: Incarnation
    instance: Instance
    updates: UpdateBytes


@dataclass(frozen=True, slots=True)
class Gossip:
    """News that should not wait for the next probe."""

    kind: ClassVar[str] = "gossip"
    incarnation: Incarnation
    instance: Instance
    updates: UpdateBytes


@dataclass(frozen=True, slots=True)
class ViewRequest:
    """Compare your table with mine. Answered with at least one `ViewPart`."""

    kind: ClassVar[str] = "view_request"
    digests: TableDigest
    incarnation: Incarnation
    instance: Instance


@dataclass(frozen=True, slots=True)
class ViewPart:
    """Claims of one bucket of the sender's table, and the digest of that whole bucket.

    `answers` is false for parts that nobody asked for: what the one who asked knew better. `ends_bucket` is
    set in a bucket's last part, `ends_answer` in an answer's; `remaining` counts the buckets that differ
    and were not sent, to be asked for again.
    """

    kind: ClassVar[str] = "view_part"
    bucket: Bucket
    digest: BucketDigest
    answers: bool
    ends_bucket: bool
    ends_answer: bool
    remaining: Annotated[int, Range(0, BUCKETS)]
    incarnation: Incarnation
    instance: Instance
    updates: PartBytes


@dataclass(frozen=True, slots=True)
class Departure:
    """The sender leaves the swarm on purpose, and is to be called `left`, not `dead`."""

    kind: ClassVar[str] = "departure"
    reason: Sentence
    incarnation: Incarnation
    instance: Instance
    updates: UpdateBytes


MembershipMessage: TypeAlias = (
    Ping | Ack | PingRequest | ProbeResult | Gossip | ViewRequest | ViewPart | Departure
)

MEMBERSHIP: Final[Family[MembershipMessage]] = Family("membership", get_args(MembershipMessage), 16 << 10)


@dataclass(frozen=True, slots=True)
class ReservedIncarnations:
    """What a node keeps of its incarnations: it has used none from `first_free` on. Never sent."""

    kind: ClassVar[str] = "reserved_incarnations"
    first_free: Incarnation


RESERVED_INCARNATIONS: Final = Family("reserved incarnations", (ReservedIncarnations,), 4 << 10)
