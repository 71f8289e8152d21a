"""Every role and event, and the table in the documentation."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvasir_proto.election.states import TRANSITIONS, Role, RoleEvent, markdown_table, next_role

PAGE = Path(__file__).parents[3] / "docs/explanation/election.md"


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("event", RoleEvent)
def test_what_is_not_in_the_table_cannot_happen(role: Role, event: RoleEvent) -> None:
    if event in TRANSITIONS[role]:
        assert next_role(role, event) is TRANSITIONS[role][event]
    else:
        with pytest.raises(AssertionError, match="cannot"):
            next_role(role, event)


def test_a_backbone_was_a_follower_a_pre_candidate_a_candidate_and_elected() -> None:
    """DESIGN 4: pre-vote, then votes of a quorum, then a lease granted by a quorum; there is no way round."""
    into = {
        after: {role for role in Role for event in TRANSITIONS[role] if TRANSITIONS[role][event] is after}
        for after in Role
    }
    assert into[Role.PRE_CANDIDATE] == {Role.FOLLOWER}
    assert into[Role.CANDIDATE] == {Role.PRE_CANDIDATE}
    assert into[Role.ELECTED] == {Role.CANDIDATE, Role.BACKBONE}
    assert into[Role.BACKBONE] == {Role.ELECTED}


def test_every_role_but_the_first_can_be_given_up() -> None:
    for role in set(Role) - {Role.FOLLOWER}:
        assert TRANSITIONS[role][RoleEvent.SUPERSEDED] is Role.FOLLOWER
        assert TRANSITIONS[role][RoleEvent.STEPPED_DOWN] is Role.FOLLOWER


def test_documentation_has_this_table() -> None:
    assert markdown_table() in PAGE.read_text(encoding="utf-8")
