"""`bench`: what a swarm on this machine costs beside one process, as one figure each."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final

import click

from kvasir_node.bench.machine import describe_machine, memory_bytes
from kvasir_node.bench.rounds import (
    ONE_WORKER,
    REFERENCE,
    RPC,
    SWARM_MODES,
    TWO_WORKERS,
    Round,
    decode_ratio,
    layer_overhead_us,
    median_in,
    prefill_ratio,
)
from kvasir_node.bench.rpc_server import find_library, require_ggml_version
from kvasir_node.bench.side_by_side import BenchRun, BenchSettings, RpcProgram, run_side_by_side
from kvasir_node.bench.test_model import BENCH_SHAPE
from kvasir_node.cli.measure import check_exact
from kvasir_node.cli.measured_model import prepare_reference, random_model, stored_model
from kvasir_node.cli.output import json_option, note, print_json, print_table
from kvasir_node.cli.parameters import NonEmptyText
from kvasir_node.cli.session import CommandSession
from kvasir_node.foreground import run_in_foreground
from kvasir_node.model.report import file_report
from kvasir_node.model.store import StoredModel
from kvasir_node.working_directory import working_directory
from kvasir_proto.errors import EngineFailed, UsageError

SCHEMA_VERSION: Final = 1
_QUICK: Final = BenchSettings(n_rounds=3, n_decode=24, n_prefill=128, time_limit_s=60.0)


@click.command()
@click.option("--rounds", type=click.IntRange(1, 1000), help="Rounds, each with every mode. Default: 9.")
@click.option(
    "--model",
    type=NonEmptyText(),
    help="A GGUF file, or a model of this home. Default: a random 1.3 GB model, made once.",
)
@click.option("--tokens", type=click.IntRange(1, 4096), help="Tokens decoded in a round. Default: 48.")
@click.option("--quick", is_flag=True, help="Three short rounds: rougher figures.")
@click.option(
    "--peers",
    "others",
    type=click.Choice(["rpc"]),
    help="Another way to the same: llama.cpp's RPC backend (rpc).",
)
@click.option("--rpc-server", type=click.Path(path_type=Path), help="With --peers rpc: its server program.")
@click.option(
    "--rpc-library",
    type=click.Path(path_type=Path),
    help="With --peers rpc: its client library. Default: libggml-rpc beside the server.",
)
@json_option
@click.pass_obj
def bench(
    session: CommandSession,
    rounds: int | None,
    model: str | None,
    tokens: int | None,
    quick: bool,
    others: str | None,
    rpc_server: Path | None,
    rpc_library: Path | None,
    as_json: bool,
) -> None:
    """Measure speed beside a single process: swarms of one worker and of two, on this machine.

    All run interleaved with one thread a process, mutual TLS on; figures are medians of per-round ratios to
    the single process. Anything else that runs on the machine shows in them. Exit status 9 when a swarm's
    logit differs.
    """
    session.configure()
    rpc = _rpc_program(others, rpc_server, rpc_library)
    settings = _QUICK if quick else BenchSettings()
    settings = dataclasses.replace(
        settings, n_rounds=rounds or settings.n_rounds, n_decode=tokens or settings.n_decode
    )
    stored = (
        random_model(session.locations, BENCH_SHAPE, "bench")
        if model is None
        else stored_model(session.locations, model)
    )
    _require_memory(stored, n_copies=3 if rpc is None else 4)
    machine = describe_machine()
    prepare_reference(stored)
    with working_directory(session.locations.cache, "measure") as directory:
        run = run_in_foreground(run_side_by_side, stored, settings, directory, note, rpc)
    document = _document(stored, settings, run, machine)
    if as_json:
        print_json(document)
    else:
        _print_report(document, run)
    check_exact(run.max_abs_delta)


def _rpc_program(others: str | None, server: Path | None, library: Path | None) -> RpcProgram | None:
    """What `--peers rpc` names. Raises `UsageError`, or `IncompatibleVersion` for parts of another ggml."""
    if others is None:
        if server is not None or library is not None:
            raise UsageError("--rpc-server and --rpc-library go with --peers rpc")
        return None
    if server is None:
        raise UsageError("--peers rpc needs the server program: --rpc-server PATH")
    found = find_library(server, library)
    from kvasir_node import native_library

    require_ggml_version(found, native_library.load().ggml_version)
    return RpcProgram(server.absolute(), found)


def _require_memory(stored: StoredModel, n_copies: int) -> None:
    """So many copies are held at once. Raises `EngineFailed` rather than let the machine swap."""
    available_bytes = memory_bytes("MemAvailable")
    needed_bytes = n_copies * stored.manifest.file_size_bytes
    if available_bytes is not None and available_bytes < needed_bytes:
        raise EngineFailed(
            f"the benchmark needs {needed_bytes >> 20} MiB of memory for {n_copies} copies of the model, and "
            f"{available_bytes >> 20} MiB are available: name a smaller model with --model"
        )


def _document(
    stored: StoredModel, settings: BenchSettings, run: BenchRun, machine: dict[str, object]
) -> dict[str, Any]:
    rounds = run.rounds
    modes = run.modes
    return {
        "schema_version": SCHEMA_VERSION,
        "decode_ratio": round(decode_ratio(rounds, ONE_WORKER), 4),
        "decode_ratio_2_workers": round(decode_ratio(rounds, TWO_WORKERS), 4),
        "prefill_ratio": round(prefill_ratio(rounds, ONE_WORKER), 4),
        "prefill_ratio_2_workers": round(prefill_ratio(rounds, TWO_WORKERS), 4),
        "layer_call_overhead_us": round(layer_overhead_us(rounds, ONE_WORKER, run.n_moe_layer), 1),
        "layer_call_overhead_us_2_workers": round(layer_overhead_us(rounds, TWO_WORKERS, run.n_moe_layer), 1),
        "cpu_ms_per_token": round(median_in(rounds, ONE_WORKER, lambda each: each.cpu_ms), 3),
        "cpu_ms_per_token_by_process": {
            mode: {
                "backbone": round(median_in(rounds, mode, lambda each: each.backbone_cpu_ms), 3),
                "workers": round(median_in(rounds, mode, lambda each: each.workers_cpu_ms), 3),
            }
            for mode in modes
        },
        "tokens_per_second": {
            mode: round(1e9 / median_in(rounds, mode, lambda each: each.token_ns), 2) for mode in modes
        },
        "prefill_tokens_per_second": {
            mode: round(1e9 / median_in(rounds, mode, lambda each: each.prefill_ns / each.n_prefill), 2)
            for mode in modes
        },
        "wire_bytes_per_token": {
            mode: {
                "sent": round(median_in(rounds, mode, lambda each: each.sent_bytes_per_token)),
                "received": round(median_in(rounds, mode, lambda each: each.received_bytes_per_token)),
            }
            for mode in SWARM_MODES
        },
        **(_beside_rpc(run) if RPC in modes else {}),
        "backbone_rss_bytes": run.backbone_rss_bytes,
        "max_abs_delta": run.max_abs_delta,
        "rows_retried": run.rows_retried,
        "n_rounds": len(rounds),
        "n_decode": settings.n_decode,
        "n_prefill": settings.n_prefill,
        "rounds": [{mode: _raw(each, mode) for mode in modes} for each in rounds],
        "machine": machine,
        "model": file_report(stored),
    }


def _beside_rpc(run: BenchRun) -> dict[str, object]:
    """How llama.cpp's RPC backend compares with the single process, and the swarms with it."""
    rounds = run.rounds
    return {
        "rpc_decode_ratio": round(decode_ratio(rounds, RPC), 4),
        "rpc_prefill_ratio": round(prefill_ratio(rounds, RPC), 4),
        "rpc_layer_call_overhead_us": round(layer_overhead_us(rounds, RPC, run.n_moe_layer), 1),
        "rpc_max_abs_delta": run.deltas[RPC],
        "decode_over_rpc": round(decode_ratio(rounds, ONE_WORKER, RPC), 4),
        "decode_over_rpc_2_workers": round(decode_ratio(rounds, TWO_WORKERS, RPC), 4),
        "prefill_over_rpc": round(prefill_ratio(rounds, ONE_WORKER, RPC), 4),
        "prefill_over_rpc_2_workers": round(prefill_ratio(rounds, TWO_WORKERS, RPC), 4),
    }


