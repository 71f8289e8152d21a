"""`measure drift`, `decisions`, `generation`, `task`, `save`: one level each, between any two sides."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import click

from kvasir_node.bench.machine import describe_machine
from kvasir_node.cli.measured_model import prepare_reference, stored_model
from kvasir_node.cli.output import json_option, note, print_json, print_table
from kvasir_node.cli.output_directory import prepare_output
from kvasir_node.cli.parameters import NonEmptyPath, NonEmptyText
from kvasir_node.cli.session import CommandSession
from kvasir_node.foreground import run_in_foreground
from kvasir_node.locations import Locations
from kvasir_node.measure.backends_here import Backend, backends_here
from kvasir_node.measure.in_process import ModelSettings
from kvasir_node.measure.levels import LevelsComparison, compare_recordings
from kvasir_node.measure.live_side import check_backbone
from kvasir_node.measure.recording import Recording, Workload, cut_into_windows, record
from kvasir_node.measure.saved_reference import load_reference, save_reference
from kvasir_node.measure.sides import (
    LIVE,
    LLAMA_CPP,
    SAVED,
    SWARM,
    SideSettings,
    check_side,
    home_of,
    is_live,
    is_swarm,
    open_side,
)
from kvasir_node.measure.statistics import LogitsComparison, Scored
from kvasir_node.measure.task import HELD_OUT_TEXT, read_items
from kvasir_node.model.report import file_report
from kvasir_node.model.store import DEMO_MODEL, StoredModel
from kvasir_node.small_file import read_small_file
from kvasir_node.working_directory import working_directory
from kvasir_proto.errors import OutOfTolerance, UsageError
from kvasir_proto.limits import CONTEXT_LENGTH_MAX

SCHEMA_VERSION: Final = 1
WINDOW: Final = 512
SINGLY: Final = 16
POSITIONS: Final = 2048
PROMPTS: Final = 16
GENERATED: Final = 48
ITEMS: Final = 640
TEXT_BYTES_MAX: Final = 16 << 20

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
ResultT = TypeVar("ResultT")


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What the options of a level say."""

    model: str
    sides: tuple[str, str]
    text: Path | None
    positions: int
    window: int
    singly: int
    threads: int
    ubatch: int
    kv_type: str
    prompts: int = 0
    n_generated: int = 0
    items: int = 0
    scored: Scored = "all"
    flash_attention: bool = True
    is_watched: bool = False
    """Whether hidden states and choices are kept, where there are any to be seen."""


flash_attention_option = click.option(
    "--flash-attention",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Of sides in this process. Switched on, llama.cpp rounds keys and values to F16 in any cache.",
)


def level_options(function: FunctionT) -> FunctionT:
    """The options that every level has."""
    options = (
        click.option(
            "--model",
            type=NonEmptyText(),
            default=str(DEMO_MODEL),
            show_default="the demo's",
            help="A GGUF file, or the name or digest of a model of this home.",
        ),
        click.option(
            "--text",
            type=NonEmptyPath(path_type=Path),
            help="A text file to feed. Default: held-out text that comes with the demo model.",
        ),
        click.option(
            "--window", type=click.IntRange(2, CONTEXT_LENGTH_MAX), default=WINDOW, show_default=True
        ),
        click.option(
            "--singly",
            type=click.IntRange(0, CONTEXT_LENGTH_MAX),
            default=SINGLY,
            show_default=True,
            help="So many tokens at each window's end go through one by one.",
        ),
        click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True),
        click.option("--ubatch", type=click.IntRange(1, 4096), default=256, show_default=True),
        click.option("--kv-type", type=click.Choice(["f16", "f32"]), default="f32", show_default=True),
        flash_attention_option,
        json_option,
    )
    for option in reversed(options):
        function = option(function)
    return function


between_option = click.option(
    "--between",
    nargs=2,
    default=(LLAMA_CPP, "ggml-cpu"),
    show_default=True,
    metavar="BASE RUN",
    help=f"Two sides: {LLAMA_CPP}, {LIVE} (the swarm of this home's daemon), {LIVE}:HOME, {SWARM} (of engines"
    f" started for this), {SWARM}:KERNEL+KERNEL, a backend of 'measure ops', or {SAVED}DIRECTORY.",
)


