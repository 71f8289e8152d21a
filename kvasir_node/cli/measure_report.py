"""`measure report`: every level, router authority and the causes, as one page and one JSON file."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click
import trio

from kvasir_node.bench.machine import describe_machine
from kvasir_node.cli.measure_authority import (
    BESIDE,
    measure_pairs,
    pairs_of,
    require_authority,
    require_obedience,
)
from kvasir_node.cli.measure_levels import (
    SINGLY,
    WINDOW,
    Asked,
    plain,
    record_sides,
)
from kvasir_node.cli.measure_operations import (
    operations_document,
    published_document,
    require_tolerance,
    settings_of,
)
from kvasir_node.cli.measured_model import prepare_reference, stored_model
from kvasir_node.cli.output import json_option, note, print_json
from kvasir_node.cli.output_directory import prepare_output
from kvasir_node.cli.parameters import NonEmptyPath, NonEmptyText
from kvasir_node.cli.session import CommandSession
from kvasir_node.foreground import run_in_foreground
from kvasir_node.measure.authority import AuthorityComparison, SwarmAuthority, authority_of_swarm
from kvasir_node.measure.backends_here import Backend, backends_here, choose_backends
from kvasir_node.measure.causes import measure_causes
from kvasir_node.measure.levels import THRESHOLDS, LevelsComparison, compare_recordings
from kvasir_node.measure.live_side import check_backbone
from kvasir_node.measure.operations import OperationsMeasurement, measure_operations
from kvasir_node.measure.published import PUBLISHED
from kvasir_node.measure.report_page import render_page
from kvasir_node.measure.sides import LIVE, LLAMA_CPP, SWARM, home_of, is_live, is_swarm, workers_of
from kvasir_node.model.report import file_report
from kvasir_node.model.store import DEMO_MODEL, StoredModel
from kvasir_node.working_directory import working_directory
from kvasir_proto.errors import UsageError

SCHEMA_VERSION: Final = 1
POSITIONS: Final = 1024
PROMPTS: Final = 8
GENERATED: Final = 32
ITEMS: Final = 100
_DATA: Final = "report.json"
_PAGE: Final = "report.html"
_RUNS: Final = ("ggml-cpu", *BESIDE, "ggml-neon-v8.6")
"""Whose runs of the whole model a report has, where they are here; and a swarm's."""


