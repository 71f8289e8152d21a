"""`python -m tests.audit_cost`: what the audit takes from a swarm's throughput, end to end.

One backbone engine and one worker engine, as in service: TLS, hook, dispatcher, the audit's thread. The same
backbone is measured with its audit and without, in blocks that follow each other as on, off, off, on, so that
neither the process nor a drift of the machine is on one side. Both ways give the same logits, which is
checked. Rates are told beside processor time, which other work on the machine disturbs less. It prints the
table of docs/reference/audit.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import trio

from kvasir_node.bench.machine import describe_machine
from kvasir_node.bench.test_model import BENCH_SHAPE
from kvasir_node.cli.measured_model import random_model, stored_model
from kvasir_node.local_swarm import LocalSwarm, RunSettings, evaluate_logits, start_local_swarm
from kvasir_node.locations import locate
from kvasir_node.measure.intervals import RESAMPLES, Interval
from kvasir_node.measure.statistics import largest_delta
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.supervisor import Engine
from kvasir_node.telemetry import configure_telemetry
from tests import audited_engine

ORDER: Final = (True, False, False, True)
PROMPT_TOKENS: Final = 512
PROBATION_PROMPTS: Final = 6
PATIENCE_S: Final = 120.0
LOWEST_PRIORITY: Final = 19
COLUMNS: Final = (
    *("model, part", "quads", "tokens", "tokens/s without", "with", "time a token"),
    *("without waits for processors", "processor time", "the audit's thread", "rows looked at"),
)
_REPOSITORY: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class Used:
    """What threads have used so far, in nanoseconds, as the system counts it: those of both engines that work
    on tokens, how long these waited for a processor, and the audit's, which is the only one so modest.
    """

    tokens_ns: int = 0
    waited_ns: int = 0
    audit_ns: int = 0

    def since(self, before: Used) -> Used:
        return Used(
            self.tokens_ns - before.tokens_ns,
            self.waited_ns - before.waited_ns,
            self.audit_ns - before.audit_ns,
        )


def used_by(pids: Sequence[int]) -> Used:
    """Of all threads of these processes."""
    tokens_ns = waited_ns = audit_ns = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            nice = int((task / "stat").read_text().rpartition(")")[2].split()[16])
            on_cpu_ns, waiting_ns, _ = map(int, (task / "schedstat").read_text().split())
            if nice == LOWEST_PRIORITY:
                audit_ns += on_cpu_ns
            else:
                tokens_ns += on_cpu_ns
                waited_ns += waiting_ns
    return Used(tokens_ns, waited_ns, audit_ns)


@dataclass(frozen=True)
class Block:
    """One block of tokens: nanoseconds in all, processor time and waits for one, rows that were looked at."""

    is_audited: bool
    n_tokens: int
    wall_ns: int
    elapsed_ns: int
    used: Used
    n_rows: int

    @property
    def cpu_ns(self) -> int:
        """Of both engines, all threads."""
        return self.used.tokens_ns + self.used.audit_ns

    @property
    def own_ns(self) -> int:
        """Without the time in which a thread could have gone on and others had the processors."""
        return self.elapsed_ns - self.used.waited_ns


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def statistics_of(engine: Engine) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(await engine.statistics_json())
    return values


def rows_judged(statistics: dict[str, Any]) -> int:
    return sum(each["rows"] for each in statistics["audit"]["nodes"])


class Measured:
    """A swarm whose backbone's audit can be switched."""

    def __init__(self, swarm: LocalSwarm, directory: Path) -> None:
        self._swarm = swarm
        self._directory = directory
        draws = np.random.default_rng(5)
        n_vocab = swarm.trunk.n_vocab
        self._prompts = draws.integers(0, n_vocab, (PROBATION_PROMPTS, PROMPT_TOKENS)).tolist()
        self._text = tuple(draws.integers(0, n_vocab, PROMPT_TOKENS).tolist())

    async def pass_probation(self) -> None:
        """Until every expert's first rows have been counted and the node's first rows looked at."""
        backbone = self._swarm.backbone
        for prompt in self._prompts:
            await evaluate_logits(backbone, tuple(prompt), (len(prompt),), self._path("probation"))
        deadline = time.monotonic() + PATIENCE_S
        while True:
            audit = (await statistics_of(backbone))["audit"]
            if all(each["rows"] >= 64 for each in audit["nodes"]) and audit["nodes"]:
                return
            assert time.monotonic() < deadline, audit
            await trio.sleep(0.5)

    async def block(self, chunks: tuple[int, ...], *, is_audited: bool) -> Block:
        """The same tokens in these chunks, with the audit or without."""
        backbone = self._swarm.backbone
        os.kill(backbone.pid, audited_engine.ON if is_audited else audited_engine.OFF)
        await statistics_of(backbone)  # by now it has heard the signal
        pids = [each.pid for each in (backbone, *self._swarm.workers)]
        n_rows = rows_judged(await statistics_of(backbone))
        path = self._path("on" if is_audited else "off")
        began, before = time.monotonic_ns(), used_by(pids)
        evaluated = await evaluate_logits(backbone, self._text[: sum(chunks)], chunks, path)
        used, elapsed_ns = used_by(pids).since(before), time.monotonic_ns() - began
        n_rows = rows_judged(await statistics_of(backbone)) - n_rows
        return Block(is_audited, sum(chunks), sum(evaluated.chunk_ns), elapsed_ns, used, n_rows)

    def delta(self) -> float:
        """The largest difference of a logit between the last blocks of both kinds."""
        return largest_delta(self._path("on"), self._path("off"))

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.npy"


