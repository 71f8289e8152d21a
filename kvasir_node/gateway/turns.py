"""Whose turn a request takes: sessions wait in the swarm by client, and clients share alike.

A client is an address. Who comes from this very machine is a proxy, or programs of one owner, and says by
OpenAI's ``user`` for whom it asks: those take turns of their own. From elsewhere ``user`` counts for nothing,
or one client would have as many turns as it has names. What is sent on is no name that a person chose. Pure.
"""

from __future__ import annotations

import hashlib
import ipaddress


def whose_turn(address: str, user: str) -> str:
    """The client of a request from this address; ``user`` is empty where it says none."""
    group = address_group(address)
    if group is None:
        group = address or "local"
        return f"{group}/{hashlib.sha256(user.encode()).hexdigest()[:16]}" if user else group
    return group


def address_group(address: str) -> str | None:
    """What counts as one address: of IPv6 the network, in which a client has as many as it likes.

    None for this machine itself, and for a connection without an address.
    """
    if not address:
        return None
    known = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(known, ipaddress.IPv6Address):
        if known.ipv4_mapped is None and not known.is_loopback:
            return str(ipaddress.ip_network((known, 64), strict=False))
        known = known.ipv4_mapped or known
    return None if known.is_loopback else str(known)
