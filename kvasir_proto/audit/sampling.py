"""Which rows of an answer are looked at: a few, from every expert alike, where no holder can know.

Rows are counted in windows, and of each window one row is looked at, at a place drawn when the window begins:
no stretch of two windows goes unseen, and nothing says which row it will be. There are windows over all rows
of a node, for what is wrong with all of them, and over those of each of its experts, for one that is wrong
alone. An expert's windows are short at first (probation), and where something was found rows are looked at
one by one. Drawn numbers are passed in. Nothing that a row says plays a part in its being chosen.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from kvasir_proto import limits
from kvasir_proto.ids import NodeId

if TYPE_CHECKING:
    import random

WINDOW: Final = 112
"""Rows of a window. Of every node's rows 1.8 % are looked at: one in so many of its experts', and of its own.
A fault in every row, or in every row of one expert, is seen within 223 of them."""
CHOSEN_OF_WINDOW: Final = 2
"""One for the node's sake and one for an expert's."""
PROBATION_WINDOW: Final = 4
PROBATION_WINDOWS: Final = 4
"""The first windows of every expert of every node are so short: of its first 16 rows 4 are looked at."""
SCRUTINY_ROWS: Final = 16
"""So many rows one after another are looked at, of the node and of the expert, where one was found that
nothing explains."""
EXPERTS_MAX: Final = 1 << 17
"""Experts of nodes whose rows are counted; the nodes' layers counted first begin again when there are more. A
node with all of a large model has 12,288."""


class Countdowns(NamedTuple):
    """How many rows go by unseen until the next that is looked at: 32 bits for each expert of a layer, and 64
    each for all rows of the node and whether `choose` is to be asked whatever these say. Whoever counts rows
    itself takes them off here, as long as none of them is looked at.
    """

    of_experts: array[int]
    of_node: array[int]


_ALL: Final = 0
_IS_ASKED: Final = 1


@dataclass(slots=True)
class _Windows:
    """Rows that are counted together: how many are behind the next that is looked at, to the window's end;
    how many short windows and rows of scrutiny are left.
    """

    to_the_end: int = 0
    short_windows: int = 0
    scrutiny: int = 0

    def begin(self, draws: random.Random) -> int:
        """Begin the next window, behind what is left of this one. Returns how many rows go by unseen."""
        window = WINDOW
        if self.scrutiny:
            self.scrutiny -= 1
            window = 1
        elif self.short_windows:
            self.short_windows -= 1
            window = PROBATION_WINDOW
        place = draws.randrange(window)
        until_next = self.to_the_end + place
        self.to_the_end = window - 1 - place
        return until_next

    def scrutinise(self) -> None:
        """Look at the next rows one by one, beginning with the very next."""
        self.to_the_end, self.scrutiny = 0, SCRUTINY_ROWS - 1


@dataclass(slots=True)
class _NodeRows:
    """The windows of one node, and how far they have been counted."""

    whole: _Windows = field(default_factory=_Windows)
    layers: dict[int, dict[int, _Windows]] = field(default_factory=dict)
    counts: array[int] = field(default_factory=lambda: array("q", [0, 0]))
    counts_of_experts: dict[int, array[int]] = field(default_factory=dict)
    scrutinies: set[tuple[int, int]] = field(default_factory=set)
    """(Layer, expert) that were asked for and have not begun."""

    def begin_scrutinies(self) -> None:
        """Look at the next rows of the node and of these experts."""
        self.counts[_IS_ASKED] = 0
        if not self.scrutinies:
            return
        self.whole.scrutinise()
        self.counts[_ALL] = 0
        for layer, expert in self.scrutinies:
            windows = self.layers.get(layer, {}).get(expert)
            if windows is not None:
                windows.scrutinise()
                self.counts_of_experts[layer][expert] = 0
        self.scrutinies.clear()


class Sampling:
    """Whose rows have been counted how far. Draws from what it is given, so the same draws choose alike."""

    def __init__(self, draws: random.Random, n_expert: int = limits.EXPERTS_MAX) -> None:
        """Experts have numbers below ``n_expert``."""
        self._draws = draws
        self._n_expert_of_layer = n_expert
        self._nodes: dict[NodeId, _NodeRows] = {}
        self._n_expert = 0

    def choose(self, node_id: NodeId, layer: int, experts: Sequence[int]) -> list[int]:
        """The places in this answer that are to be looked at; `experts` says whose row each one is."""
        node = self._nodes.get(node_id)
        if node is None:
            node = self._nodes[node_id] = _NodeRows()
            node.counts[_ALL] = node.whole.begin(self._draws)
        node.begin_scrutinies()
        counts = node.counts
        of_experts = node.layers.setdefault(layer, {})
        until = node.counts_of_experts.get(layer)
        if until is None:
            until = node.counts_of_experts[layer] = array("i", bytes(4 * self._n_expert_of_layer))
        chosen = []
        for place, expert in enumerate(experts):
            windows = of_experts.get(expert)
            if windows is None:
                windows = of_experts[expert] = _Windows(short_windows=PROBATION_WINDOWS)
                until[expert] = windows.begin(self._draws)
                self._n_expert += 1
            is_chosen = False
            if until[expert]:
                until[expert] -= 1
            else:
                is_chosen = True
                until[expert] = windows.begin(self._draws)
            if counts[_ALL]:
                counts[_ALL] -= 1
            else:
                is_chosen = True
                counts[_ALL] = node.whole.begin(self._draws)
            if is_chosen:
                chosen.append(place)
        while self._n_expert > EXPERTS_MAX:
            self._forget_oldest()
        return chosen

    def countdowns(self, node_id: NodeId, layer: int) -> Countdowns | None:
        """Those of a node and layer of which rows have been counted; `choose` may make them others."""
        node = self._nodes.get(node_id)
        until = node.counts_of_experts.get(layer) if node is not None else None
        return Countdowns(until, node.counts) if node is not None and until is not None else None

    def scrutinise(self, node_id: NodeId, layer: int, expert: int) -> None:
        """Look at the next rows of this node, and at those of this expert of it, one by one."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        node.scrutinies.add((layer, expert))
        node.counts[_IS_ASKED] = 1

    def forget(self, node_id: NodeId) -> None:
        """Begin again with this node, in probation."""
        node = self._nodes.pop(node_id, None)
        if node is not None:
            node.counts[_IS_ASKED] = 1
            self._n_expert -= sum(map(len, node.layers.values()))

    def _forget_oldest(self) -> None:
        """Let the first layer of the first node go, and a node that has none left."""
        node_id, node = next(iter(self._nodes.items()))
        node.counts[_IS_ASKED] = 1
        if node.layers:
            layer = next(iter(node.layers))
            self._n_expert -= len(node.layers.pop(layer))
            del node.counts_of_experts[layer]
        else:
            del self._nodes[node_id]
