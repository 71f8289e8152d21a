"""Stand-in for `fastecdsa.encoding.util`: see the package."""

from fastecdsa._unusable import unusable

__getattr__ = unusable(__name__)