scored_option = click.option(
    "--scored",
    type=click.Choice(get_args(Scored)),
    default="all",
    show_default=True,
    help="Which positions of a window count: second-half, without the last, is what llama-perplexity scores.",
)


def positions_option(default: int) -> Callable[[FunctionT], FunctionT]:
    """How many tokens of the text."""
    return click.option(
        "--positions",
        type=click.IntRange(2, 1 << 20),
        default=default,
        show_default=True,
        help="Of the text.",
    )


@click.command("drift")
@between_option
@positions_option(POSITIONS)
@level_options
@click.pass_obj
def drift(session: CommandSession, /, as_json: bool, **options: Any) -> None:
    """Show how the distance between two runs' hidden states grows from layer to layer."""
    _run_level(session, asked_of(options), "drift", as_json, _print_drift)


@click.command("decisions")
@between_option
@positions_option(POSITIONS)
@level_options
@click.pass_obj
def decisions(session: CommandSession, /, as_json: bool, **options: Any) -> None:
    """Count where two runs' routers take other experts, and how close those choices were."""
    _run_level(session, asked_of(options), "decisions", as_json, _print_decisions)


@click.command("generation")
@between_option
@click.option("--prompts", type=click.IntRange(1, 4096), default=PROMPTS, show_default=True)
@click.option(
    "--tokens", type=click.IntRange(1, 4096), default=GENERATED, show_default=True, help="For each prompt."
)
@level_options
@click.pass_obj
def generation(session: CommandSession, /, as_json: bool, prompts: int, tokens: int, **options: Any) -> None:
    """Let two runs go on with the same prompts, greedily, and show where they first differ."""
    asked = asked_of({**options, "positions": 0}, prompts=prompts, n_generated=tokens)
    _run_level(session, asked, "generation", as_json, _print_generation)


@click.command("task")
@between_option
@positions_option(POSITIONS)
@click.option(
    "--items",
    type=click.IntRange(1, 65536),
    default=ITEMS,
    show_default=True,
    help="Cloze items: the right last word among four.",
)
@scored_option
@level_options
@click.pass_obj
def task(session: CommandSession, /, as_json: bool, items: int, scored: Scored, **options: Any) -> None:
    """Show what a difference costs: perplexity on held-out text, and a cloze score."""
    asked = dataclasses.replace(asked_of(options, items=items), scored=scored)
    _run_level(session, asked, "task", as_json, _print_task)


@click.command("save")
@click.option("--side", default=LLAMA_CPP, show_default=True, help="Whose answers are saved.")
@click.option("--out", type=NonEmptyPath(path_type=Path), required=True, help="A directory that is made.")
@positions_option(POSITIONS)
@click.option("--prompts", type=click.IntRange(0, 4096), default=PROMPTS, show_default=True)
@click.option("--tokens", type=click.IntRange(1, 4096), default=GENERATED, show_default=True)
@click.option("--items", type=click.IntRange(0, 65536), default=ITEMS, show_default=True)
@level_options
@click.pass_obj
def save(
    session: CommandSession,
    /,
    side: str,
    out: Path,
    as_json: bool,
    prompts: int,
    tokens: int,
    items: int,
    **options: Any,
) -> None:
    """Save one side's answers, as a reference for another day or another machine.

    Logits take 4 bytes for each position and token of the vocabulary.
    """
    session.configure()
    asked = asked_of({**options, "between": (side, side)}, prompts=prompts, n_generated=tokens, items=items)
    asked = dataclasses.replace(asked, is_watched=True)
    if side.startswith(SAVED):
        raise UsageError("what is saved already need not be saved again")
    prepare_output(out, is_new=True)
    stored, backends = _prepared(session, asked)
    with working_directory(session.locations.cache, "measure") as directory:
        (recording,) = run_in_foreground(
            record_sides, session.locations, stored, asked, backends, (side,), directory, out
        )
        save_reference(recording, out)
    document = {
        "schema_version": SCHEMA_VERSION,
        "side": recording.side,
        "directory": str(out),
        "positions": len(recording.workload.tokens),
        "prompts": len(recording.continuations),
        "items": len(recording.scores),
        "seconds": round(recording.seconds, 1),
        "model": file_report(stored),
    }
    if as_json:
        print_json(document)
    else:
        click.echo(f"{out} has {document['positions']} positions of {side}, in {document['seconds']} s")


