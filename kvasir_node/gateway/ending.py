"""How a gateway that ends gets its answers to their end: what they wait for is cut, what they write is not.

An answer is cut only where it waits for the swarm (a prompt's tokens, a session's place, its next token), so
that whoever is answered hears why in the form of the answer at hand, whole. It knows neither HTTP nor tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import trio

from kvasir_proto.errors import NotReady


class Ending:
    """All waits that end when the gateway does."""

    def __init__(self) -> None:
        self._waits: dict[trio.CancelScope, None] = {}
        self._has_begun = False

    def begin(self) -> None:
        """Cut every wait there is, and those to come. Idempotent."""
        self._has_begun = True
        for each in list(self._waits):
            each.cancel()

    @contextlib.contextmanager
    def cuts(self) -> Iterator[trio.CancelScope]:
        """A wait, for as long as it is entered, or until `spare`. Raises `NotReady` where it was cut."""
        with trio.CancelScope() as scope:
            if self._has_begun:
                scope.cancel()
            self._waits[scope] = None
            try:
                yield scope
            finally:
                self.spare(scope)
        if scope.cancelled_caught:
            raise NotReady("this node is stopping")

    def spare(self, wait: trio.CancelScope) -> None:
        """What this wait was for has come: it is cut no more."""
        self._waits.pop(wait, None)
