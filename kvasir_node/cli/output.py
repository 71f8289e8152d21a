"""How results are printed: a JSON object on standard output, or lines and tables for people.

Tables are 80 columns wide at most when nobody says how wide the terminal is, and plain when output is not a
terminal.
"""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from kvasir_node.model.model_manifest import Progress as ByteProgress

_NAME_WIDTH: Final = 10

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def print_json(document: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(document, indent=2 if sys.stdout.isatty() else None))


class Cell(NamedTuple):
    """A text with a style (rich's words, such as `green`); colours are shown on a terminal only."""

    text: str
    style: str = ""


def _text(value: object) -> Text:
    return Text(printable(value.text), value.style) if isinstance(value, Cell) else Text(printable(value))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    width_max: int | None = None,
    folded: Collection[str] | None = None,
) -> None:
    """A table on standard output; nothing is cut off when output goes to a file, what is too wide is folded.

    With ``width_max`` it is set close together and never wider; ``folded`` are the columns that give way
    then, by default any.
    """
    gap = 2 if width_max is None else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=folded is not None and column not in folded)
    for row in rows:
        table.add_row(*(_text(cell) for cell in row))
    console = _console(width_max or 120, width_max)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip(), color=True)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Lines of a name and what there is to say of it, folded at 80 columns or the terminal's width."""
    console = _console(80, None)
    for name, value in fields:
        text = _text(value)
        label = name
        for line in _folded(text.plain, console.width - _NAME_WIDTH):
            console.print(Text(f"{label:{_NAME_WIDTH}}").append(line, text.style), soft_wrap=True)
            label = ""


def print_line(value: object, *, indent: int) -> None:
    """A line, folded at 80 columns or the terminal's width; what follows the first is set in."""
    console = _console(80, None)
    lines = _folded(printable(value), console.width, " " * indent)
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _folded(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, max(24, width), subsequent_indent=indent, break_on_hyphens=False) or [""]


def _console(width: int, width_max: int | None) -> Console:
    """A console on standard output, ``width`` wide where it is no terminal."""
    if not sys.stdout.isatty():
        return Console(width=width, force_terminal=False, no_color=True)
    console = Console()
    return console if width_max is None or console.width <= width_max else Console(width=width_max)


def printable(value: object) -> str:
    """Text for a terminal: escapes and line ends in what other nodes said are shown as U+FFFD."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(value))


def note(text: str) -> None:
    """A line of progress on standard error; a log that cannot be written is no reason to stop."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


@contextlib.contextmanager
def progress_on_stderr(what: str, *, shows_rate: bool = False) -> Iterator[ByteProgress]:
    """A function to be told (bytes done, bytes in all): a bar on a terminal, a line a quarter elsewhere.

    With ``shows_rate`` lines have the bytes and how fast they come, as the bar has.
    """
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            *((TransferSpeedColumn(),) if shows_rate else ()),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    said = 0
    begin = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal said
        quarter = 4 * done // max(1, total)
        if quarter > said:
            said = quarter
            rate = done / max(1e-9, time.monotonic() - begin)
            left = f", {(total - done) / rate:.0f} s left" if done < total else ""
            detail = f", {done >> 20} of {total >> 20} MiB, {rate / 2**20:.1f} MiB/s{left}"
            note(f"{what}: {25 * quarter} %" + (detail if shows_rate else ""))

    yield tell