def compare_sides(session: CommandSession, asked: Asked) -> tuple[LevelsComparison, StoredModel, float]:
    """Record both sides, unless saved, and compare; with the seconds it took. Raises `UsageError`."""
    return judge_sides(session, asked, lambda base, run: compare_recordings(base, run, asked.scored))


def judge_sides(
    session: CommandSession, asked: Asked, judge: Callable[[Recording, Recording], ResultT]
) -> tuple[ResultT, StoredModel, float]:
    """What `judge` makes of both sides' answers, whose files are gone afterwards. As `compare_sides`."""
    session.configure()
    started = time.monotonic()
    stored, backends = _prepared(session, asked)
    with working_directory(session.locations.cache, "measure") as directory:
        base, run = run_in_foreground(
            record_sides, session.locations, stored, asked, backends, asked.sides, directory, None
        )
        judged = judge(base, run)
    return judged, stored, time.monotonic() - started


def compare_logits_of_sides(session: CommandSession, asked: Asked, as_json: bool) -> None:
    """Print the statistics of logits of two sides. Raises `OutOfTolerance` where the swarm's would be out."""
    compared, stored, took = compare_sides(session, asked)
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "level": "logits",
                **level_document(compared, "logits"),
                "passed": not compared.reason,
                "reason": compared.reason,
                "seconds": round(took, 1),
                "machine": describe_machine(),
                "model": file_report(stored),
            }
        )
    elif compared.logits is not None:
        click.echo(f"{compared.run} beside {compared.base}, {took:.1f} s\n")
        print_table(("STATISTIC", "VALUE"), logits_rows(compared.logits))
    if compared.reason:
        raise OutOfTolerance(f"{compared.run} beside {compared.base}: {compared.reason}")


def logits_rows(compared: LogitsComparison) -> list[tuple[str, str]]:
    """The statistics of logits by llama-perplexity's names and in its order, as lines of a table."""
    rows = [
        ("Positions", f"{compared.positions}"),
        ("Maximum |delta| of a logit", f"{compared.max_abs_delta:g}"),
        ("RMS delta of a logit", f"{compared.rms_delta:g}"),
        ("First different position", f"{compared.first_difference}"),
        ("Positions with a margin under 1e-4", f"{compared.borderline_positions}"),
        *_perplexity_rows(compared),
        ("Mean    KLD", f"{compared.mean_kld:.6g} ± {compared.mean_kld_error:.2g}"),
        ("Mean    KLD, 95 %", f"{compared.mean_kld_95.low:.3g} to {compared.mean_kld_95.high:.3g}"),
        ("Maximum KLD", f"{compared.maximum_kld:.6g}"),
    ]
    percentiles = {**compared.kld_percentiles, "99.0": compared.kld_99, "50.0": compared.median_kld}
    for percent in sorted(percentiles, key=float, reverse=True):
        name = "Median " if percent == "50.0" else f"{percent:>4}%  "
        rows.append((f"{name} KLD", f"{percentiles[percent]:.6g}"))
    rows += [("Minimum KLD", f"{compared.minimum_kld:.6g}"), *_delta_p_rows(compared)]
    top, interval = 100 * compared.top1_agreement, compared.top1_95
    rows += [
        ("Same top p", f"{top:.3f} ± {100 * compared.top1_agreement_error:.3f} %"),
        ("Same top p, 95 %", f"{100 * interval.low:.3f} to {100 * interval.high:.3f} %"),
    ]
    return rows


