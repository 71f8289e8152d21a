"""The last thing that went wrong on a node: what, when, and whether it is over.

A sentence that stays in `status` after everything works again sends people looking for a fault that is gone;
one that is cleared leaves them without the reason for last night's gap. So it is kept, dated, and marked as
recovered once the node has been ready after it. What counts as an error is for the duties to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from kvasir_proto.instants import WallTime

NO_ERROR: Final[dict[str, Any]] = {
    "last_error": "",
    "last_error_at": None,
    "last_error_recovered": None,
}
"""What a status document says where nothing has gone wrong."""


class LastError:
    """One duty's last error; ``wall_time`` reads the calendar."""

    def __init__(self, wall_time: Callable[[], WallTime]) -> None:
        self._wall_time = wall_time
        self._text = ""
        self._at = WallTime(0)
        self._recovered = False

    def note(self, text: str) -> None:
        """Something went wrong now."""
        self._text, self._at, self._recovered = text, self._wall_time(), False

    def note_ready(self) -> None:
        """The node is ready, so whatever went wrong is over."""
        self._recovered = True

    @property
    def unrecovered(self) -> str:
        """What is wrong still; empty when nothing is."""
        return "" if self._recovered else self._text

    def report(self) -> dict[str, Any]:
        """The last error's part of a status document; its time in UTC, to the second."""
        if not self._text:
            return NO_ERROR
        return {
            "last_error": self._text,
            "last_error_at": datetime.fromtimestamp(self._at // 1_000_000_000, UTC).isoformat(),
            "last_error_recovered": self._recovered,
        }
