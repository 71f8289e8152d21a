"""What every test shares: fixed draws, a seeded scheduler, an environment without the user's settings."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

# As in engines (kvasir_node/supervisor.py): numpy's threads wait for each other by turning round, and most of
# all beside other processes. It counts when numpy is imported, so it is said here.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# The same examples on every machine: what fails in CI fails at home. KVASIR_TEST_FRESH=1 looks for new ones.
hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("fresh", deadline=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile("fresh" if os.environ.get("KVASIR_TEST_FRESH") else "fixed")


@pytest.fixture(autouse=True)
def _seeded_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trio shuffles the tasks that are ready, to expose hidden assumptions; here always in the same way.

    The two names are private to trio, and the ones its own Hypothesis plugin sets.
    """
    monkeypatch.setattr("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING", True)
    monkeypatch.setattr("trio._core._run._r", random.Random(0))


@pytest.fixture(autouse=True, scope="session")
def _own_kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """PoCL keeps what it compiled for the life of a test run, and none of it in anybody's home."""
    os.environ["POCL_CACHE_DIR"] = str(tmp_path_factory.mktemp("pocl"))


@pytest.fixture(autouse=True, scope="session")
def _nothing_is_left_open() -> Iterator[None]:
    """What the last tests forgot to close fails the last of them: of what shows later, xdist says nothing."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No KVASIR_* variable of whoever runs the tests reaches them; no test logs as another told it to."""
    for variable in [name for name in os.environ if name.startswith("KVASIR_")]:
        monkeypatch.delenv(variable)
    yield
    structlog.reset_defaults()


def pytest_configure() -> None:
    """Signals mean what they mean, also under `nohup` or in a script's background, which have them ignored.

    Tests send them to themselves and to processes that inherit what is set here, and would wait for ever.
    """
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            is_interrupt = number is signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Processes that xdist starts have read it by now, and those that tests start are not to have it."""
    os.environ.pop("KVASIR_TEST_FRESH", None)


def pytest_unconfigure() -> None:
    """Importing llama_cpp opens /dev/null twice and nobody closes it: a warning after the last test."""
    if (utils := sys.modules.get("llama_cpp._utils")) is not None:
        utils.outnull_file.close()
        utils.errnull_file.close()
