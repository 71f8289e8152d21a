"""`python -m tests.audit_figures`: how often the audit accuses honest nodes, and how soon it finds liars.

Rows of real kernels, mixed, are recorded as the referee sees them; histories of nodes are drawn from them and
go through the audit's own core, as many rows of each as are looked at of a million. Then planted faults begin
in nodes that were honest for long, and in new ones, beside an honest node that answers as many rows. It
prints the tables of docs/reference/audit.md.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np

from kvasir_node.kernels.liars import LIES, Lie
from kvasir_proto.audit.core import AuditCore, NoteFindings
from kvasir_proto.audit.finding import Finding
from kvasir_proto.audit.sequential import ERROR_MAX
from kvasir_proto.audit.verdict import Verdict
from kvasir_proto.effects import Now
from kvasir_proto.ids import node_id_of
from kvasir_proto.instants import Instant, WallTime
from tests.audited_rows import CASES, SUBJECT, honest_kernels, liar, record

NOW = Now(Instant(0), WallTime(0))
OTHER = node_id_of(b"\2" * 32)
N_LAYER, N_EXPERT = 24, 64
ROWS_SERVED = 1_000_000
WITHIN = 300
BEFORE = 200_000
"""Rows that a node served honestly before its fault began."""

Pools = dict[str, list[Finding]]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def record_honest(share: float) -> Pools:
    """Findings of honest kernels of each class, by what they are of, with a table of them."""
    pools: Pools = {}
    say("| weights | n_embd, n_ff | kernel | rows | flipped | allowed | foreign | of gate: mean | largest |")
    say("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in CASES:
        for name, make, is_slow in honest_kernels(case):
            n_rows = int(case.n_rows * share / (8 if is_slow else 1))
            if is_slow and case.shape.n_embd > 1000:
                continue
            found = record(case, make, n_rows)
            outcomes = Counter(each.outcome for each in found)
            used = [each.excess for each in found if each.outcome == "same"]
            say(
                f"| {case.weight_type.upper()} | {case.shape.n_embd}, {case.shape.n_ff} | {name} | {n_rows} "
                f"| {outcomes['flipped'] / n_rows:.2%} | {found[0].flip_chance:.2%} | {outcomes['foreign']} "
                f"| {np.mean(used):.3f} | {max(used):.2f} |"
            )
            pools[f"{case.weight_type} {case.shape.n_embd} {name}"] = found
    return pools


def rows_of_experts(draws: random.Random, n_rows: int) -> list[tuple[int, int]]:
    """(layer, expert) of rows as tokens bring them: some experts are used more than others."""
    favourites = [min(N_EXPERT - 1, int(draws.expovariate(1 / 16))) for _ in range(n_rows)]
    return [(draws.randrange(N_LAYER), expert) for expert in favourites]


def drawn(finding: Finding, layer: int, expert: int, number: int) -> Finding:
    """A recorded row as another row of another expert."""
    return Finding(
        finding.node_id,
        layer,
        expert,
        number.to_bytes(8, "big"),
        finding.outcome,
        finding.residual,
        finding.gate,
        finding.slope,
        finding.flip_chance,
    )


def live_honestly(pool: list[Finding], n_rows: int, seed: int) -> tuple[float, list[Verdict]]:
    """The most evidence that came up while so many rows of an honest node were looked at, and verdicts."""
    draws = random.Random(seed)
    core = AuditCore(draws=draws)
    most = 0.0
    for number, (layer, expert) in enumerate(rows_of_experts(draws, n_rows)):
        finding = drawn(draws.choice(pool), layer, expert, number)
        core.command(NoteFindings((finding,)), NOW)
        if finding.outcome != "same":
            standing = core.standing_of(SUBJECT)
            assert standing is not None
            most = max(most, standing.evidence)
    return most, core.drain()


def share_looked_at(n_rows: int, seed: int = 1) -> float:
    """The part of a node's first rows that is looked at, probation included."""
    draws = random.Random(seed)
    core = AuditCore(draws=draws)
    n_audited = 0
    for _ in range(0, n_rows, 512):
        rows = rows_of_experts(draws, 512)
        for layer in range(N_LAYER):
            n_audited += len(core.choose(SUBJECT, layer, [expert for of, expert in rows if of == layer]))
    return n_audited / n_rows


