"""`measure authority`: what replicated routers disagree about, and what a pinned one does not."""

from __future__ import annotations

import time
from typing import Any, Final

import click

from kvasir_node.bench.machine import describe_machine
from kvasir_node.cli.measure_levels import SINGLY, TEXT_BYTES_MAX, WINDOW, Asked, judge_sides, plain
from kvasir_node.cli.measured_model import prepare_reference, stored_model
from kvasir_node.cli.output import json_option, note, print_json, print_table
from kvasir_node.cli.parameters import NonEmptyText
from kvasir_node.cli.session import CommandSession
from kvasir_node.measure.authority import (
    AuthorityComparison,
    Inside,
    SwarmAuthority,
    authority_of_swarm,
    measure_authority,
)
from kvasir_node.measure.backends_here import Backend, backends_here, choose_backends
from kvasir_node.measure.in_process import InProcessModel, ModelSettings
from kvasir_node.measure.recording import cut_into_windows
from kvasir_node.measure.sides import LIVE, LLAMA_CPP, SAVED, SWARM, is_live, is_swarm
from kvasir_node.measure.task import HELD_OUT_TEXT
from kvasir_node.model.report import file_report
from kvasir_node.model.store import DEMO_MODEL, StoredModel
from kvasir_node.small_file import read_small_file
from kvasir_proto.errors import OutOfTolerance, UsageError

SCHEMA_VERSION: Final = 1
POSITIONS: Final = 1024
BESIDE: Final = ("opencl-pocl", "opencl-intel", "reference-f64", "emulated-f16")
"""What ggml's kernel is put beside by default, where it is here."""


@click.command("authority")
@click.option(
    "--kernels",
    help="Pairs such as ggml-cpu+reference-f64, comma-separated. Default: ggml-cpu beside others.",
)
@click.option(
    "--between",
    nargs=2,
    metavar="BASE RUN",
    help=f"Two backends, as --kernels has them; or {LLAMA_CPP} and a swarm as it runs: {LIVE}, {LIVE}:HOME, "
    f"{SWARM} or {SWARM}:KERNEL+KERNEL.",
)
@click.option(
    "--model", type=NonEmptyText(), default=str(DEMO_MODEL), show_default="the demo's", help="A GGUF file."
)
@click.option("--positions", type=click.IntRange(2, 1 << 20), default=POSITIONS, show_default=True)
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True)
@json_option
@click.pass_obj
def authority(
    session: CommandSession,
    kernels: str | None,
    between: tuple[str, str] | None,
    model: str,
    positions: int,
    threads: int,
    as_json: bool,
) -> None:
    """Put replicated routers beside the pinned one, on kernels that really differ.

    Of a swarm as it runs, with its one router: whether its holders were asked for what that chose, and how
    far its choices are from llama.cpp's. Status 9 when a pinned router's choice was not what was computed.
    """
    session.configure()
    started = time.monotonic()
    if between is not None:
        if kernels is not None:
            raise UsageError("give one of --kernels and --between")
        if any(is_swarm(side) or is_live(side) for side in between):
            _show_swarm(session, between, model, positions, threads, as_json)
            return
        if any(side == LLAMA_CPP or side.startswith(SAVED) for side in between):
            raise UsageError(f"{LLAMA_CPP} and what is saved have no routers to replicate: name two backends")
        kernels = "+".join(between)
    pairs = pairs_of(kernels, backends_here(threads, say=note))
    stored = stored_model(session.locations, model)
    prepare_reference(stored)
    found = measure_pairs(stored, pairs, positions, threads)
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "authority": plain(found),
                "seconds": round(time.monotonic() - started, 1),
                "machine": describe_machine(),
                "model": file_report(stored),
            }
        )
    else:
        for each in found:
            _print_pair(each)
        click.echo(f"{time.monotonic() - started:.1f} s")
    require_authority(found)


def _show_swarm(
    session: CommandSession, sides: tuple[str, str], model: str, positions: int, threads: int, as_json: bool
) -> None:
    reference, swarm = sides
    if reference != LLAMA_CPP and not reference.startswith(SAVED):
        raise UsageError(f"a swarm's choices stand beside {LLAMA_CPP} or {SAVED}DIRECTORY, given first")
    asked = Asked(
        model=model,
        sides=sides,
        text=None,
        positions=positions,
        window=WINDOW,
        singly=SINGLY,
        threads=threads,
        ubatch=256,
        kv_type="f32",
        is_watched=True,
    )
    found, stored, took = judge_sides(session, asked, authority_of_swarm)
    if as_json:
        print_json(
            {
                "schema_version": SCHEMA_VERSION,
                "authority": [],
                "swarms": [plain(found)],
                "seconds": round(took, 1),
                "machine": describe_machine(),
                "model": file_report(stored),
            }
        )
    else:
        _print_swarm(found)
        click.echo(f"{took:.1f} s")
    require_obedience(swarm, found.pinned)


