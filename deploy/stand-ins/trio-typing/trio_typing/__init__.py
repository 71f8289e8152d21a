"""Stands in for trio-typing, whose stubs of an old trio hide the annotations that trio ships itself.

libp2p imports two names from it and needs nothing else; both mean here what they mean there at run time.
"""

from __future__ import annotations

from typing import TypeVar

from trio import TaskStatus

_Function = TypeVar("_Function")


def takes_callable_and_args(function: _Function) -> _Function:
    """Return ``function`` unchanged: the decorator only ever spoke to a plugin of mypy."""
    return function


__all__ = ["TaskStatus", "takes_callable_and_args"]
