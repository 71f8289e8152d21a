"""The one flag of these tests: write the scenarios' output anew instead of comparing with it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-scenarios",
        action="store_true",
        help="write tests/scenarios anew (then look at the difference, and keep what you can explain)",
    )
