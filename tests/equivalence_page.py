"""`python -m tests.equivalence_page`: measures every pair of backends that is here, for a page of the docs.

Rewrites what lies between two marks of docs/reference/equivalence.md, and nothing else: for each shape,
weight type and batch class a table of relative L2 between all backends, whole experts of noise, 64 rows.
`--quick` measures one small shape and prints it. Exit status 1 when a pair is outside its gate.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvasir_node.bench.machine import describe_machine
from kvasir_node.certification.synthetic_model import ExpertShape
from kvasir_node.cli.measure_operations import class_text, published_document
from kvasir_node.cli.output import note
from kvasir_node.measure.backends_here import Backend, backends_here
from kvasir_node.measure.operations import (
    OperationsMeasurement,
    OperationsSettings,
    PairFigures,
    measure_operations,
)
from kvasir_node.measure.published import PUBLISHED_SHAPE, PUBLISHED_USED

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "equivalence.md"
BEGIN = "<!-- begin: python -m tests.equivalence_page -->"
END = "<!-- end -->"
TYPES = ("f32", "f16", "bf16", "q8_0")
SETTINGS = (
    OperationsSettings(ExpertShape(256, 128), 4, TYPES, (1, 8, 64)),
    OperationsSettings(ExpertShape(512, 256), 4, ("q4_K",), (1, 8, 64)),
    OperationsSettings(ExpertShape(*PUBLISHED_SHAPE), PUBLISHED_USED, ("f16", "q8_0", "q4_K"), (64,)),
)
SLOW_WHEN_WIDE = ("emulated-f16", "ggml-neon-v8.0", "ggml-neon-v8.6")
"""A quarter of an hour each at the published width: left out there."""
WIDE = 2048
QUICK = (OperationsSettings(ExpertShape(128, 64), 2, ("q8_0",), (8,)),)


ABOUT = """
    `python -m tests.equivalence_page`, {day}, {cpu}, {seconds} s beside other work. Whole gated experts of
    noise, 64 rows, some with outliers: relative L2 between every two backends that were here, the row's
    number beside the column's. **Bold**: one class, inside its gate. Struck through: outside. Plain: no gate;
    it is a distance between two arithmetics, or of sums that are not F32, and no evidence of anything. The
    class is what the probe found, not what a backend says of itself. Of {n_pair} comparisons (five operations
    each) {n_gated} have a gate, and {n_out} are outside.
"""
ORIGIN = """
    Emulated, in numpy or by rounding after each step: {emulated}. All others are real code; ARM runs under
    qemu-user, which computes every instruction to the last bit.
"""
BESIDE = """
    Qwen3.5-122B, layer 0, n_embd 3072, n_ff 1024, 8 of 256 experts; ours with noise in the same shape, the
    weighted sum of the 8 experts that a token uses. Their relative L2 is what their cosine says; a max
    &#124;Δ&#124; can only be read beside the outputs' rms, which is not published.
