"""Whom a node watches: a bounded, stable choice from the live members that every node makes by one rule.

Half of the view are the node's successors on a ring of hashed ids, so that everybody is watched by several
whatever the rest does; half are the members with the smallest hash of (both ids), so that the graph is random
and gossip spreads in a logarithm of rounds. The choice depends on the set of live members alone: a member
that comes or goes changes one place in a few views and no connection elsewhere. Ids are hashed once and kept
in sorted lists, so that a change costs a search and not a walk. It knows neither states nor time.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from functools import lru_cache
from typing import Final

from kvasir_proto.ids import NodeId

_MASK: Final = (1 << 64) - 1


@lru_cache(maxsize=8192)
def ring_position(node_id: NodeId) -> int:
    """Where on the ring this member stands: the first 64 bits of SHA-256 of its id."""
    return int.from_bytes(hashlib.sha256(node_id.encode("ascii")).digest()[:8], "big")


@lru_cache(maxsize=8192)
def _place(node_id: NodeId) -> tuple[int, NodeId]:
    return ring_position(node_id), node_id


def accuser_mark(node_id: NodeId) -> bytes:
    """Four bytes that stand for an accuser in a claim."""
    return ring_position(node_id).to_bytes(8, "big")[:4]


def pair_weight(own_position: int, position: int) -> int:
    """A hash of two members, the same from both sides (splitmix64's finaliser): connections serve both."""
    mixed = own_position ^ position
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


class View:
    """The view of one node over the live members it is told of; itself is never in it."""

    def __init__(self, node_id: NodeId, size: int) -> None:
        self._position = ring_position(node_id)
        self._size = size
        self._ring: list[tuple[int, NodeId]] = []
        self._weights: list[tuple[int, NodeId]] = []
        self._stale = True
        self._successors: tuple[NodeId, ...] = ()
        self._members: tuple[NodeId, ...] = ()

    def add(self, node_id: NodeId) -> None:
        """A member is live; it must not have been already."""
        position = ring_position(node_id)
        insort(self._ring, _place(node_id))
        insort(self._weights, (pair_weight(self._position, position), node_id))
        self._stale = True

    def remove(self, node_id: NodeId) -> None:
        """A member is live no longer; it must have been."""
        position = ring_position(node_id)
        del self._ring[bisect_left(self._ring, (position, node_id))]
        del self._weights[bisect_left(self._weights, (pair_weight(self._position, position), node_id))]
        self._stale = True

    @property
    def members(self) -> tuple[NodeId, ...]:
        """Whom to watch, sorted."""
        if self._stale:
            self._choose()
        return self._members

    @property
    def successors(self) -> tuple[NodeId, ...]:
        """The half that follows on the ring, nearest first: they are watched by each other too."""
        if self._stale:
            self._choose()
        return self._successors

    def _choose(self) -> None:
        half = min(self._size // 2, len(self._ring))
        start = bisect_left(self._ring, (self._position,))
        around = self._ring[start : start + half]
        around += self._ring[: half - len(around)]
        self._successors = tuple(node_id for _, node_id in around)
        chosen = set(self._successors)
        for _, node_id in self._weights:
            if len(chosen) >= self._size:
                break
            chosen.add(node_id)
        self._members = tuple(sorted(chosen))
        self._stale = False
