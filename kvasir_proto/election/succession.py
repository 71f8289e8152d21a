"""Which electorate next: one member more or one less than now, or none.

The policy alone, without keys, messages or clocks, so that a table can test it. The backbone follows it; what
an elector requires of a change is less and is checked apart (`elector`). Deterministic: the caller ranks the
nodes, ties break on the node id.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Final

from kvasir_proto.ids import NodeId
from kvasir_proto.limits import ELECTORS_MAX
from kvasir_proto.term_proof import ElectorateRule

_TARGETS: Final[dict[str, tuple[int, ...]]] = {"pinned": (1, 3, 5, 7), "open": (1, 3, 4, 7)}
"""The sizes worth having: one less tolerates as many crashes (and, when open, as many liars)."""
OPEN_MIN: Final = 4
"""An open electorate that has four members does not become smaller because one of them died: three would not
tolerate a liar, and nobody has shown that there is none."""


def next_electorate(
    members: Sequence[NodeId],
    rule: ElectorateRule,
    backbone: NodeId,
    *,
    eligible: Sequence[NodeId],
    dead: Set[NodeId] = frozenset(),
    convicted: Set[NodeId] = frozenset(),
    put_off: Set[NodeId] = frozenset(),
) -> tuple[NodeId, ...] | None:
    """The members of the next electorate, sorted, or None where the present one is right.

    `members` are the present ones. `eligible` are living nodes that may be electors, best first, members
    among them or not: nominated ones where the electorate is pinned. `dead` are nodes silent for longer than
    `dead_after`, `convicted` those with evidence against them; a member in neither is worth keeping.
    `put_off` are those whose coming or going was tried in vain a moment ago: others go first. Ask again after
    each change: sizes like two are only passed through.
    """
    current = sorted(set(members))
    dead = dead - put_off
    candidates = [each for each in dict.fromkeys(eligible) if each not in convicted and each not in dead]
    newcomers = [each for each in candidates if each not in current and each not in put_off]
    kept = [each for each in current if each not in convicted and each not in dead]
    target = max(size for size in _TARGETS[rule] if size <= max(1, len(kept) + len(newcomers)))
    wanted = [*kept, *newcomers][:target]  # whoever has a vote and lives keeps it
    if len(kept) > target:
        wanted = _best(kept, candidates, backbone)[:target]
    joining = [each for each in wanted if each not in current]
    liars = [each for each in current if each in convicted]
    if liars and len(current) > 1:
        return _without(current, liars[0])
    silent = [each for each in current if each in dead]
    # Three become four, where four tolerate a liar, only by the word of all three.
    needs_all = rule == "open" and len(current) == OPEN_MIN - 1
    if joining and len(current) < ELECTORS_MAX and not (needs_all and silent):
        return tuple(sorted([*current, joining[0]]))
    shrinks_too_far = rule == "open" and len(current) == OPEN_MIN
    if shrinks_too_far or len(current) == 1:
        return None
    if silent:
        return _without(current, silent[0])
    if rule == "open" and len(current) > OPEN_MIN:
        return (
            None  # no elector would agree that a living one goes, and a change that is refused blocks others
        )
    leaving = [each for each in reversed(_best(kept, candidates, backbone)) if each not in wanted]
    return _without(current, leaving[0]) if leaving else None


def _best(kept: Sequence[NodeId], ranked: Sequence[NodeId], backbone: NodeId) -> list[NodeId]:
    """Who stays longest first: the backbone, then as ranked, then by id."""
    position = {node_id: index for index, node_id in enumerate(ranked)}
    return sorted(kept, key=lambda each: (each != backbone, position.get(each, len(position)), each))


def _without(members: Sequence[NodeId], member: NodeId) -> tuple[NodeId, ...]:
    return tuple(each for each in members if each != member)
