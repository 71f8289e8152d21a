"""Every change of a node's role in the election, as one table.

The core may change its role only by looking here; the table in `docs/explanation/election.md` is made from
the same rows. What has to be true for an event to happen is the core's affair.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Role(Enum):
    """What a node is in the election. Every node is a follower first, and electors stay electors in each."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre_candidate"
    CANDIDATE = "candidate"
    ELECTED = "elected"
    BACKBONE = "backbone"


class RoleEvent(Enum):
    """What can happen to a role."""

    DELAY_OVER = "its candidacy delay is over"
    PRE_VOTES_WON = "a quorum would vote for it"
    VOTES_WON = "a quorum voted for it"
    LEASE_WON = "a quorum granted it a lease"
    LEASE_OVER = "its lease ran out"
    PATIENCE_OVER = "no quorum answered in time"
    SUPERSEDED = "a higher term or a later epoch is known"
    STEPPED_DOWN = "it was told to step down, or is fit no more"
    VOIDED = "there is evidence against its term"


TRANSITIONS: Final[dict[Role, dict[RoleEvent, Role]]] = {
    Role.FOLLOWER: {
        RoleEvent.DELAY_OVER: Role.PRE_CANDIDATE,
    },
    Role.PRE_CANDIDATE: {
        RoleEvent.PRE_VOTES_WON: Role.CANDIDATE,
        RoleEvent.PATIENCE_OVER: Role.FOLLOWER,
        RoleEvent.SUPERSEDED: Role.FOLLOWER,
        RoleEvent.STEPPED_DOWN: Role.FOLLOWER,
    },
    Role.CANDIDATE: {
        RoleEvent.VOTES_WON: Role.ELECTED,
        RoleEvent.PATIENCE_OVER: Role.FOLLOWER,
        RoleEvent.SUPERSEDED: Role.FOLLOWER,
        RoleEvent.STEPPED_DOWN: Role.FOLLOWER,
    },
    Role.ELECTED: {
        RoleEvent.LEASE_WON: Role.BACKBONE,
        RoleEvent.PATIENCE_OVER: Role.FOLLOWER,
        RoleEvent.SUPERSEDED: Role.FOLLOWER,
        RoleEvent.STEPPED_DOWN: Role.FOLLOWER,
        RoleEvent.VOIDED: Role.FOLLOWER,
    },
    Role.BACKBONE: {
        RoleEvent.LEASE_OVER: Role.ELECTED,
        RoleEvent.SUPERSEDED: Role.FOLLOWER,
        RoleEvent.STEPPED_DOWN: Role.FOLLOWER,
        RoleEvent.VOIDED: Role.FOLLOWER,
    },
}
"""What is not here cannot happen. A follower never goes back to a term it left: it stands in a new one."""


def next_role(role: Role, event: RoleEvent) -> Role:
    """The role after an event. Raises `AssertionError` for one that cannot happen in that role."""
    assert event in TRANSITIONS[role], f"a {role.value} cannot have '{event.value}'"
    return TRANSITIONS[role][event]


def markdown_table() -> str:
    """The table as Markdown, one line a transition."""
    lines = ["| role | what happens | role after it |", "| --- | --- | --- |"]
    lines += [
        f"| `{role.value}` | {event.value} | `{after.value}` |"
        for role, events in TRANSITIONS.items()
        for event, after in events.items()
    ]
    return "\n".join(lines) + "\n"
