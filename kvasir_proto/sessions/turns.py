"""Whose turn it is: clients share the tokens that a backbone computes, however many sessions each has.

Weighted fair queueing with equal weights: each client's account grows by the tokens that were computed for
it, and whoever has had least is served first. A client that comes new starts where one would stand that had
always had its fair share, so neither long absence nor a new name buys more than that. It is not known what a
token is computed for.
"""

from __future__ import annotations

from typing import Final

_SCALE: Final = 1 << 20


class Turns:
    """The accounts of the clients that have sessions; one that has none any more is forgotten."""

    def __init__(self) -> None:
        self._accounts: dict[str, int] = {}
        self._n_sessions: dict[str, int] = {}
        self._fair_share = 0

    def enter(self, client: str) -> None:
        """A client has one session more."""
        if client not in self._accounts:
            self._accounts[client] = self._fair_share
            self._n_sessions[client] = 0
        self._n_sessions[client] += 1

    def leave(self, client: str) -> None:
        """A client has one session less."""
        self._n_sessions[client] -= 1
        if not self._n_sessions[client]:
            del self._n_sessions[client], self._accounts[client]

    def charge(self, client: str, n_tokens: int) -> None:
        """So many tokens were computed for a client that has a session, or had one when they were begun."""
        self._fair_share += n_tokens * _SCALE // max(1, len(self._accounts))
        if client in self._accounts:
            self._accounts[client] += n_tokens * _SCALE

    def account(self, client: str) -> int:
        """What a client with a session has had; less is sooner."""
        return self._accounts[client]

    def __len__(self) -> int:
        return len(self._accounts)
