"""What two nodes say to each other on a control stream.

The dialler says `Hello` and is answered with `Welcome`; from then on both speak. Whatever needs authority
carries its `proof`: the term proof of the backbone that says it. Payloads that are signed travel as the bytes
that were signed. Anything can be answered with `Refusal`. Nothing here can carry a routing choice, a weight
or an expert program (invariants 1 and 9).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias, get_args

from kvasir_proto.ids import Epoch, Term
from kvasir_proto.limits import (
    SWARM_FRAME_SIZE_MAX,
    CertificateDer,
    Count,
    Digest,
    Host,
    Milliseconds,
    OneTimeToken,
    Port,
    ProofBytes,
    Role,
    Sentence,
    Sequence63,
    SignedBytes,
    Version,
    Versions,
    Word,
)
from kvasir_proto.messages import Family


@dataclass(frozen=True, slots=True)
class Hello:
    """The dialler's first message: the protocol versions it speaks, and its build for people to read."""

    kind: ClassVar[str] = "hello"
    versions: Versions
    node_version: Word


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Hello`: the version to speak, the swarm, and who its backbone provably is."""

    kind: ClassVar[str] = "welcome"
    version: Version
    swarm_manifest: SignedBytes
    proof: ProofBytes


@dataclass(frozen=True, slots=True)
class Join:
    """A node asks to be a member; `record` is its signed `CapabilityRecord`. Sent again when it changes."""

    kind: ClassVar[str] = "join"
    record: SignedBytes


@dataclass(frozen=True, slots=True)
class Joined:
    """The answer to `Join`: the current backbone's (epoch, term), and how often to send `Heartbeat`."""

    kind: ClassVar[str] = "joined"
    epoch: Epoch
    term: Term
    heartbeat_interval_ms: Milliseconds


@dataclass(frozen=True, slots=True)
class Refusal:
    """The last message was not acceptable, or cannot be done: a code for programs, a sentence for people."""

    kind: ClassVar[str] = "refusal"
    code: Word
    reason: Sentence


@dataclass(frozen=True, slots=True)
class PlanOffer:
    """The backbone's signed plan, with the proof that the signer is the backbone."""

    kind: ClassVar[str] = "plan_offer"
    plan: SignedBytes
    proof: ProofBytes


@dataclass(frozen=True, slots=True)
class PlanAccept:
    """A worker holds its shard of that plan revision and can serve it."""

    kind: ClassVar[str] = "plan_accept"
    revision: Sequence63
    shard_digest: Digest
    memory_bytes: Count


@dataclass(frozen=True, slots=True)
class PlanSuperseded:
    """The worker has accepted another plan of the same term, as new as the one offered or newer: this one.

    The whole signed plan, not its revision: a backbone that has lost it goes on above it, and believes nobody
    but its own signature about what it has said before.
    """

    kind: ClassVar[str] = "plan_superseded"
    plan: SignedBytes


@dataclass(frozen=True, slots=True)
class DataRequest:
    """Asks that the receiver's engine expect a data connection from the engine with this certificate."""

    kind: ClassVar[str] = "data_request"
    engine_certificate: CertificateDer
    role: Role
    proof: ProofBytes


@dataclass(frozen=True, slots=True)
class DataGrant:
    """The answer to `DataRequest`: where to dial, the one-time token to show, and whom to expect there."""

    kind: ClassVar[str] = "data_grant"
    host: Host
    port: Port
    token: OneTimeToken
    engine_certificate: CertificateDer


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member is alive and in this state; `reason` says why when the state is not the best one."""

    kind: ClassVar[str] = "heartbeat"
    sequence: Sequence63
    state: Word
    reason: Sentence


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The answer to `Heartbeat`: the (epoch, term) that the answering node follows."""

    kind: ClassVar[str] = "heartbeat_reply"
    epoch: Epoch
    term: Term


@dataclass(frozen=True, slots=True)
class Leave:
    """The sender leaves the swarm on purpose."""

    kind: ClassVar[str] = "leave"
    reason: Sentence


SwarmMessage: TypeAlias = (
    Hello
    | Welcome
    | Join
    | Joined
    | Refusal
    | PlanOffer
    | PlanAccept
    | PlanSuperseded
    | DataRequest
    | DataGrant
    | Heartbeat
    | HeartbeatReply
    | Leave
)

SWARM: Final[Family[SwarmMessage]] = Family("swarm", get_args(SwarmMessage), SWARM_FRAME_SIZE_MAX)
