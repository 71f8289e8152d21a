"""`measure ops`: every backend that is here on the same rows and weights, pair by pair."""

from __future__ import annotations

import math
import re
import time
from typing import Any, Final

import click

from kvasir_node.bench.machine import describe_machine
from kvasir_node.certification.crafted_weights import CRAFTED_TYPES
from kvasir_node.certification.probe import COLUMNS_MIN
from kvasir_node.certification.synthetic_model import ExpertShape
from kvasir_node.cli.output import Cell, json_option, note, print_json, print_table
from kvasir_node.cli.parameters import NonEmptyText, those_named
from kvasir_node.cli.session import CommandSession
from kvasir_node.measure.backends_here import ALL, backends_here, choose_backends
from kvasir_node.measure.operations import (
    OperationsMeasurement,
    OperationsSettings,
    PairFigures,
    measure_operations,
)
from kvasir_node.measure.published import PUBLISHED, PUBLISHED_SHAPE, PUBLISHED_USED
from kvasir_node.measure.sides import LLAMA_CPP, SAVED, is_live, is_swarm
from kvasir_proto.capability import BATCH_CLASSES
from kvasir_proto.errors import EngineFailed, OutOfTolerance, UsageError
from kvasir_proto.tensor_types import TENSOR_TYPES_BY_NAME
from kvasir_proto.tolerance import EquivalenceClass

SCHEMA_VERSION: Final = 1
_DEMO: Final = "demo"
_PUBLISHED: Final = "published"
_SHAPES: Final = {_DEMO: (256, 128, 4), _PUBLISHED: (*PUBLISHED_SHAPE, PUBLISHED_USED)}
"""n_embd, n_ff and how many experts a token uses."""
_TYPES: Final = {_DEMO: "f32,f16,bf16,q8_0", _PUBLISHED: "q8_0,q4_K"}
_BATCHES: Final = {_DEMO: "1,64", _PUBLISHED: "64"}
_WIDTH_MAX: Final = 16384
_SHAPE: Final = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", re.ASCII)


@click.command("ops")
@click.option("--backends", help="Backends by name, comma-separated. Default: all.")
@click.option("--between", nargs=2, metavar="A B", help="Two of them.")
@click.option(
    "--shape",
    default=_DEMO,
    show_default=True,
    metavar="demo|published|N_EMBDxN_FF",
    type=NonEmptyText(),
    help="published: 3072x1024, 8 experts a token, as others published it.",
)
@click.option("--weight-types", help=f"Of {','.join(CRAFTED_TYPES)}. Default: by the shape.")
@click.option("--batch-classes", help="Rows a call, of 1,8,32,64,512. Default: 1,64; published: 64.")
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of weights and rows."
)
@json_option
@click.pass_obj
def ops(
    session: CommandSession,
    backends: str | None,
    between: tuple[str, str] | None,
    shape: str,
    weight_types: str | None,
    batch_classes: str | None,
    threads: int,
    seed: int,
    as_json: bool,
) -> None:
    """Put the same rows and weights through every backend that is here, and compare each pair.

    Pairs of one arithmetic have a gate, others are labelled. Status 9 when a pair is outside its gate, or
    a backend is of no known arithmetic.
    """
    session.configure()
    settings = settings_of(shape, weight_types, batch_classes, seed)
    started = time.monotonic()
    if backends is not None and between is not None:
        raise UsageError("give one of --backends and --between")
    wanted = ",".join(between or (ALL,)) if backends is None else backends
    for side in wanted.split(","):
        _check_shows_operations(side)
    chosen = choose_backends(wanted, backends_here(threads, say=note))
    if len(chosen) < 2:
        raise UsageError(f"{chosen[0].name} alone has nothing to be compared with")
    measured = measure_operations(chosen, settings, note)
    document = {
        "schema_version": SCHEMA_VERSION,
        **operations_document(measured),
        "threads": threads,
        "seconds": round(time.monotonic() - started, 1),
        "machine": describe_machine(),
    }
    if as_json:
        print_json(document)
    else:
        _print_report(measured, document)
    absent = next((each for each in measured.backends if not each.weight_types), None)
    if absent is not None and wanted.strip() != ALL:
        raise EngineFailed(f"{absent.name} was asked for and took no part: {absent.missing}")
    require_tolerance(measured)


