"""Ports for tests that have to name one, which no other process of tests is given meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

_BELOW_WHAT_THE_SYSTEM_GIVES: Final = range(20_000, 32_000)
"""Linux gives those from 32,768 on to sockets that ask for any, at either end of a connection."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has now, and that nobody gets by asking for any."""
    for _ in range(100):
        port = random.SystemRandom().choice(_BELOW_WHAT_THE_SYSTEM_GIVES)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all ports are taken")
