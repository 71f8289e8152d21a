"""`python -m tests.shapes` (make shapes): every architecture's expert sub-graph through the hook, as a table.

Makes each model of `architecture_models`, decodes a prompt and single tokens with plain llama.cpp and with
the hook over three workers, and prints what the sub-graph is, how often the hook was called in a ubatch, and
whether every number came out the same. Exit status 1 when one did not.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

import numpy as np

from kvasir_node.backbone.hook import LayerCall
from kvasir_node.model.backbone_file import write_backbone_file
from kvasir_node.model.model_manifest import build_manifest
from kvasir_proto.program import ExpertProgram, GluKind, StepOp, UnaryKind
from tests.architecture_models import (
    ARCHITECTURES,
    ONE_OF_EACH_SHAPE,
    SHAPES,
    ArchitectureModel,
    make_architecture,
)
from tests.model_makers import file_types, quantise
from tests.node.hooked_llama import InProcessWorkers, Llama, Rows, hooked, shards_of

N_UBATCH: Final = 64
N_WORKER: Final = 3
CHUNKS: Final = (70, 1, 1, 9, 1, 1)  # the first is two ubatches, the last of them 6 tokens
N_UBATCHES: Final = 7
_TOKENS: Final = tuple(int(each) for each in np.random.default_rng(5).integers(0, 95, sum(CHUNKS)))


@dataclass(frozen=True)
class ShapeRun:
    """What was seen of one model.

    `called_layers` are the hook's calls in order, `summed_layers` those that asked for sums, `spread` is the
    standard deviation of what plain llama.cpp computes, `delta` the largest difference of any two numbers
    that should be equal.
    """

    moe_layers: tuple[int, ...]
    called_layers: tuple[int, ...]
    summed_layers: tuple[int, ...]
    n_ubatches: int
    programs: tuple[ExpertProgram, ...]
    n_expert: int
    n_expert_used: int
    largest_id: int
    spread: float
    delta: float

    @property
    def steps(self) -> tuple[str, ...]:
        """What the programs do, each once."""
        return tuple(sorted({describe(program) for program in self.programs}))

    @property
    def calls_per_ubatch(self) -> float:
        """How often the hook was called in one ubatch."""
        return len(self.called_layers) / self.n_ubatches


def run_model(
    path: Path,
    model: ArchitectureModel,
    *,
    n_worker: int = N_WORKER,
    sums: bool = False,
    spoil: Callable[[LayerCall], None] | None = None,
) -> ShapeRun:
    """Decode with plain llama.cpp and with the hook over `n_worker` workers.

    `sums`: ask for weighted sums in every layer. `spoil` may change what the workers answered before
    llama.cpp sees it. Raises `AssertionError`, with the reason that the hook has, where one of the two
    decodes fails.
    """
    manifest = build_manifest(path)
    backbone = path.with_suffix(".backbone")
    if not backbone.exists():
        write_backbone_file(path, manifest, backbone)
    chunks = CHUNKS if model.memory != "none" else (N_UBATCH,)
    tokens = _TOKENS[: sum(chunks)]
    embeddings = not model.has_logits
    with Llama(path, n_ubatch=N_UBATCH, flash_attention=True, embeddings=embeddings) as llama:
        expected = llama.run(tokens, chunks)
    workers = _WatchedWorkers(path, manifest, shards_of(manifest, n_worker))
    workers.spoil = spoil
    hook = hooked(workers, manifest.moe_layers if sums else ())
    try:
        with Llama(backbone, hook, n_ubatch=N_UBATCH, flash_attention=True, embeddings=embeddings) as llama:
            try:
                rows = llama.run(tokens, chunks)
            except AssertionError as error:
                raise AssertionError(f"{error}: {hook.take_failure()}") from error
        if hook.calls != len(workers.layers) or hook.rows_unfilled_total:
            raise AssertionError("the hook and the workers do not agree on what was computed")
        return ShapeRun(
            moe_layers=manifest.moe_layers,
            called_layers=tuple(workers.layers),
            summed_layers=tuple(workers.summed_layers),
            n_ubatches=N_UBATCHES if len(chunks) > 1 else 1,
            programs=tuple(hook.programs),
            n_expert=manifest.n_expert,
            n_expert_used=manifest.n_expert_used,
            largest_id=workers.largest_id,
            spread=float(expected.std()),
            delta=_largest_difference(rows, expected),
        )
    finally:
        workers.close()
        hook.close()


def describe(program: ExpertProgram) -> str:
    """The steps of a program in the words of `SHAPES`."""
    words = []
    for step in program.steps:
        match step.op:
            case StepOp.EXPERT_MATMUL:
                name = step.tensor.removeprefix("ffn_").removesuffix("_exps.weight")
                words.append(name + ("!" if any(step.words()) else ""))
            case StepOp.GLU:
                words.append(GluKind(step.words()[0]).name.lower())
            case StepOp.UNARY:
                words.append(UnaryKind(step.words()[0]).name.lower())
            case _:
                words.append(
                    {StepOp.EXPERT_ADD: "bias", StepOp.EXPERT_SCALE: "scale"}.get(
                        step.op, step.op.name.lower()
                    )
                )
    return " ".join(words) + (", a row for each slot" if program.input_per_slot else "")


class _WatchedWorkers(InProcessWorkers):
    """Workers that remember the largest expert they were asked for."""

    largest_id = -1
    spoil: Callable[[LayerCall], None] | None = None

    def __call__(self, call: LayerCall) -> None:
        ids = (ctypes.c_int32 * (call.n_tokens * call.n_slots)).from_address(call.ids_address)
        self.largest_id = max(self.largest_id, *ids)
        super().__call__(call)
        if self.spoil is not None:
            self.spoil(call)


def _largest_difference(rows: Rows, expected: Rows) -> float:
    """Infinite where one has a number and the other none."""
    if not np.isfinite(expected).all():
        raise AssertionError("plain llama.cpp itself computes no finite numbers")
    return float(np.abs(rows - expected).max()) if np.isfinite(rows).all() else float("inf")


_HEADINGS: Final = ("shape", "architecture", "weights", "experts", "calls/ubatch", "largest id", "result")
_WIDTHS: Final = (21, 15, 7, 9, 12, 10, 8)


def main(arguments: Sequence[str] | None = None, table: TextIO = sys.stdout) -> int:
    """Write the table; 1 when a model is not exact, or not what its row says."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.shapes",
        description="Run every architecture's expert sub-graph through the hook and compare.",
    )
    parser.add_argument("pattern", nargs="?", default="", help="only names that it matches")
    parser.add_argument("--one", action="store_true", help="one model of each shape only")
    parser.add_argument("--type", default="F32", help="F32, or what llama.cpp quantises to (Q8_0, Q4_K_M)")
    parser.add_argument("--workers", type=int, default=N_WORKER, help="over how many the experts are dealt")
    parser.add_argument("--keep", type=Path, metavar="DIRECTORY", help="leave the models there")
    options = parser.parse_args(arguments)
    models = ONE_OF_EACH_SHAPE.values() if options.one else ARCHITECTURES
    if options.type not in file_types():
        parser.error(f"--type {options.type}: llama.cpp quantises to {', '.join(file_types())}")
    try:
        chosen = [each for each in models if re.search(options.pattern, each.name)]
    except re.error as error:
        parser.error(f"{options.pattern!r} is no pattern: {error}")
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    _write(table, _HEADINGS)
    n_bad = 0
    with tempfile.TemporaryDirectory(prefix="kvasir-shapes-") as scratch:
        for model in chosen:
            line = _line_of(model, options.keep or Path(scratch), options.type, options.workers)
            n_bad += line[-1] != "exact"
            _write(table, line)
            for file in Path(scratch).iterdir():
                file.unlink()
    n_shape = len({each.shape for each in chosen})
    n_architecture = len({each.architecture for each in chosen})
    seconds = time.monotonic() - started
    table.write(
        f"{len(chosen)} models of {n_architecture} architectures in {n_shape} shapes: "
        f"{len(chosen) - n_bad} exact, {n_bad} not; {seconds:.0f} s\n"
    )
    return 1 if n_bad or not chosen else 0


