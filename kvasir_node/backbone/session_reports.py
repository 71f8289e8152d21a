"""What becomes of sessions, as the engine tells control: tokens, ends, refusals, and what was counted.

Apart from the engine because it is called in the threads of contexts. It decides nothing; rows that were
retried and layer calls are counted for all sessions together, so a session's are those of its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvasir_node.backbone.sessions import NextToken
from kvasir_proto.ids import SessionId
from kvasir_proto.limits import EndReason
from kvasir_proto.messages.engine import SessionEnded, TokenEmitted
from kvasir_proto.messages.local import USAGE_ERROR
from kvasir_proto.sessions.requests import Emit, End, Refuse


class Vocabulary(Protocol):
    """What is asked of the trunk."""

    def piece(self, token: int) -> bytes:
        """The bytes of a token."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Layer calls that were completed and rows that were asked for again, since the engine began."""

    hook_calls: int
    rows_retried: int


@dataclass(slots=True)
class _Report:
    n_prompt: int
    before: Counters
    began_ns: int
    first_ns: int = 0
    last_ns: int = 0
    n_generated: int = 0


class SessionReports:
    """Listens to `Sessions` and sends messages; `begin` a session before it is opened there."""

    def __init__(
        self,
        send: Callable[[TokenEmitted | SessionEnded], None],
        vocabulary: Vocabulary,
        count: Callable[[], Counters],
    ) -> None:
        self._send = send
        self._vocabulary = vocabulary
        self._count = count
        self._reports: dict[SessionId, _Report] = {}

    def begin(self, session: SessionId, n_prompt: int) -> None:
        """A session is about to be opened. Its time until the first token has the wait for its turn in it."""
        self._reports[session] = _Report(n_prompt, self._count(), time.monotonic_ns())

    def forget(self, session: SessionId) -> None:
        """It could not even be opened: whoever wanted to says so."""
        self._reports.pop(session, None)

    def take_token(self, token: NextToken) -> None:
        """Send it on; the one that ends a text is no text, and comes with the session's end."""
        emitted = token.emitted
        report = self._reports[emitted.session]
        if emitted.reason != "end_of_text":
            self._send(
                TokenEmitted(
                    emitted.session,
                    emitted.position,
                    emitted.token,
                    self._vocabulary.piece(emitted.token),
                    *token.authority,
                    log_probability=token.log_probability,
                    top=token.top,
                    is_last=emitted.reason is not None,
                )
            )
            report.n_generated += 1
        report.last_ns = time.monotonic_ns()
        report.first_ns = report.first_ns or report.last_ns
        if emitted.reason is not None:
            self._end(emitted.session, emitted.reason, end=token)

    def take_end(self, end: End) -> None:
        """Send why it is over."""
        self._end(end.session, end.reason, end.code, end.detail)

    def take_refusal(self, refusal: Refuse) -> None:
        """Send why it is not begun; what no waiting helps is the client's mistake."""
        if refusal.retry_after is None:
            self._end(refusal.session, "failed", USAGE_ERROR, refusal.detail)
        else:
            self._end(
                refusal.session, "failed", refusal.code, refusal.detail, retry_after_ns=refusal.retry_after
            )

    def _end(
        self,
        session: SessionId,
        reason: EndReason,
        code: str = "",
        detail: str = "",
        *,
        retry_after_ns: int = 0,
        end: NextToken | None = None,
    ) -> None:
        report = self._reports.pop(session)
        counted = self._count()
        last: Emit | None = None if end is None or end.emitted.reason != "end_of_text" else end.emitted
        self._send(
            SessionEnded(
                session,
                reason,
                code,
                detail,
                report.n_prompt,
                report.n_generated,
                max(0, report.first_ns - report.began_ns),
                report.last_ns - report.first_ns,
                counted.rows_retried - report.before.rows_retried,
                counted.hook_calls - report.before.hook_calls,
                retry_after_ns=retry_after_ns,
                end_token=None if last is None else last.token,
                end_log_probability=None if last is None or end is None else end.log_probability,
                end_top=() if last is None or end is None else end.top,
            )
        )
