"""Figures of swarms of real daemons, issue 4's bars: `python -m tests.loopback.swarm_figures`.

Daemons on this machine's loopback interface with the demo model, all of one class and any of which may be
backbone: how fast they start, fail over and rest, and what members cost that are slow or die. A line for each
figure goes to standard error as it comes, all of them to standard output at the end, as one JSON object.
Nothing else should run meanwhile. It ends by itself, in some ten minutes; `--only` names parts of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeAlias

import trio

from kvasir_node.control import connect_daemon
from kvasir_proto.errors import KvasirError
from kvasir_proto.messages.local import GenerateEnd, GenerateRequest, Refusal
from kvasir_proto.sampling import Sampling
from tests.loopback.daemons import PATIENCE_S, Daemon, kvasir, wait_for
from tests.loopback.test_last_f32_worker import LastWorkers

SAMPLING = Sampling(seed=5, temperature=0.8, top_k=0, top_p=0.95, min_p=0.0)
SETTLE_S: Final = 5.0
SLOW_START_S: Final = 300.0
"""A daemon and its engines take some six seconds of a processor to start; this one has a tenth of it."""
RATE_SESSIONS: Final = 7
RATE_TOKENS: Final = 120
_GROUPS: Final = Path("/sys/fs/cgroup")
_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


Figure: TypeAlias = float | int | str | list[float] | None


class Figures:
    """What was measured, by name, said as it comes."""

    def __init__(self) -> None:
        self.values: dict[str, Figure] = {}

    def note(self, name: str, value: Figure) -> None:
        """One figure; its name says of what and in which unit."""
        if isinstance(value, float):
            value = round(value, 3)
        self.values[name] = value
        sys.stderr.write(f"{name:<58} {value}\n")
        sys.stderr.flush()


async def _generate(daemon: Daemon, n_tokens: int) -> float | None:
    """Tokens a second of a session; None where it was refused or failed."""
    try:
        async with connect_daemon(daemon.locations) as connection:
            await connection.send(GenerateRequest("In the beginning", (), n_tokens, SAMPLING))
            while True:
                reply = await connection.receive()
                if isinstance(reply, GenerateEnd):
                    rate: float = json.loads(reply.statistics)["tokens_per_second"]
                    return None if reply.reason == "failed" else rate
                if isinstance(reply, Refusal):
                    return None
    except KvasirError:
        return None


def serves(daemons: list[Daemon]) -> Daemon | None:
    """The daemon that is backbone, holds its lease and is ready."""
    for daemon in daemons:
        document = daemon.status() or {}
        if document.get("lease_s") is not None and document["state"] in ("ready", "degraded"):
            return daemon
    return None


def usage(pid: int) -> tuple[float, int]:
    """Seconds of CPU that a process has used, and the bytes it has in memory."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    return (int(fields[11]) + int(fields[12])) / _TICK, resident


