"""A core that a test speaks for: the twin of `ports.SwarmCore`.

It checks proofs as the real one does, under the founder's electorate, and remembers what a duty commanded.
What the swarm would bring about, the test says: whom this node follows, which plan came, who holds a lease.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvasir_proto.capability import CapabilityRecord
from kvasir_proto.election.requests import TermFollowed
from kvasir_proto.election.states import Role
from kvasir_proto.errors import RemoteProtocolError
from kvasir_proto.ids import NodeId
from kvasir_proto.node_core import NodeCommand, NodeEvent, NodeView, PlanReceived
from kvasir_proto.placement.plan import Plan
from kvasir_proto.swarm_manifest import FoundedSwarm
from kvasir_proto.term_proof import ProvenTerm, founding_electorate, verify_term_proof


class MemoryCore:
    """One node's core. ``hear`` is given each event, as a driver would; set it to a duty's ``take_event``."""

    def __init__(self, node_id: NodeId, swarm: FoundedSwarm, fence: ProvenTerm | None = None) -> None:
        self._swarm = swarm
        self.commands: list[NodeCommand] = []
        self.records: dict[NodeId, CapabilityRecord] = {}
        self.hear: Callable[[NodeEvent], None] = lambda _event: None
        self.is_disk_full = False
        """While it is, a term that a proof brings is not told: it would not survive."""
        self._view = NodeView(
            node_id=node_id,
            state="joining",
            reason="no backbone is known yet",
            fence=fence,
            role=Role.FOLLOWER,
            lease_until=None,
            electorate=founding_electorate(swarm.manifest.founder_public_key, swarm.manifest.electorate),
            members=(),
            plan=None,
            is_serving_plan=False,
            coverage=None,
            missing=(),
            clock_offset=None,
        )

    # -- `ports.SwarmCore` -------------------------------------------------------------------------

    def command(self, request: NodeCommand) -> None:
        """See `ports.SwarmCore`."""
        self.commands.append(request)

    def check_proof(self, proof: bytes, source: NodeId) -> ProvenTerm:
        """See `ports.SwarmCore`. ``source`` is nobody to be asked here."""
        term = verify_term_proof(proof, self._swarm.digest, self._view.electorate)
        fence = self._view.fence
        if fence is not None and term[:2] < fence[:2]:
            raise RemoteProtocolError(f"({term.epoch}, {term.term}) is behind the fence", "stale_term")
        if fence is None or fence[:2] < term[:2]:
            self.change(fence=term)
            if not self.is_disk_full:
                self.hear(TermFollowed(term, proof))
        return term

    def view(self) -> NodeView:
        """See `ports.SwarmCore`."""
        return self._view

    def record_of(self, node_id: NodeId) -> CapabilityRecord | None:
        """See `ports.SwarmCore`."""
        return self.records.get(node_id)

    auditors: frozenset[NodeId] = frozenset()
    """See `ports.SwarmCore`."""
    proof = b""
    """See `ports.SwarmCore`."""

    # -- for the test ------------------------------------------------------------------------------

    def change(self, **changes: Any) -> None:
        """Let the view say something else; ``changes`` as in `NodeView`."""
        self._view = replace(self._view, **changes)

    def follow(self, term: ProvenTerm, proof: bytes = b"") -> None:
        """This term counts from now on, and is on the disk."""
        self.change(fence=term)
        self.hear(TermFollowed(term, proof))

    def hand(self, plan: Plan, signed: bytes = b"") -> None:
        """This plan of the term's backbone came."""
        self.change(plan=plan)
        self.hear(PlanReceived(plan, signed))

    def commanded(self, kind: type[Any]) -> list[Any]:
        """The commands of this type, in order."""
        return [each for each in self.commands if isinstance(each, kind)]