def _perplexity_rows(compared: LogitsComparison) -> list[tuple[str, str]]:
    change = compared.perplexity_change_95
    if compared.base_perplexity is None or compared.run_perplexity is None or change is None:
        return []
    correlation = compared.ln_ppl_correlation
    rows = [
        ("Mean PPL(Q)", _with_error(compared.run_perplexity, compared.run_perplexity_error)),
        ("Mean PPL(base)", _with_error(compared.base_perplexity, compared.base_perplexity_error)),
        ("Cor(ln(PPL(Q)), ln(PPL(base)))", "-" if correlation is None else f"{100 * correlation:.2f} %"),
        (
            "Mean ln(PPL(Q)/PPL(base))",
            _with_error(compared.mean_ln_ppl_ratio, compared.mean_ln_ppl_ratio_error),
        ),
        (
            "Mean PPL(Q)/PPL(base)",
            _with_error(1 + (compared.perplexity_change or 0.0), compared.perplexity_ratio_error),
        ),
        (
            "Mean PPL(Q)-PPL(base)",
            _with_error(compared.perplexity_difference, compared.perplexity_difference_error),
        ),
        ("Change of PPL, 95 %", f"{100 * change.low:+.4f} to {100 * change.high:+.4f} %"),
    ]
    return rows


def _delta_p_rows(compared: LogitsComparison) -> list[tuple[str, str]]:
    if compared.delta_p_percentiles is None:
        return []
    percentiles = {**compared.delta_p_percentiles, "50.0": compared.median_delta_p or 0.0}
    rows = [
        ("Mean    Δp", f"{_with_error(compared.mean_delta_p, compared.mean_delta_p_error, 100)} %"),
        ("Maximum Δp", f"{100 * (compared.maximum_delta_p or 0.0):.4g} %"),
    ]
    for percent in sorted(percentiles, key=float, reverse=True):
        name = "Median " if percent == "50.0" else f"{percent:>4}%  "
        rows.append((f"{name} Δp", f"{100 * percentiles[percent]:.4g} %"))
    rows += [
        ("Minimum Δp", f"{100 * (compared.minimum_delta_p or 0.0):.4g} %"),
        ("RMS Δp", f"{_with_error(compared.rms_delta_p, compared.rms_delta_p_error, 100)} %"),
    ]
    return rows


def _with_error(value: float | None, error: float | None, factor: float = 1.0) -> str:
    return f"{factor * (value or 0.0):.6g} ± {factor * (error or 0.0):.2g}"


