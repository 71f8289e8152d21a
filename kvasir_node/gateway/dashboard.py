"""The dashboard: the page at `/` and the document that it asks for every two seconds.

The page is one file without any other: its policy lets a browser run the one style and the one script in it,
by their digests, and talk to this gateway alone. It says nothing of the swarm, so anybody may load it; the
document is behind the same doors as the API. Apart from the endpoints because a browser's rules are no
matter of theirs. It refuses to know what a status means: that is the page's.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any, Final

from kvasir_node.gateway.gateway_metrics import GatewayMetrics
from kvasir_node.gateway.http_messages import Headers
from kvasir_node.gateway.ports import Standing, Swarm

DASHBOARD_SCHEMA_VERSION: Final = 1
MEMBERS_MAX: Final = 400
"""Members in one document; each takes about 650 bytes, and a phone may ask for them."""
MISSING_RANGES_MAX: Final = 64
KEPT_S: Final = 1.0
"""How long a document is as good as new: however many ask, it is made this often."""

_INLINE: Final = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)


class DashboardPage:
    """The page as it is sent. Read once; a page that is not in one piece is a bug of ours."""

    def __init__(self) -> None:
        text = files("kvasir_node").joinpath("data/dashboard.html").read_text(encoding="utf-8")
        (style_kind, style), (script_kind, script) = _INLINE.findall(text)
        assert (style_kind, script_kind) == ("style", "script")
        policy = (
            "default-src 'none'",
            f"style-src {_source_of(style)}",
            f"script-src {_source_of(script)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # Nothing in it makes HTML of a text, and nothing is to.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
        self.body: Final = text.encode()
        self.headers: Final[Headers] = (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Security-Policy", "; ".join(policy)),
            ("Referrer-Policy", "no-referrer"),
            ("Cross-Origin-Opener-Policy", "same-origin"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        )


class DashboardStatus:
    """The document that the page asks for, kept for a moment. ``now_s`` is a clock that never goes back."""

    def __init__(self, swarm: Swarm, metrics: GatewayMetrics, now_s: Callable[[], float]) -> None:
        self._swarm = swarm
        self._metrics = metrics
        self._now_s = now_s
        self._body = b""
        self._made_at = float("-inf")

    def body(self) -> bytes:
        """The document as JSON; never waits."""
        now_s = self._now_s()
        if now_s >= self._made_at + KEPT_S:
            document = dashboard_document(self._swarm.status(), self._swarm.standing(), self._metrics)
            self._body = json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")
            self._made_at = now_s
        return self._body


def dashboard_document(
    status: Mapping[str, Any], standing: Standing, metrics: GatewayMetrics
) -> dict[str, Any]:
    """What the daemon says of itself, within bounds, and what the gateway adds to it."""
    members = sorted(status["members"], key=_last_to_leave_out)
    plan, coverage = status["plan"], status["plan"]["coverage"]
    missing = coverage["missing"][:MISSING_RANGES_MAX]
    return {
        "schema_version": DASHBOARD_SCHEMA_VERSION,
        "status": {
            **status,
            "members": members[:MEMBERS_MAX],
            "plan": {**plan, "coverage": {**coverage, "missing": missing}},
        },
        "members_left_out": max(0, len(members) - MEMBERS_MAX),
        "missing_left_out": len(coverage["missing"]) - len(missing),
        "gateway": {
            "model": standing.model.name if standing.model is not None else None,
            "has_chat_template": standing.model is not None and standing.model.chat_template is not None,
            "obstacle": standing.why_not_ready,
            "answers_now": metrics.answers_now,
            "generated_tokens_total": metrics.generated_tokens_total,
        },
    }


def _last_to_leave_out(member: Mapping[str, Any]) -> tuple[bool, bool, str]:
    """Whoever has a part in the plan comes first, then whoever is there."""
    return (not member["ranks"], member["state"] != "alive", member["node_id"])


def _source_of(text: str) -> str:
    """An inline style or script as a policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
