"""Every fault of the failure matrix at one moment each; ``make failure-matrix`` runs all moments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from tests.loopback.failure_matrix import CODES, Cell, CellRunner, Fault, Moment

pytestmark = [pytest.mark.loopback, pytest.mark.slow]

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "failures.md"
REPRESENTATIVES = [Cell(fault, moment) for fault, moment in zip(Fault, cycle(Moment), strict=False)]
"""Three faults for each moment."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CellRunner]:
    made = CellRunner(tmp_path_factory.mktemp("failures"))
    yield made
    made.close()


@pytest.mark.parametrize("cell", REPRESENTATIVES, ids=lambda cell: cell.name)
def test_what_goes_wrong_ends_as_documented(runner: CellRunner, cell: Cell) -> None:
    runner.run(cell)


def test_the_documented_outcomes_are_the_tested_ones() -> None:
    row = re.compile(r"^\| ([^|]+) \| (?:`(\w+)`|—) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)
    documented = {fault: code or None for fault, code in row.findall(REFERENCE.read_text())}
    assert documented == {fault.value: code for fault, code in CODES.items()}
