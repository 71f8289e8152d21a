"""Which effect waits for which slot: what may not leave a node before what it promises is on disk.

Some slots hold promises to others: votes, endorsed electorates and the fence (`election`, `electorate`,
`fence`), incarnations never used twice (`incarnation`), whom an invite has admitted (`admission`). What rests
on one of these waits until its newest content is durable. `records`, `plan` and `verdicts` promise nothing: a
record's number follows the calendar and a node that forgot its own hears it from others, a plan dies with its
backbone's term, what is wrong with a node is found again. Nothing waits for them, nor do membership, lease
grants and refusals wait for votes: they take nothing back. So a node whose disk is full goes on with what it
has, and takes on nothing new. It sends and saves nothing; it knows kinds of effects only.
"""

from __future__ import annotations

from typing import Final, get_args

from kvasir_proto.admission import AdmissionEvent
from kvasir_proto.effects import Effect, Persist, Publish, Send, Slot
from kvasir_proto.election.requests import ElectionEvent
from kvasir_proto.messages.core import (
    ADMISSION_MESSAGES,
    ELECTION_MESSAGES,
    MEMBERSHIP_MESSAGES,
    PLAN_MESSAGES,
)
from kvasir_proto.messages.election import (
    KnowledgeRequest,
    LeaseGrant,
    LeaseRelease,
    PreVoteGrant,
    VoteRefusal,
)
from kvasir_proto.node_core import HolderReady, HolderRefused, NodeEvent, PlanReceived

_OF_TERMS: Final[frozenset[Slot]] = frozenset(("election", "electorate", "fence"))
_OF_INCARNATIONS: Final[frozenset[Slot]] = frozenset(("incarnation",))
_OF_ADMISSION: Final[frozenset[Slot]] = frozenset(("admission",))
_NONE: Final[frozenset[Slot]] = frozenset()

_PROMISE_NOTHING_NEW: Final = (KnowledgeRequest, LeaseGrant, LeaseRelease, PreVoteGrant, VoteRefusal)
"""Messages of the election that no slot stands behind: a lease's promise is kept by waiting after a start."""

_MESSAGES: Final[dict[type[object], frozenset[Slot]]] = {
    **dict.fromkeys((*ELECTION_MESSAGES, *PLAN_MESSAGES), _OF_TERMS),
    **dict.fromkeys(_PROMISE_NOTHING_NEW, _NONE),
    **dict.fromkeys(MEMBERSHIP_MESSAGES, _OF_INCARNATIONS),
    **dict.fromkeys(ADMISSION_MESSAGES, _OF_ADMISSION),
}
_EVENTS: Final[dict[type[object], frozenset[Slot]]] = {
    **dict.fromkeys((*get_args(ElectionEvent), PlanReceived, HolderReady, HolderRefused), _OF_TERMS),
    **dict.fromkeys(get_args(AdmissionEvent), _OF_ADMISSION),
}


def waits_for(effect: Effect | NodeEvent) -> frozenset[Slot]:
    """The slots whose newest content must be durable before this is sent or told; none for most."""
    match effect:
        case Persist():
            return _NONE
        case Send():
            return _MESSAGES.get(type(effect.message), _NONE)
        case Publish():
            return _OF_TERMS if effect.topic == "terms" else _NONE
        case _:
            return _EVENTS.get(type(effect), _NONE)
