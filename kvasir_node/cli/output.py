"""How results are printed: a JSON object on standard output, or lines and tables for people.

Tables are 80 columns wide at most when nobody says how wide the terminal is, and plain when output is not a
terminal.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kvasir_node.model.model_manifest import Progress as ByteProgress

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def print_json(document: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(document, indent=2 if sys.stdout.isatty() else None))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on standard output; nothing is cut off when output goes to a file."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def printable(value: object) -> str:
    """Text for a terminal: escapes and line ends in what other nodes said are shown as U+FFFD."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(value))


def note(text: str) -> None:
    """A line of progress on standard error; a log that cannot be written is no reason to stop."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True)


@contextlib.contextmanager
def progress_on_stderr(what: str) -> Iterator[ByteProgress]:
    """A function to be told (bytes done, bytes in all): a bar on a terminal, a line a quarter elsewhere."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    said = 0

    def tell(done: int, total: int) -> None:
        nonlocal said
        quarter = 4 * done // max(1, total)
        if quarter > said:
            said = quarter
            note(f"{what}: {25 * quarter} %")

    yield tell
