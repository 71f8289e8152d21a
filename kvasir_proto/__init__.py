"""The pure part of Kvasir: what is said between nodes, and what follows from it.

Nothing here opens a file or a socket, reads a clock or draws a random number: time, keys and bytes are
arguments, results are values. So every rule in this package is tested without a network, and two nodes
that are given the same inputs reach the same conclusion. It may import the standard library, msgpack and
cryptography, and never `kvasir_node`.
"""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 1
"""The version every message carries as `v`, and the only one this build speaks."""

SIGNATURE_DOMAIN: Final = b"kvasir/1"
"""The first thing under every signature, so that no signature of ours means anything elsewhere."""
