"""Findings for the audit's tests: an honest row, and what to change of it."""

from __future__ import annotations

from typing import Any

from kvasir_proto.audit.finding import Finding
from kvasir_proto.effects import Now
from kvasir_proto.ids import node_id_of
from kvasir_proto.instants import Instant, WallTime

FIRST, SECOND, THIRD = (node_id_of(bytes([number]) * 32) for number in (1, 2, 3))
NOW = Now(Instant(0), WallTime(0))


def finding(number: int, **changes: Any) -> Finding:
    """Row `number` of `FIRST`, all well."""
    values: dict[str, Any] = {
        "node_id": FIRST,
        "layer": 0,
        "expert": 0,
        "request_digest": number.to_bytes(32, "big"),
        "outcome": "same",
        "residual": 1e-7,
        "gate": 2e-6,
        "slope": 1.0,
        "flip_chance": 0.003,
    }
    return Finding(**values | changes)


def foreign(number: int, **changes: Any) -> Finding:
    """A row that nothing explains."""
    return finding(number, **{"outcome": "foreign", "residual": 0.01} | changes)