def loss_of(quads: Sequence[Sequence[Block]], cost: str) -> tuple[float, Interval]:
    """What auditing adds to a cost of a token, as a share of it: the median over quads, and its interval.

    The median, since other work on the machine makes some quads say anything.
    """
    logs = []
    for quad in quads:
        sides = [
            np.mean([getattr(each, cost) for each in quad if each.is_audited == side])
            for side in (True, False)
        ]
        logs.append(math.log(sides[0] / sides[1]))
    values = np.array(logs)
    again = np.random.default_rng(1).choice(values, (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(again, axis=1), (0.025, 0.975))
    return math.expm1(float(np.median(values))), Interval(math.expm1(float(low)), math.expm1(float(high)))


def tell(name: str, quads: Sequence[Sequence[Block]]) -> None:
    blocks = [each for quad in quads for each in quad]
    on = [each for each in blocks if each.is_audited]
    off = [each for each in blocks if not each.is_audited]
    n_tokens = sum(each.n_tokens for each in on)
    cells = [name, str(len(quads)), f"{n_tokens}"]
    cells += [f"{n_tokens / sum(each.wall_ns for each in side) * 1e9:.1f}" for side in (off, on)]
    for cost in ("wall_ns", "own_ns", "cpu_ns"):
        if any(getattr(each, cost) <= 0 for each in blocks):
            cells.append("-")  # several threads waited at once, for longer than it took
            continue
        loss, interval = loss_of(quads, cost)
        cells.append(f"{loss:+.2%} ({interval.low:+.2%} to {interval.high:+.2%})")
    tokens_ns = sum(each.used.tokens_ns for each in on)
    cells.append(f"{sum(each.used.audit_ns for each in on) / tokens_ns:.2%}")
    cells.append(f"{sum(each.n_rows for each in on)}")
    say("| " + " | ".join(cells) + " |")


async def measure(model: StoredModel, directory: Path, options: argparse.Namespace) -> None:
    parts = {
        "decode": (1,) * options.tokens,
        "prompt": (PROMPT_TOKENS,) * 1,
    }
    async with open_unwrapping_nursery() as nursery:
        settings = RunSettings(n_ctx=max(PROMPT_TOKENS, options.tokens), n_ubatch=PROMPT_TOKENS, audit=True)
        swarm = await start_local_swarm(
            nursery, model, settings, directory, n_workers=options.workers, holders=1
        )
        measured = Measured(swarm, directory)
        await measured.pass_probation()
        for part, chunks in parts.items():
            for side in (True, False):
                await measured.block(chunks, is_audited=side)
            quads: list[list[Block]] = []
            ends = time.monotonic() + options.minutes * 60 / len(parts)
            while time.monotonic() < ends or len(quads) < 3:
                order = ORDER if len(quads) % 2 == 0 else tuple(not each for each in ORDER)
                quads.append([await measured.block(chunks, is_audited=each) for each in order])
                assert measured.delta() == 0.0
            tell(f"{options.name}, {part}", quads)
        os.kill(swarm.backbone.pid, audited_engine.ON)  # it ends with all of it
        for each in (swarm.backbone, *swarm.workers):
            await each.close()


def start_switched_engines() -> None:
    """Have every engine from now on be one whose audit can be switched."""
    start = trio.lowlevel.open_process

    async def open_process(command: list[str], **options: Any) -> Any:
        command = [audited_engine.__name__ if each == "kvasir_node.engine" else each for each in command]
        options["env"] = {**options["env"], "PYTHONPATH": str(_REPOSITORY)}
        return await start(command, **options)

    vars(trio.lowlevel)["open_process"] = open_process


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.audit_cost", description=__doc__)
    parser.add_argument("--model", help="a GGUF file; default: the benchmark's random model")
    parser.add_argument("--name", default="random, 12 layers, n_embd 1024, n_ff 512")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=128, help="decoded in a block, 512 at most")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    locations = locate(None, os.environ)
    model = (
        stored_model(locations, options.model)
        if options.model
        else random_model(locations, BENCH_SHAPE, "bench")
    )
    start_switched_engines()
    configure_telemetry("warning", "console", os.environ)
    say(f"{json.dumps(describe_machine())}\n")
    say("| " + " | ".join(COLUMNS) + " |")
    say("| --- " * len(COLUMNS) + "|")
    with tempfile.TemporaryDirectory() as directory:
        trio.run(measure, model, Path(directory), options)


if __name__ == "__main__":
    main()
