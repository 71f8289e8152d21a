"""A stand-in for the package of this name, which libp2p imports and Kvasir never uses.

The real one has no wheel and needs the headers of GMP. libp2p uses it for keys on the curve
P-256 alone; Kvasir's identities are Ed25519. So this one can be imported, and nothing more:
whatever is taken from it raises `StandInUsed` when it is called, compared, tested for truth or
looked into. It computes nothing, so it can never let a signature check pass.
"""

from fastecdsa import curve, ecdsa, encoding, keys, point, util
from fastecdsa._unusable import StandInUsed, unusable

__all__ = ["StandInUsed", "curve", "ecdsa", "encoding", "keys", "point", "util"]
__getattr__ = unusable(__name__)
