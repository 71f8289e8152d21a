"""What a node says of itself, signed by itself: a capability record, or that it has gone.

Both are claims. What a backend's accumulation really is, is measured by others; a rank that a node stands
for is given by placement, which has rules of its own. A record is believed only while it is signed, in
sequence and unexpired (invariant 10); the first and the last are checked here, the sequence by whoever keeps
the newest of each node (`records`). Clocks differ: every judgement of a time leaves `CLOCK_SKEW_MAX` for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Final, Literal, NamedTuple, TypeAlias

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_proto.codec import decode, encode
from kvasir_proto.errors import LocalProtocolError, RemoteProtocolError
from kvasir_proto.ids import Epoch, NodeIdField, SwarmDigest, Term
from kvasir_proto.instants import Duration, WallTime, after, seconds
from kvasir_proto.limits import (
    Accumulation,
    Addresses,
    Count,
    Digest,
    Length,
    Nanoseconds,
    Range,
    Rank,
    Sentence,
    Sequence63,
    Versions,
    Word,
)
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages import Family
from kvasir_proto.signing import SIGNED, Signed, open_signed, sign_message

RECORD_LIFETIME_MAX: Final[Duration] = seconds(24 * 3600)
"""A record that claims to be good for longer than this is refused: its tombstone could not outlive it."""

CLOCK_SKEW_MAX: Final[Duration] = seconds(10 * 60)
"""How far apart we tolerate the clocks of two nodes to be."""

RECORD_SIZE_MAX: Final = 16 << 10
"""Bytes of the largest record, signature included; that of a worker with ranges in 48 layers has 1300."""

RANGES_SIZE_MAX: Final = 4096
"""Bytes of the largest encoded shard set in a record: some 700 ranges."""

BATCH_CLASSES: Final = (1, 8, 32, 64, 512)
"""Rows of the batches that kernels are measured at: they may compute differently at each."""

_OPENED_MAX: Final = 4096
"""How many opened records are remembered: a record reaches a node some six times by gossip."""

_FROM_BEST: Final[tuple[Accumulation, ...]] = ("F32", "MIXED", "F16", "BF16", "UNKNOWN")

Verdict: TypeAlias = Literal["none", "claimed", "verified", "unfit"]
"""What is known of a node's fitness for a rank: nothing, its own word, its auditors' word, that it is not."""


@dataclass(frozen=True, slots=True)
class KernelClass:
    """The equivalence class of a kernel, for weights of these types (ggml's names) at these batch classes.

    `repeatable`: it gives the same rows again for the same call. `batch_invariant`: a row has the same result
    in batches of each of these classes as in the smallest that was measured. Unknown is false.
    """

    weight_types: Annotated[tuple[Word, ...], Length(1, 8)]
    batch_classes: Annotated[tuple[Annotated[int, Range(1, 1 << 16)], ...], Length(1, 8)]
    activation_format: Word
    accumulation: Accumulation
    repeatable: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """The tolerance certificate that speaks of a rank, by its digest, and what it makes of the node."""

    rank: Rank
    verdict: Literal["claimed", "verified", "unfit"]
    certificate: Digest


@dataclass(frozen=True, slots=True)
class HeldShard:
    """What a node holds, and the plan that gave it, by (epoch, term, revision) and digest.

    `ranges` is the encoded `ShardSet`, or None when it is too scattered to be said here: the plan says it.
    """

    epoch: Epoch
    term: Term
    revision: Sequence63
    plan_digest: Digest
    n_pairs: Count
    ranges: Annotated[bytes, Length(1, RANGES_SIZE_MAX)] | None


@dataclass(frozen=True, slots=True)
class CapabilityRecord:
    """One node's description of itself.

    `sequence` grows with every record the node signs. `started` (when its daemon did, 0 unknown) and
    `expires` are wall time, nanoseconds since 1970. `memory_bytes` is what it offers for shards,
    `headroom_bytes` what a backbone's trunk would leave free (0: none, or unknown). Measured times are those
    of one token decoded as backbone, of one row through one expert and of one round trip to the backbone; 0
    is not measured: times and not rates, because whole nanoseconds add up in cost models. `accumulation` is
    the worst of `classes`, which are those that the swarm's model uses. `ranks` are those the node stands
    for. `auditor_verdicts` are encoded `Signed` verdicts on its certificate, which bear out what `verdicts`
    says. `credential` is the encoded `Signed` of its membership credential. `reason` says why when `state` is
    not the best one.
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
    started: Nanoseconds = 0
    credential: Annotated[bytes, Length(1, 2048)] | None = None
    classes: Annotated[tuple[KernelClass, ...], Length(0, 16)] = ()
    held: HeldShard | None = None
    decode_token_ns: Nanoseconds = 0
    expert_row_ns: Nanoseconds = 0
    backbone_rtt_ns: Nanoseconds = 0
    verdicts: Annotated[tuple[RankVerdict, ...], Length(0, 3)] = ()
    ranks: Annotated[tuple[Rank, ...], Length(0, 3)] = ()
    stands_for_elector: bool = False
    has_backbone_file: bool = False
    headroom_bytes: Count = 0
    auditor_verdicts: Annotated[tuple[Annotated[bytes, Length(1, 1024)], ...], Length(0, 8)] = ()

    def verdict_of(self, rank: Rank) -> Verdict:
        """What the record says of the node's fitness for this rank."""
        return next((each.verdict for each in self.verdicts if each.rank == rank), "none")

    @property
    def adds_in_f32(self) -> bool:
        """Whether its rows are held to sums in F32: where it says so, and where it does not say."""
        return self.accumulation in ("F32", "UNKNOWN")

    @property
    def activation_format(self) -> str:
        """The one format in which it says that it takes rows; empty if it names none, or several."""
        formats = {each.activation_format for each in self.classes}
        return formats.pop() if len(formats) == 1 else ""

    def claim_digest(self) -> bytes:
        """The digest of the certificates that speak for the node and of what its rows are held to, b""
        without any: another one after it was certified anew, or says that it computes otherwise.
        """
        certificates = sorted({each.certificate for each in self.verdicts})
        held_to = bytes([self.adds_in_f32]) + self.activation_format.encode()
        return hashlib.sha256(b"".join(certificates) + held_to).digest() if certificates else b""


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """A node's word that it has gone: no record of its with this sequence or a lower one counts any more.

    It takes its number from the same series as records. `expires` is not before that of any of them.
    """

    kind: ClassVar[str] = "withdrawal"
    node_id: NodeIdField
    sequence: Sequence63
    expires: Nanoseconds


Said: TypeAlias = CapabilityRecord | Withdrawal
"""What a node can say of itself to a whole swarm."""

CAPABILITY: Final[Family[Said]] = Family("capability", (CapabilityRecord, Withdrawal), RECORD_SIZE_MAX)


class OpenedRecord(NamedTuple):
    """Something a node said of itself, with a good signature; its times have not been judged.

    `digest` is the SHA-256 of the signed payload, the name of a record: an envelope can be dressed up by
    whoever passes it on, a payload only by its signer. `data` is the undressed envelope.
    """

    said: Said
    digest: bytes
    data: bytes


def worst_accumulation(classes: Iterable[KernelClass]) -> Accumulation:
    """The worst of these classes in one word. From the best: F32, MIXED, F16, BF16, UNKNOWN (so of none)."""
    return max((each.accumulation for each in classes), key=_FROM_BEST.index, default="UNKNOWN")


def held_shard(epoch: int, term: int, revision: int, plan_digest: bytes, shard: ShardSet) -> HeldShard:
    """What a record says of a shard."""
    encoded = shard.encode()
    ranges = encoded if len(encoded) <= RANGES_SIZE_MAX else None
    return HeldShard(epoch, term, revision, plan_digest, len(shard), ranges)


def seal_record(private_key: Ed25519PrivateKey, swarm_digest: SwarmDigest, said: Said) -> bytes:
    """The encoded `Signed` that others are told. Raises `LocalProtocolError` if they would refuse it."""
    data = sign_message(private_key, swarm_digest, said)
    try:
        open_sealed(data, swarm_digest)
    except RemoteProtocolError as error:
        raise LocalProtocolError(error.reason) from None
    return data


def check_draft(record: CapabilityRecord) -> None:
    """Raises `LocalProtocolError` for what others would refuse, but for its size, number and times."""
    encode(record)
    contradiction = _contradiction_in(record)
    if contradiction:
        raise LocalProtocolError(f"the capability record contradicts itself: {contradiction}")


def open_record(data: bytes, swarm_digest: SwarmDigest, now: WallTime) -> CapabilityRecord:
    """The record in an encoded `Signed`, if the node it describes signed it and it has not expired.

    Raises `RemoteProtocolError`: as `open_sealed` and `judge_times` do, or `wrong_kind` for a withdrawal.
    """
    said = open_sealed(data, swarm_digest).said
    if isinstance(said, Withdrawal):
        raise RemoteProtocolError("a withdrawal where a record was expected", "wrong_kind")
    judge_times(said, now)
    return said


@lru_cache(maxsize=_OPENED_MAX)
def open_sealed(data: bytes, swarm_digest: SwarmDigest) -> OpenedRecord:
    """What a node said of itself, if it signed it and it does not contradict itself. Remembered: it is pure.

    Raises `RemoteProtocolError`: as `open_signed` does, or `oversize`, `wrong_node` (another node signed it),
    `inconsistent` (an accumulation that is not the worst of its classes, a class or a rank twice, ranges that
    are no shard set or of another size).
    """
    if len(data) > RECORD_SIZE_MAX:
        raise RemoteProtocolError(
            f"a record of {len(data)} bytes is over the limit of {RECORD_SIZE_MAX}", "oversize"
        )
    said, signer = open_signed(data, CAPABILITY, swarm_digest)
    if said.node_id != signer:
        raise RemoteProtocolError(f"a {said.kind} is signed by the node it is about", "wrong_node")
    if isinstance(said, CapabilityRecord):
        contradiction = _contradiction_in(said)
        if contradiction:
            raise RemoteProtocolError(
                f"the capability record contradicts itself: {contradiction}", "inconsistent"
            )
    signed = decode(data, SIGNED)
    undressed = Signed(signed.payload_kind, signed.payload, signed.signer, signed.signature)
    return OpenedRecord(said, hashlib.sha256(signed.payload).digest(), encode(undressed))


def _contradiction_in(record: CapabilityRecord) -> str:
    """What in the record cannot be true of any node; empty if nothing."""
    kernels = [
        (weight_type, batch)
        for each in record.classes
        for weight_type in each.weight_types
        for batch in each.batch_classes
    ]
    if len(set(kernels)) != len(kernels):
        return "a weight type at one batch class has two equivalence classes"
    if record.classes and record.accumulation != worst_accumulation(record.classes):
        return "its accumulation is not the worst of its classes"
    if len(set(record.ranks)) != len(record.ranks):
        return "it stands for a rank twice"
    if len({each.rank for each in record.verdicts}) != len(record.verdicts):
        return "a rank has two verdicts"
    if record.held is not None and record.held.ranges is not None:
        try:
            shard = ShardSet.decode(record.held.ranges)
        except RemoteProtocolError:
            return "its ranges are no shard set"
        if len(shard) != record.held.n_pairs:
            return "its shard has another size than it says"
    return ""


def judge_times(said: Said, now: WallTime) -> None:
    """Refuse what has expired or claims too long a lifetime, by a clock that may be `CLOCK_SKEW_MAX` off.

    Raises `RemoteProtocolError`: `expired` or `out_of_bounds`.
    """
    if has_expired(said.expires, now):
        raise RemoteProtocolError(f"the {said.kind} has expired", "expired")
    if said.expires > after(after(now, RECORD_LIFETIME_MAX), CLOCK_SKEW_MAX):
        raise RemoteProtocolError(f"the {said.kind} claims too long a lifetime", "out_of_bounds")


def has_expired(expires: int, now: WallTime) -> bool:
    """Whether something that expires then, on its signer's clock, has expired whatever our skew."""
    return now > expires + CLOCK_SKEW_MAX