def _check_shows_operations(side: str) -> None:
    """Raise `UsageError` for a side that is no kernel of this process."""
    if is_live(side) or is_swarm(side):
        raise UsageError(
            f"{side}: a swarm shows what is behind whole layers, not single operations: 'measure drift "
            f"--between {LLAMA_CPP} {side}' has that, and 'certify' on a node that node's operations"
        )
    if side == LLAMA_CPP or side.startswith(SAVED):
        raise UsageError(f"{side}: operations are of backends: llama.cpp's own kernel here is ggml-cpu")


def settings_of(
    shape: str, weight_types: str | None, batch_classes: str | None, seed: int
) -> OperationsSettings:
    """What the options mean. Raises `UsageError`."""
    n_embd, n_ff, n_used = _SHAPES.get(shape) or (*_widths_of(shape), _SHAPES[_DEMO][2])
    widths = ExpertShape(n_embd, n_ff)
    types = those_named(
        _TYPES.get(shape, _TYPES[_DEMO]) if weight_types is None else weight_types,
        CRAFTED_TYPES,
        "--weight-types",
    )
    unfit = next((each for each in types if not _fits(each, widths)), None)
    if unfit is not None:
        raise UsageError(f"rows of {n_embd} and {n_ff} columns cannot be in {unfit}")
    classes = those_named(
        _BATCHES.get(shape, _BATCHES[_DEMO]) if batch_classes is None else batch_classes,
        tuple(map(str, BATCH_CLASSES)),
        "--batch-classes",
    )
    return OperationsSettings(widths, n_used, types, tuple(map(int, classes)), seed)


def require_tolerance(measured: OperationsMeasurement) -> None:
    """Raise `OutOfTolerance` when a pair is outside its gate, or a backend's arithmetic is of no class."""
    if measured.unclassified:
        strange = measured.unclassified[0]
        raise OutOfTolerance(
            f"{strange.backend} at {strange.batch_class} rows in {strange.weight_type} is of no arithmetic "
            f"that is known: {strange.accumulator} sums of {strange.arithmetic.activation} rows"
        )
    if measured.failed:
        worst = measured.failed[0]
        raise OutOfTolerance(
            f"{len(measured.failed)} of {len(measured.pairs)} pairs are outside their gate, the first "
            f"{worst.a} and {worst.b}, {worst.operation} in {worst.weight_type}: {worst.reason}"
        )


def operations_document(measured: OperationsMeasurement) -> dict[str, Any]:
    """What was measured, for JSON."""
    settings = measured.settings
    return {
        "n_embd": settings.shape.n_embd,
        "n_ff": settings.shape.n_ff,
        "n_expert_used": settings.n_used,
        "seed": settings.seed,
        "backends": [
            {
                "name": each.name,
                "emulated": each.emulated,
                "weight_types": list(each.weight_types),
                "missing": each.missing,
                "seconds": round(each.seconds, 1),
            }
            for each in measured.backends
        ],
        "classes": [
            {
                "backend": each.backend,
                "weight_type": each.weight_type,
                "batch_class": each.batch_class,
                "class": class_text(each.arithmetic),
                "accumulator": each.accumulator,
                "repeatable": each.repeatable,
                "batch_invariant": each.batch_invariant,
                "probed_n_embd": each.probed_shape.n_embd,
                "probed_n_ff": each.probed_shape.n_ff,
            }
            for each in measured.classes
        ],
        "pairs": [_pair_document(each) for each in measured.pairs],
        "published": published_document(measured),
    }


