"""How long streams pause when something dies under them: `python -m tests.loopback.failover_figures`.

Three daemons on this machine's loopback interface with the demo model, eight streams over HTTP through the
two that are not the backbone, and many at once through one. A line for each figure goes to standard error as
it comes, all of them to standard output, as one JSON object. It ends by itself, in one to three minutes.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.loopback.daemons import Daemon
from tests.loopback.test_failover import (
    N_STREAMS,
    GatewayNodes,
    Stream,
    address_of,
    check_equivalent,
    read,
    read_all,
)

AT_ONCE: Final = 40
"""Streams through one gateway: eight decode together, and so many of one client may wait."""


class FailoverFigures:
    """Each text is compared with the one of an undisturbed stream."""

    def __init__(self, directory: Path) -> None:
        self.nodes = GatewayNodes(directory)
        self.values: dict[str, Any] = {}
        self._undisturbed: list[Stream] = []

    def note(self, name: str, value: Any) -> None:
        self.values[name] = value
        sys.stderr.write(f"{name}: {value}\n")

    def take_all(self) -> None:
        self.nodes.wait_settled()
        self._undisturbed = read_all(self._backbone()[1])
        self.note("undisturbed_s", _pause_s(self._undisturbed))
        self._take_many()
        for name, number in (("sigterm", "SIGTERM"), ("sigkill", "SIGKILL"), ("sigstop", "SIGSTOP")):
            backbone, others = self._backbone()
            self._take(f"backbone_{name}_s", others, lambda b=backbone, n=number: b.kill(signal.Signals[n]))  # type: ignore[misc]
            if number == "SIGSTOP":
                backbone.kill(signal.SIGCONT)
            else:
                backbone.process.wait()
                backbone.start()
            self.nodes.wait_settled()
        backbone, others = self._backbone()
        document = backbone.wait(lambda document: document["engines"]["backbone"], "its engine")
        pid = document["engines"]["backbone"]["pid"]
        self._take("backbone_engine_sigkill_s", others, lambda: os.kill(pid, signal.SIGKILL))

    def _backbone(self) -> tuple[Daemon, list[Daemon]]:
        backbone, _ = self.nodes.backbone()
        return backbone, [each for each in self.nodes.daemons if each is not backbone]

    def _take(self, name: str, daemons: list[Daemon], disturb: Callable[[], None]) -> None:
        streams = read_all(daemons, disturb)
        check_equivalent(self._undisturbed, streams)
        self.note(name, _pause_s(streams))

    def _take_many(self) -> None:
        address = address_of(self._backbone()[1][0])
        began = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            streams = list(
                pool.map(lambda each: read(address, each % N_STREAMS, lambda _: None), range(AT_ONCE))
            )
        check_equivalent(self._undisturbed * (AT_ONCE // N_STREAMS), streams)
        n_tokens = sum(len(each.text) for each in streams)
        self.note(f"{AT_ONCE}_streams_s", round(time.monotonic() - began, 1))
        self.note(f"{AT_ONCE}_streams_tokens", n_tokens)


def _pause_s(streams: list[Stream]) -> float:
    """The longest time between two tokens of any of them."""
    return round(max(each.pause_s for each in streams), 2)


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="kvasir-failover-") as directory:
        figures = FailoverFigures(Path(directory))
        figures.note("load_average", [round(each, 1) for each in os.getloadavg()])
        try:
            figures.take_all()
        finally:
            for daemon in figures.nodes.daemons:
                daemon.end()
    json.dump({"schema_version": 1, **figures.values}, sys.stdout, indent=2)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