def plain(value: Any) -> Any:
    """A result for JSON: dataclasses as objects, and nothing that is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def asked_of(options: dict[str, Any], *, prompts: int = 0, n_generated: int = 0, items: int = 0) -> Asked:
    """What the options that `level_options` and `positions_option` make say."""
    return Asked(
        model=options["model"],
        sides=options["between"],
        text=options["text"],
        positions=options["positions"],
        window=options["window"],
        singly=options["singly"],
        threads=options["threads"],
        ubatch=options["ubatch"],
        kv_type=options["kv_type"],
        flash_attention=options["flash_attention"] == "on",
        prompts=prompts,
        n_generated=n_generated,
        items=items,
    )


def _prepared(session: CommandSession, asked: Asked) -> tuple[StoredModel, tuple[Backend, ...]]:
    """The model, and the backends where one is asked for; asking for devices costs a second."""
    is_needed = any(
        side != LLAMA_CPP and not (is_swarm(side) or is_live(side) or side.startswith(SAVED))
        for side in asked.sides
    )
    backends = backends_here(asked.threads, say=note) if is_needed else ()
    for side in asked.sides:
        check_side(side, backends)
        if (is_swarm(side) or is_live(side)) and not asked.flash_attention:
            raise UsageError("engines of a swarm always use flash attention")
    stored = stored_model(session.locations, asked.model)
    prepare_reference(stored)
    return stored, backends


def _text_of(asked: Asked) -> str:
    path = HELD_OUT_TEXT if asked.text is None else asked.text
    try:
        return read_small_file(path, TEXT_BYTES_MAX).decode()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise UsageError(f"{path} is not UTF-8") from None


async def record_sides(
    home: Locations,
    stored: StoredModel,
    asked: Asked,
    backends: tuple[Backend, ...],
    names: tuple[str, ...],
    directory: Path,
    out: Path | None,
) -> tuple[Recording, ...]:
    """Each side's answers; all are asked what a saved one was asked, where there is one."""
    saved = {name: load_reference(Path(name.removeprefix(SAVED))) for name in names if name.startswith(SAVED)}
    workload = next((each.workload for each in saved.values()), None)
    if workload is not None and not asked.prompts:
        workload = dataclasses.replace(workload, prompts=(), n_generated=0)
    if workload is not None and not asked.items:
        workload = dataclasses.replace(workload, items=())
    n_ctx = asked.window + 8 if workload is None else max(map(len, workload.windows), default=0) + 8
    n_ctx = max(n_ctx, 512, asked.n_generated + 256)
    settings = SideSettings(
        ModelSettings(
            n_ctx=-(-n_ctx // 256) * 256,
            n_ubatch=asked.ubatch,
            n_threads=asked.threads,
            kv_type=asked.kv_type,
            flash_attention=asked.flash_attention,
        ),
        home,
        is_watched=asked.is_watched,
    )
    for name in filter(is_live, names):  # before anybody computes for minutes
        await check_backbone(name, home_of(name, home), stored)
    found = []
    for number, name in enumerate(names):
        if name in saved:
            found.append(_as_asked(saved[name], workload))
            continue
        note(f"{name}: loading")
        place = directory / str(number)
        place.mkdir()
        async with open_side(name, stored, settings, backends, place) as side:
            if workload is None:
                workload = await _workload(stored, asked, side.tokenize)
            found.append(await record(side, workload, out or place / "recording", note))
    return tuple(found)


def _as_asked(recording: Recording, workload: Workload | None) -> Recording:
    """A saved recording, without what nobody asks for now."""
    if workload is None:
        return recording
    return dataclasses.replace(
        recording,
        workload=dataclasses.replace(
            recording.workload,
            prompts=workload.prompts,
            n_generated=workload.n_generated,
            items=workload.items,
        ),
    )


async def _workload(stored: StoredModel, asked: Asked, tokenize: Callable[[str], Any]) -> Workload:
    windows: tuple[tuple[int, ...], ...] = ()
    if asked.positions:
        tokens, beginning = await tokenize(_text_of(asked)), await tokenize("")
        windows = cut_into_windows(tokens, asked.positions, asked.window, beginning)
    prompts = [await tokenize(each.context) for each in read_items(n_items=asked.prompts or 1)]
    return Workload(
        model_digest=stored.digest,
        windows=windows,
        singly=asked.singly,
        prompts=tuple(prompts[: asked.prompts]),
        n_generated=asked.n_generated,
        items=read_items(n_items=asked.items) if asked.items else (),
    )


def _run_level(
    session: CommandSession,
    asked: Asked,
    level: str,
    as_json: bool,
    show: Callable[[LevelsComparison], None],
) -> None:
    asked = dataclasses.replace(asked, is_watched=level in ("drift", "decisions"))
    compared, stored, took = compare_sides(session, asked)
    if level in ("drift", "decisions") and compared.drift is None:
        raise UsageError("nobody looked inside what was saved: save it again")
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "level": level,
                **level_document(compared, level),
                "seconds": round(took, 1),
                "machine": describe_machine(),
                "model": file_report(stored),
            }
        )
        return
    click.echo(f"{compared.run} beside {compared.base}, {took:.1f} s\n")
    show(compared)


def level_document(compared: LevelsComparison, level: str) -> dict[str, Any]:
    """One level of a comparison, for JSON."""
    parts: dict[str, Any] = {
        "drift": {"layer_drift": compared.drift},
        "decisions": {"decisions": compared.decisions},
        "generation": {"generation": compared.generation},
        "task": {"logits": compared.logits, "cloze": compared.cloze},
        "logits": {"logits": compared.logits},
    }
    found: dict[str, Any] = plain(parts[level])
    return {"base": compared.base, "run": compared.run, "positions": compared.positions, **found}


