"""What membership is asked (requests), and what it tells beside its effects (events).

Requests are given to `command`, events come out of `drain` among the effects. Whoever drives the core knows
these and needs nothing else of this package but the options and `Member`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration
from kvasir_proto.membership.table import Condition
from kvasir_proto.messages.membership import MemberState


@dataclass(frozen=True, slots=True)
class Seed:
    """Members that may be there: they are asked for a view now, and tried for ever."""

    node_ids: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """A connection to this member broke, or could not be made: a hint to look, never a verdict."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class AnnounceRecord:
    """This node's newest capability record has this sequence and digest."""

    sequence: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Leave:
    """This node leaves: its view is told, and the core falls silent for good."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """A member's record counts here: nobody need be asked for it, and it is more than hearsay from now on."""

    node_id: NodeId
    sequence: int
    digest: bytes


MembershipRequest: TypeAlias = Seed | ConnectionLost | AnnounceRecord | NoteRecord | Leave


@dataclass(frozen=True, slots=True)
class MemberChanged:
    """A member's state or condition is another one, with the reason in a sentence."""

    node_id: NodeId
    state: MemberState
    condition: Condition
    reason: str
    rtt: Duration | None


@dataclass(frozen=True, slots=True)
class RecordHint:
    """Somebody says that this is the member's newest record; said again until `NoteRecord` says it came.

    `sequence` is 0 where nobody named one: is the node known by its record all the same?
    """

    node_id: NodeId
    sequence: int
    digest: bytes
    from_node: NodeId


@dataclass(frozen=True, slots=True)
class SelfConflicted:
    """Another process uses this node's identity: a copied home, most likely. `instance` is its run."""

    instance: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class ClockSuspected:
    """Most members' clocks are `offset` ahead of ours (negative: behind); None: ours is right again."""

    offset: Duration | None


MembershipEvent: TypeAlias = MemberChanged | RecordHint | SelfConflicted | ClockSuspected
