"""How a process of ours speaks about itself: structured events on standard error.

An event has a name (`member_joined`) and keys, never a sentence put together; whether people or programs
read it is decided here, once a process. What libraries log through `logging` comes out the same way. Only
standard error is used: standard output belongs to results. Prompts and tokens of users are not to be given
to a logger.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, Literal, TextIO

import structlog
from structlog.typing import FilteringBoundLogger, Processor

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_QUIET_LIBRARIES: Final = {
    # libp2p logs as errors what is daily life to a node: a refused dial, a stranger's failed handshake, a
    # stream that its sender closed. The host logs those events itself, once; the rest only matters when
    # looking for a bug.
    "libp2p": logging.CRITICAL,
    "multiaddr": logging.WARNING,
    "trio": logging.WARNING,
}
REPEATS_SHOWN_MAX: Final = 10
"""How often in an interval an event of one kind is shown that a stranger can cause at will."""

REPEATS_INTERVAL_S: Final = 60.0
"""After which those that were not shown are summed up in one `repeats_left_out`."""

_CAUSED_BY_STRANGERS: Final = frozenset(
    {
        *("stream_ended", "stream_handler_failed", "request_failed", "member_joined", "member_silent"),
        *("accept_failed", "gossip_task_failed", "gossip_heartbeat_failed"),
        *("member_found_on_lan", "record_not_stored", "members_full"),
    }
)
_REFUSALS: Final = "_refused"
"""How every event ends that tells of something that came from elsewhere and was not taken."""
_process_keys: dict[str, object] = {}
_library_levels: dict[str, int] = {}


def configure_telemetry(
    level: LogLevel,
    log_format: LogFormat,
    environment: Mapping[str, str],
    stream: TextIO | None = None,
    *,
    repeats_interval_s: float = REPEATS_INTERVAL_S,
) -> None:
    """Send this process's events of at least `level` to `stream` (standard error if None).

    Colours are used on a terminal only, and never when `NO_COLOR` is set to anything. Calling it again
    replaces what was configured before, and forgets the keys bound to the process.
    """
    # A daemon may have been started without a standard error at all.
    target = stream or sys.stderr or open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    _process_keys.clear()
    structlog.configure(
        processors=[
            _RepeatLimit(REPEATS_SHOWN_MAX, repeats_interval_s),
            structlog.contextvars.merge_contextvars,
            _add_process_keys,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_renderers(log_format, environment, target),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_names: _Writer(target),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _FromLibraries):
            root.removeHandler(handler)
    root.addHandler(_FromLibraries())
    root.setLevel(_LEVELS[level])
    for library, least in _QUIET_LIBRARIES.items():
        # At debug the libraries may speak, but not below info: libp2p formats a line for each frame.
        _library_levels[library] = logging.INFO if level == "debug" else least
    restore_library_levels()


def restore_library_levels() -> None:
    """Set the libraries' levels as `configure_telemetry` chose them: some set their own when imported."""
    for library, least in _library_levels.items():
        logging.getLogger(library).setLevel(least)


def bind_process(**keys: object) -> None:
    """Put these keys on every later event of this process, in whatever thread or task: `node`, `role`."""
    _process_keys.update(keys)


def get_logger(**keys: object) -> FilteringBoundLogger:
    """A logger whose events carry these keys."""
    logger: FilteringBoundLogger = structlog.get_logger(**keys)
    return logger


class _RepeatLimit:
    """Lets the first few events of each kind that strangers cause pass, and sums up the rest of an interval.

    By kind and not by sender: a name costs a stranger nothing, and a table of names would be his to fill.
    """

    def __init__(self, shown_max: int, interval_s: float) -> None:
        self._shown_max = shown_max
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._ends: dict[str, float] = {}

    def __call__(
        self, _logger: object, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        kind = event["event"]
        if kind not in _CAUSED_BY_STRANGERS and not kind.endswith(_REFUSALS):
            return event
        with self._lock:
            time_now = time.monotonic()
            if self._counts.get(kind, 0) <= self._shown_max and time_now >= self._ends.get(kind, time_now):
                self._counts[kind] = 0
                self._ends[kind] = time_now + self._interval_s
            self._counts[kind] += 1
            count = self._counts[kind]
            if count == self._shown_max + 1:
                timer = threading.Timer(self._ends[kind] - time_now, self._sum_up, (kind,))
                timer.daemon = True
                timer.start()
        if count > self._shown_max:
            raise structlog.DropEvent
        return event

    def _sum_up(self, kind: str) -> None:
        with self._lock:
            left_out = self._counts.pop(kind) - self._shown_max
            del self._ends[kind]
        get_logger().warning("repeats_left_out", of=kind, count=left_out, interval_s=self._interval_s)


def _add_process_keys(
    _logger: object, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    for name, value in _process_keys.items():
        event.setdefault(name, value)
    return event


def _renderers(log_format: LogFormat, environment: Mapping[str, str], stream: TextIO) -> list[Processor]:
    if log_format == "json":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    plain = bool(environment.get("NO_COLOR")) or environment.get("TERM") == "dumb" or not stream.isatty()
    return [
        structlog.dev.ConsoleRenderer(
            colors=not plain, exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
        )
    ]


class _Writer:
    """Writes each event as one line in one call, so that processes sharing a terminal do not mix within
    lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        try:
            self._stream.write(line + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            # Nobody reads standard error any more. That is no reason for a node to stop.
            return

    debug = info = warning = error = critical = exception = log = msg


class _FromLibraries(logging.Handler):
    """Turns a library's log record into one of our events."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            message = str(record.msg)
        level = min(record.levelno, logging.ERROR) // 10 * 10
        get_logger(library=record.name).log(max(level, logging.DEBUG), message, exc_info=record.exc_info)
