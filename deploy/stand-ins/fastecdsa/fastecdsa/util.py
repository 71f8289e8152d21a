"""Stand-in for `fastecdsa.util`: see the package."""

from fastecdsa._unusable import unusable

__getattr__ = unusable(__name__)
