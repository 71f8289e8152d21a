"""Why a request is not answered with a text, in the shape that OpenAI's clients read.

A refusal is raised wherever it is found and turned into an answer in one place. It quotes at most a few
characters of what a client sent.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

from kvasir_node.gateway.ports import CompletionRefused
from kvasir_proto.errors import KvasirError, UsageError
from kvasir_proto.limits import as_sentence

RETRY_AFTER_S_MAX: Final = 300

_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_STATUS: Final = {"busy": 429, "not_ready": 503, "too_long": 400}
_CODES: Final = {"busy": "too_many_requests", "not_ready": "not_ready", "too_long": "context_length_exceeded"}


class Refusal(Exception):
    """An answer with an error. ``parameter`` names what in the request is to blame, if it is one thing."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        parameter: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = as_sentence(message)
        self.parameter = parameter
        self.code = code
        self._retry_after_s = retry_after_s
        self._headers = headers

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What the answer's head says beside its status: when to come again, in whole seconds."""
        if self._retry_after_s is None:
            return self._headers
        wait_s = min(max(math.ceil(self._retry_after_s), 1), RETRY_AFTER_S_MAX)
        return (*self._headers, ("Retry-After", str(wait_s)))

    def document(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.parameter,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        """`document` as JSON."""
        return json.dumps(self.document()).encode()


def refusal_of(error: KvasirError) -> Refusal:
    """What a client hears of a failure that is none of its own, or of a session that nobody would begin."""
    if isinstance(error, CompletionRefused):
        retry_after_s = None if error.kind == "too_long" else error.retry_after_s
        status, code = _STATUS[error.kind], _CODES[error.kind]
        return Refusal(status, str(error), code=code, retry_after_s=retry_after_s)
    if isinstance(error, UsageError):  # nobody else could answer it either
        return Refusal(400, str(error), code=error.code)
    return Refusal(503, str(error), code=error.code, retry_after_s=1.0)
