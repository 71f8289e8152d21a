"""The network between simulated nodes, in one frozen record: how late, how often lost, what is cut off.

For each packet it says at which times copies of it arrive and whether they arrive whole. One partition
holds at a time, drawn anew when it ends: one node isolated, or the swarm split in two, in both directions
or in one. A clogged path delivers nothing for a while and then all of it. It reads no message: a filter
given by a test may. It draws from its own randomness only, so that the same packets meet the same fate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Final, Literal, NamedTuple, TypeAlias

from kvasir_proto.instants import Duration, milliseconds, seconds
from kvasir_proto.messages import Message

Partition: TypeAlias = Literal["isolate_one", "split"]
LinkFilter: TypeAlias = Callable[[int, int, Message], bool]
"""(sender, receiver, message) -> whether the message may travel."""

_PATH_LIMIT: Final = 1 << 20
"""More nodes than any simulation has: a path is numbered sender * _PATH_LIMIT + receiver."""


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """How the network treats packets. Probabilities are of one packet; 0 turns a fault off.

    A packet takes `delay_min` and then an exponential share that makes `delay_mean` on average. One that is
    reordered is held back by up to `reorder_delay_max`, so that later ones overtake it. Partitions come
    `partition_gap_mean` apart and hold for `partition_hold_mean`; `partition_one_way` is the share of them
    that cut one direction only. `path_capacity` is how many packets one path holds: what is over is lost.
    """

    delay_min: Duration
    delay_mean: Duration
    loss: float
    duplicate: float
    reorder: float
    reorder_delay_max: Duration
    corrupt: float
    partitions: tuple[Partition, ...]
    partition_gap_mean: Duration
    partition_hold_mean: Duration
    partition_one_way: float
    clog: float
    clog_mean: Duration
    path_capacity: int


QUIET: Final = NetworkOptions(
    delay_min=Duration(200_000),
    delay_mean=milliseconds(1),
    loss=0.0,
    duplicate=0.0,
    reorder=0.0,
    reorder_delay_max=milliseconds(300),
    corrupt=0.0,
    partitions=(),
    partition_gap_mean=seconds(30),
    partition_hold_mean=seconds(8),
    partition_one_way=0.4,
    clog=0.0,
    clog_mean=milliseconds(500),
    path_capacity=256,
)
"""A LAN on which nothing goes wrong."""


class Arrival(NamedTuple):
    """One copy of a packet: when it is there, and whether some of its bytes were changed."""

    at: int
    corrupted: bool


class Network:
    """Decides the fate of each packet. Nodes are numbers from 0, times real nanoseconds."""

    def __init__(self, options: NetworkOptions, randomness: Random) -> None:
        self.options = options
        self.filters: list[LinkFilter] = []
        self.lost_count = 0
        self._random = randomness
        self._extra_mean = options.delay_mean - options.delay_min
        self._faulty = bool(options.loss or options.duplicate or options.reorder or options.corrupt)
        self._cut: set[int] = set()
        self._slow: dict[int, int] = {}
        self._clogged_until: dict[int, int] = {}
        self._in_flight: dict[int, int] = {}
        self._side: list[bool] = []
        self._parted: Literal["no", "both_ways", "one_way"] = "no"

    def add_node(self) -> None:
        """One node more; while the network is split it finds itself on either side."""
        self._side.append(self._parted != "no" and self._random.random() < 0.5)

    def route(self, now: int, sender: int, to: int) -> tuple[Arrival, ...]:
        """When copies of a packet sent now arrive; none if it is lost."""
        if self.is_cut(sender, to):
            self.lost_count += 1
            return ()
        path = sender * _PATH_LIMIT + to
        in_flight = self._in_flight.get(path, 0)
        if in_flight >= self.options.path_capacity:
            self.lost_count += 1
            return ()
        if not self._faulty and not self._clogged_until and not self.options.clog:
            self._in_flight[path] = in_flight + 1
            return (Arrival(self._delayed(now, path), False),)
        return self._route_with_faults(now, path)

    def _route_with_faults(self, now: int, path: int) -> tuple[Arrival, ...]:
        options, draw = self.options, self._random.random
        if options.clog and draw() < options.clog:
            until = now + self._exponential(options.clog_mean)
            self._clogged_until[path] = max(until, self._clogged_until.get(path, 0))
        if draw() < options.loss:
            self.lost_count += 1
            return ()
        arrivals = []
        for _ in range(1 + (draw() < options.duplicate)):
            at = self._delayed(now, path)
            if draw() < options.reorder:
                at += int(draw() * options.reorder_delay_max)
            arrivals.append(Arrival(at, draw() < options.corrupt))
        self._in_flight[path] = self._in_flight.get(path, 0) + len(arrivals)
        return tuple(arrivals)

    def _delayed(self, now: int, path: int) -> int:
        at = now + self.options.delay_min + self._exponential(self._extra_mean)
        if self._slow:
            at += self._slow.get(path, 0)
        if self._clogged_until:
            until = self._clogged_until.get(path)
            if until is not None:
                if until > now:
                    return max(at, until)
                del self._clogged_until[path]
        return at

    def _exponential(self, mean: int) -> int:
        return int(-math.log(1.0 - self._random.random()) * mean)

    def arrived(self, sender: int, to: int) -> None:
        """A copy has left the path: there is room for another."""
        path = sender * _PATH_LIMIT + to
        count = self._in_flight[path] - 1
        if count:
            self._in_flight[path] = count
        else:
            del self._in_flight[path]

    def delay(self) -> int:
        """What one hop of a reliable stream takes: like a packet, but a lost one is sent again."""
        late = self.options.delay_min + self._exponential(self._extra_mean)
        while self.options.loss and self._random.random() < self.options.loss:
            late += _RETRANSMISSION
        return late

    @property
    def is_whole(self) -> bool:
        """Whether no path is cut."""
        return self._parted == "no" and not self._cut

    def is_cut(self, sender: int, to: int) -> bool:
        """Whether nothing can travel from one node to the other now."""
        is_apart = self._parted != "no" and self._side[sender] != self._side[to]
        if is_apart and (self._parted == "both_ways" or self._side[sender]):
            return True
        return bool(self._cut) and sender * _PATH_LIMIT + to in self._cut

    def passes_filters(self, sender: int, to: int, message: Message) -> bool:
        """Whether every filter lets the message travel."""
        return all(each(sender, to, message) for each in self.filters)

    # --- what a schedule of faults, a scenario or a test does to it -----------------------------------------

    def part(self, side: set[int], *, one_way: bool = False) -> None:
        """Part these nodes from all others, until `join`; one way: only what they say is lost."""
        self._side = [index in side for index in range(len(self._side))]
        self._parted = "one_way" if one_way else "both_ways"

    def part_at_random(self, up: list[int]) -> str:
        """Part the swarm as the options allow; a phrase for the log."""
        mode = self._random.choice(self.options.partitions)
        one_way = self._random.random() < self.options.partition_one_way
        if mode == "isolate_one":
            side = {self._random.choice(up)}
            # Which of the two directions is lost is the other half of the draw.
            if one_way and self._random.random() < 0.5:
                side = set(range(len(self._side))) - side
        else:
            side = {index for index in range(len(self._side)) if self._random.random() < 0.5}
        self.part(side, one_way=one_way)
        few = side if 2 * len(side) <= len(self._side) else set(range(len(self._side))) - side
        return f"{mode} {'one_way' if one_way else 'both_ways'} {' '.join(map(str, sorted(few)))}"

    def join(self) -> None:
        """The partition ends."""
        self._parted = "no"

    def cut(self, sender: int, to: int) -> None:
        """Cut one path, in one direction, until `mend`."""
        self._cut.add(sender * _PATH_LIMIT + to)

    def mend(self, sender: int, to: int) -> None:
        """Undo `cut`."""
        self._cut.discard(sender * _PATH_LIMIT + to)

    def slow_down(self, sender: int, to: int, by: Duration) -> None:
        """Add a delay to one path, in one direction; 0 takes it away."""
        self._slow[sender * _PATH_LIMIT + to] = by

    def heal(self) -> None:
        """End every fault for good; delays stay."""
        self._faulty = False
        self._parted = "no"
        self._cut.clear()
        self._slow.clear()
        self._clogged_until.clear()
        self.filters.clear()
        self.options = replace(
            QUIET,
            delay_min=self.options.delay_min,
            delay_mean=self.options.delay_mean,
            path_capacity=self.options.path_capacity,
        )


_RETRANSMISSION: Final = milliseconds(200)
"""TCP's shortest wait before it sends again."""
