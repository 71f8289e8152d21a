"""Rows that wait to be looked at: the newest of each node, all nodes in turn.

Decides what is forgotten when more is chosen than the audit has time for. A queue that keeps the oldest would
show, for as long as it is full, what a node did before it began to lie, and one that takes whatever comes
would hold the rows of whoever answers first. So each node's newest row is next, and the one with the most
waiting loses its oldest. It refuses to know what a row is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

from kvasir_proto.ids import NodeId

Row = TypeVar("Row")


class WaitingRows(Generic[Row]):
    """For any threads; `n_max` rows at most."""

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._n = 0
        self._by_node: OrderedDict[NodeId, deque[Row]] = OrderedDict()
        self._is_closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return self._n

    def put(self, node_id: NodeId, row: Row) -> bool:
        """Add a row; whether one, this or another, was forgotten for it. Waits for nothing."""
        with self._changed:
            if self._is_closed:
                return True
            self._by_node.setdefault(node_id, deque()).append(row)
            self._n += 1
            self._changed.notify()
            if self._n <= self._n_max:
                return False
            self._take(max(self._by_node, key=lambda each: len(self._by_node[each])), is_oldest=True)
            return True

    def get(self) -> Row | None:
        """The newest row of the node that was looked at longest ago, waited for. None once it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._n or self._is_closed)
            return None if self._is_closed else self._take(next(iter(self._by_node)), is_oldest=False)

    def close(self) -> None:
        """Nobody waits any more, and what waits is never looked at."""
        with self._changed:
            self._is_closed = True
            self._by_node.clear()
            self._n = 0
            self._changed.notify_all()

    def _take(self, node_id: NodeId, *, is_oldest: bool) -> Row:
        rows = self._by_node[node_id]
        row = rows.popleft() if is_oldest else rows.pop()
        self._n -= 1
        if not rows:
            del self._by_node[node_id]
        elif not is_oldest:
            self._by_node.move_to_end(node_id)
        return row
