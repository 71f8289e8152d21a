"""The one flag of these tests: write the golden vectors anew instead of comparing with them."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-vectors",
        action="store_true",
        help="write tests/vectors anew (then look at the difference: it is a change of the protocol)",
    )
