"""Plots as inline SVG: lines, dots with intervals, and the comparator picture. Colours come from the page.

Decides scales and ticks, nothing of what is shown. Numbers are placed on a linear, a logarithmic or a
symmetric logarithmic axis, where what is smaller than a threshold lies near zero. Apart from the page because
a plot is a function of numbers. It refuses to know what they mean.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

WIDTH: Final = 640
HEIGHT: Final = 300
_LEFT: Final = 64
_RIGHT: Final = 12
_TOP: Final = 12
_BOTTOM: Final = 34
SERIES_MAX: Final = 16
"""So many colours there are; further series begin again."""
_FAN: Final = 0.7
_FAN_MAX: Final = 8.0
"""Dots of one value stand beside each other on so much of its place, so that equal ones hide none."""
_WIDEST_LINE: Final = 6.0

Point = tuple[float, float]


def line_plot(series: Mapping[str, Sequence[Point]], *, x_label: str, y_label: str, description: str) -> str:
    """Lines over a logarithmic axis; values that are not above zero are left out."""
    points = [point for each in series.values() for point in each if point[1] > 0]
    if not points:
        return _empty(description)
    low, high = _log_bounds([y for _, y in points])
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    at_x = _linear(x_low, x_high, _LEFT, WIDTH - _RIGHT)
    at_y = _linear(low, high, HEIGHT - _BOTTOM, _TOP)
    parts = [_log_axis(low, high, at_y)]
    parts += [_tick_x(at_x(x), f"{x:g}") for x in sorted({x for x, _ in points})]
    for index, each in enumerate(series.values()):
        shown = [(at_x(x), at_y(math.log10(y))) for x, y in each if y > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in shown)
        parts.append(f'<polyline class="line s{index % SERIES_MAX}" points="{path}"/>')
        parts += [
            f'<circle class="dot s{index % SERIES_MAX}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in shown
        ]
    names = [
        name if any(y > 0 for _, y in each) else f"{name}: none above 0" for name, each in series.items()
    ]
    return _figure(parts, names, x_label, y_label, description)


def comparator_plot(
    deviations: Mapping[str, Sequence[float]],
    band: float,
    *,
    outside: Collection[str] = (),
    threshold: float,
    x_label: str,
    y_label: str,
    description: str,
) -> str:
    """Several backends' distances from one, over each other, and the band of ±`band` that a class allows.

    Those that are `outside` the class have hollow dots.
    """
    values = [abs(each) for row in deviations.values() for each in row if math.isfinite(each)]
    if not values:
        return _empty(description)
    top = _symmetric(max([*values, band, threshold * 10]) * 1.3, threshold)
    n = max(len(row) for row in deviations.values())
    at_x = _linear(0, max(1, n - 1), _LEFT, WIDTH - _RIGHT)
    at_y = _linear(-top, top, HEIGHT - _BOTTOM, _TOP)
    upper, lower = at_y(_symmetric(band, threshold)), at_y(_symmetric(-band, threshold))
    place = f'x="{_LEFT}" y="{upper:.1f}" width="{WIDTH - _LEFT - _RIGHT}" height="{lower - upper:.1f}"'
    parts = [f'<rect class="band" {place}/>']
    decade = math.floor(math.log10(threshold))
    while _symmetric(10.0**decade, threshold) <= top:
        both = (10.0**decade, -(10.0**decade))
        parts += [_tick_y(at_y(_symmetric(value, threshold)), f"{value:+.0e}") for value in both]
        decade += 1
    parts.append(_tick_y(at_y(0.0), "0"))
    parts += _index_ticks(n, at_x)
    place_width = min(_FAN_MAX, _FAN * (WIDTH - _LEFT - _RIGHT) / max(1, n - 1))
    for index, (name, row) in enumerate(deviations.items()):
        aside = place_width * (index / max(1, len(deviations) - 1) - 0.5)
        dots = [
            (at_x(i) + aside, at_y(_symmetric(each, threshold)))
            for i, each in enumerate(row)
            if math.isfinite(each)
        ]
        circles = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8"/>' for x, y in dots)
        kind = "open" if name in outside else "dots"
        parts.append(f'<g class="{kind} s{index % SERIES_MAX}">{circles}</g>')
    return _figure(parts, list(deviations), x_label, y_label, description, outside)


def value_plot(series: Mapping[str, Sequence[float]], *, x_label: str, y_label: str, description: str) -> str:
    """Values over their index, all on top of each other; the first lines are the widest: none hides."""
    values = [each for row in series.values() for each in row if math.isfinite(each)]
    if not values:
        return _empty(description)
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or 1.0
    n = max(len(row) for row in series.values())
    at_x = _linear(0, max(1, n - 1), _LEFT, WIDTH - _RIGHT)
    at_y = _linear(low - margin, high + margin, HEIGHT - _BOTTOM, _TOP)
    parts = [_tick_y(at_y(value), f"{value:.3g}") for value in (low, (low + high) / 2, high)]
    parts += _index_ticks(n, at_x)
    thinner = (_WIDEST_LINE - 1.0) / max(1, len(series) - 1)
    for index, row in enumerate(series.values()):
        path = " ".join(
            f"{at_x(i):.1f},{at_y(each):.1f}" for i, each in enumerate(row) if math.isfinite(each)
        )
        width = _WIDEST_LINE - thinner * index
        parts.append(
            f'<polyline class="line s{index % SERIES_MAX}" style="stroke-width:{width:.1f}" points="{path}"/>'
        )
    return _figure(parts, list(series), x_label, y_label, description)


def interval_plot(
    rows: Sequence[tuple[str, float, float, float]], *, limit: float | None, x_label: str, description: str
) -> str:
    """A dot with its interval a row, (name, low, value, high), on a linear axis; a line where a limit is."""
    if not rows:
        return _empty(description)
    numbers = [each for row in rows for each in row[1:]] + ([] if limit is None else [limit])
    low, high = min(numbers), max(numbers)
    margin = (high - low) * 0.08 or abs(high) * 0.01 or 1.0
    left = 190
    height = _TOP + _BOTTOM + 26 * len(rows)
    at_x = _linear(low - margin, high + margin, left, WIDTH - _RIGHT - 8)
    parts = []
    if limit is not None:
        x = at_x(limit)
        parts.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{height - _BOTTOM}"/>')
        parts.append(_text(x, _TOP - 2, f"{limit:g}"))
    for index, (name, begin, value, end) in enumerate(rows):
        y = _TOP + 13 + 26 * index
        parts.append(
            f'<text class="tick" x="{left - 8}" y="{y + 4}" text-anchor="end">{html.escape(name)}</text>'
        )
        parts.append(f'<line class="whisker" x1="{at_x(begin):.1f}" x2="{at_x(end):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="dot s{index % SERIES_MAX}" cx="{at_x(value):.1f}" cy="{y}" r="4"/>')
    parts += [_text(at_x(value), height - 16, f"{value:.4g}") for value in (low, (low + high) / 2, high)]
    parts.append(_text(WIDTH / 2, height - 2, x_label))
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{html.escape(description)}">'
        f"{''.join(parts)}</svg><figcaption>{html.escape(description)}</figcaption></figure>"
    )


def _symmetric(value: float, threshold: float) -> float:
    """Linear below the threshold, a decade a unit above it, on both sides of zero."""
    size = abs(value)
    position = size / threshold if size < threshold else 1 + math.log10(size / threshold)
    return math.copysign(position, value)


def _linear(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    span = high - low or 1.0
    return lambda value: begin + (value - low) / span * (end - begin)


def _log_bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)), math.log10(max(values))
    return math.floor(low - 0.05), math.ceil(high + 0.05)


def _log_axis(low: float, high: float, at_y: Callable[[float], float]) -> str:
    step = max(1, math.ceil((high - low) / 8))
    return "".join(_tick_y(at_y(decade), f"1e{decade:+d}") for decade in range(int(low), int(high) + 1, step))


def _tick_y(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _tick_x(x: float, text: str) -> str:
    return _text(x, HEIGHT - _BOTTOM + 14, text)


def _index_ticks(n: int, at_x: Callable[[float], float]) -> list[str]:
    """Five of n places, counted from 1."""
    return [_tick_x(at_x(i), f"{i + 1}") for i in sorted({(n - 1) * quarter // 4 for quarter in range(5)})]


def _text(x: float, y: float, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{y:.0f}" text-anchor="middle">{html.escape(text)}</text>'


def _figure(
    parts: Sequence[str],
    names: Sequence[str],
    x_label: str,
    y_label: str,
    description: str,
    outside: Collection[str] = (),
) -> str:
    legend = "".join(
        f'<span class="key{" open" if name in outside else ""} s{index % SERIES_MAX}">'
        f"{html.escape(name)}</span>"
        for index, name in enumerate(names)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(description)}">'
        f"{''.join(parts)}"
        f"{_text(WIDTH / 2, HEIGHT - 4, x_label)}"
        f'<text class="label" x="12" y="{HEIGHT / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 12 {HEIGHT / 2:.0f})">{html.escape(y_label)}</text></svg>'
        f'<div class="legend">{legend}</div><figcaption>{html.escape(description)}</figcaption></figure>'
    )


def _empty(description: str) -> str:
    return f"<figure><figcaption>{html.escape(description)}: nothing to show.</figcaption></figure>"
