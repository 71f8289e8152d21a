"""`sim`: a whole swarm in one process, on made-up time, with made-up faults."""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO

import click

from kvasir_node.cli.output import json_option, note, print_json, print_table
from kvasir_node.cli.session import CommandSession
from kvasir_proto.errors import UsageError

_SEEDS: Final = re.compile(r"(\d{1,12})\.\.(\d{1,12})", re.ASCII)
_NODES_MAX: Final = 5000
_SECONDS_MAX: Final = 7 * 24 * 3600


@click.command()
@click.option(
    "--nodes", type=click.IntRange(2, _NODES_MAX), default=50, show_default=True, help="Nodes to start with."
)
@click.option(
    "--seconds",
    "duration_s",
    type=click.IntRange(1, _SECONDS_MAX),
    default=60,
    show_default=True,
    help="Simulated seconds before the swarm is healed.",
)
@click.option("--seed", type=click.IntRange(0, 1 << 62), help="The run's seed. Default: 1.")
@click.option("--seeds", help="Many runs, A..B, instead of one.")
@click.option("--faults", default="all", show_default=True, help="all, none, or names with commas.")
@click.option(
    "--lying-electors",
    type=click.IntRange(0, 7),
    default=0,
    help="So many electors vote twice. Beyond what an electorate tolerates, liars must be named.",
)
@click.option(
    "--results",
    type=click.Path(path_type=Path),
    help="With --seeds: a line for each run. Those that are there are not run again.",
)
@click.option("--jobs", type=click.IntRange(1, 256), default=1, help="With --seeds: runs at a time.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write every event of the run to this file.")
@json_option
@click.pass_obj
def sim(
    session: CommandSession,
    nodes: int,
    duration_s: int,
    seed: int | None,
    seeds: str | None,
    faults: str,
    lying_electors: int,
    results: Path | None,
    jobs: int,
    trace: Path | None,
    as_json: bool,
) -> int:
    """Run a whole swarm on an event queue, break it in every way, and check what must hold.

    The nodes are the daemon's own; network, disks and clocks are made up, and depend on the seed only.
    Faults: loss, duplicate, reorder, corrupt, partition, clog, crash, pause, skew, churn, disk, byzantine.
    After --seconds all faults end and the swarm has 30 simulated seconds to be one again. Exit status 1 when
    something happened that must not, or it did not become one.
    """
    session.configure()
    from kvasir_node.sim.faults import fault_names
    from kvasir_node.sim.simulation import SimulationOptions

    chosen = fault_names(faults)
    if seeds is None:
        if results is not None or jobs != 1:
            raise UsageError("--results and --jobs go with --seeds A..B")
        options = SimulationOptions(nodes, duration_s, 1 if seed is None else seed, chosen, lying_electors)
        with _opened(trace) as file:
            document = _run(options, faults, file)
        if as_json:
            print_json(document)
        else:
            _print_report(document)
        return _status(document)
    if seed is not None or trace is not None:
        raise UsageError("--seed and --trace are for one run, --seeds for many")
    first, last = _seed_range(seeds)
    every = [
        SimulationOptions(nodes, duration_s, number, chosen, lying_electors)
        for number in range(first, last + 1)
    ]
    summary = _run_many(every, faults, results, jobs)
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary)
    return 0 if not summary["failed"] else 1


def _seed_range(text: str) -> tuple[int, int]:
    found = _SEEDS.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise UsageError(f"--seeds takes two numbers, the lower one first, as in 1..200, and not {text!r}")
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def _opened(trace: Path | None) -> Iterator[TextIO | None]:
    if trace is None:
        yield None
        return
    with trace.open("w", encoding="utf-8") as file:
        yield file


def _run(options: Any, faults: str, trace: TextIO | None = None) -> dict[str, Any]:
    """One run's document."""
    from kvasir_node.sim.node_cores import NodeCoreKit
    from kvasir_node.sim.report import document_of
    from kvasir_node.sim.simulation import Simulation

    began = time.perf_counter()
    outcome = Simulation(options, NodeCoreKit(options), trace).run()
    return document_of(options, faults, outcome, time.perf_counter() - began)


