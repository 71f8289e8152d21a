"""Runs a scenario: commands to a swarm in made-up time, and everything that came of them, as one text.

A scenario is a file of blocks. A block is one or more commands, a line `----`, and their output. Lines that
begin with `#` before the first block say what the scenario proves. See `COMMANDS`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

from kvasir_node.sim.network import QUIET
from kvasir_node.sim.simulation import Kit
from kvasir_node.sim.swarm import SimNode, Swarm, SwarmOptions
from kvasir_proto.instants import Duration, milliseconds, seconds

NETWORK: Final = replace(QUIET, delay_min=milliseconds(1), delay_mean=milliseconds(1))
CONVERGED_WITHIN: Final = seconds(30)
_DURATION: Final = re.compile(r"(\d+)(ms|s)")
_RULER: Final = "----"


class Scenario:
    """One swarm and the conversation about it. `shows` decides which events are worth a line."""

    def __init__(self, make_kit: Callable[[], Kit], shows: Callable[[str], bool]) -> None:
        self._make_kit = make_kit
        self._shows = shows
        self._trace = io.StringIO()
        self._swarm: Swarm | None = None
        self._kit: Kit | None = None
        self._dropped: set[tuple[int, int, str]] = set()

    def run(self, text: str) -> str:
        """The text with every block's output as it is now."""
        blocks = [self._answered(block) for block in _blocks(text)]
        return "\n\n".join(blocks) + "\n"

    def _answered(self, block: str) -> str:
        lines = block.splitlines()
        if all(line.startswith("#") for line in lines):
            return block
        commands = lines[: lines.index(_RULER)] if _RULER in lines else lines
        output: list[str] = []
        for line in commands:
            if not line.startswith("#"):
                output += self._command(line)
        return "\n".join([*commands, _RULER, *(output or ["ok"])])

    def _command(self, line: str) -> Iterator[str]:
        name, *words = line.split()
        method = getattr(self, "_do_" + name.replace("-", "_"), None)
        assert method is not None, f"no such command: {line}"
        method(*words)
        yield from self._news()

    def _news(self) -> Iterator[str]:
        """What happened, in order; what is alike at several nodes is one line, at the first one's time."""
        grouped: dict[str, tuple[str, list[str]]] = {}
        said = []
        for line in self._trace.getvalue().splitlines():
            time_text, who, rest = line.split(" ", 2)
            if rest.startswith("= "):
                said.append(rest[2:] if who == "-" else f"{who} {rest[2:]}")
            elif self._shows(rest):
                grouped.setdefault(rest, (time_text, []))[1].append(who)
        for rest, (time_text, nodes) in grouped.items():
            who = " ".join(sorted(set(nodes) - {"-"}))
            yield f"{float(time_text):.2f} {who}{' ' if who else ''}{rest}"
        yield from said
        self._trace.seek(0)
        self._trace.truncate()

    # --- the commands ---------------------------------------------------------------------------------------

    def _do_add_nodes(self, count: str, *words: str) -> None:
        """`add-nodes 3`: so many machines with a process; the first ever founds the swarm."""
        if self._swarm is None:
            self._kit = self._make_kit()
            self._swarm = Swarm(SwarmOptions(seed=1, network=NETWORK), self._kit, None, self._trace)
            self._swarm.network.filters.append(self._may_pass)
        for _ in range(int(count)):
            node = self._swarm.add_node()
            self._swarm.start(node, (self._swarm.nodes[0].node_id,) if node.index else ())

    def _do_advance(self, duration: str) -> None:
        """`advance 5s` or `advance 100ms`."""
        self._running.run_until(self._running.now + _duration(duration))

    def _do_crash(self, number: str, *words: str) -> None:
        """`crash 1`, or `crash 1 power-loss`."""
        self._running.crash(self._node(number), power_loss="power-loss" in words)

    def _do_restart(self, number: str) -> None:
        """`restart 1`."""
        self._running.start(self._node(number), (self._running.nodes[0].node_id,))

    def _do_pause(self, number: str) -> None:
        """`pause 1`: stopped as by SIGSTOP."""
        self._running.pause(self._node(number), loses=False)

    def _do_resume(self, number: str) -> None:
        """`resume 1`."""
        self._running.resume(self._node(number))

    def _do_leave(self, number: str) -> None:
        """`leave 1`: in good order."""
        self._running.leave(self._node(number), "asked to")

    def _do_partition(self, *words: str) -> None:
        """`partition 0 1`: part these from all others; with `one-way` only what they say is lost."""
        side = {int(word) for word in words if word != "one-way"}
        self._running.network.part(side, one_way="one-way" in words)

    def _do_join(self) -> None:
        """`join`: the partition ends."""
        self._running.network.join()

    def _do_drop(self, sender: str, to: str, kind: str = "") -> None:
        """`drop 0 1`, or `drop 0 1 ping`: what 0 says to 1 is lost, or what of it has this kind."""
        self._dropped.add((int(sender), int(to), kind))

    def _do_deliver(self, sender: str, to: str, kind: str = "") -> None:
        """`deliver 0 1`: undo `drop`."""
        self._dropped.discard((int(sender), int(to), kind))

    def _do_step_clock(self, number: str, duration: str) -> None:
        """`step-clock 1 600s`: somebody sets the wall clock of 1 ahead."""
        self._node(number).clock.step_wall(_duration(duration))

    def _do_show_view(self, *numbers: str) -> None:
        """`show-view`, or `show-view 0 2`: what nodes show of themselves and the swarm."""
        for node in self._running.nodes:
            if node.core is not None and (not numbers or str(node.index) in numbers):
                self._say(node, self._judge.show_view(self._running, node.core.view()))

    def _do_show_plan(self) -> None:
        """`show-plan`: who holds what, by the newest plan that somebody who runs knows."""
        for line in self._judge.show_plan(self._running):
            self._say(None, line)

    def _do_stabilize(self) -> None:
        """`stabilize`: go on until all who run are one swarm, and say how long it took or what lacks."""
        swarm, begin = self._running, self._running.now
        while True:
            core = [node for node in swarm.nodes if node.core is not None and not node.has_left]
            lacking = self._judge.lacking(core)
            if lacking is None or swarm.now >= begin + CONVERGED_WITHIN:
                break
            swarm.run_until(swarm.now + milliseconds(250))
        took = f"one swarm after {(swarm.now - begin) / 1e9:.2f} s"
        self._say(None, took if lacking is None else f"not one swarm: {lacking}")

    # --- parts ----------------------------------------------------------------------------------------------

    @property
    def _running(self) -> Swarm:
        assert self._swarm is not None, "add-nodes comes first"
        return self._swarm

    @property
    def _judge(self) -> Any:
        return self._kit

    def _node(self, number: str) -> SimNode:
        return self._running.nodes[int(number)]

    def _say(self, node: SimNode | None, text: str) -> None:
        self._running.log(node, "=", text)

    def _may_pass(self, sender: int, to: int, message: Any) -> bool:
        return not self._dropped & {(sender, to, ""), (sender, to, message.kind)}


def _duration(text: str) -> Duration:
    found = _DURATION.fullmatch(text)
    assert found is not None, f"not a duration: {text}"
    return (milliseconds if found[2] == "ms" else seconds)(int(found[1]))


def _blocks(text: str) -> Iterator[str]:
    yield from re.split(r"\n{2,}", text.strip("\n"))