@click.command("report")
@click.option("--out", type=NonEmptyPath(path_type=Path), required=True, help="A directory, made if needed.")
@click.option(
    "--model", type=NonEmptyText(), default=str(DEMO_MODEL), show_default="the demo's", help="A GGUF file."
)
@click.option(
    "--positions",
    type=click.IntRange(64, 1 << 20),
    default=POSITIONS,
    show_default=True,
    help="Of held-out text; half of them for router authority.",
)
@click.option("--items", type=click.IntRange(1, 65536), default=ITEMS, show_default=True, help="Cloze items.")
@click.option("--prompts", type=click.IntRange(1, 4096), default=PROMPTS, show_default=True)
@click.option("--runs", help="Sides beside llama.cpp, comma-separated. Default: those of another arithmetic.")
@click.option(
    "--live",
    type=NonEmptyText(),
    metavar="HOME",
    help="The home of a running backbone's daemon, whose swarm is a side too.",
)
@click.option("--operations", default="all", show_default=True, help="Backends of the per-op delta.")
@click.option("--published/--no-published", default=True, help="Measure at the published shape too.")
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True)
@json_option
@click.pass_obj
def report(
    session: CommandSession,
    out: Path,
    model: str,
    positions: int,
    items: int,
    prompts: int,
    runs: str | None,
    live: str | None,
    operations: str,
    published: bool,
    threads: int,
    as_json: bool,
) -> None:
    """Measure everything there is to measure of this machine's backends; write report.html and report.json.

    Status 9, with both files written, when a pair is outside its gate or a pinned router was not obeyed.
    """
    session.configure()
    started = time.monotonic()
    here = backends_here(threads, say=note)
    names = _sides(runs, here)
    if live is not None:
        names = tuple(dict.fromkeys((*names, f"{LIVE}:{live}")))
    stored = stored_model(session.locations, model)
    for name in filter(is_live, names):  # before minutes of measuring
        trio.run(check_backbone, name, home_of(name, session.locations), stored)
    prepare_output(out, (_DATA, _PAGE))
    prepare_reference(stored)
    asked = Asked(
        model=model,
        sides=(LLAMA_CPP, names[0]),
        text=None,
        positions=positions,
        window=min(WINDOW, positions),
        singly=SINGLY,
        threads=threads,
        ubatch=256,
        kv_type="f32",
        prompts=prompts,
        n_generated=GENERATED,
        items=items,
        is_watched=True,
    )
    with working_directory(session.locations.cache, "measure") as directory:
        measured = _measure_operations(operations, here)
        beside = _measure_published(here) if published else None
        recordings = run_in_foreground(
            record_sides, session.locations, stored, asked, here, (LLAMA_CPP, *names), directory, None
        )
        compared = [compare_recordings(recordings[0], each) for each in recordings[1:]]
        swarms = [
            authority_of_swarm(recordings[0], each) for each in recordings[1:] if _is_of_processes(each.side)
        ]
    pairs = pairs_of(_pairs_among(names), here)
    authority = measure_pairs(stored, pairs, max(64, positions // 2), threads)
    document = _document(stored, measured, beside, compared, authority, swarms)
    document["seconds"] = round(time.monotonic() - started, 1)
    (out / _DATA).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / _PAGE).write_text(render_page(document), encoding="utf-8")
    if as_json:
        print_json(document)
    else:
        click.echo(f"{out / _PAGE} and {_DATA}, {document['seconds']} s")
    require_tolerance(measured)
    require_authority(authority)
    for each in swarms:
        require_obedience(each.swarm, each.pinned)


def _sides(runs: str | None, here: tuple[Backend, ...]) -> tuple[str, ...]:
    known = {each.name for each in here}
    if runs is None:
        return (*(name for name in _RUNS if name in known), SWARM)
    names = tuple(dict.fromkeys(part.strip() for part in runs.split(",")))
    unknown = next((name for name in names if name not in known and not _is_of_processes(name)), None)
    if unknown is not None:
        here_are = ", ".join((*sorted(known), SWARM, LIVE))
        raise UsageError(f"there is no {unknown!r} here: there are {here_are}")
    for name in filter(is_swarm, names):
        workers_of(name)
    return names


def _is_of_processes(name: str) -> bool:
    return is_swarm(name) or is_live(name)


def _pairs_among(names: tuple[str, ...]) -> str:
    """ggml beside each of another arithmetic among the runs, three at most; itself where there is none."""
    others: list[str] = [name for name in BESIDE if name in names]
    others = others or [name for name in names if name != "ggml-cpu" and not _is_of_processes(name)]
    return ",".join(f"ggml-cpu+{name}" for name in others[:3]) or "ggml-cpu+ggml-cpu"


def _measure_operations(operations: str, here: tuple[Backend, ...]) -> OperationsMeasurement:
    settings = settings_of("demo", "f16,q8_0", "64", 0)
    return measure_operations(choose_backends(operations, here), settings, note)


def _measure_published(here: tuple[Backend, ...]) -> OperationsMeasurement:
    """Only what stands beside a published figure: emulated sums take minutes at this width."""
    wanted = {name for each in PUBLISHED if each.ours is not None for name in each.ours[:2]}
    chosen = [each for each in here if each.name in wanted]
    return measure_operations(chosen, settings_of("published", None, None, 0), note)


def _document(
    stored: StoredModel,
    measured: OperationsMeasurement,
    beside: OperationsMeasurement | None,
    compared: list[LevelsComparison],
    authority: tuple[AuthorityComparison, ...],
    swarms: list[SwarmAuthority],
) -> dict[str, Any]:
    per_op = operations_document(measured)
    pairs = per_op.pop("pairs")
    per_op.pop("published")
    per_op["shown"] = plain(measured.shown)
    return {
        "schema_version": SCHEMA_VERSION,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(),
        "model": file_report(stored),
        "thresholds": {
            "top1_agreement_min": THRESHOLDS.top1_agreement_min,
            "mean_kld_max": THRESHOLDS.mean_kld_max,
        },
        "per_op": per_op,
        "pairs": pairs,
        "published": [] if beside is None else published_document(beside),
        "layer_drift": _level(compared, "drift"),
        "logits": [
            {
                "base": each.base,
                "run": each.run,
                "positions": each.positions,
                "logits": plain(each.logits),
                "passed": not each.reason,
                "reason": each.reason,
            }
            for each in compared
        ],
        "decisions": _level(compared, "decisions"),
        "generation": _level(compared, "generation"),
        "task": [
            {"base": each.base, "run": each.run, "logits": plain(each.logits), "cloze": plain(each.cloze)}
            for each in compared
        ],
        "authority": plain(authority),
        "swarms": plain(swarms),
        "causes": plain(measure_causes()),
    }


def _level(compared: list[LevelsComparison], name: str) -> list[dict[str, Any]]:
    """One level of every comparison that has it."""
    levels = [(each, getattr(each, name)) for each in compared]
    return [
        {"base": each.base, "run": each.run, **plain(level)} for each, level in levels if level is not None
    ]