class ProcessorLimit:
    """A control group whose processes together get this share of one processor. Made by root, on Linux."""

    PERIOD_US = 10_000

    def __init__(self, share: float) -> None:
        """Raises `OSError` where no such group can be made."""
        quota_us = round(share * self.PERIOD_US)
        second = _GROUPS / "cgroup.controllers"
        self._path = (_GROUPS if second.exists() else _GROUPS / "cpu") / f"kvasir-figures-{os.getpid()}"
        self._path.mkdir()
        try:
            if second.exists():
                (self._path / "cpu.max").write_text(f"{quota_us} {self.PERIOD_US}")
            else:
                (self._path / "cpu.cfs_period_us").write_text(str(self.PERIOD_US))
                (self._path / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError:
            self._path.rmdir()
            raise

    def take_in(self, pid: int) -> None:
        """Limit this process, and all that it starts from now on."""
        (self._path / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the group, once its processes have ended."""

        def is_removed() -> bool:
            try:
                self._path.rmdir()
            except OSError:
                return False
            return True

        wait_for(is_removed, "the end of the group's processes")


class FiguresOfSwarm:
    """Daemons in one directory, and what is measured of them."""

    def __init__(self, figures: Figures, directory: Path, nodes: int) -> None:
        self.figures = figures
        self.directory = directory
        self.nodes = nodes
        homes = [self._prepare(number) for number in range(nodes)]
        started = time.monotonic()
        self.daemons = [Daemon(homes[0])]
        self.daemons[0].start()
        found = self.daemons[0].wait(lambda each: each["addresses"], "an address")
        self.address: str = found["addresses"][0]
        for home in homes[1:]:
            self.daemons.append(Daemon(home, "--bootstrap", self.address))
            self.daemons[-1].start()
        for daemon in self.daemons:
            daemon.wait_state("ready")
        figures.note(f"{nodes}_nodes.start_to_ready_s", time.monotonic() - started)

    def _prepare(self, number: int) -> Path:
        home = self.directory / f"n{number}"
        arguments = ("init", "--found") if number == 0 else ("init",)
        command = kvasir("--home", str(home), *arguments)
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
        return home

    def end(self) -> None:
        """Nothing of it is left."""
        for daemon in self.daemons:
            daemon.end()

    def backbone(self) -> Daemon:
        """The daemon that serves, once there is one."""
        found: Daemon = wait_for(lambda: serves(self.daemons), "a backbone that serves")
        return found

    def settle(self) -> None:
        """There are electors enough to lose one, and the plan is over its transitions."""
        for daemon in self.daemons:
            daemon.wait(
                lambda each: each["state"] == "ready" and len(each["electorate"]["members"]) >= 3, "settled"
            )
        time.sleep(SETTLE_S)

    def fail_over(self) -> None:
        """Kill the backbone while it generates."""
        backbone = self.backbone()

        async def kill_under_load() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_generate, backbone, 2000)
                await trio.sleep(2)
                backbone.kill(signal.SIGKILL)

        trio.run(kill_under_load)
        killed = time.monotonic()
        others = [each for each in self.daemons if each is not backbone]
        following = wait_for(lambda: serves(others), "another backbone")
        self.figures.note("backbone_killed.another_holds_the_lease_s", time.monotonic() - killed)
        while trio.run(_generate, following, 1) is None:
            time.sleep(0.05)
        self.figures.note("backbone_killed.another_has_answered_s", time.monotonic() - killed)
        backbone.process.wait()
        backbone.start()
        self.settle()

    def lose_a_holder(self) -> None:
        """Kill a node that holds experts."""
        backbone, holder = self.backbone(), self._holder()
        node_id = (holder.status() or {})["node_id"]
        holder.kill(signal.SIGKILL)
        killed = time.monotonic()
        backbone.wait(lambda document: _member(document, node_id)["state"] == "dead", "that it is noticed")
        self.figures.note("holder_killed.excluded_s", time.monotonic() - killed)
        backbone.wait(
            lambda each: each["state"] == "ready" and each["plan"]["holders_min"] >= 2,
            "its experts elsewhere",
        )
        self.figures.note("holder_killed.two_holders_again_s", time.monotonic() - killed)
        holder.process.wait()
        holder.start()
        self.settle()

    def stop_and_continue(self, seconds: float) -> None:
        """Stop a node that holds experts for a while: its control process and its engines."""
        holder = self._holder()
        node_id = (holder.status() or {})["node_id"]
        os.killpg(holder.process.pid, signal.SIGSTOP)
        time.sleep(seconds)
        state = _member(self.backbone().status() or {}, node_id)["state"]
        self.figures.note("node_stopped.for_s", seconds)
        self.figures.note("node_stopped.state_meanwhile", state)
        os.killpg(holder.process.pid, signal.SIGCONT)
        continued = time.monotonic()

        def is_back(document: dict[str, Any]) -> bool:
            is_alive: bool = _member(document, node_id)["state"] == "alive"
            return is_alive and document["state"] == "ready"

        self.backbone().wait(is_back, "that it is a member again")
        holder.wait_state("ready")
        self.figures.note("node_stopped.ready_again_s", time.monotonic() - continued)
        holder.wait(lambda each: each["n_experts_held"], "that it is given experts again")
        self.figures.note("node_stopped.holds_experts_again_s", time.monotonic() - continued)
        self.settle()

    def _holder(self) -> Daemon:
        backbone = self.backbone()
        return next(
            each
            for each in self.daemons
            if each is not backbone and (each.status() or {}).get("n_experts_held")
        )

    def rest(self, seconds: float) -> None:
        """What a control process costs while nothing is asked of it."""
        backbone = self.backbone()
        before = [(each, usage(each.process.pid)[0]) for each in self.daemons]
        time.sleep(seconds)
        used = [(each, usage(each.process.pid), cpu_s) for each, cpu_s in before]
        shares = {each: 100 * (now_s - cpu_s) / seconds for each, (now_s, _), cpu_s in used}
        members = sorted(share for each, share in shares.items() if each is not backbone)
        name = f"{self.nodes}_nodes.idle_control_process"
        self.figures.note(f"{name}.member_percent_of_a_core_median", statistics.median(members))
        self.figures.note(f"{name}.member_percent_of_a_core_max", members[-1])
        self.figures.note(f"{name}.backbone_percent_of_a_core", shares[backbone])
        self.figures.note(f"{name}.memory_mb_max", max(resident for _, (_, resident), _ in used) / 1e6)

    def slow_member(self, share: float, rounds: int) -> None:
        """Tokens a second with and without one member more, which is much slower, in turns."""
        limit = ProcessorLimit(share)
        slow = Daemon(self._prepare(self.nodes), "--bootstrap", self.address)
        without: list[float] = []
        """One median before each coming of the slow member, and one at the end."""
        with_it: list[float] = []
        try:
            for _ in range(rounds):
                without.append(self._rate())
                slow.start()
                limit.take_in(slow.process.pid)
                document = slow.wait(
                    lambda each: each["state"] == "ready" and each.get("expert_row_ns", 1),
                    "the slow member",
                    SLOW_START_S,
                )
                time.sleep(2 * SETTLE_S)
                with_it.append(self._rate())
                self._note_slow(document["node_id"])
                self.figures.note("slow_member.tokens_per_second_without", list(without))
                self.figures.note("slow_member.tokens_per_second_with", list(with_it))
                slow.kill(signal.SIGTERM)
                slow.wait_ended()
                self.settle()
            without.append(self._rate())
        finally:
            slow.end()
            limit.close()
        around = [statistics.mean(pair) for pair in pairwise(without)]
        ratios = [each / beside for each, beside in zip(with_it, around, strict=True)]
        self.figures.note("slow_member.tokens_per_second_without", without)
        self.figures.note("slow_member.ratios", [round(each, 3) for each in ratios])
        self.figures.note("slow_member.ratio_median", statistics.median(ratios))

    def _rate(self) -> float:
        """Tokens a second, the median of some sessions; the first one warms up."""
        backbone = self.backbone()
        rates = [trio.run(_generate, backbone, RATE_TOKENS) for _ in range(RATE_SESSIONS + 1)]
        return round(statistics.median(each for each in rates[1:] if each is not None), 2)

    def _note_slow(self, node_id: str) -> None:
        document = self.backbone().status() or {}
        slow = _member(document, node_id)
        times = [each.get("expert_row_ns") for each in document["members"] if each["node_id"] != node_id]
        known = sorted(each for each in times if each)
        self.figures.note("slow_member.expert_row_ns", slow.get("expert_row_ns"))
        self.figures.note(
            "slow_member.expert_row_ns_of_others_median", statistics.median(known) if known else None
        )
        self.figures.note("slow_member.experts_planned", slow["shards"])
        self.figures.note("slow_member.experts_planned_in_all", sum(m["shards"] for m in document["members"]))


def _member(document: dict[str, Any], node_id: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        (each for each in document.get("members", ()) if each["node_id"] == node_id),
        {"state": "unknown", "shards": 0},
    )
    return found


def lose_f32_workers(figures: Figures, directory: Path) -> None:
    """Kill every worker that adds in F32 while it is needed; see `test_last_f32_worker`."""
    swarm = LastWorkers(directory, 3)
    try:
        uninterrupted = swarm.text()
        texts: list[list[int] | None] = []
        for n_left in (2, 1, 0):
            killed = time.monotonic()
            texts.append(swarm.text_while_killing(swarm.workers.pop()))
            swarm.wait_serving(n_left, "ready" if n_left else "degraded")
            name = f"f32_workers_killed.{n_left}_left.everything_served_again_s"
            figures.note(name, time.monotonic() - killed)
        texts.append(swarm.text())
        kinds = [
            "failed" if each is None else "right" if each == uninterrupted else "wrong" for each in texts
        ]
        figures.note("f32_workers_killed.texts", " ".join(kinds))
    finally:
        swarm.end()


PARTS: Final = ("rest", "failover", "holder", "stop", "slow", "f32", "ten")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.loopback.swarm_figures")
    parser.add_argument("--nodes", type=int, default=6)
    parser.add_argument("--idle", type=float, default=60.0, help="seconds of rest to measure")
    parser.add_argument("--stopped", type=float, default=60.0, help="seconds a node is stopped for")
    parser.add_argument("--rounds", type=int, default=4, help="times the slow member comes and goes")
    parser.add_argument("--share", type=float, default=0.1, help="of a processor, for the slow member")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    arguments = parser.parse_args()
    parts = arguments.only
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the daemons end with us
    figures = Figures()
    figures.note("processors", os.cpu_count())
    figures.note("load_average_before", round(os.getloadavg()[0], 2))
    with tempfile.TemporaryDirectory(prefix="kvasir-figures-") as directory:
        if set(parts) - {"f32", "ten"}:
            _measure_swarm(figures, Path(directory, "six"), parts, arguments)
        if "f32" in parts:
            lose_f32_workers(figures, _made(Path(directory, "f32")))
        if "ten" in parts:
            swarm = FiguresOfSwarm(figures, _made(Path(directory, "ten")), 10)
            try:
                swarm.settle()
                swarm.rest(arguments.idle)
            finally:
                swarm.end()
    json.dump({"schema_version": 1, **figures.values}, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


def _measure_swarm(
    figures: Figures, directory: Path, parts: Collection[str], arguments: argparse.Namespace
) -> None:
    swarm = FiguresOfSwarm(figures, _made(directory), arguments.nodes)
    try:
        swarm.settle()
        if "rest" in parts:
            swarm.rest(arguments.idle)
        if "failover" in parts:
            swarm.fail_over()
        if "holder" in parts:
            swarm.lose_a_holder()
        if "stop" in parts:
            swarm.stop_and_continue(arguments.stopped)
        if "slow" in parts:
            try:
                swarm.slow_member(arguments.share, arguments.rounds)
            except OSError as error:
                figures.note("slow_member.not_measured", f"no processor can be limited here: {error}")
    finally:
        swarm.end()


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


if __name__ == "__main__":
    sys.exit(main())
