"""What a core asks of the world, as values.

A core has five verbs: `receive`, `command`, `tick`, `next_deadline`, `drain`. The first three change its
state and write down effects, `drain` hands these out in order and forgets them. The contract with whoever
drives a core: every `Persist` of one drain is durable before any `Send` or `Publish` of the same drain
leaves; where one cannot be made durable, what `promises.waits_for` names stays, and the rest leaves. Effects
that only another core or the log is interested in (`Notice`, most of each core's own events) need no such
order. No core sends bytes, opens a file or writes a log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from kvasir_proto.errors import LocalProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Instant, WallTime
from kvasir_proto.messages import Message

Slot: TypeAlias = Literal[
    "admission", "election", "electorate", "fence", "incarnation", "plan", "records", "verdicts"
]
"""What a node remembers through a restart; each slot is one file, written whole."""


class SlotDamaged(LocalProtocolError):
    """What this node has stored in `slot` is not what a core persisted: it must not go on as if it were."""

    def __init__(self, slot: Slot, reason: str) -> None:
        super().__init__(reason)
        self.slot = slot


class Now(NamedTuple):
    """The two clocks at one moment: `instant` for timers, `wall` for the validity of signed things."""

    instant: Instant
    wall: WallTime


@dataclass(frozen=True, slots=True)
class Persist:
    """Make these bytes the whole, durable content of a slot before anything of this drain is sent."""

    slot: Slot
    data: bytes


@dataclass(frozen=True, slots=True)
class Send:
    """Say this to one node: best effort, at most once, in no promised order."""

    to: NodeId
    message: Message


@dataclass(frozen=True, slots=True)
class Publish:
    """Spread these signed bytes to every member (gossip); what is a record is kept in the DHT too."""

    topic: Literal["records", "terms"]
    data: bytes


@dataclass(frozen=True, slots=True)
class FetchRecord:
    """Get the newest record of this node, whose digest somebody named, from that member or the DHT."""

    node_id: NodeId
    digest: bytes
    from_node: NodeId


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person may want to know: the driver logs `event` (`noun_verb`) with these keys."""

    event: str
    fields: tuple[tuple[str, str | int], ...] = ()


Effect: TypeAlias = Persist | Send | Publish | FetchRecord | Notice
"""What every core may ask. A core adds events of its own, for `node_core` and the driver."""