def _line_of(model: ArchitectureModel, directory: Path, type_name: str, n_worker: int) -> tuple[str, ...]:
    """One model's line of the table."""
    names = (model.shape, model.architecture, type_name)
    try:
        run = run_model(make_model(directory, model, type_name), model, n_worker=n_worker)
    except AssertionError as error:
        return (*names, "", "", "", str(error))
    result = "exact" if run.delta == 0.0 else f"{run.delta:.1e}"
    if run.steps != (SHAPES[model.shape],):
        result = f"another shape: {' | '.join(run.steps)}"
    return (
        *names,
        f"{run.n_expert_used} of {run.n_expert}",
        f"{run.calls_per_ubatch:g} of {len(run.moe_layers)}",
        str(run.largest_id),
        result,
    )


def make_model(directory: Path, model: ArchitectureModel, type_name: str) -> Path:
    """The model's file, made unless it is there; quantised, with experts wide enough for a K-quant."""
    path = directory / f"{model.name}-{type_name}.gguf"
    if path.exists():
        return path
    if type_name == "F32":
        return make_architecture(path, model)
    source = make_architecture(directory / f"{model.name}-wide.gguf", model, n_ff=256)
    quantise(source, path, type_name)
    source.unlink()
    return path


def _write(table: TextIO, cells: Sequence[str]) -> None:
    line = "  ".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
    table.write(line.rstrip() + "\n")
    table.flush()


if __name__ == "__main__":
    sys.exit(main())
