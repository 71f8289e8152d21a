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
from collections.abc import Iterable
from functools import lru_cache
from heapq import nsmallest
from typing import Final

from kvasir_proto.ids import NodeId

_MASK: Final = (1 << 64) - 1
_LIGHT_FACTOR: Final = 4
"""So many views of the smallest hashes are kept in order: more than one, so that who goes is mostly replaced
without a look at everybody; few, since everybody may be thousands."""


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
        self._light: list[tuple[int, NodeId]] = []
        """The members with the smallest weights, in order: all of them, or `_LIGHT_FACTOR` views at most."""
        self._stale = True
        self._successors: tuple[NodeId, ...] = ()
        self._members: tuple[NodeId, ...] = ()

    def add(self, node_id: NodeId) -> None:
        """A member is live; it must not have been already."""
        insort(self._ring, _place(node_id))
        weighed = self._weighed(node_id)
        if len(self._light) == len(self._ring) - 1 or weighed < self._light[-1]:
            insort(self._light, weighed)
            del self._light[_LIGHT_FACTOR * self._size :]
        self._stale = True

    def add_all(self, node_ids: Iterable[NodeId]) -> None:
        """As `add` for each of them, for the price of one sort."""
        self._ring = sorted([*self._ring, *map(_place, node_ids)])
        self._weigh_anew()
        self._stale = True

    def remove(self, node_id: NodeId) -> None:
        """A member is live no longer; it must have been."""
        del self._ring[bisect_left(self._ring, _place(node_id))]
        weighed = self._weighed(node_id)
        index = bisect_left(self._light, weighed)
        if index < len(self._light) and self._light[index] == weighed:
            del self._light[index]
            if len(self._light) < min(self._size, len(self._ring)):
                self._weigh_anew()
        self._stale = True

    def _weighed(self, node_id: NodeId) -> tuple[int, NodeId]:
        return pair_weight(self._position, ring_position(node_id)), node_id

    def _weigh_anew(self) -> None:
        own = self._position
        weights = ((pair_weight(own, position), node_id) for position, node_id in self._ring)
        self._light = nsmallest(_LIGHT_FACTOR * self._size, weights)

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
        for _, node_id in self._light:
            if len(chosen) >= self._size:
                break
            chosen.add(node_id)
        self._members = tuple(sorted(chosen))
        self._stale = False