def _run_task(task: tuple[Any, str]) -> dict[str, Any]:
    return _run(*task)


def _run_many(every: list[Any], faults: str, results: Path | None, jobs: int) -> dict[str, Any]:
    """Run those that the results file does not have yet, in order; all of them, summed up."""
    from kvasir_node.sim.results import ResultsFile

    kept = None if results is None else ResultsFile(results, every[0], faults)
    done = {} if kept is None else kept.done
    documents = [done[options.seed] for options in every if options.seed in done]
    tasks = [(options, faults) for options in every if options.seed not in done]
    if documents:
        note(f"{len(documents)} of {len(every)} runs are in {results} already")
    with contextlib.ExitStack() as stack:
        file = None if kept is None else stack.enter_context(kept.open())
        if jobs == 1:
            finished: Iterator[dict[str, Any]] = map(_run_task, tasks)
        else:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(jobs))
            finished = pool.imap(_run_task, tasks)
        for number, document in enumerate(finished, 1):
            documents.append(document)
            if kept is not None and file is not None:
                kept.write(file, document)
            if _status(document):
                note(f"seed {document['seed']} failed: {_what_failed(document)}\n  {document['replay']}")
            elif number % 20 == 0:
                note(f"{number} of {len(tasks)} runs")
    return _summary(documents)


def _summary(documents: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [document for document in documents if _status(document)]
    times = sorted(each["convergence_s"] for each in documents if each["convergence_s"] is not None)
    return {
        "schema_version": 1,
        "runs": len(documents),
        "failed": [
            {"seed": each["seed"], "what": _what_failed(each), "replay": each["replay"]} for each in failed
        ],
        "safety_violations": sum(len(each["safety_violations"]) for each in documents),
        "converged": sum(each["converged"] for each in documents),
        "convergence_median_s": times[len(times) // 2] if times else None,
        "convergence_max_s": times[-1] if times else None,
        "messages": sum(each["messages"] for each in documents),
        "wall_s": round(sum(each["wall_s"] for each in documents), 1),
    }


def _status(document: dict[str, Any]) -> int:
    if document["beyond_bound"]:
        return 0 if document["detections"] else 1
    return 0 if document["converged"] and not document["safety_violations"] else 1


def _what_failed(document: dict[str, Any]) -> str:
    if document["beyond_bound"]:
        return "more electors lied than an electorate tolerates, and nobody was named"
    if document["safety_violations"]:
        first = document["safety_violations"][0]
        return f"{first['checker']} at {first['at_s']:.3f} s, node {first['node']}: {first['evidence']}"
    return f"not one swarm {document['heal_limit_s']:g} s after healing: {document['lacking']}"


def _print_report(document: dict[str, Any]) -> None:
    converged = document["convergence_s"]
    rows = [
        ("begins", document["begins"]),
        ("violations", len(document["safety_violations"])),
        ("one swarm again", f"after {converged:.2f} s" if converged is not None else document["lacking"]),
        ("backbones a term, at most", document["backbones_per_term_max"]),
        ("messages a node and second", document["messages_per_node_per_s"]),
        ("bytes a node and second", document["bytes_per_node_per_s"]),
        ("mesh", document["mesh"]["model"]),
        ("wall time", f"{document['wall_s']} s"),
        ("again", document["replay"]),
    ]
    for violation in document["safety_violations"]:
        click.echo(f"{violation['at_s']:.3f} s, node {violation['node']}: {violation['evidence']}", err=True)
        click.echo(f"  {violation['checker']}, invariant {violation['invariant']}", err=True)
    print_table(("WHAT", "VALUE"), rows)


def _print_summary(summary: dict[str, Any]) -> None:
    rows = [
        (name.replace("_", " "), value)
        for name, value in summary.items()
        if name not in ("schema_version", "failed")
    ]
    print_table(("WHAT", "VALUE"), rows)
    for each in summary["failed"]:
        click.echo(f"seed {each['seed']}: {each['what']}\n  {each['replay']}")
