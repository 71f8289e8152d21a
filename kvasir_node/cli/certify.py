"""`certify`: what this machine's kernel really computes, and which ranks that makes it fit for."""

from __future__ import annotations

import importlib.metadata
import math
import re
import time
from pathlib import Path
from typing import Any, Final, cast, get_args

import click

from kvasir_node.bench.machine import describe_machine
from kvasir_node.certification.certify import Certification, CertifiedClass, certify_kernel
from kvasir_node.certification.crafted_weights import CRAFTED_TYPES
from kvasir_node.certification.probe import COLUMNS_MIN
from kvasir_node.certification.synthetic_model import ExpertShape, expert_shape_of, expert_types_of
from kvasir_node.cli.output import Cell, json_option, note, print_json, print_table, progress_on_stderr
from kvasir_node.cli.parameters import NonEmptyText, those_named
from kvasir_node.cli.session import CommandSession
from kvasir_node.kernel_in_use import kernel_in_use
from kvasir_node.kernels.choice import make_kernel
from kvasir_node.locations import Locations
from kvasir_node.model.model_manifest import build_manifest
from kvasir_node.model.store import DEMO_MODEL, ModelStore
from kvasir_proto.capability import BATCH_CLASSES
from kvasir_proto.errors import OutOfTolerance, UsageError
from kvasir_proto.limits import Kernel
from kvasir_proto.manifest import ModelManifest

SCHEMA_VERSION: Final = 1
_WIDTH_MAX: Final = 16384
_SHAPE: Final = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", re.ASCII)


@click.command()
@click.option(
    "--model",
    type=NonEmptyText(),
    help="The model whose shapes and weight types count: a name or a GGUF file. Default: the demo's.",
)
@click.option("--shape", metavar="N_EMBDxN_FF", help="Shapes of no model in particular, such as 3072x1024.")
@click.option(
    "--kernel", type=click.Choice(get_args(Kernel)), help="What is certified. Default: this home's kernel."
)
@click.option("--kernel-device", type=NonEmptyText(), help="OpenCL device: part of its name, or its number.")
@click.option("--threads", type=click.IntRange(1, 256), help="Threads that compute. Default: this home's.")
@click.option(
    "--weight-types",
    help=f"Weight types to look at, of {','.join(CRAFTED_TYPES)}. Default: all that the shape allows.",
)
@click.option("--batch-classes", help="Rows a call, of 1,8,32,64,512. Default: all.")
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Of the questions asked."
)
@json_option
@click.pass_obj
def certify(
    session: CommandSession,
    model: str | None,
    shape: str | None,
    kernel: str | None,
    kernel_device: str | None,
    threads: int | None,
    weight_types: str | None,
    batch_classes: str | None,
    seed: int,
    as_json: bool,
) -> None:
    """Measure what this machine's kernel computes: how it adds up, how it rounds, how far it is off.

    The result is this node's own word (claimed). Status 9 when a class of the model is out of tolerance,
    or is in a weight type that cannot be measured.
    """
    configuration = session.configure()
    if model is not None and shape is not None:
        raise UsageError("give one of --model and --shape")
    types = (
        CRAFTED_TYPES if weight_types is None else those_named(weight_types, CRAFTED_TYPES, "--weight-types")
    )
    classes = (
        BATCH_CLASSES
        if batch_classes is None
        else tuple(map(int, those_named(batch_classes, tuple(map(str, BATCH_CLASSES)), "--batch-classes")))
    )
    if shape is not None:
        widths, model_types = _shape_of(shape), () if weight_types is None else types
    else:
        manifest = _manifest_of(session.locations, model)
        widths, model_types = expert_shape_of(manifest), expert_types_of(manifest)
    name = cast("Kernel", kernel or configuration.engine_kernel)
    device = kernel_device or configuration.engine_kernel_device
    n_thread = threads or configuration.engine_threads
    in_use = kernel_in_use(name, device)
    started = time.monotonic()
    certification = certify_kernel(
        lambda manifest, shard, read: make_kernel(name, manifest, shard, read, n_thread, device),
        widths,
        model_types,
        other_types=types,
        batch_classes=classes,
        seed=seed,
        say=note,
    )
    document = {
        **_document(certification),
        "kernel": name,
        "device": in_use.device,
        "kernel_build": in_use.build,
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
        "threads": n_thread,
        "seed": seed,
        "seconds": round(time.monotonic() - started, 1),
        "machine": describe_machine(),
    }
    if as_json:
        print_json(document)
    else:
        _print_report(certification, document)
    if not all(each.passed for each in certification.model_classes):
        raise OutOfTolerance(f"out of tolerance: {certification.fit.reason}")
    if certification.not_probed:
        raise OutOfTolerance(f"not certified: {certification.fit.reason}")