def _print_drift(compared: LevelsComparison) -> None:
    if compared.drift is None:
        return
    rows = [
        (
            each.layer,
            f"{each.rms:.3g}",
            f"{each.max_abs:.1e}",
            f"{each.rel_l2:.1e}",
            f"{each.cosine:.8f}",
            each.undisturbed,
            "-" if each.undisturbed_rel_l2 is None else f"{each.undisturbed_rel_l2:.1e}",
        )
        for each in compared.drift.layers
    ]
    print_table(("LAYER", "RMS", "MAX |D|", "REL L2", "COSINE", "SAME EXPERTS", "REL L2 OF THOSE"), rows)
    if compared.drift.best and compared.drift.as_root and compared.drift.as_layers:
        click.echo(
            f"\nGrows as layers^{compared.drift.best.exponent:.2f}; residuals "
            f"{compared.drift.best.residual:.2f}, of a root {compared.drift.as_root.residual:.2f}, "
            f"of a line {compared.drift.as_layers.residual:.2f}"
        )


def _print_decisions(compared: LevelsComparison) -> None:
    if compared.decisions is None:
        return
    rows = [
        (
            each.layer,
            each.disagreeing,
            each.experts_changed,
            each.borderline,
            each.borderline_disagreeing,
            f"{each.median_margin:.1e}",
            f"{each.largest_margin:.1e}",
        )
        for each in compared.decisions.layers
    ]
    widths = ("MEDIAN MARGIN", "WIDEST TURNED")
    print_table(("LAYER", "OTHER SET", "EXPERTS", "BORDERLINE", "OF THOSE OTHER", *widths), rows)
    found = compared.decisions
    click.echo(
        f"\n{found.decisions_disagreeing} of {found.decisions} decisions differ "
        f"({100 * found.disagreement:.3f} %, "
        f"{100 * found.disagreement_95.low:.3f} to {100 * found.disagreement_95.high:.3f}); "
        f"{found.tokens_disagreeing} of {found.positions} tokens; {found.tokens_borderline} are borderline"
    )


def _print_generation(compared: LevelsComparison) -> None:
    found = compared.generation
    if found is None:
        return
    rows = [
        (
            number,
            each.n_tokens,
            "-" if each.first is None else each.first,
            f"{100 * each.agreement:.0f} %",
            "-" if each.margin is None else f"{each.margin:.1e}",
        )
        for number, each in enumerate(found.prompts, 1)
    ]
    print_table(("PROMPT", "TOKENS", "FIRST OTHER", "SAME BEFORE", "MARGIN THERE"), rows)
    click.echo(
        f"\n{found.identical} of {len(found.prompts)} texts are identical "
        f"({100 * found.identical_95.low:.0f} to {100 * found.identical_95.high:.0f} %); on average "
        f"{100 * found.mean_agreement:.1f} % come before the first difference"
    )


def _print_task(compared: LevelsComparison) -> None:
    rows: list[tuple[str, str]] = []
    if compared.logits is not None and compared.logits.perplexity_change_95 is not None:
        found = compared.logits
        change = found.perplexity_change_95 or found.top1_95
        rows += [
            ("Perplexity, base", f"{found.base_perplexity:.4f}"),
            ("Perplexity, run", f"{found.run_perplexity:.4f}"),
            ("Change", f"{100 * (found.perplexity_change or 0):+.4f} %"),
            ("95 % between", f"{100 * change.low:+.4f} and {100 * change.high:+.4f} %"),
        ]
    if compared.cloze is not None:
        cloze = compared.cloze
        rows += [
            ("Cloze, base", f"{cloze.base.right} of {cloze.base.items} right"),
            ("Cloze, run", f"{cloze.run.right} of {cloze.run.items} right"),
            ("Change", f"{100 * cloze.delta:+.2f} points, {cloze.answers_changed} answers differ"),
            ("95 % between", f"{100 * cloze.delta_95.low:+.2f} and {100 * cloze.delta_95.high:+.2f} points"),
        ]
    print_table(("FIGURE", "VALUE"), rows)
