"""A swarm of thousands that has existed for a while, without simulating how it came about.

Letting thousands of nodes get to know each other costs millions of messages and says nothing of how they live
together. So a dozen of them really found the swarm and elect, in a simulation of their own, and the others
find on their disks what such a swarm leaves there; then everybody is told of everybody, by putting into the
cores what they would have learnt. This is the one place that reaches into a core's parts, to fill them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvasir_node.sim.swarm import SimNode, Swarm, SwarmOptions
from kvasir_proto.effects import Publish, Slot
from kvasir_proto.election.requests import ElectorateChanged
from kvasir_proto.instants import Duration, Instant, after, seconds
from kvasir_proto.membership.states import Claim
from kvasir_proto.membership.table import NOBODY, Entry
from kvasir_proto.node_core import NodeCore

FOUNDERS: Final = 12
"""Nodes that really found the swarm: electors and candidates are among them."""
_FOUNDING: Final = seconds(15)


def form(swarm: Swarm, nodes: Sequence[SimNode]) -> None:
    """Start these nodes as one swarm. The dozen that found it have on their disks what they decided."""
    founding = _found(swarm)
    follower: dict[Slot, bytes] = {
        slot: data for slot, data in founding[-1].items() if slot in ("fence", "electorate")
    }
    for node in nodes:
        known = founding[node.index] if node.index < len(founding) else follower
        for slot in sorted(known):
            if slot not in ("incarnation", "records", "plan"):
                node.store.write(slot, known[slot], swarm.now)
        node.store.complete(swarm.now)
        swarm.start(node)
    _tell_of_electorates(swarm, nodes[0])
    cores = [core for node in nodes if isinstance(core := node.core, NodeCore)]
    _tell_of_members(cores[:1], cores)  # whoever says what it is, says who the backbone is
    _let_all_describe_themselves(swarm, nodes)
    _tell_of_members(cores, cores)
    _tell_of_records(cores)


def _found(swarm: Swarm) -> list[Mapping[Slot, bytes]]:
    """What the founders' disks hold after they found a swarm, the last one's that of one who only follows."""
    small = Swarm(SwarmOptions(seed=swarm.options.seed), swarm.kit)
    for _ in range(FOUNDERS):
        small.add_node()
    for node in small.nodes:
        small.start(node, (small.nodes[0].node_id,) if node.index else ())
    small.run_until(_FOUNDING)
    return [node.store.stored() for node in small.nodes]


def _tell_of_electorates(swarm: Swarm, founder: SimNode) -> None:
    """Whoever judges the run has not seen how the electorates came about that newcomers will learn."""
    core = founder.core
    assert isinstance(core, NodeCore)
    for link in core._election._knowledge._links:
        swarm.tell_witness(founder, ElectorateChanged(link.electorate, frozenset()))


def _let_all_describe_themselves(swarm: Swarm, nodes: Sequence[SimNode]) -> None:
    """Each core's first look at itself, with what it would publish left out: everybody is given it anyway."""
    for node in nodes:
        core = node.core
        assert isinstance(core, NodeCore)
        core._review(node.clock.now(swarm.now))
        core._review_at = None
        core._effects = [each for each in core._effects if not isinstance(each, Publish)]


def _tell_of_members(subjects: Sequence[NodeCore], observers: Sequence[NodeCore]) -> None:
    claims = []
    for core in subjects:
        claim: Claim = core._membership._self.claim
        claims.append((core.node_id, claim))
    for core in observers:
        membership: Any = core._membership
        table, view, own = membership._table, membership._view, core.node_id
        view.add_all(node_id for node_id, _ in claims if table.get(node_id) is None)
        unknown = []
        for node_id, claim in claims:
            entry = table.get(node_id)
            if entry is None:
                entry = Entry(node_id, claim)
                entry.told = (claim.state, "well")
                unknown.append(entry)
            elif node_id != own:
                table.put(entry, claim, NOBODY, Instant(0))
            entry.record_noted = claim.record_sequence
        table.add_all(unknown)
        membership._recount()
        for key in list(membership._broadcasts._level_of):
            membership._broadcasts.discard(key)


def _tell_of_records(cores: Sequence[NodeCore]) -> None:
    heads: dict[Any, Any] = {}
    standing: dict[Any, Any] = {}
    for core in cores:
        heads.update(core._book._heads)
        standing.update(core._standing)
    digests = {head.digest: node_id for node_id, head in heads.items()}
    for core in cores:
        core._admission._caught_up_at = None  # each has heard what was revoked, and judged these
        book: Any = core._book
        book._heads = dict(heads)
        book._by_digest = dict(digests)
        core._live_ranks = core._live_standing = None
        core._standing = {
            node_id: type(each)(each.record, each.rank, is_live=True) for node_id, each in standing.items()
        }
        # They did not all begin at one moment, so their records are not due at one either.
        book._refresh_at = after(book._now.instant, Duration(book._entropy.randrange(book.refresh_interval)))
        book._publish_at = book._refresh_at
