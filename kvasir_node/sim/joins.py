"""How long it takes until a newcomer is known: to 99 % of the members that run."""

from __future__ import annotations

from collections.abc import Callable

from kvasir_node.sim.swarm import SimNode
from kvasir_proto.ids import NodeId


class JoinTimes:
    """Counts, for each newcomer, who has heard of it."""

    def __init__(self, members_count: Callable[[], int]) -> None:
        self._members_count = members_count
        self._began: dict[NodeId, int] = {}
        self.pending: dict[NodeId, set[int]] = {}
        """Newcomers that are not known widely yet, and who has heard of each."""
        self.times_s: list[float] = []

    def joins(self, real: int, node: SimNode) -> None:
        """This node begins to join now."""
        self._began[node.node_id] = real
        self.pending[node.node_id] = set()

    def known(self, real: int, observer: SimNode, member: NodeId) -> None:
        """The observer has heard that the member is alive."""
        knowing = self.pending.get(member)
        if knowing is None or observer.node_id == member:
            return
        knowing.add(observer.index)
        if 100 * len(knowing) >= 99 * (self._members_count() - 1):
            self.times_s.append((real - self._began[member]) / 1e9)
            del self.pending[member]

    def p99_s(self) -> float | None:
        """The time that 99 % of the newcomers needed at most; None if some never got known, or none came."""
        if self.pending or not self.times_s:
            return None
        ordered = sorted(self.times_s)
        return ordered[min(len(ordered) - 1, -(-99 * len(ordered) // 100) - 1)]