def upper(n: int, total: int, chance: float = 0.025) -> float:
    """The largest rate at which `n` or fewer of `total` come up this often (Clopper and Pearson)."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        logs = [
            math.lgamma(total + 1)
            - math.lgamma(each + 1)
            - math.lgamma(total - each + 1)
            + each * math.log(middle)
            + (total - each) * math.log1p(-middle)
            for each in range(n + 1)
        ]
        low, high = (middle, high) if sum(map(math.exp, logs)) > chance else (low, middle)
    return high


def show_false_accusations(pools: Pools, n_nodes: int, jobs: int, n_rows: int) -> None:
    names = sorted(pools)
    share = share_looked_at(n_rows)
    n_audited = round(n_rows * share)
    began = time.monotonic()
    with ProcessPoolExecutor(jobs) as executor:
        lives = list(
            executor.map(
                live_honestly,
                (pools[names[number % len(names)]] for number in range(n_nodes)),
                [n_audited] * n_nodes,
                range(n_nodes),
                chunksize=20,
            )
        )
    accused = sum(bool(verdicts) for _, verdicts in lives)
    say(
        f"\n{n_nodes} honest nodes of {len(names)} kernels and weights, {n_rows} rows each of which "
        f"{share:.2%} ({n_audited}) are looked at: {accused} accused; rate {accused / n_nodes:.1e}, at most "
        f"{upper(accused, n_nodes):.1e} (95 % interval); {time.monotonic() - began:.0f} s"
    )
    say("\n| evidence reached | of nodes | bound |\n| --- | --- | --- |")
    most = np.array([each for each, _ in lives])
    for level in (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1 / ERROR_MAX):
        say(f"| {level:g} | {(most >= level).mean():.3%} | {min(1.0, 1 / level):.2%} |")


def find(
    lie: Lie, honest: list[Finding], lying: list[Finding], n_before: int, seed: int
) -> tuple[int, Verdict | None, bool]:
    """Rows that a fault touched until its node was accused, the verdict, and whether another was, too."""
    draws = random.Random(f"{lie} {n_before} {seed}")
    core = AuditCore(draws=draws)
    touching = [each for each in lying if each.outcome == "foreign"] if lie == "nan" else lying
    wrong = (draws.randrange(N_LAYER), min(N_EXPERT - 1, int(draws.expovariate(1 / 16))))
    n_touched = number = 0
    is_other_accused = False
    # Rows are recorded one after the other from a random place on: what came before matters to a replay.
    place_in_lies = draws.randrange(len(touching))
    while n_touched < 20 * WITHIN:
        rows = rows_of_experts(draws, 256)
        if lie == "wrong-expert":
            rows[:: max(1, len(rows) // 4)] = [wrong] * 4
        for layer in range(N_LAYER):
            experts = [expert for of, expert in rows if of == layer]
            number += len(experts)
            is_begun = number > n_before
            lies: dict[int, Finding] = {}
            for place, expert in enumerate(experts):
                touched = is_begun and (
                    (layer, expert) == wrong
                    if lie == "wrong-expert"
                    else draws.random() < 0.01
                    if lie == "nan"
                    else True
                )
                if touched:
                    lies[place] = touching[place_in_lies % len(touching)]
                    place_in_lies += 1
            chosen = set(core.choose(SUBJECT, layer, experts))
            if lie == "nan":
                chosen |= lies.keys()  # whatever is not finite is always looked at
            for place in range(len(experts)):
                n_touched += place in lies
                if place not in chosen:
                    continue
                finding = lies.get(place) or draws.choice(honest)
                finding = drawn(finding, layer, experts[place], number * 512 + place)
                core.command(NoteFindings((replace(finding, node_id=SUBJECT),)), NOW)
                accused = [each for each in core.drain() if each.node_id == SUBJECT]
                if accused:
                    return n_touched, accused[0], is_other_accused
            for place in core.choose(OTHER, layer, experts):
                finding = drawn(draws.choice(honest), layer, experts[place], number * 512 + place)
                core.command(NoteFindings((replace(finding, node_id=OTHER),)), NOW)
                is_other_accused |= any(each.node_id == OTHER for each in core.drain())
    return n_touched, None, is_other_accused


def show_detection(honest: list[Finding], n_runs: int, jobs: int) -> None:
    case = CASES[0]
    say(
        "\n| fault | begins | found within 50 | 100 | 200 | 300 rows "
        "| median | most | verdict | other accused |"
    )
    say("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for lie in LIES:
        lying = record(case, liar(lie), 16384 if lie == "nan" else 2048)
        if lie == "wrong-expert":
            lying = [each for each in lying if each.outcome == "foreign"]
        for n_before, when in ((0, "at once"), (BEFORE, f"after {BEFORE} rows")):
            n = n_runs if n_before == 0 else max(1, n_runs // 10)
            with ProcessPoolExecutor(jobs) as executor:
                runs = list(executor.map(partial(find, lie, honest, lying, n_before), range(n), chunksize=10))
            rows = np.array([each for each, _, _ in runs])
            words = Counter(verdict.word if verdict else "none" for _, verdict, _ in runs)
            shares = " | ".join(f"{(rows <= limit).mean():.1%}" for limit in (50, 100, 200, WITHIN))
            say(
                f"| {lie} | {when} | {shares} | {int(np.median(rows))} | {rows.max()} "
                f"| {', '.join(f'{word} {count}' for word, count in sorted(words.items()))} "
                f"| {sum(other for _, _, other in runs)} of {n} |"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=ROWS_SERVED)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0, help="of the rows that are recorded")
    chosen = parser.parse_args()
    recorded = record_honest(chosen.share)
    if chosen.runs:
        show_detection(recorded["q8_0 256 ggml-cpu"], chosen.runs, chosen.jobs)
    show_false_accusations(recorded, chosen.nodes, chosen.jobs, chosen.rows)
