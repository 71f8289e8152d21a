"""What a process of tests has where fresh examples were asked for; `test_make_test.py` names it to pytest."""

from __future__ import annotations

import os

import hypothesis
import pytest


@pytest.fixture(scope="module")
def environment() -> set[str]:
    """What a module's daemons would be started with."""
    return set(os.environ)


def test_examples_are_fresh_and_no_daemon_is_told(environment: set[str]) -> None:
    assert hypothesis.settings.get_current_profile_name() == "fresh"
    assert "KVASIR_TEST_FRESH" not in environment
