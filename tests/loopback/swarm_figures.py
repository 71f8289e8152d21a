"""How fast a swarm of real daemons starts, fails over and rests: `python -m tests.loopback.swarm_figures`.

Prints one line a figure, of daemons on this machine's loopback interface with the demo model, all of one
class and any of which may be backbone. Nothing else should run meanwhile. Ends by itself within some minutes.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from kvasir_node.control import connect_daemon
from kvasir_proto.errors import KvasirError
from kvasir_proto.messages.local import GenerateEnd, GenerateRequest, Refusal
from kvasir_proto.sampling import Sampling
from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir, wait_for

SAMPLING = Sampling(seed=5, temperature=0.8, top_k=0, top_p=0.95, min_p=0.0)
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def say(what: str, value: str) -> None:
    """One figure."""
    sys.stdout.write(f"{what:<64} {value}\n")
    sys.stdout.flush()


async def _generate(daemon: Daemon, n_tokens: int) -> int:
    """The number of tokens; 0 where the session was refused or failed."""
    try:
        async with connect_daemon(daemon.locations) as connection:
            await connection.send(GenerateRequest("In the beginning", (), n_tokens, SAMPLING))
            count = 0
            while True:
                reply = await connection.receive()
                if isinstance(reply, GenerateEnd):
                    return 0 if reply.reason == "failed" else count
                if isinstance(reply, Refusal):
                    return 0
                count += 1
    except KvasirError:
        return 0


def serves(daemons: list[Daemon]) -> Daemon | None:
    """The daemon that is backbone, holds its lease and is ready."""
    for daemon in daemons:
        document = daemon.status() or {}
        is_backbone = document.get("backbone") == document.get("node_id")
        if is_backbone and document["lease_s"] is not None and document["state"] in ("ready", "degraded"):
            return daemon
    return None


def usage(pid: int) -> tuple[float, int]:
    """Seconds of CPU that a process has used, and the bytes it has in memory."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return (int(fields[11]) + int(fields[12])) / _TICK, resident


class Figures:
    """Daemons in one directory, and what is measured of them."""

    def __init__(self, directory: Path, nodes: int) -> None:
        homes = [directory / f"n{number}" for number in range(nodes)]
        for number, home in enumerate(homes):
            arguments = ("init", "--found") if number == 0 else ("init",)
            command = kvasir("--home", str(home), *arguments)
            subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
        self.started = time.monotonic()
        self.daemons = [Daemon(homes[0])]
        self.daemons[0].start()
        address = self.daemons[0].wait(lambda each: each["addresses"], "an address")["addresses"][0]
        for home in homes[1:]:
            self.daemons.append(Daemon(home, "--bootstrap", address))
            self.daemons[-1].start()

    def wait_ready(self, what: str) -> None:
        """All are ready, from a moment that was noted in `started`."""
        for daemon in self.daemons:
            daemon.wait_state("ready")
        say(what, f"{time.monotonic() - self.started:.1f} s")

    def settle(self) -> dict[str, Any]:
        """There are electors enough to lose one, and the plan is over its transitions."""
        document: dict[str, Any] = {}
        for daemon in self.daemons:
            document = daemon.wait(
                lambda each: each["state"] == "ready" and len(each["electorate"]["members"]) >= 3, "settled"
            )
        time.sleep(5)
        return document

    def fail_over(self) -> None:
        """Kill the backbone while it generates."""
        backbone = serves(self.daemons)
        assert backbone is not None

        async def kill_under_load() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_generate, backbone, 2000)
                await trio.sleep(2)
                backbone.kill(signal.SIGKILL)

        trio.run(kill_under_load)
        killed = time.monotonic()
        others = [each for each in self.daemons if each is not backbone]
        following = wait_for(lambda: serves(others), "another backbone")
        elected_s = time.monotonic() - killed
        while not trio.run(_generate, following, 1):
            time.sleep(0.05)
        say("backbone killed under load: another holds the lease after", f"{elected_s:.1f} s")
        say("  and has answered a prompt after", f"{time.monotonic() - killed:.1f} s")
        backbone.process.wait()
        backbone.start()
        self.settle()

    def lose_a_holder(self) -> None:
        """Kill a node that holds experts."""
        backbone = serves(self.daemons)
        assert backbone is not None
        holder = next(each for each in self.daemons if (each.status() or {}).get("n_experts_held"))
        node_id = (holder.status() or {})["node_id"]
        holder.kill(signal.SIGKILL)
        killed = time.monotonic()

        def is_gone(document: dict[str, Any]) -> bool:
            (member,) = (each for each in document["members"] if each["node_id"] == node_id)
            return str(member["state"]) == "dead"

        backbone.wait(is_gone, "that it is noticed")
        say("holder killed: known to be dead after", f"{time.monotonic() - killed:.1f} s")
        backbone.wait(
            lambda each: each["state"] == "ready" and each["plan"]["holders_min"] >= 2,
            "its experts elsewhere",
        )
        say("  and its experts have two holders again after", f"{time.monotonic() - killed:.1f} s")
        holder.process.wait()
        holder.start()
        self.settle()

    def stop_and_continue(self, seconds: float) -> None:
        """Stop a node that holds experts for a while."""
        holder = next(each for each in self.daemons if (each.status() or {}).get("n_experts_held"))
        holder.kill(signal.SIGSTOP)
        time.sleep(seconds)
        holder.kill(signal.SIGCONT)
        continued = time.monotonic()
        holder.wait_state("ready")
        backbone = wait_for(lambda: serves(self.daemons), "a backbone")
        backbone.wait_state("ready")
        say(f"node stopped for {seconds:g} s: ready again after", f"{time.monotonic() - continued:.1f} s")

    def rest(self, seconds: float) -> None:
        """What a control process costs while nothing is asked of it."""
        backbone = serves(self.daemons)
        before = [(each, usage(each.process.pid)[0]) for each in self.daemons]
        time.sleep(seconds)
        for each, cpu_s in before:
            used_s, resident = usage(each.process.pid)
            role = "backbone" if each is backbone else "member"
            share = f"{100 * (used_s - cpu_s) / seconds:.1f} % of a core, {resident / 1e6:.0f} MB"
            say(f"idle control process, {role} of {len(self.daemons)}", share)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.loopback.swarm_figures")
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--idle", type=float, default=30.0, help="seconds of rest to measure")
    parser.add_argument("--stopped", type=float, default=60.0, help="seconds a node is stopped for")
    parser.add_argument("--only-rest", action="store_true", help="start, and measure what rest costs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvasir-figures-") as directory:
        figures = Figures(Path(directory), arguments.nodes)
        try:
            figures.wait_ready(f"{arguments.nodes} nodes, from the first start: all ready after")
            figures.settle()
            figures.rest(arguments.idle)
            if not arguments.only_rest:
                figures.fail_over()
                figures.lose_a_holder()
                figures.stop_and_continue(arguments.stopped)
        finally:
            for daemon in figures.daemons:
                daemon.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
