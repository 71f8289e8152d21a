"""The report as one HTML page: no request to anywhere, light and dark, readable on a phone.

Decides what is shown in which order and in which words. Everything comes from the report's document, the same
that is written as JSON, so that the page can say nothing that the JSON does not. It refuses to measure.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvasir_node.measure.plots import comparator_plot, interval_plot, line_plot, value_plot
from kvasir_node.small_file import read_small_file

Document = dict[str, Any]

_STYLE: Final = Path(__file__).parents[1] / "data" / "report.css"
_STYLE_BYTES_MAX: Final = 1 << 20


def render_page(document: Document) -> str:
    """The whole page. `document` is what `report.json` holds."""
    sections = (
        _head(document),
        _comparator(document),
        _pairs(document),
        _published(document),
        _drift(document),
        _logits(document),
        _decisions(document),
        _generation(document),
        _task(document),
        _authority(document),
        _causes(document),
    )
    style = read_small_file(_STYLE, _STYLE_BYTES_MAX).decode()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Kvasir: numerical equivalence</title><style>{style}</style>"
        "</head><body>"
        f"{''.join(sections)}</body></html>\n"
    )


def _head(document: Document) -> str:
    machine, model = document["machine"], document["model"]
    failed = [each for each in document["pairs"] if each["passed"] is False]
    gated = [each for each in document["pairs"] if each["passed"] is not None]
    verdict = (
        f'<span class="good">all {len(gated)} pairs of one arithmetic are inside their gate</span>'
        if not failed
        else f'<span class="bad">{len(failed)} of {len(gated)} pairs are outside their gate</span>'
    )
    return (
        "<h1>How far backends are from each other</h1>"
        f"<p>{_text(model['name'])}, {_text(machine['cpu'])}, {_text(document['made'])}; "
        f"{document['seconds']} s. In short: {verdict}.</p>"
        '<p class="dim">A pair of backends that do the same arithmetic (rows taken in one format, sums '
        "kept in F32) has a gate. Between two arithmetics a distance is no evidence, and is only shown.</p>"
    )


def _comparator(document: Document) -> str:
    parts = ["<h2>Outputs over each other</h2>"]
    for shown in document["per_op"]["shown"]:
        names = (
            f"{shown['weight_type']} weights, one expert, the first {len(shown['values'])} values of a row"
        )
        parts.append(
            value_plot(
                {
                    name: [a + b * shown["rms"] for a, b in zip(shown["values"], row, strict=True)]
                    for name, row in shown["deviations"].items()
                },
                x_label="value of the row",
                y_label="output",
                description=f"{names}: every backend's outputs, one over the other.",
            )
        )
        classes = shown["classes"]
        exact = classes[shown["exact"]]
        outside = [
            name
            for name in shown["deviations"]
            if name not in classes
            or any(classes[name][part] != exact[part] for part in ("activation", "accumulation"))
        ]
        parts.append(
            comparator_plot(
                shown["deviations"],
                shown["band"],
                outside=outside,
                threshold=1e-7,
                x_label="value of the row",
                y_label="distance / rms",
                description=(
                    f"{names}: distance from {shown['exact']}, in units of the row's size. The band is the "
                    f"gate of its class, rows in {exact['activation']} and sums in {exact['accumulation']}. "
                    f"Full dots, {len(shown['deviations']) - len(outside)} backends, are of that class; "
                    "hollow ones are of others, and lie outside without being wrong. Where one rounds its "
                    "class as another processor does, the gate between the two is four times as wide."
                ),
            )
        )
    return "".join(parts)


def _pairs(document: Document) -> str:
    rows = [
        (
            each["weight_type"],
            each["batch_class"],
            each["a"],
            each["b"],
            each["class_a"],
            "same" if each["same_class"] else each["class_b"],
            _e(each["max_abs"]),
            _e(each["rel_l2"]),
            f"{each['cosine']:.8f}",
            _e(each["gate"]),
            _passed(each["passed"]),
        )
        for each in document["pairs"]
        if each["operation"] == "expert"
    ]
    backends = [
        (
            each["name"],
            "yes" if each["emulated"] else "no",
            ", ".join(each["weight_types"]),
            each["missing"] or "",
        )
        for each in document["per_op"]["backends"]
    ]
    return (
        "<h2>Per-op delta</h2>"
        f"<p>n_embd {document['per_op']['n_embd']}, n_ff {document['per_op']['n_ff']}; whole experts of "
        "noise, 64 rows. Other operations are in report.json.</p>"
        + _table(("backend", "emulated", "weights", "missing"), backends)
        + _table(
            ("weights", "rows", "a", "b", "class a", "class b", "max |Δ|", "rel L2", "cosine", "gate", ""),
            rows,
        )
    )


def _published(document: Document) -> str:
    rows = []
    for each in document["published"]:
        ours = each["ours"]
        rows.append(
            (
                each["pair"],
                _e(each["max_abs"]),
                _e(each["rel_l2"]),
                "" if each["cosine"] is None else f"{each['cosine']:.6f}",
                "" if ours is None else f"{ours['a']}, {ours['b']}, {ours['weight_type']}",
                "" if ours is None else _e(ours["max_abs"]),
                "" if ours is None else _e(ours["rms"]),
                "" if ours is None else _e(ours["rel_l2"]),
                "" if ours is None else f"{ours['cosine']:.6f}",
                each["explanation"],
            )
        )
    return (
        "<h2>Beside published figures</h2><p>Qwen3.5-122B, layer 0: n_embd 3072, n_ff 1024, 8 of 256 "
        "experts; ours with noise, the 8 experts that a token uses. Their relative L2 is what their cosine "
        "says. Their max |Δ| is of outputs of another size: the rms beside ours is needed to read it.</p>"
        + _table(
            (
                *("published pair", "their max |Δ|", "their rel L2", "their cosine", "our pair, weights"),
                *("our max |Δ|", "our rms", "our rel L2", "our cosine", "what differs"),
            ),
            rows,
        )
    )


def _drift(document: Document) -> str:
    series = {
        each["run"]: [(layer["layer"], layer["undisturbed_rel_l2"] or 0.0) for layer in each["layers"]]
        for each in document["layer_drift"]
    }
    rows = [
        (
            each["run"],
            *(
                f"{each[law]['exponent']:.2f} ± {each[law]['residual']:.2f}" if each[law] else ""
                for law in ("best", "as_root", "as_layers")
            ),
            _e(each["layers"][-1]["rel_l2"]),
            f"{each['layers'][-1]['undisturbed']} of {each['layers'][-1]['positions']}",
        )
        for each in document["layer_drift"]
    ]
    return (
        "<h2>Layer-boundary drift</h2>"
        + line_plot(
            series,
            x_label="layer",
            y_label="relative L2",
            description="Distance of hidden states from llama.cpp alone, where no router disagreed so far.",
        )
        + _table(
            (
                "run",
                "best exponent",
                "as √layers",
                "as layers",
                "at the end, all tokens",
                "same experts throughout",
            ),
            rows,
        )
        + '<p class="dim">Behind ± is what a law leaves unexplained, in factors of e.</p>'
    )


def _logits(document: Document) -> str:
    found = document["logits"]
    rows = [
        (
            each["run"],
            each["positions"],
            _e(each["logits"]["max_abs_delta"]),
            f"{each['logits']['mean_kld']:.2e}",
            _between(each["logits"]["mean_kld_95"]),
            _e(each["logits"]["kld_99"]),
            f"{100 * each['logits']['top1_agreement']:.2f} %",
            _passed(each["passed"]),
        )
        for each in found
    ]
    return (
        "<h2>End-to-end logits</h2>"
        + interval_plot(
            [
                (
                    each["run"],
                    100 * each["logits"]["top1_95"]["low"],
                    100 * each["logits"]["top1_agreement"],
                    100 * each["logits"]["top1_95"]["high"],
                )
                for each in found
            ],
            limit=100 * document["thresholds"]["top1_agreement_min"],
            x_label="same top token, %",
            description="Positions with the same most likely token as llama.cpp alone, with 95 % intervals.",
        )
        + _table(
            ("run", "positions", "max |Δ|", "mean KLD", "95 %", "99 % KLD", "same top", "tolerance"), rows
        )
    )


def _decisions(document: Document) -> str:
    rows = [
        (
            each["run"],
            f"{each['decisions_disagreeing']} of {each['decisions']}",
            f"{100 * each['disagreement']:.3f} %",
            f"{100 * each['disagreement_95']['low']:.2f} to {100 * each['disagreement_95']['high']:.2f} %",
            each["tokens_disagreeing"],
            each["tokens_borderline"],
            _e(max(layer["largest_margin"] for layer in each["layers"])),
        )
        for each in document["decisions"]
    ]
    return "<h2>Decision agreement</h2>" + _table(
        ("run", "other expert set", "share", "95 %", "tokens", "borderline tokens", "widest margin turned"),
        rows,
    )


def _generation(document: Document) -> str:
    rows = [
        (
            each["run"],
            f"{each['identical']} of {len(each['prompts'])}",
            f"{100 * each['identical_95']['low']:.0f} to {100 * each['identical_95']['high']:.0f} %",
            f"{100 * each['mean_agreement']:.1f} %",
            "" if each["earliest_divergence"] is None else each["earliest_divergence"],
        )
        for each in document["generation"]
    ]
    return "<h2>Generation stability</h2>" + _table(
        ("run", "identical texts", "95 %", "same before the first difference", "earliest difference"), rows
    )


def _task(document: Document) -> str:
    rows = []
    for each in document["task"]:
        logits, cloze = each["logits"], each["cloze"]
        change = logits["perplexity_change_95"]
        rows.append(
            (
                each["run"],
                f"{logits['base_perplexity']:.3f}",
                f"{logits['run_perplexity']:.3f}",
                f"{100 * logits['perplexity_change']:+.4f} %",
                f"{100 * change['low']:+.4f} to {100 * change['high']:+.4f} %",
                "" if cloze is None else f"{cloze['run']['right']} of {cloze['run']['items']}",
                "" if cloze is None else f"{100 * cloze['delta']:+.2f} points",
            )
        )
    return "<h2>Task level</h2>" + _table(
        ("run", "perplexity of base", "perplexity", "change", "95 %", "cloze: right", "change"), rows
    )


def _authority(document: Document) -> str:
    about = (
        "<h2>Router authority</h2><p>Two nodes with different kernels. <em>Apart</em>: each by itself. "
        "<em>In step</em>: a router each, rows exchanged; a row that the other's router did not choose is "
        "missing. <em>Pinned</em>: one router.</p>"
    )
    parts = [about]
    for each in document["authority"]:
        inside = [
            (
                name,
                f"{found['decisions_disagreeing']} of {found['decisions']}",
                "" if found["choices"] is None else found["choices"]["tokens_borderline"],
                f"{found['rows_missing']} of {found['rows']}" if found["rows"] else "",
                "" if found["logits"] is None else _e(found["logits"]["mean_kld"]),
                "" if found["first_divergent_token"] is None else found["first_divergent_token"],
            )
            for name, found in (
                ("apart", each["apart"]),
                ("in step", each["in_step"]),
                ("pinned", each["pinned"]),
            )
        ]
        outside = [
            (
                name,
                _e(found["mean_kld"]),
                f"{100 * found['top1_agreement']:.2f} %",
                f"{100 * (found['perplexity_change'] or 0):+.3f} %",
                each["outside_choices"][name]["decisions_disagreeing"],
            )
            for name, found in each["outside"].items()
        ]
        parts += [
            f"<h3>{_text(each['a'])} and {_text(each['b'])}, {each['positions']} positions</h3>",
            _table(
                (
                    "inside",
                    "other set",
                    "borderline tokens",
                    "rows missing",
                    "KLD between",
                    "first other token",
                ),
                inside,
            ),
            _table(("beside llama.cpp alone", "mean KLD", "same top", "perplexity", "other set"), outside),
        ]
    return "".join((*parts, _swarms(document)))


def _swarms(document: Document) -> str:
    rows = []
    for each in document["swarms"]:
        inside, choices = each["pinned"], each["outside_choices"]
        rows.append(
            (
                each["swarm"],
                f"{inside['decisions_disagreeing']} of {inside['decisions']}",
                f"{inside['rows_missing']} of {inside['rows']}",
                f"{choices['decisions_disagreeing']} of {choices['decisions']}",
                _e(each["outside"]["mean_kld"]),
                f"{100 * each['outside']['top1_agreement']:.2f} %",
            )
        )
    if not rows:
        return ""
    about = (
        "<h3>Swarms as they run</h3><p>Real processes with one router, the backbone's. Inside: what holders "
        "were asked for, beside what it chose. Outside: its choices and logits beside llama.cpp alone; that "
        "is drift, and no disagreement.</p>"
    )
    headings = ("swarm", "inside: other set", "rows missing", "outside: other set", "mean KLD", "same top")
    return about + _table(headings, rows)


def _causes(document: Document) -> str:
    about = (
        "<h2>Why they differ</h2><p>Each reason alone, in numpy, on products of 3,072 columns. "
        "Figures are relative L2: beside the exact sums, or the two that a line names beside each other; "
        "where a line says so, a share or a number.</p>"
    )
    parts = [about]
    for each in document["causes"]:
        figures = [(name, f"{value:.3g}") for name, value in each["figures"]]
        parts.append(
            f"<h3>{_text(each['name'])}</h3><p>{_text(each['explanation'])}</p>"
            + _table(("measured here", ""), figures)
            + "<details><summary>the code that measured it</summary>"
            + f"<pre>{_text(each['code'])}</pre></details>"
        )
    return "".join(parts)


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{_text(each)}</th>" for each in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{each if _is_markup(each) else _text(each)}</td>" for each in row) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


class _Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def _is_markup(value: object) -> bool:
    return isinstance(value, _Markup)


def _passed(value: bool | None) -> _Markup:
    if value is None:
        return _Markup("no evidence")
    return _Markup('<span class="good">passed</span>' if value else '<span class="bad">out</span>')


def _between(interval: dict[str, float]) -> str:
    return f"{interval['low']:.1e} to {interval['high']:.1e}"


def _e(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _text(value: object) -> str:
    return html.escape(str(value))
