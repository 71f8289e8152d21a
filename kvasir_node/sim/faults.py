"""Which faults happen, how often, and when: presets by name, and the schedule that draws them.

The first phase of a run lets the chosen faults happen at random times; then `heal` ends them all, brings
every crashed node of the core back and silences the liars, and the swarm has to become one again. The core
is every honest node that did not leave. It draws from its own randomness and knows no core's inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from kvasir_node.sim.clocks import NodeClock
from kvasir_node.sim.network import NetworkOptions
from kvasir_node.sim.swarm import SimNode, Swarm
from kvasir_proto.errors import UsageError
from kvasir_proto.ids import NodeId
from kvasir_proto.instants import Duration, Instant, seconds

FAULTS: Final = (
    "loss",
    "duplicate",
    "reorder",
    "corrupt",
    "partition",
    "clog",
    "crash",
    "pause",
    "skew",
    "churn",
    "disk",
    "byzantine",
)
"""Every fault there is, by the name that `--faults` takes."""


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """Faults that happen to nodes. A gap is the mean time between two of them in the whole swarm; 0 is never.

    `skew_max` is how far wall clocks are off, `drift_ppm_max` how much instant clocks run fast or slow.
    """

    crash_gap_mean: Duration
    restart_delay_mean: Duration
    power_loss: float
    pause_gap_mean: Duration
    pause_mean: Duration
    skew_max: Duration
    drift_ppm_max: int
    wall_step_gap_mean: Duration
    join_gap_mean: Duration
    leave_gap_mean: Duration
    partition_gap_mean: Duration
    partition_hold_mean: Duration
    down_share_max: float
    nodes_max_factor: float
    byzantine: bool
    fsync_slow: float


NO_FAULTS: Final = FaultOptions(
    crash_gap_mean=Duration(0),
    restart_delay_mean=seconds(5),
    power_loss=0.3,
    pause_gap_mean=Duration(0),
    pause_mean=seconds(4),
    skew_max=Duration(0),
    drift_ppm_max=0,
    wall_step_gap_mean=Duration(0),
    join_gap_mean=Duration(0),
    leave_gap_mean=Duration(0),
    partition_gap_mean=Duration(0),
    partition_hold_mean=seconds(8),
    down_share_max=0.3,
    nodes_max_factor=1.2,
    byzantine=False,
    fsync_slow=0.0,
)


def fault_names(text: str) -> tuple[str, ...]:
    """What `--faults` says: `all`, `none`, or names with commas. Raises `UsageError` for another name."""
    if text == "all":
        return FAULTS
    if text == "none":
        return ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in FAULTS:
            raise UsageError(f"there is no fault {name!r}: all, none, or some of {', '.join(FAULTS)}")
    return tuple(name for name in FAULTS if name in names)


def network_with(options: NetworkOptions, names: Iterable[str]) -> NetworkOptions:
    """The network with these faults at their usual rates."""
    chosen = set(names)
    return replace(
        options,
        loss=0.03 if "loss" in chosen else 0.0,
        duplicate=0.02 if "duplicate" in chosen else 0.0,
        reorder=0.05 if "reorder" in chosen else 0.0,
        corrupt=0.005 if "corrupt" in chosen else 0.0,
        clog=0.0005 if "clog" in chosen else 0.0,
        partitions=("isolate_one", "isolate_one", "split") if "partition" in chosen else (),
    )


def faults_with(names: Iterable[str], node_count: int) -> FaultOptions:
    """Faults of nodes at their usual rates: a larger swarm has more crashes, not more of them a node."""
    chosen = set(names)

    def gap(name: str, one_node_s: int) -> Duration:
        return Duration(seconds(one_node_s) // max(1, node_count)) if name in chosen else Duration(0)

    return replace(
        NO_FAULTS,
        crash_gap_mean=gap("crash", 400),
        pause_gap_mean=gap("pause", 500),
        skew_max=seconds(600) if "skew" in chosen else Duration(0),
        drift_ppm_max=50_000 if "skew" in chosen else 0,
        wall_step_gap_mean=gap("skew", 1500),
        join_gap_mean=gap("churn", 2000),
        leave_gap_mean=gap("churn", 2500),
        partition_gap_mean=seconds(20) if "partition" in chosen else Duration(0),
        byzantine="byzantine" in chosen,
        fsync_slow=0.02 if "disk" in chosen else 0.0,
    )


class FaultSchedule:
    """Draws when something happens to whom, until it is healed."""

    def __init__(
        self,
        swarm: Swarm,
        options: FaultOptions,
        join: Callable[[], None],
        bears_departure: Callable[[Sequence[SimNode], NodeId], bool],
        node_count: int,
    ) -> None:
        self.counts: dict[str, int] = {}
        self._swarm = swarm
        self._options = options
        self._join = join
        self._bears_departure = bears_departure
        self._node_count = node_count
        self._random = swarm.randomness("faults")
        self._over = False

    def begin(self) -> None:
        """From now on faults happen."""
        options = self._options
        for gap, happens in (
            (options.crash_gap_mean, self._crash),
            (options.pause_gap_mean, self._pause),
            (options.wall_step_gap_mean, self._step_wall),
            (options.join_gap_mean, self._let_join),
            (options.leave_gap_mean, self._let_leave),
            (options.partition_gap_mean, self._part),
        ):
            if gap:
                self._arm(gap, happens)

    def heal(self) -> None:
        """Everything that was broken works again, and stays so; who was down starts, who lies is stopped."""
        self._over = True
        swarm = self._swarm
        swarm.network.heal()
        swarm.log(None, "healed")
        for node in swarm.nodes:
            if not node.is_honest:
                if node.is_up:
                    swarm.crash(node)
                continue
            swarm.resume(node)
            if not node.is_up and not node.has_left and node.starts:
                swarm.start(node, self._seeds_for(node))

    def core(self) -> list[SimNode]:
        """Who must be one swarm in the end."""
        return [node for node in self._swarm.nodes if node.is_honest and not node.has_left and node.starts]

    def _arm(self, gap: Duration, happens: Callable[[], None]) -> None:
        self._swarm.schedule(self._swarm.now + self._exponential(gap), self._happen, (gap, happens))

    def _happen(self, _: int, gap: Duration, happens: Callable[[], None]) -> None:
        if not self._over:
            happens()
            self._arm(gap, happens)

    def _exponential(self, mean: int) -> int:
        return int(-math.log(1.0 - self._random.random()) * mean)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _someone(self) -> SimNode | None:
        """Somebody honest who runs; nobody while too many are down, for that would show nothing."""
        nodes = self.core()
        running = [node for node in nodes if node.is_up and not node.is_paused]
        if not running or len(nodes) - len(running) >= max(1, self._options.down_share_max * len(nodes)):
            return None
        return self._random.choice(running)

    def _seeds_for(self, node: SimNode) -> tuple[NodeId, ...]:
        """Up to three nodes that the newcomer was told of: the founder and two that run."""
        running = [
            other.node_id
            for other in self.core()
            if other.is_up and other.index != node.index and other.index != 0
        ]
        chosen = self._random.sample(running, min(2, len(running)))
        founder = [self._swarm.nodes[0].node_id] if node.index else []
        return (*founder, *chosen)

    # --- what happens ---------------------------------------------------------------------------------------

    def _crash(self) -> None:
        node = self._someone()
        if node is None:
            return
        self._count("crash")
        self._swarm.crash(node, power_loss=self._random.random() < self._options.power_loss)
        at = self._swarm.now + self._exponential(self._options.restart_delay_mean)
        self._swarm.schedule(at, self._restart, (node, node.generation))

    def _restart(self, _: int, node: SimNode, generation: int) -> None:
        if not node.is_up and node.generation == generation and not node.has_left:
            self._swarm.start(node, self._seeds_for(node))

    def _pause(self) -> None:
        node = self._someone()
        if node is None:
            return
        self._count("pause")
        self._swarm.pause(node, loses=self._random.random() < 0.5)
        at = self._swarm.now + self._exponential(self._options.pause_mean)
        self._swarm.schedule(at, self._resume, (node, node.generation))

    def _resume(self, _: int, node: SimNode, generation: int) -> None:
        if node.generation == generation:
            self._swarm.resume(node)

    def _step_wall(self) -> None:
        node = self._random.choice(self._swarm.nodes)
        self._count("wall_step")
        target = self._random.randint(-self._options.skew_max, self._options.skew_max)
        node.clock.step_wall(Duration(target - node.clock.skew))
        self._swarm.log(node, "wall_clock_set", f"{target / 1e9:.1f}")

    def _let_join(self) -> None:
        if len(self.core()) < self._options.nodes_max_factor * self._node_count:
            self._count("join")
            self._join()

    def _let_leave(self) -> None:
        node, core = self._someone(), self.core()
        if node is None or not node.index or len(core) <= 0.8 * self._node_count:
            return
        if self._bears_departure(core, node.node_id):
            self._count("leave")
            self._swarm.leave(node, "enough for today")

    def _part(self) -> None:
        up = [node.index for node in self._swarm.nodes if node.is_up]
        if not up:
            return
        self._count("partition")
        how = self._swarm.network.part_at_random(up)
        self._swarm.log(None, "parted", how)
        at = self._swarm.now + self._exponential(self._options.partition_hold_mean)
        self._swarm.schedule(at, self._unpart, (self.counts["partition"],))

    def _unpart(self, _: int, number: int) -> None:
        if self.counts["partition"] == number and not self._over:
            self._swarm.network.join()
            self._swarm.log(None, "joined")


def clock_with(options: FaultOptions, randomness: Random) -> NodeClock:
    """A machine's clocks: off and adrift within the bounds, and up since some time ago."""
    skew = randomness.randint(-options.skew_max, options.skew_max)
    drift = randomness.randint(-options.drift_ppm_max, options.drift_ppm_max)
    start = randomness.randint(0, seconds(100_000)) if options.skew_max else 0
    return NodeClock(Instant(start), drift, Duration(skew))
