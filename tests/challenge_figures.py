"""`python -m tests.challenge_figures`: how long an auditor's challenge takes by the clock, in wide shapes.

Two real worker engines: one holds a shard, the other challenges it over TLS, as in a swarm. Told are the time
from the request to its answer, how much of that a thread could have gone on in and others had the processors,
and what each engine's processors did. It prints the table of docs/reference/equivalence.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import trio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvasir_node.bench.machine import describe_machine
from kvasir_node.bench.test_model import LAYER_SHAPE, TestModelShape
from kvasir_node.cli.measured_model import random_model, stored_model
from kvasir_node.engine.lease import boottime_ns
from kvasir_node.locations import locate
from kvasir_node.model.store import StoredModel
from kvasir_node.nurseries import open_unwrapping_nursery
from kvasir_node.supervisor import LOAD_TIMEOUT_S, Engine, start_engine
from kvasir_node.telemetry import configure_telemetry
from kvasir_proto.ids import SwarmDigest, node_id_of
from kvasir_proto.manifest import ShardSet
from kvasir_proto.messages.engine import (
    ChallengeHolder,
    DiallerExpected,
    ExpectDialler,
    HolderChallenged,
    Listen,
    Listening,
    LoadShard,
    SetFence,
    ShardLoaded,
)
from kvasir_proto.term_proof import (
    FOUNDING_EPOCH,
    FOUNDING_TERM,
    ProvenTerm,
    cast_vote,
    founding_electorate,
    make_term_proof,
)
from tests.audit_cost import used_by

HOST = "127.0.0.1"
PATIENCE_S = 120.0
N_HELD = 4
COLUMNS = (
    *("model", "challenges", "each", "first", "median", "longest", "median without waits", "longest"),
    *("the member's processor", "the auditor's"),
)
WIDE_Q8_0 = TestModelShape(
    n_layer=1, n_embd=3072, n_ff=1024, n_expert=32, n_head=8, n_head_kv=2, n_vocab=256, seed=2
)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def cpu_s(engine: Engine) -> float:
    return float(json.loads(await engine.statistics_json())["cpu_ns"]) / 1e9


async def measure(name: str, model: StoredModel, n_times: int, directory: Path) -> None:
    key = Ed25519PrivateKey.generate()
    digest = SwarmDigest(bytes(32))
    node_id = node_id_of(key.public_key().public_bytes_raw())
    term = ProvenTerm(FOUNDING_EPOCH, FOUNDING_TERM, node_id)
    electorate = founding_electorate(key.public_key().public_bytes_raw())
    proof = make_term_proof(electorate, term, [cast_vote(key, digest, electorate, term)])
    layer = model.manifest.moe_layers[0]
    shard = ShardSet.from_ranges([(layer, 0, N_HELD)])
    walls: list[float] = []
    owns: list[float] = []
    async with open_unwrapping_nursery() as nursery:
        member, auditor = [
            await start_engine(
                nursery, "worker", node_key=key, swarm_digest=digest, generation=1, directory=directory
            )
            for _ in range(2)
        ]
        await member.send(SetFence(FOUNDING_EPOCH, FOUNDING_TERM))
        paths = str(model.manifest_path), str(model.source_path)
        load = LoadShard(member.next_request(), *paths, shard.encode(), 1, "ggml-cpu")
        await member.exchange(load, ShardLoaded, LOAD_TIMEOUT_S)
        listening = await member.exchange(Listen(HOST, 0), Listening, PATIENCE_S)
        pids = [each.pid for each in (member, auditor)]
        used = [-await cpu_s(each) for each in (member, auditor)]
        for number in range(n_times):
            token = os.urandom(16)
            expect = ExpectDialler(
                token, auditor.certificate, "worker", node_id, boottime_ns() + 10_000_000_000
            )
            await member.exchange(expect, DiallerExpected, PATIENCE_S)
            request = ChallengeHolder(
                auditor.next_request(),
                node_id,
                HOST,
                listening.port,
                token,
                member.certificate,
                FOUNDING_EPOCH,
                FOUNDING_TERM,
                proof,
                *paths,
                shard.encode(),
                "",
                number,
            )
            began, before = time.monotonic(), used_by(pids)
            answer = await auditor.exchange(request, HolderChallenged, PATIENCE_S)
            walls.append(time.monotonic() - began)
            owns.append(walls[-1] - used_by(pids).since(before).waited_ns / 1e9)
            assert answer.outcome == "verified", answer.reason
        used = [now + await cpu_s(each) for now, each in zip(used, (member, auditor), strict=True)]
        for each in (member, auditor):
            await each.close()
    cells = [f"{n_times}", answer.reason, f"{walls[0]:.2f} s"]
    cells += [f"{statistics.median(walls):.2f} s", f"{max(walls):.2f} s"]
    cells += [f"{statistics.median(owns):.2f} s", f"{max(owns):.2f} s"]
    cells += [f"{each / n_times * 1e3:.0f} ms" for each in used]
    say(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.challenge_figures", description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--model", help="a GGUF file; default: random ones, 3072 and 1024 wide")
    options = parser.parse_args()
    locations = locate(None, os.environ)
    configure_telemetry("warning", "console", os.environ)
    say(f"{json.dumps(describe_machine())}\n")
    say("| " + " | ".join(COLUMNS) + " |")
    say("| --- " * len(COLUMNS) + "|")
    models = (
        {options.model: stored_model(locations, options.model)}
        if options.model
        else {
            "Q4_K, 3072, 1024": random_model(locations, LAYER_SHAPE, "layer"),
            "Q8_0, 3072, 1024": random_model(locations, WIDE_Q8_0, "wide"),
        }
    )
    with tempfile.TemporaryDirectory() as directory:
        for name, model in models.items():
            trio.run(measure, name, model, options.times, Path(directory))


if __name__ == "__main__":
    main()
