"""Which rows of an answer are looked at: a few, from every expert alike, where no holder can know.

Rows are counted in windows, and of each window one row is looked at, at a place drawn when the window begins:
no stretch of two windows goes unseen, and nothing says which row it will be. There are windows over all rows
of a node, for what is wrong with all of them, and over those of each of its experts, for one that is wrong
alone. An expert's windows are short at first (probation), and where something was found rows are looked at
one by one. Drawn numbers are passed in. Nothing that a row says plays a part in its being chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvasir_proto.ids import NodeId

if TYPE_CHECKING:
    import random

WINDOW: Final = 112
"""Rows of a window. Of every node's rows 1.8 % are looked at: one in so many of its experts', and of its own.
A fault in every row, or in every row of one expert, is seen within 223 of them."""
PROBATION_WINDOW: Final = 4
PROBATION_WINDOWS: Final = 4
"""The first windows of every expert of every node are so short: of its first 16 rows 4 are looked at."""
SCRUTINY_ROWS: Final = 16
"""So many rows one after another are looked at, of the node and of the expert, where one was found that
nothing explains."""
EXPERTS_MAX: Final = 1 << 17
"""Experts of nodes whose rows are counted; the nodes' layers counted first begin again when there are more. A
node with all of a large model has 12,288."""


@dataclass(slots=True)
class _Windows:
    """Rows that are counted together: how many until the next that is looked at, and from there to the
    window's end; how many short windows and rows of scrutiny are left.
    """

    until_next: int = 0
    to_the_end: int = 0
    short_windows: int = 0
    scrutiny: int = 0

    def begin(self, draws: random.Random) -> None:
        """Begin the next window, behind what is left of this one."""
        window = WINDOW
        if self.scrutiny:
            self.scrutiny -= 1
            window = 1
        elif self.short_windows:
            self.short_windows -= 1
            window = PROBATION_WINDOW
        place = draws.randrange(window)
        self.until_next = self.to_the_end + place
        self.to_the_end = window - 1 - place

    def scrutinise(self) -> None:
        """Look at the next rows one by one."""
        self.until_next, self.to_the_end, self.scrutiny = 0, 0, SCRUTINY_ROWS - 1


@dataclass(slots=True)
class _NodeRows:
    """The windows of one node."""

    whole: _Windows = field(default_factory=_Windows)
    layers: dict[int, dict[int, _Windows]] = field(default_factory=dict)


class Sampling:
    """Whose rows have been counted how far. Draws from what it is given, so the same draws choose alike."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._nodes: dict[NodeId, _NodeRows] = {}
        self._n_expert = 0

    def choose(self, node_id: NodeId, layer: int, experts: Sequence[int]) -> list[int]:
        """The places in this answer that are to be looked at; `experts` says whose row each one is."""
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = _NodeRows()
            node.whole.begin(self._draws)
        whole = node.whole
        of_experts = node.layers.setdefault(layer, {})
        chosen = []
        for place, expert in enumerate(experts):
            windows = of_experts.get(expert)
            if windows is None:
                windows = of_experts[expert] = _Windows(short_windows=PROBATION_WINDOWS)
                windows.begin(self._draws)
                self._n_expert += 1
            is_chosen = False
            if windows.until_next:
                windows.until_next -= 1
            else:
                is_chosen = True
                windows.begin(self._draws)
            if whole.until_next:
                whole.until_next -= 1
            else:
                is_chosen = True
                whole.begin(self._draws)
            if is_chosen:
                chosen.append(place)
        while self._n_expert > EXPERTS_MAX:
            self._forget_oldest()
        return chosen

    def scrutinise(self, node_id: NodeId, layer: int, expert: int) -> None:
        """Look at the next rows of this node, and at those of this expert of it, one by one."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        node.whole.scrutinise()
        windows = node.layers.get(layer, {}).get(expert)
        if windows is not None:
            windows.scrutinise()

    def forget(self, node_id: NodeId) -> None:
        """Begin again with this node, in probation."""
        node = self._nodes.pop(node_id, None)
        if node is not None:
            self._n_expert -= sum(map(len, node.layers.values()))

    def _forget_oldest(self) -> None:
        """Let the first layer of the first node go, and a node that has none left."""
        node_id, node = next(iter(self._nodes.items()))
        if node.layers:
            self._n_expert -= len(node.layers.pop(next(iter(node.layers))))
        else:
            del self._nodes[node_id]
