"""Stand-in for `fastecdsa.keys`: see the package."""

from fastecdsa._unusable import unusable

__getattr__ = unusable(__name__)