def _shape_of(text: str) -> ExpertShape:
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise UsageError(f"--shape takes two widths such as 3072x1024, and not {text[:40]!r}")
    widths = ExpertShape(int(match[1]), int(match[2]))
    if not COLUMNS_MIN <= min(widths.n_embd, widths.n_ff) <= max(widths.n_embd, widths.n_ff) <= _WIDTH_MAX:
        raise UsageError(f"--shape takes widths from {COLUMNS_MIN} to {_WIDTH_MAX}")
    return widths


def _manifest_of(locations: Locations, model: str | None) -> ModelManifest:
    """What there is to know of a model. Raises `ModelUnusable`."""
    path = DEMO_MODEL if model is None else Path(model)
    if model is not None and path.suffix != ".gguf" and not path.exists():
        return ModelStore(locations.models).get(model).manifest
    with progress_on_stderr("reading the model") as progress:
        return build_manifest(path, progress)


def _finite(number: float) -> float | None:
    """JSON knows no infinity."""
    return number if math.isfinite(number) else None


def _document(certification: Certification) -> dict[str, Any]:
    fit = certification.fit
    return {
        "schema_version": SCHEMA_VERSION,
        "backend": certification.backend,
        "n_embd": certification.shape.n_embd,
        "n_ff": certification.shape.n_ff,
        "model_types": list(certification.model_types),
        "not_probed": list(certification.not_probed),
        "classes": [_class_document(each) for each in certification.classes],
        "accumulation": certification.accumulation,
        "fit": {"backbone": fit.backbone, "output": fit.output, "bulk": fit.bulk, "reason": fit.reason},
        "status": certification.status,
    }


def _class_document(each: CertifiedClass) -> dict[str, Any]:
    compared, sums = each.comparison, each.sums
    return {
        "weight_type": each.weight_type,
        "batch_class": each.batch_class,
        "activation": each.activation,
        "accumulator": sums.accumulator,
        "accumulation": sums.accumulation,
        "bits": sums.bits,
        "short_offsets": list(sums.short_offsets),
        "range": sums.range,
        "rounding": sums.rounding,
        "effective_bits": round(sums.effective_bits, 1),
        "weights_kept": each.weights_kept,
        "repeatable": each.repeatable,
        "batch_invariant": each.batch_invariant,
        "in_reference_class": each.in_reference_class,
        "rows": compared.n_rows,
        "rows_flipped": None if each.flips is None else each.flips.flipped,
        "rel_l2": _finite(compared.rel_l2),
        "max_abs": _finite(compared.max_abs),
        "slope": _finite(compared.slope),
        "gate": compared.gate,
        "passed": each.passed,
        "reason": each.reason,
    }


def _print_report(certification: Certification, document: dict[str, Any]) -> None:
    machine = document["machine"]
    click.echo(
        f"{certification.backend} on {machine['cpu']}, {document['threads']} threads, n_embd "
        f"{certification.shape.n_embd}, n_ff {certification.shape.n_ff}, seed {document['seed']}, "
        f"{document['seconds']} s\nkernel {document['kernel']} on {document['device']}, build "
        f"{document['kernel_build']}, llama-cpp-python {document['llama_cpp_python']}\n"
    )
    rows = [
        (
            each.weight_type,
            each.batch_class,
            each.activation,
            each.sums.accumulator,
            f"{each.sums.effective_bits:.1f}",
            "yes" if each.repeatable else "no",
            "yes" if each.batch_invariant else "no",
            f"{each.comparison.rel_l2:.1e}",
            "-" if each.comparison.gate is None else f"{each.comparison.gate:.1e}",
            Cell("passed", "green") if each.passed else Cell("out", "red"),
        )
        for each in certification.classes
    ]
    headings = ("WEIGHTS", "ROWS", "ROWS AS", "SUMS", "BITS", "REPEATS", "ALIKE", "REL L2", "GATE", "")
    print_table(headings, rows)
    fit = certification.fit
    ranks = [rank for rank in ("backbone", "output", "bulk") if getattr(fit, rank)]
    click.echo(f"\nThe model's experts are in {', '.join(certification.model_types)}. ", nl=False)
    click.echo(f"Fit for {', '.join(ranks) or 'nothing'}, by its own word ({certification.status}).")
    rows_a_call = sorted({each.batch_class for each in certification.classes})
    if rows_a_call != sorted(BATCH_CLASSES):
        click.echo(f"Only calls of {', '.join(map(str, rows_a_call))} rows were looked at.")
    if fit.reason:
        click.echo(f"{fit.reason}.")
    if certification.not_probed:
        click.echo("Where a swarm takes its members' word, this node serves with accumulation UNKNOWN.")