def class_text(arithmetic: EquivalenceClass) -> str:
    """An equivalence class in a word: rows, by what processor if not the usual one, and their sums."""
    rounded = f" of {arithmetic.rounding}" if arithmetic.rounding else ""
    return f"{arithmetic.activation}{rounded}/{arithmetic.accumulation}"


def _pair_document(each: PairFigures) -> dict[str, Any]:
    return {
        "operation": each.operation,
        "weight_type": each.weight_type,
        "batch_class": each.batch_class,
        "a": each.a,
        "b": each.b,
        "class_a": class_text(each.class_a),
        "class_b": class_text(each.class_b),
        "same_class": each.is_same_class,
        "rows": each.n_rows,
        "rms": _finite(each.rms),
        "max_abs": _finite(each.max_abs),
        "rel_l2": _finite(each.rel_l2),
        "nmse": _finite(each.nmse),
        "cosine": each.cosine,
        "gate": each.gate,
        "passed": each.passed,
        "reason": each.reason,
    }


def published_document(measured: OperationsMeasurement) -> list[dict[str, Any]]:
    """Each published line beside the pair of ours that is like it, where that was measured."""
    lines = []
    for published in PUBLISHED:
        ours = None
        if published.ours is not None:
            a, b, weight_type = published.ours
            ours = next(
                (
                    each
                    for each in reversed(measured.pairs)
                    if (each.operation, each.weight_type) == ("combined", weight_type)
                    and {each.a, each.b} == {a, b}
                ),
                None,
            )
        lines.append(
            {
                "pair": published.name,
                "max_abs": published.max_abs,
                "rel_l2": published.rel_l2,
                "cosine": published.cosine,
                "ours": None if ours is None else _pair_document(ours),
                "explanation": published.explanation,
            }
        )
    return lines


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _widths_of(text: str) -> tuple[int, int]:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--shape takes demo, published or two widths such as 512x256, and not {text[:40]!r}"
        )
    n_embd, n_ff = int(match[1]), int(match[2])
    if not COLUMNS_MIN <= min(n_embd, n_ff) <= max(n_embd, n_ff) <= _WIDTH_MAX:
        raise UsageError(f"--shape takes widths from {COLUMNS_MIN} to {_WIDTH_MAX}")
    return n_embd, n_ff


def _fits(weight_type: str, widths: ExpertShape) -> bool:
    elements = TENSOR_TYPES_BY_NAME[weight_type].block_elements
    return widths.n_embd % elements == 0 and widths.n_ff % elements == 0


def _print_report(measured: OperationsMeasurement, document: dict[str, Any]) -> None:
    settings = measured.settings
    click.echo(
        f"n_embd {settings.shape.n_embd}, n_ff {settings.shape.n_ff}, {settings.n_used} experts a token, "
        f"seed {settings.seed}, {document['machine']['cpu']}, {document['seconds']} s\n"
    )
    print_table(
        ("BACKEND", "EMULATED", "WEIGHTS", "NOT HERE"),
        [
            (each.name, "yes" if each.emulated else "no", ", ".join(each.weight_types), each.missing or "-")
            for each in measured.backends
        ],
    )
    click.echo("\nWhole experts:\n")
    rows = [
        (
            each.weight_type,
            each.batch_class,
            each.a,
            each.b,
            class_text(each.class_a),
            "same" if each.is_same_class else class_text(each.class_b),
            f"{each.max_abs:.1e}",
            f"{each.rel_l2:.1e}",
            f"{each.cosine:.8f}",
            "-" if each.gate is None else f"{each.gate:.1e}",
            _verdict(each),
        )
        for each in measured.pairs
        if each.operation == "expert"
    ]
    print_table(
        ("WEIGHTS", "ROWS", "A", "B", "CLASS A", "CLASS B", "MAX |D|", "REL L2", "COSINE", "GATE", ""), rows
    )


def _verdict(each: PairFigures) -> Cell:
    if each.passed is None:
        return Cell("no evidence")
    return Cell("passed", "green") if each.passed else Cell("out", "red")
