"""The loss curve as a small SVG, beside the Kneser-Ney baseline. Standard library only."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from pathlib import Path

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 28, 44
LOSS_MIN, LOSS_MAX = 3.0, 6.0
TRAIN_COLOUR, HELD_OUT_COLOUR, BASELINE_COLOUR = "#9aa5b1", "#1f6feb", "#b35900"
FONT = 'font-family="sans-serif" font-size="12"'

Point = tuple[float, float]


class Axes:
    """Maps (millions of tokens, loss in nats) onto the page."""

    def __init__(self, tokens_max: float) -> None:
        self.tokens_max = tokens_max

    def place(self, tokens: float, loss: float) -> Point:
        x = LEFT + tokens / self.tokens_max * (WIDTH - LEFT - RIGHT)
        y = TOP + (LOSS_MAX - loss) / (LOSS_MAX - LOSS_MIN) * (HEIGHT - TOP - BOTTOM)
        return x, y


def polyline(axes: Axes, points: Iterable[Point], colour: str, width: float) -> str:
    """The points as a line; those above the top of the page are left out."""
    placed = (axes.place(*point) for point in points if point[1] <= LOSS_MAX)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def text(x: float, y: float, words: str, colour: str = "#57606a", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {FONT} fill="{colour}" text-anchor="{anchor}">{words}</text>'


def grid(axes: Axes) -> list[str]:
    """Lines and numbers for each half nat, and each 5 million tokens."""
    parts = []
    for half in range(int(LOSS_MIN * 2), int(LOSS_MAX * 2) + 1):
        left, y = axes.place(0, half / 2)
        right, _ = axes.place(axes.tokens_max, half / 2)
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#d0d7de" stroke-width="0.5"/>')
        parts.append(text(left - 8, y + 4, f"{half / 2:.1f}", anchor="end"))
    for tokens in range(0, int(axes.tokens_max) + 1, 5):
        x, y = axes.place(tokens, LOSS_MIN)
        parts.append(text(x, y + 18, str(tokens), anchor="middle"))
    middle, bottom = axes.place(axes.tokens_max / 2, LOSS_MIN)
    parts.append(text(middle, bottom + 36, "training tokens (millions)", anchor="middle"))
    parts.append(text(LEFT - 8, TOP - 12, "nats", anchor="end"))
    return parts


def make_svg(rows: list[dict[str, str]], baselines: dict[str, float]) -> str:
    """The picture of a loss curve's rows; `baselines` are held-out losses in nats by name."""
    train = [(int(row["tokens"]) / 1e6, float(row["train_loss"])) for row in rows]
    held_out = [
        (int(row["tokens"]) / 1e6, float(row["held_out_loss"])) for row in rows if row["held_out_loss"]
    ]
    axes = Axes(train[-1][0])
    parts = grid(axes)
    for name, loss in baselines.items():
        left, y = axes.place(0, loss)
        right, _ = axes.place(axes.tokens_max, loss)
        parts.append(
            f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="{BASELINE_COLOUR}" stroke-dasharray="5 4"/>'
        )
        parts.append(text(right + 8, y + 4, name, BASELINE_COLOUR))
    parts.append(polyline(axes, train, TRAIN_COLOUR, 1))
    parts.append(polyline(axes, held_out, HELD_OUT_COLOUR, 2))
    end_x, held_out_y = axes.place(*held_out[-1])
    _, train_y = axes.place(*train[-1])
    train_y = max(train_y, held_out_y + 16)  # keeps the two labels apart
    parts.append(text(end_x + 8, held_out_y + 4, "held out", HELD_OUT_COLOUR))
    parts.append(text(end_x + 8, train_y + 4, "training (with dropout)", TRAIN_COLOUR))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Loss against training tokens">\n<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f"{body}\n</svg>\n"
    )


def write_plot(results: Path) -> None:
    """results/loss-curve.csv and results/kneser-ney.json -> results/loss-curve.svg"""
    with (results / "loss-curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figures = json.loads((results / "kneser-ney.json").read_text())
    baselines = {
        f"Kneser-Ney {name}": math.log(figures[key]["perplexity"])
        for name, key in (("bigram", "order_2"), ("trigram", "order_3"), ("4-gram", "order_4"))
    }
    (results / "loss-curve.svg").write_text(make_svg(rows, baselines))
