"""`measure`: how far a swarm's numbers are from a single process's, one command for each level."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Final

import click

from kvasir_node.bench.machine import describe_machine, read_bandwidth
from kvasir_node.bench.test_model import LAYER_SHAPE
from kvasir_node.cli.generate import parse_token_ids
from kvasir_node.cli.measure_authority import authority
from kvasir_node.cli.measure_levels import (
    POSITIONS,
    SINGLY,
    WINDOW,
    Asked,
    compare_logits_of_sides,
    decisions,
    drift,
    flash_attention_option,
    generation,
    logits_rows,
    save,
    scored_option,
    task,
)
from kvasir_node.cli.measure_operations import ops
from kvasir_node.cli.measure_report import report
from kvasir_node.cli.measured_model import prepare_reference, random_model, stored_model
from kvasir_node.cli.output import json_option, note, print_json, print_table
from kvasir_node.cli.parameters import NonEmptyPath, NonEmptyText
from kvasir_node.cli.session import CommandSession
from kvasir_node.foreground import run_in_foreground
from kvasir_node.measure.layer import LayerMeasurement, LayerSettings, measure_layer
from kvasir_node.measure.logits import (
    LogitsMeasurement,
    LogitsSettings,
    check_tokens,
    default_chunks,
    measure_logits,
    parse_chunks,
    random_tokens,
)
from kvasir_node.measure.statistics import Scored
from kvasir_node.model.report import file_report
from kvasir_node.model.store import DEMO_MODEL, StoredModel
from kvasir_node.working_directory import working_directory
from kvasir_proto.errors import OutOfTolerance, UsageError
from kvasir_proto.limits import CONTEXT_LENGTH_MAX, HOLDERS_MAX, WORKERS_MAX

SCHEMA_VERSION: Final = 1
_TOKENS_FILE_BYTES_MAX: Final = 16 << 20
_POSITIONS_DEFAULT: Final = 128
_BATCHES_MAX: Final = 8
_BATCH_TOKENS_MAX: Final = 512
_TOKEN: Final = re.compile(r"\d+", re.ASCII)


_WITH_BETWEEN: Final = ("text", "window", "singly", "scored", "flash_attention")
"""Parameters of `measure logits` that say something of two sides only."""
_WITHOUT_BETWEEN: Final = (
    "token_ids",
    "tokens_file",
    "seed",
    "workers",
    "holders",
    "chunks",
    "compact_activations",
    "partial_sums",
    "device",
    "reference_device",
    "require_exact",
)
"""Those that say something of a process and a swarm only."""


@click.group()
def measure() -> None:
    """Measure how far a swarm is from a single process, and backends from each other."""


for command in (ops, drift, decisions, generation, task, save, authority, report):
    measure.add_command(command)


@measure.command("logits")
@click.option(
    "--between",
    nargs=2,
    metavar="BASE RUN",
    help="Two sides as of 'measure drift', on held-out text, in place of a process and a swarm.",
)
@click.option(
    "--model",
    type=NonEmptyText(),
    default=str(DEMO_MODEL),
    show_default="the demo's",
    help="A GGUF file, or the name or digest of a model of this home.",
)
@click.option("--token-ids", help="The tokens to feed, comma-separated.")
@click.option("--tokens-file", type=click.Path(path_type=Path), help="A file of token ids.")
@click.option(
    "--positions",
    type=click.IntRange(1, CONTEXT_LENGTH_MAX),
    help="So many random tokens, or tokens of the text with --between. Default: 128; 2048.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the random tokens."
)
@click.option("--workers", type=click.IntRange(1, WORKERS_MAX), default=1, show_default=True)
@click.option(
    "--holders",
    type=click.IntRange(1, HOLDERS_MAX),
    default=1,
    show_default=True,
    help="Workers that hold each expert.",
)
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="In each engine.")
@click.option(
    "--ubatch",
    type=click.IntRange(1, 4096),
    default=512,
    show_default=True,
    help="Positions computed at once.",
)
@click.option("--chunks", help="Tokens of each decode, such as 256,1x32. Default: half at once, then singly.")
@click.option("--kv-type", type=click.Choice(["f16", "f32"]), help="Default: f16; f32 with --between.")
@click.option(
    "--compact-activations",
    is_flag=True,
    help="Send activations in Q8_0 where the weights round them so anyway.",
)
@click.option(
    "--partial-sums",
    is_flag=True,
    help="Let workers add up their weighted rows, not in the last layers. Not exact.",
)
@click.option(
    "--device",
    type=NonEmptyText(),
    default="none",
    show_default=True,
    help="Where the backbone computes all but routed experts: none, auto, or a device that 'doctor' lists.",
)
@click.option(
    "--reference-device",
    type=NonEmptyText(),
    help="The same for the single process, whose routed experts stay with the processor. Default: --device.",
)
@click.option("--require-exact", is_flag=True, help="Exit with status 9 unless every logit is identical.")
@click.option("--text", type=NonEmptyPath(path_type=Path), help="With --between: a text file to feed.")
@click.option(
    "--window", type=click.IntRange(2, CONTEXT_LENGTH_MAX), help=f"With --between. Default: {WINDOW}."
)
@click.option(
    "--singly",
    type=click.IntRange(0, CONTEXT_LENGTH_MAX),
    help=f"With --between: so many tokens at each window's end one by one. Default: {SINGLY}.",
)
@scored_option
@flash_attention_option
@json_option
@click.pass_obj
def logits(
    session: CommandSession,
    between: tuple[str, str] | None,
    model: str,
    token_ids: str | None,
    tokens_file: Path | None,
    positions: int | None,
    seed: int,
    workers: int,
    holders: int,
    threads: int,
    ubatch: int,
    chunks: str | None,
    kv_type: str | None,
    compact_activations: bool,
    partial_sums: bool,
    device: str,
    reference_device: str | None,
    require_exact: bool,
    text: Path | None,
    window: int | None,
    singly: int | None,
    scored: Scored,
    flash_attention: str,
    as_json: bool,
) -> None:
    """Compare the logits of a swarm of real processes with those of one process, position by position.

    Statistics have the names that llama-perplexity gives them; the base is the single process. With --between
    status 9 means surely less than 99.5 % of same top tokens, or a mean KLD surely above 1e-3.
    """
    if between is not None:
        unused = [name for name in _WITHOUT_BETWEEN if _is_given(name)]
        if unused:
            named = ", ".join("--" + name.replace("_", "-") for name in unused)
            raise UsageError(
                f"{named}: of no use with --between, which takes its tokens from the held-out text, its "
                "processes from the two sides, and has a tolerance of its own"
            )
        asked = Asked(
            model=model,
            sides=between,
            text=text,
            positions=positions or POSITIONS,
            window=window or WINDOW,
            singly=SINGLY if singly is None else singly,
            threads=threads,
            ubatch=ubatch,
            kv_type=kv_type or "f32",
            scored=scored,
            flash_attention=flash_attention == "on",
        )
        compare_logits_of_sides(session, asked, as_json)
        return
    if any(_is_given(name) for name in _WITH_BETWEEN):
        raise UsageError("--text, --window, --singly, --scored and --flash-attention go with --between")
    session.configure()
    if sum(option is not None for option in (token_ids, tokens_file, positions)) > 1:
        raise UsageError("give one of --token-ids, --tokens-file and --positions")
    if holders > workers:
        raise UsageError(f"{holders} holders need as many workers, and there are {workers}")
    tokens = parse_token_ids(token_ids) if tokens_file is None else _tokens_of(tokens_file)
    if token_ids is not None and not tokens:
        raise UsageError("--token-ids names no token")
    n_tokens = len(tokens) or positions or _POSITIONS_DEFAULT
    chunk_sizes = default_chunks(n_tokens) if chunks is None else parse_chunks(chunks, "--chunks")
    if sum(chunk_sizes) != n_tokens:
        raise UsageError(f"the chunks make {sum(chunk_sizes)} tokens, but there are {n_tokens}")
    stored = stored_model(session.locations, model)
    check_tokens(tokens, stored.manifest.n_vocab)
    settings = LogitsSettings(
        token_ids=tokens or random_tokens(n_tokens, stored.manifest.n_vocab, seed),
        chunk_sizes=chunk_sizes,
        n_workers=workers,
        holders=holders,
        n_threads=threads,
        n_ubatch=ubatch,
        kv_type=kv_type or "f16",
        compact_activations=compact_activations,
        partial_sums=partial_sums,
        device=device,
        reference_device=device if reference_device is None else reference_device,
    )
    prepare_reference(stored)
    with working_directory(session.locations.cache, "measure") as directory:
        measured = run_in_foreground(measure_logits, stored, settings, directory, note)
    if as_json:
        print_json(_document(stored, settings, measured))
    else:
        _print_report(settings, measured)
    if require_exact:
        check_exact(measured.comparison.max_abs_delta)


@measure.command("layer")
@click.option(
    "--model",
    type=NonEmptyText(),
    help="A GGUF file of one MoE layer. Default: a random one of 1.4 GB, made once.",
)
@click.option("--workers", type=click.IntRange(1, WORKERS_MAX), default=3, show_default=True)
@click.option("--batches", default="1,32", show_default=True, help="Tokens of a call, comma-separated.")
@click.option("--calls", type=click.IntRange(1, 256), default=16, show_default=True, help="In each round.")
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="In each engine.")
@click.option("--require-exact", is_flag=True, help="Exit with status 9 unless every logit is identical.")
@json_option
@click.pass_obj
def layer(
    session: CommandSession,
    model: str | None,
    workers: int,
    batches: str,
    calls: int,
    rounds: int,
    threads: int,
    require_exact: bool,
    as_json: bool,
) -> None:
    """Measure one MoE layer's call over real workers, beside what the memory could deliver.

    The random layer has the shape of the published figures: 3072 wide, 8 of 256 experts of 1024 in Q4_K.
    """
    session.configure()
    settings = LayerSettings(workers, _batches_of(batches), calls, rounds, threads)
    stored = (
        random_model(session.locations, LAYER_SHAPE, "layer")
        if model is None
        else stored_model(session.locations, model)
    )
    prepare_reference(stored)
    note("measuring the memory")
    bandwidth = read_bandwidth()
    with working_directory(session.locations.cache, "measure") as directory:
        measured = run_in_foreground(measure_layer, stored, settings, directory, note)
    document = _layer_document(stored, settings, measured, bandwidth)
    if as_json:
        print_json(document)
    else:
        _print_layer(document)
    if require_exact:
        check_exact(measured.max_abs_delta)


def check_exact(max_abs_delta: float) -> None:
    """Raise `OutOfTolerance` unless every logit was identical."""
    if max_abs_delta != 0.0:
        raise OutOfTolerance(f"the largest difference between logits is {max_abs_delta:g}, not 0")


def _tokens_of(path: Path) -> tuple[int, ...]:
    """Token ids from a file: numbers separated by white space or commas, also as a JSON list."""
    try:
        with path.open(encoding="ascii") as file:
            text = file.read(_TOKENS_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:
        raise UsageError(f"{path} has other characters than digits, commas and white space") from None
    if len(text) > _TOKENS_FILE_BYTES_MAX:
        raise UsageError(f"{path} is too large for a list of tokens")
    parts = text.strip().removeprefix("[").removesuffix("]").replace(",", " ").split()
    wrong = next((part for part in parts if not _TOKEN.fullmatch(part)), None)
    if wrong is not None:
        raise UsageError(f"{path} has {wrong[:20]!r} where a token id is expected")
    if not 1 <= len(parts) <= CONTEXT_LENGTH_MAX:
        raise UsageError(f"{path} has {len(parts)} tokens; it takes 1 to {CONTEXT_LENGTH_MAX}")
    return parse_token_ids(",".join(parts))


def _batches_of(text: str) -> tuple[int, ...]:
    sizes = parse_chunks(text, "--batches")
    if len(sizes) > _BATCHES_MAX or max(sizes) > _BATCH_TOKENS_MAX:
        raise UsageError(f"--batches takes at most {_BATCHES_MAX} sizes, none above {_BATCH_TOKENS_MAX}")
    return tuple(dict.fromkeys(sizes))


def _layer_document(
    stored: StoredModel, settings: LayerSettings, measured: LayerMeasurement, bandwidth: float
) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "max_abs_delta": measured.max_abs_delta,
        "positions": measured.positions,
        "rows_retried": measured.rows_retried,
        "memory_bytes_per_s": round(bandwidth),
        "calls": [
            {
                "tokens": each.n_tokens,
                "calls": each.n_calls,
                "call_us": round(each.call_ns / 1000, 1),
                "step_us": round(each.step_ns / 1000, 1),
                "single_process_step_us": round(each.reference_ns / 1000, 1),
                "sent_bytes": round(each.sent_bytes),
                "received_bytes": round(each.received_bytes),
                "experts_expected": round(each.n_experts, 1),
                "expert_bytes_expected": round(each.expert_bytes),
                "roofline_us": round(each.roofline_ns(bandwidth) / 1000, 1),
            }
            for each in measured.figures
        ],
        "workers": settings.n_workers,
        "threads": settings.n_threads,
        "machine": describe_machine(),
        "model": file_report(stored),
    }


def _print_layer(document: dict[str, Any]) -> None:
    rows = [
        (
            f"{call['tokens']}",
            f"{call['call_us']:.0f}",
            f"{call['roofline_us']:.0f}",
            f"{call['expert_bytes_expected'] / 1e6:.1f}",
            f"{call['sent_bytes']}",
            f"{call['received_bytes']}",
            f"{call['step_us']:.0f}",
            f"{call['single_process_step_us']:.0f}",
        )
        for call in document["calls"]
    ]
    headings = ("TOKENS", "CALL µS", "MEMORY µS", "EXPERTS MB", "SENT B", "RECEIVED B", "STEP µS", "ALONE µS")
    print_table(headings, rows)
    click.echo(
        f"\n{document['workers']} workers; memory reads {document['memory_bytes_per_s'] / 1e9:.1f} GB/s; "
        f"largest difference of a logit {document['max_abs_delta']:g} over {document['positions']} "
        f"positions; {document['rows_retried']} rows retried"
    )


def _is_given(name: str) -> bool:
    """Whether the user has given this parameter of the command that runs, be it its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, click.core.ParameterSource.DEFAULT)