def pairs_of(kernels: str | None, here: tuple[Backend, ...]) -> tuple[tuple[Backend, Backend], ...]:
    """The pairs that a list names, or the usual ones. Raises `UsageError`."""
    if kernels is None:
        names = {each.name for each in here}
        kernels = ",".join(f"ggml-cpu+{name}" for name in BESIDE if name in names)
    pairs = []
    for part in kernels.split(","):
        both = part.strip().split("+")
        if len(both) != 2:
            raise UsageError(f"--kernels takes pairs such as ggml-cpu+reference-f64, and not {part!r}")
        (first,), (second,) = choose_backends(both[0], here), choose_backends(both[1], here)
        pairs.append((first, second))
    return tuple(pairs)


def measure_pairs(
    stored: StoredModel, pairs: tuple[tuple[Backend, Backend], ...], positions: int, threads: int
) -> tuple[AuthorityComparison, ...]:
    """Every pair on the held-out text."""
    settings = ModelSettings(n_ctx=WINDOW, n_threads=threads)
    with InProcessModel(stored, settings, is_watched=False) as alone:
        tokens = alone.tokenize(read_small_file(HELD_OUT_TEXT, TEXT_BYTES_MAX).decode())
        beginning = alone.tokenize("")
    windows = cut_into_windows(tokens, positions, WINDOW, beginning)
    return tuple(measure_authority(stored, pair, windows, settings, SINGLY, note) for pair in pairs)


def require_authority(found: tuple[AuthorityComparison, ...]) -> None:
    """Raise `OutOfTolerance` when somebody computed what a pinned router did not choose."""
    for each in found:
        require_obedience(f"{each.a} and {each.b}", each.pinned)


def require_obedience(name: str, pinned: Inside) -> None:
    """The same of one swarm."""
    if pinned.decisions_disagreeing or pinned.rows_missing:
        raise OutOfTolerance(
            f"{name}: {pinned.decisions_disagreeing} choices of a pinned router were not what was computed, "
            f"and {pinned.rows_missing} rows are missing"
        )


def _print_swarm(found: SwarmAuthority) -> None:
    inside, outside, choices = found.pinned, found.outside, found.outside_choices
    click.echo(f"{found.swarm}, {found.positions} positions\n")
    rows = [
        (
            "inside: the router's choice, and what holders were asked for",
            (
                f"{inside.decisions_disagreeing} of {inside.decisions} differ, {inside.rows_missing} of "
                f"{inside.rows} rows missing"
            ),
        ),
        (
            f"outside: its router's choice, and {found.reference}'s",
            (
                f"{choices.decisions_disagreeing} of {choices.decisions} differ, {choices.tokens_borderline} "
                "tokens are borderline"
            ),
        ),
        (
            f"its logits beside {found.reference}",
            (
                f"mean KLD {outside.mean_kld:.1e}, same top {100 * outside.top1_agreement:.2f} %, perplexity "
                f"{100 * (outside.perplexity_change or 0):+.3f} %"
            ),
        ),
    ]
    print_table(("DISAGREEMENT", "FOUND"), rows)


def _print_pair(found: AuthorityComparison) -> None:
    click.echo(f"{found.a} and {found.b}, {found.positions} positions\n")
    ways = (("apart", found.apart), ("in step", found.in_step), ("pinned", found.pinned))
    print_table(
        ("INSIDE", "OTHER SET", "OF", "BORDERLINE", "ROWS MISSING", "MEAN KLD", "SAME TOP", "FIRST OTHER"),
        [(name, *_inside(each)) for name, each in ways],
    )
    click.echo("")
    rows: list[tuple[Any, ...]] = [
        (
            name,
            f"{each.mean_kld:.1e}",
            f"{100 * each.top1_agreement:.2f} %",
            f"{100 * (each.perplexity_change or 0):+.3f} %",
            found.outside_choices[name].decisions_disagreeing,
        )
        for name, each in found.outside.items()
    ]
    print_table(("BESIDE LLAMA.CPP ALONE", "MEAN KLD", "SAME TOP", "PERPLEXITY", "OTHER SET"), rows)
    click.echo("")


def _inside(each: Inside) -> tuple[Any, ...]:
    return (
        each.decisions_disagreeing,
        each.decisions,
        "-" if each.choices is None else each.choices.tokens_borderline,
        each.rows_missing,
        "-" if each.logits is None else f"{each.logits.mean_kld:.1e}",
        "-" if each.logits is None else f"{100 * each.logits.top1_agreement:.2f} %",
        "-" if each.first_divergent_token is None else each.first_divergent_token,
    )
