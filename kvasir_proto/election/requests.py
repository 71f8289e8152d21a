"""What may be asked of the election's core by `node_core`, and what it says back beside its effects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Instant
from kvasir_proto.term_proof import Electorate, ProvenTerm

# --- requests -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SetCandidacy:
    """Whether this node is fit to be the backbone; its position among the living candidates, 0 the best."""

    is_fit: bool
    position: int = 0


@dataclass(frozen=True, slots=True)
class SetMembers:
    """What membership and admission think: see `elector.MemberView`. Asked whenever it changes."""

    eligible: frozenset[NodeId] = frozenset()
    dead: frozenset[NodeId] = frozenset()
    barred: frozenset[NodeId] = frozenset()


@dataclass(frozen=True, slots=True)
class AdoptProof:
    """A term proof that came some other way than by an election message (`Welcome`, `PlanOffer`).

    `source` is who sent it and can be asked for the electorates it needs.
    """

    proof: bytes
    source: NodeId


@dataclass(frozen=True, slots=True)
class AdoptAnnouncement:
    """What came on the topic `terms`: an encoded `Knowledge`, `Evidence` or `LeaseRelease`."""

    data: bytes
    source: NodeId


@dataclass(frozen=True, slots=True)
class SuspectBackbone:
    """Membership suspects this node or calls it dead: if it is the backbone, a candidate need not wait."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class StepDown:
    """Give the lease back. Only once the engine uses it no more: another may be elected at once."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChangeElectorate:
    """The backbone wants these electors: one more or one less than now.

    `nomination` is the founder's signed nomination of the one that is added to a pinned electorate.
    """

    members: tuple[NodeId, ...]
    nomination: bytes = b""


@dataclass(frozen=True, slots=True)
class Recover:
    """A link made with the recovery key (`configuration.make_recovery`): a new epoch begins."""

    link: bytes


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Ask this node for electorates, proof and evidence that are not known here."""

    source: NodeId


ElectionRequest: TypeAlias = (
    SetCandidacy
    | SetMembers
    | AdoptProof
    | AdoptAnnouncement
    | SuspectBackbone
    | StepDown
    | ChangeElectorate
    | Recover
    | CatchUp
)

# --- events -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LeaseHeld:
    """This node is the backbone of the term and may sample until that instant of its own clock."""

    epoch: int
    term: int
    until: Instant


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """This node may sample no more in that term until it hears `LeaseHeld` again.

    ``may_return``: its electors are asked again; if they do not grant it soon, this is said again without.
    """

    epoch: int
    term: int
    reason: str
    may_return: bool


@dataclass(frozen=True, slots=True)
class TermFollowed:
    """The fence moved to this term, or the term has a newer proof. It is on disk before anybody hears it."""

    term: ProvenTerm
    proof: bytes


@dataclass(frozen=True, slots=True)
class TermVoided:
    """There is evidence of a lie in the term that was followed: nobody is the backbone until a later one."""

    epoch: int
    term: int


@dataclass(frozen=True, slots=True)
class ElectorateChanged:
    """The newest electorate that is known, and who of all electors ever known here is proved to have lied."""

    electorate: Electorate
    convicted: frozenset[NodeId]


ElectionEvent: TypeAlias = LeaseHeld | LeaseLost | TermFollowed | TermVoided | ElectorateChanged
