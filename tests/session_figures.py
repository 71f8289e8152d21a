"""How many tokens a second several sessions get together: `python -m tests.session_figures MODEL [--json]`.

A backbone engine and two workers on this machine, as `bench` has them; sessions are opened at once and decode
together. For each number of them, in turn and several times: tokens a second of all, the time between two
tokens of a session (p95), the longest wait for a first token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import secrets
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import trio

from kvasir_node.local_swarm import RunSettings, start_local_swarm
from kvasir_node.locations import locate
from kvasir_node.model.store import ModelStore, StoredModel
from kvasir_node.ports import EnginePort
from kvasir_proto.ids import SessionId
from kvasir_proto.messages.engine import Generate, SessionEnded, TokenEmitted
from kvasir_proto.sampling import Sampling, SamplingOptions

N_PROMPT, N_TOKENS, N_ROUNDS = 16, 48, 3
COUNTS = (1, 2, 4, 8)
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Cell:
    """One round of so many sessions; `load` is the machine's over the last minute."""

    sessions: int
    tokens_per_second: float
    itl_p95_ms: float
    ttft_max_ms: float
    load: float


async def run_together(engine: EnginePort, count: int, n_tokens: int) -> Cell:
    """Open so many sessions at once, each with a prompt of its own, and wait for all."""
    names = [SessionId(secrets.token_bytes(16)) for _ in range(count)]
    came: dict[SessionId, list[float]] = {each: [] for each in names}
    running = set(names)
    began = time.monotonic()
    for index, name in enumerate(names):
        prompt = tuple((37 * index + 11 * position) % 900 + 1 for position in range(N_PROMPT))
        greedy = SamplingOptions(Sampling(temperature=0.0))
        await engine.send(Generate(name, None, prompt, n_tokens, greedy, TIMEOUT_S * 1000))
    while running:
        match await engine.events.receive():
            case TokenEmitted(session) if session in came:
                came[session].append(time.monotonic())
            case SessionEnded(session) as ended if session in running:
                assert ended.reason in ("length", "end_of_text"), ended
                running.remove(session)
            case _:
                pass
    elapsed_s = time.monotonic() - began
    gaps = sorted(later - one for times in came.values() for one, later in itertools.pairwise(times))
    return Cell(
        sessions=count,
        tokens_per_second=sum(map(len, came.values())) / elapsed_s,
        itl_p95_ms=1e3 * gaps[len(gaps) * 95 // 100],
        ttft_max_ms=1e3 * max(times[0] - began for times in came.values()),
        load=os.getloadavg()[0],
    )


async def measure(model: StoredModel) -> list[Cell]:
    """All cells, round by round."""
    settings = RunSettings(n_ctx=2048, n_ubatch=256, sessions=max(COUNTS))
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as directory:
        async with trio.open_nursery() as nursery:
            swarm = await start_local_swarm(nursery, model, settings, Path(directory), n_workers=2, holders=1)
            with trio.fail_after(TIMEOUT_S):
                await run_together(swarm.backbone, 1, 8)
                for _ in range(N_ROUNDS):
                    cells += [await run_together(swarm.backbone, each, N_TOKENS) for each in COUNTS]
            nursery.cancel_scope.cancel()
    return cells


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = ModelStore(locate(None, os.environ).cache / "models").add(arguments.model)
    cells = trio.run(measure, model)
    if arguments.json:
        print(json.dumps([asdict(each) for each in cells], indent=1))  # noqa: T201 - what it is for
        return
    for each in cells:
        print(  # noqa: T201 - as above
            f"{each.sessions} sessions: {each.tokens_per_second:.1f} tokens/s, p95 between tokens "
            f"{each.itl_p95_ms:.1f} ms, first token after {each.ttft_max_ms:.0f} ms at most, "
            f"load {each.load:.1f}"
        )


if __name__ == "__main__":
    main()