def _raw(samples: Round, mode: str) -> dict[str, object]:
    sample = samples[mode]
    return {
        "decode_us": [each // 1000 for each in sample.decode_ns],
        "decode_ms_median": round(sample.token_ns / 1e6, 3),
        "prefill_ms": round(sample.prefill_ns / 1e6, 3),
        "backbone_cpu_ms_per_token": round(sample.backbone_cpu_ms, 3),
        "workers_cpu_ms_per_token": round(sample.workers_cpu_ms, 3),
    }


def _print_report(document: dict[str, Any], run: BenchRun) -> None:
    rows = []
    for mode in run.modes:
        cpu = document["cpu_ms_per_token_by_process"][mode]
        rows.append(
            (
                "single process" if mode == REFERENCE else mode,
                f"{document['tokens_per_second'][mode]:.1f}",
                f"{decode_ratio(run.rounds, mode):.3f}",
                f"{layer_overhead_us(run.rounds, mode, run.n_moe_layer):.0f}",
                f"{document['prefill_tokens_per_second'][mode]:.1f}",
                f"{prefill_ratio(run.rounds, mode):.3f}",
                f"{cpu['backbone']:.1f} + {cpu['workers']:.1f}",
            )
        )
    print_table(("MODE", "DECODE TOK/S", "RATIO", "µS/LAYER", "PREFILL TOK/S", "RATIO", "CPU MS/TOKEN"), rows)
    click.echo(
        f"\n{document['n_rounds']} rounds; backbone {run.backbone_rss_bytes / 1e6:.0f} MB resident; largest "
        f"difference of a logit {run.max_abs_delta:g}; {document['machine']['cpus']} CPUs, load "
        f"{document['machine']['load_1_min']:g} before the start"
    )
    for mode in SWARM_MODES:
        wire = document["wire_bytes_per_token"][mode]
        click.echo(f"{mode}: {wire['sent']} bytes sent and {wire['received']} received for each token")
    if RPC in run.modes:
        click.echo(
            f"1 worker beside llama.cpp's RPC backend: {document['decode_over_rpc']:.3f} times its decode, "
            f"{document['prefill_over_rpc']:.3f} times its prefill; RPC's largest difference of a logit is "
            f"{document['rpc_max_abs_delta']:g}"
        )
