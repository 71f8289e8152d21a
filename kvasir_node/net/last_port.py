"""The port this node listened at last time: where any will do it takes that one again, if it is free.

The others know where it was, and a swarm that stops as a whole, in a power cut say, knows nothing else. It
is a hint and nothing more: without it, or where the port is taken, the node listens at another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from kvasir_node.durable_file import durable_file
from kvasir_node.small_file import read_small_file

_FILE_SIZE_MAX: Final = 16
_PORT_MAX: Final = 65_535

log = structlog.get_logger(__name__)


class LastPort:
    """`listen-port` of a home, a number. Loading never fails; saving says in the log that it did."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> int:
        """The port of last time; 0 where none is known."""
        try:
            port = int(read_small_file(self._path, _FILE_SIZE_MAX))
        except (OSError, ValueError):
            return 0
        return port if 0 < port <= _PORT_MAX else 0

    def save(self, port: int) -> None:
        """Keep it for next time."""
        if port == self.load():
            return
        try:
            with durable_file(self._path) as file:
                file.write(b"%d\n" % port)
        except OSError as error:
            log.warning("last_port_unwritable", path=str(self._path), reason=error.strerror or str(error))
