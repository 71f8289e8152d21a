"""The report: plots put numbers where they belong, and the page needs nothing from anywhere."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvasir_node.measure.plots import HEIGHT, WIDTH, comparator_plot, interval_plot, line_plot, value_plot
from tests.node.cli.invocation import call

_VOID = {"meta", "circle", "line", "polyline", "rect"}


class Balance(HTMLParser):
    """Which elements are open, and every attribute that could fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def svg_of(figure: str) -> ElementTree.Element:
    """The plot, which must be well formed."""
    return ElementTree.fromstring(figure[figure.index("<svg") : figure.index("</svg>") + 6])


def points_of(line: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.attrib["points"].split())]


def test_lines_lie_on_a_logarithmic_axis() -> None:
    figure = line_plot(
        {"a": [(0, 1e-6), (1, 1e-4), (2, 1e-2)], "b<": [(0, 0.0), (1, 1e-4)]},
        x_label="layer",
        y_label="error",
        description="a & b",
    )
    first, second = (points_of(each) for each in svg_of(figure).iter("polyline"))
    assert first[1][1] - first[0][1] == pytest.approx(first[2][1] - first[1][1], abs=0.2)
    assert first[0][1] > first[2][1], "larger is higher"
    assert len(second) == 1, "a value that is not above zero has no place"
    assert second[0] == pytest.approx(first[1])
    assert "a &amp; b" in figure
    assert "b&lt;" in figure
    assert "nothing to show" in line_plot({"a": [(0, 0.0)]}, x_label="", y_label="", description="d")


def test_the_band_is_as_wide_as_the_gate_and_zero_is_in_the_middle() -> None:
    figure = comparator_plot(
        {"exact": [0.0, 0.0], "near": [1e-5, -1e-5], "far": [1e-2, math.inf]},
        1e-4,
        outside=("far",),
        threshold=1e-7,
        x_label="",
        y_label="",
        description="d",
    )
    svg = svg_of(figure)
    (band,) = svg.iter("rect")
    upper = float(band.attrib["y"])
    lower = upper + float(band.attrib["height"])
    exact, near, far = (
        [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in each.iter("circle")]
        for each in svg.iter("g")
    )
    middle = exact[0][1]
    assert middle == pytest.approx((upper + lower) / 2, abs=0.2)
    assert upper < near[0][1] < middle < near[1][1] < lower
    assert exact[0][0] < near[0][0] < far[0][0] < near[1][0], "equal dots hide none"
    kinds = [each.attrib["class"] for each in svg.iter("g")]
    assert kinds == ["dots s0", "dots s1", "open s2"], "what is of another class is hollow"
    assert 'class="key open s2">far' in figure
    assert far[0][1] < upper
    assert len(far) == 1
    assert all(0 <= y <= HEIGHT for _, y in (*near, *far))


def test_values_and_intervals_keep_their_order() -> None:
    (line,) = svg_of(value_plot({"a": [1.0, 3.0, 2.0]}, x_label="", y_label="", description="d")).iter(
        "polyline"
    )
    ys = [y for _, y in points_of(line)]
    assert ys[1] < ys[2] < ys[0]
    figure = interval_plot(
        [("a", 1.0, 2.0, 3.0), ("b", 2.0, 4.0, 5.0)], limit=4.5, x_label="", description="d"
    )
    circles = [float(each.attrib["cx"]) for each in svg_of(figure).iter("circle")]
    lines = [each for each in svg_of(figure).iter("line") if each.attrib["class"] == "limit"]
    assert circles[0] < circles[1] < float(lines[0].attrib["x1"]) <= WIDTH


@pytest.mark.slow
def test_a_report_of_the_demo_model_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = call(
        *("measure", "report", "--out", str(out), "--positions", "96", "--items", "2", "--prompts", "1"),
        *("--operations", "ggml-cpu,reference-as-ggml,reference-f64"),
        *("--runs", "ggml-cpu,reference-f32,swarm"),
        *("--no-published", "--json"),
        home=tmp_path,
    )
    assert outcome.status == 0, outcome.err
    document = json.loads((out / "report.json").read_text())
    assert document == outcome.document
    levels = (
        "per_op",
        "layer_drift",
        "logits",
        "decisions",
        "generation",
        "task",
        "pairs",
        "authority",
        "causes",
        "swarms",
    )
    assert all(document[each] for each in levels)
    same, other, swarm = document["logits"]
    assert (swarm["run"], swarm["logits"]["max_abs_delta"]) == ("swarm", 0.0)
    assert document["swarms"][0]["pinned"]["decisions_disagreeing"] == 0
    assert [each["run"] for each in document["layer_drift"]] == ["ggml-cpu", "reference-f32", "swarm"]
    assert (same["run"], same["logits"]["max_abs_delta"], same["passed"]) == ("ggml-cpu", 0.0, True)
    assert other["logits"]["mean_kld"] > 0
    assert document["authority"][0]["pinned"]["decisions_disagreeing"] == 0
    assert {each["passed"] for each in document["pairs"]} == {True, None}
    page = (out / "report.html").read_text()
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.fetched == [], "the page asks somebody for something"
    assert not re.search(r"@import|url\(|https?://", page)
    assert "prefers-color-scheme:dark" in page
    assert 'name="viewport"' in page
    for heading in ("Outputs over each other", "Router authority", "Why they differ", "Task level"):
        assert heading in page
    assert page.count("<svg") >= 6


def test_a_report_with_an_unknown_run_is_status_2(tmp_path: Path) -> None:
    outcome = call("measure", "report", "--out", str(tmp_path / "out"), "--runs", "cuda", home=tmp_path)
    assert outcome.status == 2
    assert "there is no 'cuda' here" in outcome.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