def _document(
    stored: StoredModel, settings: LogitsSettings, measured: LogitsMeasurement
) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        **dataclasses.asdict(measured.comparison),
        "hook_calls": measured.hook_calls,
        "moe_layers": len(stored.manifest.moe_layers),
        "ubatches": measured.ubatches,
        "backbone_expert_bytes": measured.backbone_expert_bytes,
        "experts_missing_total": measured.experts_missing_total,
        "rows_retried": measured.rows_retried,
        "bytes_per_token_to_holders": measured.bytes_to_holders / len(settings.token_ids),
        "bytes_per_token_from_holders": measured.bytes_from_holders / len(settings.token_ids),
        "workers": settings.n_workers,
        "holders": settings.holders,
        "threads": settings.n_threads,
        "ubatch": settings.n_ubatch,
        "kv_type": settings.kv_type,
        "compact_activations": settings.compact_activations,
        "partial_sums": settings.partial_sums,
        "device": measured.device,
        "reference_device": measured.reference_device,
        "processes": [dataclasses.asdict(each) for each in measured.processes],
        "model": file_report(stored),
    }


def _print_report(settings: LogitsSettings, measured: LogitsMeasurement) -> None:
    compared = measured.comparison
    rows = logits_rows(compared)
    rows += [
        ("Hook calls", f"{measured.hook_calls}"),
        ("Ubatches", f"{measured.ubatches}"),
        ("Rows retried", f"{measured.rows_retried}"),
        ("Bytes a token to holders", f"{measured.bytes_to_holders / compared.positions:.0f}"),
        ("Bytes a token from holders", f"{measured.bytes_from_holders / compared.positions:.0f}"),
        ("Experts' bytes in the backbone's file", f"{measured.backbone_expert_bytes}"),
        ("Trunk on", f"{measured.device}, single process's on {measured.reference_device}"),
        ("Workers, holders of each expert", f"{settings.n_workers}, {settings.holders}"),
    ]
    print_table(("STATISTIC", "VALUE"), rows)