"""


def folded(text: str) -> list[str]:
    """A paragraph as lines of a page."""
    return textwrap.wrap(" ".join(text.split()), 165, break_long_words=False, break_on_hyphens=False)


def cell(pair: PairFigures) -> str:
    """A distance, in bold where it has a gate and is inside, struck through where it is outside."""
    text = f"{pair.rel_l2:.0e}".replace("e-0", "e-").replace("e+0", "e+")
    text = "0" if pair.rel_l2 == 0 else text
    if pair.passed is None:
        return text
    return f"**{text}**" if pair.passed else f"~~{text}~~"


def table(measured: OperationsMeasurement, weight_type: str, batch_class: int) -> list[str]:
    """All backends with these weights, each beside each, with the class that the probe found."""
    pairs = {
        (each.a, each.b): each
        for each in measured.pairs
        if (each.operation, each.weight_type, each.batch_class) == ("expert", weight_type, batch_class)
    }
    names = [each.name for each in measured.backends if weight_type in each.weight_types]
    classes = {
        each.backend: class_text(each.arithmetic)
        for each in measured.classes
        if (each.weight_type, each.batch_class) == (weight_type, batch_class)
    }
    lines = [f"| backend | class | {' | '.join(str(number) for number in range(1, len(names)))} |"]
    lines.append("| --- " * (len(names) + 1) + "|")
    for index, name in enumerate(names):
        found = [cell(pairs[other, name]) for other in names[:index]]
        found += [""] * (len(names) - 1 - len(found))
        lines.append(f"| {index + 1} {name} | {classes.get(name, '?')} | {' | '.join(found)} |")
    return lines


def section(measured: OperationsMeasurement) -> list[str]:
    """One shape."""
    settings = measured.settings
    shape = settings.shape
    gates = {
        (each.weight_type, class_text(each.class_a)): each.gate
        for each in measured.pairs
        if each.operation == "expert" and each.gate is not None and each.class_a == each.class_b
    }
    lines = [f"### n_embd {shape.n_embd}, n_ff {shape.n_ff}", ""]
    told = [f"{kind} with {weights.upper()} weights {gate:.1e}" for (weights, kind), gate in gates.items()]
    lines += [f"Gates: {'; '.join(told)}.", ""]
    for weight_type in settings.weight_types:
        for batch_class in settings.batch_classes:
            rows = "row" if batch_class == 1 else "rows"
            lines += [f"{weight_type.upper()} weights, {batch_class} {rows} a call:", ""]
            lines += [*table(measured, weight_type, batch_class), ""]
    missing = [f"{each.name} ({each.missing})" for each in measured.backends if each.missing]
    return lines + ([f"Not measured: {'; '.join(missing)}.", ""] if missing else [])


def beside_published(measured: OperationsMeasurement) -> list[str]:
    """The published lines with ours."""
    figures = ("max &#124;Δ&#124;", "rel. L2", "cosine")
    head = ("published pair", *figures, "our pair, weights", figures[0], "rms", *figures[1:], "what differs")
    lines = [
        "### Beside published figures",
        "",
        *folded(BESIDE),
        "",
        f"| {' | '.join(head)} |",
        "| --- " * len(head) + "|",
    ]
    for each in published_document(measured):
        ours = each["ours"]
        theirs = [
            "" if each[name] is None else f"{each[name]:{form}}"
            for name, form in (("max_abs", ".1e"), ("rel_l2", ".1e"), ("cosine", ".5f"))
        ]
        mine = ["", "", "", "", ""]
        if ours is not None:
            mine = [
                f"{ours['a']}, {ours['b']}, {ours['weight_type'].upper()}",
                f"{ours['max_abs']:.1e}",
                f"{ours['rms']:.1f}",
                f"{ours['rel_l2']:.1e}",
                f"{ours['cosine']:.7f}",
            ]
        lines.append(f"| {each['pair']} | {' | '.join((*theirs, *mine))} | {each['explanation']} |")
    return [*lines, ""]


def page_of(measurements: Sequence[OperationsMeasurement], seconds: float) -> str:
    """Everything between the marks."""
    machine = describe_machine()
    emulated = sorted({each.name for found in measurements for each in found.backends if each.emulated})
    n_gated = sum(each.passed is not None for found in measurements for each in found.pairs)
    n_out = sum(len(found.failed) for found in measurements)
    n_pair = sum(len(found.pairs) for found in measurements)
    about = ABOUT.format(
        day=f"{datetime.now(UTC):%d %B %Y}",
        cpu=machine["cpu"],
        seconds=round(seconds),
        n_pair=n_pair,
        n_gated=n_gated,
        n_out=n_out,
    )
    origin = ORIGIN.format(emulated=", ".join(emulated))
    lines = ["## Every pair that was measured", "", *folded(about), "", *folded(origin), ""]
    for measured in measurements:
        lines += section(measured)
    widest = measurements[-1]
    if (widest.settings.shape.n_embd, widest.settings.shape.n_ff) == PUBLISHED_SHAPE:
        lines += beside_published(widest)
    return "\n".join(lines)


def chosen(here: Sequence[Backend], settings: OperationsSettings) -> list[Backend]:
    """Those that can be measured in minutes at this shape."""
    is_wide = settings.shape.n_embd > WIDE
    return [each for each in here if not (is_wide and each.name in SLOW_WHEN_WIDE)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small shape, printed and not written")
    options = parser.parse_args()
    started = time.monotonic()
    here = backends_here(say=note)
    measurements: list[OperationsMeasurement] = []
    for settings in QUICK if options.quick else SETTINGS:
        measurements.append(measure_operations(chosen(here, settings), settings, note))
        text = page_of(measurements, time.monotonic() - started)
        if not options.quick:
            # After each shape, so that what was measured stays when the next takes too long.
            before, _, rest = PAGE.read_text().partition(BEGIN)
            _, _, after = rest.partition(END)
            PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
    if options.quick:
        sys.stdout.write(text)
    return 1 if any(found.failed for found in measurements) else 0


if __name__ == "__main__":
    sys.exit(main())
